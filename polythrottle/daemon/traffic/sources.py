"""Where requests are seen: the serving program itself, its metrics, its log, its process, or a simulation.

==========================================  ===================================================================
``report``                                  the program that serves reports through the daemon's API
``proxy:http://host:port``                  `polythrottle proxy` tells of requests, and of each prompt as it waits
``metrics:http://host:port/metrics``        Prometheus metrics of Triton, vLLM, SGLang, TensorRT-LLM, llama.cpp or
                                            the proxy; of others with ``?histogram=NAME``
``log:FILE``                                one line per request is added to it: ``time_s latency_s [ok]``
``process:NAME``                            whether a program runs, by its name or its pid file (a path)
``sim:poisson:30/s``                        made up, on a simulated board; any arrivals but ``closed``
==========================================  ===================================================================

Options follow a question mark: ``report?quiet=5s``, ``log:FILE?quiet=10min`` (after how long without a word the
workload is taken to be down), ``metrics:…?histogram=NAME&waiting=NAME&model=NAME&serve=kserve://host:port/model``, and
``request_tokens=700`` where so many tokens, in and out, are to count as one request of the profile: a long prompt is
more load than a short one, and llama.cpp counts no requests at all.

With ``serve`` Triton is told how to batch: its dynamic batcher's preferred size and longest delay, by loading the model
anew. Source: Triton's model repository extension, load with the parameter ``config``,
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_model_repository.md, and model
configuration, ``dynamic_batching``. Other servers take no such word.
"""

from __future__ import annotations

import http.client
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, quote, urlsplit

from polythrottle.daemon.control.events import Target
from polythrottle.daemon.observation import RequestStats, Traffic
from polythrottle.daemon.traffic import answered
from polythrottle.domain.errors import InvalidInput, UnknownName
from polythrottle.domain.space import BATCH_SIZE
from polythrottle.domain.units import parse_quantity
from polythrottle.storage.json_channel import decode, encode

_TIMEOUT_S = 60.0
_EVERY_S = 60.0
"""Loading a model takes seconds and twice its memory, so that it is not done more often."""
_ALIKE = 0.2
"""Delays that differ by less than this share are as good as equal."""
_MICRO = 1_000_000
_OK = 200
_MOST_BYTES = 1 << 20
_DEEPEST = 16
"""A dimension in the graph_spec of Triton's ModelOptimizationPolicy (model_config.proto) lies nine deep."""


class TritonBatcher:
    """Requests as another source sees them, and Triton's dynamic batcher set to what is to hold.

    Calls to the server run in a thread of their own. What it refuses is noted and not tried again; the configuration
    that was found is loaded again when nothing is set any more, and at the end.

    Args:
        seen: Where requests are seen.
        host: Of the server; ``port`` of its HTTP service.
        model: Its name there.
        every_s: How long a configuration is kept at least.
    """

    def __init__(self, seen: Traffic, host: str, port: int, model: str, every_s: float = _EVERY_S) -> None:
        self._seen = seen
        self._host = host
        self._port = port
        self._model = model
        self._every_s = every_s
        self._found: Mapping[str, Any] | None = None
        self._held: tuple[int, float] | None = None
        self._wanted: tuple[int, float] | None = None
        self._refusal = ""
        self._changed_s: float | None = None
        self._work: threading.Thread | None = None

    @property
    def uri(self) -> str:
        """The text that opens it again."""
        return self._seen.uri

    @property
    def note(self) -> str:
        """What a user should know of how requests are seen or batched; empty if nothing."""
        return self._refusal or str(getattr(self._seen, "note", ""))

    def look(self, now_s: float) -> RequestStats | None:
        """Return what the other source has seen, and begin a change that is due."""
        busy = self._work is not None and self._work.is_alive()
        due = self._changed_s is None or now_s - self._changed_s >= self._every_s
        if due and not busy and not self._refusal and not _alike(self._wanted, self._held):
            self._changed_s = now_s
            self._work = threading.Thread(target=self._set, args=(self._wanted,), name="batching", daemon=True)
            self._work.start()
        return self._seen.look(now_s)

    def serve(self, target: Target) -> None:
        """Have a point's batch and time to gather set soon; a point without a batch means as found."""
        batch = target.point.get(BATCH_SIZE)
        if batch is None:
            self._wanted = None
        else:
            self._wanted = (int(batch), target.gather_s)

    def close(self) -> None:
        """Load the configuration that was found, if another was, and release the other source."""
        if self._work is not None:
            self._work.join(_TIMEOUT_S)
        if self._held is not None:
            self._set(None)
        self._seen.close()

    def _set(self, wanted: tuple[int, float] | None) -> None:
        try:
            if self._found is None:
                self._found = self._asked("GET", f"/v2/models/{quote(self._model, safe='')}/config")
            if wanted is None:
                config = self._found
            else:
                config = _batched(self._found, *wanted)
            body = {"parameters": {"config": encode(config).decode()}}
            self._asked("POST", f"/v2/repository/models/{quote(self._model, safe='')}/load", body)
            self._held = wanted
        except (OSError, http.client.HTTPException, ValueError, InvalidInput, AttributeError, TypeError) as error:
            self._refusal = f"{self._host}:{self._port} cannot be told how to batch: {str(error)[:120]}"

    def _asked(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        line = http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)
        text = None if body is None else encode(body)
        with answered(line, method, path, {"Content-Type": "application/json"}, text) as answer:
            data = answer.read(_MOST_BYTES)
        if answer.status != _OK:
            raise ValueError(f"it answers {answer.status} to {path}")
        return decode(data or b"{}", deepest=_DEEPEST)


def _alike(wanted: tuple[int, float] | None, held: tuple[int, float] | None) -> bool:
    """Return whether going from one to the other is not worth loading a model."""
    if wanted is None or held is None:
        return wanted == held
    return wanted[0] == held[0] and abs(wanted[1] - held[1]) <= _ALIKE * max(wanted[1], held[1])


def _batched(found: Mapping[str, Any], batch: int, gather_s: float) -> Mapping[str, Any]:
    """Return a configuration with a batch and a time to gather it.

    Raises:
        ValueError: If the model takes no batches of that size.
    """
    most = int(found.get("max_batch_size", 0))
    if batch > max(1, most):
        raise ValueError(f"the model takes batches of at most {most}, not {batch}")
    # By 0 Triton says that the model takes no batches, so that there is none to prefer.
    if not most:
        return found
    own = {"preferred_batch_size": [batch], "max_queue_delay_microseconds": round(gather_s * _MICRO)}
    return {**found, "dynamic_batching": {**found.get("dynamic_batching", {}), **own}}


FORMS = "report, proxy:http://host:port, metrics:http://host:port/metrics, log:FILE, process:NAME, sim:poisson:30/s"
_KINDS = ("report", "proxy", "metrics", "log", "process", "sim")


def open_traffic(text: str) -> Traffic:
    """Return the source of requests a text means; a simulated one has a board and is opened as a site, with it.

    Args:
        text: As in the table of `polythrottle.daemon.traffic.sources`.

    Raises:
        InvalidInput: If the text is malformed.
        UnknownName: If there is no such source or option.
    """
    kind, colon, rest = text.strip().partition(":")
    name, _, query = kind.partition("?")
    if name == "report" and not (colon and not query):
        return _reported(text.strip())
    openers = {"proxy": _proxied, "metrics": _scraped, "log": _logged, "process": _running}
    if kind == "sim":
        raise InvalidInput(f"{text} makes up requests for a simulated board; give --device sim:<board>")
    if kind not in openers:
        raise UnknownName("traffic", kind[:40], _KINDS, hint=f"(it is one of {FORMS})")
    if not rest:
        raise InvalidInput(f"{text!r} lacks what follows {kind}:; write one of {FORMS}")
    return openers[kind](rest)


def _reported(text: str) -> Traffic:
    from polythrottle.daemon.traffic.local_sources import REPORT_QUIET_S, ReportedTraffic

    _, _, query = text.partition("?")
    return ReportedTraffic(_quiet_s(_options(query, "quiet"), REPORT_QUIET_S), text)


def _logged(rest: str) -> Traffic:
    from polythrottle.daemon.traffic.local_sources import LOG_QUIET_S, LoggedTraffic

    path, _, query = rest.partition("?")
    if not path:
        raise InvalidInput("log: needs the path of a file")
    if os.path.isdir(path):
        raise InvalidInput(f"{path} is a folder; log: needs the path of a file")
    return LoggedTraffic(Path(path).absolute(), _quiet_s(_options(query, "quiet"), LOG_QUIET_S), f"log:{rest}")


def _running(rest: str) -> Traffic:
    from polythrottle.daemon.traffic.local_sources import ProcessTraffic

    return ProcessTraffic(rest)


def _scraped(rest: str) -> Traffic:
    from polythrottle.daemon.traffic.engines import KNOWN, named
    from polythrottle.daemon.traffic.server_metrics import Fetcher, ScrapedTraffic

    address = _address(rest, "http", "https")
    given = _options(address.query, "histogram", "waiting", "model", "serve", "request_tokens")
    if "waiting" in given and "histogram" not in given:
        raise InvalidInput("waiting=NAME goes with histogram=NAME; known engines' metrics need neither")
    if "histogram" in given:
        names = [named(given["histogram"], given.get("waiting", ""))]
    else:
        names = list(KNOWN)
    server = None
    if "serve" in given:
        server = _address(given["serve"], "kserve", "kserve+http")
    if server is not None and not server.path.strip("/"):
        raise InvalidInput(f"{given['serve']!r} names no model; write kserve://host:8000/model")
    tokens = _tokens(given.get("request_tokens"))
    traffic = ScrapedTraffic(Fetcher(address), tuple(names), given.get("model", ""), f"metrics:{rest}", tokens)
    if server is None:
        return traffic
    return TritonBatcher(traffic, str(server.hostname), server.port or 8000, server.path.strip("/"))


def _proxied(rest: str) -> Traffic:
    from polythrottle.daemon.traffic.engines import PROXY
    from polythrottle.daemon.traffic.proxy_prompts import (
        METRICS_PATH,
        InFlightBound,
        PromptStream,
        ProxiedTraffic,
    )
    from polythrottle.daemon.traffic.server_metrics import Fetcher, ScrapedTraffic

    address = _address(rest, "http", "https")
    given = _options(address.query, "request_tokens")
    if address.path.strip("/"):
        raise InvalidInput(f"{rest[:60]!r} has a path; write proxy:http://host:port, where polythrottle proxy listens")
    page = Fetcher(address._replace(path=METRICS_PATH))
    uri = f"proxy:{rest}"
    scraped = ScrapedTraffic(page, (PROXY,), "", uri, _tokens(given.get("request_tokens")))
    return ProxiedTraffic(scraped, PromptStream(address), uri, InFlightBound(address))


def _tokens(text: str | None) -> float | None:
    if text is None:
        return None
    if not (text.isdecimal() and len(text) < 10 and int(text)):
        raise InvalidInput(f"request_tokens={text[:20]} is no whole number above zero; write for example 700")
    return float(text)


def _address(text: str, *schemes: str) -> SplitResult:
    try:
        address = urlsplit(text)
        known = address.scheme in schemes and bool(address.hostname) and (address.port is None or address.port > 0)
    except ValueError:
        known = False
    # The text is shown as it is, in the status and on the page: a password in it would be too.
    if not known or address.username is not None or not text.isascii() or not text.isprintable() or " " in text:
        raise InvalidInput(f"{text[:60]!r} is no address; write {schemes[0]}://host:port/…, without a password")
    return address


def _options(query: str, *known: str) -> Mapping[str, str]:
    pairs = parse_qsl(query, keep_blank_values=True)
    for name, value in pairs:
        if name not in known:
            raise UnknownName("option of traffic", name[:40], known)
        if not value:
            raise InvalidInput(f"{name}= is empty")
    if len(dict(pairs)) != len(pairs) or (query and not pairs):
        raise InvalidInput(f"the options {query[:60]!r} cannot be read; write for example ?quiet=5s, each once")
    return dict(pairs)


def _quiet_s(options: Mapping[str, str], default_s: float) -> float:
    text = options.get("quiet")
    if text is None:
        return default_s
    if text.isdecimal():
        quiet_s = float(text)
    else:
        quiet_s = parse_quantity(text, "s")
    if not quiet_s > 0:
        raise InvalidInput(f"quiet={text} must be above zero")
    return quiet_s


__all__ = ["FORMS", "open_traffic"]
