"""What a study found, explained: what binds, what each knob saved and cost, and what a looser limit would buy."""

from polythrottle.explain.explanation import Accuracy, Explanation, explain
from polythrottle.explain.limits import End, Limit
from polythrottle.explain.prices import Price
from polythrottle.explain.shares import Effect, Share

__all__ = ["Accuracy", "Effect", "End", "Explanation", "Limit", "Price", "Share", "explain"]
