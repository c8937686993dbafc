"""A training of a model of more than 100 MB for a given time: ``large_script.py SECONDS``."""

import sys
import time

import torch

from polythrottle.training.elastic import Context

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(2200, 2200) for _ in range(6)))
optimiser = torch.optim.Adam(model.parameters(), lr=1e-4)
dataset = torch.utils.data.TensorDataset(torch.randn(4096, 2200))

begun_s = time.monotonic()
with Context(model, optimiser, dataset, batch=128, epochs=10_000) as training:
    for (x,) in training.batches():
        training.step(training.model(x).square().mean())
        if time.monotonic() - begun_s > float(sys.argv[1]):
            break
