"""Who may do what with which device: the permits' file, and who is at the other end of a socket."""

import grp
import json
import os
import pwd
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polythrottle.actuation.server import permits as module
from polythrottle.actuation.server import search_space_child
from polythrottle.actuation.server.device_lease import TokenBucket
from polythrottle.actuation.server.permits import Permit, Permits, Rights, allowed
from polythrottle.actuation.server.search_space_child import SpaceJob, permitted
from polythrottle.actuation.server.unix_socket import Peer, peer_of
from polythrottle.domain.errors import BadFile
from polythrottle.domain.space import Knob, SearchSpace

GROUP, USER = grp.getgrgid(os.getgid()).gr_name, pwd.getpwuid(os.getuid()).pw_name
MEMBER = Peer(1, 4001, frozenset({os.getgid()}))
STRANGER = Peer(2, 4002, frozenset({4002}))


def permits(folder: Path, text: str, own: int = 0) -> Permits:
    """Return the permits of a file's text."""
    file = folder / "permits.toml"
    file.write_text(text)
    file.chmod(0o600)
    found = Permits.read(file)
    return Permits(found._every, own)


def test_without_a_file_the_group_may_read_and_the_daemon_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Root and the process's own user may everything; a stranger may nothing, not even read."""
    monkeypatch.setattr(module, "FILE", tmp_path / "none")
    monkeypatch.setattr(module, "GROUP", GROUP)
    monkeypatch.setattr(module, "USER", USER)
    found = Permits(Permits.read()._every, own=77)
    assert found.rights(MEMBER, ["jetson"]) == Rights(True, False, ())
    daemon = Permits([each for each in Permits.read()._every if each.control], own=77)
    assert daemon.rights(Peer(1, os.getuid(), frozenset()), ["jetson"]) == Rights(True, True, (None,))
    assert found.rights(Peer(1, 0), ["jetson"]) == found.rights(Peer(1, 77), ["jetson"]) == Rights(True, True, (None,))
    assert found.rights(STRANGER, ["jetson"]) == Rights()
    assert [found.knows(each) for each in (MEMBER, STRANGER)] == [True, False]


def test_where_the_group_is_not_there_only_root_may(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without the group polythrottle lets nobody in by accident."""
    monkeypatch.setattr(module, "FILE", tmp_path / "none")
    monkeypatch.setattr(module, "GROUP", "no-such-group-here")
    monkeypatch.setattr(module, "USER", "no-such-user-here")
    found = Permits(Permits.read()._every, own=0)
    assert not found.knows(MEMBER)
    assert not found.knows(Peer(3, 5, frozenset()))


def test_a_file_grants_what_it_names(tmp_path: Path) -> None:
    """Reading and setting are apart, devices are patterns, knobs have their range in the unit they are named with."""
    found = permits(
        tmp_path,
        f"""
        [[permit]]
        group = "{GROUP}"
        devices = ["nvml:*"]
        [[permit]]
        group = "{GROUP}"
        devices = ["jetson"]
        control = true
        knobs = {{ gpu_max_mhz = [306, 1300], power_mode = ["15W"], mem_hz = true }}
        """,
        own=77,
    )
    assert found.rights(MEMBER, ["nvml:0"]) == Rights(True, False, ())
    assert found.rights(MEMBER, ["cpu"]) == Rights()
    mine = found.rights(MEMBER, ["jetson"])
    assert mine.control
    usual = {"gpu_max_hz": 1_600_000_000, "mem_hz": 5, "power_mode": "MAXN", "cpu_max_hz": 9}
    assert mine.allow({"gpu_max_hz": 306_000_000, "mem_hz": 1, "power_mode": "15W"}, usual)
    assert mine.allow(usual, usual)
    for wrong in ({"gpu_max_hz": 305_999_999}, {"gpu_max_hz": "306"}, {"power_mode": "30W"}, {"cpu_max_hz": 8}):
        assert not mine.allow(wrong, usual)
    assert not found.knows(STRANGER)


def test_two_permits_are_not_mixed(tmp_path: Path) -> None:
    """A point is allowed if one permit allows all of it."""
    rights = Rights(True, True, ({"mem_hz": (0.0, 10.0)}, {"gpu_max_hz": (0.0, 10.0)}))
    assert rights.allow({"mem_hz": 1}, {})
    assert rights.allow({"gpu_max_hz": 1}, {})
    assert not rights.allow({"mem_hz": 1, "gpu_max_hz": 1}, {})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("permit = 1", r"\[\[permit\]\]"),
        ("x = 1", r"\[\[permit\]\]"),
        ("[[permit]]", "one group or one user"),
        ('[[permit]]\ngroup = "root"\nuser = "root"', "one group or one user"),
        ('[[permit]]\ngroup = "no-such-group-here"', "no group 'no-such-group-here'"),
        ('[[permit]]\nuser = "no-such-user-here"', "no user"),
        ("[[permit]]\ngroup = 0", "must be a name"),
        ('[[permit]]\ngroup = "root"\ncontrol = 1', "true or false"),
        ('[[permit]]\ngroup = "root"\ndevice = "x"', "has device"),
        ('[[permit]]\ngroup = "root"\ndevices = "jetson"', "list of URIs"),
        ('[[permit]]\ngroup = "root"\nknobs = 1', "must be a table"),
        ('[[permit]]\ngroup = "root"\nknobs = { gpu_mx_mhz = [1, 2] }', "no knob"),
        ('[[permit]]\ngroup = "root"\nknobs = { gpu_max_mhz = [2, 1] }', "lowest, highest"),
        ('[[permit]]\ngroup = "root"\nknobs = { gpu_max_mhz = [nan, inf] }', "lowest, highest"),
        ('[[permit]]\ngroup = "root"\nknobs = { gpu_max_mhz = [true, 1] }', "lowest, highest"),
        ('[[permit]]\ngroup = "root"\nknobs = { gpu_max_mhz = false }', "lowest, highest"),
        ("not toml", "cannot read the permits"),
    ],
)
def test_a_file_that_cannot_be_understood_serves_nobody(text: str, says: str, tmp_path: Path) -> None:
    """The message names the file and what was expected."""
    with pytest.raises(BadFile, match=says) as caught:
        permits(tmp_path, text)
    assert "permits.toml" in str(caught.value)


def test_a_file_that_others_may_write_is_not_trusted(tmp_path: Path) -> None:
    """Nor a link, nor one that was named and is not there."""
    (tmp_path / "permits.toml").write_text("")
    (tmp_path / "permits.toml").chmod(0o666)
    with pytest.raises(BadFile, match="only this user may write"):
        Permits.read(tmp_path / "permits.toml")
    (tmp_path / "link").symlink_to(tmp_path / "permits.toml")
    with pytest.raises(BadFile, match="cannot read the permits"):
        Permits.read(tmp_path / "link")
    with pytest.raises(BadFile, match="there is no"):
        Permits.read(tmp_path / "none")


@given(st.integers(-10, 10) | st.floats(-10, 10) | st.text(max_size=2))
def test_a_span_holds_numbers_between_its_ends_alone(level: float | str) -> None:
    """Names are never numbers, and what is not listed is not allowed."""
    assert allowed({"a": (-2.0, 3.0)}, "a", level) == (not isinstance(level, str) and -2 <= level <= 3)
    assert allowed({"a": ("x", "y")}, "a", level) == (level in ("x", "y"))
    assert not allowed({"a": ()}, "b", level)
    assert allowed(None, "b", level)


def test_the_kernel_tells_who_is_there() -> None:
    """Process, user and groups of the other end, supplementary ones too."""
    here, there = socket.socketpair()
    with here, there:
        peer = peer_of(here)
    assert (peer.pid, peer.uid) == (os.getpid(), os.getuid())
    assert peer.gids == {os.getgid(), *os.getgroups()}
    assert peer.name == USER
    assert Peer(1, 3_999_999).name == "3999999"


AS_SYSTEMD = """
import os, socket, sys
from polythrottle.actuation.server.unix_socket import peer_of
os.setgroups([int(each) for each in sys.argv[1].split(",")])
os.setgid(65534)
os.setuid(65534)
with socket.socketpair()[0] as here:
    print(*sorted(peer_of(here).gids))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a process groups")
@pytest.mark.parametrize(("many", "seen"), [(2, True), (255, True), (300, False)])
def test_groups_that_only_the_process_has_are_seen(many: int, seen: bool) -> None:
    """As systemd's SupplementaryGroups= gives them: no user is listed in them. More than 256 Python cannot ask for."""
    given = range(61_000, 61_000 + many)
    command = [sys.executable, "-c", AS_SYSTEMD, ",".join(map(str, given))]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert (set(map(str, given)) <= set(told)) is seen
    assert "65534" in told


@given(st.lists(st.floats(0, 3), min_size=1, max_size=60))
def test_no_more_is_done_than_the_pace_allows(gaps_s: list[float]) -> None:
    """In any stretch of time at most the burst and so much a second; what is refused may be done when it said."""
    pace, now_s, done = TokenBucket(2.0, 4), 100.0, []
    for gap_s in gaps_s:
        now_s += gap_s
        wait_s = pace.wait_s(now_s)
        if wait_s:
            now_s += wait_s + 1e-9
            assert pace.wait_s(now_s) == 0
        done.append(now_s)
    for first, start_s in enumerate(done):
        for last, end_s in enumerate(done[first:], 1):
            assert last <= 4 + 2 * (end_s - start_s) + 1e-6, (first, end_s)


def test_a_permit_is_for_its_user_or_its_group() -> None:
    """One without either is for nobody."""
    assert not Permit(None).concerns(STRANGER, ["jetson"])
    assert Permit(None, uid=4002).concerns(STRANGER, ["jetson"])
    assert Permit(4002).concerns(STRANGER, ["jetson"])


def test_only_points_that_permits_allow_are_offered_and_the_default_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Permits add up; one without bounds allows all; a knob's levels keep their names."""
    clocks = (400_000_000, 800_000_000, 1_200_000_000)
    knobs = (Knob("gpu_max_hz", clocks), Knob("power_mode", ("MAXN", "15W"), label=True))
    space = SearchSpace.grid(knobs, {"gpu_max_hz": clocks[2], "power_mode": "MAXN"})
    assert permitted(space, [None, {"gpu_max_hz": (0, 1)}]) is space
    low = permitted(space, [{"gpu_max_hz": (0, 400_000_000)}])
    assert {point["gpu_max_hz"] for point in low} == {clocks[0], clocks[2]}
    assert low.default == space.default
    assert [knob.label for knob in low.knobs if knob.name == "power_mode"] == [True]
    both = permitted(space, [{"gpu_max_hz": (0, 400_000_000)}, {"gpu_max_hz": (800_000_000, 800_000_000)}])
    assert {point["gpu_max_hz"] for point in both} == set(clocks)
    assert len(permitted(space, [])) == 1


def test_a_space_that_is_too_large_or_torn_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has not come yet is waited for; a process that is ended before it has answered told nothing."""
    monkeypatch.setattr(search_space_child, "MOST_ANSWER", 100)
    job = SpaceJob("sim:v100", ["power_limit_w"], [None])
    while not job.gather():
        select.select([job.output], [], [], 60.0)
    assert "too large to be sent; name fewer knobs" in json.dumps(job.result())
    assert job.over
    killed = SpaceJob("sim:v100", ["power_limit_w"], [None])
    assert "could not be computed in time or memory" in json.dumps(killed.result())
