"""What a node knows of its fleet, read from and kept in the job's store beside training: nobody waits for the store."""

import threading
from collections.abc import Callable

from polythrottle.cluster.fleet.knowledge import Keeper, Knowledge, Told, keep, recall
from polythrottle.errors import PolythrottleError

AGAIN_S = 60.0
"""How often at most what a node says of caps it has told of is written again: stores take money for writing."""


class Learning:
    """The fleet's knowledge of one machine type and network, as one node sees it.

    Args:
        opened: Opens the store; called in a thread.
        node: This node's name: what it said itself before is left out of what the fleet knows.
        gpu: Machine type.
        network: What is trained.
    """

    def __init__(self, opened: Callable[[], Keeper], node: str, gpu: str, network: str) -> None:
        self._opened, self._node = opened, node
        self.fleet = Knowledge(gpu, network)
        self.own: Told | None = None
        self.asked = False
        self.trouble = ""
        self._busy: threading.Thread | None = None
        self._kept: Told | None = None
        self._said: tuple[float | None, ...] = ()
        self._said_s = 0.0

    def look(self) -> None:
        """Read what the fleet knows, in the background."""
        self._begin(self._recall)

    def say(self, told: Told, now_s: float) -> None:
        """Keep what this node has to say, in the background: a cap it had not told of at once, all else now and then.

        Args:
            told: What it has to say.
            now_s: The time by any clock, always the same.
        """
        limits = tuple(look.limit_w for look in told.looks)
        if limits and (limits != self._said or now_s - self._said_s >= AGAIN_S) and told != self._kept:
            self._said, self._said_s = limits, now_s
            self._begin(lambda: self._keep(told))

    def close(self, told: Told, patience_s: float = 3.0) -> None:
        """Keep the last of what this node has to say, and wait a little for it."""
        if self._busy is not None:
            self._busy.join(patience_s)
        if told.looks and told != self._kept:
            self._begin(lambda: self._keep(told))
        if self._busy is not None:
            self._busy.join(patience_s)

    def _begin(self, work: Callable[[], None]) -> None:
        if self._busy is not None and self._busy.is_alive():
            return
        self._busy = threading.Thread(target=self._safely, args=(work,), daemon=True)
        self._busy.start()

    def _safely(self, work: Callable[[], None]) -> None:
        try:
            work()
            self.trouble = ""
        except PolythrottleError as error:
            self.trouble = str(error)

    def _recall(self) -> None:
        known, _ = recall(self._opened(), self.fleet.gpu, self.fleet.network)
        others = tuple(each for each in known.told if each.node != self._node)
        mine = next((each for each in known.told if each.node == self._node), None)
        self.fleet, self.own, self.asked = Knowledge(known.gpu, known.network, others), mine, True

    def _keep(self, told: Told) -> None:
        keep(self._opened(), told)
        self._kept = told
