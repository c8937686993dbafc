"""A progress bar on standard error."""

import pytest
from rich.progress import TextColumn

from polythrottle.api.progress import LiveBar


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_is_drawn_on_a_terminal_alone(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Into a file or a pipe nothing is written."""
    monkeypatch.setenv("FORCE_COLOR", "1") if terminal else monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with LiveBar("weighing", TextColumn("{task.description}")):
        pass
    told = capsys.readouterr()
    assert told.out == ""
    assert ("weighing" in told.err) is terminal
