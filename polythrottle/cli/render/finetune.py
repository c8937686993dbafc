"""How `polythrottle finetune` answers: results, plans, predictors and jobs, in 80 columns."""

import contextlib
import math
import re
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from polythrottle.api.progress import LiveBar
from polythrottle.cli.output import formatted, grid, optional, suffix
from polythrottle.cli.render.console import Unpadded, plain_console
from polythrottle.domain.units import show
from polythrottle.storage.json_channel import finite
from polythrottle.training.beside.progress_forecast import Plan, Range

if TYPE_CHECKING:
    from polythrottle.training.beside.corun_bench import CoRunProfile
    from polythrottle.training.beside.live_run import RunProgress as Passed
    from polythrottle.training.beside.operating_options import FinetuningJob
    from polythrottle.training.beside.scheduler import Hours, Terms
    from polythrottle.training.beside.serving_loop import Result
    from polythrottle.training.beside.trainer.job_folder import Progress as Standing

_WIDTH = 79
_LABEL = 11
_TIE = "\N{NO-BREAK SPACE}"
_UNIT = re.compile(r"(?<=\d) (?=(?:[mµn]?s|k?J|W|%)(?![a-z]))")
_PLAIN_S = 15.0
"""So often a line is printed where there is no terminal to draw on."""


@dataclass(frozen=True)
class FinetunePlan:
    """A plan and what it is for.

    Args:
        plan: What was foretold.
        length_s: Over how long.
        job: What is fine-tuned.
        energy_kind: How the joules come about: measured, estimated or simulated.
        policy: By which.
        hours: At which it fine-tunes alone; None to go by the load.
        day_s: Time of day at which it begins, since midnight.
        power_w: Mean power that is allowed; None for any.
    """

    plan: Plan
    length_s: float
    job: "FinetuningJob"
    energy_kind: str
    policy: str
    hours: "Hours | None" = None
    day_s: float = 0.0
    power_w: float | None = None

    @property
    def within_hours_s(self) -> float | None:
        """How much of the time lies within the hours at which it fine-tunes; None where it goes by the load."""
        if self.hours is None:
            return None
        return self.hours.within_s(self.day_s, self.length_s)

    @property
    def simulated(self) -> bool:
        """Whether the device is."""
        return self.energy_kind == "simulated"


class LiveRun(LiveBar):
    """Shows on standard error how a run gets on: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, terms: "Terms") -> None:
        columns = TextColumn("{task.description}"), BarColumn(bar_width=16), TaskProgressColumn(), TimeElapsedColumn()
        super().__init__("measuring batches and slices", *columns)
        self._terms = terms
        self._said_s = 0.0

    def told(self, passed: "Passed") -> None:
        """Show how far it has come."""
        words = f"{passed.answered:,} answered, {passed.late:,} late; {passed.samples:,} trained"
        done = float(passed.samples)
        total = float(passed.samples + passed.left)
        if self._terms.seconds is not None:
            done = passed.passed_s
            total = self._terms.seconds
        self._progress.update(self._task, description=words, completed=done, total=total, refresh=True)
        if not self._console.is_terminal and passed.passed_s >= self._said_s + _PLAIN_S:
            self._said_s = passed.passed_s
            with contextlib.suppress(OSError):  # a full disk behind standard error must not end a run
                if passed.state == "finished":
                    epoch = ""
                else:
                    epoch = f"epoch {passed.epoch + 1}, "
                line = f"{passed.passed_s:.0f} s: {words}, {epoch}{passed.state}"
                self._console.print(line, soft_wrap=True, markup=False)

    def noted(self, text: str) -> None:
        """Print a line that stays."""
        with contextlib.suppress(OSError):
            self._console.print(f"note: {text}", markup=False)


def print_result(found: "Result") -> None:
    """Print what came of serving and fine-tuning."""
    _print(_served(found))


def _served(found: "Result") -> Iterator[tuple[str, str]]:
    kind = " (simulated)" * found.simulated
    yield "", found.title
    hours = suffix(found.hours, " at {}")
    yield "policy", f"{found.policy}{hours}, {found.arrivals} for {show_time(found.span_s)}{kind}"
    late = found.late
    share = found.late_share
    interval = found.late_interval
    if share is None or interval is None:
        yield "requests", "none came"
    else:
        between = f"{100 * interval.low:.2g} to {100 * interval.high:.2g} %"
        dropped = suffix(found.dropped, ", {:,} of them never answered")
        yield "requests", f"{found.requests:,}; {late:,} late ({100 * share:.2g} %, 95 %: {between}){dropped}"
        yield "latency", ", ".join(_percentiles(found))
        word = "held" if found.held else "broken"
        yield "limit", f"{show(found.slo_s, 's')} from arrival for 99 % of the requests: {word}"
    if found.policy != "none":
        yield from _trained(found)
    if found.energy_j is not None and found.mean_power_w is not None:
        mean = show(found.mean_power_w, "W")
        yield "energy", f"{show(found.energy_j, 'J')}, {mean} on average ({found.energy_kind})"
    if found.power_cap_w is not None:
        yield "power", _capped(found, found.power_cap_w)
    for note in found.notices:
        yield "note", note


def _percentiles(found: "Result") -> Iterator[str]:
    for name, (value, interval) in found.percentiles().items():
        if interval is None:
            yield f"{name} {show(value, 's')}"
        elif interval.known:
            yield f"{name} {show(value, 's')} ({show(interval.low, 's')} to {show(interval.high, 's')})"
        else:
            yield f"{name} {show(value, 's')} (at least {show(interval.low, 's')}; too few for more)"


def _trained(found: "Result") -> Iterator[tuple[str, str]]:
    training = found.training
    if training.finished:
        epoch = "finished"
    else:
        epoch = f"in epoch {training.epoch + 1} of {training.epochs}"
    took = formatted(optional(show_time, training.done_s), " after {}")
    loss = formatted(training.loss, ", loss {:.4g}")
    if training.finished and not training.samples:
        # Steps are measured by making them, which may be all that a small job has.
        epoch += "; its last step was made before the first request: as steps were measured, or by an earlier run"
        took = ""
    yield "trained", f"{training.samples:,} samples in {training.steps:,} steps, {epoch}{took}{loss}"
    counted = {
        "slices stopped for requests": training.suspended,
        "made smaller": training.shrunk,
        "pauses": training.pauses,
        "trainer started again": training.restarts,
    }
    if any(counted.values()):
        yield "held back", ", ".join(f"{what}: {count}" for what, count in counted.items() if count)
    if training.stopped:
        yield "stopped", f"fine-tuning, not inference: {training.stopped}"
    if found.validation is not None:
        yield "new model", _verdict(found.validation)


def _capped(found: "Result", cap_w: float) -> str:
    waited = f"fine-tuning waited {show_time(found.training.waited_s or 0.0)} for that"
    kept = found.mean_power_w is not None and found.mean_power_w <= cap_w
    word = "exceeded: inference is answered whatever it draws"
    if kept:
        word = "kept"
    return f"{show(cap_w, 'W')} on average at most: {word}; {waited}"


def _verdict(validation: Mapping[str, Any]) -> str:
    right = f"{validation['accuracy']:.1%} of {validation['samples']} held-out samples right"
    if validation.get("served"):
        return f"{right}; now served: {validation['served']}"
    if validation["holds"]:
        return f"{right}; may be served"
    return f"{right}; not served: {validation['why']}"


def plan_document(told: FinetunePlan) -> dict[str, Any]:
    """Return a plan for ``--json``; what lies beyond the horizon is None."""
    names = ("epochs", "joules", "added_j", "late", "requests", "done_s")
    ranges = {name: _range(getattr(told.plan, name)) for name in names}
    return {
        "simulated": told.simulated,
        "policy": told.policy,
        "length_s": told.length_s,
        "samples": told.job.samples,
        "epochs_wanted": told.job.epochs,
        "hours": optional(str, told.hours),
        "within_hours_s": told.within_hours_s,
        "power_cap_w": told.power_w,
        "energy_kind": told.energy_kind,
        **ranges,
    }


def _range(found: Range) -> list[float | None]:
    return [finite(found.low), finite(found.high)]


def print_plan(told: FinetunePlan) -> None:
    """Print what was foretold."""
    made = told.plan
    job = told.job
    beyond = math.isinf(made.done_s.high)
    if math.isinf(made.done_s.low):
        never = "not within this time"
    else:
        never = f"after {show_time(made.done_s.low)} at best"
    if told.power_w is None:
        cap = ""
    else:
        cap = f", {show(told.power_w, 'W')} on average at most"
    both, added = (_span(each, "{}", _joules) for each in (made.joules, made.added_j))
    lines = {
        "": f"within {show_time(told.length_s)}, policy {told.policy}{cap}{', simulated' * told.simulated}",
        **({} if told.hours is None else {"hours": _hours(told.hours, told.day_s, told.length_s)}),
        "epochs": f"{_span(made.epochs, '{}', _count)} of {job.epochs:,} ({job.samples:,} samples each)",
        "finished": never if beyond else f"after {_span(made.done_s, '{}', show_time)}",
        "energy": f"{both} for both, {added} of it added ({told.energy_kind})",
        "late": f"{_span(made.late, '{:,.0f}')} of {_span(made.requests, '{:,.0f}')} requests",
    }
    # The margin is for rounding: a plan that uses all that is allowed does not exceed it.
    above = told.power_w is not None and made.joules.high > 1.0001 * told.power_w * told.length_s
    if above:
        note = [("note", "inference alone may draw more than allowed; it is answered whatever it draws")]
    else:
        note = []
    _print([*lines.items(), *note])


def _hours(hours: "Hours", day_s: float, length_s: float) -> str:
    return f"{hours}, {show_time(hours.within_s(day_s, length_s))} of this time; none but these are used"


def _count(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _joules(value: float) -> str:
    return show(value, "J")


def _span(found: Range, form: str, shown: Callable[[float], object] = float) -> str:
    low, high = (form.format(shown(each)) for each in (found.low, found.high))
    if low == high:
        return low
    return f"{low} to {high}"


def print_profile(found: "CoRunProfile") -> None:
    """Print how far predictions of held-out co-runs lay off."""
    _print([("", f"{found.title}: {len(found.runs)} co-runs fitted, {len(found.held_out)} held out")])
    head, *rows = found.rows()
    table = grid("", head, 1, before=1, folded=range(len(head)))
    for row in rows:
        table.add_row(*row)
    plain_console().print(Unpadded(table), soft_wrap=True)
    _print([("note", note) for note in found.remarks])


def status_document(told: "tuple[Path, Standing]") -> dict[str, Any]:
    """Return where a job stands for ``--json``; what is unknown is None."""
    folder, found = told
    return {
        "folder": str(folder),
        "model": found.task.model,
        "data": found.task.data,
        "running": found.runs,
        "finished": found.finished,
        "epoch": found.place.epoch,
        "epochs": found.task.epochs,
        "position": found.place.position,
        "samples": found.samples,
        "steps": found.place.step,
        "loss": found.place.loss,
        "written_s": found.place.written_s or None,
        "validation": found.validation,
        "damaged": list(found.damaged),
    }


def print_status(told: "tuple[Path, Standing]") -> None:
    """Print where a job stands."""
    folder, found = told
    place = found.place
    task = found.task
    if found.finished:
        state = "finished"
    else:
        state = "running" if found.runs else "not running; the same run goes on with it"
    of = formatted(found.samples, f", {place.position:,} of {{:,}} samples of it")
    if found.finished:
        epoch = f"{task.epochs} of {task.epochs}"
    else:
        epoch = f"{place.epoch + 1} of {task.epochs}{of}"
    lines = {
        "": str(folder),
        "model": f"{task.model}, trained on {task.data}",
        "state": state,
        "epoch": epoch,
        "steps": f"{place.step:,}{formatted(place.loss, ', loss {:.4g}')}",
        "saved": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(place.written_s)) if place.written_s else "not yet",
        "validated": optional(_verdict, found.validation) or "not yet",
    }
    damaged = [("note", f"damaged and passed over: {name}") for name in found.damaged]
    _print([*lines.items(), *damaged])


def show_time(seconds: float) -> str:
    """Return a length of time for people."""
    if seconds < 120:
        return show(seconds, "s")
    minutes = round(seconds / 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min"


def _print(lines: Iterable[tuple[str, str]]) -> None:
    console = plain_console()
    for label, text in lines:
        indent = " " * _LABEL * bool(label)
        tied = _UNIT.sub(_TIE, text)
        folded = textwrap.wrap(tied, _WIDTH - len(indent), break_on_hyphens=False, break_long_words=False) or [""]
        if label:
            console.print(Text(f"{label:<{_LABEL}}", "dim"), end="")
        for i, line in enumerate(folded):
            console.print(indent * bool(i) + line.replace(_TIE, " "), soft_wrap=True)
