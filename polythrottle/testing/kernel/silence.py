"""Files that answer EAGAIN, as those of a gated sensor do: to every reader in this process, as the kernel would.

The thermal zones of a sensor that is powered down answer so, and others now and then under load (swsususu/ThorFAN,
README; seen on Orin too). ``read(2)`` ends with EAGAIN; CPython's own files take that for "nothing yet" and hand None
on, of which text files make ``TypeError: can't concat NoneType to bytes``.
"""

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

Silent = Callable[[str], bool]


@contextmanager
def silence(silent: Silent) -> Iterator[None]:
    """Let reads of some files end with EAGAIN: by descriptor, and as CPython's files pass it on.

    Args:
        silent: Says of a path, links followed, whether it answers so now; asked at every read.
    """
    with ExitStack() as stack:
        for name in ("read", "pread"):
            stack.enter_context(mock.patch.object(os, name, _refusing(getattr(os, name), silent)))
        opened = _opening(io.open, silent)
        stack.enter_context(mock.patch.object(io, "open", opened))
        stack.enter_context(mock.patch.object(builtins, "open", opened))
        yield


def _refusing(usual: Callable[..., bytes], silent: Silent) -> Callable[..., bytes]:
    def read(handle: int, *rest: int) -> bytes:
        try:
            path = os.readlink(f"/proc/self/fd/{handle}")
        except OSError:  # the descriptor is closed, or there is no /proc: the usual call says so
            return usual(handle, *rest)
        if silent(path):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return usual(handle, *rest)

    return read


class _Gated(io.RawIOBase):
    """A file whose reads end with EAGAIN, as CPython's own (`io.FileIO`) hands that on."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> None:
        return None


def _opening(usual: Callable[..., Any], silent: Silent) -> Callable[..., Any]:
    def opened(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        path = os.path.realpath(os.fspath(file)) if isinstance(file, str | os.PathLike) else ""
        if not path or set(mode) & set("wax+") or not os.path.isfile(path) or not silent(path):
            return usual(file, mode, *rest, **options)
        buffer = io.BufferedReader(_Gated())
        return buffer if "b" in mode else io.TextIOWrapper(buffer, encoding="utf-8")

    return opened
