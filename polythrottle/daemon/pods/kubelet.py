"""Which pod holds which devices, as the kubelet tells over its Unix socket (the PodResources API, v1, of gRPC).

Of the API's messages only those fields are named here that are read; protobuf skips the others. They are those of
pkg/apis/podresources/v1/api.proto in kubernetes/kubelet, which Kubernetes documents under "Monitoring device plugin
resources". https://kubernetes.io/docs/concepts/extend-kubernetes/compute-storage-net/device-plugins/
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from polythrottle.domain.errors import DeviceError

KUBELET_SOCKET = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
LIST_METHOD = "/v1.PodResourcesLister/List"
_TIMEOUT_S = 5.0
_ANSWER_BYTES_MOST = 16 * 1024 * 1024
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
        for field, number, kind, repeats in fields:
            added = message.field.add(name=field, number=number)
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

    def __init__(self, socket: Path = KUBELET_SOCKET, timeout_s: float = _TIMEOUT_S) -> None:
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
            options = (("grpc.max_receive_message_length", _ANSWER_BYTES_MOST), own)
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
