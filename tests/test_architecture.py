"""The house: who may import whom, and what loads when."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "polythrottle"
VOCABULARY = (
    *("errors", "clock", "units", "space", "measurement", "problem", "study", "profile", "ports", "state"),
    *("findings", "identity", "requirements", "sensors", "recording", "arrivals", "ladder", "backports"),
    *("card", "cells", "columns", "parquet", "placement", "plainfile", "printable", "tables", "threads"),
)
ADAPTERS = ("catalog", "journal", "backends", "actuation", "workloads", "optimize")
USE = (
    *(
        "meter",
        "comparing",
        "stopping",
        "past",
        "remarks",
        "tuner",
        "parameter_sweep",
        "bench",
        "reproduce",
        "report",
        "explanation",
    ),
    *("diagnosis", "applying", "driving", "queueing", "rungs"),
    *("snapshot", "profiling", "finetune", "daemon", "cluster"),
)
ENTRY = (
    "api",
    "client",
    "deployment",
    "outcome",
    "studies",
    "plan",
    "setup",
    "sides",
    "plots",
    "objects",
    "targets",
    "experiments",
    "progress",
    "cli",
    "testing",
    "__main__",
    "__init__",
)
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
    "tensorrt": ("workloads",),
    "aiohttp": ("workloads",),
    "tritonclient": ("workloads",),
    "pynvml": ("backends", "actuation"),
    "jtop": ("backends",),
    "optuna": ("optimize",),
    "matplotlib": ("report", "plots"),
    "pandas": ("bench", "columns", "experiments", "parameter_sweep", "parquet", "study", "tables"),
    "pyarrow": ("parquet",),
    "typer": ("cli",),
    "textual": ("cli",),
    "starlette": ("daemon",),
    "uvicorn": ("daemon",),
    "prometheus_client": ("daemon",),
    "rich": ("cli",),
}


@cache
def modules() -> tuple[Path, ...]:
    """Return every module of the package."""
    return tuple(sorted(PACKAGE.rglob("*.py")))


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


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Return the dotted names a module imports, lazily or for types only too."""
    names: list[str] = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(names)


@cache
def known_modules() -> frozenset[str]:
    """Return the names of all modules below the package."""
    return frozenset(dotted(module) for module in modules())


def inner(path: Path) -> Iterator[str]:
    """Yield the modules of this package that a module imports, as dotted names below it."""
    known = known_modules()
    for name in imports(path):
        below = name.removeprefix("polythrottle.") if name.startswith("polythrottle.") else None
        while below and below not in known:
            below = below.rpartition(".")[0]
        if below:
            yield below


def top(name: str) -> str:
    """Return the first part of a dotted name."""
    return name.partition(".")[0]


def allowed(here: str, there: str) -> bool:
    """Return whether the drawing of the house has an edge from one top-level name to another."""
    if here == there or here in ENTRY or there in VOCABULARY:
        return True
    return there in ADAPTERS + USE if here in USE else (here, there) in ACROSS


def test_a_module_imports_only_what_its_layer_may() -> None:
    """Vocabulary knows nothing outside itself, adapters do not know each other, nobody knows the entry."""
    edges = [(dotted(path), name) for path in modules() for name in inner(path)]
    assert [f"{here} -> {name}" for here, name in edges if not allowed(top(here), top(name))] == []


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


def test_heavy_packages_stay_where_they_are_used() -> None:
    """torch, matplotlib and their like are imported by the one adapter whose field they are."""
    used = [(dotted(path), name) for path in modules() for name in imports(path) if top(name) in HEAVY]
    assert [f"{here} imports {name}" for here, name in used if top(here) not in HEAVY[top(name)]] == []


def prints(path: Path) -> bool:
    """Return whether a module calls print."""
    return any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        for node in ast.walk(parsed(path))
    )


def test_only_the_command_line_prints() -> None:
    """Print is for cli alone."""
    assert [dotted(path) for path in modules() if top(dotted(path)) != "cli" and prints(path)] == []


def test_modules_stay_of_a_size_to_read() -> None:
    """A module stops at 600 lines; ruff counts the statements of a function."""
    assert [dotted(path) for path in modules() if path.read_text().count("\n") > 600] == []


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
