"""The page of many boards in a browser: renewed without flicker, whole without a script, on any width."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from polythrottle.cli.boards import _document, _figures
from polythrottle.daemon.web import Tcp
from polythrottle.daemon.web.boards_page import BoardsServer, Look
from polythrottle.inspect.examination import BoardState, BoardWatch

pytestmark = pytest.mark.browser

TOKEN = "0123456789abcdef0123456789abcdef"
KINDS = ("jetson-nano", "jetson-orin-nano", "jetson-agx-orin")


@cache
def looked_at(count: int) -> tuple[BoardState, ...]:
    """Return what simulated boards of three kinds show."""
    watch = BoardWatch([f"sim:{KINDS[number % len(KINDS)]}?seed={number}" for number in range(count)])
    shown = watch.look()
    watch.close()
    return shown


def states(count: int) -> list[BoardState]:
    """Return the same as a list, to be changed."""
    return list(looked_at(count))


def look(boards: list[BoardState], at: str = "14:03:22") -> Look:
    """Return a look at boards in two groups."""
    shown = (boards, {state.uri: ("kitchen", "hall")[number % 2] for number, state in enumerate(boards)})
    return Look(_document(shown), _figures(shown), at, 1.0)


def served(tcp: Tcp) -> BoardsServer:
    """Serve; playwright keeps an event loop running on this thread."""
    with ThreadPoolExecutor(1) as aside:
        return aside.submit(BoardsServer, tcp).result()


def ended(server: BoardsServer) -> None:
    """End it, from a thread for the same reason."""
    with ThreadPoolExecutor(1) as aside:
        aside.submit(server.close).result()


@pytest.fixture
def server() -> Iterator[BoardsServer]:
    """Serve to everybody on this machine."""
    made = served(Tcp("127.0.0.1", 0, for_all=True))
    yield made
    ended(made)


@pytest.fixture
def browse(chromium: Any) -> Iterator[Any]:
    """Return what opens a page that keeps what its console said and whom it asked."""
    contexts = []

    def opened(port: int, path: str = "/", **options: Any) -> Any:
        context = chromium.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        contexts.append(context)
        page = context.new_page()
        page.complaints, page.asked = [], []
        page.on("console", lambda message: page.complaints.append(message.text))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(f"http://127.0.0.1:{port}{path}")
        return page

    yield opened
    for context in contexts:
        context.close()


def wait(page: Any, words: str) -> None:
    """Wait until the page says something."""
    page.wait_for_function("words => document.body.innerText.includes(words)", arg=words, polling=50)


def test_it_is_renewed_where_something_has_changed(browse: Any, server: BoardsServer) -> None:
    """What stays is the same element, scrolled as it was; a board that is lost is told; nobody else is asked."""
    boards = states(60)
    server.publish(look(boards))
    page = browse(server.port)
    page.evaluate("document.querySelectorAll('.board')[4].mine = true; scrollTo(0, 300)")
    lost = BoardState(boards[59].uri, failure="no route to host")
    hot = replace(boards[0], throttled=True, temperature_c=98.0, power_w=9.5)
    server.publish(look([hot, *boards[1:59], lost], "14:03:25"))
    wait(page, "looked at 14:03:25")
    wait(page, "no route to host")
    wait(page, "98.0 °C")
    assert page.evaluate("[...document.querySelectorAll('.board')].some(each => each.mine)")
    assert abs(page.evaluate("scrollY") - 300) < 200
    assert page.complaints == []
    assert {url.split("/")[2] for url in page.asked if not url.startswith("data:")} == {f"127.0.0.1:{server.port}"}


def test_it_is_whole_without_a_script(browse: Any, server: BoardsServer) -> None:
    """The first look is there, and the browser renews it by itself."""
    server.publish(look(states(6)))
    page = browse(server.port, java_script_enabled=False)
    assert "6 boards" in page.inner_text("h1")
    assert page.locator(".board").count() == 6
    assert page.locator("meta[http-equiv=refresh]").count() == 1


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (768, "dark"), (1280, "light"), (2560, "dark")])
def test_two_hundred_boards_fit_any_width(browse: Any, server: BoardsServer, width: int, scheme: str) -> None:
    """Nothing reaches over the edge, long names neither."""
    boards = states(200)
    boards[7] = replace(
        boards[7], uri=f"ssh://operator@{'long-name-' * 8}.example:2222/jetson?python=/usr/bin/python3.8"
    )
    server.publish(look([*boards, BoardState(f"ssh://{'x' * 200}", failure="y" * 300)]))
    page = browse(server.port, viewport={"width": width, "height": 800}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator(".board").count() == 200


def test_the_token_is_asked_for_and_kept(browse: Any, tmp_path: Path) -> None:
    """Without it nothing is shown, a wrong one is told, and one in the address is taken out of it."""
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text(TOKEN)
    server = served(Tcp("127.0.0.1", 0, token_file=path, for_all=True))
    try:
        server.publish(look(states(3)))
        page = browse(server.port)
        page.wait_for_selector("#login:not([hidden])")
        assert page.locator(".board").count() == 0
        page.fill("#token", "wrong")
        page.click("#login button")
        wait(page, "That is not the token.")
        page.fill("#token", TOKEN)
        page.click("#login button")
        wait(page, "sim:jetson-nano?seed=0")
        assert not page.is_visible("#login")
        page = browse(server.port, f"/#token={TOKEN}")
        wait(page, "sim:jetson-nano?seed=0")
        assert TOKEN not in page.url
    finally:
        ended(server)


def test_a_watcher_that_is_gone_or_hangs_is_told(browse: Any) -> None:
    """Figures that are old are not shown as if they were new."""
    server = served(Tcp("127.0.0.1", 0, for_all=True))
    server.publish(look(states(3)))
    page = browse(server.port)
    wait(page, "3 boards")
    page.evaluate("Date.now = (now => () => now() + 60000)(Date.now.bind(Date))")
    wait(page, "The boards were last looked at at 14:03:22")
    assert page.evaluate("document.body.classList.contains('old')")
    ended(server)
    wait(page, "The watcher does not answer; it is asked again.")
