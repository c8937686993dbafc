"""The simulator of language-model engines beside published measurements, with models and runs left out.

``python benchmarks/llm_simulator.py --data FOLDER`` prints the tables of ``llm_simulator.md``; the folder holds the
tables that are named there. Coefficients in ``devices/*.toml`` come from ``--fit``. A model left out is one whose rows,
at any precision and number of GPUs, were not used for the coefficients it is predicted with.
"""

import argparse
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from polythrottle.backends.simulated.engine import TERMS, StepPhysics, StepWork
from polythrottle.backends.simulated.language_model import BLOCK_TOKENS, TokenRequest, TokenServer
from polythrottle.catalog import load_board
from polythrottle.catalog.boards import LanguageSimulation
from polythrottle.catalog.models import Experts, LanguageModel, Lengths, ServerArguments

# Shapes: layers, hidden, heads, key-value heads, head width, inner width, vocabulary; experts as (count, chosen, width,
# shared width, layers). Of those in profiles/workloads the sources are there; the others are as commonly stated.
SHAPES: Mapping[str, tuple[tuple[int, ...], tuple[int, ...] | None, tuple[int, int]]] = {
    r"Qwen3-(VL-)?8B": ((36, 4096, 32, 8, 128, 12288, 151936), None, (0, 0)),
    r"Qwen3-14B": ((40, 5120, 40, 8, 128, 17408, 151936), None, (0, 0)),
    r"Qwen3-(VL-)?32B": ((64, 5120, 64, 8, 128, 25600, 151936), None, (0, 0)),
    r"Qwen3-.*30B-A3B": ((48, 2048, 32, 4, 128, 0, 151936), (128, 8, 768, 0, 0), (0, 0)),
    r"Qwen3-.*235B-A22B": ((94, 4096, 64, 4, 128, 0, 151936), (128, 8, 1536, 0, 0), (0, 0)),
    r"Qwen3-Coder-480B": ((62, 6144, 96, 8, 128, 0, 151936), (160, 8, 2560, 0, 0), (0, 0)),
    r"gemma-3-27b": ((62, 5376, 32, 16, 128, 21504, 262208), None, (1024, 52)),
    r"Llama-3.1-8B": ((32, 4096, 32, 8, 128, 14336, 128256), None, (0, 0)),
    r"Llama-3.[13]-70B": ((80, 8192, 64, 8, 128, 28672, 128256), None, (0, 0)),
    r"Llama-3.1-405B": ((126, 16384, 128, 8, 128, 53248, 128256), None, (0, 0)),
    r"gpt-oss-120b": ((36, 2880, 64, 8, 64, 0, 201088), (128, 4, 2880, 0, 0), (128, 18)),
    r"gpt-oss-20b": ((24, 2880, 64, 8, 64, 0, 201088), (32, 4, 2880, 0, 0), (128, 12)),
    r"Llama-4-Scout": ((48, 5120, 40, 8, 128, 16384, 202048), (16, 1, 8192, 8192, 0), (0, 0)),
    r"Llama-4-Maverick": ((48, 5120, 40, 8, 128, 16384, 202048), (128, 1, 8192, 8192, 24), (0, 0)),
    r"Qwen3.6-27B": ((64, 5120, 24, 4, 256, 17408, 248320), None, (0, 0)),
    r"Qwen3-Coder-Next": ((48, 2048, 16, 2, 256, 0, 151936), (512, 10, 512, 512, 0), (0, 0)),
}
STATES = {r"Qwen3.6-27B": 48 * 48 * 128 * 128 * 4.0, r"Qwen3-Coder-Next": 36 * 32 * 128 * 128 * 4.0}
"""Bytes of a sequence's state: layers, value heads, and a square of 128 in single precision; as commonly stated."""
PROMPTS = {"gpqa": 250, "lm-arena-chat": 200, "sourcegraph-fim": 700}
"""Tokens of a prompt of each ML.ENERGY task; assumed, for the tables do not say. Tasks with images are left out."""
PRECISIONS = {"bfloat16": "bf16", "fp8": "fp8", "mxfp4": "mxfp4"}
FITTED = ("experts", "spread", "context", "exchanges", "layers", "expert_layers", "fp8", "sequences", "step")
FIELDS = dict(
    zip(
        FITTED,
        (
            *("expert_stretch", "expert_spread", "context_stretch", "exchange_s", "layer_s", "expert_layer_s"),
            *("fp8_expert_layer_s", "sequence_s", "step_s"),
        ),
        strict=True,
    )
)
PRIOR = np.array([1.3, 0.3, 1.947, 8.0, 32.1, 25.0, 100.0, 45.9, 126.0])
"""What the fit is drawn towards, times in microseconds: context, layers, sequences and step are those of
inference-sim/BLIS (commit f90a1e3, defaults.yaml); the others are assumed."""
PULL = {"H100": 3.0, "B200": 1.0}
STEADY = 1.35
"""B200 is bound by its host at some batches, which the tables do not name: rows whose p90 is more than this many times
their median are shown apart and not fitted to."""


def shape_of(name: str) -> str | None:
    """Return the pattern in `SHAPES` that a published name fits; None if there is none."""
    return next((pattern for pattern in SHAPES if re.search(pattern, name)), None)


def model_of(name: str, precision: str, gpus: int, parallel: bool, sequences: int = 4096) -> LanguageModel:
    """Return the description of a published model on a group of GPUs."""
    shape, experts, window = SHAPES[shape_of(name) or ""]
    return LanguageModel(
        name,
        name,
        precision,
        gpus,
        *shape,
        server=ServerArguments(2048, sequences, 0.9, 1.2e9, 0.0, 0.0),
        lengths=Lengths(200, 200, 0.8, 4096),
        concurrency=(1,),
        experts=None if experts is None else Experts(*experts, parallel),
        window_tokens=window[0],
        window_layers=window[1],
        state_bytes=STATES.get(shape_of(name) or "", 0.0),
    )


def physics_of(board: str, model: LanguageModel, coefficients: LanguageSimulation | None = None) -> StepPhysics:
    """Return the steps of a model on a board, at other coefficients than the board's if any are given."""
    found = load_board(board)
    assert found.language is not None
    return StepPhysics(model, coefficients or found.language, float(found.knob("gpu_max_hz").levels[-1]))


# Median times between tokens and watts, against ML.ENERGY.


def decoding(row: Any) -> StepWork:
    """Return the median step of an ML.ENERGY row: prompts are in it where more than half of the steps have one."""
    prompt = PROMPTS[row.task]
    batch = row.avg_batch_size
    joining = batch / row.mean_output_tokens
    tokens = joining * prompt if joining > 0.5 else 0.0
    return StepWork(round(batch), batch * (prompt + row.mean_output_tokens / 2), round(tokens), tokens * prompt / 2)


def published(data: Path, gpu: str) -> pd.DataFrame:
    """Return the ML.ENERGY rows of a GPU that can be posed."""
    rows = pd.read_csv(data / "mlenergy_llm.csv.gz")
    rows = rows[(rows.gpu == gpu) & rows.task.isin(list(PROMPTS))].copy()
    rows["family"] = rows.model.map(shape_of)
    if unknown := sorted(set(rows[rows.family.isna()].model)):
        print(f"{gpu}: not posed, for their shape is not a plain decoder's: {', '.join(unknown)}")
    return rows[rows.family.notna()].reset_index(drop=True)


def columns(rows: pd.DataFrame, board: str) -> pd.DataFrame:
    """Return the terms of each row's step, in microseconds for coefficients of one."""
    found = load_board(board).language
    assert found is not None
    units = {name: 1e-6 if name.endswith("_s") else 1.0 for name in FIELDS.values()}
    unit = replace(found, **{**units, "fp8_expert_layer_s": 0.0})
    table = []
    for row in rows.itertuples():
        model = model_of(row.model, PRECISIONS[row.precision], row.num_gpus, row.ep > 1)
        physics = physics_of(board, model, unit)
        work = decoding(row)
        terms = {name: 1e6 * term for name, term in zip(TERMS, physics.terms(work), strict=True)}
        terms["spread"] = terms["experts"] * (row.ep > 1)
        terms["fp8"] = terms["expert_layers"] * (row.precision == "fp8")
        terms["fixed"] = terms["dense"] + terms["bytes"] + terms["attention"]
        table.append(terms)
    return pd.DataFrame(table)


def fit(terms: pd.DataFrame, median_us: pd.Series, prior: np.ndarray[Any, Any], pull: float) -> np.ndarray[Any, Any]:
    """Return the coefficients of least squared relative error that are not negative, drawn towards a prior."""
    relative = terms[list(FITTED)].to_numpy() / median_us.to_numpy()[:, None]
    rest = 1 - terms.fixed.to_numpy() / median_us.to_numpy()
    towards = np.diag(np.sqrt(pull) / prior)
    found: np.ndarray[Any, Any] = nnls(np.vstack([relative, towards]), np.concatenate([rest, towards @ prior]))[0]
    return found


def errors(terms: pd.DataFrame, median_us: pd.Series, found: np.ndarray[Any, Any]) -> pd.Series:
    """Return by what fraction each predicted time is off."""
    return (terms.fixed + terms[list(FITTED)] @ found) / median_us - 1


def left_out(rows: pd.DataFrame, terms: pd.DataFrame, prior: np.ndarray[Any, Any], pull: float) -> pd.Series:
    """Return the errors of each model, predicted from the others."""
    off = pd.Series(index=rows.index, dtype=float)
    median_us = 1e3 * rows.itl_median_ms
    for family in rows.family.unique():
        own = rows.family == family
        found = fit(terms[~own], median_us[~own], prior, pull)
        off[own] = errors(terms[own], median_us[own], found)
    return off


def shown(off: pd.Series) -> str:
    """Return the size of errors as people read it."""
    size = off.abs()
    return f"mean {size.mean():.1%}, median {size.median():.1%}, p90 {size.quantile(0.9):.1%} of {len(size)}"


def times_between_tokens(data: Path) -> None:
    """Print median ITL against ML.ENERGY, models left out, and what the fit of all gives."""
    prior, pull = PRIOR, PULL["H100"]
    for gpu, board in (("H100", "h100-sxm"), ("B200", "b200")):
        rows = published(data, gpu)
        terms = columns(rows, board)
        median_us = 1e3 * rows.itl_median_ms
        even = rows.itl_p90_ms <= STEADY * rows.itl_median_ms if gpu == "B200" else pd.Series(True, index=rows.index)
        pull = PULL[gpu]
        whole = fit(terms[even], median_us[even], prior, pull)
        print(f"\n{gpu}: median ITL")
        print("  coefficients:", ", ".join(f"{name} {value:.4g}" for name, value in zip(FITTED, whole, strict=True)))
        off = left_out(rows[even], terms[even], prior, pull)
        print(f"  models left out: {shown(off)}")
        for family, each in off.groupby(rows[even].family):
            print(f"    {family:<24} {shown(each)}, bias {each.mean():+.1%}")
        print(f"  in the fit:      {shown(errors(terms[even], median_us[even], whole))}")
        if not even.all():
            print(f"  rows set aside:  {shown(errors(terms[~even], median_us[~even], whole))} (host-bound)")
        watts(rows[even], gpu, board)
        prior = whole


def watts(rows: pd.DataFrame, gpu: str, board: str) -> None:
    """Print mean power a GPU against ML.ENERGY, models left out; use is that of the measured time."""
    limit_w = load_board(board).power_max_w
    uses = []
    for row in rows.itertuples():
        model = model_of(row.model, PRECISIONS[row.precision], row.num_gpus, row.ep > 1)
        memory, compute = physics_of(board, model).use(decoding(row), row.itl_median_ms / 1e3)
        uses.append((1.0, memory, compute))
    use = np.array(uses)
    measured_w = (rows.avg_power_w / rows.num_gpus).to_numpy()
    free = measured_w < 0.95 * limit_w
    family = rows.family.to_numpy()
    off = np.empty(len(rows))
    for each in np.unique(family):
        own = family == each
        found = nnls(use[free & ~own], measured_w[free & ~own])[0]
        off[own] = np.minimum(use[own] @ found, limit_w) / measured_w[own] - 1
    whole = nnls(use[free], measured_w[free])[0]
    print(f"  watts: floor {whole[0]:.0f}, memory {whole[1]:.0f}, compute {whole[2]:.0f}")
    print(f"  watts, models left out: {shown(pd.Series(off))}")


# Whole runs of vLLM, request by request.

RUNS = {
    "RTX4090": ("rtx-4090", 256, 1),
    "RTXPRO6000": ("rtx-pro-6000", 128, 1),
}
GROUPS = {"32B": (2, 1), "30B-A3B": (2, 2)}
"""GPUs of the runs on two of them, and how many engines, each with its own limit of sequences."""


def serve(
    server: TokenServer, physics: StepPhysics, requests: list[TokenRequest], gpu_hz: float, cap_w: float
) -> float:
    """Serve requests to the end and return the joules of all GPUs while a step ran."""
    coming = deque(sorted(requests, key=lambda request: request.ready_s))
    left = len(requests)
    now_s = energy_j = 0.0
    while left:
        while coming and coming[0].ready_s <= now_s:
            server.add(coming.popleft())
        if server.idle:
            now_s = coming[0].ready_s
            continue
        work, pieces = server.plan()
        step = server.advance(now_s, work, pieces, physics.run(work, gpu_hz, cap_w))
        now_s += step.duration_s
        energy_j += step.power_w * step.duration_s
        left -= len(step.finished)
    return energy_j


def runs(data: Path) -> None:
    """Print TTFT and TPOT of whole runs beside what was measured; see the text for what was chosen on them."""
    table = pd.read_csv(data / "vllm_runs_requests.csv.gz")
    for run, rows in table.groupby("run"):
        hardware, name = str(run).split("/", 1)
        board, sequences, _ = RUNS[hardware]
        gpus, engines = next((group for part, group in GROUPS.items() if part in name), (1, 1))
        model = model_of(name, "bf16", gpus, engines > 1, sequences * engines)
        physics = physics_of(board, model)
        found = load_board(board)
        server = TokenServer(model, physics, model.blocks(found.memory_bytes, BLOCK_TOKENS), 1 << 20)
        requests = [
            TokenRequest(row.arrival_s, int(row.input_tokens), int(row.output_tokens), ready_s=row.arrival_s)
            for row in rows.itertuples()
        ]
        serve(server, physics, requests, float(found.knob("gpu_max_hz").levels[-1]), found.power_max_w)
        first_ms = [1e3 * ((request.first_s or 0.0) - request.arrival_s) for request in requests]
        each_ms = [1e3 * (r.last_s - (r.first_s or 0.0)) / (r.output_tokens - 1) for r in requests]
        print(f"\n{run} ({gpus} GPUs, {server.preemptions} preemptions)")
        for what, ours, theirs in (
            ("TTFT", first_ms, rows.ttft_from_queued_ms),
            ("TPOT", each_ms, rows.tpot_ms),
        ):
            for share in (0.5, 0.99):
                a, b = float(np.quantile(ours, share)), float(theirs.quantile(share))
                print(f"  {what} p{100 * share:.0f}: {a:9.1f} ms simulated, {b:9.1f} ms measured, {a / b - 1:+.1%}")


# Power caps.


def caps(data: Path) -> None:
    """Print tokens a second, clock and watts under power caps beside what was measured."""
    table = pd.read_csv(data / "vllm_power_cap_rtxpro6000.csv.gz")
    found = load_board("rtx-pro-6000")
    top_hz = float(found.knob("gpu_max_hz").levels[-1])
    print()
    for (name, concurrency), rows in table.groupby(["model", "concurrency"]):
        model = model_of(str(name), "int4", 1, False)
        physics = physics_of("rtx-pro-6000", model)
        speed, power = [], []
        for row in rows.itertuples():
            work = StepWork(int(concurrency), concurrency * 200)
            duration_s, power_w, gpu_hz = physics.run(work, top_hz, row.power_cap_w)
            speed.append(concurrency / duration_s / row.agg_tok_s - 1)
            power.append(power_w / row.mean_power_w - 1)
            print(
                f"{name} N={concurrency} {row.power_cap_w} W: {concurrency / duration_s:7.1f} tokens/s "
                f"({speed[-1]:+.1%}), {power_w:.0f} W ({power[-1]:+.1%}), {gpu_hz / 1e6:.0f} MHz "
                f"({gpu_hz / 1e6 / row.mean_sm_mhz - 1:+.1%})"
            )
        print(f"  tokens/s {shown(pd.Series(speed))}; watts {shown(pd.Series(power))}")


def main() -> None:
    """Print every table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the published tables")
    data = parser.parse_args().data
    times_between_tokens(data)
    runs(data)
    caps(data)


if __name__ == "__main__":
    main()
