"""What was applied for good stays true: set anew after a start of its driver or GPU, never over somebody else's."""

import io
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polythrottle.actuation import Actuator, Control, SysFiles, confirm, restore_all, standing
from polythrottle.actuation import reapply as program
from polythrottle.actuation import restore as restoring
from polythrottle.actuation.drivers.controls import Start
from polythrottle.actuation.reapply import Keeper, Lapse
from polythrottle.actuation.restore import lapsed
from polythrottle.actuation.state.lease import Lease, Passed
from polythrottle.actuation.state.record import Kept, _kept
from polythrottle.actuation.state.site import Site
from polythrottle.backends import open_device
from polythrottle.cli.commands import run
from polythrottle.domain.errors import KnobRejected
from polythrottle.domain.ports import Lasting
from polythrottle.inspect.machine import record_findings
from polythrottle.testing.nvml import FakeNvml, compiler
from tests.actuators import until

LEVELS = frozenset(map(str, range(100)))
BOOT = Path("/proc/sys/kernel/random/boot_id")


@pytest.fixture
def knob(tmp_path: Path) -> Iterator[Path]:
    """Return a file that holds 1; what keeps it ends with the test."""
    file = tmp_path / "knob"
    file.write_text("1\n")
    yield file
    leases = [each.lease for each in standing()]
    restore_all(force=True)
    for lease in leases:
        with suppress(ProcessLookupError):
            if lease.pid:
                os.kill(lease.pid, signal.SIGKILL)


def kept(*files: Path, text: str = "10", seconds: float | None = None) -> Lease:
    """Apply a value to files for good, and return the lease."""
    actuator = Actuator("board", guarded=False)
    with actuator:
        for file in files:
            actuator.allow(Control(str(file), LEVELS))
            actuator.write(str(file), text)
        actuator.hand_over("profile x", seconds)
    return standing()[0].lease


def keeper(controls: SysFiles | None = None) -> Keeper:
    """Return a keeper of the board in this process."""
    return Keeper(Site.of("board"), BOOT.read_text().strip(), standing()[0].lease.token, controls)


def start_anew(file: Path, text: str = "1\n") -> None:
    """Make a file anew, as a driver that is loaded again does with its files in sysfs: with another number."""
    new = file.with_name("new")
    new.write_text(text)
    os.replace(new, file)


def test_after_a_driver_reload_it_is_set_anew(knob: Path) -> None:
    """A control that its driver has made anew, and that holds what it held at first, gets its setting again; once."""
    kept(knob)
    watch = keeper()
    assert watch.look() == ()
    start_anew(knob)
    assert [each.anew for each in lapsed("board")] == [True]
    assert watch.look() == (str(knob),)
    assert knob.read_text() == "10"
    assert watch.look() == ()
    assert lapsed("board") == ()
    start_anew(knob)  # and again: the start that is on record is the latest
    assert keeper().look() == (str(knob),)
    assert run(["restore"]) == 0
    assert knob.read_text() == "1"


@pytest.mark.parametrize(
    ("reload", "text"), [(False, "1"), (False, "7"), (True, "7")], ids=["put back", "changed", "changed after a reload"]
)
def test_what_somebody_else_has_set_since_is_left(
    knob: Path, reload: bool, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A value without a new start, or another one than the first, is somebody's and newer, and told."""
    kept(knob)
    start_anew(knob, text) if reload else knob.write_text(text)
    assert keeper().look() == ()
    assert knob.read_text() == text
    finding = next(each for each in record_findings() if each.subject == "board")
    assert finding.works is False
    assert f"{knob} holds {text}, was set to 10: changed by someone else since" in finding.explanation
    capsys.readouterr()
    assert run(["restore"]) == (0 if text == "1" else 6)
    assert f"{knob} holds {text}, was" in capsys.readouterr().out
    assert knob.read_text() == text


def test_a_reload_that_nobody_kept_is_told_by_restore(knob: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where everything holds its original already, restore says that what was applied did not stand any more."""
    kept(knob)
    start_anew(knob)
    assert run(["restore"]) == 0
    assert f"lapsed    {knob} holds 1, was set to 10: its driver or device has started anew" in capsys.readouterr().out


def test_what_is_kept_ends_with_its_lease(knob: Path) -> None:
    """After a restore nothing is set anew."""
    kept(knob)
    watch = keeper()
    restore_all()
    start_anew(knob)
    assert not watch.keeps
    with pytest.raises(Passed):
        watch.look()
    assert knob.read_text() == "1\n"


@pytest.mark.parametrize("confirmed", [False, True])
def test_the_guard_that_stays_behind_becomes_the_keeper(knob: Path, confirmed: bool) -> None:
    """Applied for good, or confirmed: a process keeps it, which is no writer of the device and ends with the lease."""
    lease = kept(knob, seconds=30 if confirmed else None)
    if confirmed:
        confirm()
    command = Path(f"/proc/{lease.pid}/cmdline")
    assert until(lambda: b"polythrottle.actuation.reapply" in command.read_bytes())
    assert next(each for each in record_findings() if each.subject == "board").works is None
    os.kill(lease.pid, signal.SIGKILL)
    assert until(lambda: not standing()[0].lease.alive)
    finding = next(each for each in record_findings() if each.subject == "board")
    assert "its keeper has died" in finding.explanation
    assert restore_all()[0].clean


def test_the_keeper_looks_again_and_again_until_a_restore(knob: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look that fails is followed by another; with the lease gone the process ends."""
    token = kept(knob).token
    site = Site.of("board")
    fails = [True, False]
    turns: list[str] = []

    def turn(wait_s: float) -> None:
        turns.append(knob.read_text())
        if len(turns) == 3:
            restore_all()

    look = Keeper.look

    def failing(self: Keeper) -> tuple[str, ...]:
        if fails and fails.pop(0):
            raise KnobRejected("busy")
        return look(self)

    monkeypatch.setattr(program, "LOOK_S", 0.0)
    monkeypatch.setattr(program, "time", SimpleNamespace(sleep=turn, monotonic=time.monotonic))
    monkeypatch.setattr(Keeper, "look", failing)
    start_anew(knob)
    program.main([str(site.folder), site.stem, BOOT.read_text().strip(), str(token)])
    assert turns == ["1\n", "10", "10"]
    assert knob.read_text() == "1"


def test_what_has_lapsed_is_told_in_one_line_that_can_be_printed(
    knob: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the control holds and held, and whoever prints it: on a terminal, or one that knows few letters."""
    odd = "1\u00ad\u200b\ue000" + "x" * 500
    knob.write_text(odd)
    kept(knob)
    start_anew(knob, odd)
    (lapse,) = lapsed("board")
    assert str(lapse).isprintable()
    assert len(str(lapse)) < 500
    assert str(Lapse("a\u00ad", "b\u200b", "c\x1b\n", anew=True)).isprintable()
    assert restoring.main([]) == 0
    told = capsys.readouterr().out
    assert "was set to 10: its driver or device has started anew" in told
    assert all(line.isprintable() for line in told.splitlines())
    knob.write_text(odd)
    kept(knob)
    knob.write_text("9\u00ad\u200b")
    assert restoring.main([]) == 6
    told = capsys.readouterr().out
    assert f"{knob} holds 9" in told
    assert all(line.isprintable() for line in told.splitlines())


def test_what_standard_output_cannot_encode_does_not_hide_what_is_left(
    knob: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an old locale: the exit code is that of the restoring, and the line is there with its signs spelled out."""
    kept(knob)
    knob.write_text("\u2026")
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", out)
    assert restoring.main([]) == 6
    assert f"{knob} holds \\u2026, was 1".encode() in out.buffer.getvalue()  # type: ignore[attr-defined]


class Ordered(SysFiles):
    """A driver that takes no minimum above its maximum, as devfreq does (drivers/devfreq/devfreq.c, min_freq_store)."""

    def write(self, key: str, text: str) -> None:
        """Write, unless the two would cross."""
        path = Path(key)
        if path.name == "min" and int(text) > int(path.with_name("max").read_text()):
            raise OSError(22, "Invalid argument")
        super().write(key, text)


def test_controls_that_need_an_order_get_it(tmp_path: Path, knob: Path) -> None:
    """What is refused at first is tried again once another control has its value."""
    low, high = tmp_path / "min", tmp_path / "max"
    for file in (low, high):
        file.write_text("1")
    actuator = Actuator("board", guarded=False)
    actuator.allow(Control(str(low), LEVELS), Control(str(high), LEVELS))
    with actuator:
        actuator.write(str(high), "20")
        actuator.write(str(low), "10")
        actuator.write(str(high), "15")
        actuator.hand_over("profile x", None)
    for file in (high, low):
        start_anew(file, "1")
    assert set(keeper(Ordered()).look()) == {str(low), str(high)}
    assert (low.read_text(), high.read_text()) == ("10", "15")


def test_a_kept_line_that_is_damaged_is_damage(knob: Path) -> None:
    """A line that does not say what is kept in the right form is named, and nothing is set by it."""
    kept(knob)
    record = Site.of("board").record
    text = record.read_bytes()
    assert b'"kept"' in text
    record.write_bytes(text.replace(b'{"kept": {', b'{"kept": ["x", {'))
    start_anew(knob)
    assert keeper().look() == ()
    assert standing()[0].damage


@pytest.mark.parametrize(
    "told", [None, "x", [], ["x"], {"k": "10"}, {"k": ["10", 1]}, {"k": [10, 1, 2]}, {"k": ["a\n", 1, 2]}]
)
def test_what_says_nothing_of_what_is_kept_is_no_line(told: Any) -> None:
    """Even where its checksum is right, as of another version's."""
    assert _kept(told) is None
    assert _kept({"k": ["10", 1, 2]}) == {"k": Kept("10", Start(1, 2))}


def test_a_lost_lease_ends_the_keeper(knob: Path) -> None:
    """A file that holds none is the user's end of it; one that was deleted is laid anew."""
    kept(knob)
    watch, site = keeper(), Site.of("board")
    assert watch.keeps
    site.lease.unlink()
    assert watch.keeps
    site.lease.write_text("")
    assert not watch.keeps


@pytest.mark.skipif(compiler() is None, reason="no C compiler, so the stand-in NVIDIA driver cannot be built")
def test_a_gpu_gets_its_locks_again_after_a_reset(tmp_path: Path) -> None:
    """Locks that nobody can read back are set anew once the energy counter has begun again; a limit of another's stays.

    A driver that is loaded again forgets locks and limits, and counts from nothing (NVML reference,
    nvmlDeviceSetGpuLockedClocks and nvmlDeviceGetTotalEnergyConsumption).
    """
    with FakeNvml(tmp_path / "nvml", ["a100"]) as fake:
        device = open_device("nvml:0")
        assert isinstance(device, Lasting)
        before = fake.snapshot()
        point = next(each for each in device.space if each["gpu_max_hz"] < device.space.default["gpu_max_hz"])
        with device:
            device.apply(point)
            name = device.hand_over("profile x", None)
        after = fake.snapshot()
        assert after != before
        lease = standing()[0].lease
        watch = Keeper(Site.of(name), BOOT.read_text().strip(), lease.token)
        fake.advance(60)
        assert watch.look() == ()
        fake.reload_driver()
        assert fake.snapshot() == before
        done = watch.look()
        assert done
        assert all("gpu_clocks" in key or "power_limit" in key or "mem_clocks" in key for key in done)
        assert fake.snapshot() == after
        fake.advance(5)
        assert watch.look() == ()
        assert restore_all(device=name)[0].clean
        assert fake.snapshot() == before
        os.kill(lease.pid, signal.SIGKILL)
