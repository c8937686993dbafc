"""Which board this is: chip, model, release of its software, and its entry in the catalogue if it has one.

Chip and model come from the device tree, the release from ``/etc/nv_tegra_release`` or the package ``nvidia-l4t-core``
(NVIDIA Jetson Linux developer guide; jetson_stats, ``jtop/core/jetson_variables.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from polythrottle.backends.probe import Tree
from polythrottle.catalog import Board, load_board
from polythrottle.domain.errors import DeviceError

# By chip, the boards of the catalogue with the words of their model names and the part numbers of their modules, the
# rarer before those whose words they share (part numbers: jetson_stats, jtop/core/jetson_variables.py).
_KNOWN: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "tegra210": {"jetson-nano-2gb": ("nano 2gb", "p3448-0003"), "jetson-nano": ("nano", "p3448|p3450")},
    "tegra186": {
        "jetson-tx2i": ("tx2i", "p3489-0000"),
        "jetson-tx2-4gb": ("tx2 4gb", "p3489-0888"),
        "jetson-tx2": ("tx2", "p3310"),
    },
    "tegra194": {"jetson-xavier-nx": ("xavier nx", "p3668"), "jetson-agx-xavier": ("agx xavier", "p2888|p2972")},
    "tegra234": {
        "jetson-agx-orin": ("agx orin", "p3701"),
        "jetson-orin-nx": ("orin nx", r"p3767-000[0-2]"),
        "jetson-orin-nano": ("orin nano", r"p3767-000[3-5]"),
    },
    "tegra264": {"jetson-thor": ("thor", "p3834")},
}
_CHIP = re.compile(r"nvidia,(tegra\d+)")
_RELEASE = re.compile(r"#?\s*R(\d+)\s*\(release\),\s*REVISION:\s*([\d.]+)")
_PACKAGE = re.compile(r"^Package: nvidia-l4t-core$.*?^Version: ([\d.]+)", re.MULTILINE | re.DOTALL)
_JETPACK = (
    ("32", "4"),
    ("35", "5"),
    ("36.4.3", "6.2"),
    ("36.4.4", "6.2.1"),
    ("36.4.7", "6.2.1"),
    ("36.4", "6.1 or 6.2"),
    ("36.5", "6.2.2"),
    ("36", "6"),
    ("38", "7.0 or 7.1"),
    ("39.2", "7.2"),
    ("39", "7"),
)


@dataclass(frozen=True)
class BoardId:
    """What a board is.

    Args:
        chip: Such as ``tegra234``.
        model: As the device tree says it.
        compatible: Everything the device tree says it is compatible with.
        release: Version of Jetson Linux (L4T), such as ``35.4.1``; None if it cannot be told.
    """

    chip: str
    model: str
    compatible: tuple[str, ...]
    release: str | None

    @classmethod
    def read(cls, tree: Tree) -> BoardId:
        """Return what the board of a tree is.

        Raises:
            DeviceError: If it is no Jetson.
        """
        folder = tree.below("proc/device-tree")
        compatible = tuple(filter(None, re.split(r"[\0\s]+", tree.text(folder / "compatible") or "")))
        chips = [match[1] for match in map(_CHIP.fullmatch, compatible) if match]
        if not chips:
            raise DeviceError(
                f"there is no Jetson in {tree.root}: {folder / 'compatible'} names no NVIDIA Tegra chip; "
                "in a container, /proc/device-tree and /sys must be those of the host"
            )
        model = " ".join((tree.text(folder / "model") or "").split())
        return cls(chips[-1], model or f"a Jetson with {chips[-1]}", compatible, _release(tree))

    @property
    def title(self) -> str:
        """The model's name; that of the catalogue where the device tree has only a code name, such as quill."""
        told = any(word in self.model.lower() for word in ("nvidia", "orin", "xavier", "thor", "tx", "nano"))
        if told or self.entry is None:
            return self.model
        return self.entry.title

    @property
    def jetpack(self) -> str | None:
        """The JetPack this release of Jetson Linux belongs to, as far as it tells."""
        parts = (self.release or "").split(".")
        for length in (3, 2, 1):
            for start, jetpack in _JETPACK:
                if start == ".".join(parts[:length]):
                    return jetpack
        return None

    @property
    def identity(self) -> Mapping[str, str]:
        """What a tuned answer for this board depends on."""
        known = {"board": self.model, "soc": self.chip, "l4t": self.release, "jetpack": self.jetpack}
        return {name: text for name, text in known.items() if text}

    @cached_property
    def name(self) -> str | None:
        """The board's name in the catalogue, or None if it is not there.

        The number of its module says it before the name of its model: an Orin Nano, of six cores and 7.4 GiB, is called
        "Orin NX Engineering Reference Developer Kit" in a public record, after the kit it was flashed for.
        """
        boards = _KNOWN.get(self.chip, {})
        parts = " ".join(self.compatible)
        if numbered := next((name for name, (_, part) in boards.items() if re.search(part, parts)), None):
            return numbered
        words = re.sub(r"[^a-z0-9]+", " ", self.model.lower()).split()
        for name, (tokens, _) in boards.items():
            if set(tokens.split()) <= set(words):
                if "nx" in words and "nx" not in tokens.split():
                    return None
                return name
        return None

    @cached_property
    def entry(self) -> Board | None:
        """The board's entry in the catalogue, or None."""
        if self.name:
            return load_board(self.name)
        return None


def board_files(tree: Tree) -> tuple[Path, ...]:
    """Return the files that say what a board is."""
    places = ("proc/device-tree/compatible", "proc/device-tree/model", "etc/nv_tegra_release")
    return tuple(map(tree.below, places))


def _release(tree: Tree) -> str | None:
    match = _RELEASE.match(tree.text(tree.root / "etc/nv_tegra_release") or "")
    if match:
        return f"{match[1]}.{match[2]}"
    package = _PACKAGE.search(tree.text(tree.root / "var/lib/dpkg/status") or "")
    if package:
        return package[1]
    return None
