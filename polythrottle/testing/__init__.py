"""Contracts for authors of backends, workloads and optimisers; public.

Subclass a contract in a pytest module and say how to make one; every test of the contract then runs against it:

    class TestMyBoard(DeviceContract):
        def make(self) -> Device:
            return MyBoard(root=fake_tree)
"""

from polythrottle.testing.contracts import DeviceContract, OptimizerContract, WorkloadContract

__all__ = ["DeviceContract", "OptimizerContract", "WorkloadContract"]
