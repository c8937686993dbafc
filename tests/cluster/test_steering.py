"""A real torchrun job whose two nodes steer boards: caps, slack, and boards as they were found, whatever dies."""

import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from polythrottle.storage.fleet_knowledge import CapObservation, NodeReport, keep
from polythrottle.storage.object_store import Store
from polythrottle.testing.nvml import FakeNvml
from polythrottle.training.elastic.checkpoints import model_digest
from polythrottle.training.elastic.engines import LaunchPlan, Torchrun
from polythrottle.training.elastic.job_control import LocalJob, status_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
SCRIPT = Path(__file__).with_name("paced_script.py")
SHAPES = {"0.weight": (8, 4), "0.bias": (8,), "2.weight": (1, 8), "2.bias": (1,)}
NETWORK = f"Sequential-{model_digest(SHAPES)[:8]}-b4"
MODEL = "v100"


def seeded(store: Path, title: str) -> None:
    """Keep what another node has learnt before: 200 W takes 5 % longer for a fifth less power."""
    looks = (
        CapObservation(None, 0.1, 300.0, 3),
        CapObservation(200.0, 0.105, 240.0, 3),
        CapObservation(150.0, 0.2, 200.0, 3),
    )
    keep(Store(str(store)), NodeReport("former", title, NETWORK, looks))


@pytest.fixture
def paces(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder for temporary files whose name is short enough for the sockets that are made in it."""
    with tempfile.TemporaryDirectory(prefix="paces-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def test_the_faster_node_is_capped_and_every_board_is_as_found(tmp_path: Path, paces: Path) -> None:
    """The faster of two nodes gets the cap that just meets the slower; its agent is killed; the other ends in order."""
    with FakeNvml(tmp_path / "nvml", [MODEL, MODEL]) as fake:
        for slot in range(2):
            fake.set(slot, load_permille=1000)
        found = fake.snapshot()
        seeded(tmp_path / "store", fake.models[0].name.replace(" ", "-"))
        words = ("2000", "8", "1", "n1=0.05", "n2=0.08")
        serving = ("--serve", "127.0.0.1:0", "--nodes", "1:2", "--store", str(tmp_path / "store"), "--job", "job")
        engine = Torchrun(LaunchPlan(tmp_path / "job", SCRIPT, words, (*serving, "--warm-up", "2")))
        seen: list[Mapping[str, Any]] = []
        rows: dict[str, Any] = {}

        def limit_w(slot: int) -> float:
            return fake.get(slot, "power_limit_mw") / 1e3

        def story() -> Iterator[Callable[[Mapping[str, Any]], bool]]:
            yield lambda event: event["event"] == "cap" and event["node"] == "n1"
            assert (limit_w(0), limit_w(1)) == (200.0, found[fake.uuid(1)]["power_limit_mw"] / 1e3)
            rows.update({node["node"]: node for node in status_of(tmp_path / "job")["nodes"]})
            engine.nodes["n1"].send_signal(signal.SIGKILL)
            yield lambda event: event["event"] == "lost"
            yield lambda event: event["event"] == "first step" and event["workers"] == 1
            assert fake.snapshot() == found

        part = story()
        waits = [next(part)]

        def told(event: Mapping[str, Any]) -> None:
            seen.append(event)
            if waits and waits[0](event):
                waits[:] = [each for each in [next(part, None)] if each is not None]

        for slot, name in enumerate(("n1", "n2")):
            engine.plan = LaunchPlan(**vars(engine.plan) | {"joining": ("--steer", f"nvml:{slot}", "--look", "0.8")})
            engine.start([name])
        assert LocalJob(engine, ["n1", "n2"], None).run(told, lambda: engine.exit_code) == 0
        assert waits == []
        assert fake.snapshot() == found
    fast, slow = rows["n1"]["steering"], rows["n2"]["steering"]
    assert (fast["verdict"], fast["limit_w"], fast["energy_kind"]) == ("kept", 200.0, "measured")
    assert fast["power_w"] < slow["power_w"]
    assert (slow["limit_w"], slow["trouble"]) == (None, None)
    assert rows["n1"]["own_s"] < rows["n2"]["own_s"] <= rows["n1"]["step_s"] * 1.1
    assert [event["limit_w"] for event in seen if event["event"] == "cap"] == [200.0]
    assert len(list(paces.glob("polythrottle-own-*"))) == 1  # who is killed clears nothing away
    known = {path.stem for path in (tmp_path / "store" / "knowledge").rglob("*.json")}
    assert known == {"former", "n1", "n2"}
