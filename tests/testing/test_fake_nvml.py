"""The stand-in NVIDIA driver, seen through the real bindings."""

import ctypes
import errno
import itertools
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pynvml
import pytest

from polythrottle.domain.backports import tomllib
from polythrottle.domain.errors import DeviceError, UnknownName
from polythrottle.testing.nvml import MODELS, FakeNvml, FaultKind, build, compiler

pytestmark = pytest.mark.skipif(
    compiler() is None, reason="no C compiler, so the stand-in NVIDIA driver cannot be built"
)
DEVICES = Path(__file__).resolve().parents[2] / "devices"
BUSY = 1000
Machine = Callable[..., FakeNvml]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """Return a maker of entered stand-ins with their time frozen and the bindings initialised."""
    made: list[FakeNvml] = []

    def make(*gpus: str, start: bool = True) -> FakeNvml:
        fake = FakeNvml(tmp_path / f"nvml-{len(made)}", gpus or ("a100",), frozen=True)
        made.append(fake)
        fake.__enter__()
        if start:
            pynvml.nvmlInit()
        return fake

    yield make
    for fake in reversed(made):
        fake.__exit__(None, None, None)


def handle(index: int = 0) -> Any:
    """Return the handle of a GPU by index."""
    return pynvml.nvmlDeviceGetHandleByIndex(index)


def code(call: Callable[[], object]) -> int:
    """Return the code a call ends with, 0 for success."""
    try:
        call()
    except pynvml.NVMLError as error:
        return int(error.value)
    return 0


def child(body: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program with the bindings initialised and ``h`` the first GPU."""
    program = "import pynvml as n\nn.nvmlInit()\nh = n.nvmlDeviceGetHandleByIndex(0)\n" + textwrap.dedent(body)
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=env)


# What it is


@pytest.mark.parametrize("name", MODELS)
def test_every_model_says_who_it_is(machine: Machine, name: str) -> None:
    """Name, UUID, bus, versions, memory and architecture come through the bindings."""
    fake, gpu = machine(name), MODELS[name]
    assert pynvml.nvmlDeviceGetName(handle()) == gpu.name
    assert pynvml.nvmlDeviceGetUUID(handle()) == fake.uuid(0)
    assert pynvml.nvmlDeviceGetPciInfo(handle()).busId == "00000000:01:00.0"
    assert pynvml.nvmlDeviceGetPciInfo(handle()).busIdLegacy == "0000:01:00.0"
    assert pynvml.nvmlDeviceGetPciInfo(handle()).pciDeviceId == gpu.device_id
    assert pynvml.nvmlDeviceGetArchitecture(handle()) == gpu.architecture
    assert pynvml.nvmlDeviceGetCudaComputeCapability(handle()) == (gpu.compute_major, gpu.compute_minor)
    assert pynvml.nvmlDeviceGetMemoryInfo(handle()).total == gpu.memory_bytes
    assert pynvml.nvmlDeviceGetVbiosVersion(handle())
    assert pynvml.nvmlDeviceGetIndex(handle()) == pynvml.nvmlDeviceGetMinorNumber(handle()) == 0
    assert code(lambda: pynvml.nvmlDeviceGetSerial(handle())) == (
        0 if gpu.has_serial else pynvml.NVML_ERROR_NOT_SUPPORTED
    )


def test_the_driver_says_which_it_is(machine: Machine) -> None:
    """Driver and library versions name the stand-in, so that no report takes it for a driver."""
    machine()
    assert "stand-in" in pynvml.nvmlSystemGetDriverVersion()
    assert "stand-in" in pynvml.nvmlSystemGetNVMLVersion()
    assert pynvml.nvmlSystemGetCudaDriverVersion() == 13000
    assert "15" in pynvml.nvmlErrorString(15)


@pytest.mark.parametrize("name", ["v100", "a100", "a40", "h100", "l4"])
def test_tables_are_those_of_the_catalogue(machine: Machine, name: str) -> None:
    """Memory clocks, GPU clocks and power limits equal devices/*.toml, in whole megahertz and downwards."""
    machine(name)
    entry = tomllib.loads((DEVICES / f"{name}.toml").read_text())
    knobs = entry["knobs"]
    first, last, step = knobs["gpu_max_mhz"]["range"]
    most = {rule["level"]: rule["most"] for rule in entry.get("dependent", [])}
    memory = pynvml.nvmlDeviceGetSupportedMemoryClocks(handle())
    assert memory == sorted(knobs["mem_mhz"]["levels"], reverse=True)
    for memory_mhz in memory:
        clocks = [int(first + step * number) for number in range(round((last - first) / step) + 1)]
        expected = [clock for clock in clocks if clock <= most.get(memory_mhz, last)]
        assert pynvml.nvmlDeviceGetSupportedGraphicsClocks(handle(), memory_mhz) == expected[::-1]
    limits = knobs["power_limit_w"]["levels"]
    expected_mw = [limits[0] * 1000, limits[-1] * 1000]
    assert pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle()) == expected_mw
    assert pynvml.nvmlDeviceGetPowerManagementDefaultLimit(handle()) == expected_mw[1]


def test_a_memory_clock_that_is_none_has_no_table(machine: Machine) -> None:
    """Asking for the GPU clocks of a memory clock off the table ends with not found."""
    machine()
    assert code(lambda: pynvml.nvmlDeviceGetSupportedGraphicsClocks(handle(), 1000)) == pynvml.NVML_ERROR_NOT_FOUND


def test_a_laptop_supports_little(machine: Machine) -> None:
    """Tables, power limit, memory lock, energy and serial number are not supported; clocks and power are."""
    machine("laptop")
    calls = [
        lambda: pynvml.nvmlDeviceGetSupportedMemoryClocks(handle()),
        lambda: pynvml.nvmlDeviceGetSupportedGraphicsClocks(handle(), 7001),
        lambda: pynvml.nvmlDeviceGetPowerManagementLimit(handle()),
        lambda: pynvml.nvmlDeviceSetPowerManagementLimit(handle(), 80_000),
        lambda: pynvml.nvmlDeviceSetMemoryLockedClocks(handle(), 405, 7001),
        lambda: pynvml.nvmlDeviceResetMemoryLockedClocks(handle()),
        lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle()),
        lambda: pynvml.nvmlDeviceGetMigMode(handle()),
    ]
    assert [code(call) for call in calls] == [pynvml.NVML_ERROR_NOT_SUPPORTED] * len(calls)
    assert pynvml.nvmlDeviceGetPowerUsage(handle()) > 0
    assert pynvml.nvmlDeviceGetMaxClockInfo(handle(), pynvml.NVML_CLOCK_GRAPHICS) == 2100


def test_mig_hides_tables_and_its_instances_have_no_clocks(machine: Machine) -> None:
    """In MIG mode the GPU has no clock tables, and an instance refuses what belongs to the whole GPU."""
    fake = machine("a100-mig")
    assert pynvml.nvmlDeviceGetMigMode(handle()) == [1, 1]
    assert code(lambda: pynvml.nvmlDeviceGetSupportedMemoryClocks(handle())) == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert code(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle())) == pynvml.NVML_ERROR_NOT_SUPPORTED
    instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle(), 0)
    assert pynvml.nvmlDeviceIsMigDeviceHandle(instance).value == 1
    assert code(lambda: pynvml.nvmlDeviceGetPowerUsage(instance)) == pynvml.NVML_ERROR_NOT_SUPPORTED
    named = pynvml.nvmlDeviceGetHandleByUUID(fake.uuid(0).replace("GPU-", "MIG-"))
    assert pynvml.nvmlDeviceIsMigDeviceHandle(named).value == 1
    whole = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(named)
    assert pynvml.nvmlDeviceGetUUID(whole) == fake.uuid(0)


def test_mig_can_be_off(machine: Machine) -> None:
    """A GPU that could be in MIG mode and is not says so, and has no instances."""
    machine("a100")
    assert pynvml.nvmlDeviceGetMigMode(handle()) == [0, 0]
    missing = code(lambda: pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle(), 0))
    assert missing == pynvml.NVML_ERROR_NOT_FOUND


# Clocks


def test_a_lock_holds_the_clock_under_load_and_cannot_be_read(machine: Machine) -> None:
    """A busy GPU runs at the lock's upper clock, an idle one at its lower, and no reading call names the lock."""
    fake = machine("v100")
    pynvml.nvmlDeviceSetGpuLockedClocks(handle(), 300, 900)
    assert pynvml.nvmlDeviceGetClockInfo(handle(), pynvml.NVML_CLOCK_SM) == 300
    fake.set(0, load_permille=BUSY)
    assert pynvml.nvmlDeviceGetClockInfo(handle(), pynvml.NVML_CLOCK_SM) == 900
    assert pynvml.nvmlDeviceGetClockInfo(handle(), pynvml.NVML_CLOCK_GRAPHICS) == 900
    pynvml.nvmlDeviceResetGpuLockedClocks(handle())
    pynvml.nvmlDeviceResetGpuLockedClocks(handle())
    assert pynvml.nvmlDeviceGetClockInfo(handle(), pynvml.NVML_CLOCK_SM) == 1380


def test_a_lock_is_rounded_down_to_the_table(machine: Machine) -> None:
    """Off the table is rounded, below it is the lowest clock, and a strict driver refuses it."""
    fake = machine("a100")
    pynvml.nvmlDeviceSetGpuLockedClocks(handle(), 1, 1003)
    locks = fake.snapshot()[fake.uuid(0)]
    assert (locks["gpu_lock_min_mhz"], locks["gpu_lock_max_mhz"]) == (210, 990)
    fake.set_machine(refuse_off_table=1)
    refused = code(lambda: pynvml.nvmlDeviceSetGpuLockedClocks(handle(), 210, 1003))
    assert refused == pynvml.NVML_ERROR_INVALID_ARGUMENT


def test_limits_by_name_do_not_mix_with_numbers(machine: Machine) -> None:
    """TDP and UNLIMITED lock to base and highest clock; one of them beside a number is refused; so is min above max."""
    fake = machine("a100")
    tdp, unlimited = pynvml.NVML_CLOCK_LIMIT_ID_TDP, pynvml.NVML_CLOCK_LIMIT_ID_UNLIMITED
    pynvml.nvmlDeviceSetGpuLockedClocks(handle(), tdp, unlimited)
    locks = fake.snapshot()[fake.uuid(0)]
    assert (locks["gpu_lock_min_mhz"], locks["gpu_lock_max_mhz"]) == (765, 1410)
    for low, high in ((210, unlimited), (unlimited, tdp), (900, 300)):
        refused = code(lambda low=low, high=high: pynvml.nvmlDeviceSetGpuLockedClocks(handle(), low, high))  # type: ignore[misc]
        assert refused == pynvml.NVML_ERROR_INVALID_ARGUMENT


def test_a_low_memory_clock_holds_the_gpu_clock_down(machine: Machine) -> None:
    """With memory locked low the GPU runs no faster than that memory clock's table, and rounding follows it."""
    fake = machine("l4")
    fake.set(0, load_permille=BUSY)
    pynvml.nvmlDeviceSetMemoryLockedClocks(handle(), 405, 405)
    assert pynvml.nvmlDeviceGetClockInfo(handle(), pynvml.NVML_CLOCK_MEM) == 405
    assert pynvml.nvmlDeviceGetClockInfo(handle(), pynvml.NVML_CLOCK_SM) == 645
    pynvml.nvmlDeviceSetGpuLockedClocks(handle(), 2040, 2040)
    assert fake.snapshot()[fake.uuid(0)]["gpu_lock_max_mhz"] == 645
    pynvml.nvmlDeviceResetMemoryLockedClocks(handle())
    assert pynvml.nvmlDeviceGetClockInfo(handle(), pynvml.NVML_CLOCK_MEM) == 6251


def test_volta_has_no_memory_lock(machine: Machine) -> None:
    """Locking memory came with Ampere."""
    machine("v100")
    refused = code(lambda: pynvml.nvmlDeviceSetMemoryLockedClocks(handle(), 877, 877))
    assert refused == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_a_lock_may_take_time_to_hold(machine: Machine) -> None:
    """Until the settling time has passed the old clock runs; energy counts each stretch at its own power."""
    fake = machine("v100")
    fake.set(0, load_permille=BUSY, settle_us=200_000)
    before_mw = fake.power_mw(0)
    start_mj = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle())
    pynvml.nvmlDeviceSetGpuLockedClocks(handle(), 900, 900)
    assert pynvml.nvmlDeviceGetClockInfo(handle(), pynvml.NVML_CLOCK_SM) == 1380
    fake.advance(1.0)
    assert pynvml.nvmlDeviceGetClockInfo(handle(), pynvml.NVML_CLOCK_SM) == 900
    spent_mj = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle()) - start_mj
    assert spent_mj == pytest.approx(0.2 * before_mw + 0.8 * fake.power_mw(0), abs=2)


# Power, energy, heat


@pytest.mark.parametrize("name", ["v100", "a100", "a40", "h100", "l4", "b200"])
def test_power_follows_the_clock_and_the_limit_follows_the_table(machine: Machine, name: str) -> None:
    """Under load a lower limit means a lower clock on the table, power within the limit, and the power-cap reason."""
    fake = machine(name)
    fake.set(0, load_permille=BUSY)
    lowest_mw, highest_mw = pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle())
    table = pynvml.nvmlDeviceGetSupportedGraphicsClocks(
        handle(), pynvml.nvmlDeviceGetClockInfo(handle(), pynvml.NVML_CLOCK_MEM)
    )
    clocks = []
    for limit_mw in range(highest_mw, lowest_mw - 1, -(highest_mw - lowest_mw) // 4):
        pynvml.nvmlDeviceSetPowerManagementLimit(handle(), limit_mw)
        clocks.append(pynvml.nvmlDeviceGetClockInfo(handle(), pynvml.NVML_CLOCK_SM))
        assert fake.power_mw(0) <= limit_mw
        assert clocks[-1] in table
        capped = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle()) & pynvml.nvmlClocksEventReasonSwPowerCap
        assert bool(capped) == (clocks[-1] < table[0])
    assert clocks == sorted(clocks, reverse=True)
    assert clocks[-1] < clocks[0]


def test_the_limit_stays_within_its_constraints(machine: Machine) -> None:
    """A limit outside the constraints is refused; one inside is read back; the default stays what it was."""
    machine("h100")
    for limit_mw in (199_999, 400_001):
        refused = code(lambda limit_mw=limit_mw: pynvml.nvmlDeviceSetPowerManagementLimit(handle(), limit_mw))  # type: ignore[misc]
        assert refused == pynvml.NVML_ERROR_INVALID_ARGUMENT
    pynvml.nvmlDeviceSetPowerManagementLimit(handle(), 250_000)
    assert pynvml.nvmlDeviceGetPowerManagementLimit(handle()) == 250_000
    assert pynvml.nvmlDeviceGetEnforcedPowerLimit(handle()) == 250_000
    assert pynvml.nvmlDeviceGetPowerManagementDefaultLimit(handle()) == 400_000
    assert pynvml.nvmlDeviceGetPowerManagementMode(handle()) == 1


def test_the_second_limit_call_reports_success_whatever_happened(machine: Machine) -> None:
    """The bindings' _v2 setter drops the return code: an impossible limit looks set and is not."""
    fake = machine("h100")
    assert pynvml.nvmlDeviceSetPowerManagementLimit_v2(handle(), 0, 1_000) == 0
    assert pynvml.nvmlDeviceGetPowerManagementLimit(handle()) == 400_000
    assert fake.log()[-1].code == pynvml.NVML_ERROR_INVALID_ARGUMENT
    pynvml.nvmlDeviceSetPowerManagementLimit_v2(handle(), 0, 300_000)
    assert pynvml.nvmlDeviceGetPowerManagementLimit(handle()) == 300_000


def test_a_cap_from_outside_lowers_only_the_enforced_limit(machine: Machine) -> None:
    """Enforced is the lower of the limit and what holds from outside the driver."""
    fake = machine("h100")
    fake.set(0, outer_limit_mw=280_000, load_permille=BUSY)
    assert pynvml.nvmlDeviceGetPowerManagementLimit(handle()) == 400_000
    assert pynvml.nvmlDeviceGetEnforcedPowerLimit(handle()) == 280_000
    assert fake.power_mw(0) <= 280_000


def test_the_energy_counter_moves_in_steps(machine: Machine) -> None:
    """Between two refreshes the counter stands still; over them it grows by power times time."""
    fake = machine("v100")
    fake.set(0, load_permille=BUSY)
    fake.advance(0.02 - fake.now_s % 0.02)
    first_mj = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle())
    fake.advance(0.019)
    assert pynvml.nvmlDeviceGetTotalEnergyConsumption(handle()) == first_mj
    fake.advance(0.981)
    assert pynvml.nvmlDeviceGetTotalEnergyConsumption(handle()) - first_mj == pytest.approx(fake.power_mw(0), abs=1)


def test_time_runs_by_itself_unless_frozen(tmp_path: Path) -> None:
    """With real time the counter is refreshed without being told to."""
    with FakeNvml(tmp_path / "nvml", ["v100"]) as fake:
        pynvml.nvmlInit()
        fake.set(0, load_permille=BUSY)
        first_mj = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle())
        while pynvml.nvmlDeviceGetTotalEnergyConsumption(handle()) == first_mj:
            pass
        assert pynvml.nvmlDeviceGetTotalEnergyConsumption(handle()) > first_mj


def test_a_call_may_take_time_of_its_own(machine: Machine) -> None:
    """With a tick per call a polling program sees frozen time move, and so finds the counter's step."""
    fake = machine("v100")
    fake.set_machine(tick_us=1000)
    fake.set(0, load_permille=BUSY)
    seen = [pynvml.nvmlDeviceGetTotalEnergyConsumption(handle()) for _ in range(100)]
    changes = [index for index in range(1, 100) if seen[index] != seen[index - 1]]
    assert {late - early for early, late in itertools.pairwise(changes)} == {10}


@pytest.mark.parametrize(("name", "averages"), [("v100", False), ("a100", False), ("a40", True), ("h100", True)])
def test_power_is_an_average_where_the_vendor_says_so(machine: Machine, name: str, averages: bool) -> None:
    """Half a second after a step in load, Ampere but GA100 and newer show half of it, the others all of it."""
    fake = machine(name)
    fake.advance(2.0 - fake.now_s % 0.1)
    idle_mw = fake.power_mw(0)
    fake.set(0, load_permille=BUSY)
    fake.advance(0.5)
    shown = (pynvml.nvmlDeviceGetPowerUsage(handle()) - idle_mw) / (fake.power_mw(0) - idle_mw)
    assert shown == pytest.approx(0.5 if averages else 1.0, abs=0.01)


def test_fields_come_at_once_and_fail_alone(machine: Machine) -> None:
    """Average and instant power, energy and limits by field and scope; an unsupported one spoils no other."""
    fake = machine("h100")
    fake.set(0, load_permille=BUSY)
    fake.advance(5.0)
    ids: list[Any] = [185, 186, 83, 82, 187, 188, 189, 190, 192, (186, 2), (186, 1), 1]
    fields = pynvml.nvmlDeviceGetFieldValues(handle(), ids)
    assert [field.nvmlReturn for field in fields] == [0] * 10 + [3, 3]
    assert fields[0].value.uiVal == pytest.approx(fake.power_mw(0), abs=1)
    assert fields[1].value.uiVal == fake.power_mw(0)
    assert fields[2].valueType == pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
    assert fields[2].value.ullVal == pynvml.nvmlDeviceGetTotalEnergyConsumption(handle())
    assert [field.value.uiVal for field in fields[4:9]] == [200_000, 400_000, 400_000, 400_000, 400_000]
    assert fields[9].value.uiVal == 30_000
    assert fields[0].timestamp > 1_600_000_000_000_000


def test_older_cards_have_no_power_fields(machine: Machine) -> None:
    """On Volta the power fields are not supported while the energy field is."""
    machine("v100")
    fields = pynvml.nvmlDeviceGetFieldValues(handle(), [185, 83])
    assert [field.nvmlReturn for field in fields] == [pynvml.NVML_ERROR_NOT_SUPPORTED, 0]


def test_the_same_field_has_the_same_timestamp_until_refreshed(machine: Machine) -> None:
    """Duplicates can be told by their timestamp in microseconds."""
    fake = machine("h100")
    fake.advance(0.1 - fake.now_s % 0.1)
    stamps = []
    for _ in range(3):
        stamps.append(pynvml.nvmlDeviceGetFieldValues(handle(), [186])[0].timestamp)
        fake.advance(0.05)
    assert stamps[1] - stamps[0] == 0
    assert stamps[2] - stamps[1] == 100_000


def test_samples_are_kept_with_their_times(machine: Machine) -> None:
    """The ring of power and clock samples has one per refresh; asking after the last gives the new ones, if any."""
    fake = machine("h100")
    fake.set(0, load_permille=BUSY)
    fake.advance(2.0)
    kind, samples = pynvml.nvmlDeviceGetSamples(handle(), pynvml.NVML_TOTAL_POWER_SAMPLES, 0)
    assert kind == pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
    stamps = [sample.timeStamp for sample in samples]
    assert [late - early for early, late in itertools.pairwise(stamps)] == [100_000] * (len(samples) - 1)
    assert samples[-1].sampleValue.uiVal == fake.power_mw(0)
    pynvml.nvmlDeviceSetGpuLockedClocks(handle(), 600, 600)
    fake.advance(0.3)
    _, clocks = pynvml.nvmlDeviceGetSamples(handle(), pynvml.NVML_PROCESSOR_CLK_SAMPLES, stamps[-1])
    assert [sample.sampleValue.uiVal for sample in clocks] == [600] * 3
    last = clocks[-1].timeStamp
    nothing_new = code(lambda: pynvml.nvmlDeviceGetSamples(handle(), pynvml.NVML_TOTAL_POWER_SAMPLES, last))
    assert nothing_new == pynvml.NVML_ERROR_NOT_FOUND
    no_module = code(lambda: pynvml.nvmlDeviceGetSamples(handle(), pynvml.NVML_MODULE_POWER_SAMPLES, 0))
    assert no_module == pynvml.NVML_ERROR_NOT_SUPPORTED


def test_reasons_say_why_the_clock_is_low(machine: Machine) -> None:
    """Idle, heat and whatever the test forces are in the event reasons, under their old name too."""
    fake = machine("v100")
    assert pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle()) == pynvml.nvmlClocksEventReasonGpuIdle
    slowdown = pynvml.nvmlClocksEventReasonHwSlowdown
    fake.set(0, load_permille=BUSY, forced_reasons=slowdown, forced_temperature_c=90, ceiling_mhz=705)
    expected = slowdown | pynvml.nvmlClocksEventReasonSwThermalSlowdown
    assert pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle()) == expected
    assert pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle()) == expected
    assert pynvml.nvmlDeviceGetSupportedClocksEventReasons(handle()) & expected == expected
    assert pynvml.nvmlDeviceGetClockInfo(handle(), pynvml.NVML_CLOCK_SM) == 705


def test_temperature_follows_power(machine: Machine) -> None:
    """Both temperature calls agree, rise with load, and know their threshold; the older can be deprecated."""
    fake = machine("a40")
    cool_c = pynvml.nvmlDeviceGetTemperatureV(handle(), 0)
    fake.set(0, load_permille=BUSY)
    assert pynvml.nvmlDeviceGetTemperatureV(handle(), 0) > cool_c
    assert pynvml.nvmlDeviceGetTemperature(handle(), 0) == pynvml.nvmlDeviceGetTemperatureV(handle(), 0)
    assert pynvml.nvmlDeviceGetTemperatureThreshold(handle(), 1) > 80
    fake.set(0, deprecates_temperature=1)
    assert code(lambda: pynvml.nvmlDeviceGetTemperature(handle(), 0)) == pynvml.NVML_ERROR_DEPRECATED


def test_blank_numbers_look_finite(machine: Machine) -> None:
    """A blank reading comes with success and a number no smaller than 0x7FFFFFF0."""
    fake = machine("a100")
    fake.set(0, blank=1 | 2 | 4 | 8)
    for reading in (
        pynvml.nvmlDeviceGetPowerUsage(handle()),
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle()),
        pynvml.nvmlDeviceGetTemperatureV(handle(), 0),
        pynvml.nvmlDeviceGetClockInfo(handle(), pynvml.NVML_CLOCK_SM),
    ):
        assert reading >= 0x7FFFFFF0


def test_a_counter_may_be_stuck(machine: Machine) -> None:
    """A stuck energy counter stands still while power is drawn."""
    fake = machine("a100")
    fake.set(0, load_permille=BUSY)
    fake.advance(1.0)
    first_mj = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle())
    fake.set(0, energy_stuck=1)
    fake.advance(10.0)
    assert pynvml.nvmlDeviceGetTotalEnergyConsumption(handle()) == first_mj


def test_use_and_processes_are_shown(machine: Machine) -> None:
    """Utilisation follows load, and processes are those the test named, with their memory."""
    fake = machine("a100")
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(handle()) == []
    fake.set(0, load_permille=500)
    fake.add_process(0, pid=4242, used_bytes=2**30)
    assert pynvml.nvmlDeviceGetUtilizationRates(handle()).gpu == 50
    (process,) = pynvml.nvmlDeviceGetComputeRunningProcesses(handle())
    assert (process.pid, process.usedGpuMemory) == (4242, 2**30)
    assert pynvml.nvmlDeviceGetMemoryInfo(handle()).used == 2**30
    assert pynvml.nvmlDeviceGetPerformanceState(handle()) == 0


# Work profiles


def current_profiles() -> tuple[int, int, int]:
    """Return supported, requested and enforced profiles as masks."""
    now = pynvml.c_nvmlWorkloadPowerProfileCurrentProfiles_v1_t()
    pynvml.nvmlDeviceWorkloadPowerProfileGetCurrentProfiles(handle(), ctypes.byref(now))
    return now.perfProfilesMask.mask[0], now.requestedProfilesMask.mask[0], now.enforcedProfilesMask.mask[0]


def request(call: Callable[[Any, Any], object], *profiles: int) -> int:
    """Ask for profiles and return the code."""
    asked = pynvml.c_nvmlWorkloadPowerProfileRequestedProfiles_v1_t()
    for profile in profiles:
        asked.requestedProfilesMask.mask[profile // 32] |= 1 << profile % 32
    return code(lambda: call(handle(), ctypes.byref(asked)))


def test_profiles_requested_are_not_profiles_enforced(machine: Machine) -> None:
    """Of two that exclude each other one is enforced; clearing and overwriting do what they say; power follows."""
    fake = machine("b200")
    fake.set(0, load_permille=BUSY)
    full_mw = fake.power_mw(0)
    ask = pynvml.nvmlDeviceWorkloadPowerProfileSetRequestedProfiles
    assert request(ask, pynvml.NVML_POWER_PROFILE_MAX_Q) == 0
    assert fake.power_mw(0) < full_mw
    assert pynvml.nvmlDeviceGetEnforcedPowerLimit(handle()) == 800_000
    assert request(ask, pynvml.NVML_POWER_PROFILE_MAX_P) == 0
    assert current_profiles()[1:] == (0b11, 0b01)
    clear = pynvml.nvmlDeviceWorkloadPowerProfileClearRequestedProfiles
    assert request(clear, pynvml.NVML_POWER_PROFILE_MAX_P) == 0
    assert current_profiles()[1:] == (0b10, 0b10)
    update = pynvml.c_nvmlWorkloadPowerProfileUpdateProfiles_v1_t(operation=2)
    update.updateProfilesMask.mask[0] = 1 << pynvml.NVML_POWER_PROFILE_LLM_INFERENCE
    pynvml.nvmlDeviceWorkloadPowerProfileUpdateProfiles_v1(handle(), ctypes.byref(update))
    assert current_profiles()[1:] == (1 << 6, 1 << 6)


def test_profiles_are_described_and_bounded(machine: Machine) -> None:
    """The list says which exist, with priority and conflicts; another one, or another struct version, is refused."""
    machine("b200")
    info = pynvml.c_nvmlWorkloadPowerProfileProfilesInfo_v1_t()
    pynvml.nvmlDeviceWorkloadPowerProfileGetProfilesInfo(handle(), ctypes.byref(info))
    assert info.perfProfilesMask.mask[0] == current_profiles()[0]
    assert info.perfProfile[1].profileId == pynvml.NVML_POWER_PROFILE_MAX_Q
    assert info.perfProfile[1].conflictingmask.mask[0] == 1
    ask = pynvml.nvmlDeviceWorkloadPowerProfileSetRequestedProfiles
    for profile in (pynvml.NVML_POWER_PROFILE_NETWORK, 24, 200):
        assert request(ask, profile) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    info.version = 1
    wrong = code(lambda: pynvml.nvmlDeviceWorkloadPowerProfileGetProfilesInfo(handle(), ctypes.byref(info)))
    assert wrong == pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH


def test_profiles_are_blackwells(machine: Machine) -> None:
    """Cards before Blackwell support none of the profile calls."""
    machine("h100")
    assert code(current_profiles) == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert request(pynvml.nvmlDeviceWorkloadPowerProfileSetRequestedProfiles, 0) == pynvml.NVML_ERROR_NOT_SUPPORTED


# Permission, faults, loss


SETTERS: dict[str, Callable[[], object]] = {
    "nvmlDeviceSetGpuLockedClocks": lambda: pynvml.nvmlDeviceSetGpuLockedClocks(handle(), 300, 900),
    "nvmlDeviceResetGpuLockedClocks": lambda: pynvml.nvmlDeviceResetGpuLockedClocks(handle()),
    "nvmlDeviceSetMemoryLockedClocks": lambda: pynvml.nvmlDeviceSetMemoryLockedClocks(handle(), 3996, 3996),
    "nvmlDeviceResetMemoryLockedClocks": lambda: pynvml.nvmlDeviceResetMemoryLockedClocks(handle()),
    "nvmlDeviceSetPowerManagementLimit": lambda: pynvml.nvmlDeviceSetPowerManagementLimit(handle(), 700_000),
    "nvmlDeviceSetPersistenceMode": lambda: pynvml.nvmlDeviceSetPersistenceMode(handle(), 1),
}


@pytest.mark.parametrize("name", SETTERS)
def test_every_setter_needs_permission_and_is_logged(machine: Machine, name: str) -> None:
    """Without the right a setter changes nothing and says so; with it, the log has call, process, GPU and code."""
    fake = machine("b200")
    before = fake.snapshot()
    fake.set_machine(privileged=0)
    assert code(SETTERS[name]) == pynvml.NVML_ERROR_NO_PERMISSION
    assert fake.snapshot() == before
    fake.set_machine(privileged=1)
    assert code(SETTERS[name]) == 0
    assert [(line.call, line.code) for line in fake.log()] == [(name, 4), (name, 0)]
    assert {(line.pid, line.uuid) for line in fake.log()} == {(os.getpid(), fake.uuid(0))}


@pytest.mark.parametrize("number", [2, 3, 4, 6, 10, 17, 19, 20, 21, 23, 24, 27, 29, 999])
def test_any_code_can_be_had_from_any_call(machine: Machine, number: int) -> None:
    """The n-th call of a function ends with the code that was planned, the others do not."""
    fake = machine("a100")
    fake.fail("nvmlDeviceGetPowerUsage", code=number, skip=1, times=2)
    got = [code(lambda: pynvml.nvmlDeviceGetPowerUsage(handle())) for _ in range(4)]
    assert got == [0, number, number, 0]


def test_a_fault_keeps_to_its_gpu_and_can_be_cleared(machine: Machine) -> None:
    """A fault on one GPU leaves the other alone."""
    fake = machine("a100", "a100")
    fake.fail("*", code=10, slot=1)
    limits = [code(lambda i=i: pynvml.nvmlDeviceSetPowerManagementLimit(handle(i), 200_000)) for i in (0, 1)]  # type: ignore[misc]
    assert limits == [0, pynvml.NVML_ERROR_TIMEOUT]
    fake.clear_faults()
    pynvml.nvmlDeviceSetPowerManagementLimit(handle(1), 200_000)


def test_a_write_can_be_late_ignored_skewed_or_overwritten(machine: Machine) -> None:
    """What was asked, what came of it, and what the call said can differ in each way."""
    fake = machine("a100")
    outcomes = []
    for kind, value in (
        (FaultKind.LATE, 0),
        (FaultKind.IGNORE, 0),
        (FaultKind.SKEW, 5000),
        (FaultKind.OVERWRITE, 170_000),
    ):
        pynvml.nvmlDeviceSetPowerManagementLimit(handle(), 250_000)
        fake.fail("*", code=10, kind=kind, times=1, value=value)
        said = code(lambda: pynvml.nvmlDeviceSetPowerManagementLimit(handle(), 200_000))
        outcomes.append((said, pynvml.nvmlDeviceGetPowerManagementLimit(handle())))
    assert outcomes == [(10, 200_000), (0, 250_000), (0, 195_000), (0, 170_000)]
    assert [line.note for line in fake.log() if line.note] == ["late", "ignored", "skewed", "overwritten"]


@pytest.mark.parametrize("number", [9, 18])
def test_init_may_fail(machine: Machine, number: int) -> None:
    """No driver, and a driver of another version, show at init."""
    fake = machine("a100", start=False)
    fake.set_machine(init_code=number)
    assert code(pynvml.nvmlInit) == number
    fake.set_machine(init_code=0)
    assert code(pynvml.nvmlInit) == 0


def test_nothing_works_before_init_or_after_shutdown(machine: Machine) -> None:
    """A call outside init and shutdown is uninitialised, and a second shutdown too."""
    machine("a100")
    gpu = handle()
    pynvml.nvmlShutdown()
    assert code(lambda: pynvml.nvmlDeviceGetPowerUsage(gpu)) == pynvml.NVML_ERROR_UNINITIALIZED
    assert code(pynvml.nvmlShutdown) == pynvml.NVML_ERROR_UNINITIALIZED


def test_a_lost_gpu_loses_its_handle_and_one_to_be_reset_says_so(machine: Machine) -> None:
    """A lost GPU answers 15 everywhere and is still counted; one that needs a reset answers 16."""
    fake = machine("a100", "l4")
    gpu = handle(1)
    fake.set(1, lost=1)
    assert code(lambda: pynvml.nvmlDeviceGetPowerUsage(gpu)) == pynvml.NVML_ERROR_GPU_IS_LOST
    assert code(lambda: handle(1)) == pynvml.NVML_ERROR_GPU_IS_LOST
    assert pynvml.nvmlDeviceGetCount() == 2
    fake.set(1, lost=0, reset_required=1)
    assert code(lambda: pynvml.nvmlDeviceResetGpuLockedClocks(gpu)) == pynvml.NVML_ERROR_RESET_REQUIRED
    assert fake.log()[-1].code == pynvml.NVML_ERROR_RESET_REQUIRED


def test_indexes_move_and_uuids_do_not(machine: Machine) -> None:
    """Between two readings index 0 may become another GPU; its UUID still leads to the same board."""
    fake = machine("a100", "l4")
    fake.fail("nvmlDeviceGetHandleByIndex", kind=FaultKind.REORDER, skip=1, times=1)
    assert [pynvml.nvmlDeviceGetName(handle(0)) for _ in range(2)] == ["NVIDIA A100-PCIE-40GB", "NVIDIA L4"]
    moved = pynvml.nvmlDeviceGetHandleByUUID(fake.uuid(0))
    assert pynvml.nvmlDeviceGetName(moved) == "NVIDIA A100-PCIE-40GB"
    assert pynvml.nvmlDeviceGetIndex(moved) == 1
    by_bus = pynvml.nvmlDeviceGetHandleByPciBusId("00000000:02:00.0")
    assert pynvml.nvmlDeviceGetUUID(by_bus) == fake.uuid(1)
    fake.reorder([0, 1])
    assert pynvml.nvmlDeviceGetName(handle(0)) == "NVIDIA A100-PCIE-40GB"
    assert code(lambda: pynvml.nvmlDeviceGetHandleByUUID("GPU-none")) == pynvml.NVML_ERROR_NOT_FOUND
    assert code(lambda: handle(2)) == pynvml.NVML_ERROR_INVALID_ARGUMENT


def test_a_driver_reload_forgets(machine: Machine) -> None:
    """After a reload locks are gone, the limit is the default, energy counts anew, old handles are lost."""
    fake = machine("a100")
    fake.set(0, load_permille=BUSY)
    before = fake.snapshot()
    pynvml.nvmlDeviceSetGpuLockedClocks(handle(), 600, 900)
    pynvml.nvmlDeviceSetPowerManagementLimit(handle(), 200_000)
    fake.advance(100.0)
    old, spent_mj = handle(), pynvml.nvmlDeviceGetTotalEnergyConsumption(handle())
    fake.reload_driver()
    assert fake.snapshot() == before
    assert code(lambda: pynvml.nvmlDeviceGetPowerUsage(old)) == pynvml.NVML_ERROR_GPU_IS_LOST
    pynvml.nvmlShutdown()
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetTotalEnergyConsumption(handle()) < spent_mj


def test_without_persistence_settings_may_go_with_the_last_client(machine: Machine) -> None:
    """Where the driver lets go of an idle GPU, a lock ends with its last user, unless persistence is on."""
    fake = machine("a100", start=False)
    fake.set_machine(forget_without_persistence=1)
    before = fake.snapshot()
    pynvml.nvmlInit()
    pynvml.nvmlDeviceSetGpuLockedClocks(handle(), 600, 900)
    assert fake.snapshot() != before
    pynvml.nvmlShutdown()
    assert fake.snapshot() == before
    pynvml.nvmlInit()
    pynvml.nvmlDeviceSetPersistenceMode(handle(), 1)
    assert pynvml.nvmlDeviceGetPersistenceMode(handle()) == 1
    pynvml.nvmlDeviceSetGpuLockedClocks(handle(), 600, 900)
    pynvml.nvmlShutdown()
    assert fake.snapshot()[fake.uuid(0)]["gpu_lock_max_mhz"] == 900


def test_another_program_may_write(machine: Machine) -> None:
    """A foreign write shows in the driver and in the log as nobody's of ours."""
    fake = machine("a100")
    fake.foreign(0, power_limit_mw=180_000)
    assert pynvml.nvmlDeviceGetPowerManagementLimit(handle()) == 180_000
    assert (fake.log()[-1].call, fake.log()[-1].arguments, fake.log()[-1].note) == (
        "power_limit_mw",
        (180_000,),
        "foreign",
    )


# Processes


def test_a_killed_child_leaves_its_locks_behind(machine: Machine) -> None:
    """State outlives the process that made it, and other processes see it at once."""
    fake = machine("a100")
    done = child("import os, signal\nn.nvmlDeviceSetGpuLockedClocks(h, 300, 600)\nos.kill(os.getpid(), signal.SIGKILL)")
    assert done.returncode == -signal.SIGKILL
    assert fake.snapshot()[fake.uuid(0)]["gpu_lock_max_mhz"] == 600
    fake.set(0, load_permille=BUSY)
    assert pynvml.nvmlDeviceGetClockInfo(handle(), pynvml.NVML_CLOCK_SM) == 600


@pytest.mark.parametrize(("kind", "changed"), [(FaultKind.DIE_BEFORE, False), (FaultKind.DIE_AFTER, True)])
def test_a_child_can_be_killed_around_its_nth_setter(machine: Machine, kind: FaultKind, changed: bool) -> None:
    """The process dies by SIGKILL at the planned setter, before or after it took effect, and others go on."""
    fake = machine("a100")
    fake.fail("*", kind=kind, skip=1, times=1)
    done = child(
        """
        n.nvmlDeviceSetGpuLockedClocks(h, 300, 600)
        n.nvmlDeviceSetPowerManagementLimit(h, 200000)
        print("survived")
        """
    )
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == ""
    now = fake.snapshot()[fake.uuid(0)]
    assert now["gpu_lock_max_mhz"] == 600
    assert now["power_limit_mw"] == (200_000 if changed else 250_000)
    assert [line.pid == os.getpid() for line in fake.log()] == [False, False]
    assert fake.log()[-1].note == ("died after" if changed else "died before")
    pynvml.nvmlDeviceSetPowerManagementLimit(handle(), 250_000)


def test_two_processes_and_many_threads_do_not_tear_the_log(machine: Machine) -> None:
    """Every setter of every thread is one whole line, and none is lost."""
    fake = machine("a100")
    environment = fake.environment()
    body = "for limit in range(150000, 150200): n.nvmlDeviceSetPowerManagementLimit(h, limit)"
    gpu = handle()
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(child, body, **environment) for _ in range(2)]
        own = [pool.submit(pynvml.nvmlDeviceSetPowerManagementLimit, gpu, 160_000 + n) for n in range(200)]
    assert [other.result().returncode for other in others] == [0, 0]
    assert [one.result() for one in own] == [None] * 200
    assert len(fake.log()) == 600
    assert fake.get_machine("setter_calls") == 600


def test_a_fork_shares_the_machine(machine: Machine) -> None:
    """A forked child works on the same state, with a lock of its own."""
    fake = machine("a100")
    done = child(
        """
        import os
        if (pid := os.fork()) == 0:
            n.nvmlDeviceSetPowerManagementLimit(h, 170000)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert n.nvmlDeviceGetPowerManagementLimit(h) == 170000
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert fake.snapshot()[fake.uuid(0)]["power_limit_mw"] == 170_000


def test_without_a_state_there_is_no_driver(machine: Machine) -> None:
    """The library alone, pointed at nothing, says that no driver is loaded."""
    fake = machine("a100")
    for where in ("/nonexistent", ""):
        program = "import pynvml as n\ntry: n.nvmlInit()\nexcept n.NVMLError as e: print(e.value)"
        env = {**os.environ, **fake.environment(), "POLYTHROTTLE_FAKE_NVML": where}
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env)
        assert done.stdout.strip() == "9"


# The tests' side


def test_leaving_puts_the_environment_and_the_bindings_back(tmp_path: Path) -> None:
    """After it the environment is as before, and the bindings start anew on the next one."""
    outside = dict(os.environ)
    for name, gpus in (("one", 1), ("two", 2)):
        with FakeNvml(tmp_path / name, ["a100"] * gpus):
            pynvml.nvmlInit()
            assert pynvml.nvmlDeviceGetCount() == gpus
    assert dict(os.environ) == outside
    assert pynvml.nvmlLib is None


def test_a_folder_can_be_used_again(tmp_path: Path) -> None:
    """A new stand-in in the folder of an old one starts from its own state and an empty log."""
    for limit_mw in (200_000, 210_000):
        with FakeNvml(tmp_path / "nvml") as fake:
            pynvml.nvmlInit()
            assert pynvml.nvmlDeviceGetPowerManagementLimit(handle()) == 250_000
            pynvml.nvmlDeviceSetPowerManagementLimit(handle(), limit_mw)
            assert [line.arguments for line in fake.log()] == [(limit_mw,)]


def test_its_clock_moves_its_counters(machine: Machine) -> None:
    """Sleeping on the stand-in's clock is time in which energy is spent."""
    fake = machine("a100")
    clock = fake.clock()
    start_s, start_mj = clock.now(), pynvml.nvmlDeviceGetTotalEnergyConsumption(handle())
    clock.sleep(10.0)
    assert clock.now() - start_s == pytest.approx(10.0)
    spent_mj = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle()) - start_mj
    assert spent_mj == pytest.approx(10 * fake.power_mw(0), rel=1e-3)


def test_wrong_names_are_refused(machine: Machine, tmp_path: Path) -> None:
    """A model, number, text or call that does not exist is an error of ours, never ignored."""
    fake = machine("a100")
    wrong: list[Callable[[], object]] = [
        lambda: FakeNvml(tmp_path / "x", ["a200"]),
        lambda: fake.set(0, colour=1),
        lambda: fake.set(5, load_permille=1),
        lambda: fake.set_machine(colour=1),
        lambda: fake.set_text(0, colour="red"),
        lambda: fake.get(0, "colour"),
        lambda: fake.fail("nvmlDevicePaint"),
    ]
    for call in wrong:
        with pytest.raises(UnknownName):
            call()


def test_too_much_is_refused(machine: Machine) -> None:
    """More faults or processes than fit are an error, never dropped."""
    fake = machine("a100")
    with pytest.raises(DeviceError, match="more faults"):
        [fake.fail("*") for _ in range(40)]
    with pytest.raises(DeviceError, match="too many processes"):
        [fake.add_process(0, pid, 1) for pid in range(40)]


def test_a_machine_without_a_compiler_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Building needs a C compiler, and the error names what was looked for."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert compiler() is None
    with pytest.raises(DeviceError, match="no C compiler"):
        build(tmp_path / "lib")


def test_without_one_the_compiler_of_the_package_ziglang_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with Python and make alone installs it from PyPI."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "ziglang")
    assert compiler() == f"{sys.executable} -m ziglang cc"


def test_a_compiler_that_fails_is_an_error_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler wrote is in the error."""
    broken = tmp_path / "mycc"
    broken.write_text("#!/bin/sh\necho out of luck >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(DeviceError, match="out of luck"):
        build(tmp_path / "lib")


@pytest.mark.slow
def test_a_library_under_the_drivers_name_that_is_no_stand_in_stops_it(tmp_path: Path) -> None:
    """Where another library of that name is loaded already, the stand-in refuses to start: no write goes astray."""
    real = tmp_path / "real" / "libnvidia-ml.so.1"
    real.parent.mkdir()
    source = tmp_path / "real.c"
    source.write_text("int nvmlInit_v2(void) { return 0; }\n")
    words = [
        *(compiler() or "").split(),
        "-shared",
        "-fPIC",
        "-Wl,-soname,libnvidia-ml.so.1",
        "-o",
        str(real),
        str(source),
    ]
    cache = str(tmp_path / "zig")
    subprocess.run(words, check=True, env={**os.environ, "ZIG_LOCAL_CACHE_DIR": cache, "ZIG_GLOBAL_CACHE_DIR": cache})
    program = f"""
import ctypes; from pathlib import Path
ctypes.CDLL({str(real)!r})
from polythrottle.testing.nvml import FakeNvml
FakeNvml(Path({str(tmp_path / "nvml")!r}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "a real libnvidia-ml.so.1 is loaded" in done.stderr


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """A file where the folder should be ends with the system's own error."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=os.strerror(errno.EEXIST)):
        FakeNvml(tmp_path / "file")
