"""Under which names a device stands on record."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from polythrottle.actuation.restore import Standing
from polythrottle.actuation.state.lease import Lease
from polythrottle.backends import served_devices as records
from polythrottle.backends.nvml import NamedGpus
from polythrottle.backends.served_devices import check_roots, on_record, roots_of, unchanged_gpus, uuids_of
from polythrottle.domain.errors import DeviceError, InvalidInput


def standing(*names: str) -> Sequence[Standing]:
    """Return devices that stand changed."""
    return [Standing(name, ("clock",), Lease(1, "boot")) for name in names]


def test_a_uri_means_the_name_that_the_board_stands_under(tmp_path: Path) -> None:
    """Without a folder its kind; with one, the folder it lies in; a name is itself, and nothing is everything."""
    assert on_record(None) == [None]
    assert on_record("jetson") == ["jetson"]
    assert on_record(f"jetson?knobs=gpu_max_hz&root={tmp_path}") == [f"jetson {tmp_path}"]
    assert on_record("jetson /planted") == ["jetson /planted"]
    assert on_record("nvml GPU-a, nvml GPU-b") == ["nvml GPU-a", "nvml GPU-b"]
    assert roots_of("a=b&root=/x&root=/y") == ["/x", "/y"]
    assert uuids_of("0,1") == ["0", "1"]  # there is no driver here that could say


def test_gpus_mean_those_that_stand_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All is all that stand; of a group, those of it that stand; a number is that GPU, whichever else stands."""
    changed: list[str] = []
    silent: set[str] = set()

    def named(name: str) -> NamedGpus:
        uuids = tuple(f"GPU-{each}" for each in name.split(",") if f"GPU-{each}" not in silent)
        return NamedGpus(uuids, frozenset(f"GPU-{each}" for each in range(8)) - silent, bool(silent))

    monkeypatch.setattr(records.restoring, "concerned", lambda: changed)
    monkeypatch.setattr(records, "named_gpus", named)
    assert on_record("nvml:all") == ["nvml all"]
    assert on_record("nvml:0,1") == ["nvml GPU-0"]
    changed += ("nvml GPU-7", "jetson")
    assert on_record("nvml:all") == ["nvml GPU-7"]
    assert on_record("nvml:0") == ["nvml GPU-0"]
    assert unchanged_gpus("nvml:0", on_record("nvml:0"))
    assert not unchanged_gpus("nvml:7", on_record("nvml:7"))
    assert not unchanged_gpus("nvml:9", on_record("nvml:9"))
    assert not unchanged_gpus("jetson", ["jetson:0"])
    changed += ("nvml GPU-1", "nvml GPU-2")
    assert on_record("nvml:0,1,2") == ["nvml GPU-1", "nvml GPU-2"]
    silent.add("GPU-7")
    assert on_record("nvml:0,1,7") == ["nvml GPU-1", "nvml GPU-7"]
    assert not unchanged_gpus("nvml:0,7", ["nvml GPU-0"])


def test_without_a_driver_the_only_gpu_that_stands_is_meant_by_any_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else can say which it is."""
    changed = ["nvml GPU-7", "jetson"]
    monkeypatch.setattr(records.restoring, "concerned", lambda: changed)
    assert on_record("nvml:3") == on_record("nvml") == ["nvml GPU-7"]
    assert on_record("nvml:0,1") == ["nvml 0"]
    changed.append("nvml GPU-1")
    assert on_record("nvml:3") == ["nvml 3"]
    assert not unchanged_gpus("nvml:3", ["nvml 3"])


def test_a_gpu_that_only_its_files_name_is_not_called_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names have an underscore where a record has a space."""
    monkeypatch.setattr(records.restoring, "concerned", lambda: ["nvml_GPU-0"])
    monkeypatch.setattr(records, "named_gpus", lambda name: NamedGpus(("GPU-0",), frozenset({"GPU-0"}), False))
    assert not unchanged_gpus("nvml:0", on_record("nvml:0"))


def test_a_planted_board_that_went_is_named_unless_it_stands_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands on record for it can be restored all the same."""
    gone = str(tmp_path / "gone")
    with pytest.raises(InvalidInput, match="there is no folder"):
        check_roots(f"jetson?root={gone}", [f"jetson {gone}"])
    monkeypatch.setattr(records.restoring, "concerned", lambda: [f"jetson {gone}"])
    check_roots(f"jetson?root={gone}", [f"jetson {gone}"])
    with pytest.raises(InvalidInput):
        check_roots(f"jetson?root={gone}", ["jetson"])
    check_roots(f"jetson?root={tmp_path}", [])


def test_what_was_confirmed_of_a_group_is_put_back_if_one_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single device is left as it is; errors of several are told together."""
    restored: list[tuple[str | None, bool]] = []

    def confirm(name: str | None) -> Sequence[Standing]:
        if name == "nvml b":
            raise DeviceError("b waits for nothing")
        return standing(str(name))

    def put_back(device: str | None, force: bool) -> list[object]:
        restored.append((device, force))
        raise DeviceError(f"{device} is away")

    monkeypatch.setattr(records.restoring, "confirm", confirm)
    monkeypatch.setattr(records.restoring, "restore_all", put_back)
    assert [each.device for each in records.confirmed(["nvml a"])] == ["nvml a"]
    with pytest.raises(DeviceError, match="b waits for nothing"):
        records.confirmed(["nvml b"])
    assert restored == []
    with pytest.raises(DeviceError, match="nvml a is away; nvml b is away"):
        records.confirmed(["nvml a", "nvml b"])
    assert restored == [("nvml a", False), ("nvml b", False)]
    with pytest.raises(DeviceError, match=r"^nvml c is away$"):
        records.all_restored(["nvml c", "nvml c"], force=True)
    assert restored[2:] == [("nvml c", True)]
