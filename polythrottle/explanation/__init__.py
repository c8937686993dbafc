"""What a study found, explained: what binds, what each knob saved and cost, and what a looser limit would buy."""

from polythrottle.explanation.explanation import Accuracy, Explanation, explain
from polythrottle.explanation.limits import End, Limit
from polythrottle.explanation.prices import Price
from polythrottle.explanation.shares import Effect, Share

__all__ = ["Accuracy", "Effect", "End", "Explanation", "Limit", "Price", "Share", "explain"]
