"""A Jetson board: its clocks set within the limits found on it, its power integrated from its own sensors."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from polythrottle.actuation.actuator import ActuatedDevice, Actuator
from polythrottle.actuation.drivers.all_controls import SystemControls
from polythrottle.actuation.drivers.controls import Controls, trust
from polythrottle.actuation.limits import Limits
from polythrottle.backends.jetson.identity_and_throttling import BoardId, OverCurrent, Thermal, board_files
from polythrottle.backends.jetson.knobs import Knobs, knob_behind
from polythrottle.backends.jetson.power_rails import (
    PowerSource,
    RailSensors,
    Sampler,
    Total,
    averaged_s,
    find_rails,
    find_total,
)
from polythrottle.backends.probe import Tree
from polythrottle.catalog import Board
from polythrottle.domain.clock import Clock, SystemClock
from polythrottle.domain.errors import DeviceError, InvalidInput, TrialError, UnknownName
from polythrottle.domain.measurement import EnergyKind, Reading
from polythrottle.domain.ports import Finding, Offer, Sensor, usual_sensor
from polythrottle.domain.space import OperatingPoint, SearchSpace

if TYPE_CHECKING:
    from typing_extensions import Self

HZ = 10.0
_OPTIONS = ("factor", "hz", "reader", "root")
_READERS = ("jtop",)
_REMEMBER_S = 60.0


class JetsonDevice(ActuatedDevice):
    """A Jetson board.

    Its knobs are those whose files are there, can be written and hold what was written; which are off and why is in
    `findings`. Levels always come from the board's own tables and never lie beyond the limits found on it, so that
    nobody's cap or floor is crossed, nor beyond the administrator's.

    Args:
        root: Where ``sys``, ``proc``, ``etc`` and ``var`` hang.
        hz: How often power is sampled, per second.
        factor: Joules at the wall plug per joule of the board's rails, as calibrated by the user.
        reader: ``jtop`` to read power from a running jetson-stats instead of the sensors.
        knobs: Which knobs to search; the others stay as found. Those that the catalogue says if None.
        clock: For readings and waiting.
        state: Folder for the originals; the user's state folder by default.
        controls: How files are reached.

    Raises:
        InvalidInput: If a figure is not sensible, or there is no folder ``root``.
        UnknownName: If there is no such reader or knob.
        DeviceError: If there is no Jetson, or a knob that was named is off.
        BadFile: If the administrator's limits cannot be understood.
    """

    def __init__(
        self,
        *,
        root: str = "/",
        hz: float = HZ,
        factor: float = 1.0,
        reader: str | None = None,
        knobs: Sequence[str] | None = None,
        clock: Clock | None = None,
        state: Path | None = None,
        controls: Controls | None = None,
    ) -> None:
        _check(root, hz, factor, reader)
        self._hz = hz
        self._cause = ""
        self._options = {"factor": factor, "hz": hz, "reader": reader, "root": root}
        if clock is not None:
            self.clock: Clock = clock
        else:
            self.clock = SystemClock()
        if controls is not None:
            reached: Controls = controls
        else:
            reached = SystemControls()
        self._tree = Tree(Path(root), reached)
        self._board = BoardId.read(self._tree)
        if self._tree.root == Path("/"):
            name = "jetson"
        else:
            name = f"jetson {self._tree.root}"
        trust(self._tree.root)
        self._actuator = Actuator(name, state=state, controls=reached)
        self._named = knobs
        self._knobs = self._probed()
        self._thermal = Thermal(self._tree)
        self._overcurrent = OverCurrent(self._tree, self._board.chip)
        self._open_power(hz, factor, reader)
        self._events = self._spoiling()
        self._slowed_s = -math.inf

    def _open_power(self, hz: float, factor: float, reader: str | None) -> None:
        self._rails = tuple(rail.name for rail in find_rails(self._tree))
        self._total = find_total(self._rails, self._board.entry)
        source: PowerSource | None = None
        if reader == "jtop":
            from polythrottle.backends.jetson.power_rails import JetsonStats

            stats = JetsonStats(self._board.entry)
            self._total = stats.total
            source = stats if stats.total.names else None
        elif self._total.names:
            source = RailSensors(self._tree, self._total.names)
        self._sampler = Sampler(source, self.clock, hz, factor) if source is not None else None

    @classmethod
    def open(cls, options: Mapping[str, str] | None = None, knobs: Sequence[str] | None = None) -> JetsonDevice:
        """Return the device a URI means: ``jetson?hz=20&factor=1.16`` has these two options.

        Args:
            options: What follows the question mark: ``root`` a folder, ``hz``, ``factor``, ``reader=jtop``.
            knobs: Which knobs to search; those that the catalogue says if None.

        Raises:
            UnknownName: If there is no such option, reader or knob.
            InvalidInput: If a value is malformed.
            DeviceError: If there is no Jetson, or a knob that was named is off.
        """
        given = dict(options or {})
        for name in given:
            if name not in _OPTIONS:
                raise UnknownName("option of device jetson", name, _OPTIONS)
        hz = _number("hz", given.get("hz", HZ))
        factor = _number("factor", given.get("factor", 1.0))
        return cls(root=given.get("root", "/"), hz=hz, factor=factor, reader=given.get("reader"), knobs=knobs)

    @property
    def uri(self) -> str:
        """The URI that opens this device again; options at their default are left out."""
        usual = {"factor": 1.0, "hz": HZ, "reader": None, "root": "/"}
        given = {name: value for name, value in self._options.items() if value != usual[name]}
        texts = (f"{name}={f'{value:.15g}' if isinstance(value, float) else value}" for name, value in given.items())
        return f"jetson{'?' if given else ''}{'&'.join(texts)}"

    @property
    def title(self) -> str:
        """The model, and where its tree is if elsewhere."""
        if self._options["root"] == "/":
            elsewhere = ""
        else:
            elsewhere = f" (tree in {self._tree.root})"
        return f"{self._board.title}{elsewhere}"

    @property
    def identity(self) -> Mapping[str, str]:
        """Model, chip and release of software."""
        return self._board.identity

    @property
    def entry(self) -> Board | None:
        """The board's entry in the catalogue, or None if it has none."""
        return self._board.entry

    @property
    def files(self) -> tuple[str, ...]:
        """Every file it reads or may write, as far as it is there."""
        rails = [file for rail in find_rails(self._tree) for file in (*rail.files, *filter(None, [rail.interval]))]
        files = (*board_files(self._tree), *self._knobs.files, *rails, *self._thermal.files, *self._overcurrent.files)
        return tuple(str(file) for file in files if self._tree.there(file))

    @property
    def space(self) -> SearchSpace:
        """The points that may be applied, and the default among them: the board as it was found."""
        return self._knobs.space

    @property
    def energy_kind(self) -> EnergyKind:
        """Measured by the board's own sensors; simulated in a tree elsewhere that no kernel is behind."""
        if self._real:
            return EnergyKind.MEASURED
        return EnergyKind.SIMULATED

    @property
    def _real(self) -> bool:
        elsewhere = self._options["root"] != "/" and self._options["reader"] is None
        return not elsewhere or os.path.ismount(self._tree.root / "sys")

    @property
    def boundary(self) -> str:
        """Which rails the joules cover, what they leave out, and by what they were multiplied."""
        factor = self._options["factor"]
        wall = ""
        if factor != 1.0:
            wall = f"; times {factor:g} for the wall plug, as stated"
        reader = ""
        if self._options["reader"] == "jtop":
            reader = "; as jetson-stats last read it"
        return f"{self._total.boundary}{reader}{wall}{'' if self._real else '; files of a tree, not a board'}"

    @property
    def averaging(self) -> Sensor:
        """How its sensors average now, by their own files; an average shorter than the time between samples does not.

        jetson-stats smooths besides, by its own pace, of which nothing is known.
        """
        own = self._options["reader"] is None
        over_s = 0.0
        if own:
            over_s = averaged_s(self._tree, self._total.names)
        known = usual_sensor("jetson")
        if over_s < 1 / self._hz:
            return known
        source = f"{known.source}; mean over {over_s * 1000:g} ms by its update_interval"
        return replace(known, step_s=over_s, average_s=over_s, source=source)

    @property
    def presets(self) -> Mapping[str, OperatingPoint]:
        """The vendor's named points, from the board's own power modes or else from the catalogue."""
        return {name: self._knobs.default.moved(point) for name, point in self._knobs.presets.items()}

    def findings(self) -> tuple[Finding, ...]:
        """Return what works and what does not, with the reason: the board, each knob, energy, heat, protection."""
        return (
            _board_finding(self._board),
            *self._knobs.findings,
            _energy_finding(self._total, self._rails, self._sampler, self.averaging),
            _heat_finding(self._thermal, self._overcurrent),
        )

    def offers(self) -> tuple[Offer, ...]:
        """Return every knob that works here."""
        return self._knobs.offers

    def altered(self) -> tuple[str, ...]:
        """Return the knobs that no longer hold what was applied last.

        Raises:
            DeviceError: If the board's files are gone.
        """
        found = map(knob_behind, self._actuator.altered())
        return tuple(dict.fromkeys(name for name in found if name is not None))

    def apply(self, point: OperatingPoint) -> None:
        """Set every knob of ``point``, others as found, read back, and wait until the clocks agree.

        Raises:
            KnobRejected: If a level is not one of the board's, is not kept, or does not take effect.
            PermissionDenied: If this process may not write it.
            DeviceError: If the device was not entered or is gone.
            StorageError: If the originals cannot be saved; nothing is written then.
        """
        self._knobs.apply(point, self.clock)
        # What setting the knobs set off itself is not held against the readings that follow.
        self._events = self._spoiling()
        self._slowed_s = -math.inf

    def read(self) -> Reading:
        """Return energy so far, the temperature, the running clocks, and whether the board slowed itself down, now.

        It counts as slowed down for a minute after an over-current event that is not normal on it or a thermal trip, or
        until the next `apply`, so that a window that contains one is known by its end; and for as long as a processor
        runs far below the clock that its governor has asked for.

        Raises:
            DeviceError: If power is unknown on this board, or its sensors cannot be read any more.
            TrialError: If power was not sampled for a while, so that the joules are not known.
        """
        if self._sampler is None:
            raise DeviceError(f"{self._board.title} cannot be tuned or measured: its energy is {self._total.boundary}")
        temperature_c, hot = self._thermal.look()
        try:
            energy_j = self._sampler.total_j()
        except TrialError:
            self._slowing(temperature_c if hot else None, self._overcurrent.counts())
            raise
        now_s = self.clock.now()
        counts = self._overcurrent.counts()
        clocks_hz = self._knobs.clocks_hz
        cause = self._slowing(temperature_c if hot else None, counts)
        cuts = self._overcurrent.cuts(counts)
        return Reading(
            time_s=now_s,
            energy_j=energy_j,
            temperature_c=temperature_c,
            clocks_hz=clocks_hz,
            throttled=bool(cause),
            cause=cause,
            cuts=cuts.count,
            cut_s=cuts.seconds,
            overrun=self._knobs.overrun(),
        )

    def _spoiling(self) -> Mapping[int, int]:
        return self._overcurrent.spoiling(self._overcurrent.counts())

    def _slowing(self, hot_c: float | None, counts: Mapping[int, int]) -> str:
        """Return what slows the board down, in words; empty if nothing has lately.

        Args:
            hot_c: The temperature, if it is beyond where the kernel begins to slow things down.
            counts: Of over-current events.
        """
        events = self._overcurrent.spoiling(counts)
        now_s = self.clock.now()
        came = [number for number, count in sorted(events.items()) if count > self._events.get(number, 0)]
        self._events = {number: max(count, self._events.get(number, 0)) for number, count in events.items()}
        if came or hot_c is not None:
            heat = [] if hot_c is None else [f"heat: {hot_c:.1f} °C"]
            self._cause = ", ".join([*heat, *map(self._overcurrent.named, came)])
            self._slowed_s = now_s
        lately = ""
        if now_s - self._slowed_s < _REMEMBER_S:
            lately = self._cause
        return ", ".join(filter(None, (lately, self._knobs.held_back(now_s))))

    def restore(self) -> None:
        """Restore everything to how it was found.

        Raises:
            DeviceError: If something cannot be put back; names each.
        """
        self._knobs.forget()
        self._actuator.restore()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Sample power as when entered, without becoming the writer."""
        if self._sampler is not None:
            self._sampler.start()
        try:
            yield
        finally:
            if self._sampler is not None:
                self._sampler.stop()

    def __enter__(self) -> Self:
        self._actuator.__enter__()
        try:
            self._look_again()
        except BaseException:
            self._actuator.__exit__(None, None, None)
            raise
        if self._sampler is not None:
            self._sampler.start()
        return self

    def _look_again(self) -> None:
        """Probe once more: entering has put back what a process that died left, such as cores that were offline."""
        before = self._knobs
        # A GPU that sleeps does not answer for its clocks, and would look as if it had changed.
        with before.awake():
            self._knobs = self._probed()
        if self._knobs.offers != before.offers:
            raise DeviceError(
                f"{self._board.title} changed while it was looked at: a program that died had left it changed, which "
                "is put back now, or another steers it; start again"
            )

    def _probed(self) -> Knobs:
        return Knobs(self._tree, self._actuator, Limits.read(), self._board.entry, self._named)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._knobs.forget()
        try:
            self._actuator.__exit__(kind, error, trace)
        finally:
            if self._sampler is not None:
                self._sampler.stop()


def _check(root: str, hz: float, factor: float, reader: str | None) -> None:
    if not os.path.isdir(root):
        raise InvalidInput(f"there is no folder {root!r} to look for a board in")
    if not 0.1 <= hz <= 1000:
        raise InvalidInput(f"hz must lie between 0.1 and 1000 samples a second, not {hz:g}")
    if not (math.isfinite(factor) and 0.5 <= factor <= 3):
        raise InvalidInput(f"factor must lie between 0.5 and 3, not {factor:g}; 1.16 adds 16 %")
    if reader is not None and reader not in _READERS:
        raise UnknownName("reader", reader, _READERS)


def _number(name: str, text: str | float) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(f"{name}={text!r} is not a number; write for example {name}=1.5") from None


def _board_finding(board: BoardId) -> Finding:
    release = "L4T of unknown release"
    if board.release:
        release = f"L4T {board.release}"
    jetpack = ""
    if board.jetpack:
        jetpack = f" (JetPack {board.jetpack})"
    if board.name:
        where = f"devices/{board.name}.toml"
    else:
        where = "not in devices/, so knobs and rails are what probing found"
    return Finding("board", True, f"{board.title}, {board.chip}, {release}{jetpack}; {where}")


def _energy_finding(total: Total, rails: Sequence[str], sampler: Sampler | None, sensor: Sensor) -> Finding:
    if sampler is None:
        remedy = "check that the ina3221 driver is loaded; without power there is nothing to tune for"
        return Finding("energy", False, total.note, remedy)
    busy_s, samples = sampler.cost
    if samples:
        cost = f"; sampling took {busy_s / samples * 1e6:.0f} µs of processor time a sample"
    else:
        cost = ""
    others = [name for name in rails if name not in total.names]
    parts = ""
    if others:
        parts = f"; besides there are {', '.join(others)}"
    if sensor.average_s:
        mean = f"; each value is the mean over {sensor.average_s * 1000:g} ms"
    else:
        mean = ""
    return Finding("energy", True, f"{total.boundary}{mean}{parts}{cost}")


def _heat_finding(thermal: Thermal, overcurrent: OverCurrent) -> Finding:
    degrees, _ = thermal.look()
    names = ", ".join(zone.name for zone in thermal.zones)
    events = overcurrent.explanation
    if degrees is None:
        return Finding("temperature", False, f"{f'{names} does not answer' if names else 'no zone is known'}; {events}")
    return Finding("temperature", True, f"{degrees:.1f} °C by {names}; {events}")
