"""Actuator and daemon as real processes, killed, stopped, blinded and starved in turns, and found whole at the end."""

import os
import time
from pathlib import Path

import pytest

from soak.processes import House, Sender, Trouble, disk

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
SEED = int(os.environ.get("POLYTHROTTLE_SOAK_SEED", "0"))
FAULTS, FEWEST, LONGEST_S = 60, 3, 300.0
MOST_BYTES = 6_000_000


def test_what_is_killed_again_and_again_gives_everything_back(tmp_path: Path) -> None:
    """After sixty faults SIGTERM leaves every control as found, no record, no process, and all events in order."""
    print(f"seed {SEED}")
    house = House(tmp_path)
    sender = Sender(tmp_path / "log")
    try:
        with disk(house) as full:
            _troubled(house, Trouble(house, SEED, full))
            last = house.settled()
            sender.close()
            time.sleep(2)
            assert house.end() == (0, 0), _logs(house)
            assert house.kernel.snapshot() == house.found
            assert list((house.state / "originals").glob("*.jsonl")) == []
            assert house.left() == []
            events = house.events()
            assert list(events) == list(range(1, len(events) + 1))
            begun = sum(words.startswith("start:") for words in events.values())
            # One that is begun with the disk full, or killed in its first turn, cannot have written that it began.
            assert house.up - house.starved - 1 <= begun <= house.starts["daemon"]
            assert 0 < house.requests() <= sender.sent
            assert last.device.startswith("jetson")
    finally:
        sender.close()
        house.close()
    assert house.ended == [], _logs(house)


def _troubled(house: House, trouble: Trouble) -> None:
    """Let it all go wrong, and look at the memory of those that live a while."""
    house.start_actuator()
    house.start_daemon()
    house.settled()
    house.weigh()
    began_s = time.monotonic()
    while trouble.done.total() < FAULTS and time.monotonic() - began_s < LONGEST_S:
        trouble.next()
        if trouble.done.total() % 15 == 0:
            house.settled()
            house.weigh()
    print(dict(trouble.done), dict(house.starts), f"{time.monotonic() - began_s:.0f} s", house.weighed)
    assert len(trouble.done) == len(trouble.kinds)
    assert min(trouble.done.values()) >= FEWEST
    for name, weighed in house.weighed.items():
        assert weighed[-1] - weighed[0] < MOST_BYTES, (name, weighed)


def _logs(house: House) -> str:
    return "\n".join((house.folder / f"{name}.log").read_text()[-2000:] for name in ("actuator", "daemon"))
