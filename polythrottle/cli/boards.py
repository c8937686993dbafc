"""`polythrottle boards`, and `apply`, `apply --confirm` and `restore` of several boards: each one line, or why not."""

import contextlib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from polythrottle.cli.options import JsonOption
from polythrottle.cli.output import answer, complain, grid, optional, several, suffix
from polythrottle.domain.clock import SystemClock
from polythrottle.domain.errors import ClaimFailed, DeviceError, InvalidInput
from polythrottle.storage.json_channel import finite

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from polythrottle.actuation.restore import Standing
    from polythrottle.api.deployment import Restored
    from polythrottle.api.many_boards import BoardOutcome, Rollout
    from polythrottle.backends.device_uri import Answer
    from polythrottle.daemon.web import Tcp
    from polythrottle.inspect.examination import BoardState, BoardWatch, Kind
    from polythrottle.tuning.profile_comparison import CanaryTest

# `polythrottle boards`: lists, groups and watches.

_LEAST_S = 1.0
_LONGEST_S = 86_400.0


def boards(
    uris: Annotated[
        list[str], typer.Argument(metavar="URI", help="The boards, such as ssh://nano1,ssh://nano2, or @FILE.")
    ],
    watch: Annotated[
        float | None, typer.Option("--watch", metavar="S", help="Look again every S seconds, until Ctrl-C.")
    ] = None,
    within: Annotated[
        float, typer.Option("--within", metavar="S", help="Give a board up that has not answered after S seconds.")
    ] = 30.0,
    serve: Annotated[
        str | None,
        typer.Option(
            "--serve", metavar="HOST:PORT", help="Serve a page and figures there, such as 127.0.0.1:8090, until Ctrl-C."
        ),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", metavar="FILE", help="File with the token that readers must show.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", metavar="FILE", help="Certificate, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="Its key, PEM.")] = None,
    prometheus: Annotated[
        bool, typer.Option("--prometheus", help="Print figures in Prometheus's text format.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List boards by kind, with what each draws and what stands applied; all are asked at once, nothing is written.

    Boards of one kind have the same hardware, firmware and knobs: a profile of one is for all of them. Exit code 6 if
    one cannot be reached. --serve answers with a page, /boards.json and /metrics, to other machines only with TLS and a
    token.
    """
    from polythrottle.backends.device_uri import boards_named
    from polythrottle.inspect.examination import BoardWatch

    if as_json + prometheus + (serve is not None) > 1:
        raise InvalidInput("--json, --prometheus and --serve exclude each other; keep one")
    if serve is None and (token_file or tls_cert or tls_key):
        raise InvalidInput("--token-file, --tls-cert and --tls-key go with --serve")
    if watch is not None and not _LEAST_S <= watch <= _LONGEST_S:
        raise InvalidInput(f"--watch {watch:g} is no number of seconds from 1 to {_LONGEST_S:,.0f}")
    named = [board for text in uris for board in boards_named(text)]
    groups = {board.uri: board.group for board in named}
    looks = BoardWatch([board.uri for board in named], within)
    with contextlib.closing(looks):
        if serve is not None:
            _serve(looks, groups, _door(serve, tls_cert, tls_key, token_file), watch or _SERVED_EVERY_S)
        states = _watched(looks, groups, watch, as_json, prometheus)
    # By the last look: while one watches, a board may go and come back.
    if any(state.failure for state in states):
        raise typer.Exit(DeviceError.exit_code)


def _watched(
    looks: "BoardWatch", groups: Mapping[str, str], watch: float | None, as_json: bool, prometheus: bool
) -> "Sequence[BoardState]":
    """Print one look, or looks until nobody reads them; return the last."""
    states = looks.look()
    heard = _print_states((states, groups), as_json, prometheus, again=False)
    clock = SystemClock()
    while watch is not None and heard:
        clock.sleep(watch)
        states = looks.look()
        heard = _print_states((states, groups), as_json, prometheus, again=True)
    return states


_Shown = tuple["Sequence[BoardState]", Mapping[str, str]]
"""What the boards show, and the group of each by its URI."""


def _print_states(shown: _Shown, as_json: bool, prometheus: bool, *, again: bool) -> bool:
    """Print a look, over the one before where a terminal shows it; return whether somebody reads it."""
    from polythrottle.cli.render.console import narrow_console

    if again and not as_json and not prometheus and sys.stdout.isatty():
        narrow_console().clear()
    heard = answer(shown, as_json, _print_figures if prometheus else _print_table, _document)
    # Whoever reads through a pipe waits for this look, and not until a buffer is full.
    sys.stdout.flush()
    return heard


def _document(shown: _Shown) -> dict[str, Any]:
    from polythrottle.inspect.examination import by_kind

    states, groups = shown
    kinds = by_kind(states)
    profiles = {kind: _newest(kind) for kind in kinds}
    workloads = {uri: profiles[kind]["workload"] for kind in kinds if profiles[kind] for uri in _uris(kinds[kind])}
    return {
        "kinds": [
            {
                "title": kind.title,
                "identity": dict(kind.identity),
                "releases": list(_releases(kind)),
                "knobs": list(kind.knobs),
                "space": kind.space,
                "profile": profiles[kind] or None,
                "boards": _uris(members),
            }
            for kind, members in kinds.items()
        ],
        "boards": [
            {
                "uri": state.uri,
                "group": groups[state.uri] or None,
                "power_w": state.power_w,
                "energy_kind": optional(str, state.energy_kind),
                "temperature_c": state.temperature_c,
                "throttled": state.throttled,
                "stands": list(state.stands),
                "profile_stands": optional(state.holds, workloads.get(state.uri)),
                "failure": state.failure or None,
            }
            for state in states
        ],
    }


def _uris(members: "Sequence[BoardState]") -> list[str]:
    return [state.uri for state in members]


def _newest(kind: "Kind") -> dict[str, Any]:
    """Return what is to be said of the newest tuned profile for a kind; empty if there is none."""
    from polythrottle.catalog.tuned_profiles import newest_for

    pair = newest_for(dict(kind.identity))
    if pair is None:
        return {}
    name, profile = pair
    return {
        "name": name,
        "device": profile.device,
        "workload": profile.workload,
        "slo": list(profile.slo),
        "saving": profile.saving_fraction,
        "energy_kind": str(profile.measurement.energy_kind),
    }


def _print_table(shown: _Shown) -> None:
    from rich.text import Text

    from polythrottle.cli.render.console import Unpadded, narrow_console
    from polythrottle.inspect.examination import by_kind

    states, groups = shown
    console = narrow_console()
    kinds = by_kind(states)
    for kind, members in kinds.items():
        console.print(Unpadded(Text.assemble((kind.title, "bold"), "  ", _told(kind, len(members)))))
        console.print(Unpadded(_table(members, groups)))
        if profile := _newest(kind):
            count = sum(state.holds(profile["workload"]) for state in members)
            line = f"{profile['name']}; one for its workload stands on {count} of {several(len(members), 'board')}"
            console.print(Unpadded(Text.assemble(("newest profile ", "dim"), line)))
        for state in members:
            for line in state.stands:
                console.print(Unpadded(Text(f"  {state.uri}: {line}", "yellow")))
        console.print()
    for state in states:
        if state.failure:
            console.print(Unpadded(_line(state.uri, state.failure)))
    reached = sum(map(len, kinds.values()))
    console.print(f"{reached} of {several(len(states), 'board')}, {several(len(kinds), 'kind')}", style="dim")


def _table(members: "Sequence[BoardState]", groups: Mapping[str, str]) -> "Table":
    """Return the boards of a kind, those of a group together; groups have a column where there are any."""
    from rich.text import Text

    from polythrottle.domain.units import show

    grouped = any(groups[state.uri] for state in members)
    names = ["board", *["group"] * grouped]
    table = grid("", [*names, "power", "temperature", "throttled"], len(names), after=2, folded=range(len(names)))
    order = list(dict.fromkeys(groups[state.uri] for state in members))
    for state in sorted(members, key=lambda each: order.index(groups[each.uri])):
        power = optional(lambda value: show(value, "W"), state.power_w) or "?"
        degrees = optional("{:.1f} °C".format, state.temperature_c) or "?"
        group = [Text(groups[state.uri])] * grouped
        table.add_row(Text(state.uri), *group, power, degrees, "yes" if state.throttled else "no")
    return table


def _line(uri: str, words: str) -> "Text":
    """Return a board's line; it is named once, also where its own words begin with it."""
    from rich.text import Text

    rest = words.removeprefix(uri).removeprefix(":").strip()
    return Text.assemble((uri, "bold"), "  ", rest)


def _told(kind: "Kind", count: int) -> str:
    return ", ".join([*_releases(kind), several(count, "board"), f"{several(len(kind.knobs), 'knob')} ({kind.space})"])


_RELEASES = {"jetpack": "JetPack", "l4t": "L4T", "driver": "driver"}


def _releases(kind: "Kind") -> Iterator[str]:
    known = dict(kind.identity)
    return (f"{name} {known[key]}" for key, name in _RELEASES.items() if key in known)


def _print_figures(shown: _Shown) -> None:
    """Print what Prometheus reads."""
    typer.echo(_figures(shown), nl=False)


def _figures(shown: _Shown) -> str:
    """Return what Prometheus reads (https://prometheus.io/docs/instrumenting/exposition_formats/), all as gauges."""
    states, groups = shown
    reached = [state for state in states if not state.failure and state.kind is not None]
    known = [state for state in states if state.failure or state.kind is not None]

    def labels(state: "BoardState", **others: str) -> str:
        group = groups[state.uri]
        named = {"board": state.uri, **({"group": group} if group else {}), **others}
        return ",".join(f'{name}="{_escaped(text)}"' for name, text in named.items())

    gauges: list[tuple[str, str, list[tuple[str, float | None]]]] = [
        ("up", "Whether the board could be reached.", [(labels(each), not each.failure) for each in known]),
        (
            "power_watts",
            "Mean power since the last look.",
            [(labels(each, energy_kind=str(each.energy_kind)), each.power_w) for each in reached],
        ),
        ("temperature_celsius", "Its hottest sensor.", [(labels(each), each.temperature_c) for each in reached]),
        ("throttled", "Whether heat or current slows it.", [(labels(each), each.throttled) for each in reached]),
        ("changed", "How many devices stand changed on it.", [(labels(each), len(each.stands)) for each in reached]),
    ]
    return "".join(line for gauge in gauges for line in _gauge(*gauge))


def _gauge(name: str, about: str, values: Iterable[tuple[str, float | None]]) -> Iterator[str]:
    yield f"# HELP polythrottle_board_{name} {about}\n"
    yield f"# TYPE polythrottle_board_{name} gauge\n"
    for labels, value in values:
        # What is not known is left out: Prometheus would take a zero for a figure.
        if value is not None and math.isfinite(value):
            yield f"polythrottle_board_{name}{{{labels}}} {float(value):.6g}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


# `polythrottle boards --serve`: one watcher, whose last look everybody reads.

_SERVED_EVERY_S = 5.0
_PUBLISHED_EVERY_S = 1.0
"""So often what has come of a look is published while boards still owe their answers."""


def _door(text: str, certificate: Path | None, key: Path | None, token_file: Path | None) -> "Tcp":
    """Return where the page is served; a port alone is one of this machine."""
    from polythrottle.daemon.web import Tcp

    if text.isascii() and text.isdecimal():
        text = f"127.0.0.1:{text}"
    return Tcp.parse(text, certificate, key, token_file, option="--serve", for_all=True)


def _serve(looks: "BoardWatch", groups: Mapping[str, str], tcp: "Tcp", every_s: float) -> NoReturn:
    """Look again and again until Ctrl-C, and answer with what was seen last."""
    from polythrottle.daemon.web.boards_page import BoardsServer, Look
    from polythrottle.inspect.examination import BoardState

    clock = SystemClock()
    states = {uri: BoardState(uri) for uri in groups}
    published_s = clock.now()

    with BoardsServer(tcp) as server:

        def publish() -> None:
            nonlocal published_s
            published_s = clock.now()
            shown = (tuple(states.values()), groups)
            server.publish(Look(_document(shown), _figures(shown), f"{datetime.now():%H:%M:%S}", every_s))

        def heard(state: BoardState) -> None:
            states[state.uri] = state
            # One board that hangs keeps nobody from what the others show.
            if clock.now() - published_s >= _PUBLISHED_EVERY_S:
                publish()

        publish()
        where = tcp.address(server.port, token=sys.stderr.isatty())
        complain(f"{where} shows {several(len(groups), 'board')}, looked at every {every_s:g} s; Ctrl-C ends it")
        while True:
            began_s = clock.now()
            looks.look(heard)
            publish()
            clock.sleep(max(0.0, every_s - (clock.now() - began_s)))


# `polythrottle study-host`: makes here what is due for the daemons of boards that have no optimiser.


def study_host(
    devices: Annotated[
        list[str] | None,
        typer.Option("--device", "-d", metavar="URI", help="Boards whose daemons are meant: ssh://orin,ssh://nano."),
    ] = None,
    socket: Annotated[
        Path | None, typer.Option("--socket", metavar="PATH", help="Of a daemon of this machine, or there on a board.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="End once each board has had a study.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for all that happens.")] = False,
) -> None:
    """Make the studies of boards' daemons here, over SSH, until Ctrl-C: for boards without an optimiser.

    A daemon there announces a study that is due, lends its board to this host, and compares the profile it is given
    back. Boards of one kind learn from each other's studies. One that is away is waited for; with --once the exit code
    is 6 then, and 7 if a study failed.
    """
    from polythrottle.api.study_host import HostNews, host_studies
    from polythrottle.backends.device_uri import boards_named

    if any(not text.strip() for text in devices or ()):
        raise InvalidInput("--device is empty; it takes boards, such as ssh://orin, or is left out for this machine")
    boards = [board.uri for text in devices or () for board in boards_named(text)]

    def show(news: HostNews) -> None:
        typer.echo(json.dumps(asdict(news)) if as_json else f"{news.board}: {news.words}")
        sys.stdout.flush()

    hosts = host_studies(boards, lambda news: answer(news, False, show), socket=socket, once=once)
    try:
        hosts.wait()
    except KeyboardInterrupt:
        hosts.stop()
        raise
    if hosts.failures:
        for board, error in hosts.failures.items():
            named = str(error)
            if board not in named:
                named = f"{board}: {named}"
            complain(named, error.exit_code)
        raise typer.Exit(max(error.exit_code for error in hosts.failures.values()))


# `polythrottle apply`, `apply --confirm` and `restore` of several boards.


def print_rollout(found: "tuple[Rollout, str]") -> None:
    """Print what applying a profile to many boards came to: what the first have proven, then a line for each board."""
    from rich.text import Text

    from polythrottle.api.tuning_result import show_point
    from polythrottle.cli.render.console import Unpadded, narrow_console
    from polythrottle.cli.render.text import named_lines

    rollout, path = found
    console = narrow_console()
    for test in rollout.tests:
        console.print(Unpadded(Text.assemble(("canary ", "dim"), _line(test.uri, _proven(test)))))
    for each in rollout.outcomes:
        console.print(Unpadded(_line(each.uri, _became(each, rollout))))
    applied = next((each.applied for each in rollout.outcomes if each.applied is not None), None)
    if applied is not None:
        lines = {"set": show_point(applied.point) or "nothing"}
        if applied.served:
            lines["to do"] = f"{show_point(applied.served)}: belongs to the workload, set it where the model is served"
        console.print(Unpadded(named_lines(lines.items())))
    console.print(Text.assemble(("profile ", "dim"), path), soft_wrap=True)


def _proven(test: "CanaryTest") -> str:
    from polythrottle.cli.output import percent

    count = several(len(test.comparison.pairs), "pair")
    if test.worse:
        return f"{count}: {test.why}"
    if test.worse is None:
        return f"{count}: {' and '.join(test.open)} not known"
    limits = "".join(f", {name} holds" for name in test.limits)
    middle = test.comparison.middle()
    return f"{count}: no worse; {percent(None if middle is None else 1 - middle)} less energy per item{limits}"


def _became(outcome: "BoardOutcome", rollout: "Rollout") -> str:
    if outcome.error is not None:
        return " ".join(outcome.words.split())
    applied = outcome.applied
    if applied is None:
        tried = any(test.uri == outcome.uri for test in rollout.tests)
        if tried:
            return "rolled back: as it was found"
        return "left alone"
    if applied.stands_as is None:
        if applied.point:
            return "simulated: nothing was kept"
        return "nothing was changed"
    return f"set{suffix(applied.remark, ', but {}')}"


def rollout_document(found: "tuple[Rollout, str]") -> dict[str, Any]:
    """Return the document of what applying a profile to many boards came to."""
    rollout, path = found
    return {
        "profile": path,
        "refused": rollout.refused or None,
        "canary": [
            {
                "device": test.uri,
                "worse": test.worse,
                "pairs": len(test.comparison.pairs),
                "saving": {"low": finite(test.saving.low), "high": finite(test.saving.high)},
                "broken": list(test.broken),
                "unknown": list(test.open),
            }
            for test in rollout.tests
        ],
        "boards": [
            {
                "device": each.uri,
                "applied": each.applied is not None,
                "point": None if each.applied is None else dict(each.applied.point),
                "simulated": None if each.applied is None else each.applied.simulated,
                "workload_point": None if each.applied is None else dict(each.applied.served),
                "stands_as": None if each.applied is None else each.applied.stands_as,
                "error": optional(str, each.error),
            }
            for each in rollout.outcomes
        ],
    }


def end_rollout(rollout: "Rollout") -> None:
    """End with the exit code of what applying a profile to many boards came to; 0 goes on."""
    if rollout.refused:
        words = (
            f"the profile goes no further than the boards that tried it, and is rolled back there: {rollout.refused}"
        )
        raise typer.Exit(complain(words, ClaimFailed.exit_code))
    if rollout.failed:
        raise typer.Exit(DeviceError.exit_code)


def confirm_several(devices: Sequence[str], as_json: bool) -> None:
    """Let stand what was applied to several boards."""
    from polythrottle.api.many_boards import confirm_all

    found = confirm_all(devices)
    answer(found, as_json, _print_confirmed, _confirmed_document)
    _end(found)


def _print_confirmed(found: "Sequence[Answer[tuple[Standing, ...]]]") -> None:
    for each in found:
        stands = ", ".join(one.device for one in each.found or ())
        typer.echo(f"{each.uri}: {each.words or f'{stands} stands'}")


def _confirmed_document(found: "Sequence[Answer[tuple[Standing, ...]]]") -> list[dict[str, Any]]:
    return [
        {
            "device": each.uri,
            "confirmed": [{"device": one.device, "for_s": one.expires_in_s} for one in each.found or ()],
            "error": optional(str, each.error),
        }
        for each in found
    ]


def restore_several(devices: Sequence[str], force: bool, as_json: bool) -> None:
    """Put several boards back."""
    from polythrottle.api.many_boards import restore_all

    found = restore_all(devices, force=force)
    answer(found, as_json, _print_restored, _restored_document)
    _end(found)
    if any(each.found is not None and not each.found.clean for each in found):
        raise typer.Exit(DeviceError.exit_code)


def _print_restored(found: "Sequence[Answer[Restored]]") -> None:
    for each in found:
        if each.found is None:
            typer.echo(f"{each.uri}: {each.words}")
            continue
        if not each.found.outcomes:
            typer.echo(f"{each.uri}: nothing stands changed")
        for outcome in each.found.outcomes:
            typer.echo(f"{each.uri}: {len(outcome.restored)} put back, {len(outcome.left)} left")
            for line in outcome.left:
                typer.echo(f"  left      {line}")


def _restored_document(found: "Sequence[Answer[Restored]]") -> list[dict[str, Any]]:
    return [
        {
            "device": each.uri,
            "restored": [asdict(one) for one in each.found.outcomes] if each.found else None,
            "clean": each.found.clean if each.found else None,
            "error": optional(str, each.error),
        }
        for each in found
    ]


def _end(found: "Sequence[Answer[Any]]") -> None:
    """End with the code of the one error there is, or with 6 where there are several."""
    codes = {each.error.exit_code for each in found if each.error is not None}
    if codes:
        raise typer.Exit(codes.pop() if len(codes) == 1 else DeviceError.exit_code)
