"""Model files on a board over SSH, run by what the board's own Python has."""

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from boards_over_ssh import await_that, far_sides, held, planted, stand_in
from onnx import TensorProto, helper, numpy_helper

from polythrottle.board.hosted import BoardWorkload
from polythrottle.board.link import SSH
from polythrottle.cli.commands import run
from polythrottle.domain.errors import BadFile, DeviceError, InvalidInput
from polythrottle.domain.ports import Placement
from polythrottle.storage.identity import content_digest
from polythrottle.tuning.setup import Setup

WORDS = ["--queries", "8", "--seconds", "0.2", "--json"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the home folder of a board, in which a model lies."""
    monkeypatch.setenv(SSH, stand_in(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    weights = numpy_helper.from_array(np.zeros((64, 64), np.float32), "w")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 64]) for name in "xy"]
    made = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", ends[:1], ends[1:], [weights])
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, tmp_path / "home" / "model.onnx")
    return tmp_path / "home"


def jetson(home: Path) -> str:
    """Return the URI of a Jetson with that home folder."""
    return f"ssh://nano/jetson?root={planted(home.parent)}&python={sys.executable}"


@pytest.mark.slow
def test_an_onnx_file_of_the_board_is_measured(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The path is one there; there is none of that name at the desk."""
    device = f"ssh://nano/cpu?python={sys.executable}"
    assert run(["measure", "-d", device, "-w", "model.onnx", "--batch", "2", "--threads", "1", *WORDS]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["point"] == {"batch_size": 2, "threads": 1}
    assert said["queries"] >= 8
    await_that(lambda: not far_sides(home.parent), "the far side stays")


def test_a_study_knows_a_model_of_the_board_and_what_it_runs_on(home: Path) -> None:
    """By the digest of the file there; no file of the desk is looked at, and knobs of a GPU that idles are refused."""
    words = Setup(device=jetson(home), workload="model.onnx", knobs=("gpu_max_hz",))
    device, served = words.open()
    with words.closing(served):
        assert isinstance(served, BoardWorkload)
        assert isinstance(served.placement, Placement)
        content = words.content(device, served)
        assert content["model"] == content_digest(home / "model.onnx")
        assert content["runs_on"] == "the processor, by ONNX Runtime"
        assert words.model_file is None
        with pytest.raises(InvalidInput, match=r"runs on the processor.*this ONNX Runtime has no provider for NVIDIA"):
            words.check_placed(device, served)


@pytest.mark.parametrize(
    ("workload", "kind", "says"),
    [
        ("none.onnx", BadFile, "ssh://nano: there is no file none.onnx"),
        ("bad.onnx", BadFile, "ssh://nano: bad.onnx is not an ONNX model"),
        ("model.onnx?providers=cuda", DeviceError, "ssh://nano: model.onnx: this ONNX Runtime has no CUDA provider"),
        ("none.engine", BadFile, "ssh://nano: there is no file none.engine"),
        ("bad.engine", DeviceError, "ssh://nano: bad.engine: TensorRT is not here: neither its Python package"),
        ("model.pt2", InvalidInput, "model.pt2 cannot be run over SSH"),
    ],
)
def test_a_model_that_does_not_run_there_is_one_line(home: Path, workload: str, kind: type, says: str) -> None:
    """A file that is not there or is none, and a package or provider that is not there; the board is untouched."""
    for name in ("bad.onnx", "bad.engine"):
        (home / name).write_bytes(b"hello")
    device = jetson(home)
    before = held(home.parent / "board")
    with pytest.raises(kind, match=says) as caught:
        Setup(device=device, workload=workload).open()
    assert "\n" not in str(caught.value)
    assert held(home.parent / "board") == before


def test_a_python_without_the_runtime_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the line that says what to install."""
    absent = home.parent / "absent"
    absent.mkdir()
    (absent / "onnxruntime.py").write_text("raise ModuleNotFoundError('No module named onnxruntime')\n")
    monkeypatch.setenv(SSH, stand_in(home.parent, f"PYTHONPATH={absent}; export PYTHONPATH"))
    with pytest.raises(DeviceError, match=r"ssh://nano: model.onnx needs ONNX Runtime, which /.* lacks; pip install"):
        Setup(device=jetson(home), workload="model.onnx").open()
