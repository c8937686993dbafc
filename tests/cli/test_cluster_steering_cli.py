"""What the command line takes and says of boards, paces and bottlenecks."""

from pathlib import Path
from typing import Any

import pytest

from polythrottle.cli.cluster.status import EVENTS, SteerOptions, WatchOptions, event_words, node_rows
from polythrottle.cli.commands import run
from polythrottle.training.elastic.events import EventLog
from polythrottle.training.elastic.job_control import job_folder
from polythrottle.training.elastic.nodes.bottleneck import Remedy


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--steer", "bogus"], 3, "unknown device"),
        (["--steer", "sim:nothing"], 3, "a100"),
        (["--steer", "replay:t.csv"], 2, "cannot be steered"),
        (["--steer", "sim:a100", "--steer", "sim:a100"], 2, "each board once"),
        (["--steer", "off", "--steer", "cpu"], 2, "stands alone"),
        (["--steer", "cpu", "--engine", "ray"], 2, "torchrun"),
        (["--look", "0"], 2, "between 0.1 and 3600"),
        (["--look", "nan"], 2, "between 0.1 and 3600"),
        (["--threshold", "0%"], 2, "--threshold"),
        (["--threshold", "x"], 2, "--threshold"),
        (["--longer", "-1%"], 2, "--longer"),
        (["--longer", "100%"], 2, "--longer"),
        (["--warm-up", "-1"], 2, "--warm-up"),
        (["--remedy", "hope"], 2, "drop"),
    ],
)
def test_wrong_words_are_one_line_and_the_code_of_their_class(
    words: list[str], code: int, text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing is started."""
    (tmp_path / "script.py").write_text("")
    assert run(["cluster", "train", "script.py", *words]) == code
    said = capfd.readouterr().err.strip()
    assert text in said
    assert len(said.splitlines()) == 1


def test_what_was_asked_reaches_the_processes_of_the_job() -> None:
    """As words they are read again; several nodes on one machine share no board unless it was named."""
    asked = WatchOptions("3%", "10%", 5.0, ["drop"])
    assert asked.watching_words() == [
        *("--longer", "3%", "--threshold", "10%", "--warm-up", "5.0", "--remedy", "drop"),
    ]
    found = asked.watched()
    assert (found.longer, found.terms.threshold, found.terms.allowed) == (0.03, 0.1, (Remedy.DROP,))
    assert SteerOptions(["nvml:0"], 2.0).steering_words(2) == ["--look", "2.0", "--steer", "nvml:0"]
    assert SteerOptions().steering_words(2) == ["--look", "5.0", "--steer", "off"]
    assert SteerOptions().steering_words() == ["--look", "5.0"]


BOARD = {
    "title": "NVIDIA A100 (simulated)",
    "energy_kind": "simulated",
    "limit_w": 200.0,
    "power_w": 190.04,
    "verdict": "kept",
    "reason": "12.3% fewer joules",
    "flagged": 4.2,
    "throttled": True,
    "trouble": "the store is away",
}


def rows(**found: Any) -> list[tuple[str, str]]:
    """Return the rows of a status."""
    return list(node_rows(found))


def test_a_node_is_a_row_with_its_pace_its_cap_and_how_its_power_is_known() -> None:
    """Simulated is called so; what is not known is left out or said to be unknown, never 0."""
    node = {"node": "n1", "step_s": 0.1234, "own_s": 0.1, "steering": BOARD}
    ((name, text),) = rows(nodes=[node])
    assert name == "n1"
    assert text == (
        "0.123 s a step, 0.1 s its own, capped at 200 W, 190.0 W simulated (NVIDIA A100), throttled, "
        "kept: 12.3% fewer joules, stands out: 4 deviations slower than its type, trouble: the store is away"
    )
    ((_, text),) = rows(nodes=[{**node, "steering": {**BOARD, "power_w": None}}])
    assert "power unknown (NVIDIA A100), " in text
    assert "kept: 12.3% fewer joules (simulated), " in text
    bare = {"device": "nvml:0", "trouble": "no driver"}
    ((_, text),) = rows(nodes=[{"node": "n1", "step_s": None, "own_s": None, "steering": bare}])
    assert text == "at its default clocks, power unknown (nvml:0), trouble: no driver"
    assert rows(nodes=[{"node": "n1", "step_s": None, "own_s": None, "steering": None}]) == []
    assert rows(nodes=[{"node": "n1"}]) == []


def test_the_jobs_speed_is_told_against_what_was_predicted() -> None:
    """With cause, what could help and what was tried; before there is a verdict, why there is none."""
    assert rows(speed={"measured_steps_per_s": None, "reason": "nothing was measured yet"}) == [
        ("speed", "not judged yet: nothing was measured yet")
    ]
    speed = {
        "measured_steps_per_s": 8.0,
        "expected_steps_per_s": 10.0,
        "threshold": 0.067,
        "causes": [{"cause": "straggler", "nodes": ["b"], "words": "b is slow"}],
        "proposals": [{"words": "drop the node: 9.0% faster expected", "nodes": ["b"]}],
        "tried": [{"remedy": "drop the node", "nodes": ["b"], "gain_measured": 0.1, "kept": True}],
    }
    assert rows(speed=speed) == [
        ("speed", "8 steps/s of 10 predicted; a bottleneck is more than 6.7% short"),
        ("bottleneck", "straggler: b is slow"),
        ("could help", "drop b: 9.0% faster expected"),
        ("tried", "drop b: +10.0% samples/s measured, kept"),
    ]


def test_every_event_of_this_kind_has_its_words() -> None:
    """As they are printed while a job runs."""
    event = {"node": "a", "limit_w": None, "reason": "why", "remedy": "drop the node", "nodes": ["a"]}
    event |= {"causes": [{"cause": "input", "words": "a waits"}]}
    said = {name: text.format_map({**event_words(event), **event}) for name, text in EVENTS.items()}
    assert said["cap"] == "a runs at its default clocks: why"
    capped = {**event, "limit_w": 150.0, "energy_kind": "simulated"}
    assert EVENTS["cap"].format_map({**event_words(capped), **capped}) == "a runs capped at 150 W: why (simulated)"
    assert said["bottleneck"] == "input: a waits"
    assert said["remedy tried"] == "tries to drop a"
    assert said["remedy kept"] == "drop a: speed unknown, measured; kept"
    assert said["remedy taken back"] == "drop a: why; taken back"
    event = {"remedy": "add a parameter server", "nodes": [], "gain_measured": 0.5}
    assert EVENTS["remedy tried"].format_map(event_words(event)) == "tries to add a parameter server"
    event = {"remedy": "cap the node below where it throttles", "nodes": ["a", "b"]}
    assert event_words(event)["act"] == "cap a, b below where it throttles"


def test_a_job_that_is_over_still_tells_what_came_last(capsys: pytest.CaptureFixture[str]) -> None:
    """From its events: the cap each node ended under, and the last bottleneck, within 80 columns."""
    journal = EventLog(job_folder("done"))
    cap = {"event": "cap", "node": "n1", "verdict": "kept", "power_w": 190.0, "energy_kind": "simulated"}
    for limit_w in (225.0, 200.0):
        journal.append({**cap, "generation": 1, "at_s": 1.0, "limit_w": limit_w, "reason": "12.0% fewer joules"})
    causes = [{"cause": "network", "nodes": [], "words": "the exchange between them is the limit"}]
    journal.append({"event": "bottleneck", "generation": 1, "at_s": 61.0, "causes": causes})
    remedy = {"remedy": "drop the node", "generation": 1, "at_s": 65.0}
    for name in ("n2", "n3", "n4"):
        journal.append({**remedy, "event": "remedy tried", "nodes": [name], "gain_estimated": 0.5, "words": "slow"})
    journal.append({**remedy, "event": "remedy kept", "nodes": ["n2"], "gain_measured": 0.42, "kept": True})
    changed = {"event": "remedy taken back", "reason": "the group has changed", "words": "slow"}
    journal.append({**remedy, **changed, "nodes": ["n3"]})
    journal.append({"event": "finished", "node": "n1", "generation": 1, "at_s": 70.0})
    journal.close()
    assert run(["cluster", "status", "done"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "n1 last capped at 200 W, 190.0 W simulated: 12.0% fewer joules" in said
    assert "bottleneck last at 61 s: network: the exchange between them is the limit" in said
    assert "tried drop n2: +42.0% samples/s measured, kept" in said
    assert "tried drop n3: taken back: the group has changed" in said
    assert "tried drop n4: what it brings was not measured before the end" in said
