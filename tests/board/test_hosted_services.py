"""Services that are asked on a board over SSH: from there, without a package, and left as they were found."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from boards_over_ssh import await_that, far_sides, held, planted, stand_in
from fake_servers import FakeServer, Handler, doubling, kserve, listening, model_over_grpc, openai, piece, usage

from polythrottle.backends.ssh import SshDevice
from polythrottle.board.link import SSH
from polythrottle.board.remote_workload import BoardWorkload
from polythrottle.cli.commands import run
from polythrottle.domain.errors import DeviceError, UnknownName
from polythrottle.domain.space import OperatingPoint
from polythrottle.storage.journal import ending, late_requests
from polythrottle.tuning.setup import Setup

X = {"name": "x", "datatype": "FP32", "shape": [-1, 4]}
LEVERS = ("binary_tensor_data", "model_configuration", "model_repository")
CONFIG = {"max_batch_size": 8, "instance_group": [{"name": "m_0", "kind": "KIND_CPU", "count": 1}]}
LOAD = ("POST", "/v2/repository/models/m/load")
WORDS = ["--queries", "8", "--seconds", "0.2", "--json"]
_PACKAGES = ("aiohttp", "numpy", "psutil")


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URI of a board whose Python has none of the packages that might be wanted."""
    absent = tmp_path / "absent"
    absent.mkdir()
    for name in _PACKAGES:
        (absent / f"{name}.py").write_text(f"raise ModuleNotFoundError('No module named {name}', name='{name}')\n")
    monkeypatch.setenv(SSH, stand_in(tmp_path, f"PYTHONPATH={absent}; export PYTHONPATH"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return f"ssh://nano/jetson?root={planted(tmp_path)}&python={sys.executable}"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """Return a KServe v2 server that loads its model as it is told to."""
    with listening(kserve([X], extensions=LEVERS, config=CONFIG)) as made:
        yield made


def opened(board: str, workload: str) -> tuple[SshDevice, BoardWorkload]:
    """Return a board and what is served there."""
    device, served = Setup(device=board, workload=workload, knobs=("mem_hz",)).open()
    assert isinstance(device, SshDevice)
    assert isinstance(served, BoardWorkload)
    return device, served


def loads(server: FakeServer) -> list[int]:
    """Return the instances with which the model was loaded."""
    bodies = [body for method, path, _, body in server.seen if (method, path) == LOAD]
    configs = [json.loads(json.loads(body)["parameters"]["config"]) for body in bodies]
    return [int(each["instance_group"][0]["count"]) for each in configs]


@pytest.mark.slow
def test_a_served_model_is_measured_by_the_boards_bare_python(
    board: str, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Batches without NumPy, several at once, from a process that is not this one."""
    asked = [*WORDS, "--batch", "2"]
    assert run(["measure", "--device", board, "--workload", f"kserve://{server.where}/m?concurrency=3", *asked]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["queries"] >= 8
    bodies = [body for _, path, _, body in server.seen if path.endswith("/infer")]
    assert len(bodies) >= 8
    assert len({*bodies}) == 1
    assert b'"shape": [2, 4]' in bodies[0]


@pytest.mark.slow
def test_a_language_model_is_measured_there_with_the_key_of_the_desk(
    board: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """First tokens and tokens are told to the desk; the key goes over the connection, into no list of processes."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-desk")
    with listening(openai(piece("a"), piece("b", "length"), usage(5), b"data: [DONE]\n\n")) as server:
        assert run(["measure", "--device", board, "--workload", f"openai://{server.where}/org/m", *WORDS]) == 0
        said = json.loads(capsys.readouterr().out)
    assert said["ttft_p50"] > 0
    assert said["tokens_per_j"] > 0
    assert server.seen[-1][2]["Authorization"] == "Bearer sk-of-the-desk"


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [1, 3])
def test_an_error_budget_is_kept_by_the_board_that_sends(
    board: str, server: FakeServer, tmp_path: Path, concurrency: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the server counts it, a search of which every later request is late stays within it; the account says so."""
    sent: list[int] = []

    def infer(handler: Handler, body: bytes) -> None:
        sent.append(len(sent) >= 80)
        if sent[-1]:
            time.sleep(0.5)
        doubling(handler, body)

    server.answers["POST", "/v2/models/m/infer"] = infer
    words = ["tune", "--device", board, "--workload", f"kserve://{server.where}/m?concurrency={concurrency}"]
    words += ["--slo", "p99<=400ms", "--error-budget", "20", "--trials", "6", "--knobs", "mem_hz", "--queries", "60"]
    words += ["--seconds", "0.1", "--method", "random", "--no-presets", "--no-history", "--no-early-stop"]
    words += ["--journal", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "a.toml"), "--json"]
    assert run(words) in (0, 5), capsys.readouterr().err
    late = sum(sent)
    assert 0 < late - 0.01 * len(sent) <= 20
    account = late_requests(tmp_path / "a.jsonl")
    assert (account.sent, account.late["p99"], account.forfeited) == (len(sent), late, 0)
    assert "error budget" in (ending(tmp_path / "a.jsonl") or "")


@pytest.mark.slow
def test_a_trial_whose_connection_is_lost_forfeits_its_share(
    board: str, server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody knows what it sent: all that it was allowed counts as spent."""

    def infer(handler: Handler, body: bytes) -> None:
        if len(server.seen) > 60:
            for pid in far_sides(tmp_path):
                os.kill(pid, signal.SIGKILL)
        doubling(handler, body)

    server.answers["POST", "/v2/models/m/infer"] = infer
    words = ["tune", "--device", board, "--workload", f"kserve://{server.where}/m", "--slo", "p99<=9s"]
    words += ["--error-budget", "20", "--trials", "6", "--knobs", "mem_hz", "--queries", "200", "--no-presets"]
    assert run([*words, "--journal", str(tmp_path / "a.jsonl"), "--no-history"]) == DeviceError.exit_code
    assert "the connection to ssh://nano was lost" in capsys.readouterr().err
    account = late_requests(tmp_path / "a.jsonl")
    assert account.forfeited == 9.0  # a third of what is left, or one under way and eight that a trial needs
    assert account.sent == 0


@pytest.mark.slow
def test_a_model_is_asked_over_grpc_where_the_boards_python_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its own tritonclient, several at once and in batches, as locally."""
    monkeypatch.setenv(SSH, stand_in(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    board = f"ssh://nano/jetson?root={planted(tmp_path)}&python={sys.executable}"
    with model_over_grpc() as where:
        workload = f"kserve+grpc://{where}/m?concurrency=3"
        assert run(["measure", "--device", board, "--workload", workload, *WORDS, "--batch", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["queries"] >= 8
    await_that(lambda: not far_sides(tmp_path), "the far side stays")


@pytest.mark.parametrize("lack", ["tritonclient", "grpc"])
def test_a_board_without_what_grpc_takes_is_told_which_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lack: str
) -> None:
    """And how to name another Python there."""
    absent = tmp_path / "absent"
    absent.mkdir()
    (absent / f"{lack}.py").write_text(f"raise ModuleNotFoundError('No module named {lack}', name='{lack}')\n")
    monkeypatch.setenv(SSH, stand_in(tmp_path, f"PYTHONPATH={absent}; export PYTHONPATH"))
    board = f"ssh://nano/jetson?root={planted(tmp_path)}&python={sys.executable}"
    with pytest.raises(DeviceError, match=rf"^ssh://nano: kserve\+grpc://\S+ needs {lack}, which .*; \?python= names"):
        opened(board, "kserve+grpc://127.0.0.1:1/m")


def test_a_model_that_the_server_has_not_is_named_with_the_nearest(board: str, server: FakeServer) -> None:
    """As locally, and the line says on which board that was."""
    with pytest.raises(UnknownName, match=r"ssh://nano: unknown model at .*'mobilenett'; did you mean mobilenet"):
        opened(board, f"kserve://{server.where}/mobilenett")


def test_a_served_model_is_left_as_it_was_found(board: str, server: FakeServer) -> None:
    """Closing waits until the server has loaded it so again; where it does not, the desk says so."""
    device, workload = opened(board, f"kserve://{server.where}/m?instances=1,2")
    with device:
        workload.apply(OperatingPoint({"instances": 2}))
        assert workload.query().items == 1
        assert loads(server) == [1, 2]
    workload.close()
    assert loads(server) == [1, 2, 1]
    _, workload = opened(board, f"kserve://{server.where}/m?instances=1,2")
    workload.apply(OperatingPoint({"instances": 2}))
    workload.query()
    server.answers[LOAD] = lambda handler, _: handler.document({"error": "shutting down"}, 503)
    with pytest.raises(DeviceError, match=r"ssh://nano: .*shutting down; load the model as it was by hand"):
        workload.close()


def test_a_query_that_a_desk_does_not_wait_for_does_not_keep_a_model_from_being_left(
    board: str, server: FakeServer
) -> None:
    """After a Ctrl-C in the middle of an answer the model is still loaded as it was found."""
    device, workload = opened(board, f"kserve://{server.where}/m?instances=1,2")
    workload.apply(OperatingPoint({"instances": 2}))
    workload.query()
    line = device.board.line
    wait = line._own_answer

    def interrupted(*_: Any) -> Any:
        line._own_answer = wait  # type: ignore[method-assign]
        raise KeyboardInterrupt

    line._own_answer = interrupted  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        workload.query()
    workload.close()
    assert loads(server) == [1, 2, 1]


_DESK = """
import sys
from polythrottle.domain.space import OperatingPoint
from polythrottle.tuning.setup import Setup
device, workload = Setup(device=sys.argv[1], workload=sys.argv[2], knobs=("mem_hz",)).open()
workload.apply(OperatingPoint({"instances": 2}))
workload.query()
print("set", flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_killed_desk_leaves_a_served_model_as_it_was_found(board: str, server: FakeServer, tmp_path: Path) -> None:
    """The board's side sees the connection end, and loads it as it was."""
    words = [sys.executable, "-c", _DESK, board, f"kserve://{server.where}/m?instances=1,2"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "set"
        assert loads(server) == [1, 2]
        os.kill(child.pid, signal.SIGKILL)
    await_that(lambda: loads(server) == [1, 2, 1], "the model stays loaded otherwise")
    await_that(lambda: not far_sides(tmp_path), "the far side stays")


@pytest.mark.parametrize(
    ("device", "workload", "opens"),
    [
        ("ssh://nano/cpu?watts_per_core=3", "kserve://x:1/m", "ssh://nano/cpu?watts_per_core=3&busy=everyone"),
        ("ssh://nano/cpu?watts_per_core=3", "cmd:true http://x", "ssh://nano/cpu?watts_per_core=3"),
        ("ssh://nano/cpu?busy=everyone", "openai://x:1/m", "ssh://nano/cpu?busy=everyone"),
        ("ssh://nano/cpu", "openai://x:1/m", "ssh://nano/cpu"),
        ("ssh://nano/jetson?root=/x", "openai://x:1/m", "ssh://nano/jetson?root=/x"),
    ],
)
def test_an_estimate_holds_the_time_of_a_service(device: str, workload: str, opens: str) -> None:
    """It is a program beside what runs there for the desk; without watts stated, everybody counts anyway."""
    assert Setup(device=device, workload=workload)._device_uri == opens


def test_nothing_is_left_on_the_board(board: str, server: FakeServer, tmp_path: Path) -> None:
    """Whatever was asked of it, and whether or not it could be."""
    before = held(tmp_path / "board")
    for workload in (f"kserve://{server.where}/m", "openai://127.0.0.1:1/m"):
        try:
            opened(board, workload)[1].close()
        except DeviceError:
            assert "openai" in workload
    assert held(tmp_path / "board") == before
    await_that(lambda: not far_sides(tmp_path), "the far side stays")
    assert not [*tmp_path.glob("polythrottle-board-*")]
