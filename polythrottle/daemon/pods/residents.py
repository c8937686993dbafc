"""Pods as services of the daemon: which are served on which GPUs, followed on this node, admitted and dismissed.

*Placement*: which pods are to be served, on which GPUs, and why the others that asked are not: values, no I/O. GPUs are
those that NVIDIA's device plugin gives: a UUID, ``MIG-…`` for a slice of one, and with a suffix such as ``::2`` where
several pods share one (time-slicing and MPS). https://github.com/NVIDIA/k8s-device-plugin

*Following*: the kubelet is asked often, and the cluster's API about those pods that hold GPUs. They are admitted when
they are seen to hold them, and dismissed when they are gone.
"""

import hashlib
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from polythrottle.daemon.followed_profile import check_absolute
from polythrottle.daemon.loop.node import Node
from polythrottle.daemon.loop.service_power_split import Member
from polythrottle.daemon.pods.kubernetes import (
    QUESTIONS_MOST,
    Allocations,
    PodDevices,
    PodFacts,
    PodName,
    PodQuestion,
    PodReader,
)
from polythrottle.daemon.settings import watts, weight_of
from polythrottle.daemon.status import PodShown
from polythrottle.domain.clock import Clock
from polythrottle.domain.errors import DeviceError, InvalidInput, PolythrottleError, UnknownName
from polythrottle.storage.untrusted import is_address, own_error, shortened

PREFIX = "polythrottle.io/"
OTHERS = {"dynamo.nvidia.com/gpu-power-limit": "NVIDIA Dynamo's power agent"}
"""Annotations by which other agents are told to set a pod's GPUs, and who those are.

Dynamo's: components/power_agent in https://github.com/ai-dynamo/dynamo; its value is watts for each GPU.
"""
_SLOS = {"slo-p99": "p99", "slo-ttft-p99": "ttft_p99", "slo-tpot-p99": "tpot_p99"}
_KNOWN = ("profile", "power", "weight", "metrics", *_SLOS)
_PROFILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_METRICS = re.compile(r"(\d{1,5})(/[A-Za-z0-9._~/-]{0,200})?")
_GPU = re.compile(r"GPU-[0-9a-fA-F-]{1,60}")
_SHARED = "::"
_MAKER = "nvidia.com/"
_NAME_MOST = 32  # 39 letters with - and the digest, of 40 that a service's name may have
_VALUE_MOST = 100
_DIGEST = 6


@dataclass(frozen=True)
class Wish:
    """What a pod's annotations ask for.

    Args:
        profile: Name of the tuned profile to follow.
        slo: Constraints that go before the profile's.
        power_w: Most mean power of its GPUs together; None for no such limit.
        weight: What its SLO counts where watts are short.
        metrics: Port and path at which it serves Prometheus metrics; "" if it reports to the daemon.
    """

    profile: str
    slo: tuple[str, ...] = ()
    power_w: float | None = None
    weight: float = 1.0
    metrics: str = ""


@dataclass(frozen=True)
class PodService:
    """A pod that is served.

    Args:
        pod: Which.
        uid: Tells it from another of that name.
        gpus: UUIDs of its GPUs, in order; no other pod holds one of them.
        wish: What it asks for.
        address: Of the pod.
    """

    pod: PodName
    uid: str
    gpus: tuple[str, ...]
    wish: Wish
    address: str = ""

    @property
    def name(self) -> str:
        """The name of its service: the pod's, shortened, and what tells it from every other pod."""
        plain = re.sub(r"[^a-z0-9-]", "-", self.pod.name.lower())
        if not plain[:1].isalpha():
            plain = f"p{plain}"
        digest = hashlib.sha256(f"{self.pod} {self.uid}".encode()).hexdigest()[:_DIGEST]
        return f"{plain[:_NAME_MOST].rstrip('-')}-{digest}"

    @property
    def device(self) -> str:
        """The URI of its GPUs as one device."""
        return f"nvml:{','.join(self.gpus)}"

    @property
    def traffic(self) -> str:
        """Where its requests are seen."""
        if not self.wish.metrics:
            return "report"
        host = self.address
        if ":" in host:
            host = f"[{host}]"
        return f"metrics:http://{host}:{self.wish.metrics}"


@dataclass(frozen=True)
class Placement:
    """The pods of a node that are to be served, and those that ask and are not.

    Args:
        services: With GPUs of their own.
        refused: Why not, by pod.
        unknown: Pods that are there, and of which nothing else is known now.
    """

    services: tuple[PodService, ...] = ()
    refused: Mapping[PodName, str] = field(default_factory=dict)
    unknown: frozenset[PodName] = frozenset()


def asks(facts: PodFacts) -> bool:
    """Return whether a pod asks to be served."""
    return any(key.startswith(PREFIX) for key in facts.annotations)


def wish_of(annotations: Mapping[str, str]) -> Wish:
    """Return what annotations ask for.

    Raises:
        InvalidInput: If a value is not what it should be; names the annotation.
        UnknownName: If one of polythrottle's is unknown.
    """
    said = {key.removeprefix(PREFIX): value for key, value in annotations.items() if key.startswith(PREFIX)}
    if strange := [key for key in said if key not in _KNOWN]:
        raise UnknownName("annotation", f"{PREFIX}{strange[0][:60]}", [f"{PREFIX}{each}" for each in _KNOWN])
    profile = said.get("profile", "")
    if not profile:
        raise InvalidInput(f"{PREFIX}profile is missing: it names the tuned profile that is to be followed")
    if not _PROFILE.fullmatch(profile):
        raise InvalidInput(f"{PREFIX}profile: {profile[:60]!r} is no name of a profile: letters, digits and . _ -")
    read: Mapping[str, Callable[[str], Any]] = {
        **{key: partial(_constraint, key) for key in _SLOS},
        "power": watts,
        "weight": weight_of,
    }
    values = {key: _read(key, said[key], read[key]) for key in read if key in said}
    slo = tuple(values[key] for key in _SLOS if key in values)
    return Wish(profile, slo, values.get("power"), values.get("weight", 1.0), _metrics(said.get("metrics", "")))


def _read(key: str, value: str, read: Callable[[str], Any]) -> Any:
    """Return what an annotation means.

    Raises:
        InvalidInput: If it means nothing; names the annotation.
    """
    if len(value) > _VALUE_MOST:  # an object has 256 kB of annotations: neither parsed nor repeated in every message
        raise InvalidInput(f"{PREFIX}{key}: {shortened(value)} has more than {_VALUE_MOST} letters")
    try:
        return read(value)
    except PolythrottleError as error:
        raise InvalidInput(f"{PREFIX}{key}: {error}") from error


def _constraint(key: str, value: str) -> str:
    text = f"{_SLOS[key]}<={value.strip()}"
    check_absolute([text])
    return text


def _metrics(text: str) -> str:
    """Return port and path of metrics; "" if there are none.

    Raises:
        InvalidInput: If they are no such thing: anything else could name another address than the pod's.
    """
    if not text:
        return ""
    match = _METRICS.fullmatch(text.strip())
    if match is None or not 0 < int(match[1]) < 65536:
        raise InvalidInput(f"{PREFIX}metrics: {text[:60]!r} is no port and path; write for example 8000/metrics")
    return f"{int(match[1])}{match[2] or '/metrics'}"


def place(held: Sequence[PodDevices], facts: Mapping[PodName, PodFacts | None]) -> Placement:
    """Return which pods are served on which GPUs.

    Args:
        held: What each pod holds.
        facts: Of each pod that is known; None where there is no such pod any more. One that is not known is not
            served, and what it holds is not free.
    """
    # Kubernetes before 1.34 lists pods that are over for as long as they are not deleted, with what they held.
    present = [each for each in held if not _over(each.pod, facts)]
    holders: dict[str, set[PodName]] = {}
    for each in present:
        for gpu in _gpus(each):
            holders.setdefault(gpu, set()).add(each.pod)
    services = []
    refused = {}
    for each in sorted(present, key=lambda each: each.pod):
        known = facts.get(each.pod)
        if known is None or not asks(known):
            continue
        try:
            services.append(_placed(each, known, holders))
        except PolythrottleError as error:
            refused[each.pod] = str(error)
    unknown = frozenset(each.pod for each in present if each.pod not in facts)
    return Placement(tuple(services), refused, unknown)


def holds_gpu(held: PodDevices) -> bool:
    """Return whether a pod holds a GPU or a part of one, or may do so by a claim."""
    return bool(held.claims) or any(_may_be_gpu(name, ids) for name, ids in held.devices.items())


def _over(pod: PodName, facts: Mapping[PodName, PodFacts | None]) -> bool:
    if pod not in facts:
        return False
    known = facts[pod]
    return known is None or known.over


def _may_be_gpu(resource: str, ids: Sequence[str]) -> bool:
    named = resource.startswith((f"{_MAKER}gpu", f"{_MAKER}mig-"))
    return named or any(each.startswith(("GPU-", "MIG-")) for each in ids)


def _gpus(held: PodDevices) -> tuple[str, ...]:
    """Return what a pod holds of GPUs, without what tells shares of one apart; in order."""
    found = {each.partition(_SHARED)[0] for name, ids in held.devices.items() if _may_be_gpu(name, ids) for each in ids}
    return tuple(sorted(found))


def _placed(held: PodDevices, facts: PodFacts, holders: Mapping[str, set[PodName]]) -> PodService:
    """Return a pod as it is served.

    Raises:
        InvalidInput: If it is not; says why.
        UnknownName: If an annotation is unknown.
    """
    for annotation, agent in OTHERS.items():
        if annotation in facts.annotations:
            limit = " ".join(facts.annotations[annotation].split())[:20]
            raise InvalidInput(
                f"its GPUs are set by {agent} ({annotation}: {limit}); take one of both annotations away"
            )
    wish = wish_of(facts.annotations)
    gpus = _gpus(held)
    if not gpus and held.claims:
        raise InvalidInput("its devices come by dynamic resource allocation, of which the kubelet does not tell GPUs")
    if not gpus:
        raise InvalidInput("it holds no GPU of this node")
    for gpu in gpus:
        if gpu.startswith("MIG-"):
            raise InvalidInput(f"{gpu} is a slice of a GPU (MIG): clocks and limits are those of the whole GPU")
        if not _GPU.fullmatch(gpu):
            raise InvalidInput(f"the device plugin calls its device {gpu[:60]!r}, which is no UUID of a GPU")
        if others := sorted(map(str, holders[gpu] - {held.pod})):
            raise InvalidInput(f"{gpu} is shared with {', '.join(others)[:100]}: a GPU is set for one pod alone")
    if wish.metrics and not is_address(facts.address):
        raise InvalidInput("it has no address yet, at which its metrics are to be read")
    return PodService(held.pod, facts.uid, gpus, wish, facts.address)


LOOK_S = 2.0
FACTS_S = 5.0
"""For how long what is known of a pod is believed: so long a pod of the same name may be taken for its predecessor."""
SILENT_S = 15.0
"""For how long the last answers are believed where nobody answers any more."""
ANSWER_S = 0.5
"""For how long one look waits for answers about pods. Those that take longer are had at a later look: a pod that the
kubelet lists no more is gone at once, however slow the API server is."""


@dataclass(frozen=True)
class PodsSeen:
    """The pods of this node.

    Args:
        placement: Who is served and who is not; None while that is not known.
        faults: What does not work now, in words.
    """

    placement: Placement | None = None
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Known:
    facts: PodFacts | None
    held: PodDevices
    told_s: float
    """When the answer came."""
    asked_s: float
    """When the question was put that it answers."""


class PodTracker:
    """Knows the pods of this node as of its last `look`.

    Args:
        kubelet: Tells who holds which devices.
        reader: Tells what a pod is; is asked from several threads.
        clock: It goes by.
    """

    def __init__(self, kubelet: Allocations, reader: PodReader, clock: Clock) -> None:
        self._kubelet = kubelet
        self._reader = reader
        self._clock = clock
        self._held: tuple[PodDevices, ...] | None = None
        self._heard_s = clock.now()
        self._known: dict[PodName, _Known] = {}
        self._questions: dict[PodName, PodQuestion] = {}
        self._slots = threading.BoundedSemaphore(QUESTIONS_MOST)
        self._kubelet_fault = ""
        self._unanswered: dict[PodName, PodQuestion] = {}
        """The last question about a pod, where that failed."""

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
        held = () if self._held is None else self._held
        self._forget({each.pod: each for each in held})
        if self._held is None:
            return PodsSeen(None, faults)
        self._ask(held)
        self._take_answers()
        if self._unanswered:
            faults = (*faults, next(iter(self._unanswered.values())).fault)
        facts = {pod: known.facts for pod, known in self._known.items()}
        return PodsSeen(place(held, facts), faults)

    def close(self) -> None:
        """Hang up."""
        self._forget({})
        self._kubelet.close()

    def _forget(self, present: Mapping[PodName, PodDevices]) -> None:
        """Forget pods that are gone or hold something else: who was away for a moment may be another of its name."""
        self._known = {pod: known for pod, known in self._known.items() if present.get(pod) == known.held}
        self._unanswered = {pod: asked for pod, asked in self._unanswered.items() if present.get(pod) == asked.held}
        for pod, question in tuple(self._questions.items()):
            if present.get(pod) != question.held:
                question.drop()
                del self._questions[pod]

    def _ask(self, held: tuple[PodDevices, ...]) -> None:
        """Ask about pods that are new, or were asked about a while ago."""
        now_s = self._clock.now()
        for each in held:
            # A server that refuses is asked no more often than one that answers.
            last = self._unanswered.get(each.pod) or self._known.get(each.pod)
            fresh = last is not None and 0 <= now_s - last.asked_s < FACTS_S
            if not fresh and each.pod not in self._questions:
                self._questions[each.pod] = PodQuestion(self._reader, each, self._clock, self._slots)

    def _take_answers(self) -> None:
        """Take in the answers that are there or come soon, and forget what was told of a pod too long ago."""
        ends_s = time.monotonic() + ANSWER_S  # threads take real time, whatever clock it goes by
        for pod, question in tuple(self._questions.items()):
            if not question.over(ends_s - time.monotonic()):
                continue
            del self._questions[pod]
            if question.fault:
                self._unanswered[pod] = question
                continue
            self._unanswered.pop(pod, None)
            self._known[pod] = _Known(question.facts, question.held, question.answered_s, question.asked_s)
        now_s = self._clock.now()
        self._known = {pod: known for pod, known in self._known.items() if 0 <= now_s - known.told_s < SILENT_S}


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
            before = self._seen
            try:
                self._seen = self._tracker.look()
                self._seen_s = self._clock.now()
            # This is the thread's outer loop: were it to end, every pod would be given back and none admitted again.
            except Exception as error:
                words = f"the pods of this node cannot be looked at: {type(error).__name__}: {error}"[:300]
                self._seen = replace(before or PodsSeen(), faults=(words,))
            if self._seen != before:
                self._ring()
            self._over.wait(LOOK_S)
        self._tracker.close()


def _why_dismissed(pod: PodName, seen: PodsSeen) -> str:
    """Return why a pod that was served is to be served no more."""
    if seen.placement is None:
        why = "the pods of this node could not be looked at"
    elif pod in seen.placement.unknown:
        why = "it could not be looked at"
    else:
        return "it is gone, or asks for something else"
    return ": ".join((why, *seen.faults[:1]))


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
        placement = seen.placement or Placement()
        wanted = {each.name: each for each in placement.services}
        for name, service in tuple(self._here.items()):
            if wanted.get(name) != service:
                self._dismiss(node, name, _why_dismissed(service.pod, seen))
        self._drop_failed(node, wanted)
        self._tell_refused(node, placement.refused)
        if seen.placement is not None and not placement.unknown and not self._tidied:  # an unknown one may go on
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
        except (PolythrottleError, OSError) as error:
            self._fail(node, service, str(own_error(error)))
            return
        node.admit(member)
        self._here[service.name] = service
        node.events.tell("pod", f"{service.pod} is looked after as {service.name}, on {service.device}")

    def _dismiss(self, node: Node, name: str, why: str) -> None:
        service = self._here.pop(name)
        left = node.dismiss(name)
        self._remove(name)
        words = f"{service.pod} is not looked after any more: {why}"
        if left:
            node.events.tell("fault", f"{words}; {left}")
        else:
            node.events.tell("pod", f"{words}; its GPUs are as they were found")

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
