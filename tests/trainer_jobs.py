"""A tiny model and tiny data to fine-tune in tests, and which samples a job's ledger says it has seen."""

import csv
import json
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from polythrottle.domain.errors import BadFile
from polythrottle.training.beside.trainer.driver import Task
from polythrottle.training.beside.trainer.worker import LEDGER, LedgerEntry

WIDTH = 6


class Tiny(nn.Module):
    """Two layers for samples of six numbers and three classes."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU())
        self.head = nn.Linear(8, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a score per class."""
        scores: torch.Tensor = self.head(self.body(x))
        return scores


def exported(path: Path, model: nn.Module | None = None) -> Path:
    """Write an archive of torch.export that takes any batch."""
    sizes = ({0: torch.export.Dim.DYNAMIC},)
    program = torch.export.export((model or Tiny()).eval(), (torch.zeros(2, WIDTH),), dynamic_shapes=sizes)
    torch.export.save(program, path)
    return path


def sample(number: int, classes: int = 3) -> tuple[np.ndarray, int]:
    """Return a sample and its class, which its largest number tells."""
    values = np.random.default_rng(number).normal(0, 0.3, WIDTH).astype(np.float32)
    values[number % classes] += 2
    return values, number % classes


def data_folder(folder: Path, samples: int = 30, *, table: bool = False) -> Path:
    """Write samples into folders named like their labels, or beside a ``labels.csv``."""
    rows = []
    for number in range(samples):
        values, label = sample(number)
        file = f"{number:03}.npy" if table else f"{label}/{number:03}.npy"
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        np.save(folder / file, values)
        rows.append((file, label))
    if table:
        with (folder / "labels.csv").open("w", newline="") as out:
            csv.writer(out).writerows([("file", "label"), *rows])
    return folder


def job(where: Path, model: Path, **changes: Any) -> Task:
    """Return a task over the data in ``where/data``."""
    usual = {"folder": str(where / "job"), "batch": 8, "epochs": 2, "device": "cpu", "slower": 1000.0}
    return Task(str(model), str(where / "data"), **{**usual, **changes})


def counted_entries(folder: Path, step: int) -> Mapping[int, Sequence[LedgerEntry]]:
    """Return the steps of a job's ledger that count, by epoch.

    Args:
        folder: Of the job.
        step: The last step of the checkpoint.

    Raises:
        BadFile: If the ledger cannot be read, or lacks one of those steps.
    """
    path = folder / LEDGER
    try:
        lines = path.read_bytes().split(b"\n") if path.exists() else []
    except OSError as err:
        raise BadFile(f"{path} cannot be read: {err.strerror}") from err
    last = {entry.step: entry for entry in map(_parsed, lines) if entry is not None and entry.step <= step}
    lacking = sorted(set(range(1, step + 1)) - set(last))
    if lacking:
        raise BadFile(f"{path} lacks step {lacking[0]}, though a checkpoint counts it")
    epochs: dict[int, list[LedgerEntry]] = defaultdict(list)
    for number in sorted(last):
        epochs[last[number].epoch].append(last[number])
    return epochs


def _parsed(text: bytes) -> LedgerEntry | None:
    """Return the entry of a line; None if it is torn."""
    try:
        line = json.loads(text)
        crc = line.pop("crc")
        if crc != zlib.crc32(json.dumps(line).encode()):
            return None
        entry = LedgerEntry(**{**line, "seen": tuple(line["seen"]), "left_out": tuple(line["left_out"])})
        if type(entry.step) is int and type(entry.epoch) is int:
            return entry
        return None
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return None
