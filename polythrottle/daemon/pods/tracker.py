"""Follows the pods of this node: asks the kubelet often, and the cluster's API about those pods that hold GPUs."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from polythrottle.daemon.pods.cluster_api import PodFacts, PodReader
from polythrottle.daemon.pods.kubelet import Allocations, PodDevices, PodName
from polythrottle.daemon.pods.placement import Placement, holds_gpu, place
from polythrottle.domain.clock import Clock
from polythrottle.domain.errors import DeviceError

LOOK_S = 2.0
FACTS_S = 5.0
"""For how long what is known of a pod is believed: so long a pod of the same name may be taken for its predecessor."""
SILENT_S = 15.0
"""For how long the last answers are believed where nobody answers any more."""


@dataclass(frozen=True)
class PodsSeen:
    """The pods of this node.

    Args:
        placement: Who is served and who is not; None while that is not known.
        faults: What does not work now, in words.
    """

    placement: Placement | None = None
    faults: tuple[str, ...] = ()


@dataclass
class _Known:
    facts: PodFacts | None
    held: PodDevices
    read_s: float
    """When it was told last."""
    asked_s: float


class PodTracker:
    """Knows the pods of this node as of its last `look`.

    Args:
        kubelet: Tells who holds which devices.
        reader: Tells what a pod is.
        clock: It goes by.
    """

    def __init__(self, kubelet: Allocations, reader: PodReader, clock: Clock) -> None:
        self._kubelet = kubelet
        self._reader = reader
        self._clock = clock
        self._held: tuple[PodDevices, ...] | None = None
        self._heard_s = clock.now()
        self._known: dict[PodName, _Known] = {}
        self._kubelet_fault = ""
        self._reader_fault = ""

    def look(self) -> PodsSeen:
        """Ask, and return what is known now; what was told before is believed for a while where nobody answers."""
        now_s = self._clock.now()
        try:
            self._held = tuple(each for each in self._kubelet.pods() if holds_gpu(each))
            self._heard_s = now_s
            self._kubelet_fault = ""
        except DeviceError as error:
            self._kubelet_fault = str(error)
            if not 0 <= now_s - self._heard_s < SILENT_S:
                self._held = None
        faults = (self._kubelet_fault,) if self._kubelet_fault else ()
        if self._held is None:
            self._known.clear()
            return PodsSeen(None, faults)
        self._refresh(self._held, now_s)
        if self._reader_fault:
            faults = (*faults, self._reader_fault)
        facts = {pod: known.facts for pod, known in self._known.items()}
        return PodsSeen(place(self._held, facts), faults)

    def close(self) -> None:
        """Hang up."""
        self._kubelet.close()

    def _refresh(self, held: tuple[PodDevices, ...], now_s: float) -> None:
        """Ask about pods that are new, hold something else than before, or were asked about a while ago."""
        present = {each.pod: each for each in held}
        # One that was away for a moment may be another of its name.
        self._known = {pod: known for pod, known in self._known.items() if present.get(pod) == known.held}
        self._reader_fault = ""
        for each in held:
            known = self._known.get(each.pod)
            if known is not None and 0 <= now_s - known.asked_s < FACTS_S:
                continue
            if self._reader_fault:  # one that does not answer is not asked about every pod, each for seconds
                self._silent(each.pod, now_s)
                continue
            try:
                facts = self._reader.pod(each.pod)
            except DeviceError as error:
                self._reader_fault = str(error)
                self._silent(each.pod, now_s)
                continue
            self._known[each.pod] = _Known(facts, each, now_s, now_s)

    def _silent(self, pod: PodName, now_s: float) -> None:
        """Forget what was told of a pod too long ago."""
        known = self._known.get(pod)
        if known is not None and not 0 <= now_s - known.read_s < SILENT_S:
            del self._known[pod]


class PodWatch:
    """Follows the pods from a thread of its own: a kubelet that hangs must not hold up the control loop.

    Args:
        tracker: Knows the pods.
        clock: It goes by.
        ring: Is called when something else is known than before.
    """

    def __init__(self, tracker: PodTracker, clock: Clock, ring: Callable[[], None] = lambda: None) -> None:
        self._tracker = tracker
        self._clock = clock
        self._ring = ring
        self._seen: PodsSeen | None = None
        self._seen_s = clock.now()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watched, name="polythrottle-pods", daemon=True)
        self._thread.start()

    @property
    def seen(self) -> PodsSeen | None:
        """What was seen last; None before the first answer. Nothing is known once that is too long ago."""
        seen = self._seen
        if seen is not None and not 0 <= self._clock.now() - self._seen_s < SILENT_S:
            return replace(seen, placement=None, faults=(*seen.faults, "the pods have not been looked at for a while"))
        return seen

    def close(self) -> None:
        """End it; one that hangs is not waited for."""
        self._over.set()
        self._thread.join(timeout=1.0)

    def _watched(self) -> None:
        while not self._over.is_set():
            seen = self._tracker.look()
            before = self._seen
            self._seen = seen
            self._seen_s = self._clock.now()
            if seen != before:
                self._ring()
            self._over.wait(LOOK_S)
        self._tracker.close()
