"""What is carried to a board: the actuator, the backends and the load generator, in one zip for Python 3.8."""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from polythrottle.catalog.documents import catalogue_dir
from polythrottle.domain.errors import DeviceError

_PACKAGE = Path(__file__).resolve().parent.parent
_PATTERNS = (
    "actuation/*.py",
    "actuation/[ds]*/*.py",
    "actuation/client/__init__.py",
    "actuation/client/connection.py",
    "backends/__init__.py",
    "backends/cpu/*.py",
    "backends/device_uri.py",
    "backends/grace_power.py",
    "backends/jetson/*.py",
    "backends/nvml/*.py",
    "backends/on_record.py",
    "backends/power_integrator.py",
    "backends/probe.py",
    "backends/served_devices.py",
    "board/__init__.py",
    "board/far_side.py",
    "board/work_host.py",
    "catalog/__init__.py",
    "catalog/boards.py",
    "catalog/documents.py",
    "catalog/language_models.py",
    "catalog/models.py",
    "domain/__init__.py",
    "domain/arrivals.py",
    "domain/backports.py",
    "domain/clock.py",
    "domain/errors.py",
    "domain/measurement.py",
    "domain/metrics.py",
    "domain/ports.py",
    "domain/problem.py",
    "domain/space.py",
    "domain/study.py",
    "domain/units.py",
    "inspect/__init__.py",
    "inspect/machine.py",
    "inspect/tree_files.py",
    "metering/__init__.py",
    "metering/load.py",
    "metering/window.py",
    "storage/__init__.py",
    "storage/atomic_file.py",
    "storage/documents.py",
    "storage/identity.py",
    "storage/json_lines.py",
    "storage/paths.py",
    "storage/space_codec.py",
    "storage/untrusted.py",
    "workloads/__init__.py",
    "workloads/command.py",
    "workloads/cuda.py",
    "workloads/foreign_calls.py",
    "workloads/inputs.py",
    "workloads/python_callable.py",
    "workloads/trtexec.py",
    "workloads/uris.py",
)
_INIT = '"""The part of polythrottle that is carried to a board."""\n'
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the same files make the same zip


def sources() -> Iterator[tuple[str, Path]]:
    """Yield every file that is carried: its name in the zip, and where it is here."""
    for pattern in _PATTERNS:
        for path in sorted(_PACKAGE.glob(pattern)):
            yield f"polythrottle/{path.relative_to(_PACKAGE).as_posix()}", path
    for path in sorted(catalogue_dir("devices").glob("*.toml")):
        yield f"polythrottle/shipped/devices/{path.name}", path
    yield "pynvml.py", _module("pynvml")
    # Python 3.10 and older have no TOML; that of 3.11 is the package tomli under another name.
    for path in sorted(_module("tomllib" if sys.version_info >= (3, 11) else "tomli").parent.glob("*.py")):
        yield f"tomli/{path.name}", path


@lru_cache(maxsize=1)
def packed() -> bytes:
    """Return the zip.

    Raises:
        DeviceError: If a file of it cannot be read here.
    """
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        archive.writestr(zipfile.ZipInfo("polythrottle/__init__.py", _EPOCH), _INIT)
        for name, path in sources():
            try:
                content = path.read_bytes()
            except OSError as err:
                raise DeviceError(f"cannot carry polythrottle to a board: {path}: {err.strerror}") from err
            info = zipfile.ZipInfo(name, _EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, content)
    return whole.getvalue()


def _module(name: str) -> Path:
    found = find_spec(name)
    if found is None or found.origin is None:
        raise DeviceError(f"cannot carry polythrottle to a board: the package {name} is not installed here")
    return Path(found.origin)
