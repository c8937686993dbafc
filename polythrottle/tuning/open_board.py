"""A board that takes part in a search of several."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from polythrottle.board.hosted import BoardWorkload
from polythrottle.domain.errors import TrialError
from polythrottle.domain.measurement import Query
from polythrottle.domain.ports import Device, Workload


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
