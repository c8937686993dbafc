"""Where a real job stands, and what makes one."""

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polythrottle.cli.finetune import JobOptions
from polythrottle.cli.render.finetune import print_status, status_document
from polythrottle.domain.errors import InvalidInput
from polythrottle.training.beside.trainer.driver import ADAPTERS, HEAD


def standing(**given: Any) -> Any:
    """Return where a job of three epochs stands: in the second, and running."""
    place = SimpleNamespace(epoch=1, position=1200, step=345, loss=0.51234, written_s=1_700_000_000.0)
    task = SimpleNamespace(model="m:f", data="flowers", epochs=3)
    whole = {"place": place, "task": task, "samples": 4000, "runs": True, "finished": False, "validation": None}
    return SimpleNamespace(**{**whole, "damaged": (), **given})


def shown(capsys: pytest.CaptureFixture[str], **given: Any) -> str:
    """Return what is printed of it, its lines joined."""
    print_status((Path("job"), standing(**given)))
    return " ".join(capsys.readouterr().out.split())


def test_a_job_is_told_by_epoch_steps_and_when_it_was_saved(capsys: pytest.CaptureFixture[str]) -> None:
    """Running, waiting to go on, or finished; what is not known is left out."""
    text = shown(capsys)
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1_700_000_000.0))
    assert "model m:f, trained on flowers state running epoch 2 of 3, 1,200 of 4,000 samples of it" in text
    assert f"steps 345, loss 0.5123 saved {at} validated not yet" in text
    stopped = shown(capsys, runs=False, samples=None, damaged=("a.checkpoint",))
    assert "state not running; the same run goes on with it epoch 2 of 3 steps" in stopped
    assert stopped.endswith("note damaged and passed over: a.checkpoint")
    assert "state finished epoch 3 of 3 steps" in shown(capsys, finished=True, runs=False)
    fresh = SimpleNamespace(epoch=0, position=0, step=0, loss=None, written_s=0.0)
    assert "epoch 1 of 3, 0 of 4,000 samples of it steps 0 saved not yet" in shown(capsys, place=fresh)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"served": "new.onnx", "holds": True}, "now served: new.onnx"),
        ({"served": "", "holds": True}, "may be served"),
        ({"served": "", "holds": False, "why": "too slow"}, "not served: too slow"),
    ],
)
def test_a_validated_model_is_served_or_says_why_not(
    given: dict[str, Any], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the share of held-out samples that it got right."""
    validation = {"accuracy": 0.923, "samples": 400, **given}
    assert f"validated 92.3% of 400 held-out samples right; {told}" in shown(capsys, validation=validation)


def test_a_program_gets_where_a_job_stands() -> None:
    """What is unknown is null."""
    document = json.loads(json.dumps(status_document((Path("job"), standing()))))
    assert document["folder"] == "job"
    assert (document["epoch"], document["epochs"], document["position"], document["samples"]) == (1, 3, 1200, 4000)
    assert (document["running"], document["finished"], document["written_s"]) == (True, False, 1_700_000_000.0)
    fresh = SimpleNamespace(epoch=0, position=0, step=0, loss=None, written_s=0.0)
    assert status_document((Path("job"), standing(place=fresh)))["written_s"] is None


def test_a_real_job_needs_samples_and_a_folder() -> None:
    """The model is the one that is served where none is named; a folder may be given beside the options."""
    place: Any = SimpleNamespace(workload="served:f")
    options = JobOptions(data="flowers", job="kept", step=8, epochs=2)
    task = options.task(place)
    assert (task.model, task.data, task.folder, task.batch, task.epochs) == ("served:f", "flowers", "kept", 8, 2)
    assert task.trained == HEAD
    assert task.served == ""
    assert options.task(place, "other").folder == "other"
    other = replace(options, model="m:f", adapters=True, served="old.pt2").task(place)
    assert (other.model, other.trained, other.served) == ("m:f", ADAPTERS, "old.pt2")
    for lacking in (replace(options, data=None), replace(options, job=None)):
        with pytest.raises(InvalidInput, match="a real job needs --data FOLDER"):
            lacking.task(place)
