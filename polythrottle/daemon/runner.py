"""The control loop: each second it answers, looks, thinks and acts; sooner if requests pile up."""

from collections import Counter, deque
from contextlib import ExitStack

from polythrottle.daemon.acting import Acting
from polythrottle.daemon.choosing import Choosing
from polythrottle.daemon.controller import hurried
from polythrottle.daemon.finetuning import Doing
from polythrottle.daemon.looking import JUMP_S, Looking, Sight
from polythrottle.daemon.parts import Parts
from polythrottle.daemon.saving import Saving
from polythrottle.daemon.showing import Frame, Turn, stamp, status_of
from polythrottle.daemon.signals import (
    DriftFound,
    DriverReload,
    Finetuned,
    Refused,
    Resume,
    StudyEnded,
    StudyOffered,
    Suspend,
    Target,
    WorkloadDown,
    WorkloadUp,
)
from polythrottle.daemon.state import Phase
from polythrottle.daemon.tuned import Tuned, check_kind, read_tuned, untuned
from polythrottle.daemon.watching import Watching
from polythrottle.daemon.wishes import Report
from polythrottle.daemon.wishing import RELEASED, Wishing
from polythrottle.errors import BadFile, DeviceError, PolythrottleError

PERIOD_S = 1.0
_STEP_S = 0.1
_GONE_S = 3.0
"""How long a workload must be gone to be down: a server that is asked may fail to answer once."""
_SLEPT_S = 1.0
_LATENESSES = 1000
_STUMBLES_MOST, _STUMBLES_S = 3, 60.0


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
        self.wishing = Wishing(parts, self._acting, self._choosing, self.tell, self.stop)
        peaks = parts.guards.peak_w is not None
        self._looking = Looking(parts.board, parts.traffic, parts.clock.now(), peaks)
        self._frame = Frame(parts.board, parts.traffic, stamp(parts.wall()), parts.version)
        self._number, self._due_s, self._late_s = 0, parts.clock.now(), 0.0
        self._latenesses: deque[float] = deque(maxlen=_LATENESSES)
        self._sight = Sight(parts.clock.now(), PERIOD_S, None, None)
        self._slept_s = parts.slept_s()
        self._gone_s: float | None = None
        self._trained: tuple[str, str] | None = None
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
            DeviceError: If the control loop failed three times in a minute, or the board could not be restored.
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
        self._beside(now_s)
        sight = self._looking.look(now_s)
        if sight.anew:
            self._acting.do(DriverReload())
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
                said = self.wishing.answer(asked.wish, asked.read)
                if not isinstance(asked.wish, Report):
                    self._publish(self._sight)
                asked.answer.set_result(said)
            except PolythrottleError as error:
                asked.answer.set_exception(error)
            except BaseException:
                asked.answer.set_exception(DeviceError("the daemon failed at this; its events say more"))
                raise

    def tell(self, kind: str, words: str) -> None:
        """Note an event and show it."""
        self._told[kind] += 1
        self._parts.desk.tell([self._parts.record.tell(kind, words)])

    def unfit(self, words: str) -> None:
        """Show that the profile that was asked for is not followed, and why, until one is."""
        tuned = self._choosing.tuned
        self._acting.faults["profile"] = f"{'' if tuned is None else tuned.name} is not followed: {words}"
        self.tell("profile", self._acting.faults["profile"])

    def go_on(self) -> None:
        """Follow the profile followed last, where the daemon was started with the same one, and go on comparing."""
        if (name := self._choosing.remembered) is not None:
            self._go_on_with(name)
        if (name := self._choosing.compared) is not None:
            self._found(name)

    def _go_on_with(self, name: str) -> None:
        try:
            wanted = read_tuned(name, self._parts.identity(), self._parts.guards, self._parts.slo)
        except PolythrottleError as error:
            self.tell("profile", f"{name}, followed last, cannot be followed any more: {error}")
            return
        self._choosing.apply(wanted, self._parts.clock.now(), None)
        self.tell("profile", f"{name} is followed, as when the daemon ran last")

    def stop(self) -> None:
        """End the loop after the turn under way."""
        self._stopping = True

    def _resume(self) -> None:
        """Go on where the daemon before was cut off."""
        self._parts.desk.tell(self._parts.record.recent)
        self.tell("start", f"the daemon has started, for {self._parts.board.title}")
        if other := self._parts.accounts.resume_budget(self._parts.board.uri):
            self.tell("budget", f"the budget kept is one for {other}, and is not followed here; set another")
        if isinstance(reason := self._parts.record.kept(RELEASED), str):
            self._acting.released = reason
            self.tell("phase", f"still released: {reason}; take it again to have the board set")

    def _adopted(self, tuned: Tuned) -> None:
        if tuned.profile is not None:
            self._acting.faults.pop("profile", None)
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
            self.tell("machine", f"the machine slept for {asleep_s - self._slept_s:.0f} s; what was set is set again")
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
            self.unfit(str(error))
            self._choosing.expire(untuned(tuned.workload, parts.guards, tuned.slo))

    def _beside(self, now_s: float) -> None:
        """Tell the controller when a trainer beside the workload begins or ceases to work."""
        shown, before = self._parts.finetuning.look(now_s), self._trained
        self._trained = None if shown is None else (shown.folder, shown.state)
        runs = shown is not None and shown.state == Doing.RUNNING
        if self._trained == before or (before is None and not runs):
            return
        words = (
            "no fine-tuning is seen any more" if shown is None else f"fine-tuning in {shown.folder} is {shown.state}"
        )
        self._acting.do(Finetuned(runs, words))
        if runs is not self._looking.shared:
            self._looking.shared = runs
            self._watching.over(None if (tuned := self._choosing.tuned) is None else tuned.plan.ladder)

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
        hold, compared = acting.state.hold, self._choosing.comparing
        trouble = hold is not None and not hold.hardware and not acting.state.finetunes
        self._choosing.turn(sight, trouble)
        if compared and not self._choosing.comparing:
            self._watching.anew()

    def _found(self, name: str) -> None:
        parts = self._parts
        try:
            wanted = read_tuned(name, parts.identity(), parts.guards, parts.slo)
        except PolythrottleError as error:
            self.tell("study", f"what the study has found cannot be followed: {error}")
            return
        self._watching.again()
        self._choosing.found(wanted)

    def _watched(self, sight: Sight) -> None:
        """Ask for drift what was seen in a period through all of which one rung was held."""
        state = self._acting.state
        if self._choosing.comparing:  # the old one's drift is known, and why they are compared
            return
        before, self._before = self._before, (state.applied, state.phase)
        if state.phase is not Phase.FOLLOWING or before != self._before or (rung := state.rung) is None or sight.jumped:
            return
        if sight.shared:
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
                self._parts.accounts.between(sight, self._acting.state)

    def _stumbled(self, error: Exception) -> None:
        """Say what went wrong, go to the safe point, and go on; give up if it goes wrong again and again."""
        words = f"{type(error).__name__}: {error}"[:300]
        now_s = self._parts.clock.now()
        self.tell("fault", f"the control loop failed: {words}")
        self._stumbles.append(now_s)
        if len(self._stumbles) == _STUMBLES_MOST and 0 <= now_s - self._stumbles[0] < _STUMBLES_S:
            raise DeviceError(
                f"the control loop failed {_STUMBLES_MOST} times in a minute, the last time with {words}"
            ) from error
        self._acting.do(Refused(f"the control loop failed: {words}"))
        self._due_s = now_s + PERIOD_S
        self._wait()

    def _publish(self, sight: Sight) -> None:
        parts, acting, choosing = self._parts, self._acting, self._choosing
        self._sight = sight
        faults = {**acting.faults, **self._looking.faults}
        if parts.record.fault:
            faults["record"] = parts.record.fault
        if parts.finetuning.fault:
            faults["finetuning"] = parts.finetuning.fault
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
            parts.finetuning.shown,
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
            parts.record.keep(RELEASED, None)

    def _given_back(self) -> None:
        """Give the board back and say what is known of it; where it may differ, that is how the daemon ends."""
        left = "whether the board was restored is not known"
        try:
            left = "; ".join(self._acting.give_back("the daemon ends"))
        except PolythrottleError as error:
            left = str(error)
            raise
        finally:
            found = "the board is as it was found" if self._acting.reached else "no board was reached, and none was set"
            words = f"the board may not be as it was found: {left}" if left else found
            self.tell("stop", f"the daemon has ended; {words}")
        if left:
            raise DeviceError(words)
