"""The profiles that can be applied: those of the catalogue, the working folder and the daemon's own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polythrottle.catalog.places import catalogue_dir
from polythrottle.catalog.profiles import read_profile
from polythrottle.daemon.web.plain import Schema
from polythrottle.errors import PolythrottleError, UnknownName

_MOST = 500
_TUNED = "profiles/tuned"

PROFILE: Schema = {
    "type": "object",
    "description": "A tuned profile.",
    "properties": {
        "name": {"type": "string"},
        "path": {"type": "string"},
        "device": {"type": ["string", "null"]},
        "workload": {"type": ["string", "null"]},
        "slo": {"type": "array", "items": {"type": "string"}},
        "saving": {"type": ["number", "null"], "description": "Share of the default's energy; null if unknown."},
        "energy_kind": {"type": ["string", "null"]},
        "fault": {"type": ["string", "null"], "description": "Why it cannot be read; null if it can."},
    },
    "required": ["name", "path", "device", "workload", "slo", "saving", "energy_kind", "fault"],
}


class Listing:
    """Profiles by name; a file is read again only when it has changed.

    Args:
        state: The daemon's own folder; None for none.
    """

    def __init__(self, state: Path | None) -> None:
        self._folders = [folder / _TUNED for folder in (state, Path.cwd()) if folder is not None]
        self._known: dict[Path, tuple[tuple[int, int], dict[str, Any]]] = {}

    def profiles(self) -> list[dict[str, Any]]:
        """Return them by name, the daemon's own before the working folder's before the catalogue's."""
        found: dict[str, dict[str, Any]] = {}
        for folder in (*self._folders, catalogue_dir(_TUNED)):
            for path in _files(folder):
                found.setdefault(str(path.relative_to(folder))[:-5], self._shown(path, folder))
        return [found[name] for name in sorted(found)[:_MOST]]

    def find(self, name: str) -> str:
        """Return the path of a profile that is listed by this name; the name itself if none is.

        Raises:
            UnknownName: If no file can have this name.
        """
        folders = (*self._folders, catalogue_dir(_TUNED))
        tried = (Path(name), *(folder / f"{name.removesuffix('.toml')}.toml" for folder in folders))
        try:
            return next((str(path.absolute()) for path in tried if path.is_file()), name)
        except OSError:  # it is too long, or a link to itself
            raise UnknownName("profile", name[:60], [each["name"] for each in self.profiles()]) from None

    def _shown(self, path: Path, folder: Path) -> dict[str, Any]:
        try:
            stat = path.stat()
            mark = (stat.st_mtime_ns, stat.st_size)
        except OSError:
            mark = (0, 0)
        if path not in self._known or self._known[path][0] != mark:
            if len(self._known) >= 2 * _MOST:
                self._known.clear()
            self._known[path] = (mark, _document(str(path.relative_to(folder))[:-5], path))
        return self._known[path][1]


def _files(folder: Path) -> Iterator[Path]:
    try:
        yield from sorted(folder.glob("*/*.toml"))[:_MOST]
    except OSError:
        return


def _document(name: str, path: Path) -> dict[str, Any]:
    found = {"name": name, "path": str(path.absolute())}
    unknown = {"device": None, "workload": None, "slo": (), "saving": None, "energy_kind": None}
    try:
        profile = read_profile(path)
    except PolythrottleError as error:
        return {**found, **unknown, "fault": str(error)}
    return {
        **found,
        "device": profile.device,
        "workload": profile.workload,
        "slo": profile.slo,
        "saving": profile.saving_fraction,
        "energy_kind": profile.measurement.energy_kind,
        "fault": None,
    }
