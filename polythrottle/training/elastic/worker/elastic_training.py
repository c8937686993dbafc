"""What a training script uses: one object that makes it elastic, with at most five lines written anew.

::

    from polythrottle.training.elastic import Context

    with Context(model, optimiser, dataset, batch=64, epochs=3) as training:
        for x, y in training.batches():
            loss = criterion(training.model(x), y)
            training.step(loss)
"""

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from typing_extensions import Self

from polythrottle.domain.clock import SystemClock
from polythrottle.domain.errors import BadFile, InvalidInput
from polythrottle.training.elastic.channel import GENERATION, NODE, REGROUP, line_from_environment
from polythrottle.training.elastic.checkpoints import Manifest, loads, model_digest
from polythrottle.training.elastic.worker.group import CheckpointKeeper, Group, StepTimer
from polythrottle.training.elastic.worker.process import Pace, Reporter
from polythrottle.training.sampler import BatchRule, Micro, SamplerPosition, fingerprint, micros, order, place_from

AGREE_S = 0.2
PARTING_S = 5.0


@dataclass(frozen=True)
class TrainingTerms:
    """How a training is to be done; what the controller says goes before what the script says.

    Attributes:
        batch: Samples of a step: over all workers, or of each with the rule ``icac``.
        epochs: How often each sample is seen.
        micro: Samples a worker takes at once: what its memory holds; None for its whole share.
        seed: Of the shuffling.
        store: URL of the checkpoints; empty for none.
        rule: What stays the same when the number of workers changes.
        overhead: Largest share of the time that checkpoints may take.
        every_s: A fixed time between checkpoints, in seconds, instead of a profiled one.
    """

    batch: int = 32
    epochs: int = 1
    micro: int | None = None
    seed: int = 0
    store: str = ""
    rule: BatchRule = BatchRule.FIXED
    overhead: float = 0.035
    every_s: float | None = None

    def __post_init__(self) -> None:
        if self.batch < 1 or self.epochs < 1 or (self.micro is not None and self.micro < 1):
            raise InvalidInput("a training has at least one sample in a step, one epoch, one sample at once")
        if self.every_s is not None and self.every_s < 0:
            raise InvalidInput(f"time between checkpoints is at least 0 s, not {self.every_s}")

    def told(self, words: Mapping[str, Any]) -> "TrainingTerms":
        """Return the terms with what a controller says."""
        known = {key: words[key] for key in ("store", "overhead", "every_s") if words.get(key) is not None}
        return replace(self, rule=BatchRule(words.get("rule") or self.rule), **known)


class Context:
    """Makes a training elastic: wraps model, optimiser and data, and keeps checkpoints.

    Without an elastic job around it the script trains by itself, with checkpoints if it names a store.

    Args:
        model: Trained by all workers; on its device already.
        optimiser: Of the model's parameters.
        dataset: With a length; every sample is seen exactly once an epoch.
        also: More objects with ``state_dict`` and ``load_state_dict`` to keep, such as a learning-rate scheduler.
        loading: Processes that load data.
        collate: Makes a batch of samples, as torch's ``DataLoader`` takes it.
        **terms: See `TrainingTerms`.

    Raises:
        InvalidInput: If a term is not valid.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimiser: torch.optim.Optimizer,
        dataset: Dataset[Any],
        *,
        also: Mapping[str, Any] | None = None,
        loading: int = 0,
        collate: Callable[[list[Any]], Any] | None = None,
        **terms: Any,
    ) -> None:
        self.terms = TrainingTerms(**terms | ({"rule": BatchRule(terms["rule"])} if "rule" in terms else {}))
        self.model = model
        self.place = SamplerPosition()
        self.generation = int(os.environ.get(GENERATION, "0"))
        self._bare = model
        self._optimiser = optimiser
        self._dataset = dataset
        self._also = also or {}
        self._loading = loading
        self._collate = collate
        self._samples = len(dataset)  # type: ignore[arg-type]
        self._clock = SystemClock()
        self._told_to_stop = self._stopping = False
        self._micro: Micro | None = None
        self._first = True
        self._step_s = 0.0
        self._timer: StepTimer | None = None
        self._keeper: CheckpointKeeper | None = None

    @property
    def rank(self) -> int:
        """Return this worker's rank; 0 is the chief of the generation, who writes checkpoints."""
        return self._group.rank

    @property
    def workers(self) -> int:
        """Return how many workers train together now."""
        return self._group.size

    def __enter__(self) -> Self:
        line = line_from_environment()
        if line is not None:
            self.terms = self.terms.told(line.ask("terms"))
        self._group = Group(self._bare)
        node = os.environ.get(NODE, "")
        self._reporter = Reporter(line, node, self._group.rank, self.generation, self._cut_off, pace=self._pace)
        if self.terms.store:
            costs = (self.terms.overhead, self.terms.every_s)
            self._keeper = CheckpointKeeper(self.terms.store, node, *costs, self._reporter, self._say)
        if threading.current_thread() is threading.main_thread():  # Ray's workers train in another
            signal.signal(signal.SIGTERM, self._asked_to_stop)
        self._reporter.start()
        try:
            self._begin()
        except RuntimeError as err:
            self._part(err)
            raise
        return self

    def _begin(self) -> None:
        self._group.open()
        self._digest = model_digest({name: tuple(each.shape) for name, each in self._bare.state_dict().items()})
        self._factor = self.terms.rule.rate_factor(self.workers)
        resumed = self._restore()
        if resumed is None:
            self._scale(self._factor)
        self.model = self._group.wrapped()
        self._check_order()
        self._timer = StepTimer(self._bare, self._clock, self.workers == 1)
        self._began = self.place.epoch
        self._step_end_s = self._clock.now()
        self._until_agreement = 1
        self._seen_wanted = self._reporter.checkpoints_wanted

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._part(error)
            return
        self._checkpoint(forced="the end", wait=True)
        self._group.barrier()
        self._reporter.close()
        self._group.close(together=True)

    def batches(self) -> Iterator[Any]:
        """Yield this worker's batches of all epochs that are left; call `step` once for each."""
        while self.place.epoch < self.terms.epochs:
            yield from self.epoch()

    def epoch(self) -> Iterator[Any]:
        """Yield this worker's batches of what is left of the present epoch; call `step` once for each.

        Raises:
            InvalidInput: If `step` was not called for a batch, or outside the context.
            SystemExit: If all workers stop together for another generation.
        """
        if self.place.epoch >= self.terms.epochs:
            return
        timer = self._timed
        whole = order(self._samples, self.terms.seed, self.place.epoch)
        batch = self.terms.rule.batch(self.terms.batch, self.workers)
        most = self.terms.micro or batch
        parts = list(micros(whole, self.place.consumed, batch, most, self.rank, self.workers))
        loader: DataLoader[Any] = DataLoader(
            self._dataset,
            batch_sampler=[list(part.samples) for part in parts],
            num_workers=self._loading,
            collate_fn=self._collate,
        )
        for part, samples in zip(parts, timer.loaded(loader), strict=True):
            if self._micro is not None:
                raise InvalidInput("training.step(loss) has to be called once for each batch")
            if self._stopping:  # only now: what the script does after a step belongs to the step
                self._stop_together()
            self._micro = part
            self.model.require_backward_grad_sync = part.last  # type: ignore[assignment]
            yield samples

    def step(self, loss: torch.Tensor) -> None:
        """Go back through the model, and update its weights once a whole step's samples are done.

        Args:
            loss: Mean loss of the batch.

        Raises:
            InvalidInput: If there is no batch it could belong to.
        """
        part = self._micro
        self._micro = None
        if part is None:
            raise InvalidInput("training.step(loss) goes with a batch of training.batches() or training.epoch()")
        (loss * part.weight).backward()  # type: ignore[no-untyped-call]
        if not part.last:
            return
        self._timed.exchanged()
        self._optimiser.step()
        self._optimiser.zero_grad()
        epoch = self.place.epoch
        self.place = self.place.after(part.total, self._samples)
        self._settle(epoch)

    @property
    def _timed(self) -> StepTimer:
        """Return what times the steps."""
        if self._timer is None:
            raise InvalidInput("a training is used within its context: with Context(…) as training")
        return self._timer

    def _pace(self) -> Pace | None:
        """Return how fast this worker is; called from the reporter's thread."""
        if self._timer is None:
            return None
        batch = self.terms.rule.batch(self.terms.batch, self.workers)
        share = -(-batch // self.workers)
        left = max(0, (self.terms.epochs - self.place.epoch) * self._samples - self.place.consumed)
        kind = re.sub(r"[^A-Za-z0-9_]", "_", type(self._bare).__name__)[:60]
        network = f"{kind}-{self._digest[:8]}-b{share}"
        return Pace(self.generation, network, share, batch, -(-left // batch), self._timer.tally, self._timer.cold)

    def _settle(self, epoch: int) -> None:
        """Look after a step of an epoch: is anybody to stop, is a checkpoint due?"""
        duration_s = self._clock.now() - self._step_end_s
        self._timed.stepped(duration_s, epoch == self._began)
        if not self._step_s:
            self._step_s = duration_s
        else:
            self._step_s += 0.3 * (duration_s - self._step_s)
        if self._keeper is not None and self._first:
            self._keeper.begin(self._state(), self.rank == 0)
        elif self._keeper is not None:
            self._keeper.stepped(duration_s)
        self._tell_progress()
        self._until_agreement -= 1
        if self._until_agreement <= 0:
            self._agree()
        if self._group.rank == 0 and self._keeper is not None:
            self._keeper.keep_up(self._state, self._manifest)
        self._step_end_s = self._clock.now()

    def _tell_progress(self) -> None:
        self._reporter.stand(self.place.step, self.place.epoch)
        first = self._first
        self._first = False
        if first and self._group.rank == 0:
            words = {"step": self.place.step, "workers": self.workers, "rule": str(self.terms.rule)}
            self._reporter.note({"event": "first step", **words, "rate_factor": self._factor}, now=True)

    def _agree(self) -> None:
        """Hear from all whether anybody is to stop; all ask at the same steps, as often as costs next to nothing."""
        stop = self._told_to_stop or self._reporter.stop
        wanted = self._reporter.checkpoints_wanted > self._seen_wanted
        apart = max(1, min(100, round(AGREE_S / max(self._step_s, 1e-6))))
        stopping, writing, self._until_agreement = self._group.highest([stop, wanted, apart])
        self._stopping = bool(stopping)
        if writing and not stopping:
            self._seen_wanted = self._reporter.checkpoints_wanted
            self._checkpoint(forced="a notice")

    def _stop_together(self) -> None:
        self._checkpoint(forced="regrouping", wait=True)
        self._group.barrier()
        raise SystemExit(REGROUP)

    def _checkpoint(self, forced: str, wait: bool = False) -> None:
        """Write a checkpoint now if this worker is the chief; ``wait`` until it is written."""
        if self._group.rank == 0 and self._keeper is not None:
            self._keeper.write(self._state(), self._manifest(), forced, wait)

    def _manifest(self) -> Manifest:
        place = self.place
        rule = str(self.terms.rule)
        where = (self.generation, place.step, place.epoch, place.consumed)
        return Manifest(*where, self.workers, rule, self._factor, self._digest)

    def _state(self) -> dict[str, Any]:
        return {
            "model": self._bare.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "place": asdict(self.place),
            "rate_factor": self._factor,
            "seed": self.terms.seed,
            "order": fingerprint(order(self._samples, self.terms.seed, self.place.epoch)),
            "also": {name: each.state_dict() for name, each in self._also.items()},
        }

    def _restore(self) -> SamplerPosition | None:
        """Take up the newest valid checkpoint of the store or of any worker's spool; return its place."""
        looks = self._keeper is not None and self._group.local_rank == 0
        if self._keeper is not None and looks:
            found = self._keeper.find(self._digest, chief=self.rank == 0)
        else:
            found = None
        if found is not None:
            mine = (found.manifest.generation, found.manifest.step)
        else:
            mine = (-1, -1)
        best = (self._group.highest([mine[0]])[0],)
        step = self._group.highest([mine[1] if mine[0] == best[0] else -1])[0]
        if step < 0:
            return None
        holds = found is not None and mine == (best[0], step)
        root = self._group.size - 1 - self._group.highest([self._group.size - 1 - self.rank if holds else -1])[0]
        state = loads(self._group.shared(found.data if found is not None and holds else None, root))
        self._take(state)
        if self.rank == 0:
            origin = {"step": self.place.step, "from_generation": best[0], "epoch": self.place.epoch}
            self._reporter.note({"event": "resumed", **origin, "consumed": self.place.consumed})
        return self.place

    def _take(self, state: Mapping[str, Any]) -> None:
        try:
            self._bare.load_state_dict(state["model"])
            self._optimiser.load_state_dict(state["optimiser"])
            for name, each in self._also.items():
                each.load_state_dict(state["also"][name])
            self.place = place_from(state["place"], self._samples)
            known = int(state["order"])
            here = fingerprint(order(self._samples, state["seed"], self.place.epoch))
            self.terms = replace(self.terms, seed=int(state["seed"]))
            self._scale(self._factor / float(state["rate_factor"]))
        except (KeyError, ValueError, TypeError, RuntimeError) as err:
            raise BadFile(f"the checkpoint does not fit this script: {err}") from err
        if known != here:
            raise BadFile("the checkpoint's order of samples is not this machine's: another data set, or another NumPy")

    def _check_order(self) -> None:
        mine = fingerprint(order(self._samples, self.terms.seed, self.place.epoch))
        if self._group.highest([mine, -mine]) != [mine, -mine]:
            raise BadFile("the workers shuffle differently: they need the same data set and the same NumPy")

    def _scale(self, factor: float) -> None:
        for group in self._optimiser.param_groups:
            group["lr"] *= factor

    def _asked_to_stop(self, number: int, frame: FrameType | None) -> None:
        self._told_to_stop = True

    def _part(self, error: BaseException) -> None:
        """Leave a training that did not come to its end; a lost peer is no fault of the script."""
        peers_gone = isinstance(error, RuntimeError) and _of_a_peer(error)
        if self._keeper is not None:
            self._keeper.end(PARTING_S)
        if peers_gone:
            self._say(f"a peer is gone at step {self.place.step}; waiting for the next generation")
        self._reporter.close()
        regroups = isinstance(error, SystemExit) and error.code == REGROUP and self._group.size > 1
        if peers_gone or regroups:
            sys.stderr.flush()
            sys.stdout.flush()
            os._exit(REGROUP)  # an orderly end would wait for who is gone

    def _cut_off(self) -> None:
        """End this process when what it waits for can never come; called from the reporter's thread."""
        if self._keeper is not None:
            self._keeper.end(PARTING_S)
        os._exit(REGROUP)

    def _say(self, text: str) -> None:
        sys.stderr.write(f"polythrottle: generation {self.generation}, rank {self._group.rank}: {text}\n")


def _of_a_peer(error: RuntimeError) -> bool:
    """Return whether an error is torch's way to say that another worker does not answer."""
    if isinstance(error, torch.distributed.DistError):
        return True
    words = str(error).lower()
    return any(word in words for word in ("gloo", "nccl", "connection closed", "connection reset", "timed out"))
