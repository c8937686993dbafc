"""The append-only record of a study: one JSON line per change, and the only state tuning has.

    {"v": 2, "event": "study", …}                               the problem, whole: a study resumes from this file alone
    {"v": 2, "event": "started", "number": 0, "point": {…}}     written before the hardware is touched
    {"v": 2, "event": "completed", "number": 0, "measurement": {…}, "cost": {"seconds": 3.1, "joules": 40.2}}
    {"v": 2, "event": "failed", "number": 1, "failure": "…", "cost": {…}}
    {"v": 2, "event": "interrupted", "number": 2}               found running on reopening; the trial is made again
    {"v": 2, "event": "reference", "name": "30W", "point": {…}, "measurement": {…}}
    {"v": 2, "event": "finished", "reason": "…", "answer": 5}

Without an ``answer`` the trial whose figure is best is it.

With an error budget ``started`` says what the trial may spend of it (``"reserved": 10.0``), and the line that ends it
what it did (``"requests": {"sent": 105, "late": {"p99": 3}}``); where that is missing all of it counts as spent.

Format 1 had no costs, no ``censored`` in a measurement and no objective but energy; it is still read, and continued in
format 2.

A last line without its line feed was torn by a crash and is cut off; any other line that does not fit is an error with
its number. A trial that was interrupted ``ATTEMPTS`` times is given up as failed, so one that kills the machine ends.
"""

from polythrottle.storage.journal.lines import FORMAT
from polythrottle.storage.journal.reader import (
    content,
    ending,
    heading,
    holds_study,
    is_finished,
    late_requests,
    read,
    told,
)
from polythrottle.storage.journal.writer import ATTEMPTS, Journal

__all__ = [
    "ATTEMPTS",
    "FORMAT",
    "Journal",
    "content",
    "ending",
    "heading",
    "holds_study",
    "is_finished",
    "late_requests",
    "read",
    "told",
]
