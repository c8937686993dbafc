"""What a scheduler and a trainer say to each other: the task, and a JSON object per line over a Unix socket."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from polythrottle.domain.errors import InvalidInput, TrialError

# What is to be trained, on what and how: a job as the trainer needs it.

HEAD = "head"
ADAPTERS = "adapters"
DEVICES = ("auto", "cpu", "cuda")
_FREE = ("epochs", "threads", "device", "served", "latency_limit_s", "slower", "memory_bytes")
"""What may differ when a job is resumed."""
_WHOLE = ("batch", "epochs", "rank", "threads", "memory_bytes")


@dataclass(frozen=True)
class Task:
    """A job as the trainer needs it.

    Args:
        model: ``package.module:callable``, ``model.pt2`` or TorchScript's ``model.pt``.
        data: Folder of samples; see `polythrottle.training.beside.trainer.job_folder`.
        folder: Of the job: checkpoints and all that; made if it is not there.
        batch: Samples of a step.
        epochs: How often each sample is seen.
        seed: Of the order of samples and of new weights.
        trained: ``head`` for the last linear layer, ``adapters`` for that and low-rank adapters on all other ones.
        rank: Of the adapters (LoRA, arXiv 2106.09685).
        learning_rate: Of Adam (arXiv 1412.6980).
        held_out: Share of the samples that are kept for validation, 0..1.
        served: The model file to be replaced; empty if none is to be.
        latency_limit_s: The longest one sample may take through the new model; None for no such limit.
        slower: How many times the served model's latency the new one's may be.
        threads: Of torch.
        device: ``cpu``, ``cuda``, or ``auto`` for cuda where there is one.
        memory_bytes: Most memory the trainer may take beyond its model; None for no limit; on the CPU only.

    Raises:
        InvalidInput: If a value is out of its range.
    """

    model: str
    data: str
    folder: str
    batch: int = 32
    epochs: int = 1
    seed: int = 0
    trained: str = HEAD
    rank: int = 4
    learning_rate: float = 1e-3
    held_out: float = 0.1
    served: str = ""
    latency_limit_s: float | None = None
    slower: float = 1.25
    threads: int = 1
    device: str = "auto"
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, known in (("trained", (HEAD, ADAPTERS)), ("device", DEVICES)):
            if getattr(self, name) not in known:
                raise InvalidInput(f"{name} must be {' or '.join(known)}, not {getattr(self, name)!r}")
        for name in ("model", "data", "folder"):
            if not getattr(self, name):
                raise InvalidInput(f"{name} is missing")
        for name in _WHOLE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidInput(f"{name} must be at least 1, not {value}")
        self._check_reals()

    def _check_reals(self) -> None:
        if self.seed < 0:
            raise InvalidInput(f"seed must be 0 or more, not {self.seed}")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise InvalidInput(f"learning_rate must be above 0, not {self.learning_rate}")
        if not 0 < self.held_out < 1:
            raise InvalidInput(f"held_out is a share between 0 and 1, not {self.held_out}")
        if not (math.isfinite(self.slower) and self.slower >= 1):
            raise InvalidInput(f"slower must be at least 1, not {self.slower}")
        if self.latency_limit_s is not None and not self.latency_limit_s > 0:
            raise InvalidInput(f"latency_limit_s must be above 0, not {self.latency_limit_s}")

    def document(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)

    def differences(self, other: "Task") -> tuple[str, ...]:
        """Return the names of what makes the other one a different job; empty if it resumes this one."""
        mine = self.document()
        theirs = other.document()
        return tuple(name for name in mine if name not in _FREE and mine[name] != theirs[name])

    @classmethod
    def from_document(cls, document: Any) -> "Task":
        """Return the task of a JSON document.

        Raises:
            InvalidInput: If a field is missing, unknown, of another type or out of its range.
        """
        if isinstance(document, dict):
            given: Mapping[str, Any] = document
        else:
            given = {}
        known = {each.name: each for each in fields(cls)}
        odd = sorted(set(given) - set(known)) or [
            name for name, value in given.items() if not _fits(value, str(known[name].type), known[name].default)
        ]
        lacks = [name for name in ("model", "data", "folder") if name not in given]
        if odd or lacks:
            raise InvalidInput(f"that is no task: {', '.join(lacks or odd)} is {'missing' if lacks else 'not right'}")
        return cls(**given)


def _fits(value: Any, kind: str, default: Any) -> bool:
    """Return whether a value out of JSON is of the kind of a field."""
    if value is None:
        return default is None
    if isinstance(value, bool):
        return False
    if "str" in kind:
        return isinstance(value, str)
    return isinstance(value, int) or ("float" in kind and isinstance(value, float))


# The line between whoever schedules fine-tuning and the trainer: one JSON object per line over a Unix stream socket.
#
# A request is ``{"verb": …}`` with the verb's fields, in at most 64 KiB; its answer is ``{"answer": {…}}`` or
# ``{"error": {"kind": …, "words": …}}``, in at most 1 MiB. One request at a time: the trainer does nothing unasked,
# and ends when the other side hangs up. Times are seconds, types strict as in `polythrottle.storage.json_lines`. The
# verbs:
#
# ``hello`` {task}
#     → ``pid``, ``samples``, ``held_out``, ``batch``, ``epochs``, ``steps_per_epoch``, ``output`` (dimension of the
#     head), ``trained_parameters``, ``device``, ``operations`` and ``traffic_bytes`` of one sample's forward pass (null
#     with ``uncounted`` saying why), and what ``slice`` says of where it stands. Begins or resumes a job: the first
#     request, and only that. ``task`` is a `polythrottle.training.beside.trainer.protocol.Task` as JSON.
# ``slice`` {samples, write}
#     → ``samples`` (done now: never past the end of a step), ``took_s``, ``of`` (samples of this step), ``at`` (of them
# done; 0 between two steps), ``step`` (steps done), ``written`` (whether the last of them is on disk), ``epoch`` (the
# one that runs, from 0), ``position`` (samples of it in steps done), ``loss`` (mean of the step, when one ended; else
#     null), ``finished`` (the job), ``halved_to`` (most samples at once since memory ran out; else null), ``left_out``
#     [{file, why}], ``notices`` [text]. The slice that ends a step moves the weights and, with ``write``, brings a
#     checkpoint to disk; without, ``checkpoint`` does, or the next slice before anything else.
# ``checkpoint`` {}
#     → as ``slice``, without ``took_s``, ``samples``, ``loss`` and ``left_out``. Brings the last step to disk, if it is
#     not there yet: little computing and much waiting for the disk, so that it can go beside inference.
# ``validate`` {samples}
#     → ``done``, ``of`` (held-out samples), ``result`` (null until all are done; see `server.ValidationVerdict`). The
#     first request writes the candidate, each one then runs at most ``samples`` held-out samples through it and through
#     the served model, the last one times both.
# ``swap`` {}
#     → ``served``, ``previous`` (the file kept for going back; null if there was none). Refused unless the last
#     validation holds and nothing was trained since.
# ``rollback`` {}
#     → ``served``. The file kept is served again.
# ``stop`` {}
#     → {}, and the trainer ends. What was done of an unfinished step is forgotten.

MOST_REQUEST = 64 * 1024
MOST_ANSWER = 1024 * 1024
"""The longest request and the longest answer, in bytes, the newline included."""


class TrainerLost(TrialError):
    """The trainer has died, hangs or talks nonsense; a new one resumes from its last checkpoint."""
