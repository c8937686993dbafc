"""Describes a model for simulated boards: what it computes and moves, counted from the model itself."""

from polythrottle.profiling.describing import WIDTHS, Description, profile_model

__all__ = ["WIDTHS", "Description", "profile_model"]
