"""What all tests share: the state folder of each test is its own, and the measured tables where they are."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

TABLES = Path(__file__).resolve().parents[2] / "shared" / "data" / "replay"


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give every test a state folder and a working folder of its own."""
    folder = tmp_path / "state"
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", str(folder))
    monkeypatch.setenv("POLYTHROTTLE_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture(scope="session")
def tables() -> Path:
    """Return the folder of measured tables, or skip: they are not part of the project."""
    if not TABLES.is_dir():
        pytest.skip("the measured tables (../shared/data/replay) are not beside this checkout")
    return TABLES


@pytest.fixture(scope="session")
def transient() -> Path:
    """Return the folder of tables of transient machines, or skip: they are not part of the project."""
    folder = TABLES.parent / "transient"
    if not folder.is_dir():
        pytest.skip("the tables of transient machines (../shared/data/transient) are not beside this checkout")
    return folder


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Where nothing may be skipped (POLYTHROTTLE_NO_SKIPS), turn a run with skips into a failed one."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = len(reporter.stats.get("skipped", [])) if reporter else 0
    if skipped and exitstatus == 0 and os.environ.get("POLYTHROTTLE_NO_SKIPS"):
        reporter.write_line(f"{skipped} skipped, but nothing may be skipped here", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what the fault matrix counted, from whichever process."""
    reports = [each for kind in ("passed", "failed") for each in terminalreporter.stats.get(kind, [])]
    for line in sorted(str(value) for each in reports for name, value in each.user_properties if name == "cells"):
        terminalreporter.write_line(line)
