"""The guard of the limit: less is aimed at, then nothing for a while, and back, each time more patiently."""

from dataclasses import replace

import pytest
from loaded_machine import LoadedMachine

from polythrottle.domain.errors import InvalidInput
from polythrottle.training.beside.live_run import AIMS, NEAR, WINDOW, Guard
from polythrottle.training.beside.scheduler import Decision, Moment, interleave

_SLO_S = 0.1
_NEAR_S, _FAST_S = 1.01 * NEAR * _SLO_S, 0.01


def _seen(guard: Guard, latency_s: float, count: int, now_s: float, every_s: float = 0.0) -> Guard:
    for number in range(count):
        guard = guard.after(latency_s, now_s + number * every_s)
    return guard


def test_latencies_near_the_limit_lower_the_aim_and_then_pause() -> None:
    """Three of a window near the limit: less, and less again, and at the least a pause that doubles."""
    guard, now_s = Guard(_SLO_S), 1.0
    aims = [guard.aim_s]
    while not guard.paused(now_s):
        now_s += 1.0
        guard = _seen(guard, _NEAR_S, 3, now_s)
        aims.append(guard.aim_s)
    assert aims == pytest.approx([_SLO_S * share for share in (*AIMS, AIMS[-1])])
    assert (guard.shrunk, guard.pauses) == (len(AIMS) - 1, 1)
    assert _seen(guard, _NEAR_S, 100, now_s + 4.0) == guard
    assert not guard.paused(now_s + 5.0)
    again = _seen(guard, _NEAR_S, 3, now_s + 6.0)
    assert (again.paused(now_s + 15.9), again.paused(now_s + 16.0)) == (True, False)


def test_a_queue_from_before_a_change_says_nothing_of_it() -> None:
    """Of a hundred requests that one stall has delayed, three lower the aim and the others are not counted."""
    guard = _seen(Guard(_SLO_S), 2.0, 100, now_s=5.0)
    assert guard.shrunk == 1
    later = _seen(guard, _NEAR_S, 3, now_s=5.0 + _NEAR_S)
    assert later.shrunk == 2


def test_one_per_cent_near_the_limit_is_let_pass() -> None:
    """Two of two hundred change nothing, and the next window begins anew."""
    guard = Guard(_SLO_S)
    for _ in range(5):
        guard = _seen(_seen(guard, 2 * _SLO_S, 2, 10.0), _FAST_S, WINDOW - 2, 10.0)
    assert guard.aim_s == _SLO_S
    assert guard.shrunk == 0


def test_a_calm_time_lets_more_be_dared_again() -> None:
    """Two hundred requests far from the limit give back what was taken, step by step, and shorten the next pause."""
    tight, aims = Guard(_SLO_S, place=3, pause_s=80.0), []
    for number in range(4):
        tight = _seen(tight, _FAST_S, WINDOW, 10.0 + number)
        aims.append(tight.aim_s / _SLO_S)
    assert aims == pytest.approx([AIMS[2], AIMS[1], AIMS[0], AIMS[0]])
    assert tight.pause_s == 5.0


def test_who_was_wrong_waits_twice_as_long() -> None:
    """After each step back it must be calm for twice as many requests, sixteen windows at most; calm forgets that."""
    guard, waited = Guard(_SLO_S), []
    for number in range(6):
        now_s = 1000.0 * (number + 1)
        guard, count = _seen(guard, _NEAR_S, 3, now_s), 0
        while guard.place:
            guard, count = guard.after(_FAST_S, now_s + 1.0), count + 1
        waited.append(count // WINDOW)
    assert waited == [2, 4, 8, 16, 16, 16]
    assert _seen(guard, _FAST_S, 100 * WINDOW, 7000.0, every_s=_FAST_S).patience == WINDOW


def test_a_rare_straggler_does_not_keep_the_aim_low() -> None:
    """One request of four hundred near the limit is calm; three of four hundred are not."""
    tight = Guard(_SLO_S, place=2, patience=2 * WINDOW)
    one = _seen(_seen(tight, _NEAR_S, 1, 10.0), _FAST_S, 2 * WINDOW - 1, 10.0)
    some = tight
    for _ in range(2):
        some = _seen(_seen(some, _NEAR_S, 1, 10.0), _FAST_S, WINDOW - 1, 10.0)
    assert (one.place, some.place) == (1, 2)


def test_where_few_requests_come_time_counts() -> None:
    """After five calm minutes more is dared, however few requests there were."""
    tight = replace(Guard(_SLO_S), place=2)
    assert tight.after(_FAST_S, 299.0).place == 2
    assert tight.after(_FAST_S, 301.0).place == 1


def _waves(at_s: float) -> float:
    """Return how many times as long everything takes: for two of ten seconds something else runs."""
    return 1.8 if at_s % 10 < 2 else 1.0


def _nothing(moment: Moment) -> Decision:
    """Serve as `interleave` does, and fine-tune nothing."""
    return interleave(replace(moment, left=0, option=replace(moment.option, slices=())))


@pytest.mark.slow
def test_on_a_loaded_machine_requests_are_late_as_often_as_without_fine_tuning() -> None:
    """In virtual time, where slices and batches are stretched in waves: a tenth of a point more, with some training."""
    alone = LoadedMachine(_nothing, _waves, guarded=False).run(90.0)
    free, guarded = (LoadedMachine(interleave, _waves, guarded=each).run(90.0) for each in (False, True))
    assert alone.requests == free.requests == guarded.requests > 3000
    assert 0 < alone.late < 0.01 * alone.requests
    assert guarded.late - alone.late <= 0.001 * alone.requests < free.late - alone.late
    assert 0.2 * free.samples < guarded.samples < free.samples


@pytest.mark.slow
def test_where_nothing_else_runs_the_guard_costs_nothing() -> None:
    """Nobody is late, and as much is trained as without it."""
    free, guarded = (LoadedMachine(interleave, lambda at_s: 1.0, guarded=each).run(60.0) for each in (False, True))
    assert guarded.late <= 0.001 * guarded.requests
    assert guarded.samples >= 0.98 * free.samples > 0


def test_a_guard_of_nothing_is_refused() -> None:
    """A limit of 0 s is an error."""
    with pytest.raises(InvalidInput, match="a guard needs"):
        Guard(0.0)
