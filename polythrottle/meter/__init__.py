"""The meter: apply a point, settle, warm up, run a window of queries, look at the device, judge."""

from polythrottle.meter.attribution import Attribution, attribute
from polythrottle.meter.backlog import check_reference
from polythrottle.meter.enough import Goal
from polythrottle.meter.measuring import measure

__all__ = ["Attribution", "Goal", "attribute", "check_reference", "measure"]
