"""An answer as it passes: where its body ends, when its first and last tokens came, and how many there were.

Bytes are passed on as they come, framed as the server framed them. So an answer that the server broke off is broken off
for the client too, and cannot be taken for a whole one.
"""

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

# Where a body ends. Source: RFC 9112, section 6 (message body) and 7.1 (chunked).

_LONGEST_LINE = 16 << 10
# Bounded: Python would make an integer of any length, and nobody sends a chunk of more than an exabyte.
_SIZE = re.compile(rb"[0-9a-fA-F]{1,15}")


class Body(Protocol):
    """The body of an answer; ``over`` once its last byte has been taken, ``framed`` if it shows where that is."""

    over: bool
    framed: bool

    def take(self, data: bytes) -> int:
        """Return how many of these bytes belong to it, from the first on.

        Raises:
            ValueError: If they cannot be part of it.
        """


class SizedBody:
    """A body of a length that was told before it.

    Args:
        length: In bytes.
    """

    framed = True

    def __init__(self, length: int) -> None:
        self._left = length
        self.over = not length

    def take(self, data: bytes) -> int:
        """Return how many of these bytes belong to it."""
        taken = min(self._left, len(data))
        self._left -= taken
        self.over = not self._left
        return taken


class OpenBody:
    """A body that ends where the connection does."""

    over = False
    framed = False

    def take(self, data: bytes) -> int:
        """Return how many of these bytes belong to it: all."""
        return len(data)


class ChunkedBody:
    """A body in chunks, each with its length before it."""

    framed = True

    def __init__(self) -> None:
        self.over = False
        self._left = 0
        self._line = b""
        self._trailing = False

    def take(self, data: bytes) -> int:
        """Return how many of these bytes belong to it, their framing included.

        Raises:
            ValueError: If the length of a chunk is none, or a line does not end.
        """
        at = 0
        while at < len(data):
            if self._left:
                step = min(self._left, len(data) - at)
                self._left -= step
                at += step
                continue
            end = data.find(b"\n", at)
            if end < 0:
                self._line += data[at:]
                if len(self._line) > _LONGEST_LINE:
                    raise ValueError("the length of a chunk does not end")
                return len(data)
            line = (self._line + data[at:end]).strip()
            self._line = b""
            at = end + 1
            self._end_of_line(line)
            if self.over:
                return at
        return at

    def _end_of_line(self, line: bytes) -> None:
        if self._trailing:
            self.over = not line
            return
        size = line.partition(b";")[0].strip()
        if not _SIZE.fullmatch(size):
            raise ValueError("the length of a chunk is no number")
        self._left = int(size, 16)
        if self._left:
            self._left += 2  # the end of line behind it
        else:
            self._trailing = True


# What an answer tells of itself while it passes.
#
# Names of the counts: OpenAI API reference, chat completions and completions (prompt_tokens, completion_tokens) and
# responses (input_tokens, output_tokens), https://platform.openai.com/docs.

_EVENT = b"\ndata:"
# What is carried over to the next read: less than the word, so that none is counted twice.
_END = slice(1 - len(_EVENT), None)
_LAST_PIECES = 4
_SHORT = 64
_LOOKED_THROUGH = 64 << 10
# A quotation mark within a text of JSON is escaped: what a model says cannot be taken for a count.
_PROMPT = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d{1,12})\b')
_COMPLETION = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,12})\b')
_OVER = b"data: [DONE]"


@dataclass
class Tokens:
    """When the tokens of one answer came, and how many; times are in seconds on the caller's clock.

    Args:
        streamed: Whether it comes as server-sent events.
        pieces: How many events with data have come.
        first_s: When the first did; ``last_s`` when the last did.
    """

    streamed: bool = False
    pieces: int = 0
    first_s: float | None = None
    last_s: float | None = None
    # As if a line had ended before the first byte: without chunks an event begins there.
    _end: bytes = b"\n"
    _tail: deque[bytes] = field(default_factory=lambda: deque((b"",), maxlen=_LAST_PIECES))

    def take(self, data: bytes, now_s: float) -> None:
        """Take note of bytes that were passed on."""
        # Short reads together: a server that writes a chunk's length by itself would fill the tail with lengths.
        tail = self._tail
        if len(tail[-1]) < _SHORT:
            tail[-1] += data
        else:
            tail.append(data)
        if not self.streamed:
            return
        # A read may begin within the word, or with it where a server writes the length of a chunk by itself. A word
        # that two chunks share is not seen: bytes are looked at as they pass, framed.
        text = self._end + data
        came = text.count(_EVENT)
        self._end = text[_END]
        if came:
            self.pieces += came
            self.last_s = now_s
            if self.first_s is None:
                self.first_s = now_s

    def counted(self) -> "Counted":
        """Return how many tokens there were: as the server counts, else the pieces of a stream."""
        # At its end alone: servers count in the last event before [DONE], or behind the text of a whole answer.
        text = b"".join(self._tail)[-_LOOKED_THROUGH:]
        prompts, completions = _PROMPT.findall(text), _COMPLETION.findall(text)
        if completions:
            return Counted(int(prompts[-1]) if prompts else None, int(completions[-1]), by_server=True)
        if not self.streamed:
            return Counted(int(prompts[-1]) if prompts else None, None, by_server=bool(prompts))
        return Counted(None, max(0, self.pieces - (_OVER in text)), by_server=False)

    def per_token_s(self, tokens: int | None) -> float | None:
        """Return the mean time from one token to the next, (last - first) / (n - 1); None where it is not known."""
        if self.first_s is None or self.last_s is None or self.last_s <= self.first_s or (tokens or 0) < 2:
            return None
        assert tokens is not None
        return (self.last_s - self.first_s) / (tokens - 1)


@dataclass(frozen=True)
class Counted:
    """Tokens of one request.

    Args:
        prompt: That were sent; None if the server does not say.
        completion: That came; None if nobody knows.
        by_server: Whether the server has counted them.
    """

    prompt: int | None
    completion: int | None
    by_server: bool


def body_of(method: bytes, status: int, headers: Mapping[bytes, bytes]) -> Body:
    """Return the body that follows the head of an answer.

    Args:
        method: Of the request.
        status: Of the answer.
        headers: Of the answer, names in small letters.
    """
    # In the order of RFC 9112, section 6.3: beside chunks a length does not count.
    if method == b"HEAD" or status in (204, 304) or status < 200:
        return SizedBody(0)
    if b"transfer-encoding" in headers:
        return ChunkedBody()
    if b"content-length" in headers:
        return SizedBody(int(headers[b"content-length"]))
    return OpenBody()
