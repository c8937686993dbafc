"""Inference and fine-tuning side by side, for real: a queue, a trainer's process, and whatever goes wrong with it."""

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from trainer_jobs import data_folder, exported, job

from polythrottle.backends import open_device
from polythrottle.domain.arrivals import Poisson, Uniform
from polythrottle.domain.errors import InvalidInput, SloUnmet, StorageError, TrialError
from polythrottle.domain.load.energy_ration import DAY_S
from polythrottle.domain.measurement import Query
from polythrottle.domain.space import Knob, OperatingPoint, SearchSpace
from polythrottle.training.beside.live_run import RunProgress, run
from polythrottle.training.beside.preparation import BatchedWorkload
from polythrottle.training.beside.scheduler import Hours, Terms, wall_day_s
from polythrottle.training.beside.serving_loop import Result
from polythrottle.training.beside.trainer.driver import Task, Trainer
from polythrottle.training.beside.trainer.job_folder import read_progress
from polythrottle.workloads import open_workload

_SLO_S = 5.0
"""So long that a busy machine does not break it."""


class Answering:
    """A workload that takes a millisecond, and notes how large batches were and which thread asked."""

    uri = "tests:answering"

    def __init__(self, took_s: float = 1e-3, fails_after: int = 10**9) -> None:
        self.space = SearchSpace.grid([Knob("batch_size", (1, 2, 4))], {"batch_size": 1})
        self.batches: list[int] = []
        self.threads: set[int] = set()
        self._batch, self._took_s, self._fails_after = 1, took_s, fails_after

    def apply(self, point: OperatingPoint) -> None:
        """Take note of the batch size."""
        self._batch = int(point["batch_size"])

    def query(self) -> Query:
        """Sleep."""
        if len(self.batches) >= self._fails_after:
            raise TrialError("the model has fallen over")
        self.batches.append(self._batch)
        self.threads.add(threading.get_ident())
        time.sleep(self._took_s)
        return Query(self._took_s, self._batch)

    def close(self) -> None:
        """Do nothing."""


def _pretending(where: Path, how: str = "well", *at: int, epochs: int = 2, served: str = "") -> Trainer:
    (where / "job").mkdir(exist_ok=True)
    words = [where / "job", 40, 8, epochs, 1e-4, how, *at]
    command = (sys.executable, str(Path(__file__).parents[1] / "pretended_trainer.py"), *map(str, words))
    task = Task("tests:model", str(where), str(where / "job"), batch=8, epochs=epochs, served=served)
    return Trainer(task, start_s=60, command=command)


def _terms(policy: str = "interleave", seconds: float | None = None, rate_per_s: float = 50.0) -> Terms:
    return Terms(_SLO_S, Poisson(rate_per_s), policy, seconds)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["interleave", "greedy"])
def test_a_job_is_done_beside_its_inference(tmp_path: Path, policy: str) -> None:
    """Until the job is done every request is answered, in one thread, and every sample is trained once per epoch."""
    served, told = Answering(), list[RunProgress]()
    found = run(
        open_device("cpu"), BatchedWorkload(served), _pretending(tmp_path, epochs=60), _terms(policy), told.append
    )
    assert found.training.finished
    assert (tmp_path / "job" / "steps").read_text() == "300"
    assert 0 < found.training.samples <= 60 * 40
    assert found.requests == len(found.latencies_s) + found.dropped
    assert len(served.threads) == 1
    assert len(found.arrived_s) == len(found.latencies_s)
    assert all(0 <= begin_s <= end_s <= found.span_s for begin_s, end_s in found.slices_s)
    assert len(found.slices_s) > 0
    assert found.energy_j is not None
    assert found.energy_j > 0
    assert (found.simulated, found.policy, found.training.stopped) == (False, policy, "")


@pytest.mark.slow
def test_inference_alone_trains_nothing_while_requests_come(tmp_path: Path) -> None:
    """What was trained to see how long slices take is not counted, and nothing comes on top."""
    found = run(open_device("cpu"), BatchedWorkload(Answering()), _pretending(tmp_path, epochs=99), _terms("none", 1.0))
    assert (found.training.samples, found.training.steps, found.training.finished) == (0, 0, False)
    assert found.requests > 0
    assert found.span_s >= 1.0
    with pytest.raises(InvalidInput, match="has no end"):
        run(open_device("cpu"), BatchedWorkload(Answering()), _pretending(tmp_path), _terms("none"))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies"])
def test_a_trainer_that_dies_is_started_again_and_inference_goes_on(tmp_path: Path, how: str) -> None:
    """It goes on from its last step, and says how often; all requests are answered."""
    trainer = _pretending(tmp_path, how, 60, 70, epochs=20)
    found = run(open_device("cpu"), BatchedWorkload(Answering()), trainer, _terms())
    assert found.training.finished
    assert found.training.restarts == 2
    assert len(found.latencies_s) == found.requests


@pytest.mark.slow
def test_a_run_ends_with_its_requests_while_a_trainer_starts_again(tmp_path: Path) -> None:
    """One that has died and does not come back keeps nobody waiting, and its time is not counted."""
    trainer = _pretending(tmp_path, "lingers", 60, epochs=10**6)
    found = run(open_device("cpu"), BatchedWorkload(Answering()), trainer, _terms(seconds=3.0))
    assert (found.training.restarts, found.training.stopped, found.training.exit_code) == (1, "", 0)
    assert any("gone at the end" in note for note in found.notices)
    assert found.span_s < 30.0  # the trainer is given a minute to start


@pytest.mark.slow
def test_a_trainer_that_refuses_stops_fine_tuning_alone(tmp_path: Path) -> None:
    """Its words are told, requests are answered until the time is up."""
    trainer = _pretending(tmp_path, "refuses", 60, epochs=99)
    found = run(open_device("cpu"), BatchedWorkload(Answering()), trainer, _terms(seconds=3.0))
    assert "the disk is full" in found.training.stopped
    assert found.training.exit_code == StorageError.exit_code
    assert not found.training.finished
    assert len(found.latencies_s) == found.requests > 0


@pytest.mark.slow
def test_a_new_model_is_validated_and_served_once_the_job_is_done(tmp_path: Path) -> None:
    """The result says what was found and which file is served now."""
    trainer = _pretending(tmp_path, epochs=20, served="new.pt2")
    found = run(open_device("cpu"), BatchedWorkload(Answering()), trainer, _terms())
    assert found.validation is not None
    assert (found.validation["accuracy"], found.validation["served"]) == (0.75, "new.pt2")


@pytest.mark.slow
def test_a_model_that_fails_ends_the_run_and_the_trainer(tmp_path: Path) -> None:
    """The failure is told as it is, and no process stays behind."""
    trainer = _pretending(tmp_path, epochs=100_000)
    with pytest.raises(TrialError, match="fallen over"):
        run(open_device("cpu"), BatchedWorkload(Answering(1e-2, fails_after=200)), trainer, _terms())
    assert trainer.pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(trainer.pid, 0)


@pytest.mark.slow
def test_an_interrupt_ends_the_run_with_what_came_of_it(tmp_path: Path) -> None:
    """Ctrl-C while requests come gives the result so far and leaves a job that goes on."""

    def interrupting(passed: RunProgress) -> None:
        raise KeyboardInterrupt

    trainer = _pretending(tmp_path, epochs=100_000)
    found = run(open_device("cpu"), BatchedWorkload(Answering()), trainer, _terms(), interrupting)
    assert found.interrupted
    assert not found.training.finished
    assert found.requests > 0


@pytest.mark.slow
def test_a_limit_that_inference_alone_cannot_hold_is_refused(tmp_path: Path) -> None:
    """Before anything runs, with what a request takes and what would do."""
    terms = Terms(0.01, Uniform(5.0))
    with pytest.raises(SloUnmet, match=r"inference alone does not hold 10 ms .* allow more time"):
        run(open_device("cpu"), BatchedWorkload(Answering(0.03)), _pretending(tmp_path), terms)


@pytest.mark.slow
def test_requests_are_answered_in_batches_that_were_allowed(tmp_path: Path) -> None:
    """Batches of four fill while nothing is late; sizes the model has not are refused."""
    served = Answering()
    trainer = _pretending(tmp_path, epochs=99)
    run(open_device("cpu"), BatchedWorkload(served, (1, 4)), trainer, _terms(seconds=2.0, rate_per_s=200.0))
    assert set(served.batches) == {1, 4}
    with pytest.raises(InvalidInput, match=r"answers batches of 1, 2, 4, not \[3\]"):
        BatchedWorkload(served, (3,))


@pytest.mark.slow
def test_a_lone_request_is_answered_in_a_batch_it_does_not_fill(tmp_path: Path) -> None:
    """A model that takes no batch of one is never given one."""
    served = Answering()
    found = run(
        open_device("cpu"), BatchedWorkload(served, (2, 4)), _pretending(tmp_path, epochs=99), _terms(seconds=1.0)
    )
    assert set(served.batches) == {2, 4}
    assert found.requests == len(found.latencies_s) > 0


@pytest.mark.slow
def test_the_papers_policy_says_why_it_cannot_be_had(tmp_path: Path) -> None:
    """Where operations cannot be counted its prediction cannot be made."""
    with pytest.raises(InvalidInput, match="take another policy"):
        run(open_device("cpu"), BatchedWorkload(Answering()), _pretending(tmp_path, epochs=99), _terms("paper"))


@pytest.mark.slow
def test_hours_that_do_not_suffice_are_told(tmp_path: Path) -> None:
    """A run that ends before they do is refused; one that they have too little room for says so and trains."""
    now_s = wall_day_s(time.time())
    soon = Hours((now_s + 7200) % DAY_S, (now_s + 10800) % DAY_S)
    with pytest.raises(InvalidInput, match="nothing would be fine-tuned"):
        _run(tmp_path, "off-peak", seconds=1.0, hours=soon)
    just_begun = Hours(now_s, (now_s + 7200) % DAY_S)
    found = _run(tmp_path, "off-peak", seconds=1.0, hours=just_begun, epochs=10**6)
    assert found.training.samples > 0
    assert any("have room for about" in note for note in found.notices)
    assert found.hours == str(just_begun)


@pytest.mark.slow
def test_a_power_that_is_nearly_used_up_makes_fine_tuning_wait(tmp_path: Path) -> None:
    """Requests are answered all the same; a power below what inference draws alone is refused before anything runs."""
    with pytest.raises(InvalidInput, match="inference alone draws"):
        _run(tmp_path, "interleave", seconds=2.0, power_w=1e-3)
    # It may begin once two seconds' worth is left, which the look after two seconds finds short by what was drawn.
    tight = _run(tmp_path, "interleave", seconds=6.0, power_w=1e4, epochs=10**6)
    assert tight.training.waited_s is not None
    assert 0 < tight.training.waited_s < 4.0
    assert tight.training.samples > 0
    assert len(tight.latencies_s) == tight.requests > 0
    assert tight.power_cap_w == 1e4


def _run(where: Path, policy: str, epochs: int = 99, seconds: float | None = None, **kept: Any) -> Result:
    terms = Terms(_SLO_S, Poisson(50.0), policy, seconds, **kept)
    return run(open_device("cpu"), BatchedWorkload(Answering()), _pretending(where, epochs=epochs), terms)


@pytest.mark.slow
def test_a_real_trainer_trains_a_real_model_in_between(tmp_path: Path) -> None:
    """The same with torch on both sides: a second run has nothing left to do."""
    data_folder(tmp_path / "data")
    archive = exported(tmp_path / "tiny.pt2")
    served = open_workload(str(archive), threads=[1])
    for _ in range(2):
        found = run(open_device("cpu"), BatchedWorkload(served), Trainer(job(tmp_path, archive, epochs=12)), _terms())
        assert found.training.finished
    assert read_progress(tmp_path / "job").finished
    served.close()
