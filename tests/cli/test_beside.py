"""The figure of serving and fine-tuning side by side."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polythrottle.cli.render.figures import beside, shares, write_beside
from polythrottle.cli.render.finetune import print_result
from polythrottle.domain.errors import InvalidInput
from polythrottle.training.beside.serving_loop import Result, Training

_TRAINING = Training(samples=64, steps=2, epoch=0, epochs=3, finished=False)
_RAN = ("a on b", True, "interleave", "poisson:8/s", 0.1, 10.0)
_FOUND = Result(*_RAN, 3, 1, 0, (0.01, 0.05, 0.3), _TRAINING, None, "simulated", "all rails")
_SEEN = replace(_FOUND, arrived_s=(0.5, 2.0, 9.0), slices_s=((0.0, 1.0), (4.0, 4.5)))


def test_every_request_is_drawn_where_it_came_and_as_it_was() -> None:
    """Late ones apart, the limit between, and the title says that it is simulated."""
    figure = beside(_SEEN)
    above, below = figure.axes
    in_time, late, limit = above.get_lines()
    assert in_time.get_xydata() == pytest.approx(np.array([(0.5, 10.0), (2.0, 50.0)]))
    assert late.get_xydata() == pytest.approx(np.array([(9.0, 300.0)]))
    assert set(limit.get_ydata()) == {100.0}
    assert "simulated" in figure.get_suptitle()
    assert below.get_ylim() == (0.0, 100.0)


def test_the_share_of_a_time_is_what_of_it_lies_in_slices() -> None:
    """Also where a slice spans several, begins in the middle, or there is none."""
    edges_s = np.array([0.0, 1.0, 2.0, 3.0])
    assert shares([(0.5, 2.25), (2.5, 2.75)], edges_s) == pytest.approx([0.5, 1.0, 0.5])
    assert shares([], edges_s) == pytest.approx([0.0, 0.0, 0.0])


def test_a_figure_is_written_as_its_ending_says(tmp_path: Path) -> None:
    """A picture or a drawing; without an answered request there is nothing to draw."""
    for name, begins in (("run.png", b"\x89PNG"), ("run.svg", b"<?xml"), ("run.pdf", b"%PDF")):
        write_beside(_SEEN, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(begins)
    with pytest.raises(InvalidInput, match="nothing to draw"):
        write_beside(replace(_FOUND, latencies_s=()), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_a_job_that_measuring_has_finished_says_why_nothing_was_trained(capsys: pytest.CaptureFixture[str]) -> None:
    """Steps are measured by making them: a job of a few samples has none left by the first request."""
    done = replace(_TRAINING, samples=0, steps=0, epoch=3, finished=True, done_s=0.0)
    print_result(replace(_FOUND, training=done))
    out = " ".join(capsys.readouterr().out.split())
    assert "0 samples in 0 steps, finished; its last step was made before the first request" in out
