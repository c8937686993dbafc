import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from polythrottle.daemon.control.events import Target
from polythrottle.daemon.observation import RequestStats, Traffic
from polythrottle.daemon.traffic.engines import TRITON, VLLM, named
from polythrottle.daemon.traffic.local_sources import LoggedTraffic, ProcessTraffic, ReportedTraffic
from polythrottle.daemon.traffic.server_metrics import (
    Counts,
    Fetcher,
    ScrapedTraffic,
    counts_of,
    quantile,
)
from polythrottle.daemon.traffic.sources import TritonBatcher, open_traffic
from polythrottle.domain.errors import InvalidInput, PolythrottleError
from polythrottle.domain.space import OperatingPoint


class _Server:
    """A small HTTP server whose answer a test sets; remembers what was sent to it."""

    def __init__(self) -> None:
        self.answer: Callable[[str, Any], tuple[int, bytes]] = lambda path, body: (200, b"")
        self.sent: list[tuple[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply(None)

            def do_POST(self) -> None:
                self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _reply(self, body: Any) -> None:
                outer.sent.append((self.path, body))
                status, data = outer.answer(self.path, body)
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Stay silent."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def says(self, data: bytes | str, status: int = 200) -> None:
        """Answer everything with this."""
        text = data.encode() if isinstance(data, str) else data
        self.answer = lambda path, body: (status, text)

    def close(self) -> None:
        """Stop listening."""
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def server() -> Iterator[_Server]:
    """A small HTTP server."""
    found = _Server()
    yield found
    with contextlib.suppress(OSError):
        found.close()


def _scraped(server: _Server, *names: Any) -> ScrapedTraffic:
    fetcher = Fetcher(urlsplit(f"http://127.0.0.1:{server.port}/metrics"), timeout_s=60.0)
    traffic = ScrapedTraffic(fetcher, names or (TRITON, VLLM), "", "metrics:test")
    traffic.patience_s = 60.0
    return traffic


def _vllm(latencies_s: list[float], waiting: int = 0) -> str:
    """Return metrics as vLLM writes them, by Prometheus' own library."""
    registry = CollectorRegistry()
    labels = {"model_name": "m"}
    done = Counter("vllm:request_success", "x", ["model_name", "finished_reason"], registry=registry)
    took = Histogram(
        "vllm:e2e_request_latency_seconds", "x", ["model_name"], buckets=(0.1, 0.2, 0.5, 1.0), registry=registry
    )
    Gauge("vllm:num_requests_waiting", "x", ["model_name"], registry=registry).labels(**labels).set(waiting)
    Gauge("vllm:num_requests_running", "x", ["model_name"], registry=registry).labels(**labels).set(0)
    for latency_s in latencies_s:
        done.labels(finished_reason="stop", **labels).inc()
        took.labels(**labels).observe(latency_s)
    return generate_latest(registry).decode()


_TRITON = """# HELP nv_inference_request_success Number of successful inference requests
# TYPE nv_inference_request_success counter
nv_inference_request_success{{model="m",version="1"}} {good}
nv_inference_request_failure{{model="m",reason="OTHER",version="1"}} {bad}
nv_inference_request_success{{model="other",version="1"}} 1000000
nv_inference_pending_request_count{{model="m",version="1"}} {pending}
nv_inference_request_duration_us{{model="m",version="1"}} {us}
nv_inference_request_summary_us{{model="m",version="1",quantile="0.99"}} {p99}
nv_gpu_utilization{{gpu_uuid="GPU-1"}} 0.3
"""


def test_reports_are_folded_and_none_for_long_means_down() -> None:
    """Counts of several reports are added, the slowest counts; after five seconds without one the workload is down."""
    traffic = ReportedTraffic()
    assert traffic.look(0.0) is None
    traffic.report(RequestStats(3, 2, 0, 5, 0.1, 0.05, "a", 0.08), 1.0)
    traffic.report(RequestStats(4, 4, 1, 1, 0.09, 0.06, "", 0.2), 1.5)
    assert traffic.look(2.0) == RequestStats(7, 6, 1, 1, 0.1, 0.06, "a", 0.2)
    quiet = traffic.look(6.0)
    assert quiet is not None
    assert (quiet.arrived, quiet.waiting, quiet.p99_s, quiet.worst_s) == (0, 1, 0.1, None)
    assert traffic.look(6.6) is None
    traffic.report(RequestStats(1), 100.0)
    assert traffic.look(100.0) is not None


def test_a_report_every_other_turn_is_no_rate_that_jumps() -> None:
    """Ten requests in the two seconds since the report before are five a second; none is lost or counted twice."""
    traffic, counted = ReportedTraffic(), []
    for turn in range(1, 9):
        if turn % 2:
            traffic.report(RequestStats(10, 10), float(turn))
        seen = traffic.look(float(turn))
        assert seen is not None
        counted.append(seen.arrived)
    assert counted == [10, 0, 5, 5, 5, 5, 5, 5]
    assert [(traffic.look(at_s) or RequestStats(-1)).arrived for at_s in (8.5, 11.5, 12.5)] == [None, 0, -1]


def test_a_process_is_up_while_it_runs_and_nothing_else_is_known() -> None:
    """A program is found by its name, is gone when it ends, and its rate is unknown, not 0."""
    name = f"poly{os.getpid()}"[:15]
    script = Path(name)
    script.write_text("import sys; print(flush=True); sys.stdin.read()")
    traffic = ProcessTraffic(name)
    assert traffic.look(0.0) is None
    words = [sys.executable, str(script)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert traffic.look(1.0) is None, "all processes are gone through every five seconds only"
        seen = traffic.look(6.0)
        assert seen is not None
        assert (seen.arrived, seen.p99_s, seen.waiting) == (None, None, None)
        process.kill()
        process.wait()
    assert traffic.look(7.0) is None


def test_a_pid_file_names_a_process_and_not_a_later_one_of_its_number(tmp_path: Path) -> None:
    """The number must run and be the process it was; a file that is no number means down."""
    proc, pid_file = tmp_path / "proc", tmp_path / "server.pid"
    (proc / "42").mkdir(parents=True)

    def born(ticks: int, state: str = "S") -> None:
        (proc / "42" / "stat").write_text(f"42 (a) b) {state} {' '.join(['0'] * 18)} {ticks} 0\n")

    born(7)
    traffic = ProcessTraffic(str(pid_file), proc)
    assert traffic.look(0.0) is None
    pid_file.write_text("42\n")
    assert traffic.look(5.0) is not None
    born(8)
    pid_file.write_text("no number")
    assert traffic.look(6.0) is None
    assert traffic.look(20.0) is None
    pid_file.write_text("42")
    assert traffic.look(30.0) is not None
    born(8, "Z")
    assert traffic.look(31.0) is None


def _logged(path: Path) -> LoggedTraffic:
    traffic = LoggedTraffic(path)
    traffic.look(0.0)
    return traffic


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_a_log_is_followed_from_its_end(tmp_path: Path) -> None:
    """What was there before is past; each new line is a request, the third word says whether it failed."""
    path = tmp_path / "requests.log"
    path.write_text("1 99\n")
    traffic = _logged(path)
    _append(path, "2.0 0.1\n3.0 0.2 ok\n4 0.3 error\n5 0.4 200\n6 0.5 503\n# a comment\n")
    seen = traffic.look(1.0)
    assert seen is not None
    assert (seen.arrived, seen.answered, seen.failed, seen.worst_s) == (5, 5, 2, 0.5)
    assert seen.mean_s == pytest.approx(0.3)
    assert seen.p99_s is None
    _append(path, "7 0.1\n" * 30)
    assert (traffic.look(2.0) or RequestStats()).p99_s == 0.5
    assert (traffic.look(61.5) or RequestStats()).p99_s == 0.1
    assert traffic.look(700.0) is None
    traffic.close()


def test_a_torn_line_waits_for_its_rest(tmp_path: Path) -> None:
    """A line counts once it is whole, whatever pieces it came in."""
    path = tmp_path / "requests.log"
    path.touch()
    traffic = _logged(path)
    arrived = []
    for piece in ("1.0 0.", "25", "\n2.0 0.5", "\n"):
        _append(path, piece)
        arrived.append((traffic.look(1.0) or RequestStats()).arrived)
    assert arrived == [0, 0, 1, 1]
    assert traffic.note == ""


def test_a_rotated_or_cut_log_loses_no_request(tmp_path: Path) -> None:
    """Neither what was written last to the old file nor what comes first in the new one is lost; no gap means down."""
    path = tmp_path / "requests.log"
    path.touch()
    traffic = _logged(path)
    _append(path, "1 0.1\n2 0.2")
    path.rename(tmp_path / "requests.log.1")
    first = traffic.look(1.0)
    assert first is not None
    assert first.arrived == 2
    path.write_text("3 0.3\n4 0.4\n")
    assert (traffic.look(2.0) or RequestStats()).arrived == 2
    shutil.copy(path, tmp_path / "requests.log.2")
    os.truncate(path, 0)
    _append(path, "5 0.5\n")
    assert (traffic.look(3.0) or RequestStats()).arrived == 1
    path.unlink()
    assert traffic.look(4.0) is not None
    assert traffic.look(9.5) is None
    assert "cannot be read" in traffic.note


def test_a_deleted_log_is_unknown_not_a_load_that_falls(tmp_path: Path) -> None:
    """What is still written to it is read on; what cannot be read is unknown, and after five seconds it is down."""
    path = tmp_path / "requests.log"
    path.touch()
    traffic = _logged(path)
    with path.open("a") as writer:
        writer.write("1 0.1\n2 0.1\n")
        writer.flush()
        assert (traffic.look(1.0) or RequestStats()).arrived == 2
        path.unlink()
        writer.write("3 0.1\n")
        writer.flush()
        assert (traffic.look(2.0) or RequestStats()).arrived == 1
    seen = traffic.look(3.0)
    assert seen is not None
    assert (seen.arrived, seen.answered, seen.failed, seen.worst_s) == (None, None, None, None)
    assert "unknown" in traffic.note
    path.write_text("4 0.1\n5 0.1\n")
    assert (traffic.look(4.0) or RequestStats()).arrived == 2
    assert traffic.note == ""
    path.unlink()
    assert (traffic.look(5.0) or RequestStats()).arrived is None
    assert traffic.look(9.5) is None
    traffic.close()


@given(st.binary(max_size=300))
def test_no_garbage_in_a_log_is_more_than_a_note(garbage: bytes) -> None:
    """Whatever is written into the file, the next good line counts."""
    path = Path("garbage.log")
    path.write_bytes(b"")
    traffic = _logged(path)
    with path.open("ab") as file:
        file.write(garbage + b"\n1 0.125 ok\n")
    seen = traffic.look(1.0)
    traffic.close()
    assert seen is not None
    assert (seen.arrived or 0) >= 1
    assert (seen.worst_s or 0) >= 0.125


def test_a_log_that_grows_too_fast_is_read_in_part(tmp_path: Path) -> None:
    """More than a mebibyte between two looks is left out, with a note, and nothing is counted from half a line."""
    path = tmp_path / "requests.log"
    path.touch()
    traffic = _logged(path)
    _append(path, "1000.25 0.125\n" * 200_000)
    seen = traffic.look(1.0)
    assert seen is not None
    assert 0 < (seen.arrived or 0) < 200_000
    assert seen.worst_s == seen.mean_s == 0.125
    assert "left out" in traffic.note


def test_triton_s_counters_become_requests() -> None:
    """Success and failure are answers; arrivals are those and the growth of what is pending; no other model counts."""
    before = counts_of(_TRITON.format(good=100, bad=1, pending=2, us=1e6, p99=9e4), [TRITON], "m")
    now = counts_of(_TRITON.format(good=110, bad=3, pending=5, us=3e6, p99=8e4), [TRITON], "m")
    assert (now.answered - before.answered, now.failed, now.waiting) == (12, 3, 5)
    assert now.arrived - before.arrived == 15
    assert (now.p99_s, now.sum_s) == (pytest.approx(0.08), pytest.approx(3.0))
    assert counts_of(_TRITON.format(good=1, bad=0, pending=0, us=0, p99="NaN"), [TRITON], "m").p99_s is None


@pytest.mark.parametrize("absurd", ["1e300", "-1e300", "+Inf", "NaN"])
def test_what_no_server_can_have_counted_is_not_counted(absurd: str) -> None:
    """A figure above 2^53, and one that is no number, is left out; it would not fit into the daemon's history."""
    counts = counts_of(_TRITON.format(good=absurd, bad=1, pending=absurd, us=absurd, p99=absurd), [TRITON], "m")
    assert (counts.answered, counts.failed, counts.waiting, counts.sum_s, counts.p99_s) == (1, 1, None, None, None)


def test_vllm_s_histogram_gives_the_p99_of_the_last_minute(server: _Server) -> None:
    """Differences between two looks count, in the bucket where 99 % are reached."""
    traffic, past = _scraped(server), [0.9] * 50
    server.says(_vllm(past))
    first = traffic.look(0.0)
    assert first is not None
    assert (first.arrived, first.p99_s) == (0, None)
    server.says(_vllm([*past, *[0.15] * 99, 0.45], waiting=4))
    seen = traffic.look(1.0)
    assert seen is not None
    assert (seen.arrived, seen.answered, seen.waiting, seen.failed) == (104, 100, 4, None)
    assert seen.p99_s == pytest.approx(0.2)
    assert seen.mean_s == pytest.approx((99 * 0.15 + 0.45) / 100)
    server.says(_vllm([*past, *[0.15] * 99, 0.45, *[0.05] * 100]))
    later = traffic.look(70.0)
    assert later is not None
    assert later.p99_s == pytest.approx(0.099, rel=0.02)
    traffic.close()


def test_beyond_the_top_bucket_the_p99_is_unknown(server: _Server) -> None:
    """Nobody knows how long the slowest took, and that is said."""
    traffic = _scraped(server)
    server.says(_vllm([0.1]))
    traffic.look(0.0)
    server.says(_vllm([0.1, *[5.0] * 100]))
    seen = traffic.look(1.0)
    assert seen is not None
    assert seen.p99_s is None
    assert "top bucket, 1 s" in traffic.note
    traffic.close()


def test_a_server_that_begins_anew_loses_its_past_and_no_sign(server: _Server) -> None:
    """Counters that go backwards begin a new minute; nothing negative is ever counted."""
    traffic = _scraped(server)
    server.says(_vllm([0.15] * 500))
    traffic.look(0.0)
    server.says(_vllm([0.15] * 10))
    again = traffic.look(1.0)
    assert again is not None
    assert (again.arrived, again.answered, again.p99_s) == (0, 0, None)
    server.says(_vllm([0.15] * 40))
    after = traffic.look(2.0)
    assert after is not None
    assert (after.arrived, after.answered) == (30, 30)
    traffic.close()


def test_any_histogram_will_do(server: _Server) -> None:
    """Its unit is that of its name, and a gauge may tell what waits."""
    buckets = 'took_ms_bucket{{le="10"}} {0}\ntook_ms_bucket{{le="+Inf"}} {0}\n'
    text = f"{buckets}took_ms_sum {{1}}\ntook_ms_count {{0}}\nqueue 3\n"
    traffic = _scraped(server, named("took_ms", "queue"))
    server.says(text.format(0, 0))
    traffic.look(0.0)
    server.says(text.format(50, 250))
    seen = traffic.look(1.0)
    assert seen is not None
    assert (seen.arrived, seen.waiting) == (50, 3)
    assert (seen.p99_s, seen.mean_s) == (pytest.approx(0.0099), pytest.approx(0.005))
    traffic.close()


@pytest.mark.parametrize(
    ("status", "text", "says"),
    [
        (200, "", "none of nv_inference"),
        (200, "<html>hello</html>", "none of nv_inference"),
        (200, "nv_inference_request_success{model=\n", "no text of Prometheus"),
        (200, 'nv_inference_request_success{model="m"} many\n', "no text of Prometheus"),
        (200, b"\xff\xfe\x00" * 1000, "none of nv_inference"),
        (503, "busy", "answers 503"),
    ],
)
def test_a_bad_page_is_a_note_and_five_seconds_of_it_is_down(
    server: _Server, status: int, text: str | bytes, says: str
) -> None:
    """What was known is kept for a moment, then the workload is taken to be down; when it is well again it is up."""
    traffic = _scraped(server)
    server.says(_vllm([0.1] * 3, waiting=2))
    assert traffic.look(0.0) is not None
    server.says(text, status)
    kept = traffic.look(1.0)
    assert kept is not None
    assert (kept.arrived, kept.answered, kept.waiting) == (None, None, 2), "unknown is not zero"
    assert says in traffic.note
    server.says(_vllm([0.1] * 9))
    after = traffic.look(4.0)
    assert after is not None
    assert (after.arrived, after.answered) == (None, 6), "six in three seconds are not six in the last"
    server.says(text, status)
    assert traffic.look(5.0) is not None
    assert traffic.look(9.5) is None
    server.says(_vllm([0.1] * 3))
    assert traffic.look(10.0) is not None
    assert traffic.note == ""
    traffic.close()


def test_a_server_that_is_not_there_is_down(server: _Server) -> None:
    """A refused connection is a note."""
    traffic = _scraped(server)
    server.close()
    assert traffic.look(0.0) is None
    assert "does not answer" in traffic.note
    traffic.close()


def test_a_slow_server_holds_nobody_up(server: _Server) -> None:
    """A look returns while the server still thinks, and the answer counts when it comes."""
    let_go = threading.Event()
    page = _vllm([0.1]).encode()

    def slow(path: str, body: Any) -> tuple[int, bytes]:
        let_go.wait(30.0)
        return 200, page

    server.answer = slow
    traffic = _scraped(server)
    traffic.patience_s = 0.01
    assert traffic.look(0.0) is None
    let_go.set()
    traffic.patience_s = 10.0
    assert traffic.look(1.0) is not None
    traffic.close()


def test_a_huge_page_is_not_read_to_its_end(server: _Server) -> None:
    """Beyond the limit the page is refused, with a note."""
    server.says(b"x" * 100_000)
    fetcher = Fetcher(urlsplit(f"http://127.0.0.1:{server.port}/"), timeout_s=5.0, most_bytes=1000)
    page = fetcher.page(5.0)
    assert page.text is None
    assert "longer than" in page.why
    fetcher.close()


def test_looks_that_follow_at_once_do_not_ask_the_server_again(server: _Server) -> None:
    """Ten looks in a second are two requests to the server."""
    server.says(_vllm([0.1]))
    traffic = _scraped(server)
    for tenth in range(10):
        traffic.look(tenth / 10)
    assert len(server.sent) == 2
    traffic.close()


@given(st.lists(st.floats(0.001, 2.0), min_size=20, max_size=200))
def test_the_quantile_lies_in_the_bucket_of_the_true_one(latencies_s: list[float]) -> None:
    """Interpolating errs by no more than the bucket is wide."""
    ends = (0.01, 0.05, 0.1, 0.5, 1.0, 2.0)
    buckets = tuple((end, float(sum(each <= end for each in latencies_s))) for end in ends)
    found = quantile(Counts(0.0), Counts(float(len(latencies_s)), buckets=buckets))
    true_s = sorted(latencies_s)[-(-99 * len(latencies_s) // 100) - 1]
    index = next(number for number, end in enumerate(ends) if true_s <= end)
    assert found.value_s is not None
    assert (0.0, *ends)[index] <= found.value_s <= ends[index]


def _triton_server(server: _Server, most: int = 8) -> dict[str, Any]:
    config = {"name": "m", "max_batch_size": most, "dynamic_batching": {"priority_levels": 1}}

    def answer(path: str, body: Any) -> tuple[int, bytes]:
        return (200, json.dumps(config).encode()) if path.endswith("/config") else (200, b"{}")

    server.answer = answer
    return config


def _batching(server: _Server) -> TritonBatcher:
    return TritonBatcher(ReportedTraffic(), "127.0.0.1", server.port, "m", every_s=60.0)


def _settled(batching: TritonBatcher) -> None:
    while batching._work is not None and batching._work.is_alive():
        time.sleep(0.001)


def test_triton_is_told_how_to_batch_and_gets_its_configuration_back(server: _Server) -> None:
    """A batch and a time to gather are loaded, at most once a minute; in the end what was found is loaded again."""
    found = _triton_server(server)
    batching = _batching(server)
    batching.serve(Target(OperatingPoint({"batch_size": 4, "gpu_max_hz": 1}), 0.02))
    batching.look(0.0)
    _settled(batching)
    batching.serve(Target(OperatingPoint({"batch_size": 8}), 0.02))
    batching.look(30.0)
    _settled(batching)
    loaded = [json.loads(body["parameters"]["config"]) for path, body in server.sent if body]
    assert [each["dynamic_batching"] for each in loaded] == [
        {"priority_levels": 1, "preferred_batch_size": [4], "max_queue_delay_microseconds": 20_000}
    ]
    batching.close()
    assert json.loads(server.sent[-1][1]["parameters"]["config"]) == found
    assert batching.note == ""


def test_a_configuration_as_deep_as_tritons_own_is_taken_and_a_deeper_one_is_noted(server: _Server) -> None:
    """Bounds of a CUDA graph's dimensions lie nine deep; what no server means ends no thread, and is told."""
    shape = {"input": {"x": {"dim": ["3"]}}}
    found = _triton_server(server)
    found["optimization"] = {"cuda": {"graph_spec": [{"batch_size": 1, **shape, "graph_lower_bound": shape}]}}
    for body, note in ((None, ""), (b"[" * 100_000, "that is no message"), (b'{"a": NaN}', "NaN is no number")):
        if body is not None:
            server.says(body)
        batching = _batching(server)
        batching.serve(Target(OperatingPoint({"batch_size": 4})))
        batching.look(0.0)
        _settled(batching)
        assert note in batching.note
        assert bool(batching.note) == bool(note)
        batching.close()


def test_a_server_that_cannot_be_told_is_noted_once(server: _Server) -> None:
    """A refusal, or a batch the model does not take, is one note, and nothing is tried again."""
    server.says("no", 400)
    for port_says in ("answers 400", "at most 2"):
        batching = _batching(server)
        batching.serve(Target(OperatingPoint({"batch_size": 4})))
        for now_s in (0.0, 100.0, 200.0):
            batching.look(now_s)
            _settled(batching)
        assert port_says in batching.note
        asked = len(server.sent)
        batching.close()
        assert asked == 1
        _triton_server(server, most=2)
        server.sent.clear()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "unknown traffic"),
        ("repot", "did you mean report"),
        ("report:now", "unknown traffic"),
        ("report?quiet=0", "above zero"),
        ("report?quiet=soon", "quantity"),
        ("report?loud=1", "did you mean|known: quiet"),
        ("metrics:", "lacks"),
        ("metrics:localhost:8002/metrics", "no address"),
        ("metrics:http://localhost:99999/", "no address"),
        ("metrics:http://user:secret@localhost/", "no address"),
        ("metrics:http://localhost/?waiting=x", "goes with histogram"),
        ("metrics:http://localhost/?serve=kserve://localhost:8000", "names no model"),
        ("metrics:http://localhost/?histogram=", "empty"),
        ("metrics:http://localhost/?model=a&model=b", "once"),
        ("log:", "lacks"),
        ("log:/", "is a folder"),
        ("process:", "lacks"),
        ("sim:poisson:3/s", "simulated board"),
    ],
)
def test_a_source_that_is_none_says_so(text: str, says: str) -> None:
    """Each mistake is one line of the right class."""
    with pytest.raises(PolythrottleError, match=says) as caught:
        open_traffic(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "report",
        "report?quiet=10s",
        "log:/tmp/requests.log?quiet=5min",
        "process:tritonserver",
        "metrics:http://127.0.0.1:9/metrics?histogram=a_seconds&waiting=b&model=m",
    ],
)
def test_a_source_is_opened_again_by_its_own_text(text: str) -> None:
    """The URI of what was opened is the text; it can be looked at before anything is there, and closed."""
    traffic: Traffic = open_traffic(text)
    assert traffic.uri == text
    assert traffic.look(0.0) is None
    traffic.serve(Target(OperatingPoint({"batch_size": 4})))
    traffic.close()


def test_a_server_with_other_metrics_only_is_told_apart() -> None:
    """A model that is not among the series is an error that names the label."""
    with pytest.raises(InvalidInput, match="model"):
        counts_of(_TRITON.format(good=1, bad=0, pending=0, us=0, p99=1), [TRITON], "third")
