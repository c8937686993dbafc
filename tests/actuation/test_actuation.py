"""The writer: nothing stays changed, whoever dies, and nobody else's change is undone."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polythrottle.actuation import Actuator, Control
from polythrottle.domain.errors import BadFile, DeviceError, KnobRejected, PermissionDenied, StorageError

BOOT = "boot-1"


class Memory:
    """Files in memory that can refuse, round and forbid."""

    def __init__(self, **values: str) -> None:
        self.values = values
        self.log: list[tuple[str, str]] = []
        self.errors: dict[str, int] = {}
        self.kept: Mapping[str, str] = {}

    def read(self, path: str) -> str:
        """Return a value."""
        return self.values[path]

    def write(self, path: str, text: str) -> None:
        """Set a value, or what the kernel makes of it."""
        if path in self.errors:
            raise OSError(self.errors[path], os.strerror(self.errors[path]))
        self.log.append((path, text))
        self.values[path] = self.kept.get(text, text)


class Ordered(Memory):
    """A minimum and a maximum that may never cross, as in devfreq."""

    def write(self, path: str, text: str) -> None:
        """Refuse a crossing."""
        after = {**self.values, path: text}
        if int(after["min"]) > int(after["max"]):
            raise OSError(errno.EINVAL, "Invalid argument")
        super().write(path, text)


def actuator(files: Memory, state: Path, boot_id: str = BOOT) -> Actuator:
    """Return an actuator on files in memory."""
    made = Actuator("board", state=state, controls=files, boot_id=boot_id, guarded=False)
    levels = frozenset(map(str, range(1000)))
    made.allow(*(Control(key, levels) for key in files.values))
    return made


def records(state: Path) -> list[Path]:
    """Return the records that stand."""
    return sorted(state.glob("*.jsonl"))


def abandoned(files: Memory, state: Path, **levels: str) -> None:
    """Write and then vanish without restoring, as a killed process does."""
    dead = actuator(files, state)
    dead.__enter__()
    for path, text in levels.items():
        dead.write(path, text)
    dead._release()


def test_leaving_puts_everything_back_last_first(tmp_path: Path) -> None:
    """The originals return in the opposite order of their first writes, and the record goes."""
    files = Memory(a="1", b="2")
    with actuator(files, tmp_path) as board:
        for path, text in (("a", "10"), ("b", "20"), ("a", "11")):
            board.write(path, text)
    assert files.values == {"a": "1", "b": "2"}
    assert files.log[-2:] == [("b", "2"), ("a", "1")]
    assert not records(tmp_path)


def test_the_original_is_on_disk_before_the_write(tmp_path: Path) -> None:
    """At the moment of the first write the record already names the original."""

    class Looking(Memory):
        def write(self, path: str, text: str) -> None:
            self.seen = records(tmp_path)[0].read_text().splitlines()
            super().write(path, text)

    files = Looking(a="1")
    with actuator(files, tmp_path) as board:
        board.write("a", "10")
        head, line = (json.loads(text) for text in files.seen)
    head.pop("crc"), line.pop("crc")
    assert head == {"version": 2, "device": "board", "boot_id": BOOT, "pid": os.getpid(), "originals": {"a": "1"}}
    assert line == {"key": "a", "original": "1", "written": "10"}


def test_a_record_that_cannot_be_written_stops_the_write(tmp_path: Path) -> None:
    """Without a saved original nothing is touched."""
    files = Memory(a="1")
    with actuator(files, tmp_path) as board:
        board._site.record.mkdir()
        with pytest.raises(StorageError, match="nothing was changed"):
            board.write("a", "10")
        board._site.record.rmdir()
    assert not files.log


def test_what_already_holds_is_not_written(tmp_path: Path) -> None:
    """Setting a value that is there leaves device and disk alone."""
    files = Memory(a="1")
    with actuator(files, tmp_path) as board:
        board.write("a", "1")
        assert not records(tmp_path)
    assert not files.log


@pytest.mark.parametrize(("kept", "says"), [("8", "holds 8"), ("1", "holds 1")])
def test_a_rounded_or_ignored_value_is_rejected_and_restored(tmp_path: Path, kept: str, says: str) -> None:
    """The value is read back; one the kernel altered is an error and does not stay."""
    files = Memory(a="1")
    files.kept = {"10": kept}
    with actuator(files, tmp_path) as board, pytest.raises(KnobRejected, match=says):
        board.write("a", "10")
    assert files.values == {"a": "1"}


@pytest.mark.parametrize(
    ("code", "kind", "says"),
    [
        (errno.EINVAL, KnobRejected, "Invalid argument"),
        (errno.EBUSY, KnobRejected, "busy"),
        (errno.EIO, KnobRejected, "error"),
        (errno.EACCES, PermissionDenied, "root"),
        (errno.EROFS, PermissionDenied, "root"),
        (errno.ENODEV, DeviceError, "gone"),
    ],
)
def test_errors_of_the_kernel_become_ours(tmp_path: Path, code: int, kind: type[Exception], says: str) -> None:
    """A refused value, a missing right and a missing device are different errors, each with its remedy."""
    files = Memory(a="1")
    files.errors = {"a": code}
    with actuator(files, tmp_path) as board, pytest.raises(kind, match=says):
        board.write("a", "10")


def test_a_foreign_change_is_left_alone_and_reported(tmp_path: Path) -> None:
    """Restoring compares first: what someone else set since stays theirs."""
    files = Memory(a="1", b="2")
    board = actuator(files, tmp_path)
    with board:
        board.write("a", "10")
        board.write("b", "20")
        files.values["a"] = "77"
    assert files.values == {"a": "77", "b": "2"}
    assert [str(each) for each in board.differences] == ["a holds 77, was 1: changed by someone else since, left alone"]


def test_restoring_goes_on_past_errors_and_keeps_what_failed(tmp_path: Path) -> None:
    """One file that cannot be put back does not keep the others from it, and is tried again at the next start."""
    files = Memory(a="1", b="2", c="3")
    board = actuator(files, tmp_path)
    board.__enter__()
    for path in "abc":
        board.write(path, f"{files.values[path]}0")
    files.errors = {"b": errno.EIO}
    with pytest.raises(DeviceError, match="b holds 20, was 2"):
        board.__exit__(None, None, None)
    assert files.values == {"a": "1", "b": "20", "c": "3"}
    files.errors = {}
    with actuator(files, tmp_path):
        assert files.values["b"] == "2"


def test_originals_that_depend_on_each_other_are_put_back(tmp_path: Path) -> None:
    """A maximum that may not sink below the minimum is restored after it."""
    files = Ordered(min="100", max="200")
    with actuator(files, tmp_path) as board:
        board.write("max", "900")
        board.write("min", "800")
        board.write("max", "850")
    assert files.values == {"min": "100", "max": "200"}


def test_restoring_twice_equals_once(tmp_path: Path) -> None:
    """The second time writes nothing."""
    files = Memory(a="1")
    with actuator(files, tmp_path) as board:
        board.write("a", "10")
        board.restore()
        log = list(files.log)
        board.restore()
        assert files.log == log


def test_a_leftover_is_restored_on_entry(tmp_path: Path) -> None:
    """What a dead process left changed is put back before anything else."""
    files = Memory(a="1")
    abandoned(files, tmp_path, a="10")
    assert actuator(files, tmp_path).original("a") == "1"
    with actuator(files, tmp_path) as board:
        assert files.values == {"a": "1"}
        board.write("a", "5")
    assert files.values == {"a": "1"}


def test_the_first_original_wins(tmp_path: Path) -> None:
    """A tuned value is never saved as an original, however often the process dies."""
    files = Memory(a="1")
    for level in ("10", "20", "30"):
        abandoned(files, tmp_path, a=level)
    with actuator(files, tmp_path):
        assert files.values == {"a": "1"}


def test_a_record_of_another_boot_is_void(tmp_path: Path) -> None:
    """After a reboot the kernel has its own values, and they are the originals."""
    files = Memory(a="1")
    abandoned(files, tmp_path, a="10")
    files.values = {"a": "3"}
    with actuator(files, tmp_path, "boot-2") as board:
        assert board.original("a") == "3"
        assert not records(tmp_path)


def test_a_torn_last_line_counts_for_nothing(tmp_path: Path) -> None:
    """A line that never reached the disk whole was never acted upon."""
    files = Memory(a="1", b="2")
    abandoned(files, tmp_path, a="10")
    with records(tmp_path)[0].open("a") as file:
        file.write('{"key": "b", "orig')
    with actuator(files, tmp_path) as board:
        assert files.values == {"a": "1", "b": "2"}
        board.write("b", "20")
    assert files.values == {"a": "1", "b": "2"}


@pytest.mark.parametrize("line", ["garbage", "[]", '{"key": 1, "original": "1", "written": "2"}', '{"version": 9}'])
def test_a_corrupt_record_stops_everything(tmp_path: Path, line: str) -> None:
    """A record that cannot be understood is named with its line, and nothing is written."""
    files = Memory(a="1")
    abandoned(files, tmp_path, a="10")
    with records(tmp_path)[0].open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(BadFile, match="line 3"), actuator(files, tmp_path):
        pass
    assert files.values == {"a": "10"}


def test_a_second_writer_is_refused_with_the_holder_named(tmp_path: Path) -> None:
    """One writer at a time."""
    files = Memory(a="1")
    with actuator(files, tmp_path), pytest.raises(DeviceError, match=f"process {os.getpid()}"):
        actuator(files, tmp_path).__enter__()
    with actuator(files, tmp_path) as board:
        board.write("a", "2")


def test_a_thread_that_sets_while_another_leaves_changes_nothing(tmp_path: Path) -> None:
    """A write that has begun is waited for and put back, and what waits to be written then is refused."""
    begun, go_on = threading.Event(), threading.Event()
    refused: list[str] = []

    class Slow(Memory):
        def write(self, path: str, text: str) -> None:
            if text == "5":
                begun.set()
                assert go_on.wait(30)
            super().write(path, text)

    files = Slow(a="1", b="2")
    device = actuator(files, tmp_path)

    def set_more() -> None:
        for text in ("5", "6", "7"):
            try:
                device.write("a", text)
            except DeviceError as err:
                refused.append(str(err))

    with device:
        setter = threading.Thread(target=set_more)
        setter.start()
        assert begun.wait(30)
        threading.Timer(0.2, go_on.set).start()
    setter.join(30)
    assert files.values == {"a": "1", "b": "2"}
    assert refused
    told = ("is being left", "it was ended", "must be entered")  # as far as the other has come
    assert all(any(words in each for words in told) for each in refused), refused


def test_what_waits_to_be_set_while_everything_is_put_back_is_refused(tmp_path: Path) -> None:
    """The fence is its own writer's until the last control is put back: then nothing more is set."""
    tried, refused = threading.Event(), threading.Event()

    class Watched(Memory):
        def write(self, path: str, text: str) -> None:
            if text == "1":
                setter.start()
                assert tried.wait(30)
            super().write(path, text)

    files = Watched(a="1")
    device = actuator(files, tmp_path)

    def set_more() -> None:
        tried.set()
        try:
            device.write("a", "6")
        except DeviceError:
            refused.set()

    setter = threading.Thread(target=set_more)
    with device:
        device.write("a", "5")
    setter.join(30)
    assert refused.is_set()
    assert files.values == {"a": "1"}


def test_nothing_is_written_outside_the_context(tmp_path: Path) -> None:
    """A device that was not entered cannot be steered."""
    with pytest.raises(DeviceError, match="entered"):
        actuator(Memory(a="1"), tmp_path).write("a", "2")


def test_an_unwritable_state_folder_is_said_before_anything(tmp_path: Path) -> None:
    """Without a place for originals the device is not entered."""
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="POLYTHROTTLE_STATE_DIR"):
        actuator(Memory(a="1"), tmp_path / "file" / "below").__enter__()


CHILD = """
import os, signal, sys
from polythrottle.actuation import Actuator, Control, SysFiles

class Dying(SysFiles):
    def write(self, path, text):
        if sys.argv[2] == "before": os.kill(os.getpid(), signal.SIGKILL)
        super().write(path, text)
        if sys.argv[2] == "after": os.kill(os.getpid(), signal.SIGKILL)

with Actuator("board", controls=Dying(), guarded=False) as board:
    board.allow(Control(sys.argv[1], frozenset({"10"})))
    board.write(sys.argv[1], "10")
"""


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_killed_process_leaves_nothing_changed_for_the_next(tmp_path: Path, moment: str) -> None:
    """After SIGKILL around a real write, the next start finds and restores the original."""
    knob = tmp_path / "knob"
    knob.write_text("1\n")
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(knob), moment], capture_output=True, check=False
    )
    assert child.returncode == -signal.SIGKILL
    with Actuator("board", guarded=False) as board:
        assert knob.read_text().strip() == "1"
        assert not board.differences


steps = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.sampled_from("abc"), st.integers(1, 4).map(str)),
        st.tuples(st.sampled_from(["fail", "die", "restore"]), st.sampled_from("abc"), st.just("")),
    ),
    max_size=12,
)


@pytest.mark.slow
@settings(deadline=None)  # each step waits for the disk
@given(steps)
def test_any_sequence_of_writes_failures_and_deaths_leaves_the_device_as_found(
    tmp_path_factory: pytest.TempPathFactory, sequence: list[tuple[str, str, str]]
) -> None:
    """Whatever happened, after one more start and end every value is the original."""
    state = tmp_path_factory.mktemp("state")
    files = Memory(a="0", b="0", c="0")
    files.kept = {"4": "3"}
    board = actuator(files, state).__enter__()
    for what, path, text in sequence:
        files.errors = {path: errno.EIO} if what == "fail" else {}
        try:
            if what in ("write", "fail"):
                board.write(path, text or "1")
            elif what == "restore":
                board.restore()
            else:
                board._release()
                board = actuator(files, state).__enter__()
        except KnobRejected:
            continue
    board._release()
    files.errors = {}
    with actuator(files, state) as last:
        pass
    assert files.values == {"a": "0", "b": "0", "c": "0"}
    assert not last.differences
