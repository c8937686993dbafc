"""Notices that a machine is about to be taken away, and their sources: a file, a signal, Slurm, Ray."""

import json
import math
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from polythrottle.domain.backports import StrEnum
from polythrottle.domain.errors import BadFile, DeviceError, InvalidInput
from polythrottle.storage.untrusted import check_plain

# A notice that a machine is about to be taken away, and what follows from it; pure.


class NoticeKind(StrEnum):
    """What a notice says."""

    PREEMPT = "preempt"  # the machine goes
    REBALANCE = "rebalance"  # the machine is more likely to go than others
    TIME_LIMIT = "time limit"  # the allocation ends


@dataclass(frozen=True)
class Notice:
    """What a source says of this node.

    Attributes:
        kind: What it says.
        left_s: Time left by the source's own clock, in seconds; None where it does not say.
        node: The node it is about; empty for the one that asked.
        source: Who says so.
    """

    kind: NoticeKind
    left_s: float | None = None
    node: str = ""
    source: str = ""


class NoticeSource(Protocol):
    """Something that can be asked whether this machine will be taken away.

    Attributes:
        name: What it is called.
        every_s: How often to ask, in seconds.
    """

    name: str
    every_s: float

    def poll(self) -> Notice | None:
        """Return what it says now, None for nothing.

        Raises:
            SourceAway: If it does not answer.
        """


def leave_in_s(notice: Notice, margin_s: float) -> float | None:
    """Return when a node should leave after a notice, in seconds from now; None if it should stay.

    It works until there is just time for a checkpoint and for the others to hear of it; where nobody says how long it
    has, it leaves at once.

    Args:
        notice: What was said.
        margin_s: Time for a checkpoint and for parting, in seconds.
    """
    if notice.kind is NoticeKind.REBALANCE:
        return None
    if notice.left_s is None:
        return 0.0
    return max(0.0, notice.left_s - margin_s)


# Notices from this machine itself: a file that appears, a signal that is sent.

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
        check_plain(self.path)
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
            if isinstance(said, dict):
                document = said
            else:
                document = {"left_s": said}
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
    if name.upper().startswith("SIG"):
        full = name.upper()
    else:
        full = f"SIG{name.upper()}"
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
        if self._sent:
            return Notice(NoticeKind.PREEMPT, source=self.name)
        return None


# Notices from who gave the machine: Slurm by its own commands, Ray by its own state.

LEAD_S = 60.0
LIMIT_S = 5.0
_GOING = {"drained", "draining", "drng", "drain", "down", "fail", "failing", "maint", "reboot", "powering_down"}


class SourceAway(DeviceError):
    """A source of notices does not answer; it is asked again."""


def run_command(words: Sequence[str]) -> str:
    """Return what a command prints.

    Raises:
        SourceAway: If it cannot be run, fails, or takes too long.
    """
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    except (OSError, subprocess.SubprocessError) as err:
        raise SourceAway(f"{words[0]} does not answer: {err}") from err
    return done.stdout


@dataclass
class SlurmSource:
    """Slurm: this job's time left and state, and this node's state.

    Attributes:
        job: Its number.
        node: This node's name in Slurm; empty where unknown.
        lead_s: With how much time left the end of the allocation is a notice, in seconds.
        run: Runs one of Slurm's commands.
    """

    job: str
    node: str = ""
    lead_s: float = LEAD_S
    run: Callable[[Sequence[str]], str] = run_command
    name: str = "slurm"
    every_s: float = 5.0

    def poll(self) -> Notice | None:
        """Return what Slurm says of this job and node.

        Raises:
            SourceAway: If it does not answer.
        """
        state, _, left = (
            self.run(["squeue", "--noheader", f"--jobs={self.job}", "--format=%T|%L"]).strip().partition("|")
        )
        if state in {"PREEMPTED", "COMPLETING", "STOPPED", "SUSPENDED", "REQUEUED", "SIGNALING"}:
            return Notice(NoticeKind.PREEMPT, source=self.name)
        if self.node and self._is_going():
            return Notice(NoticeKind.PREEMPT, source=self.name)
        left_s = seconds_left(left)
        if left_s is not None and left_s <= self.lead_s:
            return Notice(NoticeKind.TIME_LIMIT, left_s, source=self.name)
        return None

    def _is_going(self) -> bool:
        said = self.run(["sinfo", "--noheader", f"--nodes={self.node}", "--format=%T"])
        return bool(set(re.findall(r"[a-z_]+", said.lower())) & _GOING)


def slurm_from_environment(environment: Mapping[str, str]) -> SlurmSource:
    """Return the source of the Slurm job this process is in.

    Raises:
        InvalidInput: If it is in none.
    """
    job = environment.get("SLURM_JOB_ID", "")
    if not job.isdecimal():
        raise InvalidInput("the notice slurm works inside a Slurm job alone: SLURM_JOB_ID is not set")
    return SlurmSource(job, environment.get("SLURMD_NODENAME", ""))


def seconds_left(text: str) -> float | None:
    """Return the seconds in Slurm's ``[days-][hours:]minutes:seconds``; None where there is no limit."""
    matched = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if matched is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in matched.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


@dataclass
class RaySource:
    """Ray: whether this node is being drained, and until when.

    Attributes:
        draining: Returns the draining nodes: identity → deadline in ms since 1970, 0 where there is none.
        node: This node's identity.
        now_ms: Returns the time Ray's deadlines count in, in ms.
    """

    draining: Callable[[], Mapping[str, int]]
    node: str
    now_ms: Callable[[], float]
    name: str = "ray"
    every_s: float = 1.0

    def poll(self) -> Notice | None:
        """Return what Ray says of this node.

        Raises:
            SourceAway: If it does not answer.
        """
        try:
            deadlines = self.draining()
        except Exception as err:  # Ray raises what it likes
            raise SourceAway(f"Ray does not answer: {err or type(err).__name__}") from err
        if self.node not in deadlines:
            return None
        deadline_ms = deadlines[self.node]
        left_s = None
        if deadline_ms:
            left_s = max(0.0, (deadline_ms - self.now_ms()) / 1000)
        return Notice(NoticeKind.PREEMPT, left_s, self.node, self.name)


# Ray's draining nodes; the only module here that needs Ray.


def ray_source() -> RaySource:
    """Return the source for the Ray node this process runs on.

    Raises:
        InvalidInput: If Ray is not installed, or this process is on no Ray node.
    """
    try:
        import ray  # type: ignore[import-not-found,unused-ignore]
        from ray._private.state import state  # type: ignore[import-not-found,unused-ignore]
    except ImportError as err:
        raise InvalidInput("the notice ray needs Ray: pip install 'polythrottle[cluster]'") from err
    if not ray.is_initialized():
        raise InvalidInput("the notice ray works inside a Ray job alone: ray.init() has not been called")
    node = str(ray.get_runtime_context().get_node_id())
    return RaySource(state.get_draining_nodes, node, lambda: time.time() * 1000)
