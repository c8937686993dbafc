"""What it takes of a desk to watch many boards: simulated ones, looked at together every three seconds.

    python benchmarks/many_boards.py [BOARDS] [LOOKS]

Prints one line of JSON: the share of a core that is busy between the first look and the last, and the most memory.
"""

import json
import resource
import sys
import time

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


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    main(*(*given, *(200, 10)[len(given) :]))
