"""Earlier studies a search may learn from: tables and journals, named or found beside a subject."""

import glob
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from polythrottle import past
from polythrottle.bench.subjects import TableFile
from polythrottle.errors import BadFile
from polythrottle.problem import Problem
from polythrottle.study import Study
from polythrottle.tables import ENDINGS

LEAVE_ONE_OUT = "leave-one-out"
_JOURNALS = (".jsonl",)


def files(pattern: str) -> tuple[Path, ...]:
    """Return the tables and journals a folder, a file or a pattern means, folders with all below them; sorted.

    Raises:
        BadFile: If it means none, one of them cannot be read, or none holds a completed trial.
    """
    path = Path(pattern)
    found = path.rglob("*") if path.is_dir() else map(Path, glob.glob(pattern, recursive=True))
    named = sorted(path for path in found if path.name.endswith((*ENDINGS, *_JOURNALS)) and path.is_file())
    if not named:
        raise BadFile(f"{pattern} holds no history; give {LEAVE_ONE_OUT}, or tables (.csv) and journals (.jsonl)")
    told = tuple(path for path in named if study_of(path).completed)
    if not told:
        raise BadFile(f"{pattern} holds no completed trial to learn from")
    return told


def siblings(path: Path, among: Iterable[Path] = ()) -> tuple[Path, ...]:
    """Return the other tables of the same source and device: those beside a table, and those among some others.

    Args:
        path: The table; ``<source>__<device>__<workload>.csv``, without siblings if it is named otherwise.
        among: Tables elsewhere.
    """
    source, _, rest = path.name.partition("__")
    device, parted, _ = rest.partition("__")
    if not parted:
        return ()
    beside = (one for ending in ENDINGS for one in path.parent.glob(f"{glob.escape(f'{source}__{device}__')}*{ending}"))
    near = {one.resolve() for one in (*beside, *among) if one.name.startswith(f"{source}__{device}__")}
    return tuple(sorted(near - {path.resolve()}))


def nearest(paths: Iterable[Path], problem: Problem, own: Path | None = None) -> tuple[Path, ...]:
    """Return the files to learn a problem from, at most `past.MOST`: those of its device first, then of its knobs.

    Args:
        paths: Tables and journals.
        problem: What will be searched.
        own: The table that poses it, left out: nobody learns from the answer.
    """
    others = [path for path in paths if own is None or path.resolve() != own.resolve()]
    return tuple(sorted(others, key=lambda path: (*_strangeness(study_of(path).problem, problem), path))[: past.MOST])


def _strangeness(one: Problem, two: Problem) -> tuple[bool, bool]:
    return one.device != two.device, set(one.space.names) != set(two.space.names)


@lru_cache(maxsize=512)
def study_of(path: Path) -> Study:
    """Return the study a table or a journal amounts to; a table's device and workload are those its name tells.

    Raises:
        BadFile: If it is neither.
    """
    told = past.lesson(path).study
    if not path.name.endswith(ENDINGS):
        return told
    device, workload = TableFile(path).words
    return replace(told, problem=replace(told.problem, device=device, workload=workload))
