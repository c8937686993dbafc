"""Where a job keeps what must outlive every machine: a folder at any URL that fsspec opens, written whole or not.

A file is written beside its name, flushed to disk and renamed; an object store puts an object whole or not at all.
"""

import json
import os
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polythrottle.domain.clock import Clock, SystemClock
from polythrottle.domain.errors import BadFile, InvalidInput, StorageError
from polythrottle.storage.atomic_file import delete_unless_moved, draft_path, move_durably, open_replacement

CLAIM = "controller.json"


class Store:
    """A folder at a URL; names in it are relative, with slashes.

    Args:
        url: A path, or a URL such as ``file:///mnt/jobs/a``, ``memory://a``, ``s3://bucket/a``, ``gs://bucket/a``.

    Raises:
        InvalidInput: If nothing here opens such a URL.
    """

    def __init__(self, url: str) -> None:
        import fsspec  # type: ignore[import-untyped]

        try:
            self._system, root = fsspec.core.url_to_fs(url)
        except ImportError as err:
            raise InvalidInput(f"the store {url!r} needs a package that is not installed: {err}") from err
        except Exception as err:  # whatever a third party's driver makes of a text
            raise InvalidInput(f"the store {url!r} cannot be opened: {err or type(err).__name__}") from err
        self.url = url
        self._root = str(root).rstrip("/")
        protocol = self._system.protocol
        self.is_local = "file" in ((protocol,) if isinstance(protocol, str) else protocol)

    def exists(self) -> bool:
        """Return whether a folder of this machine is there, or a file in its place; elsewhere that is yet to be seen.

        A bucket has no folders before something is in them.
        """
        return not self.is_local or os.path.lexists(self._root)

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Write a file whole or not at all.

        Raises:
            StorageError: If it cannot be written; a former file of the name is as it was.
        """
        if self.is_local:
            self._written(name, lambda path: _put_bytes(path, data))
        else:
            self._written(name, lambda path: self._system.pipe_file(path, bytes(data)))

    def put(self, name: str, source: Path) -> None:
        """Copy a local file there, whole or not at all.

        Raises:
            StorageError: If it cannot be written.
        """
        if self.is_local:
            self._written(name, lambda path: _put_file(path, source))
        else:
            self._written(name, lambda path: self._system.put_file(str(source), path))

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Return a file's content.

        Args:
            name: Of the file.
            start: From which byte on.
            end: Up to which; None for all.

        Raises:
            FileNotFoundError: If there is none of the name.
            StorageError: If the store cannot be reached.
        """
        try:
            return bytes(self._system.cat_file(self._path(name), start=start or None, end=end))
        except FileNotFoundError:
            raise
        except Exception as err:
            why = getattr(err, "strerror", None) or err or type(err).__name__
            raise StorageError(f"the store {self.url} cannot be read: {why}") from err

    def names(self, folder: str = "") -> list[str]:
        """Return the names of the files in a folder, sorted; none if it is not there.

        Raises:
            StorageError: If the store cannot be reached.
        """
        try:
            # fsspec remembers listings, and other machines write here.
            self._system.invalidate_cache()
            paths = self._system.ls(self._path(folder), detail=False)
        except FileNotFoundError:
            return []
        except Exception as err:
            raise StorageError(
                f"the store {self.url} cannot be listed: {getattr(err, 'strerror', None) or err or type(err).__name__}"
            ) from err
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in paths)

    def delete(self, name: str) -> None:
        """Delete a file; one that is not there, or cannot be deleted now, is left: one too many does no harm."""
        try:
            self._system.rm_file(self._path(name))
        except Exception:  # drivers raise what they like
            return

    def _path(self, name: str) -> str:
        if name:
            return f"{self._root}/{name}"
        return self._root

    def _written(self, name: str, writing: Callable[[str], object]) -> None:
        path = self._path(name)
        try:
            self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
            writing(path)
        except Exception as err:  # drivers raise what they like
            raise StorageError(f"the store {self.url} cannot be written: {err or type(err).__name__}") from err


def _put_bytes(path: str, data: bytes | memoryview) -> None:
    with open_replacement(Path(path), mode=None) as file:
        file.write(data)


def _put_file(path: str, source: Path) -> None:
    draft = draft_path(Path(path))
    with delete_unless_moved(draft):
        try:
            os.link(source, draft)  # the same file system: no second copy
        except OSError:
            import shutil

            shutil.copyfile(source, draft)
        move_durably(draft, Path(path))


@dataclass(frozen=True)
class Claim:
    """Who writes to a store: a controller's own name, and a count that rises while it lives.

    Attributes:
        owner: A random name, one for each controller.
        host: Its machine, for people.
        pid: Its process, for people.
        count: How often it has renewed the claim.
        released: Whether it has ended and let the store go.
    """

    owner: str
    host: str
    pid: int
    count: int = 0
    released: bool = False


def read_claim(store: Store) -> Claim | None:
    """Return who holds a store, None if nobody does.

    Raises:
        StorageError: If the store cannot be reached.
        BadFile: If the claim is not one.
    """
    try:
        document = json.loads(store.read(CLAIM))
        # By name: another version may have more to say.
        claim = Claim(**{key: document[key] for key in ("owner", "host", "pid", "count", "released")})
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as err:
        raise BadFile(f"{CLAIM} in {store.url} is no claim of a controller; move it away") from err
    if claim.released:
        return None
    return claim


class Holding:
    """One controller's hold on a store, renewed beside its work; a second controller is refused.

    Nobody's clock is compared with anybody else's: a claim is alive if its count rises while one looks.

    Args:
        store: What to hold.
        clock: Waits between two looks.
        beat_s: Time between two renewals, in seconds.
    """

    def __init__(self, store: Store, clock: Clock | None = None, beat_s: float = 2.0) -> None:
        self._store = store
        self._clock = clock or SystemClock()
        self._beat_s = beat_s
        self._mine = Claim(secrets.token_hex(8), os.uname().nodename, os.getpid())
        self._ended = threading.Event()
        self.lost_to: Claim | None = None

    def take(self) -> None:
        """Take hold of the store.

        Raises:
            ClaimedElsewhere: If a living controller holds it.
            StorageError: If the store cannot be reached.
            BadFile: If a claim there is not one.
        """
        former = read_claim(self._store)
        if former is not None:
            for _ in range(6):  # three beats, looked at twice each
                self._clock.sleep(self._beat_s / 2)
                self._refuse(former, read_claim(self._store))
        self._put(self._mine)
        # Two may have found it free at once: the later one's claim stands, and the earlier one sees it now.
        self._clock.sleep(self._beat_s / 4)
        self._refuse(self._mine, read_claim(self._store))

    def renew(self) -> bool:
        """Renew the claim once, and return whether the store is still held; one out of reach is."""
        try:
            present = read_claim(self._store)
        # A network that fails for a moment is no reason to stop a job: whoever wants the store looks for three beats.
        except (StorageError, BadFile):
            return True
        if present is not None and present.owner != self._mine.owner:
            self.lost_to = present
            return False
        self._mine = Claim(self._mine.owner, self._mine.host, self._mine.pid, self._mine.count + 1)
        try:
            self._put(self._mine)
        except StorageError:
            return True
        return True

    def keep(self, lost: Callable[[str], None]) -> None:
        """Renew the claim until `release`, and tell if another controller took the store; runs in a thread."""
        while not self._ended.wait(self._beat_s):
            if not self.renew() and self.lost_to is not None:
                lost(f"another controller ({_who(self.lost_to)}) took the store {self._store.url}")
                return

    def release(self) -> None:
        """Let the store go."""
        self._ended.set()
        # Else the claim that stands there is another's, who lives.
        if self.lost_to is None:
            mine = self._mine
            try:
                self._put(Claim(mine.owner, mine.host, mine.pid, mine.count, released=True))
            except StorageError:
                return

    def _put(self, claim: Claim) -> None:
        self._store.write(CLAIM, json.dumps(_document(claim)).encode())

    def _refuse(self, known: Claim, present: Claim | None) -> None:
        if present is not None and present != known:
            raise ClaimedElsewhere(
                f"a controller ({_who(present)}) already works on {self._store.url}; "
                "stop it, or give this job another --store"
            )


class ClaimedElsewhere(StorageError):
    """Another controller works on the store."""


def _document(claim: Claim) -> dict[str, Any]:
    return {"v": 1, **claim.__dict__}


def _who(claim: Claim) -> str:
    return f"process {claim.pid} on {claim.host}"
