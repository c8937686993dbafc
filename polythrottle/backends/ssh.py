"""A board that is reached over SSH, with nothing installed there, and a device of it: ``ssh://nano/jetson``."""

import getpass
import os
import platform
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import TracebackType
from typing import Any, TypeGuard

from polythrottle.actuation.client.connection import Line, patiently
from polythrottle.actuation.restore import Standing
from polythrottle.actuation.rollback import Difference, Outcome
from polythrottle.actuation.state.lease import Lease, boot_s
from polythrottle.actuation.wire import Later, error_from, error_line
from polythrottle.backends.remote import RemoteDevice
from polythrottle.board.carried import Carried, content_of, packages, sources, zipped
from polythrottle.board.link import Link, Place
from polythrottle.domain.clock import Thread
from polythrottle.domain.errors import DeviceError, PolythrottleError, TrialError
from polythrottle.domain.measurement import Reading
from polythrottle.domain.ports import Finding, Sensor, usual_sensor
from polythrottle.domain.space import OperatingPoint

_PATIENCE_S = 150.0  # of an answer, should ssh have to be started first
_SIGN_OF_LIFE_S = 30.0
_SCHEME = "ssh:"
_ENDS = ("restore", "release")
"""Verbs after which a point that waits to be set need not be."""
_ASIDE = ("renew", "hello")
"""Verbs of the thread that keeps the lease."""


def is_ssh(device: str | None) -> TypeGuard[str]:
    """Say whether a device's URI is one of a board over SSH."""
    return device is not None and device.startswith(_SCHEME)


def desk() -> str:
    """Return who asks from here, for people at the board."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user} at {platform.node()} (process {os.getpid()}, over SSH)"


_MEASURING = {
    "actuation": "*",
    "actuation/[ds]*": "*",
    "actuation/client": "__init__ connection",
    "backends": "__init__ device_uri power probe remote served_devices",
    "backends/cpu": "*",
    "backends/jetson": "*",
    "backends/nvml": "*",
    "board": "__init__ far_side work_host",
    "catalog": "__init__ boards documents models",
    "domain": "__init__ arrivals backports clock error_budget errors measurement metrics ports problem space study "
    "units",
    "inspect": "__init__ machine tree_files",
    "metering": "__init__ error_budget_guard load window",
    "storage": "__init__ atomic_file documents identity json_channel paths space_codec untrusted",
    "workloads": "__init__ command cuda foreign_calls inputs onnx_model python_callable tensorrt_engine torch_archive "
    "torch_model trtexec uris",
    "workloads/services": "__init__ http_client kserve kserve_grpc kserve_protocol openai service",
}


@lru_cache(maxsize=2)
def packed(entry: str = "polythrottle.board.far_side", also: Sequence[tuple[str, str]] = ()) -> Carried:
    """Return what measures on a board: the actuator, the real backends, the load generator and workloads.

    Args:
        entry: The module whose ``main`` runs there.
        also: Modules that are carried besides, as of `sources`; a tuple.

    Raises:
        DeviceError: If a file of it cannot be read here.
    """
    files = {**dict(sources(_MEASURING)), **dict(packages("async_timeout", "h11")), **dict(sources(dict(also)))}
    return Carried(zipped(content_of(files)), entry)


class SshBoard:
    """A board over SSH; connected when something is asked, and until `close`: what runs there ends with it.

    Args:
        place: Which board, and which device of it.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self._link = Link(place, packed())
        self.line = Line(place.where, _PATIENCE_S, connect=self._link.connect)
        self._opened_over: int | None = None
        self.turn = threading.Lock()
        self.hosts = False
        """Whether a workload has been opened there: then the connection is its to close."""
        self.waiting: Mapping[str, Any] | None = None
        """A point that is to be set there with what the workload is told next, and the token of the lease."""
        self._over = threading.Event()
        Thread(target=_show_life, args=(weakref.ref(self), self._over), name="polythrottle-ssh", daemon=True).start()
        # Whoever only looks at a device has nothing to leave, and drops it.
        weakref.finalize(self, _hang_up, self._over, self.line)

    def ask(self, verb: str, **fields: Any) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
            DeviceError: If the board cannot be reached, or what runs there has ended; says its last words.
            PolythrottleError: What it refuses with.
        """
        with self.turn:
            known = self.line.connected
            try:
                return self.line.ask(verb, **fields)
            except DeviceError as err:
                self._name_in(err)
                words = ""
                if known and not self.line.connected:
                    words = self._link.last_words()
                elif "its log" in str(err):
                    words = self._link.said
                if words:
                    raise DeviceError(f"{err}; its last words: {words}") from err
                raise
            except PolythrottleError as err:
                self._name_in(err)
                raise

    def _name_in(self, err: PolythrottleError) -> None:
        """Have an error of the board say so: what it calls here is there. What becomes of a trial is told with that."""
        where = self.place.where
        answered = self.line.connected
        if answered and not isinstance(err, TrialError) and where not in str(err):
            err.args = (f"{where}: {err}",)

    def work(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what the workload there answers to a message; a point that waits is set before it hears of it.

        Raises:
            KnobRejected: If the point is refused; the message has then not been passed on.
            DeviceError: If the connection over which the workload was opened is lost.
            PolythrottleError: As `ask`.
        """
        setting = self.waiting or {"token": ""}
        self.waiting = None
        if any(order.get("do") == "open" for order in message["say"]):
            self._opened_over = None
        else:
            self._check_open()
        answer = patiently(lambda: self.ask("work", message=dict(message), **setting))
        if self._opened_over is None:
            self._opened_over = self._link.connections
        self._check_open()
        events = answer.get("events")
        for event in events if isinstance(events, list) else ():
            if isinstance(event, list) and event[:1] == ["error"] and len(event) > 1:
                err = error_from(event[1])
                self._name_in(err)
                event[1] = error_line(err)
        return answer

    def _check_open(self) -> None:
        """Look whether the workload is there still: it has ended with the connection that it was opened over.

        Whoever asks connects anew, such as the thread that keeps the lease; what answers then knows of no workload,
        and has nothing to tell of it, for ever.

        Raises:
            DeviceError: If it is not.
        """
        if self._opened_over is not None and self._opened_over != self._link.connections:
            raise DeviceError(f"the connection to {self.place.where} was lost")

    def restore_all(self, *, force: bool = False) -> tuple[Outcome, ...]:
        """Put back what stands on record there: the device that the URI names, or everything.

        Args:
            force: Whether to end a living holder's hold, and to undo what others have changed since.

        Raises:
            PolythrottleError: As on the board itself.
        """
        found = self.ask("restore_all", name=self.place.device, force=force)["outcomes"]
        return tuple(_outcome(each) for each in found)

    def confirm_all(self) -> tuple[Standing, ...]:
        """Let stand what was applied there before, and return what stands.

        Raises:
            DeviceError: If nothing waits to be confirmed.
        """
        return tuple(_standing(each) for each in self.ask("confirm", name=self.place.device)["stands"])

    def examined(self) -> Mapping[str, tuple[Finding, ...]]:
        """Return findings of the board's machine: ``machine``, ``others`` who steer it, and ``records``.

        Raises:
            DeviceError: If the board cannot be reached any more.
        """
        found = self.ask("examine", board=self.place.uri(""))
        return {key: tuple(Finding(**line) for line in found[key]) for key in ("machine", "others", "records")}

    def files(self, names: Sequence[str]) -> Mapping[str, Any]:
        """Return the board's files that tell what it is: ``files``, ``links`` and ``unread`` by path below its root.

        Args:
            names: Paths besides those that the device itself reads.

        Raises:
            PolythrottleError: If they cannot be read.
        """
        return self.ask("files", device="", names=list(names))

    def close(self) -> None:
        """Hang up; what runs on the board puts everything back and goes. What is asked after that connects anew."""
        with self.turn:
            self.line.close()


def _show_life(board: "weakref.ref[SshBoard]", over: threading.Event) -> None:
    """Say something now and then, or the far side takes this one for gone."""
    while not over.wait(_SIGN_OF_LIFE_S):
        living = board()
        if living is None:
            return
        try:
            if living.line.connected:
                living.ask("hello")
        except PolythrottleError:
            pass  # whoever asks next meets it where somebody can act
        # Kept while this waits, it would keep a board alive that everybody else has dropped.
        del living


def _hang_up(over: threading.Event, line: Line) -> None:
    over.set()
    line.close()


class SshDevice(RemoteDevice):
    """A device of a board over SSH; satisfies the ports ``Device``, ``Inspectable``, ``Offering`` and ``Lasting``.

    Args:
        board: The board.
        knobs: Which knobs to search; those the device searches by default if None.

    Raises:
        InvalidInput: If no such device can be served there.
        DeviceError: If the board cannot be reached, or the device not be opened there.
    """

    def __init__(self, board: SshBoard, knobs: Sequence[str] | None = None) -> None:
        self.board = board
        self._closing: Reading | None = None
        super().__init__("", "", knobs=knobs, token="", line=board.line)
        # A loan is of the actuator on the board, and not of what runs there for this process, which takes it up.
        lent = self._lent
        self._lent = ""
        if lent and board.place.device.startswith("actuator:"):
            self._ask("borrow", token=lent)

    @classmethod
    def of(cls, name: str, options: Mapping[str, str], knobs: Sequence[str] | None = None) -> "SshDevice":
        """Return the device a URI means.

        Args:
            name: What follows ``ssh:``.
            options: What follows the question mark.
            knobs: Which knobs to search.

        Raises:
            PolythrottleError: As the constructor does, and `Place.parse`.
        """
        board = SshBoard(Place.parse(name, options))
        try:
            return cls(board, knobs)
        except BaseException:
            board.close()
            raise

    @property
    def uri(self) -> str:
        """The URI that opens it again from here."""
        return self.board.place.uri(self.there)

    @property
    def there(self) -> str:
        """Its URI on the board itself."""
        return super().uri

    @property
    def averaging(self) -> Sensor:
        """What the device there says of its sensor; what is usual for its kind where it says nothing."""
        if "sensor" not in self._about:
            return usual_sensor(self.there)
        return super().averaging

    def findings(self) -> tuple[Finding, ...]:
        """Return what works and what does not there, and by which way it is reached.

        Raises:
            DeviceError: If the board cannot be reached any more.
        """
        *own, _ = super().findings()
        hello = self._ask("hello")
        way = f"{self.board.place.where} runs this version in {hello.get('program')} ({hello.get('python')})"
        return (*own, Finding("ssh", True, way))

    def hand_over(self, holder: str, seconds: float | None, confirmed_s: float | None = None) -> str:
        """Leave the settings in place under a guard on the board; see `polythrottle.domain.ports.Lasting`.

        Raises:
            DeviceError: If the device was not entered.
        """
        name = str(self._under("hand_over", holder=holder, seconds=seconds, confirmed_s=confirmed_s)["name"])
        self._changed.clear()
        return name

    @property
    def _holder(self) -> str:
        return desk()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            if not self.board.hosts and self._process == os.getpid():
                self.board.close()

    def apply(self, point: OperatingPoint) -> None:
        """Set every knob of ``point``, others to their default.

        Where a workload runs there it is set with what that is told next, or before anything else is asked of the
        device: to wait for the answer first would be a way there and back more in each trial.

        Raises:
            KnobRejected: If a level is refused or not kept; where a workload runs there, by what is asked next.
            DeviceError: If the device was not entered or is gone, or the lease is over.
        """
        if self.board.hosts:
            self._check_held()
            self._note_set(point)
            self.board.waiting = {"token": self._token, "point": dict(point)}
        else:
            super().apply(point)

    def close_with(self, reading: Reading | None) -> None:
        """Keep the reading that was told at the end of what was driven there; None while something is driven."""
        self._closing = reading

    def closing(self) -> Reading:
        """Return that reading, once, or else one that is taken now.

        Raises:
            DeviceError: If it cannot be read.
        """
        told = self._closing
        self._closing = None
        self.board.waiting = None  # nobody has measured it
        if told is not None:
            return told
        return self.read()

    def _asked(self, verb: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        if verb in _ENDS:
            self.board.waiting = None
        elif verb not in _ASIDE and self.board.waiting is not None:
            waiting = self.board.waiting
            self.board.waiting = None
            try:
                patiently(lambda: self.board.ask("apply", **waiting))
            except Later:
                self.board.waiting = waiting  # it is still to be set, by whoever asks again
                raise
        return self.board.ask(verb, **fields)

    def _idle(self) -> None:
        """Stay connected: to start again takes a second, and what was opened there would be gone."""


def _outcome(found: Mapping[str, Any]) -> Outcome:
    """Return the outcome that has travelled as an object."""
    told: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in found.items()}
    for name in ("foreign", "failed"):
        told[name] = tuple(Difference(**each) for each in told[name])
    return Outcome(**told)


def _standing(found: Mapping[str, Any]) -> Standing:
    """Return what stands, as it has travelled; its end on this machine's clock."""
    if found["expires_in_s"] is None:
        ends_s = None
    else:
        ends_s = boot_s() + found["expires_in_s"]
    lease = replace(Lease(**found["lease"]), expires_s=ends_s)
    return Standing(found["device"], tuple(found["keys"]), lease, tuple(found["damage"]))
