"""A stand-in NVIDIA driver library, so that the real ``pynvml`` bindings run without a GPU; public.

It is C, compiled on first use with the system's compiler, and keeps its state in a file that all processes share, as a
driver does: what a killed process left locked stays locked.

    with FakeNvml(tmp_path / "nvml", ["a100", "l4"]) as fake:     # models: polythrottle.testing.nvml.MODELS
        fake.set(0, load_permille=1000)                           # busy; clocks and power follow
        fake.fail("nvmlDeviceSetPowerManagementLimit", code=4)    # by the driver's name for the call
        ...                                                       # import pynvml and use it
        assert fake.log()[-1].call == "nvmlDeviceResetGpuLockedClocks"
        assert fake.snapshot() == before

While it is entered, this process and its children (which inherit ``$POLYTHROTTLE_FAKE_NVML`` and ``$LD_LIBRARY_PATH``)
find it under the driver's name. GPUs are counted by slot, which stays when their order changes. Time is real, or frozen
but for ``advance`` and the sleeps of ``fake.clock()``. Clocks, power and energy are simulated by a simple law; they
prove what a program does, not what a board draws.
"""

from polythrottle.testing.nvml.fake import FakeNvml, FakeTime, FaultKind, LoggedCall, build, compiler
from polythrottle.testing.nvml.models import MODELS, GpuModel

__all__ = ["MODELS", "FakeNvml", "FakeTime", "FaultKind", "GpuModel", "LoggedCall", "build", "compiler"]
