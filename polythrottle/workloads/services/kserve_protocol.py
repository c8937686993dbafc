"""KServe v2 whatever the transport: what a server and a model declare, and checks that an answer holds what it says."""

from __future__ import annotations

import json
import math
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Tuple

from polythrottle.domain.backports import paired
from polythrottle.domain.errors import TrialError, UnknownName
from polythrottle.storage.untrusted import MALFORMED, members_of
from polythrottle.workloads.foreign_calls import refusal_text
from polythrottle.workloads.inputs import DeclaredInput

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from polythrottle.workloads.inputs import PlainArray

Shape = Tuple[int, ...]
Shapes = typing.Mapping[str, Shape]
"""Shapes of tensors by name; declared ones have numbers below one where any size will do."""
Feeds = typing.Mapping[str, "NDArray[Any] | PlainArray"]

# Whether outputs in an answer of KServe v2 have the shapes that the model declares, for the batch that was sent.

UNBATCHED = "unbatched"
"""The option of a URI that lists outputs whose first dimension is not the batch."""


def check_declared_shapes(
    who: str, declared: Shapes, found: Shapes, batch_size: int | None, unbatched: Collection[str] = ()
) -> None:
    """Look whether an answer has every declared output, in its shape.

    Args:
        who: The model, for people.
        declared: Empty where the model declares none; a shape without dimensions says nothing.
        found: What the answer holds.
        batch_size: How many items were sent; None if the model's inputs have no open dimension for them.
        unbatched: Outputs whose first dimension is not the batch where it is open: it counts something of its own, such
            as the objects found in all pictures.

    Raises:
        TrialError: If an output is missing, or is of another size than was declared or sent.
    """
    if missing := sorted(declared.keys() - found.keys()):
        raise TrialError(f"{who} answers without {', '.join(missing)[:100]}, which it declares")
    # For a single item an open dimension may count what was found in it, such as the objects in a picture.
    items = None if batch_size == 1 else batch_size
    for name, shape in declared.items():
        if shape and not _fits(shape, found[name], None if name in unbatched else items):
            told = f"{_written(found[name])} for its output {name}, which it declares as {_written(shape)}"
            if batch_size is None:
                sent = ""
            else:
                sent = f"; the batch that was sent is {batch_size:,}"
            own = f"; if the first dimension counts something else, add {UNBATCHED}={name} to the URI's options"
            raise TrialError(f"{who} answers with {told}{sent}{own if _fits(shape, found[name], None) else ''}")


def check_item_count(
    who: str, declared: Shapes, found: Shapes, batch_size: int | None, vouched: Collection[str] = ()
) -> None:
    """Look whether an answer shows that it is one for every item that was sent.

    Where no output does, a server that answers each batch like a single item would seem to serve it for less.

    Args:
        who: The model, for people.
        declared: As for `check_declared_shapes`.
        found: What the answer holds.
        batch_size: As there.
        vouched: Outputs of which somebody said that they count something else.

    Raises:
        TrialError: If none of the other outputs comes with the batch as its first dimension, and there is one.
    """
    others = sorted(found.keys() - set(vouched))
    if batch_size is None or batch_size == 1 or not others:
        return
    if not any(_carries(declared.get(name, ()), found[name], batch_size) for name in others):
        told = ", ".join(f"{name} {_written(found[name])}" for name in others)[:100]
        raise TrialError(
            f"{who} answers a batch of {batch_size:,} with {told}: nothing there counts {batch_size:,} items, so what "
            f"one takes cannot be told; leave batches above 1 out, or, if it does answer every item, add "
            f"{UNBATCHED}={','.join(sorted({*others, *vouched}))} to the URI's options"
        )


def _carries(declared: Shape, found: Shape, batch_size: int) -> bool:
    """Return whether the first dimension of an output is the batch, or one that is declared open holds it."""
    return found[:1] == (batch_size,) or (declared[:1] < (1,) and declared != () and _fits(declared, found, batch_size))


def _fits(declared: Shape, found: Shape, batch_size: int | None) -> bool:
    shared = min(len(declared), len(found))
    if any(size != 1 for size in (*declared[shared:], *found[shared:])):
        return _divides(declared, found, batch_size)
    # Dimensions of one are left out and added freely: MLServer answers with [8, 1] where [-1] is declared.
    (first, size), *rest = zip_longest(declared, found, fillvalue=1)
    known = {each for each in (first, batch_size) if each is not None and each > 0}
    return (not known or size in known) and all(one < 1 or one == other for one, other in rest)


def _divides(declared: Shape, found: Shape, batch_size: int | None) -> bool:
    """Return whether an output of another rank can hold something for each item: what is declared by hand is rough."""
    elements = math.prod(found)
    return declared[0] > 0 or batch_size is None or (elements > 0 and elements % batch_size == 0)


def _written(shape: Shape) -> str:
    return "x".join("?" if size < 1 else str(size) for size in shape) or "one number"


# What a KServe v2 server says of itself and of a model, and what can be asked of it, however it is spoken to.
#
# Source: Open Inference Protocol (KServe v2), https://github.com/kserve/open-inference-protocol; extensions:
# https://github.com/triton-inference-server/server/tree/main/docs/protocol.

_DTYPES = {"FP16": "float16", "FP32": "float32", "FP64": "float64"}
KNOWN_EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository")
"""The extensions that make a difference here."""


@dataclass(frozen=True)
class Tensors:
    """What a model declares.

    Args:
        inputs: Empty if it declares none.
        outputs: Their shapes; without dimensions where the model does not say.
    """

    inputs: tuple[DeclaredInput, ...]
    outputs: Shapes


@dataclass(frozen=True)
class Inferred:
    """An answer that is what it says it is.

    Args:
        latency_s: How long all of it took.
        outputs: Shapes of its outputs; None if it was long and not looked through again.
    """

    latency_s: float
    outputs: Shapes | None = None


class KserveLine(Protocol):
    """Connections to one KServe v2 server.

    Every method but ``close`` raises ConnectionError if nobody answers, and `TrialError` if the server refuses.
    """

    async def extensions(self) -> frozenset[str]:
        """Return which extensions of the protocol the server lists."""

    async def tensors(self) -> Tensors:
        """Return the inputs and outputs the model declares."""

    async def models(self) -> Mapping[str, str]:
        """Return the state of every model by name: ``READY``, or why it is not."""

    async def config(self) -> dict[str, Any]:
        """Return the model's configuration (extension ``model_configuration``)."""

    async def load(self, config: Mapping[str, Any]) -> None:
        """Load the model anew with a configuration (extension ``model_repository``)."""

    async def infer(self, request: Any) -> Inferred:
        """Send what ``request`` made and return how long the whole answer took, and what it held."""

    def request(self, feeds: Feeds, binary: bool) -> Any:
        """Return a request with these inputs, as bytes where the server takes tensors as bytes.

        It is made once and sent many times, so that making it is neither in the latency nor in the joules.
        """

    async def close(self) -> None:
        """Close the connections."""


@dataclass(frozen=True)
class ServedModel:
    """What a server said of itself and of one model when it was asked first.

    Args:
        extensions: Of the protocol.
        tensors: The model's.
        config: The model's configuration; empty where the server does not tell.
    """

    extensions: frozenset[str]
    tensors: Tensors
    config: Mapping[str, Any]

    @property
    def binary(self) -> bool:
        """Whether tensors may be sent over HTTP as bytes instead of as numbers in JSON."""
        return "binary_tensor_data" in self.extensions

    @property
    def most(self) -> int | None:
        """The largest batch the server takes; None if it does not tell."""
        return int(self.config.get("max_batch_size", 0)) or None

    @property
    def own(self) -> frozenset[str]:
        """The outputs whose dimensions are all the model's own: every one if the server makes no batches.

        That is where the configuration has a ``max_batch_size`` of 0.
        """
        return frozenset(self.tensors.outputs if self.config and self.most is None else ())

    def unbatched(self, named: str, who: str) -> frozenset[str]:
        """Return the outputs that were named as those whose first dimension is not the batch.

        Args:
            named: Names of outputs with commas between; empty for none.
            who: The model, for people.

        Raises:
            UnknownName: If the model declares outputs, but none of that name.
        """
        known = self.tensors.outputs
        names = [name for name in named.split(",") if name]
        if known and (strange := sorted(set(names) - set(known))):
            raise UnknownName(f"output of {who}", strange[0], known)
        return frozenset(names)


def tensors(found: Any) -> Tensors:
    """Return inputs and outputs out of a model's metadata.

    Raises:
        TrialError: If the metadata is not of its form.
    """
    if isinstance(found, Mapping):
        listed = {name: found.get(name) or () for name in ("inputs", "outputs")}
    else:
        listed = {}
    if not listed or not all(isinstance(each, (list, tuple)) for each in listed.values()):
        raise TrialError(f"the server describes the model as {str(found)[:100]}, which is not KServe v2")
    outputs = [each for each in listed["outputs"] if isinstance(each, Mapping) and each.get("name")]
    return Tensors(tuple(map(_declared, listed["inputs"])), {str(each["name"]): _shape(each) for each in outputs})


def _shape(output: Mapping[str, Any]) -> Shape:
    """Return the shape of an output; one without dimensions if there is none to be read."""
    try:
        return tuple(int(size) for size in output["shape"])
    except MALFORMED:
        return ()


def _declared(tensor: Any) -> DeclaredInput:
    try:
        name = str(tensor["name"])
        written = str(tensor["datatype"])
        shape = tuple(int(size) for size in tensor["shape"])
    except MALFORMED:
        raise TrialError(f"the server describes an input as {str(tensor)[:100]}, which is not KServe v2") from None
    return DeclaredInput(name, shape, _DTYPES.get(written, written.lower()), written)


def checked_config(found: Any) -> dict[str, Any]:
    """Return a model's configuration, once what is read of it is of its form.

    Raises:
        TrialError: If it is not.
    """
    try:
        numbers = [found.get("max_batch_size", 0)]
        numbers.append(found.get("dynamic_batching", {}).get("max_queue_delay_microseconds", 0))
        numbers += [group.get("count", 1) for group in found.get("instance_group", ())]
        if min(map(int, numbers)) >= 0 and isinstance(found, dict):
            return found
    except MALFORMED:
        pass
    raise TrialError(f"the server tells a configuration that is not Triton's: {str(found)[:100]}")


def datatype(dtype: str) -> str:
    """Return the protocol's name of a numpy type."""
    return {numpy: written for written, numpy in _DTYPES.items()}.get(dtype, dtype.upper())


# Whether an answer of KServe v2 holds what it says it holds: as many numbers of that type as its shapes have.
#
# Source: Open Inference Protocol (KServe v2), https://github.com/kserve/open-inference-protocol, and Triton's binary
# tensor data extension, https://github.com/triton-inference-server/server/tree/main/docs/protocol.

_INTEGERS = {f"{kind}{8 * width}": width for kind in ("INT", "UINT") for width in (1, 2, 4, 8)}
_WIDTHS = {**_INTEGERS, "BOOL": 1, "FP16": 2, "BF16": 2, "FP32": 4, "FP64": 8}
_TEXT = "BYTES"
_JSON_TYPES: Mapping[str, set[type]] = {_TEXT: {str}, "BOOL": {int, float, bool}}
"""Of the elements of an output in JSON, where they are not plain numbers."""
_FIELDS = {
    **{name: "uint_contents" if name.startswith("U") else "int_contents" for name in _INTEGERS},
    **{"INT64": "int64_contents", "UINT64": "uint64_contents", "BOOL": "bool_contents", _TEXT: "bytes_contents"},
    **{"FP32": "fp32_contents", "FP64": "fp64_contents"},
}
"""Where an answer over gRPC holds the numbers of each type, unless it holds them as bytes."""


@dataclass(frozen=True)
class _Output:
    """One output as an answer describes it."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, head: Any) -> _Output:
        """Return the output a head describes.

        Raises:
            TrialError: If the head is not of its form.
        """
        found = members_of(head)
        name = found.get("name")
        datatype = found.get("datatype")
        shape = found.get("shape")
        sized = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
        if not isinstance(name, str) or datatype not in (*_WIDTHS, _TEXT) or not sized:
            told = {key: value for key, value in found.items() if key != "data"} or head
            raise TrialError(f"describes an output as {str(told)[:100]}, which is not KServe v2")
        return cls(name, str(datatype), tuple(shape or ()))

    @property
    def elements(self) -> int:
        """How many there must be."""
        return math.prod(self.shape)

    def see(self, count: int, what: str = "elements", width: int = 1) -> None:
        """Raise TrialError unless so many elements, or bytes of a width each, are what there must be."""
        if count != self.elements * width:
            shape = "x".join(map(str, self.shape)) or "one number"
            said_so = f"which it calls {self.datatype} {shape}"
            raise TrialError(f"answers with {count:,} {what} for its output {self.name}, {said_so}")

    def see_bytes(self, size: int) -> None:
        """Raise TrialError unless a tensor of so many bytes is what there must be; texts are of any length."""
        if self.datatype != _TEXT:
            self.see(size, "bytes", _WIDTHS[self.datatype])

    def see_data(self, data: Any) -> None:
        """Raise TrialError unless this, out of JSON, is what there must be."""
        if not isinstance(data, list):
            raise TrialError(f"answers without data for its output {self.name}")
        while any(isinstance(each, list) for each in data):
            data = list(chain.from_iterable(each if isinstance(each, list) else [each] for each in data))
        self.see(len(data))
        allowed = _JSON_TYPES.get(self.datatype, {int, float})
        if strange := sorted(each.__name__ for each in set(map(type, data)) - allowed):
            # Some servers write null where a number is not one.
            if strange == ["NoneType"]:
                what = "null, perhaps in place of NaN,"
            else:
                what = strange[0]
            raise TrialError(f"answers with {what} in its output {self.name}, which it calls {self.datatype}")


def check_json_answer(who: str, text: bytes, behind: int) -> Shapes:
    """Look an answer over HTTP through; return the shapes of its outputs.

    Args:
        who: The model, for people.
        text: The JSON.
        behind: How many bytes of tensors came behind it.

    Raises:
        TrialError: If it is an error or does not hold what it says.
    """
    with _by(who):
        outputs = _listed(_parsed(text))
        heads = [_Output.of(each) for each in outputs]
        sizes = [_seen(head, each) for head, each in paired(heads, outputs)]
        if sum(sizes) != behind:
            raise TrialError(f"answers with {behind:,} bytes behind the JSON instead of {sum(sizes):,}: it is cut off")
    return {head.name: head.shape for head in heads}


@contextmanager
def _by(who: str) -> Iterator[None]:
    try:
        yield
    except TrialError as err:
        raise TrialError(f"{who} {err}") from err


def _listed(found: Any) -> list[Any]:
    if isinstance(found, dict) and found.get("error"):
        raise TrialError(f"answers with an error: {refusal_text(json.dumps(found).encode())}")
    outputs = None
    if isinstance(found, dict):
        outputs = found.get("outputs")
    if not isinstance(outputs, list) or not outputs:
        raise TrialError("answers with no outputs")
    return outputs


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise TrialError(f"answers with something that is cut off or no JSON: {refusal_text(text)}") from None


def _no_number(word: str) -> NoReturn:
    raise TrialError(f"answers with {word}, which is no JSON; ask it over kserve+grpc")


def _seen(output: _Output, each: Mapping[str, Any]) -> int:
    """Look one output through; return how many bytes of it are behind the JSON."""
    parameters = each.get("parameters")
    size = None
    if isinstance(parameters, dict):
        size = parameters.get("binary_data_size")
    if size is None:
        output.see_data(each.get("data"))
        return 0
    if type(size) is not int or size < 0:
        raise TrialError(f"says that its output {output.name} has {str(size)[:100]} bytes")
    output.see_bytes(size)
    return size


def check_grpc_answer(who: str, outputs: Sequence[Any], raw: Sequence[bytes]) -> Shapes:
    """Look an answer over gRPC through; return the shapes of its outputs.

    Args:
        who: The model, for people.
        outputs: Of the message ``ModelInferResponse``.
        raw: Its ``raw_output_contents``; if it has any, all its tensors are there.

    Raises:
        TrialError: If it does not hold what it says.
    """
    with _by(who):
        if not outputs:
            raise TrialError("answers with no outputs")
        if raw and len(raw) != len(outputs):
            raise TrialError(f"answers with {len(raw)} tensors for {len(outputs)} outputs")
        heads = [_Output.of({"name": o.name, "datatype": o.datatype, "shape": list(o.shape)}) for o in outputs]
        for place, head in enumerate(heads):
            if raw:
                head.see_bytes(len(raw[place]))
            else:  # half precision has no field of its own, so it cannot be here
                head.see(len(getattr(outputs[place].contents, _FIELDS.get(head.datatype, "bytes_contents"))))
    return {head.name: head.shape for head in heads}
