"""The compiled stand-in: built once per process with the system's C compiler, and loaded in the driver's place."""

import atexit
import ctypes
import functools
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from polythrottle.errors import DeviceError

SONAME = "libnvidia-ml.so.1"
_SOURCES = Path(__file__).parent
_FLAGS = ("-std=gnu11", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-fvisibility=hidden", "-pthread")


def compiler() -> str | None:
    """Return the C compiler's command, ``$CC`` first, else that of the package ziglang, or None where there is none."""
    for command in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return command
    return f"{shlex.quote(sys.executable)} -m ziglang cc" if importlib.util.find_spec("ziglang") else None


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
    fresh, ready = folder / f"{SONAME}.{os.getpid()}", folder / SONAME
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
    folder = Path(tempfile.mkdtemp(prefix="polythrottle-nvml-"))
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
    text, slot, number = ctypes.c_char_p, ctypes.c_int, ctypes.c_int64
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
