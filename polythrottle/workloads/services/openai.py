"""A language model behind an OpenAI-compatible server as a workload: prompts, streamed answers, tokens."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from async_timeout import timeout

from polythrottle.domain.errors import BadFile, DeviceError, InvalidInput, PermissionDenied, TrialError, UnknownName
from polythrottle.domain.measurement import Query
from polythrottle.domain.space import CONCURRENCY, IN_FLIGHT, OperatingPoint
from polythrottle.storage.untrusted import check_plain
from polythrottle.workloads.foreign_calls import refusal_text
from polythrottle.workloads.inputs import chosen, count
from polythrottle.workloads.services.http_client import Answer, Reply, Web
from polythrottle.workloads.services.service import Service, limit_of
from polythrottle.workloads.uris import Address

# What a language model is asked: lines of a file, or made-up words of about a given number of tokens.

# fmt: off
_WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company",
    "system", "program", "question", "work", "government", "number", "night", "point", "home", "water", "room",
)
# fmt: on


def made_up_prompts(words: int) -> Iterator[str]:
    """Yield prompts without end, each of so many words, the same ones every time.

    A common English word is about one token to most tokenisers; how many there were the server says afterwards. No two
    begin alike, or a server that keeps prefixes would be asked for less than it seems.

    Args:
        words: How many in each.
    """
    for number in itertools.count():
        yield " ".join([f"{number}", *random.Random(number).choices(_WORDS, k=words - 1)])


def prompts_of(path: str) -> Iterator[str]:
    """Yield the lines of a file without end, from the first to the last and again; empty ones are left out.

    Raises:
        BadFile: If it cannot be read, is no text, or has no line.
    """
    check_plain(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as err:
        raise BadFile(f"the prompts in {path} cannot be read: {err.strerror}") from err
    except UnicodeDecodeError as err:
        raise BadFile(f"{path} holds no prompts: it is no UTF-8 text") from err
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise BadFile(f"{path} holds no prompts; write one a line")
    return itertools.cycle(lines)


# A streamed answer of an OpenAI-compatible server: when its tokens came, and how many there were.
#
# Source of the form: OpenAI API reference, streaming of chat completions and completions,
# https://platform.openai.com/docs

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
        self._who = who
        self._rest = b""

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
                yield line[len(b"data:") :].strip()


@dataclass
class TokenStream:
    """What has come of one answer so far; times are in seconds on the caller's clock.

    Args:
        who: The model, for people.
        start_s: When it was asked.
        chunks: How many pieces of text there were.
        counted: How many tokens the server says there were; None if it does not say.
        prompt_tokens: How many it says the prompt had; likewise.
        over: Whether the answer has ended as it should.
        first_s: When the first text came; ``text_s`` is when the last did, and ``last_s`` when the answer ended.
        reason: Why the server says that it ended; empty before it does.
    """

    who: str
    start_s: float
    chunks: int = 0
    counted: int | None = None
    prompt_tokens: int | None = None
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
            raise TrialError(f"{self.who} streams something that is no JSON: {refusal_text(data)}") from None
        if not isinstance(event, dict) or event.get("error"):
            raise TrialError(f"{self.who} breaks off after {self.chunks} pieces: {refusal_text(data)}")
        try:
            self._count(event)
            for choice in event.get("choices") or ():
                self._look_at(choice, now_s)
        except (AttributeError, TypeError):
            raise TrialError(
                f"{self.who} streams something that is no part of an answer: {refusal_text(data)}"
            ) from None

    def _count(self, event: dict[str, Any]) -> None:
        usage = event.get("usage") or {}
        if type(tokens := usage.get("completion_tokens")) is int:
            self.counted = tokens
        if type(tokens := usage.get("prompt_tokens")) is int and tokens > 0:
            self.prompt_tokens = tokens

    def _look_at(self, choice: dict[str, Any], now_s: float) -> None:
        said_now = {**choice, **(choice.get("delta") or {})}
        if any(said_now.get(name) for name in _TEXTS):
            self.chunks += 1
            self.first_s = now_s if self.first_s is None else self.first_s
            self.text_s = self.last_s = now_s
        if reason := choice.get("finish_reason"):
            if reason in _BROKEN:
                raise TrialError(f"{self.who} breaks off after {self.chunks} pieces: {reason}")
            self.over = True
            self.last_s = now_s
            self.reason = str(reason)

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
        if by_usage is None:
            by_usage = self.counted is not None
        end_s = self.see_over()
        self.see_filled(by_usage)
        # Tokens that hold no text show only at the end; left out, slow ones would be missing from every percentile.
        first_s = end_s if self.first_s is None else self.first_s
        if by_usage:
            tokens = self._believed(most_tokens)
        else:
            tokens = self.chunks
        lumped = self.first_s == self.text_s
        return Query(
            end_s - self.start_s,
            first_s=first_s - self.start_s,
            tokens=tokens,
            lumped=lumped,
            prompt_tokens=self.prompt_tokens,
        )

    def _believed(self, most_tokens: int | None) -> int:
        """Return how many tokens the server says there were, if that can be."""
        if self.counted is None:
            raise TrialError(f"{self.who} does not say how many tokens this answer has, as it did before")
        if most_tokens is None:
            most = math.inf
        else:
            most = max(most_tokens, self.chunks) + _BESIDES
        if not self.chunks <= self.counted <= most:
            if most_tokens is None:
                asked = ""
            else:
                asked = f", of which at most {most_tokens:,} were asked for"
            raise TrialError(f"{self.who} says that {self.chunks:,} pieces are {self.counted:,} tokens{asked}")
        return self.counted


# A language model behind an OpenAI-compatible server (vLLM, SGLang, transformers serve, …) as a workload.

KEY = "OPENAI_API_KEY"
_OPTIONS = ("endpoint", "prompt_tokens", "max_tokens", "prompts", "stall", "ignore_eos", CONCURRENCY, IN_FLIGHT)
_PATHS = {"chat": "/chat/completions", "completions": "/completions"}
_OK = 200
_REFUSAL = 400
_SERVER_FAULT = 500
_REFUSED = (401, 403)
_MISSING = (404, 405)
_BUSY = (408, 425, 429)
_COUNTING = "stream_options"
_ALL_TOKENS = "length"
_LISTING_S = 5.0
_FEW = 0.01
"""So small a share of answers that do not tell a time does not keep its p99 from being known."""


class OpenaiWorkload(Service[Web]):
    """One streamed answer per query; an item is an answer, and its tokens are counted.

    Opening it asks for one token. Whatever the server does wrong with an answer spoils that query, this one too; what
    is refused for good, such as the key, the model or the request, ends a study.

    Args:
        uri: ``openai://host:port/model`` or ``openai+https://host/model``; options after a question mark: ``endpoint``
            (chat or completions), ``prompt_tokens`` (128) or ``prompts`` (a file, a prompt a line), ``max_tokens``
            (64), ``stall`` (seconds without a token before the answer is given up, 10), ``ignore_eos=true`` (always
            ``max_tokens``, where the server knows that field), ``concurrency``, ``in_flight`` (levels of the bound on
            the requests in flight, where the address is that of ``polythrottle proxy``; the one found there is set
            again when the workload is closed).
        inputs: Must be empty.
        batch_sizes: Must be None.
        threads: Must be None.
        timeout_s: When a whole answer is given up, in seconds.

    Raises:
        InvalidInput: If an option is malformed, or the server takes no such request.
        UnknownName: If the server has no such model; names those it has.
        PermissionDenied: If the server wants another key.
        DeviceError: If it cannot be reached, or is of another kind.
        TrialError: If it does not answer the first query as it should.
    """

    def __init__(
        self,
        uri: str,
        *,
        inputs: Sequence[str] = (),
        batch_sizes: Sequence[int] | None = None,
        threads: Sequence[int] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        address = Address.parse(uri, _OPTIONS)
        super().__init__(address, threads, timeout_s)
        if inputs or batch_sizes is not None:
            raise InvalidInput(f"{uri} is asked in words; leave --input and --batch out (?concurrency=1,4 is searched)")
        self._key = os.environ.get(KEY, "")
        if not (self._key.isascii() and self._key.isprintable()):
            raise InvalidInput(f"${KEY} holds something that no key can hold, such as the end of a line")
        self._chat = address.choice("endpoint", tuple(_PATHS)) == "chat"
        self._stall_s = address.seconds("stall", 10.0)
        self._prompts = self._asked()
        self._fields = self._common_fields(address)
        self._by_usage = True
        self._answers = self._lumped = 0
        self._listed: list[str] = []
        self._limit = limit_of(address)
        if self._limit is not None:
            with self._opening():
                self._wait_for(self._in_time(self._limit.open()))
            default = OperatingPoint({IN_FLIGHT: self._limit.found})
            self._open([self._limit.knob], default)
        else:
            self._open([])
        with self._opening(asking=True):
            self._wait_for(self._in_time(self._try()))

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should read beside the figures: whose joules they are not, what is counted, who answers."""
        found = list(super().notes)
        where = self._address.where
        if not self._by_usage:
            found.append(f"{where} does not say how many tokens it made: pieces of the stream are counted")
        if self._listed:
            model = self._address.model
            others = ", ".join(self._listed[:3])
            found.append(f"{where} answers as {model} but does not list it (it lists {others}): see which it serves")
        if self._lumped > _FEW * self._answers:
            some = f"{self._lumped:,} of {self._answers:,} answers of {where} came with all tokens in one piece"
            found.append(f"{some}: time per token (tpot) is unknown")
        most = self._at_once[-1]
        if self._limit is not None and most == 1:
            found.append("in_flight bounds what comes by --arrivals; without, write ?concurrency= above its levels")
        elif self._limit is not None and most < self._limit.most:
            found.append(f"in_flight above {most} bounds nothing while at most {most} queries are under way")
        return tuple(found)

    def apply(self, point: OperatingPoint) -> None:
        """Set the knobs of the queries to come, and the bound on those in flight at the proxy.

        Raises:
            KnobRejected: If the point is not in the space, or the proxy does not take the bound.
        """
        wanted = chosen(self.space, point)
        if self._limit is not None and (level := count(wanted, IN_FLIGHT)) != self._limit.held:
            self._wait_for(self._in_time(self._limit.set(level)))
        super().apply(wanted)

    def close(self) -> None:
        """Close what was opened, the proxy's bound set as it was found; the service goes on.

        Raises:
            DeviceError: If the proxy does not take it.
        """
        try:
            if self._limit is not None and self._limit.held != self._limit.found:
                self._wait_for(self._in_time(self._limit.set(self._limit.found)))
        except TrialError as err:
            raise DeviceError(f"{err}; set it by hand") from err
        finally:
            super().close()

    def _asked(self) -> Any:
        options = self._address.options
        if "prompts" in options and "prompt_tokens" in options:
            raise InvalidInput(f"{self.uri}: prompts brings its own length; leave prompt_tokens out")
        if "prompts" in options:
            return prompts_of(options["prompts"])
        return made_up_prompts(self._address.count("prompt_tokens", 128))

    def _common_fields(self, address: Address) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "model": address.model,
            "max_tokens": address.count("max_tokens", 64),
            "temperature": 0,
            "stream": True,
            _COUNTING: {"include_usage": True},
        }
        if address.options.get("ignore_eos") is not None and address.choice("ignore_eos", ("true", "false")) == "true":
            fields["ignore_eos"] = True
        return fields

    def _line(self) -> Web:
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        scheme = "http"
        if self._address.scheme == "openai+https":
            scheme = "https"
        return Web(self._address.where, f"{scheme}://{self._address.where}/v1", headers)

    def _body(self, prompt: str, **fields: Any) -> bytes:
        said_first = {"messages": [{"role": "user", "content": prompt}]} if self._chat else {"prompt": prompt}
        return json.dumps({**self._fields, **said_first, **fields}).encode()

    async def _try(self) -> None:
        """Ask for one token, so that what cannot work is said before anything is measured."""
        try:
            stream = await self._streamed(self._lent(), self._body("Hello", max_tokens=1))
        except InvalidInput as refusal:
            if _COUNTING not in str(refusal):
                raise
            del self._fields[_COUNTING]
            stream = await self._streamed(self._lent(), self._body("Hello", max_tokens=1))
        stream.see_over()
        if stream.reason != _ALL_TOKENS:  # else one token came, which may hold no text yet
            with self._unkeyed():
                stream.see_filled()
        self._by_usage = stream.counted is not None
        known = await self._models()
        if self._address.model not in known:
            self._listed = known
        else:
            self._listed = []

    async def _explain(self, answer: Answer) -> NoReturn:
        """Raise what a refusal means."""
        told = self._said(answer.body)
        if not _REFUSAL <= answer.status < _SERVER_FAULT or answer.status in _BUSY:
            raise TrialError(f"{self._address.model} answers with an error ({answer.status}): {told}")
        text = f"{self._address.where} refuses ({answer.status}): {told}"
        if answer.status in _REFUSED:
            raise PermissionDenied(f"{text}; put the server's key into ${KEY}")
        known = [] if _COUNTING in told else await self._models()
        if known and self._address.model not in known:
            raise UnknownName(f"model at {self._address.where}", self._address.model, known)
        if not known and answer.status in _MISSING:
            raise DeviceError(f"{text}; it has no {self._address.model}, or is no OpenAI-compatible server")
        raise InvalidInput(text)

    async def _models(self) -> list[str]:
        """Return the models the server lists; none if it lists none, or not soon."""
        try:
            async with timeout(_LISTING_S):
                # Some servers fail here, and then hang up without saying so: what comes next needs another connection.
                found = (await self._lent().fetch("GET", "/models", headers={"Connection": "close"})).document
            return [str(each["id"]) for each in found["data"]]
        except (TrialError, ConnectionError, asyncio.TimeoutError, TypeError, KeyError):
            return []

    @property
    def _path(self) -> str:
        return _PATHS["chat" if self._chat else "completions"]

    def _said(self, body: bytes) -> str:
        """Return what the server says, without the key should it repeat that."""
        return refusal_text(body.replace(self._key.encode(), "…".encode()) if self._key else body)

    async def _ask(self, line: Web) -> Query:
        stream = await self._streamed(line, self._body(next(self._prompts)))
        with self._unkeyed():
            query = stream.query(self._by_usage, self._fields["max_tokens"])
        self._answers += 1
        self._lumped += query.lumped and (query.tokens or 0) > 1
        return query

    async def _streamed(self, line: Web, body: bytes) -> TokenStream:
        """Ask, and return the whole answer."""
        stream = TokenStream(self._address.model, time.perf_counter())
        async with line.asked("POST", self._path, body) as answer:
            if answer.status != _OK:
                await self._explain(await line.whole(answer))
            kind = answer.headers.get("content-type", "").partition(";")[0]
            if kind.strip().lower() != "text/event-stream":
                said_so = kind[:50] or "something of no type"
                raise TrialError(f"{self._address.where} answers with {said_so} instead of a stream of tokens")
            with self._unkeyed():
                await self._read(answer, stream)
        return stream

    @contextmanager
    def _unkeyed(self) -> Iterator[None]:
        """Leave the key out of what is wrong with an answer, should the server repeat it there."""
        try:
            yield
        except TrialError as err:
            raise TrialError(self._said(str(err).encode())) from None

    async def _read(self, answer: Reply, stream: TokenStream) -> None:
        """Read a stream to its end; once it has begun, it may not stall."""
        events = Events(stream.who)
        loop = asyncio.get_running_loop()
        before = None
        try:
            async with timeout(None) as patience:
                async for chunk in answer.pieces():
                    now_s = time.perf_counter()
                    for data in events.take(chunk):
                        stream.take(data, now_s)
                        if before != (before := (stream.chunks, stream.over, stream.counted)):
                            patience.update(loop.time() + self._stall_s)
        except asyncio.TimeoutError:
            # The limit on the whole answer cancels; only this one ends here.
            if stream.over:
                where = "after its end"
            else:
                where = f"after {stream.chunks} pieces"
            raise TrialError(f"{stream.who} stalled: nothing for {self._stall_s:g} s {where}") from None
