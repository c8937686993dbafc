"""``cluster train`` on rented nodes: jobs at Slurm, a task file for SkyPilot, and how many workers a node gets."""

import contextlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from polythrottle.cli.options import share
from polythrottle.cli.output import complain
from polythrottle.domain.errors import BadFile, DeviceError, InvalidInput, UnknownName

if TYPE_CHECKING:
    from polythrottle.domain.fleet.transient_machine import Provider
    from polythrottle.training.elastic.engines import LaunchPlan
    from polythrottle.training.elastic.nodes.rented_nodes import Successions

# ``polythrottle cluster train --on slurm``: the controller here, each node a job of its own at Slurm.

SLURM = "slurm"
LATE = "20%"


@dataclass(frozen=True)
class NodeSource:
    """Where a job's nodes come from.

    Attributes:
        on: ``slurm`` or ``slurm:PARTITION``.
        address: Where the controller listens, as HOST:PORT; nodes of other machines must reach it.
        token_file: File of the job's token, on a path all nodes see; None for one in the job's folder.
        sbatch: More words for sbatch.
        successors: When to ask for successors: a chance to be late, or ``off``.
    """

    on: str
    address: str
    token_file: Path | None
    sbatch: Sequence[str]
    successors: str = "off"

    def __post_init__(self) -> None:
        successions(self.successors)
        kind, _, partition = self.on.partition(":")
        # SkyPilot launches by itself, from a file: it is a place to write for, not one to rent from.
        if kind != SLURM:
            raise UnknownName("place to train on", kind, [SLURM, "skypilot"])
        # A word without a dash would be taken by sbatch for the script to run.
        if not all(word.startswith("-") for word in (*self.sbatch, "-")) or partition.startswith("-"):
            raise InvalidInput(f"--sbatch takes options such as --gres=gpu:1, not {' '.join(self.sbatch)[:60]!r}")

    def check(self) -> None:
        """Refuse what the controller, another process, would refuse after seconds and in more than a line.

        Raises:
            InvalidInput: If the controller's address is none.
            DeviceError: If Slurm is not here, or does not answer.
        """
        from polythrottle.cluster.rented_machines import check_answers
        from polythrottle.training.elastic.channel import parse_address

        parse_address(self.address)
        check_answers()

    @property
    def serving(self) -> list[str]:
        """Return the words of the controller's own process."""
        if self.token_file:
            token = ["--token-file", str(self.token_file.absolute())]
        else:
            token = []
        return ["--serve", self.address, *token]

    def provider(self, plan: "LaunchPlan") -> "Provider":
        """Return who rents out the nodes, once the controller of the job can be reached."""
        from polythrottle.cluster.rented_machines import SlurmProvider
        from polythrottle.training.elastic.engines import job_line, joining_words

        # The address is known once the controller listens: with port 0 the kernel chooses it.
        joining = [*joining_words(job_line(plan.folder)), *plan.joining, str(plan.script), "--", *plan.words]
        command = [sys.executable, "-m", "polythrottle", "cluster", "train", *joining]
        partition = self.on.partition(":")[2]
        return SlurmProvider(command, plan.folder / "slurm", plan.folder.name, partition, more=tuple(self.sbatch))


def check_sources(texts: Sequence[str]) -> None:
    """Refuse what names no source of notices, before anything starts; whether one works only its node can tell.

    Raises:
        UnknownName: If a text names none.
        InvalidInput: If a source is named twice, or no signal can be the one that is named.
    """
    from polythrottle.cluster.notice_sources import signal_number
    from polythrottle.cluster.rented_machines import SOURCES

    known = {each.partition(":")[0]: ":" in each for each in SOURCES}
    for text in texts:
        name, _, word = text.partition(":")
        if known.get(name) is not bool(word):
            raise UnknownName("source of notices", text[:60], SOURCES)
        if name == "signal":
            signal_number(word)
    # Two watchers of one source would report each notice twice.
    if len({text.partition(":")[0] for text in texts}) < len(texts):
        raise InvalidInput("each source of notices is given once")


def successions(text: str) -> "Successions | None":
    """Return when to ask for successors: a chance to be late such as ``50%``, or ``off`` for never.

    Raises:
        InvalidInput: If it is neither.
    """
    from polythrottle.training.elastic.nodes.rented_nodes import Successions

    if text.strip().lower() == "off":
        return None
    late = share("--successors", text)
    if late is None:
        return None
    return Successions(late)


def run_on(
    where: NodeSource,
    plan: "LaunchPlan",
    count: int,
    on_event: Callable[[Mapping[str, Any]], None],
) -> int:
    """Run a job on rented nodes to its end and return the controller's exit code.

    Args:
        where: Where the nodes come from.
        plan: What each of them runs.
        count: How many.
        on_event: Told of everything that happens in the job.
    """
    from polythrottle.training.elastic.engines import Torchrun
    from polythrottle.training.elastic.events import read_events
    from polythrottle.training.elastic.nodes.rented_nodes import RentedNodes

    engine = Torchrun(plan)
    # Not refused: on a cluster of one machine it is right.
    if where.address.startswith(("127.", "localhost", "[::1]")):
        complain("the controller listens on loopback: only nodes of this machine reach it (--serve HOST:PORT)")

    def note(words: Mapping[str, Any]) -> None:
        from polythrottle.training.elastic.engines import job_line

        # A note for the status alone; a controller that has just ended must not fail the nodes.
        with contextlib.suppress(DeviceError, BadFile, InvalidInput):
            job_line(plan.folder).ask("succession", **words)

    follow = successions(where.successors)
    before = len(read_events(plan.folder))
    nodes = RentedNodes(engine, count, successions=follow, note=note, seen=before)
    return nodes.run(lambda: where.provider(plan), on_event, complain, lambda: engine.exit_code)


# ``polythrottle cluster train --on skypilot --write FILE``: the training as a task file, for SkyPilot to launch.

PLACE = "skypilot"


@dataclass(frozen=True)
class TaskFile:
    """Where a training is written down instead of being begun.

    Attributes:
        on: ``skypilot`` or ``skypilot:ACCELERATORS``.
        file: The task file.
        store: URL of the checkpoints, which must outlive all machines.

    Raises:
        InvalidInput: If there is no file or no folder for it, or the store is on a machine.
    """

    on: str
    file: Path | None
    store: str | None

    def __post_init__(self) -> None:
        if self.file is None:
            raise InvalidInput("SkyPilot is not run from here: give --write FILE for a task that sky jobs launch takes")
        if not self.file.absolute().parent.is_dir():
            raise InvalidInput(f"there is no folder {self.file.parent} to write the task to; make it, or name another")
        if self.store is None or "://" not in self.store or self.store.startswith(("file:", "memory:")):
            raise InvalidInput("machines of SkyPilot's go with their disks: give a bucket, such as --store s3://b/job")

    def write(
        self, nodes: int, serving: Sequence[str], joining: Sequence[str], script: Path, words: Sequence[str]
    ) -> None:
        """Write the task file, and say how to launch it.

        Args:
            nodes: How many.
            serving: More words for the controller.
            joining: More words for each node.
            script: The training script.
            words: Its arguments.

        Raises:
            InvalidInput: If the script is not below the working folder, which is what SkyPilot copies.
            StorageError: If the file cannot be written.
        """
        from polythrottle.cluster.rented_machines import SECRET, SkyPilotTraining, training_text
        from polythrottle.storage.atomic_file import replace_file

        here = Path.cwd()
        # SkyPilot copies the working folder alone; what lies above it is not on the machine.
        if not script.absolute().is_relative_to(here):
            raise InvalidInput(f"SkyPilot copies the folder a job is launched from: call this above {script}")
        inside = str(script.absolute().relative_to(here))
        accelerators = self.on.partition(":")[2]
        text = training_text(
            SkyPilotTraining(script.stem, nodes, accelerators, self.store or "", serving, joining, inside, words)
        )
        assert self.file is not None
        replace_file(self.file, text.encode())
        typer.echo(f"task  {self.file}", err=True)
        # the secret's name alone: SkyPilot takes its value from the environment, and no command line shows it
        typer.echo(f"next  {SECRET}=$(openssl rand -hex 16) sky jobs launch --secret {SECRET} {self.file}", err=True)


# How many workers a rented node gets: one for each GPU that is asked for, unless somebody says otherwise.

_COUNT = re.compile(r"(?:[^:()]+:)?(\d{1,4})(?:\(.*\))?")
_WHOLE = ("--gpus-per-node=", "--gpus=", "-G")


def gpus_of(on: str, sbatch: Sequence[str] = ()) -> int | None:
    """Return how many GPUs each node is asked to have, None where nobody says.

    Args:
        on: The place, such as ``skypilot:V100:4``.
        sbatch: More words for sbatch, each of whose jobs is one node (sbatch(1): --gres, --gpus-per-node, --gpus).
    """
    kind, _, accelerators = on.partition(":")
    if kind == "skypilot":
        if accelerators:
            return _count(accelerators)
        return None
    counts = [count for word in sbatch if (count := _asked(word)) is not None]
    # As sbatch does: the last word counts.
    if counts:
        return counts[-1]
    return None


def workers_on(asked: int | None, gpus: int | None) -> int:
    """Return the workers of each node, and say so where GPUs stay idle.

    Args:
        asked: As on the command line, None where it says nothing.
        gpus: GPUs of each node, None where that is not known.
    """
    # Said, not refused: memory may not hold a worker for each.
    if asked is not None and gpus is not None and asked < gpus:
        complain(f"--workers {asked} on nodes of {gpus} GPUs: {gpus - asked} of each node's GPUs stay idle")
    return asked or gpus or 1


def _asked(word: str) -> int | None:
    """Return the GPUs a word for sbatch asks for; None where it is about something else, or cannot be read."""
    if word.startswith("--gres="):
        # --gres lists other things too, such as shares of MPS or disks.
        parts = [part for part in word.removeprefix("--gres=").split(",") if re.match(r"gpu(:|\(|$)", part)]
        counts = [_count(part.removeprefix("gpu").removeprefix(":") or "1") for part in parts]
    else:
        counts = [_count(word.removeprefix(start)) for start in _WHOLE if word.startswith(start)][:1]
    known = [count for count in counts if count]
    if known:
        return sum(known)
    return None


def _count(text: str) -> int | None:
    """Return the number in ``4`` or ``v100:4``, and 1 for a type alone."""
    matched = _COUNT.fullmatch(text)
    if matched:
        return int(matched[1])
    if re.fullmatch(r"[A-Za-z][\w.-]*", text):
        return 1
    return None
