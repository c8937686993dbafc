"""Power caps from recorded tables: smoothed, never extrapolated, interpolated where asked."""

from pathlib import Path

import pytest

from polythrottle.cluster.recorded_tables import caps_of_table, finer, smoothed
from polythrottle.domain.errors import BadFile, InvalidInput
from polythrottle.domain.fleet.transient_machine import Cap

TABLE = "power_limit_w,latency_s,power_w,energy_j\n250,10,220,2200\n200,10.6,190,2014\n150,12,149,1788\n"


def written(folder: Path, text: str) -> Path:
    """Return a table with a text."""
    path = folder / "caps.csv"
    path.write_text(text)
    return path


def test_a_table_gives_caps_the_highest_first(tmp_path: Path) -> None:
    """Slowdowns are against the highest limit; powers are of all GPUs and of the host."""
    caps = caps_of_table(written(tmp_path, TABLE), gpus=4, host_w=100)
    assert [cap.limit_w for cap in caps] == [250, 200, 150]
    assert [cap.slowdown for cap in caps] == pytest.approx([1, 1.06, 1.2])
    assert [cap.power_w for cap in caps] == pytest.approx([980, 860, 696])


def test_a_batch_size_is_chosen(tmp_path: Path) -> None:
    """A table of several batch sizes needs one of them named."""
    rows = "".join(f"{limit},{batch},{batch * 300 / limit},{limit},1\n" for limit in (250, 125) for batch in (8, 16))
    path = written(tmp_path, "power_limit_w,batch_size,latency_s,power_w,energy_j\n" + rows)
    assert [cap.slowdown for cap in caps_of_table(path, 16)] == pytest.approx([1, 2])
    with pytest.raises(InvalidInput, match="recorded at batch sizes 8, 16"):
        caps_of_table(path)
    with pytest.raises(InvalidInput, match="batch_size = 32 is not there"):
        caps_of_table(path, 32)


def test_scatter_promises_nothing() -> None:
    """A lower limit is never faster nor hungrier than a higher one: scatter is averaged out."""
    caps = smoothed([Cap(250, 1, 200), Cap(225, 0.95, 210), Cap(200, 1.1, 180)])
    assert [cap.slowdown for cap in caps] == pytest.approx([1, 1, 1.1 / 0.975])
    assert [cap.power_w for cap in caps] == [205, 205, 180]


def test_caps_between_recorded_ones_lie_on_straight_lines() -> None:
    """Every recorded cap stays, the ones between are a step apart, and nothing is beyond the ends."""
    caps = finer([Cap(250, 1, 200), Cap(200, 1.1, 150)], 10)
    assert [cap.limit_w for cap in caps] == [250, 240, 230, 220, 210, 200]
    assert caps[1].slowdown == pytest.approx(1.02)
    assert caps[1].power_w == pytest.approx(190)
    assert finer([Cap(None, 1, 200)], 10) == (Cap(None, 1, 200),)
    with pytest.raises(InvalidInput, match="positive"):
        finer(caps, 0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpu_freq_hz,latency_s,energy_j\n1000000000,1,1\n", "no column power_limit_w"),
        ("power_limit_w,gpu_freq_hz,latency_s,power_w,energy_j\n250,1000000000,1,1,1\n", "varies gpu_freq_hz"),
        ("power_limit_w,latency_s,energy_j\n250,1,1\n", "does not say the power"),
    ],
)
def test_other_tables_are_refused(tmp_path: Path, text: str, said: str) -> None:
    """A table of other knobs, or without power, is a bad file."""
    with pytest.raises(BadFile, match=said):
        caps_of_table(written(tmp_path, text))


def test_every_recorded_table_of_limits_gives_caps(tables: Path) -> None:
    """All 24 recorded tables give caps whose energy has its least below the highest limit or at it."""
    paths = sorted(tables.glob("zeus-*.csv"))
    for path in paths:
        try:
            caps = caps_of_table(path)
        except InvalidInput as error:
            caps = caps_of_table(path, int(str(error).partition(";")[0].split()[-1]))
        assert caps[0].slowdown == 1
        assert min(cap.energy for cap in caps) <= caps[0].energy
    assert len(paths) == 24
