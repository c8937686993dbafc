"""Writing a journal: one line per change, on disk before anything else happens."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from polythrottle.domain.error_budget import NOTHING_SPENT, LateRequests
from polythrottle.domain.errors import BadFile, PolythrottleError
from polythrottle.domain.study import Reference, Study, Trial
from polythrottle.storage.append_log import AppendLog
from polythrottle.storage.journal.lines import FORMAT, cost_line, late_line, measurement_line, study_line
from polythrottle.storage.journal.reader import Fold, check_regular, folded

ATTEMPTS = 3
"""How often a trial may be interrupted before it is given up as failed."""
_HEADERS = tuple(f'{{"v": {version}, "event": "study"'.encode() for version in range(1, FORMAT + 1))


class Journal:
    """A study's file, open for appending and locked against a second writer.

    `create` starts one, `reopen` continues one; use as a context manager.
    """

    def __init__(
        self,
        path: Path,
        log: AppendLog,
        study: Study,
        plan: Mapping[str, Any],
        finished: str | None,
        spent: LateRequests = NOTHING_SPENT,
    ) -> None:
        self.path = path
        self.study = study
        self.plan = plan
        self.finished = finished
        self.spent = spent
        self._log = log

    @classmethod
    def create(cls, path: Path, study: Study, plan: Mapping[str, Any]) -> "Journal":
        """Start the journal of a study without trials.

        Args:
            path: A file that does not exist, is empty, or holds nothing but a torn first line; its folders are made.
            study: What is recorded.
            plan: What the caller intends, such as the number of trials; kept for resuming, not part of the problem.

        Raises:
            StorageError: If the file cannot be written or another process has it open.
            BadFile: If the file holds something else.
        """
        check_regular(path)
        log = AppendLog(path, busy=_busy(path))
        # Looked at under the lock: another process may have begun a study there just before.
        if not _torn(log.content()):
            log.close()
            raise BadFile(f"{path} is not empty and not a journal; a new journal needs a new file")
        log.cut(0)
        journal = cls(path, log, study, plan, None)
        journal._append({"event": "study", "plan": dict(plan), **study_line(study)})
        return journal

    @classmethod
    def reopen(cls, path: Path) -> "Journal":
        """Continue a journal: cut a torn last line off, and note an interrupted trial.

        Raises:
            BadFile: If it is not a journal, or of a newer format; names the line.
            StorageError: If it cannot be written or another process has it open.
        """
        check_regular(path)
        if not path.exists():
            raise BadFile(f"there is no journal {path}; a journal is made by polythrottle tune")
        log = AppendLog(path, create=False, busy=_busy(path))
        try:
            # All of it is understood before anything is cut: what is no journal stays as it is.
            whole, fold = folded(path, log.content())
            if fold.study is None:
                raise BadFile(f"{path} holds no study")
            log.cut(whole)
        except PolythrottleError:
            log.close()
            raise
        journal = cls(path, log, fold.study, fold.plan, fold.finished, fold.spent)
        if fold.running is not None:
            journal._close_running(fold)
        return journal

    def _close_running(self, fold: Fold) -> None:
        running = fold.running
        assert running is not None
        # Nobody saw the end of it: whatever it was allowed may have been spent.
        self.spent += LateRequests(forfeited=fold.reserved)
        if fold.attempts[running.number] >= ATTEMPTS:
            self.failed(Trial(running.number, running.point, failure=f"interrupted {ATTEMPTS} times"))
            return
        fold.take({"event": "interrupted", "number": running.number})
        assert fold.study is not None
        self._append({"event": "interrupted", "number": running.number})
        self.study = fold.study

    def started(self, trial: Trial, reserved: float | None = None) -> Study:
        """Record that a trial is about to touch the device, and return the study with it.

        Args:
            trial: It.
            reserved: How much of an error budget it may spend, which counts as spent if nobody sees its end.
        """
        kept = {} if reserved is None else {"reserved": reserved}
        self._append({"event": "started", "number": trial.number, "point": dict(trial.point), **kept})
        return self._with(trial)

    def completed(self, trial: Trial, spent: LateRequests | None = None) -> Study:
        """Record what a trial measured, and spent of an error budget; return the study with it."""
        assert trial.measurement is not None
        line = {"number": trial.number, "measurement": measurement_line(trial.measurement), "cost": cost_line(trial)}
        self._append({"event": "completed", **line, **self._counted(spent)})
        return self._with(trial)

    def failed(self, trial: Trial, spent: LateRequests | None = None) -> Study:
        """Record why a trial measured nothing, and what it spent of an error budget; return the study with it."""
        line = {"number": trial.number, "failure": trial.failure, "cost": cost_line(trial)}
        absent = {} if trial.absent is None else {"absent": trial.absent}
        self._append({"event": "failed", **line, **absent, **self._counted(spent)})
        return self._with(trial)

    def interrupted(self, trial: Trial, spent: LateRequests) -> None:
        """Record that a running trial was left, and what it had spent of an error budget; it will be made again."""
        self._append({"event": "interrupted", "number": trial.number, **self._counted(spent)})
        self.study = replace(self.study, trials=self.study.trials[: trial.number])

    def _counted(self, spent: LateRequests | None) -> dict[str, Any]:
        """Add what a trial has spent; return it as a line has it, which says nothing where nobody saw its end."""
        if spent is None:
            return {}
        self.spent += spent
        if spent.forfeited:  # all that was reserved: who reads a line without requests puts that down
            return {}
        return {"requests": late_line(spent)}

    def referred(self, reference: Reference) -> Study:
        """Record a preset measured for comparison, and return the study with it."""
        line = {
            "name": reference.name,
            "point": dict(reference.point),
            "measurement": measurement_line(reference.measurement),
            "cost": cost_line(reference),
        }
        self._append({"event": "reference", **line})
        self.study = self.study.with_reference(reference)
        return self.study

    def finish(self, reason: str, answer: int | None = None) -> None:
        """Record that the study has ended, and why.

        Args:
            reason: In words.
            answer: Number of the trial whose point was chosen; None leaves that to the figures.
        """
        # Nothing new: a study that has ended is resumed without a line more, however often.
        if (self.finished, self.study.answer) != (reason, answer):
            chosen = {} if answer is None else {"answer": answer}
            self._append({"event": "finished", "reason": reason, **chosen})
            self.finished = reason
            self.study = replace(self.study, answer=answer)

    def _with(self, trial: Trial) -> Study:
        self.study = self.study.with_trial(trial)
        return self.study

    def _append(self, line: Mapping[str, Any]) -> None:
        self._log.append(json.dumps({"v": FORMAT, **line}, allow_nan=False, ensure_ascii=False).encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.close()


def _torn(begun: bytes) -> bool:
    """Return whether a file's content is nothing or a torn first line, of any format."""
    return b"\n" not in begun and any(begun.startswith(header) or header.startswith(begun) for header in _HEADERS)


def _busy(path: Path) -> str:
    return f"{path} is being written by another polythrottle process"
