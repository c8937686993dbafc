"""Whether a point that was tuned on a real llama.cpp server holds its limits when it is measured afresh.

    python benchmarks/llama_holds.py [--rounds 20] [--queries 300] [--out benchmarks/llama_holds.md]

A tiny model (made here, weights made up) on llama.cpp's own server, built from source the first time (cmake, g++), with
`polythrottle proxy` in front of it. Each round tunes the requests in flight under limits on the first token and on each
that follows, in multiples of what the default took, knowing of no other round; sets the answer; and measures it afresh
with the limits as the tuning resolved them. Latencies are measured; the joules of a processor without a counter are
estimated, and are called so.
"""

import argparse
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from services import llama
from services.servers import free_ports, polythrottle, running

IN_FLIGHT = (1, 2, 3, 4, 6, 8)
AT_ONCE = 8
TOKENS = 24


def main() -> None:
    """Print a table, and write it where asked to."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--rounds", type=int, default=20)
    words.add_argument("--queries", type=int, default=300)
    words.add_argument("--limits", nargs="+", default=["ttft_p99<=1.5x", "tpot_p99<=1.5x"])
    words.add_argument("--out", type=Path)
    given = words.parse_args()
    head = ["round", "default", "answer", "saving", "trials", "infeasible", "limits", "afresh", "holds"]
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join(['---'] * len(head))} |"]
    print("\n".join(lines), flush=True)
    held = 0
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as port:
        for number in range(given.rounds):
            cells, holds = one(Path(folder) / str(number), port, number, given.queries, given.limits)
            held += holds
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    lines.append("")
    lines.append(f"{held} of {given.rounds} answers hold every limit when they are measured afresh.")
    print("\n".join(lines[-2:]))
    if given.out is not None:
        given.out.write_text("\n".join(lines) + "\n")


@contextmanager
def served(folder: Path) -> Iterator[int]:
    """Serve the model with the proxy in front of it, and yield the proxy's port."""
    (http,) = free_ports(1)
    words = ("--host", "127.0.0.1", "--port", str(http), "--parallel", str(AT_ONCE), "--threads", "1")
    command = [str(llama.server()), "--model", str(llama.model()), "--alias", "tiny", "--ctx-size", "32768", *words]
    with running(command, "/health", folder, {}, http):
        asked = [sys.executable, "-m", "polythrottle", "proxy", f"http://127.0.0.1:{http}", "--listen", "127.0.0.1:0"]
        proxy = subprocess.Popen(
            [*asked, "--in-flight", "2"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        assert proxy.stderr is not None
        try:
            yield int(proxy.stderr.readline().split()[1].rpartition(":")[2])
        finally:
            proxy.send_signal(signal.SIGTERM)
            proxy.communicate(timeout=60)


def one(folder: Path, port: int, number: int, queries: int, limits: list[str]) -> tuple[list[str], bool]:
    """Tune, set the answer, measure it afresh; return a line of the table, and whether it holds."""
    folder.mkdir()
    where = f"openai://127.0.0.1:{port}/tiny?prompt_tokens=30&max_tokens={TOKENS}&ignore_eos=true&concurrency={AT_ONCE}"
    common = ("--device", "cpu", "--queries", str(queries), "--seconds", "0.5")
    asked = [word for each in limits for word in ("--slo", each)]
    space = ",".join(map(str, IN_FLIGHT))
    state = folder / "state"
    tuned = polythrottle(
        folder,
        "tune",
        *common,
        *("--workload", f"{where}&in_flight={space}", *asked, "--seed", str(number), "--no-history", "--yes"),
        *("--out", str(folder / "profile.toml"), "--journal", str(state / "journal.jsonl")),
    )
    point = tuned["best"]["point"]
    absolute = [f"{each['metric']}<={each['limit']:g}s" for each in tuned["slo"]]
    bound(port, point["in_flight"])
    try:
        fresh = polythrottle(
            folder, "measure", *common, "--workload", where, *(word for each in absolute for word in ("--slo", each))
        )
    finally:
        bound(port, 2)
    seen = {each["metric"]: fresh[each["metric"]] for each in tuned["slo"]}
    holds = all(seen[each["metric"]] <= each["limit"] for each in tuned["slo"])
    cells = [
        str(number),
        f"in_flight={tuned['default']['point']['in_flight']}",
        f"in_flight={point['in_flight']}",
        saving(tuned),
        str(len(tuned["trials"])),
        str(tuned["infeasible_trials"]),
        ", ".join(f"{each['metric']} {1e3 * each['limit']:.2f} ms" for each in tuned["slo"]),
        ", ".join(f"{1e3 * value:.2f} ms" for value in seen.values()),
        "yes" if holds else "no",
    ]
    return cells, holds


def saving(tuned: dict[str, Any]) -> str:
    """Return what a search saved, in words."""
    share = tuned["saving_fraction"]
    if share is None or tuned["within_noise"]:
        return "within noise"
    return f"{share:.0%} estimated"


def bound(port: int, in_flight: int) -> None:
    """Have the proxy let so many requests through at once."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/polythrottle/in_flight", data=f'{{"limit": {in_flight}}}'.encode(), method="PUT"
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        answer.read()


if __name__ == "__main__":
    main()
