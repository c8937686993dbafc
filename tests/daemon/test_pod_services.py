"""Pods as services of the daemon: what is set for one is put back when it goes, at random and by a real actuator."""

import errno
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from actuators import bench
from builders import measured
from daemons import EPOCH_S, LADDER, TUNED, FakeBoard, FakeTraffic
from kubelets import CHAT, GPUS, SERVED, FakeCluster, FakeKubelet

from polythrottle.actuation.server import main
from polythrottle.actuation.server.permits import Permit, Permits
from polythrottle.actuation.server.server import Server as Actuator
from polythrottle.actuation.server.unix_socket import Peer
from polythrottle.backends import open_device
from polythrottle.backends.served_devices import usable_part
from polythrottle.catalog.tuned_profiles import write_profile
from polythrottle.cli.daemon_process import _Doors
from polythrottle.cli.render.status import print_node
from polythrottle.daemon.client import Client
from polythrottle.daemon.commands import Report
from polythrottle.daemon.control.events import Bounds
from polythrottle.daemon.control.power_sharing import HostPower
from polythrottle.daemon.energy_accounts import Accounts
from polythrottle.daemon.history_store import HistoryStore
from polythrottle.daemon.loop.mailbox import Mailbox
from polythrottle.daemon.loop.node import Node
from polythrottle.daemon.loop.runner import LoopComponents, Runner
from polythrottle.daemon.loop.service_power_split import Member, SharedPower
from polythrottle.daemon.observation import RequestStats
from polythrottle.daemon.pods import kubernetes
from polythrottle.daemon.pods.kubernetes import PodFacts, PodName
from polythrottle.daemon.pods.residents import AGAIN_S, Placement, PodService, PodsSeen, Residents, Wish
from polythrottle.daemon.settings import KubernetesSettings, ServiceSettings, Settings, check, read_settings
from polythrottle.daemon.startup import build_node, service_of
from polythrottle.daemon.study_process import Studies
from polythrottle.daemon.web import WebOptions, serve
from polythrottle.domain.clock import SystemClock, VirtualClock
from polythrottle.domain.errors import BadFile, DeviceError, InvalidInput, UnknownName
from polythrottle.domain.ladder import Ladder, PointPerformance, Rung
from polythrottle.domain.profile import Profile
from polythrottle.domain.space import OperatingPoint
from polythrottle.storage.identity import identity_of
from polythrottle.testing.nvml import FakeNvml, compiler


@dataclass
class Watch:
    """Pods as the test says they are."""

    seen: PodsSeen | None = None
    closed: bool = False

    def show(self, *services: PodService, refused: dict[PodName, str] | None = None) -> None:
        """Show these."""
        self.seen = PodsSeen(Placement(services, refused or {}))

    def close(self) -> None:
        """End it."""
        self.closed = True


def pod(name: str, *numbers: int, uid: str = "1", **wish: object) -> PodService:
    """Return a pod on GPUs."""
    return PodService(PodName("models", name), uid, tuple(GPUS[each] for each in numbers), Wish("chat", **wish))  # type: ignore[arg-type]


@dataclass
class Server:
    """A server of pods in virtual time."""

    folder: Path
    limit_w: float | None = None
    boards: list[FakeBoard] = field(default_factory=list)
    fails: Exception | None = None

    def __post_init__(self) -> None:
        self.clock = VirtualClock()
        self.desk = Mailbox()
        self.watch = Watch()
        record = HistoryStore(self.folder / "daemon.db", self.wall)
        guests = Residents(self.watch, self.make, self.clock, self.folder / "pods")
        power = SharedPower(self.limit_w, host=HostPower(30.0))
        self.node = Node([], power, clock=self.clock, desk=self.desk, record=record, wall=self.wall, guests=guests)

    def wall(self) -> float:
        """Return wall time."""
        return EPOCH_S + self.clock.now()

    def make(self, service: PodService) -> Member:
        """Return a service with a board of its own, whose URI is that of the pod's GPUs."""
        if self.fails is not None:
            raise self.fails
        board = FakeBoard(self.clock, service.device)
        held = {gpu for each in self.boards if each.taken for gpu in each.uri.removeprefix("nvml:").split(",")}
        assert not held & set(service.gpus), "a GPU is taken while it is still set for another pod"
        folder = self.folder / "pods" / service.name
        record = HistoryStore(folder / "daemon.db", self.wall)
        mailbox = Mailbox()
        parts = LoopComponents(
            *(self.clock, board, FakeTraffic(self.clock), mailbox, record, Accounts(record, self.wall)),
            Studies(folder, board, record, self.clock, ("false",)),
            wall=self.wall,
            slept_s=lambda: 0.0,
        )
        self.boards.append(board)
        return Member(service.name, service.wish.weight, Runner(parts, TUNED), mailbox, record, folder=folder)

    def turn(self, count: int = 1) -> None:
        """Turn so often."""
        for _ in range(count):
            self.node.turn()
            self.node._wait()

    @property
    def set_for(self) -> set[str]:
        """The devices that are held."""
        return {board.uri for board in self.boards if board.taken}

    def words(self, kind: str) -> list[str]:
        """Return the words of the server's events of a kind."""
        return [event.words for event in self.desk.events() if event.kind == kind]


def test_a_pod_is_looked_after_while_it_is_there(tmp_path: Path) -> None:
    """It is admitted within a turn, set, and given back in the turn in which it is seen no more; its state goes too."""
    house = Server(tmp_path)
    house.turn(2)
    assert house.node.shown.services == ()
    chat = pod("chat-0", 0, 1)
    house.watch.show(chat)
    house.turn(3)
    assert house.set_for == {f"nvml:{GPUS[0]},{GPUS[1]}"}
    assert house.boards[0].applied is not None
    assert [(each.pod, each.service, each.gpus) for each in house.node.shown.pods] == [("chat-0", chat.name, chat.gpus)]
    assert (tmp_path / "pods" / chat.name).is_dir()
    house.watch.show()
    house.turn()
    assert house.set_for == set()
    assert house.node.members == ()
    assert list((tmp_path / "pods").iterdir()) == []
    assert house.words("pod")[-1].endswith("its GPUs are as they were found")


def test_a_successor_gets_the_gpu_only_after_it_was_given_back(tmp_path: Path) -> None:
    """A pod of the same name on the same GPU, and one whose annotations change, begin anew from what was found."""
    house = Server(tmp_path)
    for service in (pod("chat-0", 0), pod("chat-0", 0, uid="2"), pod("chat-0", 0, uid="2", weight=2.0)):
        house.watch.show(service)
        house.turn(2)
    assert [board.done.count("release") for board in house.boards] == [1, 1, 0]
    assert house.node.members[0].weight == 2.0


def test_nothing_stays_set_while_pods_are_unknown(tmp_path: Path) -> None:
    """With a kubelet that has been silent too long everything is given back; with an answer it is taken again."""
    house = Server(tmp_path)
    house.watch.show(pod("chat-0", 0))
    house.turn(2)
    house.watch.seen = PodsSeen(None, ("the kubelet is silent",))
    house.turn()
    assert house.set_for == set()
    assert "the kubelet is silent" in house.desk.status.faults
    assert house.words("fault") == ["the kubelet is silent"]
    house.watch.show(pod("chat-0", 0))
    house.turn(2)
    assert len(house.set_for) == 1


def test_pods_that_could_not_be_looked_at_are_said_to_be_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where kubelet or API are silent the event does not say that the pod is gone, and the server's status says why."""
    house = Server(tmp_path)
    chat = pod("chat-0", 0)
    kept = tmp_path / "pods" / "photos-0-012345"
    kept.mkdir(parents=True)
    for seen, words in (
        (PodsSeen(None, ("the kubelet is silent",)), "the pods of this node could not be looked at"),
        (PodsSeen(Placement(unknown=frozenset({chat.pod})), ("the API is silent",)), "it could not be looked at"),
    ):
        house.watch.seen = PodsSeen(Placement((chat,), unknown=frozenset({PodName("models", "photos-0")})))
        house.turn(2)
        house.watch.seen = seen
        house.turn()
        assert house.set_for == set()
        assert f"{words}: {seen.faults[0]}; its GPUs are as they were found" in house.words("pod")[-1]
        assert house.node.shown.faults == house.desk.status.faults == seen.faults
        print_node(house.node.shown)
        assert seen.faults[0] in capsys.readouterr().out
    assert kept.is_dir(), "what is kept of a pod of which nothing is known is not to be removed"


def lived(seed: int, folder: Path) -> None:
    """Live through one history of pods, and check after every turn what is held."""
    chance = random.Random(seed)
    house = Server(folder, chance.choice((None, 200.0)))
    for _ in range(12):
        numbers = list(range(8))
        chance.shuffle(numbers)
        services = [
            pod(f"pod-{each}", *numbers[2 * each : 2 * each + chance.randint(1, 2)], uid=str(chance.randrange(2)))
            for each in range(4)
            if chance.random() < 0.6
        ]
        house.watch.show(*services)
        house.turn()
        assert house.set_for == {each.device for each in services}
        assert {each.name for each in house.node.shown.services} == {each.name for each in services}
    house.watch.show()
    house.turn()
    assert house.set_for == set()


def test_no_setting_outlives_its_pod_in_random_histories(tmp_path: Path) -> None:
    """After every turn exactly those boards are held whose pods are there, with a limit on the server or without."""
    for seed in range(4):
        lived(seed, tmp_path / str(seed))


@pytest.mark.slow
def test_no_setting_outlives_its_pod_in_many_histories(tmp_path: Path) -> None:
    """The same, fifty times."""
    for seed in range(100, 150):
        lived(seed, tmp_path / str(seed))


def test_a_pod_that_cannot_be_looked_after_leaves_the_others_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is told once, shown as refused, and tried again after a while; refused ones are told too."""
    house = Server(tmp_path)
    house.watch.show(pod("chat-0", 0))
    house.turn(2)
    house.fails = UnknownName("profile", "chat", ())
    mig = {PodName("models", "sliced"): "MIG-1 is a slice of a GPU"}
    house.watch.show(pod("chat-0", 0), pod("photos-0", 1), refused=mig)
    house.turn(5)
    assert len(house.set_for) == 1
    assert sum("photos-0 is not looked after" in words for words in house.words("pod")) == 1
    assert sum("sliced is not looked after" in words for words in house.words("pod")) == 1
    assert {each.pod: bool(each.refused) for each in house.node.shown.pods} == {
        "chat-0": False,
        "photos-0": True,
        "sliced": True,
    }
    print_node(house.node.shown)
    assert "models/sliced is not looked after: MIG-1" in capsys.readouterr().out
    house.fails = None
    house.turn(int(AGAIN_S) + 1)
    assert len(house.set_for) == 2


def test_a_pod_whose_files_cannot_be_used_leaves_the_others_alone(tmp_path: Path) -> None:
    """An error of the system at its folder or its profile is the pod's, and not the daemon's end."""
    house = Server(tmp_path)
    house.watch.show(pod("chat-0", 0))
    house.turn(2)
    house.fails = OSError(errno.ENOSPC, "No space left on device", "/state")
    house.watch.show(pod("chat-0", 0), pod("photos-0", 1))
    house.turn(5)
    assert len(house.set_for) == 1
    assert house.words("pod")[-1].endswith(
        "photos-0 is not looked after: /state cannot be used: No space left on device"
    )
    house.fails = None
    house.turn(int(AGAIN_S) + 1)
    assert len(house.set_for) == 2


def test_a_board_that_cannot_be_given_back_is_told_of(tmp_path: Path) -> None:
    """The pod is gone all the same, and the fault says what may stand changed."""
    house = Server(tmp_path)
    house.watch.show(pod("chat-0", 0))
    house.turn(2)
    house.boards[0].fails["release"] = DeviceError("the actuator is gone")
    house.watch.show()
    house.turn()
    assert house.node.members == ()
    assert any("the actuator is gone" in words for words in house.words("fault"))


def test_the_daemons_end_gives_every_pod_back(tmp_path: Path) -> None:
    """And the pods are followed no more."""
    house = Server(tmp_path)
    house.watch.show(pod("chat-0", 0), pod("photos-0", 1))
    house.turn(2)
    house.node.stop()
    house.node.run()
    assert house.set_for == set()
    assert house.watch.closed


def test_pods_of_an_earlier_daemon_leave_no_folder(tmp_path: Path) -> None:
    """What is kept of pods that are there stays, for they go on where they were."""
    house = Server(tmp_path)
    chat = pod("chat-0", 0)
    for name in (chat.name, "gone-012345"):
        (tmp_path / "pods" / name).mkdir(parents=True)
    house.watch.show(chat)
    house.turn()
    assert [each.name for each in (tmp_path / "pods").iterdir()] == [chat.name]


def test_each_pod_has_an_api_while_it_is_there(tmp_path: Path) -> None:
    """One that comes is served at once, one that is gone is unknown, and a successor of its name is another."""
    house = Server(tmp_path)
    house.turn()
    path = tmp_path / "d.sock"
    options = WebOptions(path, services=_Doors(house.node), node=lambda: house.node.shown)
    chat = pod("chat-0", 0)
    with serve(house.desk, options), Client(path) as whole, Client(path, service=chat.name) as client:
        with pytest.raises(UnknownName):
            client.status()
        house.watch.show(chat)
        house.turn(2)
        assert client.status().device == chat.device
        assert [each.name for each in whole.node().services] == [chat.name]
        assert whole.node().pods[0].namespace == "models"
        metrics = _metrics(path)
        assert f'polythrottle_pod{{namespace="models",pod="chat-0",service="{chat.name}"}} 1.0' in metrics
        house.watch.show()
        house.turn()
        with pytest.raises(UnknownName):
            client.status()
        house.watch.show(replace(chat, gpus=(GPUS[3],)))
        house.turn(2)
        assert client.status().device == f"nvml:{GPUS[3]}"
        assert whole.status().faults == ()


def _metrics(path: Path) -> str:
    import http.client
    import socket

    line = http.client.HTTPConnection("localhost")
    line.sock = socket.socket(socket.AF_UNIX)
    line.sock.connect(str(path))
    line.request("GET", "/metrics")
    text = line.getresponse().read().decode()
    line.close()
    return text


def test_a_pods_wish_becomes_a_service(tmp_path: Path) -> None:
    """Profile, SLO, weight and metrics are its own; the lower of its watts and the administrator's holds."""
    (tmp_path / "chat.toml").write_text("")
    service = replace(
        pod("chat-0", 0, slo=("p99<=0.2s",), power_w=500.0, weight=3.0, metrics="8000/metrics"), address="10.0.0.7"
    )
    made = service_of(service, tmp_path, Bounds(power_w=600.0, temperature_c=80.0))
    assert made.guards == Bounds(power_w=500.0, temperature_c=80.0)
    assert (made.slo, made.weight, made.device) == (("p99<=0.2s",), 3.0, f"nvml:{GPUS[0]}")
    assert made.traffic == "metrics:http://10.0.0.7:8000/metrics"
    assert made.profile == str(tmp_path / "chat.toml")
    assert service_of(service, tmp_path, Bounds(power_w=400.0)).guards.power_w == 400.0
    with pytest.raises(UnknownName, match="chat"):
        service_of(pod("chat-0", 0), tmp_path / "nowhere", Bounds())


def test_settings_of_kubernetes(tmp_path: Path) -> None:
    """An empty table is enough; pods and services of the file exclude each other, and keys are checked."""
    file = tmp_path / "daemon.toml"
    file.write_text("[kubernetes]\n")
    assert read_settings(file).kubernetes == KubernetesSettings()
    assert read_settings(file).shared
    file.write_text('[kubernetes]\napi = "http://127.0.0.1:8001"\nprofiles = "/p"\nkubelet = "/k"\n')
    assert read_settings(file).kubernetes == KubernetesSettings(Path("/p"), Path("/k"), "http://127.0.0.1:8001")
    file.write_text('[kubernetes]\n[[service]]\nname = "chat"\n')
    with pytest.raises(InvalidInput, match=r"leave \[\[service\]\] out"):
        check(read_settings(file))
    with pytest.raises(InvalidInput, match="leave device out"):
        check(Settings(kubernetes=KubernetesSettings(), device="nvml:0"))
    file.write_text("[kubernetes]\nsocket = 3\n")
    with pytest.raises(BadFile, match=r"kubernetes\.socket"):
        read_settings(file)


needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C compiler, so the stand-in driver cannot be built")


@pytest.fixture
def four(tmp_path: Path) -> Iterator[FakeNvml]:
    """Return a stand-in with four GPUs."""
    with FakeNvml(tmp_path / "nvml", ("h100-sxm",) * 4) as fake:
        yield fake


@pytest.mark.slow
@needs_compiler
def test_an_actuator_of_a_group_serves_some_of_its_gpus(four: FakeNvml, tmp_path: Path) -> None:
    """To whoever may set all of them; each GPU has a lease, so that none has two holders; others are unknown."""
    permits = Permits([Permit(None, 4001, ("nvml:0-2",), control=True)], own=0)
    alice, bob = Peer(101, 4001, frozenset({4001})), Peer(102, 4002, frozenset({4002}))
    uuids = [four.uuid(slot) for slot in range(4)]
    before = four.snapshot()
    with bench(tmp_path / "a", permits, ("nvml:0-2",)) as found:
        line = found.line(alice)
        pair = f"nvml:{uuids[1]},{uuids[0]}"
        assert line.ask("describe", device=pair)["title"].startswith("2 x")
        token = line.ask("take", device=pair, seconds=30.0)["token"]
        line.ask("apply", token=token, point={"gpu_max_hz": 1200 * 10**6})
        assert [four.get(slot, "gpu_lock_max_mhz") for slot in (0, 1)] == [1200, 1200]
        for other in (f"nvml:{uuids[1]}", f"nvml:{uuids[1]},{uuids[2]}"):
            with pytest.raises(DeviceError):
                line.ask("take", device=other, seconds=30.0)
        assert line.ask("take", device=f"nvml:{uuids[2]}", seconds=30.0)["token"]
        for strange in (f"nvml:{uuids[3]}", f"nvml:{uuids[0]},{uuids[3]}", "nvml:GPU-none", "cpu"):
            with pytest.raises(UnknownName):
                line.ask("describe", device=strange)
        assert line.ask("describe", device="")["title"].startswith("3 x")
        line.ask("release", token=token)
        with pytest.raises(UnknownName):
            found.service._named(bob, pair)
    assert four.snapshot() == before


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(("trouble", "words"), [("lost", "does not answer now"), ("mig_enabled", "is split by MIG")])
def test_one_gpu_that_is_lost_or_split_leaves_the_others_served(
    four: FakeNvml, tmp_path: Path, trouble: str, words: str
) -> None:
    """All of three is not all of four, but each of the three is served; the fourth is too, once it answers again."""
    uuids = [four.uuid(slot) for slot in range(4)]
    with bench(tmp_path / "a", Permits([], own=0), ("nvml:all",)) as found:
        line = found.line()
        four.set(3, **{trouble: 1})
        assert usable_part("nvml:all") == "nvml:0-2"
        for name in ("nvml:0", f"nvml:{uuids[1]},{uuids[2]}"):
            token = line.ask("take", device=name, seconds=30.0)["token"]
            line.ask("apply", token=token, point={"gpu_max_hz": 1200 * 10**6})
            line.ask("release", token=token)
        for name in ("nvml:3", f"nvml:{uuids[3]}", f"nvml:{uuids[0]},{uuids[3]}"):
            with pytest.raises(DeviceError, match=words):
                line.ask("describe", device=name)
        with pytest.raises(InvalidInput, match="names GPU 1 twice"):
            line.ask("describe", device="nvml:1,1")
        four.set(3, **{trouble: 0})
        assert line.ask("describe", device="nvml:3")["uri"] == f"nvml:{uuids[3]}"


@needs_compiler
def test_a_lost_gpu_is_named_at_the_actuators_start(
    four: FakeNvml, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, with those that are served meanwhile."""
    four.set(1, lost=1)
    four.set(2, lost=1)
    monkeypatch.setattr(Actuator, "run", lambda server: None)
    monkeypatch.setattr(main, "_heed", lambda server: None)
    assert main.main(["--socket", str(tmp_path / "s" / "a.sock"), "--device", "nvml:all"]) == 0
    (told,) = capsys.readouterr().err.splitlines()
    assert "nvml:all is not there yet, and is waited for: GPU 1-2 does not answer" in told
    assert told.endswith("; served meanwhile, each by itself: nvml:0,3")


def chat_profile(path: Path, uri: str) -> None:
    """Write a profile of GPUs with a ladder."""
    points = [OperatingPoint({"gpu_max_hz": mhz * 10**6}) for mhz in (705, 1200, 1980)]
    rungs = []
    for known, at in zip(LADDER.rungs, points, strict=True):
        service = replace(known.service, point=at, batch=1)
        assert isinstance(service, PointPerformance)
        rungs.append(Rung(known.rate_per_s, service, 0.0, known.power_w, known.p99_s))
    profile = Profile(
        uri,
        "openai://localhost:8000/chat",
        points[-1],
        measured(),
        slo=("p99<=100ms",),
        identity=identity_of(open_device(uri)),
        workload_knobs=(),
        ladder=Ladder(LADDER.slo_s, tuple(rungs)),
    )
    write_profile(profile, path)


@pytest.mark.slow
@needs_compiler
def test_from_the_kubelet_to_the_gpu_and_back(four: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod's two GPUs are set by the actuator for its load, and put back once the kubelet lists it no more."""
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", str(tmp_path / "state"))
    before = four.snapshot()
    uuids = sorted((four.uuid(1), four.uuid(2)))
    # As the kubelet lays a ConfigMap: each key is a link into a folder that is replaced as a whole.
    (tmp_path / "profiles" / "..2026").mkdir(parents=True)
    (tmp_path / "profiles" / "..data").symlink_to("..2026")
    (tmp_path / "profiles" / "chat.toml").symlink_to("..data/chat.toml")
    chat_profile(tmp_path / "profiles" / "..2026" / "chat.toml", f"nvml:{','.join(uuids)}")
    cluster = FakeCluster({CHAT: PodFacts("1", SERVED)})
    monkeypatch.setattr(kubernetes, "ClusterApi", lambda url: cluster)
    kubelet = FakeKubelet(tmp_path / "kubelet.sock")
    kubelet.pods[CHAT] = {"nvidia.com/gpu": tuple(uuids)}, ()
    kubelet.start()
    with bench(tmp_path / "a", Permits([], own=0), ("nvml:all",)) as found:
        settings = Settings(
            actuator=found.path,
            kubernetes=KubernetesSettings(tmp_path / "profiles", kubelet.socket),
        )
        node, _ = build_node(settings, SystemClock(), Mailbox())
        try:
            locked = _until(node, lambda: [four.get(slot, "gpu_lock_max_mhz") for slot in range(4)], [0, 705, 705, 0])
            assert locked == [0, 705, 705, 0]
            assert node.shown.services[0].phase == "following"
            kubelet.pods.clear()
            assert _until(node, four.snapshot, before) == before
            assert node.members == ()
        finally:
            node.stop()
            node.run()
            kubelet.stop()
    assert four.snapshot() == before


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_a_gpu_named_by_index_and_by_uuid_is_of_one_service(
    four: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: bool, first: bool
) -> None:
    """Only the driver knows that both are one: the later service is left out at the start, and the other goes on."""
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", str(tmp_path / "state"))
    devices = {"photos": "nvml:0-2", "other": f"nvml:{four.uuid(0)}", "third": "nvml:3"}
    if first:
        devices = dict(reversed(devices.items()))
    services = tuple(ServiceSettings(name, workload="resnet50", device=uri) for name, uri in devices.items())
    with bench(tmp_path / "a", Permits([], own=0), ("nvml:all",)) as found:
        settings = Settings(services=services, actuator=None if local else found.path, local=local)
        node, _ = build_node(settings, SystemClock(), Mailbox())
        node.turn()
        kept, out = ("other", "photos") if first else ("photos", "other")
        assert {member.name for member in node.members} == {kept, "third"}
        (fault,) = node.shown.faults
        assert fault == (
            f"service {out} is left out: its device has {four.uuid(0)}, which is of service {kept}; "
            "a device serves one service"
        )
        node.stop()
        node.run()


def _until(node: Node, look: object, wanted: object) -> object:
    """Turn, with a little traffic on every service, until something is as wanted or a minute is over."""
    assert callable(look)
    ends_s = time.monotonic() + 60
    while (found := look()) != wanted and time.monotonic() < ends_s:
        for member in node.members:
            member.mailbox.hand_in(Report(RequestStats(arrived=1, answered=1, p99_s=0.05)))
        node.turn()
        time.sleep(0.05)
    return found
