"""What the service manager is told, and that nothing is said where there is none."""

import os
import socket
from pathlib import Path

import pytest

from polythrottle.actuation.systemd import Supervisor


def test_it_is_told_of_beginning_life_and_end(tmp_path: Path) -> None:
    """Each state is one datagram, a status one line."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(os.fspath(tmp_path / "n"))
        told = Supervisor({"NOTIFY_SOCKET": str(tmp_path / "n"), "WATCHDOG_USEC": "30000000"})
        told.ready("serves\njetson")
        told.alive()
        told.stopping()
        got = [manager.recv(1000).decode() for _ in range(3)]
    assert got == ["READY=1\nSTATUS=serves jetson", "WATCHDOG=1", "STOPPING=1"]
    assert told.ping_s == 10


def test_an_abstract_address_is_understood() -> None:
    """One that begins with @ has no file."""
    name = f"polythrottle-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}")
        Supervisor({"NOTIFY_SOCKET": f"@{name}"}).ready()
        assert manager.recv(100) == b"READY=1"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WATCHDOG_USEC": "1000000"},
        {"NOTIFY_SOCKET": "/nonexistent"},
        {"NOTIFY_SOCKET": "/nonexistent", "WATCHDOG_USEC": "x"},
        {"NOTIFY_SOCKET": "/nonexistent", "WATCHDOG_USEC": "0"},
        {"NOTIFY_SOCKET": "/nonexistent", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"},
    ],
)
def test_without_a_manager_nothing_happens(environment: dict[str, str]) -> None:
    """No ping is due, and saying something does no harm."""
    told = Supervisor(environment)
    assert told.ping_s is None
    told.ready()
    told.alive()
    told.stopping()
