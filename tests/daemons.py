"""What tests of the daemon share: a scripted board and traffic in virtual time, and a plan to follow."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from polythrottle.actuation.client.board import LocalBoard
from polythrottle.daemon.control.events import Bounds, ControlPlan, Target
from polythrottle.daemon.energy_accounts import Accounts
from polythrottle.daemon.followed_profile import UNTOUCHED, FollowedProfile
from polythrottle.daemon.history_store import HistoryStore
from polythrottle.daemon.loop.mailbox import Mailbox
from polythrottle.daemon.loop.runner import LoopComponents, Runner
from polythrottle.daemon.observation import RequestStats
from polythrottle.daemon.study_process import Studies
from polythrottle.daemon.trainer_monitor import TrainerMonitor
from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import DeviceError, PolythrottleError
from polythrottle.domain.ladder import Ladder, PointPerformance, Rung
from polythrottle.domain.measurement import EnergyKind, Reading
from polythrottle.domain.ports import Device
from polythrottle.domain.space import OperatingPoint

SLO_S = 0.1
EPOCH_S = 1_700_000_000.0


def rung(rate_per_s: float, mhz: int, power_w: float, batch: int = 1) -> Rung:
    """Return a rung whose device idles at half of its power."""
    point = OperatingPoint({"gpu_max_hz": mhz * 10**6, "batch_size": batch})
    interval_s = batch / rate_per_s / 1.25
    service = PointPerformance(
        point, batch, interval_s, interval_s, interval_s * 1.2, power_w * interval_s, power_w / 2
    )
    return Rung(rate_per_s, service, 0.0, power_w, 0.05)


LADDER = Ladder(SLO_S, (rung(20, 300, 10.0), rung(60, 600, 20.0), rung(200, 1200, 40.0)))
TOP = Target(LADDER.rungs[2].service.point)
COOL = Target(LADDER.rungs[0].service.point)
BOUNDS = Bounds(p99_s=SLO_S, temperature_c=90.0)
TUNED = FollowedProfile("a.toml", ControlPlan(LADDER, TOP, COOL, BOUNDS), "model.onnx", ("p99<=100ms",))


@dataclass
class FakeBoard:
    """A board that draws what the ladder says of what is applied, and does what its script says."""

    clock: VirtualClock
    uri: str = "jetson"
    title: str = "a board"
    energy_kind: EnergyKind = EnergyKind.MEASURED
    boundary: str = "module"
    applied: OperatingPoint | None = None
    taken: bool = False
    foreign: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    temperature_c: float | None = 50.0
    power_w: float = 12.0
    fails: dict[str, Exception] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    _joules: float = 0.0
    _last_s: float = 0.0

    def _try(self, verb: str) -> None:
        if error := self.fails.get(verb):
            raise error
        if verb not in ("take", "read", "verify"):
            self.done.append(verb)

    def take(self) -> None:
        """Take it."""
        self._try("take")
        self.taken = True

    def apply(self, point: OperatingPoint) -> None:
        """Set it."""
        self._try("apply")
        assert self.taken, "nothing may be set without the right to"
        self.applied = point

    def read(self) -> Reading:
        """Return what it draws."""
        self._try("read")
        now_s = self.clock.now()
        self._joules += self.power_w * (now_s - self._last_s)
        self._last_s = now_s
        return Reading(now_s, self._joules, self.temperature_c, {"gpu": 600_000_000})

    def verify(self) -> tuple[str, ...]:
        """Return what somebody else has set."""
        self._try("verify")
        return self.foreign

    def restore(self) -> None:
        """Put it back."""
        self._try("restore")
        self.applied = None

    def release(self) -> tuple[str, ...]:
        """Give it up."""
        self._try("release")
        self.applied, self.taken = None, False
        return self.left

    def lend(self) -> tuple[str, Mapping[str, str]]:
        """Lend it."""
        self._try("lend")
        return "sim:jetson-agx-orin", {}

    def take_back(self) -> None:
        """End the loan."""
        self._try("take_back")


@dataclass
class FakeTraffic:
    """Requests at a rate, answered as the script says; None for a workload that is not up."""

    clock: VirtualClock
    uri: str = "fake"
    rate_per_s: float | None = 30.0
    p99_s: float | None = 0.05
    waiting: int = 0
    model: str = ""
    error: PolythrottleError | None = None
    refusal: PolythrottleError | None = None
    served: list[Target] = field(default_factory=list)
    closed: bool = False
    _last_s: float = 0.0
    _rest: float = 0.0

    def look(self, now_s: float) -> RequestStats | None:
        """Return what has come."""
        period_s, self._last_s = now_s - self._last_s, now_s
        if self.error is not None:
            raise self.error
        if self.rate_per_s is None:
            return None
        whole = self.rate_per_s * max(0.0, period_s) + self._rest
        self._rest = whole - int(whole)
        return RequestStats(int(whole), int(whole), 0, self.waiting, self.p99_s, 0.02, self.model)

    def serve(self, target: Target) -> None:
        """Note it."""
        if self.refusal is not None:
            raise self.refusal
        self.served.append(target)

    def close(self) -> None:
        """Note it."""
        self.closed = True


class House:
    """A control loop with all it needs, in virtual time."""

    def __init__(
        self,
        folder: Path,
        tuned: FollowedProfile | None = TUNED,
        program: tuple[str, ...] = ("false",),
        board: str | Device = "jetson",
    ) -> None:
        self.clock = VirtualClock()
        self.board: FakeBoard = (
            FakeBoard(self.clock, board) if isinstance(board, str) else cast(FakeBoard, LocalBoard(board, self.clock))
        )
        self.traffic, self.desk = FakeTraffic(self.clock), Mailbox()
        self.slept_s = 0.0
        self.identity: Mapping[str, str] = {}
        self.record = HistoryStore(folder / "daemon.db", self.wall)
        self.accounts = Accounts(self.record, self.wall)
        self.studies = Studies(folder, self.board, self.record, self.clock, program)
        parts = LoopComponents(
            *(self.clock, self.board, self.traffic, self.desk, self.record, self.accounts, self.studies),
            identity=lambda: self.identity,
            wall=self.wall,
            slept_s=lambda: self.slept_s,
            finetuning=TrainerMonitor((folder / "finetune",), self.wall),
        )
        self.runner = Runner(parts, tuned)

    def wall(self) -> float:
        """Return wall time, which begins at a round moment."""
        return EPOCH_S + self.clock.now()

    def turns(self, count: int, each: Callable[[], None] = lambda: None) -> None:
        """Turn so many times, a second apart, as the loop itself does."""
        for _ in range(count):
            self.runner.turn()
            each()
            self.runner._wait()

    def words(self, kind: str) -> list[str]:
        """Return the words of all events of a kind."""
        return [event.words for event in self.desk.events() if event.kind == kind]


GONE = DeviceError("the actuator cannot be reached")
__all__ = ["COOL", "GONE", "LADDER", "SLO_S", "TOP", "TUNED", "UNTOUCHED", "FakeBoard", "FakeTraffic", "House", "rung"]
