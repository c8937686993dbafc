import math
from collections.abc import Iterable

import numpy as np
import pytest

from polythrottle.backends.simulated import SimulatedDevice
from polythrottle.catalog import load_board, load_model
from polythrottle.daemon.control.drift_detector import (
    MINUTE_S,
    SAMPLE_S,
    WEEK_S,
    Chart,
    Offsets,
    Quantity,
    ResidualSpread,
    run_length,
    threshold_for,
    words_of,
)
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.measurement import BETWEEN_WINDOWS
from polythrottle.metering.sequential import RollbackTest


def _first_alarm(residuals: Iterable[np.ndarray], chart: Chart) -> np.ndarray:
    """Return after how many samples each column's chart alarms, infinite if never; a second reckoning.

    Args:
        residuals: Sample by sample, each of shape (charts,).
        chart: Its sums are kept in deviations of a sample here, as Page has them.
    """
    deviation, threshold = chart.spread * math.sqrt(MINUTE_S / chart.sample_s), chart.threshold / 2 / chart.slack
    up, down, first = np.zeros(1), np.zeros(1), np.full(1, math.inf)
    for number, column in enumerate(residuals, start=1):
        up = np.maximum(0, up + column / deviation - chart.slack)
        down = np.maximum(0, down - column / deviation - chart.slack)
        first = np.where(np.maximum(up, down) > threshold, np.minimum(first, number), first)
    return first


@pytest.mark.parametrize(("shift", "slack", "threshold"), [(0.0, 0.5, 3.0), (0.0, 1.5, 1.0), (1.0, 0.5, 4.0)])
def test_run_lengths_are_those_of_a_simulation(shift: float, slack: float, threshold: float) -> None:
    """The chain gives the mean run length of simulated sums within three standard errors."""
    random, count = np.random.default_rng(1), 4000
    lengths, sums, running = np.zeros(count), np.zeros(count), np.ones(count, dtype=bool)
    while running.any():
        sums[running] = np.maximum(0, sums[running] + random.standard_normal(running.sum()) + shift - slack)
        lengths[running] += 1
        running &= sums <= threshold
    assert run_length(shift, slack, threshold) == pytest.approx(
        lengths.mean(), abs=3 * lengths.std() / math.sqrt(count) + 0.01 * lengths.mean()
    )


def test_a_known_run_length_is_met() -> None:
    """With a slack of 0.5 and a threshold of 4 two sides together run 168 samples (Montgomery, §9.1.3)."""
    assert run_length(0.0, 0.5, 4.0) / 2 == pytest.approx(168, rel=0.02)
    assert threshold_for(0.5, 2 * 168) == pytest.approx(4.0, abs=0.02)


@pytest.mark.parametrize("slack", [0.05, 0.15, 0.299])
def test_where_the_short_cut_is_taken_it_is_right(slack: float) -> None:
    """A threshold by Siegmund's formula has the run length that was asked for, by the integral equation, within 1 %."""
    assert run_length(0.0, slack, threshold_for(slack, 20_000)) == pytest.approx(20_000, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.02, 0.03])
def test_there_is_one_false_alarm_a_week(spread: float) -> None:
    """Over a week of load both charts together raise a false alarm as often as once a week gives."""
    random, weeks = np.random.default_rng(2), 600
    alarmed = np.zeros(weeks, dtype=bool)
    for chart in (Chart(spread), Chart(spread, sample_s=MINUTE_S)):
        deviation, samples = spread * math.sqrt(MINUTE_S / chart.sample_s), round(WEEK_S / chart.sample_s)
        alarmed |= _first_alarm((random.normal(0, deviation, weeks) for _ in range(samples)), chart) <= samples
    expected = 1 - math.exp(-1)
    assert alarmed.mean() == pytest.approx(expected, abs=3 * math.sqrt(expected * (1 - expected) / weeks))


@pytest.mark.parametrize("drift", [0.08, 1 / 1.08 - 1])
def test_eight_percent_are_found_within_five_minutes(drift: float) -> None:
    """A drift of 8 % either way is found within five minutes of load in 99 of 100 cases where minutes differ by 2 %."""
    chart, random = Chart(0.02), np.random.default_rng(3)
    deviation = 0.02 * math.sqrt(MINUTE_S / SAMPLE_S)
    found = _first_alarm((random.normal(math.log1p(drift), deviation, 4000) for _ in range(30)), chart)
    assert np.mean(found <= 300 / SAMPLE_S) > 0.99
    assert chart.delay_s < 100


def test_no_test_could_be_much_quicker() -> None:
    """The mean delay is within a fifth of the least there is at one false alarm a week: ln(week)/KL (Lorden)."""
    for spread in (0.02, 0.03):
        per_minute = math.log1p(0.08) ** 2 / 2 / spread**2
        least_minutes = math.log(per_minute * WEEK_S / MINUTE_S) / per_minute
        assert least_minutes < Chart(spread).delay_s / MINUTE_S < 1.2 * least_minutes


def test_the_sums_are_those_of_the_second_reckoning() -> None:
    """A chart fed sample by sample alarms at the sample at which sums over arrays do."""
    chart = Chart(0.02)
    residuals = np.random.default_rng(4).normal(0.06, 0.05, 60)
    first = int(_first_alarm(residuals[:, None], chart)[0])
    for residual in residuals[: first - 1].tolist():
        chart = chart.seen(residual, SAMPLE_S)
    assert chart.drifts is None
    assert chart.seen(residuals[first - 1].item(), SAMPLE_S).drifts == 0.08


@pytest.mark.parametrize("spread", [0.02, 0.03, 0.1])
def test_one_broken_sample_is_no_drift(spread: float) -> None:
    """A sample a million times too high or too low raises no alarm by itself."""
    for broken in (math.log(1e6), -math.log(1e6)):
        chart = Chart(spread).seen(broken, SAMPLE_S)
        assert max(chart.up, chart.down) > 0
        assert chart.drifts is None


def test_what_is_no_number_is_not_counted() -> None:
    """A residual that is none changes nothing, and a spread of none is refused."""
    quantity = Quantity(Offsets(0.1))
    for value in (math.nan, math.inf, -math.inf):
        assert quantity.seen(value, SAMPLE_S, 0.0) == quantity
        assert quantity.learnt(1, SAMPLE_S, value) == quantity
    with pytest.raises(InvalidInput, match="spread"):
        Chart(0.0)


def _spread(minutes: Iterable[float]) -> ResidualSpread:
    """Return what is known after minutes with such residuals."""
    spread = ResidualSpread()
    for minute in minutes:
        spread = spread.seen(minute)
    return spread


def test_too_few_minutes_make_false_alarms_no_more_frequent() -> None:
    """On average over what twenty minutes say, exp(-n s²/σ²) is at most what it is for the true spread."""
    random = np.random.default_rng(5)
    squares = 0.05**2 * random.chisquare(20, 200_000)
    raised = np.array([ResidualSpread(20, square).value for square in squares.tolist()])
    assert np.mean(np.exp(-11 * (raised / 0.05) ** 2)) <= 1.1 * math.exp(-11)
    assert np.mean(raised) < 1.5 * 0.05


def test_a_spread_is_learnt_and_never_too_small() -> None:
    """It comes to the true one with more minutes, not below what windows differ by, and follows one that grows."""
    random = np.random.default_rng(6)
    assert _spread([0.0] * 40).value == BETWEEN_WINDOWS
    calm = _spread(random.normal(0, 0.03, 240).tolist())
    assert calm.value == pytest.approx(0.03, rel=0.12)
    assert not ResidualSpread(19, 0.01).known
    for minute in random.normal(0, 0.05, 480).tolist():
        calm = calm.seen(minute)
    assert calm.value == pytest.approx(0.05, rel=0.15)


def test_a_drift_does_not_hide_in_the_spread() -> None:
    """Minutes that drift raise the spread not before ten minutes, and not at all if it is found until then."""
    random, quantity = np.random.default_rng(7), Quantity(Offsets(0.1), Chart(sample_s=MINUTE_S))
    for residual in random.normal(0, 0.03, 60).tolist():
        quantity = quantity.seen(residual, MINUTE_S, 0.0)
    spread = quantity.spread
    for number in range(12):
        quantity = quantity.seen(0.12, MINUTE_S, 0.0)
        if number == 9:
            assert quantity.spread.value <= 1.1 * spread.value
            assert quantity.again().held == ()
    assert quantity.spread.value > 1.1 * spread.value


def test_what_a_rung_is_off_by_is_learnt_from_all() -> None:
    """An unknown rung is taken for what others have in common, unsure by what they differ; a known one by itself."""
    offsets = Offsets(0.1)
    assert offsets.at(0, 0.02) == (0.0, 1.0)
    for rung, off in ((1, 0.2), (2, 0.3)):
        offsets = offsets.with_one(rung, 60.0, off)
    common, unsure = offsets.at(5, 0.02)
    assert common == pytest.approx(0.25, abs=1e-6)
    assert unsure == pytest.approx(1.5 * 0.1**2, rel=0.01)
    own, sure = offsets.at(1, 0.02)
    assert own == pytest.approx(0.2, abs=1e-4)
    assert sure == pytest.approx(0.02**2 / 60, rel=0.01)


def test_a_rung_that_is_known_well_is_learnt_no_more() -> None:
    """After four hours on it a rung's offset stays, so that a slow drift is not taken for it."""
    offsets = Offsets(0.1).with_one(1, 240.0, 0.1)
    assert offsets.with_one(1, 1.0, 0.9) == offsets


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_planted_drift_on_a_simulated_board_is_found(seed: int) -> None:
    """On the simulated AGX Orin an hour passes without alarm; then energy 8 % too high is found within five minutes."""
    device = SimulatedDevice(load_board("jetson-agx-orin"), seed)
    workload = device.serve(load_model("efficientnet-b7"))
    told = device.expected(workload, device.space.default).energy_j

    def minute(quantity: Quantity, factor: float) -> Quantity:
        """Return what is known after a minute in which joules count for so much; its noise stays for all of it."""
        device.apply(device.space.default)
        for _ in range(round(MINUTE_S / SAMPLE_S)):
            before, queries = device.read(), 0
            while device.clock.now() < before.time_s + SAMPLE_S:
                workload.query()
                queries += 1
            residual = math.log(factor * (device.read().energy_j - before.energy_j) / queries / told)
            offset, unsure = quantity.at(0)
            quantity = quantity.seen(residual - offset, SAMPLE_S, unsure).learnt(0, SAMPLE_S, residual)
        return quantity

    quantity = Quantity(Offsets(0.1))
    for _ in range(95):
        quantity = minute(quantity, 1.0)
        assert quantity.drifts is None
    for _ in range(5):
        quantity = minute(quantity, 1.08)
    assert (quantity.drifts or 0) > 0
    assert words_of(quantity, Quantity(Offsets(0.5))) == (
        "energy is above what the profile predicts, by about 8% or more"
    )


def _rolled_back(ratio: float, spread: float, contests: int, pairs: int = 60) -> list[int]:
    """Return after how many pairs profiles that draw so many times as much are rolled back, of those that are."""
    random, found = np.random.default_rng(6), []
    for _ in range(contests):
        test = RollbackTest()
        while test.worse is None and len(test.ratios) < pairs:
            test = test.seen(ratio * math.exp(random.normal(0, spread)), 1.0)
        if test.worse:
            found.append(len(test.ratios))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.01, 0.045, 0.1])
def test_a_profile_that_is_as_good_is_hardly_ever_rolled_back(spread: float) -> None:
    """However much pairs differ, at most one in twenty is."""
    assert len(_rolled_back(1.0, spread, 200)) <= 10


def test_a_worse_profile_is_rolled_back_soon() -> None:
    """One that draws 5 % more is in nine of ten contests, mostly within half an hour, where pairs differ by 3 %."""
    found = _rolled_back(1.05, 0.03, 100)
    assert len(found) >= 90
    assert float(np.median(found)) <= 15


def test_a_better_profile_is_kept_for_certain() -> None:
    """Where the old one draws 5 % more, the test says before long that the new one is not worse."""
    random, test = np.random.default_rng(7), RollbackTest()
    for _ in range(40):
        test = test.seen(math.exp(random.normal(0, 0.03)), 1.05)
    assert test.worse is False


def test_a_sequential_test_needs_sense() -> None:
    """A chance of one half, or a harm of nothing, is refused, and a broken pair is not counted."""
    for harm, wrongly in ((0.0, 0.05), (0.02, 0.5)):
        with pytest.raises(InvalidInput):
            RollbackTest(harm, wrongly)
    assert RollbackTest().seen(0.0, 1.0) == RollbackTest()
    assert RollbackTest().worse is None
