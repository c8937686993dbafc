"""How fast a cluster trains: workers that share parameter servers, or that wait for each other at a barrier.

Asynchronous workers and parameter servers are a closed queueing network: a worker computes for its think time, then
needs a service. Few workers go at their own pace, 1/(think + service); many go at the servers', 1/service. In between
they queue, the more smoothly the fewer workers fill the servers (Reiser and Lavenberg 1980, doi 10.1145/322186.322195).
The sharpness of the knee is taken as their number to the power 3/4: one figure for CM-DARE's curves and ICAC's jobs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from polythrottle.errors import InvalidInput

KNEE = 0.75
ROUND_TRIPS = 2.4
"""Round trips to a parameter server per step: fitted to CM-DARE's rows with 30 ms between K80 workers and server."""
SHORT = 0.067
"""Share by which a cluster may fall short of its prediction before something is called a bottleneck (CM-DARE)."""


@dataclass(frozen=True)
class Service:
    """What one step of one worker takes of the parameter servers.

    Attributes:
        shared_s: The part that servers share evenly, in seconds at one server: handling tensors.
        fixed_s: The part that more servers do not shorten, in seconds: moving the bytes of the largest share.
    """

    shared_s: float
    fixed_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.shared_s >= 0 and self.fixed_s >= 0):
            raise InvalidInput(f"a service takes at least 0 s, not {self.shared_s} and {self.fixed_s} s")

    def time_s(self, servers: int) -> float:
        """Return the time of a service in seconds.

        Raises:
            InvalidInput: If there is no server.
        """
        if servers < 1:
            raise InvalidInput(f"a cluster with parameter servers has at least one, not {servers}")
        return self.shared_s / servers + self.fixed_s


def think_s(steps_per_s: float, service_s: float, distance_s: float = 0.0) -> float:
    """Return the time of a step that a worker spends by itself, from its speed alone with a server.

    Args:
        steps_per_s: Its speed alone, > 0.
        service_s: What the server took of each of those steps, in seconds.
        distance_s: Round-trip time between worker and servers where it will train, beyond that of the measurement.

    Raises:
        InvalidInput: If the speed is not positive.
    """
    if not steps_per_s > 0:
        raise InvalidInput(f"a worker's speed is above 0 steps/s, not {steps_per_s}")
    return max(1 / steps_per_s - service_s, 0.05 / steps_per_s) + ROUND_TRIPS * distance_s


def asynchronous(thinks_s: Sequence[float], service_s: float) -> float:
    """Return the speed of workers that share servers, each going on without the others, in steps per second.

    Args:
        thinks_s: Time of a step that each worker spends by itself, in seconds; workers may differ.
        service_s: Time of a service in seconds; 0 for servers that are never full.

    Returns:
        The smooth minimum of the sum of the workers' speeds and of what the servers can take; 0 without workers.
    """
    alone = sum(1 / (one + service_s) for one in thinks_s)
    if not alone or not service_s:
        return alone
    load = alone * service_s
    sharpness = max(1.0, len(thinks_s) / load) ** KNEE
    return float(alone / (1 + load**sharpness) ** (1 / sharpness))


def synchronous(steps_s: Sequence[float], exchange_s: float = 0.0) -> float:
    """Return the speed of workers that wait for each other at every step, in steps per second of the group.

    Args:
        steps_s: Time of a step of each worker, in seconds.
        exchange_s: Time to exchange gradients that no computation hides, in seconds.
    """
    return 1 / (max(steps_s) + exchange_s) if steps_s else 0.0


def ring_s(workers: int, gradient_bytes: float, bytes_per_s: float, hop_s: float = 0.0) -> float:
    """Return the time of a ring all-reduce in seconds (Patarasuk and Yuan 2009, doi 10.1016/j.jpdc.2008.09.002).

    Args:
        workers: How many take part.
        gradient_bytes: Size of the gradients.
        bytes_per_s: Bandwidth of the slowest link, > 0.
        hop_s: Latency of one message.

    Raises:
        InvalidInput: If there is no bandwidth.
    """
    if not bytes_per_s > 0:
        raise InvalidInput(f"a link carries more than 0 bytes/s, not {bytes_per_s}")
    if workers < 2:
        return 0.0
    return 2 * (workers - 1) * (gradient_bytes / workers / bytes_per_s + hop_s)


def shortfall(measured_per_s: float, workers_per_s: Sequence[float]) -> float:
    """Return by which share a cluster falls short of the sum of its workers' speeds; negative if it is faster.

    Raises:
        InvalidInput: If no worker has a speed.
    """
    if not (expected := sum(workers_per_s)) > 0:
        raise InvalidInput("a cluster's speed is judged by that of its workers; none is known")
    return 1 - measured_per_s / expected if expected < inf else 1.0
