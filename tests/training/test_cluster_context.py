"""What a training script uses: alone, without an elastic job around it."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from polythrottle.domain.errors import BadFile, InvalidInput
from polythrottle.storage.object_store import Store
from polythrottle.training.elastic.channel import REGROUP
from polythrottle.training.elastic.checkpoints import FOLDER
from polythrottle.training.elastic.worker.elastic_training import Context, TrainingTerms
from polythrottle.training.sampler import BatchRule, SamplerPosition


@pytest.fixture(autouse=True)
def kept_signal() -> Iterator[None]:
    """Put the handler of SIGTERM back after each test."""
    former = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, former)


def parts(width: int = 4) -> tuple[torch.nn.Module, torch.optim.Optimizer, TensorDataset]:
    """Return a model, its optimiser and 40 samples, the same each time."""
    torch.manual_seed(0)
    inputs = torch.randn(40, 3)
    model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.01), TensorDataset(inputs, inputs.sum(1, keepdim=True))


def train(store: Path | None, steps: int | None = None, **terms: Any) -> tuple[torch.nn.Module, SamplerPosition]:
    """Train for so many steps, to the end if None, as a script does that is cut off there."""
    model, optimiser, dataset = parts()
    words = {"batch": 8, "epochs": 3, "store": "" if store is None else str(store), **terms}
    with (
        pytest.raises(KeyboardInterrupt) if steps else open("/dev/null"),
        Context(model, optimiser, dataset, **words) as training,
    ):
        for x, y in training.batches():
            training.step(torch.nn.functional.mse_loss(training.model(x), y))
            if training.place.step == steps:
                raise KeyboardInterrupt
    return model, training.place


def weights(model: torch.nn.Module) -> list[float]:
    """Return all weights."""
    return [float(each) for tensor in model.state_dict().values() for each in tensor.flatten()]


def test_a_script_trains_by_itself_without_any_job() -> None:
    """All epochs, all samples, no store and no controller."""
    model, place = train(None)
    assert place == SamplerPosition(15, 3, 0)
    assert weights(model) != weights(parts()[0])


def test_what_was_interrupted_goes_on_and_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    """Weights, optimiser, order of samples and place all come from the checkpoint."""
    undisturbed, _ = train(None)
    train(tmp_path / "store", steps=7, every_s=0.0)
    resumed, place = train(tmp_path / "store")
    assert place == SamplerPosition(15, 3, 0)
    assert weights(resumed) == pytest.approx(weights(undisturbed), abs=1e-6)


def test_accumulating_parts_trains_as_whole_steps_do() -> None:
    """What a worker's memory holds does not change what is learnt."""
    assert weights(train(None, micro=3)[0]) == pytest.approx(weights(train(None)[0]), abs=1e-5)


def test_a_finished_training_is_not_done_again(tmp_path: Path) -> None:
    """Its checkpoint says that nothing is left."""
    first, _ = train(tmp_path / "store")
    again, place = train(tmp_path / "store")
    assert place.epoch == 3
    assert weights(again) == weights(first)


def test_a_signal_stops_it_after_a_checkpoint_at_that_very_step(tmp_path: Path) -> None:
    """SIGTERM ends the script with the code that asks for another generation."""
    model, optimiser, dataset = parts()
    with pytest.raises(SystemExit) as stopped:
        stop_at(Context(model, optimiser, dataset, batch=8, epochs=3, store=str(tmp_path)), 4)
    assert stopped.value.code == REGROUP
    assert any(name.startswith("g000000-s000000005") for name in Store(str(tmp_path)).names(FOLDER))


def stop_at(context: Context, step: int) -> None:
    """Train, and send this process SIGTERM after a step."""
    training = context.__enter__()
    training._until_agreement = 1
    for x, y in training.batches():
        training._until_agreement = 1
        training.step(torch.nn.functional.mse_loss(training.model(x), y))
        if training.place.step == step:
            signal.raise_signal(signal.SIGTERM)


def test_the_checkpoint_of_another_model_or_data_set_stops_the_script(tmp_path: Path) -> None:
    """In one line, and nothing is overwritten."""
    train(tmp_path / "store")
    model, optimiser, dataset = parts(width=5)
    with pytest.raises(BadFile, match="another model"):
        Context(model, optimiser, dataset, store=str(tmp_path / "store")).__enter__()
    model, optimiser, _ = parts()
    with pytest.raises(BadFile, match="order of samples"):
        Context(model, optimiser, TensorDataset(torch.zeros(39, 3)), store=str(tmp_path / "store")).__enter__()


def scheduled(store: Path, steps: int) -> torch.optim.lr_scheduler.StepLR:
    """Train until so many steps are done in all, with a scheduler that is kept."""
    model, optimiser, dataset = parts()
    scheduler = torch.optim.lr_scheduler.StepLR(optimiser, 2)
    terms = {"batch": 40, "epochs": steps, "store": str(store), "also": {"rate": scheduler}}
    with Context(model, optimiser, dataset, **terms) as training:
        for x, y in training.batches():
            training.step(torch.nn.functional.mse_loss(training.model(x), y))
            scheduler.step()
    return scheduler


def test_more_than_the_optimiser_can_be_kept(tmp_path: Path) -> None:
    """A learning-rate scheduler goes on where it stood."""
    assert scheduled(tmp_path, 3).last_epoch == 3
    assert scheduled(tmp_path, 5).last_epoch == 5


def test_a_batch_without_its_step_and_a_step_without_its_batch_are_said() -> None:
    """Both would train something else than the script means."""
    model, optimiser, dataset = parts()
    with Context(model, optimiser, dataset, batch=8) as training:
        batches = training.batches()
        next(batches)
        with pytest.raises(InvalidInput, match="once for each batch"):
            next(batches)
        training._micro = None
        with pytest.raises(InvalidInput, match="goes with a batch"):
            training.step(torch.zeros(1, requires_grad=True).sum())


def test_what_the_controller_says_goes_before_what_the_script_says() -> None:
    """Store, rule and budget come from the command line where they are given there."""
    said = TrainingTerms(batch=8, rule=BatchRule.FIXED, overhead=0.1).told({"store": "memory://x", "rule": "icac"})
    assert (said.store, said.rule, said.overhead, said.batch) == ("memory://x", BatchRule.ICAC, 0.1, 8)


@pytest.mark.parametrize("words", [{"batch": 0}, {"epochs": 0}, {"micro": 0}, {"every_s": -1.0}])
def test_terms_that_cannot_be_are_refused(words: dict[str, Any]) -> None:
    """Before anything is opened."""
    with pytest.raises(InvalidInput):
        TrainingTerms(**words)


def test_the_example_changes_five_lines() -> None:
    """Its docstring shows the whole difference: five lines written anew."""
    text = (Path(__file__).parents[2] / "examples" / "elastic_training.py").read_text()
    shown = [line.strip() for line in text.split('"""')[1].splitlines()]
    written = [line.removeprefix("+ ").strip() for line in shown if line.startswith("+ ")]
    assert len(written) == 5
    for line in written:
        assert any(line == each.strip() for each in text.split('"""')[2].splitlines())


def test_a_worker_says_how_fast_it_is_and_what_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, samples of each, what is left, and a name for the network that no other share has."""
    model, optimiser, dataset = parts()
    with Context(model, optimiser, dataset, batch=8, epochs=3) as training:
        assert training._pace() is not None
        for x, y in training.batches():
            training.step(torch.nn.functional.mse_loss(training.model(x), y))
            if training.place.step == 7:
                break
        found = training._pace()
        assert found is not None
        assert (found.tally.steps, found.cold.steps, found.share, found.batch, found.left) == (7, 5, 8, 8, 8)
        assert found.network.startswith("Sequential-")
        assert found.network.endswith("-b8")
        assert 0 < found.tally.data_s < found.tally.step_s
        assert found.tally.peers_s == 0.0
    assert Context(model, optimiser, dataset)._pace() is None


def test_batches_outside_the_context_are_refused() -> None:
    """With what to write instead."""
    model, optimiser, dataset = parts()
    with pytest.raises(InvalidInput, match="with Context"):
        next(Context(model, optimiser, dataset, batch=8).batches())
