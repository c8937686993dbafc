"""The commands on every fake board, exactly as on a simulated one: measured, tuned, and left as found."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from builders import quick

from polythrottle.actuation import standing
from polythrottle.cli.commands import run
from polythrottle.testing import BOARDS, FakeKernel, plant
from polythrottle.testing.nvml import MODELS, FakeNvml, compiler

SHORT = ("--workload", "cmd:true", "--queries", "5", "--seconds", "0.3", "--json")
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
