"""Power modes (nvpmodel): the board's own file of them, the knob, and the vendor's named points that they give."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polythrottle.actuation.actuator import Actuator
from polythrottle.actuation.drivers.controls import Control
from polythrottle.backends.probe import Capability, Tree, unavailable
from polythrottle.catalog import Board
from polythrottle.domain.backports import removesuffix
from polythrottle.domain.errors import KnobRejected, PolythrottleError
from polythrottle.domain.ports import Finding
from polythrottle.domain.space import Level, OperatingPoint
from polythrottle.domain.units import show_level

# ``/etc/nvpmodel.conf``: the board's own power modes.
#
# Its blocks, each begun by a line in angle brackets, are ``PARAM`` (names of files), ``POWER_MODEL`` (what a mode
# writes to them) and ``PM_CONFIG``; −1 means no limit, as does 0 for the memory. The watts in a mode's name are a
# name, not a budget (NVIDIA Jetson Linux developer guide, "Supported Modes and Power Efficiency").

_HEAD = re.compile(r"<\s*(PARAM|POWER_MODEL|PM_CONFIG|FAN_CONFIG|FAN_MODE|\w+)\b([^>]*)>")
_PAIR = re.compile(r"(\w+)\s*=\s*(\S+)")
_TWIN = "_KNEXT"  # the same limit's file under another kernel


@dataclass(frozen=True)
class PowerMode:
    """One mode.

    Args:
        number: What nvpmodel calls it by.
        name: What people call it.
        values: What it writes, by parameter and argument.
    """

    number: int
    name: str
    values: Mapping[tuple[str, str], str]

    def limit(self, parameter: str, argument: str = "MAX_FREQ") -> int | None:
        """Return a limit in the unit of its file, or None where the mode sets none."""
        text = self.values.get((parameter, argument), "")
        if re.fullmatch(r"\d{1,18}", text) and int(text) > 0:
            return int(text)
        return None


@dataclass(frozen=True)
class PowerModes:
    """What the file says.

    Args:
        files: For every parameter the files its arguments stand for.
        modes: In the order of the file.
    """

    files: Mapping[str, Mapping[str, str]]
    modes: tuple[PowerMode, ...]

    @classmethod
    def parse(cls, text: str) -> PowerModes:
        """Return what a file says; lines that say nothing known are passed over, a repeated mode counts once."""
        files: dict[str, dict[str, str]] = {}
        modes: dict[int, PowerMode] = {}
        for kind, given, lines in _blocks(text):
            if kind == "PARAM" and "NAME" in given:
                # A parameter of TYPE=HWMON has folder and file as two words.
                files[given["NAME"]] = {words[0]: "/".join(words[1:]) for words in lines if len(words) in (2, 3)}
            elif kind == "POWER_MODEL" and given.get("ID", "").isdecimal() and len(given["ID"]) < 4:
                values = {(words[0], words[1]): words[2] for words in lines if len(words) == 3}
                number = int(given["ID"])
                # The files of 2017 name paths in place of parameters: nothing is known of what such a mode sets.
                if values or not any(lines):
                    modes.setdefault(number, PowerMode(number, given.get("NAME", str(number)), values))
        return cls(files, tuple(modes.values()))

    def parameters(self, *endings: str) -> tuple[str, ...]:
        """Return the parameters one of whose files ends so, its twin under another kernel counted too."""
        return tuple(
            name for name, arguments in self.files.items() if any(path.endswith(endings) for path in arguments.values())
        )

    def cores(self, mode: PowerMode) -> int | None:
        """Return how many cores a mode leaves online, or None if it says nothing of them.

        The first core is always online, and the files of TX2 do not list it (nvpmodel_t186.conf).
        """
        switched = {key: value for key, value in mode.values.items() if key[0].startswith("CPU_ONLINE")}
        if not switched:
            return None
        listed = any(self.files.get(name, {}).get(each, "").endswith("/cpu0/online") for name, each in switched)
        return list(switched.values()).count("1") + (0 if listed else 1)

    def switched_on(self, mode: PowerMode) -> Sequence[str]:
        """Return the files of the cores that a mode switches on."""
        keys = (key for key, value in mode.values.items() if key[0].startswith("CPU_ONLINE") and value == "1")
        paths = (self.files.get(name, {}).get(argument, "") for name, argument in keys)
        return [path for path in paths if path.endswith("/online")]

    def current_limits(self, mode: PowerMode) -> Mapping[str, int]:
        """Return the over-current limits that a mode sets, as on Xavier NX, in mA by parameter and argument."""
        return {
            f"{name} {argument}": int(value)
            for (name, argument), value in mode.values.items()
            if _is_sensor(self.files.get(name, {})) and re.fullmatch(r"\d{1,9}", value)
        }

    def fixed(self, mode: PowerMode) -> Mapping[tuple[str, str], str]:
        """Return what a mode sets besides clocks, cores, runtime power and current limits: it may take a reboot."""
        switched = {name for name, arguments in self.files.items() if _harmless(arguments)}
        return {key: value for key, value in mode.values.items() if key[0] not in switched}


def _harmless(arguments: Mapping[str, str]) -> bool:
    clock = any(removesuffix(name, _TWIN) in ("MAX_FREQ", "MIN_FREQ", "FREQ_TABLE") for name in arguments)
    switches = all(path.endswith(("/online", "/power/control")) for path in arguments.values())
    return clock or switches or _is_sensor(arguments)


def _is_sensor(arguments: Mapping[str, str]) -> bool:
    """Say whether a parameter's files are limits of a sensor, which it may change at any time."""
    return bool(arguments) and all("/hwmon/" in path for path in arguments.values())


def _blocks(text: str) -> Iterator[tuple[str, dict[str, str], list[list[str]]]]:
    """Yield kind, attributes and the words of the lines of every block."""
    head: tuple[str, dict[str, str]] | None = None
    lines: list[list[str]] = []
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        match = _HEAD.match(" ".join(words))
        if match is None:
            lines.append(words)
            continue
        if head is not None:
            yield (*head, lines)
        head = (match[1], dict(_PAIR.findall(match[2])))
        lines = []
    if head is not None:
        yield (*head, lines)


# The board's power mode (nvpmodel): a knob of names, and the source of the vendor's presets.
#
# A mode is offered only if switching to it needs no reboot, that is if it differs from the present one in clocks,
# cores and runtime power alone, and if none of its limits lies above those found. The present mode is read from
# ``/var/lib/nvpmodel/status``, for ``nvpmodel -q`` needs root, can hang under load, and says nothing in a container.
#
# A limit that a mode states goes to the nearest level of the board's own table: 670 MHz holds 675.75 on an AGX Xavier
# (iloudaros/LoudVA), 640 holds 614.4 on a Nano. Neither the status file nor nvpmodel's exit status proves that a mode
# applies, so the limits are read back once it was switched to.

NAME = "power_mode"
_CONF = "etc/nvpmodel.conf"
_STATUS = "var/lib/nvpmodel/status"
_CPU = ("/scaling_max_freq",)
_CPUS = "sys/devices/system/cpu"
_RANGES = {"gpu_max_hz": "the GPU", "mem_hz": "the memory", "cpu_max_hz": "the CPU"}
_EMC = ("/emc", "/emc_iso_cap")


class Mode:
    """The power mode.

    Args:
        tree: The board's files.
        actuator: Knows the mode as it was before anyone tuned it.
        gpu_folder: Devfreq folder of the GPU, by whose name its parameter is known.
    """

    def __init__(self, tree: Tree, actuator: Actuator, gpu_folder: Path | None) -> None:
        self._tree = tree
        self._actuator = actuator
        self._key = f"nvpmodel:{tree.root}"
        self._conf = tree.below(_CONF)
        self._file = PowerModes.parse(tree.text(self._conf) or "")
        self._gpu = self._gpu_parameters(gpu_folder)
        self._numbers: dict[str, int] = {}
        self._tables: Mapping[str, Sequence[int]] = {}
        self._present: PowerMode | None = None
        self._limit_files = _limit_files(tree, gpu_folder)
        self.capability = unavailable([NAME], "not looked at yet")[0]

    @property
    def files(self) -> tuple[Path, ...]:
        """What it reads."""
        return self._conf, self._tree.root / _STATUS

    @property
    def modes(self) -> tuple[PowerMode, ...]:
        """Every mode of the board."""
        return self._file.modes

    def _gpu_parameters(self, folder: Path | None) -> tuple[str, ...]:
        name = folder.name if folder is not None else "gpu"
        return self._file.parameters(f"/{name}/max_freq") or tuple(
            each for each in self._file.files if each.startswith(("GPU", "GPC"))
        )

    def limits(self, mode: PowerMode) -> Mapping[str, int]:
        """Return the limits a mode sets, by knob in SI; where clusters differ, the lowest."""
        found: dict[str, int] = {}
        for knob, parameters, argument, unit_hz in (
            ("gpu_max_hz", self._gpu, "MAX_FREQ", 1),
            ("gpu_min_hz", self._gpu, "MIN_FREQ", 1),
            ("cpu_max_hz", self._file.parameters(*_CPU), "MAX_FREQ", 1000),
            ("mem_hz", self._file.parameters(*_EMC), "MAX_FREQ", 1),
        ):
            stated = [limit for each in parameters if (limit := mode.limit(each, argument)) is not None]
            if stated:
                found[knob] = min(stated) * unit_hz
        cores = self._file.cores(mode)
        if cores is not None:
            return {**found, "cpu_cores": cores}
        return found

    def probe(self, tables: Mapping[str, Sequence[int]], highest: Mapping[str, Level]) -> None:
        """Find out which modes may be switched to.

        Args:
            tables: For each knob everything its driver offers, ascending, limits aside.
            highest: For each knob that works the highest level between the limits found.
        """
        self._tables = tables
        self.capability = self._probed(tables, highest)
        if self.capability.works:
            texts = frozenset(str(self._numbers[str(name)]) for name in self.capability.levels)
            self._actuator.allow(Control(self._key, texts, persistent=True))

    def _probed(self, tables: Mapping[str, Sequence[int]], highest: Mapping[str, Level]) -> Capability:
        if not self.modes:
            return unavailable([NAME], f"{self._tree.root / _CONF} is not there or names no mode")[0]
        try:
            number = self._actuator.original(self._key)
        except PolythrottleError as err:
            return unavailable([NAME], f"cannot tell the present mode: {err}")[0]
        present = next((mode for mode in self.modes if str(mode.number) == number), None)
        if present is None:
            return unavailable([NAME], f"the present mode, {number}, is not in {self._tree.root / _CONF}")[0]
        self._present = present
        bounds = {**self.reach(present, tables), **highest}
        refused = {mode.name: why for mode in self.modes if (why := self._why_not(mode, present, tables, bounds))}
        self._numbers = {mode.name: mode.number for mode in reversed(self.modes) if mode.name not in refused}
        told = ", ".join(f"{name} ({why})" for name, why in refused.items())
        if len(self._numbers) < 2:
            return unavailable(
                [NAME], f"no other mode can be switched to: {told}" if told else "the board has one mode"
            )[0]
        return Capability(NAME, tuple(sorted(self._numbers)), present.name, f"not offered: {told}" if told else "")

    def _why_not(
        self, mode: PowerMode, present: PowerMode, tables: Mapping[str, Sequence[int]], bounds: Mapping[str, Level]
    ) -> str | None:
        if mode is present:
            return None
        if lacking := self._lacking(mode):
            return f"switches on {' and '.join(lacking)}, which this board does not have"
        if self._file.fixed(mode) != self._file.fixed(present):
            return "needs a reboot"
        most = self._file.current_limits(present)
        for name, milliamperes in self._file.current_limits(mode).items():
            if milliamperes > most.get(name, milliamperes):
                return f"would raise {name} above what was found"
        for knob, level in self.reach(mode, tables).items():
            bound = bounds.get(knob, level)
            if knob != "gpu_min_hz" and not isinstance(bound, str) and level > bound:
                return f"would raise {knob} above what was found"
        return None

    def _lacking(self, mode: PowerMode) -> Sequence[str]:
        """Return the cores that a mode switches on and this board lacks: nvpmodel fails on them, half-way.

        So does MAXN of an Orin NX of 8 GB and six cores, whose file is that of eight (notes on an Ouster OS1 on a CTI
        Hadron carrier, L4T 35: "NVPM ERROR cpu6/online").
        """
        cpus = self._tree.root / _CPUS
        if not self._tree.there(cpus / "cpu0"):
            return ()
        cores = (Path(path).parent.name for path in self._file.switched_on(mode))
        return [core for core in cores if not self._tree.there(cpus / core)]

    def reach(self, mode: PowerMode, tables: Mapping[str, Sequence[int]]) -> Mapping[str, int]:
        """Return the level of each table that a mode's limit ends on: the nearest."""
        limits = self.limits(mode)
        return {knob: nearest(table, limits.get(knob, table[-1])) for knob, table in tables.items() if table}

    def range_findings(self, highest: Mapping[str, Level]) -> Iterator[Finding]:
        """Yield what the mode the board is in hides of its clocks, and the command that shows most of it.

        Args:
            highest: For each knob that works the highest level between the limits found.
        """
        present = self._present
        if present is None:
            return
        found = {knob: int(highest[knob]) for knob in _RANGES if isinstance(highest.get(knob), int)}
        each = [(mode, _above(self.reach(mode, self._tables), found)) for mode in self._usable(present)]
        hidden = [(mode, levels) for mode, levels in each if levels]
        if not hidden:
            return
        widest, levels = max(hidden, key=lambda pair: [pair[1].get(knob, 0) for knob in found])
        stops = " and ".join(f"{_RANGES[knob]} stops at {show_level(knob, found[knob])}" for knob in levels)
        allows = " and ".join(show_level(knob, level) for knob, level in levels.items())
        reboot = ""
        if self._file.fixed(widest) != self._file.fixed(present):
            reboot = ", reboot"
        explanation = f"in {present.name} {stops}; {widest.name} allows {allows}"
        yield Finding("range", True, explanation, f"sudo nvpmodel -m {widest.number}{reboot}, then tune")

    def _usable(self, present: PowerMode) -> Iterator[PowerMode]:
        """Yield the modes beside the present one that this board has all the cores for."""
        yield from (mode for mode in self.modes if mode is not present and not self._lacking(mode))

    def apply(self, name: str) -> None:
        """Switch to a mode, which rewrites the limits of clocks and cores, and read the limits back.

        Raises:
            KnobRejected: If nvpmodel refuses, or says that it switched and a limit is not that of the mode.
        """
        switched = self._actuator.live(self._key) != str(self._numbers[name])
        self._actuator.write(self._key, str(self._numbers[name]))
        if switched and (problem := self._unmoved(self._named(name))) is not None:
            raise KnobRejected(f"nvpmodel says that it switched to {name}, but {problem}")

    def _named(self, name: str) -> PowerMode:
        return next(mode for mode in self.modes if mode.name == name)

    def _unmoved(self, mode: PowerMode) -> str | None:
        """Return which limit is not that of a mode, or None; one level beside the nearest is rounding."""
        reach = self.reach(mode, self._tables)
        stated = {mode.limit(each) for each in self._file.parameters(*_CPU)}
        for knob, (file, unit_hz) in self._limit_files.items():
            held = self._tree.number(file)
            table = self._tables[knob]
            if held is None or knob not in reach or (knob == "cpu_max_hz" and len(stated) > 1):
                continue
            place = table.index(reach[knob])
            near = table[max(0, place - 1) : place + 2]
            if not near[0] <= held * unit_hz <= near[-1]:
                return f"{file} holds {held}"
        return None

    def allows(self, name: str, levels: Mapping[str, Level]) -> bool:
        """Say whether levels of other knobs lie within what a mode allows."""
        mode = self._named(name)
        reach = {**self.limits(mode), **self.reach(mode, self._tables)}
        for knob, most in reach.items():
            level = levels.get(knob)
            if knob != "gpu_min_hz" and isinstance(level, (int, float)) and level > most:
                return False
        return True


def nearest(table: Sequence[int], wanted: float) -> int:
    """Return the level of a table that a limit ends on: the nearest, of two as near the lower."""
    return min(table, key=lambda level: (abs(level - wanted), level))


def _above(reach: Mapping[str, int], found: Mapping[str, int]) -> Mapping[str, int]:
    """Return the levels of a mode that lie above those found."""
    return {knob: reach[knob] for knob, level in found.items() if knob in reach and reach[knob] > level}


def _limit_files(tree: Tree, gpu_folder: Path | None) -> Mapping[str, tuple[Path, int]]:
    """Return where the limit of a knob is read back, and its unit in Hz."""
    if gpu_folder is None:
        gpu = {}
    else:
        gpu = {"gpu_max_hz": (gpu_folder / "max_freq", 1)}
    return {**gpu, "cpu_max_hz": (tree.root / "sys/devices/system/cpu/cpufreq/policy0/scaling_max_freq", 1000)}


# The vendor's named points of a board, from its own power modes or, where they cannot be read, from the catalogue.
#
# A power mode is expressed by the knobs it limits. What has no knob, such as cores that it takes offline, is left
# out, and so is a mode that goes beyond the limits found on the board.

_KNOBS = ("gpu_max_hz", "mem_hz", "cpu_max_hz")


def presets(
    mode: Mode, entry: Board | None, tables: Mapping[str, Sequence[int]], knobs: Mapping[str, Capability]
) -> tuple[Mapping[str, OperatingPoint], str]:
    """Return the named points of a board, and where they come from.

    Args:
        mode: The board's own modes.
        entry: Its entry in the catalogue, if any.
        tables: For each knob everything its driver offers, limits aside.
        knobs: The knobs that work.
    """
    own = {each.name: mode.reach(each, tables) for each in mode.modes}
    if own:
        points = {name: _within(levels, knobs) for name, levels in own.items()}
        return {name: point for name, point in points.items() if point}, "the board's own power modes (nvpmodel.conf)"
    if entry is None:
        return {}, "none: the board has no readable nvpmodel.conf and no entry in devices/"
    points = {name: _within(_rounded(point, tables), knobs) for name, point in entry.presets.items()}
    return {name: point for name, point in points.items() if point}, f"devices/{entry.name}.toml"


def _rounded(point: Mapping[str, Level], tables: Mapping[str, Sequence[int]]) -> Mapping[str, int]:
    """Return a point of the catalogue in the board's own steps, each the nearest."""
    wanted = {knob: level for knob, level in point.items() if isinstance(level, (int, float))}
    return {knob: nearest(table, wanted[knob]) for knob, table in tables.items() if table and knob in wanted}


def _within(levels: Mapping[str, int], knobs: Mapping[str, Capability]) -> OperatingPoint | None:
    """Return the levels that have a knob, or None if one of them is not a level of it."""
    wanted = {name: levels[name] for name in _KNOBS if name in knobs and name in levels}
    if not wanted or any(level not in knobs[name].levels for name, level in wanted.items()):
        return None
    return OperatingPoint(dict(wanted))
