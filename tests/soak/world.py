"""All that is outside the daemon and goes on when it is killed: time, board, requests, actuator, disk, other people.

The board and its requests are simulated. The actuator is the real `Service`, which answers in this process and goes by
the world's clock: what is asked of it is encoded, decoded and checked as on its socket. It sets the board through the
real `Actuator`, whose record, lease and audit lie on a real disk. The daemon's own parts know nothing of this.
"""

import os
import resource
import sqlite3
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

from typing_extensions import Self

from polythrottle.actuation import Actuator
from polythrottle.actuation.server.permits import Permits
from polythrottle.actuation.server.request_handler import Request, Service, request_from
from polythrottle.actuation.server.unix_socket import Peer
from polythrottle.actuation.wire import VERSION, error_from, error_line
from polythrottle.daemon.control.events import Target
from polythrottle.daemon.observation import RequestStats
from polythrottle.daemon.traffic.simulated import SimulatedSite, SimulatedTraffic
from polythrottle.domain.clock import Clock, SystemClock, VirtualClock
from polythrottle.domain.errors import DeviceError, PolythrottleError
from polythrottle.domain.measurement import EnergyKind, Reading
from polythrottle.domain.ports import Offer
from polythrottle.domain.space import OperatingPoint, SearchSpace
from polythrottle.storage.json_channel import decode, encode
from soak import board
from soak.board import Controls, Disk, Guard
from soak.load import arrivals, opened

EPOCH_S = 1_700_000_000.0
_US = Peer(1, 0)
_STEP_S = 1.0


class Killed(BaseException):
    """SIGKILL: nothing of the process runs any more."""


class WorldClock(VirtualClock):
    """The machine's monotonic clock; whoever sleeps on it lets the actuator's leases run out."""

    def __init__(self, world: "World") -> None:
        super().__init__()
        self._world = world

    def sleep(self, duration_s: float) -> None:
        """Move time on."""
        super().sleep(duration_s)
        self._world.tick()


class UnhurriedService(Service):
    """The actuator's service, of whose askers a day's questions may come within minutes of real time."""

    def _check_pace(self, peer: Peer) -> None:
        return


class World:
    """Everything but the daemon.

    Args:
        folder: For the daemon's state, which moves to another folder with each kill.
        seed: Of the requests.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.clock = WorldClock(self)
        self.slept_s = self.shift_s = 0.0
        device, workload = opened(seed)
        self.minutes = Minutes()
        self.site = SimulatedSite(device, workload, arrivals(seed), self.clock, "sim:", note=self.minutes.note)
        self.device = device
        self.default = self._set = device.space.default
        self.controls = Controls(folder / "board", device.space)
        self.disk = Disk(folder / "state")
        self.entered: SiteDevice | None = None
        self.applied: OperatingPoint | None = None
        self.foreign: OperatingPoint | None = None
        self.service: Service | None = None
        self.blind = self.recordless = False
        self.starved = ""
        self.left: list[str] = []
        self._guard: Guard | None = None
        self._descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.fatal: tuple[str, int] | None = None
        self.asked: Counter[str] = Counter()
        self._folder, self._state = folder / "state", 0
        self._open: list[sqlite3.Connection] = []
        self.state.mkdir(parents=True)

    def wall(self) -> float:
        """Return wall time."""
        return EPOCH_S + self.clock.now() + self.slept_s + self.shift_s

    def boot_s(self) -> float:
        """Return the seconds since boot, suspend included, from which leases run."""
        return 1000.0 + self.clock.now() + self.slept_s

    def tick(self) -> None:
        """Let the actuator end what has run out."""
        if self._guard is not None:
            self._restore_by_guard()
        if self.service is not None and (next_s := self.service.next_s) is not None and next_s <= self.boot_s():
            with self.descriptors("actuator"):
                self.service.tick()
            self.settle()

    def wait(self, duration_s: float) -> None:
        """Let time pass without a daemon."""
        until_s = self.clock.now() + duration_s
        while (left_s := until_s - self.clock.now()) > 1e-9:
            self.clock.sleep(min(left_s, _STEP_S))

    # The board

    @property
    def point(self) -> OperatingPoint:
        """What the board's controls hold."""
        with board.fed(self._descriptors):
            return self.controls.point

    def settle(self) -> None:
        """Let the board run as its controls say, once they agree with each other."""
        point = self.point
        if point != self._set and point in self.device.space:
            self.site.apply(point)
            self._set = point

    def write(self, point: OperatingPoint) -> None:
        """Set the board past the actuator."""
        with board.fed(self._descriptors):
            self.controls.write(point)
        self.settle()

    def interfere(self, point: OperatingPoint) -> None:
        """Write as somebody else does, who takes it back at the end."""
        self.foreign = point
        self.write(point)

    def withdraw(self) -> None:
        """Let somebody else put back what is still as they have set it."""
        if self.foreign is not None:
            now = self.point
            usual = {name: self.default[name] for name in self.foreign if now[name] == self.foreign[name]}
            if self.applied is None or now == self.foreign:
                self.write(now.moved(usual))
            self.foreign = None

    # The actuator

    def start_actuator(self) -> None:
        """Start it: what one that was killed has left is put back first."""
        self.service = UnhurriedService((self.device.uri,), Permits([], own=0), self.boot_s)
        self.left += self.service.start()
        self.settle()

    def kill_actuator(self, guarded: bool) -> None:
        """End it without a word; its guard, if that lives, puts the board back as soon as it can.

        Args:
            guarded: Whether it lives. Where the records were deleted it does: nobody else knows then what was there.
        """
        self.service, entered, self.entered = None, self.entered, None
        self.applied = None
        self.starved = "" if self.starved == "actuator" else self.starved
        if entered is None:
            return
        guard = Guard(entered.actuator)
        board.died(entered.actuator)
        if guarded or self.recordless:
            self._guard = guard
            self._restore_by_guard()

    def _restore_by_guard(self) -> None:
        if self._guard is not None and self._guard.is_done():
            self._guard = None
        self.settle()

    @contextmanager
    def descriptors(self, who: str) -> Iterator[None]:
        """Leave the daemon or the actuator none while it runs, if that is what is wrong with it."""
        with ExitStack() as stack:
            if self.starved == who:
                stack.enter_context(board.starved())
            elif self.starved:
                stack.enter_context(board.fed(self._descriptors))
            yield

    def ask(self, number: int, verb: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Answer the daemon as the actuator would over its socket.

        Raises:
            DeviceError: If it does not run.
            PolythrottleError: If it says no.
            Killed: If the daemon is to die in this.
        """
        self.asked[verb] += 1
        self._strike("before")
        if self.service is None:
            raise DeviceError("no actuator listens at actuator.sock; start it: polythrottle daemon actuator")
        request = request_from(decode(encode({"v": VERSION, "id": number, "verb": verb, **fields})))
        try:
            with self.descriptors("actuator"):
                answer = self._answered(request)
        except PolythrottleError as err:
            raise error_from(error_line(err)) from None
        self._strike("after")
        return decode(encode(answer))

    def _answered(self, request: Request) -> dict[str, Any]:
        assert self.service is not None
        answer = self.service.answer(_US, request)
        assert isinstance(answer, dict), "nobody asks for a search space here"
        return answer

    def _strike(self, when: str) -> None:
        if self.fatal is not None and self.fatal[0] == when:
            left = self.fatal[1] - 1
            self.fatal = (when, left) if left > 0 else None
            if left <= 0:
                raise Killed

    # The disk

    @property
    def state(self) -> Path:
        """The daemon's state folder, as it is on the disk."""
        return self._folder / f"state-{self._state}"

    def leave_state(self) -> None:
        """Leave the files as SIGKILL does: what was written is there, nothing is closed, folded in or tidied up.

        The files are copied, for in one process a database that is dropped is closed in an orderly way.
        """
        old, self._state = self.state, self._state + 1
        self.state.mkdir()
        for file in old.iterdir():
            if not file.name.endswith("-shm"):  # memory of those who have it open, who are gone
                (self.state / file.name).write_bytes(file.read_bytes())
        for database in self._open:
            database.close()
        self._open.clear()
        for file in old.iterdir():
            file.unlink()
        old.rmdir()

    @contextmanager
    def installed(self) -> Iterator[Self]:
        """Let the daemon's parts meet this world instead of sockets, drivers and the disk."""
        connect = sqlite3.connect

        def connected(file: Any, **options: Any) -> sqlite3.Connection:
            made = connect(file, factory=Database, **options)
            assert isinstance(made, Database)
            made.world = self
            self._open.append(made)
            return made

        with ExitStack() as stack:
            state = {"POLYTHROTTLE_STATE_DIR": str(self._folder / "actuator")}
            stack.enter_context(mock.patch.dict(os.environ, state))
            for name, new in (
                ("polythrottle.actuation.client.board.Line", lambda path, patience_s: WorldLine(self)),
                ("polythrottle.actuation.server.device_lease.open_served", lambda uri: SiteDevice(self)),
                ("sqlite3.connect", connected),
            ):
                stack.enter_context(mock.patch(name, new))
            stack.enter_context(self.controls.installed())
            stack.enter_context(self.disk.installed())
            yield self


class Database(sqlite3.Connection):
    """A database on a disk that can be full or read-only."""

    world: World | None = None

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        """Run a statement.

        Raises:
            sqlite3.OperationalError: If it writes and the disk takes nothing.
        """
        words = statement.split(None, 1)[0].upper()
        self._room(words in ("INSERT", "DELETE", "CREATE") or (words == "PRAGMA" and "user_version =" in statement))
        return super().execute(statement, *values)

    def executescript(self, script: str) -> sqlite3.Cursor:
        """Likewise."""
        self._room(True)
        return super().executescript(script)

    def _room(self, writes: bool) -> None:
        if writes and self.world is not None and self.world.disk.readonly:
            raise sqlite3.OperationalError("attempt to write a readonly database")
        if writes and self.world is not None and self.world.disk.full:
            raise sqlite3.OperationalError("database or disk is full")


class WorldLine:
    """What the daemon takes for its line to the actuator."""

    def __init__(self, world: World) -> None:
        self._world, self._number = world, 0

    def ask(self, verb: str, **fields: Any) -> dict[str, Any]:
        """Ask; see `World.ask`."""
        self._number += 1
        return self._world.ask(self._number, verb, fields)

    def close(self) -> None:
        """Do nothing."""


class SiteDevice:
    """What the actuator takes for its board; satisfies the ports ``Device`` and ``Offering``."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.clock: Clock = SystemClock()
        self.actuator = Actuator(board.NAME, guarded=False, holder="the actuator")
        self.actuator.allow(*world.controls.allowed())

    @property
    def uri(self) -> str:
        """The device's URI."""
        return self._world.device.uri

    @property
    def title(self) -> str:
        """Its name."""
        return self._world.device.title

    @property
    def space(self) -> SearchSpace:
        """Its points."""
        return self._world.device.space

    @property
    def energy_kind(self) -> EnergyKind:
        """Simulated."""
        return self._world.device.energy_kind

    @property
    def boundary(self) -> str:
        """What its joules cover."""
        return self._world.device.boundary

    @property
    def presets(self) -> Mapping[str, OperatingPoint]:
        """Its presets."""
        return self._world.device.presets

    def offers(self) -> tuple[Offer, ...]:
        """Return its knobs."""
        return self._world.device.offers()

    @property
    def differences(self) -> tuple[object, ...]:
        """What was left as somebody else has set it."""
        return self.actuator.differences

    def altered(self) -> tuple[str, ...]:
        """Return what somebody else has set."""
        return tuple(self._world.controls.name(key) for key in self.actuator.altered())

    def apply(self, point: OperatingPoint) -> None:
        """Set it; fails as `Actuator.apply` does."""
        world = self._world
        whole = world.applied = world.default.moved(point)
        try:
            self.actuator.apply(world.controls.settings(whole))
        finally:
            world.settle()

    def read(self) -> Reading:
        """Return what the sensors say.

        Raises:
            DeviceError: If they cannot be read.
        """
        if self._world.blind:
            raise DeviceError("in0_input cannot be read: Input/output error")
        return self._world.site.board.read()

    def restore(self) -> None:
        """Put back what was found; fails as `Actuator.restore` does."""
        world = self._world
        world.applied = None
        try:
            self.actuator.restore()
        finally:
            world.settle()

    def __enter__(self) -> Self:
        world = self._world
        world.withdraw()
        self.actuator.__enter__()
        world.entered, world.recordless = self, False
        world.settle()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        world = self._world
        world.applied = world.entered = None
        try:
            self.actuator.__exit__(kind, error, trace)
        finally:
            world.settle()


class Eyes:
    """The requests of the world as one daemon sees them: those since it was started; satisfies the port ``Traffic``.

    Args:
        world: Whose.
    """

    def __init__(self, world: World) -> None:
        world.site.catch_up()
        before = world.site.round()
        self.missed, self.seen = len(before.ended), 0
        self._world, self._inner = world, SimulatedTraffic(world.site, "sim:")
        self._first: int | None = before.begun + before.waiting
        self.note = ""

    @property
    def uri(self) -> str:
        """Made up."""
        return self._inner.uri

    def look(self, now_s: float) -> RequestStats:
        """Return what has come since the look before, or since the start."""
        found = self._inner.look(now_s)
        assert found is not None, "requests come without end"
        self.seen += found.answered or 0
        if self._first is not None:
            found, self._first = replace(found, arrived=(found.arrived or 0) - self._first), None
        return found

    def serve(self, target: Target) -> None:
        """Tell the server."""
        self._world.site.serve(target)

    def close(self) -> None:
        """Do nothing."""


class Minutes:
    """What those who sent the requests saw, minute by minute of the world's own clock.

    Every minute is judged once its requests have surely ended.
    """

    def __init__(self) -> None:
        self.p99_s: list[float] = []
        self.counts: list[int] = []
        self.sent = 0
        self._open: deque[array[float]] = deque()

    def note(self, arrival_s: float, latency_s: float) -> None:
        """Note a request that was answered or given up."""
        self.sent += 1
        minute = int(arrival_s // 60) - len(self.p99_s)
        while len(self._open) <= minute:
            self._open.append(array("d"))
        self._open[minute].append(latency_s)

    def judge(self, now_s: float) -> None:
        """Judge the minutes that ended more than two minutes ago: nobody waits for longer."""
        while self._open and (len(self.p99_s) + 3) * 60 <= now_s:
            found = sorted(self._open.popleft())
            self.counts.append(len(found))
            self.p99_s.append(found[-(-99 * len(found) // 100) - 1] if found else 0.0)
