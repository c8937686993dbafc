"""How the control loop carries out each command of `polythrottle.daemon.inputs`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

from polythrottle.daemon.control.events import Reclaim, StudyAsked, StudyEnded, Target, WorkloadDown
from polythrottle.daemon.control.state import Phase
from polythrottle.daemon.energy_accounts import Accounts
from polythrottle.daemon.energy_budget import Carbon, check_power
from polythrottle.daemon.followed_profile import ProfileFile, ProfileRules
from polythrottle.daemon.history_store import HistoryStore
from polythrottle.daemon.inputs import (
    Answer,
    ApplyProfile,
    Command,
    Confirm,
    Release,
    Report,
    SetBudget,
    StartStudy,
    Stop,
    StopStudy,
    Take,
    Traffic,
)
from polythrottle.daemon.loop.executor import Executor
from polythrottle.daemon.loop.mailbox import EventRecorder, Read, read_named
from polythrottle.daemon.loop.profile_selector import ProfileSelector
from polythrottle.daemon.study_process import Studies
from polythrottle.domain.clock import Clock
from polythrottle.domain.errors import DeviceError, InvalidInput
from polythrottle.domain.space import BATCH_SIZE

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
        match command:
            case Report():
                return _target(self._reported(command))
            case StartStudy():
                name, words = self._study_started(command)
                return {"words": words, "id": name}
            case _:
                return {"words": self._done(command, read or partial(read_named, command))}

    def _done(self, command: Command, read: Read) -> str:
        match command:
            case ApplyProfile(within_s=within_s):
                return self._profile_applied(cast("Callable[[], ProfileFile]", read), within_s)
            case Confirm():
                return self._confirmed()
            case Release(reason):
                return self._released(reason)
            case Take():
                return self._taken()
            case SetBudget():
                return self._budget_set(command, cast("Carbon | None", read()))
            case StopStudy(name):
                return self._study_stopped(name)
            case Stop():
                return "the daemon ends, and gives the board back"
            case _:
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

    def _released(self, reason: str) -> str:
        # Before the board is given back, so that the controller does not set it again meanwhile.
        self.executor.do(WorkloadDown())
        self.record.keep(RELEASED, reason)
        self.events.tell("phase", f"released: {reason}; nothing is set until it is taken again")
        left = "; ".join(self.executor.give_back(reason))
        if left:
            return f"the board is not as found ({left}), and left alone until it is taken again"
        return "the board is as found, and left alone until it is taken again"

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

    def _study_started(self, command: StartStudy) -> tuple[str, str]:
        studies = self.studies
        if self.studies.runs:
            raise InvalidInput("a study runs already; stop it first, or follow it")
        if self.executor.released or not self.executor.up:
            raise DeviceError("a study needs the workload to be up and the board not to be released")
        if self.executor.state.finetunes:
            raise DeviceError(
                "fine-tuning runs, and a study would measure both; end it, or ask again once it has ended"
            )
        waits = self.study_waits()
        if waits:
            raise DeviceError(f"no study can begin now: {waits}")
        wanted = self.executor.state.study_wanted
        before = studies.ask(command.trials, command.options)
        self.executor.do(StudyAsked("somebody asked for it"))
        if not studies.runs or studies.shown is None:
            # A request that failed must not change what the next study, wanted for another reason, is like.
            self.executor.want_study(wanted)
            studies.ask_again(before)
            raise DeviceError(f"no study could be started while the daemon is {self.executor.state.phase}; ask again")
        return studies.shown.id, f"study {studies.shown.id} has started"

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
