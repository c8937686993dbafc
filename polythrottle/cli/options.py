"""Options that several commands take, as values that `spread` lays out, and help pages with groups and examples."""

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

from polythrottle.domain.errors import InvalidInput
from polythrottle.storage.untrusted import printable

if TYPE_CHECKING:
    from polythrottle.domain.space import Level
    from polythrottle.tuning.setup import Setup

# Help pages: commands in groups, an example under each, and what a bare group of commands prints.

BEGIN = "Begin here"
TUNE = "Tune and measure"
USE = "Use the answer, and undo it"
RESULTS = "Look at results"
KEEP = "Keep it tuned"
BOARDS = "Boards and models"
RESEARCH = "Research"


class CommandGroup(TyperGroup):
    """Commands under the headings they were registered with; without a command it prints its help.

    A heading is typer's ``rich_help_panel``, which typer itself shows only where it may load rich.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Return the words left for a command; where there are none, print the help and end with exit code 0."""
        # click would end with exit code 2 here (no_args_is_help), as if asking what there is were a mistake.
        if not args and not self.invoke_without_command and not ctx.resilient_parsing:  # resilient: completion
            typer.echo(ctx.get_help())
            raise typer.Exit
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return a command and its words, once no path among them is empty."""
        name, command, rest = super().resolve_command(ctx, args)
        if command is not None and not hasattr(command, "commands"):
            _check_paths(command.params, rest)
            _hide_types(command.params)
        return name, command, rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, a section per heading."""
        shown = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        sections: dict[str, list[tuple[str, Any]]] = {}
        for name, command in shown:
            if command is not None and not command.hidden:
                sections.setdefault(_heading(command), []).append((name, command))
        widest = max((len(name) for name, _ in shown), default=0)
        for heading, commands in sections.items():
            with formatter.section(heading):
                rows = [(name.ljust(widest), _summary(each, formatter.width - 6 - widest)) for name, each in commands]
                formatter.write_dl(rows)


def examples(*commands: str) -> str:
    r"""Return the end of a help page: commands that can be copied; a line that goes on ends in a backslash.

    Args:
        commands: Each at most 76 columns wide.
    """
    lines = "\n".join(f"  {line}" for command in commands for line in command.splitlines())
    return f"\b\nExample{'s' * (len(commands) > 1)}:\n{lines}"


def check_seed(seed: int) -> None:
    """Refuse a seed that no generator takes.

    Raises:
        InvalidInput: If it is one.
    """
    if not 0 <= seed < 1 << 63:
        raise InvalidInput(f"--seed is a whole number from 0 to 2^63 - 1, not {seed}")


def check_text(context: typer.Context) -> None:
    """Refuse words that are not UTF-8, such as old names of files, where they are to be written into files that are.

    Raises:
        InvalidInput: If one of the command's is not; shows it.
    """
    for value in context.params.values():
        for word in map(str, value if isinstance(value, list) else [value]):
            try:
                word.encode()
            except UnicodeEncodeError as error:
                why = "is not text in UTF-8, which journals and profiles are; rename it"
                raise InvalidInput(f"'{printable(word)}' {why}") from error


def check_count(option: str, count: int, least: int, most: int = 100_000) -> None:
    """Refuse a number of searches, replays or processes that is too small, or would never end.

    Raises:
        InvalidInput: If it is one.
    """
    if not least <= count <= most:
        bound = f"least {least}" if count < least else f"most {most:,}"
        raise InvalidInput(f"{option} must be at {bound}, not {count}")


_PATHS = ("FILE", "FOLDER", "DIR", "PATH", "TABLE", "CATALOGUE", "STUDY", "PROFILE", "SOCKET")
"""How help pages write what is a path, or may be one."""


def _check_paths(parameters: Iterable[Any], words: Iterable[str]) -> None:
    """Refuse a path that is empty, which everybody who opens it would take for the current folder.

    Args:
        parameters: Of the command.
        words: What it was given, before it is parsed: afterwards an empty path is a dot.

    Raises:
        InvalidInput: If one is; names the option or the argument.
    """
    takers = {name: parameter for parameter in parameters for name in parameter.opts}
    arguments = [one for name, one in takers.items() if not name.startswith("-")]
    taker = None
    for word in words:
        option, equals, value = word.partition("=")
        if taker is not None:
            _check_path(taker, word)
            taker = None
        elif word == "--":
            return
        elif option.startswith("-") and option in takers and not takers[option].is_flag:
            if equals:
                _check_path(takers[option], value)
            else:
                taker = takers[option]
        elif not word.startswith("-"):
            for argument in arguments[:1]:
                _check_path(argument, word)


def _hide_types(parameters: Iterable[Any]) -> None:
    """Leave Python's types out of help pages, where newer versions of typer write them behind each argument: <str>."""
    for parameter in parameters:
        if parameter.param_type_name == "argument":
            parameter.display_type_rich = lambda ctx: None


def _check_path(parameter: Any, word: str) -> None:
    kind = str(parameter.metavar or "").strip("[]")
    if kind in _PATHS and not word.strip():
        name = max(parameter.opts, key=len)
        called = name if name.startswith("-") else kind
        raise InvalidInput(f"{called} is empty; it takes a name, and a dot is the current folder")


def _heading(command: Any) -> str:
    heading = command.rich_help_panel
    if isinstance(heading, str):
        return heading
    return "Commands"


def _summary(command: Any, width: int) -> str:
    """Return what a command says of itself in a list: its first clause, or as much of it as fits one line."""
    text = command.short_help or (command.help or "").partition("\n\n")[0].partition(";")[0]
    line = " ".join(text.split()).rstrip(".")
    if len(line) <= width:
        return line
    return str(command.get_short_help_str(width))


# Options that several commands take: each group of them is a value that `spread` lays out as a command's own.

_COUNTED = re.compile(r"_([kmg]?hz|us|w)$|^(batch_size|threads)$")
"""Knobs whose levels are numbers; those of others may be words."""
_UNIT = re.compile(r"_([kmg]?)(hz|us|w)$")
_FILE_UNITS = {"hz": ("mhz", "hz", 1e6), "us": ("us", "s", 1e-6), "w": ("w", "w", 1.0)}
"""By the unit a name ends in: the one files have, the one it is read in, and how many of that one of the first is."""
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
OtherModelOption = Annotated[
    bool, typer.Option("--other-model", help="Go on although the model is not the one it was tuned for.")
]


class OptionGroup:
    """Options that belong together: the fields of a subclass, a frozen dataclass, with their defaults."""

    def given(self) -> bool:
        """Return whether any of them was given, with another value than its default."""
        return any(
            (value := getattr(self, option.name)) != option.default and value != []
            for option in fields(self)  # type: ignore[arg-type]
        )


def given_options(context: typer.Context, *groups: type[OptionGroup]) -> set[str]:
    """Return which options of some groups are on the command line, by their long names, also with a default's value."""
    names = {option.name for group in groups for option in fields(group)}  # type: ignore[arg-type]
    given = set()
    for parameter in context.command.params:
        source = context.get_parameter_source(str(parameter.name))
        if parameter.name in names and source is not None and source.name == "COMMANDLINE":
            given.add(max(parameter.opts, key=len))
    return given


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that takes the options of its parameters' groups one by one, in place of the groups.

    Args:
        command: Each parameter annotated with an `OptionGroup` is replaced by the fields of that group.
    """
    # typer reads a signature, so the groups become one that it can read.
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[OptionGroup]] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind = parameter.annotation
        if isinstance(kind, type) and issubclass(kind, OptionGroup):
            groups[parameter.name] = kind
            parameters += _laid_out(kind)
        else:
            # Keyword-only: one with a default may then come before one without, as help pages order them.
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def taking(**words: Any) -> None:
        gathered = {
            name: kind(**{option.name: words.pop(option.name) for option in fields(kind)})  # type: ignore[arg-type]
            for name, kind in groups.items()
        }
        command(**gathered, **words)

    taking.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    taking.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return taking


def _laid_out(group: type[OptionGroup]) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    own = group.__annotations__  # its own options come before those of the groups it is made of
    for option in sorted(fields(group), key=lambda each: each.name not in own):  # type: ignore[arg-type]
        default = inspect.Parameter.empty if option.default is MISSING else option.default
        yield inspect.Parameter(
            option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[option.name]
        )


@dataclass(frozen=True)
class SetupOptions(OptionGroup):
    """Device and workload, and how long a trial looks."""

    device: Annotated[
        str,
        typer.Option(
            "--device",
            "-d",
            metavar="URI",
            help="jetson, nvml:0, cpu, sim:<board>, replay:<table>, or auto; tune takes several (A,B or @FILE).",
        ),
    ] = "auto"
    workload: Annotated[
        str | None,
        typer.Option(
            "--workload",
            "-w",
            metavar="URI",
            help="model.onnx, model.engine, model.pt2, package.module:callable, kserve://…, openai://…, a name, or "
            'cmd:<words>, which may print its latencies: 12.5ms or {"latency_s": 0.0125} a line.',
        ),
    ] = None
    knobs: Annotated[
        str | None,
        typer.Option("--knobs", metavar="A,B", help="Device knobs to search, or none; the others keep their default."),
    ] = None
    batch: Annotated[str | None, typer.Option("--batch", metavar="1,2,4", help="Batch sizes there may be.")] = None
    threads: Annotated[str | None, typer.Option("--threads", metavar="1,2", help="Thread counts there may be.")] = None
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", metavar="SHAPE", help="Shape of a model input without its batch: 3x224x224."),
    ] = None
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", help="Give up a query of a command or a service after S seconds.")
    ] = 60.0
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds", metavar="S", help="Least length of a trial; 2, unless it has --queries or 1,000 queries."
        ),
    ] = None
    queries: Annotated[
        int | None, typer.Option("--queries", metavar="N", help="Least queries of a trial; 100, simulated 1,000.")
    ] = None
    arrivals: Annotated[
        str | None,
        typer.Option(
            "--arrivals",
            metavar="HOW",
            help="closed (default), uniform:30/s, poisson:30/s, burst:30/s, day:30/s, trace:FILE@30/s.",
        ),
    ] = None
    precision: Annotated[
        str | None,
        typer.Option(
            "--precision",
            metavar="2%",
            help="End a trial once its energy is this sure and the SLO judged; tune: 2% without --queries, --seconds.",
        ),
    ] = None
    settle: Annotated[float, typer.Option("--settle", metavar="S", help="Warm up for at least S seconds.")] = 0.0
    cool: Annotated[
        float | None, typer.Option("--cool", metavar="C", help="Wait before a trial until it is this cool, in °C.")
    ] = None

    def setup(self, *, look: bool = True) -> "Setup":
        """Return the setup these words mean; says on standard error which device ``auto`` is.

        Args:
            look: Whether to look for the device that ``auto`` is now.

        Raises:
            InvalidInput: If a list of knobs or counts is none.
        """
        from polythrottle.tuning.setup import Setup

        if self.queries is not None and self.queries < 1:
            raise InvalidInput(f"--queries {self.queries}: a window needs 1 query or more")
        for option, does, time_s in (("--seconds", "lasts", self.seconds), ("--settle", "settles for", self.settle)):
            if time_s is not None and not 0 <= time_s < math.inf:
                raise InvalidInput(f"{option} {time_s:g}: a window {does} 0 s or more")
        return Setup(
            self._device() if look else self.device,
            self.workload,
            knob_names(self.knobs),
            counts("--batch", self.batch),
            counts("--threads", self.threads),
            tuple(self.inputs or ()),
            self.timeout,
            self.queries,
            self.seconds,
            self.arrivals,
            share("--precision", self.precision),
            self.settle,
            self.cool,
        )

    def _device(self) -> str:
        if not self.device.startswith("auto"):
            return self.device
        from polythrottle.backends import find_device
        from polythrottle.backends.meters import meter_apart

        own, meter = meter_apart(self.device)
        if own != "auto":
            return self.device
        found = find_device()
        typer.echo(f"device {found.uri}: {found.explanation}", err=True)
        if meter:
            # An option more: after others, or the first (RFC 3986, section 3.4).
            joint = {True: "&", False: "?"}["?" in found.uri]
            return f"{found.uri}{joint}meter={meter}"
        return found.uri


@dataclass(frozen=True)
class BudgetOptions(OptionGroup):
    """What a search may use, and when it ends before."""

    trials: Annotated[int | None, typer.Option("--trials", metavar="N", help="Points to try at most; 30.")] = None
    minutes: Annotated[float | None, typer.Option("--minutes", metavar="M", help="How long to search at most.")] = None
    joules: Annotated[
        float | None, typer.Option("--joules", metavar="J", help="Energy the search may use at most.")
    ] = None
    horizon: Annotated[
        str | None,
        typer.Option("--horizon", metavar="30d", help="How long the answer is used: stop when trying costs more."),
    ] = None
    early_stop: Annotated[
        bool | None,
        typer.Option(
            "--early-stop/--no-early-stop", help="Stop when next to nothing is left to save.", show_default=False
        ),
    ] = None

    def check(self) -> None:
        """Check the bounds that are numbers.

        Raises:
            InvalidInput: If one is not above zero and finite; names its option.
        """
        for option, bound in (("--minutes", self.minutes), ("--joules", self.joules)):
            if bound is not None and not 0 < bound < math.inf:
                raise InvalidInput(f"{option} must be above zero and finite, not {bound:g}")


@dataclass(frozen=True)
class StudyOptions(OptionGroup):
    """What is looked for and how, and where the study is kept."""

    slo: Annotated[
        list[str] | None, typer.Option("--slo", metavar="SLO", help="p99<=25ms, mean<=1.2x, …; repeats.")
    ] = None
    objective: Annotated[
        str | None, typer.Option("--objective", metavar="NAME", help="energy (default), edp or latency.")
    ] = None
    pareto: Annotated[bool, typer.Option("--pareto", help="Search the whole front of latency and energy.")] = False
    method: Annotated[str, typer.Option("--method", metavar="NAME", help="bayes, random, grid, paper, …")] = "bayes"
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Randomness of the method.")] = 0
    risk: Annotated[
        str | None,
        typer.Option("--risk", metavar="R", help="Chance that the search breaks the SLO; 0.05 in production."),
    ] = None
    error_budget: Annotated[
        str | None,
        typer.Option("--error-budget", metavar="E", help="Late requests the search may cost: 0.1%, 200 or 5min."),
    ] = None
    history: Annotated[
        list[str] | None,
        typer.Option("--history", metavar="PATH", help="Journals, tables or folders to learn from; repeats."),
    ] = None
    no_history: Annotated[bool, typer.Option("--no-history", help="Learn from no earlier study.")] = False
    as_prior: Annotated[
        list[str] | None,
        typer.Option("--as-prior", metavar="PROFILE", help="Try a profile's point right after the default; repeats."),
    ] = None
    presets: Annotated[
        bool, typer.Option("--presets/--no-presets", help="Measure presets too; never with --risk or --error-budget.")
    ] = True
    journal: Annotated[Path | None, typer.Option("--journal", metavar="FILE", help="Where the study is kept.")] = None
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over even if an unfinished study is there.")] = False

    def words(self) -> dict[str, Any]:
        """Return them as `polythrottle.tune` takes them.

        Raises:
            InvalidInput: If two of them exclude each other.
        """
        return {
            "slo": self.slo or [],
            "objective": self._objective(),
            "method": self.method,
            "seed": self.seed,
            "risk": share("--risk", self.risk, "0.05 or 5%"),
            "error_budget": self.error_budget,
            "history": self._history(),
            "priors": self.as_prior or (),
            "presets": self.presets,
            "journal": self.journal,
            "fresh": self.fresh,
        }

    def _objective(self) -> str:
        """Return the objective two options ask for; a front is asked for by its own option alone."""
        from polythrottle.domain.problem import Objective

        if self.pareto and self.objective not in (None, Objective.ENERGY, Objective.PARETO):
            raise InvalidInput(
                f"--pareto is a front of latency and energy; leave it or --objective {self.objective} out"
            )
        if self.pareto:
            return str(Objective.PARETO)
        return str(Objective.parse(Objective.ENERGY if self.objective is None else self.objective))

    def _history(self) -> list[str] | None:
        if self.history and self.no_history:
            raise InvalidInput("--history and --no-history exclude each other; leave one out")
        if self.no_history:
            return []
        return self.history or None


def knob_names(text: str | None) -> tuple[str, ...] | None:
    """Return the knobs a list names, ``gpu_max_mhz`` or ``gpu max``, or ``none``; None if nothing was given.

    Raises:
        InvalidInput: If the list is empty, or has a gap.
    """
    from polythrottle.domain.units import knob_name

    if text is None:
        return None
    if text.strip() == "none":
        return ()
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise InvalidInput(f"--knobs takes names such as gpu_max_mhz,mem_mhz, not {text[:40]!r}")
    knobs = tuple(knob_name(name) for name in names)
    if twice := next((name for name, knob in zip(names, knobs, strict=True) if knobs.count(knob) > 1), None):
        raise InvalidInput(f"--knobs names {twice} twice")
    return knobs


def counts(option: str, text: str | None) -> tuple[int, ...] | None:
    """Return the counts a list names, sorted; None if nothing was given.

    Raises:
        InvalidInput: If one is no whole number above zero.
    """
    if text is None:
        return None
    words = text.split(",")
    if not all(word.strip().isdecimal() and len(word) < 10 and int(word) > 0 for word in words):
        raise InvalidInput(f"{option} takes whole numbers above zero such as 1,2,4, not {text[:40]!r}")
    return tuple(sorted({int(word) for word in words}))


def levels(text: str | None) -> "dict[str, Level]":
    """Return the levels in a list such as ``gpu_max_mhz=900,batch_size=4``, in SI.

    A clock may also be written as ``gpu max=900MHz`` or ``gpu_max_hz=9e8``.

    Raises:
        InvalidInput: If one is no level or not finite, or a knob occurs twice.
    """
    found: dict[str, Level] = {}
    if text is not None and not text.strip(", "):
        raise InvalidInput("--point is empty; write for example gpu_max_mhz=900,batch_size=4")
    for part in filter(None, (text or "").split(",")):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not (name and equals and value):
            raise InvalidInput(f"{part!r} is not a level; write for example gpu_max_mhz=900,batch_size=4")
        key, level = _level(part.strip(), *_in_its_unit(name, value))
        if key in found:
            raise InvalidInput(f"{part.strip()!r}: this knob was given a level before; give it one")
        found[key] = level
    return found


def _in_its_unit(name: str, value: str) -> tuple[str, str]:
    """Return name and level as files have them: ``gpu max`` and ``0.9GHz`` give ``gpu_max_mhz`` and ``900``."""
    from polythrottle.domain.units import parse_quantity, spelled

    name = spelled(name)
    unit = _UNIT.search(name)
    if unit is None or not value[-1:].isalpha() or not value.lstrip("+-")[:1].isdigit():
        return name, value
    ending, known, factor = _FILE_UNITS[unit[2]]
    return f"{name[: unit.start()]}_{ending}", f"{parse_quantity(value, known) / factor:.12g}"


def _level(part: str, name: str, value: str) -> "tuple[str, Level]":
    from polythrottle.domain.units import to_si

    try:
        number = float(value)
        key, level = to_si(name, number) if math.isfinite(number) else (name, number)
    except ValueError:
        if _COUNTED.search(name):
            raise InvalidInput(f"{part!r}: {value!r} is not a number") from None
        return name, value
    except OverflowError:
        key = name
        level = math.inf
    if not math.isfinite(level):
        raise InvalidInput(f"{part!r} is not a finite level")
    return key, int(level) if level == int(level) else level


def share(option: str, text: str | None, example: str = "2%") -> float | None:
    """Return the fraction that a text like ``2%`` or ``0.02`` means; None stays None.

    Args:
        option: Which takes it.
        text: As on the command line.
        example: Of what it takes.

    Raises:
        InvalidInput: If it is neither.
    """
    if text is None:
        return None
    try:
        fraction = float(text.strip().removesuffix("%"))
    except ValueError:
        fraction = math.nan
    if not math.isfinite(fraction):
        raise InvalidInput(f"{option} {text!r} is not a share; write for example {example}")
    if text.strip().endswith("%"):
        return fraction / 100
    return fraction


def share_below_one(option: str, text: str) -> float:
    """Return the fraction that a text means, from zero to below one.

    Raises:
        InvalidInput: If it is none, or another.
    """
    fraction = share(option, text, "3%") or 0.0
    if not 0 <= fraction < 1:
        raise InvalidInput(f"{option} {text!r} is at least 0% and below 100%; write for example 3%")
    return fraction
