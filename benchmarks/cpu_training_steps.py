"""Measure training steps of small convolutional networks on this processor: the table of `cluster predict`'s example.

    python benchmarks/cpu_training_steps.py > examples/cpu-training-steps.csv

Each network is a stem and residual blocks of one width; a step is forward, backward and SGD on a batch of 16 images of
32 x 32. Floating-point operations are those of one step per image, as torch counts them; a time is the mean of the
repeats, after two that are left out.
"""

import csv
import statistics
import sys
import time

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

BATCH, SIDE, REPEATS, THREADS = 16, 32, 9, 1
SHAPES = [(width, depth) for width in (8, 16, 24, 32, 48) for depth in (1, 3, 6)]
COLUMNS = ("gpu", "network", "flops", "n_parameters", "n_tensors", "step_time_s", "step_time_std_s", "n_repeats")


class Block(nn.Module):
    """Two 3 x 3 convolutions with normalisation, and the input added to them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers = [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
        self.body = nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the next block reads, of the shape of ``x``."""
        return torch.relu(x + self.body(x))


def network(width: int, depth: int) -> nn.Module:
    """Return a stem, ``depth`` blocks of ``width`` channels, and a head of ten classes."""
    blocks = [Block(width) for _ in range(depth)]
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)
    )


def step(model: nn.Module, optimiser: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    """Train on one batch."""
    optimiser.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimiser.step()


def row(width: int, depth: int) -> list[object]:
    """Return one network's line of the table."""
    model = network(width, depth)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(BATCH, 3, SIDE, SIDE), torch.randint(10, (BATCH,))
    with FlopCounterMode(display=False) as counter:
        step(model, optimiser, x, y)
    times_s = []
    for _ in range(REPEATS + 2):
        begun_s = time.perf_counter()
        step(model, optimiser, x, y)
        times_s.append(time.perf_counter() - begun_s)
    tensors = list(model.parameters())
    figures = (f"{statistics.fmean(times_s[2:]):.6g}", f"{statistics.stdev(times_s[2:]):.3g}", REPEATS)
    return [
        "cpu",
        f"res{depth}x{width}",
        counter.get_total_flops() // BATCH,
        sum(t.numel() for t in tensors),
        len(tensors),
        *figures,
    ]


def main() -> None:
    """Print the table."""
    torch.manual_seed(0)
    torch.set_num_threads(THREADS)
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(COLUMNS)
    for shape in SHAPES:
        table.writerow(row(*shape))


if __name__ == "__main__":
    main()
