"""Fine-tuning beside inference on published streams: `python benchmarks/finetuning.py --write FILE.md`.

Everything is simulated. Violations, energy and time are means over replays of 30 s; ``±`` is the standard error. ``all
idle`` is what the time that inference alone leaves at default clocks has room for, in whole steps; ``all told`` is what
no schedule can exceed that knows every arrival; ``own room`` is what all time without inference would have been enough
for at the clocks that `interleave` chose.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polythrottle.lab.reproduce.scheduler import document


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield the report in Markdown."""
    yield "# Fine-tuning beside inference\n"
    yield f"`python benchmarks/finetuning.py --replays {found['replays']}`; all of ours is simulated, energy too.\n"
    yield "| board | arrivals | policy | late % | ± | published % | energy J | fine-tuned after s |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for one in found["records"]:
        error, paper, done_s = one["violation_error"], one["paper"], one["finetune_seconds"]
        cells = (
            *(one["board"], one["arrivals"], one["policy"], f"{100 * one['violation_rate']:.2f}"),
            "" if error is None else f"{100 * error:.2f}",
            "" if paper is None else f"{100 * paper:.2f}",
            *(f"{one['energy_j']:.0f}", "" if done_s is None else f"{done_s:.1f}"),
        )
        yield f"| {' | '.join(cells)} |"
    yield "\nEnergy of `inference-only` is until the replay ends; of the others until both kinds of work are done."
    yield "`greedy-all` is `greedy` that gives up no request, so that it does the same work as `interleave`.\n"
    yield "| board | arrivals | samples in 30 s | all idle | own room | all told |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for one in found["throughput"]:
        figures = (f"{one[name]:.0f}" for name in ("done", "idle", "room", "clairvoyant"))
        yield f"| {one['board']} | {one['arrivals']} | {' | '.join(figures)} |"
    yield "\n" + "\n".join(f"* {bar['what']}: {bar['value']}: {_met(bar)}." for bar in found["bars"])
    yield "\nRead more strictly:\n"
    yield "\n".join(f"* {bar['what']}: {bar['value']}: {_met(bar)}." for bar in found["stricter"])
    yield (
        "\nThe first two leave out that a slice must end before a request is late, and that requests are not known "
        "before they come; the last counts requests that were never answered as energy saved. So the bars above count."
    )
    yield "\n## Assumed\n"
    yield "\n".join(f"* {line}" for line in found["assumed"])


def _met(bar: dict[str, Any]) -> str:
    return "holds" if bar["holds"] else "does not hold"


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replays", type=int, default=20, help="of each stream")
    parser.add_argument("--write", type=Path, help="a Markdown file instead of standard output")
    given = parser.parse_args()
    text = "\n".join(lines(document(given.replays))) + "\n"
    if given.write is None:
        sys.stdout.write(text)
    else:
        given.write.write_text(text)


if __name__ == "__main__":
    main()
