"""Controls: the single places of a device that may be written, and the ways to reach them."""

import os
from dataclasses import dataclass
from typing import Protocol

UNREADABLE = "?"
"""What a control reads as where the driver takes a value but never says which one holds (locked clocks of NVML)."""


class Controls(Protocol):
    """How the controls of a device are read and written; both may raise OSError, or an error of ours."""

    def read(self, key: str) -> str:
        """Return what a control holds, without the newline the kernel adds; `UNREADABLE` where nobody can know."""

    def write(self, key: str, text: str) -> None:
        """Write to a control that exists."""


@dataclass(frozen=True)
class Control:
    """One place of a device that may be written, and what may ever be written there.

    Args:
        key: Where: an absolute path, ``nvpmodel:<root>`` or ``nvml:<uuid>/<what>``.
        allowed: The texts that may be written: the device's own table within the administrator's limits.
        neutral: What "nobody has touched it" is written as, where the driver cannot say what holds.
        persistent: Whether it survives a reboot and rewrites other controls, as a power mode does.
        follows: Another control and a text: while that one holds that text, the value here means nothing.
    """

    key: str
    allowed: frozenset[str]
    neutral: str | None = None
    persistent: bool = False
    follows: tuple[str, str] | None = None


@dataclass(frozen=True)
class Setting:
    """One write: ``text`` goes to the control ``key``."""

    key: str
    text: str


def span(low_key: str, high_key: str, low: int, high: int, live_high: int) -> tuple[Setting, Setting]:
    """Return the two writes that move a minimum and a maximum without their ever crossing.

    Going up the maximum moves first, going down the minimum: the kernel refuses the other order.

    Args:
        low_key: Control of the minimum.
        high_key: Control of the maximum.
        low: The new minimum.
        high: The new maximum, in the same unit.
        live_high: The maximum that holds now.
    """
    lower, upper = Setting(low_key, str(low)), Setting(high_key, str(high))
    return (upper, lower) if low > live_high else (lower, upper)


class SysFiles:
    """The files themselves, as the kernel shows them."""

    def read(self, key: str) -> str:
        """Return what a file holds, without the newline the kernel adds."""
        # Not blocking, for a pipe in the place of a file must not hang its reader.
        with open(os.open(key, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), errors="replace") as file:
            return file.read().strip()

    def write(self, key: str, text: str) -> None:
        """Write to a file in one system call; never creates it."""
        handle = os.open(key, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(handle, text.encode())
        finally:
            os.close(handle)
