"""The commands of ``polythrottle``: each parses, calls, prints, and imports what is heavy only when it runs."""

import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polythrottle.cli.apply import apply, restore
from polythrottle.cli.boards import boards, study_host
from polythrottle.cli.cluster.commands import app as clusters
from polythrottle.cli.compare import AttributeOption, RequestTable, RequireOption, check, run_comparison
from polythrottle.cli.daemon import app as daemons
from polythrottle.cli.daemon import top
from polythrottle.cli.finetune import app as finetunes
from polythrottle.cli.inspect import calibrate, doctor, profile_model, snapshot
from polythrottle.cli.options import (
    BEGIN,
    BOARDS,
    KEEP,
    RESEARCH,
    RESULTS,
    TUNE,
    USE,
    BudgetOptions,
    CommandGroup,
    JsonOption,
    SetupOptions,
    StudyOptions,
    check_text,
    examples,
    given_options,
    levels,
    spread,
)
from polythrottle.cli.output import answer, complain, found_study, optional, own_stdout, say_which
from polythrottle.cli.proxy import proxy
from polythrottle.cli.reproduce import app as reproductions
from polythrottle.cli.search_benchmark import app as benchmarks
from polythrottle.domain.errors import INTERRUPTED, DeviceError, InvalidInput, PolythrottleError, SloUnmet, StorageError
from polythrottle.storage.paths import state_dir

if TYPE_CHECKING:
    from polythrottle.api.tuning_result import Tuning
    from polythrottle.tuning.setup import Setup

# `polythrottle demo` and `polythrottle examples`: what can be tried without a board, from an installed package too.

_DEVICE = "sim:jetson-agx-orin"
_WORKLOAD = "efficientnet-b4"
_SLO = "p99<=1.2x"
_ONE_TERMINATION_S = 5.0


def demo(
    folder: Annotated[
        Path, typer.Option("--folder", metavar="FOLDER", help="Where profile, journal and report go.")
    ] = Path("demo"),
    as_json: JsonOption = False,
) -> None:
    """Tune EfficientNet-B4 on a simulated Jetson AGX Orin, in seconds."""
    from polythrottle.api import search
    from polythrottle.api.progress import LiveStudy
    from polythrottle.cli.render.documents import tune_document
    from polythrottle.cli.render.text import print_tuning

    # Whoever tries the demonstration is to find all of it in one folder, and nothing of it among real studies.
    os.environ["POLYTHROTTLE_STATE_DIR"] = str(folder)
    with LiveStudy() as live, own_stdout():
        tuning = search.tune(_DEVICE, _WORKLOAD, _SLO, out=folder / "profile.toml", watcher=live)
    answer(tuning, as_json, print_tuning, tune_document)
    for problem in tuning.unwritten:
        complain(problem)
    if tuning.unmet:
        raise typer.Exit(complain(tuning.unmet, SloUnmet.exit_code))
    if tuning.unwritten:
        raise typer.Exit(StorageError.exit_code)


def lay_examples(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where they go.", show_default=False)] = Path(
        "examples"
    ),
    as_json: JsonOption = False,
) -> None:
    """Write the examples that come with polythrottle into ./examples, or into FOLDER; a file that is there stays."""
    written: list[str] = []
    kept: list[str] = []
    for source in sorted(path for path in _shipped().iterdir() if path.is_file()):
        target = folder / source.name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Mode x: a file that somebody has edited is never replaced, even by a second call at the same time.
            with target.open("xb") as file:
                file.write(source.read_bytes())
            written.append(str(target))
        except FileExistsError:
            if not folder.is_dir():
                raise StorageError(f"{folder} is no folder") from None
            kept.append(str(target))
        except OSError as err:
            raise StorageError(f"{target} cannot be written: {err.strerror}") from err
    answer({"written": written, "kept": kept}, as_json, _print_examples)


def _print_examples(found: dict[str, list[str]]) -> None:
    for path in found["written"]:
        typer.echo(path)
    if found["kept"]:
        typer.echo(f"{len(found['kept'])} that were there are left as they are")


def _shipped() -> Path:
    """Return the folder of the examples: in an installed package, or beside it in a checkout.

    Raises:
        StorageError: If this installation has none.
    """
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "shipped" / "examples", package.parent / "examples"):
        if folder.is_dir():
            return folder
    raise StorageError("this installation lacks the examples; take them from the source of this version")


# `polythrottle tune`: begin a study, or continue one.


@spread
def tune(
    context: typer.Context,
    setup: SetupOptions,
    study: StudyOptions,
    budget: BudgetOptions,
    resume: Annotated[Path | None, typer.Option("--resume", metavar="FILE", help="Continue a journal alone.")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Where the profile goes.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a profile that is better than the answer.")] = False,
    sure: Annotated[
        bool, typer.Option("--yes", "-y", help="Ask nothing: take a limit that looks as if its unit were wrong.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Find the operating point of least energy, or best by another objective, that holds the SLO.

    An unfinished study of the same problem is continued. Boards of one kind, named with commas between them, search
    together: a trial at a time on each, and the answer holds on all of them. Exit code 5 means that no tried point
    holds the SLO.
    """
    from polythrottle.cli.render.documents import tune_document
    from polythrottle.cli.render.text import print_tuning

    if resume is not None and (fixed := given_options(context, SetupOptions, StudyOptions) - {"--device"}):
        raise InvalidInput(
            f"--resume takes everything from the journal; leave {min(fixed)} out: beside it only --trials, --minutes, "
            "--joules, --horizon, --no-early-stop, --out, --force, --json and the journal's own --device count"
        )
    check_text(context)
    for name in study.as_prior or ():
        say_which(name)
    budget.check()
    if resume is None:
        tuning = _begun(setup, study, budget, out, force, sure)
    else:
        # What the option says by default nobody has named.
        device = None if setup.device == "auto" else setup.device
        tuning = _continued(resume, device, budget, out, force)
    answer(tuning, as_json, print_tuning, tune_document)
    for problem, again in tuning.written_again():
        complain(f"{problem}; nothing is lost: {shlex.join(again)} writes it elsewhere")
    if tuning.unmet:
        raise typer.Exit(complain(tuning.unmet, SloUnmet.exit_code))
    if tuning.unwritten:
        raise typer.Exit(StorageError.exit_code)


def _begun(
    setup: SetupOptions, study: StudyOptions, budget: BudgetOptions, out: Path | None, force: bool, sure: bool
) -> "Tuning":
    from polythrottle.api import search
    from polythrottle.api.progress import LiveStudy, resume_with

    confirm = None
    if not sure:
        # On standard error: standard output is the answer's, and may go into a file.
        confirm = partial(typer.confirm, err=True)
    with LiveStudy(confirm, partial(resume_with, device=setup.device, out=out)) as live, own_stdout():
        return search.tune(
            setup=setup.setup(),
            trials=30 if budget.trials is None else budget.trials,
            minutes=budget.minutes,
            joules=budget.joules,
            horizon=budget.horizon,
            # Not given is None here, which a study that is resumed takes for "as it was planned".
            early_stop=budget.early_stop is not False,
            out=out,
            force=force,
            watcher=live,
            **study.words(),
        )


def _continued(journal: Path, device: str | None, budget: BudgetOptions, out: Path | None, force: bool) -> "Tuning":
    from polythrottle.api import search
    from polythrottle.api.progress import LiveStudy, resume_with

    with LiveStudy(to_go_on=partial(resume_with, device=device, out=out)) as live, own_stdout():
        return search.resume(journal, device, out=out, force=force, watcher=live, **vars(budget))


# The commands of ``polythrottle``: each parses, calls, prints, and imports what is heavy only when it runs.

_STUDY = "A study's journal, finished or not, its profile, or <device>/<workload> for the newest."
_KINDS = {"integer": "it takes a whole number", "number": "it takes a number"}
# typer brings a click of its own in newer versions; its base class is reached through what typer exports.
_UsageError: type[Any] = typer.BadParameter.__mro__[1]

_CODES = """

\b
Exit codes: 0 done, 2 malformed words, 3 unknown name, 4 bad file, 5 no point
holds the limit, 6 device out of reach, 7 trial spoilt, 8 result not written,
9 claim not shown, 130 interrupted."""

app = typer.Typer(
    name="polythrottle",
    cls=CommandGroup,
    help="Find the operating point that serves a model for the least energy within its latency limit.",
    epilog=examples(
        "polythrottle tune -d sim:jetson-orin-nano -w resnet50 --slo 'p99<=50ms'",
        "polythrottle tune --help",
    )
    + _CODES,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def version(
    context: typer.Context,
    show: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Find the operating point that serves a model for the least energy within its latency limit."""
    if show:
        from polythrottle.api.tuning_result import polythrottle_version

        typer.echo(f"polythrottle {polythrottle_version()}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())
    else:
        return
    raise typer.Exit


app.command(
    rich_help_panel=BEGIN,
    short_help="Tune a model on a simulated Jetson, in seconds.",
    epilog=examples("polythrottle demo"),
)(demo)


@app.command(
    rich_help_panel=BEGIN,
    short_help="List what can be tuned here: devices, boards, models.",
    epilog=examples("polythrottle devices sim:jetson-orin-nano"),
)
def devices(
    device: Annotated[str | None, typer.Argument(metavar="URI", help="Show one device with knobs and presets.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the devices that can be tuned here, and the models simulated boards can serve."""
    from polythrottle.cli.render.devices import details, listing, print_details, print_listing

    if device is None:
        answer(listing(), as_json, print_listing)
    else:
        answer(details(device), as_json, print_details)


app.command(
    rich_help_panel=BEGIN,
    short_help="Say what works on this machine and what does not, and why.",
    epilog=examples("polythrottle doctor --device cpu"),
)(doctor)
app.command(
    "examples",
    rich_help_panel=BEGIN,
    short_help="Write the examples that come with this program.",
    epilog=examples("polythrottle examples"),
)(lay_examples)
app.command(
    rich_help_panel=TUNE,
    short_help="Find the operating point of least energy that holds the SLO.",
    epilog=examples(
        "polythrottle tune -d sim:jetson-orin-nano -w resnet50 --slo 'p99<=50ms' \\\n"
        "  --journal study.jsonl --out profile.toml",
        "polythrottle tune -w resnet50 --slo 'p99<=50ms' \\\n"
        "  -d 'sim:jetson-orin-nano?seed=1,sim:jetson-orin-nano?seed=2'",
    ),
)(tune)


@app.command(
    rich_help_panel=TUNE,
    short_help="Measure one operating point, or compare two.",
    epilog=examples("polythrottle measure -d sim:jetson-nano -w resnet50 --point gpu_max_mhz=384"),
)
@spread
def measure(
    setup: SetupOptions,
    sides: Annotated[
        list[str] | None,
        typer.Argument(metavar="A B", help="Compare two in turns: profiles, presets or default.", show_default=False),
    ] = None,
    point: Annotated[
        str | None, typer.Option("--point", metavar="K=V,…", help="gpu_max_mhz=900,batch_size=4; the rest at default.")
    ] = None,
    preset: Annotated[str | None, typer.Option("--preset", metavar="NAME", help="Start from a preset: MAXN, …")] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option("--slo", metavar="SLO", help="Limits to judge it by, and requests to count; repeats."),
    ] = None,
    attribute: AttributeOption = None,
    require: RequireOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure latency and energy at one operating point, or compare two in turns."""
    if sides:
        _check_two_sides(point, preset, slo, attribute)
        run_comparison(sides, setup, require, as_json)
        return
    if require:
        raise InvalidInput("--require belongs to a comparison, such as: polythrottle measure default profile.toml")
    _measure_one(setup.setup(), point, preset, slo or (), attribute, as_json)


def _measure_one(
    words: "Setup",
    point: str | None,
    preset: str | None,
    slo: Sequence[str],
    attribute: Path | None,
    as_json: bool,
) -> None:
    """Measure one operating point, and answer with that."""
    from polythrottle.api import search
    from polythrottle.api.experiments import absolute_limits
    from polythrottle.cli.render.documents import measure_document
    from polythrottle.cli.render.text import print_measurement

    limits = absolute_limits(slo)
    table = optional(RequestTable, attribute)
    kept = optional(attrgetter("keep"), table)
    with own_stdout():
        where, measured = search.measure(
            point=levels(point), preset=preset, slo=slo, setup=words, told=complain, kept=kept
        )
    failed = None
    besides: dict[str, str] = {}
    document: dict[str, Any] = {}
    if table is not None:
        failed = table.written(measured)
        besides = table.lines(measured)
        document = table.document
    answer(
        (words, where, measured),
        as_json,
        lambda found: print_measurement(found, limits, besides),
        lambda found: {**measure_document(found, limits), **document},
    )
    # Raised last: the measurement is answered even where its table cannot be kept.
    if failed is not None:
        raise failed


def _check_two_sides(point: str | None, preset: str | None, slo: list[str] | None, attribute: Path | None) -> None:
    given = {"--point": point, "--preset": preset, "--slo": slo or None, "--attribute": attribute}
    if wrong := [option for option, value in given.items() if value is not None]:
        raise InvalidInput(f"a comparison of two sides takes no {wrong[0]}; its sides are profiles, presets or default")


@app.command(
    rich_help_panel=TUNE,
    short_help="Measure every operating point into a table.",
    epilog=examples("polythrottle sweep -d sim:jetson-orin-nano -w resnet50 --knobs gpu_max_mhz \\\n  --out sweep.csv"),
)
@spread
def sweep(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The replay table to write, as .csv or .parquet.")],
    setup: SetupOptions,
    as_json: JsonOption = False,
) -> None:
    """Measure every point of the space and write a table that replay: can serve; continues a table it began."""
    from polythrottle.api.experiments import swept as run_sweep
    from polythrottle.api.progress import LiveSweep
    from polythrottle.cli.render.documents import sweep_document
    from polythrottle.cli.render.text import print_sweep

    words = setup.setup()
    with LiveSweep() as live, own_stdout():
        swept = run_sweep(words, out, advanced=live.advanced)
    answer(swept, as_json, print_sweep, sweep_document)


app.command(
    rich_help_panel=TUNE,
    short_help="Measure a profile's point again and compare.",
    epilog=examples("polythrottle check profile.toml"),
)(check)
app.command(
    rich_help_panel=USE,
    short_help="Set the device as a profile says; reverts unless confirmed.",
    epilog=examples("polythrottle apply profile.toml"),
)(apply)
app.command(
    rich_help_panel=USE,
    short_help="Put back everything that was changed on the device.",
    epilog=examples("polythrottle restore"),
)(restore)


@app.command(
    rich_help_panel=RESULTS,
    short_help="Write a study as one self-contained HTML page.",
    epilog=examples("polythrottle report study.jsonl --out study.html"),
)
def report(
    study: Annotated[str, typer.Argument(metavar="STUDY", help=_STUDY)],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="The HTML file to write.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Make one self-contained HTML page of a study: figures, the chosen point, every trial."""
    from polythrottle.api.tuning_result import boards_told, profile_of, read_study, report_facts, report_path
    from polythrottle.report import write_report

    journal = found_study(study)
    path = out or report_path(journal)
    facts, boards = report_facts(journal), boards_told(journal)
    write_report(read_study(journal), path, facts=facts, profile=profile_of(journal), boards=boards)
    answer({"report": str(path)}, as_json, lambda made: typer.echo(f"report  {made['report']}"))


@app.command(
    rich_help_panel=RESULTS,
    short_help="Say why the answer is what it is, and what limits it.",
    epilog=examples("polythrottle explain study.jsonl"),
)
def explain(
    study: Annotated[str, typer.Argument(metavar="STUDY", help=_STUDY)],
    as_json: JsonOption = False,
) -> None:
    """Say what binds at a study's best point, what each knob saved, and what another limit would buy."""
    from polythrottle.api import search as api
    from polythrottle.cli.render.explanation import explain_document, print_explanation

    answer(api.explain(found_study(study)), as_json, print_explanation, explain_document)


app.add_typer(
    daemons, name="daemon", rich_help_panel=KEEP, short_help="Follow load, heat and drift with a tuned profile."
)
app.command(rich_help_panel=KEEP, short_help="Watch the daemon in the terminal.", epilog=examples("polythrottle top"))(
    top
)
app.command(
    rich_help_panel=KEEP,
    short_help="Bound the requests in flight at a language model's server.",
    epilog=examples("polythrottle proxy http://127.0.0.1:8000 --in-flight 16"),
)(proxy)
app.add_typer(finetunes, name="finetune", rich_help_panel=KEEP, short_help="Fine-tune a model beside its inference.")
app.add_typer(
    clusters, name="cluster", rich_help_panel=KEEP, short_help="Train on machines that can be taken away (spot)."
)
app.command(
    "study-host",
    rich_help_panel=BOARDS,
    short_help="Make the studies of boards' daemons here.",
    epilog=examples("polythrottle study-host --socket daemon.sock"),
)(study_host)
app.command(
    rich_help_panel=BOARDS,
    short_help="List, group and watch many boards at once.",
    epilog=examples("polythrottle boards sim:jetson-nano,sim:jetson-orin-nano"),
)(boards)
app.command(
    rich_help_panel=BOARDS,
    short_help="Describe a model of your own for simulated boards.",
    epilog=examples("polythrottle profile-model examples.own_torch_model:model --out own.toml"),
)(profile_model)
app.command(
    rich_help_panel=BOARDS,
    short_help="Test a device's energy reading, or fit it to a meter.",
    epilog=examples("polythrottle calibrate --device cpu --seconds 10"),
)(calibrate)
app.command(
    rich_help_panel=BOARDS,
    short_help="Write what a bug report needs to know of this board.",
    epilog=examples("polythrottle snapshot --device cpu --out board.tar.gz"),
)(snapshot)
app.add_typer(benchmarks, name="bench", rich_help_panel=RESEARCH)
app.add_typer(reproductions, name="reproduce", rich_help_panel=RESEARCH)


def _check_folder(arguments: Sequence[str]) -> None:
    """Refuse to work in a folder that was removed, in one line and not deep inside a study; but restore all the same.

    Raises:
        StorageError: If it was.
    """
    with suppress(OSError):
        Path.cwd()
        return
    if arguments[:1] == ["restore"]:
        with suppress(OSError):
            state_dir()  # which is nowhere if it lies beside a folder that is not there
            # Anywhere that is there: records of what stands changed have whole paths.
            os.chdir("/")
            return
    raise StorageError("the working folder was removed; change into another")


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; every foreseeable failure becomes one line on standard error."""
    # A service manager ends with SIGTERM and a lost SSH session with SIGHUP; either must restore the device.
    terminate = _terminator()
    signal.signal(signal.SIGTERM, terminate)
    signal.signal(signal.SIGHUP, terminate)
    try:
        _check_folder(arguments)
        # Not standalone, for click would print errors in words and end with codes of its own.
        code = app(args=list(arguments), prog_name="polythrottle", standalone_mode=False)
    except PolythrottleError as error:
        return complain(str(error), error.exit_code)
    except _UsageError as error:
        return complain(_usage(error), 2)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except (BrokenPipeError, SystemExit):  # whoever read the output has gone; typer leaves by SystemExit then
        return 0
    except ImportError as error:
        missing = f"{(error.name or 'a package').partition('.')[0]} cannot be imported ({error})"
        return complain(f"{missing}; install it again with pip", DeviceError.exit_code)
    except OSError as error:
        if error.strerror:
            words = f"{error.filename or 'standard output'}: {error.strerror}"
        else:
            words = str(error)
        return complain(words, StorageError.exit_code)
    if code == INTERRUPTED:  # typer returns it where it meets the interrupt itself
        complain("interrupted")
    if isinstance(code, int):
        return code
    return 0


def _usage(error: Any) -> str:
    """Return what was wrong with the words of a command line, and which help page lists the right ones."""
    text = re.sub(
        r"Input should be a valid (integer|number), unable to parse string as an? \w+",
        lambda match: _KINDS[match[1]],
        error.format_message().rstrip("."),
    )
    if error.ctx is None:
        command = "polythrottle"
    else:
        command = error.ctx.command_path
    between = " " if text.endswith("?") else "; "
    return f"{text}{between}{command} --help lists what there is"


def _terminator() -> Callable[[int, object], None]:
    """Return what lets a termination unwind like Ctrl-C, so that the device is restored."""
    quiet_until_s = 0.0

    def terminate(number: int, frame: object) -> None:
        nonlocal quiet_until_s
        # `timeout` signals its child and then the group: the second must not break off the restoring.
        if time.monotonic() >= quiet_until_s:
            quiet_until_s = time.monotonic() + _ONE_TERMINATION_S
            raise KeyboardInterrupt

    return terminate


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
