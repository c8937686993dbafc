"""The boards of a node: behind the machine's actuator where one serves them, else opened here under a lease and guard.

A simulated board is taken to be busy for as long as it is held, so that its caps do something: its powers are simulated
and have nothing to do with what really trains.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polythrottle.actuation.wire import Line
from polythrottle.backends import DeviceURI, open_device
from polythrottle.backends.found import find_device
from polythrottle.clock import Clock, VirtualClock
from polythrottle.daemon.actuator.opening import described, opened
from polythrottle.daemon.boards import ActuatorBoard, LocalBoard
from polythrottle.daemon.ports import Board
from polythrottle.errors import DeviceError, InvalidInput, PolythrottleError, UnknownName
from polythrottle.measurement import EnergyKind, Reading
from polythrottle.ports import Device, Recorded, Workload
from polythrottle.space import OperatingPoint
from polythrottle.state import ACTUATOR_SOCKET, socket_path

KNOB = "power_limit_w"
_PATIENCE_S = 5.0
_BUSY_WITH = "bert-base-fp16"
_LONGEST_S = 60.0
_SCHEMES = ("auto", "actuator", "jetson", "nvml", "cpu", "sim")


@dataclass(frozen=True)
class Steerable:
    """The boards of one node, together.

    Attributes:
        board: All of them as one.
        gpu: The name under which a fleet keeps what it knows of such a machine.
        limits_w: The power limits of each below its default, in watts; empty where there is none to set.
        gpus: How many boards there are.
        way: How they are reached, for people.
    """

    board: Board
    gpu: str
    limits_w: tuple[float, ...]
    gpus: int = 1
    way: str = ""


def check_boards(texts: Sequence[str]) -> None:
    """Refuse words that name no board, before anything is started.

    Raises:
        InvalidInput: If one is malformed, a recorded table, or one board is named twice.
        UnknownName: If there is no such kind of device, or no such simulated board.
    """
    if len(set(texts)) < len(texts):
        raise InvalidInput(f"--steer names each board once, not {', '.join(texts)[:80]}")
    for text in texts:
        uri = DeviceURI.parse(text)
        if uri.scheme not in _SCHEMES:
            raise InvalidInput(f"--steer {text[:60]} cannot be steered; it takes {', '.join(_SCHEMES)}, or off")
        if uri.several:
            raise InvalidInput(f"--steer {text[:60]} is a group; name each GPU: --steer nvml:0 --steer nvml:1 …")
        if uri.scheme == "sim":
            open_device(text)


def actuator_there() -> bool:
    """Return whether an actuator serves a board of this machine that this user may set."""
    path = socket_path(ACTUATOR_SOCKET)
    if not path.exists():
        return False
    line = Line(path, _PATIENCE_S)
    try:
        return bool(line.ask("hello").get("control"))
    except PolythrottleError:
        return False
    finally:
        line.close()


def open_boards(texts: Sequence[str], clock: Clock, folder: Path, holder: str) -> Steerable:
    """Return the boards that are meant, none of them taken yet.

    Args:
        texts: Their URIs; ``auto`` is what this machine's actuator serves, else the board that is found here.
        clock: Of the node.
        folder: For the tokens of leases; nobody else's.
        holder: Who holds them, for others to read.

    Raises:
        DeviceError: If one is not there.
        PolythrottleError: If a word names none.
    """
    found = [_opened(text, clock, folder / f"{index}.token", holder) for index, text in enumerate(texts)]
    if len(found) == 1:
        return found[0]
    common = set(found[0].limits_w).intersection(*(each.limits_w for each in found))
    kinds = sorted({each.gpu for each in found})
    way = "; ".join(each.way for each in found)
    board = Together([each.board for each in found])
    return Steerable(board, f"{len(found)}x-{'+'.join(kinds)}"[:100], tuple(sorted(common)), len(found), way)


def _opened(text: str, clock: Clock, token_file: Path, holder: str) -> Steerable:
    uri = DeviceURI.parse(text)
    if uri.scheme == "actuator":
        socket = Path(uri.name) if uri.name else socket_path(ACTUATOR_SOCKET)
        return _served(socket, uri.options.get("device", ""), clock, token_file, holder)
    socket = socket_path(ACTUATOR_SOCKET)
    if socket.exists():
        with suppress(UnknownName, DeviceError):
            return _served(socket, "" if text == "auto" else text, clock, token_file, holder)
    return _here(find_device().uri if text == "auto" else text, clock)


def _served(socket: Path, device: str, clock: Clock, token_file: Path, holder: str) -> Steerable:
    line = Line(socket, _PATIENCE_S)
    try:
        about = line.ask("describe", device=device)
    finally:
        line.close()
    if DeviceURI.parse(str(about["uri"])).several:
        raise InvalidInput(f"{about['title']} are served as a group, whose GPUs cannot be steered one by one")
    board = ActuatorBoard(socket, str(about["uri"]), token_file, clock, holder=holder)
    return Steerable(board, _known_as(about), _limits_w(about), way=f"{about['title']}, through the actuator")


def _here(text: str, clock: Clock) -> Steerable:
    device = opened(text)
    if isinstance(device, Recorded):
        raise InvalidInput(f"{device.uri} is a recorded table; there is nothing to set")
    about = described(device)
    board = BusyBoard(device, clock) if isinstance(device.clock, VirtualClock) else LocalBoard(device, clock)
    return Steerable(board, _known_as(about), _limits_w(about), way=str(about["title"]))


def _known_as(about: Mapping[str, Any]) -> str:
    return re.sub(r"[^A-Za-z0-9_.+@-]+", "-", str(about["title"])).strip("-.")[:80] or "unknown"


def _limits_w(about: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the power limits below the one that was found."""
    return tuple(
        sorted(
            float(level)
            for knob in about["knobs"]
            if knob["name"] == KNOB
            for level in knob["levels"]
            if float(level) < float(knob["default"])
        )
    )


class BusyBoard(LocalBoard):
    """A simulated board that is busy all the time, as a GPU is that trains.

    Args:
        device: Simulated; not entered.
        clock: Of the node; the board's own time follows it.
    """

    def __init__(self, device: Device, clock: Clock) -> None:
        super().__init__(device, clock)
        self._work = _busy_with(device)

    def _follow(self) -> None:
        now_s = self._clock.now()
        # It may be ahead by the query it was in the middle of, as a real board would be.
        until_s = self._device.clock.now() + min(_LONGEST_S, now_s - self._followed_s)
        while self._device.clock.now() < until_s:
            self._work.query()
        self._followed_s = now_s + self._device.clock.now() - until_s


def _busy_with(device: Device) -> Workload:
    from polythrottle.catalog import load_model

    serve: Callable[[object], Workload] = device.serve  # type: ignore[attr-defined]
    work = serve(load_model(_BUSY_WITH))
    work.apply(OperatingPoint({"batch_size": max(work.space.knob("batch_size").levels)}))
    return work


class Together:
    """Several boards as one: all are set alike, their joules are added; satisfies the port ``Board``.

    Args:
        boards: At least one.
    """

    def __init__(self, boards: Sequence[Board]) -> None:
        self._boards = tuple(boards)

    @property
    def uri(self) -> str:
        """Their URIs."""
        return ",".join(each.uri for each in self._boards)

    @property
    def title(self) -> str:
        """Their names."""
        return ", ".join(each.title for each in self._boards)

    @property
    def energy_kind(self) -> EnergyKind:
        """How their joules come about; the least certain of them."""
        kinds = {each.energy_kind for each in self._boards}
        order = (EnergyKind.SIMULATED, EnergyKind.RELATIVE, EnergyKind.ESTIMATED, EnergyKind.MEASURED)
        return next(kind for kind in order if kind in kinds)

    @property
    def boundary(self) -> str:
        """What their joules cover."""
        return "; ".join(dict.fromkeys(each.boundary for each in self._boards))

    def take(self) -> None:
        """Take or renew the right to set all of them.

        Raises:
            DeviceError: If one cannot be had.
        """
        for each in self._boards:
            each.take()

    def apply(self, point: OperatingPoint) -> None:
        """Set all of them to one point.

        Raises:
            KnobRejected: If one refuses it.
            DeviceError: If one cannot be steered.
        """
        for each in self._boards:
            each.apply(point)

    def read(self) -> Reading:
        """Return their joules together, the highest temperature, and whether any slows itself down.

        Raises:
            DeviceError: If one cannot be read.
        """
        found = [each.read() for each in self._boards]
        hottest_c = max((each.temperature_c for each in found if each.temperature_c is not None), default=None)
        joules, throttled = sum(each.energy_j for each in found), any(each.throttled for each in found)
        return Reading(found[-1].time_s, joules, hottest_c, found[0].clocks_hz, throttled)

    def verify(self) -> tuple[str, ...]:
        """Return the knobs that no longer hold what was applied last, on any of them."""
        return tuple(knob for each in self._boards for knob in each.verify())

    def restore(self) -> None:
        """Put all of them back."""
        for each in self._boards:
            each.restore()

    def release(self) -> tuple[str, ...]:
        """Put all of them back and give them up, each whatever became of the others.

        Raises:
            DeviceError: If one cannot be reached; what holds it ends its lease.
        """
        left: list[str] = []
        failed: DeviceError | None = None
        for each in self._boards:
            try:
                left += each.release()
            except DeviceError as error:
                failed = error
        if failed is not None:
            raise failed
        return tuple(left)
