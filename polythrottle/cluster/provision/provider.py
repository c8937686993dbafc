"""The port to whoever rents out machines: ask for one, see what became of it, give it back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from polythrottle.backports import StrEnum
from polythrottle.cluster.machine import Market


class Stage(StrEnum):
    """What became of an order."""

    WAITING = "waiting"  # asked for, not there yet
    RUNNING = "running"  # there, and doing its work
    LOST = "lost"  # taken away, and not coming back by itself
    ENDED = "ended"  # finished its work, or given back


@dataclass(frozen=True)
class Order:
    """One machine that is asked for.

    Attributes:
        machine: Name of a type in the catalogue; a provider may read it as a partition or an accelerator.
        market: Whether it may be taken away.
        region: Where it should stand; empty for anywhere.
    """

    machine: str = ""
    market: Market = Market.SPOT
    region: str = ""


@dataclass(frozen=True)
class Rented:
    """An order and what is known of it.

    Attributes:
        ticket: The provider's name for the order.
        stage: What became of it.
        node: Name of the machine, empty while there is none.
        times_lost: How often a machine was taken from this order; a requeued one waits again with one more.
        reason: What the provider says about the stage, empty if nothing.
        left_s: Time until the provider ends it by a limit of its own, in seconds; None without one.
    """

    ticket: str
    stage: Stage
    node: str = ""
    times_lost: int = 0
    reason: str = ""
    left_s: float | None = None


class Provider(Protocol):
    """Rents out machines."""

    def request(self, order: Order) -> str:
        """Ask for one machine and return the ticket of the order.

        Raises:
            DeviceError: If the provider cannot be reached or refuses the order; says what it said.
        """

    def seen(self) -> Mapping[str, Rented]:
        """Return every order by its ticket, as the provider sees it now.

        Raises:
            DeviceError: If the provider cannot be reached.
        """

    def crowd(self) -> Sequence[float]:
        """Return what is seen of the queue before an order: everybody's orders that wait, and machines that are free.

        Raises:
            DeviceError: If the provider cannot be reached.
        """

    def dismiss(self, ticket: str) -> None:
        """Tell a machine's work to end in order, as if its time were over; nothing happens if it has ended.

        Raises:
            DeviceError: If the provider cannot be reached.
        """

    def release(self, ticket: str) -> None:
        """Give a machine back, or withdraw its order; nothing happens if that was done before.

        Raises:
            DeviceError: If the provider cannot be reached.
        """
