"""The whole reproduction as one document, and which of its bars hold."""

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from polythrottle.reproduce.effects import effect, front
from polythrottle.reproduce.published import CELLS, EFFECTS, FRONTS, SOURCE, Cell
from polythrottle.reproduce.savings import saving

Trials = Mapping[Cell, Mapping[str, float]]

CONTRADICTIONS = (
    "Figure 4: a B search contains the A search, and yet saves less for B7 on Orin (10.2 against 13.2 %). So savings "
    "must be against default clocks at the batch size of the optimum, and are counted so here. By figure 2, B7 saves "
    "42 % against batch 1 but 9 % against default clocks at batch 8.",
    "Figures 2 and 4 disagree: 17.6 % or 13.2 % for B7 on Orin within 1.2 times the best latency at batch 1.",
    "The GPU minimum alone saves 47.6 % for B0 on Orin, whole searches at most 22 %: they left it out, as the sizes of "
    "their grids show. Full spaces here have it.",
    "Absolute energies differ tenfold between its figures, so only ratios are fitted and compared.",
    "Its bars of random search let a point be tried twice; without that it takes (N + 1) / (k + 1) trials.",
)
"""Where the paper contradicts itself, and what was done about it."""


@dataclass(frozen=True)
class Bar:
    """One thing that should hold.

    Args:
        what: In words.
        value: What came out, in words.
        holds: Whether it does.
    """

    what: str
    value: str
    holds: bool


def document(trials: Trials | None = None) -> dict[str, Any]:
    """Return everything the paper reports that the simulator can say something about, side by side.

    Args:
        trials: From `searches.trials`; None leaves trial counts out.

    Raises:
        PolythrottleError: If the catalogue lacks a board or a model.
    """
    cells = [_cell(cell, {} if trials is None else trials[cell]) for cell in CELLS]
    pareto = [{"board": one.board, "network": one.network, **asdict(point)} for one in FRONTS for point in front(one)]
    knobs = [{**asdict(one), "simulated": asdict(effect(one))} for one in EFFECTS]
    error = statistics.fmean(abs(cell["saving"] - cell["published_saving"]) for cell in cells)
    found = {
        "source": SOURCE,
        "energy_kind": "simulated",
        "cells": cells,
        "pareto": pareto,
        "knobs": knobs,
        "mae_savings": error,
        "contradictions": list(CONTRADICTIONS),
    }
    return {**found, "bars": [asdict(bar) for bar in bars(found)]}


def _cell(cell: Cell, trials: Mapping[str, float]) -> dict[str, Any]:
    reduced, full = saving(cell), saving(cell, full=True)
    return {
        "board": cell.board,
        "network": cell.network,
        "precision": cell.precision,
        "setting": cell.setting,
        "points": reduced.points,
        "near": reduced.near,
        "point": dict(reduced.point),
        "published_saving": cell.saving,
        "saving": reduced.saving,
        "saving_from_batch_1": reduced.from_batch_1,
        "published_trials": cell.trials,
        "trials": dict(trials) or None,
        "published_random": cell.random,
        "random": reduced.random,
        "random_without_replacement": reduced.random_without_replacement,
        "full_points": full.points,
        "full_point": dict(full.point),
        "full_saving": full.saving,
    }


def bars(found: Mapping[str, Any]) -> list[Bar]:
    """Return what should hold of a document, and whether it does."""
    knobs = {name: [one for one in found["knobs"] if one["knob"] == name] for name in _KNOBS}
    worst = {name: max(abs(one["simulated"]["saving"] - one["saving"]) for one in some) for name, some in knobs.items()}
    memory = [one["simulated"]["saving"] for one in knobs["mem_hz"]]
    ratios = [abs(one["energy"] / one["published_energy"] - 1.0) for one in found["pareto"]]
    error = found["mae_savings"]
    return [
        Bar("mean error of the 32 savings <= 3 points", f"{100 * error:.2f} points", error <= 0.03),
        Bar(
            "memory alone saves 12 to 25 %, within 2 points",
            f"{100 * min(memory):.1f} to {100 * max(memory):.1f} %",
            min(memory) >= 0.10 and max(memory) <= 0.27,
        ),
        *(Bar(f"{name}, within {100 * most:.0f} points", f"off by {100 * worst[knob]:.1f} at most",
              worst[knob] <= most) for knob, (name, most) in _KNOBS.items()),
        Bar("energy ratios of the front within 5 % on average", f"{100 * statistics.fmean(ratios):.1f} % off",
            statistics.fmean(ratios) <= 0.05),
        *_trial_bars(found["cells"]),
    ]  # fmt: skip


_KNOBS = {
    "gpu_min_hz": ("GPU minimum alone, Orin", 0.03),
    "mem_hz": ("memory alone, TX2", 0.03),
    "cpu_max_hz": ("CPU clock, of preprocessing", 0.02),
}


def _trial_bars(cells: list[dict[str, Any]]) -> list[Bar]:
    pairs = [cell["trials"] for cell in cells if cell["trials"]]
    if not pairs:
        return []
    ratio = statistics.geometric_mean(pair["bayes"] / pair["paper"] for pair in pairs)
    return [Bar("trials of bayes over those of the paper's method <= 0.65", f"{ratio:.2f}", ratio <= 0.65)]
