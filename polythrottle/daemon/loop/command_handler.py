"""How the control loop carries out each command of `polythrottle.daemon.commands`, and which profile it follows.

That is the one asked for, one that must be confirmed, or two in turns to see which is better.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from polythrottle.daemon.budgets import Carbon, check_power
from polythrottle.daemon.commands import (
    Answer,
    ApplyProfile,
    Command,
    Confirm,
    HostStudy,
    Release,
    Report,
    SetBudget,
    StartStudy,
    Stop,
    StopStudy,
    Take,
)
from polythrottle.daemon.control.events import (
    ControlPlan,
    ModelChanged,
    Reclaim,
    StudyAsked,
    StudyEnded,
    Target,
    WorkloadDown,
)
from polythrottle.daemon.control.state import Phase
from polythrottle.daemon.energy_accounts import Accounts
from polythrottle.daemon.followed_profile import FollowedProfile, ProfileFile, ProfileRules
from polythrottle.daemon.history_store import HistoryStore
from polythrottle.daemon.loop.drift_monitor import DriftMonitor
from polythrottle.daemon.loop.executor import Executor
from polythrottle.daemon.loop.mailbox import EventRecorder, Read, read_named
from polythrottle.daemon.observation import ControlPeriod, Traffic
from polythrottle.daemon.study_process import Studies
from polythrottle.domain.clock import Clock
from polythrottle.domain.errors import DeviceError, InvalidInput
from polythrottle.domain.ladder import Ladder
from polythrottle.domain.space import BATCH_SIZE
from polythrottle.metering.sequential import RollbackTest

# Two profiles in turns: whether a new one is worse than the old one, seen on the same board under the same load.

TURN_S = 60.0
_SKIPPED_S = 5.0
"""What follows a change of profiles says little: sensors lag, queues empty."""
_PAIRS_MOST = 60
_TROUBLES_MOST = 2


@dataclass
class _Sum:
    joules: float = 0.0
    reference_j: float = 0.0
    seconds: float = 0.0


class Contest:
    """A sequential test on turns of a minute of load, whose energies are compared with what the old ladder predicts.

    Dividing by a prediction for the load of each turn takes the load out of the comparison; that the prediction may be
    wrong does not matter, for it is the same for both.

    Args:
        old: What was followed.
        new: What a study has found.
    """

    def __init__(self, old: FollowedProfile, new: FollowedProfile) -> None:
        self.old = old
        self.new = new
        self.turn = new
        self.over: bool | None = None
        """Whether the new one is to be kept; None while that is not decided."""
        self.words = ""
        self._test = RollbackTest()
        self._sum = _Sum()
        self._first: float | None = None
        self._waited_s = 0.0
        self._pairs = self._troubles = 0
        self._troubled = False

    def seen(self, sight: ControlPeriod, trouble: bool) -> None:
        """Take one control period in.

        Args:
            sight: What was seen in it.
            trouble: Whether the new one has made a guard for the users' sake trip.
        """
        # A guard that trips holds for many looks, and counts once.
        if trouble and not self._troubled:
            self._troubles += 1
        self._troubled = trouble
        if self._troubles >= _TROUBLES_MOST:
            self._decided(False, "the new profile is rolled back: under it a guard tripped twice")
            return
        self._added(sight)
        if self._sum.seconds >= TURN_S:
            self._turned()

    def _added(self, sight: ControlPeriod) -> None:
        rate_per_s = sight.rate_per_s
        ladder = self.old.plan.ladder
        if not rate_per_s or sight.own_j is None or ladder is None:
            return
        # The counter of energy lags behind the change by up to its averaging time.
        if self._waited_s < _SKIPPED_S:
            self._waited_s += sight.period_s
            return
        rung = ladder.rungs[ladder.best(rate_per_s, rate_per_s)]
        self._sum.joules += sight.own_j
        self._sum.reference_j += rung.power_at(rate_per_s) * sight.period_s
        self._sum.seconds += sight.period_s

    def _turned(self) -> None:
        ratio = self._sum.joules / self._sum.reference_j
        self._sum = _Sum()
        self._waited_s = 0.0
        if self._first is None:
            self._first = ratio
            self.turn = self.old
            return
        new = self._first
        self._first = None
        self.turn = self.new
        self._test = self._test.seen(new, ratio)
        self._pairs += 1
        if self._test.worse:
            self._decided(False, "the new profile is rolled back: it draws more than the old one at the same load")
        elif self._test.worse is False or self._pairs >= _PAIRS_MOST:
            self._decided(True, "the new profile is kept: it draws no more than the old one at the same load")

    def _decided(self, keeps: bool, words: str) -> None:
        self.over = keeps
        self.words = words


# Which profile is followed: the one asked for, one that must be confirmed, or two in turns to see which is better.

_PROFILE = "profile"
_MODELS = "models"
_CONTEST = "contest"
_MODELS_MOST = 64


class ActiveProfile:
    """The profile that is followed now, handed on to everything that goes by it.

    Args:
        executor: Sets what the controller chooses among its points.
        accounts: Count what is saved against its default point.
        drift: Asks whether its predictions still hold.

    Attributes:
        tuned: The profile; None if there is nothing to follow.
        unfit: Why the profile that was asked for is not followed; empty once one is.
    """

    def __init__(self, executor: Executor, accounts: Accounts, drift: DriftMonitor) -> None:
        self.tuned: FollowedProfile | None = None
        self.unfit = ""
        self._executor = executor
        self._accounts = accounts
        self._drift = drift

    @property
    def ladder(self) -> Ladder | None:
        """Its ladder; None if there is no profile or it has none."""
        if self.tuned is None:
            return None
        return self.tuned.plan.ladder

    def follow(self, tuned: FollowedProfile) -> None:
        """Follow a profile from now on."""
        self.tuned = tuned
        if tuned.profile is not None:
            self.unfit = ""
        self._accounts.follow(tuned.profile)
        self._drift.over(tuned.plan.ladder)
        # Last: the controller applies a point of the new plan at once, which is split by the new profile.
        self._executor.follow(tuned)

    def reject(self, words: str) -> str:
        """Note why the profile that was asked for is not followed; return that in words."""
        if self.tuned is None:
            name = ""
        else:
            name = self.tuned.name
        self.unfit = f"{name} is not followed: {words}"
        return self.unfit


class ProfileSelector:
    """Decides which profile is followed.

    Args:
        active: The profile that is followed now.
        record: Remembers which was chosen.
        events: Notes what happens.
        first: The profile the daemon was started with; None if there is nothing to follow.
    """

    def __init__(
        self, active: ActiveProfile, record: HistoryStore, events: EventRecorder, first: FollowedProfile | None
    ) -> None:
        self._active = active
        self._first = "" if first is None else first.name
        self._record = record
        self._events = events
        self._before: FollowedProfile | None = None
        self._until_s = 0.0
        self._contest: Contest | None = None
        if first is not None:
            active.follow(first)

    @property
    def tuned(self) -> FollowedProfile | None:
        """The profile that is followed; None if there is nothing to follow."""
        return self._active.tuned

    @property
    def comparing(self) -> bool:
        """Whether two profiles are followed in turns."""
        return self._contest is not None

    @property
    def unconfirmed(self) -> str:
        """The profile that is rolled back unless it is confirmed; empty if none is."""
        if self._before is None or self.tuned is None:
            return ""
        return self.tuned.name

    def left_s(self, now_s: float) -> float | None:
        """Return how long it may still be confirmed; None if there is nothing to."""
        if self._before is None:
            return None
        return max(0.0, self._until_s - now_s)

    def apply(self, wanted: FollowedProfile, now_s: float, within_s: float | None) -> None:
        """Follow another profile, for good or until somebody fails to confirm it."""
        self._end_contest()
        # Several applied in a row and none confirmed: all go back to the one before the first.
        old = self._before or self.tuned
        if within_s is None or old is None:
            self._before = None
            self._keep(wanted)
        else:
            self._before = old
            self._until_s = now_s + within_s
        self._active.follow(wanted)

    def confirm(self) -> str:
        """Keep the profile that was applied last.

        Raises:
            InvalidInput: If none must be confirmed.
        """
        if self._before is None or self.tuned is None:
            raise InvalidInput("there is no profile to confirm")
        self._before = None
        self._keep(self.tuned)
        return f"{self.tuned.name} is kept"

    def found(self, wanted: FollowedProfile) -> None:
        """Follow what a study has found: at once if nothing was followed, else in turns with what was.

        Args:
            wanted: The new profile.
        """
        old = self.tuned
        if old is None or old.plan.ladder is None:
            self._keep(wanted)
            self._active.follow(wanted)
            self._events.tell("study", f"{wanted.name} is followed from now on")
            return
        self._before = None
        self._contest = Contest(old, wanted)
        # Kept before it begins, so that a daemon that is killed goes on with it.
        self._record.keep(_CONTEST, {"old": old.name, "new": wanted.name})
        self._active.follow(wanted)
        self._events.tell("study", f"{wanted.name} is compared in turns with {old.name or 'the one before'}")

    def expire(self, bare: FollowedProfile) -> None:
        """Follow no profile until another is applied or found: the one there was is for another board."""
        self._before = None
        self._settle()
        self._active.follow(bare)

    def turn(self, sight: ControlPeriod, trouble: bool, waits: str) -> None:
        """Roll back what nobody confirmed, change sides in a contest, and end it when it is decided.

        Args:
            sight: What was seen.
            trouble: Whether a guard for the users' sake holds the safe point.
            waits: When what is chosen now will be followed, in words; empty if it is at once.
        """
        if self._before is not None and not self._until_s - sight.now_s > 0:
            old = self._before
            self._before = None
            if waits:
                again = f"will be followed again {waits}"
            else:
                again = "is followed again"
            self._events.tell("profile", f"nobody confirmed the profile: {old.name or 'the one before'} {again}")
            self._active.follow(old)
        if self._contest is not None:
            self._contested(self._contest, sight, trouble)

    def check_model(self, name: str, plan: ControlPlan | None) -> ModelChanged | None:
        """Compare the contents of the served model with what the profile was first seen to serve.

        Args:
            name: Of the contents, as the traffic tells it; empty if it does not.
            plan: That the controller follows.

        Returns:
            What the controller is to know: what was never tuned for is not followed. None if nothing changed.
        """
        tuned = self.tuned
        if not name or tuned is None or plan is None or tuned.plan.ladder is None:
            return None
        models = self._models()
        if tuned.name not in models:
            # Bounded: each profile ever followed adds a name to a value that is kept for good.
            latest = dict(list(models.items())[-_MODELS_MOST:])
            self._record.keep(_MODELS, {**latest, tuned.name: name})
        elif models[tuned.name] != name and plan.ladder is not None:
            return ModelChanged(None)
        elif models[tuned.name] == name and plan.ladder is None:
            return ModelChanged(tuned.plan.ladder)
        return None

    @property
    def remembered(self) -> str | None:
        """The profile chosen when the daemon ran last, if it was started with the same one as now; None if none was."""
        kept = self._record.kept(_PROFILE)
        if not isinstance(kept, dict) or kept.get("first") != self._first:
            return None
        chosen = kept.get("chosen")
        if isinstance(chosen, str) and chosen != self._first:
            return chosen
        return None

    @property
    def compared(self) -> str | None:
        """The profile that was compared with this one when the daemon was cut off; None if none was."""
        kept = self._record.kept(_CONTEST)
        tuned = self.tuned
        if self._contest is not None or not isinstance(kept, dict) or tuned is None or kept.get("old") != tuned.name:
            return None
        new = kept.get("new")
        if isinstance(new, str):
            return new
        return None

    def _settle(self) -> None:
        self._contest = None
        self._record.keep(_CONTEST, None)

    def _models(self) -> dict[str, Any]:
        kept = self._record.kept(_MODELS)
        if isinstance(kept, dict):
            return kept
        return {}

    def _keep(self, chosen: FollowedProfile) -> None:
        self._record.keep(_PROFILE, {"first": self._first, "chosen": chosen.name})

    def _contested(self, contest: Contest, sight: ControlPeriod, trouble: bool) -> None:
        contest.seen(sight, trouble and self.tuned is contest.new)
        if contest.over is None:
            if contest.turn is not self.tuned:
                self._active.follow(contest.turn)
            return
        self._settle()
        if contest.over:
            winner = contest.new
        else:
            winner = contest.old
        self._events.tell("study", contest.words)
        self._keep(winner)
        self._active.follow(winner)

    def _end_contest(self) -> None:
        if self._contest is not None:
            self._settle()
            self._events.tell("study", "the comparison of two profiles is ended: another was asked for")


RELEASED = "released"
"""The name under which it is kept that, and why, the board is left alone."""


@dataclass(frozen=True)
class CommandHandler:
    """Carries out what people and programs ask for, between two turns of the control loop.

    Args:
        clock: Of the control loop.
        executor: Sets the board.
        selector: Decides which profile is followed; ``rules`` is what a profile must fit.
        studies: Are started and stopped.
        accounts: Hold the budget.
        traffic: Takes the reports of serving programs.
        record: Remembers that the board was released.
        events: Notes what happens.
        study_waits: Returns why no study may begin now, besides what the controller knows; empty if one may.
    """

    clock: Clock
    executor: Executor
    selector: ProfileSelector
    rules: ProfileRules
    studies: Studies
    accounts: Accounts
    traffic: Traffic
    record: HistoryStore
    events: EventRecorder
    study_waits: Callable[[], str] = str

    def answer(self, command: Command, read: Read | None = None) -> Answer:
        """Do what is asked for and say so.

        Args:
            command: What is asked for.
            read: Returns at once what is in the file that it names; None where that is yet to be read.

        Raises:
            PolythrottleError: If it cannot be done; says why.
        """
        if isinstance(command, Report):
            return _target(self._reported(command))
        if isinstance(command, StartStudy):
            return self._study_started(command)
        if isinstance(command, HostStudy):
            return self._hosted(command)
        if isinstance(command, Release):
            return self._released(command.reason)
        return {"words": self._done(command, read or partial(read_named, command))}

    def _done(self, command: Command, read: Read) -> str:
        if isinstance(command, ApplyProfile):
            return self._profile_applied(cast("Callable[[], ProfileFile]", read), command.within_s)
        if isinstance(command, Confirm):
            return self._confirmed()
        if isinstance(command, Take):
            return self._taken()
        if isinstance(command, SetBudget):
            return self._budget_set(command, cast("Carbon | None", read()))
        if isinstance(command, StopStudy):
            return self.studies.dropped(command.id) or self._study_stopped(command.id)
        if isinstance(command, Stop):
            return "the daemon ends, and gives the board back"
        raise InvalidInput(f"the daemon does not know how to {type(command).__name__}")

    def _profile_applied(self, read: Callable[[], ProfileFile], within_s: float | None) -> str:
        if within_s is not None and not 0 < within_s < math.inf:
            raise InvalidInput(f"a profile is to be confirmed within a time above zero, not {within_s:g} s")
        wanted = self.rules.fit(read())
        now = self.selector.tuned
        if now is not None and now.workload and wanted.workload != now.workload:
            raise InvalidInput(f"this profile is of {wanted.workload}, and the daemon looks after {now.workload}")
        self.selector.apply(wanted, self.clock.now(), within_s)
        if within_s is None:
            limit = ""
        else:
            limit = f"; the one before comes back in {within_s:g} s unless it is confirmed"
        words = f"{self._followed(wanted.name)}{limit}"
        self.events.tell("profile", words)
        return words

    def _confirmed(self) -> str:
        words = self.selector.confirm()
        waits = self.executor.waits
        if waits:
            words = f"{words}, and will be followed {waits}"
        self.events.tell("profile", words)
        return words

    def _released(self, reason: str) -> Answer:
        # Before the board is given back, so that the controller does not set it again meanwhile.
        self.executor.do(WorkloadDown())
        self.record.keep(RELEASED, reason)
        self.events.tell("phase", f"released: {reason}; nothing is set until it is taken again")
        left = "; ".join(self.executor.give_back(reason))
        found = f"not as found ({left})" if left else "as found"
        return {"words": f"the board is {found}, and left alone until it is taken again", "clean": not left}

    def _taken(self) -> str:
        if self.executor.released:
            self.executor.take_again()
            self.record.keep(RELEASED, None)
            self.events.tell("phase", "taken again")
        elif self.executor.state.phase is Phase.YIELDED:
            self.executor.do(Reclaim())
        elif self.executor.up:
            return "the board was not given back; the daemon goes on setting it"
        if self.executor.holds is None:
            return "the board is taken again, and set as soon as the workload is up"
        return "the board is set again"

    def _budget_set(self, command: SetBudget, carbon: Carbon | None) -> str:
        tuned = self.selector.tuned
        if tuned is not None and tuned.plan.ladder is not None and command.power_w is not None:
            # Before anything is changed, so that the budget there was stays.
            check_power(command.power_w, tuned.plan.ladder)
        budget = self.accounts.wished(command, carbon)
        if budget is None:
            words = "no budget limits the power"
        else:
            words = f"budget: {self._unmet() or budget.words}"
        self.events.tell("budget", words)
        return words

    def _unmet(self) -> str:
        """Return in words a budget that cannot be met, and the nearest that can; empty if nothing says so."""
        tuned = self.selector.tuned
        forecast = self.executor.state.forecast
        if tuned is None or tuned.plan.ladder is None:
            return ""
        shown = self.accounts.outlook(tuned.plan.ladder, forecast.slow_per_s)
        if shown is None or shown.met is not False:
            return ""
        if forecast.fast_per_s is not None:
            return shown.words
        return f"{shown.words}, before any load was seen"

    def _followed(self, name: str) -> str:
        """Return that a profile is followed, or when it will be."""
        waits = self.executor.waits
        if waits:
            return f"{name} will be followed {waits}"
        return f"{name} is followed"

    def _study_started(self, command: StartStudy) -> Answer:
        studies = self.studies
        if self.studies.runs:
            raise InvalidInput("a study runs already; stop it first, or follow it")
        if self.executor.released or not self.executor.up:
            raise DeviceError("a study needs the workload to be up and the board not to be released")
        if self.executor.state.finetunes:
            raise DeviceError(
                "fine-tuning runs, and a study would measure both; end it, or ask again once it has ended"
            )
        if due := studies.ask_host(command.trials, command.options):
            return due
        if waits := self.study_waits():
            raise DeviceError(f"no study can begin now: {waits}")
        wanted = self.executor.state.study_wanted
        before = studies.ask(command.trials, command.options)
        self.executor.do(StudyAsked("somebody asked for it"))
        if not studies.runs or studies.shown is None:
            # A request that failed must not change what the next study, wanted for another reason, is like.
            self.executor.want_study(wanted)
            studies.ask_again(before)
            raise DeviceError(f"no study could be started while the daemon is {self.executor.state.phase}; ask again")
        return {"words": f"study {studies.shown.id} has started", "id": studies.shown.id}

    def _hosted(self, said: HostStudy) -> Answer:
        answer = self.studies.host(said)
        if self.studies.at_once and not self.study_waits():
            self.executor.do(StudyAsked("somebody asked for it"))
        return answer

    def _study_stopped(self, name: str) -> str:
        studies = self.studies
        if not studies.runs or studies.shown is None or name not in ("", studies.shown.id):
            raise InvalidInput(f"no study {name} runs".replace("  ", " "))
        studies.stop("somebody asked for it")
        self.executor.do(StudyEnded(None))
        self.events.tell("study", f"study {studies.shown.id} is stopped; its journal keeps what it knows")
        return "the study is stopped"

    def _reported(self, command: Report) -> Target | None:
        take = getattr(self.traffic, "report", None)
        if take is None:
            raise InvalidInput(f"requests are seen through {self.traffic.uri}; start the daemon with --traffic report")
        take(command.seen, self.clock.now())
        return self.executor.holds


def _target(target: Target | None) -> Answer:
    if target is None:
        return {"words": "noted; nothing is set", "batch": None, "gather_s": 0.0}
    batch = target.point.get(BATCH_SIZE)
    return {"words": "noted", "batch": None if batch is None else int(batch), "gather_s": target.gather_s}
