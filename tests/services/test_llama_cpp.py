"""A tiny language model on llama.cpp's own server, with and without the proxy in front of it."""

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from services import llama
from services.servers import Running, free_ports, polythrottle, running

from polythrottle.daemon.traffic.engines import KNOWN, LLAMA_CPP, names_on
from polythrottle.daemon.traffic.server_metrics import counts_of
from polythrottle.workloads import open_workload

pytestmark = [pytest.mark.llama, pytest.mark.timeout(3600)]
WORDS = ("--device", "cpu", "--queries", "20", "--seconds", "0.5", "--workload")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Serve the model, four answers at once."""
    folder, (http,) = tmp_path_factory.mktemp("llama"), free_ports(1)
    words = ("--host", "127.0.0.1", "--port", str(http), "--parallel", "4", "--threads", "1", "--ctx-size", "8192")
    command = [str(llama.server()), "--model", str(llama.model()), "--alias", "tiny", "--metrics", *words]
    with running(command, "/health", folder, {}, http) as found:
        yield found


@pytest.fixture
def proxy(server: Running) -> Iterator[int]:
    """Run the proxy in front of it; yields its port."""
    command = [sys.executable, "-m", "polythrottle", "proxy", f"http://127.0.0.1:{server.http}"]
    process = subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0", "--in-flight", "2"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        yield int(process.stderr.readline().split()[1].rpartition(":")[2])
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0


def page(url: str) -> str:
    """Return a page of metrics."""
    with urllib.request.urlopen(url, timeout=20) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_tokens_and_their_times_are_told(server: Running, endpoint: str) -> None:
    """The server counts; the first token comes before the last."""
    rest = f"tiny?endpoint={endpoint}&prompt_tokens=30&max_tokens=200&ignore_eos=true"
    workload = open_workload(f"openai://127.0.0.1:{server.http}/{rest}")
    query = workload.query()
    workload.close()
    assert query.tokens == 200
    assert query.first_s is not None
    assert 0 < query.first_s < query.latency_s


def test_its_metrics_are_read(server: Running) -> None:
    """Tokens in and out, by its own names; it counts no requests."""
    url = f"http://127.0.0.1:{server.http}/metrics"
    before = counts_of(page(url), KNOWN)
    assert names_on(page(url), KNOWN) == LLAMA_CPP
    workload = open_workload(f"openai://127.0.0.1:{server.http}/tiny?max_tokens=50&ignore_eos=true")
    workload.query()
    workload.close()
    after = counts_of(page(url), KNOWN)
    assert after.answered is None
    assert before.tokens_out is not None
    assert after.tokens_out is not None
    assert after.tokens_in is not None
    assert after.tokens_out - before.tokens_out >= 50
    assert after.tokens_in > (before.tokens_in or 0)


def test_the_bound_in_flight_is_tuned_and_its_answer_holds_in_a_fresh_measurement(
    server: Running, proxy: int, tmp_path: Path
) -> None:
    """The bound is set again; the tuned point holds its limit when it is measured anew; joules are called estimated."""
    where = f"openai://127.0.0.1:{proxy}/tiny?max_tokens=40&ignore_eos=true&concurrency=6"
    out = tmp_path / "profile.toml"
    limit = ("--slo", "p99<=20s", "--yes", "--trials", "3", "--out", str(out))
    tuned = polythrottle(tmp_path, "tune", *WORDS, f"{where}&in_flight=1,4", *limit)
    assert tuned["best"]["point"]["in_flight"] in (1, 2, 4)
    assert all(each["holds"] for each in tuned["slo"])
    status = json.loads(page(f"http://127.0.0.1:{proxy}/polythrottle/in_flight"))
    assert status == {"limit": 2, "running": 0, "waiting": 0}
    measured = polythrottle(tmp_path, "measure", *WORDS, where)
    assert measured["queries"] >= 20
    counts = counts_of(page(f"http://127.0.0.1:{proxy}/polythrottle/metrics"), KNOWN)
    assert counts.engine == "polythrottle proxy"
    assert counts.tokens_out is not None
    assert counts.tokens_out >= 20 * 40


def test_a_server_that_is_killed_and_started_anew_serves_again_behind_the_proxy(tmp_path: Path) -> None:
    """Requests meanwhile get status 502, and the proxy goes on."""
    (http,) = free_ports(1)
    words = ("--host", "127.0.0.1", "--port", str(http), "--threads", "1", "--ctx-size", "2048")
    command = [str(llama.server()), "--model", str(llama.model()), "--alias", "tiny", *words]
    proxy = subprocess.Popen(
        [sys.executable, "-m", "polythrottle", "proxy", f"http://127.0.0.1:{http}", "--listen", "127.0.0.1:0"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert proxy.stderr is not None
    port = int(proxy.stderr.readline().split()[1].rpartition(":")[2])
    uri = f"openai://127.0.0.1:{port}/tiny?max_tokens=8&ignore_eos=true"
    try:
        for number in range(2):
            folder = tmp_path / str(number)
            folder.mkdir()
            with running(command, "/health", folder, {}, http):
                workload = open_workload(uri)
                assert workload.query().tokens == 8
                workload.close()
            request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", data=b"{}")
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=20)
            assert refused.value.code == 502
            assert b"nothing answers at" in refused.value.read()
            refused.value.close()
    finally:
        proxy.terminate()
        proxy.communicate(timeout=60)
