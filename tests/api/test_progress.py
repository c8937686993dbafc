"""Who shows progress: a terminal and a notebook unless told not to, and nobody elsewhere."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from builders import FakeDevice, FakeWorkload

import polythrottle
from polythrottle.api.experiments import NoProgress, in_notebook, study_progress
from polythrottle.api.progress import LiveStudy
from polythrottle.domain.errors import DeviceError
from polythrottle.domain.measurement import Window

WORDS: dict[str, Any] = {
    "method": "grid",
    "trials": 2,
    "presets": False,
    "window": Window(queries=20, duration_s=0.0),
}


class Page:
    """What a notebook was asked to show."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def update(self, page: str) -> None:
        """Show something in place of what was there."""
        self.shown.append(page)


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Page:
    """Pretend that this runs in a notebook's kernel."""
    page = Page()

    def display(html: str, display_id: bool) -> Page:
        page.update(html)
        return page

    fake, shown = types.ModuleType("IPython"), types.ModuleType("IPython.display")
    fake.get_ipython = lambda: types.SimpleNamespace(kernel=True)  # type: ignore[attr-defined]
    shown.HTML, shown.display = str, display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", fake)
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    return page


def tuned(**words: Any) -> None:
    """Tune a fake device."""
    device = FakeDevice()
    polythrottle.tune(device, FakeWorkload(device), **WORDS, **words)


def test_a_script_stays_silent(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a terminal nor a notebook: nothing on either stream, unless progress is asked for."""
    tuned()
    assert capsys.readouterr() == ("", "")
    tuned(progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "trial 0" in err


def test_a_terminal_shows_progress_unless_told_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watcher of one's own takes its place."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with study_progress(None, None, str) as shown:
        assert isinstance(shown, LiveStudy)
    with study_progress(False, None, str) as shown:
        assert isinstance(shown, NoProgress)
    own = NoProgress()
    with study_progress(None, own, str) as shown:
        assert shown is own
    monkeypatch.setattr(sys, "stderr", None)
    with study_progress(None, None, str) as shown:
        assert isinstance(shown, NoProgress)


def test_an_interrupted_study_says_in_python_how_it_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """With the function that does it, or with the same objects."""
    device = FakeDevice()
    with pytest.raises(KeyboardInterrupt):
        polythrottle.tune(device, FakeWorkload(device, KeyboardInterrupt(), 30), **WORDS, progress=True)
    assert "call polythrottle.tune() again with the same objects" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("after", [0, 30])
def test_a_device_that_goes_away_leaves_the_words_that_go_on(after: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Once a trial has been measured: before that there is nothing to go on with."""
    device = FakeDevice()
    with pytest.raises(DeviceError):
        polythrottle.tune(device, FakeWorkload(device, DeviceError("it is gone"), after), **WORDS, progress=True)
    said = " ".join(capsys.readouterr().err.split())
    assert ("call polythrottle.tune() again with the same objects" in said) == (after > 0)


def test_a_notebook_shows_trials_and_a_bar_in_one_cell(notebook: Page, capsys: pytest.CaptureFixture[str]) -> None:
    """What is shown is replaced as trials come, holds the newest of them, and needs IPython alone."""
    assert in_notebook()
    tuned()
    assert len(notebook.shown) > 2
    assert notebook.shown[-1].startswith("<pre")
    assert "2/2" in notebook.shown[-1]
    assert "1200" in notebook.shown[-1]
    seen = len(notebook.shown)
    tuned(progress=False, fresh=True)
    assert len(notebook.shown) == seen
    device = FakeDevice()
    polythrottle.sweep(device, FakeWorkload(device), Path("a.csv"), window=WORDS["window"])
    assert "12/12" in notebook.shown[-1]
    assert capsys.readouterr() == ("", "")
