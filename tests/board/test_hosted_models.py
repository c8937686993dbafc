"""Model files on a board over SSH, run by what the board's own Python has."""

import json
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from boards_over_ssh import await_that, far_sides, held, planted, stand_in
from onnx import TensorProto, helper, numpy_helper

from polythrottle.board.link import SSH
from polythrottle.board.remote_workload import BoardWorkload
from polythrottle.cli.commands import run
from polythrottle.domain.errors import BadFile, DeviceError, InvalidInput, UnknownName
from polythrottle.domain.ports import Placement
from polythrottle.storage.identity import content_digest
from polythrottle.tuning.setup import Setup

WORDS = ["--queries", "8", "--seconds", "0.2", "--json"]
NET = """
import torch

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(64, 64)

    def example_input(self, batch_size):
        return torch.zeros(batch_size, 64)
"""
ABSENT = "raise ModuleNotFoundError('No module named {0}', name='{0}')\n"
"""A module in the place of a package that is not there."""


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


def lay_torch(home: Path, name: str) -> str:
    """Lay a linear layer of 64 inputs there, and return the workload that means it.

    Args:
        home: The home folder of a board.
        name: ``model.pt2``, ``model.pt``, or else a module of Python.
    """
    layer = torch.nn.Linear(64, 64).eval()
    if name == "model.pt2":
        sizes = ({0: torch.export.Dim("batch", min=1, max=64)},)
        torch.export.save(torch.export.export(layer, (torch.ones(2, 64),), dynamic_shapes=sizes), home / name)
        return name
    if name == "model.pt":
        torch.jit.script(layer).save(str(home / name))  # type: ignore[no-untyped-call]
        return name
    (home / f"{name}.py").write_text(NET)
    return f"{name}:Net"


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.pt2", "model.pt", "far_net"])
def test_a_torch_model_of_the_board_is_measured(home: Path, capfd: pytest.CaptureFixture[str], name: str) -> None:
    """An archive of torch.export, TorchScript and a module, by the torch there; it says no word of its own."""
    workload = lay_torch(home, name)
    words = [*(["--input", "64"] if name == "model.pt" else []), "--batch", "2", "--threads", "1", *WORDS]
    assert run(["measure", "-d", f"ssh://nano/cpu?python={sys.executable}", "-w", workload, *words]) == 0
    output = capfd.readouterr()
    said = json.loads(output.out)
    assert said["point"] == {"batch_size": 2, "threads": 1}
    assert said["queries"] >= 8
    assert "Warning" not in output.err
    await_that(lambda: not far_sides(home.parent), "the far side stays")


@pytest.mark.slow
def test_a_study_knows_a_model_of_torch_by_its_file_there(home: Path) -> None:
    """By its digest; where it runs is known, and an input's shape that is missing is asked for."""
    workload = lay_torch(home, "model.pt")
    nano = jetson(home)
    words = Setup(device=nano, workload=f"{workload}?device=cpu", inputs=("64",), knobs=("gpu_max_hz",))
    device, served = words.open()
    with words.closing(served):
        assert isinstance(served, BoardWorkload)
        assert served.placement is not None
        assert served.placement.by == "torch"
        assert words.content(device, served)["model"] == content_digest(home / workload)
        assert served.query().items == served.space.default["batch_size"]
    with pytest.raises(InvalidInput, match=r"ssh://nano: model.pt: what are its inputs\?"):
        Setup(device=nano, workload=workload).open()


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
        ("none.pt2", BadFile, "ssh://nano: none.pt2 cannot be read: No such file"),
        ("none.pt", BadFile, "ssh://nano: none.pt cannot be read: No such file"),
        ("bad.pt2", BadFile, "ssh://nano: bad.pt2 is no archive as torch writes them"),
        ("state.pt", BadFile, "ssh://nano: state.pt holds neither an archive of torch.export nor TorchScript"),
        ("state.pt?gpu=1", UnknownName, "ssh://nano: .*option of an exported model"),
        ("model.safetensors", InvalidInput, "model.safetensors cannot be run over SSH"),
    ],
)
def test_a_model_that_does_not_run_there_is_one_line(home: Path, workload: str, kind: type, says: str) -> None:
    """A file that is not there or is none, and a package or provider that is not there; the board is untouched."""
    for name in ("bad.onnx", "bad.engine", "bad.pt2"):
        (home / name).write_bytes(b"hello")
    torch.save({"weight": torch.ones(2)}, home / "state.pt")
    device = jetson(home)
    before = held(home.parent / "board")
    with pytest.raises(kind, match=says) as caught:
        Setup(device=device, workload=workload).open()
    assert "\n" not in str(caught.value)
    assert held(home.parent / "board") == before


@pytest.mark.parametrize(
    ("package", "stands", "says"),
    [
        ("onnxruntime", ABSENT, r"model.onnx needs onnxruntime, which /.* on the board lacks; \?python= names another"),
        ("torch", ABSENT, r"model.pt needs torch, which /.* on the board lacks; \?python= names another"),
        ("numpy", ABSENT, r"model.pt needs numpy, which /.* on the board lacks; \?python= names another"),
        ("torch", "raise ImportError('libcudart.so.11.0: cannot open')\n", r"model.pt cannot be run in /.*: libcudart"),
    ],
)
def test_a_python_without_the_runtime_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch, package: str, stands: str, says: str
) -> None:
    """In the line that says what is missing, in which Python, and what to do."""
    if package == "onnxruntime":
        words = Setup(device=jetson(home), workload="model.onnx")
    else:
        words = Setup(device=jetson(home), workload=lay_torch(home, "model.pt"), inputs=("64",))
    absent = home.parent / "absent"
    absent.mkdir()
    (absent / f"{package}.py").write_text(stands.format(package))
    monkeypatch.setenv(SSH, stand_in(home.parent, f"PYTHONPATH={absent}; export PYTHONPATH"))
    with pytest.raises(DeviceError, match=f"ssh://nano: {says}") as caught:
        words.open()
    assert "\n" not in str(caught.value)
