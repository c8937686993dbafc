"""A workload that answers requests in batches."""

from collections.abc import Sequence

from polythrottle.errors import InvalidInput
from polythrottle.ports import Workload

_BATCH = "batch_size"


class Server:
    """A workload, and the batches it is used with; all calls come from one thread.

    Args:
        workload: What answers.
        batches: Sizes of a batch, each a level of the workload's batch size; the smallest there is if empty.

    Raises:
        InvalidInput: If the workload cannot answer batches of such a size.
    """

    def __init__(self, workload: Workload, batches: Sequence[int] = ()) -> None:
        self.workload, self._now = workload, 0
        able = self._able()
        self.batches = tuple(sorted(set(batches))) or (min(able),)
        if strange := sorted(set(self.batches) - able):
            raise InvalidInput(f"{workload.uri} answers batches of {', '.join(map(str, sorted(able)))}, not {strange}")

    def _able(self) -> set[int]:
        space = self.workload.space
        return {int(level) for level in space.knob(_BATCH).levels} if _BATCH in space.names else {1}

    def size(self, requests: int) -> int:
        """Return the size of the batch that so many requests are answered in, which they may not fill."""
        return next((batch for batch in self.batches if batch >= requests), self.batches[-1])

    def answer(self, requests: int) -> None:
        """Answer requests in one batch.

        Raises:
            TrialError: If the workload fails.
        """
        batch = self.size(requests)
        if batch != self._now:
            space = self.workload.space
            self.workload.apply(space.default.moved({_BATCH: batch}) if _BATCH in space.names else space.default)
            self._now = batch
        self.workload.query()
