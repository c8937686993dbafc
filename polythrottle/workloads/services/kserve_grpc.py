"""KServe v2 over gRPC, through Triton's client, which speaks to every server of the protocol."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from polythrottle.domain.backports import removeprefix
from polythrottle.domain.errors import TrialError
from polythrottle.workloads.services.kserve_protocol import (
    Feeds,
    Inferred,
    Tensors,
    check_grpc_answer,
    checked_config,
    datatype,
    tensors,
)
from polythrottle.workloads.uris import Address

_LONGEST = 300


class GrpcLine:
    """Connections to a server over gRPC.

    Args:
        address: The server and its model.
    """

    def __init__(self, address: Address) -> None:
        self._client = InferenceServerClient(address.where)
        self._where = address.where
        self._model = address.model
        self._version = address.options.get("version", "")

    async def extensions(self) -> frozenset[str]:
        """Return which extensions of the protocol the server lists."""
        with self._troubles("refuses"):
            found = await self._client.get_server_metadata(as_json=True)
        return frozenset(found.get("extensions", ()))

    async def tensors(self) -> Tensors:
        """Return the inputs and outputs the model declares."""
        with self._troubles("refuses"):
            found = await self._client.get_model_metadata(self._model, self._version, as_json=True)
        # A shape without dimensions is left out on the way.
        return tensors({**found, "inputs": [{"shape": (), **each} for each in found.get("inputs", ())]})

    async def models(self) -> Mapping[str, str]:
        """Return the state of every model."""
        with self._troubles("refuses"):
            found = await self._client.get_model_repository_index(as_json=True)
        return {each["name"]: each.get("reason") or each.get("state", "") for each in found.get("models", ())}

    async def config(self) -> dict[str, Any]:
        """Return the model's configuration."""
        with self._troubles("refuses"):
            found = await self._client.get_model_config(self._model, self._version, as_json=True)
        return checked_config(found.get("config"))

    async def load(self, config: Mapping[str, Any]) -> None:
        """Load the model anew with a configuration."""
        with self._troubles("refuses"):
            await self._client.load_model(self._model, config=json.dumps(config))

    def request(self, feeds: Feeds, binary: bool) -> list[InferInput]:
        """Return a request with these inputs; gRPC always carries them as bytes."""
        del binary
        return [_input(name, array) for name, array in feeds.items()]

    async def infer(self, request: list[InferInput]) -> Inferred:
        """Send a request and return how long the whole answer took."""
        with self._troubles("answers with an error"):
            start_s = time.perf_counter()
            answer = await self._client.infer(self._model, request, self._version)
            elapsed_s = time.perf_counter() - start_s
        message = answer.get_response()
        return Inferred(elapsed_s, check_grpc_answer(self._model, message.outputs, message.raw_output_contents))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    @contextmanager
    def _troubles(self, does: str) -> Iterator[None]:
        try:
            yield
        except InferenceServerException as err:
            text = " ".join(str(err.message()).split())[:_LONGEST]
            status = removeprefix(str(err.status() or ""), "StatusCode.")
            if status == "UNAVAILABLE" and ("connect" in text or "Socket closed" in text):
                reason = text.rpartition(": ")[2].lower()
                raise ConnectionRefusedError(f"nothing answers at {self._where} ({reason})") from err
            if does.startswith("answers"):
                who = self._model
            else:
                who = self._where
            raise TrialError(f"{who} {does} ({status or 'unknown'}): {text}") from err


def _input(name: str, array: Any) -> InferInput:
    made = InferInput(name, list(array.shape), datatype(str(array.dtype)))
    made.set_data_from_numpy(array)
    return made
