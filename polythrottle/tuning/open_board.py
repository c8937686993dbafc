"""A board that takes part in a search of several, and how long its windows are."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from polythrottle.board.hosted import BoardWorkload
from polythrottle.domain.errors import TrialError
from polythrottle.domain.measurement import Query, Window
from polythrottle.domain.ports import Device, Workload

LEAST_SHARE = 100
"""How many queries a board's share of a window has at least, so that a p99 is seen once."""


def shared_window(window: Window, share: int) -> Window:
    """Return a window of a share of its most queries.

    The default point is measured on every board, and what they see there is put together: each has its share of the
    queries. Elsewhere it is half of them: the second half tells little more, since two windows at one point differ
    anyway, while other boards wait for it.

    Args:
        window: As it is where one board searches alone.
        share: By how much to divide.
    """
    most = max(window.queries, min(window.most_queries, LEAST_SHARE), math.ceil(window.most_queries / share))
    return replace(window, most_queries=most)


@dataclass(frozen=True)
class OpenBoard:
    """A board that takes part.

    Args:
        uri: As it was named.
        device: Not entered yet.
        served: Serves queries on it.
    """

    uri: str
    device: Device
    served: Workload

    def cut_short_when(self, unneeded: Callable[[], bool]) -> None:
        """Have the next query fail once nobody needs it, so that a window ends early and the board is restored.

        A workload that cannot be told, or drives itself, has its window waited for.

        Args:
            unneeded: Whether nobody does; asked before each query, or over SSH each time something is told.
        """
        if isinstance(self.served, BoardWorkload):
            self.served.told.cut = unneeded
            return
        query = self.served.query

        def query_if_needed() -> Query:
            if unneeded():
                raise TrialError("nobody needs it any more")
            return query()

        with contextlib.suppress(AttributeError):
            setattr(self.served, "query", query_if_needed)  # noqa: B010
