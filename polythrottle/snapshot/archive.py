"""Writes snapshot archives and lays them out: sorted, without times or owners, so that one board gives one archive."""

import gzip
import io
import json
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path

from polythrottle.catalog.archives import Member, read_archive, read_member
from polythrottle.errors import BadFile, StorageError


def write(path: Path, members: Mapping[str, Member]) -> int:
    """Write an archive in one step, so that no half of one is ever there; return its size in bytes.

    Raises:
        StorageError: If it cannot be written.
    """
    data = packed(members)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        part.replace(path)
    except OSError as err:
        part.unlink(missing_ok=True)
        raise StorageError(f"cannot write {path}: {err.strerror}") from err
    return len(data)


def packed(members: Mapping[str, Member]) -> bytes:
    """Return the bytes of an archive."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, member in sorted(members.items()):
            info = tarfile.TarInfo(name)
            info.mode = member.mode
            if member.link is not None:
                info.type, info.linkname = tarfile.SYMTYPE, member.link
            info.size = len(member.content)
            tar.addfile(info, io.BytesIO(member.content))
    return gzip.compress(plain.getvalue(), 9, mtime=0)


def unpack(path: Path, folder: Path) -> Path:
    """Lay an archive below a folder, and return that folder; it opens as ``jetson?root=`` or ``cpu?root=``.

    Args:
        path: The archive.
        folder: New or empty.

    Raises:
        BadFile: If the archive is not one of a board; nothing is laid then.
        StorageError: If the folder holds something or cannot be written.
    """
    members = read_archive(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise StorageError(f"{folder} is not empty; name a new folder to unpack {path.name} in")
        lay(folder, members)
    except OSError as err:
        raise StorageError(f"cannot unpack {path.name} in {folder}: {err.strerror}") from err
    return folder


def opened_by(path: Path, folder: Path) -> str:
    """Return the device URI that opens an unpacked archive as a tree; empty if it has no tree.

    Args:
        path: The archive.
        folder: Where it was unpacked.

    Raises:
        BadFile: If it does not say what device it is of.
    """
    try:
        device = json.loads(read_member(path, "snapshot.json"))["device"]
        scheme = device.partition(":")[0]
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise BadFile(f"{path}: snapshot.json does not say what device it is of") from err
    return f"{scheme}?root={folder}" if scheme in ("jetson", "cpu") else ""


def lay(folder: Path, members: Mapping[str, Member]) -> None:
    """Lay members below an empty folder; they must be such as `read_archive` returns.

    Raises:
        OSError: If one cannot be written.
    """
    # Files before links: nothing is ever written through one.
    for name, member in sorted(members.items(), key=lambda each: (each[1].link is not None, each[0])):
        _lay(folder / name, member)


def _lay(path: Path, member: Member) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if member.link is not None:
        path.symlink_to(member.link)
        return
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with os.fdopen(handle, "wb") as file:
        file.write(member.content)
    # Which files may be written belongs to what the tree says; its owner can always read it.
    path.chmod(0o400 | (member.mode & 0o666 if member.mode & 0o222 else member.mode & 0o444))
