"""What it takes of a desk to watch many boards: simulated ones, looked at together every three seconds.

    python benchmarks/many_boards.py [BOARDS] [LOOKS] [READERS]

Prints one line of JSON: the share of a core that is busy between the first look and the last, and the most memory.
With READERS the looks are served, and so many clients read page and figures after each look; the share is that of the
process that looks and serves, theirs is left out.
"""

import json
import os
import re
import resource
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from polythrottle.inspect.examination import BoardWatch, by_kind

EVERY_S = 3.0
KINDS = ("jetson-nano", "jetson-orin-nano", "jetson-agx-orin", "jetson-xavier-nx")


def main(boards: int, looks: int) -> None:
    """Watch, and print what that took."""
    watch = BoardWatch([f"sim:{KINDS[number % len(KINDS)]}?seed={number}" for number in range(boards)])
    states = watch.look()
    start_s = time.monotonic()
    busy_s = time.process_time()
    longest_s = 0.0
    for _ in range(looks):
        time.sleep(EVERY_S)
        began_s = time.monotonic()
        states = watch.look()
        longest_s = max(longest_s, time.monotonic() - began_s)
    share = (time.process_time() - busy_s) / (time.monotonic() - start_s)
    print(
        json.dumps(
            {
                "simulated": True,
                "boards": boards,
                "kinds": len(by_kind(states)),
                "unreached": sum(bool(state.failure) for state in states),
                "looks": looks,
                "share_of_a_core": round(share, 4),
                "longest_look_s": round(longest_s, 3),
                "most_memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000, 1),
            }
        )
    )


def served(boards: int, looks: int, readers: int) -> None:
    """Serve what is looked at, and print what that took."""
    uris = ",".join(f"sim:{KINDS[number % len(KINDS)]}?seed={number}" for number in range(boards))
    words = [sys.executable, "-m", "polythrottle", "boards", uris, "--serve", "0", "--watch", f"{EVERY_S:g}"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        match = re.search(r"http://\S+/", child.stderr.readline())
        assert match is not None
        # The first look opens the boards.
        time.sleep(2 * EVERY_S)
        start_s = time.monotonic()
        busy_s = _busy_s(child.pid)
        longest_s = 0.0
        for _ in range(looks):
            for path in ("boards.html", "metrics") * readers:
                began_s = time.monotonic()
                urllib.request.urlopen(match[0] + path, timeout=30).read()
                longest_s = max(longest_s, time.monotonic() - began_s)
            time.sleep(EVERY_S)
        share = (_busy_s(child.pid) - busy_s) / (time.monotonic() - start_s)
        status = Path("/proc", str(child.pid), "status").read_text()
        child.terminate()
    most_kb = int(status.partition("VmHWM:")[2].split()[0])
    print(
        json.dumps(
            {
                "simulated": True,
                "boards": boards,
                "looks": looks,
                "readers": readers,
                "share_of_a_core": round(share, 4),
                "longest_answer_s": round(longest_s, 3),
                "most_memory_mb": round(most_kb / 1000, 1),
            }
        )
    )


def _busy_s(pid: int) -> float:
    """Return how long a process has been on a processor, from ``utime`` and ``stime`` of proc_pid_stat(5)."""
    fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    if len(given) > 2:
        served(*given)
    else:
        main(*(*given, *(200, 10)[len(given) :]))
