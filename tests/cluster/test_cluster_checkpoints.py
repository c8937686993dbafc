"""How long a checkpoint takes."""

from pathlib import Path

import pytest

from polythrottle.cluster.predict.step_and_checkpoint_times import fit_checkpoints, left_out_errors, repeat_error
from polythrottle.cluster.recorded_tables import CheckpointRow, checkpoint_rows
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import Network

ROWS = [
    CheckpointRow(f"n{i}", weight, graph, 0.06 + 1e-3 * weight + 0.2 * graph, 3 + 0.02 * weight + 0.2 * graph)
    for i, (weight, graph) in enumerate([(5, 1), (14, 4), (50, 2), (90, 4), (200, 4.5), (30, 5)])
]


def test_a_lawful_table_is_learned() -> None:
    """Each network left out is found again, on disk and in the store."""
    for local in (False, True):
        assert max(map(abs, left_out_errors(ROWS, local).values())) < 0.01
    model = fit_checkpoints(ROWS)
    assert (model.fixed_s, model.weight_s, model.graph_s) == pytest.approx((3, 0.02, 0.2), rel=0.01)


def test_sizes_follow_from_parameters_and_tensors() -> None:
    """A network whose weights' size is not known is predicted all the same, between bounds."""
    model = fit_checkpoints(ROWS)
    known, unknown = (model.of(Network("new", 1e9, 216, 26.2e6, size)) for size in (200.0, None))
    assert unknown.seconds == pytest.approx(known.seconds, rel=0.01)
    low, high = unknown.interval_s()
    assert low < unknown.seconds < high


def test_few_networks_are_predicted_loosely() -> None:
    """A table of one network gives a time; none gives an error."""
    assert fit_checkpoints(ROWS[:1]).predict(5, 1).seconds == pytest.approx(ROWS[0].remote_s, rel=0.01)
    assert fit_checkpoints(ROWS[:1]).spread > 0.2
    with pytest.raises(InvalidInput, match="measured ones"):
        fit_checkpoints([])


def test_networks_never_seen_are_within_the_bar(transient: Path) -> None:
    """On CM-DARE's twenty networks left out in turn: at most 8 % on single checkpoints, 6 % on their means."""
    rows = checkpoint_rows(transient / "gcp_checkpoint_times_cmdare.csv")
    assert repeat_error(rows) <= 0.08
    errors = left_out_errors(rows)
    assert sum(map(abs, errors.values())) / len(errors) <= 0.06
