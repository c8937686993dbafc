"""The figure of a plan."""

from pathlib import Path

import pytest

from polythrottle.cli.commands import run
from polythrottle.cli.render.figures import Way, front, write_front
from polythrottle.domain.errors import InvalidInput, StorageError

EXAMPLE = str(Path(__file__).resolve().parents[2] / "examples" / "cluster-gcp-2019.toml")
WAYS = [
    Way("k80", "spot", 4.0, 1.0, 0.5, True, chosen=True),
    Way("k80", "on-demand", 4.0, 3.0, 0.5, False),
    Way("v100", "spot", 2.0, 2.0, 0.4, True),
]


def test_every_way_is_drawn_in_dollars_and_in_joules() -> None:
    """A colour per type, a shape per market, a star for the plan, and lines where limits are."""
    figure = front(WAYS, 3.0, 2.5, "job")
    left, right = figure.axes
    for axes, heights in ((left, {1.0, 3.0, 2.0}), (right, {0.5, 0.4})):
        assert {float(y) for some in axes.collections for _, y in some.get_offsets()} == heights
    assert [line.get_xdata()[0] for line in right.lines] == [3.0]
    assert next(line.get_ydata()[0] for line in left.lines if len(set(line.get_ydata())) == 1) == 2.5
    stars = [some.get_offsets().tolist() for some in left.collections if some.get_sizes()[0] == 150]
    assert stars == [[[4.0, 1.0]]]
    assert left.get_legend_handles_labels()[1] == ["k80, spot", "k80, on-demand", "v100, spot"]
    assert left.get_ylim()[0] < 1.0
    assert left.get_ylim()[1] > 3.0


@pytest.mark.parametrize("ending", [".png", ".svg", ".pdf"])
def test_the_ending_says_the_format(tmp_path: Path, ending: str) -> None:
    """A single way without limits is drawn too; markup in its name is plain text."""
    path = tmp_path / f"plan{ending}"
    write_front([Way("$a_b$", "spot", 1.0, 0.0, 0.1, True)], path, None, None, "job $x$")
    assert path.stat().st_size > 1000


def test_a_figure_that_cannot_be_written_is_refused_before_anything_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown ending, a folder that is not there: one line, nothing planned."""
    with pytest.raises(InvalidInput, match="ends in one of"):
        write_front(WAYS, tmp_path / "plan.gif", None, None, "job")
    with pytest.raises(StorageError, match="no folder"):
        write_front(WAYS, tmp_path / "none" / "plan.png", None, None, "job")
    assert run(["cluster", "plan", EXAMPLE, "--figure", "plan.txt"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1


def test_a_plan_is_drawn_whether_it_can_be_or_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where no way keeps the limits, which is when one wants to see them."""
    path = tmp_path / "plan.svg"
    assert run(["cluster", "plan", EXAMPLE, "--deadline", "10min", "--figure", str(path)]) == 5
    assert "no plan ends by the deadline" in capsys.readouterr().err
    text = path.read_text()
    assert "p100-europe-west1, spot" in text
    assert "ResNet-32" in text
