"""The loop that serves and trains, over a host whose work takes fixed times on its own clock."""

import math
from collections.abc import Sequence

import pytest

from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.ladder import PointPerformance
from polythrottle.domain.space import OperatingPoint
from polythrottle.training.beside.operating_options import Option, Slice
from polythrottle.training.beside.scheduler import Decision, Moment, interleave
from polythrottle.training.beside.serving_loop import AnsweredBatch, ServingHost, ServingLoop

POINT = OperatingPoint({"gpu_max_hz": 1e9})
PIECE = Slice(4, 0.05, 0.06)
SERVE_S = 0.02


class FixedHost:
    """A device on which a batch takes 20 ms and a slice of 4 samples 50 ms.

    Args:
        work: Samples of the job.
        late_s: By how much it wakes later than it was asked to.
    """

    option = Option(POINT, (PointPerformance(POINT, 1, SERVE_S, SERVE_S, SERVE_S, 1.0, 5.0),), (PIECE,))
    day_s = None
    aim_s = None

    def __init__(self, work: int, late_s: float = 0.0) -> None:
        self.now_s = 0.0
        self.serves_until_s: float | None = None
        self.slice_ends_s: float | None = None
        self.served: tuple[float, ...] = ()
        self.remaining = work
        self.late_s = late_s
        self.periods_s: list[float] = []

    @property
    def training(self) -> bool:
        """Whether a slice runs."""
        return self.slice_ends_s is not None

    @property
    def left(self) -> int:
        """Samples that may be begun."""
        return 0 if self.training else self.remaining

    @property
    def done(self) -> bool:
        """Whether all is trained."""
        return self.remaining == 0

    def queued(self, ages_s: Sequence[float], demand_per_s: float | None) -> None:
        """Do nothing."""

    def move(self, point: OperatingPoint) -> float:
        """Take 0.3 s."""
        return 0.3

    def train(self, piece: Slice) -> None:
        """Begin a slice; one at a time."""
        assert self.slice_ends_s is None
        self.slice_ends_s = self.now_s + piece.alone_s

    def serve(self, arrived_s: tuple[float, ...]) -> None:
        """Begin a batch; one at a time."""
        assert self.serves_until_s is None
        self.served = arrived_s
        self.serves_until_s = self.now_s + SERVE_S

    def wait(self, until_s: float, queued: bool) -> Sequence[AnsweredBatch]:
        """Let time pass until then or until something ends."""
        ends = [end for end in (self.serves_until_s, self.slice_ends_s) if end is not None]
        self.now_s = max(self.now_s, min([until_s + self.late_s, *ends]))
        assert math.isfinite(self.now_s)
        if self.slice_ends_s is not None and self.slice_ends_s <= self.now_s:
            self.slice_ends_s = None
            self.remaining = max(0, self.remaining - PIECE.samples)
        if self.serves_until_s is not None and self.serves_until_s <= self.now_s:
            self.serves_until_s = None
            return (AnsweredBatch(self.served, self.now_s),)
        return ()

    def look(self, period_s: float, answered: int, late: int) -> float:
        """Keep how long it was since the last look."""
        self.periods_s.append(period_s)
        return 1.0


def test_requests_come_until_the_job_is_done() -> None:
    """Without an end of their own they stop with the job; each that came is answered, none late."""
    host: ServingHost = FixedHost(work=40)
    loop = ServingLoop(host, (0.1 * number for number in range(10**9)), 0.5, 10.0, interleave, ends_s=None)
    loop.run()
    assert host.done
    assert 0 < loop.requests == len(loop.latencies_s) < 100
    assert (loop.late, loop.dropped) == (0, 0)
    assert loop.latencies_s == pytest.approx([SERVE_S] * loop.requests, abs=PIECE.tail_s)


def test_a_stream_with_an_end_is_seen_to_its_end_and_the_job_to_its_own() -> None:
    """Whichever is longer."""
    host = FixedHost(work=4)
    loop = ServingLoop(host, (0.5, 1.0), 0.5, 1.0, interleave, ends_s=3.0)
    loop.run()
    assert (loop.requests, loop.arrived_s, host.now_s) == (2, [0.5, 1.0], 3.0)
    host = FixedHost(work=400)
    ServingLoop(host, (), 0.5, 1.0, interleave, ends_s=1.0).run()
    assert host.now_s == pytest.approx(5.0)


def test_a_host_that_wakes_late_tells_the_forecast_a_longer_period() -> None:
    """On a busy machine a look comes later than planned: the rate is counted over the time that really passed."""
    host = FixedHost(work=0, late_s=0.25)
    ServingLoop(host, (), 0.5, 1.0, interleave, ends_s=4.0).run()
    assert host.periods_s == pytest.approx([1.25] * len(host.periods_s))
    assert len(host.periods_s) >= 3


def test_time_passes_while_the_point_changes_and_a_policy_comes_to_rest() -> None:
    """Requests that come meanwhile are not lost; one that only ever moves is an error."""
    host = FixedHost(work=0)
    moved: list[float] = []

    def once(moment: Moment) -> Decision:
        if not moved:
            moved.append(moment.now_s)
            return Decision("a slower point", point=POINT)
        return Decision("serve", batch=min(1, len(moment.ages_s)) if not moment.serving else 0)

    loop = ServingLoop(host, (0.1, 0.2), 0.5, 1.0, once, ends_s=1.0)
    loop.run()
    assert loop.latencies_s == pytest.approx([0.3 - 0.1 + SERVE_S, 0.3 - 0.2 + 2 * SERVE_S])
    with pytest.raises(InvalidInput, match="never comes to rest"):
        ServingLoop(host, (), 0.5, 1.0, lambda moment: Decision("on", point=POINT), ends_s=9.0).run()
