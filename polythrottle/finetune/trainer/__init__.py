"""A trainer in a process of its own, driven slice by slice, that can be killed at any instant.

`Trainer` (driver) starts and drives it; `worker` is what runs there; `read_progress` (progress) looks into a job's
folder without it. Only `network`, `learning`, `validating` and `worker` load torch. A job's folder holds:

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

from polythrottle.finetune.trainer.driver import Hello, SliceDone, Trainer
from polythrottle.finetune.trainer.progress import Progress, read_progress
from polythrottle.finetune.trainer.task import Task

__all__ = ["Hello", "Progress", "SliceDone", "Task", "Trainer", "read_progress"]
