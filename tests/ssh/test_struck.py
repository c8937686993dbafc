"""A connection that is struck at each kind of message: nothing is left changed on the board, or it is named."""

import multiprocessing
import sys
from pathlib import Path

import pytest
from boards_over_ssh import await_that, far_sides, held, planted

from polythrottle.actuation import standing
from polythrottle.backends.ssh import SshDevice
from polythrottle.board.link import SSH
from polythrottle.cli.commands import run
from polythrottle.domain.errors import DeviceError, TrialError
from polythrottle.metering.point_measurement import measure
from polythrottle.tuning.setup import Setup

pytestmark = pytest.mark.ssh

RELAY = Path(__file__).with_name("relay.py")
STEPS = (
    *("describe:0", "work:0", "space:0", "take:0", "work:1", "work:2"),
    *("apply:0", "verify:0", "hand_over:0", "release:0"),
)
"""Open the device, open the workload, list the points, enter, set and begin a window, look at it, set once more, see
whether it holds, leave in place, hang up; further looks at a window are as the first."""


def session(uri: str) -> None:
    """Measure a point over SSH and leave it in place.

    Raises:
        DeviceError: If the connection breaks.
        TrialError: If the window does.
    """
    words = Setup(device=uri, workload="cmd:sleep 0.01", knobs=("mem_hz",), queries=5, seconds=0.1)
    device, workload = words.open()
    assert isinstance(device, SshDevice)
    try:
        space = device.space * workload.space
        point = space.default.moved({"mem_hz": device.space.knob("mem_hz").levels[0]})
        with words.closing(workload), device:
            measure(device, workload, point, words.window(device))
            device.apply(point)
            assert device.altered() == ()
            device.hand_over("profile of a test", 60.0)
    finally:
        device.board.close()


def broken(uri: str, victim: str) -> bool:
    """Return whether a session breaks: with one line where the desk lives, else with the desk."""
    if victim == "desk":
        child = multiprocessing.get_context("spawn").Process(target=session, args=(uri,))
        child.start()
        child.join()
        return child.exitcode == -9
    try:
        session(uri)
        return False
    except (DeviceError, TrialError) as error:
        told = str(error)
    return "\n" not in told and bool(told)


@pytest.mark.parametrize(
    ("victim", "when"), [("line", "before"), ("line", "after"), ("far-side", "after"), ("desk", "after")]
)
def test_whatever_is_struck_at_whichever_message_nothing_is_left_or_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str, when: str
) -> None:
    """At every kind of message: the board is put back by itself, or what stands is on record and restored."""
    (tmp_path / "home").mkdir()
    root = planted(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = held(root)
    for step in STEPS:
        log = tmp_path / f"{step}.log"
        relay = [sys.executable, str(RELAY), str(tmp_path / "home"), str(log), step, when, victim]
        monkeypatch.setenv(SSH, " ".join(relay))
        done = broken(f"ssh://nano/jetson?root={root}&python={sys.executable}", victim)
        # What is said at the very end, when all is in place, need not be heard.
        assert done or step in ("hand_over:0", "release:0"), step
        assert step in log.read_text().split()
        await_that(lambda: not far_sides(tmp_path), "the far side stays")
        await_that(lambda: held(root) == before or bool(standing()), "the board stays changed, and nobody says so")
        if standing():
            assert run(["restore", "--device", f"jetson?root={root}"]) == 0, step
        assert held(root) == before, step
    assert standing() == ()
