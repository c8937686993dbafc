"""What runs on a board as its daemon is held to Python 3.8, which JetPack 5 has."""

import pytest
from old_python import closure, newer_than_3_8, too_new

ENTRIES = (
    "polythrottle.cli.daemon_process",
    "polythrottle.actuation.server.__main__",
    "polythrottle.actuation.restore",
)
LEFT_OUT = (
    "polythrottle.__init__",
    "polythrottle.api",
    "polythrottle.backends.replay",
    "polythrottle.backends.simulated",
    "polythrottle.backends.ssh",
    "polythrottle.board",
    "polythrottle.cli.commands",
    "polythrottle.cli.output",
    "polythrottle.daemon.pods.kubernetes",
    "polythrottle.daemon.pods.residents",
    "polythrottle.daemon.traffic.simulated",
    "polythrottle.storage.arrival_trace",
)
"""What simulates, measures or reaches elsewhere: it is imported where it is asked for, and no board's daemon does."""


def test_what_a_boards_daemon_imports_is_no_newer_than_python_3_8() -> None:
    """Neither vermin nor the syntax tree of a module finds anything, in every module that may come to be imported."""
    files = closure(ENTRIES, LEFT_OUT)
    files.pop("polythrottle")  # on a board nothing stands in it
    assert len(files) > 130
    assert newer_than_3_8(files.values()) == ""
    found = {name: [*too_new(path.read_text())] for name, path in files.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "text",
    [
        "Told = Callable[[str], None]\nfrom collections.abc import Callable",
        "isinstance(value, int | float)",
        "Event = Began | Ended",
        "Event = Began | Ended | None",
        "'a.toml'.removesuffix('.toml')",
        "def f(x: int | None): ...",
    ],
)
def test_what_is_too_new_is_met(text: str) -> None:
    """Unions and generics that are evaluated, methods that came later, annotations that are not left for later."""
    assert [*too_new(text)]
