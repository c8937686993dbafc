"""Boards: their knobs and allowed combinations, their rails, and the coefficients in SI that simulate them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from polythrottle.catalog.documents import locate, names, read_document
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.space import Knob, Level, OperatingPoint, SearchSpace
from polythrottle.domain.units import MOST_LEVEL, knob_name, no_level, show_level, show_name, to_si, unknown_knob
from polythrottle.storage.documents import TomlTable

# The coefficients a board is simulated with, in SI; the equations they go into are in ``backends/simulated``.

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


@dataclass(frozen=True)
class LanguageSimulation:
    """How a GPU runs the steps of a language-model engine; the equations are in ``backends/simulated/engine``.

    Args:
        flops_per_s: Half-precision operations at the top clock, without sparsity.
        bandwidth_bytes_per_s: Peak of the memory.
        gemm_efficiency: Share of ``flops_per_s`` that matrix products of long prompts reach.
        attention_efficiency: The same of the attention of prompts.
        weight_stretch: Time that reading dense weights takes, over that at the peak bandwidth.
        expert_stretch: The same of experts, and ``context_stretch`` of keys and values.
        context_stretch: See ``expert_stretch``.
        expert_spread: By how much longer the GPU with the most to do takes where whole experts are spread over a group.
        link_bytes_per_s: Rate at which GPUs of a group exchange what they sum.
        exchange_s: What each such exchange takes besides.
        layer_s: What each layer takes besides, such as launches and norms.
        expert_layer_s: What each layer with experts takes besides.
        fp8_expert_layer_s: What it takes besides with weights of eight bits.
        sequence_s: What each sequence takes in a step, such as sampling.
        step_s: What each step takes.
        memory_clock_share: Share of the time that moves bytes which follows the SM clock.
        layer_clock_share: The same of layers.
        sequence_clock_share: The same of sequences.
        idle_w: Power with the engine loaded and nothing to do.
        active_w: Power besides while a step runs at the top clock.
        memory_w: Power besides at the full bandwidth.
        compute_w: Power besides at the full arithmetic rate and the top clock's voltage.
        knee: Share of the top clock from which voltage rises.
        swing: Voltage at the top clock over that below the knee.
        lowest: Share of the top clock below which no cap goes.
        fp8: Whether eight-bit weights are computed with at twice the rate.
    """

    flops_per_s: float
    bandwidth_bytes_per_s: float
    gemm_efficiency: float
    attention_efficiency: float
    weight_stretch: float
    expert_stretch: float
    context_stretch: float
    expert_spread: float
    link_bytes_per_s: float
    exchange_s: float
    layer_s: float
    expert_layer_s: float
    fp8_expert_layer_s: float
    sequence_s: float
    step_s: float
    memory_clock_share: float
    layer_clock_share: float
    sequence_clock_share: float
    idle_w: float
    active_w: float
    memory_w: float
    compute_w: float
    knee: float
    swing: float
    lowest: float = 0.1
    fp8: bool = False

    def __post_init__(self) -> None:
        _above_zero(self, "flops_per_s", "bandwidth_bytes_per_s", "gemm_efficiency", "attention_efficiency")
        _above_zero(self, "link_bytes_per_s", "idle_w", "active_w", "lowest")
        shares = (self.memory_clock_share, self.layer_clock_share, self.sequence_clock_share)
        if any(share > 1 for share in shares) or not 0 < self.knee < 1 <= self.swing:
            raise InvalidInput("clock shares are shares, and a voltage curve needs 0 < knee < 1 <= swing")


# Boards: what can be set on a device, in which combinations, what its rails are, and the figures that simulate it.

MOST_LEVELS = 10_000
"""Levels of one knob."""


@dataclass(frozen=True)
class BoardKnob:
    """One knob of a board.

    Args:
        name: In SI, such as ``gpu_max_hz``.
        levels: Every level that can be set, ascending, in the knob's SI unit.
        default: The level nobody chose.
        search: Whether it is searched unless the user says otherwise.
        every: How far the levels that are searched lie apart, counted down from the highest; 1 searches all.
    """

    name: str
    levels: tuple[int | float, ...]
    default: int | float
    search: bool
    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1:
            raise InvalidInput("search_every must be at least 1")
        if self.default not in self.levels:
            raise InvalidInput(f"the default {show_level(self.name, self.default)} is not a level")

    @property
    def searched(self) -> Knob:
        """The knob as it is searched; always holds the default level."""
        # From above, so that the highest level, with which a tight limit stands or falls, is always among them.
        chosen = set(self.levels[:: -self.every]) | {self.default}
        return Knob(self.name, tuple(chosen))


@dataclass(frozen=True)
class Ordered:
    """A rule: one knob's level never lies above another's."""

    low: str
    high: str

    def broken_by(self, point: Mapping[str, Level]) -> str | None:
        """Return why a point breaks this rule, or None."""
        low = point.get(self.low)
        high = point.get(self.high)
        if isinstance(low, str) or isinstance(high, str) or low is None or high is None or low <= high:
            return None
        return f"{self.low} {show_level(self.low, low)} lies above {self.high} {show_level(self.high, high)}"


@dataclass(frozen=True)
class Dependent:
    """A rule: while ``knob`` is at ``level``, ``limited`` goes no higher than ``most``; levels in SI."""

    knob: str
    level: int | float
    limited: str
    most: int | float

    def broken_by(self, point: Mapping[str, Level]) -> str | None:
        """Return why a point breaks this rule, or None."""
        level = point.get(self.limited)
        if isinstance(level, str) or level is None or point.get(self.knob) != self.level or level <= self.most:
            return None
        at = f"at {self.knob} {show_level(self.knob, self.level)}"
        return f"{at}, {self.limited} goes no higher than {show_level(self.limited, self.most)}"


@dataclass(frozen=True)
class Rails:
    """Power rails.

    Args:
        names: Of all that there may be; none on a board without a sensor.
        total: Those whose sum is the total.
        note: What the total covers and leaves out.
        otherwise: Those whose sum stands in for it where a sensor of the total is not there, as on another carrier.
        otherwise_note: What that covers and leaves out.
    """

    names: tuple[str, ...]
    total: tuple[str, ...]
    note: str
    otherwise: tuple[str, ...] = ()
    otherwise_note: str = ""

    def __post_init__(self) -> None:
        if bool(self.total) != bool(self.names) or not {*self.total, *self.otherwise} <= set(self.names):
            raise InvalidInput(f"the total {', '.join(self.total)} must be some of the rails {', '.join(self.names)}")
        if bool(self.otherwise) != bool(self.otherwise_note):
            raise InvalidInput("otherwise and otherwise_note go together: which rails, and what they leave out")

    @property
    def boundary(self) -> str:
        """What the joules of the total cover, in words."""
        if self.total:
            return f"{' + '.join(self.total)} ({self.note})"
        return self.note


@dataclass(frozen=True)
class Board:
    """A device of the catalogue.

    Args:
        name: What it was asked for by: a name in ``devices/`` or the path of a file.
        title: The name people know it by.
        kind: ``jetson`` or ``card``.
        memory_bytes: Memory a model can be held in.
        power_max_w: The most the module or card may draw.
        knobs: Everything that can be set.
        rails: What its power can be read from.
        ordered: Rules between pairs of knobs.
        dependent: Rules between a level of one knob and the range of another.
        presets: The vendor's named points, over all knobs.
        simulation: Coefficients of the simulator, if there are any.
        language: Coefficients with which it simulates a language-model engine, if there are any.
    """

    name: str
    title: str
    kind: str
    memory_bytes: float
    power_max_w: float
    knobs: tuple[BoardKnob, ...]
    rails: Rails
    ordered: tuple[Ordered, ...] = ()
    dependent: tuple[Dependent, ...] = ()
    presets: Mapping[str, OperatingPoint] = field(default_factory=dict)
    simulation: Simulation | None = None
    language: LanguageSimulation | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("jetson", "card"):
            raise InvalidInput(f"kind must be jetson or card, not {self.kind!r}")
        for name in (name for rule in self.rules for name in _involved(rule)):
            self.knob(name)
        for name, point in {"default": self.default, **self.presets}.items():
            if problem := self.refusal(point):
                raise InvalidInput(f"{name}: {problem}")

    @property
    def rules(self) -> tuple[Ordered | Dependent, ...]:
        """Everything that keeps levels of different knobs apart."""
        return (*self.ordered, *self.dependent)

    def knob(self, name: str) -> BoardKnob:
        """Return the knob of that name.

        Raises:
            UnknownName: If the board has none of that name.
        """
        if name not in self._knobs:
            raise unknown_knob(name, self._knobs)
        return self._knobs[name]

    @cached_property
    def _knobs(self) -> dict[str, BoardKnob]:
        return {knob.name: knob for knob in self.knobs}

    @cached_property
    def default(self) -> OperatingPoint:
        """The point nobody chose, over all knobs."""
        return OperatingPoint({knob.name: knob.default for knob in self.knobs})

    def refusal(self, point: Mapping[str, Level]) -> str | None:
        """Return why the board would refuse a point, or None if it would not; knobs not named stay at their default."""
        for name, level in point.items():
            if name not in self._knobs:
                known = ", ".join(sorted(map(show_name, self._knobs)))
                return f"{self.title} has no knob {show_name(name)}; it has {known}"
            if level not in self._knobs[name].levels:
                return no_level(name, level, self._knobs[name].levels, _nearest(self._knobs[name], level))
        whole = self.default.moved(point)
        broken = (rule.broken_by(whole) for rule in self.rules)
        return next((problem for problem in broken if problem), None)

    def space(self, knobs: Sequence[str] | None = None) -> SearchSpace:
        """Return the points over the searched knobs that the board takes.

        Args:
            knobs: Names of the knobs to search instead of those the file says; all their levels then count.

        Raises:
            UnknownName: If the board has no knob of such a name.
            InvalidInput: If a name is given twice.
        """
        if knobs is None:
            searched = [knob.searched for knob in self.knobs if knob.search]
        else:
            searched = [Knob(name, self.knob(name).levels) for name in map(knob_name, knobs)]
        default = self.default.only(knob.name for knob in searched)
        return SearchSpace.grid(searched, default, lambda point: self.refusal(point) is None)


def _involved(rule: Ordered | Dependent) -> tuple[str, str]:
    if isinstance(rule, Ordered):
        return (rule.low, rule.high)
    return (rule.knob, rule.limited)


def _nearest(knob: BoardKnob, level: Level) -> str:
    if isinstance(level, str):
        return "its levels are numbers"
    near = sorted(sorted(knob.levels, key=lambda known: abs(known - level))[:2])
    return f"the nearest are {' and '.join(show_level(knob.name, known) for known in near)}"


def load_board(name: str) -> Board:
    """Return a board by its name in ``devices/`` or the path of its ``.toml`` file.

    Raises:
        UnknownName: If there is no such file; names the nearest.
        BadFile: If the file does not hold what it should; names the key and what was expected.
    """
    entry = _whole(read_document(locate("devices", "device", name)))
    knobs = tuple(_knob(key, table) for key, table in entry.each("knobs"))
    if not knobs:
        raise entry.wrong("knobs", "is missing; expected a table per knob, such as [knobs.gpu_max_mhz]")
    return entry.fill(
        Board,
        name=name,
        knobs=knobs,
        ordered=tuple(_ordered(table) for table in entry.listed("ordered")),
        dependent=tuple(_dependent(table) for table in entry.listed("dependent")),
        presets={preset: _preset(table, preset) for preset, table in entry.each("presets")},
    )


def _whole(entry: TomlTable) -> TomlTable:
    """Return a file with the tables it does not have itself taken from the shipped board that it ``extends``."""
    base = entry.values.get("extends")
    if base is None:
        return entry
    # A name and no path: a file from elsewhere is not to have others of this machine read.
    if not isinstance(base, str) or base not in names("devices"):
        raise entry.wrong("extends", f"must name a board of devices/, not {base!r}")
    inherited = read_document(locate("devices", "device", base))
    # One step only: nobody has to follow a chain, or find out that it runs in a circle.
    if "extends" in inherited.values:
        raise entry.wrong("extends", f"must name a board that does not extend another, not {base}")
    own = {key: value for key, value in entry.values.items() if key != "extends"}
    return TomlTable(entry.file, entry.place, {**inherited.values, **own})


@dataclass(frozen=True)
class _KnobTable:
    default: float
    search: bool
    search_every: int = 1
    levels: tuple[float, ...] = ()
    range: tuple[float, ...] = ()

    def spread(self) -> tuple[float, ...]:
        """Return the levels, ascending as they are listed or from first to last; none where they are not given so.

        Raises:
            InvalidInput: If there are too many.
        """
        if len(self.range) != 3 or self.levels:
            return self.levels
        first, last, step = self.range
        if step <= 0 or last < first:
            return ()
        # Before the levels are made: those of a mistyped or malicious range would not fit into memory.
        if (last - first) / step >= MOST_LEVELS:
            raise InvalidInput(f"has more than {MOST_LEVELS:,} levels")
        # Multiplied and rounded: sums of a step such as 0.1 drift, and the last level would be missed.
        return tuple(first + i * step for i in range(round((last - first) / step) + 1))


def _knob(key: str, entry: TomlTable) -> BoardKnob:
    table = entry.fill(_KnobTable)
    try:
        levels = tuple(sorted({_level(key, level)[1] for level in table.spread()}))
    except InvalidInput as err:
        raise entry.wrong("range", str(err)) from err
    if not levels:
        raise entry.wrong("levels", "is missing; expected levels = […] or range = [first, last, step]")
    name, default = _level(key, table.default)
    try:
        return BoardKnob(name, levels, default, table.search, table.search_every)
    except InvalidInput as err:
        raise entry.wrong("", f"does not hold together: {err}") from err


@dataclass(frozen=True)
class _DependentTable:
    knob: str
    level: float
    limited: str
    most: float


def _ordered(entry: TomlTable) -> Ordered:
    rule = entry.fill(Ordered)
    return Ordered(to_si(rule.low, 1)[0], to_si(rule.high, 1)[0])


def _dependent(entry: TomlTable) -> Dependent:
    table = entry.fill(_DependentTable)
    return Dependent(*_level(table.knob, table.level), *_level(table.limited, table.most))


def _preset(entry: TomlTable, name: str) -> OperatingPoint:
    entry.check_sources()
    figures = {key: value for key, value in entry.values.items() if key != "source"}
    for key, value in figures.items():
        # To Python `true` is a number too, and would be the level 1.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -MOST_LEVEL < value < MOST_LEVEL:
            raise entry.wrong(key, f"must be a number, not {str(value)[:40]!r}")
    if not figures:
        raise entry.wrong("", f"is empty; preset {name} must set at least one knob")
    return OperatingPoint(dict(_level(key, value) for key, value in figures.items()))


def _level(key: str, value: float) -> tuple[str, int | float]:
    """Return knob name and level in SI; whole levels are integers, so that a level is written in one way only."""
    name, level = to_si(key, value)
    return name, int(level) if level == int(level) else level
