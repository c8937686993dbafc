"""How `polythrottle reproduce scheduler` is printed: policies side by side, in 80 columns."""

import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_POLICIES = {
    "inference-only": "inference alone",
    "greedy": "greedy",
    "paper": "paper",
    "interleave": "interleave",
    "off-peak": "off-peak",
    "greedy-all": "greedy, no drop",
}


def show(found: dict[str, Any]) -> None:
    """Print the document of `polythrottle.reproduce.scheduler`."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, width=80)
    console.print(f"Published: {found['source']}. Ours: simulated, {found['replays']} replays of 30 s.\n", style="dim")
    console.print(_violations(found["records"]))
    _say(console, "late %: requests beyond their limit; ±: standard error; paper: published; no drop: gives up none")
    console.print(_room(found["throughput"]))
    _say(console, "all idle: what inference alone leaves at default clocks; all told: if all arrivals were known")
    console.print("\nWhat is assumed", style="bold")
    for line in found["assumed"]:
        _say(console, line, "- ")
    console.print()
    _bars(console, found["bars"])
    console.print("\nRead more strictly", style="bold")
    _bars(console, found["stricter"])


def _bars(console: "Console", bars: Iterable[dict[str, Any]]) -> None:
    from rich.text import Text

    for bar in bars:
        word, style = ("holds", "green") if bar["holds"] else ("does not hold", "red")
        lines = textwrap.wrap(f"{bar['what']}: {bar['value']}", 64)
        console.print(Text.assemble((f"{word:<14}", style), ("\n" + 14 * " ").join(lines)))


def _grid(title: str, headings: Iterable[str], left: int) -> "Table":
    from rich.table import Table

    grid = Table(box=None, padding=(0, 1), header_style="dim", title=title, title_justify="left", title_style="bold")
    for i, heading in enumerate(headings):
        grid.add_column(heading, justify="left" if i < left else "right", no_wrap=True)
    return grid


def _violations(records: list[dict[str, Any]]) -> "Table":
    names = ("board", "arrivals", "policy", "late %", "±", "paper", "energy", "tuned")
    grid = _grid("Every policy on every stream", names, 3)
    for one in records:
        error, paper, done_s = one["violation_error"], one["paper"], one["finetune_seconds"]
        grid.add_row(
            *(_board(one["board"]), one["arrivals"], _POLICIES[one["policy"]]),
            f"{100 * one['violation_rate']:.2f}",
            "" if error is None else f"{100 * error:.2f}",
            "" if paper is None else f"{100 * paper:.2f}",
            *(f"{one['energy_j']:.0f} J", "" if done_s is None else f"{done_s:.0f} s"),
        )
    return grid


def _room(throughputs: list[dict[str, Any]]) -> "Table":
    grid = _grid("\nSamples fine-tuned in 30 s", ("board", "arrivals", "interleave", "all idle", "all told"), 2)
    for one in throughputs:
        figures = (f"{one[name]:.0f}" for name in ("done", "idle", "clairvoyant"))
        grid.add_row(_board(one["board"]), one["arrivals"], *figures)
    return grid


def _say(console: "Console", text: str, indent: str = "") -> None:
    for line in textwrap.wrap(text, 79, initial_indent=indent, subsequent_indent=" " * len(indent)):
        console.print(line, style="dim")


def _board(name: str) -> str:
    return {"jetson-agx-orin": "Orin", "jetson-tx2": "TX2"}.get(name, name)
