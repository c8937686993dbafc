import importlib
import json
import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from polythrottle.cli.commands import run
from polythrottle.cli.render.figures import _percent_tick, race, write_race
from polythrottle.domain.errors import BadFile, Exhausted, InvalidInput, UnknownName
from polythrottle.domain.problem import Problem
from polythrottle.domain.space import Knob, OperatingPoint, SearchSpace
from polythrottle.domain.study import Study, Trial
from polythrottle.lab import bench
from polythrottle.lab.bench.summary import runners, summarise
from polythrottle.optimize import make_optimizer
from polythrottle.optimize.options import Options

ORIN = bench.Simulated("sim:jetson-agx-orin", "efficientnet-b4", ("gpu_max_hz", "mem_hz"))


def write(path: Path, heat: float = 0.02) -> Path:
    """Write a table of 20 clocks times 5 batches whose optimum under 2x is at the eighth clock."""
    rows = ["gpu_max_hz,batch_size,latency_s,throughput_per_s,power_w,energy_j"]
    for clock in range(1, 21):
        for batch in (1, 2, 4, 8, 16):
            latency_s = 0.002 + 0.1 * batch**0.7 / clock
            power_w = 5 + heat * clock**3
            rows.append(f"{clock}e8,{batch},{latency_s},{batch / latency_s},{power_w},{power_w * latency_s / batch}")
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Write one table."""
    return write(tmp_path / "made__board__model.csv")


def test_a_search_is_counted_until_it_arrives(table: Path) -> None:
    """A whole grid finds the best row itself, so its regret is nothing and 1 % comes after 5 %."""
    record = bench.search(table, "mean<=2x", "grid", 0, 100)
    assert record.final_regret == 0
    assert record.trials_to_5pct is not None
    assert record.trials_to_1pct is not None
    assert 1 <= record.trials_to_5pct <= record.trials_to_1pct <= 100
    assert record.infeasible_before_5pct < record.trials_to_5pct
    assert record.search_energy_j > 0
    assert len(record.regrets) == 100
    assert record.regrets[29] == record.regret_30
    assert record.regrets[record.trials_to_5pct - 1] <= 0.05  # type: ignore[operator]


def test_every_broken_limit_is_counted(table: Path) -> None:
    """A whole grid breaks the limit once at every row that does not hold it; the excess is their sum."""
    posed = bench.subject(bench.TableFile(table), "mean<=2x")
    broken = [measured for measured in posed.truth.values() if not posed.judge.holds(measured)]
    record = bench.search(table, "mean<=2x", "grid", 0, 100)
    assert record.infeasible == len(broken)
    assert record.excess_total == pytest.approx(sum(map(posed.judge.excess, broken)))
    assert 0 < record.infeasible_after_two_feasible <= record.infeasible


def test_a_search_that_does_not_arrive_counts_as_45(table: Path) -> None:
    """One trial at the default is not within 5 % here."""
    record = bench.search(table, "mean<=2x", "bayes", 0, 1)
    assert record.trials_to_5pct is None
    assert record.arrived == 45.0
    assert record.regret_30 is None


def test_a_search_can_end_once_it_is_near_enough(table: Path) -> None:
    """With until, the trial that arrives is the last, and up to there nothing is different."""
    whole, short = (bench.search(table, "mean<=2x", "grid", 0, 100, until=until) for until in (None, 0.05))
    assert len(short.regrets) == short.trials_to_5pct == whole.trials_to_5pct
    assert whole.regrets[: len(short.regrets)] == short.regrets


@pytest.mark.slow
def test_bayes_is_compared_with_the_papers_method_and_with_optuna(table: Path) -> None:
    """The summary pairs the runs and gives an interval; with one table it is the ratio itself."""
    methods = ("paper", "bayes", "tpe")
    records = [bench.search(table, "mean<=2x", method, seed, 10) for method in methods for seed in (0, 1)]
    paper, ours, tpe = bench.summarise(records)
    assert paper.ratio_to_paper == pytest.approx(1.0)
    assert ours.ratio_to_paper == pytest.approx(ours.trials_to_5pct / paper.trials_to_5pct)
    assert ours.ratio_interval == pytest.approx((ours.ratio_to_paper, ours.ratio_to_paper))
    assert ours.ratio_to_optuna == pytest.approx(ours.trials_to_5pct / tpe.trials_to_5pct)
    assert [name for name, _ in bench.groups(records)] == ["made", "mean<=2x", "all"]


@pytest.mark.slow
def test_the_other_tables_of_a_device_are_its_history(tmp_path: Path) -> None:
    """Left out are the table itself, other devices and other sources; who learns nothing is given nothing."""
    own = write(tmp_path / "made__board__model.csv")
    near = [write(tmp_path / f"made__board__{name}.csv", heat) for name, heat in (("a", 0.01), ("b", 0.03))]
    for name in ("made__other__model.csv", "else__board__model.csv"):
        write(tmp_path / name)
    words = ["random", "bayes", "bayes+cold"]
    records = bench.run([own], ["mean<=2x"], words, 1, 3, history=bench.LEAVE_ONE_OUT)
    assert {record.method: record.history for record in records} == {"random": 0, "bayes": len(near), "bayes+cold": 0}


def test_named_history_never_holds_the_answer(table: Path) -> None:
    """A folder gives all its tables and journals but the table that is searched."""
    write(table.parent / "made__board__other.csv")
    journal = table.parent / "deep" / "study.jsonl"
    words = ["tune", "--device", f"replay:{table}", "--trials", "3", "--method", "random", "--journal", str(journal)]
    assert run([*words, "--json"]) == 0
    assert set(bench.files(str(table.parent))) == {table, table.parent / "made__board__other.csv", journal}
    (record,) = bench.run([table], ["mean<=2x"], ["bayes"], 1, 2, history=str(table.parent))
    assert record.history == 2


@pytest.mark.slow
def test_a_simulated_board_is_judged_by_its_noiseless_model() -> None:
    """The best of the truth is nobody's lucky window, and another seed is another noise."""
    posed = bench.subject(ORIN, "mean<=1.2x")
    assert len(posed.truth) == len(posed.problem.space) == 52
    record = bench.search(ORIN, "mean<=1.2x", "grid", 0, 52)
    assert (record.table, record.family) == ("sim:jetson-agx-orin/efficientnet-b4:gpu_max_hz,mem_hz", "sim")
    assert record.final_regret == 0
    assert record.infeasible == sum(not posed.judge.holds(measured) for measured in posed.truth.values())
    point = posed.problem.space.default
    seen = [posed.trial(seed, 0, point).measurement for seed in (0, 1, 0)]
    assert seen[0] == seen[2] != seen[1]


def test_a_simulated_board_learns_from_its_other_workloads() -> None:
    """Leave-one-out gives a study per other workload, made in the same run."""
    sources = bench.simulations(["sim:jetson-agx-orin"], ["efficientnet-b0", "efficientnet-b4"], ("mem_hz",))
    records = bench.run(sources, ["mean<=2x"], ["bayes"], 1, 3, history=bench.LEAVE_ONE_OUT)
    assert [record.history for record in records] == [1, 1]


def test_presets_are_tried_and_no_more() -> None:
    """The default, then the vendor's presets as far as the space can set them; then the search is over."""
    posed = bench.subject(ORIN, "mean<=2x")
    record = bench.search(ORIN, "mean<=2x", "preset", 0, 40)
    assert 1 < len(record.regrets) == len({posed.problem.space.default, *posed.presets}) < 40


def test_without_presets_the_power_limit_then_the_clock_is_turned_alone() -> None:
    """Each level of the one knob, from the top, with all else at the default; a space without either is one point."""
    limit, clock = Knob("power_limit_w", (100, 200)), Knob("gpu_freq_hz", (1, 2, 3))
    batch = Knob("batch_size", (1, 2))
    start = {"power_limit_w": 200, "gpu_freq_hz": 3, "batch_size": 1}

    def tried(*knobs: Knob, presets: tuple[OperatingPoint, ...] = ()) -> list[OperatingPoint]:
        space = SearchSpace.grid(knobs, {knob.name: start[knob.name] for knob in knobs})
        study, optimizer = Study(Problem(space), "preset"), make_optimizer("preset", Options(presets=presets))
        for number in range(len(space)):
            try:
                study = study.with_trial(Trial(number, optimizer.suggest(study)))
            except Exhausted:
                break
        return [trial.point for trial in study.trials]

    assert [point["power_limit_w"] for point in tried(limit, clock, batch)] == [200, 100]
    assert [point["gpu_freq_hz"] for point in tried(clock, batch)] == [3, 2, 1]
    assert len(tried(batch)) == 1
    inside = OperatingPoint({"gpu_freq_hz": 2, "batch_size": 2})
    assert tried(clock, batch, presets=(inside, OperatingPoint({"gpu_freq_hz": 9})))[1:] == [inside]


def test_the_command_prints_records_and_methods(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One record per table, SLO, method and seed."""
    words = ["bench", "search", "--tables", str(table.parent), "--methods", "random,grid", "--seeds", "2"]
    assert run([*words, "--slo", "mean<=2x", "--trials", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["records"]) == 4
    assert set(found["methods"]) == {"random", "grid"}
    assert {"table", "method", "seed", "trials_to_5pct", "trials_to_1pct", "infeasible_before_5pct", "final_regret",
            "search_energy_j", "suggest_seconds_median"} <= set(found["records"][0])  # fmt: skip
    assert run([*words, "--slo", "mean<=2x", "--trials", "5", "--out", "a.csv"]) == 0
    kept = pd.read_csv("a.csv")
    assert kept[["method", "seed"]].values.tolist() == [["random", 0], ["random", 1], ["grid", 0], ["grid", 1]]
    assert "within 5 %" in capsys.readouterr().out


def test_a_risk_that_nobody_can_heed_is_said_to_be_without_effect(
    table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those methods are named; of those that heed it nothing is said."""
    words = [
        "bench",
        "search",
        "--tables",
        str(table),
        "--seeds",
        "1",
        "--slo",
        "mean<=2x",
        "--trials",
        "2",
        "--methods",
    ]
    for methods, told in (("random,bayes", True), ("bayes", False)):
        assert run([*words, methods, "--risk", "0.1"]) == 0
        assert ("--risk 0.1 has no effect on random:" in capsys.readouterr().err) == told


@pytest.mark.slow
def test_the_table_fits_80_columns_and_the_figure_is_drawn(
    table: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ratios with intervals and long labels included; the figure is a PNG."""
    monkeypatch.setenv("COLUMNS", "80")
    figure = table.parent / "out.png"
    words = ["bench", "search", "--tables", str(table), "--methods", "paper,tpe,bayes+cold@0.05,preset", "--seeds", "1"]
    assert run([*words, "--slo", "mean<=2x", "--trials", "6", "--figure", str(figure)]) == 0
    assert max(len(line.rstrip()) for line in capsys.readouterr().out.splitlines()) <= 80
    assert figure.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.slow
def test_a_simulated_benchmark_is_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    """The word stands over the table, and a reduced space is named."""
    words = ["bench", "search", "--devices", "sim:jetson-agx-orin", "--workloads", "efficientnet-b4", "--methods"]
    rest = ["random", "--knobs", "gpu_max_hz,mem_hz,batch_size", "--seeds", "1", "--trials", "3", "--jobs", "1"]
    assert run([*words, *rest, "--until", "5%"]) == 0
    assert "sim (simulated): 3 runs each" in capsys.readouterr().out


BAD: dict[str, tuple[list[str], int, str]] = {
    "nothing to search": ([], 2, "--tables or --devices"),
    "all skipped": (["--tables", ".", "--skip", "made"], 2, "--skip"),
    "no such table": (["--tables", "none*"], 4, "means no table"),
    "no such board": (["--devices", "sim:jetson-agx-orn"], 3, "jetson-agx-orin"),
    "no simulated board": (["--devices", "cpu"], 2, "sim:<board>"),
    "no such workload": (["--devices", "sim:v100", "--workloads", "resnet5"], 3, "resnet50"),
    "no such knob": (["--devices", "sim:v100", "--knobs", "power_limt_w"], 3, "power_limit_w"),
    "workloads of tables": (["--tables", ".", "--workloads", "resnet50"], 2, "--devices"),
    "no such method": (["--tables", ".", "--methods", "bays"], 3, "bayes"),
    "no method": (["--tables", ".", "--methods", ","], 2, "at least one"),
    "no such suffix": (["--tables", ".", "--methods", "bayes+warm"], 2, "cold"),
    "tables without a name": (["--tables", ""], 2, "--tables needs a name"),
    "history without a name": (["--tables", ".", "--history", ""], 2, "--history needs a name"),
    "knobs of a comma": (["--devices", "sim:jetson-nano", "--knobs", ","], 2, "--knobs takes names"),
    "workloads with a gap": (["--devices", "sim:jetson-nano", "--workloads", "a,,b"], 2, "--workloads takes names"),
    "risk of chance": (["--tables", ".", "--methods", "random@0.05"], 2, "neither history nor risk"),
    "risk in words": (["--tables", ".", "--methods", "bayes@low"], 2, "bayes@0.05"),
    "risk out of range": (["--tables", ".", "--risk", "2"], 2, "risk"),
    "no history": (["--tables", ".", "--history", "none"], 4, "holds no history"),
    "history that is none": (["--tables", ".", "--history", "not.jsonl"], 4, "not.jsonl"),
    "until in words": (["--tables", ".", "--until", "near"], 2, "5%"),
    "until beyond all": (["--tables", ".", "--until", "500%"], 2, "between 0 and 1"),
    "figure of no kind": (["--tables", ".", "--figure", "out.bmp"], 2, ".png"),
    "figure nowhere": (["--tables", ".", "--figure", "none/out.png"], 8, "no folder"),
    "no seeds": (["--tables", ".", "--seeds", "0"], 2, "at least 1"),
    "no trials": (["--tables", ".", "--trials", "0"], 2, "at least 1"),
    "slo nobody meets": (["--tables", ".", "--slo", "mean<=0.5x"], 2, "no row"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
@pytest.mark.usefixtures("table")
def test_bad_input_gets_one_clear_line(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """One line that says what would be right, the exit code of its class, and nothing on standard output."""
    arguments, code, told = BAD[name]
    Path("not.jsonl").write_text("no journal\n")
    assert run(["bench", "search", *arguments]) == code
    shown = capsys.readouterr()
    last = shown.err.strip().splitlines()[-1]
    assert last.startswith("polythrottle: ")
    assert told in last
    assert "Traceback" not in shown.err
    assert shown.out == ""


def test_a_benchmark_that_cannot_be_is_refused(table: Path) -> None:
    """No table, no such method, an SLO nothing meets or nobody recorded: one clear error each."""
    with pytest.raises(BadFile, match="means no table"):
        bench.tables(str(table.parent / "none*"))
    with pytest.raises(UnknownName, match="bayes"):
        bench.run([table], ["mean<=2x"], ["bays"], 1, 5)
    with pytest.raises(InvalidInput, match="no row"):
        bench.search(table, "mean<=0.5x", "grid", 0, 5)
    with pytest.raises(InvalidInput, match="does not record p99"):
        bench.search(table, "p99<=1s", "grid", 0, 5)
    with pytest.raises(InvalidInput, match="at least 1"):
        bench.run([table], ["mean<=2x"], ["grid"], 0, 5)


@pytest.mark.slow
def test_the_search_benchmark_goes_on_where_it_stopped(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page says of each bar whether it holds; what was searched once is not searched again, until it changes."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "benchmarks")
    script, sources = importlib.import_module("search"), [bench.TableFile(table)]
    changed = {"HERE": table.parent, "METHODS": ("bayes+cold", "paper", "paper-joint", "tpe"), "FACTORS": ("mean<=2x",)}
    changed |= {"headline": lambda: sources, "simulated": lambda: [ORIN], "RULES": bench.Rules(trials=6)}
    for name, value in changed.items():
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr(script.suggest, "times", lambda: {2000: 0.1, 100_000: 4.0})
    monkeypatch.setattr("sys.argv", ["search.py", "--seeds", "1", "--jobs", "1"])
    script.main()
    page = (table.parent / "search.md").read_text()
    assert "| trials to 5 %, cold, ÷ paper |" in page
    assert "| trials to 5 %, cold, ÷ paper-joint |" in page
    assert "| one suggestion at 100,000 points, s | 4.00 | ≤ 3 | **no** |" in page
    assert (table.parent / "search-simulated.png").read_bytes().startswith(b"\x89PNG")
    assert set(json.loads((table.parent / "search.json").read_text())) == {"bars", "summaries"}
    monkeypatch.setattr(bench, "perform", lambda plan, jobs, do: iter([None] * len(plan)))
    script.main()
    assert (table.parent / "search.md").read_text() == page
    before = script.key(bench.plan(sources, ["mean<=2x"], ["grid"], 1, script.RULES, table.parent).tasks[0])
    write(table, 0.03)
    script.file_digest.cache_clear()
    script.subject_digest.cache_clear()
    assert script.key(bench.plan(sources, ["mean<=2x"], ["grid"], 1, script.RULES, table.parent).tasks[0]) != before


def searched(method: str, table: str, arrived: int | None, **given: object) -> bench.Record:
    """Return the record of a search that came near the best after so many trials."""
    regrets = (None, 0.5, 0.04)
    record = bench.Record(table, "mean<=2x", method, 0, 10, arrived, None, 1, 0.04, 1.0, 0.1, regrets=regrets)
    return replace(record, **given)  # type: ignore[arg-type]


def test_trials_are_compared_subject_by_subject() -> None:
    """A method that needs half of the yardstick's trials on each table has a ratio of one half, and no interval."""
    records = [
        *(searched("paper", name, count) for name, count in (("a", 4), ("b", 8))),
        *(searched("bayes", name, count) for name, count in (("a", 2), ("b", 4), ("c", 9))),
    ]
    told = {one.method: one for one in summarise(records)}
    assert told["bayes"].ratio_to_paper == pytest.approx(0.5)
    assert told["bayes"].ratio_interval == pytest.approx((0.5, 0.5))
    assert told["bayes"].ratio_to_optuna is None
    assert told["paper"].ratio_to_paper == pytest.approx(1.0)
    alone = next(iter(summarise([searched("bayes", "a", 2)])))
    assert (alone.ratio_to_paper, alone.ratio_interval) == (None, None)


def test_a_figure_shows_quartiles_and_what_was_needed_and_broken(tmp_path: Path) -> None:
    """Regret stays as it was when a search has ended, and is unknown while nothing is feasible."""
    records = [searched("bayes", name, 3, trials=5) for name in "abc"] + [
        searched("tpe", "a", 8),
        searched("tpe", "b", 2),
    ]
    ours, theirs = runners(records)
    assert (ours.name, theirs.name) == ("bayes", "tpe")
    assert ours.middle == (math.inf, 0.5, 0.04, 0.04, 0.04)
    assert ours.low == ours.high == ours.middle
    assert ours.trials == pytest.approx((3.0, 3.0, 3.0))
    assert ours.broken == pytest.approx((1.0, 1.0, 1.0))
    assert theirs.trials[0] == pytest.approx(4.0)
    assert theirs.trials[1] == pytest.approx(2.0)
    assert theirs.trials[2] == pytest.approx(8.0)
    figure = race([ours, replace(theirs, name="bayes@0.05"), replace(theirs, name="tpe")], "mean<=2x")
    left, right = figure.axes
    assert [line.get_label() for line in left.lines[:3]] == ["bayes", "bayes@0.05", "tpe"]
    assert [line.get_linestyle() for line in left.lines[:3]] == ["-", "--", "-"]
    assert left.lines[0].get_linewidth() > left.lines[2].get_linewidth()
    assert len(left.collections) == 1  # a band of quartiles for our own at its usual risk
    drawn = left.lines[0].get_ydata()
    assert math.isnan(drawn[0])
    assert list(drawn[1:]) == [0.5, 0.04, 0.04, 0.04]
    assert left.get_xlim() == (1, 10)
    assert {text.get_text() for text in right.texts} == {"bayes", "bayes@0.05", "tpe"}
    assert [line.get_marker() for line in right.lines if line.get_marker() != "None"] == ["*", "*", "o"]
    assert _percent_tick(0.001, None) == "≤ 0.1 %"
    assert _percent_tick(0.05, None) == "5 %"
    assert figure.get_suptitle() == "mean ≤ 2x"
    write_race([ours], tmp_path / "race.svg", "")
    assert (tmp_path / "race.svg").stat().st_size > 1000
