import errno
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from builders import measured, problem, space
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polythrottle.domain.errors import BadFile, StorageError
from polythrottle.domain.measurement import Interval
from polythrottle.domain.study import Cost, Reference, Study, Trial
from polythrottle.storage import journal as journals
from polythrottle.storage.journal import Journal, read

SAMPLES = Path(__file__).parents[1] / "data"


PYTHONS = ("NoneType", "must be real", "unexpected keyword", "of type", "not a valid", "Expecting", "recursion")
"""What Python says of such lines, and a file's user understands nothing by."""
ORDER = [space().default, *(point for point in space() if point != space().default)]


def begun(path: Path, trials: int = 3) -> Study:
    """Write a journal of some completed trials and return its study."""
    study = Study(problem("mean<=1.5x"), "bayes", 7)
    with Journal.create(path, study, {"trials": 30}) as journal:
        for number in range(trials):
            trial = Trial(number, ORDER[number])
            journal.started(trial)
            seen = measured(energy_j=1.0 + number / 3)
            journal.completed(Trial(number, trial.point, seen, cost=Cost(2.5, 25.0 + number)))
        return journal.study


def test_a_study_is_read_back_whole(tmp_path: Path) -> None:
    """Problem, method, seed, trials and references are what was written, to the last bit."""
    path = tmp_path / "a.jsonl"
    study = begun(path)
    with Journal.reopen(path) as journal:
        journal.started(Trial(3, ORDER[3]))
        journal.failed(Trial(3, ORDER[3], failure="out of memory"))
        journal.referred(Reference("15W", ORDER[6], replace(measured(), power_w=100.0, window_s=2.0)))
        kept = journal.referred(Reference("30W", ORDER[5], measured(), Cost(3.5, 35.0)))
        journal.finish("4 trials made")
    back = read(path)
    assert back.trials[:3] == study.trials
    assert back.trials[3].failure == "out of memory"
    assert back.references == kept.references
    assert back.presets_cost == Cost(2.0 + 3.5, 2.0 * 100.0 + 35.0)
    assert back.problem.fingerprint == study.problem.fingerprint
    assert (back.method, back.seed) == ("bayes", 7)
    assert list(back.problem.space) == list(space())
    assert journals.is_finished(path)


@pytest.mark.slow
def test_a_torn_last_line_is_cut(tmp_path: Path) -> None:
    """A crash while writing loses that line only, wherever it hit."""
    path = tmp_path / "a.jsonl"
    begun(path)
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(last + 1, len(whole)):
        path.write_bytes(whole[:cut])
        assert len(read(path).completed) == 2
        with Journal.reopen(path) as journal:
            assert len(journal.study.trials) == 2
        assert path.read_bytes().startswith(whole[:last])


@pytest.mark.parametrize("name", ["energy_j", "intervals", "cost"])
def test_a_number_beyond_all_that_can_be_reckoned_is_a_bad_line(tmp_path: Path, name: str) -> None:
    """JSON has whole numbers of any length."""
    path = tmp_path / "a.jsonl"
    begun(path)
    line = json.loads(path.read_bytes().splitlines()[-1])
    huge = 10**400
    line["measurement"]["energy_j"] = huge if name == "energy_j" else 1.0
    line["measurement"]["intervals"] = {"energy": [0.5, huge if name == "intervals" else 2.0]}
    line["cost"]["joules"] = huge if name == "cost" else 3.0
    path.write_bytes(b"\n".join([*path.read_bytes().splitlines()[:-1], json.dumps(line).encode(), b""]))
    with pytest.raises(BadFile, match=r"a\.jsonl line 7 is not a line of a journal: .*too large"):
        read(path)


@pytest.mark.parametrize("line", [b"{}", b"[]", b"nonsense", b'{"v":1,"event":"x","number":3}', b"",
                                  b'{"v":1,"event":"completed","number":1}', b'{"v":1,"event":"started","number":9}',
                                  b'{"v":1,"event":"study"}', b"\xff\xfe", b'{"v":1}'])  # fmt: skip
def test_any_other_bad_line_is_an_error_with_its_number(tmp_path: Path, line: bytes) -> None:
    """Nothing is skipped in silence."""
    path = tmp_path / "a.jsonl"
    begun(path)
    path.write_bytes(path.read_bytes() + line + b"\n")
    before = path.read_bytes()
    with pytest.raises(BadFile, match="line 8"):
        read(path)
    with pytest.raises(BadFile, match="line 8"):
        Journal.reopen(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("old", "new"),
    [('"number": 1', '"number": true'), ('"energy_j": 1.0', '"energy_j": true'), ('"seed": 7', '"seed": 7.5'),
     ('"temperature_c": null', '"temperature_c": "hot"'), ('"boundary": "a test"', '"boundary": 3'),
     ('"method": "bayes"', '"method": 5'), ('"batch_size": 1', '"batch_size": 77'), ('{"v": 2', '{"v": true'),
     ('{"v": 2', '{"v": 0'), ('"censored": false', '"censored": 0'), ('"seconds": 2.5', '"seconds": -2.5'),
     ('"seconds": 2.5', '"seconds": "2.5"'), ('"cost": {', '"cost": {"_": 1, "second'),
     ('"mean_s": 0.01', '"mean_s": null'), ('"energy_j": 1.0', '"energy_j": null'),
     ('"queries": null', '"queries": -4'),
     ('"window_s": null', '"window_s": -1'), ('"temperature_c": null', '"temperature_c": NaN'),
     ('"mean_s": 0.01', '"mean_s": 0.01, "x": 1'), ('"latency": {', '"latency": null, "y": {'),
     ('"energy_kind": "simulated"', '"energy_kind": "psychic"'), ('"answer": 1', '"answer": 99'),
     ('"intervals": {}', '"intervals": {"energy": [1]}'), ('"plan": {', '"plan": 3, "y": {'),
     ('"cost": {', '"cost": 3, "x": {'), ('"energy_j": 1.0', '"energy_j": ' + "[" * 100_000)],
)  # fmt: skip
def test_an_edited_journal_is_not_believed(tmp_path: Path, old: str, new: str) -> None:
    """Values of another type and points outside the space are errors with their line."""
    path = tmp_path / "a.jsonl"
    begun(path)
    with Journal.reopen(path) as journal:
        journal.finish("all budget used", 1)
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(BadFile, match="line") as caught:
        read(path)
    assert not any(words in str(caught.value) for words in PYTHONS)


def test_a_trial_that_lacks_what_has_a_limit_is_a_bad_line(tmp_path: Path) -> None:
    """The search writes such a trial as failed, so that one which is not has been edited."""
    path = tmp_path / "a.jsonl"
    with Journal.create(path, Study(problem("p99<=1s"), "bayes", 7), {}) as journal:
        journal.started(Trial(0, ORDER[0]))
        journal.completed(Trial(0, ORDER[0], measured(), cost=Cost(2.5, 25.0)))
    path.write_text(path.read_text().replace('"p99_s": 0.012', '"p99_s": null'))
    with pytest.raises(BadFile, match=r"line 3 .* has no p99, which p99<=1 s is about"):
        read(path)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    """A journal of a later version is left alone, with advice."""
    path = tmp_path / "a.jsonl"
    for version in (journals.FORMAT + 1, 99):
        path.write_text(f'{{"v": {version}, "event": "study"}}\n')
        for use in (read, journals.heading, journals.ending):
            with pytest.raises(BadFile, match=rf"format {version} is newer.*upgrade"):
                use(path)


def test_an_interrupted_trial_is_made_again(tmp_path: Path) -> None:
    """A trial that was running when the process died does not count, and the journal says that it was interrupted."""
    path = tmp_path / "a.jsonl"
    begun(path)
    with Journal.reopen(path) as journal:
        journal.started(Trial(3, ORDER[3]))
    with Journal.reopen(path) as journal:
        assert len(journal.study.trials) == 3
    assert '"interrupted"' in path.read_text().splitlines()[-1]


def test_a_trial_that_always_kills_is_given_up(tmp_path: Path) -> None:
    """After three interruptions the trial is failed, so that the study can end."""
    path = tmp_path / "a.jsonl"
    begun(path)
    for _ in range(journals.ATTEMPTS):
        with Journal.reopen(path) as journal:
            journal.started(Trial(3, ORDER[3]))
    with Journal.reopen(path) as journal:
        assert journal.study.trials[3].failure == "interrupted 3 times"


def test_two_writers_are_refused(tmp_path: Path) -> None:
    """One journal has one writer."""
    path = tmp_path / "a.jsonl"
    begun(path)
    with Journal.reopen(path), pytest.raises(StorageError, match="another polythrottle process"):
        Journal.reopen(path)


def test_a_foreign_file_is_never_overwritten(tmp_path: Path) -> None:
    """A file that is no journal stays as it is, even one without a line feed."""
    path = tmp_path / "notes.txt"
    path.write_text("buy milk")
    with pytest.raises(BadFile, match="not a journal"):
        Journal.create(path, Study(problem()), {})
    assert path.read_text() == "buy milk"


@pytest.mark.parametrize("plan", [None, ["trials", 30]])
def test_a_first_line_without_a_plan_is_a_bad_one_however_it_is_read(tmp_path: Path, plan: object) -> None:
    """By itself, as a report reads it, it says the same as with the whole study."""
    path = tmp_path / "a.jsonl"
    begun(path)
    first, *others = path.read_text().splitlines()
    line = {**json.loads(first), "plan": plan}
    if plan is None:
        del line["plan"]
    path.write_text("\n".join([json.dumps(line), *others, ""]))
    said = []
    for read_it in (read, journals.heading):
        with pytest.raises(BadFile, match=r"line 1 is not a line of a journal: .*plan") as bad:
            read_it(path)
        said.append(str(bad.value))
    assert said[0] == said[1]


def test_a_torn_first_line_starts_anew(tmp_path: Path) -> None:
    """A study killed while its first line was written leaves nothing worth keeping."""
    path = tmp_path / "a.jsonl"
    begun(path)
    whole = path.read_bytes()
    earlier = (SAMPLES / "journal-v1.jsonl").read_bytes()
    for torn in (whole[:0], whole[:1], whole[:9], whole[:40], earlier[:9], earlier[:40]):
        path.write_bytes(torn)
        assert not journals.holds_study(path)
        with Journal.create(path, Study(problem()), {}) as journal:
            assert journal.study.trials == ()
        path.unlink()


def test_a_read_only_folder_is_one_clear_error(tmp_path: Path) -> None:
    """A place that cannot be written says so."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="cannot be written"):
        Journal.create(tmp_path / "file" / "a.jsonl", Study(problem()), {})


def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that does not fit is cut off again, said so, and the study goes on once there is room."""
    path = tmp_path / "a.jsonl"
    begun(path)
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Journal.reopen(path) as journal:
        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", full)
            with pytest.raises(StorageError, match="No space left"):
                journal.started(Trial(3, ORDER[3]))
        assert path.read_bytes() == before
    with Journal.reopen(path) as journal:
        assert len(journal.started(Trial(3, ORDER[3])).trials) == 4


@pytest.mark.parametrize("path", [Path("/dev/zero"), Path("/dev/full"), Path("/tmp")])
def test_what_is_no_regular_file_is_refused(path: Path) -> None:
    """A device or folder is no journal, and reading one could never end."""
    for use in (read, Journal.reopen, journals.holds_study):
        with pytest.raises(BadFile, match="regular file"):
            use(path)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(place=st.integers(0, 3000), byte=st.integers(0, 255))
def test_a_flipped_byte_never_passes_for_another_study(tmp_path: Path, place: int, byte: int) -> None:
    """Damage is an error or leaves the trials as they were; never a traceback."""
    path = tmp_path / "a.jsonl"
    path.unlink(missing_ok=True)
    begun(path)
    data = bytearray(path.read_bytes())
    data[place % len(data)] = byte
    path.write_bytes(data)
    try:
        study = read(path)
    except BadFile:
        return
    assert len(study.trials) <= 3


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("journal-v*.jsonl")), ids=lambda path: path.stem)
def test_every_format_ever_written_is_read(path: Path) -> None:
    """A journal of an earlier version still resumes."""
    study = read(path)
    assert study.best is not None
    assert json.loads(path.read_text().splitlines()[0])["v"] == int(path.stem.split("-")[1].removeprefix("v"))


def test_intervals_of_the_present_format_are_read() -> None:
    """With ends that were not known, idle power, how many requests it took, and what only some workloads have."""
    study = read(SAMPLES / f"journal-v{journals.FORMAT}-intervals.jsonl")
    seen = study.trials[3].measurement
    assert seen is not None
    assert seen.intervals["energy"] == Interval(0.8415, 0.8584999999999999)
    assert seen.intervals["p99"] == Interval(0.0115, math.inf)
    assert (seen.idle_power_w, seen.requests, seen.extras["tokens_per_j"]) == (2.5, 1103, 64.0)
    assert study.saving is not None


def test_there_is_a_sample_of_the_present_format() -> None:
    """The sample of each format is made when the format is."""
    assert (SAMPLES / f"journal-v{journals.FORMAT}.jsonl").exists()


def test_an_earlier_journal_goes_on_in_the_present_format(tmp_path: Path) -> None:
    """Its trials cost nothing that is known; what is added says what it cost."""
    path = tmp_path / "a.jsonl"
    path.write_bytes((SAMPLES / "journal-v1.jsonl").read_bytes())
    before = read(path)
    assert before.cost == Cost()
    with Journal.reopen(path) as journal:
        number = len(journal.study.trials)
        journal.started(Trial(number, ORDER[number]))
        journal.completed(Trial(number, ORDER[number], measured(censored=True), cost=Cost(1.5, 3.0)))
    after = read(path)
    assert after.trials[:number] == before.trials
    assert after.cost == Cost(1.5, 3.0)
    assert len(after.stopped_early) == 1


def test_a_heading_says_what_a_journal_is_about(tmp_path: Path) -> None:
    """The first line is enough to tell; a file that is no journal has none."""
    path = tmp_path / "a.jsonl"
    begun(path)
    assert journals.heading(path)["workload"] == "model"
    assert journals.ending(path) is None
    for text in ("buy milk", "[]", "{}", '{"v": 1, "event": "started"}', "\udcff", "[" * 100_000):
        path.write_text(text + "\n", encoding="utf-8", errors="surrogateescape")
        with pytest.raises(BadFile, match="line 1"):
            journals.heading(path)


def test_the_point_that_was_chosen_is_kept(tmp_path: Path) -> None:
    """A search may choose another trial than the one whose figure is best; a later trial opens that again."""
    path = tmp_path / "a.jsonl"
    assert begun(path).best == begun(tmp_path / "b.jsonl").trials[0]
    with Journal.reopen(path) as journal:
        journal.finish("nothing more to gain", 2)
        assert journal.study.best == journal.study.trials[2]
    back = read(path)
    assert back.answer == 2
    assert back.best == back.trials[2]
    with Journal.reopen(path) as journal:
        journal.started(Trial(3, ORDER[3]))
        journal.completed(Trial(3, ORDER[3], measured(energy_j=9.0), cost=Cost(1.0, 1.0)))
    assert read(path).answer is None
    assert read(path).best == back.trials[0]


def test_a_chosen_point_that_does_not_hold_is_not_the_answer(tmp_path: Path) -> None:
    """What was chosen must have held every limit in its own window."""
    path = tmp_path / "a.jsonl"
    begun(path)
    with Journal.reopen(path) as journal:
        journal.started(Trial(3, ORDER[3]))
        journal.completed(Trial(3, ORDER[3], measured(latency_s=9.0, energy_j=0.1), cost=Cost(1.0, 1.0)))
        journal.finish("all budget used", 3)
        assert journal.study.best == journal.study.trials[0]
