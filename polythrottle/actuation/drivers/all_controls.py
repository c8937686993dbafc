"""Every kind of control this machine can have: files of the kernel, NVML where it is reached.

The power mode that nvpmodel switches.
"""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from polythrottle.actuation.drivers.controls import Controls, Start, SysFiles, factory, is_named, present_start, text_of
from polythrottle.domain.errors import DeviceError, KnobRejected, PermissionDenied
from polythrottle.storage.untrusted import last_line

# A Jetson's power mode as a control: read from where nvpmodel notes it, switched by nvpmodel itself.
#
# ``nvpmodel -q`` is not asked: it needs root and can hang under load. The exit status of a switch proves nothing: on
# JetPack 7 some modes end with another than 0 and yet apply, and in a container nvpmodel says "Running in chroot,
# ignoring request", notes the mode all the same and ends with 0 (kcirtapfromspace/gemma4, ``POWER_MODE.md``). A board
# that was never switched has no note: it is in the mode that its file of modes names as the one to start in.
# Standard library only, so that a mode can be put back without anything else.

PROGRAM = "/usr/sbin/nvpmodel"
_STATUS = "var/lib/nvpmodel/status"
_CONF = "etc/nvpmodel.conf"
_MODE = re.compile(r"pmode:0*(\d{1,4})\b")
_DEFAULT = re.compile(r"^<\s*PM_CONFIG\s+DEFAULT=0*(\d{1,4})\s*>", re.MULTILINE)
_PATIENCE_S = 30.0


class Nvpmodel:
    """The power mode of a board; keys are ``nvpmodel:<root>``, values mode numbers such as ``2``.

    Args:
        run: How a program is run, given its words; returns exit status and what it said.
    """

    def __init__(self, run: Callable[[Sequence[str]], tuple[int, str]] | None = None) -> None:
        self._run = run if run is not None else _run

    def read(self, key: str) -> str:
        """Return the number of the present mode.

        Raises:
            OSError: If nvpmodel has noted none and its file names none, or what it noted cannot be read.
        """
        file = Path(_root(key)) / _STATUS
        if not file.exists() and (start := started_in(Path(_root(key)))) is not None:
            return start
        if not file.is_file():
            raise OSError(errno.ENOENT, f"there is no {file}")
        match = _MODE.search(text_of(file)[:4096])
        if match is None:
            raise OSError(errno.EINVAL, f"{file} names no power mode")
        return match[1]

    def located(self, key: str) -> str:
        """Return the key of a mode on record: of this machine, or of a tree that was named.

        Raises:
            PermissionDenied: If it is of another tree: whoever can write records could have any file read then.
        """
        root = Path(_root(key)).resolve()
        if root != Path("/") and not is_named(root):
            raise PermissionDenied(
                f"the power mode in {root} is not this machine's, so it is not read; name that board"
            )
        return key

    def _noted(self, key: str) -> str | None:
        try:
            return self.read(key)
        except OSError:
            return None

    def write(self, key: str, text: str) -> None:
        """Switch to a mode; one that asks for a reboot is refused.

        What it ends with does not count where the mode is noted: whoever switches reads limits back besides.

        Raises:
            KnobRejected: If nvpmodel refuses or ignores it, asks for a reboot, does not end, or the tree is not this
                machine's.
            PermissionDenied: If this process may not.
            DeviceError: If there is no nvpmodel.
        """
        if Path(_root(key)) != Path("/"):
            raise KnobRejected(f"the power mode in {_root(key)} cannot be switched: it is not this machine's")
        if not re.fullmatch(r"\d{1,4}", text):
            raise KnobRejected(f"{text!r} is not the number of a power mode")
        if os.geteuid() != 0:
            raise PermissionDenied("nvpmodel switches the power mode for root alone; run as root")
        before = self._noted(key)
        status, said = self._run((PROGRAM, "-m", text))
        if "reboot" in said.lower():
            raise KnobRejected(f"power mode {text} takes a reboot, so it was not switched to")
        if "ignoring request" in said.lower():
            if before not in (None, text):
                self._run((PROGRAM, "-m", before))  # it noted what it did not do: have it note what holds
            raise KnobRejected(f"nvpmodel switches nothing in a container or chroot: {_line(said, 'ignoring request')}")
        if status != 0 and self._noted(key) != text:
            raise KnobRejected(f"nvpmodel -m {text}: {last_line(said) or f'exit status {status}'}")


def started_in(root: Path) -> str | None:
    """Return the number of the mode that a board starts in until it is switched; None if its file does not say."""
    file = root / _CONF
    if file.is_symlink() and os.readlink(file).startswith("/"):
        file = root / os.readlink(file).lstrip("/")  # absolute on a board, and in a copy of one
    try:
        match = _DEFAULT.search(text_of(file)) if file.is_file() else None
    except OSError:
        return None
    return match[1] if match else None


def _line(said: str, words: str) -> str:
    return next(line.strip() for line in said.splitlines() if words in line.lower())


def _root(key: str) -> str:
    return key.partition(":")[2] or "/"


def _run(words: Sequence[str]) -> tuple[int, str]:
    """Run a program without anything to answer its questions with."""
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise KnobRejected(f"{words[0]} did not end within {_PATIENCE_S:g} s") from None
    except OSError as err:
        raise DeviceError(f"cannot run {words[0]}: {err.strerror}") from err
    return done.returncode, done.stdout.decode(errors="replace")


# Every kind of control this machine can have, each reached in its own way.


class SystemControls:
    """Every kind of control this machine can have, each reached in its own way.

    Args:
        stays: Whether a driver that counts its clients is to count this one for as long as it lives; else it is
            a client at each operation alone, so that a GPU can sleep and be reset.
    """

    def __init__(self, *, stays: bool = True) -> None:
        self._stays = stays
        self._ports: dict[str, Controls] = {}

    def read(self, key: str) -> str:
        """Return what a control holds."""
        return self._port(key).read(key)

    def write(self, key: str, text: str) -> None:
        """Write to a control."""
        self._port(key).write(key, text)

    def located(self, key: str) -> str:
        """Return where a control on record lies; refuses what is no control."""
        known = getattr(self._port(key), "located", None)
        return key if known is None else str(known(key))

    def start(self, key: str) -> Start:
        """Return what tells the present start of a control's driver from the next."""
        return present_start(self._port(key), key)

    def factory(self, key: str) -> str | None:
        """Return what a control's driver itself begins with; None where nobody says."""
        return factory(self._port(key), key)

    def _port(self, key: str) -> Controls:
        scheme = key.partition(":")[0]
        if scheme not in self._ports:
            self._ports[scheme] = _OPENERS[scheme](self._stays) if scheme in _OPENERS else SysFiles()
        return self._ports[scheme]


def _nvpmodel(stays: bool) -> Controls:

    return Nvpmodel()


def _nvml(stays: bool) -> Controls:
    from polythrottle.actuation.drivers.nvml import Library, NvmlControls

    if stays:
        return NvmlControls()
    return NvmlControls(Library())


_OPENERS: dict[str, Callable[[bool], Controls]] = {"nvpmodel": _nvpmodel, "nvml": _nvml}
