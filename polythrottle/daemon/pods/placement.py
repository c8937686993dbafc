"""Which pods are to be served, on which GPUs, and why the others that asked are not: values, no I/O.

GPUs are those that NVIDIA's device plugin gives: a UUID, ``MIG-…`` for a slice of one, and with a suffix such as
``::2`` where several pods share one (time-slicing and MPS). https://github.com/NVIDIA/k8s-device-plugin
"""

import hashlib
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from polythrottle.daemon.pods.kubernetes import PodDevices, PodFacts, PodName
from polythrottle.daemon.settings import watts, weight_of
from polythrottle.domain.errors import InvalidInput, PolythrottleError, UnknownName
from polythrottle.domain.problem import Constraint

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
_NAME_MOST = 32
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
    """

    services: tuple[PodService, ...] = ()
    refused: Mapping[PodName, str] = field(default_factory=dict)


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
    try:
        slo = tuple(_constraint(key, said[key]) for key in _SLOS if key in said)
        power_w = watts(said["power"]) if "power" in said else None
        weight = weight_of(said.get("weight", 1.0))
    except PolythrottleError as error:
        raise InvalidInput(f"{PREFIX}…: {error}") from error
    return Wish(profile, slo, power_w, weight, _metrics(said.get("metrics", "")))


def _constraint(key: str, value: str) -> str:
    text = f"{_SLOS[key]}<={value.strip()}"
    Constraint.parse(text)
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
    return Placement(tuple(services), refused)


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
    if wish.metrics and not _is_address(facts.address):
        raise InvalidInput("it has no address yet, at which its metrics are to be read")
    return PodService(held.pod, facts.uid, gpus, wish, facts.address)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
