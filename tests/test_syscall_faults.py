"""A sample of `benchmarks/syscall_faults.py`: whatever system call of a session fails, the board is back or named."""

import sys
from collections.abc import Iterator
from datetime import date
from multiprocessing.pool import Pool
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import injecting
import syscall_faults
from injecting import Fault

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not injecting.available(), reason="needs libseccomp 2.5 or newer, as Debian and Ubuntu have it"),
]


@pytest.fixture
def worker() -> Iterator[Pool]:
    """Return a process to try single cells in."""
    with syscall_faults.workers(1) as pool:
        yield pool


@pytest.mark.parametrize("name", syscall_faults.SESSIONS)
def test_whatever_call_fails_the_board_is_back_or_named(name: str) -> None:
    """Other calls each day, one at a time and in pairs."""
    seed = date.today().toordinal()
    for asked in ({"sample": 40}, {"many_pairs": 20}):
        found = syscall_faults.tried([name], seed=seed, jobs=1, **asked)
        assert len(found) == sum(asked.values())
        assert {cell: wrong for cell, (_, wrong) in found.items() if wrong} == {}
        assert sum(met > 0 for met, _ in found.values()) > 0.8 * len(found)


def test_a_call_that_fails_is_met(worker: Pool) -> None:
    """Else the others would prove nothing: the originals' file cannot be flushed, and nothing is written."""
    (end,) = worker.map(flushed_in_vain, [1])
    assert end == (8, True, [])


def flushed_in_vain(number: int) -> tuple[int | None, bool, list[str]]:
    """Return how a writer ends that cannot flush: its code, whether it says that nothing was changed, and what was."""
    end, _ = syscall_faults.bench().run(syscall_faults.SESSIONS["writer"], [Fault("fsync", number, "EIO")])
    return end.code, "nothing was changed" in end.said, end.changed


def test_a_restore_that_fails_once_waits_for_the_guard_whose_lease_it_has_ended(worker: Pool) -> None:
    """It took that guard for a living writer when it tried again, and left all as it was."""
    calls = worker.apply(syscall_faults.calls_of, ("restore applied",))
    opened = [call for call in calls if call[0] == "openat"][date.today().toordinal() % 2 :: 2]
    cells = [("restore applied", (Fault(*call, "EMFILE"),)) for call in opened]
    assert [result for result in worker.map(syscall_faults.tried_cell, cells) if result[2]] == []


def test_a_thread_without_memory_for_its_first_call_hangs_nobody(worker: Pool) -> None:
    """Python waits for good for such a one's first sign of life."""
    calls = worker.apply(syscall_faults.calls_of, ("apply",))
    cells = [("apply", (Fault("mmap", number, "ENOMEM"),)) for number in range(1, 4)]
    assert any(call.startswith("clone") for call, _ in calls)
    assert [result for result in worker.map(syscall_faults.tried_cell, cells) if result[2]] == []
