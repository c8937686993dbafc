"""The ray engine: Ray Train keeps the processes, the controller groups them; needs the extra ``cluster``.

Ray starts a worker on each node, starts the group again when one is lost, and resizes it when nodes come. Ranks,
generations and checkpoints are the same as with torchrun: each worker joins the controller as a node of its own.
"""

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polythrottle.domain.clock import Clock, SystemClock
from polythrottle.domain.errors import BadFile, DeviceError, InvalidInput
from polythrottle.training.elastic.channel import NODE, ControllerAway, ControllerChannel
from polythrottle.training.elastic.engines import STOP_S, LaunchPlan, Torchrun, descendants, job_line
from polythrottle.training.elastic.events import read_events
from polythrottle.training.elastic.membership import Phase

FAST = {
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "12",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "2",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Ray's own defaults take 70 s to notice a lost node, these 18 s (measured with Ray 2.60.0)."""
RESIZE_S = 5.0
FAILURES = 1000


@dataclass
class RayEngine:
    """Runs a job's nodes with Ray Train: nodes of a cluster that it starts on this machine.

    Attributes:
        plan: What is started; ``joining`` is not used, Ray starts the workers.
    """

    plan: LaunchPlan
    clock: Clock = field(default_factory=SystemClock)
    _serving: Torchrun | None = None
    _driver: "subprocess.Popen[str] | None" = None

    def start(self, members: Sequence[str]) -> None:
        """Start the controller and Ray if they do not run, and the members that do not.

        Raises:
            InvalidInput: If Ray is not installed.
            DeviceError: If the controller does not start, or Ray has ended.
        """
        if self._driver is None:
            _need_ray()
            self._serving = Torchrun(self.plan, self.clock)
            self._serving.start(())
            words = [str(self.plan.folder), str(self.plan.script), *self.plan.words]
            command = [sys.executable, "-m", "polythrottle.training.elastic.ray_engine", *words]
            self._driver = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=sys.stderr.fileno(), text=True, start_new_session=True
            )
        for name in members:
            self._tell(f"add {name}")

    def stop(self) -> None:
        """Let all workers stop after a checkpoint, then end Ray and the controller."""
        with contextlib.suppress(ControllerAway, BadFile, InvalidInput, DeviceError):
            line = job_line(self.plan.folder)
            for node in line.ask("status")["nodes"]:
                line.ask("drain", node=node["node"], reason="the job is stopped")
            self.clock.sleep(2.0)
        if self._driver is not None:
            for pid in descendants(self._driver.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM if pid == self._driver.pid else signal.SIGKILL)
            try:
                self._driver.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._driver.kill()
                self._driver.wait()
        if self._serving is not None:
            self._serving.stop()

    def kill(self, name: str) -> None:
        """Take a node away without a word."""
        self._tell(f"kill {name}")

    def status(self) -> dict[str, Any]:
        """Return where the job stands."""
        return job_line(self.plan.folder).ask("status")

    def events(self) -> list[dict[str, Any]]:
        """Return what has happened so far."""
        return read_events(self.plan.folder)

    @property
    def exit_code(self) -> int | None:
        """Return the controller's exit code, or that of Ray if it has failed; None while both run."""
        ended = None
        if self._serving is not None:
            ended = self._serving.exit_code
        if ended is None and self._driver is not None and self._driver.poll():
            return self._driver.returncode
        return ended

    def _tell(self, text: str) -> None:
        if self._driver is None or self._driver.stdin is None or self._driver.poll() is not None:
            raise DeviceError("Ray has ended; what it said stands above")
        self._driver.stdin.write(text + "\n")
        self._driver.stdin.flush()


def _need_ray() -> None:
    from importlib.util import find_spec

    if find_spec("ray") is None:
        raise InvalidInput("the engine ray needs Ray: pip install 'polythrottle[cluster]', or use --engine torchrun")


def take_part(words: dict[str, Any]) -> None:
    """Train in one of Ray's workers.

    Args:
        words: The controller's address, the file of its token, the script and its arguments.
    """
    import ray  # type: ignore[import-not-found,unused-ignore]

    from polythrottle.training.elastic.agent import AgentOptions, ControllerRendezvous

    line = ControllerChannel.through(words["address"], Path(words["token_file"]))
    local = int(ray.train.get_context().get_local_rank())
    name = f"ray-{ray.get_runtime_context().get_node_id()[:8]}-{local}"
    grouping = ControllerRendezvous(line, AgentOptions(name, Path(words["script"])), sys.stderr.write)
    grouping.start()
    rendezvous = grouping.next_rendezvous()
    meeting = rendezvous.bootstrap_store_info
    assert meeting is not None
    place: dict[str, object] = {"RANK": rendezvous.rank, "WORLD_SIZE": rendezvous.world_size, "LOCAL_RANK": local}
    place |= {"MASTER_ADDR": meeting.master_addr, "MASTER_PORT": meeting.master_port, NODE: name}
    os.environ.update({key: str(value) for key, value in place.items()} | line.environment())
    sys.argv = [words["script"], *words["words"]]
    try:
        runpy.run_path(words["script"], run_name="__main__")
        grouping.finish()
    except SystemExit as err:
        if err.code:
            raise RuntimeError(f"the script ended with {err.code}") from err
        grouping.finish()
    finally:
        grouping.leave("its worker has ended")


def _drive(folder: Path, script: str, words: Sequence[str]) -> None:
    """Be Ray's driver: add and kill nodes as told on standard input, from the main thread as Ray wants it."""
    os.environ.update(FAST)  # before Ray is imported, which reads some of them then

    import ray  # type: ignore[import-not-found,unused-ignore]
    from ray.cluster_utils import Cluster  # type: ignore[import-not-found,unused-ignore]

    # Ray listens on the machine's own address: a cluster of several nodes cannot be made on loopback (Ray 2.60.0).
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    line = job_line(folder)
    nodes: dict[str, Any] = {}
    training: threading.Thread | None = None
    for text in sys.stdin:
        verb, _, name = text.strip().partition(" ")
        if verb == "kill" and name in nodes:
            cluster.remove_node(nodes.pop(name), allow_graceful=False)
        elif verb == "add" and name not in nodes:
            nodes[name] = cluster.add_node(num_cpus=1)
        if training is None and nodes:
            ray.init(address=cluster.address, log_to_driver=False)
            most = int(line.ask("status")["most"])
            spoken: dict[str, Any] = {"address": line.address, "token_file": str(line.token_file)}
            spoken |= {"script": script, "words": list(words)}
            training = threading.Thread(target=_fit, args=(spoken, most, folder, line, cluster.shutdown), daemon=True)
            training.start()


def _fit(spoken: dict[str, Any], most: int, folder: Path, line: ControllerChannel, close: Callable[[], None]) -> None:
    """Run Ray Train to the end, and end this process with it."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig  # type: ignore[import-not-found,unused-ignore]
    from ray.train.v2.api.data_parallel_trainer import (  # type: ignore[import-not-found,unused-ignore]
        DataParallelTrainer,
    )

    scaling = ScalingConfig(num_workers=(1, most), elastic_resize_monitor_interval_s=RESIZE_S)
    running = RunConfig(storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=FAILURES))
    trainer = DataParallelTrainer(take_part, train_loop_config=spoken, scaling_config=scaling, run_config=running)
    code = 0
    try:
        trainer.fit()
    except Exception as err:  # Ray raises what it likes; the controller's word on the job counts
        with contextlib.suppress(ControllerAway, InvalidInput):
            code = 9
            if line.ask("status")["phase"] == str(Phase.FINISHED):
                code = 0
        sys.stderr.write(f"polythrottle: Ray Train ended: {json.dumps(str(err)[:300])}\n" if code else "")
    close()
    os._exit(code)


if __name__ == "__main__":
    _drive(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
