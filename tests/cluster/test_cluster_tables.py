"""Tables of transient machines: what is read, and what is said of bad ones."""

import gzip
from pathlib import Path

import pytest

from polythrottle.cluster.recorded_tables import checkpoint_rows, lifetime_rows, step_rows
from polythrottle.domain.errors import BadFile
from polythrottle.lab.reproduce.cluster_tables import job_rows, speed_rows, startup_rows

STEPS = "gpu,network,flops,n_parameters,n_tensors,step_time_s,step_time_std_s,n_repeats,weight_mb\n"
GOOD = "K80,a,1e9,1e6,50,0.1,0.001,13,5.3\n"


def written(folder: Path, text: str | bytes) -> Path:
    """Return a file with a text or bytes."""
    path = folder / "table.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has nothing"),
        (STEPS + "K80,a,1e9,1e6,50,0.1,,2.5,\n", "n_repeats is 2.5; it needs a whole number"),
        (STEPS, "no rows"),
        ("gpu,network,flops\n", "step_time_s"),
        (STEPS + "K80,a,1e9,1e6,50,0.1\n", "line 2: 6 fields"),
        (STEPS + "K80,a,fast,1e6,50,0.1,,,\n", "line 2: flops is 'fast'"),
        (STEPS + "K80,a,1e9,1e6,50,-0.1,,,\n", "step_time_s is -0.1"),
        (STEPS + "K80,a,1e9,1e6,50,nan,,,\n", "step_time_s"),
        (STEPS + "K80,a,1e9,1e6,50,inf,,,\n", "step_time_s"),
        (STEPS + "K80,a,1e9,1e6,50,1e300,,,\n", "step_time_s"),
        (STEPS + "K80,,1e9,1e6,50,0.1,,,\n", "network is empty"),
        (STEPS + GOOD + GOOD.replace("1e9", "2e9"), "a on K80 with different flops"),
        (STEPS.replace("weight_mb", "gpu") + GOOD, "repeats the column gpu"),
        (b"\xff\xfe\x00junk", "damaged"),
        (b"\x1f\x8b\x08\x00junk", "damaged|cannot be read"),
    ],
)
def test_a_bad_table_is_one_clear_line(tmp_path: Path, text: str | bytes, said: str) -> None:
    """The error names what is wrong, and where."""
    with pytest.raises(BadFile, match=said) as caught:
        step_rows(written(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    """A file that is not there, or a folder, is no table."""
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(BadFile, match="no file"):
            step_rows(path)


def test_rows_with_holes_are_known_as_such(tmp_path: Path) -> None:
    """An empty optional cell marks a row, a missing column does not, and columns nobody knows are kept out."""
    rows = step_rows(written(tmp_path, STEPS + GOOD + "K80,b,2e9,1e6,,0.2,,,\n"))
    assert [row.complete for row in rows] == [True, False]
    assert rows[1].network.n_tensors != rows[1].network.n_tensors
    bare = step_rows(written(tmp_path, "gpu,network,flops,step_time_s,colour\nK80,a,1e9,0.1,red\n"))
    assert bare[0].complete is None
    assert step_rows(written(tmp_path, "gpu,network,flops\nK80,a,1e9\n"), measured=False)[0].step_s != 0


def test_repeats_of_a_network_are_one_row(tmp_path: Path) -> None:
    """Their mean counts, so that leaving a network out leaves all of it out."""
    (row,) = step_rows(written(tmp_path, STEPS + GOOD + GOOD.replace("0.1,", "0.3,")))
    assert row.step_s == pytest.approx(0.2)
    assert row.repeats == 2
    assert row.std_s == pytest.approx(0.2 / 2**0.5)


def test_a_table_may_be_compressed_and_begin_with_a_mark(tmp_path: Path) -> None:
    """A gzip file is read by its content, and a byte order mark is no part of the first name."""
    plain = ("\ufeff" + STEPS + GOOD).encode()
    assert step_rows(written(tmp_path, gzip.compress(plain))) == step_rows(written(tmp_path, plain))


def test_lifetimes_come_in_two_forms(tmp_path: Path) -> None:
    """Watched to the minute, or polled: then the loss lies between two looks; a machine at the limit is not lost."""
    head = "provider,gpu,zone,stressed,start,end,lifetime_s,reached_24h_cap\n"
    text = head + "gcp,K80,z,1,2019-02-18T23:40:00,x,1920,0\ngcp,K80,z,1,2019-02-18T23:40:00,x,86760,1\n"
    lost, kept = lifetime_rows(written(tmp_path, text))
    assert (lost.lost, lost.age_s, kept.lost) == (True, 1920, False)
    head = "gpu,n_gpus,zone,created,lifetime_min_s,lifetime_max_s,revoked\n"
    text = head + "K80,8,z,2020-03-15T10:00:00+00:00,600,1200,1\nK80,1,z,2020-03-15T10:00:00+00:00,600,,0\n"
    lost, kept = lifetime_rows(written(tmp_path, text))
    assert (lost.gpu, lost.age_s, lost.lost, kept.gpu, kept.most_s) == ("8x K80", 900, True, "K80", None)
    with pytest.raises(BadFile, match="revoked is '2'; it is 0 or 1"):
        lifetime_rows(written(tmp_path, head + "K80,1,z,2020-03-15T10:00:00,600,,2\n"))
    with pytest.raises(BadFile, match="needs a time such as"):
        lifetime_rows(written(tmp_path, head + "K80,1,z,yesterday,600,,0\n"))


def test_the_published_tables_are_read_whole(transient: Path) -> None:
    """Every row of every table counts."""
    assert len(step_rows(transient / "training_speed_by_network_cmdare.csv")) == 28
    assert len(speed_rows(transient / "training_speed_by_cluster_size_cmdare.csv")) == 96
    assert len(checkpoint_rows(transient / "gcp_checkpoint_times_cmdare.csv")) == 100
    assert len(startup_rows(transient / "gcp_startup_times_cmdare.csv")) == 100
    assert len(job_rows(transient / "gcp_transient_training_runs.csv")) == 105
    assert sum(row.lost for row in lifetime_rows(transient / "gcp_preemptible_lifetimes.csv")) == 32
    assert sum(row.lost for row in lifetime_rows(transient / "aws_spot_lifetimes_2020.csv")) == 32


def test_a_market_is_one_of_two(tmp_path: Path) -> None:
    """A start-up table says preemptible or on_demand."""
    head = "gpu,region,market,provisioning_s,staging_s,booting_s\n"
    with pytest.raises(BadFile, match="preemptible or on_demand"):
        startup_rows(written(tmp_path, head + "K80,us,free,1,2,3\n"))
