"""The control loop: each second it answers commands, observes, decides, acts and publishes its status.

Sooner if requests pile up. The runner owns every part; the parts do not know it and answer by what they return.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from polythrottle.actuation.client.board import Board
from polythrottle.actuation.systemd import Supervisor
from polythrottle.daemon.commands import Report, Stop
from polythrottle.daemon.control.controller import hurried
from polythrottle.daemon.control.events import (
    ApplyRefused,
    Bounds,
    DriftFound,
    DriverReload,
    Resume,
    StudyEnded,
    StudyOffered,
    Suspend,
    Target,
    TrainerChanged,
    WorkloadDown,
    WorkloadUp,
)
from polythrottle.daemon.control.state import Phase
from polythrottle.daemon.energy_accounts import Accounts
from polythrottle.daemon.followed_profile import FollowedProfile, ProfileRules, check_kind, untuned
from polythrottle.daemon.history_store import HistoryStore
from polythrottle.daemon.loop.command_handler import RELEASED, ActiveProfile, CommandHandler, ProfileSelector
from polythrottle.daemon.loop.drift_monitor import DriftMonitor
from polythrottle.daemon.loop.executor import Executor
from polythrottle.daemon.loop.mailbox import EventRecorder, Frame, Mailbox, Turn, stamp, status_of
from polythrottle.daemon.observation import JUMP_S, ControlPeriod, Observer, Traffic
from polythrottle.daemon.status import MAY_DIFFER
from polythrottle.daemon.study_process import Studies
from polythrottle.daemon.traffic.proxy_prompts import BoardClocks, PromptFollower, PromptSource
from polythrottle.daemon.trainer_monitor import TrainerMonitor, TrainerState
from polythrottle.domain.clock import Clock
from polythrottle.domain.errors import BadFile, DeviceError, PolythrottleError

PERIOD_S = 1.0
STEP_S = 0.1
_GONE_S = 3.0
"""How long a workload must be gone to be down: a server that is asked may fail to answer once."""
_SLEPT_S = 1.0
_LATENESSES = 1000
STUMBLES_MOST = 3
STUMBLES_S = 60.0


def slept_s() -> float:
    """Return how long this machine has been asleep since it was started, in seconds."""
    # Only the first goes on while the machine is suspended (clock_gettime(2)).
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)


@dataclass(frozen=True)
class LoopComponents:
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
        finetuning: Looks for trainers beside the workload.
        study_waits: Returns why no study may begin now, besides what the controller knows; empty if one may.
        clocks: Returns which clocks of its GPU the board may be set to, where prompts are followed.
    """

    clock: Clock
    board: Board
    traffic: Traffic
    desk: Mailbox
    record: HistoryStore
    accounts: Accounts
    studies: Studies
    guards: Bounds = field(default_factory=Bounds)
    slo: tuple[str, ...] = ()
    identity: Callable[[], Mapping[str, str]] = dict
    wall: Callable[[], float] = time.time
    slept_s: Callable[[], float] = slept_s
    supervisor: Supervisor = field(default_factory=lambda: Supervisor({}))
    version: str = ""
    finetuning: TrainerMonitor = field(default_factory=TrainerMonitor)
    study_waits: Callable[[], str] = str
    clocks: Callable[[], BoardClocks] = lambda: BoardClocks((), {})


class Lateness:
    """How late turns begin, in seconds: ``last_s`` of the last, and the p99 of the last thousand."""

    def __init__(self) -> None:
        self.last_s = 0.0
        self._lately: deque[float] = deque(maxlen=_LATENESSES)

    def note(self, late_s: float) -> None:
        """Note a turn; one that begins early is not late."""
        self.last_s = max(0.0, late_s)
        self._lately.append(self.last_s)

    @property
    def p99_s(self) -> float:
        """Return the p99; 0 before the first turn."""
        late = sorted(self._lately)
        if not late:
            return 0.0
        return late[min(len(late) - 1, int(0.99 * len(late)))]


class Runner:
    """The control loop.

    `run` turns until `stop`; whatever ends it, the board is given back. `turn` is one control period, for tests.

    Args:
        parts: What it is made of.
        first: What is followed; None if nothing is known of any workload.

    Attributes:
        events: Takes what happened.
        executor: The controller's state, and what is done for it.
        selector: Which profile is followed.
        commands: Carries out what is asked for.
    """

    def __init__(self, parts: LoopComponents, first: FollowedProfile | None) -> None:
        self._parts = parts
        self._rules = ProfileRules(parts.identity, parts.guards, parts.slo)
        self.events = EventRecorder(parts.record, parts.desk)
        self.executor = Executor(parts.clock, parts.board, parts.traffic, parts.studies, self.events)
        self._drift = DriftMonitor(parts.record)
        self._active = ActiveProfile(self.executor, parts.accounts, self._drift)
        self.selector = ProfileSelector(self._active, parts.record, self.events, first)
        self.commands = CommandHandler(
            clock=parts.clock,
            executor=self.executor,
            selector=self.selector,
            rules=self._rules,
            studies=parts.studies,
            accounts=parts.accounts,
            traffic=parts.traffic,
            record=parts.record,
            events=self.events,
            study_waits=parts.study_waits,
        )
        self._observer = Observer(parts.board, parts.traffic, parts.clock.now(), parts.guards.peak_w is not None)
        self._prompts = PromptFollower(parts.traffic, parts.clocks) if isinstance(parts.traffic, PromptSource) else None
        self._frame = Frame(parts.board, parts.traffic, stamp(parts.wall()), parts.version)
        self._number = 0
        self._due_s = parts.clock.now()
        self._lateness = Lateness()
        self._sight = ControlPeriod(parts.clock.now(), PERIOD_S, None, None)
        self._slept_s = parts.slept_s()
        self._gone_s: float | None = None
        self._trainer: tuple[str, str] | None = None
        self._shared = False
        self._before: tuple[Target | None, Phase] = (None, Phase.DOWN)
        self._stumbles: deque[float] = deque(maxlen=STUMBLES_MOST)
        self._stopping = False
        self._unseen_told = False
        self._resume()

    def run(self) -> None:
        """Turn once a second until `stop` is called; the board is given back whatever happens.

        Raises:
            DeviceError: If the control loop failed three times in a minute, or the board could not be restored.
        """
        with ExitStack() as ends:
            ends.callback(self.end)
            self.begin()
            self._parts.supervisor.ready("the control loop turns")
            while not self._stopping:
                try:
                    self.turn()
                    self._wait()
                except Exception as error:
                    self._recover(error)

    def begin(self) -> None:
        """Publish a first status: whoever waits for readiness finds one to read at once."""
        self._publish(self._sight)

    def attempt(self, work: Callable[[], None]) -> None:
        """Do a part of the loop's work; go to the safe point where that fails.

        Raises:
            DeviceError: If it failed three times in a minute.
        """
        try:
            work()
        except Exception as error:
            self._fail(error)

    @property
    def stopping(self) -> bool:
        """Whether the loop is to end."""
        return self._stopping

    @property
    def sight(self) -> ControlPeriod:
        """What the last turn saw."""
        return self._sight

    @property
    def tuned(self) -> FollowedProfile | None:
        """What is followed."""
        return self._active.tuned

    def turn(self) -> None:
        """Do what belongs to one control period."""
        parts = self._parts
        now_s = self._parts.clock.now()
        self._number += 1
        self._schedule(now_s)
        self._check_sleep()
        self.answer()
        if self.executor.keep_lease():
            # Before anything is set: behind the same socket there may be another board by now.
            self._check_board()
            self.executor.regained()
        self._check_trainer(now_s)
        sight = self._observer.look(now_s, self._shared)
        if sight.anew:
            self.executor.do(DriverReload())
        self._check_traffic(sight)
        self._check_workload(sight)
        self._think(sight)
        self._follow_prompts(now_s)
        # Last of what touches the board: what the controller has set in this turn is not taken for somebody else's.
        self.executor.check()
        self._publish(sight)
        self.events.flush()
        # Last, so that a turn that hangs gives no sign of life, and the watchdog ends it.
        parts.supervisor.alive()

    def answer(self) -> None:
        """Answer those who wait, once what they asked for can be seen in the status."""
        for asked in self._parts.desk.wishes():
            try:
                answer = self.commands.answer(asked.wish, asked.read)
                self._stopping |= isinstance(asked.wish, Stop)
                # A report is one of many a second and changes nothing that is shown before the next turn.
                if not isinstance(asked.wish, Report):
                    self._publish(self._sight)
                asked.answer.set_result(answer)
            except PolythrottleError as error:
                asked.answer.set_exception(error)
            # Whoever asked would wait in vain otherwise; what became of it is the loop's to handle.
            except BaseException:
                asked.answer.set_exception(DeviceError("the daemon failed at this; its events say more"))
                raise

    def unfit(self, words: str) -> None:
        """Show that the profile that was asked for is not followed, and why, until one is."""
        self.events.tell("profile", self._active.reject(words))

    def go_on(self) -> None:
        """Follow the profile followed last, where the daemon was started with the same one, and go on comparing."""
        remembered = self.selector.remembered
        if remembered is not None:
            self._go_on_with(remembered)
        compared = self.selector.compared
        if compared is not None:
            self._compare(compared)

    def _go_on_with(self, name: str) -> None:
        try:
            wanted = self._rules.read(name)
        except PolythrottleError as error:
            self.events.tell("profile", f"{name}, followed last, cannot be followed any more: {error}")
            return
        self.selector.apply(wanted, self._parts.clock.now(), None)
        self.events.tell("profile", f"{name} is followed, as when the daemon ran last")

    def stop(self) -> None:
        """End the loop after the turn under way."""
        self._stopping = True

    def _resume(self) -> None:
        """Go on where the daemon before was cut off."""
        parts = self._parts
        self.events.tell("start", f"the daemon has started, for {parts.board.title}")
        words = parts.accounts.resume_budget(parts.board.uri)
        if words:
            self.events.tell("budget", words)
        reason = parts.record.kept(RELEASED)
        if isinstance(reason, str):
            self.executor.stay_released(reason)
            self.events.tell("phase", f"still released: {reason}; take it again to have the board set")

    def _schedule(self, now_s: float) -> None:
        """Note how late a turn begins, and set the next; after a jump of the clock count from now."""
        late_s = now_s - self._due_s
        if -PERIOD_S <= late_s < JUMP_S:
            self._lateness.note(late_s)
            # Turns that were missed are left out: made up for in a row they would see no time pass.
            self._due_s += PERIOD_S * (1 + int(self._lateness.last_s / PERIOD_S))
        else:
            self._due_s = now_s + PERIOD_S

    def _check_sleep(self) -> None:
        asleep_s = self._parts.slept_s()
        if asleep_s - self._slept_s > _SLEPT_S:
            self.events.tell(
                "machine", f"the machine slept for {asleep_s - self._slept_s:.0f} s; what was set is set again"
            )
            # Nobody says beforehand that the machine will sleep: both are told once it is awake.
            self.executor.do(Suspend())
            self.executor.do(Resume())
        self._slept_s = asleep_s

    def _check_board(self) -> None:
        """Check what board the right to set one is for: a profile of another kind is not followed any more."""
        tuned = self._active.tuned
        if tuned is None or tuned.profile is None:
            return
        try:
            check_kind(tuned.profile, self._rules.identity())
        except BadFile as error:
            self.unfit(str(error))
            self.selector.expire(untuned(tuned.workload, self._rules.guards, tuned.slo))

    def _check_trainer(self, now_s: float) -> None:
        """Tell the controller when a trainer beside the workload begins or ceases to work."""
        job = self._parts.finetuning.look(now_s)
        before = self._trainer
        self._trainer = None if job is None else (job.folder, job.state)
        runs = job is not None and job.state == TrainerState.RUNNING
        # A job that rested or had ended before it was first seen is shown, but nothing has happened to it.
        if self._trainer == before or (before is None and not runs):
            return
        if job is None:
            words = "no fine-tuning is seen any more"
        else:
            words = f"fine-tuning in {job.folder} is {job.state}"
        self.executor.do(TrainerChanged(runs, words))
        if runs is not self._shared:
            # The joules of a period that begins with a trainer and ends without it are nobody's alone.
            self._shared = runs
            self._drift.over(self._active.ladder)

    def _check_traffic(self, sight: ControlPeriod) -> None:
        """Say once why no requests can be seen, until some are: a log that is not there, a server that is silent."""
        words = self._observer.faults.get("traffic", "")
        if sight.seen is not None and not words:
            self._unseen_told = False
        elif sight.seen is None and words and not self._unseen_told:
            self._unseen_told = True
            self.events.tell("fault", words)

    def _check_workload(self, sight: ControlPeriod) -> None:
        """Tell the controller when the workload has come or gone."""
        tuned = self.selector.tuned
        up = self.executor.up
        if sight.seen is not None and not self.executor.released:
            self._gone_s = None
            if not up and tuned is not None:
                self.executor.do(WorkloadUp(tuned.plan))
            changed = self.selector.check_model(sight.seen.model, self.executor.state.plan)
            if changed is not None:
                self.executor.do(changed)
        elif up:
            if self._gone_s is None:
                self._gone_s = sight.now_s
            # A clock that was set back must not keep a workload up that is gone.
            self._gone_s = min(self._gone_s, sight.now_s)
            if sight.now_s - self._gone_s >= _GONE_S:
                self.executor.do(WorkloadDown())

    def _think(self, sight: ControlPeriod) -> None:
        """Let the controller think, and all those who add up, watch and compare."""
        acting = self.executor
        accounts = self._parts.accounts
        if acting.up and not sight.jumped:
            acting.do(sight.observed)
        # After the controller has seen the period, so that a budget bounds what it has just learnt of the load.
        for event in accounts.turn(sight, acting.state):
            # On a server of several services studies take turns.
            if not isinstance(event, StudyOffered) or not self._parts.study_waits():
                acting.do(event)
        # A study that simulates a board of its own need not wait for idle time.
        if acting.state.study_wanted and self._parts.studies.costless and not self._parts.study_waits():
            acting.do(StudyOffered())
        tuned = self._active.tuned
        accounts.limited(None if tuned is None else tuned.plan.bounds.p99_s)
        self._check_drift(sight)
        ended = self._parts.studies.poll()
        if ended is not None:
            # With no ladder, for what it has found is compared with the old one before it counts.
            acting.do(StudyEnded(None))
            self.events.tell("study", ended.words)
            if ended.profile is not None:
                self._compare(str(ended.profile))
        hold = acting.state.hold
        compared = self.selector.comparing
        # Neither heat nor a trainer beside it is the new profile's fault.
        trouble = hold is not None and not hold.hardware and not acting.state.finetunes
        self.selector.turn(sight, trouble, acting.waits)
        if compared and not self.selector.comparing:
            self._drift.anew()

    def _compare(self, name: str) -> None:
        """Compare in turns what a study has found with what is followed."""
        try:
            wanted = self._rules.read(name)
        except PolythrottleError as error:
            self.events.tell("study", f"what the study has found cannot be followed: {error}")
            return
        self._drift.again()
        self.selector.found(wanted)

    def _check_drift(self, sight: ControlPeriod) -> None:
        """Ask for drift what was seen in a period through all of which one rung was held."""
        state = self.executor.state
        if self.selector.comparing:  # the old one's drift is known, and why they are compared
            return
        before = self._before
        self._before = (state.applied, state.phase)
        rung = state.rung
        if state.phase is not Phase.FOLLOWING or before != self._before or rung is None:
            return
        # At a clock that prompts asked for, what is drawn is not what the rung predicts.
        if sight.jumped or sight.shared or state.clock.gpu_hz is not None:
            return
        drift = self._drift.seen(sight, state.footing.rung, rung)
        if drift is not None:
            self.executor.do(DriftFound(drift))

    def _wait(self) -> None:
        """Wait for the next turn; meanwhile answer, and look sooner if requests pile up."""
        clock = self._parts.clock
        # Due later than that can only be of a clock that was set back: the turn comes at once.
        while not self._stopping and 0 < (left_s := self._due_s - clock.now()) < 2 * PERIOD_S:  # rounded
            # Only requests can make the loop hurry: without a workload it sleeps through, which keeps it at rest.
            if self.executor.up:
                left_s = min(left_s, STEP_S)
            clock.sleep(left_s)
            self.answer()
            self.hurry(self._due_s)

    def hurry(self, due_s: float) -> None:
        """Follow prompts, and look before the next turn, which is due at a time, if requests pile up."""
        now_s = self._parts.clock.now()
        if not self.executor.up:
            return
        self._follow_prompts(now_s)
        # The turn itself looks in a moment.
        if due_s - now_s < STEP_S / 2:
            return
        if hurried(self.executor.state, self._observer.peek(now_s)):
            sight = self._observer.look(now_s, self._shared)
            self.executor.do(sight.observed)
            self._parts.accounts.between(sight, self.executor.state)

    def _follow_prompts(self, now_s: float) -> None:
        """Have the clock set that prompts need now, where it is known which wait."""
        if self._prompts is not None:
            wanted = self._prompts.look(now_s, self.executor.state)
            if wanted is not None:
                self.executor.do(wanted)

    def _recover(self, error: Exception) -> None:
        self._fail(error)
        self._due_s = self._parts.clock.now() + PERIOD_S
        self._wait()

    def _fail(self, error: Exception) -> None:
        """Say what went wrong, go to the safe point, and go on; give up if it goes wrong again and again."""
        words = f"{type(error).__name__}: {error}"[:300]
        now_s = self._parts.clock.now()
        # One fault is survived at the safe point; three within a minute are no accident, and the service manager starts
        # the daemon anew.
        self.events.tell("fault", f"the control loop failed: {words}")
        self._stumbles.append(now_s)
        if len(self._stumbles) == STUMBLES_MOST and 0 <= now_s - self._stumbles[0] < STUMBLES_S:
            raise DeviceError(
                f"the control loop failed {STUMBLES_MOST} times in a minute, the last time with {words}"
            ) from error
        self.executor.do(ApplyRefused(f"the control loop failed: {words}"))

    def _publish(self, sight: ControlPeriod) -> None:
        parts = self._parts
        self._sight = sight
        turn = Turn(
            number=self._number,
            wall_s=parts.wall(),
            late_s=self._lateness.last_s,
            late_p99_s=self._lateness.p99_s,
            reason=self.executor.reason,
            released=bool(self.executor.released),
            faults=self._faults(),
            drift=self._drift.words,
            study=parts.studies.shown,
            event_counts=dict(self.events.counts),
            unconfirmed=self.selector.unconfirmed,
            confirm_left_s=self.selector.left_s(sight.now_s),
            finetuning=parts.finetuning.shown,
        )
        tuned = self._active.tuned
        parts.desk.publish(status_of(self._frame, turn, self.executor.state, sight, tuned, parts.accounts))

    def _faults(self) -> tuple[str, ...]:
        """Return what does not work now, in words."""
        faults = [self._active.unfit, *self.executor.faults.values(), *self._observer.faults.values()]
        faults += [self._parts.record.fault, self._parts.finetuning.fault]
        if self._prompts is not None:
            faults.append(self._prompts.fault)
        return tuple(fault for fault in faults if fault)

    def end(self) -> None:
        """Give everything back; each step is taken whatever becomes of those before."""
        parts = self._parts
        with ExitStack() as ends:
            # Run in reverse: the study ends before the board is given back; the record closes last, for it notes that.
            ends.callback(parts.record.close)
            ends.callback(parts.accounts.close)
            ends.callback(parts.traffic.close)
            ends.callback(self._give_back)
            ends.callback(parts.studies.close)
            parts.supervisor.stopping()
            parts.record.keep(RELEASED, None)

    def _give_back(self) -> None:
        """Give the board back and say what is known of it; where it may differ, that is how the daemon ends."""
        # Said where giving back fails in a way that nobody foresaw.
        left = "whether the board was restored is not known"
        try:
            left = "; ".join(self.executor.give_back("the daemon ends"))
        except PolythrottleError as error:
            left = str(error)
            raise
        finally:
            if left:
                words = f"the board {MAY_DIFFER}{left}"
            elif self.executor.reached:
                words = "the board is as it was found"
            else:
                words = "no board was reached, and none was set"
            self.events.tell("stop", f"the daemon has ended; {words}")
        if left:
            raise DeviceError(words)
