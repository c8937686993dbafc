"""Each verb of the actuator on a planted Jetson: what it answers, and whom it refuses."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from actuators import ALICE, BOB, GPU, MEM, Bench, bench

from polythrottle.actuation.client.connection import Line
from polythrottle.actuation.server import request_handler, search_space_child
from polythrottle.actuation.server.permits import Permit, Permits
from polythrottle.actuation.wire import Later, LeaseOver, Lent, space_from
from polythrottle.backends import open_device
from polythrottle.backends.jetson import JetsonDevice
from polythrottle.backends.served_devices import given_uri, served_uri
from polythrottle.domain.errors import (
    DeviceError,
    InvalidInput,
    KnobRejected,
    PermissionDenied,
    PolythrottleError,
    StorageError,
    UnknownName,
)
from polythrottle.testing import FakeKernel, Fault

EVERYONE = Permits([Permit(None, ALICE.uid, control=True), Permit(None, BOB.uid, control=True)], own=0)


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Bench]:
    """An actuator that root, Alice and Bob may ask everything."""
    with bench(tmp_path, EVERYONE) as found:
        yield found


@pytest.fixture
def root(board: Bench) -> Line:
    """A connection of root."""
    return board.line()


def levels(line: Line, name: str) -> list[Any]:
    """Return the levels of a knob."""
    return next(each["levels"] for each in line.ask("describe", device="")["knobs"] if each["name"] == name)


def take(line: Line, **fields: Any) -> str:
    """Take the only device and return the token."""
    token: str = line.ask("take", **{"device": "", "seconds": 30, **fields})["token"]
    return token


def test_hello_says_who_one_is_and_what_one_may(board: Bench) -> None:
    """Versions, user, devices, and the limits of asking."""
    told = board.line(ALICE).ask("hello")
    uri = f"jetson?root={board.root}"
    assert told["versions"] == [1]
    assert told["you"] == {"uid": ALICE.uid, "name": str(ALICE.uid)}
    assert (told["read"], told["control"]) == ([uri], [uri])
    assert (told["most_s"], told["writes_per_s"], told["burst"]) == (60, 10, 20)
    assert told["polythrottle"]


def test_devices_says_who_holds_what(board: Bench, root: Line) -> None:
    """Title and holder, and whether it is lent."""
    (free,) = root.ask("devices")["devices"]
    assert (free["holder"], free["lent"], free["control"]) == ("", False, True)
    assert "Orin Nano" in free["title"]
    token = take(board.line(ALICE), holder="the daemon")
    root.ask("hello")
    (held,) = board.line(BOB).ask("devices")["devices"]
    assert held["holder"] == "the daemon, 4001 (process 101)"
    board.lines[1].ask("lend", token=token, seconds=5)
    assert root.ask("devices")["devices"][0]["lent"]


def test_describe_is_what_the_device_says_of_itself(board: Bench, root: Line) -> None:
    """Identity, energy, presets, findings, and every knob that works with its levels."""
    told = root.ask("describe", device=f"jetson?root={board.root}")
    device = JetsonDevice(root=str(board.root))
    assert told["uri"] == device.uri
    assert (told["title"], told["boundary"]) == (device.title, device.boundary)
    assert told["energy_kind"] == "simulated"
    assert told["identity"] == dict(device.identity)
    assert told["presets"] == {name: dict(point) for name, point in device.presets.items()}
    assert [each["subject"] for each in told["findings"]] == [each.subject for each in device.findings()]
    assert {each["name"] for each in told["knobs"]} >= {GPU, MEM, "cpu_max_hz", "cpu_cores"}
    # In 25W, as the board starts, no other mode keeps below what was found without a reboot.
    assert not [each for each in device.findings() if each.subject == "power_mode" and each.works]
    assert "power_mode" not in {each["name"] for each in told["knobs"]}
    assert {each["name"] for each in told["knobs"] if each["searched"]} == set(device.space.names)


@pytest.mark.slow
def test_the_search_space_is_the_devices(board: Bench, root: Line) -> None:
    """The usual knobs, those that are named, and an error of the device as it is."""
    for knobs in (None, [GPU], [GPU, "cpu_max_hz"]):
        found = space_from(root.ask("space", device="", knobs=knobs))
        assert found.fingerprint == JetsonDevice(root=str(board.root), knobs=knobs).space.fingerprint
    with pytest.raises(UnknownName, match="gpu_mx"):
        root.ask("space", device="", knobs=["gpu_mx"])
    assert space_from(root.ask("space", device="")).names


def test_a_point_is_applied_read_back_and_put_back(board: Bench, root: Line) -> None:
    """What is left out goes to its default; release gives the board back as it was."""
    before = board.held()
    token, low = take(root), levels(root, MEM)[0]
    assert root.ask("apply", token=token, point={MEM: low, GPU: levels(root, GPU)[1]})["point"][MEM] == low
    assert board.held() != before
    found = root.ask("apply", token=token, point={MEM: low})
    assert found["point"] == {MEM: low}
    assert found["took_s"] > 0
    assert JetsonDevice(root=str(board.root)).read().clocks_hz["mem"] == low
    assert root.ask("restore", token=token) == {"left": []}
    assert board.held() == before
    root.ask("apply", token=token, point={MEM: low})
    assert root.ask("release", token=token) == {"left": [], "owed": ""}
    assert board.held() == before
    with pytest.raises(LeaseOver, match="take the device again"):
        root.ask("apply", token=token, point={MEM: low})


@pytest.mark.parametrize(
    "point",
    [
        {"gpu_mx_hz": 1},
        {MEM: 1},
        {MEM: 204_000_000.5},
        {MEM: "204000000"},
        {"power_mode": 0},
        {"": 1},
        {MEM: 10**300},
    ],
)
def test_only_levels_of_the_devices_own_knobs_are_set(board: Bench, root: Line, point: dict[str, Any]) -> None:
    """Whatever else is asked for is refused before anything is written."""
    before, written = board.held(), FakeKernel(board.root).writes()
    token = take(root)
    with pytest.raises(KnobRejected):
        root.ask("apply", token=token, point=point)
    assert board.held() == before
    assert FakeKernel(board.root).writes() == written


def test_readings_need_no_lease_and_never_fall(board: Bench, root: Line) -> None:
    """Energy goes on from one reader, lease and device to the next."""
    joules = [root.ask("read", device="")["energy_j"]]
    token = take(root)
    for _ in range(3):
        reading = root.ask("read", device="")
        joules.append(reading["energy_j"])
    root.ask("release", token=token)
    joules.append(root.ask("read", device="")["energy_j"])
    board.time.now_s += 61
    root.ask("hello")
    assert board.service.next_s is None
    joules.append(root.ask("read", device="")["energy_j"])
    assert joules == sorted(joules)
    assert joules[3] > joules[1]
    always = {"time_s", "energy_j", "temperature_c", "clocks_hz", "throttled", "anew"}
    assert set(reading) == always | {"cuts", "cut_s"}  # of an Orin that tells how often and for how long it cuts clocks


def test_a_second_one_who_takes_is_refused_with_the_holders_name(board: Bench) -> None:
    """Another user, and the same user without the token."""
    alice, bob = board.line(ALICE), board.line(BOB)
    token = take(alice, holder="the daemon")
    for line, fields in ((bob, {}), (alice, {}), (bob, {"token": token}), (alice, {"token": "x"})):
        with pytest.raises(DeviceError, match="held by the daemon, 4001"):
            take(line, **fields)
    with pytest.raises(PermissionDenied, match="another user"):
        bob.ask("renew", token=token, seconds=9)


def test_the_token_of_a_running_lease_resumes_it(board: Bench) -> None:
    """The point stays, the old token is void, and after its end there is a new lease with nothing applied."""
    alice = board.line(ALICE)
    first, low = take(alice), levels(alice, MEM)[0]
    alice.ask("apply", token=first, point={MEM: low})
    again = board.line(ALICE).ask("take", device="", seconds=30, token=first)
    assert (again["resumed"], again["point"]) == (True, {MEM: low})
    with pytest.raises(LeaseOver):
        alice.ask("apply", token=first, point={})
    board.time.now_s += 31
    new = board.line(ALICE).ask("take", device="", seconds=30, token=again["token"])
    assert (new["resumed"], new["point"]) == (False, {})


@pytest.mark.slow
def test_a_lease_that_is_not_renewed_ends_with_the_board_as_found(board: Bench, root: Line) -> None:
    """Renewing puts the end off; the end comes without anybody's asking for it."""
    before, low = board.held(), levels(root, MEM)[0]
    token = take(root)
    root.ask("apply", token=token, point={MEM: low})
    board.time.now_s += 29
    assert root.ask("renew", token=token, seconds=60) == {"seconds": 60.0, "lent": False}
    board.time.now_s += 59
    root.ask("apply", token=token, point={MEM: low})
    assert board.held() != before
    board.time.now_s += 2
    assert root.ask("devices")["devices"][0]["holder"] == ""
    assert board.held() == before


def test_no_lease_runs_out_over_a_slow_call_of_its_holder(
    board: Bench, root: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot renew meanwhile: the lease is put off by what the call took, once until it is renewed."""
    token, holding = take(root, seconds=5), board.service.holdings[0]

    def slow(device: object, point: object) -> None:
        board.time.now_s += 40.0  # as nvpmodel may take

    monkeypatch.setattr(holding, "_set", slow)
    for _ in range(2):
        root.ask("apply", token=token, point={})
        assert root.ask("renew", token=token, seconds=5)["seconds"] == 5
    root.ask("apply", token=token, point={})
    root.ask("apply", token=token, point={})
    with pytest.raises(LeaseOver):
        root.ask("renew", token=token, seconds=5)


def test_a_lease_begins_when_the_device_is_there(board: Bench, root: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that took."""
    holding = board.service.holdings[0]
    enter = holding._enter

    def slow() -> None:
        enter()
        board.time.now_s += 40.0

    monkeypatch.setattr(holding, "_enter", slow)
    token = take(root, seconds=5)
    assert root.ask("renew", token=token, seconds=5)["seconds"] == 5


def test_nobody_else_prolongs_a_lease(board: Bench, root: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers who keep the actuator busy, and a holder of another process, leave the end of a lease where it was."""
    before, holding = board.held(), board.service.holdings[0]
    monkeypatch.setattr("polythrottle.actuation.server.request_handler.boot_s", board.time)
    read = holding.read

    def slow() -> dict[str, Any]:
        board.time.now_s += 1.0
        return read()

    alice, bob = board.line(ALICE), board.line(BOB)
    token = take(alice, seconds=3)
    alice.ask("apply", token=token, point={MEM: levels(root, MEM)[0]})
    monkeypatch.setattr(holding, "read", slow)
    began_s = board.time.now_s
    while bob.ask("devices")["devices"][0]["holder"]:
        bob.ask("read", device="")
        alice.ask("read", device="")  # its process lives, but shows no token
    assert board.time.now_s - began_s <= 4.0
    assert board.held() == before


def test_a_slow_call_puts_off_the_loan_and_what_else_its_process_holds(tmp_path: Path) -> None:
    """The lender's lease with the borrower's call, and the caller's other device, but nobody else's."""
    uris = ("sim:jetson-nano", "sim:jetson-tx2", "sim:jetson-agx-orin")
    with bench(tmp_path, EVERYONE, uris) as board:
        alice, bob = board.line(ALICE), board.line(BOB)
        mine = [take(alice, device=uri, seconds=5) for uri in uris[:2]]
        others = take(bob, device=uris[2], seconds=5)
        loan = alice.ask("lend", token=mine[0], seconds=5)["token"]
        first = board.service.holdings[0]
        restore = first.restore

        def slow() -> tuple[str, ...]:
            board.time.now_s += 40.0
            return restore()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(first, "restore", slow)
            alice.ask("restore", token=loan)
        for token in (loan, *mine):
            assert alice.ask("renew", token=token, seconds=5)["seconds"] == 5
        with pytest.raises(LeaseOver):
            bob.ask("renew", token=others, seconds=5)


def test_a_loan_lets_another_process_set_and_not_the_lender(board: Bench) -> None:
    """Until it is given back, taken back, or not renewed: then the board is as found, the lender sets again."""
    alice, child = board.line(ALICE), board.line(ALICE)
    token, low = take(alice), levels(alice, MEM)[0]
    before = board.held()
    ends = (
        lambda loan: child.ask("release", token=loan),
        lambda loan: alice.ask("take_back", token=token),
        lambda loan: setattr(board.time, "now_s", board.time.now_s + 6),
    )
    for end in ends:
        loan = alice.ask("lend", token=token, seconds=5, holder="a study")["token"]
        child.ask("apply", token=loan, point={MEM: low})
        assert alice.ask("renew", token=token, seconds=60)["lent"]
        for verb, fields in (("apply", {"point": {}}), ("restore", {}), ("lend", {"seconds": 5})):
            with pytest.raises(Lent, match="a study"):
                alice.ask(verb, token=token, **fields)
        end(loan)
        alice.ask("hello")
        assert board.held() == before
        with pytest.raises(LeaseOver):
            child.ask("apply", token=loan, point={})
        alice.ask("apply", token=token, point={MEM: low})
        alice.ask("restore", token=token)
    assert alice.ask("take_back", token=token) == {"left": []}


def test_a_loan_is_the_lenders_to_give(board: Bench) -> None:
    """Whoever was lent the device can neither lend it on nor take it back; the end of the lease ends the loan."""
    alice = board.line(ALICE)
    token = take(alice)
    loan = alice.ask("lend", token=token, seconds=60)["token"]
    for verb, fields in (("lend", {"seconds": 5}), ("take_back", {})):
        with pytest.raises(PermissionDenied, match="only who has taken"):
            alice.ask(verb, token=loan, **fields)
    with pytest.raises(PermissionDenied, match="another user"):
        board.line(BOB).ask("apply", token=loan, point={})
    alice.ask("release", token=token)
    with pytest.raises(LeaseOver):
        alice.ask("renew", token=loan, seconds=5)


def test_what_somebody_else_wrote_is_named(board: Bench, root: Line) -> None:
    """Verify tells the knob, restoring leaves the value and names the control."""
    token = take(root)
    assert root.ask("verify", token=token) == {"knobs": []}
    root.ask("apply", token=token, point={GPU: levels(root, GPU)[2], "cpu_max_hz": levels(root, "cpu_max_hz")[0]})
    assert root.ask("verify", token=token) == {"knobs": []}
    key = next(write.key for write in FakeKernel(board.root).writes() if write.key.endswith("/max_freq"))
    path = board.root / key.removeprefix(str(board.root)).lstrip("/")
    path.write_text(f"{levels(root, GPU)[1]}\n")
    assert root.ask("verify", token=token) == {"knobs": [GPU]}
    (left,) = root.ask("release", token=token)["left"]
    assert "max_freq" in left


def test_writes_are_no_more_than_so_many_a_second(board: Bench, root: Line) -> None:
    """Twenty at once and ten a second; who asks too early is told when."""
    token = take(root)
    for _ in range(20):
        root.ask("apply", token=token, point={})
    with pytest.raises(Later) as caught:
        root.ask("apply", token=token, point={})
    assert 0 < caught.value.after_s <= 0.11
    board.time.now_s += 0.11
    root.ask("apply", token=token, point={})


@pytest.mark.slow
def test_requests_of_a_user_are_no_more_than_so_many(board: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who asks without end is told to wait, while others are served."""
    monkeypatch.setattr(request_handler, "time", SimpleNamespace(monotonic=lambda: 5.0))  # however slow this machine is
    alice, bob = board.line(ALICE), board.line(BOB)

    def flood() -> None:
        for _ in range(2000):
            alice.ask("hello")

    with pytest.raises(Later, match="too much at once"):
        flood()
    bob.ask("hello")


PERMIT = Permit(None, ALICE.uid, control=True, spans={GPU: (0.0, 500e6), MEM: ()})


@pytest.mark.slow
def test_a_permit_bounds_what_is_offered_and_what_is_taken(tmp_path: Path) -> None:
    """Levels, search space and points; what the board was found at may always be set."""
    with bench(tmp_path, Permits([PERMIT, Permit(None, BOB.uid)], own=0)) as board:
        root, alice, bob = board.line(), board.line(ALICE), board.line(BOB)
        every, found = levels(root, GPU), levels(alice, GPU)
        assert found == [each for each in every if each <= 500e6 or each == every[-1]]
        assert levels(alice, MEM) == levels(root, MEM)
        assert len(levels(alice, "cpu_max_hz")) == 1
        space = space_from(alice.ask("space", device="", knobs=[GPU, MEM]))
        assert list(space.knob(GPU).levels) == found
        token = take(alice)
        alice.ask("apply", token=token, point={GPU: found[0], MEM: levels(root, MEM)[0]})
        alice.ask("apply", token=token, point=dict(space.default))
        for wrong in ({GPU: every[-2]}, {"cpu_max_hz": levels(root, "cpu_max_hz")[0]}):
            with pytest.raises(PermissionDenied, match="permits do not let 4001 set"):
                alice.ask("apply", token=token, point=wrong)
        assert len(space_from(bob.ask("space", device=""))) == 1
        assert bob.ask("read", device="")["clocks_hz"]
        with pytest.raises(PermissionDenied, match="but not set"):
            take(bob)


def test_a_device_one_may_not_see_is_not_there(tmp_path: Path) -> None:
    """Of several devices each shows those that are permitted, and setting alone does not let one read."""
    permits = [Permit(None, ALICE.uid, ("sim:*",)), Permit(None, BOB.uid, ("*",), read=False, control=True)]
    uris = ("sim:jetson-nano", "sim:jetson-tx2?seed=3")
    with bench(tmp_path, Permits([permits[0], permits[1]], own=0), uris) as board:
        alice, bob = board.line(ALICE), board.line(BOB)
        assert [each["uri"] for each in alice.ask("devices")["devices"]] == list(uris)
        with pytest.raises(UnknownName, match="jetson-nano"):
            alice.ask("read", device="sim:jetson-nan")
        with pytest.raises(UnknownName):
            alice.ask("read", device="")
        with pytest.raises(PermissionDenied, match="do not let"):
            bob.ask("read", device=uris[0])
        assert bob.ask("take", device=uris[0], seconds=1)["token"]
        assert bob.ask("devices")["devices"] == []


def test_a_device_goes_by_its_own_name_too(tmp_path: Path) -> None:
    """As one that is named by an index and tells its UUID; also before anybody has had it described."""
    uri = f"jetson?root={tmp_path / 'b'}"
    with bench(tmp_path, uris=(f"{uri}&hz=10",)) as board:
        assert board.line().ask("read", device=uri)["clocks_hz"]
        assert board.line().ask("take", device=f"{uri}&hz=10", seconds=1)["token"]


def test_a_simulated_board_can_be_served_for_trying_out(tmp_path: Path) -> None:
    """Its time passes as it does here, and it says that it is simulated."""
    with bench(tmp_path, uris=("sim:jetson-agx-orin",)) as board:
        root = board.line()
        assert root.ask("describe", device="")["energy_kind"] == "simulated"
        assert root.ask("describe", device="")["identity"] == {"board": "sim:jetson-agx-orin"}
        token = take(root)
        root.ask("apply", token=token, point={GPU: levels(root, GPU)[0]})
        first, second = (root.ask("read", device="") for _ in range(2))
        assert second["energy_j"] > first["energy_j"]
        watts = (second["energy_j"] - first["energy_j"]) / (second["time_s"] - first["time_s"])
        assert 1 < watts < 100
        assert root.ask("verify", token=token) == {"knobs": []}
        assert root.ask("release", token=token) == {"left": [], "owed": ""}


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"verb": "hello", "v": 0}, "version 1, the request is of version 0; update"),
        ({"verb": "hello", "v": 2}, "of version 2"),
        ({"verb": "hello", "v": True}, "of version none"),
        ({"verb": "hello", "id": -1}, "id must"),
        ({"verb": "hello", "id": True}, "id must"),
        ({"verb": "helo"}, "hello"),
        ({"verb": None}, "unknown verb"),
        ({"verb": "hello", "x": 1}, "no field 'x'"),
        ({"verb": "take", "device": ""}, "needs seconds"),
        ({"verb": "take", "device": "", "seconds": 0}, "above 0 and at most 60"),
        ({"verb": "take", "device": "", "seconds": 61}, "above 0 and at most 60"),
        ({"verb": "take", "device": "", "seconds": True}, "above 0 and at most 60"),
        ({"verb": "take", "device": 7, "seconds": 1}, "device must be a text"),
        ({"verb": "take", "device": "x" * 1001, "seconds": 1}, "device must be a text"),
        ({"verb": "take", "device": "", "seconds": 1, "holder": "a\nb"}, "printable"),
        ({"verb": "apply", "token": "", "point": []}, "point must be an object"),
        ({"verb": "apply", "token": "", "point": {"a": True}}, "level of 'a' must"),
        ({"verb": "apply", "token": "", "point": {"a": [1]}}, "level of 'a' must"),
        ({"verb": "apply", "token": "", "point": {str(i): 1 for i in range(65)}}, "at most 64"),
        ({"verb": "space", "device": "", "knobs": "a"}, "knobs must be a list"),
        ({"verb": "space", "device": "", "knobs": [1]}, "knobs must be a list"),
    ],
)
def test_a_request_that_is_none_says_why(board: Bench, root: Line, message: dict[str, Any], says: str) -> None:
    """The answer has the request's id where it has one, and the connection goes on."""
    assert root._channel is not None
    way = root._channel._connection
    way.sendall((json.dumps({"v": 1, "id": 5, **message}) + "\n").encode())
    answer = json.loads(way.makefile("rb").readline())
    assert says in answer["error"]["words"]
    assert answer["error"]["kind"] in ("InvalidInput", "UnknownName")
    assert answer["id"] == (5 if message.get("id", 5) == 5 else None)
    root.ask("hello")


def test_a_board_that_is_steered_by_another_program_is_not_taken(board: Bench, root: Line) -> None:
    """The refusal names it, and when it is done the board can be had."""
    with JetsonDevice(root=str(board.root)), pytest.raises(DeviceError, match="is being steered by process"):
        take(root)
    take(root)


def test_what_cannot_be_put_back_is_said_and_tried_again(board: Bench, root: Line) -> None:
    """A control that refuses its original is named; as soon as it takes it, it is put back without anybody's asking."""
    before, token = board.held(), take(root)
    root.ask("apply", token=token, point={MEM: levels(root, MEM)[0]})
    FakeKernel(board.root).fail(Fault("EIO", match="*/mrq_rate_locked", times=0))
    (left,) = root.ask("release", token=token)["left"]
    assert "mrq_rate_locked" in left
    assert board.held() != before
    FakeKernel(board.root).heal()
    board.time.now_s += 6
    root.ask("hello")
    assert board.held() == before


def test_a_device_that_is_gone_ends_the_lease(board: Bench, root: Line) -> None:
    """The answer says so, and a new lease opens the device anew."""
    token = take(root)
    FakeKernel(board.root).fail(Fault("ENODEV", match="*/rate", times=0))
    with pytest.raises(LeaseOver, match="the device or its driver is gone; the lease has ended"):
        root.ask("apply", token=token, point={MEM: levels(root, MEM)[0]})
    FakeKernel(board.root).heal()
    root.ask("apply", token=take(root), point={MEM: levels(root, MEM)[0]})


def test_a_full_disk_stops_setting_and_keeps_the_lease(
    board: Bench, root: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Originals that cannot be saved are never overwritten; with room again it goes on."""
    from polythrottle.actuation.state import record

    before, token, low = board.held(), take(root), levels(root, MEM)[0]

    def full(*words: object, **more: object) -> None:
        raise StorageError("cannot save originals: No space left on device; nothing was changed")

    with monkeypatch.context() as patch:
        patch.setattr(record.Record, "note", full)
        with pytest.raises(StorageError, match="nothing was changed"):
            root.ask("apply", token=token, point={MEM: low})
    assert board.held() == before
    assert root.ask("apply", token=token, point={MEM: low})["point"] == {MEM: low}


@pytest.mark.parametrize("lost", ["deleted", "damaged"])
def test_a_lease_file_that_is_lost_ends_the_lease(board: Bench, root: Line, state_folder: Path, lost: str) -> None:
    """Nothing can be set under it any more, so that the board is put back at once and can be taken anew."""
    low, high = levels(root, MEM)[:2]
    before, token = board.held(), take(root)
    root.ask("apply", token=token, point={MEM: low})
    (file,) = (state_folder / "originals").glob("jetson*.lease")
    file.unlink() if lost == "deleted" else file.write_bytes(b"")
    with pytest.raises(LeaseOver, match=f"was {lost} while the device was steered.*the lease has ended"):
        root.ask("apply", token=token, point={MEM: high})
    assert board.held() == before
    root.ask("apply", token=take(root), point={MEM: high})


def test_who_took_what_is_on_record(board: Bench, state_folder: Path) -> None:
    """The audit names users and holders, and what was written is in the device's own."""
    alice = board.line(ALICE)
    token = take(alice, holder="the daemon")
    alice.ask("apply", token=token, point={MEM: levels(alice, MEM)[0]})
    alice.ask("lend", token=token, seconds=5, holder="a study")
    alice.ask("release", token=token)
    folder = state_folder / "originals"
    events = [json.loads(line)["event"] for line in next(folder.glob("actuator@*.audit")).read_text().splitlines()]
    assert [each.split()[0] for each in events] == ["leased", "lent", "ended:"]
    assert "the daemon, 4001 (process 101) (user 4001)" in events[0]
    assert '"event": "set"' in next(folder.glob("jetson*.audit")).read_text()


def test_what_can_be_served_is_said() -> None:
    """A table of measurements is no device to set; a processor's estimate counts everybody."""
    with pytest.raises(InvalidInput, match="cannot be served"):
        served_uri("replay:x.csv")
    with pytest.raises(UnknownName):
        served_uri("toaster")
    assert served_uri("cpu") == "cpu?busy=everyone"
    assert served_uri("cpu?root=/x") == "cpu?root=/x&busy=everyone"
    assert served_uri("nvml:0") == "nvml:0"
    for uri in ("cpu", "cpu?root=/x", "nvml:0", "cpu?busy=everyone&root=/x"):
        assert given_uri(served_uri(uri)) == uri


def test_the_child_that_computes_a_space_prints_what_went_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    """An error of the device comes out as one."""
    assert search_space_child.main([json.dumps({"uri": "sim:no-such-board", "knobs": None, "spans": [None]})]) == 0
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "UnknownName"
    assert search_space_child.main([json.dumps({"uri": "sim:jetson-nano", "knobs": None, "spans": [None]})]) == 0
    found = space_from(json.loads(capsys.readouterr().out)["answer"])
    assert found.fingerprint == open_device("sim:jetson-nano").space.fingerprint


def test_refusals_are_of_our_own_tree() -> None:
    """So that a client can tell them apart by class."""
    assert all(issubclass(each, PolythrottleError) for each in (Later, LeaseOver, Lent))
