"""The page behind the daemon's own server: token, stream, studies, and a server that starts again."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from scripted_daemon import status

from polythrottle.daemon.commands import Command, StartStudy, StopStudy
from polythrottle.daemon.loop.mailbox import Mailbox
from polythrottle.daemon.status import Happened, StudyShown
from polythrottle.daemon.web import ApiServer, Tcp, WebOptions, serve
from polythrottle.domain.errors import DeviceError

pytestmark = pytest.mark.browser

TOKEN = "0123456789abcdef0123456789abcdef"


@dataclass
class Loop:
    """A control loop that turns every tenth of a second and does what is wished of studies.

    Args:
        desk: Where it is asked.
        asked: What was wished.
        ended: Ends it.
    """

    desk: Mailbox = field(default_factory=Mailbox)
    asked: list[Command] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Turn until it is ended."""
        turn, study = 4600, None
        self.desk.tell([Happened(1, "2026-03-14T06:00:00+00:00", "phase", "efficientnet-b4 is up")])
        while not self.ended.wait(0.1):
            turn += 1
            for each in self.desk.wishes():
                self.asked.append(each.wish)
                study = self.done(each.wish, each.answer, study)
            self.desk.publish(status(turn, study=study))

    @staticmethod
    def done(wish: Command, answer: "Future[Any]", study: StudyShown | None) -> StudyShown | None:
        """Answer a wish, and return the study there is then."""
        if isinstance(wish, StartStudy):
            answer.set_result({"words": "a study begins", "id": "s1"})
            return StudyShown("s1", "running", 0, wish.trials)
        if isinstance(wish, StopStudy) and study is not None:
            answer.set_result({"words": "the study ends"})
            return replace(study, state="stopped")
        answer.set_exception(DeviceError("another process holds the board"))
        return study


@pytest.fixture
def loop() -> Iterator[Loop]:
    """Run a control loop."""
    made = Loop()
    thread = threading.Thread(target=made.run)
    thread.start()
    yield made
    made.ended.set()
    thread.join()


def server(folder: Path, loop: Loop, port: int = 0) -> ApiServer:
    """Serve a control loop over TCP with a token."""
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    options = WebOptions(folder / "daemon.sock", tcp=Tcp("127.0.0.1", port, token_file=token))
    with ThreadPoolExecutor(1) as aside:  # playwright keeps an event loop running on this thread
        return aside.submit(serve, loop.desk, options).result()


@pytest.fixture
def page(chromium: Any) -> Iterator[Any]:
    """Open an empty page that keeps what its console said."""
    context = chromium.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    page.complaints = []
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    yield page
    context.close()


def wait(page: Any, name: str, words: str) -> None:
    """Wait until an element says something."""
    page.wait_for_function("([n, w]) => document.getElementById(n).innerText.includes(w)", arg=[name, words])


def test_the_daemons_own_server_shows_and_steers(page: Any, tmp_path: Path, loop: Loop) -> None:
    """With the token in the address the page is live, draws the last seconds, and starts and stops a study."""
    with server(tmp_path, loop) as serving:
        page.goto(f"http://127.0.0.1:{serving.port}/#token={TOKEN}")
        page.wait_for_selector(".live.fresh")
        wait(page, "title", "Jetson AGX Orin")
        wait(page, "events", "efficientnet-b4 is up")
        assert page.get_attribute("#spark-power .trace", "d").startswith("M")
        page.fill("#trials", "12")
        page.click("#study-start")
        wait(page, "study", "0 of at most 12 trials")
        page.click("#study-stop")
        wait(page, "study", "Study stopped")
        page.click("#release")
        wait(page, "said", "another process holds the board")
        assert loop.asked[:2] == [StartStudy(12), StopStudy("s1")]
        assert [each for each in page.complaints if "503" not in each and "409" not in each] == []


def test_without_the_token_it_asks_for_it(page: Any, tmp_path: Path, loop: Loop) -> None:
    """The page opens without a token, shows nothing, and is live once it is given."""
    with server(tmp_path, loop) as serving:
        page.goto(f"http://127.0.0.1:{serving.port}/")
        page.wait_for_selector(".live.locked")
        assert "Waiting for the daemon" in page.inner_text("#title")
        page.fill("#token", TOKEN)
        page.press("#token", "Enter")
        page.wait_for_selector(".live.fresh")


def test_a_server_that_starts_again_is_found_again(page: Any, tmp_path: Path, loop: Loop) -> None:
    """A daemon that is restarted is said to be gone, and then is live without a reload."""
    with server(tmp_path, loop) as serving:
        port = serving.port
        page.goto(f"http://127.0.0.1:{port}/#token={TOKEN}")
        page.wait_for_selector(".live.fresh")
    assert port is not None
    page.wait_for_selector(".live.lost")
    with server(tmp_path, loop, port):
        page.wait_for_selector(".live.fresh")
        wait(page, "events", "efficientnet-b4 is up")
        assert page.locator("#events li").count() == 1
