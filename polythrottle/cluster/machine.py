"""Machines that can be rented: their GPUs, prices per market, and the power caps they can run under."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from polythrottle.backports import StrEnum
from polythrottle.errors import InvalidInput


class Market(StrEnum):
    """How a machine is rented: the provider may take a spot machine away at any time."""

    SPOT = "spot"
    ON_DEMAND = "on-demand"


@dataclass(frozen=True)
class Cap:
    """One power limit a machine can train under, and what that costs and saves.

    Attributes:
        limit_w: Power limit of each GPU in watts, or None for the default.
        slowdown: Time of a step under this cap over its time at the default, > 0.
        power_w: Mean power of the whole machine while it trains, in watts.
    """

    limit_w: float | None
    slowdown: float
    power_w: float

    def __post_init__(self) -> None:
        if not (self.slowdown > 0 and self.power_w > 0 and (self.limit_w is None or self.limit_w > 0)):
            raise InvalidInput(f"a cap needs a positive limit, slowdown and power, not {self}")

    @property
    def energy(self) -> float:
        """Return the joules of a step over its seconds at the default: power × slowdown, in watts."""
        return self.power_w * self.slowdown


@dataclass(frozen=True)
class MachineType:
    """One kind of machine in a catalogue.

    Attributes:
        name: What it is called, for example ``gcp-k80``.
        gpu: Name of the GPU model, as in the tables of measurements.
        usd_per_h: Price in US dollars per hour, by market; a market that is missing is not offered.
        caps: What it can train under; the first is the default (``limit_w`` None or the highest).
        idle_w: Power while it waits: starting up, at a barrier, in watts.
        writing_w: Power while a checkpoint stops training, in watts.
        region: Where it stands; decides prices and lifetimes.
        gpus: GPUs in one machine.
    """

    name: str
    gpu: str
    usd_per_h: Mapping[Market, float]
    caps: tuple[Cap, ...]
    idle_w: float
    writing_w: float
    region: str = ""
    gpus: int = field(default=1)

    def __post_init__(self) -> None:
        if not self.caps:
            raise InvalidInput(f"machine {self.name!r} has no power cap, not even its default")
        if not all(price >= 0 for price in self.usd_per_h.values()):
            raise InvalidInput(f"machine {self.name!r} has a negative price")
        if self.idle_w < 0 or self.writing_w < 0 or self.gpus < 1:
            raise InvalidInput(f"machine {self.name!r} needs powers of at least 0 W and at least one GPU")

    @property
    def default(self) -> Cap:
        """Return the cap it runs under when nobody chooses."""
        return self.caps[0]


@dataclass(frozen=True)
class Network:
    """What predicts how long a training step of a network takes.

    Attributes:
        name: What it is called.
        flops: Floating-point operations of one training step's forward pass per sample, as the table counts them.
        n_tensors: Number of trainable tensors: how many small kernels and messages a step has.
        n_parameters: Trainable parameters.
        weight_mb: Size of the weights in a checkpoint, in MB, or None where unknown.
    """

    name: str
    flops: float
    n_tensors: float
    n_parameters: float
    weight_mb: float | None = None
