"""`polythrottle reproduce`: the papers' figures beside those computed here, in 80 columns."""

import os
import textwrap
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polythrottle.cli.options import CommandGroup, JsonOption, check_count, examples
from polythrottle.cli.output import answer, end, formatted, grid, percent, say, several
from polythrottle.domain.errors import InvalidInput

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_VERDICTS = {True: ("holds", "green"), False: ("does not hold", "red")}


def _print_bars(console: "Console", bars: Iterable[dict[str, Any]], width: int | None = None) -> None:
    """Print what must hold and whether it does; folded beside the verdict where a width in columns is given."""
    from rich.text import Text

    for bar in bars:
        word, style = _VERDICTS[bar["holds"]]
        text = f"{bar['what']}: {bar['value']}"
        if width is not None:
            text = ("\n" + 14 * " ").join(textwrap.wrap(text, width))
        console.print(Text.assemble((f"{word:<14}", style), text))


# `polythrottle reproduce transient`: the papers on transient training beside the models, in 80 columns.


def transient(
    data: Annotated[
        Path | None, typer.Option("--data", metavar="FOLDER", help="The tables; data/transient by default.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print what arXiv 1903.00045 and 2004.03072 report of transient training, and what the models predict of it.

    Everything of ours is predicted, from other machines, other networks or earlier lives than what it stands beside.
    """
    from polythrottle.api.progress import LiveSweep
    from polythrottle.lab.reproduce.transient import document, find_tables, records
    from polythrottle.lab.reproduce.transient_lifetimes import check_tables

    folder = find_tables(data)
    check_tables(folder)
    with LiveSweep("predicting") as live:
        found = document(folder, live.counted)
    answer(found, as_json, _show, lambda value: {**value, "records": records(value)})


def _show(found: dict[str, Any]) -> None:
    from polythrottle.cli.render.console import COLUMNS, plain_console

    console = plain_console(COLUMNS)
    console.print(f"Published: {' and '.join(found['sources'])}. Ours: predicted.\n", style="dim")
    for section in (_clusters, _beside, _impacts, _regions, _scaling, _bottlenecks, _shares, _later, _starts, _errors):
        section(console, found)
    console.print("What is what", style="bold")
    for note in found["notes"]:
        say(console, note, "- ")
    console.print()
    _print_bars(console, found["bars"])


def _clusters(console: "Console", found: dict[str, Any]) -> None:
    headings = ("cluster", "time", "ours", "off", "cost", "ours", "off", "faster", "saves")
    table = grid("ICAC's clusters: ResNet-32, 64,000 steps", headings, 1)
    for one in found["icac"]["table"]:
        off_time, off_usd = (one[name] / one[f"published_{name}"] - 1 for name in ("time_s", "usd"))
        table.add_row(
            one["name"],
            f"{one['published_time_s']:,.0f} s",
            "given" if one["given"] else f"{one['time_s']:,.0f} s",
            "" if one["given"] else f"{100 * off_time:+.1f} %",
            f"${one['published_usd']:.2f}",
            f"${one['usd']:.2f}",
            f"{100 * off_usd:+.1f} %",
            f"{one['speed_up']:.2f}",
            f"{100 * one['saving']:.0f} %",
        )
    head = found["icac"]["headline"]
    theirs = found["icac"]["published_headline"]
    end(
        console,
        table,
        f"faster, saves: ours, over one on-demand K80. Eight on-demand K80: {head['speed_up']:.2f} times one "
        f"(published {theirs['speed_up']:.2f}); eight transient ones save {100 * head['saving']:.1f} % over them "
        f"(published {100 * theirs['saving']:.1f} %). All but those named on-demand are transient",
    )


def _beside(console: "Console", found: dict[str, Any]) -> None:
    offs = [(one["name"], one["time_s"] / one["published_time_s"] - 1) for one in found["icac"]["beside"]]
    if offs:
        worst = max(offs, key=lambda pair: abs(pair[1]))
        near = sum(abs(off) <= 0.05 for _, off in offs)
        text = (
            f"Recorded beside the table, 2 to 8 workers with 1 or 2 parameter servers (PS): {near} of "
            f"{several(len(offs), 'time')} within 5 %, worst {worst[0]} {100 * worst[1]:+.1f} %."
        )
        say(console, text)
        console.print()


def _impacts(console: "Console", found: dict[str, Any]) -> None:
    table = grid("Time added by lost K80 workers", ("workers", "lost", "published", "ours"), 0)
    for one in found["icac"]["revocation_impact"]:
        counts = (str(one["workers"]), str(one["lost"]))
        table.add_row(*counts, *(f"{100 * one[name]:+.1f} %" for name in ("published", "slowdown")))
    end(console, table, "lost while it trains, at the ages at which ICAC's own machines were lost; not replaced")


def _regions(console: "Console", found: dict[str, Any]) -> None:
    headings = ("gpu", "away, of 4", "round trip", "published", "ours")
    table = grid("Time added by workers elsewhere", headings, 1)
    for one in found["icac"]["regions"]:
        shares = (f"{100 * one[name]:+.1f} %" for name in ("published", "slowdown"))
        table.add_row(one["gpu"], str(one["away"]), f"{1e3 * one['round_trip_s']:.0f} ms", *shares)
    end(console, table, "in another region; the round trip is fitted to what two of four there add: +25 %, +48 %")


def _scaling(console: "Console", found: dict[str, Any]) -> None:
    table = grid("CM-DARE's clusters: steps per second", ("gpu", "PS", "network", "", *map(str, range(1, 9))), 4)
    for curve in found["scaling"]["curves"]:
        names = (curve["gpu"], str(curve["servers"]), curve["network"])
        for label, key in (("measured", "measured"), ("ours", "predicted")):
            shown = {one["workers"]: f"{one[key]:.3g}" for one in curve["speeds"]}
            head = names if key == "measured" else ("", "", "")
            table.add_row(*head, label, *(shown.get(n, "") for n in range(1, 9)))
    halves = ", ".join(f"{name} {100 * one:.1f} %" for name, one in found["scaling"]["points"].items())
    end(
        console,
        table,
        f"1 to 8 workers; ours is fitted to the odd numbers of workers. Mean error on the half left out: {halves}. On "
        f"whole curves left out, half of them at random, {found['scaling']['splits']} times: "
        f"{100 * found['scaling']['whole_curves']:.1f} %, worst {100 * found['scaling']['whole_curves_worst']:.1f} %",
    )


def _bottlenecks(console: "Console", found: dict[str, Any]) -> None:
    headings = ("gpu", "PS", "network", "flagged at workers", "short at 8", "one more PS")
    table = grid("Bottlenecks, from measured speeds", headings, 4)
    for one in found["bottlenecks"]["curves"]:
        more = one["another_server"]
        names = (one["gpu"], str(one["servers"]), one["network"], " ".join(map(str, one["flagged"])) or "none")
        table.add_row(
            *names,
            f"{100 * one['short_at_most']:.1f} %",
            _signed_percent(more),
        )
    threshold = 100 * found["bottlenecks"]["threshold"]
    end(console, table, f"flagged: more than {threshold:.1f} % short of so many times a single worker's speed")


def _shares(console: "Console", found: dict[str, Any]) -> None:
    headings = ("gpu", "region", "n", "1 h", "6 h", "12 h", "24 h", "1 h", "6 h", "12 h", "24 h", "best fit")
    table = grid("Machines lost by an age: published, recorded", headings, 2)
    for one in found["lifetimes"]["shares"]:
        sides = (one["published"], one["recorded"])
        cells = [cell for side in sides for cell in ([f"{100 * x:.0f}" for x in side] if side else [""] * 4)]
        table.add_row(one["gpu"], one["region"], str(one["machines"] or ""), *cells, one.get("family") or "")
    end(console, table, "percent; left: CM-DARE 2019, right: ICAC's, February 2019, with their number n")


def _later(console: "Console", found: dict[str, Any]) -> None:
    table = grid("Later machines, predicted from earlier ones", ("gpu", "region", "n", "1 h", "6 h", "12 h", "24 h"), 2)
    for one in found["lifetimes"]["later"]:
        cells = [
            f"{100 * guess:.0f} ({100 * low:.0f}-{100 * high:.0f}){' !' if not good else ''}"
            for guess, (low, _, high), good in zip(one["predicted"], one["bands"], one["inside"], strict=True)
        ]
        table.add_row(one["gpu"], one["region"], str(one["machines"]), *cells)
    inside, wide = (100 * found["lifetimes"][name] for name in ("inside", "inside_for_bursts"))
    end(
        console,
        table,
        f"percent surviving, predicted (95 % band of what was seen); {inside:.0f} % inside, {wide:.0f} % if the band "
        "allows for machines being lost in bursts",
    )


def _starts(console: "Console", found: dict[str, Any]) -> None:
    headings = ("gpu", "market", "provision", "stage", "boot", "machine", "published", "first step", "warm")
    table = grid("From order to first step of ResNet-32, s", headings, 2)
    for one in found["startup"]:
        names = ("provisioning_s", "staging_s", "booting_s", "machine_s", "published_machine_s", "total_s", "warm_s")
        market = {True: "transient", False: "on-demand"}[one["transient"]]
        table.add_row(one["gpu"], market, *(f"{one[name]:.1f}" for name in names))
    end(console, table, "means of recorded starts; machine: the first three; warm: only the process starts again")


def _errors(console: "Console", found: dict[str, Any]) -> None:
    table = grid("Mean error of predictions", ("of", "model", "published", "ours", "left out", "ours"), 2)
    steps = found["steps"]
    for gpu, errors in steps["mape"].items():
        theirs = {one["model"]: (one["published"], one["left_out"]) for one in steps["published"] if one["gpu"] == gpu}
        leaks = (steps["mape_published_protocol"] or {}).get(gpu, {})
        for model, error in errors.items():
            published, left_out = theirs.get(model, (None, None))
            cells = (published, leaks.get(model), left_out, error)
            table.add_row(f"step, {gpu}", model, *map(percent, cells))
    checks = found["checkpoints"]
    table.add_row("checkpoint", "polythrottle", "", "", "", percent(checks["mape_of_single"]))
    for model, published in checks["published"].items():
        table.add_row("checkpoint", model, percent(published), "", percent(checks["published_left_out"][model]), "")
    end(
        console,
        table,
        "published protocol (leaks), then whole networks left out; published: CM-DARE's 20 networks, ours: the "
        "networks of the table here",
    )


_grid = partial(grid, before=1)

# How `polythrottle reproduce scheduler` is printed: policies side by side, in 80 columns.

_POLICIES = {
    "inference-only": "inference alone",
    "greedy": "greedy",
    "paper": "paper",
    "interleave": "interleave",
    "off-peak": "off-peak",
    "greedy-all": "greedy, no drop",
}


def show(found: dict[str, Any]) -> None:
    """Print the document of `polythrottle.lab.reproduce.scheduler`."""
    from polythrottle.cli.render.console import COLUMNS, plain_console

    console = plain_console(COLUMNS)
    console.print(f"Published: {found['source']}. Ours: simulated, {found['replays']} replays of 30 s.\n", style="dim")
    console.print(_violations(found["records"]))
    say(console, "late %: requests beyond their limit; ±: standard error; paper: published; no drop: gives up none")
    console.print(_room(found["throughput"]))
    say(console, "all idle: what inference alone leaves at default clocks; all told: if all arrivals were known")
    console.print("\nWhat is assumed", style="bold")
    for line in found["assumed"]:
        say(console, line, "- ")
    console.print()
    _print_bars(console, found["bars"], 64)
    console.print("\nRead more strictly", style="bold")
    _print_bars(console, found["stricter"], 64)


def _violations(records: list[dict[str, Any]]) -> "Table":
    names = ("board", "arrivals", "policy", "late %", "±", "paper", "energy", "tuned")
    table = _grid("Every policy on every stream", names, 3)
    for one in records:
        error = one["violation_error"]
        paper = one["paper"]
        done_s = one["finetune_seconds"]
        table.add_row(
            _board(one["board"]),
            one["arrivals"],
            _POLICIES[one["policy"]],
            f"{100 * one['violation_rate']:.2f}",
            _hundredths(error),
            _hundredths(paper),
            f"{one['energy_j']:.0f} J",
            formatted(done_s, "{:.0f} s"),
        )
    return table


def _signed_percent(share: float | None) -> str:
    if share is None:
        return ""
    return f"{100 * share:+.0f} %"


def _hundredths(share: float | None) -> str:
    """Return a share in per cent without its sign, which stands in the heading."""
    if share is None:
        return ""
    return f"{100 * share:.2f}"


def _room(throughputs: list[dict[str, Any]]) -> "Table":
    table = _grid("\nSamples fine-tuned in 30 s", ("board", "arrivals", "interleave", "all idle", "all told"), 2)
    for one in throughputs:
        figures = (f"{one[name]:.0f}" for name in ("done", "idle", "clairvoyant"))
        table.add_row(_board(one["board"]), one["arrivals"], *figures)
    return table


# `polythrottle reproduce`: a paper's figures beside those computed here.

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

    from polythrottle.lab.reproduce import document

    check_count("--seeds", seeds, 1)
    check_count("--jobs", jobs, 0)
    # What this process may use, which a cpuset or taskset makes fewer than the machine has.
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

    from polythrottle.api.progress import LiveSweep
    from polythrottle.lab.reproduce.scheduler import document

    check_count("--replays", replays, 1)
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


@app.command(
    "llm",
    short_help="Policies for language models on recorded requests.",
    epilog=examples(
        "polythrottle reproduce llm --data traces --quick",
        "polythrottle reproduce llm --data traces --quick --minutes 10 --from 15",
    ),
)
def language_models(
    data: Annotated[Path, typer.Option("--data", metavar="FOLDER", help="With Azure's traces of 2023, conv and code.")],
    minutes: Annotated[float, typer.Option("--minutes", metavar="N", help="Of each trace.")] = 5.0,
    begin: Annotated[
        float, typer.Option("--from", metavar="N", help="Minute of each stretched trace to begin at.")
    ] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Leave the larger model out.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print what published policies save on recorded requests to simulated language models, and what ours does.

    Everything of ours is simulated, the rivals too: each is written again from its paper, for one engine.
    """
    from polythrottle.api.progress import LiveSweep
    from polythrottle.lab.reproduce.language_models import document

    if not 0.5 <= minutes <= 60:
        raise InvalidInput(f"--minutes must be between 0.5 and 60, not {minutes:g}")
    if not 0 <= begin <= 60:
        raise InvalidInput(f"--from must be between 0 and 60, not {begin:g}")
    with LiveSweep("serving") as live:
        found = document(data, minutes, quick, live.counted, begin)
    answer(found, as_json, _show_policies, lambda value: value)


def _show_policies(found: dict[str, Any]) -> None:
    from polythrottle.cli.render.console import COLUMNS, plain_console

    console = plain_console(COLUMNS)
    say(console, f"All simulated, the rivals written again from their papers. {_judged_by(found['limits'])}")
    console.print()
    for scene in found["scenes"]:
        title = (
            f"{scene['workload']} on {scene['board']}, {scene['trace']}: {scene['rate_per_s']:.3g}/s, "
            f"{percent(scene['load'])} of {_whose(scene)}"
        )
        table = grid(title, ("policy", "saves", "minutes held", "TTFT p99", "TPOT p99", "mean", "J/good"), 1)
        for row in scene["policies"]:
            good_j = row["energy_per_good_request_j"]
            table.add_row(
                row["policy"],
                f"{100 * row['saving']:.1f} %",
                f"{100 * row['minutes_held']:.0f} %",
                f"{1e3 * row['ttft_p99_s']:.0f} ms",
                f"{1e3 * row['tpot_p99_s']:.0f} ms",
                f"{row['mean_s']:.2f} s",
                "–" if good_j is None else f"{good_j:.0f}",
            )
        if not scene["requests"]:
            console.print(title, style="bold")
            console.print("no requests come in that stretch\n")
            continue
        if scene["telling"]:
            few = ""
        else:
            few = f"; {several(scene['requests'], 'request')} are too few to tell a p99"
        if not scene["capacity_overloaded"]:
            few += "; at a higher rate the trace would end before these minutes do, so capacity was not reached"
        end(
            console, table, f"saves: joules, over the highest clock; mean: end to end; static: best with hindsight{few}"
        )
    table = grid("Published, over the highest clock", ("system", "saves", "here"), 3)
    for one in found["published"]:
        table.add_row(one["system"], one["saving"], one["policy"] or "not posed")
    end(console, table, "on other servers, requests and limits than these")


def _judged_by(limits: Mapping[str, float]) -> str:
    """Return what a minute has to hold."""
    return (
        f"A minute is held if no more than 1 % of its requests exceed {1e3 * limits['ttft_p99_s']:.0f} ms of TTFT "
        f"({limits['long_ttft_p99_s']:g} s for prompts of more than {limits['long_prompt']:,} tokens), and no more "
        f"than 1 % {1e3 * limits['tpot_p99_s']:.0f} ms of TPOT."
    )


def _whose(scene: Mapping[str, Any]) -> str:
    """Return what a load is a share of."""
    if scene["capacity_overloaded"]:
        return "capacity"
    return f"{scene['capacity_per_s']:.3g}/s"


def _trials(seeds: int, jobs: int) -> Any:
    from polythrottle.api.progress import LiveSweep
    from polythrottle.lab.reproduce import CELLS, trials

    with LiveSweep("searching") as live:
        return trials(CELLS, seeds, jobs, live.counted)


def _print(found: dict[str, Any]) -> None:
    """Print the document in 80 columns."""
    from polythrottle.cli.render.console import COLUMNS, plain_console

    console = plain_console(COLUMNS)
    console.print(f"Published: {found['source']}. Ours: simulated, never measured.\n", style="dim")
    for section in (_front, _knobs, _savings):
        section(console, found)
    # With --quick nothing was searched.
    if any(cell["trials"] for cell in found["cells"]):
        _trial_counts(console, found)
    console.print("Where the paper contradicts itself", style="bold")
    for note in found["contradictions"]:
        say(console, note, "- ")
    console.print(f"\nMean absolute error of the 32 savings: {100 * found['mae_savings']:.2f} percentage points.")
    _print_bars(console, found["bars"])


def _front(console: "Console", found: dict[str, Any]) -> None:
    table = _grid(
        "Energy against latency (figure 2)",
        ("board", "network", "batch", "latency", "ours", "energy", "ours", "off"),
        2,
    )
    for one in found["pareto"]:
        ours = one["energy"]
        theirs = one["published_energy"]
        table.add_row(
            _board(one["board"]),
            _network(one["network"]),
            str(one["batch"]),
            f"{one['published_latency']:.2f}",
            f"{one['latency']:.2f}",
            f"{theirs:.3f}",
            f"{ours:.3f}",
            f"{100 * (ours / theirs - 1):+.1f} %",
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
            _board(one["board"]),
            _network(one["network"]) or "preprocessing",
            names[one["knob"]],
            f"{one['level'] / 1e6:.0f} MHz",
            f"{ours['level'] / 1e6:.0f} MHz",
            f"{100 * one['saving']:.1f} %",
            f"{100 * ours['saving']:.1f} %",
        )
    end(console, table, "batch 1; memory at the best GPU clock; cpu: energy of the core that preprocesses")


def _savings(console: "Console", found: dict[str, Any]) -> None:
    table = _grid(
        "Savings of a search (figure 4)",
        ("board", "network", "", "SLO", "points", "saving", "ours", "off", "points", "saving"),
        4,
    )
    for cell in found["cells"]:
        ours = cell["saving"]
        theirs = cell["published_saving"]
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
