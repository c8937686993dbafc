"""The way to a board: the user's own ``ssh``, which starts what is carried in the board's Python and is the channel."""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polythrottle.actuation.wire import error_from
from polythrottle.board.carried import LONGEST, Carried
from polythrottle.domain.clock import Thread
from polythrottle.domain.errors import DeviceError, InvalidInput, PermissionDenied
from polythrottle.storage.atomic_file import temporary_folder
from polythrottle.storage.json_channel import Channel
from polythrottle.storage.untrusted import last_line, printable

SSH = "POLYTHROTTLE_SSH"
"""The environment variable that names another command than ``ssh``, such as ``ssh -F FILE``."""
_USUAL = "ssh"
# No terminal there, which would change bytes on their way; and 45 s without an answer are the end of the connection.
_OPTIONS = ("-T", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3", "-o", "ConnectTimeout=20")
_UNDISTURBED = ("/bin/sh", "-c", 'trap "" INT; exec "$@"', "sh")  # a Ctrl-C is for this process, which restores first
# So is what `timeout` or a closed terminal tells the whole group. It ends with the channel.
_SHIELDED = ("/bin/sh", "-c", 'trap "" INT TERM HUP; exec "$@"', "sh")
_PATIENCE_S = 120.0  # somebody may be typing the passphrase of a key
_NO_WAY = 255  # ssh's own failure, and not that of what it ran (ssh(1), EXIT STATUS)
_MOST_NOISE = 65536
_LONGEST = 300
_ANSWER_S = 600.0
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.%@-]*")
_HOST = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*|\[[0-9A-Fa-f:.%a-z]+\])")
_OWN = ("python", "sudo")
_LONGEST_HOST = 253  # of a name's letters (RFC 1035, 2.3.4)
_NO_SUDO = re.compile(r"sudo: (command )?not found|not found: sudo")  # as a shell says it, sudo lacks something itself

# Sent as one word in base64, which every login shell leaves alone; runs in any Python, to say that it is too old. Its
# words are told by the mark from what a login prints.
_BOOTSTRAP = """
import os, sys
told = {told}
def say(text):
    os.write(1, ("%s %s\\n" % (told["mark"], text)).encode("utf-8", "replace"))
if sys.version_info < (3, 8):
    say("old %d.%d" % sys.version_info[:2])
    sys.exit(1)
say("send")
import io, shutil, tempfile, zipfile
left = told["size"]
parts = []
while left:
    part = os.read(0, min(65536, left))
    if not part:
        sys.exit(1)
    left -= len(part)
    parts.append(part)
folder = None
try:
    folder = tempfile.mkdtemp(prefix="polythrottle-board-")
    zipfile.ZipFile(io.BytesIO(b"".join(parts))).extractall(folder)
except (OSError, zipfile.BadZipFile) as err:
    if folder:
        shutil.rmtree(folder, True)
    say("fault cannot unpack in %s: %s" % (os.path.dirname(folder) if folder else "a temporary folder",
        getattr(err, "strerror", None) or err))
    sys.exit(1)
del parts
sys.path[0] = folder
try:
    from {entry} import main
except ImportError as err:
    shutil.rmtree(folder, True)
    say("fault %s there cannot run this: %s; name another one with ?python=" % (sys.executable, err))
    sys.exit(1)
except BaseException:
    shutil.rmtree(folder, True)
    raise
sys.exit(main(told["mark"], folder, told["device"]))
"""


def _is_port(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,5}", text) is not None and 0 < int(text) < 65536


@dataclass(frozen=True)
class Place:
    """A board and a device on it: ``ssh://[user@]host[:port][/device]``.

    Args:
        host: As ssh knows it: a name, an alias of ``~/.ssh/config``, an address.
        user: Empty for what ssh's own files say; so is ``port``.
        port: Where its sshd listens.
        device: URI of the device there; empty for what ``auto`` means there.
        python: What starts Python there.
        sudo: Whether it is started by ``sudo``, without a password.
    """

    host: str
    user: str = ""
    port: str = ""
    device: str = ""
    python: str = "python3"
    sudo: bool = False

    @classmethod
    def parse(cls, name: str, options: Mapping[str, str]) -> Place:
        """Return the place that a URI means.

        Args:
            name: What follows ``ssh:``: ``//user@host:22/jetson``.
            options: What follows the question mark: ``python`` and ``sudo``, and those of the device there.

        Raises:
            InvalidInput: If it has no host, holds a password, or something that ssh might take for an option.
        """
        form = "ssh://[user@]host[:port][/device]"
        authority, _, device = name[2:].partition("/")
        user, _, rest = authority.rpartition("@")
        found = re.fullmatch(r"(\[[^\]]*\]|[^:]*)(?::(.*))?", rest)
        host, port = (found[1], found[2] or "") if found is not None else ("", "")
        if len(host) > _LONGEST_HOST:
            middle = f"{host[:30]}…{host[-30:]}"
            raise InvalidInput(f"ssh://{middle} has a host of {len(host)} letters; {_LONGEST_HOST} are the most")
        if not name.startswith("//") or not _HOST.fullmatch(host):
            raise InvalidInput(f"'ssh:{name}' names no board; write {form}")
        if ":" in user:
            raise InvalidInput("leave the password out of the URI: ssh has keys, an agent and ~/.ssh/config for that")
        if (user and not _NAME.fullmatch(user)) or not (port == "" or _is_port(port)):
            raise InvalidInput(f"'ssh:{name}' has no such user or port; write {form}")
        sudo = options.get("sudo", "no")
        if sudo not in ("yes", "no"):
            raise InvalidInput(f"sudo={sudo} is neither yes nor no")
        python = options.get("python", "python3")
        if python.startswith("-"):
            raise InvalidInput(f"python={python} names no program; write for example python=/usr/bin/python3.8")
        own = "&".join(f"{key}={value}" for key, value in options.items() if key not in _OWN)
        if own and not device:
            raise InvalidInput(f"{own} is an option of a device, and none is named; write {form}?{own}")
        whole = f"{device}?{own}" if own else device
        return cls(host=host, user=user, port=port, device=whole, python=python, sudo=sudo == "yes")

    @property
    def where(self) -> str:
        """The board, as people write it."""
        return f"ssh://{self.user + '@' if self.user else ''}{self.host}{':' + self.port if self.port else ''}"

    def uri(self, device: str) -> str:
        """Return the URI of a device there, by the name it has there; of the board alone if that is ""."""
        if self.python != "python3":
            own = [f"python={self.python}"]
        else:
            own = []
        own += ["sudo=yes"] if self.sudo else []
        joint = "&" if "?" in device else "?"
        named = f"/{device}" if device else ""
        return f"{self.where}{named}{joint if own else ''}{'&'.join(own)}"

    @property
    def by_hand(self) -> str:
        """The command with which people log in there."""
        return shlex.join([*_given(), *self._target])

    @property
    def _target(self) -> list[str]:
        port = ["-p", self.port] if self.port else []
        user = ["-l", self.user] if self.user else []
        # ssh wants an IPv6 address without brackets.
        return [*port, *user, self.host.strip("[]")]

    def command(self, program: str) -> list[str]:
        """Return the words that have ssh run a program there.

        Args:
            program: In Python.
        """
        code = base64.b64encode(zlib.compress(program.encode(), 9)).decode()
        start = f'import base64,zlib;exec(zlib.decompress(base64.b64decode("{code}")))'
        far = [*(["sudo", "-n"] if self.sudo else []), self.python, "-c", start]
        # ssh hands on one text, which the login shell there takes apart.
        return [*self.way(), " ".join(map(shlex.quote, far))]

    def way(self, *options: str) -> list[str]:
        """Return the words that have ssh go there.

        Args:
            options: Of ssh, besides those that every connection has.
        """
        return [*_given(), *_OPTIONS, *options, *self._target]


def _given() -> list[str]:
    """Return the words of the user's own ssh.

    Raises:
        DeviceError: If they are no words of a command.
    """
    try:
        return shlex.split(os.environ.get(SSH, "")) or [_USUAL]
    except ValueError as err:
        raise DeviceError(f"${SSH} is no command ({err}); an example: ssh -F board.conf") from err


def _no_way(place: Place, why: str) -> DeviceError:
    """Return the error of an ssh that did not get there."""
    if "permission denied" in why.lower() or "authentication" in why.lower():
        return PermissionDenied(f"{place.where} lets nobody in with these keys: {why}; {place.by_hand} must work")
    return DeviceError(f"{place.where} cannot be reached: {why or 'ssh said nothing'}")


class Link:
    """The way to a board.

    Args:
        place: The board.
        carried: What is started there.
    """

    def __init__(self, place: Place, carried: Carried) -> None:
        self._place = place
        self._carried = carried
        self._start: _Start | None = None
        self.connections = 0
        """How often it was connected."""

    def connect(self) -> socket.socket:
        """Have ssh start what is carried on the board, and return the channel to it; closing that ends both.

        Raises:
            DeviceError: If the board cannot be reached, its Python cannot run it, or there is no room; says which.
            PermissionDenied: If it does not let this user in.
        """
        self._start = _Start(self._place, self._carried)
        self.connections += 1
        return self._start.channel()

    @property
    def said(self) -> str:
        """What ssh or the far side said last, so far."""
        if self._start is None:
            return ""
        return self._start.said

    def last_words(self) -> str:
        """Return what ssh or the far side said last, once they have ended; empty if they said nothing."""
        if self._start is None:
            return ""
        return self._start.last_words()


class _Start:
    """One start of ssh and of what it runs."""

    def __init__(self, place: Place, carried: Carried) -> None:
        self._place = place
        self._mark = f"polythrottle-{secrets.token_hex(8)}"
        self._zip = carried.whole
        told = {"mark": self._mark, "size": len(self._zip), "device": place.device}
        program = _BOOTSTRAP.replace("{told}", json.dumps(told)).replace("{entry}", carried.entry)
        command = place.command(program)
        self._program = command[0]
        self._line = bytearray()
        self._noise = ""
        if shutil.which(command[0]) is None:
            raise DeviceError(f"there is no program {command[0]!r} here, which leads to {place.where}; ${SSH} names it")
        # One socket for both directions, so that whoever uses the channel has timeouts as on any other.
        self._here, there = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [*_SHIELDED, *command],
                stdin=there.fileno(),
                stdout=there.fileno(),
                stderr=subprocess.PIPE,
            )
        except OSError as err:
            self._here.close()
            raise DeviceError(f"cannot start {command[0]}, which leads to {place.where}: {err.strerror}") from err
        finally:
            there.close()
        self._said: deque[str] = deque(maxlen=20)
        self._listener = Thread(target=self._listen, name="polythrottle-ssh", daemon=True)
        self._listener.start()
        self._ends_s = time.monotonic() + _PATIENCE_S

    def _listen(self) -> None:
        """Keep the last of what ssh says, and wait for its end."""
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            # To its end, however much it is: a full pipe would stop ssh.
            for line in stream:
                self._said.append(printable(line.decode(errors="replace")).strip()[:_LONGEST])
        self._process.wait()

    def channel(self) -> socket.socket:
        """Return the channel once the far side has said that it is ready."""
        try:
            self._expect("send")
            self._here.settimeout(self._left_s())
            self._here.sendall(self._zip)
            self._expect("ready")
        except DeviceError:
            self._give_up()
            raise
        except TimeoutError:
            self._give_up()
            words = f"{self._place.where} did not answer within {_PATIENCE_S:g} s"
            if self._printed:
                words += f"; what it printed last: {self._printed}"
            raise DeviceError(words) from None
        except OSError as err:
            why = self.last_words()
            self._give_up()
            raise DeviceError(f"{self._place.where} hung up while it was started: {why or err.strerror}") from err
        except BaseException:  # a Ctrl-C while ssh asks for a passphrase, which it would go on to do
            self._give_up()
            raise
        self._here.settimeout(None)
        return self._here

    def _left_s(self) -> float:
        return max(0.001, self._ends_s - time.monotonic())

    def _expect(self, word: str) -> None:
        """Wait for a word of the far side; whatever else the login prints, on the same line too, is passed over.

        Raises:
            DeviceError: If it says something else, or ssh ends.
        """
        noise = 0
        while noise <= _MOST_NOISE:
            self._here.settimeout(self._left_s())
            byte = self._here.recv(1)  # no more: what follows belongs to the channel
            if not byte:
                raise self._ended()
            self._line += byte
            noise += 1
            if byte != b"\n":
                continue
            line = self._line.decode(errors="replace").strip()
            self._line.clear()
            _, told, words = line.partition(f"{self._mark} ")
            if told and words == word:
                return
            if told:
                raise self._refusal(words)
            self._noise = line or self._noise
        raise DeviceError(f"{self._place.where} prints more at a login than a channel can pass over")

    @property
    def _printed(self) -> str:
        """What the login printed last, in whole lines or not."""
        line = self._line.decode(errors="replace").strip() or self._noise
        return printable(line)[:_LONGEST].strip()

    def _refusal(self, words: str) -> DeviceError:
        kind, _, rest = printable(words).partition(" ")
        if kind == "old":
            return DeviceError(
                f"{self._place.python} on {self._place.where} is Python {rest}, and 3.8 is the oldest that will do; "
                "name another one there with ?python=/usr/bin/python3.8"
            )
        return DeviceError(f"{self._place.where}: {rest or kind}")

    def last_words(self) -> str:
        """Return what ssh said last, waiting a moment for its end."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5.0)
        self._listener.join(5.0)
        return self.said

    @property
    def said(self) -> str:
        """What ssh or what it runs said last."""
        return next((line for line in reversed(self._said) if line), "")

    def _ended(self) -> DeviceError:
        """Return why ssh has ended before the far side was ready."""
        why = self.last_words()
        code = self._process.returncode
        if code == _NO_WAY:
            return _no_way(self._place, why)
        where = self._place.where
        python = self._place.python
        lower = why.lower()
        # What a POSIX shell ends with where a command cannot be run, or is not there.
        lacking = code in (126, 127) or "not found" in lower
        if lacking:  # of several lines, as a version manager's, the one that says so
            why = next((line for line in self._said if "not found" in line.lower()), why)
        if self._place.sudo and code == 127 and _NO_SUDO.search(why.lower()):
            return DeviceError(f"there is no sudo on {where}: {why}; log in as root, without --sudo or ?sudo=yes")
        if self._place.sudo and "sudo" in lower and not lacking:
            return PermissionDenied(f"{where}: {why}; allow sudo without a password there, or log in as root")
        if lacking:
            return DeviceError(
                f"there is no {python} on {where}: {why or f'code {code}'}; name one there with "
                "?python=/usr/bin/python3.8"
            )
        if self._printed and not why:
            why = f"the login ended with code {code}, and printed last: {self._printed}"
        silent = f"{self._program} ended with code {code} and said nothing"
        return DeviceError(f"{where} could not start {python}: {why or silent}")

    def _give_up(self) -> None:
        self._here.close()
        self._process.kill()  # to a gentler signal it does not listen


def ask(place: Place, carried: Carried, request: Mapping[str, Any]) -> dict[str, Any]:
    """Have a board do one thing: send a line to what is carried there, and return its answer, also a line.

    Args:
        place: The board.
        carried: What does it there.
        request: What is asked for.

    Raises:
        PolythrottleError: If the board cannot be reached, or what it answers is an error.
    """
    link = Link(place, carried)
    with closing(Channel(link.connect(), LONGEST)) as channel:
        try:
            channel.send(request, _ANSWER_S)
            answer = channel.receive(_ANSWER_S)
            if answer is None:
                raise TimeoutError
        except (OSError, EOFError, InvalidInput) as err:
            why = printable(link.last_words()) or getattr(err, "strerror", None) or "no answer came"
            raise DeviceError(f"{place.where} did not say that it was done: {why}; do it again, to be sure") from err
    if "error" in answer:
        words = printable(str(answer["error"]["words"]))
        raise error_from({**answer["error"], "words": f"{place.where}: {words}"})
    return answer


# A daemon on a board: ssh's own forwarding makes its socket there one here, for as long as somebody asks it.

_FIND = """
import os, socket
told = {told}
path = told["socket"]
if not path:
    home = os.environ.get("XDG_RUNTIME_DIR") or "/run/user/%d" % os.getuid()
    own = os.environ.get("POLYTHROTTLE_RUN_DIR")
    state = os.environ.get("POLYTHROTTLE_STATE_DIR") or os.path.join(
        os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"), "polythrottle")
    folders = [own] if own else [home + "/polythrottle", state + "/run", "/run/polythrottle"]
    paths = [os.path.join(folder, told["name"]) for folder in folders]
    path = next((each for each in paths if os.path.exists(each)), paths[-1])
try:
    socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).connect(path)
    print(told["mark"], "here", path)
except OSError as err:
    print(told["mark"], "lacks", "%s: %s" % (path, err.strerror or err))
"""
_BOUND_S = 0.05


@contextmanager
def forwarded_socket(place: Place, name: str, path: str = "") -> Iterator[Path]:
    """Have a Unix socket of a board here, until this is left.

    Args:
        place: The board; no device of it is named.
        name: Of the socket, in the folder where it is there: as `polythrottle.storage.paths.socket_path` has it.
        path: Of the socket there, if it is elsewhere.

    Raises:
        DeviceError: If the board cannot be reached, or nobody listens there.
        PermissionDenied: If it does not let this user in.
        InvalidInput: If a device is named, or ``sudo``: who logs in is who asks.
    """
    if place.device or place.sudo:
        raise InvalidInput(f"name the board alone, {place.where}: its daemon is asked as whoever logs in there")
    there = _listening(place, name, path)
    with temporary_folder() as folder:
        here = folder / "socket"
        # No connection that is shared with others, which would take the forwarding over and outlive this process.
        own = ("-o", "ControlPath=none", "-o", "ExitOnForwardFailure=yes", "-L", f"{here}:{there}")
        # Not -N, which would outlive a process that is killed: this ends with its standard input.
        command = [*_UNDISTURBED, *place.way(*own), "cat"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process:
            try:
                ends_s = time.monotonic() + _PATIENCE_S
                while not here.exists():
                    if process.poll() is not None or time.monotonic() > ends_s:
                        process.kill()
                        said = process.stderr.read() if process.stderr is not None else b""
                        raise DeviceError(f"{place.where} forwards no socket: {last_line(said) or 'ssh says nothing'}")
                    time.sleep(_BOUND_S)
                yield here
            finally:
                process.terminate()


def _listening(place: Place, name: str, path: str) -> str:
    """Return the path of a socket there at which somebody listens."""
    mark = f"polythrottle-{secrets.token_hex(8)}"
    program = _FIND.replace("{told}", json.dumps({"mark": mark, "name": name, "socket": path}))
    command = place.command(program)
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        raise DeviceError(f"{place.where} did not answer within {_PATIENCE_S:g} s") from None
    except OSError as err:
        raise DeviceError(f"cannot start {command[0]!r}, which leads to {place.where}; ${SSH} names it") from err
    _, told, answer = done.stdout.decode(errors="replace").partition(f"{mark} ")
    if not told:
        said = last_line(done.stderr)
        if done.returncode == _NO_WAY:
            raise _no_way(place, said)
        raise DeviceError(f"{place.where} cannot be asked: {said or f'code {done.returncode}'}")
    state, _, rest = printable(answer.splitlines()[0]).partition(" ")
    if state != "here":
        raise DeviceError(f"no daemon listens on {place.where}, at {rest}")
    return rest
