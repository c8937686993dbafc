"""The meter: apply a point, warm up, run a window of queries, read energy at both ends, judge."""

from collections.abc import Sequence

from polythrottle.censor import Censor
from polythrottle.errors import InvalidInput, TrialError
from polythrottle.measurement import Latency, Measurement, Query, Reading, Window
from polythrottle.ports import Device, Recorded, Workload
from polythrottle.problem import Constraint
from polythrottle.space import OperatingPoint


def measure(
    device: Device, workload: Workload, point: OperatingPoint, window: Window, limits: Sequence[Constraint] = ()
) -> Measurement:
    """Return what a point does on a workload.

    A recorded device answers with the window it recorded; any other is driven through a new one.

    Args:
        device: Entered already, so that its original state is saved.
        workload: Serves queries on that device.
        point: Levels for knobs of both; each owner gets its own.
        window: How long to look.
        limits: Absolute limits; a window that is plainly going to break one is cut short, and its measurement censored.

    Raises:
        TrialError: If a level is refused, a query fails, or the window tells nothing.
        DeviceError: If the device cannot be reached.
    """
    own = set(workload.space.names)
    workload.apply(point.only(own))
    if isinstance(device, Recorded):
        return device.recall(point)
    device.apply(point.only(set(point) - own))
    for _ in range(window.warmup):
        workload.query()
    start = device.read()
    queries, censored = _drive(device, workload, window, limits, start)
    return _judge(device, start, device.read(), queries, censored)


def _drive(
    device: Device, workload: Workload, window: Window, limits: Sequence[Constraint], start: Reading
) -> tuple[list[Query], bool]:
    """Issue queries back to back until the window has seen enough; return them, and whether it was cut short."""
    queries: list[Query] = []
    censor = Censor(device, window, limits, start)
    while len(queries) < window.most_queries:
        queries.append(workload.query())
        elapsed_s = device.clock.now() - start.time_s
        if elapsed_s >= window.timeout_s or (elapsed_s >= window.duration_s and len(queries) >= window.queries):
            break
        if censor.gives_up(queries) and len(queries) < window.most_queries and device.read().energy_j > start.energy_j:
            return queries, True
    return queries, False


def _judge(device: Device, start: Reading, end: Reading, queries: list[Query], censored: bool) -> Measurement:
    """Return the measurement a window amounts to, or raise TrialError if it amounts to none."""
    if start.throttled or end.throttled:
        raise TrialError(f"the device slowed itself down at {end.temperature_c} °C, so the window is not valid")
    items, elapsed_s, energy_j = sum(query.items for query in queries), end.time_s - start.time_s, _gain(start, end)
    try:
        return Measurement(
            latency=Latency.of([query.latency_s for query in queries]),
            energy_j=energy_j / items,
            throughput_per_s=items / elapsed_s,
            power_w=energy_j / elapsed_s,
            energy_kind=device.energy_kind,
            boundary=device.boundary,
            temperature_c=_hottest(start, end),
            window_s=elapsed_s,
            censored=censored,
        )
    except InvalidInput as error:
        raise TrialError(f"the window tells nothing: {error}") from error


def _gain(start: Reading, end: Reading) -> float:
    if end.time_s <= start.time_s:
        raise TrialError("the window took no time, so it has no power")
    if end.energy_j <= start.energy_j:
        raise TrialError(f"the energy reading did not move in {end.time_s - start.time_s:.3g} s; use a longer window")
    return end.energy_j - start.energy_j


def _hottest(start: Reading, end: Reading) -> float | None:
    seen = [reading.temperature_c for reading in (start, end) if reading.temperature_c is not None]
    return max(seen, default=None)
