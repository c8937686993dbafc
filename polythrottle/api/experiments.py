"""What is measured without a search: one point, every point, or any block of code; and who shows progress meanwhile."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from polythrottle.api.tuning_result import show_point
from polythrottle.backends import open_device
from polythrottle.domain.errors import InvalidInput, UnknownName
from polythrottle.domain.measurement import Measurement, Window
from polythrottle.domain.ports import Device, EnergyMeter, Meter, Noting, PowerMeter, Readable, Workload
from polythrottle.domain.problem import Constraint
from polythrottle.domain.space import Knob, Level, OperatingPoint, SearchSpace
from polythrottle.domain.study import Study
from polythrottle.domain.units import meant, no_level, show_level
from polythrottle.storage.atomic_file import temporary_folder
from polythrottle.tuning.objects import Served
from polythrottle.tuning.remarks import afterwards
from polythrottle.tuning.setup import Setup

if TYPE_CHECKING:
    import pandas as pd

    from polythrottle.metering.energy import Attribution
    from polythrottle.metering.energy_block import EnergyBlock
    from polythrottle.tuning.sweep import Swept

# Who shows progress while a function of the package runs: a terminal, a notebook's cell, or nobody.


class Watcher(Protocol):
    """Somebody who looks on while a study runs."""

    def opened(self, study: Study, journal: Path, trials: int) -> None:
        """Take note of the study, the file it is kept in, and how many trials it shall have."""

    def changed(self, study: Study) -> None:
        """Take note that a trial started or ended, or a preset was measured."""

    def told(self, text: str) -> None:
        """Take note of a line a user should read, such as what the search learns from."""


class NoProgress:
    """A watcher that does nothing."""

    def opened(self, study: Study, journal: Path, trials: int) -> None:
        """Do nothing."""

    def changed(self, study: Study) -> None:
        """Do nothing."""

    def told(self, text: str) -> None:
        """Do nothing."""


@contextlib.contextmanager
def study_progress(
    progress: bool | None, watcher: Watcher | None, to_go_on: Callable[[Path], str]
) -> Iterator[Watcher]:
    """Yield who looks on while a study runs.

    Args:
        progress: Whether to show it; if None, on a terminal and in a notebook.
        watcher: Somebody else who looks on; nothing is shown then unless ``progress`` is true.
        to_go_on: Returns how a study that was interrupted is continued, by its journal.
    """
    if watcher is not None or not _shown(progress):
        yield watcher or NoProgress()
        return
    from polythrottle.api.progress import LiveStudy, NotebookStudy

    if in_notebook():
        with NotebookStudy() as shown_here:
            yield shown_here
    else:
        with LiveStudy(to_go_on=to_go_on) as shown:
            yield shown


@contextlib.contextmanager
def sweep_progress(
    progress: bool | None, advanced: Callable[[int, int, OperatingPoint], None] | None
) -> Iterator[Callable[[int, int, OperatingPoint], None]]:
    """Yield what is called after each point of a sweep.

    Args:
        progress: As of `study_progress`.
        advanced: Somebody else to call; nothing is shown then.
    """
    if advanced is not None or not _shown(progress):
        yield advanced or (lambda done, total, point: None)
        return
    from polythrottle.api.progress import LiveSweep, NotebookSweep

    bar = NotebookSweep if in_notebook() else LiveSweep
    with bar() as shown:
        yield shown.advanced


def in_notebook() -> bool:
    """Return whether this runs in a notebook's kernel, which shows HTML."""
    # Not imported: who runs in a notebook has loaded it, and nobody else should wait for it.
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    # IPython on a terminal has a shell too, but no kernel, and would print the HTML's name.
    return hasattr(shell, "kernel")


def _shown(progress: bool | None) -> bool:
    if progress is not None:
        return progress
    # Python sets it to None where the process was started with it closed.
    return in_notebook() or (sys.stderr is not None and sys.stderr.isatty())


# What is measured without a search: one point, every point, or any block of code.

IDLE_S = 1.0
"""How long the device is looked at without work: by `measure`, and by `tune` where the p99 is limited."""


def measure(
    device: str | Device = "auto",
    workload: str | Served | None = None,
    point: Mapping[str, Level] | None = None,
    *,
    preset: str | None = None,
    slo: Sequence[str] | str = (),
    setup: Setup | None = None,
    meter: Meter | None = None,
    window: Window | None = None,
    told: Callable[[str], object] | None = None,
    kept: "Callable[[Attribution], object] | None" = None,
) -> tuple[OperatingPoint, Measurement]:
    """Return the measurement of one point, and the point.

    Args:
        device: Device URI, or a device.
        workload: Workload URI, a workload, a function or a torch module, as of `tune`.
        point: Levels in SI by knob; knobs that are not named stay at their default.
        preset: Start from this preset of the device instead of its default.
        slo: Absolute limits, such as ``ttft_p99<=400ms for prompts<=2048``: those of language models have the requests
            counted that hold all of theirs (`polythrottle.domain.measurement.Goodput`), each class of them apart.
        setup: Device and workload with all their options; its names override both, objects given beside it stay.
        meter: An external meter whose joules count instead of the device's own.
        window: How long to look.
        told: Called with each line a user should read beside the figures.
        kept: Called with the energy of the window request by request (`polythrottle.metering.energy.Attribution`).

    Raises:
        UnknownName: If the device and workload have no such knob or preset.
        InvalidInput: If a knob has no such level; names the nearest. Or if single requests of a recorded table are
            asked for, or a limit is relative.
        PolythrottleError: As `tune`.
    """
    from polythrottle.metering.calibration import passed_over
    from polythrottle.metering.early_stopping import Goal
    from polythrottle.metering.point_measurement import measure as measure_point

    setup = Setup.of(device, workload, meter, setup)
    limits = absolute_limits(slo)
    tell = told or (lambda line: None)
    _check_start(preset, point)
    board, served = setup.open()
    with setup.closing(served), board:
        start = OperatingPoint({})
        if preset is not None:
            start = _preset(board, preset)
        whole = start.moved(_point(board.space * served.space, {**start, **(point or {})}, start))
        before = notes(served)
        for line in (*passed_over(board), *before):
            tell(line)
        looks = window or replace(setup.window(board), idle_s=IDLE_S)
        # Judged and not held: whoever asks how a point does wants all of its window.
        goal = Goal(judged=limits)
        found = measure_point(board, served, whole, looks, arrivals=setup.traffic, goal=goal, kept=kept)
        # What a workload learns about itself only while it serves.
        late = tuple(line for line in notes(served) if line not in before)
        for line in (*late, *afterwards(found, looks, setup.traffic, setup.seconds)):
            tell(line)
        return whole, found


def _check_start(preset: str | None, point: Mapping[str, Level] | None) -> None:
    """Check the kinds of what Python passes as it is and the command line has parsed."""
    if point is not None and not isinstance(point, Mapping):
        raise InvalidInput(f"a point is levels by knob, such as {{'batch_size': 4}}, not {point!r}")
    if preset is not None and not isinstance(preset, str):
        raise InvalidInput(f"a preset is the name of one, not {preset!r}")
    for name, level in (point or {}).items():
        # To Python True is the number 1, which may well be a level.
        if isinstance(level, bool) or not isinstance(level, int | float | str):
            raise InvalidInput(f"a level of {name} is a number or a word, not {level!r}")


def slo_texts(slo: Sequence[str] | str) -> tuple[str, ...]:
    """Return constraints as texts, one or many.

    Raises:
        InvalidInput: If they are something else.
    """
    if isinstance(slo, str):
        return (slo,)
    if not isinstance(slo, Sequence) or not all(isinstance(text, str) for text in slo):
        raise InvalidInput(f"an SLO is a text such as 'p99<=25ms', or a list of them, not {slo!r}")
    return tuple(slo)


def absolute_limits(slo: Sequence[str] | str) -> tuple[Constraint, ...]:
    """Return the limits that one point is looked at for.

    Raises:
        InvalidInput: If one is a multiple of what another point does, or none at all.
    """
    limits = tuple(map(Constraint.parse, slo_texts(slo)))
    if multiple := next((limit for limit in limits if limit.relative), None):
        raise InvalidInput(f"{multiple}: of one point there is no default to be a multiple of; write it as p99<=25ms")
    return limits


def energy(*devices: str | Device | Meter) -> "EnergyBlock":
    """Return a context manager that measures what devices draw while its block runs.

        with polythrottle.energy("nvml:0") as e:
            train_one_epoch()
        print(e.joules, e.interval, e.seconds, e.watts, e.kind, e.boundary)

    It only reads: no clock is touched, and no right is needed but that of reading. The interval holds with 95 % what
    this very block drew, as far as the sensor is known; where the block was too short for the sensor to say, the joules
    are nan or the interval has no upper end, and ``e.notes`` says why.

    A simulated board exists in virtual time, which passes only while it works: open one with `Setup.open`, give the
    device here, and query the workload in the block. By its URI alone nothing can be served on it.

    Args:
        devices: Device URIs, devices or external meters (`polythrottle.domain.ports`), whose joules are added up;
            the real device that is here if none is given.

    Raises:
        InvalidInput: On entering, if one is a recorded table or named twice, or simulated and real ones are mixed.
        DeviceError: On entering, if a device is not there or cannot tell its energy.
        PolythrottleError: On entering, as `polythrottle.tune` where a URI is opened.
    """
    from polythrottle.metering.energy_block import EnergyBlock

    return EnergyBlock(lambda: [_readable(each) for each in _distinct(devices) or ("auto",)])


def _distinct(devices: Sequence[str | Device | Meter]) -> Sequence[str | Device | Meter]:
    """Return what is to be measured, each once.

    Raises:
        InvalidInput: If one is named twice.
    """
    for number, each in enumerate(devices):
        if any(each is other or (isinstance(each, str) and each == other) for other in devices[:number]):
            raise InvalidInput(f"{each} is named twice, and its joules would count twice")
    return devices


def _readable(source: str | Device | Meter) -> Readable:
    from polythrottle.backends.meters import MeterReader

    if isinstance(source, str):
        return open_device(source)
    if isinstance(source, EnergyMeter | PowerMeter):
        return MeterReader(source)
    if missing := [name for name in ("uri", "clock", "boundary", "read") if not hasattr(source, name)]:
        raise InvalidInput(f"{type(source).__name__} is no device and no meter: it has no {missing[0]}")
    return source


def sweep(
    device: str | Device = "auto",
    workload: str | Served | None = None,
    out: Path | str | None = None,
    *,
    setup: Setup | None = None,
    meter: Meter | None = None,
    window: Window | None = None,
    progress: bool | None = None,
    advanced: Callable[[int, int, OperatingPoint], None] | None = None,
) -> "pd.DataFrame":
    """Measure every point of the space and return the table as a pandas frame, SI units, the unit last in each name.

    Args:
        device: Device URI, or a device.
        workload: Workload URI, a workload, a function or a torch module, as of `tune`.
        out: Where the table is kept as well, a ``.csv`` or ``.parquet`` file that ``replay:`` can serve; a table this
            began is continued. None keeps nothing.
        setup: Device and workload with all their options; its names override both, objects given beside it stay.
        meter: An external meter whose joules count instead of the device's own.
        window: How long to look at each point.
        progress: Whether to show a bar; if None, on a terminal and in a notebook.
        advanced: Called after each point: how many are done, of how many, and which.

    Returns:
        A row for each point; those that could not be measured come last, and ``failure`` says why.

    Raises:
        BadFile: If the file holds something else than the beginning of this sweep.
        StorageError: If it cannot be written.
        TrialError: If no point at all could be measured.
        PolythrottleError: As `tune`.
    """
    # Rows go to disk one by one in any case; without a name, to where nobody keeps them.
    with temporary_folder() as folder:
        table = Path(out or folder / "sweep.csv")
        return swept(Setup.of(device, workload, meter, setup), table, window, progress, advanced).to_dataframe()


def swept(
    setup: Setup,
    out: Path,
    window: Window | None = None,
    progress: bool | None = None,
    advanced: Callable[[int, int, OperatingPoint], None] | None = None,
) -> "Swept":
    """Do what `sweep` does, and return where the table is and how many points were measured, kept and failed.

    Raises:
        PolythrottleError: As `sweep`.
    """
    from polythrottle.storage.tables import check_writable
    from polythrottle.tuning.sweep import sweep as sweep_points

    check_writable(out)
    board, served = setup.open()
    setup.check_placed(board, served)
    with setup.closing(served), sweep_progress(progress, advanced) as tell:
        return sweep_points(board, served, window or setup.window(board), out, tell, setup.traffic)


def _preset(board: Device, name: str) -> OperatingPoint:
    presets = board.presets
    own = meant(name, presets, begun=True)
    if own is None:
        raise UnknownName(f"preset of {board.title}:", name, presets)
    return presets[own]


def _point(space: SearchSpace, levels: Mapping[str, Level], held: OperatingPoint) -> OperatingPoint:
    """Return the point of a space with these levels; knobs that a preset holds need not be in the space."""
    asked = {name: level for name, level in levels.items() if name in space.names or name not in held}
    levels = {name: _own(space.knob(name), level) for name, level in asked.items()}
    for name, level in levels.items():
        knob = space.knob(name)
        if level not in knob.levels:
            near = sorted(knob.levels, key=lambda known: _distance(known, level))[:3]
            shown = ", ".join(show_level(name, each) for each in near)
            raise InvalidInput(no_level(name, level, knob.levels, f"the nearest are {shown}"))
    point = space.default.moved(levels)
    if point not in space:
        raise InvalidInput(f"{show_point(point)} is not a point of this space; its knobs depend on each other")
    return point


def _own(knob: Knob, level: Level) -> Level:
    """Return a level as the knob has it: words, such as names of power modes, may be spelled otherwise."""
    if not isinstance(level, str):
        return level
    return meant(level, (each for each in knob.levels if isinstance(each, str))) or level


def _distance(known: Level, asked: Level) -> float:
    if not isinstance(known, str) and not isinstance(asked, str):
        return abs(known - asked)
    return float(known != asked)


def notes(served: Workload) -> tuple[str, ...]:
    """Return what a workload knows about its figures, a line each."""
    if isinstance(served, Noting):
        return served.notes
    return ()
