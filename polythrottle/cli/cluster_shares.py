"""Shares of machines as a table for people and as a document for programs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polythrottle.cluster.plan.front import Aim
    from polythrottle.cluster.plan.sharing import Job, Shares
    from polythrottle.cluster.shared import SharedCatalogue

_NOUNS = {"time": "the fairest shares of time", "cost": "fewest dollars", "energy": "fewest joules"}


def printed(found: "tuple[SharedCatalogue, Shares, Aim]") -> None:
    """Print who gets what in at most 80 columns."""
    from rich.console import Console
    from rich.table import Table

    from polythrottle.cli.texts import named_lines

    catalogue, shares, aim = found
    console = Console(highlight=False, markup=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("job", overflow="fold")
    for name in ("steps/s", "done in", "deadline"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("shares of time", overflow="fold")
    for job in catalogue.jobs:
        table.add_row(*_row(job, shares))
    from polythrottle.cli.unpadded import Unpadded

    console.print(Unpadded(table))
    lines = [
        ("chosen", f"for {_NOUNS[str(aim)]}; estimated from the speeds given"),
        ("rates", f"{shares.usd_per_h:.4g} usd/h and {shares.power_w:.4g} W on average, of machines in use"),
    ]
    console.print(named_lines(lines + ([("infeasible", missed(catalogue.jobs, shares))] if shares.short else [])))


def _row(job: "Job", shares: "Shares") -> tuple[str, ...]:
    speed = shares.steps_per_s[job.name]
    parts = [
        f"{share:.0%} {kind}{'' if limit_w is None else f' at {limit_w:g} W'}"
        for (kind, limit_w), share in shares.time[job.name].items()
    ]
    return (
        job.name,
        f"{speed:.4g}",
        f"{job.steps / speed / 3600:.4g} h" if speed > 0 else "never",
        "none" if job.deadline_s is None else f"{job.deadline_s / 3600:.4g} h",
        ", ".join(parts) or "none",
    )


def missed(jobs: "Sequence[Job]", shares: "Shares") -> str:
    """Return which jobs fall short of their deadlines and by how much, as a sentence."""
    late = {job.name: job.deadline_s for job in jobs if job.deadline_s is not None}
    parts = [f"{name} by {short:.1%} of its steps in {late[name] / 3600:.4g} h" for name, short in shares.short.items()]
    return f"not every job can meet its deadline; short at least: {', '.join(parts)}"


def document(found: "tuple[SharedCatalogue, Shares, Aim]") -> dict[str, Any]:
    """Return the shares as a document."""
    catalogue, shares, aim = found
    return {
        "minimise": str(aim),
        "feasible": shares.feasible,
        "kind": "estimated",
        "usd_per_h": shares.usd_per_h,
        "power_w": shares.power_w,
        "jobs": [
            {
                "job": job.name,
                "steps_per_s": shares.steps_per_s[job.name],
                "time_s": job.steps / shares.steps_per_s[job.name] if shares.steps_per_s[job.name] > 0 else None,
                "deadline_s": job.deadline_s,
                "short": shares.short.get(job.name, 0.0),
                "shares": [
                    {"machine": kind, "cap_w": limit_w, "share": share}
                    for (kind, limit_w), share in shares.time[job.name].items()
                ],
            }
            for job in catalogue.jobs
        ],
    }
