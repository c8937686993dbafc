"""Reads what the workers of `elastic_script` wrote down, and tells what counted from what a loss has undone."""

import json
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Step:
    """One step of one generation, as its workers wrote it down."""

    generation: int
    step: int
    epoch: int
    samples: tuple[int, ...]
    at_s: float
    loss: float


def steps(folder: Path) -> dict[int, dict[int, Step]]:
    """Return the steps each generation did: generation → step → what was done; a torn last line does not count."""
    found: dict[int, dict[int, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for path in folder.glob("*.jsonl"):
        for text in path.read_text().split("\n")[:-1]:
            line = json.loads(text)
            found[line["generation"]][line["step"]].append(line)
    return {
        generation: {step: _joined(lines) for step, lines in sorted(by_step.items())}
        for generation, by_step in sorted(found.items())
    }


def _joined(lines: list[dict[str, Any]]) -> Step:
    samples = tuple(sample for line in lines for sample in line["samples"])
    first = lines[0]
    last_s, loss = max(line["at_s"] for line in lines), sum(line["loss"] for line in lines) / len(lines)
    return Step(first["generation"], first["step"], first["epoch"], samples, last_s, loss)


def counted(done: dict[int, dict[int, Step]]) -> list[Step]:
    """Return the steps that count: those a later generation went on from, and its own."""
    kept: dict[int, Step] = {}
    for generation in sorted(done):
        first = min(done[generation])
        kept = {step: each for step, each in kept.items() if step < first} | done[generation]
    return [kept[step] for step in sorted(kept)]


def undone_s(done: dict[int, dict[int, Step]]) -> list[float]:
    """Return, for each generation but the last, for how long it had trained past what the next went on from."""
    generations = sorted(done)
    found = []
    for this, following in pairwise(generations):
        first = min(done[following])
        past = [step for step in done[this] if step >= first]
        start_s = done[this][first - 1].at_s if first - 1 in done[this] else done[this][min(done[this])].at_s
        found.append(done[this][max(past)].at_s - start_s if past else 0.0)
    return found
