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
"""

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, urlsplit

from polythrottle.daemon.observation import Traffic
from polythrottle.domain.errors import InvalidInput, UnknownName
from polythrottle.domain.units import parse_quantity

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
    if Path(path).is_dir():
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
    from polythrottle.daemon.traffic.triton_batcher import TritonBatcher

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
