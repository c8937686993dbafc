"""The scheduler of a language-model engine, one event per step, as vLLM V1 does it.

Each step has a budget of tokens. Requests that run come first, a token each or the next piece of their prompt; then
waiting ones in the order of their arrival, their prompts cut to what is left of the budget. Keys and values live in
blocks of 16 tokens; where none is left, the request that was admitted last gives up its blocks and is computed again
(vLLM documentation, "Optimization and Tuning": chunked prefill, preemption; ``vllm/v1/core/sched/scheduler.py``).

Sums over the decoding requests are kept instead of visiting each, so that a step costs the same whatever its batch.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field
from itertools import chain, pairwise

from polythrottle.backends.simulated.token_steps import StepPhysics, StepWork
from polythrottle.catalog.models import LanguageModel

BLOCK_TOKENS = 16


@dataclass
class TokenRequest:
    """A request and how far it has come; times are in seconds on the server's clock.

    Args:
        arrival_s: When it was meant to be sent.
        prompt_tokens: Of the prompt.
        output_tokens: That the answer will have.
        cached_tokens: Leading tokens of the prompt whose keys and values another request has left.
        ready_s: When it reaches the scheduler.
        first_s: When its first token came; None before.
        last_s: When its last did.
        made: Tokens it has made.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    ready_s: float = 0.0
    first_s: float | None = None
    last_s: float = 0.0
    made: int = 0
    computed: int = 0
    target: int = 0
    joined: int = 0
    preempted: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        """Blocks that its computed tokens take."""
        return -(-self.computed // BLOCK_TOKENS)


@dataclass(frozen=True)
class Step:
    """What one step was.

    Args:
        begin_s: When it began; ``duration_s`` is how long it took.
        duration_s: See ``begin_s``.
        power_w: Of the whole group.
        gpu_hz: SM clock that ran.
        work: What it computed.
        finished: Requests that made their last token.
        started: Requests that made their first.
    """

    begin_s: float
    duration_s: float
    power_w: float
    gpu_hz: float
    work: StepWork
    finished: tuple[TokenRequest, ...]
    started: tuple[TokenRequest, ...]


class TokenServer:
    """An engine with its queue; whoever drives it says which clock and cap the next step has.

    Args:
        model: What is served.
        physics: Of its steps.
        blocks: Of keys and values that fit.
        most: Requests that run at once at most, the engine's own limit aside.
    """

    def __init__(self, model: LanguageModel, physics: StepPhysics, blocks: int, most: int) -> None:
        self._model = model
        self._physics = physics
        self._free = blocks
        self._budget = model.server.max_batched_tokens
        self._most = min(most, model.server.max_sequences, self._budget)
        self.waiting: deque[TokenRequest] = deque()
        self._running: dict[int, TokenRequest] = {}
        self._prompts: dict[int, TokenRequest] = {}
        self._decoding = 0
        self._context = 0
        self._phases = [0] * BLOCK_TOKENS
        self._finishes: list[tuple[int, int, int, TokenRequest]] = []
        self._decode_steps = 0
        self._admissions = 0
        self._ends_s: list[float] = []
        self.preemptions = 0
        self.token_s = model.server.token_s

    @property
    def running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def decoding(self) -> int:
        """Requests that make a token every step."""
        return self._decoding

    @property
    def context(self) -> int:
        """Tokens that those look back on, together."""
        return self._context

    @property
    def prompts_left(self) -> int:
        """Tokens of prompts that are still to be computed, of running and waiting requests."""
        left = sum(request.target - request.computed for request in self._prompts.values())
        return left + sum(request.prompt_tokens + request.made for request in self.waiting)

    @property
    def prompts(self) -> tuple[TokenRequest, ...]:
        """Requests that run and whose prompts are not computed yet."""
        return tuple(self._prompts.values())

    @property
    def free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return self._free

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute."""
        return not self._running and not self.waiting

    def add(self, request: TokenRequest) -> None:
        """Queue a request that has reached the scheduler."""
        self.waiting.append(request)

    def plan(self) -> tuple[StepWork, list[tuple[TokenRequest, int]]]:
        """Return what the next step computes, and the piece of each prompt that it takes; blocks are taken.

        The step is then to be run with `advance`.
        """
        self._make_room()
        budget = self._budget - self._decoding
        pieces: list[tuple[TokenRequest, int]] = []
        for request in self._prompts.values():
            piece = self._piece(request, budget)
            if piece > 0:
                pieces.append((request, piece))
                budget -= piece
        while self.waiting and budget > 0 and len(self._running) < self._most:
            request = self.waiting[0]
            if not request.computed:
                request.target = request.prompt_tokens + request.made
                request.computed = min(request.cached_tokens, request.target - 1)
                if -(-(request.computed + min(budget, request.target - request.computed)) // BLOCK_TOKENS) > self._free:
                    request.computed = 0
                    break
                self._free -= request.blocks
            piece = self._piece(request, budget)
            self.waiting.popleft()
            self._admissions += 1
            request.joined = self._admissions
            self._running[request.joined] = request
            self._prompts[request.joined] = request
            pieces.append((request, piece))
            budget -= piece
        return self._work(pieces), pieces

    def _piece(self, request: TokenRequest, budget: int) -> int:
        """Return how many tokens of a prompt fit into a budget and the free blocks, and take the blocks."""
        spare = -request.computed % BLOCK_TOKENS
        piece = min(budget, request.target - request.computed, spare + self._free * BLOCK_TOKENS)
        if piece > spare:
            self._free -= -(-(piece - spare) // BLOCK_TOKENS)
        return piece

    def _work(self, pieces: list[tuple[TokenRequest, int]]) -> StepWork:
        tokens = pairs = ends = 0
        for request, piece in pieces:
            tokens += piece
            pairs += piece * (2 * request.computed + piece + 1) // 2
            ends += request.computed + piece == request.target
        return StepWork(self._decoding, self._context, tokens, pairs, ends)

    def _make_room(self) -> None:
        """Take the blocks that this step's tokens begin; where there are none, put back who was admitted last."""
        while self._phases[-self._decode_steps % BLOCK_TOKENS] > self._free:
            self._put_back(self._running[next(reversed(self._running))])
        self._free -= self._phases[-self._decode_steps % BLOCK_TOKENS]

    def _put_back(self, request: TokenRequest) -> None:
        del self._running[request.joined]
        self.preemptions += 1
        request.preempted += 1
        if self._prompts.pop(request.joined, None) is None:
            self._leave(request)
        self._free += request.blocks
        request.computed = 0
        request.joined = 0
        self.waiting.appendleft(request)

    def _leave(self, request: TokenRequest) -> None:
        """Take a request out of the sums over decoding ones, and note what it has made."""
        begun, made = request.spans[-1]
        steps = self._decode_steps - made
        request.spans[-1] = (begun, len(self._ends_s))
        request.made += steps
        request.computed = request.target + steps
        self._decoding -= 1
        self._context -= request.computed
        self._phases[(request.target - made) % BLOCK_TOKENS] -= 1

    def advance(
        self, now_s: float, work: StepWork, pieces: list[tuple[TokenRequest, int]], ran: tuple[float, float, float]
    ) -> Step:
        """Return the planned step once it has run.

        Args:
            now_s: When it began.
            work: Of `plan`.
            pieces: Of `plan`.
            ran: Duration in seconds, power in watts of one GPU, and clock; see `StepPhysics.run`.
        """
        duration_s, power_w, gpu_hz = ran
        end_s = now_s + duration_s
        self._ends_s.append(end_s)
        if self._decoding:
            self._context += self._decoding
            self._decode_steps += 1
        finished = self._finished(end_s)
        started = self._prompted(pieces, end_s, finished)
        return Step(now_s, duration_s, power_w * self._model.gpus, gpu_hz, work, tuple(finished), tuple(started))

    def _finished(self, end_s: float) -> list[TokenRequest]:
        finished = []
        while self._finishes and self._finishes[0][0] <= self._decode_steps:
            _, joined, _, request = heapq.heappop(self._finishes)
            if request.joined != joined:  # put back since
                continue
            self._leave(request)
            self._end(request, end_s)
            finished.append(request)
        return finished

    def _end(self, request: TokenRequest, end_s: float) -> None:
        del self._running[request.joined]
        self._free += request.blocks
        request.joined = 0
        request.last_s = end_s

    def _prompted(
        self, pieces: list[tuple[TokenRequest, int]], end_s: float, finished: list[TokenRequest]
    ) -> list[TokenRequest]:
        """Move on the prompts of a step; return the requests that have their first token."""
        started = []
        for request, piece in pieces:
            request.computed += piece
            if request.computed < request.target:
                continue
            del self._prompts[request.joined]
            request.made += 1
            if request.first_s is None:
                request.first_s = end_s
                started.append(request)
            step = len(self._ends_s) - 1
            if request.made >= request.output_tokens:
                request.spans.append((step, step + 1))
                self._end(request, end_s)
                finished.append(request)
                continue
            # Until it ends, the second figure of the span is the count of decoding steps it joined at.
            request.spans.append((step, self._decode_steps))
            self._decoding += 1
            self._context += request.target
            self._phases[(request.target - self._decode_steps) % BLOCK_TOKENS] += 1
            last = self._decode_steps + request.output_tokens - request.made
            heapq.heappush(self._finishes, (last, request.joined, id(request), request))
        return started

    def gaps_s(self, request: TokenRequest) -> list[float]:
        """Return the times between the tokens of a request that has finished, in seconds."""
        pieces = [self._ends_s[a:b] for a, b in request.spans]
        return [after - before for before, after in pairwise(chain.from_iterable(pieces))]
