"""The append-only record of a study: one JSON line per change, and the only state tuning has.

    {"v": 2, "event": "study", …}                               the problem, whole: a study resumes from this file alone
    {"v": 2, "event": "started", "number": 0, "point": {…}}     written before the hardware is touched
    {"v": 2, "event": "completed", "number": 0, "measurement": {…}, "cost": {"seconds": 3.1, "joules": 40.2}}
    {"v": 2, "event": "failed", "number": 1, "failure": "…", "cost": {…}}
    {"v": 2, "event": "interrupted", "number": 2}               found running on reopening; the trial is made again
    {"v": 2, "event": "reference", "name": "30W", "point": {…}, "measurement": {…}}
    {"v": 2, "event": "finished", "reason": "…"}

Format 1 had no costs, no ``censored`` in a measurement and no objective but energy; it is still read, and continued in
format 2.

A last line without its line feed was torn by a crash and is cut off; any other line that does not fit is an error with
its number. A trial that was interrupted ``ATTEMPTS`` times is given up as failed, so one that kills the machine ends.
"""

import base64
import fcntl
import io
import json
import os
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from polythrottle.errors import BadFile, PolythrottleError, StorageError
from polythrottle.measurement import EnergyKind, Latency, Measurement, Window
from polythrottle.problem import Constraint, Objective, Problem
from polythrottle.space import Knob, OperatingPoint, SearchSpace
from polythrottle.study import Cost, Reference, Study, Trial, TrialState

FORMAT = 2
ATTEMPTS = 3
T = TypeVar("T")
_HEADERS = tuple(f'{{"v": {version}, "event": "study"'.encode() for version in range(1, FORMAT + 1))


@dataclass
class _Fold:
    """A study as its journal tells it, line by line."""

    study: Study | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)
    finished: str | None = None
    attempts: Counter[int] = field(default_factory=Counter)

    def take(self, line: Mapping[str, Any]) -> None:
        """Add one line; KeyError, TypeError, ValueError or a PolythrottleError mean that it does not fit."""
        event = line["event"]
        if (event == "study") != (self.study is None):
            raise ValueError("a study begins with exactly one line that describes it")
        if event == "study":
            self.study, self.plan = _study_from(line), dict(line["plan"])
            return
        if event != "reference":
            self.finished = str(line["reason"]) if event == "finished" else None
        if event != "finished":
            self.study = self._changed(event, line)

    def _changed(self, event: str, line: Mapping[str, Any]) -> Study:
        assert self.study is not None
        if event == "reference":
            point, measurement = OperatingPoint(line["point"]), _measurement_from(line["measurement"])
            return self.study.with_reference(Reference(str(line["name"]), point, measurement))
        number, trials = _typed(line["number"], int), self.study.trials
        if event == "started":
            if number != len(trials) or self.running is not None:
                raise ValueError(f"trial {number} cannot start after {len(trials)} trials")
            point = OperatingPoint(line["point"])
            self.study.problem.space.index(point)
            self.attempts[number] += 1
            return self.study.with_trial(Trial(number, point))
        running = self.running
        if running is None or running.number != number:
            raise ValueError(f"trial {number} is not running")
        ended = replace(running, cost=_cost_from(line.get("cost")))
        if event == "completed":
            return self.study.with_trial(replace(ended, measurement=_measurement_from(line["measurement"])))
        if event == "failed":
            return self.study.with_trial(replace(ended, failure=_typed(line["failure"], str)))
        if event == "interrupted":
            return Study(self.study.problem, self.study.method, self.study.seed, trials[:-1], self.study.references)
        raise ValueError(f"unknown event {event!r}")

    @property
    def running(self) -> Trial | None:
        """The trial that has started and not ended, if there is one."""
        last = self.study.trials[-1] if self.study and self.study.trials else None
        return last if last is not None and last.state is TrialState.RUNNING else None


class Journal:
    """A study's file, open for appending and locked against a second writer.

    `create` starts one, `reopen` continues one; use as a context manager.
    """

    def __init__(
        self, path: Path, file: io.FileIO, study: Study, plan: Mapping[str, Any], finished: str | None
    ) -> None:
        self.path = path
        self.study = study
        self.plan = plan
        self.finished = finished
        self._file = file

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
        _check_regular(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "a+b", buffering=0)  # noqa: SIM115  closed by __exit__
        except OSError as error:
            raise _unwritable(path, error) from error
        _lock(path, file)
        file.seek(0)
        if not _torn(file.read()):
            file.close()
            raise BadFile(f"{path} is not empty and not a journal; a new journal needs a new file")
        file.truncate(0)
        journal = cls(path, file, study, plan, None)
        journal._append({"event": "study", "plan": dict(plan), **_study_line(study)})
        return journal

    @classmethod
    def reopen(cls, path: Path) -> "Journal":
        """Continue a journal: cut a torn last line off, and note an interrupted trial.

        Raises:
            BadFile: If it is not a journal, or of a newer format; names the line.
            StorageError: If it cannot be written or another process has it open.
        """
        _check_regular(path)
        if not path.exists():
            raise BadFile(f"there is no journal {path}; a journal is made by polythrottle tune")
        try:
            file = open(path, "r+b", buffering=0)  # noqa: SIM115  closed by __exit__
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            _lock(path, file)
            whole, fold = _folded(path, file.read())
            if fold.study is None:
                raise BadFile(f"{path} holds no study")
            file.truncate(whole)
            file.seek(whole)
        except PolythrottleError:
            file.close()
            raise
        journal = cls(path, file, fold.study, fold.plan, fold.finished)
        if fold.running is not None:
            journal._close_running(fold)
        return journal

    def _close_running(self, fold: _Fold) -> None:
        running = fold.running
        assert running is not None
        if fold.attempts[running.number] >= ATTEMPTS:
            self.failed(Trial(running.number, running.point, failure=f"interrupted {ATTEMPTS} times"))
            return
        fold.take({"event": "interrupted", "number": running.number})
        assert fold.study is not None
        self._append({"event": "interrupted", "number": running.number})
        self.study = fold.study

    def started(self, trial: Trial) -> Study:
        """Record that a trial is about to touch the device, and return the study with it."""
        self._append({"event": "started", "number": trial.number, "point": dict(trial.point)})
        return self._with(trial)

    def completed(self, trial: Trial) -> Study:
        """Record what a trial measured, and return the study with it."""
        assert trial.measurement is not None
        line = {"number": trial.number, "measurement": _values(trial.measurement), "cost": _cost_line(trial)}
        self._append({"event": "completed", **line})
        return self._with(trial)

    def failed(self, trial: Trial) -> Study:
        """Record why a trial measured nothing, and return the study with it."""
        line = {"number": trial.number, "failure": trial.failure, "cost": _cost_line(trial)}
        self._append({"event": "failed", **line})
        return self._with(trial)

    def referred(self, reference: Reference) -> Study:
        """Record a preset measured for comparison, and return the study with it."""
        line = {"name": reference.name, "point": dict(reference.point), "measurement": _values(reference.measurement)}
        self._append({"event": "reference", **line})
        self.study = self.study.with_reference(reference)
        return self.study

    def finish(self, reason: str) -> None:
        """Record that the study has ended, and why."""
        if self.finished != reason:
            self._append({"event": "finished", "reason": reason})
            self.finished = reason

    def _with(self, trial: Trial) -> Study:
        self.study = self.study.with_trial(trial)
        return self.study

    def _append(self, line: Mapping[str, Any]) -> None:
        data = json.dumps({"v": FORMAT, **line}, allow_nan=False, ensure_ascii=False).encode() + b"\n"
        whole = os.fstat(self._file.fileno()).st_size
        try:
            while data:
                data = data[self._file.write(data) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            self._forget(whole)
            raise _unwritable(self.path, error) from error

    def _forget(self, whole: int) -> None:
        """Cut a half-written line off again; if even that fails, the next reopening does it."""
        try:
            os.ftruncate(self._file.fileno(), whole)
        except OSError:
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()
        except OSError as broken:
            raise _unwritable(self.path, broken) from broken


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
    _check_regular(path)
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
    whole, fold = _folded(path, data)
    if fold.study is None:
        raise BadFile(f"{path} holds no study; a journal is made by polythrottle tune")
    return whole, fold.study


def heading(path: Path) -> Mapping[str, Any]:
    """Return the first line of a journal as it stands there: what it is about, without the study being built.

    Raises:
        BadFile: If it is not the first line of a journal.
    """
    _check_regular(path)
    try:
        with open(path, "rb") as file:
            line = json.loads(file.readline())
        _check_format(line)
    except OSError as error:
        raise BadFile(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{path} line 1 is not a line of a journal: {error}") from error
    if line.get("event") != "study":
        raise BadFile(f"{path} line 1 is not the first line of a journal")
    return dict(line)


def ending(path: Path) -> str | None:
    """Return why the study of a journal has ended; None if it has not.

    Raises:
        BadFile: As `read`.
    """
    return _folded(path, content(path))[1].finished


def is_finished(path: Path) -> bool:
    """Return whether a journal ends with its study finished; a file that holds no study yet is not."""
    return ending(path) is not None


def holds_study(path: Path) -> bool:
    """Return whether a file has at least one whole line, so that it is a journal to continue rather than to start."""
    _check_regular(path)
    try:
        return b"\n" in path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise BadFile(f"{path} cannot be read: {error.strerror}") from error


def _torn(begun: bytes) -> bool:
    """Return whether a file's content is nothing or a torn first line, of any format."""
    return b"\n" not in begun and any(begun.startswith(header) or header.startswith(begun) for header in _HEADERS)


def _check_regular(path: Path) -> None:
    """Refuse devices, pipes and folders: reading them may never end."""
    try:
        strange = path.exists() and not path.is_file()
    except OSError as error:
        raise BadFile(f"{path} cannot be read: {error.strerror}") from error
    if strange:
        raise BadFile(f"{path} is not a regular file; a journal is one")


def _folded(path: Path, data: bytes) -> tuple[int, _Fold]:
    """Return the length of all whole lines in bytes, and the study they tell."""
    whole = data.rfind(b"\n") + 1
    fold = _Fold()
    for number, text in enumerate(data[:whole].split(b"\n")[:-1], start=1):
        try:
            line = json.loads(text)
            _check_format(line)
            fold.take(line)
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            OverflowError,
            zlib.error,
            RecursionError,
            PolythrottleError,
        ) as error:
            said = f"lacks {error}" if isinstance(error, KeyError) else str(error)
            raise BadFile(f"{path} line {number} is not a line of a journal: {said}") from error
    return whole, fold


def _check_format(line: Mapping[str, Any]) -> None:
    if not isinstance(line, dict) or type(line.get("v")) is not int or line["v"] < 1:
        raise ValueError("it has no format version")
    if line["v"] > FORMAT:
        raise ValueError(f"format {line['v']} is newer than {FORMAT}, the newest this version reads; upgrade it")


def _study_line(study: Study) -> dict[str, Any]:
    problem, space = study.problem, study.problem.space
    rows = base64.b64encode(zlib.compress(np.ascontiguousarray(space.rows, dtype="<i4").tobytes(), 9)).decode()
    return {
        "problem": problem.fingerprint,
        "device": problem.device,
        "workload": problem.workload,
        "constraints": [asdict(constraint) for constraint in problem.constraints],
        "reference": dict(problem.reference),
        "window": asdict(problem.window),
        "content": dict(problem.content),
        "objective": str(problem.objective),
        "method": study.method,
        "seed": study.seed,
        "space": {
            "size": len(space),
            "default": dict(space.default),
            "knobs": [asdict(knob) for knob in space.knobs],
            "rows": rows,
        },
    }


def _study_from(line: Mapping[str, Any]) -> Study:
    problem = Problem(
        _space_from(line["space"]),
        tuple(Constraint(**constraint) for constraint in line["constraints"]),
        _typed(line["device"], str),
        _typed(line["workload"], str),
        dict(line["reference"]),
        Window(**line["window"]),
        {_typed(name, str): _typed(digest, str) for name, digest in line["content"].items()},
        Objective(line.get("objective", "energy")),
    )
    if problem.fingerprint != line["problem"]:
        raise ValueError("the problem it describes does not match its fingerprint")
    return Study(problem, _typed(line["method"], str), _typed(line["seed"], int))


def _space_from(line: Mapping[str, Any]) -> SearchSpace:
    knobs = tuple(Knob(knob["name"], tuple(knob["levels"]), knob["label"]) for knob in line["knobs"])
    rows = np.frombuffer(zlib.decompress(base64.b64decode(line["rows"])), dtype="<i4").astype(np.int32)
    return SearchSpace(knobs, rows.reshape(int(line["size"]), len(knobs)), OperatingPoint(line["default"]))


def _values(measurement: Measurement) -> dict[str, Any]:
    return asdict(measurement)


def _measurement_from(line: Mapping[str, Any]) -> Measurement:
    fields = dict(line)
    times = {name: _figure(value) for name, value in fields.pop("latency").items()}
    censored = _typed(fields.pop("censored", False), bool)
    kind, boundary = EnergyKind(fields.pop("energy_kind")), _typed(fields.pop("boundary"), str)
    figures = {name: _figure(value) for name, value in fields.items()}
    return Measurement(
        latency=Latency(**times),  # type: ignore[arg-type]
        energy_kind=kind,
        boundary=boundary,
        censored=censored,
        **figures,  # type: ignore[arg-type]
    )


def _cost_line(trial: Trial) -> dict[str, float] | None:
    return None if trial.cost is None else {"seconds": trial.cost.duration_s, "joules": trial.cost.energy_j}


def _cost_from(line: Any) -> Cost | None:
    """Return what a trial took; None if its line does not say."""
    if line is None:
        return None
    return Cost(_figure(line["seconds"]) or 0.0, _figure(line["joules"]) or 0.0)


def _figure(value: Any) -> float | None:
    """Return a number or None as it is."""
    return value if value is None or type(value) is int else _typed(value, float)


def _typed(value: Any, kind: type[T]) -> T:
    """Return a value of exactly the kind it should be."""
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value


def _lock(path: Path, file: io.FileIO) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise StorageError(f"{path} is being written by another polythrottle process") from None


def _unwritable(path: Path, error: OSError) -> StorageError:
    return StorageError(f"{path} cannot be written: {error.strerror}; what it held so far is kept")
