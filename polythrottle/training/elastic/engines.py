"""The port behind which an existing engine trains, and the torchrun engine on one machine: a process for each node."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from polythrottle.domain.clock import Clock, SystemClock
from polythrottle.domain.errors import BadFile, DeviceError, InvalidInput, UnknownName
from polythrottle.training.elastic.channel import ControllerAway, ControllerChannel, parse_address
from polythrottle.training.elastic.events import JOB, keeper, read_events

# The port behind which an existing engine trains: start with members, stop, status, events.

ENGINES = ("torchrun", "ray")


class Engine(Protocol):
    """What runs a job's workers."""

    def start(self, members: Sequence[str]) -> None:
        """Start the members by name; those that run go on, so that a replacement is started by its name alone.

        Raises:
            PolythrottleError: If they cannot be started.
        """

    def stop(self) -> None:
        """Stop all in order: a checkpoint, then the end."""

    def status(self) -> dict[str, Any]:
        """Return where the job stands, as `polythrottle.training.elastic.controller.Controller.status` does."""

    def events(self) -> list[dict[str, Any]]:
        """Return what has happened so far, oldest first; each carries its generation."""


def known_engine(name: str) -> str:
    """Return an engine's name.

    Raises:
        UnknownName: If there is none of the name.
    """
    if name not in ENGINES:
        raise UnknownName("engine", name, ENGINES)
    return name


# The torchrun engine on one machine: a controller and a TorchElastic agent for each node, each a process.

START_S = 30.0
STOP_S = 40.0


@dataclass(frozen=True)
class LaunchPlan:
    """What is started.

    Attributes:
        folder: The job's folder.
        script: The training script.
        words: Its arguments.
        serving: More words for the controller, as on the command line.
        joining: More words for each node, as on the command line.
    """

    folder: Path
    script: Path
    words: Sequence[str] = ()
    serving: Sequence[str] = ()
    joining: Sequence[str] = ()


@dataclass
class Torchrun:
    """Runs a job's nodes as processes of this machine.

    Attributes:
        plan: What is started.
        nodes: The nodes' processes by name; each leads a process group of its own.
    """

    plan: LaunchPlan
    clock: Clock = field(default_factory=SystemClock)
    nodes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    _controller: "subprocess.Popen[bytes] | None" = None

    def start(self, members: Sequence[str]) -> None:
        """Start the controller if it does not run, and the members that do not.

        Raises:
            DeviceError: If the controller does not start; its own words are on standard error.
        """
        if self._controller is None:
            words = [*self.plan.serving, "--job-folder", str(self.plan.folder)]
            self._controller = self._process(words, subprocess.DEVNULL)  # its answer is asked for by `status`
        line = self._line(self._controller)
        for name in members:
            if name not in self.nodes or self.nodes[name].poll() is not None:
                words = [*joining_words(line), "--node", name, *self.plan.joining, str(self.plan.script)]
                self.nodes[name] = self._process([*words, "--", *self.plan.words], sys.stderr.fileno())

    def stop(self) -> None:
        """Stop the nodes in order, then the controller; what does not stop in time is killed."""
        for process in self._running():
            process.terminate()
        deadline_s = self.clock.now() + STOP_S
        for process in [*self.nodes.values(), *([self._controller] if self._controller else [])]:
            if process is self._controller:
                process.terminate()
            try:
                process.wait(max(0.1, deadline_s - self.clock.now()))
            except subprocess.TimeoutExpired:
                _kill_group(process)

    def kill(self, name: str) -> None:
        """Take a node away as a cloud does: all its processes at once, without a word.

        Raises:
            UnknownName: If there is no node of the name.
        """
        if name not in self.nodes:
            raise UnknownName("node", name, self.nodes)
        _kill_group(self.nodes[name])

    def status(self) -> dict[str, Any]:
        """Return where the job stands.

        Raises:
            ControllerAway: If the controller does not answer.
        """
        return job_line(self.plan.folder).ask("status")

    def events(self) -> list[dict[str, Any]]:
        """Return what has happened so far."""
        return read_events(self.plan.folder)

    def gone(self) -> dict[str, int]:
        """Return the exit codes of the nodes' processes that have ended, by name."""
        return {name: code for name, each in self.nodes.items() if (code := each.poll()) is not None}

    @property
    def exit_code(self) -> int | None:
        """Return the controller's exit code, None while it runs."""
        if self._controller is None:
            return None
        return self._controller.poll()

    def _running(self) -> list["subprocess.Popen[bytes]"]:
        return [process for process in self.nodes.values() if process.poll() is None]

    def _process(self, words: Sequence[str], out: int) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "polythrottle", "cluster", "train", *words]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, start_new_session=True)

    def _line(self, controller: "subprocess.Popen[bytes]") -> ControllerChannel:
        deadline_s = self.clock.now() + START_S
        while controller.poll() is None and self.clock.now() < deadline_s:
            with contextlib.suppress(ControllerAway, BadFile):
                line = job_line(self.plan.folder)
                if keeper(self.plan.folder) == controller.pid:  # not a former controller's, nor another launcher's
                    line.ask("status")
                    return line
            self.clock.sleep(0.05)
        failed = DeviceError("the controller did not start; what it said stands above")
        failed.exit_code = controller.returncode or DeviceError.exit_code
        raise failed


def job_line(folder: Path) -> ControllerChannel:
    """Return the way to the controller of a job, from its folder.

    Raises:
        BadFile: If the folder is no job's, or its token cannot be read.
    """
    path = folder / JOB
    try:
        document = json.loads(path.read_bytes())
        address = str(document["address"])
        file = document["token_file"]
        parse_address(address)
    except (OSError, ValueError, KeyError, TypeError, InvalidInput) as err:
        raise BadFile(f"{folder} is no folder of a cluster job: {path.name} is missing or torn") from err
    return ControllerChannel.through(address, Path(file) if file else None)


def joining_words(line: ControllerChannel) -> list[str]:
    """Return the words with which a node joins a controller: where it is, and in which file its token stands."""
    return ["--join", line.address, *(["--token-file", str(line.token_file)] if line.token_file else [])]


def descendants(pid: int) -> list[int]:
    """Return the processes below one, itself first."""
    import psutil

    try:
        root = psutil.Process(pid)
        return [pid, *(child.pid for child in root.children(recursive=True))]
    except psutil.NoSuchProcess:
        return [pid]


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill a node and its workers, which lead sessions of their own; only processes below one that was started here."""
    for pid in descendants(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
