"""The caps under which nodes of any type just meet a barrier that is known in seconds."""

from collections.abc import Mapping, Sequence

from polythrottle.cluster.fleet.slack import DOUBT, frugal
from polythrottle.cluster.machine import Cap


def meeting(nodes: Mapping[str, tuple[float, Sequence[Cap]]], barrier_s: float, idle_w: float = 0.0) -> dict[str, Cap]:
    """Return the cap under which each node just meets a barrier.

    Unlike `polythrottle.cluster.fleet.slack.met` it needs no common type: what counts is each node's own step, and what
    caps do to it there.

    Args:
        nodes: By name, the time of its own step at its default, in seconds, and what it can run under, the default
            first.
        barrier_s: When all are to be there, in seconds from the beginning of a step.
        idle_w: What a node draws at the barrier, in watts; 0 where it is counted into the power of its steps.
    """
    until_s = barrier_s * (1 - DOUBT)
    return {
        name: caps[0] if own_s * caps[0].slowdown > until_s else frugal(caps, own_s, until_s, idle_w)
        for name, (own_s, caps) in nodes.items()
    }
