"""Contracts for authors of backends, workloads and optimisers, and boards to try them on; public.

Subclass a contract in a pytest module and say how to make one; every test of the contract then runs against it:

    class TestMyBoard(DeviceContract):
        def make(self) -> Device:
            return MyBoard(root=fake_tree)

A Jetson without the Jetson: `plant` lays the tree of one of `BOARDS`, and `FakeKernel` behaves as its kernel would:

    root = plant("jetson-agx-orin-jp6", tmp_path / "board")      # power_mode=3 starts it in another nvpmodel mode
    kernel = FakeKernel(root)                       # a port of controls: kernel.read(key), kernel.write(key, text)
    before = kernel.snapshot()                      # every writable control; compare it afterwards
    kernel.fail(Fault("EIO", nth=3))                # the third write ends with EIO
    kernel.fail(Fault("die_after", match="*/max_freq"), Fault("foreign", nth=2, value="306000000"))
    with kernel.installed():                        # SysFiles and SystemControls of this process go through it
        run(["apply", "profile.toml", "--device", f"jetson?root={root}"])
    [(w.key, w.text, w.outcome) for w in kernel.writes()]    # every write of every process, also of one that died
    kernel.work(0.2); kernel.doze(); kernel.throttle(); kernel.renumber("/sys/class/hwmon/hwmon1", "hwmon6")
    reboot(root, shift=1)                           # forgets all but the power mode; hwmon folders move

Faults, state and log lie in ``<root>.kernel`` and hold for every process: a child that calls
``FakeKernel(root).installed()``, or is started as ``python -m polythrottle.testing run ROOT apply …``, meets the same
ones. Sensors are files too, and follow clocks and load by a simulated law; what the kernel would answer with EAGAIN is
an empty file to a reader that does not go through it. ``python -m polythrottle.testing plant NAME FOLDER`` lays a tree.
"""

from polythrottle.testing.boards import BOARDS
from polythrottle.testing.contracts import DeviceContract, OptimizerContract, WorkloadContract
from polythrottle.testing.kernel import FakeKernel, Fault, Write, plant, reboot

__all__ = [
    "BOARDS",
    "DeviceContract",
    "FakeKernel",
    "Fault",
    "OptimizerContract",
    "WorkloadContract",
    "Write",
    "plant",
    "reboot",
]
