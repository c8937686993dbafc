"""What the daemon shows, for Prometheus: one scrape is one status, and what is unknown is absent.

Nothing is kept between two scrapes: every figure is taken from the status given, by a registry of its own. Names end in
base units, as https://prometheus.io/docs/practices/naming/ asks; labels hold names of knobs, clocks, guards, phases and
kinds of events, of which there are few, never words. Figures of energy carry its kind, so that what is simulated cannot
be taken for measured.
"""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Tuple, Union

from polythrottle.daemon.control.state import Phase
from polythrottle.daemon.status import FinetuningShown, NodeShown, ServiceShown, Status
from polythrottle.storage.cells import iso_time

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_OPENMETRICS = "application/openmetrics-text"
_KIND = ("energy_kind",)
KINDS = (
    "start",
    "stop",
    "phase",
    "guard",
    "drift",
    "profile",
    "study",
    "budget",
    "foreign",
    "refused",
    "lease",
    "driver",
    "machine",
    "model",
    "pod",
    "finetuning",
    "fault",
    "other",
)
"""Of events; one of a kind that is not listed counts as other, so that labels stay few."""

Value = Union[float, int, bool, None]
Labelled = typing.Mapping[Tuple[str, ...], Value]


@dataclass(frozen=True)
class Figure:
    """One family of samples.

    Args:
        name: In base units, below ``polythrottle_``; without ``_total``, which a counter is given.
        help: One sentence.
        values: What it is, by the values of its labels; None is left out.
        labels: Their names.
        counter: Whether it only rises while the daemon lives.
    """

    name: str
    help: str
    values: Callable[[Status], Labelled]
    labels: tuple[str, ...] = ()
    counter: bool = False


def render(status: Status, accept: str = "") -> tuple[bytes, str]:
    """Return what a scrape is answered, and its content type.

    Args:
        status: Of the last turn.
        accept: The ``Accept`` header of the request: OpenMetrics where it names it, else the older text format.
    """
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
    from prometheus_client.openmetrics import exposition as openmetrics

    # Describing itself would collect all of it once more.
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Present(status))
    if _OPENMETRICS in accept:
        text: bytes = openmetrics.generate_latest(registry)  # type: ignore[no-untyped-call]
        return text, openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


def render_node(whole: Status, node: NodeShown, services: Mapping[str, Status], accept: str = "") -> tuple[bytes, str]:
    """Return what a scrape of a daemon with several services is answered, and its content type.

    Args:
        whole: The server as one.
        node: The watts that its services share.
        services: The status of each, by its name.
        accept: As `render` takes it.
    """
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
    from prometheus_client.openmetrics import exposition as openmetrics

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Shared(whole, node, services))
    if _OPENMETRICS in accept:
        text: bytes = openmetrics.generate_latest(registry)  # type: ignore[no-untyped-call]
        return text, openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


class _Shared:
    """A collector over the services of a server; each sample says of which it is."""

    def __init__(self, whole: Status, node: NodeShown, services: Mapping[str, Status]) -> None:
        self._whole = whole
        self._node = node
        self._services = services

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of a server of services, as prometheus_client asks for them."""
        from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

        yield InfoMetricFamily(
            "polythrottle_build", "Version, device and kind of energy of this daemon.", _build(self._whole)
        )
        for figure in FIGURES:
            every = {}
            for name, status in self._of(figure).items():
                every.update({(name, *labels): value for labels, value in figure.values(status).items()})
            family = _labelled(figure, ("service", *figure.labels), every)
            if family.samples:
                yield family
        for name, words, value in _NODE:
            found = value(self._node)
            if found is not None:
                yield GaugeMetricFamily(f"polythrottle_node_{name}", words, float(found))
        for name, words, of_service in _SHARE:
            gauge = GaugeMetricFamily(f"polythrottle_service_{name}", words, labels=("service",))
            for each in self._node.services:
                found = of_service(each)
                if found is not None:
                    gauge.add_metric((each.name,), float(found))
            if gauge.samples:
                yield gauge
        yield from self._pods()

    def _of(self, figure: Figure) -> Mapping[str, Status]:
        """Return the statuses that a figure is shown of, by service; the server as one is the service ""."""
        if figure in _DAEMON:
            return {"": self._whole}
        if figure in _CONTROLLER:
            return {"": self._whole, **self._services}
        return self._services

    def _pods(self) -> Iterator[Metric]:
        """Yield which service is which pod, to be joined with the figures of services."""
        from prometheus_client.core import GaugeMetricFamily

        told = GaugeMetricFamily(
            "polythrottle_pod",
            "1 if a pod that asks for it is looked after, as this service; 0 if not.",
            labels=("namespace", "pod", "service"),
        )
        for each in self._node.pods:
            told.add_metric((each.namespace, each.pod, each.service), float(not each.refused))
        if told.samples:
            yield told


class _Present:
    """A collector over one status."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of one service, as prometheus_client asks for them."""
        from prometheus_client.core import InfoMetricFamily

        yield InfoMetricFamily(
            "polythrottle_build", "Version, device and kind of energy of this daemon.", _build(self._status)
        )
        yield from (family for figure in FIGURES if (family := _family(figure, self._status)).samples)


def _build(status: Status) -> dict[str, str]:
    return {"version": status.polythrottle, "device": status.device, "energy_kind": status.energy_kind}


def _family(figure: Figure, status: Status) -> Metric:
    return _labelled(figure, figure.labels, figure.values(status))


def _labelled(figure: Figure, names: Sequence[str], values: Labelled) -> Metric:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    name = f"polythrottle_{figure.name}"
    family: CounterMetricFamily | GaugeMetricFamily
    if figure.counter:
        family = CounterMetricFamily(name, figure.help, labels=names)
    else:
        family = GaugeMetricFamily(name, figure.help, labels=names)
    for labels, value in values.items():
        if value is not None and math.isfinite(value):
            family.add_metric(labels, float(value))
    return family


def _one(value: Callable[[Status], Value]) -> Callable[[Status], Labelled]:
    return lambda status: {(): value(status)}


def _energy(value: Callable[[Status], Value]) -> Callable[[Status], Labelled]:
    return lambda status: {(status.energy_kind,): value(status)}


def _plain(name: str, words: str, value: Callable[[Status], Value]) -> Figure:
    return Figure(name, words, _one(value))


def _joules(name: str, words: str, value: Callable[[Status], Value], counter: bool = False) -> Figure:
    return Figure(name, words, _energy(value), _KIND, counter)


def _time(text: str) -> float | None:
    """Return an ISO 8601 time in seconds since 1970; None if there is none."""
    try:
        if text:
            return iso_time(text).timestamp()
        return None
    except ValueError:
        return None


def _phases(status: Status) -> Labelled:
    return {(str(phase),): status.phase == phase for phase in Phase}


def _knobs(status: Status) -> Labelled:
    return {(name,): level for name, level in status.point.items() if not isinstance(level, str)}


def _finetuning(value: Callable[[FinetuningShown], Value]) -> Callable[[Status], Value]:
    return lambda status: None if status.finetuning is None else value(status.finetuning)


def _told(status: Status) -> Labelled:
    counts = dict.fromkeys(KINDS, 0)
    for kind, count in status.told.items():
        counts[kind if kind in counts else "other"] += count
    return {(kind,): count for kind, count in counts.items()}


def _shadow(status: Status) -> Value:
    if status.budget.shadow_w_per_ms is None:
        return None
    # Per second, the base unit, and not per millisecond as people are shown it.
    return 1e3 * status.budget.shadow_w_per_ms


_DAEMON: Sequence[Figure] = (
    _plain("start_time_seconds", "When the daemon started, in seconds since 1970.", lambda s: _time(s.since)),
    _plain("last_turn_time_seconds", "When the control loop last ran, in seconds since 1970.", lambda s: _time(s.at)),
    Figure("turns", "Turns of the control loop.", _one(lambda s: s.turn), counter=True),
    _plain("control_lateness_seconds", "How late the last turn began.", lambda s: s.late_s),
    _plain("control_lateness_p99_seconds", "The same, p99 of the last 1000 turns.", lambda s: s.late_p99_s),
    _plain("resident_memory_bytes", "Resident memory of the daemon's process.", lambda s: s.resident_bytes or None),
)
_CONTROLLER: Sequence[Figure] = (
    _plain("faults", "Number of faults now, such as a full disk.", lambda s: len(s.faults)),
    Figure("events", "Events since the daemon started, by kind.", _told, ("kind",), counter=True),
    Figure("phase", "1 for the phase the controller is in, 0 for the others.", _phases, ("phase",)),
    _plain("device_reachable", "Whether the device answers.", lambda s: s.reachable),
    _plain("device_leased", "Whether the daemon may set the device.", lambda s: s.leased),
)
_WORKLOAD: Sequence[Figure] = (
    _plain("workload_up", "Whether the workload runs.", lambda s: s.workload.up if s.workload else None),
    Figure("requests", "Requests answered since the daemon started.", _one(lambda s: s.requests), counter=True),
    Figure("requests_failed", "Requests that failed, of those answered.", _one(lambda s: s.failed), counter=True),
    _plain("requests_per_second", "Requests arriving per second.", lambda s: s.rate_per_s),
    _plain(
        "demand_requests_per_second",
        "Load the daemon is prepared for, in requests per second.",
        lambda s: s.demand_per_s,
    ),
    _plain("requests_waiting", "Requests that wait to be sent.", lambda s: s.waiting),
    _plain("request_latency_mean_seconds", "Mean latency of requests lately.", lambda s: s.mean_s),
    _plain("request_latency_p99_seconds", "p99 latency of requests lately.", lambda s: s.p99_s),
    _plain("request_latency_limit_seconds", "What the p99 must stay within.", lambda s: s.limit_s),
    _plain("time_to_first_token_p99_seconds", "p99 time to the first token lately.", lambda s: s.ttft_p99_s),
    _plain("time_per_token_p99_seconds", "p99 time per token after the first lately.", lambda s: s.tpot_p99_s),
    _plain("prompt_tokens_per_second", "Tokens of prompts arriving per second.", lambda s: s.tokens_in_per_s),
    _plain("generated_tokens_per_second", "Tokens generated per second.", lambda s: s.tokens_out_per_s),
)
_DEVICE: Sequence[Figure] = (
    _joules("power_watts", "Mean power over the last turn.", lambda s: s.power_w),
    _joules("power_peak_watts", "Highest power sample of the last turn.", lambda s: s.peak_w),
    _joules("energy_joules", "Energy drawn since the daemon started.", lambda s: s.energy_j, counter=True),
    _plain("temperature_celsius", "Temperature of the hottest sensor.", lambda s: s.temperature_c),
    _plain("throttled", "Whether the device throttles now.", lambda s: s.throttled),
    Figure(
        "clock_hertz",
        "Clock that runs now.",
        lambda s: {(name,): hertz for name, hertz in s.clocks_hz.items()},
        ("clock",),
    ),
    Figure("knob", "Level of each knob, in SI units; a name ends in its unit.", _knobs, ("knob",)),
    _plain("gather_seconds", "How long a request may wait for others of its batch.", lambda s: s.gather_s),
)
_LADDER: Sequence[Figure] = (
    _plain("rung", "Rung of the ladder that is followed, from 0.", lambda s: s.rung.number if s.rung else None),
    _plain("rungs", "How many rungs the ladder has.", lambda s: s.rung.of if s.rung else None),
    _plain(
        "rung_requests_per_second", "Highest load the rung can answer.", lambda s: s.rung.rate_per_s if s.rung else None
    ),
    _plain("rung_power_watts", "Mean power predicted at that load.", lambda s: s.rung.power_w if s.rung else None),
    _plain("rung_latency_p99_seconds", "p99 predicted at that load.", lambda s: s.rung.p99_s if s.rung else None),
)
_WATCHED: Sequence[Figure] = (
    Figure(
        "guard_tripped", "Whether a guard has tripped.", lambda s: {(g.name,): g.tripped for g in s.guards}, ("guard",)
    ),
    Figure(
        "guard_value",
        "What a guard measures, in SI units.",
        lambda s: {(g.name,): g.value for g in s.guards},
        ("guard",),
    ),
    Figure(
        "guard_limit", "Limit of a guard, in SI units.", lambda s: {(g.name,): g.limit for g in s.guards}, ("guard",)
    ),
    _plain("drifted", "Whether energy or latency has drifted from what the profile predicts.", lambda s: bool(s.drift)),
    _plain("budget_limit_watts", "Mean power allowed now.", lambda s: s.budget.limit_w),
    _plain("budget_left_joules", "What is left of the budget.", lambda s: s.budget.left_j),
    _plain("budget_met", "Whether the budget can be met.", lambda s: s.budget.met),
    _plain("budget_shadow_watts_per_second", "Power that a longer limit of the p99 would save, per second.", _shadow),
    _joules(
        "saved_joules",
        "Saved since midnight, against the default point at the same requests.",
        lambda s: s.saved.joules,
    ),
    _joules("saved_low_joules", "Lower end of the 95 % interval of what was saved.", lambda s: s.saved.low),
    _joules("saved_high_joules", "Upper end of the 95 % interval of what was saved.", lambda s: s.saved.high),
    _plain("study_running", "Whether a study runs.", lambda s: bool(s.study and s.study.state == "running")),
    _plain("study_trials", "Trials of the last study so far.", lambda s: s.study.trials if s.study else None),
    _plain("study_trials_most", "Trials it may make at most.", lambda s: s.study.of if s.study else None),
    _plain("exploring_late_requests", "Late for studies over the last day or so.", lambda s: s.exploring.late),
    _plain("exploring_late_left_requests", "More that a study may make late.", lambda s: s.exploring.late_left),
)
_FINETUNING: Sequence[Figure] = (
    _plain(
        "finetuning_running",
        "Whether a trainer works beside the workload.",
        _finetuning(lambda f: f.state == "running"),
    ),
    _plain("finetuning_epochs_done", "Epochs it has done.", _finetuning(lambda f: f.epochs_done)),
    _plain("finetuning_samples_per_second", "Samples it trains on lately.", _finetuning(lambda f: f.rate_per_s)),
)
FIGURES: tuple[Figure, ...] = (*_DAEMON, *_CONTROLLER, *_WORKLOAD, *_DEVICE, *_LADDER, *_WATCHED, *_FINETUNING)
"""All families but ``polythrottle_build_info``, in the order they are shown in."""

_NODE: Sequence[tuple[str, str, Callable[[NodeShown], Value]]] = (
    ("power_watts", "Power of the server over the last turn, its rest included.", lambda n: n.power_w),
    ("devices_power_watts", "What its services' devices drew of it.", lambda n: n.boards_w),
    ("rest_watts", "What is counted for the rest of the server.", lambda n: n.rest_w),
    ("limit_watts", "What the server may draw.", lambda n: n.limit_w),
    ("limit_met", "Whether what its services may draw at most fits.", lambda n: n.met),
    ("seconds_above_limit", "Turns above the limit since it was set.", lambda n: n.above),
    ("seconds_above_limit_longest", "The most of them in a row.", lambda n: n.above_most),
)
_SHARE: Sequence[tuple[str, str, Callable[[ServiceShown], Value]]] = (
    ("weight", "What the service's SLO counts.", lambda s: s.weight),
    ("share_watts", "What its devices may draw at most.", lambda s: s.share_w),
    ("counted_watts", "What was counted for its devices.", lambda s: s.counted_w),
    ("short_of_power", "Whether its SLO is expected to break for want of watts.", lambda s: s.short),
)
