"""A mean power: kept, saved and owed for a while, and never a reason to hold inference back."""

import pytest

from polythrottle.domain.errors import InvalidInput
from polythrottle.training.beside.scheduler import MeanPowerLimit

_IDLE_W, _TRAINING_W = 10.0, 30.0


def _drawn(ration: MeanPowerLimit, seconds: int, alone_w: float = _IDLE_W) -> tuple[float, int, MeanPowerLimit]:
    """Return the joules and the seconds of training, if it trains whenever it may, looked at once a second."""
    joules, trained = 0.0, 0
    for _ in range(seconds):
        now_w = _TRAINING_W if ration.open else alone_w
        trained += ration.open
        joules += now_w
        ration = ration.after(now_w, 1.0)
    return joules, trained, ration


def test_the_mean_is_kept_and_used() -> None:
    """Over ten minutes at 20 W it draws no more than that, and as much of it as ten seconds' worth."""
    joules, trained, _ = _drawn(MeanPowerLimit(20.0), 600)
    assert 20.0 * 600 - 200.0 <= joules <= 20.0 * 600
    assert 290 <= trained <= 300


def test_it_does_not_stop_and_go_every_second() -> None:
    """It goes on once two seconds' worth are saved, and stops when one is left."""
    ration, changes = MeanPowerLimit(20.0), 0
    for _ in range(600):
        after = ration.after(_TRAINING_W if ration.open else _IDLE_W, 1.0)
        changes, ration = changes + (after.open != ration.open), after
    assert changes <= 600 / 2


def test_what_inference_draws_is_owed_for_ten_seconds_at_most() -> None:
    """An hour of inference above the ration holds fine-tuning back for that hour and twelve seconds at 10 W spare."""
    _, trained, behind = _drawn(MeanPowerLimit(20.0), 3600, alone_w=25.0)
    assert trained == 0
    assert behind.spare_j == -200.0
    seconds = 0
    while not behind.open:
        behind, seconds = behind.after(_IDLE_W, 1.0), seconds + 1
    assert seconds == 24


def test_idle_hours_are_not_saved_up() -> None:
    """After a night without work a burst is let through for seconds, not for hours."""
    rested = MeanPowerLimit(20.0).after(0.0, 8 * 3600.0)
    assert rested.spare_j == 200.0
    seconds = 0
    while rested.open:
        rested, seconds = rested.after(_TRAINING_W, 1.0), seconds + 1
    assert seconds == 19


def test_a_power_that_is_none_is_refused() -> None:
    """Neither 0 W nor an infinite one."""
    for power_w in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(InvalidInput, match="above 0 W"):
            MeanPowerLimit(power_w)
