"""Which pod has which GPUs: a kubelet's answers over a real Unix socket, annotations, and 1,000 random histories."""

import http.server
import json
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import pytest
from actuators import until
from kubelets import CHAT, GPUS, SERVED, FakeCluster, FakeKubelet, Held

from polythrottle.daemon.pods import kubelet_relay, residents
from polythrottle.daemon.pods.kubernetes import ClusterApi, Kubelet, PodDevices, PodFacts, PodName, message_class
from polythrottle.daemon.pods.residents import (
    FACTS_S,
    LOOK_S,
    SILENT_S,
    Placement,
    PodsSeen,
    PodTracker,
    PodWatch,
    Wish,
    place,
    wish_of,
)
from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import DeviceError, InvalidInput, PermissionDenied, PolythrottleError, UnknownName


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[FakeKubelet]:
    """Return a kubelet that listens."""
    found = FakeKubelet(tmp_path / "kubelet.sock")
    found.start()
    yield found
    found.stop()


def tracker(kubelet: FakeKubelet, cluster: FakeCluster) -> tuple[PodTracker, VirtualClock]:
    """Return who follows the pods, over the real socket."""
    clock = VirtualClock()
    return PodTracker(Kubelet(kubelet.socket), cluster, clock), clock


def test_a_kubelet_tells_who_holds_what(kubelet: FakeKubelet) -> None:
    """Devices of all containers of a pod are told by resource, and pods that hold none are left out."""
    kubelet.pods[CHAT] = {"nvidia.com/gpu": (GPUS[0], GPUS[1]), "rdma/hca": ("mlx5_0",)}, ()
    kubelet.pods[PodName("models", "claimed")] = {}, ("gpu",)
    kubelet.pods[PodName("default", "plain")] = {}, ()
    client = Kubelet(kubelet.socket)
    assert client.pods() == (
        PodDevices(CHAT, {"nvidia.com/gpu": (GPUS[0], GPUS[1]), "rdma/hca": ("mlx5_0",)}),
        PodDevices(PodName("models", "claimed"), {}, ("gpu",)),
    )
    kubelet.stop()
    with pytest.raises(DeviceError, match="does not tell who holds which devices: UNAVAILABLE"):
        client.pods()
    kubelet.start()
    assert len(client.pods()) == 2
    client.close()


def test_a_relay_hands_the_kubelet_on_to_a_group(kubelet: FakeKubelet, tmp_path: Path) -> None:
    """Through it the kubelet answers as by itself, is missed while it is away, and is found again."""
    kubelet.pods[CHAT] = {"nvidia.com/gpu": (GPUS[0],)}, ()
    path = tmp_path / "relay.sock"
    command = [sys.executable, "-m", "polythrottle.daemon.pods.kubelet_relay", str(kubelet.socket), str(path)]
    with subprocess.Popen(command) as child, ExitStack() as ends:
        ends.callback(child.kill)
        until(path.is_socket)
        assert path.stat().st_mode & 0o777 == 0o660
        client = Kubelet(path)
        ends.callback(client.close)
        assert client.pods() == (PodDevices(CHAT, {"nvidia.com/gpu": (GPUS[0],)}),)
        kubelet.stop()
        with pytest.raises(DeviceError, match="does not tell who holds which devices: UNAVAILABLE"):
            client.pods()
        kubelet.start()
        for _ in range(20):  # each line that is closed makes room for the next
            client.close()
            assert len(client.pods()) == 1
        assert child.poll() is None


def test_a_relay_does_not_listen_where_others_may(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In a folder that anybody may write to somebody else could be taken for it."""
    tmp_path.chmod(0o777)
    assert (
        kubelet_relay.main([str(tmp_path / "kubelet.sock"), str(tmp_path / "relay.sock")]) == PermissionDenied.exit_code
    )
    assert "is open to others" in capfd.readouterr().err
    tmp_path.chmod(0o700)
    (tmp_path / "taken").mkdir()
    assert kubelet_relay.main([str(tmp_path / "kubelet.sock"), str(tmp_path / "taken")]) != 0
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_fields_that_later_kubelets_add_are_skipped() -> None:
    """An answer with fields that are not read (processors, memory, topology) is understood."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="newer.proto", package="newer", syntax="proto3")
    message = file.message_type.add(name="PodResources")
    for number, name in enumerate(("name", "namespace", "later"), 1):
        message.field.add(name=name, number=number if number < 3 else 99, type=9, label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    newer = message_factory.GetMessageClass(pool.FindMessageTypeByName("newer.PodResources"))
    sent = newer(name="chat-0", namespace="models", later="x").SerializeToString()
    read = message_class("PodResources").FromString(sent)
    assert (read.namespace, read.name) == (CHAT.namespace, CHAT.name)


@pytest.mark.parametrize(
    ("annotations", "wish"),
    [
        ({"profile": "chat"}, Wish("chat")),
        ({"profile": "chat", "slo-p99": "200ms", "power": "600W"}, Wish("chat", ("p99<=200ms",), 600.0)),
        (
            {"profile": "a.b", "slo-ttft-p99": "2s", "slo-tpot-p99": "100ms"},
            Wish("a.b", ("ttft_p99<=2s", "tpot_p99<=100ms")),
        ),
        ({"profile": "chat", "weight": "2.5", "metrics": "8000"}, Wish("chat", weight=2.5, metrics="8000/metrics")),
        ({"profile": "chat", "metrics": "8000/v1/metrics"}, Wish("chat", metrics="8000/v1/metrics")),
    ],
)
def test_annotations_say_what_is_asked_for(annotations: dict[str, str], wish: Wish) -> None:
    """Profile, SLO, watts, weight and where metrics are; other programs' annotations say nothing."""
    said = {f"polythrottle.io/{name}": value for name, value in annotations.items()}
    assert wish_of({**said, "prometheus.io/port": "9000"}) == wish


@pytest.mark.parametrize(
    ("annotations", "words"),
    [
        ({"slo-p99": "200ms"}, "profile is missing"),
        ({"profile": "../etc/passwd"}, "no name of a profile"),
        ({"profile": "/etc/passwd"}, "no name of a profile"),
        ({"profile": "chat", "slo-p99": "soon"}, "soon"),
        ({"profile": "chat", "slo-p99": "5x"}, "p99<=5x: beside a profile a limit is absolute; say it in time"),
        ({"profile": "chat", "slo-p99": "200ms; rm"}, "200ms; rm"),
        ({"profile": "chat", "power": "-3W"}, "-3"),
        ({"profile": "chat", "weight": "1e9"}, "between 0.001 and 1000"),
        ({"profile": "chat", "weight": "much"}, "much"),
        ({"profile": "chat", "metrics": "http://169.254.169.254/"}, "no port and path"),
        ({"profile": "chat", "metrics": "80@evil:8000/"}, "no port and path"),
        ({"profile": "chat", "metrics": "99999/metrics"}, "no port and path"),
        ({"profile": "chat", "slo-p9": "200ms"}, "slo-p99"),
        ({"profile": "chat", "slo-p99": "x" * 200_000}, "polythrottle.io/slo-p99: 'xxx"),
        ({"profile": "chat", "slo-p99": "y" * 90}, "polythrottle.io/slo-p99: 'yyy"),
        ({"profile": "chat", "power": "1" + " " * 200_000 + "W"}, "polythrottle.io/power: '1 "),
        ({"profile": "chat", "weight": "9" * 99}, "polythrottle.io/weight: a weight lies"),
        ({"profile": "x" * 200_000}, "polythrottle.io/profile: 'xxx"),
        ({"profile": "chat", "metrics": "8" * 200_000}, "polythrottle.io/metrics: '888"),
    ],
)
def test_annotations_that_say_nothing_sound_are_refused(annotations: dict[str, str], words: str) -> None:
    """One line tells which annotation and why; no annotation leads to another file or another address."""
    with pytest.raises((InvalidInput, UnknownName), match=words.replace("(", "\\(")) as told:
        wish_of({f"polythrottle.io/{name}": value for name, value in annotations.items()})
    assert "polythrottle.io/" in str(told.value)
    assert "\n" not in str(told.value)
    assert len(str(told.value)) < 400


OTHER = PodName("models", "other")


@pytest.mark.parametrize(
    ("held", "facts", "words"),
    [
        ({"nvidia.com/mig-1g.10gb": ("MIG-0a-1",)}, {}, "a slice of a GPU (MIG)"),
        ({"nvidia.com/gpu": ("nvidia0/gi1",)}, {}, "no UUID of a GPU"),
        ({"nvidia.com/gpu.shared": (f"{GPUS[0]}::1",)}, {}, "is shared with models/other"),
        ({"rdma/hca": ("mlx5_0",)}, {}, "holds no GPU"),
        ({}, {}, "dynamic resource allocation"),
        (
            {"nvidia.com/gpu": (GPUS[1],)},
            {"dynamo.nvidia.com/gpu-power-limit": "500"},
            "set by NVIDIA Dynamo's power agent",
        ),
        ({"nvidia.com/gpu": (GPUS[1],)}, {"polythrottle.io/metrics": "8000"}, "no address yet"),
    ],
)
def test_what_cannot_be_set_for_one_pod_alone_is_refused(held: Held, facts: dict[str, str], words: str) -> None:
    """Slices, shared GPUs, claims, devices of other names and GPUs that another agent sets, each in one line."""
    claims = () if held else ("gpu",)
    lists = [PodDevices(CHAT, held, claims), PodDevices(OTHER, {"nvidia.com/gpu.shared": (f"{GPUS[0]}::0",)})]
    placement = place(lists, {CHAT: PodFacts("1", {**SERVED, **facts}), OTHER: PodFacts("2")})
    assert placement.services == ()
    assert list(placement.refused) == [CHAT]
    assert words in placement.refused[CHAT]


def test_a_share_of_a_gpu_that_nobody_else_holds_is_the_whole_of_it() -> None:
    """With time-slicing a pod is served while it is alone on its GPU, also beside one that has ended there."""
    lists = [PodDevices(pod, {"nvidia.com/gpu": (f"{GPUS[0]}::{number}",)}) for number, pod in enumerate((CHAT, OTHER))]
    alone = place(lists, {CHAT: PodFacts("1", SERVED), OTHER: PodFacts("2", phase="Succeeded")})
    assert [each.device for each in alone.services] == [f"nvml:{GPUS[0]}"]
    unknown = place(lists, {CHAT: PodFacts("1", SERVED)})
    assert unknown.services == ()


def test_services_have_names_of_their_own() -> None:
    """Pods of one name in two namespaces, and one that follows another, are told apart; every name is a service's."""
    from polythrottle.daemon.settings import _SERVICE_NAME

    lists = [
        PodDevices(PodName(space, "7.chat" * 20), {"nvidia.com/gpu": (gpu,)})
        for space, gpu in zip("ab", GPUS, strict=False)
    ]
    names = [
        each.name
        for uid in ("1", "2")
        for each in place(lists, {held.pod: PodFacts(uid, SERVED) for held in lists}).services
    ]
    assert len(set(names)) == 4
    assert all(_SERVICE_NAME.fullmatch(name) for name in names)


def test_a_successor_of_the_same_name_is_known_within_seconds(kubelet: FakeKubelet) -> None:
    """A pod that took another's name and GPU between two looks is asked about again, and is another one."""
    cluster = FakeCluster({CHAT: PodFacts("1", SERVED)})
    kubelet.pods[CHAT] = {"nvidia.com/gpu": (GPUS[0],)}, ()
    watch, clock = tracker(kubelet, cluster)
    assert [each.uid for each in watch.look().placement.services] == ["1"]  # type: ignore[union-attr]
    cluster.pods[CHAT] = PodFacts("2")
    clock.sleep(FACTS_S)
    assert watch.look().placement.services == ()  # type: ignore[union-attr]


def test_answers_are_believed_for_a_while(kubelet: FakeKubelet) -> None:
    """A kubelet that restarts changes nothing; one that stays away leaves nothing known, and the fault is told."""
    cluster = FakeCluster({CHAT: PodFacts("1", SERVED)})
    kubelet.pods[CHAT] = {"nvidia.com/gpu": (GPUS[0],)}, ()
    watch, clock = tracker(kubelet, cluster)
    before = watch.look().placement
    kubelet.stop()
    cluster.down = True
    clock.sleep(SILENT_S - 1)
    seen = watch.look()
    assert seen.placement == before
    assert len(seen.faults) == 2
    clock.sleep(1)
    assert watch.look().placement is None
    kubelet.start()
    cluster.down = False
    assert watch.look().placement == before


@pytest.fixture
def slow() -> Iterator[FakeCluster]:
    """Return a cluster of six pods that serves, and can be made to answer nobody."""
    found = FakeCluster({PodName("models", f"chat-{number}"): PodFacts(str(number), SERVED) for number in range(6)})
    yield found
    found.open.set()


def hold_one_each(kubelet: FakeKubelet, cluster: FakeCluster) -> None:
    """Let every pod of a cluster hold a GPU of its own."""
    for pod, gpu in zip(cluster.pods, GPUS, strict=False):
        kubelet.pods[pod] = {"nvidia.com/gpu": (gpu,)}, ()


def test_a_slow_api_drops_no_pod_and_keeps_none_that_is_gone(
    kubelet: FakeKubelet, slow: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six pods whose API answers after seconds are asked about at once and stay; one the kubelet lists no more goes."""
    monkeypatch.setattr(residents, "ANSWER_S", 0.05)
    hold_one_each(kubelet, slow)
    watch, clock = tracker(kubelet, slow)
    until(lambda: len(watch.look().placement.services) == 6)  # type: ignore[union-attr]
    gone = next(iter(slow.pods))
    for turn in range(4):  # each answer takes more than two looks
        slow.open.clear()
        clock.sleep(FACTS_S)
        for _ in range(2):
            clock.sleep(LOOK_S)
            seen = watch.look()
            assert seen.placement is not None
            assert seen.faults == ()
            assert len(seen.placement.services) == (6 if turn < 2 else 5)
        if turn == 1:
            del kubelet.pods[gone]
            assert gone not in {each.pod for each in watch.look().placement.services}  # type: ignore[union-attr]
        slow.open.set()
        until(lambda: not watch.look().placement.unknown and not watch._questions)  # type: ignore[union-attr]
    watch.close()


def test_an_answer_that_comes_after_its_pod_was_replaced_is_not_taken(kubelet: FakeKubelet, slow: FakeCluster) -> None:
    """Whoever was away from the kubelet's list is asked about anew, whatever is still on its way of its predecessor."""
    hold_one_each(kubelet, slow)
    watch, _ = tracker(kubelet, slow)
    slow.open.clear()
    seen = watch.look()
    assert seen.placement is not None
    assert seen.placement.services == ()
    assert seen.placement.unknown == set(slow.pods)
    (pod, held), *_ = kubelet.pods.items()
    late = watch._questions[pod]
    del kubelet.pods[pod]
    watch.look()
    slow.pods[pod] = PodFacts("another", SERVED)
    kubelet.pods[pod] = held
    slow.open.set()
    assert late.over(10.0)
    late.facts = PodFacts("predecessor", SERVED)
    until(lambda: len(watch.look().placement.services) == 6)  # type: ignore[union-attr]
    assert {each.uid for each in watch.look().placement.services} == {"another", *"12345"}  # type: ignore[union-attr]
    watch.close()


def test_a_silent_api_is_told_as_unknown_pods(kubelet: FakeKubelet, slow: FakeCluster) -> None:
    """What was told is believed for a while; then the pods are there, and nothing is known of them."""
    hold_one_each(kubelet, slow)
    watch, clock = tracker(kubelet, slow)
    until(lambda: len(watch.look().placement.services) == 6)  # type: ignore[union-attr]
    slow.down = True
    clock.sleep(SILENT_S)
    seen = watch.look()
    assert seen.placement is not None
    assert seen.placement.services == ()
    assert seen.placement.unknown == set(slow.pods)
    assert seen.faults == ("the cluster's API does not answer",)
    watch.close()


def test_the_clusters_api_is_asked_for_one_pod(tmp_path: Path) -> None:
    """A pod's annotations, address and phase are read; gone, forbidden and nonsense are told apart."""
    answers = {
        "chat-0": (
            200,
            {"metadata": {"uid": "u", "annotations": SERVED}, "status": {"phase": "Running", "podIP": "10.0.0.7"}},
        ),
        "bare": (200, {"metadata": {"uid": "u"}}),
        "secret": (403, {}),
        "odd": (200, {"metadata": {"uid": 7}}),
        "list": (200, []),
        "half": (200, {"metadata": {"uid": "\ud800"}}),
        "halved": (200, {"metadata": {"uid": "u", "annotations": {"polythrottle.io/\ud800": ""}}}),
        "broken": (500, {}),
    }
    shown = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            shown.append(self.headers.get("Authorization"))
            code, document = answers.get(self.path.rpartition("/")[2], (404, {}))
            body = json.dumps(document).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    (tmp_path / "token").write_text("secret")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            api = ClusterApi(f"http://127.0.0.1:{server.server_port}", tmp_path)
            assert api.pod(CHAT) == PodFacts("u", SERVED, "Running", "10.0.0.7")
            assert api.pod(PodName("models", "bare")) == PodFacts("u", {}, "")
            assert api.pod(PodName("models", "gone")) is None
            refused = {
                "secret": "get pods",
                "broken": "500",
                **dict.fromkeys(("odd", "list", "half", "halved"), "no pod"),
            }
            for name, words in refused.items():
                with pytest.raises(DeviceError, match=words) as told:
                    api.pod(PodName("models", name))
                str(told.value).encode()
        finally:
            server.shutdown()
            thread.join()
    assert set(shown) == {None}, "what is not encrypted carries no token"
    with pytest.raises(DeviceError, match="does not answer"):
        api.pod(CHAT)


@pytest.mark.parametrize("url", ["ftp://x", "http://10.0.0.1", "https://x:y", "https://h/path", "nonsense"])
def test_an_address_that_leads_to_no_api_is_refused(url: str) -> None:
    """Only TLS, or a proxy on this machine."""
    with pytest.raises(InvalidInput):
        ClusterApi(url)


def test_outside_a_cluster_the_api_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Kubernetes' environment one line says how."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(InvalidInput, match="kubectl proxy"):
        ClusterApi()


class History:
    """A node on which pods come and go at random, and what must be known of it, reckoned another way than `place`.

    Args:
        seed: Of the history.
        kubelet: Which tells of it.
    """

    def __init__(self, seed: int, kubelet: FakeKubelet) -> None:
        self.random = random.Random(seed)
        self.kubelet = kubelet
        self.cluster = FakeCluster()
        self.free = {gpu: 2 if number >= 5 else 1 for number, gpu in enumerate(GPUS[:7])}  # the last two are sliced
        self.slots: dict[PodName, list[str]] = {}
        self.uids = 0
        kubelet.pods.clear()

    def step(self) -> None:
        """Let one thing happen."""
        self.random.choice((self.come, self.come, self.go, self.end, self.follow, self.annotate))()

    def come(self) -> None:
        """A pod is started, on GPUs that are free."""
        pod = PodName(self.random.choice("ab"), f"pod-{self.random.randrange(5)}")
        if pod not in self.kubelet.pods:
            self._start(pod)

    def _start(self, pod: PodName) -> None:
        kind = self.random.choice(("whole", "whole", "whole", "shared", "mig", "claim", "none"))
        wanted = self.random.randint(1, 3)
        pool = GPUS[:5] if kind == "whole" else GPUS[5:7]
        taken = [gpu for gpu in self.random.sample(pool, len(pool)) if self.free[gpu]][:wanted]
        self.slots[pod] = []
        devices: Held = {}
        if kind == "whole" and taken:
            devices = {"nvidia.com/gpu": tuple(taken)}
        elif kind == "shared" and taken:
            devices = {"nvidia.com/gpu.shared": tuple(f"{gpu}::{self.free[gpu]}" for gpu in taken)}
        elif kind == "mig":
            devices = {"nvidia.com/mig-1g.10gb": (f"MIG-{GPUS[7][4:]}",)}
        if kind in ("whole", "shared"):
            self.slots[pod] = taken
            for gpu in taken:
                self.free[gpu] -= 1
        self.kubelet.pods[pod] = devices, (("gpu",) if kind == "claim" else ())
        self.uids += 1
        self.cluster.pods[pod] = PodFacts(str(self.uids), self._annotations())

    def _annotations(self) -> dict[str, str]:
        said = dict(SERVED) if self.random.random() < 0.7 else {}
        if self.random.random() < 0.1:
            said["dynamo.nvidia.com/gpu-power-limit"] = "500"
        if self.random.random() < 0.1:
            said["polythrottle.io/slo"] = "fast"
        return said

    def _any(self) -> PodName | None:
        return self.random.choice(sorted(self.kubelet.pods)) if self.kubelet.pods else None

    def go(self) -> None:
        """A pod vanishes; its GPUs are free."""
        pod = self._any()
        if pod is not None:
            del self.kubelet.pods[pod]
            self.cluster.pods.pop(pod, None)
            for gpu in self.slots.pop(pod):
                self.free[gpu] += 1

    def end(self) -> None:
        """A pod ends and is listed all the same."""
        pod = self._any()
        if pod is not None and self.random.random() < 0.5:
            facts = self.cluster.pods[pod]
            self.cluster.pods[pod] = PodFacts(facts.uid, facts.annotations, self.random.choice(("Succeeded", "Failed")))

    def follow(self) -> None:
        """A pod goes and another of its name comes at once, perhaps on the same GPUs."""
        pod = self._any()
        if pod is not None:
            for gpu in self.slots.pop(pod):
                self.free[gpu] += 1
            self._start(pod)

    def annotate(self) -> None:
        """Somebody changes a pod's annotations."""
        pod = self._any()
        if pod is not None:
            facts = self.cluster.pods[pod]
            self.cluster.pods[pod] = PodFacts(facts.uid, self._annotations(), facts.phase)

    def expected(self) -> dict[str, tuple[str, ...]]:
        """Return GPUs by the uid of the pod they are set for."""
        running = {pod for pod, facts in self.cluster.pods.items() if facts.phase == "Running"}
        found = {}
        for pod in running:
            facts = self.cluster.pods[pod]
            mine = self.slots[pod]
            alone = all(not (set(mine) & set(self.slots[other])) for other in running - {pod})
            if mine and alone and facts.annotations == SERVED:
                found[facts.uid] = tuple(sorted(mine))
        return found


def lived(seed: int, kubelet: FakeKubelet) -> int:
    """Live through one history, and return how many pods were served in it."""
    history = History(seed, kubelet)
    watch, clock = tracker(kubelet, history.cluster)
    served = set()
    for _ in range(12):
        history.step()
        if history.random.random() < 0.02:
            kubelet.stop()
            watch.look()
            kubelet.start()
        if history.random.random() < 0.1:
            history.cluster.down = True
            watch.look()
            history.cluster.down = False
        # Within so long everything is known that has happened.
        for _ in range(1 + int(FACTS_S / LOOK_S)):
            clock.sleep(LOOK_S)
            seen = watch.look()
        assert seen.placement is not None
        assert seen.faults == ()
        assert {each.uid: each.gpus for each in seen.placement.services} == history.expected(), seed
        everyone = [gpu for each in seen.placement.services for gpu in each.gpus]
        assert len(everyone) == len(set(everyone))
        served |= {each.uid for each in seen.placement.services}
    watch.close()
    return len(served)


def test_the_mapping_is_right_in_random_histories(kubelet: FakeKubelet) -> None:
    """Pods come, end, vanish and follow each other; MIG, time-slicing, claims; kubelet and API go and come back."""
    assert sum(lived(seed, kubelet) for seed in range(25)) > 25


@pytest.mark.slow
def test_the_mapping_is_right_in_two_hundred_histories(kubelet: FakeKubelet) -> None:
    """The same, two hundred of a thousand times, others each day."""
    today = date.today().toordinal() % 5
    assert sum(lived(seed, kubelet) for seed in range(1000 + today, 2000, 5)) > 200


def test_whatever_annotations_say_is_one_line() -> None:
    """Random texts are a wish or an error of the project's own."""
    chance = random.Random(7)
    names = ["profile", "power", "weight", "metrics", "slo-p99", "x\ny"]
    for _ in range(500):
        said = {
            f"polythrottle.io/{chance.choice(names)}": "".join(
                chance.choices("chat0189.-/:<>=Wms\n\x00é", k=chance.randint(0, 8))
            )
            for _ in range(3)
        }
        told = ""
        try:
            wish_of({**SERVED, **said})
        except PolythrottleError as error:
            told = str(error)
        assert "\n" not in told


def test_an_api_that_refuses_is_asked_no_more_often_than_one_that_answers(kubelet: FakeKubelet) -> None:
    """It is overloaded, or forbids it: a look every second is no reason to ask it about every pod each time."""
    asked: list[PodName] = []

    class Counted(FakeCluster):
        def pod(self, name: PodName) -> PodFacts | None:
            asked.append(name)
            return super().pod(name)

    kubelet.pods[CHAT] = {"nvidia.com/gpu": (GPUS[0],)}, ()
    following, clock = tracker(kubelet, Counted(down=True))
    for _ in range(4):
        assert following.look().faults == ("the cluster's API does not answer",)
        clock.sleep(1.0)
    assert asked == [CHAT]
    clock.sleep(2.0)
    following.look()
    assert asked == [CHAT, CHAT]


@dataclass
class Stumbling:
    """Looks at pods that fail as nobody foresaw while it is told to."""

    fails: bool = False
    looks: int = 0
    closed: bool = False

    def look(self) -> PodsSeen:
        """Return that there are no pods."""
        self.looks += 1
        if self.fails:
            raise RuntimeError("a field of another kind")
        return PodsSeen(Placement())

    def close(self) -> None:
        """Note it."""
        self.closed = True


@pytest.mark.parametrize("begins", [False, True], ids=["later", "at once"])
def test_a_look_that_nobody_foresaw_to_fail_is_told_of_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, begins: bool
) -> None:
    """What was seen before is believed for as long as of a kubelet that is silent; once a look works all is well."""
    monkeypatch.setattr(residents, "LOOK_S", 0.01)
    clock, looks = VirtualClock(), Stumbling(begins)
    watch = PodWatch(looks, clock)  # type: ignore[arg-type]
    if not begins:
        until(lambda: watch.seen == PodsSeen(Placement()))
        looks.fails = True
    placement = None if begins else Placement()
    words = "the pods of this node cannot be looked at: RuntimeError: a field of another kind"
    until(lambda: watch.seen == PodsSeen(placement, (words,)))
    clock.sleep(SILENT_S)
    before = looks.looks
    until(lambda: looks.looks > before + 1)
    seen = watch.seen
    assert seen is not None
    assert (seen.placement, seen.faults[0]) == (None, words)
    looks.fails = False
    until(lambda: watch.seen == PodsSeen(Placement()))
    watch.close()
    assert looks.closed
