"""Finds and parses the files of devices/ and profiles/."""

from __future__ import annotations

from polythrottle.catalog.boards import Board, load_board
from polythrottle.catalog.documents import names
from polythrottle.catalog.language_models import LanguageModel, is_language_model, load_language_model
from polythrottle.catalog.models import Model, load_model

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
