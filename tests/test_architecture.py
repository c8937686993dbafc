"""The house: who may import whom, and what loads when."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "polythrottle"
ADAPTERS = ("domain", "storage", "catalog", "backends", "actuation", "workloads", "optimize")
EDGES: dict[str, tuple[str, ...]] = {
    "domain": (),
    "storage": ("domain",),
    "catalog": ("domain", "storage"),
    "actuation": ("domain", "storage"),
    "backends": ("domain", "storage", "catalog", "actuation", "board"),
    "board": (*ADAPTERS, "metering", "inspect"),
    "workloads": ("domain", "storage"),
    "optimize": ("domain", "storage"),
    "proxy": ("domain", "storage"),
    "metering": ADAPTERS,
    "tuning": (*ADAPTERS, "board", "metering"),
    "report": ADAPTERS,
    "inspect": ADAPTERS,
    "training": (*ADAPTERS, "board", "metering", "tuning"),
    "daemon": (*ADAPTERS, "metering", "tuning"),
    "cluster": (*ADAPTERS, "metering", "tuning"),
    "lab": (*ADAPTERS, "metering", "tuning", "training", "cluster"),
    "api": (*ADAPTERS, "board", "metering", "tuning", "report", "inspect", "daemon"),
    "cli": (
        *ADAPTERS,
        "metering",
        "tuning",
        "report",
        "inspect",
        "training",
        "daemon",
        "cluster",
        "lab",
        "api",
        "proxy",
    ),
    "testing": ADAPTERS,
    "__init__": ("domain", "metering", "tuning", "daemon", "api"),
    "__main__": ("cli",),
}
"""Which package may import which: the drawing of the house."""
NARROW = {
    ("domain.arrivals", "storage"),  # a trace is read when its times are asked for
    ("actuation.server", "backends"),  # a process of its own: it opens the devices it sets for others
    ("daemon.trainer_monitor", "training"),  # reads where a fine-tuning job stands, without torch
    ("testing.__main__", "cli"),  # runs a command under the kernel of one's own making
}
"""Edges besides, from one module or sub-package alone."""
HEAVY = {
    "torch": ("optimize", "workloads", "training"),
    "sklearn": ("cluster",),
    "ray": ("training", "cluster"),
    "fsspec": ("storage",),
    "gpytorch": ("optimize",),
    "botorch": ("optimize",),
    "onnx": ("workloads",),
    "onnxruntime": ("workloads",),
    "tensorrt": ("workloads",),
    "tritonclient": ("workloads",),
    "grpc": ("daemon",),
    "google": ("daemon", "workloads"),
    "pynvml": ("backends", "actuation"),
    "jtop": ("backends",),
    "optuna": ("optimize",),
    "matplotlib": ("report", "api", "cli"),
    "pandas": ("lab", "domain", "api", "storage", "tuning"),
    "pyarrow": ("storage",),
    "typer": ("cli",),
    "textual": ("cli",),
    "starlette": ("daemon",),
    "uvicorn": ("daemon",),
    "h11": ("daemon", "proxy", "workloads"),
    "prometheus_client": ("daemon", "proxy"),
    "rich": ("cli", "api"),
}


@cache
def modules() -> tuple[Path, ...]:
    """Return every module of the package."""
    return tuple(sorted(PACKAGE.rglob("*.py")))


def dotted(path: Path) -> str:
    """Return a module's name below the package."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


@dataclass(frozen=True)
class Contents:
    """What a module is made of, as far as the rules below ask; its tree would take a hundred times the memory.

    Args:
        imports: The dotted names that it imports, lazily or for types only too.
        classes: The names of its classes.
        prints: Whether it calls print.
        choices: How many conditional expressions it has.
        nested_lines: The lines of those with another one within.
        tuple_assignments: How many assignments it has of a tuple to a tuple.
    """

    imports: tuple[str, ...]
    classes: tuple[str, ...]
    prints: bool
    choices: int
    nested_lines: tuple[int, ...]
    tuple_assignments: int


@cache
def contents(path: Path) -> Contents:
    """Return what a module is made of; each is parsed and gone through once, which takes most of the time here."""
    nodes = [*ast.walk(parsed(path))]
    names: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    choices = [node for node in nodes if isinstance(node, ast.IfExp)]
    tuples = [node for node in nodes if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple)]
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    return Contents(
        imports=tuple(names),
        classes=tuple(node.name for node in nodes if isinstance(node, ast.ClassDef)),
        prints=any(isinstance(function, ast.Name) and function.id == "print" for function in calls),
        choices=len(choices),
        nested_lines=tuple(
            node.lineno for node in choices if sum(isinstance(each, ast.IfExp) for each in ast.walk(node)) > 1
        ),
        tuple_assignments=sum(isinstance(node.value, ast.Tuple) for node in tuples),
    )


def parsed(path: Path) -> ast.Module:
    """Return the tree of a module."""
    try:
        return ast.parse(path.read_text())
    except SystemError:  # CPython 3.11 now and then miscounts its own recursion (gh-106905)
        return ast.parse(path.read_text())


@cache
def known_modules() -> frozenset[str]:
    """Return the names of all modules below the package."""
    return frozenset(dotted(module) for module in modules())


def inner(path: Path) -> Iterator[str]:
    """Yield the modules of this package that a module imports, as dotted names below it."""
    known = known_modules()
    for name in contents(path).imports:
        below = name.removeprefix("polythrottle.") if name.startswith("polythrottle.") else None
        while below and below not in known:
            below = below.rpartition(".")[0]
        if below:
            yield below


def top(name: str) -> str:
    """Return the first part of a dotted name."""
    return name.partition(".")[0]


def allowed(here: str, there: str) -> bool:
    """Return whether the drawing of the house has an edge from one module to another."""
    if top(here) == top(there) or top(there) in EDGES[top(here)]:
        return True
    return any(f"{here}.".startswith(f"{narrow}.") and top(there) == package for narrow, package in NARROW)


def test_a_module_imports_only_what_its_layer_may() -> None:
    """The drawing of the house is complete: no edge besides, and none that nobody needs any more."""
    edges = {(dotted(path), name) for path in modules() for name in inner(path)}
    assert [f"{here} -> {name}" for here, name in sorted(edges) if not allowed(here, name)] == []
    for narrow, package in NARROW:
        assert any(f"{here}.".startswith(f"{narrow}.") and top(name) == package for here, name in edges), narrow


def test_the_drawing_names_every_package() -> None:
    """A new package is put into the drawing before it is used; at the root lie two modules."""
    assert {top(dotted(path)) for path in modules()} == set(EDGES)
    assert {path.stem for path in PACKAGE.glob("*.py")} == {"__init__", "__main__"}


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
    used = [(dotted(path), name) for path in modules() for name in contents(path).imports if top(name) in HEAVY]
    assert [f"{here} imports {name}" for here, name in used if top(here) not in HEAVY[top(name)]] == []


def test_only_the_command_line_prints() -> None:
    """Print is for cli alone."""
    assert [dotted(path) for path in modules() if top(dotted(path)) != "cli" and contents(path).prints] == []


def test_modules_stay_of_a_size_to_read() -> None:
    """A module stops at 600 lines; ruff counts the statements of a function."""
    assert [dotted(path) for path in modules() if path.read_text().count("\n") > 600] == []


def test_a_class_name_is_in_two_modules_at_most() -> None:
    """A name that three modules share says nothing of what it is; the lab's studies stand apart."""
    places: dict[str, set[str]] = {}
    for path in modules():
        if top(dotted(path)) != "lab":
            for name in contents(path).classes:
                places.setdefault(name, set()).add(dotted(path))
    assert {name: sorted(where) for name, where in places.items() if len(where) > 2} == {}


TIDY = ("api", "board", "cluster", "domain", "inspect", "optimize", "report", "training", "cli.cluster")
"""Packages that keep to the density a reader can follow."""


def test_choices_within_choices_are_statements() -> None:
    """No conditional expression stands within another."""
    assert [f"{dotted(path)}:{line}" for path in modules() for line in contents(path).nested_lines] == []


@pytest.mark.parametrize("package", TIDY)
def test_long_choices_are_statements(package: str) -> None:
    """At most ten conditional expressions stand in 1,000 lines; tuples are not assigned to save lines."""
    paths = [path for path in modules() if f"{dotted(path)}.".startswith(f"{package}.")]
    lines = sum(path.read_text().count("\n") for path in paths)
    assert sum(contents(path).choices for path in paths) <= lines / 100
    assert sum(contents(path).tuple_assignments for path in paths) <= lines / 1000


def test_nothing_imports_torch_until_a_study_needs_it() -> None:
    """The package, the command line and the catalogue load neither torch nor matplotlib."""
    code = (
        "import sys, polythrottle, polythrottle.cli.commands, polythrottle.api.search, polythrottle.catalog;"
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


def test_a_daemon_loads_what_reads_metrics_when_it_must() -> None:
    """Not before a source of requests is opened that reads them, or somebody asks for its own."""
    code = (
        "import sys, polythrottle.cli.daemon_process, polythrottle.daemon.startup, polythrottle.daemon.web.server\n"
        "from polythrottle.daemon.traffic.sources import open_traffic\n"
        "for text in ('report', 'proxy:http://127.0.0.1:9')[: int(sys.argv[1])]:\n"
        "    open_traffic(text).close()\n"
        "print('prometheus_client' in sys.modules)"
    )
    for opened, loaded in ((1, "False"), (2, "True")):
        words = [sys.executable, "-c", code, str(opened)]
        assert subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip() == loaded
