"""The composition root: from the words a user gave to a device and the workload it serves."""

import hashlib
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polythrottle.arrivals import CLOSED, Arrivals, Trace
from polythrottle.backends import open_device
from polythrottle.catalog import names
from polythrottle.catalog.places import locate
from polythrottle.clock import VirtualClock
from polythrottle.errors import BadFile, InvalidInput
from polythrottle.measurement import LONGEST_S, EnergyKind, Window
from polythrottle.meter.enough import LEAST_QUERIES
from polythrottle.ports import Concurrent, Device, Workload

if TYPE_CHECKING:
    from polythrottle.backends.simulated import SimulatedDevice

_PRECISION = 0.02
"""Of a search's windows: as good an answer as fixed ones give, for a fifth of the requests (benchmarks/windows.md)."""


@dataclass(frozen=True)
class Setup:
    """What is tuned or measured, in the words a user gave; opens the same device and workload every time.

    Args:
        device: Device URI.
        workload: Workload URI, or None for a replay table, which brings its own.
        knobs: Which device knobs to search; the device's own choice if None.
        batch_sizes: Batch sizes to search; the workload's own choice if None.
        threads: Thread counts to search; the workload's own choice if None.
        inputs: Input shapes of a model that does not state them.
        timeout_s: When a command's query is given up.
        queries: How many queries a trial looks at at least; if None, 1,000 in virtual time and 100 in real time.
        seconds: How long it looks at least; 2 s if None.
        arrivals: When requests are meant to be sent, as `polythrottle.arrivals` has it; back to back if None.
        precision: How far energy may be off, as a fraction, for a trial to end; if None, each looks as long as any.
        settle_s: How long each trial warms up at least.
        cool_c: How cool the device must be before each trial; as it is if None.
    """

    device: str = "auto"
    workload: str | None = None
    knobs: tuple[str, ...] | None = None
    batch_sizes: tuple[int, ...] | None = None
    threads: tuple[int, ...] | None = None
    inputs: tuple[str, ...] = ()
    timeout_s: float = 60.0
    queries: int | None = None
    seconds: float | None = None
    arrivals: str | None = None
    precision: float | None = None
    settle_s: float = 0.0
    cool_c: float | None = None

    @property
    def searching(self) -> "Setup":
        """The same for a search: windows that nobody has fixed end once they know enough."""
        fixed = (self.queries, self.seconds, self.precision)
        return self if any(given is not None for given in fixed) else replace(self, precision=_PRECISION)

    @property
    def traffic(self) -> Arrivals:
        """When requests are meant to be sent.

        Raises:
            InvalidInput: If the words do not say.
            UnknownName: If there are no such arrivals.
        """
        return CLOSED if self.arrivals is None else Arrivals.parse(self.arrivals)

    def window(self, device: Device) -> Window:
        """Return how long each trial looks on a device: longer where time is virtual and costs nothing.

        Raises:
            InvalidInput: If the number of queries or the time is not positive.
        """
        virtual = isinstance(device.clock, VirtualClock)
        usual = LEAST_QUERIES if self.precision is not None else 1000 if virtual else 100
        queries = usual if self.queries is None else self.queries
        duration_s = (0.0 if virtual and self.precision is not None else 2.0) if self.seconds is None else self.seconds
        patience_s = max(3600.0 if virtual else 60.0, 2 * duration_s)
        around: dict[str, Any] = {"precision": self.precision, "settle_s": self.settle_s, "cool_c": self.cool_c}
        return Window(queries, duration_s, max(1000, queries), timeout_s=patience_s, **around)

    def content(self, device: Device) -> dict[str, str]:
        """Return digests of the files that device and workload are made of, and the input shapes, by name.

        Raises:
            BadFile: If one of the files cannot be read any more.
        """
        traffic = self.traffic
        recorded = {"arrivals": Path(traffic.file)} if isinstance(traffic, Trace) else {}
        found = {name: _digest(path) for name, path in {**self._files(device), **recorded}.items()}
        return {**found, "inputs": " ".join(self.inputs)} if self.inputs else found

    def _files(self, device: Device) -> dict[str, Path]:
        from polythrottle.backends.replay import ReplayDevice
        from polythrottle.backends.simulated import SimulatedDevice

        if isinstance(device, ReplayDevice):
            return {"table": device.table.path}
        if isinstance(device, SimulatedDevice):
            board = locate("devices", "device", device.board.name)
            return {"board": board, "model": locate("profiles/workloads", "workload", str(self.workload))}
        file = self.workload is not None and self.workload.lower().endswith((".onnx", ".pt2", ".pt"))
        return {"model": Path(str(self.workload))} if file else {}

    def open(self) -> tuple[Device, Workload]:
        """Return device and workload; nothing on the device is touched until it is entered.

        Raises:
            PolythrottleError: If either cannot be opened; says why and what would do.
        """
        if not 0 < self.timeout_s <= LONGEST_S:
            raise InvalidInput(
                f"a query is given up after a time above zero and of a day at most, not {self.timeout_s:g} s"
            )
        self.traffic.times(0)  # says at once if they are no arrivals, or a table of them that cannot be read
        device = open_device(self.device, self.knobs)
        served = self._serve(device)
        return self._seeing(device, served), served

    def _seeing(self, device: Device, served: Workload) -> Device:
        """Return the device, or one that sees what is served: a service is a program beside this one."""
        from polythrottle.backends.cpu import CpuDevice

        blind = (
            isinstance(device, CpuDevice) and device.energy_kind is EnergyKind.ESTIMATED and "busy=" not in device.uri
        )
        if not (blind and isinstance(served, Concurrent)):
            return device
        return open_device(f"{device.uri}{'&' if '?' in device.uri else '?'}busy=everyone", self.knobs)

    def _serve(self, device: Device) -> Workload:
        from polythrottle.backends.replay import RecordedWorkload, ReplayDevice
        from polythrottle.backends.simulated import SimulatedDevice

        if isinstance(device, ReplayDevice):
            if self.workload is not None:
                raise InvalidInput("a replay table brings its own workload; leave --workload out")
            if not self.traffic.closed:
                raise InvalidInput("a replay table was recorded under the load it had then; leave --arrivals out")
            if self.batch_sizes or self.threads or self.inputs:
                raise InvalidInput("a replay table is searched as recorded; leave --batch, --threads and --input out")
            return RecordedWorkload()
        if isinstance(device, SimulatedDevice):
            return self._serve_simulated(device, self.workload)
        return self._serve_real(device, self.workload)

    def _serve_simulated(self, device: "SimulatedDevice", name: str | None) -> Workload:
        from polythrottle.catalog import load_model

        if name is None:
            raise InvalidInput(f"say what {device.title} serves: --workload {', '.join(names('profiles/workloads'))}")
        if re.search(r"\.(onnx|pt2?)$|:", name):
            raise InvalidInput(
                f"a simulated board serves descriptions of models, not {name}; polythrottle devices lists them, "
                f"profile-model makes one, and --device cpu runs real models"
            )
        if self.inputs or self.threads:
            raise InvalidInput("a simulated board has no --input and no --threads; they belong to real models")
        model = load_model(name)
        sizes = self.batch_sizes or model.batch_sizes
        default = model.batch_default if model.batch_default in sizes else min(sizes)
        return device.serve(replace(model, batch_sizes=sizes, batch_default=default))

    def _serve_real(self, device: Device, name: str | None) -> Workload:
        from polythrottle.workloads import open_workload

        if name is None:
            raise InvalidInput(
                f"say what to serve on {device.title}: --workload model.onnx, package.module:callable, …"
            )
        if name in names("profiles/workloads"):
            raise InvalidInput(f"{name} describes a model for simulated boards; a real device needs the model itself")
        return open_workload(
            name, inputs=self.inputs, batch_sizes=self.batch_sizes, threads=self.threads, timeout_s=self.timeout_s
        )

    @classmethod
    def planned(cls, plan: Mapping[str, Any]) -> "Setup":
        """Return the setup that a journal's plan holds.

        Raises:
            BadFile: If the plan holds something else.
        """
        try:
            words: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value for name, value in plan["setup"].items()
            }
            setup = cls(**words)
            _check_words(setup)
            return setup
        except (KeyError, AttributeError, TypeError) as error:
            raise BadFile(f"the journal's plan cannot be read: {error}") from error


def _check_words(setup: Setup) -> None:
    """Raise TypeError if a field that came out of a file is not of the type it should be."""
    texts = [setup.device, setup.workload or "", *(setup.knobs or ()), *setup.inputs, setup.arrivals or ""]
    counts = [*(setup.batch_sizes or ()), *(setup.threads or ()), setup.queries or 1]
    given = (setup.seconds, setup.precision, setup.cool_c)
    times = [setup.timeout_s, setup.settle_s, *(1.0 if time is None else time for time in given)]
    if not all(isinstance(text, str) for text in texts) or not all(type(count) is int for count in counts):
        raise TypeError("a name or a count is not one")
    if not all(type(time) in (int, float) for time in times):
        raise TypeError("a time is not a number")


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise BadFile(f"{path} cannot be read: {error.strerror}") from error


def slug(uri: str) -> str:
    """Return a short file name for a URI: ``sim:jetson-nano?seed=7`` gives ``sim-jetson-nano``."""
    body = uri.partition("?")[0] if not uri.startswith("cmd:") else uri
    if body.startswith(("replay:", "cmd:")):
        scheme, _, rest = body.partition(":")
        short = Path(rest).name.removesuffix(".gz").removesuffix(".csv") if scheme == "replay" else rest.split()[0]
        body = f"{scheme}-{Path(short).name}" + (f"-{zlib.crc32(rest.encode()):08x}" if scheme == "cmd" else "")
    elif body.endswith((".onnx", ".toml", ".pt2", ".pt", ".tar.gz")):
        body = Path(body).stem.removesuffix(".tar")
    return re.sub(r"[^A-Za-z0-9._]+", "-", body).strip("-.") or "unnamed"
