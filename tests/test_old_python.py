"""What runs on a board as its daemon is held to Python 3.8, which JetPack 5 has."""

import io
import zipfile
from pathlib import Path

import pytest
from boards_over_ssh import own_wheels
from old_python import closure, newer_than_3_8, too_new

from polythrottle.backends.ssh import packed
from polythrottle.board.installation import packed_daemon
from polythrottle.training.beside.far_run import carried

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


def test_what_runs_on_a_board_is_no_newer_than_python_3_8(tmp_path: Path) -> None:
    """Neither vermin nor the syntax tree of a module finds anything in what is carried, and in all a daemon may import.

    Most of them are carried thrice, and vermin takes seconds for so many files: each is looked at once.
    """
    daemon = closure(ENTRIES, LEFT_OUT)
    daemon.pop("polythrottle")  # on a board nothing stands in it
    assert len(daemon) > 130
    texts = {path.read_bytes(): name for name, path in daemon.items()}
    for archive, ours in ((packed(), ""), (carried(), ""), (packed_daemon(own_wheels()), "polythrottle/")):
        held = zipfile.ZipFile(io.BytesIO(archive.whole))
        names = [name for name in held.namelist() if name.endswith(".py") and name.startswith(ours)]
        assert len(names) > 80
        texts.update({held.read(name): name for name in names})
    for number, (text, name) in enumerate(texts.items()):
        (tmp_path / f"{name.removesuffix('.py').replace('/', '.')}-{number}.py").write_bytes(text)
    assert newer_than_3_8([tmp_path]) == ""
    found = {name: [*too_new(text.decode())] for text, name in texts.items() if _ours(name)}
    assert {name: lines for name, lines in found.items() if lines} == {}


def _ours(name: str) -> bool:
    """Return whether a module or a file is the project's own; packages that are carried besides write as they like."""
    return name.startswith("polythrottle")


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
