"""Promises over any sequence: left as found, and nothing written outside the tables and the administrator's limits."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polythrottle.actuation import restore_all
from polythrottle.backends.jetson import JetsonDevice
from polythrottle.backends.nvml import NvmlDevice
from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import PolythrottleError
from polythrottle.domain.ports import Device
from polythrottle.testing import BOARDS, FakeKernel, Fault, plant
from polythrottle.testing.nvml import FakeNvml, compiler

WRITABLE_BY_MODE = ("nvpmodel",)

steps = st.lists(
    st.one_of(
        st.tuples(st.just("apply"), st.integers(0, 10**6)),
        st.tuples(st.just("preset"), st.integers(0, 20)),
        st.tuples(st.just("fault"), st.sampled_from(["EIO", "EBUSY", "EINVAL", "round", "ignore"])),
        st.tuples(st.sampled_from(["die", "restore", "leave"]), st.just(0)),
    ),
    max_size=7,
)


def play(make: Callable[[], Any], sequence: list[tuple[str, Any]], fail: Callable[[str], None]) -> None:
    """Play a sequence of applying, failing, dying and restoring on a device that is opened anew after each end."""
    device = make().__enter__()
    for what, which in sequence:
        try:
            if what == "apply":
                device.apply(device.space[which % len(device.space)])
            elif what == "preset" and device.presets:
                device.apply(list(device.presets.values())[which % len(device.presets)])
            elif what == "fault":
                fail(which)
            elif what == "restore":
                device.restore()
            elif what == "die":
                device._actuator._release()
                device = make().__enter__()
            elif what == "leave":
                device.__exit__(None, None, None)
                device = make().__enter__()
        except PolythrottleError:
            continue
    device._actuator._release()


def limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """State the administrator's limits."""
    (tmp_path / "limits.toml").write_text(text)
    monkeypatch.setenv("POLYTHROTTLE_LIMITS", str(tmp_path / "limits.toml"))


@pytest.mark.parametrize(
    "board", [pytest.param(name, marks=() if "orin-jp6" in name else pytest.mark.slow) for name in BOARDS]
)
@settings(deadline=None, max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sequence=steps)
def test_a_jetson_is_left_as_found_and_never_leaves_its_tables(
    board: str,
    sequence: list[tuple[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever was applied, failed or died, each control is back, and the log holds no value off the board's tables."""
    folder = tmp_path_factory.mktemp("board")
    limits(folder, monkeypatch, "[jetson]\ngpu_max_mhz = { max = 800 }\ncpu_max_mhz = { min = 700 }\n")
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", str(folder / "state"))
    kernel = FakeKernel(plant(board, folder / "board"))
    before = kernel.snapshot()

    def make() -> Device:
        device = JetsonDevice(root=str(kernel.root), controls=kernel, clock=VirtualClock())
        device._actuator._guarded = False
        return device

    play(make, sequence, lambda act: kernel.fail(Fault(act)))
    kernel.heal()
    outcomes = restore_all(controls=kernel)
    left = [difference.key for outcome in outcomes for difference in (*outcome.foreign, *outcome.failed)]
    assert not left
    assert kernel.snapshot() == before
    for write in kernel.writes():
        assert write.by == "us"
        assert may_be_written(kernel, write.key, write.text, before), write


def may_be_written(kernel: FakeKernel, key: str, text: str, before: dict[str, str]) -> bool:
    """Say whether a value is an original, or from the table beside its control and within the limits stated here."""
    path = key.removeprefix(str(kernel.root))
    if before.get(path) == text or key.startswith("nvpmodel:"):
        return True
    folder, name = Path(key).parent, Path(key).name
    for table in ("available_frequencies", "scaling_available_frequencies"):
        if (folder / table).exists():
            listed = text in (folder / table).read_text().split()
            low = 700_000 if name.startswith("scaling_max") else 0
            high = 800_000_000 if name == "max_freq" else 10**12
            return listed and low <= int(text) <= high
    if name in ("rate", "clk_update_rate", "clk_rate"):
        return text.isdecimal()  # BPMP drops what its own table lacks; read-back tells
    return text in ("0", "1", "on", "auto")


@pytest.mark.parametrize("model", ["v100", "a100", "b200"])
@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sequence=steps)
def test_a_gpu_is_left_as_found_and_never_leaves_its_tables(
    model: str,
    sequence: list[tuple[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Locks, limit and profiles are back; every lock lies in the tables, every limit above the floor."""
    if compiler() is None:
        pytest.skip("no C compiler to build the stand-in for NVIDIA's library with")
    folder = tmp_path_factory.mktemp("gpu")
    limits(folder, monkeypatch, "[nvml]\npower_limit_w = { min = 180 }\ngpu_max_mhz = { max = 1300 }\n")
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", str(folder / "state"))
    with FakeNvml(folder / "nvml", [model]) as fake:
        before = fake.snapshot()

        def make() -> Device:
            device = NvmlDevice(fake.uuid(0), clock=fake.clock())
            device._actuator._guarded = False
            return device

        codes = {"EIO": 999, "EBUSY": 19, "EINVAL": 2, "round": 24, "ignore": 10}
        play(make, sequence, lambda act: fake.fail("*", code=codes[act]))
        fake.clear_faults()
        for outcome in restore_all():
            assert not outcome.foreign
            assert not outcome.failed
        assert fake.snapshot() == before
        found_mw = before[fake.uuid(0)]["power_limit_mw"]
        tables = {mhz for _, clocks in fake.models[0].clocks_mhz for mhz in clocks}
        memory = {mhz for mhz, _ in fake.models[0].clocks_mhz}
        for call in fake.log():
            if call.call.endswith("SetPowerManagementLimit"):
                assert call.arguments[-1] == found_mw or 180_000 <= call.arguments[-1] <= found_mw
            elif call.call.endswith("SetGpuLockedClocks"):
                assert set(call.arguments) <= {mhz for mhz in tables if mhz <= 1300}
            elif call.call.endswith("SetMemoryLockedClocks"):
                assert set(call.arguments) <= memory


def test_the_handlers_of_a_stop_are_those_of_ctrl_c() -> None:
    """The command line turns SIGTERM and SIGHUP into the end that restores; two within seconds are one."""
    from polythrottle.cli.commands import run

    kept = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)]
    try:
        for each in (signal.SIGTERM, signal.SIGHUP):
            assert run(["--help"]) == 0
            handler = signal.getsignal(each)
            assert callable(handler)
            with pytest.raises((KeyboardInterrupt, SystemExit)):
                handler(each, None)
            handler(each, None)
    finally:
        for each, handler in zip((signal.SIGTERM, signal.SIGHUP), kept, strict=True):
            signal.signal(each, handler)
