"""KServe v2 over HTTP: tensors as JSON, or as bytes behind it where the server lists that extension.

Source of the layout: Triton's binary tensor data extension,
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from polythrottle.errors import TrialError
from polythrottle.workloads.address import Address
from polythrottle.workloads.declared import Declared
from polythrottle.workloads.kserve_line import Feeds, datatype, declared
from polythrottle.workloads.refusal import said
from polythrottle.workloads.web import Answer, Web

_HEADER_LENGTH = "Inference-Header-Content-Length"
_OK = 200


@dataclass
class Body:
    """A request that is ready to be sent, again and again.

    Args:
        content: Its bytes.
        headers: Its own.
        known: Whether an answer to it was looked through to the last number; later ones are only seen to be whole.
    """

    content: bytes
    headers: Mapping[str, str]
    known: bool = False


class HttpLine:
    """Connections to a server over HTTP.

    Args:
        address: The server and its model.
    """

    def __init__(self, address: Address) -> None:
        self._web = Web(address.where, f"http://{address.where}/v2", {"Content-Type": "application/json"})
        self._where, self._model = address.where, address.model
        version = address.options.get("version")
        self._path = f"/models/{quote(address.model, safe='')}" + (f"/versions/{quote(version)}" if version else "")

    async def extensions(self) -> frozenset[str]:
        """Return which extensions of the protocol the server lists."""
        answer = await self._web.fetch("GET", "")
        found = answer.document
        if answer.status != _OK or not isinstance(found, dict) or "extensions" not in found:
            raise TrialError(f"{self._where} answers, but not as a KServe v2 server")
        return frozenset(map(str, found["extensions"]))

    async def inputs(self) -> tuple[Declared, ...]:
        """Return the inputs the model declares."""
        found = await self._found("GET", self._path)
        listed = found.get("inputs", []) if isinstance(found, dict) else None
        if not isinstance(listed, list):
            raise TrialError(f"{self._where} describes the model in a way that is not KServe v2's")
        return tuple(declared(each) for each in listed)

    async def models(self) -> Mapping[str, str]:
        """Return the state of every model."""
        found = await self._found("POST", "/repository/index", {})
        return {str(each["name"]): str(each.get("reason") or each.get("state", "")) for each in found}

    async def config(self) -> dict[str, Any]:
        """Return the model's configuration."""
        found: dict[str, Any] = await self._found("GET", f"{self._path}/config")
        return found

    async def load(self, config: Mapping[str, Any]) -> None:
        """Load the model anew with a configuration."""
        path = f"/repository/models/{quote(self._model, safe='')}/load"
        await self._checked("POST", path, {"parameters": {"config": json.dumps(config)}})

    async def _found(self, method: str, path: str, document: Any = None) -> Any:
        answer = await self._checked(method, path, document)
        if answer.document is None:
            raise TrialError(f"{self._where} answers, but not as a KServe v2 server")
        return answer.document

    async def _checked(self, method: str, path: str, document: Any) -> Answer:
        body = None if document is None else json.dumps(document).encode()
        answer = await self._web.fetch(method, path, body)
        if answer.status != _OK:
            raise TrialError(f"{self._where} refuses ({answer.status}): {said(answer.body)}")
        return answer

    def request(self, feeds: Feeds, binary: bool) -> Body:
        """Return a request with these inputs."""
        inputs = [_head(name, array) for name, array in feeds.items()]
        if not binary:
            for head, array in zip(inputs, feeds.values(), strict=True):
                head["data"] = array.ravel().tolist()
            return Body(json.dumps({"inputs": inputs}).encode(), {})
        tensors = [array.tobytes() for array in feeds.values()]
        for head, tensor in zip(inputs, tensors, strict=True):
            head["parameters"] = {"binary_data_size": len(tensor)}
        text = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
        headers = {_HEADER_LENGTH: str(len(text)), "Content-Type": "application/octet-stream"}
        return Body(b"".join([text, *tensors]), headers)

    async def infer(self, request: Body) -> float:
        """Send a request and return how long the whole answer took; it is looked at afterwards."""
        start_s = time.perf_counter()
        answer = await self._web.fetch("POST", f"{self._path}/infer", request.content, request.headers)
        elapsed_s = time.perf_counter() - start_s
        if answer.status != _OK:
            raise TrialError(f"{self._model} answers with an error ({answer.status}): {said(answer.body)}")
        if not _whole(answer, look=not request.known):
            raise TrialError(f"the answer of {self._where} is cut off or holds no outputs")
        request.known = True
        return elapsed_s

    async def close(self) -> None:
        """Close the connections."""
        await self._web.close()


def _head(name: str, array: Any) -> dict[str, Any]:
    return {"name": name, "shape": list(array.shape), "datatype": datatype(str(array.dtype))}


def _whole(answer: Answer, look: bool) -> bool:
    """Return whether an answer is all there; without ``look`` JSON is only seen to end as it should."""
    text, tensors_bytes = answer.body, 0
    if _HEADER_LENGTH in answer.headers:
        length = int(answer.headers[_HEADER_LENGTH])
        text, tensors_bytes = answer.body[:length], len(answer.body) - length
    elif not look:
        return text.rstrip().endswith(b"}")
    try:
        outputs = json.loads(text)["outputs"]
        stated = sum(each.get("parameters", {}).get("binary_data_size", 0) for each in outputs)
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
    return bool(outputs) and stated == tensors_bytes
