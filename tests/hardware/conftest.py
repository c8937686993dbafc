"""A check on a real NVIDIA GPU that only reads: what it saw, and what it cannot prove, is printed at the end."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from polythrottle.backends.nvml import NvmlDevice
from polythrottle.domain.errors import PolythrottleError

SETTER = re.compile(
    r"^nvml\w*(Set|Reset|Clear|Update|Modify|Remove|Activate|Create|Destroy|Discover|Freeze|Validate|Force|Write|Register)"
)
SEEN = pytest.StashKey[list[str]]()
OPEN = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Begin with nothing seen."""
    config.stash[SEEN], config.stash[OPEN] = [], []


@pytest.fixture(autouse=True)
def no_setter(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Block every function of NVML that could set something; a test that calls one fails, whoever catches the error."""
    import pynvml

    called: list[str] = []

    def blocked(name: str) -> Any:
        def refuse(*_: object) -> None:
            called.append(name)
            raise AssertionError(f"{name}: this check must not set anything")

        return refuse

    for name in filter(SETTER.match, dir(pynvml)):
        if callable(getattr(pynvml, name)) and not isinstance(getattr(pynvml, name), type):
            monkeypatch.setattr(pynvml, name, blocked(name))
    # Of some functions the bindings drop the return code, so they are reached past them, by the library's own pointer.
    pointer = pynvml._nvmlGetFunctionPointer
    monkeypatch.setattr(
        pynvml, "_nvmlGetFunctionPointer", lambda name: blocked(name) if SETTER.match(name) else pointer(name)
    )
    yield called
    assert not called, f"this check must not set anything, but {', '.join(called)} was called"


@pytest.fixture
def gpu(no_setter: list[str]) -> NvmlDevice:
    """Return the first GPU, or skip: there is none to check."""
    try:
        return NvmlDevice("0")
    except PolythrottleError as err:
        pytest.skip(f"no GPU to check: {err}")


@pytest.fixture
def seen(request: pytest.FixtureRequest) -> list[str]:
    """Return the list of what was seen, printed at the end."""
    return request.config.stash[SEEN]


@pytest.fixture
def unproven(request: pytest.FixtureRequest) -> list[str]:
    """Return the list of what could not be looked at here, printed at the end."""
    return request.config.stash[OPEN]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print what was seen and what was not proven."""
    write = terminalreporter.write_line
    if config.option.markexpr != "hardware":
        return
    if not terminalreporter.stats.get("passed") and not terminalreporter.stats.get("failed"):
        for report in terminalreporter.stats.get("skipped", [])[:1]:
            write(str(report.longrepr[2]).removeprefix("Skipped: "))
        write("NOTHING WAS CHECKED: there is no GPU here that can be read.")
        return
    for line in config.stash[SEEN]:
        write(line)
    write("NOT PROVEN by this check, which only reads:")
    for line in config.stash[OPEN]:
        write(f"  {line}")
