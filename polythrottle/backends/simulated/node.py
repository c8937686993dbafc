"""A simulated server of GPUs: which of them a name means, how each differs from its description, what else it draws."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from polythrottle.domain.errors import InvalidInput, UnknownName

NODE = "node"
_GPUS = "8xh100"
_MOST = 16
_KIND = re.compile(r"(\d{1,2})x([a-z0-9][a-z0-9-]*)")
_SPAN = re.compile(r"(\d{1,2})(?:-(\d{1,2}))?")
_SILICON = 0x51
"""Sets the silicon of GPUs apart from other random numbers of the same seed."""


@dataclass(frozen=True)
class Silicon:
    """What a GPU draws and takes, over what its description says."""

    power: float = 1.0
    time: float = 1.0


@dataclass(frozen=True)
class SimulatedGroup:
    """Simulated GPUs that answer as one device, each its part of a batch, and are done when the slowest is.

    Args:
        name: Of their URI, such as ``node/0-3``.
        options: Of their URI, such as ``gpus=8xl4``.
        number: Of the first of them.
        silicon: Of each.
    """

    name: str
    options: tuple[str, ...]
    number: int
    silicon: tuple[Silicon, ...]

    @property
    def gpus(self) -> int:
        """How many they are."""
        return len(self.silicon)

    @property
    def power(self) -> float:
        """What all draw, over what one does by its description."""
        return sum(each.power for each in self.silicon)

    @property
    def hottest(self) -> float:
        """What the one draws that draws most, over what it would by its description."""
        return max(each.power for each in self.silicon)

    @property
    def time(self) -> float:
        """What the slowest takes, over what it would by its description."""
        return max(each.time for each in self.silicon)


ALONE = SimulatedGroup("", (), 0, (Silicon(),))
"""A board by itself, which is as its description says."""


@dataclass(frozen=True)
class SimulatedNode:
    """A server of simulated GPUs.

    How their silicon differs, and what the server draws besides them, is assumed: power by 6 % and time by 1 % around
    the description (standard deviation), 300 W for the host, and 6 % of what the GPUs draw for fans and supplies.

    Args:
        boards: The board of each GPU, by its number.
        seed: Of their silicon.
    """

    boards: tuple[str, ...]
    seed: int = 0

    BASE_W = 300.0
    SLOPE = 0.06

    @classmethod
    def parse(cls, options: Mapping[str, str], seed: int) -> SimulatedNode:
        """Return the server that options describe: ``gpus=8xh100``, or ``gpus=4xa100,2xl4``.

        Raises:
            InvalidInput: If they describe none.
        """
        text = options.get("gpus", _GPUS)
        boards: list[str] = []
        for part in text.split(","):
            kind = _KIND.fullmatch(part)
            if kind is None or not int(kind[1]):
                raise InvalidInput(f"gpus={text[:80]} are no GPUs; write for example gpus=8xh100, or gpus=4xa100,2xl4")
            boards += int(kind[1]) * [kind[2]]
        if len(boards) > _MOST:
            raise InvalidInput(f"a simulated server has at most {_MOST} GPUs, not {len(boards)}")
        return cls(tuple(boards), seed)

    def group(self, name: str, options: Sequence[str]) -> tuple[str, SimulatedGroup]:
        """Return the board of the GPUs that a URI's name means, and themselves.

        Args:
            name: ``node`` for all of them, or ``node/0-3``, ``node/0,2``.
            options: Of the URI, to be kept with them.

        Raises:
            InvalidInput: If it names none, one twice, or GPUs of several kinds.
            UnknownName: If there is no such GPU.
        """
        numbers = self.numbers(name)
        kinds = {self.boards[number] for number in numbers}
        if len(kinds) > 1:
            raise InvalidInput(
                f"sim:{name} means GPUs of several kinds ({', '.join(sorted(kinds))}); name those of one kind"
            )
        silicon = tuple(self.silicon[number] for number in numbers)
        return kinds.pop(), SimulatedGroup(name, tuple(options), numbers[0], silicon)

    def numbers(self, name: str) -> tuple[int, ...]:
        """Return the numbers of the GPUs that a URI's name means, ascending; likewise."""
        if name == NODE:
            return tuple(range(len(self.boards)))
        numbers = numbers_of(name.partition("/")[2])
        if strange := [number for number in numbers if number >= len(self.boards)]:
            raise UnknownName("simulated GPU", str(strange[0]), map(str, range(len(self.boards))))
        return numbers

    @cached_property
    def silicon(self) -> tuple[Silicon, ...]:
        """What each GPU draws and takes, over its description."""
        found = []
        for number in range(len(self.boards)):
            random = np.random.default_rng([self.seed, number, _SILICON])
            power = float(np.clip(random.normal(1.0, 0.06), 0.8, 1.2))
            found.append(Silicon(power, float(np.clip(random.normal(1.0, 0.01), 0.96, 1.04))))
        return tuple(found)

    def whole_w(self, gpus_w: float) -> float:
        """Return what the whole server draws while its GPUs draw so much."""
        return self.BASE_W + (1 + self.SLOPE) * gpus_w


def is_node(name: str) -> bool:
    """Return whether the name of a simulated device is that of a server, or of some of its GPUs."""
    return name == NODE or name.startswith(f"{NODE}/")


def numbers_of(text: str) -> tuple[int, ...]:
    """Return the numbers that ``0-3,6`` means, ascending.

    Raises:
        InvalidInput: If it means none, or one twice.
    """
    found: list[int] = []
    for part in text.split(","):
        span = _SPAN.fullmatch(part)
        if span is None or int(span[2] or span[1]) < int(span[1]):
            raise InvalidInput(
                f"sim:{NODE}/{text[:80]} names no GPUs; write sim:{NODE}/0-3, sim:{NODE}/0,2 or sim:{NODE}"
            )
        found += range(int(span[1]), int(span[2] or span[1]) + 1)
    if twice := _first_twice(found):
        raise InvalidInput(f"sim:{NODE}/{text[:80]} names GPU {twice} twice")
    return tuple(sorted(found))


def _first_twice(numbers: Iterable[int]) -> str:
    seen: set[int] = set()
    for number in numbers:
        if number in seen:
            return str(number)
        seen.add(number)
    return ""
