"""Who takes part: a method, and whether it may learn from history and which risk it may take.

bayes            as the rules of the benchmark say
bayes+cold       without history, whatever the rules say
bayes@0.05       at most this chance of breaking a limit, whatever the rules say
bayes+cold@0.05  both
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from polythrottle import optimize
from polythrottle.errors import InvalidInput, UnknownName
from polythrottle.optimize import METHODS, Options
from polythrottle.ports import Optimizer

ABLATIONS: Mapping[str, Callable[[Options], Optimizer]] = getattr(optimize, "ABLATIONS", {})
"""Our method with one ingredient taken out, by name."""
_LEARNERS = frozenset({"bayes", *ABLATIONS})
_COLD = "cold"


@dataclass(frozen=True)
class Entrant:
    """One competitor of a benchmark.

    Args:
        label: As it was written, and as it stands in the records.
        method: Name of the search method.
        cold: Whether it goes without history.
        risk: Its own highest chance of breaking a limit; that of the rules if None.

    Raises:
        UnknownName: If there is no such method.
        InvalidInput: If the method takes neither history nor risk but something is said about either, or the risk is
            out of range.
    """

    label: str
    method: str
    cold: bool = False
    risk: float | None = None

    def __post_init__(self) -> None:
        if self.method not in (known := {**METHODS, **ABLATIONS}):
            raise UnknownName("search method", self.method, known)
        if (self.cold or self.risk is not None) and not self.learns:
            raise InvalidInput(f"{self.label}: {self.method} takes neither history nor risk; leave + and @ out")
        Options(risk=self.risk)

    @classmethod
    def parse(cls, label: str) -> "Entrant":
        """Return what a label means: a method, then perhaps ``+cold``, then perhaps ``@`` and a risk.

        Raises:
            UnknownName: If there is no such method.
            InvalidInput: If the label is not of that form.
        """
        body, at, risk = label.partition("@")
        method, plus, word = body.partition("+")
        if plus and word != _COLD:
            raise InvalidInput(f"{label!r}: behind + stands cold, for a run without history")
        return cls(label, method, bool(plus), _chance(label, risk) if at else None)

    @property
    def learns(self) -> bool:
        """Whether the method can use history and keeps to a risk."""
        return self.method in _LEARNERS

    @property
    def warm(self) -> bool:
        """Whether it is given the history there is."""
        return self.learns and not self.cold

    def optimizer(self, options: Options) -> Optimizer:
        """Return the search method, told what it may know."""
        return {**METHODS, **ABLATIONS}[self.method](options)


def entrants(methods: Iterable[str]) -> list[Entrant]:
    """Return who takes part, each once.

    Raises:
        UnknownName: If there is no such method.
        InvalidInput: If nobody takes part or a label cannot be read.
    """
    labels = dict.fromkeys(filter(None, (method.strip() for method in methods)))
    if not labels:
        raise InvalidInput(f"name at least one search method of {', '.join(METHODS)}")
    return [Entrant.parse(label) for label in labels]


def _chance(label: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(f"{label!r}: {text!r} is not a risk; write for example bayes@0.05") from None
