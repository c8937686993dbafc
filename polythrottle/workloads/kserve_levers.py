"""What of a model's configuration can be tuned on a server that loads models on request, such as Triton.

Source: Triton's model repository extension, load with the parameter ``config``,
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_model_repository.md, and model
configuration, ``dynamic_batching.max_queue_delay_microseconds`` and ``instance_group.count``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polythrottle.errors import InvalidInput
from polythrottle.space import Knob, OperatingPoint
from polythrottle.workloads.address import Address

QUEUE_DELAY = "queue_delay_s"
INSTANCES = "instances"
OPTIONS = {QUEUE_DELAY: "queue_delay_us", INSTANCES: INSTANCES}
"""The option of a URI that lists the levels of each knob."""
_MICRO = 1_000_000


@dataclass(frozen=True)
class Levers:
    """A model's configuration as it was found, and the levels to be tried.

    Args:
        found: The configuration; whatever is not a lever stays as it is there.
        knobs: With the level that was found among theirs.
    """

    found: Mapping[str, Any]
    knobs: tuple[Knob, ...]

    @classmethod
    def of(cls, address: Address, config: Mapping[str, Any]) -> "Levers":
        """Return the levers an address asks for.

        Raises:
            InvalidInput: If the levels are no numbers, or the configuration has no place for them.
        """
        delays_us = address.counts(OPTIONS[QUEUE_DELAY], least=0)
        instances = address.counts(OPTIONS[INSTANCES], least=1)
        knobs = []
        if delays_us is not None:
            if not int(config.get("max_batch_size", 0)):
                raise InvalidInput(
                    f"{address.uri}: the model has no batches on the server, so queries cannot wait there"
                )
            knobs.append(_knob(QUEUE_DELAY, {delay_us / _MICRO for delay_us in delays_us}, queue_delay_s(config)))
        if instances is not None:
            if len(config.get("instance_group", ())) != 1:
                raise InvalidInput(
                    f"{address.uri}: the model has several groups of instances, or none; set them by hand"
                )
            knobs.append(_knob(INSTANCES, set(instances), instance_count(config)))
        return cls(config, tuple(knobs))

    @property
    def default(self) -> OperatingPoint:
        """The levels that were found."""
        return self.held(self.found)

    def held(self, config: Mapping[str, Any]) -> OperatingPoint:
        """Return the levels of the levers in a configuration."""
        levels = {QUEUE_DELAY: queue_delay_s(config), INSTANCES: instance_count(config)}
        return OperatingPoint({knob.name: levels[knob.name] for knob in self.knobs})

    def pulled(self, point: OperatingPoint) -> Mapping[str, Any]:
        """Return the configuration with the levels of a point."""
        config = dict(self.found)
        if point == self.default:
            return config
        if QUEUE_DELAY in point:
            delay_us = round(float(point[QUEUE_DELAY]) * _MICRO)
            config["dynamic_batching"] = {
                **config.get("dynamic_batching", {}),
                "max_queue_delay_microseconds": delay_us,
            }
        if INSTANCES in point:
            config["instance_group"] = [{**config["instance_group"][0], "count": int(point[INSTANCES])}]
        return config


def _knob(name: str, levels: set[float] | set[int], found: float) -> Knob:
    return Knob(name, tuple(sorted({*levels, found})))


def queue_delay_s(config: Mapping[str, Any]) -> float:
    """Return how long the server lets a query wait for others to share its batch, in seconds."""
    return int(config.get("dynamic_batching", {}).get("max_queue_delay_microseconds", 0)) / _MICRO


def instance_count(config: Mapping[str, Any]) -> int:
    """Return how many copies of the model the server runs."""
    return sum(int(group.get("count", 1)) for group in config.get("instance_group", ()))
