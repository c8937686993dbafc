"""Small studies for tests."""

from pathlib import Path

from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import Exhausted, KnobRejected
from polythrottle.domain.measurement import EnergyKind, Latency, Measurement, Query, Reading
from polythrottle.domain.problem import Constraint, Problem
from polythrottle.domain.space import Knob, OperatingPoint, SearchSpace
from polythrottle.domain.study import Study, Trial

ROWS = """gpu_freq_hz,batch_size,latency_s,latency_p99_s,throughput_per_s,power_w,energy_j
600000000,1,0.02,0.025,50,5,0.1
600000000,2,0.03,,66.7,5.5,0.0825
1200000000,1,0.01,0.015,100,12,0.12
1200000000,2,0.016,0.02,125,13,0.104
"""
"""A recorded table of four points."""


def measured(latency_s: float = 0.01, energy_j: float = 1.0, **rest: object) -> Measurement:
    """Return a measurement with a p99 a fifth above its mean."""
    latency = Latency(latency_s, p50_s=latency_s, p95_s=latency_s * 1.1, p99_s=latency_s * 1.2)
    return Measurement(latency, energy_j, 1 / latency_s, energy_j / latency_s, EnergyKind.SIMULATED, "a test", **rest)  # type: ignore[arg-type]


def space() -> SearchSpace:
    """Return twelve points: three clocks times four batches."""
    knobs = (Knob("gpu_max_hz", (400_000_000, 800_000_000, 1_200_000_000)), Knob("batch_size", (1, 2, 4, 8)))
    return SearchSpace.grid(knobs, {"gpu_max_hz": 1_200_000_000, "batch_size": 1})


def problem(*constraints: str) -> Problem:
    """Return a problem on the twelve points."""
    return Problem(space(), tuple(map(Constraint.parse, constraints)), "sim:test", "model")


def study(*constraints: str, energies: tuple[float, ...] = (), latencies: tuple[float, ...] = ()) -> Study:
    """Return a study whose trials went through the space from its default, with these energies and latencies."""
    points = [space().default, *(point for point in space() if point != space().default)]
    trials = [
        Trial(i, OperatingPoint(points[i]), measured(latency, energy))
        for i, (energy, latency) in enumerate(zip(energies, latencies, strict=True))
    ]
    return Study(problem(*constraints), "grid", 0, tuple(trials))


class FakeDevice:
    """A device on virtual time that draws ``power_w`` of its point's clock, and remembers what was done to it."""

    uri, title, energy_kind, boundary = "sim:test", "a test device", EnergyKind.SIMULATED, "a test"

    def __init__(self, power_w: float = 10.0) -> None:
        self.clock = VirtualClock()
        self.power_w = power_w
        self.log: list[str] = []
        self.throttled = False
        self.presets = {"low": OperatingPoint({"gpu_max_hz": 400_000_000})}
        self.point = self.space.default

    @property
    def space(self) -> SearchSpace:
        """Return three clocks."""
        clocks = Knob("gpu_max_hz", (400_000_000, 800_000_000, 1_200_000_000))
        return SearchSpace.grid((clocks,), {"gpu_max_hz": 1_200_000_000})

    def apply(self, point: OperatingPoint) -> None:
        """Take a point of the space."""
        if point not in self.space:
            raise KnobRejected(f"no point {dict(point)}")
        self.point = point
        self.log.append(f"apply {point['gpu_max_hz']}")

    def read(self) -> Reading:
        """Return constant power times virtual time."""
        return Reading(self.clock.now(), self.power_w * self.clock.now(), 40.0, throttled=self.throttled)

    def restore(self) -> None:
        """Note that the device was given back."""
        self.log.append("restore")

    def __enter__(self) -> "FakeDevice":
        self.log.append("enter")
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()


class FakeWorkload:
    """A workload that takes 10 ms per item on its device's clock, or raises what it is told to."""

    uri = "model"

    def __init__(self, device: FakeDevice, raises: BaseException | None = None, after: int = 0) -> None:
        self.device, self.raises, self.left = device, raises, after
        self.batch = 1

    @property
    def space(self) -> SearchSpace:
        """Return four batch sizes."""
        return SearchSpace.grid((Knob("batch_size", (1, 2, 4, 8)),), {"batch_size": 1})

    def apply(self, point: OperatingPoint) -> None:
        """Take a batch size."""
        self.batch = int(point["batch_size"])

    def query(self) -> Query:
        """Take 10 ms per item of virtual time."""
        self.left -= 1
        if self.raises is not None and self.left < 0:
            raise self.raises
        self.device.clock.sleep(0.01 * self.batch)
        return Query(0.01 * self.batch, self.batch)

    def close(self) -> None:
        """Do nothing."""


class Listed:
    """An optimiser that goes through the space in order, its default first."""

    def suggest(self, study: Study) -> OperatingPoint:
        """Return the first point that was not visited."""
        for point in (study.problem.space.default, *study.problem.space):
            if point not in study.visited:
                return point
        raise Exhausted("all points tried")


def quick(root: Path) -> Path:
    """Return a planted board whose power sensors average over 2 ms only, so that short windows tell something."""
    for file in root.glob("sys/class/hwmon/hwmon*/update_interval"):
        file.write_text("2\n")
    return root
