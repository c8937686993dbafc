import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest
from builders import ROWS, measured, problem, space

from polythrottle.domain.errors import BadFile, InvalidInput
from polythrottle.domain.problem import Problem
from polythrottle.domain.space import Knob, SearchSpace
from polythrottle.domain.study import Study, Trial
from polythrottle.storage.journal import Journal
from polythrottle.tuning.study_store import LEAST_TRIALS, MOST, lesson, named, recalled, stored

HERE = replace(problem("mean<=2x"), device="sim:board", workload="net", content={"model": "abc", "board": "xyz"})
ORDER = [space().default, *(point for point in space() if point != space().default)]


def begun(path: Path, trials: int = 4, **about: object) -> Path:
    """Write the journal of a study of HERE, or of something else, and return its path."""
    with Journal.create(path, Study(replace(HERE, **about)), {}) as journal:  # type: ignore[arg-type]
        grown(journal, trials)
    return path


def grown(journal: Journal, trials: int) -> None:
    """Add completed trials to a journal."""
    for number in range(len(journal.study.trials), len(journal.study.trials) + trials):
        journal.started(Trial(number, ORDER[number]))
        journal.completed(Trial(number, ORDER[number], measured()))


@pytest.mark.parametrize(
    ("about", "related"),
    [({}, True), ({"device": "sim:board?seed=3", "workload": "other"}, True), ({"device": "sim:other"}, True),
     ({"device": "sim:other", "workload": "./net.toml"}, True), ({"device": "copy.toml", "workload": "x"}, True),
     ({"device": "sim:other", "workload": "x", "content": {}}, False), ({"device": "sim:boar", "content": {}}, True),
     ({"device": "", "workload": "", "content": {}}, False)],
)  # fmt: skip
def test_the_store_knows_what_is_related(tmp_path: Path, about: dict[str, object], related: bool) -> None:
    """The same device under any options, the same workload, by their words or by what their files hold."""
    begun(tmp_path / "a" / "b" / "x.jsonl", **about)
    assert len(stored(tmp_path, HERE).lessons) == related


def test_the_store_gives_the_nearest_and_newest(tmp_path: Path) -> None:
    """Studies of both device and workload come first, then the newest; at most a dozen."""
    for age in range(MOST + 3):
        path = begun(tmp_path / f"{age:02}.jsonl", workload="net" if age == MOST + 2 else "other", content={})
        os.utime(path, (1e9 - age, 1e9 - age))
    found = [one.path.stem for one in stored(tmp_path, HERE).lessons]
    assert found == [f"{MOST + 2}", *(f"{age:02}" for age in range(MOST - 1))]


def test_what_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    """Foreign files and damaged journals are counted; short studies do not count at all; no store is no error."""
    begun(tmp_path / "short.jsonl", LEAST_TRIALS - 1)
    begun(tmp_path / "good.jsonl")
    (tmp_path / "foreign.jsonl").write_text("buy milk\n")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "folder.jsonl").mkdir()
    damaged = begun(tmp_path / "damaged.jsonl")
    damaged.write_text(damaged.read_text().replace('"number": 2', '"number": 7'))
    past = stored(tmp_path, HERE)
    assert [one.path.name for one in past.lessons] == ["good.jsonl"]
    assert list(past.words(HERE, "; x")) == [
        "learning from 1 earlier study (net) on this device; x",
        "3 files skipped: no study can be read from there",
    ]
    assert stored(tmp_path / "none", HERE).lessons == ()


def test_a_table_is_a_study_of_every_row(tmp_path: Path) -> None:
    """Each row is a completed trial, the default first."""
    (tmp_path / "t.csv").write_text(ROWS)
    study = named([tmp_path / "t.csv"], HERE).studies[0]
    assert len(study.completed) == len(study.problem.space) == 4
    assert study.trials[0].point == study.problem.space.default
    assert study.default is not None


def test_folders_and_files_can_be_named_together(tmp_path: Path) -> None:
    """What is found twice counts once, and unrelated studies are welcome when they are named."""
    (tmp_path / "t.csv").write_text(ROWS)
    file = begun(tmp_path / "deep" / "a.jsonl", device="sim:z", workload="y", content={})
    (tmp_path / "notes.csv").write_text("buy milk")
    past = named([tmp_path, file], HERE)
    assert [one.path.name for one in past.lessons] == ["a.jsonl", "t.csv"]
    assert (past.found, past.skipped) == (2, 1)
    assert "(y, t)" in next(past.words(HERE))


def test_too_many_named_studies_are_the_nearest(tmp_path: Path) -> None:
    """The line says how many there were."""
    for number in range(MOST + 2):
        begun(tmp_path / f"{number}.jsonl", device="sim:z", workload=f"w{number}", content={})
    begun(tmp_path / "z.jsonl")
    past = named([tmp_path], HERE)
    assert past.lessons[0].path.name == "z.jsonl"
    assert f"learning from {MOST} of {MOST + 3} earlier studies (net, " in next(past.words(HERE))


def test_a_study_without_a_common_knob_is_left_out_and_said_to_be(tmp_path: Path) -> None:
    """Whether named or in the store, there is nothing to learn from it; a knob of another name may mean the same."""
    strange = SearchSpace.grid((Knob("fan_w", (1, 2, 4, 8)),), {"fan_w": 8})
    path = tmp_path / "fan.jsonl"
    with Journal.create(path, Study(replace(HERE, space=strange)), {}) as journal:
        for number, point in enumerate([strange.default, *list(strange)[:3]]):
            journal.started(Trial(number, point))
            journal.completed(Trial(number, point, measured()))
    assert stored(tmp_path, HERE).lessons == ()
    (tmp_path / "t.csv").write_text(ROWS)
    for paths, learnt in (([path], 0), ([path, tmp_path / "t.csv"], 1)):
        past = named(paths, HERE)
        assert (len(past.lessons), past.found) == (learnt, learnt)
        assert list(past.words(HERE))[-1] == "left out fan.jsonl: no knob there is one of gpu_max_hz, batch_size"


@pytest.mark.parametrize(
    ("name", "error", "told"),
    [("none.jsonl", BadFile, "there is no"), ("notes.txt", BadFile, "line 1"), ("bad.csv", BadFile, "no column"),
     ("empty", BadFile, "holds no journal"), ("short.jsonl", InvalidInput, "2 completed trials")],
)  # fmt: skip
def test_what_is_named_has_to_be_readable(tmp_path: Path, name: str, error: type[Exception], told: str) -> None:
    """One line that says which file and why."""
    (tmp_path / "notes.txt").write_text("buy milk\n")
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    (tmp_path / "empty").mkdir()
    begun(tmp_path / "short.jsonl", 2)
    with pytest.raises(error, match=told):
        named([tmp_path / name], HERE)


def test_a_device_is_no_history() -> None:
    """Reading it could never end."""
    with pytest.raises(BadFile, match="regular file"):
        named([Path("/dev/zero")], HERE)


def test_what_was_learnt_from_is_found_again(tmp_path: Path) -> None:
    """A journal that has grown is read as far as it went, its torn or running end left out."""
    path = begun(tmp_path / "a.jsonl")
    with Journal.reopen(path) as journal:
        journal.started(Trial(4, ORDER[4]))
        before = lesson(path)
    assert len(before.study.trials) == 4
    assert before.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    with Journal.reopen(path) as journal:
        grown(journal, 3)
        journal.finish("7 trials made")
    again = recalled([before.line()])
    assert again.studies[0].trials == before.study.trials
    assert (again.lost, lesson(path).line()["trials"]) == (0, 7)


def test_what_changed_or_went_is_lost(tmp_path: Path) -> None:
    """The others remain, and a line says so."""
    (tmp_path / "t.csv").write_text(ROWS)
    paths = [begun(tmp_path / "a.jsonl"), begun(tmp_path / "b.jsonl"), begun(tmp_path / "c.jsonl"), tmp_path / "t.csv"]
    lines = [one.line() for one in named(paths, HERE).lessons]
    paths[0].unlink()
    paths[1].write_text(paths[1].read_text().replace("sim:board", "sim:bored"))
    paths[3].write_text(ROWS + "900,4,9,9,9,9\n")
    past = recalled(lines)
    assert [one.path.name for one in past.lessons] == ["c.jsonl"]
    assert past.lost == 3
    assert "3 of the studies learnt from before changed or went" in list(past.words(HERE))[-1]


def test_where_the_studies_are_from_is_said() -> None:
    """This device, this workload elsewhere, or neither."""
    from polythrottle.tuning.study_store import PriorStudies, PriorStudy

    def words(*abouts: dict[str, object]) -> str:
        studies = [Study(Problem(**{**vars(HERE), **about})) for about in abouts]  # type: ignore[arg-type]
        return next(PriorStudies(tuple(PriorStudy(Path("a"), 1, "", one) for one in studies)).words(HERE))

    assert words({}, {"device": "sim:board?seed=1"}).endswith(" on this device")
    assert words({"device": "sim:b"}, {}).endswith(" on other devices") is False
    assert words({"device": "sim:b"}).endswith(" on other devices")
    assert words({"device": "sim:b", "workload": "x"}).endswith("(x)")
