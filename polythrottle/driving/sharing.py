"""Queries that answer several requests: who waited how long."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from polythrottle.errors import TrialError
from polythrottle.measurement import Query


def shared(query: Query, intended_s: Sequence[float], started_s: float, ended_s: float) -> Iterator[Query]:
    """Yield what each request of a query saw, counted from when it was meant to be sent.

    A request waits until the query starts, and then as long as the query says. Where the server was free again before
    that, as one that prepares the next query while it still computes the last, its requests overlapped with those
    before, so that the wait is shorter by as much.

    Args:
        query: What came back.
        intended_s: When its requests were meant to be sent, on the clock of the device.
        started_s: When the query was sent.
        ended_s: When the server took the next.

    Raises:
        TrialError: If the query's items cannot be shared evenly, or the clock went back.
    """
    count = len(intended_s)
    if ended_s < started_s:
        raise TrialError(f"the clock went back by {started_s - ended_s:.3g} s during a query")
    if query.items % count:
        raise TrialError(f"a query for {count} requests answered {query.items} items")
    taken_s = min(query.latency_s, ended_s - started_s)
    for number, intended in enumerate(intended_s):
        latency_s = max(query.latency_s, started_s - intended + taken_s)
        yield replace(
            query,
            latency_s=latency_s,
            items=query.items // count,
            start_s=intended,
            sent_s=intended + max(0.0, latency_s - query.latency_s),
            first_s=None if query.first_s is None else query.first_s + latency_s - query.latency_s,
            tokens=None if query.tokens is None else query.tokens // count + (number < query.tokens % count),
        )
