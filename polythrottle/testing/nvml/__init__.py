"""A stand-in NVIDIA driver library, so that the real ``pynvml`` bindings run without a GPU; public.

It is C, compiled once, on first use, with the system's compiler, loaded in the real one's place, and keeps its state in
a file that all processes share, as a driver does: what a killed process left locked stays locked.

    with FakeNvml(tmp_path / "nvml", ["a100", "l4"]) as fake:     # models: polythrottle.testing.nvml.MODELS
        fake.set(0, load_permille=1000)                           # busy; clocks and power follow
        fake.fail("nvmlDeviceSetPowerManagementLimit", code=4)    # by the driver's name for the call
        ...                                                       # import pynvml and use it
        assert fake.log()[-1].call == "nvmlDeviceResetGpuLockedClocks"
        assert fake.snapshot() == before

While it is entered, this process and its children (which inherit ``$POLYTHROTTLE_FAKE_NVML`` and ``$LD_LIBRARY_PATH``)
find it under the driver's name. GPUs are counted by slot, which stays when their order changes. Time is real, or frozen
but for ``advance`` and the sleeps of ``fake.clock()``. Clocks, power and energy are simulated by a simple law; they
prove what a program does, not what a board draws.
"""

import atexit
import ctypes
import enum
import functools
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from polythrottle.domain.errors import DeviceError, UnknownName
from polythrottle.storage.atomic_file import owned_folder
from polythrottle.testing.nvml.models import MODELS, GpuModel, model

__all__ = ["MODELS", "FakeNvml", "FakeTime", "FaultKind", "GpuModel", "LoggedCall", "build", "compiler"]

# The compiled stand-in: built once per process with the system's C compiler, and loaded in the driver's place.

SONAME = "libnvidia-ml.so.1"
_SOURCES = Path(__file__).parent
_FLAGS = ("-std=gnu11", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-fvisibility=hidden", "-pthread")


def compiler() -> str | None:
    """Return the C compiler's command, ``$CC`` first, else that of the package ziglang, or None where there is none."""
    for command in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return command
    if importlib.util.find_spec("ziglang"):
        return f"{shlex.quote(sys.executable)} -m ziglang cc"
    return None


def build(folder: Path) -> Path:
    """Compile the stand-in into a folder and return the library's path.

    Raises:
        DeviceError: If there is no C compiler, or it fails.
    """
    command = compiler()
    if command is None:
        raise DeviceError(
            "no C compiler (cc, gcc, clang, $CC or pip install ziglang), so the stand-in NVIDIA driver cannot be built"
        )
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / f"{SONAME}.{os.getpid()}"
    ready = folder / SONAME
    sources = [str(path) for path in sorted(_SOURCES.glob("*.c"))]
    words = [*shlex.split(command), *_FLAGS, f"-Wl,-soname,{SONAME}", "-o", str(fresh), *sources]
    # zig asks for a cache even where there is no home folder; beside its package, the second build takes no time.
    cache = str(Path(sys.prefix) / ".cache" / "zig" if os.access(sys.prefix, os.W_OK) else folder / "zig")
    environment = {**os.environ, "ZIG_LOCAL_CACHE_DIR": cache, "ZIG_GLOBAL_CACHE_DIR": cache}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise DeviceError(f"{words[0]} does not build the stand-in NVIDIA driver: {done.stderr.strip()}")
    return fresh.replace(ready)


@functools.cache
def built() -> Path:
    """Return this process's own build of the stand-in, removed when the process ends.

    Raises:
        DeviceError: If there is no C compiler, or it fails.
    """
    folder, _ = owned_folder()  # whose handle stays open, so that no other process clears it away
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return build(folder)


def load(path: Path) -> ctypes.CDLL:
    """Load the stand-in, so that asking for the driver's library by name gets it from now on.

    The dynamic linker gives a name that is already loaded to whoever asks for it; that this holds here is checked, so
    that nothing meant for the stand-in can reach a real driver.

    Raises:
        DeviceError: If a real driver's library is loaded already.
    """
    library = ctypes.CDLL(str(path))
    if not hasattr(ctypes.CDLL(SONAME), "fake_create"):
        raise DeviceError(f"a real {SONAME} is loaded in this process; use the stand-in in a fresh one")
    _declare(library)
    return library


def _declare(library: ctypes.CDLL) -> None:
    text = ctypes.c_char_p
    slot = ctypes.c_int
    number = ctypes.c_int64
    table = ctypes.POINTER(number)
    shapes = {
        "fake_create": (text,),
        "fake_forget": (),
        "fake_set": (text, slot, text, number),
        "fake_get": (text, slot, text, table),
        "fake_set_text": (text, slot, text, text),
        "fake_add_clocks": (text, slot, number, table, slot),
        "fake_set_order": (text, table),
        "fake_add_process": (text, slot, number, number),
        "fake_add_fault": (text, text, *(number,) * 6),
        "fake_clear_faults": (text,),
        "fake_reload": (text, slot),
        "fake_now": (text, slot, slot),
        "fake_time_us": (text,),
        "fake_log": (text, slot, text, text),
    }
    for name, arguments in shapes.items():
        getattr(library, name).argtypes = arguments
    library.fake_now.restype = library.fake_time_us.restype = number


def forget_bindings() -> None:
    """Let ``pynvml``, if it is imported, start anew: which library it loaded, its functions and its count of inits."""
    bindings = sys.modules.get("pynvml")
    if bindings is not None:
        vars(bindings).update(nvmlLib=None, _nvmlLib_refcount=0)
        vars(bindings)["_nvmlGetFunctionPointer_cache"].clear()


# The tests' hand on the stand-in driver: what its GPUs are, what befalls them, and what was asked of them.

_MACHINE = -1
_EPOCH_US = 1_700_000_000_000_000
_VOLATILE = (
    "gpu_lock_min_mhz",
    "gpu_lock_max_mhz",
    "memory_lock_min_mhz",
    "memory_lock_max_mhz",
    "power_limit_mw",
    "persistence",
    "requested_profiles",
    "gpu_offset_mhz",
    "mem_offset_mhz",
)


class FaultKind(enum.IntEnum):
    """What a fault does to the call it hits; in the order of ``fake.h``.

    REFUSE returns the code and does nothing; LATE does it and returns the code all the same; IGNORE returns success and
    does nothing; SKEW takes ``value`` off what was asked (driver's units); OVERWRITE sets the power limit to ``value``
    mW as another writer would, right after; REORDER reverses the order of the GPUs before a reading call; DIE_BEFORE
    and DIE_AFTER kill the calling process with SIGKILL around the change; LOSE lets the GPU fall off the bus, for
    good, as NVML's reference describes NVML_ERROR_GPU_IS_LOST.
    """

    REFUSE = 0
    LATE = 1
    IGNORE = 2
    SKEW = 3
    OVERWRITE = 4
    REORDER = 5
    DIE_BEFORE = 6
    DIE_AFTER = 7
    LOSE = 8


@dataclass(frozen=True)
class LoggedCall:
    """One call that wanted to change a GPU.

    Args:
        pid: The process that made it.
        call: The driver's name of it.
        uuid: The GPU, or "" where the handle was none.
        arguments: What was asked, in the driver's units; profiles as (operation, mask).
        code: What it returned; -1 where the process died before.
        note: What fault it met, "foreign" for another program's write, else "".
    """

    pid: int
    call: str
    uuid: str
    arguments: tuple[int, ...]
    code: int
    note: str


class FakeTime:
    """A clock whose sleep moves the stand-in's time, so that its counters advance without waiting."""

    def __init__(self, fake: "FakeNvml") -> None:
        self._fake = fake

    def now(self) -> float:
        """Return the stand-in's time in seconds."""
        return self._fake.now_s

    def sleep(self, duration_s: float) -> None:
        """Move the stand-in's time on by ``duration_s`` seconds."""
        self._fake.advance(max(0.0, duration_s))


class FakeNvml:
    """A machine with NVIDIA GPUs that are not there; a context manager.

    Args:
        folder: Where its state and log are kept; made if missing, its state replaced.
        gpus: Names in ``MODELS``, or models, at most 8, in slot order.
        frozen: Whether time stands still but for ``advance`` (and ``tick_us`` of the machine per call).
        library: A build of the stand-in; by default this process's own.

    Raises:
        DeviceError: If it cannot be built or loaded, or the folder not written.
        UnknownName: If a model is unknown.
    """

    def __init__(
        self,
        folder: Path,
        gpus: Iterable[str | GpuModel] = ("a100",),
        frozen: bool = False,
        library: Path | None = None,
    ) -> None:
        self.folder = folder
        self.models = tuple(model(gpu) if isinstance(gpu, str) else gpu for gpu in gpus)
        self.path = library or built()
        self._folder = os.fsencode(folder.absolute())
        self._library = load(self.path)
        self._outside: dict[str, str | None] = {}
        self._moving = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "log.jsonl").unlink(missing_ok=True)
        self._check(self._library.fake_create(self._folder), f"cannot write {folder}")
        self._describe(frozen)

    def _describe(self, frozen: bool) -> None:
        self.set_machine(gpu_count=len(self.models), privileged=1, generation=1, epoch_us=_EPOCH_US)
        self.set_machine(frozen_us=1_000_000_000 if frozen else 0)
        self.set_text(_MACHINE, driver_version="999.0.stand-in", nvml_version="13.999.0.stand-in")
        self.reorder(range(len(self.models)))
        for slot, gpu in enumerate(self.models):
            self._describe_gpu(slot, gpu)

    def _describe_gpu(self, slot: int, gpu: GpuModel) -> None:
        usual_mw = gpu.limit_default_mw or gpu.limit_max_mw
        self.set(slot, **{**gpu.numbers, "limit_default_mw": usual_mw, "power_limit_mw": usual_mw})
        self.set_text(slot, name=gpu.name, uuid=self.uuid(slot), bus_id=f"00000000:{slot + 1:02X}:00.0")
        self.set_text(slot, serial=f"13200000000{slot:02d}", vbios="00.00.00.00.01")
        for memory_mhz, clocks_mhz in gpu.clocks_mhz:
            table = (ctypes.c_int64 * len(clocks_mhz))(*clocks_mhz)
            code = self._library.fake_add_clocks(self._folder, slot, memory_mhz, table, len(clocks_mhz))
            self._check(code, f"{gpu.name} has too many clocks")
        self.gpu_clock_mhz(slot)

    # Where it is found

    def environment(self) -> dict[str, str]:
        """Return what a child process needs in its environment to find the stand-in under the driver's name."""
        paths = [str(self.path.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        return {"POLYTHROTTLE_FAKE_NVML": str(self.folder.absolute()), "LD_LIBRARY_PATH": ":".join(paths)}

    def __enter__(self) -> Self:
        added = self.environment()
        self._outside = {name: os.environ.get(name) for name in added}
        os.environ.update(added)
        forget_bindings()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, value in self._outside.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        forget_bindings()
        self._library.fake_forget()

    # What it is told

    def uuid(self, slot: int) -> str:
        """Return the UUID of a slot's GPU, which no reordering changes."""
        return f"GPU-0000000{slot}-fa4e-0000-0000-{self.models[slot].device_id:012x}"

    def set(self, slot: int, **numbers: int) -> None:
        """Set numbers of a GPU by their names in ``fake.h``, past permission, faults and log.

        Often used: load_permille (0 idle to 1000 busy), outer_limit_mw (a cap from outside the driver), ceiling_mhz (a
        clock it cannot pass), forced_reasons (event bits), forced_temperature_c, settle_us (how long a lock takes to
        hold), lost, reset_required, blank (1 power, 2 energy, 4 temperature, 8 clocks), energy_stuck,
        mig_enabled, any has_ flag.

        Raises:
            UnknownName: If there is no such number or slot.
        """
        for name, value in numbers.items():
            code = self._library.fake_set(self._folder, slot, name.encode(), value)
            if code or slot >= len(self.models):
                raise UnknownName(f"number of slot {slot}", name, ())

    def set_machine(self, **numbers: int) -> None:
        """Set numbers of the driver: privileged, init_code, refuse_off_table, forget_without_persistence, tick_us, ...

        Raises:
            UnknownName: If there is no such number.
        """
        for name, value in numbers.items():
            if self._library.fake_set(self._folder, _MACHINE, name.encode(), value):
                raise UnknownName("number of the driver", name, ())

    def set_text(self, slot: int, **texts: str) -> None:
        """Set texts of a GPU (name, uuid, serial, vbios, bus_id), or for slot -1 the driver's versions.

        Raises:
            UnknownName: If there is no such text.
        """
        for name, value in texts.items():
            if self._library.fake_set_text(self._folder, slot, name.encode(), value.encode()):
                raise UnknownName("text", name, ())

    def reorder(self, slots: Iterable[int]) -> None:
        """Let index 0, 1, ... be these slots from now on."""
        order = [*slots]
        table = (ctypes.c_int64 * 8)(*order)
        self._check(self._library.fake_set_order(self._folder, table), "no state")

    def add_process(self, slot: int, pid: int, used_bytes: int) -> None:
        """Let a process be seen computing on a GPU."""
        self._check(self._library.fake_add_process(self._folder, slot, pid, used_bytes), "too many processes")

    def fail(
        self,
        call: str,
        code: int = 999,
        kind: FaultKind = FaultKind.REFUSE,
        skip: int = 0,
        times: int = 0,
        slot: int | None = None,
        value: int = 0,
    ) -> None:
        """Plan a fault.

        Args:
            call: The driver's name of the call, "nvmlInit", or "*" for any call that changes a GPU.
            code: What the call returns (REFUSE and LATE).
            kind: What happens.
            skip: How many matching calls pass before.
            times: How many calls it hits after that; 0 for all.
            slot: The GPU it is confined to, or None.
            value: See FaultKind.

        Raises:
            UnknownName: If the stand-in has no such call.
            DeviceError: If there are too many faults.
        """
        where = _MACHINE if slot is None else slot
        planned = self._library.fake_add_fault(self._folder, self._symbol(call), where, skip, times, kind, code, value)
        self._check(planned, "more faults than the stand-in can keep")

    def _symbol(self, call: str) -> bytes:
        for name in (call, f"{call}_v2", f"{call}_v3"):
            if name == "*" or hasattr(self._library, name):
                return name.encode()
        raise UnknownName("NVML call", call, ())

    def clear_faults(self) -> None:
        """Forget every planned fault."""
        self._check(self._library.fake_clear_faults(self._folder), "no state")

    def reload_driver(self, invalidate: bool = True) -> None:
        """Put back locks, limits and counters as a driver reload does; handles of before are lost if it invalidates."""
        self._check(self._library.fake_reload(self._folder, int(invalidate)), "no state")

    def foreign(self, slot: int, **numbers: int) -> None:
        """Write a GPU's numbers as another program would: logged as "foreign"."""
        self.set(slot, **numbers)
        for name, value in numbers.items():
            self._library.fake_log(self._folder, slot, name.encode(), str(value).encode())

    # Time

    @property
    def now_s(self) -> float:
        """The stand-in's time in seconds."""
        return float(self._library.fake_time_us(self._folder)) / 1e6

    def advance(self, duration_s: float) -> None:
        """Move the stand-in's time on by ``duration_s`` seconds."""
        with self._moving:
            self.set_machine(shift_us=self.get_machine("shift_us") + round(duration_s * 1e6))

    def clock(self) -> FakeTime:
        """Return a clock that runs on the stand-in's time and moves it by sleeping."""
        return FakeTime(self)

    # What it shows

    def _get(self, slot: int, name: str) -> int:
        value = ctypes.c_int64()
        if self._library.fake_get(self._folder, slot, name.encode(), ctypes.byref(value)):
            raise UnknownName(f"number of slot {slot}", name, ())
        return value.value

    def get(self, slot: int, name: str) -> int:
        """Return a number of a GPU by its name in ``fake.h``.

        Raises:
            UnknownName: If there is no such number.
        """
        return self._get(slot, name)

    def get_machine(self, name: str) -> int:
        """Return a number of the driver by its name in ``fake.h``.

        Raises:
            UnknownName: If there is no such number.
        """
        return self._get(_MACHINE, name)

    def gpu_clock_mhz(self, slot: int) -> int:
        """Return the GPU clock that runs now, past the driver."""
        return int(self._library.fake_now(self._folder, slot, 0))

    def memory_clock_mhz(self, slot: int) -> int:
        """Return the memory clock that runs now, past the driver."""
        return int(self._library.fake_now(self._folder, slot, 1))

    def power_mw(self, slot: int) -> int:
        """Return the power drawn now, past the driver and its averaging."""
        return int(self._library.fake_now(self._folder, slot, 2))

    def snapshot(self) -> dict[str, dict[str, int]]:
        """Return, by UUID, all that a driver's caller can change and that stays: to compare before and after."""
        slots = range(len(self.models))
        return {self.uuid(slot): {name: self._get(slot, name) for name in _VOLATILE} for slot in slots}

    def log(self) -> Sequence[LoggedCall]:
        """Return every call that wanted to change a GPU, from any process, in order."""
        path = self.folder / "log.jsonl"
        if path.exists():
            lines = [json.loads(line) for line in path.read_text().splitlines()]
        else:
            lines = []
        return [LoggedCall(**{**line, "arguments": tuple(line["arguments"])}) for line in lines]

    @staticmethod
    def _check(code: int, trouble: str) -> None:
        if code:
            raise DeviceError(f"the stand-in NVIDIA driver: {trouble}")
