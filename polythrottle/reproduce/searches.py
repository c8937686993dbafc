"""How many trials searches of the paper's spaces take: its own method and ours, on noisy windows."""

import statistics
from collections.abc import Callable, Sequence

from polythrottle import bench
from polythrottle.reproduce.landscape import NEAR, SEARCHED
from polythrottle.reproduce.published import Cell

METHODS = ("paper", "bayes")
_SLOS = {"A": "mean<=1.2x", "B": "mean<=1000x"}
"""A: of the fastest point; a search needs a limit, so that of B is one that every point holds."""
_TRIALS = 60


def trials(
    cells: Sequence[Cell], seeds: int, jobs: int, advanced: Callable[[int, int], None]
) -> dict[Cell, dict[str, float]]:
    """Return the mean trials to within 5 % of the best feasible point, for each cell and method.

    A search that does not arrive in 60 trials counts as 90.

    Args:
        cells: Which searches.
        seeds: How many of each.
        jobs: How many processes share the work.
        advanced: Told how many searches of how many are done.

    Raises:
        PolythrottleError: If the catalogue lacks a board or a model.
    """
    total, done, found = len(cells) * len(METHODS) * seeds, 0, {}
    for setting, slo in _SLOS.items():
        some = {_source(cell): cell for cell in cells if cell.setting == setting}
        if not some:
            continue
        records = bench.run(
            list(some),
            [slo],
            METHODS,
            seeds,
            _TRIALS,
            jobs,
            lambda count, _, before=done: advanced(before + count, total),  # type: ignore[misc]
            until=NEAR,
        )
        done += len(records)
        for source, cell in some.items():
            found[cell] = {
                method: statistics.fmean(
                    record.arrived for record in records if (record.table, record.method) == (source.name, method)
                )
                for method in METHODS
            }
    return found


def _source(cell: Cell) -> bench.Simulated:
    knobs = SEARCHED if cell.setting == "A" else (*SEARCHED, "batch_size")
    return bench.Simulated(f"sim:{cell.board}", cell.model, knobs)
