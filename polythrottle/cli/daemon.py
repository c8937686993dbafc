"""`polythrottle daemon` and `polythrottle top`: run the daemon, look at it, end it, install it as a service."""

import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polythrottle.cli.options import CommandGroup, JsonOption, OptionGroup, examples, spread
from polythrottle.cli.output import answer, optional, say_which, suffix
from polythrottle.domain.errors import BadFile, DeviceError, InvalidInput, PolythrottleError, StorageError, UnknownName
from polythrottle.storage.untrusted import check_plain

if TYPE_CHECKING:
    from polythrottle.daemon.client import Client
    from polythrottle.daemon.status import Status

ServiceOption = Annotated[
    str | None, typer.Option("--service", metavar="NAME", help="Of several services the daemon looks after, this one.")
]
BoardOption = Annotated[
    str | None,
    typer.Option("--device", "-d", metavar="ssh://HOST", help="Board whose daemon is meant; --socket is a path there."),
]

# `polythrottle top`: a daemon on the terminal, or once as text where there is none.


def top(
    socket: Annotated[
        Path | None, typer.Option("--socket", metavar="PATH", help="Of the daemon; this machine's by default.")
    ] = None,
    url: Annotated[
        str | None, typer.Option("--url", metavar="URL", help="Of a daemon on TCP, such as http://127.0.0.1:9280.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", metavar="FILE", help="Holds the token a daemon on TCP asks for.")
    ] = None,
    device: BoardOption = None,
    service: ServiceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Watch the daemon: power, p99, load, clocks, savings, events; keys start a study or give the board back.

    Without a terminal, and with --json, its present status is printed once.
    """
    with _client(socket, url, token_file, service, device) as client:
        status = client.status()
        # A dumb terminal, such as an editor's, cannot be drawn on.
        if not as_json and sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
            from polythrottle.cli.render.status_screen import TopScreen

            TopScreen(client, status).run()
        else:
            answer(status, as_json, _print, _document)


@contextmanager
def _client(
    socket: Path | None,
    url: str | None = None,
    token_file: Path | None = None,
    service: str | None = None,
    device: str | None = None,
) -> Iterator["Client"]:
    """Yield a daemon: of this machine, on TCP, or of a board over SSH."""
    from polythrottle.daemon.client import Client

    if device is None:
        with Client(socket, url, optional(_token, token_file), service=service) as client:
            yield client
        return
    if url is not None:
        raise InvalidInput("name the daemon by its board or by a URL, not both")
    from polythrottle.api.deployment import daemon_of_board

    with daemon_of_board(device, socket, service) as client:
        yield client


def _token(path: Path) -> str:
    check_plain(path)
    try:
        # Without the line break that editors put at the end.
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadFile(
            f"no token can be read from {path}: {getattr(error, 'strerror', None) or 'it is not text'}"
        ) from error


def _document(status: "Status") -> dict[str, Any]:
    return status.document


def _print(status: "Status") -> None:
    from rich.text import Text

    from polythrottle.cli.render.console import plain_console
    from polythrottle.cli.render.status import clock_time, status_lines
    from polythrottle.cli.render.text import named_lines
    from polythrottle.storage.untrusted import printable

    console = plain_console()
    title = printable(status.title or status.device or "no device")
    console.print(Text.assemble((title, "bold"), suffix(status.at and clock_time(status.at), ", at {}")))
    console.print(named_lines(status_lines(status)))


# `polythrottle daemon`: run it, look at it, end it, start its privileged half, install it as a service.

app = typer.Typer(
    name="daemon",
    help="Keep a board at its best point while load, heat and models change.",
    cls=CommandGroup,
    rich_markup_mode=None,
)
_DEMO_PROFILE = Path(__file__).resolve().parent.parent / "daemon" / "demo.toml"
_DEMO_TRAFFIC = "day:48/s"
_WAIT_S = 20.0
_LAST_WORDS_S = 5.0
_ACTUATOR = "polythrottle.actuation.server"
SocketOption = Annotated[Path | None, typer.Option("--socket", metavar="PATH", help="Unix socket of the daemon's API.")]


@dataclass(frozen=True)
class NodeOptions(OptionGroup):
    """What a whole server may draw, its rest included."""

    node_power: Annotated[
        str | None, typer.Option("--node-power", metavar="3.2kW", help="Most power of the whole server over a second.")
    ] = None
    rest: Annotated[
        str | None, typer.Option("--rest", metavar="400W", help="What it draws besides its services' devices.")
    ] = None
    node_meter: Annotated[
        str | None,
        typer.Option("--node-meter", metavar="URI", help="Meter of the whole server instead, such as redfish:HOST."),
    ] = None


@dataclass(frozen=True)
class BudgetOptions(OptionGroup):
    """What the board may draw."""

    power: Annotated[str | None, typer.Option("--power", metavar="10W", help="Highest mean power.")] = None
    battery: Annotated[
        str | None, typer.Option("--battery", metavar="80Wh", help="Energy in the battery; goes with --last.")
    ] = None
    last: Annotated[str | None, typer.Option("--last", metavar="9h", help="How long the battery must last.")] = None
    wh_per_day: Annotated[str | None, typer.Option("--wh-per-day", metavar="400", help="Highest energy a day.")] = None
    carbon: Annotated[
        Path | None,
        typer.Option("--carbon", metavar="FILE", help="CSV table time,g_per_kwh: use energy when it is cleanest."),
    ] = None
    no_budget: Annotated[bool, typer.Option("--no-budget", help="Lift the budget, also one kept from before.")] = False


@dataclass(frozen=True)
class ServedOptions(OptionGroup):
    """What is served on which board, to which requests."""

    profile: Annotated[
        str | None,
        typer.Option("--profile", "-p", metavar="FILE", help="Tuned profile to follow, or its <device>/<workload>."),
    ] = None
    workload: Annotated[
        str | None,
        typer.Option("--workload", "-w", metavar="URI", help="Model that is served, if there is no profile yet."),
    ] = None
    device: Annotated[
        str | None, typer.Option("--device", "-d", metavar="URI", help="The board; the profile's by default.")
    ] = None
    traffic: Annotated[
        str | None,
        typer.Option(
            "--traffic",
            metavar="URI",
            help="Where requests are seen: report, metrics:URL, proxy:URL, log:FILE, process:NAME, sim:day:30/s.",
        ),
    ] = None
    arrivals: Annotated[
        str | None, typer.Option("--arrivals", metavar="HOW", help="As --traffic sim:HOW, such as poisson:30/s.")
    ] = None
    slo: Annotated[
        list[str] | None,
        typer.Option("--slo", metavar="SLO", help="Limit such as p99<=25ms, in place of the profile's; repeats."),
    ] = None


@dataclass(frozen=True)
class ListenOptions(OptionGroup):
    """Where page and API are served besides the Unix socket, and who may come in."""

    tcp: Annotated[
        str | None, typer.Option("--tcp", metavar="HOST:PORT", help="Serve page and API there, with a token or TLS.")
    ] = None
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", metavar="FILE", help="Certificate, PEM.")] = None
    tls_key: Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="Its key, PEM.")] = None
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", metavar="FILE", help="File with the token that clients on TCP must show."),
    ] = None
    page: Annotated[
        bool | None,
        typer.Option(
            "--page/--no-page",
            help="Serve the page on a free port of 127.0.0.1, with a token of its own. Default: in a terminal.",
        ),
    ] = None


@app.command("run", epilog=examples("polythrottle daemon run --profile profile.toml --traffic sim:poisson:30/s"))
@spread
def run_daemon(
    *,
    served: ServedOptions,
    actuator: Annotated[
        Path | None, typer.Option("--actuator", metavar="SOCKET", help="Socket of the process that sets the board.")
    ] = None,
    no_actuator: Annotated[
        bool, typer.Option("--no-actuator", help="Set the board from this process; it needs the rights.")
    ] = False,
    socket: SocketOption = None,
    allowed: BudgetOptions,
    shared: NodeOptions,
    listen: ListenOptions,
    finetune: Annotated[
        list[str] | None,
        typer.Option(
            "--finetune",
            metavar="FOLDER",
            help="Fine-tuning job, or folder of jobs, to take into account; repeats.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="Settings; default: /etc/polythrottle/daemon.toml, if there is no --profile.",
        ),
    ] = None,
) -> None:
    """Follow the load with a tuned profile until Ctrl-C; then the board is put back as it was found.

    To see it without hardware: polythrottle daemon demo.
    """
    from polythrottle.cli.daemon_process import exec_daemon

    if served.profile is not None:
        say_which(served.profile)
    words: dict[str, Any] = {
        "actuator": actuator,
        "no_actuator": no_actuator,
        "socket": socket,
        "finetune": finetune,
        "config": config,
    }
    for group in (served, allowed, shared, listen):
        words |= asdict(group)
    # In words: what is false is left out on the way to the daemon's process, as if it had not been given.
    words["page"] = optional({True: "yes", False: "no"}.get, listen.page)
    exec_daemon({name: str(value) if isinstance(value, Path) else value for name, value in words.items()})


@app.command(epilog=examples("polythrottle daemon demo --day 2min"))
def demo(
    day: Annotated[str, typer.Option("--day", metavar="5min", help="How long a simulated day takes.")] = "5min",
    socket: SocketOption = None,
) -> None:
    """Watch the daemon follow a moving load on a simulated board.

    A day of requests passes in a few minutes. Nothing is set on this machine. Ctrl-C ends it.
    """
    from polythrottle.actuation.server.unix_socket import check_path
    from polythrottle.cli.daemon_process import exec_daemon as become
    from polythrottle.domain.arrivals import Arrivals
    from polythrottle.storage.paths import DAEMON_SOCKET, run_dir, state_dir

    arrivals = Arrivals.parse(f"{_DEMO_TRAFFIC}?length={day}")
    where = socket or run_dir() / DAEMON_SOCKET
    # Before anything is said: below a long home folder a socket's path has no room (unix(7)).
    check_path(where)
    if socket is None:
        look = "polythrottle top"
    else:
        look = f"polythrottle top --socket {shlex.quote(str(socket))}"
    typer.echo(f"A simulated board serves a day of requests in {day}; all figures are simulated.", err=True)
    typer.echo(f"Look at it: open the page below in a browser, or in another terminal: {look}", err=True)
    # Apart from a real daemon here, whose lock, history and savings are none of the demonstration's.
    os.environ["POLYTHROTTLE_STATE_DIR"] = str(state_dir() / "demo")
    become({"profile": str(_DEMO_PROFILE), "traffic": f"sim:{arrivals}", "socket": str(where), "page": "yes"})


@app.command(epilog=examples("polythrottle daemon status --follow"))
def status(
    socket: SocketOption = None,
    device: BoardOption = None,
    service: ServiceOption = None,
    follow: Annotated[bool, typer.Option("--follow", help="Print a line per second until Ctrl-C.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what the daemon does now."""
    with _client(socket, service=service, device=device) as client:
        if not follow:
            from polythrottle.cli.render.status import print_node, print_status

            found = client.status()
            if found.device == "node":
                answer(client.node(), as_json, print_node, asdict)
            else:
                answer(found, as_json, print_status, _document)
            return
        silent = False
        for line, gone in _followed(client, as_json):
            # Whoever waits for a daemon needs to be told once, beside the lines that a script reads.
            if not (gone and silent):
                typer.echo(line, err=gone)
            silent = gone


@app.command(epilog=examples("polythrottle daemon stop"))
def stop(socket: SocketOption = None, device: BoardOption = None, as_json: JsonOption = False) -> None:
    """End the daemon and any study; the board is put back."""
    from polythrottle.daemon.status import MAY_DIFFER

    # Two of them, for one waits for events all the while.
    with _client(socket, device=device) as client, _client(socket, device=device) as listener:
        last = max((each.number for each in client.events()), default=0)
        said: list[str] = []
        listening = threading.Event()
        # Listens before it stops: the last words come once and are kept nowhere but in the log.
        hearing = threading.Thread(target=_hear, args=(listener, last, said, listening), daemon=True)
        hearing.start()
        # Not for ever: a daemon that hangs tells nothing, and is to be ended all the same.
        listening.wait(timeout=_LAST_WORDS_S)
        client.stop()
        if not _gone(client):
            raise DeviceError(f"the daemon at {client.where} was told to end and has not within {_WAIT_S:g} s")
        hearing.join(timeout=_LAST_WORDS_S)
        words = next(iter(said), "the daemon has ended; what became of the board, its log says")
        head, differs, left = words.partition(MAY_DIFFER)
        lines = "".join(f"\n  {each}" for each in left.split("; ")) if differs else ""
        document = {"stopped": client.where, "words": words, "clean": not differs if said else None}
        answer(document, as_json, lambda _: typer.echo(f"{head}{differs.strip()}{lines}"))
        if differs:
            raise typer.Exit(DeviceError.exit_code)


@app.command(epilog=examples("polythrottle daemon budget --battery 80Wh --last 9h"))
@spread
def budget(
    allowed: BudgetOptions,
    socket: SocketOption = None,
    within: Annotated[
        str | None,
        typer.Option("--within", metavar="5s", help="By when a server of services must keep --power; told of if not."),
    ] = None,
    device: BoardOption = None,
    service: ServiceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show, change or lift the power budget of a running daemon; it is kept until it is changed again."""
    from polythrottle.cli.daemon_process import budget_of, node_limit

    wish = budget_of(asdict(allowed))
    with _client(socket, service=service, device=device) as client:
        if within is not None:
            power_w, within_s = node_limit(wish, within, service)
            try:
                done = client.node_power(power_w, within_s)
            except UnknownName as error:
                raise InvalidInput(
                    "--within is of a server of services; the budget of one service holds from the next second on"
                ) from error
            answer(done, as_json, lambda found: typer.echo(found["words"]))
        elif wish is None:
            shown = client.status().budget
            words = shown.words or "no budget limits the power"
            answer(shown, as_json, lambda _: typer.echo(words), asdict)
        else:
            done = client.budget(**asdict(wish))
            answer(done, as_json, lambda found: typer.echo(found["words"]))


@app.command(
    # --help too is a word for the program that is started.
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    options_metavar="[--socket PATH] [--device URI]… [--permits FILE]",
)
def actuator(context: typer.Context) -> None:
    """Run the privileged process that sets the board; it needs the rights, such as those of root."""
    sys.stdout.flush()
    try:
        # In place of this process, so that the privileged one holds nothing of the command line.
        os.execv(sys.executable, [sys.executable, "-m", _ACTUATOR, *context.args])
    except OSError as error:
        raise DeviceError(f"the actuator cannot be started: {sys.executable}: {error.strerror}") from error


_SudoOption = Annotated[bool, typer.Option("--sudo", help="Through sudo there, which must not ask for a password.")]


@app.command(epilog=examples("polythrottle daemon install --root unpacked"))
def install(
    root: Annotated[
        Path | None, typer.Option("--root", metavar="FOLDER", help="Install below this folder instead of /.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", "-d", metavar="ssh://HOST", help="Install actuator and daemon on this board."),
    ] = None,
    sudo: _SudoOption = False,
    settings: Annotated[
        Path | None,
        typer.Option("--settings", metavar="FILE", help="Becomes /etc/polythrottle/daemon.toml on the board."),
    ] = None,
    wheels: Annotated[
        Path | None,
        typer.Option("--wheels", metavar="FOLDER", help="Holds the packages for a board; else pip fetches them."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Install the systemd units; without root, print the command that does.

    With --device ssh://…, install actuator, daemon and units on a board, for its own Python of 3.8 or newer.
    """
    if device is not None:
        from polythrottle.api.deployment import install_on_board

        done = install_on_board(device, root=_folder_there(root), sudo=sudo, settings=settings, wheels=wheels)
        answer(done, as_json, lambda _: typer.echo(_install_words(done, device)))
        if done["faults"]:
            raise typer.Exit(DeviceError.exit_code)
        return
    if sudo or settings is not None or wheels is not None:
        raise InvalidInput("--sudo, --settings and --wheels are for a board; name it with --device ssh://HOST")
    from polythrottle.catalog.documents import packaging_dir

    # The units name the program by its path: services have no PATH of a user.
    bin_dir = Path(sys.argv[0]).resolve().parent
    # Started as a module: the script lies beside the Python that did it.
    if not (bin_dir / "polythrottle").exists():
        bin_dir = Path(sys.executable).parent
    words = ["sh", str(packaging_dir() / "install-units")]
    environment = {"BINDIR": str(bin_dir)}
    if root is not None:
        environment["DESTDIR"] = str(root.absolute())
    if root is None and os.geteuid() != 0:
        shown = " ".join([*(f"{name}={value}" for name, value in environment.items()), *words])
        document = {"installed": False, "command": f"sudo {shown}"}
        answer(document, as_json, lambda _: typer.echo(f"installing needs root; run:\n  sudo {shown}"))
        return
    ran = subprocess.run(words, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise StorageError(f"the units cannot be laid: {(ran.stderr or ran.stdout).strip()}")
    answer({"installed": True, "said": ran.stdout.splitlines()}, as_json, lambda _: typer.echo(ran.stdout.rstrip()))


@app.command(epilog=examples("polythrottle daemon uninstall --device ssh://orin --sudo"))
def uninstall(
    device: Annotated[
        str, typer.Option("--device", "-d", metavar="ssh://HOST", help="Board on which it was installed.")
    ],
    root: Annotated[
        Path | None, typer.Option("--root", metavar="FOLDER", help="Below which folder there, instead of /.")
    ] = None,
    sudo: _SudoOption = False,
    as_json: JsonOption = False,
) -> None:
    """Put a board back, and remove the actuator and daemon that were installed there over SSH."""
    from polythrottle.api.deployment import uninstall_from_board

    done = uninstall_from_board(device, root=_folder_there(root), sudo=sudo)
    kept = "".join(f"\nkept: {path}" for path in done["kept"])
    answer(done, as_json, lambda _: typer.echo(f"the board was put back, and {done['removed']} removed{kept}"))


def _folder_there(root: Path | None) -> Path:
    if root is not None and not root.is_absolute():
        raise InvalidInput(f"--root {root}: on a board a folder is named from its root, such as /home/me/try")
    return root or Path("/")


def _install_words(done: Mapping[str, Any], device: str) -> str:
    lines = [f"{done['version']} is installed in {done['folder']}, for Python {done['python']}"]
    lines += [f"  {unit:<30} {state}" for unit, state in done["units"].items()]
    lines += [f"  fault: {fault}" for fault in done["faults"]]
    if not done["units"]:
        lines.append(f"nothing was started; its programs are in {done['folder']}/bin")
    elif done["units"].get("polythrottle.service") == "inactive":
        lines.append("the daemon starts once it has settings: add --settings FILE")
    return "\n".join([*lines, f"look at the daemon: polythrottle daemon status --device {shlex.quote(device)}"])


def _hear(client: Any, after: int, said: list[str], listening: threading.Event) -> None:
    """Note the words with which a daemon ends; returns when it has ended, and says when the first of it is heard."""
    from polythrottle.daemon.client import Gone
    from polythrottle.daemon.status import Happened

    with suppress(PolythrottleError):
        for each in client.follow(after):
            listening.set()
            if isinstance(each, Happened) and each.kind == "stop":
                said.append(each.words)
            if said or isinstance(each, Gone):
                return


def _gone(client: Any) -> bool:
    until_s = time.monotonic() + _WAIT_S
    while time.monotonic() < until_s:
        try:
            client.status()
        # Nobody listens on its socket any more.
        except DeviceError:
            return True
        except PolythrottleError:
            return False
        time.sleep(0.1)
    return False


def _followed(client: Any, as_json: bool) -> Iterator[tuple[str, bool]]:
    """Yield a line for each status and each event, and for nobody who answers; with whether it is such a one."""
    import json

    from polythrottle.cli.daemon_process import WIDTH, line_of
    from polythrottle.daemon.client import Gone
    from polythrottle.daemon.status import Happened, Status

    for news in client.follow():
        if isinstance(news, Status):
            at = f"{news.at[11:19]} "
            document: dict[str, Any] = {"status": news.document}
            line = f"{at}{line_of(news, WIDTH - len(at))}"
        elif isinstance(news, Happened):
            document = {"event": vars(news)}
            line = f"{news.at[11:19]} {news.kind}: {news.words}"
        elif isinstance(news, Gone):
            document = {"gone": news.words}
            line = f"{news.words}; trying again"
        else:
            continue
        if as_json:
            line = json.dumps(document)
        yield line, isinstance(news, Gone)
