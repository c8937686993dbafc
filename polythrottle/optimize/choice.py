"""Which point is tried next, given what a trial at each is worth: worth, capped by risk."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from polythrottle.errors import Exhausted
from polythrottle.optimize.features import Array
from polythrottle.optimize.options import Ingredient, Options
from polythrottle.optimize.remaining import Rows

if TYPE_CHECKING:
    from polythrottle.optimize.worth import Worth

RISKS = (0.2, 0.5, 0.8)
"""How likely a trial may be to break a limit, unless the user says: the first cap within which something is left."""
SHARE = 0.25
"""Of the risk a user allows to a whole search, one trial may spend this share."""
WORTHWHILE = 0.005
"""A cap leaves something if a trial within it is expected to save this share of the energy."""
_TIE = 0.03
"""Points worth less than a thirtieth below the best count as equals: the models are not surer than that."""


def equals(worth: "Worth", rows: Rows, options: Options) -> Rows:
    """Return the rows that are worth most, given the risk a trial may take, ascending.

    Args:
        worth: Of every point.
        rows: Those that have not been tried, at least one.
        options: The risk; without one the caps of `RISKS` are opened one after the other.

    Raises:
        Exhausted: If the user's own risk leaves no row.
    """
    allowed = _within(worth, rows, options)
    total = np.nan_to_num(worth.total[allowed], nan=-np.inf)
    best: Rows = allowed[total >= total.max() - _TIE]
    return best


def beyond_caps(worth: "Worth", rows: Rows) -> bool:
    """Return whether each of some rows is likelier to break a limit than the last of `RISKS`.

    Args:
        worth: Of every point.
        rows: At least one.
    """
    return not len(_below(RISKS[-1], worth.feasible, rows))


def _within(worth: "Worth", rows: Rows, options: Options) -> Rows:
    """Return the rows a trial may go to: all while nothing feasible is known, those within the risk after that."""
    if not worth.improving or Ingredient.CAP in options.without:
        return rows
    if options.risk is None:
        return _promising(worth, rows, RISKS)
    allowed = _below(SHARE * options.risk, worth.assured, rows)
    if not len(allowed):
        raise Exhausted(f"no point left is safe enough to try at a risk of {options.risk:g}")
    return allowed


def _promising(worth: "Worth", rows: Rows, risks: Sequence[float]) -> Rows:
    """Return the rows within the first cap that leaves something to gain; all of them if none does."""
    for risk in risks:
        within = _below(risk, worth.feasible, rows)
        if len(within) and worth.total[within].max() > math.log(WORTHWHILE):
            return within
    return rows


def _below(risk: float, feasible: Array, rows: Rows) -> Rows:
    """Return the rows whose chance to break a limit is at most a risk, given log probabilities to hold them all."""
    kept: Rows = rows[feasible[rows] >= math.log1p(-risk)]
    return kept
