"""Which knobs a GPU has, read from its driver.

Nothing is tried out here: NVML has no way to ask whether a setting would be taken. What the generation of the GPU is
known not to have is off; the driver may still refuse the rest, which then spoils the one trial that asked for it.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from polythrottle.actuation.limits import Limits
from polythrottle.actuation.nvml import (
    GPU_CLOCKS,
    MEM_CLOCKS,
    POWER_LIMIT,
    POWER_PROFILES,
    UNLOCKED,
    key_of,
    mask_ids,
)
from polythrottle.actuation.nvml_library import NotOffered
from polythrottle.backends.nvml.dials import GPU_KNOB, MEM_KNOB, POWER_KNOB, PROFILE_KNOB, Dial, Dials
from polythrottle.backends.nvml.gpu import AMPERE, VOLTA, Gpu
from polythrottle.errors import DeviceError, KnobRejected
from polythrottle.space import Level

KIND = "nvml"
NO_PROFILE = "none"

_MHZ = 1_000_000
_GRAPHICS = 0  # NVML_CLOCK_GRAPHICS
_LISTLESS, _STEP_MHZ = "GB10", 100
_STEPS_W = (1, 2, 5, 10, 25, 50, 100)
_MOST_STEPS = 8
_PROFILES = (
    *("max_p", "max_q", "compute", "memory_bound", "network", "balanced", "llm_inference", "llm_training", "rbm"),
    *("dcpcie", "hmma_sparse", "hmma_dense", "sync_balanced", "hpc", "mig", "max_q_1", "network_bound"),
    *("high_throughput_inference", "medium_throughput_inference", "low_latency_inference", "training", "inference"),
    *("max_q_2", "max_q_3", "low_priority_background"),
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
        tables, why = {0: clocks}, ""
    kept = {clock: tables[clock] for clock in tables if clock in (memory.texts or {max(tables)})}
    dials = (_graphics(cut, kept, why), memory, _power(cut, original), _profile(gpu, original))
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
    return f"locking it takes a GPU of generation {name} or newer" if (architecture or first) < first else ""


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
    return milliwatts // 1000 if milliwatts % 1000 == 0 else milliwatts / 1000


def _profile(gpu: Gpu, original: Callable[[str], str]) -> Dial:
    try:
        offered = _offered_profiles(gpu)
        found = original(key_of(gpu.uuid, POWER_PROFILES))
    except (KnobRejected, DeviceError) as err:
        _reraise_if_gone(gpu, err)
        return Dial(PROFILE_KNOB, POWER_PROFILES, off=f"it has no workload power profiles ({err})")
    texts: dict[Level, str] = {NO_PROFILE: "", **{profile_name(number): str(number) for number in offered}}
    default = "+".join(profile_name(int(number)) for number in found.split(",")) if found else NO_PROFILE
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
    return _PROFILES[number] if number < len(_PROFILES) else f"profile_{number}"
