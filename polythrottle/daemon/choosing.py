"""Which profile is followed: the one asked for, one that must be confirmed, or two in turns to see which is better."""

from collections.abc import Callable
from typing import Any

from polythrottle.daemon.acting import Acting
from polythrottle.daemon.contest import Contest
from polythrottle.daemon.looking import Sight
from polythrottle.daemon.record import Record
from polythrottle.daemon.signals import ModelChanged, Replanned
from polythrottle.daemon.tuned import Tuned
from polythrottle.errors import InvalidInput

_PROFILE, _MODELS, _CONTEST = "profile", "models", "contest"
_MODELS_MOST = 64


class Choosing:
    """The profile that is followed.

    Args:
        acting: Is told of another plan.
        record: Remembers which was chosen.
        first: The profile the daemon was started with; None if there is nothing to follow.
        tell: Takes an event's kind and words.
        adopted: Called with each profile that is followed from then on.
    """

    def __init__(
        self,
        acting: Acting,
        record: Record,
        first: Tuned | None,
        tell: Callable[[str, str], None],
        adopted: Callable[[Tuned], None],
    ) -> None:
        self.tuned = first
        self._first = "" if first is None else first.name
        self._acting, self._record, self._tell, self._adopted = acting, record, tell, adopted
        self._before: Tuned | None = None
        self._until_s = 0.0
        self._contest: Contest | None = None
        if first is not None:
            self._follow(first)

    @property
    def comparing(self) -> bool:
        """Whether two profiles are followed in turns."""
        return self._contest is not None

    @property
    def unconfirmed(self) -> str:
        """The profile that is rolled back unless it is confirmed; empty if none is."""
        return "" if self._before is None or self.tuned is None else self.tuned.name

    def left_s(self, now_s: float) -> float | None:
        """Return how long it may still be confirmed; None if there is nothing to."""
        return None if self._before is None else max(0.0, self._until_s - now_s)

    def apply(self, wanted: Tuned, now_s: float, within_s: float | None) -> None:
        """Follow another profile, for good or until somebody fails to confirm it."""
        self._end_contest()
        old = self._before or self.tuned
        if within_s is None or old is None:
            self._before = None
            self._keep(wanted)
        else:
            self._before, self._until_s = old, now_s + within_s
        self._follow(wanted)

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

    def found(self, wanted: Tuned) -> None:
        """Follow what a study has found: at once if nothing was followed, else in turns with what was.

        Args:
            wanted: The new profile.
        """
        old = self.tuned
        if old is None or old.plan.ladder is None:
            self._keep(wanted)
            self._follow(wanted)
            self._tell("study", f"{wanted.name} is followed from now on")
            return
        self._before = None
        self._contest = Contest(old, wanted)
        self._record.keep(_CONTEST, {"old": old.name, "new": wanted.name})
        self._follow(wanted)
        self._tell("study", f"{wanted.name} is compared in turns with {old.name or 'the one before'}")

    def expire(self, bare: Tuned) -> None:
        """Follow no profile until another is applied or found: the one there was is for another board."""
        self._before = None
        self._settle()
        self._follow(bare)

    def turn(self, sight: Sight, trouble: bool) -> None:
        """Roll back what nobody confirmed, change sides in a contest, and end it when it is decided.

        Args:
            sight: What was seen.
            trouble: Whether a guard for the users' sake holds the safe point.
        """
        if self._before is not None and not self._until_s - sight.now_s > 0:
            old, self._before = self._before, None
            waits = self._acting.waits
            again = f"will be followed again {waits}" if waits else "is followed again"
            self._tell("profile", f"nobody confirmed the profile: {old.name or 'the one before'} {again}")
            self._follow(old)
        if self._contest is not None:
            self._contested(self._contest, sight, trouble)

    def model(self, name: str) -> None:
        """Note the contents of the served model; what was never tuned for is not followed.

        Args:
            name: As the traffic tells it; empty if it does not.
        """
        tuned, plan = self.tuned, self._acting.state.plan
        if not name or tuned is None or plan is None or tuned.plan.ladder is None:
            return
        known = self._models()
        if tuned.name not in known:
            self._record.keep(_MODELS, {**dict(list(known.items())[-_MODELS_MOST:]), tuned.name: name})
        elif known[tuned.name] != name and plan.ladder is not None:
            self._acting.do(ModelChanged(None))
        elif known[tuned.name] == name and plan.ladder is None:
            self._acting.do(ModelChanged(tuned.plan.ladder))

    @property
    def remembered(self) -> str | None:
        """The profile chosen when the daemon ran last, if it was started with the same one as now; None if none was."""
        kept = self._record.kept(_PROFILE)
        if not isinstance(kept, dict) or kept.get("first") != self._first:
            return None
        chosen = kept.get("chosen")
        return chosen if isinstance(chosen, str) and chosen != self._first else None

    @property
    def compared(self) -> str | None:
        """The profile that was compared with this one when the daemon was cut off; None if none was."""
        kept, tuned = self._record.kept(_CONTEST), self.tuned
        if self._contest is not None or not isinstance(kept, dict) or tuned is None or kept.get("old") != tuned.name:
            return None
        return kept["new"] if isinstance(kept.get("new"), str) else None

    def _settle(self) -> None:
        self._contest = None
        self._record.keep(_CONTEST, None)

    def _models(self) -> dict[str, Any]:
        kept = self._record.kept(_MODELS)
        return kept if isinstance(kept, dict) else {}

    def _keep(self, chosen: Tuned) -> None:
        self._record.keep(_PROFILE, {"first": self._first, "chosen": chosen.name})

    def _follow(self, wanted: Tuned) -> None:
        self.tuned = wanted
        self._acting.part = wanted.device_point
        self._adopted(wanted)
        self._acting.do(Replanned(wanted.plan))

    def _contested(self, contest: Contest, sight: Sight, trouble: bool) -> None:
        contest.seen(sight, trouble and self.tuned is contest.new)
        if contest.over is None:
            if contest.turn is not self.tuned:
                self._follow(contest.turn)
            return
        self._settle()
        winner = contest.new if contest.over else contest.old
        self._tell("study", contest.words)
        self._keep(winner)
        self._follow(winner)

    def _end_contest(self) -> None:
        if self._contest is not None:
            self._settle()
            self._tell("study", "the comparison of two profiles is ended: another was asked for")
