"""Errors of the predictions for transient machines, on networks, curves and lives left out; prints tables.

Run ``python benchmarks/cluster_predict.py FOLDER`` with the folder of recorded tables (see `polythrottle reproduce
transient`); what it prints is kept in ``benchmarks/cluster_predict.md``.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from random import Random
from statistics import fmean

from polythrottle.cluster.predict.accuracy import OURS, covered, left_out, mape
from polythrottle.cluster.predict.lifetimes import Pool, prior
from polythrottle.cluster.predict.step_and_checkpoint_times import fit_steps
from polythrottle.cluster.recorded_tables import LifetimeRow, StepRow, step_rows
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import Lifetime, Network
from polythrottle.lab.reproduce.transient import document
from polythrottle.lab.reproduce.transient_lifetimes import calibration, inside, lives
from polythrottle.lab.reproduce.transient_machines import fit_curves, kaplan_meier, log_likelihood

STEPS = "training_speed_by_network_cmdare.csv"
OTHERS = {
    "ResNet-32": (1.659e9, 104, {"K80": 4.59, "P100": 12.1}),
    "custom ResNet 4": (2.34e9, 140, {"K80": 3.43, "P100": 8.43}),
    "Shake 48": (5.77e9, 216, {"K80": 1.64, "P100": 4.24}),
    "Shake 64": (10.2e9, 216, {"K80": 1.27, "P100": 3.19}),
}
"""Networks of CM-DARE that are not in the table: operations, tensors, steps per second by GPU type (published)."""
SAMPLES = 40


def steps(folder: Path) -> Iterator[str]:
    """Yield what predictions of step time are off, by what they were fitted to."""
    rows = step_rows(folder / STEPS)
    yield "| fitted to | scored on | K80 | P100 | in the 90 % interval |"
    yield "| --- | --- | --- | --- | --- |"
    yield _line("all others", "each of 14 networks", left_out(rows))
    yield _line("all others, campaigns not told apart", "the same", left_out([replace(r, complete=None) for r in rows]))
    models = {gpu: fit_steps([row for row in rows if row.gpu == gpu]) for gpu in ("K80", "P100")}
    errors = {
        gpu: fmean(
            abs(model.predict(Network(name, flops, tensors, 0)).seconds * speeds[gpu] - 1)
            for name, (flops, tensors, speeds) in OTHERS.items()
        )
        for gpu, model in models.items()
    }
    shown = " | ".join(_percent(errors[gpu]) for gpu in ("K80", "P100"))
    yield f"| all 14 | {len(OTHERS)} networks not in the table | {shown} | |"
    for count in (3, 4, 6, 8):
        yield _few(rows, count)


def _line(fitted: str, scored: str, records: list) -> str:  # type: ignore[type-arg]
    errors = mape(records)
    shown = " | ".join(_percent(errors[gpu][OURS] or 0) for gpu in ("K80", "P100"))
    return f"| {fitted} | {scored} | {shown} | {_percent(covered(records) or 0)} |"


def _few(rows: Sequence[StepRow], count: int) -> str:
    means, held = [], []
    for gpu in ("K80", "P100"):
        mine = [row for row in rows if row.gpu == gpu]
        errors = []
        for seed in range(SAMPLES):
            some = Random(seed).sample(mine, len(mine))
            model = fit_steps(some[:count])
            for row in some[count:]:
                predicted = model.predict(row.network, row.complete is False)
                low_s, high_s = predicted.interval_s()
                errors.append(abs(predicted.seconds / row.step_s - 1))
                held.append(low_s <= row.step_s <= high_s)
        means.append(_percent(fmean(errors)))
    return f"| {count} at random, {SAMPLES} times | the others | {' | '.join(means)} | {_percent(fmean(held))} |"


def survivals(folder: Path) -> Iterator[str]:
    """Yield how many predicted survivals lie in their bands, by what was known."""
    yield "| later machines, predicted from | Google, 2019 | Amazon, 2020 |"
    yield "| --- | --- | --- |"
    tables = lives(folder)
    found = [calibration(rows) for rows in tables]
    counts = [f"{_percent(inside(one))} of {4 * len(one)}" for one in found]
    yield f"| earlier ones, and all other series | {' | '.join(counts)} |"
    wide = [_percent(inside(one, "inside_for_bursts")) for one in found]
    yield f"| the same, bands widened for bursts | {' | '.join(wide)} |"


def likelihoods(folder: Path) -> Iterator[str]:
    """Yield how likely each machine's life is made by those that ended, or had gone on for 3 h, before it began."""
    yield "| model | Google, 2019 | Amazon, 2020 |"
    yield "| --- | --- | --- |"
    names = (
        "published curves alone",
        "pooled",
        "Kaplan-Meier of the type",
        "best curve of the type",
    )
    columns = [_machines(rows) for rows in lives(folder)]
    for name in names:
        yield f"| {name} | {' | '.join(f'{fmean(one[name]):.2f}' for one in columns)} |"


def _machines(rows: Sequence[LifetimeRow]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for row in rows:
        known = [one for one in (_until(other, row) for other in rows) if one is not None]
        pool = Pool(prior)
        for one in sorted(known, key=lambda one: one.start):
            pool = pool.seen(one, one.start.timestamp())
        pooled = pool.lifetime(row.gpu, row.region)
        models: dict[str, Lifetime] = {
            "published curves alone": prior(row.gpu, row.region),
            "pooled": pooled,
            "Kaplan-Meier of the type": _observed(known, row.gpu),
            "best curve of the type": _best(known, row.gpu),
        }
        for name, model in models.items():
            found.setdefault(name, []).append(log_likelihood(model, [row]))
    return found


def _until(other: LifetimeRow, row: LifetimeRow) -> LifetimeRow | None:
    """Return what was known of another machine when this one began; a batch knows nothing of itself."""
    if other.start > row.start - timedelta(minutes=20):
        return None
    seen_s = (row.start - other.start).total_seconds()
    return other if other.age_s <= seen_s else replace(other, least_s=seen_s, most_s=None)


def _observed(known: Sequence[LifetimeRow], gpu: str) -> Lifetime:
    mine = [one for one in known if one.gpu == gpu]
    return kaplan_meier(mine).observed() if mine else prior(gpu)


def _best(known: Sequence[LifetimeRow], gpu: str) -> Lifetime:
    try:
        return fit_curves([one for one in known if one.gpu == gpu])[0].lifetime
    except (InvalidInput, ValueError):
        return prior(gpu)


def families(folder: Path) -> Iterator[str]:
    """Yield which curve fits each series best by AIC, and by how much the others fit worse."""
    yield "| series | machines | lost | exponential | Weibull | bathtub | Weibull shape |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    series: dict[tuple[str, str], list[LifetimeRow]] = {}
    for row in (row for rows in lives(folder) for row in rows):
        series.setdefault((row.gpu, row.region), []).append(row)
    for (gpu, region), rows in series.items():
        lost = sum(row.lost for row in rows)
        if lost < 3:
            continue
        fits = {one.family: one for one in fit_curves(rows)}
        least = min(one.aic for one in fits.values())
        cells = [
            f"+{fits[name].aic - least:.1f}" if name in fits else "" for name in ("exponential", "weibull", "bathtub")
        ]
        shape = getattr(fits["weibull"].lifetime, "shape", 0.0)
        yield f"| {gpu} {region} | {len(rows)} | {lost} | {' | '.join(cells)} | {shape:.2f} |"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def main() -> None:
    """Print every table."""
    folder = Path(sys.argv[1])
    found = document(folder)
    print("| bar | came out | holds |\n| --- | --- | --- |")
    for bar in found["bars"]:
        print(f"| {bar['what']} | {bar['value']} | {'yes' if bar['holds'] else 'no'} |")
    halves = ", ".join(f"{name} {_percent(one)}" for name, one in found["scaling"]["points"].items())
    print(
        f"\nHalves of each curve: {halves}. Whole curves: {_percent(found['scaling']['whole_curves'])} on average over"
    )
    print(f"{found['scaling']['splits']} halves, worst {_percent(found['scaling']['whole_curves_worst'])}.")
    checks = found["checkpoints"]
    print(f"Checkpoints: single ones {_percent(checks['mape_of_single'])}, means {_percent(checks['mape'])},")
    print(f"local part {_percent(checks['mape_local'])}.")
    parts = {
        "Step time": steps, "Survival": survivals, "Likelihood of the next life": likelihoods, "Families": families
    }  # fmt: skip
    for title, part in parts.items():
        print(f"\n## {title}\n")
        for line in part(folder):
            print(line)


if __name__ == "__main__":
    main()
