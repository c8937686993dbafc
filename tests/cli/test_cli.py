import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from builders import ROWS

from polythrottle.cli.commands import run
from polythrottle.domain.errors import StorageError
from polythrottle.storage import journal as journals
from polythrottle.testing import plant
from polythrottle.testing.__main__ import main as plant_or_run

ORIN = ["--device", "sim:jetson-agx-orin", "--workload", "efficientnet-b4", "--slo", "p99<=1.3x"]


@pytest.fixture(autouse=True)
def table(tmp_path: Path) -> str:
    """Put a small recorded table into the working folder."""
    (tmp_path / "t.csv").write_text(ROWS)
    return "replay:t.csv"


def document(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    """Run a command with --json and return its document."""
    assert run([*arguments, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_tune_prints_the_document_scripts_depend_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Every key of the stable document is there, in SI units."""
    found = document(capsys, "tune", "--device", "replay:t.csv", "--slo", "mean<=2x", "--trials", "4")
    assert {"device", "workload", "space_size", "trials", "default", "best", "saving_fraction", "slo",
            "infeasible_trials", "profile", "journal", "simulated", "energy_kind"} <= set(found)  # fmt: skip
    assert found["space_size"] == 4
    assert found["energy_kind"] == "recorded"
    assert found["simulated"] is False
    assert found["infeasible_trials"] == 1
    first = found["trials"][0]
    assert {"number", "point", "latency_s", "power_w", "energy_j", "feasible", "state"} <= set(first)
    assert (first["intervals"]["energy"], first["offered_per_s"], first["backlog_per_s"]) == (None, None, None)
    assert first["latency_s"] == {"mean": 0.01, "p50": None, "p90": None, "p95": None, "p99": 0.015}
    assert found["best"]["point"] == {"gpu_freq_hz": 600_000_000, "batch_size": 1}
    assert Path(found["profile"]).exists()
    assert Path(found["journal"]).exists()


@pytest.mark.slow
def test_simulated_and_estimated_are_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    """The word stands in the document and in the text."""
    found = document(capsys, "tune", *ORIN, "--trials", "2", "--no-presets")
    assert (found["simulated"], found["energy_kind"]) == (True, "simulated")
    assert run(["tune", *ORIN, "--trials", "2", "--no-presets", "--method", "random"]) == 0
    assert "simulated" in capsys.readouterr().out


@pytest.mark.slow
def test_the_document_says_what_the_search_did(capsys: pytest.CaptureFixture[str]) -> None:
    """Why it ended, what it took, what it broke, what it learnt from and what it risked."""
    found = document(capsys, "tune", *ORIN, "--trials", "9", "--no-presets", "--no-early-stop", "--method", "grid")
    assert found["ended"] == "9 trials made"
    assert set(found["search"]) == {"duration_s", "energy_j"}
    assert found["search"]["energy_j"] > 0
    assert (found["risk"], found["history"], found["nothing_to_gain"]) == (None, [], False)
    early = [trial for trial in found["trials"] if trial.get("censored")]
    assert len(early) == found["stopped_early"] > 0
    assert not any(trial["feasible"] for trial in early)
    assert found["infeasible_excess"] > 0
    journal = found["journal"]
    found = document(capsys, "tune", *ORIN, "--trials", "2", "--no-presets", "--history", journal, "--risk", "10%")
    assert [(one["path"], one["trials"]) for one in found["history"]] == [(journal, 9)]
    assert found["risk"] == 0.1


@pytest.mark.slow
def test_what_is_learnt_from_and_why_it_ended_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """One line before, two after; the report has them too."""
    words = ["tune", *ORIN, "--trials", "3", "--no-presets"]
    assert run([*words, "--method", "random"]) == 0
    assert "learning" not in capsys.readouterr().err
    assert run([*words, "--risk", "0.1"]) == 0
    shown = capsys.readouterr()
    assert " ".join(shown.err.split()).startswith(
        "learning from 1 earlier study (efficientnet-b4) on this device; --no-history starts afresh trial 0"
    )
    assert "3 trials made" in shown.out
    assert re.search(r"search +\S+ k?J simulated, \S+ (minutes|seconds) simulated\n", shown.out)
    journal = re.findall(r"journal +(\S+)", shown.out)[0]
    for page in (Path(journal).with_suffix(".html"), Path("again.html")):
        assert page.name != "again.html" or run(["report", journal, "--out", "again.html"]) == 0
        for told in ("3 trials made", "at most 10 % chance", "learnt from"):
            assert told in page.read_text()


@pytest.mark.slow
def test_where_nothing_is_to_be_gained_it_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A knob without effect: the default is as good as anything, in the text, the document and the report."""
    rows = "".join(f"{clock}00000000,0.01,{1 + clock / 1e4}\n" for clock in range(1, 9))
    (tmp_path / "flat.csv").write_text("gpu_max_hz,latency_s,energy_j\n" + rows)
    words = ["tune", "-d", "replay:flat.csv", "--slo", "mean<=2x", "--method", "grid", "--trials"]
    assert not document(capsys, *words, "8")["nothing_to_gain"]
    found = document(capsys, *words, "9")
    assert found["nothing_to_gain"]
    assert "Nothing is gained" in Path(found["report"]).read_text()
    for trials, told in (("8", "nothing gained so far"), ("9", "nothing is to be gained with gpu_max_mhz")):
        assert run([*words, trials]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert f"{told}: the default is within 1% of the best found" in shown


def test_an_unmet_slo_prints_its_document_and_exits_with_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is lost: the trials are printed, the closest is named on standard error."""
    assert run(["tune", "--device", "replay:t.csv", "--slo", "p99<=1ms", "--json"]) == 5
    shown = capsys.readouterr()
    assert json.loads(shown.out)["best"] is None
    assert "came closest and misses p99<=1 ms by 14 times the limit" in shown.err


def test_a_search_that_finds_nothing_says_so_before_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    """After ten trials, with the closest; there is no front then, and no percentage of thousands."""
    words = ["--slo", "p99<=0.1ms", "--pareto", "--method", "grid", "--trials", "11", "--no-presets"]
    assert run(["tune", *ORIN[:4], *words]) == 5
    shown = capsys.readouterr()
    assert shown.err.index("nothing feasible yet after 10 trials") < shown.err.index("trial 10:")
    assert "no front: no point that was tried holds the SLO" in shown.out
    assert "times the limit" in shown.err.splitlines()[-1]
    assert not re.search(r"\d{4,}(\.\d+)? ?%", shown.out + shown.err)


def test_a_table_without_a_p99_is_told_by_what_is_limited(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Nothing is shown of a metric nobody measured; one point is one point, and a floor is fallen short of."""
    (tmp_path / "one.csv").write_text("gpu_max_hz,latency_s,energy_j\n100000000,0.01,1\n")
    assert run(["tune", "-d", "replay:one.csv", "--slo", "throughput>=200/s", "--no-history"]) == 5
    shown = capsys.readouterr()
    assert "mean 10 ms, throughput 100 /s, breaks the SLO" in " ".join(shown.err.split())
    assert "p99" not in shown.err
    assert "1 of 1 point, 1 infeasible (worst 50% short, together 50%)" in " ".join(shown.out.split())
    assert "the one measured point does not hold throughput>=200 /s" in shown.err


def test_a_limit_that_is_given_twice_counts_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither the document nor the profile's name repeats it; another on the same metric is another limit."""
    words = ["tune", "-d", "replay:t.csv", "--trials", "2", "--slo", "mean<=2x", "--slo", "mean<=2x"]
    found = document(capsys, *words)
    assert len(found["slo"]) == 1
    assert "+" not in Path(found["profile"]).name
    assert len(document(capsys, *words, "--slo", "mean<=3x")["slo"]) == 2


def test_a_better_profile_that_is_there_stays(capsys: pytest.CaptureFixture[str]) -> None:
    """One line says so and how to replace it; the document has it too."""
    words = ["tune", "-d", "replay:t.csv", "--slo", "mean<=2x", "--out", "p.toml", "--trials"]
    assert (found := document(capsys, *words, "4"))["older_profile"] is None
    before = Path("p.toml").read_bytes()
    found = document(capsys, *words, "1", "--seed", "1")
    assert (found["profile_kept"], found["profile"]) == (True, str(Path("p.toml").absolute()))
    assert run([*words, "1", "--seed", "2"]) == 0
    assert re.search(r"kept +the profile of \S+: it takes 16.7% less energy per item; --force", capsys.readouterr().out)
    assert Path("p.toml").read_bytes() == before
    assert not document(capsys, *words, "1", "--seed", "3", "--force")["profile_kept"]
    assert Path("p.toml").read_bytes() != before


def test_presets_break_no_limit_of_a_search_that_bounds_its_risk(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor do they once its journal is resumed; where no risk is named, they are measured after the search."""
    words = ["tune", *ORIN, "--trials", "1", "--no-history", "--queries", "20", "--seconds", "0.1"]
    assert [each["feasible"] for each in document(capsys, *words, "--fresh")["presets"]].count(False)
    found = document(capsys, *words, "--risk", "0.05")
    assert found["presets"] == []
    assert document(capsys, "tune", "--resume", found["journal"])["presets"] == []


def test_presets_are_within_the_joules_and_what_they_took_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """None is begun once they are used; the document and the text have a figure for the search and one for them."""
    words = ["tune", *ORIN, "--trials", "1", "--no-history", "--queries", "20", "--seconds", "0.1", "--fresh"]
    whole = document(capsys, *words)
    search_j, presets_j = whole["search"]["energy_j"], whole["presets_cost"]["energy_j"]
    assert len(whole["presets"]) == 4
    assert presets_j > sum(each["power_w"] for each in whole["presets"]) * 0.1
    bounded = [*words, "--joules", str(search_j + 0.5 * presets_j)]
    some = document(capsys, *bounded)
    assert 1 <= len(some["presets"]) < 4
    assert some["presets"] == whole["presets"][: len(some["presets"])]
    assert some["search"] == whole["search"]
    assert 0 < some["presets_cost"]["energy_j"] < presets_j
    assert run(["tune", "--resume", some["journal"]]) == 0
    shown = capsys.readouterr()
    assert re.search(r"presets +[\d.]+ J simulated, [\d.]+ seconds simulated, beside the search", shown.out)
    assert re.search(r"J used; presets not measured for comparison: .*15W", " ".join(shown.err.split()))
    none = document(capsys, *words, "--joules", str(0.9 * search_j))
    assert (none["presets"], none["presets_cost"]) == ([], {"duration_s": 0.0, "energy_j": 0.0})


@pytest.mark.parametrize("lost", [("profile",), ("report",), ("profile", "report")])
def test_what_could_not_be_written_is_told_with_the_command_that_writes_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, lost: tuple[str, ...]
) -> None:
    """The profile is written again by ``tune --resume``, the report by ``report``: each command told does it."""

    def full(*_: object, **__: object) -> None:
        raise StorageError("cannot write it: No space left on device")

    words = ["--method", "grid", "--trials", "4", "--journal", "a.jsonl", "--out", "p.toml"]
    with monkeypatch.context() as disk:
        if "profile" in lost:
            disk.setattr("polythrottle.catalog.tuned_profiles.write_profile", full)
        if "report" in lost:
            disk.setattr("polythrottle.report.write_report", full)
        assert run(["tune", "-d", "replay:t.csv", "--slo", "mean<=2x", *words]) == StorageError.exit_code
    told = re.findall(r"nothing is lost: polythrottle (.*) FILE writes it elsewhere", capsys.readouterr().err)
    assert len(told) == len(lost)
    for name, command in zip(lost, told, strict=True):
        assert run([*command.split(), f"other-{name}"]) == 0
        assert Path(f"other-{name}").read_text().startswith("<!" if name == "report" else "#")


@pytest.mark.slow
def test_text_fits_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What people read does not wrap on a plain terminal, paths apart."""
    monkeypatch.setenv("COLUMNS", "80")
    strict = ["--slo", "p99<=14ms", "--risk", "0.05", "--no-presets", "--method", "bayes"]
    for arguments in (["tune", *ORIN, "--trials", "3"], ["devices"], ["devices", "sim:jetson-agx-orin"],
                      ["measure", *ORIN[:4]], ["tune", *ORIN[:4], *strict, "--trials", "3"]):  # fmt: skip
        assert run(arguments) == 0
        shown = capsys.readouterr()
        for stream in (shown.out, shown.err):
            assert max((len(line.rstrip()) for line in stream.splitlines() if "/" not in line), default=0) <= 80


def test_devices_lists_this_machine_boards_and_models(capsys: pytest.CaptureFixture[str]) -> None:
    """What can be tuned here, in SI for scripts."""
    found = document(capsys, "devices")
    uris = [device["uri"] for device in found["devices"]]
    assert "cpu" in uris
    assert "sim:jetson-agx-orin" in uris
    assert "efficientnet-b0" in [model["name"] for model in found["workloads"]]
    one = document(capsys, "devices", "sim:jetson-agx-orin")
    assert one["default"]["gpu_max_hz"] == 1_300_500_000
    assert "MAXN" in one["presets"]


def test_devices_says_once_how_joules_come_about(capsys: pytest.CaptureFixture[str]) -> None:
    """A boundary that begins with it, as a processor's without counters does, is not led by it a second time."""
    assert run(["devices", "cpu?watts_per_core=3"]) == 0
    energy = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("energy"))
    assert energy.split()[1:4] == ["estimated:", "busy", "CPU"]


def test_measure_prints_one_point(capsys: pytest.CaptureFixture[str]) -> None:
    """Levels are written in the unit engineers use and answered in SI."""
    found = document(capsys, "measure", *ORIN[:4], "--point", "gpu_max_mhz=930.75,batch_size=2")
    assert found["point"]["gpu_max_hz"] == 930_750_000
    assert found["energy_kind"] == "simulated"
    assert found["latency_s"]["p99"] >= found["latency_s"]["p50"]


def test_measure_starts_from_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    """A preset sets knobs the space holds still, and named levels override it."""
    arguments = ["measure", *ORIN[:4], "--preset", "30W", "--point", "gpu_max_mhz=414.75", "--batch", "1"]
    assert run(arguments) == 2
    assert "gpu_max_mhz has no level 414.75 MHz; the nearest are 420.75 MHz" in capsys.readouterr().err
    found = document(capsys, *arguments[:-3], "gpu_max_mhz=420.75")
    assert found["point"]["gpu_max_hz"] == 420_750_000
    assert found["point"]["cpu_max_hz"] < 2_000_000_000


@pytest.mark.slow
def test_sweep_writes_a_table_that_tune_can_replay(capsys: pytest.CaptureFixture[str]) -> None:
    """The round trip: sweep a simulated board, tune on its recording."""
    found = document(
        capsys, "sweep", "-d", "sim:jetson-nano", "-w", "mobilenetv2", "--batch", "1,2", "--queries", "20", "--seconds",
        "0", "--knobs", "gpu_max_hz", "--out", "sweep.csv"
    )  # fmt: skip
    assert found["measured"] == found["points"] == 24
    tuned = document(capsys, "tune", "--device", "replay:sweep.csv", "--slo", "p99<=3x", "--trials", "24")
    assert tuned["space_size"] == 24
    assert tuned["energy_kind"] == "simulated"


@pytest.mark.slow
def test_report_is_made_from_a_journal_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """A page can be made again at any time; it says how to apply the profile for as long as that is there."""
    found = document(capsys, "tune", "--device", "replay:t.csv", "--trials", "3", "--out", "p.toml")
    command = f"polythrottle apply {Path('p.toml').absolute()}"
    assert command in Path(found["report"]).read_text()
    assert run(["report", found["journal"], "--out", "page.html"]) == 0
    assert Path("page.html").read_text().startswith("<!doctype html>")
    assert command in Path("page.html").read_text()
    Path("p.toml").unlink()
    assert run(["report", found["journal"], "--out", "page.html"]) == 0
    assert command not in Path("page.html").read_text()


BAD: dict[str, tuple[list[str], int, str]] = {
    "unknown device": (["tune", "-d", "sim:jetson-agx-orn", "-w", "resnet50"], 3, "jetson-agx-orin"),
    "unknown scheme": (["tune", "-d", "jetsn"], 3, "jetson"),
    "unknown workload": (["tune", "-d", "sim:v100", "-w", "resnet5"], 3, "resnet50"),
    "unknown knob": (["tune", "-d", "sim:v100", "-w", "resnet50", "--knobs", "power_limt_w"], 3, "power_limit_w"),
    "unknown preset": (["measure", "-d", "sim:jetson-agx-orin", "-w", "resnet50", "--preset", "51W"], 3, "50W"),
    "unknown method": (["tune", "-d", "replay:t.csv", "--method", "bays"], 3, "bayes"),
    "unknown metric": (["tune", "-d", "replay:t.csv", "--slo", "p98<=1ms"], 3, "p99"),
    "malformed slo": (["tune", "-d", "replay:t.csv", "--slo", "p99=1ms"], 2, "p99<=25ms"),
    "slo without unit": (["tune", "-d", "replay:t.csv", "--slo", "p99<=25"], 2, "25ms"),
    "no such table": (["tune", "-d", "replay:none.csv"], 4, "does not exist"),
    "no workload": (["tune", "-d", "sim:v100"], 2, "--workload"),
    "no such model": (["tune", "-d", "cpu", "-w", "none.onnx"], 4, "none.onnx"),
    "no such module": (["tune", "-d", "cpu", "-w", "no_such_module:f"], 2, "no_such_module"),
    "no such command": (["tune", "-d", "cpu", "-w", "cmd:no-such-program"], 2, "no-such-program"),
    "command that fails": (["tune", "-d", "cpu", "-w", "cmd:false"], 7, "exit"),
    "command that hangs": (["tune", "-d", "cpu", "-w", "cmd:sleep 60", "--timeout", "0.2"], 7, "0.2 s"),
    "slo beyond all size": (["tune", "-d", "replay:t.csv", "--slo", "p99<=1e308ms"], 2, "size"),
    "slo with underscore": (["tune", "-d", "replay:t.csv", "--slo", "p99<=2_5x"], 2, "multiple"),
    "seed beyond all size": (["tune", "-d", "replay:t.csv", "--seed", "9" * 20], 2, "seed"),
    "negative seed": (["tune", "-d", "replay:t.csv", "--seed", "-1"], 2, "seed"),
    "batch of many digits": (["tune", "-d", "sim:v100", "-w", "resnet50", "--batch", "9" * 5000], 2, "--batch"),
    "point nan": (["measure", "-d", "replay:t.csv", "--point", "batch_size=nan"], 2, "finite"),
    "point beyond all size": (["measure", "-d", "replay:t.csv", "--point", "gpu_freq_mhz=1e400"], 2, "finite"),
    "table that never ends": (["tune", "-d", "replay:/dev/zero"], 4, "no file that a table can be read from"),
    "batch on a table": (["tune", "-d", "replay:t.csv", "--batch", "1"], 2, "leave --batch"),
    "profile over a table": (["tune", "-d", "replay:t.csv", "--out", "t.csv"], 8, "not a profile"),
    "profile over a device": (["tune", "-d", "replay:t.csv", "--out", "/dev/null"], 8, "not a profile"),
    "profile over its journal": (["tune", "-d", "replay:t.csv", "--out", "j", "--journal", "j"], 2, "both"),
    "report over a table": (["report", "j.jsonl", "--out", "t.csv"], 8, "something else"),
    "report over a device": (["report", "j.jsonl", "--out", "/dev/null"], 8, "regular"),
    "resume with other words": (["tune", "--resume", "j.jsonl", "--slo", "p99<=1s"], 2, "--resume takes everything"),
    "resume nothing": (["tune", "--resume", "none.jsonl"], 4, "no journal"),
    "no trials": (["tune", "-d", "replay:t.csv", "--trials", "0"], 2, "at least 1"),
    "trials in words": (["tune", "--trials", "many"], 2, "--trials"),
    "no chance": (["tune", "-d", "sim:v100", "-w", "resnet50", "--risk", "0"], 2, "chance above 0"),
    "more than a chance": (["tune", "-d", "sim:v100", "-w", "resnet50", "--risk", "1.5"], 2, "at most 1"),
    "risk of a method": (["tune", "-d", "replay:t.csv", "--method", "random", "--risk", "0.1"], 2, "takes no --risk"),
    "history of a method": (
        ["tune", "-d", "replay:t.csv", "--method", "paper", "--history", "t.csv"], 2, "takes no --history"
    ),
    "history without a name": (["tune", "-d", "replay:t.csv", "--history", ""], 2, "--history is empty; it takes"),
    "knobs of a comma": (["tune", "-d", "sim:v100", "-w", "resnet50", "--knobs", ","], 2, "--knobs takes names"),
    "resume with a method": (["tune", "--resume", "j.jsonl", "--method", "random"], 2, "--resume takes everything"),
    "no such history": (["tune", "-d", "replay:t.csv", "--history", "none.jsonl"], 4, "none.jsonl to learn from"),
    "history and none": (["tune", "-d", "replay:t.csv", "--history", "t.csv", "--no-history"], 2, "exclude"),
    "history that never ends": (["tune", "-d", "replay:t.csv", "--history", "/dev/zero"], 4, "regular"),
    "no minutes": (["tune", "-d", "replay:t.csv", "--minutes", "0"], 2, "above zero"),
    "joules nan": (["tune", "-d", "replay:t.csv", "--joules", "nan"], 2, "above zero"),
    "horizon without unit": (["tune", "-d", "replay:t.csv", "--horizon", "30"], 2, "30d"),
    "horizon not counted": (["tune", "-d", "replay:t.csv", "--horizon", "1d", "--no-early-stop"], 2, "leave --horizon"),
    "resume with risk": (["tune", "--resume", "j.jsonl", "--risk", "0.1"], 2, "--resume takes everything"),
    "unknown option": (["tune", "--trails", "3"], 2, "--trials"),
    "unknown command": (["tun"], 2, "tune"),
    "batch of nothing": (["tune", "-d", "sim:v100", "-w", "resnet50", "--batch", "0"], 2, "--batch"),
    "threads without end": (["tune", "-d", "cpu", "-w", "cmd:true {threads}", "--threads", "100000"], 2, "at most"),
    "point without level": (["measure", "-d", "replay:t.csv", "--point", "batch_size"], 2, "batch_size"),
    "no such level": (["measure", "-d", "replay:t.csv", "--point", "batch_size=3"], 2, "nearest"),
    "not a journal": (["report", "t.csv"], 4, "line 1"),
    "no journal": (["report", "none.jsonl"], 4, "none.jsonl"),
    "profile into a file": (["tune", "-d", "replay:t.csv", "--out", "t.csv/p.toml"], 8, "cannot be written"),
    "sweep of nothing": (["sweep", "-d", "cpu", "-w", "cmd:true", "--out", "x.csv"], 2, "no knob"),
    "negative window": (["measure", "-d", "sim:v100", "-w", "resnet50", "--seconds", "-1"], 2, "seconds"),
    "window of years": (["measure", "-d", "sim:v100", "-w", "resnet50", "--seconds", "1e9"], 2, "a day at most"),
    "settling for years": (["measure", "-d", "sim:v100", "-w", "resnet50", "--settle", "1e9"], 2, "a day at most"),
    "endless queries": (["measure", "-d", "sim:v100", "-w", "resnet50", "--queries", "9" * 30], 2, "1,000,000"),
    "no time to answer": (["measure", "-d", "sim:v100", "-w", "resnet50", "--timeout", "0"], 2, "above zero"),
    "burst peaks twice": (
        ["measure", "-d", "sim:v100", "-w", "resnet50", "--arrivals", "burst:9/s?peak=5&peak=3"], 2, "given twice"
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_clear_line(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """One line that says what would be right, the exit code of its class, and nothing on standard output."""
    arguments, code, told = BAD[name]
    table = Path("t.csv").read_bytes()
    if "j.jsonl" in arguments:
        run(["tune", "-d", "replay:t.csv", "--trials", "2", "--journal", "j.jsonl", "--json"])
        capsys.readouterr()
    assert run(arguments) == code
    assert Path("t.csv").read_bytes() == table
    shown = capsys.readouterr()
    last = shown.err.strip().splitlines()[-1]
    assert last.startswith("polythrottle: ")
    assert told in last
    assert "Traceback" not in shown.err
    assert shown.out == ""


def polythrottle(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start the program as users do."""
    command = [sys.executable, "-m", "polythrottle", *arguments]
    # Started in the background, this process ignores Ctrl-C and would hand that on.
    options.setdefault("preexec_fn", lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def wait_for(journal: Path, event: str, process: subprocess.Popen[str]) -> None:
    """Wait until a journal holds an event."""
    deadline = time.monotonic() + 60
    while event not in (journal.read_text() if journal.exists() else ""):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)


TEN_TRIALS = ["tune", *ORIN, "--trials", "10", "--no-presets", "--no-early-stop", "--json", "--journal"]


@pytest.fixture(scope="module")
def trials_left_alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the trials of a study that nobody killed."""
    folder = tmp_path_factory.mktemp("whole")
    environment = {**os.environ, "POLYTHROTTLE_STATE_DIR": str(folder / "state")}
    process = polythrottle(*TEN_TRIALS, str(folder / "whole.jsonl"), env=environment, cwd=folder)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out)["trials"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 9])
def test_a_killed_study_ends_with_the_same_trials(tmp_path: Path, number: int, trials_left_alone: Any) -> None:
    """SIGKILL while a trial runs, start again with the same words: nothing differs from a study left alone."""
    journal = tmp_path / "killed.jsonl"
    killed = polythrottle(*TEN_TRIALS, str(journal))
    wait_for(journal, f'"started", "number": {number},', killed)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    again = polythrottle(*TEN_TRIALS, str(journal))
    out, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert json.loads(out)["trials"] == trials_left_alone


@pytest.mark.slow
def test_ctrl_c_restores_keeps_the_journal_and_says_how_to_resume(tmp_path: Path) -> None:
    """Exit code 130, one line to go on with, and that line works."""
    process = polythrottle("tune", *ORIN, "--trials", "500", "--no-presets", "--no-early-stop")
    journal = next(iter_until(tmp_path / "state" / "studies"))
    wait_for(journal, '"started", "number": 3,', process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in err
    told = re.search(r"polythrottle (tune --resume \S+)", err)
    assert told is not None, err
    again = polythrottle(*told[1].split(), "--trials", "4", "--json")
    out, err = again.communicate(timeout=60)
    assert len(json.loads(out)["trials"]) >= 4, err
    made = len(journals.read(journal).completed)
    assert made >= 3


def iter_until(folder: Path) -> Any:
    """Yield the journals of a folder, waiting for the first."""
    deadline = time.monotonic() + 60
    while not (found := list(folder.rglob("*.jsonl"))):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield from found


def test_a_report_that_cannot_be_written_loses_no_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """The document is printed, the profile is there, and the exit code is that of the class."""
    Path("j.html").mkdir()
    assert run(["tune", "--device", "replay:t.csv", "--journal", "j.jsonl", "--json"]) == 8
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert found["report"] is None
    assert Path(found["profile"]).exists()
    assert "j.html" in shown.err


@pytest.mark.slow
def test_a_workload_cannot_spoil_the_document(tmp_path: Path) -> None:
    """What a model writes to file descriptor 1 goes to standard error."""
    (tmp_path / "chatty.py").write_text("import os\ndef f(batch_size):\n    os.write(1, b'spoilt')\n")
    words = ["measure", "-d", "cpu", "-w", "chatty:f", "--queries", "5", "--seconds", "0", "--json"]
    process = polythrottle(*words, cwd=tmp_path)
    out, err = process.communicate(timeout=60)
    assert json.loads(out)["energy_kind"] in ("estimated", "measured")
    assert "spoilt" in err


@pytest.mark.slow
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_stopped_measurement_says_so(tmp_path: Path, stop: signal.Signals) -> None:
    """Termination and a lost terminal unwind like Ctrl-C, with one line."""
    (tmp_path / "slow.py").write_text("import time\ndef f():\n    open('begun', 'w').close()\n    time.sleep(0.01)\n")
    process = polythrottle("measure", "-d", "cpu", "-w", "slow:f", "--seconds", "50", cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(stop)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in err


@pytest.mark.slow
def test_a_termination_that_goes_on_while_it_ends_is_one_termination(tmp_path: Path) -> None:
    """As of `timeout`, which signals its child and then the group, and of whoever asks again until it has gone."""
    (tmp_path / "slow.py").write_text("import time\ndef f():\n    open('begun', 'w').close()\n    time.sleep(0.01)\n")
    process = polythrottle("measure", "-d", "cpu", "-w", "slow:f", "--seconds", "50", cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    while process.poll() is None:
        assert time.monotonic() < deadline
        process.send_signal(signal.SIGTERM)
        time.sleep(0.002)
    _, err = process.communicate(timeout=60)
    assert err == "polythrottle: interrupted\n"
    # At the very last Python has taken its handlers away.
    assert process.returncode in (130, -signal.SIGTERM)


@pytest.mark.slow
def test_a_terminal_without_unicode_gets_text_all_the_same() -> None:
    """Characters it does not have become question marks, not a traceback."""
    process = polythrottle("devices", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "sim:jetson-agx-orin" in out


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    """`polythrottle devices | head -1` ends quietly."""
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.run(
        [sys.executable, "-m", "polythrottle", "devices"], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert process.stderr == ""


def test_an_interrupt_while_it_starts_is_one_line() -> None:
    """Before any command is known there is nothing to end, and no traceback."""
    code = (
        "import builtins; real = builtins.__import__\n"
        "def importing(name, *words, **named):\n"
        "    if name == 'polythrottle.cli.commands':\n        raise KeyboardInterrupt\n"
        "    return real(name, *words, **named)\n"
        "builtins.__import__ = importing\nfrom polythrottle.cli import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code, "devices"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "polythrottle: interrupted\n")


def test_what_comes_next_can_be_typed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Nothing is applied to a table; a profile that leads to a tree or another machine is named with its device."""
    words = ["--slo", "mean<=2x", "--trials", "2", "--method", "grid"]
    assert run(["tune", "--device", "replay:t.csv", *words]) == 0
    assert "polythrottle apply" not in capsys.readouterr().out
    assert run(["tune", "--device", "sim:jetson-nano", "--workload", "resnet50", *words, "--no-presets"]) == 0
    assert "next     polythrottle apply " in capsys.readouterr().out
    root = plant("jetson-nano", tmp_path / "board")
    words = ["tune", "--device", f"jetson?root={root}", "--workload", "cmd:true", "--knobs", "mem_hz", *words]
    words += ["--queries", "2", "--seconds", "0", "--no-presets", "--out", "p.toml"]
    assert plant_or_run(["run", str(root), *words]) == 0
    told = capsys.readouterr().out
    assert f"next     python -m polythrottle.testing run {root} apply p.toml --device 'jetson?root={root}'" in told


@pytest.mark.slow
def test_a_full_disk_is_one_clear_line(tmp_path: Path) -> None:
    """A study out of room ends with code 8 and keeps its whole trials; a file size limit stands in for a full disk."""
    journal = tmp_path / "a.jsonl"
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000)); from polythrottle.cli import main; main()"
    )
    arguments = ["tune", "--device", "sim:jetson-nano", "--workload", "resnet50", "--knobs", "gpu_max_hz", "--journal"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, str(journal), "--method", "random"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 8, done.stderr
    assert "cannot be written: File too large" in done.stderr.splitlines()[-1]
    assert 1 <= len(journals.read(journal).completed) < 30


def test_version_and_help() -> None:
    """The first two things anybody asks."""
    assert run(["--version"]) == 0
    assert run(["--help"]) == 0
    assert run([]) == 0
    for command in ("devices", "tune", "measure", "sweep", "report"):
        assert run([command, "--help"]) == 0
