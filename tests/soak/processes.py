"""Actuator and daemon as processes on a planted Jetson, under faults; restarted as the service manager would."""

import os
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

import psutil
from actuators import BOARD, GPU, MEM, SERVE, until

from polythrottle.actuation.client.connection import Line
from polythrottle.catalog.tuned_profiles import write_profile
from polythrottle.daemon.client import Client
from polythrottle.daemon.status import Status
from polythrottle.domain.errors import DeviceError, PolythrottleError
from polythrottle.domain.ladder import Ladder, PointPerformance, Rung
from polythrottle.domain.measurement import Latency, Measurement
from polythrottle.domain.profile import Profile
from polythrottle.domain.space import OperatingPoint
from polythrottle.testing import FakeKernel, Fault, plant

SLO_S = 0.1
_ACTUATOR_S, _DAEMON_S = 1.0, 2.0
"""RestartSec of the two units."""
_TMPFS_BYTES = 4 << 20
_HAND_S = 0.05


class Sender:
    """Writes the log of a server to which requests come, few and many in turns, until it is closed.

    Args:
        file: The log.
    """

    def __init__(self, file: Path) -> None:
        self.sent = 0
        self._file, self._over = file, threading.Event()
        self._file.touch()
        self._thread = threading.Thread(target=self._send)
        self._thread.start()

    def _send(self) -> None:
        began_s = time.monotonic()
        with self._file.open("a", encoding="ascii") as out:
            while not self._over.wait(_HAND_S):
                count = 4 if (time.monotonic() - began_s) % 12 > 6 else 1
                for _ in range(count):
                    out.write(f"{time.time():.3f} 0.040 ok\n")
                out.flush()
                self.sent += count

    def close(self) -> None:
        """End."""
        self._over.set()
        self._thread.join()


class House:
    """A board, its actuator and its daemon.

    Args:
        folder: For all of it; ``folder/state`` is the state folder of both.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.root = folder, plant(BOARD, folder / "b")
        self.kernel = FakeKernel(self.root)
        self.found = self.kernel.snapshot()
        self.state, self.socket, self.api = folder / "state", folder / "s" / "a.sock", folder / "s" / "d.sock"
        self.state.mkdir(exist_ok=True)
        self.actuator: subprocess.Popen[bytes] | None = None
        self.daemon: subprocess.Popen[bytes] | None = None
        self.starts: Counter[str] = Counter()
        self.weighed: dict[str, list[int]] = {"actuator": [], "daemon": []}
        self.ended: list[str] = []
        self.starved = 0
        self._environment = {**os.environ, "POLYTHROTTLE_STATE_DIR": str(self.state)}

    def start_actuator(self) -> None:
        """Start it and wait until it answers."""
        self.starts["actuator"] += 1
        words = ["--socket", str(self.socket), "--device", f"jetson?root={self.root}"]
        self.actuator = self._begun("actuator", [sys.executable, "-c", SERVE, str(self.root), *words])
        until(lambda: self.actuator is None or self.actuator.poll() is not None or _answers(self.socket))

    def start_daemon(self) -> None:
        """Start it; it may take a while until it answers."""
        self.starts["daemon"] += 1
        profile = self.folder / "orin.toml"
        if not profile.exists():
            self._write_profile(profile)
        words = ["--profile", str(profile), "--traffic", f"log:{self.folder / 'log'}", "--actuator", str(self.socket)]
        command = [sys.executable, "-m", "polythrottle", "daemon", "run", *words, "--socket", str(self.api)]
        self.daemon = self._begun("daemon", command)

    def _begun(self, name: str, command: list[str]) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(command, stderr=log, stdout=log, cwd=self.folder, env=self._environment)

    def _write_profile(self, file: Path) -> None:
        line = Line(self.socket)
        told = line.ask("describe", device="")
        line.close()
        levels = {each["name"]: each["levels"] for each in told["knobs"]}
        points = [OperatingPoint({GPU: levels[GPU][number], MEM: levels[MEM][number]}) for number in (1, 2, -1)]
        rungs = tuple(_rung(point, rate) for point, rate in zip(points, (25.0, 50.0, 200.0), strict=True))
        seen = Measurement(Latency(0.04, p99_s=0.05), 0.1, 100.0, 10.0)
        identity = told["identity"]
        slo = (f"p99<={SLO_S * 1e3:g}ms",)
        write_profile(
            Profile("jetson", "model.onnx", points[-1], seen, None, slo, {}, identity, (), Ladder(SLO_S, rungs)), file
        )

    @property
    def status(self) -> Status | None:
        """What the daemon shows; None if it does not answer."""
        try:
            with Client(self.api) as client:
                return client.status()
        except PolythrottleError:
            return None

    def settled(self, patience_s: float = 60.0) -> Status:
        """Wait until the daemon follows the load with a lease, and return its status.

        Where a board that refused has made it give way it is told to take the board again, as somebody would.
        """

        def follows() -> Status | None:
            self.revive()
            seen = self.status
            if seen is not None and seen.phase == "yielded":
                self._reclaim()
            good = seen is not None and seen.leased and seen.phase == "following" and bool(seen.point)
            return seen if good else None

        found: Status = until(follows, patience_s)
        return found

    def _reclaim(self) -> None:
        self.starts["reclaimed"] += 1
        with suppress(PolythrottleError), Client(self.api) as client:
            client.take()

    def revive(self) -> None:
        """Start again what has ended by itself, and note that it has."""
        for name, process, start in (
            ("actuator", self.actuator, self.start_actuator),
            ("daemon", self.daemon, self.start_daemon),
        ):
            if process is not None and (code := process.poll()) is not None:
                self.ended.append(f"the {name} ended by itself with {code}")
                start()

    def weigh(self) -> None:
        """Note how much memory both have in use."""
        for name, process in (("actuator", self.actuator), ("daemon", self.daemon)):
            if process is not None and process.poll() is None:
                self.weighed[name].append(psutil.Process(process.pid).memory_info().rss)

    def events(self) -> dict[int, str]:
        """Return the events on the disk."""
        database = sqlite3.connect(self.state / "daemon.db")
        found = dict(database.execute("SELECT number, kind || ': ' || words FROM events ORDER BY number"))
        database.close()
        return found

    @property
    def up(self) -> int:
        """How many of the daemons came so far as to serve their API, before which each has told of its start."""
        return (self.folder / "daemon.log").read_text(encoding="utf-8").count("API      ")

    def requests(self) -> int:
        """Return the requests on the disk."""
        database = sqlite3.connect(self.state / "daemon.db")
        (count,) = database.execute("SELECT coalesce(sum(requests), 0) FROM minutes").fetchone()
        database.close()
        return int(count)

    def end(self) -> tuple[int, int]:
        """End both with SIGTERM, the daemon first, and return their exit codes."""
        codes = []
        for process in (self.daemon, self.actuator):
            assert process is not None
            process.terminate()
            codes.append(process.wait(timeout=60))
        return codes[0], codes[1]

    def left(self) -> list[str]:
        """Return the processes that still have something to do with this board."""
        found = []
        for each in psutil.process_iter(["cmdline", "pid"]):
            words = " ".join(each.info["cmdline"] or ())
            if str(self.folder) in words and each.info["pid"] != os.getpid():
                found.append(words)
        return found

    def close(self) -> None:
        """Kill what a failed test has left running."""
        for process in (self.daemon, self.actuator):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()


class Trouble:
    """Sixty and more things that go wrong, drawn from a seed.

    Args:
        house: Whom they befall.
        seed: Of the draws.
        full: Makes the disk full, and ends that.
    """

    def __init__(self, house: House, seed: int, full: Callable[[bool], None]) -> None:
        self.done: Counter[str] = Counter()
        self._house, self._random, self._full = house, Random(seed), full
        self.kinds: dict[str, Callable[[], None]] = {
            "daemon killed": self._daemon_killed,
            "actuator killed": self._actuator_killed,
            "both killed": self._both_killed,
            "daemon stopped": lambda: self._stopped(house.daemon),
            "actuator stopped": lambda: self._stopped(house.actuator),
            "sensor empty": self._sensor,
            "EIO": self._eio,
            "disk full": self._disk,
            "killed in a write": self._died_writing,
        }

    def next(self) -> None:
        """Let the next thing go wrong, and end it."""
        kinds = list(self.kinds)
        most = max(self.done.values(), default=0)
        rare = [kind for kind in kinds if self.done[kind] < most] or kinds
        kind = self._random.choice(rare)
        self.kinds[kind]()
        self.done[kind] += 1
        self._house.revive()

    def _pause(self, least_s: float = 0.0, most_s: float = 1.0) -> None:
        time.sleep(self._random.uniform(least_s, most_s))

    def _daemon_killed(self) -> None:
        _killed(self._house.daemon)
        time.sleep(_DAEMON_S)
        self._house.start_daemon()
        self._pause(0.0, 3.0)

    def _actuator_killed(self) -> None:
        _killed(self._house.actuator)
        time.sleep(_ACTUATOR_S)
        self._house.start_actuator()
        self._pause()

    def _both_killed(self) -> None:
        pair = [self._house.daemon, self._house.actuator]
        self._random.shuffle(pair)
        for process in pair:
            _killed(process)
        time.sleep(_ACTUATOR_S)
        self._house.start_actuator()
        self._house.start_daemon()
        self._pause(0.0, 3.0)

    def _stopped(self, process: "subprocess.Popen[bytes] | None") -> None:
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        self._pause(0.2, 2.0)
        process.send_signal(signal.SIGCONT)

    def _sensor(self) -> None:
        file = self._random.choice(sorted(self._house.root.glob("sys/devices/**/curr1_input")))
        usual = file.read_bytes()
        file.write_bytes(b"")
        self._pause(0.5, 1.5)
        file.write_bytes(usual)

    def _eio(self) -> None:
        self._house.kernel.fail(Fault("EIO", times=self._random.randint(1, 4), match="*freq*"))
        self._pause(0.5, 1.5)
        self._house.kernel.heal()

    def _disk(self) -> None:
        self._full(True)
        self._pause(0.5, 1.5)
        if self._random.random() < 0.5:
            _killed(self._house.daemon)
            self._house.start_daemon()
            self._house.starved += 1
            self._pause(1.0, 2.0)
        self._full(False)

    def _died_writing(self) -> None:
        """Have the actuator die before or after its next write; the daemon's change of load brings that about."""
        act = self._random.choice(["die_before", "die_after"])
        self._house.kernel.fail(Fault(act, nth=self._random.randint(1, 3)))
        process = self._house.actuator
        assert process is not None
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=7)
        self._house.kernel.heal()
        _killed(process)
        time.sleep(_ACTUATOR_S)
        self._house.start_actuator()


@contextmanager
def disk(house: House) -> Iterator[Callable[[bool], None]]:
    """Yield what makes the disk full and ends that.

    That is a small file system where one may be mounted; elsewhere the daemon alone may write no more to files.
    """
    if os.geteuid() != 0 or not _mounted(house.state):
        yield lambda full: _limited(house.daemon, full)
        return
    filler = house.state / "filler"

    def fill(full: bool) -> None:
        if not full:
            filler.unlink(missing_ok=True)
            return
        with suppress(OSError), filler.open("wb", buffering=0) as out:
            while out.write(b"\0" * 4096):
                pass

    try:
        yield fill
    finally:
        subprocess.run(["umount", "-l", str(house.state)], check=True)


def _mounted(folder: Path) -> bool:
    words = ["mount", "-t", "tmpfs", "-o", f"size={_TMPFS_BYTES}", "soak", str(folder)]
    try:
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _limited(process: "subprocess.Popen[bytes] | None", full: bool) -> None:
    if process is not None and process.poll() is None:
        most = 0 if full else resource.RLIM_INFINITY
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))


def _killed(process: "subprocess.Popen[bytes] | None") -> None:
    if process is not None and process.poll() is None:
        process.kill()
    if process is not None:
        process.wait()


def _rung(point: OperatingPoint, rate_per_s: float) -> Rung:
    interval_s = 1 / rate_per_s / 1.25
    return Rung(
        rate_per_s, PointPerformance(point, 1, interval_s, interval_s, interval_s, 8 * interval_s, 4.0), 0.0, 8.0, 0.05
    )


def _answers(path: Path) -> bool:
    line = Line(path, patience_s=30.0)
    try:
        line.ask("hello")
    except DeviceError:
        return False
    finally:
        line.close()
    return True
