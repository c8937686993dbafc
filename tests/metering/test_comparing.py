"""Comparing two points in turns: no saving is claimed where there is none, and a real one is found soon."""

import math
import random
from dataclasses import replace

import pytest

from polythrottle.domain.errors import TrialError, Unanswered
from polythrottle.domain.measurement import Latency, Measurement, Window
from polythrottle.domain.space import OperatingPoint
from polythrottle.metering.comparison import Comparison, ComparisonVerdict, compare
from polythrottle.metering.sequential import half_width, interval
from polythrottle.tuning.setup import Setup


def measurement(energy_j: float) -> Measurement:
    """Return a measurement with an energy."""
    return Measurement(Latency(0.01, p99_s=0.02), energy_j, 100.0, energy_j * 100.0)


def pairs(ratio: float, spread: float, count: int, seed: int) -> Comparison:
    """Return pairs whose logarithms of B ÷ A scatter normally."""
    noise = random.Random(seed)
    made = ((measurement(1.0), measurement(ratio * math.exp(noise.gauss(0, spread)))) for _ in range(count))
    return Comparison(tuple(made))


@pytest.mark.slow
def test_an_interval_looked_at_all_the_time_misses_the_truth_seldom() -> None:
    """In 400 sequences of 60 values that are looked at after each, at most 5 % ever exclude the truth."""
    missed = 0
    for seed in range(400):
        noise, values = random.Random(seed), []
        for _ in range(60):
            values.append(noise.gauss(0.7, 0.2))
            found = interval(values)
            if not found.low <= 0.7 <= found.high:
                missed += 1
                break
    assert missed <= 20


@pytest.mark.slow
def test_no_saving_is_claimed_between_equal_settings() -> None:
    """Of 200 comparisons of A with A, each looked at after every pair, at most 5 % claim a saving or a cost."""
    claims = 0
    for seed in range(200):
        whole = pairs(1.0, 0.03, 40, seed).pairs
        seen = (Comparison(whole[: count + 1]).verdict for count in range(40))
        claims += any(verdict is not ComparisonVerdict.NOT_PROVEN for verdict in seen)
    assert claims <= 10


def test_a_large_saving_takes_few_pairs() -> None:
    """Twenty percent under three percent of noise is proven within six pairs."""
    found = [pairs(0.8, 0.03, 6, seed).verdict for seed in range(50)]
    assert found.count(ComparisonVerdict.SAVES) >= 48


def test_the_saving_lies_in_its_interval() -> None:
    """The interval of the saving holds the true one and the middle is near it."""
    found = pairs(0.8, 0.01, 12, 3)
    assert found.saving.low < 0.2 < found.saving.high
    assert found.middle() == pytest.approx(0.8, rel=0.02)
    assert pairs(1.25, 0.01, 8, 0).verdict is ComparisonVerdict.COSTS


def test_too_few_pairs_say_nothing() -> None:
    """With one pair, or two, nothing is known; what was not measured stays unknown."""
    assert half_width(1, 0.1) == math.inf
    assert pairs(0.1, 0.01, 1, 0).verdict is ComparisonVerdict.NOT_PROVEN
    assert Comparison().middle() is None
    assert pairs(0.5, 0.01, 8, 0).ratio("temperature").high == math.inf


def test_a_growing_queue_leaves_everything_unknown() -> None:
    """A side behind in half its windows or more has no saving; behind in fewer, the windows may be mistaken."""
    whole = pairs(0.8, 0.01, 8, 3).pairs
    late = [(a, replace(b, backlog_per_s=5.0)) for a, b in whole]
    found = Comparison((*late[:4], *whole[4:]))
    assert found.keeps_up == (True, False)
    assert (found.verdict, found.ratio().high, found.settled) == (ComparisonVerdict.NOT_PROVEN, math.inf, True)
    assert not Comparison(tuple(late[:3])).settled
    assert Comparison((*late[:3], *whole[3:])).verdict is ComparisonVerdict.SAVES
    assert Comparison().keeps_up == (True, True)


def turns(setup: Setup, *points: dict[str, int], most_pairs: int = 40) -> Comparison:
    """Return the comparison of two points of a simulated board."""
    device, workload = setup.open()
    default = OperatingPoint({**device.space.default, **workload.space.default})
    with device:
        both = [default.moved(point) for point in points]
        return list(compare(device, workload, both, Window(40, 0.1, 40), most_pairs=most_pairs))[-1]


SIMULATED = Setup("sim:jetson-agx-orin", "efficientnet-b4")


def test_a_real_saving_is_found_on_a_board() -> None:
    """Clocks that save half the energy of a simulated board are told from its default in a handful of pairs."""
    found = turns(SIMULATED, {}, {"gpu_max_hz": 1_032_750_000, "gpu_min_hz": 1_032_750_000, "batch_size": 2})
    assert found.verdict is ComparisonVerdict.SAVES
    assert len(found.pairs) <= 8


def test_a_point_does_not_save_against_itself() -> None:
    """A board compared with itself ends without a claim."""
    assert turns(SIMULATED, {}, {}, most_pairs=8).verdict is ComparisonVerdict.NOT_PROVEN


def test_a_board_that_warms_up_favours_neither_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each window takes a tenth of a percent more than the one before, A is measured first as often as B."""
    taken: list[int] = []

    def warming(*args: object, **words: object) -> Measurement:
        taken.append(0)
        return measurement(1.001 ** len(taken))

    monkeypatch.setattr("polythrottle.metering.comparison.measure", warming)
    found = turns(SIMULATED, {}, {}, most_pairs=40)
    first = sum(a.energy_j < b.energy_j for a, b in found.pairs)
    assert 0.25 < first / len(found.pairs) < 0.75
    assert found.verdict is ComparisonVerdict.NOT_PROVEN


class Failing:
    """A workload whose every query fails."""

    def __init__(self, inner: object) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def query(self) -> object:
        """Fail."""
        raise TrialError("the model errors")


def test_windows_that_fail_again_and_again_end_the_comparison() -> None:
    """After five in a row the last error is what is said."""
    device, workload = SIMULATED.open()
    point = OperatingPoint({**device.space.default, **workload.space.default})
    with device, pytest.raises(TrialError, match="errors"):
        list(compare(device, Failing(workload), (point, point), Window(10, 0.1, 10)))  # type: ignore[arg-type]


class Silent(Failing):
    """A workload that answers so many queries, and then no more."""

    def __init__(self, inner: object, answers: int) -> None:
        super().__init__(inner)
        self.left, self.unanswered = answers, 0

    def query(self) -> object:
        """Answer, or let nobody answer."""
        self.left -= 1
        if self.left >= 0:
            return self._inner.query()  # type: ignore[attr-defined]
        self.unanswered += 1
        raise Unanswered("m did not answer within 60 s")


@pytest.mark.parametrize(("answers", "waits"), [(0, 1), (5, 1), (100, 2)])
def test_a_server_that_falls_silent_is_waited_for_once_or_twice(answers: int, waits: int) -> None:
    """Each wait takes all the time a query has: one is enough at first, two in a row once pairs were measured."""
    device, workload = SIMULATED.open()
    point = OperatingPoint({**device.space.default, **workload.space.default})
    silent = Silent(workload, answers)
    with device, pytest.raises(Unanswered, match="did not answer"):
        list(compare(device, silent, (point, point), Window(10, 0.1, 10)))  # type: ignore[arg-type]
    assert silent.unanswered == waits
