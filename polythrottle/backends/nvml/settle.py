"""Wait until what was asked of a GPU has taken effect, as far as its clocks show.

Locked clocks cannot be read back, so what runs is the only witness. How long a change takes varies strongly by GPU and
target (arXiv 2502.20075).
"""

import threading
from dataclasses import dataclass

from polythrottle.actuation.nvml import profiles
from polythrottle.actuation.nvml_library import NotOffered
from polythrottle.backends.nvml.gpu import Gpu
from polythrottle.backends.nvml.slowdown import FAULTS, IDLE, POWER_CAP, Slowdowns
from polythrottle.clock import Clock
from polythrottle.errors import KnobRejected

GRAPHICS, MEMORY = 0, 2
"""Clock domains as nvmlDeviceGetClockInfo numbers them (nvmlClockType_t)."""

_MOST_S, _LOOK_S = 2.0, 0.01
_SLACK_HZ = 15_000_000  # drivers round to their own steps, the coarsest of which are 15 MHz
_HELD_LOWER = IDLE | POWER_CAP | sum(FAULTS)


@dataclass(frozen=True)
class Wanted:
    """The clocks that were asked for, in Hz; None where the driver is free.

    Args:
        graphics_hz: At most this.
        memory_hz: Exactly this while there is work.
    """

    graphics_hz: int | None
    memory_hz: int | None


def clock_hz(gpu: Gpu, domain: int) -> int | None:
    """Return the clock that runs in a domain, or None if the driver does not say.

    Raises:
        DeviceError: If the GPU is gone.
    """
    try:
        return gpu.number("nvmlDeviceGetClockInfo", domain) * 1_000_000
    except NotOffered:
        return None


class Overrun:
    """Notices clocks that run above what they were locked to, from any thread.

    A GB10 takes locks without effect; another tool may reset them; and a driver without persistence mode forgets them
    once it is unloaded. No call tells, but the clocks that run under load do. What is within a step of the coarsest
    drivers is none.

    Args:
        gpu: Whose.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._wanted = gpu, Wanted(None, None)
        self._guard = threading.Lock()
        self._seen = ""

    def expect(self, wanted: Wanted) -> None:
        """Expect these clocks from now on, and forget what was seen before."""
        with self._guard:
            self._wanted, self._seen = wanted, ""

    def look(self) -> None:
        """Take note of a clock that runs above its lock now.

        Raises:
            DeviceError: If the GPU is gone.
        """
        wanted = self._wanted
        for name, domain, lock_hz in (("graphics", GRAPHICS, wanted.graphics_hz), ("memory", MEMORY, wanted.memory_hz)):
            now_hz = None if lock_hz is None else clock_hz(self._gpu, domain)
            if now_hz is None or lock_hz is None or now_hz <= lock_hz + _SLACK_HZ:
                continue
            with self._guard:
                if wanted is self._wanted:  # not one that was just replaced
                    self._seen = (
                        f"the {name} clock was locked to {lock_hz // 10**6} MHz and ran at {now_hz // 10**6} MHz"
                    )

    def take(self) -> str:
        """Return what was noted since the last time, in words, and forget it."""
        with self._guard:
            seen, self._seen = self._seen, ""
        return seen


def settle(gpu: Gpu, wanted: Wanted, slowdowns: Slowdowns, clock: Clock) -> None:
    """Wait until the clocks have followed, for two seconds at most.

    A clock below what was asked for is taken as it is when the GPU idles or its power or heat holds it down; a graphics
    clock below is taken after the wait too, for the lock is a ceiling and work may be light.

    Raises:
        KnobRejected: If a clock does not come down to what was asked for, or the memory clock not up to it under work.
        DeviceError: If the GPU is gone.
    """
    end_s = clock.now() + _MOST_S
    while True:
        problem, reached = _look(gpu, wanted, slowdowns)
        if reached:
            return
        if clock.now() >= end_s:
            break
        clock.sleep(_LOOK_S)
    if problem:
        raise KnobRejected(problem)


def _look(gpu: Gpu, wanted: Wanted, slowdowns: Slowdowns) -> tuple[str, bool]:
    """Return what is wrong with the clocks, if anything, and whether they have arrived."""
    reasons = slowdowns.now()
    excused = reasons is None or bool(reasons & _HELD_LOWER)
    problems, low = [], False
    for name, domain, target_hz in (("graphics", GRAPHICS, wanted.graphics_hz), ("memory", MEMORY, wanted.memory_hz)):
        now_hz = clock_hz(gpu, domain) if target_hz is not None else None
        if now_hz is None or target_hz is None:
            continue
        below = now_hz < target_hz - _SLACK_HZ and not excused
        low = low or below
        if now_hz > target_hz + _SLACK_HZ or (below and domain == MEMORY):
            problems.append(f"asked for a {name} clock of {target_hz // 10**6} MHz, but {now_hz // 10**6} MHz run")
    return "; ".join(problems), not problems and not low


def check_power(gpu: Gpu, limit_mw: int, found_mw: int) -> None:
    """Check that a power limit is not only set but enforced.

    Args:
        gpu: Whose.
        limit_mw: What was set.
        found_mw: What the GPU was found with; nothing is expected of that one.

    Raises:
        KnobRejected: If something outside, such as a baseboard controller, enforces a lower one.
        DeviceError: If the GPU is gone.
    """
    try:
        enforced_mw = gpu.number("nvmlDeviceGetEnforcedPowerLimit")
    except NotOffered:
        return
    if enforced_mw < limit_mw and limit_mw != found_mw:
        raise KnobRejected(
            f"the power limit is set to {limit_mw / 1000:g} W, but {enforced_mw / 1000:g} W are enforced from outside"
        )


def check_profiles(gpu: Gpu, text: str) -> None:
    """Check that the workload power profiles that were requested are among those that act.

    Args:
        gpu: Whose.
        text: Their numbers, as the control holds them.

    Raises:
        KnobRejected: If one was set aside in favour of another.
        DeviceError: If the GPU is gone.
    """
    wanted = tuple(int(number) for number in text.split(",") if number)
    with gpu.library as library:
        enforced = profiles(library, library.gpu(gpu.uuid))[1]
    if missing := set(wanted) - set(enforced):
        raise KnobRejected(
            f"workload power profile {', '.join(map(str, sorted(missing)))} is requested but not enforced; "
            f"enforced is {', '.join(map(str, enforced)) or 'none'}"
        )
