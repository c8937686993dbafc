"""The notebook in examples/: stored without outputs, and every cell of it runs."""

import ast
import re
from pathlib import Path

import nbformat
import pytest

import polythrottle

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "tuning.ipynb"


def code() -> list[nbformat.NotebookNode]:
    """Return the code cells."""
    return [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]


def test_the_notebook_is_stored_without_outputs() -> None:
    """A diff shows what somebody wrote, and each cell is Python that uses public names alone."""
    assert all(not cell.outputs and cell.execution_count is None for cell in code())
    source = "\n".join(cell.source for cell in code())
    ast.parse(source)
    assert set(re.findall(r"polythrottle\.(\w+)", source)) <= set(polythrottle.__all__)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell succeeds; the answer is shown as a card that calls it simulated, the figures as pictures."""
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=250, kernel_name="python3", resources=resources).execute()
    shown = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in data for data in shown) == 4
    assert sum("No device was measured" in data.get("text/html", "") for data in shown) == 3
