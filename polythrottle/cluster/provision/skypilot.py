"""A plan as a SkyPilot task file: text only, so that nothing of SkyPilot is needed to write or read it.

Fields after the documentation (docs.skypilot.co, reference "SkyPilot YAML"): name, num_nodes, resources with infra,
accelerators, instance_type, use_spot and job_recovery, envs, run. A managed job (``sky jobs launch``) is started again
elsewhere when a machine is taken away; it goes on from the newest checkpoint in a bucket, if the command writes there.
"""

import json
import re

from polythrottle.cluster.machine import Market
from polythrottle.cluster.plan.offer import Option
from polythrottle.errors import InvalidInput

_CLOUDS = {"aws": "aws", "gcp": "gcp", "google": "gcp", "azure": "azure"}
_AWS_TYPE = re.compile(r"[a-z]+\d+[a-z]*\.\d*x?large|[a-z]+\d+[a-z]*\.(?:metal|micro|small|medium)")
_GPU = re.compile(r"[A-Za-z0-9._-]+")


def task_text(option: Option, command: str) -> str:
    """Return the text of a task file for an option of a plan.

    Args:
        option: Machines, market, cap and interval.
        command: What each machine executes.

    Raises:
        InvalidInput: If the command is empty, or the GPU has a name that SkyPilot cannot have.
    """
    machine = option.offer.machine
    if not command.strip():
        raise InvalidInput("a task needs a command for each machine to execute")
    if not _GPU.fullmatch(machine.gpu):
        raise InvalidInput(f"SkyPilot knows no GPU called {machine.gpu!r}; write its model, for example V100")
    lines = [
        f"name: {json.dumps(_name(option.work.name))}",
        f"num_nodes: {option.machines}",
        "resources:",
        *(f"  {key}: {value}" for key, value in _resources(option)),
        "envs:",
        *(f"  {key}: {json.dumps(value)}" for key, value in _environment(option)),
        "run: |",
        *(f"  {line}" for line in command.strip().splitlines()),
    ]
    return "\n".join(lines) + "\n"


def _resources(option: Option) -> list[tuple[str, str]]:
    machine = option.offer.machine
    infra = _infra(machine.name, machine.region)
    kind = machine.name if _AWS_TYPE.fullmatch(machine.name) else ""
    spot = option.market is Market.SPOT
    return [
        *([("infra", infra)] if infra else []),
        ("accelerators", f"{machine.gpu}:{machine.gpus}"),
        *([("instance_type", kind)] if kind else []),
        ("use_spot", "true" if spot else "false"),
        *([("job_recovery", "EAGER_NEXT_REGION")] if spot and not infra.count("/") else []),
        *([("job_recovery", "FAILOVER")] if spot and infra.count("/") else []),
    ]


def _environment(option: Option) -> list[tuple[str, str]]:
    """Return what the command and the node's own daemon need to know of the plan."""
    cap_w, every_s = option.choice.cap.limit_w, option.choice.interval_s
    return [
        *([("POLYTHROTTLE_CAP_W", f"{cap_w:g}")] if cap_w is not None else []),
        *([("POLYTHROTTLE_INTERVAL_S", f"{every_s:.0f}")] if every_s < 1e9 else []),
        ("POLYTHROTTLE_MACHINES", str(option.machines)),
    ]


def _infra(name: str, region: str) -> str:
    """Return cloud and region, as far as a machine's name and region say them."""
    words = re.split(r"[^a-z]+", name.lower())
    cloud = next((_CLOUDS[word] for word in words if word in _CLOUDS), "aws" if _AWS_TYPE.fullmatch(name) else "")
    return f"{cloud}/{region}" if cloud and region else cloud


def _name(work: str) -> str:
    """Return a task's name: letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", work.lower()).strip("-")[:40] or "job"
