"""``polythrottle cluster status``: where a training job stands, and its events as they come."""

import contextlib
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from polythrottle.cli.cluster.node_status import EVENTS, event_words, node_rows
from polythrottle.cli.options import JsonOption
from polythrottle.cli.output import answer, formatted, several, suffix

UNKNOWN = "unknown"
_NO_SHARE = "measured; its share of the time is unknown"
_GONE = {"lost": "was lost"}
FINISHED = "finished"
_EVENT_TEXTS = {
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


def status(
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Its name or folder; the newest.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show a job's generation, members, step, checkpoints and losses."""
    from polythrottle.training.elastic.launcher import job_folder, newest_job, status_of

    if job is None:
        folder = newest_job()
    elif "/" in job:
        folder = Path(job)
    else:
        folder = job_folder(job)
    answer(status_of(folder), as_json, print_status)


def print_status(job: Mapping[str, Any]) -> None:
    """Print where a job stands."""
    newest = job["newest_checkpoint"]
    rows: dict[str, object] = {
        "job": job["job"],
        "phase": ": ".join(filter(None, (job["phase"], job.get("reason")))),
        "generation": _known(job["generation"]) or "none yet",
        "members": _members(job),
        "chief": job["chief"] or "none",
        "step": formatted(job["step"], unknown="none yet"),
        "checkpoints": f"{_known(job['checkpoints'])}{' (the newest waits for the store)' * bool(job['spooled'])}",
        "newest": _newest(job),
        "losses": _losses(job),
    }
    if job["waits_for"]:
        rows["waits for"] = several(job["waits_for"], "node")
    if job["taken_up"]:
        over = "; it was over, nothing was left to do" * bool(job["nothing_left"])
        rows["taken up"] = f"step {job['taken_up']['step']} of a training that was in the store before{over}"
    if newest and newest["stall_s"] is not None:
        share = formatted(newest["share"], "{:.2%} of the time, measured", _NO_SHARE)
        rows["stall"] = f"{newest['stall_s']:.3g} s a checkpoint, {share}"
    if job["recoveries_s"]:
        rows["recovery"] = f"{', '.join(f'{each:.1f}' for each in job['recoveries_s'][-5:])} s, measured"
    rows |= _afflictions(job)
    for name, value in (*rows.items(), *node_rows(job)):
        typer.echo(textwrap.fill(f"{name:<12} {value}", 80, subsequent_indent=" " * 13, break_on_hyphens=False))


def _known(value: object) -> object:
    """Return a value; events alone do not tell some that a controller counts, and these are unknown then."""
    if value is None:
        return UNKNOWN
    return value


def _losses(job: Mapping[str, Any]) -> str:
    if job["losses"] is None:
        return UNKNOWN
    return f"{job['losses']}, {job['departures']} left, {job['notices']} notices"


def _newest(job: Mapping[str, Any]) -> str:
    newest = job["newest_checkpoint"]
    trouble = job.get("store_trouble")
    if newest is not None:
        return f"step {newest['step']}, {newest['bytes'] / 1e6:.3g} MB{suffix(trouble, ', as last told: {}')}"
    if trouble:
        return f"{UNKNOWN}: {trouble}"
    return "none"


def _members(job: Mapping[str, Any]) -> str:
    if job["last_members"]:
        return f"none any more; the last were {', '.join(job['last_members'])}"
    members = ", ".join(job["members"]) or "none"
    if job["members"] and job["phase"] == UNKNOWN:
        members += " when last heard of"
    return members + "".join(f"; {name} {_GONE.get(how, how)}" for name, how in job["gone"].items())


def _afflictions(job: Mapping[str, Any]) -> dict[str, object]:
    """Return the rows of what went wrong, and what was done ahead of time."""
    rows: dict[str, object] = {}
    fault = job["newest_fault"]
    successors = job["successors"]
    if job["restarts"]:
        rows["restarts"] = f"{job['restarts']} of the controller"
    if successors and successors["asked"]:
        times = f"overlap {successors['overlap_s']:.1f} s, interruption {successors['interruption_s']:.1f} s, measured"
        rows["successors"] = f"{successors['asked']} asked for, {successors['done']} took over; {times}"
    if fault:
        where = f"{fault['node']} at {fault['at_s']:.0f} s, generation {fault['generation']}"
        more = ""
        if job["faults"] > 1:
            more = f" (the newest of {job['faults']})"
        rows["fault"] = f"{where}: {fault['reason']}{more}"
        rows["its words"] = " | ".join(line.strip() for line in fault["said"][-4:]) or "none"
    return rows


def print_event(event: Mapping[str, Any]) -> None:
    """Print one line for what people want to know of."""
    where = f"generation {event['generation']}"
    text = _EVENT_TEXTS.get(str(event["event"]))
    if text is not None:
        nodes = ", ".join(event.get("members", ()))
        workers = event.get("workers")
        more = {"nodes": nodes, "crew": f"{workers} worker{'s' * (workers != 1)}", **event_words(event)}
        with contextlib.suppress(OSError):  # a full disk, or nobody, behind standard error: the job goes on
            typer.echo(f"{event['at_s']:8.1f} s  {where}: {text.format_map({**more, **event})}", err=True)
