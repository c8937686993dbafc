"""``polythrottle cluster train``: training that survives the loss of nodes, checked before it starts."""

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polythrottle.cli.cluster.rented_nodes import (
    LATE,
    PLACE,
    SLURM,
    NodeSource,
    TaskFile,
    check_sources,
    gpus_of,
    run_on,
    workers_on,
)
from polythrottle.cli.cluster.status import FINISHED, SteerOptions, WatchOptions, print_event, print_status
from polythrottle.cli.options import JsonOption, OptionGroup, spread
from polythrottle.cli.output import answer, complain, optional, suffix
from polythrottle.domain.errors import BadFile, ClaimFailed, InvalidInput, PolythrottleError
from polythrottle.storage.untrusted import check_plain

if TYPE_CHECKING:
    from polythrottle.training.elastic.controller import Job

# What ``cluster train`` can tell before anything starts: whether the script compiles, and whether its nodes fit.

NODE_BYTES = 450 * 10**6
WORKER_BYTES = 100 * 10**6
"""Of an agent and its fork server, both of which have imported torch, and of a worker that does nothing yet (measured
with torch 2.13.0 on x86-64, rounded down)."""


def check_script(script: Path | None, elsewhere: bool = False) -> Path:
    """Return the script if there is one that Python can compile; it is not executed.

    Args:
        script: As on the command line.
        elsewhere: Whether another Python executes it, so that what this one says of it is a warning.

    Raises:
        InvalidInput: If there is none.
        BadFile: If it cannot be read or compiled.
    """
    if script is None:
        raise InvalidInput("give a training script, such as examples/elastic_training.py")
    if not script.is_file():
        raise InvalidInput(f"there is no script {script}{': it is a folder' * script.is_dir()}")
    mistake = _mistake(script)  # found here in a second, instead of on each node after minutes of renting
    if mistake and not elsewhere:
        raise BadFile(mistake)
    if mistake:
        complain(f"{mistake} by this Python; where it is to run there may be another")
    return script


def _mistake(script: Path) -> str:
    """Return why a script cannot be compiled, empty if it can."""
    check_plain(script)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they come when it runs
            # From bytes: the script says in which encoding it is written (PEP 263).
            compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    except OSError as err:
        return f"the script {script} cannot be read: {err.strerror or err}"
    except SyntaxError as err:
        where = f"{script}{suffix(err.lineno, ', line {}')}"
        return f"the script cannot be compiled: {where}: {err.msg}"
    except (ValueError, RecursionError, MemoryError) as err:
        return f"the script {script} cannot be compiled: {err or type(err).__name__}"
    return ""


def check_room(nodes: int, workers: int) -> None:
    """Refuse more nodes than this machine's memory can hold.

    Args:
        nodes: On this machine.
        workers: Of each.

    Raises:
        InvalidInput: If they cannot fit.
    """
    import psutil

    # All memory, not what is free now: caches give way, and a fit that depends on the moment would confuse.
    total = psutil.virtual_memory().total
    each = NODE_BYTES + workers * WORKER_BYTES
    if nodes * each > total:
        raise InvalidInput(
            f"{nodes} nodes on this machine need {nodes * each / 1e9:,.1f} GB before they train, and it has "
            f"{total / 1e9:,.1f} GB: at most {total // each} fit; use other machines with --serve and --join"
        )


# ``polythrottle cluster train``: on this machine, on rented nodes, or as the controller or one node of a job.

MOST_WORKERS = 1024


@dataclass(frozen=True)
class TrainJobOptions(WatchOptions):
    """What the controller is asked to do."""

    nodes: Annotated[
        str, typer.Option("--nodes", "-n", metavar="N", help="Nodes of a generation: 2, or least:most such as 2:4.")
    ] = "1"
    job: Annotated[str | None, typer.Option("--job", metavar="NAME", help="Its name; goes on where it stood.")] = None
    store: Annotated[
        str | None, typer.Option("--store", metavar="URL", help="Where checkpoints live: a path, s3://…, gs://…")
    ] = None
    rate: Annotated[
        float | None, typer.Option("--losses", metavar="PER_H", help="Losses of one node per hour; else estimated.")
    ] = None
    rule: Annotated[
        str | None, typer.Option("--rule", metavar="NAME", help="fixed (global batch) or icac (√n learning rate).")
    ] = None
    overhead: Annotated[
        str | None, typer.Option("--overhead", metavar="3.5%", help="Largest share of time checkpoints may take.")
    ] = None
    every: Annotated[
        float | None, typer.Option("--every", metavar="S", help="Checkpoint each S seconds instead of profiling.")
    ] = None
    beat: Annotated[float, typer.Option("--beat", metavar="S", help="A node is lost after three missed.")] = 1.0
    folder: Annotated[Path | None, typer.Option("--job-folder", metavar="DIR", hidden=True)] = None


@dataclass(frozen=True)
class NodeOptions(SteerOptions):
    """What a node is started with."""

    node: Annotated[
        str | None, typer.Option("--node", metavar="NAME", help="This node's name; Slurm's for it, or the host's.")
    ] = None
    workers: Annotated[
        int | None, typer.Option("--workers", metavar="N", help="Workers on each node; one per GPU asked for, else 1.")
    ] = None
    host: Annotated[str | None, typer.Option("--host", metavar="ADDRESS", help="Where other nodes reach this one.")] = (
        None
    )
    notices: Annotated[
        list[str] | None,
        typer.Option("--notice", metavar="SOURCE", help="file:PATH, signal:USR1, slurm, ray, aws, google, azure."),
    ] = None

    def check_workers(self) -> None:
        """Refuse a number of workers that no node has.

        Raises:
            InvalidInput: If it does.
        """
        if self.workers is not None and not 1 <= self.workers <= MOST_WORKERS:
            raise InvalidInput(f"--workers takes 1 to {MOST_WORKERS} on each node, not {self.workers}")


@dataclass(frozen=True)
class AddressOptions(OptionGroup):
    """Which part of a job this process is, where the others are, and how they know each other."""

    serve: Annotated[
        str | None, typer.Option("--serve", metavar="HOST:PORT", help="Be the controller alone; port 0: a free one.")
    ] = None
    join: Annotated[
        str | None,
        typer.Option("--join", metavar="HOST:PORT", help="Be one node of the job whose controller is there."),
    ] = None
    token_file: Annotated[
        Path | None, typer.Option("--token-file", metavar="FILE", help="The job's token; else the controller's own.")
    ] = None


@dataclass(frozen=True)
class RentOptions(OptionGroup):
    """Who rents out the nodes of a job; without a place they are this machine's."""

    on: Annotated[
        str | None, typer.Option("--on", metavar="PLACE", help="Rent nodes: slurm[:PARTITION], skypilot[:V100:1].")
    ] = None
    write: Annotated[
        Path | None, typer.Option("--write", metavar="FILE", help="With --on skypilot: the task file (.yaml).")
    ] = None
    sbatch: Annotated[
        list[str] | None, typer.Option("--sbatch", metavar="OPTION", help="For each Slurm job: --gres=gpu:1; repeats.")
    ] = None
    successors: Annotated[
        str | None,
        typer.Option("--successors", metavar="P", help="With --on slurm: ask at this chance to be late; 20%, or off."),
    ] = None

    @property
    def place(self) -> str:
        """The kind of place: ``slurm``, ``skypilot``, another word; empty for this machine."""
        return (self.on or "").partition(":")[0]

    def check(self) -> None:
        """Refuse words that belong to another place.

        Raises:
            InvalidInput: If there are any.
        """
        if self.write is not None and self.place != PLACE:
            raise InvalidInput("--write is for --on skypilot, whose task it writes")
        if self.place == SLURM:
            return
        for option, words in (("--sbatch", self.sbatch or None), ("--successors", self.successors)):
            if words is not None:
                raise InvalidInput(f"{option} is for --on slurm, whose jobs it is about")

    def source(self, address: AddressOptions) -> NodeSource:
        """Return where the nodes come from."""
        listen = address.serve or "127.0.0.1:0"
        return NodeSource(self.on or "", listen, address.token_file, self.sbatch or [], self.successors or LATE)


@dataclass(frozen=True)
class EngineOptions(OptionGroup):
    """Who starts the workers, and what is done about nodes of this machine that are lost."""

    engine: Annotated[str, typer.Option("--engine", metavar="NAME", help="torchrun or ray.")] = "torchrun"
    replace: Annotated[
        float, typer.Option("--replace", metavar="S", help="Start a lost node again after S seconds; below 0 never.")
    ] = 5.0

    def check(self) -> None:
        """Refuse an engine that is not known, and a time that never comes.

        Raises:
            UnknownName: If there is no such engine.
            InvalidInput: If the time is not valid.
        """
        from polythrottle.training.elastic.engines import known_engine

        known_engine(self.engine)
        if not self.replace < math.inf:
            raise InvalidInput(f"--replace takes seconds, or below 0 for never, not {self.replace}")

    @property
    def replace_s(self) -> float | None:
        """After how long a lost node is started again; None for never."""
        if self.replace < 0:
            return None
        return self.replace


@dataclass(frozen=True)
class TrainingScript:
    """What every worker runs.

    Attributes:
        path: The script.
        words: Its arguments.
    """

    path: Path
    words: list[str]


@spread
def train(
    job: TrainJobOptions,
    node: NodeOptions,
    script: Annotated[
        Path | None, typer.Argument(metavar="SCRIPT", help="The training script; its words follow --.")
    ] = None,
    words: Annotated[list[str] | None, typer.Argument(metavar="-- WORDS", help="What the script is given.")] = None,
    *,
    address: AddressOptions,
    rent: RentOptions,
    engine: EngineOptions,
    as_json: JsonOption = False,
) -> None:
    """Train a script elastically: on this machine, or with --serve and --join on many."""
    # Every word is judged before a process starts or a machine is rented.
    engine.check()
    node.check_workers()
    node.check_steering(engine.engine)
    check_sources(node.notices or [])
    rent.check()
    _check_one_role(address, rent)
    _check_token(address, rent)
    for option, text in (("--job", job.job), ("--store", job.store), ("--node", node.node), ("--host", node.host)):
        if text is not None and not text.strip():
            raise InvalidInput(f"{option} is empty; give it a word, or leave it out")
    # With a place, --serve says where its controller listens; alone it is the controller.
    if address.serve is not None and rent.on is None:
        answer(_serve(job, address.serve, address.token_file), as_json, print_status)
        return
    # What SkyPilot launches runs under the Python of another machine, which may know more or less than this one.
    training = TrainingScript(check_script(script, elsewhere=rent.place == PLACE), words or [])
    if address.join is not None:
        _join(address.join, address.token_file, node, training)
    elif rent.place == PLACE:
        _write_task(job, node, training, TaskFile(rent.on or "", rent.write, job.store))
    elif rent.on is not None:
        answer(_rent(job, node, training, rent.source(address)), as_json, print_status)
    else:
        answer(_run(job, node, training, engine), as_json, print_status)


def _check_one_role(address: AddressOptions, rent: RentOptions) -> None:
    for option, other in (("--serve", address.serve), ("--on", rent.on)):
        if address.join is not None and other is not None:
            raise InvalidInput(f"--join and {option} exclude each other: be one of them")


def _check_token(address: AddressOptions, rent: RentOptions) -> None:
    """Refuse a token where nobody asks for one, and one that cannot be read before anything starts."""
    if address.token_file is None:
        return
    if address.serve is None and address.join is None and rent.place != SLURM:
        raise InvalidInput("--token-file is for --serve, --join and --on slurm; nodes of this machine need none")
    from polythrottle.training.elastic.channel import read_token

    read_token(address.token_file)


def _check_store(url: str) -> None:
    """Refuse a store that can be none, before the controller starts, which is another process."""
    from polythrottle.storage.object_store import Store, read_claim

    store = Store(url)
    if store.is_local:
        read_claim(store)


def _asked(options: TrainJobOptions, script: Path | None) -> Any:
    from polythrottle.cli.options import share
    from polythrottle.training.elastic.job_control import ControllerOptions, fresh_name
    from polythrottle.training.sampler import BatchRule

    # Judged here, since the controller is another process, whose refusal would come as its exit code.
    if options.rule is not None and options.rule not in {str(rule) for rule in BatchRule}:
        raise InvalidInput(f"--rule is fixed or icac, not {options.rule[:40]!r}")
    # A folder names its job; without either, the name is made of script and time.
    name = options.job or ""
    if not name and options.folder is None:
        name = fresh_name(script or Path("job"))
    return ControllerOptions(
        name,
        options.nodes,
        options.store or "",
        options.rate,
        options.rule or "",
        share("--overhead", options.overhead),
        options.every,
        options.beat,
        options.folder,
        options.watched(),
    )


def _serve(options: TrainJobOptions, address: str, token_file: Path | None) -> dict[str, Any]:
    from polythrottle.training.elastic.job_control import how_to_continue, serve

    asked = _asked(options, None)
    if options.folder is not None:  # who launched this one follows the job's events, and says what became of it
        try:
            return serve(asked, address, token_file, complain)
        except ClaimFailed as err:
            raise ClaimFailed("the job has failed; its controller ends") from err
    status = serve(asked, address, token_file, complain, print_event)
    if status["phase"] != FINISHED:
        # Ended as by the keyboard, so that a supervisor does not take it for a job that is done.
        complain(f"stopped before the job was over, its nodes train on; {how_to_continue(asked.as_job().folder)}")
        raise KeyboardInterrupt
    return status


def _join(address: str, token_file: Path | None, options: NodeOptions, training: TrainingScript) -> None:
    from polythrottle.cluster.rented_machines import watch_from
    from polythrottle.training.elastic.job_control import way_to
    from polythrottle.training.elastic.worker.process import LastWords, warm_up

    line = way_to(address, token_file)
    # Before torch is imported, which takes seconds: a source that does not work is refused at once.
    watch = watch_from(options.notices or [], complain)
    start_watch = optional(attrgetter("start"), watch)
    with LastWords() as last:
        warm_up()  # imports torch beside this process, which needs it as well
        from polythrottle.training.elastic.agent import AgentOptions, take_part

        # A name is one machine, so that a node which begins again is known by it.
        name = options.node or _slurms_name(os.environ) or os.uname().nodename
        workers = options.workers or 1
        script = training.path.absolute()
        node = AgentOptions(name, script, training.words, workers, options.host or "", options.steer, options.look)
        take_part(line, node, complain, last, start_watch)


def _slurms_name(environment: Mapping[str, str]) -> str:
    """Return the name of a node that Slurm started: two jobs may stand on one machine, a successor beside its elder."""
    machine = environment.get("SLURMD_NODENAME", "")
    order = environment.get("SLURM_JOB_ID", "")
    if machine and order:
        return f"{machine}-{order}"
    return machine


def _run(
    options: TrainJobOptions, node: NodeOptions, training: TrainingScript, engine: EngineOptions
) -> dict[str, Any]:
    from polythrottle.training.elastic.engines import LaunchPlan, Torchrun
    from polythrottle.training.elastic.events import read_events
    from polythrottle.training.elastic.job_control import LocalJob, node_counts, refuse_taken
    from polythrottle.training.elastic.job_control import how_to_continue as kept
    from polythrottle.training.elastic.ray_engine import RayEngine

    job = _asked(options, training.path).as_job()
    count = node_counts(options.nodes)[1]
    check_room(count, node.workers or 1)
    # Before anything starts: two controllers of one job would both write its generations.
    refuse_taken(job)
    _check_store(job.store)
    serving = ["--serve", "127.0.0.1:0", *_words(options, job.name)]
    plan = LaunchPlan(job.folder, training.path.absolute(), training.words, serving, _joining(node, count))
    gone: Callable[[], Mapping[str, int]] = dict
    workers: RayEngine | Torchrun
    if engine.engine == "ray":
        workers = RayEngine(plan)  # Ray itself tells which of its nodes are gone
    else:
        workers = Torchrun(plan)
        gone = workers.gone
    names = [f"node{number}" for number in range(1, count + 1)]
    complain(f"job {job.name}: {count} nodes on this machine, checkpoints in {job.store}")
    local = LocalJob(workers, names, engine.replace_s, say=complain, seen=len(read_events(job.folder)))
    try:
        code = local.run(print_event, lambda: workers.exit_code, gone)
    except KeyboardInterrupt:
        complain(f"stopped; {kept(job.folder)} and the same words")
        raise
    return _outcome(code, job)


def _rent(options: TrainJobOptions, node: NodeOptions, training: TrainingScript, where: NodeSource) -> dict[str, Any]:
    from polythrottle.training.elastic.engines import LaunchPlan
    from polythrottle.training.elastic.job_control import how_to_continue as kept
    from polythrottle.training.elastic.job_control import node_counts, refuse_taken

    job = _asked(options, training.path).as_job()
    where.check()
    # As on one machine: a second controller would write generations of its own.
    refuse_taken(job)
    _check_store(job.store)
    count = node_counts(options.nodes)[1]
    complain(f"job {job.name}: {count} nodes on {where.on}, checkpoints in {job.store}")
    serving = [*where.serving, *_words(options, job.name)]
    joining = _joining(node, gpus=gpus_of(where.on, where.sbatch))
    plan = LaunchPlan(job.folder, training.path.absolute(), training.words, serving, joining)
    try:
        code = run_on(where, plan, count, print_event)
    except KeyboardInterrupt:
        complain(f"stopped, and its nodes are given back; {kept(job.folder)} and the same words")
        raise
    return _outcome(code, job)


def _write_task(options: TrainJobOptions, node: NodeOptions, training: TrainingScript, task: TaskFile) -> None:
    from polythrottle.training.elastic.job_control import node_counts

    job = _asked(options, training.path).as_job()
    # The task names the store itself, for its nodes need it as well.
    serving = _words(replace(options, store=None), job.name)
    joining = _joining(node, gpus=gpus_of(task.on))
    task.write(node_counts(options.nodes)[1], serving, joining, training.path, training.words)


def _joining(node: NodeOptions, here: int = 1, gpus: int | None = None) -> list[str]:
    """Return the options of a node as words for its own process, one of so many on a machine, with so many GPUs."""
    notices = [word for source in node.notices or [] for word in ("--notice", source)]
    return ["--workers", str(workers_on(node.workers, gpus)), *notices, *node.steering_words(here)]


def _outcome(code: int, job: "Job") -> dict[str, Any]:
    """Return where a job stands that has come to its end; a controller that was told to stop ends well, but not it.

    Raises:
        ClaimFailed: If the job has failed or was stopped.
    """
    from polythrottle.training.elastic.job_control import status_of

    status = status_of(job.folder)
    if code or status["phase"] != FINISHED:
        raise _failure(code, job)
    return status


def _failure(code: int, job: "Job") -> PolythrottleError:
    """Return what a job ended with, with the reason if its events hold one."""
    from polythrottle.training.elastic.job_control import how_to_continue as kept
    from polythrottle.training.elastic.job_control import status_of

    # The exit code alone says little; the job's own events say more where they can be read.
    why = "did not end well"
    if code <= 0:
        why = "was stopped: its controller has ended"
    advice = kept(job.folder)
    with contextlib.suppress(PolythrottleError):
        status = status_of(job.folder)
        if status["phase"] == "failed" and status["reason"]:
            why = f"has failed: {status['reason']}"
            advice = f"see polythrottle cluster status {job.name}, or go on with --job {job.name}"
    error = ClaimFailed(f"job {job.name} {why}; {advice}")
    if code > 0:  # below 0 it is the signal that ended the controller, which is no exit code of ours
        error.exit_code = code
    return error


def _words(options: TrainJobOptions, job: str) -> list[str]:
    """Return the options of a job as words for its controller's own process."""
    given = {
        "--nodes": options.nodes,
        "--job": job,
        "--store": options.store,
        "--losses": options.rate,
        "--rule": options.rule,
        "--overhead": options.overhead,
        "--every": options.every,
        "--beat": options.beat,
    }
    plain = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    return [*plain, *options.watching_words()]
