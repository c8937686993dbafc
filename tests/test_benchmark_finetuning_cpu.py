"""The measured comparison on two cores, in short: it runs, and its table says what was measured."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parent.parent / "benchmarks" / "finetuning_cpu.py"


@pytest.mark.slow
def test_the_comparison_runs_and_the_trainer_gets_on(tmp_path: Path) -> None:
    """With a limit that nothing breaks every policy holds it, and only inference alone trains nothing."""
    words = ["--seconds", "12", "--rate", "2", "--slo-ms", "30000", "--policies", "none,greedy,interleave"]
    command = [sys.executable, str(BENCHMARK), *words, "--write", str(tmp_path / "table.md")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in (tmp_path / "table.md").read_text().splitlines() if line.startswith("| ")][2:]
    assert [row[0] for row in rows] == ["| inference alone", "| greedy", "| interleave"]
    assert [row[6] for row in rows] == ["held"] * 3
    samples = [int(row[7]) for row in rows]
    assert samples[0] == 0
    assert max(samples[1:]) > 0  # a busy machine may be too slow for the other one's first slice
