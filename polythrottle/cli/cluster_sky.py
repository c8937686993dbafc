"""``polythrottle cluster train --on skypilot --write FILE``: the training as a task file, for SkyPilot to launch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from polythrottle.errors import InvalidInput

PLACE = "skypilot"


@dataclass(frozen=True)
class Written:
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
        from polythrottle.catalog.profiles import replace_file
        from polythrottle.cluster.provision.skypilot import SECRET, Training, training_text

        here = Path.cwd()
        if not script.absolute().is_relative_to(here):
            raise InvalidInput(f"SkyPilot copies the folder a job is launched from: call this above {script}")
        inside = str(script.absolute().relative_to(here))
        accelerators = self.on.partition(":")[2]
        text = training_text(
            Training(script.stem, nodes, accelerators, self.store or "", serving, joining, inside, words)
        )
        assert self.file is not None
        replace_file(self.file, text.encode())
        typer.echo(f"task  {self.file}", err=True)
        # the secret's name alone: SkyPilot takes its value from the environment, and no command line shows it
        typer.echo(f"next  {SECRET}=$(openssl rand -hex 16) sky jobs launch --secret {SECRET} {self.file}", err=True)
