"""Reading a journal without changing or locking it: the study it tells, line by line."""

import json
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from polythrottle.domain.error_budget import LateRequests
from polythrottle.domain.errors import BadFile, PolythrottleError
from polythrottle.domain.measurement import Measurement
from polythrottle.domain.space import OperatingPoint
from polythrottle.domain.study import Reference, Study, Trial, TrialState
from polythrottle.storage.append_log import whole_bytes, whole_lines
from polythrottle.storage.journal.lines import (
    check_format,
    cost_from,
    late_from,
    measurement_from,
    reserved_from,
    study_from,
    typed,
)
from polythrottle.storage.untrusted import MALFORMED, check_plain, said


def read(path: Path) -> Study:
    """Return the study a journal holds, without changing or locking the file.

    Raises:
        BadFile: If there is no such file, or it is not a journal, or of a newer format; names the line.
    """
    return told(path, content(path))[1]


def content(path: Path) -> bytes:
    """Return the bytes of a file that may be a journal.

    Raises:
        BadFile: If there is none, or it cannot be read.
    """
    check_regular(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadFile(f"{path} cannot be read: {error.strerror}") from error


def told(path: Path, data: bytes) -> tuple[int, Study]:
    """Return how many bytes of a journal's content are whole lines, and the study they tell.

    Args:
        path: Where the content is from, for messages.
        data: All of the content, or its beginning.

    Raises:
        BadFile: As `read`.
    """
    whole, fold = folded(path, data)
    if fold.study is None:
        raise BadFile(f"{path} holds no study; a journal is made by polythrottle tune")
    return whole, fold.study


def heading(path: Path) -> Mapping[str, Any]:
    """Return the first line of a journal as it stands there: what it is about, without the study being built.

    Raises:
        BadFile: If it is not the first line of a journal.
    """
    check_regular(path)
    try:
        with open(path, "rb") as file:
            line = json.loads(file.readline())
        check_format(line)
        if line.get("event") == "study":
            typed(line["plan"], dict, "plan")  # which whoever asks for the first line is after
    except OSError as error:
        raise BadFile(f"{path} cannot be read: {error.strerror}") from error
    except MALFORMED as error:
        raise BadFile(f"{path} line 1 is not a line of a journal: {said(error)}") from error
    if line.get("event") != "study":
        raise BadFile(f"{path} line 1 is not the first line of a journal")
    return dict(line)


def ending(path: Path) -> str | None:
    """Return why the study of a journal has ended; None if it has not.

    Raises:
        BadFile: As `read`.
    """
    return folded(path, content(path))[1].finished


def late_requests(path: Path) -> LateRequests:
    """Return what the trials of a journal have spent of an error budget.

    Raises:
        BadFile: As `read`.
    """
    return folded(path, content(path))[1].spent


def is_finished(path: Path) -> bool:
    """Return whether a journal ends with its study finished; a file that holds no study yet is not."""
    return ending(path) is not None


def holds_study(path: Path) -> bool:
    """Return whether a file has at least one whole line, so that it is a journal to continue rather than to start."""
    check_regular(path)
    try:
        return b"\n" in path.read_bytes()
    # Still to be made, its folder perhaps as well.
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise BadFile(f"{path} cannot be read: {error.strerror}") from error


def check_regular(path: Path) -> None:
    """Refuse devices, pipes and folders: reading them may never end.

    Raises:
        BadFile: If it is one, or cannot be looked at.
    """
    try:
        strange = path.exists() and not path.is_file()
    except OSError as error:
        raise BadFile(f"{path} cannot be read: {error.strerror}") from error
    if strange:
        raise BadFile(f"{path} is not a regular file; a journal is one")
    check_plain(path)


# Lines, folded into a study


@dataclass
class Fold:
    """A study as its journal tells it, line by line.

    ``spent`` is what its trials have taken of an error budget, and ``reserved`` what the one that runs may take.
    """

    study: Study | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)
    finished: str | None = None
    attempts: Counter[int] = field(default_factory=Counter)
    spent: LateRequests = field(default_factory=LateRequests)
    reserved: float = 0.0

    def take(self, line: Mapping[str, Any]) -> None:
        """Add one line; KeyError, TypeError, ValueError or a PolythrottleError mean that it does not fit."""
        event = line["event"]
        if (event == "study") != (self.study is None):
            raise ValueError("a study begins with exactly one line that describes it")
        if event == "study":
            self.study = study_from(line)
            self.plan = dict(typed(line["plan"], dict, "plan"))
            return
        # Presets are measured once the search has ended, and do not begin it anew; a trial does.
        if event != "reference":
            self.finished = str(line["reason"]) if event == "finished" else None
        self.study = self._changed(event, line)
        self._count(event, line)

    def _count(self, event: str, line: Mapping[str, Any]) -> None:
        """Take note of requests that were late; what a trial may have spent that does not say is forfeited."""
        if event == "started":
            self.reserved = reserved_from(line)
        elif event in ("completed", "failed", "interrupted"):
            lost = LateRequests(forfeited=self.reserved)
            self.spent += late_from(line["requests"]) if "requests" in line else lost
            self.reserved = 0.0

    def _changed(self, event: str, line: Mapping[str, Any]) -> Study:
        assert self.study is not None
        if event == "reference":
            point = OperatingPoint(typed(line["point"], dict, "point"))
            measurement = measurement_from(line["measurement"])
            cost = cost_from(line.get("cost"))
            return self.study.with_reference(Reference(str(line["name"]), point, measurement, cost))
        if event == "finished":
            return replace(self.study, answer=self._answer(line))
        number = typed(line["number"], int, "number")
        trials = self.study.trials
        if event == "started":
            if number != len(trials) or self.running is not None:
                raise ValueError(f"trial {number} cannot start after {len(trials)} trials")
            point = OperatingPoint(typed(line["point"], dict, "point"))
            # For its error alone: a point that is not in the space cannot have been tried.
            self.study.problem.space.index(point)
            self.attempts[number] += 1
            return self.study.with_trial(Trial(number, point))
        running = self.running
        if running is None or running.number != number:
            raise ValueError(f"trial {number} is not running")
        ended = replace(running, cost=cost_from(line.get("cost")))
        if event == "completed":
            return self.study.with_trial(replace(ended, measurement=self._judgeable(line["measurement"])))
        if event == "failed":
            absent = typed(line["absent"], str, "absent") if "absent" in line else None
            failure = typed(line["failure"], str, "failure")
            return self.study.with_trial(replace(ended, failure=failure, absent=absent))
        if event == "interrupted":
            # Gone, not failed: its number is free, and the trial is made again under it.
            return Study(self.study.problem, self.study.method, self.study.seed, trials[:-1], self.study.references)
        raise ValueError(f"unknown event {event!r}")

    def _answer(self, line: Mapping[str, Any]) -> int | None:
        """Return the trial that a study's last line names; None if it names none."""
        assert self.study is not None
        if "answer" not in line:
            return None
        answer = typed(line["answer"], int, "answer")
        if not any(trial.number == answer for trial in self.study.completed):
            raise ValueError(f"its answer is trial {answer}, and no trial of that number was completed")
        return answer

    def _judgeable(self, line: Any) -> Measurement:
        """Return a trial's measurement, which has every quantity with a limit: one without is written as failed."""
        assert self.study is not None
        measurement = measurement_from(line)
        for constraint in self.study.problem.constraints:
            if measurement.metric(constraint.metric) is None:
                raise ValueError(f"its measurement has no {constraint.metric}, which {constraint} is about")
        return measurement

    @property
    def running(self) -> Trial | None:
        """The trial that has started and not ended, if there is one."""
        last = self.study.trials[-1] if self.study and self.study.trials else None
        if last is not None and last.state is TrialState.RUNNING:
            return last
        return None


def folded(path: Path, data: bytes) -> tuple[int, Fold]:
    """Return the length of all whole lines in bytes, and the study they tell.

    Args:
        path: Where the content is from, for messages.
        data: All of the content, or its beginning.

    Raises:
        BadFile: If a whole line does not fit; names it.
    """
    fold = Fold()
    for number, text in enumerate(whole_lines(data), start=1):
        try:
            line = json.loads(text)
            check_format(line)
            fold.take(line)
        except (*MALFORMED, zlib.error, PolythrottleError) as error:
            raise BadFile(f"{path} line {number} is not a line of a journal: {said(error)}") from error
    return whole_bytes(data), fold
