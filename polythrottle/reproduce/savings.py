"""What tuning saves in the 32 searches of the paper, and what it would save if all knobs were searched."""

from dataclasses import dataclass

from polythrottle.reproduce.landscape import FULL, SEARCHED, landscape
from polythrottle.reproduce.published import Cell
from polythrottle.space import OperatingPoint

_LIMITS = {"A": 1.2, "B": None}


@dataclass(frozen=True)
class Saving:
    """The best point of a space and what it saves.

    Args:
        points: How many there are to choose from.
        near: How many hold the limit and cost at most 5 % more than the best that does.
        point: The best.
        saving: Fraction of the energy per item at default clocks and the same batch size.
        from_batch_1: Fraction of the energy per item at default clocks and batch 1.
    """

    points: int
    near: int
    point: OperatingPoint
    saving: float
    from_batch_1: float

    @property
    def random(self) -> float:
        """Mean trials of random search as the paper computes it, which may try a point twice."""
        return self.points / self.near

    @property
    def random_without_replacement(self) -> float:
        """Mean trials of random search that tries each point once."""
        return (self.points + 1) / (self.near + 1)


def saving(cell: Cell, full: bool = False) -> Saving:
    """Return the truth about one search of the paper.

    Default clocks are those of the board's file: the GPU free between its lowest and highest clock under the stock
    governor, memory and CPU at their highest. The paper can only have counted against them *at the batch size of the
    optimum*: its B searches contain its A searches, and yet B saves less than A on B7 on Orin (10.2 and 13.2 %); and by
    its figure 2 the same search saves 42 % against batch 1, and 9 % against default clocks at batch 8.

    Args:
        cell: Which.
        full: Whether the GPU minimum is searched too: 1,820 and 5,005 points instead of 260 and 715.
    """
    scape = landscape(cell.board, cell.model, FULL if full else SEARCHED)
    allowed = scape.within(_LIMITS[cell.setting])
    row = scape.best(allowed)
    point = scape.space[row]
    choice = scape.batch == 1 if cell.setting == "A" else scape.batch > 0
    return Saving(
        int(choice.sum()),
        scape.near(allowed & choice),
        point,
        1.0 - float(scape.energy_j[row] / scape.energy_j[scape.default_at(scape.batch[row])]),
        1.0 - float(scape.energy_j[row] / scape.energy_j[scape.default_at(1)]),
    )
