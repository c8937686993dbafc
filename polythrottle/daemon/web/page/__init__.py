"""The pages the daemon serves, and that of many boards: each a document with its style and script inside.

Each asks nobody but where it came from.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

_SCRIPTS = ("words.js", "charts.js", "feed.js", "page.js")
_STYLES = ("page.css",)
BOARDS_HERE = b"<!--boards-->"
"""Where the boards go in their page."""


@dataclass(frozen=True)
class Page:
    """A document and the headers it is to be sent with."""

    body: bytes
    headers: Mapping[str, str]


@lru_cache(maxsize=None)
def load() -> Page:
    """Return the page of one service."""
    return _joined("page.html", _SCRIPTS)


@lru_cache(maxsize=None)
def load_node() -> Page:
    """Return the page of a server of services, from which each service's own page is reached."""
    return _joined("node.html", ("node.js",))


@lru_cache(maxsize=None)
def load_boards() -> Page:
    """Return the page of many boards, without them."""
    return _joined("boards.html", ("boards.js",), (*_STYLES, "boards.css"))


def _joined(document: str, scripts: Sequence[str], styles: Sequence[str] = _STYLES) -> Page:
    """Return a page, put together from its parts.

    Its policy lets the browser run this script and this style alone, named by their hashes, and connect to nothing but
    where the page came from (https://www.w3.org/TR/CSP3/).
    """
    style = "".join(map(_part, styles))
    script = "\n(() => {\n'use strict';\n" + "".join(map(_part, scripts)) + "})();\n"
    html = _part(document).replace("<style></style>", f"<style>{style}</style>")
    body = html.replace("<script></script>", f"<script>{script}</script>").encode()
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    )
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return Page(body, headers)


def _part(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
