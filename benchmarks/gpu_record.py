"""Record what one NVIDIA GPU shows by reading alone: power by its counter and its fields, and steps of a model.

    python benchmarks/gpu_record.py --out gpu_record.json      # two minutes; nothing is set
    python benchmarks/gpu_record.py --simulated h100-sxm --bandwidth 4.8e12 --out benchmarks/gpu_record_h200.json

The second sets steps on record beside those of a simulated card, whose memory may be given another bandwidth.
The load idles, works and pulses; it is torch's. The model has Llama 3.1 8B's shapes in bfloat16, random weights, and no
engine around it: each step of decoding is a CUDA graph, so that times are those of the GPU alone, at the clocks it has.
``benchmarks/gpu_record.md`` has what was recorded.
"""

import argparse
import ctypes
import itertools
import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pynvml
import torch
from torch.nn import functional

ENERGY, AVERAGE, INSTANT = 83, 185, 186  # NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, _POWER_AVERAGE, _POWER_INSTANT
HIDDEN, LAYERS, HEADS, SHARED, INNER, WORDS, WIDTH = 4096, 32, 32, 8, 14336, 128256, 128  # Llama 3.1 8B
DECODES = ((1, 1024), (8, 1024), (32, 1024), (64, 1024), (128, 1024), (256, 1024), (64, 256), (64, 4096), (1, 8192))
PROMPTS = (128, 512, 2048, 8192)


class Meter:
    """Look at one GPU as fast as its driver answers, in a thread of its own."""

    def __init__(self) -> None:
        pynvml.nvmlInit()
        self.gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        self.seen: list[tuple[float, float, float, float, int]] = []  # time, joules, average W, instant W, SM MHz
        self.calls_s: list[float] = []

    def look(self) -> tuple[float, float, float, float, int]:
        """Return the time, the counter's joules, both powers, and the SM clock."""
        fields = (pynvml.c_nvmlFieldValue_t * 3)()
        for field, number in zip(fields, (ENERGY, AVERAGE, INSTANT), strict=True):
            field.fieldId = number
        began = time.perf_counter()
        pynvml._nvmlGetFunctionPointer("nvmlDeviceGetFieldValues")(self.gpu, 3, ctypes.byref(fields))
        now = time.perf_counter()
        self.calls_s.append(now - began)
        millijoules, average, instant = fields[0].value.ullVal, fields[1].value.uiVal, fields[2].value.uiVal
        clock = pynvml.nvmlDeviceGetClockInfo(self.gpu, pynvml.NVML_CLOCK_SM)
        return now, millijoules / 1e3, average / 1e3, instant / 1e3, clock

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look while the block runs."""
        self.seen, done = [], threading.Event()

        def watch() -> None:
            while not done.is_set():
                self.seen.append(self.look())

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def means(self, settled_s: float) -> dict[str, float]:
        """Return the mean power by the counter and by both fields, and the clock, from so long after the start on."""
        seen = [each for each in self.seen if each[0] >= self.seen[0][0] + settled_s]
        moved = [late for early, late in itertools.pairwise(seen) if late[1] != early[1]]
        spans = [late[0] - early[0] for early, late in itertools.pairwise(seen)]
        weighed = [
            sum(each[part] * span for each, span in zip(seen, spans, strict=False)) / sum(spans) for part in (2, 3)
        ]
        return {
            "counter_w": (moved[-1][1] - moved[0][1]) / (moved[-1][0] - moved[0][0]),
            "counter_step_ms": 1e3 * (moved[-1][0] - moved[0][0]) / (len(moved) - 1),
            "average_w": weighed[0],
            "instant_w": weighed[1],
            "sm_mhz": statistics.fmean(each[4] for each in seen),
            "celsius": float(pynvml.nvmlDeviceGetTemperature(self.gpu, pynvml.NVML_TEMPERATURE_GPU)),
        }


def until(seconds: float, work: Callable[[], object]) -> int:
    """Repeat some work for so long; return how often."""
    began, times = time.perf_counter(), 0
    while time.perf_counter() < began + seconds:
        work()
        times += 1
    return times


def powers(meter: Meter, seconds: float) -> list[dict[str, Any]]:
    """Return what was read of each kind of load."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    small = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    result, source = torch.empty_like(small), torch.empty(2**30, device="cuda")
    copy, drawn = torch.empty_like(source), random.Random(0)

    def multiply() -> None:
        for _ in range(10):
            torch.mm(left, right, out=product)
        torch.cuda.synchronize()

    def move() -> None:
        for _ in range(5):
            copy.copy_(source)
        torch.cuda.synchronize()

    def pulse(on_s: float, off_s: Callable[[], float]) -> Callable[[], None]:
        def work() -> None:
            began = time.perf_counter()
            while time.perf_counter() < began + on_s:
                torch.mm(small, small, out=result)
                torch.cuda.synchronize()
            time.sleep(max(0.0, began + on_s + off_s() - time.perf_counter()))

        return work

    loads: list[tuple[str, Callable[[], object]]] = [
        ("idle, a CUDA context open", lambda: time.sleep(0.05)),
        ("matrix products", multiply),
        ("idle, a CUDA context open", lambda: time.sleep(0.05)),
        ("copies", move),
        *(
            (name, pulse(on_ms / 1e3, off))
            for on_ms, off_ms in ((25, 75), (12.5, 37.5))
            for name, off in (
                (f"{on_ms:g} of every {on_ms + off_ms:g} ms", partial(drawn.uniform, off_ms / 1e3, off_ms / 1e3)),
                (f"{on_ms:g} ms, then {off_ms:g} in the mean, random", partial(drawn.uniform, 0, 2 * off_ms / 1e3)),
            )
        ),
    ]
    rows = []
    for name, work in loads:
        until(0.5, work)
        with meter.watching():
            times = until(seconds, work)
        rows.append({"load": name, "times": times, "seconds": seconds, **meter.means(1.2)})
        print(rows[-1], flush=True)
    return rows


class Model:
    """The layers of Llama 3.1 8B, with random weights."""

    def __init__(self) -> None:
        def weights(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, device="cuda", dtype=torch.bfloat16).normal_(std=0.02)

        self.layers = [
            (
                weights((HEADS + 2 * SHARED) * WIDTH, HIDDEN),
                weights(HIDDEN, HEADS * WIDTH),
                weights(2 * INNER, HIDDEN),
                weights(HIDDEN, INNER),
            )
            for _ in range(LAYERS)
        ]
        self.words, self.head = weights(WORDS, HIDDEN), weights(WORDS, HIDDEN)

    def layer(self, number: int, state: torch.Tensor, kept: Sequence[torch.Tensor] | None) -> torch.Tensor:
        """Return the state after a layer: of a prompt, or of one token whose past is kept."""
        into, out, up, down = self.layers[number]
        items, tokens, _ = state.shape
        mixed = functional.linear(functional.rms_norm(state, (HIDDEN,)), into)
        query, key, value = (
            part.view(items, tokens, -1, WIDTH).transpose(1, 2)
            for part in torch.split(mixed, [HEADS * WIDTH, SHARED * WIDTH, SHARED * WIDTH], -1)
        )
        if kept is None:
            found = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        else:
            kept[0][:, :, -1:], kept[1][:, :, -1:] = key, value
            # One token: the heads that share a key are as many queries of it.
            grouped = query.reshape(items, SHARED, HEADS // SHARED, WIDTH)
            found = functional.scaled_dot_product_attention(grouped, kept[0], kept[1]).reshape(items, HEADS, 1, WIDTH)
        state = state + functional.linear(found.transpose(1, 2).reshape(items, tokens, HEADS * WIDTH), out)
        gate, inner = functional.linear(functional.rms_norm(state, (HIDDEN,)), up).chunk(2, -1)
        return state + functional.linear(functional.silu(gate) * inner, down)

    def step(self, words: torch.Tensor, kept: Sequence[Sequence[torch.Tensor]] | None) -> torch.Tensor:
        """Return the next words, of shape (items, 1), after words of shape (items, tokens)."""
        state = self.words[words]
        for number in range(LAYERS):
            state = self.layer(number, state, None if kept is None else kept[number])
        return functional.linear(functional.rms_norm(state[:, -1:], (HIDDEN,)), self.head).argmax(-1)


def steps(meter: Meter, seconds: float) -> list[dict[str, Any]]:
    """Return seconds and watts of steps that decode, and of steps that read one prompt."""
    model, rows = Model(), []
    for items, context in DECODES:
        kept = [
            torch.zeros(2, items, SHARED, context, WIDTH, device="cuda", dtype=torch.bfloat16).unbind()
            for _ in range(LAYERS)
        ]
        words = torch.zeros(items, 1, dtype=torch.long, device="cuda")
        model.step(words, kept)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model.step(words, kept)
        rows.append({"step": "decode", "items": items, "tokens": context, **timed(meter, graph.replay, seconds)})
        print(rows[-1], flush=True)
        del graph, kept
        torch.cuda.empty_cache()
    for tokens in PROMPTS:
        words = torch.zeros(1, tokens, dtype=torch.long, device="cuda")
        read = partial(model.step, words, None)
        rows.append({"step": "prompt", "items": 1, "tokens": tokens, **timed(meter, read, seconds)})
        print(rows[-1], flush=True)
    return rows


def timed(meter: Meter, step: Callable[[], object], seconds: float) -> dict[str, float]:
    """Return how long a step takes and what is drawn meanwhile."""

    def three() -> None:
        for _ in range(3):
            step()
        torch.cuda.synchronize()

    until(0.7, three)
    with meter.watching():
        began = time.perf_counter()
        times = 3 * until(seconds, three)
        took_s = time.perf_counter() - began
    return {"step_s": took_s / times, **meter.means(0.1)}


def beside(record: dict[str, Any], board: str, bandwidth: float | None) -> None:
    """Print measured steps beside simulated ones, those without what an engine costs, which was not measured either."""
    from polythrottle.backends.simulated.engine import StepPhysics, StepWork
    from polythrottle.catalog import load_board
    from polythrottle.catalog.models import load_language_model

    card = load_board(board)
    assert card.language is not None
    bare = replace(card.language, layer_s=0.0, sequence_s=0.0, step_s=0.0)
    if bandwidth is not None:
        bare = replace(bare, bandwidth_bytes_per_s=bandwidth)
    top_hz = float(max(card.knob("gpu_max_hz").levels))
    physics = StepPhysics(load_language_model("llama-3.1-8b"), bare, top_hz)
    heads = ("step", "sequences", "tokens", "ms", "simulated", "W", "simulated", "SM MHz", "simulated")
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for row in record["steps"]:
        items, tokens = row["items"], row["tokens"]
        work = StepWork(items, items * tokens)
        if row["step"] == "prompt":
            work = StepWork(0, 0.0, tokens, tokens * (tokens + 1) / 2, 1)
        took_s, power_w, clock_hz = physics.run(work, top_hz, record["about"]["limit_w"])
        cells = (
            f"{1e3 * row['step_s']:.2f}",
            f"{1e3 * took_s:.2f} ({took_s / row['step_s'] - 1:+.0%})",
            f"{row['counter_w']:.0f}",
            f"{power_w:.0f} ({power_w / row['counter_w'] - 1:+.0%})",
            f"{row['sm_mhz']:.0f}",
            f"{clock_hz / 1e6:.0f}",
        )
        print(f"| {row['step']} | {items} | {tokens} | {' | '.join(cells)} |")


def main() -> None:
    """Record and write, or set a record beside the simulator."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("gpu_record.json"))
    parser.add_argument("--seconds", type=float, default=6.0, help="length of each load; a third of it for a step")
    parser.add_argument("--simulated", metavar="BOARD", help="set the record in --out beside this simulated card")
    parser.add_argument("--bandwidth", type=float, help="bytes a second of its memory, in place of its own")
    options = parser.parse_args()
    if options.simulated:
        beside(json.loads(options.out.read_text()), options.simulated, options.bandwidth)
        return
    meter = Meter()
    about = {
        "gpu": pynvml.nvmlDeviceGetName(meter.gpu),
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "torch": torch.__version__,
        "limit_w": pynvml.nvmlDeviceGetEnforcedPowerLimit(meter.gpu) / 1e3,
    }
    with meter.watching():
        time.sleep(3.0)
    rest = {"load": "idle, no CUDA context", "times": 0, "seconds": 3.0, **meter.means(0.5)}
    found = {"powers": [rest, *powers(meter, options.seconds)]}
    with torch.inference_mode():
        found["steps"] = steps(meter, options.seconds / 3)
    calls = sorted(meter.calls_s)
    about["look_ms"] = {"median": 1e3 * calls[len(calls) // 2], "p99": 1e3 * calls[int(0.99 * len(calls))]}
    options.out.write_text(json.dumps({"about": about, **found}, indent=1))


if __name__ == "__main__":
    main()
