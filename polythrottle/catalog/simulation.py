"""The coefficients a board is simulated with, in SI; the equations they go into are in ``backends/simulated``."""

from dataclasses import dataclass

from polythrottle.errors import InvalidInput

PRECISIONS = ("fp32", "fp16", "int8")


def _above_zero(record: object, *names: str) -> None:
    for name in names:
        if not getattr(record, name) > 0:
            raise InvalidInput(f"{name} must be above 0")


@dataclass(frozen=True)
class Voltage:
    """A voltage curve: flat up to a knee, then linear to the top clock.

    Args:
        knee: Where the rise begins, as a fraction of the top clock.
        swing: Voltage at the top clock over the flat voltage.
    """

    knee: float
    swing: float

    def __post_init__(self) -> None:
        if not (0 < self.knee < 1 and self.swing >= 1):
            raise InvalidInput("a voltage curve needs 0 < knee < 1 <= swing")


@dataclass(frozen=True)
class Gpu:
    """How the GPU computes and what that draws.

    Args:
        lanes: CUDA cores: how much work is in flight at once.
        fp32_ops_per_clock: Operations per clock at full rate, a multiply-add counted as two.
        fp16_ops_per_clock: The same in half precision, without sparsity.
        tensor: Whether half precision runs on tensor cores.
        tensor_fp32: Whether single precision runs on tensor cores too (TF32).
        hold: Share of its power limit that a limited card draws.
        int8_ops_per_clock: Operations per clock in whole numbers of eight bits; 0 where the file states none.
        launch_cycles: CPU cycles the GPU waits for each kernel.
        power_w: Dynamic power at the top clock with all lanes at work.
        floor: Share of ``power_w`` that a busy GPU draws whatever its lanes do.
        idle: Share of ``power_w`` that a waiting GPU draws at the clock it waits at.
        voltage: Its voltage curve.
    """

    lanes: float
    fp32_ops_per_clock: float
    fp16_ops_per_clock: float
    tensor: bool
    launch_cycles: float
    power_w: float
    floor: float
    idle: float
    voltage: Voltage
    tensor_fp32: bool = False
    hold: float = 1.0
    int8_ops_per_clock: float = 0.0

    def __post_init__(self) -> None:
        _above_zero(self, "lanes", "fp32_ops_per_clock", "fp16_ops_per_clock", "power_w")
        if not (self.floor < 1 and self.idle < 1 and 0 < self.hold <= 1):
            raise InvalidInput("floor and idle are shares below 1, hold a share above 0")

    def ops_per_clock(self, precision: str) -> float:
        """Return the operations per clock at full rate in a precision.

        Raises:
            InvalidInput: If its file states no such rate.
        """
        rates = {"fp32": self.fp32_ops_per_clock, "fp16": self.fp16_ops_per_clock, "int8": self.int8_ops_per_clock}
        if rates[precision] <= 0:
            raise InvalidInput(f"its file states no rate for {precision}; take a model in fp32 or fp16")
        return rates[precision]


@dataclass(frozen=True)
class Memory:
    """How memory moves bytes and what that draws.

    Args:
        bandwidth_bytes_per_s: Peak at the top memory clock.
        achieved: Share of the peak that kernels reach.
        power_w: Power at the top clock without traffic, clocking and SoC fabric included.
        exponent: ``power_w`` goes with (clock / top clock) to this power.
        energy_j_per_byte: Energy of one byte moved.
        spill: Growth of the traffic of one item as caches overflow, times the square of the batch's doublings.
    """

    bandwidth_bytes_per_s: float
    achieved: float
    power_w: float
    exponent: float
    energy_j_per_byte: float
    spill: float

    def __post_init__(self) -> None:
        _above_zero(self, "bandwidth_bytes_per_s", "achieved")


@dataclass(frozen=True)
class Cpu:
    """What the CPU draws.

    Args:
        clock_hz: Clock if the board has no CPU knob, and the clock ``core_w`` is for.
        core_w: Dynamic power of one busy core at ``clock_hz``.
        wait: Share of ``core_w`` drawn by the core that waits for the GPU.
        voltage: Its voltage curve.
    """

    clock_hz: int
    core_w: float
    wait: float
    voltage: Voltage

    def __post_init__(self) -> None:
        _above_zero(self, "clock_hz")


@dataclass(frozen=True)
class Thermal:
    """Heat: static power that grows with temperature, and a body that warms up.

    Args:
        static_w: Power at ``reference_c`` that no knob changes.
        reference_c: Temperature ``static_w`` is for.
        leakage_per_c: Relative growth of ``static_w`` per degree.
        ambient_c: Temperature of the air.
        start_c: Temperature every trial starts from.
        resistance_c_per_w: Rise over ambient per watt once settled.
        time_constant_s: Time to 63 % of a rise.
        limit_c: Temperature at which the board slows itself down.
    """

    static_w: float
    reference_c: float
    leakage_per_c: float
    ambient_c: float
    start_c: float
    resistance_c_per_w: float
    time_constant_s: float
    limit_c: float

    def __post_init__(self) -> None:
        _above_zero(self, "static_w", "resistance_c_per_w", "time_constant_s")
        if self.leakage_per_c * (self.reference_c - min(self.ambient_c, self.start_c)) >= 1:
            raise InvalidInput("leakage_per_c is so high that leakage ends within the temperatures of the board")


@dataclass(frozen=True)
class Governor:
    """The stock governor: how slowly the GPU clock follows its load between the lowest and highest allowed.

    Args:
        rise_s: Time to 63 % of the way up while the GPU is busy; 0 is immediate.
        fall_s: Time to 63 % of the way down while it waits.
    """

    rise_s: float
    fall_s: float

    def __post_init__(self) -> None:
        if self.rise_s > 0:
            _above_zero(self, "fall_s")


@dataclass(frozen=True)
class Actuation:
    """How long a change takes effect after, by what is changed."""

    gpu_s: float
    memory_s: float
    cpu_s: float
    power_s: float = 0.0


@dataclass(frozen=True)
class Simulation:
    """All coefficients of one board."""

    gpu: Gpu
    memory: Memory
    cpu: Cpu
    thermal: Thermal
    governor: Governor
    actuation: Actuation
