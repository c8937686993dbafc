"""A language model served on a simulated board: requests come, the engine steps, tokens go out, in virtual time.

Its scheduler has one event per step, as vLLM V1 does it. Each step has a budget of tokens. Requests that run come
first, a token each or the next piece of their prompt; then waiting ones in the order of their arrival, their prompts
cut to what is left of the budget. Keys and values live in blocks of 16 tokens; where none is left, the request that was
admitted last gives up its blocks and is computed again (vLLM documentation, "Optimization and Tuning": chunked prefill,
preemption; ``vllm/v1/core/sched/scheduler.py``).

Sums over the decoding requests are kept instead of visiting each, so that a step costs the same whatever its batch.
"""

import heapq
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from itertools import chain, pairwise
from statistics import NormalDist

import numpy as np

from polythrottle.backends.simulated.engine import StepPhysics, StepWork
from polythrottle.catalog.boards import Board
from polythrottle.catalog.models import LanguageModel
from polythrottle.domain.arrivals import Arrivals, Call
from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import InvalidInput, KnobRejected, TrialError
from polythrottle.domain.measurement import Query
from polythrottle.domain.space import CONCURRENCY, Knob, OperatingPoint, SearchSpace

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
        duration_s: How long it took.
        power_w: Of the whole group.
        gpu_hz: SM clock that ran.
        work: What it computed.
        finished: Requests that made their last token.
        started: Requests that made their first.
    """

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
        return Step(duration_s, power_w * self._model.gpus, gpu_hz, work, tuple(finished), tuple(started))

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


_MIXED_ROUNDS = 2
_MOST_ROUNDS = 4
"""How often each client is answered before its loop counts, on average, and at most."""
_STREAM = 0x70C5
"""Sets the random lengths apart from other random numbers of the same seed."""
_STRATA = 64
_LONGEST_IDLE_S = 86_400.0


def drawn_lengths(model: LanguageModel, seed: int) -> Iterator[tuple[int, int]]:
    """Yield lengths of prompts and answers without end, log-normal around the means of the description.

    Every 64 of them hold one of each 64th of the distribution, in an order of their own, so that what a window costs
    does not hang on which lengths it happened to draw.
    """
    lengths = model.lengths
    random = np.random.default_rng([seed, _STREAM])
    normal_of = NormalDist().inv_cdf
    while True:
        shares = (random.random((_STRATA, 2)) + np.arange(_STRATA)[:, np.newaxis]) / _STRATA
        drawn = np.vectorize(normal_of)(np.clip(random.permuted(shares, axis=0), 1e-9, 1 - 1e-9))
        normal = np.exp(lengths.spread * drawn - lengths.spread**2 / 2)
        for prompt, output in (normal * (lengths.prompt_tokens, lengths.output_tokens)).tolist():
            tokens = min(max(1, round(prompt)), lengths.longest - 1)
            yield tokens, min(max(1, round(output)), lengths.longest - tokens)


def query_of(request: TokenRequest, server: TokenServer, more: bool) -> Query:
    """Return what the sender of a finished request saw."""
    assert request.first_s is not None
    token_s = server.token_s
    return Query(
        request.last_s - request.arrival_s + token_s,
        start_s=request.arrival_s,
        first_s=request.first_s - request.arrival_s + token_s,
        tokens=request.output_tokens,
        prompt_tokens=request.prompt_tokens,
        gaps_s=server.gaps_s(request),
        more=more,
    )


class SimulatedLanguageModel:
    """A served language model; satisfies the ports ``Workload`` and ``SelfPaced``.

    Made by `SimulatedDevice.serve_language`.

    Args:
        model: From the catalogue.
        board: On as many of which as it has GPUs.
        step: Runs one step on the board, at its clock and cap, and returns duration, power of one GPU, and clock.
        clock: Of the board; sleeping on it lets the board idle.

    Raises:
        InvalidInput: If the board has no coefficients for it, or the model does not fit.
    """

    def __init__(
        self,
        model: LanguageModel,
        board: Board,
        step: Callable[[StepPhysics, TokenServer], Step],
        clock: VirtualClock,
    ) -> None:
        if board.language is None:
            raise InvalidInput(
                f"{board.title} cannot serve {model.title}: its file has no [language] table with coefficients for it"
            )
        self.model = model
        self.physics = StepPhysics(model, board.language, float(board.knob("gpu_max_hz").levels[-1]))
        self._blocks = model.blocks(board.memory_bytes, BLOCK_TOKENS)
        self._step = step
        self._clock = clock
        counts = tuple(sorted({min(count, model.server.max_sequences) for count in model.concurrency}))
        self._space = SearchSpace.grid([Knob(CONCURRENCY, counts)], {CONCURRENCY: counts[-1]})
        self._concurrency = counts[-1]
        self._alone: Generator[Query, None, None] | None = None

    @property
    def uri(self) -> str:
        """The name or path of the model's file."""
        return self.model.name

    @property
    def space(self) -> SearchSpace:
        """How many requests may be in flight."""
        return self._space

    @property
    def notes(self) -> tuple[str, ...]:
        """How many GPUs the joules are those of."""
        if self.model.gpus == 1:
            return ()
        return (f"{self.model.title} runs on {self.model.gpus} of these cards: joules and watts are those of all",)

    def apply(self, point: OperatingPoint) -> None:
        """Set how many requests may be in flight.

        Raises:
            KnobRejected: If the workload has no such knob or level.
        """
        if unknown := sorted(set(point) - {CONCURRENCY}):
            raise KnobRejected(f"{self.model.title} has no knob {unknown[0]}; it has {CONCURRENCY}")
        level = point.get(CONCURRENCY, self._space.default[CONCURRENCY])
        if level not in (levels := self._space.knob(CONCURRENCY).levels):
            raise KnobRejected(
                f"{self.model.title} is not served at {CONCURRENCY} {level}; it is at {', '.join(map(str, levels))}"
            )
        self._concurrency = int(level)
        self._alone = None

    def query(self) -> Query:
        """Serve one request alone in virtual time."""
        if self._alone is None:
            lengths = drawn_lengths(self.model, 0)
            self._alone = self._closed(self._server(1), lengths, clients=1)
        return next(self._alone)

    def close(self) -> None:
        """Release nothing; there is nothing."""

    def _server(self, most: int) -> TokenServer:
        return TokenServer(self.model, self.physics, self._blocks, most)

    def served(self, arrivals: Arrivals, seed: int, timeout_s: float) -> Generator[Query, None, None]:
        """Yield requests in the order in which they are answered, several in flight at once.

        In a closed loop as many clients as the point says ask, each its next as soon as it is answered; they begin
        one after another over the time that one answer takes, so that their prompts do not come all at once.

        Args:
            arrivals: When requests come, and how long they are where a trace says so.
            seed: Of arrivals and lengths.
            timeout_s: How long nothing may come.

        Raises:
            TrialError: If no request comes for that long, or one is too long for the engine.
        """
        server = self._server(self._concurrency)
        lengths = drawn_lengths(self.model, seed)
        calls = arrivals.calls(seed)
        if calls is None:
            return self._closed(server, lengths, self._concurrency)
        return self._open(server, lengths, calls, timeout_s)

    def _request(self, arrival_s: float, lengths: Iterator[tuple[int, int]], call: Call | None = None) -> TokenRequest:
        if call is None or call.prompt_tokens is None or call.output_tokens is None:
            prompt, output = next(lengths)
        else:
            prompt, output = call.prompt_tokens, call.output_tokens
        longest = self.model.lengths.longest
        if prompt + output > longest:
            raise TrialError(
                f"a request has {prompt:,} + {output:,} tokens and {self.model.title} takes {longest:,} at most"
            )
        return TokenRequest(arrival_s, prompt, output, ready_s=arrival_s + self.model.server.start_s)

    def _closed(
        self, server: TokenServer, lengths: Iterator[tuple[int, int]], clients: int
    ) -> Generator[Query, None, None]:
        now_s = self._clock.now()
        # Clients begin spread over what one answer would take if all were there already.
        mean = self.model.lengths.output_tokens
        answer_s = mean * self.physics.full_step_s(clients, self.model.lengths)
        coming = deque(self._request(now_s + answer_s * i / clients, lengths) for i in range(clients))
        # Until each has been answered about twice the mix of ages is that of the beginning, and who is still under way
        # then may have come in the crowd. Few answers are so long that they are not waited for.
        answered = 0
        under_way = {id(request): request for request in coming}
        early: set[int] = set()
        while True:
            step = self._advance(server, coming)
            for number, request in enumerate(step.finished):
                following = self._request(request.last_s + server.token_s, lengths)
                coming.append(following)
                del under_way[id(request)]
                early.discard(id(request))
                answered += 1
                if answered == _MIXED_ROUNDS * clients:
                    early = set(under_way)
                elif answered > _MOST_ROUNDS * clients:
                    early = set()
                if answered > _MIXED_ROUNDS * clients and not early:
                    yield query_of(request, server, number + 1 < len(step.finished))
                under_way[id(following)] = following

    def _open(
        self, server: TokenServer, lengths: Iterator[tuple[int, int]], calls: Iterator[Call], timeout_s: float
    ) -> Generator[Query, None, None]:
        begin_s = self._clock.now()
        coming: deque[TokenRequest] = deque()
        while True:
            while not coming or coming[-1].ready_s <= self._clock.now():
                call = next(calls)
                coming.append(self._request(begin_s + call.time_s, lengths, call))
            if server.idle and coming[0].ready_s - self._clock.now() > min(timeout_s, _LONGEST_IDLE_S):
                raise TrialError(f"no request comes for {timeout_s:.3g} s; a window is no longer")
            step = self._advance(server, coming)
            for number, request in enumerate(step.finished):
                yield query_of(request, server, number + 1 < len(step.finished))

    def _advance(self, server: TokenServer, coming: deque[TokenRequest]) -> Step:
        """Take in who has come, idle until somebody does where nobody is there, and run one step."""
        if server.idle and coming[0].ready_s > self._clock.now():
            self._clock.sleep(coming[0].ready_s - self._clock.now())
            # Sleeping may stop short of the moment by rounding.
            server.add(coming.popleft())
        now_s = self._clock.now()
        while coming and coming[0].ready_s <= now_s:
            server.add(coming.popleft())
        return self._step(self.physics, server)
