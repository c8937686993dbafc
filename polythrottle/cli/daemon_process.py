"""The daemon's own process: `python -m polythrottle.cli.daemon_process` with the settings of `polythrottle daemon run`.

It is another program than the command line, into which ``daemon run`` turns itself, so that what parses options does
not stay in memory for as long as the daemon lives.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from polythrottle.actuation.argument_parser import OneLineParser
from polythrottle.actuation.systemd import Supervisor
from polythrottle.daemon.budgets import check_wish
from polythrottle.daemon.commands import SetBudget
from polythrottle.daemon.loop.mailbox import Mailbox
from polythrottle.daemon.loop.node import Node
from polythrottle.daemon.loop.runner import Runner
from polythrottle.daemon.settings import DEFAULT_FILE, NodeSettings, Settings, read_settings, seconds, watt_hours, watts
from polythrottle.daemon.startup import alone, build, build_node, check_words
from polythrottle.daemon.status import Status
from polythrottle.domain.clock import WakingClock
from polythrottle.domain.errors import INTERRUPTED, DeviceError, InvalidInput, PolythrottleError
from polythrottle.domain.problem import Constraint
from polythrottle.domain.units import show
from polythrottle.storage.paths import DAEMON_SOCKET, run_dir, state_dir
from polythrottle.storage.untrusted import printable

if TYPE_CHECKING:
    from polythrottle.daemon.web import Tcp, WebOptions
    from polythrottle.daemon.web.access import ServiceDoor

WIDTH = 79
"""Of a line, for the narrowest of terminals."""
_MODULE = "polythrottle.cli.daemon_process"
_CLEAR = "\r\x1b[K"
"""To the beginning of the line, which is erased (ECMA-48: CR, EL)."""
_PAGE_TOKEN = "page.token"
"""In the state folder, for as long as the daemon lives; it is this user's alone."""


def exec_daemon(words: Mapping[str, Any]) -> None:
    """Turn this process into the daemon; returns only by an error.

    Args:
        words: The options of ``daemon run`` by name, as they were given; those not given may be left out.

    Raises:
        PolythrottleError: If they make no settings.
        DeviceError: If the program cannot be started.
    """
    # Cheap words first: the program takes a second to begin, and another daemon's hold would be all it says.
    _checked(words)
    # exec drops what Python has buffered.
    sys.stdout.flush()
    sys.stderr.flush()
    given = json.dumps({name: value for name, value in words.items() if value})
    # Kept for `main`, for the new program imports for a second before anything could tell of a Ctrl-C in one line.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        # Docstrings take a megabyte and a half of the sixty that both processes may have.
        os.execv(sys.executable, [sys.executable, "-OO", "-m", _MODULE, given])
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        raise DeviceError(f"the daemon cannot be started: {sys.executable}: {error.strerror}") from error


def _checked(words: Mapping[str, Any]) -> Settings:
    """Return the settings that options make, which nothing that words and files tell is against.

    Raises:
        PolythrottleError: If there is; says what.
    """
    settings = settings_of(words)
    check_words(settings)
    tcp = tcp_of(settings)
    if tcp is not None:
        tcp.token()
        tcp.secured()
    return settings


def settings_of(words: Mapping[str, Any]) -> Settings:
    """Return the settings that options make, over those of a file.

    Raises:
        PolythrottleError: If one is not what it should be; says which.
    """
    for name in ("profile", "workload", "device", "traffic", "arrivals", "tcp", "node_meter"):
        # Left out and empty are not the same: an empty variable of a script would have another daemon run.
        if words.get(name) is not None and not words[name].strip():
            raise InvalidInput(f"--{name.replace('_', '-')} is empty; give it a word, or leave it out")
    slo = tuple(words.get("slo") or ())
    filed = _in_file(words)
    if words.get("no_actuator"):
        filed = replace(filed, actuator=None)
    settings = filed.over(
        **{name: words.get(name) for name in ("profile", "workload", "device", "tcp")},
        **{name: Path(words[name]) for name in _PATHS if words.get(name)},
        budget=budget_of(words),
        traffic=_traffic_of(words),
        local=bool(words.get("no_actuator")),
        node=_node_of(words, filed.node),
        finetune=tuple(Path(folder).absolute() for folder in words.get("finetune") or ()),
        slo=slo,
    )
    for text in slo:
        if settings.profile and Constraint.parse(text).relative:
            raise InvalidInput(f"--slo {text}: beside a profile a limit is absolute; write it as p99<=25ms")
    tcp_of(settings)  # a bad address is refused before anything heavy is loaded
    if words.get("page") is None:
        return settings
    return replace(settings, page=words["page"] == "yes")


def _in_file(words: Mapping[str, Any]) -> Settings:
    """Return the settings in the file that is named, or in the usual one unless a profile is; else what is usual."""
    file = words.get("config")
    if not file and not words.get("profile") and DEFAULT_FILE.exists():
        file = DEFAULT_FILE
    if file:
        return read_settings(Path(file))
    return Settings()


def _traffic_of(words: Mapping[str, Any]) -> str | None:
    arrivals = words.get("arrivals")
    traffic: str | None = words.get("traffic")
    if not arrivals:
        return traffic
    if traffic:
        raise InvalidInput("--traffic and --arrivals both say where requests come from; leave one of them out")
    return f"sim:{arrivals}"


def tcp_of(settings: Settings) -> Tcp | None:
    """Return where the API is served over TCP; None if it is not.

    Raises:
        InvalidInput: If it is no address, or too little protects it.
    """
    from polythrottle.daemon.web import Tcp

    if settings.tcp is None:
        return None
    return Tcp.parse(settings.tcp, settings.tls_cert, settings.tls_key, settings.token_file)


_PATHS = ("actuator", "socket", "tls_cert", "tls_key", "token_file")


def budget_of(words: Mapping[str, Any]) -> SetBudget | None:
    """Return the budget that options make; None if none was given.

    Args:
        words: The options by name, as they were given.

    Raises:
        InvalidInput: If one is not what it should be, or some exclude each other.
    """
    read = {
        "power_w": ("power", watts, "10W"),
        "battery_wh": ("battery", watt_hours, "80Wh"),
        "last_s": ("last", seconds, "9h"),
        "wh_per_day": ("wh_per_day", watt_hours, ""),  # its unit is in its name
    }
    for name, _, example in read.values():
        if example and _is_number(words.get(name)):
            raise InvalidInput(f"--{name} {words[name]} has no unit; write for example {example}")
    found = {to: parse(words[name]) for to, (name, parse, _) in read.items() if words.get(name) is not None}
    carbon = words.get("carbon")
    if words.get("no_budget"):
        if found or carbon:
            raise InvalidInput("--no-budget lifts every limit; leave it out, or the limits")
        return SetBudget()
    if not found and not carbon:
        return None
    if carbon:  # the daemon's working folder is not that of whoever names the file
        carbon = str(Path(carbon).absolute())
    wish = SetBudget(**found, carbon=carbon or None)
    check_wish(wish)
    return wish


def _node_of(words: Mapping[str, Any], said: NodeSettings) -> NodeSettings:
    """Return what a server's services share: what options say before what a file does."""
    for name in ("node_power", "rest"):
        if _is_number(words.get(name)):
            raise InvalidInput(f"--{name.replace('_', '-')} {words[name]} has no unit; write for example 400W")
    power = words.get("node_power")
    rest = words.get("rest")
    return NodeSettings(
        power_w=said.power_w if power is None else watts(power),
        rest_w=said.rest_w if rest is None else watts(rest),
        meter=words.get("node_meter") or said.meter,
    )


def node_limit(wish: SetBudget | None, within: str, service: str | None) -> tuple[float, float]:
    """Return the watts and the seconds of a limit on a whole server.

    Args:
        wish: What else was given.
        within: By when it must hold.
        service: Which was named; a limit on the server is of all.

    Raises:
        InvalidInput: If they make none.
    """
    if service is not None:
        raise InvalidInput("--within is of the whole server; leave --service out")
    if wish is None or wish.power_w is None or wish != SetBudget(power_w=wish.power_w):
        raise InvalidInput("--within goes with --power alone: --power 1.6kW --within 5s")
    return wish.power_w, seconds(within)


def _is_number(text: Any) -> bool:
    with suppress(TypeError, ValueError):
        float(text)
        return True
    return False


def main() -> int:
    """Run the daemon with the settings in the first argument until it is ended; returns an exit code."""
    return _run(_given)


def _given() -> Settings:
    """Return the settings in the first argument; a Ctrl-C that came while this process was started counts here."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    return settings_of(json.loads(sys.argv[1]))


def on_board(arguments: Sequence[str] | None = None) -> int:
    """Run ``polythrottle daemon run`` where nothing but daemon and actuator is installed; returns an exit code.

    Args:
        arguments: Of the command line; those of this process by default.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:2] != ["daemon", "run"]:
        asked = printable(" ".join(words))[:WIDTH]
        _say(
            f"polythrottle: this board has 'daemon run' alone, and no {asked or 'other command'}; "
            "from your desk: polythrottle … --device ssh://<this board>"
        )
        return InvalidInput.exit_code
    parser = OneLineParser(prog="polythrottle daemon run", description="Follow the load with a tuned profile.")
    parser.add_argument("--config", metavar="FILE", help=f"settings; {DEFAULT_FILE} by default")
    for name in ("profile", "workload", "device", "traffic", "actuator", "socket"):
        parser.add_argument(f"--{name}", help="in place of what the settings say")
    parser.add_argument("--no-actuator", action="store_true", help="set the board from this process")
    given = vars(parser.parse_args(words[2:]))
    return _run(lambda: _checked(given))


def _run(settings: Callable[[], Settings]) -> int:
    try:
        return _served(settings())
    except PolythrottleError as error:
        _say(f"polythrottle: {' '.join(str(error).split())}")
        return error.exit_code
    except KeyboardInterrupt:  # before the loop began, which has handlers of its own: nothing was set yet
        _say("polythrottle: interrupted")
        return INTERRUPTED


def _served(settings: Settings) -> int:
    from polythrottle.daemon.web import WebOptions, own_page, serve

    tcp = tcp_of(settings)
    socket = settings.socket or run_dir() / DAEMON_SOCKET
    clock = WakingClock()
    desk = Mailbox()
    supervisor = Supervisor()
    terminal = sys.stderr.isatty()
    with ExitStack() as ends:
        # First of all: a second daemon must end before it touches the board of the first.
        ends.enter_context(alone(state_dir()))
        if tcp is None and (terminal if settings.page is None else settings.page):
            token_file = state_dir() / _PAGE_TOKEN
            tcp = own_page(token_file)
            # The token lives as long as the page it opens.
            ends.callback(token_file.unlink, missing_ok=True)
        runner: Runner | Node
        if settings.shared:
            runner, record = build_node(settings, clock, desk, supervisor, _version(), ends=ends)
        else:
            runner, record = build(settings, clock, desk, supervisor, _version())
        ended = _until_signalled(runner, clock)
        options = WebOptions(socket, settings.readers, settings.writers, tcp, record.history, state_dir())
        if isinstance(runner, Node):
            options = _with_services(options, runner)
        server = serve(desk, options)
        ends.callback(server.close)
        desk.on_wish(clock.wake)
        teller = EventPrinter(desk, sys.stderr)
        ends.callback(teller.close)
        for line in addresses(socket, tcp, server.port, terminal):
            _say(line)
        runner.run()
    if signal.SIGINT in ended:
        return INTERRUPTED
    return 0


def _with_services(options: WebOptions, node: Node) -> WebOptions:
    """Return the options with a door for each service there is at any time."""
    return replace(options, services=_Doors(node), node=lambda: node.shown)


class _Doors(typing.Mapping[str, "ServiceDoor"]):
    """A door for each service that is looked after at the moment; may be asked from any thread.

    Args:
        node: Whose services.
    """

    def __init__(self, node: Node) -> None:
        self._node = node

    def __getitem__(self, name: str) -> ServiceDoor:
        from polythrottle.daemon.web.access import ServiceDoor

        for member in self._node.members:
            if member.name == name:
                return ServiceDoor(member.mailbox, member.record.history, member.folder)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter([member.name for member in self._node.members])

    def __len__(self) -> int:
        return len(self._node.members)


def addresses(socket: Path, tcp: Tcp | None, port: int | None, terminal: bool) -> Iterator[str]:
    """Yield where the daemon is met, a line each.

    Args:
        socket: Of the API.
        tcp: How it is served over TCP; None if it is not.
        port: That is listened on there.
        terminal: Whether the lines go to the terminal of whoever started it: only there the token is shown.
    """
    yield f"API      {socket}"
    if tcp is None or port is None:
        return
    yield f"page     {tcp.address(port, token=terminal)}"
    if tcp.token_file is not None and not terminal:
        yield f"token    in {tcp.token_file}; the page asks for it"


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    with suppress(PackageNotFoundError):
        return version("polythrottle")
    return ""


def _until_signalled(runner: Runner | Node, clock: WakingClock) -> list[int]:
    """Have signals end the loop after the turn under way; a second one does not cut the restoring short.

    Returns:
        The signals that came.
    """
    came: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        came.append(number)
        runner.stop()
        clock.wake()

    # The handler notes it and wakes the loop: restoring belongs to the loop, which may be writing just now.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
    return came


def _say(text: str) -> None:
    with suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


class EventPrinter:
    """Writes each event since the daemon began in a line of its own.

    In a terminal what goes on is in a last line, which is written over.

    It has a thread of its own: a terminal that does not take its lines must not hold up the control loop.

    Args:
        desk: Where the control loop shows what goes on.
        out: Where to write.
    """

    def __init__(self, desk: Mailbox, out: TextIO) -> None:
        self._desk, self._out, self._live = desk, out, out.isatty()
        self._bell = threading.Event()
        self._over = False
        events = desk.events()
        # Events of an earlier daemon come before the start of this one, and are not repeated.
        begun = [each.number for each in events if each.kind == "start"] or [each.number for each in events]
        self._after = [0, *begun][-1]
        self._end = desk.listen(self._bell.set)
        self._thread = threading.Thread(target=self._told, name="polythrottle-teller", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what is left and end; a terminal that is stuck is not waited for."""
        self._over = True
        self._bell.set()
        # A terminal that is stopped with Ctrl-S takes no line, and the board must be restored all the same.
        self._thread.join(timeout=1.0)
        self._end()

    def _told(self) -> None:
        try:
            while not self._over:
                self._bell.wait()
                self._bell.clear()
                self._write()
            self._out.write(_CLEAR * self._live)
            self._out.flush()
        except (OSError, ValueError):  # nobody reads any more
            return

    def _write(self) -> None:
        for event in self._desk.events(self._after):
            self._after = event.number
            self._out.write(f"{_CLEAR * self._live}{event.at[11:19]} {event.kind:<8} {printable(event.words)}\n")
        if self._live:
            self._out.write(f"{_CLEAR}{line_of(self._desk.status)}")
        self._out.flush()


def line_of(status: Status, width: int = WIDTH) -> str:
    """Return what goes on in one line; what does not fit is left out whole, and whether something is wrong is first.

    Args:
        status: As the daemon shows it.
        width: How many columns there are.
    """
    line, *rest = _parts(status)
    for part in rest:
        if len(line) + 2 + len(part) > width:
            break
        line = f"{line}  {part}"
    return line


def _parts(status: Status) -> list[str]:
    """Return what goes on, the most important first."""
    simulated = ""
    if status.energy_kind == "simulated":
        simulated = " (simulated)"
    fault = ["FAULT"] * bool(status.faults)
    parts = [*fault, status.phase, f"{show(status.power_w, 'W')}{simulated}"]
    if status.rate_per_s is not None:
        parts.append(f"{status.rate_per_s:.3g}/s")
    if status.p99_s is not None:
        p99 = f"p99 {show(status.p99_s, 's')}"
        if status.limit_s is not None:
            p99 += f" of {show(status.limit_s, 's')}"
        parts.append(p99)
    if status.rung is not None:
        parts.append(f"rung {status.rung.number + 1}/{status.rung.of}")
    if status.saved.joules is not None:
        parts.append(f"saved {show(status.saved.joules, 'J')} today")
    return parts


if __name__ == "__main__":
    sys.exit(main())
