"""A child that ends computes a search space, which takes NumPy.

``python -m polythrottle.actuation.server.search_space_child``.

Its argument is a JSON object with the device's URI, the knobs to search, and the permits' spans; it prints one object
with the answer, or the error, as `polythrottle.actuation.wire` has them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from polythrottle.actuation.server.permits import Spans, allowed
from polythrottle.actuation.wire import MOST_ANSWER, error_line
from polythrottle.backends import open_device
from polythrottle.domain.errors import DeviceError, InvalidInput, PolythrottleError
from polythrottle.storage.json_channel import decode
from polythrottle.storage.space_codec import space_document

if TYPE_CHECKING:
    from polythrottle.domain.space import SearchSpace

_PACKAGE = Path(__file__).resolve().parents[3]
_PATIENCE_S = 55.0


class Job(Protocol):
    """What takes a while and makes an answer meanwhile, without holding up the others."""

    ends_s: float
    """When it is given up, on the monotonic clock."""

    @property
    def output(self) -> HasFileno:
        """What is to be read as it comes."""

    def gather(self) -> bool:
        """Read what there is and say whether that was all."""

    def result(self) -> dict[str, Any]:
        """Return ``answer`` or ``error``; ends it."""

    def stop(self) -> None:
        """End it."""


class HasFileno(Protocol):
    """What can be waited for."""

    def fileno(self) -> int:
        """Return its handle."""


class SpaceJob:
    """A child that computes a search space; its output is to be read as it comes.

    Args:
        uri: Of the device.
        knobs: To search; None for the usual ones.
        spans: What the permits allow.

    Raises:
        DeviceError: If it cannot be started.
    """

    def __init__(self, uri: str, knobs: Sequence[str] | None, spans: Sequence[Spans | None]) -> None:
        told = json.dumps({"uri": uri, "knobs": knobs, "spans": spans})
        where = os.pathsep.join(filter(None, (str(_PACKAGE), os.environ.get("PYTHONPATH"))))
        single = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-m", __name__, told],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **single, "PYTHONPATH": where},
                cwd="/",
            )
        except OSError as err:
            raise DeviceError(f"cannot start the process that computes the search space: {err.strerror}") from err
        assert self._child.stdout is not None
        self.output: HasFileno = self._child.stdout
        os.set_blocking(self.output.fileno(), False)
        self.ends_s = time.monotonic() + _PATIENCE_S
        self._parts: list[bytes] = []
        self._size = 0
        self.over = False

    def gather(self) -> bool:
        """Read what there is and say whether that was all."""
        try:
            part = os.read(self.output.fileno(), 65536)
        except BlockingIOError:
            return False
        self._parts.append(part)
        self._size += len(part)
        return not part or self._size > MOST_ANSWER

    def result(self) -> dict[str, Any]:
        """Return what it has printed, with ``answer`` or ``error``; ends it."""
        self.stop()
        if self._size > MOST_ANSWER:
            return {"error": error_line(DeviceError("the search space is too large to be sent; name fewer knobs"))}
        try:
            return decode(b"".join(self._parts))
        except InvalidInput:
            return {"error": error_line(DeviceError("the search space could not be computed in time or memory"))}

    def stop(self) -> None:
        """End it."""
        self.over = True
        self._child.kill()
        self._child.wait()
        assert self._child.stdout is not None
        self._child.stdout.close()


def permitted(space: SearchSpace, spans: Sequence[Spans | None]) -> SearchSpace:
    """Return the points of a space that permits let be set; its default is always among them."""
    from polythrottle.domain.space import SearchSpace

    if None in spans:
        return space
    kept = {space.index(space.default)}
    for each in spans:
        good = [
            {i for i, level in enumerate(knob.levels) if level == usual or allowed(each, knob.name, level)}
            for knob, usual in ((knob, space.default[knob.name]) for knob in space.knobs)
        ]
        kept.update(n for n, row in enumerate(space.indices) if all(i in fits for i, fits in zip(row, good)))
    return SearchSpace.of_points([dict(space[row]) for row in sorted(kept)], space.default, _labels(space))


def _labels(space: SearchSpace) -> list[str]:
    return [knob.name for knob in space.knobs if knob.label]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the search space that the argument asks for."""
    told: Mapping[str, Any] = json.loads((sys.argv[1:] if arguments is None else arguments)[0])
    try:
        space = open_device(told["uri"], told["knobs"]).space
        found = {"answer": space_document(permitted(space, told["spans"]))}
    except PolythrottleError as err:
        found = {"error": error_line(err)}
    sys.stdout.write(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
