"""What rich lays out in columns, without the blanks it fills lines up with: a pipe or a clipboard would keep them."""

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment


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
