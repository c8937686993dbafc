"""A simulated server: some of its GPUs as one device, its meter, and the daemon that shares its watts."""

import os
import re
import shlex
import subprocess
import sys
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from actuators import until
from daemons import EPOCH_S

from polythrottle.backends import open_device
from polythrottle.backends.simulated import SimulatedDevice
from polythrottle.backends.simulated.node import SimulatedNode
from polythrottle.catalog import load_language_model, load_model
from polythrottle.catalog.tuned_profiles import write_profile
from polythrottle.cli.commands import run
from polythrottle.daemon.client import Client
from polythrottle.daemon.commands import SetNodePower
from polythrottle.daemon.loop.mailbox import Mailbox
from polythrottle.daemon.settings import NodeSettings, ServiceSettings, Settings, check_devices, read_settings
from polythrottle.daemon.startup import build_node
from polythrottle.daemon.traffic.simulated import NodeMeter
from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import InvalidInput, PolythrottleError, UnknownName
from polythrottle.domain.ladder import PointPerformance
from polythrottle.domain.measurement import Measurement
from polythrottle.domain.ports import Device
from polythrottle.domain.profile import Profile
from polythrottle.testing import DeviceContract
from polythrottle.tuning.measured_ladder import ladder_of

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/servers.md"


def opened(uri: str) -> SimulatedDevice:
    """Return a simulated device."""
    device = open_device(uri)
    assert isinstance(device, SimulatedDevice)
    return device


def truth(uri: str, model: str, batch: int) -> Measurement:
    """Return what it would measure at its default clocks."""
    device = opened(uri)
    point = device.space.default.moved({"batch_size": batch})
    return device.expected(device.serve(load_model(model)), point)


class TestGroupContract(DeviceContract):
    """Several GPUs as one keep the contract of every device."""

    def make(self) -> Device:
        """Return four noisy ones."""
        return opened("sim:node/0-3?noise=0.02")


def watts(measurement: Measurement) -> float:
    """Return the mean power of a measurement that has one."""
    assert measurement.power_w is not None
    return measurement.power_w


def test_a_group_answers_as_its_gpus_together_do() -> None:
    """Four times the batch in the time of the slowest, for the joules of all, as measured and by the truth."""
    alone = [truth(f"sim:node/{number}?noise=0", "resnet50", 8) for number in range(4)]
    group = truth("sim:node/0-3?noise=0", "resnet50", 32)
    assert group.latency.mean_s == pytest.approx(max(each.latency.mean_s for each in alone))
    assert watts(group) == pytest.approx(sum(map(watts, alone)), rel=0.01)
    device = opened("sim:node/0-3?noise=0")
    served = device.serve(load_model("resnet50"))
    before = device.read()
    with device:
        served.apply(served.space.default.moved({"batch_size": 32}))
        for _ in range(2000):
            assert served.query().latency_s == pytest.approx(group.latency.mean_s)
        after = device.read()
    power_w = (after.energy_j - before.energy_j) / (after.time_s - before.time_s)
    assert power_w == pytest.approx(watts(group), rel=0.03)


def test_silicon_differs_and_follows_the_seed() -> None:
    """No two GPUs draw the same, and another seed is another server."""
    drawn = [watts(truth(f"sim:node/{number}?noise=0", "resnet50", 8)) for number in range(8)]
    assert len(set(drawn)) == 8
    assert 1.0 < max(drawn) / min(drawn) < 1.5
    assert drawn == [watts(truth(f"sim:node/{number}?noise=0", "resnet50", 8)) for number in range(8)]
    assert drawn[0] != watts(truth("sim:node/0?noise=0&seed=1", "resnet50", 8))


def test_the_uri_opens_it_again() -> None:
    """Which GPUs, of which server, and what else was said."""
    for uri in ("sim:node", "sim:node/0-3", "sim:node/4,5?gpus=4xa100,4xl4&seed=3&noise=0"):
        assert opened(uri).uri == uri
    assert opened("sim:node/4,5?gpus=4xa100,4xl4").title == "2 x NVIDIA L4 24 GB (simulated)"
    assert opened("sim:node/4,5?gpus=4xa100,4xl4").boundary.startswith("2 x card")


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("sim:node/8", "unknown simulated GPU '8'"),
        ("sim:node/3-1", "names no GPUs; write sim:node/0-3"),
        ("sim:node/", "names no GPUs"),
        ("sim:node/0-2,1", "names GPU 1 twice"),
        ("sim:node?gpus=h100", "gpus=h100 are no GPUs; write for example gpus=8xh100"),
        ("sim:node?gpus=0xh100", "are no GPUs"),
        ("sim:node?gpus=99xh100", "at most 16 GPUs, not 99"),
        ("sim:node?gpus=8xh10", "unknown device 'h10'"),
        ("sim:node?gpus=4xa100,4xl4", r"GPUs of several kinds \(a100, l4\)"),
        ("sim:node?fans=2", "unknown option of sim: 'fans'"),
    ],
)
def test_what_no_server_has_is_refused(uri: str, words: str) -> None:
    """In one line that says what would do."""
    with pytest.raises((InvalidInput, UnknownName), match=words):
        open_device(uri)


def test_a_batch_is_split_evenly(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A batch that four GPUs cannot share is refused before anything is measured."""
    words = ["measure", "--device", "sim:node/0-3", "--workload", "resnet50", "--queries", "10", "--seconds", "0.2"]
    assert run([*words, "--batch", "6"]) == 2
    assert "a batch of 6 cannot be split evenly between 4 GPUs" in " ".join(capfd.readouterr().err.split())
    assert run([*words, "--batch", "8"]) == 0


def test_a_language_model_runs_on_the_gpus_it_asks_for() -> None:
    """Four GPUs serve a model that is spread over four, and none that is spread over eight."""
    four = opened("sim:node/0-3?gpus=8xh100-sxm&noise=0")
    four.serve_language(load_language_model("llama-3.1-70b-tp4")).query()
    assert four.read().energy_j > 0
    with pytest.raises(InvalidInput, match="runs on 8 GPUs, and sim:node/0-3"):
        four.serve_language(load_language_model("llama-3.1-70b-tp8"))


def test_no_gpu_serves_two() -> None:
    """The GPUs of the simulated server are counted as real ones are; simulated boards are each service's own."""
    check_devices({"a": "sim:node/0-3", "b": "sim:node/4,5?seed=0", "c": "sim:h100", "d": "sim:h100"})
    with pytest.raises(InvalidInput, match=r"same device \(simulated GPU 3\)"):
        check_devices({"a": "sim:node/0-3", "b": "sim:node/3,4"})
    with pytest.raises(InvalidInput, match="same device"):
        check_devices({"a": "sim:node", "b": "sim:node/7"})


# The daemon on it.

SERVICES = {
    "photos": ("sim:node/0-3", "efficientnet-b7", 0.25, 400.0, 2.0),
    "search": ("sim:node/4,5", "bert-base-fp16", 0.1, 2000.0, 1.0),
    "labels": ("sim:node/6,7", "efficientnet-b4", 0.1, 800.0, 1.0),
}


@cache
def profile(uri: str, name: str, slo_s: float) -> Profile:
    """Return a profile from what every twelfth clock truly does, as a long study would find it."""
    device = opened(uri)
    served = device.serve(load_model(name))
    idle = opened(uri)
    found = []
    for hz in device.space.knob("gpu_max_hz").levels[::12]:
        point = device.space.default.moved({"gpu_max_hz": hz, "mem_hz": device.space.knob("mem_hz").levels[0]})
        idle.apply(point)
        before = idle.read()
        idle.clock.sleep(1.0)
        idle_w = idle.read().energy_j - before.energy_j
        for batch in served.space.knob("batch_size").levels:
            whole = point.moved({"batch_size": batch})
            found.append((whole, replace(device.expected(served, whole), idle_power_w=idle_w)))
    ladder = ladder_of([PointPerformance.of(*each) for each in found], slo_s)
    point, measurement = next(each for each in found if each[0] == ladder.rungs[-1].service.point)
    default = device.expected(served, device.space.default)
    slo = (f"p99<={1e3 * slo_s:g}ms",)
    identity = {"board": uri}
    return Profile(uri, name, point, measurement, default, slo, {}, identity, ("batch_size",), ladder)


def settings(folder: Path, **node: object) -> Settings:
    """Return the settings of a simulated server of three services."""
    services = []
    for name, (uri, model, slo_s, rate_per_s, weight) in SERVICES.items():
        write_profile(profile(uri, model, slo_s), folder / f"{name}.toml")
        traffic = f"sim:poisson:{rate_per_s:g}/s"
        file = str(folder / f"{name}.toml")
        services.append(ServiceSettings(name, profile=file, traffic=traffic, weight=weight))
    return Settings(services=tuple(services), node=NodeSettings(**node))  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_simulated_server_keeps_to_its_watts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host and fans are learnt from its meter; a limit cut by a third holds in the next second, and is told to hold."""
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", str(tmp_path))
    clock = VirtualClock()
    desk = Mailbox()
    node, _ = build_node(
        settings(tmp_path, power_w=2400.0, meter="sim:node"), clock, desk, wall=lambda: EPOCH_S + clock.now()
    )

    def turns(count: int) -> list[float]:
        drawn = []
        for _ in range(count):
            node.turn()
            drawn.append(node.shown.power_w or 0.0)
            node._wait()
        return drawn

    assert max(turns(20)) <= 2400.0
    assert all(each.phase == "following" and not each.short for each in node.shown.services)
    # 300 W and 6 % of what the GPUs draw where they draw all that is left; until loads have moved, 10 % is assumed.
    assert node.shown.rest_w is not None
    assert 300 + 0.06 * 2100 / 1.06 <= node.shown.rest_w <= 300 + 0.1 * 2100
    boards_w = node.shown.boards_w
    assert boards_w is not None
    assert node.shown.power_w == pytest.approx(300 + 1.06 * boards_w, rel=0.02)
    node.answer(SetNodePower(1600.0, 5.0))
    node._wait()
    assert max(turns(20)[1:]) <= 1600.0
    assert node.shown.above_most <= 1
    assert node.shown.energy_kind == "simulated"
    assert any("1.6 kW holds" in event.words for event in desk.events())
    node.stop()
    node.run()


def test_gpus_that_no_service_has_are_in_the_meter(tmp_path: Path) -> None:
    """Eight idle H100 and their host draw more than two and their host."""
    idle_w = {gpus: NodeMeter.of(f"sim:node?gpus={gpus}").power_w()[1] for gpus in ("2xh100", "8xh100")}
    assert idle_w["2xh100"] > SimulatedNode.BASE_W
    assert idle_w["8xh100"] - SimulatedNode.BASE_W == pytest.approx(
        4 * (idle_w["2xh100"] - SimulatedNode.BASE_W), rel=0.1
    )


@pytest.mark.parametrize(
    ("meter", "words"),
    [
        ("sim:node?gpus=4xl4", "is of a simulated server, of which sim:node/0-3 is no part"),
        ("sim:node/0-3", "is no meter of a whole server; a simulated one has sim:node"),
        ("sim:h100", "is no meter of a whole server"),
    ],
)
def test_a_meter_is_of_the_services_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meter: str, words: str
) -> None:
    """Another server's meter, or none, is refused in a line."""
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", str(tmp_path))
    with pytest.raises(InvalidInput, match=words):
        build_node(settings(tmp_path, power_w=2400.0, meter=meter), VirtualClock(), Mailbox())


# What the page says.


def shown(kind: str) -> list[str]:
    """Return the blocks of one kind of the page's section about the simulated server."""
    section = PAGE.read_text().partition("## A simulated server")[2]
    return re.findall(rf"^```{kind}\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


def commands() -> list[list[str]]:
    """Return the words of each command there."""
    lines = "\n".join(shown("bash")).splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("polythrottle ")]


@pytest.mark.slow
def test_the_page_about_it_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its services are tuned, looked after and cut to fewer watts by the commands that it shows, in their order."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POLYTHROTTLE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("POLYTHROTTLE_RUN_DIR", str(tmp_path / "run"))
    every = commands()
    tuned = [words for words in every if words[0] == "tune"]
    (started,) = (words for words in every if words[:2] == ["daemon", "run"])
    asked = every[every.index(started) + 1 :]
    assert [words[1] for words in asked if words[0] == "daemon"] == ["status", "budget", "status", "stop"]
    for words in tuned:
        assert run([*words, "--trials", "6", "--queries", "40", "--seconds", "0.2", "--no-history"]) == 0
    (document,) = shown("toml")
    (tmp_path / "node.toml").write_text(document)
    assert [each.name for each in read_settings(tmp_path / "node.toml").services] == ["photos", "search", "labels"]
    with ExitStack() as ends:
        command = [sys.executable, "-m", "polythrottle", *started, "--no-page"]
        log = ends.enter_context((tmp_path / "log").open("w"))
        child = ends.enter_context(subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ)))
        ends.callback(child.kill)
        client = ends.enter_context(Client())

        def follows() -> bool:
            if child.poll() is not None:
                raise AssertionError((tmp_path / "log").read_text())
            with suppress(PolythrottleError):
                return all(each.phase == "following" for each in client.node().services)
            return False

        until(follows)
        capfd.readouterr()
        for words in asked:
            if words == ["top"]:  # takes a terminal; tests/daemon/test_top.py looks at it
                continue
            assert run(words) == 0, capfd.readouterr().err
            if words[1] == "budget":
                until(lambda: any("1.6 kW holds" in line for line in (tmp_path / "log").read_text().splitlines()))
        assert child.wait(timeout=60) == 0
    printed = capfd.readouterr().out
    assert "the server draws at most 1.6 kW" in printed
    assert "every board is as it was found" in printed
