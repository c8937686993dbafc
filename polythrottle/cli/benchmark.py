"""`polythrottle bench`: how good the search methods are, on tables whose optimum is known."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from polythrottle.bench import Record, Summary

app = typer.Typer(help="Compare search methods where the optimum is known.", rich_markup_mode=None)


@app.callback()
def bench() -> None:
    """Compare search methods where the optimum is known."""


@app.command()
def search(
    tables: Annotated[
        list[str], typer.Option("--tables", metavar="DIR|GLOB", help="A folder, file or pattern of tables; repeats.")
    ],
    methods: Annotated[
        str, typer.Option("--methods", metavar="A,B", help="Search methods to compare.")
    ] = "paper,bayes",
    seeds: Annotated[int, typer.Option("--seeds", metavar="N", help="How many seeds.")] = 5,
    slo: Annotated[list[str] | None, typer.Option("--slo", metavar="SLO", help="Each a problem of its own.")] = None,
    trials: Annotated[int, typer.Option("--trials", metavar="N", help="Trials per search.")] = 40,
    skip: Annotated[str | None, typer.Option("--skip", metavar="TEXT", help="Leave out tables so named.")] = None,
    jobs: Annotated[int, typer.Option("--jobs", metavar="N", help="Processes; one per processor by default.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Count the trials each method needs to come within 5 % of the best feasible row of recorded tables."""
    import json

    from polythrottle import bench
    from polythrottle.cli.live import LiveSweep

    paths = [path for one in tables for path in bench.tables(one) if not skip or skip not in path.name]
    slos = slo or ["mean<=1.2x", "mean<=1.5x", "mean<=2x"]
    names = [name.strip() for name in methods.split(",")]
    with LiveSweep("searching") as live:
        records = bench.run(paths, slos, names, seeds, trials, jobs or len(os.sched_getaffinity(0)), live.counted)
    if as_json:
        typer.echo(json.dumps(bench.document(records), indent=2, allow_nan=False))
    else:
        _print(records)


def _print(records: "list[Record]") -> None:
    """Print a table per group of records."""
    from rich.console import Console
    from rich.table import Table

    from polythrottle import bench

    console = Console(highlight=False, markup=False)
    for name, some in bench.groups(records):
        grid = Table(box=None, padding=(0, 1), header_style="dim", title=f"{name}", title_justify="left")
        for heading in ("method", "runs", "within 5 %", "trials", "÷ paper", "broken", "regret", "ms"):
            grid.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
        for summary in bench.summarise(some):
            grid.add_row(*_cells(summary))
        console.print(grid)
        console.print()
    console.print("trials: geometric mean to within 5 % of the best feasible row; not reached: 45 or more")
    console.print("broken: mean trials before that broke the SLO; regret: at the end; ms: median suggestion")


def _cells(summary: "Summary") -> tuple[str, ...]:
    ratio = "–" if summary.ratio_to_paper is None else f"{summary.ratio_to_paper:.2f}"
    if summary.ratio_interval is not None and summary.method != "paper":
        ratio += " [{:.2f}, {:.2f}]".format(*summary.ratio_interval)
    return (
        summary.method,
        str(summary.runs),
        f"{summary.share_within_5pct:.0%}",
        f"{summary.trials_to_5pct:.1f}",
        ratio,
        f"{summary.infeasible_before_5pct:.1f}",
        f"{summary.final_regret:.1%}",
        f"{summary.suggest_seconds * 1e3:.0f}",
    )
