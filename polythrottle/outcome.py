"""What a tuning came to, and the files it leaves: the profile, the report, and which of two profiles stays."""

import contextlib
import datetime
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from polythrottle import journal as journals
from polythrottle.errors import BadFile, SloUnmet, StorageError
from polythrottle.identity import disagreement, identity_of
from polythrottle.journal import Journal
from polythrottle.past import Lesson, Past
from polythrottle.plan import Plan
from polythrottle.ports import Device, Recorded
from polythrottle.profile import Profile, Verdict, verdict
from polythrottle.setup import slug
from polythrottle.study import Study


@dataclass(frozen=True)
class Tuning:
    """What a tuning came to.

    Args:
        study: Every trial.
        profile: The answer, or None if no trial held the SLO.
        unmet: If so, which trial came closest and by how much.
        profile_path: Where a profile is now: the answer, or an older one that is better; None if there is none.
        journal_path: The study's journal.
        report_path: The HTML report.
        boundary: What the joules cover.
        unwritten: Why the profile or the report could not be written; empty if both were.
        ended: Why there were no more trials.
        history: The earlier studies it learnt from.
        risk: Highest chance of breaking a limit that a trial might have; None if that was left to the method.
        older: What became of a profile that was there before, and why; None if there was none to speak of.
        kept: Whether that one stays, so that the answer is in journal and report alone.
        unladdered: Why the answer holds no points along load; empty if it does.
    """

    study: Study
    profile: Profile | None
    unmet: str | None
    profile_path: Path | None
    journal_path: Path
    report_path: Path | None
    boundary: str
    unwritten: tuple[str, ...] = ()
    ended: str | None = None
    history: tuple[Lesson, ...] = ()
    risk: float | None = None
    older: str | None = None
    kept: bool = False
    unladdered: str = ""


def conclude(journal: Journal, board: Device, plan: Plan, past: Past, force: bool) -> Tuning:
    """Write profile and report of a study that has ended; what cannot be written is said, and loses nothing else.

    Args:
        journal: Of the study.
        board: What it ran on.
        plan: What was intended.
        past: What it learnt from.
        force: Whether to replace a profile that is better.
    """
    from polythrottle.report import write_report

    study, page = journal.study, report_path(journal.path)
    recorded = {"window": "as recorded"} if isinstance(board, Recorded) else {}
    facts = {**Plan.of(journal.plan).facts(journal.finished), **recorded}
    answer = _Answer.of(study, board, journal.path, plan.out or _profile_path(study).absolute(), force)
    unreported = _refusal(partial(write_report, facts=facts), study, page)
    return Tuning(
        study=study,
        profile=answer.profile,
        unmet=answer.unmet,
        profile_path=answer.path,
        journal_path=journal.path,
        report_path=page if unreported is None else None,
        boundary=board.boundary,
        unwritten=tuple(why for why in (answer.unwritten, unreported) if why is not None),
        ended=journal.finished,
        history=past.lessons,
        risk=plan.risk,
        older=answer.older,
        kept=answer.kept,
        unladdered=answer.unladdered,
    )


@dataclass(frozen=True)
class _Answer:
    """The profile of a study, and what became of it and of the one that was there; the fields are those of `Tuning`."""

    profile: Profile | None = None
    unmet: str | None = None
    path: Path | None = None
    unwritten: str | None = None
    older: str | None = None
    kept: bool = False
    unladdered: str = ""

    @classmethod
    def of(cls, study: Study, board: Device, journal: Path, out: Path, force: bool) -> "_Answer":
        """Return the answer of a study, written unless a better one is there."""
        from polythrottle.catalog.profiles import write_profile
        from polythrottle.rungs import Offer

        try:
            profile = _marked(Profile.of(study, _provenance(journal)), board)
        except SloUnmet as error:
            return cls(unmet=str(error))
        offer = Offer.of(study)
        profile = replace(profile, ladder=offer.ladder)
        older, kept = _older(study, profile, journal, out, force)
        unwritten = None if kept else _refusal(write_profile, profile, out)
        return cls(profile, None, out if unwritten is None else None, unwritten, older, kept, offer.why)


def _marked(profile: Profile, board: Device) -> Profile:
    """Return a profile that says what it is for: which hardware, and which knobs are not the hardware's."""
    served = tuple(name for name in profile.point if name not in board.space.names)
    return replace(profile, identity=identity_of(board), workload_knobs=served)


def _older(study: Study, profile: Profile, journal: Path, out: Path, force: bool) -> tuple[str | None, bool]:
    """Return what there is to say of a profile that is there already, and whether it stays."""
    from polythrottle.catalog.profiles import read_profile

    if not out.exists():
        return None, False
    try:
        found = read_profile(out)
    except BadFile:
        return "a file that could not be read as a profile", False
    if found.provenance.get("journal") == str(journal):
        return None, False
    other = disagreement(found.identity, profile.identity) if found.identity else None
    between = verdict(found, study) if other is None else Verdict(False, f"it was for {other}")
    kept = between.keeps and not force
    return f"the profile of {found.provenance.get('date', 'before')}: {between.words}", kept


def report_path(journal: Path) -> Path:
    """Return where the report of a journal goes: beside it, ``.html`` in place of ``.jsonl``."""
    if journal.suffix == ".html":
        return journal.with_name(journal.name + ".report.html")
    return journal.with_name(journal.name.removesuffix(".jsonl") + ".html")


def report_facts(journal: Path) -> dict[str, str]:
    """Return what a journal tells that is not in its study: why it ended, the risk taken, what was learnt from."""
    with contextlib.suppress(BadFile):
        return Plan.of(journals.heading(journal)["plan"]).facts(journals.ending(journal))
    return {}


def polythrottle_version() -> str:
    """Return the version of the installed package, or ``unknown`` in a bare checkout."""
    try:
        return version("polythrottle")
    except PackageNotFoundError:
        return "unknown"


def _refusal(write: Callable[[Any, Path], None], what: object, path: Path) -> str | None:
    """Write something and return None, or why it could not be written."""
    try:
        write(what, path)
    except StorageError as error:
        return str(error)
    return None


def _provenance(journal: Path) -> dict[str, str | int]:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"journal": str(journal), "date": today, "polythrottle": polythrottle_version()}


def _profile_path(study: Study) -> Path:
    device, workload = slug(study.problem.device), slug(study.problem.workload)
    return Path("profiles/tuned") / device / f"{workload}.toml"
