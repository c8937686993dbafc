"""A streamed answer of an OpenAI-compatible server: when its tokens came, and how many there were.

Source of the form: OpenAI API reference, streaming of chat completions and completions, https://platform.openai.com/docs
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from polythrottle.errors import TrialError
from polythrottle.measurement import Query
from polythrottle.workloads.refusal import said

_DONE = b"[DONE]"
_TEXTS = ("content", "reasoning_content", "reasoning", "text", "tool_calls")


class Events:
    """Cuts what arrives into the data of server-sent events.

    Source: HTML Living Standard, 9.2 Server-sent events; comments and other fields than ``data`` are left out.
    """

    def __init__(self) -> None:
        self._rest = b""

    def take(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the data of each event that a chunk completes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip()


@dataclass
class TokenStream:
    """What has come of one answer so far; times are in seconds on the caller's clock.

    Args:
        who: The model, for people.
        start_s: When it was asked.
        chunks: How many pieces of text there were.
        counted: How many tokens the server says there were; None if it does not say.
        over: Whether the answer has ended as it should.
    """

    who: str
    start_s: float
    chunks: int = 0
    counted: int | None = None
    over: bool = False
    first_s: float | None = None
    last_s: float | None = None

    def take(self, data: bytes, now_s: float) -> None:
        """Take in the data of one event.

        Raises:
            TrialError: If it is an error, or no JSON.
        """
        if data == _DONE:
            self.over = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise TrialError(f"{self.who} streams something that is no JSON: {said(data)}") from None
        if not isinstance(event, dict) or event.get("error"):
            raise TrialError(f"{self.who} breaks off after {self.chunks} pieces: {said(data)}")
        self._count(event)
        for choice in event.get("choices") or ():
            self._look_at(choice, now_s)

    def _count(self, event: dict[str, Any]) -> None:
        usage = event.get("usage") or {}
        if isinstance(usage.get("completion_tokens"), int):
            self.counted = usage["completion_tokens"]

    def _look_at(self, choice: dict[str, Any], now_s: float) -> None:
        said_now = {**choice, **(choice.get("delta") or {})}
        if any(said_now.get(name) for name in _TEXTS):
            self.chunks += 1
            self.first_s = now_s if self.first_s is None else self.first_s
            self.last_s = now_s
        if choice.get("finish_reason"):
            self.over, self.last_s = True, now_s

    def query(self) -> Query:
        """Return the query that this was the answer to.

        Raises:
            TrialError: If the answer did not end as it should.
        """
        if not self.over or self.last_s is None:
            raise TrialError(f"the answer of {self.who} was cut off after {self.chunks} pieces")
        first_s = None if self.first_s is None else self.first_s - self.start_s
        tokens = self.chunks if self.counted is None else self.counted
        return Query(self.last_s - self.start_s, first_s=first_s, tokens=tokens)
