"""The search benchmark: every bar and every method, cold and with history: python benchmarks/search.py.

Subjects are the measured headline tables and simulated Orin and TX2 boards: the reduced spaces of arXiv 2310.19991 (GPU
clock × memory clock, without and with batches) and the full ones. Writes search.md, search.json, search.png and
search-simulated.png beside itself; with --whole search_whole.json, and the table of whole searches that search.md
leads with. What was searched is kept in .cache, under a digest of everything it follows from:
a run that was interrupted goes on, and a change to one method repeats that method alone.
"""

import argparse
import ast
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import suggest

from polythrottle.api.progress import LiveSweep
from polythrottle.catalog.documents import locate
from polythrottle.cli.render.figures import write_race
from polythrottle.domain.errors import PolythrottleError
from polythrottle.lab import bench
from polythrottle.lab.bench.contest import ABLATIONS
from polythrottle.optimize import Options

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PACKAGE = ROOT / "polythrottle"
TABLES = ROOT.parent / "shared" / "data" / "replay"
COLD, WARM = "bayes+cold", "bayes"
CAREFUL = ("bayes+cold@0.05", "bayes@0.05")
JOINT = "paper-joint"
METHODS = ("paper", JOINT, COLD, WARM, *CAREFUL, "tpe", "gp", "gradient", "preset", "random")
FACTORS = ("mean<=1.2x", "mean<=1.5x", "mean<=2x")
BOARDS = ("sim:jetson-agx-orin", "sim:jetson-tx2")
SPACES = (("gpu_max_hz", "mem_hz"), ("gpu_max_hz", "mem_hz", "batch_size"), None)
RULES = bench.Rules(trials=40, history=bench.LEAVE_ONE_OUT)
SETS = {"headline": "Measured headline tables", "simulated": "Simulated Orin and TX2"}
WHOLE = "search_whole.json"
WHOLE_METHODS = (COLD, WARM, "bayes+cold@0.05", "paper", "tpe", "preset", "random")
WHOLE_BOARDS = (
    ("jetson-xavier-nx", "efficientnet-b0"), ("jetson-orin-nano", "resnet50"), ("jetson-orin-nx", "yolo-small"),
    ("jetson-agx-xavier", "efficientnet-b7"), ("l4", "efficientnet-b4"), ("v100", "bert-base-fp16"),
    ("jetson-tx2", "inceptionv3"), ("jetson-agx-orin", "mobilenetv2"), ("jetson-tx2", "resnet50"),
    ("jetson-nano", "efficientnet-b0"), ("a40", "mobilenetv2"), ("h100", "efficientnet-b0"),
)  # fmt: skip
WHOLE_SLO = "p99<=1.5x"
WHOLE_SETS = {"headline": "Recorded tables", "simulated": f"Simulated boards, `{WHOLE_SLO}`"}
WHOLE_HEAD = (
    "| method | runs | within 2 % | within 5 % | broken | worst | trials | infeasible | strayed | saved | of | "
    "at most | kept |"
)
RULE = "|" + " --- |" * (WHOLE_HEAD.count("|") - 1)
HEAD = (
    "| method | runs | within 5 % | trials | ÷ paper | ÷ Optuna | broken before | broken late | excess | regret at 30 |"
)


def headline() -> list[bench.Source]:
    """Return the measured headline tables; NCF is history only, because nothing is to be gained there."""
    paths = [
        path for family in ("flexibo", "loudva", "zeus-nsdi23") for path in bench.tables(f"{TABLES}/{family}__*.csv")
    ]
    return [bench.TableFile(path) for path in paths if "ncf" not in path.name]


def simulated() -> list[bench.Source]:
    """Return the paper's models on both boards, over each of the spaces."""
    return [source for knobs in SPACES for source in bench.simulations(BOARDS, knobs=knobs)]


@dataclass(frozen=True)
class Bar:
    """A figure that must hold.

    Args:
        name: What it is.
        measured: What it is now, as text.
        wanted: What it must be, as text.
        holds: Whether it is.
    """

    name: str
    measured: str
    wanted: str
    holds: bool


class Cache:
    """Records of searches made before, by a digest of everything they follow from.

    Args:
        folder: Where they are kept.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._path = folder / "search.jsonl"
        self._path.touch()
        lines = map(json.loads, self._path.read_text().splitlines())
        self._known = {line["key"]: _record(line["record"]) for line in lines}

    def get(self, task: bench.Task) -> bench.Record | None:
        """Return the record of a search, if it was made."""
        return self._known.get(key(task))

    def put(self, task: bench.Task, record: bench.Record) -> None:
        """Keep the record of a search."""
        self._known[key(task)] = record
        with self._path.open("a") as file:
            file.write(json.dumps({"key": key(task), "record": asdict(record)}) + "\n")


def _record(line: Mapping[str, object]) -> bench.Record:
    return bench.Record(**{**line, "regrets": tuple(line["regrets"])})  # type: ignore[arg-type,call-overload]


def key(task: bench.Task) -> str:
    """Return a digest of everything a search follows from."""
    entrant = task.entrant
    past = [path.name if path.suffix == ".jsonl" else file_digest(path) for path in task.history]
    rules = replace(task.rules, history=None)
    parts = [task.source.name, task.slo, entrant.label, task.seed, asdict(rules), subject_digest(task.source), past]
    return digest([json.dumps(parts), method_digest(entrant.method)])


def digest(texts: Iterable[str | bytes]) -> str:
    """Return one digest of several texts."""
    found = hashlib.sha256()
    for text in texts:
        found.update(hashlib.sha256(text if isinstance(text, bytes) else text.encode()).digest())
    return found.hexdigest()[:24]


@cache
def file_digest(path: Path) -> str:
    """Return a digest of a file."""
    return digest([path.read_bytes()])


@cache
def subject_digest(source: bench.Source) -> str:
    """Return a digest of what poses and judges a subject: its table, or simulator, board and model."""
    judges = [PACKAGE / "lab/bench/contest.py", PACKAGE / "lab/bench/subjects.py"]
    if isinstance(source, bench.TableFile):
        return digest(map(file_digest, (*judges, PACKAGE / "backends/replay.py", source.path)))
    assert isinstance(source, bench.Simulated)
    board = locate("devices", "device", source.device.removeprefix("sim:").partition("?")[0])
    model = locate("profiles/workloads", "workload", source.workload)
    modules = (
        path for folder in ("backends/simulated", "metering") for path in sorted((PACKAGE / folder).glob("*.py"))
    )
    return digest(map(file_digest, (*judges, *modules, board, model)))


@cache
def method_digest(method: str) -> str:
    """Return a digest of the modules of ``optimize/`` that a method's own module imports, directly or not."""
    start = type(bench.Entrant.parse(method).optimizer(Options())).__module__
    found, fresh = {}, {start}
    while fresh:
        found |= {name: _imports(path) for name in fresh if (path := _file(name)).is_file()}
        fresh = {name for names in found.values() for name in names if name not in found and _file(name).is_file()}
    own = [(PACKAGE / "optimize/__init__.py").read_text()] if method in ABLATIONS else []
    return digest([*own, *(file_digest(_file(name)) for name in sorted(found))])


def _file(name: str) -> Path:
    return ROOT / (name.replace(".", "/") + ".py")


def _imports(path: Path) -> set[str]:
    """Return the modules of ``polythrottle.optimize`` that a module imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("polythrottle.optimize"):
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def planned(seeds: int, folder: Path) -> dict[str, bench.ContestPlan]:
    """Return what there is to do on each set of subjects; ablations go without history and with one seed."""
    lessons = folder / digest([method_digest("bayes"), *map(subject_digest, simulated())])
    lessons.mkdir(parents=True, exist_ok=True)
    extra = tuple(f"{name}+cold" for name in ABLATIONS)
    plans = {}
    for name, sources in (("headline", headline()), ("simulated", simulated())):
        main = bench.plan(sources, FACTORS, METHODS, seeds, RULES, lessons)
        ablated = bench.plan(sources, FACTORS, extra, 1, RULES, lessons).tasks if extra else ()
        plans[name] = bench.ContestPlan(main.lessons, (*sorted(main.tasks, key=lambda task: task.seed), *ablated))
    return plans


def searched(plan: bench.ContestPlan, cache: Cache, jobs: int, methods: Sequence[str]) -> list[bench.Record]:
    """Return the records that are known of a plan once the tasks of these methods, or of all, are done."""
    todo = tuple(
        task for task in plan.tasks if cache.get(task) is None and (not methods or task.entrant.label in methods)
    )
    needed = {path for task in todo for path in task.history}
    lessons = tuple(lesson for lesson in plan.lessons if lesson.journal in needed)
    rest = bench.ContestPlan(lessons, todo)
    with LiveSweep("searching") as live:
        for done, record in enumerate(bench.perform(rest, jobs, bench.Task.do), start=1):
            if record is not None:
                cache.put(todo[done - len(lessons) - 1], record)
            live.counted(done, len(rest))
    return known(plan, cache)


def known(plan: bench.ContestPlan, cache: Cache) -> list[bench.Record]:
    """Return the records that the cache holds of a plan."""
    return [record for task in plan.tasks if (record := cache.get(task)) is not None]


def bars(records: Sequence[bench.Record], wanted: Mapping[str, float], strict: bool) -> Iterator[Bar]:
    """Yield every bar of one set of subjects that can be told.

    Args:
        records: Of that set.
        wanted: The limit of each bar.
        strict: Whether the interval against Optuna must exclude 1, or the figure alone.
    """
    by = {summary.method: summary for summary in bench.summarise(records)}
    for label, name in ((COLD, "cold"), (WARM, "with history")):
        if (one := by.get(label)) is None or one.ratio_to_paper is None:
            continue
        trials = f"{one.ratio_to_paper:.2f} {_interval(one.ratio_interval)}; {one.trials_to_5pct:.1f} trials"
        yield _bar(f"trials to 5 %, {name}, ÷ paper", trials, one.ratio_to_paper, wanted[f"ratio {name}"])
        yield from _against_joint(records, label, name, wanted[f"ratio {name}"])
        broken = one.infeasible_before_5pct
        yield _bar(f"infeasible before 5 %, {name}", f"{broken:.2f}", broken, wanted[f"broken {name}"])
    for label in CAREFUL:
        if (one := by.get(label)) is not None:
            share = one.share_broken_after_two
            yield _bar(f"runs of {label} broken after two feasible points", f"{share:.1%}", share, 0.05, "{:.0%}")
    if (one := by.get(COLD)) is not None and one.regret_30 is not None:
        yield _bar("regret after 30 trials, cold", f"{one.regret_30:.2%}", one.regret_30, wanted["regret"], "{:.1%}")
    if one is not None and one.ratio_to_optuna is not None and one.optuna_interval is not None:
        text = f"{one.ratio_to_optuna:.2f} {_interval(one.optuna_interval)}"
        beaten = (one.optuna_interval[1] if strict else one.ratio_to_optuna) < 1.0
        yield Bar("trials to 5 %, cold, ÷ best Optuna sampler", text, f"< 1{', interval too' * strict}", beaten)


def _against_joint(records: Sequence[bench.Record], label: str, name: str, most: float) -> Iterator[Bar]:
    """Yield the same ratio to the paper's search without its two phases, the harder yardstick on some tables."""
    joint = [replace(one, method=bench.YARDSTICK) for one in records if one.method == JOINT]
    for one in bench.summarise([*joint, *(record for record in records if record.method == label)])[1:]:
        if one.ratio_to_paper is not None:
            text = f"{one.ratio_to_paper:.2f} {_interval(one.ratio_interval)}"
            yield _bar(f"trials to 5 %, {name}, ÷ {JOINT}", text, one.ratio_to_paper, most)


def _bar(name: str, text: str, value: float, most: float, form: str = "{:g}") -> Bar:
    return Bar(name, text, f"≤ {form.format(most)}", value <= most)


def _interval(ends: tuple[float, float] | None) -> str:
    return "" if ends is None else "[{:.2f}, {:.2f}]".format(*ends)


WANTED = {
    "headline": {
        "ratio cold": 0.7, "ratio with history": 0.45, "broken cold": 1.5, "broken with history": 1.0, "regret": 0.015,
    },
    "simulated": {
        "ratio cold": 0.65, "ratio with history": 0.4, "broken cold": 0.7, "broken with history": 0.3, "regret": 0.01,
    },
}  # fmt: skip


def timed() -> Iterator[Bar]:
    """Yield the bars on the time of one suggestion."""
    for (points, seconds), most in zip(sorted(suggest.times().items()), (0.5, 3.0), strict=True):
        yield _bar(f"one suggestion at {points:,} points, s", f"{seconds:.2f}", seconds, most)


def page(found: Mapping[str, Sequence[bench.Record]], told: Mapping[str, Sequence[Bar]]) -> Iterator[str]:
    """Yield the lines of the result page."""
    yield from ("# How the search methods compare", "", *whole_section(), "## Trials to within 5 %", "", *PREFACE, "")
    for name, records in found.items():
        subjects, seeds = (len({getattr(record, name) for record in records}) for name in ("table", "seed"))
        count = f"subjects: {subjects}; seeds: {seeds}; searches: {len(records):,}"
        yield from (f"## {SETS[name]} ({count})", "", f"![Regret over trials, and what it took]({figure(name).name})")
        yield from ("", "| figure | measured | bar | holds |", "| --- | --- | --- | --- |")
        yield from (f"| {b.name} | {b.measured} | {b.wanted} | {'yes' if b.holds else '**no**'} |" for b in told[name])
        for group, some in _groups(records):
            yield from ("", f"### {group}", "", HEAD, "|" + " --- |" * (HEAD.count("|") - 1))
            yield from map(_row, bench.summarise(some))
        yield ""
    yield from ("## What made it", "", provenance())


PREFACE = (
    "Written by `make bench-search` (`benchmarks/search.py`); nothing here is written by hand. Each search makes 40",
    "trials; limits are 1.2, 1.5 and 2 times the mean latency of the fastest point. Trials are geometric means to",
    "within 5 % of the best feasible point (not reached counts 45), their ratios are paired by subject, limit and",
    "seed, and intervals are 95 % bootstrap intervals over subjects. *broken before*: mean trials that broke the",
    "limit before then; *broken late*: runs that broke it once two feasible points had been visited; *excess*: mean",
    "sum of the fractions it was broken by. `bayes` learns from the other tables of its source and device (those of",
    "`loudva` have none and start cold) or, on simulated boards, from 30 trials on each of the other models;",
    "`bayes+cold` learns from nothing; `@0.05` is `--risk 0.05`; `paper` searches CPU knobs apart, as published,",
    "`paper-joint` all knobs at once; what else bears `+cold` is `bayes` with one ingredient taken out. Simulated",
    "boards are judged by the simulator's noiseless model and predict no real board.",
)


WHOLE_PREFACE = (
    "As a user has it: each method by its own defaults to its own end, as `polythrottle tune` searches, at most 30",
    "trials (`python benchmarks/search.py --whole`). An answer counts as within 2 % or 5 % of the best feasible point",
    "only if it truly holds the limit; *broken*: answers that do not; *worst*: the most that an answer that holds",
    "takes beyond the best; *infeasible*: trials at points that truly break the limit; *strayed*: searches with one",
    "once a point had been tried that holds, which is what `--risk` bounds; *saved*: share of the default point's",
    "energy, which an answer that breaks the limit does not save, *of* what the best points save; *at most*: median of",
    "what was said to be left to save at most, and *kept*: ends at which no more was left. Of simulated boards the",
    "truth is the noiseless model. `@0.05` is `--risk 0.05`.",
)


def whole_section() -> Iterator[str]:
    """Yield the lines of the table of whole searches, as far as they were made."""
    yield from ("## Whole searches", "", *WHOLE_PREFACE, "")
    for name, document in _whole_documents().items():
        subjects = len({one["table"] for one in document["searches"]})
        yield from (f"{WHOLE_SETS[name]} ({subjects} subjects):", "", WHOLE_HEAD, RULE)
        yield from (
            _whole_row(bench.WholeSummary(**{"strayed": None, "promised": None, **one}))
            for one in document["methods"].values()
        )
        yield ""


def _whole_documents() -> dict[str, Any]:
    """Return what whole searches came to, by the set of their subjects."""
    path = HERE / WHOLE
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def _whole_row(one: bench.WholeSummary) -> str:
    shares = (one.worst, one.strayed, one.promised, one.promise_kept)
    worst, strayed, promised, kept = ("–" if share is None else f"{share:.0%}" for share in shares)
    cells = (
        f"`{one.method}`", str(one.runs), f"{one.within_2pct:.0%}", f"{one.within_5pct:.0%}", f"{one.broken:.0%}",
        worst, f"{one.trials:.1f}", f"{one.infeasible:.1f}", strayed, f"{one.saved:.1%}",
        f"{one.to_save:.1%}", promised, kept,
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def write_whole(found: Mapping[str, Sequence[bench.WholeSearch]]) -> None:
    """Write what whole searches of these sets came to, and the table that the page leads with."""
    documents = _whole_documents() | {name: bench.whole_document(searches) for name, searches in found.items()}
    ordered = {name: documents[name] for name in WHOLE_SETS if name in documents}
    (HERE / WHOLE).write_text(json.dumps(ordered, indent=1) + "\n")
    page = HERE / "search.md"
    rest = page.read_text().partition("## Trials to within 5 %")
    page.write_text("\n".join(["# How the search methods compare", "", *whole_section(), "".join(rest[1:])]))


def search_whole(sets: Sequence[str], methods: Sequence[str], seeds: int, jobs: int) -> None:
    """Make the whole searches of these sets, and write what they came to."""
    boards = [bench.Simulated(f"sim:{board}", model) for board, model in WHOLE_BOARDS]
    plans: dict[str, tuple[Sequence[bench.Source], Sequence[str]]] = {
        "headline": (headline(), FACTORS),
        "simulated": (boards, (WHOLE_SLO,)),
    }
    rules = bench.Rules(trials=bench.WHOLE_TRIALS, history=bench.LEAVE_ONE_OUT)
    with LiveSweep("searching") as live:
        for name in sets:
            sources, slos = plans[name]
            found = bench.run_whole(sources, slos, methods or WHOLE_METHODS, seeds, rules, jobs, live.counted)
            write_whole({name: found})


def _groups(records: Sequence[bench.Record]) -> Iterator[tuple[str, Sequence[bench.Record]]]:
    """Yield all records, then those of each family, space and limit."""
    *parts, (_, whole) = bench.groups(records)
    yield "all", whole
    spaces = {_space(record): None for record in records if record.family == "sim"}
    yield from ((space, [record for record in records if _space(record) == space]) for space in spaces)
    yield from ((name, some) for name, some in parts if name != "sim")


def _space(record: bench.Record) -> str:
    board, _, rest = record.table.removeprefix("sim:").partition("/")
    return f"{board}, {rest.partition(':')[2].replace(',', ' × ') or 'full space'}"


def _row(one: bench.Summary) -> str:
    cells = (
        f"`{one.method}`", str(one.runs), f"{one.share_within_5pct:.0%}", f"{one.trials_to_5pct:.1f}",
        _pair(one.ratio_to_paper, one.ratio_interval), _pair(one.ratio_to_optuna, one.optuna_interval),
        f"{one.infeasible_before_5pct:.2f}", f"{one.share_broken_after_two:.0%}", f"{one.excess_total:.2f}",
        "–" if one.regret_30 is None else f"{one.regret_30:.2%}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _pair(value: float | None, ends: tuple[float, float] | None) -> str:
    return "–" if value is None else f"{value:.2f} {_interval(ends)}"


def provenance() -> str:
    """Return what the figures follow from, without a date."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("numpy", "torch", "botorch", "optuna"))
    source = digest(map(file_digest, sorted((PACKAGE / "optimize").glob("*.py"))))
    return f"`make bench-search`; {packages}; `polythrottle/optimize` {source}."


def figure(name: str) -> Path:
    """Return where the figure of one set of subjects goes."""
    return HERE / ("search.png" if name == "headline" else f"search-{name}.png")


def write(found: Mapping[str, Sequence[bench.Record]]) -> None:
    """Write page, summaries and figures."""
    told = {name: [*bars(records, WANTED[name], name == "headline")] for name, records in found.items()}
    if "headline" in told:
        told["headline"] += timed()
    (HERE / "search.md").write_text("\n".join(page(found, told)) + "\n")
    summaries = {
        name: {group: [asdict(one) for one in bench.summarise(some)] for group, some in _groups(records)}
        for name, records in found.items()
    }
    lines = {"bars": {name: [asdict(bar) for bar in some] for name, some in told.items()}, "summaries": summaries}
    (HERE / "search.json").write_text(json.dumps(lines, indent=1) + "\n")
    for name, records in found.items():
        shown = [record for record in records if record.method in METHODS]
        write_race(bench.runners(shown), figure(name), f"{SETS[name]}, {', '.join(FACTORS)}")


def main() -> None:
    """Search what is not in the cache yet, and write the results."""
    words = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    words.add_argument("--seeds", type=int, default=3, help="seeds of every method but the ablations; 3")
    words.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes; one per processor")
    words.add_argument("--sets", default=",".join(SETS), help=f"of {', '.join(SETS)}; both")
    words.add_argument("--methods", default="", help="search with these now; of the others, write what is known")
    words.add_argument("--whole", action="store_true", help="make the whole searches, and nothing else")
    asked = words.parse_args()
    if unknown := set(asked.sets.split(",")) - set(SETS):
        words.error(f"no set {', '.join(sorted(unknown))}; there are {', '.join(SETS)}")
    methods = [name for name in asked.methods.split(",") if name]
    try:
        if asked.whole:
            search_whole(asked.sets.split(","), methods, asked.seeds, asked.jobs)
            return
        _run(asked.sets.split(","), asked.seeds, asked.jobs, methods)
    except PolythrottleError as error:
        words.exit(error.exit_code, f"benchmarks/search.py: {error}\n")


def _run(sets: Sequence[str], seeds: int, jobs: int, methods: Sequence[str]) -> None:
    folder = HERE / ".cache"
    kept, plans = Cache(folder), planned(seeds, folder)
    found = {name: searched(plan, kept, jobs, methods) for name, plan in plans.items() if name in sets}
    write({name: records for name, records in found.items() if records})


if __name__ == "__main__":
    main()
