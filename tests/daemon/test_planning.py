import subprocess
import sys
from dataclasses import replace

import pytest

from polythrottle.daemon.control.events import Bounds
from polythrottle.daemon.followed_profile import UNTOUCHED, bounds_of, device_part, p99_limit_s, plan_of
from polythrottle.domain.ladder import Ladder, PointPerformance, Rung
from polythrottle.domain.measurement import Latency, Measurement
from polythrottle.domain.metrics import PromptClass
from polythrottle.domain.profile import Profile
from polythrottle.domain.space import OperatingPoint

_POINT = OperatingPoint({"gpu_max_hz": 1_000_000_000, "batch_size": 4})
_SEEN = Measurement(Latency(0.1, p99_s=0.12), 0.5, 40.0, 20.0, idle_power_w=8.0)


def _profile(**rest: object) -> Profile:
    return replace(Profile("sim:jetson-agx-orin", "efficientnet-b7", _POINT, _SEEN, slo=("p99<=200 ms",)), **rest)  # type: ignore[arg-type]


def _ladder() -> Ladder:
    rungs = []
    for rate_per_s, batch, power_w in ((5.0, 1, 9.0), (30.0, 4, 16.0)):
        point = _POINT.moved({"batch_size": batch})
        rungs.append(Rung(rate_per_s, PointPerformance(point, batch, 0.1, 0.1, 0.12, 2.0, 8.0), 0.05, power_w, 0.15))
    return Ladder(0.2, tuple(rungs))


def test_a_profile_without_a_ladder_keeps_its_point_for_all_loads() -> None:
    """One rung: the profile's point, up to 70 % of what it answered, with power between idle and full."""
    plan = plan_of(_profile())
    assert plan.ladder is not None
    (rung,) = plan.ladder.rungs
    assert rung.service.point == _POINT
    assert rung.rate_per_s == pytest.approx(28.0)
    assert rung.power_at(1.0) < rung.power_at(28.0) == pytest.approx(8 + 0.7 * 12)
    assert plan.ladder.slo_s == 0.2


def test_without_idle_power_no_less_is_predicted_at_partial_load() -> None:
    """What was not measured is not made up: the power of full load, whatever the rate."""
    plan = plan_of(_profile(measurement=replace(_SEEN, idle_power_w=None)))
    assert plan.ladder is not None
    rung = plan.ladder.rungs[0]
    assert rung.power_at(0.1) == rung.power_at(38.0) == pytest.approx(20.0)


def test_the_safe_point_is_the_default_only_where_that_is_safe() -> None:
    """The default must have been measured to hold the SLO and to answer what the top rung answers."""
    quick = replace(_SEEN, throughput_per_s=50.0, energy_j=1.0)
    assert plan_of(_profile(ladder=_ladder(), default=quick)).safe == UNTOUCHED
    top = plan_of(_profile(ladder=_ladder())).safe
    assert (top.point["batch_size"], top.gather_s) == (4, 0.05)
    for default in (replace(quick, throughput_per_s=20.0), replace(quick, latency=Latency(0.1, p99_s=0.3))):
        assert plan_of(_profile(ladder=_ladder(), default=default)).safe == top
    unknown = replace(quick, latency=Latency(0.1))
    assert plan_of(_profile(ladder=_ladder(), default=unknown)).safe == top


def test_without_a_ladder_a_default_that_held_the_slo_is_safe() -> None:
    """However little it answers: the only rung is the point that would be violating."""
    slow = replace(_SEEN, throughput_per_s=5.0, energy_j=4.0)
    assert plan_of(_profile(default=slow)).safe == UNTOUCHED
    assert plan_of(_profile(default=replace(slow, latency=Latency(0.1, p99_s=0.3)))).safe.point == _POINT
    assert plan_of(_profile()).safe.point == _POINT


def test_the_cool_point_draws_least() -> None:
    """Of a ladder it is the coolest rung."""
    assert plan_of(_profile(ladder=_ladder())).cool.point["batch_size"] == 1


def test_bounds_come_from_the_slo_unless_asked_otherwise() -> None:
    """A p99, a power and a temperature of the SLO are guarded; what was asked goes before them."""
    slo = ("p99<=200 ms", "power<=15 W", "temperature<=80 °C", "mean<=100 ms")
    assert bounds_of(slo) == Bounds(p99_s=0.2, power_w=15.0, temperature_c=80.0)
    assert bounds_of(slo, Bounds(power_w=12.0, errors=0.01)) == Bounds(0.2, 12.0, None, 80.0, 0.01)
    tokens = ("ttft_p99<=600ms", "tpot_p99<=100ms", "ttft_p99<=100ms for prompts<=9")
    short = ((PromptClass(most=9), 0.1),)
    assert bounds_of(tokens) == Bounds(ttft_s=0.6, tpot_s=0.1, ttft_of=short)
    assert bounds_of(tokens, Bounds(ttft_s=0.5)) == Bounds(ttft_s=0.5, tpot_s=0.1, ttft_of=short)
    assert bounds_of(("p99<=1.2x",)) == bounds_of(("tpot_p99<=1s for prompts<=9",)) == Bounds()
    assert bounds_of(("ttft_p99<=1s for prompts<=9",)) == Bounds(ttft_of=((PromptClass(most=9), 1.0),))
    assert p99_limit_s(("mean<=1 s",)) is None


def test_a_point_is_parted_between_device_and_workload() -> None:
    """The knobs the profile noted as the workload's are not the board's to set."""
    profile = _profile(workload_knobs=("batch_size",))
    assert set(device_part(profile, _POINT)) == {"gpu_max_hz"}
    assert set(device_part(_profile(), _POINT)) == {"gpu_max_hz"}


def test_a_workload_without_a_limit_on_its_p99_is_followed_too() -> None:
    """Ten times its own tail stands in for the limit, and no guard watches the p99."""
    plan = plan_of(_profile(slo=()))
    assert plan.ladder is not None
    assert plan.ladder.slo_s == pytest.approx(1.2)
    assert plan.bounds.p99_s is None


def test_planning_does_without_numpy(tmp_path: object) -> None:
    """The daemon at rest reads a profile and plans without loading NumPy."""
    code = (
        "import sys, polythrottle.daemon.followed_profile, polythrottle.catalog.tuned_profiles;"
        "from polythrottle.daemon.traffic.sources import open_traffic;"
        "[open_traffic(text).look(0.0) for text in ('report', 'process:nothing', 'log:nothing')];"
        "print([name for name in ('numpy', 'torch', 'pandas', 'prometheus_client') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
