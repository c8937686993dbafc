"""What the control loop does for those who ask: each wish of `polythrottle.daemon.wishes`, and what is said of it."""

import math
from collections.abc import Callable
from functools import partial
from typing import cast

from polythrottle.daemon.acting import Acting
from polythrottle.daemon.budget import Carbon, check_power
from polythrottle.daemon.choosing import Choosing
from polythrottle.daemon.named_files import Read, read_named
from polythrottle.daemon.parts import Parts
from polythrottle.daemon.signals import Reclaim, StudyAsked, StudyEnded, Target, WorkloadDown
from polythrottle.daemon.state import Phase
from polythrottle.daemon.tuned import ProfileFile, tuned_of
from polythrottle.daemon.wishes import (
    Answer,
    ApplyProfile,
    Confirm,
    Release,
    Report,
    SetBudget,
    StartStudy,
    Stop,
    StopStudy,
    Take,
    Wish,
)
from polythrottle.errors import DeviceError, InvalidInput

RELEASED = "released"
"""The name under which it is kept that, and why, the board is left alone."""


class Wishing:
    """The control loop's ear.

    Args:
        parts: What the loop is made of.
        acting: Carries out.
        choosing: Knows which profile is followed.
        tell: Takes an event's kind and words.
        stop: Ends the loop after the turn under way.
    """

    def __init__(
        self,
        parts: Parts,
        acting: Acting,
        choosing: Choosing,
        tell: Callable[[str, str], None],
        stop: Callable[[], None],
    ) -> None:
        self._parts, self._acting, self._choosing = parts, acting, choosing
        self._tell, self._stop = tell, stop

    def answer(self, wish: Wish, read: Read | None = None) -> Answer:
        """Do what is wished and say so.

        Args:
            wish: What is wished.
            read: Returns at once what is in the file that it names; None where that is yet to be read.

        Raises:
            PolythrottleError: If it cannot be done; says why.
        """
        match wish:
            case Report():
                return _target(self._reported(wish))
            case StartStudy():
                name, words = self._study_started(wish)
                return {"words": words, "id": name}
            case _:
                return {"words": self._done(wish, read or partial(read_named, wish))}

    def _done(self, wish: Wish, read: Read) -> str:  # noqa: PLR0911 - one line per wish
        match wish:
            case ApplyProfile(within_s=within_s):
                return self._profile_applied(cast("Callable[[], ProfileFile]", read), within_s)
            case Confirm():
                return self._confirmed()
            case Release(reason):
                return self._released(reason)
            case Take():
                return self._taken()
            case SetBudget():
                return self._budget_set(wish, cast("Carbon | None", read()))
            case StopStudy(name):
                return self._study_stopped(name)
            case Stop():
                self._stop()
                return "the daemon ends, and gives the board back"
            case _:
                raise InvalidInput(f"the daemon does not know how to {type(wish).__name__}")

    def _profile_applied(self, read: Callable[[], ProfileFile], within_s: float | None) -> str:
        if within_s is not None and not 0 < within_s < math.inf:
            raise InvalidInput(f"a profile is to be confirmed within a time above zero, not {within_s:g} s")
        parts = self._parts
        wanted = tuned_of(read(), parts.identity(), parts.guards, parts.slo)
        now = self._choosing.tuned
        if now is not None and now.workload and wanted.workload != now.workload:
            raise InvalidInput(f"this profile is of {wanted.workload}, and the daemon looks after {now.workload}")
        self._choosing.apply(wanted, parts.clock.now(), within_s)
        self._acting.faults.pop("profile", None)
        limit = "" if within_s is None else f"; the one before comes back in {within_s:g} s unless it is confirmed"
        words = f"{self._followed(wanted.name)}{limit}"
        self._tell("profile", words)
        return words

    def _confirmed(self) -> str:
        words, waits = self._choosing.confirm(), self._acting.waits
        words = f"{words}, and will be followed {waits}" if waits else words
        self._tell("profile", words)
        return words

    def _released(self, reason: str) -> str:
        self._acting.do(WorkloadDown())
        self._parts.record.keep(RELEASED, reason)
        self._tell("phase", f"released: {reason}; nothing is set until it is taken again")
        left = "; ".join(self._acting.give_back(reason))
        found = f"not as found ({left})" if left else "as found"
        return f"the board is {found}, and left alone until it is taken again"

    def _taken(self) -> str:
        if self._acting.released:
            self._acting.take_again()
            self._parts.record.keep(RELEASED, None)
            self._tell("phase", "taken again")
        elif self._acting.state.phase is Phase.YIELDED:
            self._acting.do(Reclaim())
        elif self._acting.up:
            return "the board was not given back; the daemon goes on setting it"
        if self._acting.holds is None:
            return "the board is taken again, and set as soon as the workload is up"
        return "the board is set again"

    def _budget_set(self, wish: SetBudget, carbon: Carbon | None) -> str:
        tuned = self._choosing.tuned
        if tuned is not None and tuned.plan.ladder is not None and wish.power_w is not None:
            check_power(wish.power_w, tuned.plan.ladder)
        budget = self._parts.accounts.wished(wish, carbon)
        words = "no budget limits the power" if budget is None else f"budget: {self._unmet() or budget.words}"
        self._tell("budget", words)
        return words

    def _unmet(self) -> str:
        """Return in words a budget that cannot be met, and the nearest that can; empty if nothing says so."""
        tuned, forecast = self._choosing.tuned, self._acting.state.forecast
        if tuned is None or tuned.plan.ladder is None:
            return ""
        shown = self._parts.accounts.outlook(tuned.plan.ladder, forecast.slow_per_s)
        if shown is None or shown.met is not False:
            return ""
        return shown.words if forecast.fast_per_s is not None else f"{shown.words}, before any load was seen"

    def _followed(self, name: str) -> str:
        """Return that a profile is followed, or when it will be."""
        waits = self._acting.waits
        return f"{name} will be followed {waits}" if waits else f"{name} is followed"

    def _study_started(self, wish: StartStudy) -> tuple[str, str]:
        studies = self._parts.studies
        if self._parts.studies.runs:
            raise InvalidInput("a study runs already; stop it first, or follow it")
        if self._acting.released or not self._acting.up:
            raise DeviceError("a study needs the workload to be up and the board not to be released")
        if self._acting.state.finetunes:
            raise DeviceError(
                "fine-tuning runs, and a study would measure both; end it, or ask again once it has ended"
            )
        asked, before = studies.asked, self._acting.state.study_wanted
        studies.ask(wish.trials, wish.options)
        self._acting.do(StudyAsked("somebody asked for it"))
        if not studies.runs or studies.shown is None:
            self._acting.want_study(before)
            studies.asked = asked
            raise DeviceError(f"no study could be started while the daemon is {self._acting.state.phase}; ask again")
        return studies.shown.id, f"study {studies.shown.id} has started"

    def _study_stopped(self, name: str) -> str:
        studies = self._parts.studies
        if not studies.runs or studies.shown is None or name not in ("", studies.shown.id):
            raise InvalidInput(f"no study {name} runs".replace("  ", " "))
        studies.stop("somebody asked for it")
        self._acting.do(StudyEnded(None))
        self._tell("study", f"study {studies.shown.id} is stopped; its journal keeps what it knows")
        return "the study is stopped"

    def _reported(self, wish: Report) -> Target | None:
        take = getattr(self._parts.traffic, "report", None)
        if take is None:
            raise InvalidInput(
                f"requests are seen through {self._parts.traffic.uri}; start the daemon with --traffic report"
            )
        take(wish.seen, self._parts.clock.now())
        return self._acting.holds


def _target(target: Target | None) -> Answer:
    if target is None:
        return {"words": "noted; nothing is set", "batch": None, "gather_s": 0.0}
    batch = target.point.get("batch_size")
    return {"words": "noted", "batch": None if batch is None else int(batch), "gather_s": target.gather_s}
