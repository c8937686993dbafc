"""How good a search method is: trials, broken limits and energy it takes on subjects whose optimum is known.

A subject is a recorded table, or a simulated board with a model. Every search runs through the optimiser's port alone.
What counts is the truth at the points a method visited: what the table records there, or what the simulator's
noiseless model says. A trial breaks a limit if the truth at its point does, and a search has come within 5 % once it
has visited a point that truly holds the limit and truly costs at most 5 % more than the best of all that do.
"""

from polythrottle.lab.bench.contest import (
    ITEMS_PER_TRIAL,
    ContestPlan,
    Entrant,
    Lesson,
    Record,
    Rules,
    Task,
    entrants,
    perform,
    plan,
    run,
    search,
)
from polythrottle.lab.bench.subjects import (
    LEAVE_ONE_OUT,
    WORKLOADS,
    Simulated,
    Source,
    Subject,
    TableFile,
    device_uris,
    files,
    simulations,
    subject,
    tables,
)
from polythrottle.lab.bench.summary import (
    YARDSTICK,
    Runner,
    Summary,
    document,
    groups,
    runners,
    summarise,
    to_dataframe,
)
from polythrottle.lab.bench.whole_search import TRIALS as WHOLE_TRIALS
from polythrottle.lab.bench.whole_search import (
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
    "ContestPlan",
    "Entrant",
    "Lesson",
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
