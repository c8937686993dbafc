"""The knobs of a GPU: which it has, read from its driver, how each level is written.

Which points of them are searched.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from types import MappingProxyType

from polythrottle.actuation.drivers.controls import Control
from polythrottle.actuation.drivers.nvml import (
    GPU_CLOCKS,
    GPU_OFFSET,
    MEM_CLOCKS,
    MEM_OFFSET,
    POWER_LIMIT,
    POWER_PROFILES,
    UNLOCKED,
    NotOffered,
    clock_offset,
    key_of,
    mask_ids,
)
from polythrottle.actuation.limits import Limits
from polythrottle.backends.nvml.gpu import AMPERE, VOLTA, Gpu
from polythrottle.domain.backports import paired
from polythrottle.domain.errors import DeviceError, InvalidInput, KnobRejected
from polythrottle.domain.measurement import EnergyKind
from polythrottle.domain.ports import Offer
from polythrottle.domain.space import Knob, Level, OperatingPoint, SearchSpace
from polythrottle.domain.units import no_level, unknown_knob

# What can be set on a GPU: its knobs, their levels, and how each level is written.

GPU_KNOB = "gpu_max_hz"
MEM_KNOB = "mem_hz"
POWER_KNOB = "power_limit_w"
PROFILE_KNOB = "power_profile"
GPU_OFFSET_KNOB = "gpu_offset_hz"
MEM_OFFSET_KNOB = "mem_offset_hz"
OFFSET_KNOBS = (GPU_OFFSET_KNOB, MEM_OFFSET_KNOB)
_ALONE = (*OFFSET_KNOBS, POWER_KNOB, PROFILE_KNOB)  # any level of one goes with any of another


@dataclass(frozen=True)
class Dial:
    """One knob of a GPU.

    Args:
        name: With its SI unit.
        what: The control behind it (`polythrottle.actuation.drivers.nvml`).
        texts: What each level is written as, ascending by level; empty if the knob is off.
        default: The level that stands for "as found"; None if the knob is off.
        off: Why it is off.
    """

    name: str
    what: str
    texts: Mapping[Level, str] = field(default_factory=dict)
    default: Level | None = None
    off: str = ""

    @property
    def found(self) -> Level:
        """The level that stands for "as found"; the knob is on."""
        assert self.default is not None, f"{self.name} is off: {self.off}"
        return self.default

    def control(self, uuid: str) -> Control:
        """Return what may be written for this knob on the GPU of that UUID."""
        neutral = UNLOCKED if self.what in (GPU_CLOCKS, MEM_CLOCKS) else None
        return Control(key_of(uuid, self.what), frozenset(self.texts.values()), neutral)


@dataclass(frozen=True)
class Dials:
    """Every knob of a GPU, and which graphics clocks go with which memory clock.

    Args:
        knobs: By name, those that are off too.
        clocks_hz: The graphics clocks of each memory clock, ascending.
    """

    knobs: Mapping[str, Dial]
    clocks_hz: Mapping[int, tuple[int, ...]]

    @property
    def on(self) -> tuple[Dial, ...]:
        """The knobs that can be set, in the order they are written: memory, offsets, graphics, limit, profile."""
        # Memory's offset before the graphics clocks': writing it wipes what a curve editor has set of those.
        order = (MEM_KNOB, MEM_OFFSET_KNOB, GPU_OFFSET_KNOB, GPU_KNOB, POWER_KNOB, PROFILE_KNOB)
        return tuple(self.knobs[name] for name in order if self.knobs[name].texts)

    def text(self, name: str, point: Mapping[str, Level]) -> str:
        """Return what a knob that is on is written as at a point; at its default if the point does not name it.

        A clock the point does not name is left to the driver, and not held at its highest level.
        """
        dial = self.knobs[name]
        if name not in point and dial.what in (GPU_CLOCKS, MEM_CLOCKS):
            return UNLOCKED
        return dial.texts[point.get(name, dial.found)]

    def refusal(self, point: Mapping[str, Level]) -> str | None:
        """Return why a point cannot be applied, or None if it can; knobs it does not name stay at their default."""
        for name, level in point.items():
            dial = self.knobs.get(name)
            if dial is None:
                return f"there is no knob {name}; there are {', '.join(self.knobs)}"
            if level not in dial.texts:
                return no_level(name, level, list(dial.texts), dial.off)
        return self._apart(point)

    def _apart(self, point: Mapping[str, Level]) -> str | None:
        if all(self._moved(name, point) for name in (MEM_KNOB, MEM_OFFSET_KNOB)):
            return "a memory clock that is locked takes no offset"
        if GPU_KNOB not in point:
            return None
        memory = point.get(MEM_KNOB, self.knobs[MEM_KNOB].default)
        clocks = self.clocks_hz[memory if isinstance(memory, int) else max(self.clocks_hz)]
        if point[GPU_KNOB] in clocks:
            return None
        return f"at {MEM_KNOB} {memory} the driver offers {GPU_KNOB} {clocks[0]} to {clocks[-1]} only"

    def _moved(self, name: str, point: Mapping[str, Level]) -> bool:
        return name in point and point[name] != self.knobs[name].default


# Which points of a GPU are searched: a few thousand of all it has, unless somebody names the knobs.

_MOST_CLOCKS = 50
_IDLE_SHARE = 0.25
"""Memory clocks below this share of the highest are states for idling: 810 of 10501 MHz, where 5001 can serve."""
_SAME_SHARE = 0.94
"""Memory clocks from this share of the highest on are one with it: under CUDA, GeForce and RTX cards run in performance
state P2, which holds memory a level below its highest, 10251 of 10501 MHz or 7601 of 8001."""


class DialledDevice:
    """One GPU, or a group of them: its dials as knobs, of which some are searched."""

    _searched: Sequence[str] | None

    @property
    def title(self) -> str:
        """What people call it."""
        raise NotImplementedError

    @property
    def dials(self) -> Dials:
        """Every knob, with its levels or the reason it is off."""
        raise NotImplementedError

    @property
    def energy_kind(self) -> EnergyKind:
        """Measured, by the GPUs' own sensors."""
        return EnergyKind.MEASURED

    @property
    def presets(self) -> Mapping[str, OperatingPoint]:
        """None: cards come without named points."""
        return {}

    @cached_property
    def space(self) -> SearchSpace:
        """The points to search, and among them the one that was found.

        By default those of both clocks and of the power limit: every graphics clock if they are no more than 50 at a
        memory clock, else every second, third, … counted down from the highest; and the memory clocks that serve.

        Raises:
            UnknownName: If a knob to search is none.
            DeviceError: If it is off; says why.
            InvalidInput: If one is named twice.
        """
        clocks = [name for name in self._names if name in (GPU_KNOB, MEM_KNOB)]
        space = _clocks(self.dials, clocks, thin=self._searched is None)
        for name in _ALONE:
            if name in self._names:
                space = space * _single(self.dials.knobs[name])
        return space

    @cached_property
    def _names(self) -> Sequence[str]:
        """Of the knobs that are searched; errors as of `space`."""
        names = self._searched
        if names is None:
            return [name for name in (GPU_KNOB, MEM_KNOB, POWER_KNOB) if len(_levels(self.dials, name, thin=True)) > 1]
        if len(set(names)) != len(names):
            raise InvalidInput(f"a knob is named twice in {', '.join(names)}")
        for name in names:
            if name not in self.dials.knobs:
                raise unknown_knob(name, self.dials.knobs)
            if off := self.dials.knobs[name].off:
                raise DeviceError(f"{name} cannot be set on {self.title}: {off}{self._hint}")
        if {MEM_KNOB, MEM_OFFSET_KNOB} <= set(names):
            words = "a memory clock that is locked takes no offset; search mem_mhz or mem_offset_mhz, not both"
            raise InvalidInput(words)
        return names

    @property
    def _hint(self) -> str:
        """What to say besides where a knob is off."""
        return ""

    @cached_property
    def _default(self) -> OperatingPoint:
        return OperatingPoint({name: self.dials.knobs[name].found for name in self._names})

    def offers(self) -> tuple[Offer, ...]:
        """Return every knob that is on."""
        knobs = (
            (Knob(each.name, tuple(each.texts), label=each.name == PROFILE_KNOB), each.found) for each in self.dials.on
        )
        return tuple(Offer(knob, found, knob.name in self._default) for knob, found in knobs)

    def _wanted(self, point: OperatingPoint) -> OperatingPoint:
        """Return the levels that a point means, those it leaves out at their default; a KnobRejected if it has none."""
        wanted = self._default.moved(point)
        if problem := self.dials.refusal(wanted):
            raise KnobRejected(f"{self.title} cannot take {dict(point)}: {problem}")
        return wanted


def _single(dial: Dial) -> SearchSpace:
    knob = Knob(dial.name, tuple(dial.texts), label=dial.name == PROFILE_KNOB)
    return SearchSpace.grid([knob], {dial.name: dial.found})


def _clocks(dials: Dials, names: Sequence[str], *, thin: bool) -> SearchSpace:
    """Return the points of the clocks that are searched: only pairs the driver lists together."""
    if not names:
        return SearchSpace.unit()
    default = {name: dials.knobs[name].found for name in names}
    levels = [_levels(dials, name, thin=thin) for name in names]
    points = [dict(paired(names, each)) for each in product(*levels)]
    return SearchSpace.of_points([point for point in points if _together(dials, point, thin=thin)], default)


def _together(dials: Dials, point: Mapping[str, Level], *, thin: bool) -> bool:
    if dials.refusal(point) is not None:
        return False
    memory = point.get(MEM_KNOB)
    return not (thin and isinstance(memory, int) and GPU_KNOB in point) or point[GPU_KNOB] in _kept(dials, memory)


def _levels(dials: Dials, name: str, *, thin: bool) -> list[Level]:
    dial = dials.knobs[name]
    if not thin or not dial.texts:
        return list(dial.texts)
    if name == MEM_KNOB:
        return [level for level in dial.texts if level == dial.found or _serves(float(level) / float(dial.found))]
    if name == GPU_KNOB:
        held = dials.knobs[MEM_KNOB].texts and _levels(dials, MEM_KNOB, thin=True)
        return sorted({clock for memory in held or [max(dials.clocks_hz)] for clock in _kept(dials, int(memory))})
    return list(dial.texts)


def _serves(share: float) -> bool:
    """Return whether a memory clock of this share of the highest is a state of its own to serve in."""
    return _IDLE_SHARE <= share < _SAME_SHARE


def _kept(dials: Dials, memory: int) -> Sequence[Level]:
    """Return the graphics clocks to search at one memory clock: evenly thinned, the highest always among them."""
    clocks = [clock for clock in dials.clocks_hz[memory] if clock in dials.knobs[GPU_KNOB].texts]
    every = -(-len(clocks) // _MOST_CLOCKS) or 1
    return clocks[::-1][::every]


# Which knobs a GPU has, read from its driver.
#
# Nothing is tried out here: NVML has no way to ask whether a setting would be taken. What the generation of the GPU
# is known not to have is off; the driver may still refuse the rest, which then spoils the one trial that asked for
# it.

KIND = "nvml"
NO_PROFILE = "none"

_MHZ = 1_000_000
_GRAPHICS = 0  # NVML_CLOCK_GRAPHICS
_LISTLESS = "GB10"
_STEP_MHZ = 100
_STEPS_W = (1, 2, 5, 10, 25, 50, 100)
_MOST_STEPS = 8
_PROFILES = (
    "max_p",
    "max_q",
    "compute",
    "memory_bound",
    "network",
    "balanced",
    "llm_inference",
    "llm_training",
    "rbm",
    "dcpcie",
    "hmma_sparse",
    "hmma_dense",
    "sync_balanced",
    "hpc",
    "mig",
    "max_q_1",
    "network_bound",
    "high_throughput_inference",
    "medium_throughput_inference",
    "low_latency_inference",
    "training",
    "inference",
    "max_q_2",
    "max_q_3",
    "low_priority_background",
)  # nvmlPowerProfileType_t, in order


def probe(gpu: Gpu, limits: Limits, original: Callable[[str], str]) -> Dials:
    """Return the knobs of a GPU as its driver lists them, cut by the administrator's limits.

    Args:
        gpu: Whose.
        limits: Of the administrator; a level outside is not there.
        original: Returns what a control held before anybody tuned it.

    Raises:
        DeviceError: If the GPU cannot be read.
    """
    cut = _Cut(gpu, limits)
    tables, why = _tables(gpu)
    memory = _memory(cut, tables, why)
    if not tables and (clocks := _unlisted(gpu)):
        tables = {0: clocks}
        why = ""
    kept = {clock: tables[clock] for clock in tables if clock in (memory.texts or {max(tables)})}
    offsets = (_offset(cut, name, original) for name in _OFFSETS)
    dials = (_graphics(cut, kept, why), memory, _power(cut, original), _profile(gpu, original), *offsets)
    return Dials(MappingProxyType({dial.name: dial for dial in dials}), kept)


@dataclass(frozen=True)
class _Cut:
    gpu: Gpu
    limits: Limits

    def within(self, name: str, levels: Sequence[int]) -> tuple[int, ...]:
        return self.limits.within(KIND, name, levels, self.gpu.uuid)


def _tables(gpu: Gpu) -> tuple[dict[int, tuple[int, ...]], str]:
    """Return the graphics clocks of every memory clock in Hz, or why there are none."""
    found: dict[int, tuple[int, ...]] = {}
    try:
        for memory_mhz in gpu.ask("nvmlDeviceGetSupportedMemoryClocks"):
            graphics_mhz = gpu.maybe("nvmlDeviceGetSupportedGraphicsClocks", memory_mhz) or ()
            if graphics_mhz:
                found[memory_mhz * _MHZ] = tuple(sorted(each * _MHZ for each in set(graphics_mhz)))
    except NotOffered as err:
        return {}, f"the driver lists no clocks for it, as on many laptops and virtual GPUs ({err})"
    return found, "" if found else "the driver's list of clocks is empty"


def _unlisted(gpu: Gpu) -> tuple[int, ...]:
    """Return graphics clocks to offer where the driver lists none and locks them all the same; none if that is not so.

    It is on GB10: eight of them ran at 2184 to 2190 MHz under a lock of 0 to 2200 (github.com/tonyd2wild/
    DeepSeek-V4.1-Flash-vLLM-DGX-Spark/issues/1). Whether a lock holds is seen by the clock that runs.
    """
    try:
        highest_mhz = gpu.number("nvmlDeviceGetMaxClockInfo", _GRAPHICS)
    except NotOffered:
        return ()
    if _LISTLESS not in str(gpu.maybe("nvmlDeviceGetName")):
        return ()
    lowest_mhz = -(-highest_mhz // (5 * _STEP_MHZ)) * _STEP_MHZ
    return tuple(each * _MHZ for each in sorted({*range(lowest_mhz, highest_mhz, _STEP_MHZ), highest_mhz}))


def _memory(cut: _Cut, tables: Mapping[int, tuple[int, ...]], why: str) -> Dial:
    off = why or _too_old(cut.gpu, AMPERE, "Ampere")
    levels = cut.within(MEM_KNOB, sorted(tables))
    if not off and not levels:
        off = "the administrator's limits leave none of its memory clocks"
    if off:
        return Dial(MEM_KNOB, MEM_CLOCKS, off=off)
    texts: dict[Level, str] = {level: f"{level // _MHZ},{level // _MHZ}" for level in levels}
    return _topped(Dial(MEM_KNOB, MEM_CLOCKS, texts, levels[-1]), max(tables))


def _graphics(cut: _Cut, tables: Mapping[int, tuple[int, ...]], why: str) -> Dial:
    off = why or _too_old(cut.gpu, VOLTA, "Volta")
    clocks = sorted({clock for table in tables.values() for clock in table})
    levels = cut.within(GPU_KNOB, clocks)
    if not off and not set(levels) & set(tables[max(tables)]):
        off = "the administrator's limits leave none of its graphics clocks"
    if off:
        return Dial(GPU_KNOB, GPU_CLOCKS, off=off)
    lowest_mhz = clocks[0] // _MHZ if max(tables) else 0  # where none is listed, the driver keeps its own
    texts: dict[Level, str] = {level: f"{lowest_mhz},{level // _MHZ}" for level in levels}
    default = max(set(levels) & set(tables[max(tables)]))
    return _topped(Dial(GPU_KNOB, GPU_CLOCKS, texts, default), clocks[-1])


def _topped(dial: Dial, top: int) -> Dial:
    """Return a dial of clocks whose highest level is left to the driver, if it is the highest the driver has."""
    if dial.default != top:
        return dial
    return Dial(dial.name, dial.what, {**dial.texts, top: UNLOCKED}, top)


def _too_old(gpu: Gpu, first: int, name: str) -> str:
    architecture = gpu.architecture
    if (architecture or first) < first:
        return f"locking it takes a GPU of generation {name} or newer"
    return ""


def _power(cut: _Cut, original: Callable[[str], str]) -> Dial:
    try:
        found_mw = int(original(key_of(cut.gpu.uuid, POWER_LIMIT)))
        lowest_mw, highest_mw = map(int, cut.gpu.ask("nvmlDeviceGetPowerManagementLimitConstraints"))
        limits_mw = _limits_mw(cut.gpu, lowest_mw, min(highest_mw, found_mw), found_mw)
    except (KnobRejected, DeviceError, ValueError) as err:
        _reraise_if_gone(cut.gpu, err)
        return Dial(POWER_KNOB, POWER_LIMIT, off=f"the driver does not let its power be limited ({err})")
    low_w, high_w = cut.limits.span(KIND, POWER_KNOB, cut.gpu.uuid)
    kept: dict[Level, str] = {_watts(each): str(each) for each in limits_mw if low_w <= each / 1000 <= high_w}
    if not kept:
        return Dial(POWER_KNOB, POWER_LIMIT, off="the administrator's limits leave none of its power limits")
    return Dial(POWER_KNOB, POWER_LIMIT, kept, next(reversed(kept)))


def _reraise_if_gone(gpu: Gpu, err: Exception) -> None:
    """Raise unless the GPU still answers: a knob is off for what it lacks, never because it was lost meanwhile."""
    if isinstance(err, DeviceError):
        gpu.ask("nvmlDeviceGetUUID")


def _limits_mw(gpu: Gpu, lowest_mw: int, highest_mw: int, found_mw: int) -> list[int]:
    """Return the power limits to offer in mW: even steps from the lowest to the limit found, which is never crossed.

    What is enforced from outside, as by a baseboard controller, may lie lower; limits above that would change nothing.
    """
    try:
        enforced_mw = gpu.number("nvmlDeviceGetEnforcedPowerLimit")
    except NotOffered:
        enforced_mw = highest_mw
    top_mw = min(highest_mw, max(enforced_mw, lowest_mw))
    step_mw = next((w * 1000 for w in _STEPS_W if (top_mw - lowest_mw) <= _MOST_STEPS * w * 1000), 100_000)
    between = range(-(-lowest_mw // step_mw) * step_mw, top_mw + 1, step_mw)
    return sorted({lowest_mw, *between, found_mw} if lowest_mw <= highest_mw else {found_mw})


def _watts(milliwatts: int) -> int | float:
    if milliwatts % 1000 == 0:
        return milliwatts // 1000
    return milliwatts / 1000


@dataclass(frozen=True)
class _Margin:
    """How far a clock offset may go, whatever the driver takes: no figure of NVIDIA's, and nothing that was tried.

    Clocks raised at the same voltage save energy and end, too far, in wrong answers or a hung GPU; memory errors are
    seen by nobody on cards without ECC. Drivers take ±1000 MHz (LACT pull request 918); what people are offered goes
    from -200 to 400 MHz, and from -500 to 4000 for memory (utajum/g-helper-linux, pull request 88).
    """

    what: str
    least_mhz: int
    most_mhz: int
    step_mhz: int


_OFFSETS = {
    GPU_OFFSET_KNOB: _Margin(GPU_OFFSET, -200, 100, 25),
    MEM_OFFSET_KNOB: _Margin(MEM_OFFSET, -1000, 500, 250),
}


def _offset(cut: _Cut, name: str, original: Callable[[str], str]) -> Dial:
    margin = _OFFSETS[name]
    try:
        found_mhz = int(original(key_of(cut.gpu.uuid, margin.what)))
        with cut.gpu.library as library:
            taken = clock_offset(library, library.gpu(cut.gpu.uuid), margin.what)
    except (KnobRejected, DeviceError, ValueError) as err:
        _reraise_if_gone(cut.gpu, err)
        return Dial(name, margin.what, off=f"the driver has no clock offsets for it ({err})")
    steps = range(margin.least_mhz, margin.most_mhz + 1, margin.step_mhz)
    allowed = {each for each in steps if taken.least_mhz <= each <= taken.most_mhz}
    levels = cut.within(name, [each * _MHZ for each in sorted({*allowed, found_mhz})])
    if found_mhz * _MHZ not in levels:
        return Dial(name, margin.what, off="the administrator's limits leave out the offset it was found with")
    texts: dict[Level, str] = {level: str(level // _MHZ) for level in levels}
    return Dial(name, margin.what, texts, found_mhz * _MHZ)


def _profile(gpu: Gpu, original: Callable[[str], str]) -> Dial:
    try:
        offered = _offered_profiles(gpu)
        found = original(key_of(gpu.uuid, POWER_PROFILES))
    except (KnobRejected, DeviceError) as err:
        _reraise_if_gone(gpu, err)
        return Dial(PROFILE_KNOB, POWER_PROFILES, off=f"it has no workload power profiles ({err})")
    texts: dict[Level, str] = {NO_PROFILE: "", **{profile_name(number): str(number) for number in offered}}
    if found:
        default = "+".join(profile_name(int(number)) for number in found.split(","))
    else:
        default = NO_PROFILE
    return Dial(PROFILE_KNOB, POWER_PROFILES, {**texts, default: found}, default)


def _offered_profiles(gpu: Gpu) -> tuple[int, ...]:
    import pynvml

    info = pynvml.c_nvmlWorkloadPowerProfileProfilesInfo_v1_t()
    gpu.ask("nvmlDeviceWorkloadPowerProfileGetProfilesInfo", ctypes.byref(info))
    offered = mask_ids(info.perfProfilesMask.mask)
    if not offered:
        raise NotOffered("the driver lists none")
    return offered


def profile_name(number: int) -> str:
    """Return NVIDIA's name of a workload power profile."""
    if number < len(_PROFILES):
        return _PROFILES[number]
    return f"profile_{number}"
