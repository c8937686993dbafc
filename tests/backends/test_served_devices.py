from collections.abc import Mapping

import pytest

from polythrottle.backends.nvml import members
from polythrottle.backends.nvml.gpu import Gpu
from polythrottle.backends.served_devices import part_uri, usable_part
from polythrottle.domain.errors import DeviceError, InvalidInput, PolythrottleError

GPUS: Mapping[str, str] = {"0": "GPU-a", "1": "GPU-b", "7": "GPU-h"}
"""Of eight; the others do not answer."""


class Driver:
    """A driver that counts eight GPUs."""

    def __enter__(self) -> "Driver":
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is open."""

    def call(self, name: str) -> int:
        """Return how many there are."""
        assert name == "nvmlDeviceGetCount"
        return 8


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the driver know these alone, and one of them be split."""

    def refuse_mig(gpu: Gpu) -> None:
        if gpu.uuid == "GPU-h":
            raise DeviceError("it is split by MIG")

    monkeypatch.setattr(members, "Library", Driver)
    monkeypatch.setattr(members, "uuids_by_index", lambda library: dict(GPUS))
    monkeypatch.setattr(members, "refuse_mig", refuse_mig)


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
        ("nvml:GPU-x", "nvml:0,1"),
        ("nvml:", "nvml:0,1"),
        ("nvml:0", "cpu"),
    ],
)
def test_what_is_no_part_of_a_group_has_no_name(name: str, whole: str) -> None:
    """Another kind of device, one with words of its own, a group of one, GPUs that are not in it or nowhere."""
    assert part_uri(name, whole) == ""


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("nvml:5", DeviceError, "nvml:5 does not answer now, or is no GPU here; what does not: GPU 2-6"),
        ("nvml:0,5", DeviceError, "nvml:0,5 does not answer now"),
        ("nvml:GPU-x", DeviceError, "nvml:GPU-x does not answer now"),
        ("nvml:7", DeviceError, "split by MIG"),
        ("nvml:0,7", DeviceError, "split by MIG"),
        ("nvml:1,1", InvalidInput, "nvml:1,1 names GPU 1 twice"),
        ("nvml:1,GPU-b", InvalidInput, "names GPU 1 twice"),
    ],
)
def test_a_part_that_cannot_be_served_says_why(name: str, error: type[PolythrottleError], words: str) -> None:
    """A GPU that is lost or split, or named twice; of a group that has it, and only where it is asked for."""
    with pytest.raises(error, match=words):
        part_uri(name, "nvml:all")
    assert part_uri("nvml:1,0", "nvml:all") == "nvml:GPU-a,GPU-b"
    assert usable_part("nvml:all") == "nvml:0-1"
    assert usable_part("nvml:0") == usable_part("cpu") == ""
