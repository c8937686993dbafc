"""What a tree will hold, before it is laid on disk."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Layout:
    """Files and links of a tree, by absolute path inside it.

    Args:
        files: Content of each file, without the newline every file of the kernel ends in.
        links: Target of each link, a path inside the tree too; laid as relative links, so that the tree can be moved.
    """

    files: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)

    def put(self, folder: str, files: Mapping[str, object]) -> None:
        """Add files below a folder."""
        self.files.update({f"{folder}/{name}": str(content) for name, content in files.items()})

    def link(self, path: str, target: str) -> None:
        """Add a link."""
        self.links[path] = target

    def lay(self, root: Path) -> None:
        """Write everything below ``root``."""
        for path, content in self.files.items():
            place = _made(root, path)
            # Device-tree strings end in NUL, everything else in a newline; a sensor that never answers is empty.
            place.write_text(content if content.endswith("\0") or not content else f"{content}\n", encoding="utf-8")
        for path, target in self.links.items():
            place = _made(root, path)
            place.symlink_to(os.path.relpath(root / target.lstrip("/"), place.parent))


def _made(root: Path, path: str) -> Path:
    place = root / path.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    return place
