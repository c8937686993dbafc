"""The commands of ``polythrottle``: each parses, calls, prints, and imports what is heavy only when it runs."""

import contextlib
import json
import math
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polythrottle.cli.benchmark import app as benchmarks
from polythrottle.cli.reproduce import app as reproductions
from polythrottle.errors import InvalidInput, PolythrottleError, SloUnmet, StorageError

if TYPE_CHECKING:
    from polythrottle.setup import Setup
    from polythrottle.space import Level

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

DeviceOption = Annotated[
    str, typer.Option("--device", "-d", metavar="URI", help="sim:<board>, replay:<table.csv>, cpu, or auto.")
]
WorkloadOption = Annotated[
    str | None,
    typer.Option(
        "--workload",
        "-w",
        metavar="URI",
        help="model.onnx, package.module:callable, cmd:<words>, or for a simulated board a name.",
    ),
]
KnobsOption = Annotated[
    str | None, typer.Option("--knobs", metavar="A,B", help="Device knobs to search; the others keep their default.")
]
BatchOption = Annotated[str | None, typer.Option("--batch", metavar="1,2,4", help="Batch sizes to search.")]
ThreadsOption = Annotated[str | None, typer.Option("--threads", metavar="1,2", help="Thread counts to search.")]
InputOption = Annotated[
    list[str] | None,
    typer.Option("--input", metavar="SHAPE", help="Shape of a model input without its batch: 3x224x224."),
]
TimeoutOption = Annotated[float, typer.Option("--timeout", metavar="S", help="When a cmd: is given up.")]
SecondsOption = Annotated[float | None, typer.Option("--seconds", metavar="S", help="Length of a trial at least; 2.")]
QueriesOption = Annotated[
    int | None, typer.Option("--queries", metavar="N", help="Queries per trial at least; 100, simulated 1000.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]


@app.callback(invoke_without_command=True)
def version(
    context: typer.Context,
    show: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Find the operating point that serves a model for the least energy within its latency limit."""
    if show:
        from polythrottle.api import polythrottle_version

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
        _print(listing(), as_json, print_listing)
    else:
        _print(details(device), as_json, print_details)


@app.command()
def tune(
    device: DeviceOption = "auto",
    workload: WorkloadOption = None,
    slo: Annotated[
        list[str] | None, typer.Option("--slo", metavar="SLO", help="p99<=25ms, mean<=1.2x, …; repeats.")
    ] = None,
    objective: Annotated[
        str | None, typer.Option("--objective", metavar="NAME", help="energy (default), edp or latency.")
    ] = None,
    pareto: Annotated[bool, typer.Option("--pareto", help="Search the whole front of latency and energy.")] = False,
    trials: Annotated[
        int | None, typer.Option("--trials", metavar="N", help="How many points to try at most; 30.")
    ] = None,
    minutes: Annotated[float | None, typer.Option("--minutes", metavar="M", help="How long to search at most.")] = None,
    joules: Annotated[
        float | None, typer.Option("--joules", metavar="J", help="Energy the search may use at most.")
    ] = None,
    horizon: Annotated[
        str | None,
        typer.Option("--horizon", metavar="30d", help="How long the answer is used: stop when trying costs more."),
    ] = None,
    early_stop: Annotated[
        bool | None,
        typer.Option(
            "--early-stop/--no-early-stop", help="Stop when next to nothing is left to save.", show_default=False
        ),
    ] = None,
    method: Annotated[str, typer.Option("--method", metavar="NAME", help="bayes, random, grid, paper, …")] = "bayes",
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Randomness of the method.")] = 0,
    risk: Annotated[
        float | None,
        typer.Option("--risk", metavar="R", help="Chance of breaking the SLO a trial may take; 0.05 in production."),
    ] = None,
    history: Annotated[
        list[Path] | None,
        typer.Option("--history", metavar="PATH", help="Journals, tables or folders to learn from; repeats."),
    ] = None,
    no_history: Annotated[bool, typer.Option("--no-history", help="Learn from no earlier study.")] = False,
    knobs: KnobsOption = None,
    batch: BatchOption = None,
    threads: ThreadsOption = None,
    inputs: InputOption = None,
    timeout: TimeoutOption = 60.0,
    seconds: SecondsOption = None,
    queries: QueriesOption = None,
    presets: Annotated[bool, typer.Option("--presets/--no-presets", help="Measure the device's presets too.")] = True,
    journal: Annotated[Path | None, typer.Option("--journal", metavar="FILE", help="Where the study is kept.")] = None,
    resume: Annotated[Path | None, typer.Option("--resume", metavar="FILE", help="Continue a journal alone.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over even if an unfinished study is there.")] = False,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Where the profile goes.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the operating point of least energy, or best by another objective, that holds the SLO.

    An unfinished study of the same problem is continued. Exit code 5 means that no tried point holds the SLO.
    """
    from polythrottle import api
    from polythrottle.cli.documents import tune_document
    from polythrottle.cli.live import LiveStudy
    from polythrottle.cli.texts import print_tuning

    with LiveStudy() as live, _own_stdout():
        if resume is not None:
            _refuse_beside_resume(
                objective,
                pareto or None,
                risk,
                history,
                no_history or None,
                None if device == "auto" else device,
                workload,
                slo,
                knobs,
                batch,
                threads,
                inputs,
                seconds,
                queries,
                journal,
                fresh or None,
            )
            tuning = api.resume(
                resume,
                trials=trials,
                minutes=minutes,
                joules=joules,
                horizon=horizon,
                early_stop=early_stop,
                out=out,
                watcher=live,
            )
        else:
            tuning = api.tune(
                slo=slo or [],
                objective=_objective(objective, pareto),
                trials=30 if trials is None else trials,
                minutes=minutes,
                joules=joules,
                horizon=horizon,
                early_stop=early_stop is not False,
                method=method,
                seed=seed,
                risk=risk,
                history=_history(history, no_history),
                setup=_setup(device, workload, knobs, batch, threads, inputs, timeout, seconds, queries),
                presets=presets,
                journal=journal,
                fresh=fresh,
                out=out,
                watcher=live,
            )
    _print(tuning, as_json, print_tuning, tune_document)
    for problem in tuning.unwritten:
        _complain(problem)
    if tuning.unmet:
        raise typer.Exit(_complain(tuning.unmet, SloUnmet.exit_code))
    if tuning.unwritten:
        raise typer.Exit(StorageError.exit_code)


@app.command()
def measure(
    device: DeviceOption = "auto",
    workload: WorkloadOption = None,
    point: Annotated[
        str | None, typer.Option("--point", metavar="K=V,…", help="gpu_max_mhz=900,batch_size=4; the rest at default.")
    ] = None,
    preset: Annotated[str | None, typer.Option("--preset", metavar="NAME", help="Start from a preset: MAXN, …")] = None,
    knobs: KnobsOption = None,
    batch: BatchOption = None,
    threads: ThreadsOption = None,
    inputs: InputOption = None,
    timeout: TimeoutOption = 60.0,
    seconds: SecondsOption = None,
    queries: QueriesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure latency and energy at one operating point."""
    from polythrottle import api
    from polythrottle.cli.documents import measure_document
    from polythrottle.cli.texts import print_measurement

    setup = _setup(device, workload, knobs, batch, threads, inputs, timeout, seconds, queries)
    with _own_stdout():
        where, measured = api.measure(point=_levels(point), preset=preset, setup=setup)
    _print((setup, where, measured), as_json, print_measurement, measure_document)


@app.command()
def sweep(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The replay table to write (.csv).")],
    device: DeviceOption = "auto",
    workload: WorkloadOption = None,
    knobs: KnobsOption = None,
    batch: BatchOption = None,
    threads: ThreadsOption = None,
    inputs: InputOption = None,
    timeout: TimeoutOption = 60.0,
    seconds: SecondsOption = None,
    queries: QueriesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure every point of the space and write a table that replay: can serve; continues a table it began."""
    from polythrottle.cli.documents import sweep_document
    from polythrottle.cli.live import LiveSweep
    from polythrottle.cli.texts import print_sweep
    from polythrottle.sweep import sweep as run_sweep

    setup = _setup(device, workload, knobs, batch, threads, inputs, timeout, seconds, queries)
    board, served = setup.open()
    with LiveSweep() as live, _own_stdout():
        swept = run_sweep(board, served, setup.window(board), out, live.advanced)
    _print(swept, as_json, print_sweep, sweep_document)


@app.command()
def report(
    journal: Annotated[Path, typer.Argument(metavar="JOURNAL", help="A study's journal.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="The HTML file to write.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Make one self-contained HTML page of a study: figures, the chosen point, every trial."""
    from polythrottle.api import report_facts, report_path
    from polythrottle.journal import read
    from polythrottle.report import write_report

    path = out or report_path(journal)
    write_report(read(journal), path, facts=report_facts(journal))
    _print({"report": str(path)}, as_json, lambda made: typer.echo(f"report  {made['report']}"))


@app.command()
def explain(
    journal: Annotated[Path, typer.Argument(metavar="JOURNAL", help="A study's journal, finished or not.")],
    as_json: JsonOption = False,
) -> None:
    """Say what binds at a study's best point, what each knob saved, and what another limit would buy."""
    from polythrottle.cli.explain import explain_document, print_explanation
    from polythrottle.explain import explain as explain_study
    from polythrottle.journal import read

    _print(explain_study(read(journal)), as_json, print_explanation, explain_document)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; every foreseeable failure becomes one line on standard error."""
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGHUP, _terminate)
    try:
        Path.cwd()
        code = app(args=list(arguments), standalone_mode=False)
    except PolythrottleError as error:
        return _complain(str(error), error.exit_code)
    except _UsageError as error:
        return _complain(f"{error.format_message().rstrip('.')}; polythrottle --help lists commands and options", 2)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        return 0
    except OSError as error:
        return _complain(f"{error.filename or 'standard output'}: {error.strerror}", StorageError.exit_code)
    if code == INTERRUPTED:  # typer returns it where it meets the interrupt itself
        _complain("interrupted; the device is restored and what was measured is kept")
    return code if isinstance(code, int) else 0


@contextlib.contextmanager
def _own_stdout() -> Iterator[None]:
    """Keep standard output for the answer: whatever a workload writes to it meanwhile goes to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _objective(name: str | None, pareto: bool) -> str:
    """Return the objective two options ask for; a front is asked for by its own option alone."""
    from polythrottle.problem import Objective

    if pareto and name not in (None, Objective.ENERGY, Objective.PARETO):
        raise InvalidInput(f"--pareto is a front of latency and energy; leave it or --objective {name} out")
    return str(Objective.PARETO if pareto else Objective.parse(name or Objective.ENERGY))


def _history(paths: list[Path] | None, none: bool) -> list[Path] | None:
    if paths and none:
        raise InvalidInput("--history and --no-history exclude each other; leave one out")
    return [] if none else paths or None


def _refuse_beside_resume(*given: object) -> None:
    if any(one is not None and one != [] for one in given):
        raise InvalidInput(
            "--resume takes everything from the journal; beside it only --trials, --minutes, --joules, --horizon, "
            "--no-early-stop, --out and --json count"
        )


def _terminate(number: int, frame: object) -> None:
    """Let a termination unwind like Ctrl-C, so that the device is restored."""
    raise KeyboardInterrupt


def _complain(text: str, code: int = 1) -> int:
    with contextlib.suppress(OSError):  # a full disk behind standard error
        typer.echo(f"polythrottle: {' '.join(text.split())}", err=True)
    return code


def _print(value: Any, as_json: bool, show: Any, document: Any = lambda value: value) -> None:
    if as_json:
        typer.echo(json.dumps(document(value), indent=2, allow_nan=False))
    else:
        show(value)


def _setup(
    device: str,
    workload: str | None,
    knobs: str | None,
    batch: str | None,
    threads: str | None,
    inputs: list[str] | None,
    timeout: float,
    seconds: float | None,
    queries: int | None,
) -> "Setup":
    from polythrottle.backends import find_device
    from polythrottle.setup import Setup
    from polythrottle.units import to_si

    if device == "auto":
        found = find_device()
        device = found.uri
        typer.echo(f"device {found.uri}: {found.explanation}", err=True)
    return Setup(
        device,
        workload,
        None if knobs is None else tuple(to_si(name.strip(), 1)[0] for name in knobs.split(",")),
        _counts("--batch", batch),
        _counts("--threads", threads),
        tuple(inputs or ()),
        timeout,
        queries,
        seconds,
    )


def _counts(option: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    words = text.split(",")
    if not all(word.strip().isdecimal() and len(word) < 10 and int(word) > 0 for word in words):
        raise InvalidInput(f"{option} takes whole numbers above zero such as 1,2,4, not {text[:40]!r}")
    return tuple(sorted({int(word) for word in words}))


def _levels(text: str | None) -> "dict[str, Level]":
    from polythrottle.units import to_si

    levels: dict[str, Level] = {}
    for part in filter(None, (text or "").split(",")):
        name, found, value = part.partition("=")
        if not (name and found and value):
            raise InvalidInput(f"{part!r} is not a level; write for example gpu_max_mhz=900,batch_size=4")
        try:
            key, level = to_si(name.strip(), float(value))
        except ValueError:
            levels[name.strip()] = value.strip()
            continue
        except OverflowError:
            level = math.inf
        if not math.isfinite(level):
            raise InvalidInput(f"{part!r} is not a finite level")
        levels[key] = int(level) if level == int(level) else level
    return levels


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
