"""A plan or a training as a SkyPilot task file: text only, so that nothing of SkyPilot is needed to write or read it.

Fields after the documentation (docs.skypilot.co, reference "SkyPilot YAML"): name, workdir, num_nodes, resources with
infra, accelerators, instance_type, use_spot and job_recovery, envs, secrets, setup, run. Nodes know each other by
SKYPILOT_NODE_IPS and SKYPILOT_NODE_RANK (guide "Distributed Multi-Node Jobs"). A managed job (``sky jobs launch``) is
started again elsewhere, all its nodes, when a machine is taken away; it goes on from the newest checkpoint in a bucket.
"""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from polythrottle.cluster.plan.options import Option
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import Market

_CLOUDS = {"aws": "aws", "gcp": "gcp", "google": "gcp", "azure": "azure"}
_AWS_TYPE = re.compile(r"[a-z]+\d+[a-z]*\.\d*x?large|[a-z]+\d+[a-z]*\.(?:metal|micro|small|medium)")
_GPU = re.compile(r"[A-Za-z0-9._-]+")
_ACCELERATORS = re.compile(r"[A-Za-z0-9._-]+(:[1-9]\d{0,2})?")
_DRIVERS = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
SECRET = "POLYTHROTTLE_TOKEN"
PORT = 7070


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


@dataclass(frozen=True)
class Training:
    """An elastic training that SkyPilot is to start.

    Attributes:
        name: What the job is called.
        nodes: How many, all of which SkyPilot starts before any of them.
        accelerators: Of each node, such as ``V100:1``; empty for machines without.
        store: URL of the checkpoints.
        serving: More words for the controller, which stands on the first node.
        joining: More words for each node.
        script: The training script, in the folder from which the job is launched.
        words: Its arguments.

    Raises:
        InvalidInput: If the accelerators have a name that SkyPilot cannot have.
    """

    name: str
    nodes: int
    accelerators: str
    store: str
    serving: Sequence[str]
    joining: Sequence[str]
    script: str
    words: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.accelerators and not _ACCELERATORS.fullmatch(self.accelerators):
            raise InvalidInput(f"accelerators are written V100:1, not {self.accelerators[:40]!r}")


def training_text(training: Training) -> str:
    """Return the text of a task file that trains on spot machines, to be launched as a managed job.

    The first node is the controller's as well. The token is a secret that is given when the job is launched.
    """
    command = "python -m polythrottle cluster train"
    serving = shlex.join(["--store", training.store, *training.serving])
    joining = shlex.join(training.joining)
    script = shlex.join([training.script, *(["--", *training.words] if training.words else [])])
    lines = [
        f"name: {json.dumps(_name(training.name))}",
        "workdir: .",
        f"num_nodes: {training.nodes}",
        "resources:",
        *([f"  accelerators: {training.accelerators}"] if training.accelerators else []),
        "  use_spot: true",
        "  job_recovery: EAGER_NEXT_REGION",
        "secrets:",
        f"  {SECRET}: null",
        "setup: |",
        f"  {' '.join(['python -m pip install polythrottle torch', *_drivers(training.store)])}",
        "run: |",
        "  set -e",
        "  umask 077",
        f'  printf %s "${SECRET}" > "$HOME/.polythrottle-token"',
        f'  at="$(echo "$SKYPILOT_NODE_IPS" | head -n1):{PORT} --token-file $HOME/.polythrottle-token"',
        '  if [ "$SKYPILOT_NODE_RANK" = 0 ]; then',
        f"    {command} --serve $at {serving} &",
        "    controller=$!",
        "  fi",
        f'  {command} --join $at --node "node$SKYPILOT_NODE_RANK" {joining} {script}',
        '  if [ "$SKYPILOT_NODE_RANK" = 0 ]; then wait "$controller"; fi',
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _drivers(store: str) -> list[str]:
    """Return the packages by which fsspec opens a URL."""
    return [package for scheme, package in _DRIVERS.items() if store.startswith(f"{scheme}://")]


def _resources(option: Option) -> list[tuple[str, str]]:
    machine = option.offer.machine
    infra = _infra(machine.name, machine.region)
    kind = ""
    if _AWS_TYPE.fullmatch(machine.name):
        kind = machine.name
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
    cap_w = option.choice.cap.limit_w
    every_s = option.choice.interval_s
    return [
        *([("POLYTHROTTLE_CAP_W", f"{cap_w:g}")] if cap_w is not None else []),
        *([("POLYTHROTTLE_INTERVAL_S", f"{every_s:.0f}")] if every_s < 1e9 else []),
        ("POLYTHROTTLE_MACHINES", str(option.machines)),
    ]


def _infra(name: str, region: str) -> str:
    """Return cloud and region, as far as a machine's name and region say them."""
    words = re.split(r"[^a-z]+", name.lower())
    cloud = next((_CLOUDS[word] for word in words if word in _CLOUDS), "aws" if _AWS_TYPE.fullmatch(name) else "")
    if cloud and region:
        return f"{cloud}/{region}"
    return cloud


def _name(work: str) -> str:
    """Return a task's name: letters, digits and hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", work.lower()).strip("-")[:40] or "job"
