"""Which metrics say what of a server's requests, by engine: Triton, vLLM, SGLang, TensorRT-LLM, llama.cpp, the proxy.

An engine is known by names that only it has. A page that has none of them is not read by the names of another engine:
who asks is told what the page seems to be of. Sources: Triton, docs/user_guide/metrics.md of
triton-inference-server/server; vLLM, https://docs.vllm.ai/en/latest/usage/metrics.html; SGLang,
https://docs.sglang.ai/references/production_metrics.html; TensorRT-LLM, pull request 5785 of NVIDIA/TensorRT-LLM, of
which later versions put ``trtllm_`` before each name; llama.cpp, tools/server/README.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Names:
    """Which metrics say what; an empty name is one the server does not have.

    Args:
        answered: Counters of requests that ended, well or not; none where the server does not count them.
        failed: Those of them that failed.
        waiting: Gauges of requests that are not answered yet, waiting ones for the count of those that wait.
        busy: Further gauges of such requests, being answered.
        histogram: Of latencies.
        total: Counter of the latencies' sum; ``total_of`` what it sums over, if not ``answered``.
        summary: Of latencies, with a quantile 0.99.
        engine: For people.
        tokens_in: Counter of the tokens of prompts; ``tokens_out`` of those that were generated.
        tokens_out: Counter.
        first: Histogram of times to the first token.
        per_token: Histogram of each request's mean time per token after it. Times between tokens are another thing.
        label: That each sample has, where the names alone might be anybody's.
    """

    answered: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    waiting: str = ""
    busy: str = ""
    histogram: str = ""
    total: str = ""
    summary: str = ""
    engine: str = ""
    tokens_in: str = ""
    tokens_out: str = ""
    first: str = ""
    per_token: str = ""
    label: str = ""

    @property
    def histograms(self) -> tuple[str, ...]:
        """The names of all histograms."""
        return tuple(filter(None, (self.histogram, self.first, self.per_token)))

    @property
    def wanted(self) -> frozenset[str]:
        """The names of all samples that matter."""
        parts = [f"{name}_{part}" for name in self.histograms for part in ("bucket", "sum", "count")]
        plain = (self.waiting, self.busy, self.total, self.summary, self.tokens_in, self.tokens_out)
        return frozenset({*self.answered, *self.failed, *plain, *parts} - {""})

    @property
    def mark(self) -> tuple[str, ...]:
        """The names of which one must be there."""
        return self.answered or (self.tokens_out,)


# Its "first response" is a chunk and no token, so that no time to the first token is taken from it.
TRITON = Names(
    engine="Triton",
    answered=("nv_inference_request_success", "nv_inference_request_failure"),
    failed=("nv_inference_request_failure",),
    waiting="nv_inference_pending_request_count",
    total="nv_inference_request_duration_us",
    summary="nv_inference_request_summary_us",
)
VLLM = Names(
    engine="vLLM",
    answered=("vllm:request_success_total",),
    waiting="vllm:num_requests_waiting",
    busy="vllm:num_requests_running",
    histogram="vllm:e2e_request_latency_seconds",
    tokens_in="vllm:prompt_tokens_total",
    tokens_out="vllm:generation_tokens_total",
    first="vllm:time_to_first_token_seconds",
    # Versions before had vllm:time_per_output_token_seconds, which counts each token and not each request.
    per_token="vllm:request_time_per_output_token_seconds",
)
SGLANG = Names(
    engine="SGLang",
    answered=("sglang:e2e_request_latency_seconds_count",),
    waiting="sglang:num_queue_reqs",
    busy="sglang:num_running_reqs",
    histogram="sglang:e2e_request_latency_seconds",
    tokens_in="sglang:prompt_tokens_total",
    tokens_out="sglang:generation_tokens_total",
    first="sglang:time_to_first_token_seconds",
    # No time per token of a request: it tells times between tokens, which are another thing.
)
TRTLLM = Names(
    engine="TensorRT-LLM",
    answered=("trtllm_e2e_request_latency_seconds_count",),
    waiting="trtllm_num_requests_waiting",
    busy="trtllm_num_requests_running",
    histogram="trtllm_e2e_request_latency_seconds",
    first="trtllm_time_to_first_token_seconds",
    per_token="trtllm_time_per_output_token_seconds",
)
TRTLLM_1 = Names(
    engine="TensorRT-LLM",
    answered=("e2e_request_latency_seconds_count",),
    histogram="e2e_request_latency_seconds",
    first="time_to_first_token_seconds",
    per_token="time_per_output_token_seconds",
    label="engine_type=",
)
# It counts no requests, and tells no times to the first token.
LLAMA_CPP = Names(
    engine="llama.cpp",
    waiting="llamacpp:requests_deferred",
    busy="llamacpp:requests_processing",
    tokens_in="llamacpp:prompt_tokens_total",
    tokens_out="llamacpp:tokens_predicted_total",
)
PROXY = Names(
    engine="polythrottle proxy",
    answered=("polythrottle_proxy_requests_total",),
    waiting="polythrottle_proxy_requests_waiting",
    busy="polythrottle_proxy_requests_running",
    histogram="polythrottle_proxy_e2e_request_latency_seconds",
    tokens_in="polythrottle_proxy_prompt_tokens_total",
    tokens_out="polythrottle_proxy_generation_tokens_total",
    first="polythrottle_proxy_time_to_first_token_seconds",
    per_token="polythrottle_proxy_time_per_output_token_seconds",
)
KNOWN = (PROXY, TRITON, VLLM, SGLANG, TRTLLM, TRTLLM_1, LLAMA_CPP)
_PREFIXES = (
    ("vllm:", "vLLM"),
    ("sglang:", "SGLang"),
    ("sglang_", "SGLang"),
    ("trtllm", "TensorRT-LLM"),
    ("nv_inference_", "Triton"),
    ("llamacpp:", "llama.cpp"),
    ("tgi_", "TGI"),
    ("lmdeploy:", "LMDeploy"),
    ("dynamo_", "Dynamo"),
)
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)")


def named(histogram: str, waiting: str = "") -> Names:
    """Return the names of a server of which a histogram of latencies is known, and perhaps a gauge.

    Args:
        histogram: In the unit its name ends in: ``_seconds``, ``_ms``, ``_us``; seconds if it says none.
        waiting: Of requests that are not answered yet.
    """
    return Names(answered=(f"{histogram}_count",), waiting=waiting, histogram=histogram)


def names_on(text: str, known: Sequence[Names]) -> Names | None:
    """Return which of several servers a page of metrics is of; None if of none of them."""
    present: dict[str, list[str]] = {}
    for line in text.splitlines():
        if (found := _SAMPLE.match(line)) is not None:
            present.setdefault(found[1], []).append(line)
    for names in known:
        lines = [line for name in names.mark for line in present.get(name, ())]
        if any(names.label in line for line in lines):
            return names
    return None


def whose(text: str, known: Iterable[Names]) -> str:
    """Return why a page of metrics cannot be read: which engine it seems to be of, and what it lacks or has."""
    seen = {found[1] for line in text.splitlines() if (found := _SAMPLE.match(line)) is not None}
    of_engine = {engine for prefix, engine in _PREFIXES if any(name.startswith(prefix) for name in seen)}
    for names in known:
        if names.engine in of_engine:
            lacking = " or ".join(names.mark)
            return (
                f"this is a page of {names.engine} without {lacking}: no request has ended yet, or its names are other"
            )
    marks = ", ".join(dict.fromkeys(name for names in known for name in names.mark))
    if of_engine:
        return f"this is a page of {' and '.join(sorted(of_engine))}, whose requests are not known; give histogram=NAME"
    return f"none of {marks} is among the metrics"
