"""Elastic training that survives the loss of machines.

    membership       pure: who is there, and which of them make up the numbered generation that trains
    controller       the one process that keeps the membership, on a machine that stays
    channel          how they say it: JSON over HTTP on loopback, or with a token
    events           what nodes and workers say to it, every field checked; what has happened, on disk, and its sum
    engines          the port: start with members, stop, status, events; torchrun behind it, ray_engine too
    job_control      starts, stops and continues a job
    agent            one node of the torchrun engine: TorchElastic's agent, grouped by the controller
    checkpoints      in a store; the newest valid one wins; written in two phases beside training
    nodes/           what is done about each node: power caps, bottlenecks, successors
    worker/          what runs in a worker: `Context`, which a training script uses, and what it is made of

Samples come in the order of `polythrottle.training.sampler`: each exactly once an epoch, whoever comes and goes.

In a script::

    from polythrottle.training.elastic import Context
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polythrottle.training.elastic.worker.elastic_training import Context


def __getattr__(name: str) -> Any:
    """Return `Context`, and load torch only then: the controller needs none."""
    if name != "Context":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from polythrottle.training.elastic.worker.elastic_training import Context

    return Context


__all__ = ["Context"]
