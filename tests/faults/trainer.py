"""Kills a trainer again and again: at random moments, or at each boundary of what it writes.

``python -m faults.trainer FOLDER KILLS SEED [boundaries]`` prints one JSON document. Every trainer is a fork of this
process, which has loaded torch but not computed with more than one thread, so that a life begins in milliseconds.
"""

import io
import json
import math
import os
import random
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from trainer_jobs import counted_entries, data_folder, exported

from polythrottle.storage.json_channel import Channel
from polythrottle.training.beside.trainer.driver import MOST_ANSWER, Task
from polythrottle.training.beside.trainer.job_folder import Listing, newest_checkpoint, previous_model, read_progress
from polythrottle.training.beside.trainer.network import scores_of
from polythrottle.training.beside.trainer.server import serve

SLICE = 3
PATIENCE_S = 60.0
OPEN_S = 0.2
MOST_ANSWERS = 25
SWAPS = 0.15


def killed_at(number: int) -> None:
    """Have this process kill itself before its n-th write, flush or rename; a write is torn in the middle."""
    count = 0

    def wrapped(name: str) -> Any:
        real = getattr(os, name)

        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                if name == "write":
                    real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **named)

        return call

    for name in ("write", "fsync", "replace", "unlink"):
        setattr(os, name, wrapped(name))


class Life:
    """One trainer, from its fork to its end.

    Args:
        task: What it trains.
        draw: Chances.
        answers: After how many of them a request is not waited for to its end; infinity for a life without a kill.
        boundary: At which of its writes it kills itself.
    """

    def __init__(self, task: Task, draw: random.Random, answers: float = math.inf, boundary: int | None = None) -> None:
        ours, its = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            ours.close()
            if boundary is not None:
                killed_at(boundary)
            serve(its)
            os._exit(0)
        its.close()
        self.line, self.task, self.draw, self.answers, self.last_s = (
            Channel(ours, MOST_ANSWER),
            task,
            draw,
            answers,
            OPEN_S,
        )

    def ask(self, verb: str, **fields: Any) -> dict[str, Any] | None:
        """Return an answer; None if it is time for the kill, which falls anywhere into a request and a while after."""
        start_s = time.monotonic()
        self.line.send({"verb": verb, **fields})
        message = self.line.receive(PATIENCE_S if self.answers > 0 else self.draw.uniform(0, 2 * self.last_s))
        self.answers, self.last_s = self.answers - 1, time.monotonic() - start_s
        if message is not None and "answer" not in message:
            raise AssertionError(message)
        return message and message["answer"]

    def live(self) -> bool:
        """Train, and now and then validate and serve, until it is time or the job ends; return whether it has ended."""
        told = self.ask("hello", task=self.task.document())
        while told is not None and not told["finished"]:
            told = self.ask("slice", samples=SLICE, write=self.draw.random() < 0.5)
            if told is not None and not told["at"] and self.draw.random() < SWAPS and not self.serve():
                return False
        return told is not None and self.ask("checkpoint") is not None

    def serve(self) -> bool:
        """Validate and swap; return whether there was time for it."""
        result = None
        while result is None:
            answer = self.ask("validate", samples=64)
            if answer is None:
                return False
            result = answer["result"]
        return not result["holds"] or self.ask("swap") is not None

    def end(self) -> None:
        """Kill it where it stands."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.line.close()


def intact(task: Task) -> str:
    """Return what a kill has broken; empty if nothing."""
    folder, served = Path(task.folder), Path(task.served)
    if (folder / "task.json").exists() and (damaged := read_progress(folder).damaged):
        return f"torn: {damaged}"
    for path in (served, previous_model(served)):
        if path.exists():
            scores_of(path)(torch.zeros(1, 6))
    return ""


def seen_once(task: Task) -> tuple[int, bool]:
    """Return how many epochs are whole, and whether each has seen each of its samples exactly once."""
    folder = Path(task.folder)
    epochs = counted_entries(folder, read_progress(folder).place.step)
    whole = [entries for number, entries in epochs.items() if number < task.epochs]
    exact = all(
        sorted(row for entry in entries for row in entry.seen)
        == sorted(Listing.load(folder, entries[0].listing).split(task.held_out)[0])
        for entries in whole
    )
    return len(whole), exact and len(whole) == task.epochs


def learnt(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of the newest checkpoint."""
    found, _ = newest_checkpoint(folder)
    assert found is not None
    state = torch.load(io.BytesIO(found.learnt), weights_only=True)
    return dict(state["free"])


def lives(task: Task, kills: int, seed: int, boundaries: bool) -> dict[str, Any]:
    """Kill a job's trainer so many times, finish the job, and return what was found."""
    draw, broken, deaths = random.Random(seed), [], 0
    while deaths < kills:
        answers = math.inf if boundaries else draw.choice((0, *range(1, MOST_ANSWERS)))
        life = Life(task, draw, answers, deaths + 1 if boundaries else None)
        ended = False
        with suppress(EOFError, BrokenPipeError, ConnectionResetError):
            ended = life.live()
        life.end()
        deaths += 1
        if wrong := intact(task):
            broken.append(wrong)
        if ended:
            break
    step = read_progress(Path(task.folder)).place.step if (Path(task.folder) / "task.json").exists() else 0
    return {"kills": deaths, "broken": broken, "step_at_last_kill": step}


def finished(task: Task) -> None:
    """Train until the job's end without a kill."""
    life = Life(task, random.Random(0))
    assert life.live()
    life.end()


def main(where: Path, kills: int, seed: int, boundaries: bool) -> None:
    """Run it all."""
    torch.set_num_threads(1)
    data_folder(where / "data", 30)
    exported(where / "model.pt2")
    epochs = 12 if boundaries else 10 * kills
    task = Task(
        str(where / "model.pt2"),
        str(where / "data"),
        str(where / "job"),
        batch=8,
        epochs=epochs,
        served=str(where / "served.pt2"),
        device="cpu",
        slower=1000.0,
    )
    found = lives(task, kills, seed, boundaries)
    task = replace(task, epochs=read_progress(where / "job").place.epoch + 2)
    finished(task)
    whole, exact = seen_once(task)
    calm = replace(task, folder=str(where / "calm"), served="")
    finished(calm)
    ours, theirs = learnt(where / "job"), learnt(where / "calm")
    same = all(np.array_equal(ours[name].numpy(), theirs[name].numpy()) for name in ours)
    sys.stdout.write(json.dumps({**found, "epochs": whole, "exact": exact, "same": same}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), len(sys.argv) > 4)
