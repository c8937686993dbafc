"""Tell the service manager that a process is ready, alive, or ending (sd_notify(3), systemd.service(5)).

Without a service manager (no ``$NOTIFY_SOCKET``) nothing is sent and nothing is asked for.
"""

import os
from collections.abc import Mapping

from polythrottle.actuation.descriptor_store import tell_manager


class Supervisor:
    """The service manager of this process, if there is one.

    Args:
        environment: Where it left its address; that of this process by default.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        given = os.environ if environment is None else environment
        self._address = given.get("NOTIFY_SOCKET", "")
        mine = given.get("WATCHDOG_PID", "") in ("", str(os.getpid()))
        usec = given.get("WATCHDOG_USEC", "")
        self._watchdog_s = int(usec) / 1e6 if mine and usec.isdecimal() and int(usec) > 0 else None

    @property
    def ping_s(self) -> float | None:
        """How often `alive` is to be called: a third of the time the manager waits; None if it does not."""
        return None if self._watchdog_s is None or not self._address else self._watchdog_s / 3

    def ready(self, words: str = "") -> None:
        """Say that the process serves, and in a line for people what."""
        self._send("READY=1", *([f"STATUS={words}"] if words else []))

    def alive(self) -> None:
        """Say that the loop still turns; to be called from that loop alone."""
        self._send("WATCHDOG=1")

    def status(self, words: str) -> None:
        """Say in a line for people what the process does."""
        self._send(f"STATUS={words}")

    def stopping(self) -> None:
        """Say that the process is about to end."""
        self._send("STOPPING=1")

    def _send(self, *lines: str) -> None:
        tell_manager(self._address, lines)
