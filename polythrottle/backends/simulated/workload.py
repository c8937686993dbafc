"""A model of the catalogue served on a simulated board."""

from collections.abc import Callable, Mapping

from polythrottle.catalog.models import Model
from polythrottle.errors import KnobRejected
from polythrottle.measurement import Query
from polythrottle.space import Level, OperatingPoint, SearchSpace

_BATCH = "batch_size"


class SimulatedWorkload:
    """A served model; satisfies the port ``Workload``. Made by `SimulatedDevice.serve`.

    Args:
        model: From the catalogue.
        space: The batch sizes that fit.
        answer: Serves one query of so many items.
    """

    def __init__(self, model: Model, space: SearchSpace, answer: Callable[[Model, int], Query]) -> None:
        self.model = model
        self._space = space
        self._answer = answer
        self._batch_size = self.batch_size(space.default)

    @property
    def uri(self) -> str:
        """The name or path of the model's file."""
        return self.model.name

    @property
    def space(self) -> SearchSpace:
        """The batch sizes that fit into the board's memory."""
        return self._space

    def batch_size(self, point: Mapping[str, Level]) -> int:
        """Return the batch size of a point, the default if it names none.

        Raises:
            KnobRejected: If the model cannot be served in batches of that size.
        """
        level = point.get(_BATCH, self._space.default[_BATCH])
        if level not in (sizes := self._space.knob(_BATCH).levels):
            raise KnobRejected(
                f"{self.model.title} cannot run at {_BATCH} {level}; it can at {', '.join(map(str, sizes))}"
            )
        return int(level)

    def apply(self, point: OperatingPoint) -> None:
        """Set the batch size.

        Raises:
            KnobRejected: If the workload has no such knob or batch size.
        """
        if unknown := sorted(set(point) - {_BATCH}):
            raise KnobRejected(f"{self.model.title} has no knob {unknown[0]}; it has {_BATCH}")
        self._batch_size = self.batch_size(point)

    def query(self) -> Query:
        """Serve one query in virtual time and return how long it took."""
        return self._answer(self.model, self._batch_size)

    def close(self) -> None:
        """Release nothing; there is nothing."""
