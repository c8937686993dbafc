"""The composition root: from a user's words to a device and the workload it serves, and whether that runs there."""

import contextlib
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polythrottle.backends import open_device
from polythrottle.backends.device_uri import with_files_read
from polythrottle.backends.meters import metered, unmetered
from polythrottle.backends.served_devices import roots_of
from polythrottle.catalog import names
from polythrottle.catalog.documents import locate
from polythrottle.domain.arrivals import CLOSED, Arrivals, SelfPaced, Trace
from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import BadFile, InvalidInput
from polythrottle.domain.measurement import LONGEST_S, EnergyKind, Window
from polythrottle.domain.metrics import EXTRAS, METRICS
from polythrottle.domain.ports import Concurrent, Device, Meter, Placed, Placement, Target, Workload
from polythrottle.domain.problem import Constraint, Problem
from polythrottle.domain.units import show_name
from polythrottle.metering.early_stopping import LEAST_QUERIES, SEARCH_PRECISION, most_queries
from polythrottle.storage.identity import content_digest, identity_of, without_options
from polythrottle.storage.untrusted import MALFORMED, said
from polythrottle.tuning.objects import GivenObjects, Served, name_of

if TYPE_CHECKING:
    from polythrottle.backends.simulated import SimulatedDevice

# The GPU that a study tunes, and whether what is served runs there.

RUNS_ON = "runs_on"
"""The name under which a problem's content says what the work runs on."""


def target_of(device: Device) -> Target | None:
    """Return the GPU that is tuned on a device; None where none is: processors, simulated boards, recorded tables."""
    from polythrottle.backends.ssh import SshDevice
    from polythrottle.workloads.cuda import number_at

    uri = device.there if isinstance(device, SshDevice) else device.uri
    if uri.startswith("jetson"):
        return Target(device.title)
    if not uri.startswith("nvml:"):
        return None
    identity = identity_of(device)
    uuids = tuple(uuid for uuid in identity.get("uuid", "").replace(",", " ").split() if uuid)
    first = identity.get("pci", "").partition(",")[0]  # of a group: what runs in this process runs on one of it
    return Target(device.title, uuids, partial(number_at, first), first)


def _seen_by(device: Device, served: Workload) -> Target | None:
    """Return the GPU that is tuned, with the number it has where the work runs."""
    from polythrottle.board.remote_workload import BoardWorkload

    if isinstance(served, BoardWorkload):
        return served.target
    return target_of(device)


def _far_digest(served: Workload) -> dict[str, str]:
    """Return what a problem's content says of a model's file that lies on a board over SSH."""
    from polythrottle.board.remote_workload import BoardWorkload

    if isinstance(served, BoardWorkload) and served.digest:
        return {"model": served.digest}
    return {}


def placed(served: Workload) -> Placement | None:
    """Return what a workload runs on, if it knows."""
    if isinstance(served, Placed):
        return served.placement
    return None


def runs_on(device: Device, served: Workload) -> dict[str, str]:
    """Return what a problem's content says of where the work runs: nothing where no GPU is tuned or nobody knows."""
    placement = placed(served)
    if placement is None or _seen_by(device, served) is None:
        return {}
    return {RUNS_ON: str(placement)}


def check_placed(device: Device, served: Workload, *, reopens: bool = True) -> None:
    """Check that what is tuned is what runs, unless somebody chose otherwise.

    Args:
        device: Whose knobs are searched.
        served: What is served.
        reopens: Whether its URI opens it again, so that an option in the URI helps.

    Raises:
        InvalidInput: If the knobs searched are a GPU's, and the work runs on the processor or on another GPU.
        DeviceError: If CUDA does not show the GPU to this process.
    """
    target = _seen_by(device, served)
    placement = placed(served)
    if target is None or placement is None or placement.asked:
        return
    knobs = [name for name in device.space.names if target.uuids or name.startswith("gpu_")]
    if not knobs and not target.uuids:
        return
    tuned = f"{' and '.join(map(show_name, knobs)) or 'the energy'} of {target.title}"
    if placement.gpu is None:
        stay = "search other knobs (--knobs)"
        if reopens and placement.stay:
            stay = placement.stay
        raise InvalidInput(
            f"{served.uri} runs on {placement}, and {tuned} would be tuned: {placement.why}; {placement.remedy}; "
            f"to have it there all the same: {stay}"
        )
    if len(target.uuids) == 1 and placement.gpu != target.number:
        raise InvalidInput(
            f"{served.uri} runs on GPU {placement.gpu} of CUDA, and {tuned} would be tuned, which is GPU "
            f"{target.number} of CUDA; move it there"
        )


# The composition root: from the words a user gave to a device and the workload it serves.

_MODEL_FILES = (".onnx", ".pt2", ".pt", ".engine", ".plan", ".toml")
_SHORT = 8
"""Digits of a digest in a file's name."""


@dataclass(frozen=True)
class Setup:
    """What is tuned or measured, in the words a user gave; opens the same device and workload every time.

    Args:
        device: Device URI.
        workload: Workload URI, or None for a replay table, which brings its own.
        knobs: Which device knobs to search; the device's own choice if None.
        batch_sizes: Batch sizes to search; the workload's own choice if None.
        threads: Thread counts to search; the workload's own choice if None.
        inputs: Input shapes of a model that does not state them.
        timeout_s: When a command's query is given up.
        queries: How many queries a trial looks at at least; if None, 1,000 in virtual time and 100 in real time.
        seconds: How long it looks at least, but for 1,000 queries or ``queries`` at most; 2 s if None.
        arrivals: When requests are meant to be sent, as `polythrottle.domain.arrivals` has it; back to back if None.
        precision: How far energy may be off, as a fraction, for a trial to end; if None, each looks as long as any.
        settle_s: How long each trial warms up at least.
        cool_c: How cool the device must be before each trial; as it is if None.
        objects: What was given as an object in place of what the names open; a journal does not keep it.
    """

    device: str = "auto"
    workload: str | None = None
    knobs: tuple[str, ...] | None = None
    batch_sizes: tuple[int, ...] | None = None
    threads: tuple[int, ...] | None = None
    inputs: tuple[str, ...] = ()
    timeout_s: float = 60.0
    queries: int | None = None
    seconds: float | None = None
    arrivals: str | None = None
    precision: float | None = None
    settle_s: float = 0.0
    cool_c: float | None = None
    objects: GivenObjects = field(default=GivenObjects(), compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("knobs", "batch_sizes", "threads", "inputs"):
            # A text is a sequence too, and would be taken letter by letter.
            if isinstance(value := getattr(self, name), str | int):
                raise InvalidInput(f"{name} takes several, such as ({value!r},), not {value!r}")

    @classmethod
    def of(
        cls,
        device: str | Device = "auto",
        workload: str | Served | None = None,
        meter: Meter | None = None,
        setup: "Setup | None" = None,
    ) -> "Setup":
        """Return a setup of URIs or objects.

        Args:
            device: Device URI or device.
            workload: Workload URI, workload, function or torch module.
            meter: An external meter in place of the device's own sensors.
            setup: All other options; its own names count where nothing but names is given beside it.

        Raises:
            InvalidInput: If an object or the setup is not what it should be; says what it lacks.
        """
        if setup is not None and not isinstance(setup, Setup):
            raise InvalidInput(
                f"a setup is made by polythrottle.Setup, such as Setup('cpu', 'model.onnx'), not {setup!r}"
            )
        given = GivenObjects.of(device, workload, meter)
        made = setup or cls(str(device) if given.device is None else "", None if workload is None else str(workload))
        if given.device is not None:
            made = replace(made, device=given.device.uri)
        else:
            # Once, and here: a journal then names the boards, and not a file that somebody may change.
            made = replace(made, device=with_files_read(made.device))
        if given.workload is not None:
            made = replace(made, workload=name_of(given.workload))
        if given != GivenObjects():
            return replace(made, objects=given)
        return made

    @property
    def words(self) -> dict[str, Any]:
        """Every option as a journal keeps it, objects left out."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "objects"}

    @property
    def searching(self) -> "Setup":
        """The same for a search: windows that nobody has fixed end once they know enough."""
        fixed = (self.queries, self.seconds, self.precision)
        if any(given is not None for given in fixed):
            return self
        return replace(self, precision=SEARCH_PRECISION)

    @property
    def traffic(self) -> Arrivals:
        """When requests are meant to be sent.

        Raises:
            InvalidInput: If the words do not say.
            UnknownName: If there are no such arrivals.
        """
        if self.arrivals is None:
            return CLOSED
        return Arrivals.parse(self.arrivals)

    def window(self, device: Device, served: Workload | None = None) -> Window:
        """Return how long each trial looks on a device, or of a search for what is served there how long it may.

        It is longer where time is virtual and costs nothing.

        Raises:
            InvalidInput: If the number of queries or the time is not positive.
        """
        virtual = isinstance(device.clock, VirtualClock)
        if self.queries is not None:
            queries = self.queries
        elif self.precision is not None:
            queries = LEAST_QUERIES
        else:
            # Virtual time costs nothing, so a simulated window may be long.
            queries = 1000 if virtual else 100
        if self.seconds is not None:
            duration_s = self.seconds
        elif virtual and self.precision is not None:
            duration_s = 0.0
        else:
            duration_s = 2.0
        patience_s = max(3600.0 if virtual else 60.0, 2 * duration_s)
        around: dict[str, Any] = {"precision": self.precision, "settle_s": self.settle_s, "cool_c": self.cool_c}
        return Window(queries, duration_s, max(most_queries(served), queries), timeout_s=patience_s, **around)

    def content(self, device: Device, served: Workload | None = None) -> dict[str, str]:
        """Return digests of the files that device and workload are made of, and the input shapes, by name.

        Where a GPU is tuned it is also said what the workload runs on, if that is known.

        Raises:
            BadFile: If one of the files cannot be read any more.
        """
        traffic = self.traffic
        if isinstance(traffic, Trace):
            recorded = {"arrivals": Path(traffic.file)}
        else:
            recorded = {}
        inner = unmetered(device)
        digests = {name: content_digest(path) for name, path in {**self._files(inner), **recorded}.items()}
        digests |= self.objects.content()
        if served is not None:
            digests |= runs_on(inner, served) | _far_digest(served)
        if self.inputs:
            return {**digests, "inputs": " ".join(self.inputs)}
        return digests

    def _files(self, device: Device) -> dict[str, Path]:
        from polythrottle.backends.replay import ReplayDevice
        from polythrottle.backends.simulated import SimulatedDevice

        if isinstance(device, ReplayDevice):
            return {"table": device.table.path}
        if isinstance(device, SimulatedDevice):
            if self.objects.device is None:
                places = {"board": ("devices", "device", device.board.name)}
            else:
                places = {}
            if self.objects.workload is None:
                places["model"] = ("profiles/workloads", "workload", str(self.workload))
            return {name: locate(*place) for name, place in places.items()}
        if self.model_file is None:
            return {}
        return {"model": self.model_file}

    @property
    def model_file(self) -> Path | None:
        """The file of the model that is served; None where it is on a board, or a name, a service or code."""
        from polythrottle.backends.ssh import is_ssh

        if self.objects.workload is not None or self.workload is None or is_ssh(self.device):
            return None
        return _file_of(self.workload)

    def check_placed(self, device: Device, served: Workload) -> None:
        """Check that what is tuned is what runs, unless somebody chose otherwise.

        Raises:
            InvalidInput: If the knobs searched are a GPU's, and the work runs on the processor or on another GPU.
        """
        inner = unmetered(device)
        check_placed(inner, served, reopens=self.objects.workload is None)

    def open(self, accept: Callable[[Device], object] = lambda device: None) -> tuple[Device, Workload]:
        """Return device and workload; nothing on the device is touched until it is entered.

        Args:
            accept: Is called with the device before its meter and the workload are opened, each of which may be a
                program; raises if it will not do.

        Raises:
            PolythrottleError: If either cannot be opened; says why and what would do.
        """
        if not 0 < self.timeout_s <= LONGEST_S:
            raise InvalidInput(
                f"a query is given up after a time above zero and of a day at most, not {self.timeout_s:g} s"
            )
        self.traffic.times(0)  # says at once if they are no arrivals, or a table of them that cannot be read
        device = self._device(accept)
        served = self._serve(unmetered(device))
        if self.objects.meter is not None:
            return metered(device, self.objects.meter), served
        return self._seeing(device, served) if self.objects.device is None else device, served

    def _device(self, accept: Callable[[Device], object]) -> Device:
        if self.objects.device is None:
            return open_device(self._device_uri, self.knobs, accept)
        if self.knobs is not None:
            raise InvalidInput("a device given as an object has the knobs of its space; leave knobs out")
        accept(self.objects.device)
        return self.objects.device

    @property
    def _device_uri(self) -> str:
        """The URI to open the device by; of a processor over SSH, one whose estimate holds the time of a service."""
        beside = self.workload is not None and "://" in self.workload and not self.workload.startswith("cmd:")
        processor = re.fullmatch(r"ssh://[^/?]*/cpu\?.*", self.device)
        if beside and processor is not None and "busy=" not in self.device:
            return f"{self.device}&busy=everyone"
        return self.device

    def closing(self, served: Workload) -> AbstractContextManager[object]:
        """Return a context that closes what was opened here, and leaves a workload given as an object to its owner."""
        if served is self.objects.workload:
            return contextlib.nullcontext()
        return contextlib.closing(served)

    def _seeing(self, device: Device, served: Workload) -> Device:
        """Return the device, or one that sees what is served: a service is a program beside this one."""
        from polythrottle.backends.cpu import CpuDevice

        blind = (
            isinstance(device, CpuDevice) and device.energy_kind is EnergyKind.ESTIMATED and "busy=" not in device.uri
        )
        if not (blind and isinstance(served, Concurrent)):
            return device
        return open_device(f"{device.uri}{'&' if '?' in device.uri else '?'}busy=everyone", self.knobs)

    def _serve(self, device: Device) -> Workload:
        from polythrottle.backends.replay import RecordedWorkload, ReplayDevice
        from polythrottle.backends.simulated import SimulatedDevice

        if isinstance(device, ReplayDevice):
            if self.workload is not None or self.objects.workload is not None:
                raise InvalidInput("a replay table brings its own workload; leave --workload out")
            if not self.traffic.closed:
                raise InvalidInput("a replay table was recorded under the load it had then; leave --arrivals out")
            if self.batch_sizes or self.threads or self.inputs:
                raise InvalidInput("a replay table is searched as recorded; leave --batch, --threads and --input out")
            return RecordedWorkload(device.table.remarks)
        own = self.objects.workload
        if isinstance(own, Workload):
            if self.batch_sizes or self.threads or self.inputs:
                raise InvalidInput("a workload given as an object has the knobs of its space; leave the options out")
            return own
        if isinstance(device, SimulatedDevice):
            if own is not None:
                raise InvalidInput(f"{device.title} exists in virtual time and cannot run {self.workload}; cpu does")
            return self._serve_simulated(device, self.workload)
        if own is None:
            return self._serve_real(device, self.workload)
        return self._serve_object(device, own)

    def _serve_object(self, device: Device, own: Served) -> Workload:
        from polythrottle.workloads.python_callable import workload_of

        return workload_of(
            str(self.workload),
            own,
            inputs=self.inputs,
            batch_sizes=self.batch_sizes,
            threads=self.threads,
            target=target_of(device),
        )

    def _serve_simulated(self, device: "SimulatedDevice", name: str | None) -> Workload:
        from polythrottle.catalog import is_language_model, load_language_model, load_model

        if name is None:
            raise InvalidInput(f"say what {device.title} serves: --workload {', '.join(names('profiles/workloads'))}")
        if re.search(r"\.(onnx|pt2?|engine|plan)(\?.*)?$|:", name):
            raise InvalidInput(
                f"a simulated board serves descriptions of models, not {name}; polythrottle devices lists them, "
                f"profile-model makes one, and --device cpu runs real models"
            )
        if self.inputs or self.threads:
            raise InvalidInput("a simulated board has no --input and no --threads; they belong to real models")
        if is_language_model(name):
            if self.batch_sizes:
                raise InvalidInput(f"{name} batches as its engine does; leave --batch out (concurrency is searched)")
            return device.serve_language(load_language_model(name))
        model = load_model(name)
        sizes = device.parts(self.batch_sizes or ()) or model.batch_sizes
        if model.batch_default in sizes:
            default = model.batch_default
        else:
            default = min(sizes)
        return device.serve(replace(model, batch_sizes=sizes, batch_default=default))

    def _serve_real(self, device: Device, name: str | None) -> Workload:
        from polythrottle.backends.ssh import SshDevice
        from polythrottle.board.remote_workload import BoardWorkload
        from polythrottle.workloads import open_workload

        if name is None:
            raise InvalidInput(
                f"say what to serve on {device.title}: --workload model.onnx, package.module:callable, …"
            )
        if name in names("profiles/workloads"):
            raise InvalidInput(f"{name} describes a model for simulated boards; a real device needs the model itself")
        if isinstance(device, SshDevice):
            return BoardWorkload(
                name,
                device.board,
                {
                    "inputs": list(self.inputs),
                    "batch_sizes": self.batch_sizes and list(self.batch_sizes),
                    "threads": self.threads and list(self.threads),
                    "timeout_s": self.timeout_s,
                },
                target_of(device),
            )
        return open_workload(
            name,
            inputs=self.inputs,
            batch_sizes=self.batch_sizes,
            threads=self.threads,
            timeout_s=self.timeout_s,
            target=target_of(device),
        )

    @classmethod
    def planned(cls, plan: Mapping[str, Any]) -> "Setup":
        """Return the setup that a journal's plan holds.

        Raises:
            BadFile: If the plan holds something else.
        """
        try:
            words: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value for name, value in plan["setup"].items()
            }
            setup = cls(**{**words, "device": words["device"]})  # a journal names its device, whatever the default
            _check_words(setup)
            return setup
        except (*MALFORMED, InvalidInput) as error:
            raise BadFile(f"the journal's plan cannot be read: {said(error)}") from error


def _check_words(setup: Setup) -> None:
    """Raise ValueError if a field that came out of a file is not of the type it should be."""
    texts = [setup.device, setup.workload or "", *(setup.knobs or ()), *setup.inputs, setup.arrivals or ""]
    counts = [*(setup.batch_sizes or ()), *(setup.threads or ()), setup.queries or 1]
    given = (setup.seconds, setup.precision, setup.cool_c)
    times = [setup.timeout_s, setup.settle_s, *(1.0 if time is None else time for time in given)]
    if not all(isinstance(text, str) for text in texts) or not all(type(count) is int for count in counts):
        raise ValueError("a name is not text, or a count is not a whole number")
    if not all(type(time) in (int, float) for time in times):
        raise ValueError("a time is not a number")


def problem_of(board: Device, served: Workload, slo: Sequence[str], window: Window) -> Problem:
    """Return the problem of a device and a workload: both spaces, the limits, and what relative ones refer to.

    Args:
        board: Whose knobs are searched.
        served: What is served.
        slo: Constraints as text; one that is given twice counts once.
        window: How long each trial looks.

    Raises:
        InvalidInput: If a text is no constraint, or a recorded table or a simulation has no such metric.
    """
    from polythrottle.backends.replay import ReplayDevice

    constraints = tuple(dict.fromkeys(map(Constraint.parse, slo)))
    reference: dict[str, float] = {}
    if isinstance(board, ReplayDevice):
        reference.update(board.reference)
    for constraint in constraints:
        if reference and constraint.metric not in reference:
            known = ", ".join(reference)
            raise InvalidInput(f"{constraint}: {board.title} records no {constraint.metric}; it has {known}")
    _check_simulated(unmetered(board), served, constraints)
    # The rest would be part of the fingerprint without a say in the answer.
    used = {constraint.metric for constraint in constraints if constraint.relative}
    kept = {metric: value for metric, value in reference.items() if metric in used}
    return Problem(board.space * served.space, constraints, board.uri, served.uri, kept, window)


def _check_simulated(board: Device, served: Workload, constraints: Sequence[Constraint]) -> None:
    """Check, before any trial, that a simulation has what the limits are on."""
    from polythrottle.backends.simulated import SimulatedDevice

    if not isinstance(board, SimulatedDevice) or isinstance(served, SelfPaced):
        return
    for constraint in constraints:
        if constraint.metric in EXTRAS or constraint.prompts is not None:
            known = ", ".join(metric for metric in METRICS if metric not in EXTRAS)
            raise InvalidInput(
                f"{constraint}: {board.title} simulates whole answers and knows no {constraint.metric}; it has {known}"
            )


def device_name(problem: Problem) -> str:
    """Return a short file name for a problem's device: of a table or a board's file its stem, and a digest.

    Two files of one name in two folders, or one that was recorded again, are two devices.
    """
    scheme, _, place = without_options(problem.device).partition(":")
    digest = problem.content.get("table", "")
    for tree in roots_of(problem.device.partition("?")[2]):
        # `root=/` is the machine itself, as if nothing was said.
        if os.path.abspath(tree) != "/":
            # Its bytes: not every path is text in UTF-8.
            digest = sha256(os.fsencode(os.path.abspath(tree))).hexdigest()
    if scheme == "sim" and place.endswith((".toml", ".tar.gz")):
        digest = problem.content.get("board", "")
    return "-".join(filter(None, (slug(problem.device), digest[:_SHORT])))


def workload_name(problem: Problem) -> str:
    """Return a short file name for what a problem serves: of a file its stem, and a digest that tells it from others.

    Two files of one name in two folders, or one that was trained again, are two models.
    """
    name = slug(problem.workload)
    digest = problem.content.get("model", "")
    if digest and _file_of(problem.workload) is not None:
        return f"{name}-{digest[:_SHORT]}"
    return name


def _file_of(workload: str) -> Path | None:
    """Return the file of the model that a URI names, its options left out; None if it names no file."""
    from polythrottle.workloads.uris import ModelUri

    if workload.startswith("cmd:") or "://" in workload:
        return None
    name = ModelUri.parse(workload).name
    if name.lower().endswith(_MODEL_FILES):
        return Path(name)
    return None


def slug(uri: str) -> str:
    """Return a short file name for a URI: ``sim:jetson-nano?seed=7`` gives ``sim-jetson-nano``."""
    if not uri.startswith("cmd:"):
        body = uri.partition("?")[0]
    else:
        body = uri
    if body.startswith(("replay:", "cmd:")):
        scheme, _, rest = body.partition(":")
        if scheme == "replay":
            short = Path(rest).name.removesuffix(".gz").removesuffix(".csv")
        else:
            short = rest.split()[0]
        body = f"{scheme}-{Path(short).name}" + (f"-{zlib.crc32(rest.encode()):08x}" if scheme == "cmd" else "")
    elif body.startswith("nvml:") and (more := body.count(",")):  # a name of eight UUIDs is longer than a file's may be
        body = f"nvml-{more + 1}-gpus-{zlib.crc32(body.encode()):08x}"
    elif body.endswith((*_MODEL_FILES, ".tar.gz")):
        body = Path(body).stem.removesuffix(".tar")
    return re.sub(r"[^A-Za-z0-9._]+", "-", body).strip("-.") or "unnamed"
