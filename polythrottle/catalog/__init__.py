"""Finds and parses the files of devices/ and profiles/."""

from __future__ import annotations

from polythrottle.catalog.boards import Board, load_board
from polythrottle.catalog.documents import names
from polythrottle.catalog.models import Model, load_model

__all__ = ["Board", "Model", "load_board", "load_model", "names"]
