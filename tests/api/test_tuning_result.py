import re
from dataclasses import replace
from pathlib import Path

import pytest

from polythrottle.api import search
from polythrottle.api.tuning_result import Tuning, find_study
from polythrottle.catalog import tuned_profiles
from polythrottle.catalog.tuned_profiles import read_profile, write_profile
from polythrottle.domain.errors import StorageError
from polythrottle.tuning.setup import Setup

BETTER = "gpu_max_hz,latency_s,energy_j\n1300e6,0.01,2\n900e6,0.012,1.0\n600e6,0.015,1.5\n"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Return a small recorded table."""
    (tmp_path / "t.csv").write_text(BETTER)
    return tmp_path / "t.csv"


def tuned(**words: object) -> Tuning:
    """Tune the table; the more trials, the better the answer."""
    words = {"slo": "mean<=2x", "trials": 3, "method": "grid", "out": Path("p.toml"), **words}
    return search.tune("replay:t.csv", **words)  # type: ignore[arg-type]


def test_a_better_profile_stays_unless_it_is_forced_out(table: Path) -> None:
    """A study that found less says that it does not replace it, and where its own answer is."""
    whole = tuned()
    assert (whole.older, whole.kept) == (None, False)
    before = Path("p.toml").read_bytes()
    short = tuned(trials=1)
    assert short.kept
    assert short.profile is not None
    assert short.profile_path == Path("p.toml").absolute()
    assert re.fullmatch(r"the profile of [\d-]+: it takes 50.0% less energy per item", short.older or "")
    assert Path("p.toml").read_bytes() == before
    forced = tuned(trials=1, force=True)
    assert not forced.kept
    assert read_profile(Path("p.toml")).measurement.energy_j == 2.0
    better = tuned()
    assert (better.older or "").endswith("this one takes 50.0% less energy per item")
    assert read_profile(Path("p.toml")).measurement.energy_j == 1.0


@pytest.mark.parametrize(
    ("change", "told"),
    [({"slo": "mean<=1.3x"}, "it was for mean<=2x"), ({"slo": ()}, "it was for mean<=2x"),
     ({"objective": "latency"}, "it was for energy")],
)  # fmt: skip
def test_the_answer_to_another_question_is_replaced(table: Path, change: dict[str, object], told: str) -> None:
    """However good it is, and with a word of what it answered."""
    tuned()
    other = tuned(trials=1, **change)
    assert (other.older or "").endswith(told)
    assert not other.kept


def test_a_better_profile_of_more_knobs_is_kept_beside_that_of_fewer(table: Path) -> None:
    """The narrower answer takes its name, as was asked for, and one command goes back to the wider one."""
    table.write_text("gpu_max_hz,mem_hz,latency_s,energy_j\n13e8,2e9,0.01,2\n13e8,1e9,0.01,1.6\n9e8,1e9,0.012,1.0\n")
    wide = tuned()
    narrow = search.tune(setup=Setup("replay:t.csv", knobs=("mem_hz",)), slo="mean<=2x", method="grid", out="p.toml")
    assert (narrow.kept, narrow.profile_path) == (False, wide.profile_path)
    assert (narrow.older or "").endswith("it was for other knobs or levels; it takes 37.5% less energy per item")
    assert narrow.aside == Path("p.toml.bak").absolute()
    assert read_profile(narrow.aside) == wide.profile
    assert find_study("p.toml.bak") == wide.journal_path
    again = tuned()
    assert ((again.older or "").endswith("this one takes 37.5% less energy per item"), again.aside) == (True, None)
    # Another one is kept beside the first, which may be the better of both.
    more = search.tune(setup=Setup("replay:t.csv", knobs=("mem_hz",)), slo="mean<=2x", method="grid", out="p.toml")
    assert more.aside == Path("p.toml.bak2").absolute()
    assert read_profile(narrow.aside) == wide.profile


def test_nothing_is_said_to_be_replaced_where_nothing_could_be_written(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older profile is in its place, and no copy of it is left beside."""
    table.write_text("gpu_max_hz,mem_hz,latency_s,energy_j\n13e8,2e9,0.01,2\n13e8,1e9,0.01,1.6\n9e8,1e9,0.012,1.0\n")
    wide = tuned()

    def full(profile: object, path: Path) -> None:
        raise StorageError(f"{path} cannot be written: No space left on device")

    monkeypatch.setattr(tuned_profiles, "write_profile", full)
    narrow = search.tune(setup=Setup("replay:t.csv", knobs=("mem_hz",)), slo="mean<=2x", method="grid", out="p.toml")
    assert (narrow.older, narrow.aside, narrow.profile_path) == (None, None, None)
    assert len(narrow.unwritten) == 1
    assert read_profile(Path("p.toml")) == wide.profile
    assert not list(Path().glob("*.bak*"))


def test_a_profile_of_other_contents_is_replaced(table: Path) -> None:
    """A table, board or model that changed makes the older answer void."""
    tuned()
    table.write_text(BETTER.replace("900e6", "800e6"))
    assert (tuned(trials=1).older or "").endswith("it was for other contents of device or workload")


def test_a_profile_of_other_hardware_is_replaced(table: Path) -> None:
    """Its figures are not those of this machine."""
    tuned()
    before = read_profile(Path("p.toml"))
    write_profile(replace(before, identity={"board": "another"}), Path("p.toml"))
    assert "it was for board another" in (tuned(trials=1).older or "")


def test_as_good_a_profile_is_replaced_by_the_newer(table: Path) -> None:
    """Within what two trials cannot tell apart the newer evidence counts."""
    tuned()
    assert "as good within 1%" in (tuned(seed=1).older or "")


def test_a_study_that_goes_on_replaces_its_own_profile(table: Path) -> None:
    """There is nothing to say of that."""
    first = tuned(trials=1, journal=Path("j.jsonl"))
    assert search.resume(first.journal_path, trials=3, out=Path("p.toml")).older is None
    assert read_profile(Path("p.toml")).measurement.energy_j == 1.0


def test_a_profile_that_cannot_be_read_is_replaced(table: Path) -> None:
    """It is no answer to anything."""
    Path("p.toml").write_text("# Tuned by polythrottle.\nnonsense\n")
    assert "could not be read" in (tuned().older or "")
    assert read_profile(Path("p.toml")).measurement.energy_j == 1.0


def test_where_nothing_holds_the_slo_the_profile_stays(table: Path) -> None:
    """There is no answer to replace it with."""
    tuned()
    before = Path("p.toml").read_bytes()
    assert tuned(slo="mean<=1ms").profile_path is None
    assert Path("p.toml").read_bytes() == before
