"""A ration and the meter it goes by: closed while too much is drawn, and while nobody can tell."""

from dataclasses import replace
from typing import Any

import pytest

from polythrottle.domain.errors import DeviceError
from polythrottle.domain.measurement import Reading
from polythrottle.training.beside.live_run import MeteredPowerLimit
from polythrottle.training.beside.scheduler import MeanPowerLimit


class Metered:
    """A device whose meter and clock say what they are told to."""

    def __init__(self) -> None:
        self.now_s, self.energy_j, self.broken = 0.0, 0.0, False

    def read(self) -> Reading:
        """Return the joules so far."""
        if self.broken:
            raise DeviceError("the meter has gone")
        return Reading(self.now_s, self.energy_j)

    def passed(self, seconds: float, power_w: float) -> None:
        """Let time pass at a power."""
        self.now_s, self.energy_j = self.now_s + seconds, self.energy_j + seconds * power_w


@pytest.fixture
def metered() -> Metered:
    """Return a device at the beginning of its time."""
    return Metered()


def _weighed(metered: Any) -> MeteredPowerLimit:
    return MeteredPowerLimit(metered, MeanPowerLimit(20.0))


def test_it_opens_once_power_is_saved_and_closes_when_too_much_is_drawn(metered: Metered) -> None:
    """Six seconds at 10 W save 60 J of 20 W; two at 40 W use that up; the time that something waited is counted."""
    weighed = _weighed(metered)
    assert weighed.open is False
    metered.passed(6.0, 10.0)
    weighed.look(wanted=True)
    assert weighed.open
    metered.passed(2.5, 40.0)
    weighed.look(wanted=True)
    assert weighed.open is False
    assert weighed.waited_s == 6.0
    metered.passed(1.0, 10.0)
    weighed.look(wanted=False)
    assert weighed.waited_s == 6.0


def test_what_cannot_be_read_is_not_taken_for_nothing(metered: Metered) -> None:
    """While the meter is gone nothing is fine-tuned; when it is back, all that was drawn meanwhile counts."""
    weighed = _weighed(metered)
    metered.passed(10.0, 0.0)
    weighed.look(wanted=True)
    metered.broken = True
    metered.passed(1.0, 10.0)
    weighed.look(wanted=True)
    assert weighed.open is False
    metered.broken = False
    metered.passed(1.0, 400.0)
    weighed.look(wanted=True)
    assert weighed.open is False
    assert replace(MeanPowerLimit(20.0), spare_j=200.0, open=True).after(410.0, 2.0).spare_j == -170.0
