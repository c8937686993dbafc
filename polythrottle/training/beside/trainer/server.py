"""The trainer's end of the line: answers requests one by one, validates the new model, and swaps the served one."""

from __future__ import annotations

import hashlib
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Callable

import torch

from polythrottle.actuation.wire import error_line
from polythrottle.domain.backports import paired
from polythrottle.domain.errors import BadFile, InvalidInput, PolythrottleError, StorageError, TrialError
from polythrottle.storage.atomic_file import replace_file
from polythrottle.storage.json_channel import Channel, finite
from polythrottle.training.beside.trainer.driver import MOST_REQUEST, Task
from polythrottle.training.beside.trainer.job_folder import VALIDATION, put_json, roll_back_model, swap_model
from polythrottle.training.beside.trainer.network import scores_of
from polythrottle.training.beside.trainer.worker import Worker
from polythrottle.workloads.foreign_calls import one_line

# Whether a newly trained model may be served: right at least as often on held-out samples, and not slower.

Scores = Callable[[torch.Tensor], torch.Tensor]

_WARM = 3
_TIMED = 15


@dataclass(frozen=True)
class ValidationVerdict:
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
        self._step = step
        self._models = [candidate, *([served] if served else [])]
        self._reason = reason
        self._right = [0] * len(self._models)
        self._loss = [0.0] * len(self._models)
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

    def verdict(self, inputs: torch.Tensor, slower: float, limit_s: float | None) -> ValidationVerdict:
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
        return ValidationVerdict(
            step=self._step,
            samples=samples,
            accuracy=accuracy,
            loss=finite(loss),
            before={"accuracy": before[0], "loss": finite(loss_before[0])} if before else None,
            commonest=commonest,
            latency_s=latency_s,
            latency_before_s=latency_before[0] if latency_before else None,
            holds=not why,
            why=why or self._reason,
        )


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
        for model, taken in paired(models, times):
            start_s = time.perf_counter()
            model(inputs)
            if inputs.is_cuda:
                torch.cuda.synchronize(inputs.device)
            if turn >= _WARM:
                taken.append(time.perf_counter() - start_s)
    return [sorted(taken)[len(taken) // 2] for taken in times]


# The trainer's end of the line: takes requests, has the worker do them, validates and swaps the model.

_WIDTHS = {torch.float16: 2, torch.bfloat16: 2, torch.float64: 8}


class RequestHandler:
    """Answers requests, one after the other."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._fault: PolythrottleError | None = None
        self._validation: tuple[Validation, int] | None = None
        self._judged: tuple[ValidationVerdict, str] | None = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
            PolythrottleError: If it is malformed, comes at a wrong time, or fails.
        """
        verbs: Mapping[str, tuple[Callable[..., dict[str, Any]], Mapping[str, type]]] = {
            "hello": (self._hello, {"task": dict}),
            "slice": (self._slice, {"samples": int, "write": bool}),
            "checkpoint": (self._checkpoint, {}),
            "validate": (self._validate, {"samples": int}),
            "swap": (self._swap, {}),
            "rollback": (self._rollback, {}),
        }
        verb = request.get("verb")
        given = {name: value for name, value in request.items() if name != "verb"}
        if not isinstance(verb, str) or verb not in verbs:
            raise InvalidInput(f"there is no verb {str(verb)[:40]!r}; there are {', '.join(verbs)} and stop")
        do, form = verbs[verb]
        if set(given) != set(form) or any(type(given[name]) is not kind for name, kind in form.items()):
            expected = ", ".join(f"{name} ({kind.__name__})" for name, kind in form.items()) or "nothing"
            raise InvalidInput(f"{verb} takes {expected}")
        return do(**given)

    def _hello(self, task: dict[str, Any]) -> dict[str, Any]:
        if self._worker is not None:
            raise InvalidInput("hello is said once")
        self._worker = worker = Worker(Task.from_document(task))
        order = len(worker.epoch.order)
        batch = worker.task.batch
        sizes = {"samples": order, "held_out": len(worker.epoch.validate), "batch": batch, "epochs": worker.task.epochs}
        trained = sum(weight.numel() for weight in worker.network.free.values())
        model = {"output": worker.network.output, "trained_parameters": trained, "device": str(worker.device)}
        per_epoch = {"pid": os.getpid(), "steps_per_epoch": -(-order // batch)}
        return {**per_epoch, **sizes, **model, **_counted(worker), "of": worker.of, **worker.standing()}

    @property
    def _open(self) -> Worker:
        if self._worker is None:
            raise InvalidInput("say hello first")
        return self._worker

    def _slice(self, samples: int, write: bool) -> dict[str, Any]:
        worker = self._open
        if self._fault is not None:
            raise self._fault
        try:
            return worker.slice(samples, write)
        except (InvalidInput, StorageError, BadFile):
            raise
        except Exception as err:  # what is in memory is not to be trusted any more; what is on disk is
            if isinstance(err, TrialError):
                self._fault = err
            else:
                self._fault = TrialError(f"the trainer failed: {one_line(err)}")
            raise self._fault from err

    def _checkpoint(self) -> dict[str, Any]:
        worker = self._open
        if self._fault is None:
            worker.save()
        return {"of": worker.of, **worker.standing()}

    def _validate(self, samples: int) -> dict[str, Any]:
        worker = self._open
        if self._fault is not None:
            raise self._fault
        if samples < 1:
            raise InvalidInput(f"validation takes at least 1 held-out sample at a time, but {samples} were asked for")
        rows = worker.epoch.validate
        if self._validation is None:
            self._validation = (self._begin(worker), 0)
            self._judged = None
            return {"done": 0, "of": len(rows), "result": None}
        validation, done = self._validation
        inputs, classes, _ = worker.epoch.read(rows[done : done + samples])
        if inputs is not None:
            self._validation = None  # should it fail in the middle, it is begun again
            validation.look(inputs, classes)
        done = min(len(rows), done + samples)
        self._validation = (validation, done)
        result = None
        if done == len(rows):
            result = self._judge(worker, validation)
        return {"done": done, "of": len(rows), "result": result}

    def _candidate(self, worker: Worker) -> Path:
        return worker.folder / f"candidate{worker.opened.base.suffix}"

    def _begin(self, worker: Worker) -> Validation:
        """Write the candidate, and load it and the served model as whoever serves them would."""
        path = self._candidate(worker)
        served = Path(worker.task.served)
        replace_file(path, worker.network.archive())
        before, reason = _served(served if worker.task.served else None, worker)
        return Validation(worker.place.step, _on(scores_of(path), worker.device), before, reason)

    def _judge(self, worker: Worker, validation: Validation) -> dict[str, Any]:
        self._validation = None
        inputs = next(
            (read for row in worker.epoch.validate if (read := worker.epoch.read([row])[0]) is not None), None
        )
        if inputs is None:
            raise BadFile("none of the held-out samples can be read, so the new model cannot be validated")
        verdict = validation.verdict(inputs, worker.task.slower, worker.task.latency_limit_s)
        self._judged = verdict, _sha256(self._candidate(worker))
        put_json(worker.folder / VALIDATION, verdict.document())
        return verdict.document()

    def _swap(self) -> dict[str, Any]:
        worker = self._open
        if not worker.task.served:
            raise InvalidInput("no served model was named, so there is nothing to replace")
        if self._judged is None or self._judged[0].step != worker.place.step:
            raise InvalidInput("validate first: the weights have changed since, or never were validated")
        verdict, sha256 = self._judged
        if not verdict.holds:
            raise TrialError(f"the new model is not served: {verdict.why}")
        candidate = self._candidate(worker)
        if _sha256(candidate) != sha256:
            raise BadFile(f"{candidate} is not what was validated; validate again")
        kept = swap_model(Path(worker.task.served), candidate.read_bytes())
        return {"served": worker.task.served, "previous": str(kept) if kept else None}

    def _rollback(self) -> dict[str, Any]:
        worker = self._open
        if not worker.task.served:
            raise InvalidInput("no served model was named, so there is nothing to go back to")
        roll_back_model(Path(worker.task.served))
        return {"served": worker.task.served}


def serve(way: socket.socket) -> None:
    """Answer requests until told to stop or the other side hangs up."""
    line = Channel(way, MOST_REQUEST)
    desk = RequestHandler()
    while True:
        try:
            request = line.receive()
        except InvalidInput as err:
            line.send({"error": error_line(err)})
            return
        except (EOFError, OSError):
            return
        if request is None:
            continue
        stops = request == {"verb": "stop"}
        try:
            line.send({"answer": {}} if stops else _answered(desk, request))
        except OSError:
            return
        if stops:
            return


def _answered(desk: RequestHandler, request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"answer": desk.answer(request)}
    except PolythrottleError as err:
        return {"error": error_line(err)}
    except Exception as err:  # the outermost loop of this process: whoever drives it must hear why
        return {"error": error_line(TrialError(f"the trainer has a fault: {one_line(err)}"))}


def _served(path: Path | None, worker: Worker) -> tuple[Scores | None, str]:
    """Return what the served model computes, or None and why there is nothing to compare with."""
    if path is None or not path.exists():
        return None, "nothing was served before to compare with"
    try:
        scores = _on(scores_of(path), worker.device)
        inputs, _, _ = worker.epoch.read(worker.epoch.order[:1])
        fits = inputs is not None and scores(inputs).shape[-1] == worker.network.output
    except (PolythrottleError, RuntimeError) as err:
        return None, f"the served model cannot be compared with: {one_line(err)}"
    if fits:
        return (scores, "")
    return (None, "the served model tells other classes apart, so it is not compared with")


def _on(scores: Scores, device: torch.device) -> Scores:
    if isinstance(scores, torch.nn.Module):
        scores.to(device)
    return scores


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _counted(worker: Worker) -> dict[str, Any]:
    """Return what one sample's forward pass computes and moves; None where it cannot be counted, and why."""
    from polythrottle.workloads.graph_operators import count
    from polythrottle.workloads.torch_graph import trace_torch

    try:
        inputs, _, _ = worker.epoch.read(worker.epoch.order[:1])
        if inputs is None:
            raise TrialError("the first sample cannot be read")
        found = count(
            trace_torch(worker.task.model, worker.network.module, (inputs,), {}), _WIDTHS.get(inputs.dtype, 4)
        )
        if found.operations <= 0:
            raise TrialError("none of its operators has a formula")
    except (PolythrottleError, RuntimeError) as err:
        return {"operations": None, "traffic_bytes": None, "uncounted": one_line(err)}
    return {"operations": found.operations, "traffic_bytes": found.traffic_bytes, "uncounted": ""}
