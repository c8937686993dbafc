"""Contracts for authors of backends, workloads and optimisers, and boards to try them on; public.

Subclass a contract in a pytest module and say how to make one; every test of the contract then runs against it:

    class TestMyBoard(DeviceContract):
        def make(self) -> Device:
            return MyBoard(root=fake_tree)

A Jetson without the Jetson: `plant` lays the tree of one of `BOARDS`, and `FakeKernel` behaves as its kernel would:

    root = plant("jetson-agx-orin-jp6", tmp_path / "board")      # power_mode=3 starts it in another nvpmodel mode
    kernel = FakeKernel(root)                       # a port of controls: kernel.read(key), kernel.write(key, text)
    before = kernel.snapshot()                      # every writable control; compare it afterwards
    kernel.fail(Fault("EIO", nth=3))                # the third write ends with EIO
    kernel.fail(Fault("die_after", match="*/max_freq"), Fault("foreign", nth=2, value="306000000"))
    with kernel.installed():                        # SysFiles and SystemControls of this process go through it
        run(["apply", "profile.toml", "--device", f"jetson?root={root}"])
    [(w.key, w.text, w.outcome) for w in kernel.writes()]    # every write of every process, also of one that died
    kernel.work(0.2); kernel.doze(); kernel.throttle(); kernel.renumber("/sys/class/hwmon/hwmon1", "hwmon6")
    reboot(root, shift=1)                           # forgets all but the power mode; hwmon folders move

Faults, state and log lie in ``<root>.kernel`` and hold for every process: a child that calls
``FakeKernel(root).installed()``, or is started as ``python -m polythrottle.testing run ROOT apply …``, meets the same
ones. Sensors are files too, and follow clocks and load by a simulated law; what the kernel would answer with EAGAIN is
an empty file to a reader that does not go through it. ``python -m polythrottle.testing plant NAME FOLDER`` lays a tree.
"""

import itertools

from polythrottle.domain.errors import Exhausted, TrialError
from polythrottle.domain.measurement import EnergyKind, Latency, Measurement, Reading
from polythrottle.domain.ports import Device, Optimizer, Workload
from polythrottle.domain.problem import Constraint, Problem
from polythrottle.domain.space import BATCH_SIZE, Knob, OperatingPoint, SearchSpace
from polythrottle.domain.study import Study, Trial
from polythrottle.testing.boards import BOARDS
from polythrottle.testing.kernel import FakeKernel, Fault, Write, plant, reboot

__all__ = [
    "BOARDS",
    "DeviceContract",
    "FakeKernel",
    "Fault",
    "OptimizerContract",
    "WorkloadContract",
    "Write",
    "plant",
    "reboot",
]


class DeviceContract:
    """What the tuner relies on in a device."""

    def make(self) -> Device:
        """Return a fresh device, not entered."""
        raise NotImplementedError

    def test_its_default_is_a_point_of_its_space(self) -> None:
        """The point nobody tuned can be applied."""
        space = self.make().space
        assert space.default in space

    def test_it_names_itself_and_its_joules(self) -> None:
        """URI, title, kind of energy and boundary are known before anything is measured."""
        device = self.make()
        assert device.uri
        assert device.title
        assert device.energy_kind in EnergyKind
        assert device.boundary

    def test_it_takes_the_first_and_the_last_point(self) -> None:
        """Every point of the space can be applied, the extremes among them."""
        with self.make() as device:
            device.apply(device.space[0])
            device.apply(device.space[len(device.space) - 1])

    def test_it_takes_every_preset(self) -> None:
        """The vendor's named points can be applied."""
        with self.make() as device:
            for point in device.presets.values():
                device.apply(point)

    def test_it_refuses_a_level_it_does_not_have(self) -> None:
        """A level off the table is refused, never rounded."""
        with self.make() as device:
            for knob in device.space.knobs:
                wrong = "no such level" if isinstance(knob.levels[0], str) else max(map(float, knob.levels)) * 2 + 1
                assert _refuses(device, device.space.default.moved({knob.name: wrong}))

    def test_time_and_energy_never_go_back(self) -> None:
        """Readings follow each other in time, and their energy is a running total."""
        with self.make() as device:
            device.apply(device.space.default)
            readings = [device.read() for _ in range(3)]
            assert all(_follows(early, late) for early, late in itertools.pairwise(readings))

    def test_restoring_twice_equals_once(self) -> None:
        """Restore is idempotent, and leaving after it does no harm."""
        with self.make() as device:
            device.apply(device.space[0])
            device.restore()
            device.restore()


class WorkloadContract:
    """What the meter relies on in a workload."""

    def make(self) -> Workload:
        """Return a fresh workload."""
        raise NotImplementedError

    def test_it_answers_at_its_default(self) -> None:
        """A query at the default point takes time and carries items."""
        workload = self.make()
        workload.apply(workload.space.default)
        query = workload.query()
        workload.close()
        assert query.latency_s > 0
        assert query.items >= 1

    def test_it_answers_at_every_corner(self) -> None:
        """The first and the last point of its space can be served."""
        workload = self.make()
        for index in {0, len(workload.space) - 1}:
            workload.apply(workload.space[index])
            assert workload.query().latency_s > 0
        workload.close()

    def test_a_query_carries_its_batch(self) -> None:
        """Where batch size is a knob, a query has that many items."""
        workload = self.make()
        if BATCH_SIZE in workload.space.names:
            for point in workload.space:
                workload.apply(point)
                assert workload.query().items == point[BATCH_SIZE]
        workload.close()


class OptimizerContract:
    """What the tuner relies on in an optimiser."""

    def make(self) -> Optimizer:
        """Return a fresh optimiser."""
        raise NotImplementedError

    def test_it_starts_at_the_default(self) -> None:
        """The first trial is the board's default point."""
        study = _study()
        assert self.make().suggest(study) == study.problem.space.default

    def test_it_never_repeats_and_ends_exhausted(self) -> None:
        """Every point is suggested once, then the space is exhausted."""
        study = _explored(self.make(), _study(), trials=12)
        assert len(study.visited) == 12
        try:
            self.make().suggest(study)
        except Exhausted:
            return
        raise AssertionError("an exhausted space must raise Exhausted")

    def test_it_is_pure(self) -> None:
        """The same study gets the same answer from a fresh optimiser."""
        study = _explored(self.make(), _study(), trials=5)
        assert self.make().suggest(study) == self.make().suggest(study)

    def test_it_goes_on_after_failures(self) -> None:
        """A study whose every trial but the default failed still gets a new point."""
        study = _explored(self.make(), _study(), trials=1)
        for _ in range(4):
            point = self.make().suggest(study)
            assert point not in study.visited
            study = study.with_trial(Trial(len(study.trials), point, failure="out of memory"))

    def test_it_goes_on_while_nothing_is_feasible(self) -> None:
        """An SLO nothing meets yields new points until the space is exhausted."""
        study = _explored(self.make(), _study(Constraint("mean", 1e-6)), trials=12)
        assert len(study.visited) == 12


def _study(*constraints: Constraint) -> Study:
    knobs = (Knob("gpu_max_hz", (400_000_000, 800_000_000, 1_200_000_000)), Knob(BATCH_SIZE, (1, 2, 4, 8)))
    space = SearchSpace.grid(knobs, {"gpu_max_hz": 1_200_000_000, BATCH_SIZE: 1})
    return Study(Problem(space, constraints or (Constraint("mean", 0.05),)))


def _explored(optimizer: Optimizer, study: Study, trials: int) -> Study:
    while len(study.trials) < trials:
        point = optimizer.suggest(study)
        assert point in study.problem.space
        assert point not in study.visited
        study = study.with_trial(Trial(len(study.trials), point, _physics(point)))
    return study


def _physics(point: OperatingPoint) -> Measurement:
    clock = float(point["gpu_max_hz"]) / 1e9
    batch = int(point[BATCH_SIZE])
    latency_s = 0.004 + 0.006 * batch / clock
    power_w = 5.0 + 8.0 * clock**3
    throughput = batch / latency_s
    return Measurement(Latency(latency_s, p99_s=latency_s * 1.2), power_w / throughput, throughput, power_w)


def _refuses(device: Device, point: OperatingPoint) -> bool:
    try:
        device.apply(point)
    except TrialError:
        return True
    return False


def _follows(early: Reading, late: Reading) -> bool:
    return late.time_s >= early.time_s and late.energy_j >= early.energy_j
