"""Fine-tuning beside the workload: which job is found, what its trainer does, and what the daemon makes of it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from daemons import EPOCH_S, House

from polythrottle.daemon import trainer_monitor
from polythrottle.daemon.commands import StartStudy
from polythrottle.daemon.loop.mailbox import Mailbox
from polythrottle.daemon.settings import Settings
from polythrottle.daemon.startup import build
from polythrottle.daemon.status import FinetuningShown
from polythrottle.daemon.trainer_monitor import LATELY_S, LOOK_S, STILL_S, STILL_UNSEEN_S, TrainerMonitor
from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import DeviceError
from polythrottle.training.beside.trainer.driver import Task
from polythrottle.training.beside.trainer.job_folder import (
    LOCK,
    TASK,
    Checkpoint,
    JobPosition,
    Listing,
    Sample,
    leave_link,
    newest_place,
    put_json,
    write_checkpoint,
)
from polythrottle.training.beside.trainer.supervisor import kept_words

_HOLDER = (
    "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); print('held', flush=True)\n"
    "for line in sys.stdin:\n    sum(range(2_000_000)); print('worked', flush=True)"
)


class Trainer:
    """A process that holds a job's lock and works when it is told to."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def work(self) -> None:
        """Use some CPU time."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "worked\n"

    def die(self) -> None:
        """End at once."""
        self._process.kill()
        self._process.wait()


@contextmanager
def trainer(folder: Path) -> Iterator[Trainer]:
    """Return a trainer that lives in a job's folder."""
    command = [sys.executable, "-c", _HOLDER, str(folder / LOCK)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield Trainer(process)
        finally:
            process.kill()


def begun(folder: Path, epochs: int = 3) -> Path:
    """Return the folder of a job that was begun."""
    folder.mkdir(parents=True)
    task = Task("flowers.pt2", "/data", str(folder), epochs=epochs)
    put_json(folder / TASK, {"task": task.document(), "classes": {"a": 0, "b": 1}, "shape": [3]})
    return folder


def stands(folder: Path, step: int, epoch: int, position: int, written_s: float, listing: str = "digest") -> None:
    """Write a checkpoint whose weights nobody reads."""
    write_checkpoint(folder, Checkpoint(JobPosition(step, epoch, position, listing, 0.5, written_s), b"weights" * 100))


def seen(looking: TrainerMonitor, now_s: float) -> FinetuningShown:
    """Return the job that a look shows."""
    shown = looking.look(now_s)
    assert shown is not None
    return shown


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Return a job in a folder of jobs."""
    return begun(tmp_path / "jobs" / "flowers")


@pytest.fixture
def looking(job: Path) -> TrainerMonitor:
    """Return who looks at it, at a wall time that stands still."""
    return TrainerMonitor((job.parent,), lambda: EPOCH_S)


def test_nothing_is_shown_where_nothing_is(tmp_path: Path) -> None:
    """A folder that is missing, empty or a file holds no job, and that is no fault."""
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    looking = TrainerMonitor((tmp_path / "missing", tmp_path / "empty", tmp_path / "file"))
    assert looking.look(0.0) is None
    assert looking.fault == ""


def test_a_job_runs_while_its_trainer_does_something(job: Path, looking: TrainerMonitor) -> None:
    """CPU time of whoever holds the lock, or a new checkpoint, is work; without either it is paused after a while."""
    with trainer(job) as working:
        assert seen(looking, 0.0).state == "running"
        working.work()
        assert seen(looking, STILL_S).state == "running"
        assert seen(looking, 2 * STILL_S - 1).state == "running"
        assert seen(looking, 2 * STILL_S + LOOK_S).state == "paused"
        stands(job, 1, 0, 32, EPOCH_S)
        assert seen(looking, 2 * STILL_S + 2 * LOOK_S).state == "running"


def test_where_the_holder_is_not_known_only_checkpoints_tell(
    job: Path, looking: TrainerMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's processes may be hidden: a trainer is given a minute between two checkpoints then."""
    monkeypatch.setattr(trainer_monitor, "_ticks", lambda lock: None)
    with trainer(job):
        seen(looking, 0.0)
        assert seen(looking, STILL_S + 1).state == "running"
        assert seen(looking, STILL_UNSEEN_S + 1).state == "paused"


def test_a_trainer_that_dies_is_gone_and_one_that_is_done_has_finished(job: Path, looking: TrainerMonitor) -> None:
    """Without a lock the epochs decide."""
    with trainer(job) as working:
        seen(looking, 0.0)
        working.die()
    stands(job, 9, 2, 64, EPOCH_S - 5)
    shown = seen(looking, LOOK_S)
    assert (shown.state, shown.epochs_done, shown.epochs, shown.samples, shown.steps) == ("gone", 2, 3, 64, 9)
    stands(job, 12, 3, 0, EPOCH_S)
    assert seen(looking, 2 * LOOK_S).state == "finished"


def test_the_rate_is_that_of_the_last_minute_of_an_epoch(job: Path) -> None:
    """Samples between two checkpoints over the time between them; none is claimed across epochs, or once it rests."""
    wall = EPOCH_S
    looking = TrainerMonitor((job,), lambda: wall)
    with trainer(job):
        stands(job, 1, 0, 32, EPOCH_S)
        assert seen(looking, 0.0).rate_per_s is None
        stands(job, 5, 0, 160, EPOCH_S + 4)
        wall = EPOCH_S + 5
        assert seen(looking, 5.0).rate_per_s == pytest.approx(32.0)
        stands(job, 9, 1, 32, EPOCH_S + 8)
        assert seen(looking, 9.0).rate_per_s is None
        wall = EPOCH_S + 100
        assert seen(looking, 13.0).rate_per_s is None


def test_a_short_listing_tells_how_long_an_epoch_is(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an epoch's samples are known the rate goes on over its end; a long listing is not read."""
    listing = Listing(tuple(Sample(f"a/{number}.npy", "a", 1, 1) for number in range(100)))
    listing.save(job)
    of = len(listing.split(0.1)[0])
    for most, rate_per_s in ((1 << 18, (2 * of + 32 - 16) / 10), (1, None)):
        monkeypatch.setattr(trainer_monitor, "_LISTING_MOST", most)
        looking = TrainerMonitor((job,), lambda: EPOCH_S + 10)
        with trainer(job):
            stands(job, 1, 0, 16, EPOCH_S, listing.digest)
            assert seen(looking, 0.0).samples_of == (of if rate_per_s else None)
            stands(job, 9, 2, 32, EPOCH_S + 10, listing.digest)
            assert seen(looking, 5.0).rate_per_s == (rate_per_s and pytest.approx(rate_per_s))
        for path in job.glob("*.checkpoint"):
            path.unlink()


def test_looks_are_seconds_apart(job: Path, looking: TrainerMonitor) -> None:
    """Between two looks nothing is read; a clock that was set back begins anew."""
    assert seen(looking, 100.0).state == "gone"
    stands(job, 12, 3, 0, EPOCH_S)
    assert seen(looking, 100.0 + LOOK_S - 0.1).state == "gone"
    assert seen(looking, 99.0).state == "finished"


def test_the_job_that_runs_is_shown_before_others(job: Path, looking: TrainerMonitor) -> None:
    """Of several jobs the running one matters, whatever ended later."""
    other = begun(job.parent / "birds")
    stands(other, 4, 3, 0, EPOCH_S + 50)
    with trainer(job):
        assert seen(looking, 0.0).folder == str(job)
    assert seen(looking, LOOK_S).state in ("gone", "finished")


def test_what_ended_long_ago_is_not_shown(job: Path, looking: TrainerMonitor) -> None:
    """A job that ended a day before is history; one seen alive is shown after its end."""
    stands(job, 12, 3, 0, EPOCH_S - LATELY_S - 1)
    assert looking.look(0.0) is None
    with trainer(job):
        assert seen(looking, LOOK_S).state == "running"
    assert seen(looking, 2 * LOOK_S).state == "finished"


def test_a_damaged_job_is_a_fault_and_hides_no_other(job: Path, looking: TrainerMonitor) -> None:
    """What cannot be read is named, and goes away once it is repaired."""
    bad = begun(job.parent / "bad")
    (bad / TASK).write_text("{")
    assert seen(looking, 0.0).folder == str(job)
    assert str(bad) in looking.fault
    (bad / TASK).unlink()
    seen(looking, LOOK_S)
    assert looking.fault == ""


def test_a_folder_that_may_not_be_read_is_a_fault(job: Path, looking: TrainerMonitor) -> None:
    """A daemon without the right to look says so."""
    user = os.geteuid()
    job.parent.chmod(0)
    try:
        if user == 0:
            os.seteuid(65534)  # root may read everything
        assert looking.look(0.0) is None
        assert "cannot be seen" in looking.fault
    finally:
        os.seteuid(user)
        job.parent.chmod(0o700)


def test_a_job_elsewhere_is_found_by_its_link(job: Path, tmp_path: Path) -> None:
    """A run leaves one link however often it goes on; a link to a job that was removed is dropped by the next."""
    noted, other = tmp_path / "state" / "finetune", begun(tmp_path / "other" / "flowers")
    for each in (job, job, other):
        leave_link(each, noted)
    assert len(list(noted.iterdir())) == 2
    looking = TrainerMonitor((noted, job), lambda: EPOCH_S)
    with trainer(job):
        assert (seen(looking, 0.0).folder, seen(looking, 0.0).state) == (str(job), "running")
    (other / TASK).unlink()
    other.rmdir()
    leave_link(job, noted)
    assert [each.resolve() for each in noted.iterdir()] == [job]


def test_a_link_that_cannot_be_left_stops_nobody(job: Path, tmp_path: Path) -> None:
    """Where a file is in the way nothing is left, and nothing raised."""
    (tmp_path / "file").write_text("")
    leave_link(job, tmp_path / "file")
    assert (tmp_path / "file").read_text() == ""


def test_what_is_kept_after_an_interrupt_is_said_with_how_to_go_on(job: Path, tmp_path: Path) -> None:
    """Not begun, begun without a step, with some, or damaged."""
    assert kept_words(tmp_path / "none") == f"no job was begun in {tmp_path}/none; the same command begins it"
    assert kept_words(job) == f"no step of the job in {job} is kept yet; the same command goes on with it"
    stands(job, 1234, 1, 96, EPOCH_S)
    assert kept_words(job) == f"1,234 steps of the job in {job} are kept; the same command goes on from there"
    (job / TASK).write_text("{")
    assert "damaged" in kept_words(job)


def test_a_checkpoint_is_glanced_at_without_its_weights(job: Path) -> None:
    """The first line says where a job stands; one without it is passed over."""
    assert newest_place(job) is None
    stands(job, 7, 1, 96, EPOCH_S)
    (job / "000000008.checkpoint").write_bytes(b"\x80 no JSON")
    assert newest_place(job) == JobPosition(7, 1, 96, "digest", 0.5, EPOCH_S)


@pytest.mark.slow
def test_the_daemon_loads_neither_torch_nor_numpy_to_look() -> None:
    """Everything a control loop is made of comes without what trains."""
    code = (
        "import sys, polythrottle.daemon.startup, polythrottle.daemon.trainer_monitor as f; from pathlib import Path\n"
        "f.TrainerMonitor((Path('/nowhere'),)).look(0.0)\n"
        "trains = 'polythrottle.training.beside.trainer.worker'\n"
        "print([m for m in ('numpy', 'torch', 'psutil', trains) if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def house(tmp_path: Path) -> House:
    """Return a control loop on a scripted board that looks for jobs in its state folder."""
    return House(tmp_path / "daemon")


@pytest.mark.slow
def test_drift_is_found_without_and_not_beside_a_trainer(house: House, tmp_path: Path) -> None:
    """The same joules that are drift alone are the trainer's while it runs, and drift again once it has gone."""
    job = begun(tmp_path / "daemon" / "finetune" / "flowers")
    house.traffic.rate_per_s = 10.0
    house.turns(1200)
    with trainer(job) as working:
        house.turns(4)
        house.board.power_w *= 1.5
        for _ in range(90):
            house.turns(10)
            working.work()
        assert house.desk.status.finetuning is not None
        assert house.desk.status.finetuning.state == "running"
        assert house.words("drift") == []
        assert not house.runner.executor.state.study_wanted
    house.turns(900)
    assert len(house.words("drift")) == 1
    assert house.words("finetuning") == [f"fine-tuning in {job} is {state}" for state in ("running", "gone")]


def test_no_saving_is_claimed_of_joules_that_a_trainer_shares(house: House, tmp_path: Path) -> None:
    """Energy is counted on, but compared with nothing."""
    job = begun(tmp_path / "daemon" / "finetune" / "flowers")
    with trainer(job) as working:
        house.turns(10, working.work)
        assert house.runner._sight.shared
        assert house.runner._sight.own_j is None
        assert house.desk.status.energy_j is not None
        assert house.desk.status.energy_j > 50
    house.turns(5)
    assert not house.runner._sight.shared


def test_a_study_asked_for_beside_a_trainer_is_refused_with_the_reason(house: House, tmp_path: Path) -> None:
    """One line says that fine-tuning is in the way, and nothing has begun."""
    job = begun(tmp_path / "daemon" / "finetune" / "flowers")
    with trainer(job) as working:
        house.turns(5, working.work)
        answer = house.desk.hand_in(StartStudy())
        house.runner.answer()
        with pytest.raises(DeviceError, match="fine-tuning runs"):
            answer.result(timeout=0)
        assert not house.studies.runs


def test_a_job_that_has_ended_before_is_no_event(house: House, tmp_path: Path) -> None:
    """A daemon that begins beside a finished job shows it and tells nobody."""
    job = begun(tmp_path / "daemon" / "finetune" / "flowers")
    stands(job, 12, 3, 0, EPOCH_S)
    house.turns(5)
    assert house.desk.status.finetuning is not None
    assert house.desk.status.finetuning.state == "finished"
    assert house.words("finetuning") == []


def test_a_folder_of_jobs_that_is_not_there_is_said_at_the_start(tmp_path: Path) -> None:
    """It may come yet, so the daemon goes on; a slip in its name is seen all the same."""
    desk = Mailbox()
    there = tmp_path / "jobs"
    there.mkdir()
    settings = Settings(
        profile=str(Path(trainer_monitor.__file__).with_name("demo.toml")),
        traffic="sim:poisson:3/s",
        finetune=(there, tmp_path / "job"),
    )
    runner, _ = build(settings, VirtualClock(), desk, folder=tmp_path / "state")
    assert [event.words for event in desk.events() if event.kind == "finetuning"] == [
        f"there is no folder {tmp_path / 'job'} yet; it is looked for"
    ]
    runner.end()
