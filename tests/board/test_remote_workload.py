"""A workload on a board over SSH whose connection is lost, or whose answer is not waited for."""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from boards_over_ssh import await_that, far_sides, held, planted, stand_in

from polythrottle.backends.ssh import SshDevice
from polythrottle.board.link import SSH
from polythrottle.board.remote_workload import BoardWorkload, Told
from polythrottle.domain.errors import DeviceError
from polythrottle.domain.space import OperatingPoint
from polythrottle.metering.point_measurement import measure
from polythrottle.tuning.setup import Setup


class Session:
    """A board, and a workload that is open on it."""

    def __init__(self, folder: Path) -> None:
        self.root = planted(folder)
        self.before = held(self.root)
        self.words = Setup(
            device=f"ssh://nano/jetson?root={self.root}&python={sys.executable}",
            workload="cmd:sleep 0.02",
            knobs=("mem_hz",),
            queries=10,
            seconds=0.2,
        )
        device, workload = self.words.open()
        assert isinstance(device, SshDevice)
        assert isinstance(workload, BoardWorkload)
        self.device, self.workload = device, workload

    @property
    def point(self) -> OperatingPoint:
        """A point that is not the board's own."""
        return self.device.space.default.moved({"mem_hz": self.device.space.knob("mem_hz").levels[0]})

    def measure(self) -> int | None:
        """Measure it, and return how many queries that took."""
        self.device.apply(self.point)
        return measure(self.device, self.workload, self.point, self.words.window(self.device)).latency.queries

    def when_told(self, kind: str, what: Callable[[], None]) -> None:
        """Have something happen before the answer that follows the first event of a kind is waited for."""
        work = self.device.board.work
        seen: list[str] = []

        def asked(message: dict[str, object]) -> object:
            if kind in seen:
                seen.clear()
                what()
            answer = work(message)
            seen.extend(str(each[0]) for each in answer["events"])
            return answer

        self.workload.told._ask = asked  # type: ignore[assignment]


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """A board that a stand-in for ssh leads to."""
    monkeypatch.setenv(SSH, stand_in(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    made = Session(tmp_path)
    yield made
    made.device.board.close()


class Interrupted:
    """A board at whose second message somebody presses Ctrl-C."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def work(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Answer that the load is warm, be interrupted, and answer what is left of the window."""
        self.asked.append([order["do"] for order in message["say"]])
        if len(self.asked) == 2:
            raise KeyboardInterrupt
        left: list[list[Any]] = [["q", {}], ["error", {"kind": "TrialError", "words": "it failed"}], ["idled", 0]]
        return {"events": {1: [["warm", 1]], 3: left[:1], 4: left[1:]}[len(self.asked)]}


def test_a_window_whose_answer_is_not_waited_for_is_left_at_once_and_passed_over_later() -> None:
    """Nothing more is asked of it when it is left; who begins the next one has it ended, and skips what it tells."""
    board = Interrupted()
    told = Told(board.work)
    told.mend()
    told.say(do="begin")
    told.next("warm")
    with pytest.raises(KeyboardInterrupt):
        told.peek()
    assert told.failed
    assert board.asked == [["begin"], []]
    told.mend()
    assert board.asked[2:] == [["stop", "end", "idle"], []]
    told.mend()
    assert len(board.asked) == 4


@pytest.mark.slow
def test_an_interrupted_window_is_restored_and_the_board_measures_again(session: Session) -> None:
    """A Ctrl-C while an answer is waited for stays a Ctrl-C; over the same connection the next window is whole."""
    line = session.device.board.line
    wait = line._own_answer

    def interrupt() -> None:
        def interrupted(*_: Any) -> Any:
            line._own_answer = wait  # type: ignore[method-assign]
            raise KeyboardInterrupt

        line._own_answer = interrupted  # type: ignore[method-assign, assignment]

    session.when_told("warm", interrupt)
    with session.words.closing(session.workload):
        with pytest.raises(KeyboardInterrupt), session.device:
            session.measure()
        assert held(session.root) == session.before
        session.when_told("never", interrupt)
        with session.device:
            assert (session.measure() or 0) >= 10
    assert session.device.board._link.connections == 1


@pytest.mark.slow
@pytest.mark.parametrize("another", [False, True])
def test_a_connection_that_is_lost_in_a_window_ends_the_trial(session: Session, tmp_path: Path, another: bool) -> None:
    """In one line, also where the thread that keeps the lease has connected anew before; the board is put back."""

    def lose() -> None:
        os.kill(far_sides(tmp_path)[0], signal.SIGKILL)
        if another:
            with pytest.raises(DeviceError, match="the connection to ssh://nano was lost"):
                session.device.board.ask("hello")
            session.device.board.ask("hello")

    session.when_told("warm", lose)
    with session.words.closing(session.workload), pytest.raises(DeviceError) as told, session.device:
        session.measure()
    assert str(told.value).startswith("the connection to ssh://nano was lost")
    await_that(lambda: held(session.root) == session.before, "the board stays changed")
