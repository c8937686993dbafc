import re

import pytest
from builders import measured, problem, study

from polythrottle.domain.errors import InvalidInput, PolythrottleError, UnknownName
from polythrottle.domain.measurement import Latency, Measurement, Window
from polythrottle.domain.problem import Constraint, device_alone
from polythrottle.domain.study import Trial, TrialState


@pytest.mark.parametrize(
    ("text", "metric", "limit", "relative"),
    [("p99<=25ms", "p99", 0.025, False), ("mean<=1.2x", "mean", 1.2, True), ("power<=20W", "power", 20.0, False),
     ("temperature<=80C", "temperature", 80.0, False), (" throughput >= 30/s ", "throughput", 30.0, False)],
)  # fmt: skip
def test_an_slo_is_read(text: str, metric: str, limit: float, relative: bool) -> None:
    """Metric, sign, number, unit."""
    assert Constraint.parse(text) == Constraint(metric, limit, relative)


@pytest.mark.parametrize(
    "text",
    ["", "p99", "p99=25ms", "p99<=25", "p99<=25W", "p99>=25ms", "throughput<=3/s", "temperature<=1.2x", "mean<=x",
     "mean<=-1x", "mean<=0ms", "p42<=3ms", "p99<=25ms and more", "mean<=nanx", "mean<=infms"],
)  # fmt: skip
def test_a_malformed_slo_gets_one_line_with_an_example(text: str) -> None:
    """What was wrong and what would be right, on one line."""
    with pytest.raises((InvalidInput, UnknownName)) as caught:
        Constraint.parse(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) > 20


@pytest.mark.parametrize("text", ["p99<25ms", "p99≤25ms", "p99 <= 25 ms", "P99⩽25ms", " p99 < 0.025s"])
def test_a_limit_may_be_written_as_people_write_it(text: str) -> None:
    """With or without the equals sign, with blanks, with the sign of mathematics."""
    assert Constraint.parse(text) == Constraint("p99", 0.025)
    assert Constraint.parse("throughput≥30/s") == Constraint.parse("throughput > 30/s") == Constraint("throughput", 30)


@pytest.mark.parametrize(
    ("text", "metric"),
    [("ttft_p99<=400ms for prompts<=2048", "ttft_p99 for prompts<=2048"),
     ("e2e_p99 < 400 ms FOR prompts ≤ 2048", "p99 for prompts<=2048"),
     ("tpot_p99<=400ms for  prompts<2049 ", "tpot_p99 for prompts<=2048"),
     ("mean<=0.4s for prompts>=4097", "mean for prompts>4096"),
     ("ttft_p50<=400ms for 512 <= prompts < 2049", "ttft_p50 for 511<prompts<=2048")],
)  # fmt: skip
def test_a_limit_may_be_one_for_some_lengths_of_prompts_only(text: str, metric: str) -> None:
    """However the lengths are written, the same requests have one name, which reads back."""
    found = Constraint.parse(text)
    assert found == Constraint(metric, 0.4)
    assert (found.timed, found.at_least, found.relative) == (True, False, False)
    assert Constraint.parse(str(found)) == found
    relative = Constraint.parse("p99<=1.5x for prompts>100")
    assert Constraint.parse(str(relative)) == relative == Constraint("p99 for prompts>100", 1.5, relative=True)


@pytest.mark.parametrize(
    ("text", "right"),
    [("ttft_p99<=400ms_for_prompts<=2048", "ttft_p99<=400 ms for prompts<=2048"),
     ("ttft_p99<=400ms,prompts<=2048", "ttft_p99<=400 ms for prompts<=2048"),
     ("tpot_p99<=0.1s_for_512<prompts<=2048", "tpot_p99<=100 ms for 512<prompts<=2048"),
     ("ttft_p99<=400ms_for_prompts<=x", "ttft_p99<=400ms for prompts<=2048"),
     ("ttft_p99<=400ms(prompts<=2048)", "ttft_p99<=400ms for prompts<=2048"),
     ("prompts<=2048", "ttft_p99<=400ms for prompts<=2048")],
)  # fmt: skip
def test_a_limit_for_some_prompts_that_is_spelt_otherwise_is_told_how_to_be(text: str, right: str) -> None:
    """The line holds the spelling that was meant, or an example where that is unclear; the spelling is one."""
    with pytest.raises(InvalidInput, match=re.escape(f"{text!r} is not an SLO; write it as {right!r}, in quotes")):
        Constraint.parse(text)
    assert Constraint.parse(right).prompts is not None


@pytest.mark.parametrize(
    "text",
    ["ttft_p99<=1s for", "ttft_p99<=1s for prompts", "ttft_p99<=1s for prompts<=", "ttft_p99<=1s for prompts<=2k",
     "ttft_p99<=1s for answers<=5", "ttft_p99<=1s for prompts<1", "ttft_p99<=1s for 9<prompts<=9",
     "ttft_p99<=1s for 9<prompts>=20", "ttft_p99<=1s for prompts<=5 for prompts<=6", "power<=20W for prompts<=5",
     "tokens_per_j>=5/J for prompts<=5", "ttft_p98<=1s for prompts<=5", "ttft_p99<=1s for prompts<=99999999999"],
)  # fmt: skip
def test_lengths_that_name_no_requests_get_one_line(text: str) -> None:
    """Neither a length nor a metric that prompts cannot have is guessed at."""
    with pytest.raises((InvalidInput, UnknownName)) as caught:
        Constraint.parse(text)
    assert "\n" not in str(caught.value)


def test_a_metric_of_some_requests_has_one_spelling() -> None:
    """A journal that names it in another would judge a figure that no measurement has."""
    for odd in ("ttft_p99 for prompts<2049", "ttft_p99 for prompts <=2048", "power for prompts<=2048"):
        with pytest.raises(UnknownName):
            Constraint(odd, 0.4)
        with pytest.raises(InvalidInput):
            measured(extras={odd: 0.4})


def test_an_slo_text_reads_back() -> None:
    """The text of a constraint means the same constraint."""
    for text in ("p99<=25ms", "mean<=1.2x", "power<=20W", "throughput>=30/s"):
        assert Constraint.parse(str(Constraint.parse(text))) == Constraint.parse(text)


@pytest.mark.parametrize(
    ("slo", "seen", "amount", "side"),
    [
        ("mean<=8ms", {"latency_s": 0.01}, "25%", "over"),
        ("mean<=1ms", {"latency_s": 0.013}, "12 times the limit", "over"),
        ("throughput>=200/s", {"latency_s": 0.02}, "75%", "short"),
        ("temperature<=10C", {"temperature_c": 45.5}, "35.5 °C", "over"),
        ("temperature<=60C", {"temperature_c": 45.5}, "0 °C", "over"),
    ],
)
def test_a_broken_limit_is_told_as_people_do(slo: str, seen: dict[str, float], amount: str, side: str) -> None:
    """A floor is fallen short of, and degrees are no share of a limit."""
    limit = Constraint.parse(slo)
    assert limit.show_excess(measured(**seen)) == amount
    assert limit.beyond == side


@pytest.mark.parametrize(
    ("uri", "alone"),
    [
        ("sim:jetson-tx2?knobs=", "sim:jetson-tx2"),
        ("sim:a?seed=1&knobs=gpu_max_mhz,mem_mhz", "sim:a?seed=1"),
        ("sim:a?knobs=gpu_max_mhz&seed=1", "sim:a?seed=1"),
        ("sim:a?knobs=gpu_max_mhz,mem_mhz,sim:b?knobs=,ssh://c", "sim:a,sim:b,ssh://c"),
        ("nvml:0,2", "nvml:0,2"),
    ],
)
def test_the_knobs_that_are_searched_make_no_other_device(uri: str, alone: str) -> None:
    """They are an option of the URI, which people are not shown."""
    assert device_alone(uri) == alone


def test_slack_is_what_is_left() -> None:
    """Zero or more is feasible, for ceilings and for floors."""
    at = measured(latency_s=0.02)
    assert Constraint("mean", 0.025).slack(at) == pytest.approx(0.005)
    assert Constraint("throughput", 60.0).slack(at) == pytest.approx(-10.0)
    assert Constraint("throughput", 60.0).excess(at) == pytest.approx(1 / 6)


def test_a_relative_limit_multiplies_the_default() -> None:
    """Without a reference in the problem the default's own trial is the measure."""
    asked = study("mean<=1.5x", energies=(1.0, 0.5, 0.4), latencies=(0.010, 0.014, 0.016))
    assert asked.constraints[0].limit == pytest.approx(0.015)
    assert asked.best is not None
    assert asked.best.number == 1


def test_an_unmeasured_metric_is_an_error_not_a_pass() -> None:
    """Unknown is not zero: a limit on something nobody measured does not hold."""
    without = Measurement(Latency(0.01), 1.0, 100.0)
    with pytest.raises(InvalidInput, match="not measured"):
        Constraint("p99", 0.02).slack(without)


def test_trial_states_follow_from_the_fields() -> None:
    """Running, completed, failed."""
    point = problem().space.default
    assert Trial(0, point).state is TrialState.RUNNING
    assert Trial(0, point, measured()).state is TrialState.COMPLETED
    assert Trial(0, point, failure="x").state is TrialState.FAILED


def test_the_best_is_the_cheapest_that_holds() -> None:
    """Cheaper but too slow is not best; the saving is against the default."""
    found = study("mean<=12ms", energies=(1.0, 0.8, 0.3), latencies=(0.010, 0.012, 0.030))
    assert found.best is not None
    assert found.best.number == 1
    assert found.saving_fraction == pytest.approx(0.2)
    assert [trial.number for trial in found.infeasible] == [2]


def test_the_closest_miss_is_known() -> None:
    """When nothing holds, the least broken trial is named."""
    found = study("mean<=5ms", energies=(1.0, 0.8), latencies=(0.010, 0.006))
    assert found.best is None
    assert found.closest is not None
    assert found.closest.number == 1


@pytest.mark.parametrize(
    "build",
    [lambda: measured(energy_j=0.0), lambda: measured(energy_j=-1.0), lambda: measured(energy_j=float("nan")),
     lambda: measured(latency_s=float("nan")), lambda: Latency.of([]), lambda: Window(queries=0),
     lambda: Window(duration_s=9.0, timeout_s=1.0)],
)  # fmt: skip
def test_impossible_values_are_refused(build: object) -> None:
    """No measurement without positive, finite energy and time."""
    with pytest.raises(PolythrottleError):
        build()  # type: ignore[operator]


def test_percentiles_are_observed_latencies() -> None:
    """An order statistic, not an interpolation."""
    latency = Latency.of([i / 1000 for i in range(1, 101)])
    assert (latency.p50_s, latency.p95_s, latency.p99_s) == (0.050, 0.095, 0.099)


def test_problems_are_told_apart() -> None:
    """Another SLO, device or window is another problem."""
    assert problem("mean<=1s").fingerprint == problem("mean<=1s").fingerprint != problem("mean<=2s").fingerprint
