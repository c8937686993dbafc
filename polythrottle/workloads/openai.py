"""A language model behind an OpenAI-compatible server (vLLM, SGLang, transformers serve, …) as a workload."""

import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
_OK, _REFUSED, _MISSING, _SERVER_FAULT = 200, (401, 403), (404, 405), 500


class OpenaiWorkload(Service["Web"]):
    """One streamed answer per query; an item is an answer, and its tokens are counted.

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
        DeviceError: If it cannot be reached, or does not stream answers.
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
        self._open([])
        with self._opening():
            self._wait_for(self._in_time(self._try()))

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should read beside the figures: whose joules they are not, and how tokens were counted."""
        if self._by_usage:
            return super().notes
        where = self._address.where
        return (*super().notes, f"{where} does not say how many tokens it made: pieces of the stream are counted")

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
            "stream_options": {"include_usage": True},
        }
        if address.options.get("ignore_eos") is not None and address.choice("ignore_eos", ("true", "false")) == "true":
            fields["ignore_eos"] = True
        return fields

    def _line(self) -> "Web":
        try:
            from polythrottle.workloads.web import Web
        except ImportError as err:
            raise DeviceError(f"{self.uri} needs {err.name}; pip install 'polythrottle[serving]'") from err
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
        answer = await self._lent().fetch("POST", self._path, self._body("Hello", max_tokens=1))
        if 400 <= answer.status < _SERVER_FAULT and "stream_options" in self._said(answer.body):
            del self._fields["stream_options"]
            answer = await self._lent().fetch("POST", self._path, self._body("Hello", max_tokens=1))
        if answer.status != _OK:
            await self._explain(answer)
        self._see_that_it_streams(answer.status, answer.headers, answer.body)
        stream = TokenStream(self._address.model, 0.0)
        for data in Events().take(answer.body + b"\n"):
            stream.take(data, 1.0)
        stream.query()
        self._by_usage = stream.counted is not None

    async def _explain(self, answer: "Answer") -> None:
        """Raise what a refusal means."""
        text = f"{self._address.where} refuses ({answer.status}): {self._said(answer.body)}"
        if answer.status in _REFUSED:
            raise PermissionDenied(f"{text}; put the server's key into ${KEY}")
        if answer.status >= _SERVER_FAULT:
            raise DeviceError(text)
        known = await self._models()
        if known and self._address.model not in known:
            raise UnknownName(f"model at {self._address.where}", self._address.model, known)
        if not known and answer.status in _MISSING:
            raise DeviceError(f"{text}; it has no {self._address.model}, or is no OpenAI-compatible server")
        raise InvalidInput(text)

    async def _models(self) -> list[str]:
        """Return the models the server lists; none if it lists none."""
        try:
            found = (await self._lent().fetch("GET", "/models")).document
            return [str(each["id"]) for each in found["data"]]
        except (TrialError, TypeError, KeyError):
            return []

    @property
    def _path(self) -> str:
        return _PATHS["chat" if self._chat else "completions"]

    def _said(self, body: bytes) -> str:
        """Return what the server says, without the key should it repeat that."""
        text = said(body)
        return text.replace(self._key, "…") if self._key else text

    def _see_that_it_streams(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        if status != _OK:
            raise TrialError(f"{self._address.model} answers with an error ({status}): {self._said(body)}")
        kind = headers.get("Content-Type", "").partition(";")[0]
        if kind != "text/event-stream":
            raise TrialError(f"{self._address.where} answers with {kind or 'nothing'} instead of a stream of tokens")

    async def _ask(self, line: "Web") -> Query:
        body = self._body(next(self._prompts))
        stream = TokenStream(self._address.model, time.perf_counter())
        async with line.asked("POST", self._path, body) as answer:
            whole = b"" if answer.status == _OK else await answer.read()
            self._see_that_it_streams(answer.status, answer.headers, whole)
            await self._read(answer.content, stream)
        return stream.query()

    async def _read(self, content: Any, stream: TokenStream) -> None:
        """Read a stream to its end; once it has begun, it may not stall."""
        events, loop = Events(), asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as patience:
                async for chunk in content.iter_any():
                    now_s = time.perf_counter()
                    for data in events.take(chunk):
                        stream.take(data, now_s)
                        patience.reschedule(loop.time() + self._stall_s)
        except TimeoutError:
            # The limit on the whole answer cancels; only this one ends here.
            raise TrialError(
                f"{stream.who} stalled: nothing for {self._stall_s:g} s after {stream.chunks} pieces"
            ) from None
