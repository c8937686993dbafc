"""Machines from Slurm: every node of a job is a Slurm job of its own, requeued by Slurm when its node is lost.

One allocation over all nodes would end with the first node that fails (``srun`` and ``sbatch`` end a job then unless
``--no-kill``, and a node that comes back does not join it again). A job per node with ``--requeue`` shrinks and grows
by itself: a node that is taken away takes only its own job, and Slurm starts that job again wherever there is room.
Commands and fields: sbatch(1), scontrol(1), sinfo(1) of Slurm 22.05.
"""

import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polythrottle.cluster.notices.sources import seconds_left
from polythrottle.domain.errors import DeviceError, InvalidInput
from polythrottle.domain.fleet.transient_machine import Order, Rented, Stage

_PATIENCE_S = 30.0
_STAGES = {
    **dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESIZING"), Stage.WAITING),
    **dict.fromkeys(("CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT"), Stage.RUNNING),
    **dict.fromkeys(("NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "TIMEOUT", "DEADLINE", "REVOKED"), Stage.LOST),
    **dict.fromkeys(("FAILED", "OUT_OF_MEMORY"), Stage.LOST),
    **dict.fromkeys(("COMPLETED", "COMPLETING", "CANCELLED"), Stage.ENDED),
}
_GONE = re.compile(r"[Ii]nvalid job id")
_KEY = re.compile(r"(?:^|\s)([A-Z][A-Za-z/:]*)=")


@dataclass(frozen=True)
class NodeSeen:
    """A node as Slurm sees it.

    Attributes:
        name: Its name.
        state: What ``sinfo`` calls it, without the flags behind it: idle, allocated, mixed, down, drained, …
        reason: Why it is down or drained, empty if it is not.
    """

    name: str
    state: str
    reason: str = ""

    @property
    def usable(self) -> bool:
        """Return whether a job can run on it."""
        return self.state.rstrip("*~#!%$@^-+") in {"idle", "allocated", "mixed", "completing", "reserved", "planned"}


def check_here() -> None:
    """Check that jobs can be submitted from this machine.

    Raises:
        DeviceError: If Slurm is not here.
    """
    if shutil.which("sbatch") is None:
        raise DeviceError("sbatch is not here; install Slurm's client or run this where Slurm is")


def check_answers() -> None:
    """Check that Slurm answers here; nothing is submitted.

    Raises:
        DeviceError: If it is not here or cannot be reached; says what it said.
    """
    check_here()
    _slurm(["squeue", "-h", "-t", "PENDING", "-o", "%i"])


@dataclass
class SlurmProvider:
    """Asks Slurm for nodes; each runs one command until it ends or the node is taken away.

    Attributes:
        command: What each node runs, as shell words.
        folder: Where the jobs' output goes, one file per job, appended to when it is requeued.
        name: Name of the jobs.
        partition: Partition, or empty for Slurm's default; an order's machine name goes before it.
        notice_s: How long before the end Slurm warns with SIGTERM (``--signal``), in seconds, or 0 for KillWait alone.
        limit: Wall-time limit as Slurm writes it (``4:00:00``), or empty for the partition's.
        more: Further words for sbatch, for example ``--gres=gpu:1``.
    """

    command: Sequence[str]
    folder: Path
    name: str = "polythrottle"
    partition: str = ""
    notice_s: int = 0
    limit: str = ""
    more: Sequence[str] = ()
    _tickets: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.command:
            raise InvalidInput("a Slurm job needs a command")
        check_here()

    def request(self, order: Order) -> str:
        """Submit one requeueable job of one node and return its id.

        Raises:
            DeviceError: If Slurm refuses it; says what it said.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        script = f"#!/bin/sh\nexec {shlex.join(self.command)}\n"
        ticket = _slurm(["sbatch", *self._words(order)], script).partition(";")[0]
        self._tickets.append(ticket)
        return ticket

    def seen(self) -> Mapping[str, Rented]:
        """Return every job submitted here as Slurm sees it now; one that Slurm has forgotten has ended.

        Raises:
            DeviceError: If Slurm cannot be reached.
        """
        return {ticket: self._rented(ticket) for ticket in self._tickets}

    def crowd(self) -> Sequence[float]:
        """Return how many jobs of the partition wait, and how many of its nodes are idle.

        Raises:
            DeviceError: If Slurm cannot be reached.
        """
        if self.partition:
            there = ["-p", self.partition]
        else:
            there = []
        pending = _slurm(["squeue", "-h", "-t", "PENDING", "-o", "%i", *there]).splitlines()
        idle = [node for node in nodes(self.partition).values() if node.state.rstrip("*~#!%$@^-+") == "idle"]
        return float(len(pending)), float(len(idle))

    def dismiss(self, ticket: str) -> None:
        """Send a job's command SIGTERM, and let it take the time it needs; nothing happens if it has ended.

        Raises:
            DeviceError: If Slurm cannot be reached.
        """
        _slurm(["scancel", "--signal=TERM", "--batch", ticket], forgotten="")

    def release(self, ticket: str) -> None:
        """Cancel a job; nothing happens if it has ended.

        Raises:
            DeviceError: If Slurm cannot be reached.
        """
        _slurm(["scancel", ticket], forgotten="")

    def _words(self, order: Order) -> list[str]:
        partition = order.machine or self.partition
        words = ["--parsable", "--requeue", "--nodes=1", "--ntasks=1", f"--job-name={self.name}", "--open-mode=append"]
        words += [f"--output={self.folder}/%j.log"]
        if partition:
            words += [f"--partition={partition}"]
        if self.limit:
            words += [f"--time={self.limit}"]
        if self.notice_s:
            words += [f"--signal=B:TERM@{self.notice_s}"]
        return [*words, *self.more]

    def _rented(self, ticket: str) -> Rented:
        text = _slurm(["scontrol", "show", "job", "-o", ticket], forgotten="")
        if not text:
            return Rented(ticket, Stage.ENDED, reason="Slurm has forgotten it")
        fields = parsed(text.splitlines()[0])
        stage = _STAGES.get(fields.get("JobState", ""), Stage.WAITING)
        node = fields.get("NodeList", "")
        reason = fields.get("Reason", "None")
        return Rented(
            ticket,
            stage,
            "" if node in {"(null)", ""} or stage is Stage.WAITING else node,
            int(fields.get("Restarts", "0")),
            "" if reason == "None" else reason,
            _left_s(fields) if stage is Stage.RUNNING else None,
        )


def _left_s(fields: Mapping[str, str]) -> float | None:
    """Return the seconds until a job's time limit, from its own run time, so that no two clocks are compared."""
    limit_s = seconds_left(fields.get("TimeLimit", ""))
    run_s = seconds_left(fields.get("RunTime", ""))
    if limit_s is None or run_s is None:
        return None
    return max(0.0, limit_s - run_s)


def nodes(partition: str = "") -> dict[str, NodeSeen]:
    """Return the nodes Slurm has, by name.

    Args:
        partition: Only those of this partition, or empty for all.

    Raises:
        DeviceError: If Slurm cannot be reached.
    """
    words = ["sinfo", "-h", "-N", "-o", "%N|%T|%E", *(["-p", partition] if partition else [])]
    rows = [line.split("|", 2) for line in _slurm(words).splitlines() if line.count("|") >= 2]
    return {name: NodeSeen(name, state, "" if why == "none" else why) for name, state, why in rows}


def parsed(line: str) -> dict[str, str]:
    """Return the fields of one line of ``scontrol -o``: keys start with a capital, values may hold spaces."""
    places = list(_KEY.finditer(line))
    ends = [place.start() for place in places[1:]] + [len(line)]
    return {place[1]: line[place.end() : end].strip() for place, end in zip(places, ends, strict=True)}


def _slurm(words: Sequence[str], text: str | None = None, forgotten: str | None = None) -> str:
    """Run one of Slurm's commands; a job that Slurm has forgotten gives ``forgotten`` where that is allowed."""
    try:
        done = subprocess.run(list(words), input=text, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except FileNotFoundError as error:
        raise DeviceError(f"{words[0]} is not here; install Slurm's client or run this where Slurm is") from error
    except subprocess.TimeoutExpired as error:
        raise DeviceError(f"Slurm did not answer {words[0]} within {_PATIENCE_S:.0f} s") from error
    if done.returncode == 0:
        return done.stdout.strip()
    if forgotten is not None and _GONE.search(done.stderr):
        return forgotten
    said = (done.stderr.strip() or done.stdout.strip() or f"it ended with {done.returncode}").splitlines()[-1]
    raise DeviceError(f"Slurm refused {words[0]}: {said}")
