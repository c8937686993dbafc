"""The figures of the PolyThrottle paper (arXiv 2310.19991) beside those of the simulator; all of ours are simulated."""

from polythrottle.lab.reproduce.polythrottle_paper import METHODS, document, trials
from polythrottle.lab.reproduce.published import CELLS

__all__ = ["CELLS", "METHODS", "document", "trials"]
