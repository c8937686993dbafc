"""What a KServe v2 server says of itself and of a model, and what can be asked of it, however it is spoken to.

Source: Open Inference Protocol (KServe v2), https://github.com/kserve/open-inference-protocol; extensions:
https://github.com/triton-inference-server/server/tree/main/docs/protocol.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from polythrottle.errors import TrialError, UnknownName
from polythrottle.workloads.declared import Declared
from polythrottle.workloads.kserve_shapes import Shape, Shapes

_DTYPES = {"FP16": "float16", "FP32": "float32", "FP64": "float64"}
KNOWN_EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository")
"""The extensions that make a difference here."""
Feeds = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Tensors:
    """What a model declares.

    Args:
        inputs: Empty if it declares none.
        outputs: Their shapes; without dimensions where the model does not say.
    """

    inputs: tuple[Declared, ...]
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
class Described:
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
    listed = {name: found.get(name) or () for name in ("inputs", "outputs")} if isinstance(found, Mapping) else {}
    if not listed or not all(isinstance(each, list | tuple) for each in listed.values()):
        raise TrialError(f"the server describes the model as {str(found)[:100]}, which is not KServe v2")
    outputs = [each for each in listed["outputs"] if isinstance(each, Mapping) and each.get("name")]
    return Tensors(tuple(map(_declared, listed["inputs"])), {str(each["name"]): _shape(each) for each in outputs})


def _shape(output: Mapping[str, Any]) -> Shape:
    """Return the shape of an output; one without dimensions if there is none to be read."""
    try:
        return tuple(int(size) for size in output["shape"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return ()


def _declared(tensor: Any) -> Declared:
    try:
        name, written = str(tensor["name"]), str(tensor["datatype"])
        shape = tuple(int(size) for size in tensor["shape"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise TrialError(f"the server describes an input as {str(tensor)[:100]}, which is not KServe v2") from None
    return Declared(name, shape, _DTYPES.get(written, written.lower()), written)


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
    except (AttributeError, TypeError, ValueError, OverflowError):
        pass
    raise TrialError(f"the server tells a configuration that is not Triton's: {str(found)[:100]}")


def datatype(dtype: str) -> str:
    """Return the protocol's name of a numpy type."""
    return {numpy: written for written, numpy in _DTYPES.items()}.get(dtype, dtype.upper())
