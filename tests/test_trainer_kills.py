"""A trainer killed at any instant loses at most a step, sees each sample once per epoch, and never tears a file."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
Record = Callable[[str, object], None]


def killed(where: Path, kills: int, seed: int, *mode: str) -> dict[str, Any]:
    """Return what a job was found as after so many kills."""
    paths = os.pathsep.join([str(HERE), str(HERE.parent)])
    done = subprocess.run(
        [sys.executable, "-m", "faults.trainer", str(where), str(kills), str(seed), *mode],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check(found: dict[str, Any]) -> None:
    """No torn checkpoint, a served model that loads, each sample once per epoch, and the bits of a calm job."""
    assert found["broken"] == []
    assert found["step_at_last_kill"] > 0
    assert found["epochs"] > 0
    assert found["exact"]
    assert found["same"]


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_hundred_kills(tmp_path: Path, record_property: Record) -> None:
    """A hundred kills at random moments, in training, writing, validating and swapping."""
    found = killed(tmp_path, 100, 1)
    record_property("cells", f"trainer: {found['kills']} kills, {found['epochs']} epochs exact: {found['exact']}")
    assert found["kills"] == 100
    check(found)


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_kill_at_every_write(tmp_path: Path) -> None:
    """Before each write, flush, rename and removal that a trainer's life has, writes torn in the middle."""
    found = killed(tmp_path, 100, 2, "boundaries")
    assert found["kills"] > 15
    check(found)
