"""Finds and parses the files of devices/ and profiles/."""

from __future__ import annotations

from polythrottle.catalog.boards import Board, load_board
from polythrottle.catalog.documents import names
from polythrottle.catalog.models import LanguageModel, Model, is_language_model, load_language_model, load_model

__all__ = [
    "Board",
    "LanguageModel",
    "Model",
    "is_language_model",
    "load_board",
    "load_language_model",
    "load_model",
    "names",
]
