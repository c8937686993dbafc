"""The control loop in virtual time, on a scripted board and scripted traffic."""

import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from daemons import COOL, GONE, LADDER, TOP, TUNED, House

from polythrottle.daemon.commands import Command, Confirm, Release, Report, SetBudget, StartStudy, Stop, StopStudy, Take
from polythrottle.daemon.control.state import Phase
from polythrottle.daemon.observation import RequestStats
from polythrottle.domain.errors import (
    DeviceError,
    InvalidInput,
    KnobRejected,
    PolythrottleError,
    StorageError,
    TrialError,
)
from polythrottle.domain.measurement import Latency, Measurement
from polythrottle.domain.profile import Profile
from polythrottle.domain.space import OperatingPoint

BATTERY = SetBudget(battery_wh=1.0, last_s=9 * 3600.0)


@pytest.fixture
def house(tmp_path: Path) -> House:
    """Return a control loop on a scripted board."""
    return House(tmp_path / "daemon")


def wish(house: House, wished: Command) -> str:
    """Hand a wish in, let the loop answer, and return its words."""
    answer = house.desk.hand_in(wished)
    house.runner.answer()
    return str(answer.result(timeout=0)["words"])


def test_the_load_is_followed_down_and_up(house: House) -> None:
    """A low load ends on a low rung, a high one on a high rung at once, and the server is told."""
    house.traffic.rate_per_s = 10.0
    house.turns(30)
    assert house.desk.status.rung is not None
    assert house.desk.status.rung.number == 0
    house.traffic.rate_per_s = 150.0
    house.turns(15)
    assert house.board.applied == LADDER.rungs[2].service.point
    assert house.traffic.served[-1].point == house.board.applied


def test_a_workload_that_goes_leaves_the_board_as_found(house: House) -> None:
    """Three seconds without a workload restore the board; one look without an answer does not."""
    house.turns(3)
    house.traffic.rate_per_s = None
    house.turns(1)
    assert house.board.applied is not None
    house.turns(5)
    assert house.board.applied is None
    assert house.desk.status.phase == "down"
    assert house.desk.status.rate_per_s is None


def test_without_a_workload_nothing_is_set(house: House) -> None:
    """A daemon at rest holds the board and sets nothing."""
    house.traffic.rate_per_s = None
    house.turns(10)
    assert house.board.done == []


def test_a_guard_goes_to_the_safe_point_in_the_same_turn(house: House) -> None:
    """A p99 above its limit leads to the safe point within the period, and an event says why."""
    house.traffic.rate_per_s = 10.0
    house.turns(30)
    house.traffic.p99_s = 0.2
    house.turns(1)
    assert house.board.applied == TOP.point
    assert house.desk.status.phase == "safe"
    assert "p99" in house.desk.status.reason
    assert any("p99 is 200 ms, above 100" in words for words in house.words("guard"))


def test_heat_goes_to_the_cool_point(house: House) -> None:
    """A temperature above its limit leads to the point that draws least."""
    house.turns(5)
    house.board.temperature_c = 95.0
    house.turns(1)
    assert house.board.applied == COOL.point


def test_a_lost_sensor_is_unknown_not_zero(house: House) -> None:
    """Readings that fail give None and a fault in the status, trip no guard, and come back."""
    house.turns(5)
    house.board.fails["read"] = DeviceError("the sensor has gone")
    house.turns(3)
    status = house.desk.status
    assert (status.power_w, status.temperature_c, status.reachable) == (None, None, False)
    assert any("the sensor has gone" in fault for fault in status.faults)
    assert status.phase == "following"
    del house.board.fails["read"]
    house.turns(3)
    assert house.desk.status.power_w == pytest.approx(12.0)
    assert house.desk.status.faults == ()


def test_a_refused_level_leads_to_safe_and_then_to_giving_way(house: House) -> None:
    """A board that refuses every level is left alone in the end, and people are told."""
    house.board.fails["apply"] = KnobRejected("gpu_max_hz is not kept")
    house.turns(3)
    assert house.desk.status.phase == "yielded"
    assert "gpu_max_hz is not kept" in house.words("refused")


def test_a_lost_lease_comes_back(house: House) -> None:
    """While the actuator is away nothing is written; when it is back the point is set anew."""
    house.turns(5)
    house.board.fails.update(take=GONE, apply=GONE, read=GONE)
    house.turns(10)
    assert not house.desk.status.leased
    assert any("cannot be reached" in fault for fault in house.desk.status.faults)
    writes = len(house.board.done)
    house.board.fails.clear()
    house.turns(40)
    assert house.desk.status.leased
    assert house.board.done[writes:].count("apply") >= 1
    assert house.desk.status.faults == ()


def test_a_board_whose_originals_cannot_be_noted_is_left_as_found(house: House) -> None:
    """A full disk stops setting, which is shown; with room again the point is set anew."""
    house.turns(5)
    house.board.fails.update(apply=StorageError("cannot save originals: No space left on device"))
    house.traffic.rate_per_s = 90.0
    house.turns(60)
    assert house.board.applied is None
    assert house.words("lease")[0] == "the board cannot be set: cannot save originals: No space left on device"
    assert not any("control loop failed" in words for words in house.words("fault"))
    house.board.fails.clear()
    house.turns(40)
    assert house.board.applied is not None
    assert house.desk.status.faults == ()


def test_another_writer_is_overruled_twice_then_given_way_to(house: House) -> None:
    """The third foreign write in ten minutes makes the daemon give way until it is taken again."""
    house.turns(5)
    house.board.foreign = ("gpu_max_hz",)
    house.turns(40)
    assert house.desk.status.phase == "yielded"
    assert house.board.applied is None
    house.board.foreign = ()
    wish(house, Take())
    house.turns(2)
    assert house.desk.status.phase == "following"


def test_a_sleep_of_the_machine_sets_everything_anew(house: House) -> None:
    """After a suspend what holds is verified and applied again."""
    house.turns(10)
    before = house.board.done.count("apply")
    house.slept_s += 3600.0
    house.turns(2)
    assert house.board.done.count("apply") == before + 1
    assert any("slept for 3600 s" in words for words in house.words("machine"))


@pytest.mark.parametrize("jump_s", [7200.0, -7200.0])
def test_a_clock_that_jumps_trips_nothing(house: House, jump_s: float) -> None:
    """Neither hours forward nor hours back trip a guard, invent power, or stop the loop."""
    house.turns(10)
    house.clock._now_s += jump_s
    house.turns(1)
    assert house.desk.status.power_w is None
    turn = house.desk.status.turn
    house.turns(5)
    assert house.desk.status.turn == turn + 5
    assert house.words("guard") == []
    assert house.desk.status.phase == "following"


def test_turns_do_not_drift(house: House) -> None:
    """Work within a turn does not delay the next: a hundred turns take a hundred periods."""
    house.turns(100, each=lambda: house.clock.sleep(0.3))
    assert house.clock.now() == pytest.approx(100.0)


def test_requests_that_pile_up_are_seen_before_the_next_turn(house: House) -> None:
    """A queue leads to a higher rung within a fraction of the period."""
    house.traffic.rate_per_s = 10.0
    house.turns(30)
    house.runner.turn()
    house.traffic.rate_per_s, house.traffic.waiting = 150.0, 40
    due_s = house.clock.now() + 0.25
    house.runner._wait()
    assert house.board.applied == TOP.point
    assert due_s < house.clock.now()


def test_a_server_that_refuses_its_batch_is_told_again(house: House) -> None:
    """A refusal is a fault, not a reason to leave the point; the server is told again later."""
    house.traffic.refusal = TrialError("no such batch")
    house.turns(3)
    assert any("no such batch" in fault for fault in house.desk.status.faults)
    assert house.desk.status.phase == "following"
    house.traffic.refusal = None
    house.turns(12)
    assert house.desk.status.faults == ()
    assert house.traffic.served[-1].point == house.board.applied


def test_traffic_that_cannot_be_seen_is_a_fault(house: House) -> None:
    """An error of the source takes the workload for down and says why."""
    house.turns(3)
    house.traffic.error = DeviceError("the log cannot be read")
    house.turns(5)
    assert house.desk.status.phase == "down"
    assert any("the log cannot be read" in fault for fault in house.desk.status.faults)


def test_a_daemon_that_runs_first_has_nothing_to_go_on_with(house: House) -> None:
    """Neither a profile chosen before nor a comparison that was cut off: nothing is read, and nothing said of it."""
    assert house.runner.selector.remembered is None
    assert house.runner.selector.compared is None
    house.runner.go_on()
    assert house.words("profile") == []


def test_a_source_that_shows_no_requests_is_said_once(house: House) -> None:
    """A log that is not there is a fault at the first look, and is told of again only after requests were seen."""
    house.traffic.rate_per_s = None
    vars(house.traffic)["note"] = "there is no log"
    house.turns(5)
    assert house.words("fault") == ["there is no log"]
    house.traffic.rate_per_s = 30.0
    vars(house.traffic)["note"] = ""
    house.turns(2)
    house.traffic.rate_per_s = None
    vars(house.traffic)["note"] = "the log is gone"
    house.turns(20)
    assert house.words("fault") == ["there is no log", "the log is gone"]


def test_another_model_is_not_followed_with_the_old_ladder(house: House) -> None:
    """New contents of the served model lead to the safe point; the old contents back to following."""
    house.traffic.model = "one"
    house.turns(5)
    house.traffic.model = "two"
    house.turns(2)
    assert house.desk.status.phase == "safe"
    assert house.words("model") == ["the model has changed"]
    house.traffic.model = "one"
    house.turns(2)
    assert house.desk.status.phase == "following"


def test_a_board_that_turns_out_another_is_not_set_by_the_old_profile(tmp_path: Path) -> None:
    """When the actuator comes back with other firmware, the profile is not followed any more, and a fault says so."""
    seen = Measurement(Latency(0.02, p99_s=0.05), 0.2, 200.0, 40.0)
    made = Profile("jetson", "model.onnx", TOP.point, seen, identity={"l4t": "36.3"}, workload_knobs=("batch_size",))
    house = House(tmp_path / "daemon", tuned=replace(TUNED, profile=made))
    house.identity = {"l4t": "36.3"}
    house.turns(5)
    assert house.desk.status.phase == "following"
    house.board.fails.update(take=GONE, apply=GONE)
    house.turns(3)
    house.board.fails.clear()
    house.identity = {"l4t": "36.4"}
    house.turns(10)
    assert house.desk.status.phase == "safe"
    assert house.board.applied == OperatingPoint({})
    assert any("l4t 36.3" in fault for fault in house.desk.status.faults)


def test_release_and_take(house: House) -> None:
    """A released board is as found and stays so, over a restart too, until it is taken again."""
    house.turns(5)
    wish(house, Release("maintenance"))
    house.turns(5)
    assert not house.board.taken
    assert (house.desk.status.phase, house.desk.status.leased) == ("yielded", False)
    assert house.desk.status.reason == "released: maintenance"
    wish(house, Take())
    house.turns(5)
    assert house.board.applied is not None


def test_a_release_survives_a_daemon_that_was_killed(tmp_path: Path) -> None:
    """A daemon started after another was killed leaves alone what was released."""
    first = House(tmp_path / "daemon")
    first.turns(3)
    wish(first, Release("maintenance"))
    first.turns(1)
    second = House(tmp_path / "daemon")
    second.turns(5)
    assert not second.board.taken
    assert second.desk.status.phase == "yielded"


def test_a_power_budget_bounds_the_rung(house: House) -> None:
    """With 25 W allowed a load that wants the top rung gets the highest within; lifted, it gets the top."""
    house.traffic.rate_per_s = 150.0
    house.turns(5)
    assert "at most 25 W" in wish(house, SetBudget(power_w=25.0))
    house.turns(5)
    assert house.desk.status.rung is not None
    assert house.desk.status.rung.number < 2
    assert house.desk.status.budget.limit_w == 25.0
    wish(house, SetBudget())
    house.turns(5)
    assert house.desk.status.rung.number == 2


def test_what_was_drawn_of_a_budget_survives(tmp_path: Path) -> None:
    """A battery's account goes on after a restart."""
    first = House(tmp_path / "daemon")
    wish(first, SetBudget(battery_wh=80.0, last_s=9 * 3600.0))
    first.turns(130)
    left_j = first.desk.status.budget.left_j
    assert left_j is not None
    first.record.flush()
    second = House(tmp_path / "daemon")
    second.clock._now_s = first.clock.now()
    second.turns(3)
    assert second.desk.status.budget.left_j == pytest.approx(left_j, abs=12.0 * 60)
    assert second.desk.status.budget.left_j < 80 * 3600


def test_wishes_that_cannot_be_are_refused_in_words(house: House) -> None:
    """Each wish that makes no sense is answered by an error of the project, and the loop goes on."""
    house.turns(3)
    for wished, error in (
        (Confirm(), InvalidInput),
        (StopStudy("x"), InvalidInput),
        (StartStudy(0), InvalidInput),
        (StartStudy(5, {"journal": "x"}), InvalidInput),
        (SetBudget(power_w=-1), InvalidInput),
        (SetBudget(battery_wh=5), InvalidInput),
        (Report(RequestStats()), InvalidInput),
    ):
        with pytest.raises(error):
            wish(house, wished)
    house.turns(1)
    assert house.desk.status.phase == "following"


def test_a_loop_that_stumbles_goes_safe_and_on(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unforeseen error is an event and the safe point; the loop goes on."""
    house.turns(2)
    calls = iter([ValueError("unforeseen")])

    def broken() -> tuple[str, ...]:
        house.runner.stop()
        for error in calls:
            raise error
        return ()

    monkeypatch.setattr(house.board, "verify", broken)
    house.clock.sleep(10.0)
    house.runner.run()
    assert any("ValueError: unforeseen" in words for words in house.words("fault"))
    assert not house.board.taken


def test_a_loop_that_stumbles_again_and_again_ends_with_the_board_restored(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three unforeseen errors in a minute end the daemon by an error; the board is given back."""

    def broken(now_s: float) -> RequestStats | None:
        raise ZeroDivisionError("again")

    monkeypatch.setattr(house.traffic, "look", broken)
    with pytest.raises(DeviceError, match="3 times in a minute"):
        house.runner.run()
    assert not house.board.taken
    assert house.traffic.closed


def test_a_stop_restores_the_board(house: House) -> None:
    """A daemon told to stop gives back the board and closes its traffic."""
    house.turns(3)
    answer = house.desk.hand_in(Stop())
    house.runner.run()
    assert "gives the board back" in answer.result(timeout=0)["words"]
    assert house.words("stop") == ["the daemon has ended; the board is as it was found"]
    assert (house.board.taken, house.board.applied, house.traffic.closed) == (False, None, True)


def test_a_board_that_cannot_be_restored_is_not_passed_over(house: House) -> None:
    """An actuator that is away at the end is an error of the daemon, after all else was closed."""
    house.turns(3)
    house.board.fails["release"] = GONE
    house.runner.stop()
    with pytest.raises(PolythrottleError, match="cannot be reached"):
        house.runner.run()
    assert house.traffic.closed
    assert house.words("stop") == [f"the daemon has ended; the board may not be as it was found: {GONE}"]


def test_what_is_left_on_the_board_is_named_at_the_end(house: House) -> None:
    """A control that somebody else has set is in the stop event and in the error the daemon ends with."""
    house.turns(3)
    house.board.left = ("gpu_max holds 5, was 9: changed by someone else",)
    house.runner.stop()
    with pytest.raises(DeviceError, match="gpu_max holds 5") as ended:
        house.runner.run()
    assert ended.value.exit_code == 6
    assert "may not be as it was found: gpu_max holds 5" in house.words("stop")[0]


def test_what_is_left_on_a_released_board_is_named(house: House) -> None:
    """Who has the board released is told what is not as it was found."""
    house.turns(3)
    house.board.left = ("gpu_max holds 5, was 9",)
    answer = house.desk.hand_in(Release("maintenance"))
    house.runner.answer()
    told = answer.result(timeout=0)
    assert "not as found (gpu_max holds 5, was 9)" in told["words"]
    assert told["clean"] is False


def test_the_reason_is_that_of_now(house: House) -> None:
    """Once the load is known the reason says it, though the point has not changed since it was not."""
    house.traffic.rate_per_s = 150.0
    house.turns(30)
    assert house.board.done.count("apply") == 1
    assert house.desk.status.reason.startswith("a load of 15")


def test_a_board_that_was_never_had_is_said_with_its_cause(house: House) -> None:
    """Without an actuator from the beginning, event and reason say that the board cannot be set, and why."""
    house.board.fails.update(take=GONE, apply=GONE, read=GONE)
    house.turns(3)
    assert house.words("lease") == [f"the board cannot be set: {GONE}"]
    assert house.desk.status.reason == f"not set: {GONE}"


def test_a_daemon_that_never_reached_a_board_says_so_at_its_end(house: House) -> None:
    """It cannot know how a board was found that it never had."""
    house.board.fails.update(take=GONE, apply=GONE, read=GONE)
    house.turns(3)
    house.runner.stop()
    house.runner.run()
    assert house.words("stop") == ["the daemon has ended; no board was reached, and none was set"]


def test_a_right_that_is_lost_is_said_with_its_cause(house: House) -> None:
    """An actuator that goes away is an event with its words."""
    house.turns(5)
    house.board.fails.update(take=GONE, apply=GONE, read=GONE)
    house.turns(3)
    assert house.words("lease") == [f"the right to set the board is lost: {GONE}"]


def test_a_study_that_could_not_be_started_is_not_started_later(house: House) -> None:
    """A wish for a study that was answered with an error is taken back."""
    house.traffic.p99_s = 0.2
    house.turns(2)
    assert house.desk.status.phase == "safe"
    with pytest.raises(DeviceError, match="while the daemon is safe"):
        wish(house, StartStudy(5))
    assert house.runner.executor.state.study_wanted == ""
    house.traffic.p99_s = 0.05
    house.turns(700)
    assert house.desk.status.phase == "following"
    assert house.words("study") == []


def test_a_daemon_without_anything_to_follow_looks_on(tmp_path: Path) -> None:
    """Without profile and workload it reads the board, sets nothing, and says so."""
    house = House(tmp_path / "daemon", tuned=None)
    house.turns(5)
    assert house.desk.status.workload is None
    assert house.desk.status.power_w == pytest.approx(12.0)
    assert house.board.done == []


def test_wishes_from_another_thread_are_answered_while_it_waits(house: House) -> None:
    """Who asks from a thread gets the answer of the turn under way."""
    found: list[str] = []
    asker = threading.Thread(target=lambda: found.append(str(house.desk.ask(SetBudget(power_w=30.0))["words"])))
    asker.start()
    while not found:
        house.turns(1)
    asker.join()
    assert found == ["budget: at most 30 W"]


@pytest.mark.slow
def test_a_day_turns_without_growing(house: House) -> None:
    """After an hour of turns nothing that is kept has more than its bound."""
    house.turns(3600, each=lambda: None)
    assert len(house.runner._lateness._lately) <= 1000
    assert house.desk.status.late_p99_s < 0.02
    assert house.runner.executor.state.phase is Phase.FOLLOWING
    assert len(house.record.history(60)) >= 59


def test_the_profile_is_named(house: House) -> None:
    """The status names workload, profile and what the SLO is."""
    house.turns(2)
    shown = house.desk.status.workload
    assert shown is not None
    assert (shown.profile, shown.slo, shown.up) == (TUNED.name, TUNED.slo, True)


def test_a_driver_that_was_loaded_anew_is_noticed(house: House) -> None:
    """A counter of energy that began anew says so: what holds is verified and set again, and an event tells it."""
    house.turns(5)
    before = house.board.done.count("apply")
    house.board.anew = 1  # type: ignore[attr-defined]
    house.turns(1)
    assert house.words("driver") == ["the driver was loaded anew"]
    assert house.board.done.count("apply") == before + 1
    house.turns(5)
    assert len(house.words("driver")) == 1


def test_a_failed_reading_loses_no_joules(house: House) -> None:
    """What was drawn while the sensors were away is in the total once they are back."""
    house.turns(5)
    house.board.fails["read"] = GONE
    house.turns(4)
    house.board.fails.clear()
    house.turns(2)
    assert house.desk.status.energy_j == pytest.approx(12.0 * 10)


def test_a_budget_of_another_board_is_not_followed(tmp_path: Path) -> None:
    """It is said, and forgotten; on the same board, whatever its options are, it goes on."""
    first = House(tmp_path / "daemon")
    wish(first, SetBudget(power_w=25.0))
    first.turns(2)
    first.record.flush()
    same = House(tmp_path / "daemon", board="jetson?root=/elsewhere")
    assert same.accounts.budget is not None
    same.turns(2)
    same.record.flush()
    other = House(tmp_path / "daemon", board="nvml:0")
    assert other.accounts.budget is None
    assert any("is one for jetson" in words for words in other.words("budget"))


def test_a_power_no_point_can_keep_is_refused_at_once(house: House) -> None:
    """Below what the lowest rung draws without a request, the answer names what can be kept; the budget stays."""
    house.turns(2)
    with pytest.raises(InvalidInput, match=r"at most 4 W cannot be kept.*5 W"):
        wish(house, SetBudget(power_w=4.0))
    assert house.accounts.budget is None
    assert "at most 6 W" in wish(house, SetBudget(power_w=6.0))


def test_energy_that_does_not_suffice_is_said_in_the_first_answer(house: House) -> None:
    """A battery or a ration too small for the load is taken, and its answer names the nearest that can be met."""
    assert re.search(r"1 Wh do not last 9 h 00 min.*\d Wh would hold it", wish(house, BATTERY)), "no load is known yet"
    assert "before any load was seen" in house.words("budget")[-1]
    house.turns(5)
    for small in (BATTERY, SetBudget(wh_per_day=1.0)):
        assert re.search(r"even at the lowest points; .*\d Wh would hold it for .*, or 1 Wh for ", wish(house, small))
        assert house.words("budget")[-1].endswith(" min")
    assert wish(house, SetBudget(battery_wh=1e4, last_s=9 * 3600.0)) == "budget: 10000 Wh to last 9 h"


def test_taking_says_what_becomes_of_the_board(house: House) -> None:
    """It is set again, or as soon as the workload is up, or was not given back at all."""
    house.turns(5)
    assert "was not given back" in wish(house, Take())
    wish(house, Release("maintenance"))
    house.turns(2)
    assert "as soon as the workload is up" in wish(house, Take())
    house.turns(2)
    assert house.desk.status.phase == "following"


def test_a_workload_is_up_while_the_board_is_released(house: House) -> None:
    """What is served does not go away because its board is left alone."""
    house.turns(5)
    wish(house, Release("maintenance"))
    house.turns(2)
    assert house.desk.status.workload is not None
    assert house.desk.status.workload.up
    house.traffic.rate_per_s = None
    house.turns(2)
    assert not house.desk.status.workload.up


def test_what_a_refused_study_was_to_be_like_is_forgotten(tmp_path: Path) -> None:
    """The next one, begun by the daemon itself, has its own number of trials."""
    house = House(tmp_path / "daemon")
    house.turns(3)
    house.board.fails["lend"] = GONE
    before = house.studies.asked
    with pytest.raises(PolythrottleError, match="no study could be started"):
        wish(house, StartStudy(3, {"risk": "0.5"}))
    assert house.studies.asked == before


def test_a_budget_outlives_the_file_of_its_carbon(tmp_path: Path) -> None:
    """Without the file the limit in energy stands on, an event says so, and the next start has the file back."""
    curve = tmp_path / "carbon.csv"
    curve.write_text("time,g_per_kwh\n0,100\n2000000000,300\n")
    first = House(tmp_path / "daemon")
    wish(first, SetBudget(wh_per_day=100.0, carbon=str(curve)))
    first.turns(15)
    first.record.flush()
    curve.rename(tmp_path / "away.csv")
    without = House(tmp_path / "daemon")
    budget = without.accounts.budget
    assert budget is not None
    assert budget.words == "100 Wh a day"
    assert budget.spent_j > 0
    assert [words for words in without.words("budget") if "goes on" in words and "carbon.csv" in words] != []
    without.turns(15)
    without.record.flush()
    (tmp_path / "away.csv").rename(curve)
    again = House(tmp_path / "daemon")
    assert again.accounts.budget is not None
    assert again.accounts.budget.words == "100 Wh a day, shared out by carbon intensity"
    assert again.accounts.budget.spent_j > budget.spent_j
    assert not any("goes on" in words for words in again.words("budget")[1 + len(without.words("budget")) :])
