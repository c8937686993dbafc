"""NVIDIA GPUs, seen through the real bindings on the stand-in driver: what is offered, set, read and put back."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pynvml
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polythrottle.actuation import Limits
from polythrottle.actuation.drivers.nvml import (
    CODES,
    UNLOCKED,
    Library,
    NotOffered,
    NvmlControls,
    Reaction,
    key_of,
    mask_ids,
)
from polythrottle.backends import find_device, open_device
from polythrottle.backends.nvml import NvmlDevice
from polythrottle.backends.nvml.energy import EnergyCounter, channels, may_set
from polythrottle.backends.power import BackgroundSampler, PowerIntegrator, PowerReading
from polythrottle.domain.clock import Clock, SystemClock, VirtualClock
from polythrottle.domain.errors import (
    DeviceError,
    InvalidInput,
    KnobAbsent,
    KnobRejected,
    PermissionDenied,
    TrialError,
    UnknownName,
)
from polythrottle.domain.measurement import EnergyKind, Measurement, Query, Window
from polythrottle.domain.ports import Finding, Sensor
from polythrottle.domain.space import OperatingPoint, SearchSpace
from polythrottle.metering import validity
from polythrottle.metering.point_measurement import measure
from polythrottle.metering.validity import LockLost
from polythrottle.testing import DeviceContract
from polythrottle.testing.nvml import MODELS, FakeNvml, FaultKind, compiler

pytestmark = pytest.mark.skipif(
    compiler() is None, reason="no C compiler, so the stand-in NVIDIA driver cannot be built"
)
PACKAGE = Path(__file__).resolve().parents[2] / "polythrottle"
SETTER = re.compile(r"nvml\w*(?:Set|Reset|Clear|Update)(?!Create)\w*")
MHZ = 1_000_000
STEERABLE = ("v100", "a100", "a40", "h100", "l4", "b200", "rtx4090")
ANSWERS = {
    Reaction.ABSENT: NotOffered,
    Reaction.FORBIDDEN: PermissionDenied,
    Reaction.FLEETING: KnobRejected,
    Reaction.REFUSED: KnobRejected,
    Reaction.GONE: DeviceError,
}

Machine = Callable[..., FakeNvml]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """Return a maker of entered stand-ins with their time frozen."""
    made: list[FakeNvml] = []

    def make(*gpus: str, frozen: bool = True) -> FakeNvml:
        fake = FakeNvml(tmp_path / f"nvml-{len(made)}", gpus or ("a100",), frozen=frozen)
        made.append(fake)
        return fake.__enter__()

    yield make
    for fake in reversed(made):
        fake.__exit__(None, None, None)


def device(fake: FakeNvml, name: str = "0", **options: Any) -> NvmlDevice:
    """Return a GPU of a stand-in, on its time, without a guard process."""
    options = {"clock": fake.clock(), "privileged": True, "limits": Limits(), **options}
    made = NvmlDevice(name, **options)
    made._actuator._guarded = False
    return made


def calls(fake: FakeNvml) -> list[tuple[str, tuple[int, ...]]]:
    """Return what was set, in order, by NVML's names without their beginning."""
    return [(each.call.removeprefix("nvmlDevice"), each.arguments) for each in fake.log()]


def finding(gpu: NvmlDevice, subject: str) -> Finding:
    """Return the one finding about a subject."""
    return next(each for each in gpu.findings() if each.subject == subject)


class TestContract(DeviceContract):
    """The contract of every device, on every model the stand-in has that is not split."""

    @pytest.fixture(autouse=True, params=[*STEERABLE, "laptop"])
    def _gpu(self, machine: Machine, request: pytest.FixtureRequest) -> None:
        self.fake = machine(request.param)

    def make(self) -> NvmlDevice:
        """Return the stand-in's GPU."""
        return device(self.fake)


# The library: return codes, opening and closing


@pytest.mark.parametrize("code", [*sorted(set(CODES) - {6}), 14, 4711])
def test_every_return_code_has_one_meaning(machine: Machine, code: int) -> None:
    """What cannot be had is off, what needs rights says so, what is lost stops the study; each in one line."""
    fake = machine()
    fake.fail("nvmlDeviceGetName", code=code)
    with (
        Library(fake.clock()) as library,
        pytest.raises(ANSWERS[CODES[code].answer if code in CODES else Reaction.GONE]) as caught,
    ):
        library.call("nvmlDeviceGetName", library.gpu(fake.uuid(0)))
    assert f"NVML code {code}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_found_of_a_gpu_is_not_a_gpu_that_is_gone(machine: Machine) -> None:
    """An H200 answers code 6 for samples its driver does not keep; only a lookup that ends so means that it is lost."""
    fake = machine()
    fake.fail("nvmlDeviceGetSamples", code=6)
    with Library(fake.clock()) as library, pytest.raises(NotOffered, match=r"the driver has none \(NVML code 6\)"):
        library.call("nvmlDeviceGetSamples", library.gpu(fake.uuid(0)), 5, 0)
    fake.fail("nvmlDeviceGetHandleByUUID", code=6)
    with Library(fake.clock()) as library, pytest.raises(DeviceError, match=r"NVML code 6"):
        library.gpu(fake.uuid(0))


def test_the_handle_of_a_gpu_is_kept_until_the_driver_says_that_it_is_gone(machine: Machine) -> None:
    """To read again and again costs no lookup; what was lost, or closed in between, is looked up anew."""
    fake = machine()
    uuid = fake.uuid(0)
    library = Library(fake.clock())
    with library:
        assert library.ask(uuid, "nvmlDeviceGetName") == "NVIDIA A100-PCIE-40GB"
        fake.fail("nvmlDeviceGetHandleByUUID", code=6)
        assert library.ask(uuid, "nvmlDeviceGetName") == "NVIDIA A100-PCIE-40GB"
        fake.fail("nvmlDeviceGetName", code=15)
        with pytest.raises(DeviceError, match="fallen off the bus"):
            library.ask(uuid, "nvmlDeviceGetName")
        fake.clear_faults()
        fake.fail("nvmlDeviceGetHandleByUUID", code=6)
        with pytest.raises(DeviceError, match=r"NVML code 6"):
            library.ask(uuid, "nvmlDeviceGetName")
        fake.clear_faults()
        assert library.ask(uuid, "nvmlDeviceGetName") == "NVIDIA A100-PCIE-40GB"
    fake.fail("nvmlDeviceGetHandleByUUID", code=6)
    with library, pytest.raises(DeviceError, match=r"NVML code 6"):
        library.ask(uuid, "nvmlDeviceGetName")


@pytest.mark.parametrize(("gpu", "counts"), [("a100", True), ("laptop", False)])
def test_an_idle_gpu_is_looked_at_more_seldom_unless_its_joules_are_made_of_the_looks(
    machine: Machine, gpu: str, counts: bool
) -> None:
    """One look in five does while nothing runs; work, and a slowdown of whatever kind, is looked at at every turn."""
    fake = machine(gpu)
    made = device(fake)
    assert isinstance(made._energy, EnergyCounter) is counts
    fake.set(0, load_permille=0)
    assert made._look() == (4 if counts else 0)
    fake.set(0, load_permille=1000)
    assert made._look() == 0
    fake.set(0, load_permille=0, forced_reasons=0x40)
    assert made._look() == 0


def test_looks_left_out_put_off_the_next() -> None:
    """What may be left out is; who is due within half a period is looked at with the others."""
    answers = iter([None, 4, 0])
    sampler = BackgroundSampler(lambda: next(answers), 1e6, SystemClock(), "left out", shared=True)
    sampler.start()
    try:
        due_s = sampler.due_s
        assert sampler.look(1e6)
        assert sampler.due_s - due_s == pytest.approx(1e6)
        assert sampler.look(1e6)
        assert sampler.due_s - due_s == pytest.approx(6e6)
        assert sampler.look(1e6)
        assert sampler.due_s - due_s == pytest.approx(7e6)
    finally:
        sampler.stop()


@pytest.mark.parametrize("code", [10, 19, 21, 27])
def test_a_busy_driver_is_asked_again(machine: Machine, code: int) -> None:
    """Timeout, in use, no data and not ready pass by themselves, with longer and longer pauses."""
    fake = machine()
    fake.fail("nvmlDeviceGetName", code=code, times=3)
    before_s = fake.now_s
    with Library(fake.clock()) as library:
        assert library.call("nvmlDeviceGetName", library.gpu(fake.uuid(0))) == "NVIDIA A100-PCIE-40GB"
    assert fake.now_s - before_s == pytest.approx(0.01 + 0.02 + 0.04)


def test_a_permission_error_carries_the_remedy(machine: Machine) -> None:
    """It names root, the container's flag and that reading needs neither."""
    fake = machine()
    fake.set_machine(privileged=0)
    controls = NvmlControls(Library(fake.clock()))
    with pytest.raises(PermissionDenied, match=r"root.*--cap-add SYS_ADMIN.*reading"):
        controls.write(key_of(fake.uuid(0), "power_limit_mw"), "200000")


@pytest.mark.parametrize(("code", "told"), [(9, "not loaded"), (12, "libnvidia-ml.so.1"), (18, "reboot")])
def test_without_a_working_driver_one_line_says_what_to_do(machine: Machine, code: int, told: str) -> None:
    """No driver, none loaded, or an upgrade that is half done."""
    fake = machine()
    fake.fail("nvmlInit", code=code)
    with pytest.raises(DeviceError, match=told):
        device(fake)


def test_nvml_is_open_exactly_while_the_device_is_entered(machine: Machine) -> None:
    """Locks may go with the last client, and a GPU with a client can neither sleep nor be reset."""
    gpu = device(machine())
    assert len(gpu.space) > 1
    assert pynvml._nvmlLib_refcount == 0
    with gpu:
        gpu.apply(gpu.space[0])
        gpu.read()
        assert pynvml._nvmlLib_refcount == 1
    assert pynvml._nvmlLib_refcount == 0


def test_locks_hold_while_entered_even_if_the_driver_forgets_without_clients(machine: Machine) -> None:
    """Without persistence mode it forgets when its last client leaves; while a device is entered there is one."""
    fake = machine()
    fake.set_machine(forget_without_persistence=1)
    with device(fake) as gpu:
        gpu.apply(gpu.space[0])
        gpu.read()
        assert fake.get(0, "gpu_lock_max_mhz") == 210


def test_only_one_module_sets_anything() -> None:
    """No other module of the package names a setter of NVML, and the ones to avoid are called nowhere."""
    named = {
        path.relative_to(PACKAGE).as_posix(): SETTER.findall(path.read_text())
        for path in PACKAGE.rglob("*.py")
        if "testing" not in path.parts
    }
    assert {name for name, found in named.items() if found} == {"actuation/drivers/nvml.py"}
    spoken = re.findall(r'"(nvml\w+)"', (PACKAGE / "actuation/drivers/nvml.py").read_text())
    assert not [name for name in spoken if name.endswith("_v2") or "ApplicationsClocks" in name]


# Which GPU


def test_an_index_is_a_uuid_from_then_on(machine: Machine) -> None:
    """The URI names the UUID, and the same GPU is read and set after the order has changed."""
    fake = machine("a100", "l4")
    gpu = device(fake, "1")
    assert gpu.uri == f"nvml:{fake.uuid(1)}"
    fake.reorder([1, 0])
    assert gpu.title == "NVIDIA L4"
    with gpu:
        gpu.apply(gpu.space[0])
    assert {each.uuid for each in fake.log()} == {fake.uuid(1)}
    assert device(fake, fake.uuid(1)).title == "NVIDIA L4"


def test_a_new_order_between_two_calls_changes_nothing(machine: Machine) -> None:
    """Every operation looks its GPU up by UUID, so a swap in the middle of a reading or a write hits nobody else."""
    fake = machine("a100", "l4")
    with device(fake, fake.uuid(0)) as gpu:
        for call in (
            "nvmlDeviceGetClockInfo",
            "nvmlDeviceGetTotalEnergyConsumption",
            "nvmlDeviceGetPowerManagementLimit",
        ):
            fake.fail(call, kind=FaultKind.REORDER, times=3)
        gpu.apply(gpu.space[0])
        assert gpu.read().clocks_hz["mem"] == 1215 * MHZ
    assert {each.uuid for each in fake.log()} == {fake.uuid(0)}


@pytest.mark.parametrize("name", ["2", "GPU-nobody", "-1", "x" * 200, "00"])
def test_a_gpu_that_is_not_there_is_named_with_those_that_are(machine: Machine, name: str) -> None:
    """Indexes and UUIDs are offered."""
    fake = machine("a100", "l4")
    with pytest.raises(UnknownName, match=r"unknown GPU"):
        device(fake, name)


def test_without_a_name_there_must_be_one_gpu(machine: Machine) -> None:
    """One is taken; of two, one must be named; none is an error."""
    assert device(machine("l4"), "").title == "NVIDIA L4"
    with pytest.raises(InvalidInput, match="2 GPUs"):
        device(machine("l4", "a100"), "")
    with pytest.raises(DeviceError, match="finds no GPU"):
        device(machine().__class__(machine().folder.parent / "none", (), frozen=True).__enter__(), "")


def test_a_gpu_that_is_lost_does_not_hide_the_others(machine: Machine) -> None:
    """The list leaves it out."""
    fake = machine("a100", "l4")
    fake.set(0, lost=1)
    assert device(fake, fake.uuid(1)).title == "NVIDIA L4"


@pytest.mark.parametrize("name", ["0", "MIG-41b3"])
def test_a_split_gpu_is_refused_with_the_reason(machine: Machine, name: str) -> None:
    """MIG: the power of an instance cannot be told from its neighbours'."""
    with pytest.raises(DeviceError, match=r"MIG.*its power cannot be told"):
        device(machine("a100-mig"), name)


def test_identity_and_files(machine: Machine) -> None:
    """Name, UUID, firmware, driver and PCI address as the driver gives them; the kernel writes the address shorter."""
    gpu = device(machine())
    assert gpu.identity == {
        "name": "NVIDIA A100-PCIE-40GB",
        "uuid": gpu.uuid,
        "pci": "00000000:01:00.0",
        "vbios": "00.00.00.00.01",
        "architecture": "7",
        "driver": "999.0.stand-in",
        "nvml": "13.999.0.stand-in",
    }
    assert gpu.files[1] == "/proc/driver/nvidia/gpus/0000:01:00.0/information"


def test_what_the_driver_does_not_tell_is_left_out_of_the_identity(machine: Machine) -> None:
    """Unknown is absent, not empty."""
    fake = machine()
    fake.fail("nvmlDeviceGetVbiosVersion", code=3)
    assert "vbios" not in device(fake).identity


@pytest.mark.parametrize(
    ("uri", "error", "told"),
    [
        ("nvml:0?scope=rack", UnknownName, "scope"),
        ("nvml:0?hz=often", InvalidInput, "hz='often'"),
        ("nvml:0?hz=0", InvalidInput, "hz"),
        ("nvml:0?hz=nan", InvalidInput, "hz"),
        ("nvml:0?seed=1", UnknownName, "option"),
        ("nvml:7", UnknownName, "unknown GPU '7'"),
    ],
)
def test_a_uri_that_means_nothing_is_refused(machine: Machine, uri: str, error: type[Exception], told: str) -> None:
    """Options and names, in one line."""
    machine()
    with pytest.raises(error, match=told):
        open_device(uri)


def test_a_uri_opens_the_gpu_with_its_options(machine: Machine) -> None:
    """Those at their default are left out of the URI that opens it again."""
    fake = machine("b200")
    assert open_device("nvml:0?scope=module&hz=5").uri == f"nvml:{fake.uuid(0)}?scope=module&hz=5"
    assert open_device("nvml:0?scope=gpu&hz=10").uri == f"nvml:{fake.uuid(0)}"


def test_auto_takes_the_gpu_and_says_which(tmp_path: Path) -> None:
    """The first the driver's own files name, and how many there are besides."""
    for bus, model in (("0000:01:00.0", "NVIDIA A100"), ("0000:02:00.0", "NVIDIA L4")):
        folder = tmp_path / "proc/driver/nvidia/gpus" / bus
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"IRQ: 1\nModel: \t\t {model}\n")
    found = find_device(tmp_path)
    assert found.uri == "nvml:0"
    assert "NVIDIA A100 is here, the first of 2 GPUs" in found.explanation


# What can be set


def test_levels_are_the_drivers_own_tables(machine: Machine) -> None:
    """Named, a knob has every level; by itself the search takes at most fifty clocks, the highest among them."""
    gpu = device(machine("a100"), knobs=("gpu_max_hz",))
    assert gpu.space.knob("gpu_max_hz").levels == tuple(each * MHZ for each in range(210, 1411, 15))
    levels = device(machine("a100")).space.knob("gpu_max_hz").levels
    assert len(levels) == 41
    assert levels[-2:] == (1380 * MHZ, 1410 * MHZ)


def test_graphics_clocks_depend_on_the_memory_clock(machine: Machine) -> None:
    """Only pairs the driver lists together are points: an A40 holds its clock low while memory is in its low state."""
    gpu = device(machine("a40"), knobs=("gpu_max_hz", "mem_hz"))
    low = [point for point in gpu.space if point["mem_hz"] == 405 * MHZ]
    assert max(float(point["gpu_max_hz"]) for point in low) == 420 * MHZ
    assert len(gpu.space) == len(low) + 103
    with gpu, pytest.raises(KnobRejected, match="210000000 to 420000000 only"):
        gpu.apply(OperatingPoint({"gpu_max_hz": 1740 * MHZ, "mem_hz": 405 * MHZ}))


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("v100", ("gpu_max_hz", "power_limit_w")),
        ("a100", ("gpu_max_hz", "power_limit_w")),
        ("a40", ("gpu_max_hz", "power_limit_w")),
        ("h100", ("gpu_max_hz", "mem_hz", "power_limit_w")),
        ("l4", ("gpu_max_hz", "power_limit_w")),
        ("b200", ("gpu_max_hz", "power_limit_w")),
        ("rtx4090", ("gpu_max_hz", "mem_hz", "power_limit_w")),
        ("rtx5090", ("gpu_max_hz", "mem_hz", "power_limit_w")),
        ("gh200", ("gpu_max_hz", "mem_hz", "power_limit_w")),
        ("gb10", ("gpu_max_hz",)),
        ("laptop", ()),
    ],
)
def test_what_is_searched_by_default(machine: Machine, model: str, names: tuple[str, ...]) -> None:
    """Memory only where it has two states to serve in; power profiles only if they are named."""
    space = device(machine(model)).space
    assert space.names == names
    assert len(space) <= 3000


@pytest.mark.parametrize(("model", "mhz"), [("rtx4090", (5001, 10501)), ("rtx5090", (7001, 14001)), ("a40", ())])
def test_memory_clocks_that_serve_are_searched(machine: Machine, model: str, mhz: tuple[int, ...]) -> None:
    """Half the highest serves, an idle state does not, and P2's level is the highest under another name.

    Levels of a 4090: owners' records of 10501, 10251, 5001, 810 and 405 MHz. That CUDA runs memory a level below the
    highest: https://github.com/nicehash/NiceHashQuickMiner/issues/206.
    """
    space = device(machine(model)).space
    assert ("mem_hz" in space.names) is bool(mhz)
    assert not mhz or space.knob("mem_hz").levels == tuple(each * MHZ for each in mhz)
    every = device(machine(model), knobs=("mem_hz",)).space.knob("mem_hz").levels
    assert every == tuple(sorted(memory * MHZ for memory, _ in MODELS[model].clocks_mhz))


def test_under_load_a_geforce_runs_its_memory_below_the_top(machine: Machine) -> None:
    """At the default it is not locked, so that this is no fault; half the rate holds as asked for."""
    fake = machine("rtx4090")
    fake.set(0, load_permille=1000)
    with device(fake) as gpu:
        gpu.apply(gpu.space.default)
        assert gpu.read().clocks_hz["mem"] == 10251 * MHZ
        gpu.apply(gpu.space.default.moved({"mem_hz": 5001 * MHZ}))
        assert gpu.read().clocks_hz["mem"] == 5001 * MHZ


def test_a_locked_memory_clock_that_holds_others_down_is_explained(machine: Machine) -> None:
    """Seen on RTX 5090 alone: https://github.com/NVIDIA/open-gpu-kernel-modules/issues/1266."""
    assert "up to 32 %" in finding(device(machine("rtx5090")), "mem_hz").explanation
    assert "32 %" not in finding(device(machine("rtx4090")), "mem_hz").explanation


@pytest.mark.parametrize("code", [3, 13, 24, 2])
def test_a_knob_the_driver_does_not_have_is_named(machine: Machine, code: int) -> None:
    """Not supported, or not known, is for good; a frequency or a value that is refused is not."""
    fake = machine("rtx4090")
    fake.fail("nvmlDeviceSetMemoryLockedClocks", code=code)
    with device(fake) as gpu, pytest.raises(KnobRejected) as caught:
        gpu.apply(gpu.space.default.moved({"mem_hz": 5001 * MHZ}))
    assert isinstance(caught.value, KnobAbsent) is (code in (3, 13))
    assert getattr(caught.value, "knob", "mem_hz") == "mem_hz"
    assert fake.snapshot()[fake.uuid(0)]["memory_lock_max_mhz"] == 0


def test_a_gb10_lists_no_clocks_and_is_locked_all_the_same(machine: Machine) -> None:
    """Eight ran under a lock of 0 to 2200 MHz: github.com/tonyd2wild/DeepSeek-V4.1-Flash-vLLM-DGX-Spark/issues/1."""
    fake = machine("gb10")
    fake.set(0, load_permille=1000)
    with device(fake) as gpu:
        assert gpu.space.names == ("gpu_max_hz",)
        levels = gpu.space.knob("gpu_max_hz").levels
        assert (levels[0], levels[-2], levels[-1]) == (700 * MHZ, 3000 * MHZ, 3003 * MHZ)
        gpu.apply(OperatingPoint({"gpu_max_hz": 2200 * MHZ}))
        assert calls(fake) == [("SetGpuLockedClocks", (0, 2200))]
        assert 2180 * MHZ < gpu.read().clocks_hz["gpu"] <= 2200 * MHZ
        assert gpu.boundary.startswith("the driver's energy counter")
    assert calls(fake)[-1][0] == "ResetGpuLockedClocks"


def test_a_memory_clock_alone_can_be_searched(machine: Machine) -> None:
    """The graphics clock is then left to the driver, which keeps it within the memory clock's table."""
    fake = machine("a40")
    fake.set(0, load_permille=1000)
    with device(fake, knobs=("mem_hz",)) as gpu:
        gpu.apply(OperatingPoint({"mem_hz": 405 * MHZ}))
        assert gpu.read().clocks_hz == {"gpu": 420 * MHZ, "mem": 405 * MHZ}
    assert not [call for call, _ in calls(fake) if "GpuLocked" in call]


@pytest.mark.parametrize(
    ("model", "knob", "told"),
    [
        ("v100", "mem_hz", "Ampere or newer"),
        ("laptop", "gpu_max_hz", "lists no clocks"),
        ("laptop", "power_limit_w", "does not let its power be limited"),
        ("a100", "power_profile", "no workload power profiles"),
    ],
)
def test_a_knob_that_is_off_says_why(machine: Machine, model: str, knob: str, told: str) -> None:
    """In the findings, and to who names it."""
    gpu = device(machine(model))
    assert told in finding(gpu, knob).explanation
    assert finding(gpu, knob).works is False
    with pytest.raises(DeviceError, match=told):
        device(machine(model), knobs=(knob,)).space  # noqa: B018
    with gpu, pytest.raises(KnobRejected, match=told):
        gpu.apply(OperatingPoint({knob: 1}))


@pytest.mark.parametrize(
    ("call", "code", "knob"),
    [
        ("nvmlDeviceGetSupportedMemoryClocks", 13, "gpu_max_hz"),
        ("nvmlDeviceGetSupportedGraphicsClocks", 3, "gpu_max_hz"),
        ("nvmlDeviceGetSupportedMemoryClocks", 26, "mem_hz"),
        ("nvmlDeviceGetPowerManagementLimitConstraints", 24, "power_limit_w"),
        ("nvmlDeviceGetPowerManagementLimit", 13, "power_limit_w"),
    ],
)
def test_a_call_the_driver_lacks_turns_its_knob_off(machine: Machine, call: str, code: int, knob: str) -> None:
    """Codes 3, 13, 24 and 26; everything else goes on working."""
    fake = machine("h100")
    fake.fail(call, code=code)
    gpu = device(fake)
    assert knob not in gpu.space.names
    assert len(gpu.space) > 1
    with gpu:
        gpu.apply(gpu.space[0])


def test_a_gpu_lost_while_it_is_probed_is_lost_and_not_poor(machine: Machine) -> None:
    """No knob is taken for missing because the GPU went away meanwhile."""
    fake = machine()
    gpu = device(fake)
    fake.set(0, lost=1)
    with pytest.raises(DeviceError, match="fallen off the bus"):
        gpu.space  # noqa: B018


def test_a_knob_named_twice_or_unknown_is_refused(machine: Machine) -> None:
    """Before anything is entered."""
    fake = machine()
    with pytest.raises(InvalidInput, match="twice"):
        device(fake, knobs=("gpu_max_hz", "gpu_max_hz")).space  # noqa: B018
    with pytest.raises(UnknownName, match="gpu_max_mhz"):
        device(fake, knobs=("gpu_mx_hz",)).space  # noqa: B018


@pytest.mark.parametrize("enforced_known", [True, False])
def test_the_power_limit_never_goes_above_what_was_found(machine: Machine, enforced_known: bool) -> None:
    """An operator's cap is the default and the top, whatever the card could take."""
    fake = machine("h100")
    fake.set(0, power_limit_mw=312_500)
    if not enforced_known:
        fake.fail("nvmlDeviceGetEnforcedPowerLimit", code=3)
    knob = device(fake).space.knob("power_limit_w")
    assert knob.levels == (200, 225, 250, 275, 300, 312.5)
    with device(fake) as gpu:
        assert gpu.space.default["power_limit_w"] == 312.5
        gpu.apply(gpu.space[0])
    assert fake.get(0, "power_limit_mw") == 312_500


def test_limits_above_what_is_enforced_are_not_offered(machine: Machine) -> None:
    """A cap from outside the driver makes them meaningless; the findings name it."""
    fake = machine("h100")
    fake.set(0, outer_limit_mw=300_000)
    gpu = device(fake)
    assert gpu.space.knob("power_limit_w").levels == (200, 225, 250, 275, 300, 400)
    assert "300 W are enforced from outside" in finding(gpu, "power limit").explanation


def test_the_administrators_limits_cut_the_tables(machine: Machine) -> None:
    """Levels outside are not there, and a ceiling on the clock is locked even at the default."""
    bounds = {"gpu_max_hz": (600e6, 1200e6), "power_limit_w": (250.0, 1e9), "mem_hz": (2000e6, 1e12)}
    fake = machine("h100")
    with device(fake, limits=Limits({"nvml": bounds})) as gpu:
        assert gpu.space.names == ("gpu_max_hz", "power_limit_w")
        assert gpu.space.knob("gpu_max_hz").levels[-1] == 1200 * MHZ
        assert gpu.space.knob("power_limit_w").levels[0] == 250
        gpu.apply(gpu.space.default)
        with pytest.raises(KnobRejected, match="no level"):
            gpu.apply(OperatingPoint({"gpu_max_hz": 1785 * MHZ}))
    assert calls(fake)[0] == ("SetGpuLockedClocks", (345, 1200))


def test_limits_that_leave_nothing_turn_a_knob_off(machine: Machine) -> None:
    """Here for one GPU by its identity."""
    fake = machine("h100")
    bounds = {"gpu_max_hz": (1.0, 2.0), "power_limit_w": (1e6, 2e6), "mem_hz": (1.0, 2.0)}
    gpu = device(fake, limits=Limits({fake.uuid(0): bounds}))
    assert len(gpu.space) == 1
    assert "administrator" in finding(gpu, "power_limit_w").explanation


def test_a_gpu_without_a_knob_can_still_be_measured(machine: Machine) -> None:
    """Its boundary says that nothing can be set; who names a knob gets the reason, and what works all the same."""
    fake = machine("laptop")
    fake.set(0, load_permille=1000)
    with device(fake) as gpu:
        assert len(gpu.space) == 1
        assert "nothing on it can be set" in gpu.boundary
        gpu.apply(gpu.space.default)
        assert joules_per_second(fake, gpu) == pytest.approx(115, rel=0.05)
    with pytest.raises(DeviceError, match=r"gpu_max_hz cannot be set.*it can be measured all the same"):
        device(fake, knobs=("gpu_max_hz",)).space  # noqa: B018


# Setting and putting back


def test_memory_goes_first_then_clock_then_power(machine: Machine) -> None:
    """In this order out, and in reverse back; the tree of the driver is then as it was found."""
    fake = machine("h100")
    before = fake.snapshot()
    with device(fake) as gpu:
        gpu.apply(OperatingPoint({"gpu_max_hz": 1065 * MHZ, "mem_hz": 1593 * MHZ, "power_limit_w": 250}))
    assert calls(fake) == [
        ("SetMemoryLockedClocks", (1593, 1593)),
        ("SetGpuLockedClocks", (345, 1065)),
        ("SetPowerManagementLimit", (250_000,)),
        ("SetPowerManagementLimit", (400_000,)),
        ("ResetGpuLockedClocks", ()),
        ("ResetMemoryLockedClocks", ()),
    ]
    assert fake.snapshot() == before


def test_at_the_default_nothing_is_written(machine: Machine) -> None:
    """So that anybody may measure there, with rights or without; a lock found cannot be seen and is not lifted."""
    fake = machine("h100")
    with device(fake, privileged=False) as gpu:
        gpu.apply(gpu.space.default)
        gpu.read()
    assert fake.log() == []


def test_going_back_to_the_default_unlocks_what_was_locked(machine: Machine) -> None:
    """The highest level of a clock is the driver's own choice."""
    fake = machine("h100")
    before = fake.snapshot()
    with device(fake) as gpu:
        gpu.apply(gpu.space[0])
        gpu.apply(gpu.space.default)
        assert fake.snapshot() == before


def test_without_rights_nothing_is_tried(machine: Machine) -> None:
    """The findings say it before any write, with the remedy; so does the first point that needs one."""
    fake = machine("h100")
    gpu = device(fake, privileged=False)
    remedy = finding(gpu, "rights to set").remedy
    assert "SYS_ADMIN" in remedy
    assert "--knobs none" in remedy
    assert finding(gpu, "gpu_max_hz").works is False
    with gpu, pytest.raises(PermissionDenied, match="--cap-add SYS_ADMIN"):
        gpu.apply(gpu.space[0])
    assert fake.log() == []


def test_a_driver_that_refuses_in_spite_of_the_capability_leaves_nothing_to_undo(machine: Machine) -> None:
    """As in a user namespace: one clear error, and the GPU can be measured afterwards."""
    fake = machine("h100")
    fake.set_machine(privileged=0)
    with device(fake) as gpu, pytest.raises(PermissionDenied, match="no permission"):
        gpu.apply(gpu.space[0])
    with device(fake) as gpu:
        gpu.apply(gpu.space.default)


def test_a_lock_left_by_another_is_not_forgotten_for_want_of_rights(machine: Machine) -> None:
    """What a process with rights left locked stays on record until one with rights puts it back."""
    fake = machine("h100")
    before = fake.snapshot()
    dead = device(fake).__enter__()
    dead.apply(dead.space[0])
    dead._actuator._release()
    fake.set_machine(privileged=0)
    for _ in range(2):
        with pytest.raises(DeviceError, match="is not restored"):
            device(fake).__enter__()
    fake.set_machine(privileged=1)
    with device(fake):
        assert fake.snapshot() == before


@pytest.mark.parametrize("capabilities", ["000001ffffffffff", "0000000000200000"])
def test_rights_are_a_capability_not_a_user(tmp_path: Path, capabilities: str) -> None:
    """The driver asks for CAP_SYS_ADMIN; root in a container has it only if it was given."""
    status = tmp_path / "status"
    status.write_text(f"Name:\tpython\nCapEff:\t{capabilities}\nCapBnd:\t0\n")
    assert may_set(status)
    status.write_text("Name:\tpython\nCapEff:\t00000000a80425fb\n")
    assert not may_set(status)


@pytest.mark.parametrize(
    ("call", "kind", "value", "told"),
    [
        ("nvmlDeviceSetGpuLockedClocks", FaultKind.IGNORE, 0, "asked for a graphics clock"),
        ("nvmlDeviceSetGpuLockedClocks", FaultKind.SKEW, -150, "asked for a graphics clock"),
        ("nvmlDeviceSetMemoryLockedClocks", FaultKind.IGNORE, 0, "asked for a memory clock"),
        ("nvmlDeviceSetPowerManagementLimit", FaultKind.IGNORE, 0, "wrote 200000"),
        ("nvmlDeviceSetPowerManagementLimit", FaultKind.SKEW, -5000, "wrote 200000"),
        ("nvmlDeviceSetPowerManagementLimit", FaultKind.OVERWRITE, 300_000, "wrote 200000"),
    ],
)
def test_a_setting_that_does_not_hold_is_rejected(
    machine: Machine, call: str, kind: FaultKind, value: int, told: str
) -> None:
    """Ignored, rounded or overwritten: locks show in the clocks that run, the limit in its read-back."""
    fake = machine("h100")
    fake.set(0, load_permille=1000)
    before = fake.snapshot()
    with device(fake) as gpu:
        fake.fail(call, kind=kind, value=value, times=1)
        with pytest.raises(KnobRejected, match=told):
            gpu.apply(OperatingPoint({"gpu_max_hz": 345 * MHZ, "mem_hz": 1593 * MHZ, "power_limit_w": 200}))
    assert fake.snapshot() == before


@pytest.mark.parametrize(
    ("code", "error"), [(2, KnobRejected), (3, KnobRejected), (24, KnobRejected), (15, DeviceError)]
)
def test_a_setter_that_fails_leaves_nothing_behind(machine: Machine, code: int, error: type[Exception]) -> None:
    """What the driver refuses spoils one trial, what is lost ends the study; the GPU is as found in both."""
    fake = machine("h100")
    before = fake.snapshot()
    with device(fake) as gpu:
        fake.fail("nvmlDeviceSetGpuLockedClocks", code=code, times=1)
        with pytest.raises(error):
            gpu.apply(gpu.space[0])
    assert fake.snapshot() == before


def test_a_driver_that_once_answers_that_it_cannot_unlock_is_asked_again(machine: Machine) -> None:
    """By another process, as a guard is, which does not know whether the clocks were locked at all."""
    fake = machine("h100-sxm")
    key = key_of(fake.uuid(0), "gpu_clocks")
    NvmlControls(Library(fake.clock())).write(key, "345,1080")
    fake.fail("nvmlDeviceResetGpuLockedClocks", code=3, times=1)
    NvmlControls(Library(fake.clock())).write(key, UNLOCKED)
    assert fake.get(0, "gpu_lock_max_mhz") == 0


def test_clocks_that_were_locked_and_cannot_be_unlocked_are_not_called_unlocked(machine: Machine) -> None:
    """Whoever locked them knows that this card can; where nothing was locked there is nothing to unlock."""
    fake = machine("h100-sxm")
    key = key_of(fake.uuid(0), "gpu_clocks")
    fake.fail("nvmlDeviceResetGpuLockedClocks", code=3)
    controls = NvmlControls(Library(fake.clock()))
    controls.write(key, UNLOCKED)
    controls.write(key, "345,1080")
    with pytest.raises(KnobRejected):
        controls.write(key, UNLOCKED)


def test_a_laptop_that_cannot_lock_memory_is_put_back_all_the_same(machine: Machine) -> None:
    """Its table lists memory clocks, its driver refuses to lock and to unlock them: there is nothing to undo."""
    fake = machine("a40")
    fake.set(0, has_memory_lock=0)
    before = fake.snapshot()
    with device(fake, knobs=("mem_hz",)) as gpu, pytest.raises(TrialError, match="does not support"):
        gpu.apply(OperatingPoint({"mem_hz": 405 * MHZ}))
    assert fake.snapshot() == before
    assert gpu.differences == ()


def test_clocks_are_waited_for(machine: Machine) -> None:
    """A change that takes a while is not judged before; one that never comes is, after two seconds."""
    fake = machine()
    fake.set(0, load_permille=1000, settle_us=300_000)
    with device(fake) as gpu:
        before_s = fake.now_s
        gpu.apply(gpu.space[0])
        assert 0.25 <= fake.now_s - before_s <= 0.5
        assert fake.gpu_clock_mhz(0) == 210
        gpu.apply(gpu.space.default)
        fake.advance(1)
        fake.set(0, settle_us=10_000_000)
        before_s = fake.now_s
        with pytest.raises(KnobRejected, match="1335 MHz run"):
            gpu.apply(OperatingPoint({"gpu_max_hz": 210 * MHZ}))
        assert 2.0 <= fake.now_s - before_s < 2.2


def test_a_clock_the_power_limit_holds_down_is_no_fault(machine: Machine) -> None:
    """Under its limit a busy GPU runs slower than the lock allows; that is what a limit is for, and not waited out."""
    fake = machine("a100")
    fake.set(0, load_permille=1000)
    before_s = fake.now_s
    with device(fake) as gpu:
        gpu.apply(OperatingPoint({"gpu_max_hz": 1380 * MHZ, "power_limit_w": 150}))
        seen = gpu.read()
        assert fake.now_s - before_s < 0.1
        assert seen.clocks_hz["gpu"] < 1300 * MHZ
        assert not seen.throttled


def test_a_limit_capped_from_outside_meanwhile_is_rejected(machine: Machine) -> None:
    """Trials are judged by the limit that is enforced, not by the one that was set."""
    fake = machine("h100")
    with device(fake) as gpu:
        assert 350 in gpu.space.knob("power_limit_w").levels
        fake.set(0, outer_limit_mw=250_000)
        with pytest.raises(KnobRejected, match="250 W are enforced from outside"):
            gpu.apply(OperatingPoint({"power_limit_w": 350}))
        gpu.apply(gpu.space.default)


def test_a_limit_somebody_else_sets_is_left_to_them(machine: Machine) -> None:
    """It is compared before it is put back, and named."""
    fake = machine("h100")
    with device(fake) as gpu:
        gpu.apply(OperatingPoint({"power_limit_w": 250}))
        fake.foreign(0, power_limit_mw=300_000)
    assert fake.get(0, "power_limit_mw") == 300_000
    assert [each.found for each in gpu.differences] == ["300000"]


def test_a_gpu_lost_in_a_study_stops_it_and_names_what_is_left(machine: Machine) -> None:
    """Reading says why; leaving says what could not be put back; the next start puts it back."""
    fake = machine("h100")
    before = fake.snapshot()
    gpu = device(fake).__enter__()
    gpu.apply(gpu.space[0])
    fake.set(0, lost=1)
    with pytest.raises(DeviceError, match="fallen off the bus"):
        gpu.read()
    with pytest.raises(DeviceError, match=r"is not restored; nvml:GPU.*/gpu_clocks"):
        gpu.__exit__(None, None, None)
    assert fake.snapshot() != before
    fake.set(0, lost=0)
    with device(fake):
        pass
    assert fake.snapshot() == before


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(picks=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=4), model=st.sampled_from(STEERABLE))
def test_only_the_drivers_own_levels_are_ever_written(machine: Machine, picks: list[float], model: str) -> None:
    """Whatever is applied, the log holds nothing but the tables' entries, and the GPU ends as it was found."""
    fake = machine(model)
    clocks = dict(MODELS[model].clocks_mhz)
    before = fake.snapshot()
    with device(fake) as gpu:
        for pick in picks:
            gpu.apply(gpu.space[int(pick * len(gpu.space))])
    for call, arguments in calls(fake):
        if call == "SetGpuLockedClocks":
            assert set(arguments) <= set(clocks[max(clocks)])
        elif call == "SetMemoryLockedClocks":
            assert set(arguments) <= set(clocks)
        elif call == "SetPowerManagementLimit":
            assert MODELS[model].limit_min_mw <= arguments[0] <= MODELS[model].limit_max_mw
        else:
            assert call in ("ResetGpuLockedClocks", "ResetMemoryLockedClocks")
    assert fake.snapshot() == before
    fake.__exit__(None, None, None)


# Workload power profiles


def test_profiles_are_requested_by_name_and_taken_back(machine: Machine) -> None:
    """Their names are NVIDIA's; none is requested at first."""
    fake = machine("b200")
    before = fake.snapshot()
    with device(fake, knobs=("power_profile",)) as gpu:
        assert gpu.space.default["power_profile"] == "none"
        assert {"none", "max_q", "llm_inference"} <= set(gpu.space.knob("power_profile").levels)
        gpu.apply(OperatingPoint({"power_profile": "max_q"}))
        assert fake.get(0, "requested_profiles") == 1 << 1
        gpu.apply(OperatingPoint({"power_profile": "compute"}))
        assert fake.get(0, "requested_profiles") == 1 << 2
    assert fake.snapshot() == before


def test_profiles_found_are_the_default_and_come_back(machine: Machine) -> None:
    """Several may have been requested; they are one level, by their names."""
    fake = machine("b200")
    fake.set(0, requested_profiles=0b1010)
    with device(fake, knobs=("power_profile",)) as gpu:
        assert gpu.space.default["power_profile"] == "max_q+memory_bound"
        gpu.apply(OperatingPoint({"power_profile": "none"}))
        assert fake.get(0, "requested_profiles") == 0
    assert fake.get(0, "requested_profiles") == 0b1010


def test_a_profile_that_is_not_enforced_is_rejected(machine: Machine) -> None:
    """Requested is not enforced: something else may take its place."""
    fake = machine("b200")
    with device(fake, knobs=("power_profile",)) as gpu:
        fake.fail("nvmlDeviceWorkloadPowerProfileUpdateProfiles_v1", kind=FaultKind.IGNORE, times=1)
        with pytest.raises(KnobRejected, match="it holds"):
            gpu.apply(OperatingPoint({"power_profile": "max_q"}))
    assert mask_ids([0, 0b101]) == (32, 34)


def test_an_older_driver_is_asked_for_profiles_in_its_own_way(machine: Machine) -> None:
    """The two calls NVIDIA has deprecated since."""
    fake = machine("b200")
    before = fake.snapshot()
    fake.fail("nvmlDeviceWorkloadPowerProfileUpdateProfiles_v1", code=13)
    with device(fake, knobs=("power_profile",)) as gpu:
        gpu.apply(OperatingPoint({"power_profile": "max_q"}))
    done = [each.call.removeprefix("nvmlDeviceWorkloadPowerProfile") for each in fake.log() if each.code == 0]
    assert done == ["SetRequestedProfiles", "ClearRequestedProfiles"]
    assert fake.snapshot() == before


# Clock offsets

OFFSETS = ("gpu_offset_hz", "mem_offset_hz")


def offsets(fake: FakeNvml) -> tuple[int, int]:
    """Return the offsets of graphics and memory clocks that hold, in MHz."""
    return fake.get(0, "gpu_offset_mhz"), fake.get(0, "mem_offset_mhz")


def test_offsets_are_searched_only_if_named_and_never_touched_otherwise(machine: Machine) -> None:
    """Whoever has set one meanwhile keeps it."""
    fake = machine("rtx4090")
    fake.set(0, load_permille=500)
    with device(fake) as gpu:
        assert not set(OFFSETS) & set(gpu.space.names)
        assert {each.knob.name: each.searched for each in gpu.offers()} | dict.fromkeys(OFFSETS, False) == {
            each.knob.name: each.searched for each in gpu.offers()
        }
        fake.set(0, gpu_offset_mhz=75)
        gpu.apply(gpu.space.default.moved({"power_limit_w": 300}))
    assert offsets(fake) == (75, 0)
    assert not any("Offset" in each.call for each in fake.log())


@pytest.mark.parametrize("old", [False, True])
def test_offsets_are_set_read_back_and_taken_back(machine: Machine, old: bool) -> None:
    """By performance state P0, or by the calls of drivers before 555 where the newer are not there."""
    fake = machine("rtx4090")
    fake.set(0, load_permille=800)
    for call in ("nvmlDeviceGetClockOffsets", "nvmlDeviceSetClockOffsets") if old else ():
        fake.fail(call, code=13)
    before = fake.snapshot()
    with device(fake, knobs=OFFSETS) as gpu:
        assert [each // 10**6 for each in gpu.space.knob("gpu_offset_hz").levels] == [*range(-200, 101, 25)]
        assert [each // 10**6 for each in gpu.space.knob("mem_offset_hz").levels] == [*range(-1000, 501, 250)]
        drawn = fake.power_mw(0)
        gpu.apply(OperatingPoint({"gpu_offset_hz": 100 * 10**6, "mem_offset_hz": -250 * 10**6}))
        assert offsets(fake) == (100, -250)
        assert fake.power_mw(0) < drawn
        gpu.apply(OperatingPoint({"gpu_offset_hz": -50 * 10**6, "mem_offset_hz": 0}))
        assert offsets(fake) == (-50, 0)
        assert not gpu.altered()
        fake.foreign(0, gpu_offset_mhz=-75)
        assert gpu.altered() == ("gpu_offset_hz",)
        gpu.apply(OperatingPoint({"gpu_offset_hz": 0, "mem_offset_hz": 250 * 10**6}))
    assert fake.snapshot() == before
    calls = {each.call for each in fake.log() if each.code == 0 and "Offset" in each.call}
    older = {"nvmlDeviceSetGpcClkVfOffset", "nvmlDeviceSetMemClkVfOffset"}
    assert calls - {"gpu_offset_mhz"} == (older if old else {"nvmlDeviceSetClockOffsets"})


def test_an_offset_that_the_next_point_does_not_name_is_taken_back(machine: Machine) -> None:
    """Once it was set here, it is at its default wherever it is not named."""
    fake = machine("rtx4090")
    with device(fake) as gpu:
        gpu.apply(OperatingPoint({"gpu_offset_hz": -100 * 10**6}))
        assert offsets(fake) == (-100, 0)
        gpu.apply(gpu.space.default)
        assert offsets(fake) == (0, 0)


def test_the_offsets_found_are_the_default_and_come_back(machine: Machine) -> None:
    """An owner's own offset is a level, also beyond the margin, and nothing else of the range there is."""
    fake = machine("rtx4090")
    fake.set(0, gpu_offset_mhz=180)
    with device(fake, knobs=("gpu_offset_hz",)) as gpu:
        assert gpu.space.default["gpu_offset_hz"] == 180 * 10**6
        assert gpu.space.knob("gpu_offset_hz").levels[-2:] == (100 * 10**6, 180 * 10**6)
        gpu.apply(OperatingPoint({"gpu_offset_hz": -100 * 10**6}))
        assert offsets(fake) == (-100, 0)
    assert offsets(fake) == (180, 0)


def test_the_drivers_own_range_and_the_administrators_bound_offsets(machine: Machine) -> None:
    """Levels lie within both; a table of the administrator's that leaves out what was found leaves no knob."""
    fake = machine("rtx4090")
    fake.set(0, offset_min_mhz=-60, offset_max_mhz=30)
    levels = device(fake, knobs=("gpu_offset_hz",)).space.knob("gpu_offset_hz").levels
    assert [each // 10**6 for each in levels] == [-50, -25, 0, 25]
    bounds = Limits({"nvml": {"gpu_offset_hz": (-1e9, 0.0)}})
    levels = device(fake, knobs=("gpu_offset_hz",), limits=bounds).space.knob("gpu_offset_hz").levels
    assert [each // 10**6 for each in levels] == [-50, -25, 0]
    bounds = Limits({"nvml": {"gpu_offset_hz": (-1e9, -1.0)}})
    with pytest.raises(DeviceError, match="leave out the offset it was found with"):
        _ = device(fake, knobs=("gpu_offset_hz",), limits=bounds).space
    key = key_of(fake.uuid(0), "gpu_offset_mhz")
    controls = NvmlControls(Library(fake.clock()))
    assert "administrator" in bounds.refusal(key, "-2000", controls)
    assert not bounds.refusal(key, "-50", controls)
    assert not bounds.refusal(key, "0", controls)  # what the driver begins with


@pytest.mark.parametrize("model", ["h100", "a100", "laptop"])
def test_offsets_are_off_where_the_driver_has_none(machine: Machine, model: str) -> None:
    """Data centre cards answer NOT_SUPPORTED: named, the knob is refused with that reason."""
    fake = machine(model)
    with pytest.raises(DeviceError, match=r"gpu_offset_hz cannot be set on .*no clock offsets"):
        _ = device(fake, knobs=("gpu_offset_hz",)).space
    assert any(each.subject == "gpu_offset_hz" and not each.works for each in device(fake).findings())


def test_a_locked_memory_clock_takes_no_offset(machine: Machine) -> None:
    """The clock that runs would be neither of the two."""
    fake = machine("rtx4090")
    with pytest.raises(InvalidInput, match="search mem_mhz or mem_offset_mhz"):
        _ = device(fake, knobs=("mem_hz", "mem_offset_hz")).space
    with device(fake, knobs=("mem_offset_hz",)) as gpu, pytest.raises(KnobRejected, match="takes no offset"):
        gpu.apply(OperatingPoint({"mem_hz": 5001 * 10**6, "mem_offset_hz": 250 * 10**6}))
    assert not any(each.code == 0 for each in fake.log())


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"kind": FaultKind.IGNORE}, "it holds 0"),
        ({"kind": FaultKind.SKEW, "value": 5}, "it holds -55"),
        ({"code": 2}, "takes no such value"),
        ({"code": 25}, ""),
    ],
)
def test_an_offset_that_is_not_kept_is_rejected(machine: Machine, fault: dict[str, Any], says: str) -> None:
    """The binding drops what the newer call answers; it is looked at, and the offset is read back."""
    fake = machine("rtx4090")
    before = fake.snapshot()
    with device(fake, knobs=("gpu_offset_hz",)) as gpu:
        fake.fail("nvmlDeviceSetClockOffsets", times=1, **fault)
        point = OperatingPoint({"gpu_offset_hz": -50 * 10**6})
        if says:
            with pytest.raises(KnobRejected, match=says):
                gpu.apply(point)
        else:  # another version of the structure: the older call is taken
            gpu.apply(point)
            assert offsets(fake) == (-50, 0)
    assert fake.snapshot() == before


@pytest.mark.parametrize("text", ["", "--5", "5-", "1,2", "1e3", "-", str(-(2**31)), "unlocked"])
def test_what_is_no_offset_reaches_no_driver(machine: Machine, text: str) -> None:
    """A whole number of megahertz, with or without a minus."""
    fake = machine("rtx4090")
    with pytest.raises(KnobRejected, match="cannot hold"):
        NvmlControls(Library(fake.clock())).write(key_of(fake.uuid(0), "gpu_offset_mhz"), text)
    assert not fake.log()


# Energy, power, heat, slowdown


def joules_per_second(fake: FakeNvml, gpu: NvmlDevice, seconds: float = 4.0) -> float:
    """Return the mean power over a while, as the device's readings give it, looked at ten times a second."""
    start = gpu.read()
    for _ in range(round(seconds * 10)):
        fake.advance(0.1)
        gpu._look()
    end = gpu.read()
    return (end.energy_j - start.energy_j) / (end.time_s - start.time_s)


@pytest.mark.parametrize("model", STEERABLE)
def test_the_counter_is_the_first_choice(machine: Machine, model: str) -> None:
    """Its joules are those drawn, to within its step."""
    fake = machine(model)
    with device(fake) as gpu:
        fake.set(0, load_permille=1000)
        assert joules_per_second(fake, gpu) == pytest.approx(fake.power_mw(0) / 1000, rel=0.05)
        assert "energy counter: the whole GPU" in gpu.boundary
        assert gpu.energy_kind is EnergyKind.MEASURED


def test_the_field_stands_in_for_the_call(machine: Machine) -> None:
    """Field 83 is the same counter."""
    fake = machine("a100")
    fake.fail("nvmlDeviceGetTotalEnergyConsumption", code=3)
    with device(fake) as gpu:
        fake.set(0, load_permille=1000)
        assert "field 83" in gpu.boundary
        assert joules_per_second(fake, gpu) == pytest.approx(fake.power_mw(0) / 1000, rel=0.05)


@pytest.mark.parametrize(
    ("model", "fields", "told"),
    [
        ("a40", 1, "of the moment"),
        ("a40", 0, "average over a second"),
        ("v100", 0, "of the moment"),
        ("a100", 0, "of the moment"),
    ],
)
def test_without_a_counter_power_is_integrated(machine: Machine, model: str, fields: int, told: str) -> None:
    """Whether readings average is a matter of the generation, and the boundary says so."""
    fake = machine(model)
    fake.set(0, has_energy=0, has_power_fields=fields, load_permille=1000)
    fake.advance(3)
    with device(fake) as gpu:
        assert told in gpu.boundary
        assert "integrated" in gpu.boundary
        assert joules_per_second(fake, gpu) == pytest.approx(fake.power_mw(0) / 1000, rel=0.05)


def test_an_unknown_generation_may_average(machine: Machine) -> None:
    """What the driver does not say is not guessed."""
    fake = machine("v100")
    fake.set(0, has_energy=0)
    fake.fail("nvmlDeviceGetArchitecture", code=13)
    assert "may average over a second" in device(fake).boundary


def test_blank_power_is_no_power(machine: Machine) -> None:
    """However finite it looks; without any, reading ends in one clear line."""
    fake = machine("a100")
    fake.set(0, has_energy=0, blank=1)
    gpu = device(fake)
    assert "neither energy nor power" in gpu.boundary
    with gpu, pytest.raises(DeviceError, match=r"neither energy nor power.*nothing can be measured"):
        gpu.read()
    assert finding(gpu, "energy").works is False


def test_a_blank_counter_is_passed_over(machine: Machine) -> None:
    """The next best source is taken."""
    fake = machine("a100")
    fake.set(0, blank=2)
    assert "integrated" in device(fake).boundary


def test_a_counter_may_pass_what_would_be_blank_in_32_bits(machine: Machine) -> None:
    """Two megajoules are two hours of a busy GPU, not "no value"."""
    fake = machine("a100")
    fake.set(0, load_permille=1000)
    fake.advance(20_000)
    with device(fake) as gpu:
        assert gpu.read().energy_j > 0x7FFFFFFF / 1000
        assert gpu.boundary.startswith("the driver's energy counter:")


@pytest.mark.slow
def test_a_module_counts_its_own_joules(machine: Machine) -> None:
    """On a superchip the scope is a choice; the boundary names it, and the findings that there is one."""
    fake = machine("b200")
    own, whole = device(fake), device(fake, scope="module")
    assert "the rest of its module and the host excluded" in own.boundary
    assert "whole module" in whole.boundary
    assert "module" in finding(own, "power scope").explanation
    fake.set(0, load_permille=1000)
    fake.advance(2)
    with own:
        small_w = joules_per_second(fake, own)
    with whole:
        assert joules_per_second(fake, whole) == pytest.approx(small_w + 200, rel=0.02)


@pytest.mark.parametrize("load", [0, 1000])
def test_a_counter_that_is_the_modules_is_called_so(machine: Machine, load: int) -> None:
    """As on GH200 (https://github.com/ml-energy/zeus/pull/172): both powers are read, and its joules agree with one."""
    fake = machine("gh200")
    fake.set(0, load_permille=load)
    fake.advance(2)
    own, whole = device(fake), device(fake, scope="module")
    assert "integrated: the whole GPU with its memory; the rest of its module" in own.boundary
    assert whole.boundary.startswith("the driver's energy counter: the whole module")
    drawn_w = fake.power_mw(0) / 1000
    with own:
        assert joules_per_second(fake, own) == pytest.approx(drawn_w, rel=0.03)
    with whole:
        assert joules_per_second(fake, whole) == pytest.approx(drawn_w + 200, rel=0.03)


def test_where_the_gpus_own_power_fails_the_counter_is_the_modules(machine: Machine) -> None:
    """It stands in for the GPU, and the boundary says whose it is."""
    fake = machine("gh200")
    fake.set(0, load_permille=1000, lacks_gpu_scope=1)
    gpu = device(fake)
    assert "energy counter: the whole module, GPU, its memory and processor (the GPU alone is not told)" in gpu.boundary
    with gpu:
        assert joules_per_second(fake, gpu) == pytest.approx(fake.power_mw(0) / 1000 + 200, rel=0.03)
    assert "covers the whole module" in finding(gpu, "power scope").explanation


def test_a_counter_that_stands_still_is_nobodys_yet(machine: Machine) -> None:
    """Nothing is claimed of what cannot be compared."""
    fake = machine("gh200")
    fake.set(0, energy_stuck=1)
    assert "readings do not tell apart" in device(fake).boundary


def test_a_module_that_is_not_there_has_no_joules(machine: Machine) -> None:
    """One clear line when it is measured."""
    with device(machine("a100"), scope="module") as gpu, pytest.raises(DeviceError, match="neither energy nor power"):
        gpu.read()


def test_a_counter_that_falls_means_a_new_driver(machine: Machine) -> None:
    """A reset or reload in the middle spoils every joule since."""
    fake = machine("a100")
    fake.set(0, load_permille=1000)
    fake.advance(5)
    with device(fake) as gpu:
        gpu.read()
        fake.reload_driver(invalidate=False)
        with pytest.raises(DeviceError, match="fell back"):
            gpu.read()


@pytest.mark.parametrize(("model", "step_s"), [("v100", 0.02), ("l4", 0.05), ("a100", 0.1)])
def test_the_counters_step_is_measured(machine: Machine, model: str, step_s: float) -> None:
    """By watching it for a second at most; the findings give it, with how long a window should be."""
    fake = machine(model)
    gpu = device(fake)
    assert isinstance(gpu._energy, EnergyCounter)
    with gpu:
        assert gpu._energy.step_s(gpu.clock) == pytest.approx(step_s, abs=0.002)
    assert f"every {step_s * 1000:.0f} ms" in finding(gpu, "energy").explanation


def test_a_counter_that_stands_still_has_no_step(machine: Machine) -> None:
    """Unknown, after a second and not more."""
    fake = machine("a100")
    fake.set(0, energy_stuck=1)
    before_s = fake.now_s
    assert finding(device(fake), "energy").works is False
    assert fake.now_s - before_s < 1.1


class Script:
    """Power readings as written down: watts and the driver's timestamp."""

    def __init__(self, clock: Clock, *powers: tuple[float, int | None]) -> None:
        self.powers, self.clock = list(powers), clock

    def __call__(self) -> PowerReading:
        """Return the next, a second after the one before."""
        self.clock.sleep(1.0)
        return PowerReading(*self.powers.pop(0))


def test_a_repeated_reading_counts_once() -> None:
    """The driver's timestamp tells; the next new reading spans the time between."""
    clock = VirtualClock()
    source = PowerIntegrator(Script(clock, (100, 1), (100, 1), (100, 1), (200, 2)), "", clock)
    for _ in range(4):
        source.look()
    assert source._total_j == pytest.approx(150 * 3)


def test_a_total_never_falls_and_reaches_up_to_now() -> None:
    """Even if the last reading is repeated: power is then taken to have held."""
    clock = VirtualClock()
    source = PowerIntegrator(Script(clock, (100, 1), (100, 1), (20, 2), (20, 2)), "", clock)
    assert [source.total_j() for _ in range(4)] == pytest.approx([0, 100, 160, 180])


def test_readings_without_timestamps_all_count() -> None:
    """The call for power does not say when it looked."""
    clock = VirtualClock()
    source = PowerIntegrator(Script(clock, (10, None), (10, None), (30, None)), "", clock)
    assert [source.total_j() for _ in range(3)] == pytest.approx([0, 10, 30])


@pytest.mark.parametrize(
    ("bits", "spoilt"), [(0x8, True), (0x20, True), (0x40, True), (0x80, True), (0x4, False), (0x13, False)]
)
@pytest.mark.parametrize("lacking", [(), ("nvmlDeviceGetCurrentClocksEventReasons",)])
def test_event_reasons_spoil_a_window(machine: Machine, bits: int, spoilt: bool, lacking: tuple[str, ...]) -> None:
    """Heat, brakes and slowdowns do, a power cap does not; older drivers know them by another name."""
    fake = machine()
    for call in lacking:
        fake.fail(call, code=13)
    with device(fake) as gpu:
        fake.set(0, forced_reasons=bits)
        assert gpu.read().throttled is spoilt


def test_a_slowdown_between_two_readings_is_not_missed(machine: Machine) -> None:
    """The lookout keeps it until the next reading, and a new point forgets it."""
    fake = machine()
    with device(fake) as gpu:
        for forgets in (False, True):
            fake.set(0, forced_reasons=0x40)
            gpu._look()
            fake.set(0, forced_reasons=0)
            if forgets:
                gpu.apply(gpu.space.default)
            assert gpu.read().throttled is not forgets
            assert not gpu.read().throttled


def test_a_gpu_at_its_power_limit_is_told_of_and_is_no_fault(machine: Machine) -> None:
    """That is what a limit is for."""
    fake = machine()
    gpu = device(fake)
    for reasons, capped in ((0x4, True), (0x1, False)):
        fake.set(0, forced_reasons=reasons)
        found = finding(gpu, "slowdown")
        assert found.works
        assert found.explanation.endswith(", held by its power limit") is capped


def test_without_event_reasons_slowdown_is_unknown(machine: Machine) -> None:
    """The findings say so; nothing is made up."""
    fake = machine()
    fake.fail("nvmlDeviceGetCurrentClocksEventReasons", code=13)
    fake.fail("nvmlDeviceGetCurrentClocksThrottleReasons", code=26)
    gpu = device(fake)
    assert finding(gpu, "slowdown").works is None
    with gpu:
        gpu.apply(gpu.space[0])
        assert not gpu.read().throttled


def test_temperature_is_that_of_the_hotter_sensor(machine: Machine) -> None:
    """Die or memory; by the older call where there is no newer; None where there is neither."""
    fake = machine("a100")
    fake.set(0, forced_temperature_c=61)
    with device(fake) as gpu:
        assert gpu.read().temperature_c == 69
    with device(machine("a40")) as gpu:
        die_c = gpu.read().temperature_c
        assert die_c is not None
        assert die_c > 0
    older = machine("a40")
    older.fail("nvmlDeviceGetTemperatureV", code=13)
    with device(older) as gpu:
        assert gpu.read().temperature_c == die_c
    older.set(0, blank=4)
    with device(older) as gpu:
        assert gpu.read().temperature_c is None


def test_blank_clocks_are_unknown(machine: Machine) -> None:
    """They are left out, and a point is then taken on trust."""
    fake = machine()
    fake.set(0, blank=8)
    with device(fake) as gpu:
        gpu.apply(gpu.space[0])
        assert gpu.read().clocks_hz == {}


def test_real_time_has_a_lookout(machine: Machine) -> None:
    """A thread of its own, there while the device is entered; a lost GPU ends it without a word."""
    fake = machine(frozen=False)
    with device(fake, clock=None, hz=100.0) as gpu:
        assert "polythrottle-lookout" in {thread.name for thread in threading.enumerate()}
        fake.set(0, lost=1)
        with pytest.raises(DeviceError):
            gpu.read()
        fake.set(0, lost=0)
    assert "polythrottle-lookout" not in {thread.name for thread in threading.enumerate()}


# Findings


def test_persistence_mode_off_is_told(machine: Machine) -> None:
    """With what it means and how to turn it on; it is never turned on here."""
    fake = machine()
    off = finding(device(fake), "persistence mode")
    assert off.works is False
    assert "nvidia-smi -pm 1" in off.remedy
    fake.set(0, persistence=1)
    assert finding(device(fake), "persistence mode").works is True
    assert fake.log() == []


def test_company_is_told(machine: Machine) -> None:
    """Others' work is in the joules too."""
    fake = machine()
    assert finding(device(fake), "other work").works is True
    fake.add_process(0, 4711, 1 << 30)
    assert "1 processes compute on it" in finding(device(fake), "other work").explanation


def test_findings_set_nothing(machine: Machine) -> None:
    """On any model, the one that slows down among them."""
    for model in (*STEERABLE, "laptop"):
        fake = machine(model)
        fake.set(0, forced_reasons=0x20)
        found = device(fake).findings()
        assert any(each.subject == "slowdown" and each.works is False and "heat" in each.explanation for each in found)
        assert fake.log() == []


# The controls by themselves


@pytest.mark.parametrize(
    ("what", "text"),
    [
        *(
            ("gpu_clocks", text)
            for text in ("", "210", "210,1410,1", "a,b", "1410,210", "-1,5", "4294967041,4294967041")
        ),
        *(("power_limit_mw", text) for text in ("", "unlocked", "2e5", "200000,1", "2147483632")),
        *(("power_profiles", text) for text in ("x", "1,,2", "300")),
        ("fan", "3"),
    ],
)
def test_a_text_that_means_nothing_never_reaches_the_driver(machine: Machine, what: str, text: str) -> None:
    """Symbolic clock limits and blanks among them."""
    fake = machine("b200")
    with pytest.raises(KnobRejected):
        NvmlControls(Library(fake.clock())).write(key_of(fake.uuid(0), what), text)
    assert fake.log() == []


@pytest.mark.parametrize("key", ["nvml:", "nvml:/gpu_clocks", "gpu_clocks", "/sys/x", "nvml:GPU-1/gpu"])
def test_a_key_that_is_no_control_is_refused(machine: Machine, key: str) -> None:
    """Reading and writing."""
    fake = machine()
    for attempt in (lambda: NvmlControls().read(key), lambda: NvmlControls().write(key, "1")):
        with pytest.raises(KnobRejected, match="no control"):
            attempt()
    assert fake.log() == []


def test_a_control_of_a_gpu_that_is_gone_says_so(machine: Machine) -> None:
    """Lost, or of a UUID nobody has."""
    fake = machine()
    controls = NvmlControls(Library(fake.clock()))
    with pytest.raises(DeviceError):
        controls.read(key_of("GPU-nobody", "power_limit_mw"))
    fake.set(0, lost=1)
    with pytest.raises(DeviceError, match="fallen off"):
        controls.write(key_of(fake.uuid(0), "power_limit_mw"), "200000")


def test_controls_of_their_own_keep_nvml_open(machine: Machine) -> None:
    """A process that keeps locks for somebody stays the client the driver wants for that."""
    fake = machine()
    controls = NvmlControls()
    assert controls.read(key_of(fake.uuid(0), "power_limit_mw")) == "250000"
    assert controls.read(key_of(fake.uuid(0), "gpu_clocks")) == "?"
    assert pynvml._nvmlLib_refcount == 1


# What stands around a GPU


def grace(root: Path, number: int, label: str, milliwatts: int) -> None:
    """Add an ACPI power meter, laid as NVIDIA's guide for Grace has it."""
    folder = root / f"sys/devices/LNXSYSTM:00/ACPI000D:0{number}"
    (folder / f"hwmon/hwmon{number}").mkdir(parents=True)
    (root / "sys/class/hwmon").mkdir(parents=True, exist_ok=True)
    (root / f"sys/class/hwmon/hwmon{number}").symlink_to(folder / f"hwmon/hwmon{number}")
    (folder / f"hwmon/hwmon{number}/device").symlink_to(folder)
    (folder / "power1_oem_info").write_text(f"{label}\n")
    (folder / "power1_average").write_text(f"{milliwatts * 1000}\n")
    (folder / "power1_average_interval").write_text("50\n")


def test_the_power_around_a_superchips_gpu_is_told_with_its_boundary(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each meter of the firmware is a finding, and says what it covers; another maker's meter is passed over."""
    root = tmp_path / "root"
    for number, (label, milliwatts) in enumerate(
        [("Module Power Socket 0", 216_054), ("CPU Power Socket 0", 30_399), ("Total Power", 1000)]
    ):
        grace(root, number, label, milliwatts)
    assert [each.label for each in channels(root)] == ["CPU Power Socket 0", "Module Power Socket 0"]
    monkeypatch.setattr("polythrottle.backends.nvml.energy.channels", lambda: channels(root))
    fake = machine("gh200")
    found = {each.subject: each.explanation for each in NvmlDevice("0", clock=fake.clock()).findings()}
    assert found["CPU Power Socket 0"].startswith("30.4 W of the rail of the cores, mean over 50 ms, by ")
    assert "the whole module" in found["Module Power Socket 0"]
    assert "Total Power" not in found


# The check on real hardware, tried on the stand-in


def hardware_check(environment: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    """Run what `make hw-test` runs, with these variables besides."""
    words = [sys.executable, "-X", "faulthandler", "-m", "pytest", "-m", "hardware", "-p", "no:cacheprovider", "-rfE"]
    environment = {**os.environ, "POLYTHROTTLE_NO_SKIPS": "", **environment}
    # A check that hangs says where, and what it started and left cannot keep this test waiting at a pipe. It has a
    # folder of its own, or pytest removes at its end what earlier runs left in the shared one, for minutes.
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryDirectory() as own:
        process = subprocess.Popen(
            [*words, f"--basetemp={own}/pytest", "tests/hardware"],
            cwd=PACKAGE.parent, stdout=printed, stderr=subprocess.STDOUT, env=environment,
        )  # fmt: skip
        try:
            process.wait(timeout=300)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            process.wait(timeout=60)
        finally:
            process.kill()
        printed.seek(0)
        return subprocess.CompletedProcess(words, process.returncode, printed.read(), "")


@pytest.mark.slow
@pytest.mark.parametrize("model", ["b200", "laptop"])
def test_the_hardware_check_sets_nothing_and_says_what_it_left_open(machine: Machine, model: str) -> None:
    """It reads a busy GPU without one write, and names what only a setter could prove."""
    fake = machine(model, frozen=False)
    fake.set(0, load_permille=500)
    before = fake.snapshot()
    done = hardware_check({})
    assert done.returncode == 0, done.stdout + done.stderr
    assert MODELS[model].name in done.stdout
    assert "stand-in" in done.stdout
    assert "NOT PROVEN" in done.stdout
    assert "a lock holds" in done.stdout
    assert fake.log() == []
    assert fake.snapshot() == before


@pytest.mark.slow
def test_without_a_gpu_the_hardware_check_passes_nothing(machine: Machine) -> None:
    """It says that nothing was checked, counts no test as passed, and ends well."""
    fake = machine()
    fake.set_machine(init_code=9)
    done = hardware_check({})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOTHING WAS CHECKED" in done.stdout
    assert " passed" not in done.stdout


@pytest.mark.slow
def test_a_setter_fails_the_hardware_check(machine: Machine, tmp_path: Path) -> None:
    """Even one a future change slips in: every function that sets is blocked by its name."""
    fake = machine()
    folder = tmp_path / "hardware"
    shutil.copytree(PACKAGE.parent / "tests/hardware", folder)
    (folder / "test_slip.py").write_text(
        'def test_slip(gpu):\n    """Lock a clock."""\n'
        "    with gpu._library as library:\n"
        '        library.call("nvmlDeviceSetGpuLockedClocks", library.gpu(gpu.uuid), 210, 210)\n'
    )
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", "/dev/null"]
    words += [f"--basetemp={tmp_path / 'pytest'}", str(folder / "test_slip.py")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "must not set anything" in done.stdout
    assert fake.log() == []


# Locks that do not hold


class Busy:
    """A workload on a stand-in's time: queries of 10 ms under load, something happening before one of them."""

    uri, space = "busy", SearchSpace.unit()

    def __init__(self, fake: FakeNvml, before: int, happens: Callable[[], object]) -> None:
        self._fake, self._before, self._happens, self._served = fake, before, happens, 0

    def apply(self, point: OperatingPoint) -> None:
        """Do nothing."""

    def query(self) -> Query:
        """Serve for 10 ms."""
        if self._served == self._before:
            self._happens()
        self._served += 1
        self._fake.advance(0.01)
        return Query(0.01)

    def close(self) -> None:
        """Do nothing."""


WARMUP, QUERIES = 20, 150
SHORT = Window(QUERIES, 0.0, QUERIES, warmup=WARMUP)
LOW = OperatingPoint({"gpu_max_hz": 345 * MHZ, "mem_hz": 1593 * MHZ})
LOSSES = {
    "graphics": {"gpu_lock_min_mhz": 0, "gpu_lock_max_mhz": 0, "live_min_mhz": 0, "live_max_mhz": 0},
    "memory": {"memory_lock_min_mhz": 0, "memory_lock_max_mhz": 0},
}


def lost(fake: FakeNvml, gpu: NvmlDevice, before: int, name: str) -> tuple[Measurement, list[str]]:
    """Return what comes of a window in which another program lifts a lock, and what disturbed one."""
    told: list[str] = []
    with mock.patch.object(validity, "LockLost", side_effect=lambda text: told.append(text) or LockLost(text)):
        workload = Busy(fake, before, lambda: fake.foreign(0, **LOSSES[name]))
        return measure(gpu, workload, LOW, SHORT, sensor=Sensor()), told


@pytest.mark.parametrize("windows", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_a_lock_lost_within_a_window_is_found_and_made_again(machine: Machine, windows: int) -> None:
    """In 100 windows of 100, at any query of it, the last one too; what is measured is the point again."""
    fake = machine("h100")
    fake.set(0, load_permille=1000)
    rng = np.random.default_rng(0)
    with device(fake) as gpu:
        for number in range(windows):
            name = "memory" if number % 2 else "graphics"
            query = QUERIES - 1 if number % 4 < 2 else int(rng.integers(1, QUERIES))
            _, told = lost(fake, gpu, WARMUP + query, name)
            assert len(told) == 1
            assert re.match(
                rf"the {name} clock was locked to \d+ MHz and ran at \d+ MHz: the lock did not hold", told[0]
            )
            assert (fake.gpu_clock_mhz(0), fake.memory_clock_mhz(0)) == (345, 1593)


@pytest.mark.parametrize("model", STEERABLE)
def test_locks_that_hold_are_no_alarm(machine: Machine, model: str) -> None:
    """At any point of any model, busy or at rest, also where power or heat holds a clock down."""
    fake = machine(model)
    with device(fake) as gpu:
        for place in np.linspace(0, len(gpu.space) - 1, 9).astype(int).tolist():
            gpu.apply(gpu.space[place])
            for load in (1000, 0, 500, 1000):
                fake.set(0, load_permille=load)
                fake.advance(0.05)
                assert gpu.read().overrun == ""


def test_a_lock_that_was_taken_without_effect_shows_under_load(machine: Machine) -> None:
    """As on a GB10: at rest nothing tells, and a window under load is refused by name."""
    fake = machine("h100")
    with device(fake) as gpu:
        fake.fail("nvmlDeviceSetGpuLockedClocks", kind=FaultKind.IGNORE, value=0, times=100)
        workload = Busy(fake, 0, lambda: fake.set(0, load_permille=1000))
        with pytest.raises(KnobRejected, match=r"the graphics clock was locked to 345 MHz and ran at \d+ MHz: "):
            measure(gpu, workload, LOW, SHORT, sensor=Sensor())


def test_a_lock_that_is_lost_between_two_readings_is_not_missed(machine: Machine) -> None:
    """Though it is made again before the second: the look in the background tells, once, and for that point alone."""
    fake = machine("h100")
    fake.set(0, load_permille=1000)
    with device(fake) as gpu:
        for again, told in ((LOW, "ran at"), (gpu.space.default, "")):
            gpu.apply(LOW)
            fake.foreign(0, **LOSSES["graphics"])
            gpu._look()
            if not told:
                gpu.apply(again)
            fake.foreign(0, gpu_lock_min_mhz=210, gpu_lock_max_mhz=345, live_min_mhz=210, live_max_mhz=345)
            assert (told in gpu.read().overrun) if told else gpu.read().overrun == ""
            assert gpu.read().overrun == ""
