"""What TensorRT's ``trtexec`` tells: the latency of each query in the file of ``--exportTimes``, else its percentiles.

Formats: samples/common/sampleReporting.cpp, sampleOptions.cpp and sampleInference.cpp of NVIDIA/TensorRT, release 6 to
11.1. Times are its own, by CUDA's events; ``latencyMs`` is the sum of copying in, computing and copying out.

    [I] Input binding for images with dimensions 4x3x640x640 is created.
    [I] Timing trace has 410 queries over 3.02161 s
    [I] Latency: min = 9.7 ms, max = 9.9 ms, mean = 9.8 ms, median = 9.8 ms, percentile(90%) = 9.85 ms, …

Before release 8 (JetPack 4.5 and older) each figure has a line of its own below ``Host Latency``, and a trace whose
batch is part of the shapes has 0 queries. Up to release 9 an engine may have no batch in its shapes: ``Batch: 8`` says
it, and queries are counted in items then.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polythrottle.domain.backports import paired, pairwise, removeprefix
from polythrottle.domain.errors import BadFile, InvalidInput, TrialError
from polythrottle.storage.untrusted import MALFORMED, read_plain
from polythrottle.workloads.inputs import parse_inputs

PROGRAM = "trtexec"
USUAL = Path("/usr/src/tensorrt/bin/trtexec")
"""Where JetPack and NVIDIA's packages put it, on no PATH (samples/python/efficientdet/README.md of NVIDIA/TensorRT)."""
_NUMBER = r"([\d.]+(?:e[+-]?\d+)?)"
_BEGIN = r"(?:^|\] )"
_LATENCY = re.compile(
    rf"{_BEGIN}Latency: min = {_NUMBER} ms, max = {_NUMBER} ms, mean = {_NUMBER} ms, median = {_NUMBER} ms(.*)"
)
_PERCENTILE = re.compile(rf"percentile\({_NUMBER}%\) = {_NUMBER} ms")
_TRACE = re.compile(rf"{_BEGIN}Timing trace has (\d+) queries over {_NUMBER} s")
_INPUT = re.compile(rf"{_BEGIN}(?:Created input binding for|Input binding for) (\S+) with dimensions (\d+)x")
_HEADING = re.compile(rf"{_BEGIN}(Host [Ll]atency|Enqueue Time|GPU Compute)$")
_FIGURE = re.compile(rf"{_BEGIN}(min|max|mean|median|percentile): {_NUMBER} ms(?: (?:at |\()(\d[\d.]*)%)?")
_AVERAGE = re.compile(rf"{_BEGIN}Average on (\d+) runs")
_BATCH = re.compile(rf"{_BEGIN}Batch: (\d+)$")
_UNBATCHED = re.compile(rf"{_BEGIN}Format: (?:Caffe|UFF)$")
"""Models whose shapes have no batch."""
_STREAMS = re.compile(r"^--(?:infStreams|streams)=(\d+)$")
_WORDS = re.compile(
    rb"[Ll]atency|Timing trace has|binding for|Enqueue Time|GPU Compute|m(?:in|ax|ean|edian): |percentile: |Average on|"
    rb"Batch: |Format: "
)
_COPIES = ("h2dMs", "d2hMs", "inMs", "outMs")
"""The last two before release 8."""
_EXPORT = "--exportTimes="
LONGEST_LINE = 4096
_MOST = 200_000
_MOST_BYTES = 100_000_000
_STEP_MS = 1e-5
"""C++ prints six significant digits, so of some milliseconds the fifth decimal."""


def found() -> str | None:
    """Return the path of trtexec; None if it is not here."""
    return shutil.which(PROGRAM) or (str(USUAL) if os.access(USUAL, os.X_OK) else None)


def runs(words: Sequence[str]) -> bool:
    """Return whether a command is trtexec itself."""
    return Path(words[0]).name == PROGRAM


def engine_command(program: str, engine: str, inputs: Sequence[str]) -> str:
    """Return the words that serve an engine, as a command's URI; the batch is filled in where shapes are given.

    Args:
        program: trtexec.
        engine: The engine's file.
        inputs: Shapes of one item's inputs, each with its name.

    Raises:
        InvalidInput: If one has no name or is malformed.
    """
    shapes = parse_inputs(inputs)
    if any(each.name is None for each in shapes):
        raise InvalidInput(f"{engine}: trtexec takes shapes by name, such as --input images=3x640x640")
    spec = ",".join(f"{each.name}:{'x'.join(['{batch_size}', *map(str, each.shape)])}" for each in shapes)
    plain = re.sub(r"\{([A-Za-z_]+)\}", r"{{\1}}", engine)
    return f"cmd:{shlex.join([program, f'--loadEngine={plain}', *([f'--shapes={spec}'] if spec else [])])}"


class PrintedLines:
    """Standard output as it comes, taken a line at a time."""

    _rest = b""

    def feed(self, chunk: bytes) -> None:
        """Take some more of standard output."""
        *lines, rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._line(line)
        # A program may print for ever without a line break: of such a line no more is kept than shows its length.
        self._rest = rest[: LONGEST_LINE + 1]

    def _line(self, line: bytes) -> None:
        raise NotImplementedError


@dataclass
class Trtexec(PrintedLines):
    """What a run of trtexec has printed so far.

    Args:
        latencies: Each in seconds, with its items if they are known.
        step_s: What a latency was rounded to.
        reconstructed: Whether latencies lie between percentiles, as there was no file of single ones.
        copies: Whether copying inputs and outputs counts; None if that is not known.
    """

    latencies: list[tuple[float, int | None]] = field(default_factory=list)
    step_s: float = _STEP_MS / 1000
    reconstructed: bool = False
    copies: bool | None = None
    _queries: int = 0
    _averaged: int = 0
    _items: int | None = None
    _batch: int | None = None
    _unbatched: bool = False
    _figures: dict[str, tuple[float, float]] | None = None
    _summary: tuple[Mapping[float, float], float] | None = None

    near = ""

    def _line(self, line: bytes) -> None:
        if not _WORDS.search(line):
            return
        text = line[:LONGEST_LINE].decode(errors="replace").rstrip()
        if match := _LATENCY.search(text):
            low, high, mean, median, rest = match.groups()
            shares = {float(share): float(value) for share, value in _PERCENTILE.findall(rest)}
            self._summary = {0.0: float(low), 50.0: float(median), **shares, 100.0: float(high)}, float(mean)
        elif match := _HEADING.search(text):
            if match[1].lower() == "host latency":
                self._figures = {}
            else:
                self._figures = None
        elif (match := _FIGURE.search(text)) and self._figures is not None:
            self._figure(*match.groups())
        else:
            self._count(text)

    def _figure(self, name: str, value: str, share: str | None) -> None:
        """Take a line below "Host Latency", of which the percentile's is the last."""
        assert self._figures is not None
        self._figures[name] = float(value), float(share or 99)
        if {"min", "max", "mean", "median", "percentile"} <= self._figures.keys():
            value_ms, percent = self._figures["percentile"]
            ends = {0.0: self._figures["min"][0], 50.0: self._figures["median"][0], 100.0: self._figures["max"][0]}
            self._summary = {**ends, percent: value_ms}, self._figures["mean"][0]

    def _count(self, text: str) -> None:
        """Take a line that says how many queries there were, or of how many items."""
        if match := _TRACE.search(text):
            self._queries = int(match[1])
        elif match := _AVERAGE.search(text):
            self._averaged += int(match[1])
        elif match := _BATCH.search(text):
            self._batch = int(match[1])
        elif (match := _INPUT.search(text)) and self._items is None:
            self._items = max(1, int(match[2]))
        elif _UNBATCHED.search(text):
            self._unbatched = True

    @property
    def _each(self) -> int | None:
        """How many items a query has, if that is known; of an engine "Batch: 1" says nothing."""
        if self._batch is not None and (self._batch > 1 or self._unbatched):
            return self._batch
        return self._items

    @property
    def _traced(self) -> int:
        """How many queries were timed; before release 8 to the ten, where it says 0; 0 if it is not known."""
        return self._queries // max(1, self._batch or 1) or self._averaged

    def end(self, elapsed_s: float, export: Path | None = None) -> None:
        """Take note that the run has ended.

        Args:
            elapsed_s: How long it took.
            export: The file of single latencies; None where it was written nowhere that can be read here.

        Raises:
            TrialError: If what it tells cannot be.
        """
        self._line(self._rest)
        self._rest = b""
        times_ms = [] if export is None else self._exported(export)
        if not times_ms and self._summary is not None:
            times_ms = spread(*self._summary, self._traced)
            self.reconstructed = True
        if times_ms and not 0 < max(times_ms) <= 1000 * elapsed_s:
            raise TrialError(f"trtexec tells a latency of {max(times_ms):g} ms in a run of {elapsed_s:.4g} s")
        self.latencies = [(max(each / 1000, 1e-9), self._each) for each in times_ms]

    def _exported(self, path: Path) -> list[float]:
        """Return single latencies in milliseconds; those of the warm-up, which older releases told too, left out."""
        if not path.is_file() or not path.stat().st_size:
            return []
        try:
            lines: list[Any] = json.loads(read_plain(path, _MOST_BYTES))
            times_ms = [float(each["latencyMs"]) for each in lines]
            self.copies = any(float(each.get(name, 0)) > 0 for each in lines for name in _COPIES)
        except (*MALFORMED, BadFile) as err:
            raise TrialError(f"{path} is not what trtexec --exportTimes writes") from err
        if len(times_ms) > _MOST:
            raise TrialError(f"{len(times_ms):,} queries in a run are too many; give --duration=1")
        if not all(math.isfinite(each) and each >= 0 for each in times_ms):
            raise TrialError(f"{path} holds a latency that is no time")
        if 0 < self._traced < len(times_ms):
            return times_ms[-self._traced :]
        return times_ms


def spread(quantiles: Mapping[float, float], mean: float, count: int) -> list[float]:
    """Return latencies that have these percentiles and this mean: what a summary leaves of single ones.

    Each percentile is a latency that was seen. The others lie between two of them, all at the same share of the way,
    which is chosen so that the mean is right.

    Args:
        quantiles: Latencies by percentile, from 0 to 100.
        mean: Of all.
        count: How many there are; if that is not known, 0, and what was told is all.

    Returns:
        Ascending, shape (count,).
    """
    shares = sorted(quantiles)
    values = [quantiles[share] for share in shares]
    values = [max(values[: number + 1]) for number in range(len(values))]  # as rounded, they may cross
    if count < 1:
        return values
    told = {1: values[0]}  # by place; of two percentiles at one, as of a few latencies, the higher is told
    for share, value in paired(shares[1:], values[1:]):
        told[min(count, max(2, math.ceil(count * share / 100)))] = value
    ranks, values = list(told), list(told.values())
    between = [after - before - 1 for before, after in pairwise(ranks)]
    steps = list(paired(between, pairwise(values)))
    lowest = sum(values) + sum(number * low for number, (low, _) in steps)
    room = sum(number * (high - low) for number, (low, high) in steps)
    missing = mean * (len(values) + sum(between)) - lowest
    way = min(1.0, max(0.0, missing / room)) if room > 0 else 0.0
    made = [values[0]]
    for number, (low, high) in steps:
        made += [min(high, low + way * (high - low))] * number + [high]  # a sum of floats may end a hair beyond
    return made


class ExportedTimes:
    """The file of one run's single latencies.

    Args:
        path: Where it is.
        added: The words that have it written.
    """

    def __init__(self, path: Path, added: tuple[str, ...] = ()) -> None:
        self._path = path
        self.added = added
        self._before = self._state()

    @property
    def written(self) -> Path | None:
        """The file, if it was written since; None if it was not."""
        # A run that fails, or writes elsewhere, leaves the file of the one before.
        if self._state() not in (None, self._before):
            return self._path
        return None

    def _state(self) -> tuple[int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size


class TrtexecCommand:
    """The words of a command that is trtexec.

    Args:
        words: The command.
    """

    def __init__(self, words: Sequence[str]) -> None:
        named = [removeprefix(word, _EXPORT) for word in words if word.startswith(_EXPORT)]
        self._named = Path(named[-1]) if named else None
        self._streams = max((int(match[1]) for word in words if (match := _STREAMS.match(word))), default=1)
        self._builds = not any(word.startswith("--loadEngine") for word in words)

    def times(self, folder: Path) -> ExportedTimes:
        """Return the file of a run that begins now: the one its words name, else one in a folder of our own."""
        if self._named is not None:
            return ExportedTimes(self._named)
        return ExportedTimes(folder / "times.json", (f"{_EXPORT}{folder / 'times.json'}",))

    def notes(self, told: Trtexec) -> tuple[str, ...]:
        """Return what should be read with the figures of a run.

        Args:
            told: What it told.
        """
        lines = ["latencies are trtexec's own, by CUDA's events; joules are of its whole runs, loading included"]
        if told.copies is False:
            lines.append("copying inputs and outputs does not count: trtexec ran without data transfers")
        if told.reconstructed:
            lines.append(RECONSTRUCTED)
        if self._builds:
            lines.append("every run builds the engine, and its joules count; build once, and give --loadEngine")
        if self._streams > 1:
            lines.append(f"{self._streams} streams ran at once, in which case trtexec calls its latencies inaccurate")
        return tuple(lines)


RECONSTRUCTED = (
    "latencies are filled in between the percentiles that trtexec printed, so that those, the least, the most and the "
    "mean are its own; --exportTimes to a file that can be read here tells each"
)
