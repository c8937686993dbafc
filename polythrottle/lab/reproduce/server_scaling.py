"""What a step takes of the parameter servers, learned from curves of cluster speed over the number of workers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import fmean

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from polythrottle.cluster.predict.completion import asynchronous, think_s
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import Network
from polythrottle.lab.reproduce.cluster_tables import SpeedRow

Curve = tuple[str, int, str]
"""GPU type, parameter servers, network."""

_LINK_BYTES_PER_S = 1.25e9
_TENSOR_S = 1e-4
_BYTES_PER_PARAMETER = 8.0
_NOISE = 0.1
_LOOSE = (0.2, 0.1, 0.05, 0.4)
"""How far from the prior, in logarithms, what servers take may be: the first unless networks left out say another."""


@dataclass(frozen=True)
class ServerDemand:
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


@dataclass(frozen=True)
class ServerCost:
    """What servers take for any network: a time per tensor, which they share, and one per parameter, which they do not.

    Attributes:
        tensor_s: Seconds per trainable tensor at one server.
        parameter_s: Seconds per trainable parameter: reading weights and writing gradients over one link.
    """

    tensor_s: float
    parameter_s: float

    def service(self, network: Network) -> ServerDemand:
        """Return what a step of a network takes."""
        return ServerDemand(self.tensor_s * network.n_tensors, self.parameter_s * network.n_parameters)


PRIOR = ServerCost(_TENSOR_S, _BYTES_PER_PARAMETER / _LINK_BYTES_PER_S)
"""Before any curve was seen: 0.1 ms per tensor, and 4 bytes each way per parameter over a link of 10 Gbit/s."""


def curves(rows: Iterable[SpeedRow]) -> dict[Curve, dict[int, float]]:
    """Return speeds in steps per second by curve, then by number of workers."""
    found: dict[Curve, dict[int, float]] = {}
    for row in rows:
        found.setdefault((row.gpu, row.servers, row.network), {})[row.workers] = row.steps_per_s
    return found


def fit_cost(measured: Mapping[Curve, Mapping[int, float]], networks: Mapping[str, Network]) -> ServerCost:
    """Return what servers take, from some curves that each have one worker alone; where they say little, the prior.

    How far the prior is believed is what predicts the curves of each network best from those of the others.

    Args:
        measured: Speeds in steps per second.
        networks: Tensors and parameters of every network in them.

    Raises:
        InvalidInput: If a curve lacks its single worker.
    """
    loose = min(_LOOSE, key=lambda one: _missed(measured, networks, one))
    return _fitted(measured, networks, loose)


def _missed(measured: Mapping[Curve, Mapping[int, float]], networks: Mapping[str, Network], loose: float) -> float:
    """Return the mean error on curves of networks left out in turn; 0 where there is one network only."""
    names = dict.fromkeys(curve[2] for curve in measured)
    if len(names) < 2:
        return 0.0
    errors = []
    for name in names:
        cost = _fitted({curve: some for curve, some in measured.items() if curve[2] != name}, networks, loose)
        mine = {curve: some for curve, some in measured.items() if curve[2] == name and len(some) > 1}
        errors += [curve_error(cost, curve, some, networks) for curve, some in mine.items()]
    if errors:
        return fmean(errors)
    return 0.0


def _fitted(measured: Mapping[Curve, Mapping[int, float]], networks: Mapping[str, Network], loose: float) -> ServerCost:
    start = np.log([PRIOR.tensor_s, PRIOR.parameter_s])

    def gaps(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        cost = ServerCost(*np.exp(logs))
        far = (logs - start) * _NOISE / loose
        off = [log(guess / speed) for curve in measured for guess, speed in _both(cost, curve, measured, networks)]
        return np.concatenate([off, far])

    found = least_squares(gaps, start, loss="soft_l1", f_scale=_NOISE)
    return ServerCost(*(exp(one) for one in found.x))


def predicted(
    cost: ServerCost, curve: Curve, speeds: Mapping[int, float], networks: Mapping[str, Network]
) -> dict[int, float]:
    """Return the speeds of a curve in steps per second, of which only the single worker's is looked at.

    Raises:
        InvalidInput: If it lacks its single worker, or nothing is known of its network.
    """
    if 1 not in speeds:
        raise InvalidInput(f"the curve of {curve[2]} on {curve[0]} lacks its single worker")
    if curve[2] not in networks:
        raise InvalidInput(f"nothing is known of network {curve[2]}: its tensors and parameters decide")
    service_s = cost.service(networks[curve[2]]).time_s(curve[1])
    alone_s = think_s(speeds[1], service_s)
    return {workers: asynchronous([alone_s] * workers, service_s) for workers in speeds}


def _both(
    cost: ServerCost, curve: Curve, measured: Mapping[Curve, Mapping[int, float]], networks: Mapping[str, Network]
) -> list[tuple[float, float]]:
    guessed = predicted(cost, curve, measured[curve], networks)
    return [(guessed[workers], speed) for workers, speed in measured[curve].items()]


def curve_error(cost: ServerCost, curve: Curve, speeds: Mapping[int, float], networks: Mapping[str, Network]) -> float:
    """Return the mean absolute relative error along a curve, a fraction, but for the single worker, which is given."""
    guessed = predicted(cost, curve, speeds, networks)
    return fmean(abs(guessed[workers] / speed - 1) for workers, speed in speeds.items() if workers > 1)


@dataclass(frozen=True)
class NetworkFit:
    """What is known of one network that some curves were measured of.

    Attributes:
        thinks_s: Time a worker of each GPU type spends by itself, in seconds.
        services_s: Time of a service in seconds, by number of servers.
    """

    thinks_s: Mapping[str, float]
    services_s: Mapping[int, float]

    def speed(self, gpus: Sequence[str], servers: int) -> float:
        """Return the speed of a cluster in steps per second.

        Args:
            gpus: GPU type of each worker, among those fitted.
            servers: Number of parameter servers, among those fitted.
        """
        return asynchronous([self.thinks_s[gpu] for gpu in gpus], self.services_s[servers])


def fit_network(measured: Mapping[Curve, Mapping[int, float]]) -> NetworkFit:
    """Return what fits all curves of one network best: a think time per GPU type, a service per number of servers.

    Args:
        measured: Some points of its curves, in steps per second.

    Raises:
        InvalidInput: If there are no points, or of several networks.
    """
    if len({network for _, _, network in measured}) != 1 or not all(measured.values()):
        raise InvalidInput("a network is fitted to points of its own curves")
    types = sorted({gpu for gpu, _, _ in measured})
    counts = sorted({servers for _, servers, _ in measured})
    points = [(gpu, servers, n, one) for (gpu, servers, _), some in measured.items() for n, one in some.items()]
    slowest = {gpu: max(n / one for kind, _, n, one in points if kind == gpu) for gpu in types}
    fullest = {count: 0.8 / max(one for _, servers, _, one in points if servers == count) for count in counts}

    def unpacked(logs: NDArray[np.float64]) -> NetworkFit:
        times = np.exp(logs).tolist()
        return NetworkFit(dict(zip(types, times, strict=False)), dict(zip(counts, times[len(types) :], strict=True)))

    def gaps(logs: NDArray[np.float64]) -> list[float]:
        fit = unpacked(logs)
        return [log(fit.speed([gpu] * n, servers) / one) for gpu, servers, n, one in points]

    start = np.log([*(0.8 * slowest[gpu] for gpu in types), *(fullest[count] for count in counts)])
    return unpacked(least_squares(gaps, start, loss="soft_l1", f_scale=0.05).x)
