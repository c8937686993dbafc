"""What comes from outside and is shown: it steers no terminal, forges no line of a log, and turns no words round."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from daemons import House
from http_over_socket import ask
from scripted import daemon

from polythrottle.actuation.server.main import main as actuator
from polythrottle.cli.output import complain
from polythrottle.daemon.web.messages import refused
from polythrottle.storage.untrusted import NEVER_SHOWN, printable
from polythrottle.workloads.foreign_calls import one_line

STEERS = "".join(
    map(chr, (*range(0x20), 0x7F, *range(0x80, 0xA0), 0x61C, 0x200E, 0x200F, 0x2028, 0x2029, 0x202E, 0x2066, 0x2069))
)
HOSTILE = f"a{STEERS}b"


def test_what_cannot_be_printed_becomes_a_blank() -> None:
    """One each; everything that people write stays."""
    assert printable(HOSTILE) == f"a{' ' * len(STEERS)}b"
    assert printable("é 水 · ≤ 5 °C – “x”") == "é 水 · ≤ 5 °C – “x”"


def test_a_byte_of_a_name_that_is_no_text_is_written_out() -> None:
    """Other surrogates stand for no byte, and become blanks."""
    assert printable("n\udcff\udce9.jsonl") == r"n\xff\xe9.jsonl"
    assert printable("a\ud800b\udc00c") == "a b c"


def test_an_error_is_one_line_whatever_it_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the command line, of the actuator, of the API, and of foreign code."""
    complain(HOSTILE)
    assert capsys.readouterr().err == "polythrottle: a b\n"
    assert actuator(["--device", "sim:jetson-nano", "--permits", "/nonexistent/\x9b31m\u202ex"]) == 4
    assert capsys.readouterr().err.rstrip("\n").isprintable()
    assert json.loads(bytes(refused(400, "InvalidInput", HOSTILE).body))["error"]["words"].isprintable()
    assert one_line(ValueError(HOSTILE)) == "ValueError: a b"


def test_an_event_is_one_line_whatever_it_quotes(tmp_path: Path) -> None:
    """As it is kept, shown and logged."""
    house = House(tmp_path / "daemon")
    house.runner.events.tell("workload", HOSTILE)
    assert house.desk.events()[-1].words.isprintable()


def test_words_that_turn_others_round_are_not_taken(tmp_path: Path) -> None:
    """A request with them is refused before the control loop hears of it."""
    with daemon(tmp_path / "d.sock") as (script, _):
        for each in STEERS:
            assert ask(tmp_path / "d.sock", "POST", "/v1/release", {"reason": f"a{each}b"})[0] == 422
        assert script.wishes == []
        assert ask(tmp_path / "d.sock", "POST", "/v1/release", {"reason": "Größe · 水"})[0] == 200


@pytest.mark.slow
def test_no_name_in_a_file_steers_the_terminal(tmp_path: Path) -> None:
    """Whatever prints it: the streams of the command line let none through."""
    code = "import sys, typer\nfrom polythrottle.cli import _keep_straight\n_keep_straight(sys.stdout)\n"
    says = f"print({HOSTILE[33:]!r}); typer.echo({HOSTILE[33:]!r}); sys.stdout.write({HOSTILE[33:]!r})"
    done = subprocess.run([sys.executable, "-c", code + says], capture_output=True, check=True, encoding="utf-8")
    assert not set(map(ord, done.stdout)) & set(NEVER_SHOWN)
    assert done.stdout.count("b") == 3
    command = [sys.executable, "-m", "polythrottle", "apply", "no\x9bsuch\u202eprofile", "--no-daemon"]
    told = subprocess.run(command, capture_output=True, check=False, encoding="utf-8", cwd=tmp_path)
    assert told.returncode == 3
    assert told.stderr.rstrip("\n").isprintable()
