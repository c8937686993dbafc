import contextlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from builders import FakeDevice, FakeWorkload, Listed

from polythrottle.domain.error_budget import NOTHING_SPENT
from polythrottle.domain.errors import KnobAbsent, TrialError
from polythrottle.domain.measurement import Query, Reading
from polythrottle.domain.ports import Optimizer
from polythrottle.domain.problem import Constraint, Problem
from polythrottle.domain.space import OperatingPoint
from polythrottle.domain.study import Study, TrialState
from polythrottle.optimize import ConstrainedBayes, Options, make_optimizer
from polythrottle.storage.journal import Journal, ending, is_finished, read
from polythrottle.tuning.remarks import meanwhile
from polythrottle.tuning.stopping import Budget, Rule
from polythrottle.tuning.tuner import FAILURES_IN_A_ROW, compare, tune, watch_of

NEVER, LISTED = Rule(early=False), Listed()


def journal(path: Path, device: FakeDevice, workload: FakeWorkload) -> Journal:
    """Start or continue the journal of a study of a test device."""
    if path.exists():
        return Journal.reopen(path)
    problem = Problem(device.space * workload.space, (Constraint("mean", 2.5, True),), device.uri, workload.uri)
    return Journal.create(path, Study(problem, "listed"), {})


def run(
    path: Path,
    device: FakeDevice,
    workload: FakeWorkload,
    trials: int | Budget,
    rule: Rule = NEVER,
    optimizer: Optimizer = LISTED,
) -> list[Study]:
    """Tune and return every study that was shown on the way."""
    budget = trials if isinstance(trials, Budget) else Budget(trials)
    with (
        journal(path, device, workload) as kept,
        contextlib.closing(tune(device, workload, optimizer, kept, budget, rule)) as loop,
    ):
        return list(loop)


class CountedDevice(FakeDevice):
    """Counts how often the loop itself reads it, and not the meter."""

    outside = 0

    def read(self) -> Reading:
        """Read as any other does."""
        self.outside += sys._getframe(1).f_globals["__name__"] == tune.__module__
        return super().read()


def test_a_trial_is_journalled_before_the_device_is_touched(tmp_path: Path) -> None:
    """Whoever looks sees the trial running first, and done after."""
    device = FakeDevice()
    seen = run(tmp_path / "a.jsonl", device, FakeWorkload(device), 3)
    assert [study.trials[-1].state for study in seen] == [TrialState.RUNNING, TrialState.COMPLETED] * 3
    assert device.log[0] == "enter"
    assert device.log[-1] == "restore"


def test_an_exhausted_space_ends_the_study(tmp_path: Path) -> None:
    """Twelve points give twelve trials, however many were asked for."""
    device = FakeDevice()
    study = run(tmp_path / "a.jsonl", device, FakeWorkload(device), 99)[-1]
    assert len(study.trials) == 12
    assert is_finished(tmp_path / "a.jsonl")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), TrialError("no")])
def test_the_device_is_restored_however_the_loop_ends(tmp_path: Path, error: BaseException) -> None:
    """Interrupts, crashes and failures all give the device back."""
    device = FakeDevice()
    with pytest.raises(type(error)):
        run(tmp_path / "a.jsonl", device, FakeWorkload(device, error), 30)
    assert device.log[-1] == "restore"


def test_a_study_left_early_goes_on(tmp_path: Path) -> None:
    """A loop that is abandoned restores the device, and its study ends like one that was not abandoned."""
    device, path, other = FakeDevice(), tmp_path / "a.jsonl", FakeDevice()
    with journal(path, device, FakeWorkload(device)) as kept:
        loop = tune(device, FakeWorkload(device), Listed(), kept, Budget(6), Rule())
        for _ in range(5):
            next(loop)
        loop.close()
    assert device.log[-1] == "restore"
    resumed = run(path, device, FakeWorkload(device), 6)[-1]
    whole = run(tmp_path / "b.jsonl", other, FakeWorkload(other), 6)[-1]
    assert [trial.point for trial in resumed.trials] == [trial.point for trial in whole.trials]


def test_a_default_that_cannot_be_measured_ends_the_study(tmp_path: Path) -> None:
    """Nothing to compare with: the reason is said at once."""
    device = FakeDevice()
    with pytest.raises(TrialError, match=r"default point cannot be measured: exit code 3"):
        run(tmp_path / "a.jsonl", device, FakeWorkload(device, TrialError("exit code 3")), 30)
    assert read(tmp_path / "a.jsonl").trials[0].failure == "exit code 3"


def test_failures_are_trials_until_there_are_too_many(tmp_path: Path) -> None:
    """One failure is a result; five in a row are a fault."""
    device = FakeDevice()
    first = 5 + 200  # warm-up and window of the default point
    with pytest.raises(TrialError, match=f"{FAILURES_IN_A_ROW} trials in a row failed"):
        run(tmp_path / "a.jsonl", device, FakeWorkload(device, TrialError("out of memory"), after=first), 30)
    trials = read(tmp_path / "a.jsonl").trials
    assert [trial.state for trial in trials] == [TrialState.COMPLETED] + [TrialState.FAILED] * FAILURES_IN_A_ROW


def test_a_trial_costs_from_where_the_one_before_ended(tmp_path: Path) -> None:
    """The device is read once between two trials, over SSH a round trip, and no time between them is left out."""
    looks = {}
    for trials in (2, 3):
        device = CountedDevice()
        study = run(tmp_path / f"{trials}.jsonl", device, FakeWorkload(device), trials)[-1]
        assert study.cost.duration_s == pytest.approx(device.clock.now())
        looks[trials] = device.outside
    assert looks[3] - looks[2] == 1


def test_a_rest_between_two_trials_is_no_cost_of_the_next(tmp_path: Path) -> None:
    """Whoever goes through the trials may wait, as for a quiet hour: neither its time nor its joules count."""
    costs = []
    for rest_s in (0.0, 3600.0):
        device, path = FakeDevice(), tmp_path / f"{rest_s:g}.jsonl"
        served = FakeWorkload(device)
        problem = Problem(device.space * served.space, (Constraint.parse("mean<=1.2x"),), device.uri, served.uri)
        with Journal.create(path, Study(problem), {}) as kept:
            for study in tune(device, served, Listed(), kept, Budget(3), Rule(early=False)):
                if study.trials[-1].state is TrialState.COMPLETED:
                    device.clock.sleep(rest_s)
        costs.append(study.cost)
    # Windows end at the next answer, so that two runs differ by one of them; the rests are two hours.
    assert costs[1].duration_s == pytest.approx(costs[0].duration_s, rel=0.01)
    assert costs[1].energy_j == pytest.approx(costs[0].energy_j, rel=0.01)


def test_presets_are_measured_once_for_comparison(tmp_path: Path) -> None:
    """They are no trials, and a resumed study does not measure them again."""
    device, path = FakeDevice(), tmp_path / "a.jsonl"
    run(path, device, FakeWorkload(device), 2)
    for expected in (1, 0):
        with journal(path, device, FakeWorkload(device)) as kept:
            assert len(list(compare(device, FakeWorkload(device), kept, Budget(2), pytest.fail))) == expected
    study = read(path)
    assert [reference.name for reference in study.references] == ["low"]
    assert len(study.trials) == 2


def test_presets_are_measured_while_nothing_of_the_budget_is_used(tmp_path: Path) -> None:
    """Joules and time are those of search and presets, of a study that is resumed too; which are left out is told."""
    points = {name: OperatingPoint({"gpu_max_hz": 400_000_000}) for name in ("low", "lower", "lowest")}
    search = run(tmp_path / "alone.jsonl", (alone := FakeDevice()), FakeWorkload(alone), 2)[-1].cost
    for budget in (Budget(2, energy_j=search.energy_j + 1.0), Budget(2, duration_s=search.duration_s + 0.1)):
        device, path = FakeDevice(), tmp_path / f"{budget}.jsonl"
        told: list[str] = []
        device.presets = points
        run(path, device, FakeWorkload(device), budget)
        before_s = device.clock.now()
        for _ in range(2):
            with journal(path, device, FakeWorkload(device)) as kept:
                list(compare(device, FakeWorkload(device), kept, budget, told.append))
        (preset,) = read(path).references
        assert preset.name == "low"
        assert preset.cost is not None
        assert preset.cost.duration_s == pytest.approx(device.clock.now() - before_s)
        assert read(path).presets_cost == preset.cost
        assert read(path).cost.duration_s == pytest.approx(search.duration_s)
        assert [line.split(": ")[-1] for line in told] == ["lower, lowest"] * 2


def test_a_preset_that_fails_has_used_what_it_took(tmp_path: Path) -> None:
    """Nothing is journalled of it, and the next is not begun for as much again."""
    device, path = FakeDevice(), tmp_path / "a.jsonl"
    told: list[str] = []
    device.presets = {name: OperatingPoint({"gpu_max_hz": 400_000_000}) for name in ("low", "lower")}
    used = run(path, device, FakeWorkload(device), 2)[-1].cost
    budget = Budget(2, duration_s=used.duration_s + 0.1)
    with journal(path, device, FakeWorkload(device)) as kept:
        failing = FakeWorkload(device, TrialError("no"), after=50)
        assert not list(compare(device, failing, kept, budget, told.append))
    assert [line.split(": ")[-1] for line in told] == ["lower"]


def test_what_presets_took_is_not_there_for_more_trials(tmp_path: Path) -> None:
    """A resumed search has what is left of the budget; one that had ended for another reason still says that."""
    device, path = FakeDevice(), tmp_path / "a.jsonl"
    used = run(path, device, FakeWorkload(device), 2)[-1].cost
    budget = Budget(2, energy_j=used.energy_j + 1.0)
    with journal(path, device, FakeWorkload(device)) as kept:
        list(compare(device, FakeWorkload(device), kept, budget, pytest.fail))
    assert not run(path, device, FakeWorkload(device), budget)
    assert ending(path) == "2 trials made"
    assert not run(path, device, FakeWorkload(device), replace(budget, trials=9))
    assert (ending(path) or "").endswith(" J used")


class Resigned(Listed):
    """Goes through the space in order, and expects a fixed sum of joules per item from one more trial."""

    def __init__(self, left_j: float, after: int = 0) -> None:
        self.left_j, self.after = left_j, after
        self.asked: list[int] = []

    def saving_left(self, study: Study) -> float:
        """Return what is expected from some number of trials on; unknown before."""
        self.asked.append(len(study.trials))
        return self.left_j if len(study.trials) >= self.after else float("inf")


def test_what_trials_take_is_kept(tmp_path: Path) -> None:
    """Warm-up counts: 105 queries of 10 ms and 100 of 20 ms cost ten watts throughout; a failed trial costs too."""
    device, path = FakeDevice(power_w=10.0), tmp_path / "a.jsonl"
    study = run(path, device, FakeWorkload(device, TrialError("no"), after=5 + 200 + 5 + 100), 3)[-1]
    costs = [trial.cost for trial in study.trials]
    assert study.trials[-1].failure == "no"
    assert all(cost is not None and cost.energy_j == pytest.approx(10 * cost.duration_s) for cost in costs)
    assert costs[0] is not None
    assert costs[0].duration_s == pytest.approx(2.05)
    assert read(path).trials == study.trials
    assert read(path).cost.duration_s == pytest.approx(device.clock.now())


@pytest.mark.parametrize(
    ("budget", "made", "told"),
    [
        (Budget(99, duration_s=4.0), 2, "4 seconds used"),
        (Budget(99, energy_j=45.0), 3, "45 J used"),
        (Budget(3, 1e6, 1e6), 3, "3 trials made"),
    ],
)
def test_a_budget_ends_the_study(tmp_path: Path, budget: Budget, made: int, told: str) -> None:
    """Whichever is used up first is the reason, and it is looked at between trials."""
    device = FakeDevice(power_w=10.0)
    assert len(run(tmp_path / "a.jsonl", device, FakeWorkload(device), budget)[-1].trials) == made
    assert ending(tmp_path / "a.jsonl") == told


def test_a_resumed_study_counts_what_it_has_used(tmp_path: Path) -> None:
    """The second half of a budget is no second budget."""
    device, path = FakeDevice(), tmp_path / "a.jsonl"
    run(path, device, FakeWorkload(device), 2)
    assert len(run(path, FakeDevice(), FakeWorkload(device), Budget(99, duration_s=4.0))) == 0
    assert len(read(path).trials) == 2


def test_a_study_ends_when_nothing_is_left(tmp_path: Path) -> None:
    """Twice in a row less than a thousandth of the energy per item, and not before six trials."""
    device, resigned = FakeDevice(), Resigned(1e-5, after=7)
    study = run(tmp_path / "a.jsonl", device, FakeWorkload(device), 12, Rule(), resigned)[-1]
    assert len(study.trials) == 8
    assert resigned.asked == [6, 7, 8]
    assert ending(tmp_path / "a.jsonl") == (
        "nothing more to gain: one more trial would save 0.01 % of the energy per item"
    )
    assert device.log[-1] == "restore"


def test_a_study_ends_when_a_trial_costs_more_than_it_saves(tmp_path: Path) -> None:
    """A short horizon is not worth a single trial more; a long one is worth all."""
    for horizon_s, made in ((1.0, 1), (1e9, 12)):
        device, path = FakeDevice(), tmp_path / f"{horizon_s}.jsonl"
        study = run(path, device, FakeWorkload(device), 12, Rule(horizon_s), Resigned(1e-3))[-1]
        assert len(study.trials) == made
    assert "within 1 second" in (ending(tmp_path / "1.0.jsonl") or "")


def test_a_trial_that_plainly_fails_is_cut_short_and_kept(tmp_path: Path) -> None:
    """Eight times the default's latency against a limit of 2.5: censored, infeasible, cheap; the default never is."""
    device, path = FakeDevice(), tmp_path / "a.jsonl"
    study = run(path, device, FakeWorkload(device), 12)[-1]
    early = study.stopped_early
    assert {trial.point["batch_size"] for trial in early} == {4, 8}
    assert set(early) == set(study.infeasible)
    assert all(trial.measurement and trial.measurement.latency.queries == 30 for trial in early)
    assert study.total_excess == pytest.approx(3 * (4 / 2.5 - 1) + 3 * (8 / 2.5 - 1))
    assert read(path).stopped_early == early


def test_the_default_comes_first_where_limits_multiply_it(tmp_path: Path) -> None:
    """Whatever a method suggests, nothing can be judged before."""

    class Last(Listed):
        def suggest(self, study: Study) -> OperatingPoint:
            return study.problem.space[len(study.trials)]

    device = FakeDevice()
    study = run(tmp_path / "a.jsonl", device, FakeWorkload(device), 2, optimizer=Last())[-1]
    assert study.trials[0].point == study.problem.space.default


class Disturbed(FakeWorkload):
    """A workload whose first queries take ten times as long, as when something else runs on the machine."""

    def __init__(self, device: FakeDevice, queries: int) -> None:
        super().__init__(device)
        self.disturbed = queries

    def query(self) -> Query:
        """Take 10 ms per item of virtual time, or 100 ms."""
        self.disturbed -= 1
        factor = 10 if self.disturbed >= 0 else 1
        self.device.clock.sleep(0.01 * factor * self.batch)
        return Query(0.01 * factor * self.batch, self.batch)


@pytest.mark.parametrize("optimizer", [Listed(), ConstrainedBayes()])
def test_a_default_that_others_contradict_is_measured_again(tmp_path: Path, optimizer: Optimizer) -> None:
    """Once, and the newer measurement is what relative limits multiply; the search goes on from there."""
    device, path = FakeDevice(), tmp_path / "a.jsonl"
    served = Disturbed(device, 5 + 100)
    problem = Problem(device.space * served.space, (Constraint.parse("mean<=1.2x"),), device.uri, served.uri)
    with Journal.create(path, Study(problem), {}) as kept:
        list(tune(device, served, optimizer, kept, Budget(6), Rule(early=False)))
    study = read(path)
    defaults = [trial.number for trial in study.trials if trial.point == study.problem.space.default]
    assert len(defaults) == 2
    assert study.default is not None
    assert study.default.number == defaults[1]
    assert study.constraints[0].limit == pytest.approx(0.012)
    assert study.best is not None
    assert study.best.measurement is not None
    assert study.best.measurement.latency.mean_s == pytest.approx(0.01)


def test_a_default_that_nothing_contradicts_is_measured_once(tmp_path: Path) -> None:
    """As fast as the others per item, it is believed."""
    device, path = FakeDevice(), tmp_path / "a.jsonl"
    study = run(path, device, FakeWorkload(device), 6)[-1]
    assert not study.doubtful
    assert sum(trial.point == study.problem.space.default for trial in study.trials) == 1


class Lockless(FakeDevice):
    """A test device whose driver lists clocks and answers that it cannot lock them, as NVML's code 3 does."""

    def apply(self, point: OperatingPoint) -> None:
        """Refuse every clock but the default."""
        if point["gpu_max_hz"] != 1_200_000_000:
            raise KnobAbsent("a test device does not have gpu_max_hz after all", "gpu_max_hz")
        super().apply(point)


@pytest.mark.parametrize("method", ["random", "grid", "bayes", "paper", "gradient", "preset"])
def test_a_knob_that_is_not_there_costs_one_trial(tmp_path: Path, method: str) -> None:
    """Whatever the method, points that would need it are passed over from then on, also once it is resumed."""
    device = Lockless()
    optimizer = make_optimizer(method, Options(presets=tuple(device.presets.values())))
    path, told = tmp_path / "a.jsonl", list[str]()
    for trials in (4, 12):
        for study in run(path, device, FakeWorkload(device), trials, optimizer=optimizer):
            told += meanwhile(study, None)
    failed = [trial for trial in study.trials if trial.state is TrialState.FAILED]
    assert [trial.absent for trial in failed] == ["gpu_max_hz"] * bool(failed)
    assert bool(failed) or method == "preset"
    assert len(study.visited) == 4 + len(failed) or method == "preset"
    if failed:
        assert any("left out from now on" in line for line in told)
        assert read(path).absent == {"gpu_max_hz"}
    if method != "preset":
        assert "that need no gpu_max_hz" in str(ending(path)) or method == "bayes"


def test_a_crowd_at_the_beginning_speaks_against_no_point() -> None:
    """Of 64 requests in flight all may be late at first: only what comes after so many answers tells of the point."""

    class Crowd(FakeWorkload):
        concurrency = 64

        async def send(self) -> Query:
            """Not called."""
            raise AssertionError

        async def hang_up(self) -> None:
            """Not called either."""

    served = Crowd(FakeDevice())
    asked = Problem(served.space, (Constraint.parse("p99<=1ms"),), "sim:test", served.uri)
    alone, crowded = (
        watch_of(asked, each, served.space.default, 1000.0, NOTHING_SPENT).order()
        for each in (FakeWorkload(FakeDevice()), served)
    )
    assert (alone["under_way"], crowded["under_way"]) == (1, 64)
    assert crowded["least"] - alone["least"] == 64 - asked.window.warmup
