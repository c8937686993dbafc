"""The fault matrix: whatever breaks at whatever step, the board is as it was found or each difference is named."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults.steps import STAGES

from polythrottle.testing import BOARDS
from polythrottle.testing.boards import UNMETERED
from polythrottle.testing.nvml import compiler
from polythrottle.testing.nvml.models import MODELS

Record = Callable[[str, object], None]

HERE = Path(__file__).resolve().parent
GPUS = ("4xh100", "8xh100-sxm", *(name for name in MODELS if name not in ("a100-mig", "laptop")))


def run(board: str, folder: Path, every: int, first: int = 0) -> list[dict[str, Any]]:
    """Return the cells of a board's matrix at every so-manieth step from the first on."""
    if not board.startswith("jetson") and compiler() is None:
        pytest.skip("no C compiler to build the stand-in for NVIDIA's library with")
    fast = Path("/dev/shm")  # flushing to memory takes no time, and is still done
    where = Path(tempfile.mkdtemp(dir=fast if os.access(fast, os.W_OK) else folder))
    paths = os.pathsep.join([str(HERE), str(HERE.parent)])
    done = subprocess.run(
        [sys.executable, "-m", "faults.matrix", board, str(where), str(every), str(first)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    shutil.rmtree(where, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(board: str, cells: list[dict[str, Any]], record_property: Record) -> None:
    """Every cell holds; their count is printed at the end of the run."""
    broken = [cell for cell in cells if not cell["holds"]]
    stages = Counter(cell["stage"] for cell in cells)
    told = ", ".join(f"{count} {stage}" for stage, count in stages.items())
    record_property("cells", f"{board}: {len(cells)} cells of the fault matrix, {len(broken)} broken ({told})")
    assert not broken, json.dumps(broken[:3], indent=1)


@pytest.mark.faults
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("board", [*BOARDS, *UNMETERED, *GPUS])
def test_every_fault_at_every_step(board: str, tmp_path: Path, record_property: Record) -> None:
    """The matrix on every board: a sixth of the steps, each day another, or with POLYTHROTTLE_FAULTS=all every one."""
    every = 1 if os.environ.get("POLYTHROTTLE_FAULTS") == "all" else 6
    cells = run(board, tmp_path, every, int(time.time() // 86400) % every)
    check(board, cells, record_property)
    assert {cell["stage"] for cell in cells} == set(STAGES)
    assert len(cells) >= (150 if board == "gb10" else 200) / every  # whose clock's lock is all there is to set
