"""The trainer's work, in this process: the same whatever the slices, exactly resumed, never silently."""

import io
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from trainer_jobs import WIDTH, Tiny, counted_entries, data_folder, exported, job

from polythrottle.domain.errors import BadFile, DeviceError, InvalidInput, PolythrottleError, StorageError, TrialError
from polythrottle.storage.atomic_file import replace_file
from polythrottle.training.beside.trainer import job_folder
from polythrottle.training.beside.trainer.driver import Task
from polythrottle.training.beside.trainer.job_folder import Listing, read_progress
from polythrottle.training.beside.trainer.network import Network, begun, scores_of
from polythrottle.training.beside.trainer.server import RequestHandler, Validation
from polythrottle.training.beside.trainer.worker import Unreadable, Worker, read_sample


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the tiny model as an archive of torch.export."""
    return exported(tmp_path_factory.mktemp("model") / "tiny.pt2")


@pytest.fixture
def where(tmp_path: Path) -> Path:
    """Return a folder with data in it."""
    data_folder(tmp_path / "data")
    return tmp_path


@contextmanager
def working(task: Task) -> Iterator[Worker]:
    """Open a job, and leave its folder to others afterwards."""
    threads = torch.get_num_threads()
    worker = Worker(task)
    try:
        yield worker
    finally:
        worker.close()
        torch.set_num_threads(threads)


def trained(worker: Worker, samples: int = 8) -> list[dict[str, Any]]:
    """Train to the end in slices of some samples, and return all answers."""
    told = []
    while not worker.finished:
        told.append(worker.slice(samples))
    return told


def weights(worker: Worker) -> dict[str, torch.Tensor]:
    """Return what the worker has learnt so far."""
    return {name: weight.detach().clone() for name, weight in worker.network.free.items()}


def notices(told: list[dict[str, Any]]) -> str:
    """Return all that was noticed."""
    return "\n".join(notice for each in told for notice in each["notices"])


@pytest.mark.parametrize("kind", ["head", "adapters"])
def test_a_step_is_the_same_whatever_its_slices(where: Path, archive: Path, kind: str) -> None:
    """Slices of 1, 4 and 8 samples end in the same weights."""
    found = []
    for samples in (1, 4, 8):
        with working(job(where, archive, folder=str(where / f"job{samples}"), trained=kind)) as worker:
            before = weights(worker)
            assert {each["step"] for each in trained(worker, samples)} >= {1, 2}
            found.append(weights(worker))
    for name, weight in found[0].items():
        assert not torch.equal(weight, before[name])
        for other in found[1:]:
            torch.testing.assert_close(other[name], weight, rtol=1e-4, atol=1e-6)


def test_a_job_resumes_exactly(where: Path, archive: Path) -> None:
    """Stopped in the middle of a step and taken up again, it ends in the same bits, each sample seen once per epoch."""
    with working(job(where, archive, folder=str(where / "calm"))) as worker:
        trained(worker, 3)
        calm = weights(worker)
    for _ in range(40):
        with working(job(where, archive)) as worker:
            for _ in range(4):
                if not worker.finished:
                    worker.slice(3)
            ended = worker.finished
            stormy = weights(worker)
        if ended:
            break
    assert all(torch.equal(stormy[name], calm[name]) for name in calm)
    epochs = counted_entries(where / "job", read_progress(where / "job").place.step)
    train = worker.epoch.listing.split(0.1)[0]
    assert [sorted(row for entry in epochs[number] for row in entry.seen) for number in (0, 1)] == [train, train]


def test_only_what_is_free_moves(where: Path, archive: Path) -> None:
    """The backbone's weights in the new model's file are those of the first one."""
    with working(job(where, archive)) as worker:
        trained(worker)
        (where / "new.pt2").write_bytes(worker.network.archive())
    old, new = (torch.export.load(path).state_dict for path in (archive, where / "new.pt2"))
    moved = {name for name in old if not torch.equal(old[name], new[name])}
    assert moved == {"head.weight", "head.bias"}


@pytest.mark.parametrize("kind", ["head", "adapters"])
def test_the_file_computes_what_was_trained(where: Path, archive: Path, kind: str) -> None:
    """Adapters are added into the weights, so that serving costs what it did."""
    with working(job(where, archive, trained=kind)) as worker:
        trained(worker)
        (where / "new.pt2").write_bytes(worker.network.archive())
        inputs = torch.randn(5, WIDTH)
        torch.testing.assert_close(scores_of(where / "new.pt2")(inputs), worker.network(inputs))


def script(path: Path) -> Path:
    """Write the tiny model as TorchScript."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(Tiny().eval(), torch.zeros(2, WIDTH)), str(path))
    return path


def test_torchscript_is_trained_and_written(where: Path) -> None:
    """Its head moves; adapters it does not take, and says so."""
    model = script(where / "tiny.pt")
    with working(job(where, model)) as worker:
        before = weights(worker)
        trained(worker)
        (where / "new.pt").write_bytes(worker.network.archive())
        inputs = torch.randn(5, WIDTH)
        torch.testing.assert_close(scores_of(where / "new.pt")(inputs), worker.network(inputs))
        assert not torch.equal(before["head.weight"], weights(worker)["head.weight"])
    with pytest.raises(InvalidInput, match="adapters"):
        Worker(job(where, model, folder=str(where / "other"), trained="adapters"))


def test_a_python_module_gets_a_head_that_fits(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its 5 classes become the data's 3 labels; the job then no longer needs its code."""
    (where / "mine.py").write_text("from trainer_jobs import Tiny\ndef model():\n    return Tiny(5)\n")
    for number, label in enumerate(("cat", "dog", "cow")):
        (where / "data" / str(number)).rename(where / "data" / label)
    monkeypatch.syspath_prepend(where)
    with working(job(where, Path("mine:model"))) as worker:
        assert (worker.network.output, worker.opened.classes) == (3, {"cat": 0, "cow": 1, "dog": 2})
        worker.slice(8)
    monkeypatch.setattr("polythrottle.training.beside.trainer.worker.begun", None)
    with working(job(where, Path("mine:model"))) as worker:
        assert worker.place.step == 1


def test_a_module_that_is_served_on_a_gpu_is_begun_where_its_samples_are(
    where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found on a real H200: the model was on the GPU, and its first sample was not."""
    moved = []

    class Elsewhere(Tiny):
        def cpu(self) -> "Elsewhere":
            moved.append(True)
            return super().cpu()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not moved:
                raise RuntimeError("Expected all tensors to be on the same device")
            return super().forward(x)

    monkeypatch.setattr("trainer_jobs.Elsewhere", Elsewhere, raising=False)
    with working(job(where, Path("trainer_jobs:Elsewhere"))) as worker:
        assert moved
        worker.slice(8)


def test_a_file_keeps_its_head(where: Path, archive: Path) -> None:
    """Labels that do not fit its output are refused, with both counts."""
    (where / "data" / "0").rename(where / "data" / "zero")
    shutil.rmtree(where / "data" / "1")
    with pytest.raises(InvalidInput, match="3 classes apart, the data has 2 labels"):
        Worker(job(where, archive))


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("function", "not a torch module"),
        ("branching", "cannot be exported"),
        ("pictures", "the model raised"),
        ("bare", "no linear layer"),
        ("lists", "must make scores"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(
    where: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    """Functions, models that cannot be exported, that want other samples, without a head, or that make no scores."""
    (where / "odd.py").write_text(
        "import torch\nfrom torch import nn\nfrom trainer_jobs import Tiny\n"
        "def function():\n    return 1\n"
        "class Branching(Tiny):\n    def forward(self, x):\n        return super().forward(x if x.sum() > 0 else -x)\n"
        "def branching():\n    return Branching()\n"
        "def pictures():\n    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(3))\n"
        "def bare():\n    return nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 3, 6), nn.Flatten())\n"
        "class Lists(Tiny):\n    def forward(self, x):\n        return [super().forward(x)]\n"
        "def lists():\n    return Lists()\n"
    )
    monkeypatch.syspath_prepend(where)
    with pytest.raises(PolythrottleError, match=words):
        Worker(job(where, Path(f"odd:{name}")))


def test_a_batch_of_one_is_taken_as_it_is(where: Path) -> None:
    """A model exported for single samples sees them one by one."""
    program = torch.export.export(Tiny().eval(), (torch.zeros(1, WIDTH),))
    torch.export.save(program, where / "one.pt2")
    with working(job(where, where / "one.pt2")) as worker:
        assert trained(worker)[-1]["finished"]


def test_a_fixed_batch_is_refused(where: Path) -> None:
    """A model exported for batches of four alone cannot be sliced."""
    torch.export.save(torch.export.export(Tiny().eval(), (torch.zeros(4, WIDTH),)), where / "four.pt2")
    with pytest.raises(PolythrottleError, match="batches of 4"):
        Worker(job(where, where / "four.pt2"))


def test_data_without_labels_is_refused(where: Path, archive: Path) -> None:
    """The files are counted and named, and what to do is said."""
    np.save(where / "data" / "stray.npy", np.zeros(WIDTH, dtype=np.float32))
    with pytest.raises(InvalidInput, match=r"1 of 31 samples have no label: stray\.npy; put them into labels\.csv"):
        Worker(job(where, archive))


def test_an_empty_folder_is_refused(tmp_path: Path, archive: Path) -> None:
    """It says what is expected there."""
    (tmp_path / "data").mkdir()
    with pytest.raises(InvalidInput, match="no samples; one file each is expected"):
        Worker(job(tmp_path, archive))


def test_a_single_label_is_refused(where: Path, archive: Path) -> None:
    """There is nothing to tell apart."""
    for label in ("1", "2"):
        shutil.rmtree(where / "data" / label)
    with pytest.raises(InvalidInput, match=r"all samples in .* are labelled '0'"):
        Worker(job(where, archive))


def test_another_job_in_the_folder_is_refused(where: Path, archive: Path) -> None:
    """What differs is named."""
    with working(job(where, archive)) as worker:
        worker.slice(8)
    with pytest.raises(InvalidInput, match="batch 8, not 4"):
        Worker(job(where, archive, batch=4))


def test_two_trainers_never_share_a_folder(where: Path, archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one says so; whoever looks sees that one works."""
    monkeypatch.setattr("polythrottle.training.beside.trainer.worker._PATIENCE_S", 0.0)
    with working(job(where, archive)):
        assert read_progress(where / "job").runs
        with pytest.raises(DeviceError, match="another trainer"):
            Worker(job(where, archive))


def test_a_sample_that_goes_is_named(where: Path, archive: Path) -> None:
    """The step is done over the others, the epoch over the rest, and the ledger says who was left out."""
    with working(job(where, archive)) as worker:
        row = worker.epoch.order[0]
        gone = worker.epoch.listing.samples[row].file
        (where / "data" / gone).unlink()
        told = worker.slice(8)
        assert told["left_out"] == [{"file": gone, "why": "it is gone"}]
        assert f"1 gone: {gone}" in notices([told])
    entry = counted_entries(where / "job", 1)[0][0]
    assert entry.left_out == (row,)
    assert len(entry.seen) == 7


def test_the_next_epoch_goes_by_the_folder_as_it_is(where: Path, archive: Path) -> None:
    """What is new is told at once and used from the next epoch on; labels nobody knows stay out of it."""
    with working(job(where, archive)) as worker:
        first = len(worker.epoch.listing.samples)
        for label in ("0", "9"):
            (where / "data" / label).mkdir(exist_ok=True)
            np.save(where / "data" / label / "new.npy", np.zeros(WIDTH, dtype=np.float32))
        said = notices(trained(worker))
    assert "this epoch goes by what it held before" in said
    assert "epoch 2 goes by the data folder as it is now (1 new: 0/new.npy)" in said
    epochs = counted_entries(where / "job", worker.place.step)
    assert [len(Listing.load(where / "job", epochs[n][0].listing).samples) - first for n in (0, 1)] == [0, 1]


def test_a_folder_that_goes_stops_the_job_until_it_is_back(where: Path, archive: Path) -> None:
    """Nothing is skipped for want of a disk."""
    with working(job(where, archive)) as worker:
        (where / "data").rename(where / "away")
        with pytest.raises(BadFile, match="is gone"):
            worker.slice(8)
        (where / "away").rename(where / "data")
        assert worker.slice(8)["step"] == 1


def test_a_broken_sample_is_left_out(where: Path, archive: Path) -> None:
    """Cut off, of another shape or holding code: named with the reason."""
    with working(job(where, archive)) as worker:
        rows = worker.epoch.order[:3]
        paths = [where / "data" / worker.epoch.listing.samples[row].file for row in rows]
        paths[0].write_bytes(paths[0].read_bytes()[:90])
        np.save(paths[1], np.zeros(WIDTH + 1, dtype=np.float32))
        np.save(paths[2], np.array([print], dtype=object), allow_pickle=True)
        why = [each["why"] for each in worker.slice(8)["left_out"]]
    assert len(why) == 3
    assert "shape" in why[1]
    assert why[0] == why[2] == "it is no array of numbers, or is cut off"


def test_diverged_training_keeps_its_last_good_checkpoint(where: Path, archive: Path) -> None:
    """A loss that is no number stops the job; what was learnt before is on disk, and no later request goes on."""
    desk = RequestHandler()
    desk.answer({"verb": "hello", "task": job(where, archive).document()})
    assert desk.answer({"verb": "slice", "samples": 8, "write": True})["step"] == 1
    worker = desk._open
    row = worker.epoch.order[worker.place.position]
    np.save(where / "data" / worker.epoch.listing.samples[row].file, np.full(WIDTH, np.nan, dtype=np.float32))
    for _ in range(2):
        with pytest.raises(TrialError, match="diverged"):
            desk.answer({"verb": "slice", "samples": 8, "write": True})
    assert desk.answer({"verb": "checkpoint"})["step"] == 1
    worker.close()
    assert read_progress(where / "job").place.step == 1


def test_slices_are_halved_where_memory_runs_out(where: Path, archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is the same as with memory to spare; it is said, and one sample that does not fit ends it."""
    with working(job(where, archive, folder=str(where / "roomy"))) as worker:
        trained(worker)
        roomy = weights(worker)
    real, fits = Network.__call__, 2

    def tight(self: Network, inputs: torch.Tensor) -> torch.Tensor:
        if len(inputs) > fits:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real(self, inputs)

    monkeypatch.setattr(Network, "__call__", tight)
    with working(job(where, archive)) as worker:
        told = trained(worker)
        for name, weight in weights(worker).items():
            torch.testing.assert_close(weight, roomy[name], rtol=1e-4, atol=1e-6)
    assert "8 samples at once do not fit into memory; going on with 4" in notices(told)
    assert told[-1]["halved_to"] == 2
    with working(job(where, archive, folder=str(where / "none"))) as worker:
        fits = 0
        with pytest.raises(TrialError, match="one sample does not fit"):
            worker.slice(8)


def test_a_checkpoint_may_wait_for_a_better_moment(where: Path, archive: Path) -> None:
    """Left for later, it is written when asked for, or before the next slice does anything."""
    with working(job(where, archive)) as worker:
        assert not worker.slice(8, write=False)["written"]
        assert read_progress(where / "job").place.step == 0
        worker.save()
        assert read_progress(where / "job").place.step == 1
        worker.slice(8, write=False)
        assert worker.slice(1, write=False)["written"]
        assert read_progress(where / "job").place.step == 2


def test_a_full_disk_is_told_and_tried_again(where: Path, archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step stays in memory until it can be written; no step is done on top of it."""
    real = replace_file

    def full(path: Path, data: bytes) -> None:
        raise StorageError(f"{path} cannot be written: No space left on device")

    with working(job(where, archive)) as worker:
        worker.slice(8)
        monkeypatch.setattr(job_folder, "replace_file", full)
        for _ in range(3):
            with pytest.raises(StorageError):
                worker.slice(8)
        assert read_progress(where / "job").place.step == 1
        monkeypatch.setattr(job_folder, "replace_file", real)
        assert worker.slice(8)["step"] == 3
    assert len(counted_entries(where / "job", 3)[0]) == 3


def test_nothing_is_left_to_do_at_the_end(where: Path, archive: Path) -> None:
    """A finished job refuses another slice, and more epochs go on with it."""
    with working(job(where, archive)) as worker:
        trained(worker)
        with pytest.raises(InvalidInput, match="finished"):
            worker.slice(1)
    with working(job(where, archive, epochs=3)) as worker:
        assert not worker.finished


def told_by(desk: RequestHandler, samples: int = 100) -> dict[str, Any]:
    """Validate, and return the verdict."""
    while (result := desk.answer({"verb": "validate", "samples": samples})["result"]) is None:
        pass
    return dict(result)


def opened(task: Task) -> RequestHandler:
    """Return a desk whose job is open."""
    desk = RequestHandler()
    desk.answer({"verb": "hello", "task": task.document()})
    return desk


@pytest.mark.slow
def test_a_better_model_is_served_and_taken_back(where: Path, archive: Path) -> None:
    """Only after it was validated, and only as it was; going back serves the one before."""
    served = where / "served.pt2"
    shutil.copy(archive, served)
    desk = opened(job(where, archive, epochs=20, learning_rate=0.05, served=str(served)))
    with pytest.raises(InvalidInput, match="validate first"):
        desk.answer({"verb": "swap"})
    trained(desk._open)
    verdict = told_by(desk, 1)
    assert verdict["holds"]
    assert verdict["accuracy"] >= verdict["before"]["accuracy"]
    assert desk.answer({"verb": "swap"})["previous"] == str(where / "served.previous.pt2")
    assert served.read_bytes() == (where / "job" / "candidate.pt2").read_bytes()
    assert read_progress(where / "job").validation == verdict
    desk.answer({"verb": "rollback"})
    assert served.read_bytes() == archive.read_bytes()
    desk._open.close()


def test_weights_that_moved_since_are_validated_again(where: Path, archive: Path) -> None:
    """What was validated is what is served, never something later."""
    desk = opened(job(where, archive, epochs=20, learning_rate=0.05, served=str(where / "served.pt2")))
    told_by(desk)
    desk.answer({"verb": "slice", "samples": 8, "write": True})
    with pytest.raises(InvalidInput, match="changed since"):
        desk.answer({"verb": "swap"})
    desk._open.close()


def right(inputs: torch.Tensor) -> torch.Tensor:
    """Tell the class that the largest number shows."""
    return inputs * 10


def wrong(inputs: torch.Tensor) -> torch.Tensor:
    """Tell everything but that."""
    return -inputs


def judged(candidate: Callable[[torch.Tensor], torch.Tensor], before: Any, **limits: Any) -> tuple[bool, str]:
    """Return whether a model may be served, and why not."""
    validation = Validation(1, candidate, before, "nothing to compare with")
    inputs = torch.eye(3).repeat(4, 1)
    validation.look(inputs, torch.arange(3).repeat(4))
    found = validation.verdict(inputs[:1], limits.get("slower", 1e6), limits.get("limit_s"))
    return found.holds, found.why


def test_a_worse_model_is_not_served() -> None:
    """Nor one that is as good as none, too slow, or makes numbers that are none."""
    assert judged(right, wrong) == (True, "nothing to compare with")
    assert judged(wrong, right)[0] is False
    assert "commonest" in judged(lambda inputs: torch.ones_like(inputs) * torch.tensor([2.0, 1, 1]), None)[1]
    assert "more than" in judged(right, None, limit_s=1e-9)[1]
    assert "not finite" in judged(lambda inputs: inputs * torch.nan, None)[1]


def test_a_slower_model_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its median is held against that of the served one."""
    times = "polythrottle.training.beside.trainer.server._medians_s"
    monkeypatch.setattr(times, lambda models, inputs: [0.2, 0.1])
    assert "2.00 times as long" in judged(right, wrong, slower=1.5)[1]
    assert judged(right, wrong, slower=2.5)[0]


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"verb": "dance"},
        {"verb": ["slice"]},
        {"verb": "slice"},
        {"verb": "slice", "samples": "4", "write": True},
        {"verb": "slice", "samples": True, "write": True},
        {"verb": "slice", "samples": 4, "write": True, "more": 1},
        {"verb": "slice", "samples": 4, "write": True},
        {"verb": "slice", "samples": 4, "write": 1},
        {"verb": "swap"},
        {"verb": "validate", "samples": 1},
        {"verb": "hello", "task": {}},
    ],
)
def test_a_request_that_makes_no_sense_is_refused(request_: dict[str, Any]) -> None:
    """Unknown verbs, wrong fields, and anything before hello."""
    with pytest.raises(InvalidInput):
        RequestHandler().answer(request_)


def test_what_cannot_be_counted_is_not_zero(where: Path, archive: Path) -> None:
    """A model's operations are counted where they can be; TorchScript's cannot, and the reason is given."""
    desk = RequestHandler()
    told = desk.answer({"verb": "hello", "task": job(where, archive).document()})
    assert told["operations"] == 2 * (WIDTH * 8 + 8 * 3)
    desk._open.close()
    desk = RequestHandler()
    model = script(where / "tiny.pt")
    told = desk.answer({"verb": "hello", "task": job(where, model, folder=str(where / "other")).document()})
    assert told["operations"] is None or told["operations"] > 0
    assert bool(told["uncounted"]) == (told["operations"] is None)
    desk._open.close()


def test_samples_are_read_by_kind(tmp_path: Path) -> None:
    """Reals become float32, whole numbers int64, pictures three planes of 0..1."""
    from PIL import Image

    np.save(tmp_path / "real.npy", np.zeros((2, 3)))
    np.save(tmp_path / "whole.npy", np.zeros(4, dtype=np.uint8))
    torch.save(torch.ones(2, dtype=torch.float16), tmp_path / "tensor.pt")
    Image.new("L", (5, 4), 255).save(tmp_path / "picture.png")
    found = [read_sample(tmp_path / name) for name in ("real.npy", "whole.npy", "tensor.pt", "picture.png")]
    assert [each.dtype for each in found] == [torch.float32, torch.int64, torch.float32, torch.float32]
    assert [tuple(each.shape) for each in found] == [(2, 3), (4,), (2,), (3, 4, 5)]
    assert float(found[3].max()) == 1.0


def test_a_tensor_file_cannot_run_code(tmp_path: Path) -> None:
    """Only weights are loaded, and only tensors are samples."""
    torch.save({"a": torch.ones(1)}, tmp_path / "dict.pt")
    torch.save(nn.Linear(1, 1), tmp_path / "module.pt")
    for name in ("dict.pt", "module.pt"):
        with pytest.raises(Unreadable):
            read_sample(tmp_path / name)


def test_a_checkpoint_of_another_model_is_refused(where: Path, archive: Path) -> None:
    """Rather than trained from half of it."""
    with working(job(where, archive)) as worker:
        worker.slice(8)
        found, _ = job_folder.newest_checkpoint(where / "job")
        assert found is not None
        state = torch.load(io.BytesIO(found.learnt), weights_only=True)
        state["free"] = {"other": torch.ones(1)}
        file = io.BytesIO()
        torch.save(state, file)
        with pytest.raises(BadFile, match="does not fit"):
            worker._learner.resume(file.getvalue())


@pytest.mark.parametrize(
    ("made", "told"),
    [(torch.zeros(1, 2, 3), r"it made a tensor of shape \(1, 2, 3\)"), ([1.0], "it made a list")],
)
def test_what_a_model_makes_instead_of_scores_is_told(made: Any, told: str) -> None:
    """By its shape, or by what it is."""
    from polythrottle.training.beside.trainer.network import _outputs

    class Odd(nn.Module):
        def forward(self, inputs: torch.Tensor) -> Any:
            return made

    with pytest.raises(TrialError, match=told):
        _outputs(Odd(), torch.zeros(3))


def test_begun_says_what_a_missing_model_is(tmp_path: Path) -> None:
    """A file that is not there is named."""
    with pytest.raises(BadFile, match=r"no\.pt2"):
        begun(str(tmp_path / "no.pt2"), torch.zeros(WIDTH), ["0"], 0)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (MemoryError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("the word is out of memory"), False),
    ],
)
def test_only_memory_that_ran_out_is_called_so(error: Exception, told: bool) -> None:
    """Torch says it in a RuntimeError's words; nobody else's words count."""
    from polythrottle.training.beside.trainer.network import out_of_memory

    assert out_of_memory(error) is told
