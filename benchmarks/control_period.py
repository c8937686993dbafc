"""Whether those who ask the daemon delay its control loop: fifty clients, a slow reader, and one that never reads.

A control loop with a period of 50 ms and the API in its other thread run in this process, as they do in the daemon; the
clients are other processes. Each turn publishes a status as large as a real one. Lateness is from when a turn was due
to when it began. Usage: python benchmarks/control_period.py [SECONDS]
"""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from polythrottle.daemon.loop.mailbox import Mailbox
from polythrottle.daemon.status import Front, Happened, Status, WorkloadShown
from polythrottle.daemon.web import WebOptions, serve

PERIOD_S, CLIENTS, EACH_PER_S, PROCESSES = 0.05, 50, 5.0, 5
BAR_S = 0.020

ASKING = """
import http.client, socket, sys, threading, time
def ask(path, per_s, ends_s, first_s):
    time.sleep(first_s)
    done = 0
    while time.time() < ends_s:
        begun_s = time.time()
        line = http.client.HTTPConnection("localhost")
        line.sock = socket.socket(socket.AF_UNIX)
        line.sock.connect(path)
        line.request("GET", "/v1/status")
        answer = line.getresponse()
        answer.read()
        assert answer.status == 200, answer.status
        line.close()
        done += 1
        time.sleep(max(0.0, 1 / per_s - (time.time() - begun_s)))
    counts.append(done)
path, count, per_s, ends_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
counts = []
asking = [threading.Thread(target=ask, args=(path, per_s, ends_s, i / count / per_s)) for i in range(count)]
[each.start() for each in asking]
[each.join() for each in asking]
print(sum(counts))
"""


def status() -> Status:
    """Return a status with all a real one holds."""
    point = {"gpu_max_hz": 1_300_500_000, "mem_hz": 3_199_000_000, "cpu_max_hz": 2_201_600_000, "batch_size": 8}
    return Status(
        turn=1,
        device="sim:jetson-agx-orin",
        phase="following",
        workload=WorkloadShown("resnet50", "resnet50", "sim:poisson:30/s", ("p99<=25ms",), True),
        point=point,
        ladder=tuple(Front(10.0 * i, 10.0 + i, 0.02, point) for i in range(16)),
    )


def follower(path: Path) -> socket.socket:
    """Return a connection that follows and is never read."""
    line = socket.socket(socket.AF_UNIX)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    line.connect(str(path))
    line.sendall(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\nAccept: text/event-stream\r\n\r\n")
    line.setblocking(False)
    return line


def control(desk: Mailbox, seconds: float, slow: socket.socket | None) -> list[float]:
    """Turn as the daemon does, and return how late each turn began."""
    late, now, first = [], status(), time.perf_counter() + PERIOD_S
    for turn in range(int(seconds / PERIOD_S)):
        due = first + turn * PERIOD_S
        time.sleep(max(0.0, due - time.perf_counter()))
        late.append(time.perf_counter() - due)
        now = replace(now, turn=turn + 1, power_w=20 + turn % 7)
        desk.tell([Happened(turn + 1, "", "phase", "something happened")])
        desk.publish(now)
        if slow is not None and turn % 20 == 0:  # the slow reader takes 512 bytes a second
            with contextlib.suppress(BlockingIOError):
                slow.recv(512)
    return sorted(late)


def measured(seconds: float, load: bool) -> tuple[list[float], int]:
    """Return latenesses, and how many requests were answered."""
    with tempfile.TemporaryDirectory() as folder:
        path, desk = Path(folder) / "d.sock", Mailbox(status())
        with serve(desk, WebOptions(path)):
            lines = [follower(path) for _ in range(2)] if load else []
            words = [str(path), str(CLIENTS // PROCESSES), str(EACH_PER_S), str(time.time() + seconds)]
            command = [sys.executable, "-c", ASKING, *words]
            asking = [
                subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(PROCESSES if load else 0)
            ]
            late = control(desk, seconds, lines[0] if lines else None)
            answered = sum(int(each.communicate()[0] or 0) for each in asking)
            for line in lines:
                line.close()
    return late, answered


def main() -> None:
    """Measure with and without clients, and print."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    print(
        f"period {PERIOD_S * 1e3:.0f} ms, {seconds:.0f} s each, {os.cpu_count()} processors, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    for load in (False, True):
        begun_s = time.process_time()
        late, answered = measured(seconds, load)
        share = (time.process_time() - begun_s) / seconds
        who = f"{CLIENTS} clients ({answered} answers), a slow and a mute follower" if load else "nobody asks"
        points = " ".join(
            f"{name} {late[int(q * (len(late) - 1))] * 1e3:.2f}"
            for name, q in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
        )
        held = "within" if late[int(0.99 * (len(late) - 1))] < BAR_S else "BEYOND"
        print(f"{who}: late by ms {points}; p99 {held} {BAR_S * 1e3:.0f} ms; {share:.1%} of a core")


if __name__ == "__main__":
    main()
