"""Tables of whole clusters and start-ups that CM-DARE and ICAC published, to be set beside predictions."""

from dataclasses import dataclass
from pathlib import Path

from polythrottle.cluster.recorded_tables import read_rows
from polythrottle.storage.cells import Cells


@dataclass(frozen=True)
class SpeedRow:
    """Speed of a cluster of like workers.

    Attributes:
        gpu: GPU model of the workers.
        servers: Number of parameter servers.
        network: Name of the network.
        workers: Number of workers.
        steps_per_s: Median speed of the cluster in steps per second.
    """

    gpu: str
    servers: int
    network: str
    workers: int
    steps_per_s: float


def speed_rows(path: Path) -> tuple[SpeedRow, ...]:
    """Return a table of cluster speeds, in the format of ``training_speed_by_cluster_size_cmdare.csv``.

    Raises:
        BadFile: If the file is no such table.
    """
    return read_rows(path, ("gpu", "parameter_servers", "model", "workers", "steps_per_s_median"), _speed_row)


def _speed_row(cells: Cells) -> SpeedRow:
    return SpeedRow(
        cells.text("gpu"),
        cells.whole("parameter_servers"),
        cells.text("model"),
        cells.whole("workers"),
        cells.number("steps_per_s_median"),
    )


@dataclass(frozen=True)
class StartupRow:
    """Start-up of one machine, by phase.

    Attributes:
        gpu: GPU model.
        region: Where it was started.
        transient: Whether it can be taken away.
        phases_s: Provisioning, staging and booting, in seconds.
    """

    gpu: str
    region: str
    transient: bool
    phases_s: tuple[float, float, float]


def startup_rows(path: Path) -> tuple[StartupRow, ...]:
    """Return a table of start-up times, in the format of ``gcp_startup_times_cmdare.csv``.

    Raises:
        BadFile: If the file is no such table.
    """
    return read_rows(path, ("gpu", "region", "market", "provisioning_s", "staging_s", "booting_s"), _startup_row)


def _startup_row(cells: Cells) -> StartupRow:
    if (market := cells.text("market")) not in {"preemptible", "spot", "on_demand", "on-demand"}:
        raise cells.bad("market", f"is {market[:40]!r}; it is preemptible or on_demand")
    phases = tuple(cells.number(f"{phase}_s", 0.0) for phase in ("provisioning", "staging", "booting"))
    return StartupRow(cells.text("gpu"), cells.text("region"), market in {"preemptible", "spot"}, phases)  # type: ignore[arg-type]


@dataclass(frozen=True)
class JobRow:
    """One whole training on a cluster.

    Attributes:
        cluster: Its name in the source, for example ``2ps4v``: two parameter servers, four V100.
        duration_s: From its first step to its last, in seconds.
        usd: What it cost.
        accuracy: Of the trained network, a fraction.
    """

    cluster: str
    duration_s: float
    usd: float
    accuracy: float


def job_rows(path: Path) -> tuple[JobRow, ...]:
    """Return a table of whole trainings, in the format of ``gcp_transient_training_runs.csv``.

    Raises:
        BadFile: If the file is no such table.
    """
    return read_rows(path, ("cluster", "duration_s", "accuracy", "cost_usd"), _job_row)


def _job_row(cells: Cells) -> JobRow:
    number = cells.number
    return JobRow(cells.text("cluster"), number("duration_s"), number("cost_usd"), number("accuracy", 0.0))
