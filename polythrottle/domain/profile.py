"""The tuned answer: which point to apply for a workload on a device, and the evidence for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from polythrottle.domain.errors import SloUnmet
from polythrottle.domain.ladder import Ladder
from polythrottle.domain.measurement import Interval, Measurement, saving_interval
from polythrottle.domain.problem import Objective, device_alone
from polythrottle.domain.space import OperatingPoint
from polythrottle.domain.study import WORTHWHILE, Study, card_html, show_energy, show_point, show_saving
from polythrottle.domain.units import show_name

_TIGHT = 300
"""A limit that the closest trial misses by so many times looks as if its unit were wrong; seconds for milliseconds are
1,000."""


@dataclass(frozen=True, repr=False)
class Profile:
    """An operating point with its evidence.

    Args:
        device: URI of the device it was tuned on.
        workload: URI of the workload.
        point: What to apply.
        measurement: What was seen there.
        default: What was seen at the device's default point, or None if that failed.
        slo: The constraints it holds, with absolute limits, as text.
        provenance: Where the answer comes from: method, seed, trials, journal, version, date.
        identity: Hardware and firmware it was tuned on, as `polythrottle.storage.identity` knows them; empty if
            unknown.
        workload_knobs: Which knobs of the point belong to the workload; None if nobody noted it.
        ladder: Which point to apply along load; None if that is not known.
    """

    device: str
    workload: str
    point: OperatingPoint
    measurement: Measurement
    default: Measurement | None = None
    slo: tuple[str, ...] = ()
    provenance: Mapping[str, str | int] = field(default_factory=dict)
    identity: Mapping[str, str] = field(default_factory=dict)
    workload_knobs: tuple[str, ...] | None = None
    ladder: Ladder | None = None

    @property
    def saving_fraction(self) -> float | None:
        """The share of the default's energy per item that is saved, or None if the default is unknown."""
        if self.default is None:
            return None
        return 1.0 - self.measurement.energy_j / self.default.energy_j

    @property
    def saving(self) -> Interval | None:
        """The 95 % interval of that share; None where energies have no intervals. Proven only if it excludes 0."""
        if self.default is None:
            return None
        return saving_interval(self.measurement, self.default)

    @property
    def model_digest(self) -> str | None:
        """The digest of the model it was tuned for (`polythrottle.storage.identity.content_digest`); None if unknown.

        Known of a model that is a file, or one the catalogue describes.
        """
        contents = (part.partition("=") for part in str(self.provenance.get("content", "")).split())
        return next((digest for name, _, digest in contents if name == "model" and digest), None)

    @property
    def model_path(self) -> Path | None:
        """Where the model lay that it was tuned for, whatever folder that was said from; None if it is no file."""
        path = self.provenance.get("model")
        if isinstance(path, str) and path:
            return Path(path)
        return None

    def __repr__(self) -> str:
        saved = show_saving(self.saving_fraction, self.saving).partition(";")[0]
        words = ", ".join(filter(None, (show_point(self.point), show_energy(self.measurement), saved)))
        return f"<Profile of {self.workload or 'workload'} on {self.device or 'device'}: {words}>"

    def _repr_html_(self) -> str:
        heading = f"Profile of {self.workload or 'workload'} on {self.device or 'device'}"
        return card_html(heading, self.lines(), (self.measurement.energy_kind,))

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield what a person wants to know of the profile, each with its name: answer, saving, SLO, trials."""
        yield "answer", show_point(self.point)
        yield "energy", show_energy(self.measurement)
        yield "saving", show_saving(self.saving_fraction, self.saving)
        yield "SLO", ", ".join(self.slo) or "none"
        if "trials" in self.provenance:
            date = ""
            if "date" in self.provenance:
                date = f", {self.provenance['date']}"
            yield "trials", f"{self.provenance['trials']} by {self.provenance.get('method', 'an unknown method')}{date}"
        if self.ladder is not None:
            rungs = self.ladder.rungs
            yield "ladder", f"{len(rungs)} rung{'s' * (len(rungs) > 1)} up to {rungs[-1].rate_per_s:.4g} requests/s"

    @classmethod
    def of(cls, study: Study, provenance: Mapping[str, str | int]) -> Profile:
        """Return the profile a study has arrived at.

        Raises:
            SloUnmet: If no trial holds every constraint; says which came closest and by how much.
        """
        best = study.best
        if best is None or best.measurement is None:
            raise SloUnmet(_nearest_miss(study))
        default = study.default
        return cls(
            device=study.problem.device,
            workload=study.problem.workload,
            point=best.point,
            measurement=best.measurement,
            default=default.measurement if default else None,
            slo=tuple(str(constraint) for constraint in study.constraints),
            provenance={**_searched(study), **provenance},
        )


@dataclass(frozen=True)
class Verdict:
    """Which of two profiles a user should have.

    Args:
        keeps: Whether the older.
        words: Why.
        aside: Why the older is worth keeping beside the newer to which it gives way: it is better, by knobs or levels
            that the newer study was not to search; empty if it is not.
    """

    keeps: bool
    words: str
    aside: str = ""


def verdict(older: Profile, study: Study) -> Verdict:
    """Return whether an older profile is still the better answer to what a study asked.

    It is if it answers the same question (device and workload with their contents, objective, SLO), its point is in
    the study's space, what was measured there holds the study's limits, also where this study went there, and it beats
    the study's best by more than `WORTHWHILE`: of two that are as good, the newer is the better evidence.

    Args:
        older: What was answered before.
        study: Has a best trial.
    """
    best = study.best
    assert best is not None
    assert best.measurement is not None
    if (why := _beside_the_point(older, study)) is not None:
        return Verdict(False, f"it was for {why}")
    objective = study.problem.objective
    before = objective.of(older.measurement)
    after = objective.of(best.measurement)
    better = ""
    if before < (1 - WORTHWHILE) * after:
        better = f"it takes {1 - before / after:.1%} less {objective.words}"
    if (knobs := _other_knobs(older, study)) is not None:
        # Whoever narrows a search, by --knobs or a permit, wants its answer, and may want the wider one again.
        return Verdict(False, f"it was for {knobs}", better)
    if better:
        return Verdict(True, better)
    if after < (1 - WORTHWHILE) * before:
        return Verdict(False, f"this one takes {1 - after / before:.1%} less {objective.words}")
    return Verdict(False, f"both are as good within {WORTHWHILE:.0%}, and this one is newer")


def _beside_the_point(older: Profile, study: Study) -> str | None:
    """Return what else than this study's question an older profile answers; None if it answers that."""
    problem = study.problem
    now = _searched(study)
    pairs = (
        (device_alone(older.device), device_alone(problem.device)),
        (older.workload, problem.workload),
        (str(older.provenance.get("objective", Objective.ENERGY)), str(problem.objective)),
        # Limits as they were written: those in `slo` are absolute, and a multiple comes out differently each time.
        (str(older.provenance.get("asked", " ".join(older.slo))), str(now["asked"])),
    )
    other = next((was or "no SLO" for was, asked in pairs if was != asked), None)
    if other is not None:
        return other
    # A profile that says nothing of contents is taken at its word.
    if older.provenance.get("content", now["content"]) != now["content"]:
        return "other contents of device or workload"
    if not _holds(older.measurement, study):
        return "other limits"
    now_there = [trial for trial in study.completed if trial.point == older.point]
    # What was measured then says less of today's server than a window of now at the same point.
    if now_there and not any(map(study.feasible, now_there)):
        return "limits that its point breaks now"
    return None


def _other_knobs(older: Profile, study: Study) -> str | None:
    """Return what an older profile sets that is not in a study's space; None if its point is one of that."""
    problem = study.problem
    if older.point in problem.space:
        return None
    if older.device != problem.device and set(older.point) != set(problem.space.names):
        return f"other knobs: {', '.join(map(show_name, older.point))}"
    return "other knobs or levels"


def _holds(measurement: Measurement, study: Study) -> bool:
    known = all(measurement.metric(constraint.metric) is not None for constraint in study.constraints)
    return known and study.holds(measurement)


def _searched(study: Study) -> dict[str, str | int]:
    """Return what was asked and how the answer was looked for; what was minimised only where it is not energy."""
    problem = study.problem
    if problem.objective is Objective.ENERGY:
        minimised = {}
    else:
        minimised = {"objective": str(problem.objective)}
    return {
        "asked": " ".join(map(str, problem.constraints)),
        "arrivals": str(problem.arrivals),
        "content": " ".join(f"{name}={digest}" for name, digest in sorted(problem.content.items())),
        # By itself besides: the line of contents is divided at its blanks, and this is in words.
        **{name: told for name, told in problem.content.items() if name == "runs_on"},
        "method": study.method,
        "seed": study.seed,
        "trials": len(study.trials),
        **minimised,
    }


def _nearest_miss(study: Study) -> str:
    closest = study.closest
    if closest is None or closest.measurement is None:
        return "no trial was measured, so no point is known to hold the SLO"
    worst = max(study.constraints, key=lambda constraint: constraint.excess(closest.measurement))  # type: ignore[arg-type]
    over = worst.excess(closest.measurement)
    none = f"none of {len(study.completed):,} measured points holds"
    if len(study.completed) == 1:
        none = "the one measured point does not hold"
    hint = ""
    # A multiple has no unit to be mistaken in.
    if worst.timed and not worst.relative and over >= _TIGHT:
        meant = str(replace(worst, limit=1000 * worst.limit)).replace(" ", "")
        hint = f"; was {meant} meant?"
    return (
        f"{none} {' and '.join(map(str, study.constraints))}; "
        f"trial {closest.number} came closest and misses {worst} by {worst.show_excess(closest.measurement, 1)} "
        f"({show_point(closest.point)}){hint}"
    )
