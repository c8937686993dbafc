"""Count what the shipped package is made of: lines, modules, imports between packages, density and comments.

``python benchmarks/house.py [PACKAGE …]`` prints the whole and each package below ``polythrottle/`` that is named.
Tests and `lab` are left out. A comment counts wherever it stands; whether it says why is for a reader to judge. What a
string says right below a constant or field, mostly where its figure comes from, is counted beside them.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "polythrottle"


@dataclass(frozen=True)
class Density:
    """What some modules are made of.

    Attributes:
        modules: How many.
        lines: All of them, blank ones and docstrings included.
        choices: Conditional expressions.
        nested: Of them, those within another.
        pairs: Assignments of a tuple to a tuple.
        comments: That are neither for a tool nor for the shell.
        notes: Strings below constants and fields.
    """

    modules: int
    lines: int
    choices: int
    nested: int
    pairs: int
    comments: int
    notes: int

    def __str__(self) -> str:
        thousand = self.lines / 1000
        return (
            f"{self.modules} modules, {self.lines} lines; per 1,000: {self.choices / thousand:.1f} conditional "
            f"expressions ({self.nested} nested), {self.pairs / thousand:.2f} tuple assignments, "
            f"{self.comments / thousand:.1f} comments and {self.notes / thousand:.1f} notes below constants"
        )


def shipped(below: str = "") -> list[Path]:
    """Return the shipped modules below a package or module, such as ``cluster`` or ``cli/finetune.py``."""
    path = PACKAGE / below
    if path.is_file():
        return [path]
    return [each for each in sorted(path.rglob("*.py")) if "lab" not in each.relative_to(PACKAGE).parts]


def density(paths: Sequence[Path]) -> Density:
    """Return what modules are made of."""
    texts = [path.read_text() for path in paths]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    choices = [node for node in nodes if isinstance(node, ast.IfExp)]
    inner = sum(isinstance(node, ast.IfExp) for choice in choices for node in ast.walk(choice)) - len(choices)
    pairs = sum(
        isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
        for node in nodes
    )
    lines = sum(text.count("\n") for text in texts)
    notes = sum(map(_notes, nodes))
    return Density(len(texts), lines, len(choices), inner, pairs, sum(map(_comments, texts)), notes)


def _notes(node: ast.AST) -> int:
    body = getattr(node, "body", None)
    if not isinstance(body, list):
        return 0
    return sum(
        isinstance(named, ast.Assign | ast.AnnAssign)
        and isinstance(said, ast.Expr)
        and isinstance(said.value, ast.Constant)
        for named, said in pairwise(body)
    )


def _comments(text: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(
        token.type == tokenize.COMMENT and not token.string.startswith(("# type:", "# noqa", "#!")) for token in tokens
    )


def imports_between() -> set[frozenset[str]]:
    """Return the pairs of packages and root modules of which one imports the other, lab included."""
    found: set[frozenset[str]] = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        here = path.relative_to(PACKAGE).with_suffix("").parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                root, _, below = name.partition(".")
                there = below.partition(".")[0]
                if root == "polythrottle" and there != here and (PACKAGE / there).is_dir():
                    found.add(frozenset({here, there}))
    return found


def main() -> None:
    """Print the figures."""
    pairs = imports_between()
    print(f"whole: {density(shipped())}")
    print(f"imports: {len(pairs)} pairs among {len(frozenset().union(*pairs))} packages")
    for name in sys.argv[1:]:
        print(f"{name}: {density(shipped(name))}")


if __name__ == "__main__":
    main()
