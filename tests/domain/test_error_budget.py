"""An error budget is a hard bound: simulated, on a served model, when interrupted, and in every request's order."""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from builders import FakeDevice, Listed
from fake_servers import Handler, doubling, kserve, listening

from polythrottle.cli.commands import run
from polythrottle.domain.arrivals import Arrivals
from polythrottle.domain.clock import SystemClock
from polythrottle.domain.error_budget import NOTHING_SPENT, ErrorBudget, LateRequests
from polythrottle.domain.errors import InvalidInput, TrialError
from polythrottle.domain.measurement import Query, Window
from polythrottle.domain.problem import Constraint, Problem
from polythrottle.domain.space import Knob, OperatingPoint, SearchSpace
from polythrottle.domain.study import Study, Trial, TrialState
from polythrottle.metering.error_budget_guard import RequestWatch
from polythrottle.metering.load import drive
from polythrottle.storage.journal import Journal, ending, late_requests
from polythrottle.tuning.stopping import Budget, Rule
from polythrottle.tuning.tuner import ERRORS_USED, tune, watch_of
from polythrottle.workloads import open_workload

LIMIT = Constraint.parse("p99<=20ms")
NEVER = Rule(early=False)


def beyond(latencies_s: list[float]) -> float:
    """Return how many of some requests were late beyond the hundredth that a p99 allows."""
    return max(0.0, sum(each > LIMIT.limit for each in latencies_s) - 0.01 * len(latencies_s))


class Chancy:
    """A workload that is late with a probability of its point's own; keeps what each trial's requests took."""

    uri = "model"

    def __init__(self, device: FakeDevice, seed: int, raises: BaseException | None = None, after: int = -1) -> None:
        self.device = device
        self.random = random.Random(seed)
        self.chances = {level: self.random.choice((0.0, 0.0, 0.02, 0.1, 0.5, 1.0)) for level in range(1, 9)}
        self.trials: list[list[float]] = []
        self.raises = raises
        self.left = after
        self.level = 1

    @property
    def space(self) -> SearchSpace:
        """Return eight levels of something."""
        return SearchSpace.grid((Knob("level", tuple(range(1, 9))),), {"level": 1})

    def apply(self, point: OperatingPoint) -> None:
        """Begin a trial."""
        self.level = int(point["level"])
        self.trials.append([])

    def query(self) -> Query:
        """Take 10 ms, or 30."""
        late = self.random.random() < self.chances[self.level]
        latency_s = 0.03 if late else 0.01
        self.trials[-1].append(latency_s)
        if self.left == 0 and self.raises is not None:
            raise self.raises
        self.left -= 1
        self.device.clock.sleep(latency_s)
        return Query(latency_s)

    def close(self) -> None:
        """Do nothing."""


def search(path: Path, workload: Chancy, device: FakeDevice, most_late: float, arrivals: str = "closed") -> Study:
    """Search, or go on searching, all points with an error budget; return the study."""
    problem = Problem(
        device.space * workload.space,
        (LIMIT,),
        device.uri,
        workload.uri,
        window=Window(40, 0.0, 40),
        arrivals=Arrivals.parse(arrivals),
    )
    with (
        Journal.reopen(path) if path.exists() else Journal.create(path, Study(problem, "listed"), {}) as kept,
        contextlib.closing(tune(device, workload, Listed(), kept, Budget(24), NEVER, most_late)) as loop,
    ):
        for _ in loop:
            pass
        return kept.study


# --- what is asked for -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "requests"), [("0.1%", 24.12), (" 200 ", 200.0), ("2.5 %", 603.0), ("5min", 9000.0), (".5%", 120.6)]
)
def test_a_budget_is_a_share_a_number_or_a_time(text: str, requests: float) -> None:
    """A share is of what the trials may send at most, a time of what comes in it."""
    problem = Problem(FakeDevice().space, (LIMIT,), arrivals=Arrivals.parse("poisson:30/s"))
    assert ErrorBudget.parse(text).requests(problem, 24) == pytest.approx(requests)


@pytest.mark.parametrize("text", ["", "0", "0%", "101%", "-3", "1e9", "nan", "many", "5 parsecs", "0min", "%"])
def test_what_is_no_budget_is_said(text: str) -> None:
    """Every other text gets one line with examples."""
    with pytest.raises(InvalidInput, match=r"write for example 0\.1%, 200 \(requests\) or 5min"):
        ErrorBudget.parse(text)


@pytest.mark.parametrize(
    ("slo", "budget", "why"),
    [
        (("mean<=9ms",), "9", "give an SLO on a percentile"),
        (("p99<=1.2x",), "9", "write the limit in ms"),
        (("itl_p99<=9ms",), "9", "give an SLO on a percentile"),
        (("p99<=9ms",), "9min", "add --arrivals"),
    ],
)
def test_limits_must_say_of_a_request_whether_it_is_late(slo: tuple[str, ...], budget: str, why: str) -> None:
    """A mean, a multiple and a time of a closed loop say it of none."""
    problem = Problem(FakeDevice().space, tuple(map(Constraint.parse, slo)))
    with pytest.raises(InvalidInput, match=why):
        ErrorBudget.parse(budget).requests(problem, 24)


# --- the bound -------------------------------------------------------------------------------------------------------


def test_no_order_of_answers_overdraws() -> None:
    """Whatever is late, in whatever order answers come and whoever never answers: a trial keeps to its allowance."""
    for seed in range(400):
        draw = random.Random(seed)
        spent = LateRequests.of_trial(100, {"p99": draw.randrange(12)})
        most = draw.choice((11.0, 12.5, 30.0, 200.0))
        watch = RequestWatch((LIMIT,), spent, most, least=draw.choice((0, 8)))
        late, flying, sent = 0, 0, 0
        chance = draw.choice((0.0, 0.01, 0.1, 1.0))
        for _ in range(600):
            if draw.random() < 0.5 and flying:
                slow = draw.random() < chance
                watch.landed(Query(0.03 if slow else 0.01))
                late, flying = late + slow, flying - 1
            elif watch.permits(count := draw.choice((1, 1, 4))):
                sent, flying = sent + count, flying + count
            assert late + flying - 0.01 * sent <= watch.allowance + 1e-6
        assert watch.spent.late["p99"] == late + flying
        assert (spent + watch.spent).most_beyond() <= most + 1e-6


@pytest.mark.parametrize("arrivals", ["closed", "poisson:40/s"])
def test_a_search_never_overdraws(tmp_path: Path, arrivals: str) -> None:
    """Over many simulated searches no sum of what each trial's requests took is beyond the budget, and it is used."""
    used = 0.0
    for seed in range(8):
        device = FakeDevice()
        workload = Chancy(device, seed)
        workload.chances[1] = 0.0
        most = random.Random(seed).choice((1.5, 6.0, 40.0))
        path = tmp_path / f"{seed}.jsonl"
        with contextlib.suppress(TrialError):
            search(path, workload, device, most, arrivals)
        spent = late_requests(path)
        assert spent.sent == sum(map(len, workload.trials))
        assert spent.most_beyond() <= most + 1e-6
        if arrivals == "closed":
            assert spent.most_beyond() == pytest.approx(sum(map(beyond, workload.trials)))
        used += spent.most_beyond() / most
    assert used > 2


def test_a_plainly_late_point_costs_a_few_requests(tmp_path: Path) -> None:
    """Of a point that is always late eight requests are sent, and it counts as measured and infeasible."""
    device = FakeDevice()
    workload = Chancy(device, 0)
    workload.chances = dict.fromkeys(range(1, 9), 0.0) | {2: 1.0}
    study = search(tmp_path / "a.jsonl", workload, device, 60.0)
    bad = [trial for trial in study.trials if trial.point["level"] == 2]
    assert [trial.state for trial in bad] == [TrialState.COMPLETED] * 3
    assert not any(study.feasible(trial) for trial in bad)
    assert {len(each) for each in workload.trials if max(each) > 0.02} == {8}
    assert len(study.trials) == 24


def test_a_used_budget_ends_the_search_with_its_answer(tmp_path: Path) -> None:
    """The journal says that it was the error budget, and the best point so far is the answer."""
    device = FakeDevice()
    workload = Chancy(device, 0)
    workload.chances = dict.fromkeys(range(2, 9), 1.0) | {1: 0.0}
    study = search(tmp_path / "a.jsonl", workload, device, 12.0)
    assert (ending(tmp_path / "a.jsonl") or "").startswith(ERRORS_USED)
    assert study.best is not None
    assert len(study.trials) < 24


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()])
def test_an_interrupted_trial_counts_what_it_sent(tmp_path: Path, error: BaseException) -> None:
    """Ctrl-C in the middle of a trial: its requests are in the account, the one under way as late, and it goes on."""
    path = tmp_path / "a.jsonl"
    device = FakeDevice()
    workload = Chancy(device, 1, error, 20)
    workload.chances = dict.fromkeys(range(1, 9), 0.0)
    with pytest.raises(type(error)):
        search(path, workload, device, 30.0)
    assert late_requests(path) == LateRequests.of_trial(21, {"p99": 1})
    workload.raises = None
    assert len(search(path, workload, device, 30.0).trials) == 24
    assert late_requests(path).forfeited == 0


def test_a_killed_trial_forfeits_what_it_might_have_spent(tmp_path: Path) -> None:
    """Where nobody saw a trial's end all that it was allowed counts as spent, however often the journal is reopened."""
    path = tmp_path / "a.jsonl"
    device = FakeDevice()
    workload = Chancy(device, 1)
    workload.chances = dict.fromkeys(range(1, 9), 0.0)
    search(path, workload, device, 30.0)
    lines = path.read_text().splitlines(keepends=True)
    place = next(number for number, line in enumerate(lines) if json.loads(line).get("number") == 3)
    path.write_text("".join(lines[: place + 1]))
    reserved = json.loads(lines[place])["reserved"]
    assert reserved == pytest.approx(10.0)
    for _ in range(2):
        with Journal.reopen(path) as kept:
            assert kept.spent.forfeited == reserved
        assert late_requests(path).forfeited == reserved
    search(path, workload, device, 30.0)
    assert late_requests(path).most_beyond() == reserved


def test_a_watch_elsewhere_decides_as_one_here(tmp_path: Path) -> None:
    """Its order and what it has seen travel as JSON; until its end is heard all that it may spend is spent."""
    for seed in range(50):
        draw = random.Random(seed)
        spent = LateRequests.of_trial(100, {"p99": draw.randrange(9)})
        here, asked = (RequestWatch((LIMIT,), spent, 30.0, under_way=2, least=8) for _ in range(2))
        there = RequestWatch.there(json.loads(json.dumps(asked.order())))
        assert asked.spent == LateRequests(forfeited=asked.allowance)
        for _ in range(200):
            assert there.permits(1) == here.permits(1)
            if here.cut:
                break
            latency_s = draw.choice((0.01, 0.01, 0.03))
            there.landed(Query(latency_s))
            here.landed(Query(latency_s))
        asked.hear(json.loads(json.dumps(there.state)), ended=False)
        assert asked.spent.forfeited == asked.allowance
        asked.hear(there.state, ended=True)
        assert (asked.spent, asked.cut, asked.broken) == (here.spent, here.cut, here.broken)


def test_a_trial_whose_end_is_not_heard_forfeits_what_was_reserved(tmp_path: Path) -> None:
    """As of one that was killed: in the account of the search that goes on, and of who reads its journal."""
    problem = Problem(SearchSpace.grid((Knob("level", (1, 2)),), {"level": 1}), (LIMIT,), "device", "model")
    with Journal.create(tmp_path / "a.jsonl", Study(problem, "listed"), {}) as kept:
        trial = Trial(0, problem.space.default)
        kept.started(trial, 10.0)
        kept.failed(replace(trial, failure="the connection was lost"), LateRequests(forfeited=10.0))
        assert kept.spent.forfeited == 10.0
    with Journal.reopen(tmp_path / "a.jsonl") as kept:
        assert kept.spent == LateRequests(forfeited=10.0)


# --- requests that are under way together ----------------------------------------------------------------------------


class Slow:
    """A workload of many queries at once; counts those it was sent."""

    uri, concurrency = "model", 4

    def __init__(self, latency_s: float) -> None:
        self.latency_s = latency_s
        self.sent = 0

    @property
    def space(self) -> SearchSpace:
        """Return nothing to set."""
        return SearchSpace.grid((), {})

    def apply(self, point: OperatingPoint) -> None:
        """Do nothing."""

    def query(self) -> Query:
        """Is not called."""
        raise NotImplementedError

    async def send(self) -> Query:
        """Take some time."""
        self.sent += 1
        await asyncio.sleep(self.latency_s)
        return Query(self.latency_s)

    async def hang_up(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize("arrivals", ["closed", "uniform:400/s"])
def test_what_is_under_way_is_waited_for(arrivals: str) -> None:
    """A load that is closed early leaves nothing of which nobody knows: all that was in time counts as such."""
    workload = Slow(0.005)
    watch = RequestWatch((Constraint.parse("p99<=20s"),), LateRequests(), 90.0)
    with drive(workload, Arrivals.parse(arrivals), SystemClock(), 0, gate=watch) as load:
        for _ in range(10):
            next(load)
    assert watch.spent == LateRequests.of_trial(workload.sent, {"p99": 0})
    assert workload.sent >= 10


@pytest.mark.parametrize("arrivals", ["closed", "uniform:400/s"])
def test_nothing_is_sent_beyond_what_could_be_late(arrivals: str) -> None:
    """Of requests that are never answered in time no more are sent than the allowance covers."""
    workload = Slow(0.06)
    watch = RequestWatch((LIMIT,), LateRequests(), 7.0)
    with drive(workload, Arrivals.parse(arrivals), SystemClock(), 0, gate=watch) as load:
        assert len(list(load)) <= 7
    assert workload.sent == watch.spent.sent <= 7
    assert watch.cut


@pytest.fixture
def served() -> Iterator[tuple[str, list[float]]]:
    """Yield where a model is served whose inference takes 60 ms from the 120th request on, and what each one took."""
    server = kserve([{"name": "x", "datatype": "FP32", "shape": [-1, 4]}])
    took: list[float] = []

    def infer(handler: Handler, body: bytes) -> None:
        begun_s = time.monotonic()
        took.append(0.0)
        place = len(took) - 1
        if place >= 120:
            time.sleep(0.06)
        doubling(handler, body)
        took[place] = time.monotonic() - begun_s

    server.answers["POST", "/v2/models/m/infer"] = infer
    with listening(server):
        yield server.where, took


def test_a_served_model_is_never_overdrawn(tmp_path: Path, served: tuple[str, list[float]]) -> None:
    """As the server itself counts it, a search whose every later point is late keeps to the budget, and ends."""
    where, took = served
    workload = open_workload(f"kserve://{where}/m?concurrency=4", batch_sizes=(1, 2, 4))
    device = FakeDevice()
    device.clock = SystemClock()  # type: ignore[assignment]
    limit = Constraint.parse("p99<=40ms")
    problem = Problem(
        device.space * workload.space, (limit,), device.uri, workload.uri, window=Window(100, 0.0, 100, warmup=4)
    )
    path = tmp_path / "a.jsonl"
    with (
        contextlib.closing(workload),
        Journal.create(path, Study(problem, "listed"), {}) as kept,
        contextlib.suppress(TrialError),  # on a machine that stands still the first window may be cut already
    ):
        for _ in tune(device, workload, Listed(), kept, Budget(9), NEVER, 20.0):
            pass
    spent = late_requests(path)
    assert spent.most_beyond() <= 20.0 + 1e-6
    assert sum(each > 0.04 for each in took[120:]) <= spent.late["p99"] <= 20 + 0.01 * spent.sent + 1e-6
    assert len(took) <= spent.sent
    assert "error budget" in (ending(path) or "")


# --- the command -----------------------------------------------------------------------------------------------------

BOARD = ("tune", "--device", "sim:jetson-agx-orin", "--workload", "resnet50", "--no-history", "--yes")


def test_what_one_trial_may_spend_is_as_written() -> None:
    """A third of what is left, but no less than the page on searching says, and no more than all of it."""
    page = " ".join((Path(__file__).parents[2] / "docs" / "search.md").read_text().split())
    assert "the requests that are under way at once and 8 more, 5 of which are its warm-up" in page
    device, problem = FakeDevice(), Problem(FakeDevice().space, (LIMIT,))
    chancy = Chancy(device, 1)
    point = problem.space.default
    allowed = [watch_of(problem, chancy, point, left, NOTHING_SPENT).allowance for left in (60.0, 12.0, 5.0)]
    assert allowed == [20.0, 1 + 8, 5.0]


@pytest.mark.slow
def test_the_command_tells_what_was_spent(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """JSON, printed lines, report and a journal that is resumed all have the account."""
    journal = tmp_path / "a.jsonl"
    words = [*BOARD, "--slo", "p99<=20ms", "--method", "random", "--trials", "3", "--journal", str(journal)]
    assert run([*words, "--error-budget", "40", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    account = document["error_budget"]
    assert account["requests"] == 40
    assert 0 <= account["beyond"]["p99"] <= 40
    assert account["left"] == pytest.approx(40 - account["beyond"]["p99"])
    assert account["sent"] == late_requests(journal).sent > 200
    assert document["presets"] == []
    assert "error budget" in Path(document["report"]).read_text()
    assert run(["tune", "--resume", str(journal), "--trials", "6"]) == 0
    assert "at most 40 requests late beyond the SLO's own share" in " ".join(capsys.readouterr().out.split())
    assert late_requests(journal).sent > account["sent"]
    assert run([*words, "--error-budget", "50"]) == 4
    assert "its error budget is 40, not 50" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--slo", "p99<=9ms", "--error-budget", "0.5"), "too small to begin"),
        (("--slo", "p99<=1.2x", "--error-budget", "9"), "write the limit in ms"),
        (("--error-budget", "9"), "give an SLO on a percentile"),
        (("--slo", "p99<=9ms", "--error-budget", "lots"), "is not an error budget"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    """Exit code 2 and one line, before anything runs."""
    journal = tmp_path / "a.jsonl"
    assert run([*BOARD, *words, "--journal", str(journal)]) == 2
    assert why in capsys.readouterr().err
    assert not journal.exists()
