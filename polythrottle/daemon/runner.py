"""The control loop: each second it answers, looks, thinks and acts; sooner if requests pile up."""

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from polythrottle.clock import Clock
from polythrottle.daemon.accounts import Accounts
from polythrottle.daemon.acting import Acting
from polythrottle.daemon.choosing import Choosing
from polythrottle.daemon.controller import hurried
from polythrottle.daemon.desk import Desk
from polythrottle.daemon.guards import Bounds
from polythrottle.daemon.looking import JUMP_S, Looking, Sight
from polythrottle.daemon.notify import Supervisor
from polythrottle.daemon.ports import Board, Seen, Traffic
from polythrottle.daemon.record import Record
from polythrottle.daemon.saving import Saving
from polythrottle.daemon.showing import Frame, Turn, stamp, status_of
from polythrottle.daemon.signals import (
    DriftFound,
    Reclaim,
    Refused,
    Resume,
    StudyAsked,
    StudyEnded,
    StudyOffered,
    Suspend,
    Target,
    WorkloadDown,
    WorkloadUp,
)
from polythrottle.daemon.state import Phase
from polythrottle.daemon.studying import Studies
from polythrottle.daemon.tuned import Tuned, check_kind, read_tuned, untuned
from polythrottle.daemon.watching import Watching
from polythrottle.daemon.wishes import Report, SetBudget, StartStudy
from polythrottle.daemon.wishing import answer
from polythrottle.errors import BadFile, DeviceError, InvalidInput, PolythrottleError

PERIOD_S = 1.0
_STEP_S = 0.1
_GONE_S = 3.0
"""How long a workload must be gone to be down: a server that is asked may fail to answer once."""
_SLEPT_S = 1.0
_LATENESSES = 1000
_STUMBLES_MOST, _STUMBLES_S = 3, 60.0
_RELEASED = "released"


def slept_s() -> float:
    """Return how long this machine has been asleep since it was started, in seconds."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)


@dataclass(frozen=True)
class Parts:
    """What the control loop is made of.

    Args:
        clock: It goes by.
        board: It sets.
        traffic: It follows.
        desk: Where it meets those who ask.
        record: What it remembers.
        accounts: What it adds up.
        studies: Tune again.
        guards: Limits that go before those of profiles; ``slo`` constraints likewise.
        identity: Returns what the board is, to check profiles with; empty if it does not say.
        wall: Wall time, seconds since the epoch.
        slept_s: How long the machine has slept so far.
        supervisor: The service manager.
        version: Of polythrottle.
    """

    clock: Clock
    board: Board
    traffic: Traffic
    desk: Desk
    record: Record
    accounts: Accounts
    studies: Studies
    guards: Bounds = field(default_factory=Bounds)
    slo: tuple[str, ...] = ()
    identity: Callable[[], Mapping[str, str]] = dict
    wall: Callable[[], float] = time.time
    slept_s: Callable[[], float] = slept_s
    supervisor: Supervisor = field(default_factory=lambda: Supervisor({}))
    version: str = ""


class Runner:
    """The control loop.

    `run` turns until `stop`; whatever ends it, the board is given back. `turn` is one control period, for tests.

    Args:
        parts: What it is made of.
        first: What is followed; None if nothing is known of any workload.
    """

    def __init__(self, parts: Parts, first: Tuned | None) -> None:
        self._parts = parts
        self._told: Counter[str] = Counter()
        self._watching = Watching(parts.record)
        self._acting = Acting(parts.clock, parts.board, parts.traffic, parts.studies, self.tell)
        self._choosing = Choosing(self._acting, parts.record, first, self.tell, self._adopted)
        peaks = parts.guards.peak_w is not None
        self._looking = Looking(parts.board, parts.traffic, parts.clock.now(), peaks)
        self._frame = Frame(parts.board, parts.traffic, stamp(parts.wall()), parts.version)
        self._number, self._due_s, self._late_s = 0, parts.clock.now(), 0.0
        self._latenesses: deque[float] = deque(maxlen=_LATENESSES)
        self._sight = Sight(parts.clock.now(), PERIOD_S, None, None)
        self._slept_s = parts.slept_s()
        self._gone_s: float | None = None
        self._before: tuple[Target | None, Phase] = None, Phase.DOWN
        self._stumbles: deque[float] = deque(maxlen=_STUMBLES_MOST)
        self._stopping = False
        self._resume()

    @property
    def choosing(self) -> Choosing:
        """Which profile is followed."""
        return self._choosing

    @property
    def acting(self) -> Acting:
        """The controller's state and what is done for it."""
        return self._acting

    def run(self) -> None:
        """Turn once a second until `stop` is called; the board is given back whatever happens.

        Raises:
            DeviceError: If the control loop stumbled three times in a minute, or the board could not be restored.
        """
        with ExitStack() as ends:
            ends.callback(self._end)
            self._publish(self._sight)
            self._parts.supervisor.ready("the control loop turns")
            while not self._stopping:
                try:
                    self.turn()
                    self._wait()
                except Exception as error:
                    self._stumbled(error)

    def turn(self) -> None:
        """Do what belongs to one control period."""
        parts, now_s = self._parts, self._parts.clock.now()
        self._number += 1
        self._timed(now_s)
        self._woken()
        self.answer()
        if self._acting.keep_lease():
            self._recognised()
            self._acting.regained()
        sight = self._looking.look(now_s)
        self._presence(sight)
        self._thought(sight)
        self._acting.check()
        self._publish(sight)
        parts.record.flush()
        parts.supervisor.alive()

    def answer(self) -> None:
        """Answer those who wait, once what they asked for can be seen in the status."""
        for asked in self._parts.desk.wishes():
            try:
                said = answer(self, asked.wish)
                if not isinstance(asked.wish, Report):
                    self._publish(self._sight)
                asked.answer.set_result(said)
            except PolythrottleError as error:
                asked.answer.set_exception(error)
            except BaseException:
                asked.answer.set_exception(DeviceError("the daemon stumbled over this; its events say more"))
                raise

    def tell(self, kind: str, words: str) -> None:
        """Note an event and show it."""
        self._told[kind] += 1
        self._parts.desk.tell([self._parts.record.tell(kind, words)])

    def go_on(self) -> None:
        """Follow the profile that was followed last, where the daemon was started with the same one then."""
        if (name := self._choosing.remembered) is None:
            return
        try:
            wanted = read_tuned(name, self._parts.identity(), self._parts.guards, self._parts.slo)
        except PolythrottleError as error:
            self.tell("profile", f"{name}, followed last, cannot be followed any more: {error}")
            return
        self._choosing.apply(wanted, self._parts.clock.now(), None)
        self.tell("profile", f"{name} is followed, as when the daemon ran last")

    def stop(self) -> str:
        """End the loop after the turn under way."""
        self._stopping = True
        return "the daemon ends, and gives the board back"

    def apply_profile(self, name: str, within_s: float | None) -> str:
        """Follow another profile; see `ApplyProfile`.

        Raises:
            PolythrottleError: If it cannot be followed.
        """
        parts = self._parts
        wanted = read_tuned(name, parts.identity(), parts.guards, parts.slo)
        now = self._choosing.tuned
        if now is not None and now.workload and wanted.workload != now.workload:
            raise InvalidInput(f"this profile is of {wanted.workload}, and the daemon looks after {now.workload}")
        self._choosing.apply(wanted, parts.clock.now(), within_s)
        self._acting.faults.pop("profile", None)
        limit = "" if within_s is None else f"; the one before comes back in {within_s:g} s unless it is confirmed"
        self.tell("profile", f"{wanted.name} is followed{limit}")
        return f"{wanted.name} is followed{limit}"

    def confirm(self) -> str:
        """Keep the profile applied last.

        Raises:
            InvalidInput: If there is nothing to confirm.
        """
        words = self._choosing.confirm()
        self.tell("profile", words)
        return words

    def release(self, reason: str) -> str:
        """Put the board back and leave it alone.

        Raises:
            DeviceError: If that cannot be told to the actuator; it restores the board when the lease is over.
        """
        self._acting.do(WorkloadDown())
        self._parts.record.keep(_RELEASED, reason)
        self.tell("phase", f"released: {reason}; nothing is set until it is taken again")
        left = "; ".join(self._acting.give_back(reason))
        found = f"not as found ({left})" if left else "as found"
        return f"the board is {found}, and left alone until it is taken again"

    def take(self) -> str:
        """Set the board again.

        Raises:
            DeviceError: If another holds it.
        """
        if self._acting.released:
            self._acting.take_again()
            self._parts.record.keep(_RELEASED, None)
            self.tell("phase", "taken again")
        else:
            self._acting.do(Reclaim())
        return "the board is set again"

    def set_budget(self, wish: SetBudget) -> str:
        """Take a budget over.

        Raises:
            PolythrottleError: If it makes no sense, or names a file that cannot be used.
        """
        budget = self._parts.accounts.wished(wish)
        words = "no budget limits the power" if budget is None else f"budget: {budget.words}"
        self.tell("budget", words)
        return words

    def start_study(self, wish: StartStudy) -> tuple[str, str]:
        """Start a study now.

        Raises:
            PolythrottleError: If that cannot be.
        """
        studies = self._parts.studies
        if self._parts.studies.runs:
            raise InvalidInput("a study runs already; stop it first, or follow it")
        if self._acting.released or not self._acting.up:
            raise DeviceError("a study needs the workload to be up and the board not to be released")
        studies.ask(wish.trials, wish.options)
        before = self._acting.state.study_wanted
        self._acting.do(StudyAsked("somebody asked for it"))
        if not studies.runs or studies.shown is None:
            self._acting.want_study(before)
            raise DeviceError(f"no study could be started while the daemon is {self._acting.state.phase}; ask again")
        return studies.shown.id, f"study {studies.shown.id} has begun"

    def stop_study(self, name: str) -> str:
        """End the study that runs.

        Raises:
            InvalidInput: If none of that name runs.
        """
        studies = self._parts.studies
        if not studies.runs or studies.shown is None or name not in ("", studies.shown.id):
            raise InvalidInput(f"no study {name} runs".replace("  ", " "))
        studies.stop("somebody asked for it")
        self._acting.do(StudyEnded(None))
        self.tell("study", f"study {studies.shown.id} is stopped; its journal keeps what it knows")
        return "the study is stopped"

    def report(self, seen: Seen) -> Target | None:
        """Take in what a serving program says of its requests.

        Raises:
            InvalidInput: If requests are seen in another way.
        """
        take = getattr(self._parts.traffic, "report", None)
        if take is None:
            raise InvalidInput(
                f"requests are seen through {self._parts.traffic.uri}; start the daemon with --traffic report"
            )
        take(seen, self._parts.clock.now())
        return self._acting.holds

    def _resume(self) -> None:
        """Go on where the daemon before was cut off."""
        self._parts.desk.tell(self._parts.record.recent)
        self.tell("start", f"the daemon has begun, for {self._parts.board.title}")
        self._parts.accounts.resume_budget()
        if isinstance(reason := self._parts.record.kept(_RELEASED), str):
            self._acting.released = reason
            self.tell("phase", f"still released: {reason}; take it again to have the board set")

    def _adopted(self, tuned: Tuned) -> None:
        self._parts.accounts.saving = Saving.of(tuned.profile)
        self._parts.studies.tuned = tuned
        self._watching.over(tuned.plan.ladder)

    def _timed(self, now_s: float) -> None:
        """Note how late a turn begins, and set the next; after a jump of the clock count from now."""
        late_s = now_s - self._due_s
        if -PERIOD_S <= late_s < JUMP_S:
            self._late_s = max(0.0, late_s)
            self._latenesses.append(self._late_s)
            self._due_s += PERIOD_S * (1 + int(self._late_s / PERIOD_S))
        else:
            self._due_s = now_s + PERIOD_S

    def _woken(self) -> None:
        asleep_s = self._parts.slept_s()
        if asleep_s - self._slept_s > _SLEPT_S:
            self.tell("machine", f"the machine slept for {asleep_s - self._slept_s:.0f} s; what holds is set anew")
            self._acting.do(Suspend())
            self._acting.do(Resume())
        self._slept_s = asleep_s

    def _recognised(self) -> None:
        """Look what board the right to set one is for: a profile of another kind is not followed any more."""
        tuned, parts = self._choosing.tuned, self._parts
        if tuned is None or tuned.profile is None:
            return
        try:
            check_kind(tuned.profile, parts.identity())
        except BadFile as error:
            self._acting.faults["profile"] = f"{tuned.name} is not followed: {error}"
            self.tell("profile", self._acting.faults["profile"])
            self._choosing.expire(untuned(tuned.workload, parts.guards, tuned.slo))

    def _presence(self, sight: Sight) -> None:
        """Tell the controller when the workload has come or gone."""
        tuned, up = self._choosing.tuned, self._acting.up
        if sight.seen is not None and not self._acting.released:
            self._gone_s = None
            if not up and tuned is not None:
                self._acting.do(WorkloadUp(tuned.plan))
            self._choosing.model(sight.seen.model)
        elif up:
            self._gone_s = sight.now_s if self._gone_s is None else min(self._gone_s, sight.now_s)
            if sight.now_s - self._gone_s >= _GONE_S:
                self._acting.do(WorkloadDown())

    def _thought(self, sight: Sight) -> None:
        """Let the controller think, and all those who add up, watch and compare."""
        acting, accounts = self._acting, self._parts.accounts
        if acting.up and not sight.jumped:
            acting.do(sight.observed)
        for event in accounts.turn(sight, acting.state):
            acting.do(event)
        if acting.state.study_wanted and self._parts.studies.costless:
            acting.do(StudyOffered())
        accounts.limited(None if self._choosing.tuned is None else self._choosing.tuned.plan.bounds.p99_s)
        self._watched(sight)
        if (ended := self._parts.studies.poll()) is not None:
            acting.do(StudyEnded(None))
            self.tell("study", ended.words)
            if ended.profile is not None:
                self._found(str(ended.profile))
        hold = acting.state.hold
        self._choosing.turn(sight, hold is not None and not hold.hardware)

    def _found(self, name: str) -> None:
        parts = self._parts
        try:
            wanted = read_tuned(name, parts.identity(), parts.guards, parts.slo)
        except PolythrottleError as error:
            self.tell("study", f"what the study has found cannot be followed: {error}")
            return
        self._watching.again()
        self._choosing.found(wanted, self._watching.spread)

    def _watched(self, sight: Sight) -> None:
        """Ask for drift what was seen in a period through all of which one rung was held."""
        state = self._acting.state
        before, self._before = self._before, (state.applied, state.phase)
        if state.phase is not Phase.FOLLOWING or before != self._before or (rung := state.rung) is None or sight.jumped:
            return
        if (words := self._watching.seen(sight, state.footing.rung, rung)) is not None:
            self._acting.do(DriftFound(words))

    def _wait(self) -> None:
        """Wait for the next turn; meanwhile answer, and look sooner if requests pile up."""
        clock = self._parts.clock
        while not self._stopping and 0 < (left_s := self._due_s - clock.now()) < 2 * PERIOD_S:  # rounded
            clock.sleep(min(left_s, _STEP_S) if self._acting.up else left_s)
            self.answer()
            now_s = clock.now()
            if not self._acting.up or self._due_s - now_s < _STEP_S / 2:
                continue
            if hurried(self._acting.state, self._looking.peek(now_s)):
                sight = self._looking.look(now_s)
                self._acting.do(sight.observed)
                self._parts.accounts.between(sight)

    def _stumbled(self, error: Exception) -> None:
        """Say what went wrong, go to the safe point, and go on; give up if it goes wrong again and again."""
        words = f"{type(error).__name__}: {error}"[:300]
        now_s = self._parts.clock.now()
        self.tell("fault", f"the control loop stumbled: {words}")
        self._stumbles.append(now_s)
        if len(self._stumbles) == _STUMBLES_MOST and 0 <= now_s - self._stumbles[0] < _STUMBLES_S:
            raise DeviceError(
                f"the control loop stumbled {_STUMBLES_MOST} times in a minute, last over {words}"
            ) from error
        self._acting.do(Refused(f"the control loop stumbled: {words}"))
        self._due_s = now_s + PERIOD_S
        self._wait()

    def _publish(self, sight: Sight) -> None:
        parts, acting, choosing = self._parts, self._acting, self._choosing
        self._sight = sight
        faults = {**acting.faults, **self._looking.faults}
        if parts.record.fault:
            faults["record"] = parts.record.fault
        late = sorted(self._latenesses)
        turn = Turn(
            self._number,
            parts.wall(),
            self._late_s,
            late[min(len(late) - 1, int(0.99 * len(late)))] if late else 0.0,
            acting.reason,
            bool(acting.released),
            tuple(faults.values()),
            self._watching.words,
            parts.studies.shown,
            dict(self._told),
            choosing.unconfirmed,
            choosing.left_s(sight.now_s),
        )
        parts.desk.publish(status_of(self._frame, turn, acting.state, sight, choosing.tuned, parts.accounts))

    def _end(self) -> None:
        """Give everything back; each step is taken whatever becomes of those before."""
        parts = self._parts
        with ExitStack() as ends:
            ends.callback(parts.record.close)
            ends.callback(parts.accounts.close)
            ends.callback(parts.traffic.close)
            ends.callback(self._given_back)
            ends.callback(parts.studies.close)
            parts.supervisor.stopping()
            parts.record.keep(_RELEASED, None)

    def _given_back(self) -> None:
        """Give the board back and say what is known of it; where it may differ, that is how the daemon ends."""
        left = "whether the board was restored is not known"
        try:
            left = "; ".join(self._acting.give_back("the daemon ends"))
        except PolythrottleError as error:
            left = str(error)
            raise
        finally:
            words = f"the board may not be as it was found: {left}" if left else "the board is as it was found"
            self.tell("stop", f"the daemon has ended; {words}")
        if left:
            raise DeviceError(words)
