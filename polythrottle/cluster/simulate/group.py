"""The machines of a simulated job: who is starting, who is ready, who trains, and of which silicon they are."""

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from polythrottle.cluster.fleet.silicon import Silicon, grade
from polythrottle.cluster.fleet.slack import UNKNOWN


@dataclass
class Group:
    """Machines by what they are doing; counts are kept, so that nothing walks over all of them.

    Attributes:
        silicon: How their GPUs differ.
        noise: Standard deviation of a calibration, as a fraction of a step.
        chance: Where silicon and noise are drawn from.
    """

    silicon: Silicon
    noise: float
    chance: Random
    starting: set[int] = field(default_factory=set)
    ready: set[int] = field(default_factory=set)
    training: set[int] = field(default_factory=set)
    nodes: Counter[tuple[int, int]] = field(default_factory=Counter)
    _born_s: dict[int, float] = field(default_factory=dict)
    _grades: dict[int, tuple[int, int]] = field(default_factory=dict)
    _calibrated: set[int] = field(default_factory=set)
    _new: set[int] = field(default_factory=set)
    _rough: set[int] = field(default_factory=set)

    def came(self, machine: int, now_s: float) -> None:
        """Take a machine in that begins to start now, in seconds of virtual time."""
        self._born_s[machine] = now_s
        factor = self.silicon.draw(self.chance)
        seen = factor * (1 + self.chance.gauss(0.0, self.noise)) if self.noise else factor
        self._grades[machine] = (grade(seen), grade(factor))
        self.starting.add(machine)

    def started(self, machine: int) -> bool:
        """Take note that a machine is ready, and return whether it still is there."""
        if machine not in self.starting:
            return False
        self.starting.discard(machine)
        self.ready.add(machine)
        return True

    def lost(self, machine: int) -> bool:
        """Take a machine out, and return whether it was training."""
        trained = machine in self.training
        if trained:
            self._left(machine)
        for group in (self.starting, self.ready, self.training, self._calibrated, self._new, self._rough):
            group.discard(machine)
        self._grades.pop(machine, None)
        self._born_s.pop(machine, None)
        return trained

    def joined(self) -> None:
        """Let everyone in who is ready."""
        for machine in self.ready:
            self.nodes[self._pair(machine)] += 1
        self.training |= self.ready
        self._new |= self.ready
        self.ready.clear()

    def verified(self) -> bool:
        """Calibrate those who train and were not calibrated, and return whether there was any."""
        for machine in self._new:
            self._left(machine)
            self._calibrated.add(machine)
            self.nodes[self._pair(machine)] += 1
        found = bool(self._new)
        self._rough |= self._new
        self._new.clear()
        return found

    def refined(self) -> None:
        """Believe what many windows have said by now of those who were calibrated from a few: the noise is gone."""
        for machine in self._rough & self.training:
            self._left(machine)
            _, true = self._grades[machine]
            self._grades[machine] = (true, true)
            self.nodes[self._pair(machine)] += 1
        self._rough.clear()

    def ages_s(self, now_s: float, within_s: float) -> Counter[float]:
        """Return how many train of each age in seconds, rounded to within so many."""
        return Counter(within_s * round((now_s - self._born_s[machine]) / within_s) for machine in self.training)

    @property
    def believed(self) -> Counter[int]:
        """Return how many train of each grade, as far as that is known."""
        found: Counter[int] = Counter()
        for (known, _), number in self.nodes.items():
            found[known] += number
        return found

    def _left(self, machine: int) -> None:
        pair = self._pair(machine)
        self.nodes[pair] -= 1
        if not self.nodes[pair]:
            del self.nodes[pair]

    def _pair(self, machine: int) -> tuple[int, int]:
        seen, true = self._grades[machine]
        return (seen if machine in self._calibrated else UNKNOWN, true)
