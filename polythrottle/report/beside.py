"""The figure of a run: the latency of each request along time, and below how much of the time was fine-tuned."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from polythrottle.errors import InvalidInput
from polythrottle.finetune.result import Result
from polythrottle.report.ink import BLUE, GREEN, INK, MUTED, VERMILLION, styled
from polythrottle.report.race import save_figure

_WIDTH_IN, _HEIGHT_IN = 9.6, 4.3
_BINS = 120


def write_beside(found: Result, path: Path) -> None:
    """Write the figure of a run; its ending says the format.

    Raises:
        InvalidInput: If no request was answered, or the ending is none that is known.
        StorageError: If the file cannot be written.
    """
    with styled():
        save_figure(beside(found), path)


def beside(found: Result) -> Figure:
    """Return the figure: latencies and the limit above, the share of time with a slice under way below.

    Raises:
        InvalidInput: If no request was answered.
    """
    if not found.latencies_s:
        raise InvalidInput("no request was answered, so there is nothing to draw")
    figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), dpi=72, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    at_s, took_ms = np.array(found.arrived_s), 1e3 * np.array(found.latencies_s)
    late = took_ms > 1e3 * found.slo_s
    above.plot(at_s[~late], took_ms[~late], ".", color=BLUE, markersize=3, label="in time")
    above.plot(at_s[late], took_ms[late], ".", color=VERMILLION, markersize=4, label="late")
    above.axhline(1e3 * found.slo_s, color=INK, linewidth=0.9, linestyle=(0, (4, 2)), label="limit")
    above.set_ylim(bottom=0.0)
    above.set_ylabel("latency, ms")
    above.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    edges_s = np.linspace(0.0, max(found.span_s, float(at_s.max())), _BINS + 1)
    below.stairs(100 * shares(found.slices_s, edges_s), edges_s, fill=True, color=GREEN)
    below.set(ylim=(0, 100), ylabel="fine-tuned, %", xlabel="s")
    kind = " (simulated)" if found.simulated else ""
    below.set_xlabel("seconds since the first request could come", color=MUTED)
    figure.suptitle(f"{found.policy}, {found.arrivals}{kind}: {found.title}", x=0.01, ha="left", color=INK, fontsize=9)
    return figure


def shares(
    slices_s: Sequence[tuple[float, float]], edges_s: "np.ndarray[tuple[int], np.dtype[np.float64]]"
) -> np.ndarray:
    """Return how much of each bin lies within a slice, 0 to 1.

    Args:
        slices_s: From when to when each was under way, one after another.
        edges_s: Of the bins, ascending, shape (n + 1,), in seconds.

    Returns:
        The shares, shape (n,).
    """
    spent_s = np.zeros(len(edges_s) - 1)
    for begin_s, end_s in slices_s:
        spent_s += np.clip(np.minimum(end_s, edges_s[1:]) - np.maximum(begin_s, edges_s[:-1]), 0.0, None)
    return spent_s / np.diff(edges_s)
