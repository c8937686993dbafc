"""`polythrottle finetune`: fine-tune a model beside its inference, predict what that costs, and see how it goes."""

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polythrottle.cli.options import CommandGroup, JsonOption, OptionGroup, counts, examples, spread
from polythrottle.cli.output import answer, own_stdout
from polythrottle.domain.errors import INTERRUPTED, InvalidInput, PolythrottleError
from polythrottle.storage.atomic_file import temporary_folder
from polythrottle.storage.paths import state_dir

if TYPE_CHECKING:
    from polythrottle.domain.arrivals import Arrivals
    from polythrottle.training.beside.corun_bench import CoRunProfile
    from polythrottle.training.beside.operating_options import FinetuningJob, Menu
    from polythrottle.training.beside.preparation import ServingPlace
    from polythrottle.training.beside.scheduler import Hours, Terms
    from polythrottle.training.beside.serving_loop import Result
    from polythrottle.training.beside.trainer.driver import Task
    from polythrottle.training.beside.trainer.job_folder import Progress

app = typer.Typer(
    cls=CommandGroup, help="Fine-tune a model beside its inference, within the latency limit.", rich_markup_mode=None
)
_SIMULATED = "-d sim:jetson-agx-orin -w efficientnet-b4 \\\n  --slo 'p99<=700ms' --rate 8/s"
_ENDLESS = 1_000_000
_COUNT_MOST = 10**9
_REQUESTS_MOST = 100_000
_HOURS_MOST = 87_660.0
"""Ten years, as `finetune.terms` has them."""


class _Interrupted(PolythrottleError):
    """Something was interrupted; says what is kept of it."""

    exit_code = INTERRUPTED


@app.callback()
def finetune() -> None:
    """Fine-tune a model beside its inference, within the latency limit."""


@dataclass(frozen=True)
class PlaceOptions(OptionGroup):
    """Where, and what is served there."""

    device: Annotated[str, typer.Option("--device", "-d", metavar="URI", help="sim:<board>, cpu, … or auto.")] = "auto"
    workload: Annotated[
        str | None,
        typer.Option(
            "--workload", "-w", metavar="URI", help="package.module:callable, model.pt2, …; simulated: a name."
        ),
    ] = None
    batch: Annotated[
        str | None, typer.Option("--batch", metavar="1,2,4", help="Sizes of a batch of requests; 1, simulated to 8.")
    ] = None
    threads: Annotated[int | None, typer.Option("--threads", metavar="N", help="Threads of inference.")] = None
    inputs: Annotated[
        list[str] | None, typer.Option("--input", metavar="SHAPE", help="Shape of an input without its batch.")
    ] = None

    def place(self) -> "ServingPlace":
        """Return the place these words mean.

        Raises:
            InvalidInput: If no workload is named, or a count is none.
        """
        from polythrottle.training.beside.preparation import ServingPlace as Place

        if not self.workload:
            raise InvalidInput("say what is served: --workload package.module:callable, or a name on a simulated board")
        if self.threads is not None and self.threads < 1:
            raise InvalidInput(f"--threads must be at least 1, not {self.threads}")
        batches = counts("--batch", self.batch) or ()
        return Place(self.device, self.workload, batches, self.threads, tuple(self.inputs or ()))


@dataclass(frozen=True)
class JobOptions(OptionGroup):
    """What is fine-tuned."""

    data: Annotated[
        str | None, typer.Option("--data", metavar="FOLDER", help="Samples: a folder per label, or labels.csv.")
    ] = None
    job: Annotated[
        str | None, typer.Option("--job", metavar="FOLDER", help="Where the job is kept; goes on with one there.")
    ] = None
    model: Annotated[
        str | None, typer.Option("--train", metavar="MODEL", help="What is trained; the workload by default.")
    ] = None
    step: Annotated[int, typer.Option("--train-batch", metavar="N", help="Samples of a step.")] = 32
    epochs: Annotated[int, typer.Option("--epochs", metavar="N", help="How often each sample is seen.")] = 1
    rate: Annotated[float, typer.Option("--learning-rate", metavar="R", help="Of Adam.")] = 1e-3
    adapters: Annotated[bool, typer.Option("--adapters", help="Train low-rank adapters too, not the head alone.")] = (
        False
    )
    cores: Annotated[int, typer.Option("--train-threads", metavar="N", help="Threads of the trainer.")] = 1
    served: Annotated[
        str | None, typer.Option("--replace", metavar="FILE", help="Model file to replace once the new one is as good.")
    ] = None
    samples: Annotated[int, typer.Option("--samples", metavar="N", help="Simulated: samples of an epoch.")] = 640
    output: Annotated[int, typer.Option("--output", metavar="N", help="Simulated: classes of the head.")] = 1000

    def simulated(self, model: str) -> "FinetuningJob":
        """Return the job on a simulated board.

        Raises:
            InvalidInput: If a count is below 1 or beyond a billion, the learning rate is none, or words belong to real
                jobs.
        """
        from polythrottle.training.beside.operating_options import FinetuningJob

        if self.data or self.job or self.model or self.served:
            raise InvalidInput(
                "a simulated board trains no real model: leave --data, --job, --train and --replace out, and say "
                "--samples, --train-batch and --epochs"
            )
        if not 0 < self.rate < math.inf:
            raise InvalidInput(f"--learning-rate must be above 0 and finite, not {self.rate:g}")
        most = max(self.samples, self.step, self.epochs, self.output)
        if most > _COUNT_MOST:
            raise InvalidInput(f"a simulated job counts to {_COUNT_MOST:,} at most, not to {str(most)[:20]}")
        return FinetuningJob(self.samples, self.step, self.epochs, self.output, model)

    def task(self, place: "ServingPlace", job: str | None = None) -> "Task":
        """Return the real job.

        Raises:
            InvalidInput: If data or folder is missing, or a value out of its range.
        """
        from polythrottle.training.beside.trainer.driver import ADAPTERS, HEAD, Task

        folder = job or self.job
        if not self.data or not folder:
            raise InvalidInput("a real job needs --data FOLDER, its samples, and --job FOLDER, where it is kept")
        return Task(
            self.model or place.workload,
            self.data,
            folder,
            batch=self.step,
            epochs=self.epochs,
            trained=ADAPTERS if self.adapters else HEAD,
            learning_rate=self.rate,
            served=self.served or "",
            threads=self.cores,
        )


@dataclass(frozen=True)
class TrafficOptions(OptionGroup):
    """The requests, and their limit."""

    slo: Annotated[str | None, typer.Option("--slo", metavar="SLO", help="p99<=700ms: of a request, with waiting.")] = (
        None
    )
    per_s: Annotated[
        str | None, typer.Option("--rate", metavar="8/s", help="Requests, at random (Poisson) at this rate.")
    ] = None
    arrivals: Annotated[
        str | None, typer.Option("--arrivals", metavar="HOW", help="uniform:8/s, burst:8/s, trace:FILE@8/s, …")
    ] = None
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of the arrivals.")] = 0

    def terms(self, policy: str, seconds: float | None, within: "WithinOptions", day_s: float) -> "Terms":
        """Return what is to be kept to from a time of day on.

        Raises:
            InvalidInput: If the limit is no p99, the requests are none, or hours or power make no sense.
            UnknownName: If there is no such policy.
        """
        from polythrottle.training.beside.scheduler import Terms

        if self.seed < 0:
            raise InvalidInput(f"--seed must be 0 or more, not {self.seed}")
        kept = within.hours, within.power_w, day_s
        return Terms(self._slo_s(), self._arrivals(), policy, seconds, self.seed, *kept)

    def _slo_s(self) -> float:
        from polythrottle.domain.problem import Constraint

        if not self.slo:
            raise InvalidInput("say the limit of a request: --slo 'p99<=700ms'")
        limit = Constraint.parse(self.slo)
        if limit.metric != "p99" or limit.relative:
            raise InvalidInput(f"fine-tuning keeps to a p99 in seconds, not {self.slo!r}; write for example p99<=700ms")
        return limit.limit

    def _arrivals(self) -> "Arrivals":
        from polythrottle.domain.arrivals import Arrivals, Poisson
        from polythrottle.domain.units import parse_quantity

        if bool(self.per_s) == bool(self.arrivals):
            raise InvalidInput("say how requests come: --rate 8/s, or --arrivals uniform:8/s, and only one of the two")
        if self.per_s:
            return Poisson(parse_quantity(str(self.per_s), "per_s"))
        return Arrivals.parse(str(self.arrivals))


@dataclass(frozen=True)
class WithinOptions(OptionGroup):
    """The hours and the power that fine-tuning keeps within."""

    between: Annotated[
        str | None,
        typer.Option("--between", metavar="22:00-06:00", help="Policy off-peak: fine-tune at these hours alone."),
    ] = None
    power: Annotated[
        str | None,
        typer.Option("--power", metavar="20W", help="Mean power of both at most; fine-tuning waits for it."),
    ] = None
    begin: Annotated[
        str | None,
        typer.Option("--begin", metavar="21:00", help="Simulated: the time of day it begins at; now by default."),
    ] = None

    @property
    def hours(self) -> "Hours | None":
        """At which to fine-tune; None to go by the load."""
        from polythrottle.training.beside.scheduler import Hours

        if self.between is None:
            return None
        return Hours.parse(self.between)

    @property
    def power_w(self) -> float | None:
        """That is not to be exceeded on average; None for any."""
        from polythrottle.domain.units import parse_quantity

        if self.power is None:
            return None
        return parse_quantity(self.power, "w")

    def day_s(self) -> float:
        """Return the time of day at which all begins, since midnight: now, or what a simulated board is told.

        Raises:
            InvalidInput: If it is told none.
        """
        from polythrottle.training.beside.scheduler import day_time_s, wall_day_s

        if self.begin is None:
            return wall_day_s(time.time())
        return day_time_s(self.begin)

    def check(self, place: "ServingPlace") -> None:
        """Check that only a simulated board is told what time it is.

        Raises:
            InvalidInput: If a real device is.
        """
        if self.begin is not None and not place.simulated:
            raise InvalidInput("--begin is for simulated boards; a real device goes by the clock of its machine")


PolicyOption = Annotated[
    str, typer.Option("--policy", metavar="NAME", help="interleave, off-peak, paper, greedy, or none.")
]


@app.command(
    "run",
    short_help="Serve requests and fine-tune in between.",
    epilog=examples(f"polythrottle finetune run {_SIMULATED}"),
)
@spread
def run_both(
    place: PlaceOptions,
    traffic: TrafficOptions,
    job: JobOptions,
    within: WithinOptions,
    policy: PolicyOption = "interleave",
    seconds: Annotated[
        float | None, typer.Option("--seconds", metavar="S", help="How long requests come; simulated 30.")
    ] = None,
    by: Annotated[str | None, typer.Option("--by", metavar="06:00", help="Run until this time of day.")] = None,
    figure: Annotated[
        Path | None, typer.Option("--figure", metavar="FILE", help="Draw latencies along time: .png, .svg or .pdf.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Serve requests and fine-tune in between; on a real device until the job is done, unless told otherwise.

    The same command goes on with a job that is not done. Exit code 5: inference alone cannot hold the limit. Where
    fine-tuning fails, requests are answered all the same, and the exit code is that of the failure: 8 for a full disk.
    """
    from polythrottle.cli.render.finetune import print_result

    where = place.place()
    within.check(where)
    # Before the run, which may take the night.
    if figure is not None:
        from polythrottle.cli.render.figures import check_figure

        check_figure(figure)
    day_s = within.day_s()
    terms = traffic.terms(policy, _duration_s(seconds, by, day_s), within, day_s)
    serve = _real
    if where.simulated:
        serve = _simulated
    result = serve(where, terms, job)
    answer(result, as_json, print_result, lambda each: each.document())
    if figure is not None:
        from polythrottle.cli.render.figures import write_beside

        write_beside(result, figure)
    # After the answer: what was served until Ctrl-C is told like any other run.
    if result.interrupted and (result.simulated or result.training.finished or result.policy == "none"):
        raise typer.Exit(INTERRUPTED)
    if result.interrupted:
        raise _Interrupted("interrupted; the same command goes on with the job, from the last step that is kept")
    if result.training.exit_code:
        raise typer.Exit(result.training.exit_code)


def _duration_s(seconds: float | None, by: str | None, day_s: float) -> float | None:
    """Return how long requests come; None if nobody said.

    Args:
        seconds: How long, as it was asked for.
        by: Until which time of day, as it was asked for.
        day_s: Time of day at which they begin, since midnight.
    """
    if seconds is not None and not seconds > 0:
        raise InvalidInput(f"--seconds must be above zero, not {seconds:g}")
    if seconds is not None and by is not None:
        raise InvalidInput("--seconds and --by both say when to end; leave one out")
    if by is not None:
        return _until_s(by, day_s)
    return seconds


@contextlib.contextmanager
def _unkept() -> Iterator[None]:
    """Say of a simulation that is interrupted that nothing is kept of it.

    Raises:
        _Interrupted: If it is.
    """
    try:
        yield
    except KeyboardInterrupt as err:
        raise _Interrupted("interrupted; nothing is kept of a simulation, the same command begins it anew") from err


@contextlib.contextmanager
def _kept(task: "Task | None" = None) -> Iterator[None]:
    """Say of what is interrupted what is kept of it, and how to go on.

    Args:
        task: Of a job here; None of one on a board, which says so itself.

    Raises:
        _Interrupted: If it is.
    """
    from polythrottle.training.beside.trainer.supervisor import kept_words

    try:
        yield
    except KeyboardInterrupt as err:
        words = str(err) if task is None else kept_words(Path(task.folder))
        raise _Interrupted(f"interrupted; {words}" if words else "interrupted") from err


def _simulated(place: "ServingPlace", terms: "Terms", job: JobOptions) -> "Result":
    from polythrottle.training.beside.simulated_run import run_simulated

    seeded = replace(terms, seed=terms.seed or place.seed)
    with _unkept():
        return run_simulated(place.scene(job.simulated(place.workload)), seeded)


def _real(place: "ServingPlace", terms: "Terms", job: JobOptions) -> "Result":
    from polythrottle.backends.ssh import is_ssh
    from polythrottle.cli.render.finetune import LiveRun
    from polythrottle.training.beside.live_run import run
    from polythrottle.training.beside.trainer.driver import Trainer
    from polythrottle.training.beside.trainer.job_folder import leave_link

    task = job.task(place)
    if is_ssh(place.device.strip()):
        from polythrottle.training.beside.far_run import run_there

        with _kept(), LiveRun(terms) as live:
            return run_there(place, task, terms, live.told, live.noted)
    with _kept(task):
        device, server = place.open()
        # The daemon finds the job by that link and takes it into account.
        leave_link(Path(task.folder), state_dir() / "finetune")
        with contextlib.closing(server.workload), own_stdout(), LiveRun(terms) as live:
            return run(device, server, Trainer(task), terms, live.told, live.noted)


@app.command(
    short_help="Predict how many epochs are done by when.",
    epilog=examples(f"polythrottle finetune plan {_SIMULATED} --hours 8"),
)
@spread
def plan(
    place: PlaceOptions,
    traffic: TrafficOptions,
    job: JobOptions,
    within: WithinOptions,
    by: Annotated[str | None, typer.Option("--by", metavar="06:00", help="By this time of day.")] = None,
    hours: Annotated[float | None, typer.Option("--hours", metavar="H", help="Within so many hours.")] = None,
    policy: PolicyOption = "interleave",
    as_json: JsonOption = False,
) -> None:
    """Predict how many epochs are done by when, and at what cost: ranges, not points.

    On a real device what batches and slices take is measured first, for which the job is really begun.
    """
    from polythrottle.cli.render.finetune import FinetunePlan, plan_document, print_plan
    from polythrottle.domain.load.energy_ration import LoadInterval
    from polythrottle.training.beside.progress_forecast import plan as foretell
    from polythrottle.training.beside.scheduler import OffPeak

    where = place.place()
    day_s = within.day_s()
    terms = traffic.terms(policy, None, within, day_s)
    within.check(where)
    if (by is None) == (hours is None):
        raise InvalidInput("say by when: --by 06:00, or --hours 8, and only one of the two")
    if hours is not None and not 0 < hours <= _HOURS_MOST:
        raise InvalidInput(f"--hours must be above 0, and {_HOURS_MOST:g} (ten years) at most, not {hours:g}")
    length_s = 3600.0 * (hours or 0.0)
    if by is not None:
        length_s = _until_s(by, day_s)
    menu, planned, energy = _known(where, job)
    ahead = [LoadInterval(length_s, terms.rate_per_s)]
    quiet = OffPeak(hours=terms.hours)
    made = foretell(menu, planned, ahead, terms.slo_s, policy, terms.power_w, quiet, day_s)
    forecast = FinetunePlan(made, length_s, planned, energy, policy, terms.hours, day_s, terms.power_w)
    answer(forecast, as_json, print_plan, plan_document)


def _known(place: "ServingPlace", job: JobOptions) -> "tuple[Menu, FinetuningJob, str]":
    """Return what a device can do, the job, and how the joules come about."""
    from polythrottle.backends.ssh import is_ssh
    from polythrottle.training.beside.preparation import known
    from polythrottle.training.beside.trainer.driver import Trainer

    if place.simulated:
        simulated = job.simulated(place.workload)
        with _unkept():
            return place.scene(simulated).menu, simulated, "simulated"
    task = job.task(place)
    if is_ssh(place.device.strip()):
        from polythrottle.training.beside.far_run import known_there

        with _kept():
            return known_there(place, task)
    with _kept(task):
        device, server = place.open()
        with contextlib.closing(server.workload), own_stdout():
            menu, made = known(device, server, Trainer(task), task)
            return menu, made, str(device.energy_kind)


@app.command(
    short_help="Measure inference beside fine-tuning.",
    epilog=examples("polythrottle finetune profile -d sim:jetson-agx-orin -w efficientnet-b4"),
)
@spread
def profile(
    place: PlaceOptions,
    job: JobOptions,
    requests: Annotated[
        int, typer.Option("--requests", metavar="N", help="Single requests to learn from afterwards.")
    ] = 0,
    held_out: Annotated[int, typer.Option("--held-out", metavar="N", help="Co-runs to judge by.")] = 12,
    as_json: JsonOption = False,
) -> None:
    """Measure inference beside fine-tuning, fit what predicts it, and say how far off that is where it was not fitted.

    On a real device a job of its own is trained for it and thrown away.
    """
    from polythrottle.cli.render.finetune import print_profile

    where = place.place()
    if requests > _REQUESTS_MOST:
        raise InvalidInput(f"--requests must be {_REQUESTS_MOST:,} at most, not {str(requests)[:20]}")
    if where.simulated:
        from polythrottle.training.beside.corun_bench import profile as make
        from polythrottle.training.beside.simulated_host import SimulatedBench

        with _unkept():
            scene = where.scene(job.simulated(where.workload))
            bench = SimulatedBench(scene.board, scene.host.model, scene.host.job, where.noise, where.seed)
            found = make(bench, held_out=held_out, requests=requests, seed=where.seed)
    else:
        found = _profiled(where, job, held_out, requests)
    answer(found, as_json, print_profile, lambda each: each.document())


def _profiled(place: "ServingPlace", job: JobOptions, held_out: int, requests: int) -> "CoRunProfile":
    from polythrottle.backends.ssh import is_ssh
    from polythrottle.training.beside.preparation import profiled
    from polythrottle.training.beside.trainer.driver import Trainer

    with _folder() as folder:
        # For as long as is measured, and never in place of the model that is served.
        task = replace(job.task(place, folder), epochs=_ENDLESS, served="")
        if is_ssh(place.device.strip()):
            from polythrottle.training.beside.far_run import profiled_there

            with _kept():
                return profiled_there(
                    place, task, held_out, requests, lambda text: typer.echo(f"note: {text}", err=True)
                )
        device, server = place.open()
        with contextlib.closing(server.workload), own_stdout():
            return profiled(device, server, Trainer(task), held_out, requests)


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    with temporary_folder() as folder:
        yield str(folder)


@app.command(short_help="Show where a fine-tuning job stands.", epilog=examples("polythrottle finetune status job"))
def status(
    job: Annotated[Path, typer.Argument(metavar="FOLDER", help="Of a job, as --job named it.")],
    device: Annotated[
        str | None, typer.Option("--device", "-d", metavar="ssh://BOARD", help="The board that the folder is on.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say where a real job stands: epochs and samples done, whether it runs, how its last validation went."""
    from polythrottle.cli.render.finetune import print_status, status_document

    answer((job, _standing(job, device)), as_json, print_status, status_document)


def _standing(job: Path, device: str | None) -> "Progress":
    from polythrottle.backends.ssh import is_ssh
    from polythrottle.training.beside.trainer.job_folder import read_progress

    if device is None:
        return read_progress(job)
    if not is_ssh(device.strip()):
        raise InvalidInput(
            f"--device names a board over SSH, ssh://nano, not {device!r}; a folder of this machine has none"
        )
    from polythrottle.training.beside.far_run import progress_there

    return progress_there(device.strip(), str(job))


def _until_s(text: str, day_s: float) -> float:
    """Return how long it is from one time of day until another, such as ``06:00``.

    Raises:
        InvalidInput: If it is not valid.
    """
    from polythrottle.training.beside.progress_forecast import until_s
    from polythrottle.training.beside.scheduler import day_time_s

    return until_s(day_s, day_time_s(text))
