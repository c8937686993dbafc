"""Recorded clusters, and machines that come and go."""

import json
from itertools import islice, takewhile
from pathlib import Path

import pytest
from planning_builders import CATALOGUE

from polythrottle.cli.commands import run
from polythrottle.cluster.conditions import Change, DrawnSupply, RecordedSupply, Supply
from polythrottle.cluster.recorded_tables import Trace, read_trace
from polythrottle.domain.errors import BadFile, InvalidInput
from polythrottle.domain.fleet.transient_machine import KEPT, ConstantHazard, ObservedLifetime

STEPS = Trace("made up", (0.0, 100.0, 250.0), (4, 1, 3), 400.0)


def until(supply: Supply, end_s: float, seed: int = 0) -> list[Change]:
    """Return the changes before a moment."""
    return list(takewhile(lambda change: change.time_s < end_s, supply.changes(seed)))


def there(changes: list[Change], time_s: float) -> int:
    """Return how many machines are there right after a moment; fails where one comes twice or goes unseen."""
    found: set[int] = set()
    for change in changes:
        if change.time_s > time_s:
            break
        assert (change.machine in found) != change.there
        (found.add if change.there else found.discard)(change.machine)
    return len(found)


def test_a_trace_is_read_as_its_changes(tmp_path: Path) -> None:
    """Rows of one time are one change, rows without change none; time counts from the first row."""
    file = tmp_path / "t.csv"
    file.write_text("time_s,event,n_nodes\n100,add,1\n100,add,2\n200,,2\n300,remove,1\n500,,1\n")
    trace = read_trace(file)
    assert (trace.times_s, trace.counts, trace.ends_s) == ((0.0, 200.0), (2, 1), 400.0)
    assert (trace.most, trace.losses, trace.machine_s) == (2, 1, 600.0)
    assert trace.assumed_s == 0.0


def test_a_last_row_that_takes_machines_away_counts(tmp_path: Path) -> None:
    """It lasts as long as the middle row before it, which is said, and a replay loses what it says."""
    file = tmp_path / "t.csv"
    file.write_text("time_s,n_nodes\n0,3\n100,0\n")
    trace = read_trace(file)
    assert (trace.losses, trace.machine_s) == (3, 300.0)
    assert (trace.ends_s, trace.assumed_s) == (200.0, 100.0)
    changes = until(RecordedSupply(trace, 3), 400.0)
    assert [there(changes, time_s) for time_s in (99, 101, 199, 201, 301)] == [3, 0, 0, 3, 0]
    file.write_text("time_s,event,n_nodes\n100,add,2\n200,,2\n300,remove,1\n900,remove,0\n")
    trace = read_trace(file)
    assert (trace.times_s, trace.counts, trace.assumed_s) == ((0.0, 200.0, 800.0), (2, 1, 0), 100.0)
    assert (trace.losses, trace.ends_s, trace.machine_s) == (2, 900.0, 1000.0)


def test_how_long_the_last_row_is_taken_to_last_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In a line and in the document; a record that says its own end needs none."""
    (tmp_path / "c.toml").write_text(CATALOGUE)
    words = ["cluster", "simulate", "--catalogue", str(tmp_path / "c.toml"), "--trace", str(tmp_path / "t.csv")]
    words += ["--nodes", "3", "--days", "0.01", "--policies", "default"]
    for last, assumed_s in (("0", 100.0), ("3", 0.0)):
        (tmp_path / "t.csv").write_text(f"time_s,n_nodes\n0,3\n100,{last}\n")
        assert run(words) == 0
        assert ("last row is taken to last 100 s" in capfd.readouterr().out) == bool(assumed_s)
        assert run([*words, "--json"]) == 0
        found = json.loads(capfd.readouterr().out)
        assert found["last_row_assumed_s"] == assumed_s
        losses = [outcome["losses"] for outcome in found["policies"]["default"]["outcomes"]]
        assert all(losses) == bool(assumed_s)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n", "no column time_s, n_nodes"),
        ("time_s,n_nodes\n", "no rows"),
        ("time_s,n_nodes\n0,3\n", "at least two different times"),
        ("time_s,n_nodes\n0,3\n9,2\n5,3\n", "line 4: time_s goes back to 5"),
        ("time_s,n_nodes\n0,3\n9,1.5\n", "line 3: n_nodes is 1.5; it needs a whole number"),
        ("time_s,n_nodes\n0,3\n9,-1\n", "line 3: n_nodes"),
        ("time_s,n_nodes\n0,0\n900,0\n", "at least one machine"),
        ("time_s,n_nodes\n0,1e9\n900,0\n", "at most 100,000"),
        ("time_s,n_nodes\n0,1\n9,0\n", "lasts 9 s; at least 60 s"),
    ],
)
def test_what_is_no_trace_is_said_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    """One error that names the file and what is wrong."""
    file = tmp_path / "t.csv"
    file.write_text(text)
    with pytest.raises(BadFile, match=words):
        read_trace(file)


def test_a_replay_has_as_many_machines_as_the_record() -> None:
    """At every moment, over the end of the record and for a fleet as large as it."""
    changes = until(RecordedSupply(STEPS, 4), 1200)
    for time_s, number in ((0, 4), (99, 4), (100, 1), (249, 1), (251, 3), (401, 4), (501, 1), (900, 1), (1051, 3)):
        assert there(changes, time_s) == number, time_s


def test_a_larger_fleet_is_several_records_and_a_smaller_one_a_part() -> None:
    """Ten places of a record of four are two and a half copies; one place never has two machines."""
    most = max(there(until(RecordedSupply(STEPS, 10), 3000), time_s) for time_s in range(0, 3000, 7))
    assert 8 <= most <= 10
    alone = [there(until(RecordedSupply(STEPS, 1), 3000), time_s) for time_s in range(0, 3000, 7)]
    assert set(alone) == {0, 1}


def test_a_record_without_a_change_is_a_fleet_without_one() -> None:
    """Machines come once and nothing follows, instead of a search for the next change without end."""
    flat = Trace("flat", (0.0,), (5,), 100.0)
    assert len(list(RecordedSupply(flat, 3).changes(0))) == 3
    assert len(list(RecordedSupply(flat, 12).changes(0))) == 12


def test_machines_that_never_live_still_let_time_pass() -> None:
    """A billion losses an hour are no more than one a second for each place."""
    assert len(until(DrawnSupply(1, ConstantHazard(1e9), order_s=0.0), 100.0)) <= 201


def test_a_seed_says_which_machines_are_lost() -> None:
    """The same seed repeats everything, another one does not."""
    assert until(RecordedSupply(STEPS, 3), 2000, 1) == until(RecordedSupply(STEPS, 3), 2000, 1)
    assert until(RecordedSupply(STEPS, 3), 2000, 1) != until(RecordedSupply(STEPS, 3), 2000, 2)


def test_drawn_machines_live_as_long_as_their_lifetime_says() -> None:
    """The mean of ten thousand steady lives is within 5 % of 1/rate; each lost one comes back after its order."""
    supply = DrawnSupply(50, ConstantHazard(2.0), order_s=30.0)
    changes = list(islice(supply.changes(3), 20_000))
    born: dict[int, float] = {}
    lives, lost = [], []
    for change in changes:
        if change.there:
            born[change.machine] = change.time_s
        else:
            lives.append(change.time_s - born[change.machine])
            lost.append(change.time_s)
    assert sum(lives) / len(lives) == pytest.approx(1800, rel=0.05)
    again = sorted(time_s for time_s in born.values() if time_s > 0)
    assert again == pytest.approx([time_s + 30 for time_s in lost][: len(again)])


def test_machines_that_are_kept_never_change() -> None:
    """On-demand machines come once, and then nothing happens any more."""
    assert [change.there for change in DrawnSupply(3, KEPT).changes(0)] == [True] * 3


def test_a_lifetime_with_an_end_takes_everyone() -> None:
    """Nobody outlives the provider's limit of 24 h."""
    capped = ObservedLifetime((0.0, 86399.0, 86400.0), (1.0, 0.5, 0.0))
    changes = until(DrawnSupply(20, capped, 60.0), 86400 * 3)
    born = {change.machine: change.time_s for change in changes if change.there}
    assert all(change.time_s - born[change.machine] <= 86400 for change in changes if not change.there)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: RecordedSupply(STEPS, 0),
        lambda: DrawnSupply(0, KEPT),
        lambda: Trace("t", (0.0, 0.0), (1, 2), 5.0),
        lambda: Trace("t", (0.0,), (1,), 0.0),
    ],
)
def test_impossible_supplies_are_refused(wrong) -> None:  # type: ignore[no-untyped-def]
    """No machine, times that stand still."""
    with pytest.raises(InvalidInput):
        wrong()
