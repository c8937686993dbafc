"""What an NVIDIA GPU shows of what is assumed of its kind; every call asks, none sets."""

from collections.abc import Callable, Mapping

from polythrottle.actuation.drivers.nvml import Library, NotOffered
from polythrottle.backends.nvml import NvmlDevice
from polythrottle.backends.nvml.energy import CounterScope, EnergyCounter, energy_source, module_w
from polythrottle.backends.nvml.gpu import Gpu, Slowdowns, find
from polythrottle.domain.clock import Clock
from polythrottle.domain.errors import KnobRejected
from polythrottle.inspect.assumptions import Probe, ProbeFailure, ProbeResult

# 20 to 100 ms, as far as looks a millisecond apart tell
_LEAST_STEP_S = 0.019
_MOST_STEP_S = 0.105


def gpu_probes(device: NvmlDevice) -> Mapping[str, Probe]:
    """Return the looks at a GPU, by the names that ``assumed.toml`` has.

    Args:
        device: Not entered.
    """
    library = Library(device.clock)
    gpu = find(library, device.uuid)

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
