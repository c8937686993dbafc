from dataclasses import replace
from pathlib import Path

import pytest
from builders import measured, study

from polythrottle.catalog.profiles import read_profile, write_profile
from polythrottle.errors import BadFile, SloUnmet, StorageError
from polythrottle.profile import Profile, Verdict, verdict
from polythrottle.space import OperatingPoint


def tuned() -> Profile:
    """Return the profile of a small study."""
    found = study("mean<=12ms", energies=(1.0, 0.8, 0.3), latencies=(0.010, 0.012, 0.030))
    return Profile.of(found, {"journal": "a.jsonl", "date": "2026-11-20", "polythrottle": "0.1.0"})


def test_a_profile_reads_back(tmp_path: Path) -> None:
    """Point, SLO and provenance exactly, figures to the nanosecond."""
    write_profile(tuned(), tmp_path / "a" / "b.toml")
    back = read_profile(tmp_path / "a" / "b.toml")
    assert (back.point, back.slo, back.provenance) == (tuned().point, tuned().slo, dict(tuned().provenance))
    assert back.saving_fraction == pytest.approx(0.2)
    assert back.measurement.latency.p99_s == pytest.approx(0.0144)


def test_a_profile_is_written_in_the_units_of_engineers(tmp_path: Path) -> None:
    """Clocks in MHz, latencies in ms, the kind of energy in the first line."""
    write_profile(tuned(), tmp_path / "p.toml")
    text = (tmp_path / "p.toml").read_text()
    assert text.startswith("# Tuned by polythrottle. Energy is simulated.")
    assert "gpu_max_mhz = 400" in text
    assert "[measured.latency_ms]\nmean = 12.0" in text


def test_no_profile_without_a_feasible_trial() -> None:
    """The nearest miss is named instead."""
    with pytest.raises(SloUnmet, match=r"trial 1 came closest and misses mean<=5 ms by 20.0%"):
        Profile.of(study("mean<=5ms", energies=(1.0, 0.8), latencies=(0.010, 0.006)), {})


@pytest.mark.parametrize("text", ["", "nonsense", "[point]", "device = 3\nworkload = 4\n", "\xff"])
def test_a_file_that_is_no_profile_is_one_clear_error(tmp_path: Path, text: str) -> None:
    """Missing keys, wrong types and broken TOML are named."""
    path = tmp_path / "p.toml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(BadFile, match=r"p\.toml is not a profile"):
        read_profile(path)
    with pytest.raises(BadFile, match="cannot be read"):
        read_profile(tmp_path / "none.toml")


@pytest.mark.parametrize(
    "change",
    [
        ('device = "sim:test"', "device = 3"),
        ('workload = "model"', "workload = []"),
        ("gpu_max_mhz = 800", "gpu_max_mhz = inf"),
        ("gpu_max_mhz = 800", "gpu_max_mhz = true"),
        ("gpu_max_mhz = 800", "gpu_max_mhz = { a = 1 }"),
        ("gpu_max_mhz = 800", "gpu_max_mhz = 800\nbatch_size = -16"),
        ("gpu_max_mhz = 800", "gpu_max_mhz = 800\nbatch_size = 1.5"),
        ("gpu_max_mhz = 800", "gpu_max_mhz = 800\nbatch_size = 'x'"),
    ],
)
def test_a_level_or_a_name_that_is_none_is_a_bad_file(tmp_path: Path, change: tuple[str, str]) -> None:
    """What would be applied is checked before anything is opened."""
    path = tmp_path / "p.toml"
    write_profile(tuned(), path)
    text = path.read_text()
    path.write_text(text.replace(*change).replace("gpu_max_mhz = 400", change[1]))
    assert path.read_text() != text
    with pytest.raises(BadFile, match=r"p\.toml is not a profile"):
        read_profile(path)


def test_a_profile_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    """Whole or not at all."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError):
        write_profile(tuned(), tmp_path / "file" / "p.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(StorageError):
        write_profile(tuned(), tmp_path / "folder.toml")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_an_older_profile_stays_only_where_it_answers_the_same_question() -> None:
    """Its point is among those searched and holds today's limits; else it gives way, however little it takes."""
    found = study("mean<=12ms", energies=(1.0, 0.8, 0.3), latencies=(0.010, 0.012, 0.030))
    frugal = replace(tuned(), measurement=measured(0.012, 0.1))
    assert verdict(frugal, found) == Verdict(True, "it takes 87.5% less energy per item")
    assert verdict(replace(frugal, measurement=measured(0.013, 0.1)), found).words == "it was for other limits"
    elsewhere = replace(frugal, point=OperatingPoint({"gpu_max_hz": 1, "batch_size": 1}))
    assert verdict(elsewhere, found).words == "it was for other knobs or levels"
    assert not verdict(elsewhere, found).keeps
    early = replace(frugal, provenance={})
    assert verdict(early, found).keeps
    assert verdict(replace(early, slo=()), found).words == "it was for no SLO"
