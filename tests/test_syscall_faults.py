"""A sample of `benchmarks/syscall_faults.py`: whatever system call of a session fails, the board is back or named."""

import importlib.util
import sys
from datetime import date
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).resolve().parent.parent / "benchmarks" / "syscall_faults.py"
pytestmark = [pytest.mark.faults, pytest.mark.tools("strace")]


@pytest.fixture(scope="module")
def program() -> ModuleType:
    """Return the benchmark, as a module."""
    spec = importlib.util.spec_from_file_location("syscall_faults", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["writer", "apply", "restore", "guard"])
def test_whatever_call_fails_the_board_is_back_or_named(program: ModuleType, name: str) -> None:
    """Other calls each day, one at a time and in pairs."""
    seed = date.today().toordinal()
    assert program.tried(name, sample=60, seed=seed) == (60, [])
    assert program.tried(name, pairs=40, seed=seed) == (40, [])


def test_a_call_that_fails_is_met(program: ModuleType, tmp_path: Path) -> None:
    """Else the others would prove nothing: the originals' file cannot be flushed, and nothing is written."""
    bench = program.Bench(tmp_path / "board")
    number = next(number for call, number in bench.calls() if call == "fsync")
    code, said = bench.run(program.Fault("fsync", number, "EIO").words)
    assert code == 8
    assert "nothing was changed" in said
    assert bench.changed() == []
