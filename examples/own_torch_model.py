"""Tune a torch model of your own on this machine's processor: which threads and batch size cost the least energy.

Run it from anywhere: ``python examples/own_torch_model.py``. The workload's URI names this file and the function below.
"""

import torch
from torch import nn


class SmallNet(nn.Module):
    """A small convolutional network for 32 × 32 pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 10),
        )

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """Return ten scores per picture."""
        return self.layers(pictures)

    def example_input(self, batch_size: int) -> torch.Tensor:
        """Return a batch to serve; polythrottle calls this for each batch size it tries."""
        return torch.zeros(batch_size, 3, 32, 32)


def model() -> nn.Module:
    """Return the model to serve."""
    torch.manual_seed(0)
    return SmallNet()


def main() -> None:
    """Find the point of least energy per picture whose p99 stays within twice that of the default point."""
    import polythrottle

    # Short windows, so that this ends within a minute: leave them out where the answer counts.
    quick = polythrottle.Setup("cpu", "own_torch_model:model", queries=200, seconds=2.0)
    result = polythrottle.tune(slo="p99<=2x", trials=8, setup=quick)
    study = result.study
    if study.best is not None and study.saving_fraction is not None:
        best, default = dict(study.best.point), dict(study.problem.space.default)
        print(f"{best} takes {study.saving_fraction:.0%} less energy than {default}")
    print(result.unmet or f"profile: {result.profile_path}")
    print(f"energy: {result.boundary}")


if __name__ == "__main__":
    main()
