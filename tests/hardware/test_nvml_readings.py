"""One NVIDIA GPU, read and not touched: identity, tables, energy, fields, event reasons, samples."""

import itertools
import time

import pytest

from polythrottle.actuation.drivers.nvml import NotOffered
from polythrottle.backends.nvml import NvmlDevice
from polythrottle.backends.nvml.energy import AVERAGE_FIELD, ENERGY_FIELD, INSTANT_FIELD, SCOPES, EnergyCounter
from polythrottle.backends.nvml.gpu import WIDE_BLANK, Slowdowns, faults
from polythrottle.domain.errors import KnobRejected, TrialError
from polythrottle.inspect.board_record import Agreement, record_of

pytestmark = pytest.mark.hardware
SECONDS = 3.0
SAMPLES = {0: "power", 5: "graphics clock", 6: "memory clock", 7: "module power"}  # nvmlSamplingType_t


def test_it_says_who_it_is(gpu: NvmlDevice, seen: list[str]) -> None:
    """Name, UUID, VBIOS, driver and PCI address are there, and the UUID finds the same GPU again."""
    assert {"name", "uuid", "driver", "nvml", "pci"} <= set(gpu.identity)
    assert NvmlDevice(gpu.uuid).identity == gpu.identity
    seen += [f"{name}: {text}" for name, text in gpu.identity.items()]


def test_every_finding_is_a_line(gpu: NvmlDevice, seen: list[str]) -> None:
    """What works and what does not, each with the reason."""
    for each in gpu.findings():
        mark = {True: "yes", False: "no", None: "unknown"}[each.works]
        seen.append(f"{each.subject}: {mark}; {each.explanation}")


def test_tables_hold_together(gpu: NvmlDevice, seen: list[str], unproven: list[str]) -> None:
    """Every memory clock has graphics clocks, the default is a point, and every point pairs clocks the driver lists."""
    space = gpu.space
    assert space.default in space
    assert all(gpu.dials.refusal(point) is None for point in space)
    for memory_hz, clocks_hz in gpu.dials.clocks_hz.items():
        assert clocks_hz
        seen.append(f"at {memory_hz // 10**6} MHz of memory: {len(clocks_hz)} clocks, {clocks_hz[0] // 10**6} to "
                    f"{clocks_hz[-1] // 10**6} MHz")  # fmt: skip
    if not gpu.dials.clocks_hz:
        unproven.append("clock tables: the driver lists none")
    seen.append(f"points to search: {len(space)} over {', '.join(space.names) or 'no knobs'}")


def test_the_energy_counter_moves_in_steps(gpu: NvmlDevice, seen: list[str], unproven: list[str]) -> None:
    """Its step lies where published ones do, between a millisecond and a second."""
    with gpu:
        source = gpu._energy
        if not isinstance(source, EnergyCounter):
            unproven.append("the energy counter: there is none")
            return
        step_s = source.step_s(gpu.clock)
    assert step_s is not None
    assert 0.001 <= step_s <= 1.0
    seen.append(f"energy counter step: {step_s * 1000:.3g} ms")


def test_joules_and_watts_tell_the_same_story(gpu: NvmlDevice, seen: list[str], unproven: list[str]) -> None:
    """Over a few seconds energy grows; what the power readings give beside it is printed, not judged."""
    with gpu:
        start = gpu.read()
        watts = []
        while gpu.clock.now() < start.time_s + SECONDS:
            try:
                watts.append(gpu._gpu.number("nvmlDeviceGetPowerUsage") / 1000)
            except NotOffered:
                unproven.append("power readings: there are none")
                break
            time.sleep(0.05)
        gpu.clock.sleep(max(0.0, start.time_s + SECONDS - gpu.clock.now()))
        end = gpu.read()
    assert end.energy_j > start.energy_j
    mean_w = (end.energy_j - start.energy_j) / (end.time_s - start.time_s)
    beside = f", {sum(watts) / len(watts):.1f} W by {len(watts)} power readings" if watts else ""
    seen.append(f"power over {SECONDS:g} s: {mean_w:.1f} W by {gpu.boundary.partition(':')[0]}{beside}")


def test_a_reading_is_whole(gpu: NvmlDevice, seen: list[str]) -> None:
    """Time goes on, energy does not fall, clocks and temperature are sensible where they are known."""
    with gpu:
        readings = [gpu.read() for _ in range(5)]
    for early, late in itertools.pairwise(readings):
        assert late.time_s >= early.time_s
        assert late.energy_j >= early.energy_j
    last = readings[-1]
    assert last.temperature_c is None or 0 < last.temperature_c < 120
    assert all(10**6 <= hz <= 10**11 for hz in last.clocks_hz.values())
    seen.append(
        f"now: {last.temperature_c} °C, " + ", ".join(f"{k} {v // 10**6} MHz" for k, v in last.clocks_hz.items())
    )


def test_each_field_answers_or_is_absent(gpu: NvmlDevice, seen: list[str], unproven: list[str]) -> None:
    """Energy, average and instant power in each scope: a value with a time, or a return code that says no."""
    for number, (scope, code) in itertools.product((ENERGY_FIELD, AVERAGE_FIELD, INSTANT_FIELD), SCOPES.items()):
        try:
            found = gpu._gpu.field(number, code, blank=WIDE_BLANK)
        except KnobRejected as err:
            unproven.append(f"field {number} of scope {scope}: {err}")
            continue
        assert found.value >= 0
        assert found.timestamp_us > 0
        seen.append(f"field {number} of scope {scope}: {found.value:.0f}")


def test_event_reasons_are_readable(gpu: NvmlDevice, seen: list[str], unproven: list[str]) -> None:
    """By the newer or the older call; if by neither, that is said."""
    reasons = Slowdowns(gpu._gpu).now()
    if reasons is None:
        unproven.append("event reasons: the driver has neither call")
        return
    assert reasons >= 0
    seen.append(f"event reasons: {reasons:#x}{', ' + faults(reasons) if faults(reasons) else ''}")


def test_samples_carry_rising_times(gpu: NvmlDevice, seen: list[str], unproven: list[str]) -> None:
    """The driver's own buffer, where it has one: how many, how far apart."""
    for kind, name in SAMPLES.items():
        try:
            _, samples = gpu._gpu.ask("nvmlDeviceGetSamples", kind, 0)
        except TrialError as err:
            unproven.append(f"samples of {name}: {err}")
            continue
        times = [int(sample.timeStamp) for sample in samples]
        assert times == sorted(times)
        span_s = (times[-1] - times[0]) / 1e6 if times else 0.0
        seen.append(f"samples of {name}: {len(times)} over {span_s:.3g} s")


def test_what_is_assumed_of_gpus_is_held_against_it(gpu: NvmlDevice, seen: list[str], unproven: list[str]) -> None:
    """Every assumption is a line; one that this GPU contradicts is told, not failed: it is the stand-in that errs."""
    (found,) = record_of(gpu)
    for row in found.rows:
        if row.agreement is Agreement.UNSEEN:
            unproven.append(f"{row.part}: {row.assumed} ({row.shows})")
        else:
            seen.append(f"{row.part}: {row.assumed}: {row.agreement.value}, {row.shows}")


def test_the_default_point_needs_no_write(gpu: NvmlDevice, seen: list[str]) -> None:
    """It can be applied and measured at without setting anything."""
    with gpu:
        gpu.apply(gpu.space.default)
    seen.append("applied the point as found, without one write")
