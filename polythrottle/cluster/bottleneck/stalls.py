"""How long training waits for its input, by three measurements that each differ in one thing (DS-Analyzer)."""

from dataclasses import dataclass

from polythrottle.errors import InvalidInput


@dataclass(frozen=True)
class Ingest:
    """How many samples a second a node takes in.

    Attributes:
        synthetic: From data that lie on the GPU already: what computing alone can take.
        cached: From data in memory, prepared as usual.
        cold: From where they are kept, with an empty cache.
    """

    synthetic: float
    cached: float
    cold: float

    def __post_init__(self) -> None:
        if not min(self.synthetic, self.cached, self.cold) > 0:
            raise InvalidInput(f"rates of samples are above 0, not {self}")

    @property
    def preparing(self) -> float:
        """Return the share of the time that goes into waiting for the preparation of samples."""
        return max(0.0, 1 - self.cached / self.synthetic)

    @property
    def fetching(self) -> float:
        """Return the share of the time that goes into waiting for the fetching of samples, with a cold cache."""
        return max(0.0, 1 - self.cold / min(self.cached, self.synthetic))

    def with_cache(self, share: float) -> float:
        """Return the samples a second to expect with a cache that holds a share of the data: min(G, P, F).

        Args:
            share: Of the data set that fits, in [0, 1]; what it holds it keeps (MinIO), so that it is hit as often.

        Raises:
            InvalidInput: If the share is not in [0, 1].
        """
        if not 0 <= share <= 1:
            raise InvalidInput(f"a share is between 0 and 1, not {share}")
        fetched = self.cold / (1 - share) if share < 1 else self.cached
        return min(self.synthetic, self.cached, fetched)
