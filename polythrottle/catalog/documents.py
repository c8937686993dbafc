"""Files of the catalogue: where they are, and archives that strangers send."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, cast

from polythrottle.domain.backports import removeprefix
from polythrottle.domain.errors import BadFile, StorageError, UnknownName
from polythrottle.storage.documents import TomlTable
from polythrottle.storage.untrusted import check_plain

if TYPE_CHECKING:
    import gzip
    import tarfile

# Archives that strangers send: read so that nothing in them can reach beyond the folder they are laid in.
#
# An archive is a gzipped tar of plain files, and of links that stay inside it. Everything else is refused as a whole:
# paths that lead out, links that lead out or that another member passes through, devices, sparse files, doubles, and
# whatever unpacks to more than a board can hold. What unpacks is loaded with the first archive: the daemon reads
# none.

SUFFIXES = (".tar.gz", ".tgz")
MOST_MEMBERS = 6_000
MOST_BYTES = 64_000_000
_MOST_PACKED = 16_000_000
_MOST_NAME = 1_000
_MOST_PART = 255


@dataclass(frozen=True)
class Member:
    """One file or link of an archive.

    Args:
        content: What it holds; empty for a link.
        mode: Its permission bits.
        link: Where it leads, relative to its own folder; None for a file.
    """

    content: bytes = b""
    mode: int = 0o644
    link: str | None = None


class _Bounded:
    """A stream that ends with an error once more has come out of it than anything honest holds."""

    def __init__(self, stream: gzip.GzipFile) -> None:
        self._stream = stream
        self._left = MOST_BYTES

    def read(self, size: int) -> bytes:
        """Return up to ``size`` bytes.

        Raises:
            ValueError: If more than `MOST_BYTES` have come out by then.
        """
        data = self._stream.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise ValueError(f"it unpacks to more than {MOST_BYTES // 1_000_000} MB")
        return data


def is_archive(name: str) -> bool:
    """Say whether a name is that of an archive."""
    return name.endswith(SUFFIXES)


def read_archive(path: Path) -> Mapping[str, Member]:
    """Return everything in an archive, by path; safe to lay below any folder.

    Raises:
        BadFile: If it cannot be read, is no archive, or holds what no snapshot holds; says what.
    """
    import gzip
    import tarfile
    import zlib

    # First, for to open a pipe waits until somebody writes to it.
    check_plain(path)
    try:
        if path.stat().st_size > _MOST_PACKED:
            raise ValueError(f"it is larger than {_MOST_PACKED // 1_000_000} MB")
        members = dict(_members(path))
        if not members:
            raise ValueError("it holds nothing")
        _check_links(members)
        return members
    # A damaged archive raises any of them, depending on which byte it is.
    except (OSError, ValueError, EOFError, zlib.error, tarfile.TarError, OverflowError) as err:
        reason = err.strerror if isinstance(err, OSError) and err.strerror else err
        if isinstance(err, gzip.BadGzipFile):
            reason = "it is not gzipped"
        raise BadFile(
            f"{path} is not an archive of a board that can be opened: {' '.join(str(reason).split())}"
        ) from err


def read_member(path: Path, name: str) -> str:
    """Return the text of one file in an archive.

    Raises:
        BadFile: If the archive cannot be opened, or there is no such text in it.
    """
    member = read_archive(path).get(name)
    if member is None or member.link is not None:
        raise BadFile(f"{path} holds no {name}")
    try:
        return member.content.decode()
    except UnicodeDecodeError as err:
        raise BadFile(f"{path}: {name} is not text: {err.reason}") from err


def _members(path: Path) -> Iterator[tuple[str, Member]]:
    import gzip
    import tarfile

    names: set[str] = set()
    # As a stream ("r|"): `_Bounded` counts what passes once, and could not if the reader went back to unpack anew.
    with gzip.open(path) as packed, tarfile.open(fileobj=cast("IO[bytes]", _Bounded(packed)), mode="r|") as tar:
        for info in tar:
            name = _checked(info.name)
            if info.isdir():
                continue
            if name == ".":
                raise ValueError("it holds a file without a name")
            if name in names or len(names) >= MOST_MEMBERS:
                raise ValueError(f"it holds {name!r} twice" if name in names else f"it holds over {MOST_MEMBERS} files")
            names.add(name)
            yield name, _member(tar, info, name)


def _member(tar: tarfile.TarFile, info: tarfile.TarInfo, name: str) -> Member:
    import tarfile

    if info.type == tarfile.SYMTYPE:
        return Member(link=info.linkname)
    # By its type: `isreg` is true of sparse and of contiguous files as well.
    if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or info.issparse():
        raise ValueError(f"{name!r} is neither a plain file nor a link within the archive")
    stream = tar.extractfile(info)
    content = stream.read() if stream is not None else b""
    if len(content) != info.size:
        raise ValueError(f"{name!r} is cut short")
    # Without the bits for setuid, setgid and sticky: who unpacks this may be root.
    return Member(content, info.mode & 0o777)


def _checked(name: str) -> str:
    name = removeprefix(name, "./").rstrip("/") or "."
    parts = PurePosixPath(name).parts
    # In bytes, as file systems count them (NAME_MAX is 255); what cannot be encoded counts all the same.
    long = len(name) > _MOST_NAME or any(len(part.encode(errors="replace")) > _MOST_PART for part in parts)
    # Printable only: names end up in messages, where control characters would steer the terminal.
    if name.startswith("/") or ".." in parts or long or not name.isprintable():
        raise ValueError(f"{name[:80]!r} leads out of the archive or is no name")
    return str(PurePosixPath(name))


def _check_links(members: Mapping[str, Member]) -> None:
    """Raise ValueError if a link leads out, or if a member lies below one or below a file."""
    for name, member in members.items():
        for parent in PurePosixPath(name).parents:
            if str(parent) in members:
                raise ValueError(f"{name!r} lies below {str(parent)!r}, which is no folder")
        if member.link is not None and not _stays(name, member.link):
            raise ValueError(f"{name!r} is a link that leads out of the archive")


def _stays(name: str, target: str) -> bool:
    """Say whether a link stays inside: as many steps up as there are folders, then only down.

    A step up after one down could leave through another link.
    """
    parts = PurePosixPath(target).parts
    up = len(parts) - len(tuple(_after_ups(parts)))
    inside = up <= len(PurePosixPath(name).parts) - 1
    return bool(parts) and not target.startswith("/") and inside and ".." not in parts[up:] and target.isprintable()


def _after_ups(parts: tuple[str, ...]) -> Iterator[str]:
    begun = False
    for part in parts:
        begun = begun or part != ".."
        if begun:
            yield part


# Where the catalogue's files are: beside the package in a checkout, inside it in an installed wheel.

_PACKAGE = Path(__file__).resolve().parent.parent


def catalogue_dir(kind: str) -> Path:
    """Return the folder of one kind of catalogue file: ``devices`` or ``profiles/workloads``."""
    installed = _PACKAGE / "shipped" / kind
    if installed.is_dir():
        return installed
    return _PACKAGE.parent / kind


def packaging_dir() -> Path:
    """Return the folder of what is installed for systemd: inside an installed wheel, else beside the package.

    Raises:
        StorageError: If there is none.
    """
    for folder in (_PACKAGE / "packaging", _PACKAGE.parent / "packaging"):
        if (folder / "install-units").is_file():
            return folder
    raise StorageError("this installation lacks packaging/install-units; take it from the source of this version")


def names(kind: str) -> Iterator[str]:
    """Yield the names of all catalogue files of one kind, sorted."""
    return (path.stem for path in sorted(catalogue_dir(kind).glob("*.toml")))


def locate(kind: str, noun: str, name: str) -> Path:
    """Return the file that a name in the catalogue, or a path ending in ``.toml`` or ``.tar.gz``, means.

    Raises:
        UnknownName: If there is no such file; names the nearest.
    """
    own = name.endswith((".toml", *SUFFIXES))
    if own:
        path = Path(name)
    else:
        path = catalogue_dir(kind) / f"{name}.toml"
    # A name is no path: `../x` would lead out of the catalogue.
    if not path.is_file() or (path.name != name and "/" in name and not own):
        raise UnknownName(noun, name, names(kind))
    return path


def read_document(file: Path) -> TomlTable:
    """Return the table in a file of the catalogue; of a snapshot's archive, its ``board.toml``.

    Raises:
        BadFile: If it cannot be read or is not TOML.
    """
    if is_archive(file.name):
        return TomlTable.of_text(file, read_member(file, "board.toml").encode())
    return TomlTable.of_file(file)
