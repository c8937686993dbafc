"""A language model served on a simulated card: its scheduler, its physics, and what it is to be tuned."""

import itertools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polythrottle import read_journal, tune
from polythrottle.backends.simulated import SimulatedDevice
from polythrottle.backends.simulated.engine import StepPhysics, StepWork
from polythrottle.backends.simulated.language_model import (
    BLOCK_TOKENS,
    SimulatedLanguageModel,
    TokenRequest,
    TokenServer,
    drawn_lengths,
)
from polythrottle.catalog import is_language_model, load_board, load_language_model, load_model, names
from polythrottle.catalog.tuned_profiles import read_profile
from polythrottle.domain.arrivals import CLOSED, Arrivals, SelfPaced
from polythrottle.domain.errors import BadFile, InvalidInput, KnobRejected, TrialError
from polythrottle.domain.measurement import Window, measurement_frame
from polythrottle.domain.ports import Workload
from polythrottle.domain.problem import Constraint
from polythrottle.domain.space import OperatingPoint
from polythrottle.metering.early_stopping import Goal
from polythrottle.metering.point_measurement import measure
from polythrottle.storage.journal.lines import measurement_from, measurement_line
from polythrottle.testing import WorkloadContract

BOARDS = ("a100-sxm", "h100-sxm", "l4", "b200", "rtx-4090", "rtx-pro-6000", "jetson-agx-orin", "jetson-thor")
LANGUAGE = tuple(name for name in names("profiles/workloads") if is_language_model(name))


def _device(board: str = "h100-sxm", noise: float = 0.0) -> SimulatedDevice:
    return SimulatedDevice(load_board(board), noise=noise)


def _served(device: SimulatedDevice, name: str = "llama-3.1-8b") -> SimulatedLanguageModel:
    return device.serve_language(load_language_model(name))


class TestWorkloadContract(WorkloadContract):
    """A simulated language model keeps the contract of every workload."""

    def make(self) -> Workload:
        """Return Llama 3.1 8B on a noisy H100."""
        return _served(_device(noise=0.02))


def _physics(board: str = "h100-sxm", name: str = "llama-3.1-8b") -> StepPhysics:
    return _served(_device(board), name).physics


def _run(
    server: TokenServer, physics: StepPhysics, requests: list[TokenRequest], gpu_hz: float = 1.98e9
) -> list[TokenRequest]:
    """Serve requests to the end, and return them in the order in which they ended."""
    coming = sorted(requests, key=lambda request: request.ready_s)
    now_s = 0.0
    ended: list[TokenRequest] = []
    while len(ended) < len(requests):
        while coming and coming[0].ready_s <= now_s:
            server.add(coming.pop(0))
        if server.idle:
            now_s = coming[0].ready_s
            continue
        work, pieces = server.plan()
        assert work.decodes + work.prompt_tokens <= 2048
        step = server.advance(now_s, work, pieces, physics.run(work, gpu_hz, 1e9))
        now_s += step.duration_s
        ended += step.finished
    return ended


def test_every_token_is_made_and_every_block_comes_back() -> None:
    """With too few blocks requests are put back and computed again, and none loses or gains a token."""
    model = load_language_model("llama-3.1-8b")
    physics = _physics()
    server = TokenServer(model, physics, blocks=300, most=64)
    lengths = itertools.islice(drawn_lengths(model, 3), 80)
    requests = [
        TokenRequest(0.01 * number, min(prompt, 1500), min(output, 900), ready_s=0.01 * number)
        for number, (prompt, output) in enumerate(lengths)
    ]
    ended = _run(server, physics, requests)
    assert server.preemptions > 0
    assert (server.running, server.decoding, server.context, server.prompts_left) == (0, 0, 0, 0)
    assert server._free == 300
    for request in ended:
        assert request.first_s is not None
        gaps_s = server.gaps_s(request)
        assert len(gaps_s) == request.output_tokens - 1
        assert sum(gaps_s) == pytest.approx(request.last_s - request.first_s)


def test_a_prompt_longer_than_the_budget_is_cut_and_decoding_goes_on() -> None:
    """A long prompt takes several steps, in each of which a request that runs still makes its token."""
    model = load_language_model("llama-3.1-8b")
    physics = _physics()
    server = TokenServer(model, physics, blocks=10_000, most=64)
    short = TokenRequest(0.0, 10, 400)
    server.add(short)
    work, pieces = server.plan()
    now_s = server.advance(0.0, work, pieces, physics.run(work, 1.98e9, 1e9)).duration_s
    server.add(TokenRequest(now_s, 5000, 2, ready_s=now_s))
    taken = []
    for _ in range(3):
        work, pieces = server.plan()
        taken.append((work.decodes, work.prompt_tokens))
        now_s += server.advance(now_s, work, pieces, physics.run(work, 1.98e9, 1e9)).duration_s
    assert taken == [(1, 2047), (1, 2047), (1, 906)]


def test_a_shared_prefix_is_not_computed_again() -> None:
    """Of a prompt whose beginning another request has left, only the rest is computed; one token at least."""
    model = load_language_model("llama-3.1-8b")
    server = TokenServer(model, _physics(), blocks=10_000, most=4)
    server.add(TokenRequest(0.0, 1000, 5, cached_tokens=960))
    server.add(TokenRequest(0.0, 1000, 5, cached_tokens=1000))
    work, _ = server.plan()
    assert work.prompt_tokens == 40 + 1


def test_no_more_run_at_once_than_the_point_says() -> None:
    """Concurrency bounds what runs; the rest waits in the order of arrival."""
    model = load_language_model("llama-3.1-8b")
    physics = _physics()
    server = TokenServer(model, physics, blocks=100_000, most=3)
    for number in range(8):
        server.add(TokenRequest(float(number), 20, 50))
    work, pieces = server.plan()
    assert (server.running, len(server.waiting), work.prompts) == (3, 5, 3)
    server.advance(0.0, work, pieces, (0.01, 300.0, 1e9))
    assert [request.arrival_s for request in server.waiting] == [3.0, 4.0, 5.0, 6.0, 7.0]


@pytest.mark.parametrize("board", BOARDS)
def test_a_lower_clock_is_slower_and_draws_less(board: str) -> None:
    """On every board, for decoding and for prompts; decoding slows down by less than the clock falls."""
    physics = _physics(board)
    top_hz = float(load_board(board).knob("gpu_max_hz").levels[-1])
    for work in (StepWork(16, 16 * 900), StepWork(0, 0, 2048, 2048 * 1024, 1)):
        times = [physics.duration_s(work, share * top_hz) for share in (1.0, 0.7, 0.4)]
        powers = [physics.power_w(work, share * top_hz) for share in (1.0, 0.7, 0.4)]
        assert times == sorted(times)
        assert powers == sorted(powers, reverse=True)
        assert times[2] / times[0] < 1 / 0.4
    decoding = StepWork(16, 16 * 900)
    assert physics.duration_s(decoding, 0.4 * top_hz) / physics.duration_s(decoding, top_hz) < 2.0


def test_a_cap_binds_where_the_load_is_high_and_not_where_it_is_low() -> None:
    """At a large batch the clock falls until the card draws its cap; at a small one the top clock stays."""
    physics = _physics()
    for sequences, binds in ((2, False), (200, True)):
        work = StepWork(sequences, sequences * 900)
        _, power_w, gpu_hz = physics.run(work, 1.98e9, 530.0)
        assert (gpu_hz < 1.98e9) is binds
        assert power_w <= 530.0
        if binds:
            assert power_w > 529.0


def test_more_gpus_are_faster_and_exchange_what_they_sum() -> None:
    """Eight GPUs take less time for a step than four, but more than half of it."""
    four, eight = _physics(name="llama-3.1-70b-tp4"), _physics(name="llama-3.1-70b-tp8")
    work = StepWork(32, 32 * 900)
    assert 0.5 < eight.duration_s(work, 1.98e9) / four.duration_s(work, 1.98e9) < 1.0


def test_energy_is_that_of_all_gpus_and_an_idle_engine_draws_its_context() -> None:
    """A group of four draws four times what one idle card does, and says that it is four."""
    device = _device()
    served = _served(device, "llama-3.1-70b-tp4")
    assert "4 of these cards" in served.notes[0]
    before = device.read()
    device.clock.sleep(10.0)
    assert device.read().energy_j - before.energy_j == pytest.approx(4 * 121.7 * 10)


def test_a_window_tells_every_time_of_tokens() -> None:
    """A measurement has times to the first token, per token and between tokens; the point decides how many run."""
    device = _device(noise=0.02)
    served = _served(device)
    assert isinstance(served, SelfPaced)
    window = Window(queries=150, duration_s=0.0, most_queries=150, timeout_s=3600.0)
    with device:
        few = measure(device, served, OperatingPoint({"concurrency": 16}), window)
        many = measure(device, served, OperatingPoint({"concurrency": 128}), window)
    assert set(few.extras) == {
        *("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "itl_p50", "itl_p99", "tokens_per_j"),
    }
    assert few.extras["tpot_p50"] < many.extras["tpot_p50"]
    assert few.extras["tokens_per_j"] < many.extras["tokens_per_j"]
    assert few.extras["itl_p50"] < few.extras["tpot_p99"]


def test_times_are_told_for_each_class_of_prompts(tmp_path: Path) -> None:
    """What a limit is for is measured of its requests alone, with intervals; of a class nobody is of, nothing."""
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{i},{(100, 4000)[i % 4 == 3]},8\n" for i in range(40))
    trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    device = _device()
    served = _served(device)
    short, long, none = (f"ttft_p99 for prompts{which}" for which in ("<=2048", ">2048", ">9000"))
    limits = tuple(Constraint(name, 1.0) for name in (short, long, none, "p99 for prompts>2048"))
    window = Window(queries=160, duration_s=0.0, most_queries=160, timeout_s=3600.0)
    arrivals = Arrivals.parse(f"trace:{trace}@2/s")
    with device:
        seen = measure(device, served, served.space.default, window, arrivals=arrivals, goal=Goal(judged=limits))
    assert seen.extras[short] < 0.5 * seen.extras[long] == 0.5 * seen.extras["ttft_p99"]
    assert seen.extras["mean for prompts<=2048"] < seen.latency.mean_s < seen.extras["mean for prompts>2048"]
    assert seen.extras["p99 for prompts>2048"] == seen.latency.p99_s
    assert seen.intervals["ttft_p50 for prompts>2048"].known
    assert seen.extras[long] in seen.intervals[long]
    assert not any("9000" in name for name in (*seen.extras, *seen.intervals))
    assert limits[0].slack(seen) == pytest.approx(1.0 - seen.extras[short])
    assert measurement_from(measurement_line(seen)) == seen
    columns = measurement_frame([seen]).columns
    assert {"ttft_p99 for prompts<=2048_s", "latency_p99 for prompts>2048_high_s"} <= set(columns)


def test_a_closed_loop_tells_nothing_of_the_crowd_it_began_with() -> None:
    """The last of 256 that come first wait 12 s for a token; the first that are told of wait as later ones do."""
    served = _served(_device())
    served.apply(OperatingPoint({"concurrency": 256}))
    waits_s = [query.first_s or 0.0 for query in itertools.islice(served.served(CLOSED, 0, 60.0), 3000)]
    first, later = (np.percentile(part, 99) for part in (waits_s[:1000], waits_s[1000:]))
    assert first < 2.0 * later


def test_goodput_is_the_share_of_requests_that_held_every_limit_of_theirs() -> None:
    """As counted by hand from the same requests; energy per good one is that of all, shared by them alone."""
    device = _device()
    served = _served(device)
    window = Window(queries=200, duration_s=0.0, most_queries=200, timeout_s=3600.0)
    slo = ("ttft_p99<=80ms for prompts<=500", "ttft_p99<=150ms for prompts>500", "tpot_p99<=35ms", "mean<=1ms")
    limits = tuple(map(Constraint.parse, slo))
    with device:
        seen = measure(device, served, OperatingPoint({"concurrency": 128}), window, goal=Goal(judged=limits))
    again = _served(_device())
    again.apply(OperatingPoint({"concurrency": 128}))
    assert seen.requests is not None
    queries = list(itertools.islice(again.served(CLOSED, 0, 60.0), seen.requests))[-seen.latency.queries :]
    kept = [
        query.first_s is not None
        and query.first_s <= (0.08 if (query.prompt_tokens or 0) <= 500 else 0.15)
        and (query.per_token_s or 0.0) <= 0.035
        for query in queries
    ]
    short = [held for query, held in zip(queries, kept, strict=True) if (query.prompt_tokens or 0) <= 500]
    assert seen.goodput is not None
    assert 0 < sum(kept) < len(kept) >= 200
    assert (seen.goodput.requests, seen.goodput.good) == (len(kept), sum(kept))
    assert seen.goodput.classes["prompts<=500"] == (len(short), sum(short))
    assert sum(all_ for all_, _ in seen.goodput.classes.values()) == len(kept)
    assert seen.goodput.energy_j == pytest.approx(seen.energy_j / seen.goodput.share)
    assert seen.goodput.per_s == pytest.approx(seen.throughput_per_s * seen.goodput.share)
    assert measurement_from(measurement_line(seen)) == seen


def test_a_search_holds_limits_for_short_and_for_long_prompts(tmp_path: Path) -> None:
    """Three limits at once: journal and profile have them as asked, and the answer holds them."""
    slo = ("ttft_p99<=600ms for prompts<=200", "ttft_p99<=2s for prompts>200", "tpot_p99<=100ms")
    found = tune("sim:h100-sxm", "llama-3.1-8b", slo=slo, method="random", trials=2, seed=4, presets=False,
                 window=Window(queries=100, duration_s=0.0, most_queries=100, timeout_s=3600.0),
                 journal=tmp_path / "j.jsonl", out=tmp_path / "p.toml", progress=False)  # fmt: skip
    assert read_journal(tmp_path / "j.jsonl").problem.constraints == tuple(map(Constraint.parse, slo))
    assert found.profile is not None
    kept = read_profile(tmp_path / "p.toml")
    limits = tuple(map(Constraint.parse, kept.slo))
    assert limits == tuple(map(Constraint.parse, slo))
    assert all(limit.slack(kept.measurement) >= 0 for limit in limits)
    best = read_journal(tmp_path / "j.jsonl").best
    assert best is not None
    assert best.measurement is not None
    assert best.measurement.goodput is not None
    assert best.measurement.goodput.share >= 0.97  # each of three limits holds for 99 in 100
    assert {"goodput, tuned", "tokens per joule, tuned", "goodput, prompts&gt;200"} <= set(
        re.findall("<dt>(.*?)</dt>", (tmp_path / "j.html").read_text())
    )
    assert kept.measurement.extras == pytest.approx(found.profile.measurement.extras)


def test_requests_that_come_by_themselves_wait_for_nobody() -> None:
    """In an open loop latency counts from the moment a request was meant to be sent."""
    device = _device()
    served = _served(device)
    queries = list(itertools.islice(served.served(Arrivals.parse("uniform:5/s"), 1, 60.0), 50))
    starts_s = sorted(query.start_s or 0.0 for query in queries)
    assert starts_s[10] - starts_s[0] == pytest.approx(2.0)
    assert all(query.first_s is not None and query.first_s >= 0.0156 for query in queries)


def test_the_same_seed_gives_the_same_requests() -> None:
    """Everything follows from the seed, and another seed gives others."""
    found = []
    for seed in (1, 1, 2):
        served = _served(_device())
        found.append([query.latency_s for query in itertools.islice(served.served(CLOSED, seed, 60.0), 20)])
    assert found[0] == found[1] != found[2]


def test_drawn_lengths_have_the_mean_of_the_description() -> None:
    """Prompts and answers are log-normal around the means, and none is longer than the engine takes."""
    model = load_language_model("llama-3.1-8b")
    lengths = list(itertools.islice(drawn_lengths(model, 0), 6400))
    assert sum(prompt for prompt, _ in lengths) / 6400 == pytest.approx(1155, rel=0.03)
    assert sum(output for _, output in lengths) / 6400 == pytest.approx(211, rel=0.03)
    assert max(prompt + output for prompt, output in lengths) <= model.lengths.longest


def test_what_cannot_be_served_is_said_in_a_line() -> None:
    """A board without coefficients, too little memory, a strange knob, a request too long, a wrong verb."""
    with pytest.raises(InvalidInput, match=r"no \[language\] table"):
        _served(_device("v100"))
    with pytest.raises(InvalidInput, match=r"needs .* GB on each GPU and the engine may take 21\.6 GB"):
        _served(_device("l4"), "llama-3.1-70b-tp4")
    served = _served(_device())
    with pytest.raises(KnobRejected, match="has no knob batch_size"):
        served.apply(OperatingPoint({"batch_size": 4}))
    with pytest.raises(KnobRejected, match="is not served at concurrency 7"):
        served.apply(OperatingPoint({"concurrency": 7}))
    with pytest.raises(InvalidInput, match="is a language model"):
        load_model("llama-3.1-8b")
    slow = served.served(Arrivals.parse("uniform:0.001/s"), 1, 5.0)
    with pytest.raises(TrialError, match="no request comes for 5 s"):
        next(slow)


@pytest.mark.parametrize("name", LANGUAGE)
def test_every_shipped_language_model_fits_an_h100(name: str) -> None:
    """Each description holds together, and its blocks hold the longest request."""
    model = load_language_model(name)
    assert model.blocks(8e10, BLOCK_TOKENS) * BLOCK_TOKENS >= model.lengths.longest
    with pytest.raises(InvalidInput, match="windowed layers"):
        replace(model, window_layers=model.layers + 1)


def test_a_trace_with_tokens_says_how_long_its_requests_are(tmp_path: Path) -> None:
    """Requests come as recorded, with their own lengths, again and again; without a rate at the one recorded."""
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,10,2\n1,20,3\n2,30,4\n3,40,5\n")
    arrivals = Arrivals.parse(f"trace:{trace}")
    assert str(arrivals) == f"trace:{trace}@1/s"
    calls = list(itertools.islice(arrivals.calls(0) or (), 12))
    lengths = [(call.prompt_tokens, call.output_tokens) for call in calls]
    recorded = [(10, 2), (20, 3), (30, 4), (40, 5)]
    begin = recorded.index((calls[0].prompt_tokens or 0, calls[0].output_tokens or 0))
    assert lengths == (recorded * 4)[begin : begin + 12]
    served = _served(_device())
    queries = list(itertools.islice(served.served(arrivals, 0, 60.0), 6))
    assert {(query.prompt_tokens, query.tokens) for query in queries} == set(recorded)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("arrival_s,prompt_tokens\n0,1\n1,2\n", "tokens of prompts or of answers, and not both"),
        ("arrival_s,prompt_tokens,output_tokens\n0,1,1\n1,2.5,1\n", "line 3: prompt_tokens is no whole number"),
        ("arrival_s,prompt_tokens,output_tokens\n0,1,0\n1,2,1\n", "line 2"),
    ],
)
def test_a_trace_with_strange_tokens_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    """One line says where and why."""
    trace = tmp_path / "trace.csv"
    trace.write_text(text)
    with pytest.raises(BadFile, match=problem):
        Arrivals.parse(f"trace:{trace}@1/s").calls(0)
