import csv
import json
import math
from pathlib import Path

import pytest
from builders import ROWS

from polythrottle.cli.commands import run
from polythrottle.cli.compare import COLUMNS

MEASURE = ["measure", "-d", "sim:jetson-agx-orin", "-w", "resnet50", "--queries", "60", "--arrivals", "poisson:20/s"]


def test_the_table_sums_to_the_meter(capsys: pytest.CaptureFixture[str]) -> None:
    """A row a request, the last for what nobody took; energies sum to the meter, shares of idle to that row."""
    assert run([*MEASURE, "--attribute", "r.csv", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    rows = list(csv.DictReader(Path("r.csv").read_text().splitlines()))
    assert tuple(rows[0]) == COLUMNS
    assert [row["request"] for row in rows] == [*map(str, range(1, len(rows))), "idle"]
    assert said["attribution"]["table"] == "r.csv"
    assert said["attribution"]["requests"] == len(rows) - 1
    assert math.fsum(float(row["energy_j"]) for row in rows) == said["attribution"]["meter_j"]
    idle_j = float(rows[-1]["energy_j"])
    assert idle_j == said["attribution"]["idle_j"]
    assert math.fsum(float(row["idle_share_j"]) for row in rows[:-1]) == pytest.approx(idle_j)
    assert {row["energy_kind"] for row in rows} == {"simulated"}
    assert {row["boundary"] for row in rows} == {said["boundary"]}
    assert float(rows[-1]["end_s"]) == pytest.approx(said["window_s"])


def test_people_are_told_where_it_is_and_that_it_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    """One line in 80 columns; an older table is replaced."""
    for _ in range(2):
        assert run([*MEASURE, "--attribute", "r.csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "simulated went to nobody" in " ".join(" ".join(lines).split())


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--attribute", "r.txt"], 2, "ends in .csv"),
        (["--attribute", "other.csv"], 8, "no such table"),
        (["--attribute", "nowhere/r.csv"], 8, "not a folder"),
        (["--attribute", "folder.csv"], 8, "no such table"),
        (["-d", "replay:t.csv", "--attribute", "r.csv"], 2, "knows no single requests"),
        (["default", "default", "--attribute", "r.csv"], 2, "takes no --attribute"),
        (["default", "default", "--point", "batch_size=1"], 2, "takes no --point"),
        (["--require"], 2, "belongs to a comparison"),
    ],
)
def test_what_cannot_be_written_is_told_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], words: list[str], code: int, told: str
) -> None:
    """One line, and nothing that was there is lost."""
    Path("t.csv").write_text(ROWS)
    Path("other.csv").write_text("a,b\n1,2\n")
    Path("folder.csv").mkdir()
    start = ["measure"] if "-d" in words else MEASURE
    assert run([*start, *words]) == code
    shown = capsys.readouterr()
    assert told in shown.err
    assert len(shown.err.strip().splitlines()) == 1
    assert shown.out == ""
    assert Path("other.csv").read_text() == "a,b\n1,2\n"
    assert not Path("r.csv").exists()


def test_what_was_measured_is_told_even_if_the_table_cannot_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder goes away meanwhile: the figures are printed, and the exit code is that of storage."""

    def gone(path: Path, data: bytes) -> None:
        from polythrottle.domain.errors import StorageError

        raise StorageError(f"{path} cannot be written: No space left on device")

    monkeypatch.setattr("polythrottle.storage.atomic_file.replace_file", gone)
    assert run([*MEASURE, "--attribute", "r.csv", "--json"]) == 8
    shown = capsys.readouterr()
    assert json.loads(shown.out)["energy_j"] > 0
    assert "No space left" in shown.err
