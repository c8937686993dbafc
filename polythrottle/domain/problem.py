"""What is asked: a space of points, what to minimise, and what must hold."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from polythrottle.domain.arrivals import CLOSED, Arrivals
from polythrottle.domain.backports import StrEnum, removeprefix
from polythrottle.domain.errors import InvalidInput, UnknownName
from polythrottle.domain.measurement import Measurement, Window
from polythrottle.domain.metrics import FLOORS, METRICS, OF_CLASS, PromptClass, is_metric, split_metric, unit_of
from polythrottle.domain.space import SearchSpace
from polythrottle.domain.units import parse_quantity, show, show_excess

_RELATION = re.compile(r"\s*([A-Za-z0-9_]+)\s*([<>≤≥⩽⩾]=?)\s*([^=\s].*?)\s*")
_FOR = re.compile(r"(.*?)\s+for\s+(.*)", re.DOTALL | re.IGNORECASE)
_RUN_ON = re.compile(r"[\s_,;]*(?:for)?[\s_,;]*(?=(?:\d+\s*(?:<=?|≤)\s*)?prompts)", re.IGNORECASE)
"""What stands between a limit and its prompts in the spellings that occur to people who avoid blanks."""
_GRAMMAR = "write for example p99<=25ms, mean<=1.2x, power<=20W, temperature<=80C or throughput>=30/s"
_OF_PROMPTS = "ttft_p99<=400ms for prompts<=2048"
_FAR_OUT = ("p90", "p95", "p99")
_LEAST = 1e-12
_MOST = 1e12
BOARDS = "boards"
"""The name under which a problem's content says which boards search together."""
_SEVERAL = 2
_PARTS = re.compile(r"(?<=[/?&])|(?=[/?&])")
"""Between the parts of a URI."""
_MULTIPLE = re.compile(r"(\d+\.?\d*|\.\d+)x")
_SEARCHED = re.compile(r"([?&])knobs=\w*(?:,\w+(?![\w:/?]))*(&?)")
"""The option of a device that names the knobs to search; a comma that a scheme follows begins the next device."""
_SHOWN = {"s": "s", "w": "W", "c": "°C", "per_s": "/s", "per_j": "/J"}


@dataclass(frozen=True)
class Constraint:
    """One bound on one metric.

    Args:
        metric: One of `METRICS`, or a time of a class of requests, such as ``ttft_p99 for prompts<=2048``.
        limit: The bound in the metric's unit, or a multiple of the reference if ``relative``.
        relative: Whether the limit multiplies the same metric at the reference (default point or fastest row).

    Raises:
        UnknownName: If the metric is not known.
        InvalidInput: If the limit is not positive, or out of any range that occurs.
    """

    metric: str
    limit: float
    relative: bool = False

    def __post_init__(self) -> None:
        if not is_metric(self.metric):
            raise UnknownName("metric", self.metric, METRICS)
        if not _LEAST <= self.limit <= _MOST:
            if self.relative:
                amount = f"{self.limit:g}x"
            else:
                amount = self.show(self.limit)
            raise InvalidInput(f"the limit on {self.metric} must be above zero and of a size that occurs, not {amount}")

    @classmethod
    def parse(cls, text: str) -> Constraint:
        """Return the constraint an SLO text means: ``p99<=25ms``, ``p99 < 25 ms``, ``mean≤1.2x``, ``throughput>=30/s``.

        A limit on a time may be one for some requests only: ``ttft_p99<=400ms for prompts<=2048``.

        Raises:
            InvalidInput: If the text is not of that form, or the sign or unit does not fit the metric.
            UnknownName: If the metric is not known.
        """
        divided = _FOR.fullmatch(text)
        if divided is None and "prompt" in text.lower():
            raise InvalidInput(f"{text!r} is not an SLO; write it as {_of_prompts(text)!r}, in quotes")
        relation, prompts = (text, None) if divided is None else (divided[1], PromptClass.parse(divided[2]))
        match = _RELATION.fullmatch(relation)
        if match is None:
            raise InvalidInput(f"{text!r} is not an SLO; {_GRAMMAR}")
        metric = removeprefix(match[1].lower(), "e2e_")
        # With or without the equals sign: between two measured times the difference means nothing.
        sign = ">=" if match[2][0] in ">≥⩾" else "<="
        quantity = match[3]
        if metric not in METRICS:
            raise UnknownName("metric", metric, METRICS, hint=f"({_GRAMMAR})")
        relative = quantity.endswith("x")
        if prompts is not None and METRICS[metric] != "s":
            raise InvalidInput(f"{text!r}: {metric} is not a time of single requests; leave 'for {prompts}' out")
        if relative and metric == "temperature":
            raise InvalidInput("temperature has no multiples; write for example temperature<=80C")
        other = ", or a multiple of the default's such as 1.5x"
        if metric == "temperature":
            other = ""
        if relative:
            limit = _multiple(quantity)
        else:
            limit = parse_quantity(quantity, METRICS[metric], other=other)
        constraint = cls(metric if prompts is None else f"{metric}{OF_CLASS}{prompts}", limit, relative)
        if (sign == ">=") != constraint.at_least:
            wanted = ">=" if constraint.at_least else "<="
            raise InvalidInput(f"{text!r}: {metric} is bounded with {wanted}; {_GRAMMAR}")
        return constraint

    @property
    def at_least(self) -> bool:
        """Whether the limit is a floor rather than a ceiling."""
        return self.metric in FLOORS

    @property
    def timed(self) -> bool:
        """Whether the metric is a latency."""
        return self.unit == "s"

    @property
    def of_each(self) -> bool:
        """Whether it is a percentile far out, such as a p99: then nearly every request is to keep the limit."""
        return split_metric(self.metric)[0].rpartition("_")[2] in _FAR_OUT

    @property
    def unit(self) -> str:
        """The unit of metric and absolute limit, as in `METRICS`."""
        return unit_of(self.metric)

    @property
    def prompts(self) -> PromptClass | None:
        """The requests it is a limit for, by their prompts; None if for all."""
        return split_metric(self.metric)[1]

    def resolved(self, reference: float | None) -> Constraint:
        """Return this constraint with an absolute limit.

        Args:
            reference: The metric at the reference, in its unit; only needed if the limit is relative.

        Raises:
            InvalidInput: If it is needed and unknown.
        """
        if not self.relative:
            return self
        if reference is None:
            raise InvalidInput(f"{self}: {self.metric} is not measured at the reference point, so it has no multiples")
        return replace(self, limit=self.limit * reference, relative=False)

    def slack(self, measurement: Measurement) -> float:
        """Return how far inside the (absolute) limit a measurement is, in the metric's unit; >= 0 is feasible.

        Raises:
            InvalidInput: If the metric was not measured.
        """
        value = measurement.metric(self.metric)
        if value is None:
            raise InvalidInput(f"{self}: {self.metric} is not measured here")
        if self.at_least:
            return value - self.limit
        return self.limit - value

    def excess(self, measurement: Measurement) -> float:
        """Return by what fraction of the limit a measurement breaks it; 0 if it holds."""
        # Never a division by zero: a limit is at least `_LEAST`.
        return max(0.0, -self.slack(measurement) / self.limit)

    def show_excess(self, measurement: Measurement, decimals: int = 0) -> str:
        """Return by how much a measurement breaks the limit: ``33%`` of it, ``4.5 °C``, ``12 times the limit``."""
        # Degrees Celsius have no shares: where they begin is a convention.
        if self.unit == "c":
            return self.show(max(0.0, -self.slack(measurement)))
        return show_excess(self.excess(measurement), decimals)

    @property
    def beyond(self) -> str:
        """On which side of the limit a measurement lies that breaks it: ``over``, or ``short`` of a floor."""
        return "short" if self.at_least else "over"

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        metric, prompts = split_metric(self.metric)
        if self.relative:
            amount = f"{self.limit:g}x"
        else:
            amount = self.show(self.limit)
        return f"{metric}{sign}{amount}" + ("" if prompts is None else f"{OF_CLASS}{prompts}")

    def show(self, value: float | None) -> str:
        """Return a value of the metric as people write it: ``25 ms``; unknown gives ``–``."""
        return show(value, _SHOWN[self.unit])


def _of_prompts(text: str) -> str:
    """Return how a limit for some prompts is written that was written another way; an example if that is unclear."""
    meant = _RUN_ON.sub(" for ", text, count=1)
    try:
        if _FOR.fullmatch(meant):
            return str(Constraint.parse(meant))
        return _OF_PROMPTS
    # Its words go into an error that is raised anyway.
    except (InvalidInput, UnknownName):
        return _OF_PROMPTS


def _multiple(quantity: str) -> float:
    match = _MULTIPLE.fullmatch(quantity)
    if match is None:
        raise InvalidInput(f"{quantity!r} is not a multiple; write for example 1.2x")
    return float(match[1])


class Objective(StrEnum):
    """What is minimised."""

    ENERGY = "energy"
    """Energy per item."""
    EDP = "edp"
    """Energy per item times mean latency: the energy-delay product (Gonzalez & Horowitz 1996)."""
    LATENCY = "latency"
    """Mean latency."""
    PARETO = "pareto"
    """Energy per item and latency at once: a front of points; the best of them is that of least energy."""

    @classmethod
    def parse(cls, text: str) -> Objective:
        """Return the objective of that name.

        Raises:
            UnknownName: If there is none.
        """
        if text not in list(cls):
            raise UnknownName("objective", text, list(cls))
        return cls(text)

    def of(self, measurement: Measurement) -> float:
        """Return what a measurement comes to, in `unit`; less is better."""
        if self is Objective.EDP:
            return measurement.energy_j * measurement.latency.mean_s
        if self is Objective.LATENCY:
            return measurement.latency.mean_s
        return measurement.energy_j

    @property
    def unit(self) -> str:
        """The unit of `of`."""
        return {Objective.EDP: "J·s", Objective.LATENCY: "s"}.get(self, "J")

    @property
    def words(self) -> str:
        """What is minimised, in words."""
        return {Objective.EDP: "energy-delay product", Objective.LATENCY: "mean latency"}.get(self, "energy per item")


def device_alone(uri: str) -> str:
    """Return a device's URI without the option that says which of its knobs are searched: it is no other device."""
    return _SEARCHED.sub(lambda option: option[1] if option[2] else "", uri)


@dataclass(frozen=True)
class Problem:
    """A search space on one device and workload, what to minimise, and constraints to hold.

    Args:
        space: Every point that may be tried.
        constraints: What must hold; may be empty.
        device: Which device, as a URI.
        workload: Which workload, as a URI.
        reference: What relative limits multiply, by metric; metrics that are absent are taken from the default's trial.
        window: How long each trial looks.
        content: Digests of what the URIs stand for (model, table, board files) and input shapes, by name.
        objective: What is minimised.
        arrivals: When requests are meant to be sent; energy per item then includes waiting for them.
    """

    space: SearchSpace
    constraints: tuple[Constraint, ...] = ()
    device: str = ""
    workload: str = ""
    reference: Mapping[str, float] = field(default_factory=dict)
    window: Window = field(default_factory=Window)
    content: Mapping[str, str] = field(default_factory=dict)
    objective: Objective = Objective.ENERGY
    arrivals: Arrivals = CLOSED

    @property
    def recorded(self) -> bool:
        """Whether the device is a recorded table, so that nothing runs."""
        return self.device.startswith("replay:")

    @property
    def boards(self) -> tuple[str, ...]:
        """The URIs of the boards that search together, in the order of their names; none where there is one."""
        return tuple(self.content.get(BOARDS, "").split())

    def brief(self, board: str) -> str:
        """Return what tells a board from the others that search with it: ``nano1`` of ``ssh://nano1/model.onnx``.

        Args:
            board: The URI of one of them.
        """
        if len(self.boards) < _SEVERAL or board not in self.boards:
            return board
        parts = [_PARTS.split(uri) for uri in self.boards]
        own = _PARTS.split(board)
        # Nothing of what all begin or end with; at least one part is left, for they differ.
        least = min(map(len, parts))
        same = [len({each[at] for each in parts}) == 1 for at in range(least)]
        begin = next((at for at, alike in enumerate(same) if not alike), least - 1)
        ends = [len({each[-at] for each in parts}) == 1 for at in range(1, least - begin)]
        end = next((at for at, alike in enumerate(ends) if not alike), len(ends))
        return "".join(own[begin : len(own) - end]).strip("/?&") or board

    @property
    def fingerprint(self) -> str:
        """A digest of everything above: two problems are the same exactly when it is."""
        import hashlib  # loads OpenSSL: megabytes that what only passes points on need not hold

        parts = {
            "space": self.space.fingerprint,
            "constraints": [asdict(constraint) for constraint in self.constraints],
            "device": self.device,
            "workload": self.workload,
            "reference": dict(sorted(self.reference.items())),
            "window": self.window.fields,
            "content": dict(sorted(self.content.items())),
            # Only where it is not the first there was, so that journals from before keep their fingerprints.
            **({} if self.objective is Objective.ENERGY else {"objective": str(self.objective)}),
            **({} if self.arrivals.closed else {"arrivals": str(self.arrivals)}),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
