"""The computation graph of a torch module, drawn while it answers one query."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from polythrottle.domain.backports import paired
from polythrottle.domain.errors import InvalidInput, PolythrottleError, TrialError
from polythrottle.workloads.foreign_calls import guarded
from polythrottle.workloads.graph_operators import Access, Graph, Sketch, Tensor

_aten = torch.ops.aten
_QUANTISED = ("quantized", "quantized_decomposed", "onednn", "torchao")
# Each result depends on one place of the inputs, though torch does not tag them as pointwise.
_POINTWISE = {
    _aten.native_batch_norm,
    _aten._native_batch_norm_legit_no_training,
    _aten.cudnn_batch_norm,
    _aten.copy_,
    _aten._to_copy,
    _aten.hardswish,
    _aten.hardswish_,
    _aten.prelu,
    _aten._prelu_kernel,
    _aten._unsafe_view,
}
_LOOKUPS = {_aten.embedding, _aten._embedding_bag_forward_only, _aten.index_select, _aten.index, _aten.gather}
_OVERWRITES = {_aten.copy_, _aten.fill_, _aten.zero_}


def _attention_operations(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Return the operations of attention on (…, heads, tokens, depth): queries times keys, weights times values."""
    return int(2 * query.numel() // query.shape[-1] * key.shape[-2] * (query.shape[-1] + value.shape[-1]))


# Attention is one operator here whichever kernel torch takes: some of them never write the weights to memory.
_FORMULAS: Mapping[Any, Callable[..., Any]] = {
    **flop_registry,
    _aten.scaled_dot_product_attention: _attention_operations,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_operations,
}


def trace_torch(uri: str, module: torch.nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Graph:
    """Return what a module does with given inputs; it is run once.

    Operations are those that torch.utils.flop_counter has formulas for (convolutions, matrix products, attention), a
    multiply-add counted as two; attention is counted whole, whatever its mask.

    Args:
        uri: What the module is called in messages.
        module: In evaluation mode.
        arguments: Positional inputs of the batch to count.
        named: Named inputs.

    Raises:
        InvalidInput: If it holds quantised or sparse tensors.
        TrialError: If it raises.
    """
    recorder = _Recorder(uri)
    for tensor in _tensors((arguments, dict(named))):
        recorder.feed(tensor)
    own = getattr(module, "_orig_mod", module)  # what torch.compile would compile
    try:
        with guarded("model raised"), torch.inference_mode(), _spelled_out(), recorder:
            answer = own(*arguments, **named)
    except TrialError as err:
        if isinstance(err.__cause__, PolythrottleError):
            raise err.__cause__ from None
        raise TrialError(f"{uri}: {err}") from err
    outputs = [recorder.place(tensor) for tensor in _tensors(answer)]
    parameters = sum(each.numel() for each in module.parameters())
    return recorder.sketch.finished(outputs, parameters or None)


@contextmanager
def _spelled_out() -> Iterator[None]:
    """Have torch run single operators where it knows one for a whole layer, which no formula covers."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # asking for the flags warns about TF32
            with torch.backends.mkldnn.flags(enabled=False), torch.backends.cudnn.flags(enabled=False):
                yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operator torch dispatches."""

    def __init__(self, uri: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sketch = Sketch()
        self._uri = uri
        # A weak reference keeps the address of a storage from being used again, but not its data.
        self._places: dict[StorageWeakRef, int] = {}

    def feed(self, tensor: torch.Tensor) -> None:
        """Note an input."""
        self._places[self._storage(tensor)] = self.sketch.feed(_whole(tensor))

    def place(self, tensor: torch.Tensor) -> int:
        """Return where a tensor's storage stands in the sketch; one that nobody made is a constant."""
        storage = self._storage(tensor)
        if storage not in self._places:
            whole = _whole(tensor)
            self._places[storage] = self.sketch.add(Tensor(whole.elements, whole.item_bytes, constant=True))
        return self._places[storage]

    def _storage(self, tensor: torch.Tensor) -> StorageWeakRef:
        if tensor.is_quantized or tensor.layout is not torch.strided:
            kind = "quantised" if tensor.is_quantized else "sparse"
            raise InvalidInput(_refusal(self._uri, f"{kind} tensors"))
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _QUANTISED:
            raise InvalidInput(_refusal(self._uri, f"quantised operators ({func.overloadpacket.__name__})"))
        if func.overloadpacket not in _FORMULAS:
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        given = _tensors((args, kwargs))
        known = {self._storage(tensor) for tensor in given}
        targets = _targets(func, args, kwargs)
        reads = [self._access(tensor) for tensor in given if not _overwritten(func, tensor, targets)]
        result = func(*args, **kwargs)
        made = [*(each for each in _tensors(result) if self._storage(each) not in known), *targets]
        if made:
            self._note(func, reads, made, _operations(func, args, kwargs, result))
        return result

    def _note(self, func: Any, reads: list[Access], made: list[torch.Tensor], operations: float | None) -> None:
        packet = func.overloadpacket
        if packet in _LOOKUPS and reads:
            reads[0] = Access(reads[0].tensor, min(reads[0].elements, made[0].numel()), reads[0].start, True)
        places = self.sketch.step(
            packet.__name__,
            reads,
            [Tensor(each.numel() * _parts(each), _item_bytes(each)) for each in made],
            operations=operations,
            pointwise=torch.Tag.pointwise in func.tags or packet in _POINTWISE,
        )
        self._places.update({self._storage(each): place for each, place in paired(made, places)})

    def _access(self, tensor: torch.Tensor) -> Access:
        place = self.place(tensor)
        elements = min(tensor.numel(), _whole(tensor).elements)  # a broadcast view has more places than values
        return Access(place, elements * _parts(tensor), int(tensor.storage_offset()))


def _refusal(uri: str, what: str) -> str:
    return f"{uri} holds {what}, which cannot be counted; profile the model as it was before, with --precision int8"


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _whole(tensor: torch.Tensor) -> Tensor:
    elements = tensor.untyped_storage().nbytes() // max(1, tensor.element_size())
    return Tensor(elements * _parts(tensor), _item_bytes(tensor))


def _parts(tensor: torch.Tensor) -> int:
    if tensor.is_complex():
        return 2
    return 1


def _item_bytes(tensor: torch.Tensor) -> int | None:
    if tensor.is_floating_point() or tensor.is_complex():
        return None
    return tensor.element_size()


def _targets(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the arguments that an operator writes to."""
    names = [each.name for each in func._schema.arguments]
    given = {**dict(paired(names[: len(args)], args)), **kwargs}
    written = [each.name for each in func._schema.arguments if each.alias_info and each.alias_info.is_write]
    return _tensors([given[name] for name in written if name in given])


def _overwritten(func: Any, tensor: torch.Tensor, targets: list[torch.Tensor]) -> bool:
    whole = func.overloadpacket in _OVERWRITES or func._overloadname.endswith("out")
    return whole and any(tensor is target for target in targets)


def _operations(func: Any, args: Any, kwargs: Any, result: Any) -> float | None:
    formula = _FORMULAS.get(func.overloadpacket)
    if formula is None:
        return None
    return float(formula(*args, **kwargs, out_val=result))
