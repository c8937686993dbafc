"""How many workers a rented node gets: one for each GPU that is asked for, unless somebody says otherwise."""

import re
from collections.abc import Sequence

from polythrottle.cli.answers import complain

_COUNT = re.compile(r"(?:[^:()]+:)?(\d{1,4})(?:\(.*\))?")
_WHOLE = ("--gpus-per-node=", "--gpus=", "-G")


def gpus_of(on: str, sbatch: Sequence[str] = ()) -> int | None:
    """Return how many GPUs each node is asked to have, None where nobody says.

    Args:
        on: The place, such as ``skypilot:V100:4``.
        sbatch: More words for sbatch, each of whose jobs is one node (sbatch(1): --gres, --gpus-per-node, --gpus).
    """
    kind, _, accelerators = on.partition(":")
    if kind == "skypilot":
        return _count(accelerators) if accelerators else None
    found = [count for word in sbatch if (count := _asked(word)) is not None]
    return found[-1] if found else None


def workers_on(asked: int | None, gpus: int | None) -> int:
    """Return the workers of each node, and say so where GPUs stay idle.

    Args:
        asked: As on the command line, None where it says nothing.
        gpus: GPUs of each node, None where that is not known.
    """
    if asked is not None and gpus is not None and asked < gpus:
        complain(f"--workers {asked} on nodes of {gpus} GPUs: {gpus - asked} of each node's GPUs stay idle")
    return asked or gpus or 1


def _asked(word: str) -> int | None:
    """Return the GPUs a word for sbatch asks for; None where it is about something else, or cannot be read."""
    if word.startswith("--gres="):
        parts = [part for part in word.removeprefix("--gres=").split(",") if re.match(r"gpu(:|\(|$)", part)]
        counts = [_count(part.removeprefix("gpu").removeprefix(":") or "1") for part in parts]
    else:
        counts = [_count(word.removeprefix(start)) for start in _WHOLE if word.startswith(start)][:1]
    known = [count for count in counts if count]
    return sum(known) if known else None


def _count(text: str) -> int | None:
    """Return the number in ``4`` or ``v100:4``, and 1 for a type alone."""
    matched = _COUNT.fullmatch(text)
    if matched:
        return int(matched[1])
    return 1 if re.fullmatch(r"[A-Za-z][\w.-]*", text) else None
