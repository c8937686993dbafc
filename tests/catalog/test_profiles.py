import os
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w
from builders import measured, study

from polythrottle.catalog.tuned_profiles import (
    find_profile,
    levels_of,
    named_profiles,
    point_of,
    read_profile,
    tuned_path,
    write_profile,
)
from polythrottle.domain.backports import tomllib
from polythrottle.domain.errors import BadFile, SloUnmet, StorageError, UnknownName
from polythrottle.domain.problem import Constraint, Objective, Problem
from polythrottle.domain.profile import Profile, Verdict, verdict
from polythrottle.domain.space import OperatingPoint, SearchSpace


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
    with pytest.raises(BadFile, match=r"p\.toml is not a profile|p\.toml cannot be read: it is empty"):
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
    with pytest.raises(BadFile, match=r"p\.toml is not a profile|p\.toml cannot be read: it is empty"):
        read_profile(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("provenance", "true"),
        ("provenance", '""'),
        ("identity", "3"),
    ],
)
def test_a_table_or_a_list_that_is_none_is_a_bad_file(tmp_path: Path, key: str, value: str) -> None:
    """What stands in its place is named, before anything reads in it."""
    path = tmp_path / "p.toml"
    write_profile(tuned(), path)
    document = {**tomllib.loads(path.read_text()), **tomllib.loads(f"{key} = {value}")}
    path.write_text(tomli_w.dumps(document))
    with pytest.raises(BadFile, match=rf"p\.toml is not a profile: {key} is not a (table|list of texts)"):
        read_profile(path)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("mean<=12 ms", "mean=<12 ms", "is not an SLO"),
        ("saving_fraction = 0.2", "saving_fraction = nan", "saving_fraction is nan, not a finite number"),
        ("throughput_per_s", "queries = -3\nthroughput_per_s", "1 query or more, not of -3"),
        ("throughput_per_s", "queries = inf\nthroughput_per_s", "queries is inf, not a whole number"),
        ('date = "2026-11-20"', "date = 7", "provenance.date is 7, not a text"),
        ('workload = "model"', 'workload = ""', "workload is '', and a name was expected"),
        ("gpu_max_mhz = 400", "gpu_max_mhz = -1020", "gpu_max_mhz is -1020, and neither clocks"),
        ('energy_kind = "simulated"', 'energy_kind = "psychic"', "not 'psychic'"),
        ("power_w = ", "power_w = [] # ", r"power_w is \[\], not a finite number"),
        ("mean = 12.0", "mean = 12.0\nx = 1", "'x' is no statistic of a latency"),
    ],
)
def test_a_figure_or_a_text_that_is_none_is_a_bad_file(tmp_path: Path, old: str, new: str, told: str) -> None:
    """Whoever reads the profile says the same of it: `apply`, `check` and the daemon."""
    path = tmp_path / "p.toml"
    write_profile(tuned(), path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(BadFile, match=told):
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
    broken = verdict(replace(frugal, point=found.trials[2].point), found)
    assert broken == Verdict(False, "it was for limits that its point breaks now")
    elsewhere = replace(frugal, point=OperatingPoint({"gpu_max_hz": 1, "batch_size": 1}))
    assert verdict(elsewhere, found).words == "it was for other knobs or levels"
    assert not verdict(elsewhere, found).keeps
    narrowed = replace(found, problem=replace(found.problem, device=f"{found.problem.device}?knobs=gpu_max_mhz"))
    wider = replace(frugal, point=OperatingPoint({"gpu_max_hz": 1, "mem_hz": 1}))
    assert verdict(wider, narrowed).words == "it was for other knobs: gpu_max_mhz, mem_mhz"
    assert verdict(frugal, narrowed).keeps
    early = replace(frugal, provenance={})
    assert verdict(early, found).keeps
    assert verdict(replace(early, slo=()), found).words == "it was for no SLO"


def asking(*slo: str, objective: Objective = Objective.ENERGY) -> Path:
    """Return where the answer to a question goes."""
    problem = Problem(SearchSpace.unit(), tuple(map(Constraint.parse, slo)), objective=objective)
    return tuned_path("sim-orin", "resnet50", problem)


def test_each_slo_has_a_file_of_its_own(state_folder: Path) -> None:
    """In the state folder, named after device, workload and what was asked, in whatever order and unit it was."""
    folder = state_folder / "profiles" / "tuned" / "sim-orin"
    assert asking("p99<=0.025s") == folder / "resnet50@p99-25ms.toml"
    assert asking("power<=20W", "mean<=1.2x") == asking("mean<=1.2x", "power<=20W")
    assert asking() == folder / "resnet50@no-slo.toml"
    long = asking("ttft_p99<=2s for prompts>2048")
    assert long == folder / "resnet50@ttft_p99-prompts-over-2048-2000ms.toml"
    both = [asking("p99<=9ms for 64<prompts<=2048"), asking("p99<=9ms for prompts<=2048"), asking("p99<=9ms"), long]
    every = [asking("p99<=25ms"), asking("p99<=25ms", objective=Objective.EDP), asking("throughput>=30/s"), asking()]
    assert len(set(every + both)) == 8
    assert all(path.name.count("/") == 0 and " " not in path.name for path in every)


def test_a_name_finds_the_newest_profile_and_one_of_several_can_be_named(tmp_path: Path) -> None:
    """Also one in profiles/tuned of the working folder, where they used to go."""
    old, loose, tight = tmp_path / "profiles/tuned/sim-orin/resnet50.toml", asking("p99<=50ms"), asking("p99<=25ms")
    for age, path in enumerate((loose, old, tight)):
        write_profile(tuned(), path)
        os.utime(path, (age, age))
    found = [path.absolute() for path in named_profiles("sim-orin/resnet50")]
    assert found == [tight, old, loose]
    assert find_profile("sim:orin/resnet50") == tight
    for name in ("sim-orin/resnet50@p99-50ms", "sim-orin/resnet50@p99<=50ms", "sim-orin/resnet50@p99<50 ms.toml"):
        assert find_profile(name) == loose
    tight.unlink()
    assert find_profile("sim-orin/resnet50").absolute() == old


def test_a_profile_that_is_not_there_is_one_helpful_line(tmp_path: Path) -> None:
    """A name offers the nearest, a folder asks for a file in it, and where there is none yet it says what makes one."""
    with pytest.raises(UnknownName, match=r"known: none .*polythrottle tune makes profiles"):
        find_profile("nowhere.toml")
    write_profile(tuned(), asking("p99<=25ms"))
    with pytest.raises(UnknownName, match="did you mean sim-orin/resnet50"):
        find_profile("sim-orin/resnet5")
    with pytest.raises(BadFile, match="is a folder; name a profile's file"):
        find_profile(str(tmp_path))
    assert named_profiles("../resnet50") == named_profiles("a/b/c") == ()


def test_what_is_added_to_a_clock_may_lie_below_zero() -> None:
    """A point with a clock offset reads back from its file."""
    point = OperatingPoint({"gpu_offset_hz": -75_000_000, "power_limit_w": 300})
    assert levels_of(point) == {"gpu_offset_mhz": -75, "power_limit_w": 300}
    assert point_of(levels_of(point)) == point
