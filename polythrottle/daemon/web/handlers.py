"""How each request to the API is answered, and the profiles that can be applied."""

from __future__ import annotations

import asyncio
import functools
import typing
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from polythrottle.catalog.documents import catalogue_dir
from polythrottle.catalog.tuned_profiles import read_profile
from polythrottle.daemon.commands import Answer, ApplyProfile, Command, Report, StopStudy
from polythrottle.daemon.loop.mailbox import Mailbox, Read, names_file, read_named
from polythrottle.daemon.observation import RequestStats
from polythrottle.daemon.status import Status, StudyShown
from polythrottle.daemon.web.access import WebOptions
from polythrottle.daemon.web.event_stream import KIND, AllEvents, EventStream, StatusCache, StudyEvents
from polythrottle.daemon.web.messages import (
    APPLY,
    EVENTS_QUERY,
    HEADERS,
    HISTORY_QUERY,
    REPORT,
    Schema,
    check_report,
    json_reply,
    last_event,
    read_body,
    read_query,
)
from polythrottle.domain.backports import removesuffix
from polythrottle.domain.errors import DeviceError, PolythrottleError, UnknownName
from polythrottle.domain.space import BATCH_SIZE

# The profiles that can be applied: those of the catalogue, the working folder and the daemon's own.

_MOST = 500
_TUNED = "profiles/tuned"

PROFILE: Schema = {
    "type": "object",
    "description": "A tuned profile.",
    "properties": {
        "name": {"type": "string"},
        "path": {"type": "string"},
        "device": {"type": ["string", "null"]},
        "workload": {"type": ["string", "null"]},
        "slo": {"type": "array", "items": {"type": "string"}},
        "saving": {"type": ["number", "null"], "description": "Share of the default's energy; null if unknown."},
        "energy_kind": {"type": ["string", "null"]},
        "fault": {"type": ["string", "null"], "description": "Why it cannot be read; null if it can."},
    },
    "required": ["name", "path", "device", "workload", "slo", "saving", "energy_kind", "fault"],
}


class Listing:
    """Profiles by name; a file is read again only when it has changed.

    Args:
        state: The daemon's own folder; None for none.
    """

    def __init__(self, state: Path | None) -> None:
        self._folders = [folder / _TUNED for folder in (state, Path.cwd()) if folder is not None]
        self._known: dict[Path, tuple[tuple[int, int], dict[str, Any]]] = {}

    def profiles(self) -> list[dict[str, Any]]:
        """Return them by name, the daemon's own before the working folder's before the catalogue's."""
        found: dict[str, dict[str, Any]] = {}
        for folder in (*self._folders, catalogue_dir(_TUNED)):
            for path in _files(folder):
                found.setdefault(str(path.relative_to(folder))[:-5], self._shown(path, folder))
        return [found[name] for name in sorted(found)[:_MOST]]

    def find(self, name: str) -> str:
        """Return the path of a profile that is listed by this name; the name itself if none is.

        Raises:
            UnknownName: If no file can have this name.
        """
        folders = (*self._folders, catalogue_dir(_TUNED))
        tried = (Path(name), *(folder / f"{removesuffix(name, '.toml')}.toml" for folder in folders))
        try:
            return next((str(path.absolute()) for path in tried if path.is_file()), name)
        except OSError:  # it is too long, or a link to itself
            raise UnknownName("profile", name[:60], [each["name"] for each in self.profiles()]) from None

    def _shown(self, path: Path, folder: Path) -> dict[str, Any]:
        try:
            stat = path.stat()
            mark = (stat.st_mtime_ns, stat.st_size)
        except OSError:
            mark = (0, 0)
        if path not in self._known or self._known[path][0] != mark:
            # Files that are gone are never asked for again, and would stay.
            if len(self._known) >= 2 * _MOST:
                self._known.clear()
            self._known[path] = (mark, _document(str(path.relative_to(folder))[:-5], path))
        return self._known[path][1]


def _files(folder: Path) -> Iterator[Path]:
    try:
        yield from sorted(folder.glob("*/*.toml"))[:_MOST]
    except OSError:
        return


def _document(name: str, path: Path) -> dict[str, Any]:
    found = {"name": name, "path": str(path.absolute())}
    unknown = {"device": None, "workload": None, "slo": (), "saving": None, "energy_kind": None}
    try:
        profile = read_profile(path)
    except PolythrottleError as error:
        return {**found, **unknown, "fault": str(error)}
    return {
        **found,
        "device": profile.device,
        "workload": profile.workload,
        "slo": profile.slo,
        "saving": profile.saving_fraction,
        "energy_kind": profile.measurement.energy_kind,
        "fault": None,
    }


# How each thing that can be asked over HTTP is answered.

_PATIENCE_S = 10.0
_SLOW_FILES = "the daemon could not read its files in time; ask again"


@dataclass
class Api:
    """What answers are made of.

    Args:
        desk: Where the control loop is asked.
        shelf: What it showed.
        options: Whence history and profiles come.
        aside: For what may wait for a disk.
    """

    desk: Mailbox
    shelf: StatusCache
    options: WebOptions
    aside: Executor
    listing: Listing = field(init=False)

    def __post_init__(self) -> None:
        self.listing = Listing(self.options.state)

    async def ask(self, wish: Command) -> Answer:
        """Have the control loop do something.

        Raises:
            PolythrottleError: What it says no with; `DeviceError` if it does not answer in time.
        """
        answer = asyncio.wrap_future(self.desk.hand_in(wish, await self._read(wish)))
        try:
            # Cancels what is late, so that the loop leaves it out: nobody is there to see it done.
            return await asyncio.wait_for(answer, _PATIENCE_S)
        except asyncio.TimeoutError:  # before Python 3.11 another class than the builtin one
            raise DeviceError("the daemon is busy with the device and did not answer in time; ask again") from None

    async def _read(self, wish: Command) -> Read | None:
        """Have the file that a wish names read beside the control loop, and return what gives it what was read."""
        if not names_file(wish):
            return None
        reading = self.aside.submit(read_named, wish)
        ended = asyncio.wrap_future(reading)
        await asyncio.wait((ended,), timeout=_PATIENCE_S)
        if not ended.done():
            raise DeviceError(_SLOW_FILES)
        error = ended.exception()
        # A fault that nobody foresaw is the API's to answer; in the control loop it would lead to the safe point.
        if error is not None and not isinstance(error, PolythrottleError):
            raise error
        return reading.result

    async def beside(self, work: Callable[[], Any]) -> Any:
        """Return what a call returns that may take a while, without holding up other answers.

        Raises:
            DeviceError: If it takes too long.
        """
        found = asyncio.get_running_loop().run_in_executor(self.aside, work)
        try:
            return await asyncio.wait_for(found, _PATIENCE_S)
        except asyncio.TimeoutError:  # before Python 3.11 another class than the builtin one
            raise DeviceError(_SLOW_FILES) from None

    def known(self, id: str) -> StudyShown:
        """Return a study.

        Raises:
            UnknownName: If none of that name was seen since the daemon began.
        """
        found = self.shelf.study(id)
        if found is None:
            raise UnknownName("study", id[:60], [each.id for each in self.shelf.studies])
        return found


Does = typing.Callable[[Api, Request], typing.Awaitable[Response]]


def shown(what: Callable[[Api], Any]) -> Does:
    """Return what answers with something the daemon shows.

    Args:
        what: Takes it from the API.
    """

    async def does(api: Api, request: Request) -> Response:
        read_query(request, {})
        return json_reply(what(api))

    return does


def wished(body: Schema, make: Callable[[dict[str, Any]], Command]) -> Does:
    """Return what hands a wish in and answers with what the control loop says.

    Args:
        body: Schema of what is sent.
        make: From what was sent to the wish.
    """

    async def does(api: Api, request: Request) -> Response:
        read_query(request, {})
        wish = make(await read_body(request, body))
        return json_reply({"words": "", **await api.ask(wish)})

    return does


async def healthz(api: Api, request: Request) -> Response:
    """Answer whether the control loop turns.

    Raises:
        DeviceError: If it does not.
    """
    read_query(request, {})
    if not api.shelf.fresh:
        raise DeviceError("the control loop has not turned within the last 5 s")
    return json_reply({"words": "the control loop turns", "turn": api.shelf.status.turn})


async def metrics(api: Api, request: Request) -> Response:
    """Answer with figures for Prometheus."""
    from polythrottle.daemon.web.prometheus import render

    read_query(request, {})
    body, kind = render(api.shelf.shown, request.headers.get("accept", ""))
    return Response(body, headers={**HEADERS, "content-type": kind})


async def node_shown(api: Api, request: Request) -> Response:
    """Answer with all services and the watts they share."""
    read_query(request, {})
    assert api.options.node is not None
    return json_reply(api.shelf.shown_node(api.options.node()))


async def node_metrics(api: Api, request: Request) -> Response:
    """Answer with the figures of all services for Prometheus."""
    from polythrottle.daemon.web.prometheus import render_node

    read_query(request, {})
    assert api.options.node is not None
    doors = {name: api.options.services.get(name) for name in api.options.services}
    # A pod may have gone between both looks.
    statuses = {name: door.desk.status for name, door in doors.items() if door is not None}
    node = api.shelf.shown_node(api.options.node())
    body, kind = render_node(api.shelf.shown, node, statuses, request.headers.get("accept", ""))
    return Response(body, headers={**HEADERS, "content-type": kind})


async def node_page(api: Api, request: Request) -> Response:
    """Answer with the page of all services."""
    from polythrottle.daemon.web.page import load_node

    read_query(request, {})
    page = load_node()
    return Response(page.body, headers={**HEADERS, **{name.lower(): text for name, text in page.headers.items()}})


async def page(api: Api, request: Request) -> Response:
    """Answer with the page."""
    from polythrottle.daemon.web.page import load

    read_query(request, {})
    page = load()
    return Response(page.body, headers={**HEADERS, **{name.lower(): text for name, text in page.headers.items()}})


async def profiles(api: Api, request: Request) -> Response:
    """Answer with the profiles that can be applied."""
    read_query(request, {})
    return json_reply({"profiles": await api.beside(api.listing.profiles)})


async def apply(api: Api, request: Request) -> Response:
    """Have another profile followed."""
    read_query(request, {})
    sent = await read_body(request, APPLY)
    found = await api.beside(functools.partial(api.listing.find, sent["profile"]))
    return json_reply({"words": "", **await api.ask(ApplyProfile(**{**sent, "profile": found}))})


async def history(api: Api, request: Request) -> Response:
    """Answer with what is kept of the last minutes."""
    minutes = read_query(request, HISTORY_QUERY)["minutes"]
    return json_reply({"minutes": await api.beside(functools.partial(api.options.history, minutes))})


async def events(api: Api, request: Request) -> Response:
    """Answer with events, or follow them."""
    asked = read_query(request, EVENTS_QUERY)
    after = asked["after"]
    limit = asked["limit"]
    last = last_event(request)
    found = api.desk.events(after or 0)
    if KIND in request.headers.get("accept", ""):
        return EventStream(api.shelf, AllEvents(api.shelf, after or 0 if last is None else last))
    return json_reply({"events": found[-limit:] if after is None else found[:limit]})


async def study(api: Api, request: Request) -> Response:
    """Answer with one study."""
    read_query(request, {})
    return json_reply(api.known(request.path_params["id"]))


async def study_events(api: Api, request: Request) -> Response:
    """Follow one study."""
    read_query(request, {})
    # A study's events have no numbers; what the API's document forbids is refused all the same.
    last_event(request)
    return EventStream(api.shelf, StudyEvents(api.shelf, api.known(request.path_params["id"]).id))


async def stop_study(api: Api, request: Request) -> Response:
    """End one study."""
    read_query(request, {})
    found = api.known(request.path_params["id"])
    return json_reply({"words": "", **await api.ask(StopStudy(found.id))})


async def report(api: Api, request: Request) -> Response:
    """Take in what a serving program saw, and answer how to batch."""
    read_query(request, {})
    sent = await read_body(request, REPORT)
    check_report(sent)
    answer = await api.ask(Report(RequestStats(**sent)))
    status = api.shelf.status
    target = {"batch": status.point.get(BATCH_SIZE), "gather_s": status.gather_s}
    return json_reply({"words": "", **target, **answer})


def device(status: Status) -> list[dict[str, Any]]:
    """Return the device that is steered, if it is known."""
    names = ("device", "title", "energy_kind", "boundary", "leased", "reachable", "point", "clocks_hz")
    shown = {("uri" if name == "device" else name): getattr(status, name) for name in names}
    if status.device:
        return [shown]
    return []
