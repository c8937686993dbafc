"""What all tests share: a state folder of their own, nothing left behind, and the measured tables where they are."""

import gc
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from polythrottle.report.figure_style import Html

sys.path.insert(0, str(Path(__file__).parent))
# pytest-xdist uses every core already; torch's threads on top of that would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell without a terminal starts what runs in the background deaf to Ctrl-C, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# How long an example takes says how busy the machine is.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")

CHECKOUT = Path(__file__).resolve().parent.parent
TABLES = CHECKOUT.parent / "shared" / "data" / "replay"
KEPT_CLEAN = [CHECKOUT, *(CHECKOUT / name for name in ("polythrottle", "profiles", "devices", "examples", "tests"))]
LEFT_OUT = pytest.StashKey[Counter[str]]()
TARGETS = {"soak": "test-daemon", "schema": "test-daemon", "hardware": "hw-test"}
"""Markers whose make target is not named after them."""


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give every test a state folder and a working folder of its own."""
    folder = tmp_path / "state"
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", str(folder))
    monkeypatch.setenv("POLYTHROTTLE_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("POLYTHROTTLE_ROOTS", str(tmp_path.resolve()))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture(autouse=True)
def unrendered_figures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave drawing the report's figures to the tests of the report; every study makes one, at half of its cost."""
    if not request.node.path.name.startswith(("test_report", "test_plots", "test_page")):
        monkeypatch.setattr("polythrottle.report.page.svg", lambda figure, name, alt: Html("<svg></svg>"))


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path: Path, state_folder: Path) -> Iterator[None]:
    """Fail the test that leaves a process running or a file in the checkout, and not the one after it."""
    processes, changed = set(_processes()), _changed()
    yield
    ends = time.monotonic() + 60.0  # a guard restores a board before it ends; only one that hangs takes this long
    while left := [pid for pid in set(_processes()) - processes if _belongs(pid, tmp_path)]:
        if time.monotonic() > ends:
            told = [f"{pid} ({_words(pid)})" for pid in left]
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            pytest.fail(f"the test left processes running: {', '.join(told)}")
        time.sleep(0.02)
    if _changed() != changed:
        left_files = _files() - FILES
        FILES.update(left_files)
        assert not left_files, f"the test left files in the checkout: {sorted(left_files)}"


def _processes() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _belongs(pid: int, folder: Path) -> bool:
    """Return whether a process was started with a test's folder in its environment or its words."""
    mark = str(folder).encode()
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"multiprocessing.resource_tracker" in words:  # lives as long as the process that asked for it first
            return False
        return mark in words or mark in Path(f"/proc/{pid}/environ").read_bytes()
    return False


def _words(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return "ended meanwhile"


def _changed() -> list[int]:
    """Return when something was last made or removed at the top of the checkout or of one of its folders."""
    return [folder.stat().st_mtime_ns for folder in KEPT_CLEAN]


def _files() -> set[str]:
    """Return what lies there; caches and hidden files aside."""
    names = {f"{folder}/{name}" for folder in KEPT_CLEAN for name in os.listdir(folder)}
    return {name for name in names if not name.rpartition("/")[2].startswith((".", "__pycache__"))}


FILES = _files()
"""What was there before the first test."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose programs are not installed, and say which."""
    lacking = [name for mark in item.iter_markers("tools") for name in mark.args if shutil.which(name) is None]
    if lacking:
        pytest.skip(f"needs {' and '.join(lacking)}")


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


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Read the tests that schemathesis makes only where they are run: making them takes seconds in each process."""
    if collection_path.name != "test_web_schema.py" or not config.option.markexpr.startswith("not ("):
        return None
    config.stash.setdefault(LEFT_OUT, Counter())["schema"] = 0  # they are not counted, for which they would be made
    return True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Let the garbage collector pass over the thousands of tests and modules that stay to the end anyway.

    It would go through all of them time and again, in each process: some seconds while tests are collected, and more
    while they run.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count what the markers leave out."""
    for item in items:
        counts = item.config.stash.setdefault(LEFT_OUT, Counter())
        counts.update([next((mark.name for mark in item.iter_markers() if mark.name in _expensive(item.config)), "")])


def _expensive(config: pytest.Config) -> set[str]:
    """Return the markers of tests that need a target of their own."""
    return {line.partition(":")[0].partition("(")[0] for line in config.getini("markers") if "`make " in line}


def pytest_testnodedown(node: Any) -> None:
    """Keep what a process of pytest-xdist left out; each leaves out the same."""
    node.config.stash[LEFT_OUT] = Counter(getattr(node, "workeroutput", {}).get("left_out", {}))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Where nothing may be skipped (POLYTHROTTLE_NO_SKIPS), turn a run with skips into a failed one."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(session.config.stash.get(LEFT_OUT, {}))
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = len(reporter.stats.get("skipped", [])) if reporter else 0
    if skipped and exitstatus == 0 and os.environ.get("POLYTHROTTLE_NO_SKIPS"):
        reporter.write_line(f"{skipped} skipped, but nothing may be skipped here", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print what the fault matrix counted, from whichever process, and which tests have targets of their own."""
    reports = [each for kind in ("passed", "failed") for each in terminalreporter.stats.get(kind, [])]
    for line in sorted(str(value) for each in reports for name, value in each.user_properties if name == "cells"):
        terminalreporter.write_line(line)
    counts = {name: count for name, count in sorted(config.stash.get(LEFT_OUT, Counter()).items()) if name}
    if counts and config.args_source != pytest.Config.ArgsSource.ARGS:
        told = ", ".join(
            f"{count or 'all'} {name} (make {TARGETS.get(name, f'test-{name}')})" for name, count in counts.items()
        )
        terminalreporter.write_line(f"not run here, because they take minutes or more than Python and make: {told}")
