"""A training script for the tests: steps of a tiny model that take as long on each node as its words say.

Words: samples, batch, epochs, then for each node NAME=S, seconds of a step's own work; with NAME=S+D it waits D seconds
more for its samples.
"""

import os
import sys
import time

import torch

from polythrottle.training.elastic import Context

samples, batch, epochs = map(int, sys.argv[1:4])
times = dict(word.split("=") for word in sys.argv[4:])
work_s, _, input_s = times.get(os.environ.get("POLYTHROTTLE_CLUSTER_NODE", "alone"), "0").partition("+")
inputs = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0))
dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def collated(rows: list[tuple[torch.Tensor, ...]]) -> list[torch.Tensor]:
    """Make a batch, as slowly as it was said."""
    time.sleep(float(input_s or 0))
    return [torch.stack(column) for column in zip(*rows, strict=True)]


optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
with Context(model, optimiser, dataset, collate=collated, batch=batch, epochs=epochs) as training:
    for x, y in training.batches():
        time.sleep(float(work_s))
        training.step(torch.nn.functional.mse_loss(training.model(x), y))
