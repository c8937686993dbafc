"""Applying a profile by hand, and giving the device back."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from boards_over_ssh import held, planted, stand_in
from builders import FakeDevice, measured, problem, study
from typing_extensions import Self

from polythrottle.actuation import Actuator, Control, Outcome, standing
from polythrottle.backends import open_device
from polythrottle.backends.jetson import JetsonDevice
from polythrottle.backends.ssh import SshDevice
from polythrottle.board.link import SSH
from polythrottle.catalog.tuned_profiles import find_profile, read_profile, write_profile
from polythrottle.cli.commands import run
from polythrottle.domain.errors import INTERRUPTED, BadFile, DeviceError, InvalidInput
from polythrottle.domain.ports import Finding, Lasting
from polythrottle.domain.profile import Profile
from polythrottle.domain.space import Knob, OperatingPoint, SearchSpace
from polythrottle.domain.study import Study, Trial
from polythrottle.inspect.machine import record_findings
from polythrottle.optimize import RandomOrder
from polythrottle.optimize.options import WarmStart, nearest_point
from polythrottle.storage.identity import disagreement, identity_of
from polythrottle.testing import BOARDS, FakeKernel, Fault, plant
from polythrottle.testing.nvml import FakeNvml, compiler
from polythrottle.tuning import apply as applying
from polythrottle.tuning.apply import Stay, apply_profile

ORIN = {"board": "Orin", "l4t": "36.4"}


class OneKnob(FakeDevice):
    """A device of one file, written by an actuator as a real one is."""

    def __init__(self, file: Path, identity: Mapping[str, str] = ORIN) -> None:
        super().__init__()
        self.identity = identity
        self.actuator = Actuator("one", guarded=False)
        self.actuator.allow(Control(str(file), frozenset({"400", "800", "1200"})))
        self.file = file

    def apply(self, point: OperatingPoint) -> None:
        """Write the clock in MHz."""
        self.actuator.write(str(self.file), str(int(point["gpu_max_hz"]) // 1_000_000))

    def findings(self) -> tuple[Finding, ...]:
        """Say why the memory clock is off."""
        return (Finding("mem_hz", False, "debugfs is closed"),)

    def hand_over(self, holder: str, seconds: float | None, confirmed_s: float | None = None) -> str:
        """Leave the file as it is."""
        self.actuator.hand_over(holder, seconds, confirmed_s)
        return self.actuator.device

    def __enter__(self) -> Self:
        self.actuator.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.actuator.__exit__(kind, error, trace)


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make every URI open the device of one file, and end what still guards it afterwards."""
    file = tmp_path / "max_freq"
    file.write_text("1200\n")
    monkeypatch.setattr(applying, "open_device", lambda uri, knobs: OneKnob(file))
    yield file
    assert run(["restore", "--force"]) in (0, 6)


def tuned(**changes: Any) -> Profile:
    """Return a profile for the device of one file."""
    words: dict[str, Any] = {
        "device": "one",
        "workload": "resnet50",
        "point": OperatingPoint({"gpu_max_hz": 800_000_000, "batch_size": 4}),
        "measurement": measured(),
        "identity": ORIN,
        "workload_knobs": ("batch_size",),
    }
    return Profile(**{**words, **changes})


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """Return the file of that profile."""
    write_profile(tuned(), tmp_path / "p.toml")
    return str(tmp_path / "p.toml")


def document(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    """Run a command with --json and return its one document."""
    capsys.readouterr()
    assert run([*arguments, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_devices_part_is_set_and_the_workloads_is_named(
    board: Path, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Clocks are written, the batch size is left to who serves the model, and the document says both."""
    found = document(capsys, "apply", profile)
    assert board.read_text() == "800"
    assert found["point"] == {"gpu_max_hz": 800_000_000}
    assert found["workload_point"] == {"batch_size": 4}
    assert (found["stands_as"], found["confirm_within_s"], found["for_s"]) == ("one", 60, None)
    assert document(capsys, "restore")["clean"]
    assert board.read_text() == "1200"


def test_on_a_terminal_it_asks_about_the_device_that_was_set(
    board: Path, profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name on record: a no puts back that one and no other."""
    asked: list[tuple[str | None, float]] = []
    monkeypatch.setattr("polythrottle.cli.apply._ask", lambda name, within_s: asked.append((name, within_s)))
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    assert run(["apply", profile]) == 0
    assert asked == [("one", 60.0)]
    assert run(["restore"]) == 0
    assert board.read_text() == "1200"


def test_without_a_terminal_it_says_how_to_confirm(
    board: Path, profile: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 80 columns: what is to be done in the server, how long it stands, and how to confirm."""
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["apply", profile]) == 0
    shown = capsys.readouterr()
    assert "batch_size=4: belongs to the workload" in " ".join(shown.out.split())
    assert "for 1 minute; once confirmed, until polythrottle restore or a reboot" in " ".join(shown.out.split())
    assert shown.err == "confirm with: polythrottle apply --confirm (within 60 s)\n"
    *lines, path = shown.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert path == f"profile {profile}"  # whole, however long, so that it can be copied


@pytest.mark.slow
@pytest.mark.parametrize("far", [False, True])
def test_interrupted_while_it_is_left_in_place_it_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], far: bool
) -> None:
    """Whether or not the answer was waited for: nothing stands, and the code is that of a Ctrl-C."""
    root = planted(tmp_path)
    before = held(root)
    monkeypatch.setenv(SSH, stand_in(tmp_path))
    uri = f"ssh://nano/jetson?root={root}&python={sys.executable}" if far else f"jetson?root={root}"
    with open_device(uri, ["mem_hz"]) as device:
        point = OperatingPoint({"mem_hz": device.space.knob("mem_hz").levels[0]})
        write_profile(tuned(device=uri, point=point, identity=identity_of(device)), tmp_path / "far.toml")
    kind: Any = SshDevice if far else JetsonDevice
    leave = kind.hand_over

    def interrupted(self: Any, *words: Any) -> None:
        if far:
            self.board.line._own_answer = lambda *_: left_alone(self.board.line)
        leave(self, *words)
        assert held(root) != before
        raise KeyboardInterrupt

    def left_alone(line: Any) -> None:
        del line._own_answer
        raise KeyboardInterrupt

    monkeypatch.setattr(kind, "hand_over", interrupted)
    assert run(["apply", str(tmp_path / "far.toml"), "--device", uri, "--keep"]) == INTERRUPTED
    assert capsys.readouterr().err == f"interrupted; {uri} is put back\npolythrottle: interrupted\n"
    assert held(root) == before
    assert standing() == ()


def test_interrupted_once_it_stands_it_says_so(
    board: Path, profile: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was applied and not yet told stands, and a line says for how long and how to put it back."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("polythrottle.cli.apply._print_applied", interrupted)
    assert run(["apply", profile, "--keep"]) == INTERRUPTED
    said = "the profile stands until polythrottle restore or a reboot; put it back with polythrottle restore --device"
    assert said in capsys.readouterr().err
    assert board.read_text() == "800"


def test_what_an_interrupted_apply_cannot_put_back_is_said(
    board: Path, profile: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or is interrupted at once more: the line names the command that puts it back."""

    def left(self: OneKnob, *words: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(OneKnob, "hand_over", left)
    for error, why in ((KeyboardInterrupt(), "interrupted once more"), (DeviceError("no route to it"), "no route")):

        def failing(*_: object, error: BaseException = error, **__: object) -> None:
            raise error

        monkeypatch.setattr("polythrottle.api.deployment.restore", failing)
        assert run(["apply", profile, "--keep"]) == DeviceError.exit_code
        said = capsys.readouterr().err
        assert f"the profile may stand: {why}" in said
        assert "put it back with polythrottle restore --device" in said


def test_unconfirmed_it_reverts_by_itself(board: Path, profile: str) -> None:
    """A guard process puts the clock back when the time is over, and nothing stands then."""
    assert run(["apply", profile, "--confirm-within", "0.2"]) == 0
    guard = standing()[0].lease.pid
    handle = os.pidfd_open(guard)
    assert select.select([handle], [], [], 60)[0]
    os.close(handle)
    assert board.read_text() == "1200"
    assert run(["apply", "--confirm"]) == DeviceError.exit_code


def test_confirmed_it_stands_until_restored(board: Path, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    """No guard is left to revert it; a second profile is refused with the holder's name until then."""
    assert run(["apply", profile]) == 0
    assert document(capsys, "apply", "--confirm")["confirmed"] == [{"device": "one", "for_s": None}]
    assert standing()[0].lease.kept
    assert run(["apply", profile]) == DeviceError.exit_code
    assert "profile resnet50" in capsys.readouterr().err
    assert run(["restore", "--device", "one"]) == 0
    assert "one: 1 put back, 0 left" in capsys.readouterr().out
    assert run(["restore", "--device", "one"]) == 0  # known by its record, whatever stands
    assert board.read_text() == "1200"


@pytest.mark.slow
@pytest.mark.parametrize(("words", "kept", "expires"), [(["--keep"], True, False), (["--for", "2h"], False, True)])
def test_for_and_keep_need_no_confirmation(
    board: Path, profile: str, words: list[str], kept: bool, expires: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who says how long has confirmed already."""
    assert run(["apply", profile, *words]) == 0
    assert "confirm" not in capsys.readouterr().err
    lease = standing()[0].lease
    assert lease.kept is kept
    assert (lease.expires_s is not None) is expires


def test_for_beside_confirm_within_counts_from_the_confirmation(
    board: Path, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half a minute to confirm, two hours from then on."""
    assert run(["apply", profile, "--for", "2h", "--confirm-within", "30"]) == 0
    first = standing()[0].expires_in_s
    found = document(capsys, "apply", "--confirm", "--device", "one")["confirmed"]
    assert first is not None
    assert first <= 30 < found[0]["for_s"] <= 7200


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "say which profile"),
        (["p.toml", "--keep", "--for", "2h"], "exclude each other"),
        (["p.toml", "--confirm"], "--confirm goes alone"),
        (["p.toml", "--for", "soon"], "not a span of time"),
        (["p.toml", "--confirm-within", "0"], "a time above zero"),
        (["p.toml", "--confirm-within", "nan"], "a time above zero"),
        (["--confirm"], "nothing waits to be confirmed"),
        (["none"], "unknown profile 'none'"),
    ],
)
def test_wrong_words_are_one_clear_line(
    board: Path, profile: str, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And nothing is written."""
    assert run(["apply", *words]) != 0
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert board.read_text() == "1200\n"
    assert not standing()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"identity": {"board": "Nano", "l4t": "36.4"}}, "board Nano, and this is board Orin"),
        ({"identity": {"board": "Orin", "l4t": "35.4"}}, "l4t 35.4, and this is l4t 36.4"),
        ({"identity": {}}, "tuned on unknown hardware, and this is board Orin, l4t 36.4"),
        ({"point": OperatingPoint({"gpu_max_hz": 900_000_000})}, "no gpu_max_mhz=900 now; the nearest: 800 MHz"),
        ({"point": OperatingPoint({"mem_hz": 1})}, "mem_mhz cannot be set on a test device now: debugfs is closed"),
    ],
)
def test_a_profile_for_something_else_is_refused_with_both_named(
    board: Path, changes: dict[str, Any], told: str
) -> None:
    """Other board, other firmware, nobody knows which, other levels, a knob that is off here: nothing is written."""
    with pytest.raises(BadFile, match=told):
        apply_profile(tuned(**changes), Stay())
    assert board.read_text() == "1200\n"
    assert not standing()


def test_another_individual_of_the_same_kind_is_no_other_board() -> None:
    """A serial number tells two boards apart, but a profile is for their kind."""
    assert disagreement({**ORIN, "uuid": "GPU-1"}, {**ORIN, "uuid": "GPU-2"}) is None
    assert disagreement({"uuid": "GPU-1"}, {"uuid": "GPU-1"}) is not None


def test_a_profile_says_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Tuning writes the hardware and whose the knobs are; both are read back."""
    words = ["--device", "sim:jetson-nano", "--workload", "mobilenetv2", "--trials", "1", "--no-presets"]
    found = read_profile(Path(document(capsys, "tune", *words, "--method", "random")["profile"]))
    assert found.identity == {"board": "sim:jetson-nano"}
    assert found.workload_knobs == ("batch_size",)


@pytest.mark.parametrize(
    "text", ["workload_knobs = 3\n", 'workload_knobs = "x"\n', "workload_knobs = [1]\n", "[identity]\nboard = 3\n"]
)
def test_a_damaged_identity_is_a_bad_file(profile: str, text: str) -> None:
    """What says what a profile is for must be text."""
    path = Path(profile)
    lines = path.read_text().replace('workload_knobs = [\n    "batch_size",\n]\n', "").split("\n[identity]")[0]
    path.write_text(text + lines if text.startswith("w") else lines + "\n" + text)
    with pytest.raises(BadFile, match="is not a profile"):
        read_profile(path)


def test_on_a_simulated_board_nothing_is_kept_and_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """The name of a profile finds it; it is refused on another board."""
    words = ["--device", "sim:jetson-nano", "--workload", "mobilenetv2", "--trials", "1", "--no-presets"]
    assert run(["tune", *words, "--method", "random"]) == 0
    found = document(capsys, "apply", "sim-jetson-nano/mobilenetv2")
    assert (found["simulated"], found["stands_as"]) == (True, None)
    assert run(["apply", "sim-jetson-nano/mobilenetv2"]) == 0
    assert "simulated: nothing was kept" in capsys.readouterr().out
    assert run(["apply", "sim-jetson-nano/mobilenetv2", "-d", "sim:jetson-tx2"]) == BadFile.exit_code
    assert "tuned on board sim:jetson-nano, and this is board sim:jetson-tx2" in capsys.readouterr().err
    assert not standing()


def test_a_recorded_table_takes_no_profile(tmp_path: Path) -> None:
    """There is nothing to set on it."""
    (tmp_path / "t.csv").write_text("gpu_max_hz,latency_s,energy_j\n800000000,0.1,1\n1200000000,0.1,1\n")
    point = OperatingPoint({"gpu_max_hz": 800_000_000})
    with pytest.raises(InvalidInput, match="is a recorded table"):
        apply_profile(tuned(device="replay:t.csv", point=point, identity={}), Stay())


def test_a_device_that_nothing_would_restore_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real device must be able to hand its settings over to a guard."""
    from polythrottle.domain.clock import SystemClock

    device = FakeDevice()
    device.clock = SystemClock()  # type: ignore[assignment]
    monkeypatch.setattr(applying, "open_device", lambda uri, knobs: device)
    with pytest.raises(DeviceError, match="nothing would restore it"):
        apply_profile(tuned(identity={"board": "sim:test"}), Stay())
    assert device.log == []


@pytest.mark.slow
def test_what_someone_else_changed_since_is_left_and_told(
    board: Path, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 6 and why; --force puts it back all the same."""
    assert run(["apply", profile, "--keep"]) == 0
    board.write_text("400\n")
    found = document(capsys, "restore", code=6)
    assert not found["clean"]
    assert found["restored"][0]["foreign"][0]["reason"] == "changed by someone else since, left alone"
    assert board.read_text() == "400\n"


def test_force_undoes_what_someone_else_changed(board: Path, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Who forces wants the originals, whoever wrote last."""
    assert run(["apply", profile, "--keep"]) == 0
    board.write_text("400\n")
    assert run(["restore", "--force"]) == 0
    assert f"put back  {board}" in capsys.readouterr().out
    assert board.read_text() == "1200"


def test_a_living_holder_is_not_ended_without_force(board: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Restore names who is steering, and leaves it its device."""
    with OneKnob(board) as device:
        device.apply(OperatingPoint({"gpu_max_hz": 800_000_000}))
        assert run(["restore"]) == DeviceError.exit_code
        assert f"process {os.getpid()}" in capsys.readouterr().err
        assert board.read_text() == "800"


def test_where_nothing_stands_restore_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """In words, and as an empty list; a device that nobody knows is a slip, and does not read as put back."""
    assert run(["restore"]) == 0
    assert capsys.readouterr().out == "nothing stands changed\n"
    for device in ("cpu", "sim:jetson-nano", "nvml:0", "jetson"):
        assert document(capsys, "restore", "--device", device) == {"restored": [], "clean": True}
    for device, code in {"one": 3, "sim:nope": 3, "": 3, "ünïcode": 3, "cpu:x": 3, "nvml:7-0": 2}.items():
        assert run(["restore", "--device", device]) == code
        shown = capsys.readouterr()
        assert (shown.out, shown.err.count("\n")) == ("", 1)


@pytest.mark.slow
def test_restoring_loads_neither_numpy_nor_torch(board: Path, profile: str) -> None:
    """It needs no more than Python and the driver, so that it works when all else is broken."""
    assert run(["apply", profile, "--keep"]) == 0
    code = (
        "import sys\nfrom polythrottle.cli.commands import run\ncode = run(['restore', '--json'])\n"
        "sys.stderr.write(str([m for m in ('numpy', 'torch', 'rich.console', 'pynvml') if m in sys.modules]))\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "[]"
    assert json.loads(done.stdout)["clean"]
    assert board.read_text() == "1200"


PROGRAM = """
import sys
from pathlib import Path
sys.path[:0] = {tests!r}
from test_apply import OneKnob
from polythrottle.tuning import apply as applying
from polythrottle.cli.commands import run
applying.open_device = lambda uri, knobs: OneKnob(Path({file!r}))
sys.exit(run(["apply", {profile!r}, "--confirm-within", "120"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "left", "code"),
    [(b"y\n", "800", 0), (b"n\n", "1200", 0), (b"\n", "1200", 0), (None, "1200", 130)],
)
def test_on_a_terminal_it_asks(board: Path, profile: str, answer: bytes | None, left: str, code: int) -> None:
    """Only yes keeps it; no, nothing and Ctrl-C put it back at once."""
    program = PROGRAM.format(tests=[str(each) for each in Path(__file__).parents[:2]], file=str(board), profile=profile)
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=theirs, stdout=subprocess.DEVNULL, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    seen = b""
    while b"keep? [y/N]" not in seen:
        seen += os.read(ours, 1000)
    assert board.read_text() == "800"
    if answer is None:
        child.send_signal(signal.SIGINT)
    else:
        os.write(ours, answer)
    assert child.wait(60) == code
    os.close(ours)
    assert board.read_text() == left


@pytest.mark.slow
@pytest.mark.parametrize("name", BOARDS)
def test_every_board_takes_a_profile_and_gives_it_back(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Applied, kept, named by doctor, restored: every control holds again what it held."""
    root = plant(name, tmp_path / "board")
    kernel, uri = FakeKernel(root), f"jetson?root={root}"
    with kernel.installed():
        device = open_device(uri)
        assert isinstance(device, Lasting)
        point = device.space[0].moved({"batch_size": 8})
        write_profile(tuned(device=uri, point=point, identity=identity_of(device)), tmp_path / "p.toml")
        before = kernel.snapshot()
        found = document(capsys, "apply", "p.toml", "--keep")
        assert found["stands_as"] == f"jetson {root.resolve()}"
        assert kernel.snapshot() != before
        assert run(["doctor", "--device", "sim:jetson-nano"]) == 0
        [stands] = [each for each in record_findings() if each.subject == found["stands_as"]]
        assert "profile resnet50 stands" in stands.explanation
        capsys.readouterr()
        assert document(capsys, "restore", "--device", uri)["clean"]
    assert kernel.snapshot() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [Fault("EIO", nth=2), Fault("EINVAL"), Fault("ignore", nth=2), Fault("round", match="*max_freq")]
)
def test_a_profile_that_the_kernel_does_not_take_is_taken_back(
    fault: Fault, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half a profile is never left: one line says what was refused, every control is as it was, nothing stands."""
    root = plant("jetson-agx-orin-jp6", tmp_path / "board")
    kernel, uri = FakeKernel(root), f"jetson?root={root}"
    with kernel.installed():
        device = open_device(uri)
        point = device.space[len(device.space) // 2]
        profile = tuned(device=uri, point=point, identity=identity_of(device), workload_knobs=())
        write_profile(profile, tmp_path / "p.toml")
        before = kernel.snapshot()
        kernel.fail(fault)
        assert run(["apply", "p.toml", "--keep"]) == DeviceError.exit_code
        error = capsys.readouterr().err
        assert "the profile was not applied, and what was set is restored" in error
        assert error.count("\n") == 1
    assert kernel.snapshot() == before
    assert not standing()


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="no C compiler, so the stand-in NVIDIA driver cannot be built")
@pytest.mark.parametrize("model", ["a100", "v100"])
def test_a_gpu_takes_a_profile_and_gives_it_back(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Applied, kept, restored: the driver holds again what it held; one for another driver version is refused."""
    with FakeNvml(tmp_path / "nvml", [model]) as fake:
        device = open_device("nvml:0")
        assert isinstance(device, Lasting)
        point = device.space[len(device.space) // 2]
        profile = tuned(device=device.uri, point=point, identity=identity_of(device), workload_knobs=())
        write_profile(profile, tmp_path / "p.toml")
        before = fake.snapshot()
        found = document(capsys, "apply", "p.toml", "--keep")
        assert found["stands_as"] == f"nvml {fake.uuid(0)}"
        assert fake.snapshot() != before
        assert document(capsys, "restore", "--device", device.uri)["clean"]
        assert fake.snapshot() == before
        fake.set(0, persistence=0)
        assert "persistence mode is off" in document(capsys, "apply", "p.toml", "--keep")["remark"]
        assert run(["restore"]) == 0
        write_profile(replace(profile, identity={**profile.identity, "driver": "1.2"}), tmp_path / "p.toml")
        assert run(["apply", "p.toml"]) == BadFile.exit_code
        assert "driver 1.2, and this is driver" in capsys.readouterr().err


def test_a_profile_tuned_under_another_firmware_is_refused_on_a_board(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same board with another release of its software: both are named, nothing is written."""
    old, new = (plant(f"jetson-agx-orin-{release}", tmp_path / release) for release in ("jp5", "jp6"))
    device = open_device(f"jetson?root={old}")
    profile = tuned(device=device.uri, point=device.space[0], identity=identity_of(device), workload_knobs=())
    write_profile(profile, tmp_path / "p.toml")
    assert run(["apply", "p.toml", "--device", f"jetson?root={new}"]) == BadFile.exit_code
    error = capsys.readouterr().err
    assert "l4t 35.4.1, jetpack 5, and this is l4t 36.4.0" in error
    assert not FakeKernel(new).writes()


def test_a_prior_is_tried_right_after_the_default() -> None:
    """Each at the nearest point of the space; then the method goes on as it would have."""
    method = WarmStart(RandomOrder(), [{"gpu_max_hz": 410_000_000, "batch_size": 3, "unknown": 1}])
    begun = Study(problem())
    assert method.suggest(begun) == begun.problem.space.default
    begun = study("mean<=1s", energies=(1.0,), latencies=(0.01,))
    second = method.suggest(begun)
    assert dict(second) == {"gpu_max_hz": 400_000_000, "batch_size": 4}
    assert method.saving_left(begun) == float("inf")
    third = begun.with_trial(Trial(1, second, measured()))
    assert method.suggest(third) == RandomOrder().suggest(third)


def test_a_method_that_chooses_still_does_behind_priors() -> None:
    """The answer is the method's, not the least figure; a method that chooses none leaves it to the figures."""
    seen = study("mean<=1s", energies=(2.0, 1.0), latencies=(0.01, 0.01))

    class First(RandomOrder):
        def answer(self, study: Study) -> Trial | None:
            return study.trials[0]

    assert WarmStart(First(), []).answer(seen) == seen.trials[0]
    assert WarmStart(RandomOrder(), []).answer(seen) == seen.best == seen.trials[1]


def test_the_nearest_point_is_one_of_the_space() -> None:
    """Octaves count between numbers; a name is the same or not; a point that cannot be applied is never offered."""
    knobs = (Knob("low", (1, 2, 4)), Knob("high", (1, 2, 4)), Knob("mode", ("a", "b")))
    space = SearchSpace.grid(knobs, {"low": 1, "high": 4, "mode": "a"}, lambda point: point["low"] <= point["high"])
    assert dict(nearest_point(space, {"low": 3, "high": 3, "mode": "b"})) in [dict(point) for point in space]
    assert dict(nearest_point(space, {"low": 4, "high": 1}))["mode"] == "a"
    assert dict(nearest_point(space, {"mode": "b"})) == {"low": 1, "high": 4, "mode": "b"}


@pytest.mark.slow
def test_tune_offers_a_profile_of_another_board_to_the_search(capsys: pytest.CaptureFixture[str]) -> None:
    """As the second trial, also when the study is resumed from its journal alone."""
    words = ["--workload", "mobilenetv2", "--no-presets", "--method", "random"]
    assert run(["tune", "--device", "sim:jetson-tx2", *words, "--trials", "3"]) == 0
    known = dict(read_profile(find_profile("sim-jetson-tx2/mobilenetv2")).point)
    more = ["--device", "sim:jetson-nano", "--as-prior", "sim-jetson-tx2/mobilenetv2", "--trials"]
    assert run(["tune", *words, *more, "1"]) == 0
    assert "offered by a profile and tried right after the default: " in capsys.readouterr().err
    found = document(capsys, "tune", *words, *more, "1", "--fresh")
    found = document(capsys, "tune", "--resume", found["journal"], "--trials", "2")
    second = found["trials"][1]["point"]
    assert second["batch_size"] == known["batch_size"]
    assert run(["tune", *words, *more, "2", "--journal", found["journal"]]) == 0
    other = ["--device", "sim:jetson-nano", "--trials", "2", "--journal", found["journal"]]
    assert run(["tune", *words, *other]) == BadFile.exit_code
    assert "other priors" in capsys.readouterr().err


def test_what_nobody_can_read_back_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Locked clocks of NVIDIA's take their original, but whether they kept it is not known."""
    done = Outcome("nvml GPU-1", restored=("nvml:GPU-1/gpu_clocks",), unverified=("nvml:GPU-1/gpu_clocks",))
    monkeypatch.setattr("polythrottle.actuation.restore.restore_all", lambda **_: (done,))
    assert run(["restore"]) == 0
    assert "unproven  nvml:GPU-1/gpu_clocks" in capsys.readouterr().out
