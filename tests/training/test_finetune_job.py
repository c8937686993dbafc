"""Jobs and slices: counts follow from samples and batch, and nonsense is refused."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polythrottle.domain.errors import InvalidInput
from polythrottle.training.beside.operating_options import FinetuningJob, Slice

_COUNT = st.integers(1, 500)


@given(_COUNT, _COUNT, st.integers(1, 5))
def test_steps_take_each_sample_once_per_epoch(samples: int, batch: int, epochs: int) -> None:
    """The samples of all steps are those of the job."""
    job = FinetuningJob(samples, batch, epochs, 10, "x")
    taken = [job.step_samples(step) for step in range(job.steps)]
    assert sum(taken) == job.work == samples * epochs
    assert min(taken) >= 1
    assert max(taken) <= batch


@pytest.mark.parametrize("name", ["samples", "batch", "epochs", "output"])
def test_a_job_of_nothing_is_refused(name: str) -> None:
    """The message names what is missing."""
    with pytest.raises(InvalidInput, match=name):
        replace(FinetuningJob(1, 1, 1, 1, "x"), **{name: 0})  # type: ignore[arg-type]


@pytest.mark.parametrize(("alone_s", "tail_s"), [(0.0, 1.0), (2.0, 1.0), (1.0, float("inf")), (float("nan"), 1.0)])
def test_a_slice_without_a_time_is_refused(alone_s: float, tail_s: float) -> None:
    """A tail is not shorter than the mean, and both are positive and finite."""
    with pytest.raises(InvalidInput, match="slice"):
        Slice(1, alone_s, tail_s)
