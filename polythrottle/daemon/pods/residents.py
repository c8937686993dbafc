"""Pods as services of the daemon: followed on this node, admitted when they hold GPUs, dismissed when they are gone.

The kubelet is asked often, and the cluster's API about those pods that hold GPUs.
"""

import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from polythrottle.daemon.loop.node import Node
from polythrottle.daemon.loop.shared_power import Member
from polythrottle.daemon.pods.kubernetes import Allocations, PodDevices, PodFacts, PodName, PodReader
from polythrottle.daemon.pods.placement import Placement, PodService, holds_gpu, place
from polythrottle.daemon.status import PodShown
from polythrottle.domain.clock import Clock
from polythrottle.domain.errors import DeviceError, PolythrottleError

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


AGAIN_S = 30.0
"""After how long it is tried again to look after a pod where that failed."""


class Watch(Protocol):
    """Who follows the pods."""

    @property
    def seen(self) -> PodsSeen | None:
        """What was seen last; None before the first answer."""

    def close(self) -> None:
        """Follow them no more."""


class Residents:
    """The pods of this node that the daemon looks after; satisfies the port ``Guests``.

    Args:
        watch: Who follows the pods.
        make: Returns a service for a pod, with its state in the folder ``folder / name``.
        clock: Of the control loop.
        folder: Where the state of pods is kept; what is in it of pods that are gone is removed.
    """

    def __init__(self, watch: Watch, make: Callable[[PodService], Member], clock: Clock, folder: Path) -> None:
        self._watch = watch
        self._make = make
        self._clock = clock
        self._folder = folder
        self._here: dict[str, PodService] = {}
        self._failed: dict[str, tuple[PodService, str, float]] = {}
        """Why a service could not be made or kept, and since when."""
        self._refused: Mapping[PodName, str] = {}
        self._faults: tuple[str, ...] = ()
        self._tidied = False

    @property
    def faults(self) -> tuple[str, ...]:
        """What does not work now, in words."""
        return self._faults

    @property
    def shown(self) -> tuple[PodShown, ...]:
        """Every pod that asks to be looked after."""
        found = {
            each.pod: PodShown(each.pod.namespace, each.pod.name, name, each.gpus) for name, each in self._here.items()
        }
        for service, words, _ in self._failed.values():
            found[service.pod] = PodShown(service.pod.namespace, service.pod.name, refused=words)
        for pod, words in self._refused.items():
            found[pod] = PodShown(pod.namespace, pod.name, refused=words)
        return tuple(found[pod] for pod in sorted(found))

    def turn(self, node: Node) -> None:
        """Admit pods that have come, and dismiss those that are gone or ask for something else."""
        seen = self._watch.seen
        if seen is None:
            return
        for words in seen.faults:
            if words not in self._faults:
                node.events.tell("fault", words)
        self._faults = seen.faults
        placement = seen.placement
        wanted: dict[str, PodService] = {}
        if placement is not None:
            wanted = {each.name: each for each in placement.services}
        why = (
            "it is gone, or asks for something else" if placement is not None else "it is not known whether it is there"
        )
        for name, service in tuple(self._here.items()):
            if wanted.get(name) != service:
                self._dismiss(node, name, why)
        self._drop_failed(node, wanted)
        self._tell_refused(node, {} if placement is None else placement.refused)
        if placement is not None and not self._tidied:
            self._tidy(wanted)
        for name, service in wanted.items():
            if name not in self._here and name not in self._failed:
                self._admit(node, service)

    def close(self) -> None:
        """Follow them no more."""
        self._watch.close()

    def _admit(self, node: Node, service: PodService) -> None:
        try:
            member = self._make(service)
        except PolythrottleError as error:
            self._fail(node, service, str(error))
            return
        node.admit(member)
        self._here[service.name] = service
        node.events.tell("pod", f"{service.pod} is looked after as {service.name}, on {service.device}")

    def _dismiss(self, node: Node, name: str, why: str) -> None:
        service = self._here.pop(name)
        left = node.dismiss(name)
        self._remove(name)
        if left:
            node.events.tell("fault", f"{service.pod} is not looked after any more: {why}; {left}")
        else:
            node.events.tell(
                "pod", f"{service.pod} is not looked after any more: {why}; its GPUs are as they were found"
            )

    def _drop_failed(self, node: Node, wanted: Mapping[str, PodService]) -> None:
        """Let go of services that have ended by a fault, and of failures that are over or long enough ago."""
        now_s = self._clock.now()
        for member in node.members:
            if member.failed and member.name in self._here:
                service = self._here[member.name]
                words = member.failed
                self._dismiss(node, member.name, "it failed")
                self._failed[service.name] = service, words, now_s
        for name, (service, _, since_s) in tuple(self._failed.items()):
            if wanted.get(name) != service or not 0 <= now_s - since_s < AGAIN_S:
                del self._failed[name]

    def _fail(self, node: Node, service: PodService, words: str) -> None:
        self._failed[service.name] = service, words, self._clock.now()
        node.events.tell("pod", f"{service.pod} is not looked after: {words}")

    def _tell_refused(self, node: Node, refused: Mapping[PodName, str]) -> None:
        for pod, words in refused.items():
            if self._refused.get(pod) != words:
                node.events.tell("pod", f"{pod} is not looked after: {words}")
        self._refused = refused

    def _tidy(self, wanted: Mapping[str, PodService]) -> None:
        """Remove what an earlier daemon kept of pods that are gone."""
        self._tidied = True
        with suppress(OSError):
            for each in self._folder.iterdir():
                if each.name not in wanted:
                    self._remove(each.name)

    def _remove(self, name: str) -> None:
        shutil.rmtree(self._folder / name, ignore_errors=True)
