"""Leases, the guard, profiles applied by hand, and restoring from the records alone."""

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from polythrottle.actuation import (
    UNREADABLE,
    Actuator,
    Control,
    Setting,
    SysFiles,
    confirm,
    guard,
    restore_all,
    span,
    standing,
)
from polythrottle.actuation import restore as program
from polythrottle.actuation.reapply import Keeper, StateCopy
from polythrottle.actuation.state import presence
from polythrottle.actuation.state import record as records
from polythrottle.actuation.state.lease import LEASE_S, Fence, boot_s
from polythrottle.actuation.state.record import _sealed
from polythrottle.actuation.state.site import Site, boot_id, machine
from polythrottle.cli.commands import run
from polythrottle.domain.errors import (
    BadFile,
    DeviceError,
    InvalidInput,
    KnobRejected,
    PermissionDenied,
    PolythrottleError,
    StorageError,
    UnknownName,
)
from polythrottle.inspect.machine import record_findings

LEVELS = frozenset(map(str, range(1000)))


@pytest.fixture
def knob(tmp_path: Path) -> Path:
    """Return a file that holds 1."""
    path = tmp_path / "knob"
    path.write_text("1\n")
    return path


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder of records, found by every process of this test."""
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", str(tmp_path / "state"))
    yield tmp_path / "state" / "originals"
    if (tmp_path / "state").exists():
        restore_all(force=True)


def board(knob: Path, guarded: bool = False) -> Actuator:
    """Return an actuator with one control."""
    made = Actuator("board", guarded=guarded)
    made.allow(Control(str(knob), LEVELS))
    return made


def two_written(knob: Path) -> tuple[Actuator, Path]:
    """Return an entered actuator that has written 10 to one control and 20 to another, which held 2."""
    other = knob.with_name("other")
    other.write_text("2")
    made = board(knob)
    made.allow(Control(str(other), LEVELS))
    made.__enter__()
    made.write(str(knob), "10")
    made.write(str(other), "20")
    return made, other


def eventually(what: Callable[[], bool]) -> bool:
    """Say whether something comes true within a minute."""
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        if what():
            return True
        time.sleep(0.02)
    return False


HOLDER = """
import os, signal, sys, time
from polythrottle.actuation import Actuator, Control, SysFiles
from polythrottle.actuation.state import lease; from polythrottle.actuation import watchdog as watch

board = Actuator("board", guarded=sys.argv[2] != "alone").__enter__()
board.allow(Control(sys.argv[1], frozenset({"10"})))
board.write(sys.argv[1], "10")
print("ready", board._watch._guard.pid if board._watch else "", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(knob: Path, state: Path) -> Iterator[Callable[[str], "subprocess.Popen[str]"]]:
    """Return a way to start a process that writes 10 and then does nothing more."""
    children: list[subprocess.Popen[str]] = []

    def start(how: str = "guarded") -> "subprocess.Popen[str]":
        child = subprocess.Popen([sys.executable, "-c", HOLDER, str(knob), how], stdout=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stdout is not None
        child.guard = child.stdout.readline().split()[1:]  # type: ignore[attr-defined]
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def test_a_guard_restores_after_the_writer_is_killed(
    knob: Path, holder: Callable[..., "subprocess.Popen[str]"]
) -> None:
    """SIGKILL of the writer brings the original back by itself."""
    child = holder()
    assert knob.read_text() == "10"
    child.kill()
    assert eventually(lambda: knob.read_text() == "1")
    assert eventually(lambda: not standing())


def test_a_killed_guard_leaves_the_writer_its_own_restoring(knob: Path, state: Path) -> None:
    """Without its guard the writer still restores on leaving."""
    with board(knob, guarded=True) as device:
        device.write(str(knob), "10")
        assert device._watch is not None
        device._watch._guard.kill()
    assert knob.read_text() == "1"


def test_with_writer_and_guard_killed_the_command_restores(
    knob: Path, holder: Callable[..., "subprocess.Popen[str]"]
) -> None:
    """The next net: polythrottle-restore, with nothing but the record."""
    child = holder()
    os.kill(int(child.guard[0]), signal.SIGKILL)  # type: ignore[attr-defined]
    child.kill()
    child.wait()
    assert knob.read_text() == "10"
    done = subprocess.run(
        [sys.executable, "-m", "polythrottle.actuation.restore"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, knob.read_text()) == (0, "1")
    assert "board: 1 put back" in done.stdout


def test_a_hung_writer_loses_its_lease_and_is_refused_when_it_wakes(knob: Path, state: Path) -> None:
    """Once the lease has run out another may restore; the late writer's token is too old."""
    device = board(knob).__enter__()
    device.write(str(knob), "10")
    Fence(Site.of("board").lease, device._boot()).change(device._token, expires_s=boot_s() - 1)
    assert restore_all()[0].restored == (str(knob),)
    assert knob.read_text() == "1"
    with pytest.raises(DeviceError, match="no longer valid"):
        device.write(str(knob), "20")
    with pytest.raises(DeviceError, match="no longer valid"):
        device.__exit__(None, None, None)
    assert knob.read_text() == "1"


def test_a_stopped_writer_is_taken_for_hung(
    knob: Path, holder: Callable[..., "subprocess.Popen[str]"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that does not renew its lease is restored by its guard at the lease's end, though it lives."""
    child = holder()
    child.send_signal(signal.SIGSTOP)
    fence = Fence(Site.of("board").lease, board(knob)._boot())
    fence.change(fence.read().token, expires_s=boot_s() + 0.1)
    os.kill(int(child.guard[0]), signal.SIGKILL)  # type: ignore[attr-defined]  # its next look is seconds away
    time.sleep(0.2)
    restore_all()
    assert knob.read_text() == "1"


def test_a_lock_that_outlives_its_writer_for_a_moment_is_waited_for(
    knob: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guard that a killed writer was about to start has inherited it, until it becomes another program."""
    device = board(knob).__enter__()
    device.write(str(knob), "10")
    lock, device._lock = device._lock, None
    assert lock is not None
    assert device._fence is not None
    device._fence.change(device._token, pid=2**22 + 1, started=1)  # beyond the highest number a process can have
    monkeypatch.setattr(program.time, "sleep", lambda pause_s: os.close(lock))
    restore_all()
    assert knob.read_text() == "1"


def test_a_living_writer_is_not_disturbed_unless_forced(
    knob: Path, holder: Callable[..., "subprocess.Popen[str]"]
) -> None:
    """Restore names who is steering; with force it ends the lease."""
    child = holder("alone")
    with pytest.raises(DeviceError, match=f"steered by process {child.pid}"):
        restore_all()
    assert knob.read_text() == "10"
    assert restore_all(force=True)[0].clean
    assert knob.read_text() == "1"


def applied(knob: Path, seconds: float | None, confirmed_s: float | None = None) -> None:
    """Apply 10 by hand."""
    device = board(knob).__enter__()
    device.write(str(knob), "10")
    device.hand_over("profile x", seconds, confirmed_s)


def test_a_restoring_that_a_stopped_guard_holds_up_names_what_is_left(
    knob: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a first try has ended the lease, a guard that does not run keeps the lock; what stands changed is said."""
    applied(knob, 30)
    monkeypatch.setattr(program, "_WAIT_S", 0.05)
    (site,) = Site.all(state)
    fence = Fence(site.lease, boot_id())
    guard_pid = fence.read().pid
    assert guard_pid not in (None, os.getpid())
    os.kill(guard_pid, signal.SIGSTOP)
    try:
        fence.release(fence.take("restoring (process 1)", None), settled=False)
        with pytest.raises(DeviceError, match=f"steered by .*on record, and perhaps still changed: {knob}"):
            restore_all()
    finally:
        os.kill(guard_pid, signal.SIGCONT)


def test_a_profile_that_nobody_confirms_reverts(knob: Path, state: Path) -> None:
    """The guard stays behind and puts the original back in time."""
    applied(knob, 0.4)
    assert knob.read_text() == "10"
    assert eventually(lambda: knob.read_text() == "1")
    assert eventually(lambda: not standing())


def test_a_confirmed_profile_stays_until_restored(knob: Path, state: Path) -> None:
    """Confirmed in time it stands, refuses other writers with its name, and restore ends it."""
    applied(knob, 30)
    assert confirm()[0].lease.kept
    with pytest.raises(DeviceError, match="profile x"):
        board(knob).__enter__()
    assert restore_all()[0].clean
    assert knob.read_text() == "1"
    with pytest.raises(DeviceError, match="nothing waits"):
        confirm()


@pytest.mark.parametrize("confirmed", [True, False])
def test_a_profile_that_changes_nothing_is_meant_by_its_whole_name(state: Path, confirmed: bool) -> None:
    """Without a record only the names of its files tell the device, and they hold its own in part alone."""
    name = "jetson?root=/tmp/a board"
    Actuator(name).__enter__().hand_over("profile x", 30)
    if confirmed:
        assert confirm(name)[0].lease.kept
    assert [outcome.left for outcome in restore_all(device=name)] == [()]
    assert not standing()


def test_a_profile_for_a_time_ends_after_it(knob: Path, state: Path) -> None:
    """Confirming starts the time it was applied for."""
    applied(knob, 30, confirmed_s=0.3)
    left_s = confirm()[0].expires_in_s
    assert left_s is not None
    assert left_s < 1
    assert eventually(lambda: knob.read_text() == "1")


def test_a_kept_profile_needs_no_process(knob: Path, state: Path) -> None:
    """Kept, it holds the device by its lease alone; a restore frees it for the next writer."""
    applied(knob, None)
    with pytest.raises(DeviceError, match="profile x; polythrottle restore"):
        board(knob).__enter__()
    restore_all()
    with board(knob) as device:
        device.write(str(knob), "20")
    assert knob.read_text() == "1"


def test_what_waits_for_confirmation_can_be_restored_at_once(knob: Path, state: Path) -> None:
    """Restore ends a profile applied by hand, and the device is free right after."""
    applied(knob, 30)
    assert standing()[0].lease.holder == "profile x"
    restore_all()
    assert knob.read_text() == "1"
    with board(knob):
        pass


def test_nothing_is_written_that_was_not_allowed(knob: Path, state: Path) -> None:
    """Neither another control nor another value; and nothing of a list with one bad setting."""
    with board(knob) as device:
        for bad in (Setting(str(knob), "1000"), Setting("/elsewhere", "1")):
            with pytest.raises(KnobRejected, match="nothing was written"):
                device.apply((Setting(str(knob), "5"), bad))
        assert knob.read_text() == "1\n"


@pytest.mark.parametrize(("low", "high", "first"), [(800, 900, "max"), (50, 90, "min"), (150, 180, "min")])
def test_a_pair_moves_in_the_order_the_kernel_accepts(low: int, high: int, first: str) -> None:
    """Going up the maximum first, going down the minimum; from 100 to 200."""
    held = {"min": 100, "max": 200}
    settings = span("min", "max", low, high, held["max"])
    assert settings[0].key == first
    for setting in settings:
        held[setting.key] = int(setting.text)
        assert held["min"] <= held["max"]


class Blind(SysFiles):
    """A lock that takes a value and never says which holds; what it holds is known to the test alone."""

    def __init__(self) -> None:
        self.held = "unlocked"

    def read(self, key: str) -> str:
        """Say nothing."""
        return UNREADABLE

    def write(self, key: str, text: str) -> None:
        """Take a value."""
        self.held = text


def test_what_cannot_be_read_goes_back_to_neutral(state: Path) -> None:
    """A lock that nobody can read is written, believed, and unlocked at the end, after a death too."""
    lock = Blind()

    def device() -> Actuator:
        made = Actuator("gpu", controls=lock, guarded=False)
        made.allow(Control("lock", frozenset({"210,900"}), neutral="unlocked"))
        return made

    with device() as gpu:
        gpu.write("lock", "210,900")
        assert lock.held == "210,900"
    assert lock.held == "unlocked"
    dead = device().__enter__()
    dead.write("lock", "210,900")
    dead._release()
    assert restore_all(controls=lock)[0].clean
    assert lock.held == "unlocked"


class Moded(SysFiles):
    """A power mode that rewrites a cap, and a rate that only means something while locked."""

    def __init__(self) -> None:
        self.values = {"mode": "0", "cap": "900", "locked": "0", "rate": "3000"}

    def read(self, key: str) -> str:
        """Return a value."""
        return self.values[key]

    def write(self, key: str, text: str) -> None:
        """Take a value with what follows from it."""
        if key == "rate" and self.values["locked"] == "0":
            return
        self.values[key] = text
        if key == "mode":
            self.values["cap"] = {"0": "1000", "2": "500"}[text]
        if key == "locked" and text == "0":
            self.values["rate"] = "204"


CONTROLS = (
    Control("mode", frozenset({"0", "2"}), persistent=True),
    Control("cap", frozenset({"900", "400"})),
    Control("locked", frozenset({"0", "1"})),
    Control("rate", frozenset({"2000"}), follows=("locked", "0")),
)


def moded(files: Moded, boot_id: str = "boot-1") -> Actuator:
    """Return an actuator on a board with modes."""
    made = Actuator("board", controls=files, guarded=False, boot_id=boot_id)
    made.allow(*CONTROLS)
    return made


def test_a_mode_goes_back_first_and_what_it_rewrote_after(state: Path) -> None:
    """The cap an administrator had set within the mode returns though the mode's own differs."""
    files = Moded()
    with moded(files) as device:
        device.apply((Setting("mode", "2"), Setting("cap", "400")))
        assert files.values["cap"] == "400"
    assert (files.values["mode"], files.values["cap"]) == ("0", "900")
    with moded(files) as device:
        device.write("mode", "2")
    assert (files.values["mode"], files.values["cap"]) == ("0", "900")


def test_a_mode_outlives_a_reboot_and_so_does_its_original(state: Path) -> None:
    """After a reboot the record is void but for the mode, which is put back."""
    files = Moded()
    dead = moded(files).__enter__()
    dead.apply((Setting("mode", "2"), Setting("cap", "400")))
    dead._release()
    files.values["cap"] = "500"
    outcome = restore_all(controls=files, boot_id="boot-2")[0]
    assert outcome.restored == ("mode",)
    assert files.values["cap"] == "1000"
    assert not standing(boot_id="boot-2")


def test_a_rate_is_left_to_the_governor_once_unlocked(state: Path) -> None:
    """The rate under a lock is not put back where the original was no lock: unlocking is all."""
    files = Moded()
    with moded(files) as device:
        device.apply((Setting("locked", "1"), Setting("rate", "2000")))
        assert files.values["rate"] == "2000"
    assert files.values["locked"] == "0"
    assert not device.differences


def test_a_damaged_record_is_put_back_as_far_as_it_can_be_read(knob: Path, state: Path) -> None:
    """Whole lines are acted upon; what a damaged one may have named is reported, and force puts it back."""
    dead, other = two_written(knob)
    record = dead._site.record
    dead._release()
    dead._site.audit.unlink()  # which would know it too
    lines = record.read_text().splitlines()
    record.write_text("\n".join([*lines[:-1], lines[-1].replace('"20"', '"21"')]) + "\n")
    with pytest.raises(BadFile, match=r"line 3 is damaged.*restore"):
        board(knob).__enter__()
    outcome = restore_all()[0]
    assert (knob.read_text(), other.read_text()) == ("1", "20")
    assert [each.key for each in outcome.foreign] == [str(other)]
    assert "line 3" in outcome.damage[0]
    assert record.with_suffix(".left").exists()
    assert restore_all(force=True)[0].restored == (str(other),)
    assert other.read_text() == "2"


def test_force_puts_back_what_a_damaged_line_named(knob: Path, state: Path) -> None:
    """The head of the record holds every original a second time."""
    dead = board(knob).__enter__()
    dead.write(str(knob), "10")
    record = dead._site.record
    dead._release()
    record.write_text(record.read_text().splitlines()[0] + "\ngarbage\n")
    assert restore_all(force=True)[0].damage
    assert knob.read_text() == "1"


@pytest.mark.parametrize("what", ["link", "mode", "file", "record link", "lease fifo", "record fifo"])
def test_a_hostile_state_folder_is_refused_before_anything_is_written(
    knob: Path, tmp_path: Path, state: Path, what: str
) -> None:
    """A link, a folder others may write in, a file in its place, a planted record or lease: one error, no write."""
    state.parent.mkdir()
    if what == "link":
        (tmp_path / "theirs").mkdir()
        state.symlink_to(tmp_path / "theirs")
    elif what == "file":
        state.touch()
    else:
        state.mkdir(mode=0o700)
        if what == "mode":
            state.chmod(0o777)
        site = Site.of("board")
        (tmp_path / "theirs").touch()
        if what == "record link":
            site.record.symlink_to(tmp_path / "theirs")
        if what.endswith("fifo"):
            os.mkfifo(site.lease if what == "lease fifo" else site.record)
    try:
        with pytest.raises(StorageError), board(knob) as device:
            device.write(str(knob), "10")
        assert knob.read_text() == "1\n"
    finally:
        state.unlink() if what in ("link", "file") else state.chmod(0o700)
        if what == "lease fifo":
            site.lease.unlink()
        if what.startswith("record"):
            site.record.unlink()


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EBUSY])
def test_a_busy_driver_is_asked_again(knob: Path, state: Path, code: int) -> None:
    """A write that is refused for the moment is tried again, a few times."""

    class Busy(SysFiles):
        times = 2

        def write(self, key: str, text: str) -> None:
            if self.times:
                self.times -= 1
                raise OSError(code, os.strerror(code))
            super().write(key, text)

    made = Actuator("board", controls=Busy(), guarded=False)
    made.allow(Control(str(knob), LEVELS))
    with made as device:
        device.write(str(knob), "10")
        assert knob.read_text() == "10"


def test_the_audit_says_who_wrote_what(knob: Path, state: Path) -> None:
    """Each write is kept with what was before and what was read back."""
    with board(knob) as device:
        device.write(str(knob), "10")
    lines = Site.of("board").audit.read_text().splitlines()
    assert '"event": "set"' in lines[0]
    assert all('"before": "1", "to": "10"' in line for line in lines[:2])
    assert '"event": "restore"' in lines[2]


def test_restoring_needs_nothing_but_the_standard_library(knob: Path, state: Path) -> None:
    """The program loads neither numpy nor torch nor any driver's binding."""
    code = (
        "import sys\nfrom polythrottle.actuation.restore import main\nassert main([]) == 0\n"
        "sys.stdout.write(str([m for m in ('numpy', 'torch', 'pynvml', 'typer', 'rich') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]"


def test_the_program_says_in_its_exit_code_whether_anything_is_left(
    knob: Path, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0 is all as found, 6 is something left and named, 8 is a place that cannot be trusted."""
    dead = board(knob).__enter__()
    dead.write(str(knob), "10")
    dead._release()
    knob.write_text("77")
    assert program.main([]) == 6
    assert f"{knob} holds 77, was 1: changed by someone else" in capsys.readouterr().out
    assert program.main([]) == 6, "it is still left"
    knob.write_text("1")
    assert program.main([]) == 0
    state.chmod(0o777)
    assert program.main([]) == 8
    state.chmod(0o700)


def test_a_device_nobody_knows_is_named(knob: Path, state: Path) -> None:
    """Asking for a device without a record is one clear error."""
    with pytest.raises(UnknownName, match="device on record"):
        restore_all(device="other")
    with pytest.raises(PolythrottleError):
        restore_all(device="other")


def test_a_device_that_nobody_has_changed_yet_is_no_unknown_one(
    knob: Path, state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Entered, or restored, and asked for by its URI: nothing stands changed there, whatever else stands."""
    (tmp_path / "tree").mkdir()
    uri = f"jetson?root={tmp_path / 'tree'}"
    planted = Actuator(f"jetson {tmp_path / 'tree'}", guarded=False)
    with board(knob) as device:
        device.write(str(knob), "10")
        with planted:
            assert run(["restore", "--no-daemon", "--device", uri]) == 0
        assert run(["restore", "--no-daemon", "--device", uri]) == 0
        assert capsys.readouterr().out == "nothing stands changed\n" * 2
        assert run(["restore", "--no-daemon", "--device", "jetson:other"]) == UnknownName.exit_code
        assert knob.read_text() == "10"


@pytest.mark.parametrize("name", ["jetson?root={}", "cpu?root={}", "jetson {}"])
def test_a_planted_board_that_is_not_there_is_refused_whatever_else_stands(
    name: str, knob: Path, state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing can be said of it: a mistyped folder is not answered with "nothing stands changed"."""
    words = ["restore", "--no-daemon", "--device", name.format(tmp_path / "nowhere")]
    assert run(words) == InvalidInput.exit_code
    with board(knob) as device:
        device.write(str(knob), "10")
        assert run(words) == InvalidInput.exit_code
    told = capsys.readouterr()
    assert told.out == ""
    assert [line.partition("/")[0] for line in told.err.splitlines()] == ["polythrottle: there is no folder '"] * 2


def test_a_planted_board_that_has_gone_is_restored_as_far_as_can_be_while_it_stands_on_record(
    state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its record is what counts, not its folder."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "knob").write_text("1")
    dead = Actuator(f"jetson {tree}", guarded=False).__enter__()
    dead.allow(Control(str(tree / "knob"), frozenset({"10"})))
    dead.write(str(tree / "knob"), "10")
    dead._release()
    tree.rename(tmp_path / "gone")
    assert run(["restore", "--no-daemon", "--device", f"jetson?root={tree}"]) == DeviceError.exit_code
    assert "there is no folder" not in capsys.readouterr().err


INTERRUPTED = """
import sys
from polythrottle.actuation import Actuator, Control, SysFiles

class Impatient(SysFiles):
    def write(self, key, text):
        if text == "1":
            raise KeyboardInterrupt
        super().write(key, text)

with Actuator("board", controls=Impatient()) as board:
    board.allow(Control(sys.argv[1], frozenset({"10"})))
    board.write(sys.argv[1], "10")
"""


def test_a_restoring_that_is_interrupted_is_left_to_the_guard(knob: Path, state: Path) -> None:
    """A second Ctrl-C, while the first is being answered, does not leave the board changed."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, str(knob)], capture_output=True, check=False)
    assert b"KeyboardInterrupt" in done.stderr
    assert eventually(lambda: knob.read_text() == "1")
    assert eventually(lambda: not standing())


def test_a_stopped_guard_does_not_hold_up_its_writer(knob: Path, state: Path) -> None:
    """A guard that was suspended, as by a debugger, ends with its writer."""
    with board(knob, guarded=True) as device:
        device.write(str(knob), "10")
        assert device._watch is not None
        os.kill(device._watch._guard.pid, signal.SIGSTOP)
    assert knob.read_text() == "1"


@pytest.mark.parametrize("missing", ["del os.pidfd_open", "os.pidfd_open = refuse"])
def test_a_kernel_without_pidfd_has_a_guard_too(tmp_path: Path, knob: Path, state: Path, missing: str) -> None:
    """JetPack 4's kernel, 4.9, does not have it, nor have Pythons that were built for such."""
    site = f"import os\ndef refuse(pid):\n    raise OSError(38, 'Function not implemented')\n{missing}\n"
    (tmp_path / "sitecustomize.py").write_text(site)
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(knob), "guarded"],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert child.stdout is not None
    assert child.stdout.readline().startswith(b"ready")
    time.sleep(0.5)
    assert knob.read_text() == "10"
    child.kill()
    child.communicate()
    assert eventually(lambda: knob.read_text() == "1")


@pytest.mark.parametrize("what", ["subprocess.Popen", "threading.Thread.start"])
def test_without_a_guard_nothing_is_written(
    knob: Path, state: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Where no process or no thread can be started, that is one clear error."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory") if what.startswith("sub") else RuntimeError("no thread")

    with board(knob, guarded=True) as device:
        monkeypatch.setattr(what, refuse)
        with pytest.raises(DeviceError, match="cannot start the"):
            device.write(str(knob), "10")
        monkeypatch.undo()
    assert knob.read_text().strip() == "1"


def test_a_writer_that_stands_in_its_write_is_named(knob: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for it is told whom to end, instead of waiting for ever."""
    monkeypatch.setattr("polythrottle.actuation.state.lease.PATIENCE_S", 0.05)
    device = board(knob).__enter__()
    device.write(str(knob), "10")
    fence = Fence(Site.of("board").lease, device._boot())
    with (
        fence.closed(device._token),
        pytest.raises(DeviceError, match=rf"process {os.getpid()} \(pid {os.getpid()}\) stands in the middle"),
    ):
        restore_all(force=True)
    device.__exit__(None, None, None)
    assert knob.read_text() == "1"


@pytest.mark.parametrize("name", ["w" * 9000, "a\nb\x1b[31m", "é\u202e" * 3000])
def test_any_name_can_hold_a_device(knob: Path, state: Path, name: str) -> None:
    """A profile's name is shortened to a line that others can read; the device goes back all the same."""
    device = board(knob).__enter__()
    device.write(str(knob), "10")
    device.hand_over(name, 30)
    holder = standing()[0].lease.holder
    assert holder.isprintable()
    assert len(holder) <= 100
    assert restore_all()[0].clean
    assert knob.read_text() == "1"


def test_what_was_applied_for_a_time_ends_though_confirmed_twice(knob: Path, state: Path) -> None:
    """The second confirmation does not make it stand for ever."""
    applied(knob, 30, confirmed_s=0.5)
    assert not confirm()[0].lease.kept
    assert not confirm()[0].lease.kept
    assert eventually(lambda: knob.read_text() == "1")


@pytest.mark.parametrize("name", ["a", "z"])
def test_a_record_that_cannot_be_trusted_does_not_keep_others_from_going_back(
    knob: Path, state: Path, name: str
) -> None:
    """Whatever is sound is restored; then the other is named."""
    dead = board(knob).__enter__()
    dead.write(str(knob), "10")
    dead._release()
    strange = Site.of(name).record
    strange.write_text("\n")
    strange.chmod(0o666)
    with pytest.raises(StorageError, match="not a plain file that only this user may write"):
        restore_all()
    assert knob.read_text() == "1"
    strange.unlink()


@pytest.mark.parametrize("text", ["[" * 3000, '{"token": "a"}', "5", '{"token": "1", "boot_id": 2, "pid": "q"}'])
def test_a_lease_that_is_none_counts_for_nothing(knob: Path, state: Path, text: str) -> None:
    """A damaged lease file is no lease, and the record restores."""
    dead = board(knob).__enter__()
    dead.write(str(knob), "10")
    dead._release()
    Site.of("board").lease.write_text(text)
    assert restore_all()[0].clean
    assert knob.read_text() == "1"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("expires_s", each) for each in (float("nan"), float("inf"), 10**400, -1)),
        *(("token", each) for each in (10**400, -1)),
        ("confirmed_s", 10**400),
        ("pid", 10**400),
    ],
    ids=["no number", "for ever", "too much", "before the boot", "too many", "below none", "too long", "too high"],
)
def test_a_lease_of_numbers_that_no_clock_has_counts_for_nothing(
    knob: Path, state: Path, name: str, value: float
) -> None:
    """Neither what never ends nor what overflows holds a device or ends in a traceback."""
    applied(knob, None)
    (lease,) = state.glob("*.lease")
    lease.write_text(json.dumps({**json.loads(lease.read_text()), name: value}))
    assert run(["doctor", "--device", "sim:jetson-nano"]) == 0
    assert standing()[0].lease.holder == ""
    assert run(["restore"]) == 0
    assert knob.read_text() == "1"


def test_a_holder_writes_nothing_but_its_line_to_a_terminal(knob: Path, state: Path) -> None:
    """Control characters and lines on end in a lease, which others may have written, are left out."""
    applied(knob, None)
    (lease,) = state.glob("*.lease")
    told = {"holder": "x\x1b[2J\ny" + "z" * 3000, "since": "\x1b]0;"}
    lease.write_text(json.dumps({**json.loads(lease.read_text()), **told}))
    found = standing()[0].lease
    assert (found.holder[:6], found.since) == ("x[2J y", "]0;")
    assert len(found.holder) <= 100


def test_a_lease_or_record_of_absurd_size_is_not_read(knob: Path, state: Path) -> None:
    """A terabyte of nothing is one line, and no memory."""
    applied(knob, None)
    (record,) = state.glob("*.jsonl")
    os.truncate(record, 1 << 40)
    ((why,),) = (each.damage for each in standing())
    assert "larger than 16 MB" in why
    with pytest.raises(StorageError, match="larger than 16 MB"):
        restore_all()
    record.unlink()
    (lease,) = state.glob("*.lease")
    lease.unlink()


def test_a_lease_is_never_half_written(knob: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shorter text takes the place of a longer one in one call, so that a kill leaves one or the other."""
    with board(knob) as device:
        fence = Fence(Site.of("board").lease, device._boot())
        fence.change(device._token, holder="x" * 90)
        monkeypatch.delattr(os, "ftruncate")
        fence.change(device._token, holder="y")
        assert fence.read().holder == "y"
        monkeypatch.undo()


def test_a_pipe_in_the_place_of_the_audit_hangs_nobody(knob: Path, state: Path) -> None:
    """The audit is evidence, not state: work goes on without it."""
    with board(knob) as device:
        os.mkfifo(Site.of("board").audit)
        device.write(str(knob), "10")
    assert knob.read_text() == "1"
    Site.of("board").audit.unlink()


def test_a_full_disk_is_named_before_the_device_is_taken(
    knob: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where not even the holder's name can be noted nothing is held, let alone written."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(StorageError, match="No space left on device"):
            board(knob).__enter__()
    with board(knob) as device:
        device.write(str(knob), "10")
    assert knob.read_text() == "1"


def test_what_was_left_to_others_can_be_forced_back_later(knob: Path, state: Path) -> None:
    """A plain restore leaves and names a foreign value, again and again; force afterwards still knows the original."""
    dead = board(knob).__enter__()
    dead.write(str(knob), "10")
    dead._release()
    knob.write_text("77")
    first = restore_all()
    assert first[0].foreign
    assert not standing()
    assert restore_all() == first
    assert restore_all(force=True)[0].restored == (str(knob),)
    assert knob.read_text() == "1"
    assert restore_all(force=True) == ()


def test_what_was_left_is_forgotten_by_the_next_writer(knob: Path, state: Path) -> None:
    """Whoever steers next starts from what holds then; the older original is void."""
    dead = board(knob).__enter__()
    dead.write(str(knob), "10")
    dead._release()
    knob.write_text("77")
    restore_all()
    with board(knob) as device:
        device.write(str(knob), "5")
    assert knob.read_text() == "77"
    assert restore_all(force=True) == ()


def test_a_guard_that_was_ended_is_started_again(knob: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heartbeat notices that its guard is gone, and starts another."""
    monkeypatch.setattr("polythrottle.actuation.watchdog.LEASE_S", 0.2)
    with board(knob, guarded=True) as device:
        device.write(str(knob), "10")
        assert device._watch is not None
        first = device._watch._guard
        first.kill()
        assert eventually(lambda: device._watch is not None and device._watch._guard is not first)
    assert knob.read_text() == "1"


def test_what_has_lost_its_guard_cannot_be_confirmed(knob: Path, state: Path) -> None:
    """A timed profile whose guard is dead would never revert: confirming it is refused, restoring works."""
    applied(knob, 30, confirmed_s=60)
    os.kill(standing()[0].lease.pid, signal.SIGKILL)
    assert eventually(lambda: not standing()[0].lease.alive)
    with pytest.raises(DeviceError, match="has died"):
        confirm()
    restore_all()
    assert knob.read_text() == "1"


def test_a_state_folder_that_is_a_file_does_not_mean_that_nothing_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be read is said, never taken for nothing."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="is no folder"):
        restore_all()


WRECKER = """
import errno, os, resource, shutil, signal, sys
from pathlib import Path
from typing import Any
from polythrottle.actuation import Actuator, Control

knob, what, how = sys.argv[1:]
folder = Path(os.environ["POLYTHROTTLE_STATE_DIR"]) / "originals"

def read_only(path, flags, *rest, open=os.open, **options):
    if str(path).startswith(str(folder)) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))
    return open(path, flags, *rest, **options)

def refusing(call):
    def refuse(place, *rest):
        if str(folder) in (os.readlink(f"/proc/self/fd/{place}") if isinstance(place, int) else str(place)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return call(place, *rest)
    return refuse

def wreck():
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if what == "limit lowered":
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, most))
    elif what == "no descriptors":
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
        try:
            while True:
                os.open("/dev/null", os.O_RDONLY)
        except OSError:
            pass
    elif what == "read-only":
        os.open = read_only
        os.pwrite, os.ftruncate, os.fsync, os.unlink = map(refusing, (os.pwrite, os.ftruncate, os.fsync, os.unlink))
    elif what == "lease deleted":
        [each.unlink() for each in folder.glob("*.lease")]
    elif what == "lease emptied":
        [each.write_text("") for each in folder.glob("*.lease")]
    elif what == "record emptied":
        [each.write_text("") for each in folder.glob("*.jsonl")]
    else:
        shutil.rmtree(folder)

with Actuator("board") as board:
    board.allow(Control(knob, frozenset({"10"})))
    board.write(knob, "10")
    wreck()
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""
WRECKS = (
    "no descriptors",
    "limit lowered",
    "read-only",
    "lease deleted",
    "lease emptied",
    "record emptied",
    "folder deleted",
)


@pytest.mark.parametrize("what", WRECKS)
def test_a_writer_whose_state_is_wrecked_puts_its_device_back_all_the_same(knob: Path, state: Path, what: str) -> None:
    """It does so itself, from what it knows; where it cannot, its code says so and its guard does."""
    done = subprocess.run(
        [sys.executable, "-c", WRECKER, str(knob), what, "ends"], check=False, capture_output=True, text=True
    )
    if what == "limit lowered":
        assert done.returncode
        assert f"board is not restored; {knob}" in done.stderr
        assert eventually(lambda: knob.read_text().strip() == "1")
    assert knob.read_text().strip() == "1", done.stderr


@pytest.mark.parametrize("what", WRECKS)
def test_a_guard_whose_state_is_wrecked_restores_for_a_writer_that_was_killed(
    knob: Path, state: Path, what: str
) -> None:
    """The writer has told it the record through a pipe."""
    done = subprocess.run([sys.executable, "-c", WRECKER, str(knob), what, "killed"], check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert eventually(lambda: knob.read_text().strip() == "1")


@pytest.mark.parametrize("seconds", [3600.0, None])
def test_what_stands_applied_is_known_though_its_folder_was_deleted(
    knob: Path, state: Path, monkeypatch: pytest.MonkeyPatch, seconds: float | None
) -> None:
    """Its guard or its keeper lays record and lease anew: the next writer is refused, and a restore puts it back."""
    monkeypatch.setattr(program, "_WAIT_S", 0.0)
    with board(knob) as actuator:
        actuator.write(str(knob), "10")
        actuator.hand_over("a profile", seconds)
    (before,) = standing()
    site, lease = Site.of("board"), before.lease
    os.kill(lease.pid, signal.SIGKILL)  # this process does as it does
    looks = []

    def ended(wait_s: float) -> bool:
        looks.append(standing() == (before,))
        shutil.rmtree(state.parent, ignore_errors=True)
        return len(looks) == 3

    if seconds is None:
        keeper = Keeper(site, lease.boot_id, lease.token)
        assert all(keeper.keeps and not ended(0.0) for _ in range(2))
        assert keeper.keeps
    else:
        look = StateCopy(site, lease.boot_id, lease.token, locked=True).look
        assert guard.wait_for_end(site, lease.boot_id, lease.token, ended, look)
        look()
    assert all(looks)
    with pytest.raises(DeviceError, match=r"is (being steered|held) by a profile"):
        board(knob).__enter__()
    assert [outcome.restored for outcome in restore_all()] == [(str(knob),)]
    assert knob.read_text() == "1"


def test_nothing_is_laid_over_what_another_has_begun(knob: Path, state: Path) -> None:
    """Nor where the controls have gone with the folder."""
    with board(knob) as actuator:
        actuator.write(str(knob), "10")
        actuator.hand_over("a profile", None)
    lease = standing()[0].lease
    os.kill(lease.pid, signal.SIGKILL)
    copy = StateCopy(Site.of("board"), lease.boot_id, lease.token, locked=False)
    copy.look()
    shutil.rmtree(state.parent)
    with board(knob) as second:
        second.write(str(knob), "20")
        copy.look()
        assert standing()[0].lease.holder == f"process {os.getpid()}"
    shutil.rmtree(state.parent)
    knob.rename(knob.with_name("gone"))
    copy.look()
    assert not state.parent.exists()


KILLED_ON_THE_WAY = """
import os, signal, sys
from polythrottle.actuation import Actuator, Control, actuator, watchdog as watch

knob, moment = sys.argv[1:]

def killed(*given):
    os.kill(os.getpid(), signal.SIGKILL)

with Actuator("board") as board:
    board.allow(Control(knob, frozenset({"10"})))
    board.write(knob, "10")
    if moment == "before the next guard":
        actuator.start_guard = lambda *given, **named: killed()
    elif moment == "after it has begun":
        actuator.start_of = killed
    else:
        actuator.LEASE_S = 1.0
        watch.Watchdog._end_guard = lambda self: (self._guard.kill(), self._guard.wait(), killed())
    board.hand_over("a profile", 3600.0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before the next guard", "after it has begun", "after the last has ended"])
def test_a_writer_that_is_killed_as_it_hands_over_is_reverted(knob: Path, state: Path, moment: str) -> None:
    """One guard or the other is there at each moment; none of them leaves anything on record."""
    words = [sys.executable, "-c", KILLED_ON_THE_WAY, str(knob), moment]
    assert subprocess.run(words, check=False).returncode == -signal.SIGKILL
    assert eventually(lambda: knob.read_text().strip() == "1" and not standing())


@pytest.mark.parametrize(
    ("wreck", "says"),
    [
        (Path.unlink, "deleted while the device was steered"),
        (lambda lease: lease.write_text(""), "damaged while the device was steered"),
    ],
    ids=["deleted", "emptied"],
)
def test_without_its_lease_a_writer_writes_nothing_more(
    knob: Path, state: Path, wreck: Callable[[Path], object], says: str
) -> None:
    """It cannot know whether another writes by now; what it changed it puts back."""
    with board(knob) as device:
        device.write(str(knob), "10")
        wreck(Site.of("board").lease)
        with pytest.raises(StorageError, match=says):
            device.write(str(knob), "20")
        assert knob.read_text() == "10"
    assert knob.read_text() == "1"


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide from each writer what the kernel tells of others, as between two containers with the same folder."""
    monkeypatch.setattr("polythrottle.actuation.actuator.steering", lambda site: ())


@pytest.mark.usefixtures("elsewhere")
def test_a_writer_that_has_lost_its_folder_to_another_leaves_the_device_to_it(knob: Path, state: Path) -> None:
    """Else it would undo what the other has set, and take it for its own; the error says whose it is."""
    first = board(knob).__enter__()
    first.write(str(knob), "10")
    shutil.rmtree(state)
    with board(knob) as second:
        second.write(str(knob), "20")
        with pytest.raises(DeviceError, match=r"has begun a new one$"):
            first.__exit__(None, None, None)
        assert knob.read_text() == "20"


@pytest.mark.usefixtures("elsewhere")
def test_what_another_that_began_anew_does_not_know_of_is_named(knob: Path, state: Path) -> None:
    """Nobody's record has a control any more that holds what was set here; the error is all that tells of it."""
    other = knob.with_name("other")
    other.write_text("1")
    first = board(knob).__enter__()
    first.write(str(knob), "10")
    shutil.rmtree(state)
    second = board(knob)
    second.allow(Control(str(other), LEVELS))
    with second:
        second.write(str(other), "20")
        with pytest.raises(DeviceError, match=f"has begun a new one; still as set here: {knob}$"):
            first.__exit__(None, None, None)


def test_a_writer_may_take_its_time_before_it_sets_anything(knob: Path, state: Path) -> None:
    """A first trial at the levels that hold anyway writes nothing, and may take longer than a lease: it has no end yet.

    With the first write it has one, of its full length, before the guard begins that would restore at it.
    """
    with board(knob, guarded=True) as device:
        fence = Fence(Site.of("board").lease, boot_id())
        assert fence.read().expires_s is None
        device.write(str(knob), "1")
        assert fence.read().expires_s is None
        device.write(str(knob), "10")
        ends_s = fence.read().expires_s
        assert ends_s is not None
        assert ends_s - boot_s() > LEASE_S / 2
        assert restorer_is_refused()
        assert knob.read_text() == "10"
    assert knob.read_text() == "1"


def restorer_is_refused() -> bool:
    """Return whether a restore without force leaves a living writer alone."""
    try:
        restore_all()
    except DeviceError:
        return True
    return False


def test_a_lease_that_cannot_be_renewed_stops_the_writer(
    knob: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its guard would restore in the middle of a study, which is to hear of it first."""
    monkeypatch.setattr("polythrottle.actuation.watchdog.LEASE_S", 0.04)
    with board(knob, guarded=True) as device:
        device.write(str(knob), "10")
        assert device._watch is not None
        state.rename(state.with_name("elsewhere"))
        assert eventually(lambda: device._watch.failure is not None)
        with pytest.raises(StorageError, match="deleted while the device was steered"):
            device.write(str(knob), "20")
        state.with_name("elsewhere").rename(state)
        assert eventually(lambda: device._watch.failure is None)
        device.write(str(knob), "20")
    assert knob.read_text() == "1"


@pytest.mark.parametrize("change", ["host", "machine"])
def test_a_machine_that_changes_its_name_finds_what_it_left(
    knob: Path, state: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Neither a new host name nor a new machine-id, as a container has its own, hides a record of this boot."""
    dead = board(knob).__enter__()
    dead.write(str(knob), "10")
    dead._release()
    if change == "host":
        monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "other", "6", "1", "x86_64")))
        monkeypatch.setattr("platform.node", lambda: "other")
    else:
        monkeypatch.setattr("polythrottle.actuation.state.site.machine", lambda: "0123456789ab")
    assert [each.device for each in standing()] == ["board"]
    with board(knob) as device:
        assert knob.read_text() == "1"
        assert device.original(str(knob)) == "1"
    assert restore_all() == ()


def test_what_another_machine_has_left_in_a_shared_folder_is_its_own(
    knob: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record of another key and another boot is neither shown nor touched."""
    with monkeypatch.context() as there:
        there.setattr("polythrottle.actuation.state.site.machine", lambda: "0123456789ab")
        dead = Actuator("board", guarded=False, boot_id="another-boot")
        dead.allow(Control(str(knob), LEVELS))
        dead.__enter__()
        dead.write(str(knob), "10")
        dead._release()
    assert standing() == ()
    assert restore_all(force=True) == ()
    assert knob.read_text() == "10"


def test_a_process_number_that_is_another_s_by_now_holds_nothing(
    holder: Callable[[str], "subprocess.Popen[str]"], knob: Path, state: Path
) -> None:
    """A restarted container has the same numbers again; the time a process was started at tells them apart."""
    child = holder("alone")
    assert standing()[0].lease.alive
    file = Site.of("board").lease
    lease = json.loads(file.read_text())
    assert lease["started"] > 0
    child.kill()
    child.wait()
    file.write_text(json.dumps({**lease, "pid": os.getpid()}))
    assert not standing()[0].lease.alive


def test_a_record_that_a_refusing_control_keeps_is_not_forgotten(knob: Path, state: Path) -> None:
    """What only the audit knew of is asked for again at the next restore, and the one after."""
    dead, other = two_written(knob)
    record, fence = dead._site.record, dead._fence
    assert fence is not None
    fence.let_go()
    os.close(dead._lock)
    record.unlink()  # the lease says that something was written; the audit says what

    class Refusing(SysFiles):
        def write(self, key: str, text: str) -> None:
            if key == str(other):
                raise OSError(errno.EINVAL, "Invalid argument")
            super().write(key, text)

    for _ in range(2):
        outcome = restore_all(controls=Refusing())[0]
        assert [each.key for each in outcome.failed] == [str(other)]
    assert restore_all()[0].clean
    assert (knob.read_text(), other.read_text()) == ("1", "2")


def test_one_control_under_two_names_has_one_writer(knob: Path, tmp_path: Path, state: Path) -> None:
    """Whoever comes second would take a tuned value for an original; what nobody else has is free to it."""
    alias, free = tmp_path / "alias", tmp_path / "free"
    alias.symlink_to(knob)
    free.write_text("3")
    other = Actuator("other", guarded=False)
    other.allow(Control(str(alias), LEVELS), Control(str(free), LEVELS))
    with board(knob) as device, other:
        device.write(str(knob), "10")
        other.write(str(free), "30")
        with pytest.raises(DeviceError, match=rf"{alias} is steered by process {os.getpid()}, as board"):
            other.write(str(alias), "20")
        assert knob.read_text() == "10"
        device.restore()
        other.write(str(alias), "20")
    assert (knob.read_text(), free.read_text()) == ("1", "3")


def test_a_record_makes_nobody_write_what_is_no_control(
    knob: Path, tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who can write records, as a container with the same folder, may not name any file of the machine in them."""
    dead = board(knob).__enter__()
    dead.write(str(knob), "10")
    dead._release()
    monkeypatch.setenv("POLYTHROTTLE_ROOTS", str(tmp_path / "elsewhere"))
    assert program.main([]) == 6
    assert f"{knob} is no control of a device, so nothing is written there" in capsys.readouterr().out
    assert knob.read_text() == "10"
    monkeypatch.setenv("POLYTHROTTLE_ROOTS", str(tmp_path))
    assert program.main([]) == 0
    assert knob.read_text() == "1"


def test_only_devices_are_written_to_among_what_the_kernel_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path of /proc is refused, also through a link in a tree that is named."""
    monkeypatch.setenv("POLYTHROTTLE_ROOTS", str(tmp_path))
    link = tmp_path / "link"
    link.symlink_to("/proc/self/comm")
    before = Path("/proc/self/comm").read_text()
    for key in ("/proc/self/comm", str(link), "/"):
        with pytest.raises((DeviceError, OSError)):
            SysFiles().write(key, "changed")
    assert Path("/proc/self/comm").read_text() == before


@pytest.mark.parametrize("named", ["jetson?root=b3", "jetson?root=b3/", "jetson {folder}/b3"])
def test_a_planted_board_is_restored_by_its_name(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], named: str
) -> None:
    """Also by a root that is relative to the working folder; doctor gives a command that does it."""
    monkeypatch.delenv("POLYTHROTTLE_ROOTS")
    knob = tmp_path / "b3" / "knob"
    knob.parent.mkdir()
    knob.write_text("1")
    dead = Actuator(f"jetson {knob.parent}", guarded=False)
    dead.allow(Control(str(knob), LEVELS))
    with monkeypatch.context() as told:
        told.setenv("POLYTHROTTLE_ROOTS", str(tmp_path))
        dead.__enter__()
        dead.write(str(knob), "10")
        dead._release()
    [finding] = [each for each in record_findings() if each.subject == dead.device]
    assert finding.remedy == f"polythrottle restore --device '{dead.device}'"
    assert run(["restore"]) == DeviceError.exit_code
    assert "is no control of a device" in capsys.readouterr().out
    assert run(["restore", "--device", named.format(folder=tmp_path)]) == 0
    assert knob.read_text() == "1"


@pytest.mark.parametrize("program_of_its_own", [False, True])
@pytest.mark.parametrize("where", ["gone", "full"])
def test_what_is_left_is_named_though_nobody_reads_it(
    *,
    knob: Path,
    state: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    where: str,
    program_of_its_own: bool,
) -> None:
    """Where standard output is closed or full, what is left is named on standard error, with the code that says so."""
    with board(knob) as actuator:
        actuator.write(str(knob), "10")
        actuator.hand_over("a profile", None)
    knob.write_text("7")
    ear, mouth = os.pipe()
    os.close(ear)
    with suppress(OSError), os.fdopen(mouth, "w") if where == "gone" else open("/dev/full", "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert (program.main([]) if program_of_its_own else run(["restore"])) == 6
    assert f"{knob} holds 7, was 1" in " ".join(capsys.readouterr().err.split())


def planted(state: Path, stem: str, *lines: dict[str, Any] | bytes) -> Path:
    """Put a record there that somebody else has made, whole as it may be; return its file."""
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = state / f"{stem}@{machine()}.jsonl"
    file.write_bytes(b"".join(line if isinstance(line, bytes) else _sealed(line) for line in lines))
    file.chmod(0o600)
    return file


def head(device: str, originals: Any = None) -> dict[str, Any]:
    """Return the head of a record of the running boot."""
    return {"version": 2, "device": device, "boot_id": boot_id(), "pid": 1, "originals": originals or {}}


def written(key: str, original: str = "1", **more: Any) -> dict[str, Any]:
    """Return a line that says a control was written."""
    return {"key": key, "original": original, "written": "10", **more}


STRANGE = {
    "a key with NUL": [head("aaa"), written("/sys/a\0b")],
    "a key that is no text": [head("aaa"), written("/sys/\ud800")],
    "a key too long": [head("aaa"), written("/" + "a" * 5000)],
    "an original that is no text": [head("aaa"), written("/sys/a", "\ud800")],
    "an original that is a number": [head("aaa", {"/sys/a": 5}), written("nvpmodel:/x", persistent=True)],
    "an original that is a list": [head("aaa", {"/sys/a": [1]}), written("nvpmodel:/x", persistent=True)],
    "a device that is no text": [head("\ud800"), written("/sys/nowhere")],
    "a device of two lines": [head("aaa\nbbb"), written("/sys/nowhere")],
    "a device with control characters": [head("\x1b[2J\x9b\u202e"), written("/sys/nowhere")],
    "a device without a name": [head(" "), written("/sys/nowhere")],
    "a device with an endless name": [head("a" * 500_000), written("/sys/nowhere")],
    "nothing": [b"\n" * 60_000],
}


@pytest.mark.parametrize("lines", STRANGE.values(), ids=STRANGE)
def test_a_strange_record_keeps_no_other_device_from_being_restored(
    knob: Path, state: Path, capsys: pytest.CaptureFixture[str], lines: list[Any]
) -> None:
    """It is named as damaged, in few and printable lines, by every program that meets it."""
    dead = board(knob).__enter__()
    dead.write(str(knob), "10")
    dead._release()
    planted(state, "aaa", *lines)
    other = knob.with_name("other")
    other.write_text("1")
    with Actuator("second", guarded=False) as second:
        second.allow(Control(str(other), LEVELS))
        second.write(str(other), "2")
    assert [each.works for each in record_findings()[:2]] == [False, False]
    assert program.main([]) == 6
    said = capsys.readouterr().out
    assert knob.read_text() == "1"
    assert "damaged" in said or "not the head" in said
    assert len(said) < 10_000
    assert all(line.isprintable() for line in said.splitlines())


def test_a_record_of_more_lines_than_any_has_is_damaged_past_them(
    knob: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes before is put back, and of the damage a few lines are told."""
    monkeypatch.setattr(records, "_MOST_LINES", 100)
    monkeypatch.setattr(records, "_MOST_CONTROLS", 10)
    knob.write_text("10")
    planted(state, "aaa", head("aaa"), written(str(knob)), *(written(f"/sys/{each}") for each in range(200)))
    (outcome,) = restore_all()
    assert knob.read_text() == "1"
    assert len(outcome.failed) == 9
    assert len(outcome.damage) == 21
    assert outcome.damage[-1].endswith("and 70 more")


def test_what_could_not_be_read_back_from_a_record_is_not_written(knob: Path, state: Path) -> None:
    """A device or a value that a record would refuse later is refused at once."""
    strange = Actuator("bo\nard", guarded=False)
    strange.allow(Control(str(knob), LEVELS))
    with strange, pytest.raises(StorageError, match="no plain text"):
        strange.write(str(knob), "10")
    assert knob.read_text() == "1\n"


def test_an_audit_that_says_nonsense_keeps_nothing_from_being_restored(knob: Path, state: Path) -> None:
    """Whoever deletes a record and writes into its audit gets no traceback."""
    dead = board(knob).__enter__()
    dead.write(str(knob), "10")
    with dead._site.audit.open("a") as audit:
        audit.write(json.dumps({"event": "set", "token": dead._token, "key": 5, "before": "1", "to": "2"}) + "\n")
    dead._site.record.unlink()
    dead._release()
    lease = dead._site.lease
    lease.write_text(json.dumps({**json.loads(lease.read_text()), "token": dead._token, "dirty": True}))
    assert restore_all()[0].restored == (str(knob),)


def test_a_writer_that_dies_before_its_originals_are_safe_has_changed_nothing(
    knob: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves no lease that says the device was steered, for which nobody would know the originals."""

    def dies(*_: object) -> None:
        raise SystemExit

    monkeypatch.setattr(records.Record, "note", dies)
    dead = board(knob).__enter__()
    with pytest.raises(SystemExit):
        dead.write(str(knob), "10")
    left = dead._site.lease.read_bytes()  # as a kill leaves it
    dead._release()
    dead._site.lease.write_bytes(left.replace(f'"pid": {os.getpid()}'.encode(), b'"pid": 99999999'))
    assert json.loads(dead._site.lease.read_text())["pid"] == 99999999
    assert standing() == ()


def test_whatever_is_wrong_with_one_device_the_others_are_restored(
    knob: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that nobody has thought of ends one restoring alone."""
    dead, other = two_written(knob)
    dead._release()
    planted(state, "aaa", head("aaa"), written("odd"))
    plain = SysFiles.read

    def read(files: SysFiles, key: str) -> str:
        if key == "odd":
            raise ZeroDivisionError("what\n?")
        return plain(files, key)

    monkeypatch.setattr(SysFiles, "read", read)
    monkeypatch.setattr(program.time, "sleep", lambda pause_s: None)
    with pytest.raises(StorageError, match=r"aaa is not restored: what \?"):
        restore_all()
    assert (knob.read_text(), other.read_text()) == ("1", "2")
    monkeypatch.undo()


@pytest.mark.parametrize("kind", ["jsonl", "lease"])
def test_what_cannot_be_read_of_one_device_hides_no_other(
    knob: Path, state: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """It is listed by its name with why, beside the others; doctor and restore tell of both."""
    dead, other = two_written(knob)
    dead._release()
    file = planted(state, "aaa", head("aaa"), written("/sys/nowhere")).with_suffix(f".{kind}")
    file.touch()
    file.chmod(0o666)
    assert [(each.device, each.keys) for each in standing()] == [("aaa", ()), ("board", (str(knob), str(other)))]
    (why,) = standing()[0].damage
    assert f"{file} is not a plain file that only this user may write" in why
    told = {each.subject: each for each in record_findings()}
    assert (told["aaa"].works, why in told["aaa"].explanation) == (False, True)
    assert "2 controls changed by a process that is gone" in told["board"].explanation
    assert program.lapsed("board") == ()
    assert run(["restore"]) == StorageError.exit_code
    assert str(file) in capsys.readouterr().err
    assert (knob.read_text(), other.read_text()) == ("1", "2")
    file.chmod(0o600)
    restore_all()
    (state / f"aaa@{machine()}.jsonl").unlink()


def test_what_cannot_be_read_of_one_device_keeps_no_other_from_being_confirmed(knob: Path, state: Path) -> None:
    """Where nothing can be confirmed, it is said."""
    file = planted(state, "aaa", head("aaa"))
    file.chmod(0o666)
    with pytest.raises(StorageError, match="is not a plain file"):
        confirm()
    with board(knob) as actuator:
        actuator.write(str(knob), "10")
        actuator.hand_over("a profile", 60.0)
    assert [each.device for each in confirm()] == ["board"]
    assert restore_all(device="board")[0].clean
    file.unlink()


def test_two_records_of_one_device_are_both_restored(knob: Path, state: Path) -> None:
    """A record that says it is of a device stands beside the one that is."""
    dead = board(knob).__enter__()
    dead.write(str(knob), "10")
    dead._release()
    other = knob.with_name("other")
    other.write_text("10")
    planted(state, "zzz", head("board"), written(str(other)))
    assert [each.restored for each in restore_all(device="board")] == [(str(knob),), (str(other),)]
    assert (knob.read_text(), other.read_text()) == ("1", "1")


def test_a_state_folder_that_leads_round_in_circles_is_no_clean_board(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can say what stands changed; that is no success."""
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", str(tmp_path / "loop"))
    with pytest.raises(StorageError, match="symbolic links"):
        restore_all()


@pytest.mark.parametrize("gone", [Path.unlink, lambda file: file.write_bytes(b"")], ids=["deleted", "emptied"])
def test_a_device_whose_record_and_audit_are_gone_is_told_of(
    knob: Path, state: Path, gone: Callable[[Path], object]
) -> None:
    """What it held before cannot be known, which is no clean restoring; it is told once."""
    dead = board(knob).__enter__()
    dead.write(str(knob), "10")
    lease = dead._site.lease
    text = lease.read_text()
    dead._release()
    lease.write_text(text)
    gone(dead._site.record)
    gone(dead._site.audit)
    assert "cannot be known" in standing()[0].damage[0]
    assert program.main([]) == 6
    assert program.main([]) == 0


def test_tuned_values_are_not_taken_for_originals_without_a_word(
    knob: Path, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whose lease says that it was steered, and whose record and audit are gone, is refused until that was said."""
    dead = board(knob).__enter__()
    dead.write(str(knob), "10")
    lease = dead._site.lease
    text = lease.read_text()
    dead._release()
    lease.write_text(text)
    dead._site.record.unlink()
    dead._site.audit.unlink()
    for _ in range(2):
        with pytest.raises(BadFile, match=r"what it held before cannot be known; .*; run polythrottle restore"):
            board(knob).__enter__()
    assert run(["restore"]) == DeviceError.exit_code
    assert "cannot be known" in " ".join(capsys.readouterr().out.split())
    with board(knob) as device:
        device.write(str(knob), "20")
    assert knob.read_text() == "10"


def test_a_folder_in_the_place_of_what_was_left_is_named(knob: Path, state: Path) -> None:
    """Before the lease is taken, so that nobody seems to hold the device afterwards."""
    with board(knob) as device:
        device.write(str(knob), "10")
    Site.of("board").left.mkdir()
    with pytest.raises(StorageError, match=r"cannot remove .*\.left: Is a directory; move it away"):
        board(knob).__enter__()
    assert not Fence(Site.of("board").lease, boot_id()).read().holder
    Site.of("board").left.rmdir()


@pytest.mark.parametrize("key", ["/dev/zero", "/dev/urandom", "/proc/self/mem"])
def test_a_record_that_names_a_file_without_end_ends(state: Path, key: str) -> None:
    """A device node is not even opened; what the record names is left, and said so."""
    planted(state, "aaa", head("aaa"), written(key))
    (outcome,) = restore_all()
    assert [(each.key, each.found) for each in outcome.failed] == [(key, None)]
    (state / f"aaa@{machine()}.jsonl").unlink()


@pytest.mark.parametrize("key", ["{folder}/secret", "{folder}/tree/link", "secret", "/proc/self/environ"])
def test_a_record_has_no_other_file_read(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    """What a file of the machine holds is neither shown nor noted, also through a link out of a tree that is named."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "secret").write_text("hunter2")
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "secret")
    monkeypatch.setenv("POLYTHROTTLE_ROOTS", str(tmp_path / "tree"))
    monkeypatch.setenv("HUNTER", "hunter2")
    key = key.format(folder=tmp_path)
    file = planted(state, "aaa", head("aaa", {key: "5"}), written(key))
    (outcome,) = restore_all()
    assert [(each.key, each.found) for each in outcome.failed] == [(key, None)]
    assert run(["restore"]) == 6
    assert "hunter2" not in (told := capsys.readouterr().out)
    assert "is no control of a device" in " ".join(told.split())
    assert b"hunter2" not in b"".join(each.read_bytes() for each in state.iterdir())
    file.unlink()


def test_a_record_has_no_power_mode_of_elsewhere_read(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tree whose note is read has to be named."""
    (tmp_path / "var/lib/nvpmodel").mkdir(parents=True)
    (tmp_path / "var/lib/nvpmodel/status").write_text("pmode:0003")
    planted(state, "aaa", head("aaa"), written(f"nvpmodel:{tmp_path}", persistent=True))
    assert restore_all()[0].failed[0].found == "3"
    monkeypatch.setenv("POLYTHROTTLE_ROOTS", str(tmp_path / "elsewhere"))
    (left,) = restore_all()[0].failed
    assert (left.found, "is not this machine's" in left.reason) == (None, True)


def test_a_copy_is_not_laid_through_a_link(knob: Path, state: Path, tmp_path: Path) -> None:
    """Whoever may write to the state folder cannot have a keeper write to a file elsewhere."""
    with board(knob) as actuator:
        actuator.write(str(knob), "10")
        actuator.hand_over("a profile", None)
    (before,) = standing()
    os.kill(before.lease.pid, signal.SIGKILL)
    site = Site.of("board")
    copy = StateCopy(site, before.lease.boot_id, before.lease.token, locked=False)
    copy.look()
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    for file in (site.record, site.lease):
        file.unlink()
        file.with_name(f"{file.name}.{os.getpid()}").symlink_to(victim)
    copy.look()
    assert victim.read_text() == "as it was"
    assert standing() == (before,)
    assert restore_all()[0].clean


@pytest.mark.parametrize("name", ["remove", "driver_override", "module"])
def test_what_takes_a_device_away_is_no_control(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Though the kernel shows it among its devices."""
    file = tmp_path / name
    file.write_text("0")
    files = SysFiles()
    monkeypatch.setattr(files, "_is_kernel_s", lambda handle: True)
    for act in (lambda: files.located(str(file)), lambda: files.write(str(file), "1")):
        with pytest.raises(PermissionDenied, match="is no control"):
            act()
    assert file.read_text() == "0"


def test_no_more_is_read_than_any_file_holds(knob: Path) -> None:
    """A file that grows for ever is an error and not all of the memory."""
    os.truncate(knob, 1 << 40)
    with pytest.raises(OSError, match="too large"):
        SysFiles().read(str(knob))


DESTROYED: dict[str, Callable[[Path], object]] = {
    "deleted": lambda file: file.unlink(missing_ok=True),
    "emptied": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:40]),
    "garbage": lambda file: file.write_bytes(b"\xff\x00{\n" * 50),
}


@pytest.mark.parametrize("record", DESTROYED)
@pytest.mark.parametrize("lease", DESTROYED)
def test_where_record_and_lease_are_destroyed_the_audit_restores(
    knob: Path, state: Path, capsys: pytest.CaptureFixture[str], lease: str, record: str
) -> None:
    """It knows what was written in this boot and has not gone back; doctor and the next writer hear of it too."""
    dead, other = two_written(knob)
    dead._release()
    DESTROYED[lease](dead._site.lease)
    DESTROYED[record](dead._site.record)
    assert {str(knob), str(other)} <= {key for each in standing() for key in each.keys}
    assert not all(each.works for each in record_findings())
    told = record in ("garbage", "cut")  # a line that cannot be read may be of another control
    assert program.main([]) == (6 if told else 0)
    assert "2 put back" in capsys.readouterr().out
    assert (knob.read_text(), other.read_text()) == ("1", "2")
    assert program.main([]) == 0
    assert "put back" not in capsys.readouterr().out


def test_the_next_writer_restores_what_only_the_audit_knows(knob: Path, state: Path) -> None:
    """It would take tuned values for originals else."""
    dead, other = two_written(knob)
    dead._release()
    dead._site.lease.unlink()
    dead._site.record.unlink()
    with board(knob) as device:
        assert (knob.read_text(), other.read_text()) == ("1", "2")
        device.write(str(knob), "30")
    assert knob.read_text() == "1"
    assert standing() == ()


def test_what_only_the_audit_knows_is_compared_and_named(
    knob: Path, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What somebody else has set since stays; of another boot, or put back before, it says nothing."""
    dead, other = two_written(knob)
    dead.restore()
    dead.write(str(knob), "30")
    dead._release()
    dead._site.lease.unlink()
    dead._site.record.unlink()
    knob.write_text("40")
    text = dead._site.audit.read_text()
    dead._site.audit.write_text(text.replace(boot_id(), "another boot"))
    assert standing() == ()
    dead._site.audit.write_text(text)
    assert standing()[0].keys == (str(knob),)
    assert program.main([]) == 6
    assert f"{knob} holds 40, was 1" in capsys.readouterr().out
    assert str(other) not in dead._site.left.read_text()


def test_an_audit_that_was_begun_anew_is_read_from_the_older_one_on(
    knob: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line before the original of a control may be in either."""
    monkeypatch.setattr("polythrottle.actuation.audit._MOST_BYTES", 300)
    dead, other = two_written(knob)
    dead._release()
    assert dead._site.audit.with_suffix(".audit.1").exists()
    dead._site.lease.unlink()
    dead._site.record.unlink()
    assert restore_all()[0].clean
    assert (knob.read_text(), other.read_text()) == ("1", "2")


def test_three_empty_files_are_no_clean_board(knob: Path, state: Path) -> None:
    """A record comes after a lease, so that one without was destroyed; it is told once."""
    dead = board(knob).__enter__()
    dead.write(str(knob), "10")
    dead._release()
    for file in (dead._site.lease, dead._site.record, dead._site.audit):
        file.write_bytes(b"")
    assert "cannot be known" in standing()[0].damage[0]
    assert program.main([]) == 6
    assert program.main([]) == 0


def test_an_audit_is_found_under_another_machine_id_too(
    knob: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the boot that its lines name."""
    dead, other = two_written(knob)
    dead._release()
    dead._site.lease.unlink()
    dead._site.record.unlink()
    monkeypatch.setattr("polythrottle.actuation.state.site.machine", lambda: "0123456789ab")
    assert restore_all()[0].clean
    assert (knob.read_text(), other.read_text()) == ("1", "2")


def deleted(state: Path) -> None:
    """Delete the state folder."""
    shutil.rmtree(state.parent)


def moved(state: Path) -> None:
    """Move the state folder away, as if another disk were mounted in its place."""
    state.parent.rename(state.parent.with_name("moved"))


def emptied(state: Path) -> None:
    """Delete all that lies in the state folder."""
    for file in state.iterdir():
        file.unlink()


LOSSES = pytest.mark.parametrize("lose", [deleted, moved, emptied])


def test_a_writer_without_its_folder_is_known_under_another_machine_id_too(
    knob: Path, holder: Callable[..., "subprocess.Popen[str]"], state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells of the device, whatever the machine is called."""
    first = holder()
    deleted(state)
    monkeypatch.setattr("polythrottle.actuation.state.site.machine", lambda: "0123456789ab")
    with pytest.raises(DeviceError, match=rf"is being steered by processes {first.pid}\b"):
        board(knob).__enter__()
    first.kill()
    assert eventually(lambda: knob.read_text() == "1")


@LOSSES
@pytest.mark.parametrize("how", ["guarded", "alone", "guard killed"])
def test_a_writer_that_begins_anew_beside_one_that_has_lost_its_folder_is_refused(
    knob: Path, holder: Callable[..., "subprocess.Popen[str]"], state: Path, lose: Callable[[Path], None], how: str
) -> None:
    """It would take what stands for the original; the kernel knows of the first, its guard or both."""
    first = holder("alone" if how == "alone" else "guarded")
    if how == "guard killed":
        os.kill(int(first.guard[0]), signal.SIGKILL)  # type: ignore[attr-defined]
    lose(state)
    with pytest.raises(DeviceError, match=rf"is being steered by process(es)? {first.pid}\b"):
        board(knob).__enter__()
    assert knob.read_text() == "10"
    first.send_signal(signal.SIGINT)
    first.wait()
    assert eventually(lambda: how != "guarded" or knob.read_text() == "1")


def test_a_guard_that_is_stopped_without_its_folder_keeps_others_out(
    knob: Path, holder: Callable[..., "subprocess.Popen[str]"], state: Path
) -> None:
    """The device is as the writer that was killed has left it; once the guard has put it back, others may steer."""
    first = holder()
    guarding = int(first.guard[0])  # type: ignore[attr-defined]
    os.kill(guarding, signal.SIGSTOP)
    first.kill()
    first.wait()
    deleted(state)
    with pytest.raises(DeviceError, match=f"is being steered by process {guarding}"):
        board(knob).__enter__()
    os.kill(guarding, signal.SIGCONT)
    assert eventually(lambda: knob.read_text() == "1")
    assert eventually(lambda: not standing())
    with board(knob) as device:
        device.write(str(knob), "20")
    assert knob.read_text() == "1"


@LOSSES
def test_restore_and_doctor_know_of_a_writer_whose_folder_is_gone(
    knob: Path,
    holder: Callable[..., "subprocess.Popen[str]"],
    state: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    lose: Callable[[Path], None],
) -> None:
    """They said that nothing stands changed."""
    monkeypatch.setattr(program, "_WAIT_S", 0.0)
    first = holder("alone")
    lose(state)
    for restoring in (lambda: program.main([]), lambda: program.main(["--force"]), lambda: run(["restore"])):
        assert restoring() == DeviceError.exit_code
        assert f"steered by process {first.pid}, whose lease is gone from {state}" in capsys.readouterr().err
    (finding,) = [each for each in record_findings() if each.works is False]
    assert f"process {first.pid}" in finding.explanation
    first.kill()
    first.wait()
    assert program.main([]) == 0


def test_whoever_locks_what_anybody_may_read_keeps_nobody_out(
    knob: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process of another user that locks the same byte is nobody's writer."""
    site = Site.of("board")
    handle = presence.announce(site)
    assert handle is not None
    assert presence.steering(site) == (os.getpid(),)
    assert presence.steering(Site.of("another")) == presence.steering(Site(state / "other", site.stem)) == ()
    plain = os.stat
    with monkeypatch.context() as as_another:
        as_another.setattr(os, "geteuid", lambda: 12345)
        as_another.setattr(os, "stat", lambda path: os.stat_result([*plain(path)[:4], 4999, *plain(path)[5:10]]))
        assert presence.steering(site) == ()
    os.close(handle)
    assert presence.steering(site) == ()


def test_where_the_kernel_tells_nothing_of_others_steering_goes_on(
    knob: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a second net: an older kernel, or one without a free descriptor, is no reason to stop."""
    monkeypatch.setattr(presence, "_FILE", "/nowhere")
    with board(knob, guarded=True) as device:
        device.write(str(knob), "10")
    assert knob.read_text() == "1"
    assert standing() == ()


def test_a_guard_that_has_never_read_its_lease_restores_after_a_while(
    knob: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleted before its guard has begun, a lease would never have ended, nor what was applied for a time."""
    monkeypatch.setattr(guard, "LEASE_S", 0.05)
    looks: list[float] = []

    def ended(wait_s: float) -> bool:
        looks.append(wait_s)
        assert wait_s <= 0.05
        time.sleep(0.01)
        return False

    assert guard.wait_for_end(Site.of("board"), boot_id(), 3, ended)
    assert looks


def test_where_all_that_is_left_was_cut_short_it_is_said(
    knob: Path, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the audit still tells goes back; what it told last nobody knows. It is told once."""
    dead, other = two_written(knob)
    dead._release()
    for file in (dead._site.lease, dead._site.record):
        file.write_bytes(b"")
    text = dead._site.audit.read_bytes()
    dead._site.audit.write_bytes(text[: text.index(str(other).encode())])
    with pytest.raises(BadFile, match="cut short and the lease gone: what was told last may still be changed"):
        board(knob).__enter__()
    assert program.main([]) == 6
    assert "cut short" in capsys.readouterr().out
    assert (knob.read_text(), other.read_text()) == ("1", "20")
    assert program.main([]) == 0


def test_a_restore_leaves_a_device_whose_lease_is_lost_to_a_guard_that_lives(
    knob: Path, holder: Callable[..., "subprocess.Popen[str]"], state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows the whole record, and would take a lease that was begun anew for its own, ended."""
    first = holder()
    guarding = int(first.guard[0])  # type: ignore[attr-defined]
    os.kill(guarding, signal.SIGSTOP)
    first.kill()
    first.wait()
    for kind in ("lease", "jsonl"):
        next(state.glob(f"*.{kind}")).write_bytes(b"")
    monkeypatch.setattr(program, "_WAIT_S", 0.0)
    with pytest.raises(DeviceError, match=rf"is being steered by process {guarding}\b"):
        restore_all()
    assert knob.read_text() == "10"
    os.kill(guarding, signal.SIGCONT)
    assert eventually(lambda: knob.read_text() == "1" and not standing())


def test_a_file_system_that_flushes_no_folders_holds_nobody_up(knob: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers EINVAL, as some network file systems do: the originals are on disk all the same, and come back."""
    real = os.fsync

    def flushed(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(handle)

    monkeypatch.setattr(os, "fsync", flushed)
    with board(knob) as device:
        device.write(str(knob), "10")
        assert knob.read_text() == "10"
        device.restore()
    assert knob.read_text() == "1"
