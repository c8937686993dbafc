"""Search methods: constrained Bayesian optimisation and its baselines.

`METHODS` names them; `make_optimizer` returns one. Importing this package loads no model library: ``bayes`` imports
torch when it is first asked for a suggestion it needs a model for.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from polythrottle.domain.errors import UnknownName
from polythrottle.domain.ports import Optimizer
from polythrottle.optimize.baselines import (
    CoarseToFine,
    GradientSearch,
    OptunaSearch,
    PaperSearch,
    PresetOrder,
    RandomOrder,
)
from polythrottle.optimize.bayes import ConstrainedBayes
from polythrottle.optimize.options import Ingredient, Options


def _bayes_without(ingredient: Ingredient, options: Options) -> Optimizer:
    return ConstrainedBayes(replace(options, without=frozenset({ingredient})))


METHODS: Mapping[str, Callable[[Options], Optimizer]] = {
    "bayes": ConstrainedBayes,
    "random": lambda _: RandomOrder(),
    "grid": lambda _: CoarseToFine(),
    "paper": lambda _: PaperSearch(),
    "paper-joint": lambda _: PaperSearch(phases=1),
    "gradient": lambda _: GradientSearch(),
    "preset": lambda options: PresetOrder(options.presets),
    "tpe": lambda _: OptunaSearch("tpe"),
    "gp": lambda _: OptunaSearch("gp"),
}
"""Every search method by the name the command line gives it; the first is the default."""

PACKAGES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("bayes", "paper", "paper-joint"), ("torch", "gpytorch", "botorch")),
    **dict.fromkeys(("tpe", "gp"), ("optuna",)),
}
"""The packages a search method imports once it needs them."""

ABLATIONS: Mapping[str, Callable[[Options], Optimizer]] = {
    f"bayes-no-{one}": partial(_bayes_without, one) for one in Ingredient
}
"""The default search less one ingredient each, for benchmarks."""


def make_optimizer(name: str, options: Options | None = None) -> Optimizer:
    """Return the search method of that name.

    Args:
        name: One of `METHODS`.
        options: Earlier studies, risk and presets, for methods that use them.

    Raises:
        UnknownName: If there is none.
    """
    if name not in METHODS:
        raise UnknownName("search method", name, METHODS)
    return METHODS[name](options or Options())


__all__ = [
    "ABLATIONS",
    "METHODS",
    "PACKAGES",
    "CoarseToFine",
    "ConstrainedBayes",
    "Options",
    "RandomOrder",
    "make_optimizer",
]
