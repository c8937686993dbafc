"""Fine-tuning beside inference on a board over SSH: `run_there` and its like at the desk, `main` on the board.

The board serves, trains, and reads its own energy, in its own interpreter. Both say JSON objects, one a line; the desk:

``place``, ``task``, ``terms``, ``holder``: what is to be run, and who asks. The first line, once. Without terms batches
  and slices are measured, as for a plan; with ``co_runs`` instead, how many of which, what a profile is made from.
``stop`` ends the run as Ctrl-C does. ``alive`` is said so often that the board knows that the desk is there.
The board:
``progress`` and ``note``, while it runs.
``part`` and ``values``: latencies and the like, some at a time, for there may be millions; ``result``: the rest.
``known``: what batches and slices take; ``profile``: what co-runs tell. ``error``: why there is nothing. ``ended``: it
  was interrupted before that, and what is kept of the job.

A desk that hangs up, or is silent for 45 seconds, ends the run as Ctrl-C does: the board is put back first, and the
job's last step is brought to disk. Where a job stands is asked of `job_folder` there, in one line.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, is_dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from polythrottle.actuation.actuator import acting_for
from polythrottle.actuation.wire import error_from, error_line
from polythrottle.backends.device_uri import DeviceURI, check_uri
from polythrottle.board.far_side import device_here, own_folder, tell
from polythrottle.domain.arrivals import Arrivals, Trace
from polythrottle.domain.errors import DeviceError, InvalidInput, PolythrottleError, TrialError
from polythrottle.domain.ladder import PointPerformance
from polythrottle.domain.space import OperatingPoint
from polythrottle.storage.json_channel import Channel, decode, encode
from polythrottle.storage.paths import state_dir
from polythrottle.storage.untrusted import MALFORMED
from polythrottle.training.beside.corun_bench import CoRunProfile, PredictionError
from polythrottle.training.beside.corun_model import CoRun
from polythrottle.training.beside.interference import Interference, Reference, Tail
from polythrottle.training.beside.live_run import RunProgress, run
from polythrottle.training.beside.operating_options import FinetuningJob, Menu, Option, Slice
from polythrottle.training.beside.preparation import ServingPlace, known, profiled
from polythrottle.training.beside.scheduler import Hours, Terms
from polythrottle.training.beside.serving_loop import Result, Training
from polythrottle.training.beside.trainer import job_folder
from polythrottle.training.beside.trainer.driver import Task, Trainer
from polythrottle.training.beside.trainer.job_folder import Progress
from polythrottle.training.beside.trainer.supervisor import kept_words
from polythrottle.workloads.foreign_calls import one_line

if TYPE_CHECKING:
    from polythrottle.board.carried import Carried

MODULES = {
    "board": "carried",
    "domain": "ladder",
    "domain/load": "__init__ energy_ration forecast",
    "metering": "intervals",
    "storage": "append_log cells tables",
    "training": "__init__ checkpoints",
    "training/beside": "__init__ corun_bench corun_model far_run interference live_run operating_options "
    "preparation progress_forecast scheduler serving_loop",
    "training/beside/trainer": "*",
    "workloads": "graph_operators torch_graph",
}
"""What a board gets besides, where it fine-tunes."""

_LISTS = ("latencies_s", "arrived_s", "slices_s")
"""What a result holds of each request or slice: sent in parts, for a night has millions."""
_PART = 10_000
_MOST = 4 * 1024 * 1024
_CHUNK = 65536
_ALIVE_S = 10.0
_SILENT_S = 45.0
"""As long as ssh itself waits for a sign of the other side."""
_PARTING_S = 90.0
"""So long may a run take that is to end: bringing a step to disk, or a query that hangs."""
_GOES_ON = "the same command goes on with it, from the last step that is kept"
_ANEW = "nothing is kept of it, and the same command measures anew"


# At the desk.

_RUNS_THERE = re.compile(r"cmd:.*|[^?]+\.pt2?|[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*(\?.*)?", re.DOTALL)


def carried(entry: str = __name__) -> Carried:
    """Return what a board gets that fine-tunes.

    Args:
        entry: The module whose ``main`` runs there.

    Raises:
        DeviceError: If a file of it cannot be read here.
    """
    from polythrottle.backends.ssh import packed

    return packed(entry, tuple(MODULES.items()))


def run_there(
    place: ServingPlace,
    task: Task,
    terms: Terms,
    told: Callable[[RunProgress], None],
    noted: Callable[[str], None],
) -> Result:
    """Return what came of serving requests and training in between on a board over SSH.

    A run that is interrupted from the keyboard ends there as if its time were up, and says so; a second interrupt hangs
    up, after which it ends all the same.

    Args:
        place: Its device is a URI ``ssh://…``, its workload one of the board.
        task: With folders of the board.
        terms: What is to be kept to.
        told: Called about once a second.
        noted: Called with what should be known.

    Raises:
        InvalidInput: If something cannot be run over SSH.
        DeviceError: If the board cannot be reached, its Python has no torch, or the connection is lost.
        PolythrottleError: As `polythrottle.training.beside.live_run.run` on the board itself.
    """
    if isinstance(terms.arrivals, Trace):
        raise InvalidInput("a trace of requests is not carried to a board; take poisson, burst, day or uniform")
    plain = {name: getattr(terms, name) for name in ("slo_s", "policy", "seconds", "seed", "power_w")}
    hours = None if terms.hours is None else str(terms.hours)
    kept = {**plain, "arrivals": str(terms.arrivals), "hours": hours}
    result: Result = _asked(place, task, {"terms": kept}, told, noted)
    return result


def known_there(place: ServingPlace, task: Task) -> tuple[Menu, FinetuningJob, str]:
    """Return what a board over SSH can do where it stands, measured there, the job, and how its joules come about.

    Args:
        place: Its device is a URI ``ssh://…``, its workload one of the board.
        task: With folders of the board.

    Raises:
        PolythrottleError: As `run_there`.
    """
    found: tuple[Menu, FinetuningJob, str] = _asked(place, task, {}, lambda passed: None, lambda text: None)
    return found


def profiled_there(
    place: ServingPlace, task: Task, held_out: int, requests: int, noted: Callable[[str], None]
) -> CoRunProfile:
    """Return what co-runs on a board over SSH tell; see `polythrottle.training.beside.corun_bench.profile`.

    Args:
        place: Its device is a URI ``ssh://…``, its workload one of the board.
        task: With data of the board, and a job that is long enough; its folder is made there and thrown away.
        held_out: Co-runs to judge by.
        requests: Single requests to learn from afterwards.
        noted: Called with what should be known.

    Raises:
        InvalidInput: If there are fewer different co-runs than are asked for.
        PolythrottleError: As `run_there`.
    """
    order = {"co_runs": {"held_out": held_out, "requests": requests}}
    found: CoRunProfile = _asked(place, task, order, lambda passed: None, noted)
    return found


def progress_there(device: str, folder: str) -> Progress:
    """Return where the job of a folder of a board stands, as its files there say.

    Args:
        device: A URI ``ssh://…``; which device it names does not matter.
        folder: From the home folder there on.

    Raises:
        BadFile: If the folder holds no job, or one that is damaged.
        DeviceError: If the board cannot be reached.
    """
    from polythrottle.board.link import Place, ask

    check_uri(device)
    uri = DeviceURI.parse(device)
    told = ask(Place.parse(uri.name, uri.options), carried(job_folder.__name__), {"folder": folder})
    return Progress.from_document(told)


def _asked(
    place: ServingPlace,
    task: Task,
    asked: Mapping[str, Any],
    told: Callable[[RunProgress], None],
    noted: Callable[[str], None],
) -> Any:
    """Have something run there and return what came of it."""
    # Only here: what runs on the board has no client.
    from polythrottle.backends.ssh import desk
    from polythrottle.board.link import Link, Place

    _check(place)
    uri = DeviceURI.parse(place.device)
    board = Place.parse(uri.name, uri.options)
    later = _ANEW if "co_runs" in asked else _GOES_ON
    link = Link(board, carried())
    try:
        channel = Channel(link.connect(), _MOST)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"nothing was begun on {board.where}; the same command begins it") from None
    followed = _Followed(channel, board.where, told, noted, later)
    try:
        order = {"place": {**asdict(place), "device": ""}, "task": task.document(), **asked}
        channel.send({"holder": desk(), **order})
        return followed.result()
    except (EOFError, OSError):
        # What native code it was in, such as torch's as it is loaded, may have ended it at once.
        raise followed.left() if followed.stopping else _lost(board.where, link.last_words(), later) from None
    finally:
        channel.close()


def _lost(where: str, words: str, later: str) -> DeviceError:
    """Return what is said of a lost connection."""
    last = f" (its last words: {words})" if words else ""
    return DeviceError(
        f"the connection to {where} was lost{last}; the board ends the run and puts itself back; {later}"
    )


def _check(place: ServingPlace) -> None:
    check_uri(place.device)
    if DeviceURI.parse(place.device).meter:
        raise InvalidInput("a meter is read here, by another clock than the board's; leave it out over SSH")
    place.check_model()
    if not _RUNS_THERE.fullmatch(place.workload):
        raise InvalidInput(
            f"{place.workload} cannot be served over SSH: beside fine-tuning a board runs package.module:callable, "
            "model.pt2, model.pt and cmd:<shell words>"
        )


class _Followed:
    """A run on a board as it is told."""

    def __init__(
        self,
        channel: Channel,
        where: str,
        told: Callable[[RunProgress], None],
        noted: Callable[[str], None],
        later: str = _GOES_ON,
    ) -> None:
        self._channel = channel
        self._where = where
        self._later = later
        self._told = told
        self._noted = noted
        self.stopping = False
        self._said_s = time.monotonic()
        self._lists: dict[str, list[Any]] = {name: [] for name in _LISTS}

    def result(self) -> Any:
        """Wait for what comes of it.

        Raises:
            EOFError: If the board's side is gone; OSError likewise.
            PolythrottleError: What it fails with there.
        """
        while True:
            try:
                found = self._take(self._next())
            except KeyboardInterrupt as err:
                if err.args:  # the board's last word, and no Ctrl-C
                    raise
                self._stop()
                continue
            if found is not None:
                return found

    def _stop(self) -> None:
        """Have the run ended there and go on waiting for what came of it; the second time wait no longer."""
        if self.stopping:
            raise self.left()
        self.stopping = True
        self._noted(f"{self._where} ends the run and is put back; a second Ctrl-C does not wait")
        self._channel.send({"stop": True})

    def left(self) -> KeyboardInterrupt:
        """Return what is said of a run that was interrupted and of which nothing more is heard."""
        return KeyboardInterrupt(f"{self._where} ends the run and puts itself back; {self._later}")

    def _next(self) -> Mapping[str, Any]:
        while True:
            try:
                if time.monotonic() >= self._said_s + _ALIVE_S:
                    self._said_s = time.monotonic()
                    self._channel.send({"alive": True})
                message = self._channel.receive(1.0)
            except InvalidInput as err:
                raise DeviceError(f"{self._where} answers what makes no sense: {err}") from err
            if message is not None:
                return message

    def _take(self, message: Mapping[str, Any]) -> Any:
        try:
            return self._understood(message)
        except MALFORMED as err:
            raise DeviceError(f"{self._where} answers what makes no sense: {one_line(err)}") from err

    def _understood(self, message: Mapping[str, Any]) -> Any:
        if "progress" in message:
            self._told(RunProgress(**message["progress"]))
        elif "note" in message:
            self._noted(str(message["note"]))
        elif "part" in message:
            self._lists[message["part"]].extend(message["values"])
        elif "result" in message:
            found = _result_of(message["result"], self._lists)
            return replace(found, title=f"{self._where}: {found.title}")
        elif "known" in message:
            return _known_of(message["known"])
        elif "profile" in message:
            measured = _profile_of(message["profile"])
            return replace(measured, title=f"{self._where}: {measured.title}")
        elif "ended" in message:
            kept = str(message.get("kept") or self._later)
            if self.stopping:
                raise KeyboardInterrupt(f"{self._where} is put back; {kept}")
            raise DeviceError(f"{self._where}: the run was ended there; {kept}")
        else:
            err = error_from(message["error"])
            if self._where not in str(err):
                err.args = (f"{self._where}: {err}",)
            raise err
        return None


def _known_of(line: Mapping[str, Any]) -> tuple[Menu, FinetuningJob, str]:
    """Return what batches and slices take, as it has travelled."""
    point = OperatingPoint(line["point"])
    services = tuple(PointPerformance(point=point, **each) for each in line["services"])
    option = Option(point, services, tuple(Slice(**each) for each in line["slices"]))
    return Menu((option,)), FinetuningJob(**line["job"]), str(line["energy_kind"])


def _known_line(option: Option, job: FinetuningJob, energy_kind: str) -> dict[str, Any]:
    """Return the same as it travels."""
    services = [{name: value for name, value in vars(each).items() if name != "point"} for each in option.services]
    return {
        "point": dict(option.point),
        "services": services,
        "slices": [asdict(each) for each in option.slices],
        "job": asdict(job),
        "energy_kind": energy_kind,
    }


def _profile_of(line: Mapping[str, Any]) -> CoRunProfile:
    """Return what co-runs tell, as it has travelled."""
    return CoRunProfile(
        title=str(line["title"]),
        simulated=bool(line["simulated"]),
        runs=tuple(CoRun(**each) for each in line["runs"]),
        held_out=tuple(CoRun(**each) for each in line["held_out"]),
        errors=tuple(PredictionError(**each) for each in line["errors"]),
        model=_model_of(line["model"]),
        remarks=tuple(line["remarks"]),
    )


def _model_of(line: Mapping[str, Any]) -> Interference:
    """Return a fitted model, as it has travelled."""
    given = line["reference"]
    middle = tuple((str(name), float(value)) for name, value in given["middle"])
    tail = None
    if line["tail"] is not None:
        tail = Tail(
            **{**line["tail"], "mean": _array(line["tail"]["mean"]), "precision": _array(line["tail"]["precision"])}
        )
    return Interference(
        reference=Reference(**{**given, "middle": middle, "reach": tuple(given["reach"])}),
        mean=_array(line["mean"]),
        precision=_array(line["precision"]),
        variance=float(line["variance"]),
        tail=tail,
        surprise=float(line["surprise"]),
    )


def _array(values: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.asarray(values, dtype=np.float64)


def _plain(value: Any) -> Any:
    """Return values of dataclasses, tuples and arrays as they travel."""
    if is_dataclass(value):
        return {name: _plain(each) for name, each in vars(value).items()}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value


def _result_of(rest: Mapping[str, Any], lists: Mapping[str, Sequence[Any]]) -> Result:
    """Return the result that has travelled."""
    fields: dict[str, Any] = {name: tuple(values) for name, values in lists.items()}
    fields["slices_s"] = tuple((begun_s, ended_s) for begun_s, ended_s in lists["slices_s"])
    fields["notices"] = tuple(rest["notices"])
    return Result(**{**rest, **fields, "training": Training(**rest["training"])})


# On the board.


def main(mark: str, folder: str, device: str) -> int:
    """Run what the desk at the other end of standard input asks for; returns an exit code.

    Args:
        mark: What begins the lines before the channel.
        folder: Where this was unpacked.
        device: URI of the device; what ``auto`` means if "".
    """
    with own_folder(Path(folder)):
        return _serve(mark, folder, device)


def _serve(mark: str, folder: str, device: str) -> int:
    os.environ.setdefault("HOME", "/")
    for number in (signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    try:
        uri = device_here(device)
        if find_spec("torch") is None:
            raise DeviceError(f"{sys.executable} there has no torch to fine-tune with; name one that has by ?python=")
    except (PolythrottleError, OSError) as err:
        tell(mark, f"fault {err}")
        return 1
    tell(mark, "ready")
    desk = _Desk()
    try:
        return _answer(desk, uri, folder)
    except KeyboardInterrupt:  # while the result was told to a desk that has gone
        return 1
    finally:
        desk.leave()


def _answer(desk: _Desk, uri: str, folder: str) -> int:
    """Run what is asked for, and tell what comes of it."""
    try:
        _run_here(desk, uri, folder)
        return 0
    except KeyboardInterrupt:
        desk.tell(ended=True, kept=desk.job and kept_words(Path(desk.job)))
    except PolythrottleError as err:
        desk.tell(error=error_line(err))
    except EOFError:
        pass  # the desk has gone before it asked for anything
    except ImportError as err:
        desk.tell(error=error_line(DeviceError(f"{sys.executable} there cannot run that: {err}")))
    # The outermost level: whatever it is, the desk is to have it in a line.
    except Exception as err:
        desk.tell(error=error_line(TrialError(f"the board's side met a fault: {one_line(err)}")))
    return 1


def _run_here(desk: _Desk, uri: str, folder: str) -> None:
    order = desk.order()
    given = order["place"]
    place = ServingPlace(
        device=uri,
        workload=given["workload"],
        batches=tuple(given["batches"]),
        threads=given["threads"],
        inputs=tuple(given["inputs"]),
    )
    task = Task.from_document(order["task"])
    task.check_data()
    desk.job = "" if "co_runs" in order else task.folder
    # Whoever else comes to this board is to know the desk: the number of this process says nothing of it.
    with acting_for(str(order["holder"])):
        device, server = place.open()
        with closing(server.workload):
            if "terms" in order:
                # A daemon of this user on the board finds the job by that link, as it does one that was begun there.
                job_folder.leave_link(Path(task.folder), state_dir() / "finetune")
                desk.tell_result(run(device, server, Trainer(task), _terms_of(order["terms"]), desk.shown, desk.noted))
            elif "co_runs" in order:
                # In the folder that goes when this ends, or that the next one removes where this is killed.
                with tempfile.TemporaryDirectory(dir=folder) as job:
                    trainer = Trainer(replace(task, folder=job))
                    desk.tell(profile=_plain(profiled(device, server, trainer, **order["co_runs"])))
            else:
                menu, planned = known(device, server, Trainer(task), task)
                desk.tell(known=_known_line(menu.options[0], planned, str(device.energy_kind)))


def _terms_of(plain: Mapping[str, Any]) -> Terms:
    """Return the terms that have travelled."""
    hours = None if plain["hours"] is None else Hours.parse(plain["hours"])
    return Terms(**{**plain, "arrivals": Arrivals.parse(plain["arrivals"]), "hours": hours})


class _Desk:
    """The desk, at the other end of this process's standard input and output."""

    def __init__(self) -> None:
        # What a model prints or reads is no part of the channel.
        self._out = os.dup(1)
        os.dup2(2, 1)
        self._lines = _lines(os.dup(0))
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        self._interrupted = False
        self.job = ""
        # Not left to what started this, which may have them ignored.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupt)

    def order(self) -> Mapping[str, Any]:
        """Return what is to be run; from then on the desk may end it.

        Raises:
            EOFError: If it has gone.
            InvalidInput: If it says something else.
        """
        line = next(self._lines, None)
        if line is None:
            raise EOFError("the desk has gone")
        threading.Thread(target=self._listen, name="polythrottle-desk", daemon=True).start()
        return decode(line)

    def _listen(self) -> None:
        """End the run when the desk says so, hangs up, or is silent for too long."""
        for line in self._lines:
            with suppress(InvalidInput):
                if "stop" in decode(line):
                    os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        # A query that hangs in somebody's native code lets Python see no signal; a guard puts the board back then.
        time.sleep(_PARTING_S)
        os._exit(1)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        # Once: a second one would break off what puts the board back.
        if not self._interrupted:
            self._interrupted = True
            raise KeyboardInterrupt

    def tell(self, **message: Any) -> None:
        """Tell the desk something; nothing happens if it has gone."""
        with suppress(OSError):
            left = memoryview(encode(message))
            while left:
                left = left[os.write(self._out, left) :]

    def shown(self, passed: RunProgress) -> None:
        """Tell how far a run has come."""
        self.tell(progress=asdict(passed))

    def noted(self, text: str) -> None:
        """Tell what should be known."""
        self.tell(note=text)

    def tell_result(self, result: Result) -> None:
        """Tell what came of the run."""
        for name in _LISTS:
            values = getattr(result, name)
            for begin in range(0, len(values), _PART):
                self.tell(part=name, values=list(values[begin : begin + _PART]))
        rest = {name: value for name, value in vars(result).items() if name not in _LISTS}
        self.tell(result={**rest, "training": asdict(result.training)})

    def leave(self) -> None:
        """Have nothing interrupted any more."""
        self._interrupted = True


def _lines(handle: int) -> Iterator[bytes]:
    """Yield what the desk says, until it hangs up or is silent for too long."""
    kept = b""
    with suppress(OSError):
        while select.select([handle], [], [], _SILENT_S)[0]:
            part = os.read(handle, _CHUNK)
            if not part:
                return
            *whole, kept = (kept + part).split(b"\n")
            yield from whole
