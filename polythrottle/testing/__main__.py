"""``python -m polythrottle.testing``: plant a tree, or run the command line under the kernel of one."""

import argparse
import sys
from collections.abc import Sequence

from polythrottle.actuation.argument_parser import OneLineParser, named_path
from polythrottle.cli.commands import run
from polythrottle.cli.output import called_by, complain
from polythrottle.domain.errors import PolythrottleError
from polythrottle.testing import BOARDS, FakeKernel, plant


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    parser = OneLineParser(prog="python -m polythrottle.testing", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    planting = commands.add_parser("plant", help="lay the tree of a board")
    planting.add_argument("name", metavar="NAME", help=f"one of {', '.join(BOARDS)}")
    planting.add_argument("folder", type=named_path, metavar="FOLDER", help="new or empty")
    running = commands.add_parser("run", help="run polythrottle under the kernel of a tree")
    running.add_argument("root", metavar="ROOT", help="of the tree")
    running.add_argument("words", metavar="WORD", nargs=argparse.REMAINDER, help="what follows polythrottle")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "plant":
            root = plant(chosen.name, chosen.folder)
            sys.stdout.write(f"{root}\n")
            complain(f"what the kernel of {root} remembers lies beside it, in {root}.kernel; remove both together", 0)
            return 0
        words = ("python", "-m", "polythrottle.testing", "run", chosen.root)
        with FakeKernel(chosen.root).installed(), called_by(*words):
            return run(chosen.words[1:] if chosen.words[:1] == ["--"] else chosen.words)
    except PolythrottleError as error:
        return complain(str(error), error.exit_code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
