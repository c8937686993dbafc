"""Errors of predicted latency beside fine-tuning, over simulated boards, models and seeds; prints a table.

Run ``python benchmarks/interference.py [seeds]``; the table is kept in ``benchmarks/interference.md``.
"""

import sys
from collections.abc import Iterator

import numpy as np

from polythrottle.catalog import load_board, load_model
from polythrottle.domain.errors import InvalidInput
from polythrottle.training.beside.corun_bench import CoRunProfile, profile
from polythrottle.training.beside.operating_options import FinetuningJob
from polythrottle.training.beside.simulated_host import SimulatedBench

BOARDS = {
    "jetson-agx-orin": (64, 1000),
    "jetson-orin-nano": (16, 1000),
    "jetson-xavier-nx": (16, 1000),
    "jetson-tx2": (8, 100),
    "jetson-nano": (8, 100),
    "a100": (64, 1000),
    "v100": (64, 1000),
    "l4": (64, 1000),
}
"""Samples of a step and outputs of the head, by board; of Orin and TX2 those of arXiv 2310.19991."""
MODELS = ("efficientnet-b7", "efficientnet-b4", "resnet50", "bert-base-fp16", "mobilenetv2")
NOISE, FITTED, HELD_OUT, REQUESTS = 0.03, 8, 24, 200


def profiled(board: str, model: str, seed: int) -> CoRunProfile:
    """Return the profile of one board, model and seed."""
    batch, output = BOARDS[board]
    job = FinetuningJob(10 * batch, batch, 1, output, model)
    bench = SimulatedBench(load_board(board), load_model(model), job, NOISE, seed)
    return profile(bench, FITTED, HELD_OUT, REQUESTS, seed)


def rows(seeds: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield name and figures, shape (seeds, figures), of every pair that fits."""
    for board in BOARDS:
        for model in MODELS:
            try:
                told = [profiled(board, model, seed).errors for seed in range(seeds)]
            except InvalidInput as err:
                sys.stderr.write(f"{board}, {model}: {err}\n")
                continue
            figures = [[each for error in errors for each in (error.mean, error.tail, error.within)] for errors in told]
            yield f"{board} | {model}", np.array(figures, dtype=float)


def main() -> None:
    """Print the table and the worst of each column."""
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    print("| board | model | paper: mean | tail | cold: mean | worst | tail | 200: mean | worst | tail | within 2 sd |")
    print("| --- " * 11 + "|")
    everything = []
    for name, figures in rows(seeds):
        everything.append(figures)
        print(_line(name, figures), flush=True)
    print(_line("**all** |", np.vstack(everything)))


def _line(name: str, figures: np.ndarray) -> str:
    middle, worst = figures.mean(axis=0), figures.max(axis=0)
    shown = [middle[0], middle[1], middle[3], worst[3], middle[4], middle[6], worst[6], middle[7], middle[8]]
    return f"| {name} | " + " | ".join(f"{value:.1%}" for value in shown) + " |"


if __name__ == "__main__":
    main()
