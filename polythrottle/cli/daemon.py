"""`polythrottle daemon`: run it, look at it, end it, start its privileged half, install it as a service."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from polythrottle.cli.answers import answer
from polythrottle.cli.options import JsonOption, OptionGroup, spread
from polythrottle.errors import DeviceError, PolythrottleError, StorageError

app = typer.Typer(
    name="daemon",
    help="Keep a board at its best point while load, heat and models change.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
_WAIT_S = 20.0
_HUNG_S = 5.0
_ACTUATOR = "polythrottle.daemon.actuator"
SocketOption = Annotated[Path | None, typer.Option("--socket", metavar="PATH", help="Where the API is served.")]


@dataclass(frozen=True)
class BudgetOptions(OptionGroup):
    """What the board may draw."""

    power: Annotated[str | None, typer.Option("--power", metavar="10W", help="Most mean power.")] = None
    battery: Annotated[str | None, typer.Option("--battery", metavar="80Wh", help="With --last: what there is.")] = None
    last: Annotated[str | None, typer.Option("--last", metavar="9h", help="How long the battery must do.")] = None
    wh_per_day: Annotated[str | None, typer.Option("--wh-per-day", metavar="400", help="Most energy a day.")] = None
    carbon: Annotated[
        Path | None, typer.Option("--carbon", metavar="FILE", help="Table of time,g_per_kwh to share energy out by.")
    ] = None
    no_budget: Annotated[bool, typer.Option("--no-budget", help="Lift the budget, one kept from before too.")] = False


@app.command("run")
@spread
def run_daemon(
    *,
    profile: Annotated[
        str | None, typer.Option("--profile", "-p", metavar="FILE", help="What to follow; or <device>/<workload>.")
    ] = None,
    workload: Annotated[
        str | None, typer.Option("--workload", "-w", metavar="URI", help="What is served, if it was never tuned.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", "-d", metavar="URI", help="The board; the profile's by default.")
    ] = None,
    traffic: Annotated[
        str | None,
        typer.Option(
            "--traffic", metavar="URI", help="Where requests are seen: report, metrics:<url>, log:<file>, sim:<how>."
        ),
    ] = None,
    arrivals: Annotated[
        str | None, typer.Option("--arrivals", metavar="HOW", help="As --traffic sim:HOW, such as poisson:30/s.")
    ] = None,
    slo: Annotated[
        list[str] | None, typer.Option("--slo", metavar="SLO", help="Before the profile's; repeats.")
    ] = None,
    actuator: Annotated[
        Path | None, typer.Option("--actuator", metavar="SOCKET", help="Of the process that sets the board.")
    ] = None,
    no_actuator: Annotated[bool, typer.Option("--no-actuator", help="Set the board from this process.")] = False,
    socket: SocketOption = None,
    allowed: BudgetOptions,
    tcp: Annotated[str | None, typer.Option("--tcp", metavar="HOST:PORT", help="Serve the API there too.")] = None,
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", metavar="FILE", help="Certificate, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="Its key, PEM.")] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", metavar="FILE", help="What clients on TCP must know.")
    ] = None,
    finetune: Annotated[
        list[str] | None,
        typer.Option(
            "--finetune",
            metavar="FOLDER",
            help="A fine-tuning job, or a folder of such, to heed; from where you are; repeats.",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="Settings; /etc/polythrottle/daemon.toml without a profile."),
    ] = None,
) -> None:
    """Follow the load with a tuned profile until Ctrl-C; the board is given back then.

    To try it without hardware: --profile FILE --traffic sim:poisson:30/s with a profile tuned on a sim: device.
    """
    from polythrottle.cli.serving import become

    words = {name: value for name, value in locals().items() if name not in ("allowed", "become")} | asdict(allowed)
    become({name: str(value) if isinstance(value, Path) else value for name, value in words.items()})


@app.command()
def status(
    socket: SocketOption = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on, a line per second, until Ctrl-C.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what the daemon does."""
    from polythrottle.client import Client

    with Client(socket) as client:
        if not follow:
            answer(client.status(), as_json, _print_status, lambda found: found.document)
            return
        for line in _followed(client, as_json):
            typer.echo(line)


@app.command()
def stop(socket: SocketOption = None, as_json: JsonOption = False) -> None:
    """End the daemon: study stopped, board given back; say what it says of that at the end."""
    from polythrottle.client import Client

    with Client(socket) as client, Client(socket) as listener:
        last = max((each.number for each in client.events()), default=0)
        said: list[str] = []
        hearing = threading.Thread(target=_hear, args=(listener, last, said), daemon=True)
        hearing.start()
        client.stop()
        if not _gone(client):
            raise DeviceError(f"the daemon at {client.where} was told to end and has not within {_WAIT_S:g} s")
        hearing.join(timeout=1.0)
        words = said[0] if said else "the daemon has ended; what became of the board, its log says"
        answer({"stopped": client.where, "words": words}, as_json, lambda _: typer.echo(words))


@app.command()
@spread
def budget(
    allowed: BudgetOptions,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a running daemon may draw, change that, or lift it; it is kept until it is changed again."""
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
    """Run the privileged process that sets the board; needs the right to, such as root's."""
    sys.stdout.flush()
    try:
        os.execv(sys.executable, [sys.executable, "-m", _ACTUATOR, *context.args])
    except OSError as error:
        raise DeviceError(f"the actuator cannot be started: {sys.executable}: {error.strerror}") from error


@app.command()
def install(
    root: Annotated[
        Path | None, typer.Option("--root", metavar="FOLDER", help="Lay the files below this folder instead of /.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Lay the systemd units, or say how where this user may not."""
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


def _hear(client: Any, after: int, said: list[str]) -> None:
    """Note the words with which a daemon ends; returns when it has ended."""
    from polythrottle.client import Gone
    from polythrottle.daemon.status import Happened

    with suppress(PolythrottleError):
        for each in client.follow(after):
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
        age_s = time.time() - datetime.fromisoformat(at).timestamp()
        return f"the control loop has not turned for {age_s:.0f} s" if age_s > _HUNG_S else ""
    return ""


def _lines(status: Any, show: Any) -> Iterator[tuple[str, str]]:
    from polythrottle.cli.texts import show_point
    from polythrottle.cli.topview import finetuning_words
    from polythrottle.space import OperatingPoint

    yield "phase", f"{status.phase}: {status.reason}"
    if status.workload is not None:
        up = "up" if status.workload.up else "not up"
        yield "workload", f"{status.workload.uri} ({up}), seen through {status.workload.traffic}"
        yield "profile", status.workload.profile or "none: it was never tuned"
        yield "SLO", ", ".join(status.workload.slo)
    yield "set", show_point(OperatingPoint(status.point)) if status.point else "as found"
    if status.rung is not None:
        yield "rung", f"{status.rung.number + 1} of {status.rung.of}, up to {status.rung.rate_per_s:.3g}/s"
    waiting = "–" if status.waiting is None else status.waiting
    yield "requests", "" if status.rate_per_s is None else f"{status.rate_per_s:.3g}/s, {waiting} waiting"
    yield "p99", "" if status.p99_s is None else f"{show(status.p99_s, 's')} (limit {show(status.limit_s, 's')})"
    yield "power", "" if status.power_w is None else f"{show(status.power_w, 'W')} ({status.energy_kind})"
    yield "heat", "" if status.temperature_c is None else f"{status.temperature_c:.1f} °C"
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
