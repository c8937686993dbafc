"""What runs on a board while a desk is connected: an actuator over standard input and output, until that ends.

Started by `polythrottle.board.link`, from a folder of its own that goes with it. Lease, record and guard are those of
an actuator of the board itself: a desk that is killed, cut off or asleep does not renew its lease, and what it has set
is put back; should this process be killed, its guard puts it back. Its verbs besides those of
`polythrottle.actuation.wire`, each with a ``device`` or a ``token`` as there:

``hand_over`` {token, holder, seconds, confirmed_s} → ``name``. Leaves what is set in place, as by ``apply``.
``restore_all`` {name, force} → ``outcomes``. Puts back what stands on record here: one device by its URI, or all.
``confirm`` {name} → ``stands``. Lets stand what was applied by hand.
``examine`` {board} → ``machine``, ``others``, ``records``: findings of the machine and of what stands changed on it.
``files`` {device, names} → ``files``, ``links``, ``unread``: what a snapshot of the board needs.
``work`` {token, point, message} → what the process that runs workloads here (`polythrottle.board.work_host`) answers;
  a job. With a point that is set first, as by ``apply``; if it is refused, the message is not passed on.
"""

from __future__ import annotations

import base64
import fcntl
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from polythrottle.actuation.client.connection import TOKEN
from polythrottle.actuation.restore import concerned, standing
from polythrottle.actuation.server.permits import Permits
from polythrottle.actuation.server.request_handler import Check, Request, Service, request_from
from polythrottle.actuation.server.search_space_child import Job
from polythrottle.actuation.server.server import Server
from polythrottle.actuation.server.unix_socket import Peer, listen_at
from polythrottle.actuation.systemd import Supervisor
from polythrottle.actuation.wire import VERSION
from polythrottle.backends import DeviceURI, find_device
from polythrottle.backends.device_uri import check_far
from polythrottle.backends.served_devices import (
    all_restored,
    confirmed,
    on_record,
    open_served,
    served_uri,
    trust_roots,
    why_missing,
)
from polythrottle.board.work_host import WorkHost
from polythrottle.domain.errors import InvalidInput, PolythrottleError
from polythrottle.domain.ports import Finding, Lasting
from polythrottle.inspect.machine import System, machine_findings, others_steering, record_findings
from polythrottle.inspect.tree_files import collect
from polythrottle.storage.untrusted import printable

PREFIX = "polythrottle-board-"
_NAME = re.compile(rf"(?<=/){PREFIX}[^/:]+")
_LOCK = "lock"
_STAYS = "stays"
_LONGEST_PATH = 107
"""Bytes of a socket's path, beside the one that ends it (unix(7))."""
_OLD_S = 3600.0
_GONE_WITHIN_S = 3.0
"""How long to wait for guards whose lease is over; they look at it twice a second."""
_CHUNK = 65536
_LONGEST = 1000
_MOST_NAMES = 200
_MOST_FILES_BYTES = 2_500_000  # in one answer, as base64


def main(mark: str, folder: str, device: str) -> int:
    """Serve the desk at the other end of standard input and output; returns an exit code.

    Args:
        mark: What begins the lines before the channel.
        folder: Where this was unpacked.
        device: URI of the device that is served; what ``auto`` means if "".
    """
    with own_folder(Path(folder)):
        return _serve(mark, Path(folder), device)


@contextmanager
def own_folder(folder: Path) -> Iterator[None]:
    """Run from the folder in which this was unpacked, and remove it at the end.

    Args:
        folder: Which stays as long as a guard or a keeper runs from it.
    """
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    # Held for life: by it the next far side knows that this folder is in use.
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        _sweep(folder)
        yield
    finally:
        _leave(folder)


def device_here(device: str) -> str:
    """Return the URI of the device of this board that a desk means.

    Args:
        device: As the desk names it; what ``auto`` means if "".

    Raises:
        UnknownName: If there is none of that name anywhere.
        InvalidInput: If it is none of a board over SSH.
        PolythrottleError: If it means nothing, or nothing is here.
    """
    check_far(device)
    uri = find_device().uri if device in ("", "auto") else device
    scheme = DeviceURI.parse(uri).scheme
    if scheme == "sim":
        raise InvalidInput(f"{device} needs no board; it is simulated wherever it is named without ssh://")
    if scheme in ("ssh", "replay"):
        raise InvalidInput(f"{device} cannot be reached over SSH; jetson, nvml:<GPUs>, cpu and auto can")
    return uri


def _leave(own: Path) -> None:
    """Remove the folder this runs from, unless a guard or keeper does too, and those whose guards have gone."""
    ends_s = time.monotonic() + _GONE_WITHIN_S
    # Not Path.exists, which raises at the folder of another user.
    marked = {own.name, *(each.name for each in _folders() if os.path.exists(each / _STAYS))}
    # After a restore guards go by themselves: in a moment, which nobody at the desk waits for.
    while not _stands() and marked & _in_use() and time.monotonic() < ends_s:
        time.sleep(0.1)
    if own.name not in _in_use():
        shutil.rmtree(own, ignore_errors=True)
    else:
        with suppress(OSError):
            (own / _STAYS).touch()
    _sweep(own)


def _stands() -> bool:
    """Say whether a profile stands here; also where nobody can tell."""
    try:
        return any(each.lease.applied for each in standing())
    except PolythrottleError:
        return True


def _folders() -> Sequence[Path]:
    return [*Path(tempfile.gettempdir()).glob(f"{PREFIX}*")]


def _in_use() -> Set[str]:
    """Return the names of the folders that guards and keepers run from: each was started with one as PYTHONPATH."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # one that has just ended, or is another user's, whose folders are left alone
            for word in (process / "environ").read_bytes().split(b"\0"):
                if word.startswith(b"PYTHONPATH="):
                    found.update(_NAME.findall(os.fsdecode(word)))
    return found


def _sweep(own: Path) -> None:
    """Remove the folders that far sides which were killed, or profiles which stand no longer, have left here."""
    for each in _folders():
        with suppress(OSError):
            about = each.lstat()
            # Anybody may make a folder, or lay a link, of such a name there. A new one may be about to be locked.
            young = time.time() - about.st_mtime < _OLD_S and not os.path.exists(each / _STAYS)
            if each == own or young or about.st_uid != os.geteuid():
                continue
            handle = os.open(each / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if each.name not in _in_use():
                    shutil.rmtree(each, ignore_errors=True)
            finally:
                os.close(handle)


def _serve(mark: str, folder: Path, device: str) -> int:
    os.environ.setdefault("HOME", "/")
    # When the connection ends, standard input ends with it, and then everything is put back in order.
    for number in (signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    try:
        uri = device_here(device)
        # What an actuator serves is opened by its own rules, and set by whoever it is lent to.
        if DeviceURI.parse(uri).scheme != "actuator":
            uri = served_uri(uri)
        why_missing(uri)
        path = folder / "far.sock"
        if len(os.fsencode(path)) > _LONGEST_PATH:
            # The folder by its descriptor, which stays open for life: a name of few bytes wherever the folder lies.
            path = Path(f"/proc/{os.getpid()}/fd/{os.open(folder, os.O_RDONLY | os.O_DIRECTORY)}/far.sock")
        listener = listen_at(path, 8, lambda made: None)
        service = FarService(uri, path)
        for text in service.start():
            _say(f"left from before: {text}")
    except (PolythrottleError, OSError) as err:
        tell(mark, f"fault {err}")
        return 1
    server = Server(listener, service, Supervisor())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    signal.set_wakeup_fd(server.waker, warn_on_full_buffer=False)
    tell(mark, "ready")
    _Relay(path, server).start()
    left: Sequence[str] = ()
    try:
        server.run()
    finally:
        left = service.close()
        for text in left:
            _say(f"not as it was found: {text}")
        server.close()
    if left:
        return 1
    return 0


def tell(mark: str, words: str) -> None:
    """Tell the desk, before the channel begins, how it stands here.

    Args:
        mark: What begins such lines.
        words: ``ready``, or ``fault`` and why.
    """
    with suppress(OSError):
        os.write(1, f"{mark} {printable(words)}\n".encode("utf-8", "replace"))


def _say(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"polythrottle: {printable(text)}\n".encode("utf-8", "replace"))


class _Relay:
    """Standard input and output as a connection to this process's own socket; its end is the server's.

    Args:
        path: Of the socket.
        server: Which listens there.
    """

    def __init__(self, path: Path, server: Server) -> None:
        self._server = server
        self._way = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._way.connect(os.fspath(path))

    def start(self) -> None:
        """Begin; the process may end while both directions still wait."""
        for work in (self._inward, self._outward):
            threading.Thread(target=work, name="polythrottle-relay", daemon=True).start()

    def _inward(self) -> None:
        with suppress(OSError):
            while part := os.read(0, _CHUNK):
                self._way.sendall(part)
        self._server.stop()

    def _outward(self) -> None:
        with suppress(OSError):
            while part := self._way.recv(_CHUNK):
                left = memoryview(part)
                while left:
                    left = left[os.write(1, left) :]
        self._server.stop()  # the desk is silent for too long, or gone


def _seconds(name: str, value: Any) -> None:
    if value is not None and (type(value) not in (int, float) or not 0 < value < 1e9):
        raise InvalidInput(f"{name} must be a number above 0, or nothing")


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str) or len(value) > _LONGEST or not value.isprintable():
        raise InvalidInput(f"{name} must be a text of at most {_LONGEST} printable characters")


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidInput(f"{name} must be true or false")


def _names(name: str, value: Any) -> None:
    if not isinstance(value, list) or len(value) > _MOST_NAMES or not all(isinstance(each, str) for each in value):
        raise InvalidInput(f"{name} must be a list of at most {_MOST_NAMES} paths")


def _message(name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise InvalidInput(f"{name} must be an object")


_VERBS: Mapping[str, Mapping[str, Check]] = {
    "hand_over": {"token": _text, "holder": _text, "seconds": _seconds, "confirmed_s": _seconds},
    "restore_all": {"name": _text, "force": _flag},
    "confirm": {"name": _text},
    "examine": {"board": _text},
    "files": {"device": _text, "names": _names},
    "work": {"token": _text, "point": _message, "message": _message},
    "borrow": {"token": _text},
}


class FarService(Service):
    """The actuator's service, and what a desk asks besides.

    Args:
        uri: Of the device that is served.
        path: Of the socket, at which the process that runs workloads reads the device.
    """

    # A desk that has lost its connection asks the next far side, while the first has a workload to end before it puts
    # the board back: 5 to 8 s were seen.
    put_back_within_s = 12.0

    def __init__(self, uri: str, path: Path) -> None:
        super().__init__([uri], Permits([]))
        self._verbs = {
            **self._verbs,
            "hand_over": self._hand_over,
            "restore_all": self._restore_all,
            "confirm": self._confirm,
            "examine": self._examine,
            "files": self._files,
            "work": self._work,
            "borrow": self._borrow,
        }
        self._host = WorkHost(path)

    def request(self, message: Mapping[str, Any]) -> Request:
        """Return the request a message makes.

        Raises:
            PolythrottleError: If it makes none; says why.
        """
        return request_from(message, _VERBS)

    def close(self) -> list[str]:
        """Put everything back, for good, and end the process that runs workloads; return what is left."""
        self._host.close()
        return super().close()

    def _hello(self, peer: Peer, request: Request) -> dict[str, Any]:
        version = ".".join(map(str, sys.version_info[:3]))
        python = f"{sys.implementation.name} {version}"
        return {**super()._hello(peer, request), "python": python, "program": sys.executable}

    def _known_as(self, peer: Peer, holder: str) -> str:
        """Return the desk: the user and the process here that ask for it say nothing of it."""
        return holder

    def _borrow(self, peer: Peer, request: Request) -> dict[str, Any]:
        # In the environment of this process, where the device looks for it, and in no command line that others read.
        os.environ[TOKEN] = request.text.get("token", "")
        return {}

    def _hand_over(self, peer: Peer, request: Request) -> dict[str, Any]:
        holding, _ = self._own(peer, request)
        device = holding.entered
        if not isinstance(device, Lasting):
            raise InvalidInput(f"{holding.uri} cannot be left changed: nothing would restore it")
        fields = request.fields
        name = device.hand_over(request.text.get("holder", ""), fields["seconds"], fields["confirmed_s"])
        holding.end("left in place")
        return {"name": name}

    def _restore_all(self, peer: Peer, request: Request) -> dict[str, Any]:
        # The device that was named is there, for it was opened: where nothing stands at all, its name is no slip.
        meant = self._on_record(request) if concerned() or not request.text.get("name", "") else ()
        found = all_restored(meant, force=bool(request.fields["force"]))
        return {"outcomes": [asdict(each) for each in found]}

    def _confirm(self, peer: Peer, request: Request) -> dict[str, Any]:
        stands = confirmed(self._on_record(request))
        return {"stands": [{**asdict(each), "expires_in_s": each.expires_in_s} for each in stands]}

    def _on_record(self, request: Request) -> Sequence[str | None]:
        """Return the names on record of the device that a request means; of all of them if it means none."""
        named = request.text.get("name", "") or None
        if named is not None:
            trust_roots(named)
        return on_record(named)

    def _examine(self, peer: Peer, request: Request) -> dict[str, Any]:
        root = DeviceURI.parse(self.holdings[0].uri).options.get("root", "/")
        system = System(Path(root))
        board = request.text.get("board", "")
        return {
            "machine": _lines(machine_findings(system, board)),
            "others": _lines(others_steering(system)),
            "records": _lines(record_findings(board)),
        }

    def _files(self, peer: Peer, request: Request) -> dict[str, Any]:
        holding, _ = self._named(peer, request.text.get("device", ""))
        root = Path(DeviceURI.parse(holding.uri).options.get("root", "/")).resolve()
        named: Sequence[str] = getattr(open_served(holding.uri), "files", ())
        found = collect(root, [*named, *(str(root / each) for each in request.fields["names"] or ())])
        files = {place: [base64.b64encode(kept.content).decode(), kept.mode] for place, kept in found.files.items()}
        if sum(len(kept.content) for kept in found.files.values()) > _MOST_FILES_BYTES:
            raise InvalidInput("the board's files are more than one answer holds; take the snapshot on the board")
        return {"files": files, "links": found.links, "unread": found.unread}

    def _work(self, peer: Peer, request: Request) -> Job:
        point = request.fields["point"]
        if point is not None:
            fields = {"token": request.text.get("token", ""), "point": point}
            self._apply(peer, request_from({"v": VERSION, "id": 0, "verb": "apply", **fields}))
        return self._host.ask(request.fields["message"] or {})


def _lines(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    return [asdict(each) for each in findings]
