"""Simulated boards: the physics has the right signs and sizes, and all follows from seed, trial and point."""

import itertools
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from polythrottle.backends.simulated import SimulatedDevice, SimulatedWorkload
from polythrottle.backends.simulated.physics import Climb, relative_power
from polythrottle.catalog import is_language_model, load_board, load_model, names
from polythrottle.catalog.boards import Governor, Voltage
from polythrottle.domain.errors import InvalidInput, KnobRejected, UnknownName
from polythrottle.domain.measurement import EnergyKind, Measurement, Window
from polythrottle.domain.ports import Device, Rewindable, Workload
from polythrottle.domain.space import Level, OperatingPoint
from polythrottle.metering.point_measurement import measure
from polythrottle.testing import DeviceContract, WorkloadContract

BOARDS = tuple(names("devices"))
CARDS = ("v100", "a100", "h100", "l4", "a40")


def _device(name: str = "jetson-agx-orin", noise: float = 0.0, seed: int = 0) -> SimulatedDevice:
    return SimulatedDevice(load_board(name), seed=seed, noise=noise)


def _served(board: str, model: str) -> tuple[SimulatedDevice, SimulatedWorkload]:
    device = _device(board)
    return device, device.serve(load_model(model))


@lru_cache(maxsize=4096)
def _truth(board: str, model: str, **levels: Level) -> Measurement:
    device, workload = _served(board, model)
    return device.expected(workload, OperatingPoint(levels))


def test_a_small_model_is_not_slower_on_the_larger_board() -> None:
    """AGX Orin serves the smallest model at its default point faster than TX2 does, slow governor and all."""
    orin, tx2 = (_truth(board, "mobilenetv2").latency.mean_s for board in ("jetson-agx-orin", "jetson-tx2"))
    assert orin < tx2


def _levels(board: str, knob: str) -> tuple[int | float, ...]:
    return load_board(board).knob(knob).levels


class TestContract(DeviceContract):
    """A simulated board keeps the contract of every device."""

    def make(self) -> Device:
        """Return a noisy AGX Orin."""
        return _device(noise=0.02)


class TestCardContract(DeviceContract):
    """A simulated card keeps the contract of every device."""

    def make(self) -> Device:
        """Return a noisy A40."""
        return _device("a40", noise=0.02)


class TestWorkloadContract(WorkloadContract):
    """A simulated workload keeps the contract of every workload."""

    def make(self) -> Workload:
        """Return EfficientNet-B4 on a TX2."""
        return _device("jetson-tx2", noise=0.02).serve(load_model("efficientnet-b4"))


@pytest.mark.parametrize("board", BOARDS)
def test_every_board_serves_every_model_that_fits(board: str) -> None:
    """Energy, time and temperature are positive and power stays below what the module may draw."""
    device = _device(board)
    for name in (each for each in names("profiles/workloads") if not is_language_model(each)):
        try:
            workload = device.serve(load_model(name))
        except InvalidInput:
            assert name == "llm-7b-decode"
            continue
        for point in (workload.space[0], workload.space[len(workload.space) - 1]):
            truth = device.expected(workload, point)
            assert truth.energy_kind is EnergyKind.SIMULATED
            assert truth.power_w is not None
            assert 0 < truth.power_w <= device.board.power_max_w
            assert truth.temperature_c is not None
            assert 25 < truth.temperature_c < 95


@pytest.mark.parametrize(("board", "model"), [("jetson-agx-orin", "efficientnet-b0"), ("jetson-nano", "resnet50")])
@pytest.mark.parametrize("knob", ["gpu_max_hz", "mem_hz", "cpu_max_hz"])
def test_a_higher_clock_is_never_slower(board: str, model: str, knob: str) -> None:
    """Without noise, time falls or stays as any one clock rises."""
    times = [_truth(board, model, **{knob: level}).latency.mean_s for level in _levels(board, knob)]
    assert all(late <= early * (1 + 1e-9) for early, late in itertools.pairwise(times))


def test_a_higher_lowest_clock_is_never_slower() -> None:
    """Raising the GPU minimum leaves the governor less to climb."""
    levels = _levels("jetson-agx-orin", "gpu_min_hz")
    times = [_truth("jetson-agx-orin", "efficientnet-b4", gpu_min_hz=level).latency.mean_s for level in levels]
    assert all(late < early for early, late in itertools.pairwise(times))


def test_time_is_bounded_by_the_roofline() -> None:
    """No query is faster than its operations at full rate or its bytes at full bandwidth."""
    for board in BOARDS:
        simulation = load_board(board).simulation
        assert simulation is not None
        model = load_model("bert-base-fp16")
        time_s = _truth(board, "bert-base-fp16").latency.mean_s
        top = float(_levels(board, "gpu_max_hz")[-1])
        assert time_s > model.operations / (simulation.gpu.fp16_ops_per_clock * top)
        assert time_s > (model.weight_bytes + model.traffic_bytes) / simulation.memory.bandwidth_bytes_per_s


def test_a_memory_bound_model_follows_the_memory_clock_and_not_the_gpu_clock() -> None:
    """Decoding a token on AGX Orin slows with memory, hardly with the GPU."""
    base = _truth("jetson-agx-orin", "llm-7b-decode").latency.mean_s
    gpu_low = _truth("jetson-agx-orin", "llm-7b-decode", gpu_max_hz=828_750_000).latency.mean_s
    memory_low = _truth("jetson-agx-orin", "llm-7b-decode", mem_hz=2_133_000_000).latency.mean_s
    assert gpu_low < 1.05 * base
    assert memory_low > 1.4 * base


@pytest.mark.parametrize(
    ("board", "model", "factors"),
    [("jetson-agx-orin", "efficientnet-b7", (1.7, 2.7, 4.6)), ("jetson-tx2", "efficientnet-b4", (1.7, 3.2, 6.0))],
)
def test_batches_take_the_published_times(board: str, model: str, factors: tuple[float, ...]) -> None:
    """Batches of 2, 4 and 8 take 1.7, 2.7, 4.6 (Orin) and 1.7, 3.2, 6.0 times batch 1 within 12 % (figure 2)."""
    top = _levels(board, "gpu_min_hz")[-1]
    one = _truth(board, model, gpu_min_hz=top).latency.mean_s
    times = [_truth(board, model, gpu_min_hz=top, batch_size=size).latency.mean_s / one for size in (2, 4, 8)]
    assert times == pytest.approx(factors, rel=0.12)


@pytest.mark.slow
@pytest.mark.parametrize("board", ["jetson-agx-orin", "jetson-tx2", "v100", "a40", "l4"])
def test_the_best_gpu_clock_lies_inside(board: str) -> None:
    """The clock of least energy for BERT is neither the lowest nor the highest."""
    levels = _levels(board, "gpu_max_hz")
    energy = [_truth(board, "bert-base-fp16", gpu_max_hz=level, batch_size=8).energy_j for level in levels]
    assert 0 < int(np.argmin(energy)) < len(levels) - 1


@pytest.mark.parametrize("board", CARDS)
def test_a_power_limit_holds_and_costs_time(board: str) -> None:
    """A capped card stays within its limit, and no higher limit is slower."""
    limits = _levels(board, "power_limit_w")
    truths = [_truth(board, "bert-base-fp16", power_limit_w=limit, batch_size=16) for limit in limits]
    assert all(
        truth.power_w is not None and truth.power_w <= limit for truth, limit in zip(truths, limits, strict=True)
    )
    times = [truth.latency.mean_s for truth in truths]
    assert all(late <= early for early, late in itertools.pairwise(times))
    assert times[0] > times[-1]


@pytest.mark.parametrize(
    ("board", "limit_w", "slowdown", "energy"),
    [("v100", 150, 1.28, 0.82), ("v100", 200, 1.06, 0.89), ("a40", 175, 1.27, 0.80), ("a40", 250, 1.03, 0.89)],
)
def test_cards_follow_the_published_power_limit_traces(
    board: str, limit_w: float, slowdown: float, energy: float
) -> None:
    """BERT under a power limit is as slow, and saves as much, as in the Zeus traces (NSDI 2023), within 9 %."""
    free = _truth(board, "bert-base-fp32", batch_size=16)
    held = _truth(board, "bert-base-fp32", batch_size=16, power_limit_w=limit_w)
    assert held.latency.mean_s / free.latency.mean_s == pytest.approx(slowdown, rel=0.09)
    assert held.energy_j / free.energy_j == pytest.approx(energy, rel=0.09)


def test_the_voltage_is_flat_then_rises() -> None:
    """Below the knee power is proportional to the clock; at the top it is one."""
    voltage = Voltage(knee=0.6, swing=1.3)
    assert relative_power(voltage, np.array(0.5)) == pytest.approx(0.5 / 1.3**2)
    assert relative_power(voltage, np.array(1.0)) == pytest.approx(1.0)


def test_a_climb_starts_low_only_after_a_gap() -> None:
    """Without a gap the clock stays up; after a long one a short burst runs near the lowest clock."""
    governor = Governor(rise_s=0.02, fall_s=0.001)
    bursts, gaps = np.array([0.01, 1e-5, 10.0]), np.array([0.0, 1.0, 1.0])
    climb = Climb.after(governor, np.full(3, 1e8), np.full(3, 1e9), bursts, gaps)
    assert climb.mean_hz == pytest.approx([1e9, 1e8, 1e9], rel=0.01)


def test_a_slow_cpu_holds_up_the_gpu() -> None:
    """Preprocessing overlaps inference, so throughput falls only once it is the slower stage."""
    fast, slow = (
        _truth("jetson-agx-orin", "mobilenetv2", cpu_max_hz=level, gpu_min_hz=1_300_500_000, batch_size=16)
        for level in (2_201_600_000, 268_800_000)
    )
    assert slow.throughput_per_s == pytest.approx(268_800_000 / 0.8e6, rel=0.01)
    assert fast.throughput_per_s > 2 * slow.throughput_per_s


def test_a_hot_board_slows_down_and_says_so() -> None:
    """In hot air the board reaches its limit, reports throttling, runs slower and stays at the limit."""
    board = load_board("jetson-agx-orin")
    assert board.simulation is not None
    heat = replace(board.simulation.thermal, ambient_c=75.0, time_constant_s=5.0)
    hot = SimulatedDevice(replace(board, simulation=replace(board.simulation, thermal=heat)), noise=0.0)
    workload = hot.serve(load_model("bert-base-fp16"))
    workload.query()
    first = workload.query().latency_s
    assert not hot.read().throttled
    while hot.clock.now() < 40.0:
        last = workload.query().latency_s
    assert hot.read().throttled
    assert hot.read().temperature_c == pytest.approx(95.0, abs=1.0)
    assert last > 1.1 * first
    assert hot.expected(workload, {}).latency.mean_s == pytest.approx(last, rel=0.02)


def test_heat_costs_energy() -> None:
    """A board that has warmed up leaks more than one that has not."""
    device, _ = _served("jetson-agx-orin", "resnet50")
    board = device.board
    assert board.simulation is not None
    warm = replace(board.simulation, thermal=replace(board.simulation.thermal, ambient_c=45.0))
    warmer = SimulatedDevice(replace(board, simulation=warm), noise=0.0)
    model = load_model("resnet50")
    cool_j = device.expected(device.serve(model), {}).energy_j
    assert warmer.expected(warmer.serve(model), {}).energy_j > 1.05 * cool_j


def test_an_idle_board_draws_power_and_cools() -> None:
    """Sleeping on the board's clock adds idle energy, far less than serving does, and its heat goes."""
    device, workload = _served("jetson-agx-orin", "bert-base-fp16")
    device.clock.sleep(600.0)
    idle = device.read()
    power_w = idle.energy_j / idle.time_s
    assert idle.time_s == 600.0
    assert 8 < power_w < 16
    assert idle.temperature_c is not None
    assert idle.temperature_c < 45
    assert idle.clocks_hz["gpu"] == 114_750_000
    while device.clock.now() < 601.0:
        workload.query()
    busy = device.read()
    assert (busy.energy_j - idle.energy_j) / (busy.time_s - idle.time_s) > 1.5 * power_w


def test_the_first_query_after_a_wait_is_slower() -> None:
    """A board left alone has let its clock go and overlaps nothing."""
    _, workload = _served("jetson-agx-orin", "efficientnet-b4")
    first, second = workload.query().latency_s, workload.query().latency_s
    assert first > second


def test_a_window_measures_the_truth() -> None:
    """Without noise and settled in heat, a metered window agrees with the expected measurement."""
    device, workload = _served("jetson-tx2", "efficientnet-b4")
    point = OperatingPoint({"gpu_max_hz": 930_750_000, "mem_hz": 1_331_200_000, "batch_size": 4})
    with device:
        measure(device, workload, point, Window(queries=1, duration_s=3600.0, most_queries=20_000, timeout_s=3600.0))
        seen = measure(device, workload, point, Window(queries=200))
    truth = device.expected(workload, point)
    assert seen.latency.mean_s == pytest.approx(truth.latency.mean_s, rel=1e-6)
    assert seen.energy_j == pytest.approx(truth.energy_j, rel=1e-3)
    assert seen.power_w == pytest.approx(truth.power_w, rel=1e-3)


def test_many_truths_come_in_order() -> None:
    """The truth of several points is the truth of each."""
    device, workload = _served("jetson-orin-nx", "resnet50")
    points = list(device.space)[:3]
    assert device.expected_all(workload, points) == tuple(device.expected(workload, point) for point in points)


def test_changing_clocks_takes_time() -> None:
    """On Orin a change takes effect after 5 ms (GPU), 8 ms (memory), 1 ms (CPU); none takes none (arXiv 2606.16106)."""
    device = _device()
    device.apply(device.space.default)
    assert device.clock.now() == 0.0
    device.apply(OperatingPoint({"gpu_max_hz": 930_750_000}))
    assert device.clock.now() == pytest.approx(0.005)
    device.apply(OperatingPoint({"mem_hz": 2_133_000_000, "cpu_max_hz": 1_344_000_000}))
    assert device.clock.now() == pytest.approx(0.005 + 0.005 + 0.008 + 0.001)


@pytest.mark.parametrize(
    ("point", "reason"),
    [
        ({"gpu_max_hz": 930_000_000}, "the nearest are 828.75 MHz and 930.75 MHz"),
        ({"gpu_min_hz": 1_300_500_000, "gpu_max_hz": 930_750_000}, "lies above"),
        ({"fan_hz": 1}, "has no knob fan_mhz"),
        ({"gpu_max_hz": "fast"}, "no level fast"),
    ],
)
def test_a_refused_point_says_why_and_changes_nothing(point: dict[str, Level], reason: str) -> None:
    """A level is never clipped; the board stays as it was."""
    device = _device()
    before = device.read()
    with pytest.raises(KnobRejected, match=reason):
        device.apply(OperatingPoint(point))
    assert device.read() == before


def test_a_workload_refuses_what_it_cannot_run() -> None:
    """A batch size off the list and a knob it does not own are refused."""
    _, workload = _served("v100", "llm-7b-decode")
    with pytest.raises(KnobRejected, match="cannot run at batch_size 4; it can at 1, 2"):
        workload.apply(OperatingPoint({"batch_size": 4}))
    with pytest.raises(KnobRejected, match="no knob gpu_max_hz"):
        workload.apply(OperatingPoint({"gpu_max_hz": 1}))


def test_a_model_that_does_not_fit_is_refused() -> None:
    """Serving seven billion parameters on a Nano ends in one line."""
    with pytest.raises(InvalidInput, match="take a smaller model or a larger device"):
        _device("jetson-nano").serve(load_model("llm-7b-decode"))


def test_presets_may_set_knobs_the_space_holds_still() -> None:
    """The 30 W mode caps the CPU too, which is not searched."""
    device = _device()
    preset = device.presets["30W"]
    assert "cpu_max_hz" in preset
    assert "cpu_max_hz" not in device.space.names
    device.apply(preset)
    assert device.read().clocks_hz["cpu"] == preset["cpu_max_hz"]


def test_other_knobs_can_be_searched() -> None:
    """The searched knobs can be chosen; an unknown one is answered with the nearest."""
    device = SimulatedDevice(load_board("jetson-agx-orin"), knobs=["cpu_max_hz", "mem_hz"])
    assert device.space.names == ("cpu_max_hz", "mem_hz")
    assert len(device.space) == 14 * 4
    with pytest.raises(UnknownName, match="mem_mhz"):
        SimulatedDevice(load_board("jetson-agx-orin"), knobs=["emc_hz"])


def test_the_uri_leaves_out_what_is_default() -> None:
    """A URI holds exactly the options that differ."""
    board = load_board("jetson-agx-orin")
    assert SimulatedDevice(board).uri == "sim:jetson-agx-orin"
    assert SimulatedDevice(board, seed=7, noise=0.0).uri == "sim:jetson-agx-orin?seed=7&noise=0"
    assert SimulatedDevice(board, knobs=["mem_hz"]).uri == "sim:jetson-agx-orin?knobs=mem_hz"


@pytest.mark.parametrize(("seed", "noise"), [(-1, 0.02), (0, -0.1), (0, 1.0), (0, float("nan"))])
def test_a_bad_seed_or_noise_is_refused(seed: int, noise: float) -> None:
    """Noise is a fraction and a seed is not negative."""
    with pytest.raises(InvalidInput, match="0 <= noise < 1"):
        _device(noise=noise, seed=seed)


def test_a_board_without_coefficients_cannot_be_simulated() -> None:
    """A device file without a simulation table is fine for a real board only."""
    with pytest.raises(InvalidInput, match="cannot be simulated"):
        SimulatedDevice(replace(load_board("l4"), simulation=None))


def _measured(device: SimulatedDevice, number: int, point: OperatingPoint) -> Measurement:
    device.rewind(number)
    return measure(device, device.serve(load_model("efficientnet-b4")), point, Window())


def test_a_trial_follows_from_seed_number_and_point_alone() -> None:
    """A rewound device repeats a trial bit for bit, whatever it did before; another number or seed differs."""
    point = OperatingPoint({"gpu_max_hz": 930_750_000, "batch_size": 2})
    used, fresh = _device(noise=0.02, seed=3), _device(noise=0.02, seed=3)
    for number in range(3):
        _measured(used, number, OperatingPoint({"mem_hz": 665_600_000}))
    used.clock.sleep(12.345)
    assert isinstance(used, Rewindable)
    assert _measured(used, 5, point) == _measured(fresh, 5, point)
    assert _measured(used, 6, point) != _measured(fresh, 5, point)
    assert _measured(_device(noise=0.02, seed=4), 5, point) != _measured(fresh, 5, point)


@pytest.mark.slow
def test_noise_has_the_size_that_was_asked_for() -> None:
    """Windows scatter by a few percent around the truth, and the 99th percentile lies clearly above the median."""
    device = _device(noise=0.02)
    energies = np.array([_measured(device, number, device.space.default).energy_j for number in range(60)])
    truth = device.expected(device.serve(load_model("efficientnet-b4")), {})
    assert 0.01 < energies.std() / energies.mean() < 0.04
    assert energies.mean() == pytest.approx(truth.energy_j, rel=0.03)
    assert truth.latency.p99_s is not None
    assert truth.latency.p50_s is not None
    assert truth.latency.p99_s > 1.1 * truth.latency.p50_s


def test_stragglers_come_in_clusters() -> None:
    """A straggler is followed by another far more often than chance would have it."""
    device = _device(noise=0.02)
    workload = device.serve(load_model("resnet50"))
    workload.query()
    times = np.array([workload.query().latency_s for _ in range(20_000)])
    late = times > 1.1 * np.median(times)
    assert 0.01 < late.mean() < 0.04
    assert late[1:][late[:-1]].mean() > 0.4
