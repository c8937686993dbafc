"""What a board or GPU shows of everything that is assumed of its kind, by reading alone.

``assumed.toml`` lists what is assumed of boards and GPUs without a public record. Of a part of a Jetson it says, for
each board whose stand-in has it, what a look (`board_probes`) is expected to show; of GPUs likewise (`gpu_probes`).
What no reading can show is listed without a look.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any

from polythrottle.actuation.drivers.all_controls import SystemControls
from polythrottle.actuation.drivers.nvml import Library, NotOffered
from polythrottle.backends import DeviceURI, open_device
from polythrottle.backends.jetson.clocks import find_gpu_folder
from polythrottle.backends.jetson.identity_and_throttling import COUNTERS, BoardId
from polythrottle.backends.jetson.memory_clock import rates_hz
from polythrottle.backends.jetson.power_modes import PowerModes
from polythrottle.backends.nvml import NvmlDevice, NvmlGroup
from polythrottle.backends.nvml.energy import CounterScope, EnergyCounter, energy_source, module_w
from polythrottle.backends.nvml.gpu import Gpu, Slowdowns
from polythrottle.backends.nvml.gpu import find as find_gpu
from polythrottle.backends.probe import Tree
from polythrottle.domain.clock import Clock
from polythrottle.domain.errors import DeviceError, InvalidInput, KnobRejected
from polythrottle.domain.ports import Device
from polythrottle.inspect.examination import real_devices
from polythrottle.inspect.machine import System
from polythrottle.storage.untrusted import read_toml

_FILE = Path(__file__).with_name("assumed.toml")
_MOST_BYTES = 1 << 20
_FIGURE = re.compile(r"\d+(?:\.\d+)?(?= V\b)")
_NEAR = 0.1  # a rail of 5 V may hold 4.8
_AS = {"jetson-nano-2gb": "jetson-nano"}  # a stand-in that takes its parts over from another


class Agreement(str, Enum):
    """What the board that is here says to an assumption."""

    AGREES = "agrees"
    CONTRADICTS = "contradicts"
    UNSEEN = "not seen here"


@dataclass(frozen=True)
class ProbeResult:
    """What a look has shown.

    Args:
        text: In words.
        agrees: Whether that is what was assumed; None if the words are compared with those expected.
    """

    text: str
    agrees: bool | None = None


@dataclass(frozen=True)
class ProbeFailure:
    """That a look has shown nothing.

    Args:
        why: Such as that a folder is closed to this user.
    """

    why: str


Probe = Callable[[], ProbeResult | ProbeFailure]


@dataclass(frozen=True)
class Assumption:
    """One thing that no public record shows.

    Args:
        part: Such as ``thermal``, or ``GPU energy``.
        assumed: What of it is assumed.
        look: The name of the look that shows it; empty if no reading can.
        boards: What the look is expected to show, by stand-in board or by the driver's name of a GPU; where every GPU
            is meant and the look judges for itself, nothing.
    """

    part: str
    assumed: str
    look: str = ""
    boards: Mapping[str, str] = field(default_factory=dict)

    @property
    def of_gpus(self) -> bool:
        """Whether it is about NVIDIA GPUs and not about Jetson boards."""
        return self.part.startswith("GPU ")

    def expected(self, name: str) -> tuple[str, ...]:
        """Return what may be shown on a board of the catalogue, or a GPU: each of its stand-ins' words."""
        alike = re.compile(rf"{re.escape(_AS.get(name, name))}(-jp\d|-carrier|-super)?")
        return tuple(dict.fromkeys(text for board, text in self.boards.items() if alike.fullmatch(board)))


@dataclass(frozen=True)
class CheckedAssumption:
    """An assumption and what the board that is here shows of it.

    Args:
        part: See `Assumption`.
        assumed: See `Assumption`; with what was expected, where something else is shown.
        shows: What this board shows, or why it shows nothing.
        agreement: How the two compare.
        here: Whether it is assumed of this board and not of others alone.
    """

    part: str
    assumed: str
    shows: str
    agreement: Agreement
    here: bool = True


@cache
def assumptions() -> tuple[Assumption, ...]:
    """Return everything that is assumed, in the order of the documentation."""
    listed = read_toml(_FILE, _MOST_BYTES)["assumption"]
    return tuple(Assumption(**each) for each in listed)


def held_against(name: str, listed: Sequence[Assumption], looks: Mapping[str, Probe]) -> tuple[CheckedAssumption, ...]:
    """Return what a board shows of assumptions.

    Args:
        name: The board's in the catalogue, or the GPU's as its driver gives it; empty if it is not known.
        listed: The assumptions.
        looks: What can be looked at, by name; each is asked once.

    Raises:
        DeviceError: If the board is gone.
    """
    return tuple(_shown(name, each, looks) for each in listed)


def _shown(name: str, each: Assumption, looks: Mapping[str, Probe]) -> CheckedAssumption:
    expected = each.expected(name)
    if each.boards and not expected:
        return CheckedAssumption(
            each.part, each.assumed, f"assumed of {', '.join(each.boards)}", Agreement.UNSEEN, here=False
        )
    if not each.look:
        return CheckedAssumption(each.part, each.assumed, "no reading can show it", Agreement.UNSEEN)
    outcome = looks[each.look]()
    if isinstance(outcome, ProbeFailure):
        return CheckedAssumption(each.part, each.assumed, outcome.why, Agreement.UNSEEN)
    if outcome.agrees is not None:
        agrees = outcome.agrees
    else:
        agrees = any(_alike(outcome.text, text) for text in expected)
    if agrees:
        return CheckedAssumption(each.part, each.assumed, outcome.text, Agreement.AGREES)
    beside = f": {' or: '.join(expected)}" * bool(expected)
    return CheckedAssumption(each.part, each.assumed + beside, outcome.text, Agreement.CONTRADICTS)


def _alike(shown: str, expected: str) -> bool:
    """Return whether two texts say the same, volts to a tenth."""
    if _FIGURE.sub("", shown) != _FIGURE.sub("", expected):
        return False
    pairs = zip(_FIGURE.findall(shown), _FIGURE.findall(expected), strict=True)
    return all(abs(float(one) - float(other)) <= _NEAR * float(other) for one, other in pairs)


# 20 to 100 ms, as far as looks a millisecond apart tell
_LEAST_STEP_S = 0.019
_MOST_STEP_S = 0.105


def gpu_probes(device: NvmlDevice) -> Mapping[str, Probe]:
    """Return the looks at a GPU, by the names that ``assumed.toml`` has.

    Args:
        device: Not entered.
    """
    library = Library(device.clock)
    gpu = find_gpu(library, device.uuid)

    def opened(look: Callable[[Gpu, Clock], ProbeResult | ProbeFailure]) -> Probe:
        def looked() -> ProbeResult | ProbeFailure:
            with library:
                try:
                    return look(gpu, device.clock)
                except KnobRejected as err:  # what the driver does not offer
                    return ProbeFailure(" ".join(str(err).split()))

        return looked

    named = {"clocks": _clocks, "step": _step, "whose": _whose, "reasons": _reasons}
    return {name: opened(look) for name, look in named.items()}


def _clocks(gpu: Gpu, _: Clock) -> ProbeResult | ProbeFailure:
    return ProbeResult(f"{_tables(gpu)}; {_limits(gpu)}")


def _tables(gpu: Gpu) -> str:
    try:
        memory = gpu.ask("nvmlDeviceGetSupportedMemoryClocks")
        rows = [gpu.ask("nvmlDeviceGetSupportedGraphicsClocks", clock) for clock in memory]
    except NotOffered:
        return "lists no clocks"
    graphics = [clock for row in rows for clock in row]
    return f"memory {', '.join(map(str, memory))} MHz, graphics {min(graphics)} to {max(graphics)} MHz"


def _limits(gpu: Gpu) -> str:
    try:
        lowest, highest = gpu.ask("nvmlDeviceGetPowerManagementLimitConstraints")
    except NotOffered:
        return "takes no power limit"
    return f"limits of {lowest / 1000:g} to {highest / 1000:g} W"


def _step(gpu: Gpu, clock: Clock) -> ProbeResult | ProbeFailure:
    source = energy_source(gpu, clock, "gpu")
    if not isinstance(source, EnergyCounter):
        source = energy_source(gpu, clock, "module")
    if not isinstance(source, EnergyCounter):
        return ProbeFailure("there is no energy counter")
    step_s = source.step_s(clock)
    if step_s is None:
        return ProbeFailure("the counter did not move twice in a second: try again under load")
    return ProbeResult(f"every {step_s * 1000:.3g} ms", _LEAST_STEP_S <= step_s <= _MOST_STEP_S)


def _whose(gpu: Gpu, clock: Clock) -> ProbeResult | ProbeFailure:
    if module_w(gpu) is None:
        return ProbeFailure("the driver tells no power of a module around this GPU")
    source = energy_source(gpu, clock, "module")
    if not isinstance(source, EnergyCounter):
        source = energy_source(gpu, clock, "gpu")
    if not isinstance(source, EnergyCounter):
        return ProbeFailure("there is no energy counter")
    if source.whose is CounterScope.UNTOLD:
        return ProbeFailure("GPU and module draw too much alike now to tell: try again under load")
    return ProbeResult(f"it counts {source.whose.value}")


def _reasons(gpu: Gpu, _: Clock) -> ProbeResult | ProbeFailure:
    slowdowns = Slowdowns(gpu).now()
    if slowdowns is None:
        return ProbeResult("the driver has neither call", False)
    return ProbeResult(f"{slowdowns:#x} now", True)


# What a Jetson board shows of what is assumed of its kind: one short text a part, from its files.

_CPU = "sys/devices/system/cpu"
_DEBUG = "sys/kernel/debug"
_LOCKS = (f"{_DEBUG}/bpmp/debug/clk/emc/mrq_rate_locked", f"{_DEBUG}/clk/override.emc/clk_state")
_LISTS = (
    f"{_DEBUG}/bpmp/debug/emc/possible_rates",
    f"{_DEBUG}/bpmp/debug/clk/emc/dvfs*",
    f"{_DEBUG}/clk/emc/clk_possible_rates",
)
_CAPS = ("sys/kernel/nvpmodel_clk_cap/emc", "sys/kernel/nvpmodel_emc_cap/emc_iso_cap")
_ACTIVITIES = (
    f"{_DEBUG}/cactmon/mc_all",
    "sys/kernel/actmon_avg_activity/mc_all",
    f"{_DEBUG}/bpmp/debug/actmon/mc_all_avg_activity",
)
_ADDRESS = re.compile(r"([0-9a-f]+\.i2c)/i2c-\d+/(\d+-00[0-9a-f]{2})(?:/|$)")
_UNCONNECTED = re.compile(r"nc|sum.*", re.IGNORECASE)


def board_probes(tree: Tree) -> Mapping[str, Probe]:
    """Return the looks at a board, by the names that ``assumed.toml`` has.

    Args:
        tree: The board's files; none is written.
    """
    named = {
        "voltages": _voltages,
        "bus": _bus,
        "means": _means,
        "clusters": _clusters,
        "memory": _memory,
        "memory_folder": _memory_folder,
        "rates_text": _rates_text,
        "devfreq": _devfreq,
        "gpu_levels": _gpu_levels,
        "gated_modes": _gated_modes,
        "events": _events,
        "zones": _zones,
        "trips": _trips,
    }
    return {name: partial(look, tree) for name, look in named.items()}


def _text(tree: Tree, path: Path) -> str:
    return " ".join((tree.text(path) or "").split())


def _chips(tree: Tree) -> Iterator[tuple[Path, list[tuple[str, Path]]]]:
    """Yield the folder of every power sensor, with label and file of millivolts of each of its channels."""
    for folder in tree.found("sys/class/hwmon/hwmon*", "sys/bus/iio/devices/iio:device*"):
        names = sorted(folder.glob("in[0-9]*_label")) or sorted(folder.glob("rail_name_*"))
        channels = []
        for name in names:
            file = name.with_name(name.name.replace("_label", "_input").replace("rail_name_", "in_voltage"))
            if not file.name.endswith("_input"):
                file = file.with_name(f"{file.name}_input")
            label = _text(tree, name)
            if label and not _UNCONNECTED.fullmatch(label):
                channels.append((label, file))
        if (tree.text(folder / "name") or "").startswith("ina"):
            yield folder, channels or [("VIN", folder / "in1_input")]


def _voltages(tree: Tree) -> ProbeResult | ProbeFailure:
    told = []
    for folder, channels in _chips(tree):
        volts = {label: tree.number(file) for label, file in channels}
        each = [f"{label} {millivolts / 1000:.3g} V" for label, millivolts in volts.items() if millivolts]
        told.append(f"{folder.name}: {', '.join(each)}")
    if told:
        return ProbeResult("; ".join(told))
    return ProbeFailure("no power sensor of this board can be read")


def _bus(tree: Tree) -> ProbeResult | ProbeFailure:
    found = [match.groups() for folder, _ in _chips(tree) if (match := _ADDRESS.search(str(folder)))]
    buses = dict.fromkeys(bus for bus, _ in found)
    told = (f"{bus} {', '.join(sorted(address for on, address in found if on == bus))}" for bus in buses)
    if found:
        return ProbeResult("; ".join(told))
    return ProbeFailure("no power sensor of this board can be read")


def _means(tree: Tree) -> ProbeResult | ProbeFailure:
    chips = [folder for folder, _ in _chips(tree)]
    if not chips:
        return ProbeFailure("no power sensor of this board can be read")
    spans = {tree.number(folder / "update_interval") for folder in chips} - {None}
    if not spans:
        return ProbeResult("no chip tells an update_interval")
    return ProbeResult(f"means over {', '.join(f'{span} ms' for span in sorted(spans, key=int))}")  # type: ignore[arg-type]


def _clusters(tree: Tree) -> ProbeResult | ProbeFailure:
    if offline := _text(tree, tree.root / _CPU / "offline"):
        return ProbeFailure(f"cores {offline} are offline in this power mode, and their clusters cannot be seen")
    policies = tree.found(f"{_CPU}/cpufreq/policy[0-9]*")
    if not policies:
        return ProbeFailure("this kernel has no cpufreq")
    cores = ", ".join(_text(tree, each / "related_cpus").replace(" ", "+") for each in policies)
    floors = {str(tree.number(each / "scaling_min_freq")) for each in policies}
    driver = _text(tree, policies[0] / "scaling_driver")
    return ProbeResult(f"clusters {cores}; not below {' or '.join(sorted(floors))} kHz; driver {driver}")


def _short(tree: Tree, path: Path) -> str:
    return str(path.relative_to(tree.root)).removeprefix("sys/kernel/").removeprefix("debug/")


def _memory(tree: Tree) -> ProbeResult | ProbeFailure:
    if not tree.found(f"{_DEBUG}/*"):
        return ProbeFailure("debugfs is closed to this user or not mounted: run as root")
    parts = {"lock": _LOCKS, "rates": _LISTS, "cap": _CAPS, "activity": _ACTIVITIES}
    told = [f"{name} {_first(tree, places)}" for name, places in parts.items()]
    return ProbeResult("; ".join(told))


def _first(tree: Tree, places: tuple[str, ...]) -> str:
    found = tree.found(*places)
    return ", ".join(_short(tree, path) for path in found) or "nowhere known"


def _memory_folder(tree: Tree) -> ProbeResult | ProbeFailure:
    found = tree.found("sys/class/devfreq/bwmgr")
    if not found:
        return ProbeFailure("there is no sys/class/devfreq/bwmgr")
    return ProbeResult(f"/{found[0].relative_to(tree.root)}")


def _rates_text(tree: Tree) -> ProbeResult | ProbeFailure:
    text = _text(tree, tree.root / _DEBUG / "bpmp/debug/emc/possible_rates")
    if not text:
        return ProbeFailure("bpmp/debug/emc/possible_rates is closed to this user or not there: run as root")
    unit = text.split()[-1]
    if not rates_hz(text):
        return ProbeResult("a text that is not understood")
    return ProbeResult(f"numbers on one line, the last word is {unit}")


def _devfreq(tree: Tree) -> ProbeResult | ProbeFailure:
    folder = tree.root / "sys/class/devfreq"
    gpu = find_gpu_folder(tree)
    names = sorted(path.name for path in folder.glob("*") if gpu is None or path.name != gpu.name)
    if names:
        return ProbeResult(", ".join(names))
    return ProbeFailure("there is no other folder in sys/class/devfreq")


def _gpu_levels(tree: Tree) -> ProbeResult | ProbeFailure:
    if not any("SUPER" in mode.name for mode in _modes(tree).modes):
        return ProbeFailure("this board does not have the Super modes")
    folder = find_gpu_folder(tree)
    if folder is not None:
        levels = tree.numbers(folder / "available_frequencies")
    else:
        levels = ()
    if not levels:
        return ProbeFailure("the GPU lists no clocks")
    return ProbeResult(f"{', '.join(f'{level / 1e6:g}' for level in levels)} MHz")


def _modes(tree: Tree) -> PowerModes:
    return PowerModes.parse(tree.text(tree.below("etc/nvpmodel.conf")) or "")


def _gated_modes(tree: Tree) -> ProbeResult | ProbeFailure:
    file = _modes(tree)
    if not file.modes:
        return ProbeFailure("/etc/nvpmodel.conf is not there or names no mode")
    first, *others = sorted(file.modes, key=lambda mode: mode.number)
    unlike = []
    for mode in others:
        fixed = file.fixed(mode)
        usual = file.fixed(first)
        names = {name for name, _ in fixed.keys() | usual.keys() if _of(name, fixed) != _of(name, usual)}
        if names:
            unlike.append(f"{mode.name} by {', '.join(sorted(names))}")
    if unlike:
        return ProbeResult(f"unlike {first.name}: {'; '.join(unlike)}")
    return ProbeResult(f"all as {first.name}")


def _of(parameter: str, fixed: Mapping[tuple[str, str], str]) -> Mapping[str, str]:
    return {argument: text for (name, argument), text in fixed.items() if name == parameter}


def _events(tree: Tree) -> ProbeResult | ProbeFailure:
    counters = tree.found(*COUNTERS)
    if not counters:
        return ProbeFailure("no over-current events are counted here")
    folder = counters[0].parent
    kinds = ", ".join(counter.name.partition("_")[0] for counter in counters)
    place = str(folder.relative_to(tree.root)).partition("/hwmon/")[0]
    return ProbeResult(f"{tree.text(folder / 'name')} in {folder.name} of /{place}: {kinds}")


def _zones(tree: Tree) -> ProbeResult | ProbeFailure:
    names = [_text(tree, folder / "type") for folder in tree.found("sys/class/thermal/thermal_zone*")]
    if names:
        return ProbeResult(f"{', '.join(names)}; {_all_trips(tree)}")
    return ProbeFailure("there are no thermal zones")


def _trips(tree: Tree) -> ProbeResult | ProbeFailure:
    if told := _all_trips(tree):
        return ProbeResult(told)
    return ProbeFailure("there are no thermal zones")


def _all_trips(tree: Tree) -> str:
    """Return where which zones begin to do something, those alike together."""
    by_trips: dict[str, list[str]] = {}
    for folder in tree.found("sys/class/thermal/thermal_zone*"):
        trips = []
        for kind in tree.found(f"{folder.relative_to(tree.root)}/trip_point_*_type"):
            degrees = tree.number(kind.with_name(kind.name.replace("_type", "_temp")))
            shown = "?"
            if degrees is not None:
                shown = f"{degrees / 1000:g}"
            trips.append(f"{tree.text(kind)} {shown} °C")
        by_trips.setdefault(" and ".join(trips) or "no trips", []).append(_text(tree, folder / "type"))
    if len(by_trips) == 1:
        return f"{next(iter(by_trips))} in every zone"
    return "; ".join(f"{trips} in {', '.join(zones)}" for trips, zones in by_trips.items())


# What a board or GPU that is here shows of everything that is assumed of its kind: by reading alone.

_KINDS = ("jetson", "nvml")
_ANONYMOUS = ("name", "vbios", "architecture", "driver", "nvml")


@dataclass(frozen=True)
class BoardRecord:
    """What a device shows of everything assumed of its kind; names nobody and no single piece of hardware."""

    title: str
    identity: Mapping[str, str]
    rows: tuple[CheckedAssumption, ...]

    @property
    def counts(self) -> Mapping[str, int]:
        """How many assumptions have come out how."""
        return {each.name.lower(): sum(row.agreement is each for row in self.rows) for each in Agreement}


def record(device: str | None = None) -> tuple[BoardRecord, ...]:
    """Return what devices show of what is assumed, of a group of GPUs each; writes and runs nothing.

    Args:
        device: URI of a Jetson or of NVIDIA GPUs; those that are here if None.

    Raises:
        InvalidInput: If the URI is malformed or names another kind of device.
        UnknownName: If there is no such device or option.
        DeviceError: If it is not there, or none is.
    """
    if device is None or device == "auto":
        uris = [uri for uri in real_devices(System()) if uri.partition(":")[0] in _KINDS]
        if not uris:
            raise DeviceError("there is no Jetson board and no NVIDIA GPU here to record; name one with --device")
    elif DeviceURI.parse(device).scheme not in _KINDS:
        raise InvalidInput(
            f"{device} cannot be recorded: a record is of a Jetson board or of NVIDIA GPUs (jetson, nvml:0, nvml:all), "
            "made on the machine they are in"
        )
    else:
        uris = [device]
    return tuple(found for uri in uris for found in record_of(open_device(uri)))


def document(records: Sequence[BoardRecord]) -> dict[str, Any]:
    """Return records as a JSON document, as a snapshot carries it."""
    return {"version": 1, "records": [{**asdict(each), "counts": dict(each.counts)} for each in records]}


def record_of(device: Device) -> tuple[BoardRecord, ...]:
    """Return what an opened device shows; of one that nothing is assumed of, nothing.

    Args:
        device: Not entered; nothing is written to it.

    Raises:
        DeviceError: If it is gone.
    """
    uri = DeviceURI.parse(device.uri)
    if uri.scheme == "jetson":
        return (_of_board(Tree(Path(uri.options.get("root", "/")), SystemControls())),)
    if uri.scheme == "nvml":
        return _of_gpus(device)
    return ()


def _of_board(tree: Tree) -> BoardRecord:
    board = BoardId.read(tree)
    listed = [each for each in assumptions() if not each.of_gpus]
    return BoardRecord(board.title, board.identity, held_against(board.name or "", listed, board_probes(tree)))


def _of_gpus(device: Device) -> tuple[BoardRecord, ...]:
    assert isinstance(device, NvmlDevice | NvmlGroup)
    listed = [each for each in assumptions() if each.of_gpus]
    found = []
    for each in device.members if isinstance(device, NvmlGroup) else (device,):
        identity = {name: text for name, text in each.identity.items() if name in _ANONYMOUS}
        found.append(BoardRecord(each.title, identity, held_against(each.title, listed, gpu_probes(each))))
    return tuple(found)
