"""The columns of tables of trials: what each figure of a measurement is called in files and frames, its unit last."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from polythrottle.measurement import EXTRAS, METRICS, Measurement

if TYPE_CHECKING:
    import pandas as pd

RECORDED: Mapping[str, Callable[[Measurement], object]] = MappingProxyType(
    {
        "latency_s": lambda m: m.latency.mean_s,
        "latency_p50_s": lambda m: m.latency.p50_s,
        "latency_p90_s": lambda m: m.latency.p90_s,
        "latency_p95_s": lambda m: m.latency.p95_s,
        "latency_p99_s": lambda m: m.latency.p99_s,
        "latency_std_s": lambda m: m.latency.std_s,
        "throughput_per_s": lambda m: m.throughput_per_s,
        "power_w": lambda m: m.power_w,
        "energy_j": lambda m: m.energy_j,
        "temperature_c": lambda m: m.temperature_c,
        "energy_kind": lambda m: str(m.energy_kind),
        "boundary": lambda m: m.boundary,
    }
)
"""What a recorded table holds of each point, in this order."""
OFFERED: Mapping[str, Callable[[Measurement], object]] = MappingProxyType(
    {"offered_per_s": lambda m: m.offered_per_s, "backlog_per_s": lambda m: m.backlog_per_s}
)
"""What it holds besides where requests come at times of their own."""
_SEEN: Mapping[str, Callable[[Measurement], object]] = MappingProxyType(
    {
        "idle_power_w": lambda m: m.idle_power_w,
        "window_s": lambda m: m.window_s,
        "requests": lambda m: m.requests,
        "censored": lambda m: m.censored,
    }
)
_QUANTITIES = {
    "energy": ("energy", "j"),
    "mean": ("latency", "s"),
    **{name: (f"latency_{name}", "s") for name in ("p50", "p90", "p95", "p99")},
    "tokens_per_j": ("tokens", "per_j"),
}
"""What a metric is called in columns where that is not its own name, and its unit."""
_TEXTS = frozenset({"energy_kind", "boundary"})
_OTHERS = {**dict.fromkeys(_TEXTS, "object"), "requests": "Int64", "censored": "boolean"}


def quantity(metric: str) -> tuple[str, str]:
    """Return what a metric or ``energy`` is called in columns, and its unit: ``p99`` gives ``latency_p99, s``."""
    return _QUANTITIES.get(metric) or (metric, METRICS[metric])


def figures(seen: Sequence[Measurement | None]) -> "pd.DataFrame":
    """Return a row of figures for each measurement, SI units; a row of unknowns for None.

    Every column of a recorded table is there; tokens, arrivals and intervals are where any measurement has them. The
    ends of a 95 % interval of ``energy_j`` are ``energy_low_j`` and ``energy_high_j``; the energy's are always there.

    Args:
        seen: What was measured.
    """
    import pandas as pd

    known = [each for each in seen if each is not None]
    taken = dict(_columns(known))
    series = {
        name: pd.Series([None if each is None else take(each) for each in seen], dtype=_OTHERS.get(name, "float64"))
        for name, take in taken.items()
    }
    table: pd.DataFrame = pd.DataFrame(series)
    return table


def _columns(known: Sequence[Measurement]) -> Iterator[tuple[str, Callable[[Measurement], object]]]:
    """Yield the columns that some measurements need, in their order, and what takes each from a measurement."""
    yield from ((name, take) for name, take in RECORDED.items() if name not in _TEXTS)
    bounded = {metric for each in known for metric in each.intervals} | {"energy"}
    for metric in ("energy", *METRICS):
        if metric in bounded:
            stem, unit = quantity(metric)
            yield f"{stem}_low_{unit}", lambda m, metric=metric: _end(m, metric, "low")  # type: ignore[misc]
            yield f"{stem}_high_{unit}", lambda m, metric=metric: _end(m, metric, "high")  # type: ignore[misc]
    for metric in EXTRAS:
        if any(metric in each.extras for each in known):
            yield "_".join(quantity(metric)), lambda m, metric=metric: m.extras.get(metric)  # type: ignore[misc]
    if any(each.offered_per_s is not None for each in known):
        yield from OFFERED.items()
    yield from _SEEN.items()
    yield from ((name, RECORDED[name]) for name in RECORDED if name in _TEXTS)


def _end(measurement: Measurement, metric: str, end: str) -> float | None:
    found = measurement.intervals.get(metric)
    value: float | None = None if found is None else getattr(found, end)
    return value
