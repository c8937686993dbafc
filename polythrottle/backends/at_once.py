"""Several devices in one text, and all of them asked at once: one that does not answer holds up none of the others."""

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from polythrottle.backends.device_uri import SCHEMES
from polythrottle.domain.clock import Clock, SystemClock, Thread
from polythrottle.domain.errors import DeviceError, InvalidInput, PolythrottleError

Found = TypeVar("Found")

MOST_AT_ONCE = 256
"""So many are asked at the same time: each has a thread, and over SSH a process."""
_POLL_S = 0.2
_NEXT = re.compile(rf",(?=(?:{'|'.join(SCHEMES)})(?:[:?,]|$))")


def uris_in(text: str) -> tuple[str, ...]:
    """Return the device URIs of a text in which commas stand between them: ``ssh://nano1,ssh://nano2``.

    A comma belongs to a URI where no scheme follows it, as in ``nvml:0,2``.

    Raises:
        InvalidInput: If one is there twice, or none follows a comma.
    """
    found = tuple(_NEXT.split(text))
    if empty := [each for each in found if each.endswith(",")]:
        raise InvalidInput(f"{empty[0]} ends with a comma; a device's URI follows each comma")
    check_distinct(found)
    return found


def check_distinct(uris: Sequence[str]) -> None:
    """Refuse a device that is named twice: two threads would steer one board.

    Raises:
        InvalidInput: If one is.
    """
    twice = next((uri for number, uri in enumerate(uris) if uri in uris[:number]), None)
    if twice is not None:
        raise InvalidInput(f"{twice} is named twice")


@dataclass(frozen=True)
class Answer(Generic[Found]):
    """What one device answered.

    Args:
        uri: The device.
        found: The answer; None if there was none.
        error: Why there was none.
    """

    uri: str
    found: Found | None = None
    error: PolythrottleError | None = None


def at_once(
    uris: Sequence[str], ask: Callable[[str], Found], within_s: float, clock: Clock | None = None
) -> Iterator[Answer[Found]]:
    """Ask devices something, each in a thread of its own, and yield the answers as they come.

    Args:
        uris: Which, each once.
        ask: Asks one of them; the errors of the package it raises are answers.
        within_s: How long one may take, from when it is asked. What has not answered until then is given up: its thread
            ends with the process at the latest, and what it holds over SSH is restored there then.
        clock: By which that is told.

    Raises:
        DeviceError: If there are no more threads.
    """
    clock = clock or SystemClock()
    answers: SimpleQueue[tuple[str, Found | None, BaseException | None]] = SimpleQueue()
    waiting = deque(uris)
    asked_s: dict[str, float] = {}

    def run(uri: str) -> None:
        try:
            answers.put((uri, ask(uri), None))
        except BaseException as error:  # raised again below, in the thread of whoever asked
            answers.put((uri, None, error))

    while waiting or asked_s:
        while waiting and len(asked_s) < MOST_AT_ONCE:
            uri = waiting.popleft()
            asked_s[uri] = clock.now()
            Thread(target=run, args=(uri,), name=f"polythrottle-{uri}", daemon=True).start()
        try:
            uri, found, error = answers.get(timeout=_POLL_S)
        except Empty:
            pass
        else:
            if asked_s.pop(uri, None) is not None:  # else it has been given up
                yield _answer(uri, found, error)
        for late in [each for each, since_s in asked_s.items() if clock.now() - since_s > within_s]:
            del asked_s[late]
            yield Answer(late, error=DeviceError(f"no answer within {within_s:g} s"))


def _answer(uri: str, found: Found | None, error: BaseException | None) -> Answer[Found]:
    if error is None or isinstance(error, PolythrottleError):
        return Answer(uri, found, error)
    raise error
