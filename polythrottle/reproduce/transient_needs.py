"""What tables of transient training must hold so that the papers' figures can be set beside the models'."""

from collections.abc import Sequence
from pathlib import Path

from polythrottle.cluster.tables import (
    CheckpointRow,
    LifetimeRow,
    SpeedRow,
    StartupRow,
    StepRow,
    checkpoint_rows,
    job_rows,
    lifetime_rows,
    speed_rows,
    startup_rows,
    step_rows,
)
from polythrottle.errors import BadFile
from polythrottle.reproduce.transient_lives import FILES
from polythrottle.reproduce.transient_published import NETWORKS, STARTUP_S

_WORKERS = range(1, 9)
_TRAINED = ("K80", 1, "res32")
_FEWEST = 2


def check_tables(folder: Path) -> None:
    """Check that every table is there and holds what the papers' figures are made of.

    Args:
        folder: Where the tables are.

    Raises:
        BadFile: If one is missing, damaged or holds too little; says which, and what it needs.
    """
    steps, checkpoints = folder / "training_speed_by_network_cmdare.csv", folder / "gcp_checkpoint_times_cmdare.csv"
    speeds, starts = folder / "training_speed_by_cluster_size_cmdare.csv", folder / "gcp_startup_times_cmdare.csv"
    job_rows(folder / "gcp_transient_training_runs.csv")
    for path, lack in (
        (steps, _steps_lack(step_rows(steps))),
        (speeds, _speeds_lack(speed_rows(speeds))),
        (checkpoints, _checkpoints_lack(checkpoint_rows(checkpoints))),
        (starts, _starts_lack(startup_rows(starts))),
        *((folder / name, _lives_lack(lifetime_rows(folder / name))) for name in FILES[1:]),
        (folder / FILES[0], _lives_lack(lifetime_rows(folder / FILES[0]), "K80")),
    ):
        if lack:
            raise BadFile(f"{path} cannot be set beside the papers: {lack}")


def _steps_lack(rows: Sequence[StepRow]) -> str:
    for gpu in dict.fromkeys(row.gpu for row in rows):
        if sum(row.gpu == gpu for row in rows) < _FEWEST:
            return f"it has one network only on {gpu}; a network is predicted from the others on its type"
    return ""


def _speeds_lack(rows: Sequence[SpeedRow]) -> str:
    found: dict[tuple[str, int, str], set[int]] = {}
    for row in rows:
        found.setdefault((row.gpu, row.servers, row.network), set()).add(row.workers)
    for (gpu, servers, network), workers in found.items():
        if absent := [str(count) for count in _WORKERS if count not in workers]:
            where = f"{network} on {gpu} with {servers} parameter server{'s' * (servers > 1)}"
            return f"the curve of {where} has no speed with {', '.join(absent)} workers; each needs 1 to 8"
    if _TRAINED not in found:
        return "it has no curve of res32 on K80 with one parameter server"
    if sum(network in NETWORKS for _, _, network in found) < _FEWEST:
        return f"it needs at least two curves of {', '.join(NETWORKS)}"
    return ""


def _checkpoints_lack(rows: Sequence[CheckpointRow]) -> str:
    if len({row.network for row in rows}) < _FEWEST:
        return "it has one network only; a checkpoint is predicted from those of others"
    return ""


def _starts_lack(rows: Sequence[StartupRow]) -> str:
    for gpu, transient in STARTUP_S:
        if not any((row.gpu, row.transient) == (gpu, transient) for row in rows):
            return f"it has no start of {'a preemptible' if transient else 'an on-demand'} {gpu}"
    return ""


def _lives_lack(rows: Sequence[LifetimeRow], gpu: str = "") -> str:
    if gpu and not any(row.gpu == gpu for row in rows):
        return f"it has no {gpu}, whose lives ICAC's clusters are predicted from"
    starts: dict[tuple[str, str], set[object]] = {}
    for row in rows:
        starts.setdefault((row.gpu, row.region), set()).add(row.start)
    if all(len(some) < _FEWEST for some in starts.values()):
        return "no type and region has machines started at two times; later ones are predicted from earlier ones"
    return ""
