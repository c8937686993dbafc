"""Whether a profile's model and board are still those it was tuned with."""

import hashlib
from pathlib import Path

import pytest
from builders import measured

from polythrottle.catalog.documents import locate
from polythrottle.daemon.followed_profile import changed
from polythrottle.domain.profile import Profile
from polythrottle.domain.space import OperatingPoint


def profile(device: str, workload: str, content: str | None) -> Profile:
    """Return a profile with digests of what it was tuned with."""
    noted = {} if content is None else {"content": content}
    return Profile(device, workload, OperatingPoint({}), measured(), provenance=noted)


def digest(path: Path) -> str:
    """Return a file's digest as a study notes it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def test_a_model_that_was_replaced_is_noticed(tmp_path: Path) -> None:
    """By its file's digest; with the old file back nothing has changed."""
    model = tmp_path / "model.onnx"
    model.write_bytes(b"one")
    made = profile("jetson", str(model), f"arrivals=77 model={digest(model)} inputs=1,3 4,5")
    assert changed(made) == ""
    model.write_bytes(b"another")
    assert f"another model: {model} has changed since" in changed(made)
    model.write_bytes(b"one")
    assert changed(made) == ""


def test_a_simulated_board_is_its_file_and_that_of_its_workload() -> None:
    """Either may have changed; a seed is no other board."""
    board = digest(locate("devices", "device", "jetson-nano"))
    model = digest(locate("profiles/workloads", "workload", "resnet50"))
    for content, name in (
        (f"board={board} model={model}", ""),
        (f"board={board} model=0", "another model"),
        (f"board=0 model={model}", "another board"),
    ):
        words = changed(profile("sim:jetson-nano?seed=3", "resnet50", content))
        assert words.startswith(f"this profile was tuned with {name}") if name else words == ""


@pytest.mark.parametrize(
    ("device", "workload", "content"),
    [
        ("jetson", "MODEL", None),
        ("jetson", "MODEL", ""),
        ("jetson", "MODEL", "board=0"),
        ("jetson", "none.onnx", "model=0"),
        ("jetson", ".onnx", "model=0"),
        ("jetson", "kserve://localhost/m", "model=0"),
        ("sim:gone-from-the-catalogue", "resnet50", "board=0"),
    ],
)
def test_what_cannot_be_compared_is_not_called_changed(
    tmp_path: Path, device: str, workload: str, content: str | None
) -> None:
    """Without a digest, without the file, or where the model is behind a server, nothing is known."""
    (tmp_path / "model.onnx").write_bytes(b"one")
    workload = str(tmp_path / "model.onnx") if workload == "MODEL" else workload
    assert changed(profile(device, workload, content)) == ""


def test_a_file_too_large_is_not_read(tmp_path: Path) -> None:
    """A profile is applied between two turns of the control loop, which a large model would hold up."""
    model = tmp_path / "model.onnx"
    with model.open("wb") as file:
        file.truncate(2**28 + 1)
    assert changed(profile("jetson", str(model), "model=0")) == ""
