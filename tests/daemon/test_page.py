"""The daemon's page as a file: one document that refers to nothing outside itself, with a policy that says so."""

import base64
import hashlib
import re

from polythrottle.daemon.web.page import load


def test_it_is_one_small_document() -> None:
    """Style and script are inside, nothing is fetched from elsewhere, and it stays below 100 kB."""
    html = load().body.decode()
    assert len(html.encode()) < 100_000
    assert not re.findall(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=[\"'](?!data:)", html)
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", html)
    assert "style=" not in html


def test_the_policy_names_this_script_and_this_style() -> None:
    """The hashes are those of what stands in the document, and everything else is forbidden."""
    html, policy = load().body.decode(), load().headers["Content-Security-Policy"]
    for tag in ("script", "style"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.S)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert {"connect-src 'self'", "frame-ancestors 'none'"} <= set(policy.split("; "))


def test_nothing_said_is_ever_made_into_markup() -> None:
    """The script has no way from text to markup or code."""
    html = load().body.decode()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", html)


def test_the_page_is_put_together_once() -> None:
    """It is the same value every time."""
    assert load() is load()
