"""The pages on extending: each example is short, runs as it stands, and keeps the contract it shows."""

import re
from pathlib import Path
from typing import Any

import pytest

from polythrottle.domain.errors import TrialError
from polythrottle.testing import DeviceContract, OptimizerContract, WorkloadContract

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "extending"
CONTRACTS = (DeviceContract, OptimizerContract, WorkloadContract)
EXAMPLES = [
    pytest.param(text, id=f"{path.stem}-{number}")
    for path in sorted(FOLDER.glob("*.md"))
    for number, text in enumerate(re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE))
]


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs_and_keeps_its_contract(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every test of a contract that the example subclasses passes, and it prints what it found."""
    names: dict[str, Any] = {"__name__": "example"}
    for last in (False, False, True):  # a window that other programs disturb is refused, and rightly so
        try:
            exec(compile(example, "example", "exec"), names)
            break
        except TrialError:
            if last:
                raise
    assert capsys.readouterr().out.strip()
    for kind in [each for each in names.values() if isinstance(each, type) and issubclass(each, CONTRACTS)]:
        for name in () if kind in CONTRACTS else [each for each in dir(kind) if each.startswith("test_")]:
            getattr(kind(), name)()


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_is_below_forty_lines_of_code(example: str) -> None:
    """Imports and empty lines aside, which say nothing."""
    lines = [line for line in example.splitlines() if line.strip() and not line.startswith(("import ", "from "))]
    assert len(lines) < 40


def test_there_is_a_page_for_each_port() -> None:
    """Device, workload, search method and meter, each with an example and its contract where there is one."""
    assert {path.stem for path in FOLDER.glob("*.md")} == {"device", "meter", "optimizer", "workload"}
    pages = {path.stem: path.read_text() for path in FOLDER.glob("*.md")}
    for page, contract in zip(("device", "optimizer", "workload"), CONTRACTS, strict=True):
        assert f"({contract.__name__})" in pages[page]
