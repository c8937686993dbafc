import math

import numpy as np
import pytest

from polythrottle.backends.simulated import SimulatedDevice
from polythrottle.catalog import load_board, load_model
from polythrottle.daemon.drift import (
    SAMPLE_S,
    WEEK_S,
    Baseline,
    Chart,
    Rollback,
    Watch,
    run_length,
    threshold_for,
)
from polythrottle.errors import InvalidInput


def _first_alarm(residuals: np.ndarray, chart: Chart) -> np.ndarray:
    """Return after how many samples each row's chart alarms, one more than there are if never; a second reckoning."""
    up, down = np.zeros(len(residuals)), np.zeros(len(residuals))
    first = np.full(len(residuals), residuals.shape[1] + 1)
    for number, column in enumerate(residuals.T, start=1):
        spreads = (column - chart.baseline.mean) / chart.baseline.spread
        up, down = np.maximum(0, up + spreads - chart.slack), np.maximum(0, down - spreads - chart.slack)
        first = np.where((np.maximum(up, down) > chart.threshold) & (first > number), number, first)
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


@pytest.mark.parametrize("spread", [0.02, 0.03])
def test_there_is_one_false_alarm_a_week(spread: float) -> None:
    """Over a week of samples a minute apart, both charts together raise a false alarm as often as once a week gives."""
    watch = Watch.over(Baseline(0.0, spread), Baseline(0.0, spread))
    random, weeks, samples = np.random.default_rng(2), 600, round(WEEK_S / SAMPLE_S)
    alarmed = np.zeros(weeks, dtype=bool)
    for chart in (watch.energy, watch.latency):
        residuals = random.normal(0, spread, (weeks, samples)).astype(np.float32)
        alarmed |= _first_alarm(residuals, chart) <= samples
    expected = 1 - math.exp(-1)
    assert alarmed.mean() == pytest.approx(expected, abs=3 * math.sqrt(expected * (1 - expected) / weeks))


@pytest.mark.parametrize("drift", [0.08, 1 / 1.08 - 1])
def test_eight_percent_are_found_within_five_minutes(drift: float) -> None:
    """A drift of 8 % either way is found within five samples, five minutes of load, in 99 of 100 cases."""
    chart = Watch.over(Baseline(0.01, 0.02), Baseline()).energy
    residuals = np.random.default_rng(3).normal(0.01 + math.log1p(drift), 0.02, (4000, 5))
    assert np.mean(_first_alarm(residuals, chart) <= 5) > 0.99
    assert chart.delay_s < 300


def test_the_sums_are_those_of_the_second_reckoning() -> None:
    """A chart fed sample by sample alarms at the sample at which sums over arrays do."""
    chart = Chart(Baseline(0.0, 0.02))
    residuals = np.random.default_rng(4).normal(0.06, 0.02, 40)
    first = _first_alarm(residuals[None], chart)[0]
    for residual in residuals[: first - 1].tolist():
        chart = chart.seen(math.exp(residual), 1.0)
    assert chart.drifts is None
    assert chart.seen(math.exp(residuals[first - 1]), 1.0).drifts == 0.08


def test_one_broken_sample_is_no_drift() -> None:
    """A sample a hundred times too high, or none at all, raises no alarm by itself once the sums have calmed down."""
    chart = Chart(Baseline(0.0, 0.04))
    for value in (math.nan, math.inf, 0.0, -1.0):
        assert chart.seen(value, 1.0) == chart
    assert chart.seen(1.0, 0.0) == chart
    chart = chart.seen(1.0, 1.0)
    assert chart.drifts is None


def test_a_baseline_errs_to_the_safe_side() -> None:
    """A spread from ten samples is above the true one nine times in ten, and never below what windows differ by."""
    random = np.random.default_rng(5)
    spreads = [Baseline.of(random.normal(0, 0.05, 10).tolist()).spread for _ in range(500)]
    assert np.mean(np.array(spreads) >= 0.05) > 0.9
    assert Baseline.of([0.0] * 10).spread == 0.02
    with pytest.raises(InvalidInput, match="needs 10 samples"):
        Baseline.of([0.0] * 9)
    with pytest.raises(InvalidInput, match="spread"):
        Baseline(0.0, 0.0)


@pytest.mark.parametrize("seed", range(5))
def test_a_planted_drift_on_a_simulated_board_is_found(seed: int) -> None:
    """On the simulated AGX Orin an hour passes without alarm; then energy 8 % too high is found within five minutes."""
    device = SimulatedDevice(load_board("jetson-agx-orin"), seed)
    workload = device.serve(load_model("efficientnet-b7"))

    def minute() -> tuple[float, float]:
        device.apply(device.space.default)
        before = device.read()
        latencies = []
        while device.clock.now() < before.time_s + SAMPLE_S:
            latencies.append(workload.query().latency_s)
        return (device.read().energy_j - before.energy_j) / len(latencies), float(np.mean(latencies))

    for _ in range(5):
        minute()
    told = device.expected(workload, device.space.default)
    early = [minute() for _ in range(30)]
    logs = [
        [math.log(seen / told_) for seen, told_ in zip(pair, (told.energy_j, told.latency.mean_s), strict=True)]
        for pair in early
    ]
    watch = Watch.over(*(Baseline.of([row[column] for row in logs]) for column in (0, 1)))
    for _ in range(60):
        energy_j, latency_s = minute()
        watch = watch.seen(energy_j, told.energy_j, latency_s, told.latency.mean_s)
        assert watch.words is None
    for _ in range(5):
        energy_j, latency_s = minute()
        watch = watch.seen(1.08 * energy_j, told.energy_j, latency_s, told.latency.mean_s)
    assert watch.words is not None
    assert watch.words.startswith("energy is above")


def _rolled_back(ratio: float, spread: float, contests: int, pairs: int = 60) -> list[int]:
    """Return after how many pairs profiles that draw so many times as much are rolled back, of those that are."""
    random, found = np.random.default_rng(6), []
    for _ in range(contests):
        test = Rollback()
        while test.worse is None and len(test.ratios) < pairs:
            test = test.seen(ratio * math.exp(random.normal(0, spread)), 1.0)
        if test.worse:
            found.append(len(test.ratios))
    return found


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
    random, test = np.random.default_rng(7), Rollback()
    for _ in range(40):
        test = test.seen(math.exp(random.normal(0, 0.03)), 1.05)
    assert test.worse is False


def test_a_sequential_test_needs_sense() -> None:
    """A chance of one half, or a harm of nothing, is refused, and a broken pair is not counted."""
    for harm, wrongly in ((0.0, 0.05), (0.02, 0.5)):
        with pytest.raises(InvalidInput):
            Rollback(harm, wrongly)
    assert Rollback().seen(0.0, 1.0) == Rollback()
    assert Rollback().worse is None
