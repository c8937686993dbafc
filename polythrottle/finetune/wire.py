"""The line between whoever schedules fine-tuning and the trainer: one JSON object per line over a Unix stream socket.

A request is ``{"verb": …}`` with the verb's fields, in at most 64 KiB; its answer is ``{"answer": {…}}`` or ``{"error":
{"kind": …, "words": …}}``, in at most 1 MiB. One request at a time: the trainer does nothing unasked, and ends when the
other side hangs up. Times are seconds, types strict as in `polythrottle.actuation.wire`. The verbs:

``hello`` {task}
    → ``pid``, ``samples``, ``held_out``, ``batch``, ``epochs``, ``steps_per_epoch``, ``output`` (dimension of the
    head), ``trained_parameters``, ``device``, ``operations`` and ``traffic_bytes`` of one sample's forward pass (null
    with ``uncounted`` saying why), and what ``slice`` says of where it stands. Begins or resumes a job: the first
    request, and only that. ``task`` is a `polythrottle.finetune.trainer.task.Task` as JSON.
``slice`` {samples, write}
    → ``samples`` (done now: never past the end of a step), ``took_s``, ``of`` (samples of this step), ``at`` (of them
    done; 0 between two steps), ``step`` (steps done), ``written`` (whether the last of them is on disk), ``epoch`` (the
    one that runs, from 0), ``position`` (samples of it in steps done), ``loss`` (mean of the step, when one ended; else
    null), ``finished`` (the job), ``halved_to`` (most samples at once since memory ran out; else null), ``left_out``
    [{file, why}], ``notices`` [text]. The slice that ends a step moves the weights and, with ``write``, brings a
    checkpoint to disk; without, ``checkpoint`` does, or the next slice before anything else.
``checkpoint`` {}
    → as ``slice``, without ``took_s``, ``samples``, ``loss`` and ``left_out``. Brings the last step to disk, if it is
    not there yet: little computing and much waiting for the disk, so that it can go beside inference.
``validate`` {samples}
    → ``done``, ``of`` (held-out samples), ``result`` (null until all are done; see
    `polythrottle.finetune.trainer.validating.Verdict`). The first request writes the candidate, each one then runs at
    most ``samples`` held-out samples through it and through the served model, the last one times both.
``swap`` {}
    → ``served``, ``previous`` (the file kept for going back; null if there was none). Refused unless the last
    validation holds and nothing was trained since.
``rollback`` {}
    → ``served``. The file kept is served again.
``stop`` {}
    → {}, and the trainer ends. What was done of an unfinished step is forgotten.
"""

import socket
import time
from collections.abc import Mapping
from typing import Any

from polythrottle.actuation.wire import decode, encode
from polythrottle.errors import InvalidInput, TrialError

MOST_REQUEST, MOST_ANSWER = 64 * 1024, 1024 * 1024
"""The longest request and the longest answer, in bytes, the newline included."""

_CHUNK = 65536


class TrainerLost(TrialError):
    """The trainer has died, hangs or talks nonsense; a new one resumes from its last checkpoint."""


class Line:
    """One end of the line.

    Args:
        way: A connected stream socket, which this then owns.
        most: The longest line it takes, in bytes.
    """

    def __init__(self, way: socket.socket, most: int) -> None:
        self._way, self._most, self._rest = way, most, b""

    def send(self, message: Mapping[str, Any], timeout_s: float | None = None) -> None:
        """Send a message.

        Raises:
            OSError: If the other side has hung up or does not read.
            ValueError: If a number in it is not finite.
        """
        self._way.settimeout(timeout_s)
        self._way.sendall(encode(message))

    def receive(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """Return the next message; None if none has come in time.

        What has come of a line is kept, so that asking again goes on where this stopped.

        Raises:
            EOFError: If the other side has hung up.
            OSError: If the line is broken.
            InvalidInput: If what comes is no message or too long.
        """
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            if len(self._rest) > self._most:
                raise InvalidInput(f"a line of more than {self._most} bytes is no message")
            left_s = None if until_s is None else until_s - time.monotonic()
            if not self._more(left_s):
                return None
        line, _, self._rest = self._rest.partition(b"\n")
        return decode(line)

    def _more(self, left_s: float | None) -> bool:
        self._way.settimeout(None if left_s is None else max(left_s, 1e-6))
        try:
            got = self._way.recv(_CHUNK)
        except TimeoutError:
            return False
        if not got:
            raise EOFError("the other side has hung up")
        self._rest += got
        return True

    def close(self) -> None:
        """Hang up."""
        self._way.close()
