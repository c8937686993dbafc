"""``polythrottle cluster train --on slurm``: the controller here, each node a job of its own at Slurm."""

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polythrottle.cli.answers import complain
from polythrottle.cli.options import share
from polythrottle.errors import BadFile, DeviceError, InvalidInput, UnknownName

if TYPE_CHECKING:
    from polythrottle.cluster.provision.provider import Provider
    from polythrottle.cluster.provision.succession import Successions
    from polythrottle.cluster.train.torchrun import Plan

SLURM, LATE = "slurm", "20%"


@dataclass(frozen=True)
class Where:
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
        if kind != SLURM:
            raise UnknownName("place to train on", kind, [SLURM, "skypilot"])
        if not all(word.startswith("-") for word in (*self.sbatch, "-")) or partition.startswith("-"):
            raise InvalidInput(f"--sbatch takes options such as --gres=gpu:1, not {' '.join(self.sbatch)[:60]!r}")

    @property
    def serving(self) -> list[str]:
        """Return the words of the controller's own process."""
        token = ["--token-file", str(self.token_file.absolute())] if self.token_file else []
        return ["--serve", self.address, *token]

    def provider(self, plan: "Plan") -> "Provider":
        """Return who rents out the nodes, once the controller of the job can be reached."""
        from polythrottle.cluster.provision.slurm import SlurmProvider
        from polythrottle.cluster.train.torchrun import job_line, joining_words

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
    from polythrottle.cluster.notices.local import signal_number
    from polythrottle.cluster.notices.watching import SOURCES

    known = {each.partition(":")[0]: ":" in each for each in SOURCES}
    for text in texts:
        name, _, word = text.partition(":")
        if known.get(name) is not bool(word):
            raise UnknownName("source of notices", text[:60], SOURCES)
        if name == "signal":
            signal_number(word)
    if len({text.partition(":")[0] for text in texts}) < len(texts):
        raise InvalidInput("each source of notices is given once")


def successions(text: str) -> "Successions | None":
    """Return when to ask for successors: a chance to be late such as ``50%``, or ``off`` for never.

    Raises:
        InvalidInput: If it is neither.
    """
    from polythrottle.cluster.provision.succession import Successions

    if text.strip().lower() == "off":
        return None
    late = share("--successors", text)
    return None if late is None else Successions(late)


def run_on(
    where: Where,
    plan: "Plan",
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
    from polythrottle.cluster.train.account import read_events
    from polythrottle.cluster.train.rented import RentedNodes
    from polythrottle.cluster.train.torchrun import Torchrun

    engine = Torchrun(plan)
    if where.address.startswith(("127.", "localhost", "[::1]")):
        complain("the controller listens on loopback: only nodes of this machine reach it (--serve HOST:PORT)")

    def note(words: Mapping[str, Any]) -> None:
        from polythrottle.cluster.train.torchrun import job_line

        with contextlib.suppress(DeviceError, BadFile, InvalidInput):
            job_line(plan.folder).ask("succession", **words)

    follow, before = successions(where.successors), len(read_events(plan.folder))
    nodes = RentedNodes(engine, count, successions=follow, note=note, seen=before)
    return nodes.run(lambda: where.provider(plan), on_event, complain, lambda: engine.exit_code)
