"""The paper's streams under every policy: the short form of the bars, and what is printed."""

import json

import pytest

from polythrottle.cli.commands import run
from polythrottle.lab.reproduce.published import ORIN, TX2
from polythrottle.lab.reproduce.scheduler import PUBLISHED, SETTINGS, Scene, Setting, cell, throughput


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "arrivals"), [(SETTINGS[0], "poisson"), (SETTINGS[1], "uniform")], ids=["orin", "tx2"]
)
def test_interleaving_holds_what_sharing_breaks(setting: Setting, arrivals: str) -> None:
    """Violations stay below the paper's and near inference alone, energy 10 % below greedy sharing, in few replays."""
    scene = Scene.of(setting)
    found = {each.policy: each for each in cell(scene, arrivals, 3)}
    ours, board = found["interleave"], scene.setting.board
    assert ours.violation_rate <= found["inference-only"].violation_rate + 0.01
    assert ours.violation_rate < PUBLISHED[board, arrivals]["paper"] < found["greedy"].violation_rate
    assert ours.energy_j < 0.9 * found["greedy-all"].energy_j
    assert ours.finetune_seconds is not None
    room = throughput(scene, arrivals, 2)
    assert 0.85 * room.idle <= room.done <= min(room.room, room.clairvoyant)


@pytest.mark.slow
def test_the_document_has_every_cell(capsys: pytest.CaptureFixture[str]) -> None:
    """One record per board, arrivals and policy, with the paper's rate where there is one, and all bars, which hold."""
    assert run(["reproduce", "scheduler", "--replays", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["records"]) == 2 * 3 * 6
    assert found["energy_kind"] == "simulated"
    keys = {"board", "arrivals", "policy", "violation_rate", "energy_j", "finetune_seconds", "paper"}
    for one in found["records"]:
        assert keys <= set(one)
        assert one["paper"] == PUBLISHED[one["board"], one["arrivals"]].get(one["policy"])
    assert {one["board"] for one in found["records"]} == {ORIN, TX2}
    assert len(found["bars"]) == 4
    assert [each["what"] for each in found["bars"] if not each["holds"]] == []


@pytest.mark.slow
def test_the_table_fits_and_says_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    """No line is longer than 80 columns and no cell is cut; a number of replays that is none is refused."""
    assert run(["reproduce", "scheduler", "--replays", "1"]) == 0
    out = capsys.readouterr().out
    assert "simulated" in out
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 80
    assert run(["reproduce", "scheduler", "--replays", "0"]) == 2
