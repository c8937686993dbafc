"""When queries are meant to be sent: back to back, evenly, at random, in bursts, as on a day, or as somebody recorded.

====================================  ==================================================================
``closed``                            the next query goes out when the last is answered (the default)
``uniform:30/s``                      evenly spaced
``poisson:30/s``                      independent of each other: exponential gaps
``burst:30/s?peak=5&share=0.1&length=2s``  Poisson at a rate that switches between two values; see `Burst`
``day:30/s?length=5min``              Poisson at a rate that rises and falls as on a day, with bursts; see `Day`
``trace:FILE@30/s``                   as recorded in a CSV file, gzipped or not, stretched to a rate; see `Trace`
``trace:FILE``                        at the rate at which it was recorded
====================================  ==================================================================
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from polythrottle.domain.backports import removesuffix
from polythrottle.domain.errors import InvalidInput, UnknownName
from polythrottle.domain.units import parse_quantity

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from polythrottle.domain.measurement import Query

_LEAST_PER_S = 1e-4
_MOST_PER_S = 1e6
# Part of what a seed means: `Day` draws other numbers between two blocks, so that another size gives other times.
_BLOCK = 256
FEWEST_CYCLES = 10.0
LATENCY_CYCLES = 30.0
"""How many cycles of burst and calm a window must see before its energy, and its latency, say anything of all traffic.

Between the two energy has an interval that holds, and what requests wait in the few longest bursts is still anybody's
guess: after 13 cycles the interval of a mean latency held in 80 of 100 simulated windows.
"""
_STREAM = 0x0A77
"""Sets these random numbers apart from others of the same seed."""
_EXAMPLES = "write for example closed, uniform:30/s, poisson:30/s, burst:30/s, day:30/s or trace:arrivals.csv@30/s"
_HOURS = (3, 2, 2, 1.5, 1.5, 2, 3, 5, 8, 11, 13, 14, 12, 13, 14, 13.5, 13, 13, 15, 18, 20, 18, 11, 5)
"""Relative load of the hours of a day: quiet at night, a dip at noon, busiest in the evening. Made up."""
_BURSTS_A_DAY = 12
_BURST_PEAK = 1.8
_BURST_PART = 1 / 200
"""Of a day: how many bursts on average, by how much they raise the rate, and what part of the day one lasts."""


@dataclass(frozen=True)
class Call:
    """One request as it comes.

    Args:
        time_s: When, from the beginning.
        prompt_tokens: Of its prompt; None if nobody says.
        output_tokens: Of its answer; None if nobody says.
    """

    time_s: float
    prompt_tokens: int | None = None
    output_tokens: int | None = None


@dataclass(frozen=True)
class Arrivals:
    """When queries are meant to be sent; this class itself is the closed loop, where answers decide that.

    ``str`` gives the text that `parse` reads back to an equal value.
    """

    @classmethod
    def parse(cls, text: str) -> Arrivals:
        """Return the arrivals a text means; a recorded trace is not looked at before `times`.

        Raises:
            InvalidInput: If the text is not of a form the module's table shows, or a figure is out of range.
            UnknownName: If there are no arrivals of that kind.
        """
        kind, colon, rest = text.strip().partition(":")
        if kind == "closed" and not colon:
            return CLOSED
        if kind not in _KINDS and kind != "closed":
            raise UnknownName("arrivals", kind[:40], ("closed", *_KINDS), hint=f"({_EXAMPLES})")
        if kind == "closed":
            raise InvalidInput(f"closed takes no {rest[:40]!r}; {_EXAMPLES}")
        return _KINDS[kind]._parsed(rest)

    @classmethod
    def _parsed(cls, rest: str) -> Arrivals:
        raise NotImplementedError

    @property
    def closed(self) -> bool:
        """Whether answers decide when the next query goes out."""
        return True

    @property
    def offered_per_s(self) -> float | None:
        """How many requests are sent in a second in the long run; None where answers decide."""
        return None

    def sure_per_s(self, duration_s: float) -> float | None:
        """Return how many requests are sure to be sent in a second over some time, but for chance; None if unknown."""
        return self.offered_per_s

    @property
    def random(self) -> bool:
        """Whether how many are sent in a time is chance, around a mean that is known."""
        return False

    @property
    def cycle_s(self) -> float:
        """How long a burst and a calm take together on average; 0 where there are none."""
        return 0.0

    def times(self, seed: int) -> Iterator[float] | None:
        """Return when queries are meant to be sent, in seconds from the window's start, without end and never falling.

        Args:
            seed: The same seed gives the same times; not negative.

        Returns:
            The times; None for the closed loop.

        Raises:
            BadFile: If a recorded trace cannot be read or understood.
        """
        return None

    def calls(self, seed: int) -> Iterator[Call] | None:
        """Return the requests with the lengths that a trace records, if one does; None for the closed loop.

        Args:
            seed: As for `times`.

        Raises:
            BadFile: If a recorded trace cannot be read or understood.
        """
        times = self.times(seed)
        if times is None:
            return None
        return map(Call, times)

    def __str__(self) -> str:
        return "closed"


CLOSED = Arrivals()


@dataclass(frozen=True)
class _Open(Arrivals):
    """Arrivals that do not wait for answers.

    Raises:
        InvalidInput: If the rate is not between 0.0001 and 1,000,000 per second.
    """

    rate_per_s: float

    def __post_init__(self) -> None:
        if not _LEAST_PER_S <= self.rate_per_s <= _MOST_PER_S:
            raise InvalidInput(f"arrivals come at 0.0001/s to 1000000/s, not at {self.rate_per_s:g}/s")

    @classmethod
    def _parsed(cls, rest: str) -> Arrivals:
        return cls(_rate(rest))

    @property
    def closed(self) -> bool:
        """Never."""
        return False

    @property
    def offered_per_s(self) -> float:
        """How many requests are sent in a second in the long run."""
        return self.rate_per_s

    @property
    def _rate_text(self) -> str:
        return removesuffix(f"{self.rate_per_s!r}", ".0") + "/s"


@dataclass(frozen=True)
class Uniform(_Open):
    """Evenly spaced, the first at a random part of a gap.

    Args:
        rate_per_s: Per second.
    """

    def times(self, seed: int) -> Iterator[float]:
        """Return when queries are meant to be sent; see `Arrivals.times`."""
        return _even(self.rate_per_s, _random(seed).random())

    def __str__(self) -> str:
        return f"uniform:{self._rate_text}"


@dataclass(frozen=True)
class Poisson(_Open):
    """Independent of each other: gaps are exponential.

    Args:
        rate_per_s: Mean, per second.
    """

    @property
    def random(self) -> bool:
        """Always."""
        return True

    def times(self, seed: int) -> Iterator[float]:
        """Return when queries are meant to be sent; see `Arrivals.times`."""
        return _poisson(self.rate_per_s, _random(seed))

    def __str__(self) -> str:
        return f"poisson:{self._rate_text}"


@dataclass(frozen=True)
class Burst(_Open):
    """Poisson at a rate that switches between calm and burst: a Markov-modulated Poisson process of two states.

    Both states last exponential times: a burst ``length_s`` on average, a calm as much longer as ``share`` says. Bursts
    come at ``peak`` times the mean rate, calms at what is left for the mean to be right (Fischer & Meier-Hellstern, The
    Markov-modulated Poisson process cookbook, 1993).

    Args:
        rate_per_s: Mean over both states, per second.
        peak: Rate in a burst over the mean rate; above 1.
        share: Of the time that is bursts; above 0, and at most 1 / peak.
        length_s: Mean length of a burst.

    Raises:
        InvalidInput: If one of them is out of its range.
    """

    peak: float = 5.0
    share: float = 0.1
    length_s: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (1 < self.peak < math.inf and self.share > 0 and self.share * self.peak <= 1):
            raise InvalidInput(
                f"bursts need a peak above 1 and a share of the time of at most 1/peak, "
                f"not peak={self.peak:g} and share={self.share:g}"
            )
        if not 1e-3 <= self.length_s <= 1e6:
            raise InvalidInput(f"a burst lasts 1 ms to 1,000,000 s on average, not {self.length_s:g} s")

    @classmethod
    def _parsed(cls, rest: str) -> Arrivals:
        rate, _, words = rest.partition("?")
        return cls(_rate(rate), **_options("burst", words, ("peak", "share", "length")))

    @property
    def calm_per_s(self) -> float:
        """The rate outside bursts, per second."""
        # A share of exactly 1 / peak can come out a rounding below zero.
        return max(0.0, self.rate_per_s * (1 - self.share * self.peak) / (1 - self.share))

    @property
    def calm_s(self) -> float:
        """The mean time between two bursts."""
        return self.length_s * (1 - self.share) / self.share

    @property
    def random(self) -> bool:
        """Always."""
        return True

    @property
    def cycle_s(self) -> float:
        """How long a burst and a calm take together on average."""
        return self.length_s / self.share

    def sure_per_s(self, duration_s: float) -> float:
        """Return how many requests are sure to be sent in a second: those of calms where few bursts are to be seen."""
        if duration_s < FEWEST_CYCLES * self.cycle_s:
            return self.calm_per_s
        return self.rate_per_s

    def times(self, seed: int) -> Iterator[float]:
        """Return when queries are meant to be sent; see `Arrivals.times`."""
        return self._switching(_random(seed))

    def _switching(self, random: np.random.Generator) -> Iterator[float]:
        states = ((self.calm_per_s, self.calm_s), (self.peak * self.rate_per_s, self.length_s))
        # As likely as at any moment: always to begin calm would leave short windows too few bursts.
        bursting = bool(random.random() < self.share)
        draws = _exponentials(random)
        now_s = 0.0
        while True:
            rate_per_s, mean_s = states[bursting]
            end_s = now_s + next(draws) * mean_s
            # Where bursts bring all the requests a calm has none, and no gap to divide by.
            while rate_per_s > 0 and (now_s := now_s + next(draws) / rate_per_s) < end_s:
                yield now_s
            # What was drawn beyond the end is dropped: an exponential gap has no memory.
            now_s = end_s
            bursting = not bursting

    def __str__(self) -> str:
        given = f"peak={self.peak!r}&share={self.share!r}&length={self.length_s!r}s".replace(".0&", "&")
        default = (self.peak, self.share, self.length_s) == (Burst.peak, Burst.share, Burst.length_s)
        return f"burst:{self._rate_text}" + ("" if default else f"?{given.replace('.0s', 's')}")


@dataclass(frozen=True)
class Day(_Open):
    """Poisson at a rate that rises and falls as over a day, again and again, with short bursts on top.

    A day can be as short as wished, so that it can be watched; its shape is made up. It begins at six in the morning.

    Args:
        rate_per_s: Mean over a day, per second.
        length_s: Of a day.

    Raises:
        InvalidInput: If one of them is out of its range.
    """

    length_s: float = 300.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 10 <= self.length_s <= 86_400:
            raise InvalidInput(f"a day is compressed into 10 s to 24 h, not {self.length_s:g} s")

    @classmethod
    def _parsed(cls, rest: str) -> Arrivals:
        rate, _, words = rest.partition("?")
        return cls(_rate(rate), **_options("day", words, ("length",)))

    @property
    def random(self) -> bool:
        """Always."""
        return True

    @property
    def cycle_s(self) -> float:
        """How long a day takes."""
        return self.length_s

    def rate_at(self, time_s: float) -> float:
        """Return the rate outside bursts, per second.

        Args:
            time_s: Since the beginning.
        """
        hour = (24 * time_s / self.length_s + 6) % 24
        before = _HOURS[int(hour)]
        after = _HOURS[(int(hour) + 1) % 24]
        share = hour - int(hour)
        # What bursts add on average is taken off, so that the mean over a day stays the rate that was asked for.
        bursts = 1 + _BURSTS_A_DAY * _BURST_PART * (_BURST_PEAK - 1)
        return self.rate_per_s * (before * (1 - share) + after * share) / (sum(_HOURS) / 24) / bursts

    def sure_per_s(self, duration_s: float) -> float:
        """Return how many requests are sure to be sent in a second: those of the night if few days are to be seen."""
        least_per_s = min(self.rate_at(hour * self.length_s / 24) for hour in range(24))
        if duration_s < FEWEST_CYCLES * self.cycle_s:
            return least_per_s
        return self.rate_per_s

    def times(self, seed: int) -> Iterator[float]:
        """Return when queries are meant to be sent; see `Arrivals.times`."""
        return self._thinned(_random(seed))

    def _thinned(self, random: np.random.Generator) -> Iterator[float]:
        """Yield arrivals at the highest rate there is, each left out as likely as the rate at its time is lower.

        Lewis & Shedler, Simulation of nonhomogeneous Poisson processes by thinning, 1979.
        """
        most_per_s = _BURST_PEAK * max(self.rate_at(hour * self.length_s / 24) for hour in range(24))
        draws = _exponentials(random)
        now_s = 0.0
        burst_s = self.length_s * _BURST_PART
        gap_s = self.length_s * (1 / _BURSTS_A_DAY - _BURST_PART)
        begins_s = next(draws) * gap_s
        ends_s = begins_s + burst_s
        while True:
            now_s += next(draws) / most_per_s
            while now_s >= ends_s:
                begins_s = ends_s + next(draws) * gap_s
                ends_s = begins_s + burst_s
            rate_per_s = self.rate_at(now_s) * (_BURST_PEAK if now_s >= begins_s else 1.0)
            if random.random() * most_per_s < rate_per_s:
                yield now_s

    def __str__(self) -> str:
        if self.length_s == Day.length_s:
            length = ""
        else:
            length = f"?length={self.length_s!r}s".replace(".0s", "s")
        return f"day:{self._rate_text}{length}"


@dataclass(frozen=True)
class Trace(_Open):
    """As recorded in a CSV file, stretched in time to a mean rate, begun anywhere, and repeated when it ends.

    The file names its columns in its first line. One is called ``arrival_s``, ``timestamp``, ``time_ms`` or the like
    and holds numbers (seconds, unless its name ends in ``_ms``, ``_us`` or ``_ns``) or ISO dates, oldest first. Columns
    ``prompt_tokens`` and ``output_tokens`` say how long the requests to a language model are.

    Args:
        rate_per_s: Mean over the whole trace, per second.
        file: Path of the file.
    """

    file: str = ""

    @classmethod
    def _parsed(cls, rest: str) -> Arrivals:
        # From the right: a file's name may hold the sign too.
        file, at, rate = rest.rpartition("@")
        if at and file:
            return cls(_rate(rate), file)
        if at or not rest or re.fullmatch(r"[\d.]+ */ *\w+", rest):
            raise InvalidInput(
                f"'trace:{rest[:60]}' needs a file and a rate, or a file alone; write for example "
                f"trace:arrivals.csv@30/s, or trace:arrivals.csv for the rate it was recorded at"
            )
        return cls(_recorded_rate(Path(rest)), rest)

    @property
    def length_s(self) -> float:
        """After what time it begins again.

        Raises:
            BadFile: If the file cannot be read, or is no such table.
        """
        from polythrottle.storage.arrival_trace import recorded

        return len(recorded(Path(self.file))) / self.rate_per_s

    def times(self, seed: int) -> Iterator[float]:
        """Return when queries are meant to be sent; see `Arrivals.times`.

        Raises:
            BadFile: If the file cannot be read, or is no such table.
        """
        # Imported here: the actuator has arrivals in memory and never reads a table.
        from polythrottle.storage.arrival_trace import recorded

        return _repeated(recorded(Path(self.file)), self.rate_per_s, _random(seed).random())

    def calls(self, seed: int) -> Iterator[Call]:
        """Return the requests, with the lengths of their prompts and answers where the file holds them.

        Raises:
            BadFile: If the file cannot be read, or is no such table.
        """
        from polythrottle.storage.arrival_trace import recorded, recorded_lengths

        path = Path(self.file)
        offsets_s = recorded(path)
        share = _random(seed).random()
        times = _repeated(offsets_s, self.rate_per_s, share)
        lengths = recorded_lengths(path)
        if lengths is None:
            return map(Call, times)
        first = _first(offsets_s, share)
        prompts, outputs = (each.tolist() for each in lengths)
        order = itertools.chain(range(first, len(prompts)), itertools.cycle(range(len(prompts))))
        return (Call(time_s, prompts[i], outputs[i]) for time_s, i in zip(times, order))

    def __str__(self) -> str:
        return f"trace:{self.file}@{self._rate_text}"


@runtime_checkable
class SelfPaced(Protocol):
    """A workload that exists in virtual time and has a queue of its own, with many requests in flight at once."""

    def served(self, arrivals: Arrivals, seed: int, timeout_s: float) -> Generator[Query, None, None]:
        """Yield requests in the order in which they are answered, each when it is.

        Args:
            arrivals: When they come.
            seed: Of the arrivals.
            timeout_s: How long nothing may come.

        Raises:
            TrialError: If nothing comes for that long, or a request cannot be served.
        """


_KINDS: dict[str, type[_Open]] = {"uniform": Uniform, "poisson": Poisson, "burst": Burst, "day": Day, "trace": Trace}


def _rate(text: str) -> float:
    try:
        return parse_quantity(text, "per_s")
    except InvalidInput:
        raise InvalidInput(f"{text[:40]!r} is not a rate such as 30/s or 90/min; {_EXAMPLES}") from None


def _options(kind: str, words: str, known: tuple[str, ...]) -> dict[str, float]:
    options = [_option(kind, word, known) for word in words.split("&") if word]
    if len(given := dict(options)) < len(options):
        raise InvalidInput(f"an option of {kind} is given twice in {words[:60]!r}; say each once")
    return given


def _option(kind: str, word: str, known: tuple[str, ...]) -> tuple[str, float]:
    name, _, text = word.partition("=")
    if name not in known:
        raise UnknownName(f"option of {kind}", name[:40], known)
    if name == "length":
        return "length_s", parse_quantity(text, "s")
    try:
        return name, float(text)
    except ValueError:
        raise InvalidInput(f"{name}={text[:40]!r} is not a number; write for example peak=5&share=0.1") from None


def _random(seed: int) -> np.random.Generator:
    import numpy as np

    return np.random.default_rng([seed, _STREAM])


def _exponentials(random: np.random.Generator) -> Iterator[float]:
    while True:
        # In blocks and as Python's numbers: a call of NumPy for each, and its scalars, take longer than the draw.
        yield from random.standard_exponential(_BLOCK).tolist()


def _even(rate_per_s: float, phase: float) -> Iterator[float]:
    number = 0
    while True:
        yield (number + phase) / rate_per_s  # not a sum of gaps, whose rounding would add up
        number += 1


def _poisson(rate_per_s: float, random: np.random.Generator) -> Iterator[float]:
    now_s = 0.0
    for draw in _exponentials(random):
        now_s += draw / rate_per_s
        yield now_s


def _recorded_rate(path: Path) -> float:
    """Return the mean rate at which a trace was recorded, per second."""
    from polythrottle.storage.arrival_trace import recorded

    offsets_s = recorded(path)
    return float(f"{len(offsets_s) / _period_s(offsets_s):.6g}")


def _period_s(offsets_s: NDArray[np.float64]) -> float:
    """Return after what time a trace begins again: the last and the first are a mean gap apart."""
    return float(offsets_s[-1]) * len(offsets_s) / (len(offsets_s) - 1)


def _first(offsets_s: NDArray[np.float64], share: float) -> int:
    """Return which request is the first from a share of a trace's length on."""
    import numpy as np

    return int(np.searchsorted(offsets_s, share * _period_s(offsets_s)))


def _repeated(offsets_s: NDArray[np.float64], rate_per_s: float, share: float) -> Iterator[float]:
    """Yield a trace again and again from a share of its length on; the last and the first are a mean gap apart."""
    count = len(offsets_s)
    period_s = _period_s(offsets_s)
    stretch = count / rate_per_s / period_s
    begin_s = share * period_s
    first = _first(offsets_s, share)
    lap_s = -begin_s
    while True:
        for start in range(first, count, _BLOCK):
            # In parts: a trace of a day as Python's numbers would take several times its array.
            yield from ((offsets_s[start : start + _BLOCK] + lap_s) * stretch).tolist()
        first = 0
        lap_s = lap_s + period_s
