from collections.abc import Mapping

import pytest

import polythrottle.backends.nvml
from polythrottle.backends.served_devices import part_uri
from polythrottle.domain.errors import UnknownName

GPUS: Mapping[str, tuple[str, ...]] = {
    "0": ("GPU-a",),
    "1,0": ("GPU-b", "GPU-a"),
    "0,1": ("GPU-a", "GPU-b"),
    "7": ("GPU-h",),
}


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that knows these alone."""

    def uuids(name: str) -> tuple[str, ...]:
        if name not in GPUS:
            raise UnknownName("GPU", name, GPUS)
        return GPUS[name]

    monkeypatch.setattr(polythrottle.backends.nvml, "uuids", uuids)


@pytest.mark.parametrize(("name", "part"), [("nvml:0", "nvml:GPU-a"), ("nvml:1,0", "nvml:GPU-a,GPU-b")])
def test_some_gpus_of_a_group_are_known_by_their_uuids(name: str, part: str) -> None:
    """Sorted, so that one part has one name in whatever order it was asked for."""
    assert part_uri(name, "nvml:0,1") == part


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("cpu", "nvml:0,1"),
        ("nvml:0?root=x", "nvml:0,1"),
        ("nvml:0?meter=shelly:10.0.0.9", "nvml:0,1"),
        ("nvml:0", "nvml:0"),
        ("nvml:7", "nvml:0,1"),
        ("nvml:5", "nvml:0,1"),
        ("nvml:", "nvml:0,1"),
        ("nvml:0", "cpu"),
    ],
)
def test_what_is_no_part_of_a_group_has_no_name(name: str, whole: str) -> None:
    """Another kind of device, one with words of its own, a group of one, GPUs that are not in it or nowhere."""
    assert part_uri(name, whole) == ""
