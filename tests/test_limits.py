"""The administrator's limits: read once, kept by every backend."""

import os
from pathlib import Path

import pytest

from polythrottle.actuation import Limits
from polythrottle.errors import BadFile


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
    for path in (tmp_path / "limits.toml", tmp_path):
        with pytest.raises(BadFile, match="is no plain file"):
            Limits.read(path)
