"""Pods as services of the daemon: admitted when they are seen to hold GPUs, dismissed when they are gone."""

import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from polythrottle.daemon.loop.node import Node
from polythrottle.daemon.loop.shared_power import Member
from polythrottle.daemon.pods.kubelet import PodName
from polythrottle.daemon.pods.placement import PodService
from polythrottle.daemon.pods.tracker import PodsSeen
from polythrottle.daemon.status import PodShown
from polythrottle.domain.clock import Clock
from polythrottle.domain.errors import PolythrottleError

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
