"""What setting a point costs beyond the writes themselves, and what starting and restoring cost.

Run: ``python benchmarks/actuation.py``. Prints milliseconds on a tree of plain files, where a write costs next to
nothing, so that what is left is the record, the lease, the reading back and the audit. The bar is 5 ms a point.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from polythrottle.actuation import Actuator, Control, Setting, SysFiles

_KNOBS, _POINTS = 7, 200


def main() -> None:
    """Print the medians and the slowest of a hundred."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        root = Path(folder)
        keys = [str(root / f"knob{number}") for number in range(_KNOBS)]
        for key in keys:
            Path(key).write_text("0\n")
        plain = _times_ms(lambda number: _raw(keys, number))
        entered = Actuator("benchmark", state=root / "state" / "originals")
        entered.allow(*(Control(key, frozenset(map(str, range(_POINTS + 1)))) for key in keys))
        start = time.perf_counter()
        entered.__enter__()
        entering_ms = (time.perf_counter() - start) * 1e3
        entered.write(keys[0], "0")
        applied = _times_ms(lambda number: entered.apply([Setting(key, str(number)) for key in keys]))
        start = time.perf_counter()
        entered.__exit__(None, None, None)
        restoring_ms = (time.perf_counter() - start) * 1e3
    beyond = statistics.median(applied) - statistics.median(plain)
    sys.stdout.write(
        f"{_KNOBS} controls, {_POINTS} points, each new to the record\n"
        f"writing and reading alone   {statistics.median(plain):7.3f} ms a point\n"
        f"through the actuator        {statistics.median(applied):7.3f} ms a point, 1 in 100 above "
        f"{statistics.quantiles(applied, n=100)[-1]:.3f}\n"
        f"beyond the writes           {beyond:7.3f} ms a point (bar 5)\n"
        f"entering {entering_ms:.1f} ms, restoring and leaving {restoring_ms:.1f} ms\n"
    )


def _raw(keys: list[str], number: int) -> None:
    files = SysFiles()
    for key in keys:
        files.read(key)
        files.write(key, str(-number))
        files.read(key)


def _times_ms(apply: Callable[[int], None]) -> list[float]:
    times = []
    for number in range(1, _POINTS + 1):
        start = time.perf_counter()
        apply(number)
        times.append((time.perf_counter() - start) * 1e3)
    return times


if __name__ == "__main__":
    main()
