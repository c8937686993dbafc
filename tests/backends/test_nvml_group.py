"""Several GPUs as one device, on the stand-in driver: one level for all or none, summed, put back each by itself."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from builders import measured

from polythrottle.actuation import Limits, restore_all, standing
from polythrottle.actuation.drivers.nvml import Library, NvmlControls
from polythrottle.api.deployment import same_device
from polythrottle.backends import DeviceURI, find_device, open_device
from polythrottle.backends.nvml import NvmlDevice, NvmlGroup, uuids
from polythrottle.backends.nvml.members import NamedGpus, chosen, joined, joined_labels, spans
from polythrottle.catalog.tuned_profiles import read_profile, write_profile
from polythrottle.cli.commands import run
from polythrottle.domain.errors import (
    BadFile,
    DeviceError,
    InvalidInput,
    KnobAbsent,
    KnobRejected,
    PermissionDenied,
    PolythrottleError,
    StorageError,
    UnknownName,
)
from polythrottle.domain.profile import Profile
from polythrottle.domain.space import OperatingPoint
from polythrottle.storage.identity import disagreement, identity_of
from polythrottle.testing import DeviceContract
from polythrottle.testing.nvml import FakeNvml, FaultKind, compiler

pytestmark = pytest.mark.skipif(
    compiler() is None, reason="no C compiler, so the stand-in NVIDIA driver cannot be built"
)
EIGHT = ("h100-sxm",) * 8
MIXED = (*("h100-sxm",) * 3, "h100")
MHZ = 1_000_000
HANG_S = 60.0

Machine = Callable[..., FakeNvml]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """Return a maker of entered stand-ins with their time frozen; eight H100s unless others are named."""
    made: list[FakeNvml] = []

    def make(*gpus: str) -> FakeNvml:
        fake = FakeNvml(tmp_path / f"nvml-{len(made)}", gpus or EIGHT, frozen=True)
        made.append(fake)
        return fake.__enter__()

    yield make
    for fake in reversed(made):
        fake.__exit__(None, None, None)


def group(fake: FakeNvml, name: str = "all", knobs: Sequence[str] | None = None, **options: Any) -> NvmlGroup:
    """Return GPUs of a stand-in as one, on its time, without guard processes."""
    options = {"clock": fake.clock(), "privileged": True, "limits": Limits(), **options}
    labels = chosen(Library(fake.clock()), name)
    members = [NvmlDevice(uuid, knobs=knobs, **options) for uuid in labels]
    for member in members:
        member._actuator._guarded = False
    return NvmlGroup(members, list(labels.values()), knobs)


def point(mhz: int, watts: int = 700) -> OperatingPoint:
    """Return a point of H100s."""
    return OperatingPoint({"gpu_max_hz": mhz * MHZ, "power_limit_w": watts})


class TestContract(DeviceContract):
    """The contract of every device, on eight alike and on some that differ."""

    @pytest.fixture(autouse=True, params=[EIGHT[:3], MIXED, ("a100", "b200"), ("laptop", "h100")], ids="+".join)
    def _gpus(self, machine: Machine, request: pytest.FixtureRequest) -> None:
        self.fake = machine(*request.param)
        for slot in range(len(request.param)):
            self.fake.set(slot, load_permille=500)

    def make(self) -> NvmlGroup:
        """Return the stand-in's GPUs."""
        return group(self.fake)


# Names


@pytest.mark.parametrize(
    ("name", "slots"),
    [
        ("all", range(8)),
        ("0-7", range(8)),
        ("0,2", (0, 2)),
        ("2,0", (0, 2)),
        ("0-2,5", (0, 1, 2, 5)),
        ("6-7,0", (0, 6, 7)),
    ],
)
def test_a_name_means_these_gpus(machine: Machine, name: str, slots: Sequence[int]) -> None:
    """All, ranges and lists; always in one order, so that a study is the same however it was named."""
    fake = machine()
    device = open_device(f"nvml:{name}")
    assert isinstance(device, NvmlGroup)
    assert [each.uuid for each in device.members] == [fake.uuid(slot) for slot in slots]
    assert list(device.labels) == [f"GPU {slot}" for slot in slots]
    assert DeviceURI.parse(device.uri).several


def test_its_own_uri_opens_it_again_wherever_the_indexes_went(machine: Machine) -> None:
    """UUIDs stay, options too."""
    fake = machine()
    uri = open_device("nvml:0,3?hz=20").uri
    fake.reorder([7, 6, 5, 4, 3, 2, 1, 0])
    again = open_device(uri)
    assert isinstance(again, NvmlGroup)
    assert (again.uri, again.labels) == (uri, ("GPU 7", "GPU 4"))


@pytest.mark.parametrize("name", ["1-1", "1,", "1"])
def test_a_group_of_one_is_that_gpu(machine: Machine, name: str) -> None:
    """And no group; all of one GPU neither."""
    fake = machine()
    if name == "1,":
        with pytest.raises(InvalidInput, match="names no group"):
            open_device(f"nvml:{name}")
        return
    device = open_device(f"nvml:{name}")
    assert isinstance(device, NvmlDevice)
    assert device.uuid == fake.uuid(1)
    assert isinstance(open_device("nvml:all", []), NvmlGroup)
    machine("a100")
    assert isinstance(open_device("nvml:all"), NvmlDevice)


@pytest.mark.parametrize(
    ("name", "error", "told"),
    [
        ("0,0", InvalidInput, "names GPU 0 twice"),
        ("0-3,2", InvalidInput, "names GPU 2 twice"),
        ("7-0", InvalidInput, "write 0-7"),
        ("0,,2", InvalidInput, "nvml:0-7, nvml:0,2 or nvml:all"),
        ("0-8", UnknownName, "unknown GPU '8'"),
        ("0-999999", UnknownName, "unknown GPU '8'"),
        ("0,x", UnknownName, "unknown GPU 'x'"),
        ("0,1?colour=red", UnknownName, "option"),
        ("0,1?scope=all", UnknownName, "scope"),
        ("0,1?hz=0", InvalidInput, "hz must lie above 0"),
    ],
)
def test_a_name_that_means_nothing_is_refused(
    machine: Machine, name: str, error: type[PolythrottleError], told: str
) -> None:
    """In one line."""
    machine()
    with pytest.raises(error, match=told) as caught:
        open_device(f"nvml:{name}")
    assert "\n" not in str(caught.value)


def test_a_gpu_that_is_lost_is_named_and_so_are_the_others(machine: Machine) -> None:
    """All of seven is not all of eight."""
    fake = machine()
    fake.set(3, lost=1)
    with pytest.raises(DeviceError, match=r"GPU 3 does not answer.*0-2,4-7"):
        open_device("nvml:all")
    assert len(uuids("0-2,4-7")) == 7


def test_a_split_gpu_among_them_is_refused(machine: Machine) -> None:
    """Its power cannot be told from that of its neighbours."""
    machine("a100", "a100-mig")
    with pytest.raises(DeviceError, match="split by MIG"):
        open_device("nvml:all")


def test_auto_tells_of_the_group(tmp_path: Path) -> None:
    """Where there are several."""
    for number in range(8):
        folder = tmp_path / f"proc/driver/nvidia/gpus/0000:0{number}:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\n")
    assert "nvml:all" in find_device(tmp_path).explanation


def test_numbers_are_told_in_few_words() -> None:
    """Ranges where they follow each other."""
    assert spans([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert joined_labels(["GPU-a", "GPU-b"]) == "GPU-a, GPU-b"
    assert joined({"GPU 0": "fine", "GPU 2": "lost", "GPU 1": "fine"}) == "GPU 0-1: fine; GPU 2: lost"


# What it is


def test_it_says_how_many_of_which_model(machine: Machine) -> None:
    """Title, identity, boundary; so that a profile of eight fits neither one nor another model."""
    machine()
    eight, one, four = (open_device(f"nvml:{name}") for name in ("all", "0", "0-3"))
    assert isinstance(eight, NvmlGroup)
    assert eight.title == eight.identity["name"] == "8 x NVIDIA H100 80GB HBM3"
    assert eight.identity["gpus"] == "8"
    assert eight.boundary.startswith("the sum of 8 GPUs: each the driver's energy counter: the whole GPU")
    for other in (one, four):
        told = disagreement(eight.identity, other.identity)  # type: ignore[attr-defined]
        assert told is not None
        assert "8 x NVIDIA H100" in told


def test_only_common_levels_are_offered_and_those_that_differ_are_named(machine: Machine) -> None:
    """Clocks and limits that all take, a default above none; findings say which GPU is the other."""
    machine(*MIXED)
    device = group(machine(*MIXED))
    assert device.space.knob("gpu_max_hz").levels[-1] == 1785 * MHZ
    assert device.space.default == point(1785, 400)
    assert "mem_hz" not in device.space.names
    assert device.title == "3 x NVIDIA H100 80GB HBM3 + 1 x NVIDIA H100 NVL"
    findings = {each.subject: each for each in device.findings()}
    assert findings["GPUs"].works is None
    assert "GPU 3: NVIDIA H100 NVL" in findings["GPUs"].explanation
    assert "GPU 0-2: 345 MHz to 1980 MHz" in findings["gpu_max_hz"].explanation
    assert "GPU 3: 345 MHz to 1785 MHz" in findings["gpu_max_hz"].explanation


def test_gpus_alike_are_told_of_once(machine: Machine) -> None:
    """Eight times the same line says no more than one."""
    fake = machine()
    fake.set(5, forced_reasons=0x8)
    findings = group(fake).findings()
    subjects = [each.subject for each in findings]
    assert subjects.count("gpu_max_hz") == 1
    assert [each.explanation for each in findings if each.subject == "slowdown" and each.works is False] == [
        "GPU 5: the GPU is throttled now: hardware slowdown"
    ]


def test_what_one_lacks_none_is_asked_for(machine: Machine) -> None:
    """A knob that is off on one is off for all, with the reason and whose it is."""
    device = group(machine("a100", "v100"))
    assert device.dials.knobs["mem_hz"].off.startswith("GPU 1: locking it takes a GPU of generation Ampere")
    with pytest.raises(DeviceError, match=r"mem_hz cannot be set .* GPU 1"):
        _ = group(machine("a100", "v100"), knobs=["mem_hz"]).space


def test_limits_found_at_different_watts_are_lowered_to_the_lower(machine: Machine) -> None:
    """No GPU is ever set above what it was found at."""
    fake = machine(*EIGHT[:2])
    fake.set(1, power_limit_mw=500_000)
    device = group(fake)
    assert device.space.default["power_limit_w"] == 500
    assert device.space.knob("power_limit_w").levels[-1] == 500
    assert "GPU 1: 200 W to 500 W, found at 500 W" in _told(device, "power_limit_w")


def _told(device: NvmlGroup, subject: str) -> str:
    return next(each.explanation for each in device.findings() if each.subject == subject)


def test_the_administrators_limits_of_one_bind_all(machine: Machine) -> None:
    """By its UUID."""
    fake = machine(*EIGHT[:2])
    limits = Limits({fake.uuid(1): {"gpu_max_hz": (0, 1200 * MHZ)}})
    device = group(fake, limits=limits)
    assert device.space.knob("gpu_max_hz").levels[-1] <= 1200 * MHZ
    with device:
        device.apply(device.space.default)
        assert {fake.get(slot, "gpu_lock_max_mhz") for slot in (0, 1)} == {1200}


# One level for all, or for none


def test_every_gpu_gets_the_level_and_is_put_back(machine: Machine) -> None:
    """The same clock and the same limit each; leaving gives back all."""
    fake = machine()
    before = fake.snapshot()
    with group(fake) as device:
        device.apply(point(1200, 400))
        assert {fake.get(slot, "gpu_lock_max_mhz") for slot in range(8)} == {1200}
        assert {fake.get(slot, "power_limit_mw") for slot in range(8)} == {400_000}
        device.apply(device.space.default)
        assert fake.snapshot() == before
        device.apply(device.space[0])
    assert fake.snapshot() == before
    assert not standing()


class Meeting(NvmlControls):
    """Controls that let a write through once every GPU of a group stands before its own."""

    def __init__(self, fake: FakeNvml, count: int) -> None:
        super().__init__(Library(fake.clock()))
        self._met = threading.Barrier(count)

    def write(self, key: str, text: str) -> None:
        """Wait for the others, then write."""
        if key.endswith("gpu_clocks"):
            self._met.wait(HANG_S)
        super().write(key, text)


def test_all_are_set_at_the_same_time(machine: Machine) -> None:
    """Eight writes are under way together: one after the other, the first would wait for ever."""
    fake = machine()
    with group(fake, controls=Meeting(fake, 8)) as device:
        device.apply(point(1200))
        assert {fake.get(slot, "gpu_lock_max_mhz") for slot in range(8)} == {1200}


@pytest.mark.parametrize(
    ("call", "kind", "code", "error"),
    [
        ("nvmlDeviceSetGpuLockedClocks", FaultKind.REFUSE, 2, KnobRejected),
        ("nvmlDeviceSetGpuLockedClocks", FaultKind.REFUSE, 3, KnobAbsent),
        ("nvmlDeviceSetGpuLockedClocks", FaultKind.LATE, 29, KnobRejected),
        ("nvmlDeviceSetPowerManagementLimit", FaultKind.REFUSE, 4, PermissionDenied),
        ("nvmlDeviceSetPowerManagementLimit", FaultKind.IGNORE, 0, KnobRejected),
        ("nvmlDeviceSetPowerManagementLimit", FaultKind.REFUSE, 999, DeviceError),
    ],
)
def test_where_one_refuses_all_are_as_found(
    machine: Machine, call: str, kind: FaultKind, code: int, error: type[PolythrottleError]
) -> None:
    """At once, not only on leaving; the error says which GPU, and the next point is taken."""
    fake = machine()
    before = fake.snapshot()
    with group(fake) as device:
        device.apply(point(1500))
        fake.fail(call, code=code, kind=kind, slot=3, times=1)
        with pytest.raises(error, match="GPU 3: ") as caught:
            device.apply(point(1200, 400))
        assert "\n" not in str(caught.value)
        assert fake.snapshot() == before
        device.apply(point(1200, 400))
    assert fake.snapshot() == before


def test_a_knob_that_one_does_not_have_is_named(machine: Machine) -> None:
    """So that no other level of it costs a trial."""
    fake = machine(*EIGHT[:2])
    fake.fail("nvmlDeviceSetGpuLockedClocks", code=3, slot=1)
    with group(fake) as device, pytest.raises(KnobAbsent) as caught:
        device.apply(point(1200))
    assert caught.value.knob == "gpu_max_hz"


def test_a_level_that_one_does_not_have_is_set_on_none(machine: Machine) -> None:
    """1980 MHz and 700 W are those of three of the four."""
    fake = machine(*MIXED)
    with group(fake) as device, pytest.raises(KnobRejected, match="no level"):
        device.apply(point(1980, 400))
    assert not fake.log()


def test_without_rights_one_line_says_so(machine: Machine) -> None:
    """And not eight."""
    fake = machine()
    with group(fake, privileged=False) as device, pytest.raises(PermissionDenied, match=r"^GPU 0-7: .*root"):
        device.apply(point(1200))
    assert not fake.log()


def test_two_that_cannot_be_put_back_are_both_named(machine: Machine) -> None:
    """Leaving says which stand changed; they stay on record, and are put back when they can be."""
    fake = machine()
    before = fake.snapshot()

    def leave() -> None:
        with group(fake) as device:
            device.apply(point(1200, 400))
            for slot in (2, 6):
                fake.fail("nvmlDeviceSetPowerManagementLimit", code=999, slot=slot)

    with pytest.raises(DeviceError, match=r"GPU 2: .*power_limit_mw.*; GPU 6: .*power_limit_mw"):
        leave()
    changed = {uuid for uuid, held in fake.snapshot().items() if held != before[uuid]}
    assert changed == {fake.uuid(2), fake.uuid(6)}
    assert {each.device for each in standing()} == {f"nvml {uuid}" for uuid in changed}
    fake.clear_faults()
    restore_all()
    assert fake.snapshot() == before


class Interrupting(NvmlControls):
    """Controls that press Ctrl-C at the first lock, and count the locks."""

    def __init__(self, fake: FakeNvml) -> None:
        super().__init__(Library(fake.clock()))
        self._first, self.locks = threading.Event(), 0
        self._turn = threading.Lock()

    def write(self, key: str, text: str) -> None:
        """Write, and press."""
        super().write(key, text)
        if not key.endswith("gpu_clocks") or text == "unlocked":
            return
        with self._turn:
            self.locks += 1
            if not self._first.is_set():
                self._first.set()
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _apply_and_count(device: NvmlGroup, controls: Interrupting) -> None:
    try:
        device.apply(point(1200))
    finally:
        assert controls.locks == 8


def test_ctrl_c_waits_for_the_writes_under_way(machine: Machine) -> None:
    """None is left in the middle of one while the others are put back."""
    fake = machine()
    before, controls = fake.snapshot(), Interrupting(fake)
    with pytest.raises(KeyboardInterrupt), group(fake, controls=controls) as device:
        _apply_and_count(device, controls)
    assert fake.snapshot() == before
    assert not standing()


def test_one_that_somebody_else_steers_is_named_and_the_others_are_free(machine: Machine) -> None:
    """A group and one of its GPUs, or two groups that overlap, never both."""
    fake = machine()
    other = group(fake, "2-4")
    with other, pytest.raises(DeviceError, match=f"{fake.uuid(2)} is being steered by"), group(fake):
        pass
    with group(fake, "0-1"), other:
        other.apply(point(1200))


def test_one_whose_originals_cannot_be_saved_leaves_all_as_found(machine: Machine, tmp_path: Path) -> None:
    """A record that is no file: nothing is written to that GPU, and the others are put back."""
    fake = machine(*EIGHT[:3])
    state = tmp_path / "originals"
    with group(fake, state=state) as device:
        (state / device.members[1]._actuator._site.record.name).mkdir()
        with pytest.raises(StorageError, match="GPU 1: "):
            device.apply(point(1200))
        assert {fake.get(slot, "gpu_lock_max_mhz") for slot in range(3)} == {0}


def test_what_somebody_else_changes_on_one_is_seen(machine: Machine) -> None:
    """The knob is named, and on leaving it is left to them."""
    fake = machine(*EIGHT[:3])
    with group(fake) as device:
        device.apply(point(1200, 400))
        assert device.altered() == ()
        fake.foreign(1, power_limit_mw=350_000)
        assert device.altered() == ("power_limit_w",)
    assert [each.key for each in device.differences] == [f"nvml:{fake.uuid(1)}/power_limit_mw"]
    assert fake.get(1, "power_limit_mw") == 350_000


DIES = """
from polythrottle.backends import open_device
with open_device("nvml:all") as device:
    device.apply(device.space[0])
"""


@pytest.mark.parametrize("writes", [2, *(pytest.param(each, marks=pytest.mark.slow) for each in (0, 3, 12))])
def test_a_kill_between_two_writes_leaves_nothing_changed(machine: Machine, writes: int) -> None:
    """After the first, the third and the fourth write of sixteen, each GPU's own guard puts it back."""
    fake = machine()
    fake.set_machine(frozen_us=0)
    before = fake.snapshot()
    fake.fail("*", kind=FaultKind.DIE_AFTER, skip=writes, times=1)
    done = subprocess.run([sys.executable, "-c", DIES], check=False, timeout=HANG_S, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()[-2000:]
    ends_s = time.monotonic() + HANG_S
    while standing() and time.monotonic() < ends_s:
        time.sleep(0.02)
    assert not standing()
    assert fake.snapshot() == before


# Readings


def test_joules_are_summed_and_the_worst_of_the_rest_counts(machine: Machine) -> None:
    """Energy of all, the hottest, the slowest, and throttled where one is."""
    fake = machine()
    for slot in range(8):
        fake.set(slot, load_permille=100 * slot + 100, forced_temperature_c=40 + slot)
    device = group(fake)
    before, expected_w = device.read(), sum(fake.power_mw(slot) for slot in range(8)) / 1000
    fake.advance(10.0)
    fake.set(2, ceiling_mhz=900)
    fake.set(4, forced_reasons=0x40)
    after = device.read()
    assert (after.energy_j - before.energy_j) / 10 == pytest.approx(expected_w, rel=0.02)
    assert after.temperature_c == before.temperature_c == 55.0  # memory reads 8 degrees above the die
    assert after.clocks_hz["gpu"] <= 900 * MHZ < before.clocks_hz["gpu"]
    assert (before.throttled, after.throttled) == (False, True)


def test_a_gpu_that_falls_off_the_bus_ends_the_window_and_the_others_are_put_back(machine: Machine) -> None:
    """In the middle of a window, at a reading: named; it stays on record, and is put back when it is there again."""
    fake = machine()
    before = fake.snapshot()

    def window() -> None:
        with group(fake) as device:
            device.apply(point(1200, 400))
            fake.fail("nvmlDeviceGetTotalEnergyConsumption", kind=FaultKind.LOSE, slot=3, skip=2, times=1)
            for _ in range(2):
                device.read()
                fake.advance(0.1)
            with pytest.raises(DeviceError, match=r"^GPU 3: .*fallen off the bus"):
                device.read()

    with pytest.raises(DeviceError, match=r"GPU 3: .*fallen off the bus"):
        window()
    after = fake.snapshot()
    assert {uuid for uuid in after if after[uuid] != before[uuid]} == {fake.uuid(3)}
    fake.set(3, lost=0)
    assert [outcome.device for outcome in restore_all()] == [f"nvml {fake.uuid(3)}"]
    assert fake.snapshot() == before


def test_a_lock_that_does_not_hold_on_one_is_noticed(machine: Machine) -> None:
    """The window is spoilt by the one GPU whose clock ran above, which is named."""
    fake = machine(*EIGHT[:3])
    for slot in range(3):
        fake.set(slot, load_permille=1000)
    with group(fake) as device:
        device.apply(point(1200))
        assert device.read().overrun == ""
        fake.foreign(1, gpu_lock_min_mhz=0, gpu_lock_max_mhz=0, live_min_mhz=0, live_max_mhz=0)
        assert device.read().overrun.startswith("GPU 1: ")
        device.apply(point(1200))
        assert device.read().overrun == ""


def test_one_without_joules_makes_the_sum_unknown(machine: Machine) -> None:
    """Never a sum of seven in the name of eight."""
    fake = machine(*EIGHT[:2])
    fake.set(1, has_energy=0, has_power_fields=0, blank=1)
    device = group(fake)
    assert "GPU 1: unknown" in device.boundary
    with pytest.raises(DeviceError, match=r"GPU 1: .*neither energy nor power"):
        device.read()


def test_it_can_be_looked_at_without_being_taken(machine: Machine) -> None:
    """Sampling makes nobody its writer."""
    fake = machine(*EIGHT[:3])
    device = group(fake)
    with device.sampling(), group(fake):
        assert device.read().energy_j >= 0
    assert not fake.log()


# Left in place


def test_what_is_handed_over_stands_until_it_is_restored(machine: Machine) -> None:
    """Every GPU under its own name on record."""
    fake = machine(*EIGHT[:3])
    before = fake.snapshot()
    with group(fake) as device:
        device.apply(point(1200, 400))
        names = device.hand_over("profile test", None)
    assert names.split(", ") == [f"nvml {fake.uuid(slot)}" for slot in range(3)]
    assert {fake.get(slot, "gpu_lock_max_mhz") for slot in range(3)} == {1200}
    restore_all()
    assert fake.snapshot() == before


def test_a_hand_over_that_fails_half_way_leaves_nothing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two that were handed over are put back too."""
    fake = machine(*EIGHT[:4])
    before = fake.snapshot()

    def refused(*_: object) -> str:
        raise DeviceError("no guard can be started")

    def hand_over() -> None:
        with group(fake) as device:
            device.apply(point(1200, 400))
            monkeypatch.setattr(device.members[2], "hand_over", refused)
            device.hand_over("profile test", None)

    with pytest.raises(DeviceError, match="no guard"):
        hand_over()
    assert fake.snapshot() == before
    assert not standing()


def test_a_daemons_group_is_known_by_its_gpus(machine: Machine) -> None:
    """However it is written; by UUID, index, range or all."""
    fake = machine(*EIGHT[:3])
    own = open_device("nvml:all").uri
    assert same_device("nvml:0-2", own)
    assert same_device("nvml:2,1,0", "nvml:all")
    assert same_device("nvml:1", f"nvml:{fake.uuid(1)}")
    assert not same_device("nvml:0-1", own)


def test_a_group_is_of_two_at_least(machine: Machine) -> None:
    """Each once."""
    fake = machine(*EIGHT[:2])
    one = NvmlDevice("0", clock=fake.clock())
    for members in ([one], [one, one]):
        with pytest.raises(InvalidInput, match="two GPUs at least"):
            NvmlGroup(members)


# The command line


def document(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """Return what a command prints as JSON."""
    assert run([*words, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def held(fake: FakeNvml) -> set[tuple[int, int]]:
    """Return the clock each GPU is locked to and its power limit."""
    slots = range(len(fake.models))
    return {(fake.get(slot, "gpu_lock_max_mhz"), fake.get(slot, "power_limit_mw")) for slot in slots}


@pytest.fixture
def profile(machine: Machine, tmp_path: Path) -> tuple[FakeNvml, str]:
    """Return three GPUs in real time and a profile of them."""
    fake = machine(*EIGHT[:3])
    fake.set_machine(frozen_us=0)
    device = open_device("nvml:all")
    path = tmp_path / "three.toml"
    identity = identity_of(device)
    write_profile(
        Profile(device.uri, "model", point(1200, 400), measured(), identity=identity, workload_knobs=()), path
    )
    return fake, str(path)


@pytest.mark.slow
def test_a_profile_is_applied_to_all_and_taken_back(
    profile: tuple[FakeNvml, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """By the group's own URI, by another name of it, or by none."""
    fake, path = profile
    before = fake.snapshot()
    stands = document(capsys, "apply", path, "--keep")["stands_as"]
    assert stands == ", ".join(f"nvml {fake.uuid(slot)}" for slot in range(3))
    assert held(fake) == {(1200, 400_000)}
    assert len(document(capsys, "restore", "--device", "nvml:0-2")["restored"]) == 3
    assert fake.snapshot() == before
    assert read_profile(Path(path)).identity["name"] == "3 x NVIDIA H100 80GB HBM3"
    for other in ("nvml:0", "nvml:0-1"):
        assert run(["apply", path, "--device", other]) == BadFile.exit_code
        assert "tuned on name 3 x NVIDIA H100 80GB HBM3" in capsys.readouterr().err


@pytest.mark.slow
def test_what_is_confirmed_stands_on_all(profile: tuple[FakeNvml, str], capsys: pytest.CaptureFixture[str]) -> None:
    """One word for the group; a restore of one GPU leaves the others."""
    fake, path = profile
    before = fake.snapshot()
    document(capsys, "apply", path, "--device", "nvml:all", "--confirm-within", "60")
    assert len(document(capsys, "apply", "--confirm", "--device", "nvml:all")["confirmed"]) == 3
    assert held(fake) == {(1200, 400_000)}
    document(capsys, "restore", "--device", "nvml:1")
    assert held(fake) == {(1200, 400_000), (0, 700_000)}
    assert len(document(capsys, "restore", "--device", "nvml:all")["restored"]) == 2
    assert fake.snapshot() == before


@pytest.mark.slow
def test_where_one_can_no_longer_be_confirmed_none_stands(
    profile: tuple[FakeNvml, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Equal clocks or none: the others are put back."""
    fake, path = profile
    before = fake.snapshot()
    names = document(capsys, "apply", path, "--confirm-within", "60")["stands_as"]
    document(capsys, "restore", "--device", "nvml:2")
    assert run(["apply", "--confirm", "--device", names]) == DeviceError.exit_code
    assert fake.snapshot() == before
    assert not standing()


@pytest.mark.slow
def test_a_snapshot_of_a_group_is_of_one_of_them(
    profile: tuple[FakeNvml, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its simulated board is one GPU, and says so."""
    told = document(capsys, "snapshot", "--device", "nvml:all", "--out", str(tmp_path / "s.tar.gz"))
    assert "one GPU of 3" in json.dumps(told)
    assert open_device(f"sim:{tmp_path / 's.tar.gz'}").space.knob("gpu_max_hz").levels[-1] == 1980 * MHZ


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["calibrate", "--device", "nvml:all", "-w", "cmd:true"], "calibrate one of them"),
        (["cluster", "train", "--steer", "nvml:0-1", "--join", "10.0.0.1:1", "train.py"], "is a group; name each GPU"),
        (["measure", "--device", "nvml:0-9", "-w", "cmd:true"], "unknown GPU '3'"),
    ],
)
def test_what_cannot_be_combined_is_refused_in_one_line(
    profile: tuple[FakeNvml, str], capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    """And nothing is set."""
    assert run(words) != 0
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert not profile[0].log()


def model(batch_size: int = 1) -> None:
    """Serve."""
    time.sleep(0.002)


@pytest.mark.slow
def test_a_group_is_examined_and_measured(
    profile: tuple[FakeNvml, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In real time: watts that are too many for one GPU are believed of three, and their sum is what is measured."""
    fake, _ = profile
    for slot in range(3):
        fake.set(slot, load_permille=1000, gpu_mw=1_500_000, millikelvin_per_w=10, power_limit_mw=2_000_000)
    before = fake.snapshot()
    assert document(capsys, "devices", "nvml:all")["title"] == "3 x NVIDIA H100 80GB HBM3"
    (found,) = document(capsys, "doctor", "--device", "nvml:0-2")["devices"]
    energy = next(each for each in found["findings"] if each["subject"] == "energy reading")
    assert energy["works"], energy["explanation"]
    served = ("--workload", f"{__name__}:model", "--batch", "1", "--seconds", "0.5", "--queries", "20")
    drawn_w = sum(fake.power_mw(slot) for slot in range(3)) / 1000
    assert drawn_w > 3000
    assert document(capsys, "measure", "--device", "nvml:all", *served)["power_w"] == pytest.approx(drawn_w, rel=0.2)
    assert fake.snapshot() == before


def test_of_a_group_none_is_forgotten_whose_record_is_strange(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are put back, and it is named with code 8, by whichever name the group is restored; then it is too."""
    fake = machine(*EIGHT[:2])
    before = fake.snapshot()
    device = group(fake)
    device.__enter__()
    device.apply(point(1200, 400))
    for member in device.members:  # killed, with their guards
        fence = member._actuator._fence
        assert fence is not None
        fence.let_go()
        member._actuator._fence = None
        member._actuator._release()
    strange = device.members[1]._actuator._site.record
    kept = strange.rename(strange.with_name("kept"))
    strange.mkdir()
    for name in ("nvml:0,1", "nvml:all", "nvml:1"):
        assert run(["restore", "--no-daemon", "--device", name]) == 8, name
        assert fake.uuid(1) in capsys.readouterr().err
    strange.rmdir()
    kept.rename(strange)
    assert run(["restore", "--no-daemon", "--device", "nvml:0,1"]) == 0
    assert fake.snapshot() == before


def test_a_name_means_gpus_that_do_not_answer_too(machine: Machine) -> None:
    """By its number one is only known to be missing; without a name it must be the only one; digits have an end."""
    fake = machine()
    fake.set(5, lost=1)
    everyone = [fake.uuid(slot) for slot in range(8)]
    gone = NamedGpus.of("4-6")
    assert (gone.uuids, gone.silent) == ((everyone[4], everyone[6]), True)
    assert gone.answering == frozenset(everyone) - {everyone[5]}
    assert NamedGpus.of(everyone[5]).uuids == (everyone[5],)
    assert not NamedGpus.of("9").uuids
    for name, words in (("", "say which"), ("1" * 5000, "5000 digits"), ("5-3", "counts down|5-3")):
        with pytest.raises(InvalidInput, match=words):
            NamedGpus.of(name)
