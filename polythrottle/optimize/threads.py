"""How many threads the numerical libraries use while a suggestion is made: one."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch and the BLAS libraries on one thread.

    Sums come out in one order, and matrices this small lose far more by waiting for each other than they gain.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _libraries().limit(limits=1):
            yield
    finally:
        torch.set_num_threads(threads)


@cache
def _libraries() -> ThreadpoolController:
    return ThreadpoolController()
