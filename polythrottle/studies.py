"""Where studies are kept: which journal a study goes into, and what it may learn from."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from polythrottle import journal as journals
from polythrottle.errors import BadFile, InvalidInput
from polythrottle.journal import Journal
from polythrottle.past import Past, named, recalled, stored
from polythrottle.plan import LEARNERS, Plan
from polythrottle.setup import slug, workload_name
from polythrottle.state import state_dir
from polythrottle.study import Study


@contextlib.contextmanager
def open_study(study: Study, path: Path | None, fresh: bool, plan: Plan) -> Iterator[tuple[Journal, Past]]:
    """Open the study's journal: the given file, or the newest of this problem that is not finished, or a new one.

    With it comes what there is to learn from: for a new study what is there now, for another what it began with.

    Args:
        study: Without trials.
        path: The given file; None for the usual place under the state folder.
        fresh: Whether to start a new study even if an unfinished one is there.
        plan: Kept in the journal of a new study.

    Raises:
        InvalidInput: If a new study is wanted in a file that holds one, or the history cannot be used.
        BadFile: If the file is not a journal, or that of another study, or the history cannot be read.
        StorageError: If the file cannot be written.
    """
    path = path or _default_path(study, fresh, plan.variant)
    if fresh and journals.holds_study(path):
        raise InvalidInput(f"{path} holds a study already; give a new file or leave --fresh out")
    if not journals.holds_study(path):
        past = _past(study, plan)
        plan = replace(plan, lessons=tuple(lesson.line() for lesson in past.lessons))
        with Journal.create(path, study, plan.line()) as kept:
            yield kept, past
        return
    with Journal.reopen(path) as kept:
        begun = Plan.of(kept.plan)
        check_same_problem(path, kept.study, study)
        _same_means(path, begun, plan)
        yield kept, recalled(begun.lessons)


def _past(study: Study, plan: Plan) -> Past:
    """Return what a new study can learn from; a table is replayed without unless something is named."""
    if study.method not in LEARNERS:
        return Past()
    if plan.history is not None:
        return named([Path(path) for path in plan.history], study.problem)
    return Past() if study.problem.recorded else stored(state_dir() / "studies", study.problem)


def _same_means(path: Path, begun: Plan, asked: Plan) -> None:
    """Check that a study goes on with the risk and the history it was begun with."""
    pairs = (("risk", begun.risk, asked.risk), ("history", begun.history, asked.history))
    if begun.priors != asked.priors:
        raise BadFile(
            f"{path} is the journal of another problem: it was begun with other priors. Give another --journal"
        )
    for name, was, now in pairs:
        if was != now:
            raise BadFile(
                f"{path} is the journal of another problem: its {name} is {_means(was)}, not {_means(now)}. "
                f"Give another --journal"
            )


def _means(value: float | tuple[str, ...] | None) -> str:
    if isinstance(value, tuple):
        return ", ".join(value) or "none"
    return "the default" if value is None else f"{value:g}"


def _default_path(study: Study, fresh: bool, variant: str) -> Path:
    problem = study.problem
    folder = state_dir() / "studies" / slug(problem.device) / workload_name(problem)
    number = 1
    while True:
        words = (problem.fingerprint, slug(study.method), str(study.seed), variant, str(number))
        path = folder / f"{'-'.join(filter(None, words))}.jsonl"
        if not journals.holds_study(path) or not (fresh or journals.is_finished(path)):
            return path
        number += 1


def check_same_problem(path: Path, kept: Study, asked: Study) -> None:
    """Check that a journal's study is the one that is asked for.

    Args:
        path: The journal, for the message.
        kept: What it holds.
        asked: What is wanted.

    Raises:
        BadFile: If problem, method or seed differ; says how.
    """
    if (kept.problem.fingerprint, kept.method, kept.seed) == (asked.problem.fingerprint, asked.method, asked.seed):
        return
    pairs = {
        "device": (kept.problem.device, asked.problem.device),
        "workload": (kept.problem.workload, asked.problem.workload),
        "SLO": (", ".join(map(str, kept.problem.constraints)), ", ".join(map(str, asked.problem.constraints))),
        "objective": (kept.problem.objective, asked.problem.objective),
        "method": (kept.method, asked.method),
        "seed": (kept.seed, asked.seed),
        "window": (kept.problem.window, asked.problem.window),
        "arrivals": (kept.problem.arrivals, asked.problem.arrivals),
    }
    if kept.problem.space.fingerprint != asked.problem.space.fingerprint:
        pairs["space"] = (f"{len(kept.problem.space)} points", f"{len(asked.problem.space)} other points")
    told = [f"its {name} is {was}, not {now}" for name, (was, now) in pairs.items() if was != now]
    before, after = kept.problem.content, asked.problem.content
    told += [f"its {name} has changed" for name in {**before, **after} if before.get(name) != after.get(name)]
    raise BadFile(f"{path} is the journal of another problem: {'; '.join(told)}. Give another --journal")
