"""A session's steps, counted, with a fault at one of them."""

import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

from polythrottle.actuation import Controls, Outcome, actuator
from polythrottle.actuation.state import record
from polythrottle.actuation.state.record import Record

BEFORE_RECORD, AFTER_RECORD = "before the record", "after the record"
AFTER_WRITE, AFTER_READ_BACK, RESTORING = "after the write", "after the read-back", "during the restore"
STAGES = (BEFORE_RECORD, AFTER_RECORD, AFTER_WRITE, AFTER_READ_BACK, RESTORING)

Act = Callable[[str], None]


class Steps:
    """Controls that count the steps of a session and do something at one of them.

    Args:
        inner: The controls of the board.
        at: The step, from 0; -1 is none.
        act: What is done there, told the control concerned.
    """

    def __init__(self, inner: Controls, at: int, act: Act) -> None:
        self._inner, self._at, self._act = inner, at, act
        self.stages: list[str] = []
        self.on_write: Callable[[str, str], str | None] | None = None
        self.lost = False
        self._restoring = 0
        self._written: set[str] = set()
        self._turn = threading.RLock()  # the GPUs of a group are set at the same time

    def step(self, stage: str, key: str = "") -> None:
        """Count a step, and act if it is the one."""
        with self._turn:
            self.stages.append(stage)
            if len(self.stages) - 1 == self._at:
                self._act(key)

    def read(self, key: str) -> str:
        """Read through; the first after a write is a read-back."""
        self._check(key)
        text = self._inner.read(key)
        if key in self._written and not self._restoring:
            self._written.discard(key)
            self.step(AFTER_READ_BACK, key)
        return text

    def write(self, key: str, text: str) -> None:
        """Write through, unless the fault says otherwise."""
        if self._restoring:
            self.step(RESTORING, key)
        self._check(key)
        changed = self.on_write(key, text) if self.on_write else text
        if changed is not None:
            self._inner.write(key, changed)
        self._written.add(key)
        if self._restoring:
            self.step(RESTORING, key)
        else:
            self.step(AFTER_WRITE, key)

    def _check(self, key: str) -> None:
        if self.lost:
            raise OSError(19, os.strerror(19), key)

    def wire(self) -> None:
        """Let every actuator of this process go through these controls, and count its records and restores."""
        note, put_back = Record.note, actuator.put_back

        def noted(self_: Record, writes: Iterable[Any], *rest: Any) -> None:
            self.step(BEFORE_RECORD)
            note(self_, writes, *rest)
            self.step(AFTER_RECORD)

        def put(*given: Any, **named: Any) -> Outcome:
            with self._turn:
                self._restoring += 1
            try:
                return put_back(*given, **named)
            finally:
                with self._turn:
                    self._restoring -= 1

        record.Record.note = noted  # type: ignore[method-assign,assignment]
        actuator.put_back = put  # type: ignore[attr-defined]
        actuator.SystemControls = lambda: self  # type: ignore[attr-defined,assignment,misc]
