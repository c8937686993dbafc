"""Studies that another machine makes for the daemon."""

from pathlib import Path

import daemons
import pytest
from daemons import LADDER, House
from test_studying import profile

from polythrottle.catalog.tuned_profiles import write_profile
from polythrottle.daemon.commands import HostStudy, StartStudy, StopStudy
from polythrottle.daemon.hosted_study import CLAIM_S, HostedStudies, by_host
from polythrottle.domain.errors import InvalidInput


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    """Return a control loop whose studies a host makes."""
    monkeypatch.setattr(daemons, "Studies", HostedStudies)
    return bound(House(tmp_path / "daemon"))


def bound(house: House) -> House:
    """Join its studies with its loop, as the daemon does."""
    studies = house.studies
    assert isinstance(studies, HostedStudies)
    studies.wanted = lambda: house.runner.executor.state.study_wanted
    studies.want = house.runner.executor.want_study
    studies.tell = house.runner.events.tell
    studies.go_on()
    house.turns(5)
    return house


def say(house: House, **said: object) -> dict[str, object]:
    """Return what a host is answered."""
    answer = house.desk.hand_in(HostStudy(**{"host": "desk", **said}))  # type: ignore[arg-type]
    house.runner.answer()
    return dict(answer.result(timeout=0))


def lent(house: House) -> str:
    """Ask for a study, claim it, and return the claim under which the board is lent."""
    house.desk.hand_in(StartStudy(5, {"seed": "3"}))
    house.turns(2)
    claim = str(say(house)["claim"])
    assert say(house, claim=claim)["state"] == "lent"
    return claim


def test_a_study_waits_for_a_host_and_the_board_serves(house: House) -> None:
    """Nothing is lent before a host is there; after ten minutes somebody is told what to run, once."""
    assert say(house)["state"] == "none"
    asked = house.desk.hand_in(StartStudy(5))
    house.turns(1200)
    assert asked.result(timeout=0)["id"] == "study-1"
    assert house.desk.status.phase == "following"
    assert house.desk.status.study is not None
    assert house.desk.status.study.state == "waiting"
    assert "lend" not in house.board.done
    assert len([words for words in house.words("study") if "polythrottle study-host" in words]) == 1


def test_a_claimed_study_is_lent_and_its_profile_followed(house: House, tmp_path: Path) -> None:
    """A host gets device, options and limits, says how far it is, and its profile is compared with the old one."""
    claim = lent(house)
    answer = say(house, claim=claim, trials=3, best_j=0.5)
    assert (answer["device"], answer["trials"], answer["options"]) == ("sim:jetson-agx-orin", 5, {"seed": "3"})
    house.turns(2)
    assert house.desk.status.phase == "studying"
    assert house.desk.status.study is not None
    assert (house.desk.status.study.trials, house.desk.status.study.best_j) == (3, 0.5)
    write_profile(profile(LADDER), tmp_path / "found.toml")
    say(house, claim=claim, ended=True, profile=(tmp_path / "found.toml").read_text())
    assert house.board.done.count("take_back") == 1
    house.turns(3)
    assert house.desk.status.phase == "following"
    assert any("compared in turns" in words for words in house.words("study"))
    assert say(house)["state"] == "none"


def test_a_host_is_lent_what_the_day_leaves_of_late_requests(house: House, tmp_path: Path) -> None:
    """As a study here would be; what it has spent is shown while it runs, and told when it has ended."""
    house.studies._late_left = lambda requests: 7.25 if requests == 5 * 1005 else 0.0
    claim = lent(house)
    assert say(house, claim=claim)["error_budget"] == "7.25"
    say(house, claim=claim, trials=1, late=2.5)
    assert house.desk.status.study is not None
    house.turns(1)
    assert house.desk.status.study.words.endswith("by desk; 2.5 of 7.25 requests late beyond the SLO's own share")
    write_profile(profile(LADDER), tmp_path / "found.toml")
    answer = say(house, claim=claim, ended=True, late=3.0, profile=(tmp_path / "found.toml").read_text())
    assert answer["words"] == "the study has ended; 3 of 7.25 requests late beyond the SLO's own share"


def test_what_a_host_says_was_late_is_put_down_once(house: House) -> None:
    """However often it says so, and also where the study goes on with it or with another host, whose journal is new."""
    accounts = house.accounts
    house.studies._studied = accounts.studied
    house.studies._late_left = accounts.late_left
    before = accounts.late_left(5 * 1005)
    claim = lent(house)
    assert say(house, claim=claim)["counted"] is True
    for trials in (1, 1, 2):
        say(house, claim=claim, trials=trials, late=0.5 * trials, sent=100 * trials, bound="5.02")
    house.turns(1)
    assert house.desk.status.exploring.late == pytest.approx(1.0, rel=1e-3)
    assert house.desk.status.study is not None
    assert house.desk.status.study.words.endswith("1 of 5.02 requests late beyond the SLO's own share")
    assert say(house, claim=claim, leaves=True, late=1.5, sent=250, bound="5.02")["state"] == "ended"
    house.turns(3)
    assert accounts.late_left(5 * 1005) < before
    for host, late, in_all in (("desk", 1.5, 1.5), ("other", 1.0, 2.5)):
        claim = str(say(house, host=host)["claim"])
        house.turns(3)
        say(house, host=host, claim=claim, late=late, sent=250)
        assert accounts.shown_exploring.late == pytest.approx(in_all, rel=1e-3)
        say(house, host=host, claim=claim, leaves=True)
        house.turns(3)


def test_an_older_host_says_less_and_that_is_put_down(house: House) -> None:
    """How many were late, of requests that it does not count."""
    house.studies._studied = house.accounts.studied
    claim = lent(house)
    requests = house.accounts.shown_exploring.requests
    say(house, claim=claim, trials=1, late=2.0)
    assert house.accounts.shown_exploring.late == 2.0
    assert house.accounts.shown_exploring.requests == requests


@pytest.mark.parametrize("case", ["asked", "old host", "unbounded"])
def test_a_hosted_study_without_an_account_goes_on(house: House, case: str) -> None:
    """Somebody asked for a bound of its own, the host is older and says nothing, or nobody counts the day's."""
    if case == "old host":
        house.studies._late_left = lambda requests: 7.25
    options = {"error_budget": "3"} if case == "asked" else {}
    house.desk.hand_in(StartStudy(5, options))
    house.turns(2)
    claim = str(say(house)["claim"])
    answer = say(house, claim=claim)
    assert (answer["error_budget"], answer["options"]) == ("7.25" if case == "old host" else "", options)
    say(house, claim=claim, trials=1, late=None if case == "old host" else 2.0)
    house.turns(1)
    assert house.desk.status.study is not None
    assert house.desk.status.study.words == "somebody asked for it; by desk"
    assert say(house, claim=claim, ended=True)["words"].startswith("the study has ended; no point")  # type: ignore[attr-defined]


def test_a_second_host_is_refused(house: House) -> None:
    """One board has one study host."""
    lent(house)
    with pytest.raises(InvalidInput, match="desk is this board's study host already"):
        say(house, host="other")


def test_a_host_that_vanishes_loses_the_board(house: House) -> None:
    """The loan ends, the daemon follows its profile, and the study waits for the next host."""
    claim = lent(house)
    house.turns(int(CLAIM_S) + 3)
    assert house.desk.status.phase == "following"
    assert any("was not heard of" in words for words in house.words("study"))
    with pytest.raises(InvalidInput, match="this claim is over"):
        say(house, claim=claim)
    claim = str(say(house, host="other")["claim"])
    assert say(house, host="other", claim=claim)["id"] == "study-1"


def test_a_host_that_leaves_gives_the_board_back_at_once(house: House) -> None:
    """Another may go on with the study at once, under the same name and key."""
    claim = lent(house)
    first = say(house, claim=claim)
    assert say(house, claim=claim, leaves=True)["state"] == "ended"
    house.turns(3)
    assert house.board.done.count("take_back") == 1
    assert house.desk.status.phase == "following"
    claim = str(say(house, host="other")["claim"])
    house.turns(2)
    again = say(house, host="other", claim=claim)
    assert (again["id"], again["key"]) == (first["id"], first["key"])


def test_a_study_that_failed_at_its_host_is_not_made_again(house: House) -> None:
    """Else the board would be lent to it for ever; what went wrong is told."""
    claim = lent(house)
    say(house, claim=claim, ended=True, failed=True, words="its model is not there")
    house.turns(10)
    assert house.desk.status.phase == "following"
    assert any("failed at its host: its model is not there" in words for words in house.words("study"))
    assert say(house)["state"] == "none"
    house.desk.hand_in(StartStudy(5, {"seed": "3"}))
    house.turns(2)
    claim = str(say(house)["claim"])
    assert say(house, claim=claim)["id"] == "study-2"


@pytest.mark.parametrize("text", ["no [toml", "[x]\n", "x" * 70_000])
def test_what_is_no_profile_is_refused(house: House, text: str) -> None:
    """The host may give back another; nothing is left of the first."""
    claim = lent(house)
    with pytest.raises(InvalidInput, match="profile"):
        say(house, claim=claim, ended=True, profile=text)
    assert say(house, claim=claim)["state"] == "lent"


def test_a_waiting_study_waits_after_a_restart(house: House, tmp_path: Path) -> None:
    """Its trials and options are kept; stopped, it waits no more."""
    house.desk.hand_in(StartStudy(7, {"seed": "3"}))
    house.turns(2)
    house.record.close()
    again = bound(House(tmp_path / "daemon"))
    claim = str(say(again)["claim"])
    answer = say(again, claim=claim)
    assert (answer["trials"], answer["options"]) == (7, {"seed": "3"})
    again.desk.hand_in(StopStudy())
    again.turns(3)
    assert say(again)["state"] == "none"


def test_who_makes_studies() -> None:
    """A word that is neither is refused."""
    assert by_host("host")
    assert not by_host("itself")
    with pytest.raises(InvalidInput, match="made by itself or by a host"):
        by_host("me")
