"""Driving a workload: queries sent as arrivals say, and counted from when they were meant to be sent."""

from polythrottle.driving.ledger import LoadReport
from polythrottle.driving.load import Load, batch_of, drive

__all__ = ["Load", "LoadReport", "batch_of", "drive"]
