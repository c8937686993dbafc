"""``polythrottle cluster status``: where a training job stands, its nodes, and its events as they come.

Of nodes it says how their boards, paces and bottlenecks are; ``cluster train`` says the same.
"""

import contextlib
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polythrottle.cli.options import JsonOption, OptionGroup, share, share_below_one
from polythrottle.cli.output import answer, formatted, several, suffix
from polythrottle.domain.errors import InvalidInput

if TYPE_CHECKING:
    from polythrottle.training.elastic.nodes.overseer import Watched


_FEW = 5


@dataclass(frozen=True)
class WatchOptions(OptionGroup):
    """How the controller paces the nodes, and when it calls the job slow."""

    longer: Annotated[
        str, typer.Option("--longer", metavar="3%", help="Steer: how much later than the slowest node all may be.")
    ] = "0%"
    threshold: Annotated[
        str, typer.Option("--threshold", metavar="6.7%", help="Slower than predicted by more is a bottleneck.")
    ] = "6.7%"
    warm_up: Annotated[
        float, typer.Option("--warm-up", metavar="S", help="A generation's speed counts from then on.")
    ] = 30.0
    remedies: Annotated[
        list[str] | None,
        typer.Option("--remedy", metavar="NAME", help="Do this about a bottleneck, and verify it: drop."),
    ] = None

    def watched(self) -> "Watched":
        """Return what is meant.

        Raises:
            InvalidInput: If a word is not valid.
        """
        from polythrottle.training.elastic.nodes.bottleneck_remedies import MonitorTerms, allowed_remedies
        from polythrottle.training.elastic.nodes.overseer import Watched

        threshold = share("--threshold", self.threshold) or 0.0
        longer = share_below_one("--longer", self.longer)
        if not 0 < threshold < 1:
            raise InvalidInput(f"--threshold {self.threshold!r} is a share above 0% and below 100%; write 6.7%")
        if not 0 <= self.warm_up < 1e6:
            raise InvalidInput(f"--warm-up takes seconds, at least 0, not {self.warm_up}")
        return Watched(longer, MonitorTerms(threshold, self.warm_up, allowed_remedies(self.remedies or [])))

    def watching_words(self) -> list[str]:
        """Return them as words for the controller's own process."""
        given = {"--longer": self.longer, "--threshold": self.threshold, "--warm-up": str(self.warm_up)}
        plain = [word for pair in given.items() for word in pair]
        return [*plain, *(word for remedy in self.remedies or [] for word in ("--remedy", remedy))]


@dataclass(frozen=True)
class SteerOptions(OptionGroup):
    """Which board a node steers."""

    steer: Annotated[
        list[str] | None,
        typer.Option(
            "--steer",
            metavar="DEVICE",
            help="Cap this node's board: auto, nvml:0, sim:a100, off; repeats. By default what an actuator serves.",
        ),
    ] = None
    look: Annotated[
        float, typer.Option("--look", metavar="S", help="Steer: how long a window of steps is at least.")
    ] = 5.0

    def check_steering(self, engine: str) -> None:
        """Refuse words that can be no board's, before anything starts.

        Raises:
            InvalidInput: If one is malformed, or the engine cannot steer.
            UnknownName: If it names nothing.
        """
        from polythrottle.training.elastic.nodes.steered_node import check_boards

        if not 0.1 <= self.look <= 3600:
            raise InvalidInput(f"--look takes between 0.1 and 3600 seconds, not {self.look}")
        if self.steer and engine != "torchrun":
            raise InvalidInput(f"--steer goes with --engine torchrun; {engine} starts its own workers")
        if self.steer and "off" in self.steer and len(self.steer) > 1:
            raise InvalidInput("--steer off stands alone")
        check_boards([board for board in self.steer or [] if board != "off"])

    def steering_words(self, nodes_here: int = 1) -> list[str]:
        """Return them as words for a node's own process.

        Args:
            nodes_here: Nodes on one machine: of several none steers a board that nobody named.
        """
        boards = self.steer or ["off"] * (nodes_here > 1)
        return ["--look", str(self.look), *(word for board in boards for word in ("--steer", board))]


EVENTS = {
    "cap": "{node} runs {cap}: {reason}{known}",
    "bottleneck": "{words}",
    "no bottleneck": "as fast as predicted again",
    "remedy tried": "tries to {act}",
    "remedy kept": "{act}: {gain}, measured; kept",
    "remedy taken back": "{act}: {outcome}; taken back",
}


def event_words(event: Mapping[str, Any]) -> dict[str, str]:
    """Return what the texts of `EVENTS` need of an event."""
    causes = event.get("causes", ())
    gain = event.get("gain_measured")
    return {
        "cap": _cap(event.get("limit_w")),
        "known": _known(event),
        "words": "; ".join(_cause(each) for each in causes),
        "act": _act(event) if "remedy" in event else "",
        "gain": formatted(gain, "{:+.1%}", "speed unknown"),
        "outcome": str(event.get("reason") or "no gain that was measured"),
    }


def node_rows(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a row for each node whose steps are known or whose board is steered, and those of the job's speed."""
    for node in found.get("nodes", ()):
        parts = [*_pace(node), *_board(node.get("steering"))]
        if parts:
            yield str(node["node"]), ", ".join(parts)
    yield from _speed(found.get("speed"))
    yield from _last(found)


def _last(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what the events of a job without a controller tell."""
    # Without its controller a job has only what its log holds; the present draw of a board is not there.
    for event in found.get("last_caps", ()):
        power_w = event.get("power_w")
        power = formatted(power_w, f", {{:.1f}} W {event.get('energy_kind')}")
        known = _known(event) * (power_w is None)
        yield str(event["node"]), f"last {_cap(event.get('limit_w'))}{power}: {event.get('reason')}{known}"
    last = found.get("last_bottleneck")
    if last is not None:
        causes = "; ".join(_cause(each) for each in last.get("causes", ()))
        yield "bottleneck", f"last at {last['at_s']:.0f} s: {causes or 'none'}"
    for event in found.get("last_remedies", ()):
        yield "tried", f"{_act(event)}: {_came_of(event)}"


def _came_of(event: Mapping[str, Any]) -> str:
    """Return what came of a remedy, from the last event that tells of it."""
    if event["event"] == "remedy tried":
        return "what it brings was not measured before the end"
    if event.get("reason"):
        return f"taken back: {event['reason']}"
    return f"{_gained(event)}, {_kept(event)}"


def _pace(node: Mapping[str, Any]) -> Iterator[str]:
    step_s = node.get("step_s")
    own_s = node.get("own_s")
    if step_s is not None and own_s is not None:
        yield f"{step_s:.3g} s a step, {own_s:.3g} s its own"


def _board(board: Mapping[str, Any] | None) -> Iterator[str]:
    if board is None:
        return
    limit_w = board.get("limit_w")
    power_w = board.get("power_w")
    kind = board.get("energy_kind")
    yield _cap(limit_w)
    power = formatted(power_w, f"{{:.1f}} W {kind}", "power unknown")
    # Said once: how the joules come about stands before it.
    yield f"{power} ({str(board.get('title') or board.get('device')).replace(' (simulated)', '')})"
    if board.get("throttled"):
        yield "throttled"
    if board.get("verdict"):
        yield f"{board['verdict']}: {board.get('reason')}{_known(board) * (power_w is None)}"
    if board.get("flagged") is not None:
        side = "slower" if board["flagged"] > 0 else "faster"
        yield f"stands out: {abs(board['flagged']):.0f} deviations {side} than its type"
    if board.get("trouble"):
        yield f"trouble: {board['trouble']}"


def _known(told: Mapping[str, Any]) -> str:
    """Return how the joules of a cap are known, such as simulated; nothing of a board at its default."""
    kind = told.get("energy_kind")
    if kind and told.get("limit_w") is not None:
        return f" ({kind})"
    return ""


def _speed(speed: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    if speed is None:
        return
    if speed["measured_steps_per_s"] is None:
        yield "speed", f"not judged yet: {speed['reason']}"
        return
    text = f"{speed['measured_steps_per_s']:.3g} steps/s of {speed['expected_steps_per_s']:.3g} predicted"
    yield "speed", f"{text}; a bottleneck is more than {speed['threshold']:.1%} short"
    for cause in speed["causes"]:
        yield "bottleneck", _cause(cause)
    for proposal in speed["proposals"]:
        yield "could help", _naming(proposal["words"], proposal["nodes"])
    for tried in speed["tried"]:
        yield "tried", f"{_act(tried)}: {_gained(tried)}, {_kept(tried)}"


def _act(told: Mapping[str, Any]) -> str:
    """Return a remedy with the names of the nodes it is for."""
    return _naming(str(told["remedy"]), told.get("nodes") or ())


def _naming(words: str, nodes: Sequence[str]) -> str:
    """Return words of a remedy with the nodes' names where they say "the node"; in brackets where they do not."""
    if not nodes:
        return words
    named = words.replace("the node", _names(nodes), 1)
    if named != words:
        return named
    return f"{words} ({_names(nodes)})"


def _gained(tried: Mapping[str, Any]) -> str:
    gain = tried.get("gain_measured")
    if gain is None:
        return "speed unknown"
    return f"{gain:+.1%} samples/s measured"


def _names(nodes: Sequence[str]) -> str:
    more = suffix(len(nodes[_FEW:]), " and {} more")
    return f"{', '.join(nodes[:_FEW])}{more}"


def _kept(tried: Mapping[str, Any]) -> str:
    if tried["kept"]:
        return "kept"
    return "taken back"


def _cap(limit_w: float | None) -> str:
    if limit_w is None:
        return "at its default clocks"
    return f"capped at {limit_w:g} W"


def _cause(cause: Mapping[str, Any]) -> str:
    return f"{cause['cause']}: {cause['words']}"


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
    from polythrottle.training.elastic.job_control import job_folder, newest_job, status_of

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
        "generation": _or_nothing(job["generation"]) or "none yet",
        "members": _members(job),
        "chief": job["chief"] or "none",
        "step": formatted(job["step"], unknown="none yet"),
        "checkpoints": f"{_or_nothing(job['checkpoints'])}{' (the newest waits for the store)' * bool(job['spooled'])}",
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


def _or_nothing(value: object) -> object:
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
        # Formatted once: braces in what a node tells are no fields.
        with contextlib.suppress(OSError):  # a full disk, or nobody, behind standard error: the job goes on
            typer.echo(f"{event['at_s']:8.1f} s  {where}: {text.format_map({**more, **event})}", err=True)
