"""A trainer in a process of its own, driven slice by slice, that can be killed at any instant.

`driver.Trainer` starts and drives it; `server` and `worker` run there; `job_folder.read_progress` looks into a job's
folder without it. Only `network`, `server` and `worker` load torch. Names are looked up when they are
used: the daemon at rest reads where a job stands with `job_folder`. A job's folder holds:

======================  =====================================================================================
``task.json``           what the job is, and its classes; written last when a job begins
``base.pt2`` (``.pt``)  the model the job began with
``listing-….json``      what the data folder held when an epoch began, named by its digest
``ledger.jsonl``        the samples of every step, one line each
``….checkpoint``        the weights that are trained, the optimiser and the place in the epoch; the last two
``candidate.…``         the model validated last; ``validation.json`` how it did
``lock``, ``trainer.log``
======================  =====================================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polythrottle.training.beside.trainer.driver import Task, Trainer

__all__ = ["Task", "Trainer"]


def __getattr__(name: str) -> object:
    if name == "Trainer":
        from polythrottle.training.beside.trainer.driver import Trainer

        return Trainer
    if name == "Task":
        from polythrottle.training.beside.trainer.driver import Task

        return Task
    raise AttributeError(f"module 'polythrottle.training.beside.trainer' has no attribute {name!r}")
