"""What a controller keeps of a job over restarts: time that goes on, losses, recoveries, successors."""

from pathlib import Path
from typing import Any

import pytest

from polythrottle.storage.atomic_file import is_locked
from polythrottle.training.elastic.events import EVENTS, EventLog, JobProgress, keeper, origin_of, replayed


def an(event: str, at_s: float, **more: Any) -> dict[str, Any]:
    """Return an event, dated as if the job had begun in 1970."""
    return {"event": event, "at_s": at_s, "unix_s": at_s, **more}


def test_a_jobs_time_goes_on_by_the_calendar_over_a_restart() -> None:
    """The time without a controller counts; it is known because each event is dated."""
    found = origin_of([an("joined", 2.0), an("formed", 5.0)], unix_s=65.0)
    assert (found.at_s, found.restarted, found.away_s) == (65.0, True, 60.0)
    assert origin_of([], unix_s=65.0).restarted is False


@pytest.mark.parametrize("last", [{"event": "formed", "at_s": 5.0}, an("formed", 5.0, unix_s=100.0)])
def test_time_never_goes_back(last: dict[str, Any]) -> None:
    """Without a date, or with a calendar that was set back, it goes on where it stood, and the gap is unknown."""
    found = origin_of([an("joined", 7.0), last], unix_s=65.0)
    assert (found.at_s, found.away_s) == (7.0, None)


def test_machine_time_is_the_same_when_events_are_read_again() -> None:
    """A controller that begins again knows how long nodes were there, so that its hazard does not jump."""
    records = [an("joined", 0.0, node="a"), an("joined", 10.0, node="b"), an("left", 30.0, node="b")]
    found = replayed([*records, an("checkpoint", 40.0)])
    assert found.machine_s == 40 + 20
    found.take(an("restarted", 1000.0))
    assert found.machine_s == 60, "nobody saw what the nodes did meanwhile"
    found.until(1010.0)
    assert found.machine_s == 70


def test_a_node_not_heard_of_since_a_restart_is_no_loss() -> None:
    """It left while nobody kept the job, for whatever reason: a departure, and no beginning of a recovery."""
    found = replayed([an("joined", 0.0, node="a"), an("restarted", 50.0), an("lost", 53.0, node="a", unheard=True)])
    found.take(an("first step", 60.0))
    assert (found.losses, found.departures, found.recoveries) == (0, 1, [])
    assert found.hazard_per_s(1, None)[1].startswith("estimated from 0 losses")


@pytest.mark.parametrize("end", ["finished", "failed"])
def test_nodes_that_leave_because_the_job_is_over_did_not_leave_it(end: str) -> None:
    """Who left before counts, and who leaves once another controller goes on with it."""
    found = replayed([an("left", 5.0, node="c"), an(end, 9.0), an("left", 9.5, node="a"), an("left", 9.6, node="b")])
    assert (found.losses, found.departures, found.dismissed) == (0, 1, 2)
    found.take(an("restarted", 50.0))
    found.take(an("left", 60.0, node="d"))
    assert (found.departures, found.dismissed) == (2, 2)


def test_a_recovery_across_a_restart_is_not_measured() -> None:
    """Only what one controller saw from the last beat to the first step is."""
    found = replayed([an("lost", 9.0, node="a", beaten_s=6.0), an("restarted", 500.0), an("first step", 510.0)])
    assert found.recoveries == []
    found.take(an("lost", 600.0, node="a", beaten_s=597.0))
    found.take(an("first step", 604.0))
    assert found.recoveries == [7.0]


def test_successors_are_counted_with_overlap_and_interruption() -> None:
    """Both in seconds, over all of them; one that was asked for has not taken over yet."""
    found = JobProgress()
    for _ in range(2):
        found.take(an("successor", 1.0))
    found.take(an("succession", 9.0, overlap_s=3.5, interruption_s=0.0))
    assert found.successions.document() == {"asked": 2, "done": 1, "overlap_s": 3.5, "interruption_s": 0.0}


def test_whether_somebody_keeps_a_job_can_be_asked_without_disturbing_it(tmp_path: Path) -> None:
    """True while a journal is open, and never because a file is there."""
    assert not is_locked(tmp_path / EVENTS)
    journal = EventLog(tmp_path)
    journal.append({"event": "one"})
    assert is_locked(tmp_path / EVENTS)
    journal.append({"event": "two"})
    journal.close()
    assert not is_locked(tmp_path / EVENTS)
    assert keeper(tmp_path) is None


def test_a_training_that_the_store_held_before_is_told_from_the_jobs_own() -> None:
    """What is resumed before a first step is another's; a job that is over without a step had nothing left to do."""
    found = replayed([an("formed", 1.0), an("resumed", 2.0, step=256)])
    assert (found.taken_up or {})["step"] == 256
    assert not found.idle
    found.take(an("checkpoint", 3.0, step=256))
    found.take(an("finished", 4.0))
    assert found.idle
    own = replayed([an("first step", 1.0), an("checkpoint", 2.0), an("resumed", 3.0, step=9), an("finished", 4.0)])
    assert (own.taken_up, own.idle) == (None, False)
