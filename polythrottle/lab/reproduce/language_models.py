"""Published ways to save energy on language models beside ours, on recorded requests and a simulated server.

All of ours is simulated, the rivals too: each is written again from what its paper says, for one engine that computes
prompts and answers together, with the simulator's own step times where a paper predicts with a fitted model. So a
policy that predicts is better informed here than in its paper, ours included.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from polythrottle.backends.simulated.engine import StepPhysics, StepWork
from polythrottle.backends.simulated.language_model import BLOCK_TOKENS, Step, TokenRequest, TokenServer
from polythrottle.catalog import load_board, load_language_model
from polythrottle.domain.errors import BadFile, InvalidInput
from polythrottle.domain.load.prompt_boost import PromptBoost
from polythrottle.lab.reproduce.steered_server import (
    BUDGET,
    LONG_PROMPT,
    LONG_TTFT_S,
    TPOT_S,
    TTFT_S,
    Policy,
    ServerView,
    steps,
    ttft_limit_s,
)

DELAY_S = 0.1
"""How long a change of clock takes; published are 50 to 200 ms (DynamoLLM, throttLL'eM)."""
_FEWEST = 300
"""So many requests a p99 needs to say anything; scenes with fewer are marked."""
_HELD = 0.99
_LOWEST_PER_S, _HIGHEST_PER_S = 0.25, 64.0
"""Rates among which the capacity is looked for."""
_MINUTE_S = 60.0
_SETTINGS = (("a100-sxm", "llama-3.1-8b"), ("h100-sxm", "llama-3.1-70b-tp4"))
_TRACES = {
    "conv": "azure_llm_2023_conv_first_half_hour.csv.gz",
    "code": "azure_llm_2023_code_first_half_hour.csv.gz",
}
_LOADS = (0.5, 0.9)
PUBLISHED = (
    {
        "system": "throttLL'eM",
        "source": "arXiv 2408.05235",
        "saving": "24.7 % mean, 30.7 % at most",
        "policy": "throttllem",
    },
    {"system": "GreenLLM", "source": "arXiv 2508.16449", "saving": "10 to 34 %", "policy": "greenllm"},
    {"system": "AGFT", "source": "arXiv 2508.01744", "saving": "44.3 %", "policy": "agft"},
    {"system": "VoltanaLLM", "source": "arXiv 2509.04827", "saving": "up to 36.3 %", "policy": None},
    {"system": "DualScale", "source": "arXiv 2602.18755", "saving": "28 to 48 %", "policy": None},
)
"""Savings over the highest clock; those without a policy split prompts from answers, which is not posed here."""


@dataclass
class Fixed:
    """One clock and one power limit, whatever happens; the default governor is the highest clock."""

    gpu_hz: float
    cap_w: float = math.inf
    period_s: float = 1e9
    delay_s: float = 0.0

    def wish(self, view: ServerView) -> tuple[float, float]:
        """Return them."""
        return self.gpu_hz, self.cap_w


@dataclass
class LowestSafe:
    """As throttLL'eM: before each step the lowest clock whose predicted time between tokens holds.

    Time to the first token is not looked at, as there.
    """

    period_s: float = 0.0
    delay_s: float = 0.2

    def wish(self, view: ServerView) -> tuple[float, float]:
        """Return the lowest clock at which the next steps hold the limit per token, with a tenth to spare."""
        return view.clock_for(view.decoding(), 0.9 * TPOT_S), math.inf


@dataclass
class TableAndLoop:
    """As GreenLLM: decoding by a table of clocks over load, corrected by a fine loop; prompts by their deadlines."""

    period_s: float = 0.02
    delay_s: float = DELAY_S
    _offset: int = 0
    _band: tuple[int, int] = (0, 0)
    _looked_s: float = -1.0

    def wish(self, view: ServerView) -> tuple[float, float]:
        """Return the higher of the two clocks."""
        if view.now_s - self._looked_s >= 0.2:
            band = view.server.decoding // 8
            # A band is taken up after three looks in a row.
            self._band = (band, self._band[1] + 1 if band == self._band[0] else 0)
            self._looked_s = view.now_s
        load = StepWork(max(1, 8 * (self._band[0] + 1)), 8 * (self._band[0] + 1) * 1200)
        base = view.clocks_hz.index(view.clock_for(load, 0.8 * TPOT_S))
        if view.step is not None and view.step.work.decodes:
            if view.step.duration_s > 0.95 * TPOT_S:
                self._offset += 1
            elif view.step.duration_s < 0.6 * TPOT_S:
                self._offset -= 1
            self._offset = max(-2, min(len(view.clocks_hz), self._offset))
        decode_hz = view.clocks_hz[max(0, min(len(view.clocks_hz) - 1, base + self._offset))]
        return max(decode_hz, prompt_clock(view, 0.9, 0.0)), math.inf


@dataclass
class Bandit:
    """As AGFT: a bandit over clocks for each band of load, which learns from energy times delay and broken limits."""

    period_s: float = 0.8
    delay_s: float = DELAY_S
    _tries: dict[tuple[int, int], tuple[int, float]] = field(default_factory=dict)
    _last: tuple[int, int] | None = None
    _seen: list[Step] = field(default_factory=list)

    def saw(self, step: Step) -> None:
        """Take in a step that has run."""
        self._seen.append(step)

    def wish(self, view: ServerView) -> tuple[float, float]:
        """Return the clock with the best lower bound on its cost."""
        if self._last is not None and self._seen:
            tokens = sum(step.work.decodes + step.work.prompt_tokens for step in self._seen)
            energy_j = sum(step.power_w * step.duration_s for step in self._seen)
            slow = sum(step.duration_s > TPOT_S for step in self._seen) / len(self._seen)
            late = view.server.prompts_left > 2 * BUDGET
            cost = energy_j / max(1, tokens) * (1 + 4 * slow + 2 * late)
            count, mean = self._tries.get(self._last, (0, 0.0))
            self._tries[self._last] = (count + 1, mean + (cost - mean) / (count + 1))
        self._seen = []
        band = int(math.log2(1 + view.server.decoding))
        arms = range(0, len(view.clocks_hz), max(1, len(view.clocks_hz) // 8))
        best = min(arms, key=lambda arm: self._bound(band, arm))
        self._last = (band, best)
        return view.clocks_hz[best], math.inf

    def _bound(self, band: int, arm: int) -> float:
        count, mean = self._tries.get((band, arm), (0, 0.0))
        if not count:
            return -math.inf
        total = sum(each for (other, _), (each, _) in self._tries.items() if other == band)
        return mean * (1 - 0.5 * math.sqrt(math.log(total + 1) / count))


def prompt_clock(view: ServerView, share: float, ahead_s: float) -> float:
    """Return the clock at which prompts that wait have their first token within a share of what they have left.

    Args:
        view: Of the server.
        share: Of the time left.
        ahead_s: How far ahead requests are known; 0 but for a clairvoyant.
    """
    tokens = view.server.prompts_left
    waiting = [*view.server.prompts, *view.server.waiting]
    if ahead_s:
        soon = list(takewhile(lambda request: request.ready_s <= view.now_s + ahead_s, view.coming))
        tokens += sum(request.prompt_tokens for request in soon)
        waiting += soon
    fresh = [request for request in waiting if request.first_s is None]
    if not tokens or not fresh:
        return view.clocks_hz[0]
    left_s = min(request.arrival_s + ttft_limit_s(request.prompt_tokens) - view.now_s for request in fresh)
    piece = min(tokens, BUDGET)
    steps = math.ceil(tokens / BUDGET)
    work = StepWork(view.server.decoding, view.server.context, piece, piece * 1024, 1)
    return view.clock_for(work, share * left_s, steps)


@dataclass
class Ahead:
    """A clairvoyant: the thriftiest clock that the tokens and prompts of now and of the next second need, at once.

    It is no bound: nobody has searched all schedules of clocks.

    Args:
        ahead_s: How far ahead requests are known.
        period_s: Between two decisions.
        delay_s: How long a change takes.
        share: Of the time left that waiting prompts may take by prediction.
    """

    ahead_s: float = 1.0
    period_s: float = 0.0
    delay_s: float = 0.0
    share: float = 0.8

    def wish(self, view: ServerView) -> tuple[float, float]:
        """Return the highest of the clocks for saving, for tokens and for prompts."""
        return max(running_clock(view), prompt_clock(view, self.share, self.ahead_s)), math.inf


def running_clock(view: ServerView) -> float:
    """Return the higher of the clocks at which running adds least and at which tokens hold their limit."""
    running = view.decoding() if view.server.decoding else StepWork(0, 0, 1024, 1024 * 512, 1)
    return max(view.thriftiest(running), view.clock_for(view.decoding(), 0.7 * TPOT_S))


@dataclass
class Ours:
    """The higher of the clocks that prompts need by `PromptBoost` and that tokens need."""

    period_s: float = 0.2
    delay_s: float = DELAY_S
    _boost: PromptBoost | None = None
    _arrived: int = 0

    def wish(self, view: ServerView) -> tuple[float, float]:
        """Return the higher of the two clocks."""
        boost = self._boost or PromptBoost(view.prompt_tokens_per_s)
        self._boost = boost.arrived(view.now_s, view.arrived_tokens - self._arrived)
        self._arrived = view.arrived_tokens
        prompts = self._boost.needed(view.now_s, view.starting())
        tokens_hz = view.clock_for(view.decoding(), 0.7 * TPOT_S)
        return max(view.at_least(prompts * view.top_hz), tokens_hz), math.inf


# Requests served under a policy, and what came of it.


@dataclass(frozen=True)
class Outcome:
    """What came of a stretch of requests under a policy; joules are those of all GPUs, idle time included.

    Args:
        energy_j: Over all.
        tokens: That were made.
        requests: That were answered.
        good: Of those, how many held their limits.
        held: Share of minutes in which each limit held at p99.
        ttft_p99_s: Over all; ``tpot_p99_s`` and ``mean_s``, end to end, likewise.
        tpot_p99_s: See ``ttft_p99_s``.
        mean_s: See ``ttft_p99_s``.
        mean_hz: Mean clock while a step ran.
    """

    energy_j: float
    tokens: int
    requests: int
    good: int
    held: float
    ttft_p99_s: float
    tpot_p99_s: float
    mean_s: float
    mean_hz: float

    @property
    def holds(self) -> bool:
        """Whether limits held in 99 of 100 minutes."""
        return self.held >= _HELD


def outcome_of(requests: Sequence[TokenRequest], energy_j: float, mean_hz: float) -> Outcome:
    """Return what came of requests that have all been answered."""
    first_s = np.array([(request.first_s or 0.0) - request.arrival_s for request in requests])
    each_s = np.array([(r.last_s - (r.first_s or 0.0)) / max(1, r.output_tokens - 1) for r in requests])
    late = first_s > np.array([ttft_limit_s(request.prompt_tokens) for request in requests])
    slow = each_s > TPOT_S
    minutes = (np.array([request.arrival_s for request in requests]) // _MINUTE_S).astype(int)
    broken = [
        max(late[minutes == minute].mean(), slow[minutes == minute].mean()) > 1 - _HELD for minute in np.unique(minutes)
    ]
    return Outcome(
        energy_j=energy_j,
        tokens=sum(request.output_tokens for request in requests),
        requests=len(requests),
        good=int((~late & ~slow).sum()),
        held=1.0 - float(np.mean(broken)),
        ttft_p99_s=float(np.quantile(first_s, 0.99)),
        tpot_p99_s=float(np.quantile(each_s, 0.99)),
        mean_s=float(np.mean([request.last_s - request.arrival_s for request in requests])),
        mean_hz=mean_hz,
    )


@dataclass(frozen=True)
class Scene:
    """A model on a board, ready to serve.

    Args:
        board: A name in ``devices/``.
        workload: A name in ``profiles/workloads/``.
    """

    board: str
    workload: str

    def clocks_hz(self) -> tuple[float, ...]:
        """Return the clocks that are searched, ascending."""
        return tuple(float(level) for level in load_board(self.board).knob("gpu_max_hz").searched.levels)

    def caps_w(self) -> tuple[float, ...]:
        """Return the power limits."""
        return tuple(float(level) for level in load_board(self.board).knob("power_limit_w").levels)

    def serve(self, calls: Sequence[tuple[float, int, int]], policy: Policy) -> Outcome:
        """Return what comes of requests under a policy.

        Args:
            calls: Time, tokens of prompt and of answer of each.
            policy: Which is asked before steps.
        """
        board, model = load_board(self.board), load_language_model(self.workload)
        model = replace(model, server=replace(model.server, max_batched_tokens=BUDGET))
        assert board.language is not None
        physics = StepPhysics(model, board.language, float(board.knob("gpu_max_hz").levels[-1]))
        server = TokenServer(model, physics, model.blocks(board.memory_bytes, BLOCK_TOKENS), 1 << 20)
        start_s = model.server.start_s
        requests = [TokenRequest(time_s, prompt, output, ready_s=time_s + start_s) for time_s, prompt, output in calls]
        coming = deque(requests)
        clocks_hz = tuple(each for each in self.clocks_hz() if each >= board.language.lowest * self.clocks_hz()[-1])
        view = ServerView(0.0, server, physics, clocks_hz, clocks_hz[-1], coming)
        energy_j = busy_s = cycles = 0.0
        for step, idle_s in steps(view, policy, len(requests), board.power_max_w):
            energy_j += step.power_w * step.duration_s + idle_s * physics.idle_w() * model.gpus
            busy_s += step.duration_s
            cycles += step.gpu_hz * step.duration_s
        return outcome_of(requests, energy_j, cycles / busy_s)


# A recorded trace at a share of what a server can do, under every policy.


def recorded_calls(
    path: Path, minutes: float, rate_per_s: float, longest: int, begin_minutes: float = 0.0
) -> list[tuple[float, int, int]]:
    """Return the requests of a trace, stretched to a rate, from a minute on; longer ones than fit are cut.

    Raises:
        BadFile: If the file cannot be read or holds no tokens.
    """
    from polythrottle.storage.arrival_trace import recorded, recorded_lengths

    offsets_s = recorded(path)
    lengths = recorded_lengths(path)
    if lengths is None:
        raise BadFile(f"{path} has no columns prompt_tokens and output_tokens")
    times_s = offsets_s * (len(offsets_s) / (rate_per_s * float(offsets_s[-1])))
    prompts = np.minimum(lengths[0], longest - 1)
    outputs = np.minimum(lengths[1], longest - prompts)
    begin_s = 60 * begin_minutes
    part = slice(*(int(each) for each in np.searchsorted(times_s, (begin_s, begin_s + 60 * minutes))))
    return list(zip((times_s[part] - begin_s).tolist(), prompts[part].tolist(), outputs[part].tolist(), strict=True))


def capacity_per_s(scene: Scene, path: Path, minutes: float, begin_minutes: float = 0.0) -> tuple[float, bool]:
    """Return the highest rate, to 5 %, at which the default clock holds every limit at p99 over the stretch.

    And whether it was seen to break one above: a trace stretched to a higher rate may end before the stretch does.
    """
    from polythrottle.storage.arrival_trace import recorded

    top = Fixed(scene.clocks_hz()[-1])
    longest = load_language_model(scene.workload).lengths.longest
    low = _LOWEST_PER_S
    high = ends_per_s = max(low, min(_HIGHEST_PER_S, len(recorded(path)) / (60 * (begin_minutes + minutes))))
    while high / low > 1.05:
        rate_per_s = math.sqrt(low * high)
        calls = recorded_calls(path, minutes, rate_per_s, longest, begin_minutes)
        held = len(calls) < 2 or _keeps(scene.serve(calls, top))
        if held:
            low = rate_per_s
        else:
            high = rate_per_s
    return low, high < ends_per_s


def _keeps(outcome: Outcome) -> bool:
    return outcome.good >= _HELD * outcome.requests


def compared(scene: Scene, calls: Sequence[tuple[float, int, int]]) -> dict[str, Outcome]:
    """Return what came of each policy; static clock and limit are those that turned out best on these requests."""
    clocks_hz = scene.clocks_hz()
    found: dict[str, Outcome] = {"default": scene.serve(calls, Fixed(clocks_hz[-1]))}
    static = [scene.serve(calls, Fixed(each)) for each in clocks_hz[len(clocks_hz) // 4 :: 2]] + [found["default"]]
    capped = [scene.serve(calls, Fixed(clocks_hz[-1], each)) for each in scene.caps_w()] + [found["default"]]
    for name, tried in (("static clock", static), ("static cap", capped)):
        most = max(outcome.held for outcome in tried)
        holding = [outcome for outcome in tried if outcome.held >= min(most, _HELD)]
        found[name] = min(holding, key=lambda outcome: outcome.energy_j)
    found["throttllem"] = scene.serve(calls, LowestSafe())
    found["greenllm"] = scene.serve(calls, TableAndLoop())
    found["agft"] = scene.serve(calls, Bandit())
    found["ours, clocks at once"] = scene.serve(calls, Ours(delay_s=0.0))
    found["ours"] = scene.serve(calls, Ours())
    found["clairvoyant"] = scene.serve(calls, Ahead())
    return found


def scenes(quick: bool) -> Sequence[tuple[Scene, str, float]]:
    """Return what is compared: scene, name of a trace, and share of the capacity."""
    settings = _SETTINGS[:1] if quick else _SETTINGS
    return [(Scene(*setting), trace, load) for setting in settings for trace in _TRACES for load in _LOADS]


def document(
    data: Path, minutes: float, quick: bool, done: Callable[[int, int], None], begin_minutes: float = 0.0
) -> dict[str, Any]:
    """Return every scene under every policy, and what the papers report.

    Args:
        data: Folder with the recorded traces.
        minutes: Of each stretch.
        quick: Whether to leave the larger model out.
        done: Called with how many scenes are done, and of how many.
        begin_minutes: Minute of the stretched trace at which each stretch begins.

    Raises:
        BadFile: If a trace cannot be read.
        InvalidInput: If no request comes in any stretch.
    """
    todo = scenes(quick)
    # A trace that is missing or damaged is told before anything is computed.
    for name in _TRACES.values():
        recorded_calls(data / name, minutes, _LOWEST_PER_S, load_language_model(todo[0][0].workload).lengths.longest)
    capacities: dict[tuple[Scene, str], tuple[float, bool]] = {}
    table = []
    for number, (scene, trace, load) in enumerate(todo):
        path = data / _TRACES[trace]
        if (scene, trace) not in capacities:
            capacities[scene, trace] = capacity_per_s(scene, path, minutes, begin_minutes)
        capacity, overloaded = capacities[scene, trace]
        rate_per_s = load * capacity
        longest = load_language_model(scene.workload).lengths.longest
        calls = recorded_calls(path, minutes, rate_per_s, longest, begin_minutes)
        # The code trace comes in bursts: a stretch may be empty that is full in another trace.
        if calls:
            outcomes = compared(scene, calls)
        else:
            outcomes = {}
        table.append(
            {
                **{"board": scene.board, "workload": scene.workload, "trace": trace, "load": load},
                **{"rate_per_s": rate_per_s, "capacity_per_s": capacity, "requests": len(calls)},
                # False where the trace ends before any server is too slow for it: capacity is that rate at least.
                "capacity_overloaded": overloaded,
                "telling": len(calls) >= _FEWEST,
                "policies": [_row(name, outcome, outcomes["default"]) for name, outcome in outcomes.items()],
            }
        )
        done(number + 1, len(todo))
    if not any(scene["policies"] for scene in table):
        raise InvalidInput("no requests come in these minutes of any trace; take others with --minutes and --from")
    engine = {"max_num_batched_tokens": BUDGET, "clock_change_s": DELAY_S}
    limits = {"ttft_p99_s": TTFT_S, "long_ttft_p99_s": LONG_TTFT_S, "long_prompt": LONG_PROMPT, "tpot_p99_s": TPOT_S}
    return {
        "simulated": True,
        "minutes": minutes,
        "begin_minutes": begin_minutes,
        "limits": limits,
        "engine": engine,
        "published": list(PUBLISHED),
        "scenes": table,
    }


def _row(name: str, outcome: Outcome, base: Outcome) -> dict[str, Any]:
    return {
        "policy": name,
        "saving": 1 - outcome.energy_j / base.energy_j,
        "energy_per_token_j": outcome.energy_j / outcome.tokens,
        "energy_per_request_j": outcome.energy_j / outcome.requests,
        "energy_per_good_request_j": outcome.energy_j / outcome.good if outcome.good else None,
        "minutes_held": outcome.held,
        "holds": outcome.holds,
        "ttft_p99_s": outcome.ttft_p99_s,
        "tpot_p99_s": outcome.tpot_p99_s,
        "mean_s": outcome.mean_s,
        "mean_hz": outcome.mean_hz,
    }
