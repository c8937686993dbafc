"""What a tuning came to, and the files it leaves: the profile, the report, and which of two profiles stays."""

import contextlib
import datetime
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from polythrottle.domain.error_budget import ErrorAccount
from polythrottle.domain.errors import BadFile, InvalidInput, SloUnmet, StorageError, UnknownName
from polythrottle.domain.measurement import EnergyKind, Measurement
from polythrottle.domain.ports import Device, Recorded
from polythrottle.domain.problem import Problem
from polythrottle.domain.profile import Profile, Verdict, verdict
from polythrottle.domain.study import Study, card_html
from polythrottle.domain.units import show, show_name, show_number
from polythrottle.storage import journal as journals
from polythrottle.storage.boards_journal import boards_of
from polythrottle.storage.identity import disagreement, identity_of
from polythrottle.storage.journal import Journal
from polythrottle.storage.paths import state_dir
from polythrottle.tuning.boards_together import BoardAnswer, BoardsView
from polythrottle.tuning.plan import StudyPlan
from polythrottle.tuning.setup import RUNS_ON, device_name, workload_name
from polythrottle.tuning.study_store import PriorStudies, PriorStudy

_PROFILE = re.compile(r"\.toml(\.bak[0-9]*)?$")
"""How the file of a profile ends: as it was written, or kept aside."""
_NAME = re.compile(r"[^/.@][^/@]*/[^/]+")


@dataclass(frozen=True, repr=False)
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
        unwritten: Why the profile, and then why the report, could not be written; empty if both were.
        ended: Why there were no more trials.
        history: The earlier studies it learnt from.
        risk: Chance that the search might have of breaking a limit; None if that was left to the method.
        older: What became of a profile that was there before, and why; None if there was none to speak of.
        kept: Whether that one stays, so that the answer is in journal and report alone.
        aside: Where it is kept now, if it gave way but would be missed; None if it is not kept elsewhere.
        unladdered: Why the answer holds no points along load; empty if it does.
        errors: What was spent of its error budget; None if it had none.
        boards: What the answer comes to on each board of several; empty where there was one.
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
    history: tuple[PriorStudy, ...] = ()
    risk: float | None = None
    older: str | None = None
    kept: bool = False
    aside: Path | None = None
    unladdered: str = ""
    errors: ErrorAccount | None = None
    boards: tuple[BoardAnswer, ...] = ()

    def __repr__(self) -> str:
        where = ""
        if self.profile_path is not None and not self.kept:
            where = f" -> {self.profile_path}"
        return f"<Tuning: {self.study!r}{where}>"

    def _repr_html_(self) -> str:
        problem = self.study.problem
        kinds = (trial.measurement.energy_kind for trial in self.study.completed if trial.measurement is not None)
        return card_html(f"{problem.workload} on {self.study.where}, tuned", self.lines(), kinds)

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield what a person wants to know of the tuning, each with its name: the study's lines, then the files."""
        yield from self.study.lines()
        yield "no answer", self.unmet or ""
        yield "ended", self.ended or ""
        yield "error budget", "" if self.errors is None else self.errors.words
        yield from board_words(self.boards, self.study).items()
        for name, path in (
            ("profile", self.profile_path),
            ("journal", self.journal_path),
            ("report", self.report_path),
        ):
            yield name, str(path or "")
        for problem in self.unwritten:
            yield "not written", problem

    def written_again(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield why each file could not be written, and the command that writes it to another place, FILE."""
        journal = str(self.journal_path)
        profile = ("polythrottle", "tune", "--resume", journal, "--out", "FILE")
        report = ("polythrottle", "report", journal, "--out", "FILE")
        problems = list(self.unwritten)
        unreported = [problems.pop()] if problems and self.report_path is None else []
        yield from ((problem, profile) for problem in problems)
        yield from ((problem, report) for problem in unreported)


def conclude(journal: Journal, board: Device, plan: StudyPlan, past: PriorStudies, force: bool) -> Tuning:
    """Write profile and report of a study that has ended; what cannot be written is said, and loses nothing else.

    Args:
        journal: Of the study.
        board: What it ran on.
        plan: What was intended.
        past: What it learnt from.
        force: Whether to replace a profile that is better.
    """
    # Loads Matplotlib, which only the end of a study needs.
    from polythrottle.report import write_report

    study = on_all_boards(journal.study, journal.path)
    page = report_path(journal.path)
    if isinstance(board, Recorded):
        recorded = {"window": "as recorded"}
    else:
        recorded = {}
    begun = StudyPlan.of(journal.plan)
    account = begun.account(study.problem, journal.spent)
    facts = {**begun.facts(journal.finished, study.problem.content.get(RUNS_ON), account), **recorded}
    answer = _Answer.of(study, board, journal.path, plan, force)
    applicable = answer.path
    if answer.kept:  # an older profile stands there, of which this report knows nothing
        applicable = None
    boards = _on_each(study, journal.study, journal.path)
    write = partial(write_report, facts=facts, profile=applicable, boards=board_words(boards, study))
    unreported = _refusal(write, study, page)
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
        aside=answer.aside,
        unladdered=answer.unladdered,
        errors=account,
        boards=boards,
    )


def _on_each(study: Study, measured: Study, journal: Path) -> tuple[BoardAnswer, ...]:
    """Return what the answer of a study comes to on each of several boards, by what was measured there."""
    boards = boards_of(journal)
    if not boards or (best := study.answered) is None:
        return ()
    return BoardsView(measured, boards).answers(best.point)


def board_words(answers: Iterable[BoardAnswer], study: Study) -> dict[str, str]:
    """Return what there is to say of each of several boards, by its URI, those that measured nothing last.

    Args:
        answers: What the answer comes to on each.
        study: Of all of them.
    """
    words = {answer.uri: answer.words for answer in answers}
    return {**words, **dict.fromkeys(study.unmeasured, "never measured, so that nothing is known of it")}


def boards_told(journal: Path) -> dict[str, str]:
    """Return what there is to say of each of several boards of a journal's study; nothing of one board.

    Raises:
        BadFile: If it cannot be read.
    """
    measured = journals.read(journal)
    study = on_all_boards(measured, journal)
    return board_words(_on_each(study, measured, journal), study)


@dataclass(frozen=True)
class _Answer:
    """The profile of a study, and what became of it and of the one that was there; the fields are those of `Tuning`."""

    profile: Profile | None = None
    unmet: str | None = None
    path: Path | None = None
    unwritten: str | None = None
    older: str | None = None
    kept: bool = False
    aside: Path | None = None
    unladdered: str = ""

    @classmethod
    def of(cls, study: Study, board: Device, journal: Path, plan: StudyPlan, force: bool) -> "_Answer":
        """Return the answer of a study, written unless a better one is there."""
        from polythrottle.tuning.measured_ladder import LadderOffer

        try:
            profile = _marked(Profile.of(study, {**_model(plan), **_provenance(journal)}), board)
        except SloUnmet as error:
            return cls(unmet=str(error))
        offer = LadderOffer.of(study)
        profile = replace(profile, ladder=offer.ladder)
        out = plan.out or usual_path(study.problem)
        older = _older(study, profile, journal, out)
        answer = cls(profile, path=out, unladdered=offer.why)
        if older is None:
            return answer._written(aside=False)
        answer = replace(answer, older=older.words, kept=older.keeps and not force)
        if answer.kept:
            return answer
        return answer._written(aside=bool(older.aside))

    def _written(self, aside: bool) -> "_Answer":
        """Return this answer once its profile is written, the one that was there kept beside it if it is to be."""
        from polythrottle.catalog.tuned_profiles import set_aside, write_profile

        assert self.profile is not None
        assert self.path is not None
        copy = None
        try:
            if aside:
                copy = set_aside(self.path)
            write_profile(self.profile, self.path)
        except StorageError as error:
            if copy is not None:  # the older profile is still in its place
                copy.unlink(missing_ok=True)
            return replace(self, path=None, unwritten=str(error), older=None)
        return replace(self, aside=copy)


def _marked(profile: Profile, board: Device) -> Profile:
    """Return a profile that says what it is for: which hardware, and which knobs are not the hardware's."""
    served = tuple(name for name in profile.point if name not in board.space.names)
    return replace(profile, identity=identity_of(board), workload_knobs=served)


def _older(study: Study, profile: Profile, journal: Path, out: Path) -> Verdict | None:
    """Return whether a profile that is there already is to stay, and what there is to say of it; None if nothing."""
    from polythrottle.catalog.tuned_profiles import read_profile

    if not out.exists():
        return None
    try:
        found = read_profile(out)
    except BadFile:
        return Verdict(False, "a file that could not be read as a profile")
    # Its own answer, from before it was continued: nothing to choose between.
    if found.provenance.get("journal") == str(journal):
        return None
    other = None
    if found.identity:
        other = disagreement(found.identity, profile.identity)
    if other is None:
        between = verdict(found, study)
    else:
        between = Verdict(False, f"it was for {other}")
    told = "; ".join(filter(None, (between.words, between.aside)))
    return replace(between, words=f"the profile of {found.provenance.get('date', 'before')}: {told}")


def find_study(name: str | Path) -> Path:
    """Return the journal of a study: a journal's path, a profile's file or name, or ``<device>/<workload>``.

    A bare ``<device>/<workload>`` means the newest study of both in the state folder.

    Args:
        name: Which study.

    Raises:
        UnknownName: If there is none of that name; names the nearest.
        BadFile: If it is a folder, or a profile whose journal is not here.
        InvalidInput: If the name is empty.
    """
    from polythrottle.catalog.tuned_profiles import named_patterns, named_profiles

    path = Path(name)
    text = str(name)
    if not text.strip():
        raise InvalidInput("the study's name is empty; name its journal, its profile, or <device>/<workload>")
    if path.is_file():
        if _PROFILE.search(path.name):
            return _journal_behind(path)
        return path
    if path.suffix == ".jsonl" or not _NAME.fullmatch(text):
        if path.is_dir():
            raise BadFile(f"{name} is a folder, so is not a regular file and no study's journal")
        return path  # a path that reading says is not there
    profiles: list[Path] = []
    if "@" in text:
        profiles += named_profiles(text)
    if profiles:
        return _journal_behind(profiles[0])
    folder = state_dir() / "studies"
    journals_here = [
        each for pattern in named_patterns(text.partition("@")[0]) for each in folder.glob(f"{pattern}/*.jsonl")
    ]
    if journals_here and "@" not in text:
        # The name decides where a copy gave several files one time.
        return max(journals_here, key=lambda each: (each.stat().st_mtime_ns, str(each)))
    known = {each.relative_to(folder).as_posix() for each in folder.glob("*/*") if each.is_dir()}
    raise UnknownName("study", text, known, hint="(a study is its journal, a profile, or <device>/<workload>)")


def _journal_behind(profile: Path) -> Path:
    """Return the journal of the study that a profile is the answer of."""
    from polythrottle.catalog.tuned_profiles import read_profile

    journal = read_profile(profile).provenance.get("journal")
    if isinstance(journal, str) and Path(journal).is_file():
        return Path(journal)
    raise BadFile(f"{profile} is a profile whose study is not here ({journal or 'it names no journal'})")


def report_path(journal: Path) -> Path:
    """Return where the report of a journal goes: beside it, ``.html`` in place of ``.jsonl``."""
    if journal.suffix == ".html":
        # A journal may have any name, and its report is not to be written over it.
        return journal.with_name(journal.name + ".report.html")
    return journal.with_name(journal.name.removesuffix(".jsonl") + ".html")


def read_study(journal: Path) -> Study:
    """Return the study a journal holds, once the plan beside it could be read too.

    Raises:
        BadFile: If either cannot be read.
    """
    study = on_all_boards(journals.read(journal), journal)
    plan = journals.heading(journal)["plan"]
    if "setup" in plan:  # a journal that a program began without words of a user is as good
        planned(journal, plan)
    return study


def on_all_boards(study: Study, journal: Path) -> Study:
    """Return a study that several boards made as its limits have to hold on each of them; any other as it is."""
    boards = boards_of(journal)
    if not boards:
        return study
    return BoardsView(study, boards).told()


def planned(journal: Path, plan: Mapping[str, Any]) -> StudyPlan:
    """Return the plan that a journal keeps.

    Raises:
        BadFile: If it cannot be read; names the file and the line.
    """
    try:
        return StudyPlan.of(plan)
    except BadFile as error:
        raise BadFile(f"{journal} line 1: {error}") from error


def report_facts(journal: Path) -> dict[str, str]:
    """Return what a journal tells that is not in its study: why it ended, the risk taken, what was learnt from."""
    with contextlib.suppress(BadFile):
        heading = journals.heading(journal)
        plan = StudyPlan.of(heading["plan"])
        account = None
        if plan.errors is not None:
            account = plan.account(journals.read(journal).problem, journals.late_requests(journal))
        return plan.facts(journals.ending(journal), _runs_on(heading), account)
    return {}


def _runs_on(heading: Mapping[str, Any]) -> str | None:
    content = heading.get("content")
    told = None
    if isinstance(content, dict):
        told = content.get(RUNS_ON)
    if isinstance(told, str):
        return told
    return None


def profile_of(journal: Path) -> Path | None:
    """Return the file that holds a study's answer; None if it is not there, or holds that of another study."""
    from polythrottle.catalog.tuned_profiles import read_profile

    with contextlib.suppress(BadFile):
        plan = StudyPlan.of(journals.heading(journal)["plan"])
        path = plan.out or usual_path(on_all_boards(journals.read(journal), journal).problem)
        # Another study of the same question may have put its answer there since.
        if Path(str(read_profile(path).provenance.get("journal"))).absolute() == journal.absolute():
            return path
    return None


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


def _model(plan: StudyPlan) -> dict[str, str]:
    """Return where the model lies that was served, as `check` finds it from any folder; nothing if it is no file."""
    file = plan.setup.model_file
    if file is None:
        return {}
    return {"model": str(file.absolute())}


def _provenance(journal: Path) -> dict[str, str | int]:
    # `datetime.UTC` is of Python 3.11.
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {"journal": str(journal), "date": today, "polythrottle": polythrottle_version()}


def usual_path(problem: Problem) -> Path:
    """Return where the profile of a problem goes unless another file is named.

    Raises:
        StorageError: If the user has no home folder.
    """
    from polythrottle.catalog.tuned_profiles import tuned_path

    return tuned_path(device_name(problem), workload_name(problem), problem)


# How a study, a point and a measurement are written, by commands and by whatever shows progress.


def energy_kind(study: Study) -> EnergyKind | None:
    """Return how the joules of a study came about, or None while nothing is measured."""
    return next((trial.measurement.energy_kind for trial in study.completed if trial.measurement), None)


def show_point(point: Mapping[str, float | int | str]) -> str:
    """Return a point as ``--point`` takes it: ``batch_size=4, gpu_max_mhz=828.75``."""
    levels = (f"{show_name(name)}={show_number(name, level)}" for name, level in point.items())
    return ", ".join(levels) or "nothing to set"


def show_joules(measurement: Measurement) -> str:
    """Return energy per item alone, for columns whose heading says how it came about."""
    if measurement.energy_kind is EnergyKind.RELATIVE:
        return f"{measurement.energy_j:.4g}"
    return show(measurement.energy_j, "J")
