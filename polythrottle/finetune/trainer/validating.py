"""Whether a newly trained model may be served: right at least as often on held-out samples, and not slower."""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

Scores = Callable[[torch.Tensor], torch.Tensor]

_WARM, _TIMED = 3, 15


@dataclass(frozen=True)
class Verdict:
    """What a validation found.

    Args:
        step: Of the weights.
        samples: Held-out ones that could be read.
        accuracy: Share of them that the new model gets right.
        loss: Its mean cross-entropy on them; None if it is not finite.
        before: ``accuracy`` and ``loss`` of the served model; None where there is none to compare with.
        commonest: Share of the commonest label, which a model without eyes would get right.
        latency_s: Median of one sample through the new model, on this device, alone.
        latency_before_s: The same of the served one.
        holds: Whether the new model may be served.
        why: Why not; empty if it may. Where there is no served model to compare with, why not.
    """

    step: int
    samples: int
    accuracy: float
    loss: float | None
    before: Mapping[str, float | None] | None
    commonest: float
    latency_s: float
    latency_before_s: float | None
    holds: bool
    why: str

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)


class Validation:
    """A validation that is under way, done in slices.

    Args:
        step: Of the weights.
        candidate: What the new model computes.
        served: What the served one computes; None if there is none to compare with.
        reason: Why there is none.
    """

    def __init__(self, step: int, candidate: Scores, served: Scores | None, reason: str) -> None:
        self._step, self._models, self._reason = step, [candidate, *([served] if served else [])], reason
        self._right, self._loss = [0] * len(self._models), [0.0] * len(self._models)
        self._labels: Counter[int] = Counter()

    @torch.no_grad()
    def look(self, inputs: torch.Tensor, classes: torch.Tensor) -> None:
        """Take some held-out samples into account.

        Args:
            inputs: Shape (samples, …).
            classes: Shape (samples,).
        """
        self._labels.update(classes.tolist())
        for i, model in enumerate(self._models):
            scores = model(inputs).float()
            self._right[i] += int((scores.argmax(1) == classes).sum())
            self._loss[i] += float(torch.nn.functional.cross_entropy(scores, classes, reduction="sum"))

    def verdict(self, inputs: torch.Tensor, slower: float, limit_s: float | None) -> Verdict:
        """Time the models, and return what all that says.

        Args:
            inputs: One sample, with its batch dimension.
            slower: How many times the served one's latency the new one's may be.
            limit_s: The longest it may take; None for no such limit.
        """
        samples = self._labels.total()
        commonest = max(self._labels.values()) / samples
        accuracy, *before = (right / samples for right in self._right)
        loss, *loss_before = (total / samples for total in self._loss)
        latency_s, *latency_before = _medians_s(self._models, inputs)
        faults = [
            _inaccurate(accuracy, before, commonest),
            "" if math.isfinite(loss) else "its loss on the held-out samples is not finite",
            _slow(latency_s, latency_before, slower, limit_s),
        ]
        why = "; ".join(fault for fault in faults if fault)
        return Verdict(
            step=self._step,
            samples=samples,
            accuracy=accuracy,
            loss=_finite(loss),
            before={"accuracy": before[0], "loss": _finite(loss_before[0])} if before else None,
            commonest=commonest,
            latency_s=latency_s,
            latency_before_s=latency_before[0] if latency_before else None,
            holds=not why,
            why=why or self._reason,
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _inaccurate(accuracy: float, before: Sequence[float], commonest: float) -> str:
    if before and accuracy < before[0]:
        return f"it gets {accuracy:.1%} of the held-out samples right, the served model {before[0]:.1%}"
    if not before and accuracy <= commonest:
        return f"it gets {accuracy:.1%} of the held-out samples right, no more than always saying the commonest label"
    return ""


def _slow(latency_s: float, before: Sequence[float], slower: float, limit_s: float | None) -> str:
    if limit_s is not None and latency_s > limit_s:
        return f"one sample takes {1e3 * latency_s:.1f} ms, more than {1e3 * limit_s:.1f} ms"
    if before and latency_s > slower * before[0]:
        return f"one sample takes {1e3 * latency_s:.1f} ms, {latency_s / before[0]:.2f} times as long as before"
    return ""


@torch.no_grad()
def _medians_s(models: Sequence[Scores], inputs: torch.Tensor) -> list[float]:
    """Return each model's median latency; they take turns, so that whatever else runs slows them alike."""
    times: list[list[float]] = [[] for _ in models]
    for turn in range(_WARM + _TIMED):
        for model, taken in zip(models, times, strict=True):
            start_s = time.perf_counter()
            model(inputs)
            if inputs.is_cuda:
                torch.cuda.synchronize(inputs.device)
            if turn >= _WARM:
                taken.append(time.perf_counter() - start_s)
    return [sorted(taken)[len(taken) // 2] for taken in times]
