"""Machines that are rented: from Slurm and from SkyPilot, and watched for notices that they are taken away.

*SkyPilot*: a plan or a training as a task file, text only, so that nothing of SkyPilot is needed to write or read it.
Fields after the documentation (docs.skypilot.co, reference "SkyPilot YAML"): name, workdir, num_nodes, resources with
infra, accelerators, instance_type, use_spot and job_recovery, envs, secrets, setup, run. Nodes know each other by
SKYPILOT_NODE_IPS and SKYPILOT_NODE_RANK (guide "Distributed Multi-Node Jobs"). A managed job (``sky jobs launch``) is
started again elsewhere, all its nodes, when a machine is taken away; it goes on from the newest checkpoint in a bucket.

*Slurm*: every node of a job is a Slurm job of its own, requeued by Slurm when its node is lost. One allocation over all
nodes would end with the first node that fails (``srun`` and ``sbatch`` end a job then unless ``--no-kill``, and a node
that comes back does not join it again). A job per node with ``--requeue`` shrinks and grows by itself: a node that is
taken away takes only its own job, and Slurm starts that job again wherever there is room. Commands and fields:
sbatch(1), scontrol(1), sinfo(1) of Slurm 22.05.

*Notices*: a node's sources are polled beside its training; the watch tells the controller, and leaves in time.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from polythrottle.cluster.notice_sources import (
    CLOUDS,
    FileSource,
    Notice,
    NoticeSource,
    SignalSource,
    leave_in_s,
    ray_source,
    seconds_left,
    slurm_from_environment,
)
from polythrottle.cluster.plan.options import Option
from polythrottle.domain.clock import Clock, SystemClock
from polythrottle.domain.errors import DeviceError, InvalidInput, PolythrottleError, UnknownName
from polythrottle.domain.fleet.transient_machine import Market, Order, Rented, Stage
from polythrottle.storage.untrusted import last_line

MARGIN_S = 15.0
SOURCES = ("file:PATH", "signal:USR1", "slurm", "ray", *CLOUDS)


class NoticeListener(Protocol):
    """Who is told of a notice."""

    def say(self, verb: str, **words: object) -> None:
        """Say something about this node."""


def source_from(text: str) -> NoticeSource:
    """Return the source that a text names.

    Raises:
        UnknownName: If it names none.
        InvalidInput: If the source cannot work here.
    """
    name, _, word = text.partition(":")
    if name == "file" and word:
        return FileSource(Path(word))
    if name == "signal" and word:
        return SignalSource(word)
    if name == "slurm":
        return slurm_from_environment(os.environ)
    if name == "ray":
        return ray_source()
    if name in CLOUDS and not word:
        return CLOUDS[name]()
    raise UnknownName("source of notices", text[:60], SOURCES)


@dataclass
class NoticeWatch:
    """The sources of one node.

    Attributes:
        sources: Who is asked.
        say: Takes lines for people.
        margin_s: Time for a checkpoint and for parting, in seconds.
        clock: Tells when whom to ask.
    """

    sources: Iterable[NoticeSource]
    say: Callable[[str], object]
    margin_s: float = MARGIN_S
    clock: Clock = field(default_factory=SystemClock)
    _next_s: dict[str, float] = field(default_factory=dict)
    _known: set[tuple[str, str]] = field(default_factory=set)
    _silent: set[str] = field(default_factory=set)
    _leave_s: float | None = None
    _why: str = ""

    def start(self, told: NoticeListener, take_away: Callable[[str], None]) -> None:
        """Watch in a thread of its own until the node leaves.

        Args:
            told: Told of each new notice, for the controller.
            take_away: Called when it is time to leave.
        """
        threading.Thread(target=self._watch, args=(told, take_away), daemon=True).start()

    def look(self, told: NoticeListener) -> str:
        """Ask whom it is time to ask, and return why to leave now; empty to stay."""
        now_s = self.clock.now()
        for source in self.sources:
            if now_s >= self._next_s.get(source.name, now_s):
                self._next_s[source.name] = now_s + source.every_s
                notice = self._asked(source)
                if notice is not None and (source.name, notice.kind) not in self._known:
                    self._known.add((source.name, notice.kind))
                    self._take(notice, told, now_s)
        if self._leave_s is not None and now_s >= self._leave_s:
            return self._why
        return ""

    def _asked(self, source: NoticeSource) -> Notice | None:
        try:
            notice = source.poll()
        except PolythrottleError as err:
            # Told once: a metadata endpoint that is away would else be told of at every look.
            if source.name not in self._silent:
                self._silent.add(source.name)
                self.say(f"no notices from {source.name}: {err}; asking again")
            return None
        self._silent.discard(source.name)
        return notice

    def _take(self, notice: Notice, told: NoticeListener, now_s: float) -> None:
        told.say("notice", kind=str(notice.kind), left_s=notice.left_s, source=notice.source)
        left = ""
        if notice.left_s is not None:
            left = f", {notice.left_s:.0f} s left"
        self.say(f"{notice.source} says: {notice.kind}{left}")
        wait_s = leave_in_s(notice, self.margin_s)
        # A later notice may shorten the time left, as a spot notice after a time limit; none lengthens it.
        if wait_s is not None and (self._leave_s is None or now_s + wait_s < self._leave_s):
            self._leave_s = now_s + wait_s
            self._why = f"notice of {notice.source}: {notice.kind}"

    def _watch(self, told: NoticeListener, take_away: Callable[[str], None]) -> None:
        while not (why := self.look(told)):
            self.clock.sleep(0.1)
        take_away(why)


def watch_from(texts: list[str], say: Callable[[str], object]) -> NoticeWatch | None:
    """Return the watch over the sources that texts name, None without any.

    Raises:
        UnknownName: If one names none.
        InvalidInput: If one cannot work here, or is named twice.
    """
    sources = [source_from(text) for text in texts]
    if len({source.name for source in sources}) < len(sources):
        raise InvalidInput("each source of notices is given once")
    if sources:
        return NoticeWatch(sources, say)
    return None


_CLOUDS = {"aws": "aws", "gcp": "gcp", "google": "gcp", "azure": "azure"}
_AWS_TYPE = re.compile(r"[a-z]+\d+[a-z]*\.\d*x?large|[a-z]+\d+[a-z]*\.(?:metal|micro|small|medium)")
_GPU = re.compile(r"[A-Za-z0-9._-]+")
_ACCELERATORS = re.compile(r"[A-Za-z0-9._-]+(:[1-9]\d{0,2})?")
_DRIVERS = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
SECRET = "POLYTHROTTLE_TOKEN"
PORT = 7070


def task_text(option: Option, command: str) -> str:
    """Return the text of a task file for an option of a plan.

    Args:
        option: Machines, market, cap and interval.
        command: What each machine executes.

    Raises:
        InvalidInput: If the command is empty, or the GPU has a name that SkyPilot cannot have.
    """
    machine = option.offer.machine
    if not command.strip():
        raise InvalidInput("a task needs a command for each machine to execute")
    if not _GPU.fullmatch(machine.gpu):
        raise InvalidInput(f"SkyPilot knows no GPU called {machine.gpu!r}; write its model, for example V100")
    lines = [
        f"name: {json.dumps(_name(option.work.name))}",
        f"num_nodes: {option.machines}",
        "resources:",
        *(f"  {key}: {value}" for key, value in _resources(option)),
        "envs:",
        *(f"  {key}: {json.dumps(value)}" for key, value in _environment(option)),
        "run: |",
        *(f"  {line}" for line in command.strip().splitlines()),
    ]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class SkyPilotTraining:
    """An elastic training that SkyPilot is to start.

    Attributes:
        name: What the job is called.
        nodes: How many, all of which SkyPilot starts before any of them.
        accelerators: Of each node, such as ``V100:1``; empty for machines without.
        store: URL of the checkpoints.
        serving: More words for the controller, which stands on the first node.
        joining: More words for each node.
        script: The training script, in the folder from which the job is launched.
        words: Its arguments.

    Raises:
        InvalidInput: If the accelerators have a name that SkyPilot cannot have.
    """

    name: str
    nodes: int
    accelerators: str
    store: str
    serving: Sequence[str]
    joining: Sequence[str]
    script: str
    words: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.accelerators and not _ACCELERATORS.fullmatch(self.accelerators):
            raise InvalidInput(f"accelerators are written V100:1, not {self.accelerators[:40]!r}")


def training_text(training: SkyPilotTraining) -> str:
    """Return the text of a task file that trains on spot machines, to be launched as a managed job.

    The first node is the controller's as well. The token is a secret that is given when the job is launched.
    """
    command = "python -m polythrottle cluster train"
    serving = shlex.join(["--store", training.store, *training.serving])
    joining = shlex.join(training.joining)
    script = shlex.join([training.script, *(["--", *training.words] if training.words else [])])
    # printf is the shell's own, so that the token stands on no command line that others can read.
    lines = [
        f"name: {json.dumps(_name(training.name))}",
        "workdir: .",
        f"num_nodes: {training.nodes}",
        "resources:",
        *([f"  accelerators: {training.accelerators}"] if training.accelerators else []),
        "  use_spot: true",
        "  job_recovery: EAGER_NEXT_REGION",
        "secrets:",
        f"  {SECRET}: null",
        "setup: |",
        f"  {' '.join(['python -m pip install polythrottle torch', *_drivers(training.store)])}",
        "run: |",
        "  set -e",
        "  umask 077",
        f'  printf %s "${SECRET}" > "$HOME/.polythrottle-token"',
        f'  at="$(echo "$SKYPILOT_NODE_IPS" | head -n1):{PORT} --token-file $HOME/.polythrottle-token"',
        '  if [ "$SKYPILOT_NODE_RANK" = 0 ]; then',
        f"    {command} --serve $at {serving} &",
        "    controller=$!",
        "  fi",
        f'  {command} --join $at --node "node$SKYPILOT_NODE_RANK" {joining} {script}',
        '  if [ "$SKYPILOT_NODE_RANK" = 0 ]; then wait "$controller"; fi',
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _drivers(store: str) -> list[str]:
    """Return the packages by which fsspec opens a URL."""
    return [package for scheme, package in _DRIVERS.items() if store.startswith(f"{scheme}://")]


def _resources(option: Option) -> list[tuple[str, str]]:
    machine = option.offer.machine
    infra = _infra(machine.name, machine.region)
    kind = ""
    if _AWS_TYPE.fullmatch(machine.name):
        kind = machine.name
    # Where a region is named there is no next one to go to (SkyPilot, managed jobs, job_recovery).
    spot = option.market is Market.SPOT
    return [
        *([("infra", infra)] if infra else []),
        ("accelerators", f"{machine.gpu}:{machine.gpus}"),
        *([("instance_type", kind)] if kind else []),
        ("use_spot", "true" if spot else "false"),
        *([("job_recovery", "EAGER_NEXT_REGION")] if spot and not infra.count("/") else []),
        *([("job_recovery", "FAILOVER")] if spot and infra.count("/") else []),
    ]


def _environment(option: Option) -> list[tuple[str, str]]:
    """Return what the command and the node's own daemon need to know of the plan."""
    cap_w = option.choice.cap.limit_w
    every_s = option.choice.interval_s
    return [
        *([("POLYTHROTTLE_CAP_W", f"{cap_w:g}")] if cap_w is not None else []),
        *([("POLYTHROTTLE_INTERVAL_S", f"{every_s:.0f}")] if every_s < 1e9 else []),
        ("POLYTHROTTLE_MACHINES", str(option.machines)),
    ]


def _infra(name: str, region: str) -> str:
    """Return cloud and region, as far as a machine's name and region say them."""
    words = re.split(r"[^a-z]+", name.lower())
    cloud = next((_CLOUDS[word] for word in words if word in _CLOUDS), "aws" if _AWS_TYPE.fullmatch(name) else "")
    if cloud and region:
        return f"{cloud}/{region}"
    return cloud


def _name(work: str) -> str:
    """Return a task's name: letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", work.lower()).strip("-")[:40] or "job"


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
class SlurmNode:
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
        # exec, for Slurm warns the batch shell alone (--signal=B:, scancel --batch): that has to be the node itself.
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
        # Appended, or a job that is requeued would begin its output anew and lose what its first node said.
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


def nodes(partition: str = "") -> dict[str, SlurmNode]:
    """Return the nodes Slurm has, by name.

    Args:
        partition: Only those of this partition, or empty for all.

    Raises:
        DeviceError: If Slurm cannot be reached.
    """
    words = ["sinfo", "-h", "-N", "-o", "%N|%T|%E", *(["-p", partition] if partition else [])]
    rows = [line.split("|", 2) for line in _slurm(words).splitlines() if line.count("|") >= 2]
    return {name: SlurmNode(name, state, "" if why == "none" else why) for name, state, why in rows}


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
    said = last_line(done.stderr) or last_line(done.stdout) or f"it ended with {done.returncode}"
    raise DeviceError(f"Slurm refused {words[0]}: {said}")
