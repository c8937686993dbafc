"""What is left changed is named: after a restore that failed, beside another device, by a guard, over a fork."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from polythrottle.actuation import Actuator, Control, audit, restore_all, standing
from polythrottle.actuation import restore as program
from polythrottle.actuation.state import lease as leases
from polythrottle.actuation.state import record as records
from polythrottle.actuation.state.lease import Fence
from polythrottle.actuation.state.site import Site, boot_id
from polythrottle.actuation.watchdog import Watchdog
from polythrottle.cli import _tell_what_is_left
from polythrottle.cli.commands import run
from polythrottle.domain.errors import DeviceError, PolythrottleError, StorageError, left_here
from polythrottle.inspect.machine import record_findings

LEVELS = frozenset(map(str, range(1000)))


@pytest.fixture
def knob(tmp_path: Path) -> Path:
    """Return a file that holds 1."""
    path = tmp_path / "knob"
    path.write_text("1\n")
    return path


@pytest.fixture(autouse=True)
def restored(knob: Path) -> Iterator[None]:
    """Leave nothing changed, and nothing to be told by the next test."""
    yield
    with suppress(PolythrottleError):
        restore_all(force=True)
    left_here()


def board(knob: Path, device: str = "board", *, guarded: bool = False) -> Actuator:
    """Return an actuator with one control."""
    made = Actuator(device, guarded=guarded)
    made.allow(Control(str(knob), LEVELS))
    return made


def killed(knob: Path, device: str = "board") -> Site:
    """Write 10 as a writer that is then killed would; return where it is on record."""
    dead = board(knob, device).__enter__()
    dead.write(str(knob), "10")
    fence = dead._fence
    assert fence is not None
    fence.let_go()
    dead._fence = None
    dead._release()
    return dead._site


def kept(knob: Path) -> Site:
    """Apply 10 by hand, for good, as a profile would; its keeper is ended."""
    device = board(knob).__enter__()
    device.write(str(knob), "10")
    site = device._site
    device.hand_over("profile x", None)
    keeper = Fence(site.lease, boot_id()).read().pid
    if keeper:
        os.kill(keeper, 9)
    return site


def test_a_record_that_is_moved_away_after_a_restore_failed_on_it_hides_nothing(knob: Path) -> None:
    """The lease that the failed restore has taken still says that something stands, and the audit says what."""
    site = kept(knob)
    os.mkfifo(site.folder / "pipe")
    os.replace(site.folder / "pipe", site.record)  # no plain file: nobody may read it
    with pytest.raises(StorageError, match=str(knob)):
        restore_all()
    site.record.unlink()
    assert [each.keys for each in standing()] == [(str(knob),)]
    (outcome,) = restore_all()
    assert outcome.restored == (str(knob),)
    assert knob.read_text() == "1"
    assert not standing()
    assert restore_all() == ()


def test_a_restore_that_failed_in_the_middle_is_not_forgotten(knob: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Record gone, disk full and control gone: the first says so; once the control is back the next puts it back."""
    site = kept(knob)
    site.record.unlink()

    def full(*_: object, **__: object) -> None:
        raise StorageError("no space left on device")

    monkeypatch.setattr(records.Record, "_append", full)
    knob.rename(knob.with_name("away"))
    assert [each.key for each in restore_all()[0].failed] == [str(knob)]
    assert [each.keys for each in standing()] == [(str(knob),)]
    knob.with_name("away").rename(knob)
    assert restore_all()[0].restored == (str(knob),)
    assert knob.read_text() == "1"


def test_a_writer_takes_over_what_a_failed_restore_has_left_to_the_audit(knob: Path) -> None:
    """The next writer, too, goes by the audit of the boot: what was tuned is no original."""
    site = killed(knob)
    site.record.unlink()
    site.record.mkdir()
    with pytest.raises(StorageError):
        restore_all()
    site.record.rmdir()
    with board(knob) as device:
        assert device.original(str(knob)) == "1"
    assert knob.read_text() == "1"


def test_an_audit_that_has_settled_everything_is_believed(knob: Path) -> None:
    """Killed after all was put back, before its lease said so: nothing stands changed, nothing is said to be lost."""
    site = killed(knob)
    fence = Fence(site.lease, boot_id())
    restore_all()
    token = fence.take("process 1", None, dirty=True)
    line = site.audit.read_text().splitlines()[-1]
    site.audit.write_text(site.audit.read_text() + line.replace(f'"token": {token - 1}', f'"token": {token}') + "\n")
    fence.release(token, settled=False)
    assert not standing()
    assert restore_all() == ()
    site.audit.unlink()
    assert "cannot be known" in restore_all()[0].damage[0]


def test_a_disk_that_fails_at_the_last_step_drops_nothing_that_was_found(
    knob: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A foreign value, and the folder cannot be flushed once the record is put aside: the value is named."""
    killed(knob)
    knob.write_text("77")

    def broken(folder: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(records, "sync_folder", broken)
    (outcome,) = restore_all()
    assert [each.found for each in outcome.foreign] == ["77"]


def test_a_lock_that_is_no_file_drops_nothing_that_was_found(knob: Path) -> None:
    """A folder in the place of the lock: what somebody else has changed is named all the same."""
    site = kept(knob)
    knob.write_text("77")
    site.lock.unlink()
    site.lock.mkdir()
    (outcome,) = restore_all()
    assert [each.found for each in outcome.foreign] == ["77"]
    site.lock.rmdir()


def test_a_device_that_cannot_be_restored_hides_nothing_of_the_others(
    knob: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two devices, one with a strange record: what was left on the other is in the error, with its number."""
    other = knob.with_name("other")
    other.write_text("2")
    killed(knob, "a")
    strange = killed(other, "b")
    knob.write_text("77")
    strange.record.unlink()
    strange.record.mkdir()
    with pytest.raises(StorageError, match=rf"a: left {knob} holds 77, was 1") as caught:
        restore_all()
    assert str(other) in str(caught.value), "the audit knows what the strange record would have named"
    assert run(["restore", "--json"]) == 8
    assert f"{knob} holds 77, was 1" in capsys.readouterr().err
    strange.record.rmdir()
    assert {each.device for each in restore_all()} == {"a", "b"}
    assert other.read_text() == "2"


def test_what_a_guard_left_to_somebody_else_is_named_until_the_next_writer(
    knob: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody heard the guard: restore and doctor name the control, tune takes it for what it finds."""
    killed(knob)
    knob.write_text("77")
    site = Site.of("board")
    program.take_over(site, boot_id(), Fence(site.lease, boot_id()).read().token)
    assert run(["restore"]) == 6
    assert f"{knob} holds 77, was 1: changed by someone else since" in " ".join(capsys.readouterr().out.split())
    (finding,) = [each for each in record_findings() if each.subject == "board"]
    assert f"{knob} holds 77, was 1" in finding.explanation
    assert finding.remedy is not None
    assert "--force" in finding.remedy
    with board(knob) as device:
        device.write(str(knob), "5")
    assert knob.read_text() == "77"
    assert restore_all() == ()


def test_what_was_left_and_is_gone_or_back_is_named_no_more(knob: Path) -> None:
    """Whoever changed it has put it back, or its tree of files is gone."""
    killed(knob)
    knob.write_text("77")
    assert restore_all()[0].foreign
    knob.unlink()
    assert restore_all() == ()
    knob.write_text("1")
    assert restore_all() == ()
    knob.write_text("78")
    assert restore_all()[0].foreign
    assert knob.read_text() == "78"


def test_what_a_command_has_left_is_told_at_its_end(knob: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tune and apply end by naming what they did not put back; once."""
    with board(knob) as device:
        device.write(str(knob), "10")
        knob.write_text("77")
    _tell_what_is_left()
    assert f"board: left {knob} holds 77, was 1" in capsys.readouterr().err
    _tell_what_is_left()
    assert not capsys.readouterr().err


def planted(tmp_path: Path) -> tuple[Actuator, Path, str]:
    """Return the actuator of a planted board that has written 10 to a control and was killed, the control, its URI."""
    tree = tmp_path / "tree"
    tree.mkdir()
    knob = tree / "knob"
    knob.write_text("1")
    made = board(knob, f"jetson {tree}").__enter__()
    made.write(str(knob), "10")
    fence = made._fence
    assert fence is not None
    fence.let_go()
    made._fence = None
    made._release()
    return made, knob, f"jetson?root={tree}"


def test_what_was_left_is_named_and_forced_back_by_the_devices_name(tmp_path: Path) -> None:
    """As doctor advises it: the URI means the device that was left so, though nothing else stands."""
    _, knob, uri = planted(tmp_path)
    knob.write_text("77")
    assert run(["restore", "--no-daemon", "--device", uri]) == 6
    assert run(["restore", "--no-daemon", "--device", uri]) == 6
    assert run(["restore", "--no-daemon", "--force", "--device", uri]) == 0
    assert knob.read_text() == "1"
    assert run(["restore", "--no-daemon", "--device", uri]) == 0


@pytest.mark.parametrize("gone", ["record", "lease"])
@pytest.mark.parametrize("strange", [False, True])
def test_a_device_is_restored_by_its_name_though_no_record_tells_it(tmp_path: Path, gone: str, strange: bool) -> None:
    """Record or lease deleted, or no plain file: put back by the audit or the record, or said to stand; never 0."""
    dead, knob, uri = planted(tmp_path)
    file: Path = getattr(dead._site, gone)
    file.unlink()
    if strange:
        file.mkdir()
        assert run(["restore", "--no-daemon", "--device", uri]) == 8
        assert knob.read_text() == "10"
        file.rmdir()
    assert run(["restore", "--no-daemon", "--device", uri]) == 0
    assert knob.read_text() == "1"


def test_the_audit_knows_the_original_however_often_it_was_put_aside(
    knob: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What may not be back is told again before older lines are forgotten."""
    monkeypatch.setattr(audit, "_MOST_BYTES", 3000)
    dead = board(knob).__enter__()
    for level in range(10, 60):
        dead.write(str(knob), str(level))
    fence = dead._fence
    assert fence is not None
    fence.let_go()
    dead._fence = None
    dead._release()
    dead._site.record.unlink()
    assert '"before": "1"' not in dead._site.audit.read_text().splitlines()[0]
    assert restore_all()[0].restored == (str(knob),)
    assert knob.read_text() == "1"


def test_a_damaged_session_that_was_told_of_is_no_part_of_the_next(knob: Path) -> None:
    """What holds after such a restore counts as found, also for whom the audit is all that is left."""
    site = killed(knob)
    site.record.write_text(site.record.read_text() + "garbage\n")
    assert restore_all()[0].damage
    knob.write_text("5")
    site = killed(knob)
    site.record.unlink()
    assert restore_all()[0].restored == (str(knob),)
    assert knob.read_text() == "5"


def test_a_second_restoring_of_one_writer_forgets_nothing_of_the_first(knob: Path) -> None:
    """Both that somebody else has changed are named afterwards, also the one that no line on record names."""
    third = knob.with_name("third")
    third.write_text("3")
    other = knob.with_name("other")
    other.write_text("2")
    device = board(knob)
    device.allow(Control(str(other), LEVELS), Control(str(third), LEVELS))
    with device:
        device.write(str(knob), "10")
        knob.write_text("77")
        device.restore()
        device.write(str(other), "20")
        other.write_text("88")
        third.write_text("99")
    named = {each.key: (each.original, each.found) for each in restore_all()[0].foreign}
    assert named == {str(knob): ("1", "77"), str(other): ("2", "88"), str(third): ("3", "99")}
    restore_all(force=True)
    assert [each.read_text() for each in (knob, other, third)] == ["1", "2", "3"]


def test_a_strange_left_file_drops_nothing_that_was_found(knob: Path) -> None:
    """It is one more line beside what the restoring has found; doctor says so too."""
    site = killed(knob)
    site.record.unlink()
    site.audit.unlink()
    site.left.mkdir()
    (outcome,) = restore_all()
    assert any("cannot be known" in line for line in outcome.damage)
    assert any(str(site.left) in line for line in outcome.damage)
    assert any(str(site.left) in each.explanation for each in record_findings())
    site.left.rmdir()


def test_a_damaged_left_file_says_nothing_once_all_is_as_it_was_found(knob: Path) -> None:
    """Whoever has changed it has put it back."""
    site = killed(knob)
    knob.write_text("77")
    restore_all()
    site.left.write_text(site.left.read_text() + "garbage\n")
    assert restore_all()[0].foreign
    knob.write_text("1")
    assert restore_all() == ()


def test_a_guard_that_dies_at_its_start_lets_nothing_be_left_changed(
    knob: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who would revert it must be there before the writer goes; else all is put back, and the command fails."""

    def hand_over() -> None:
        with board(knob) as device:
            device.write(str(knob), "10")
            monkeypatch.setattr("polythrottle.actuation.watchdog.sys.executable", "/bin/false")
            device.hand_over("profile x", 60)

    with pytest.raises(DeviceError, match="does not stay"):
        hand_over()
    assert knob.read_text() == "1"
    assert not standing()


def test_doctor_says_where_nothing_reverts_what_was_applied_for_a_time(knob: Path) -> None:
    """Its guard has died, and its time is not over yet."""
    device = board(knob).__enter__()
    device.write(str(knob), "10")
    device.hand_over("profile x", 600)
    (found,) = standing()
    os.kill(found.lease.pid, 9)
    ends = time.monotonic() + 60
    while found.lease.alive and time.monotonic() < ends:
        time.sleep(0.01)
    (finding,) = [each for each in record_findings() if each.subject == "board"]
    assert finding.works is False
    assert "nothing reverts it" in finding.explanation


FORKED = """
import os, sys
from pathlib import Path
from polythrottle.actuation import Actuator, Control
from polythrottle.domain.errors import DeviceError

knob = Path(sys.argv[1])
device = Actuator("board")
device.allow(Control(str(knob), frozenset(map(str, range(1000)))))
with device:
    device.write(str(knob), "10")
    guard = device._watch._guard.pid
    child = os.fork()
    if not child:
        try:
            device.write(str(knob), "11")
        except DeviceError as err:
            print(err, flush=True)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert knob.read_text() == "10", "the child has restored it"
    assert device._watch._guard.poll() is None, "the child has ended the guard"
    device.write(str(knob), "12")
    assert device._watch._guard.pid == guard
    if "killed" in sys.argv:
        os.kill(os.getpid(), 9)
assert knob.read_text() == "1"
"""


def test_a_child_that_is_forked_within_a_writer_ends_nothing_of_it(knob: Path) -> None:
    """The child may not write, and its end leaves device, lease and guard as they are."""
    done = subprocess.run([sys.executable, "-c", FORKED, str(knob)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "which has forked this one" in done.stdout
    assert not standing()


OUTLIVED = """
import os, sys, time
from pathlib import Path
from polythrottle.actuation import Actuator, Control

knob = Path(sys.argv[1])
device = Actuator("board", guarded=False)
device.allow(Control(str(knob), frozenset(map(str, range(1000)))))
with device:
    device.write(str(knob), "10")
    child = os.fork()
    if not child:
        os.close(1), os.close(2)
        time.sleep(600)
    os.kill(os.getpid(), 9)
"""


def test_a_child_that_outlives_a_killed_writer_keeps_nobody_out(knob: Path) -> None:
    """It holds none of its parent's locks: what is left is put back, and the next writer begins."""
    writer = subprocess.Popen([sys.executable, "-c", OUTLIVED, str(knob)], start_new_session=True)
    writer.wait()
    try:
        assert restore_all()[0].restored == (str(knob),)
        with board(knob) as device:
            device.write(str(knob), "5")
        assert knob.read_text() == "1"
    finally:
        os.killpg(writer.pid, 9)


def test_a_lease_that_was_ended_lets_nobody_write(knob: Path) -> None:
    """Whatever has released it under a writer's hands: what is set then would have no guard."""
    device = board(knob).__enter__()
    fence = device._fence
    assert fence is not None
    device.write(str(knob), "10")
    fence.release(device._token, settled=True)
    with pytest.raises(DeviceError, match="it was ended"):
        device.write(str(knob), "11")
    assert knob.read_text() == "10"
    device.__exit__(None, None, None)
    assert knob.read_text() == "1"


def test_a_guard_that_ends_by_itself_is_noticed_at_the_next_write(knob: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is started in its place; where that one ends too nothing more is set, and the device is put back."""
    monkeypatch.setattr("polythrottle.actuation.watchdog.sys.executable", "/bin/false")
    with board(knob, guarded=True) as device:
        device.write(str(knob), "10")
        watch = device._watch
        assert isinstance(watch, Watchdog)
        watch._guard.wait()
        device.write(str(knob), "11")
        watch._guard.wait()
        with pytest.raises(DeviceError, match="does not stay"):
            device.write(str(knob), "12")
        assert knob.read_text() == "11"
    assert knob.read_text() == "1"


def test_a_state_folder_whose_name_is_not_in_utf_8_is_a_folder(
    knob: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path is bytes to the kernel."""
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    with board(knob) as device:
        device.write(str(knob), "10")
        assert knob.read_text() == "10"
    assert knob.read_text() == "1"


def test_who_reads_a_folder_is_not_told_to_choose_another(knob: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another folder would hide the record from restore."""
    site = killed(knob)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    os.chown(site.folder, 1234, 1234)
    with pytest.raises(StorageError, match="belongs to user 1234") as caught:
        restore_all()
    assert "POLYTHROTTLE_STATE_DIR" not in str(caught.value)
    monkeypatch.undo()
    os.chown(site.folder, os.geteuid(), os.getegid())


def test_who_stands_in_the_middle_of_a_write_is_named_by_its_number(
    knob: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It need not be the lease's holder."""
    site = killed(knob)
    code = (
        "import fcntl, sys\nfile = open(sys.argv[1])\nfcntl.flock(file, fcntl.LOCK_EX)\n"
        "print(flush=True)\nsys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(site.lease)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None
    other.stdout.readline()
    monkeypatch.setattr(leases, "PATIENCE_S", 0.05)
    try:
        with pytest.raises(DeviceError, match=f"process {other.pid} stands in the middle of a write"):
            restore_all()
    finally:
        other.communicate()
