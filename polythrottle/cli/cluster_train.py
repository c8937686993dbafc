"""``polythrottle cluster train`` and ``status``: training that survives the loss of nodes."""

import os
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from polythrottle.cli.answers import answer, complain
from polythrottle.cli.cluster_rented import Where, run_on
from polythrottle.cli.options import JsonOption, OptionGroup, spread
from polythrottle.errors import ClaimFailed, InvalidInput, PolythrottleError


@dataclass(frozen=True)
class JobOptions(OptionGroup):
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
class NodeOptions(OptionGroup):
    """What a node is started with."""

    node: Annotated[
        str | None, typer.Option("--node", metavar="NAME", help="This node's name; Slurm's for it, or the host's.")
    ] = None
    workers: Annotated[int, typer.Option("--workers", metavar="N", help="Workers on each node: one per GPU.")] = 1
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
        Path | None, typer.Option("--token-file", metavar="FILE", help="The job's token; needed beyond loopback.")
    ] = None,
    on: Annotated[
        str | None, typer.Option("--on", metavar="PLACE", help="Rent the nodes: slurm, or slurm:PARTITION.")
    ] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option("--sbatch", metavar="OPTION", help="For each Slurm job: --gres=gpu:1; repeats.")
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
    if node.workers < 1:
        raise InvalidInput(f"--workers takes at least 1, not {node.workers}")
    if join is not None and (serve is not None or on is not None):
        raise InvalidInput(f"--join and {'--on' if serve is None else '--serve'} exclude each other: be one of them")
    if serve is not None and on is None:
        answer(_served(job, serve, token_file), as_json, print_status)
        return
    if script is None or not script.is_file():
        raise InvalidInput("give a training script" if script is None else f"there is no script {script}")
    if join is not None:
        _joined(join, token_file, node, script, words or [])
    elif on is not None:
        where = Where(on, serve or "127.0.0.1:0", token_file, sbatch or [])
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
    rows = {
        "job": found["job"],
        "phase": found["phase"] + (f": {found['reason']}" if found.get("reason") else ""),
        "generation": found["generation"],
        "members": ", ".join(found["members"]) or "none",
        "chief": found["chief"] or "none",
        "step": "none yet" if found["step"] is None else found["step"],
        "checkpoints": f"{found['checkpoints']}{' (the newest waits for the store)' if found['spooled'] else ''}",
        "newest": f"step {newest['step']}, {newest['bytes'] / 1e6:.3g} MB" if newest else "none",
        "losses": f"{found['losses']}, {found['departures']} left, {found['notices']} notices",
    }
    if newest:
        rows["stall"] = f"{newest['stall_s']:.3g} s a checkpoint, {newest['share']:.2%} of the time, measured"
    if found["recoveries_s"]:
        rows["recovery"] = f"{', '.join(f'{each:.1f}' for each in found['recoveries_s'][-5:])} s, measured"
    for name, value in rows.items():
        typer.echo(textwrap.fill(f"{name:<12} {value}", 80, subsequent_indent=" " * 13, break_on_hyphens=False))


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
    )


def _served(options: JobOptions, address: str, token_file: Path | None) -> dict[str, Any]:
    from polythrottle.cluster.train.running import serve

    return serve(_asked(options, None), address, token_file, complain)


def _joined(address: str, token_file: Path | None, options: NodeOptions, script: Path, words: list[str]) -> None:
    from polythrottle.cluster.notices.watching import watch_from
    from polythrottle.cluster.train.running import way_to

    line = way_to(address, token_file)
    watch = watch_from(options.notices or [], complain)
    from polythrottle.cluster.train.agent import Node, take_part

    name = options.node or os.environ.get("SLURMD_NODENAME") or os.uname().nodename
    node = Node(name, script.absolute(), words, options.workers, options.host or "")
    take_part(line, node, token_file.absolute() if token_file else None, complain, watch.start if watch else None)


def _local(
    options: JobOptions, node: NodeOptions, script: Path, words: list[str], engine: str, replace_s: float
) -> dict[str, Any]:
    from polythrottle.cluster.train.rays import RayEngine
    from polythrottle.cluster.train.running import Local, node_counts, refuse_finished, status_of
    from polythrottle.cluster.train.torchrun import Plan, Torchrun

    asked = _asked(options, script)
    job = asked.as_job()
    refuse_finished(job)
    serving = ["--serve", "127.0.0.1:0", *_words(options, job.name)]
    plan = Plan(job.folder, script.absolute(), words, serving, _joining(node))
    held = RayEngine(plan) if engine == "ray" else Torchrun(plan)
    names = [f"node{number}" for number in range(1, node_counts(options.nodes)[1] + 1)]
    complain(f"job {job.name}: {len(names)} nodes on this machine, checkpoints in {job.store}")
    local = Local(held, names, None if replace_s < 0 else replace_s)
    try:
        gone = held.gone if isinstance(held, Torchrun) else dict
        code = local.run(_say_event, lambda: held.exit_code, gone)
    except KeyboardInterrupt:
        complain(f"stopped after a checkpoint; go on with --job {job.name} and the same words")
        raise
    if code:
        raise _failure(code, job.name)
    return status_of(job.folder)


def _rented(options: JobOptions, node: NodeOptions, script: Path, words: list[str], where: Where) -> dict[str, Any]:
    from polythrottle.cluster.train.running import node_counts, refuse_finished, status_of
    from polythrottle.cluster.train.torchrun import Plan

    job = _asked(options, script).as_job()
    refuse_finished(job)
    count = node_counts(options.nodes)[1]
    complain(f"job {job.name}: {count} nodes on {where.on}, checkpoints in {job.store}")
    serving = [*where.serving, *_words(options, job.name)]
    code = run_on(where, Plan(job.folder, script.absolute(), words, serving, _joining(node)), count, _say_event)
    if code:
        raise _failure(code, job.name)
    return status_of(job.folder)


def _joining(node: NodeOptions) -> list[str]:
    """Return the options of a node as words for its own process."""
    notices = [word for source in node.notices or [] for word in ("--notice", source)]
    return ["--workers", str(node.workers), *notices]


def _failure(code: int, job: str) -> PolythrottleError:
    why = "lost its controller" if code < 0 else "did not end well"
    error = ClaimFailed(f"job {job} {why}; see polythrottle cluster status {job}, or go on with --job {job}")
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
    return [word for name, value in given.items() if value is not None for word in (name, str(value))]


def _say_event(event: Mapping[str, Any]) -> None:
    """Print one line for what people want to know of."""
    where = f"generation {event['generation']}"
    texts = {
        "joined": "{node} joined",
        "lost": "{node} is lost: {reason}",
        "draining": "{node} is about to leave: {reason}",
        "left": "{node} left: {reason}",
        "formed": "begins on {nodes}",
        "first step": "first step {step} on {workers} workers",
        "resumed": "goes on from step {step}",
        "checkpoint": "checkpoint at step {step}, {stall_s} s of stall",
        "spooled": "checkpoint at step {step} waits for the store",
        "notice": "{node} will be taken away ({kind})",
        "finished": "the training is over",
        "failed": "the job has failed: {reason}",
    }
    text = texts.get(str(event["event"]))
    if text is not None:
        nodes = ", ".join(event.get("members", ()))
        typer.echo(f"{event['at_s']:8.1f} s  {where}: {text.format_map({'nodes': nodes, **event})}", err=True)
