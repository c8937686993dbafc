"""The command line: parse text into values, call the library, print."""

from __future__ import annotations

import os
import signal
import sys
from typing import TextIO

from polythrottle.domain.errors import INTERRUPTED
from polythrottle.storage.untrusted import NEVER_SHOWN

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
    try:
        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # one more, while the first was told of
        code = INTERRUPTED
    for number in _ENDS:  # it is over: one more has nothing left to end
        signal.signal(number, signal.SIG_IGN)
    _tell_what_is_left()
    for number in _ENDS[1:]:  # but who does not read what is left of the output must not keep it alive
        signal.signal(number, lambda *_: os._exit(code))
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
