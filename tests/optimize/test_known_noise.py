"""What a window's own interval says is noise the models know of: vague windows count for less than precise ones."""

import math
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from builders import measured

from polythrottle.domain.measurement import Interval, Measurement
from polythrottle.domain.problem import Constraint, Problem
from polythrottle.domain.space import Knob, OperatingPoint, SearchSpace
from polythrottle.domain.study import Study, Trial
from polythrottle.optimize import ConstrainedBayes, Options, make_optimizer
from polythrottle.optimize.quantities import DRAW, ENERGY, TIME, doubts, usual

if TYPE_CHECKING:
    from polythrottle.optimize.surrogate import QuantityPosterior

CLOCKS_HZ = tuple(range(400_000_000, 1_400_000_000, 100_000_000))
QUANTITIES = (TIME, DRAW, "p99")


def clocks() -> SearchSpace:
    """Return ten clocks, the highest of them the default."""
    return SearchSpace.grid((Knob("gpu_max_hz", CLOCKS_HZ),), {"gpu_max_hz": CLOCKS_HZ[-1]})


def seen(latency_s: float = 0.01, energy_j: float = 1.0, **shares: float) -> Measurement:
    """Return a measurement whose intervals reach so far, as shares of their metric, to both sides."""
    whole = measured(latency_s, energy_j)
    values = {"energy": energy_j, "throughput": whole.throughput_per_s, "power": whole.power_w, "p99": 1.2 * latency_s}
    around = {name: Interval((1 - share) * (values[name] or 0.0), (1 + share) * (values[name] or 0.0))
              for name, share in shares.items()}  # fmt: skip
    return replace(whole, intervals=around)


def study(*visits: tuple[int, Measurement], slo: str = "p99<=1s") -> Study:
    """Return a study that saw these measurements at these clocks, in MHz."""
    trials = [Trial(i, OperatingPoint({"gpu_max_hz": mhz * 10**6}), seen) for i, (mhz, seen) in enumerate(visits)]
    return Study(Problem(clocks(), (Constraint.parse(slo),), "sim:test", "model"), "bayes", 0, tuple(trials))


def believed(known: Study, options: Options | None = None) -> "QuantityPosterior":
    """Return what the models say; their libraries warn of each other when they are loaded and fitted."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from polythrottle.optimize import posterior

        belief = posterior.study_posterior(known, QUANTITIES, options or Options())
    assert belief is not None
    return belief


def mean_at(known: Study, mhz: int, options: Options | None = None) -> float:
    """Return what the models expect of log time at a clock."""
    belief = believed(known, options)
    return float(belief.mean[known.problem.space.index(OperatingPoint({"gpu_max_hz": mhz * 10**6})), 0])


def test_an_interval_is_a_variance_on_the_scale_of_the_models() -> None:
    """Ninety-five per cent are 1.96 deviations, relative because the models know logarithms."""
    found = doubts([seen(throughput=0.098, p99=0.0196), seen()], QUANTITIES)
    assert found == pytest.approx(np.array([[0.05**2, 0.0, 0.01**2], [0.0, 0.0, 0.0]]))


def test_temperature_is_on_its_own_scale() -> None:
    """Its unit is 40 °C, whatever the temperature is."""
    warm = replace(measured(), temperature_c=60.0, intervals={"temperature": Interval(58.04, 61.96)})
    assert doubts([warm], ["temperature"])[0, 0] == pytest.approx((1.0 / 40.0) ** 2)


def test_an_interval_that_reaches_far_up_is_measured_by_the_logarithm() -> None:
    """As of 597 requests on a simulated H100, whose p99 of the first token was 0.53 s, and 0.37 to 2.96 in 95 %."""
    lopsided = replace(seen(), intervals={"p99": Interval(0.0084, 0.0672)})
    assert doubts([lopsided], ["p99"])[0, 0] == pytest.approx((math.log(8) / 2 / 1.96) ** 2)
    low = replace(seen(), intervals={"p99": Interval(0.0, 0.024)})
    assert doubts([low], ["p99"])[0, 0] == pytest.approx((1.0 / 1.96) ** 2)


def test_an_open_interval_is_as_wide_as_the_widest() -> None:
    """A p99 without an upper end is not a precise one."""
    few = replace(seen(), intervals={"p99": Interval(0.0119, float("inf"))})
    found = doubts([few, seen(p99=0.1), seen(p99=0.2)], ["p99"])[:, 0]
    assert found[0] == found[2] > found[1]
    alone = doubts([few], ["p99"])[0, 0]
    assert 0 < alone < found[1]


def test_a_window_cut_short_is_as_sure_as_its_lower_end() -> None:
    """What plainly broke a limit may be even further beyond it, which says no less."""
    cut = replace(seen(), intervals={"p99": Interval(0.0119, float("inf"))}, censored=True)
    found = doubts([cut, replace(cut, censored=False), seen(p99=0.1)], ["p99"])[:, 0]
    assert found[0] == pytest.approx((0.0001 / 0.012 / 1.645) ** 2)
    assert found[0] < found[1] == found[2]


def test_what_all_energies_share_moves_no_point() -> None:
    """A sensor's factor is in every interval of energy, and the same in all of them: only the rest is noise."""
    found = doubts([seen(energy=0.03, power=0.03), seen(energy=0.05, power=0.03)], [DRAW, ENERGY])
    assert found[:, 0] == pytest.approx([0.0, 0.0])
    assert found[:, 1] == pytest.approx([0.0, (0.05**2 - 0.03**2) / 1.96**2])


def test_the_usual_doubt_is_that_of_most() -> None:
    """One window that was cut short does not make all others vague."""
    assert usual(np.array([[0.01], [0.01], [4.0]])) == pytest.approx([0.01])


@pytest.mark.slow
@pytest.mark.parametrize("history", [False, True])
def test_the_models_follow_the_precise_of_two_neighbours(history: bool) -> None:
    """Where two windows contradict each other, the one with the narrow interval is believed."""
    past = study(*((mhz, seen(1e7 / mhz / 1e6)) for mhz in (400, 700, 1000, 1300)))
    options = Options(history=[past] if history else ())
    slow, fast = 0.02, 0.01
    precise, vague = {"throughput": 0.001}, {"throughput": 1.0}

    def middle(slowly: dict[str, float], quickly: dict[str, float]) -> float:
        known = study((1300, seen(0.01, **precise)), (800, seen(slow, **slowly)), (900, seen(fast, **quickly)))
        return (mean_at(known, 800, options) + mean_at(known, 900, options)) / 2

    believes_slow, between, believes_fast = (
        middle(*both) for both in ((precise, vague), (precise, precise), (vague, precise))
    )
    assert believes_fast < between - 0.05
    assert between + 0.05 < believes_slow


@pytest.mark.slow
def test_only_what_intervals_do_not_say_is_fitted() -> None:
    """Honest intervals leave less for the fitted noise, and together both are about what was there."""
    rng = np.random.default_rng(1)
    shaken = [(mhz, 1e7 / mhz / 1e6 * float(np.exp(0.1 * rng.standard_normal()))) for mhz in range(400, 1400, 100)]
    silent, honest = (
        believed(study(*((mhz, seen(late, **said)) for mhz, late in shaken))) for said in ({}, {"throughput": 0.196})
    )
    assert float(honest.noise[0]) >= 0.1**2
    assert float(honest.noise[0]) - 0.1**2 < 0.02**2 < float(silent.noise[0]) + 0.01
    assert float(honest.noise[1]) > 0


def test_equal_intervals_of_energy_change_no_suggestion() -> None:
    """Where every window is as good as any other there is nothing to tell them apart by."""
    path = [(1300, 0.010, 1.0), (900, 0.012, 0.8), (500, 0.018, 0.7)]
    plain = study(*((mhz, seen(late, energy)) for mhz, late, energy in path), slo="p99<=20ms")
    equal = study(*((mhz, seen(late, energy, energy=0.02, power=0.02)) for mhz, late, energy in path), slo="p99<=20ms")
    assert make_optimizer("bayes").suggest(plain) == make_optimizer("bayes").suggest(equal)


@pytest.mark.slow
def test_equally_vague_latencies_change_the_trend_by_little() -> None:
    """Equal noise moves the means by far less than it is itself."""
    path = [(1300, 0.010), (1100, 0.011), (900, 0.0125), (700, 0.0145), (500, 0.018)]
    plain = study(*((mhz, seen(late)) for mhz, late in path))
    equal = study(*((mhz, seen(late, throughput=0.02, p99=0.02)) for mhz, late in path))
    assert [mean_at(equal, mhz) for mhz in (600, 800, 1000)] == pytest.approx(
        [mean_at(plain, mhz) for mhz in (600, 800, 1000)], abs=0.01
    )


def test_what_is_explained_is_made_of_the_same_models() -> None:
    """A vague trial is foretold by the others, and does not foretell them."""
    believed(study((1300, seen())))
    from polythrottle.optimize.posterior import posterior_arrays

    path = [(1300, 0.010, 0.0), (1100, 0.011, 0.0), (900, 0.025, 1.5), (700, 0.0145, 0.0), (500, 0.018, 0.0)]
    vague, precise = (
        posterior_arrays(
            study(*((mhz, seen(late, throughput=share * on)) for mhz, late, share in path)),
            QUANTITIES,
            [clocks().default],
        )
        for on in (1.0, 0.0)
    )
    assert vague is not None
    assert precise is not None
    assert vague.missed[2, 0] == pytest.approx(np.log(0.025 / 0.0125), abs=0.1)
    assert abs(vague.missed[[1, 3], 0]).max() < 0.05 < abs(precise.missed[[1, 3], 0]).max()


@pytest.mark.parametrize("interval", [Interval(0.0, float("inf")), Interval(-float("inf"), float("inf")),
                                      Interval(0.0, 1e300), Interval(1e-300, 1e-300)])  # fmt: skip
def test_no_interval_is_too_odd(interval: Interval) -> None:
    """Whatever an interval says, its variance is a number and a next point is found."""
    odd = replace(seen(), intervals=dict.fromkeys(("throughput", "power", "energy", "p99"), interval))
    assert np.isfinite(doubts([odd, seen(0.02)], (*QUANTITIES, ENERGY))).all()
    known = study((1300, odd), (900, seen(0.02)))
    assert make_optimizer("bayes").suggest(known) not in known.visited


def test_what_is_mixed_is_as_uncertain_as_where_it_lies() -> None:
    """The covariance among points asked for agrees with the variance everywhere, and no doubt is below nothing."""
    believed(study((1300, seen())))
    from polythrottle.optimize.posterior import posterior_arrays as dissect

    known = study(*((mhz, seen(latency_s)) for mhz, latency_s in [(1300, 0.010), (900, 0.012), (500, 0.018)]))
    asked = [OperatingPoint({"gpu_max_hz": mhz * 10**6}) for mhz in (600, 1100)]
    found = dissect(known, QUANTITIES, asked)
    assert found is not None
    rows = [known.problem.space.index(point) for point in asked]
    assert pytest.approx(found.variance[rows], rel=1e-3, abs=1e-9) == np.diagonal(found.covariance, axis1=1, axis2=2).T
    prior = dissect(study((400, seen())), QUANTITIES, asked)
    assert prior is not None
    assert (np.linalg.eigvalsh(found.covariance) > -1e-9).all()


def test_a_window_that_cannot_tell_its_interval_is_no_surer_than_those_that_can() -> None:
    """As one of 64 answers in two waves on a real H100: it is taken to be as vague as the vaguest; a record is not."""
    rows = [seen(throughput=0.2, power=0.01), seen(throughput=0.1, power=0.01), seen(power=0.01), measured(0.01, 1.0)]
    vague, precise, untold, recorded = doubts(rows, (TIME,))[:, 0]
    assert untold == vague > precise > 0
    assert recorded == 0


def accepted(mean: float, variance: float, noise: float) -> tuple[float, float]:
    """Return the chances that a point holds a limit at 0, and that one window makes it a possible answer."""
    import torch

    from polythrottle.optimize.acquisition_value import log_accepted, log_feasible
    from polythrottle.optimize.quantities import Bound
    from polythrottle.optimize.surrogate import QuantityPosterior

    belief = QuantityPosterior(
        torch.tensor([[mean]], dtype=torch.double),
        torch.tensor([[variance]], dtype=torch.double),
        torch.tensor([noise], dtype=torch.double),
    )
    (holds,), (shown,) = (f(belief, ("p99",), [Bound("p99", 0.0)]).exp().tolist() for f in (log_feasible, log_accepted))
    return holds, shown


def test_a_window_too_vague_to_tell_makes_no_point_the_answer() -> None:
    """However likely its own figure is to fall below."""
    holds, shown = accepted(mean=-0.01, variance=0.02**2, noise=0.06**2)
    assert holds > 0.5
    assert shown < 0.001


def test_a_window_that_tells_makes_a_point_the_answer_as_often_as_it_holds() -> None:
    """Nothing is lost where windows are precise."""
    holds, shown = accepted(mean=-0.01, variance=0.05**2, noise=0.001**2)
    assert shown == pytest.approx(holds, abs=0.02)


@pytest.mark.parametrize(("mean", "shown"), [(-0.3, 1.0), (0.3, 0.0)])
def test_a_point_that_is_plainly_on_one_side_is_accepted_or_not_whatever_windows_tell(
    mean: float, shown: float
) -> None:
    """Vague windows take nothing from what is known already."""
    assert accepted(mean, variance=1e-8, noise=0.06**2)[1] == pytest.approx(shown, abs=1e-6)


def test_what_is_known_exactly_is_accepted_if_it_holds() -> None:
    """Nor is anything divided by zero."""
    assert accepted(-0.01, variance=1e-12, noise=0.0)[1] == pytest.approx(1.0)
    assert accepted(0.01, variance=1e-12, noise=0.0)[1] == pytest.approx(0.0)


def test_a_trial_is_worth_what_it_can_show_where_windows_differ_by_chance_alone() -> None:
    """What is on record shows what it holds."""
    from polythrottle.optimize.acquisition_value import acquisition_value

    vague = [(1300, seen(0.010, 2.0, p99=0.2)), (900, seen(0.012, 1.5, p99=0.2)), (700, seen(0.014, 1.3, p99=0.2))]
    told = study(*vague, slo="p99<=18ms")
    recorded = study(*((mhz, replace(one, intervals={})) for mhz, one in vague), slo="p99<=18ms")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chance = acquisition_value(told, told.constraints, Options())
        record = acquisition_value(recorded, recorded.constraints, Options())
    assert (chance.accepted <= chance.feasible).all()
    assert chance.accepted.min() < chance.feasible.min() - 1.0
    assert (record.accepted == record.feasible).all()


def promising(looks: int, *, recorded: bool = False) -> int:
    """Return the clock tried next, in MHz, where 900 saves most and so many vague windows say that it just holds."""
    precise = [(mhz, seen(15.6 / mhz, mhz / 1300, energy=0.01, p99=0.03)) for mhz in (1300, 1200, 1100, 1000)]
    beyond = seen(0.03, 0.5, energy=0.01, p99=0.03)
    known = [*precise, (400, beyond), *[(900, seen(0.0155, 0.55, energy=0.01, p99=0.15))] * looks]
    if recorded:
        known = [(mhz, replace(each, intervals={})) for mhz, each in known]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        point = make_optimizer("bayes", Options()).suggest(study(*known, slo="p99<=20ms"))
    return int(point["gpu_max_hz"]) // 10**6


@pytest.mark.parametrize("looks", [1, 2])
def test_a_point_that_may_be_the_answer_is_looked_at_until_that_is_known(looks: int) -> None:
    """No other trial tells as much."""
    assert promising(looks) == 900


@pytest.mark.parametrize(("looks", "recorded"), [(3, False), (1, True)])
def test_a_point_is_not_looked_at_for_ever(looks: int, recorded: bool) -> None:
    """Three windows are all that one point is given; of what is on record a second look shows the same."""
    assert promising(looks, recorded=recorded) in (500, 600, 700, 800)


def test_the_longest_window_speaks_for_the_point_that_is_the_answer() -> None:
    """Of three windows at one point, one of which was lucky."""
    short, long = seen(0.01, 0.5, energy=0.05, p99=0.05), seen(0.01, 0.55, energy=0.01, p99=0.01)
    long = replace(long, latency=replace(long.latency, queries=4000))
    known = study((1300, seen(0.008, 1.0, energy=0.01, p99=0.01)), (900, short), (900, long), (900, short))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = ConstrainedBayes(Options()).answer(known)
    assert chosen is not None
    assert chosen.number == 2


@pytest.mark.parametrize(
    ("saved", "limit_ms", "answer"),
    [(0.01, 13.4, 1300), (0.4, 13.4, 900), (0.01, 30, 900)],
    ids=["saving in doubt", "saving known", "as sure to hold"],
)
def test_the_default_is_the_answer_where_another_saves_nothing_for_sure_and_holds_less_surely(
    saved: float, limit_ms: float, answer: int
) -> None:
    """A setting that may save nothing is not worth a limit that may break."""
    default, other = seen(0.010, 1.0, energy=0.05, p99=0.05), seen(0.0105, 1.0 - saved, energy=0.05, p99=0.05)
    known = study((1300, default), (900, other), slo=f"p99<={limit_ms}ms")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = ConstrainedBayes(Options()).answer(known)
    assert chosen is not None
    assert chosen.point["gpu_max_hz"] == answer * 10**6
