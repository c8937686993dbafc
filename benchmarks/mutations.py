"""Whether `make test` notices a broken module: ``python benchmarks/mutations.py --sample 50 --seed 1``.

Draws modules at random and breaks one place in each: a condition negated, a comparison or a sum turned round, a result
replaced. First run the files of tests that are about such a module, by their names and by what they import. For what
none of them notices, one run of `make test` tells which tests come by, also in processes that they start, and those are
run. A test counts only if it passes with the module as it was. What is left alone, since no test could notice it or
none should: log messages, ``__repr__``, annotations, and what is returned by a function that returns None. Prints each
mutant that no test notices; whether such a one can be noticed at all is for a reader to judge. Works in a copy of the
checkout.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "polythrottle"
NEAREST_FILES = (1, 4)
"""So many files of tests that are about a module are run first, and then so many."""
FIRST_TESTS = 60
"""Of the tests that come by a place, so many are run before the others."""
TEST_TIMEOUT_S = 90
"""A mutant may wait for ever; no test of `make test` takes this long."""
EVERYTHING = ["everything"]
LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical"}
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
PROBE = """
def _came_by(place, known=set()):
    import os
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if (place, test) not in known:
        known.add((place, test))
        try:
            file = os.open("{folder}/" + str(place), os.O_WRONLY | os.O_APPEND)
            os.write(file, (test + "\\n").encode())
            os.close(file)
        except OSError:
            pass
"""
"""What a module is given to note which tests come by its places; pytest tells every process which one runs."""


@dataclass(frozen=True)
class Mutant:
    """One broken place.

    Args:
        path: The module, relative to the checkout.
        line: Where, from 1.
        span: The first byte of the place, and the one after it.
        before: The source of the place as it was.
        after: The source as it is now.
        text: The whole module, broken.
    """

    path: Path
    line: int
    span: tuple[int, int]
    before: str
    after: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {' '.join(self.before.split())}  ->  {self.after}"


def places(
    node: ast.AST, function: ast.FunctionDef | ast.AsyncFunctionDef | None = None
) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield what may be broken inside functions, with what to put there."""
    if spared(node):
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function = node
    elif function is not None:
        yield from replacements(node, function)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from places(child, function)


def spared(node: ast.AST) -> bool:
    """Return whether nothing below a node is to be broken: log messages and what only a debugger shows."""
    if isinstance(node, ast.FunctionDef):
        return node.name == "__repr__"
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in LOG_METHODS
        and "log" in ast.unparse(node.func.value).lower()
    )


def replacements(
    node: ast.AST, function: ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield what is to be put in the place of one node of a function, or of one part of it."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        yield node, ast.Compare(node.left, [SWAPS[type(node.ops[0])](), *node.ops[1:]], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        yield node, ast.BinOp(node.left, SWAPS[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield node, ast.BoolOp(SWAPS[type(node.op)](), node.values)
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        yield node.test, ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Return) and node.value is not None:
        if function.returns is not None and ast.unparse(function.returns) in ("None", "NoReturn", "Never"):
            return
        if isinstance(node.value, ast.Constant):
            yield node.value, ast.Constant(not node.value.value)
        elif not (isinstance(node.value, ast.Name) and node.value.id == "NotImplemented"):
            yield node.value, ast.Constant(None)


def broken(path: Path, rng: random.Random) -> Mutant | None:
    """Return a module with one place of it broken, or None if it has none."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    possible = list(places(ast.parse(source)))
    for node, new in rng.sample(possible, len(possible)):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        before = source[start:end].decode(errors="replace")
        after = f"({ast.unparse(ast.fix_missing_locations(new))})"
        text = b"".join([source[:start], after.encode(), source[end:]]).decode()
        # Python 3.11 and older tell wrong places inside an f-string.
        if parsed(f"({before}\n)") == ast.dump(ast.Expr(node)) and parsed(text) is not None:
            return Mutant(path.relative_to(ROOT), node.lineno, (start, end), before, after, text)
    return None


def parsed(source: str) -> str | None:
    """Return what Python understands of a source, or None if it is not Python."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    return ast.dump(tree.body[0]) if tree.body else None


def draw(count: int, seed: int) -> list[Mutant]:
    """Return mutants of as many modules, each module once before any is drawn again."""
    rng = random.Random(seed)
    modules = sorted((ROOT / PACKAGE).rglob("*.py"))
    drawn: list[Mutant] = []
    while len(drawn) < count:
        for path in rng.sample(modules, len(modules)):
            if len(drawn) < count and (mutant := broken(path, rng)) is not None:
                drawn.append(mutant)
    return drawn


def copy(folder: Path) -> Path:
    """Copy the checkout into a folder, with the measured tables beside it as they are."""
    skipped = shutil.ignore_patterns(
        ".venv", ".git", ".ray", ".services", ".mutations", "site", "__pycache__", ".*_cache"
    )
    shutil.copytree(ROOT, folder / "main", ignore=skipped, symlinks=True)
    shared = ROOT.parent / "shared"
    if shared.exists():
        (folder / "shared").symlink_to(shared.resolve())
    return folder / "main"


def pytest(words: Sequence[str], checkout: Path, out: Path) -> tuple[int, str]:
    """Return pytest's exit status and what it printed; it is ended after an hour."""
    with out.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", *words],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(3600.0)
        except subprocess.TimeoutExpired:
            print("pytest did not end", flush=True)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return process.wait(), out.read_text()


def with_probes(source: bytes, spans: dict[int, tuple[int, int]], folder: Path) -> str:
    """Return a module that notes in files of a folder who comes by its places, which have numbers."""
    pieces = [(start, 1, -end, f"(_came_by({number}), (".encode()) for number, (start, end) in spans.items()]
    pieces += [(end, 0, -start, b"))[1]") for start, end in spans.values()]
    for offset, _, _, piece in sorted(
        pieces, reverse=True
    ):  # from the end on; of what begins together, the outer first
        source = source[:offset] + piece + source[offset:]
    text = source.decode()
    # The function comes before everything that may call it.
    first = next(
        node
        for node in ast.parse(text).body
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        and not (isinstance(node, ast.ImportFrom) and node.module == "__future__")
    )
    lines = text.splitlines(keepends=True)
    line = min([first.lineno, *(each.lineno for each in getattr(first, "decorator_list", []))]) - 1
    return "".join([*lines[:line], PROBE.format(folder=folder), *lines[line:]])


def passing_by(mutants: Sequence[Mutant], folder: Path) -> dict[Mutant, list[str]]:
    """Run `make test` and return which tests come by each place."""
    checkout = copy(folder)
    _, listed = pytest(["--collect-only"], checkout, folder / "out")
    names = {line for line in listed.splitlines() if "::" in line}
    print(f"{len(names)} tests; one run of them all tells who comes by", flush=True)
    spans: dict[Path, dict[int, tuple[int, int]]] = defaultdict(dict)
    for number, mutant in enumerate(mutants):
        (folder / str(number)).touch()
        spans[mutant.path][number] = mutant.span
    for path, some in spans.items():
        (checkout / path).write_text(with_probes((checkout / path).read_bytes(), some, folder))
    began = time.monotonic()
    _, told = pytest(["-n", "2", "--dist", "worksteal"], checkout, folder / "out")
    print(f"{time.monotonic() - began:.0f} s: {told.splitlines()[-1]}", flush=True)
    return {
        mutant: ordered(mutant, names & set((folder / str(number)).read_text().splitlines()))
        for number, mutant in enumerate(mutants)
    }


def ordered(mutant: Mutant, tests: set[str]) -> list[str]:
    """Return tests, one of each file before the second of any, the module's own file first."""
    by_file = defaultdict(list)
    for test in sorted(tests):
        by_file[test.partition("::")[0]].append(test)
    files = sorted(by_file, key=lambda name: (mutant.path.stem not in name, len(by_file[name]), name))
    return [test for test in chain(*zip_longest(*(by_file[name] for name in files))) if test is not None]


def nearest(mutant: Mutant) -> list[str]:
    """Return the files of tests that are about a module, the nearest first."""
    parts = mutant.path.with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    package, name = ".".join(parts[:-1]), parts[-1]
    named = re.compile(rf"{re.escape(package)}(\.| import (\(\s*)?([\w, \n]*, ?)?){re.escape(name)}\b")
    ranks = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        folder = parts[-2] if package else name  # the package itself lies in none
        about = 4 * bool(named.search(text)) + 3 * (name in path.stem) + 2 * (folder in path.stem) + (package in text)
        if about > 1 or (about and package != PACKAGE):
            ranks[str(path.relative_to(ROOT))] = (-about, text.count(f"{PACKAGE}."), path.name)
    return sorted(ranks, key=lambda file: ranks[file])


class Copy:
    """A copy of the checkout in which one module after the other is broken.

    Args:
        folder: Where to make it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkout = copy(folder)

    def failing(self, mutant: Mutant, tests: Sequence[str], *words: str) -> list[str]:
        """Return the first of these tests that fails with the mutant, or several at once; none if all pass."""
        if not tests:
            return []
        kept = self._put(mutant.path, mutant.text)
        try:
            return self.run([f"--timeout={TEST_TIMEOUT_S}", "-x", *words, *tests])
        finally:
            self._put(mutant.path, kept)

    def _put(self, path: Path, text: str) -> str:
        """Put a module's text in place, and return what it was."""
        place = self.checkout / path
        kept = place.read_text()
        place.write_text(text)
        # What Python compiled tells by the second and the size alone whether it is of this text.
        for compiled in (place.parent / "__pycache__").glob(f"{place.stem}.*"):
            compiled.unlink()
        return kept

    def run(self, words: Sequence[str]) -> list[str]:
        """Return the tests, or files, that failed; `EVERYTHING` if pytest itself did not run."""
        cache = self.folder / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        status, _ = pytest(["-o", f"cache_dir={cache}", *words], self.checkout, self.folder / "out")
        failures = cache / "v" / "cache" / "lastfailed"
        if failures.exists():
            return list(json.loads(failures.read_text()))
        return [] if status in (0, 5) else EVERYTHING


def near(copied: Copy, mutants: Sequence[Mutant]) -> list[Mutant]:
    """Return what the files of tests that are about each module do not notice."""
    noticed: dict[Mutant, list[str]] = {}
    for number, mutant in enumerate(mutants, 1):
        began = time.monotonic()
        files, (few, more) = nearest(mutant), NEAREST_FILES
        noticed[mutant] = copied.failing(mutant, files[:few]) or copied.failing(mutant, files[few : few + more])
        told = noticed[mutant][0] if noticed[mutant] else "not noticed by the nearest tests"
        print(f"{number:3d} {mutant}\n    {time.monotonic() - began:.0f} s, {told}", flush=True)
    sure = set(chain(*noticed.values())) - set(EVERYTHING)
    unsure = copied.run(sorted(sure)) if sure else []
    if unsure:
        print("fail also as it was:", *unsure, sep="\n", flush=True)
    return [mutant for mutant, tests in noticed.items() if not tests or set(tests) & set(unsure)]


def far(copied: Copy, mutants: Sequence[Mutant], folder: Path) -> list[Mutant]:
    """Return what no test of `make test` that comes by notices."""
    survived = []
    for mutant, tests in passing_by(mutants, folder).items():
        sound = list(tests)
        while True:
            failed = copied.failing(mutant, sound[:FIRST_TESTS]) or copied.failing(
                mutant, sound[FIRST_TESTS:], "-n", "2"
            )
            unsure = set(copied.run(failed)) if failed and failed != EVERYTHING else set()
            if not unsure:
                break
            sound = [test for test in sound if test not in unsure]
        survived += [] if failed else [mutant]
        print(f"{mutant}\n    {failed[0] if failed else f'SURVIVED, {len(tests)} tests come by'}", flush=True)
    return survived


def main() -> None:
    """Draw, break, test, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=50, help="how many mutants")
    parser.add_argument("--seed", type=int, default=0, help="which ones")
    parser.add_argument("--list", action="store_true", help="print the mutants alone")
    given = parser.parse_args()
    mutants = draw(given.sample, given.seed)
    if given.list:
        print(*mutants, sep="\n")
        return
    with tempfile.TemporaryDirectory(prefix="mutations-") as name:
        copied = Copy(Path(name))
        left = near(copied, mutants)
        print(f"{len(left)} of {len(mutants)} are not noticed by the nearest tests", flush=True)
        folder = Path(name) / "probed"
        folder.mkdir()
        survived = far(copied, left, folder) if left else []
    print(f"{len(survived)} of {len(mutants)} survived (seed {given.seed})", *survived, sep="\n")


if __name__ == "__main__":
    main()
