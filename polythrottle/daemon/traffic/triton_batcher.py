"""Tell Triton how to batch: its dynamic batcher's preferred size and longest delay, by loading the model anew.

Source: Triton's model repository extension, load with the parameter ``config``,
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_model_repository.md, and model
configuration, ``dynamic_batching``. Other servers take no such word.
"""

import http.client
import json
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from polythrottle.daemon.control.events import Target
from polythrottle.daemon.observation import RequestStats, Traffic
from polythrottle.domain.space import BATCH_SIZE

_TIMEOUT_S = 60.0
_EVERY_S = 60.0
"""Loading a model takes seconds and twice its memory, so that it is not done more often."""
_ALIKE = 0.2
"""Delays that differ by less than this share are as good as equal."""
_MICRO = 1_000_000
_OK = 200
_MOST_BYTES = 1 << 20


class TritonBatcher:
    """Requests as another source sees them, and Triton's dynamic batcher set to what is to hold.

    Calls to the server run in a thread of their own. What it refuses is noted and not tried again; the configuration
    that was found is loaded again when nothing is set any more, and at the end.

    Args:
        seen: Where requests are seen.
        host: Of the server; ``port`` of its HTTP service.
        model: Its name there.
        every_s: How long a configuration is kept at least.
    """

    def __init__(self, seen: Traffic, host: str, port: int, model: str, every_s: float = _EVERY_S) -> None:
        self._seen = seen
        self._host = host
        self._port = port
        self._model = model
        self._every_s = every_s
        self._found: Mapping[str, Any] | None = None
        self._held: tuple[int, float] | None = None
        self._wanted: tuple[int, float] | None = None
        self._refusal = ""
        self._changed_s: float | None = None
        self._work: threading.Thread | None = None

    @property
    def uri(self) -> str:
        """The text that opens it again."""
        return self._seen.uri

    @property
    def note(self) -> str:
        """What a user should know of how requests are seen or batched; empty if nothing."""
        return self._refusal or str(getattr(self._seen, "note", ""))

    def look(self, now_s: float) -> RequestStats | None:
        """Return what the other source has seen, and begin a change that is due."""
        busy = self._work is not None and self._work.is_alive()
        due = self._changed_s is None or now_s - self._changed_s >= self._every_s
        if due and not busy and not self._refusal and not _alike(self._wanted, self._held):
            self._changed_s = now_s
            self._work = threading.Thread(target=self._set, args=(self._wanted,), name="batching", daemon=True)
            self._work.start()
        return self._seen.look(now_s)

    def serve(self, target: Target) -> None:
        """Have a point's batch and time to gather set soon; a point without a batch means as found."""
        batch = target.point.get(BATCH_SIZE)
        if batch is None:
            self._wanted = None
        else:
            self._wanted = (int(batch), target.gather_s)

    def close(self) -> None:
        """Load the configuration that was found, if another was, and release the other source."""
        if self._work is not None:
            self._work.join(_TIMEOUT_S)
        if self._held is not None:
            self._set(None)
        self._seen.close()

    def _set(self, wanted: tuple[int, float] | None) -> None:
        try:
            if self._found is None:
                self._found = self._asked("GET", f"/v2/models/{quote(self._model, safe='')}/config")
            if wanted is None:
                config = self._found
            else:
                config = _batched(self._found, *wanted)
            body = {"parameters": {"config": json.dumps(config)}}
            self._asked("POST", f"/v2/repository/models/{quote(self._model, safe='')}/load", body)
            self._held = wanted
        except (OSError, http.client.HTTPException, ValueError, AttributeError, TypeError) as error:
            self._refusal = f"{self._host}:{self._port} cannot be told how to batch: {str(error)[:120]}"

    def _asked(self, method: str, path: str, body: object = None) -> Mapping[str, Any]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_TIMEOUT_S)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            data = answer.read(_MOST_BYTES)
        finally:
            connection.close()
        if answer.status != _OK:
            raise ValueError(f"it answers {answer.status} to {path}")
        found: Mapping[str, Any] = json.loads(data or b"{}")
        return found


def _alike(wanted: tuple[int, float] | None, held: tuple[int, float] | None) -> bool:
    """Return whether going from one to the other is not worth loading a model."""
    if wanted is None or held is None:
        return wanted == held
    return wanted[0] == held[0] and abs(wanted[1] - held[1]) <= _ALIKE * max(wanted[1], held[1])


def _batched(found: Mapping[str, Any], batch: int, gather_s: float) -> Mapping[str, Any]:
    """Return a configuration with a batch and a time to gather it.

    Raises:
        ValueError: If the model takes no batches of that size.
    """
    most = int(found.get("max_batch_size", 0))
    if batch > max(1, most):
        raise ValueError(f"the model takes batches of at most {most}, not {batch}")
    if not most:
        return found
    own = {"preferred_batch_size": [batch], "max_queue_delay_microseconds": round(gather_s * _MICRO)}
    return {**found, "dynamic_batching": {**found.get("dynamic_batching", {}), **own}}
