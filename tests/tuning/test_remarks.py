import math
from dataclasses import replace
from pathlib import Path

import pytest
from builders import measured, study

from polythrottle.backends import open_device
from polythrottle.backends.cpu import CpuDevice
from polythrottle.domain.arrivals import CLOSED, Arrivals
from polythrottle.domain.measurement import MOST_QUERIES, Interval, Measurement, Window
from polythrottle.domain.problem import Objective
from polythrottle.domain.space import Knob, OperatingPoint, SearchSpace
from polythrottle.domain.study import Reference, Study, Trial
from polythrottle.testing import plant
from polythrottle.tuning.remarks import (
    EVERY,
    afterwards,
    beforehand,
    meanwhile,
    narrowed,
    passed_over,
    strange_limit,
    unknown,
    unsteered,
)


def first(whole: Study, count: int) -> Study:
    """Return a study as it was after so many trials."""
    return replace(whole, trials=whole.trials[:count])


def test_a_default_that_breaks_the_slo_is_said_at_once_where_a_risk_is_asked() -> None:
    """After its trial alone, and only to who asked for a risk that cannot be kept."""
    whole = study("mean<=5ms", energies=(1.0, 2.0), latencies=(0.01, 0.01))
    (line,) = meanwhile(first(whole, 1), 0.05)
    assert "the default point breaks the SLO" in line
    assert "--risk 0.05 cannot be kept" in line
    assert not list(meanwhile(first(whole, 1), None))
    assert not list(meanwhile(whole, 0.05))


def test_a_default_that_holds_the_slo_needs_no_word() -> None:
    """Whatever the risk."""
    whole = study("mean<=5s", energies=(1.0,), latencies=(0.01,))
    assert not list(meanwhile(whole, 0.05))


def test_a_search_without_anything_feasible_says_so_every_ten_trials() -> None:
    """With the trial that is closest; not in between, and not once there is one."""
    whole = study("mean<=5ms", energies=(1.0,) * EVERY, latencies=(0.9, *[0.01] * (EVERY - 1)))
    (line,) = meanwhile(whole, None)
    assert line.startswith(f"nothing feasible yet after {EVERY} trials: trial 1 is closest, 100% over")
    assert not list(meanwhile(first(whole, EVERY - 1), None))
    held = study("mean<=5ms", energies=(1.0,) * EVERY, latencies=(0.001, *[0.01] * (EVERY - 1)))
    assert not list(meanwhile(held, None))


def test_nothing_is_said_of_a_trial_that_runs_or_failed() -> None:
    """It has shown nothing, and neither has no trial at all."""
    whole = study("mean<=5ms", energies=(1.0,) * EVERY, latencies=(0.01,) * EVERY)
    point = whole.problem.space[0]
    for last in (Trial(EVERY - 1, point), Trial(EVERY - 1, point, failure="it fell over")):
        assert not list(meanwhile(whole.with_trial(last), 0.1))
    assert not list(meanwhile(first(whole, 0), 0.1))


@pytest.mark.parametrize(("method", "said"), [("tpe", 1), ("gp", 1), ("paper", 1), ("bayes", 0), ("random", 0)])
def test_a_method_that_looks_for_one_goal_alone_says_so_of_a_front(method: str, said: int) -> None:
    """Asked for a front it still looks for the least energy; asked for energy there is nothing to say."""
    asked = study()
    front = Study(replace(asked.problem, objective=Objective.PARETO), method)
    assert len(list(beforehand(front))) == said
    assert not list(beforehand(Study(asked.problem, method)))


def test_a_default_that_is_measured_again_is_said_to_be() -> None:
    """With what it took before and now."""
    whole = study(energies=(10.0, 1.0), latencies=(0.1, 0.01))
    assert whole.doubtful
    again = whole.with_trial(Trial(2, whole.problem.space.default, measured(0.012, 1.2)))
    (line,) = meanwhile(again, None)
    assert "measured again" in line
    assert "mean 100 ms and 12 ms; the newer counts" in line
    assert not again.doubtful


@pytest.mark.parametrize("name", ["batch_size", "concurrency", "in_flight"])
def test_a_trial_of_less_at_once_contradicts_no_default(name: str) -> None:
    """A query of eight in flight is many times as fast as one of 256, and nothing is wrong with either."""
    asked = SearchSpace.grid([Knob(name, (8, 256))], {name: 256})
    trials = [Trial(0, asked.default, measured(14.0, 1.0)), Trial(1, OperatingPoint({name: 8}), measured(2.0, 0.1))]
    whole = Study(replace(study().problem, space=asked), "grid", 0, tuple(trials))
    assert not whole.doubtful
    other = Study(replace(study().problem, space=SearchSpace.grid([Knob(name, (8, 256))], {name: 8})), "grid", 0)
    slow, quick = OperatingPoint({name: 8}), OperatingPoint({name: 256})
    turned = replace(other, trials=(Trial(0, slow, measured(14.0, 1.0)), Trial(1, quick, measured(2.0, 1.0))))
    assert turned.doubtful


def test_a_device_of_which_nothing_is_searched_says_why(tmp_path: Path) -> None:
    """A processor without clocks to set is tuned by its workload's knobs alone, and a line says so."""
    (line,) = unsteered(CpuDevice(root=str(tmp_path)))
    assert "no knob of" in line
    assert "polythrottle doctor" in line
    assert not list(unsteered(open_device("sim:jetson-nano")))


def looked(queries: int, window_s: float, **rest: object) -> Measurement:
    """Return a measurement of so many queries in a time."""
    found = measured(window_s=window_s, **rest)
    return replace(found, latency=replace(found.latency, queries=queries))


def test_a_window_that_ended_before_it_was_to_is_said_to() -> None:
    """With what makes it last; one that nobody asked to last needs no word, and a recorded one has no length."""
    long = Window(queries=1000, duration_s=60.0)
    (line,) = afterwards(looked(1000, 30.0), long, CLOSED)
    assert line == "the window ended with 1,000 queries, before 60 s; --queries 2400 makes it last"
    (line,) = afterwards(looked(1000, 1.0), Window(1000), CLOSED, asked_s=2.0)
    assert "before 2 s" in line
    (line,) = afterwards(looked(40, 60.0), Window(queries=100), CLOSED)
    assert line == "the window was given up after 60 s, with 40 of 100 queries"
    assert not list(afterwards(looked(1000, 61.0), long, CLOSED))
    assert not list(afterwards(looked(1000, 1.0), Window(1000), CLOSED))
    assert not list(afterwards(looked(10, 1.0, censored=True), long, CLOSED))
    assert not list(afterwards(measured(), long, CLOSED))


def test_a_load_that_cannot_be_judged_is_said_to_be_so(tmp_path: Path) -> None:
    """More than is served, too few bursts and how many it takes, and a trace that was seen in part."""
    behind = looked(1000, 10.0, offered_per_s=200.0, backlog_per_s=100.0)
    (line,) = afterwards(behind, Window(), Arrivals.parse("poisson:200/s"))
    assert line.startswith("more comes than is served: 200/s offered, 100/s served; the queue grows")
    (line,) = afterwards(looked(1000, 30.0), Window(), Arrivals.parse("burst:30/s"))
    assert "1.5 cycles of burst and calm were seen, so nothing has an interval" in line
    assert line.endswith("energy needs 10, latency 30: --seconds 600 --queries 21600")
    (line,) = afterwards(looked(7200, 240.0), Window(), Arrivals.parse("burst:30/s"))
    assert "12 cycles of burst and calm were seen, so latency has no interval" in line
    assert not list(afterwards(looked(21600, 700.0), Window(), Arrivals.parse("burst:30/s")))
    (tmp_path / "a.csv").write_text("arrival_s\n" + "".join(f"{n}\n" for n in range(1200)))
    trace = Arrivals.parse(f"trace:{tmp_path / 'a.csv'}@30/s")
    (line,) = afterwards(looked(1000, 30.0), Window(), trace)
    assert "part of the trace" in line
    assert not list(afterwards(looked(1350, 45.0), Window(), trace))
    (tmp_path / "a.csv").unlink()
    (line,) = afterwards(looked(1350, 45.0), Window(), trace)
    assert "part of the trace" in line


def test_fewer_answers_than_requests_were_to_come_are_told() -> None:
    """An engine that takes all that come answers each more slowly, and no queue is seen to grow."""
    (line,) = afterwards(looked(200, 7.5), Window(), Arrivals.parse("uniform:40/s"))
    assert line == (
        "200 requests were answered where some 300 were to come: more may come than is served; a longer window tells: "
        "--queries 3600"
    )
    assert not list(afterwards(looked(270, 7.5), Window(), Arrivals.parse("poisson:40/s")))
    assert not list(afterwards(looked(9500, 250.0), Window(), Arrivals.parse("poisson:40/s")))


def test_what_is_said_of_the_default_is_said_while_a_study_runs() -> None:
    """After its trial, and after no other."""
    whole = study(energies=(1.0, 2.0), latencies=(0.01, 0.01))
    behind = replace(looked(1000, 10.0), offered_per_s=200.0, backlog_per_s=100.0)
    whole = replace(whole, trials=tuple(replace(trial, measurement=behind) for trial in whole.trials))
    assert [line[:26] for line in meanwhile(first(whole, 1), None)] == ["more comes than is served:"]
    assert not list(meanwhile(whole, None))


def test_what_is_not_known_has_a_reason() -> None:
    """Temperature, idle power and intervals; nothing is said of what is known."""
    bursts = Arrivals.parse("burst:30/s")
    assert set(unknown(measured(), CLOSED)) == {"temperature_c", "idle_power_w", "intervals"}
    assert "recorded without" in unknown(measured(), CLOSED)["intervals"]
    assert "1.5 cycles of burst and calm" in unknown(looked(1000, 30.0), bursts)["intervals"]
    assert "not below" in unknown(measured(idle_power_w=1e3), CLOSED)["idle_j"]
    short = measured(temperature_c=40.0, idle_power_w=1.0, intervals={"mean": Interval(0.0, 1.0)})
    assert "too short" in unknown(short, CLOSED)["intervals"]
    assert not unknown(replace(short, intervals={"energy": Interval(0.0, 2.0)}), CLOSED)


def test_a_floor_that_nothing_reaches_is_fallen_short_of() -> None:
    """The closest trial is so much short of it, not over it."""
    few = study("throughput>=1000/s", energies=(1.0,) * EVERY, latencies=(0.01,) * EVERY)
    assert any("trial 0 is closest, 90% short;" in line for line in meanwhile(few, None))


def test_what_measured_less_than_the_answer_is_told_with_why_it_is_not_taken() -> None:
    """A trial that breaks the SLO, one that was lucky, and a preset of knobs that were not searched."""
    whole = study("mean<=20ms", energies=(2.0, 1.0, 0.8, 0.9), latencies=(0.01, 0.015, 0.05, 0.01))
    (line,) = passed_over(whole)
    assert line == ("not taken", "trial 2 measured 11.1% less, but it breaks the SLO")
    chosen = replace(whole, answer=1)
    assert [text.partition(",")[0] for _, text in passed_over(chosen)] == [
        *("trial 2 measured 20.0% less", "trial 3 measured 10.0% less")
    ]
    assert "but the model of all trials expects its point to take more" in list(passed_over(chosen))[1][1]
    for levels, why in (
        ({"cpu_max_hz": 1}, "it also sets cpu_max_mhz, which was not searched"),
        ({"cpu_max_hz": 1, "mem_hz": 1}, "it also sets cpu_max_mhz, mem_mhz, which were not searched"),
        ({}, "presets are measured once"),
    ):
        beside = whole.with_reference(Reference("15W", OperatingPoint(levels), measured(0.01, 0.45)))
        assert list(passed_over(beside))[1][1].startswith(f"preset 15W measured 50.0% less, but {why}")
    late = whole.with_reference(Reference("MAXN", OperatingPoint({}), measured(0.05, 0.1)))
    assert len(list(passed_over(late))) == 1
    assert not list(passed_over(study("mean<=5ms", energies=(1.0, 2.0), latencies=(0.01, 0.01))))


@pytest.mark.parametrize(
    ("interval", "why"),
    [
        (Interval(0.008, 0.05), "its mean may be up to 50 ms, which breaks the SLO"),
        (Interval(0.008, math.inf), "its window is too short to tell that its mean holds"),
        (Interval(0.008, 0.012), "the model of all trials expects its point to take more than the answer's, or to"),
    ],
)
def test_a_window_that_may_have_held_by_luck_is_said_to(interval: Interval, why: str) -> None:
    """Where the interval of what is limited reaches beyond the limit, that is the reason, and how far."""
    whole = study("mean<=20ms", energies=(2.0, 1.0, 0.9), latencies=(0.01, 0.015, 0.01))
    vague = [
        replace(trial, measurement=replace(trial.measurement, intervals={"mean": interval}))
        for trial in whole.trials
        if trial.measurement is not None
    ]
    ((_, line),) = passed_over(replace(whole, trials=tuple(vague), answer=1))
    assert line.startswith(f"trial 2 measured 10.0% less, but {why}")


@pytest.mark.parametrize(
    ("interval", "ends"),
    [
        (Interval(0.018, math.inf), "it breaks the SLO, by less than its window can tell; --queries 10000 tells more"),
        (Interval(0.019, 0.06), "it breaks the SLO, by less than its window can tell; --queries 10000 tells more"),
        (Interval(0.021, 0.06), "it breaks the SLO"),
    ],
)
def test_a_window_that_may_have_broken_the_slo_by_bad_luck_is_said_to(interval: Interval, ends: str) -> None:
    """And how to tell; one that plainly broke it is not, nor one that tells no interval."""
    whole = study("mean<=20ms", energies=(2.0, 1.0, 0.8), latencies=(0.01, 0.015, 0.022))
    *others, last = whole.trials
    assert last.measurement is not None
    near = replace(last, measurement=replace(last.measurement, intervals={"mean": interval}))
    ((_, line),) = passed_over(replace(whole, trials=(*others, near)))
    assert line == f"trial 2 measured 20.0% less, but {ends}"
    longest = replace(whole.problem, window=replace(whole.problem.window, most_queries=MOST_QUERIES))
    ((_, line),) = passed_over(replace(whole, problem=longest, trials=(*others, near)))
    assert "--queries" not in line


def test_the_answers_own_point_in_another_window_is_not_said_to_take_more() -> None:
    """A default that was measured twice is one point: what is expected there is the same for both."""
    whole = study("mean<=20ms", energies=(1.0, 2.0, 1.1), latencies=(0.01, 0.01, 0.01))
    first, other, again = whole.trials
    chosen = replace(whole, trials=(first, other, replace(again, point=first.point)), answer=2)
    assert list(passed_over(chosen)) == [
        ("not taken", "trial 0 measured 9.1% less, but it is the same point as the answer, trial 2, in another window")
    ]


def test_the_answers_own_point_on_another_board_is_said_to_be_there() -> None:
    """Boards differ, which is more than that two windows do."""
    whole = study("mean<=20ms", energies=(1.0, 2.0, 1.1), latencies=(0.01, 0.01, 0.01))
    first, other, again = (replace(trial, board=uri) for trial, uri in zip(whole.trials, "aab", strict=True))
    chosen = replace(whole, trials=(first, other, replace(again, point=first.point)), answer=2)
    assert list(passed_over(chosen)) == [
        ("not taken", "trial 0 measured 9.1% less, but it is the same point as the answer, trial 2, on another board")
    ]


def test_a_limit_in_the_wrong_unit_is_doubted() -> None:
    """Seconds for milliseconds are, and µs; a limit that is loose or tight on purpose, and a multiple, are not."""
    seen = {"energies": (1.0,), "latencies": (0.011,)}
    assert strange_limit(study("mean<=25s", **seen)) == (
        "mean<=25 s is 2,273 times what the default takes, 11 ms: was mean<=25ms meant?"
    )
    assert strange_limit(study("mean<=25us", **seen)) == (
        "mean<=25 µs is 1/440 of what the default takes, 11 ms: was mean<=25ms meant?"
    )
    for fine in ("mean<=3s", "mean<=25ms", "mean<=40us", "mean<=1000x", "mean<=0.001x"):
        assert strange_limit(study(fine, **seen)) is None
    assert strange_limit(study("mean<=25s")) is None


def test_what_the_power_mode_hides_is_said_before_tuning(tmp_path: Path) -> None:
    """An Orin Nano Super boots in 25W, which stops its GPU at 918 of 1020 MHz; in MAXN_SUPER nothing is hidden."""
    narrow = plant("jetson-orin-nano", tmp_path / "narrow")
    (line,) = narrowed(open_device(f"jetson?root={narrow}", ["gpu_max_hz"]))
    assert line == (
        "in 25W the GPU stops at 918 MHz and the CPU stops at 1344 MHz; MAXN_SUPER allows 1020 MHz and 1728 MHz: "
        "sudo nvpmodel -m 2, then tune"
    )
    wide = plant("jetson-orin-nano", tmp_path / "wide", power_mode=2)
    assert not list(narrowed(open_device(f"jetson?root={wide}")))
    assert not list(narrowed(open_device("sim:jetson-nano")))
