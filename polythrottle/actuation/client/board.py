"""The board as the control loop sees it: through the actuator, or opened in this process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from polythrottle.actuation.client.connection import TOKEN, LeaseHolder, Line, patiently, reading_from
from polythrottle.actuation.wire import LeaseOver
from polythrottle.domain.clock import Clock, VirtualClock
from polythrottle.domain.errors import DeviceError, InvalidInput, KnobRejected, StorageError
from polythrottle.domain.measurement import EnergyKind, Reading
from polythrottle.domain.ports import Device, Recorded
from polythrottle.domain.space import OperatingPoint
from polythrottle.storage.atomic_file import replace_file
from polythrottle.storage.identity import identity_of

LEASE_S = 15.0
"""For how long the actuator keeps what was set after the daemon has died, if nobody says otherwise."""
_LOAN_S = 30.0
_LATER_S = 0.5
_PATIENCE_S = 5.0
_HOLDER = "the daemon"
_UNTOLD = "whether the board was restored is not known"


class Board(Protocol):
    """The device as the control loop sees it: through the actuator, or for a simulation directly."""

    @property
    def uri(self) -> str:
        """The device's URI."""

    @property
    def title(self) -> str:
        """The name people know it by."""

    @property
    def energy_kind(self) -> EnergyKind:
        """How its joules come about."""

    @property
    def boundary(self) -> str:
        """What its joules cover."""

    def take(self) -> None:
        """Take the right to set it, or renew it; to be called at least every `LEASE_S` / 3.

        Raises:
            DeviceError: If it cannot be had: another holds it, or the actuator cannot be reached.
        """

    def apply(self, point: OperatingPoint) -> None:
        """Set the device's knobs of a point; others go to their default.

        Raises:
            KnobRejected: If a level is refused or not kept.
            DeviceError: If the right to set it is gone, or the device.
        """

    def read(self) -> Reading:
        """Return energy so far, temperature and clocks, now.

        Raises:
            DeviceError: If they cannot be read.
        """

    def verify(self) -> tuple[str, ...]:
        """Return the knobs that no longer hold what was applied last, as after somebody else wrote.

        Raises:
            DeviceError: If that cannot be told.
        """

    def restore(self) -> None:
        """Put everything back to how it was found, and keep the right to set it."""

    def release(self) -> tuple[str, ...]:
        """Put everything back and give the right to set it up; return what may not be as found, in words."""


class ActuatorBoard(LeaseHolder):
    """A board that the actuator sets for the daemon, under a lease; satisfies the port ``Board``.

    The lease's token is kept in a file of its own, so that a daemon that was started again in time goes on with what
    holds.

    Args:
        socket: Of the actuator.
        device: URI of the device; None for the only one the actuator serves.
        token_file: Where the token is kept, for nobody else to read.
        clock: Of the control loop.
        lease_s: For how long it keeps what was set after the daemon has died.
        holder: Who holds it, for others to read.
    """

    def __init__(
        self,
        socket: Path,
        device: str | None,
        token_file: Path,
        clock: Clock,
        lease_s: float = LEASE_S,
        holder: str = _HOLDER,
    ) -> None:
        super().__init__(socket, _kept(token_file))
        self._line = Line(socket, _PATIENCE_S)
        self._asked = device
        self._token_file = token_file
        self._clock = clock
        self._lease_s = lease_s
        self._holder = holder
        self._renewed_s = 0.0
        self._left_changed: tuple[str, ...] = ()
        self.anew = 0
        """How often the device's counter of energy began anew while the actuator held it."""

    @property
    def uri(self) -> str:
        """The device's URI; the actuator's socket until that is known."""
        return str(self._about.get("uri", self._asked or f"actuator:{self._path}"))

    @property
    def title(self) -> str:
        """The name people know it by."""
        return str(self._about.get("title", self.uri))

    @property
    def energy_kind(self) -> EnergyKind:
        """How its joules come about."""
        return EnergyKind(str(self._about.get("energy_kind", EnergyKind.MEASURED)))

    @property
    def boundary(self) -> str:
        """What its joules cover."""
        return str(self._about.get("boundary", ""))

    def identity(self) -> Mapping[str, str]:
        """Return what hardware and firmware it is; empty while the actuator cannot be asked."""
        with suppress(DeviceError):
            self._described()
        found = self._about.get("identity")
        if isinstance(found, Mapping):
            return {str(name): str(text) for name, text in found.items()}
        return {}

    def take(self) -> None:
        """Take the lease, or renew it when a third of it is over.

        Raises:
            DeviceError: If it cannot be had, or the one there was is over: then the board is as found.
        """
        now_s = self._clock.now()
        if self._held and 0 <= now_s - self._renewed_s < self._lease_s / 3:
            return
        if self._held:
            try:
                self._ask("renew", token=self._token, seconds=self._lease_s)
            except LeaseOver:
                self._keep_left()
                raise
        else:
            self._taken()
        self._renewed_s = now_s

    def apply(self, point: OperatingPoint) -> None:
        """Set the device's knobs of a point, others to their default.

        Raises:
            KnobRejected: If the device has no such level, refuses it or does not keep it.
            DeviceError: If the lease is over, the actuator cannot be reached, or the device cannot be steered.
        """
        self._check_held()
        try:
            # Once more and soon, for the loop that asks has its ticks to keep.
            patiently(lambda: self._set(point), tries=1, most_s=_LATER_S)
        except LeaseOver:
            self._keep_left()
            raise
        except InvalidInput as error:
            raise KnobRejected(str(error)) from error

    def read(self) -> Reading:
        """Return energy so far, temperature and clocks, now.

        Raises:
            DeviceError: If they cannot be read.
        """
        reading, self.anew = reading_from(self._ask("read", device=self._described()))
        return reading

    def verify(self) -> tuple[str, ...]:
        """Return the knobs that no longer hold what was applied last.

        Raises:
            DeviceError: If that cannot be told.
        """
        return self._altered()

    def restore(self) -> None:
        """Put everything back to how it was found, and keep the lease.

        Raises:
            DeviceError: If the actuator cannot be reached; it restores the board when the lease is over.
        """
        if self._held:
            self._left(self._under("restore"))

    def release(self) -> tuple[str, ...]:
        """Put everything back and give the lease up; where that was done before, say again what came of it.

        Returns:
            What is not as it was found, as the actuator says it; empty if everything is.

        Raises:
            DeviceError: If the actuator cannot be reached; it restores the board when the lease is over.
        """
        try:
            if self._held:
                self._left_changed = self._given_up()
            return self._left_changed
        finally:
            self._token = ""
            with suppress(OSError):
                self._token_file.unlink(missing_ok=True)
            self._line.close()

    def lend(self) -> tuple[str, Mapping[str, str]]:
        """Lend the board to a study; what it opens, and what its environment needs.

        Raises:
            DeviceError: If that cannot be.
        """
        token = self._part(self._under("lend", seconds=_LOAN_S, holder="a study"), "token", str)
        # From the root on: who opens it may be in another folder, as over SSH.
        return f"actuator:{self._path.absolute()}?device={self._described()}", {TOKEN: token}

    def take_back(self) -> None:
        """End the loan at once; the board is as found then.

        Raises:
            DeviceError: If the actuator cannot be reached; the loan ends with the lease.
        """
        if self._held:
            self._under("take_back")

    def _ask(self, verb: str, **fields: Any) -> dict[str, Any]:
        return self._line.ask(verb, **fields)

    def _taken(self) -> None:
        self._take(self._described(fresh=True), self._lease_s, self._holder)
        self._left_changed = ()
        _keep(self._token_file, self._token)

    def _given_up(self) -> tuple[str, ...]:
        """Give the lease up, also where it has ended by itself, and return what it has left.

        Raises:
            DeviceError: If the actuator cannot be reached; the board's knobs are then said to be as nobody knows.
        """
        self._held = False
        self._left_changed = (self._unknown(_UNTOLD),)
        with suppress(LeaseOver):
            return self._left(self._ask("release", token=self._token))
        return ()

    def _keep_left(self) -> None:
        """Keep what a lease has left that has ended by itself, for whoever asks at the end."""
        with suppress(DeviceError):
            self._left_changed = self._given_up()

    def _described(self, fresh: bool = False) -> str:
        """Return the device's URI as the actuator has it, and what it is."""
        if fresh or not self._about:
            self._about = self._ask("describe", device=self._asked or self._only())
        return self._part(self._about, "uri", str)

    def _only(self) -> str:
        found = [str(each["uri"]) for each in self._ask("devices")["devices"]]
        if len(found) != 1:
            known = ", ".join(found) or "none"
            raise DeviceError(f"say which device, with --device or the key device: the actuator serves {known}")
        return found[0]

    def _check_held(self) -> None:
        if not self._held:
            raise DeviceError("the right to set the board is not there")


class LocalBoard:
    """A device opened in this process, for simulations and for a daemon of root without an actuator.

    It is entered when it is taken and left when it is released, which restores it.

    Args:
        device: Not entered.
        clock: Of the control loop; a simulated device's time follows it.

    Raises:
        InvalidInput: If the device is a recorded table.
    """

    def __init__(self, device: Device, clock: Clock) -> None:
        if isinstance(device, Recorded):
            raise InvalidInput(f"{device.uri} is a recorded table; there is nothing to set")
        self._device = device
        self._clock = clock
        self._entered = False
        self._left: tuple[str, ...] = ()
        self._applied: OperatingPoint | None = None
        self._followed_s = clock.now()
        self._last_j: float | None = None
        self.anew = 0
        """How often the device's counter of energy began anew while it was held."""

    @property
    def uri(self) -> str:
        """The device's URI."""
        return self._device.uri

    @property
    def title(self) -> str:
        """The name people know it by."""
        return self._device.title

    @property
    def energy_kind(self) -> EnergyKind:
        """How its joules come about."""
        return self._device.energy_kind

    @property
    def boundary(self) -> str:
        """What its joules cover."""
        return self._device.boundary

    def identity(self) -> Mapping[str, str]:
        """Return what hardware and firmware it is."""
        return identity_of(self._device)

    def take(self) -> None:
        """Enter the device, which saves what is to be restored.

        Raises:
            DeviceError: If another process holds it, or it cannot be steered.
        """
        if not self._entered:
            self._device.__enter__()
            self._entered = True
            self._left = ()
            self._last_j = None

    def apply(self, point: OperatingPoint) -> None:
        """Set the device's knobs of a point, others to their default.

        Raises:
            KnobRejected: If a level is refused or not kept.
            DeviceError: If the device cannot be steered.
        """
        if not self._entered:
            raise DeviceError("the device is not held")
        self._device.apply(self._device.space.default.moved(point))
        self._applied = point

    def read(self) -> Reading:
        """Return energy so far, temperature and clocks, now."""
        self._follow()
        reading = self._device.read()
        if self._last_j is not None and reading.energy_j < self._last_j:
            self.anew += 1
        self._last_j = reading.energy_j if self._entered else None
        return reading

    def verify(self) -> tuple[str, ...]:
        """Return the knobs that no longer hold what was applied last, where the device can say that."""
        altered = getattr(self._device, "altered", None)
        if self._applied is not None and callable(altered):
            return tuple(altered())
        return ()

    def restore(self) -> None:
        """Put everything back to how it was found."""
        if self._entered:
            self._device.restore()
        self._applied = None

    def release(self) -> tuple[str, ...]:
        """Leave the device, which restores it; what it left as somebody else has set it, where it can say that."""
        if self._entered:
            before = self._differences()
            self._entered = False
            self._applied = None
            self._left = (_UNTOLD,)
            self._device.__exit__(None, None, None)
            self._left = tuple(each for each in self._differences() if each not in before)
        return self._left

    def lend(self) -> tuple[str, Mapping[str, str]]:
        """Leave the device, so that a study can enter it; its URI, and nothing for its environment."""
        self.release()
        return self.uri, {}

    def take_back(self) -> None:
        """Enter the device again.

        Raises:
            DeviceError: If the study's process still holds it.
        """
        self.take()

    def _differences(self) -> tuple[str, ...]:
        return tuple(map(str, getattr(self._device, "differences", ())))

    def _follow(self) -> None:
        """Let as much time pass on a simulated device as has passed for the control loop."""
        now_s = self._clock.now()
        if isinstance(self._device.clock, VirtualClock):
            self._device.clock.sleep(now_s - self._followed_s)
        self._followed_s = now_s


class SeparateLender:
    """Lends a simulated board to a study: a study simulates one of its own.

    Args:
        uri: Of the device.
    """

    costless = True

    def __init__(self, uri: str) -> None:
        self._uri = uri

    def lend(self) -> tuple[str, Mapping[str, str]]:
        """Return the device's URI, which any process can open beside this one."""
        return self._uri, {}

    def take_back(self) -> None:
        """Do nothing: nothing was lent."""


def _kept(file: Path) -> str:
    """Return the token in a file that only this user could have written; "" if there is none."""
    with suppress(OSError, ValueError):
        about = file.lstat()
        if about.st_uid == os.geteuid() and not about.st_mode & 0o077:
            return file.read_text(encoding="ascii").strip()
    return ""


def _keep(file: Path, token: str) -> None:
    """Write a token whole or not at all, for this user alone; without it a daemon started again begins anew."""
    with suppress(OSError, StorageError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(file, token.encode("ascii"), mode=0o600)
