"""Whole searches are made as `tune` makes them, and judged by the truth at their answers."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from polythrottle import tune
from polythrottle.cli.commands import run
from polythrottle.lab import bench
from polythrottle.lab.bench import whole_search
from polythrottle.tuning.setup import Setup

SEARCH = bench.WholeSearch(
    "a__b__c.csv", "mean<=2x", "bayes", 0, 0, 9, 2, 2000.0, 50.0, 6.0, 0.0, True, 0.3, 0.3, 0.01, "nothing left", 1
)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Write a table of 12 clocks whose optimum under 2x is at the sixth."""
    rows = ["gpu_max_hz,latency_s,energy_j"]
    for clock in range(1, 13):
        rows.append(f"{clock}e8,{0.06 / clock},{0.06 / clock * (5 + 0.02 * clock**3)}")
    path = tmp_path / "made__board__model.csv"
    path.write_text("\n".join(rows) + "\n")
    return path


def task(table: Path, method: str, trials: int = bench.WHOLE_TRIALS) -> bench.Task:
    """Return a search of the table."""
    return bench.Task(bench.TableFile(table), "mean<=2x", bench.Entrant.parse(method), 0, bench.Rules(trials))


def test_a_grid_to_its_end_finds_the_best_and_pays_for_all(table: Path) -> None:
    """It visits every row, ends because none is left, and every row beyond the limit is counted with its items."""
    found = bench.search_whole(task(table, "grid"))
    posed = bench.subject(bench.TableFile(table), "mean<=2x")
    beyond = sum(not posed.judge.holds(measured) for measured in posed.truth.values())
    assert (found.trials, found.regret, found.holds, found.infeasible) == (12, 0.0, True, beyond)
    assert found.items_beyond == 1000 * beyond
    assert found.strayed == beyond, "the default, which holds, comes first"
    assert found.saved == found.to_save > 0.1
    assert found.search_j == pytest.approx(1000 * sum(measured.energy_j for measured in posed.truth.values()))
    assert found.promised is None, "a grid does not say what is left"
    assert found.ended == "all points tried: 12"
    assert found.within(0.0)


@pytest.mark.slow
def test_it_is_the_search_that_tune_makes(table: Path) -> None:
    """As many trials, the same answer, the same reason to end, and what the last words say was promised."""
    found = bench.search_whole(task(table, "bayes"))
    made = tune(f"replay:{table}", slo="mean<=2x", journal=table.parent / "own.jsonl", progress=False)
    best = made.study.best
    assert best is not None
    assert best.measurement is not None
    posed = bench.subject(bench.TableFile(table), "mean<=2x")
    assert (found.trials, found.ended) == (len(made.study.trials), made.ended)
    assert found.regret == pytest.approx(best.measurement.energy_j / posed.best_j - 1)
    assert found.promised is not None
    assert found.ended.endswith(f"; at most {100 * found.promised:.0f} % is left to save, likely less")


def test_a_noisy_board_is_judged_by_its_noiseless_model() -> None:
    """Its windows end when they know enough, and cost what the board's own meter and clock say."""
    board = bench.Simulated("sim:jetson-tx2", "efficientnet-b0", ("gpu_max_hz",))
    found = bench.search_whole(bench.Task(board, "p99<=2x", bench.Entrant.parse("random"), 3, bench.Rules(4)))
    posed = bench.subject(board, "p99<=2x")
    assert found.trials == 4
    assert found.regret in [pytest.approx(one.energy_j / posed.best_j - 1) for one in posed.truth.values()]
    assert 0 < found.search_s < 3600
    assert found.search_j > 0
    tuned = Setup(board.device, board.workload).searching
    assert tuned.window(board.open()[0]) == whole_search.WINDOW, "what tune looks through"


def test_a_search_that_finds_nothing_has_no_answer(tmp_path: Path) -> None:
    """Where the default breaks the limit and there is but one trial, nothing is saved and nothing holds."""
    path = tmp_path / "made__board__slow.csv"
    path.write_text("gpu_max_hz,batch_size,latency_s,energy_j\n2e8,1,0.02,1\n1e8,1,0.01,2\n")
    found = bench.search_whole(replace(task(path, "random", 1), slo="mean<=1x"))
    assert (found.regret, found.holds, found.saved, found.infeasible) == (None, False, 0.0, 1)


@pytest.mark.parametrize(
    ("changed", "name", "value"),
    [
        ({}, "within_2pct", 0.5),
        ({"regret": 0.04}, "within_5pct", 0.5),
        ({"regret": -0.1, "holds": False}, "broken", 0.5),
        ({"regret": None, "holds": False}, "unanswered", 0.5),
        ({"regret": 0.005}, "promise_kept", 0.5),
        ({"promised": None}, "promise_kept", 0.0),
        ({"strayed": 0}, "strayed", 0.5),
    ],
)
def test_what_counts_as_a_good_end(changed: dict[str, object], name: str, value: float) -> None:
    """Beside one search that ended 50 % off: an answer that breaks the limit is near nothing, however cheap it is."""
    bad = replace(SEARCH, regret=0.5, saved=0.0)
    (summary,) = bench.summarise_whole([bad, replace(SEARCH, **changed)])
    assert getattr(summary, name) == value
    assert summary.worst == 0.5
    assert summary.saved == (0.0 if changed.get("holds") is False else 0.15)


def test_the_table_says_what_became_of_whole_searches(
    table: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 80 columns; the document and the rows hold every search."""
    monkeypatch.setenv("COLUMNS", "80")
    words = ["bench", "search", "--whole", "--tables", str(table), "--methods", "random,grid", "--seeds", "2"]
    rest = ["--slo", "mean<=2x", "--jobs", "1"]
    assert run([*words, *rest, "--out", "rows.csv"]) == 0
    out = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 80
    assert "all: 2 runs each" in out
    assert "kept: of ends that said how much is left to save at most" in out
    assert len(pd.read_csv("rows.csv")) == 4
    assert run([*words, *rest, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["methods"]["grid"]["within_2pct"] == 1.0
    assert len(document["searches"]) == 4


@pytest.mark.parametrize("words", [["--until", "5%"], ["--figure", "out.png"]])
def test_what_does_not_go_with_whole_searches_is_refused(
    table: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """One line each, before anything is searched."""
    assert run(["bench", "search", "--whole", "--tables", str(table), *words]) == 2
    assert "--whole" in capsys.readouterr().err


def test_the_benchmark_page_leads_with_whole_searches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each set's table is made anew without the other's, and what the page says of trials to within 5 % stays."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "benchmarks")
    script = importlib.import_module("search")
    monkeypatch.setattr(script, "HERE", tmp_path)
    (tmp_path / "search.md").write_text("# How the search methods compare\n\n## Trials to within 5 %\n\nas before\n")
    script.write_whole({"simulated": [SEARCH, replace(SEARCH, regret=0.5)]})
    script.write_whole({"headline": [SEARCH]})
    page = (tmp_path / "search.md").read_text()
    lines = page.splitlines()
    assert lines[2] == "## Whole searches"
    headline = lines.index("| `bayes` | 1 | 100% | 100% | 0% | 0% | 9.0 | 2.0 | 100% | 30.0% | 30.0% | 1% | 100% |")
    assert headline < lines.index(
        "| `bayes` | 2 | 50% | 50% | 0% | 50% | 9.0 | 2.0 | 100% | 30.0% | 30.0% | 1% | 50% |"
    )
    assert page.endswith("## Trials to within 5 %\n\nas before\n")
    assert page.count("How the search methods compare") == 1
