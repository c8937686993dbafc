"""A Python callable as a workload, and the way from ``package.module:callable`` to it."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any

from polythrottle.domain.errors import InvalidInput, TrialError, UnknownName
from polythrottle.domain.measurement import Query
from polythrottle.domain.ports import Target, Workload
from polythrottle.domain.space import BATCH_SIZE, OperatingPoint, SearchSpace
from polythrottle.workloads.foreign_calls import guarded, one_line, timed
from polythrottle.workloads.inputs import THREADS, batch_knob, chosen, count, grid_of, threads_knob
from polythrottle.workloads.uris import ModelUri


class CallableWorkload:
    """A function whose every call is one query: ``f()``, ``f(batch_size)`` or ``f(batch_size, threads)``.

    The knobs are the parameters it has by those names.

    Args:
        uri: What opens it again.
        function: The function.
        batch_sizes: Levels of ``batch_size``; usual ones by default.
        threads: Levels of ``threads``; usual ones by default.

    Raises:
        InvalidInput: If it needs other arguments, or its calls do not run it (coroutines, generators).
    """

    def __init__(
        self,
        uri: str,
        function: Callable[..., object],
        *,
        batch_sizes: Sequence[int] | None = None,
        threads: Sequence[int] | None = None,
    ) -> None:
        self.uri = uri
        self._function = function
        names = _knob_names(uri, function)
        offered = {BATCH_SIZE: lambda: batch_knob(batch_sizes), THREADS: lambda: threads_knob(threads)}
        self.space: SearchSpace = grid_of([offered[name]() for name in offered if name in names])
        self._point = self.space.default

    def apply(self, point: OperatingPoint) -> None:
        """Set the arguments of the calls to come.

        Raises:
            KnobRejected: If the point is not in the space.
        """
        self._point = chosen(self.space, point)

    def query(self) -> Query:
        """Call the function once.

        Raises:
            TrialError: If it raises.
        """
        arguments = dict(self._point)
        return Query(timed("model raised", lambda: self._function(**arguments)), count(self._point, BATCH_SIZE))

    def close(self) -> None:
        """Do nothing: the function is the user's."""


def open_python(
    uri: str,
    *,
    inputs: Sequence[str] = (),
    batch_sizes: Sequence[int] | None = None,
    threads: Sequence[int] | None = None,
    target: Target | None = None,
) -> Workload:
    """Return the workload ``package.module:callable`` means; the working folder is importable.

    A ``torch.nn.Module``, or a class or function that makes one without arguments, is run as a torch module, where its
    parameters are or where ``?device=`` says. To learn what it makes, a function that needs no arguments is called once
    here.

    Raises:
        InvalidInput: If the module cannot be imported, or what is there cannot be called so.
        UnknownName: If the module has no such name.
        TrialError: If a class raises while it is built.
    """
    model = ModelUri.parse(uri)
    model.only("a Python callable", "device")
    return workload_of(
        uri,
        _imported(model.name),
        inputs=inputs,
        batch_sizes=batch_sizes,
        threads=threads,
        target=target,
    )


def workload_of(
    uri: str,
    found: object,
    *,
    inputs: Sequence[str] = (),
    batch_sizes: Sequence[int] | None = None,
    threads: Sequence[int] | None = None,
    target: Target | None = None,
) -> Workload:
    """Return the workload that a function, a torch module, or what makes one without arguments amounts to.

    Args:
        uri: What it is known by; ``?device=cuda`` or ``?device=cpu`` moves a torch module there.
        found: The function, class or module.
        inputs: Shapes of one item's inputs, of a torch module.
        batch_sizes: Levels of ``batch_size``; usual ones by default.
        threads: Levels of ``threads``; usual ones by default.
        target: The GPU that is tuned, if one is.

    Raises:
        InvalidInput: If it cannot be called so.
        UnknownName: If there is no such device.
        DeviceError: If it is to be moved to a GPU, and torch has none.
        TrialError: If a class raises while it is built.
    """
    made = _made(uri, found)
    torch_module = _torch_module()
    if torch_module is not None and isinstance(made, torch_module):
        from polythrottle.workloads.torch_model import DEVICES, TorchWorkload

        device = next(iter(ModelUri.parse(uri).chosen("device", DEVICES)), None)
        return TorchWorkload(
            uri,
            made,
            inputs=inputs,
            batch_sizes=batch_sizes,
            threads=threads,
            device=device,
            target=target,
        )
    if "?" in uri:
        raise InvalidInput(
            f"{uri.partition('?')[0]} is not a torch module, so it takes no device; it runs where it will"
        )
    if inputs:
        raise InvalidInput(f"{uri} is not a torch module, so it takes no inputs")
    if not callable(made):
        raise InvalidInput(f"{uri} is a {type(made).__name__}, not something that can be called")
    return CallableWorkload(uri, made, batch_sizes=batch_sizes, threads=threads)


def _imported(uri: str) -> Any:
    module_name, _, attribute = uri.partition(":")
    if module_name.endswith(".py"):
        module_name = module_name[: -len(".py")].replace("/", ".")
        raise InvalidInput(f"{uri} names a file; write the module as Python imports it: {module_name}:{attribute}")
    # A console script has its own folder there instead, and `python -m` the working one.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with redirect_stdout(sys.stderr):
            found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as err:
        # Only the module itself or its package: one that it imports and that is missing is a fault of another kind.
        if isinstance(err, ModuleNotFoundError) and f"{module_name}.".startswith(f"{err.name}."):
            raise InvalidInput(f"{uri}: there is no module {err.name!r} in this folder or installed") from err
        raise InvalidInput(f"{uri}: importing {module_name} raised {one_line(err)}") from err
    for name in attribute.split("."):
        if not hasattr(found, name):
            public = [each for each in dir(found) if not each.startswith("_")]
            raise UnknownName(f"callable in {module_name}", attribute, public)
        found = getattr(found, name)
    return found


def _torch_module() -> Any:
    """Return ``torch.nn.Module`` if the user's code has imported torch; without that nothing can be one."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return torch.nn.Module
    return None


def _made(uri: str, found: Any) -> Any:
    """Return the torch module that a class or a function makes without arguments, or else what was found."""
    torch_module = _torch_module()
    if torch_module is None or isinstance(found, torch_module) or not callable(found):
        return found
    is_class = inspect.isclass(found) and issubclass(found, torch_module)
    if not is_class and not _may_be_factory(found):
        return found
    try:
        with guarded("model raised"):
            made = found()
    except TrialError as err:
        raise TrialError(f"{uri}: {err}") from err
    if is_class or isinstance(made, torch_module):
        return made
    return found


def _may_be_factory(found: Any) -> bool:
    """Return whether a function can be called bare to see what it makes."""
    if not inspect.isfunction(found) or _only_prepares(found):
        return False
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = _parameters(found)
    bare = all(each.default is not each.empty or each.kind in kinds for each in parameters.values())
    return bare and not {BATCH_SIZE, THREADS} & set(parameters)


def _only_prepares(function: Callable[..., object]) -> bool:
    """Return whether a call does not run the function yet."""
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    return any(kind(function) for kind in kinds)


def _parameters(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}  # compiled code that does not say what it takes


def _knob_names(uri: str, function: Callable[..., object]) -> set[str]:
    if _only_prepares(function):
        raise InvalidInput(
            f"{uri} only makes a coroutine or generator; write a function that does the work when called"
        )
    takes: set[str] = set()
    needs: list[str] = []
    for name, parameter in _parameters(function).items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in (BATCH_SIZE, THREADS) and parameter.kind is not parameter.POSITIONAL_ONLY:
            takes.add(name)
        elif parameter.default is parameter.empty:
            needs.append(name)
    if needs:
        raise InvalidInput(f"{uri} needs {', '.join(needs)}; a query passes only batch_size and threads, by name")
    return takes
