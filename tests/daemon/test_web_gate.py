"""Who may ask the daemon, from where, and what a foreign web page may not."""

import grp
import http.client
import os
import socket
import ssl
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from http_over_socket import ask
from scripted import Script, daemon

from polythrottle.daemon.client import Client
from polythrottle.daemon.loop.mailbox import Mailbox
from polythrottle.daemon.web import ApiServer, Tcp, WebOptions, own_page, serve
from polythrottle.daemon.web.access import AccessControl, Role, Visitor
from polythrottle.domain.errors import BadFile, DeviceError, InvalidInput, PermissionDenied, StorageError
from polythrottle.storage.untrusted import is_loopback

TOKEN = "0123456789abcdef-secret"

ASK_AS = """
import os, socket, sys
path, uid, groups, method = sys.argv[1], int(sys.argv[2]), [int(g) for g in sys.argv[3].split(",") if g], sys.argv[4]
os.setgroups(groups); os.setgid(uid); os.setuid(uid)
line = socket.socket(socket.AF_UNIX)
try:
    line.connect(path)
except PermissionError:
    print("closed"); sys.exit()
head = f"{method} HTTP/1.1\\r\\nHost: x\\r\\nContent-Type: application/json\\r\\nContent-Length: 2"
line.sendall(f"{head}\\r\\n\\r\\n{{}}".encode())
print(line.recv(4096).split()[1].decode())
"""


@pytest.fixture
def token(tmp_path: Path) -> Path:
    """Return a file with a token nobody else may read."""
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def over_tcp(tmp_path: Path, token: Path) -> Iterator[tuple[Script, ApiServer, int]]:
    """Return a scripted daemon on TCP with a token, and its port."""
    tcp = Tcp("127.0.0.1", 0, token_file=token)
    with daemon(tmp_path / "d.sock", lambda options: replace(options, tcp=tcp)) as (script, server):
        assert server.port is not None
        yield script, server, server.port


def get(port: int, path: str = "/v1/status", method: str = "GET", **headers: str) -> int:
    """Return the status of an answer over TCP."""
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    line.request(method, path, headers={name.replace("_", "-"): text for name, text in headers.items()})
    status = line.getresponse().status
    line.close()
    return status


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Return a folder every user may enter, as pytest's own are not."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def as_user(path: Path, uid: int, groups: tuple[int, ...], method: str) -> str:
    """Return what another user is answered."""
    if os.geteuid() != 0:
        pytest.skip("only root can ask as another user")
    words = [sys.executable, "-c", ASK_AS, str(path), str(uid), ",".join(map(str, groups)), method]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def test_users_are_judged_by_their_groups(open_folder: Path) -> None:
    """A writer may change, a reader look, anybody else nothing; further groups count as the first does."""
    path = open_folder / "d.sock"

    def grouped(options: WebOptions) -> WebOptions:
        return replace(options, readers=("60001",), writers=("60002",))

    with daemon(path, grouped) as (script, _):
        assert as_user(path, 65534, (60002,), "POST /v1/take") == "200"
        assert as_user(path, 65534, (60001,), "POST /v1/take") == "403"
        assert as_user(path, 65534, (60001,), "GET /v1/status") == "200"
        assert as_user(path, 60001, (), "GET /v1/status") == "200"
        assert as_user(path, 65534, (60003,), "GET /v1/status") == "403"
        assert as_user(path, 65534, (), "POST /v1/stop") == "403"
        assert len(script.wishes) == 1


def test_a_socket_without_groups_is_closed_to_others(open_folder: Path) -> None:
    """The kernel itself refuses, and with one group lets that one in."""
    path = open_folder / "d.sock"
    with daemon(path):
        assert as_user(path, 65534, (60001,), "GET /v1/status") == "closed"
    with daemon(path, lambda options: replace(options, writers=("60001",))):
        assert as_user(path, 65534, (60001,), "POST /v1/take") == "200"
        assert as_user(path, 65534, (60002,), "POST /v1/take") == "closed"


def test_roles_follow_from_groups() -> None:
    """Root and the own user may everything."""
    door = AccessControl(frozenset({1}), frozenset({2}))
    assert door.judged(0, frozenset()) == Visitor(Role.CONTROL, trusted=True)
    assert door.judged(os.geteuid(), frozenset()) == Visitor(Role.CONTROL, trusted=True)
    stranger = os.geteuid() + 1
    assert door.judged(stranger, frozenset({1, 2})).role is Role.CONTROL
    assert door.judged(stranger, frozenset({1})).role is Role.READ
    assert door.judged(stranger, frozenset({3})).role is Role.NOTHING


def test_a_group_may_be_named_or_numbered() -> None:
    """One that is not there is an error, for it would let in nobody."""
    name = grp.getgrgid(os.getgid()).gr_name
    assert AccessControl.of((name,), ("77",)) == AccessControl(frozenset({os.getgid()}), frozenset({77}))


def test_a_refused_peer_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking and changing are refused alike, and strangers take nobody's place."""
    monkeypatch.setattr(AccessControl, "admitted", lambda self, connection: Visitor(Role.NOTHING))
    with daemon(tmp_path / "d.sock") as (script, server):
        status, answer, headers = ask(tmp_path / "d.sock", "GET", "/v1/status")
        assert (status, answer["error"]["kind"], headers["connection"]) == (403, "PermissionDenied", "close")
        assert ask(tmp_path / "d.sock", "POST", "/v1/stop", {})[0] == 403
        assert script.wishes == []
    assert server._house.strangers == 0


def test_tcp_asks_for_the_token(over_tcp: tuple[Script, ApiServer, int]) -> None:
    """Without it, with another, or with another scheme it is 401; with it all may be done."""
    script, _, port = over_tcp
    assert get(port) == 401
    assert get(port, Authorization="Bearer " + TOKEN[:-1]) == 401
    assert get(port, Authorization="Bearer é") == 401
    assert get(port, Authorization="Basic " + TOKEN) == 401
    assert get(port, Authorization="bearer " + TOKEN) == 200
    with Client(url=f"http://127.0.0.1:{port}", token=TOKEN) as client:
        client.take()
    assert len(script.wishes) == 1


def test_the_page_itself_needs_no_token(over_tcp: tuple[Script, ApiServer, int]) -> None:
    """It tells nothing, and asks for the token."""
    assert get(over_tcp[2], "/") == 200
    assert get(over_tcp[2], "/openapi.json") == 401


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "[::1].evil", ""])
def test_a_name_that_is_not_this_machines_is_refused(over_tcp: tuple[Script, ApiServer, int], host: str) -> None:
    """A foreign page whose name was bound to this address gets nothing, token or not."""
    port = over_tcp[2]
    assert get(port, "/", Host=host) == 421
    assert get(port, Host=host, Authorization=f"Bearer {TOKEN}") == 421


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:80", "[::1]:80", "192.168.0.7"])
def test_addresses_and_the_own_name_are_taken(over_tcp: tuple[Script, ApiServer, int], host: str) -> None:
    """An address cannot be bound to another."""
    assert get(over_tcp[2], Host=host, Authorization=f"Bearer {TOKEN}") == 200


def test_nothing_is_shared_with_other_origins(tmp_path: Path) -> None:
    """No answer has a header of CORS, and a preflight is refused."""
    with daemon(tmp_path / "d.sock"):
        status, _, headers = ask(tmp_path / "d.sock", "OPTIONS", "/v1/stop", None, Origin="https://evil.example")
        assert status == 405
        assert not [name for name in headers if name.startswith("access-control")]


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a certificate for 127.0.0.1 and its key."""
    folder = tmp_path_factory.mktemp("tls")
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run([*command, "-days", "2", *names, *files], check=True, capture_output=True)
    return folder / "cert.pem", folder / "key.pem"


@pytest.mark.tools("openssl")
def test_tls_with_a_token_may_do_all(tmp_path: Path, token: Path, certificate: tuple[Path, Path]) -> None:
    """A client that trusts the certificate gets through, another does not."""
    tcp = Tcp("127.0.0.1", 0, *certificate, token)
    with daemon(tmp_path / "d.sock", lambda options: replace(options, tcp=tcp)) as (script, server):
        url = f"https://127.0.0.1:{server.port}"
        Client(url=url, token=TOKEN, authority=certificate[0]).take()
        with pytest.raises(DeviceError, match="not trusted"):
            Client(url=url, token=TOKEN).take()
        with pytest.raises(DeviceError):
            Client(url=f"http://127.0.0.1:{server.port}", token=TOKEN).take()
    assert len(script.wishes) == 1


@pytest.mark.tools("openssl")
def test_tls_without_a_token_may_only_look(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    """For any user of the machine could come that way."""
    tcp = Tcp("127.0.0.1", 0, *certificate)
    with daemon(tmp_path / "d.sock", lambda options: replace(options, tcp=tcp)) as (script, server):
        client = Client(url=f"https://127.0.0.1:{server.port}", authority=certificate[0])
        assert client.status().turn > 0
        with pytest.raises(PermissionDenied, match="look but change nothing"):
            client.stop()
    assert script.wishes == []


@pytest.mark.tools("openssl")
def test_old_tls_is_not_spoken(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    """1.2 is the least."""
    secured = Tcp("127.0.0.1", 0, *certificate).secured()
    assert secured is not None
    assert secured.minimum_version == ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(
    ("host", "tls", "guarded", "word"),
    [
        ("127.0.0.1", False, False, "needs TLS"),
        ("0.0.0.0", True, False, "both TLS and --token-file"),
        ("0.0.0.0", False, True, "both TLS and --token-file"),
        ("board.example", False, True, "both TLS and --token-file"),
        ("", False, True, "HOST:PORT"),
    ],
)
def test_too_little_protection_is_refused(host: str, tls: bool, guarded: bool, word: str, token: Path) -> None:
    """Off loopback both are needed, on it one of them."""
    files = (token, token) if tls else (None, None)
    with pytest.raises(InvalidInput, match=word):
        Tcp(host, 80, *files, token if guarded else None)


@pytest.mark.parametrize("text", ["127.0.0.1", "127.0.0.1:", ":80", "127.0.0.1:99999", "::1:80", "127.0.0.1:x", "1:²"])
def test_where_to_listen_is_read_strictly(text: str, token: Path) -> None:
    """A port is needed, and brackets around an IPv6 address."""
    with pytest.raises(InvalidInput, match="--tcp"):
        Tcp.parse(text, token_file=token)


def test_where_to_listen_is_read(token: Path) -> None:
    """Names, IPv4 and IPv6."""
    assert Tcp.parse("[::1]:8080", token_file=token) == Tcp("::1", 8080, token_file=token)
    assert Tcp.parse("localhost:0", token_file=token).host == "localhost"
    assert (is_loopback("127.8.8.8"), is_loopback("LocalHost"), is_loopback("localhost.evil")) == (True, True, False)


@pytest.mark.parametrize(
    ("text", "mode", "error", "word"),
    [
        (TOKEN, 0o644, PermissionDenied, "chmod 600"),
        ("short", 0o600, BadFile, "openssl rand"),
        ("", 0o600, BadFile, "holds no token"),
        ("two words that are long", 0o600, BadFile, "holds no token"),
        ("x" * 5000, 0o600, BadFile, "holds no token"),
        (None, 0, BadFile, "cannot be read"),
    ],
)
def test_a_token_that_is_none_or_known_is_refused(
    tmp_path: Path, text: str | None, mode: int, error: type[Exception], word: str
) -> None:
    """The daemon does not start."""
    path = tmp_path / "token"
    if text is not None:
        path.write_text(text)
        path.chmod(stat.S_IFREG | mode)
    with pytest.raises(error, match=word):
        serve(Mailbox(), WebOptions(tmp_path / "d.sock", tcp=Tcp("127.0.0.1", 0, token_file=path)))
    assert not (tmp_path / "d.sock").exists()


@pytest.mark.tools("openssl")
def test_a_certificate_that_is_none_is_refused(tmp_path: Path, token: Path, certificate: tuple[Path, Path]) -> None:
    """So are a key of another certificate, and one with a password, which nobody is there to type."""
    with pytest.raises(BadFile, match="no certificate and its key"):
        serve(Mailbox(), WebOptions(tmp_path / "d.sock", tcp=Tcp("127.0.0.1", 0, token, token)))
    locked = tmp_path / "locked.pem"
    command = ["openssl", "ec", "-in", str(certificate[1]), "-aes256", "-passout", "pass:secret", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(BadFile, match="password"):
        Tcp("127.0.0.1", 0, certificate[0], locked).secured()


def test_an_old_kernel_is_asked_for_the_users_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where SO_PEERGROUPS is missing, the user's groups of now count."""
    monkeypatch.setattr("polythrottle.actuation.server.unix_socket._PEERGROUPS", 9999)
    near, far = socket.socketpair()
    with near, far:
        assert AccessControl().admitted(near).trusted


@pytest.mark.tools("openssl")
def test_who_shakes_hands_for_ever_holds_up_neither_files_nor_the_socket(
    tmp_path: Path, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixteen may at once; they are cut off, and then others get through."""
    monkeypatch.setattr("polythrottle.daemon.web.server.SHAKE_S", 0.5)
    tcp = Tcp("127.0.0.1", 0, *certificate)
    with daemon(tmp_path / "d.sock", lambda options: replace(options, tcp=tcp)) as (_, server):
        before = len(os.listdir("/proc/self/fd"))
        mute = [socket.create_connection(("127.0.0.1", server.port or 0)) for _ in range(60)]
        assert len(os.listdir("/proc/self/fd")) <= before + len(mute) + 20
        assert ask(tmp_path / "d.sock", "GET", "/v1/status")[0] == 200
        for each in mute:
            each.settimeout(60)
        assert mute[0].recv(1) == b""
        for each in mute:
            each.close()
        client = Client(url=f"https://127.0.0.1:{server.port}", authority=certificate[0])
        assert client.status().turn > 0


@pytest.mark.tools("openssl")
def test_the_address_holds_the_token_behind_what_no_browser_sends(
    certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    """It is there if asked for, in the fragment, escaped; without, the address is the bare one."""
    path = tmp_path / "token"
    path.write_text("a/b#c?d%e&f=0123456789\n")
    path.chmod(0o600)
    tcp = Tcp("127.0.0.1", 0, token_file=path)
    assert tcp.address(8080) == "http://127.0.0.1:8080/"
    assert tcp.address(8080, token=True) == "http://127.0.0.1:8080/#token=a%2Fb%23c%3Fd%25e%26f%3D0123456789"
    assert Tcp("::1", 0, *certificate).address(443, token=True) == "https://[::1]:443/"
    assert Tcp("0.0.0.0", 0, *certificate, path).address(1) == f"https://{socket.gethostname()}:1/"


def test_a_page_of_ones_own_has_a_new_token_that_nobody_else_can_read(tmp_path: Path) -> None:
    """Each start makes another up; a link that somebody has laid there is replaced, not followed."""
    file, other = tmp_path / "page.token", tmp_path / "other"
    first = own_page(file).token()
    other.write_text("keep")
    file.unlink()
    file.symlink_to(other)
    page = own_page(file)
    assert page.token() not in (first, None)
    assert len(page.token() or b"") >= 32
    assert stat.S_IMODE(file.lstat().st_mode) == 0o600
    assert other.read_text() == "keep"
    assert (page.host, page.port) == ("127.0.0.1", 0)
    with pytest.raises(StorageError, match="--no-page"):
        own_page(tmp_path / "none" / "page.token")
