"""One search on eight boards together against the same search on one: time, trials, and how good the answers are.

    python benchmarks/boards_together.py [--boards 8] [--seeds 1] [--out benchmarks/boards_together.md]

Everything is simulated, time too: a board's clock says how long its trials take, and boards work at once in it. What
a suggestion takes at the desk is not counted. Boards of one kind differ in speed (2 %) and in power (4 %, one standard
deviation each), and every window by 2 % besides. An answer is judged by what is true at its point without noise: by
how much more energy it takes than the best point whose p99 holds the limit, and whether its own p99 does; for several
boards on the slowest of them.
"""

import argparse
import math
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, mean

from polythrottle.backends.simulated import SimulatedDevice, SimulatedWorkload
from polythrottle.catalog import load_board, load_model
from polythrottle.domain.measurement import Measurement
from polythrottle.domain.problem import Constraint, Problem
from polythrottle.domain.space import OperatingPoint
from polythrottle.domain.study import Study
from polythrottle.optimize import make_optimizer
from polythrottle.storage.boards_journal import BoardsJournal
from polythrottle.storage.journal import Journal
from polythrottle.tuning.boards_together import BoardsView, OpenBoard
from polythrottle.tuning.setup import Setup
from polythrottle.tuning.several_boards import SharedStudy
from polythrottle.tuning.stopping import Budget, Rule
from polythrottle.tuning.tuner import tune

QUESTIONS = (
    ("jetson-orin-nano", "resnet50", "p99<=50ms"),
    ("jetson-agx-orin", "efficientnet-b4", "p99<=1.2x"),
    ("jetson-tx2", "efficientnet-b0", "p99<=40ms"),
    ("jetson-nano", "mobilenetv2", "p99<=1.5x"),
)
TRIALS = 30
SPEED_SD, POWER_SD = 0.02, 0.04
WITHIN = 0.02
SLACK = 0.01


class OneOfAKind(SimulatedDevice):
    """A simulated board that is slower and hungrier than its kind, by factors."""

    slower = 1.0
    hungrier = 1.0

    def apply(self, point: OperatingPoint) -> None:
        """Set every knob; what is served then takes as long and as much as on this board."""
        super().apply(point)
        time, power = self._state.factors
        self._state.factors = (time * self.slower, power * self.hungrier)


@dataclass(frozen=True)
class Outcome:
    """What a search came to.

    Args:
        duration_s: How long it took, simulated.
        trials: How many it made, on all boards.
        over: By what share its answer takes more energy than the best point that holds; None if there is no answer.
        beyond: By what share the answer's p99 exceeds the limit; negative if it holds.
    """

    duration_s: float
    trials: int
    over: float | None
    beyond: float

    @property
    def good(self) -> bool:
        """Whether the answer is within 2 % of the best, and its limit broken by 1 % at most."""
        return self.over is not None and self.over <= WITHIN and self.beyond <= SLACK


def boards_of(kind: str, model: str, count: int, seed: int) -> list[OpenBoard]:
    """Return simulated boards of one kind that differ."""
    drawn = random.Random(f"{kind} {model} {seed}")
    boards = []
    for number in range(count):
        device = OneOfAKind(load_board(kind), seed=1000 * (seed + 1) + number)
        device.slower = math.exp(drawn.gauss(0.0, SPEED_SD))
        device.hungrier = math.exp(drawn.gauss(0.0, POWER_SD))
        boards.append(OpenBoard(device.uri, device, device.serve(load_model(model))))
    return boards


def problem_of(board: OpenBoard, limit: str) -> Problem:
    """Return the question, with the window that `polythrottle tune` has."""
    window = Setup(board.uri, board.served.uri).searching.window(board.device)
    space = board.device.space * board.served.space
    return Problem(space, (Constraint.parse(limit),), board.uri, board.served.uri, {}, window)


def judged(board: OpenBoard, study: Study, duration_s: float) -> Outcome:
    """Return how good a search was, by what is true on a board."""
    device, served = board.device, board.served
    assert isinstance(device, OneOfAKind)
    assert isinstance(served, SimulatedWorkload)
    space = study.problem.space
    truth: dict[OperatingPoint, Measurement] = dict(zip(space, device.expected_all(served, list(space)), strict=True))
    p99_s = {point: (seen.latency.p99_s or 0.0) * device.slower for point, seen in truth.items()}
    limit = study.problem.constraints[0].resolved(p99_s[space.default] / 1.0)
    least_j = min(seen.energy_j for point, seen in truth.items() if p99_s[point] <= limit.limit)
    if (best := study.best) is None:
        return Outcome(duration_s, len(study.trials), None, math.inf)
    beyond = p99_s[best.point] / limit.limit - 1.0
    return Outcome(duration_s, len(study.trials), truth[best.point].energy_j / least_j - 1.0, beyond)


def alone(board: OpenBoard, problem: Problem, folder: Path, seed: int) -> Outcome:
    """Return what a search on one board comes to."""
    with Journal.create(folder / f"alone-{seed}.jsonl", Study(problem, "bayes", seed), {}) as journal:
        for _ in tune(board.device, board.served, make_optimizer("bayes"), journal, Budget(TRIALS), Rule()):
            pass
        return judged(board, journal.study, journal.study.cost.duration_s)


def together(boards: Sequence[OpenBoard], problem: Problem, folder: Path, seed: int) -> Outcome:
    """Return what a search on several boards comes to, judged on the slowest."""
    with BoardsJournal.create(folder / f"together-{seed}.jsonl", Study(problem, "bayes", seed), {}) as journal:
        shared = SharedStudy(boards, make_optimizer("bayes"), journal, Budget(2 * TRIALS), Rule())
        for _ in shared.search():
            pass
        study = BoardsView(journal.study, journal.boards).on_all()
    slowest = max(boards, key=lambda each: each.device.slower)  # type: ignore[attr-defined]
    return judged(slowest, study, shared.duration_s)


def outcomes(count: int, seeds: int) -> Iterator[tuple[str, Outcome, Outcome]]:
    """Yield each question with what one board and what several came to."""
    for seed in range(seeds):
        for kind, model, limit in QUESTIONS:
            with tempfile.TemporaryDirectory() as name:
                boards = boards_of(kind, model, count, seed)
                problem = problem_of(boards[0], limit)
                one = alone(boards[0], problem, Path(name), seed)
                several = together(boards_of(kind, model, count, seed), problem, Path(name), seed)
                yield f"{kind}, {model}, {limit}, seed {seed}", one, several


def page(found: Sequence[tuple[str, Outcome, Outcome]], count: int) -> str:
    """Return the table and the figures that are asked for."""
    rows = [
        f"| {question} | {one.duration_s:.0f} s | {several.duration_s:.0f} s | {one.trials} | {several.trials} "
        f"| {_told(one)} | {_told(several)} |"
        for question, one, several in found
    ]
    time = geometric_mean([several.duration_s / one.duration_s for _, one, several in found])
    trials = sum(several.trials for *_, several in found) / sum(one.trials for _, one, _ in found)
    columns = ([one for _, one, _ in found], [several for *_, several in found])
    overs = [[each.over for each in column if each.over is not None] for column in columns]
    good = [sum(each.good for each in column) for column in columns]
    return "\n".join(
        [
            f"| question | time, one board | time, {count} boards | trials, one | trials, {count} | answer, one "
            f"| answer, {count} |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
            f"Time to the answer, {count} boards against one: {time:.2f} (geometric mean). Trials in all: {trials:.2f} "
            f"times as many. Energy above the best point: {100 * mean(overs[0]):.1f} % with one board, "
            f"{100 * mean(overs[1]):.1f} % with {count}. Within 2 % of it and holding the limit to 1 %: "
            f"{good[0]} and {good[1]} of {len(found)}.",
        ]
    )


def _told(outcome: Outcome) -> str:
    if outcome.over is None:
        return "none"
    return f"+{100 * outcome.over:.1f} %{f', p99 {100 * outcome.beyond:+.1f} %' if outcome.beyond > 0 else ''}"


def main() -> None:
    """Print the table, or write it as a page."""
    words = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words.add_argument("--boards", type=int, default=8)
    words.add_argument("--seeds", type=int, default=1)
    words.add_argument("--out", type=Path, default=None)
    asked = words.parse_args()
    found = []
    for each in outcomes(asked.boards, asked.seeds):
        found.append(each)
        print(each, flush=True)
    text = page(found, asked.boards)
    print(text)
    if asked.out is not None:
        about = " ".join((__doc__ or "").split("\n\n", 2)[2].split())
        command = f"python benchmarks/boards_together.py --boards {asked.boards} --seeds {asked.seeds}"
        asked.out.write_text(f"# Boards that search together\n\n{about}\n\n`{command}`\n\n{text}\n")


if __name__ == "__main__":
    main()
