"""``polythrottle cluster`` and its smaller commands: ``fleet``, ``predict`` and ``simulate``."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polythrottle.cli.cluster.plan import plan
from polythrottle.cli.cluster.status import status
from polythrottle.cli.cluster.train import train
from polythrottle.cli.options import (
    CommandGroup,
    JsonOption,
    OptionGroup,
    check_seed,
    examples,
    share_below_one,
    spread,
)
from polythrottle.cli.output import amount, answer, formatted, grid, optional, percent, several
from polythrottle.domain.errors import BadFile, InvalidInput

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from polythrottle.cluster.fleet import FleetView
    from polythrottle.cluster.plan.costs import Spread
    from polythrottle.cluster.plan.options import Work
    from polythrottle.cluster.policy_comparison import PolicyComparison, SimulationRequest
    from polythrottle.cluster.predict.accuracy import PredictionRecord
    from polythrottle.cluster.recorded_tables import StepRow

# ``polythrottle cluster fleet``: what the nodes of a fleet have learnt, which of them stand out, and their slack.


def fleet(
    store: Annotated[str, typer.Option("--store", metavar="URL", help="The job's store: a folder or any fsspec URL.")],
    gpu: Annotated[str, typer.Option("--gpu", metavar="NAME", help="Only this GPU model.")] = "",
    network: Annotated[str, typer.Option("--network", metavar="NAME", help="Only this network.")] = "",
    longer: Annotated[
        str, typer.Option("--longer", metavar="3%", help="How much later than the slowest node all may be.")
    ] = "0%",
    learn: Annotated[
        Path | None,
        typer.Option("--learn", metavar="TABLE", help="First keep a sweep over power limits as what a node says."),
    ] = None,
    node: Annotated[str, typer.Option("--node", metavar="NAME", help="With --learn: the node.")] = "",
    batch: Annotated[
        int | None, typer.Option("--batch", metavar="N", help="With --learn: which batch size of the table.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a fleet knows: caps and what they do, nodes and their silicon, who stands out, and slack."""
    from polythrottle.cluster.fleet import fleets, shown
    from polythrottle.cluster.fleet import learn as keep_table
    from polythrottle.storage.object_store import Store

    later = share_below_one("--longer", longer)
    if not store.strip():
        raise InvalidInput("--store is empty; name a folder or a URL such as gs://bucket/job")
    opened = Store(store)
    if learn is None and not opened.exists():
        raise BadFile(f"there is no store at {store}; cluster train makes one, and --learn a table's")
    if learn is not None:
        if not (node and gpu and network):
            raise InvalidInput("--learn needs --node, --gpu and --network, to say whose knowledge it is and of what")
        keep_table(opened, learn, node, gpu, network, batch)
    known, notes = fleets(opened, gpu, network)
    rows = [shown(each, later) for each in known]
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    answer(rows, as_json, lambda value: _print_fleet(value, store), lambda value: [each.record() for each in value])


def _print_fleet(found: "list[FleetView]", store: str) -> None:
    from rich.text import Text

    from polythrottle.cli.render.console import narrow_console

    console = narrow_console()
    if not found:
        console.print(f"Nothing is known in {store} yet: nodes tell what they see while they train.")
    for each in found:
        heading = (f"{each.network} on {each.gpu}", "bold")
        console.print(Text.assemble(heading, f", measured by {several(len(each.nodes), 'node')}"))
        if each.caps:
            _caps(console, each)
        _nodes(console, each)
        if each.caps:
            console.print("Power is a step's joules over its own time: waiting for others counts in.")
        if each.saving is not None:
            console.print(
                f"In step, {each.longer:.0%} later than the slowest: {each.saving:.1%} fewer joules (estimated;"
                " waiting at the barrier counted as free)."
            )


def _caps(console: "Console", each: "FleetView") -> None:

    table = grid("", ("limit", "step time", "power", "joules", "nodes"), 0, before=1, folded=range(5))
    default = each.caps[0]
    for cap, count in zip(each.caps, each.seen, strict=True):
        limit = formatted(cap.limit_w, "{:g} W", "default")
        joules = cap.energy / default.energy - 1
        table.add_row(limit, f"{cap.slowdown:.3f} ×", f"{cap.power_w:.1f} W", f"{joules:+.1%}", str(count))
    from polythrottle.cli.render.console import Unpadded

    console.print(Unpadded(table))


def _nodes(console: "Console", each: "FleetView") -> None:

    table = grid("", ("node", "silicon", "with slack", ""), 1, before=1, folded=range(4))
    table.columns[-1].justify = "left"
    for node in each.nodes:
        factor = formatted(node.factor, "{:.3f} ×", "unknown")
        if node.cap is None:
            cap = ""
        else:
            cap = formatted(node.cap.limit_w, "{:g} W", "default")
        if node.mads is None:
            mark = ""
        else:
            mark = f"stands out: {abs(node.mads):.0f} deviations {_side(node.mads)}"
        table.add_row(node.name, factor, cap, mark)
    from polythrottle.cli.render.console import Unpadded

    console.print(Unpadded(table))


def _side(mads: float) -> str:
    if mads > 0:
        return "slower"
    return "faster"


# `polythrottle cluster predict`: step times of networks never seen, from a table of others.

_MANY = 10.0


def predict(
    table: Annotated[
        Path, typer.Option("--table", metavar="FILE", help="Measured steps: gpu, network, flops, step_time_s, …")
    ],
    test: Annotated[
        Path | None,
        typer.Option("--test", metavar="FILE", help="Networks to predict; without, each of the table in turn."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Predict the time of a training step of networks never seen, and score it beside CM-DARE's models.

    Every network is predicted from others only: left out in turn (leave-one-network-out), or in a second file. Tables
    of checkpoint times (model, weight_mb, meta_mb, local_write_s, remote_write_s) are predicted in the same way.
    """
    from polythrottle.cluster.recorded_tables import is_of_checkpoints

    score = _steps
    if is_of_checkpoints(table):
        score = _checkpoints
    answer(score(table, test), as_json, _show)


def _steps(table: Path, test: Path | None) -> dict[str, Any]:
    from polythrottle.api.progress import LiveSweep
    from polythrottle.cluster.predict.accuracy import leaking, left_out, unseen
    from polythrottle.cluster.recorded_tables import step_rows

    rows = step_rows(table)
    asked = optional(partial(step_rows, measured=False), test)
    with LiveSweep("predicting") as live:
        if asked is None:
            records = left_out(rows, live.counted)
        else:
            records = unseen(rows, asked, live.counted)
    names = {(row.gpu, row.network.name) for row in rows}
    measured = {row.network.name for row in asked or () if (row.gpu, row.network.name) in names}
    about = {"mape_published_protocol": leaking(rows) if asked is None else None, "notes": _lacking(rows, asked or ())}
    return _document(records, test, measured) | about


def _lacking(rows: "Sequence[StepRow]", asked: "Sequence[StepRow]") -> list[str]:
    """Return a line on what a table without numbers of tensors costs."""
    from math import isnan

    from polythrottle.cluster.predict.accuracy import filled

    networks = {row.network.name: row.network for row in (*filled(rows, asked), *filled(asked, rows))}
    lacking = sum(isnan(network.n_tensors) for network in networks.values())
    if not lacking:
        return []
    return [
        f"n_tensors is not known of {lacking} of {len(networks)} networks: what a step spends on each tensor is left "
        "out there, and predictions are coarser (on CM-DARE's table off by 13 % in the mean instead of 4 to 6 %)"
    ]


def _checkpoints(table: Path, test: Path | None) -> dict[str, Any]:
    from polythrottle.cluster.predict.accuracy import checkpoints
    from polythrottle.cluster.recorded_tables import checkpoint_rows

    rows = checkpoint_rows(table)
    asked = optional(checkpoint_rows, test)
    networks = {row.network for row in asked or ()} & {row.network for row in rows}
    return _document(checkpoints(rows, asked), test, networks) | {"mape_published_protocol": None, "notes": []}


def _document(records: "list[PredictionRecord]", test: Path | None, seen: set[str]) -> dict[str, Any]:
    from dataclasses import asdict

    from polythrottle.cluster.predict.accuracy import COVERAGE, covered, mape

    return {
        "records": [asdict(record) for record in records],
        "mape": mape(records),
        "protocol": "leave-one-network-out" if test is None else "second file",
        "seen": sorted(seen),
        "interval": COVERAGE,
        "covered": covered(records),
    }


def _show(found: dict[str, Any]) -> None:
    """Print the errors, and our predictions, in 80 columns."""
    from polythrottle.cli.render.console import COLUMNS, Unpadded, plain_console
    from polythrottle.cluster.predict.accuracy import OURS

    console = plain_console(COLUMNS)
    headings = ("gpu", "network", "measured", "predicted", "off", "90 % within")
    table = grid("", headings, 2, before=1, folded=(0, 1))
    for one in found["records"]:
        if one["model"] == OURS:
            table.add_row(one["gpu"], one["network"], *_cells(one))

    console.print(Unpadded(table))
    _errors(console, found)
    if found["protocol"] == "leave-one-network-out":
        how = "from the other networks"
    else:
        how = "from the other table"
    console.print(f"predicted: {how}; within: the prediction's own interval", style="dim")
    if found["covered"] is not None:
        console.print(f"{100 * found['covered']:.0f} % of the measurements lie within", style="dim")
    # Each reason once, however many networks it keeps from being predicted.
    for why in dict.fromkeys(one["why"] for one in found["records"] if one["why"]):
        console.print(f"not predicted: {why}", style="yellow")
    for note in found["notes"]:
        console.print(note, style="yellow")
    if found["seen"]:
        console.print(f"in both files, so not unseen: {', '.join(found['seen'])}", style="yellow")


def _errors(console: Any, found: dict[str, Any]) -> None:
    models = list(dict.fromkeys(name for some in found["mape"].values() for name in some))
    table = grid("\nMean error", ("gpu", "protocol", *models), 2, before=1, folded=(0,))
    for gpu, errors in found["mape"].items():
        table.add_row(gpu, found["protocol"], *(percent(errors[name], "unknown") for name in models))
        if found["mape_published_protocol"]:
            shown = found["mape_published_protocol"][gpu]
            table.add_row("", "published (leaks)", *(percent(shown.get(name), "unknown") for name in models))
    from polythrottle.cli.render.console import Unpadded

    console.print(Unpadded(table))


def _cells(one: dict[str, Any]) -> tuple[str, ...]:
    from polythrottle.domain.units import show

    measured = one["measured_s"]
    predicted = one["predicted_s"]
    off = ""
    if measured is not None and predicted is not None:
        off = _off(predicted / measured)
    if one["low_s"] is None:
        within = ""
    else:
        within = f"{show(one['low_s'], 's')} to {show(one['high_s'], 's')}"
    return (*("" if value is None else show(value, "s") for value in (measured, predicted)), off, within)


def _off(ratio: float) -> str:
    """Return by how much a ratio is off 1, in per cent, or as a factor where that says more."""
    if ratio < _MANY:
        return f"{100 * (ratio - 1):+.1f} %"
    return f"{ratio:.3g} ×"


# ``polythrottle cluster simulate``: a catalogue's job on machines that come and go, in virtual time.

_MOST_NODES = 10_000
_MOST_DAYS = 366.0
_MOST_SEEDS = 100


@dataclass(frozen=True)
class SimulationOptions(OptionGroup):
    """The job of a catalogue, the machines it is simulated on, and the policies that are compared."""

    catalogue: Annotated[
        Path, typer.Option("--catalogue", metavar="FILE", help="TOML file: the work, machines, prices, caps.")
    ]
    machine: Annotated[
        str | None, typer.Option("--machine", metavar="NAME", help="Of the catalogue; its first by default.")
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Recorded cluster: CSV with time_s and n_nodes."),
    ] = None
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", help="Places in the fleet.")] = 8
    days: Annotated[float, typer.Option("--days", metavar="D", help="Stop looking after so many days.")] = 30.0
    endless: Annotated[
        bool, typer.Option("--endless", help="Train on to --days, whatever the work of the catalogue.")
    ] = False
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="The first seed, of machines and silicon.")] = 0
    seeds: Annotated[int, typer.Option("--seeds", metavar="N", help="How many; the spread is over them.")] = 3
    policies: Annotated[
        str,
        typer.Option("--policies", metavar="A,B", help="default, apart, joint, tuned; the first is the baseline."),
    ] = "default,apart,joint,tuned"
    longer: Annotated[
        str, typer.Option("--longer", metavar="3%", help="How much longer the job may take than at default clocks.")
    ] = "3%"
    spread: Annotated[
        str, typer.Option("--spread", metavar="8%", help="From the fastest to the slowest GPU of the type.")
    ] = "8%"
    notice: Annotated[
        float | None,
        typer.Option("--notice", metavar="S", help="Every machine is told of its loss so many seconds before."),
    ] = None

    def request(self) -> "SimulationRequest":
        """Return what is to be simulated.

        Raises:
            InvalidInput: If a number is out of range.
            PolythrottleError: If catalogue or trace cannot be read, or name no such machine.
        """
        from polythrottle.cluster.catalogue import read_catalogue
        from polythrottle.cluster.policy_comparison import asked_of
        from polythrottle.cluster.recorded_tables import read_trace

        _within("--nodes", self.nodes, 1, _MOST_NODES)
        _within("--days", self.days, 0.001, _MOST_DAYS)
        _within("--seeds", self.seeds, 1, _MOST_SEEDS)
        check_seed(self.seed)
        if self.notice is not None:
            _within("--notice", self.notice, 0, 3600)
        return asked_of(
            read_catalogue(self.catalogue),
            self.machine,
            trace=optional(read_trace, self.trace),
            machines=self.nodes,
            horizon_s=self.days * 86400,
            seeds=tuple(range(self.seed, self.seed + self.seeds)),
            spread=share_below_one("--spread", self.spread),
            longer=share_below_one("--longer", self.longer),
            notice_s=self.notice,
            endless=self.endless,
        )

    def named_policies(self) -> tuple[str, ...]:
        """Return the policies, each once.

        Raises:
            InvalidInput: If none is named.
        """
        names = tuple(dict.fromkeys(name.strip() for name in self.policies.split(",") if name.strip()))
        if not names:
            raise InvalidInput("--policies takes names such as default,tuned")
        return names


@spread
def simulate(*, job: SimulationOptions, as_json: JsonOption = False) -> None:
    """Simulate a job on machines that can be taken away: time, cost, joules, and where they went. All simulated."""
    from polythrottle.api.progress import LiveSweep
    from polythrottle.cluster.policy_comparison import compare

    asked = job.request()
    names = job.named_policies()
    with LiveSweep("simulating") as live:
        compared = compare(asked, names, live.counted)
    answer(compared, as_json, _print_simulation, lambda value: value.record())


def _within(option: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise InvalidInput(f"{option} is from {least:g} to {most:g}, not {value:g}")


def _print_simulation(compared: "PolicyComparison") -> None:
    from polythrottle.cli.render.console import narrow_console

    asked = compared.asked
    console = narrow_console()
    source = "drawn lifetimes"
    if asked.trace is not None:
        source = f"trace {asked.trace.name}"
    console.print(f"Simulated: {asked.work.name}, {asked.machines} × {asked.offer.machine.name},")
    console.print(f"{source}, {several(len(asked.seeds), 'seed')}, GPUs {asked.spread:.0%} apart.")
    console.print("Joules follow from the powers in the catalogue; ± is the 95 % interval over seeds.")
    if asked.trace is not None and asked.trace.assumed_s:
        console.print(f"The trace's last row is taken to last {asked.trace.assumed_s:.4g} s, as its middle row does.")
    for line in _beside(asked.work):
        console.print(line)
    console.print()
    console.print(_totals(compared))
    console.print()
    console.print(_uses(compared))
    unfinished = [name for name, outcomes in compared.outcomes.items() if not all(each.finished for each in outcomes)]
    if unfinished and not asked.endless:
        console.print(
            f"Not done within {asked.horizon_s / 86400:g} days: {', '.join(unfinished)};"
            " savings are per work that was done."
        )


def _beside(work: "Work") -> Iterator[str]:
    """Yield what is counted beside the workers, a line each."""
    server = work.server
    if server.all_w or server.all_usd_per_s:
        rent = f"{server.all_w:g} W and {server.all_usd_per_s * 3600:.3g} usd/h"
        yield f"Cost and energy count the server too, {rent}; shares are the workers'."
    if work.usd_per_kwh:
        yield f"Cost counts energy at {work.usd_per_kwh:g} usd/kWh beside the rent."


def _totals(compared: "PolicyComparison") -> "Table":
    first = next(iter(compared.outcomes))
    headings = ("policy", "time", "cost", "energy", f"joules saved\nagainst {first}", f"longer than\n{first}")
    table = grid("", headings, 1, before=1, folded=range(6))
    for name in compared.outcomes:
        hours = compared.mean(name, lambda outcome: outcome.time_s / 3600).mean
        usd = compared.mean(name, lambda outcome: outcome.usd).mean
        joules = compared.mean(name, lambda outcome: outcome.energy_j).mean
        table.add_row(
            name,
            f"{amount(hours)} h",
            f"${amount(usd)}",
            f"{amount(joules / 3.6e6)} kWh",
            _change(compared.saved(name, lambda outcome: outcome.energy_j), 1),
            _change(compared.saved(name, lambda outcome: outcome.time_s), -1),
        )
    return table


def _change(found: "Spread | None", sign: int) -> str:
    if found is None:
        return "nothing done"
    if found.low is None or found.high is None:
        half = ""
    else:
        half = f" ± {(found.high - found.low) / 2:.1%}"
    # Adding zero makes 0.0 of -0.0.
    return f"{sign * found.mean + 0.0:.1%}{half}"


def _uses(compared: "PolicyComparison") -> "Table":
    """Return where machine time and joules went, in per cent of each policy's own."""
    from polythrottle.cluster.plan.costs import Use

    headings = ("share of\ntime | joules", *compared.outcomes)
    table = grid("", headings, 1, before=1, folded=range(len(headings)))
    for use in Use:
        cells = [_used(compared, name, use) for name in compared.outcomes]
        if any(cells):
            table.add_row(str(use), *cells)
    return table


def _used(compared: "PolicyComparison", name: str, use: object) -> str:
    from polythrottle.cluster.plan.costs import Use

    outcomes = compared.outcomes[name]
    spent = [outcome.ledger.by_use[Use(use)] for outcome in outcomes]
    totals = [outcome.ledger.total for outcome in outcomes]
    whole_s = sum(each.machine_s for each in totals)
    whole_j = sum(each.energy_j for each in totals)
    used_s = sum(each.machine_s for each in spent)
    used_j = sum(each.energy_j for each in spent)
    if used_s and whole_j:
        return f"{used_s / whole_s:.1%} | {used_j / whole_j:.1%}"
    return ""


# ``polythrottle cluster``: training on machines that can be taken away.

app = typer.Typer(
    name="cluster",
    help="Predict, plan, train and simulate on machines that can be taken away (spot, preemptible).",
    cls=CommandGroup,
    rich_markup_mode=None,
)

app.command(
    short_help="Choose machines, market, power cap and checkpoints.",
    epilog=examples("polythrottle cluster plan examples/cluster-gcp-2019.toml --deadline 12h"),
)(plan)
app.command(
    short_help="Predict step times of networks never measured.",
    epilog=examples("polythrottle cluster predict --table examples/cpu-training-steps.csv"),
)(predict)
app.command(
    short_help="Train a script on nodes that come and go.",
    epilog=examples("polythrottle cluster train examples/elastic_training.py --nodes 2"),
)(train)
app.command(short_help="Show where a training job stands.", epilog=examples("polythrottle cluster status"))(status)
app.command(
    short_help="Simulate a job on machines that are taken away.",
    epilog=examples("polythrottle cluster simulate --seeds 1 \\\n  --catalogue examples/cluster-gcp-2019.toml"),
)(simulate)
app.command(
    short_help="Show what the nodes of a fleet have learnt.",
    epilog=examples(
        "polythrottle sweep -d sim:a100 -w resnet50 --knobs power_limit_w \\\n  --batch 32 --out caps.csv",
        "polythrottle cluster fleet --store fleet --learn caps.csv \\\n  --node a --gpu A100 --network resnet50",
    ),
)(fleet)
