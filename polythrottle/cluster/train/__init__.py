"""Elastic training that survives the loss of machines.

    membership       pure: who is there, and which of them make up the numbered generation that trains
    controller       the one process that keeps the membership, on a machine that stays
    wire             what nodes and workers say to it: JSON over HTTP on loopback, or with a token
    engine           the port: start with members, stop, status, events
    torchrun ray     the engines behind it
    agent            one node of the torchrun engine: TorchElastic's agent, grouped by the controller
    context          what a training script uses: `Context`
    sampler          every sample exactly once an epoch, however often the number of workers changes
    checkpoint       whole or not there; the newest valid one wins
    writer cadence   two-phase writing beside training, and how often

In a script::

    from polythrottle.cluster.train import Context
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polythrottle.cluster.train.context import Context

__all__ = ["Context"]


def __getattr__(name: str) -> Any:
    """Return `Context`, and load torch only then: the controller needs none."""
    if name != "Context":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from polythrottle.cluster.train.context import Context

    return Context
