"""``polythrottle cluster plan`` as a program and a person see it."""

import json
from pathlib import Path

import pytest
import yaml

from polythrottle.cli.cluster.plan_output import _span
from polythrottle.cli.commands import run

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ALONE, JOBS = str(EXAMPLES / "cluster-gcp-2019.toml"), str(EXAMPLES / "cluster-three-jobs.toml")


def document(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict:  # type: ignore[type-arg]
    """Return the document of a plan."""
    assert run(["cluster", "plan", *words, "--json"]) == code
    found: dict = json.loads(capsys.readouterr().out)  # type: ignore[type-arg]
    return found


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(1.234, "1.2 s"), (42.0, "42 s"), (1800.0, "30 min"), (7.2 * 3600, "432 min"), (36e3, "10 h"), (864e3, "10 d")],
)
def test_spans_of_a_plan_are_told_in_the_unit_that_suits(seconds: float, words: str) -> None:
    """From seconds to days."""
    assert _span(seconds) == words


def test_a_plan_is_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    """It names machines, market, cap and interval, and says which figures are estimated and which simulated."""
    found = document(capsys, ALONE, "--deadline", "2h", "--budget", "3usd", "--minimise", "energy")
    assert found["feasible"]
    assert found["reason"] is None
    chosen = found["chosen"]
    assert chosen["outlook"]["chance"] >= 0.95
    assert (chosen["expected"]["kind"], chosen["outlook"]["kind"]) == ("estimated", "simulated")
    assert chosen["expected"]["energy_j"] <= min(each["expected"]["energy_j"] for each in found["front"])
    assert {"machine", "market", "machines", "cap_w", "interval_s", "known"} <= set(chosen)


def test_a_plan_fits_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The table, the outlook and what is known of the figures are printed, none wider than a terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["cluster", "plan", ALONE, "--deadline", "1d"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for word in ("spot", "on demand", "kWh", "outlook", "simulated", "estimated", "known"):
        assert word in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--deadline", "10min"), "no plan ends by the deadline"),
        (("--budget", "$0.5"), "no plan keeps the budget"),
        (("--deadline", "30min", "--budget", "1.05"), "not both"),
    ],
)
def test_an_infeasible_plan_is_shown_and_ends_with_its_code(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    """Exit code 5, one line that names the limit and by how much, and the nearest plan on standard output."""
    assert run(["cluster", "plan", ALONE, *words, "--json"]) == 5
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert not found["feasible"]
    assert found["chosen"] is None
    assert found["nearest"]["machine"]
    assert said in found["reason"]
    assert said in captured.err
    assert "% over the" in captured.err


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (("--deadline", "soon"), "--deadline 'soon' is not a time above 0", 2),
        (("--deadline", "0h"), "--deadline '0h' is not a time above 0", 2),
        (("--deadline", "-3h"), "--deadline '-3h'", 2),
        (("--deadline", "1000000d"), "--deadline '1000000d' is longer than a century", 2),
        (("--moves", "--dwell", "x"), "--dwell 'x' is not a time", 2),
        (("--budget", "lots"), "--budget 'lots' is not an amount", 2),
        (("--budget", "0"), "--budget '0' is not an amount", 2),
        (("--chance", "120%"), "--chance '120%'", 2),
        (("--chance", "0"), "--chance '0'", 2),
        (("--chance", "x"), "--chance 'x' is not a share", 2),
        (("--minimise", "joy"), "--minimise takes energy, cost, time", 2),
        (("--market", "black"), "--market takes spot or on-demand", 2),
        (("--most", "0"), "--most 0 is not a number", 2),
        (("--draws", "1"), "--draws 1 is not a number", 2),
        (("--usd-per-kwh", "-1"), "--usd-per-kwh -1", 2),
        (("--trace", "x.csv"), "--trace needs a --deadline", 2),
        (("--trace", "x.csv", "--deadline", "3h"), "x.csv", 4),
        (("--moves",), "--moves needs a catalogue whose spot prices are tables", 2),
        (("--task", "t.yaml", "--command", " "), "needs a command", 2),
    ],
)
def test_each_wrong_option_is_one_line(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str, code: int
) -> None:
    """The line names the option and what it takes."""
    assert run(["cluster", "plan", ALONE, *words]) == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert said in lines[0]


@pytest.mark.slow
def test_both_limits_out_of_reach_are_both_named(capsys: pytest.CaptureFixture[str]) -> None:
    """The line says by how much the fastest is late and by how much the cheapest is dear, in units that fit."""
    assert run(["cluster", "plan", ALONE, "--deadline", "10min", "--budget", "0.5"]) == 5
    said = capsys.readouterr().err
    assert "no plan ends by the deadline" in said
    assert "over the 10 min allowed; nor keeps the budget: the cheapest costs" in said
    assert run(["cluster", "plan", ALONE, "--deadline", "1s"]) == 5
    assert "times the 1 s allowed" in capsys.readouterr().err


LONG = """
[work]
name = "[red]a job"
steps = 3e12
checkpoint_stall_s = 3.8
[machines."p4d.24xlarge-us-east-1-some-availability-zone-a"]
gpu = "A100"
steps_per_s = 5.0
most = 1
startup_s = 120
idle_w = 50
usd_per_h = { spot = 1234.5, on-demand = 3000.0 }
lifetime.rate_per_h = 0.1
caps = [{ limit_w = 300, power_w = 280 }, { limit_w = 200, slowdown = 1.1, power_w = 190 }]
"""


def test_no_figure_is_cut_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long names are folded so that large figures stay whole within 80 columns; markup in names is plain text."""
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "long.toml"
    path.write_text(LONG)
    assert run(["cluster", "plan", str(path)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    assert "[red]a job" in out
    assert "e+" in out


def test_the_ends_of_the_front_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    """The soonest, the cheapest and the one of fewest joules can be told from the others."""
    assert run(["cluster", "plan", ALONE, "--deadline", "1d"]) == 0
    firsts = [line.split("  ")[0].split(" ")[0] for line in capsys.readouterr().out.splitlines()[2:]]
    for mark in "t$J*":
        assert any(mark in first for first in firsts[:20])


def test_nothing_is_shown_that_is_dearer_and_no_better(capsys: pytest.CaptureFixture[str]) -> None:
    """On-demand machines that end as soon and as surely as spot ones are in the document, not in the table."""
    assert run(["cluster", "plan", ALONE, "--deadline", "1h", "--minimise", "energy"]) == 0
    rows = capsys.readouterr().out.split("plan, *")[0]
    assert "spot" in rows
    assert "on-demand" not in rows
    front = document(capsys, ALONE, "--deadline", "1h", "--minimise", "energy")["front"]
    assert {each["market"] for each in front} == {"spot", "on-demand"}


def test_a_plan_that_cannot_be_still_answers_with_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The limit that is missed is told, with its code; why no rule was replayed is in the document."""
    path = tmp_path / "trace.csv"
    path.write_text("time_s;n_nodes\n0;4\n5000;0\n9000;4\n")
    found = document(capsys, ALONE, "--deadline", "10min", "--trace", str(path), code=5)
    assert found["deadline_rules"] is None
    assert "the deadline is 0.1667 h" in found["deadline_rules_reason"]
    path.write_text("time_s,n_nodes\n" + "".join(f"{index * 0.01},{index % 2}\n" for index in range(10_000)))
    found = document(capsys, ALONE, "--deadline", "12h", "--trace", str(path))
    assert "changes every 0.01 s" in found["deadline_rules_reason"]


PRICES = "timestamp,zone,instance_type,product,price_usd_per_h\n"


def test_a_longer_dwell_moves_less(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With prices that change places every six hours a job moves as often as its dwell lets it."""
    rows = [
        f"2020-01-{1 + hour // 24:02d}T{hour % 24:02d}:00:00Z,{zone},x,Linux,{1 + (hour // 6 + index) % 2}\n"
        for hour in range(0, 240, 6)
        for index, zone in enumerate("ab")
    ]
    (tmp_path / "prices.csv").write_text(PRICES + "".join(rows))
    text = LONG.replace("spot = 1234.5", 'spot = { table = "prices.csv", instance_type = "x", zone = "a" }')
    path = tmp_path / "moves.toml"
    path.write_text(text.replace("3e12", "2e6"))
    moves = [
        document(capsys, str(path), "--moves", "--dwell", dwell)["moves"]["moved"]["moves"] for dwell in ("6h", "48h")
    ]
    assert moves[0] > 2 * moves[1] > 0
    assert run(["cluster", "plan", str(path), "--moves", "--dwell", "6h"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"usd with {moves[0]} moves against" in printed
    assert run(["cluster", "plan", str(path), "--moves", "--dwell", "0h"]) == 2


def test_free_machines_leave_nothing_to_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A recorded price of zero is no division by zero."""
    zeros = "".join(f"2020-01-0{day}T00:00:00Z,a,x,L,0\n" for day in (1, 9))
    (tmp_path / "prices.csv").write_text(PRICES + zeros)
    path = tmp_path / "free.toml"
    spot = 'spot = { table = "prices.csv", instance_type = "x" }'
    path.write_text(LONG.replace("spot = 1234.5", spot).replace("3e12", "10000"))
    assert run(["cluster", "plan", str(path), "--moves"]) == 0
    assert "nothing to save" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_an_outlook_without_an_end_has_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Machines that are gone before their first step never end a job: null, with the share that did."""
    path = tmp_path / "short.toml"
    path.write_text(
        LONG.replace("3e12", "10000").replace("rate_per_h = 0.1", "ages_h = [0, 0.01]\nlifetime.survivals = [1, 0]")
    )
    assert run(["cluster", "plan", str(path), "--market", "spot", "--json"]) == 5
    outlook = json.loads(capsys.readouterr().out)["nearest"]["outlook"]
    assert outlook["time_s"] is None
    assert outlook["reason"] == "only 0% of the simulated outcomes end"


def test_a_missing_catalogue_is_a_bad_file(capsys: pytest.CaptureFixture[str]) -> None:
    """One line, exit code 4."""
    assert run(["cluster", "plan", "absent.toml"]) == 4
    assert "absent.toml" in capsys.readouterr().err


def test_a_plan_can_be_written_as_a_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The chosen machines are those of the file."""
    path = tmp_path / "task.yaml"
    found = document(capsys, ALONE, "--task", str(path), "--command", "python train.py --steps 9")
    task = yaml.safe_load(path.read_text())
    assert task["num_nodes"] == found["chosen"]["machines"]
    assert task["run"] == "python train.py --steps 9\n"


def test_deadline_rules_are_replayed_on_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With spot half of the time both rules meet the deadline below the price of on-demand."""
    path = tmp_path / "trace.csv"
    rows = "".join(f"{1800 * index},{10 * (index % 2)}\n" for index in range(200))
    path.write_text("time_s,n_nodes\n" + rows)
    found = document(capsys, ALONE, "--deadline", "2h", "--trace", str(path))["deadline_rules"]
    rules = {rule["rule"]: rule for rule in found["rules"]}
    assert found["kind"] == "simulated"
    assert found["available"] == pytest.approx(0.5, abs=0.01)
    assert rules["on-demand"]["on_demand_share"] == 1
    for name in ("greedy", "uniform progress"):
        assert rules[name]["met_share"] == 1
        assert rules[name]["cost_usd"] < rules["on-demand"]["cost_usd"]


@pytest.mark.slow
def test_waits_say_when_to_ask_for_a_successor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lead is one of the recorded waits, and costs no more than asking at their mean."""
    path = tmp_path / "waits.csv"
    path.write_text("wait_s\n60\n70\n600\n")
    found = document(capsys, ALONE, "--waits", str(path))["successor"]
    assert found["lead_s"] == 70
    assert found["usd"] < found["mean_usd"]
    assert run(["cluster", "plan", ALONE, "--waits", str(path)]) == 0
    assert "ask 70 s before" in " ".join(capsys.readouterr().out.split())


def test_jobs_share_machines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A catalogue of several jobs is answered with shares of time, as a document and within 80 columns."""
    found = document(capsys, JOBS, "--minimise", "energy")
    assert found["feasible"]
    assert [job["job"] for job in found["jobs"]] == ["ResNet-18", "ResNet-50", "transformer"]
    assert all(job["time_s"] <= job["deadline_s"] * (1 + 1e-6) for job in found["jobs"])
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["cluster", "plan", JOBS]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_jobs_that_fall_short_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 5, and a line that says which job is short by how much."""
    path = tmp_path / "jobs.toml"
    path.write_text(Path(JOBS).read_text().replace("steps = 50_000", "steps = 500_000"))
    assert run(["cluster", "plan", str(path), "--json"]) == 5
    captured = capsys.readouterr()
    assert not json.loads(captured.out)["feasible"]
    assert "transformer by" in captured.err
    for words in (("--deadline", "3h"), ("--chance", "90%"), ("--task", "t.yaml"), ("--moves",)):
        assert run(["cluster", "plan", str(path), *words]) == 2
        assert "take --minimise and --market only" in capsys.readouterr().err


@pytest.mark.slow
def test_the_recorded_example_moves_between_zones(transient: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On recorded prices, lifetimes and caps a plan is found, and moving never costs more than staying."""
    assert transient.is_dir()
    found = document(capsys, str(EXAMPLES / "cluster-aws-recorded.toml"), "--most", "1", "--moves")
    assert found["chosen"]["market"] == "spot"
    assert found["moves"]["moved"]["cost_usd"] <= found["moves"]["stayed"]["cost_usd"]
