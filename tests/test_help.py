"""Help pages: commands in groups, an example under each that works as printed, and what a bare group prints."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from polythrottle.cli.commands import app, run

ROOT = Path(__file__).resolve().parent.parent
GROUPS = ("daemon", "cluster", "finetune", "bench", "reproduce")
NOT_RUN = {
    "daemon run": "until Ctrl-C",
    "proxy": "until Ctrl-C",
    "reproduce llm": "needs recorded requests",
    "daemon demo": "until Ctrl-C",
    "daemon status": "needs a daemon",
    "daemon stop": "needs a daemon",
    "daemon budget": "needs a daemon",
    "study-host": "until Ctrl-C",
    "daemon install": "needs sh and install",
    "daemon uninstall": "needs a board over SSH",
    "cluster train": "starts processes",
    "cluster status": "needs a job",
    "cluster plan": "run by test_examples",
    "cluster simulate": "run by test_examples",
    "cluster predict": "loads scikit-learn for seconds",
    "finetune status": "needs a job",
    "finetune profile": "takes a minute",
    "finetune plan": "takes seconds",
    "finetune run": "takes seconds",
    "calibrate": "measures for a minute",
    "explain": "loads torch",
    "top": "needs a daemon",
    "reproduce polythrottle": "takes seconds",
    "reproduce scheduler": "takes seconds",
    "reproduce transient": "needs the published tables",
    "profile-model": "loads torch",
    "snapshot": "looks through the machine",
    "check": "measures 40 windows",
    "bench search": "starts processes",
    "demo": "run by its own test",
}


def pages() -> Iterator[tuple[str, Any]]:
    """Yield every command with the words that name it."""

    def below(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        for name, each in getattr(command, "commands", {}).items():
            yield " ".join((*words, name)), each
            yield from below(each, (*words, name))

    yield from below(typer.main.get_command(app), ())


def examples(command: Any) -> list[list[str]]:
    """Return the commands under a help page, each as the words behind ``polythrottle``."""
    text = (command.epilog or "").replace("\\\n", " ")
    return [shlex.split(line)[1:] for line in text.splitlines() if line.strip().startswith("polythrottle ")]


def test_help_is_grouped_and_fits_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands stand under headings, each summed up on one line that ends where its sentence does."""
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    headings = re.findall(r"^(\w.*):$", shown, re.M)
    assert headings[:3] == ["Options", "Begin here", "Tune and measure"]
    assert "Commands" not in headings
    assert "..." not in shown.partition("Begin here")[2]
    assert "--install-completion" in shown


@pytest.mark.slow
def test_every_command_has_an_example_in_its_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this very command, within 80 columns, and with a summary that is not cut off."""
    monkeypatch.setenv("COLUMNS", "80")
    for words, command in pages():
        if hasattr(command, "commands") or words == "daemon actuator":  # which prints the help of its own process
            continue
        assert any(" ".join(each).startswith(words) for each in examples(command)), words
        assert run([*words.split(), "--help"]) == 0
        shown = capsys.readouterr().out
        assert "Example" in shown
        assert max(map(len, shown.splitlines())) <= 80, words


@pytest.mark.parametrize("group", GROUPS)
def test_a_bare_group_prints_its_help(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With exit code 0, on standard output, and nothing besides."""
    assert run([group]) == 0
    shown = capsys.readouterr()
    assert "Commands:" in shown.out
    assert shown.err == ""


@pytest.mark.slow
def test_every_example_is_read(tmp_path: Path) -> None:
    """No example names an option or a command that is not there, or a file of a folder that is not shipped."""
    for words, command in pages():
        for each in examples(command):
            named = dict(pages())[" ".join(each[: 2 if each[0] in GROUPS else 1])]
            rest = each[2 if each[0] in GROUPS else 1 :]
            named.make_context(words, list(rest))
            for word in rest:
                assert not word.startswith("examples/") or (ROOT / word).is_file(), word


@pytest.mark.slow
def test_the_examples_run_one_after_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that one names is of the project, or was made by one before."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    every = {words: examples(command) for words, command in pages()}
    quick = ["tune", *(words for words in every if words not in NOT_RUN and words not in ("tune", "daemon actuator"))]
    for words in quick:
        for example in every[words]:
            fewer = ["--method", "random", "--trials", "4", "--no-presets"] if words == "tune" else []
            assert run([*example, *fewer]) == 0, (example, capsys.readouterr().err)


def test_completion_is_offered(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell that asks for the next word gets the commands."""
    monkeypatch.setenv("_POLYTHROTTLE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "polythrottle me")
    monkeypatch.setenv("COMP_CWORD", "1")
    with pytest.raises(SystemExit) as ended:
        typer.main.get_command(app).main(prog_name="polythrottle", args=[])
    assert ended.value.code == 0
    assert capsys.readouterr().out.split() == ["measure"]
