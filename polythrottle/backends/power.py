"""Power: integrated into joules, by a thread that reads it several times a second; and that of a Grace superchip.

The superchip's, beside its GPU's, is of CPU, SoC and module, by the ACPI power meters of its firmware. The kernel's
``power_meter`` driver shows each as a hwmon device whose ``device/power1_oem_info`` names the boundary, ``Module Power
Socket 0``, ``Grace Power Socket 0``, ``CPU Power Socket 0``, ``SysIO Power Socket 0``, beside ``power1_average`` in
microwatts and ``power1_average_interval`` in milliseconds, 50 or 1000 (NVIDIA Grace Performance Tuning Guide, "Power
Telemetry"; Linux Documentation/hwmon/acpi_power_meter.rst; ACPI tables of NVIDIA's UEFI). The module's covers
regulators, GPU, HBM and memory (Alumet's user book, "Grace Hopper plugin").
"""

from __future__ import annotations

import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from polythrottle.actuation.drivers.all_controls import SystemControls
from polythrottle.backends.probe import Tree
from polythrottle.domain.clock import Clock, Thread, VirtualClock
from polythrottle.domain.errors import PolythrottleError

# Joules out of watts: power readings integrated over time.


@dataclass(frozen=True)
class PowerReading:
    """A power reading.

    Args:
        watts: How much.
        timestamp_us: When whoever took it took it, to know a repeated one by; None where it does not say.
    """

    watts: float
    timestamp_us: int | None = None


class PowerIntegrator:
    """Power readings integrated over time by trapezoids; a reading seen before counts once.

    Args:
        read: Returns the power now.
        made_of: Which call that is, and over what time it averages.
        clock: The device's.
    """

    def __init__(self, read: Callable[[], PowerReading], made_of: str, clock: Clock) -> None:
        self._read = read
        self.made_of = made_of
        self._clock = clock
        self._guard = threading.Lock()
        self._last: PowerReading | None = None
        self._last_s = 0.0
        self._total_j = 0.0

    def total_j(self) -> float:
        """Return the joules since the first reading, up to now.

        Raises:
            DeviceError: If the sensor is gone.
        """
        with self._guard:
            self._sample(closing=True)
            return self._total_j

    def look(self) -> None:
        """Take a reading.

        Raises:
            DeviceError: If the sensor is gone.
        """
        with self._guard:
            self._sample(closing=False)

    def _sample(self, *, closing: bool) -> None:
        power = self._read()
        now_s = self._clock.now()
        if self._last is None:
            self._last = power
            self._last_s = now_s
            return
        repeated = power.timestamp_us is not None and power.timestamp_us == self._last.timestamp_us
        if repeated and not closing:
            return  # the next reading that is new spans the time since the last
        self._total_j += (self._last.watts + power.watts) / 2 * (now_s - self._last_s)
        self._last = power
        self._last_s = now_s


# Looks at a sensor several times a second in the background, for what a reading at either end would miss.

_MOST_PERIODS = 5
"""So long a thread sleeps at most: somebody may come whose first look is due sooner than those it knows of."""


class BackgroundSampler:
    """Calls a function at a steady pace in a thread while anybody needs it, and knows what that costs.

    Args:
        look: What to do each time; returns how many looks may be left out after this one, if any may. An error ends
            the looks; the next reading meets it where somebody can act on it.
        period_s: From one look to the next.
        clock: The device's; in virtual time there is no thread, for time passes only while somebody waits.
        name: Of the thread.
        at_once: Whether the first look is at the start, and not a period later.
        shared: Whether one thread does for all of that name and period, each look after the other: eight threads that
            wake four times a second take several times what they look at takes. Not for looks that may take long.
    """

    def __init__(
        self,
        look: Callable[[], int | None],
        period_s: float,
        clock: Clock,
        name: str,
        *,
        at_once: bool = False,
        shared: bool = False,
    ) -> None:
        self._look = look
        self._clock = clock
        self._ticker = _Ticker(period_s, name, at_once=at_once)
        if shared:
            self._ticker = _shared.setdefault((name, period_s), self._ticker)
        self._turn = threading.Lock()
        self._looking = threading.Lock()
        self._runs = False
        self._process = 0
        self.users = 0
        """How many have started it and not stopped it."""
        self.busy_s = 0.0
        """Processor seconds that looking has taken so far."""
        self.looks = 0
        self.due_s = 0.0
        """When to look next, as `time.monotonic` counts."""

    @property
    def running(self) -> bool:
        """Whether a thread looks, or did until an error."""
        return self._runs

    def start(self) -> None:
        """Look from now on, until `stop` was called as often.

        Raises:
            DeviceError: If no thread can be started.
        """
        with self._turn:
            if self.users == 0 and not isinstance(self._clock, VirtualClock):
                self._looking = threading.Lock()  # in a fork nobody may ever release that of its parent
                self._process = os.getpid()
                self._runs = True
                try:
                    self._ticker.add(self)
                except BaseException:
                    self._runs = False
                    raise
            self.users += 1

    def stop(self) -> None:
        """End after the look in progress, unless somebody else needs it still; waits for no other sampler's look."""
        with self._turn:
            self.users = max(0, self.users - 1)
            if self.users or not self._runs:
                return
            if self._process != os.getpid():
                self._runs = False  # a fork has no thread that looks
                return
            # Before it is removed: the last one ends the thread, and would wait for a GPU whose driver hangs.
            with self._looking:
                self._runs = False
            self._ticker.remove(self)

    def look(self, period_s: float) -> bool:
        """Look once, say when the next is due, and return whether to go on."""
        with self._looking:
            if not self._runs:
                self.due_s = math.inf
                return True
            began_s = time.thread_time()
            try:
                left_out = self._look() or 0
            except PolythrottleError:
                return False
            except Exception:
                # A fault of ours is told as that of any thread is, and must not leave other GPUs' slowdowns unseen.
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
                return False
            self.busy_s += time.thread_time() - began_s
            self.looks += 1
        # A look that was late is made up for once; those before it are lost.
        self.due_s = max(self.due_s + (1 + left_out) * period_s, time.monotonic() - period_s)
        return True


class _Ticker:
    """A thread for the samplers of one pace, while there are any."""

    def __init__(self, period_s: float, name: str, *, at_once: bool) -> None:
        self._period_s = period_s
        self._name = name
        self._at_once = at_once
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget everything, as a process must that was just forked: it has the record of a thread that it has not."""
        self._change = threading.Lock()
        self._samplers: tuple[BackgroundSampler, ...] = ()
        self._over = threading.Event()
        self._thread: Thread | None = None

    def add(self, sampler: BackgroundSampler) -> None:
        """Have one more look.

        Raises:
            DeviceError: If no thread can be started.
        """
        with self._change:
            before = self._samplers
            sampler.due_s = time.monotonic() + (0.0 if self._at_once else self._period_s)
            self._samplers = (*before, sampler)  # before the thread: its first look may be at once
            if self._thread is None:
                over = threading.Event()
                thread = Thread(target=self._run, args=(over,), name=self._name, daemon=True)
                try:
                    thread.start()
                except BaseException:
                    self._samplers = before
                    raise
                self._over = over
                self._thread = thread

    def remove(self, sampler: BackgroundSampler) -> None:
        """Have one look no more; the last ends the thread."""
        with self._change:
            self._samplers = tuple(each for each in self._samplers if each is not sampler)
            if self._samplers or self._thread is None:
                return
            self._over.set()
            thread = self._thread
            self._thread = None
        thread.join()

    def _run(self, over: threading.Event) -> None:
        while not over.wait(self._wait_s()):
            # What is due within half a period is looked at too: one waking does for all.
            now_s = time.monotonic() + self._period_s / 2
            due = [each for each in self._samplers if each.due_s <= now_s]
            failed = [each for each in due if not each.look(self._period_s)]
            if failed:
                with self._change:
                    self._samplers = tuple(each for each in self._samplers if each not in failed)

    def _wait_s(self) -> float:
        """Return how long nothing is due; some periods at most, for one may come whose first look is due sooner."""
        now_s = time.monotonic()
        due_s = min((each.due_s for each in self._samplers), default=math.inf)
        return min(max(0.0, due_s - now_s), _MOST_PERIODS * self._period_s)


_shared: dict[tuple[str, float], _Ticker] = {}


def _begin_all_anew() -> None:
    for each in _shared.values():
        each.begin_anew()


os.register_at_fork(after_in_child=_begin_all_anew)


_LABEL = re.compile(r"(Module|Grace|CPU|SysIO) Power Socket (\d+)")
_COVERS = {
    "Module": "the whole module: GPU, its memory, processor and regulators",
    "Grace": "the Grace socket",
    "CPU": "the rail of the cores",
    "SysIO": "the rail of the SoC",
}


@dataclass(frozen=True)
class Channel:
    """One power meter of a superchip.

    Args:
        label: As the firmware names it.
        name: What it is called by: ``module``, ``grace``, ``cpu`` or ``sysio``.
        socket: Of which it is.
        covers: What its watts are of, in words.
        file: Of microwatts.
        power_w: What it tells now.
        averaged_s: Over how long each value is the mean; None if nobody tells.
    """

    label: str
    name: str
    socket: int
    covers: str
    file: Path
    power_w: float
    averaged_s: float | None


NAMES = tuple(name.lower() for name in _COVERS)


def channels(root: Path = Path("/")) -> tuple[Channel, ...]:
    """Return the power meters of a Grace superchip, by label; none on another machine, or where none answers.

    Args:
        root: Where ``sys`` hangs.
    """
    return tuple(sorted(_found(Tree(root, SystemControls())), key=lambda each: each.label))


def _found(tree: Tree) -> Iterator[Channel]:
    # Kernels before the driver was rewritten have the files in the parent's folder alone.
    for file in tree.found("sys/class/hwmon/hwmon*/device/power1_oem_info", "sys/class/hwmon/hwmon*/power1_oem_info"):
        match = _LABEL.fullmatch(" ".join((tree.text(file) or "").split()))
        microwatts = tree.number(file.with_name("power1_average"))
        if match is None or microwatts is None:
            continue
        interval_ms = tree.number(file.with_name("power1_average_interval"))
        averaged_s = interval_ms / 1000 if interval_ms else None
        yield Channel(
            label=match[0],
            name=match[1].lower(),
            socket=int(match[2]),
            covers=_COVERS[match[1]],
            file=file.with_name("power1_average"),
            power_w=microwatts / 1e6,
            averaged_s=averaged_s,
        )
