"""What Python 3.8 cannot run, and which modules a program of the package may come to import."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "polythrottle"
_LATE = {"removeprefix", "removesuffix", "is_relative_to", "with_stem", "hardlink_to", "pairwise", "randbytes"}
_LAZY = "from __future__ import annotations"
_GENERIC = {"list", "dict", "tuple", "set", "frozenset", "type", "deque", "Popen", "Queue", "SimpleQueue", "PathLike"}


def evaluated(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield what runs when a module runs: everything but annotations."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns"):
                waiting += [
                    each for each in (value if isinstance(value, list) else [value]) if isinstance(each, ast.AST)
                ]


def too_new(text: str) -> Iterator[str]:
    """Yield what Python 3.8 cannot run and vermin does not see: generics and unions evaluated, later methods."""
    tree = ast.parse(text)
    collected = [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in ("collections.abc", "contextlib")
        for alias in node.names
    ]
    for node in evaluated(tree):
        name = getattr(getattr(node, "value", None), "id", "")
        generic = isinstance(node, ast.Subscript) and name in {*_GENERIC, *collected}
        late = isinstance(node, ast.Attribute) and node.attr in _LATE
        if generic or late or (isinstance(node, ast.BinOp) and is_union(node)):
            yield ast.unparse(node)
    # Annotations such as int | None would be evaluated, and only 3.10 knows them.
    if " | None" in text and _LAZY not in text:
        yield f"annotations without {_LAZY}"


def is_union(node: ast.BinOp) -> bool:
    """Return whether an expression is a union of types, as far as its own names tell; classes have capital letters."""
    names = [getattr(side, "id", "") for side in (node.left, node.right)]
    known = any(name in {*_GENERIC, "int", "float", "str", "bool", "bytes"} for name in names)
    classes = any(name[:1].isupper() and not name.isupper() for name in names)
    return isinstance(node.op, ast.BitOr) and (known or classes)


def newer_than_3_8(paths: Iterable[Path]) -> str:
    """Return what vermin says of files that need more than Python 3.8; "" if it says nothing."""
    program = str(Path(sys.executable).parent / "vermin")
    # A member called "file" is no sign of Python 2, which it takes it for.
    vermin = [program, "--quiet", "--violations", "--no-tips", "--target=3.8-", "--exclude", "file"]
    done = subprocess.run([*vermin, *map(str, paths)], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode else ""


def file_of(module: str) -> Path | None:
    """Return a module's file; None if there is no such module in the package."""
    place = PACKAGE.parent / module.replace(".", "/")
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


def closure(entries: Iterable[str], left_out: tuple[str, ...]) -> dict[str, Path]:
    """Return every module that some modules may import, at once or later, with its file.

    Args:
        entries: Where to begin.
        left_out: Modules and packages that are not gone into.
    """
    known: dict[str, Path] = {}
    waiting = [*entries]
    while waiting:
        module = waiting.pop()
        path = file_of(module)
        if path is None or module in known or f"{module}.".startswith(tuple(f"{each}." for each in left_out)):
            continue
        known[module] = path
        waiting += [module.rpartition(".")[0], *_imported(ast.parse(path.read_text()))]
    return known


def _imported(tree: ast.AST) -> Iterator[str]:
    """Yield the modules that are imported when something runs, so not what types alone need."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        yield from _imported(node)
