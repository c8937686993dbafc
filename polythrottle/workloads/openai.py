"""A language model behind an OpenAI-compatible server (vLLM, SGLang, transformers serve, …) as a workload."""

import asyncio
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from async_timeout import timeout

from polythrottle.errors import DeviceError, InvalidInput, PermissionDenied, TrialError, UnknownName
from polythrottle.measurement import Query
from polythrottle.workloads.address import Address
from polythrottle.workloads.prompts import made_up_prompts, prompts_of
from polythrottle.workloads.refusal import said
from polythrottle.workloads.service import CONCURRENCY, Service
from polythrottle.workloads.token_stream import Events, TokenStream

if TYPE_CHECKING:
    from polythrottle.workloads.web import Answer, Web

KEY = "OPENAI_API_KEY"
_OPTIONS = ("endpoint", "prompt_tokens", "max_tokens", "prompts", "stall", "ignore_eos", CONCURRENCY)
_PATHS = {"chat": "/chat/completions", "completions": "/completions"}
_OK, _REFUSAL, _SERVER_FAULT = 200, 400, 500
_REFUSED, _MISSING, _BUSY = (401, 403), (404, 405), (408, 425, 429)
_COUNTING, _ALL_TOKENS = "stream_options", "length"
_LISTING_S = 5.0
_FEW = 0.01
"""So small a share of answers that do not tell a time does not keep its p99 from being known."""


class OpenaiWorkload(Service["Web"]):
    """One streamed answer per query; an item is an answer, and its tokens are counted.

    Opening it asks for one token. Whatever the server does wrong with an answer spoils that query, this one too; what
    is refused for good, such as the key, the model or the request, ends a study.

    Args:
        uri: ``openai://host:port/model`` or ``openai+https://host/model``; options after a question mark: ``endpoint``
            (chat or completions), ``prompt_tokens`` (128) or ``prompts`` (a file, a prompt a line), ``max_tokens``
            (64), ``stall`` (seconds without a token before the answer is given up, 10), ``ignore_eos=true`` (always
            ``max_tokens``, where the server knows that field), ``concurrency``.
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
        self._chat = address.choice("endpoint", tuple(_PATHS)) == "chat"
        self._stall_s = address.seconds("stall", 10.0)
        self._prompts = self._asked()
        self._fields = self._common_fields(address)
        self._by_usage = True
        self._answers = self._lumped = 0
        self._listed: list[str] = []
        self._open([])
        with self._opening(asking=True):
            self._wait_for(self._in_time(self._try()))

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should read beside the figures: whose joules they are not, what is counted, who answers."""
        found, where = list(super().notes), self._address.where
        if not self._by_usage:
            found.append(f"{where} does not say how many tokens it made: pieces of the stream are counted")
        if self._listed:
            model, others = self._address.model, ", ".join(self._listed[:3])
            found.append(f"{where} answers as {model} but does not list it (it lists {others}): see which it serves")
        if self._lumped > _FEW * self._answers:
            some = f"{self._lumped:,} of {self._answers:,} answers of {where} came with all tokens in one piece"
            found.append(f"{some}: time per token (tpot) is unknown")
        return tuple(found)

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

    def _line(self) -> "Web":
        try:
            from polythrottle.workloads.web import Web
        except ImportError as err:
            raise DeviceError(f"{self.uri} needs {err.name}; pip install 'polythrottle[vllm]'") from err
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        scheme = "https" if self._address.scheme == "openai+https" else "http"
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
        self._listed = known if self._address.model not in known else []

    async def _explain(self, answer: "Answer") -> NoReturn:
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
        return said(body.replace(self._key.encode(), "…".encode()) if self._key else body)

    async def _ask(self, line: "Web") -> Query:
        stream = await self._streamed(line, self._body(next(self._prompts)))
        with self._unkeyed():
            query = stream.query(self._by_usage, self._fields["max_tokens"])
        self._answers += 1
        self._lumped += query.lumped and (query.tokens or 0) > 1
        return query

    async def _streamed(self, line: "Web", body: bytes) -> TokenStream:
        """Ask, and return the whole answer."""
        stream = TokenStream(self._address.model, time.perf_counter())
        async with line.asked("POST", self._path, body) as answer:
            if answer.status != _OK:
                await self._explain(await line.whole(answer))
            kind = answer.headers.get("Content-Type", "").partition(";")[0]
            if kind.strip().lower() != "text/event-stream":
                said_so = kind[:50] or "something of no type"
                raise TrialError(f"{self._address.where} answers with {said_so} instead of a stream of tokens")
            with self._unkeyed():
                await self._read(answer.content, stream)
        return stream

    @contextmanager
    def _unkeyed(self) -> Iterator[None]:
        """Leave the key out of what is wrong with an answer, should the server repeat it there."""
        try:
            yield
        except TrialError as err:
            raise TrialError(self._said(str(err).encode())) from None

    async def _read(self, content: Any, stream: TokenStream) -> None:
        """Read a stream to its end; once it has begun, it may not stall."""
        events, loop, before = Events(stream.who), asyncio.get_running_loop(), None
        try:
            async with timeout(None) as patience:
                async for chunk in content.iter_any():
                    now_s = time.perf_counter()
                    for data in events.take(chunk):
                        stream.take(data, now_s)
                        if before != (before := (stream.chunks, stream.over, stream.counted)):
                            patience.update(loop.time() + self._stall_s)
        except asyncio.TimeoutError:
            # The limit on the whole answer cancels; only this one ends here.
            where = "after its end" if stream.over else f"after {stream.chunks} pieces"
            raise TrialError(f"{stream.who} stalled: nothing for {self._stall_s:g} s {where}") from None
