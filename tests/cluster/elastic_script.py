"""A training script for the tests: a tiny model that writes down which worker trained which samples, and when.

Words: folder of the ledger, samples, batch, epochs, seconds a step takes until the file ``hurry`` is there, width.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch

from polythrottle.training.elastic import Context

folder, (samples, batch, epochs), pause_s = Path(sys.argv[1]), map(int, sys.argv[2:5]), float(sys.argv[5])
width = int(sys.argv[6]) if len(sys.argv) > 6 else 8
torch.manual_seed(0)
inputs = torch.randn(samples, 4)
dataset = torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True), torch.arange(samples))
model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
node = os.environ.get("POLYTHROTTLE_CLUSTER_NODE", "alone")
ledger = (folder / f"{node}-{os.getpid()}.jsonl").open("a")

with Context(model, optimiser, dataset, batch=batch, epochs=epochs) as training:
    for x, y, indices in training.batches():
        if not (folder / "hurry").exists():
            time.sleep(pause_s)
        loss = torch.nn.functional.mse_loss(training.model(x), y)
        done = {"generation": training.generation, "step": training.place.step + 1, "epoch": training.place.epoch}
        seen = indices.tolist() if training._micro is not None and training._micro.weight else []
        ledger.write(json.dumps({**done, "samples": seen, "loss": loss.item(), "at_s": time.monotonic()}) + "\n")
        ledger.flush()
        training.step(loss)
