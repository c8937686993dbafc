"""A training that survives the loss of machines: ``polythrottle cluster train --nodes 2 examples/elastic_training.py``.

What was changed in the script, five lines written and what they replace taken out::

    + from polythrottle.training.elastic import Context
    - loader = DataLoader(dataset, batch_size=64, shuffle=True)
    - for epoch in range(2):
    -     for x, y in loader:
    -         loss = criterion(model(x), y)
    -         optimiser.zero_grad()
    -         loss.backward()
    -         optimiser.step()
    + with Context(model, optimiser, dataset, batch=64, epochs=2) as training:
    +     for x, y in training.batches():
    +         loss = criterion(training.model(x), y)
    +         training.step(loss)
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from polythrottle.training.elastic import Context

torch.manual_seed(0)
inputs = torch.randn(2048, 16)
dataset = TensorDataset(inputs, (inputs.sum(dim=1, keepdim=True) > 0).float())
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.BCEWithLogitsLoss()

with Context(model, optimiser, dataset, batch=64, epochs=2) as training:
    for x, y in training.batches():
        loss = criterion(training.model(x), y)
        training.step(loss)

if training.rank == 0:
    with torch.no_grad():
        right = ((model(inputs) > 0) == (dataset.tensors[1] > 0)).float().mean()
    print(f"after step {training.place.step}: measured {right:.1%} of the samples right")
