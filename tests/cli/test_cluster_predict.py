"""`polythrottle cluster predict`: what is printed, and what is said of bad input."""

import json
from pathlib import Path

import pytest

from polythrottle.cli.commands import run

HEAD = "gpu,network,flops,n_parameters,n_tensors,step_time_s,step_time_std_s,n_repeats,weight_mb\n"
LINES = [
    f"A,net{i},{flops:.6g},1e6,{tensors},{6e-11 * flops + 9e-4 * tensors:.6g},0.001,5,5.0\n"
    for i, (flops, tensors) in enumerate([(6e8, 50), (7e8, 210), (2e9, 122), (4e9, 224), (6e9, 326), (2e10, 216)])
]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Return a table of six networks."""
    path = tmp_path / "steps.csv"
    path.write_text(HEAD + "".join(LINES))
    return path


def test_a_table_is_scored_by_leaving_each_network_out(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One record per network and model, the errors by type and model, all as JSON."""
    assert run(["cluster", "predict", "--table", str(table), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["records"]) == 6 * 4
    assert {"gpu", "network", "measured_s", "predicted_s", "model"} <= set(found["records"][0])
    assert set(found["mape"]["A"]) == {"polythrottle", "linear-flops", "svr-rbf", "svr-poly"}
    assert found["protocol"] == "leave-one-network-out"
    assert found["mape"]["A"]["polythrottle"] < 0.1
    assert found["mape_published_protocol"]["A"]["svr-rbf"] > 0


def test_a_second_file_is_predicted(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Measured or not; a network of both files is named as seen, a type that is not known as unknown."""
    test = tmp_path / "new.csv"
    test.write_text(f"gpu,network,flops,n_tensors,step_time_s\nA,new,5e9,100,\nA,net0,6e8,50,{0.081}\nB,new,5e9,100,\n")
    assert run(["cluster", "predict", "--table", str(table), "--test", str(test), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    new, old, strange = (one for one in found["records"] if one["model"] == "polythrottle")
    assert new["measured_s"] is None
    assert new["predicted_s"] == pytest.approx(0.39, rel=0.1)
    assert old["measured_s"] == 0.081
    assert found["seen"] == ["net0"]
    assert strange["predicted_s"] is None
    assert "B" in strange["why"]
    assert found["mape"]["B"]["polythrottle"] is None


def test_people_get_a_table_of_80_columns(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every network, and the errors under both protocols."""
    assert run(["cluster", "predict", "--table", str(table)]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "net5" in shown
    assert "published (leaks)" in shown


def test_what_a_missing_column_costs_is_said(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without numbers of tensors predictions are coarser; a table that has them has nothing to say."""
    bare = tmp_path / "bare.csv"
    rows = [line.split(",") for line in (HEAD + "".join(LINES)).splitlines()]
    bare.write_text("".join(",".join(cells[:4] + cells[5:]) + "\n" for cells in rows))
    assert run(["cluster", "predict", "--table", str(bare)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "n_tensors is not known of 6 of 6 networks" in shown
    assert "predictions are coarser" in shown
    asked = tmp_path / "asked.csv"
    asked.write_text("gpu,network,flops\nA,new,5e9\nA,net0,6e8\n")
    for words, notes in (([], 0), (["--test", str(asked)], 1)):
        assert run(["cluster", "predict", "--table", str(table), *words, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["notes"]
        assert len(found) == notes
    assert "n_tensors is not known of 1 of 7 networks" in found[0]


@pytest.mark.parametrize(
    ("text", "said"), [(HEAD, "no rows"), ("a,b\n1,2\n", "no column"), (HEAD + "A,x,1,1,1,zero,,,\n", "step_time_s")]
)
def test_a_bad_table_is_one_line_and_its_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    """No traceback: the file, the line, what was expected; exit code 4."""
    path = tmp_path / "bad.csv"
    path.write_text(text)
    assert run(["cluster", "predict", "--table", str(path)]) == 4
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


def test_types_that_never_met_are_an_error(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second file of other types has nothing to be predicted from."""
    test = tmp_path / "new.csv"
    test.write_text("gpu,network,flops\nB,new,5e9\n")
    assert run(["cluster", "predict", "--table", str(table), "--test", str(test)]) == 4
    assert "the table has A only" in capsys.readouterr().err


def test_checkpoints_are_predicted_in_the_same_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table of checkpoint times is known by its columns; a lone network is unknown with a reason."""
    path = tmp_path / "checkpoints.csv"
    head = "model,local_write_s,remote_write_s,weight_mb,meta_mb\n"
    rows = [
        f"n{i},0.5,{3 + 0.02 * w + 0.2 * g:.4f},{w},{g}\n"
        for i, (w, g) in enumerate([(5, 1), (50, 2), (90, 4), (200, 5)])
    ]
    path.write_text(head + "".join(rows))
    assert run(["cluster", "predict", "--table", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mape"][""]["polythrottle"] < 0.01
    assert [one["network"] for one in found["records"]] == ["n0", "n1", "n2", "n3"]
    path.write_text(head + rows[0])
    assert run(["cluster", "predict", "--table", str(path)]) == 0
    assert "no other network was measured" in capsys.readouterr().out


def test_long_names_and_extreme_figures_are_shown_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names are folded and no figure is cut; markup in names is plain text."""
    path = tmp_path / "odd.csv"
    named = "NVIDIA A100-SXM4-80GB-PCIe,[red]a-very-long-name-of-a-network-[/b]-"
    lines = [line.replace("A,net", named) for line in LINES]
    lines[::2] = [line.replace(",0.001,5", "e16,0.001,5") for line in lines[::2]]
    path.write_text((HEAD + "".join(lines)).replace(",", ";"))
    assert run(["cluster", "predict", "--table", str(path)]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    assert "e+15 s" in shown or "e+14 s" in shown


def test_very_many_repeats_are_drawn_as_a_few(table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mean over a million steps costs no more than one over twenty."""
    path = tmp_path / "repeats.csv"
    path.write_text(table.read_text().replace(",5,5.0", ",1000000,5.0"))
    assert run(["cluster", "predict", "--table", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mape_published_protocol"]["A"]["svr-rbf"] > 0
