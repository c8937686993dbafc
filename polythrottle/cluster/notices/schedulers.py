"""Notices from who gave the machine: Slurm by its own commands, Ray by its own state."""

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from polythrottle.cluster.notices.notice import Notice, NoticeKind
from polythrottle.errors import DeviceError, InvalidInput

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
            found = self.draining()
        except Exception as err:  # Ray raises what it likes
            raise SourceAway(f"Ray does not answer: {err or type(err).__name__}") from err
        if self.node not in found:
            return None
        deadline_ms = found[self.node]
        left_s = max(0.0, (deadline_ms - self.now_ms()) / 1000) if deadline_ms else None
        return Notice(NoticeKind.PREEMPT, left_s, self.node, self.name)
