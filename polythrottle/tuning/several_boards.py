"""One search on several boards of one kind: a trial at a time on each, and whoever is done gets the next point.

Each board has a thread in which `polythrottle.tuning.tuner.tune` runs as on one board; what it asks of a journal and of
a search method is answered here, from the one study that all of them make.
"""

import contextlib
import math
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from queue import SimpleQueue
from typing import cast

from polythrottle.backends.device_uri import own_words
from polythrottle.domain.clock import SystemClock, Thread, VirtualClock
from polythrottle.domain.error_budget import NOTHING_SPENT, LateRequests
from polythrottle.domain.errors import DeviceError, Exhausted, PolythrottleError, StorageError, TrialError
from polythrottle.domain.measurement import Window
from polythrottle.domain.metrics import FLOORS
from polythrottle.domain.ports import Chooser, Optimizer
from polythrottle.domain.problem import Constraint
from polythrottle.domain.space import OperatingPoint
from polythrottle.domain.study import ENOUGH, Study, Trial, TrialState
from polythrottle.storage.boards_journal import BoardsJournal
from polythrottle.storage.journal import Journal
from polythrottle.tuning.boards_together import BoardsView, OpenBoard, shared_window
from polythrottle.tuning.stopping import ALL_TRIED, NOTHING_LEFT, WORTHLESS_IDLE, Budget, Outlook, Rule, with_most_left
from polythrottle.tuning.tuner import FAILURES_IN_A_ROW, tune

_ANY = 10**9  # trials of one board: how many there are in all is decided here
_STOPPED = "stopped"


class Stand(Enum):
    """What a board does."""

    JOINING = auto()
    """It is entered."""
    CHOOSING = auto()
    """It has its turn, or waits for it, to be told its next point."""
    BUSY = auto()
    """It makes a trial."""
    DONE = auto()
    """Its trial has ended in virtual time, in which another ends earlier."""
    IDLE = auto()
    """There is nothing for it to try until another trial has ended."""
    GONE = auto()
    """It takes part no more."""


@dataclass
class _Member:
    """Where a board stands.

    Args:
        stand: What it does.
        visit: Its running trial; None where there is none.
        ends_s: When its newest trial ended, or when it began to idle, on the clock of the study.
    """

    stand: Stand = Stand.JOINING
    visit: int | None = None
    ends_s: float = 0.0


class SharedStudy:
    """A study that several boards make together; every method but `search` is called by their threads.

    Boards in virtual time take turns as that time has it, so that the same boards make the same study each time.

    Args:
        boards: Of one kind; two at least.
        optimizer: Suggests points, given trials that run as running trials of the study.
        journal: Holds the trials made so far, and in the end why there are no more.
        budget: What the study may use in the end, earlier trials counted. Its time is that of the study, in which
            boards work at once.
        rule: When one more trial is not worth it.
    """

    def __init__(
        self, boards: Sequence[OpenBoard], optimizer: Optimizer, journal: BoardsJournal, budget: Budget, rule: Rule
    ) -> None:
        self._boards = {board.uri: board for board in boards}
        self._members = {uri: _Member() for uri in self._boards}
        self._optimizer = optimizer
        self._journal = journal
        self._budget = budget
        self._rule = rule
        self._virtual = all(isinstance(board.device.clock, VirtualClock) for board in boards)
        self._clock = SystemClock()
        self._began_s = self._clock.now()
        self._before_s = journal.longest_s
        self._changed = threading.Condition()
        # In virtual time they begin in the order in which they were named; else as they come.
        self._turns: deque[str] = deque(self._boards if self._virtual else ())
        self._events: SimpleQueue[Study | str | None] = SimpleQueue()
        self._reason: str | None = None
        self._stopped = False
        """Whether trials that run are cut short and left."""
        self._failure: BaseException | None = None
        self._errors: dict[str, PolythrottleError] = {}
        self._confirming: OperatingPoint | None = None
        self._settled: tuple[tuple[int, tuple[int, ...]], str] | None = None
        self._verdict: tuple[int, str | None] | None = None
        self._problem = journal.study.problem

    @property
    def duration_s(self) -> float:
        """How long the study has taken, earlier sessions counted, on the clock of the boards."""
        if self._virtual:
            return self._before_s + self._now_s
        return self._before_s + self._clock.now() - self._began_s

    @property
    def _now_s(self) -> float:
        """How far the study has come in virtual time; what ends later than that does not count yet."""
        return max((m.ends_s for m in self._members.values() if m.stand is not Stand.DONE), default=0.0)

    def search(self) -> Generator[Study | str]:
        """Continue the study until it has ended; yields it whenever a trial starts or ends, and lines to be told.

        Every board is restored when this is left, however that happens. Trials that run then are cut short between two
        queries, and made again if the study goes on.

        Raises:
            DeviceError: If a board cannot be entered, as somebody else steers it, or none is left later on.
            TrialError: If `FAILURES_IN_A_ROW` trials in a row failed, or no board can measure the default point.
            StorageError: If the journal cannot be written.
        """
        threads = [
            Thread(target=self._take_part, args=(board,), name=f"polythrottle-{board.uri}", daemon=True)
            for board in self._boards.values()
        ]
        started = []
        try:
            for thread in threads:
                thread.start()
                started.append(thread)  # a thread that could not be started cannot be waited for
            ended = 0
            while ended < len(threads):
                event = self._events.get()
                if event is None:
                    ended += 1
                else:
                    yield event
        finally:
            self._stop()
            for thread in started:
                thread.join()
        self._conclude()

    def _conclude(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._reason is None:
            uri, error = next(reversed(self._errors.items()))
            kind = TrialError if isinstance(error, TrialError) else DeviceError
            raise kind(f"no board is left; the last was {uri}: {own_words(uri, error)}")
        whole = self._view.on_all()
        answer = self._answer(whole)
        words = with_most_left(self._reason, self._optimizer, whole, answer)
        self._journal.finish(words, None if answer is None else self._surest(answer))
        if self._reason.startswith("given up"):
            raise TrialError(self._reason.partition(": ")[2])

    def _take_part(self, board: OpenBoard) -> None:
        """Make trials on a board until there are no more; in its thread."""
        desk = _Desk(self, board.uri)
        try:
            board.cut_short_when(lambda: self._stopped)
            work = (board.device, board.served, desk, cast(Journal, desk), Budget(_ANY), Rule(early=False))
            loop = tune(*work, entered=lambda: self._entered(board.uri))
            with contextlib.closing(loop):
                for _ in loop:
                    pass
        except PolythrottleError as error:
            self._leave(board.uri, error)
        except BaseException as error:  # raised again in the thread of whoever searches
            self._fail(error)
        else:
            self._leave(board.uri, None)
        finally:
            self._events.put(None)

    def _entered(self, uri: str) -> None:
        """Wait until every board has been entered: where somebody else steers one, no trial begins on any.

        Raises:
            Exhausted: If one could not be.
        """
        with self._changed:
            self._members[uri].stand = Stand.CHOOSING
            self._changed.notify_all()
            members = self._members.values()
            self._changed.wait_for(lambda: self._stopped or all(m.stand is not Stand.JOINING for m in members))
        if self._virtual or self._stopped:
            self._await_turn(uri)  # so that what it sees first does not depend on how fast threads start

    def _leave(self, uri: str, error: PolythrottleError | None) -> None:
        """Take a board out; the study has not begun where it cannot even be entered, and does not begin then."""
        with self._changed:
            member = self._members[uri]
            # A trial's error is of the study, which may be hopeless as it is reopened.
            if member.stand is Stand.JOINING and error is not None and not isinstance(error, TrialError):
                self._fail(self._boards[uri].named_in(error))
            member.stand = Stand.GONE
            if uri in self._turns:
                self._turns.remove(uri)
            if error is not None and not self._stopped:
                self._errors[uri] = error
                again = ""
                if member.visit is not None:
                    self._journal.lose(member.visit)
                    if any(other.stand is not Stand.GONE for other in self._members.values()):
                        again = "; its trial is made again elsewhere"
                self._events.put(f"{uri} is left out: {' '.join(own_words(uri, error).split())}{again}")
            member.visit = None
            self._wake()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._stopped = True
            self._changed.notify_all()

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    # What a board's loop asks for, by way of its desk.

    def study_of(self, uri: str) -> Study:
        """Return the study as one board would have made it, with all that runs."""
        with self._changed:
            study = self._with_running(self._view.on_one(uri))
            return replace(study, problem=replace(study.problem, window=self._window(uri)))

    def next_point(self, uri: str) -> OperatingPoint:
        """Return the next point for a board; waits while there is none and other trials run.

        Raises:
            Exhausted: If there are no more.
            TrialError: If the board cannot measure the default point.
        """
        while True:
            self._await_turn(uri)
            try:
                point = self._chosen(uri)
            except BaseException:
                self._pass_on(uri, Stand.GONE)
                raise
            if point is not None:
                return point  # its turn ends when the trial has begun
            self._pass_on(uri, Stand.IDLE)

    def begin(self, uri: str, trial: Trial) -> None:
        """Record that a board begins a trial, and end its turn."""
        self._await_turn(uri)
        with self._changed:
            member = self._members[uri]
            member.visit = self._journal.begin(trial.point, uri)
            self._events.put(self._with_running(self._view.on_all()))
        self._pass_on(uri, Stand.BUSY)

    def end(self, uri: str, trial: Trial) -> None:
        """Record what came of a board's trial, in virtual time once no other ends before it."""
        with self._changed:
            member = self._members[uri]
            member.stand = Stand.DONE
            began_s = member.ends_s
            member.ends_s += 0.0 if trial.cost is None else trial.cost.duration_s
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._stopped or self._first(uri))
            if self._stopped and (self._virtual or trial.measurement is None):
                # It was cut short, or ends later than the study has in virtual time, which does not last until then.
                member.ends_s = began_s
                return
            assert member.visit is not None
            self._journal.end(member.visit, trial)
            member.visit = None
            member.stand = Stand.CHOOSING
            self._events.put(self._view.on_all())
            self._turns.append(uri)
            self._wake()

    def fatal(self, error: StorageError) -> None:
        """End the whole study: its journal cannot be written."""
        self._fail(error)

    # Turns.

    def _await_turn(self, uri: str) -> None:
        with self._changed:
            member = self._members[uri]
            if uri not in self._turns and member.stand is not Stand.IDLE:
                self._turns.append(uri)
            if member.stand is not Stand.IDLE:
                member.stand = Stand.CHOOSING
            self._changed.wait_for(lambda: self._stopped or (self._turns and self._turns[0] == uri))
            if self._stopped:
                raise Exhausted(_STOPPED)

    def _pass_on(self, uri: str, stand: Stand) -> None:
        with self._changed:
            if uri in self._turns:
                self._turns.remove(uri)
            self._members[uri].stand = stand
            self._changed.notify_all()

    def _wake(self) -> None:
        """Have whoever idles look again for something to try."""
        now_s = self._now_s
        for uri, member in self._members.items():
            if member.stand is Stand.IDLE:
                member.stand = Stand.CHOOSING
                member.ends_s = max(member.ends_s, now_s)
                self._turns.append(uri)
        self._changed.notify_all()

    def _first(self, uri: str) -> bool:
        """Return whether what has ended on a board comes next."""
        if not self._virtual:
            return True
        stands = [member.stand for member in self._members.values()]
        if self._turns or Stand.BUSY in stands or Stand.JOINING in stands or Stand.CHOOSING in stands:
            return False
        ended = {each: member.ends_s for each, member in self._members.items() if member.stand is Stand.DONE}
        return min(ended, key=lambda each: ended[each]) == uri

    # Which point comes next, and how long it is looked at.

    def _window(self, uri: str) -> Window:
        """Return the window of a board's trial."""
        problem = self._journal.study.problem
        visit = self._members[uri].visit
        at_default = visit is not None and self._journal.running[visit][0] == problem.space.default
        return shared_window(problem.window, len(self._boards) if at_default else 2)

    @property
    def _view(self) -> BoardsView:
        return BoardsView(self._journal.study, self._journal.boards)

    def _known(self, view: BoardsView) -> Study:
        """Return what has ended; its problem is the same object until it changes, by which methods remember studies."""
        known = view.on_all()
        if known.problem != self._problem:
            self._problem = known.problem
        return replace(known, problem=self._problem)

    def _with_running(self, study: Study) -> Study:
        for point, board in self._journal.running.values():
            study = study.with_trial(Trial(len(study.trials), point, board=board))
        return study

    def _chosen(self, uri: str) -> OperatingPoint | None:
        """Return the next point of a board whose turn it is; None if there is none for now.

        Raises:
            Exhausted: If there is none for good.
            TrialError: If the board cannot measure the default point.
        """
        with self._changed:
            if self._stopped or self._reason is not None:
                raise Exhausted(self._reason or _STOPPED)
            default = self._journal.study.problem.space.default
            if uri not in (view := self._view).defaults:
                self._check_default(uri, default)
                return default
            if (point := self._journal.again(uri)) is not None:
                return point
            known = self._known(view)
            study = self._with_running(known)
            at_work = bool(self._journal.running)
            stamp = (len(known.trials), tuple(self._journal.running))
            slowest = view.offsets.slowest
        reason = self._hopeless(known)
        if reason is None and self._settled is not None and self._settled[0] == stamp:
            reason = self._settled[1]
        if reason is None:
            point, reason = self._suggested(study)
            if point is not None:
                return point
        assert reason is not None
        self._settled = (stamp, reason)
        if uri == slowest and (point := self._unconfirmed(known, uri)) is not None:
            self._confirming = point
            return point
        enough = self._judged(known) if at_work else reason  # whatever comes of what runs
        if enough is not None:
            self._finish(enough, slowest, known)
        return None

    def _finish(self, reason: str, slowest: str | None, known: Study) -> None:
        """End the study for this reason, unless it has gone on meanwhile, or the answer is still to be confirmed.

        Raises:
            Exhausted: If it has ended.
        """
        with self._changed:
            if len(self._turns) > 1 or len(self._journal.study.trials) > len(known.trials):
                return
            alive = slowest is not None and self._members[slowest].stand is not Stand.GONE
            if slowest is not None and alive and self._unconfirmed(known, slowest) is not None:
                if self._members[slowest].stand is Stand.IDLE:
                    self._wake()
                return
            if slowest is not None and alive and self._confirms(slowest):
                return
            self._reason = reason
            self._stopped = True
            self._wake()
        raise Exhausted(reason)

    def _confirms(self, slowest: str) -> bool:
        """Return whether the slowest board now measures the point that would be the answer."""
        visit = self._members[slowest].visit
        return visit is not None and self._journal.running[visit][0] == self._confirming

    def _check_default(self, uri: str, default: OperatingPoint) -> None:
        failed = [
            trial.failure
            for trial in self._journal.study.trials
            if trial.point == default and self._journal.boards[trial.number] == uri and trial.failure is not None
        ]
        if failed:
            raise TrialError(f"the default point cannot be measured: {failed[-1]}")

    def _suggested(self, study: Study) -> tuple[OperatingPoint | None, str | None]:
        """Return the next point, or why there is none, as long as what runs ends as expected."""
        if (used := self._used(study)) is not None:
            return None, used
        try:
            point = self._optimizer.suggest(study)
        except Exhausted as error:
            count = len(study.visited)
            points = len(study.problem.space)
            return None, f"{ALL_TRIED}: {points}" if count >= points else str(error)
        if (enough := self._enough(study)) is not None:
            return None, enough
        if self._idles(study):
            return None, f"{NOTHING_LEFT} beside what runs"
        return point, None

    def _judged(self, known: Study) -> str | None:
        """Return as `_enough` for what has ended; asked once after each trial, not once for each board that idles."""
        if self._verdict is None or self._verdict[0] != len(known.trials):
            self._verdict = len(known.trials), self._enough(known)
        return self._verdict[1]

    def _enough(self, study: Study) -> str | None:
        """Return why one more trial is not worth it; None if it is."""
        # The default, which each board has measured, is one point of those it takes to say anything.
        if len({trial.point for trial in study.completed}) < ENOUGH and self._rule.horizon_s is None:
            return None
        outlook = Outlook(self._optimizer)
        if reason := self._rule.reason(study, outlook.saving_left, outlook.dares, outlook.held_back):
            return reason
        # A trial that all other boards wait for takes the time of all of them, so it has to be worth more than one's.
        share = self._share_left(study)
        if share >= WORTHLESS_IDLE:
            return None
        words = f"{NOTHING_LEFT}: one more trial would save {max(100 * share, 0.001):.2g} % beside the best"
        return outlook.held_back(study) or words

    def _idles(self, study: Study) -> bool:
        """Return whether a board waits for what runs, as one more trial would save next to nothing beside it.

        What a trial would save is a guess as long as others run; what they tell settles most of it.
        """
        runs = any(trial.state is TrialState.RUNNING for trial in study.trials)
        enough = len({trial.point for trial in study.completed}) >= ENOUGH
        return runs and enough and self._share_left(study) < WORTHLESS_IDLE

    def _share_left(self, study: Study) -> float:
        """Return the share of the objective that one more trial is expected to save; inf if that does not count."""
        best = study.best
        if not self._rule.early or self._rule.horizon_s is not None or best is None or best.measurement is None:
            return math.inf
        return Outlook(self._optimizer).saving_left(study) / study.problem.objective.of(best.measurement)

    def _used(self, study: Study) -> str | None:
        """Return what of the budget is used up: of time what the study took, and not what all boards did.

        Where there are limits one trial is kept for the slowest board.
        """
        made = len(study.trials)
        if made + bool(study.problem.constraints) >= self._budget.trials:
            return f"{made} trials made"
        took = Trial(0, study.problem.space.default, failure="", cost=replace(study.cost, duration_s=self.duration_s))
        return self._budget.used(Study(study.problem, trials=(took,)))

    def _hopeless(self, study: Study) -> str | None:
        newest = study.trials[-FAILURES_IN_A_ROW:]
        if len(newest) == FAILURES_IN_A_ROW and all(trial.state is TrialState.FAILED for trial in newest):
            return f"given up: {FAILURES_IN_A_ROW} trials in a row failed; the last: {newest[-1].failure}"
        return None

    # The answer, which has to hold on the slowest board.

    def _answer(self, known: Study) -> Trial | None:
        """Return the trial whose point is the answer, as every board would have it."""
        if not known.judgeable:
            return None
        if isinstance(self._optimizer, Chooser):
            return self._optimizer.answer(known)
        return known.best

    def _unconfirmed(self, known: Study, slowest: str) -> OperatingPoint | None:
        """Return the point that would be the answer, where a limit might not hold on the slowest board.

        It does where it was measured there, or its interval elsewhere, boards' differences counted, lies within it.
        """
        if not known.problem.constraints or (answer := self._answer(known)) is None:
            return None
        if all(_surely_holds(each, answer) for each in known.constraints):
            return None
        boards = self._journal.boards
        there = {trial.point for trial in known.trials if boards[trial.number] == slowest}
        running = {point for point, board in self._journal.running.values() if board == slowest}
        made = len(known.trials) + len(self._journal.running)
        if answer.point in there | running or made >= self._budget.trials:
            return None
        return answer.point

    def _surest(self, answer: Trial) -> int:
        """Return the number of the answer's trial: of those at its point the one on the slowest board."""
        slowest = self._view.offsets.slowest
        boards = self._journal.boards
        same = [trial.number for trial in self._journal.study.completed if trial.point == answer.point]
        return next((number for number in same if boards[number] == slowest), answer.number)


class _Desk:
    """What the loop of one board takes for its journal and its search method.

    Args:
        shared: The study of all boards.
        uri: The board.
    """

    spent = NOTHING_SPENT

    def __init__(self, shared: SharedStudy, uri: str) -> None:
        self._shared = shared
        self._uri = uri

    @property
    def study(self) -> Study:
        """The study as this board would have made it."""
        return self._shared.study_of(self._uri)

    def suggest(self, study: Study) -> OperatingPoint:
        """Return the next point for this board.

        Raises:
            Exhausted: If there is none.
        """
        return self._shared.next_point(self._uri)

    def started(self, trial: Trial, reserved: float | None = None) -> Study:
        """Record that a trial is about to touch the board."""
        with self._fatal():
            self._shared.begin(self._uri, trial)
        return self.study

    def completed(self, trial: Trial, spent: LateRequests | None = None) -> Study:
        """Record what a trial measured."""
        with self._fatal():
            self._shared.end(self._uri, trial)
        return self.study

    def failed(self, trial: Trial, spent: LateRequests | None = None) -> Study:
        """Record why a trial measured nothing."""
        return self.completed(trial)

    def finish(self, reason: str, answer: int | None = None) -> None:
        """Do nothing: the study of all boards ends when they have."""

    @contextlib.contextmanager
    def _fatal(self) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            self._shared.fatal(error)
            raise


def _surely_holds(constraint: Constraint, trial: Trial) -> bool:
    """Return whether the whole interval of what a trial measured lies within a limit."""
    if trial.measurement is None or (between := trial.measurement.intervals.get(constraint.metric)) is None:
        return False
    if constraint.metric in FLOORS:
        return between.low >= constraint.limit
    return between.high <= constraint.limit
