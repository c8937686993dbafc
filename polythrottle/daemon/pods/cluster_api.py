"""What the cluster's API server says of a pod: its annotations, its address and whether it still runs.

One question is asked, ``GET /api/v1/namespaces/NAMESPACE/pods/NAME``, of the pods alone that hold GPUs of this node:
the right to ``get`` pods is all that is needed.
"""

import http.client
import json
import os
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

from polythrottle.daemon.pods.kubelet import PodName
from polythrottle.domain.errors import BadFile, DeviceError, InvalidInput

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
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DeviceError(f"the cluster's API tells of pod {name} what is no pod: {error!r:.100}") from error


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    return value
