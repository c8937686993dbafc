"""How long a machine takes to come: provisioning, staging, booting, then the framework, cold or warm."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

from polythrottle.cluster.predict.prior import FRAMEWORK_S
from polythrottle.cluster.tables import StartupRow
from polythrottle.errors import InvalidInput

PHASES = ("provisioning", "staging", "booting", "framework")


@dataclass(frozen=True)
class Startup:
    """From the order of a machine to its first training step.

    Attributes:
        phases_s: Mean time of each of `PHASES`, in seconds.
        spread_s: Standard deviation of the sum, in seconds.
        machines: How many starts the machine's part was averaged over.
        gpu: GPU type they were of; empty where that type was never started, so that all types stand for it.
    """

    phases_s: tuple[float, float, float, float]
    spread_s: float
    machines: int
    gpu: str

    @property
    def machine_s(self) -> float:
        """Return the time until the machine has booted, in seconds."""
        return sum(self.phases_s[:3])

    @property
    def total_s(self) -> float:
        """Return the time until the first step, in seconds."""
        return sum(self.phases_s)


def framework_s(n_tensors: float, warm: bool = False) -> float:
    """Return the time from a booted machine to the first step, in seconds (published, CM-DARE).

    Args:
        n_tensors: Trainable tensors of the network: its graph is built anew.
        warm: Whether only the process starts again, framework and data being there.
    """
    fixed_s, tensor_s = FRAMEWORK_S[warm]
    return fixed_s + tensor_s * n_tensors


def startup(
    rows: Sequence[StartupRow], gpu: str, transient: bool, n_tensors: float, warm: bool = False, region: str = ""
) -> Startup:
    """Return what a start takes, averaged over recorded ones that are like it.

    Args:
        rows: Recorded starts.
        gpu: GPU type.
        transient: Whether the machine can be taken away; staging such a machine takes longer.
        n_tensors: Of the network to train.
        warm: Whether the machine is there and only the process starts.
        region: Where, if starts there are to count alone.

    Raises:
        InvalidInput: If no start of that market was recorded.
    """
    if warm:
        return Startup((0.0, 0.0, 0.0, framework_s(n_tensors, warm)), 0.0, 0, gpu)
    market = [row for row in rows if row.transient == transient]
    if not market:
        raise InvalidInput(f"no start of a {'transient' if transient else 'lasting'} machine was recorded")
    of_type = [row for row in market if row.gpu == gpu]
    like = [row for row in of_type if row.region == region] or of_type or market
    means = [fmean(row.phases_s[index] for row in like) for index in range(3)]
    totals = [sum(row.phases_s) for row in like]
    spread_s = stdev(totals) * sqrt(1 + 1 / len(totals)) if len(totals) > 1 else 0.1 * totals[0]
    phases = (means[0], means[1], means[2], framework_s(n_tensors))
    return Startup(phases, spread_s, len(like), gpu if of_type else "")
