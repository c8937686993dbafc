"""``polythrottle cluster train --on slurm``: the controller here, each node a job of its own at Slurm."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polythrottle.cli.answers import complain
from polythrottle.errors import InvalidInput, UnknownName

if TYPE_CHECKING:
    from polythrottle.cluster.provision.provider import Provider
    from polythrottle.cluster.train.torchrun import Plan


@dataclass(frozen=True)
class Where:
    """Where a job's nodes come from.

    Attributes:
        on: ``slurm`` or ``slurm:PARTITION``.
        address: Where the controller listens, as HOST:PORT; nodes of other machines must reach it.
        token_file: File of the job's token, on a path all nodes see; needed beyond loopback.
        sbatch: More words for sbatch.
    """

    on: str
    address: str
    token_file: Path | None
    sbatch: Sequence[str]

    def __post_init__(self) -> None:
        kind, _, partition = self.on.partition(":")
        if kind != "slurm":
            raise UnknownName("place to train on", kind, ["slurm"])
        if not all(word.startswith("-") for word in (*self.sbatch, "-")) or partition.startswith("-"):
            raise InvalidInput(f"--sbatch takes options such as --gres=gpu:1, not {' '.join(self.sbatch)[:60]!r}")

    @property
    def serving(self) -> list[str]:
        """Return the words of the controller's own process."""
        return ["--serve", self.address, *self._token]

    @property
    def _token(self) -> list[str]:
        return ["--token-file", str(self.token_file.absolute())] if self.token_file else []

    def provider(self, plan: "Plan") -> "Provider":
        """Return who rents out the nodes, once the controller of the job can be reached."""
        from polythrottle.cluster.provision.slurm import SlurmProvider
        from polythrottle.cluster.train.torchrun import job_line

        address = job_line(plan.folder).address
        words = [sys.executable, "-m", "polythrottle", "cluster", "train", "--join", address, *self._token]
        command = [*words, *plan.joining, str(plan.script), "--", *plan.words]
        partition = self.on.partition(":")[2]
        return SlurmProvider(command, plan.folder / "slurm", plan.folder.name, partition, more=tuple(self.sbatch))


def run_on(where: Where, plan: "Plan", count: int, on_event: Callable[[Mapping[str, Any]], None]) -> int:
    """Run a job on rented nodes to its end and return the controller's exit code.

    Args:
        where: Where the nodes come from.
        plan: What each of them runs.
        count: How many.
        on_event: Told of everything that happens in the job.
    """
    from polythrottle.cluster.train.rented import RentedNodes
    from polythrottle.cluster.train.torchrun import Torchrun

    engine = Torchrun(plan)
    if where.address.startswith(("127.", "localhost", "[::1]")):
        complain("the controller listens on loopback: only nodes of this machine reach it (--serve HOST:PORT)")
    nodes = RentedNodes(engine, count)
    return nodes.run(lambda: where.provider(plan), on_event, complain, lambda: engine.exit_code)
