"""A day of the daemon with a fault a minute, in virtual time, and the same day without a fault.

    python benchmarks/soak.py [--seed 0] [--hours 24] [--write benchmarks/soak.md]

The control loop, the controller, the boards, the accounts, the actuator's service, what it sets controls with, and all
records on a real disk are the real ones; board and requests are simulated, and time is the simulation's. Faults are
drawn from the seed, evenly over the day, sixteen kinds equally likely. How each is made is told in tests/soak/day.py,
tests/soak/world.py and tests/soak/board.py.

A killed daemon leaves its files as SIGKILL does; a third of the kills each come between two turns, before and after an
answer of the actuator. The number of a killed actuator's process is another's at once; every second kill spares its
guard, and all do after the records were deleted, for then the guard alone knows what was there. A board that refuses
takes nothing, or holds another level than was written, also while it is put back. A disk that is full or read-only is
so to the database, the records, the leases and the token. The process in which all of it happens is weighed each hour.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from soak.day import Day, Report
from soak.faults import SPANS_S, drawn
from soak.load import BOARD, MEAN_PER_S, MODEL, SLO_S


def day(seed: int, hours: float, per_hour: float) -> Report:
    """Return what a day comes to."""
    with tempfile.TemporaryDirectory() as folder:
        return Day(Path(folder), seed, hours, drawn(seed, hours, per_hour=per_hour)).run()


def _share(pair: tuple[int, int]) -> str:
    held, count = pair
    return f"{held} of {count} ({held / count:.1%})" if count else "none"


def _kinds(report: Report) -> Iterator[str]:
    yield "| fault | times | minutes with it or within 60 s after | of them with p99 held |"
    yield "| --- | --- | --- | --- |"
    for kind in SPANS_S:
        touched = report.minutes([kind])
        times = sum(hit.kind == kind for hit in report.hits)
        yield f"| {kind} | {times} | {len(touched)} | {_share(report.held(touched))} |"


def page(report: Report, calm: Report, command: str) -> Iterator[str]:
    """Yield the paragraphs of the report."""
    yield "# A day under faults"
    yield (
        f"`{command}`; board, requests and time are simulated: {BOARD}, {MODEL}, p99 ≤ {SLO_S * 1e3:g} ms, "
        f"{MEAN_PER_S:g} requests/s in bursts that follow the hour. How, stands in that file."
    )
    yield (
        f"{report.hours:g} h, {len(report.hits)} faults from seed {report.seed}, {report.turns} turns of the control "
        f"loop, {report.starts} starts of the daemon; {report.real_s / report.turns * 1e3:.2f} ms of real time a turn, "
        "the simulation included."
    )
    yield "## What did not hold"
    yield "\n".join(f"* {words}" for words in report.broken) or "Nothing."
    yield from _latencies(report, calm)
    yield from _counts(report)
    yield from _memory(report, calm)


def _latencies(report: Report, calm: Report) -> Iterator[str]:
    every = set(range(len(report.p99_s)))
    yield "## p99"
    yield (
        f"Minutes without a fault near: {_share(report.held(report.clean))}. All minutes: "
        f"{_share(report.held(every))}. The same day without faults: "
        f"{_share(calm.held(set(range(len(calm.p99_s)))))}. Without a fault near means: none in the minute nor within "
        f"60 s before it, and the daemon has not given way. It gave way {report.reclaims} times, to somebody else who "
        "kept writing or to a board that refused twice in a row, which somebody saw after two minutes and had it take "
        "the board again."
    )
    yield "Faults overlap: a minute that was missed counts with each of those near it."
    yield "\n".join(_kinds(report))


def _counts(report: Report) -> Iterator[str]:
    full = [each for each in report.lost if each.full]
    usual = [each for each in report.lost if not each.full]
    lost = sum(each.requests for each in report.lost)
    yield "## Nothing lost"
    yield (
        f"{report.ended} requests ended in the world. {report.written} are in the minutes on the disk, {report.missed} "
        f"ended while no daemon ran, {report.between} were seen in the turn in which the daemon was killed, and {lost} "
        f"were in the minutes under way at {len(report.lost)} kills. The most that one lost was "
        f"{max((each.seconds for each in usual), default=0):.0f} s of control, and "
        f"{max((each.seconds for each in full), default=0):.0f} s where the disk took nothing, or no descriptor was "
        "left, before."
    )
    yield (
        f"{report.events} events, numbered without a gap on the disk, each as it was told, but for "
        f"{sum(each.events for each in full)} told while nothing could be written by daemons that were killed before "
        f"they could write them, and {sum(each.events for each in usual)} told in the turn of a kill; their numbers "
        "were given again."
    )
    yield (
        f"{report.written_j / 1e6:.2f} of the {report.true_j / 1e6:.2f} MJ that the board drew are on the disk "
        f"({report.written_j / report.true_j:.1%}), never more than was drawn. Not known is what was drawn while no "
        "daemon or no actuator ran, no sensor could be read or the daemon stood still, and lost what was drawn in the "
        "minutes under way at kills."
    )
    if not report.broken:
        yield "Every level of the board was as found at the end, and no record of originals was left."


def _memory(report: Report, calm: Report) -> Iterator[str]:
    yield "## Memory"
    yield (
        "All daemons of the day, the actuators and the simulation live in one process. What is remembered is bounded "
        "(a thousand events, a day of minutes), and fills up within the day."
    )
    rows = ["| after hour | MB | objects | without faults: MB | objects |", "| --- | --- | --- | --- | --- |"]
    hours = range(0, len(report.resident_bytes), max(1, len(report.resident_bytes) // 8))
    for hour in sorted({*hours, len(report.resident_bytes) - 1} - {-1}):
        cells = [f"{each.resident_bytes[hour] / 1e6:.1f} | {each.objects[hour]}" for each in (report, calm)]
        rows.append(f"| {hour + 1} | {' | '.join(cells)} |")
    yield "\n".join(rows)


def main() -> int:
    """Run both days and print or write what they came to."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--hours", type=float, default=24.0)
    words.add_argument("--write", type=Path)
    given = words.parse_args()
    sys.stderr.write(f"seed {given.seed}\n")
    report, calm = day(given.seed, given.hours, 60.0), day(given.seed, given.hours, 0.0)
    command = " ".join(["python", "benchmarks/soak.py", *sys.argv[1:]])
    text = "\n\n".join(page(report, calm, command)) + "\n"
    if given.write is None:
        sys.stdout.write(text)
    else:
        given.write.write_text(text, encoding="utf-8")
    return 1 if report.broken else 0


if __name__ == "__main__":
    sys.exit(main())
