"""A model behind KServe v2 as a workload, over HTTP or gRPC, with the knobs of servers that load models on request."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from polythrottle.domain.backports import paired
from polythrottle.domain.errors import DeviceError, InvalidInput, KnobRejected, TrialError, UnknownName
from polythrottle.domain.measurement import Query
from polythrottle.domain.space import BATCH_SIZE, CONCURRENCY, Knob, OperatingPoint
from polythrottle.workloads.foreign_calls import refusal_text
from polythrottle.workloads.inputs import (
    FedInput,
    Input,
    available_bytes,
    batch_knobs,
    chosen,
    count,
    fed,
    parse_inputs,
    sent_inputs,
)
from polythrottle.workloads.services.http_client import Answer, Web
from polythrottle.workloads.services.kserve_protocol import (
    KNOWN_EXTENSIONS,
    UNBATCHED,
    Feeds,
    Inferred,
    KserveLine,
    ServedModel,
    Tensors,
    check_declared_shapes,
    check_item_count,
    check_json_answer,
    checked_config,
    datatype,
    tensors,
)
from polythrottle.workloads.services.service import Service
from polythrottle.workloads.uris import Address

# Over HTTP: tensors as JSON, or as bytes behind it where the server lists that extension. Over gRPC: `kserve_grpc`.
#
# Source of the layout: Triton's binary tensor data extension,
# https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md.

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


# What of a model's configuration can be tuned on a server that loads models on request, such as Triton.
#
# Source: Triton's model repository extension, load with the parameter ``config``, https://github.com/triton-
# inference-server/server/blob/main/docs/protocol/extension_model_repository.md, and model configuration,
# ``dynamic_batching.max_queue_delay_microseconds`` and ``instance_group.count``.

QUEUE_DELAY = "queue_delay_s"
INSTANCES = "instances"
OPTIONS = {QUEUE_DELAY: "queue_delay_us", INSTANCES: INSTANCES}
"""The option of a URI that lists the levels of each knob."""
_MICRO = 1_000_000


@dataclass(frozen=True)
class Levers:
    """A model's configuration as it was found, and the levels to be tried.

    Args:
        found: The configuration; whatever is not a lever stays as it is there.
        knobs: With the level that was found among theirs.
    """

    found: Mapping[str, Any]
    knobs: tuple[Knob, ...]

    @classmethod
    def of(cls, address: Address, config: Mapping[str, Any]) -> Levers:
        """Return the levers an address asks for.

        Raises:
            InvalidInput: If the levels are no numbers, or the configuration has no place for them.
        """
        delays_us = address.counts(OPTIONS[QUEUE_DELAY], least=0)
        instances = address.counts(OPTIONS[INSTANCES], least=1)
        knobs = []
        if delays_us is not None:
            if not int(config.get("max_batch_size", 0)):
                raise InvalidInput(
                    f"{address.uri}: the model has no batches on the server, so queries cannot wait there"
                )
            knobs.append(_knob(QUEUE_DELAY, {delay_us / _MICRO for delay_us in delays_us}, queue_delay_s(config)))
        if instances is not None:
            if len(config.get("instance_group", ())) != 1:
                raise InvalidInput(
                    f"{address.uri}: the model has several groups of instances, or none; set them by hand"
                )
            knobs.append(_knob(INSTANCES, set(instances), instance_count(config)))
        return cls(config, tuple(knobs))

    @property
    def default(self) -> OperatingPoint:
        """The levels that were found."""
        return self.held(self.found)

    def held(self, config: Mapping[str, Any]) -> OperatingPoint:
        """Return the levels of the levers in a configuration."""
        levels = {QUEUE_DELAY: queue_delay_s(config), INSTANCES: instance_count(config)}
        return OperatingPoint({knob.name: levels[knob.name] for knob in self.knobs})

    def pulled(self, point: OperatingPoint) -> Mapping[str, Any]:
        """Return the configuration with the levels of a point."""
        config = dict(self.found)
        if point == self.default:
            return config
        if QUEUE_DELAY in point:
            delay_us = round(float(point[QUEUE_DELAY]) * _MICRO)
            config["dynamic_batching"] = {
                **config.get("dynamic_batching", {}),
                "max_queue_delay_microseconds": delay_us,
            }
        if INSTANCES in point:
            config["instance_group"] = [{**config["instance_group"][0], "count": int(point[INSTANCES])}]
        return config


def _knob(name: str, levels: set[float] | set[int], found: float) -> Knob:
    return Knob(name, tuple(sorted({*levels, found})))


def queue_delay_s(config: Mapping[str, Any]) -> float:
    """Return how long the server lets a query wait for others to share its batch, in seconds."""
    return int(config.get("dynamic_batching", {}).get("max_queue_delay_microseconds", 0)) / _MICRO


def instance_count(config: Mapping[str, Any]) -> int:
    """Return how many copies of the model the server runs."""
    return sum(int(group.get("count", 1)) for group in config.get("instance_group", ()))


# A model behind KServe v2 (Triton, MLServer, OpenVINO Model Server, …) as a workload, over HTTP or gRPC.

_READY = "READY"
_OPTIONS = (CONCURRENCY, "version", UNBATCHED, *OPTIONS.values())


class KserveWorkload(Service[KserveLine]):
    """One inference request per query, with inputs made up from the model's metadata.

    Where the URI lists levels for ``queue_delay_us`` or ``instances``, those are knobs too: setting one loads the
    model anew with that configuration, and closing the workload loads it as it was found. Otherwise nothing on the
    server is ever written.

    An open first dimension of an output is taken for the batch, unless the URI lists the output as ``unbatched`` or the
    model's configuration has a ``max_batch_size`` of 0: then it may count anything, such as the objects found. One
    output at least must come with the batch, though, or all be listed: else nothing shows that every item is answered.

    Args:
        uri: ``kserve://host:port/model`` for HTTP, ``kserve+grpc://host:port/model``.
        inputs: Shapes of one item's inputs, for dimensions the model leaves open.
        batch_sizes: Levels of ``batch_size``; powers of two up to what the server takes by default.
        threads: Must be None.
        timeout_s: When an answer is given up, in seconds.

    Raises:
        InvalidInput: If shapes are missing or do not fit, or an option is malformed.
        UnknownName: If the server has no such model; names those it has.
        DeviceError: If the server cannot be reached, does not speak KServe v2, or the client is not installed.
    """

    def __init__(
        self,
        uri: str,
        *,
        inputs: Sequence[str] = (),
        batch_sizes: Sequence[int] | None = None,
        threads: Sequence[int] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(Address.parse(uri, _OPTIONS), threads, timeout_s)
        given = parse_inputs(inputs)
        with self._opening():
            self._described = self._wait_for(self._in_time(self._describe()))
            self._fed = self._inputs(given)
            self._unbatched = self._described.unbatched(self._address.options.get(UNBATCHED, ""), self._address.model)
            self._levers = self._tried_levers()
            batch = batch_knobs(uri, self._fed, self._batches(batch_sizes))
            self._open([*batch, *self._levers.knobs], self._levers.default)
            self._loaded = self._levers.default
            self.apply(self.space.default)

    def _line(self) -> KserveLine:
        if self._address.scheme == "kserve":
            return HttpLine(self._address)
        try:
            from polythrottle.workloads.services.kserve_grpc import GrpcLine

            return GrpcLine(self._address)
        except (ImportError, RuntimeError) as err:
            lack: BaseException | None = err
            if not isinstance(err, ImportError):  # tritonclient's own, where there is no grpcio
                lack = err.__cause__
            name = getattr(lack, "name", None) or "tritonclient"
            raise DeviceError(f"{self.uri} needs {name}; pip install 'polythrottle[triton]'") from lack

    async def _describe(self) -> ServedModel:
        line = self._lent()
        extensions = await line.extensions()
        try:
            tensors = await line.tensors()
        except TrialError as err:
            await self._explain_missing(line, err)
            raise
        if KNOWN_EXTENSIONS[1] in extensions:
            config = await line.config()
        else:
            config = {}
        return ServedModel(extensions, tensors, config)

    async def _explain_missing(self, line: KserveLine, refusal: TrialError) -> None:
        """Say which models there are, if the server tells, or why this one is not ready."""
        known: dict[str, str] = {}
        with suppress(TrialError, ConnectionError, KeyError, TypeError, AttributeError):
            known = dict(await line.models())
        if known and self._address.model not in known:
            raise UnknownName(f"model at {self._address.where}", self._address.model, known) from refusal
        state = known.get(self._address.model, _READY)
        if state != _READY:
            why = state or "the server does not say why"
            raise DeviceError(f"{self._address.model} is not ready: {why}") from refusal

    def _inputs(self, given: Sequence[Input]) -> tuple[FedInput, ...]:
        """Return how the inputs are fed; those that were given where the model declares none."""
        if self._described.tensors.inputs:
            return fed(self.uri, self._described.tensors.inputs, given)
        if not given or given[0].name is None:
            raise InvalidInput(
                f"{self.uri}: the server does not say what the inputs are; "
                "give name, shape and type of each, such as --input x=3x224x224:float32"
            )
        return tuple(FedInput(str(each.name), (None, *each.shape), each.dtype or "float32") for each in given)

    def _batches(self, levels: Sequence[int] | None) -> Sequence[int] | None:
        most = self._described.most
        if most is None or (levels is not None and max(levels, default=0) <= most):
            return levels
        if levels is not None:
            raise InvalidInput(f"{self.uri} takes batches up to {most}, not {max(levels)}")
        return sorted({2**power for power in range(most.bit_length())} | {most})

    def _tried_levers(self) -> Levers:
        """Return the levers the URI asks for, having seen that the server loads the model when told how.

        Raises:
            DeviceError: If it does not.
        """
        if not set(OPTIONS.values()) & set(self._address.options):
            return Levers({}, ())
        missing = sorted(set(KNOWN_EXTENSIONS[1:]) - self._described.extensions)
        if missing:
            raise DeviceError(
                f"{self._address.where} lacks the extension {missing[0]}; leave queue_delay_us and instances out"
            )
        levers = Levers.of(self._address, self._described.config)
        try:
            self._wait_for(self._in_time(self._load_again(levers)))
        except TrialError as err:
            raise DeviceError(
                f"{err}; queue_delay_us and instances need a server that loads models on request "
                "(Triton: --model-control-mode=explicit)"
            ) from err
        return levers

    async def _load_again(self, levers: Levers) -> None:
        await self._lent().load(levers.found)

    def apply(self, point: OperatingPoint) -> None:
        """Make a request of the batch size; load the model anew if a knob of the server's changes.

        Raises:
            KnobRejected: If the point is not in the space, or the server does not keep it.
        """
        wanted = chosen(self.space, point)
        levels = wanted.only(self._levers.default)
        if levels != self._loaded:
            self._wait_for(self._in_time(self._pull(levels)))
        self._batch_size = count(wanted, BATCH_SIZE)
        self._feeds = sent_inputs(self._fed, self._batch_size)
        self._request: Any = None
        super().apply(wanted)

    async def _pull(self, levels: OperatingPoint) -> None:
        line = self._lent()
        # Whatever happens from here on, what runs there is not known until it has been read back.
        self._loaded = OperatingPoint({})
        try:
            await line.load(self._levers.pulled(levels))
            held = self._levers.held(await line.config())
        except (TrialError, ConnectionError) as err:
            raise KnobRejected(f"{self._address.model} does not load with {dict(levels)}: {err}") from err
        if held != levels:
            raise KnobRejected(
                f"{self._address.where} runs {self._address.model} with {dict(held)}, not {dict(levels)}"
            )
        self._loaded = held

    async def _ask(self, line: KserveLine) -> Query:
        if self._request is None:
            self._request = line.request(self._feeds, self._described.binary)
        found = await line.infer(self._request)
        if found.outputs is not None:
            batched = any(None in each.shape for each in self._fed)
            sent = self._batch_size if batched else None
            who = self._address.model
            declared = self._described.tensors.outputs
            check_declared_shapes(who, declared, found.outputs, sent, self._unbatched | self._described.own)
            check_item_count(who, declared, found.outputs, sent, self._unbatched)
        return Query(found.latency_s, self._batch_size)

    def close(self) -> None:
        """Close the connections, the model loaded as it was found.

        Raises:
            DeviceError: If the server does not load it so any more.
        """
        try:
            if self._loaded != self._levers.default:
                self._wait_for(self._in_time(self._pull(self._levers.default)))
        except TrialError as err:
            raise DeviceError(f"{err}; load the model as it was by hand") from err
        finally:
            super().close()
