"""A streamed answer of an OpenAI-compatible server: when its tokens came, and how many there were.

Source of the form: OpenAI API reference, streaming of chat completions and completions, https://platform.openai.com/docs
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from polythrottle.errors import TrialError
from polythrottle.measurement import Query
from polythrottle.workloads.refusal import said

_DONE = b"[DONE]"
_BROKEN = ("abort", "error")
_LONGEST_LINE = 1 << 20
_BESIDES = 8
"""How many tokens a server may count besides those that were asked for: those that begin and end an answer."""
_TEXTS = ("content", "reasoning_content", "reasoning", "text", "tool_calls")


class Events:
    """Cuts what arrives into the data of server-sent events.

    Source: HTML Living Standard, 9.2 Server-sent events; comments and other fields than ``data`` are left out.

    Args:
        who: The model, for people.
    """

    def __init__(self, who: str) -> None:
        self._who, self._rest = who, b""

    def take(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the data of each event that a chunk completes.

        Raises:
            TrialError: If a line does not end.
        """
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            raise TrialError(f"{self._who} streams a line of more than {_LONGEST_LINE >> 20} MiB; it was not read on")
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
        first_s: When the first text came; ``text_s`` is when the last did, and ``last_s`` when the answer ended.
        reason: Why the server says that it ended; empty before it does.
    """

    who: str
    start_s: float
    chunks: int = 0
    counted: int | None = None
    over: bool = False
    reason: str = ""
    first_s: float | None = None
    text_s: float | None = None
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
        except (ValueError, RecursionError):
            raise TrialError(f"{self.who} streams something that is no JSON: {said(data)}") from None
        if not isinstance(event, dict) or event.get("error"):
            raise TrialError(f"{self.who} breaks off after {self.chunks} pieces: {said(data)}")
        try:
            self._count(event)
            for choice in event.get("choices") or ():
                self._look_at(choice, now_s)
        except (AttributeError, TypeError):
            raise TrialError(f"{self.who} streams something that is no part of an answer: {said(data)}") from None

    def _count(self, event: dict[str, Any]) -> None:
        tokens = (event.get("usage") or {}).get("completion_tokens")
        if type(tokens) is int:
            self.counted = tokens

    def _look_at(self, choice: dict[str, Any], now_s: float) -> None:
        said_now = {**choice, **(choice.get("delta") or {})}
        if any(said_now.get(name) for name in _TEXTS):
            self.chunks += 1
            self.first_s = now_s if self.first_s is None else self.first_s
            self.text_s = self.last_s = now_s
        if reason := choice.get("finish_reason"):
            if reason in _BROKEN:
                raise TrialError(f"{self.who} breaks off after {self.chunks} pieces: {reason}")
            self.over, self.last_s, self.reason = True, now_s, str(reason)

    def see_over(self) -> float:
        """Return when the answer ended; raise TrialError unless it has, as it should."""
        if not self.over or self.last_s is None:
            raise TrialError(f"the answer of {self.who} was cut off after {self.chunks} pieces")
        return self.last_s

    def see_filled(self, by_usage: bool = True) -> None:
        """Raise TrialError if nothing came: no text, and no token that the server counted where that is believed."""
        if not self.chunks and not (by_usage and self.counted):
            raise TrialError(f"the answer of {self.who} is empty (finish reason {self.reason})")

    def query(self, by_usage: bool | None = None, most_tokens: int | None = None) -> Query:
        """Return the query that this was the answer to.

        Args:
            by_usage: Whether tokens are those the server says there were; if None, they are where it says.
            most_tokens: How many were asked for.

        Raises:
            TrialError: If the answer did not end as it should or is empty, or the server's count cannot be right.
        """
        by_usage = self.counted is not None if by_usage is None else by_usage
        end_s = self.see_over()
        self.see_filled(by_usage)
        # Tokens that hold no text show only at the end; left out, slow ones would be missing from every percentile.
        first_s = end_s if self.first_s is None else self.first_s
        tokens = self._believed(most_tokens) if by_usage else self.chunks
        lumped = self.first_s == self.text_s
        return Query(end_s - self.start_s, first_s=first_s - self.start_s, tokens=tokens, lumped=lumped)

    def _believed(self, most_tokens: int | None) -> int:
        """Return how many tokens the server says there were, if that can be."""
        if self.counted is None:
            raise TrialError(f"{self.who} does not say how many tokens this answer has, as it did before")
        most = math.inf if most_tokens is None else max(most_tokens, self.chunks) + _BESIDES
        if not self.chunks <= self.counted <= most:
            asked = "" if most_tokens is None else f", of which at most {most_tokens:,} were asked for"
            raise TrialError(f"{self.who} says that {self.chunks:,} pieces are {self.counted:,} tokens{asked}")
        return self.counted
