"""The trainer's process: ``python -m polythrottle.training.beside.trainer HANDLE``.

The number of an open Unix socket.
"""

import signal
import socket
import sys


def main() -> None:
    """Serve the line whose handle is given; what a terminal's Ctrl-C means is the driver's to say."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from polythrottle.training.beside.trainer.server import serve

    with socket.socket(fileno=int(sys.argv[1])) as way:
        serve(way)


if __name__ == "__main__":
    main()
