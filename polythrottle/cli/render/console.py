"""Consoles for what commands print, and columns without trailing blanks."""

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

COLUMNS = 80
"""What commands print fits a terminal of this width, the least that anybody has."""


def plain_console(width: int | None = None) -> Console:
    """Return a console on standard output that takes text as it is: no colours for numbers, no markup in brackets.

    Args:
        width: In columns; the terminal's, or what a pipe counts as, if None.
    """
    return Console(highlight=False, markup=False, width=width)


def narrow_console() -> Console:
    """Return a plain console of 80 columns at most, for tables that are hard to read where they are wider."""
    # A table of names and figures that is spread over a wide screen loses its rows to the eye.
    return plain_console(min(COLUMNS, Console().width))


# What rich lays out in columns, without the blanks it fills lines up with: a pipe or a clipboard would keep them.


class Unpadded:
    """Something to print, its lines ending where their text does.

    Args:
        inner: What is printed.
    """

    def __init__(self, inner: RenderableType) -> None:
        self._inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        """Yield what is printed, line by line."""
        for line in console.render_lines(self._inner, options, pad=False):
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                yield from line[:-1]
                yield Segment(line[-1].text.rstrip(), line[-1].style)
            yield Segment.line()
