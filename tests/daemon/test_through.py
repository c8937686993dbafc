"""Commands that go through the daemon where it holds the device."""

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from builders import measured
from daemons import LADDER
from scripted import Script, daemon

from polythrottle.actuation.rollback import Outcome
from polythrottle.api import deployment
from polythrottle.api.deployment import same_device
from polythrottle.catalog.tuned_profiles import write_profile
from polythrottle.cli.commands import run
from polythrottle.daemon.client import default_socket
from polythrottle.daemon.commands import ApplyProfile, Confirm, Release
from polythrottle.domain.errors import DeviceError
from polythrottle.domain.profile import Profile
from polythrottle.domain.space import OperatingPoint


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    """Return the control loop of this user's daemon, which takes every profile and steers a simulated Orin."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("POLYTHROTTLE_RUN_DIR", folder)
        monkeypatch.setattr("scripted.PROFILES", _Every())
        with daemon(default_socket()) as (script, _):
            yield script


class _Every(tuple[str, ...]):
    """Names of profiles, all that there could be."""

    def __contains__(self, name: object) -> bool:
        return True


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Return a profile for the device of the scripted daemon."""
    path = tmp_path / "orin.toml"
    point = OperatingPoint({"gpu_max_hz": 828_750_000, "batch_size": 4})
    write_profile(Profile("sim:jetson-agx-orin", "resnet50", point, measured()), path)
    return path


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Return exit code, standard output and standard error of a command."""
    code = run(words)
    return code, *capsys.readouterr()


def test_apply_goes_through_the_daemon(script: Script, profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says so, says that nothing was set where it is simulated, and how to confirm."""
    code, out, err = told(capsys, "apply", str(profile))
    assert (code, script.wishes) == (0, [ApplyProfile(str(profile), 60.0)])
    assert "through the daemon at" in out
    assert "simulated" in out
    assert "polythrottle apply --confirm (within 60 s)" in err


def test_apply_tells_programs_the_same(script: Script, profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As one document; kept for good where that was asked."""
    code, out, err = told(capsys, "apply", str(profile), "--keep", "--json")
    found = json.loads(out)
    assert (code, err, script.wishes) == (0, "", [ApplyProfile(str(profile), None)])
    assert (found["through"], found["point"], found["simulated"]) == (
        str(Path(os.environ["POLYTHROTTLE_RUN_DIR"]) / "daemon" / "daemon.sock"),
        {"gpu_max_hz": 828_750_000},
        True,
    )


def test_where_rungs_are_followed_no_point_is_told(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A profile with a ladder is followed by the load, so that its one point is not what is set."""
    point = LADDER.rungs[0].service.point
    made = Profile("sim:jetson-agx-orin", "resnet50", point, measured(), workload_knobs=("batch_size",), ladder=LADDER)
    write_profile(made, tmp_path / "ladder.toml")
    found = json.loads(told(capsys, "apply", str(tmp_path / "ladder.toml"), "--json")[1])
    assert (found["point"], found["workload_point"], found["rungs"]) == (None, None, 3)


def test_a_time_to_stand_is_not_the_daemons(script: Script, profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused instead of forgotten."""
    code, _, err = told(capsys, "apply", str(profile), "--for", "2h")
    assert (code, script.wishes) == (2, [])
    assert "--no-daemon" in err


def test_no_daemon_avoids_it(script: Script, profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The device is opened here, as without a daemon."""
    code, out, _ = told(capsys, "apply", str(profile), "--no-daemon", "--json")
    assert (code, script.wishes) == (0, [])
    assert json.loads(out)["simulated"]


def test_another_device_is_applied_to_without_it(
    script: Script, profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The daemon holds one device only."""
    script.show(device="sim:a100-sxm4")
    code, _, _ = told(capsys, "apply", str(profile))
    assert (code, script.wishes) == (0, [])


def test_what_the_daemon_says_no_with_is_the_commands_error(
    script: Script, profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its exit code."""
    script.refuses = DeviceError("the board is away")
    assert told(capsys, "apply", str(profile))[::2] == (6, "polythrottle: the board is away\n")


def test_confirm_goes_to_whoever_waits(script: Script, profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To the daemon while it tries a profile, else to what stands without it."""
    assert "nothing waits to be confirmed: it has reverted" in told(capsys, "apply", "--confirm")[2]
    told(capsys, "apply", str(profile))
    code, out, _ = told(capsys, "apply", "--confirm")
    assert (code, script.wishes[-1]) == (0, Confirm())
    assert "through the daemon" in out
    script.show(unconfirmed="orin")
    script.refuses = DeviceError("the board is away")
    assert told(capsys, "apply", "--confirm")[::2] == (6, "polythrottle: the board is away\n")


def test_restore_releases(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """The daemon puts its board back; a device it does not hold is none of its business."""
    assert told(capsys, "restore", "--device", "cpu")[0] == 0
    assert told(capsys, "restore", "--force")[0] == 0
    assert script.wishes == []
    code, out, _ = told(capsys, "restore", "--json")
    assert (code, script.wishes) == (0, [Release("polythrottle restore")])
    assert json.loads(out)["released"]["device"] == "sim:jetson-agx-orin"
    assert "through the daemon" in told(capsys, "restore", "--device", "sim:jetson-agx-orin?seed=3")[1]


def test_a_board_that_the_daemon_could_not_put_back_is_no_success(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    """It gives the board back and says what is left: the exit code is that of a restore from here."""
    script.clean = False
    code, out, _ = told(capsys, "restore")
    assert (code, "through the daemon" in out) == (6, True)
    assert json.loads(told(capsys, "restore", "--json")[1])["clean"] is False


def test_a_gpu_beside_those_of_the_daemon_is_put_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that are named: the daemon has given back its own, and a profile applied by hand stands on another."""
    restored: list[Sequence[str | None]] = []

    def put_back(names: Sequence[str | None], *, force: bool) -> tuple[Outcome, ...]:
        restored.append(list(names))
        return ()

    said = deployment.DaemonReply("nvml:0", "a socket", "done")
    monkeypatch.setattr(deployment, "_released", lambda device, told: (said, True))
    monkeypatch.setattr(deployment, "_beside_daemon", lambda: ["nvml GPU-2", "jetson"])
    monkeypatch.setattr(deployment, "_concerned", lambda device: ["nvml GPU-0", "nvml GPU-2"] if device else [None])
    monkeypatch.setattr(deployment, "all_restored", put_back)
    assert deployment.restore("nvml:0,2").released is said
    assert deployment.restore().clean
    assert restored == [["nvml GPU-2"], ["nvml GPU-2", "jetson"]]


def test_restore_goes_on_without_a_daemon_that_cannot(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """What it says is shown, and what stands is put back from here."""
    script.refuses = DeviceError("the actuator is away")
    code, out, err = told(capsys, "restore")
    assert (code, out) == (0, "nothing stands changed\n")
    assert "the actuator is away" in err


def test_a_dead_daemons_socket_is_no_daemon(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything works as without one."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("POLYTHROTTLE_RUN_DIR", folder)
        default_socket().parent.mkdir()
        default_socket().touch()
        assert told(capsys, "apply", str(profile))[0] == 0
        assert told(capsys, "restore")[:2] == (0, "nothing stands changed\n")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("nvml", "nvml:0", True),
        ("jetson?root=/a/../b", "jetson?root=/b", True),
        ("jetson", "jetson?root=/b", False),
        ("sim:a?seed=1", "sim:a", True),
        ("sim:a", "sim:b", False),
    ],
)
def test_a_device_is_known_by_name_and_root(one: str, other: str, same: bool) -> None:
    """Not by the seed of a simulation."""
    assert same_device(one, other) is same
