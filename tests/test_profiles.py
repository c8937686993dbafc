from pathlib import Path

import pytest
from builders import study

from polythrottle.catalog.profiles import read_profile, write_profile
from polythrottle.errors import BadFile, SloUnmet, StorageError
from polythrottle.profile import Profile


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


def test_a_profile_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    """Whole or not at all."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError):
        write_profile(tuned(), tmp_path / "file" / "p.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(StorageError):
        write_profile(tuned(), tmp_path / "folder.toml")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
