"""What the control loop answers to those who ask: each wish becomes one call of its hands."""

import math
from typing import Protocol

from polythrottle.daemon.ports import Seen
from polythrottle.daemon.signals import Target
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
from polythrottle.errors import InvalidInput


class Hands(Protocol):
    """What can be asked of the control loop; each method returns words for people."""

    def apply_profile(self, name: str, within_s: float | None) -> str:
        """Follow another profile."""

    def confirm(self) -> str:
        """Keep it."""

    def release(self, reason: str) -> str:
        """Leave the board alone."""

    def take(self) -> str:
        """Set it again."""

    def set_budget(self, wish: SetBudget) -> str:
        """Limit what is drawn."""

    def start_study(self, wish: StartStudy) -> tuple[str, str]:
        """Start a study; return its id and words."""

    def stop_study(self, name: str) -> str:
        """End it."""

    def report(self, seen: Seen) -> Target | None:
        """Return what is to hold at the server; None while nothing is set."""

    def stop(self) -> str:
        """End the daemon."""


def answer(hands: Hands, wish: Wish) -> Answer:
    """Do what is wished and say so.

    Raises:
        PolythrottleError: If it cannot be done; says why.
    """
    match wish:
        case Report(seen):
            return _target(hands.report(seen))
        case StartStudy():
            name, words = hands.start_study(wish)
            return {"words": words, "id": name}
        case _:
            return {"words": _done(hands, wish)}


def _done(hands: Hands, wish: Wish) -> str:  # noqa: PLR0911 - one line per wish
    match wish:
        case ApplyProfile(profile, within_s):
            if within_s is not None and not 0 < within_s < math.inf:
                raise InvalidInput(f"a profile is to be confirmed within a time above zero, not {within_s:g} s")
            return hands.apply_profile(profile, within_s)
        case Confirm():
            return hands.confirm()
        case Release(reason):
            return hands.release(reason)
        case Take():
            return hands.take()
        case SetBudget():
            return hands.set_budget(wish)
        case StopStudy(name):
            return hands.stop_study(name)
        case Stop():
            return hands.stop()
        case _:
            raise InvalidInput(f"the daemon does not know how to {type(wish).__name__}")


def _target(target: Target | None) -> Answer:
    if target is None:
        return {"words": "noted; nothing is set", "batch": None, "gather_s": 0.0}
    batch = target.point.get("batch_size")
    return {"words": "noted", "batch": None if batch is None else int(batch), "gather_s": target.gather_s}
