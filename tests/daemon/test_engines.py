"""Metric pages of language models' servers, as records of real ones have them: whose they are, and what they say."""

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from polythrottle.daemon.control.events import Guard, tripped
from polythrottle.daemon.followed_profile import bounds_of
from polythrottle.daemon.loop.mailbox import guards_of
from polythrottle.daemon.observation import ControlPeriod, RequestStats
from polythrottle.daemon.traffic.engines import KNOWN, SGLANG, TRTLLM, TRTLLM_1, VLLM, Names, names_on
from polythrottle.daemon.traffic.server_metrics import Fetcher, Page, ScrapedTraffic, counts_of
from polythrottle.daemon.traffic.sources import open_traffic
from polythrottle.domain.errors import InvalidInput
from polythrottle.proxy.traffic import Figures, Gauges

# vLLM 0.5.3 on an H100, https://github.com/vllm-project/vllm/issues/8115.
VLLM_0 = """
vllm:time_to_first_token_seconds_count{model_name="meta-llama/Meta-Llama-3-70B-Instruct"} 8060.0
vllm:request_success_total{finished_reason="stop",model_name="meta-llama/Meta-Llama-3-70B-Instruct"} 3810.0
vllm:request_success_total{finished_reason="length",model_name="meta-llama/Meta-Llama-3-70B-Instruct"} 108.0
"""
# SGLang, https://docs.sglang.ai/references/production_metrics.html, left out what does not matter here.
SGLANG_PAGE = """
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{model_name="meta-llama/Llama-3.1-8B-Instruct"} 8.128902e+06
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{model_name="meta-llama/Llama-3.1-8B-Instruct"} 7.557572e+06
# TYPE sglang:time_to_first_token_seconds histogram
sglang:time_to_first_token_seconds_sum{model_name="meta-llama/Llama-3.1-8B-Instruct"} 2.3518979474117756e+06
sglang:time_to_first_token_seconds_bucket{le="0.001",model_name="meta-llama/Llama-3.1-8B-Instruct"} 0.0
sglang:time_to_first_token_seconds_bucket{le="+Inf",model_name="meta-llama/Llama-3.1-8B-Instruct"} 11008.0
sglang:time_to_first_token_seconds_count{model_name="meta-llama/Llama-3.1-8B-Instruct"} 11008.0
# TYPE sglang:e2e_request_latency_seconds histogram
sglang:e2e_request_latency_seconds_sum{model_name="meta-llama/Llama-3.1-8B-Instruct"} 3.116093850019932e+06
sglang:e2e_request_latency_seconds_bucket{le="0.3",model_name="meta-llama/Llama-3.1-8B-Instruct"} 0.0
sglang:e2e_request_latency_seconds_bucket{le="0.5",model_name="meta-llama/Llama-3.1-8B-Instruct"} 6.0
sglang:e2e_request_latency_seconds_bucket{le="+Inf",model_name="meta-llama/Llama-3.1-8B-Instruct"} 11228.0
sglang:e2e_request_latency_seconds_count{model_name="meta-llama/Llama-3.1-8B-Instruct"} 11228.0
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="meta-llama/Llama-3.1-8B-Instruct"} 162.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="meta-llama/Llama-3.1-8B-Instruct"} 2826.0
"""
# TensorRT-LLM as first released, https://github.com/vllm-project/aibrix/issues/2004 and pull request 5785 of its own.
TRTLLM_PAGE = """
# TYPE e2e_request_latency_seconds histogram
e2e_request_latency_seconds_sum{engine_type="undefined",model_name="undefined"} 3.4878239994868636
e2e_request_latency_seconds_bucket{engine_type="undefined",le="0.3",model_name="undefined"} 0.0
e2e_request_latency_seconds_bucket{engine_type="undefined",le="+Inf",model_name="undefined"} 2.0
e2e_request_latency_seconds_count{engine_type="undefined",model_name="undefined"} 2.0
# TYPE time_to_first_token_seconds histogram
time_to_first_token_seconds_bucket{engine_type="undefined",le="2.5",model_name="undefined"} 2.0
time_to_first_token_seconds_bucket{engine_type="undefined",le="+Inf",model_name="undefined"} 2.0
time_to_first_token_seconds_count{engine_type="undefined",model_name="undefined"} 2.0
"""


def llama_cpp(prompt: int, generated: int, waiting: int = 0) -> str:
    """Return a page as llama.cpp's server writes it (to_metrics in tools/server/server-task.cpp)."""
    figures = {"prompt_tokens_total": prompt, "tokens_predicted_total": generated, "n_decode_total": 9}
    gauges = {"requests_processing": 1, "requests_deferred": waiting}
    lines = [f"# TYPE llamacpp:{name} counter\nllamacpp:{name} {value}" for name, value in figures.items()]
    lines += [f"# TYPE llamacpp:{name} gauge\nllamacpp:{name} {value}" for name, value in gauges.items()]
    return "\n".join(lines) + "\n"


def vllm(answers: int, prompt: int, generated: int, first_s: float = 0.2, per_token_s: float = 0.03) -> str:
    """Return a page with vLLM's names of today, by Prometheus' own library."""
    registry = CollectorRegistry()
    labels = ("model_name", "engine")
    values = ("m", "0")
    Counter("vllm:prompt_tokens", "x", labels, registry=registry).labels(*values).inc(prompt)
    Counter("vllm:generation_tokens", "x", labels, registry=registry).labels(*values).inc(generated)
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
        Gauge(name, "x", labels, registry=registry).labels(*values).set(0)
    done = Counter("vllm:request_success", "x", (*labels, "finished_reason"), registry=registry)
    bounds = (0.01, 0.02, 0.04, 0.1, 0.2, 0.4, 1.0)
    histograms = [
        Histogram(f"vllm:{name}_seconds", "x", labels, buckets=bounds, registry=registry).labels(*values)
        for name in ("time_to_first_token", "request_time_per_output_token", "e2e_request_latency")
    ]
    done.labels(*values, "stop").inc(answers)
    for _ in range(answers):
        for histogram, value_s in zip(histograms, (first_s, per_token_s, 0.9), strict=True):
            histogram.observe(value_s)
    return generate_latest(registry).decode()


class Pages(Fetcher):
    """Pages that are there at once, one after the other."""

    def __init__(self, *texts: str) -> None:
        self._texts = list(texts)
        self._number = 0

    def page(self, patience_s: float) -> Page:
        """Return the next one."""
        self._number += 1
        return Page(self._number, self._texts.pop(0), "")

    def close(self) -> None:
        """Do nothing."""


def looked_at(*texts: str, request_tokens: float | None = None) -> tuple[RequestStats, str]:
    """Return what the last of several pages, a second apart, tells since the one before, and the note."""
    traffic = ScrapedTraffic(Pages(*texts), KNOWN, "", "metrics:test", request_tokens)
    seen = [traffic.look(float(now_s)) for now_s in range(len(texts))]
    assert seen[-1] is not None, traffic.note
    return seen[-1], traffic.note


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (VLLM_0, VLLM),
        (SGLANG_PAGE, SGLANG),
        (TRTLLM_PAGE, TRTLLM_1),
        (TRTLLM_PAGE.replace("\ne2e", "\ntrtllm_e2e"), TRTLLM),
    ],
)
def test_a_page_is_known_by_its_engine(text: str, names: Names) -> None:
    """Recorded pages of each, by the names that only it has."""
    assert names_on(text, KNOWN) == names


def test_recorded_pages_are_read() -> None:
    """Requests and tokens are those on the page; what a version does not have is not known."""
    old = counts_of(VLLM_0, KNOWN)
    assert (old.answered, old.tokens_in, old.per_token) == (3918, None, ())
    page = counts_of(SGLANG_PAGE, KNOWN)
    assert (page.answered, page.waiting, page.busy) == (11228, 2826, 162)
    assert (page.tokens_in, page.tokens_out) == (8128902, 7557572)
    assert page.first[-1][1] == 11008
    bare = counts_of(TRTLLM_PAGE, KNOWN)
    assert (bare.answered, bare.engine, bare.waiting) == (2, "TensorRT-LLM", None)


def test_tokens_and_their_times_are_known_since_the_look_before() -> None:
    """Tokens in and out, and the p99 of the first one and of the time per token, out of the requests that ended."""
    seen, note = looked_at(vllm(100, 1000, 500), vllm(200, 71_000, 2500, first_s=0.3, per_token_s=0.015))
    assert (seen.arrived, seen.tokens_in, seen.tokens_out) == (100, 70_000, 2000)
    assert seen.ttft_p99_s is not None
    assert seen.tpot_p99_s is not None
    assert 0.2 < seen.ttft_p99_s <= 0.4
    assert 0.01 < seen.tpot_p99_s <= 0.02
    assert note == ""


def test_the_times_of_tokens_on_a_page_are_guarded_and_shown() -> None:
    """What a scraped page tells of first tokens and tokens a second reaches guards and status; elsewhere is no row."""
    seen, _ = looked_at(vllm(100, 1000, 500), vllm(200, 71_000, 2500, first_s=0.3, per_token_s=0.015))
    period = ControlPeriod(2.0, 1.0, seen, None)
    bounds = bounds_of(("ttft_p99<=150ms", "tpot_p99<=100ms"))
    (trip,) = tripped(bounds, period.observed)
    assert trip.guard is Guard.TTFT
    assert (period.per_s(seen.tokens_in), period.per_s(seen.tokens_out)) == (70_000, 2000)
    assert period.per_s(None) is replace(period, jumped=True).per_s(5) is None
    shown = {guard.name: guard for guard in guards_of(bounds, period.observed)}
    assert (shown["ttft p99"].value, shown["ttft p99"].limit) == (seen.ttft_p99_s, 0.15)
    assert (shown["ttft p99"].tripped, shown["tpot p99"].tripped) == (True, False)
    silent = ControlPeriod(2.0, 1.0, RequestStats(), None).observed
    assert tripped(bounds, silent) == ()
    assert {"ttft p99", "tpot p99"}.isdisjoint(guard.name for guard in guards_of(bounds_of(("p99<=1s",)), silent))


def test_load_may_be_counted_in_tokens() -> None:
    """So many tokens are a request; what is left over counts at the next look."""
    pages = [vllm(1, 1000, 0), vllm(1, 1000, 1500), vllm(1, 1000, 2000)]
    assert looked_at(*pages[:2], request_tokens=1000.0)[0].arrived == 1
    assert looked_at(*pages, request_tokens=1000.0)[0].arrived == 1


def test_llama_cpp_counts_tokens_alone() -> None:
    """Requests are not known, and what to do is said; by tokens its load is."""
    pages = llama_cpp(1000, 100), llama_cpp(1600, 250, waiting=3)
    seen, note = looked_at(*pages)
    assert (seen.arrived, seen.answered, seen.waiting) == (None, None, 3)
    assert (seen.tokens_in, seen.tokens_out) == (600, 150)
    assert "llama.cpp counts no requests; give request_tokens=N" in note
    assert looked_at(*pages, request_tokens=250.0)[0].arrived == 3


def test_an_engine_without_tokens_cannot_be_counted_in_them() -> None:
    """TensorRT-LLM exports none: that is said, and no load is made up."""
    seen, note = looked_at(TRTLLM_PAGE, TRTLLM_PAGE, request_tokens=700.0)
    assert seen.arrived is None
    assert "TensorRT-LLM does not count its tokens" in note


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("vllm:num_requests_running 3\n", "a page of vLLM without vllm:request_success_total"),
        ("sglang:num_running_reqs 0\n", "a page of SGLang without sglang:e2e_request_latency_seconds_count"),
        ("tgi_queue_size 5\ntgi_request_success 100\n", "a page of TGI, whose requests are not known; give histogram"),
        ("e2e_request_latency_seconds_count 5\n", "none of .* is among the metrics"),
        ("dynamo_frontend_requests_total 5\n", "a page of Dynamo, whose requests are not known"),
    ],
)
def test_a_page_that_is_not_known_is_named_and_never_read_as_another(text: str, line: str) -> None:
    """By engine where its prefix tells; TensorRT-LLM's names without a prefix count only with its label."""
    with pytest.raises(InvalidInput, match=line):
        counts_of(text, KNOWN)


def test_the_proxys_own_page_is_read() -> None:
    """It tells all of it: requests, tokens, and both times."""
    figures = Figures()
    pages = []
    for _ in range(2):
        for _ in range(30):
            figures.ended("answered")
            figures.answered(whole_s=2.0, first_s=0.3, per_token_s=0.02, prompt=100, completion=50, by_server=True)
        pages.append(figures.page(Gauges(8, 2, 1, 0)).decode())
    seen, note = looked_at(*pages)
    assert (seen.arrived, seen.answered, seen.waiting, seen.tokens_in, seen.tokens_out) == (30, 30, 1, 3000, 1500)
    assert seen.ttft_p99_s == pytest.approx(0.3, rel=0.26)
    assert seen.tpot_p99_s == pytest.approx(0.02, rel=0.26)
    assert note == ""


@pytest.mark.parametrize("tokens", ["0", "-5", "many", "1e3"])
def test_tokens_of_a_request_are_a_number(tokens: str) -> None:
    """Anything else is refused in one line."""
    with pytest.raises(InvalidInput, match=r"request_tokens=.* is no whole number above zero"):
        open_traffic(f"metrics:http://127.0.0.1:9/metrics?request_tokens={tokens}")
