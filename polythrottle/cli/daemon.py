"""`polythrottle daemon`: run it, look at it, end it, start its privileged half, install it as a service."""

import os
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from polythrottle.cells import iso_time
from polythrottle.cli.answers import answer, say_which
from polythrottle.cli.help_pages import CommandGroup, examples
from polythrottle.cli.options import JsonOption, OptionGroup, spread
from polythrottle.errors import DeviceError, PolythrottleError, StorageError

app = typer.Typer(
    name="daemon",
    help="Keep a board at its best point while load, heat and models change.",
    cls=CommandGroup,
    rich_markup_mode=None,
)
_DEMO_PROFILE = Path(__file__).resolve().parent.parent / "daemon" / "demo.toml"
_DEMO_TRAFFIC = "day:48/s"
_WAIT_S = 20.0
_HUNG_S = 5.0
_LAST_WORDS_S = 5.0
_ACTUATOR = "polythrottle.daemon.actuator"
SocketOption = Annotated[Path | None, typer.Option("--socket", metavar="PATH", help="Unix socket of the daemon's API.")]


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


@app.command("run", epilog=examples("polythrottle daemon run --profile profile.toml --traffic sim:poisson:30/s"))
@spread
def run_daemon(
    *,
    profile: Annotated[
        str | None,
        typer.Option("--profile", "-p", metavar="FILE", help="Tuned profile to follow, or its <device>/<workload>."),
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option("--workload", "-w", metavar="URI", help="Model that is served, if there is no profile yet."),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", "-d", metavar="URI", help="The board; the profile's by default.")
    ] = None,
    traffic: Annotated[
        str | None,
        typer.Option(
            "--traffic",
            metavar="URI",
            help="Where requests are seen: report, metrics:URL, log:FILE, process:NAME, sim:day:30/s.",
        ),
    ] = None,
    arrivals: Annotated[
        str | None, typer.Option("--arrivals", metavar="HOW", help="As --traffic sim:HOW, such as poisson:30/s.")
    ] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option("--slo", metavar="SLO", help="Limit such as p99<=25ms, in place of the profile's; repeats."),
    ] = None,
    actuator: Annotated[
        Path | None, typer.Option("--actuator", metavar="SOCKET", help="Socket of the process that sets the board.")
    ] = None,
    no_actuator: Annotated[
        bool, typer.Option("--no-actuator", help="Set the board from this process; it needs the rights.")
    ] = False,
    socket: SocketOption = None,
    allowed: BudgetOptions,
    tcp: Annotated[
        str | None, typer.Option("--tcp", metavar="HOST:PORT", help="Serve page and API there, with a token or TLS.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", metavar="FILE", help="Certificate, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="Its key, PEM.")] = None,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", metavar="FILE", help="File with the token that clients on TCP must show."),
    ] = None,
    page: Annotated[
        bool | None,
        typer.Option(
            "--page/--no-page",
            help="Serve the page on a free port of 127.0.0.1, with a token of its own. Default: in a terminal.",
        ),
    ] = None,
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
    from polythrottle.cli.serving import become

    if profile is not None:
        say_which(profile)
    words = {name: value for name, value in locals().items() if name not in ("allowed", "become")} | asdict(allowed)
    words["page"] = None if page is None else "yes" if page else "no"
    become({name: str(value) if isinstance(value, Path) else value for name, value in words.items()})


@app.command(epilog=examples("polythrottle daemon demo --day 2min"))
def demo(
    day: Annotated[str, typer.Option("--day", metavar="5min", help="How long a simulated day takes.")] = "5min",
    socket: SocketOption = None,
) -> None:
    """Watch the daemon follow a moving load on a simulated board.

    A day of requests passes in a few minutes. Nothing is set on this machine. Ctrl-C ends it.
    """
    from polythrottle.arrivals import Arrivals
    from polythrottle.cli.serving import become
    from polythrottle.state import DAEMON_SOCKET, run_dir, state_dir

    arrivals = Arrivals.parse(f"{_DEMO_TRAFFIC}?length={day}")
    where = socket or run_dir() / DAEMON_SOCKET
    look = "polythrottle top" if socket is None else f"polythrottle top --socket {shlex.quote(str(socket))}"
    typer.echo(f"A simulated board serves a day of requests in {day}; all figures are simulated.", err=True)
    typer.echo(f"Look at it: open the page below in a browser, or in another terminal: {look}", err=True)
    os.environ["POLYTHROTTLE_STATE_DIR"] = str(state_dir() / "demo")
    become({"profile": str(_DEMO_PROFILE), "traffic": f"sim:{arrivals}", "socket": str(where), "page": "yes"})


@app.command(epilog=examples("polythrottle daemon status --follow"))
def status(
    socket: SocketOption = None,
    follow: Annotated[bool, typer.Option("--follow", help="Print a line per second until Ctrl-C.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what the daemon does now."""
    from polythrottle.client import Client

    with Client(socket) as client:
        if not follow:
            answer(client.status(), as_json, _print_status, lambda found: found.document)
            return
        for line in _followed(client, as_json):
            typer.echo(line)


@app.command(epilog=examples("polythrottle daemon stop"))
def stop(socket: SocketOption = None, as_json: JsonOption = False) -> None:
    """End the daemon: stop its study, restore the board, and show its last words."""
    from polythrottle.client import Client

    with Client(socket) as client, Client(socket) as listener:
        last = max((each.number for each in client.events()), default=0)
        said: list[str] = []
        listening = threading.Event()
        hearing = threading.Thread(target=_hear, args=(listener, last, said, listening), daemon=True)
        hearing.start()
        listening.wait(timeout=_LAST_WORDS_S)
        client.stop()
        if not _gone(client):
            raise DeviceError(f"the daemon at {client.where} was told to end and has not within {_WAIT_S:g} s")
        hearing.join(timeout=_LAST_WORDS_S)
        words = said[0] if said else "the daemon has ended; what became of the board, its log says"
        answer({"stopped": client.where, "words": words}, as_json, lambda _: typer.echo(words))


@app.command(epilog=examples("polythrottle daemon budget --battery 80Wh --last 9h"))
@spread
def budget(
    allowed: BudgetOptions,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show, change or lift the power budget of a running daemon; it is kept until it is changed again."""
    from polythrottle.cli.serving import budget_of
    from polythrottle.client import Client

    wish = budget_of(asdict(allowed))
    with Client(socket) as client:
        if wish is None:
            shown = client.status().budget
            words = shown.words or "no budget limits the power"
            answer(shown, as_json, lambda _: typer.echo(words), asdict)
        else:
            done = client.budget(**asdict(wish))
            answer(done, as_json, lambda found: typer.echo(found["words"]))


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    options_metavar="[--socket PATH] [--device URI]… [--permits FILE]",
)
def actuator(context: typer.Context) -> None:
    """Run the privileged process that sets the board; it needs the rights, such as those of root."""
    sys.stdout.flush()
    try:
        os.execv(sys.executable, [sys.executable, "-m", _ACTUATOR, *context.args])
    except OSError as error:
        raise DeviceError(f"the actuator cannot be started: {sys.executable}: {error.strerror}") from error


@app.command(epilog=examples("polythrottle daemon install --root unpacked"))
def install(
    root: Annotated[
        Path | None, typer.Option("--root", metavar="FOLDER", help="Install below this folder instead of /.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Install the systemd units; without root, print the command that does."""
    script, bin_dir = _installer(), Path(sys.argv[0]).resolve().parent
    if not (bin_dir / "polythrottle").exists():
        bin_dir = Path(sys.executable).parent
    words = ["sh", str(script)]
    settings = {"BINDIR": str(bin_dir), **({} if root is None else {"DESTDIR": str(root.absolute())})}
    if root is None and os.geteuid() != 0:
        shown = " ".join([*(f"{name}={value}" for name, value in settings.items()), *words])
        document = {"installed": False, "command": f"sudo {shown}"}
        answer(document, as_json, lambda _: typer.echo(f"installing needs root; run:\n  sudo {shown}"))
        return
    done = subprocess.run(words, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise StorageError(f"the units cannot be laid: {(done.stderr or done.stdout).strip()}")
    answer({"installed": True, "said": done.stdout.splitlines()}, as_json, lambda _: typer.echo(done.stdout.rstrip()))


def _installer() -> Path:
    """Return the script that lays the units: beside the package, or in the source it was installed from."""
    here = Path(__file__).resolve().parent.parent
    for path in (here / "packaging" / "install-units", here.parent / "packaging" / "install-units"):
        if path.is_file() and shutil.which("sh"):
            return path
    raise StorageError("this installation lacks packaging/install-units; take it from the source of this version")


def _hear(client: Any, after: int, said: list[str], listening: threading.Event) -> None:
    """Note the words with which a daemon ends; returns when it has ended, and says when the first of it is heard."""
    from polythrottle.client import Gone
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
        except DeviceError:
            return True
        except PolythrottleError:
            return False
        time.sleep(0.1)
    return False


def _followed(client: Any, as_json: bool) -> Iterator[str]:
    """Yield a line for each status and each event."""
    import json

    from polythrottle.cli.serving import WIDTH, line_of
    from polythrottle.client import Gone
    from polythrottle.daemon.status import Happened, Status

    for found in client.follow():
        if isinstance(found, Status):
            at = f"{found.at[11:19]} "
            yield json.dumps({"status": found.document}) if as_json else f"{at}{line_of(found, WIDTH - len(at))}"
        elif isinstance(found, Happened):
            plain = f"{found.at[11:19]} {found.kind}: {found.words}"
            yield json.dumps({"event": vars(found)}) if as_json else plain
        elif isinstance(found, Gone):
            yield json.dumps({"gone": found.words}) if as_json else f"{found.words}; trying again"


def _print_status(status: Any) -> None:
    from rich.console import Console
    from rich.text import Text

    from polythrottle.cli.texts import named_lines
    from polythrottle.units import show

    console = Console(highlight=False, markup=False)
    if hung := _hung(status.at):
        console.print(Text(hung, "bold"))
    console.print(Text(status.title or status.device, "bold"))
    console.print(named_lines([pair for pair in _lines(status, show) if pair[1]]))


def _hung(at: str) -> str:
    """Say for how long the status is old already, where that is longer than a turn can take; "" if it is not."""
    with suppress(ValueError):
        age_s = time.time() - iso_time(at).timestamp()
        return f"the control loop has not turned for {age_s:.0f} s" if age_s > _HUNG_S else ""
    return ""


def _lines(status: Any, show: Any) -> Iterator[tuple[str, str]]:
    from polythrottle.cli.texts import show_point
    from polythrottle.cli.topview import finetuning_words
    from polythrottle.space import OperatingPoint

    yield "phase", f"{status.phase}: {status.reason}"
    if status.workload is not None:
        up = "up" if status.workload.up else "down"
        yield "workload", f"{status.workload.uri} ({up}), requests seen through {status.workload.traffic}"
        yield "profile", status.workload.profile or "none: it was never tuned"
        yield "SLO", ", ".join(status.workload.slo)
    yield "set", show_point(OperatingPoint(status.point)) if status.point else "as found"
    if status.rung is not None:
        yield (
            "point",
            f"{status.rung.number + 1} of {status.rung.of} of the ladder, for up to {status.rung.rate_per_s:.3g}/s",
        )
    waiting = "–" if status.waiting is None else status.waiting
    yield "requests", "" if status.rate_per_s is None else f"{status.rate_per_s:.3g}/s, {waiting} waiting"
    yield "p99", "" if status.p99_s is None else f"{show(status.p99_s, 's')} (limit {show(status.limit_s, 's')})"
    yield "power", "" if status.power_w is None else f"{show(status.power_w, 'W')} ({status.energy_kind})"
    yield "temperature", "" if status.temperature_c is None else f"{status.temperature_c:.1f} °C"
    yield "saved", _saved(status.saved, show)
    yield "budget", status.budget.words
    yield "study", "" if status.study is None else f"{status.study.id} {status.study.state}: {status.study.words}"
    yield "training", finetuning_words(status)
    yield "drift", status.drift
    for fault in status.faults:
        yield "fault", fault


def _saved(saved: Any, show: Any) -> str:
    if saved.joules is None:
        return str(saved.words)
    ends = "" if saved.low is None else f" ({show(saved.low, 'J')} to {show(saved.high, 'J')})"
    return f"{show(saved.joules, 'J')}{ends} today, {saved.words}"
