"""What a fleet knows of a machine type and a network: every node's own windows, in the job's store, and their middle.

Each node writes one file of its own, so that nobody waits for anybody and two controllers cannot spoil each other's
words: ``knowledge/<gpu>/<network>/<node>.json``. What a node says of a cap is relative to its own default, so that its
silicon cancels; the fleet takes medians, so that one node that lies or is broken moves nothing.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite
from statistics import median
from typing import Any, Protocol

from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.gpu_variability import flagged
from polythrottle.domain.fleet.transient_machine import Cap
from polythrottle.storage.untrusted import MALFORMED

VERSION = 1
FOLDER = "knowledge"
_MOST_LOOKS = 1000
_ALONE = 0.02
"""How far off a slowdown that only one node saw may be, as a fraction."""


class KnowledgeStore(Protocol):
    """A store of files, such as `polythrottle.storage.object_store.Store`."""

    def write(self, name: str, data: bytes) -> None:
        """Write a file whole or not at all."""

    def read(self, name: str) -> bytes:
        """Return a file's content."""

    def names(self, folder: str = "") -> list[str]:
        """Return the names of the files in a folder."""


@dataclass(frozen=True)
class CapObservation:
    """What a node saw under one cap, its data cache warm.

    Attributes:
        limit_w: Power limit of each GPU in watts; None for the default.
        step_s: Median step time of its windows, in seconds.
        power_w: Mean power of the machine while it works, in watts; what it draws while it waits for others counts to
            its own work, so that power × step time is the joules of a step.
        windows: How many windows there were.
    """

    limit_w: float | None
    step_s: float
    power_w: float
    windows: int = 1

    def __post_init__(self) -> None:
        numbers = (self.step_s, self.power_w, 1.0 if self.limit_w is None else self.limit_w)
        if not all(isfinite(number) and number > 0 for number in numbers) or self.windows < 1:
            raise InvalidInput(
                f"a look has a limit, a step time and a power above 0 and at least one window, not {self}"
            )


@dataclass(frozen=True)
class NodeReport:
    """What one node says.

    Attributes:
        node: Its name.
        gpu: GPU model.
        network: What is trained.
        looks: What it saw; one of them at the default.
    """

    node: str
    gpu: str
    network: str
    looks: tuple[CapObservation, ...]

    @property
    def default(self) -> CapObservation | None:
        """Return what it saw at the default cap, None if it has not looked there."""
        return next((look for look in self.looks if look.limit_w is None), None)

    def slowdowns(self) -> dict[float, tuple[float, float]]:
        """Return slowdown and power share against its own default, by limit in watts."""
        if (default := self.default) is None:
            return {}
        return {
            look.limit_w: (look.step_s / default.step_s, look.power_w / default.power_w)
            for look in self.looks
            if look.limit_w is not None
        }


@dataclass(frozen=True)
class Knowledge:
    """What all nodes of a type say of one network.

    Attributes:
        gpu: GPU model.
        network: What is trained.
        told: What each node says.
    """

    gpu: str
    network: str
    told: tuple[NodeReport, ...] = ()

    @property
    def default(self) -> CapObservation | None:
        """Return the middle of what nodes saw at the default, None if nobody has looked."""
        looks = [look for each in self.told if (look := each.default) is not None]
        if not looks:
            return None
        step_s = median(look.step_s for look in looks)
        power_w = median(look.power_w for look in looks)
        return CapObservation(None, step_s, power_w, sum(look.windows for look in looks))

    def caps(self) -> tuple[Cap, ...]:
        """Return the caps the fleet knows, the default first, then by falling limit; none if it knows no default."""
        if (default := self.default) is None:
            return ()
        observed = self._seen()
        return (
            Cap(None, 1.0, default.power_w),
            *(
                Cap(limit_w, median(slow for slow, _ in pairs), median(share for _, share in pairs) * default.power_w)
                for limit_w, pairs in sorted(observed.items(), reverse=True)
            ),
        )

    def doubt(self, limit_w: float) -> float:
        """Return how far a newcomer's slowdown under a cap may be from the fleet's, as a fraction; infinite if unseen.

        Three median absolute deviations of what nodes saw, and no less than two per cent.
        """
        slowdowns = [slow for slow, _ in self._seen().get(limit_w, [])]
        if not slowdowns:
            return inf
        middle = median(slowdowns)
        return max(_ALONE, 3 * median(abs(slow - middle) for slow in slowdowns))

    def factors(self) -> dict[str, float]:
        """Return each node's step time at the default over the fleet's middle."""
        if (default := self.default) is None:
            return {}
        return {each.node: look.step_s / default.step_s for each in self.told if (look := each.default) is not None}

    def flagged(self) -> dict[str, float]:
        """Return nodes that stand out by more than three median absolute deviations, and by how many."""
        return flagged(self.factors())

    def _seen(self) -> dict[float, list[tuple[float, float]]]:
        pairs: dict[float, list[tuple[float, float]]] = {}
        for each in self.told:
            for limit_w, pair in each.slowdowns().items():
                pairs.setdefault(limit_w, []).append(pair)
        return pairs


def keep(store: KnowledgeStore, report: NodeReport) -> str:
    """Write what a node says into a store, in place of what it said before, and return the file's name.

    Raises:
        InvalidInput: If node, GPU or network have names that no file can have.
        StorageError: If the store cannot be written.
    """
    name = f"{_folder(report.gpu, report.network)}/{_safe(report.node)}.json"
    store.write(name, json.dumps({"version": VERSION, **asdict(report)}, indent=1).encode())
    return name


def recall(store: KnowledgeStore, gpu: str, network: str) -> tuple[Knowledge, tuple[str, ...]]:
    """Return what a store knows of a type and a network, and a line for each file that is none.

    Raises:
        InvalidInput: If GPU or network have names that no file can have.
        StorageError: If the store cannot be reached.
    """
    folder = _folder(gpu, network)
    reports: list[NodeReport] = []
    notes: list[str] = []
    for name in store.names(folder):
        if not name.endswith(".json"):
            continue
        try:
            reports.append(_told(json.loads(store.read(f"{folder}/{name}")), gpu, network))
        except FileNotFoundError:  # its node has just withdrawn it
            continue
        except InvalidInput as error:
            notes.append(f"{folder}/{name} holds no node's knowledge and is left out: {error}")
        # One machine's damaged file must not keep the others' from a whole fleet.
        except MALFORMED:
            notes.append(
                f"{folder}/{name} holds no node's knowledge and is left out: it is damaged or not of this kind"
            )
    return Knowledge(gpu, network, tuple(reports)), tuple(notes)


def stored(store: KnowledgeStore) -> tuple[tuple[str, str], ...]:
    """Return the pairs of GPU and network that a store knows something of.

    Raises:
        StorageError: If the store cannot be reached.
    """
    return tuple((gpu, network) for gpu in store.names(FOLDER) for network in store.names(f"{FOLDER}/{gpu}"))


def _told(document: Mapping[str, Any], gpu: str, network: str) -> NodeReport:
    if document["version"] != VERSION:
        raise InvalidInput(f"it is of version {document['version']!r}; this release reads {VERSION}")
    looks: Sequence[Mapping[str, Any]] = document["looks"]
    if len(looks) > _MOST_LOOKS or (document["gpu"], document["network"]) != (gpu, network):
        raise InvalidInput("it is of another GPU or network, or too long")
    names = ("limit_w", "step_s", "power_w", "windows")
    return NodeReport(
        # Another machine has written it, and it is printed, and compared with names of nodes here.
        _safe(document["node"]),
        gpu,
        network,
        tuple(CapObservation(**{key: look[key] for key in names}) for look in looks),
    )


def _folder(gpu: str, network: str) -> str:
    return f"{FOLDER}/{_safe(gpu)}/{_safe(network)}"


def _safe(name: str) -> str:
    # It becomes part of a path or a URL: no slash, and no dot at the beginning.
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+@-]{0,99}", name):
        raise InvalidInput(f"{name[:40]!r} cannot be the name of a file; use letters, digits and . _ + @ -")
    return name
