"""One node of the torchrun engine: TorchElastic's agent, grouped by the controller instead of by the nodes' clocks.

TorchElastic's own c10d rendezvous takes a node for dead by comparing wall clocks, and hands a newcomer a stale address
(torch 2.13.0: a second node that joins a running job kills it). Here the agent still starts, watches and stops the
workers; who belongs together, in which order and from when is the controller's word.
"""

import contextlib
import logging
import os
import re
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from polythrottle.domain.clock import Clock, SystemClock
from polythrottle.domain.errors import ClaimFailed, DeviceError, InvalidInput, PolythrottleError
from polythrottle.training.elastic.channel import (
    GENERATION,
    NODE,
    REGROUP,
    ControllerAway,
    ControllerChannel,
    WrongToken,
)
from polythrottle.training.elastic.nodes.power_controller import WINDOW_S, PowerController
from polythrottle.training.elastic.worker.process import (
    FOLDER,
    METHOD,
    LastWords,
    MemoryWatch,
    fault_of,
    have_ended_well,
    own_words,
    train,
    warm_up,
)

POLL_S = 0.1
PATIENCE_S = 120.0
GRACE_S = 30
TAKEN_S = 10.0


@dataclass(frozen=True)
class AgentOptions:
    """What a node is started with.

    Attributes:
        name: What it is called; one name is one machine.
        script: The training script.
        words: Its arguments.
        workers: Worker processes on this node: one for each GPU.
        host: Address at which other nodes reach this one; empty for the one that reaches the controller.
        steer: The boards to steer, or ``off``; None for what an actuator of this machine serves, if there is one.
        window_s: How long a node looks at a cap at least before it is judged, in seconds.

    Raises:
        InvalidInput: If the name could be no file's, or there are no workers.
    """

    name: str
    script: Path
    words: Sequence[str] = ()
    workers: int = 1
    host: str = ""
    steer: Sequence[str] | None = None
    window_s: float = WINDOW_S

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", self.name):
            raise InvalidInput(f"a node's name has letters, digits, dots, - and _, not {self.name[:80]!r}")
        if self.workers < 1:
            raise InvalidInput(f"a node has at least one worker, not {self.workers}")


class ControllerRendezvous(RendezvousHandler):
    """TorchElastic's rendezvous, answered by the controller.

    Args:
        line: The way to the controller.
        node: This node.
        told: Takes a line for people.
        clock: Waits between two questions.
        steering: What is said with each beat of pace and board, and hears what is answered.
    """

    def __init__(
        self,
        line: ControllerChannel,
        node: AgentOptions,
        told: Callable[[str], object],
        clock: Clock | None = None,
        steering: PowerController | None = None,
    ) -> None:
        self._line = line
        self._node = node
        self._told = told
        self._clock = clock or SystemClock()
        self._steering = steering
        self.store = ""
        self._host = node.host or _own_address(line)
        self._process = secrets.token_hex(8)
        self._generation = 0
        self._standing: Mapping[str, Any] = {}
        self._beat_s = 1.0
        self._away = False
        self._ended = threading.Event()
        self._presence = threading.Lock()
        self.failed = False

    def start(self) -> None:
        """Join, and beat from now on.

        Raises:
            ControllerAway: If no controller answers in time.
            WrongToken: If the token is not the controller's.
            InvalidInput: If it refuses this node.
        """
        deadline_s = self._clock.now() + PATIENCE_S
        said = False
        while True:
            try:
                self._join()
                break
            except WrongToken:
                raise
            except (ControllerAway, InvalidInput) as err:  # a killed node's name is free after three beats
                if isinstance(err, InvalidInput) and self._clock.now() > deadline_s - PATIENCE_S + TAKEN_S:
                    raise
                if self._clock.now() > deadline_s:
                    raise
                if isinstance(err, ControllerAway) and not said:
                    self._told(f"{err}; asking again for {PATIENCE_S:.0f} s")
                    said = True
                self._clock.sleep(POLL_S * 5)
        threading.Thread(target=self._beat_on, daemon=True).start()

    def say(self, verb: str, **words: Any) -> None:
        """Say something about this node; a controller that is away does not hear it."""
        with contextlib.suppress(ControllerAway, InvalidInput):
            self._line.ask(verb, node=self._node.name, **words)

    def finish(self) -> None:
        """Say that this node's workers have reached the end of the training, in the generation they trained in."""
        self.say("finish", generation=self._generation)

    def leave(self, reason: str) -> None:
        """Say that this node goes; a beat that is still on its way does not bring it back."""
        # Under the lock of a beat that comes back: it would join a node again that has just left.
        with self._presence:
            self._ended.set()
            self.say("leave", reason=reason)

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for a generation that this node belongs to.

        Raises:
            RendezvousGracefulExitError: If the training is over.
            RendezvousClosedError: If the job has failed.
            RendezvousConnectionError: If the controller stays away.
        """
        # Asked for anew each time: a worker of the last generation that still ends may hold its port.
        port = _free_port(self._host)
        standing = self._ready(port)
        deadline_s = self._clock.now() + PATIENCE_S
        while not self._placed(standing):
            self._clock.sleep(POLL_S)
            try:
                standing = self._line.ask("beat", node=self._node.name, process=self._process)
                # A controller that was started again elsewhere knows of no node.
                if not standing["known"]:
                    self._join()
                    standing = self._ready(port)
                deadline_s = self._clock.now() + PATIENCE_S
            except ControllerAway as err:
                if self._clock.now() > deadline_s:
                    raise RendezvousConnectionError(str(err)) from err
        self._generation = int(standing["generation"])
        self._standing = standing
        self.failed = False
        os.environ[GENERATION] = str(self._generation)
        host, port = standing["gather_at"]
        return RendezvousInfo(
            HashStore(), int(standing["rank"]), int(standing["world"]), RendezvousStoreInfo(str(host), int(port))
        )

    def _ready(self, port: int) -> dict[str, Any]:
        words = {"node": self._node.name, "address": [self._host, port], "failed": self.failed}
        try:
            answer = self._line.ask("ready", **words)
            if answer["known"]:
                return answer
            self._join()
            return self._line.ask("ready", **words)
        except ControllerAway:
            return {"phase": "", "generation": self._generation, "rank": None}

    def _placed(self, standing: Mapping[str, Any]) -> bool:
        if standing["phase"] == "finished":
            raise RendezvousGracefulExitError("the training is over")
        if standing["phase"] == "failed":
            raise RendezvousClosedError(str(standing["reason"]))
        return standing["rank"] is not None and int(standing["generation"]) > self._generation

    def _join(self) -> None:
        address = [self._host, 0]
        words = {"node": self._node.name, "address": address, "process": self._process}
        answer = self._line.ask("join", **words, generation=self._generation)
        self._beat_s = float(answer["beat_s"])
        self.store = str(answer.get("store", ""))

    def _beat_on(self) -> None:
        while not self._ended.wait(self._beat_s):
            try:
                if self._steering is None:
                    said = {}
                else:
                    said = self._steering.words()
                standing = self._line.ask("beat", node=self._node.name, process=self._process, **said)
                if not standing["known"]:
                    self._come_back()
                self._standing = standing
                if self._steering is not None:
                    self._steering.heed(standing)
            except PolythrottleError as err:
                # Training does not need the controller between generations, so its absence is no failure.
                self._say_away(str(err))
                continue
            if self._away:
                self._away = False
                self._told("the controller is back")

    def _come_back(self) -> None:
        """Join again where the controller does not know this node, unless that is because it has just left."""
        with self._presence:
            if not self._ended.is_set():
                self._join()

    def _say_away(self, reason: str) -> None:
        if not self._away:
            self._away = True
            self._told(f"{reason}; training goes on without it")

    def num_nodes_waiting(self) -> int:
        """Return 1 if this node's workers are to stop for another generation, else 0."""
        standing = self._standing
        if not standing or standing["phase"] == "finished":
            return 0
        # The controller has moved on without this node, as after a network that was cut for a while.
        elsewhere = int(standing["generation"]) > self._generation
        return int(bool(standing["regroup"]) or elsewhere or standing["phase"] == "failed")

    def get_backend(self) -> str:
        """Return the name of this rendezvous."""
        return "polythrottle"

    def is_closed(self) -> bool:
        """Return whether the job is over."""
        return bool(self._standing) and self._standing["phase"] in {"finished", "failed"}

    def set_closed(self) -> None:
        """Do nothing: only the controller ends a job."""

    def get_run_id(self) -> str:
        """Return a name for the log."""
        return f"polythrottle-{self._node.name}"

    def shutdown(self) -> bool:
        """Stop beating."""
        self._ended.set()
        return True


class NodeAgent(LocalElasticAgent):
    """TorchElastic's agent, which tells the controller when it goes, fails or has finished."""

    def __init__(self, spec: WorkerSpec, grouping: ControllerRendezvous, words: LastWords) -> None:
        # torch gives workers half a minute to write a last checkpoint before it kills them.
        super().__init__(spec, DefaultLogsSpecs(), start_method=METHOD, shutdown_timeout=GRACE_S)
        self._grouping = grouping
        self._words = words
        self._memory = MemoryWatch()
        self.leaving = ""

    def _invoke_run(self, role: str = "default") -> RunResult:
        try:
            result: RunResult = super()._invoke_run(role)
        except SignalException as err:
            self.leaving = self.leaving or f"{err.sigval.name} was sent to it"
            self._grouping.say("drain", reason=self.leaving)
            raise
        return result

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        warm_up()  # again, should it have ended
        spec = worker_group.spec
        # Workers come from a process that was warmed up earlier, so this generation's environment is handed to them.
        spec.args = (own_words(os.environ), *spec.args[1:])
        started: dict[int, Any] = super()._start_workers(worker_group)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state is WorkerState.HEALTHY and have_ended_well(self._pcontext):
            return RunResult(WorkerState.SUCCEEDED)
        if result.state in {WorkerState.FAILED, WorkerState.UNHEALTHY}:
            codes = {failure.exitcode for failure in result.failures.values()}
            self._grouping.failed = not codes <= {REGROUP}
            for code in sorted(codes - {REGROUP})[:1]:  # a signal's goes before what followed from it
                self._grouping.say("fault", **fault_of(code, self._words.lines(), self._memory.killed()).document())
        return result

    def _exit_barrier(self) -> None:
        self._grouping.finish()


def take_part(
    line: ControllerChannel,
    node: AgentOptions,
    told: Callable[[str], object],
    words: LastWords,
    watching: Callable[[ControllerRendezvous, Callable[[str], None]], None] | None = None,
) -> None:
    """Train on this node until the training is over, or a signal takes the node away.

    Args:
        line: The way to the controller.
        node: This node.
        told: Takes lines for people.
        words: What this process and its workers say on standard error.
        watching: Started once the node has joined: watches for notices, and may send this process a signal.

    Raises:
        ControllerAway: If no controller answers.
        InvalidInput: If it refuses this node.
        ClaimFailed: If the job has failed.
    """
    for logger in [each for each in logging.root.manager.loggerDict if each.startswith("torch.distributed.elastic")]:
        logging.getLogger(logger).setLevel(logging.CRITICAL)  # each has a level of its own; what happens is said below
    os.environ.update(line.environment() | {NODE: node.name, "TORCH_ELASTIC_WORKER_IDENTICAL": "1"})
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(name, _go)
    steering = PowerController(node.name, node.steer, told, node.window_s)
    os.environ[FOLDER] = str(steering.paces)
    grouping = ControllerRendezvous(line, node, told, steering=steering)
    try:
        steering.open()  # what names no board ends this node before anybody counts on it
        grouping.start()
        steering.start(grouping.store)
    except SignalException as err:
        told(f"node {node.name} leaves before it has joined: {err.sigval.name} was sent to it")
        steering.close()
        return
    except PolythrottleError:
        steering.close()
        raise
    with _beside(steering):
        agent = NodeAgent(_spec(node, grouping), grouping, words)
        if watching is not None:
            watching(grouping, lambda reason: _take_away(agent, reason))
        _run(agent, grouping, node, told)


def _spec(node: AgentOptions, grouping: ControllerRendezvous) -> WorkerSpec:
    return WorkerSpec(
        role="worker",
        local_world_size=node.workers,
        rdzv_handler=grouping,
        entrypoint=train,
        args=("", str(node.script), *node.words),
        # Restarts are generations here, of which a spot job may have hundreds; the controller ends them.
        max_restarts=1 << 30,
        monitor_interval=0.1,
    )


@contextlib.contextmanager
def _beside(steering: PowerController) -> Iterator[None]:
    """Put the boards back at the end, whoever is in a hurry then: a job that is over ends its nodes, too."""
    try:
        yield
    finally:
        # A second signal would cut off the very write that puts clocks back.
        for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(name, signal.SIG_IGN)
        steering.close()


def _run(agent: NodeAgent, grouping: ControllerRendezvous, node: AgentOptions, told: Callable[[str], object]) -> None:
    why = "the training is over"
    try:
        agent.run()
    except SignalException as err:
        why = agent.leaving or f"{err.sigval.name} was sent to it"
    except RendezvousClosedError as err:
        why = "the job has failed"
        raise ClaimFailed(f"the job has failed: {err}") from err
    except RendezvousConnectionError as err:
        why = "it cannot reach the controller"
        raise DeviceError(f"node {node.name} gives up: {err}") from err
    finally:
        grouping.leave(why)
        told(f"node {node.name} leaves: {why}")


def _go(number: int, frame: FrameType | None) -> None:
    raise SignalException("told to go", sigval=signal.Signals(number))


def _take_away(agent: NodeAgent, reason: str) -> None:
    agent.leaving = reason
    os.kill(os.getpid(), signal.SIGTERM)


def _own_address(line: ControllerChannel) -> str:
    """Return the address of this machine that reaches the controller."""
    if ":" in line.host:
        family = socket.AF_INET6
    else:
        family = socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Connecting a datagram socket sends nothing; it only asks the kernel which address the route would use.
            probe.connect((line.host, line.port))
            return str(probe.getsockname()[0])
    except OSError as err:
        raise ControllerAway(f"no way to {line.address}: {err.strerror or err}") from err


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
