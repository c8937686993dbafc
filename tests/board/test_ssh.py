"""A board over SSH, by a stand-in for ``ssh`` that runs the far side on this machine."""

import io
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import threading
import zipfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from boards_over_ssh import await_that, desk, far_sides, held, lay_sudo, planted, stand_in

from polythrottle.actuation.restore import Standing
from polythrottle.actuation.rollback import Difference, Outcome
from polythrottle.actuation.state.lease import Lease, boot_s
from polythrottle.actuation.wire import Later
from polythrottle.backends import open_device
from polythrottle.backends.device_uri import own_words
from polythrottle.backends.ssh import SshDevice, _outcome, _standing, packed
from polythrottle.board import link
from polythrottle.board.far_side import _MOST_NAMES, FarService, device_here
from polythrottle.board.link import SSH, Place
from polythrottle.board.remote_workload import HostedWindow, Told
from polythrottle.board.work_host import DeskJudge, FarDevice, FarWindow, Outbox
from polythrottle.cli.commands import run
from polythrottle.domain.arrivals import CLOSED
from polythrottle.domain.errors import (
    DeviceError,
    InvalidInput,
    PermissionDenied,
    StorageError,
    TrialError,
    UnknownName,
)
from polythrottle.domain.measurement import Reading, Window
from polythrottle.domain.ports import EXACT_SENSOR
from polythrottle.domain.problem import Constraint
from polythrottle.domain.space import OperatingPoint
from polythrottle.metering.early_stopping import Goal
from polythrottle.metering.load import drive
from polythrottle.metering.observed_window import Verdict, measurement_of, observe_window
from polythrottle.metering.point_measurement import measure
from polythrottle.metering.window import observe
from polythrottle.tuning.setup import Setup


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what is carried to a board."""
    folder = tmp_path_factory.mktemp("carried")
    zipfile.ZipFile(io.BytesIO(packed().whole)).extractall(folder)
    return folder


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the tree of a board that a stand-in for ssh leads to."""
    monkeypatch.setenv(SSH, stand_in(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return planted(tmp_path)


def uri(board: Path) -> str:
    """Return how the board is reached."""
    return f"ssh://nano/jetson?root={board}&python={sys.executable}"


def test_what_is_carried_is_small() -> None:
    """The zip stays below a megabyte."""
    assert len(packed().whole) <= 1_000_000


def test_what_is_carried_needs_nothing_besides(unpacked: Path) -> None:
    """Every carried module but torch's and gRPC's is imported in a Python without packages: all it takes is there."""
    names = [
        ".".join(path.relative_to(unpacked).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((unpacked / "polythrottle").rglob("*.py"))
        if path.stem != "__main__" and not path.stem.startswith(("torch_", "kserve_grpc"))
    ]
    begin = f"import sys, importlib; sys.path.insert(0, {str(unpacked)!r})"
    code = f"{begin}\nfor name in {names!r}: importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(names) > 80


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("//nano", Place("nano")),
        ("//alice@nano:2222/jetson", Place("nano", "alice", "2222", "jetson")),
        ("//[::1]:22/nvml:0-7", Place("[::1]", "", "22", "nvml:0-7")),
        ("//192.168.1.7/cpu", Place("192.168.1.7", device="cpu")),
    ],
)
def test_a_uri_names_a_board_and_a_device_of_it(text: str, place: Place) -> None:
    """User, host, port and device are told apart, also of an IPv6 address."""
    assert Place.parse(text, {}) == place


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("//", {}, "names no board"),
        ("nano", {}, "names no board"),
        ("//-oProxyCommand=x/jetson", {}, "names no board"),
        ("//nano;reboot", {}, "names no board"),
        (f"//{'a' * 5000}z/jetson", {}, "^ssh://a{30}…a{29}z has a host of 5001 letters; 253 are the most$"),
        ("//a:b@nano", {}, "leave the password out"),
        ("//-l@nano", {}, "no such user or port"),
        ("//nano:ssh", {}, "no such user or port"),
        ("//nano", {"sudo": "maybe"}, "neither yes nor no"),
        ("//nano", {"python": "-c"}, "names no program"),
        ("//nano", {"root": "/tmp"}, "option of a device"),
    ],
)
def test_what_ssh_might_take_for_something_else_is_refused(text: str, options: dict[str, str], says: str) -> None:
    """Nothing in a URI becomes an option or a command of ssh, and no password is taken."""
    with pytest.raises(InvalidInput, match=says):
        Place.parse(text, options)


@pytest.mark.slow
def test_a_board_is_examined_and_steered_and_left_as_it_was(
    board: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Doctor tells of the board and the way to it; what was set there is put back, and nothing of ours stays."""
    before = held(board)
    assert run(["doctor", "--device", uri(board), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert "ssh://nano runs this version in" in json.dumps(told)
    (boot,) = (each for each in told["machine"] if each["subject"] == "restore at boot")
    sudo = " --sudo" * (os.geteuid() != 0)
    assert boot["remedy"] == f"polythrottle daemon install --device 'ssh://nano?python={sys.executable}'{sudo}"
    device = open_device(uri(board), ["mem_hz"])
    assert device.uri == f"ssh://nano/jetson?root={board}&python={sys.executable}"
    level = device.space.knob("mem_hz").levels[0]
    with device:
        device.apply(device.space.default.moved({"mem_hz": level}))
        assert held(board) != before
        assert device.read().clocks_hz["mem"] == level
    assert held(board) == before
    await_that(lambda: not far_sides(tmp_path), "the far side stays")
    assert not [*tmp_path.glob("polythrottle-board-*")]


def test_a_board_is_steered_by_sudo(board: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``?sudo=yes`` a sudo that may not ask starts the far side; it is set, put back, and its URI says so."""
    lay_sudo(tmp_path, monkeypatch)
    before = held(board)
    device = open_device(f"{uri(board)}&sudo=yes", ["mem_hz"])
    assert device.uri == f"{uri(board)}&sudo=yes"
    with device:
        device.apply(device.space.default.moved({"mem_hz": device.space.knob("mem_hz").levels[0]}))
        assert held(board) != before
    assert held(board) == before
    await_that(lambda: not far_sides(tmp_path), "the far side stays")
    assert {*(tmp_path / "sudo.log").read_text().splitlines()} == {f"-n {sys.executable}"}


@pytest.mark.parametrize(
    ("before", "says"),
    [
        ("echo 'sudo: a password is required' >&2; exit 1", "a password is required; allow sudo without a password"),
        ("echo 'sudo: user is not in the sudoers file' >&2; exit 1", "not in the sudoers file; allow sudo without"),
    ],
)
def test_a_sudo_that_would_ask_is_one_line(
    board: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, says: str
) -> None:
    """Nobody is asked for a password over the channel: the line says what to do, and the board is untouched."""
    lay_sudo(tmp_path, monkeypatch, before)
    found = held(board)
    with pytest.raises(PermissionDenied, match=says) as caught:
        open_device(f"{uri(board)}&sudo=yes")
    assert "\n" not in str(caught.value)
    assert held(board) == found


@pytest.mark.slow
def test_a_search_measures_there(board: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tune runs a command on the board, chooses by what was measured there, and leaves the board as it was."""
    before = held(board)
    words = ["--knobs", "mem", "--slo", "p99<=60s", "--yes", "--trials", "2", "--seconds", "0.2", "--queries", "5"]
    out = ["--method", "grid", "--json", "--out", str(tmp_path / "out")]
    code = run(["tune", "--device", uri(board), "--workload", "cmd:true", *words, *out])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert held(board) == before
    assert json.loads(said.out)["trials"]
    assert run(["apply", str(tmp_path / "out"), "--device", uri(board), "--confirm-within", "60"]) == 0
    assert f"polythrottle apply --confirm --device {shlex.quote(uri(board))} (within" in capsys.readouterr().err
    assert run(["apply", "--confirm", "--device", uri(board)]) == 0
    assert run(["restore", "--device", uri(board)]) == 0
    assert held(board) == before
    await_that(lambda: not far_sides(tmp_path), "the far side stays")


@pytest.mark.slow
def test_a_callable_runs_in_the_boards_own_python(
    board: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The module is the board's: it lies in the home folder there, and tells in which process it ran."""
    (tmp_path / "home" / "served.py").write_text(
        "import os\n\ndef step(batch_size):\n"
        "    open('ran', 'a').write(f'{os.getpid()} {batch_size}\\n')\n    sum(range(20000))\n"
    )
    words = ["--queries", "5", "--seconds", "0.2", "--batch", "2", "--json"]
    code = run(["measure", "--device", uri(board), "--workload", "served:step", *words])
    said = capsys.readouterr()
    assert code == 0, said.err
    lines = (tmp_path / "home" / "ran").read_text().split("\n")
    assert {line.split()[1] for line in lines if line} == {"2"}
    assert str(os.getpid()) not in {line.split()[0] for line in lines if line}


@pytest.mark.slow
def test_a_point_is_set_with_what_the_workload_is_told_and_the_last_reading_comes_with_the_end(
    board: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a trial waits for two ways there and back; one whose point is refused begins nothing."""
    words = Setup(device=uri(board), workload="cmd:true", knobs=("mem_hz",), queries=5, seconds=0.1)
    device, workload = words.open()
    assert isinstance(device, SshDevice)
    asked: list[str] = []
    ask = device.board.line.ask
    monkeypatch.setattr(
        device.board.line,
        "ask",
        lambda verb, **fields: asked.append(f"{verb} set" if "point" in fields else verb) or ask(verb, **fields),
    )
    rate = board / "sys/kernel/debug/bpmp/debug/clk/emc/rate"
    try:
        with words.closing(workload), device:
            points = [device.space.default.moved({"mem_hz": hz}) for hz in device.space.knob("mem_hz").levels[:2]]
            for point in points:
                asked.clear()
                device.apply(point)
                assert asked == []
                seen = measure(device, workload, point, words.window(device))
                assert int(rate.read_text()) == point["mem_hz"]
                assert asked[0] == "work set"
                # The lease is renewed by a thread of its own, whenever that is due.
                assert {each for each in asked[1:] if each != "renew"} == {"work"}
                asked.clear()
                closing = device.closing()
                assert asked == []
                # A window's end lies between two samples of power, a part of one of which the reading may lack.
                assert closing.energy_j >= 0.99 * seen.energy_j * seen.latency.queries
                assert device.closing().energy_j >= closing.energy_j
                assert asked == ["read"], "it was told once"
            device.apply(points[0].moved({"mem_hz": 1}))
            with pytest.raises(TrialError, match="mem"):
                measure(device, workload, points[0].moved({"mem_hz": 1}), words.window(device))
            assert measure(device, workload, points[0], words.window(device)).latency.queries >= 5
            device.apply(points[1])
            assert device.altered() == ()
            assert asked[-2:] == ["apply set", "verify"], "whatever else is asked finds it set"
            asked.clear()
            refusals = [Later("again soon", 0.001)]
            slow = device.board.line.ask
            monkeypatch.setattr(
                device.board.line,
                "ask",
                lambda verb, **fields: (_ for _ in ()).throw(refusals.pop()) if refusals else slow(verb, **fields),
            )
            device.apply(points[0])
            assert device.altered() == ()
            assert asked == ["apply set", "verify"], "a point that is to be set later is not forgotten"
            device.apply(points[1])
            device.restore()
            assert asked[-1] == "restore", "what is put back need not be set before"
            assert "apply set" not in asked[-2:]
    finally:
        device.board.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "code", "says"),
    [
        ("cmd:false", 7, "false exited with code 1"),
        ("model.safetensors", 2, "cannot be run over SSH"),
        ("nowhere:step", 2, "ssh://nano: nowhere:step: there is no module 'nowhere'"),
        ("cmd:/no/such/program", 2, "ssh://nano: '/no/such/program' is not a program that can be run here"),
        ("kserve://127.0.0.1:1/m", 6, "ssh://nano: nothing answers at 127.0.0.1:1 (connection refused); is the server"),
        ("kserve+grpc://127.0.0.1:1/m", 6, "ssh://nano: nothing answers at 127.0.0.1:1 (connection refused)"),
        ("kserve://127.0.0.1/m", 2, "ssh://nano: 'kserve://127.0.0.1/m' is not a service"),
        ("openai://127.0.0.1:1/m", 6, "ssh://nano: nothing answers at 127.0.0.1:1 (connection refused); is the server"),
        ("openai://127.0.0.1:1/m?prompts=no.txt", 4, "ssh://nano: the prompts in no.txt cannot be read: No such file"),
    ],
)
def test_what_cannot_be_measured_there_is_one_line(
    board: Path, capsys: pytest.CaptureFixture[str], workload: str, code: int, says: str
) -> None:
    """A command that fails, a file and a module that is not there end with the code and the line they end with here."""
    before = held(board)
    assert (
        run(["measure", "--device", uri(board), "--workload", workload, "--queries", "5", "--seconds", "0.2"]) == code
    )
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said
    assert held(board) == before


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["far side", "desk"])
def test_whoever_is_killed_the_board_is_put_back(board: Path, tmp_path: Path, victim: str) -> None:
    """The far side's guard restores when it is killed; a killed desk's connection ends, and the far side restores."""
    before = held(board)
    with desk(uri(board)) as child:
        assert held(board) != before
        os.kill(child.pid if victim == "desk" else far_sides(tmp_path)[0], signal.SIGKILL)
        await_that(lambda: held(board) == before, "the board stays changed")


def test_a_desk_that_loses_its_board_waits_for_it_to_be_put_back(board: Path, tmp_path: Path) -> None:
    """The far side ends what runs there first: that it still stands when the desk has connected anew is no alarm."""
    before = held(board)
    there = open_device(uri(board), ["mem_hz"]).__enter__()
    there.apply(OperatingPoint({"mem_hz": there.space.knob("mem_hz").levels[0]}))
    (lost,) = far_sides(tmp_path)
    os.kill(lost, signal.SIGSTOP)
    there.board.close()  # type: ignore[attr-defined]
    asked: list[str] = []
    ask = there.board.line.ask  # type: ignore[attr-defined]

    def answered(verb: str, **fields: Any) -> Any:
        asked.append(verb)
        try:
            return ask(verb, **fields)
        except Later:  # it stood changed at the first look
            os.kill(lost, signal.SIGCONT)
            raise

    there.board.line.ask = answered  # type: ignore[attr-defined]
    there.__exit__(None, None, None)
    assert asked.count("release") > 1
    assert held(board) == before


@pytest.mark.slow
def test_a_desk_that_loses_its_board_names_what_stands_there(board: Path, tmp_path: Path) -> None:
    """The far side lives on where the connection alone was lost: what it has set is in the error, and then put back."""
    before = held(board)
    there = open_device(uri(board), ["mem_hz"]).__enter__()
    there.apply(OperatingPoint({"mem_hz": there.space.knob("mem_hz").levels[0]}))
    (lost,) = far_sides(tmp_path)
    os.kill(lost, signal.SIGSTOP)
    there.board.close()  # type: ignore[attr-defined]
    with pytest.raises(DeviceError, match=r"stands as .* has set it: .*mrq_rate"):
        there.__exit__(None, None, None)
    assert held(board) != before
    os.kill(lost, signal.SIGCONT)
    await_that(lambda: held(board) == before, "the board stays changed")


@pytest.mark.slow
def test_only_the_folder_that_a_keeper_runs_from_stays(board: Path, tmp_path: Path) -> None:
    """While a profile stands, looks at the board leave nothing there; a restore takes the keeper's folder away too."""
    before = held(board)

    def folders() -> list[Path]:
        return [*tmp_path.glob("polythrottle-board-*")]

    device = open_device(uri(board), ["mem_hz"])
    assert isinstance(device, SshDevice)
    with device:
        device.apply(device.space.default.moved({"mem_hz": device.space.knob("mem_hz").levels[0]}))
        device.hand_over("a profile", None)
    await_that(lambda: not far_sides(tmp_path), "the far side stays")
    kept = folders()
    assert len(kept) == 1
    for _ in range(2):
        assert run(["boards", uri(board)]) == 0
        await_that(lambda: not far_sides(tmp_path), "the far side stays")
        assert folders() == kept
    assert run(["restore", "--device", uri(board)]) == 0
    await_that(lambda: not folders(), "the unpacked folder stays")
    assert held(board) == before


@pytest.mark.slow
def test_nothing_to_restore_on_a_board_that_was_never_steered_is_no_error(
    board: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its host and by a device of it alike; a device that cannot exist stays an error."""
    lines = f"POLYTHROTTLE_STATE_DIR={tmp_path}/state; export POLYTHROTTLE_STATE_DIR"
    monkeypatch.setenv(SSH, stand_in(tmp_path, lines))
    assert run(["restore", "--device", uri(board)]) == 0
    assert run(["restore", "--device", f"ssh://nano/cpu?python={sys.executable}"]) == 0
    assert capsys.readouterr().out == "nothing stands changed\n" * 2
    assert run(["restore", "--device", f"ssh://nano/cpux?python={sys.executable}"]) != 0
    assert run(["restore", "--device", f"ssh://nano/cpu:1?python={sys.executable}"]) != 0


def test_an_error_of_one_of_several_boards_names_it_once(board: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the device that was named, and not as the board of it besides."""
    named = [uri(board), f"ssh://nano/cpu?python={sys.executable}"]
    assert run(["apply", "--confirm", "--device", ",".join(named)]) == DeviceError.exit_code
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(": nothing waits")[0] for line in said] == named
    assert own_words("ssh://nano/cpu", "ssh://nano2: no") == "ssh://nano2: no"
    assert own_words("cpu", "ssh://nano: no") == "ssh://nano: no"


def test_an_error_of_a_board_says_so(board: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be kept in its state folder is told as the board's; what cannot be reached names it once."""
    (tmp_path / "file").touch()
    lines = f"POLYTHROTTLE_STATE_DIR={tmp_path}/file; export POLYTHROTTLE_STATE_DIR"
    monkeypatch.setenv(SSH, stand_in(tmp_path, lines))
    device = open_device(uri(board), ["mem_hz"])
    with pytest.raises(StorageError, match=r"^ssh://nano: cannot .*file"):
        device.__enter__()
    device.board.close()  # type: ignore[attr-defined]
    monkeypatch.setenv(SSH, stand_in(tmp_path, "echo no route >&2; exit 255"))
    with pytest.raises(DeviceError, match=r"^ssh://nano cannot be reached: no route$"):
        open_device(uri(board))


@pytest.mark.slow
def test_two_desks_at_one_board_are_told_of_each_other(board: Path) -> None:
    """The second is refused in a line that names board, user, machine and process; the first is not disturbed."""
    desk_name = re.escape(platform.node())
    pattern = rf"^ssh://nano: jetson .* is being steered by \S+ at {desk_name} \(process \d+, over SSH\)"
    with desk(uri(board)) as first:
        changed = held(board)
        second = open_device(uri(board), ["mem_hz"])
        with pytest.raises(DeviceError, match=pattern) as refused:
            second.__enter__()
        assert f"(process {first.pid}, over SSH)" in str(refused.value)
        second.board.close()  # type: ignore[attr-defined]
        assert held(board) == changed


@pytest.mark.parametrize(
    ("before", "python", "says"),
    [
        (
            "echo 'ssh: Could not resolve hostname nano' >&2; exit 255",
            "python3",
            "cannot be reached: ssh: Could not resolve",
        ),
        ("echo 'nano: Permission denied (publickey).' >&2; exit 255", "python3", "lets nobody in with these keys"),
        ("", "/no/such/python", "there is no /no/such/python on ssh://nano"),
        ("ulimit -f 8", sys.executable, "cannot unpack in .*: File too large"),
        ("echo Welcome to nano", "old", "is Python 3.6, and 3.8 is the oldest"),
        ("exit 0", "python3", "could not start python3"),
        ("exit 0", "python3", r"could not start python3: \S+/stand-in-ssh ended with code 0 and said nothing$"),
        (
            "echo 'This account is currently not available.'; exit 1",
            "python3",
            "could not start python3: the login ended with code 1, and printed last: This account is currently not ava",
        ),
        (
            "printf 'pyenv: python3: command not found\\n\\nNote: See pyenv help.\\n' >&2; exit 127",
            "python3",
            "there is no python3 on ssh://nano: pyenv: python3: command not found; name one there",
        ),
    ],
)
def test_what_is_wrong_with_a_board_is_one_line(
    board: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, python: str, says: str
) -> None:
    """An unknown host, a refused key, no Python, an old one and a full disk are told, and the board is untouched."""
    old = tmp_path / "old-python"
    lie = "import sys; sys.version_info = (3, 6, 9, 'final', 0); exec(sys.argv[1])"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{lie}" "$2"\n')
    old.chmod(0o700)
    monkeypatch.setenv(SSH, stand_in(tmp_path, before))
    found = held(board)
    with pytest.raises(DeviceError, match=says) as caught:
        open_device(f"ssh://nano/jetson?root={board}&python={old if python == 'old' else python}")
    assert "\n" not in str(caught.value)
    assert held(board) == found
    assert not [*tmp_path.glob("polythrottle-board-*")]


@pytest.mark.parametrize("words", [" ", "  \t"])
def test_no_word_in_the_place_of_ssh_is_ssh(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that holds nothing but spaces counts as none."""
    monkeypatch.setenv(SSH, words)
    assert Place("nano").way()[0] == "ssh"


def test_a_malformed_command_in_the_place_of_ssh_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An open quotation mark is told with the variable that holds it, by every command that goes there."""
    monkeypatch.setenv(SSH, "ssh -F '")
    line = f"polythrottle: ${SSH} is no command (No closing quotation); an example: ssh -F board.conf\n"
    for command in ("snapshot", "measure --workload cmd:true", "restore", "top"):
        assert run([*command.split(), "--device", "ssh://nano"]) == 6
        assert capsys.readouterr().err == line


def test_a_login_that_ends_with_no_new_line_is_passed_over(
    board: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that stands before the board's first word is none of it; nor is a line before that."""
    monkeypatch.setenv(SSH, stand_in(tmp_path, "echo Welcome; printf 'prompt> '"))
    device = open_device(uri(board), ["mem_hz"])
    assert isinstance(device, SshDevice)
    assert device.read().temperature_c is not None
    device.board.close()


@pytest.mark.slow
def test_a_login_that_never_ends_is_told_with_what_it_printed(
    board: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that asks something on standard output waits for an answer that nobody gives."""
    monkeypatch.setattr(link, "_PATIENCE_S", 4.0)
    monkeypatch.setenv(SSH, stand_in(tmp_path, "echo Welcome; printf 'Which shell? '; exec cat >/dev/null"))
    told = r"^ssh://nano did not answer within 4 s; what it printed last: Which shell\?$"
    with pytest.raises(DeviceError, match=told):
        open_device(uri(board))


def test_a_login_that_prints_without_end_is_given_up(
    board: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not it begins new lines."""
    monkeypatch.setenv(SSH, stand_in(tmp_path, "exec tr '\\0' x </dev/zero"))
    with pytest.raises(DeviceError, match="prints more at a login"):
        open_device(uri(board))


@pytest.mark.parametrize(
    ("before", "says"),
    [
        (
            "echo 'sh: 1: sudo: not found' >&2; exit 127",
            "there is no sudo on ssh://nano: sh: 1: sudo: not found; log in as root, without --sudo or ",
        ),
        ("echo 'sudo: python3: command not found' >&2; exit 1", "there is no python3 on ssh://nano: sudo: python3"),
    ],
)
def test_sudo_that_is_not_there_is_told_from_what_it_does_not_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, says: str
) -> None:
    """The shell says that there is no sudo, and sudo that there is no Python; neither is a lack of rights."""
    monkeypatch.setenv(SSH, stand_in(tmp_path, before))
    with pytest.raises(DeviceError, match=says) as caught:
        open_device("ssh://nano/jetson?sudo=yes")
    assert not isinstance(caught.value, PermissionDenied)


def test_who_is_not_let_in_is_told_how_to_try_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the program, the user and the port that were used."""
    program = stand_in(tmp_path, "echo 'x@nano: Permission denied (publickey).' >&2; exit 255")
    monkeypatch.setenv(SSH, f"{program} -F board.conf")
    with pytest.raises(PermissionDenied, match=rf"; {program} -F board\.conf -p 2222 -l x nano must work$"):
        open_device("ssh://x@nano:2222/jetson")


def test_a_device_that_no_board_has_is_refused_with_those_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table is none; an actuator there has to listen; auto is what is found there."""
    monkeypatch.setenv(SSH, stand_in(tmp_path))
    with pytest.raises(
        DeviceError, match=r"replay:x\.csv cannot be reached over SSH; jetson, nvml:<GPUs>, cpu and auto can"
    ):
        open_device(f"ssh://nano/replay:x.csv?python={sys.executable}")
    only = "over SSH it is jetson, nvml:<index, UUID, 0-7, 0,2 or all>, cpu or auto"
    with pytest.raises(UnknownName, match=f"^unknown device 'foo'; {only}$"):
        open_device("ssh://nano/foo")
    with pytest.raises(UnknownName, match=rf"did you mean jetson\? \({only}\)"):
        device_here("jetsn?root=/x")
    assert run(["devices", "ssh://nano/foo"]) == run(["devices", "foo"]) == UnknownName.exit_code
    assert run(["doctor", "--device", "ssh://nano/foo"]) == UnknownName.exit_code
    with pytest.raises(DeviceError, match="no actuator listens at x"):
        open_device(f"ssh://nano/actuator:x?python={sys.executable}")
    device = open_device(f"ssh://nano/auto?python={sys.executable}")
    assert isinstance(device, SshDevice)
    assert device.there.startswith(("cpu", "nvml", "jetson"))
    device.board.close()


class _Simulated(FarDevice):
    """A simulated device in the place of the one that a far side reads."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self.clock = device.clock
        self.raw = {}

    def read(self) -> Reading:
        reading: Reading = self._device.read()
        self.raw = {**vars(reading), "clocks_hz": dict(reading.clocks_hz)}
        self.raw = {
            name: value for name, value in self.raw.items() if value not in (None, "") or name == "temperature_c"
        }
        return reading


@pytest.mark.parametrize("precision", [None, 0.05])
@pytest.mark.parametrize("limit_s", [1e-4, 10.0])
def test_what_is_told_of_a_window_amounts_to_what_it_amounts_to_here(precision: float | None, limit_s: float) -> None:
    """A window driven there and judged here ends where it ends on one machine, with the same figures."""
    window = Window(queries=50, duration_s=0.5, most_queries=400, timeout_s=30.0, precision=precision)
    goal = Goal((Constraint("p99", limit_s),))
    setup = Setup(device="sim:jetson-agx-orin?seed=3", workload="efficientnet-b4")

    device, served = setup.open()
    with device, drive(served, CLOSED, device.clock, 0) as load:
        own, own_censored = observe_window(load, device, window, EXACT_SENSOR, goal)

    device, served = setup.open()
    outbox = Outbox()
    with device, drive(served, CLOSED, device.clock, 0) as load:
        there = FarWindow(_Simulated(device), EXACT_SENSOR, outbox, True)
        observe(there, load, window, DeskJudge(window, Verdict(window, goal).least, threading.Event()))
    outbox.tell(["over", {}])
    events = json.loads(json.dumps(outbox.take(0.0)))
    told = Told(lambda verb, **fields: {"events": [events.pop(0) for _ in range(min(7, len(events)))]})
    seen = HostedWindow(device, EXACT_SENSOR, arrivals=CLOSED, told=told)
    censored = observe(seen, seen.load(), window, Verdict(window, goal))

    assert censored == own_censored
    assert own.queries == seen.queries[: len(own.queries)]
    if not censored:
        assert len(seen.queries) == len(own.queries)
        assert measurement_of(seen, censored) == measurement_of(own, own_censored)


def test_what_a_desk_asks_is_checked_there(tmp_path: Path) -> None:
    """Each field has its kind and its bounds; what it is instead is refused in one line that names it."""
    service = FarService("sim:v100", tmp_path / "far.sock")
    try:
        good = service.request(
            {"v": 1, "id": 1, "verb": "hand_over", "token": "t", "holder": "me", "seconds": 60, "confirmed_s": None}
        )
        assert (good.text["holder"], good.fields["seconds"], good.fields["confirmed_s"]) == ("me", 60, None)
        files = service.request({"v": 1, "id": 1, "verb": "files", "device": "", "names": ["/sys/a"]})
        assert files.fields["names"] == ["/sys/a"]
        forced = service.request({"v": 1, "id": 1, "verb": "restore_all", "name": "", "force": True})
        assert forced.fields["force"] is True
        for words, told in (
            ({"verb": "hand_over", "token": "t", "holder": "me", "seconds": 0}, "seconds must be a number above 0"),
            ({"verb": "hand_over", "token": "t", "holder": "me", "seconds": True}, "seconds must be a number above 0"),
            ({"verb": "hand_over", "token": "t", "holder": "me", "seconds": 1e9}, "seconds must be a number above 0"),
            ({"verb": "hand_over", "token": "t", "holder": "a\nb", "seconds": 1}, "holder must be a text"),
            ({"verb": "restore_all", "name": "", "force": 1}, "force must be true or false"),
            ({"verb": "files", "device": "", "names": "a"}, "names must be a list of at most"),
            ({"verb": "files", "device": "", "names": [1]}, "names must be a list of at most"),
            ({"verb": "files", "device": "", "names": ["a"] * (_MOST_NAMES + 1)}, "names must be a list of at most"),
            ({"verb": "work", "token": "t", "message": []}, "message must be an object"),
        ):
            with pytest.raises(InvalidInput, match=told):
                service.request({"v": 1, "id": 1, **words})
    finally:
        service.close()


def test_outcomes_and_leases_travel_whole() -> None:
    """What was restored there, and what stands with the time that is left of it, are the same here."""
    left = Difference("clock", "1", "2", "changed since")
    outcome = Outcome("jetson", ("limit",), foreign=(left,), damage=("line 2",))
    assert _outcome(json.loads(json.dumps(asdict(outcome)))) == outcome
    lease = Lease(3, "boot", holder="tuned.toml", expires_s=boot_s() + 60.0, applied=True)
    stands = Standing("jetson", ("clock",), lease, ("line 1",))
    travelled = json.loads(json.dumps({**asdict(stands), "expires_in_s": 60.0}))
    there = _standing(travelled)
    assert (there.device, there.keys, there.damage, there.lease.holder) == (
        "jetson",
        ("clock",),
        ("line 1",),
        "tuned.toml",
    )
    assert there.expires_in_s == pytest.approx(60.0, abs=30.0)
    assert _standing({**travelled, "expires_in_s": None}).expires_in_s is None
