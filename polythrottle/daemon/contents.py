"""Whether the files that a profile was tuned with are still those that are here."""

from collections.abc import Mapping
from pathlib import Path

from polythrottle.catalog.places import locate
from polythrottle.errors import BadFile, UnknownName
from polythrottle.plainfile import blocks
from polythrottle.profile import Profile

_MOST_BYTES = 256 * 2**20
"""Of a file that is compared: who applies a profile waits for it."""
_MODELS = (".onnx", ".pt2", ".pt", ".engine", ".plan")


def changed(profile: Profile) -> str:
    """Return in words what a profile was tuned with and is something else now; empty if nothing is known to be.

    Only what the profile has a digest of is compared, where it names a file that can be read here, of at most 256 MiB:
    a model's file, and for a simulated board its description and that of its workload.
    """
    tuned = dict(part.split("=", 1) for part in str(profile.provenance.get("content", "")).split() if "=" in part)
    for name, path in _files(profile).items():
        now = _digest(path)
        if now is not None and name in tuned and tuned[name] != now:
            return (
                f"this profile was tuned with another {name}: {path} has changed since ({tuned[name]}, now {now}); "
                "tune again, with tune --as-prior it begins there"
            )
    return ""


def _files(profile: Profile) -> Mapping[str, Path]:
    """Return the files whose digests `polythrottle.setup` notes, by the names it gives them."""
    scheme, _, board = profile.device.partition("?")[0].partition(":")
    if scheme == "sim":
        try:
            found = locate("devices", "device", board), locate("profiles/workloads", "workload", profile.workload)
        except UnknownName:
            return {}
        return dict(zip(("board", "model"), found, strict=True))
    name = profile.workload.partition("?")[0]
    return {"model": Path(name)} if name.lower().endswith(_MODELS) else {}


def _digest(path: Path) -> str | None:
    """Return the beginning of a file's SHA-256; None if it cannot be read, or is too large."""
    import hashlib

    found = hashlib.sha256()
    try:
        for block in blocks(path, _MOST_BYTES):
            found.update(block)
    except BadFile:
        return None
    return found.hexdigest()[:16]
