"""The commands on every fake board, exactly as on a simulated one: measured, tuned, and left as found."""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import measured, quick
from daemons import LADDER, TUNED, House

from polythrottle.actuation import standing
from polythrottle.backends import open_device
from polythrottle.catalog.tuned_profiles import write_profile
from polythrottle.cli.commands import run
from polythrottle.daemon.control.events import Target
from polythrottle.domain.ports import Device
from polythrottle.domain.profile import Profile
from polythrottle.domain.space import OperatingPoint
from polythrottle.storage.identity import identity_of
from polythrottle.testing import BOARDS, FakeKernel, plant
from polythrottle.testing.boards import UNMETERED
from polythrottle.testing.meters import plant_hwmon
from polythrottle.testing.nvml import MODELS, FakeNvml, compiler

SHORT = ("--workload", "cmd:sleep 0.05", "--queries", "5", "--seconds", "0.3", "--json")
SEARCH = (
    "--method",
    "random",
    "--trials",
    "3",
    "--no-early-stop",
    "--no-presets",
    "--no-history",
    "--slo",
    "mean<=100x",
)


def documents(capsys: pytest.CaptureFixture[str], device: str) -> tuple[dict[str, object], dict[str, object]]:
    """Return what measuring and tuning a device answer."""
    assert run(["measure", "--device", device, *SHORT]) == 0, capsys.readouterr().err
    measured = json.loads(capsys.readouterr().out)
    assert run(["tune", "--device", device, *SHORT, *SEARCH, "--out", "profile.toml"]) == 0, capsys.readouterr().err
    return measured, json.loads(capsys.readouterr().out)


def some(names: Iterable[str], *quick: str) -> list[Any]:
    """Return parameters of which these run in every test run and the others with the slow tests."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("board", some(BOARDS, "jetson-agx-orin-jp6"))
def test_a_jetson_is_measured_and_tuned(board: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both commands answer with joules of the board's rails, and every control is back afterwards."""
    kernel = FakeKernel(quick(plant(board, tmp_path / "board")))
    before = kernel.snapshot()
    with kernel.installed():
        measured, tuned = documents(capsys, f"jetson?root={kernel.root}")
    assert kernel.snapshot() == before
    assert kernel.writes()
    assert not standing()
    assert measured["energy_j"] > 0  # type: ignore[operator]
    assert len(tuned["trials"]) >= 3 if isinstance(tuned["trials"], list) else tuned["trials"]


@pytest.mark.slow
@pytest.mark.parametrize("board", UNMETERED)
def test_a_jetson_without_a_sensor_is_measured_and_tuned_by_a_meter(
    board: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nano 2GB with a meter of one's own: both commands answer with its joules, and every control is back."""
    kernel = FakeKernel(quick(plant(board, tmp_path / "board")))
    meter = plant_hwmon(tmp_path / "hwmon0", power1_input=7_500_000)
    before = kernel.snapshot()
    with kernel.installed():
        measured, tuned = documents(capsys, f"jetson?root={kernel.root}&meter=hwmon:{meter}")
    assert kernel.snapshot() == before
    assert kernel.writes()
    assert measured["power_w"] == pytest.approx(7.5, rel=0.05)
    assert str(measured["boundary"]).endswith(f"hwmon at {meter}/power1_input")
    assert tuned["trials"]


@pytest.mark.slow
@pytest.mark.parametrize("model", some((name for name in MODELS if name not in ("a100-mig", "laptop")), "h100"))
def test_a_gpu_is_measured_and_tuned(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both commands answer with joules of the GPU's counter, and locks and limit are back afterwards."""
    if compiler() is None:
        pytest.skip("no C compiler to build the stand-in for NVIDIA's library with")
    with FakeNvml(tmp_path / "nvml", [model]) as fake:
        fake.set(0, load_permille=800)
        before = fake.snapshot()
        measured, _ = documents(capsys, "nvml:0")
        assert fake.snapshot() == before
        assert fake.log()
    assert measured["energy_j"] > 0  # type: ignore[operator]


GPUS = [name for name in MODELS if name not in ("a100-mig", "laptop")]
THREE = ("gpu_max_hz", "mem_hz", "cpu_max_hz")


def lowest(device: Device) -> OperatingPoint:
    """Return the point of the lowest level of each knob that has no other to heed."""
    knobs = (knob for knob in device.space.knobs if knob.name in THREE)
    return device.space.default.moved({knob.name: knob.levels[0] for knob in knobs})


def applied_and_taken_back(device: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Apply a profile with the command, see that it stands, and take it back."""
    opened, path = open_device(device), folder / "profile.toml"
    identity = identity_of(opened)
    write_profile(Profile(opened.uri, "model", lowest(opened), measured(), identity=identity, workload_knobs=()), path)
    assert run(["apply", str(path), "--device", device, "--keep", "--json"]) == 0, capsys.readouterr().err
    assert json.loads(capsys.readouterr().out)["stands_as"]
    assert standing()
    assert run(["restore", "--device", device, "--json"]) == 0, capsys.readouterr().err
    assert json.loads(capsys.readouterr().out)["restored"]
    assert not standing()


def followed_for_a_minute(device: Device, folder: Path) -> None:
    """Turn the daemon's loop for a minute of its time: load that rises and falls is followed, and all given back."""
    low, default = lowest(device), device.space.default
    points = (low, low, default)
    rungs = tuple(
        replace(each, service=replace(each.service, point=point))
        for each, point in zip(LADDER.rungs, points, strict=True)
    )
    plan = replace(TUNED.plan, ladder=replace(LADDER, rungs=rungs), safe=Target(default), cool=Target(low))
    house = House(folder, replace(TUNED, plan=plan), board=device)
    seen = set()
    for rate_per_s in (15.0, 150.0, 15.0):
        house.traffic.rate_per_s = rate_per_s
        house.turns(20, lambda: seen.add(house.runner.executor.state.phase.value))
    assert "following" in seen
    assert house.traffic.served
    house.runner.end()


@pytest.mark.slow
@pytest.mark.parametrize("board", [*BOARDS, *UNMETERED])
def test_a_jetson_takes_a_profile_and_gives_it_back(
    board: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Listed, examined, its lowest clocks applied, and everything back, also without a power sensor."""
    kernel = FakeKernel(quick(plant(board, tmp_path / "board")))
    before, device = kernel.snapshot(), f"jetson?root={kernel.root}"
    with kernel.installed():
        assert run(["devices", device]) == 0
        assert run(["doctor", "--device", device]) == 0
        capsys.readouterr()
        applied_and_taken_back(device, tmp_path, capsys)
    assert kernel.snapshot() == before
    assert kernel.writes()


@pytest.mark.slow
@pytest.mark.parametrize("board", BOARDS)
def test_a_daemon_follows_on_every_jetson(board: str, tmp_path: Path) -> None:
    """For a minute of the loop's time, and the board is as found."""
    kernel = FakeKernel(quick(plant(board, tmp_path / "board")))
    before = kernel.snapshot()
    with kernel.installed():
        followed_for_a_minute(open_device(f"jetson?root={kernel.root}"), tmp_path)
    assert kernel.snapshot() == before
    assert kernel.writes()


@pytest.mark.slow
@pytest.mark.parametrize("board", BOARDS)
def test_three_clocks_of_a_jetson_are_tuned(board: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GPU, memory and processors together; the memory's is among the knobs of every Xavier, Orin and Thor."""
    kernel = FakeKernel(quick(plant(board, tmp_path / "board", power_mode=0)))
    before, device = kernel.snapshot(), f"jetson?root={kernel.root}"
    with kernel.installed():
        knobs = [offer.knob.name for offer in open_device(device).offers() if offer.knob.name in THREE]  # type: ignore[attr-defined]
        if any(chip in board for chip in ("xavier", "orin", "thor")):
            assert set(knobs) == {*THREE}
        words = ["tune", "--device", device, *SHORT, *SEARCH, "--knobs", ",".join(knobs), "--out", "profile.toml"]
        assert run(words) == 0, capsys.readouterr().err
    assert kernel.snapshot() == before
    assert json.loads(capsys.readouterr().out)["trials"]


@pytest.mark.slow
@pytest.mark.parametrize("models", [[name] for name in GPUS] + [["h100-sxm"] * 8], ids=[*GPUS, "eight"])
def test_gpus_take_a_profile_and_a_daemon_follows_on_them(
    models: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One GPU of each model and eight as one: listed, examined, applied, restored, followed for a minute."""
    if compiler() is None:
        pytest.skip("no C compiler to build the stand-in for NVIDIA's library with")
    device = "nvml:0" if len(models) == 1 else "nvml:all"
    with FakeNvml(tmp_path / "nvml", models) as fake:
        for slot in range(len(models)):
            fake.set(slot, load_permille=500)
        before = fake.snapshot()
        assert run(["devices", device]) == 0
        assert run(["doctor", "--device", device]) == 0
        capsys.readouterr()
        applied_and_taken_back(device, tmp_path, capsys)
        assert fake.snapshot() == before
        followed_for_a_minute(open_device(device), tmp_path)
        assert fake.snapshot() == before
        assert fake.log()


@pytest.mark.slow
def test_eight_gpus_are_tuned_swept_and_checked_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command answers with the joules of all eight, and all eight are as found."""
    if compiler() is None:
        pytest.skip("no C compiler to build the stand-in for NVIDIA's library with")
    with FakeNvml(tmp_path / "nvml", ["h100-sxm"] * 8) as fake:
        for slot in range(8):
            fake.set(slot, load_permille=800)
        before = fake.snapshot()
        drawn_w = sum(fake.power_mw(slot) for slot in range(8)) / 1000
        found, tuned = documents(capsys, "nvml:all")
        assert found["power_w"] == pytest.approx(drawn_w, rel=0.3)
        assert tuned["trials"]
        words = ["sweep", "--device", "nvml:all", *SHORT, "--knobs", "power_limit_w", "--out", "sweep.csv"]
        assert run(words) == 0, capsys.readouterr().err
        levels = open_device("nvml:all").space.knob("power_limit_w").levels
        assert len(Path("sweep.csv").read_text().splitlines()) == len(levels) + 1
        capsys.readouterr()
        # How long a process takes to start is the busy processor's affair: 99 % more joules are still no fault here.
        words = ["check", "profile.toml", "--device", "nvml:all", *SHORT, "--max-regress", "99%"]
        assert run(words) in (0, 1), capsys.readouterr().err
        assert fake.snapshot() == before
        assert {entry.uuid for entry in fake.log() if entry.uuid} == {fake.uuid(slot) for slot in range(8)}
    assert not standing()
