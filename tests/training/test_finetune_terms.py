"""What a run is to keep to: hours for the policy that goes by them, power for what can wait."""

from typing import Any

import pytest

from polythrottle.domain.arrivals import CLOSED, Poisson
from polythrottle.domain.errors import InvalidInput, UnknownName
from polythrottle.training.beside.scheduler import Hours, MeanPowerLimit, Terms

_NIGHT = Hours.parse("22:00-06:00")
_H = 3600.0


def test_terms_that_make_no_sense_are_refused() -> None:
    """A closed loop, no time, no limit, no such policy."""
    cases: list[tuple[Any, ...]] = [(1.0, CLOSED), (0.0, Poisson(1.0)), (1.0, Poisson(1.0), "interleave", 0.0)]
    for words in cases:
        with pytest.raises(InvalidInput):
            Terms(*words)
    with pytest.raises(UnknownName, match="greedy"):
        Terms(1.0, Poisson(1.0), "gready")


def test_hours_and_power_are_for_what_can_wait() -> None:
    """Hours need the policy off-peak, and nobody holds inference back."""
    assert Terms(1.0, Poisson(1.0), "off-peak", hours=_NIGHT).hours == _NIGHT
    assert Terms(1.0, Poisson(1.0), "greedy", power_w=20.0).ration == MeanPowerLimit(20.0)
    assert Terms(1.0, Poisson(1.0)).ration is None
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"policy": "interleave", "hours": _NIGHT}, "goes by no hours"),
        ({"policy": "none", "hours": _NIGHT}, "inference alone"),
        ({"policy": "none", "power_w": 20.0}, "inference alone"),
        ({"power_w": 0.0}, "above 0 W"),
    ]
    for words, why in wrong:
        with pytest.raises(InvalidInput, match=why):
            Terms(1.0, Poisson(1.0), **words)


def test_a_run_that_ends_before_its_hours_begin_is_refused() -> None:
    """With how long it is until then; one without an end, or that reaches them, is not."""
    short = Terms(1.0, Poisson(1.0), "off-peak", seconds=_H, hours=_NIGHT)
    with pytest.raises(InvalidInput, match="22:00-06:00 begins in 1 h 30 min"):
        short.check_hours(20.5 * _H)
    short.check_hours(21.5 * _H)
    Terms(1.0, Poisson(1.0), "off-peak", hours=_NIGHT).check_hours(12 * _H)
