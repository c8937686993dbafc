"""Which profile is followed: applied by hand, confirmed, rolled back, and remembered."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from daemons import LADDER, TUNED, House
from test_studying import profile

from polythrottle.catalog.tuned_profiles import read_profile, write_profile
from polythrottle.daemon.client import Client
from polythrottle.daemon.commands import Answer, ApplyProfile, Command, Confirm, Release, Take
from polythrottle.daemon.web.access import WebOptions
from polythrottle.daemon.web.server import serve
from polythrottle.domain.errors import BadFile, InvalidInput, UnknownName
from polythrottle.domain.ladder import Ladder
from polythrottle.storage.tables import lines


@pytest.fixture
def house(tmp_path: Path) -> House:
    """Return a control loop on a scripted board that follows its first profile."""
    made = House(tmp_path / "daemon")
    made.turns(5)
    return made


@pytest.fixture
def other(tmp_path: Path) -> str:
    """Return the file of another profile, of two rungs."""
    path = tmp_path / "other.toml"
    write_profile(profile(Ladder(0.1, LADDER.rungs[1:])), path)
    return str(path)


def wish(house: House, wished: Command) -> str:
    """Hand a wish in, let the loop answer, and return its words."""
    answer = house.desk.hand_in(wished)
    house.runner.answer()
    return str(answer.result(timeout=0)["words"])


def followed(house: House) -> str | None:
    """Return the profile the status shows."""
    shown = house.desk.status.workload
    return None if shown is None else shown.profile


def test_an_applied_profile_is_followed_and_rolled_back_unless_confirmed(house: House, other: str) -> None:
    """Without a confirmation the profile before comes back when the time is over, and an event says so."""
    assert "comes back in 10 s" in wish(house, ApplyProfile(other, 10.0))
    assert (followed(house), house.desk.status.unconfirmed) == (other, other)
    house.turns(5)
    assert followed(house) == other
    assert house.desk.status.rung is not None
    assert house.desk.status.rung.of == 2
    assert house.desk.status.confirm_left_s == pytest.approx(6.0, abs=1.5)
    house.turns(10)
    assert followed(house) == TUNED.name
    assert any("nobody confirmed" in words for words in house.words("profile"))


@pytest.mark.parametrize(
    "asks",
    [
        lambda client, folder: client.apply(folder / "other.toml"),
        lambda client, folder: client.budget(wh_per_day=500.0, carbon=folder / "carbon.csv"),
    ],
    ids=["profile", "carbon"],
)
def test_no_file_is_read_in_the_control_loop(
    house: House, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: Callable[[Client, Path], Answer]
) -> None:
    """What a request names is read beside it, whatever disk or size: guards go on meanwhile."""
    (tmp_path / "carbon.csv").write_text("time,g_per_kwh\n0,1\n1,2\n")
    read_by = []

    def noted(read: Callable[..., object]) -> Callable[..., object]:
        def reads(*words: object, **more: object) -> object:
            read_by.append(threading.current_thread())
            return read(*words, **more)

        return reads

    monkeypatch.setattr("polythrottle.daemon.followed_profile.read_profile", noted(read_profile))
    monkeypatch.setattr("polythrottle.daemon.budgets.lines", noted(lines))
    woken, answers = threading.Event(), list[Answer]()
    house.desk.on_wish(woken.set)
    with serve(house.desk, WebOptions(tmp_path / "d.sock")):
        asker = threading.Thread(target=lambda: answers.append(asks(Client(tmp_path / "d.sock"), tmp_path)))
        asker.start()
        assert woken.wait(30)
        house.runner.answer()
        asker.join()
    assert answers
    assert len(read_by) == 1
    assert threading.current_thread() not in read_by


def test_a_file_too_large_for_a_profile_is_refused(house: House, tmp_path: Path) -> None:
    """In one line, without being read; so is one that is none."""
    large = tmp_path / "large.toml"
    large.write_bytes(b"#" * 20_000_000)
    with pytest.raises(BadFile, match=r"large\.toml cannot be read: it is larger than 1 MB"):
        wish(house, ApplyProfile(str(large)))
    (tmp_path / "kernel.toml").symlink_to("/proc/self/status")
    with pytest.raises(BadFile, match=r"kernel\.toml cannot be read: it is one of the kernel"):
        wish(house, ApplyProfile(str(tmp_path / "kernel.toml")))


def test_a_profile_for_a_board_that_is_left_alone_waits(house: House, other: str) -> None:
    """While it is released, or way is given, nothing is followed: answers and events say when it will be, and how."""
    wish(house, Release("maintenance"))
    house.turns(2)
    said = wish(house, ApplyProfile(other, 60.0))
    assert said.startswith(f"{other} will be followed once the board is taken again (r in polythrottle top, or POST")
    assert "is kept, and will be followed once the board is taken" in wish(house, Confirm())
    wish(house, ApplyProfile(other, 2.0))
    house.turns(4)
    assert [("is followed" in words) for words in house.words("profile")] == [False] * 4
    wish(house, Take())
    house.turns(4)
    assert "is followed; the one before" in wish(house, ApplyProfile(other, 60.0))
    house.board.foreign = ("gpu_max_hz",)
    house.turns(60)
    assert house.desk.status.phase == "yielded"
    assert "once the board is set again: after a while by itself" in wish(house, ApplyProfile(other, 60.0))


def test_a_confirmed_profile_stays(house: House, other: str) -> None:
    """Confirmed, it is followed for good, and there is nothing more to confirm."""
    wish(house, ApplyProfile(other, 10.0))
    assert "is kept" in wish(house, Confirm())
    house.turns(20)
    assert followed(house) == other
    assert house.desk.status.unconfirmed == ""
    with pytest.raises(InvalidInput, match="no profile to confirm"):
        wish(house, Confirm())


def test_the_one_before_two_unconfirmed_ones_comes_back(house: House, other: str) -> None:
    """Applying twice without confirming goes back to what was followed before both."""
    wish(house, ApplyProfile(other, 10.0))
    wish(house, ApplyProfile(other, 10.0))
    house.turns(15)
    assert followed(house) == TUNED.name


def test_a_kept_profile_is_followed_by_the_next_daemon(tmp_path: Path, house: House, other: str) -> None:
    """A daemon started with the same profile goes on with what was kept; one started with another does not."""
    wish(house, ApplyProfile(other, None))
    house.turns(1)
    same = House(tmp_path / "daemon")
    same.runner.go_on()
    same.turns(1)
    assert followed(same) == other
    elsewhere = House(tmp_path / "daemon", replace(TUNED, name="b.toml"))
    elsewhere.runner.go_on()
    elsewhere.turns(1)
    assert followed(elsewhere) == "b.toml"


def test_a_kept_profile_that_is_gone_is_said(tmp_path: Path, house: House, other: str) -> None:
    """If its file cannot be read any more, the one given is followed, and an event says why."""
    wish(house, ApplyProfile(other, None))
    house.turns(1)
    Path(other).unlink()
    again = House(tmp_path / "daemon")
    again.runner.go_on()
    again.turns(1)
    assert followed(again) == TUNED.name
    assert any("cannot be followed any more" in words for words in again.words("profile"))


def test_profiles_that_cannot_be_followed_are_refused(tmp_path: Path, house: House, other: str) -> None:
    """Unknown, broken, for another workload or another board: an error in words, and nothing changes."""
    (tmp_path / "broken.toml").write_text("device = 5")
    write_profile(replace(profile(), workload="another.onnx"), tmp_path / "another.toml")
    write_profile(replace(profile(), identity={"l4t": "35.1"}), tmp_path / "old.toml")
    for name, error in (("none", UnknownName), ("broken", BadFile), ("another", InvalidInput), ("old", BadFile)):
        house.identity = {"l4t": "36.3"} if name == "old" else {}
        with pytest.raises(error):
            wish(house, ApplyProfile(str(tmp_path / f"{name}.toml")))
    with pytest.raises(InvalidInput, match="above zero"):
        wish(house, ApplyProfile(other, 0.0))
    assert followed(house) == TUNED.name


def test_a_comparison_goes_on_after_a_kill(tmp_path: Path, house: House, other: str) -> None:
    """The next daemon compares the two again, and one that is started after its end does not."""
    house.runner._compare(other)
    house.turns(2)
    assert followed(house) == other
    again = House(tmp_path / "daemon")
    again.runner.go_on()
    again.turns(2)
    assert any("is compared in turns" in words for words in again.words("study"))
    assert followed(again) == other
    wish(again, ApplyProfile(TUNED.name if Path(TUNED.name).exists() else other, None))
    again.turns(1)
    third = House(tmp_path / "daemon")
    assert third.runner.selector.compared is None


def test_a_comparison_of_another_profile_is_not_gone_on_with(tmp_path: Path, house: House, other: str) -> None:
    """A daemon that was started with another profile has nothing to compare it with."""
    house.runner._compare(other)
    house.turns(2)
    elsewhere = House(tmp_path / "daemon", replace(TUNED, name="b.toml"))
    elsewhere.runner.go_on()
    assert followed(elsewhere) in (None, "b.toml")
    assert not any("is compared" in words for words in elsewhere.words("study")[1:])
