"""Compare two operating points in turns, with a test that may be looked at after every pair."""

from polythrottle.comparing.pairs import MOST_PAIRS, Comparison, Verdict, compare
from polythrottle.comparing.sequential import half_width, interval

__all__ = ["MOST_PAIRS", "Comparison", "Verdict", "compare", "half_width", "interval"]
