"""What a store knows, as people see it."""

import json
from pathlib import Path

import pytest

from polythrottle.cli.commands import run
from polythrottle.cluster.fleet import fleets, learn, shown
from polythrottle.domain.errors import BadFile, InvalidInput
from polythrottle.storage.fleet_knowledge import CapObservation, NodeReport, keep, recall
from polythrottle.storage.object_store import Store

NAMED = '{"version": 1, "gpu": "V100", "network": "resnet50", "looks": [], "node": %s}'
TABLE = """power_limit_w,latency_s,throughput_per_s,power_w,energy_j
150,0.118,8.4,145,17
200,0.105,9.5,184,19
250,0.1,10,220,22
"""


def told(name: str, factor: float) -> NodeReport:
    """Return what a node of a speed says."""
    return NodeReport(
        name,
        "V100",
        "resnet50",
        (
            CapObservation(None, factor, 220.0, 3),
            CapObservation(200.0, 1.05 * factor, 184.0, 3),
            CapObservation(150.0, 1.18 * factor, 145.0, 3),
        ),
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Return a store with seven equal nodes and a slow one."""
    found = Store(str(tmp_path / "store"))
    for index in range(7):
        keep(found, told(f"n{index}", 1.0))
    keep(found, told("slow", 1.12))
    return found


def test_slack_and_flags_are_shown(store: Store) -> None:
    """The slow node stands out; the others would run at 200 W, for 10 % fewer joules all together."""
    (knowledge,), notes = fleets(store)
    found = shown(knowledge)
    assert notes == ()
    assert [cap.limit_w for cap in found.caps] == [None, 200.0, 150.0]
    assert found.seen == (8, 8, 8)
    by_name = {node.name: node for node in found.nodes}
    assert by_name["slow"].mads is not None
    assert by_name["slow"].cap is not None
    assert by_name["slow"].cap.limit_w is None
    assert {node.cap.limit_w for node in found.nodes if node.cap is not None and node.name != "slow"} == {200.0}
    ours, theirs = 7 * 1.05 * 184 + 1.12 * 220, 7 * 220 + 1.12 * 220
    assert found.saving == pytest.approx(1 - ours / theirs, abs=1e-6)


def test_a_node_without_its_default_has_no_silicon(tmp_path: Path) -> None:
    """It is listed as unknown, never as 0."""
    store = Store(str(tmp_path / "s"))
    keep(store, NodeReport("odd", "V100", "resnet50", (CapObservation(200.0, 1.0, 180.0),)))
    found = shown(fleets(store)[0][0])
    assert (found.nodes[0].factor, found.nodes[0].cap, found.saving, found.caps, found.seen) == (
        None,
        None,
        None,
        (),
        (),
    )


def test_a_sweep_becomes_what_a_node_says(tmp_path: Path) -> None:
    """Rows relative to the highest limit, which is the default."""
    (tmp_path / "t.csv").write_text(TABLE)
    store = Store("memory://fleet-learn")
    learn(store, tmp_path / "t.csv", "n1", "V100", "resnet50")
    (said,) = recall(store, "V100", "resnet50")[0].told
    assert [(look.limit_w, round(look.step_s, 4), look.power_w) for look in said.looks] == [
        *((None, 0.1, 220.0), (200.0, 0.105, 184.0), (150.0, 0.118, 145.0))
    ]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("gpu_freq_hz,latency_s,power_w,energy_j\n1,1,1,1\n", BadFile),
        ("power_limit_w,latency_s,power_w,energy_j\n250,0.1,220,22\n", InvalidInput),
    ],
)
def test_other_tables_teach_nothing(tmp_path: Path, text: str, error: type[Exception]) -> None:
    """Clocks instead of limits, or a single limit."""
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(error):
        learn(Store("memory://fleet-none"), tmp_path / "t.csv", "n1", "V100", "resnet50")


def test_the_command_shows_a_fleet(store: Store, capfd: pytest.CaptureFixture[str]) -> None:
    """Caps, nodes and flags within 80 columns; --json is the same; a bad file is a note and no end."""
    store.write("knowledge/V100/resnet50/torn.json", b"{")
    assert run(["cluster", "fleet", "--store", store.url]) == 0
    out, err = capfd.readouterr()
    assert "slow" in out
    assert "stands out" in out
    assert "estimated" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "torn.json" in err
    assert run(["cluster", "fleet", "--store", store.url, "--json"]) == 0
    (document,) = json.loads(capfd.readouterr().out)
    assert [node["name"] for node in document["nodes"] if node["flagged_mads"] is not None] == ["slow"]


def test_the_command_keeps_a_sweep_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Then shows what is known now."""
    (tmp_path / "t.csv").write_text(TABLE)
    words = ["cluster", "fleet", "--store", str(tmp_path / "s"), "--gpu", "V100", "--network", "resnet50"]
    assert run([*words, "--learn", "t.csv", "--node", "n1"]) == 0
    assert "measured by 1 node\n" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--learn", "t.csv"], 2, "--learn needs --node"),
        (["--longer", "x"], 2, "--longer"),
        (["--store", "nowhere://x"], 2, "cannot be opened"),
        (["--store", ""], 2, "--store is empty"),
    ],
)
def test_what_cannot_be_shown_is_said(
    words: list[str], code: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line, and the exit code of its class."""
    assert run(["cluster", "fleet", "--store", "memory://fleet-bad", *words]) == code
    assert said in capfd.readouterr().err


def test_an_empty_store_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing is known yet, and why."""
    assert run(["cluster", "fleet", "--store", "memory://fleet-empty"]) == 0
    assert "Nothing is known" in capfd.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "garbage",
        "[]",
        "{}",
        "[" * 100_000,
        '{"version": 1, "looks": null}',
        '{"version": 99}',
        NAMED % '"[/b]\x1b"',
        NAMED % "{}",
    ],
)
def test_a_file_that_is_no_knowledge_is_left_out_in_plain_words(
    store: Store, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A note names the file; none of it is Python's, and what is known is shown all the same."""
    store.write("knowledge/V100/resnet50/odd.json", text.encode())
    assert run(["cluster", "fleet", "--store", store.url]) == 0
    out, err = capfd.readouterr()
    assert "measured by 8 nodes" in out
    assert "odd.json" in err
    assert "left out: it is" in err or "cannot be the name" in err
    assert not any(word in err for word in ("Expecting", "indices", "NoneType", "recursion", "Error"))


def test_a_folder_that_cannot_be_knowledge_is_left_out(store: Store, capfd: pytest.CaptureFixture[str]) -> None:
    """The rest of the store is shown."""
    store.write("knowledge/V100/-x/odd.json", b"{}")
    assert run(["cluster", "fleet", "--store", store.url]) == 0
    out, err = capfd.readouterr()
    assert "measured by 8 nodes" in out
    assert "'-x' cannot be the name of a file" in err
