"""What can be set on a GPU: its knobs, their levels, and how each level is written."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from polythrottle.actuation.controls import Control
from polythrottle.actuation.nvml import GPU_CLOCKS, MEM_CLOCKS, UNLOCKED, key_of
from polythrottle.space import Level

GPU_KNOB, MEM_KNOB, POWER_KNOB, PROFILE_KNOB = "gpu_max_hz", "mem_hz", "power_limit_w", "power_profile"


@dataclass(frozen=True)
class Dial:
    """One knob of a GPU.

    Args:
        name: With its SI unit.
        what: The control behind it (`polythrottle.actuation.nvml`).
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
        """The knobs that can be set, in the order the driver wants them: memory, graphics, limit, profile."""
        order = (MEM_KNOB, GPU_KNOB, POWER_KNOB, PROFILE_KNOB)
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
                return f"{name} has no level {level}; " + (dial.off or f"it has {_listed(dial)}")
        return self._apart(point)

    def _apart(self, point: Mapping[str, Level]) -> str | None:
        if GPU_KNOB not in point:
            return None
        memory = point.get(MEM_KNOB, self.knobs[MEM_KNOB].default)
        clocks = self.clocks_hz[memory if isinstance(memory, int) else max(self.clocks_hz)]
        if point[GPU_KNOB] in clocks:
            return None
        return f"at {MEM_KNOB} {memory} the driver offers {GPU_KNOB} {clocks[0]} to {clocks[-1]} only"


def _listed(dial: Dial) -> str:
    levels = list(map(str, dial.texts))
    return ", ".join(levels) if len(levels) <= 8 else f"{len(levels)} levels from {levels[0]} to {levels[-1]}"
