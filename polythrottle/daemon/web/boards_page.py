"""The page of many boards: what the last look at them saw, as a page, as a document and as figures for Prometheus.

Nobody who reads it has a board looked at: one watcher publishes each look, and all read the last one.
"""

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from polythrottle.daemon.web.access import AccessControl, Gate, Tcp
from polythrottle.daemon.web.messages import HEADERS, refused, to_json
from polythrottle.daemon.web.page import BOARDS_HERE, load_boards
from polythrottle.daemon.web.server import BACKLOG, SHAKE_S, House, LoopServer, tcp_socket
from polythrottle.domain.errors import InvalidInput, UnknownName
from polythrottle.domain.units import show

# What the watcher publishes, and the application that answers with it.

_FIGURES = "text/plain; version=0.0.4; charset=utf-8"
_HTML = "text/html; charset=utf-8"
_ASKS = (
    '<noscript><p class="notice bad">The token is asked for with JavaScript, which is switched off here. '
    "Other programs show it: Authorization: Bearer …</p></noscript>"
)
_PATHS = "/, /boards.html, /boards.json and /metrics"


@dataclass(frozen=True)
class Look:
    """One look at all boards, as it is served.

    Args:
        document: As ``polythrottle boards --json`` prints it.
        figures: As ``--prometheus`` prints them.
        at: When it was, for people.
        every_s: How long after it the next one begins.
    """

    document: Mapping[str, Any] = field(default_factory=lambda: {"kinds": [], "boards": []})
    figures: str = ""
    at: str = ""
    every_s: float = 5.0


class _Shelf:
    """The last look, made ready once for all who read it.

    Args:
        shell: The page around it.
        hides: Whether a token is asked for, so that the page alone tells nothing.
    """

    def __init__(self, shell: bytes, hides: bool) -> None:
        self._shell = shell
        self._hides = hides
        self.show(Look())

    def show(self, look: Look) -> None:
        """Keep a look; one reference is changed for each answer, so that any thread may."""
        content = "".join(_content(look)).encode()
        self.page = self._shell.replace(BOARDS_HERE, content)
        self.open_page = self.page
        if self._hides:
            nothing = "".join(_content(Look(every_s=look.every_s)))
            self.open_page = self._shell.replace(BOARDS_HERE, f"{_ASKS}{nothing}".encode())
        self.document = to_json({"at": look.at or None, "every_s": look.every_s, **look.document})
        self.figures = look.figures.encode()


class BoardsServer(LoopServer):
    """Serves what is published until `close`, from a thread of its own.

    Args:
        tcp: Where, and what a client must know.

    Raises:
        InvalidInput: If it cannot be listened on there.
        BadFile: If certificate, key or token cannot be used.
        PermissionDenied: If others could read the token.
    """

    def __init__(self, tcp: Tcp) -> None:
        page = load_boards()
        headers = {**HEADERS, **{name.lower(): text for name, text in page.headers.items()}}
        self._shelf = _Shelf(page.body, tcp.token_file is not None)
        self._house = House.of(Gate(_app(self._shelf, headers), tcp), AccessControl())
        secured = tcp.secured()
        self._listening = tcp_socket(tcp)
        super().__init__()  # not before: a loop that nobody closes would be left where it cannot listen
        shake_s = None if secured is None else SHAKE_S
        self._server = self._loop.run_until_complete(
            self._loop.create_server(
                self._house.tcp, sock=self._listening, backlog=BACKLOG, ssl=secured, ssl_handshake_timeout=shake_s
            )
        )
        self._begin("polythrottle-boards")

    @property
    def port(self) -> int:
        """The port it listens on."""
        port: int = self._listening.getsockname()[1]
        return port

    def publish(self, look: Look) -> None:
        """Answer with this look from now on."""
        self._shelf.show(look)

    async def _wound_up(self) -> None:
        self._server.close()
        await self._house.emptied()


def _app(shelf: _Shelf, page_headers: Mapping[str, str]) -> Starlette:
    """Return the application: what is read, and nothing that can be changed."""

    def answering(
        body: Callable[[], bytes], kind: str, headers: Mapping[str, str]
    ) -> Callable[..., Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return Response(body(), headers=dict(headers), media_type=kind)

        return answer

    app = Starlette(
        routes=[
            Route("/", answering(lambda: shelf.open_page, _HTML, page_headers)),
            Route("/boards.html", answering(lambda: shelf.page, _HTML, page_headers)),
            Route("/boards.json", answering(lambda: shelf.document, "application/json", HEADERS)),
            Route("/metrics", answering(lambda: shelf.figures, _FIGURES, HEADERS)),
        ],
        exception_handlers={HTTPException: _no_route},
    )
    app.router.redirect_slashes = False
    return app


def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:80]
    if error.status_code == 405:
        words = f"{path} does not take {request.method}: it can only be read"
        return refused(405, InvalidInput.__name__, words, dict(error.headers or {}))
    return refused(error.status_code, UnknownName.__name__, f"there is no {path}; there are {_PATHS}")


# The page's content, from the document: it is whole without a script, which only renews it.


def _content(look: Look) -> Iterator[str]:
    """Yield the part of the page that is renewed."""
    boards = look.document["boards"]
    yield f'<div id="look" data-every="{look.every_s:g}" data-at="{_text(look.at)}">'
    yield from _header(look)
    yield '<main id="main" tabindex="-1">'
    if boards:
        yield from _tiles(boards)
        yield from _failures([board for board in boards if board["failure"]])
        known = {board["uri"]: board for board in boards}
        for number, kind in enumerate(look.document["kinds"]):
            yield from _kind(kind, [known[uri] for uri in kind["boards"]], number)
    yield "</main></div>"


def _header(look: Look) -> Iterator[str]:
    boards = look.document["boards"]
    kinds = look.document["kinds"]
    title = "Boards"
    if boards:
        title = _several(len(boards), "board")
    about = [_several(len(kinds), "kind")] * bool(kinds) + [f"looked at {look.at}"] * bool(look.at)
    yield '<header><div class="who"><p class="over"><svg class="logo" viewBox="0 0 16 16" aria-hidden="true">'
    yield f'<path d="M2 13h3V9h3V6h3V3h3"/></svg>polythrottle</p><h1>{_text(title)}</h1>'
    yield f'<p class="served">{_text(" · ".join(about))}</p></div>'
    if pills := _kinds_of_energy(boards):
        yield f'<p class="pills"><span class="pill kind">{_text(pills)}</span></p>'
    yield "</header>"


def _kinds_of_energy(boards: Sequence[Mapping[str, Any]]) -> str:
    """Return which figures of power are not measured ones; empty where all are."""
    kinds = {board["energy_kind"] for board in boards} - {None, "measured"}
    count = sum(board["energy_kind"] in kinds for board in boards)
    if not kinds:
        return ""
    return f"power of {_several(count, 'board')} {' or '.join(sorted(kinds))}"


def _tiles(boards: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    lost = sum(bool(board["failure"]) for board in boards)
    reached = sum(board["throttled"] is not None for board in boards)
    waiting = len(boards) - lost - reached
    note = ", ".join([f"{lost} not reached"] * bool(lost) + [f"{waiting} not looked at yet"] * bool(waiting))
    watts = [board["power_w"] for board in boards if board["power_w"] is not None]
    degrees = [board["temperature_c"] for board in boards if board["temperature_c"] is not None]
    slow = sum(board["throttled"] is True for board in boards)
    changed = sum(bool(board["stands"]) for board in boards)
    slowed = "slowed by heat or current" if slow else "none is slowed"
    stands = "a profile or a study stands there" if changed else "all are as they were"
    yield '<div class="tiles">'
    yield _tile("Reached", f"{reached} of {len(boards)}", note or "all of them", lost > 0)
    yield _tile("Power together", show(sum(watts), "W") if watts else "–", _mean(watts))
    yield _tile("Warmest", f"{max(degrees):.1f} °C" if degrees else "–", _warmest(boards))
    # Of boards that nobody reaches nothing is known, and not that all is well.
    yield _tile("Throttled", str(slow) if reached else "–", slowed if reached else "", slow > 0)
    yield _tile("Changed", str(changed) if reached else "–", stands if reached else "")
    yield "</div>"


def _tile(title: str, value: str, note: str, bad: bool = False) -> str:
    over = " over-limit" * bad
    return (
        f'<section class="card"><h2>{_text(title)}</h2><p class="value{over}">{_text(value)}</p>'
        f'<p class="note">{_text(note)}</p></section>'
    )


def _mean(watts: Sequence[float]) -> str:
    if not watts:
        return "no power is known"
    return f"{show(sum(watts) / len(watts), 'W')} each on average"


def _warmest(boards: Sequence[Mapping[str, Any]]) -> str:
    known = [board for board in boards if board["temperature_c"] is not None]
    if not known:
        return "no sensor tells"
    return str(max(known, key=lambda board: float(board["temperature_c"]))["uri"])


def _failures(lost: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not lost:
        return
    yield '<section class="card lost" data-key="lost" aria-labelledby="h-lost">'
    yield f'<h2 id="h-lost">Not reached: {len(lost)}</h2><ul>'
    for board in lost:
        words = str(board["failure"]).removeprefix(board["uri"]).removeprefix(":").strip()
        yield f'<li data-key="{_text(board["uri"])}">'
        yield f"<b>{_breakable(_text(board['uri']))}</b>{_group_of(board)} <span>{_text(words)}</span></li>"
    yield "</ul></section>"


def _group_of(board: Mapping[str, Any]) -> str:
    if not board["group"]:
        return ""
    return f' <span class="note">{_text(board["group"])}</span>'


def _kind(kind: Mapping[str, Any], members: Sequence[Mapping[str, Any]], number: int) -> Iterator[str]:
    """Yield a kind's boards, by group; one kind follows the other."""
    about = [*kind["releases"], _several(len(members), "board"), _several(len(kind["knobs"]), "knob")]
    key = f"{kind['title']} {kind['space']}"
    yield f'<section class="card boards" data-key="{_text(key)}" aria-labelledby="h-kind-{number}">'
    yield f'<h2 id="h-kind-{number}">{_text(kind["title"])}</h2><p class="note">{_text(" · ".join(about))}</p>'
    yield f'<p class="note">{_text(_profile(kind["profile"], members))}</p>'
    most_w = max((board["power_w"] or 0.0 for board in members), default=0.0)
    for group in dict.fromkeys(board["group"] for board in members):
        if group:
            yield f"<h3>{_text(group)}</h3>"
        yield f'<ul data-key="of {_text(group or "")}">'
        for board in members:
            if board["group"] == group:
                yield from _board(board, most_w)
        yield "</ul>"
    yield "</section>"


def _profile(profile: Mapping[str, Any] | None, members: Sequence[Mapping[str, Any]]) -> str:
    """Return which tuned profile there is for a kind, and on how many of its boards it stands."""
    if profile is None:
        return "No profile is tuned for this kind."
    stands = sum(bool(board["profile_stands"]) for board in members)
    where = "stands on none of them"
    if stands:
        where = f"stands on {stands} of {len(members)}"
    return f"Newest profile: {profile['name']}, {where}"


def _board(board: Mapping[str, Any], most_w: float) -> Iterator[str]:
    slow = board["throttled"] is True
    uri = _text(board["uri"])
    yield f'<li class="board{" slow" * slow}" data-key="{uri}"><b>{_breakable(uri)}</b><span class="now">'
    yield f"<span>{_text(show(board['power_w'], 'W'))}</span>"
    if board["temperature_c"] is not None:
        yield f"<span>{board['temperature_c']:.1f} °C</span>"
    if slow:
        yield "<strong>throttled</strong>"
    yield "</span>"
    # Beside the highest of its kind, so that one that stands out is met by the eye.
    width = 100.0 * (board["power_w"] or 0.0) / most_w if most_w > 0 else 0.0
    yield '<svg class="bar" viewBox="0 0 100 3" preserveAspectRatio="none" aria-hidden="true">'
    yield f'<rect class="rail" width="100" height="3"/><rect width="{width:.1f}" height="3"/></svg>'
    for line in board["stands"]:
        words = line.removeprefix(f"{board['uri']}: ")
        yield f'<span class="stands">{_text(words)}</span>'
    yield "</li>"


def _several(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"


def _breakable(uri: str) -> str:
    """Return a URI that a narrow column breaks between its parts."""
    return re.sub(r"([/.@?])(?=\w)", r"\1<wbr>", uri)


def _text(words: object) -> str:
    return escape(str(words))
