"""What a server's Prometheus metrics say of its requests: Triton's, vLLM's, and any histogram of latencies.

Names: https://github.com/triton-inference-server/server/blob/main/docs/user_guide/metrics.md and
https://docs.vllm.ai/en/latest/usage/metrics.html.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from polythrottle.errors import InvalidInput

_MODEL_LABELS = ("model", "model_name")
_SCALES = {"us": 1e-6, "microseconds": 1e-6, "ms": 1e-3, "milliseconds": 1e-3, "s": 1.0, "seconds": 1.0}
_P99 = "0.99"
_MOST_BUCKETS = 1000


@dataclass(frozen=True)
class Names:
    """Which metrics say what; an empty name is one the server does not have.

    Args:
        answered: Counters of requests that ended, well or not.
        failed: Those of them that failed.
        waiting: Gauges of requests that are not answered yet, waiting ones for the count of those that wait.
        busy: Further gauges of such requests, being answered.
        histogram: Of latencies.
        total: Counter of the latencies' sum; ``total_of`` what it sums over, if not ``answered``.
        summary: Of latencies, with a quantile 0.99.
    """

    answered: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    waiting: str = ""
    busy: str = ""
    histogram: str = ""
    total: str = ""
    summary: str = ""

    @property
    def wanted(self) -> frozenset[str]:
        """The names of all samples that matter."""
        parts = [f"{self.histogram}_{part}" for part in ("bucket", "sum", "count")] if self.histogram else []
        return frozenset(
            {*self.answered, *self.failed, self.waiting, self.busy, self.total, self.summary, *parts} - {""}
        )


TRITON = Names(
    answered=("nv_inference_request_success", "nv_inference_request_failure"),
    failed=("nv_inference_request_failure",),
    waiting="nv_inference_pending_request_count",
    total="nv_inference_request_duration_us",
    summary="nv_inference_request_summary_us",
)
VLLM = Names(
    answered=("vllm:request_success_total",),
    waiting="vllm:num_requests_waiting",
    busy="vllm:num_requests_running",
    histogram="vllm:e2e_request_latency_seconds",
)


def named(histogram: str, waiting: str = "") -> Names:
    """Return the names of a server of which a histogram of latencies is known, and perhaps a gauge.

    Args:
        histogram: In the unit its name ends in: ``_seconds``, ``_ms``, ``_us``; seconds if it says none.
        waiting: Of requests that are not answered yet.
    """
    return Names(answered=(f"{histogram}_count",), waiting=waiting, histogram=histogram)


@dataclass(frozen=True)
class Counts:
    """What a server has counted so far; None is not known.

    Args:
        answered: Requests that ended.
        failed: Of them, without an answer.
        waiting: That wait now; ``busy`` that are being answered.
        sum_s: Of the latencies of ``summed`` requests.
        summed: How many.
        buckets: Upper end of a latency, and how many stayed within, ascending.
        p99_s: As the server computed it.
    """

    answered: float
    failed: float | None = None
    waiting: float | None = None
    busy: float | None = None
    sum_s: float | None = None
    summed: float | None = None
    buckets: tuple[tuple[float, float], ...] = ()
    p99_s: float | None = None

    @property
    def arrived(self) -> float:
        """Requests that came so far, but for a constant: those that ended, wait or are being answered."""
        return self.answered + (self.waiting or 0.0) + (self.busy or 0.0)

    def began_anew(self, before: Counts) -> bool:
        """Return whether the server counts from the beginning since, as after a restart."""
        pairs = [(self.answered, before.answered), (self.failed, before.failed), (self.summed, before.summed)]
        known = dict(before.buckets)
        pairs += [(count, known.get(end)) for end, count in self.buckets]
        return any(now is not None and then is not None and now < then for now, then in pairs)


@dataclass
class _Sums:
    """Samples added up over labels."""

    values: dict[str, float] = field(default_factory=dict)
    buckets: dict[float, float] = field(default_factory=dict)
    p99: float | None = None

    def take(self, sample: Sample, names: Names) -> None:
        value = float(sample.value)
        if names.histogram and sample.name == f"{names.histogram}_bucket":
            end = float(sample.labels.get("le", "nan"))
            if len(self.buckets) < _MOST_BUCKETS and not math.isnan(end):
                self.buckets[end] = self.buckets.get(end, 0.0) + value
        elif names.summary and sample.name == names.summary:
            if sample.labels.get("quantile") == _P99 and math.isfinite(value) and value > 0:
                self.p99 = max(value, self.p99 or 0.0)
        elif math.isfinite(value):
            self.values[sample.name] = self.values.get(sample.name, 0.0) + value


def counts_of(text: str, known: Sequence[Names], model: str = "") -> Counts:
    """Return what a server has counted, from the text of its metrics; several series are added up.

    Args:
        text: In the exposition format of Prometheus.
        known: Which metrics matter; of several servers, the first whose are there.
        model: Only series of this model, where they say which; all if empty.

    Raises:
        InvalidInput: If the text is not of that format, or none of the metrics is in it.
    """
    present = {line.partition("{")[0].partition(" ")[0] for line in text.splitlines()}
    names = next((each for each in known if present.intersection(each.answered)), None)
    if names is None:
        raise InvalidInput(
            f"none of {', '.join(name for each in known for name in each.answered)} is among the metrics"
        )
    sums = _Sums()
    try:
        for sample in _samples(text, names.wanted):
            if not model or _model(sample.labels) in ("", model):
                sums.take(sample, names)
    except (ValueError, LookupError, TypeError, OverflowError) as error:
        raise InvalidInput(f"this is no text of Prometheus metrics: {str(error)[:80]}") from error
    return _counted(sums, names)


def _samples(text: str, wanted: frozenset[str]) -> Iterable[Sample]:
    """Yield the samples that matter; only their lines are parsed, for a server may have thousands of others."""
    lines = [line for line in text.splitlines() if line.partition("{")[0].partition(" ")[0] in wanted]
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        yield from family.samples


def _model(labels: Mapping[str, str]) -> str:
    return next((labels[name] for name in _MODEL_LABELS if name in labels), "")


def _counted(sums: _Sums, names: Names) -> Counts:
    known = [sums.values[name] for name in names.answered if name in sums.values]
    if not known:
        raise InvalidInput("none of the metrics is of this model; look at the label model or model_name")
    scale_s = scale(names.histogram or names.total)
    whole = (f"{names.histogram}_sum", f"{names.histogram}_count") if names.histogram else (names.total, "")
    summed = sums.values.get(whole[1]) if whole[1] else sum(known)
    total = sums.values.get(whole[0])
    found = Counts(
        sum(known),
        _total(sums, names.failed),
        sums.values.get(names.waiting),
        sums.values.get(names.busy),
        None if total is None else total * scale_s,
        summed,
        tuple((end * scale_s, count) for end, count in sorted(sums.buckets.items())),
    )
    return found if sums.p99 is None else replace(found, p99_s=sums.p99 * scale(names.summary))


def _total(sums: _Sums, names: tuple[str, ...]) -> float | None:
    known = [sums.values[name] for name in names if name in sums.values]
    return sum(known) if known else None


def scale(name: str) -> float:
    """Return the seconds in the unit a metric's name ends in; 1 if it says none."""
    return _SCALES.get(name.rpartition("_")[2], 1.0)


@dataclass(frozen=True)
class Quantile:
    """A percentile out of a histogram; None with the reason if it cannot be told."""

    value_s: float | None
    why: str = ""


def quantile(before: Counts, now: Counts, share: float = 0.99, least: int = 20) -> Quantile:
    """Return the time within which a share of the requests stayed that ended between two looks.

    Within a bucket requests are taken to be spread evenly, as Prometheus' own ``histogram_quantile`` does.

    Args:
        before: The earlier look.
        now: The later.
        share: Of the requests.
        least: How many there must be.
    """
    then = dict(before.buckets)
    added = [(end, max(0.0, count - then.get(end, 0.0))) for end, count in now.buckets]
    total = added[-1][1] if added else 0.0
    if total < least:
        return Quantile(None)
    low_s, below = 0.0, 0.0
    for end, count in added:
        if count >= share * total:
            if math.isinf(end):
                return Quantile(
                    None, f"more than {1 - share:.0%} of requests took longer than the top bucket, {low_s:g} s"
                )
            part = (share * total - below) / (count - below) if count > below else 1.0
            return Quantile(low_s + part * (end - low_s))
        low_s, below = end, count
    return Quantile(None, "the histogram has no bucket for all")
