import json
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w
from builders import study
from hypothesis import given
from hypothesis import strategies as st

from polythrottle import tune
from polythrottle.catalog.tuned_profiles import ladder_from_table, ladder_table, read_profile, write_profile
from polythrottle.cli.commands import run
from polythrottle.domain.backports import tomllib
from polythrottle.domain.errors import BadFile
from polythrottle.domain.ladder import Ladder, PointPerformance, Rung
from polythrottle.domain.measurement import Interval
from polythrottle.domain.profile import Profile
from polythrottle.domain.space import OperatingPoint

_POINT = OperatingPoint({"gpu_max_hz": 1_300_500_000, "mode": "MAXN", "batch_size": 4})


def _ladder() -> Ladder:
    rungs = []
    for step in range(3):
        point = _POINT.moved({"batch_size": 1 << step})
        service = PointPerformance(point, 1 << step, 0.1 / 3, 0.1 / 7, 0.12 / 7, 2 / 3, 8 / 3)
        rungs.append(Rung(10.0 ** (step - 0.5), service, 0.01 * step / 3, 10 / 3 + step, 0.1 / 3))
    return Ladder(0.7, tuple(rungs))


def _profile() -> Profile:
    found = Profile.of(study("mean<=1s", energies=(2.0, 1.0), latencies=(0.01, 0.01)), {})
    seen = replace(found.measurement, idle_power_w=7 / 3, intervals={"energy": Interval(0.9, 1.1)})
    rungs = tuple(replace(rung, service=replace(rung.service, point=found.point, batch=1)) for rung in _ladder().rungs)
    return replace(found, measurement=seen, default=seen, ladder=Ladder(0.7, rungs))


def test_a_profile_s_ladder_reads_back_exactly(tmp_path: Path) -> None:
    """Every figure of every rung is the same after writing and reading, and so are idle power and intervals."""
    profile, path = _profile(), tmp_path / "p.toml"
    write_profile(profile, path)
    read = read_profile(path)
    assert read.ladder == profile.ladder
    assert read.measurement.idle_power_w == 7 / 3
    assert read.measurement.intervals == {"energy": Interval(0.9, 1.1)}
    assert read.saving is not None


_figures = st.floats(1e-6, 1e4)


@given(st.lists(_figures, min_size=8, max_size=8))
def test_any_ladder_survives_its_file(figures: list[float]) -> None:
    """Times are held to the nanosecond, everything else to the last bit."""
    rate, gather, power, p99, interval, latency, joules, slo = figures
    service = PointPerformance(_POINT, 4, interval, latency, interval + latency, joules, power)
    ladder = Ladder(slo, (Rung(rate, service, gather, power, p99),))
    assert ladder_from_table(tomllib.loads(tomli_w.dumps(ladder_table(ladder))), _POINT) == ladder


def test_a_ladder_is_written_in_the_units_of_engineers() -> None:
    """Clocks in MHz, times in milliseconds."""
    table = ladder_table(_ladder())
    assert table["slo_ms"] == 700.0
    assert table["rungs"][0]["point"]["gpu_max_mhz"] == 1300.5
    assert table["rungs"][1]["interval_ms"] == 33.333333


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("slo_ms = ", "slo = ", "ladder.slo_ms"),
        ("slo_ms = 700.0", "slo_ms = 0", "ladder.slo_ms"),
        ("slo_ms = 700.0", 'slo_ms = "fast"', "ladder.slo_ms"),
        ("batch_j = ", "batch_joules = ", "ladder.rungs[0].batch_j"),
        ("batch = 1\n", "batch = 1.5\n", "ladder.rungs[0].batch"),
        ("batch = 1\n", "batch = 0\n", "ladder.rungs[0].batch"),
        ("batch = 1\n", "batch = 7\n", "ladder.rungs[0].batch"),
        ("idle_w = ", "idle_w = -", "ladder.rungs[0].idle_w"),
        ("power_w = 3", "power_w = nan #", "ladder.rungs[0].power_w"),
        ("p99_ms = ", "p99_ms = true #", "ladder.rungs[0].p99_ms"),
        ("gather_ms = 0.0", "gather_ms = -1", "ladder.rungs[0].gather_ms"),
        ("gpu_max_mhz = ", "gpu_mhz = ", "ladder.rungs[0].point"),
        ('mode = "MAXN"', "mode = []", "ladder.rungs[0].point"),
        ("rate_per_s = 31", "rate_per_s = 0.1 #", "rising rates"),
    ],
)
def test_every_broken_ladder_is_a_bad_file_that_names_the_key(tmp_path: Path, old: str, new: str, names: str) -> None:
    """One line says which figure of which rung is wrong."""
    path = tmp_path / "p.toml"
    write_profile(replace(_profile(), point=_POINT, ladder=_ladder()), path)
    text = path.read_text()
    head, found, tail = text.partition("[ladder]")
    assert found
    assert old in tail
    path.write_text(head + found + tail.replace(old, new, 1))
    with pytest.raises(BadFile) as caught:
        read_profile(path)
    assert names in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "table", ["ladder = 3", "[ladder]\nslo_ms = 1\nrungs = 3", "[ladder]\nslo_ms = 1\nrungs = [1]"]
)
def test_a_ladder_that_is_no_table_is_a_bad_file(tmp_path: Path, table: str) -> None:
    """So is one without rungs."""
    path = tmp_path / "p.toml"
    write_profile(replace(_profile(), ladder=None), path)
    path.write_text(f"{table}\n{path.read_text()}" if "[" not in table[:1] else f"{path.read_text()}\n{table}\n")
    with pytest.raises(BadFile, match="ladder"):
        read_profile(path)
    path.write_text(path.read_text().replace("rungs = [1]", "rungs = []").replace("rungs = 3", "rungs = []"))
    with pytest.raises(BadFile):
        read_profile(path)


@pytest.mark.slow
def test_tuning_writes_a_ladder(tmp_path: Path) -> None:
    """A limit on the p99 is all it takes on a board whose idle power can be read; the file holds what was found."""
    out = tmp_path / "p.toml"
    tuning = tune("sim:jetson-agx-orin", "efficientnet-b7", "p99<=700ms", trials=8, presets=False, out=out)
    assert tuning.profile is not None
    assert tuning.profile.ladder is not None
    assert tuning.unladdered == ""
    assert read_profile(out).ladder == tuning.profile.ladder
    assert len(tuning.profile.ladder.rungs) > 3


@pytest.mark.slow
def test_the_summary_says_along_which_loads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One line and one entry of the document; without a ladder, why."""
    words = ["tune", "--device", "sim:jetson-agx-orin", "--workload", "efficientnet-b7", "--trials", "5"]
    assert run([*words, "--slo", "p99<=700ms", "--no-presets"]) == 0
    assert "rungs, " in capsys.readouterr().out
    assert run([*words, "--json", "--no-presets"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ladder"] is None
    assert "limit on the p99" in document["no_ladder"]
