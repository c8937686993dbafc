"""A layer over a planted tree that behaves as the kernel does, and fails where it is told to."""

from polythrottle.testing.kernel.fake import FakeKernel
from polythrottle.testing.kernel.faults import Fault
from polythrottle.testing.kernel.log import Write

__all__ = ["FakeKernel", "Fault", "Write"]
