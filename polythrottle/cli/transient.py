"""`polythrottle reproduce transient`: the papers on transient training beside the models, in 80 columns."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polythrottle.cli.answers import answer
from polythrottle.cli.grids import end, grid, say, several
from polythrottle.cli.options import JsonOption

if TYPE_CHECKING:
    from rich.console import Console


def transient(
    data: Annotated[
        Path | None, typer.Option("--data", metavar="FOLDER", help="The tables; data/transient by default.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Print what arXiv 1903.00045 and 2004.03072 report of transient training, and what the models predict of it.

    Everything of ours is predicted, from other machines, other networks or earlier lives than what it stands beside.
    """
    from polythrottle.cli.live import LiveSweep
    from polythrottle.reproduce.transient import document, find_tables
    from polythrottle.reproduce.transient_needs import check_tables
    from polythrottle.reproduce.transient_records import records

    folder = find_tables(data)
    check_tables(folder)
    with LiveSweep("predicting") as live:
        found = document(folder, live.counted)
    answer(found, as_json, _show, lambda value: {**value, "records": records(value)})


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False, width=80)
    console.print(f"Published: {' and '.join(found['sources'])}. Ours: predicted.\n", style="dim")
    for section in (_clusters, _beside, _impacts, _regions, _scaling, _bottlenecks, _shares, _later, _starts, _errors):
        section(console, found)
    console.print("What is what", style="bold")
    for note in found["notes"]:
        say(console, note, "- ")
    console.print()
    for bar in found["bars"]:
        word, style = ("holds", "green") if bar["holds"] else ("does not hold", "red")
        console.print(Text.assemble((f"{word:<14}", style), bar["what"], ": ", bar["value"]))


def _clusters(console: "Console", found: dict[str, Any]) -> None:
    headings = ("cluster", "time", "ours", "off", "cost", "ours", "off", "faster", "saves")
    table = grid("ICAC's clusters: ResNet-32, 64,000 steps", headings, 1)
    for one in found["icac"]["table"]:
        off_time, off_usd = (one[name] / one[f"published_{name}"] - 1 for name in ("time_s", "usd"))
        table.add_row(
            one["name"],
            *(f"{one['published_time_s']:,.0f} s", "given" if one["given"] else f"{one['time_s']:,.0f} s"),
            *("" if one["given"] else f"{100 * off_time:+.1f} %", f"${one['published_usd']:.2f}", f"${one['usd']:.2f}"),
            *(f"{100 * off_usd:+.1f} %", f"{one['speed_up']:.2f}", f"{100 * one['saving']:.0f} %"),
        )
    head, theirs = found["icac"]["headline"], found["icac"]["published_headline"]
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
        table.add_row(*names, f"{100 * one['short_at_most']:.1f} %", "" if more is None else f"{100 * more:+.0f} %")
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
            f"{100 * guess:.0f} ({100 * low:.0f}-{100 * high:.0f}){'' if good else ' !'}"
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
        market = "transient" if one["transient"] else "on-demand"
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
            table.add_row(f"step, {gpu}", model, *map(_percent, cells))
    checks = found["checkpoints"]
    table.add_row("checkpoint", "polythrottle", "", "", "", _percent(checks["mape_of_single"]))
    for model, published in checks["published"].items():
        table.add_row("checkpoint", model, _percent(published), "", _percent(checks["published_left_out"][model]), "")
    end(
        console,
        table,
        "published protocol (leaks), then whole networks left out; published: CM-DARE's 20 networks, ours: the "
        "networks of the table here",
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"
