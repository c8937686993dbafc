"""An estimate of the processor's energy from busy time, where nothing counts it."""

import os
import resource
import time

import psutil

from polythrottle.clock import Clock
from polythrottle.measurement import EnergyKind

_WHOSE = {False: "this process and its children", True: "every program on these processors"}


class BusyTime:
    """An estimate: busy processor seconds times a stated power per busy core.

    Those of this process and its children, or of every program on the processors that this one may use, for a model
    that somebody else serves on this machine.

    Args:
        watts_per_core: Power of one busy core in watts.
        idle_w: Power drawn all the time, in watts.
        clock: The clock idle power goes by.
        assumed: Whether nobody stated ``watts_per_core``.
        remark: Why it is an estimate.
        everyone: Whether every program counts.
    """

    kind = EnergyKind.ESTIMATED

    def __init__(
        self, watts_per_core: float, idle_w: float, clock: Clock, *, assumed: bool, remark: str, everyone: bool = False
    ) -> None:
        self._everyone = everyone
        self._watts_per_core, self._idle_w, self._clock = watts_per_core, idle_w, clock
        self._start_s = clock.now()
        self._start_busy_s = self._busy_s = self._seen_s()
        self._told_j = 0.0
        stated = "assumed" if assumed else "as stated"
        idle = f"plus {idle_w:g} W at all times" if idle_w else "idle excluded"
        self.boundary = (
            f"estimated: busy CPU time of {_WHOSE[everyone]} × {watts_per_core:g} W per core ({stated}), "
            f"{idle}; {remark}"
        )

    def total_j(self) -> float:
        """Return the estimated joules since this source was made."""
        # A child that leaves without being waited for takes its time along; a total must not fall for it.
        self._busy_s = max(self._busy_s, self._seen_s())
        idle_j = self._idle_w * (self._clock.now() - self._start_s)
        total_j = (self._busy_s - self._start_busy_s) * self._watts_per_core + idle_j
        # What is left out is known to the microsecond, what everyone took in steps: it is owed until the next step.
        self._told_j = max(self._told_j, total_j)
        return self._told_j

    def _seen_s(self) -> float:
        return machine_busy_s() if self._everyone else busy_s()

    def leave_out(self, busy_s: float) -> bool:
        """Take so many of the busy seconds since the last total off the next; return that this was done."""
        self._start_busy_s += busy_s
        return True

    def start(self) -> None:
        """Do nothing: the kernel keeps the time."""

    def stop(self) -> None:
        """Do nothing."""


def busy_s() -> float:
    """Return the processor seconds of this process, all its threads, and its children, living and finished."""
    finished = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + finished.ru_utime + finished.ru_stime + _living_children_s()


def machine_busy_s() -> float:
    """Return the seconds for which the processors this process may use were busy, whoever with; in steps of 10 ms."""
    each = psutil.cpu_times(percpu=True)
    mine = [each[number] for number in sorted(os.sched_getaffinity(0)) if number < len(each)]
    return sum(times.user + times.nice + times.system + times.irq + times.softirq for times in mine)


def _living_children_s() -> float:
    try:
        # Cheap way to learn that there are none, which is the rule; looking through /proc costs milliseconds.
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0.0
    total_s = 0.0
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:
            continue
        total_s += times.user + times.system + times.children_user + times.children_system
    return total_s
