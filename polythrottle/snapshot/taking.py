"""Takes a snapshot of a device: reads, scrubs, describes; writes nothing but the archive."""

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, runtime_checkable

from polythrottle.backends import DeviceURI, open_device
from polythrottle.catalog.archives import Member
from polythrottle.errors import InvalidInput
from polythrottle.identity import identity_of
from polythrottle.ports import Device, Inspectable
from polythrottle.snapshot.archive import lay, write
from polythrottle.snapshot.collect import Collection, collect
from polythrottle.snapshot.scrub import GONE, Scrubber, names_here
from polythrottle.snapshot.simulated import simulated_board
from polythrottle.space import SearchSpace

VERSION = 1
_SYSTEM = (
    *("proc/device-tree/model", "proc/device-tree/compatible", "proc/driver/nvidia/version", "etc/os-release"),
    *("etc/nv_tegra_release", "etc/nvpmodel.conf", "var/lib/nvpmodel/status", "proc/sys/kernel/osrelease"),
    *("sys/module/nvidia/version", "sys/devices/virtual/dmi/id/product_name"),
)
_ORDINARY_UID = 1000


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
    if tables := _tables(device):
        members["tables.json"] = Member(_json(scrubber, tables))
    if entry:
        members["board.toml"] = Member(entry)
    return Snapshot(title, members, unread, simulation)


def _described(device: Device, scheme: str, title: str, members: Mapping[str, Member]) -> tuple[bytes, str]:
    """Return the board as an entry of devices/, empty if it cannot be simulated, and how it came about."""
    if scheme != "jetson":
        return _card(device, title)
    # From the copy, which the user who takes it may write, so that its knobs do not hang on who that is.
    with TemporaryDirectory(prefix="polythrottle-") as folder:
        lay(Path(folder), members)
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
    people = {row[0] for row in rows if len(row) > 2 and row[2].isdecimal() and int(row[2]) >= _ORDINARY_UID}
    host = texts.get("etc/hostname", "").strip()
    return frozenset(name for name in (*people, host, host.partition(".")[0]) if name)


def _scrubbed_tree(found: Collection, scrubber: Scrubber) -> dict[str, Member]:
    members = {
        scrubber.ids(path): Member(scrubber.file(path, kept.content), kept.mode & 0o666 | 0o400)
        for path, kept in sorted(found.files.items())
    }
    for path, target in sorted(found.links.items()):
        link, goal = scrubber.ids(path), scrubber.ids(target)
        members.setdefault(link, Member(link=os.path.relpath(goal, os.path.dirname(link))))
    return members


def _about(device: Device, root: Path) -> dict[str, Any]:
    findings = device.findings() if isinstance(device, Inspectable) else ()
    here = "" if root == Path("/") else str(root)
    return {
        "version": VERSION,
        "device": device.uri.partition("?")[0],
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
    return [_scrubbed(scrubber, each) for each in value] if isinstance(value, list | tuple) else value
