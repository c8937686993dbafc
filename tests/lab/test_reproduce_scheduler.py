"""The paper's streams under every policy: the short form of the bars, and what is printed."""

import json
from dataclasses import asdict, replace

import pytest

from polythrottle.catalog import load_model
from polythrottle.cli.commands import run
from polythrottle.cli.reproduce import show
from polythrottle.lab.reproduce.published import ORIN, TX2
from polythrottle.lab.reproduce.scheduler import (
    PUBLISHED,
    SETTINGS,
    Scene,
    Setting,
    StreamRecord,
    Throughput,
    bars,
    cell,
    stream,
    stretched,
    stricter,
    throughput,
)


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


def recorded(**changed: float) -> tuple[list[StreamRecord], list[Throughput]]:
    """Return records of every policy on two streams, and what was fine-tuned beside them; some figures are given."""
    rates = {
        "inference-only": 0.01,
        "greedy": 0.4,
        "paper": 0.06,
        "interleave": 0.015,
        "off-peak": 0.012,
        "greedy-all": 0.5,
    }
    energies = {**dict.fromkeys(rates, 100.0), "interleave": 80.0, "greedy-all": 100.0}
    records = [
        StreamRecord(
            ORIN, arrivals, policy, changed.get(f"{policy} late", rate), 0.001,
            changed.get(f"{policy} J", energies[policy]), None if policy == "inference-only" else 40.0,
            PUBLISHED[ORIN, arrivals].get(policy),
        )
        for arrivals in ("uniform", "poisson") for policy, rate in rates.items()
    ]  # fmt: skip
    figures = {"done": 95.0, "room": 110.0, "idle": 100.0, "clairvoyant": 105.0}
    return records, [
        Throughput(ORIN, arrivals, **{name: changed.get(name, value) for name, value in figures.items()})
        for arrivals in ("uniform", "poisson")
    ]


@pytest.mark.parametrize(
    ("changed", "missed", "shown"),
    [
        ({}, [], "+0.50 points at most"),
        ({"inference-only late": 0.004}, [0], "+1.10 points at most"),
        ({"interleave late": 0.021, "inference-only late": 0.02}, [1], "+0.02 points at most"),
        ({"done": 89.0}, [2], "89 % at least"),
        ({"interleave J": 86.0}, [3], "14.0 to 14.0 %"),
    ],
)
def test_each_bar_falls_with_the_figure_it_is_about(changed: dict[str, float], missed: list[int], shown: str) -> None:
    """Violations beside inference alone and the paper's, what was fine-tuned, and energy below greedy sharing."""
    told = bars(*recorded(**changed))
    assert [n for n, bar in enumerate(told) if not bar.holds] == missed
    assert told[missed[0] if missed else 0].value == shown


def test_stricter_readings_ask_for_more() -> None:
    """Of all time without inference, of what a clairvoyant could do, and against greedy sharing that does less."""
    assert [bar.holds for bar in stricter(*recorded())] == [False, True, True]
    assert [bar.value for bar in stricter(*recorded())] == ["86 to 86 %", "90 to 90 %", "20.0 to 20.0 %"]
    assert [bar.holds for bar in stricter(*recorded(room=105.0, clairvoyant=106.0))] == [True, False, True]
    assert [bar.holds for bar in stricter(*recorded(**{"greedy J": 94.0}))] == [False, True, False]


def test_policies_stand_side_by_side_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """Shares without a figure are blank; inference alone has no time of fine-tuning."""
    records, throughputs = recorded()
    show(
        {
            "source": "a paper", "replays": 3, "assumed": ["that"],
            "records": [asdict(replace(records[0], violation_error=None)), *map(asdict, records[1:])],
            "throughput": [*map(asdict, throughputs)],
            "bars": [*map(asdict, bars(records, throughputs))],
            "stricter": [*map(asdict, stricter(records, throughputs))],
        }
    )  # fmt: skip
    text = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert max(map(len, text.splitlines())) <= 80
    assert "simulated, 3 replays of 30 s" in lines[0]
    assert any("uniform inference alone 1.00 0.40 100 J" in line for line in lines)
    assert any("uniform greedy 40.00 0.10 37.91 100 J 40 s" in line for line in lines)
    assert any("poisson greedy, no drop 50.00 0.10 100 J 40 s" in line for line in lines)
    assert any(line.endswith("uniform 95 100 105") for line in lines)
    assert sum(line.startswith("does not hold") for line in lines) == 1
    assert sum(line.startswith("holds ") for line in lines) == 6


def test_a_stretched_model_takes_so_many_times_as_long() -> None:
    """All but its preparation on the CPU; a stream is one replay of 30 s with the setting's limit."""
    model = load_model(SETTINGS[0].network)
    slow = stretched(model, 3.0)
    assert slow.operations == 3 * model.operations
    assert slow.kernels == 3 * model.kernels
    one = stream(SETTINGS[0], "uniform", 1)
    assert len(one.times_s) == pytest.approx(30 * SETTINGS[0].rate_per_s, abs=1)
    assert max(one.times_s) < 30.0
    assert one.slo_s == SETTINGS[0].slo_s
