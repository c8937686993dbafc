"""The memory's clock: a lock on its rate, never a cap.

The clock's firmware (BPMP) holds a rate while ``mrq_rate_locked`` is 1; back at 0 the memory's governor has it again.
Three hazards shape this module. A rate off the firmware's table is dropped without an error, so only the table is
written and each rate is read back: a voltage table (``dvfs_table``) names some that cannot be locked. A lowered cap
(``nvpmodel_clk_cap/emc``) could not be raised again on an AGX Orin (tiiuae/ghaf, pull request 2071), so caps are only
read. And because that is one report, the first use on a board proves that raising works: a step down and up, through
the actuator; where it does not, the knob is off until the next start.

The list of rates is ``bpmp/debug/emc/possible_rates``, beside the clock's folder and not in it, and ends in its unit:
``204000 665600 2133000 (kHz)`` (kcirtapfromspace/gemma4, ``POWER_MODE.md``, an Orin NX; softsys4ai/FlexiBO,
``config.yaml``, a TX2). Public sweeps on Thor take it from ``clk/emc/dvfs``, on Orin from ``clk/emc/dvfs_table``, the
second word of each line in Hz; where there is no list, other public programs take the names of the timing tables below
``bpmp/debug/emc/tables/regular``, in kHz (an Orin Nano, an AGX Xavier). They also write 1 to ``state`` and
``bwmgr/bwmgr_halt`` while they hold a rate, without which the bandwidth manager moves it. The files lie in debugfs,
which kernel lockdown (secure boot) closes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from polythrottle.actuation.actuator import Actuator
from polythrottle.actuation.drivers.controls import Control, Setting
from polythrottle.actuation.limits import Limits
from polythrottle.backends.probe import KIND, Capability, Tree, unavailable, within
from polythrottle.domain.errors import KnobRejected, PolythrottleError
from polythrottle.domain.units import show_level

NAME = "mem_hz"
_FREE = "0"
_LOCKED = "1"
_CAPS = (
    "sys/kernel/nvpmodel_clk_cap/emc",
    "sys/kernel/nvpmodel_emc_cap/emc_iso_cap",
    "sys/class/devfreq/bwmgr/max_freq",
)
_NOW = "sys/class/devfreq/bwmgr/cur_freq"
_DEBUG = "sys/kernel/debug"
_LOCKDOWN = "sys/kernel/security/lockdown"


@dataclass(frozen=True)
class RateLock:
    """Where a kernel lets the memory's rate be locked; places below debugfs.

    Args:
        lock: File that holds 1 while the rate is locked.
        rate: File that takes the rate, in Hz.
        now: File that tells the rate, in Hz.
        lists: Files that list the rates, the best first.
        bounds: Files of the lowest and the highest rate, in Hz, where there are such.
        switches: Files that hold 1 beside the lock, where all of them are there.
    """

    lock: str
    rate: str
    now: str
    lists: tuple[str, ...]
    bounds: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()

    @property
    def places(self) -> tuple[str, ...]:
        """Every file of it."""
        return tuple(dict.fromkeys((self.lock, self.rate, self.now, *self.lists, *self.bounds, *self.switches)))


_BPMP = "bpmp/debug/clk/emc"
_TABLES = "bpmp/debug/emc/tables/regular"
_OVERRIDE = "clk/override.emc"
_DOORS = (
    RateLock(
        f"{_BPMP}/mrq_rate_locked",
        f"{_BPMP}/rate",
        f"{_BPMP}/rate",
        (
            "bpmp/debug/emc/possible_rates",
            _TABLES,
            f"{_BPMP}/dvfs",
            f"{_BPMP}/dvfs_table",
            "clk/emc/clk_possible_rates",
        ),
        (f"{_BPMP}/min_rate", f"{_BPMP}/max_rate"),
        (f"{_BPMP}/state", "bpmp/debug/bwmgr/bwmgr_halt"),
    ),
    # Tegra X1, before the firmware had the clock: the table is there on some kernels only.
    RateLock(
        f"{_OVERRIDE}/clk_state",
        f"{_OVERRIDE}/clk_update_rate",
        f"{_OVERRIDE}/clk_rate",
        ("clk/emc/clk_possible_rates",),
    ),
)
_LEAST_TOP_HZ = 100_000_000  # no memory is slower at its highest: a smaller figure is in kHz
_MOST_DIGITS = 15
_UNITS = {"(Hz)": 1, "(kHz)": 1000, "(MHz)": 1_000_000}


class MemoryClock:
    """The memory's clock.

    Its highest level, the default, leaves the rate to the governor up to the limit found, as nobody touched it; each
    lower level locks it. Where the administrator allows less than was found, the highest level allowed is locked too.
    Levels are the firmware's table between its bounds, below the cap found and within the administrator's limits. A
    lock somebody else holds is not broken: the knob is off then.

    Args:
        tree: The board's files.
        actuator: Knows whether the lock was free before anyone tuned it.
        limits: The administrator's.
    """

    def __init__(self, tree: Tree, actuator: Actuator, limits: Limits) -> None:
        self._tree = tree
        self._actuator = actuator
        self._door = next((door for door in _DOORS if tree.holds(tree.root / _DEBUG / door.lock)), None)
        self._switches: tuple[str, ...] = ()
        self._proven = False
        self._one_way: str | None = None
        self._free_hz = 0
        self._list, self.table = self._rates()
        self._probed_capability = self._probed(limits)
        if self._probed_capability.works:
            rates = frozenset(str(level) for level in self._probed_capability.levels)
            actuator.allow(
                *(Control(switch, frozenset({_FREE, _LOCKED})) for switch in (self._lock, *self._switches)),
                Control(self._rate, rates, follows=(self._lock, _FREE)),
            )

    @property
    def capability(self) -> Capability:
        """The knob as it was found, or off since raising the rate failed."""
        if self._one_way is not None:
            return unavailable([NAME], self._one_way, "restart the board to have its memory as it was")[0]
        return self._probed_capability

    @property
    def files(self) -> tuple[Path, ...]:
        """What it reads and may write."""
        fixed = tuple(self._tree.root / place for place in (*_CAPS, _NOW, _LOCKDOWN))
        if self._door is None:
            return fixed
        return (*fixed, *map(self._file, self._door.places))

    def _file(self, name: str) -> Path:
        return self._tree.root / _DEBUG / name

    def _rates(self) -> tuple[Path | None, tuple[int, ...]]:
        """Return the first list that names two rates or more, and its rates in Hz, ascending."""
        for place in self._door.lists if self._door is not None else ():
            text = self._tree.text(self._file(place)) or ""
            if place == _TABLES:
                text = " ".join(each.name for each in self._tree.found(f"{_DEBUG}/{place}/*")) + " (kHz)"
            rates = rates_hz(text)
            if len(rates) > 1:
                return self._file(place), rates
        return None, ()

    def _probed(self, limits: Limits) -> Capability:
        if self._door is None:
            return unavailable([NAME], *self._closed())[0]
        self._lock = str(self._file(self._door.lock))
        self._rate = str(self._file(self._door.rate))
        if not self.table:
            lists = " or ".join(str(self._file(place)) for place in self._door.lists)
            return unavailable([NAME], f"no rates to choose from are listed in {lists}")[0]
        if refusal := self._tree.refusal(Path(self._lock), Path(self._rate)):
            return unavailable([NAME], refusal, "run as root: debugfs is for root alone")[0]
        try:
            lock = self._actuator.original(self._lock)
            self._switches = self._found_free(self._door)
        except PolythrottleError as err:
            return unavailable([NAME], f"cannot tell whether the rate is locked: {err}")[0]
        if lock != _FREE:
            remedy = "if jetson_clocks did that: sudo jetson_clocks --restore"
            return unavailable([NAME], "somebody else has locked the memory's rate", remedy)[0]
        return self._between(limits)

    def _found_free(self, door: RateLock) -> tuple[str, ...]:
        """Return the switches that are to be held beside the lock: those found at 0, if this kernel has them all."""
        files = [self._file(place) for place in door.switches]
        if not all(map(self._tree.there, files)):
            return ()
        return tuple(str(file) for file in files if self._actuator.original(str(file)) == _FREE)

    def _between(self, limits: Limits) -> Capability:
        assert self._door is not None
        low, high = [self._tree.number(self._file(name)) for name in self._door.bounds] or [None, None]
        most = min([high or self.table[-1], *(cap for cap in self._caps() if cap > 0)])
        found = within(NAME, self.table, low or self.table[0], most, Limits())
        levels = limits.within(KIND, NAME, found)
        if len(levels) < 2:
            told = f"fewer than two rates lie within the limits found (up to {show_level(NAME, most)}) and allowed"
            return unavailable([NAME], told)[0]
        self._free_hz = found[-1]
        told = "the highest leaves the memory to its governor, the others lock it"
        told = told if levels[-1] == found[-1] else "each locks the memory"
        if self._from_voltages:
            told = f"{told}; from {self._list}, not all of whose rates can be locked"
        return Capability(NAME, levels, levels[-1], told)

    @property
    def _from_voltages(self) -> bool:
        """Whether the rates come from a voltage table, not all of whose rates can be locked."""
        return self._list is not None and "dvfs" in self._list.name

    def _caps(self) -> list[int]:
        """Return the caps that stand, in Hz; 0 stands for none."""
        return [number for place in _CAPS if (number := self._tree.number(self._tree.root / place)) is not None]

    def _closed(self) -> tuple[str, str]:
        lockdown = self._tree.text(self._tree.root / _LOCKDOWN) or ""
        if "[integrity]" in lockdown or "[confidentiality]" in lockdown:
            return "kernel lockdown (secure boot) closes debugfs, where the memory's rate is set", ""
        folder = self._tree.root / _DEBUG
        if not folder.is_dir() or not any(True for _ in self._tree.found(f"{_DEBUG}/*")):
            return f"{folder} is closed to this user or not mounted", "run as root; mount -t debugfs none " + str(
                folder
            )
        return f"this kernel has no rate lock for memory in {folder}", ""

    @property
    def clock_hz(self) -> int | None:
        """What runs now, or None if nobody can tell."""
        rate = None
        if self._door is not None:
            rate = self._tree.number(self._file(self._door.now))
        return rate or self._tree.number(self._tree.root / _NOW) or None

    def apply(self, rate_hz: int) -> None:
        """Lock the rate at a level, or leave it to the governor at the highest.

        Raises:
            KnobRejected: If the rate is not kept, or raising it has failed on this board.
        """
        if rate_hz == self._free_hz:
            self._let_go()
            return
        self._prove()
        self._hold(rate_hz)

    def _hold(self, rate_hz: int) -> None:
        switched = (Setting(switch, _LOCKED) for switch in (self._lock, *self._switches))
        self._actuator.apply((*switched, Setting(self._rate, str(rate_hz))))

    def _let_go(self) -> None:
        self._actuator.apply([Setting(switch, _FREE) for switch in (self._lock, *self._switches)])

    def _prove(self) -> None:
        """Step down and up once, so that a rate is only ever lowered where it can be raised again."""
        if self._one_way is not None:
            raise KnobRejected(f"{NAME} is off: {self._one_way}")
        if self._proven:
            return
        *below, top = map(int, self._probed_capability.levels)
        higher = [top]
        refusals = []
        for rate_hz in reversed(below if self._from_voltages else below[-1:]):
            if (refusal := self._refused(rate_hz)) is not None:
                refusals.append(refusal)
            elif any(self._refused(each) is None for each in higher):
                self._proven = True
                return
            else:
                higher.append(rate_hz)
        self._let_go()
        if refusals:
            why = refusals[0]
        else:
            why = f"it went down to {show_level(NAME, higher[-1])} and stayed there"
        self._one_way = f"the memory's rate did not step down and up again on this board: {why}"
        raise KnobRejected(f"{NAME} is off: {self._one_way}")

    def _refused(self, rate_hz: int) -> str | None:
        """Return why the memory does not hold a rate, or None once it does."""
        try:
            self._hold(rate_hz)
        except KnobRejected as err:
            return str(err)
        return None

    def unsettled(self, rate_hz: int) -> str | None:
        """Return what still runs at another rate than the locked one, or None."""
        now = self.clock_hz
        if rate_hz == self._free_hz or now is None or now == rate_hz:
            return None
        return f"the memory runs at {show_level(NAME, now)}, not at {show_level(NAME, rate_hz)}"

    def overrun(self, rate_hz: int) -> str | None:
        """Return that the memory runs at another rate than it was locked to; None if it does not."""
        if self.unsettled(rate_hz) is None:
            return None
        return f"the memory clock was locked to {rate_hz // 10**6} MHz and ran at {(self.clock_hz or 0) // 10**6} MHz"


def rates_hz(text: str) -> tuple[int, ...]:
    """Return the rates that a file lists, in Hz, ascending; empty if it lists none that can be understood.

    A list is numbers on one line, with or without their unit at the end. A voltage table has one rate a line, in Hz, as
    its second word; lines that have no number there are passed over.
    """
    lines = [words for line in text.splitlines() if (words := line.split())]
    if len(lines) > 1:
        numbers = [words[1] for words in lines if len(words) > 1 and words[1].isdecimal()]
        return _in_hz(numbers, None)
    words = lines[0] if lines else []
    unit = _UNITS.get(words[-1]) if words else None
    return _in_hz(words if unit is None else words[:-1], unit)


def _in_hz(words: Sequence[str], unit_hz: int | None) -> tuple[int, ...]:
    # The kernel's text is not trusted: the length is bounded before anything becomes a number.
    if not all(word.isdecimal() and len(word) < _MOST_DIGITS for word in words):
        return ()
    rates = sorted({int(word) for word in words if int(word) > 0})
    guessed = 1000 if rates and rates[-1] < _LEAST_TOP_HZ else 1
    return tuple(rate * (guessed if unit_hz is None else unit_hz) for rate in rates)
