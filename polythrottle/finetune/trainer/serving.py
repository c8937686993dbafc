"""The trainer's end of the line: takes requests, has the worker do them, validates and swaps the model."""

import hashlib
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from polythrottle.actuation.wire import error_line
from polythrottle.errors import BadFile, InvalidInput, PolythrottleError, StorageError, TrialError
from polythrottle.finetune.trainer import files
from polythrottle.finetune.trainer.network import scores_of
from polythrottle.finetune.trainer.progress import VALIDATION
from polythrottle.finetune.trainer.task import Task
from polythrottle.finetune.trainer.validating import Scores, Validation, Verdict
from polythrottle.finetune.trainer.worker import Worker
from polythrottle.finetune.wire import MOST_REQUEST, Line
from polythrottle.workloads.call import one_line

_WIDTHS = {torch.float16: 2, torch.bfloat16: 2, torch.float64: 8}


class Desk:
    """Answers requests, one after the other."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._fault: PolythrottleError | None = None
        self._validation: tuple[Validation, int] | None = None
        self._judged: tuple[Verdict, str] | None = None

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
        verb, given = request.get("verb"), {name: value for name, value in request.items() if name != "verb"}
        if not isinstance(verb, str) or verb not in verbs:
            raise InvalidInput(f"there is no verb {str(verb)[:40]!r}; there are {', '.join(verbs)} and stop")
        do, form = verbs[verb]
        if set(given) != set(form) or any(type(given[name]) is not kind for name, kind in form.items()):
            told = ", ".join(f"{name} ({kind.__name__})" for name, kind in form.items()) or "nothing"
            raise InvalidInput(f"{verb} takes {told}")
        return do(**given)

    def _hello(self, task: dict[str, Any]) -> dict[str, Any]:
        if self._worker is not None:
            raise InvalidInput("hello is said once")
        self._worker = worker = Worker(Task.from_document(task))
        order, batch = len(worker.epoch.order), worker.task.batch
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
            self._fault = err if isinstance(err, TrialError) else TrialError(f"the trainer failed: {one_line(err)}")
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
            raise InvalidInput(f"{samples} held-out samples are none")
        rows = worker.epoch.validate
        if self._validation is None:
            self._validation, self._judged = (self._begin(worker), 0), None
            return {"done": 0, "of": len(rows), "result": None}
        validation, done = self._validation
        inputs, classes, _ = worker.epoch.read(rows[done : done + samples])
        if inputs is not None:
            self._validation = None  # should it fail in the middle, it is begun again
            validation.look(inputs, classes)
        done = min(len(rows), done + samples)
        self._validation = (validation, done)
        result = self._judge(worker, validation) if done == len(rows) else None
        return {"done": done, "of": len(rows), "result": result}

    def _candidate(self, worker: Worker) -> Path:
        return worker.folder / f"candidate{worker.opened.base.suffix}"

    def _begin(self, worker: Worker) -> Validation:
        """Write the candidate, and load it and the served model as whoever serves them would."""
        path, served = self._candidate(worker), Path(worker.task.served)
        files.put(path, worker.network.archive())
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
        files.put_json(worker.folder / VALIDATION, verdict.document())
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
        kept = files.swap(Path(worker.task.served), candidate.read_bytes())
        return {"served": worker.task.served, "previous": str(kept) if kept else None}

    def _rollback(self) -> dict[str, Any]:
        worker = self._open
        if not worker.task.served:
            raise InvalidInput("no served model was named, so there is nothing to go back to")
        files.roll_back(Path(worker.task.served))
        return {"served": worker.task.served}


def serve(way: socket.socket) -> None:
    """Answer requests until told to stop or the other side hangs up."""
    line, desk = Line(way, MOST_REQUEST), Desk()
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


def _answered(desk: Desk, request: Mapping[str, Any]) -> dict[str, Any]:
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
    return (scores, "") if fits else (None, "the served model tells other classes apart, so it is not compared with")


def _on(scores: Scores, device: torch.device) -> Scores:
    if isinstance(scores, torch.nn.Module):
        scores.to(device)
    return scores


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _counted(worker: Worker) -> dict[str, Any]:
    """Return what one sample's forward pass computes and moves; None where it cannot be counted, and why."""
    from polythrottle.profiling.counting import count
    from polythrottle.profiling.torch_run import trace_torch

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
