"""The tuned answer: which point to apply for a workload on a device, and the evidence for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from polythrottle.errors import SloUnmet
from polythrottle.measurement import Measurement
from polythrottle.problem import Objective
from polythrottle.space import OperatingPoint
from polythrottle.study import Study


@dataclass(frozen=True)
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
    """

    device: str
    workload: str
    point: OperatingPoint
    measurement: Measurement
    default: Measurement | None = None
    slo: tuple[str, ...] = ()
    provenance: Mapping[str, str | int] = field(default_factory=dict)

    @property
    def saving_fraction(self) -> float | None:
        """The share of the default's energy per item that is saved, or None if the default is unknown."""
        return None if self.default is None else 1.0 - self.measurement.energy_j / self.default.energy_j

    @classmethod
    def of(cls, study: Study, provenance: Mapping[str, str | int]) -> "Profile":
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


def _searched(study: Study) -> dict[str, str | int]:
    """Return how the answer was looked for; what was minimised only where it is not energy."""
    objective = study.problem.objective
    minimised = {} if objective is Objective.ENERGY else {"objective": str(objective)}
    return {"method": study.method, "seed": study.seed, "trials": len(study.trials), **minimised}


def _nearest_miss(study: Study) -> str:
    closest = study.closest
    if closest is None or closest.measurement is None:
        return "no trial was measured, so no point is known to hold the SLO"
    worst = max(study.constraints, key=lambda constraint: constraint.excess(closest.measurement))  # type: ignore[arg-type]
    over = worst.excess(closest.measurement)
    point = ", ".join(f"{name}={level}" for name, level in closest.point.items())
    return (
        f"none of {len(study.completed)} measured points holds {' and '.join(map(str, study.constraints))}; "
        f"trial {closest.number} came closest and misses {worst} by {over:.1%} ({point})"
    )
