"""A worker's care for checkpoints: when to write one, what it cost, where the newest is."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from polythrottle.clock import Clock, SystemClock
from polythrottle.cluster.store import Store
from polythrottle.cluster.train.cadence import Cadence, assumed
from polythrottle.cluster.train.checkpoint import Found, Manifest, model_digest, newest
from polythrottle.cluster.train.reporter import Reporter
from polythrottle.cluster.train.writer import Writer, Written, size_of
from polythrottle.errors import StorageError
from polythrottle.state import state_dir

PATIENCE_S = 60.0


class Keeper:
    """Writes the checkpoints of the chief, and finds the newest for all.

    Args:
        url: Of the store.
        node: Name of this node, which has a spool of its own for when the store is away.
        overhead: Largest share of the time that checkpoints may take.
        every_s: A fixed time between checkpoints in seconds; None for a profiled one.
        reporter: Hears of every checkpoint, and knows the present hazard.
        say: Takes lines for people.
        clock: Times steps and writes.

    Raises:
        InvalidInput: If nothing opens the store's URL.
    """

    def __init__(
        self,
        url: str,
        node: str,
        overhead: float,
        every_s: float | None,
        reporter: Reporter,
        say: Callable[[str], None],
        clock: Clock | None = None,
    ) -> None:
        self._store = Store(url)
        place = model_digest({url: ()})
        spool = state_dir() / "spool" / (node or "alone") / place
        found = sorted(each for each in (state_dir() / "spool").glob(f"*/{place}") if each != spool)
        self._spools = tuple(Store(str(each)) for each in (spool, *found))
        self._clock = clock or SystemClock()
        self._writer = Writer(self._store, spool, self._ended, self._clock)
        self._overhead, self._every_s, self._reporter, self._say = overhead, every_s, reporter, say
        self._cadence = Cadence(overhead=overhead)
        self._written: Written | None = None
        self._drag_from_s: float | None = None
        self._stall_s, self._forced = 0.0, ""
        self._since_s = self._clock.now()

    @property
    def cadence(self) -> Cadence:
        """Return what is known of the costs of steps and checkpoints."""
        return self._cadence

    def find(self, model: str, chief: bool) -> Found | None:
        """Return the newest valid checkpoint that this worker can see, None if there is none.

        Args:
            model: Digest of the model's tensors.
            chief: Whether to look into the store; others look only into what waits on their own machine's disk, under
                whatever name a node had there.

        Raises:
            StorageError: If the store stays away.
            BadFile: If all whole checkpoints are of another model.
        """
        begun_s, pause_s = self._clock.now(), 0.5
        while True:
            try:
                return newest((self._store, *self._spools) if chief else self._spools, model, self._say)
            except StorageError as err:
                if self._clock.now() - begun_s > PATIENCE_S:
                    raise
                self._say(f"{err}; trying again")
                self._clock.sleep(pause_s)
                pause_s = min(8.0, pause_s * 2)

    def begin(self, state: Mapping[str, Any], chief: bool) -> None:
        """Begin to count, once a first step has made the optimiser's state whole.

        Args:
            state: What checkpoints will hold.
            chief: Whether this worker writes them: it takes the memory for copies now, beside training.
        """
        self._cadence = assumed(size_of(state), self._overhead)
        self._since_s = self._clock.now()
        if chief:
            self._writer.prepare(state)

    def stepped(self, duration_s: float) -> None:
        """Note a step that took so many seconds."""
        self._cadence = self._cadence.stepped(duration_s, self._writer.busy)

    def keep_up(self, state: Callable[[], Mapping[str, Any]], manifest: Callable[[], Manifest]) -> None:
        """Begin a checkpoint if one is due; note what the last one cost; try again to put one that waits."""
        if self._writer.busy:
            return
        if self._drag_from_s is not None and self._written is not None:
            drag_s = max(0.0, self._cadence.spent_s - self._drag_from_s)
            self._cadence = self._cadence.written(self._written.persist_s, drag_s)
            self._drag_from_s = None
        if self._is_due():
            self.write(state(), manifest())
        else:
            self._writer.retry()

    def write(self, state: Mapping[str, Any], manifest: Manifest, forced: str = "", wait: bool = False) -> None:
        """Copy a state and begin to write it.

        Args:
            state: What is written.
            manifest: What is known of it.
            forced: Why it is written now though it may not be due.
            wait: Whether to wait until it is written.
        """
        stall_s = self._writer.snapshot(state)
        self._cadence = self._cadence.stalled(stall_s)
        self._drag_from_s, self._since_s, self._written = self._cadence.spent_s, self._clock.now(), None
        self._stall_s, self._forced = stall_s, forced
        self._writer.persist(manifest)
        if wait:
            self._writer.wait(None)

    def end(self, limit_s: float) -> None:
        """Let a write that goes on end, for at most so many seconds."""
        self._writer.wait(limit_s)

    def _is_due(self) -> bool:
        since_s = self._clock.now() - self._since_s
        if self._every_s is not None:
            return since_s >= self._every_s
        return self._cadence.is_due(since_s, self._reporter.hazard_per_s)

    def _ended(self, written: Written) -> None:
        """Note how a write ended; called from its thread."""
        self._written = written
        manifest = written.manifest
        record: dict[str, Any] = {"step": manifest.step, "epoch": manifest.epoch, "name": manifest.name}
        if written.failure or written.spooled:
            reason = written.failure or written.spooled
            event = "not written" if written.failure else "spooled"
            self._say(f"checkpoint {manifest.name} is {event}: {reason}; training goes on")
            self._reporter.note({"event": event, **record, "reason": reason[:300]})
            return
        record |= {"bytes": manifest.bytes, "stall_s": round(self._stall_s, 4)}
        share = self._cadence.share
        record |= {"persist_s": round(written.persist_s, 4), "share": None if share is None else round(share, 5)}
        record["interval_s"] = self._interval_s()
        self._reporter.note({"event": "checkpoint", **record, **({"forced": self._forced} if self._forced else {})})

    def _interval_s(self) -> float | None:
        interval_s = self._every_s
        if interval_s is None:
            interval_s = self._cadence.interval_s(self._reporter.hazard_per_s)
        return round(interval_s, 3) if math.isfinite(interval_s) else None
