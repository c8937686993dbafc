"""Takes out what tells one machine and its people from others: serial numbers, UUIDs, MACs, names of hosts and users.

The same thing is replaced by the same stand-in everywhere, so that what belonged together still does.
"""

import os
import platform
import pwd
import re
from collections.abc import Iterable

_UUID = re.compile(r"\b((?:GPU|MIG)-)?[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b")
_MAC = re.compile(r"\b(?:[0-9a-fA-F]{2}[:-]){5}[0-9a-fA-F]{2}\b")
_SERIAL = re.compile(
    r"((?:serial|ecid|chip[ _-]?id|unique[ _-]?id|machine[ _-]?id|asset[ _-]?tag)(?:[ _-]?(?:number|no|num))?"
    r"\"?[ \t]*[:=][ \t]*\"?)([^\s\",;]+)",
    re.IGNORECASE,
)
_HOME = re.compile(r"(/home/|/Users/|/media/|/run/user/)([^/\s\"':]+)")
_SECRET_NAME = re.compile(r"serial|uuid|unique_id|machine-id|hostname|ecid|asset_tag", re.IGNORECASE)
# Names that identify nobody, and that are words of drivers and paths too.
_COMMON = frozenset(
    {
        *("root", "daemon", "nobody", "user", "admin", "ubuntu", "debian", "localhost", "host", "linux", "systemd"),
        *("nvidia", "jetson", "tegra", "orin", "xavier", "thor", "nano", "gpu", "cpu", "sys", "proc"),
        *("video", "audio", "render", "docker"),
    }
)
_ORDINARY_UID = 1000
GONE = "scrubbed"


class Scrubber:
    """Replaces what identifies, consistently over everything it is given.

    Args:
        names: Of hosts and users, to be taken out wherever they stand as a word of their own.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        told = {name for name in names if len(name) > 1 and name.lower() not in _COMMON and not name.isdigit()}
        words = "|".join(re.escape(name) for name in sorted(told, key=len, reverse=True))
        self._names = re.compile(rf"(?<![A-Za-z0-9])(?:{words})(?![A-Za-z0-9])", re.IGNORECASE) if told else None
        self._seen: dict[str, dict[str, int]] = {}

    def text(self, text: str) -> str:
        """Return a text without what identifies."""
        text = self.ids(text)
        text = _SERIAL.sub(lambda match: match[1] + GONE, text)
        text = _HOME.sub(lambda match: f"{match[1]}user", text)
        return self._names.sub(self._stand_in, text) if self._names else text

    def ids(self, text: str) -> str:
        """Return a text, such as a path, without UUIDs and MAC addresses."""
        text = _UUID.sub(lambda match: (match[1] or "") + self._uuid(match[0]), text)
        return _MAC.sub(lambda match: self._mac(match[0]), text)

    def file(self, path: str, content: bytes) -> bytes:
        """Return what a file holds without what identifies; all of it, if the file's name says that it identifies."""
        if _SECRET_NAME.search(path.rpartition("/")[2]):
            return GONE.encode() + b"\n"
        # Latin-1 keeps every byte that is not touched, zero bytes of the device tree among them.
        return self.text(content.decode("latin-1")).encode("latin-1")

    def _uuid(self, text: str) -> str:
        return f"00000000-0000-0000-0000-{self._number('uuid', text[-36:].lower()):012d}"

    def _mac(self, text: str) -> str:
        number = self._number("mac", text.lower().replace("-", ":"))
        return f"02:00:00:00:{number >> 8:02x}:{number & 255:02x}"

    def _stand_in(self, match: re.Match[str]) -> str:
        return f"name{self._number('name', match[0].lower())}"

    def _number(self, kind: str, text: str) -> int:
        known = self._seen.setdefault(kind, {})
        return known.setdefault(text, len(known) + 1)


def names_here() -> frozenset[str]:
    """Return the names of this machine and of the people who have accounts on it."""
    people = {each.pw_name for each in pwd.getpwall() if each.pw_uid >= _ORDINARY_UID or each.pw_uid == os.getuid()}
    told = {os.environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER")}
    host = platform.node()
    return frozenset(name for name in (*people, *told, host, host.partition(".")[0]) if name)
