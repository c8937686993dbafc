"""A controller on its address, with its hold on the store: it answers who has the token, and watches its job."""

import contextlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polythrottle.clock import SystemClock
from polythrottle.cluster.store import Holding, Store
from polythrottle.cluster.train.account import JOB
from polythrottle.cluster.train.checkpoint import newest_generation
from polythrottle.cluster.train.controller import Controller, Job
from polythrottle.cluster.train.listening import Answer, Listener
from polythrottle.cluster.train.membership import Phase
from polythrottle.cluster.train.wire import Line
from polythrottle.errors import PolythrottleError, StorageError

TICK_S = 0.05


def _unheard(event: Mapping[str, Any]) -> None:
    """Tell nobody."""


class Serving:
    """A controller on its address, with its hold on the store.

    Args:
        controller: What answers.
        host: Where to listen.
        port: On which port; 0 for a free one.
        token: What lets in.
        holding: The hold on the store.

    Raises:
        InvalidInput: If there is no token, or it cannot listen there.
    """

    def __init__(self, controller: Controller, host: str, port: int, token: str, holding: Holding) -> None:
        self.controller, self.token = controller, token
        self.fault: StorageError | None = None
        self._told = len(controller.events)
        self._holding = holding
        self._listener = Listener(host, port, token, self._answer)
        self._ended = threading.Event()

    @property
    def line(self) -> Line:
        """Return the way to this controller."""
        host, port = self._listener.address
        return Line(host, port, self.token)

    def open(self) -> None:
        """Take hold of the store, and answer from now on.

        Raises:
            ClaimedElsewhere: If another controller works on the store.
            StorageError: If it cannot be reached.
            BadFile: If a claim in it is none.
        """
        begun_s = SystemClock().now()
        try:
            self._holding.take()
            generation = newest_generation(Store(self.controller.job.store))
        except PolythrottleError:
            self._listener.close()
            raise
        self.controller.excuse(SystemClock().now() - begun_s)  # nobody could be heard meanwhile
        self.controller.begin(generation)
        self._listener.start()
        threading.Thread(target=self._holding.keep, args=(self._robbed,), daemon=True).start()

    def run(self, patience_s: float = 20.0, on_event: Callable[[Mapping[str, Any]], object] = _unheard) -> Phase:
        """Watch, once open, until the job has ended and its nodes have gone, or `stop`; return how it ended.

        Args:
            patience_s: How long nodes may take to go after the end, in seconds.
            on_event: Told of everything that happens in the job from now on, in order.

        Raises:
            StorageError: If the events cannot be kept, or another controller took the store.
        """
        try:
            self._watch(patience_s, on_event)
        finally:
            self._tell(on_event)
            self._listener.close()
            self._holding.release()
            self.controller.close()
        if self.fault is not None:
            raise self.fault
        return self.controller.membership.phase

    def stop(self) -> None:
        """End `run` soon."""
        self._ended.set()

    def _answer(self, verb: str, words: Mapping[str, Any]) -> Answer:
        try:
            return 200, self.controller.answer(verb, words)
        except StorageError as err:
            self.fault = err
            return 503, {"error": str(err)}
        except PolythrottleError as err:
            return 400, {"error": str(err)}

    def _robbed(self, reason: str) -> None:
        self.fault = StorageError(reason)
        with contextlib.suppress(StorageError):
            self.controller.give_up(reason)

    def _tell(self, on_event: Callable[[Mapping[str, Any]], object]) -> None:
        """Tell what has happened since: from the watching thread, so that a stuck terminal holds up no answer."""
        for event in self.controller.events[self._told :]:
            self._told += 1
            on_event(event)

    def _watch(self, patience_s: float, on_event: Callable[[Mapping[str, Any]], object]) -> None:
        over_s: float | None = None
        clock = SystemClock()
        looked_s = clock.now()
        while not self._ended.wait(TICK_S):
            held_up_s, looked_s = clock.now() - looked_s, clock.now()
            if held_up_s > self.controller.job.rules.beat_s:
                self.controller.excuse(held_up_s)
            try:
                self.controller.tick()
            except StorageError as err:
                self.fault = err
                return
            self._tell(on_event)
            if self.controller.membership.outcome is None:
                continue
            over_s = clock.now() if over_s is None else over_s
            if not self.controller.membership.nodes or clock.now() - over_s > patience_s:
                return


def announce(job: Job, line: Line, token_file: Path) -> None:
    """Write down where a job's controller is met.

    Raises:
        StorageError: If it cannot be written.
    """
    document = {"v": 1, "job": job.name, "address": line.address, "pid": os.getpid(), "store": job.store}
    whole = document | {"token_file": str(token_file)}
    Store(str(job.folder)).write(JOB, json.dumps(whole).encode())
