"""The trainer's process: ``python -m polythrottle.finetune.trainer HANDLE``, the number of an open Unix socket."""

import signal
import socket
import sys


def main() -> None:
    """Serve the line whose handle is given; what a terminal's Ctrl-C means is the driver's to say."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from polythrottle.finetune.trainer.serving import serve

    with socket.socket(fileno=int(sys.argv[1])) as way:
        serve(way)


if __name__ == "__main__":
    main()
