"""A kubelet that speaks gRPC on a Unix socket, and a cluster that knows pods: stand-ins for those of Kubernetes.

What a kubelet tells and how is in pkg/apis/podresources/v1/api.proto of kubernetes/kubelet; NVIDIA's own exporter is
tested with such a server (internal/pkg/testutils of NVIDIA/dcgm-exporter).
"""

import threading
from collections.abc import Mapping
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from polythrottle.daemon.pods.kubernetes import LIST_METHOD, PodFacts, PodName, message_class
from polythrottle.domain.errors import DeviceError

GPUS = [f"GPU-{number:08x}-0000-4000-8000-000000000000" for number in range(8)]
CHAT = PodName("models", "chat-0")
SERVED = {"polythrottle.io/profile": "chat"}
Held = Mapping[str, tuple[str, ...]]


class FakeKubelet:
    """A gRPC server on a Unix socket that answers as a kubelet does; `start` and `stop` as often as wanted.

    Args:
        socket: Where it listens.
    """

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.pods: dict[PodName, tuple[Held, tuple[str, ...]]] = {}
        self._server: Any = None

    def start(self) -> None:
        """Listen."""
        self.socket.unlink(missing_ok=True)
        self._server = grpc.server(futures.ThreadPoolExecutor(1))
        handler = grpc.unary_unary_rpc_method_handler(
            lambda request, context: self._answer(),
            request_deserializer=message_class("ListPodResourcesRequest").FromString,
            response_serializer=message_class("ListPodResourcesResponse").SerializeToString,
        )
        service, _, method = LIST_METHOD.strip("/").partition("/")
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        self._server.add_insecure_port(f"unix:{self.socket}")
        self._server.start()

    def stop(self) -> None:
        """End."""
        if self._server is not None:
            self._server.stop(None).wait()
        self._server = None

    def _answer(self) -> Any:
        answer = message_class("ListPodResourcesResponse")()
        for pod, (devices, claims) in self.pods.items():
            line = answer.pod_resources.add(name=pod.name, namespace=pod.namespace)
            container = line.containers.add(name="server")
            for resource, ids in devices.items():
                container.devices.add(resource_name=resource, device_ids=ids)
            for claim in claims:
                container.dynamic_resources.add(claim_name=claim)
            line.containers.add(name="sidecar")
        return answer


@dataclass
class FakeCluster:
    """Pods as the API server knows them."""

    pods: dict[PodName, PodFacts] = field(default_factory=dict)
    down: bool = False
    open: threading.Event = field(default_factory=threading.Event)
    """While it is clear, nobody is answered."""

    def __post_init__(self) -> None:
        self.open.set()

    def pod(self, name: PodName) -> PodFacts | None:
        """Return one."""
        self.open.wait()
        if self.down:
            raise DeviceError("the cluster's API does not answer")
        return self.pods.get(name)
