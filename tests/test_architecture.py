"""The house: who may import whom, and what loads when."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "polythrottle"
VOCABULARY = (
    *("errors", "clock", "units", "space", "measurement", "problem", "study", "profile", "ports", "state"),
    *("findings", "identity", "sensors", "recording", "arrivals", "ladder"),
)
ADAPTERS = ("catalog", "journal", "backends", "actuation", "workloads", "optimize")
USE = (
    *("meter", "comparing", "stopping", "past", "remarks", "tuner", "sweep", "bench", "reproduce", "report", "explain"),
    *("doctor", "applying", "driving", "queueing", "rungs"),
    *("snapshot", "profiling", "finetune", "daemon", "cluster"),
)
ENTRY = ("api", "client", "outcome", "studies", "plan", "setup", "sides", "cli", "testing", "__main__", "__init__")
ACROSS = {("backends", "catalog"), ("backends", "actuation")}
HEAVY = {
    "torch": ("optimize", "workloads", "profiling", "finetune", "cluster"),
    "sklearn": ("cluster",),
    "ray": ("cluster",),
    "fsspec": ("cluster",),
    "gpytorch": ("optimize",),
    "botorch": ("optimize",),
    "onnx": ("profiling",),
    "onnxruntime": ("workloads",),
    "aiohttp": ("workloads",),
    "tritonclient": ("workloads",),
    "pynvml": ("backends", "actuation"),
    "jtop": ("backends",),
    "optuna": ("optimize",),
    "matplotlib": ("report",),
    "typer": ("cli",),
    "textual": ("cli",),
    "starlette": ("daemon",),
    "uvicorn": ("daemon",),
    "prometheus_client": ("daemon",),
    "rich": ("cli",),
}


def modules() -> list[Path]:
    """Return every module of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    """Return a module's name below the package."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


@cache
def parsed(path: Path) -> ast.Module:
    """Return what a module is made of."""
    try:
        return ast.parse(path.read_text())
    except SystemError:  # CPython 3.11 now and then miscounts its own recursion (gh-106905)
        return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[str]:
    """Yield the dotted names a module imports, lazily or for types only too."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def inner(path: Path) -> Iterator[str]:
    """Yield the modules of this package that a module imports, as dotted names below it."""
    known = {dotted(module) for module in modules()}
    for name in imports(path):
        below = name.removeprefix("polythrottle.") if name.startswith("polythrottle.") else None
        while below and below not in known:
            below = below.rpartition(".")[0]
        if below:
            yield below


def top(name: str) -> str:
    """Return the first part of a dotted name."""
    return name.partition(".")[0]


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_a_module_imports_only_what_its_layer_may(path: Path) -> None:
    """Vocabulary knows nothing outside itself, adapters do not know each other, nobody knows the entry."""
    here = top(dotted(path))
    for name in inner(path):
        there = top(name)
        if here == there or here in ENTRY or there in VOCABULARY:
            continue
        if here in USE:
            assert there in ADAPTERS + USE
        else:
            assert (here, there) in ACROSS, f"{here} must not import {name}"


def test_every_module_has_a_layer() -> None:
    """A new top-level module is put into the drawing before it is used."""
    assert {top(dotted(path)) for path in modules()} <= {*VOCABULARY, *ADAPTERS, *USE, *ENTRY}


def test_there_are_no_cycles() -> None:
    """No module leads back to itself, lazy and type-only imports included."""
    graph = {dotted(path): set(inner(path)) - {dotted(path)} for path in modules()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done:
            for other in graph[name]:
                visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_heavy_packages_stay_where_they_are_used(path: Path) -> None:
    """torch, matplotlib and their like are imported by the one adapter whose field they are."""
    for name in imports(path):
        owners = HEAVY.get(top(name))
        assert owners is None or top(dotted(path)) in owners, f"{dotted(path)} imports {name}"


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_only_the_command_line_prints(path: Path) -> None:
    """Print is for cli alone."""
    calls = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)]
    assert top(dotted(path)) == "cli" or not any(getattr(call.func, "id", "") == "print" for call in calls)


@pytest.mark.parametrize("path", modules(), ids=dotted)
def test_modules_stay_small(path: Path) -> None:
    """A module stops at 500 lines, a function at 40."""
    text = path.read_text()
    assert text.count("\n") <= 500
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and "cli" not in path.parts:
            body = (node.end_lineno or 0) - node.body[-1 if len(node.body) == 1 else 1].lineno
            assert body <= 30, f"{dotted(path)}.{node.name} has {body} lines"


def test_nothing_imports_torch_until_a_study_needs_it() -> None:
    """The package, the command line and the catalogue load neither torch nor matplotlib."""
    code = (
        "import sys, polythrottle, polythrottle.cli.commands, polythrottle.api, polythrottle.catalog;"
        "print([m for m in ('torch', 'botorch', 'matplotlib', 'onnxruntime', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_loads_neither_numpy_nor_rich() -> None:
    """What --help needs is little, so that it comes at once."""
    code = (
        "import sys\nfrom polythrottle.cli.commands import run\nassert run(['--help']) == 0\n"
        "sys.stderr.write(str([m for m in ('numpy', 'rich.console', 'torch') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "tune" in done.stdout
    assert done.stderr.strip() == "[]"
