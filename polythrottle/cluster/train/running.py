"""The three ways to take part in a job: serve as its controller, join as a node, or run all of it on this machine."""

import contextlib
import math
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from polythrottle.clock import Clock, SystemClock
from polythrottle.cluster.store import Holding, Store
from polythrottle.cluster.train.account import EVENTS, JOB, read_events, replayed
from polythrottle.cluster.train.controller import Controller, Job, Serving, announce, told
from polythrottle.cluster.train.engine import Engine
from polythrottle.cluster.train.membership import Happening, Phase, Rules, restored
from polythrottle.cluster.train.torchrun import job_line
from polythrottle.cluster.train.wire import ControllerAway, Line, parse_address, read_token
from polythrottle.errors import BadFile, ClaimFailed, InvalidInput, UnknownName
from polythrottle.state import state_dir

Told = Callable[[str], object]
STILLBORN = 3
"""Nodes that may end before they join, one after the other, before a job on this machine is given up."""


@dataclass(frozen=True)
class Asked:
    """What a controller is asked to do, from the command line.

    Attributes:
        job: Name of the job; empty for one made of the script's name and the time.
        nodes: Nodes of a generation: ``2`` or ``1:4``.
        store: URL of the checkpoints; empty for a folder beside the job's events.
        rate_per_h: Losses of one node per hour if known.
        rule: What stays the same when the number of workers changes; empty for what the script says.
        overhead: Largest share of the time checkpoints may take; None for what the script says.
        every_s: A fixed time between checkpoints in seconds; None for a profiled one.
        beat_s: Time between two beats of a node, in seconds.
        folder: The job's folder; None for the one of its name.
    """

    job: str = ""
    nodes: str = "1"
    store: str = ""
    rate_per_h: float | None = None
    rule: str = ""
    overhead: float | None = None
    every_s: float | None = None
    beat_s: float = 1.0
    folder: Path | None = None

    def as_job(self) -> Job:
        """Return the job that is meant.

        Raises:
            InvalidInput: If a word is none.
        """
        least, most = node_counts(self.nodes)
        if self.rate_per_h is not None and not 0 <= self.rate_per_h < 1e6:
            raise InvalidInput(f"losses per hour are a rate of at least 0, not {self.rate_per_h}")
        if self.overhead is not None and not 0 < self.overhead <= 1:
            raise InvalidInput(f"the overhead of checkpoints is a share in (0, 1], not {self.overhead}")
        if self.every_s is not None and not 0 <= self.every_s < math.inf:
            raise InvalidInput(f"--every takes seconds between checkpoints, at least 0, not {self.every_s}")
        if not 0.05 <= self.beat_s <= 3600:
            raise InvalidInput(f"--beat takes between 0.05 and 3600 seconds, not {self.beat_s}")
        folder = (self.folder or job_folder(self.job)).absolute()
        terms = {"rule": self.rule or None, "overhead": self.overhead, "every_s": self.every_s}
        rules = Rules(least, most, self.beat_s)
        store = self.store or f"file://{folder / 'store'}"
        if "://" not in store:  # a path means the same to nodes that were started elsewhere
            store = str(Path(store).absolute())
        return Job(self.job or folder.name, folder, rules, store, self.rate_per_h, terms)


def node_counts(text: str) -> tuple[int, int]:
    """Return the least and the most nodes of a text such as ``2`` (between one and two) or ``2:4``.

    Raises:
        InvalidInput: If it is none.
    """
    matched = re.fullmatch(r"(?:(\d{1,6}):)?(\d{1,6})", text.strip())
    if matched is None:
        raise InvalidInput(f"--nodes takes a number such as 4, or least:most such as 2:4, not {text[:40]!r}")
    return int(matched[1] or 1), int(matched[2])


def job_folder(name: str) -> Path:
    """Return the folder of a job.

    Raises:
        InvalidInput: If the name could be no folder's.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", name):
        raise InvalidInput(f"a job's name has letters, digits, dots, - and _, not {name[:80]!r}")
    return state_dir() / "cluster" / name


def fresh_name(script: Path) -> str:
    """Return a name for a job: the script's and the time."""
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", script.stem).lstrip("-._")[:40] or "job"
    return f"{stem}-{datetime.now():%Y%m%d-%H%M%S}"


def newest_job() -> Path:
    """Return the folder of the job that was last heard of.

    Raises:
        UnknownName: If there is none.
    """
    found = [path for path in (state_dir() / "cluster").glob(f"*/{EVENTS}") if path.is_file()]
    if not found:
        raise UnknownName("job", "", [], hint="start one with polythrottle cluster train")
    return max(found, key=lambda path: path.stat().st_mtime).parent


def serve(asked: Asked, address: str, token_file: Path | None, say: Told) -> dict[str, Any]:
    """Be a job's controller until the job has ended, and return where it then stands.

    Args:
        asked: What it is asked to do.
        address: Where to listen, as HOST:PORT; port 0 for a free one.
        token_file: File of the job's token; needed for any host but loopback.
        say: Takes lines for people.

    Raises:
        InvalidInput: If a word is none, or the address cannot be listened on.
        StorageError: If the job or the store is another controller's, or cannot be written.
        ClaimFailed: If the job has failed.
    """
    host, port = parse_address(address)
    job = asked.as_job()
    token = read_token(token_file)
    refuse_finished(job)
    holding = Holding(Store(job.store))
    with contextlib.closing(Controller(job)) as controller:
        return _served(Serving(controller, host, port, token, holding), token_file, say)


def _served(serving: Serving, token_file: Path | None, say: Told) -> dict[str, Any]:
    controller, job = serving.controller, serving.controller.job
    with _stopping(serving.stop):
        serving.open()
        announce(job, serving.line, token_file.absolute() if token_file else None)
        say(f"controller of job {job.name} on {serving.line.address}, checkpoints in {job.store}")
        phase = serving.run()
    if phase is Phase.FAILED:
        raise ClaimFailed(f"job {job.name} has failed: {controller.membership.reason}")
    return controller.status()


@dataclass
class Local:
    """A whole job on this machine.

    Attributes:
        engine: Runs it.
        members: Names of its nodes.
        replace_after_s: When a lost node is started again, in seconds; None for never.
        clock: Waits.
    """

    engine: Engine
    members: Sequence[str]
    replace_after_s: float | None = 5.0
    clock: Clock = field(default_factory=SystemClock)
    _due: dict[str, float] = field(default_factory=dict)
    _seen: int = 0
    _awaited: set[str] = field(default_factory=set)
    _stillborn: int = 0

    def run(
        self,
        on_event: Callable[[Mapping[str, Any]], None],
        ended: Callable[[], int | None],
        gone: Callable[[], Mapping[str, int]] = dict,
    ) -> int:
        """Run the job to its end, and return the engine's exit code.

        Args:
            on_event: Told of everything that happens, in order.
            ended: Returns the engine's exit code, None while it runs.
            gone: Returns the exit codes of nodes' processes that have ended, by name.

        Raises:
            ClaimFailed: If nodes end again and again before they have joined.
        """
        self._awaited.update(self.members)
        self.engine.start(self.members)
        try:
            while (code := ended()) is None:
                self.clock.sleep(0.2)
                self._follow(on_event)
                self._bury(gone())
            self._follow(on_event)
            return code
        finally:
            self.engine.stop()

    def _follow(self, on_event: Callable[[Mapping[str, Any]], None]) -> None:
        events = self.engine.events()
        for event in events[self._seen :]:
            on_event(event)
            self._consider(event)
        self._seen = len(events)
        due = [name for name, due_s in self._due.items() if self.clock.now() >= due_s]
        for name in due:
            del self._due[name]
        if due:
            self._awaited.update(due)
            with contextlib.suppress(ControllerAway):
                self.engine.start(due)

    def _bury(self, gone: Mapping[str, int]) -> None:
        """Start again what ended before it joined, of which the controller knows nothing; three times at most."""
        for name in sorted(self._awaited & gone.keys()):
            self._awaited.remove(name)
            self._stillborn += 1
            if self._stillborn >= STILLBORN:
                raise ClaimFailed(f"node {name} ended with code {gone[name]} before it joined; it said why above")
            self._due[name] = self.clock.now() + (self.replace_after_s or 1.0)

    def _consider(self, event: Mapping[str, Any]) -> None:
        """Ask for a replacement of a node that is lost or gone, as a fleet would."""
        if event["event"] == Happening.JOINED:
            self._awaited.discard(str(event.get("node")))
            self._stillborn = 0
        if event["event"] in (Happening.FINISHED, Happening.FAILED):
            self._awaited.clear()
            self.replace_after_s = None
            self._due.clear()
        gone = event["event"] in (Happening.LOST, Happening.LEFT) and event.get("node") in self.members
        if gone and self.replace_after_s is not None:
            self._due[str(event["node"])] = self.clock.now() + self.replace_after_s


def status_of(folder: Path) -> dict[str, Any]:
    """Return where a job stands: from its controller, or from its events if none answers.

    Raises:
        BadFile: If the folder is no job's.
    """
    if not (folder / JOB).is_file() and not (folder / EVENTS).is_file():
        raise BadFile(f"{folder} is no folder of a cluster job")
    with contextlib.suppress(ControllerAway, BadFile, InvalidInput):
        return {**job_line(folder).ask("status"), "source": "the controller"}
    records = read_events(folder)
    held = restored(Rules(), records, 0.0)
    over = [record for record in records if record["event"] in (Happening.FINISHED, Happening.FAILED)]
    steps = [record for record in records if "step" in record]
    return {
        "job": folder.name,
        "phase": str(over[-1]["event"]) if over else "unknown",
        "reason": over[-1].get("reason") if over else "no controller answers; this is from the job's events",
        "generation": held.generation,
        "members": list(held.members),
        "chief": held.members[0] if held.members else None,
        "nodes": [],
        **told(replayed(records)),
        "step": max((int(record["step"]) for record in steps), default=None),
        "source": "the job's events",
    }


def way_to(address: str, token_file: Path | None) -> Line:
    """Return the way to a controller.

    Raises:
        InvalidInput: If the address is none.
        BadFile: If the token cannot be read.
    """
    host, port = parse_address(address)
    return Line(host, port, read_token(token_file))


def refuse_finished(job: Job) -> None:
    """Refuse to begin a job that has finished.

    Raises:
        InvalidInput: If it has.
    """
    if any(record["event"] == Happening.FINISHED for record in read_events(job.folder)):
        raise InvalidInput(f"job {job.name} has finished; give another --job, or remove {job.folder}")


@contextlib.contextmanager
def _stopping(stop: Callable[[], None]) -> Iterator[None]:
    """End on SIGTERM and SIGINT as on the job's own end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.signal(number, lambda *_: stop()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
