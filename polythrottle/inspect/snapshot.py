"""Snapshots: a board's files in one archive, without what identifies its owner, and laid out again as a tree."""

import gzip
import io
import json
import os
import platform
import pwd
import re
import tarfile
from base64 import b64decode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from polythrottle.backends import DeviceURI, open_device
from polythrottle.backends.meters import unmetered
from polythrottle.backends.ssh import SshDevice
from polythrottle.catalog.documents import Member, read_archive, read_member
from polythrottle.domain.errors import BadFile, InvalidInput, StorageError
from polythrottle.domain.ports import Device, findings_of
from polythrottle.domain.space import SearchSpace
from polythrottle.inspect.board_record import document, record_of
from polythrottle.inspect.descriptions import simulated_board
from polythrottle.inspect.tree_files import Collection, collect
from polythrottle.storage.atomic_file import open_replacement, temporary_folder
from polythrottle.storage.identity import identity_of, without_options
from polythrottle.storage.untrusted import MALFORMED

# Writes snapshot archives and lays them out: sorted, without times or owners, so that one board gives one archive.


def write(path: Path, members: Mapping[str, Member]) -> int:
    """Write an archive in one step, so that no half of one is ever there; return its size in bytes.

    Raises:
        StorageError: If it cannot be written.
    """
    data = packed(members)
    try:
        with open_replacement(path, mode=None) as file:
            file.write(data)
    except OSError as err:
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
                info.type = tarfile.SYMTYPE
                info.linkname = member.link
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

    Raises:
        BadFile: If it does not say what device it is of.
    """
    try:
        device = json.loads(read_member(path, "snapshot.json"))["device"]
        scheme = device.partition(":")[0]
    except MALFORMED as err:
        raise BadFile(f"{path}: snapshot.json does not say what device it is of") from err
    if scheme in ("jetson", "cpu"):
        return f"{scheme}?root={folder}"
    return ""


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


# Takes out what tells one machine and its people from others: serial numbers, UUIDs, MACs, names of hosts and users.
#
# The same thing is replaced by the same stand-in everywhere, so that what belonged together still does.

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
        "root",
        "daemon",
        "nobody",
        "user",
        "admin",
        "ubuntu",
        "debian",
        "localhost",
        "host",
        "linux",
        "systemd",
        "nvidia",
        "jetson",
        "tegra",
        "orin",
        "xavier",
        "thor",
        "nano",
        "gpu",
        "cpu",
        "sys",
        "proc",
        "video",
        "audio",
        "render",
        "docker",
    }
)
_FIRST_USER_UID = 1000  # below it are a system's own accounts (Debian policy 9.2.2), which name nobody
GONE = "scrubbed"


class Scrubber:
    """Replaces what identifies, consistently over everything it is given.

    Args:
        names: Of hosts and users, to be taken out wherever they stand as a word of their own.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        personal = {name for name in names if len(name) > 1 and name.lower() not in _COMMON and not name.isdigit()}
        words = "|".join(re.escape(name) for name in sorted(personal, key=len, reverse=True))
        self._names = re.compile(rf"(?<![A-Za-z0-9])(?:{words})(?![A-Za-z0-9])", re.IGNORECASE) if personal else None
        self._seen: dict[str, dict[str, int]] = {}

    def text(self, text: str) -> str:
        """Return a text without what identifies."""
        text = self.ids(text)
        text = _SERIAL.sub(lambda match: match[1] + GONE, text)
        text = _HOME.sub(lambda match: f"{match[1]}user", text)
        if self._names is None:
            return text
        return self._names.sub(self._stand_in, text)

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
    people = {each.pw_name for each in pwd.getpwall() if each.pw_uid >= _FIRST_USER_UID or each.pw_uid == os.getuid()}
    users = {os.environ.get(name, "") for name in ("USER", "LOGNAME", "SUDO_USER")}
    host = platform.node()
    return frozenset(name for name in (*people, *users, host, host.partition(".")[0]) if name)


# Takes a snapshot of a device: reads, scrubs, describes; writes nothing but the archive.

VERSION = 1
_SYSTEM = (
    "proc/device-tree/model",
    "proc/device-tree/compatible",
    "proc/driver/nvidia/version",
    "etc/os-release",
    "etc/nv_tegra_release",
    "etc/nvpmodel.conf",
    "var/lib/nvpmodel/status",
    "proc/sys/kernel/osrelease",
    "sys/module/nvidia/version",
    "sys/devices/virtual/dmi/id/product_name",
)


@runtime_checkable
class Filed(Protocol):
    """A device that can name the files it is made of."""

    @property
    def files(self) -> tuple[str, ...]:
        """Every file it reads or may write."""


@dataclass(frozen=True)
class Snapshot:
    """A device as it was found.

    Args:
        title: Its name.
        members: The archive's files and links, scrubbed.
        unread: What could not be read, and why.
        simulation: How its simulated board came about, or why there is none.
    """

    title: str
    members: Mapping[str, Member]
    unread: Mapping[str, str] = field(default_factory=dict)
    simulation: str = ""

    @property
    def opens_as_board(self) -> bool:
        """Whether ``sim:`` can open it."""
        return "board.toml" in self.members

    def write(self, path: Path) -> int:
        """Write the archive and return its size in bytes.

        Raises:
            StorageError: If it cannot be written.
            InvalidInput: If the name does not say that it is an archive.
        """
        if not path.name.endswith(".tar.gz"):
            raise InvalidInput(f"a snapshot is a .tar.gz archive; {path.name!r} is not the name of one")
        return write(path, self.members)


def take(device: Device) -> Snapshot:
    """Return the snapshot of a device; nothing is written to it, and any user may take one.

    Args:
        device: Not entered.

    Raises:
        InvalidInput: If the device is itself simulated or recorded: its file says all there is.
    """
    device = unmetered(device)
    if isinstance(device, SshDevice):
        return _taken_there(device)
    uri = DeviceURI.parse(device.uri)
    if uri.scheme in ("sim", "replay"):
        raise InvalidInput(f"{device.uri} is no hardware; its file says all there is to say about it")
    root = Path(uri.options.get("root", "/")).resolve()
    files = device.files if isinstance(device, Filed) else ()
    found = collect(root, [*files, *(str(root / name) for name in _SYSTEM)])
    scrubber = Scrubber(_names(root, found))
    # Scrubbed in one fixed order, so that the same board always gets the same stand-ins.
    members = _scrubbed_tree(found, scrubber)
    identity = identity_of(device)
    title = scrubber.text(next((identity[key] for key in ("board", "name", "cpu") if key in identity), uri.scheme))
    entry, simulation = _described(device, uri.scheme, title, members)
    unread = {scrubber.text(path): scrubber.text(reason) for path, reason in sorted(found.unread.items())}
    about = {**_about(device, root), "identity": dict(identity), "unread": unread, "simulation": simulation}
    members["snapshot.json"] = Member(_json(scrubber, about))
    if records := record_of(device):
        members["record.json"] = Member(_json(scrubber, document(records)))
    if tables := _tables(device):
        members["tables.json"] = Member(_json(scrubber, tables))
    if entry:
        members["board.toml"] = Member(entry)
    return Snapshot(title, members, unread, simulation)


def _taken_there(device: SshDevice) -> Snapshot:
    """Return the snapshot of a board over SSH: of a copy of the files that tell what it is, made here for the moment.

    Raises:
        InvalidInput: If the device has no files that tell it.
        PolythrottleError: If the board cannot be asked.
    """
    if not device.there.startswith("jetson"):
        raise InvalidInput(f"{device.uri}: a snapshot over SSH is of a Jetson's files; take it on the machine itself")
    found = device.board.files(_SYSTEM)
    members = {
        place: Member(b64decode(content), mode & 0o777 | 0o400) for place, (content, mode) in found["files"].items()
    }
    links = {link: Member(link=os.path.relpath(goal, os.path.dirname(link))) for link, goal in found["links"].items()}
    with temporary_folder() as folder:
        packed_there = Path(folder, "there.tar.gz")
        packed_there.write_bytes(packed({**links, **members}))  # read as a stranger's, whose paths may lead anywhere
        taken = take(open_device(f"jetson?root={unpack(packed_there, Path(folder, 'tree'))}"))
    about = json.loads(taken.members["snapshot.json"].content)
    about |= {"energy_kind": str(device.energy_kind), "boundary": device.boundary, "unread": found["unread"]}
    members = {**taken.members, "snapshot.json": Member((json.dumps(about, indent=1, sort_keys=True) + "\n").encode())}
    return replace(taken, members=members, unread=found["unread"])


def _described(device: Device, scheme: str, title: str, members: Mapping[str, Member]) -> tuple[bytes, str]:
    """Return the board as an entry of devices/, empty if it cannot be simulated, and how it came about."""
    if scheme != "jetson":
        return _card(device, title)
    # From the copy, which the user who takes it may write, so that its knobs do not hang on who that is.
    with temporary_folder() as folder:
        lay(folder, members)
        return simulated_board(open_device(f"jetson?root={folder}"), title)


def _card(device: Device, title: str) -> tuple[bytes, str]:
    """Return a card as a simulated board; of a group the first of its GPUs."""
    from polythrottle.backends.nvml import NvmlGroup

    if not isinstance(device, NvmlGroup):
        return simulated_board(device, title)
    entry, how = simulated_board(device.members[0], device.members[0].title)
    return entry, f"one GPU of {len(device.members)}: {how}"


def _tables(device: Device) -> Mapping[str, Any]:
    """Return what a driver says that has no files: every knob with its levels, and which clocks go together."""
    from polythrottle.backends.nvml import NvmlDevice, NvmlGroup

    if not isinstance(device, NvmlDevice | NvmlGroup):
        return {}
    dials = device.dials
    knobs = {
        name: {"levels": list(dial.texts), "default": dial.default, "off": dial.off}
        for name, dial in dials.knobs.items()
    }
    return {
        "knobs": knobs,
        "gpu_clocks_by_memory_clock_hz": {str(hz): list(row) for hz, row in dials.clocks_hz.items()},
    }


def _names(root: Path, found: Collection) -> Iterable[str]:
    """Return the names of this machine, of the tree's and of their people, unless the tree's own paths use the word."""
    words = {word.lower() for path in (*found.files, *found.links) for word in re.split(r"[^A-Za-z0-9]+", path)}
    return {name for name in names_here() | _names_of(root) if name.lower() not in words}


def _names_of(root: Path) -> frozenset[str]:
    kept = collect(root, [str(root / name) for name in ("etc/hostname", "etc/passwd")]).files
    texts = {path: each.content.decode("utf-8", "replace") for path, each in kept.items()}
    rows = [line.split(":") for line in texts.get("etc/passwd", "").splitlines()]
    people = {row[0] for row in rows if len(row) > 2 and row[2].isdecimal() and int(row[2]) >= _FIRST_USER_UID}
    host = texts.get("etc/hostname", "").strip()
    return frozenset(name for name in (*people, host, host.partition(".")[0]) if name)


def _scrubbed_tree(found: Collection, scrubber: Scrubber) -> dict[str, Member]:
    members = {
        scrubber.ids(path): Member(scrubber.file(path, kept.content), kept.mode & 0o666 | 0o400)
        for path, kept in sorted(found.files.items())
    }
    for path, target in sorted(found.links.items()):
        link = scrubber.ids(path)
        goal = scrubber.ids(target)
        members.setdefault(link, Member(link=os.path.relpath(goal, os.path.dirname(link))))
    return members


def _about(device: Device, root: Path) -> dict[str, Any]:
    findings = findings_of(device)
    here = str(root) * (root != Path("/"))
    return {
        "version": VERSION,
        "device": without_options(device.uri),
        "energy_kind": str(device.energy_kind),
        "boundary": device.boundary,
        "space": _space(device.space),
        "presets": {name: dict(point) for name, point in device.presets.items()},
        "findings": [
            {
                "subject": each.subject,
                "works": each.works,
                "explanation": each.explanation.replace(here, "") if here else each.explanation,
                "remedy": each.remedy,
            }
            for each in findings
        ],
    }


def _space(space: SearchSpace) -> dict[str, Any]:
    knobs = {knob.name: list(knob.levels) for knob in space.knobs}
    return {"points": len(space), "knobs": knobs, "default": dict(space.default)}


def _json(scrubber: Scrubber, document: Mapping[str, Any]) -> bytes:
    return (json.dumps(_scrubbed(scrubber, document), indent=1, sort_keys=True) + "\n").encode()


def _scrubbed(scrubber: Scrubber, value: Any) -> Any:
    """Return a document with every text in it scrubbed, keys too."""
    if isinstance(value, str):
        return scrubber.text(value)
    if isinstance(value, Mapping):
        texts = ((scrubber.text(str(key)), each) for key, each in value.items())
        return {key: GONE if key == "serial" else _scrubbed(scrubber, each) for key, each in texts}
    if isinstance(value, list | tuple):
        return [_scrubbed(scrubber, each) for each in value]
    return value
