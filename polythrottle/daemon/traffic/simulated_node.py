"""What a simulated server draws as a whole, as its own meter would tell: host, fans, and GPUs that no service has."""

from __future__ import annotations

from dataclasses import dataclass

from polythrottle.actuation.client.board import Board
from polythrottle.backends import DeviceURI, open_device
from polythrottle.backends.simulated.node import NODE, SimulatedNode, is_node
from polythrottle.domain.errors import InvalidInput

_STEP_S = 0.5
"""A batch that was begun is finished, so that boards are ahead of each other by less than this; assumed."""


@dataclass
class _Metered:
    board: Board
    time_s: float
    energy_j: float
    power_w: float

    def look(self) -> None:
        """Take in what was drawn since the look before."""
        seen = self.board.read()
        if seen.time_s - self.time_s >= _STEP_S:
            self.power_w = (seen.energy_j - self.energy_j) / (seen.time_s - self.time_s)
            self.time_s = seen.time_s
            self.energy_j = seen.energy_j


class NodeMeter:
    """A meter of a simulated server; satisfies `WholeMeter`.

    Args:
        uri: Of the server: ``sim:node?gpus=8xh100``.
        node: Which server it is.
    """

    def __init__(self, uri: str, node: SimulatedNode) -> None:
        self._uri = uri
        self._node = node
        self._boards: list[_Metered] = []
        self._idle_w: dict[int, float] = {}
        for number in range(len(node.boards)):
            self._idle_w[number] = _idle_w(self._gpu(number))

    @classmethod
    def of(cls, text: str) -> NodeMeter:
        """Return the meter of a server.

        Raises:
            InvalidInput: If the text means no server.
            UnknownName: If it has an option, or means a board, that there is not.
        """
        uri = DeviceURI.parse(text)
        if uri.name != NODE or uri.meter:
            raise InvalidInput(f"{text} is no meter of a whole server; a simulated one has sim:{NODE}?gpus=8xh100")
        uri.only("gpus", "seed")
        return cls(text, SimulatedNode.parse(uri.options, uri.count("seed", 0)))

    def _gpu(self, number: int) -> str:
        server, mark, options = self._uri.partition("?")
        return f"{server}/{number}{mark}{options}"

    def add(self, board: Board) -> None:
        """Count the board of a service.

        Raises:
            InvalidInput: If it is not among the GPUs of this server.
        """
        uri = DeviceURI.parse(board.uri)
        other = uri.scheme != "sim" or not is_node(uri.name)
        if other or SimulatedNode.parse(uri.options, uri.count("seed", 0)) != self._node:
            raise InvalidInput(f"the meter {self._uri} is of a simulated server, of which {board.uri} is no part")
        idle_w = sum(self._idle_w.pop(number, 0.0) for number in self._node.numbers(uri.name))
        seen = board.read()
        self._boards.append(_Metered(board, seen.time_s, seen.energy_j, idle_w))

    def power_w(self) -> tuple[float, float]:
        """Return when the newest power was seen, and watts."""
        for each in self._boards:
            each.look()
        gpus_w = sum(each.power_w for each in self._boards) + sum(self._idle_w.values())
        return max((each.time_s for each in self._boards), default=0.0), self._node.whole_w(gpus_w)


def _idle_w(uri: str) -> float:
    """Return what a board draws that nobody uses, in watts."""
    device = open_device(uri)
    device.clock.sleep(1.0)
    return device.read().energy_j
