"""Whether an answer of KServe v2 holds what it says it holds: as many numbers of that type as its shapes have.

Source: Open Inference Protocol (KServe v2), https://github.com/kserve/open-inference-protocol, and Triton's binary
tensor data extension, https://github.com/triton-inference-server/server/tree/main/docs/protocol.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

from polythrottle.errors import TrialError
from polythrottle.workloads.kserve_shapes import Shapes
from polythrottle.workloads.refusal import said

_INTEGERS = {f"{kind}{8 * width}": width for kind in ("INT", "UINT") for width in (1, 2, 4, 8)}
_WIDTHS = {**_INTEGERS, "BOOL": 1, "FP16": 2, "BF16": 2, "FP32": 4, "FP64": 8}
_TEXT = "BYTES"
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
    def of(cls, head: Any) -> "_Output":
        """Return the output a head describes.

        Raises:
            TrialError: If the head is not of its form.
        """
        found = head if isinstance(head, dict) else {}
        name, datatype, shape = found.get("name"), found.get("datatype"), found.get("shape")
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
        known = {str} if self.datatype == _TEXT else {int, float, bool} if self.datatype == "BOOL" else {int, float}
        if strange := sorted(each.__name__ for each in set(map(type, data)) - known):
            # Some servers write null where a number is not one.
            what = "null, perhaps for numbers that are none (NaN)," if strange == ["NoneType"] else strange[0]
            raise TrialError(f"answers with {what} in its output {self.name}, which it calls {self.datatype}")


def see_json(who: str, text: bytes, behind: int) -> Shapes:
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
        sizes = [_seen(head, each) for head, each in zip(heads, outputs, strict=True)]
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
        raise TrialError(f"answers with an error: {said(json.dumps(found).encode())}")
    outputs = found.get("outputs") if isinstance(found, dict) else None
    if not isinstance(outputs, list) or not outputs:
        raise TrialError("answers with no outputs")
    return outputs


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise TrialError(f"answers with something that is cut off or no JSON: {said(text)}") from None


def _no_number(word: str) -> NoReturn:
    raise TrialError(f"answers with {word}, which is no JSON; ask it over kserve+grpc")


def _seen(output: _Output, each: Mapping[str, Any]) -> int:
    """Look one output through; return how many bytes of it are behind the JSON."""
    parameters = each.get("parameters")
    size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
    if size is None:
        output.see_data(each.get("data"))
        return 0
    if type(size) is not int or size < 0:
        raise TrialError(f"says that its output {output.name} has {str(size)[:100]} bytes")
    output.see_bytes(size)
    return size


def see_message(who: str, outputs: Sequence[Any], raw: Sequence[bytes]) -> Shapes:
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
