"""Tables of figures and the words around them, in 80 columns whatever the figures."""

import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PLAIN, _SMALL = 1e7, 1e-3


def grid(title: str, headings: Iterable[str], left: int, before: int = 0) -> "Table":
    """Return an empty table.

    Args:
        title: What stands above it.
        headings: Of its columns.
        left: How many of them, from the left, hold names.
        before: Empty columns before each.
    """
    from rich.table import Table

    found = Table(box=None, padding=(0, 1, 0, before), header_style="dim", title=title, title_justify="left")
    found.title_style = "bold"
    for i, heading in enumerate(headings):
        found.add_column(heading, justify="left" if i < left else "right", no_wrap=True)
    return found


def end(console: "Console", table: "Table", note: str) -> None:
    """Print a table, a note below it and an empty line."""
    from polythrottle.cli.unpadded import Unpadded

    console.print(Unpadded(table))
    say(console, note)
    console.print()


def say(console: "Console", text: str, indent: str = "") -> None:
    """Print a text in lines of at most 79 columns that do not begin with a percent sign."""
    lines = textwrap.wrap(text.replace(" %", "\u00a0%"), 79, initial_indent=indent, subsequent_indent=" " * len(indent))
    for line in lines:
        console.print(line.replace("\u00a0", " "), style="dim")


def amount(value: float) -> str:
    """Return a figure to four digits, in nine columns at most: ``1,234``, ``0.5``, ``3.908e+08``."""
    if 1000 <= abs(value) < _PLAIN:
        return f"{value:,.0f}"
    if value and abs(value) < _SMALL:
        return f"{value:.3g}"
    return f"{value:.4g}"


def several(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 seed``, ``1,200 machines``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
