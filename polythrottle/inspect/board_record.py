"""What a board or GPU shows of everything that is assumed of its kind, by reading alone."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from polythrottle.actuation.drivers.system import SystemControls
from polythrottle.backends import DeviceURI, open_device
from polythrottle.backends.jetson.board import BoardId
from polythrottle.backends.jetson.gpu_clock import find
from polythrottle.backends.jetson.memory_clock import rates_hz
from polythrottle.backends.jetson.power_modes import PowerModes
from polythrottle.backends.jetson.protection import COUNTERS
from polythrottle.backends.probe import Tree
from polythrottle.domain.errors import DeviceError, InvalidInput
from polythrottle.domain.ports import Device
from polythrottle.inspect.assumptions import (
    Agreement,
    CheckedAssumption,
    Probe,
    ProbeFailure,
    ProbeResult,
    assumptions,
    held_against,
)
from polythrottle.inspect.doctor import real_devices
from polythrottle.inspect.machine import System

# What a Jetson board shows of what is assumed of its kind: one short text a part, from its files.

_CPU = "sys/devices/system/cpu"
_DEBUG = "sys/kernel/debug"
_LOCKS = (f"{_DEBUG}/bpmp/debug/clk/emc/mrq_rate_locked", f"{_DEBUG}/clk/override.emc/clk_state")
_LISTS = (
    *(f"{_DEBUG}/bpmp/debug/emc/possible_rates", f"{_DEBUG}/bpmp/debug/clk/emc/dvfs*"),
    f"{_DEBUG}/clk/emc/clk_possible_rates",
)
_CAPS = ("sys/kernel/nvpmodel_clk_cap/emc", "sys/kernel/nvpmodel_emc_cap/emc_iso_cap")
_ACTIVITIES = (
    *(f"{_DEBUG}/cactmon/mc_all", "sys/kernel/actmon_avg_activity/mc_all"),
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
    gpu = find(tree)
    names = sorted(path.name for path in folder.glob("*") if gpu is None or path.name != gpu.name)
    if names:
        return ProbeResult(", ".join(names))
    return ProbeFailure("there is no other folder in sys/class/devfreq")


def _gpu_levels(tree: Tree) -> ProbeResult | ProbeFailure:
    if not any("SUPER" in mode.name for mode in _modes(tree).modes):
        return ProbeFailure("this board does not have the Super modes")
    folder = find(tree)
    levels = tree.numbers(folder / "available_frequencies") if folder is not None else ()
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
    """What a device shows of everything assumed of its kind; names nobody and no single piece of hardware.

    Args:
        title: The device's name.
        identity: Board, chip, releases of software.
        rows: Each assumption.
    """

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
    from polythrottle.backends.nvml import NvmlDevice, NvmlGroup
    from polythrottle.inspect.gpu_record import gpu_probes as gpu_looks

    assert isinstance(device, NvmlDevice | NvmlGroup)
    listed = [each for each in assumptions() if each.of_gpus]
    found = []
    for each in device.members if isinstance(device, NvmlGroup) else (device,):
        identity = {name: text for name, text in each.identity.items() if name in _ANONYMOUS}
        found.append(BoardRecord(each.title, identity, held_against(each.title, listed, gpu_looks(each))))
    return tuple(found)
