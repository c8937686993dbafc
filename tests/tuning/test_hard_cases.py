"""Searches to which the world is unkind: ties, outliers, knobs without effect, nothing feasible, next to no points."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

import polythrottle
from polythrottle.api.tuning_result import Tuning
from polythrottle.tuning import stopping
from polythrottle.tuning.setup import Setup

CLOCKS, BATCHES = (300, 500, 700, 900, 1100, 1300), (1, 2, 4, 8)
Row = Callable[[float, int], tuple[float, float]]


def roofline(mhz: float, batch: int) -> tuple[float, float]:
    """Return seconds of a batch and watts of a small accelerator."""
    return 0.004 + 3.0 * batch / mhz, 5.0 + 8e-6 * mhz**2


def even(mhz: float, batch: int) -> tuple[float, float]:
    """Return the same for every point."""
    return 0.01 * batch, 10.0


def idle(mhz: float, batch: int) -> tuple[float, float]:
    """Return what only the batch matters to."""
    return 0.004 + 0.003 * batch, 12.0


def spiked(mhz: float, batch: int) -> tuple[float, float]:
    """Return the roofline with one window ten times as long."""
    time_s, power_w = roofline(mhz, batch)
    return (10 * time_s if (mhz, batch) == (1100, 2) else time_s), power_w


def tuned(folder: Path, row: Row, slo: str, clocks: tuple[int, ...] = CLOCKS, **options: object) -> Tuning:
    """Return the tuning of a table made of rows."""
    lines = ["gpu_freq_hz,batch_size,latency_s,throughput_per_s,power_w,energy_j"]
    for mhz, batch in itertools.product(clocks, BATCHES if len(clocks) > 1 else (1,)):
        time_s, power_w = row(mhz, batch)
        lines.append(f"{mhz}000000,{batch},{time_s},{batch / time_s},{power_w},{power_w * time_s / batch}")
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    setup = Setup(f"replay:{folder / 'table.csv'}")
    found: Tuning = polythrottle.tune(slo=slo, setup=setup, out=folder / "out.toml", **options)  # type: ignore[arg-type]
    return found


@pytest.mark.slow
def test_a_knob_without_effect_does_not_keep_the_search_going(tmp_path: Path) -> None:
    """Where only the batch matters the best batch is found, and the clocks are not all tried."""
    result = tuned(tmp_path, idle, "mean<=10x")
    best = result.study.best
    assert best is not None
    assert best.point["batch_size"] == 8
    assert stopping.is_conclusive(result.ended)
    assert len(result.study.trials) < 20


@pytest.mark.slow
def test_the_default_is_said_to_do_where_nothing_is_gained(tmp_path: Path) -> None:
    """Energy is the same everywhere: the study says that the default will do."""
    result = tuned(tmp_path, even, "mean<=10x")
    assert result.study.default_will_do
    assert stopping.is_conclusive(result.ended)


@pytest.mark.slow
def test_one_wild_window_does_not_lead_astray(tmp_path: Path) -> None:
    """A window ten times too long hides no more than itself."""
    clean = tuned(tmp_path, roofline, "mean<=3x", early_stop=False)
    wild = tuned(tmp_path, spiked, "mean<=3x", early_stop=False, fresh=True)
    assert clean.study.best is not None
    assert wild.study.best is not None
    assert wild.study.best.point == clean.study.best.point


@pytest.mark.slow
def test_a_careful_search_breaks_no_limit_and_says_why_it_ended(tmp_path: Path) -> None:
    """At a small risk every trial holds, and the search ends when no point left is safe enough."""
    result = tuned(tmp_path, roofline, "mean<=2x", risk=0.01, early_stop=False)
    assert not result.study.infeasible
    assert result.ended is not None
    assert "safe enough" in result.ended


@pytest.mark.slow
def test_a_limit_nothing_holds_is_said_to_be_missed(tmp_path: Path) -> None:
    """The answer names the trial that came closest; every trial is kept."""
    result = tuned(tmp_path, roofline, "mean<=1us", trials=6, early_stop=False)
    assert result.profile is None
    assert result.unmet
    assert len(result.study.infeasible) == 6


@pytest.mark.slow
@pytest.mark.parametrize("clocks", [(900,), (600, 900)])
def test_next_to_no_points_are_all_tried(tmp_path: Path, clocks: tuple[int, ...]) -> None:
    """One row, or two levels of a clock, end with every point tried or nothing left to gain."""
    result = tuned(tmp_path, roofline, "mean<=5x", clocks=clocks)
    assert result.profile is not None
    assert stopping.is_conclusive(result.ended)


@pytest.mark.slow
def test_on_the_ncf_tables_the_search_ends_before_its_budget(tables: Path, tmp_path: Path) -> None:
    """The power limit alone gains next to nothing where the processor is the bottleneck, and few trials tell."""
    for path in sorted(tables.glob("*ncf*.csv")):
        setup = Setup(f"replay:{path}", knobs=("power_limit_w",))
        result = polythrottle.tune(slo="mean<=1.2x", setup=setup, out=tmp_path / "out.toml", fresh=True)
        assert stopping.is_conclusive(result.ended)
        assert not result.study.infeasible or len(result.study.infeasible) <= 2
