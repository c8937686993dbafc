"""Packages that are needed later: imported before anything runs, and told of in one line if they cannot be."""

import warnings
from collections.abc import Sequence
from importlib import import_module

from polythrottle.errors import DeviceError

_LONGEST = 200


def check_importable(packages: Sequence[str], what: str, remedy: str) -> None:
    """Import packages, so that a study does not end where it first needs one that is missing or broken.

    Args:
        packages: Their names.
        what: What needs them, such as ``method bayes``.
        remedy: What else would do.

    Raises:
        DeviceError: If one cannot be imported; says which, and what to do.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gpytorch uses deprecated parts of torch as it is imported
        for name in packages:
            try:
                import_module(name)
            except Exception as err:  # a broken installation raises whatever it likes: OSError, RuntimeError, …
                why = " ".join(f"{type(err).__name__}: {err}".split())[:_LONGEST]
                raise DeviceError(f"{what} needs {name}, which cannot be imported ({why}); {remedy}") from err
