"""Several services on one server, in virtual time: what they share, also when something goes wrong."""

import io
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from builders import measured
from daemons import BOUNDS, COOL, EPOCH_S, GONE, LADDER, TUNED, FakeBoard, FakeTraffic

from polythrottle.catalog.tuned_profiles import write_profile
from polythrottle.cli.commands import run
from polythrottle.cli.daemon_process import EventPrinter, node_limit, settings_of
from polythrottle.cli.render.status import print_node
from polythrottle.daemon.client import Client, default_socket
from polythrottle.daemon.commands import Confirm, SetBudget, SetNodePower, Stop
from polythrottle.daemon.control.controller import step
from polythrottle.daemon.control.events import (
    Apply,
    ApplyRefused,
    ControlPlan,
    GoSafe,
    Observation,
    PowerShare,
    Target,
    WorkloadUp,
)
from polythrottle.daemon.control.power_sharing import HostPower, PowerSharing, ServiceState
from polythrottle.daemon.control.state import Phase, State
from polythrottle.daemon.energy_accounts import Accounts
from polythrottle.daemon.followed_profile import UNTOUCHED
from polythrottle.daemon.history_store import HistoryStore
from polythrottle.daemon.loop.mailbox import Mailbox
from polythrottle.daemon.loop.node import Node
from polythrottle.daemon.loop.runner import LoopComponents, Runner
from polythrottle.daemon.loop.service_power_split import Member, SharedPower
from polythrottle.daemon.settings import NodeSettings, ServiceSettings, Settings, check, check_devices, read_settings
from polythrottle.daemon.startup import build_node, check_words
from polythrottle.daemon.study_process import Studies
from polythrottle.daemon.web import WebOptions, serve
from polythrottle.daemon.web.access import ServiceDoor
from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import BadFile, DeviceError, InvalidInput, KnobRejected, PolythrottleError, UnknownName
from polythrottle.domain.profile import Profile
from polythrottle.domain.space import OperatingPoint

REST_W = 30.0
FULL_W = {rung.service.point["gpu_max_hz"]: rung.service.full_w for rung in LADDER.rungs}
DEFAULT_W = 40.0
IDLE_W = 4.0


class FullBoard(FakeBoard):
    """A board that draws all it can at what is set on it, and all it ever can while nothing is."""

    busy = True

    def apply(self, point: OperatingPoint) -> None:
        """Set it."""
        super().apply(point)
        self.power_w = FULL_W[point["gpu_max_hz"]] if self.busy else IDLE_W

    def restore(self) -> None:
        """Put it back."""
        super().restore()
        self.power_w = DEFAULT_W if self.busy else IDLE_W


@dataclass
class Meter:
    """A meter of the whole server."""

    watts: float = 100.0
    fails: DeviceError | None = None

    def power_w(self) -> tuple[float, float]:
        """Return what it shows."""
        if self.fails is not None:
            raise self.fails
        return 0.0, self.watts


class Server:
    """A server of services in virtual time."""

    def __init__(self, folder: Path, limit_w: float | None, weights: dict[str, float], **power: object) -> None:
        self.clock = VirtualClock()
        self.desk = Mailbox()
        self.boards: dict[str, FullBoard] = {}
        self.traffics: dict[str, FakeTraffic] = {}
        members = []
        for name, weight in weights.items():
            board = FullBoard(self.clock, f"nvml:{len(members)}", power_w=IDLE_W)
            traffic = FakeTraffic(self.clock, rate_per_s=10.0)
            record = HistoryStore(folder / name / "daemon.db", self.wall)
            mailbox = Mailbox()
            parts = LoopComponents(
                *(self.clock, board, traffic, mailbox, record, Accounts(record, self.wall)),
                Studies(folder / name, board, record, self.clock, ("false",)),
                wall=self.wall,
                slept_s=lambda: 0.0,
            )
            self.boards[name], self.traffics[name] = board, traffic
            members.append(Member(name, weight, Runner(parts, TUNED), mailbox, record))
        shared = SharedPower(limit_w, **(power or {"host": HostPower(REST_W)}))  # type: ignore[arg-type]
        record = HistoryStore(folder / "daemon.db", self.wall)
        self.node = Node(members, shared, clock=self.clock, desk=self.desk, record=record, wall=self.wall)

    def wall(self) -> float:
        """Return wall time."""
        return EPOCH_S + self.clock.now()

    def turns(self, count: int) -> Iterator[float]:
        """Turn so often, and yield after each what the boards draw from then on, the rest included."""
        for _ in range(count):
            self.node.turn()
            yield REST_W + sum(board.power_w for board in self.boards.values())
            self.node._wait()

    def words(self, kind: str) -> list[str]:
        """Return the words of the server's own events of a kind."""
        return [event.words for event in self.desk.events() if event.kind == kind]

    def state(self, name: str) -> State:
        """Return a service's controller."""
        return next(each for each in self.node.members if each.name == name).runner.executor.state


THREE = {"chat": 4.0, "photos": 1.0, "search": 1.0}


def server(folder: Path, limit_w: float | None, weights: dict[str, float] | None = None) -> Server:
    """Return a server of three services with known rest."""
    return Server(folder, limit_w, weights or THREE)


def test_no_load_is_above_the_limit(tmp_path: Path) -> None:
    """Though all loads rise together to more than the server can answer, what all can draw stays within."""
    house = server(tmp_path, 100.0)
    drawn = list(house.turns(5))
    for traffic in house.traffics.values():
        traffic.rate_per_s = 500.0
        traffic.waiting = 90
    drawn += list(house.turns(20))
    assert max(drawn) <= 100.0
    assert house.node.shown.above == 0
    # 70 W for three: at full load with its margin, the heaviest gets the top rung and the others the lowest.
    assert [board.power_w for board in house.boards.values()] == [40.0, 10.0, 10.0]


def test_watts_go_where_they_hold_a_limit(tmp_path: Path) -> None:
    """A service with little load leaves its watts to one that needs them, whatever their weights."""
    house = server(tmp_path, 100.0)
    house.traffics["photos"].rate_per_s = 150.0
    list(house.turns(30))
    assert house.boards["photos"].power_w == 40.0
    assert [share.short for share in house.node.shown.services] == [False, False, False]


def test_a_limit_cut_in_half_holds_from_the_next_second(tmp_path: Path) -> None:
    """The heaviest service keeps its rung, the others go down, and it is said that the limit holds."""
    house = server(tmp_path, 200.0)
    for traffic in house.traffics.values():
        traffic.rate_per_s = 150.0
    list(house.turns(30))
    assert [board.power_w for board in house.boards.values()] == [40.0, 40.0, 40.0]
    answer = house.node.answer(SetNodePower(100.0, 5.0))
    assert "short of watts: photos, search" in answer["words"]
    assert [board.power_w for board in house.boards.values()] == [40.0, 10.0, 10.0]
    assert max(house.turns(8)) <= 100.0
    assert house.words("budget")[-1].startswith("at most 100 W holds, after")
    assert house.node.shown.buys.startswith("more of the load") or "SLO of" in house.node.shown.buys


def test_a_limit_that_no_rung_keeps_is_refused(tmp_path: Path) -> None:
    """It is said from where on it can be kept, and the one before stays."""
    house = server(tmp_path, 100.0)
    list(house.turns(3))
    with pytest.raises(InvalidInput, match=r"at most 40 W cannot be kept: .* may draw 60\.9 W"):
        house.node.answer(SetNodePower(40.0))
    assert house.node.power.limit_w == 100.0


def test_a_limit_that_does_not_hold_in_time_is_a_fault(tmp_path: Path) -> None:
    """A board that draws more than its rung is told of when the time is over."""
    house = server(tmp_path, 200.0)
    list(house.turns(5))
    house.node.answer(SetNodePower(100.0, 3.0))
    for board in house.boards.values():
        board.fails["apply"] = DeviceError("gone")
        board.power_w = 90.0
    list(house.turns(6))
    assert any(words.startswith("at most 100 W does not hold after 3 s") for words in house.words("fault"))


def test_a_board_that_refuses_is_counted_with_all_it_draws(tmp_path: Path) -> None:
    """Where one cannot be set down the others make room in the same turn, before anybody goes up."""
    house = server(tmp_path, 200.0)
    for traffic in house.traffics.values():
        traffic.rate_per_s = 150.0
    list(house.turns(20))
    house.boards["search"].fails["apply"] = KnobRejected("no")
    house.boards["search"].fails["restore"] = KnobRejected("no")
    house.node.answer(SetNodePower(100.0, 5.0))
    assert house.boards["search"].power_w == 40.0
    assert REST_W + sum(board.power_w for board in house.boards.values()) <= 100.0


def test_a_gpu_that_falls_off_the_bus_keeps_its_watts(tmp_path: Path) -> None:
    """A board that cannot be read or set any more is counted with the most it can draw, until it is there again."""
    house = server(tmp_path, 110.0)
    list(house.turns(5))
    lost = house.boards["search"]
    for verb in ("apply", "read", "take", "verify", "restore"):
        lost.fails[verb] = GONE
    lost.power_w = DEFAULT_W
    for name in ("chat", "photos"):
        house.traffics[name].rate_per_s = 150.0
    drawn = list(house.turns(15))
    assert max(drawn) <= 110.0
    shown = {each.name: each for each in house.node.shown.services}
    assert shown["search"].share_w is None
    assert shown["search"].counted_w == DEFAULT_W
    lost.fails.clear()
    list(house.turns(60))
    assert house.node.shown.services[2].share_w is not None


def test_a_service_that_crashes_leaves_its_watts(tmp_path: Path) -> None:
    """What it draws idle is counted, the others take the rest, and when it is back it begins at its lowest rung."""
    house = server(tmp_path, 100.0)
    for traffic in house.traffics.values():
        traffic.rate_per_s = 50.0
    list(house.turns(10))
    house.boards["chat"].busy = False
    house.traffics["chat"].rate_per_s = None
    house.traffics["photos"].rate_per_s = 150.0
    assert max(house.turns(20)) <= 100.0
    assert house.state("chat").phase is Phase.DOWN
    assert house.boards["photos"].power_w == 40.0
    house.boards["chat"].busy = True
    house.traffics["chat"].rate_per_s = 50.0
    assert max(house.turns(20)) <= 100.0
    assert house.state("chat").phase is Phase.FOLLOWING


def test_a_loop_that_fails_is_ended_and_the_others_go_on(tmp_path: Path) -> None:
    """Its board is given back and counted with all it draws; the server says so."""
    house = server(tmp_path, 200.0)
    list(house.turns(3))

    def broken(now_s: float) -> None:
        raise RuntimeError("a fault")

    house.traffics["search"].look = broken  # type: ignore[assignment, method-assign]
    list(house.turns(5))
    assert not house.boards["search"].taken
    assert house.words("fault")[0] == "search: the control loop failed: RuntimeError: a fault"
    assert any(words.startswith("search is not looked after any more") for words in house.words("fault"))
    assert "search" in house.desk.status.faults[-1]
    before = house.state("chat")
    list(house.turns(2))
    assert house.state("chat").forecast != before.forecast


def test_studies_take_turns(tmp_path: Path) -> None:
    """None begins while one runs on the same server, nor where its board's most does not fit."""
    house = server(tmp_path, 150.0)
    list(house.turns(3))
    assert house.node.study_waits("chat") == ""
    running = house.node.members[1].runner.executor
    running.state = replace(running.state, study_runs=True, phase=Phase.STUDYING)
    assert "studies on one server take turns" in house.node.study_waits("chat")
    running.state = replace(running.state, study_runs=False, phase=Phase.FOLLOWING)
    house.node.answer(SetNodePower(70.0))
    assert "leave no room" in house.node.study_waits("chat")


def test_a_limit_set_while_it_ran_outlives_the_daemon(tmp_path: Path) -> None:
    """It holds again after a restart with the same settings, and not with another limit in them."""
    first = server(tmp_path, 200.0)
    list(first.turns(2))
    first.node.answer(SetNodePower(100.0))
    first.node._record.close()
    assert server(tmp_path, 200.0).node.power.limit_w == 100.0
    assert server(tmp_path, 150.0).node.power.limit_w == 150.0


def test_what_is_of_one_service_is_not_asked_of_all(tmp_path: Path) -> None:
    """Batteries and profiles are refused in a line, a plain power is the server's, and stopping ends all."""
    house = server(tmp_path, 200.0)
    with pytest.raises(InvalidInput, match="shares watts alone"):
        house.node.answer(SetBudget(battery_wh=80.0, last_s=3600.0))
    with pytest.raises(InvalidInput, match="say which of chat, photos, search"):
        house.node.answer(Confirm())
    with pytest.raises(InvalidInput, match="--within lies between"):
        house.node.answer(SetNodePower(100.0, 0.1))
    list(house.turns(2))
    assert house.node.answer(SetBudget(power_w=90.0))["words"].startswith("the server draws at most 90 W")
    assert house.node.answer(SetBudget())["words"] == "no limit holds for the server any more"
    house.node.answer(Stop())
    house.node.run()
    assert not any(board.taken for board in house.boards.values())
    assert house.words("stop") == ["the daemon has ended; every board is as it was found"]


def test_the_rest_is_learnt_from_a_meter(tmp_path: Path) -> None:
    """The line through what was seen tells what is drawn besides, whatever the boards draw."""
    host = HostPower()
    for boards_w in 100 * (100.0, 200.0, 300.0, 250.0, 150.0):
        host.seen(50.0 + 1.2 * boards_w, boards_w)
    base_w, slope = host.line
    assert base_w == pytest.approx(50.0, abs=0.5)
    assert slope == pytest.approx(0.2, abs=0.01)
    assert host.besides_w(410.0) == pytest.approx(110.0, abs=1.0)
    meter = Meter()
    house = Server(tmp_path, 200.0, THREE, meter=meter)
    list(house.turns(4))
    assert house.node.power.rest_w() > 50.0
    meter.fails = DeviceError("silent")
    list(house.turns(2))
    assert "the server's meter: silent" in house.desk.status.faults


def test_what_is_drawn_above_a_rung_is_counted_at_once() -> None:
    """The next split takes the excess into account, and forgets it slowly."""
    plan = ControlPlan(LADDER, UNTOUCHED, COOL, BOUNDS)
    state, _ = step(State(), WorkloadUp(plan))
    sharing = PowerSharing()
    seen = ServiceState("a", 1.0, state, 50.0, power_w=48.0, rate_per_s=100.0)
    before = sharing.split(42.0, 0.0, [seen]).shares[0].limit_w
    assert before == pytest.approx(40.0)
    sharing.seen([seen], 1.0)
    after = sharing.split(42.0, 0.0, [seen]).shares[0].limit_w
    assert after == pytest.approx(42.0 * 40.0 / 48.0)
    sharing.seen([replace(seen, power_w=10.0)], 10.0)
    assert after < sharing.split(42.0, 0.0, [seen]).shares[0].limit_w < before


@pytest.mark.parametrize("event", [ApplyRefused("no"), Observation(1.0, p99_s=9.0, worst_s=9.0)])
def test_the_safe_point_stays_within_the_share(event: ApplyRefused | Observation) -> None:
    """Neither a guard nor a refusal leads to a point that could draw more than there is."""
    plan = ControlPlan(LADDER, UNTOUCHED, COOL, BOUNDS)
    state, _ = step(State(share_w=25.0), WorkloadUp(plan))
    state, actions = step(state, event)
    set_ = [each.target for each in actions if isinstance(each, Apply | GoSafe)]
    middle = Target(LADDER.rungs[1].service.point)
    assert state.applied == middle
    assert set_ in ([], [middle])
    state, actions = step(state, PowerShare(12.0))
    assert state.applied == COOL
    state, actions = step(state, PowerShare(None))
    assert state.phase is not Phase.SAFE or state.applied == UNTOUCHED


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ({"a": "nvml:0-3", "b": "nvml:3"}, "nvml:0-3 of a and nvml:3 of b|nvml:3 of b and nvml:0-3 of a"),
        ({"a": "nvml:all", "b": "nvml:5"}, "are the same device"),
        ({"a": "nvml:0,2", "b": "nvml:1-2"}, "GPU 2"),
        ({"a": "jetson", "b": "jetson"}, "jetson"),
        ({"a": "nvml:GPU-1", "b": "nvml:GPU-1"}, "GPU-1"),
        ({"a": "nvml:GPU-1", "b": "nvml:all"}, "GPU-1"),
        ({"a": "sim:node/0-3", "b": "sim:node"}, "simulated GPU 2"),
    ],
)
def test_a_device_serves_one_service(devices: dict[str, str], words: str) -> None:
    """Groups that overlap are refused, with both named."""
    with pytest.raises(InvalidInput, match=words):
        check_devices(devices)


def test_devices_apart_are_taken() -> None:
    """Neighbouring groups have nothing in common, and every service has its own simulated board."""
    check_devices({"a": "nvml:0-3", "b": "nvml:4,5", "c": "sim:h100", "d": "sim:h100", "e": "cpu"})
    check_devices({"a": "nvml:", "b": "sim:node/0-3"})
    check_devices({"a": "nvml:all", "b": "sim:node"})


NODE = """
[node]
power = "3.2kW"
rest = "400W"

[[service]]
name = "chat"
device = "nvml:0-3"
workload = "openai://127.0.0.1:8000/m"
traffic = "metrics:http://127.0.0.1:8000/metrics"
slo = ["p99<=2s"]
weight = 2
most = "2.8kW"

[service.guards]
temperature_c = 85

[[service]]
name = "search"
profile = "h100/bert"
"""


def test_services_are_read_from_a_file(tmp_path: Path) -> None:
    """Each table is a service, with guards of its own; watts may be in kilowatts."""
    path = tmp_path / "daemon.toml"
    path.write_text(NODE)
    settings = read_settings(path)
    chat, search = settings.services
    assert (chat.name, chat.device, chat.weight, chat.most_w) == ("chat", "nvml:0-3", 2.0, 2800.0)
    assert chat.guards.temperature_c == 85.0
    assert search == ServiceSettings("search", profile="h100/bert")
    assert (settings.node.power_w, settings.node.rest_w, settings.shared) == (3200.0, 400.0, True)
    assert not Settings(profile="x").shared


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[service]\nname = 'a'", "tables of their own"),
        ("[[service]]\nprofile = 'a'", "it needs a name"),
        ("[[service]]\nname = 'A b'", "no name of a service"),
        ("[[service]]\nname = 'a'\nweight = 0", "service.weight"),
        ("[[service]]\nname = 'a'\nslo = 5", "service.slo"),
        ("[[service]]\nname = 'a'\nprofil = 'b'", "service.profile"),
        ("[[service]]\nname = 'a'\nguards = 5", "service.guards"),
        ("[node]\npower = '-3W'", "node.power"),
        ("[node]\npowr = '3W'", "node.power"),
    ],
)
def test_a_table_that_is_none_is_named(tmp_path: Path, text: str, words: str) -> None:
    """A node that cannot be, or whose only service cannot be, is refused with the key."""
    path = tmp_path / "daemon.toml"
    path.write_text(text)
    with pytest.raises(BadFile, match=words):
        read_settings(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("profile = 'x'\n[[service]]\nname = 'a'", "profile is said of each service"),
        ("[node]\npower = '300W'\nrest = '400W'", "leaves nothing"),
        ("[node]\npower = '300W'", "say what the server draws besides"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, text: str, words: str) -> None:
    """The general keys are left to one service alone, and the rest is known and leaves something."""
    path = tmp_path / "daemon.toml"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=words):
        check(read_settings(path))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("name = 'bad'\nweight = 0", "service bad is left out: FILE: service.weight: 0 is not above zero"),
        (f"name = 'bad'\nweight = {10**400}", "service bad is left out: FILE: service.weight: 1000000000"),
        ("name = 'Bad one'", "service number 2 is left out: FILE: service.name: 'Bad one' is no name"),
        ("profile = 'a'", "service number 2 is left out: FILE: service 2: it needs a name"),
        ("name = 'chat'", "service chat is left out: FILE: service 2: another service is called 'chat' already"),
        ("name = 'bad'\nslo_p99 = '2s'", "service bad is left out: FILE: unknown key 'service.slo_p99'"),
    ],
)
def test_a_bad_service_leaves_the_others(tmp_path: Path, table: str, words: str) -> None:
    """One clear line says why it is left out; those before and after it are read as if it were not there."""
    path = tmp_path / "daemon.toml"
    path.write_text(f"[[service]]\nname = 'chat'\n[[service]]\n{table}\n[[service]]\nname = 'photos'\n")
    settings = read_settings(path)
    assert [each.name for each in settings.services] == ["chat", "photos"]
    (line,) = settings.left_out
    assert line.startswith(words.replace("FILE", str(path)))
    assert "\n" not in line


@contextmanager
def served(house: Server, path: Path) -> Iterator[None]:
    """Serve a server's API."""
    doors = {
        each.name: ServiceDoor(each.mailbox, each.record.history, path.parent / each.name)
        for each in house.node.members
    }
    options = WebOptions(path, services=doors, node=lambda: house.node.shown)
    with serve(house.desk, options):
        yield


def test_each_service_has_an_api_below_the_servers(tmp_path: Path) -> None:
    """The server answers for all, each service for itself, and one that is not there is unknown."""
    house = server(tmp_path / "state", 100.0)
    list(house.turns(4))
    path = tmp_path / "d.sock"
    with served(house, path), Client(path) as whole, Client(path, service="chat") as chat:
        node = whole.node()
        assert [each.name for each in node.services] == list(THREE)
        assert node.limit_w == 100.0
        assert node.energy_kind == whole.status().energy_kind == chat.status().energy_kind
        assert whole.status().device == "node"
        assert chat.status().device == "nvml:0"
        assert chat.events()[0].kind == "start"
        with pytest.raises(UnknownName):
            chat.node()
        with Client(path, service="nobody") as nobody, pytest.raises(UnknownName, match="'nobody'; known: chat, "):
            nobody.status()


@pytest.fixture
def answering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Return a server that answers at this user's socket at once, as between two turns."""
    monkeypatch.setenv("POLYTHROTTLE_RUN_DIR", str(tmp_path / "run"))
    house = server(tmp_path / "state", 100.0)
    list(house.turns(4))
    house.desk.on_wish(house.node._answer)
    for member in house.node.members:
        member.mailbox.on_wish(member.runner.answer)
    with served(house, default_socket()):
        yield house


def test_restore_releases_every_service(answering: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """All boards are as found then, one line says so for all, and how to have one set again."""
    assert run(["restore"]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    assert "chat, photos, search: the board is as found, and left alone until it is taken again" in told.out
    assert "polythrottle top --service NAME" in told.out
    assert all(each.runner.executor.released for each in answering.node.members)


def test_restore_releases_the_service_that_has_a_device(answering: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """By URI, also of a part of its GPUs; the others keep theirs."""
    answering.boards["search"].uri = "nvml:2,5"
    list(answering.turns(1))
    assert run(["restore", "--device", "nvml:5", "--json"]) == 0
    released = json.loads(capsys.readouterr().out)["released"]
    assert released["device"] == "nvml:2,5"
    assert released["words"].startswith("search: the board is as found")
    assert [each.name for each in answering.node.members if each.runner.executor.released] == ["search"]


def test_a_service_that_cannot_be_released_is_named(answering: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """The others are released all the same, and what stands without it is put back from here."""
    failing = next(each for each in answering.node.members if each.name == "search")
    failing.failed = "the loop failed"
    failing.mailbox.on_wish(answering.node._answer)
    assert run(["restore"]) == 0
    told = capsys.readouterr()
    assert "could not put search back: it is not looked after any more: the loop failed" in told.err
    assert "chat, photos: the board is as found" in told.out


def test_apply_reaches_the_service_that_has_the_device(
    answering: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It follows the profile; devices that are not those of one service are refused with what to do."""
    path = tmp_path / "orin.toml"
    point = LADDER.rungs[0].service.point
    made = Profile("nvml:1", "model.onnx", point, measured(), workload_knobs=("batch_size",), ladder=LADDER)
    write_profile(made, path)
    assert run(["apply", str(path)]) == 0
    assert "through the daemon at" in capsys.readouterr().out
    assert [each.name for each in answering.node.members if each.runner.selector.unconfirmed] == ["photos"]
    assert run(["apply", "--confirm"]) == 0
    assert not any(each.runner.selector.unconfirmed for each in answering.node.members)
    assert capsys.readouterr().out.startswith("through the daemon at")
    assert run(["apply", str(path), "--device", "nvml:1,2"]) == DeviceError.exit_code
    assert "photos (nvml:1), search (nvml:2)" in capsys.readouterr().err


def test_what_is_left_is_told_by_service_at_the_end(tmp_path: Path) -> None:
    """Once that it may differ, and then of which service what does."""
    house = server(tmp_path, 100.0)
    list(house.turns(3))
    for name in ("chat", "search"):
        house.boards[name].left = ("gpu_max holds 5, was 9",)
    house.node.stop()
    with pytest.raises(DeviceError, match="chat: the board may not be"):
        house.node.run()
    assert house.words("stop") == [
        "the daemon has ended; a board may not be as it was found: "
        "chat: gpu_max holds 5, was 9; search: gpu_max holds 5, was 9"
    ]


def test_a_servers_limit_is_lifted_by_null_alone(answering: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """A body that was forgotten or is empty is refused; null, the client and the command lift it."""
    limit = answering.node.power
    client = Client()
    for body in ({}, {"within_s": 5.0}):
        with pytest.raises(InvalidInput, match="power_w"):
            client._asked("PUT", "/v1/node/power", body)
    assert limit.limit_w == 100.0
    client.node_power(None)
    assert limit.limit_w is None
    client.node_power(100.0)
    assert run(["daemon", "budget", "--no-budget", "--socket", client.where]) == 0
    assert limit.limit_w is None
    assert "no limit holds for the server any more" in capsys.readouterr().out


def test_a_loop_that_stands_promises_nothing(
    answering: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hung actuator holds up every service: the server says for how long, where it is asked for its status."""
    monkeypatch.setattr("polythrottle.daemon.web.event_stream._FRESH_S", math.inf)
    assert Client().node().met is True
    monkeypatch.setattr("polythrottle.daemon.web.event_stream._FRESH_S", 0.0)
    node = Client().node()
    assert (node.met, node.limit_w) == (None, 100.0)
    assert node.faults[-1].startswith("the control loop has not turned for 0 s")
    assert Client(service="chat").status().faults[-1].startswith("the control loop has not turned for 0 s")
    assert run(["daemon", "status"]) == 0
    told = capsys.readouterr().out
    assert "100 W, but whether it is kept is not known" in told
    assert "the control loop has not turned for 0 s" in told


def test_metrics_name_the_service(tmp_path: Path) -> None:
    """Each sample of a service carries its name, and those of the server stand for all."""
    from polythrottle.daemon.web.prometheus import render_node

    house = server(tmp_path, 100.0)
    list(house.turns(4))
    statuses = {each.name: each.mailbox.status for each in house.node.members}
    text = render_node(house.desk.status, house.node.shown, statuses)[0].decode()
    assert 'polythrottle_requests_per_second{service="chat"} 10.0' in text
    assert "polythrottle_node_limit_watts 100.0" in text
    assert 'polythrottle_service_weight{service="chat"} 4.0' in text
    assert text.count("polythrottle_turns_total{") == 1
    for name in ("phase", "device_leased", "device_reachable", "events_total", "faults"):
        services = {line.partition('service="')[2].partition('"')[0] for line in text.splitlines()
                    if line.startswith(f"polythrottle_{name}{{")}  # fmt: skip
        assert services == {"", *THREE}, name
    assert 'polythrottle_phase{phase="following",service="chat"} 1.0' in text


def test_a_server_says_how_late_its_turns_begin(tmp_path: Path) -> None:
    """One that stood for seven seconds is that late, also where it counts from now on."""
    house = server(tmp_path, 100.0)
    list(house.turns(4))
    assert house.desk.status.late_s < 0.1
    house.clock.sleep(8.0)
    house.node.turn()
    assert 6.9 < house.desk.status.late_s < 8.1
    assert house.desk.status.late_p99_s == house.desk.status.late_s


def test_pages_are_whole() -> None:
    """The page of all services has its style and script inside, named by their hashes."""
    from polythrottle.daemon.web.page import load_node

    page = load_node()
    assert b"/v1/node" in page.body
    assert b"<script></script>" not in page.body
    assert page.headers["Content-Security-Policy"].count("sha256-") == 2


DEMO = Path(__file__).resolve().parents[2] / "polythrottle/daemon/demo.toml"


def simulated(**node: object) -> Settings:
    """Return the settings of two services on simulated boards."""
    services = tuple(
        ServiceSettings(name, profile=str(DEMO), traffic="sim:poisson:30/s", weight=weight)
        for name, weight in (("chat", 2.0), ("search", 1.0))
    )
    return Settings(services=services, node=NodeSettings(**node))  # type: ignore[arg-type]


def test_a_server_is_built_from_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each service has a folder of its own, and what all may draw stays within the limit."""
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", str(tmp_path))
    clock = VirtualClock()
    node, record = build_node(
        simulated(power_w=70.0, rest_w=20.0), clock, Mailbox(), wall=lambda: EPOCH_S + clock.now()
    )
    for _ in range(8):
        node.turn()
        node._wait()
    assert [each.name for each in node.shown.services] == ["chat", "search"]
    assert all(each.phase == "following" for each in node.shown.services)
    counted_w = 20.0 + sum(each.counted_w or 0.0 for each in node.shown.services)
    assert counted_w <= 70.0
    assert node.shown.above == 0
    assert (tmp_path / "services/chat/daemon.db").exists()
    node.stop()
    node.run()
    assert record.fault == ""


def test_a_damaged_memory_is_told_where_the_server_is_listened_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the start, so that the daemon's own output has it, for the server and for each service by name."""
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", str(tmp_path))
    for folder in (tmp_path, tmp_path / "services/chat"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "daemon.db").write_bytes(b"no database")
    desk = Mailbox()
    shown = io.StringIO()
    node, _ = build_node(simulated(), VirtualClock(), desk)
    printer = EventPrinter(desk, shown)
    node.turn()
    node.turn()
    node.stop()
    node.run()
    printer.close()
    lines = [line for line in shown.getvalue().splitlines() if "memory was damaged" in line]
    assert sorted("chat: the daemon" in line for line in lines) == [False, True]
    assert all("is set aside as daemon.broken-" in line for line in lines)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (simulated(power_w=70.0), "say what the server draws besides"),
        (
            replace(simulated(), services=(ServiceSettings("chat", device="sim:nothing", traffic="sim:poisson:3/s"),)),
            "service chat: ",
        ),
        (Settings(services=(ServiceSettings("chat", profile="/nope.toml"),)), "service chat: .*nope"),
        (Settings(services=(ServiceSettings("chat", profile="x" * 4000),)), "service chat: .* File name too long"),
    ],
)
def test_a_server_that_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: Settings, words: str
) -> None:
    """Where no service is left, it is said in a line what is missing, and of which."""
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", str(tmp_path))
    with pytest.raises(PolythrottleError, match=words):
        build_node(settings, VirtualClock(), Mailbox())


@pytest.mark.parametrize(
    ("services", "words"),
    [
        ({"bad": "sim:nothing"}, "service bad is left out: unknown device 'nothing'"),
        ({"bad": f"sim:{'x' * 4000}"}, "service bad is left out: xxx"),
        ({"bad": None}, "service bad is left out: the key device is missing"),
        ({"first": "cpu", "bad": "cpu"}, "service bad is left out: cpu of bad and cpu of first are the same device"),
    ],
)
def test_a_service_that_cannot_be_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, services: dict[str, str | None], words: str
) -> None:
    """The daemon says so at its start and for as long as it runs, and follows the loads of those that can be."""
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", str(tmp_path))
    settings = simulated()
    others = tuple(
        ServiceSettings(
            name, device=uri, workload="resnet50", traffic="sim:poisson:3/s" if "sim" in str(uri) else "report"
        )
        for name, uri in services.items()
    )
    desk = Mailbox()
    node, _ = build_node(replace(settings, services=(*others, *settings.services)), VirtualClock(), desk)
    node.turn()
    assert [each.name for each in node.members] == [*list(services)[:-1], "chat", "search"]
    (fault,) = node.shown.faults
    assert fault.startswith(words)
    assert fault in desk.status.faults
    assert [event.words for event in desk.events() if event.kind == "fault"][:1] == [fault]
    node.stop()
    node.run()


def test_a_multiple_beside_a_profile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the command line: a service, or a daemon of one, is not to go on with a limit that nobody asked for."""
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", str(tmp_path))
    settings = simulated()
    bad = replace(settings.services[0], name="bad", slo=("p99<=5x",))
    node, _ = build_node(replace(settings, services=(bad, *settings.services[1:])), VirtualClock(), Mailbox())
    words = "p99<=5x: beside a profile a limit is absolute; say it in time, such as 50ms"
    node.turn()
    assert node.shown.faults == (f"service bad is left out: {words}",)
    node.stop()
    node.run()
    with pytest.raises(InvalidInput, match=words):
        check_words(Settings(profile=str(DEMO), traffic="sim:poisson:30/s", slo=("p99<=5x",)))


def test_without_a_service_no_promise_is_said_to_be_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A limit with nothing to share it is neither kept nor broken: nothing is steered, and that is said."""
    house = server(tmp_path, 100.0)
    house.node.turn()
    print_node(house.node.shown)
    assert "100 W, kept" in capsys.readouterr().out
    for member in house.node.members:
        house.node.dismiss(member.name)
    house.node.turn()
    print_node(house.node.shown)
    told = capsys.readouterr().out
    assert "100 W, but nothing is steered: there is no service now" in told
    assert "promised" not in told
    assert "rest" not in told


def test_a_fault_of_the_server_itself_is_survived_at_the_safe_points(tmp_path: Path) -> None:
    """Every board goes to its safe point, and the next turn shares the watts again; three within a minute end it."""
    house = server(tmp_path, 100.0)
    list(house.turns(5))
    share = house.node._share
    faults = iter([RuntimeError("no split")])

    def once() -> None:
        for fault in faults:
            raise fault
        share()
        house.node.stop()

    house.node._share = once  # type: ignore[method-assign]
    house.node.run()
    assert house.words("fault") == ["the server's control loop failed: RuntimeError: no split"]
    assert not any(board.taken for board in house.boards.values())

    house = server(tmp_path / "again", 100.0)

    def always() -> None:
        raise RuntimeError("no split")

    house.node._share = always  # type: ignore[method-assign]
    with pytest.raises(DeviceError, match="3 times in a minute the server's control loop failed: RuntimeError"):
        house.node.run()
    assert not any(board.taken for board in house.boards.values())


def test_options_of_a_server_go_before_its_file(tmp_path: Path) -> None:
    """A plain number of watts is refused, for it could be kilowatts."""
    path = tmp_path / "daemon.toml"
    path.write_text(NODE)
    settings = settings_of({"config": str(path), "node_power": "1.6kW"})
    assert (settings.node.power_w, settings.node.rest_w) == (1600.0, 400.0)
    with pytest.raises(InvalidInput, match="--node-power 1600 has no unit"):
        settings_of({"config": str(path), "node_power": "1600"})


@pytest.mark.parametrize(
    ("wish", "service", "words"),
    [
        (None, None, "--within goes with --power alone"),
        (SetBudget(power_w=5.0, wh_per_day=9.0), None, "--within goes with --power alone"),
        (SetBudget(power_w=5.0), "chat", "leave --service out"),
    ],
)
def test_within_is_of_a_servers_power(wish: SetBudget | None, service: str | None, words: str) -> None:
    """A time goes with nothing but watts of all services."""
    with pytest.raises(InvalidInput, match=words):
        node_limit(wish, "5s", service)


def test_a_server_is_shown_in_the_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A row for each service, and what more watts would buy."""
    house = server(tmp_path, 100.0)
    for traffic in house.traffics.values():
        traffic.rate_per_s = 150.0
    list(house.turns(10))
    print_node(house.node.shown)
    shown = capsys.readouterr().out
    assert "100 W, kept" in shown
    assert "following, short" in shown
    assert "more would buy" in shown


def test_a_new_limit_counts_anew_and_lifting_it_forgets_how_it_was_split() -> None:
    """Turns above the old limit are none above the new one; without a limit nothing is shared."""
    split = object()
    shared = SharedPower(100.0, above=3, above_run=2, above_most=2, split=split)  # type: ignore[arg-type]
    shared.changed(200.0)
    assert (shared.limit_w, shared.above, shared.above_run, shared.above_most) == (200.0, 0, 0, 0)
    assert shared.split is split
    shared.changed(None)
    assert shared.limit_w is None
    assert shared.split is None
