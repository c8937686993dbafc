"""What is searched: recorded tables and simulated boards with the truth at every point.

The earlier studies a search may learn from.
"""

import glob
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from polythrottle.backends import DeviceURI, open_device
from polythrottle.backends.replay import RecordedWorkload, ReplayDevice, Table
from polythrottle.catalog import load_model
from polythrottle.domain.errors import BadFile, InvalidInput, TrialError
from polythrottle.domain.measurement import Measurement, Window
from polythrottle.domain.ports import Device, Workload
from polythrottle.domain.problem import Constraint, Problem
from polythrottle.domain.space import BATCH_SIZE, OperatingPoint, SearchSpace
from polythrottle.domain.study import Study, Trial
from polythrottle.metering.point_measurement import measure
from polythrottle.storage.tables import ENDINGS
from polythrottle.tuning import study_store

if TYPE_CHECKING:
    from polythrottle.backends.simulated import SimulatedDevice, SimulatedWorkload

# What is searched: recorded tables and simulated boards, each with the truth at every point.

WORKLOADS = ("efficientnet-b0", "efficientnet-b4", "efficientnet-b7", "bert-base-fp16")
"""What simulated boards serve unless others are named: the models of arXiv 2310.19991."""
_WINDOW = Window(1000, 2.0, 1000, timeout_s=3600.0)  # The paper's 1,000 requests per configuration.
_Visit = Callable[[int, int, OperatingPoint], Measurement]


@dataclass(frozen=True, eq=False)
class Subject:
    """A problem whose answer is known.

    Args:
        problem: What is asked.
        truth: What each point of the space really does.
        visit: Measures a point, given the study's seed and the trial's number; a trial that fails raises TrialError.
        presets: The vendor's named points, as far as the space can set them.

    Raises:
        InvalidInput: If no point holds the limits.
    """

    problem: Problem
    truth: Mapping[OperatingPoint, Measurement]
    visit: _Visit
    presets: tuple[OperatingPoint, ...] = ()

    @cached_property
    def judge(self) -> Study:
        """A study without trials, which knows the limits."""
        return Study(self.problem)

    @cached_property
    def best_j(self) -> float:
        """Energy per item at the best of all points that hold the limits."""
        return min(measured.energy_j for measured in self.truth.values() if self.judge.holds(measured))

    def trial(self, seed: int, number: int, point: OperatingPoint) -> Trial:
        """Return a visit to a point: what the method gets to see."""
        try:
            return Trial(number, point, self.visit(seed, number, point))
        except TrialError as error:
            return Trial(number, point, failure=str(error))


class Source(Protocol):
    """Where a subject comes from; a value, so that other processes can open it too."""

    @property
    def name(self) -> str:
        """Its name in the records."""

    def __hash__(self) -> int: ...

    def open(self, seed: int = 0) -> tuple[Device, Workload]:
        """Return device and workload; the seed of a study is added to that of the device's noise, if it has any."""

    def pose(self, constraint: Constraint) -> Subject:
        """Return the subject under a limit; relative limits multiply the same metric at the fastest point.

        Raises:
            PolythrottleError: If it cannot be opened, or the limit cannot be judged or held.
        """


@lru_cache(maxsize=512)
def subject(source: Source, slo: str) -> Subject:
    """Return the subject a source poses under a limit.

    Raises:
        PolythrottleError: If it cannot be opened, or the limit cannot be judged or held.
    """
    return source.pose(Constraint.parse(slo))


@dataclass(frozen=True)
class TableFile:
    """A recorded table; a visit returns what was recorded.

    Args:
        path: Its file, best named ``<source>__<device>__<workload>.csv``.
    """

    path: Path

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.name

    @property
    def words(self) -> tuple[str, str]:
        """Device and workload, as far as the file's name tells them."""
        parts = self.name.removesuffix(".gz").removesuffix(".csv").split("__")
        if len(parts) == 3:
            return (f"replay:{parts[1]}", parts[2])
        return (f"replay:{self.name}", "recorded")

    def open(self, seed: int = 0) -> tuple[Device, Workload]:
        """Return the table as a device and what was recorded on it; there is no noise that could have a seed.

        Raises:
            BadFile: If it is not a table.
        """
        return ReplayDevice(self.path), RecordedWorkload()

    def pose(self, constraint: Constraint) -> Subject:
        """Return the table under a limit; relative limits multiply the fastest row.

        Raises:
            BadFile: If it is not a table.
            InvalidInput: If it does not record what the limit bounds in every row, or no row holds it.
        """
        table = _table(self.path)
        truth = dict(zip(table.points, table.measurements, strict=True))
        problem = Problem(table.space, (constraint,), *self.words, _reference(self.name, constraint, truth))
        return _checked(self.name, Subject(problem, truth, lambda seed, number, point: truth[point]))


@lru_cache(maxsize=256)
def _table(path: Path) -> Table:
    return Table.read(path)


@dataclass(frozen=True)
class Simulated:
    """A model on a simulated board; a visit runs a noisy window, the truth is the simulator's noiseless model.

    Args:
        device: ``sim:<board>``, options included.
        workload: Name of a model in the catalogue.
        knobs: Which knobs are searched, ``batch_size`` among them or not; the board's own choice and all batch sizes
            if None.
    """

    device: str
    workload: str
    knobs: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        """Device and workload, and the knobs if they were chosen."""
        return f"{self.device}/{self.workload}{'' if self.knobs is None else ':' + ','.join(self.knobs)}"

    def pose(self, constraint: Constraint) -> Subject:
        """Return the board and model under a limit; relative limits multiply the truly fastest point.

        Raises:
            UnknownName: If there is no such board, model or knob.
            InvalidInput: If it is not a simulated board, the model does not fit, or no point holds the limit.
        """
        truth = _truth(self)
        device, workload = self.open()
        space = device.space * workload.space
        reference = _reference(self.name, constraint, truth)
        problem = Problem(space, (constraint,), self.device, self.workload, reference, _WINDOW)
        return _checked(self.name, Subject(problem, truth, self._visit, _within(space, device.presets.values())))

    def _visit(self, seed: int, number: int, point: OperatingPoint) -> Measurement:
        device, workload = _opened(self, seed)
        device.rewind(number)
        return measure(device, workload, point, _WINDOW)

    def open(self, seed: int = 0) -> "tuple[SimulatedDevice, SimulatedWorkload]":
        """Return device and workload; the seed of a study is added to that of the device's noise.

        Raises:
            UnknownName: If there is no such board, model or knob.
            InvalidInput: If it is not a simulated board, or the model does not fit into its memory.
        """
        uri = DeviceURI.parse(self.device)
        if uri.scheme != "sim":
            raise InvalidInput(f"{self.device} is not a simulated board; only of sim:<board> the truth is known")
        options = {**uri.options, "seed": uri.count("seed", 0) + seed}
        own = None if self.knobs is None else [name for name in self.knobs if name != BATCH_SIZE]
        text = f"sim:{uri.name}?{'&'.join(f'{key}={value}' for key, value in options.items())}"
        device: SimulatedDevice = open_device(text, own)  # type: ignore[assignment]  # sim: is always one
        model = load_model(self.workload)
        if self.knobs is not None and BATCH_SIZE not in self.knobs:
            model = replace(model, batch_sizes=(model.batch_default,))
        return device, device.serve(model)


@lru_cache(maxsize=64)
def _opened(source: Simulated, seed: int) -> "tuple[SimulatedDevice, SimulatedWorkload]":
    return source.open(seed)


@lru_cache(maxsize=64)
def _truth(source: Simulated) -> dict[OperatingPoint, Measurement]:
    device, workload = source.open()
    points = list(device.space * workload.space)
    return dict(zip(points, device.expected_all(workload, points), strict=True))


def _within(space: SearchSpace, presets: Iterable[OperatingPoint]) -> tuple[OperatingPoint, ...]:
    """Return the presets as far as a space can set them: knobs that it holds still stay where they are."""
    moved = [space.default.moved(preset.only(space.names)) for preset in presets]
    return tuple(dict.fromkeys(point for point in moved if point in space))


def _reference(name: str, constraint: Constraint, truth: Mapping[OperatingPoint, Measurement]) -> dict[str, float]:
    """Return the bounded metric at the fastest point."""
    values = [measured.metric(constraint.metric) for measured in truth.values()]
    fastest = min(truth.values(), key=lambda measured: measured.latency.mean_s).metric(constraint.metric)
    if fastest is None or None in values:
        raise InvalidInput(f"{name} does not record {constraint.metric} in every row, so {constraint} cannot be judged")
    return {constraint.metric: fastest}


def _checked(name: str, posed: Subject) -> Subject:
    if not any(map(posed.judge.holds, posed.truth.values())):
        raise InvalidInput(f"no row of {name} holds {', '.join(map(str, posed.problem.constraints))}")
    return posed


def tables(pattern: str) -> list[Path]:
    """Return the tables a folder, a file or a pattern means, sorted.

    Raises:
        BadFile: If it means none.
    """
    path = Path(pattern)
    found = (
        [one for ending in ENDINGS for one in path.glob(f"*{ending}")]
        if path.is_dir()
        else map(Path, glob.glob(pattern))
    )
    files = sorted(path for path in found if path.is_file())
    if not files:
        raise BadFile(
            f"{pattern} means no table; give a folder, a file or a pattern of .csv, .csv.gz or .parquet tables"
        )
    return files


def device_uris(text: str) -> list[str]:
    """Return the device URIs of a list; their options may hold commas too."""
    return [part.strip() for part in re.split(r",\s*(?=[a-z]+:)", text) if part.strip()]


def simulations(
    devices: Sequence[str], workloads: Sequence[str] = WORKLOADS, knobs: Sequence[str] | None = None
) -> list[Simulated]:
    """Return every workload on every simulated device.

    Args:
        devices: ``sim:<board>``, options included.
        workloads: Names of models in the catalogue.
        knobs: Which knobs are searched; see `Simulated`.
    """
    chosen = None if knobs is None else tuple(knobs)
    return [Simulated(device, workload, chosen) for device in devices for workload in workloads]


# Earlier studies a search may learn from: tables and journals, named or found beside a subject.

LEAVE_ONE_OUT = "leave-one-out"
_JOURNALS = (".jsonl",)


def files(pattern: str) -> tuple[Path, ...]:
    """Return the tables and journals a folder, a file or a pattern means, folders with all below them; sorted.

    Raises:
        BadFile: If it means none, one of them cannot be read, or none holds a completed trial.
    """
    path = Path(pattern)
    found = path.rglob("*") if path.is_dir() else map(Path, glob.glob(pattern, recursive=True))
    named = sorted(path for path in found if path.name.endswith((*ENDINGS, *_JOURNALS)) and path.is_file())
    if not named:
        raise BadFile(f"{pattern} holds no history; give {LEAVE_ONE_OUT}, or tables (.csv) and journals (.jsonl)")
    told = tuple(path for path in named if study_of(path).completed)
    if not told:
        raise BadFile(f"{pattern} holds no completed trial to learn from")
    return told


def siblings(path: Path, among: Iterable[Path] = ()) -> tuple[Path, ...]:
    """Return the other tables of the same source and device: those beside a table, and those among some others.

    Args:
        path: The table; ``<source>__<device>__<workload>.csv``, without siblings if it is named otherwise.
        among: Tables elsewhere.
    """
    source, _, rest = path.name.partition("__")
    device, parted, _ = rest.partition("__")
    if not parted:
        return ()
    beside = (one for ending in ENDINGS for one in path.parent.glob(f"{glob.escape(f'{source}__{device}__')}*{ending}"))
    near = {one.resolve() for one in (*beside, *among) if one.name.startswith(f"{source}__{device}__")}
    return tuple(sorted(near - {path.resolve()}))


def nearest(paths: Iterable[Path], problem: Problem, own: Path | None = None) -> tuple[Path, ...]:
    """Return the files to learn a problem from, at most `past.MOST`: those of its device first, then of its knobs.

    Args:
        paths: Tables and journals.
        problem: What will be searched.
        own: The table that poses it, left out: nobody learns from the answer.
    """
    others = [path for path in paths if own is None or path.resolve() != own.resolve()]
    return tuple(
        sorted(others, key=lambda path: (*_strangeness(study_of(path).problem, problem), path))[: study_store.MOST]
    )


def _strangeness(one: Problem, two: Problem) -> tuple[bool, bool]:
    return one.device != two.device, set(one.space.names) != set(two.space.names)


@lru_cache(maxsize=512)
def study_of(path: Path) -> Study:
    """Return the study a table or a journal amounts to; a table's device and workload are those its name tells.

    Raises:
        BadFile: If it is neither.
    """
    told = study_store.lesson(path).study
    if not path.name.endswith(ENDINGS):
        return told
    device, workload = TableFile(path).words
    return replace(told, problem=replace(told.problem, device=device, workload=workload))
