"""The model that is fine-tuned: a frozen backbone, a free head or adapters, and their training in slices."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polythrottle.domain.backports import paired, removeprefix, removesuffix
from polythrottle.domain.errors import BadFile, InvalidInput, TrialError
from polythrottle.training.beside.trainer.driver import ADAPTERS
from polythrottle.training.beside.trainer.job_folder import classes_of
from polythrottle.workloads import open_workload
from polythrottle.workloads.foreign_calls import guarded
from polythrottle.workloads.torch_archive import load_export, load_script, load_tensors, quiet
from polythrottle.workloads.torch_model import TorchWorkload, open_export

# The model that is fine-tuned: its backbone frozen, its head and perhaps low-rank adapters free.
#
# It is trained in the very form in which it will be served: an archive of torch.export, or TorchScript. A Python
# module is exported when the job begins, so that a model that cannot be served is found before the night and not
# after it, and so that a job resumes from the weights it began with. It stays in evaluation mode: normalisation keeps
# its statistics and dropout is off, which is what freezing a backbone means and what makes slices add up.

ARCHIVE = ".pt2"
SCRIPT = ".pt"
_TRIED = 2


class Network:
    """A model with most of its weights frozen.

    Args:
        path: Of an archive of torch.export (``.pt2``) or of TorchScript (``.pt``).
        trained: ``head`` or ``adapters``.
        rank: Of the adapters.
        seed: Of their first weights.
        device: Where it runs.

    Raises:
        BadFile: If the file does not load.
        InvalidInput: If it has no linear layer to train, or takes no adapters.
    """

    def __init__(self, path: Path, *, trained: str, rank: int, seed: int, device: torch.device) -> None:
        self._path = path
        self.module, linear, self.fixed_batch = _opened(path)
        if trained == ADAPTERS and path.suffix == SCRIPT:
            raise InvalidInput("TorchScript takes no adapters; train the head, or give a .pt2 or a Python module")
        self.module.to(device)
        weights = dict(self.module.named_parameters())
        for weight in weights.values():
            weight.requires_grad_(False)
        if not linear:
            raise InvalidInput("this model has no linear layer whose weights could be trained")
        head, bias = linear[-1]
        self.free: dict[str, torch.Tensor] = {name: weights[name].requires_grad_() for name in (head, bias) if name}
        self.output = int(weights[head].shape[0])
        if trained == ADAPTERS:
            self._adapted = {name: weights[name] for name, _ in linear[:-1]}
        else:
            self._adapted = {}
        self.free |= _adapters(self._adapted, rank, seed)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the scores of samples, shape (samples, output).

        Raises:
            TrialError: If the model raises, or makes something else; running out of memory is raised as it is.
        """
        if self.fixed_batch and len(inputs) > 1:
            return torch.cat([self(inputs[i : i + 1]) for i in range(len(inputs))])
        weights = {name: self._sum(name) for name in self._adapted}
        if weights:
            scores = torch.func.functional_call(self.module, weights, (inputs,))
        else:
            scores = self.module(inputs)
        if not isinstance(scores, torch.Tensor) or scores.shape != (len(inputs), self.output):
            raise TrialError(f"the model must make scores of shape (samples, {self.output}); it made {_form(scores)}")
        return scores

    def _sum(self, name: str) -> torch.Tensor:
        """Return an adapted weight: what it was, and the product of two narrow matrices."""
        return self._adapted[name] + self.free[f"{name}.up"] @ self.free[f"{name}.down"]

    def archive(self) -> bytes:
        """Return the model with what it has learnt as a file's bytes, in the form it was loaded from.

        Raises:
            TrialError: If torch cannot write it.
        """
        with torch.no_grad(), quiet("torch raised"):
            learnt = {name: weight for name, weight in self.free.items() if not name.endswith((".up", ".down"))}
            learnt |= {name: self._sum(name) for name in self._adapted}
            file = io.BytesIO()
            if self._path.suffix == SCRIPT:
                script = load_script(self._path)
                _overwrite(dict(script.named_parameters()), learnt)
                torch.jit.save(script, file)
            else:
                program = load_export(self._path)
                _overwrite(program.state_dict, learnt)
                torch.export.save(program, file)
            return file.getvalue()


def begun(uri: str, sample: torch.Tensor, labels: list[str], seed: int) -> tuple[bytes, str, dict[str, int]]:
    """Return the file a job begins with, its suffix, and the class of each label.

    A Python module whose output does not fit the labels gets a new head; a file keeps the one it has.

    Args:
        uri: Of the model.
        sample: One, without the batch dimension.
        labels: Of all samples.
        seed: Of the weights of a new head.

    Raises:
        BadFile: If a file does not load.
        InvalidInput: If it is no torch module, cannot be exported, or its output does not fit the labels.
        UnknownName: If a Python module has no such name.
        TrialError: If it fails on the sample.
    """
    shape = f"{'x'.join(map(str, sample.shape))}:{removeprefix(str(sample.dtype), 'torch.')}"
    if uri.lower().endswith((ARCHIVE, SCRIPT)):
        module = open_export(uri, inputs=() if uri.lower().endswith(ARCHIVE) else (shape,)).module
        if isinstance(module, torch.jit.ScriptModule):
            suffix = SCRIPT
        else:
            suffix = ARCHIVE
        if suffix == ARCHIVE:
            _batch(load_export(uri))
        return _read(uri), suffix, _fitting(uri, labels, _outputs(module, sample))
    served = open_workload(uri, inputs=(shape,), threads=[1])
    if not isinstance(served, TorchWorkload):
        raise InvalidInput(f"{uri} is not a torch module, so it cannot be fine-tuned")
    module = served.module.cpu()  # where the sample is, whatever ``?device=`` says of serving
    output = _outputs(module, sample)
    classes = classes_of(labels, output)
    if max(classes.values()) >= output or (not _numbers(classes) and len(classes) != output):
        output = len(classes)
        _replace_head(uri, module, output, seed)
    return _exported(uri, module, sample), ARCHIVE, classes


def scores_of(path: Path) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what a model file computes.

    Raises:
        BadFile: If it does not load.
    """
    return _opened(path)[0]


def _opened(path: Path) -> tuple[nn.Module, list[tuple[str, str]], bool]:
    """Return a module, the weights and biases (or "") of its linear layers in order, and whether its batch is 1."""
    if path.suffix == SCRIPT:
        loaded = load_script(path)
    else:
        loaded = load_export(path)
    try:
        with quiet("torch raised"):
            if path.suffix == SCRIPT:
                module: nn.Module = loaded.eval()
            else:
                module = loaded.module()
    except TrialError as err:
        raise BadFile(f"{path} does not load here: {err}") from err
    if path.suffix == SCRIPT:
        return module, list(_by_shape(dict(module.named_parameters()))), False
    return module, list(_by_graph(loaded)), _batch(loaded) == 1


def _by_graph(program: Any) -> Iterator[tuple[str, str]]:
    """Yield the parameters of each linear operator of an exported program."""
    names = program.graph_signature.inputs_to_parameters
    for node in program.graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.aten.linear.default:
            weight, bias = (names.get(getattr(each, "name", ""), "") for each in (*node.args[1:], None)[:2])
            if weight:
                yield weight, bias


def _by_shape(weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, str]]:
    """Yield matrices called weight, and the biases beside them."""
    for name, weight in weights.items():
        bias = f"{removesuffix(name, 'weight')}bias"
        if weight.dim() == 2 and name.endswith("weight"):
            yield name, bias if bias in weights else ""


def _batch(program: Any) -> int | None:
    """Return the only batch an exported program takes; None if it takes several."""
    names = set(program.graph_signature.user_inputs)
    shapes = [node.meta["val"].shape for node in program.graph.nodes if node.op == "placeholder" and node.name in names]
    if len(shapes) != 1:
        raise InvalidInput(f"a model of one input is needed; this takes {len(shapes)}")
    size: object = 1
    if len(shapes[0]):
        size = shapes[0][0]
    if isinstance(size, int) and size > 1:
        raise InvalidInput(f"it is exported for batches of {size} alone; export it for any batch or for batches of 1")
    if isinstance(size, int):
        return size
    return None


def _adapters(weights: Mapping[str, torch.Tensor], rank: int, seed: int) -> dict[str, torch.Tensor]:
    """Return two narrow matrices for each weight; their product is 0 at first (arXiv 2106.09685, section 4.1)."""
    random = torch.Generator().manual_seed(seed)
    free = {}
    for name, weight in weights.items():
        rows, columns = weight.shape
        down = torch.randn(rank, columns, generator=random) / math.sqrt(columns)
        free[f"{name}.down"] = down.to(weight).requires_grad_()
        free[f"{name}.up"] = torch.zeros(rows, rank).to(weight).requires_grad_()
    return free


def _overwrite(weights: Mapping[str, torch.Tensor], learnt: Mapping[str, torch.Tensor]) -> None:
    for name, weight in learnt.items():
        weights[name].data.copy_(weight)


def _outputs(module: nn.Module, sample: torch.Tensor) -> int:
    """Return the dimension of a model's output.

    Raises:
        TrialError: If it fails on the sample, or makes no scores.
    """
    with torch.no_grad(), guarded("the model raised, given the first sample:"):
        scores = module(sample[None])
    if not isinstance(scores, torch.Tensor) or scores.dim() != 2:
        raise TrialError(f"the model must make scores of shape (samples, classes); it made {_form(scores)}")
    return int(scores.shape[1])


def _fitting(uri: str, labels: list[str], output: int) -> dict[str, int]:
    classes = classes_of(labels, output)
    if not _numbers(classes) and len(classes) != output:
        raise InvalidInput(
            f"{uri} tells {output} classes apart, the data has {len(classes)} labels; number the labels from 0 to "
            f"{output - 1} as the model does, or give package.module:callable, which can get a new head"
        )
    return classes


def _numbers(classes: Mapping[str, int]) -> bool:
    """Return whether the labels are the numbers of classes themselves."""
    return all(label.isdecimal() and int(label) == place for label, place in classes.items())


def _replace_head(uri: str, module: nn.Module, output: int, seed: int) -> None:
    linear = [name for name, each in module.named_modules() if isinstance(each, nn.Linear)]
    if not linear:
        raise InvalidInput(f"{uri} has no linear layer, so it cannot get a head for {output} labels")
    old = module.get_submodule(linear[-1])
    assert isinstance(old, nn.Linear)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module.set_submodule(linear[-1], nn.Linear(old.in_features, output, bias=old.bias is not None).to(old.weight))


def _exported(uri: str, module: nn.Module, sample: torch.Tensor) -> bytes:
    """Return an archive of a module for any batch; made on the CPU, moved when loaded."""
    batch = torch.stack([sample] * _TRIED)
    file = io.BytesIO()
    try:
        with quiet("torch.export raised"):
            sizes = ({0: torch.export.Dim.DYNAMIC},)
            torch.export.save(torch.export.export(module.cpu(), (batch,), dynamic_shapes=sizes), file)
    except TrialError as err:
        raise InvalidInput(f"{uri} cannot be exported, so what is trained could not be served: {err}") from err
    return file.getvalue()


def _read(uri: str) -> bytes:
    try:
        return Path(uri).read_bytes()
    except OSError as err:
        raise BadFile(f"{uri} cannot be read: {err.strerror}") from err


def _form(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


# Learning: gradients gathered slice by slice, and one move of the weights when a step is whole.

_SIGNS = ("can't allocate memory", "out of memory", "bad_alloc")


class Learner:
    """Trains what a network leaves free.

    Gradients of summed losses add up over slices and are divided by the samples of the whole step, so that a step means
    the same whatever its slices.

    Args:
        network: Whose free weights move.
        learning_rate: Of Adam.
    """

    def __init__(self, network: Network, learning_rate: float) -> None:
        self.network = network
        self._free = list(network.free.values())
        self._optimizer = torch.optim.Adam(self._free, lr=learning_rate)
        self.forget()

    def forget(self) -> None:
        """Drop what was gathered for a step."""
        self._gathered = [torch.zeros_like(weight) for weight in self._free]
        self._loss = 0.0
        self._samples = 0

    def gather(self, inputs: torch.Tensor, classes: torch.Tensor) -> None:
        """Add the gradients of a slice; nothing is added if it fails.

        Args:
            inputs: Shape (samples, …).
            classes: Shape (samples,).

        Raises:
            TrialError: If the loss is not finite.
        """
        loss = torch.nn.functional.cross_entropy(self.network(inputs).float(), classes, reduction="sum")
        gradients = torch.autograd.grad(loss, self._free)
        value = loss.item()
        if not math.isfinite(value):
            raise _diverged("the loss", value)
        for total, gradient in paired(self._gathered, gradients):
            total.add_(gradient)
        self._loss += value
        self._samples += len(classes)

    def move(self) -> float | None:
        """Move the weights by what was gathered, and return the mean loss; None if nothing was.

        Raises:
            TrialError: If a weight is not finite any more.
        """
        if not self._samples:
            return None
        for weight, total in paired(self._free, self._gathered):
            weight.grad = total / self._samples
        self._optimizer.step()
        if not all(bool(torch.isfinite(weight).all()) for weight in self._free):
            raise _diverged("a weight", math.nan)
        loss = self._loss / self._samples
        self.forget()
        return loss

    def learnt(self) -> bytes:
        """Return all that a resumed learner needs."""
        file = io.BytesIO()
        free = {name: weight.detach() for name, weight in self.network.free.items()}
        state = {"free": free, "optimizer": self._optimizer.state_dict(), "random": torch.get_rng_state()}
        torch.save(state, file)
        return file.getvalue()

    def resume(self, learnt: bytes) -> None:
        """Go on from what another learner had learnt.

        Raises:
            BadFile: If that does not fit this network.
        """
        try:
            state = load_tensors(learnt)
            with torch.no_grad():
                for name, weight in self.network.free.items():
                    weight.copy_(state["free"][name])
            self._optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["random"])
        except (RuntimeError, KeyError, ValueError, TypeError) as err:
            raise BadFile("the checkpoint does not fit the model the job began with; begin a new job") from err
        self.forget()


def out_of_memory(err: BaseException) -> bool:
    """Return whether an error says that memory has run out."""
    told = isinstance(err, RuntimeError) and any(sign in str(err) for sign in _SIGNS)
    # By its name: torch's own is in another place from 2.5 on.
    return told or isinstance(err, MemoryError) or type(err).__name__ == "OutOfMemoryError"


def _diverged(what: str, value: float) -> TrialError:
    return TrialError(
        f"{what} is {value}: training has diverged and stops at its last good checkpoint; lower the learning rate or "
        "look for bad samples, and begin a new job"
    )
