"""Figures and the single-file HTML report of a study."""
