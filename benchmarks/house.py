"""Count what the shipped package is made of: lines, modules, imports between packages, density and comments.

``python benchmarks/house.py [PACKAGE …]`` prints the whole and each package below ``polythrottle/`` that is named.
Tests and `lab` are left out. A comment counts wherever it stands; whether it says why is for a reader to judge.
A comment at the first column with a blank line below it is the heading of a section: its lines are counted with the
others, and once more by themselves. What a string says right below a constant or field, mostly where its figure comes
from, is counted beside them.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Mapping, Sequence
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
        comments: Lines of them that are neither for a tool nor for the shell.
        headings: Of them, those in headings of sections.
        notes: Strings below constants and fields.
    """

    modules: int
    lines: int
    choices: int
    nested: int
    pairs: int
    comments: int
    headings: int
    notes: int

    def __str__(self) -> str:
        thousand = self.lines / 1000
        return (
            f"{self.modules} modules, {self.lines} lines; per 1,000: {self.choices / thousand:.1f} conditional "
            f"expressions ({self.nested} nested), {self.pairs / thousand:.2f} tuple assignments, "
            f"{self.comments / thousand:.1f} comments (of which {self.headings / thousand:.1f} in headings of "
            f"sections) and {self.notes / thousand:.1f} notes below constants"
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
    comments = [_comments(text) for text in texts]
    return Density(
        modules=len(texts),
        lines=lines,
        choices=len(choices),
        nested=inner,
        pairs=pairs,
        comments=sum(map(len, comments)),
        headings=sum(map(_headings, texts, comments)),
        notes=sum(map(_notes, nodes)),
    )


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


def _comments(text: str) -> dict[int, int]:
    """Return the column at which each line's comment begins."""
    return {
        token.start[0]: token.start[1]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT and not token.string.startswith(("# type:", "# noqa", "#!"))
    }


def _headings(text: str, comments: Mapping[int, int]) -> int:
    """Return how many lines of comments at the first column lead, through such lines alone, to a blank one."""
    lines = [*text.split("\n"), ""]
    headings = 0
    heading = False
    for number in sorted(comments, reverse=True):
        if comments[number] > 0:
            continue
        # lines[number] is the line after it, for lines are counted from one.
        if comments.get(number + 1) != 0:
            heading = not lines[number].strip()
        headings += heading
    return headings


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
    """Print the figures; of a package that is not there, that it is not."""
    pairs = imports_between()
    print(f"whole: {density(shipped())}")
    print(f"imports: {len(pairs)} pairs among {len(frozenset().union(*pairs))} packages")
    for name in sys.argv[1:]:
        paths = shipped(name)
        print(f"{name}: {density(paths) if paths else 'no shipped module lies there'}")


if __name__ == "__main__":
    main()
