"""Catalogues: TOML files that say what is to be trained and which machines are on offer; tables are read in place.

[work]                      what is trained: steps (or machine_h of one machine), checkpoints, losses
[server]                    what is rented beside the workers, if anything
[machines.<name>]           gpu, steps_per_s, powers, startup_s, most …
[machines.<name>.usd_per_h] spot, on-demand: a number each, or the table of a market's price history
[machines.<name>.lifetime]  of a spot machine: rate_per_h, or ages_h and survivals, or a table, or published = true
[machines.<name>.caps]      power caps: the table of a sweep over power limits
[[machines.<name>.caps]]    or rows: limit_w, slowdown, power_w
[[jobs]]                    several jobs that share machines; see `polythrottle.cluster.plan.job_shares`
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import TypeVar

from polythrottle.cluster.plan.options import Offer, ServerRental, Work
from polythrottle.cluster.plan.spot_market import PricedPlace
from polythrottle.cluster.predict.lifetimes import LimitedLifetime, published_lifetime, table_lifetime
from polythrottle.cluster.recorded_tables import History, StepRow, caps_of_table, finer, read_histories, step_rows
from polythrottle.domain.errors import BadFile, InvalidInput, PolythrottleError
from polythrottle.domain.fleet.transient_machine import (
    HOUR_S,
    KEPT,
    Cap,
    CheckpointCost,
    ConstantHazard,
    Lifetime,
    MachineType,
    Market,
    Network,
    ObservedLifetime,
)
from polythrottle.storage.documents import TomlTable

_Found = TypeVar("_Found")
_MOST_CAPS = 200
_TOP = ("work", "server", "machines", "source")
_WORK = ("name", "network", "speeds", "steps", "machine_h", "of", "training", "source")
_NETWORK = ("flops", "n_tensors", "n_parameters")
_WORK_TIMES = ("checkpoint_stall_s", "checkpoint_persist_s", "restart_s", "noticed", "usd_per_kwh")
_SERVER = ("usd_per_h", "power_w", "count", "source")
_MACHINE = (
    "gpu",
    "region",
    "gpus",
    "steps_per_s",
    "speedups",
    "most",
    "startup_s",
    "idle_w",
    "writing_w",
    "host_w",
    "cap_step_w",
    "usd_per_h",
    "lifetime",
    "caps",
    "source",
)
_PRICE = ("table", "instance_type", "zone", "product", "source")
_LIFETIME = ("rate_per_h", "ages_h", "survivals", "table", "published", "gpu", "zone", "limit_h", "source")
_CAPS = ("table", "batch_size", "table_gpus", "source")


@dataclass(frozen=True)
class Catalogue:
    """A job and the machines on offer for it.

    Attributes:
        file: Where it was read.
        work: The job.
        offers: The machines, in the order of the file.
        histories: Spot prices along time in every zone of a machine's price table, the zone named first, by machine.
    """

    file: Path
    work: Work
    offers: tuple[Offer, ...]
    histories: Mapping[str, tuple[History, ...]]

    def places(self, machines: int) -> tuple[PricedPlace, ...]:
        """Return every place of the price tables, each with the prices of so many machines."""
        by_name = {offer.machine.name: offer for offer in self.offers if len(offer.speedups) >= machines}
        return tuple(
            PricedPlace(
                history.times(machines), 1 / offer.together_s(machines), offer.machine.default.power_w * machines
            )
            for name, offer in by_name.items()
            for history in self.histories.get(name, ())
        )


def read_catalogue(file: Path) -> Catalogue:
    """Return the catalogue in a file.

    Raises:
        BadFile: If it cannot be read, a key is wrong or missing, or a table it names is no such table.
    """
    top = TomlTable.of_file(file)
    if "jobs" in top.values:
        raise top.wrong("jobs", "is for several jobs, which only cluster plan takes; one job is a table [work]")
    top.check_keys(_TOP)
    machines = dict(top.each("machines"))
    if not machines:
        raise top.wrong("machines", "holds no machine; add a table [machines.<name>]")
    if "work" not in top.values:
        raise top.wrong("work", "is missing; say what is trained: [work] with steps = … or machine_h = …")
    top.within("work").check_keys((*_WORK, *_NETWORK, *_WORK_TIMES))
    offers: list[Offer] = []
    histories: dict[str, tuple[History, ...]] = {}
    for name, entry in machines.items():
        offer, histories[name] = _offer(name, entry, top.within("work"))
        offers.append(offer)
    return Catalogue(file, _work(top, offers), tuple(offers), histories)


def _work(top: TomlTable, offers: Iterable[Offer]) -> Work:
    entry = top.within("work")
    training = entry.values.get("training", "synchronous")
    if training not in ("synchronous", "asynchronous"):
        raise entry.wrong("training", f"must be synchronous or asynchronous, not {training!r}")
    noticed = entry.number("noticed", 0.0)
    if noticed > 1:
        raise entry.wrong("noticed", f"must be a share between 0 and 1, not {noticed:g}")
    stall_s = entry.number("checkpoint_stall_s")
    return Work(
        name=entry.text("name", entry.text("network", "the job")),
        steps=_steps(entry, offers),
        cost=CheckpointCost(stall_s, entry.number("checkpoint_persist_s", stall_s)),
        restart_s=entry.number("restart_s", 0.0),
        undoes=training == "synchronous",
        noticed=noticed,
        server=_server(top.within("server")),
        usd_per_kwh=entry.number("usd_per_kwh", 0.0),
    )


def _steps(entry: TomlTable, offers: Iterable[Offer]) -> float:
    if ("steps" in entry.values) == ("machine_h" in entry.values):
        raise entry.wrong("", "needs either steps, or machine_h and of: how many hours one of which machine would take")
    if "steps" in entry.values:
        return entry.number("steps", above=True)
    by_name = {offer.machine.name: offer for offer in offers}
    name = entry.text("of")
    if name not in by_name:
        raise entry.wrong("of", f"must name a machine of this file: {', '.join(by_name)}, not {name!r}")
    return entry.number("machine_h", above=True) * HOUR_S / by_name[name].step_s


def _server(entry: TomlTable) -> ServerRental:
    entry.check_keys(_SERVER)
    if not entry.values:
        return ServerRental()
    return ServerRental(entry.number("usd_per_h", 0.0), entry.number("power_w", 0.0), entry.whole("count", 1))


def _offer(name: str, entry: TomlTable, work: TomlTable) -> tuple[Offer, tuple[History, ...]]:
    machine, past = machine_of(name, entry)
    lifetime, kept = _lifetime(entry, Market.SPOT in machine.usd_per_h)
    step_s, speed = _step(entry, work)
    known = {"price": "recorded mean" if past else "as written", "lifetime": kept, "speed": speed}
    if "speedups" in entry.values:
        known["scaling"] = "as written"
    else:
        known["scaling"] = "assumed even"
    try:
        return Offer(machine, step_s, _speedups(entry), entry.number("startup_s"), lifetime, known), past
    except InvalidInput as error:
        raise entry.wrong("", f"does not hold together: {error}") from error


def machine_of(name: str, entry: TomlTable) -> tuple[MachineType, tuple[History, ...]]:
    """Return the machine type of a table, and its spot prices along time in every zone where a table gives them.

    Raises:
        BadFile: If something is wrong or missing.
    """
    entry.check_keys(_MACHINE)
    gpus = entry.whole("gpus", 1)
    idle_w = entry.number("idle_w")
    prices, past = _prices(entry)
    try:
        machine = MachineType(
            name=name,
            gpu=entry.text("gpu"),
            usd_per_h=prices,
            caps=_caps(entry, gpus),
            idle_w=idle_w,
            writing_w=entry.number("writing_w", idle_w),
            region=entry.text("region", ""),
            gpus=gpus,
        )
    except InvalidInput as error:
        raise entry.wrong("", f"does not hold together: {error}") from error
    return machine, past


def _prices(entry: TomlTable) -> tuple[dict[Market, float], tuple[History, ...]]:
    given = entry.within("usd_per_h")
    given.check_keys((*Market, "source"))
    if not any(market in given.values for market in Market):
        raise entry.wrong("usd_per_h", "is missing; give the price per hour of spot, on-demand or both")
    if not isinstance(given.values.get(Market.SPOT), dict):
        return {market: given.number(market) for market in Market if market in given.values}, ()
    here, past = _history(given.within(Market.SPOT))
    others = {market: given.number(market) for market in (Market.ON_DEMAND,) if market in given.values}
    return {Market.SPOT: here.mean_usd_per_h, **others}, past


def _history(entry: TomlTable) -> tuple[History, tuple[History, ...]]:
    """Return the prices of the zone that is named, and those of every zone, the named one first."""
    entry.check_keys(_PRICE)
    kind = entry.text("instance_type")
    zone = entry.text("zone", "")
    product = entry.text("product", "")
    here = _told(entry, lambda: read_histories(table(entry), kind, zone, product))[0]
    # Other zones are where a job may move to (--moves); a plan rents in the one that is named.
    every = _told(entry, lambda: read_histories(table(entry), kind, "", product))
    return here, (here, *(history for history in every if history.name != here.name))


def _lifetime(entry: TomlTable, spot: bool) -> tuple[Lifetime, str]:
    given = entry.within("lifetime")
    given.check_keys(_LIFETIME)
    ways = [key for key in ("rate_per_h", "ages_h", "table", "published") if key in given.values]
    if not spot and not ways:
        return KEPT, "kept"
    # Without a lifetime a spot machine would be taken to be kept for ever, and its plan be too good to be true.
    if len(ways) != 1:
        if not ways:
            lack = "is missing: it has a spot price, so say how long it is kept"
        else:
            lack = "is given twice"
        raise entry.wrong(
            "lifetime", f"{lack}; give one of rate_per_h, ages_h with survivals, table, or published = true"
        )
    found, how = _lifetime_by(ways[0], given, entry)
    if "limit_h" not in given.values:
        return found, how
    return LimitedLifetime(found, given.number("limit_h", above=True) * HOUR_S), how


def _lifetime_by(way: str, given: TomlTable, entry: TomlTable) -> tuple[Lifetime, str]:
    if way == "rate_per_h":
        return ConstantHazard(given.number(way)), "as written"
    if way == "ages_h":
        ages_s = tuple(age * HOUR_S for age in given.numbers(way))
        return _told(given, lambda: ObservedLifetime(ages_s, given.numbers("survivals"))), "as written"
    gpu = given.text("gpu", entry.text("gpu"))
    zone = given.text("zone", entry.text("region", ""))
    if way == "table":
        lifetime, machines = _told(given, lambda: table_lifetime(table(given), gpu, zone))
        return lifetime, f"fitted to {machines} machine{'s' * (machines > 1)} and published figures"
    if given.values[way] is not True:
        raise given.wrong(way, "must be true; the GPU and region of the machine say which")
    return published_lifetime(gpu, zone)


def _step(entry: TomlTable, work: TomlTable) -> tuple[float, str]:
    """Return the time of a step on one machine in seconds, and how it is known: written, recorded or predicted."""
    if "steps_per_s" in entry.values:
        return 1 / entry.number("steps_per_s", above=True), "as written"
    if "speeds" not in work.values:
        raise entry.wrong("steps_per_s", "is missing; give it, or a table of step times as work.speeds")
    gpu = entry.text("gpu")
    name = work.text("network")
    rows = [row for row in _told(work, lambda: step_rows(table(work, "speeds"))) if row.gpu.lower() == gpu.lower()]
    for row in rows:
        if row.network.name.lower() == name.lower():
            return row.step_s, "recorded"
    if not rows or "flops" not in work.values:
        lack = f"no row for {name} on {gpu}; to predict it, rows on {gpu} and work.flops with n_tensors are needed"
        raise entry.wrong("steps_per_s", f"is missing, and work.speeds has {lack}")
    return _predicted_s(rows, work, name), f"predicted from {len(rows)} network{'s' * (len(rows) > 1)}"


def _predicted_s(rows: list[StepRow], work: TomlTable, name: str) -> float:
    from polythrottle.cluster.predict.step_and_checkpoint_times import fit_steps

    figures = (work.number("flops", above=True), work.number("n_tensors", above=True))
    network = Network(name, *figures, work.number("n_parameters", 0.0))
    return _told(work, lambda: fit_steps(rows).predict(network).seconds)


def _speedups(entry: TomlTable) -> tuple[float, ...]:
    if "speedups" not in entry.values:
        return tuple(float(n) for n in range(1, entry.whole("most", 1) + 1))
    speedups = entry.numbers("speedups")
    if "most" in entry.values and entry.whole("most", 1) > len(speedups):
        raise entry.wrong(
            "speedups", f"holds {len(speedups)} speeds, fewer than most; give one for each number of machines"
        )
    return speedups[: entry.whole("most", len(speedups))]


def _caps(entry: TomlTable, gpus: int) -> tuple[Cap, ...]:
    host_w = entry.number("host_w", 0.0)
    if isinstance(entry.values.get("caps"), dict):
        given = entry.within("caps")
        given.check_keys(_CAPS)
        batch = None
        if "batch_size" in given.values:
            batch = given.whole("batch_size", 1)
        sizes = (gpus, given.whole("table_gpus", 1))
        caps = _told(given, lambda: caps_of_table(table(given), batch, *sizes, host_w=host_w))
    else:
        caps = _rows(entry, host_w)
    if "cap_step_w" not in entry.values:
        return caps
    step_w = entry.number("cap_step_w", above=True)
    span_w = (caps[0].limit_w or 0) - (caps[-1].limit_w or 0)
    # A plan works every cap out for every number of machines: 4,464 options take 1.4 s (benchmarks/cluster_plan.md).
    if span_w / step_w > _MOST_CAPS:
        raise entry.wrong("cap_step_w", f"would make more than {_MOST_CAPS} caps of {span_w:g} W; write a larger step")
    return finer(caps, step_w)


def _rows(entry: TomlTable, host_w: float) -> tuple[Cap, ...]:
    """Return caps written as rows; slowdowns count from the first, the default, as steps_per_s does."""
    rows = entry.listed("caps")
    if not 1 <= len(rows) <= _MOST_CAPS:
        lack = "is missing"
        if rows:
            lack = f"holds more than {_MOST_CAPS} rows"
        raise entry.wrong("caps", f"{lack}; give rows with limit_w, slowdown and power_w, or a table")
    caps = [_cap(row, host_w) for row in rows]
    if any((above.limit_w or inf) <= (below.limit_w or inf) for above, below in pairwise(caps)):
        raise entry.wrong("caps", "must have falling limits, the default first")
    return tuple(replace(cap, slowdown=cap.slowdown / caps[0].slowdown) for cap in caps)


def _cap(row: TomlTable, host_w: float) -> Cap:
    row.check_keys(("limit_w", "slowdown", "power_w", "source"))
    limit_w = None
    if "limit_w" in row.values:
        limit_w = row.number("limit_w", above=True)
    slowdown = row.number("slowdown", 1.0, above=True)
    power_w = row.number("power_w", above=True)
    return Cap(limit_w, slowdown, power_w + host_w)


def table(entry: TomlTable, key: str = "table") -> Path:
    """Return the path of a table, counted from the folder of the catalogue.

    Raises:
        BadFile: If it is no text, or there is no such file.
    """
    path = entry.file.parent / entry.text(key)
    try:
        there = path.is_file()
    except OSError as error:
        raise entry.wrong(key, f"names a file that cannot be read: {error.strerror}") from error
    if not there:
        raise entry.wrong(key, f"names a file that is not there: {path}")
    return path


def _told(entry: TomlTable, read: Callable[[], _Found]) -> _Found:
    """Return what was read; an error names the catalogue's place too, unless it does."""
    try:
        return read()
    except PolythrottleError as error:
        said = str(error)
        raise (
            BadFile(said) if said.startswith(str(entry.file)) else entry.wrong("", f"does not hold: {said}")
        ) from error
