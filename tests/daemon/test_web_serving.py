"""The thread that serves the API, and its sockets."""

import http.client
import os
import socket
import stat
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from http_over_socket import ask
from scripted import FIRST, daemon

from polythrottle.daemon.commands import Take
from polythrottle.daemon.loop.mailbox import Mailbox
from polythrottle.daemon.web import Tcp, WebOptions, serve
from polythrottle.domain.errors import DeviceError, InvalidInput, StorageError


def web_threads() -> list[str]:
    """Return the names of the API's threads."""
    return [each.name for each in threading.enumerate() if each.name == "polythrottle-web"]


def test_nothing_is_left_after_close(tmp_path: Path) -> None:
    """No thread, no socket file, no open file; and closing again does nothing."""
    path = tmp_path / "run" / "d.sock"
    before = len(os.listdir("/proc/self/fd"))
    server = serve(Mailbox(), WebOptions(path))
    assert web_threads()
    assert ask(path, "GET", "/v1/status")[0] == 200
    server.close()
    server.close()
    assert (web_threads(), path.exists()) == ([], False)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_publishing_after_close_hurts_nobody(tmp_path: Path) -> None:
    """The control loop goes on without its API."""
    desk = Mailbox()
    serve(desk, WebOptions(tmp_path / "d.sock")).close()
    desk.publish(FIRST)
    desk.tell([])


@pytest.mark.parametrize("patience", [True, False])
def test_who_waits_while_it_closes_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, patience: bool
) -> None:
    """A wish that nobody will answer any more gets 503, also one that waits for something else; the log stays empty."""
    desk = Mailbox()
    path = tmp_path / "d.sock"
    waits = threading.Event()
    desk.on_wish(waits.set)
    server = serve(desk, WebOptions(path))
    if not patience:  # as one that waits for a disk would, it is cut off in the end
        monkeypatch.setattr(desk, "close", lambda: None)
        monkeypatch.setattr("polythrottle.daemon.web.server._GRACE_S", 0.05)
    found: list[int] = []

    def asking() -> None:
        with suppress(OSError, http.client.HTTPException):
            found.append(ask(path, "POST", "/v1/report", {"arrived": 3})[0])

    asker = threading.Thread(target=asking)
    asker.start()
    assert waits.wait(timeout=30)
    server.close()
    asker.join()
    assert found == [503] * patience
    assert caplog.records == []
    if patience:
        with pytest.raises(DeviceError, match="the daemon ends"):
            desk.ask(Take())


def test_a_dead_daemons_socket_is_replaced(tmp_path: Path) -> None:
    """A file nobody listens at does not keep the next daemon from starting."""
    path = tmp_path / "d.sock"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    with daemon(path):
        assert ask(path, "GET", "/v1/status")[0] == 200


def test_a_living_daemons_socket_is_left_alone(tmp_path: Path) -> None:
    """The second is refused, and the first still answers."""
    path = tmp_path / "d.sock"
    with daemon(path):
        with pytest.raises(DeviceError, match="another daemon answers at"):
            serve(Mailbox(), WebOptions(path))
        assert ask(path, "GET", "/v1/status")[0] == 200


def test_what_is_no_socket_is_not_replaced(tmp_path: Path) -> None:
    """Somebody's file stays."""
    path = tmp_path / "d.sock"
    path.write_text("mine")
    with pytest.raises(StorageError, match="no socket"):
        serve(Mailbox(), WebOptions(path))
    assert path.read_text() == "mine"


def test_a_socket_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    """A path too long, a file where a folder should be, an unknown group, a port in use."""
    with pytest.raises(InvalidInput, match="at most 107 bytes"):
        serve(Mailbox(), WebOptions(tmp_path / ("x" * 120)))
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be made"):
        serve(Mailbox(), WebOptions(tmp_path / "file" / "d.sock"))
    with pytest.raises(InvalidInput, match="there is no group"):
        serve(Mailbox(), WebOptions(tmp_path / "d.sock", readers=("no-such-group",)))
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    token.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        tcp = Tcp("127.0.0.1", taken.getsockname()[1], token_file=token)
        with pytest.raises(InvalidInput, match="cannot be listened on"):
            serve(Mailbox(), WebOptions(tmp_path / "d.sock", tcp=tcp))
    assert not (tmp_path / "d.sock").exists()
    assert web_threads() == []


def test_the_socket_is_the_owners_alone_unless_a_group_is_let_in(tmp_path: Path) -> None:
    """0600 without groups, 0660 with one, and with several the door decides."""
    path = tmp_path / "d.sock"
    own = str(os.getgid())
    for readers, writers, mode in (((), (), 0o600), ((own,), (own,), 0o660), ((own,), ("64999",), 0o666)):

        def grouped(
            options: WebOptions, readers: tuple[str, ...] = readers, writers: tuple[str, ...] = writers
        ) -> WebOptions:
            return replace(options, readers=readers, writers=writers)

        with daemon(path, grouped):
            assert stat.S_IMODE(path.stat().st_mode) == mode


def test_serving_loads_neither_numpy_nor_torch(tmp_path: Path) -> None:
    """Not even when everything has been asked for once."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path; from scripted import daemon; from polythrottle.daemon.client import Client\n"
        "with daemon(Path(sys.argv[1])):\n"
        "    c = Client(Path(sys.argv[1])); c.status(); c.profiles(); c.seconds(); c.history(); c.take()\n"
        "    c.apply('sim/bert')\n"
        "print([m for m in ('numpy', 'torch', 'pandas', 'jinja2', 'httptools', 'uvloop') if m in sys.modules])"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "d.sock"), str(Path(__file__).parents[1])]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
