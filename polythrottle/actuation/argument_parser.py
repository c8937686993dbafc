"""Words of a program that is not the command line: read with argparse, refused in one line like everywhere else."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from polythrottle.storage.untrusted import printable


class OneLineParser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line, and ends with 2 as `InvalidInput` does."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and exit."""
        self.exit(2, f"{self.prog}: {' '.join(printable(message).split())}; {self.prog} --help lists what there is\n")


def named_path(text: str) -> Path:
    """Return a path; an empty one is refused, for it would mean the current folder.

    Raises:
        ArgumentTypeError: If it is empty.
    """
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty; it takes a name, and a dot is the current folder")
    return Path(text)
