"""A real Chromium, and a daemon that follows a script behind the daemon's own page."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
from scripted_daemon import Daemon, serving

from polythrottle.daemon.web.page import load

ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """Start the browser, or skip where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("chromium is not installed")
    with api.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, headless=True, args=list(ARGUMENTS))
        yield browser
        browser.close()


@dataclass
class Seen:
    """What a browser did on its own.

    Args:
        requests: Addresses it asked for.
        complaints: Its console's warnings and errors, and errors nobody caught.
    """

    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


@dataclass
class View:
    """A page of the daemon in a browser."""

    page: Any
    script: Daemon
    url: str
    seen: Seen

    def text(self, name: str) -> str:
        """Return the text of an element by its id."""
        return str(self.page.inner_text(f"#{name}"))

    def wait(self, name: str, words: str) -> None:
        """Wait until an element says something."""
        self.page.wait_for_function(
            "([name, words]) => document.getElementById(name)?.innerText.includes(words)", arg=[name, words], polling=50
        )


Opens = Callable[..., View]


@pytest.fixture
def opens(chromium: Any) -> Iterator[Opens]:
    """Return what opens the page of a scripted daemon and waits until it is live."""
    with ExitStack() as stack:

        def opened(script: Daemon | None = None, path: str = "/", live: bool = True, **context: Any) -> View:
            script = script or Daemon()
            script.page = lambda: (load().body, load().headers)
            url = stack.enter_context(serving(script))
            browsing = chromium.new_context(**{"viewport": {"width": 1280, "height": 800}, **context})
            stack.callback(browsing.close)
            page, seen = browsing.new_page(), Seen()
            page.set_default_timeout(30_000)
            page.on("request", lambda request: seen.requests.append(request.url))
            page.on("console", lambda message: seen.complaints.append(f"{message.type}: {message.text}"))
            page.on("pageerror", lambda error: seen.complaints.append(str(error)))
            page.goto(url + path)
            if live:
                page.wait_for_selector(".live.fresh")
            return View(page, script, url, seen)

        yield opened
