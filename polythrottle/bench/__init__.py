"""How good a search method is: trials, broken limits and energy it takes on subjects whose optimum is known.

A subject is a recorded table, or a simulated board with a model. Every search runs through the optimiser's port alone.
What counts is the truth at the points a method visited: what the table records there, or what the simulator's
noiseless model says. A trial breaks a limit if the truth at its point does, and a search has come within 5 % once it
has visited a point that truly holds the limit and truly costs at most 5 % more than the best of all that do.
"""

from polythrottle.bench.contest import Lesson, Plan, Rules, Task, perform, plan, run
from polythrottle.bench.entrants import Entrant, entrants
from polythrottle.bench.history import LEAVE_ONE_OUT, files
from polythrottle.bench.runners import Runner, runners
from polythrottle.bench.searching import ITEMS_PER_TRIAL, Record, search
from polythrottle.bench.subjects import (
    WORKLOADS,
    Simulated,
    Source,
    Subject,
    TableFile,
    device_uris,
    simulations,
    subject,
    tables,
)
from polythrottle.bench.summary import YARDSTICK, Summary, document, groups, summarise, to_dataframe
from polythrottle.bench.whole import TRIALS as WHOLE_TRIALS
from polythrottle.bench.whole import (
    WholeSearch,
    WholeSummary,
    run_whole,
    search_whole,
    summarise_whole,
    whole_dataframe,
    whole_document,
)

__all__ = [
    "ITEMS_PER_TRIAL",
    "LEAVE_ONE_OUT",
    "WHOLE_TRIALS",
    "WORKLOADS",
    "YARDSTICK",
    "Entrant",
    "Lesson",
    "Plan",
    "Record",
    "Rules",
    "Runner",
    "Simulated",
    "Source",
    "Subject",
    "Summary",
    "TableFile",
    "Task",
    "WholeSearch",
    "WholeSummary",
    "device_uris",
    "document",
    "entrants",
    "files",
    "groups",
    "perform",
    "plan",
    "run",
    "run_whole",
    "runners",
    "search",
    "search_whole",
    "simulations",
    "subject",
    "summarise",
    "summarise_whole",
    "tables",
    "to_dataframe",
    "whole_dataframe",
    "whole_document",
]
