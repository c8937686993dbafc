"""Snapshots: a board in a file, without what identifies its owner, that opens as a tree or as a simulated board.

An archive holds ``snapshot.json`` (identity, knobs, findings, what could not be read), ``board.toml`` (the board as an
entry of devices/, for ``sim:``) and, at their paths below ``/``, the files the backend reads, for ``root=``.
"""

from polythrottle.snapshot.archive import opened_by, unpack
from polythrottle.snapshot.taking import Snapshot, take

__all__ = ["Snapshot", "opened_by", "take", "unpack"]
