"""Errors: what is offered in place of a name that is not there."""

import pytest

from polythrottle.domain.errors import DeviceError, KnobAbsent, PolythrottleError, UnknownName, reworded


@pytest.mark.parametrize(
    ("name", "offer"),
    [
        ("gpu_max_mzh", "did you mean gpu_max_mhz or cpu_max_mhz?"),
        ("cpu", "did you mean cpu_max_mhz?"),  # begun, though its rest is long
        ("cp", "known: cpu_max_mhz, gpu_max_mhz"),  # two letters begin too much
        ("zzz", "known: cpu_max_mhz, gpu_max_mhz"),
    ],
)
def test_the_nearest_names_are_offered_or_else_all(name: str, offer: str) -> None:
    """Those that are spelt alike, and those that begin so."""
    assert str(UnknownName("knob", name, ["gpu_max_mhz", "cpu_max_mhz"])) == f"unknown knob '{name}'; {offer}"


@pytest.mark.parametrize(
    "error",
    [UnknownName("profile", "bert", ["gpt"]), KnobAbsent("there is none", "gpu_max_hz"), DeviceError("gone")],
)
def test_an_error_keeps_its_class_and_what_it_carries_in_other_words(error: PolythrottleError) -> None:
    """Whoever adds where it happened need not know how a class makes its words."""
    again = reworded(error, f"service chat: {error}")
    assert type(again) is type(error)
    assert str(again) == f"service chat: {error}"
    assert vars(again) == vars(error)
