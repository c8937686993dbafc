"""A notice that a machine is about to be taken away, and what follows from it; pure."""

from dataclasses import dataclass
from typing import Protocol

from polythrottle.backports import StrEnum


class NoticeKind(StrEnum):
    """What a notice says."""

    PREEMPT = "preempt"  # the machine goes
    REBALANCE = "rebalance"  # the machine is more likely to go than others
    TIME_LIMIT = "time limit"  # the allocation ends


@dataclass(frozen=True)
class Notice:
    """What a source says of this node.

    Attributes:
        kind: What it says.
        left_s: Time left by the source's own clock, in seconds; None where it does not say.
        node: The node it is about; empty for the one that asked.
        source: Who says so.
    """

    kind: NoticeKind
    left_s: float | None = None
    node: str = ""
    source: str = ""


class NoticeSource(Protocol):
    """Something that can be asked whether this machine will be taken away.

    Attributes:
        name: What it is called.
        every_s: How often to ask, in seconds.
    """

    name: str
    every_s: float

    def poll(self) -> Notice | None:
        """Return what it says now, None for nothing.

        Raises:
            SourceAway: If it does not answer.
        """


def leave_in_s(notice: Notice, margin_s: float) -> float | None:
    """Return when a node should leave after a notice, in seconds from now; None if it should stay.

    It works until there is just time for a checkpoint and for the others to hear of it; where nobody says how long it
    has, it leaves at once.

    Args:
        notice: What was said.
        margin_s: Time for a checkpoint and for parting, in seconds.
    """
    if notice.kind is NoticeKind.REBALANCE:
        return None
    return 0.0 if notice.left_s is None else max(0.0, notice.left_s - margin_s)
