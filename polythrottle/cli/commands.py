"""The commands of ``polythrottle``: each parses, calls, prints, and imports what is heavy only when it runs."""

import contextlib
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from polythrottle.cli.answers import answer, complain, own_stdout
from polythrottle.cli.apply import apply, restore
from polythrottle.cli.attributing import AttributeOption, Attributing
from polythrottle.cli.benchmark import app as benchmarks
from polythrottle.cli.calibrate import calibrate
from polythrottle.cli.cluster import app as clusters
from polythrottle.cli.comparing import RequireOption, check, run_comparison
from polythrottle.cli.daemon import app as daemons
from polythrottle.cli.doctor import doctor
from polythrottle.cli.finetune import app as finetunes
from polythrottle.cli.options import JsonOption, SetupOptions, levels, spread
from polythrottle.cli.profiling import profile_model
from polythrottle.cli.reproduce import app as reproductions
from polythrottle.cli.snapshot import snapshot
from polythrottle.cli.top import top
from polythrottle.cli.tuning import tune
from polythrottle.errors import InvalidInput, PolythrottleError, StorageError

INTERRUPTED = 130
_UsageError: type[Any] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="polythrottle",
    help="Find the operating point that serves a model for the least energy within its latency limit.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

app.add_typer(benchmarks, name="bench")
app.add_typer(reproductions, name="reproduce")
app.add_typer(daemons, name="daemon")
app.add_typer(finetunes, name="finetune")
app.add_typer(clusters, name="cluster")


@app.callback(invoke_without_command=True)
def version(
    context: typer.Context,
    show: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Find the operating point that serves a model for the least energy within its latency limit."""
    if show:
        from polythrottle.outcome import polythrottle_version

        typer.echo(f"polythrottle {polythrottle_version()}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())
    else:
        return
    raise typer.Exit


@app.command()
def devices(
    device: Annotated[
        str | None, typer.Argument(metavar="[URI]", help="Show one device with knobs and presets.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the devices that can be tuned here, and the models simulated boards can serve."""
    from polythrottle.cli.catalogue import details, listing, print_details, print_listing

    if device is None:
        answer(listing(), as_json, print_listing)
    else:
        answer(details(device), as_json, print_details)


app.command()(tune)
app.command()(doctor)
app.command()(calibrate)
app.command()(apply)
app.command()(restore)
app.command()(snapshot)
app.command()(top)
app.command()(profile_model)
app.command()(check)


@app.command()
@spread
def measure(
    setup: SetupOptions,
    sides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[A B]", help="Compare two in turns: profiles, presets or default.", show_default=False),
    ] = None,
    point: Annotated[
        str | None, typer.Option("--point", metavar="K=V,…", help="gpu_max_mhz=900,batch_size=4; the rest at default.")
    ] = None,
    preset: Annotated[str | None, typer.Option("--preset", metavar="NAME", help="Start from a preset: MAXN, …")] = None,
    attribute: AttributeOption = None,
    require: RequireOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure latency and energy at one operating point, or compare two in turns."""
    from polythrottle import api
    from polythrottle.cli.documents import measure_document
    from polythrottle.cli.texts import print_measurement

    if sides:
        _check_two_sides(point, preset, attribute)
        run_comparison(sides, setup, require, as_json)
        return
    if require:
        raise InvalidInput("--require belongs to a comparison, such as: polythrottle measure default profile.toml")
    words, table = setup.setup(), None if attribute is None else Attributing(attribute)
    kept = None if table is None else table.keep
    with own_stdout():
        where, measured = api.measure(point=levels(point), preset=preset, setup=words, told=complain, kept=kept)
    failed = None if table is None else table.written(measured)
    besides = {} if table is None else table.lines(measured)
    document = {} if table is None else table.document
    answer(
        (words, where, measured),
        as_json,
        lambda found: print_measurement(found, besides),
        lambda found: {**measure_document(found), **document},
    )
    if failed is not None:
        raise failed


def _check_two_sides(point: str | None, preset: str | None, attribute: Path | None) -> None:
    given = {"--point": point, "--preset": preset, "--attribute": attribute}
    if wrong := [option for option, value in given.items() if value is not None]:
        raise InvalidInput(f"a comparison of two sides takes no {wrong[0]}; its sides are profiles, presets or default")


@app.command()
@spread
def sweep(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The replay table to write (.csv).")],
    setup: SetupOptions,
    as_json: JsonOption = False,
) -> None:
    """Measure every point of the space and write a table that replay: can serve; continues a table it began."""
    from polythrottle.cli.documents import sweep_document
    from polythrottle.cli.live import LiveSweep
    from polythrottle.cli.texts import print_sweep
    from polythrottle.sweep import sweep as run_sweep

    words = setup.setup()
    board, served = words.open()
    with contextlib.closing(served), LiveSweep() as live, own_stdout():
        swept = run_sweep(board, served, words.window(board), out, live.advanced, words.traffic)
    answer(swept, as_json, print_sweep, sweep_document)


@app.command()
def report(
    journal: Annotated[Path, typer.Argument(metavar="JOURNAL", help="A study's journal.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="The HTML file to write.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Make one self-contained HTML page of a study: figures, the chosen point, every trial."""
    from polythrottle.journal import read
    from polythrottle.outcome import report_facts, report_path
    from polythrottle.report import write_report

    path = out or report_path(journal)
    write_report(read(journal), path, facts=report_facts(journal))
    answer({"report": str(path)}, as_json, lambda made: typer.echo(f"report  {made['report']}"))


@app.command()
def explain(
    journal: Annotated[Path, typer.Argument(metavar="JOURNAL", help="A study's journal, finished or not.")],
    as_json: JsonOption = False,
) -> None:
    """Say what binds at a study's best point, what each knob saved, and what another limit would buy."""
    from polythrottle.cli.explain import print_explanation
    from polythrottle.cli.explained import explain_document
    from polythrottle.explain import explain as explain_study
    from polythrottle.journal import read

    answer(explain_study(read(journal)), as_json, print_explanation, explain_document)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; every foreseeable failure becomes one line on standard error."""
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGHUP, _terminate)
    try:
        Path.cwd()
        code = app(args=list(arguments), standalone_mode=False)
    except PolythrottleError as error:
        return complain(str(error), error.exit_code)
    except _UsageError as error:
        return complain(f"{error.format_message().rstrip('.')}; polythrottle --help lists commands and options", 2)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        return 0
    except OSError as error:
        return complain(f"{error.filename or 'standard output'}: {error.strerror}", StorageError.exit_code)
    if code == INTERRUPTED:  # typer returns it where it meets the interrupt itself
        complain("interrupted; what was measured is kept")
    return code if isinstance(code, int) else 0


def _terminate(number: int, frame: object) -> None:
    """Let a termination unwind like Ctrl-C, so that the device is restored."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
