"""A day in virtual time: the real control loop, its record on a real disk, and a fault a minute.

What is counted is compared with what the world itself knows: requests, joules, events, levels. `Day.run` returns a
`Report`; `Report.broken` says in words what did not hold.
"""

import errno
import gc
import math
import sqlite3
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polythrottle.actuation.client.board import ActuatorBoard
from polythrottle.actuation.restore import standing
from polythrottle.daemon.commands import Take
from polythrottle.daemon.control.events import Bounds
from polythrottle.daemon.energy_accounts import Accounts
from polythrottle.daemon.followed_profile import read_tuned
from polythrottle.daemon.history_store import EVENTS_MOST, HistoryStore
from polythrottle.daemon.loop.mailbox import Mailbox, resident_bytes
from polythrottle.daemon.loop.runner import LoopComponents, Runner
from polythrottle.daemon.study_process import Studies
from soak import board, faults
from soak.faults import Hit
from soak.load import SLO_S, profile
from soak.world import Eyes, Killed, World

AFTER_S = 60.0
"""How long after a fault a minute is still counted as its."""
RECLAIM_S = 120.0
"""How long it takes until somebody notices that the daemon gives way, and has it take the board again."""
_GUARDS = Bounds(temperature_c=95.0)
_UNDER_WAY_S = 62.0
_STRIKE_S = 4.0
_REFUSALS = (0, errno.EIO, errno.ENODEV)


@dataclass
class Lost:
    """What a killed daemon had counted and not written.

    Args:
        at_s: When it was killed.
        requests: Answered, and in no minute on the disk; ``seconds`` likewise.
        seconds: Of control.
        events: Told and not on the disk.
        full: Whether the disk had taken nothing, or no descriptor had been left, at some time since it last wrote.
    """

    at_s: float
    requests: int
    seconds: float
    events: int
    full: bool


@dataclass
class Report:
    """What a day came to.

    Args:
        hours: How long it was; ``seed`` of it all.
        hits: What went wrong.
        turns: Of the control loop; ``slowest_s`` the real time of the slowest, ``real_s`` of the whole day.
        phases: Turns in each phase.
        told: Events of each kind.
        lost: With each kill.
        asked: Requests to the actuator, by verb.
        starts: Of the daemon; ``reclaims`` of the board, by somebody who saw that the daemon had given way.
        ended: Requests, in the world; ``written`` of them are in the minutes on the disk.
        missed: Of them, while no daemon ran; ``between`` seen by a daemon that was killed before it had counted them.
        controlled_s: Time that a daemon turned; ``seconds`` of it are in the minutes on the disk.
        true_j: What the board drew; ``written_j`` of it on the disk.
        p99_s: Per minute of the world's clock; ``counts`` requests.
        yielded: Minutes in which the daemon had given way to somebody else or a refusing board.
        resident_bytes: Of this process after each hour; ``objects`` that the interpreter keeps track of.
        broken: What did not hold.
    """

    hours: float
    seed: int
    hits: list[Hit]
    turns: int = 0
    real_s: float = 0.0
    slowest_s: float = 0.0
    phases: Counter[str] = field(default_factory=Counter)
    told: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    reclaims: int = 0
    lost: list[Lost] = field(default_factory=list)
    ended: int = 0
    missed: int = 0
    between: int = 0
    written: int = 0
    controlled_s: float = 0.0
    seconds: float = 0.0
    true_j: float = 0.0
    written_j: float = 0.0
    p99_s: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    yielded: set[int] = field(default_factory=set)
    resident_bytes: list[int] = field(default_factory=list)
    objects: list[int] = field(default_factory=list)
    events: int = 0
    broken: list[str] = field(default_factory=list)

    def minutes(self, kinds: Sequence[str] | None = None) -> set[int]:
        """Return the minutes with a fault in them, or within `AFTER_S` after one.

        Args:
            kinds: Only of these.
        """
        touched: set[int] = set()
        for hit in self.hits:
            if kinds is None or hit.kind in kinds:
                touched.update(range(int(hit.at_s // 60), int((hit.until_s + AFTER_S) // 60) + 1))
        return touched & set(range(len(self.p99_s)))

    def held(self, minutes: set[int]) -> tuple[int, int]:
        """Return in how many of some minutes the p99 held, of how many."""
        return sum(self.p99_s[each] <= SLO_S for each in minutes), len(minutes)

    @property
    def grown(self) -> tuple[int, int]:
        """By how many bytes and how many objects the process has grown from the first hour to the last."""
        weighed = self.resident_bytes or [0]
        counted = self.objects or [0]
        return weighed[-1] - weighed[0], counted[-1] - counted[0]

    @property
    def clean(self) -> set[int]:
        """Minutes without any fault near, and not after the daemon has given way."""
        return set(range(len(self.p99_s))) - self.minutes() - self.yielded


class Day:
    """One day of one world.

    Args:
        folder: For state and profile.
        seed: Of requests and faults.
        hours: How long.
        hits: What goes wrong.
    """

    def __init__(self, folder: Path, seed: int, hours: float, hits: list[Hit]) -> None:
        self._file = profile(folder / "day.toml")
        self._world = World(folder / "world", seed)
        self._report = Report(hours, seed, hits)
        self._coming = sorted(hits, key=lambda hit: hit.at_s)
        self._ends: list[tuple[float, Hit]] = []
        self._runner: Runner | None = None
        self._told: dict[int, str] = {}
        self._twice: list[int] = []
        self._before = (0, 0.0)
        self._full_s = -math.inf
        self._yielded_s: float | None = None

    def run(self) -> Report:
        """Go through the day, end it as an administrator does, and return what it came to."""
        world, report = self._world, self._report
        begun_s = time.perf_counter()
        with world.installed():
            world.start_actuator()
            first_j = world.site.board.read().energy_j
            self._start()
            while world.clock.now() < report.hours * 3600:
                self._hour()
                self._due()
                self._lived()
            self._hour()
            self._end()
            report.true_j = world.site.board.read().energy_j - first_j
        report.real_s = time.perf_counter() - begun_s
        report.p99_s, report.counts = world.minutes.p99_s, world.minutes.counts
        report.asked = world.asked
        self._compare()
        return report

    # What goes wrong

    def _due(self) -> None:
        now_s = self._world.clock.now()
        self._ended(now_s)
        while self._coming and self._coming[0].at_s <= now_s:
            self._strike(self._coming.pop(0))

    def _strike(self, hit: Hit) -> None:
        world = self._world
        match hit.kind:
            case faults.DAEMON | faults.BOTH:
                self._kill(hit)
            case faults.WALL:
                world.shift_s += (hit.draw - 0.5) * 12 * 3600
            case faults.SUSPEND:
                world.slept_s += hit.span_s
                world.tick()
            case faults.STALL:
                world.wait(hit.span_s)
            case faults.RESET:
                world.write(world.default)
            case faults.LEASE | faults.RECORD | faults.FOLDER:
                with world.disk.sound():
                    self._lose(hit)
            case _:
                self._begun(hit)
                self._ends.append((hit.until_s, hit))

    def _lose(self, hit: Hit) -> None:
        """Take away, or damage, what is kept on the disk about the board."""
        world = self._world
        match hit.kind:
            case faults.LEASE:
                board.lose_lease(hit.draw, world.state / "lease.token")
            case faults.RECORD:
                board.damage(hit.draw)
            case faults.FOLDER:
                board.lose_records()
                world.recordless = True

    def _begun(self, hit: Hit) -> None:
        """Begin what lasts for a while, in which the daemon lives."""
        world = self._world
        match hit.kind:
            case faults.ACTUATOR:
                world.kill_actuator(guarded=hit.draw < 0.5)
            case faults.BLIND:
                world.blind = True
            case faults.REFUSING:
                world.controls.refusal = _REFUSALS[int(hit.draw * len(_REFUSALS))]
            case faults.FOREIGN:
                points = world.device.space
                world.interfere(points[int(hit.draw * len(points))])
            case faults.FULL:
                world.disk.full, self._full_s = True, max(self._full_s, hit.until_s)
            case faults.READONLY:
                world.disk.readonly, self._full_s = True, max(self._full_s, hit.until_s)
            case faults.STARVED:
                world.starved = "daemon" if hit.draw < 0.5 else "actuator"
                self._full_s = max(self._full_s, hit.until_s)

    def _ended(self, now_s: float) -> None:
        over = [each for each in self._ends if each[0] <= now_s]
        self._ends = [each for each in self._ends if each[0] > now_s]
        for _, hit in over:
            self._over(hit)

    def _over(self, hit: Hit) -> None:
        world = self._world
        still = [each.kind for _, each in self._ends]
        match hit.kind:
            case faults.ACTUATOR if hit.kind not in still and world.service is None:
                world.start_actuator()
            case faults.BLIND:
                world.blind = hit.kind in still
            case faults.REFUSING if hit.kind not in still:
                world.controls.refusal = None
            case faults.FOREIGN if hit.kind not in still:
                world.withdraw()
            case faults.FULL:
                world.disk.full = hit.kind in still
            case faults.READONLY:
                world.disk.readonly = hit.kind in still
            case faults.STARVED if hit.kind not in still:
                world.starved = ""

    def _kill(self, hit: Hit) -> None:
        """Kill the daemon between two turns, or in one: before or after the actuator answers it something."""
        world = self._world
        if hit.draw > 1 / 3:
            world.fatal = ("before" if hit.draw < 2 / 3 else "after", 1 + int(hit.draw * 1000) % 4)
            until_s = world.clock.now() + _STRIKE_S
            while world.fatal is not None and world.clock.now() < until_s:
                self._lived()
            world.fatal = None
        self._died()
        if hit.kind == faults.BOTH:
            world.kill_actuator(guarded=int(hit.draw * 100) % 2 == 0)
        world.wait(max(0.0, hit.until_s - world.clock.now()))
        if world.service is None and not any(each.kind == faults.ACTUATOR for _, each in self._ends):
            world.start_actuator()
        self._ended(world.clock.now())
        self._start()

    # The daemon

    def _start(self) -> None:
        world, report = self._world, self._report
        report.starts += 1
        self._desk = Mailbox()
        self._record = HistoryStore(world.state / "daemon.db", world.wall)
        board = ActuatorBoard(Path("actuator.sock"), None, world.state / "lease.token", world.clock)
        self._accounts = Accounts(self._record, world.wall)
        self._eyes = Eyes(world)
        report.missed += self._eyes.missed
        studies = Studies(world.state, board, self._record, world.clock, ("true",))
        parts = LoopComponents(
            *(world.clock, board, self._eyes, self._desk, self._record, self._accounts, studies, _GUARDS),
            identity=board.identity,
            wall=world.wall,
            slept_s=lambda: world.slept_s,
        )
        tuned = read_tuned(str(self._file), board.identity(), _GUARDS)
        self._seen_number = max((event.number for event in self._record.recent), default=0)
        self._alive_s = 0.0
        self._runner = Runner(parts, tuned)
        self._runner.go_on()

    def _lived(self) -> None:
        """Let the daemon turn once and wait for its next turn."""
        report, world, runner = self._report, self._world, self._runner
        assert runner is not None
        try:
            began_s, before_s = time.perf_counter(), world.clock.now()
            with world.descriptors("daemon"):
                runner.turn()
            report.slowest_s = max(report.slowest_s, time.perf_counter() - began_s)
            report.turns += 1
            self._noted()
            runner._wait()
            self._alive_s += world.clock.now() - before_s
            report.controlled_s += world.clock.now() - before_s
        except Killed:
            world.fatal = None

    def _noted(self) -> None:
        """Take in what the daemon shows, as a user with an eye on it does."""
        status, now_s = self._desk.status, self._world.clock.now()
        self._report.phases[status.phase] += 1
        self._told_since()
        if status.phase != "yielded":
            self._yielded_s = None
            return
        self._yielded_s = now_s if self._yielded_s is None else self._yielded_s
        until_s = now_s + AFTER_S
        self._report.yielded.update(range(int(self._yielded_s // 60), int(until_s // 60) + 1))
        if now_s - self._yielded_s >= RECLAIM_S:
            self._desk.hand_in(Take())
            self._report.reclaims += 1
            self._yielded_s = None

    def _told_since(self) -> None:
        for event in self._desk.events(self._seen_number):
            if self._told.setdefault(event.number, event.words) != event.words:
                self._twice.append(event.number)
                self._told[event.number] = event.words
            self._report.told[event.kind] += 1
            self._seen_number = event.number
        for old in [number for number in self._told if number <= self._seen_number - EVENTS_MOST]:
            del self._told[old]

    def _died(self) -> None:
        """Leave everything as it is; note what is gone with it."""
        world, report = self._world, self._report
        world.starved = "" if world.starved == "daemon" else world.starved
        self._told_since()
        counted = self._accounts.requests or 0
        report.between += self._eyes.seen - counted
        self._runner = None
        with world.disk.sound():
            world.leave_state()
        requests, seconds, _ = self._on_disk()
        top = self._top_number()
        gone = [number for number in self._told if number > top]
        for number in gone:
            del self._told[number]
        report.lost.append(
            Lost(
                world.clock.now(),
                counted - (requests - self._before[0]),
                self._alive_s - (seconds - self._before[1]),
                len(gone),
                world.clock.now() < self._full_s + _UNDER_WAY_S,
            )
        )
        self._before = requests, seconds

    def _end(self) -> None:
        """End what still goes wrong, let the daemon see it for a minute, and stop it as the service manager does."""
        world, runner = self._world, self._runner
        self._coming.clear()
        last_s = max((until_s for until_s, _ in self._ends), default=0.0)
        world.wait(max(0.0, last_s - world.clock.now()))
        self._ended(math.inf)
        until_s = world.clock.now() + 240
        while world.clock.now() < until_s:
            self._lived()
        assert runner is not None
        runner.stop()
        runner.run()
        self._told_since()
        self._report.between += self._eyes.seen - (self._accounts.requests or 0)
        world.site.catch_up()
        unseen = world.site.round()
        self._report.missed += len(unseen.ended)
        world.minutes.judge(world.clock.now())
        assert world.service is not None
        left = [f"left at the end: {each}" for each in world.service.close()]
        self._report.broken += left + [f"still on record: {each}" for each in standing()]

    def _hour(self) -> None:
        """Judge minutes, and after each hour weigh the process."""
        now_s, report = self._world.clock.now(), self._report
        self._world.minutes.judge(now_s)
        if now_s >= (len(report.resident_bytes) + 1) * 3600:
            gc.collect()
            report.resident_bytes.append(resident_bytes())
            report.objects.append(len(gc.get_objects()))

    # What it comes to

    def _on_disk(self) -> tuple[int, float, float]:
        with self._asking() as database:
            row = database.execute(
                "SELECT coalesce(sum(requests), 0), coalesce(sum(seconds), 0), coalesce(sum(joules), 0) FROM minutes"
            ).fetchone()
        database.close()
        return row

    def _top_number(self) -> int:
        with self._asking() as database:
            (top,) = database.execute("SELECT coalesce(max(number), 0) FROM events").fetchone()
        database.close()
        return int(top)

    def _asking(self) -> sqlite3.Connection:
        return sqlite3.Connection(self._world.state / "daemon.db")

    def _compare(self) -> None:
        report, world = self._report, self._world
        report.written, report.seconds, report.written_j = self._on_disk()
        with self._asking() as database:
            found = dict(database.execute("SELECT number, words FROM events ORDER BY number"))
            check = database.execute("PRAGMA integrity_check").fetchone()[0]
        database.close()
        report.events = max(found, default=0)
        broken = report.broken
        first = min(found, default=1)
        if list(found) != list(range(first, report.events + 1)) or first > max(1, report.events - EVENTS_MOST + 1):
            broken.append(f"events on the disk have gaps: {len(found)} of {first} to {report.events}")
        wrong = [number for number, words in self._told.items() if number >= first and found.get(number) != words]
        if wrong:
            broken.append(f"{len(wrong)} events are not on the disk as they were told, such as number {wrong[0]}")
        if self._twice:
            numbers = ", ".join(map(str, self._twice[:5]))
            broken.append(f"{len(self._twice)} numbers of events were given twice, such as {numbers}")
        if check != "ok":
            broken.append(f"the database is damaged: {check}")
        if world.point != world.default:
            broken.append(f"the board is not as found: {world.point}")
        self._compare_counts()

    def _compare_counts(self) -> None:
        report, broken = self._report, self._report.broken
        counted = report.written + sum(each.requests for each in report.lost)
        unseen, report.ended = report.missed + report.between, self._world.minutes.sent
        if not 0 <= report.ended - counted - unseen <= 8:  # a batch under way at the end
            broken.append(f"{report.ended} requests ended, {counted} were counted and {unseen} could not be")
        for each in report.lost:
            if each.full:
                continue
            if each.seconds > _UNDER_WAY_S or each.events > 8:
                broken.append(f"a kill at {each.at_s:.0f} s lost {each.seconds:.0f} s and {each.events} events")
        if not 0 < report.written_j <= report.true_j * (1 + 1e-9):
            broken.append(f"{report.written_j:.0f} J were counted and {report.true_j:.0f} J drawn")
