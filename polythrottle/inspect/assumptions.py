"""What is assumed of boards and GPUs without a public record, and how it compares with what a board shows.

``assumed.toml`` lists it all. Of a part of a Jetson it says, for each board whose stand-in has it, what a look
(`polythrottle.inspect.board_record`) is expected to show; of GPUs likewise (`gpu_looks`). What no reading can show is
listed without a look.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path

from polythrottle.domain.backports import tomllib

_FILE = Path(__file__).with_name("assumed.toml")
_FIGURE = re.compile(r"\d+(?:\.\d+)?(?= V\b)")
_NEAR = 0.1  # a rail of 5 V may hold 4.8
_AS = {"jetson-nano-2gb": "jetson-nano"}  # a stand-in that takes its parts over from another


class Agreement(str, Enum):
    """What the board that is here says to an assumption."""

    AGREES = "agrees"
    CONTRADICTS = "contradicts"
    UNSEEN = "not seen here"


@dataclass(frozen=True)
class ProbeResult:
    """What a look has shown.

    Args:
        text: In words.
        agrees: Whether that is what was assumed; None if the words are compared with those expected.
    """

    text: str
    agrees: bool | None = None


@dataclass(frozen=True)
class ProbeFailure:
    """That a look has shown nothing.

    Args:
        why: Such as that a folder is closed to this user.
    """

    why: str


Probe = Callable[[], ProbeResult | ProbeFailure]


@dataclass(frozen=True)
class Assumption:
    """One thing that no public record shows.

    Args:
        part: Such as ``thermal``, or ``GPU energy``.
        assumed: What of it is assumed.
        look: The name of the look that shows it; empty if no reading can.
        boards: What the look is expected to show, by stand-in board or by the driver's name of a GPU; where every GPU
            is meant and the look judges for itself, nothing.
    """

    part: str
    assumed: str
    look: str = ""
    boards: Mapping[str, str] = field(default_factory=dict)

    @property
    def of_gpus(self) -> bool:
        """Whether it is about NVIDIA GPUs and not about Jetson boards."""
        return self.part.startswith("GPU ")

    def expected(self, name: str) -> tuple[str, ...]:
        """Return what may be shown on a board of the catalogue, or a GPU: each of its stand-ins' words."""
        alike = re.compile(rf"{re.escape(_AS.get(name, name))}(-jp\d|-carrier|-super)?")
        return tuple(dict.fromkeys(text for board, text in self.boards.items() if alike.fullmatch(board)))


@dataclass(frozen=True)
class CheckedAssumption:
    """An assumption and what the board that is here shows of it.

    Args:
        part: See `Assumption`.
        assumed: See `Assumption`; with what was expected, where something else is shown.
        shows: What this board shows, or why it shows nothing.
        agreement: How the two compare.
        here: Whether it is assumed of this board and not of others alone.
    """

    part: str
    assumed: str
    shows: str
    agreement: Agreement
    here: bool = True


@cache
def assumptions() -> tuple[Assumption, ...]:
    """Return everything that is assumed, in the order of the documentation."""
    listed = tomllib.loads(_FILE.read_text(encoding="utf-8"))["assumption"]
    return tuple(Assumption(**each) for each in listed)


def held_against(name: str, listed: Sequence[Assumption], looks: Mapping[str, Probe]) -> tuple[CheckedAssumption, ...]:
    """Return what a board shows of assumptions.

    Args:
        name: The board's in the catalogue, or the GPU's as its driver gives it; empty if it is not known.
        listed: The assumptions.
        looks: What can be looked at, by name; each is asked once.

    Raises:
        DeviceError: If the board is gone.
    """
    return tuple(_shown(name, each, looks) for each in listed)


def _shown(name: str, each: Assumption, looks: Mapping[str, Probe]) -> CheckedAssumption:
    expected = each.expected(name)
    if each.boards and not expected:
        return CheckedAssumption(
            each.part, each.assumed, f"assumed of {', '.join(each.boards)}", Agreement.UNSEEN, here=False
        )
    if not each.look:
        return CheckedAssumption(each.part, each.assumed, "no reading can show it", Agreement.UNSEEN)
    outcome = looks[each.look]()
    if isinstance(outcome, ProbeFailure):
        return CheckedAssumption(each.part, each.assumed, outcome.why, Agreement.UNSEEN)
    if outcome.agrees is not None:
        agrees = outcome.agrees
    else:
        agrees = any(_alike(outcome.text, text) for text in expected)
    if agrees:
        return CheckedAssumption(each.part, each.assumed, outcome.text, Agreement.AGREES)
    beside = f": {' or: '.join(expected)}" * bool(expected)
    return CheckedAssumption(each.part, each.assumed + beside, outcome.text, Agreement.CONTRADICTS)


def _alike(shown: str, expected: str) -> bool:
    """Return whether two texts say the same, volts to a tenth."""
    if _FIGURE.sub("", shown) != _FIGURE.sub("", expected):
        return False
    pairs = zip(_FIGURE.findall(shown), _FIGURE.findall(expected), strict=True)
    return all(abs(float(one) - float(other)) <= _NEAR * float(other) for one, other in pairs)
