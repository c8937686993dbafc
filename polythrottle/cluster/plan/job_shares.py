"""Several jobs on machines of several kinds: Gavel's linear program (OSDI 2020) with rows for money.

Joules and SLOs, and its catalogue.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from polythrottle.cluster.catalogue import machine_of
from polythrottle.domain.backports import StrEnum
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import HOUR_S, Cap, Market
from polythrottle.storage.documents import TomlTable

# Several jobs on machines of several kinds: Gavel's linear program (OSDI 2020), with rows for money, joules and SLOs.
#
# Every job gets a share of time of every kind of machine under every power cap; what it does is the mean of its
# speeds, weighted with these shares. The program is solved by HiGHS (scipy.optimize.linprog).

_TINY = 1e-9


class Aim(StrEnum):
    """What the shares are chosen for."""

    FAIR = "fair"  # the worst-off job does as well as it can, against an equal share of everything
    COST = "cost"  # fewest dollars at which all meet their deadlines
    ENERGY = "energy"  # fewest joules at which all meet their deadlines


@dataclass(frozen=True)
class Kind:
    """One kind of machine that jobs share.

    Attributes:
        name: What it is called.
        machines: How many there are.
        usd_per_h: Price of one per hour of use.
        caps: Power caps it may run under, the default first.
    """

    name: str
    machines: int
    usd_per_h: float
    caps: tuple[Cap, ...]

    def __post_init__(self) -> None:
        if self.machines < 1 or self.usd_per_h < 0 or not self.caps:
            raise InvalidInput(f"kind {self.name!r} needs machines, a price of at least 0 and a power cap")


@dataclass(frozen=True)
class SharingJob:
    """One job that shares machines.

    Attributes:
        name: What it is called.
        steps: Steps left.
        steps_per_s: Speed on each kind it can use, with all its workers, at the default cap.
        workers: Machines it uses at a time.
        deadline_s: When it has to be done, in seconds from now; None for whenever.
        weight: How much it counts where shares are fair.
        overhead: Share of its time that checkpoints and losses take, in [0, 1).
    """

    name: str
    steps: float
    steps_per_s: Mapping[str, float]
    workers: int = 1
    deadline_s: float | None = None
    weight: float = 1.0
    overhead: float = 0.0

    def __post_init__(self) -> None:
        if not (self.steps > 0 and self.workers >= 1 and self.weight > 0 and 0 <= self.overhead < 1):
            raise InvalidInput(f"job {self.name!r} needs steps, workers, a weight and an overhead in [0, 1)")
        if not all(speed > 0 for speed in self.steps_per_s.values()) or not self.steps_per_s:
            raise InvalidInput(f"job {self.name!r} needs a positive speed on at least one kind of machine")
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise InvalidInput(f"job {self.name!r} has a deadline in the past")

    @property
    def needed_per_s(self) -> float:
        """Return the steps per second that meet the deadline; 0 without one."""
        if self.deadline_s is None:
            return 0.0
        return self.steps / self.deadline_s


@dataclass(frozen=True)
class Shares:
    """Who gets what, computed from the speeds given: an estimate as good as they are.

    Attributes:
        time: Job → (kind, power limit in watts) → share of its time there.
        steps_per_s: Mean speed of each job.
        usd_per_h: What all of it costs per hour.
        power_w: Mean power of all machines in use, in watts.
        short: Jobs that cannot meet their deadlines, by which share of their steps; empty where all can.
    """

    time: Mapping[str, Mapping[tuple[str, float | None], float]]
    steps_per_s: Mapping[str, float]
    usd_per_h: float
    power_w: float
    short: Mapping[str, float] = field(default_factory=dict)

    @property
    def feasible(self) -> bool:
        """Return whether every job meets its deadline."""
        return not self.short


def share(jobs: Sequence[SharingJob], kinds: Sequence[Kind], aim: Aim = Aim.FAIR) -> Shares:
    """Return which share of time each job gets on each kind of machine under each cap.

    Args:
        jobs: The jobs; for cost and energy each needs a deadline.
        kinds: The machines.
        aim: What for. Where the deadlines cannot all be met, the shares are those that miss them by least in all, and
            say which jobs are short by how much.

    Raises:
        InvalidInput: If there are no jobs or machines, a name is there twice, a job fits no kind, or a deadline is
            missing.
    """
    _check(jobs, kinds, aim)
    program = _Program(tuple(jobs), tuple(kinds))
    if aim is Aim.FAIR:
        return program.fair()
    return program.cheapest(aim) or program.least_short()


def _check(jobs: Sequence[SharingJob], kinds: Sequence[Kind], aim: Aim) -> None:
    for what, names in (("job", [job.name for job in jobs]), ("kind", [kind.name for kind in kinds])):
        if not names:
            raise InvalidInput(f"to share machines, at least one {what} is needed")
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidInput(f"to share machines, each {what} needs a name of its own; {twice[:40]!r} is there twice")
    for job in jobs:
        if not any(kind.name in job.steps_per_s and kind.machines >= job.workers for kind in kinds):
            raise InvalidInput(f"job {job.name!r} needs {job.workers} machines of a kind it can use; there are fewer")
        if aim is not Aim.FAIR and job.deadline_s is None:
            raise InvalidInput(f"job {job.name!r} has no deadline; the least {aim} without one is to do nothing")


@dataclass(frozen=True)
class _Program:
    """The program's columns: one per job, kind and cap that fit together."""

    jobs: tuple[SharingJob, ...]
    kinds: tuple[Kind, ...]

    @cached_property
    def columns(self) -> list[tuple[int, int, Cap]]:
        """Number of the job, number of the kind, and cap of each column."""
        return [
            (m, j, cap)
            for m, job in enumerate(self.jobs)
            for j, kind in enumerate(self.kinds)
            if kind.name in job.steps_per_s and kind.machines >= job.workers
            for cap in kind.caps
        ]

    def _speed(self, column: tuple[int, int, Cap]) -> float:
        job = self.jobs[column[0]]
        kind = self.kinds[column[1]]
        cap = column[2]
        return job.steps_per_s[kind.name] * (1 - job.overhead) / (cap.slowdown / kind.caps[0].slowdown)

    def _usd_per_h(self, column: tuple[int, int, Cap]) -> float:
        return self.kinds[column[1]].usd_per_h * self.jobs[column[0]].workers

    def _power_w(self, column: tuple[int, int, Cap]) -> float:
        return column[2].power_w * self.jobs[column[0]].workers

    def fair(self) -> Shares:
        """Maximise the smallest weighted speed, each against what an equal share of everything would give."""
        equal = [self._equal(m) for m in range(len(self.jobs))]
        rows = [[-part for part in row] for row in self._speeds()]
        scaled = [[value / (equal[m] * self.jobs[m].weight) for value in row] for m, row in enumerate(rows)]
        needs = [[*row, 1.0] for row in scaled]
        needs += [[*row, 0.0] for row in rows]
        found = self._solved([0.0] * len(self.columns) + [-1.0], needs, [0.0] * len(self.jobs) + self._needed(), 1)
        if found is None:
            return self.least_short()
        return self._shares(found)

    def cheapest(self, aim: Aim) -> Shares | None:
        """Minimise dollars or joules with every deadline met; None where they cannot be."""
        if aim is Aim.COST:
            each = self._usd_per_h
        else:
            each = self._power_w
        rows = [[-part for part in row] for row in self._speeds()]
        found = self._solved([each(column) for column in self.columns], rows, self._needed(), 0)
        if found is None:
            return None
        return self._shares(found)

    def least_short(self) -> Shares:
        """Minimise the sum of the shares of work that miss their deadlines."""
        count = len(self.columns)
        jobs = len(self.jobs)
        rows = [
            [-part for part in row] + [-self.jobs[m].needed_per_s if m == i else 0.0 for i in range(jobs)]
            for m, row in enumerate(self._speeds())
        ]
        found = self._solved([0.0] * count + [1.0] * jobs, rows, self._needed(), jobs)
        if found is None:
            raise InvalidInput("the shares could not be computed: speeds differ by too many orders of magnitude")
        short = {job.name: found[count + m] for m, job in enumerate(self.jobs) if found[count + m] > 1e-6}
        return self._shares(found, short)

    def _speeds(self) -> list[list[float]]:
        """Return a row per job: what each column adds to its speed."""
        speeds = [(column[0], self._speed(column)) for column in self.columns]
        return [[speed if owner == m else 0.0 for owner, speed in speeds] for m in range(len(self.jobs))]

    def _needed(self) -> list[float]:
        return [-job.needed_per_s for job in self.jobs]

    def _equal(self, m: int) -> float:
        """Return a job's speed with an equal share of every kind's time at the default cap."""
        job = self.jobs[m]
        count = len(self.jobs)
        usable = [kind for kind in self.kinds if kind.name in job.steps_per_s and kind.machines >= job.workers]
        shares = [kind.machines / (count * job.workers) for kind in usable]
        scale = min(1.0, 1 / sum(shares))
        return sum(job.steps_per_s[kind.name] * part * scale for kind, part in zip(usable, shares, strict=True))

    def _solved(
        self, costs: list[float], rows: list[list[float]], limits: list[float], extra: int
    ) -> list[float] | None:
        """Return the solution, each row scaled to its largest entry, or None where there is none."""
        from scipy.optimize import linprog

        space = [[*row, *[0.0] * extra] for row in self._room()]
        every = rows + space
        bounds = limits + self._room_limits()
        scales = [max(map(abs, row), default=1.0) or 1.0 for row in every]
        scaled = [[value / scale for value in row] for row, scale in zip(every, scales, strict=True)]
        most = max(map(abs, costs)) or 1.0
        done = linprog(
            [cost / most for cost in costs],
            A_ub=scaled,
            b_ub=[limit / scale for limit, scale in zip(bounds, scales, strict=True)],
            bounds=(0, None),
            method="highs",
        )
        if done.status == 0:
            return [float(value) for value in done.x]
        return None

    def _room(self) -> list[list[float]]:
        """Return the rows of what there is: time of each job, and machines of each kind."""
        columns = self.columns
        time = [[1.0 if column[0] == m else 0.0 for column in columns] for m in range(len(self.jobs))]
        kinds = [
            [float(self.jobs[column[0]].workers) if column[1] == j else 0.0 for column in columns]
            for j in range(len(self.kinds))
        ]
        return time + kinds

    def _room_limits(self) -> list[float]:
        return [1.0] * len(self.jobs) + [float(kind.machines) for kind in self.kinds]

    def _shares(self, found: list[float], short: Mapping[str, float] | None = None) -> Shares:
        time: dict[str, dict[tuple[str, float | None], float]] = {job.name: {} for job in self.jobs}
        speeds = dict.fromkeys(time, 0.0)
        usd_per_h = power_w = 0.0
        for column, part in zip(self.columns, found, strict=False):
            if part > _TINY:
                name = self.jobs[column[0]].name
                time[name][self.kinds[column[1]].name, column[2].limit_w] = part
                speeds[name] += self._speed(column) * part
                usd_per_h += self._usd_per_h(column) * part
                power_w += self._power_w(column) * part
        return Shares(time, speeds, usd_per_h, power_w, short or {})


# A catalogue of several jobs that share machines: [machines.<name>] with ``most``, and one [[jobs]] table per job.

_JOB = ("name", "steps", "steps_per_s", "workers", "deadline_h", "weight", "overhead", "source")


@dataclass(frozen=True)
class SharedCatalogue:
    """Jobs and the machines they share.

    Attributes:
        file: Where it was read.
        jobs: The jobs, in the order of the file.
        kinds: The machines.
    """

    file: Path
    jobs: tuple[SharingJob, ...]
    kinds: tuple[Kind, ...]


def is_shared(file: Path) -> bool:
    """Return whether a file is a catalogue of several jobs.

    Raises:
        BadFile: If it cannot be read.
    """
    return "jobs" in TomlTable.of_file(file).values


def read_shared(file: Path, market: Market | None = None) -> SharedCatalogue:
    """Return the catalogue in a file.

    Args:
        file: TOML.
        market: Whose prices count; None for on-demand's where there are some, spot's otherwise.

    Raises:
        BadFile: If it cannot be read, or a key is wrong or missing.
    """
    top = TomlTable.of_file(file)
    top.check_keys(("machines", "jobs", "source"))
    kinds = tuple(_kind(name, entry, market) for name, entry in top.each("machines"))
    jobs = tuple(_job(entry, {kind.name for kind in kinds}) for entry in top.listed("jobs"))
    return SharedCatalogue(file, jobs, kinds)


def _kind(name: str, entry: TomlTable, market: Market | None) -> Kind:
    machine, _ = machine_of(name, entry)
    wanted = market or (Market.ON_DEMAND if Market.ON_DEMAND in machine.usd_per_h else Market.SPOT)
    if wanted not in machine.usd_per_h:
        raise entry.wrong("usd_per_h", f"has no price of {wanted}")
    if "most" not in entry.values:
        raise entry.wrong("most", "is missing: say how many of them the jobs share")
    return Kind(name, entry.whole("most", 1), machine.usd_per_h[wanted], machine.caps)


def _job(entry: TomlTable, kinds: set[str]) -> SharingJob:
    entry.check_keys(_JOB)
    speeds = entry.within("steps_per_s")
    if unknown := sorted(set(speeds.values) - kinds):
        raise speeds.wrong(unknown[0], f"is no machine of this file: {', '.join(sorted(kinds))}")
    if "deadline_h" in entry.values:
        deadline_s = entry.number("deadline_h", above=True) * HOUR_S
    else:
        deadline_s = None
    try:
        return SharingJob(
            name=entry.text("name"),
            steps=entry.number("steps", above=True),
            steps_per_s={name: speeds.number(name, above=True) for name in speeds.values},
            workers=entry.whole("workers", 1),
            deadline_s=deadline_s,
            weight=entry.number("weight", 1.0, above=True),
            overhead=entry.number("overhead", 0.0),
        )
    except InvalidInput as error:
        raise entry.wrong("", f"does not hold together: {error}") from error
