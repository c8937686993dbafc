"""A training whose chief writes down the loss over all samples after each step: ``curve.py FILE SECONDS_A_STEP``.

Steps take no longer than they must once a file ``hurry`` is beside FILE.
"""

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from polythrottle.training.elastic import Context

hurry = Path(sys.argv[1]).with_name("hurry")
torch.manual_seed(0)
inputs = torch.randn(640, 16)
targets = (inputs[:, :8].sum(dim=1, keepdim=True) > 0).float()
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = nn.BCEWithLogitsLoss()

with (
    Context(model, optimiser, TensorDataset(inputs, targets), batch=16, epochs=20) as training,
    open(sys.argv[1], "a") as curve,
):
    for x, y in training.batches():
        if not hurry.exists():
            time.sleep(float(sys.argv[2]))
        training.step(criterion(training.model(x), y))
        if training.rank == 0:
            with torch.no_grad():
                loss = float(criterion(model(inputs), targets))
            place = {"step": training.place.step, "epoch": training.place.epoch}
            curve.write(json.dumps({**place, "workers": training.workers, "loss": loss}) + "\n")
            curve.flush()
