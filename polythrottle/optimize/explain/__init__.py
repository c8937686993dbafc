"""What a study found, explained: what binds, what each knob saved and cost, and what a looser limit would buy."""

from polythrottle.optimize.explain.explanation import Accuracy, End, Explanation, Limit, Price, explain
from polythrottle.optimize.explain.shares import Effect, Share

__all__ = ["Accuracy", "Effect", "End", "Explanation", "Limit", "Price", "Share", "explain"]
