"""Carries out the controller's actions on board, server and studies, and tells it what became of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

from polythrottle.actuation.client.board import Board
from polythrottle.daemon.control.controller import reason, step
from polythrottle.daemon.control.events import (
    Action,
    Apply,
    ApplyRefused,
    Event,
    ForeignWrite,
    GoSafe,
    LeaseGained,
    LeaseLost,
    Replanned,
    Restore,
    StartStudy,
    StopStudy,
    StudyEnded,
    Target,
    Verify,
)
from polythrottle.daemon.control.state import Phase, State
from polythrottle.daemon.followed_profile import UNTOUCHED, FollowedProfile
from polythrottle.daemon.loop.mailbox import EventRecorder
from polythrottle.daemon.observation import Traffic
from polythrottle.daemon.study_process import Studies
from polythrottle.domain.clock import Clock
from polythrottle.domain.errors import DeviceError, KnobRejected, PolythrottleError, StorageError, TrialError

_FOREIGN_S = 10.0
_SERVE_AGAIN_S = 10.0
_RETRY_MOST_S = 30.0
_EVENTS_MOST = 16
_TAKING = "r in polythrottle top, or POST /v1/take"


class Executor:
    """The controller's state, and all that is done for it.

    Args:
        clock: Of the control loop.
        board: Is set.
        traffic: Is told of batches.
        studies: Are started and stopped.
        events: Notes what happens.

    Attributes:
        state: Of the controller.
        released: Why the board is left alone; empty unless a person asked for that.
        reached: Whether there was ever the right to set the board.
        faults: What does not work now, by what it is of.
        applies: How often something was set.
    """

    def __init__(self, clock: Clock, board: Board, traffic: Traffic, studies: Studies, events: EventRecorder) -> None:
        self.state = State()
        self._why = ""
        self.released = ""
        self.reached = False
        self.applies = 0
        self.faults: dict[str, str] = {}
        self._followed: FollowedProfile | None = None
        self._clock = clock
        self._board = board
        self._traffic = traffic
        self._studies = studies
        self._events = events
        self._retry_s = 1.0
        self._retry_at_s = -math.inf
        self._had = False
        self._checked_s = clock.now()
        self._unserved: Target | None = None
        self._serve_at_s = -math.inf

    @property
    def reason(self) -> str:
        """Why what is set is set, as far as is known now; or why nothing is."""
        if self.released:
            return f"released: {self.released}"
        if not self.state.leased:
            return f"not set: {self.faults.get('board', 'the right to set the board is not there')}"
        if not self._why:
            return "nothing was set yet"
        if self.state.phase is Phase.STUDYING:
            return self._why
        return reason(self.state)

    @property
    def waits(self) -> str:
        """When what is chosen now will be followed; empty if it is already."""
        if self.released:
            return f"once the board is taken again ({_TAKING})"
        if self.state.phase is Phase.YIELDED:
            return f"once the board is set again: after a while by itself, or when it is taken ({_TAKING})"
        if not self.state.leased:
            return "once the daemon has the right to set the board"
        if self.up:
            return ""
        return "once the workload is up"

    def do(self, event: Event) -> None:
        """Tell the controller of an event and carry out what it says, and what follows from that."""
        waiting = deque([event])
        # What fails is an event again, and may fail again: the bound ends such a circle.
        for _ in range(_EVENTS_MOST):
            if not waiting:
                return
            phase = self.state.phase
            self.state, actions = step(self.state, waiting.popleft())
            for action in actions:
                waiting.extend(self._carried_out(action))
            if self.state.phase is not phase:
                self._events.tell("phase", f"{self.state.phase}: {self.reason}")

    def follow(self, tuned: FollowedProfile) -> None:
        """Have the controller follow a profile from now on."""
        self._followed = tuned
        self.do(Replanned(tuned.plan))

    def stay_released(self, reason: str) -> None:
        """Leave the board alone from the start, as the daemon before was asked to."""
        self.released = reason

    def keep_lease(self) -> bool:
        """Renew the right to set the board; where it is gone, ask for it again, ever less often.

        Returns:
            Whether it is there now and was not before, so that what is behind it may be another board.
        """
        now_s = self._clock.now()
        # A retry further away than the longest wait comes of a clock that was set back: ask at once then.
        if self.released or (not self.state.leased and 0 <= self._retry_at_s - now_s <= _RETRY_MOST_S):
            return False
        try:
            self._board.take()
        except PolythrottleError as error:
            had = self._had
            self._had = False
            self._lost(str(error), had)
            return False
        self.reached = True
        self.faults.pop("board", None)
        self._retry_s = 1.0
        fresh = not self._had or not self.state.leased
        self._had = True
        return fresh

    def regained(self) -> None:
        """Set again what is to hold, after the right to set the board was away."""
        if not self.state.leased:
            self._events.tell("lease", "the right to set the board is there again")
            self.do(LeaseGained())

    def check(self) -> None:
        """Look every ten seconds whether somebody else has set the board, and tell the server again what it missed."""
        now_s = self._clock.now()
        state = self.state
        # A server that restarts forgets its batch; one that refused may take it later.
        if self._unserved is not None and not 0 <= self._serve_at_s - now_s <= _SERVE_AGAIN_S:
            self._serve(self._unserved)
        if abs(now_s - self._checked_s) < _FOREIGN_S:
            return
        self._checked_s = now_s
        # A study sets the board itself: what it writes is nobody else's doing.
        if state.applied is None or not state.leased or state.study_runs or self.released:
            return
        try:
            knobs = self._board.verify()
        except PolythrottleError as error:
            self.faults["check"] = f"what is set on the board cannot be read back: {error}"
            return
        self.faults.pop("check", None)
        if knobs:
            self.do(ForeignWrite(now_s, knobs))

    def want_study(self, words: str) -> None:
        """Want a study for this reason instead of the one there is; for none, if it is empty."""
        self.state = replace(self.state, study_wanted=words)

    def give_back(self, reason: str) -> tuple[str, ...]:
        """Put everything back and give up the right to set the board, until `take_again`.

        Returns:
            What may not be as it was found.

        Raises:
            DeviceError: If the board could not be restored from here.
        """
        self.released = reason
        self._had = False
        self._serve(UNTOUCHED)
        return self._board.release()

    def take_again(self) -> None:
        """Take the right to set the board again.

        Raises:
            DeviceError: If another has it.
        """
        # It stays released where another has it, so that the controller does not set what is not its own.
        self._board.take()
        self.released = ""

    def _carried_out(self, action: Action) -> Iterator[Event]:
        if isinstance(action, (Apply, GoSafe)):
            self._why = action.reason
            yield from self._tried(partial(self._applied, action.target))
        elif isinstance(action, Restore):
            self._why = action.reason
            self._serve(UNTOUCHED)
            yield from self._tried(self._board.restore)
        elif isinstance(action, Verify):
            yield from self._tried(self._verified)
        elif isinstance(action, StartStudy):
            yield from self._begun(action.reason)
        elif isinstance(action, StopStudy):
            self._studies.stop(action.reason)
        else:
            self._events.tell(action.kind, action.words)

    def _tried(self, work: Callable[[], None]) -> Iterator[Event]:
        try:
            work()
        except KnobRejected as error:
            yield ApplyRefused(str(error))
        except DeviceError as error:
            self._fault(str(error))
            yield LeaseLost(f"the right to set the board is lost: {error}")
        except StorageError as error:
            # As found it is at its fastest, which serves everybody; putting it back needs no room on a disk.
            with suppress(PolythrottleError):
                self._board.restore()
            self._fault(str(error))
            yield LeaseLost(f"the board cannot be set: {error}")

    def _applied(self, target: Target) -> None:
        # A profile's points hold workload knobs too, such as the batch: those are the server's to set.
        if self._followed is None:
            point = target.point
        else:
            point = self._followed.device_point(target.point)
        self.applies += 1
        self._board.apply(point)
        self._serve(target)

    def _verified(self) -> None:
        self._board.verify()

    def _serve(self, target: Target) -> None:
        """Tell the server; what it does not take now it is told again later."""
        self._unserved = None
        try:
            self._traffic.serve(target)
        except TrialError as error:
            # Told once, for it is tried again every ten seconds.
            if "server" not in self.faults:
                self._events.tell("fault", f"the server does not take its batch: {error}")
            self.faults["server"] = f"the server does not take its batch: {error}"
            self._unserved = target
            self._serve_at_s = self._clock.now() + _SERVE_AGAIN_S
        else:
            self.faults.pop("server", None)

    def _begun(self, reason: str) -> Iterator[Event]:
        self._why = f"a study runs: {reason}"
        try:
            self._studies.start(reason, self._followed)
        except PolythrottleError as error:
            self._events.tell("study", f"no study could be started: {error}")
            yield StudyEnded(None)
        else:
            self._events.tell("study", f"a study has started: {reason}")

    def _lost(self, words: str, had: bool) -> None:
        self._fault(words)
        if self.state.leased:
            if had:
                loss = "the right to set the board is lost"
            else:
                loss = "the board cannot be set"
            self.do(LeaseLost(f"{loss}: {words}"))

    def _fault(self, words: str) -> None:
        self.faults["board"] = words
        self._retry_at_s = self._clock.now() + self._retry_s
        self._retry_s = min(_RETRY_MOST_S, 2 * self._retry_s)

    @property
    def holds(self) -> Target | None:
        """What is set now; None while the board is as found or a study sets it."""
        return self.state.applied

    @property
    def up(self) -> bool:
        """Whether the workload is."""
        return self.state.plan is not None
