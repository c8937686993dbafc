"""Boards of one kind that search together: told apart, each limit kept on the slowest, put back whatever happens."""

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from builders import Listed, measured, problem

from polythrottle import explain, read_journal
from polythrottle.api.tuning_result import read_study
from polythrottle.backends.simulated import SimulatedDevice
from polythrottle.catalog import load_board, load_model
from polythrottle.catalog.tuned_profiles import read_profile
from polythrottle.cli.commands import run
from polythrottle.cli.render.documents import trial_document
from polythrottle.domain.errors import DeviceError, TrialError
from polythrottle.domain.measurement import EnergyKind, Interval, Latency, Measurement
from polythrottle.domain.problem import Constraint, Problem
from polythrottle.domain.space import OperatingPoint
from polythrottle.domain.study import Study, Trial, TrialState
from polythrottle.optimize import make_optimizer
from polythrottle.report.page import report_html
from polythrottle.storage import journal as journals
from polythrottle.storage.boards_journal import BoardsJournal, boards_of
from polythrottle.storage.journal import ATTEMPTS, Journal
from polythrottle.tuning.boards_together import BoardAnswer, BoardOffset, BoardsView, KindOffsets, Offset, OpenBoard
from polythrottle.tuning.setup import Setup
from polythrottle.tuning.several_boards import SharedStudy
from polythrottle.tuning.stopping import Budget, Rule

KIND, MODEL = "jetson-orin-nano", "resnet50"
TWO = f"sim:{KIND}?seed=1,sim:{KIND}?seed=2"


class OneOfAKind(SimulatedDevice):
    """A simulated board that is slower than its kind, hungrier, and may be lost."""

    slower = 1.0
    hungrier = 1.0
    lasts = math.inf
    applied: OperatingPoint | None = None
    left = False
    elsewhere = ""

    def __enter__(self) -> "OneOfAKind":
        """Take the board, unless somebody else steers it."""
        if self.elsewhere:
            raise DeviceError(f"{self.elsewhere}; wait for it or stop it")
        super().__enter__()
        return self

    def apply(self, point: OperatingPoint) -> None:
        """Set every knob, unless the board is lost by now."""
        self.lasts -= 1
        if self.lasts < 0:
            raise DeviceError("the cable is out")
        self.applied = point
        super().apply(point)
        time, power = self._state.factors
        self._state.factors = (time * self.slower, power * self.hungrier)

    def restore(self) -> None:
        """Put everything back."""
        self.left = True
        super().restore()


def boards(count: int) -> list[OpenBoard]:
    """Return simulated boards of one kind."""
    devices = [OneOfAKind(load_board(KIND), seed=number) for number in range(1, count + 1)]
    return [OpenBoard(device.uri, device, device.serve(load_model(MODEL))) for device in devices]


def asked(board: OpenBoard, *limits: str) -> Problem:
    """Return what is searched for on a board."""
    window = Setup(board.uri, MODEL, queries=20).window(board.device)
    space = board.device.space * board.served.space
    return Problem(space, tuple(map(Constraint.parse, limits)), board.uri, MODEL, {}, window)


def searched(path: Path, found: Sequence[OpenBoard], trials: int = 8, limit: str = "p99<=50ms") -> list[Study | str]:
    """Return all that a search at random yields; continues a journal that is there."""
    with contextlib.ExitStack() as stack:
        if path.exists():
            kept = BoardsJournal.reopen(path)
        else:
            kept = BoardsJournal.create(path, Study(asked(found[0], limit), "random"), {})
        stack.enter_context(kept)
        assert isinstance(kept, BoardsJournal)
        shared = SharedStudy(found, make_optimizer("random"), kept, Budget(trials), Rule())
        return list(shared.search())


def lines(path: Path) -> list[dict[str, object]]:
    """Return the lines of a journal."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_two_boards_end_with_a_profile_and_a_journal_that_names_the_board_of_each_trial(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They share the work, and the answer says what each of them saves."""
    path = tmp_path / "study.jsonl"
    out = tmp_path / "profile.toml"
    words = ["tune", "-d", TWO, "-w", MODEL, "--slo", "p99<=50ms", "--method", "random", "--trials", "8"]
    assert run([*words, "--journal", str(path), "--out", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert out.exists()
    study = journals.read(path)
    assert len(study.trials) in (7, 8)  # one is kept for the slowest board
    assert set(boards_of(path)) == {trial.number for trial in study.trials}
    assert set(boards_of(path).values()) == set(TWO.split(","))
    assert [board["device"] for board in told["boards"]] == TWO.split(",")
    assert told["search"]["duration_s"] == pytest.approx(read_study(path).duration_s)
    assert told["search"]["duration_s"] < 0.9 * study.cost.duration_s  # that is the sum over both
    assert sum(board["trials"] for board in told["boards"]) == len(study.trials)
    assert run(["report", str(path), "--out", str(tmp_path / "report.html")]) == 0
    for page in (path.with_suffix(".html"), tmp_path / "report.html"):
        text = page.read_text()
        assert f"<h1>{MODEL} on {TWO.replace(',', ', ')}</h1>" in text
        # A line for each, as in the text: what it saves, how it differs, and its trials.
        assert [text.count(f"<dt>{uri}</dt>") for uri in TWO.split(",")] == [1, 1]
        assert text.count("; beside the others ") == 2
    assert run(["tune", "--resume", str(path), "--device", TWO, "--trials", "10", "--json"]) == 0
    assert len(journals.read(path).trials) in (9, 10)


def test_what_one_board_measured_is_not_called_anothers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first that was named is lost before it measures anything: profile, next line and report name another."""
    lost, there = TWO.split(",")
    apply = SimulatedDevice.apply

    def gone(self: SimulatedDevice, point: OperatingPoint) -> None:
        if self.uri == lost:
            raise DeviceError("the cable is out")
        apply(self, point)

    monkeypatch.setattr(SimulatedDevice, "apply", gone)
    path, out = tmp_path / "study.jsonl", tmp_path / "o10.toml"
    words = ["tune", "-d", TWO, "-w", MODEL, "--slo", "p99<=50ms", "--method", "random", "--trials", "5"]
    assert run([*words, "--journal", str(path), "--out", str(out)]) == 0
    said = capsys.readouterr()
    told, shown = (" ".join(text.split()) for text in said)
    assert "trial 0 on seed=2: " in shown
    assert shown.count("figures of trials are those that the slowest board would have") == 1
    assert told.startswith(f"{there} {MODEL}")
    assert f"{lost}: never measured" in told
    assert read_profile(out).device == there
    assert read_study(path).problem.device == there
    page = path.with_suffix(".html").read_text()
    assert f"<h1>{MODEL} on {there}</h1>" in page
    assert "never measured" in page
    assert run(["tune", "--resume", str(path), "--device", TWO, "--trials", "6", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["device"], again["unmeasured_boards"]) == (there, [lost])
    assert run(["report", str(path), "--out", str(tmp_path / "again.html")]) == 0
    assert "never measured" in (tmp_path / "again.html").read_text()


def test_each_board_measures_the_default_and_every_trial_is_on_disk_before_its_board_is_touched(
    tmp_path: Path,
) -> None:
    """A trial is written as begun first; what it came to, later."""
    path = tmp_path / "study.jsonl"
    found = boards(3)
    searched(path, found)
    study = journals.read(path)
    default = study.problem.space.default
    assert {boards_of(path)[trial.number] for trial in study.trials if trial.point == default} == {
        each.uri for each in found
    }
    begun = [line for line in lines(path) if line["event"] == "interrupted"]
    assert [line["visit"] for line in begun] == list(range(len(study.trials)))


def test_what_is_told_of_a_study_names_boards_and_has_one_frame(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Journal, table, report and explanation are as the slowest board would have them, and say which board it was."""
    path = tmp_path / "study.jsonl"
    found = boards(3)
    for board, slower, hungrier in zip(found, (1.0, 1.08, 1.0), (1.1, 1.0, 0.92), strict=True):
        assert isinstance(board.device, OneOfAKind)
        board.device.slower, board.device.hungrier = slower, hungrier
    searched(path, found, 12)
    made = boards_of(path)
    study = read_journal(path)
    assert study.trials == read_study(path).trials
    assert [*study.to_dataframe()["board"]] == [made[trial.number] for trial in study.trials]
    assert [trial_document(study, trial)["device"] for trial in study.trials] == [*made.values()]  # type: ignore[index]
    page = report_html(study)
    assert "<th>trial</th><th>board</th>" in page
    assert [page.count(f'<td title="{uri}">') for uri in sorted(set(made.values()))] == [
        [*made.values()].count(uri) for uri in sorted(set(made.values()))
    ]
    best, default, raw = study.best, study.default, journals.read(path)
    assert best is not None
    assert best.measurement is not None
    assert default is not None
    assert default.measurement is not None
    assert raw.trials[best.number].measurement != best.measurement
    for explained in (explain(path), explain(study)):
        energy = next(effect for effect in explained.effects if effect.metric == "energy")
        assert (energy.before, energy.after) == pytest.approx((default.measurement.energy_j, best.measurement.energy_j))
        assert explained.limits[0].value == pytest.approx(best.measurement.metric("p99"))
    assert run(["explain", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "figures  as the slowest board would have them, with the energy of the mean" in shown
    assert max(map(len, shown.splitlines()[2:])) <= 80
    assert run(["explain", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"]["device"] == made[best.number]


def test_a_study_of_one_board_is_told_as_before(tmp_path: Path) -> None:
    """No column and no key says where, for there is one place."""
    asks = problem()
    study = Study(asks, "grid", 0, (Trial(0, asks.space.default, measured()),))
    assert "board" not in study.to_dataframe()
    assert "device" not in (trial_document(study, study.trials[0]) or {})
    assert "<th>board</th>" not in report_html(study)


@pytest.mark.slow
def test_the_same_boards_make_the_same_study(tmp_path: Path) -> None:
    """In virtual time it does not matter which thread is faster."""
    searched(tmp_path / "one.jsonl", boards(3))
    searched(tmp_path / "other.jsonl", boards(3))
    assert lines(tmp_path / "one.jsonl") == lines(tmp_path / "other.jsonl")


def test_a_board_that_drops_out_is_left_out_and_its_trial_made_again_elsewhere(tmp_path: Path) -> None:
    """A line says so; nothing of it is lost, and the other board makes the rest."""
    path = tmp_path / "study.jsonl"
    found = boards(2)
    assert isinstance(found[1].device, OneOfAKind)
    found[1].device.lasts = 2
    events = searched(path, found)
    said = [event for event in events if isinstance(event, str)]
    assert said == [f"{found[1].uri} is left out: the cable is out; its trial is made again elsewhere"]
    lost = found[1].device.applied
    study = journals.read(path)
    assert len(study.trials) >= 7
    assert all(trial.state is TrialState.COMPLETED for trial in study.trials)
    begun = [line for line in lines(path) if line["event"] == "interrupted" and line["board"] == found[1].uri]
    started = [line for line in lines(path) if line["event"] == "started" and line.get("visit") == begun[-1]["visit"]]
    point = OperatingPoint(started[0]["point"])  # type: ignore[arg-type]
    assert point in study.visited
    assert lost is not None


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_board_that_somebody_else_steers_at_the_beginning_is_refused_before_any_trial(
    which: int, tmp_path: Path
) -> None:
    """One line says which board and who; no other board makes a trial, and all that were taken are given back."""
    path = tmp_path / "study.jsonl"
    found = boards(3)
    devices = [board.device for board in found if isinstance(board.device, OneOfAKind)]
    devices[which].elsewhere = "jetson is being steered by eve at desk2 (process 7, over SSH)"
    with pytest.raises(DeviceError) as refused:
        searched(path, found)
    assert str(refused.value) == f"{found[which].uri}: {devices[which].elsewhere}; wait for it or stop it"
    assert [each.applied for each in devices] == [None] * 3
    assert [each.left for each in devices] == [number != which for number in range(3)]
    assert [line["event"] for line in lines(path)] == ["study"]
    searched(path, boards(3))
    assert set(boards_of(path).values()) == {board.uri for board in found}


def test_the_last_board_that_is_lost_ends_the_search(tmp_path: Path) -> None:
    """The journal is kept; what there is to say is said of the last, whose trial nobody makes again."""
    found = boards(2)
    for board in found:
        assert isinstance(board.device, OneOfAKind)
        board.device.lasts = 2
    said: list[str] = []
    with BoardsJournal.create(tmp_path / "study.jsonl", Study(asked(found[0]), "random"), {}) as kept:
        assert isinstance(kept, BoardsJournal)
        events = SharedStudy(found, make_optimizer("random"), kept, Budget(20), Rule()).search()
        with pytest.raises(DeviceError, match="no board is left; the last was"):
            said.extend(event for event in events if isinstance(event, str))
    assert len(said) == 2
    assert said[0].endswith("; its trial is made again elsewhere")
    assert said[1].endswith("is left out: the cable is out")
    assert not journals.is_finished(tmp_path / "study.jsonl")


def test_whatever_ends_a_search_every_board_is_put_back(tmp_path: Path) -> None:
    """Whoever leaves it in the middle, as Ctrl-C does, finds them so."""
    found = boards(3)
    with BoardsJournal.create(tmp_path / "study.jsonl", Study(asked(found[0]), "random"), {}) as kept:
        assert isinstance(kept, BoardsJournal)
        events = SharedStudy(found, make_optimizer("random"), kept, Budget(20), Rule()).search()
        for event in events:
            if isinstance(event, Study) and len(event.completed) == 5:
                break
        for board in found:
            assert isinstance(board.device, OneOfAKind)
            board.device.left = False
        events.close()
    assert all(isinstance(board.device, OneOfAKind) and board.device.left for board in found)


def test_trials_that_ran_when_a_search_was_left_are_made_again_first(tmp_path: Path) -> None:
    """A resumed study begins with them, on whichever board is free."""
    path = tmp_path / "study.jsonl"
    found = boards(2)
    with BoardsJournal.create(path, Study(asked(found[0], "p99<=50ms"), "random"), {}) as kept:
        assert isinstance(kept, BoardsJournal)
        for board in found:
            kept.end(
                kept.begin(kept.study.problem.space.default, board.uri),
                Trial(0, kept.study.problem.space.default, measured()),
            )
        points = [point for point in kept.study.problem.space if point not in kept.study.visited][5:7]
        for point, board in zip(points, found, strict=True):
            kept.begin(point, board.uri)
    searched(path, found)
    assert {trial.point for trial in journals.read(path).trials[2:4]} == set(points)


def test_a_trial_that_ends_every_process_is_given_up(tmp_path: Path) -> None:
    """What was begun so often, and never ended, is recorded as failed."""
    path = tmp_path / "study.jsonl"
    asks = problem()
    point = next(point for point in asks.space if point != asks.space.default)
    with BoardsJournal.create(path, Study(asks, "random"), {}) as kept:
        assert isinstance(kept, BoardsJournal)
        kept.begin(point, "a")
    for _ in range(ATTEMPTS - 1):
        with BoardsJournal.reopen(path) as kept:
            assert isinstance(kept, BoardsJournal)
            assert kept.again("a") == point
            kept.begin(point, "a")
    with BoardsJournal.reopen(path) as kept:
        assert isinstance(kept, BoardsJournal)
        assert kept.again("a") is None
        assert kept.study.trials[-1].failure == f"interrupted {ATTEMPTS} times"


def test_a_process_that_ends_between_two_lines_of_a_trial_loses_nothing(tmp_path: Path) -> None:
    """A journal of several boards is one that any version reads and reopens."""
    path = tmp_path / "study.jsonl"
    asks = problem()
    with BoardsJournal.create(path, Study(asks, "random"), {}) as kept:
        assert isinstance(kept, BoardsJournal)
        visit = kept.begin(asks.space.default, "a")
        kept._start(asks.space.default, "a", visit)
    with BoardsJournal.reopen(path) as kept:
        assert kept.study.trials == ()
        assert isinstance(kept, BoardsJournal)
        kept.end(kept.begin(asks.space.default, "b"), Trial(0, asks.space.default, measured()))
    with Journal.reopen(path) as plain:
        assert len(plain.study.trials) == 1
    assert boards_of(path) == {0: "b"}


def precise(latency_s: float, energy_j: float) -> Measurement:
    """Return a measurement that is sure of itself to 0.2 %."""
    between = {
        "mean": Interval(0.998 * latency_s, 1.002 * latency_s),
        "energy": Interval(0.998 * energy_j, 1.002 * energy_j),
        "p99": Interval(1.19 * latency_s, 1.21 * latency_s),
    }
    return measured(latency_s, energy_j, intervals=between)


def test_boards_are_told_apart_by_their_default_points() -> None:
    """By how much each differs comes out within its doubt."""
    truth = {"a": -0.06, "b": -0.01, "c": 0.02, "d": 0.05}
    offsets = KindOffsets.of({uri: precise(0.01 * math.exp(log / 2), math.exp(log)) for uri, log in truth.items()})
    for uri, log in truth.items():
        assert abs(offsets.board(uri).energy.mean - log) <= 2 * offsets.board(uri).energy.sd
        assert abs(offsets.board(uri).latency.mean - log / 2) <= 2 * offsets.board(uri).latency.sd
    assert offsets.slowest == "d"


def test_a_limit_has_to_hold_on_the_slowest_board() -> None:
    """What held on a fast one by little is infeasible; on a slow one itself the limit is what was asked."""
    asks = problem("p99<=13ms")
    default = asks.space.default
    other = next(point for point in asks.space if point != default)
    trials = (
        Trial(0, default, precise(0.0100, 1.0)),
        Trial(1, default, precise(0.0110, 1.1)),
        Trial(2, other, precise(0.0102, 0.8)),
    )
    view = BoardsView(Study(asks, "grid", 0, trials), {0: "fast", 1: "slow", 2: "fast"})
    assert view.study.feasible(trials[2])
    assert not view.on_all().feasible(view.on_all().trials[2])
    assert view.on_one("slow").constraints[0].limit == pytest.approx(0.013)
    assert view.on_one("fast").constraints[0].limit < 0.0123
    answers = view.answers(other)
    assert [(each.uri, each.trials, each.measured) for each in answers] == [("fast", 2, True), ("slow", 1, False)]
    assert [each.saving for each in answers] == pytest.approx([0.2, 0.2], abs=0.03)


def test_what_broke_a_limit_on_the_slowest_board_is_no_answer() -> None:
    """Whatever another has seen there."""
    asks = problem("p99<=13ms")
    default = asks.space.default
    other = next(point for point in asks.space if point != default)
    seen = ((default, 0.0100), (default, 0.0101), (other, 0.0105), (other, 0.0112))
    trials = tuple(Trial(number, point, precise(time_s, 1.0)) for number, (point, time_s) in enumerate(seen))
    study = BoardsView(Study(asks, "grid", 0, trials), {0: "fast", 1: "slow", 2: "fast", 3: "slow"}).on_all()
    assert {trial.number for trial in study.infeasible} == {2, 3}


@pytest.mark.parametrize(
    ("device", "code", "says"),
    [
        (f"sim:{KIND},sim:jetson-nano", 2, "boards that search together are of one kind"),
        (f"sim:{KIND},sim:{KIND}", 2, f"sim:{KIND} is named twice"),
        (f"{TWO},sim:nonesuch", 3, "nonesuch"),
        (f"{TWO},cpu", 2, "a real device needs the model itself"),
    ],
)
def test_what_cannot_search_together_is_one_line(
    device: str, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is touched."""
    assert run(["tune", "-d", device, "-w", MODEL, "--method", "random", "--trials", "8"]) == code
    told = capsys.readouterr().err
    assert says in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--trials", "3"], "2 boards need 4 trials at least, not 3"),
        (["--slo", "p99<=50ms", "--error-budget", "0.1%"], "an error budget is for one board"),
    ],
)
def test_what_several_boards_cannot_do_is_one_line(
    more: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what to leave out."""
    assert run(["tune", "-d", TWO, "-w", MODEL, "--method", "random", *more]) == 2
    assert says in capsys.readouterr().err


def test_a_board_that_cannot_measure_the_default_is_left_out(tmp_path: Path) -> None:
    """Nothing it measured could be compared with the others."""
    found = boards(2)

    def refused() -> None:
        raise TrialError("no answer")

    setattr(found[0].served, "query", refused)  # noqa: B010
    events = searched(tmp_path / "study.jsonl", found)
    said = [event for event in events if isinstance(event, str)]
    assert said == [f"{found[0].uri} is left out: the default point cannot be measured: no answer"]
    assert len(journals.read(tmp_path / "study.jsonl").completed) >= 6


@pytest.mark.parametrize(("measured", "how"), [(True, "energy, simulated;"), (False, "others showed, simulated;")])
def test_what_a_simulated_board_saves_is_called_simulated(measured: bool, how: str) -> None:
    """Whether it was tried on this board or worked out from another's trial."""
    seen = Measurement(Latency(0.01, None, None, None, None), 1.0, 100.0, 100.0, EnergyKind.SIMULATED, "board")
    words = BoardAnswer("sim:a", BoardOffset(Offset(0.0, 0.0), Offset(0.0, 0.0)), 1, seen, 0.1, None, measured).words
    assert how in words
    assert words.endswith("1 trial")


@pytest.mark.parametrize(
    ("saving", "between", "told"),
    [
        (-0.575, Interval(-1.859, 0.133), "57.5 % more energy (-13.3 to 185.9 %)"),
        (0.575, Interval(-0.133, 1.859), "57.5 % less energy (-13.3 to 185.9 %)"),
    ],
)
def test_a_cost_and_its_interval_have_one_sign(saving: float, between: Interval, told: str) -> None:
    """What is called "more" has the interval of how much more."""
    seen = Measurement(Latency(0.01, None, None, None, None), 1.0, 100.0, 100.0, EnergyKind.MEASURED, "board")
    level = BoardOffset(Offset(0.0, 0.0), Offset(0.0, 0.0))
    assert BoardAnswer("ssh://nano2", level, 3, seen, saving, between, True).words.startswith(told)


def test_the_default_point_has_its_share_of_the_queries_on_each_board(tmp_path: Path) -> None:
    """Boards together see there what one board alone would have; other windows are shorter too."""
    path = tmp_path / "study.jsonl"
    found = boards(4)
    asks = asked(found[0], "p99<=50ms")
    precise_window = replace(asks.window, precision=0.02, duration_s=0.0)
    with BoardsJournal.create(path, Study(replace(asks, window=precise_window), "random"), {}):
        pass
    searched(path, found)
    study = journals.read(path)
    assert study.problem.window.most_queries == 1000  # as was asked
    seen = [(trial.point == study.problem.space.default, trial.measurement) for trial in study.completed]
    queries = [(default, measurement.latency.queries) for default, measurement in seen if measurement is not None]
    assert [count for default, count in queries if default] == [250] * 4
    assert max(count for default, count in queries if not default) <= 500


def test_a_relative_limit_multiplies_what_all_boards_saw_at_the_default_point() -> None:
    """Not what the last of them happened to see, each of which had a short window."""
    asks = problem("p99<=1.5x")
    means_s = (0.0100, 0.0100, 0.0100)
    p99s_s = (0.0118, 0.0120, 0.0125)
    trials = tuple(
        Trial(number, asks.space.default, replace(seen, latency=replace(seen.latency, p99_s=p99_s)))
        for number, (seen, p99_s) in enumerate(zip((precise(each, 1.0) for each in means_s), p99s_s, strict=True))
    )
    view = BoardsView(Study(asks, "grid", 0, trials), {0: "a", 1: "b", 2: "c"})
    expected_s = 1.5 * math.exp(sum(map(math.log, p99s_s)) / 3)
    assert view.on_all().constraints[0].limit == pytest.approx(expected_s)
    assert view.on_one("c").constraints[0].limit == pytest.approx(expected_s)
    assert view.study.constraints[0].limit == pytest.approx(1.5 * p99s_s[-1])


class SoonFlat(Listed):
    """A method that goes through the space in order, and after a while expects nothing more."""

    def saving_left(self, study: Study) -> float:
        """Return nothing, once enough has ended."""
        return 0.0 if len(study.completed) >= 12 else math.inf


def test_a_search_has_ended_when_what_still_ran_was_cut_short(tmp_path: Path) -> None:
    """Its time in virtual time is not that at which what nobody needed would have ended."""
    found = boards(4)
    with BoardsJournal.create(tmp_path / "study.jsonl", Study(asked(found[0], "p99<=50ms"), "random"), {}) as kept:
        assert isinstance(kept, BoardsJournal)
        shared = SharedStudy(found, SoonFlat(), kept, Budget(30), Rule())
        list(shared.search())
        assert kept.running  # what was cut short
        took_s = dict.fromkeys((board.uri for board in found), 0.0)
        for trial in kept.study.trials:
            assert trial.cost is not None
            took_s[kept.boards[trial.number]] += trial.cost.duration_s
        assert shared.duration_s == pytest.approx(max(took_s.values()))
