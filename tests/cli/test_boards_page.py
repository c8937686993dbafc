"""The page of many boards: what it shows, to whom, and that its readers have no board looked at."""

import http.client
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from boards_over_ssh import await_that

from polythrottle.backends.device_uri import boards_named
from polythrottle.catalog.tuned_profiles import newest_for, read_profile, write_profile
from polythrottle.cli.boards import _document, _figures
from polythrottle.cli.commands import run
from polythrottle.daemon.web import Tcp
from polythrottle.daemon.web.boards_page import BoardsServer, Look
from polythrottle.domain.errors import InvalidInput
from polythrottle.inspect.examination import BoardState, BoardWatch

TOKEN = "0123456789abcdef-secret"
TUNED = Path(__file__).resolve().parents[2] / "examples/orin-efficientnet-b4.toml"
FLEET = "sim:jetson-nano\n[kitchen]\nsim:jetson-agx-orin?seed=1\nsim:jetson-agx-orin?seed=2\n"


def looked_at(*others: BoardState, **groups: str) -> Look:
    """Return a look at two simulated boards, one of which is warm, and at others."""
    watch = BoardWatch(["sim:jetson-nano", "sim:jetson-tx2"])
    nano, tx2 = watch.look()
    watch.close()
    hot = replace(tx2, throttled=True, temperature_c=97.0, stands=("board: profile <b>cmd:x</b> stands",))
    states = (nano, hot, *others)
    shown = (states, {state.uri: groups.get(state.uri.partition(":")[0], "") for state in states})
    return Look(_document(shown), _figures(shown), "14:03:22", 3.0)


def ask(port: int, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
    """Return status, headers and body of an answer."""
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        line.request(method, path, headers={name.replace("_", "-"): text for name, text in headers.items()})
        reply = line.getresponse()
        return reply.status, {name.lower(): text for name, text in reply.getheaders()}, reply.read().decode()
    finally:
        line.close()


@pytest.fixture
def server() -> Iterator[BoardsServer]:
    """Serve to everybody on this machine."""
    with BoardsServer(Tcp("127.0.0.1", 0, for_all=True)) as made:
        yield made


def test_the_page_is_whole_without_a_script(server: BoardsServer) -> None:
    """Every board with its figures, kinds, groups, why one is not reached; what boards say is no markup."""
    lost = BoardState("ssh://<script>alert(1)</script>", failure="ssh://<script>: no route to host")
    server.publish(looked_at(lost, ssh="kitchen"))
    status, headers, body = ask(server.port)
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    text = unescape(re.sub(r"<[^>]*>", " ", body[body.index("<header>") : body.index("<footer>")]))
    for words in ("3 boards", "2 kinds", "2 of 3", "97.0 °C", "throttled", "sim:jetson-nano", "No profile is tuned"):
        assert words in text
    assert "power of 2 boards simulated" in text
    assert "profile <b>cmd:x</b> stands" in text
    assert "no route to host" in text
    assert "<script>alert" not in body
    assert "kitchen" in text
    assert body.count("<script>") == 1
    assert "unsafe" not in headers["content-security-policy"]
    assert "default-src 'none'" in headers["content-security-policy"]
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", body)


def test_before_the_first_look_nothing_is_claimed(server: BoardsServer) -> None:
    """A board that has not answered yet is neither reached nor lost, on the page and in the figures."""
    shown = ((BoardState("ssh://a"), BoardState("ssh://b", failure="gone")), {"ssh://a": "", "ssh://b": ""})
    server.publish(Look(_document(shown), _figures(shown)))
    body = ask(server.port)[2]
    assert "0 of 2" in body
    assert "1 not reached, 1 not looked at yet" in body
    figures = ask(server.port, "/metrics")[2]
    assert 'polythrottle_board_up{board="ssh://b"} 0' in figures
    assert "ssh://a" not in figures


def test_document_and_figures_are_those_of_the_command(server: BoardsServer) -> None:
    """Both at one look, never kept by a browser."""
    look = looked_at()
    server.publish(look)
    status, headers, body = ask(server.port, "/boards.json")
    assert json.loads(body) == {"at": "14:03:22", "every_s": 3.0, **look.document}
    assert (status, headers["content-type"], headers["cache-control"]) == (200, "application/json", "no-store")
    status, headers, body = ask(server.port, "/metrics")
    assert (status, body) == (200, look.figures)
    assert headers["content-type"].startswith("text/plain; version=0.0.4")


def test_a_foreign_name_is_refused_and_nothing_can_be_changed(server: BoardsServer) -> None:
    """A page from elsewhere that was given this address by its name reads nothing (DNS rebinding)."""
    assert ask(server.port, Host="evil.example")[0] == 421
    assert ask(server.port, Host=f"127.0.0.1:{server.port}")[0] == 200
    assert ask(server.port, method="POST")[0] == 403
    assert ask(server.port, "/nothing")[0] == 404
    assert ask(server.port, "/metrics/")[0] == 404
    assert ask(server.port, method="HEAD")[2] == ""
    assert ask(server.port, "/" + "x" * 20_000)[0] in (400, 431)


def test_with_a_token_the_open_page_tells_nothing(tmp_path: Path) -> None:
    """It is the shell that asks for the token; all else answers 401 without it."""
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    with BoardsServer(Tcp("127.0.0.1", 0, token_file=path, for_all=True)) as server:
        server.publish(looked_at())
        status, _, body = ask(server.port)
        assert (status, "jetson" in body.partition("<script>")[0]) == (200, False)
        assert "JavaScript" in body
        for where in ("/boards.html", "/boards.json", "/metrics"):
            assert ask(server.port, where)[0] == 401
            assert ask(server.port, where, Authorization="Bearer wrong-wrong-wrong-wrong")[0] == 401
            status, _, body = ask(server.port, where, Authorization=f"Bearer {TOKEN}")
            assert (status, "sim:jetson-nano" in body) == (200, True)


@pytest.mark.tools("openssl")
def test_over_tls(tmp_path: Path) -> None:
    """With a certificate it answers over TLS alone."""
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*made, "-keyout", tmp_path / "k", "-out", tmp_path / "c"], capture_output=True, check=True)
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    with BoardsServer(Tcp("0.0.0.0", 0, tmp_path / "c", tmp_path / "k", token, for_all=True)) as server:
        trusting = ssl.create_default_context(cafile=str(tmp_path / "c"))
        trusting.check_hostname = False
        line = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=10, context=trusting)
        line.request("GET", "/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
        assert line.getresponse().status == 200
        line.close()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--serve 0.0.0.0:8090", "0.0.0.0 can be reached from elsewhere: it needs both TLS and --token-file"),
        ("--serve desk.example:8090", "desk.example can be reached from elsewhere"),
        ("--serve 0.0.0.0:8090 --token-file t", "it needs both TLS and --token-file"),
        ("--serve 127.0.0.1", "--serve takes HOST:PORT such as 127.0.0.1:8080, not '127.0.0.1'"),
        ("--serve 99999", "--serve takes HOST:PORT"),
        ("--serve ::1:8090", "--serve ::1:8090: an IPv6 address stands in brackets"),
        ("--serve 0 --json", "--json, --prometheus and --serve exclude each other"),
        ("--token-file t", "--token-file, --tls-cert and --tls-key go with --serve"),
        ("--serve 0 --tls-cert c", "TLS needs both --tls-cert and --tls-key"),
        ("--serve 0 --watch 0", "--watch 0 is no number of seconds"),
    ],
)
def test_a_door_that_is_too_wide_or_none_is_refused(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With exit code 2, before any board is asked."""
    assert run(["boards", "sim:jetson-nano", *words.split()]) == 2
    assert says in capsys.readouterr().err


def test_a_port_that_is_taken_is_told(server: BoardsServer, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line that names the option."""
    assert run(["boards", "sim:jetson-nano", "--serve", str(server.port)]) == 2
    assert f"--serve 127.0.0.1:{server.port} cannot be listened on" in capsys.readouterr().err
    with pytest.raises(InvalidInput):
        BoardsServer(Tcp("127.0.0.1", server.port, for_all=True))


@pytest.mark.slow
def test_the_command_serves_one_watchers_looks_until_it_is_ended(tmp_path: Path) -> None:
    """Sixty requests at once have no board looked at more often; Ctrl-C ends it with the usual code."""
    (tmp_path / "fleet.txt").write_text(FLEET)
    words = [sys.executable, "-m", "polythrottle", "boards", "@fleet.txt", "--serve", "0", "--watch", "1"]
    child = subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stderr is not None
        first = child.stderr.readline()
        port = int(re.search(r"http://127.0.0.1:(\d+)/ shows 3 boards, looked at every 1 s", first)[1])  # type: ignore[index]
        await_that(lambda: "3 of 3" in ask(port)[2], "the boards are not looked at")
        with ThreadPoolExecutor(20) as many:
            began_s = time.monotonic()
            ats = {json.loads(each[2])["at"] for each in many.map(lambda _: ask(port, "/boards.json"), range(60))}
            took_s = time.monotonic() - began_s
        assert len(ats) <= took_s + 2
        found = json.loads(ask(port, "/boards.json")[2])
        assert [board["group"] for board in found["boards"]] == [None, "kitchen", "kitchen"]
        assert 'group="kitchen"' in ask(port, "/metrics")[2]
        child.send_signal(signal.SIGINT)
        assert child.wait(20) == 130
        assert "Traceback" not in child.stderr.read()
    finally:
        child.kill()
        child.wait()
        assert child.stderr is not None
        child.stderr.close()


def test_a_board_that_hangs_keeps_nobody_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the others answer is on the page while one still owes its answer."""
    from polythrottle.cli import boards as command
    from polythrottle.daemon.web import boards_page

    over = threading.Event()
    published: list[dict[str, Any]] = []
    look = BoardWatch.look

    def slow(watch: BoardWatch, heard: Any) -> Any:
        states = look(watch, heard)
        time.sleep(1.1)
        heard(states[0])
        over.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(BoardWatch, "look", slow)
    monkeypatch.setattr(boards_page.BoardsServer, "publish", lambda self, each: published.append(dict(each.document)))
    assert run(["boards", "sim:jetson-nano,sim:jetson-tx2", "--serve", "0"]) == 130
    assert over.is_set()
    assert [len(each["kinds"]) for each in published] == [0, 2]
    assert command._SERVED_EVERY_S == 5.0
    capsys.readouterr()


def test_the_newest_profile_for_a_kind_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its file, and never one for other hardware; a file that is none is passed over."""
    state = tmp_path / "state"
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", str(state))
    monkeypatch.chdir(tmp_path)
    profile = read_profile(TUNED)
    folder = state / "profiles/tuned/orin"
    for number, name in enumerate(("older", "newer")):
        write_profile(profile, folder / f"{name}.toml")
        os.utime(folder / f"{name}.toml", (1_700_000_000 + number,) * 2)
    (folder / "broken.toml").write_text("[")
    kind = {"board": "sim:jetson-agx-orin"}
    pair = newest_for(kind)
    assert pair is not None
    assert pair[0] == "orin/newer"
    assert newest_for({"board": "sim:jetson-nano"}) is None
    write_profile(profile, folder / "older.toml")
    assert newest_for(kind)[0] == "orin/older"  # type: ignore[index]
    assert run(["boards", "sim:jetson-agx-orin,sim:jetson-nano"]) == 0
    shown = capsys.readouterr().out
    assert "newest profile orin/older; one for its workload stands on 0 of 1 board" in " ".join(shown.split())
    assert run(["boards", "sim:jetson-agx-orin,sim:jetson-nano", "--json"]) == 0
    orin, nano = json.loads(capsys.readouterr().out)["kinds"]
    assert (orin["profile"]["name"], nano["profile"]) == ("orin/older", None)
    held = BoardState("a", stands=(f"jetson: profile {profile.workload} stands since noon (3 controls)",))
    assert held.holds(profile.workload)
    assert not held.holds(profile.workload[:-1])


def test_groups_stand_in_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Boards of one group together, in 80 columns."""
    path = tmp_path / "fleet.txt"
    path.write_text("[b]\nsim:jetson-nano?seed=1\n[a]\nsim:jetson-nano?seed=2\n[b]\nsim:jetson-nano?seed=3\n")
    assert [board.group for board in boards_named(f"@{path}")] == ["b", "b", "a"]
    assert run(["boards", f"@{path}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[1] for line in lines if line.startswith("sim:")] == ["b", "b", "a"]
