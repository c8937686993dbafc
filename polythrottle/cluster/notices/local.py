"""Notices from this machine itself: a file that appears, a signal that is sent."""

import json
import math
import signal
from dataclasses import dataclass, field
from pathlib import Path

from polythrottle.cluster.notices.notice import Notice, NoticeKind
from polythrottle.errors import BadFile, InvalidInput

RESERVED = {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGKILL", "SIGSTOP", "SIGCHLD"}


@dataclass
class FileSource:
    """A file that says so by being there: empty, a number of seconds left, or ``{"kind": …, "left_s": …}``.

    Attributes:
        path: Where it would appear.
    """

    path: Path
    name: str = "file"
    every_s: float = 1.0

    def poll(self) -> Notice | None:
        """Return what the file says.

        Raises:
            BadFile: If it says neither.
        """
        try:
            text = self.path.read_text().strip()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as err:
            raise BadFile(f"the notice {self.path} cannot be read: {getattr(err, 'strerror', None) or err}") from err
        if not text:
            return Notice(NoticeKind.PREEMPT, source=self.name)
        return self._parsed(text)

    def _parsed(self, text: str) -> Notice:
        try:
            said = json.loads(text)
            document = said if isinstance(said, dict) else {"left_s": said}
            left_s = document.get("left_s")
            left_s = None if left_s is None else float(left_s)
            if left_s is not None and not (math.isfinite(left_s) and left_s >= 0):
                raise ValueError
            return Notice(NoticeKind(document.get("kind", "preempt")), left_s, source=self.name)
        except (ValueError, TypeError, RecursionError) as err:
            raise BadFile(
                f'the notice {self.path} says {text[:40]!r}; write seconds left, or {{"kind": "preempt", "left_s": 30}}'
            ) from err


def signal_number(name: str) -> signal.Signals:
    """Return the signal that a name such as ``USR1`` means.

    Raises:
        InvalidInput: If there is no such signal, or it means something else already.
    """
    full = name.upper() if name.upper().startswith("SIG") else f"SIG{name.upper()}"
    number = signal.Signals.__members__.get(full)
    if number is None or full in RESERVED:
        raise InvalidInput(f"a notice can be signal:USR1 or signal:USR2, not {name[:20]!r}")
    return number


@dataclass
class SignalSource:
    """A signal to this process, such as the one Slurm sends with ``--signal=B:USR1@60``; made in the main thread.

    Attributes:
        signal_name: ``USR1`` or ``USR2``, for example; SIGTERM needs no source, it always means to leave.

    Raises:
        InvalidInput: If there is no such signal, or it means something else already.
    """

    signal_name: str
    name: str = "signal"
    every_s: float = 0.2
    _sent: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        signal.signal(signal_number(self.signal_name), lambda *_: setattr(self, "_sent", True))

    def poll(self) -> Notice | None:
        """Return a notice once the signal has come."""
        return Notice(NoticeKind.PREEMPT, source=self.name) if self._sent else None
