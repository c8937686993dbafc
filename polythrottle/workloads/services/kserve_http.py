"""KServe v2 over HTTP: tensors as JSON, or as bytes behind it where the server lists that extension.

Source of the layout: Triton's binary tensor data extension,
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from polythrottle.domain.backports import paired
from polythrottle.domain.errors import TrialError
from polythrottle.workloads.foreign_calls import refusal_text
from polythrottle.workloads.inputs import available_bytes
from polythrottle.workloads.services.http import Answer, Web
from polythrottle.workloads.services.kserve_protocol import (
    Feeds,
    Inferred,
    Tensors,
    check_json_answer,
    checked_config,
    datatype,
    tensors,
)
from polythrottle.workloads.uris import Address

_HEADER_LENGTH = "Inference-Header-Content-Length"
_OK = 200
_SHORT_BYTES = 1 << 14
_ALIKE = 0.1
_MOST_BYTES = 1 << 31
_SHARE_OF_MEMORY = 4


@dataclass
class Body:
    """A request that is ready to be sent, again and again.

    Args:
        content: Its bytes.
        headers: Its own.
        known_bytes: How long the JSON was of an answer that was looked through to the last number; 0 before there is
            one.
    """

    content: bytes
    headers: Mapping[str, str]
    known_bytes: int = 0

    def alike(self, text: bytes) -> bool:
        """Return whether an answer is long, and so like the one before that it need not be looked through.

        Parsing long ones costs processor time and joules of the machine that is measured.
        """
        near = abs(len(text) - self.known_bytes) < _ALIKE * self.known_bytes
        return len(text) > _SHORT_BYTES and near and text[-9:].rstrip().endswith(b"}")


class HttpLine:
    """Connections to a server over HTTP.

    Args:
        address: The server and its model.
    """

    def __init__(self, address: Address) -> None:
        self._web = Web(address.where, f"http://{address.where}/v2", {"Content-Type": "application/json"})
        self._where = address.where
        self._model = address.model
        self._most_bytes = min(_MOST_BYTES, available_bytes() // _SHARE_OF_MEMORY)
        version = address.options.get("version")
        # Slashes quoted too: a model's name may hold them, and is one part of the path.
        self._path = f"/models/{quote(address.model, safe='')}" + (f"/versions/{quote(version)}" if version else "")

    async def extensions(self) -> frozenset[str]:
        """Return which extensions of the protocol the server lists."""
        answer = await self._web.fetch("GET", "")
        found = answer.document
        if answer.status != _OK or not isinstance(found, dict) or "extensions" not in found:
            raise TrialError(f"{self._where} answers, but not as a KServe v2 server")
        return frozenset(map(str, found["extensions"] if isinstance(found["extensions"], list) else ()))

    async def tensors(self) -> Tensors:
        """Return the inputs and outputs the model declares."""
        found = await self._found("GET", self._path)
        if found is None:
            raise TrialError(f"{self._where} describes {self._model} in something that is no JSON")
        return tensors(found)

    async def models(self) -> Mapping[str, str]:
        """Return the state of every model."""
        found = await self._found("POST", "/repository/index", {})
        return {str(each["name"]): str(each.get("reason") or each.get("state", "")) for each in found}

    async def config(self) -> dict[str, Any]:
        """Return the model's configuration."""
        return checked_config(await self._found("GET", f"{self._path}/config"))

    async def load(self, config: Mapping[str, Any]) -> None:
        """Load the model anew with a configuration."""
        path = f"/repository/models/{quote(self._model, safe='')}/load"
        await self._found("POST", path, {"parameters": {"config": json.dumps(config)}})

    async def _found(self, method: str, path: str, document: Any = None) -> Any:
        """Return the JSON in an answer; None if there is none."""
        if document is None:
            body = None
        else:
            body = json.dumps(document).encode()
        answer = await self._web.fetch(method, path, body)
        if answer.status != _OK:
            raise TrialError(f"{self._where} refuses ({answer.status}): {refusal_text(answer.body)}")
        return answer.document

    def request(self, feeds: Feeds, binary: bool) -> Body:
        """Return a request with these inputs."""
        inputs = [_head(name, array) for name, array in feeds.items()]
        if not binary:
            for head, array in paired(inputs, feeds.values()):
                head["data"] = array.ravel().tolist()
            return Body(json.dumps({"inputs": inputs}).encode(), {})
        tensors = [array.tobytes() for array in feeds.values()]
        for head, tensor in paired(inputs, tensors):
            head["parameters"] = {"binary_data_size": len(tensor)}
        text = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
        headers = {_HEADER_LENGTH: str(len(text)), "Content-Type": "application/octet-stream"}
        return Body(b"".join([text, *tensors]), headers)

    async def infer(self, request: Body) -> Inferred:
        """Send a request and return how long the whole answer took; it is looked at afterwards."""
        start_s = time.perf_counter()
        answer = await self._web.fetch(
            "POST", f"{self._path}/infer", request.content, request.headers, most_bytes=self._most_bytes
        )
        elapsed_s = time.perf_counter() - start_s
        if answer.status != _OK:
            raise TrialError(f"{self._model} answers with an error ({answer.status}): {refusal_text(answer.body)}")
        text, behind = _parted(self._model, answer)
        if not behind and request.alike(text):
            return Inferred(elapsed_s)
        outputs = check_json_answer(self._model, text, behind)
        request.known_bytes = len(text)
        return Inferred(elapsed_s, outputs)

    async def close(self) -> None:
        """Close the connections."""
        await self._web.close()


def _head(name: str, array: Any) -> dict[str, Any]:
    return {"name": name, "shape": list(array.shape), "datatype": datatype(str(array.dtype))}


def _parted(who: str, answer: Answer) -> tuple[bytes, int]:
    """Return the JSON of an answer and how many bytes come behind it."""
    if _HEADER_LENGTH.lower() not in answer.headers:
        return answer.body, 0
    written = answer.headers[_HEADER_LENGTH.lower()]
    size = len(answer.body)
    if not written.isdecimal() or len(written) > 12 or int(written) > size:
        raise TrialError(f"{who} answers with {size:,} bytes, of which {written[:20]} are JSON: it is cut off")
    return answer.body[: int(written)], size - int(written)
