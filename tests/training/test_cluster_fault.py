"""Why a worker failed, in one line and with its last words."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from polythrottle.training.elastic.worker.process import LINES, WIDTH, Fault, LastWords, MemoryWatch, fault_of, message

TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "train.py", line 1, in <module>',
    "    raise ValueError('a mistake')",
    "ValueError: a mistake",
    "polythrottle: generation 1, rank 0: more",
)


@pytest.mark.parametrize(
    ("code", "said", "memory", "reason"),
    [
        (1, TRACEBACK, False, "a worker ended with code 1: ValueError: a mistake"),
        (3, (), None, "a worker ended with code 3"),
        (3, ("one", "two"), None, "a worker ended with code 3: two"),
        (-9, (), True, "SIGKILL ended a worker: the kernel ended processes for lack of memory meanwhile"),
        (-9, (), None, "SIGKILL ended a worker; lack of memory is the usual reason, see dmesg"),
        (-9, (), False, "SIGKILL ended a worker"),
        (-11, (), False, "SIGSEGV ended a worker"),
        (-99, (), False, "signal 99 ended a worker"),
    ],
)
def test_a_failure_is_one_line(code: int, said: tuple[str, ...], memory: bool | None, reason: str) -> None:
    """The exit code with the exception, or the signal's name with what the kernel says of memory."""
    fault = fault_of(code, said, memory)
    assert fault.reason == reason
    assert Fault.from_document(fault.document()) == fault


def test_of_two_tracebacks_the_last_one_counts() -> None:
    """An exception that was raised while another was handled is what ended the worker."""
    assert message([*TRACEBACK, "", *TRACEBACK[:3], "KeyError: 'x'", "some more"]) == "KeyError: 'x'"


def test_a_document_from_elsewhere_is_cut_to_size_and_made_plain() -> None:
    """Colours, control characters, long lines and many of them do not reach a terminal or the events."""
    fault = Fault.from_document({"exit_code": 1, "said": ["\x1b[31mred\x1b[0m\a" + "x" * 1000] * 50})
    assert len(fault.said) == LINES
    assert fault.said[0].startswith("redx")
    assert len(fault.said[0]) == WIDTH


def test_words_are_passed_on_and_their_end_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    """What a child writes to standard error arrives there, and the last lines are known when it has ended."""
    script = "import sys\nfor n in range(5000): print('line', n, file=sys.stderr)"
    with LastWords() as words:
        subprocess.run([sys.executable, "-c", script], check=True)
        assert words.lines()[-1] == "line 4999"
        assert len(words.lines()) == LINES
        os.write(2, b"after\r50 %\r51 %")
        assert words.lines()[-2:] == ["50 %", "51 %"]
    passed = capfd.readouterr().err
    assert passed.startswith("line 0\nline 1\n")
    assert passed.endswith("line 4999\nafter\r50 %\r51 %")
    os.write(2, b"mine again\n")
    assert capfd.readouterr().err == "mine again\n"


def test_nobody_who_listens_does_not_stop_who_speaks() -> None:
    """A terminal that was closed loses the words, not the training."""
    reading, writing = os.pipe()
    spare = os.dup(writing)
    os.close(reading)
    with LastWords(spare) as words:
        os.write(spare, b"unheard\n")
        assert words.lines() == ["unheard"]
    os.close(spare)
    os.close(writing)


def tree(root: Path, machine: int | None, group: int | None) -> Path:
    """Plant what the kernel says of memory."""
    for path, count in (("proc/vmstat", machine), ("sys/fs/cgroup/a/b/memory.events", group)):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        if count is not None:
            (root / path).write_text(f"oom 7\noom_kill {count}\noom_group_kill 3\n")
    (root / "proc/self").mkdir(exist_ok=True)
    (root / "proc/self/cgroup").write_text("0::/a/b\n")
    return root


def test_the_kernels_counts_tell_lack_of_memory(tmp_path: Path) -> None:
    """Of the group or of the machine, each only while it rises; without either nobody knows."""
    watch = MemoryWatch(tree(tmp_path, 4, 2))
    assert watch.killed() is False
    tree(tmp_path, 4, 3)
    assert watch.killed() is True
    assert watch.killed() is False
    tree(tmp_path, 5, 3)
    assert watch.killed() is True
    assert MemoryWatch(tmp_path / "nothing").killed() is None
