"""Two kinds of work on one simulated GPU: what taking turns costs, and what a slice of fine-tuning asks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polythrottle.backends.simulated.engine import ASSUMED, Engine, Sharing, busy, co_run, memory_share, paces, trained
from polythrottle.catalog import load_board, load_model
from polythrottle.domain.errors import InvalidInput

_SHARE = st.floats(0.0, 1.0)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Return the physics of an AGX Orin."""
    return Engine(load_board("jetson-agx-orin"))


@given(_SHARE, _SHARE, st.floats(0.01, 0.99))
def test_taking_turns_never_does_more_than_one_at_a_time(mine: float, theirs: float, share: float) -> None:
    """Both together get less done than one alone, and more contention leaves less."""
    pace = paces(mine, theirs, share)
    assert 0 < pace.inference + pace.training < 1
    assert pace.inference <= paces(0.0, 0.0, share).inference
    assert pace.training / pace.inference == pytest.approx(share / (1 - share))


def test_who_is_alone_loses_nothing() -> None:
    """At a share of 0 or 1 nobody takes turns."""
    assert (paces(1.0, 1.0, 0.0).inference, paces(1.0, 1.0, 1.0).training) == (1.0, 1.0)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_is_a_share(share: float) -> None:
    """Shares outside 0 to 1 are refused."""
    with pytest.raises(InvalidInput, match="all of the time"):
        paces(0.5, 0.5, share)


def test_lengths_of_turns_are_not_negative() -> None:
    """A turn without length or a negative cost is refused."""
    for wrong in ({"turn_s": 0.0}, {"switch_s": -1e-6}, {"contention": -0.1}):
        with pytest.raises(InvalidInput, match="turns"):
            Sharing(**wrong)


def test_a_co_run_at_an_even_share_takes_about_twice_as_long(engine: Engine) -> None:
    """Beside a slice a query takes what turns leave of half the time, at a governor that sees no gap."""
    model, point = load_model("efficientnet-b7"), engine.board.default
    alone = co_run(engine, (model, 1), (trained(model, 1000), 16), busy(point), share=0.0)
    beside = co_run(engine, (model, 1), (trained(model, 1000), 16), point)
    assert 2.0 < beside.latency_s / alone.latency_s < 2.0 * (1 + ASSUMED.contention) / ASSUMED.useful


def test_inference_without_time_is_refused(engine: Engine) -> None:
    """Fine-tuning cannot get all of it."""
    model = load_model("efficientnet-b7")
    with pytest.raises(InvalidInput, match="inference needs some"):
        co_run(engine, (model, 1), (trained(model, 10), 1), engine.board.default, share=1.0)


def test_a_slice_asks_a_forward_pass_and_a_head() -> None:
    """A head costs its three passes on top; adapters cost a share of the backbone's backward pass, all of it three."""
    model = load_model("efficientnet-b4")
    head = trained(model, 100)
    assert head.operations - model.operations == 3 * 2 * 2048 * 100
    assert trained(model, 1000).weight_bytes > head.weight_bytes > model.weight_bytes
    whole = trained(model, 100, backward=1.0)
    assert whole.operations - head.operations == pytest.approx(2 * model.operations)


@pytest.mark.parametrize(("output", "backward"), [(0, 0.0), (10, -0.1), (10, 1.5)])
def test_a_head_without_output_is_refused(output: int, backward: float) -> None:
    """So is a share of the backward pass that is none."""
    with pytest.raises(InvalidInput, match="cannot be trained"):
        trained(load_model("efficientnet-b0"), output, backward)


def test_slow_memory_makes_work_bound_to_it(engine: Engine) -> None:
    """The share of moving bytes lies between 0 and 1 and rises as the memory clock falls."""
    model, one = load_model("efficientnet-b7"), np.array([1.0])
    levels = [engine.columns([{"mem_hz": hz}]) for hz in engine.board.knob("mem_hz").levels]
    shares = [memory_share(engine, model, one, each).item() for each in levels]
    assert shares == sorted(shares, reverse=True)
    assert 0 < shares[-1] < shares[0] < 1
