"""A trainer that only pretends: answers at once, without torch, and goes wrong when it is told to.

``python pretended_trainer.py FOLDER SAMPLES BATCH EPOCHS SLEEP_S HOW AT… HANDLE``: HOW is how it goes wrong (``well``,
``dies``, ``lingers``, ``hangs``, ``lies``, ``refuses``), at the steps AT. It keeps in FOLDER how many steps are done,
and which of its mishaps it has had, so that each happens once.
"""

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

_FOLDER, _SAMPLES, _BATCH, _EPOCHS, _SLEEP_S, _HOW = sys.argv[1:7]
_AT, _HANDLE = sys.argv[7:-1], sys.argv[-1]


class Pretender:
    """Counts samples and sleeps."""

    def __init__(self) -> None:
        self.done, self.folder = Path(_FOLDER) / "steps", Path(_FOLDER)
        self.samples, self.batch, self.epochs = int(_SAMPLES), int(_BATCH), int(_EPOCHS)
        self.step = int(self.done.read_text()) if self.done.exists() else 0
        self.at = 0

    @property
    def of(self) -> int:
        """Samples of the step that runs."""
        return min(self.batch, self.samples - self.step % self.per_epoch * self.batch)

    @property
    def per_epoch(self) -> int:
        """Steps of an epoch."""
        return -(-self.samples // self.batch)

    def standing(self) -> dict[str, Any]:
        """Return where it stands."""
        epoch, step = divmod(self.step, self.per_epoch)
        place = {"step": self.step, "epoch": epoch, "position": step * self.batch, "finished": epoch >= self.epochs}
        return {**place, "at": self.at, "halved_to": None, "notices": [], "written": self.at > 0}

    def hello(self, request: dict[str, Any]) -> dict[str, Any]:
        """Say what the job is; who lingers says nothing once it has died."""
        if _HOW == "lingers" and any(self.folder.glob("mishap-*")):
            time.sleep(600)
        named = {"pid": os.getpid(), "samples": self.samples, "held_out": 4, "batch": self.batch, "output": 3}
        more = {"trained_parameters": 12, "device": "cpu", "operations": None, "traffic_bytes": None, "uncounted": "?"}
        return {**named, **more, "steps_per_epoch": self.per_epoch, "of": self.of, **self.standing()}

    def slice(self, request: dict[str, Any]) -> dict[str, Any]:
        """Sleep a while for each sample, and perhaps go wrong."""
        self._perhaps()
        of, count = self.of, min(request["samples"], self.of - self.at)
        time.sleep(count * float(_SLEEP_S))
        self.at += count
        if self.at == of:
            self.step, self.at = self.step + 1, 0
            self.done.write_text(str(self.step))
        told = {"samples": count, "of": of, "took_s": 1e-9, "loss": None if self.at else 0.5, "left_out": []}
        return {**told, **self.standing()}

    def _perhaps(self) -> None:
        mark = self.folder / f"mishap-{self.step}"
        if str(self.step) not in _AT or (mark.exists() and _HOW != "refuses"):
            return
        mark.touch()
        if _HOW in ("dies", "lingers"):
            os._exit(3)
        if _HOW == "hangs":
            time.sleep(600)
        if _HOW == "refuses":
            raise RuntimeError("the disk is full")

    def checkpoint(self, request: dict[str, Any]) -> dict[str, Any]:
        """Pretend to write."""
        return self.standing()

    def validate(self, request: dict[str, Any]) -> dict[str, Any]:
        """Find the new model good."""
        found = {"accuracy": 0.75, "samples": 4, "holds": True, "why": ""}
        return {"done": 4, "of": 4, "result": found}

    def swap(self, request: dict[str, Any]) -> dict[str, Any]:
        """Pretend to serve it."""
        return {"served": "new.pt2", "previous": None}

    def stop(self, request: dict[str, Any]) -> dict[str, Any]:
        """Say goodbye."""
        return {}


def main() -> None:
    """Answer until the other side hangs up."""
    pretender = Pretender()
    with socket.socket(fileno=int(_HANDLE)) as way, way.makefile("rwb") as line:
        for text in line:
            request = json.loads(text)
            try:
                answer = {"answer": getattr(pretender, request["verb"])(request)}
            except RuntimeError as error:
                answer = {"error": {"kind": "StorageError", "words": str(error)}}
            line.write(json.dumps(answer).encode() + b"\n")
            line.flush()


if __name__ == "__main__":
    main()
