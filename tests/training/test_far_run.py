"""Fine-tuning beside inference on a board over SSH, by a stand-in for ``ssh`` that runs the board's side here."""

import io
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from boards_over_ssh import await_that, far_sides, held, planted, stand_in
from far_jobs import finetuning, last_step, long_run, with_model
from old_python import PACKAGE, closure

from polythrottle.actuation import standing
from polythrottle.backends.ssh import packed
from polythrottle.board.link import SSH
from polythrottle.cli.commands import run
from polythrottle.domain.arrivals import Arrivals
from polythrottle.domain.errors import DeviceError, SloUnmet
from polythrottle.domain.ladder import PointPerformance
from polythrottle.domain.space import OperatingPoint
from polythrottle.storage.json_channel import Channel, decode, encode
from polythrottle.training.beside import far_run
from polythrottle.training.beside.corun_bench import CoRunProfile, PredictionError
from polythrottle.training.beside.corun_model import CoRun
from polythrottle.training.beside.far_run import _Followed, _known_line, _lines, _plain, _terms_of, carried, run_there
from polythrottle.training.beside.interference import Interference
from polythrottle.training.beside.live_run import RunProgress
from polythrottle.training.beside.operating_options import FinetuningJob, Option, Slice
from polythrottle.training.beside.preparation import ServingPlace
from polythrottle.training.beside.scheduler import Hours, Terms
from polythrottle.training.beside.serving_loop import Result, Training
from polythrottle.training.beside.trainer.driver import Task

_ELSEWHERE = (
    "polythrottle.api",
    "polythrottle.backends.meters",
    "polythrottle.backends.remote",
    "polythrottle.backends.replay",
    "polythrottle.backends.simulated",
    "polythrottle.backends.ssh",
    "polythrottle.board.link",
    "polythrottle.daemon",
    "polythrottle.storage.arrival_trace",
    "polythrottle.training.beside.simulated_run",
    "polythrottle.tuning",
    "polythrottle.workloads.onnx_model",
    "polythrottle.workloads.services",
    "polythrottle.workloads.tensorrt_engine",
)
"""What is imported where it is asked for, by what cannot be asked of a board that fine-tunes."""


def test_what_is_carried_is_small() -> None:
    """The zip stays below a megabyte, and holds more than what measures alone."""
    assert len(packed().whole) < len(carried().whole) <= 1_000_000


def test_all_that_is_imported_there_is_carried() -> None:
    """Of the run, its trainer and whatever both import later."""
    names = set(zipfile.ZipFile(io.BytesIO(carried().whole)).namelist())
    trainer = "polythrottle.training.beside.trainer"
    entries = ("polythrottle.training.beside.far_run", f"{trainer}.__main__", f"{trainer}.worker")
    needed = closure(entries, _ELSEWHERE)
    needed.pop("polythrottle")  # on a board nothing stands in it
    files = {name: f"polythrottle/{path.relative_to(PACKAGE).as_posix()}" for name, path in needed.items()}
    assert {name for name, file in files.items() if file not in names} == set()


def test_what_is_asked_for_travels_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrivals and hours as texts, the rest as it is."""
    orders: list[dict[str, Any]] = []

    class Link:
        def __init__(self, *given: object) -> None:
            pass

        def connect(self) -> socket.socket:
            here, there = socket.socketpair()
            with there:
                there.sendall(encode({"ended": True}))
                self.here = os.dup(there.fileno())
            orders.append({"end": self.here})
            return here

        def last_words(self) -> str:
            return ""

    monkeypatch.setattr("polythrottle.board.link.Link", Link)
    place = ServingPlace("ssh://nano/cpu", "m:f", (1, 2), 3, ("3x4",))
    terms = Terms(0.5, Arrivals.parse("burst:8/s"), "off-peak", 60.0, 7, Hours.parse("22:00-06:00"), 20.0)
    task = Task("m:f", "data", "job", epochs=3)
    with pytest.raises(DeviceError, match="was ended there"):
        run_there(place, task, terms, lambda passed: None, lambda text: None)
    with os.fdopen(orders[0]["end"], "rb") as end:
        order = decode(end.readline())
    assert _terms_of(order["terms"]) == terms
    assert Task.from_document(order["task"]) == task
    given = {"workload": "m:f", "batches": [1, 2], "threads": 3, "inputs": ["3x4"]}
    assert order["place"] == {"device": "", **given}


def test_a_profile_travels_whole() -> None:
    """What co-runs told, and the model that was fitted to them; only its title says where it was."""
    cases = [(batch, samples, share) for batch in (1, 2, 4) for samples, share in ((0, 0.0), (8, 0.5), (16, 0.25))]
    work = [(1e9 * batch, 1e6 * batch, batch, 3e9 * samples, 3e6 * samples, samples) for batch, samples, _ in cases]
    runs = tuple(
        CoRun(*each, 1.0, 1.0, 1.0, share, 5.0, 5.0 * bool(share), 0.01 * each[2] * (1 + share), 0.02 * each[2])
        for each, (_, _, share) in zip(work, cases, strict=True)
    )
    errors = (PredictionError("paper", 0, 0.1, None, 0.5), PredictionError("polythrottle", 0, 0.1, 0.2, 1.0))
    model = Interference.fit(runs).seen(runs[0])
    sent = CoRunProfile("m:f on a board", False, runs, runs[:2], errors, model, ("one",))
    with following(encode({"profile": _plain(sent)})) as (followed, _, _):
        found = followed.result()
    assert found.document() == {**sent.document(), "title": "ssh://nano: m:f on a board"}
    assert (found.runs, found.held_out) == (sent.runs, sent.held_out)
    assert [found.model.predict(run) for run in runs] == [model.predict(run) for run in runs]
    assert found.model.seen(runs[1]).surprise == model.seen(runs[1]).surprise


def test_what_is_known_travels_whole() -> None:
    """What batches and slices take, the job, and how joules come about."""
    point = OperatingPoint({"mem_hz": 2_133_000_000})
    option = Option(point, (PointPerformance(point, 1, 0.1, 0.1, 0.2, 3.0, 1.0),), (Slice(8, 0.1, 0.2, None),))
    job = FinetuningJob(640, 32, 2, 10, "m:f")
    with following(encode({"known": _known_line(option, job, "measured")})) as (followed, _, _):
        menu, *rest = followed.result()
    assert menu.options == (option,)
    assert rest == [job, "measured"]


_RESULT = Result(
    title="m:f on a board, 27 weights trained",
    simulated=False,
    policy="interleave",
    arrivals="poisson:50/s",
    slo_s=5.0,
    span_s=1.5,
    requests=3,
    late=1,
    dropped=1,
    latencies_s=(0.1, 6.0),
    training=Training(8, 1, 0, 12, False, loss=0.5),
    energy_j=3.0,
    energy_kind="measured",
    boundary="module",
    notices=("one", "two"),
    validation={"holds": True, "accuracy": 0.5},
    arrived_s=(0.2, 0.4),
    slices_s=((0.0, 0.1), (0.2, 0.3)),
)


@contextmanager
def following(*lines: bytes) -> Iterator[tuple[_Followed, list[RunProgress], list[str]]]:
    """Yield the desk's side of a run of which some lines are told, and what was shown of it."""
    here, there = socket.socketpair()
    shown: list[RunProgress] = []
    notes: list[str] = []
    with there, here:
        for line in lines:
            there.sendall(line)
        there.shutdown(socket.SHUT_WR)
        yield _Followed(Channel(here, 1 << 20), "ssh://nano", shown.append, notes.append), shown, notes


def test_a_result_travels_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts, after progress and notes; only its title says where it was."""
    monkeypatch.setattr(far_run, "_PART", 1)
    progress = RunProgress(1.0, 2, 0, 8, 0, 40, "training")
    lines = [encode({"note": "nearly full"}), encode({"progress": asdict(progress)})]

    class Told(far_run._Desk):
        def __init__(self) -> None:
            pass

        def tell(self, **message: object) -> None:
            lines.append(encode(message))

    Told().tell_result(_RESULT)
    with following(*lines) as (followed, shown, notes):
        found = followed.result()
    assert asdict(found) == {**asdict(_RESULT), "title": f"ssh://nano: {_RESULT.title}"}
    assert (shown, notes) == ([progress], ["nearly full"])
    assert len(lines) == 9


@pytest.mark.parametrize(
    ("line", "kind", "says"),
    [
        ({"error": {"kind": "SloUnmet", "words": "too slow"}}, SloUnmet, "^ssh://nano: too slow$"),
        ({"ended": True}, DeviceError, "ended there; the same command goes on"),
        ({"result": {"title": "x"}}, DeviceError, "makes no sense"),
        ({"part": "else", "values": []}, DeviceError, "makes no sense"),
        ({"progress": 3}, DeviceError, "makes no sense"),
        ({}, DeviceError, "makes no sense"),
    ],
)
def test_what_goes_wrong_there_is_one_line(line: dict[str, object], kind: type[Exception], says: str) -> None:
    """An error as it was there, and whatever makes no sense, with the board's name."""
    with following(encode(line)) as (followed, _, _), pytest.raises(kind, match=says):
        followed.result()


def test_a_second_interrupt_does_not_wait() -> None:
    """The first one is passed on and the result is waited for, the second one ends that."""
    here, there = socket.socketpair()
    notes: list[str] = []

    class Interrupted(Channel):
        def receive(self, timeout_s: float | None = None) -> dict[str, object] | None:
            raise KeyboardInterrupt

    with here, there:
        followed = _Followed(Interrupted(here, 1 << 20), "ssh://nano", lambda passed: None, notes.append)
        with pytest.raises(KeyboardInterrupt, match="puts itself back; the same command goes on"):
            followed.result()
        assert decode(there.recv(1000)) == {"stop": True}
    assert len(notes) == 1


def test_an_interrupted_run_says_what_is_kept_of_its_job() -> None:
    """As the board has it; one that says no more leaves it at how to go on."""
    with following(encode({"ended": True, "kept": "12 steps are kept"})) as (followed, _, notes):
        followed.stopping = True
        with pytest.raises(KeyboardInterrupt, match=r"^ssh://nano is put back; 12 steps are kept$"):
            followed.result()
        assert notes == []
    told = encode({"ended": True, "kept": "12 steps are kept"})
    with following(told) as (followed, _, _), pytest.raises(DeviceError, match=r"was ended there; 12 steps are kept$"):
        followed.result()


@pytest.mark.parametrize("stops", [True, False])
def test_a_board_that_is_gone_after_an_interrupt_is_no_lost_connection(
    stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Native code that was being loaded may end it at once, of which the board is none the worse."""

    class Link:
        def __init__(self, *given: object) -> None:
            pass

        def connect(self) -> socket.socket:
            here, there = socket.socketpair()
            there.close()
            return here

        def last_words(self) -> str:
            return ""

    def result(followed: _Followed) -> None:
        followed.stopping = stops
        raise EOFError

    monkeypatch.setattr("polythrottle.board.link.Link", Link)
    monkeypatch.setattr(_Followed, "result", result)
    monkeypatch.setattr(Channel, "send", lambda *given: None)
    place = ServingPlace("ssh://nano/cpu", "m:f", (1,), None, ())
    kind, says = (KeyboardInterrupt, "puts itself back") if stops else (DeviceError, "was lost")
    with pytest.raises(kind, match=says):
        far_run.known_there(place, Task("m:f", "data", "job"))


def test_a_desk_that_is_silent_or_gone_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines come as they are said; then nothing for too long, or the end."""
    monkeypatch.setattr(far_run, "_SILENT_S", 0.05)
    read, write = os.pipe()
    os.write(write, b"one\ntw")
    os.write(write, b"o\nthr")
    assert [*_lines(read)] == [b"one", b"two"]
    os.close(write)
    assert [*_lines(read)] == []
    os.close(read)


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the tree of a board, with a tiny model and its data in the home that a stand-in for ssh leads to."""
    monkeypatch.setenv(SSH, stand_in(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with_model(tmp_path / "home")
    return planted(tmp_path)


def board_uri(board: Path, python: str = sys.executable) -> str:
    """Return how the board is reached."""
    return f"ssh://nano/jetson?root={board}&python={python}"


@pytest.mark.slow
def test_a_job_is_done_on_the_board(board: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside requests, in the board's interpreter, with its joules; the board as it was found, nothing of ours left."""
    before = held(board)
    assert run(finetuning(board_uri(board), "--epochs", "4", "--json")) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    assert found["title"].startswith("ssh://nano: tiny.pt2 on Jetson AGX Orin")
    assert found["training"]["finished"] is True
    assert found["energy_j"] > 0
    assert "VDD_GPU_SOC" in found["boundary"]
    assert last_step(tmp_path / "home" / "job") == 16
    assert not Path("job").exists()
    assert held(board) == before
    await_that(lambda: not far_sides(tmp_path), "the far side stays")
    assert not [*tmp_path.glob("polythrottle-board-*")]
    assert standing() == ()


@pytest.mark.slow
def test_a_plan_is_measured_on_the_board(board: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As on the board itself: epochs within a time, with its joules; the board as it was found."""
    before = held(board)
    words = finetuning(board_uri(board), "--epochs", "12", "--hours", "1", "--json")
    assert run(["finetune", "plan", *words[2:]]) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    assert found["epochs"] == [12.0, 12.0]
    assert found["energy_kind"] == "simulated"
    assert (held(board), standing()) == (before, ())
    await_that(lambda: not far_sides(tmp_path), "the far side stays")


def profiling(device: str, *more: str) -> list[str]:
    """Return the words that profile the tiny model on a device over SSH."""
    words = ["-d", device, "-w", "tiny.pt2", "--threads", "1", "--data", "data", "--train-batch", "8"]
    return ["finetune", "profile", *words, "--held-out", "4", *more]


@pytest.mark.slow
def test_a_profile_is_measured_on_the_board(board: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As on the board itself, with a job that is thrown away there; the board as it was found."""
    before = held(board)
    assert run(profiling(board_uri(board), "--json")) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    assert found["title"].startswith("ssh://nano: tiny.pt2 on Jetson AGX Orin")
    assert (found["co_runs"], found["held_out"], found["simulated"]) == (8, 4, False)
    assert all(each["mean"] > 0 for each in found["errors"])
    await_that(lambda: not far_sides(tmp_path), "the far side stays")
    assert (held(board), standing()) == (before, ())
    assert not [*tmp_path.glob("polythrottle-*")]
    assert not (tmp_path / "home" / "job").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "code", "says"),
    [("interrupted", 130, "ssh://nano ends the run"), ("far side", DeviceError.exit_code, "measures anew")],
)
def test_a_profile_that_is_cut_off_leaves_nothing(
    board: Path, tmp_path: Path, victim: str, code: int, says: str
) -> None:
    """Ctrl-C, or its far side killed: one line that says so, the board as it was found."""
    before = held(board)
    words = [sys.executable, "-m", "polythrottle", *profiling(board_uri(board), "--requests", "1000")]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        await_that(lambda: bool([*tmp_path.glob("polythrottle-board-*/tmp*/*.checkpoint")]), "nothing is trained")
        if victim == "interrupted":
            os.killpg(child.pid, signal.SIGINT)
        else:
            for pid in far_sides(tmp_path):
                os.kill(pid, signal.SIGKILL)
        out, err = child.communicate(timeout=120.0)
    finally:
        child.kill()
        child.communicate()
    assert (child.returncode, out) == (code, ""), err
    assert says in err
    assert "Traceback" not in err
    await_that(lambda: not far_sides(tmp_path), "the far side stays")
    await_that(lambda: held(board) == before and standing() == (), "the board stays changed")


def test_where_a_job_stands_is_read_on_the_board(
    board: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a Python without packages, as on the board itself; what is no job is a line with the board's name."""
    folder = tmp_path / "home" / "job"
    folder.mkdir()
    task = Task("tiny.pt2", "data", "job", batch=8, epochs=2)
    begun = {"task": task.document(), "classes": {"a": 0, "b": 1}, "shape": [3, 4, 4]}
    (folder / "task.json").write_text(json.dumps(begun))
    uri = board_uri(board, poor_python(tmp_path))
    assert run(["finetune", "status", "job", "-d", uri, "--json"]) == 0, capsys.readouterr().err
    there = capsys.readouterr().out
    assert run(["finetune", "status", str(folder), "--json"]) == 0
    here = json.loads(capsys.readouterr().out)
    assert json.loads(there) == {**here, "folder": "job"}
    assert run(["finetune", "status", "job", "-d", uri]) == 0
    assert "not running; the same run goes on with it" in capsys.readouterr().out
    (folder / "task.json").write_text("{")
    for name, says in (("nowhere", "nowhere holds no fine-tuning job"), ("job", "task.json is damaged")):
        assert run(["finetune", "status", name, "-d", uri]) == 4
        assert f"ssh://nano: {says}" in capsys.readouterr().err.replace("job/", "")
    await_that(lambda: not [*tmp_path.glob("polythrottle-board-*")], "what was carried stays")


@pytest.mark.slow
def test_an_interrupted_run_is_ended_there_and_told(board: Path, tmp_path: Path) -> None:
    """Ctrl-C, which a terminal sends to ssh as well: what was served and trained by then, and the job goes on."""
    before = held(board)
    with long_run(board_uri(board), tmp_path / "home" / "job") as child:
        os.killpg(child.pid, signal.SIGINT)
        out, err = child.communicate(timeout=120.0)
    assert child.returncode == 130, err
    assert "Traceback" not in err
    found = json.loads(out)
    assert found["interrupted"] is True
    assert found["training"]["samples"] > 0
    assert "ssh://nano ends the run and is put back" in err
    await_that(lambda: not far_sides(tmp_path), "the far side stays")
    assert (held(board), standing()) == (before, ())
    assert not [*tmp_path.glob("polythrottle-board-*")]


@contextmanager
def begun(words: Sequence[str]) -> Iterator["subprocess.Popen[str]"]:
    """Run a desk in a process group of its own."""
    words = [sys.executable, "-m", "polythrottle", *words]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def test_an_interrupt_before_anything_is_carried_says_so(
    board: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while ssh asks for a passphrase: nothing was begun there, and the same command begins it."""
    before = held(board)
    monkeypatch.setenv(SSH, stand_in(tmp_path, f"touch {tmp_path}/asks; exec sleep 600"))
    with begun(finetuning(board_uri(board))) as child:
        await_that((tmp_path / "asks").exists, "ssh is not started")
        os.killpg(child.pid, signal.SIGINT)
        out, err = child.communicate(timeout=120.0)
    assert (child.returncode, out) == (130, "")
    assert err == "polythrottle: interrupted; nothing was begun on ssh://nano; the same command begins it\n"
    assert held(board) == before


@pytest.mark.slow
@pytest.mark.parametrize("when", ["carried", "begun"])
def test_an_early_interrupt_says_what_became_of_the_job(board: Path, tmp_path: Path, when: str) -> None:
    """As soon as the far side runs, or its trainer does: one line, and nothing waits for torch to be loaded."""
    before = held(board)
    log = tmp_path / "home" / "job" / "trainer.log"
    with begun(finetuning(board_uri(board), "--epochs", "100000")) as child:
        reached = log.exists if when == "begun" else lambda: bool([*tmp_path.glob("polythrottle-board-*/lock")])
        await_that(reached, "nothing is begun")
        os.killpg(child.pid, signal.SIGINT)
        out, err = child.communicate(timeout=120.0)
    assert (child.returncode, out) == (130, ""), err
    last = err.splitlines()[-1]
    assert last.startswith("polythrottle: interrupted; ")
    assert "the same command" in last
    assert "lost" not in err
    await_that(lambda: not far_sides(tmp_path), "the far side stays")
    assert (held(board), standing()) == (before, ())


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["desk", "far side"])
def test_a_run_that_is_cut_off_ends_and_goes_on_later(
    board: Path, tmp_path: Path, victim: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that says how it goes on; the board as it was found, and the same command goes on with what is kept."""
    before = held(board)
    with long_run(board_uri(board), tmp_path / "home" / "job") as child:
        for pid in {"desk": [child.pid], "far side": far_sides(tmp_path)}[victim]:
            os.kill(pid, signal.SIGKILL)
        if victim == "far side":
            out, err = child.communicate(timeout=120.0)
            assert (child.returncode, out) == (DeviceError.exit_code, ""), err
            assert "the connection to ssh://nano was lost" in err.splitlines()[-1]
            assert "the same command goes on with it" in err.splitlines()[-1]
    await_that(lambda: not far_sides(tmp_path), "the far side stays")
    await_that(lambda: held(board) == before and standing() == (), "the board stays changed")
    kept = last_step(tmp_path / "home" / "job")
    epochs = str(kept // 4 + 4)
    assert run(finetuning(board_uri(board), "--epochs", epochs, "--json")) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    assert found["training"]["finished"] is True
    assert found["training"]["steps"] < 20


def poor_python(folder: Path, *packages: str) -> str:
    """Return an interpreter that has no packages but some."""
    have = folder / "have"
    have.mkdir()
    for name in packages:
        for path in Path(np.__file__).parents[1].glob(f"{name}*"):
            (have / path.name).symlink_to(path)
    path = folder / "poor-python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(have))} exec {shlex.quote(sys.executable)} -S "$@"\n')
    path.chmod(0o700)
    return str(path)


@pytest.mark.parametrize(("packages", "says"), [((), "No module named 'numpy'"), (("numpy",), "no torch to fine-tune")])
def test_a_python_that_cannot_fine_tune_is_one_line(
    board: Path, tmp_path: Path, packages: Sequence[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which it is, what it lacks and how to name another; the board is untouched and nothing stays there."""
    before = held(board)
    python = poor_python(tmp_path, *packages)
    assert run(finetuning(board_uri(board, python))) == DeviceError.exit_code
    err = capsys.readouterr().err
    assert says in err.splitlines()[-1]
    assert "?python=" in err.splitlines()[-1]
    assert held(board) == before
    await_that(lambda: not far_sides(tmp_path), "the far side stays")
    assert not [*tmp_path.glob("polythrottle-board-*")]


@pytest.mark.parametrize(
    ("given", "code", "says"),
    [
        (("-w", "nonesuch:f"), 2, "ssh://nano: nonesuch:f: there is no module 'nonesuch'"),
        (("-w", "nowhere.pt2"), 4, "ssh://nano: nowhere.pt2"),
        (("-w", "resnet50"), 2, "describes a model for simulated boards"),
        (("-w", "model.onnx"), 2, "cannot be served over SSH"),
        (("-w", "kserve://localhost:8000/m"), 2, "cannot be served over SSH"),
        (("--data", "nowhere"), 4, "ssh://nano: "),
        (("-d", "ssh://nano/sim:jetson-tx2"), 6, "needs no board"),
        (("-d", "ssh://nano/cpu?meter=cmd:x"), 2, "leave it out over SSH"),
        (("-d", "ssh://a/cpu,ssh://b/cpu"), 2, "two devices"),
    ],
)
def test_what_cannot_be_run_there_is_one_line(
    board: Path, given: Sequence[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the board's name where it is the board that lacks something; the board is untouched."""
    before = held(board)
    extra = [*given]
    if extra[0] == "-d" and "meter" not in extra[1] and "," not in extra[1]:
        extra[1] += f"?python={sys.executable}"
    assert run(finetuning(board_uri(board), *extra)) == code, capsys.readouterr().err
    err = capsys.readouterr().err
    assert says in err
    assert "Traceback" not in err
    assert (held(board), standing()) == (before, ())


def test_a_trace_stays_at_the_desk(board: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its file is not carried, which a line says before anything is begun."""
    line = finetuning(board_uri(board))
    at = line.index("--rate")
    line[at : at + 2] = ["--arrivals", "trace:requests.csv@20/s"]
    assert run(line) == 2
    assert "is not carried to a board" in capsys.readouterr().err
