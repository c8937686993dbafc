"""`polythrottle bench`: how good the search methods are, on subjects whose optimum is known."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polythrottle.cli.options import (
    CommandGroup,
    JsonOption,
    OptionGroup,
    check_count,
    examples,
    knob_names,
    share,
    spread,
)
from polythrottle.cli.output import answer, formatted, grid
from polythrottle.domain.errors import InvalidInput

if TYPE_CHECKING:
    from polythrottle.lab.bench import Record, Source, Summary, WholeSearch, WholeSummary

app = typer.Typer(cls=CommandGroup, help="Compare search methods where the optimum is known.", rich_markup_mode=None)
_TRIALS = 40
_FACTORS = ("mean<=1.2x", "mean<=1.5x", "mean<=2x")
_HEADINGS = ("within 5 %", "trials", "÷ paper", "÷ Optuna", "broken", "late", "regret", "ms")
_NOTES = """\
trials: geometric mean to within 5 % of the best feasible point; if it was not
reached 45, or an eighth more than allowed; ÷: their ratios, with 95 % interval;
*: the one to Optuna excludes 1; broken: mean trials before that broke the SLO;
late: runs that broke it once two feasible points were known; regret: at the
end; ms: median suggestion"""

_WHOLE_HEADINGS = ("≤ 2 %", "≤ 5 %", "breaks", "worst", "saves", "of", "trials", "broke", "stray", "items", "kept")
_WHOLE_NOTES = """\
≤ 2 %, ≤ 5 %: answers that hold and take at most so much more than the best
feasible point; breaks: answers that truly break the SLO; worst: of the answers
that hold, how much more than the best; saves: of the default's energy, of what
the best point saves; trials; broke: those that broke the SLO; stray: searches
with one once a point was known that holds; items: those served in trials that
broke it; kept: of ends that said how much is left to save at most, those at
which no more was left"""


@app.callback()
def bench() -> None:
    """Compare search methods where the optimum is known."""


@dataclass(frozen=True)
class SubjectOptions(OptionGroup):
    """What is searched: recorded tables, simulated boards, or both."""

    tables: Annotated[
        list[str] | None,
        typer.Option("--tables", metavar="DIR|GLOB", help="A folder, file or pattern of tables; repeats."),
    ] = None
    devices: Annotated[
        list[str] | None, typer.Option("--devices", metavar="URI,URI", help="Simulated boards; repeats.")
    ] = None
    workloads: Annotated[
        str | None, typer.Option("--workloads", metavar="A,B", help="What the boards serve; the paper's models.")
    ] = None
    knobs: Annotated[
        str | None, typer.Option("--knobs", metavar="A,B", help="What is searched on the boards; their own choice.")
    ] = None
    skip: Annotated[str | None, typer.Option("--skip", metavar="TEXT", help="Leave out tables so named.")] = None

    def sources(self) -> "list[Source]":
        """Return every subject they name.

        Raises:
            InvalidInput: If they name none.
        """
        found = [*_tables(self.tables or [], self.skip), *_boards(self.devices or [], self.workloads, self.knobs)]
        if not found:
            raise InvalidInput("nothing to search: give --tables or --devices (and see that --skip leaves some)")
        return found


@dataclass(frozen=True)
class RuleOptions(OptionGroup):
    """Who searches, and under which rules."""

    methods: Annotated[
        str, typer.Option("--methods", metavar="A,B", help="Who searches; bayes+cold, bayes@0.05 too.")
    ] = "paper,bayes"
    seeds: Annotated[int, typer.Option("--seeds", metavar="N", help="How many seeds.")] = 5
    slo: Annotated[list[str] | None, typer.Option("--slo", metavar="SLO", help="Each a problem of its own.")] = None
    trials: Annotated[
        int | None, typer.Option("--trials", metavar="N", help="Trials per search; 40, with --whole 30 at most.")
    ] = None
    history: Annotated[
        str | None, typer.Option("--history", metavar="DIR|GLOB|leave-one-out", help="Earlier studies to learn from.")
    ] = None
    risk: Annotated[
        str | None,
        typer.Option("--risk", metavar="R", help="Chance that a search breaks the SLO, for those who heed it."),
    ] = None
    until: Annotated[
        str | None, typer.Option("--until", metavar="5%", help="End a search there; for a quick look.")
    ] = None
    jobs: Annotated[int, typer.Option("--jobs", metavar="N", help="Processes; one per processor by default.")] = 0
    whole: Annotated[
        bool, typer.Option("--whole", help="Search as `tune` does, each to its own end, and judge its answer.")
    ] = False

    def records(self, sources: "Sequence[Source]") -> "list[Record]":
        """Search every subject, and return how each search went; says what was asked for in vain."""
        from polythrottle.api.progress import LiveSweep
        from polythrottle.lab import bench

        methods = self._methods()
        with LiveSweep("searching") as live:
            found = bench.run(
                sources,
                self.slo or _FACTORS,
                methods,
                self.seeds,
                _TRIALS if self.trials is None else self.trials,
                self._processes,
                live.counted,
                history=self.history,
                risk=self._chance,
                until=share("--until", self.until, "5%"),
            )
        self._say_who_learnt(found)
        return found

    def whole_searches(self, sources: "Sequence[Source]") -> "list[WholeSearch]":
        """Search every subject as `tune` does, and return what came of it; says what was asked for in vain."""
        from polythrottle.api.progress import LiveSweep
        from polythrottle.lab import bench

        methods = self._methods()
        rules = bench.Rules(bench.WHOLE_TRIALS if self.trials is None else self.trials, self.history, self._chance)
        with LiveSweep("searching") as live:
            slos = self.slo or _FACTORS
            processes = self._processes
            found = bench.run_whole(sources, slos, methods, self.seeds, rules, processes, live.counted)
        self._say_who_learnt(found)
        return found

    @property
    def _chance(self) -> float | None:
        return share("--risk", self.risk, "0.05 or 5%")

    @property
    def _processes(self) -> int:
        # The processors this process may use, which a container or taskset makes fewer than the machine has.
        return self.jobs or len(os.sched_getaffinity(0))

    def _methods(self) -> list[str]:
        """Return who takes part, once what else was said has been looked at."""
        methods = self.methods.split(",")
        check_count("--seeds", self.seeds, 1)
        check_count("--jobs", self.jobs, 0)
        if self.trials is not None:
            check_count("--trials", self.trials, 1)
        if self.history is not None:
            _check_named("--history", self.history)
        self._say_who_heeds_no_risk(methods)
        return methods

    def _say_who_learnt(self, found: "Sequence[Record | WholeSearch]") -> None:
        if self.history is not None and not any(one.history for one in found):
            typer.echo("no method learnt from history: these subjects have none, or no method uses it", err=True)

    def _say_who_heeds_no_risk(self, methods: "Sequence[str]") -> None:
        from polythrottle.lab.bench import entrants

        deaf = [one.label for one in entrants(methods) if not one.learns]
        if self.risk is not None and deaf:
            typer.echo(f"--risk {self._chance:g} has no effect on {', '.join(deaf)}: it cannot be set there", err=True)


@app.command(
    short_help="Count the trials that each search method needs.",
    epilog=examples(
        "polythrottle bench search --tables examples/cpu-convnet-sweep.csv \\\n  --methods random,paper --seeds 2"
    ),
)
@spread
def search(
    subjects: SubjectOptions,
    rules: RuleOptions,
    figure: Annotated[
        Path | None, typer.Option("--figure", metavar="FILE", help="Draw it, as .png, .svg or .pdf.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Keep a row for each search, as .csv or .parquet.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Count the trials each method needs to come within 5 % of the best feasible point.

    Subjects are recorded tables and simulated boards. What a method visits is judged by the truth there: what the table
    records, or what the simulator computes without noise. With --whole each searches to its own end instead, as `tune`
    does, and its answer is judged.
    """
    from polythrottle.lab import bench
    from polythrottle.storage.atomic_file import check_new
    from polythrottle.storage.tables import check_writable, write

    sources = subjects.sources()
    if figure is not None:
        _check_figure(figure)
        check_new(figure, "--figure")
    if out is not None:
        check_writable(out)
        check_new(out, "--out")
    if rules.whole:
        _check_whole(rules.until, figure)
        searches = rules.whole_searches(sources)
        if out is not None:
            write(bench.whole_dataframe(searches), out)
        answer(searches, as_json, _print_whole, bench.whole_document)
        return
    records = rules.records(sources)
    if out is not None:
        write(bench.to_dataframe(records), out)
    answer(records, as_json, _print, bench.document)
    if figure is not None:
        _draw(records, figure)


def _tables(patterns: Sequence[str], skip: str | None) -> "list[Source]":
    from polythrottle.lab import bench

    _check_named("--tables", *patterns)
    # Each once: a folder and a pattern may name the same table.
    paths = dict.fromkeys(path for one in patterns for path in bench.tables(one) if not skip or skip not in path.name)
    return [bench.TableFile(path) for path in paths]


def _boards(devices: Sequence[str], workloads: str | None, knobs: str | None) -> "list[Source]":
    from polythrottle.lab import bench

    uris = [uri for text in devices for uri in bench.device_uris(text)]
    if not uris and (workloads is not None or knobs is not None):
        raise InvalidInput("--workloads and --knobs belong to simulated boards; name them with --devices")
    served = bench.WORKLOADS if workloads is None else _words("--workloads", workloads)
    return [*bench.simulations(uris, served, knob_names(knobs))]


def _words(option: str, text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise InvalidInput(f"{option} takes names with a comma between, not {text[:40]!r}")
    return words


def _check_named(option: str, *paths: str) -> None:
    if not all(path.strip() for path in paths):
        raise InvalidInput(f"{option} needs a name; . is the current folder")


def _check_whole(until: str | None, figure: Path | None) -> None:
    if until is not None:
        raise InvalidInput("--whole searches to its own end, and --until ends a search: leave one out")
    if figure is not None:
        raise InvalidInput("--figure draws regret over trials; with --whole, keep --out and draw from that")


def _check_figure(path: Path) -> None:
    from polythrottle.cli.render.figures import check_figure

    check_figure(path)


def _draw(records: "list[Record]", path: Path) -> None:
    from polythrottle.cli.render.figures import write_race
    from polythrottle.lab import bench

    subjects = len({record.table for record in records})
    simulated = sum(name.startswith("sim:") for name in {record.table for record in records})
    if not simulated:
        kind = ""
    else:
        kind = " (simulated)" if simulated == subjects else f" ({simulated} simulated)"
    slos = ", ".join(dict.fromkeys(record.slo for record in records))
    write_race(bench.runners(records), path, f"{subjects} subjects{kind}, {slos}")


def _print(records: "list[Record]") -> None:
    """Print a table per group of records."""
    from polythrottle.lab import bench

    found = ((name, bench.summarise(some)) for name, some in bench.groups(records))
    groups = ((name, some[0].runs, [_cells(one) for one in some]) for name, some in found)
    _print_tables(_HEADINGS, groups, _NOTES)


def _print_whole(searches: "list[WholeSearch]") -> None:
    """Print a table per group of whole searches."""
    from polythrottle.lab import bench

    found = ((name, bench.summarise_whole(some)) for name, some in bench.groups(searches))
    groups = ((name, some[0].runs, [_whole_cells(one) for one in some]) for name, some in found)
    _print_tables(_WHOLE_HEADINGS, groups, _WHOLE_NOTES)


def _print_tables(
    headings: Sequence[str], groups: "Iterable[tuple[str, int, Iterable[Sequence[str]]]]", notes: str
) -> None:
    """Print a table for each group, of a name, how many runs each method made, and a row a method; then the notes."""
    from polythrottle.cli.render.console import Unpadded, plain_console

    console = plain_console()
    for name, runs, rows in groups:
        simulated = " (simulated)" if name == "sim" else ""
        title = f"{name}{simulated}: {runs} run{'s' * (runs != 1)} each"
        table = grid(title, ("method", *headings), 1, folded=(0,))
        for row in rows:
            table.add_row(*row)
        console.print(Unpadded(table))
        console.print()
    console.print(notes)


def _cells(summary: "Summary") -> tuple[str, ...]:
    return (
        summary.method,
        f"{summary.share_within_5pct:.0%}",
        f"{summary.trials_to_5pct:.1f}",
        _ratio(summary),
        _to_optuna(summary),
        f"{summary.infeasible_before_5pct:.1f}",
        f"{summary.share_broken_after_two:.0%}",
        formatted(summary.final_regret, "{:.1%}", "–"),
        f"{summary.suggest_seconds * 1e3:.0f}",
    )


def _whole_cells(summary: "WholeSummary") -> tuple[str, ...]:
    return (
        summary.method,
        f"{summary.within_2pct:.0%}",
        f"{summary.within_5pct:.0%}",
        f"{summary.broken:.0%}",
        formatted(summary.worst, "{:+.0%}", "–"),
        f"{summary.saved:.1%}",
        f"{summary.to_save:.1%}",
        f"{summary.trials:.1f}",
        f"{summary.infeasible:.1f}",
        formatted(summary.strayed, "{:.0%}", "–"),
        f"{summary.items_beyond:,.0f}",
        formatted(summary.promise_kept, "{:.0%}", "–"),
    )


def _ratio(summary: "Summary") -> str:
    if summary.ratio_to_paper is None or summary.ratio_interval is None:
        return "–"
    if summary.method == "paper":
        return "1"
    return "{:.2f} [{:.2f}, {:.2f}]".format(summary.ratio_to_paper, *summary.ratio_interval)


def _to_optuna(summary: "Summary") -> str:
    if summary.ratio_to_optuna is None or summary.optuna_interval is None:
        return "–"
    low, high = summary.optuna_interval
    return f"{summary.ratio_to_optuna:.2f}{'*' if high < 1.0 or low > 1.0 else ''}"
