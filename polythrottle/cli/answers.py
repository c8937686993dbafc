"""How a command answers: one document or a few lines on standard output, one line of complaint on standard error."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer

from polythrottle.printable import printable


def answer(
    value: Any, as_json: bool, show: Callable[[Any], None], document: Callable[[Any], Any] = lambda value: value
) -> None:
    """Print what a command found out.

    Args:
        value: What it found out.
        as_json: Whether a program asks.
        show: Prints it for people.
        document: Makes the JSON document of it.
    """
    if as_json:
        typer.echo(json.dumps(document(value), indent=2, allow_nan=False))
    else:
        show(value)


def complain(text: str, code: int = 1) -> int:
    """Print one line on standard error, and return the exit code that goes with it."""
    with contextlib.suppress(OSError):  # a full disk behind standard error
        typer.echo(f"polythrottle: {' '.join(printable(text).split())}", err=True)
    return code


def say_which(name: str) -> None:
    """Say on standard error which profile a name means, where it could be several."""
    from polythrottle.catalog.profiles import named_profiles

    if Path(name).is_file() or len(found := named_profiles(name)) < 2:
        return
    others = " or ".join(f"{each.parent.name}/{each.stem}" for each in found[1:4])
    complain(f"{name} is {found[0].stem}, the newest of {len(found)}: {found[0]}; name {others} for another")


@contextlib.contextmanager
def own_stdout() -> Iterator[None]:
    """Keep standard output for the answer: whatever a workload writes to it meanwhile goes to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
