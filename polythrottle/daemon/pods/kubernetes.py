"""What Kubernetes says of pods: its kubelet, which pod holds which devices; its API server, what a pod asks for.

*The kubelet* tells over its Unix socket (the PodResources API, v1, of gRPC). Of the API's messages only those fields
are named here that are read; protobuf skips the others. They are those of pkg/apis/podresources/v1/api.proto in
kubernetes/kubelet, which Kubernetes documents under "Monitoring device plugin resources".
https://kubernetes.io/docs/concepts/extend-kubernetes/compute-storage-net/device-plugins/

*The API server* tells a pod's annotations, its address and whether it still runs. One question is asked, ``GET
/api/v1/namespaces/NAMESPACE/pods/NAME``, of the pods alone that hold GPUs of this node: the right to ``get`` pods is
all that is needed. Several are asked about at a time, for a busy server takes seconds for each.
"""

import http.client
import json
import os
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

from polythrottle.domain.clock import Clock
from polythrottle.domain.errors import BadFile, DeviceError, InvalidInput
from polythrottle.storage.untrusted import MALFORMED

KUBELET_SOCKET = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
LIST_METHOD = "/v1.PodResourcesLister/List"
_LISTING_TIMEOUT_S = 5.0
_LISTING_BYTES_MOST = 16 * 1024 * 1024
"""As Kubernetes' own clients take."""
_TEXT = "text"
_MESSAGES: Mapping[str, Sequence[tuple[str, int, str, bool]]] = {
    "ListPodResourcesRequest": (),
    "ListPodResourcesResponse": (("pod_resources", 1, "PodResources", True),),
    "PodResources": (
        ("name", 1, _TEXT, False),
        ("namespace", 2, _TEXT, False),
        ("containers", 3, "ContainerResources", True),
    ),
    "ContainerResources": (
        ("name", 1, _TEXT, False),
        ("devices", 2, "ContainerDevices", True),
        ("dynamic_resources", 5, "DynamicResource", True),
    ),
    "ContainerDevices": (("resource_name", 1, _TEXT, False), ("device_ids", 2, _TEXT, True)),
    "DynamicResource": (("claim_name", 2, _TEXT, False),),
}
"""Name, number, type and whether it repeats, of each field that is read."""


@dataclass(frozen=True, order=True)
class PodName:
    """A pod's namespace and name, which another pod may have later."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class PodDevices:
    """What a pod holds on this node.

    Args:
        pod: Which.
        devices: Identifiers by which device plugins call them, by the name of the resource.
        claims: Names of its claims of dynamic resource allocation, whose devices are not told.
    """

    pod: PodName
    devices: Mapping[str, tuple[str, ...]]
    claims: tuple[str, ...] = ()


class Allocations(Protocol):
    """Who tells which pod holds which devices."""

    def pods(self) -> tuple[PodDevices, ...]:
        """Return every pod that holds something.

        Raises:
            DeviceError: If that cannot be told now.
        """

    def close(self) -> None:
        """Hang up."""


@cache
def message_class(name: str) -> Any:
    """Return the class of a message of the API.

    Raises:
        DeviceError: If protobuf is not installed.
    """
    return _classes()[name]


@cache
def _classes() -> Mapping[str, Any]:
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ImportError as error:
        raise _lacking(error) from error
    file = descriptor_pb2.FileDescriptorProto(name="podresources.proto", package="v1", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, number, kind, repeats in fields:
            added = message.field.add(name=field_name, number=number)
            if repeats:
                added.label = added.LABEL_REPEATED
            else:
                added.label = added.LABEL_OPTIONAL
            if kind == _TEXT:
                added.type = added.TYPE_STRING
            else:
                added.type = added.TYPE_MESSAGE
                added.type_name = f".v1.{kind}"
    # A pool of its own: whoever else speaks to the kubelet from this process may have registered the same names.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"v1.{name}")) for name in _MESSAGES}


def _lacking(error: ImportError) -> DeviceError:
    return DeviceError(
        f"asking the kubelet needs gRPC ({error}); install it with: pip install 'polythrottle[kubernetes]'"
    )


class Kubelet:
    """The kubelet of this node; satisfies the port ``Allocations``.

    One that was started again is found again, for it listens at the same path.

    Args:
        socket: Where it listens.
        timeout_s: How long to wait for an answer.

    Raises:
        DeviceError: If gRPC is not installed.
    """

    def __init__(self, socket: Path = KUBELET_SOCKET, timeout_s: float = _LISTING_TIMEOUT_S) -> None:
        try:
            import grpc
        except ImportError as error:
            raise _lacking(error) from error
        self._grpc = grpc
        self._socket = socket
        self._timeout_s = timeout_s
        self._line: Any = None
        message_class("ListPodResourcesRequest")

    def pods(self) -> tuple[PodDevices, ...]:
        """Return every pod that holds something.

        Raises:
            DeviceError: If it does not answer, or not in time.
        """
        request = message_class("ListPodResourcesRequest")()
        try:
            answer = self._list()(request, timeout=self._timeout_s)
        except self._grpc.RpcError as error:
            self.close()  # the next call connects at once, and does not wait until gRPC tries again
            raise DeviceError(
                f"the kubelet at {self._socket} does not tell who holds which devices: {_why(error)}"
            ) from error
        return tuple(found for each in answer.pod_resources if (found := _devices_of(each)) is not None)

    def close(self) -> None:
        """Hang up."""
        if self._line is not None:
            self._line.close()
        self._line = None

    def _list(self) -> Callable[..., Any]:
        if self._line is None:
            # Of its own: one shared within the process would wait until gRPC tries it again, also after `close`.
            own = ("grpc.use_local_subchannel_pool", 1)
            options = (("grpc.max_receive_message_length", _LISTING_BYTES_MOST), own)
            self._line = self._grpc.insecure_channel(f"unix:{self._socket.absolute()}", options=options)
        method: Callable[..., Any] = self._line.unary_unary(
            LIST_METHOD,
            request_serializer=message_class("ListPodResourcesRequest").SerializeToString,
            response_deserializer=message_class("ListPodResourcesResponse").FromString,
        )
        return method


def _devices_of(told: Any) -> PodDevices | None:
    """Return what a pod holds; None if that is nothing."""
    devices: dict[str, tuple[str, ...]] = {}
    claims: list[str] = []
    for container in told.containers:
        for each in container.devices:
            ids = tuple(map(str, each.device_ids))
            devices[each.resource_name] = (*devices.get(each.resource_name, ()), *ids)
        claims += [str(each.claim_name) for each in container.dynamic_resources]
    if not devices and not claims:
        return None
    return PodDevices(PodName(str(told.namespace), str(told.name)), devices, tuple(dict.fromkeys(claims)))


def _why(error: Any) -> str:
    """Return a status of gRPC in words of one line."""
    code = getattr(error, "code", None)
    details = getattr(error, "details", None)
    said = [str(each()) for each in (code, details) if callable(each)]
    return " ".join(": ".join(said).removeprefix("StatusCode.").split())[:200] or type(error).__name__


ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes puts token and certificate of a pod's service account."""
_TIMEOUT_S = 5.0
_ANSWER_BYTES_MOST = 4 * 1024 * 1024
"""An object in etcd has 1.5 MB at most."""
_OVER = ("Succeeded", "Failed")
_LOCAL = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class PodFacts:
    """What is known of a pod.

    Args:
        uid: No other pod ever has it.
        annotations: Its own.
        phase: As Kubernetes calls it.
        address: Of the pod; "" while it has none.
    """

    uid: str
    annotations: Mapping[str, str] = field(default_factory=dict)
    phase: str = "Running"
    address: str = ""

    @property
    def over(self) -> bool:
        """Whether it runs no more, though it may still be listed."""
        return self.phase in _OVER


class PodReader(Protocol):
    """Who tells what a pod is."""

    def pod(self, name: PodName) -> PodFacts | None:
        """Return what is known of a pod; None if there is none of that name.

        Raises:
            DeviceError: If that cannot be told now.
        """


QUESTIONS_MOST = 8
"""About so many pods the API server is asked at a time, each over a connection of its own."""


class PodQuestion:
    """A question about a pod, asked by a thread of its own, which nobody has to wait for.

    Args:
        reader: Is asked; from several threads at a time.
        held: The pod, and what it holds.
        clock: Times are of this one.
        slots: Is held while the reader is asked, so that not too many questions are on their way.

    Attributes:
        asked_s: When the question was put.
        answered_s: When it was answered, or failed.
        facts: The answer: what is known of the pod; None if there is none of that name.
        fault: Why there is no answer; "" if there is one.
    """

    def __init__(self, reader: PodReader, held: PodDevices, clock: Clock, slots: threading.Semaphore) -> None:
        self.held = held
        self.asked_s = self.answered_s = clock.now()
        self.facts: PodFacts | None = None
        # Until there is an answer: whatever ends the thread, the question counts as failed and not as answered.
        self.fault = f"nothing could be asked about pod {held.pod}"
        self._reader = reader
        self._clock = clock
        self._slots = slots
        self._dropped = False
        self._over = threading.Event()
        try:
            threading.Thread(target=self._ask, name="polythrottle-pod", daemon=True).start()
        except RuntimeError as error:  # the container may have no more of them
            self.fault = f"{self.fault}: {error}"
            self._over.set()

    def over(self, wait_s: float = 0.0) -> bool:
        """Return whether it was answered or failed, within so many seconds."""
        return self._over.wait(max(0.0, wait_s))

    def drop(self) -> None:
        """Want no answer any more: what was not asked yet will not be."""
        self._dropped = True

    def _ask(self) -> None:
        try:
            with self._slots:
                if not self._dropped:
                    self.facts = self._reader.pod(self.held.pod)
                    self.fault = ""
        except DeviceError as error:
            self.fault = str(error)
        finally:
            self.answered_s = self._clock.now()
            self._over.set()


class ClusterApi:
    """The API server of the cluster; satisfies the port ``PodReader``.

    Args:
        url: Its address; that which Kubernetes tells every pod if "".
        account: Folder with ``token`` and ``ca.crt``; the token is read anew for each question, for it is renewed.

    Raises:
        InvalidInput: If that is no address, or none was given and this is no pod.
        BadFile: If the certificate is none.
    """

    def __init__(self, url: str = "", account: Path = ACCOUNT) -> None:
        self._url = url or _in_cluster(os.environ)
        try:
            address = urlsplit(self._url)
            port = address.port
        except ValueError:
            raise _no_address(self._url) from None
        if address.scheme not in ("http", "https") or not address.hostname or address.path.strip("/") or address.query:
            raise _no_address(self._url)
        if address.scheme == "http" and address.hostname not in _LOCAL:
            raise InvalidInput(f"{self._url} is not protected by TLS; write https://, or a proxy on this machine")
        self._host = address.hostname
        self._port = port
        self._account = account
        self._trusted: ssl.SSLContext | None = None
        if address.scheme == "https":
            self._trusted = _trust(account / "ca.crt")

    def pod(self, name: PodName) -> PodFacts | None:
        """Return what is known of a pod; None if there is none of that name.

        Raises:
            DeviceError: If the server does not answer, may not tell, or tells something else.
        """
        path = f"/api/v1/namespaces/{quote(name.namespace, safe='')}/pods/{quote(name.name, safe='')}"
        line = self._line()
        try:
            line.request("GET", path, headers=self._headers())
            answer = line.getresponse()
            body = answer.read(_ANSWER_BYTES_MOST + 1)
        # A ValueError is what http.client says of a token that no header can hold.
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise DeviceError(f"the cluster's API at {self._url} does not answer: {error}") from error
        finally:
            line.close()
        if answer.status == http.client.NOT_FOUND:
            return None
        if answer.status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
            raise DeviceError(
                f"the cluster's API does not let this service account get pods ({answer.status}); see the ClusterRole "
                "in packaging/kubernetes"
            )
        if answer.status != http.client.OK or len(body) > _ANSWER_BYTES_MOST:
            raise DeviceError(f"the cluster's API at {self._url} answers {answer.status} for pod {name}")
        return _facts(body, name)

    def _line(self) -> http.client.HTTPConnection:
        if self._trusted is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)
        return http.client.HTTPSConnection(self._host, self._port, timeout=_TIMEOUT_S, context=self._trusted)

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json"}
        # What is not encrypted carries no token: kubectl proxy shows its own.
        if self._trusted is not None:
            # Without a token the server refuses by itself, and its refusal says what to look at.
            with suppress(OSError, UnicodeDecodeError):
                headers["Authorization"] = f"Bearer {(self._account / 'token').read_text(encoding='ascii').strip()}"
        return headers


def _in_cluster(environment: Mapping[str, str]) -> str:
    host = environment.get("KUBERNETES_SERVICE_HOST", "")
    if not host:
        raise InvalidInput(
            "this process is no pod of a cluster: say where its API is, such as api = 'http://127.0.0.1:8001' in "
            "[kubernetes] for kubectl proxy"
        )
    if ":" in host:
        host = f"[{host}]"
    return f"https://{host}:{environment.get('KUBERNETES_SERVICE_PORT_HTTPS', '443')}"


def _no_address(url: str) -> InvalidInput:
    return InvalidInput(f"{url[:80]!r} is no address of a cluster's API; write for example https://10.0.0.1:443")


def _trust(certificate: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(certificate) if certificate.exists() else None)
    except (OSError, ssl.SSLError) as error:
        raise BadFile(f"{certificate} holds no certificate that can be used: {error}") from error


def _facts(body: bytes, name: PodName) -> PodFacts:
    try:
        document: Any = json.loads(body)
        about = document["metadata"]
        status = document.get("status") or {}
        annotations = about.get("annotations") or {}
        return PodFacts(
            uid=_text(about["uid"]),
            annotations={_text(key): _text(value) for key, value in annotations.items()},
            phase=_text(status.get("phase", "")),
            address=_text(status.get("podIP", "")),
        )
    except MALFORMED as error:
        raise DeviceError(f"the cluster's API tells of pod {name} what is no pod: {error!r:.100}") from error


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    value.encode()  # JSON can hold half a surrogate pair, which nothing can be written with
    return value
