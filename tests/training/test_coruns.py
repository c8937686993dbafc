"""Making co-runs: which ones, on a simulated board and for real, and what is said of them."""

import json
import threading
import time

import pytest

from polythrottle.catalog import load_board, load_model
from polythrottle.domain.errors import InvalidInput, TrialError
from polythrottle.domain.measurement import Query
from polythrottle.domain.space import Knob, OperatingPoint, SearchSpace
from polythrottle.training.beside.corun_bench import (
    UNCOUNTED,
    CoRunProfile,
    MeasuredBench,
    PredictionError,
    Work,
    profile,
)
from polythrottle.training.beside.interference import most_informative
from polythrottle.training.beside.operating_options import FinetuningJob
from polythrottle.training.beside.simulated_host import SHARES, SimulatedBench


def bench(noise: float = 0.03, seed: int = 0) -> SimulatedBench:
    """Return a simulated TX2 that serves B4."""
    model = load_model("efficientnet-b4")
    return SimulatedBench(load_board("jetson-tx2"), model, FinetuningJob(640, 8, 1, 100, model.name), noise, seed)


class Served:
    """A workload that answers after some milliseconds, longer while a trainer works."""

    def __init__(self, batches: tuple[int, ...] = (1, 2)) -> None:
        self.uri = "served"
        self.space = SearchSpace.grid([Knob("batch_size", batches)], {"batch_size": batches[0]})
        self.batch, self.training = batches[0], threading.Event()

    def apply(self, point: OperatingPoint) -> None:
        """Take a batch size."""
        self.batch = int(point["batch_size"])

    def query(self) -> Query:
        """Answer at once, and say how long it would have taken."""
        time.sleep(1e-4)
        return Query(self.batch * (0.02 if self.training.is_set() else 0.01), self.batch)

    def close(self) -> None:
        """Release nothing."""

    def train(self, samples: int) -> float:
        """Work on some samples."""
        self.training.set()
        time.sleep(1e-3 * samples)
        self.training.clear()
        return 1e-3 * samples


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make windows short, and patience too."""
    for name, value in (("_QUERIES", 20), ("_LEAST_S", 0.02), ("_SOON_S", 0.3)):
        monkeypatch.setattr(f"polythrottle.training.beside.corun_bench.{name}", value)


@pytest.mark.slow
def test_a_profile_says_what_it_is_made_of_and_that_it_is_simulated() -> None:
    """The document is JSON, carries the word, and names both predictors; the table fits in 80 columns."""
    told = profile(bench(), held_out=8, requests=5)
    document = json.loads(json.dumps(told.document()))
    assert document["simulated"] is True
    assert "simulated" in document["title"]
    assert [(each["predictor"], each["requests"]) for each in document["errors"]] == [
        ("paper", 0),
        ("polythrottle", 0),
        ("polythrottle", 5),
    ]
    widths = [max(len(cell) for cell in column) for column in zip(*told.rows(), strict=True)]
    assert sum(widths) + 3 * len(widths) + 1 <= 80


@pytest.mark.slow
def test_the_same_seed_makes_the_same_profile() -> None:
    """Cases, noise and choice follow from the seed."""
    first, again, other = (profile(bench(seed=seed), held_out=4, seed=seed) for seed in (1, 1, 2))
    assert first.document() == again.document()
    assert first.document() != other.document()


def test_cases_are_what_the_board_takes() -> None:
    """Every clock of a case is a level of its knob, and every share occurs, alone included."""
    board, cases = load_board("jetson-tx2"), bench().cases
    assert {case.share for case in cases} == set(SHARES)
    for case in cases:
        assert case.gpu_hz in board.knob("gpu_max_hz").levels
        assert case.memory_hz in board.knob("mem_hz").levels
        assert (case.step_operations == 0) == (case.share == 0)


def test_without_noise_a_window_shows_the_truth() -> None:
    """Mean and tail of a silent window are the latency itself, which grows with the share."""
    silent = bench(noise=0.0)
    for case in silent.cases[:5]:
        told = silent.measure(case)
        assert told.latency_s == pytest.approx(silent.truth_s(case))
        assert told.tail_s == pytest.approx(silent.truth_s(case))


@pytest.mark.slow
def test_the_first_cases_differ_in_batch_share_and_clocks() -> None:
    """What tells most is never the same case again, and covers alone, beside, small and large batches."""
    device = bench()
    runs = []
    for _ in range(8):
        runs.append(device.measure(device.cases[most_informative(device.cases, runs)]))
    assert len({case.unmeasured for case in runs}) == 8
    assert len({case.share for case in runs}) >= 3
    assert len({case.batch for case in runs}) >= 3
    assert len({case.gpu_hz for case in runs}) >= 3


@pytest.mark.parametrize(
    ("fitted", "held_out", "requests", "told"),
    [(7, 8, 0, "co-runs"), (8, 3, 0, "co-runs"), (8, 8, -1, "--requests is 0 or more"), (8, 1000, 0, "co-runs")],
)
def test_too_few_or_too_many_co_runs_are_refused(fitted: int, held_out: int, requests: int, told: str) -> None:
    """Fewer than a fit or a judgement needs, or more than there are, is one clear line."""
    with pytest.raises(InvalidInput, match=told):
        profile(bench(), fitted, held_out, requests)


def test_a_case_of_another_bench_is_refused() -> None:
    """A bench measures its own cases only."""
    with pytest.raises(InvalidInput, match="its own cases"):
        bench(seed=1).measure(bench(seed=2).cases[0])


def test_noise_that_is_no_fraction_is_refused() -> None:
    """A simulation needs noise below 1 and a seed of at least 0."""
    with pytest.raises(InvalidInput, match="noise"):
        bench(noise=1.5)


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_real_co_runs_are_slower_beside_a_trainer_and_batches_count() -> None:
    """Queries that meet a working trainer take longer, and a fit of them does without operations and says so."""
    served = Served()
    told = profile(MeasuredBench("here", served, served.train, (1, 4)), held_out=8, requests=4)
    assert not told.simulated
    assert told.remarks == (UNCOUNTED,)
    assert [each.predictor for each in told.errors] == ["polythrottle", "polythrottle"]
    everything = told.runs + told.held_out
    alone, beside = ([each for each in everything if bool(each.share) is shared] for shared in (False, True))
    assert [each.latency_s / each.batch for each in alone] == pytest.approx([0.01] * len(alone))
    assert max(each.latency_s / each.batch for each in beside) > 0.0105


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_counted_work_lets_the_papers_model_be_fitted() -> None:
    """With operations of item and sample both predictors are judged."""
    served = Served()
    work = Work(1e9, 1e8)
    told = profile(MeasuredBench("here", served, served.train, (1, 4), work, work), held_out=4)
    assert [each.predictor for each in told.errors] == ["paper", "polythrottle"]
    assert told.runs[0].intensity == pytest.approx(20.0)


@pytest.mark.usefixtures("short")
def test_a_trainer_that_fails_or_hangs_ends_the_co_run() -> None:
    """Its own error comes through; one that does not answer is named within its time."""
    served, free = Served(), threading.Event()

    def failing(samples: int) -> float:
        raise TrialError("the trainer has died")

    def hanging(samples: int) -> float:
        free.wait(30)
        return 1.0

    for train, words in ((failing, "has died"), (hanging, "has not done a slice of 4 samples")):
        bad = MeasuredBench("here", served, train, (4,))
        with pytest.raises(TrialError, match=words):
            bad.measure(bad.cases[-1])
    free.set()


@pytest.mark.usefixtures("short")
def test_too_few_cases_of_a_real_workload_are_said() -> None:
    """One batch and one slice make five cases, which is not enough."""
    served = Served((1,))
    with pytest.raises(InvalidInput, match="there are 5 different ones"):
        profile(MeasuredBench("here", served, served.train, (1,)), held_out=4)


def test_a_profile_is_a_table_for_people_and_a_document_for_programs() -> None:
    """Errors in percent, the tail's where there was one; counted work grows with the items, and none has none."""
    errors = (PredictionError("ours", 8, 0.0512, 0.1, 0.96), PredictionError("paper", 0, 0.25, None, 0.5))
    found = CoRunProfile("a board", True, (), (), errors, None, ("few",))  # type: ignore[arg-type]
    head, *rows = found.rows()
    assert head[0] == "predictor"
    assert rows == [("ours", "8", "5.1%", "10.0%", "96%"), ("paper", "0", "25.0%", "not known", "50%")]
    document = found.document()
    assert (document["title"], document["simulated"], document["co_runs"]) == ("a board", True, 0)
    assert document["errors"][1] == {"predictor": "paper", "requests": 0, "mean": 0.25, "tail": None, "within": 0.5}
    assert document["remarks"] == ["few"]
    assert Work(2e9, 1e9).of(3)[:2] == (6e9, 3e9)
    assert Work(2e9, 1e9, element_bytes=2).of(3)[2] != Work(2e9, 1e9).of(3)[2]
    assert Work(None, 1e9).of(3) == (None, None, None)
    assert Work(2e9, None).of(3) == (None, None, None)
    assert Work(None, None).of(0) == (0.0, 0.0, 0.0)
