"""``polythrottle cluster train`` and ``status``: training that survives the loss of nodes."""

import contextlib
import math
import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polythrottle.cli.answers import answer, complain
from polythrottle.cli.cluster_rented import LATE, SLURM, Where, check_sources, run_on
from polythrottle.cli.cluster_script import check_room, check_script
from polythrottle.cli.cluster_sky import PLACE, Written
from polythrottle.cli.cluster_steering import EVENTS, SteerOptions, WatchOptions, event_words, node_rows
from polythrottle.cli.cluster_workers import gpus_of, workers_on
from polythrottle.cli.options import JsonOption, spread
from polythrottle.errors import ClaimFailed, InvalidInput, PolythrottleError

if TYPE_CHECKING:
    from polythrottle.cluster.train.controller import Job

MOST_WORKERS = 1024
UNKNOWN, FINISHED = "unknown", "finished"


@dataclass(frozen=True)
class JobOptions(WatchOptions):
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


@spread
def train(
    job: JobOptions,
    node: NodeOptions,
    script: Annotated[
        Path | None, typer.Argument(metavar="[SCRIPT]", help="The training script; its words follow --.")
    ] = None,
    words: Annotated[list[str] | None, typer.Argument(metavar="[-- WORDS]")] = None,
    serve: Annotated[
        str | None, typer.Option("--serve", metavar="HOST:PORT", help="Be the controller alone; port 0: a free one.")
    ] = None,
    join: Annotated[
        str | None,
        typer.Option("--join", metavar="HOST:PORT", help="Be one node of the job whose controller is there."),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", metavar="FILE", help="The job's token; else the controller's own.")
    ] = None,
    on: Annotated[
        str | None, typer.Option("--on", metavar="PLACE", help="Rent nodes: slurm[:PARTITION], skypilot[:V100:1].")
    ] = None,
    write: Annotated[
        Path | None, typer.Option("--write", metavar="FILE", help="With --on skypilot: the task file (.yaml).")
    ] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option("--sbatch", metavar="OPTION", help="For each Slurm job: --gres=gpu:1; repeats.")
    ] = None,
    successors: Annotated[
        str | None,
        typer.Option("--successors", metavar="P", help="With --on slurm: ask at this chance to be late; 20%, or off."),
    ] = None,
    engine: Annotated[str, typer.Option("--engine", metavar="NAME", help="torchrun or ray.")] = "torchrun",
    replace: Annotated[
        float, typer.Option("--replace", metavar="S", help="Start a lost node again after S seconds; below 0 never.")
    ] = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Train a script elastically: on this machine, or with --serve and --join on many."""
    from polythrottle.cluster.train.engine import known_engine

    known_engine(engine)
    if node.workers is not None and not 1 <= node.workers <= MOST_WORKERS:
        raise InvalidInput(f"--workers takes 1 to {MOST_WORKERS} on each node, not {node.workers}")
    if not replace < math.inf:
        raise InvalidInput(f"--replace takes seconds, or below 0 for never, not {replace}")
    node.check_steering(engine)
    if write is not None and (on is None or on.partition(":")[0] != PLACE):
        raise InvalidInput("--write is for --on skypilot, whose task it writes")
    check_sources(node.notices or [])
    if (sbatch or successors is not None) and (on is None or on.partition(":")[0] != SLURM):
        raise InvalidInput(f"{'--sbatch' if sbatch else '--successors'} is for --on slurm, whose jobs it is about")
    if join is not None and (serve is not None or on is not None):
        raise InvalidInput(f"--join and {'--on' if serve is None else '--serve'} exclude each other: be one of them")
    if serve is not None and on is None:
        answer(_served(job, serve, token_file), as_json, print_status)
        return
    script = check_script(script, on is not None and on.partition(":")[0] == PLACE)
    if join is not None:
        _joined(join, token_file, node, script, words or [])
    elif on is not None and on.partition(":")[0] == PLACE:
        _sky(job, node, script, words or [], Written(on, write, job.store))
    elif on is not None:
        where = Where(on, serve or "127.0.0.1:0", token_file, sbatch or [], LATE if successors is None else successors)
        answer(_rented(job, node, script, words or [], where), as_json, print_status)
    else:
        answer(_local(job, node, script, words or [], engine, replace), as_json, print_status)


def status(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Its name or folder; the newest.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show a job's generation, members, step, checkpoints and losses."""
    from polythrottle.cluster.train.running import job_folder, newest_job, status_of

    folder = newest_job() if job is None else Path(job) if "/" in job else job_folder(job)
    answer(status_of(folder), as_json, print_status)


def print_status(found: Mapping[str, Any]) -> None:
    """Print where a job stands."""
    newest = found["newest_checkpoint"]
    rows: dict[str, object] = {
        "job": found["job"],
        "phase": found["phase"] + (f": {found['reason']}" if found.get("reason") else ""),
        "generation": "none yet" if found["generation"] == 0 else _known(found["generation"]),
        "members": _members(found),
        "chief": found["chief"] or "none",
        "step": "none yet" if found["step"] is None else found["step"],
        "checkpoints": _checkpoints(found),
        "newest": _newest(found),
        "losses": UNKNOWN
        if found["losses"] is None
        else f"{found['losses']}, {found['departures']} left, {found['notices']} notices",
    }
    if found["waits_for"]:
        rows["waits for"] = f"{found['waits_for']} node{'' if found['waits_for'] == 1 else 's'}"
    if found["taken_up"]:
        over = "; it was over, nothing was left to do" if found["nothing_left"] else ""
        rows["taken up"] = f"step {found['taken_up']['step']} of a training that was in the store before{over}"
    if newest and newest["stall_s"] is not None:
        rows["stall"] = f"{newest['stall_s']:.3g} s a checkpoint, {_share(newest['share'])}"
    if found["recoveries_s"]:
        rows["recovery"] = f"{', '.join(f'{each:.1f}' for each in found['recoveries_s'][-5:])} s, measured"
    rows |= _afflictions(found)
    for name, value in (*rows.items(), *node_rows(found)):
        typer.echo(textwrap.fill(f"{name:<12} {value}", 80, subsequent_indent=" " * 13, break_on_hyphens=False))


def _known(value: object) -> object:
    return UNKNOWN if value is None else value


def _share(share: float | None) -> str:
    return "measured; its share of the time is unknown" if share is None else f"{share:.2%} of the time, measured"


def _checkpoints(found: Mapping[str, Any]) -> str:
    """Return how many there were: unknown where some came into the store and no controller counted them."""
    return f"{_known(found['checkpoints'])}{' (the newest waits for the store)' if found['spooled'] else ''}"


def _newest(found: Mapping[str, Any]) -> str:
    newest, trouble = found["newest_checkpoint"], found.get("store_trouble")
    if newest is None:
        return f"{UNKNOWN}: {trouble}" if trouble else "none"
    return f"step {newest['step']}, {newest['bytes'] / 1e6:.3g} MB" + (f", as last told: {trouble}" if trouble else "")


def _members(found: Mapping[str, Any]) -> str:
    if found["last_members"]:
        return f"none any more; the last were {', '.join(found['last_members'])}"
    unheard = " when last heard of" if found["members"] and found["phase"] == "unknown" else ""
    gone = "".join(f"; {name} {'was lost' if how == 'lost' else how}" for name, how in found["gone"].items())
    return (", ".join(found["members"]) or "none") + unheard + gone


def _afflictions(found: Mapping[str, Any]) -> dict[str, object]:
    """Return the rows of what went wrong, and what was done ahead of time."""
    rows: dict[str, object] = {}
    fault, asked = found["newest_fault"], found["successors"]
    if found["restarts"]:
        rows["restarts"] = f"{found['restarts']} of the controller"
    if asked and asked["asked"]:
        times = f"overlap {asked['overlap_s']:.1f} s, interruption {asked['interruption_s']:.1f} s, measured"
        rows["successors"] = f"{asked['asked']} asked for, {asked['done']} took over; {times}"
    if fault:
        where = f"{fault['node']} at {fault['at_s']:.0f} s, generation {fault['generation']}"
        rows["fault"] = f"{where}: {fault['reason']}{_more(found['faults'])}"
        rows["its words"] = " | ".join(line.strip() for line in fault["said"][-4:]) or "none"
    return rows


def _more(faults: int) -> str:
    return f" (the newest of {faults})" if faults > 1 else ""


def _asked(options: JobOptions, script: Path | None) -> Any:
    from polythrottle.cli.options import share
    from polythrottle.cluster.train.running import Asked, fresh_name
    from polythrottle.cluster.train.sampler import BatchRule

    if options.rule is not None and options.rule not in {str(rule) for rule in BatchRule}:
        raise InvalidInput(f"--rule is fixed or icac, not {options.rule[:40]!r}")
    job = options.job or ("" if options.folder else fresh_name(script or Path("job")))
    return Asked(
        job,
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


def _served(options: JobOptions, address: str, token_file: Path | None) -> dict[str, Any]:
    from polythrottle.cluster.train.running import kept, serve

    asked = _asked(options, None)
    if options.folder is not None:  # who launched this one follows the job's events, and says what became of it
        try:
            return serve(asked, address, token_file, complain)
        except ClaimFailed as err:
            raise ClaimFailed("the job has failed; its controller ends") from err
    found = serve(asked, address, token_file, complain, _say_event)
    if found["phase"] != FINISHED:
        complain(f"stopped before the job was over, its nodes train on; {kept(asked.as_job().folder)}")
        raise KeyboardInterrupt
    return found


def _joined(address: str, token_file: Path | None, options: NodeOptions, script: Path, words: list[str]) -> None:
    from polythrottle.cluster.notices.watching import watch_from
    from polythrottle.cluster.train.fault import LastWords
    from polythrottle.cluster.train.running import way_to
    from polythrottle.cluster.train.warm import warm_up

    line = way_to(address, token_file)
    watch = watch_from(options.notices or [], complain)
    with LastWords() as last:
        warm_up()  # imports torch beside this process, which needs it as well
        from polythrottle.cluster.train.agent import Node, take_part

        name, workers = options.node or _slurms_name(os.environ) or os.uname().nodename, options.workers or 1
        node = Node(name, script.absolute(), words, workers, options.host or "", options.steer, options.look)
        take_part(line, node, complain, last, watch.start if watch else None)


def _slurms_name(environment: Mapping[str, str]) -> str:
    """Return the name of a node that Slurm started: two jobs may stand on one machine, a successor beside its elder."""
    machine, order = environment.get("SLURMD_NODENAME", ""), environment.get("SLURM_JOB_ID", "")
    return f"{machine}-{order}" if machine and order else machine


def _local(
    options: JobOptions, node: NodeOptions, script: Path, words: list[str], engine: str, replace_s: float
) -> dict[str, Any]:
    from polythrottle.cluster.train.account import read_events
    from polythrottle.cluster.train.rays import RayEngine
    from polythrottle.cluster.train.running import Local, kept, node_counts, refuse_taken
    from polythrottle.cluster.train.torchrun import Plan, Torchrun

    asked = _asked(options, script)
    job = asked.as_job()
    check_room(node_counts(options.nodes)[1], node.workers or 1)
    refuse_taken(job)
    serving = ["--serve", "127.0.0.1:0", *_words(options, job.name)]
    joining = _joining(node, node_counts(options.nodes)[1])
    plan = Plan(job.folder, script.absolute(), words, serving, joining)
    held = RayEngine(plan) if engine == "ray" else Torchrun(plan)
    names = [f"node{number}" for number in range(1, node_counts(options.nodes)[1] + 1)]
    complain(f"job {job.name}: {len(names)} nodes on this machine, checkpoints in {job.store}")
    local = Local(held, names, None if replace_s < 0 else replace_s, say=complain, seen=len(read_events(job.folder)))
    try:
        gone = held.gone if isinstance(held, Torchrun) else dict
        code = local.run(_say_event, lambda: held.exit_code, gone)
    except KeyboardInterrupt:
        complain(f"stopped; {kept(job.folder)} and the same words")
        raise
    return _outcome(code, job)


def _rented(options: JobOptions, node: NodeOptions, script: Path, words: list[str], where: Where) -> dict[str, Any]:
    from polythrottle.cluster.train.running import kept, node_counts, refuse_taken
    from polythrottle.cluster.train.torchrun import Plan

    job = _asked(options, script).as_job()
    refuse_taken(job)
    count = node_counts(options.nodes)[1]
    complain(f"job {job.name}: {count} nodes on {where.on}, checkpoints in {job.store}")
    serving = [*where.serving, *_words(options, job.name)]
    joining = _joining(node, gpus=gpus_of(where.on, where.sbatch))
    plan = Plan(job.folder, script.absolute(), words, serving, joining)
    try:
        code = run_on(where, plan, count, _say_event)
    except KeyboardInterrupt:
        complain(f"stopped, and its nodes are given back; {kept(job.folder)} and the same words")
        raise
    return _outcome(code, job)


def _sky(options: JobOptions, node: NodeOptions, script: Path, words: list[str], written: Written) -> None:
    from polythrottle.cluster.train.running import node_counts

    job = _asked(options, script).as_job()
    serving = _words(replace(options, store=None), job.name)
    joining = _joining(node, gpus=gpus_of(written.on))
    written.write(node_counts(options.nodes)[1], serving, joining, script, words)


def _joining(node: NodeOptions, here: int = 1, gpus: int | None = None) -> list[str]:
    """Return the options of a node as words for its own process, one of so many on a machine, with so many GPUs."""
    notices = [word for source in node.notices or [] for word in ("--notice", source)]
    return ["--workers", str(workers_on(node.workers, gpus)), *notices, *node.steering_words(here)]


def _outcome(code: int, job: "Job") -> dict[str, Any]:
    """Return where a job stands that has come to its end; a controller that was told to stop ends well, but not it.

    Raises:
        ClaimFailed: If the job has failed or was stopped.
    """
    from polythrottle.cluster.train.running import status_of

    found = status_of(job.folder)
    if code or found["phase"] != FINISHED:
        raise _failure(code, job)
    return found


def _failure(code: int, job: "Job") -> PolythrottleError:
    """Return what a job ended with, with the reason if its events hold one."""
    from polythrottle.cluster.train.running import kept, status_of

    why = "was stopped: its controller has ended" if code <= 0 else "did not end well"
    advice = kept(job.folder)
    with contextlib.suppress(PolythrottleError):
        found = status_of(job.folder)
        if found["phase"] == "failed" and found["reason"]:
            why = f"has failed: {found['reason']}"
            advice = f"see polythrottle cluster status {job.name}, or go on with --job {job.name}"
    error = ClaimFailed(f"job {job.name} {why}; {advice}")
    error.exit_code = code if code > 0 else ClaimFailed.exit_code
    return error


def _words(options: JobOptions, job: str) -> list[str]:
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


def _say_event(event: Mapping[str, Any]) -> None:
    """Print one line for what people want to know of."""
    where = f"generation {event['generation']}"
    texts = {
        "joined": "{node} joined",
        "lost": "{node} is lost: {reason}",
        "draining": "{node} is about to leave: {reason}",
        "left": "{node} left: {reason}",
        "formed": "begins on {nodes}",
        "first step": "step {step} is done, the first on {crew}",
        "resumed": "goes on from step {step}",
        "checkpoint": "checkpoint at step {step}, {stall_s} s of stall",
        "spooled": "checkpoint at step {step} waits for the store",
        "fault": "{node}: {reason}",
        "restarted": "another controller goes on",
        "successor": "order {successor} is to take over from {order}, which ends in {left_s:.0f} s",
        "succession": "order {successor} has taken over from {order}",
        "notice": "{node} will be taken away ({kind})",
        "finished": "the training is over",
        "failed": "the job has failed",
        **EVENTS,
    }
    text = texts.get(str(event["event"]))
    if text is not None:
        nodes, workers = ", ".join(event.get("members", ())), event.get("workers")
        more = {"nodes": nodes, "crew": f"{workers} worker{'' if workers == 1 else 's'}", **event_words(event)}
        with contextlib.suppress(OSError):  # a full disk, or nobody, behind standard error: the job goes on
            typer.echo(f"{event['at_s']:8.1f} s  {where}: {text.format_map({**more, **event})}", err=True)
