"""The command line: parse text into values, call the library, print."""

import os
import signal
import sys
from typing import TextIO

from polythrottle.domain.errors import INTERRUPTED
from polythrottle.storage.untrusted import NEVER_SHOWN


def main() -> None:
    """Run ``polythrottle`` with the arguments of this process, and exit with the code of what happened."""
    try:
        # Imported here, so that what imports a module of this package does not load every command.
        from polythrottle.cli.commands import run
    except KeyboardInterrupt:  # before anything was begun
        os.write(2, b"polythrottle: interrupted\n")
        os._exit(INTERRUPTED)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115  closed by whoever started us
        setattr(sys, name, stream)
        stream.reconfigure(errors="replace")  # a terminal that has no · gets a question mark, not a traceback
        _keep_straight(stream)
    code = run(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is over: a second Ctrl-C has nothing left to end
    _tell_what_is_left()
    try:
        sys.stdout.flush()
    except OSError:
        # The reader has gone (`polythrottle … | head`) or the disk is full: Python must not try again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(code)


def _tell_what_is_left() -> None:
    """Name what a device was not restored to because somebody else had set it since."""
    from polythrottle.cli.output import complain
    from polythrottle.domain.errors import left_here

    for line in left_here():
        complain(line)


def _keep_straight(stream: TextIO) -> None:
    """Let no text from outside, such as a name in a file, steer the terminal or turn its lines round."""
    write = stream.write

    def written(text: str) -> int:
        return write(text.translate(NEVER_SHOWN))

    stream.write = written  # type: ignore[method-assign]
