"""A language model served on a simulated board: requests come, the engine steps, tokens go out, in virtual time."""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from statistics import NormalDist

import numpy as np

from polythrottle.backends.simulated.token_server import BLOCK_TOKENS, Step, TokenRequest, TokenServer
from polythrottle.backends.simulated.token_steps import StepPhysics
from polythrottle.catalog.boards import Board
from polythrottle.catalog.models import LanguageModel
from polythrottle.domain.arrivals import Arrivals, Call
from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import InvalidInput, KnobRejected, TrialError
from polythrottle.domain.measurement import Query
from polythrottle.domain.space import Knob, OperatingPoint, SearchSpace

CONCURRENCY = "concurrency"
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
        left = 2 * clients  # until each has been answered about twice, the mix of ages is that of the beginning
        while True:
            step = self._advance(server, coming)
            for number, request in enumerate(step.finished):
                coming.append(self._request(request.last_s + server.token_s, lengths))
                left -= 1
                if left < 0:
                    yield query_of(request, server, number + 1 < len(step.finished))

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
