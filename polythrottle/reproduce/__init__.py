"""The figures of the PolyThrottle paper (arXiv 2310.19991) beside those of the simulator; all of ours are simulated."""

from polythrottle.reproduce.published import CELLS
from polythrottle.reproduce.searches import METHODS, trials
from polythrottle.reproduce.verdict import document

__all__ = ["CELLS", "METHODS", "document", "trials"]
