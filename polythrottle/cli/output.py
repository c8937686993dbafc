"""How a command answers: one document or a few lines on standard output, complaints on standard error.

Tables in 80 columns.
"""

import contextlib
import json
import os
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from polythrottle.storage.untrusted import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Given = TypeVar("Given")
Made = TypeVar("Made")

_called = ["polythrottle"]


def called_as() -> tuple[str, ...]:
    """Return the words before a command's name, as whoever started this program would type them."""
    return tuple(_called)


@contextlib.contextmanager
def called_by(*words: str) -> Iterator[None]:
    """Have commands that are shown to be typed begin with these words, as where another program runs this one."""
    before = called_as()
    _called[:] = words
    try:
        yield
    finally:
        _called[:] = before


# How a command answers: one document or a few lines on standard output, one line of complaint on standard error.


def answer(
    value: Any, as_json: bool, show: Callable[[Any], None], document: Callable[[Any], Any] = lambda value: value
) -> bool:
    """Print what a command found out, and say whether somebody read it; where nobody does, the command goes on.

    Args:
        value: What it found out.
        as_json: Whether a program asks.
        show: Prints it for people.
        document: Makes the JSON document of it.
    """
    try:
        if as_json:
            typer.echo(json.dumps(document(value), indent=2, allow_nan=False))
        else:
            show(value)
    except (BrokenPipeError, SystemExit):  # whoever read the output has gone; rich leaves by SystemExit then
        # Python flushes standard output once more as it exits, and would print a traceback of the broken pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True


def complain(text: str, code: int = 1) -> int:
    """Print one line on standard error, and return the exit code that goes with it."""
    with contextlib.suppress(OSError):  # a full disk behind standard error
        typer.echo(f"polythrottle: {' '.join(printable(text).split())}", err=True)
    return code


def say_which(name: str) -> None:
    """Say on standard error which profile a name means, where it could be several."""
    from polythrottle.catalog.tuned_profiles import named_profiles

    if Path(name).is_file() or len(found := named_profiles(name)) < 2:
        return
    others = " or ".join(f"{each.parent.name}/{each.stem}" for each in found[1:4])
    complain(f"{name} is {found[0].stem}, the newest of {len(found)}: {found[0]}; name {others} for another")


def found_study(name: str) -> Path:
    """Return the journal that a name means; says on standard error which, where it is another file than was named."""
    from polythrottle.api.tuning_result import find_study

    found = find_study(name)
    if found != Path(name):
        complain(f"{name} is the study {found}")
    return found


@contextlib.contextmanager
def own_stdout() -> Iterator[None]:
    """Keep standard output for the answer: whatever a workload writes to it meanwhile goes to standard error."""
    # The descriptor itself is moved: a workload may write with printf, past the streams of Python.
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        # What the workload has printed into Python's buffer goes where its other lines went.
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


# What stands for values that may not be known: text for people, null for programs.


def formatted(value: object, form: str = "{}", unknown: str = "") -> str:
    """Return a value in a format such as ``{:.1f} W``, or what stands for one that is None."""
    if value is None:
        return unknown
    return form.format(value)


def suffix(value: object, form: str) -> str:
    """Return words such as ``, {} failed`` that tell of a value; nothing where it is None, zero or empty."""
    if value:
        return form.format(value)
    return ""


def optional(function: Callable[[Given], Made], value: Given | None) -> Made | None:
    """Return what a function makes of a value, and None of None."""
    if value is None:
        return None
    return function(value)


# Tables of figures and the words around them, in 80 columns whatever the figures.

_PLAIN = 1e7
_SMALL = 1e-3
_MANY_WHOLES = 10.0


def grid(
    title: str, headings: Iterable[str], left: int, *, before: int = 0, after: int = 1, folded: Collection[int] = ()
) -> "Table":
    """Return an empty table.

    Args:
        title: What stands above it; empty for nothing.
        headings: Of its columns.
        left: How many of them, from the left, hold names.
        before: Empty columns before each.
        after: Empty columns after each.
        folded: Which columns, from 0, are folded where the terminal is narrow; the others keep their width.
    """
    from rich.table import Table

    table = Table(box=None, padding=(0, after, 0, before), header_style="dim", title=title, title_justify="left")
    table.title_style = "bold"
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right", no_wrap=number not in folded, overflow="fold")
    for column in table.columns[:left]:
        column.justify = "left"
    return table


def end(console: "Console", table: "Table", note: str) -> None:
    """Print a table, a note below it and an empty line."""
    from polythrottle.cli.render.console import Unpadded

    console.print(Unpadded(table))
    say(console, note)
    console.print()


def say(console: "Console", text: str, indent: str = "") -> None:
    """Print a text in lines of at most 79 columns that do not begin with a percent sign."""
    # A no-break space is one word to textwrap, and an ordinary blank to whoever copies the line.
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


def percent(share: float | None, unknown: str = "") -> str:
    """Return a share in per cent, and what stands for one that is not known; from ten wholes on to three digits."""
    if share is None:
        return unknown
    if share < _MANY_WHOLES:
        return f"{100 * share:.1f} %"
    return f"{100 * share:.3g} %"


def several(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 seed``, ``1,200 machines``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"
