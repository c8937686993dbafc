"""The one client of the actuator, which studies (`RemoteDevice`) and the daemon (`ActuatorBoard`) are made of."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from polythrottle.actuation.wire import MOST_ANSWER, MOST_REQUEST, MOST_S, VERSION, Later, error_from
from polythrottle.domain.errors import DeviceError, InvalidInput, PermissionDenied, PolythrottleError
from polythrottle.domain.measurement import Reading
from polythrottle.domain.ports import Offer
from polythrottle.domain.space import Knob, OperatingPoint
from polythrottle.storage.json_channel import Channel, encode
from polythrottle.storage.untrusted import MALFORMED

TOKEN = "POLYTHROTTLE_TOKEN"
"""The environment variable with the token of a loan, which a process that starts a study gives it."""

T = TypeVar("T")
_PATIENCE_S = 60.0
_AT_THE_DOOR_S = 2.0  # how long to wait where the actuator has not even taken in those who came before
_IDLE_S = 60.0  # a line not used for this long may have been dropped by the actuator


def patiently(ask: Callable[[], T], tries: int = 5, most_s: float = MOST_S / 4) -> T:
    """Return an answer, asked for again so many times where the actuator says "later", and after at most so long."""
    for _ in range(tries):
        try:
            return ask()
        except Later as err:
            time.sleep(min(err.after_s, most_s))
    return ask()


def reading_from(answer: Mapping[str, Any]) -> tuple[Reading, int]:
    """Return the reading of an answer to ``read``, and how often the counter of energy began anew.

    Raises:
        DeviceError: If it holds none, as that of an actuator of another version.
    """
    try:
        fields = dict(answer)
        began_anew = int(fields.pop("anew", 0))
        temperature_c = fields["temperature_c"]
        fields["time_s"] = float(fields["time_s"])
        fields["energy_j"] = float(fields["energy_j"])
        fields["temperature_c"] = None if temperature_c is None else float(temperature_c)
        fields["clocks_hz"] = {str(domain): int(hz) for domain, hz in fields["clocks_hz"].items()}
        fields["throttled"] = bool(fields["throttled"])
        return Reading(**fields), began_anew
    except MALFORMED as err:
        raise DeviceError(f"the actuator's reading makes no sense, as from one of another version: {err}") from err


class Line:
    """A connection to the actuator; connects when something is asked, and again where that was long ago.

    Not for several threads at once.

    Args:
        path: Of its socket, or where it is, for people, if ``connect`` is given.
        patience_s: How long to wait for an answer.
        connect: Returns a connected socket, where the way there is another.
    """

    def __init__(
        self, path: Path | str, patience_s: float = _PATIENCE_S, connect: Callable[[], socket.socket] | None = None
    ) -> None:
        self._path: Path | str = path if connect is not None else Path(path)
        self._connect = connect
        self._patience_s = patience_s
        self._channel: Channel | None = None
        self._number = 0
        self._used_s = 0.0
        self._sending = False
        self._owed = False  # whether an answer may still come that nobody waits for any more

    def ask(self, verb: str, **fields: Any) -> dict[str, Any]:
        """Return the answer to a request.

        Args:
            verb: One of those in the docstring of `polythrottle.actuation.wire`.
            fields: Of the verb.

        Raises:
            PermissionDenied: If this user may not ask, or not that.
            DeviceError: If the actuator cannot be reached or does not answer in time.
            PolythrottleError: What it refuses with.
        """
        self._number += 1
        request = encode({"v": VERSION, "id": self._number, "verb": verb, **fields})
        if len(request) > MOST_REQUEST:
            raise InvalidInput(f"a request of {len(request)} bytes is too long for the actuator")
        answer = self._answered(request)
        if "error" in answer:
            raise error_from(answer["error"])
        if answer.get("id") != self._number or not isinstance(answer.get("answer"), dict):
            self.close()
            raise DeviceError(f"what answers at {self._path} is no actuator of this version")
        fields_of_answer: dict[str, Any] = answer["answer"]
        return fields_of_answer

    def _answered(self, request: bytes) -> dict[str, Any]:
        now_s = time.monotonic()
        if self._channel is not None and now_s - self._used_s > _IDLE_S:
            self.close()
        try:
            channel = self._channel or self._connected()
            now_s = time.monotonic()
            # A server that refuses us says so and hangs up, perhaps before it has read anything.
            self._sending = True
            with suppress(BrokenPipeError, ConnectionResetError):
                channel.send_line(request, self._patience_s)
            self._sending = False
            answer = self._own_answer(channel, now_s + self._patience_s)
        except (InvalidInput, EOFError, OSError) as err:
            self.close()
            raise self._lost(err) from err
        except BaseException:  # a Ctrl-C; whoever puts the device back then asks over this connection
            if self._sending:
                self.close()  # half a request may have gone
            self._owed = self._channel is not None
            raise
        self._used_s = time.monotonic()
        return answer

    def _own_answer(self, channel: Channel, until_s: float) -> dict[str, Any]:
        """Return the next answer, past those to requests that were interrupted.

        Raises:
            TimeoutError: If none has come in time.
        """
        while (answer := channel.receive(until_s - time.monotonic())) is not None:
            number = answer.get("id")
            if not self._owed or not isinstance(number, int) or number >= self._number:
                self._owed = False
                return answer
        raise TimeoutError

    def _lost(self, err: Exception) -> DeviceError:
        """Return in words how the connection was lost."""
        if isinstance(err, InvalidInput):
            return DeviceError(f"what answers at {self._path} is no actuator: {err}")
        if isinstance(err, (TimeoutError, socket.timeout)):  # one and the same from Python 3.10 on
            return DeviceError(f"the actuator at {self._path} did not answer within {self._patience_s:g} s")
        if self._connect is not None:
            return DeviceError(f"the connection to {self._path} was lost")
        why = "it closed the connection"
        if isinstance(err, OSError):
            why = err.strerror or str(err)
        return DeviceError(f"the actuator at {self._path} has hung up: {why}; ask again")

    def _connected(self) -> Channel:
        if self._connect is not None:
            self._channel = Channel(self._connect(), MOST_ANSWER)
            return self._channel
        ends_s = time.monotonic() + min(_AT_THE_DOOR_S, self._patience_s)
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            connection.settimeout(self._patience_s)
            try:
                connection.connect(os.fspath(self._path))
            except BlockingIOError as err:  # too many are at the door, for which a timeout is no help (unix(7))
                connection.close()
                if time.monotonic() > ends_s:
                    words = f"the actuator at {self._path} is busy: too many wait at its door; ask again later"
                    raise DeviceError(words) from err
                time.sleep(0.01)
            except OSError as err:
                connection.close()
                raise _unreachable(Path(self._path), err) from err
            else:
                self._channel = Channel(connection, MOST_ANSWER)
                return self._channel

    @property
    def connected(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._channel is not None

    def close(self) -> None:
        """Hang up; the next `ask` connects again."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._sending = self._owed = False


class LeaseHolder:
    """A client that sets one device under a lease: what is known of the device, and what is asked under the token.

    Args:
        path: Of the actuator's socket, for people.
        token: Of a lease that was held before, which goes on if it still runs; "" for none.
    """

    def __init__(self, path: Path, token: str = "") -> None:
        self._path = path
        self._token = token
        self._held = False
        self._about: Mapping[str, Any] = {}  # the answer to describe; empty until it is asked for
        self._changed: set[str] = set()  # knobs that may not be as found, for as long as nobody here knows better

    def _ask(self, verb: str, **fields: Any) -> dict[str, Any]:
        """Return the answer to a request."""
        raise NotImplementedError

    def _check_held(self) -> None:
        """Look whether the lease is held, as far as is known here; a DeviceError if not."""
        raise NotImplementedError

    def _part(self, answer: Mapping[str, Any], name: str, take: Callable[[Any], T]) -> T:
        """Return a part of an answer.

        Raises:
            DeviceError: If it is not there, or not what it should be.
        """
        try:
            return take(answer[name])
        except (*MALFORMED, PolythrottleError) as err:
            raise DeviceError(f"the actuator at {self._path} is of another version: its {name} says {err}") from err

    def _under(self, verb: str, **fields: Any) -> dict[str, Any]:
        """Return the answer to a request under the lease; a DeviceError if there is none, or no longer."""
        self._check_held()
        return self._ask(verb, token=self._token, **fields)

    def _take(self, device: str, seconds: float, holder: str) -> None:
        known = {}
        if self._token:
            known["token"] = self._token
        answer = self._ask("take", device=device, seconds=seconds, holder=holder, **known)
        self._hold(self._part(answer, "token", str))

    def _hold(self, token: str) -> None:
        self._token = token
        self._held = True
        self._changed.clear()

    def _offers(self) -> tuple[Offer, ...]:
        return self._part(self._about, "knobs", lambda lines: tuple(map(_offer, lines)))

    def _note_set(self, point: OperatingPoint) -> None:
        """Note which knobs may not be as found from now on, should it never be known."""
        usual = {offer.knob.name: offer.default for offer in self._offers()}
        self._changed |= {name for name, level in point.items() if usual.get(name) != level}

    def _set(self, point: OperatingPoint) -> None:
        self._note_set(point)
        self._under("apply", point=dict(point))

    def _altered(self) -> tuple[str, ...]:
        return self._part(self._under("verify"), "knobs", lambda names: tuple(map(str, names)))

    def _left(self, answer: Mapping[str, Any]) -> tuple[str, ...]:
        """Return what an answer to ``restore`` or ``release`` says is not as it was found: now that is known."""
        self._changed.clear()
        return tuple(map(str, answer.get("left", ())))

    def _unknown(self, words: str) -> str:
        """Return words about what may not have been put back, with the knobs that were set."""
        if self._changed:
            return f"{words}: {', '.join(sorted(self._changed))}"
        return words


def _offer(line: Mapping[str, Any]) -> Offer:
    return Offer(Knob(line["name"], tuple(line["levels"]), line["label"]), line["default"], line["searched"])


def _unreachable(path: Path, err: OSError) -> DeviceError:
    if isinstance(err, PermissionError):
        return PermissionDenied(
            f"this user may not ask the actuator at {path}; join the group polythrottle, or run as root"
        )
    if isinstance(err, (FileNotFoundError, ConnectionRefusedError)):
        return DeviceError(f"no actuator listens at {path}; start it: polythrottle daemon actuator")
    return DeviceError(f"the actuator at {path} cannot be reached: {err.strerror or err}")
