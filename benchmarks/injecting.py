"""Makes chosen system calls of a forked child fail, by the kernel's own means (seccomp_unotify(2)).

The child installs a filter in itself that reports certain calls to its parent before they are made; the parent lets
each go on, or answers it with an error, in which case the call is not made. Against strace's injection this is some ten
times as fast, tells a pair of faults of one call apart, and needs no tracer. The filter comes from libseccomp (2.5 or
newer), which every Debian and Ubuntu has, for apt needs it; the kernel must be Linux 5.5 or newer.

What it can fail is whatever enters the kernel. What it cannot: the calls that never do (the time, by the vDSO), memory
that is already mapped, a write of which half is done, a call that is done and then tells of an error. `close` must not
be failed so, for the kernel frees the descriptor in any case, and its locks with it; nor must `wait4`.
"""

import ctypes
import errno
import os
import select
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_uint, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache

CALLS = (
    *("openat", "read", "write", "pread64", "pwrite64", "lseek", "fsync", "ftruncate", "flock", "fcntl", "ioctl"),
    *("newfstatat", "readlink", "readlinkat", "getdents64", "faccessat", "access", "mkdir", "mkdirat"),
    *("unlink", "unlinkat", "rename", "renameat", "chmod", "fchmodat", "chown", "fchownat", "getcwd", "dup", "dup3"),
    *("mmap", "mremap", "clone", "clone3", "vfork", "pipe2", "pidfd_open", "select", "pselect6", "poll", "ppoll"),
    *("socket", "socketpair", "bind", "listen", "accept4", "connect", "getsockopt", "setsockopt", "sendto", "recvfrom"),
    *("epoll_create1", "epoll_ctl", "epoll_wait", "epoll_pwait"),
)
"""What is made to fail, by its name on x86-64; what another machine does not have is left out."""
KILL = "SIGKILL"
"""In the place of an error: the child is killed at that call, before it is made."""
_MARK = "getpgid"  # made by nothing here; begins and ends the stretch that counts
_NOTIFY, _ALLOW, _CONTINUE = 0x7FC00000, 0x7FFF0000, 1  # seccomp.h


class _Data(ctypes.Structure):
    _fields_ = (("nr", c_int), ("arch", c_uint32), ("ip", c_uint64), ("args", c_uint64 * 6))


class _Request(ctypes.Structure):
    _fields_ = (("id", c_uint64), ("pid", c_uint32), ("flags", c_uint32), ("data", _Data))


class _Answer(ctypes.Structure):
    _fields_ = (("id", c_uint64), ("val", c_int64), ("error", c_int), ("flags", c_uint32))


@dataclass(frozen=True)
class Fault:
    """One system call that fails.

    Args:
        call: Its name.
        number: Which of them, counted from 1 within the stretch that counts.
        error: As which; or `KILL`.
    """

    call: str
    number: int
    error: str

    def __str__(self) -> str:
        return f"{self.call} {self.number} {self.error}"


@cache
def library() -> ctypes.CDLL:
    """Return libseccomp.

    Raises:
        OSError: If it is not there.
    """
    found = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    found.seccomp_init.restype, found.seccomp_init.argtypes = c_void_p, (c_uint32,)
    found.seccomp_rule_add_array.argtypes = (c_void_p, c_uint32, c_int, c_uint, c_void_p)
    found.seccomp_load.argtypes = found.seccomp_notify_fd.argtypes = found.seccomp_release.argtypes = (c_void_p,)
    found.seccomp_syscall_resolve_name.argtypes = (c_char_p,)
    found.seccomp_notify_receive.argtypes = (c_int, POINTER(_Request))
    found.seccomp_notify_respond.argtypes = (c_int, POINTER(_Answer))
    found.seccomp_api_get()  # has it look what this kernel can do, without which it refuses to receive
    return found


def available() -> bool:
    """Say whether this machine has what is needed."""
    try:
        library().seccomp_notify_fd  # noqa: B018  libseccomp before 2.5 has none
    except (OSError, AttributeError):
        return False
    return True


@cache
def numbers() -> dict[int, str]:
    """Return the names of `CALLS` by their number on this machine."""
    return {
        number: name
        for name in (*CALLS, _MARK)
        if (number := library().seccomp_syscall_resolve_name(name.encode())) >= 0
    }


def mark() -> None:
    """Begin or end the stretch of calls that counts; called by the child."""
    os.getpgid(0)


def install(calls: Collection[str], way: socket.socket) -> None:
    """Have calls of this process reported from now on; sends the parent what it listens on.

    Raises:
        OSError: If the kernel refuses.
    """
    seccomp = library()
    wanted = {*calls, _MARK}
    chosen = [number for number, name in numbers().items() if name in wanted]
    filters = seccomp.seccomp_init(_ALLOW)
    for number in chosen:
        if code := seccomp.seccomp_rule_add_array(filters, _NOTIFY, number, 0, None):
            raise OSError(-code, os.strerror(-code))
    if code := seccomp.seccomp_load(filters):
        raise OSError(-code, os.strerror(-code))
    handle = seccomp.seccomp_notify_fd(filters)
    socket.send_fds(way, [str(os.getpid()).encode()], [handle])  # sendmsg, which is not reported
    os.close(handle)
    way.close()


class Injector:
    """Answers for the calls of a child, from its `install` to its end.

    Args:
        way: The other end of what the child was given.
        faults: Which calls fail.
        met: Is called at each call that counts, with its name and number.
    """

    def __init__(
        self,
        way: socket.socket,
        faults: Sequence[Fault] = (),
        met: Callable[[str, int], None] = lambda call, number: None,
    ) -> None:
        self._due = {(each.call, each.number): each.error for each in faults}
        self._heed = met
        self._counted: Counter[str] = Counter()
        self._within = False
        self.calls: list[tuple[str, int]] = []
        """What was called, in order."""
        self.met: set[tuple[str, int]] = set()
        """Which of the faults took place."""
        told, handles, _, _ = socket.recv_fds(way, 64, 1)
        if not handles:
            raise ChildProcessError("the child ended before it could be listened to")
        self.pid = int(told)
        self.handle: int | None = handles[0]

    def answer(self) -> None:
        """Answer one call, for which the child waits."""
        request = _Request()
        if code := library().seccomp_notify_receive(self.handle, byref(request)):
            if code == -errno.ECANCELED:  # libseccomp's for what the kernel says where the child has ended meanwhile
                return
            raise OSError(-code, os.strerror(-code))
        answer = _Answer(request.id, 0, 0, _CONTINUE)
        error = self._judged(request)
        if error == KILL:
            os.kill(self.pid, signal.SIGKILL)
            return
        if error is not None:
            answer.error, answer.flags = -getattr(errno, error), 0
        library().seccomp_notify_respond(self.handle, byref(answer))

    def _judged(self, request: _Request) -> str | None:
        name = numbers()[request.data.nr]
        if not self._is_child_s(request.pid):
            return None
        if name == _MARK:
            self._within = not self._within
            return None
        if not self._within:
            return None
        self._counted[name] += 1
        call = name, self._counted[name]
        self.calls.append(call)
        self._heed(*call)
        if call in self._due:
            self.met.add(call)
        return self._due.get(call)

    def _is_child_s(self, thread: int) -> bool:
        """Say whether it is a thread of the child, and not of a program that this has started."""
        return thread == self.pid or os.path.exists(f"/proc/{self.pid}/task/{thread}")

    def serve(
        self, over: Callable[[], bool], patience_s: float, look_s: float = 0.01, ended: int | None = None
    ) -> bool:
        """Answer until something is so, and say whether it came to be in time.

        Args:
            over: Says whether it is so.
            patience_s: How long to go on, in seconds.
            look_s: How often to look, while nothing happens, in seconds.
            ended: Handle that is ready when it is, such as a process's (pidfd_open(2)).
        """
        poll, ends_s = select.poll(), time.monotonic() + patience_s
        if ended is not None:
            poll.register(ended, select.POLLIN)
        if self.handle is not None:
            poll.register(self.handle, select.POLLIN)
        while not over():
            if time.monotonic() > ends_s:
                return False
            ready = dict(poll.poll(1000 * (look_s if ended is None else 0.5)))
            if (state := ready.get(self.handle)) is not None:
                if state & select.POLLIN:
                    self.answer()
                else:  # nobody is left who could be reported
                    poll.unregister(self.handle)
                    self.close()
        return True

    def close(self) -> None:
        """Listen no longer: calls of those left fail with ENOSYS from now on."""
        if self.handle is not None:
            os.close(self.handle)
            self.handle = None
