import json
from pathlib import Path

import pytest

from polythrottle import bench
from polythrottle.cli.commands import run
from polythrottle.errors import BadFile, InvalidInput, UnknownName


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Write a table of 20 clocks times 5 batches whose optimum under 2x is at the eighth clock."""
    rows = ["gpu_max_hz,batch_size,latency_s,throughput_per_s,power_w,energy_j"]
    for clock in range(1, 21):
        for batch in (1, 2, 4, 8, 16):
            latency_s = 0.002 + 0.1 * batch**0.7 / clock
            power_w = 5 + 0.02 * clock**3
            rows.append(f"{clock}e8,{batch},{latency_s},{batch / latency_s},{power_w},{power_w * latency_s / batch}")
    path = tmp_path / "made__board__model.csv"
    path.write_text("\n".join(rows) + "\n")
    return path


def test_a_search_is_counted_until_it_arrives(table: Path) -> None:
    """A whole grid finds the best row itself, so its regret is nothing and 1 % comes after 5 %."""
    record = bench.search(table, "mean<=2x", "grid", 0, 100)
    assert record.final_regret == 0
    assert record.trials_to_5pct is not None
    assert record.trials_to_1pct is not None
    assert 1 <= record.trials_to_5pct <= record.trials_to_1pct <= 100
    assert record.infeasible_before_5pct < record.trials_to_5pct
    assert record.search_energy_j > 0


def test_a_search_that_does_not_arrive_counts_as_45(table: Path) -> None:
    """One trial at the default is not within 5 % here."""
    record = bench.search(table, "mean<=2x", "bayes", 0, 1)
    assert record.trials_to_5pct is None
    assert record.arrived == 45.0


def test_bayes_is_compared_with_the_papers_method(table: Path) -> None:
    """The summary pairs the runs and gives an interval; with one table it is the ratio itself."""
    records = [bench.search(table, "mean<=2x", method, seed, 25) for method in ("paper", "bayes") for seed in (0, 1)]
    paper, ours = bench.summarise(records)
    assert paper.ratio_to_paper == pytest.approx(1.0)
    assert ours.ratio_to_paper == pytest.approx(ours.trials_to_5pct / paper.trials_to_5pct)
    assert ours.ratio_interval == pytest.approx((ours.ratio_to_paper, ours.ratio_to_paper))
    assert [name for name, _ in bench.groups(records)] == ["made", "mean<=2x", "all"]


def test_the_command_prints_records_and_methods(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One record per table, SLO, method and seed."""
    words = ["bench", "search", "--tables", str(table.parent), "--methods", "random,grid", "--seeds", "2"]
    assert run([*words, "--slo", "mean<=2x", "--trials", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["records"]) == 4
    assert set(found["methods"]) == {"random", "grid"}
    assert {"table", "method", "seed", "trials_to_5pct", "trials_to_1pct", "infeasible_before_5pct", "final_regret",
            "search_energy_j", "suggest_seconds_median"} <= set(found["records"][0])  # fmt: skip
    assert run([*words, "--slo", "mean<=2x", "--trials", "5"]) == 0
    assert "within 5 %" in capsys.readouterr().out


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
