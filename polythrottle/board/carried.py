"""What is carried to a board over SSH: modules of ours and packages of Python alone, as one zip."""

from __future__ import annotations

import io
import os
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from polythrottle.catalog.documents import catalogue_dir
from polythrottle.domain.errors import DeviceError, InvalidInput
from polythrottle.storage.json_channel import decode, encode

_PACKAGE = Path(__file__).resolve().parent.parent
_INIT = '"""The part of polythrottle that is carried to a board."""\n'
LONGEST = 2_000_000
"""How many bytes a request and its answer may have, where a board is asked once."""
_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Carried:
    """What is carried to a board.

    Args:
        whole: A zip of modules for its Python.
        entry: The one whose ``main`` is called there with a mark, the folder it was unpacked in and the device's URI;
            once it can be spoken to, it writes the mark and ``ready`` in a line.
    """

    whole: bytes
    entry: str


def sources(modules: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """Yield the package's files that are carried: their names in the zip, and where they are here.

    Args:
        modules: By folder, patterns of their names; the catalogue and what reads it and NVML go with them.

    Raises:
        DeviceError: If pynvml or tomli is not installed here.
    """
    for folder, names in modules.items():
        for name in names.split():
            for path in sorted(_PACKAGE.glob(f"{folder}/{name}" if "." in name else f"{folder}/{name}.py")):
                yield f"polythrottle/{path.relative_to(_PACKAGE).as_posix()}", path
    for path in sorted(catalogue_dir("devices").glob("*.toml")):
        yield f"polythrottle/shipped/devices/{path.name}", path
    yield from packages("pynvml")
    # Python 3.10 and older have no TOML; that of 3.11 is the package tomli under another name.
    for path in sorted(_module_file("tomllib" if sys.version_info >= (3, 11) else "tomli").parent.glob("*.py")):
        yield f"tomli/{path.name}", path


def packages(*names: str) -> Iterator[tuple[str, Path]]:
    """Yield the files of other packages, of Python alone, that are carried as they are installed here.

    Raises:
        DeviceError: If one is not.
    """
    for name in names:
        file = _module_file(name)
        if file.stem == name:
            yield file.name, file
            continue
        for path in sorted(file.parent.glob("*.py")):
            yield f"{name}/{path.name}", path


def content_of(files: Mapping[str, Path]) -> dict[str, bytes]:
    """Return what is in files, by their names in the zip.

    Raises:
        DeviceError: If one cannot be read here.
    """
    try:
        held = {name: path.read_bytes() for name, path in files.items()}
    except OSError as err:
        raise DeviceError(f"cannot carry polythrottle to a board: {err.filename}: {err.strerror}") from err
    return {"polythrottle/__init__.py": _INIT.encode(), **held}


def zipped(content: Mapping[str, bytes]) -> bytes:
    """Return a zip."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in content.items():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), data, zipfile.ZIP_DEFLATED)
    return whole.getvalue()


def answer_once(mark: str, folder: str, answer: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> int:
    """On a board, answer one line of the desk by one, and remove what was carried; returns an exit code.

    Args:
        mark: What begins the line that says that this listens.
        folder: Where it was unpacked.
        answer: Returns what is answered to a request.
    """
    try:
        os.write(1, f"{mark} ready\n".encode())
        line = encode(answer(decode(sys.stdin.buffer.readline(LONGEST))))
    except InvalidInput:  # the line was cut before it was asked
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # it was cut meanwhile
        os.write(1, line)
    return 0


def _module_file(name: str) -> Path:
    found = find_spec(name)
    if found is None or found.origin is None:
        raise DeviceError(f"cannot carry polythrottle to a board: the package {name} is not installed here")
    return Path(found.origin)
