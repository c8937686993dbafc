"""Figures for notebooks."""

import matplotlib as mpl
import pytest
from builders import study
from matplotlib.figure import Figure

from polythrottle.api import plots
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.ladder import Ladder, PointPerformance, Rung
from polythrottle.domain.problem import Problem
from polythrottle.domain.profile import Profile
from polythrottle.domain.space import SearchSpace
from polythrottle.domain.study import Study

SOME = study("p99<=20ms", energies=(2.0, 1.5, 1.0, 0.8), latencies=(0.01, 0.012, 0.015, 0.02))
EMPTY = study("p99<=20ms")


def legend(figure: Figure) -> list[str]:
    """Return what the legend names."""
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize("draw", [plots.convergence, plots.energy_latency, plots.knobs])
@pytest.mark.parametrize("of", [SOME, EMPTY], ids=["some", "empty"])
def test_a_study_is_drawn(draw: object, of: Study) -> None:
    """Each figure has its axes and legend, shows itself as a picture, and leaves matplotlib's settings alone."""
    before = dict(mpl.rcParams)
    figure = draw(of)  # type: ignore[operator]
    assert isinstance(figure, Figure)
    assert figure.axes
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    assert dict(mpl.rcParams) == before


def test_the_legend_names_what_is_drawn() -> None:
    """Roles, the front and the limit are named; what is not there is not."""
    assert legend(plots.energy_latency(SOME)) == [
        *(
            "holds the SLO",
            "breaks the SLO",
            "default",
            "tuned",
            "front of the trials that hold the SLO",
            "limit p99 ≤ 20 ms",
        )
    ]
    assert "breaks the SLO" not in legend(plots.convergence(study(energies=(1.0,), latencies=(0.01,))))


def test_each_knob_has_a_panel() -> None:
    """A knob with several levels has one; a study without such a knob is refused."""
    assert [axes.get_xlabel() for axes in plots.knobs(SOME).axes] == ["gpu_max_mhz", "batch_size"]
    only = SOME.problem.space.default
    with pytest.raises(InvalidInput, match="more than one level"):
        plots.knobs(Study(Problem(SearchSpace.of_points([only], only))))


def test_a_ladder_is_drawn_along_load() -> None:
    """Predicted power rises with the rate; a profile without a ladder is refused."""
    profile = Profile.of(SOME, {})
    with pytest.raises(InvalidInput, match="has no ladder"):
        plots.ladder(profile)
    services = [PointPerformance(profile.point, 1, 0.01, 0.01, 0.012, joules, 2.0) for joules in (0.1, 0.2)]
    rungs = tuple(Rung(rate, service, 0.0, rate / 5, 0.015) for rate, service in zip((20, 40), services, strict=True))
    figure = plots.ladder(Profile(**{**vars(profile), "ladder": Ladder(0.02, rungs)}))
    assert legend(figure) == ["ladder of 2", "highest rung alone"]
    assert "predicted from simulated" in figure.texts[0].get_text()
