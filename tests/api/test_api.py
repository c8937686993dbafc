import json
from pathlib import Path

import pytest
from builders import ROWS

import polythrottle
from polythrottle.api import search
from polythrottle.api.experiments import NoProgress
from polythrottle.api.tuning_result import find_study
from polythrottle.catalog.tuned_profiles import read_profile
from polythrottle.domain.errors import BadFile, InvalidInput, PolythrottleError, TrialError, UnknownName
from polythrottle.domain.measurement import EnergyKind, Window
from polythrottle.domain.study import Study
from polythrottle.optimize import ConstrainedBayes
from polythrottle.storage.identity import content_digest
from polythrottle.storage.journal import read
from polythrottle.storage.paths import state_dir
from polythrottle.tuning.setup import Setup, slug

ORIN = {"device": "sim:jetson-agx-orin", "workload": "efficientnet-b4", "slo": ["p99<=1.3x"]}


@pytest.fixture
def table(tmp_path: Path) -> str:
    """Return the URI of a small recorded table."""
    (tmp_path / "t.csv").write_text(ROWS)
    return "replay:t.csv"


def same(one: Study, two: Study) -> bool:
    """Return whether two studies made the same trials, to the last bit."""
    return one.trials == two.trials and one.problem.fingerprint == two.problem.fingerprint


@pytest.mark.slow
def test_tuning_ends_in_a_profile_with_its_evidence(table: str) -> None:
    """Point, measurement, default, SLO and provenance are in the file, and the saving is that of the study."""
    tuning = polythrottle.tune(table, slo="mean<=2x", trials=4)
    assert tuning.profile is not None
    folder = f"replay-t-{content_digest(Path('t.csv'))[:8]}"
    assert tuning.profile_path == state_dir() / "profiles/tuned" / folder / "recorded@mean-2x.toml"
    profile = read_profile(tuning.profile_path)
    assert dict(profile.point) == {"gpu_freq_hz": 600_000_000, "batch_size": 1}
    assert profile.saving_fraction == pytest.approx(1 - 0.1 / 0.12)
    assert profile.slo == ("mean<=20 ms",)
    assert profile.provenance["trials"] == 4
    assert tuning.report_path.read_text().startswith("<!doctype html>")


@pytest.mark.timeout(1200)  # eleven studies, one after the other
@pytest.mark.slow
@pytest.mark.parametrize("method", ["bayes", "grid", "random"])
def test_a_study_cut_anywhere_ends_like_one_that_was_not(tmp_path: Path, method: str) -> None:
    """Whatever prefix of the journal a kill leaves, the resumed study makes the same trials."""
    trials = 3 if method == "random" else 5
    words = {**ORIN, "trials": trials, "method": method, "presets": False, "early_stop": False}
    whole = search.tune(**words, journal=tmp_path / "whole.jsonl")
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == 2 * trials + 2
    for kept in range(1, len(lines)):
        cut = tmp_path / f"cut-{kept}.jsonl"
        cut.write_bytes(b"".join(lines[:kept]) + lines[kept][: kept % 7])
        # One trial more than have ended, so that all of them together are every trial after every prefix.
        made = trials if kept == trials else min((kept - 1) // 2 + 1, trials)
        resumed = search.tune(**{**words, "trials": made}, journal=cut)
        assert resumed.study.problem.fingerprint == whole.study.problem.fingerprint
        assert resumed.study.trials == whole.study.trials[:made]
        assert same(read(cut), resumed.study)


@pytest.mark.slow
def test_a_study_resumes_from_its_journal_alone(tmp_path: Path) -> None:
    """Device, workload, SLO, method, seed and number of trials all come from the file."""
    words = {**ORIN, "method": "random", "trials": 5, "seed": 3, "presets": False}
    whole = search.tune(**words, journal=tmp_path / "whole.jsonl")
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "cut.jsonl").write_bytes(b"".join(lines[:4]))
    assert same(search.resume(tmp_path / "cut.jsonl").study, whole.study)


@pytest.mark.slow
def test_more_trials_extend_a_study(tmp_path: Path) -> None:
    """A finished study goes on when more is asked, and its first trials stay."""
    path = tmp_path / "a.jsonl"
    words = {**ORIN, "method": "random", "journal": path, "presets": False}
    short, longer = search.tune(**words, trials=3), search.tune(**words, trials=5)
    assert longer.study.trials[:3] == short.study.trials
    assert len(longer.study.trials) == 5


def test_a_finished_study_is_not_continued_by_default(table: str) -> None:
    """Asking again measures again, into a new journal; the old one stays."""
    first, second = search.tune(table, trials=3), search.tune(table, trials=3)
    assert first.journal_path != second.journal_path
    assert first.journal_path.exists()


@pytest.mark.slow
def test_a_study_with_history_and_risk_cut_anywhere_ends_the_same(tmp_path: Path, state_folder: Path) -> None:
    """What was learnt from is found again, even where it has grown since, and new studies change nothing."""
    other = {**ORIN, "workload": "efficientnet-b0", "presets": False, "early_stop": False}
    search.tune(**other, trials=4)
    words = {**ORIN, "trials": 5, "risk": 0.2, "presets": False, "early_stop": False}
    whole = search.tune(**words, journal=tmp_path / "whole.jsonl")
    assert [lesson.study.problem.workload for lesson in whole.history] == ["efficientnet-b0"]
    search.tune(**other, trials=6, journal=whole.history[0].path)
    search.tune(**other, trials=5, seed=1)
    lines = (tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    for kept in range(1, len(lines)):
        cut = tmp_path / f"cut-{kept}.jsonl"
        cut.write_bytes(b"".join(lines[:kept]) + lines[kept][: kept % 7])
        made = 5 if kept == 5 else min((kept - 1) // 2 + 1, 5)
        asked = {**words, "trials": made}
        resumed = search.resume(cut, trials=made) if kept % 2 else search.tune(**asked, journal=cut)
        assert resumed.study.problem.fingerprint == whole.study.problem.fingerprint
        assert resumed.study.trials == whole.study.trials[:made]
        assert [lesson.line() for lesson in resumed.history] == [lesson.line() for lesson in whole.history]


class Listener(NoProgress):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def told(self, text: str) -> None:
        """Keep a line."""
        self.lines.append(text)


@pytest.mark.slow
def test_the_local_store_is_learnt_from_and_says_so() -> None:
    """By default, on the same device or workload; not at all if nobody wants it, and never for a table."""
    board = {**ORIN, "presets": False, "trials": 3}
    search.tune(**board)
    for change, learnt in (({"seed": 1}, 1), ({"history": []}, 0), ({"method": "grid"}, 0), ({"slo": "p99<=2x"}, 4)):
        listener = Listener()
        assert len(search.tune(**{**board, **change}, watcher=listener).history) == learnt
        assert len(listener.lines) == bool(learnt)
        assert all("--no-history starts afresh" in line for line in listener.lines)


@pytest.mark.slow
def test_a_table_learns_only_from_what_is_named(tmp_path: Path, table: str) -> None:
    """Replaying one gives the same trials whatever is in the store."""
    first = search.tune(table, slo="mean<=2x", trials=4)
    second = search.tune(table, slo="mean<=2x", trials=4)
    assert second.history == ()
    assert second.study.trials == first.study.trials
    named = search.tune(table, slo="mean<=2x", trials=4, history=first.journal_path)
    assert [lesson.path for lesson in named.history] == [first.journal_path]


@pytest.mark.slow
def test_history_that_went_is_done_without(tmp_path: Path) -> None:
    """A study goes on, and says that it may differ."""
    early = search.tune(**ORIN, trials=3, presets=False)
    path, listener = tmp_path / "a.jsonl", Listener()
    assert len(search.tune(**ORIN, trials=2, seed=1, presets=False, journal=path).history) == 1
    early.journal_path.unlink()
    assert len(search.resume(path, trials=3, watcher=listener).study.trials) == 3
    assert "may differ" in listener.lines[-1]


@pytest.mark.slow
def test_an_early_journal_has_neither_risk_nor_history(tmp_path: Path, table: str) -> None:
    """A plan of an earlier version goes on as it was begun: without history, and without stopping early."""
    path = tmp_path / "a.jsonl"
    search.tune(table, trials=2, journal=path)
    head, *rest = path.read_text().splitlines(keepends=True)
    line = json.loads(head)
    line["plan"] = {name: line["plan"][name] for name in ("trials", "presets", "out", "setup")}
    path.write_text("".join([json.dumps(line) + "\n", *rest]))
    assert len(search.tune(table, trials=3, journal=path).study.trials) == 3
    assert len(search.resume(path, trials=4).study.trials) == 4


@pytest.mark.parametrize(
    "change", [{"trials": "x"}, {"risk": "x"}, {"risk": 7}, {"history": "x"}, {"history": [1]}, {"lessons": [1]},
               {"lessons": [{}]}, {"horizon_s": -1.0}, {"duration_s": 0}, {"energy_j": "1"}, {"setup": {"device": 5}},
               {"lessons": [{"path": 1, "sha256": "", "bytes": 1, "trials": 1}]},
               {"out": 5}, {"early": "x", "horizon_s": "1"}],
)  # fmt: skip
def test_a_plan_that_is_not_one_is_refused(tmp_path: Path, table: str, change: dict[str, object]) -> None:
    """An edited journal is an error in one line."""
    path = tmp_path / "a.jsonl"
    search.tune(table, trials=2, journal=path)
    head, *rest = path.read_text().splitlines(keepends=True)
    line = json.loads(head)
    line["plan"] |= change
    path.write_text("".join([json.dumps(line) + "\n", *rest]))
    with pytest.raises((BadFile, InvalidInput)) as caught:
        search.resume(path)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_study_of_another_risk_or_history_is_another_study(tmp_path: Path) -> None:
    """As with the seed: by default each has a journal of its own, and a given one is refused."""
    path, board = tmp_path / "a.jsonl", {**ORIN, "trials": 2, "presets": False}
    begun = search.tune(**board, journal=path)
    search.tune(**{**board, "trials": 3}, journal=path)
    for change, told in (({"risk": 0.1}, "its risk is the default, not 0.1"), ({"history": []}, "its history is")):
        with pytest.raises(BadFile, match=f"another problem.*{told}"):
            search.tune(**board, **change, journal=path)  # type: ignore[arg-type]
    names = {search.tune(**board, **change).journal_path.name for change in ({}, {"risk": 0.1}, {"history": []})}
    assert len({name.rpartition("-")[0] for name in names}) == 3
    assert begun.journal_path == path


def test_every_budget_ends_a_study(tmp_path: Path, table: str) -> None:
    """Minutes and joules are those of serving a thousand items where time was only recorded; more extends them."""
    path = tmp_path / "a.jsonl"
    short = search.tune(table, trials=9, joules=100, journal=path)
    assert (len(short.study.trials), short.ended) == (1, "100 J used")
    assert short.study.cost.energy_j == pytest.approx(120.0)
    longer = search.resume(path, joules=150)
    assert (len(longer.study.trials), longer.ended) == (2, "150 J used")
    timed = search.tune(table, trials=9, minutes=1e-6)
    assert (len(timed.study.trials), timed.ended) == (1, "6e-05 seconds used")


@pytest.mark.slow
def test_a_horizon_too_short_for_a_single_trial_ends_at_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that foresees what is left is asked; a longer horizon goes on."""
    monkeypatch.setattr(ConstrainedBayes, "saving_left", lambda self, study: 1e-3, raising=False)
    short = search.tune(**ORIN, trials=3, horizon="1m", presets=False)
    assert len(short.study.trials) == 1
    assert "within 1 minute one more trial would save" in (short.ended or "")
    assert len(search.tune(**ORIN, trials=3, horizon="52w", presets=False).study.trials) == 3


@pytest.mark.slow
def test_a_study_ends_early_unless_it_shall_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing left for two trials in a row ends it at the sixth."""
    monkeypatch.setattr(ConstrainedBayes, "saving_left", lambda self, study: 0.0, raising=False)
    early = search.tune(**ORIN, trials=8, presets=False)
    assert (len(early.study.trials), (early.ended or "")[:20]) == (6, "nothing more to gain")
    assert len(search.tune(**ORIN, trials=8, presets=False, early_stop=False).study.trials) == 8


def test_relative_energy_has_no_joules_to_bound(tmp_path: Path) -> None:
    """A budget in an unknown unit is refused before anything runs."""
    (tmp_path / "t.csv").write_text("f,latency_s,energy_j,energy_kind\n1,2,3,relative\n2,1,4,relative\n")
    with pytest.raises(InvalidInput, match="only relative"):
        search.tune("replay:t.csv", joules=5)


def test_another_problems_journal_is_refused(tmp_path: Path, table: str) -> None:
    """The message says what differs, and the journal stays as it was."""
    path = tmp_path / "a.jsonl"
    search.tune(table, slo="mean<=2x", trials=2, journal=path)
    before = path.read_bytes()
    for change, told in (({"slo": "mean<=3x"}, "SLO"), ({"seed": 5}, "seed"), ({"method": "grid"}, "method")):
        with pytest.raises(BadFile, match=f"another problem.*{told}"):
            search.tune(table, **{"slo": "mean<=2x", "trials": 2, "journal": path, **change})  # type: ignore[arg-type]
    assert path.read_bytes() == before


def test_a_table_that_changed_is_another_problem(tmp_path: Path, table: str) -> None:
    """A study is never continued on other contents under the same name."""
    path = tmp_path / "a.jsonl"
    search.tune(table, trials=2, journal=path)
    (tmp_path / "t.csv").write_text(ROWS.replace("0.1\n", "0.11\n"))
    with pytest.raises(BadFile, match="its table has changed"):
        search.tune(table, trials=4, journal=path)
    with pytest.raises(BadFile, match="its table has changed"):
        search.resume(path)


def test_a_mended_workload_starts_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A study whose default point failed is over; the same words make a new one once the fault is gone."""
    script = tmp_path / "serve.sh"
    script.write_text("exit 1")
    setup = Setup("cpu", f"cmd:sh {script}", queries=3, seconds=0.0)
    with pytest.raises(TrialError, match="default point"):
        search.tune(setup=setup, slo="mean<=50x", trials=1)
    script.write_text("exit 0")
    assert search.tune(setup=setup, slo="mean<=50x", trials=1).profile is not None


@pytest.mark.slow
def test_presets_do_not_reopen_a_finished_study() -> None:
    """The third time of asking is as fresh as the second."""
    paths = {search.tune(**ORIN, trials=1).journal_path for _ in range(3)}
    assert len(paths) == 3


def test_an_slo_nothing_meets_says_what_came_closest(table: str) -> None:
    """No profile is made, the study is kept."""
    tuning = search.tune(table, slo="mean<=0.5x", trials=30, early_stop=False)
    assert tuning.profile is None
    assert tuning.profile_path is None
    assert tuning.unmet is not None
    assert "misses mean<=5 ms by 100.0%" in tuning.unmet
    assert len(read(tuning.journal_path).trials) == 4
    # The default point is the fastest here: by physics no other can meet it, and none is tried.
    ended = search.tune(table, slo="mean<=0.5x", trials=30, seed=1)
    assert len(read(ended.journal_path).trials) == 1


def test_a_table_without_the_metric_says_so(tmp_path: Path) -> None:
    """An SLO on what was never recorded is refused before anything runs."""
    (tmp_path / "t.csv").write_text("f,latency_s,energy_j\n1,2,3\n2,1,4\n")
    with pytest.raises(InvalidInput, match="records no p99"):
        search.tune("replay:t.csv", slo="p99<=1s")


@pytest.mark.slow
def test_one_point_and_short_budgets_are_enough(tmp_path: Path) -> None:
    """A space of one point, and fewer trials than any start design, both end in a profile."""
    (tmp_path / "t.csv").write_text("f,latency_s,energy_j\n1,2,3\n")
    assert search.tune("replay:t.csv", slo="mean<=2x").profile is not None
    assert search.tune(**ORIN, trials=1, presets=False).profile is not None
    with pytest.raises(InvalidInput, match="at least 1 trial"):
        search.tune(**ORIN, trials=0)


@pytest.mark.slow
def test_simulated_energy_is_called_simulated() -> None:
    """The kind of the joules goes from the device into the profile."""
    tuning = search.tune(**ORIN, trials=2)
    assert tuning.profile is not None
    assert tuning.profile.measurement.energy_kind is EnergyKind.SIMULATED
    assert "Energy is simulated" in tuning.profile_path.read_text()  # type: ignore[union-attr]
    assert [preset.name for preset in tuning.study.references][:1] == ["MAXN"]


def test_one_point_can_be_measured() -> None:
    """Named knobs are set, the others stay at their default."""
    point, measured = search.measure("sim:jetson-agx-orin", "resnet50", {"batch_size": 4}, window=Window(queries=20))
    assert point["batch_size"] == 4
    assert point["gpu_max_hz"] == 1_300_500_000
    assert measured.energy_j > 0


@pytest.mark.parametrize(
    ("levels", "error", "told"),
    [({"gpu_max_mz": 1}, UnknownName, "gpu_max_mhz"), ({"batch_size": 3}, InvalidInput, "nearest are 2, 4"),
     ({"gpu_min_hz": 1_300_500_000, "gpu_max_hz": 114_750_000}, InvalidInput, "depend on each other")],
)  # fmt: skip
def test_a_point_that_cannot_be_is_refused(
    levels: dict[str, int | float | str], error: type[PolythrottleError], told: str
) -> None:
    """Unknown knobs, levels and combinations are named."""
    with pytest.raises(error, match=told):
        search.measure("sim:jetson-agx-orin", "resnet50", levels)


@pytest.mark.parametrize(
    ("setup", "told"),
    [(Setup("replay:t.csv", "resnet50"), "brings its own"), (Setup("sim:jetson-nano"), "--workload"),
     (Setup("sim:jetson-nano", "model.onnx"), "--device cpu"), (Setup("cpu", "resnet50"), "simulated boards"),
     (Setup("sim:jetson-nano", "resnet51"), "resnet50"), (Setup("sim:jetson-nan", "resnet50"), "jetson-nano"),
     (Setup("sim:", "resnet50"), "name of a board"), (Setup("gpu:0", "resnet50"), "unknown device"),
     (Setup("sim:jetson-nano?sed=3", "resnet50"), "seed"), (Setup("sim:v100?seed=x", "resnet50"), "whole number"),
     (Setup("sim:jetson-nano?noise=x", "resnet50"), "not a number"), (Setup("nvml:MIG-1", "resnet50"), "split by MIG"),
     (Setup("sim:jetson-nano", "resnet50", knobs=("gpu_mx_hz",)), "gpu_max_mhz"), (Setup("cpu"), "--workload"),
     (Setup("replay:t.csv", knobs=("f",)), "unknown knob"), (Setup("cpu:0", "m:f"), "takes no name")],
)  # fmt: skip
def test_a_setup_that_cannot_be_opened_says_what_would_do(table: str, setup: Setup, told: str) -> None:
    """One line, with the nearest name or the right form."""
    with pytest.raises(PolythrottleError, match=told) as caught:
        setup.open()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("uri", "name"),
    [("sim:jetson-nano?seed=7", "sim-jetson-nano"), ("models/my net.onnx", "my-net"), ("net.pt", "net"),
     ("pkg.mod:f", "pkg.mod-f"), ("replay:../a/b.csv.gz?noise=0.1", "replay-b"), ("cpu", "cpu"), ("///", "unnamed")],
)  # fmt: skip
def test_files_are_named_after_what_they_are_about(uri: str, name: str) -> None:
    """Short, and safe as a file name."""
    assert slug(uri) == name


def test_commands_with_other_words_get_other_names() -> None:
    """Two commands of one program do not share a profile."""
    assert slug("cmd:./run a") != slug("cmd:./run b")


@pytest.mark.parametrize("name", ["a@b/c", "@/c"])
def test_a_name_with_its_slo_before_the_slash_is_no_studys(name: str) -> None:
    """It is taken for a path, which reading then says is not there."""
    assert find_study(name) == Path(name)


def test_a_journal_is_read_as_the_study_it_holds(table: str) -> None:
    """What tune kept comes back; the tuning itself shows the study and where its files are."""
    tuning = polythrottle.tune(table, slo="mean<=2x", trials=2)
    assert same(polythrottle.read_journal(str(tuning.journal_path)), tuning.study)
    assert repr(tuning).startswith("<Tuning: <Study of recorded on replay:")
    assert str(tuning.profile_path) in tuning._repr_html_()
    with pytest.raises(BadFile, match="nowhere"):
        polythrottle.read_journal("nowhere.jsonl")
