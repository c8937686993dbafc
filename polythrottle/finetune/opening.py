"""From words to what is run: a real device with its workload and trainer, or a simulated board."""

from collections.abc import Sequence
from dataclasses import dataclass

from polythrottle.backends import DeviceURI, open_device
from polythrottle.backends.found import find_device
from polythrottle.catalog import load_board, load_model, names
from polythrottle.errors import InvalidInput
from polythrottle.finetune.job import Job
from polythrottle.finetune.server import Server
from polythrottle.finetune.simulated_run import Scene
from polythrottle.ports import Device
from polythrottle.workloads import open_workload

_NOISE = 0.02
_BATCH_MOST = 64
"""The largest batch of requests on simulated boards: what every smaller one takes is computed at each point."""


@dataclass(frozen=True)
class Place:
    """A device and what it serves, in the words a user gave.

    Args:
        device: Its URI.
        workload: The workload's; a name in the catalogue on simulated boards.
        batches: Sizes of a batch of requests; of single requests if empty, up to 8 on simulated boards.
        threads: Of inference; as many as there are processors if None.
        inputs: Shapes of a model that does not say them.
    """

    device: str
    workload: str
    batches: tuple[int, ...] = ()
    threads: int | None = None
    inputs: tuple[str, ...] = ()

    @property
    def simulated(self) -> bool:
        """Whether the board is computed."""
        return self.device.strip().startswith("sim:")

    @property
    def noise(self) -> float:
        """Of a simulated board."""
        return DeviceURI.parse(self.device).number("noise", _NOISE)

    @property
    def seed(self) -> int:
        """Of a simulated board."""
        return DeviceURI.parse(self.device).count("seed", 0)

    def scene(self, job: Job) -> Scene:
        """Return the simulated board with both kinds of work.

        Raises:
            PolythrottleError: If there is no such board or model, or words make no sense there.
        """
        uri = DeviceURI.parse(self.device)
        uri.only("seed", "noise")
        if not uri.name:
            raise InvalidInput("sim: needs the name of a board; polythrottle devices lists them")
        if self.threads or self.inputs:
            raise InvalidInput("a simulated board has no --input and no --threads; they belong to real models")
        most = max(self.batches, default=8)
        if most > _BATCH_MOST:
            raise InvalidInput(f"a simulated board answers batches of {_BATCH_MOST} requests at most, not {most}")
        if not 0 <= self.noise < 1:
            raise InvalidInput(f"a simulation needs 0 <= noise < 1, not noise={self.noise:g}")
        return Scene.of(load_board(uri.name), load_model(self.workload), job, self.noise, most)

    def open(self) -> tuple[Device, Server]:
        """Return the real device, not entered, and what answers on it.

        Raises:
            PolythrottleError: If either cannot be opened; says why and what would do.
        """
        uri = find_device().uri if self.device.strip() == "auto" else self.device
        if uri.startswith("replay:"):
            raise InvalidInput("a replay table cannot fine-tune; take sim:<board> or a real device")
        if self.workload in names("profiles/workloads"):
            raise InvalidInput(f"{self.workload} describes a model for simulated boards; a real device needs the model")
        threads: Sequence[int] | None = None if self.threads is None else (self.threads,)
        batches = self.batches or None
        workload = open_workload(self.workload, inputs=self.inputs, batch_sizes=batches, threads=threads)
        return open_device(uri), Server(workload, self.batches)
