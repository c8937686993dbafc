"""What tables must hold to be set beside the papers on transient training."""

import shutil
from pathlib import Path

import pytest

from polythrottle.cli.commands import run
from polythrottle.domain.errors import BadFile
from polythrottle.lab.reproduce.transient_lifetimes import check_tables

STEPS, SPEEDS = "training_speed_by_network_cmdare.csv", "training_speed_by_cluster_size_cmdare.csv"
CHECKPOINTS, STARTS = "gcp_checkpoint_times_cmdare.csv", "gcp_startup_times_cmdare.csv"
LIVES, LATER_LIVES, RUNS = (
    "gcp_preemptible_lifetimes.csv",
    "aws_spot_lifetimes_2020.csv",
    "gcp_transient_training_runs.csv",
)


@pytest.fixture
def folder(transient: Path, tmp_path: Path) -> Path:
    """Return a folder with tables like the published ones, to be changed."""
    found = tmp_path / "tables"
    found.mkdir()
    for name in (STEPS, SPEEDS, CHECKPOINTS, STARTS, LIVES, LATER_LIVES, RUNS):
        shutil.copy(transient / name, found / name)
        (found / name).chmod(0o644)
    return found


def test_the_published_tables_hold_enough(folder: Path) -> None:
    """Nothing is missed, whatever separates their cells."""
    for path in folder.iterdir():
        path.write_text(path.read_text().replace(",", ";"))
    check_tables(folder)


@pytest.mark.parametrize("name", [STEPS, SPEEDS, CHECKPOINTS, STARTS, LIVES, LATER_LIVES, RUNS])
def test_a_table_that_is_not_there_is_named(folder: Path, name: str) -> None:
    """Before anything is computed."""
    (folder / name).unlink()
    with pytest.raises(BadFile, match=name):
        check_tables(folder)


@pytest.mark.parametrize(
    ("name", "kept", "said"),
    [
        (STEPS, 1, "one network only on K80"),
        (SPEEDS, 7, "no speed with 8 workers; each needs 1 to 8"),
        (SPEEDS, 8, "no curve of res32 on K80"),
        (CHECKPOINTS, 5, "one network only"),
        (STARTS, 40, "no start of a preemptible K80"),
        (LIVES, 1, "started at two times"),
        (LATER_LIVES, 1, "started at two times"),
    ],
)
def test_a_table_that_holds_too_little_says_what_it_needs(
    folder: Path, name: str, kept: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line names the table and what is missing; exit code 4."""
    lines = (folder / name).read_text().splitlines(keepends=True)
    (folder / name).write_text("".join(lines[: kept + 1]))
    assert run(["reproduce", "transient", "--data", str(folder)]) == 4
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert name in told
    assert said in told


def test_icacs_clusters_need_lives_of_k80(folder: Path) -> None:
    """Lives of other machines say nothing of them."""
    (folder / LIVES).write_text((folder / LIVES).read_text().replace("K80", "T4"))
    with pytest.raises(BadFile, match="has no K80"):
        check_tables(folder)
