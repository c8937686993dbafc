"""Every sample exactly once an epoch, however often the number of workers changes."""

import random
from math import ceil, sqrt

import numpy as np
import pytest

from polythrottle.domain.errors import InvalidInput
from polythrottle.training.sampler import BatchRule, SamplerPosition, fingerprint, micros, order, place_from


@pytest.mark.parametrize("seed", range(30))
def test_every_sample_is_seen_exactly_once_an_epoch_across_resizes(seed: int) -> None:
    """Workers come and go after any step, at any size of data, step and memory."""
    rng = random.Random(seed)
    total, batch, most = rng.randint(1, 200), rng.randint(1, 40), rng.randint(1, 9)
    whole, place, seen = order(total, seed, 0), SamplerPosition(), []
    while place.epoch == 0:
        workers = rng.randint(1, 7)
        steps = rng.randint(1, 3)
        for _ in range(steps):
            parts = [next_step(whole, place.consumed, batch, most, rank, workers) for rank in range(workers)]
            seen += [sample for share in parts for part in share if part.weight for sample in part.samples]
            place = place.after(parts[0][-1].total, total)
            if place.epoch:
                break
    assert sorted(seen) == list(range(total))


def next_step(whole, consumed, batch, most, rank, workers):
    """Return what a worker does for one step."""
    found = []
    for part in micros(whole, consumed, batch, most, rank, workers):
        found.append(part)
        if part.last:
            return found
    raise AssertionError("an epoch ends with a whole step")


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
def test_the_workers_mean_gradient_is_that_of_the_whole_step(workers: int) -> None:
    """Weights times means, averaged over the workers, are the plain mean, for full and for short last steps."""
    values, whole = np.random.default_rng(0).normal(size=23), order(23, 1, 0)
    for start in (0, 10, 20):
        shares = [next_step(whole, start, 10, 3, rank, workers) for rank in range(workers)]
        mean = sum(part.weight * values[list(part.samples)].mean() for share in shares for part in share) / workers
        assert mean == pytest.approx(values[whole[start : start + 10]].mean())


def test_no_worker_takes_more_at_once_than_its_memory_holds() -> None:
    """Shares are accumulated in parts; each worker has at least one, so that all exchange gradients."""
    for rank in range(4):
        share = next_step(order(64, 0, 0), 0, 64, 5, rank, 4)
        assert max(len(part.samples) for part in share) <= 5
        assert len(share) == ceil(16 / 5)
        assert [part.last for part in share] == [False] * (len(share) - 1) + [True]


def test_a_worker_without_a_share_takes_part_with_no_weight() -> None:
    """A last step of one sample on three workers counts it once."""
    shares = [next_step(order(1, 0, 0), 0, 8, 8, rank, 3) for rank in range(3)]
    assert sorted(part.weight for share in shares for part in share) == [0.0, 0.0, 3.0]


def test_a_place_moves_on_to_the_next_epoch() -> None:
    """The last samples of an epoch end it."""
    assert SamplerPosition(3, 0, 90).after(10, 100) == SamplerPosition(4, 1, 0)
    assert SamplerPosition(3, 0, 80).after(10, 100) == SamplerPosition(4, 0, 90)


def test_epochs_and_seeds_shuffle_differently_and_alike_everywhere() -> None:
    """The order follows from seed and epoch alone."""
    assert fingerprint(order(100, 0, 0)) == fingerprint(order(100, 0, 0))
    assert len({fingerprint(order(100, seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_the_rules_say_what_a_step_and_a_rate_are() -> None:
    """Fixed keeps samples per step; ICAC keeps them per worker and takes the rate times the root of their number."""
    assert (BatchRule.FIXED.batch(64, 4), BatchRule.FIXED.rate_factor(4)) == (64, 1.0)
    assert (BatchRule.ICAC.batch(64, 4), BatchRule.ICAC.rate_factor(4)) == (256, sqrt(4))


def test_a_place_of_another_data_set_is_refused() -> None:
    """A checkpoint at sample 90 does not belong to 50 samples."""
    assert place_from({"step": 3, "epoch": 1, "consumed": 9}, 50) == SamplerPosition(3, 1, 9)
    with pytest.raises(InvalidInput, match="data set of 50"):
        place_from({"step": 3, "epoch": 1, "consumed": 90}, 50)
    with pytest.raises(InvalidInput, match="no samples"):
        order(0, 0, 0)
