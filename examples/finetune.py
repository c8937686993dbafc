"""Fine-tune the head of a small network on pictures made up here, slice by slice, and serve it if it has got better.

Run it from anywhere: ``python examples/finetune.py``. It writes the folders ``shapes`` and ``job``, and ``shapes.pt2``.
"""

from pathlib import Path

import numpy as np
import torch
from torch import nn

SHAPES = ("cross", "disc", "frame", "stripes")


def picture(shape: str, random: np.random.Generator) -> np.ndarray:
    """Return a noisy grey picture of a shape somewhere on it, of shape (1, 24, 24)."""
    rows, columns = np.mgrid[:24, :24] - random.uniform(9, 14, 2)[:, None, None]
    size, farthest = random.uniform(5, 8), np.maximum(abs(rows), abs(columns))
    cross = (np.minimum(abs(rows), abs(columns)) < 1.5) & (farthest < size)
    ink = {"cross": cross, "disc": np.hypot(rows, columns) < size, "frame": abs(farthest - size) < 1.2}
    drawn = ink.get(shape, (farthest < size) & (rows.round().astype(int) % 4 < 2))
    return (drawn + random.normal(0, 0.3, drawn.shape)).astype(np.float32)[None]


def write_data(folder: Path, each: int = 150) -> None:
    """Write some pictures of each shape."""
    random = np.random.default_rng(0)
    for number in range(each * len(SHAPES)):
        shape = SHAPES[number % len(SHAPES)]
        (folder / shape).mkdir(parents=True, exist_ok=True)
        np.save(folder / shape / f"{number:04}.npy", picture(shape, random))


def model() -> nn.Module:
    """Return a small network; its filters stay as they are, its head is what is trained."""
    torch.manual_seed(0)
    filters = nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU()
    return nn.Sequential(*filters, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(256, len(SHAPES)))


def main() -> None:
    """Train for ten epochs in slices of 8 samples, then validate and serve."""
    from polythrottle.training.beside.trainer import Task, Trainer

    write_data(Path("shapes"))
    task = Task("finetune:model", "shapes", "job", batch=32, epochs=10, learning_rate=0.01, served="shapes.pt2")
    with Trainer(task) as trainer:
        done, taken_s = trainer.start(), [0.0]
        while not done.finished:
            done = trainer.slice(8)
            taken_s.append(done.measured_s)
        while not (verdict := trainer.ask("validate", samples=32)["result"]):
            pass
        print(f"{verdict['accuracy']:.0%} told right; the longest slice measured: {1e3 * max(taken_s):.1f} ms")
        print(f"served: {trainer.ask('swap')['served']}" if verdict["holds"] else f"not served: {verdict['why']}")


if __name__ == "__main__":
    main()
