"""Co-runs on a simulated board: time slicing as the simulator has it, and noise."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice

import numpy as np

from polythrottle.backends.simulated.engine import Engine
from polythrottle.backends.simulated.noise import Noise
from polythrottle.backends.simulated.sharing import ASSUMED, Sharing, together
from polythrottle.backends.simulated.training import trained
from polythrottle.catalog import Board, Model
from polythrottle.errors import InvalidInput
from polythrottle.finetune.corun import CoRun, intensity
from polythrottle.finetune.job import Job
from polythrottle.measurement import Latency
from polythrottle.space import OperatingPoint

SHARES = (0.0, 0.25, 0.5, 0.75)
"""Shares of the time that fine-tuning gets in the cases."""
_CASES = 400
_WINDOW = 500
_ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "int8": 1}


class SimulatedBench:
    """A simulated board that serves a model and fine-tunes it beside; satisfies `coruns.Bench`.

    Args:
        board: From the catalogue.
        model: What is served.
        job: What is fine-tuned beside it.
        noise: Standard deviation, as a fraction, of a query's time.
        seed: Of noise and cases.
        sharing: What taking turns costs.

    Attributes:
        slower: Factor on every latency from now on: a drift, for whatever has to follow one.

    Raises:
        InvalidInput: If the noise is not a fraction, or the board cannot be simulated or hold the model.
    """

    simulated = True

    def __init__(
        self, board: Board, model: Model, job: Job, noise: float = 0.03, seed: int = 0, sharing: Sharing = ASSUMED
    ) -> None:
        if not 0 <= noise < 1 or seed < 0:
            raise InvalidInput(f"a simulation needs 0 <= noise < 1 and seed >= 0, not noise={noise} and seed={seed}")
        self._engine, self._board, self._model, self._job = Engine(board), board, model, job
        self._engine.simulation.gpu.ops_per_clock(model.precision)
        self._training = trained(model, job.output)
        self._noise, self._seed, self._sharing, self._number = noise, seed, sharing, 0
        self._points: dict[CoRun, OperatingPoint] = {}
        self.slower = 1.0

    @property
    def title(self) -> str:
        """Board and model, marked as simulated."""
        return f"{self._model.title} on {self._board.title} (simulated)"

    @cached_property
    def cases(self) -> Sequence[CoRun]:
        """Some hundred co-runs at random among batches, shares and points of the board."""
        rng = np.random.default_rng([self._seed, 1])
        for _ in range(_CASES):
            point = self._board.default.moved(self._drawn(rng))
            if self._board.refusal(point) is None:
                case = self.case(point, self._batch(rng), self._step(rng), float(rng.choice(SHARES)))
                self._points[case] = point
        return tuple(self._points)

    def _drawn(self, rng: np.random.Generator) -> dict[str, int | float]:
        names = [name for name in ("gpu_max_hz", "mem_hz", "cpu_max_hz") if name in self._board.default]
        found = {name: rng.choice(self._board.knob(name).levels[-8:]).item() for name in names}
        floor = {"gpu_min_hz": self._board.knob("gpu_min_hz").levels[0]} if "gpu_min_hz" in self._board.default else {}
        return {**found, **floor}

    def _batch(self, rng: np.random.Generator) -> int:
        return int(rng.choice(self._model.space(self._board.memory_bytes).knob("batch_size").levels))

    def _step(self, rng: np.random.Generator) -> int:
        return max(1, self._job.batch // int(rng.choice([1, 2, 4, 8])))

    def case(self, point: OperatingPoint, batch: int, samples: int, share: float) -> CoRun:
        """Return the co-run at a point of the board, without its latency.

        Args:
            point: Levels of every knob of the board.
            batch: Items per query.
            samples: Of a step of the fine-tuning.
            share: Of the time that fine-tuning gets.
        """
        samples = samples if share else 0
        operations, moved = _work(self._model, batch)
        step_operations, step_moved = _work(self._training, samples) if samples else (0.0, 0.0)
        clocks, width = self._engine.clocks(self._engine.columns([point])), _ELEMENT_BYTES[self._model.precision]
        return CoRun(
            operations=operations,
            traffic_bytes=moved,
            batch=batch,
            step_operations=step_operations,
            step_bytes=step_moved,
            step_batch=samples,
            gpu_hz=clocks.gpu_max_hz.item(),
            memory_hz=clocks.memory_hz.item(),
            cpu_hz=clocks.cpu_hz.item(),
            share=share,
            intensity=intensity(operations, moved, width),
            step_intensity=intensity(step_operations, step_moved, width),
        )

    def truth_s(self, case: CoRun) -> float:
        """Return the latency of one of the cases without noise, in seconds.

        Raises:
            InvalidInput: If it is none of them.
        """
        if case.unmeasured not in self._points:
            raise InvalidInput("this bench can only measure its own cases")
        serving, training = (self._model, case.batch), (self._training, max(case.step_batch, 1))
        found = together(self._engine, serving, training, self._points[case.unmeasured], case.share, self._sharing)
        return found.latency_s * self.slower

    def measure(self, case: CoRun) -> CoRun:
        """Return a case with the mean and tail of a window of queries."""
        noise = self._stream()
        factor, _ = noise.window()
        times_s = np.fromiter(islice(noise.queries(), _WINDOW), float) * factor * self.truth_s(case)
        told = Latency.of(times_s.tolist())
        return replace(case, latency_s=told.mean_s, tail_s=told.p99_s)

    def request(self, case: CoRun) -> CoRun:
        """Return a case with the latency of one query."""
        return replace(case, latency_s=self.truth_s(case) * next(self._stream().queries()))

    def _stream(self) -> Noise:
        self._number += 1
        return Noise(self._noise, self._seed, self._number)


def _work(model: Model, items: int) -> tuple[float, float]:
    """Return the operations of a query and the bytes it moves."""
    return model.operations * items, model.weight_bytes + model.traffic_bytes * items
