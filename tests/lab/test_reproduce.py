"""The paper's figures and ours: what is fitted holds, what is printed is labelled, and the document keeps its shape."""

import json
from typing import Any

import pytest

from polythrottle.cli.commands import run
from polythrottle.lab.reproduce import document, trials
from polythrottle.lab.reproduce.polythrottle_paper import FULL, SEARCHED, effect, front, landscape, saving
from polythrottle.lab.reproduce.published import B0, B7, BERT, CELLS, EFFECTS, FRONTS, ORIN, TX2, Cell


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Return the document without trial counts."""
    return document()


def _cell(board: str, network: str, precision: str, setting: str) -> Cell:
    return next(
        cell
        for cell in CELLS
        if (cell.board, cell.network, cell.precision, cell.setting) == (board, network, precision, setting)
    )


def test_the_figures_are_complete() -> None:
    """There are 32 cells, their mean savings are those the paper's bars have, and random search fits its grids."""
    assert len(CELLS) == len({(cell.board, cell.model, cell.setting) for cell in CELLS}) == 32
    assert sum(cell.saving for cell in CELLS) / 32 == pytest.approx(0.176, abs=0.001)
    points = {(ORIN, "A"): 52, (TX2, "A"): 143, (ORIN, "B"): 260, (TX2, "B"): 715}
    for cell in CELLS:
        near = points[cell.board, cell.setting] / cell.random
        assert near == pytest.approx(round(near), rel=0.01)


@pytest.mark.parametrize(
    ("board", "searched", "full"), [(ORIN, 52 * 5, 1820), (TX2, 143 * 5, 5005)], ids=["orin", "tx2"]
)
def test_the_spaces_are_those_of_the_paper(board: str, searched: int, full: int) -> None:
    """GPU maximum, memory and batch make 260 and 715 points; the GPU minimum makes 1,820 and 5,005 of them."""
    assert len(landscape(board, B0, SEARCHED).space) == searched
    assert len(landscape(board, B0, FULL).space) == full


@pytest.mark.slow
def test_the_savings_come_out(found: dict[str, Any]) -> None:
    """The mean absolute error of the 32 savings is at most 3 percentage points, and no cell is off by more than 7."""
    errors = [abs(cell["saving"] - cell["published_saving"]) for cell in found["cells"]]
    assert found["mae_savings"] == pytest.approx(sum(errors) / 32)
    assert found["mae_savings"] <= 0.03
    assert max(errors) <= 0.07


@pytest.mark.parametrize("published", EFFECTS, ids=lambda one: f"{one.board}-{one.network}-{one.knob}")
def test_single_knobs_save_what_is_published(published: Any) -> None:
    """GPU minimum 47.6, 29.1, 8.8, 1.1 %, memory 12 to 25 %, CPU 29 % of preprocessing: each within 3 points."""
    assert effect(published).saving == pytest.approx(published.saving, abs=0.03)


@pytest.mark.parametrize("published", FRONTS, ids=lambda one: one.board)
def test_the_front_has_the_published_ratios(published: Any) -> None:
    """Energies are within 14 % of the published ratios, 5 % on average; batches take the published times within 8 %."""
    points = front(published)
    off = [abs(point.energy / point.published_energy - 1) for point in points]
    assert max(off) <= 0.14
    assert sum(off) / len(off) <= 0.05
    starts = {point.batch: point for point in reversed(points)}
    for point in starts.values():
        assert point.latency == pytest.approx(point.published_latency, rel=0.08)


def test_a_tight_limit_forces_batch_1() -> None:
    """No batch answers within 1.2 times the best latency; without a limit, batches save more than batch 1 does."""
    for cell in CELLS:
        point = saving(cell).point
        assert (point["batch_size"] == 1) == (cell.setting == "A")


def test_savings_count_against_default_clocks_at_the_same_batch() -> None:
    """So B may save less than A, as published for B7 on Orin, though it saves far more against batch 1."""
    tight, loose = (saving(_cell(ORIN, B7, "fp16", setting)) for setting in ("A", "B"))
    assert loose.saving < tight.saving < loose.from_batch_1
    assert tight.from_batch_1 == pytest.approx(tight.saving)


def test_the_gpu_minimum_opens_what_the_paper_left_out() -> None:
    """For B0 on Orin the full space saves more than twice what the searched one does."""
    cell = _cell(ORIN, B0, "fp16", "A")
    assert saving(cell, full=True).saving > 2 * saving(cell).saving


def test_random_search_is_counted_in_both_ways() -> None:
    """With k points near the best of N, N / k trials are needed if points repeat and (N + 1) / (k + 1) if not."""
    one = saving(_cell(TX2, BERT, "fp16", "B"))
    assert one.points == 715
    assert one.random == pytest.approx(715 / one.near)
    assert one.random_without_replacement == pytest.approx(716 / (one.near + 1))


def test_single_precision_is_slower() -> None:
    """On both boards every network takes longer in single than in half precision."""
    for half, single in zip(CELLS[::2], CELLS[1::2], strict=True):
        assert (half.precision, single.precision) == ("fp16", "fp32")
        fast, slow = (landscape(cell.board, cell.model, SEARCHED).latency_s.min() for cell in (half, single))
        assert slow > 1.2 * fast


@pytest.mark.slow
def test_the_document_is_labelled_and_keeps_its_shape(found: dict[str, Any]) -> None:
    """Everything is simulated and says so; every bar holds; each figure stands beside the published one."""
    assert {"source", "energy_kind", "cells", "pareto", "knobs", "mae_savings", "bars", "contradictions"} <= set(found)
    assert found["energy_kind"] == "simulated"
    assert (len(found["cells"]), len(found["pareto"]), len(found["knobs"])) == (32, 39, 10)
    assert {"board", "network", "precision", "setting", "points", "saving", "published_saving", "published_trials",
            "trials", "full_points", "full_saving"} <= set(found["cells"][0])  # fmt: skip
    assert {cell["trials"] for cell in found["cells"]} == {None}
    assert all(bar["holds"] for bar in found["bars"])


def test_trials_are_counted_on_noisy_windows() -> None:
    """Both methods search the cell's own space; the counter ends at the number of searches."""
    cell, seen = _cell(ORIN, B0, "fp16", "A"), list[tuple[int, int]]()
    counted = trials([cell], 1, 1, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (2, 2)
    assert set(counted[cell]) == {"paper", "bayes"}
    assert all(1 <= count <= 90 for count in counted[cell].values())


@pytest.mark.slow
def test_the_command_prints_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    """With --json standard output is the document alone."""
    assert run(["reproduce", "polythrottle", "--quick", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["cells"]) == 32


def test_the_command_prints_80_columns(found: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """The text fits, names the paper, says simulated, holds the document's figures, and ends with the bars."""
    assert run(["reproduce", "polythrottle", "--quick"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    for effect_of in found["knobs"]:
        for one in (effect_of, effect_of["simulated"]):
            assert f"{one['level'] / 1e6:.0f} MHz" in text
            assert f"{100 * one['saving']:.1f} %" in text
    for ratio in found["pareto"]:
        assert f"{ratio['latency']:.2f}" in text
        assert f"{ratio['energy']:.3f}" in text
        assert f"{100 * (ratio['energy'] / ratio['published_energy'] - 1):+.1f} %" in text
    assert max(map(len, lines)) <= 80
    assert "arXiv 2310.19991" in lines[0]
    assert "simulated" in lines[0]
    assert any("percentage points" in line for line in lines[-10:])
    assert lines[-1].startswith("holds")


@pytest.mark.parametrize(("option", "number", "least"), [("--seeds", "0", 1), ("--jobs", "-1", 0)])
def test_bad_numbers_end_in_one_line(option: str, number: str, least: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is searched without a seed, nor by fewer processes than none, which are as many as there are cores."""
    assert run(["reproduce", "polythrottle", option, number]) != 0
    assert f"{option} must be at least {least}, not {number}" in capsys.readouterr().err
