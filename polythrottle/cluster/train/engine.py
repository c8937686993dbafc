"""The port behind which an existing engine trains: start with members, stop, status, events."""

from collections.abc import Sequence
from typing import Any, Protocol

from polythrottle.errors import UnknownName

ENGINES = ("torchrun", "ray")


class Engine(Protocol):
    """What runs a job's workers."""

    def start(self, members: Sequence[str]) -> None:
        """Start the members by name; those that run go on, so that a replacement is started by its name alone.

        Raises:
            PolythrottleError: If they cannot be started.
        """

    def stop(self) -> None:
        """Stop all in order: a checkpoint, then the end."""

    def status(self) -> dict[str, Any]:
        """Return where the job stands, as `polythrottle.cluster.train.controller.Controller.status` does."""

    def events(self) -> list[dict[str, Any]]:
        """Return what has happened so far, oldest first; each carries its generation."""


def known_engine(name: str) -> str:
    """Return an engine's name.

    Raises:
        UnknownName: If there is none of the name.
    """
    if name not in ENGINES:
        raise UnknownName("engine", name, ENGINES)
    return name
