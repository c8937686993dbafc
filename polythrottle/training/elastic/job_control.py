"""A job is served by its controller, run whole on this machine, shown, and stopped in good order."""

import contextlib
import json
import math
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from polythrottle.domain.clock import Clock, SystemClock
from polythrottle.domain.errors import BadFile, ClaimFailed, InvalidInput, PolythrottleError, StorageError, UnknownName
from polythrottle.storage.atomic_file import is_locked
from polythrottle.storage.object_store import Holding, Store
from polythrottle.storage.paths import state_dir
from polythrottle.storage.untrusted import is_loopback
from polythrottle.training.elastic.channel import (
    ControllerAway,
    ControllerChannel,
    own_token,
    parse_address,
    read_token,
)
from polythrottle.training.elastic.checkpoints import Manifest, newest_manifest
from polythrottle.training.elastic.controller import (
    Controller,
    ControllerServer,
    Job,
    announce,
    members_document,
    progress_document,
)
from polythrottle.training.elastic.engines import STOP_S, Engine, job_line
from polythrottle.training.elastic.events import EVENTS, JOB, keeper, read_events, replayed
from polythrottle.training.elastic.membership import EventKind, Phase, Rules, restored
from polythrottle.training.elastic.nodes.overseer import Watched, overseen

Told = Callable[[str], object]
STORE_S = 10.0
"""How long a store may take to say what it holds, in seconds: who asks for a job's status waits for it."""
MOST_NODES = 10_000
STILLBORN = 3
"""Nodes that may end before they join, one after the other, before a job on this machine is given up."""


def _unheard(event: Mapping[str, Any]) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class ControllerOptions:
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
        watched: How its nodes are paced, and when it is called slow.
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
    watched: Watched = field(default_factory=Watched)

    def as_job(self) -> Job:
        """Return the job that is meant.

        Raises:
            InvalidInput: If a word is not valid.
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
        return Job(self.job or folder.name, folder, rules, store, self.rate_per_h, terms, self.watched)


def node_counts(text: str) -> tuple[int, int]:
    """Return the least and the most nodes of a text such as ``2`` (between one and two) or ``2:4``.

    Raises:
        InvalidInput: If it is not valid.
    """
    matched = re.fullmatch(r"(?:([0-9]{1,6}):)?([0-9]{1,6})", text.strip())
    least, most = (int(matched[1] or 1), int(matched[2])) if matched else (0, 0)
    if not 1 <= least <= most <= MOST_NODES:
        raise InvalidInput(
            f"--nodes takes 1 to {MOST_NODES} nodes, as a number such as 4 or least:most such as 2:4, not {text[:40]!r}"
        )
    return least, most


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
    event_files = [path for path in (state_dir() / "cluster").glob(f"*/{EVENTS}") if path.is_file()]
    if not event_files:
        raise UnknownName("job", "", [], hint="start one with polythrottle cluster train")
    return max(event_files, key=lambda path: path.stat().st_mtime).parent


def serve(
    asked: ControllerOptions,
    address: str,
    token_file: Path | None,
    say: Told,
    on_event: Callable[[Mapping[str, Any]], object] = _unheard,
) -> dict[str, Any]:
    """Be a job's controller until the job has ended or a signal ends this, and return where the job then stands.

    Args:
        asked: What it is asked to do.
        address: Where to listen, as HOST:PORT; port 0 for a free one.
        token_file: File of the job's token; None for one of the controller's own, in the job's folder.
        say: Takes lines for people.
        on_event: Told of everything that happens in the job, in order.

    Raises:
        InvalidInput: If a word is not valid, or the address cannot be listened on.
        BadFile: If the token cannot be read, or others can.
        StorageError: If the job or the store is another controller's, or cannot be written.
        ClaimFailed: If the job has failed.
    """
    host, port = parse_address(address)
    job = asked.as_job()
    if token_file is not None:
        read_token(token_file)
    refuse_taken(job)
    holding = Holding(Store(job.store))
    with contextlib.closing(Controller(job)) as controller:
        file = (token_file or own_token(job.folder)).absolute()
        return _served(ControllerServer(controller, host, port, read_token(file), holding), file, say, on_event)


def _served(
    serving: ControllerServer, token_file: Path, say: Told, on_event: Callable[[Mapping[str, Any]], object]
) -> dict[str, Any]:
    controller = serving.controller
    job = serving.controller.job
    with _stopping(serving.stop):
        serving.open()
        announce(job, serving.line, token_file)
        say(f"controller of job {job.name} on {serving.line.address}, checkpoints in {job.store}")
        if not is_loopback(serving.line.host):
            say(f"its nodes need the token in {token_file}: give each a copy of mode 600 with --token-file")
        phase = serving.run(on_event=on_event)
    if phase is Phase.FAILED:
        raise ClaimFailed(f"job {job.name} has failed: {controller.reason}")
    return controller.status()


@dataclass
class LocalJob:
    """A whole job on this machine.

    Attributes:
        engine: Runs it.
        members: Names of its nodes.
        replace_after_s: When a lost node is started again, in seconds; None for never.
        clock: Waits.
        say: Takes lines for people.
        seen: Events that a former launcher saw: no news, and no reason to act.
    """

    engine: Engine
    members: Sequence[str]
    replace_after_s: float | None = 5.0
    clock: Clock = field(default_factory=SystemClock)
    say: Told = str
    seen: int = 0
    _due: dict[str, float] = field(default_factory=dict)
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
        with stopped_in_order(self.engine.stop, self.say):
            self.engine.start(self.members)
            while (code := ended()) is None:
                self.clock.sleep(0.2)
                self._follow(on_event)
                self._bury(gone())
            self._follow(on_event)
            return code

    def _follow(self, on_event: Callable[[Mapping[str, Any]], None]) -> None:
        events = self.engine.events()
        for event in events[self.seen :]:
            on_event(event)
            self._consider(event)
        self.seen = len(events)
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
        if event["event"] == EventKind.JOINED:
            self._awaited.discard(str(event.get("node")))
            self._stillborn = 0
        if event["event"] in (EventKind.FINISHED, EventKind.FAILED):
            self._awaited.clear()
            self.replace_after_s = None
            self._due.clear()
        gone = event["event"] in (EventKind.LOST, EventKind.LEFT) and event.get("node") in self.members
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
    if records:
        status = _from_events(folder, records)
    else:
        status = _unheard_of(folder)
    return status | _in_store(folder, status["newest_checkpoint"], status["step"])


def _from_events(folder: Path, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    held = restored(Rules(), records, 0.0)
    over = [record for record in records if record["event"] in (EventKind.FINISHED, EventKind.FAILED)]
    steps = [record for record in records if "step" in record]
    step = max((int(record["step"]) for record in steps), default=None)
    epochs = (int(record["epoch"]) for record in steps if "epoch" in record and int(record["step"]) == step)
    return {
        "job": folder.name,
        "phase": str(over[-1]["event"]) if over else "unknown",
        "reason": over[-1].get("reason") if over else "no controller answers; this is from the job's events",
        "generation": held.generation,
        **members_document(held, bool(over) or not held.nodes),
        "nodes": [],
        **progress_document(replayed(records)),
        "step": step,
        "epoch": max(epochs, default=None),
        **overseen(records),
        "source": "the job's events",
    }


def _unheard_of(folder: Path) -> dict[str, Any]:
    """Return what is known of a job without events: nothing that could be counted."""
    counts = ("generation", "checkpoints", "losses", "departures", "notices", "restarts", "faults", "successors")
    reason = "no controller answers, and the job has no events yet"
    return {**_from_events(folder, ()), "reason": reason, **dict.fromkeys((*counts, "spooled", "nothing_left"))}


def _in_store(folder: Path, noted: Mapping[str, Any] | None, step: int | None) -> dict[str, Any]:
    """Return what the store knows better: a checkpoint may have come into it after the controller was gone."""
    try:
        manifest = _stored(folder)
    except PolythrottleError as err:
        return {"store_trouble": str(err)}
    if manifest is None or (noted is not None and _place(noted) >= (manifest.generation, manifest.step)):
        return {"store_trouble": None}
    known = {"name": manifest.name, "generation": manifest.generation, "step": manifest.step, "epoch": manifest.epoch}
    newest = known | {"bytes": manifest.bytes, "stall_s": None, "share": None}  # nobody heard what it cost
    if step is None or manifest.step > step:
        farther = known
    else:
        farther = {"step": step}
    places = {key: value for key, value in farther.items() if key in ("step", "epoch")}
    return {**places, "checkpoints": None, "newest_checkpoint": newest, "store_trouble": None}


def _place(record: Mapping[str, Any]) -> tuple[int, int]:
    return int(record["generation"]), int(record["step"])


def _stored(folder: Path) -> Manifest | None:
    """Return the newest checkpoint in the store that a job's folder names, None if there is none or it names none.

    Raises:
        StorageError: If the store cannot be asked in time.
        InvalidInput: If nothing here opens it.
    """
    try:
        url = str(json.loads((folder / JOB).read_bytes())["store"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    answers: list[Manifest | PolythrottleError | None] = []

    def ask() -> None:
        try:
            answers.append(newest_manifest(Store(url)))
        except PolythrottleError as err:
            answers.append(err)

    asking = threading.Thread(target=ask, daemon=True)  # a bucket's own patience can be minutes
    asking.start()
    asking.join(STORE_S)
    if not answers:
        raise StorageError(f"the store {url} did not answer within {STORE_S:.0f} s")
    if isinstance(answers[0], PolythrottleError):
        raise answers[0]
    return answers[0]


def way_to(address: str, token_file: Path | None) -> ControllerChannel:
    """Return the way to a controller.

    Args:
        address: As HOST:PORT.
        token_file: File of its token; None for that of the newest job in this user's state folder at the address.

    Raises:
        InvalidInput: If the address is not valid, or no job here is at it.
        BadFile: If the token cannot be read.
    """
    wanted = parse_address(address)
    if token_file is not None:
        return ControllerChannel.through(address, token_file)
    known = [path for path in (state_dir() / "cluster").glob(f"*/{JOB}") if path.is_file()]
    for path in sorted(known, key=lambda path: path.stat().st_mtime, reverse=True):
        with contextlib.suppress(BadFile):
            line = job_line(path.parent)
            if (line.host, line.port) == wanted:
                return line
    raise InvalidInput(
        f"no job of yours on this machine is at {address}: give --token-file with a copy of its controller's token"
    )


def refuse_taken(job: Job) -> None:
    """Refuse to begin a job that has finished, or that is being trained.

    Raises:
        InvalidInput: If it has finished.
        StorageError: If another controller works on it.
    """
    if is_locked(job.folder / EVENTS):
        raise StorageError(
            f"another controller (process {keeper(job.folder)}) works on job {job.name}, which goes on undisturbed; "
            f"see polythrottle cluster status {job.name}, or give another --job"
        )
    if any(record["event"] == EventKind.FINISHED for record in read_events(job.folder)):
        raise InvalidInput(f"job {job.name} has finished; give another --job, or remove {job.folder}")


def how_to_continue(folder: Path) -> str:
    """Return what a job that was stopped has kept, and how it goes on, in a line for people."""
    with contextlib.suppress(PolythrottleError):
        newest = status_of(folder)["newest_checkpoint"]
        if newest is not None:
            return f"the checkpoint of step {newest['step']} is kept; go on from it with --job {folder.name}"
    return f"no checkpoint was kept; --job {folder.name} begins anew"


@contextlib.contextmanager
def stopped_in_order(stop: Callable[[], object], say: Told) -> Iterator[None]:
    """Stop what runs when this ends, however it ends: SIGTERM and a closed terminal count as Ctrl-C.

    Args:
        stop: Stops it; is not interrupted by a second Ctrl-C, which would leave processes behind.
        say: Takes lines for people.
    """
    main = threading.current_thread() is threading.main_thread()
    held = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is not signal.SIG_IGN]
    if main:
        former = {number: signal.signal(number, _interrupt) for number in held}
    else:
        former = {}
    try:
        yield
    except KeyboardInterrupt:
        say(f"stopping: a last checkpoint, then all processes end; this takes up to {STOP_S:.0f} s")
        raise
    finally:
        if main:
            ignored = {each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, *former)}
        else:
            ignored = {}
        try:
            stop()
        finally:
            for number, handler in {**ignored, **former}.items():
                signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


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
