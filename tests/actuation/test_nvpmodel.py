"""Power modes: the file that lists them, and the control that switches between them."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from polythrottle.actuation.drivers.all_controls import PROGRAM, Nvpmodel
from polythrottle.backends.jetson.power_modes import PowerModes
from polythrottle.domain.errors import DeviceError, KnobRejected, PermissionDenied

CONF = """
# comment
< PARAM TYPE=FILE NAME=CPU_ONLINE >
CORE_0 /sys/devices/system/cpu/cpu0/online
CORE_1 /sys/devices/system/cpu/cpu1/online

<PARAM TYPE=FILE NAME=TPC_POWER_GATING>
TPC_PG_MASK /sys/devices/gpu.0/tpc_pg_mask
< PARAM TYPE=FILE NAME=GPU_POWER_CONTROL_ENABLE >
GPU_PWR_CNTL_EN /sys/devices/gpu.0/power/control
< PARAM TYPE=CLOCK NAME=GPU >
FREQ_TABLE_KNEXT /sys/devices/gpu.0/devfreq/17000000.gpu/available_frequencies
MAX_FREQ_KNEXT /sys/devices/gpu.0/devfreq/17000000.gpu/max_freq
< PARAM TYPE=CLOCK NAME=EMC >
MAX_FREQ /sys/kernel/nvpmodel_clk_cap/emc

< POWER_MODEL ID=0 NAME=MAXN >   # the first
CPU_ONLINE CORE_0 1
TPC_POWER_GATING TPC_PG_MASK 0
GPU MAX_FREQ -1
EMC MAX_FREQ 0
< POWER_MODEL NAME=15W ID=2 >
CPU_ONLINE CORE_0 1
TPC_POWER_GATING TPC_PG_MASK 252
GPU_POWER_CONTROL_ENABLE GPU_PWR_CNTL_EN on
GPU MAX_FREQ 420750000
GPU MAX_FREQ
EMC MAX_FREQ twelve
< POWER_MODEL ID=x NAME=BROKEN >
GPU MAX_FREQ 1
< POWER_MODEL ID=2 NAME=AGAIN >
< PM_CONFIG DEFAULT=2 >
"""


def control(tmp_path: Path, status: str) -> str:
    """Lay a status file and return its key."""
    file = tmp_path / "var/lib/nvpmodel/status"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(status)
    return f"nvpmodel:{tmp_path}"


def answering(status: int, said: str, calls: list[Sequence[str]]) -> Nvpmodel:
    """Return a control whose program answers so."""

    def run(words: Sequence[str]) -> tuple[int, str]:
        calls.append(words)
        return status, said

    return Nvpmodel(run)


def test_modes_are_parsed_whatever_else_the_file_holds() -> None:
    """Blocks in either order of words, comments, broken lines, repeated and nameless modes."""
    modes = PowerModes.parse(CONF).modes
    assert [(mode.number, mode.name) for mode in modes] == [(0, "MAXN"), (2, "15W")]
    assert [mode.limit("GPU") for mode in modes] == [None, 420_750_000]
    assert [mode.limit("EMC") for mode in modes] == [None, None]
    assert PowerModes.parse("\0garbage <> < >\n<POWER_MODEL").modes == ()


def test_what_takes_a_reboot_is_told_from_clocks_cores_and_power() -> None:
    """Parts of the GPU without power are fixed at boot; everything else a mode sets is not."""
    file = PowerModes.parse(CONF)
    assert file.fixed(file.modes[1]) == {("TPC_POWER_GATING", "TPC_PG_MASK"): "252"}
    assert file.parameters("/17000000.gpu/max_freq") == ("GPU",)


@pytest.mark.parametrize(
    ("status", "mode"), [("pmode:0002\n", "2"), ("pmode:0000 fmode:quiet", "0"), ("pmode:12", "12")]
)
def test_the_present_mode_is_read_from_where_it_is_noted(status: str, mode: str, tmp_path: Path) -> None:
    """Leading zeros and what old releases add do not matter."""
    assert Nvpmodel().read(control(tmp_path, status)) == mode


def test_no_mode_noted_is_an_error_of_reading(tmp_path: Path) -> None:
    """Neither an absent file, nor one that says something else, nor a pipe is a mode."""
    with pytest.raises(OSError, match="no power mode"):
        Nvpmodel().read(control(tmp_path, "?"))
    status = tmp_path / "var/lib/nvpmodel/status"
    status.unlink()
    with pytest.raises(OSError, match="there is no"):
        Nvpmodel().read(f"nvpmodel:{tmp_path}")
    os.mkfifo(status)
    with pytest.raises(OSError, match="there is no"):
        Nvpmodel().read(f"nvpmodel:{tmp_path}")


def test_a_switch_runs_nvpmodel_with_nobody_to_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mode is given by its number, and nothing else is run."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    calls: list[Sequence[str]] = []
    answering(0, "", calls).write("nvpmodel:/", "2")
    assert calls == [(PROGRAM, "-m", "2")]


@pytest.mark.parametrize(
    ("status", "said", "says"),
    [
        (
            0,
            "NVPM WARN: Reboot required for changing to this power mode: 1\nDO YOU WANT TO REBOOT NOW?",
            "takes a reboot",
        ),
        (255, "NVPM ERROR: Error opening file\nNVPM ERROR: optMask is 1, no request for power mode", "no request"),
        (1, "", "exit status 1"),
    ],
)
def test_a_refused_switch_says_why(status: int, said: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode that wants a reboot, and one that nvpmodel does not take."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(KnobRejected, match=says) as caught:
        answering(status, said, []).write("nvpmodel:/", "1")
    assert "\n" not in str(caught.value)


def test_a_mode_that_is_noted_applies_whatever_nvpmodel_ends_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On JetPack 7 some modes end non-zero and yet apply: what is noted counts."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    noted = "0"
    nvpmodel = answering(255, "NVPM ERROR: failed to set power mode!", [])
    monkeypatch.setattr(nvpmodel, "read", lambda key: noted)
    with pytest.raises(KnobRejected, match="failed to set"):
        nvpmodel.write("nvpmodel:/", "2")
    noted = "2"
    nvpmodel.write("nvpmodel:/", "2")


def test_a_container_in_which_nvpmodel_ignores_requests_is_told_and_its_note_set_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says so, notes the mode all the same and ends with 0 (gemma4 POWER_MODE.md); the note is put back."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    noted = ["0"]

    def run(words: Sequence[str]) -> tuple[int, str]:
        noted.append(words[-1])
        return 0, "Running in chroot, ignoring request.\nNVPM WARN: Golden image context is already created"

    nvpmodel = Nvpmodel(run)
    monkeypatch.setattr(nvpmodel, "read", lambda key: noted[-1])
    with pytest.raises(KnobRejected, match=r"container or chroot: Running in chroot, ignoring request\.$"):
        nvpmodel.write("nvpmodel:/", "2")
    assert noted == ["0", "2", "0"]


def test_nothing_runs_for_a_tree_elsewhere_for_a_user_or_for_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only this machine's mode, only by root, only by number."""
    calls: list[Sequence[str]] = []
    nvpmodel = answering(0, "", calls)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(KnobRejected, match="not this machine's"):
        nvpmodel.write(f"nvpmodel:{tmp_path}", "1")
    with pytest.raises(KnobRejected, match="not the number"):
        nvpmodel.write("nvpmodel:/", "1; reboot")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(PermissionDenied, match="root alone"):
        nvpmodel.write("nvpmodel:/", "1")
    assert calls == []


def test_a_machine_without_nvpmodel_is_a_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program's absence is named."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("polythrottle.actuation.drivers.all_controls.PROGRAM", "/no/such/nvpmodel")
    with pytest.raises(DeviceError, match="cannot run /no/such/nvpmodel"):
        Nvpmodel().write("nvpmodel:/", "1")
