"""Where the catalogue's files are: beside the package in a checkout, inside it in an installed wheel."""

from collections.abc import Iterator
from pathlib import Path

from polythrottle.catalog.archives import SUFFIXES
from polythrottle.errors import UnknownName

_PACKAGE = Path(__file__).resolve().parent.parent


def catalogue_dir(kind: str) -> Path:
    """Return the folder of one kind of catalogue file: ``devices`` or ``profiles/workloads``."""
    installed = _PACKAGE / "shipped" / kind
    return installed if installed.is_dir() else _PACKAGE.parent / kind


def names(kind: str) -> Iterator[str]:
    """Yield the names of all catalogue files of one kind, sorted."""
    return (path.stem for path in sorted(catalogue_dir(kind).glob("*.toml")))


def locate(kind: str, noun: str, name: str) -> Path:
    """Return the file that a name in the catalogue, or a path ending in ``.toml`` or ``.tar.gz``, means.

    Raises:
        UnknownName: If there is no such file; names the nearest.
    """
    own = name.endswith((".toml", *SUFFIXES))
    path = Path(name) if own else catalogue_dir(kind) / f"{name}.toml"
    if not path.is_file() or (path.name != name and "/" in name and not own):
        raise UnknownName(noun, name, names(kind))
    return path
