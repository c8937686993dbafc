"""Exported torch models: archives of torch.export and TorchScript."""

import logging
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

from polythrottle.domain.errors import BadFile, InvalidInput, TrialError, UnknownName
from polythrottle.domain.ports import Workload
from polythrottle.domain.space import OperatingPoint
from polythrottle.testing import WorkloadContract
from polythrottle.workloads import open_workload


class Net(nn.Module):
    """A layer on one input, scaled by another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, scaled."""
        return self.drop(self.layer(x)) * scale


class Sums(nn.Module):
    """Sums over a sequence, times a number fixed at export."""

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        """Return the sums."""
        return x.sum(1) * times


class Plain(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return its output."""
        return self.layer(x)


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """Every workload puts torch's thread count back when it is closed."""
    before = torch.get_num_threads()
    yield
    after = torch.get_num_threads()
    torch.set_num_threads(before)
    assert after == before


def exported(path: str, module: nn.Module, arguments: tuple[Any, ...], **words: Any) -> str:
    """Write an archive of torch.export."""
    torch.export.save(torch.export.export(module.eval(), arguments, **words), path)
    return path


def net(path: str, most: int = 16) -> str:
    """Write a network that takes batches up to ``most``."""
    batch = {0: Dim("batch", min=1, max=most)}
    words = {"kwargs": {"scale": torch.ones(2, 1)}, "dynamic_shapes": {"x": batch, "scale": batch}}
    return exported(path, Net(), (torch.ones(2, 8),), **words)


def script(path: str) -> str:
    """Write TorchScript."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(Plain()).save(path)
    return path


class TestArchiveContract(WorkloadContract):
    """The contract of every workload, for an archive."""

    def make(self) -> Workload:
        """Return an archive with a dynamic batch."""
        return open_workload(net("net.pt2", most=4), threads=(1,))


class TestScriptContract(WorkloadContract):
    """The contract of every workload, for TorchScript."""

    def make(self) -> Workload:
        """Return TorchScript."""
        return open_workload(script("plain.pt"), inputs=["8"], batch_sizes=(1, 4), threads=(1,))


def test_an_archive_says_what_it_is_fed() -> None:
    """Positional and named inputs, their types, and which batches there are."""
    workload = open_workload(net("net.pt2", most=6), threads=[1])
    assert workload.space.knob("batch_size").levels == (1, 2, 4)
    workload.apply(OperatingPoint({"batch_size": 4}))
    assert workload.query().items == 4
    workload.close()


def test_batches_an_archive_does_not_take_are_refused() -> None:
    """One line says which it takes."""
    path = net("net.pt2", most=6)
    with pytest.raises(InvalidInput, match="exported for batches from 1 to 6"):
        open_workload(path, batch_sizes=[1, 8])
    with pytest.raises(InvalidInput, match="batch of 2"):
        open_workload(exported("fixed.pt2", Plain(), (torch.ones(2, 8),)), batch_sizes=[1])


def test_a_fixed_batch_is_kept() -> None:
    """An archive for two is fed two."""
    workload = open_workload(exported("fixed.pt2", Plain(), (torch.ones(2, 8),)), threads=[1])
    assert workload.query().items == 2
    workload.close()


def test_other_open_dimensions_must_be_given_and_constants_are_kept() -> None:
    """A sequence's length is not made up; a number the export fixed is passed on."""
    shapes = {"x": {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}, "times": None}
    path = exported("sums.pt2", Sums(), (torch.ones(2, 8), 3), dynamic_shapes=shapes)
    with pytest.raises(InvalidInput, match="give every dimension after the first"):
        open_workload(path)
    with pytest.raises(UnknownName, match="unknown input"):
        open_workload(path, inputs=["y=5"])
    workload = open_workload(path, inputs=["x=5"], threads=[1])
    assert workload.query().items == workload.space.default["batch_size"]
    workload.close()


def test_the_kind_is_read_off_the_file_not_its_name() -> None:
    """An archive may end in .pt, TorchScript in .pt2."""
    workload = open_workload(net("net.pt"), threads=[1])
    assert workload.query().items == 1
    workload.close()
    workload = open_workload(script("plain.pt2"), inputs=["8"], threads=[1])
    assert workload.query().items == 1
    workload.close()


def test_torchscript_must_be_told_its_inputs() -> None:
    """It does not know their shapes; wrong ones fail the query in one line."""
    path = script("plain.pt")
    with pytest.raises(InvalidInput, match="give their shape without the batch"):
        open_workload(path)
    workload = open_workload(path, inputs=["9"], threads=[1])
    with pytest.raises(TrialError, match="model raised RuntimeError") as caught:
        workload.query()
    assert "\n" not in str(caught.value)
    workload.close()


@pytest.mark.parametrize("suffix", ["pt", "pt2"])
def test_other_files_are_refused(suffix: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Missing, no archive, cut off, weights alone: one line each, and nothing from torch beside it."""
    path = Path(f"model.{suffix}")
    with pytest.raises(BadFile, match="cannot be read: No such file"):
        open_workload(str(path))
    path.write_text("hello")
    with pytest.raises(BadFile, match="no archive as torch writes them"):
        open_workload(str(path))
    torch.save(Plain().state_dict(), path)
    with pytest.raises(BadFile, match=r"weights or a whole module, needs its code: give package.module:callable"):
        open_workload(str(path))
    whole = Path(script("plain.pt")).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadFile, match="or cut off"):
        open_workload(str(path))
    assert capfd.readouterr().err == ""


def test_a_damaged_archive_does_not_load() -> None:
    """What torch says comes in one line, and its log keeps quiet."""
    heard: list[logging.LogRecord] = []
    listener = logging.Handler()
    listener.emit = heard.append  # type: ignore[method-assign]
    logging.getLogger("torch.export").addHandler(listener)
    with zipfile.ZipFile(net("net.pt2")) as whole, zipfile.ZipFile("broken.pt2", "w") as broken:
        for name in whole.namelist():
            broken.writestr(name, b"x" if name.endswith("archive_format") else whole.read(name))
    with pytest.raises(BadFile, match="does not load here: torch raised"):
        open_workload("broken.pt2")
    logging.getLogger("torch.export").removeHandler(listener)
    assert heard == []
