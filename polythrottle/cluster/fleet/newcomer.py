"""A node that joins: it waits for its cache, calibrates its silicon, verifies what the fleet knows, and says so.

Pure: what comes next follows from the windows so far. A window is the mean of some steps; while the data cache is cold
the first epoch waits for input and says nothing about clocks (DS-Analyzer, VLDB 2021).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

from polythrottle.backports import StrEnum
from polythrottle.cluster.fleet.exploring import Exploring, best
from polythrottle.cluster.fleet.knowledge import Knowledge, Look, Told
from polythrottle.cluster.fleet.silicon import calibrated
from polythrottle.cluster.machine import Cap

WINDOWS = 3
"""Windows that a verdict is made of."""
SETTLED = 0.03
"""Windows within this fraction of each other are those of a warm cache."""
PATIENCE = 40
"""After so many windows that never settle, a node is taken as it is, and that is said."""


class Next(StrEnum):
    """What a newcomer does next."""

    WARMING = "warming"  # the cache is cold: default clocks, nothing is concluded
    CALIBRATING = "calibrating"  # default clocks, its own speed is measured
    VERIFYING = "verifying"  # the fleet's cap, for a few windows
    KEPT = "kept"  # the cap does here what it does elsewhere
    REFUSED = "refused"  # it does not: default clocks
    UNKNOWN = "unknown"  # the fleet knows no cap worth having
    DEFAULT = "default"  # it is asked to run at its default: others wait for it, or no cap saves anything
    EXPLORING = "exploring"  # a cap that nobody has looked at, for what it will save


@dataclass(frozen=True)
class Window:
    """Some steps of one node.

    Attributes:
        limit_w: Under which limit; None for the default.
        step_s: Mean step time in seconds, without waiting for others.
        power_w: Mean power in watts.
        steps: How many steps.
    """

    limit_w: float | None
    step_s: float
    power_w: float
    steps: int = 20


@dataclass(frozen=True)
class Verdict:
    """What a newcomer does next, and why.

    Attributes:
        next: What it does.
        cap: Under which cap its next window is.
        factor: Its step time over the fleet's middle; None while that is not known.
        reason: In words.
    """

    next: Next
    cap: Cap
    factor: float | None
    reason: str


def judged(windows: Sequence[Window], knowledge: Knowledge, wanted: Cap | None) -> Verdict:
    """Return what a newcomer does next.

    Args:
        windows: All windows so far, oldest first.
        knowledge: What the fleet knows of its type and network.
        wanted: The cap it is to run under, out of the fleet's; None where there is none worth having.
    """
    default = Cap(None, 1.0, _power_w(windows))
    mine = [window for window in windows if window.limit_w is None]
    settled = _settled(mine)
    if settled is None:
        return Verdict(Next.WARMING, default, None, f"{len(mine)} windows, not settled to {SETTLED:.0%} yet")
    if len(settled) < WINDOWS:
        return Verdict(Next.CALIBRATING, default, None, f"{len(settled)} of {WINDOWS} windows at default clocks")
    step_s = median(window.step_s for window in settled)
    known = knowledge.default
    factor = calibrated([window.step_s for window in settled], known.step_s) if known is not None else None
    if wanted is None:
        return Verdict(Next.UNKNOWN, default, factor, "the fleet knows no cap that is worth having")
    if wanted.limit_w is None:
        return Verdict(
            Next.DEFAULT, default, factor, "no cap it knows of would let it keep up with the others for fewer joules"
        )
    seen = [window for window in windows if window.limit_w == wanted.limit_w]
    if len(seen) < WINDOWS:
        return Verdict(Next.VERIFYING, wanted, factor, f"{len(seen)} of {WINDOWS} windows at {wanted.limit_w:g} W")
    return _verified(seen[-WINDOWS:], settled, step_s, wanted, factor, knowledge, default)


def told(node: str, knowledge: Knowledge, windows: Sequence[Window]) -> Told:
    """Return what a node has to say to the fleet: a look for every limit with enough windows, its warm-up left out."""
    mine = [window for window in windows if window.limit_w is None]
    groups: dict[float | None, list[Window]] = {None: list(_settled(mine) or ())}
    for window in windows:
        if window.limit_w is not None:
            groups.setdefault(window.limit_w, []).append(window)
    looks = tuple(
        Look(limit_w, median(w.step_s for w in group), median(w.power_w for w in group), len(group))
        for limit_w, group in groups.items()
        if len(group) >= WINDOWS
    )
    return Told(node, knowledge.gpu, knowledge.network, looks)


def explored(verdict: Verdict, said: Told, windows: Sequence[Window], exploring: Exploring, age_s: float) -> Verdict:
    """Return what a newcomer does where the fleet knows nothing: look on while that pays, or hold the best it saw.

    Args:
        verdict: That the fleet knows no cap; its silicon is kept.
        said: What the newcomer has to say so far.
        windows: All its windows, oldest first.
        exploring: What it may do to learn.
        age_s: The machine's age in seconds.
    """
    looks = sorted(said.looks, key=lambda look: -(look.limit_w or inf))
    if not looks or looks[0].limit_w is not None:
        return verdict
    default = looks[0]
    seen = {look.limit_w for look in looks}
    begun = next((window.limit_w for window in reversed(windows) if window.limit_w not in seen), None)
    wanted = begun or exploring.next_limit_w(looks, age_s, _length_s(windows) * WINDOWS)
    if wanted is not None:
        words = f"nobody has looked at {wanted:g} W; what is left of this node's life is expected to pay for it"
        return Verdict(Next.EXPLORING, Cap(wanted, 1.0, default.power_w), verdict.factor, words)
    found = best(looks, exploring.longer)
    if found.limit_w is None:
        return verdict
    saved = 1 - found.power_w * found.step_s / (default.power_w * default.step_s)
    cap = Cap(found.limit_w, found.step_s / default.step_s, found.power_w)
    return Verdict(Next.KEPT, cap, verdict.factor, f"{saved:.1%} fewer joules than at its default, by its own looks")


def _length_s(windows: Sequence[Window]) -> float:
    """Return how long a window takes at the default, in seconds."""
    lengths = [window.steps * window.step_s for window in windows if window.limit_w is None]
    return median(lengths) if lengths else 0.0


def _settled(windows: Sequence[Window]) -> Sequence[Window] | None:
    """Return the windows since the cache was warm: the last ones that agree; None while there are none."""
    for first in range(len(windows) - 1):
        rest = windows[first:]
        times = [window.step_s for window in rest[:WINDOWS]]
        if max(times) <= min(times) * (1 + SETTLED):
            return rest
    return windows[-WINDOWS:] if len(windows) >= PATIENCE else None


def _verified(
    seen: Sequence[Window],
    settled: Sequence[Window],
    step_s: float,
    wanted: Cap,
    factor: float | None,
    knowledge: Knowledge,
    default: Cap,
) -> Verdict:
    slowdown = median(window.step_s for window in seen) / step_s
    power_w = median(window.power_w for window in settled)
    share = median(window.power_w for window in seen) / power_w
    doubt = knowledge.doubt(wanted.limit_w or 0.0)
    if abs(slowdown - wanted.slowdown) > doubt and slowdown > wanted.slowdown:
        words = f"{slowdown:.3f} × its default step, the fleet has {wanted.slowdown:.3f} ± {doubt:.3f}"
        return Verdict(Next.REFUSED, default, factor, words)
    if slowdown * share >= 1:
        return Verdict(Next.REFUSED, default, factor, f"{slowdown * share:.3f} × the joules of its default")
    return Verdict(
        Next.KEPT, Cap(wanted.limit_w, slowdown, share * power_w), factor, f"{1 - slowdown * share:.1%} fewer joules"
    )


def _power_w(windows: Sequence[Window]) -> float:
    powers = [window.power_w for window in windows if window.limit_w is None]
    return median(powers) if powers else 1.0
