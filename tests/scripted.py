"""A control loop that does as a script says, for tests of what is around it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from polythrottle.daemon.budgets import Budget
from polythrottle.daemon.commands import (
    Answer,
    ApplyProfile,
    Command,
    Confirm,
    Release,
    SetBudget,
    StartStudy,
    StopStudy,
)
from polythrottle.daemon.loop.mailbox import Mailbox, PendingCommand
from polythrottle.daemon.status import Front, GuardShown, Happened, RungShown, Status, StudyShown, WorkloadShown
from polythrottle.daemon.web import ApiServer, WebOptions, serve
from polythrottle.domain.errors import PolythrottleError, SloUnmet, UnknownName

PROFILES = ("sim/resnet50", "sim/bert")
FIRST = Status(
    turn=1,
    at="2026-01-02T03:04:05+00:00",
    since="2026-01-02T03:00:00+00:00",
    device="sim:jetson-agx-orin",
    title="Jetson AGX Orin (simulated)",
    energy_kind="simulated",
    phase="following",
    workload=WorkloadShown("resnet50", "resnet50", "sim:poisson:30/s", ("p99<=25ms",), True, "sim/resnet50"),
    point={"gpu_max_hz": 900_000_000, "batch_size": 4},
    gather_s=0.005,
    rung=RungShown(0, 1, 40.0, 12.0, 0.02),
    ladder=(Front(40.0, 12.0, 0.02, {"batch_size": 4}),),
    leased=True,
    reachable=True,
    rate_per_s=30.0,
    p99_s=0.02,
    power_w=float("inf"),
    guards=(GuardShown("p99", 0.02, 0.025),),
)


class Script:
    """Turns by itself, answers wishes, and notes them.

    Args:
        period_s: From one turn to the next.
    """

    def __init__(self, period_s: float = 0.02) -> None:
        self.desk = Mailbox(FIRST)
        self.wishes: list[Command] = []
        self.refuses: PolythrottleError | None = None
        self.deaf = False
        self.clean = True
        self._period_s = period_s
        self._over = threading.Event()
        self._wake = threading.Event()
        self._number = 0
        self.desk.on_wish(self._wake.set)
        self._thread = threading.Thread(target=self._turn_on, name="script")

    def tell(self, *words: str) -> None:
        """Have events happen."""
        first = self._number + 1
        self._number += len(words)
        self.desk.tell([Happened(first + i, FIRST.at, "phase", each) for i, each in enumerate(words)])

    def show(self, **fields: Any) -> None:
        """Publish another turn with these fields."""
        self.desk.publish(replace(self.desk.status, turn=self.desk.status.turn + 1, **fields))

    def start(self) -> None:
        """Begin to turn."""
        self._thread.start()

    def end(self) -> None:
        """Turn no more."""
        self._over.set()
        self._wake.set()
        self._thread.join()

    def _turn_on(self) -> None:
        while not self._over.is_set():
            self._wake.wait(self._period_s)
            self._wake.clear()
            for asked in () if self.deaf else self.desk.wishes():
                self._answer(asked)
            self.show()

    def _answer(self, asked: PendingCommand) -> None:
        self.wishes.append(asked.wish)
        try:
            asked.answer.set_result(self._said(asked.wish))
        except PolythrottleError as error:
            asked.answer.set_exception(error)

    def _said(self, wish: Command) -> Answer:
        if self.refuses is not None:
            raise self.refuses
        match wish:
            case ApplyProfile(profile) if profile not in PROFILES:
                raise UnknownName("profile", profile, PROFILES)
            case Confirm() if not any(isinstance(each, ApplyProfile) for each in self.wishes):
                raise SloUnmet("nothing waits to be confirmed")
            case Release():
                return {"words": "done: Release", "clean": self.clean}
            case SetBudget():
                return {"words": "a budget", "met": Budget.of(wish, 0.0, 0.0) is not None}
            case StartStudy(trials):
                self.show(study=StudyShown("s1", "ended", trials, trials))
                return {"words": "a study begins", "id": "s1"}
            case StopStudy(id):
                self.show(study=replace(self.desk.status.study or StudyShown(id, "stopped"), state="stopped"))
        return {"words": f"done: {type(wish).__name__}"}


def until(done: Callable[[], object]) -> None:
    """Wait until something is so that another thread brings about; the test's own time limit ends it."""
    never = threading.Event()
    while not done():
        never.wait(0.002)


@contextmanager
def daemon(
    socket: Path, change: Callable[[WebOptions], WebOptions] = lambda options: options, period_s: float = 0.02
) -> Iterator[tuple[Script, ApiServer]]:
    """Serve the API of a scripted control loop."""
    script = Script(period_s)
    server = serve(script.desk, change(WebOptions(socket)))
    script.start()
    try:
        yield script, server
    finally:
        script.end()
        server.close()
