"""The journal of a study that several boards make together: several trials run at a time, each on a board.

It is a journal as every other, which any version reads. A trial that begins is written as one that starts and is
interrupted at once, so that it is on disk before its board is touched; a trial that has ended is written as one that
starts and ends. Two keys besides say which belong together, and which board it was:

    {"v": 2, "event": "started", "number": 5, "point": {…}, "board": "ssh://nano2", "visit": 7}
    {"v": 2, "event": "interrupted", "number": 5, "board": "ssh://nano2", "visit": 7}
    …
    {"v": 2, "event": "started", "number": 9, "point": {…}, "board": "ssh://nano2", "visit": 7}
    {"v": 2, "event": "completed", "number": 9, "measurement": {…}, "cost": {…}, "board": "ssh://nano2", "visit": 7}

What began and has not ended when the journal is reopened is made again, on whichever board is free first.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from polythrottle.domain.errors import BadFile
from polythrottle.domain.problem import BOARDS
from polythrottle.domain.space import OperatingPoint
from polythrottle.domain.study import Study, Trial
from polythrottle.storage.append_log import whole_lines
from polythrottle.storage.journal import ATTEMPTS, Journal, content, heading, holds_study
from polythrottle.storage.journal.lines import cost_line, measurement_line
from polythrottle.storage.journal.reader import Fold

_ENDED = ("completed", "failed")


@dataclass
class BoardNotes:
    """What the lines of a journal say of boards.

    Args:
        boards: The board of each trial that has ended, by the trial's number.
        running: What began and has not ended, by visit: point and board.
        visits: How many began.
    """

    boards: dict[int, str] = field(default_factory=dict)
    running: dict[int, tuple[OperatingPoint, str]] = field(default_factory=dict)
    visits: int = 0

    @classmethod
    def of(cls, data: bytes) -> "BoardNotes":
        """Return what the whole lines of a file say that is known to be a journal; nothing of a study of one board.

        Raises:
            BadFile: If a board or a visit is not what it should be.
        """
        notes = cls()
        for text in whole_lines(data):
            line = json.loads(text)
            if "visit" in line:
                notes._take(line)
        return notes

    def _take(self, line: Mapping[str, Any]) -> None:
        board = line["board"]
        visit = line.get("visit")
        if type(board) is not str or type(visit) is not int:
            raise BadFile(f"a line of the journal names the board {board!r:.40} and the visit {visit!r:.40}")
        event = line.get("event")
        if event == "started":
            self.running[visit] = (OperatingPoint(line["point"]), board)
            self.visits = max(self.visits, visit + 1)
        elif event in _ENDED:
            point = self.running[visit][0]
            # Others of this point were lost with their boards before, or with the process.
            self.running = {each: pair for each, pair in self.running.items() if pair[0] != point}
            self.boards[line["number"]] = board


def boards_in(data: bytes) -> Mapping[int, str]:
    """Return the board of each trial of a journal, by the trial's number; empty for a study of one board.

    Args:
        data: Of a file that is known to be a journal.

    Raises:
        BadFile: If a board is not what it should be.
    """
    # Most journals are of one board, and need not be read line by line to know it.
    if b'"visit"' not in data:
        return {}
    return BoardNotes.of(data).boards


def boards_of(path: Path) -> Mapping[int, str]:
    """Return as `boards_in` for the file of a journal.

    Raises:
        BadFile: If the file cannot be read.
    """
    return boards_in(content(path))


def journal_kind(path: Path) -> type[Journal]:
    """Return what a journal is to be opened as: several boards make a study together if its problem names them.

    Raises:
        BadFile: If it is not the first line of a journal.
    """
    contents = None
    if holds_study(path):
        contents = heading(path).get("content")
    if isinstance(contents, dict) and BOARDS in contents:
        return BoardsJournal
    return Journal


class BoardsJournal(Journal):
    """A journal into which several boards write, whoever ends first; made as every other is.

    Not for several threads at a time.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._notes = BoardNotes.of(self._log.content())
        # Nobody runs them any more: the lock on the file is this process's.
        lost = [point for point, _ in self._notes.running.values()]
        self._notes.running.clear()
        self._lost = Counter(lost)
        # Once each, though several boards may have been lost with one point; how many is what `_lost` counts.
        self._waiting = list(dict.fromkeys(lost))

    @property
    def boards(self) -> Mapping[int, str]:
        """The board of each trial that has ended, by the trial's number."""
        return self._notes.boards

    @property
    def running(self) -> Mapping[int, tuple[OperatingPoint, str]]:
        """Point and board of each trial that runs, by its visit."""
        return self._notes.running

    @property
    def longest_s(self) -> float:
        """How long the board that worked longest did so."""
        worked: dict[str, float] = {}
        for trial in self.study.trials:
            if trial.cost is not None:
                board = self.boards[trial.number]
                worked[board] = worked.get(board, 0.0) + trial.cost.duration_s
        return max(worked.values(), default=0.0)

    def begin(self, point: OperatingPoint, board: str) -> int:
        """Record that a board is about to make a trial, before it is touched; return the number of the visit."""
        visit = self._notes.visits
        self._start(point, board, visit)
        number = len(self.study.trials)
        self._append({"event": "interrupted", "number": number, "board": board, "visit": visit})
        self._notes.running[visit] = (point, board)
        self._notes.visits += 1
        return visit

    def end(self, visit: int, trial: Trial) -> Study:
        """Record what came of a visit, and return the study with it.

        Args:
            visit: As `begin` returned it.
            trial: Measured or failed, whatever its number.
        """
        point, board = self._notes.running.pop(visit)
        number = len(self.study.trials)
        self._start(point, board, visit)
        line: dict[str, Any] = {"number": number, "cost": cost_line(trial), "board": board, "visit": visit}
        if trial.measurement is not None:
            self._append({"event": "completed", "measurement": measurement_line(trial.measurement), **line})
        else:
            if trial.absent is None:
                absent = {}
            else:
                absent = {"absent": trial.absent}
            self._append({"event": "failed", "failure": trial.failure, **line, **absent})
        self._notes.boards[number] = board
        return self._with(replace(trial, number=number, point=point))

    def lose(self, visit: int) -> None:
        """Take note that the board of a visit has dropped out: the trial is to be made again."""
        point, _ = self._notes.running.pop(visit)
        self._lost[point] += 1
        self._waiting.append(point)

    def again(self, board: str) -> OperatingPoint | None:
        """Return a point whose trial began and has not ended, to be made again; None if there is none.

        A trial that `ATTEMPTS` boards or processes were lost with is recorded as failed: it may be what they were
        lost by.

        Args:
            board: Where it would be made.
        """
        default = self.study.problem.space.default
        while self._waiting:
            point = self._waiting.pop(0)
            if point == default:  # which every board measures for itself
                continue
            if self._lost[point] < ATTEMPTS:
                return point
            self.end(self.begin(point, board), Trial(0, point, failure=f"interrupted {ATTEMPTS} times"))
        return None

    def _start(self, point: OperatingPoint, board: str, visit: int) -> None:
        number = len(self.study.trials)
        self._append({"event": "started", "number": number, "point": dict(point), "board": board, "visit": visit})

    def _close_running(self, fold: Fold) -> None:
        """Note that the process ended between the two lines of a trial; it has another visit, which counts as begun."""
        running = fold.running
        assert running is not None
        line = {"event": "interrupted", "number": running.number}
        fold.take(line)
        assert fold.study is not None
        self._append(line)
        self.study = fold.study
