"""The administrator's limits: read once, kept by every backend."""

import os
from pathlib import Path

import pytest

from polythrottle.actuation import Actuator, Control, Limits, SysFiles, restore_all
from polythrottle.cli.commands import run
from polythrottle.domain.errors import BadFile, KnobRejected


def limits(tmp_path: Path, text: str) -> Limits:
    """Return the limits a file states."""
    (tmp_path / "limits.toml").write_text(text)
    return Limits.read(tmp_path / "limits.toml")


def test_levels_outside_are_left_out(tmp_path: Path) -> None:
    """Bounds are read in the unit of their key and kept in SI; what nobody bounds passes."""
    found = limits(tmp_path, "[nvml]\ngpu_max_mhz = { min = 600, max = 1200 }\npower_limit_w = { min = 200 }\n")
    assert found.within("nvml", "gpu_max_hz", (300_000_000, 600_000_000, 1_300_000_000)) == (600_000_000,)
    assert found.within("nvml", "power_limit_w", (150, 200, 400)) == (200, 400)
    assert found.within("cpu", "gpu_max_hz", (1,)) == (1,)
    assert found.within("nvml", "cpu_epp", ("power",)) == ("power",)


def test_one_device_can_be_bounded_further(tmp_path: Path) -> None:
    """The table of a device counts besides that of its kind, and the tighter bound wins."""
    found = limits(
        tmp_path, '[nvml]\npower_limit_w = { max = 400 }\n["GPU-1"]\npower_limit_w = { min = 100, max = 300 }\n'
    )
    assert found.within("nvml", "power_limit_w", (50, 100, 300, 400), "GPU-1") == (100, 300)
    assert found.within("nvml", "power_limit_w", (50, 400), "GPU-2") == (50, 400)


def test_without_a_file_there_are_none(tmp_path: Path) -> None:
    """No file, no bounds."""
    assert Limits.read(tmp_path / "none.toml") == Limits()


@pytest.mark.parametrize(
    "text",
    [
        *("nvml = 3", "[nvml]\npower_limit_w = 300", "[nvml]\npower_limit_w = {}", "[nvml"),
        *("[nvml]\npower_limit_w = { most = 3 }", "[nvml]\npower_limit_w = { min = true }"),
        "[nvml]\npower_limit_w = { min = 300, max = 200 }",
        *(
            "[nvlm]\npower_limit_w = { min = 300 }",
            "[nvml]\npower_limt_w = { min = 300 }",
            "[nvml]\ngpu_max = { min = 3 }",
        ),
        *(f"[nvml]\ngpu_max_mhz = {{ max = {each} }}" for each in ("nan", "inf", "-inf", "9" * 400)),
        "[nvml]\ngpu_max_mhz = { max = 900 }\ngpu_max_hz = { max = 1800000000 }",
        f"x = {'[' * 5000}",
    ],
)
def test_a_file_that_cannot_be_understood_stops_everything(tmp_path: Path, text: str) -> None:
    """A limit that is not understood is an error, never no limit."""
    with pytest.raises(BadFile, match=r"limits\.toml"):
        limits(tmp_path, text)


def test_the_environment_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """$POLYTHROTTLE_LIMITS is read instead of /etc."""
    limits(tmp_path, "[cpu]\ncpu_max_mhz = { min = 800 }")
    monkeypatch.setenv("POLYTHROTTLE_LIMITS", str(tmp_path / "limits.toml"))
    assert Limits.read().span("cpu", "cpu_max_hz")[0] == 800_000_000


def test_what_is_no_file_is_an_error_and_hangs_nobody(tmp_path: Path) -> None:
    """A pipe in its place is not waited for, a folder is no file."""
    os.mkfifo(tmp_path / "limits.toml")
    for path, kind in ((tmp_path / "limits.toml", "no plain file"), (tmp_path, "a folder")):
        with pytest.raises(BadFile, match=f"administrator's limits: {path} cannot be read: it is {kind}"):
            Limits.read(path)


def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, original: str, limit: str) -> tuple[Path, Path]:
    """Plant the folder of a processor's clock limits, and an administrator's limit; return the control and the file."""
    folder = tmp_path / "policy0"
    folder.mkdir()
    (folder / "scaling_max_freq").write_text(original)
    (folder / "cpuinfo_max_freq").write_text("2000000\n")
    (folder / "scaling_min_freq").write_text("800000\n")
    file = tmp_path / "limits.toml"
    file.write_text(limit)
    monkeypatch.setenv("POLYTHROTTLE_LIMITS", str(file))
    return folder / "scaling_max_freq", file


BELOW = "[cpu]\ncpu_max_mhz = { max = 1500 }\n"


def left_at(control: Path, text: str) -> None:
    """Leave a control changed, as a writer does that was killed."""
    actuator = Actuator("cpu", guarded=False).__enter__()
    actuator.allow(Control(str(control), frozenset({text})))
    actuator.write(str(control), text)
    assert actuator._lock is not None
    os.close(actuator._lock)


def test_what_the_driver_begins_with_goes_back_though_outside_the_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A board is found at its top clock, above what polythrottle may choose: there it is after a reboot too."""
    control, _ = planted(tmp_path, monkeypatch, "2000000", BELOW)
    left_at(control, "1200000")
    assert restore_all()[0].clean
    assert control.read_text() == "2000000"


def test_limits_bind_restoring_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A record that says a control held more than the administrator lets be set is not believed; --force is."""
    control, file = planted(tmp_path, monkeypatch, "2200000", "")
    left_at(control, "1200000")
    file.write_text(BELOW)
    assert run(["restore"]) == 6
    assert "outside the administrator's limits" in capsys.readouterr().out
    assert control.read_text() == "1200000"
    assert run(["restore", "--force"]) == 0
    assert control.read_text() == "2200000"


def test_nothing_is_changed_that_the_limits_would_not_let_go_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control found outside them, and not as its driver begins, is refused before the first write."""
    control, _ = planted(tmp_path, monkeypatch, "2200000", BELOW)
    actuator = Actuator("cpu", guarded=False)
    actuator.allow(Control(str(control), frozenset({"1200000"})))
    with actuator, pytest.raises(KnobRejected, match="could not be put back; bring it within them"):
        actuator.write(str(control), "1200000")
    assert control.read_text() == "2200000"


def test_limits_that_cannot_be_understood_keep_nothing_from_going_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stop all steering, and not the way back."""
    control, file = planted(tmp_path, monkeypatch, "2000000", "")
    left_at(control, "1200000")
    file.write_text("[cpu")
    assert restore_all()[0].clean
    assert control.read_text() == "2000000"


@pytest.mark.parametrize(
    ("key", "text", "refused"),
    [
        ("nvml:GPU-1/power_limit_mw", "400000", True),
        ("nvml:GPU-1/power_limit_mw", "250000", False),
        ("nvml:GPU-1/gpu_clocks", "210,1980", True),
        ("nvml:GPU-1/gpu_clocks", "unlocked", False),
        ("nvml:GPU-2/power_limit_mw", "400000", False),
    ],
)
def test_a_gpus_controls_are_bound_by_its_own_table(tmp_path: Path, key: str, text: str, refused: bool) -> None:
    """In the driver's units, by the GPU's UUID."""
    found = limits(tmp_path, '["GPU-1"]\npower_limit_w = { max = 300 }\ngpu_max_mhz = { max = 1600 }\n')
    assert bool(found.refusal(key, text, SysFiles())) is refused
