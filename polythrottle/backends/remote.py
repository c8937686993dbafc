"""A device behind the privileged actuator: set and read over its socket, by whoever the administrator permits.

``actuator:/run/polythrottle/actuator.sock?device=jetson`` is the Jetson that the actuator there serves. Without a path
it is the actuator of this machine, without a device the only one it serves.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from polythrottle.actuation.client.connection import TOKEN, LeaseHolder, Line, T, patiently, reading_from
from polythrottle.actuation.wire import MOST_S, LeaseOver, space_from
from polythrottle.domain.clock import Clock, SystemClock, Thread
from polythrottle.domain.errors import DeviceError, PolythrottleError, note_left
from polythrottle.domain.measurement import EnergyKind, Reading
from polythrottle.domain.ports import Finding, Offer, Sensor, usual_sensor
from polythrottle.domain.space import OperatingPoint, SearchSpace
from polythrottle.storage.paths import ACTUATOR_SOCKET, socket_path

if TYPE_CHECKING:
    from typing_extensions import Self


class RemoteDevice(LeaseHolder):
    """A device behind the actuator; satisfies the ports ``Device``, ``Inspectable`` and ``Offering``.

    It goes by the URI of the device itself, for the actuator is a way to it and no other device: a profile or a journal
    made through it is the same as one made by root. Entering takes the device, and a thread keeps it; leaving puts it
    back as it was found and gives it up. With the token of a loan it stays lent then, until the lender takes it back.

    Args:
        path: Of the actuator's socket.
        device: The URI it is served under; "" for the only one.
        knobs: Which knobs to search; those the device searches by default if None.
        token: Of a loan; taken from ``$POLYTHROTTLE_TOKEN`` if "", and if that is not there the device is taken.
        patience_s: How long to wait for an answer.
        line: To an actuator that is reached in another way than by a socket of this machine.

    Raises:
        DeviceError: If the actuator cannot be reached, or the device not be opened there.
        PermissionDenied: If this user may not read it.
        UnknownName: If it is not served there.
    """

    def __init__(
        self,
        path: Path | str = "",
        device: str = "",
        *,
        knobs: Sequence[str] | None = None,
        token: str = "",
        patience_s: float = 60.0,
        line: Line | None = None,
    ) -> None:
        if path or line is not None:
            super().__init__(Path(path))
        else:
            super().__init__(socket_path(ACTUATOR_SOCKET))
        self._device = device
        self._knobs = None if knobs is None else tuple(knobs)
        if line is None:
            self._line = Line(self._path, patience_s)
        else:
            self._line = line
        self._turn = threading.Lock()
        self._lent = token or os.environ.get(TOKEN, "")
        self._lost: PolythrottleError | None = None
        self._process = 0
        self._setting = threading.Lock()
        self._ended = threading.Event()
        self._beat: Thread | None = None
        self.left: tuple[str, ...] = ()
        self.clock: Clock = SystemClock()
        self._about = self._ask("describe", device=device)

    @classmethod
    def open(
        cls, path: str, options: Mapping[str, str] | None = None, knobs: Sequence[str] | None = None
    ) -> RemoteDevice:
        """Return the device a URI means: ``actuator:/run/a.sock?device=jetson`` has a path and one option.

        Args:
            path: What follows the colon; the actuator of this machine if "".
            options: What follows the question mark: ``device``, whose own options may follow it, and ``token``.
            knobs: Which knobs to search.

        Raises:
            PolythrottleError: As the constructor does.
        """
        given = dict(options or {})
        token = given.pop("token", "")
        device = given.pop("device", "")
        rest = "".join(f"&{name}={value}" for name, value in given.items())
        return cls(path, f"{device}{rest}", knobs=knobs, token=token)

    def _ask(self, verb: str, **fields: Any) -> dict[str, Any]:
        return patiently(lambda: self._asked(verb, fields))

    def _asked(self, verb: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        with self._turn:
            try:
                return self._line.ask(verb, **fields)
            finally:
                if not self._held:
                    self._idle()

    def _idle(self) -> None:
        """Hang up where the device is not entered: who has not entered need not leave either."""
        self._line.close()

    def _known(self, name: str, take: Callable[[Any], T]) -> T:
        return self._part(self._about, name, take)

    @property
    def uri(self) -> str:
        """The URI of the device itself."""
        return self._known("uri", str)

    @property
    def title(self) -> str:
        """The name people know it by."""
        return self._known("title", str)

    @property
    def identity(self) -> Mapping[str, str]:
        """What hardware and firmware it is."""
        return self._known("identity", dict)

    @property
    def energy_kind(self) -> EnergyKind:
        """How its joules come about."""
        return self._known("energy_kind", EnergyKind)

    @property
    def boundary(self) -> str:
        """What its joules cover."""
        return self._known("boundary", str)

    @property
    def averaging(self) -> Sensor:
        """What the device there says of its sensor; what is usual for its kind where it says nothing."""
        if "sensor" not in self._about:
            return usual_sensor(self.uri)
        return self._known("sensor", lambda fields: Sensor(**fields))

    @property
    def presets(self) -> Mapping[str, OperatingPoint]:
        """The vendor's named points."""
        return self._known("presets", lambda found: {name: OperatingPoint(point) for name, point in found.items()})

    def findings(self) -> tuple[Finding, ...]:
        """Return what works and what does not there, and by which way it is reached.

        Raises:
            DeviceError: If the actuator cannot be reached any more.
        """
        self._about = self._ask("describe", device=self._device)
        found = self._known("findings", lambda lines: tuple(Finding(**line) for line in lines))
        return (*found, Finding("actuator", True, f"reached over {self._path}, as the administrator permits"))

    def offers(self) -> tuple[Offer, ...]:
        """Return every knob that works there, with the levels this user may set."""
        return self._offers()

    def altered(self) -> tuple[str, ...]:
        """Return the knobs that no longer hold what was applied last.

        Raises:
            DeviceError: If the device was not entered, is gone, or the lease is over.
        """
        return self._altered()

    @cached_property
    def space(self) -> SearchSpace:
        """The points that this user may set, and the default among them.

        Raises:
            UnknownName: If a knob was named that the device does not have.
            DeviceError: If one was named that is off, or the actuator cannot be reached.
        """
        knobs = None if self._knobs is None else list(self._knobs)
        return space_from(self._ask("space", device=self._device, knobs=knobs))

    def apply(self, point: OperatingPoint) -> None:
        """Set every knob of ``point``, others to their default, read back there, in effect on return.

        Raises:
            KnobRejected: If a level is refused or not kept.
            PermissionDenied: If the administrator does not permit it.
            DeviceError: If the device was not entered or is gone, or the lease is over.
        """
        with self._setting:  # whoever leaves meanwhile waits, and puts it back
            self._set(point)

    def read(self) -> Reading:
        """Return energy so far, temperature and clocks, now.

        Raises:
            DeviceError: If they cannot be read.
            TrialError: If the joules are not known.
        """
        # How often the counter began anew concerns the daemon alone.
        return reading_from(self._ask("read", device=self._device))[0]

    def restore(self) -> None:
        """Restore everything to how it was found.

        Raises:
            DeviceError: If something cannot be put back; names each.
        """
        self._note_left(self._under("restore"))

    def _note_left(self, answer: Mapping[str, Any]) -> None:
        left = self._left(answer)
        owed = str(answer.get("owed", ""))
        self.left += left
        note_left(self.title, (each for each in left if each != owed))
        if owed:
            raise DeviceError(owed)

    def _check_held(self) -> None:
        if not self._held:
            raise DeviceError(f"{self.title} must be entered (with device: …) before it is steered")
        if self._process != os.getpid():
            raise DeviceError(f"{self.title} is steered by process {self._process}, which has forked this one")
        if self._lost is not None:
            raise LeaseOver(f"the lease of {self.title} has been lost: {self._lost}")

    def __enter__(self) -> Self:
        self._lost = None
        self._process = os.getpid()
        if self._lent:
            self._ask("renew", token=self._lent, seconds=MOST_S)
            self._hold(self._lent)
        else:
            self._take(self._device, MOST_S, self._holder)
        self._ended.clear()
        self._beat = Thread(target=self._keep, name="polythrottle-actuator", daemon=True)
        self._beat.start()
        return self

    @property
    def _holder(self) -> str:
        """Who takes the device, for people to read."""
        return f"process {os.getpid()}"

    def _keep(self) -> None:
        # Four times within a lease, so that one question that gets lost does not end it.
        while not self._ended.wait(MOST_S / 4):
            try:
                self._ask("renew", token=self._token, seconds=MOST_S)
            except LeaseOver as err:
                self._lost = err  # the next call says so, where somebody can act
                return
            except PolythrottleError:
                continue  # an actuator that is started again; its answer then is that the lease is over

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process != os.getpid():
            return  # the lease is that of the process which has forked this one
        self._ended.set()
        if self._beat is not None:
            self._beat.join()
            self._beat = None
        with self._setting:
            token = self._token
            held = self._held
            self._token = ""
            self._held = False
        try:
            if held:
                self._give_back(token)
        finally:
            with self._turn:
                self._idle()

    def _give_back(self, token: str) -> None:
        """Have everything put back, and say what was not, also where the lease has ended before.

        Raises:
            DeviceError: If something could not be put back, or that cannot be known; names it.
        """
        # A loan is the lender's to end: a study enters the device more than once.
        verbs = ("restore", "release") if self._lent else ("release",)
        for verb in verbs:
            try:
                answer = self._ask(verb, token=token)
            except LeaseOver:
                continue  # then it has been put back already, or is told with what that has left
            except DeviceError as err:
                if not self._changed:
                    raise
                raise DeviceError(self._unknown(f"{err}; whether these were put back is not known here")) from err
            self._note_left(answer)
            return
