"""`polythrottle reproduce`: a paper's figures beside those computed here."""

import os
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polythrottle.cli.grids import end, grid, say
from polythrottle.cli.help_pages import CommandGroup, examples
from polythrottle.cli.transient import transient
from polythrottle.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import Console

_grid = partial(grid, before=1)

app = typer.Typer(cls=CommandGroup, help="Print a paper's figures beside those computed here.", rich_markup_mode=None)


@app.callback()
def reproduce() -> None:
    """Print a paper's figures beside those computed here."""


@app.command(
    "polythrottle",
    short_help="Energy and latency of arXiv 2310.19991.",
    epilog=examples("polythrottle reproduce polythrottle --quick"),
)
def paper(
    quick: Annotated[bool, typer.Option("--quick", help="Leave out trial counts, which take minutes.")] = False,
    seeds: Annotated[int, typer.Option("--seeds", metavar="N", help="Searches per trial count.")] = 3,
    jobs: Annotated[int, typer.Option("--jobs", metavar="N", help="Processes; one per processor by default.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Print what arXiv 2310.19991 reports of energy and latency on AGX Orin and TX2, and what the simulator says.

    Everything of ours is simulated. The simulator's coefficients are fitted to the same figures
    (benchmarks/calibrate.py), so this says how well one physical model fits them all, not that a board agrees.
    """
    import json

    from polythrottle.reproduce import document

    if seeds < 1 or jobs < 0:
        raise InvalidInput("--seeds must be at least 1 and --jobs at least 0")
    found = document(None if quick else _trials(seeds, jobs or len(os.sched_getaffinity(0))))
    if as_json:
        typer.echo(json.dumps(found, indent=2, allow_nan=False))
    else:
        _print(found)


@app.command(
    "scheduler",
    short_help="Fine-tuning policies of arXiv 2310.19991.",
    epilog=examples("polythrottle reproduce scheduler --replays 2"),
)
def scheduler(
    replays: Annotated[int, typer.Option("--replays", metavar="N", help="Of each stream, 30 s each.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Print how policies let fine-tuning in on the streams of arXiv 2310.19991; all of ours is simulated."""
    import json

    from polythrottle.cli.live import LiveSweep
    from polythrottle.cli.schedules import show
    from polythrottle.reproduce.scheduler import document

    if replays < 1:
        raise InvalidInput("--replays must be at least 1")
    with LiveSweep("replaying") as live:
        found = document(replays, live.counted)
    if as_json:
        typer.echo(json.dumps(found, indent=2, allow_nan=False))
    else:
        show(found)


app.command(
    "transient",
    short_help="Training on spot machines: two papers' figures.",
    epilog=examples("polythrottle reproduce transient"),
)(transient)


def _trials(seeds: int, jobs: int) -> Any:
    from polythrottle.cli.live import LiveSweep
    from polythrottle.reproduce import CELLS, trials

    with LiveSweep("searching") as live:
        return trials(CELLS, seeds, jobs, live.counted)


def _print(found: dict[str, Any]) -> None:
    """Print the document in 80 columns."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False, width=80)
    console.print(f"Published: {found['source']}. Ours: simulated, never measured.\n", style="dim")
    for section in (_front, _knobs, _savings):
        section(console, found)
    if any(cell["trials"] for cell in found["cells"]):
        _trial_counts(console, found)
    console.print("Where the paper contradicts itself", style="bold")
    for note in found["contradictions"]:
        say(console, note, "- ")
    console.print(f"\nMean absolute error of the 32 savings: {100 * found['mae_savings']:.2f} percentage points.")
    for bar in found["bars"]:
        word, style = ("holds", "green") if bar["holds"] else ("does not hold", "red")
        console.print(Text.assemble((f"{word:<14}", style), bar["what"], ": ", bar["value"]))


def _front(console: "Console", found: dict[str, Any]) -> None:
    table = _grid(
        "Energy against latency (figure 2)",
        ("board", "network", "batch", "latency", "ours", "energy", "ours", "off"),
        2,
    )
    for one in found["pareto"]:
        ours, theirs = one["energy"], one["published_energy"]
        table.add_row(
            *(_board(one["board"]), _network(one["network"]), str(one["batch"])),
            *(f"{one['published_latency']:.2f}", f"{one['latency']:.2f}"),
            *(f"{theirs:.3f}", f"{ours:.3f}", f"{100 * (ours / theirs - 1):+.1f} %"),
        )
    end(
        console,
        table,
        "energy over that of default clocks at batch 1: the least within a multiple of the "
        "best time of all; ours within the same slack to the best time of the batch",
    )


def _knobs(console: "Console", found: dict[str, Any]) -> None:
    table = _grid("Savings of one knob", ("board", "network", "knob", "at", "ours", "saving", "ours"), 3)
    names = {"gpu_min_hz": "gpu min", "mem_hz": "memory", "cpu_max_hz": "cpu"}
    for one in found["knobs"]:
        ours = one["simulated"]
        table.add_row(
            *(_board(one["board"]), _network(one["network"]) or "preprocessing", names[one["knob"]]),
            *(f"{one['level'] / 1e6:.0f} MHz", f"{ours['level'] / 1e6:.0f} MHz"),
            *(f"{100 * one['saving']:.1f} %", f"{100 * ours['saving']:.1f} %"),
        )
    end(console, table, "batch 1; memory at the best GPU clock; cpu: energy of the core that preprocesses")


def _savings(console: "Console", found: dict[str, Any]) -> None:
    table = _grid(
        "Savings of a search (figure 4)",
        ("board", "network", "", "SLO", "points", "saving", "ours", "off", "points", "saving"),
        4,
    )
    for cell in found["cells"]:
        ours, theirs = cell["saving"], cell["published_saving"]
        table.add_row(
            *_of(cell),
            str(cell["points"]),
            f"{100 * theirs:.1f} %",
            f"{100 * ours:.1f} %",
            f"{100 * (ours - theirs):+.1f}",
            f"{cell['full_points']:,}",
            f"{100 * cell['full_saving']:.1f} %",
        )
    end(
        console,
        table,
        "against default clocks (GPU free under the stock governor, memory and CPU highest) "
        "at the batch of the best point. A: within 1.2 times the best latency of the space, "
        "which forces batch 1; B: no limit. Right: GPU minimum searched too, so that the best "
        "latency is shorter and the limit of A tighter",
    )


def _trial_counts(console: "Console", found: dict[str, Any]) -> None:
    table = _grid(
        "Trials to within 5 % of the best point (figure 4)",
        ("board", "network", "", "SLO", "paper", "ours", "bayes", "random", "ours", "once each"),
        4,
    )
    for cell in found["cells"]:
        names = ("published_random", "random", "random_without_replacement")
        shown = (cell["published_trials"], cell["trials"]["paper"], cell["trials"]["bayes"], *map(cell.get, names))
        table.add_row(*_of(cell), *(f"{count:.1f}" for count in shown))
    end(
        console,
        table,
        "paper: published, and its method here; random: N / k, published and ours, and trying "
        "each point once, (N + 1) / (k + 1). Not there after 60 trials counts as 90",
    )


def _of(cell: dict[str, Any]) -> tuple[str, str, str, str]:
    return _board(cell["board"]), _network(cell["network"]), cell["precision"], cell["setting"]


def _board(name: str) -> str:
    return {"jetson-agx-orin": "Orin", "jetson-tx2": "TX2"}.get(name, name)


def _network(name: str) -> str:
    return name.removeprefix("efficientnet-").removesuffix("-base").upper()
