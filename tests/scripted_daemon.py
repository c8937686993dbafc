"""A daemon that follows a script: the routes of the real one over loopback, without a device or a control loop."""

import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from polythrottle.daemon.status import (
    BudgetShown,
    Front,
    GuardShown,
    Happened,
    RungShown,
    SavedShown,
    Status,
    StudyShown,
    WorkloadShown,
)

BEGAN = datetime(2026, 3, 14, 6, 0, tzinfo=timezone.utc)
LADDER = tuple(
    Front(rate, power, p99, {"gpu_max_hz": gpu, "mem_hz": mem, "cpu_online": cores, "batch_size": batch})
    for rate, power, p99, gpu, mem, cores, batch in (
        (8.0, 9.8, 0.0212, 420_750_000, 665_600_000, 4, 1),
        (18.0, 11.3, 0.0227, 522_750_000, 2_133_000_000, 4, 1),
        (34.0, 13.9, 0.0231, 624_750_000, 2_133_000_000, 4, 2),
        (56.0, 17.2, 0.0236, 726_750_000, 2_133_000_000, 4, 2),
        (84.0, 21.9, 0.0239, 828_750_000, 3_199_000_000, 4, 4),
        (118.0, 28.4, 0.0242, 1_032_750_000, 3_199_000_000, 4, 4),
        (150.0, 36.8, 0.0246, 1_300_500_000, 3_199_000_000, 8, 8),
    )
)
EVENTS = (
    Happened(1, "2026-03-14T06:00:00+00:00", "phase", "efficientnet-b4 is up: following its load"),
    Happened(2, "2026-03-14T06:21:07+00:00", "guard", "p99 is 27.1 ms, above 25; the default point is held for 20 s"),
    Happened(3, "2026-03-14T06:21:31+00:00", "phase", "all guards are ok: following the load again"),
    Happened(4, "2026-03-14T07:02:44+00:00", "foreign", "another program has set gpu_max_hz; it is set again"),
)
PROFILES = (
    {
        "name": "sim-jetson-agx-orin/efficientnet-b4",
        "device": "sim:jetson-agx-orin",
        "workload": "efficientnet-b4",
        "slo": ["p99<=25ms"],
        "saving": 0.31,
    },
    {
        "name": "sim-jetson-agx-orin/resnet50",
        "device": "sim:jetson-agx-orin",
        "workload": "resnet50",
        "slo": ["p99<=12ms"],
        "saving": None,
    },
)


def status(turn: int = 4000, **changes: Any) -> Status:
    """Return what a daemon on a simulated Orin shows at a turn, one a second from BEGAN."""
    load = 0.5 + 0.5 * math.sin(turn / 90)
    ripple = math.sin(turn * 12.9898) * 0.5
    rate = 12 + 92 * load + 5 * ripple
    number = next((index for index, rung in enumerate(LADDER) if rung.rate_per_s >= rate * 1.1), len(LADDER) - 1)
    rung = LADDER[number]
    power = rung.power_w * (0.86 + 0.12 * rate / rung.rate_per_s) + 0.4 * ripple
    p99 = rung.p99_s * (0.93 + 0.05 * ripple)
    begun = Status(
        turn=turn,
        at=(BEGAN + timedelta(seconds=turn)).isoformat(),
        since=BEGAN.isoformat(),
        polythrottle="0.1.0",
        device="sim:jetson-agx-orin",
        title="Jetson AGX Orin 64GB (simulated)",
        energy_kind="simulated",
        boundary="simulated: VDD_GPU_SOC + VDD_CPU_CV + VIN_SYS_5V0",
        phase="following",
        reason=f"a load of {rate:.3g}/s ({rung.rate_per_s:.3g}/s can be answered)",
        workload=WorkloadShown(
            *("efficientnet-b4", "efficientnet-b4", "sim:poisson:60/s", ("p99<=25ms",)),
            up=True,
            profile="sim-jetson-agx-orin/efficientnet-b4",
        ),
        point=dict(rung.point),
        gather_s=0.004,
        rung=RungShown(number, len(LADDER), rung.rate_per_s, rung.power_w, rung.p99_s),
        ladder=LADDER,
        leased=True,
        reachable=True,
        rate_per_s=rate,
        demand_per_s=rate * 1.1,
        waiting=int(2 + 2 * ripple),
        p99_s=p99,
        limit_s=0.025,
        mean_s=p99 * 0.61,
        power_w=power,
        peak_w=power + 2.4,
        energy_j=20.3 * turn,
        temperature_c=51 + 6 * load,
        clocks_hz={
            "gpu": int(rung.point["gpu_max_hz"]),
            "mem": int(rung.point["mem_hz"]),
            "cpu": 1_420_800_000,
        },
        throttled=False,
        guards=(
            GuardShown("p99", p99, 0.025),
            GuardShown("errors", 0.0, 0.01),
            GuardShown("power", power, 40.0),
            GuardShown("peak power", power + 2.4, 50.0),
            GuardShown("temperature", 51 + 6 * load, 80.0),
            GuardShown("throttling", 0.0, 0.0),
        ),
        budget=BudgetShown("400 Wh a day", 28.0, 1_036_800.0, 0.41, met=True),
        saved=SavedShown(9.4 * turn, 8.1 * turn, 10.7 * turn, 55 * turn, "simulated energy against the default point"),
        late_s=0.0004,
        late_p99_s=0.0021,
        resident_bytes=31_400_000,
        requests=55 * turn,
        failed=turn // 500,
        told={"phase": 2, "guard": 1, "foreign": 1},
    )
    return replace(begun, **changes)


@dataclass
class Daemon:
    """What the script says, and what was asked of it.

    Args:
        status: Shown now; `show` changes it.
        events: Told so far.
        asked: Method, path and body of every write, oldest first.
        answers: What a write is answered by method and path; status code and document.
        token: Demanded of every route under ``/v1`` if not empty.
        refusal: What every route under ``/v1`` is answered, if anything.
    """

    status: Status = field(default_factory=status)
    events: list[Happened] = field(default_factory=lambda: list(EVENTS))
    asked: list[tuple[str, str, Any]] = field(default_factory=list)
    answers: dict[str, tuple[int, Mapping[str, Any]]] = field(default_factory=dict)
    profiles: list[Mapping[str, Any]] = field(default_factory=lambda: list(PROFILES))
    seconds: list[Mapping[str, Any]] = field(default_factory=list)
    token: str = ""
    refusal: tuple[int, Mapping[str, Any]] | None = None
    page: Callable[[], tuple[bytes, Mapping[str, str]]] | None = None
    gone: bool = False
    news: threading.Condition = field(default_factory=threading.Condition)
    shown: list[Status] = field(default_factory=list)

    def show(self, shown: Status) -> None:
        """Show another status."""
        with self.news:
            self.status = shown
            self.shown.append(shown)
            self.news.notify_all()

    def tell(self, kind: str, words: str) -> None:
        """Tell an event."""
        with self.news:
            self.events.append(Happened(len(self.events) + 1, self.status.at, kind, words))
            self.news.notify_all()

    def leave(self) -> None:
        """Answer nobody any more and drop every stream."""
        with self.news:
            self.gone = True
            self.news.notify_all()

    def come_back(self) -> None:
        """Answer again."""
        self.gone = False

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Mapping[str, Any]]:
        """Return the answer to a write; what is not scripted does what its words say, simply."""
        self.asked.append((method, path, body))
        scripted = self.answers.get(f"{method} {path}")
        return scripted or (200, {"words": getattr(self, f"_{method.lower()}_{path.split('/')[2]}")(body)})

    def _post_studies(self, body: Any) -> str:
        study = StudyShown("s1", "running", 0, body.get("trials", 30))
        self.show(replace(self.status, phase="studying", study=study))
        return "a study begins"

    def _delete_studies(self, _: Any) -> str:
        assert self.status.study is not None
        self.show(replace(self.status, phase="following", study=replace(self.status.study, state="stopped")))
        return "the study ends; its journal keeps what it knows"

    def _post_apply(self, body: Any) -> str:
        self.show(replace(self.status, unconfirmed=body["profile"], confirm_left_s=body.get("within_s", 60.0)))
        return f"{body['profile']} is followed"

    def _post_confirm(self, _: Any) -> str:
        self.show(replace(self.status, unconfirmed="", confirm_left_s=None))
        return "kept"

    def _post_release(self, _: Any) -> str:
        self.show(replace(self.status, phase="yielded", leased=False, point={}, rung=None))
        return "the board is as it was found"

    def _post_take(self, _: Any) -> str:
        self.show(status(self.status.turn))
        return "following the load"

    def _put_budget(self, _: Any) -> str:
        return "the budget is taken"

    def read(self, path: str) -> tuple[int, Any]:
        """Return the answer to a GET of a document."""
        found = {
            "/v1/status": lambda: self.status.document,
            "/v1/profiles": lambda: {"profiles": self.profiles},
            "/v1/seconds": lambda: {"seconds": self.seconds},
            "/v1/events": lambda: {"events": [vars(each) for each in self.events]},
        }.get(path)
        return (404, {"error": {"kind": "unknown", "words": f"no {path}"}}) if found is None else (200, found())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    script: Daemon

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if self.script.gone:
            self.close_connection = True
        elif path == "/" and self.script.page is not None:
            body, headers = self.script.page()
            self._send(200, body, headers)
        elif self._refused():
            return
        elif path == "/v1/events" and "event-stream" in self.headers.get("Accept", ""):
            asked = dict(part.split("=") for part in query.split("&") if part).get("after", "0")
            self._stream(int(self.headers.get("Last-Event-ID", asked)))
        else:
            self._document(*self.script.read(path))

    def _write(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.script.gone:
            self.close_connection = True
        elif not self._refused():
            if self.headers.get("Content-Type") != "application/json" and body:
                self._document(415, {"error": {"kind": "invalid", "words": "send application/json"}})
            else:
                self._document(*self.script.answer(self.command, self.path, json.loads(body) if body else None))

    do_POST = do_PUT = do_DELETE = _write  # noqa: N815

    def _refused(self) -> bool:
        if self.script.refusal is not None:
            self._document(*self.script.refusal)
            return True
        if not self.script.token or self.headers.get("Authorization") == f"Bearer {self.script.token}":
            return False
        self._document(401, {"error": {"kind": "permission", "words": "a token is needed"}})
        return True

    def _document(self, code: int, document: Any) -> None:
        self._send(code, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _send(self, code: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, after: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.close_connection = True
        sent, new = len(self.script.shown), [self.script.status]
        with suppress(OSError):
            while not self.script.gone:
                fresh = [each for each in self.script.events if each.number > after]
                for each in fresh:
                    after = each.number
                    self._chunk(f"id: {after}\nevent: event\ndata: {json.dumps(vars(each))}\n\n")
                for each in new:
                    self._chunk(f"event: status\ndata: {json.dumps(each.document)}\n\n")
                with self.script.news:
                    new, sent = self.script.shown[sent:], len(self.script.shown)
                    if not (new or fresh):
                        self.script.news.wait(timeout=0.5)

    def _chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def log_message(self, *_: object) -> None: ...


@contextmanager
def serving(script: Daemon) -> Iterator[str]:
    """Serve a script on a free loopback port, and give its address."""
    handler = type("Handler", (_Handler,), {"script": script})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        script.leave()
        server.shutdown()
        thread.join()
        server.server_close()
