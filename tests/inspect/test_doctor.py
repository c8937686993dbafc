"""What doctor finds: on trees made up like a machine's, on planted boards, and in the records."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import FakeDevice

from polythrottle.actuation import Actuator, Control
from polythrottle.cli.commands import run
from polythrottle.cli.render import devices
from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import DeviceError, InvalidInput, UnknownName
from polythrottle.domain.measurement import Reading
from polythrottle.domain.ports import Finding
from polythrottle.inspect import examination
from polythrottle.inspect import examination as sensors
from polythrottle.inspect import machine as records
from polythrottle.inspect.examination import Examination, examine, real_devices, sensor_findings
from polythrottle.inspect.machine import (
    PROGRAMS,
    System,
    enabled_units,
    machine_findings,
    others_steering,
    processes,
    record_findings,
)
from polythrottle.testing import BOARDS, FakeKernel, plant
from polythrottle.testing.nvml import FakeNvml, compiler


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at real clocks for a few milliseconds only."""
    monkeypatch.setattr(sensors, "_IDLE_S", 0.01)
    monkeypatch.setattr(sensors, "_LOOKS", 5)


def put(root: Path, path: str, text: str = "") -> None:
    """Write a file of a machine."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def named(findings: tuple[Finding, ...], subject: str) -> Finding:
    """Return the one finding on a subject."""
    [found] = [each for each in findings if each.subject == subject]
    return found


def process(root: Path, number: int, comm: str, *words: str) -> None:
    """Add a process."""
    put(root, f"proc/{number}/comm", f"{comm}\n")
    put(root, f"proc/{number}/cmdline", "".join(f"{word}\0" for word in (comm, *words)))


def enable(root: Path, unit: str, text: str = "") -> None:
    """Add a unit that systemd starts at boot, its link absolute as systemctl makes it."""
    link = root / f"etc/systemd/system/multi-user.target.wants/{unit}"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(f"/usr/lib/systemd/system/{unit}")
    put(root, f"usr/lib/systemd/system/{unit}", text)


def test_a_finding_is_one_line() -> None:
    """Whoever writes two lines or none is told at once."""
    with pytest.raises(ValueError, match="one line"):
        Finding("a", True, "b\nc")
    with pytest.raises(ValueError, match="needs a subject"):
        Finding("a", True, " ")


@pytest.mark.parametrize("program", [each for each in PROGRAMS if each.processes], ids=lambda each: each.name)
def test_each_program_that_steers_is_known_by_its_process(tmp_path: Path, program: object) -> None:
    """Its process is named with its number; names are as short as the kernel keeps them."""
    process(tmp_path, 1, "systemd")
    process(tmp_path, 812, program.processes[0][:15])  # type: ignore[attr-defined]
    found = named(others_steering(System(tmp_path)), program.name)  # type: ignore[attr-defined]
    assert "process 812" in found.explanation
    assert found.remedy


@pytest.mark.parametrize("program", [each for each in PROGRAMS if each.unit], ids=lambda each: each.name)
def test_each_program_that_steers_is_known_by_its_unit(tmp_path: Path, program: object) -> None:
    """What is started at boot counts though it has no process any more."""
    process(tmp_path, 1, "systemd")
    enable(tmp_path, program.unit)  # type: ignore[attr-defined]
    found = named(others_steering(System(tmp_path)), program.name)  # type: ignore[attr-defined]
    assert "started at boot" in found.explanation


def test_a_script_is_known_by_its_own_name(tmp_path: Path) -> None:
    """Python runs jtop, and the kernel calls the process python3."""
    process(tmp_path, 900, "python3", "-Es", "/usr/local/bin/jtop", "--force")
    assert processes(System(tmp_path)) == {"python3": 900, "jtop": 900}


def test_where_nobody_steers_it_says_so(tmp_path: Path) -> None:
    """And how many were looked for; without a process list nobody can know."""
    assert named(others_steering(System(tmp_path)), "other programs").works is None
    process(tmp_path, 1, "systemd")
    enable(tmp_path, "cron.service", "[Service]\nExecStart=/usr/sbin/cron -f\n")
    assert named(others_steering(System(tmp_path)), "other programs").works is True


def test_a_masked_unit_does_not_count(tmp_path: Path) -> None:
    """A link to /dev/null keeps systemd from starting it."""
    enable(tmp_path, "tuned.service")
    assert enabled_units(System(tmp_path)) == {"tuned.service"}
    (tmp_path / "etc/systemd/system/tuned.service").symlink_to("/dev/null")
    assert enabled_units(System(tmp_path)) == set()


@pytest.mark.parametrize(
    "command",
    [
        "/usr/bin/nvidia-smi -i 0 -lgc 300,900",
        "/usr/bin/nvidia-smi --power-limit=200",
        "/bin/sh -c 'while true; do jetson_clocks; sleep 5; done'",
        "-/usr/sbin/nvpmodel -m 0",
        "/usr/bin/cpupower frequency-set -g performance",
        "/bin/sh -c 'echo performance > /sys/devices/system/cpu/cpu0/cpufreq/scaling_governor'",
        "/opt/always-clock.sh",
    ],
)
def test_a_unit_nobody_knows_is_found_by_what_it_runs(tmp_path: Path, command: str) -> None:
    """Its commands, or the script they start, set clocks."""
    process(tmp_path, 1, "systemd")
    put(tmp_path, "opt/always-clock.sh", "#!/bin/bash\necho $1 > /sys/class/devfreq/17000000.gpu/max_freq\n")
    enable(tmp_path, "site-clocks.service", f"[Service]\nExecStart={command}\n")
    found = named(others_steering(System(tmp_path)), "site-clocks.service")
    assert found.works is False
    assert "sets clocks" in found.explanation


def test_reading_a_gpu_is_not_steering_it(tmp_path: Path) -> None:
    """A unit that only queries is left out."""
    process(tmp_path, 1, "systemd")
    enable(tmp_path, "watch.service", "[Service]\nExecStart=/usr/bin/nvidia-smi --query-gpu=power.draw -l 1\n")
    assert named(others_steering(System(tmp_path)), "other programs").works is True


def lockdown(root: Path) -> None:
    """Close debugfs by lockdown under secure boot."""
    put(root, "sys/kernel/security/lockdown", "none [integrity] confidentiality\n")
    variable = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
    put(root, variable)
    (root / variable).write_bytes(b"\x06\0\0\0\x01")


def read_only(root: Path) -> None:
    """Mount sysfs read-only."""
    put(root, "proc/self/mounts", "sysfs /sys sysfs ro,nosuid 0 0\n")


def masked(root: Path) -> None:
    """Mask powercap as Docker does."""
    put(root, "proc/self/mounts", "tmpfs /sys/devices/virtual/powercap tmpfs ro 0 0\n")


def docker(root: Path) -> None:
    """Be a container."""
    put(root, ".dockerenv")


def guest(root: Path) -> None:
    """Be a virtual machine."""
    put(root, "proc/cpuinfo", "flags\t\t: fpu hypervisor sse\n")
    put(root, "sys/class/dmi/id/sys_vendor", "QEMU\n")


def unclocked(root: Path) -> None:
    """Have no cpufreq."""


def undriven(root: Path) -> None:
    """Have a GPU without its driver."""
    put(root, "sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n")
    put(root, "sys/bus/pci/devices/0000:01:00.0/class", "0x030200\n")


def mismatched(root: Path) -> None:
    """Have been upgraded without a reboot."""
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar 5\nGCC version: gcc 12.2.0\n"
    put(root, "proc/driver/nvidia/version", version)
    put(root, "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.550.90.07")


def mismatched_open(root: Path) -> None:
    """Likewise with the open kernel module, whose line names the machine's kind before its version (from an H200)."""
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (builder@host)\n"
    put(root, "proc/driver/nvidia/version", version)
    put(root, "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.95.05")


def unmounted(root: Path) -> None:
    """Be a Jetson whose debugfs is not mounted."""
    put(root, "proc/device-tree/compatible", "nvidia,p3737\0nvidia,tegra234\0")
    put(root, "proc/self/mounts", "sysfs /sys sysfs rw 0 0\n")


def powerless(root: Path) -> None:
    """Be root in a container without CAP_SYS_ADMIN."""
    put(root, "proc/self/status", "CapEff:\t00000000a80425fb\n")


@pytest.mark.parametrize(
    ("cause", "subject", "told"),
    [
        (lockdown, "lockdown", "(integrity under secure boot) closes debugfs"),
        (read_only, "sysfs", "/sys is mounted read-only"),
        (masked, "powercap", "as Docker does"),
        (docker, "container", "a container (Docker)"),
        (guest, "virtual machine", "QEMU"),
        (unclocked, "cpufreq", "no cpufreq policy"),
        (undriven, "NVIDIA driver", "an NVIDIA GPU is at 0000:01:00.0, but its driver is not loaded"),
        (mismatched, "NVIDIA driver", "550.54.15 is loaded, but the library is 550.90.07: upgraded without a reboot"),
        (mismatched_open, "NVIDIA driver", "580.159.04 is loaded, but the library is 580.95.05"),
        (unmounted, "debugfs", "not mounted"),
        (powerless, "rights", "root without CAP_SYS_ADMIN"),
    ],
)
def test_each_known_cause_is_told_with_its_remedy(
    tmp_path: Path, cause: Callable[[Path], None], subject: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line each, and what to do."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    cause(tmp_path)
    found = named(machine_findings(System(tmp_path)), subject)
    assert found.works is not True
    assert told in found.explanation
    assert found.remedy


def test_a_gpu_passed_through_is_not_blamed_for_the_virtual_machine(tmp_path: Path) -> None:
    """As on an H200 in Firecracker: its clocks and joules are its own, only the processor's are the host's."""
    guest(tmp_path)
    (tmp_path / "proc/driver/nvidia/gpus/0000:00:06.0").mkdir(parents=True)
    found = named(machine_findings(System(tmp_path)), "virtual machine")
    assert found.works is None
    assert "passed through to it has its own" in found.explanation


def test_a_sound_machine_has_no_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Driver and library agree, cpufreq is there, lockdown is off, originals are restored at boot."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    mismatched(tmp_path)
    put(tmp_path, "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.550.54.15")
    put(tmp_path, "sys/kernel/security/lockdown", "[none] integrity confidentiality\n")
    put(tmp_path, "proc/self/status", "CapEff:\t000001ffffffffff\n")
    (tmp_path / "sys/devices/system/cpu/cpufreq/policy0").mkdir(parents=True)
    enable(tmp_path, "polythrottle-restore.service")
    assert all(each.works for each in machine_findings(System(tmp_path)))


def test_a_user_is_told_what_root_could(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading is open to all, setting is not."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert named(machine_findings(System(tmp_path)), "rights").remedy.startswith("run as root")


def test_hostile_files_neither_hang_nor_hurt(tmp_path: Path) -> None:
    """A pipe in place of a file is not waited for, a folder is not read, rubbish means nothing."""
    (tmp_path / "proc/1").mkdir(parents=True)
    os.mkfifo(tmp_path / "proc/1/comm")
    (tmp_path / "sys/kernel/security/lockdown").mkdir(parents=True)
    put(tmp_path, "proc/cpuinfo", "\xff\0flags")
    assert machine_findings(System(tmp_path))
    assert others_steering(System(tmp_path))


class Sensor(FakeDevice):
    """A device whose readings are scripted: power, temperature, and what spoils them."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault

    def read(self) -> Reading:
        """Return a reading with the fault."""
        now_s = self.clock.now()
        energy_j = {"frozen": 5.0, "falling": -now_s, "absurd": 1e6 * now_s}.get(self.fault, 10 * now_s)
        degrees = {"cold": -256.0, "none": None}.get(self.fault, 40.0)
        if self.fault == "gone":
            raise DeviceError("the power sensors\ncan no longer be read")
        return Reading(now_s, energy_j, degrees, throttled=self.fault == "slowed")


@pytest.mark.parametrize(
    ("fault", "subject", "works", "told"),
    [
        ("", "energy reading", True, "rises by 10 W now, simulated"),
        ("frozen", "energy reading", False, "did not move"),
        ("falling", "energy reading", False, "went backwards"),
        ("absurd", "energy reading", False, "1000 kW cannot be true"),
        ("gone", "energy reading", False, "the power sensors can no longer be read"),
        ("", "temperature reading", True, "40 °C"),
        ("cold", "temperature reading", False, "-256 °C cannot be true"),
        ("none", "temperature reading", None, "no sensor"),
        ("slowed", "throttling", False, "slows the device now"),
    ],
)
def test_sensors_are_tested_before_they_are_trusted(fault: str, subject: str, works: bool | None, told: str) -> None:
    """A total must rise and never fall, a power and a temperature must be possible."""
    found = named(sensor_findings(Sensor(fault)), subject)
    assert found.works is works
    assert told in found.explanation


def test_a_machine_too_busy_for_its_sensors_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """What looking costs is told with its bound; nothing stops working because it costs more."""
    cheap = sensors._overhead(Sensor())
    assert cheap.works is not False
    monkeypatch.setattr(sensors, "_BUDGET", -1.0)
    dear = sensors._overhead(Sensor())
    assert dear.works is None
    assert "more than -100.0%" in dear.explanation


def test_a_counters_step_is_measured() -> None:
    """One that moves every 50 ms is seen to."""
    device = Sensor()
    times = [step * 0.01 for step in range(100)]
    readings = [Reading(time_s, float(int(time_s * 20 + 1e-6)), 40.0) for time_s in times]
    assert "it moves every 50 ms" in sensors._energy(device, readings).explanation


def test_what_a_dead_process_left_is_told_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since when, how many controls, and that polythrottle restore puts them back; a living one is only named."""
    file = tmp_path / "max_freq"
    file.write_text("1200\n")
    actuator = Actuator("one", guarded=False, holder="process 7 (tune)")
    actuator.allow(Control(str(file), frozenset({"800"})))
    with actuator:
        actuator.write(str(file), "800")
        alive = named(record_findings(), "one")
        monkeypatch.setattr("polythrottle.actuation.state.lease.start_of", lambda pid: None)
        dead = named(record_findings(), "one")
    assert alive.works is None
    assert "is being steered by process 7 (tune)" in alive.explanation
    assert dead.works is False
    assert "1 control changed by process 7 (tune), which is dead, since" in dead.explanation
    assert dead.remedy == "polythrottle restore"
    assert named(record_findings(), "originals").works is True


def test_a_profile_that_stands_is_told(tmp_path: Path) -> None:
    """Kept until a restore, or for how long yet."""
    file = tmp_path / "max_freq"
    file.write_text("1200\n")
    for seconds, told in ((None, "polythrottle restore gives it back"), (90.0, "--confirm lets it stand")):
        actuator = Actuator("one", guarded=False)
        actuator.allow(Control(str(file), frozenset({"800"})))
        with actuator:
            actuator.write(str(file), "800")
            actuator.hand_over("profile resnet50", seconds)
        found = named(record_findings(), "one")
        assert "profile resnet50 stands" in found.explanation
        assert told in found.remedy
        assert run(["restore"]) == 0


@pytest.mark.parametrize(
    ("board", "device", "words"),
    [
        ("ssh://nano", "one", "ssh://nano"),
        ("ssh://nano?python=/opt/py&sudo=yes", "one", "'ssh://nano?python=/opt/py&sudo=yes'"),
        ("ssh://nano", "jetson /tmp/tree", "'ssh://nano/jetson?root=/tmp/tree'"),
        ("ssh://nano?sudo=yes", "jetson /tmp/tree", "'ssh://nano/jetson?root=/tmp/tree&sudo=yes'"),
    ],
)
def test_whoever_looks_over_ssh_is_told_commands_that_name_the_board(
    board: str, device: str, words: str, tmp_path: Path
) -> None:
    """Whatever stands, and however it stands: what to type is typed at the desk."""
    file = tmp_path / "max_freq"
    file.write_text("1200\n")
    for seconds, remedy in (
        (None, "restore --device {} gives it"),
        (90.0, "apply --confirm --device {} lets it stand"),
    ):
        actuator = Actuator(device, guarded=False)
        actuator.allow(Control(str(file), frozenset({"800"})))
        with actuator:
            actuator.write(str(file), "800")
            actuator.hand_over("profile resnet50", seconds)
        assert remedy.format(words) in named(record_findings(board), device).remedy
        assert run(["restore", "--device", device]) == 0


def test_a_state_folder_that_cannot_be_trusted_is_told(state_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open to anyone, or a file; a link in place of the originals; one that is not there yet is fine."""
    assert "(it will be made)" in named(record_findings(), "state folder").explanation
    state_folder.mkdir()
    state_folder.chmod(0o777)
    assert "chmod o-w" in named(record_findings(), "state folder").remedy
    state_folder.chmod(0o700)
    (state_folder / "originals").symlink_to("/")
    assert "not a folder of its own but a link" in named(record_findings(), "originals").explanation
    (state_folder / "file").write_text("")
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", str(state_folder / "file"))
    assert "cannot be written" in named(record_findings(), "state folder").explanation


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("tmpfs", "what outlives a reboot (a power mode) is not put back"),
        ("overlay", "lost with the container"),
        ("nfs4", "two writers may not see each other's locks"),
        ("ext4", ""),
    ],
)
def test_a_promise_that_does_not_hold_here_is_told(
    kind: str, says: str, state_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that forgets, a container's own, one over a network; a machine whose identity is not known."""
    state_folder.mkdir()
    monkeypatch.setattr(records, "file_systems", lambda: {state_folder.stat().st_dev: kind})
    monkeypatch.setattr(records, "machine", lambda: "0123456789ab")
    found = [each for each in record_findings() if each.subject == "promise"]
    assert len(found) == bool(says)
    assert all(says in each.explanation and each.works is None and each.remedy for each in found)
    monkeypatch.setattr(records, "machine", lambda: "boot-0123")
    assert [each for each in record_findings() if "/etc/machine-id says nothing" in each.explanation]


def test_broken_limits_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nothing may be steered, and doctor says why."""
    put(tmp_path, "limits.toml", "[nvml\n")
    monkeypatch.setenv("POLYTHROTTLE_LIMITS", str(tmp_path / "limits.toml"))
    assert named(record_findings(), "limits").works is False
    put(tmp_path, "limits.toml", "[nvml]\npower_limit_w = { min = 100 }\n")
    assert "are kept: nvml (power_limit_w)" in named(record_findings(), "limits").explanation


def test_every_real_device_is_found(tmp_path: Path) -> None:
    """The processor always; each NVIDIA GPU the driver names; on a Jetson the board instead."""
    assert real_devices(System(tmp_path)) == ("cpu",)
    for address in ("0000:01:00.0", "0000:41:00.0"):
        put(tmp_path, f"proc/driver/nvidia/gpus/{address}/information", "Model: NVIDIA L4\n")
    assert real_devices(System(tmp_path)) == ("nvml:0", "nvml:1", "cpu")
    unmounted(tmp_path)
    assert real_devices(System(tmp_path)) == ("jetson", "cpu")


def test_devices_lists_every_real_one(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that cannot be opened, with the reason."""
    monkeypatch.setattr(devices, "real_devices", lambda system: ("cpu", "jetson?root=/nowhere"))
    assert run(["devices", "--json"]) == 0
    real = [each for each in json.loads(capsys.readouterr().out)["devices"] if not each["simulated"]]
    assert [each["uri"] for each in real] == ["cpu", "jetson?root=/nowhere"]
    assert "no folder" in real[1]["title"]


@pytest.mark.parametrize("board", BOARDS)
def test_every_board_is_examined_without_a_write(tmp_path: Path, board: str) -> None:
    """Each has knobs that work, a sound energy reading and a temperature; the kernel has logged no write."""
    root = plant(board, tmp_path / "board")
    kernel = FakeKernel(root)
    with kernel.installed():
        found = examine(f"jetson?root={root}")
    [patient] = found.devices
    assert patient.identity["board"]
    assert named(patient.findings, "gpu_max_hz").works
    assert named(patient.findings, "energy reading").works
    assert named(patient.findings, "temperature reading").works
    assert not kernel.writes()


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="no C compiler, so the stand-in NVIDIA driver cannot be built")
def test_a_gpu_is_examined_without_a_setter(tmp_path: Path) -> None:
    """Its knobs, its sensors and what looking at it costs; the driver has logged no call that changes anything."""
    with FakeNvml(tmp_path / "nvml", ["a100"]) as fake:
        found = examine("nvml:0")
        assert not fake.log()
    [patient] = found.devices
    assert patient.identity["uuid"] == fake.uuid(0)
    assert named(patient.findings, "temperature reading").works
    assert "of a core" in named(patient.findings, "our overhead").explanation


def test_without_a_driver_the_gpu_is_one_clear_finding() -> None:
    """Nothing else is told of it, and nothing hangs."""
    [patient] = examine("nvml:0").devices
    [finding] = patient.findings
    assert (finding.subject, finding.works) == ("device", False)


def test_a_device_that_cannot_be_opened_is_one_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are examined all the same."""

    def refuse(uri: str) -> FakeDevice:
        if uri == "cpu":
            raise DeviceError("no such\nprocessor")
        return FakeDevice()

    monkeypatch.setattr(examination, "open_device", refuse)
    monkeypatch.setattr(examination, "real_devices", lambda system: ("cpu", "nvml:0"))
    found = examine()
    assert found.devices[0].findings == (Finding("device", False, "no such processor"),)
    assert found.devices[1].title == "a test device"
    assert Finding("device", False, "no such processor") in found.faults


def test_a_device_uri_that_means_nothing_is_an_error() -> None:
    """As everywhere else."""
    with pytest.raises(UnknownName):
        examine("gpu:0")
    with pytest.raises(InvalidInput):
        examine("cpu?root")


def test_the_command_answers_in_80_columns_and_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One document, or lines that fit; the same findings in both."""
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["doctor"]) == 0
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines() if not line.startswith("cpu")) <= 80
    assert "originals" in text
    assert run(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"devices", "machine", "others", "records", "faults"}
    assert found["devices"][-1]["uri"] == "cpu"
    assert {"subject", "works", "explanation", "remedy"} == set(found["records"][0])


def test_on_a_simulated_board_the_machine_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither this machine's kernel nor its programs matter to a simulation."""
    assert run(["doctor", "--device", "sim:jetson-nano", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["machine"], found["others"]) == ([], [])
    assert examine("sim:jetson-nano").faults == ()
    assert isinstance(examine("sim:jetson-nano"), Examination)
    assert isinstance(Sensor().clock, VirtualClock)


@pytest.mark.parametrize(("uri", "code"), [("sim:x", 3), ("sim:", 2), ("foo", 3), ("jetson?root=/nowhere", 2)])
def test_a_device_that_cannot_be_is_an_error_and_no_finding(
    uri: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with every other command."""
    assert run(["doctor", "--device", uri]) == code
    assert capsys.readouterr().out == ""


def test_a_group_may_draw_as_much_as_its_gpus_together() -> None:
    """What cannot be true of one GPU can be of eight."""
    most_w = sensors._MOST_W

    def told(uri: str, power_w: float) -> bool | None:
        device = Sensor()
        device.uri = uri  # type: ignore[misc]
        return sensors._energy(device, [Reading(float(at_s), at_s * power_w, 40.0) for at_s in range(5)]).works

    assert told("nvml:0", 0.9 * most_w) is True
    assert told("nvml:0", 1.1 * most_w) is False
    assert told("nvml:0,1", 1.1 * most_w) is True
    assert told("nvml:0,1", 2.1 * most_w) is False
