"""Meters that answer over HTTP: Shelly plugs and relays, Tasmota, and the Redfish service of a server.

Paths, fields and units are those of the makers' documentation: Shelly's API of generation 1
(https://shelly-api-docs.shelly.cloud/gen1/: ``/status``, ``meters[].power`` in W, ``total`` in watt-minutes, 0 after a
restart; ``emeters[]`` of EM and 3EM, whose ``total`` is in Wh) and of generation 2 and later
(https://shelly-api-docs.shelly.cloud/gen2/: ``Switch.GetStatus``, ``apower`` in W, ``aenergy.total`` in Wh; ``PM1``
likewise; ``act_power`` of ``EM1`` and ``total_act_power`` of ``EM``, whose counters, apart, are new each minute);
Tasmota's ``Status 10``, once ``Status 8`` (``StatusSNS.ENERGY``: ``Power`` in W, ``Total`` in kWh, each a list on a
device of several channels: https://tasmota.github.io/docs/Commands/); Redfish's ``Power`` and ``EnvironmentMetrics``
(DMTF DSP0266 and DSP2046).
"""

from __future__ import annotations

import http.client
import io
import json
import math
import netrc
import re
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from base64 import b64encode
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from polythrottle.backends.meters.live_meter import Sample, power_sensor
from polythrottle.domain.errors import BadFile, DeviceError, InvalidInput
from polythrottle.domain.ports import Sensor
from polythrottle.storage.untrusted import entries_of, members_of, printable

_TIMEOUT_S = 2.0
_DEADLINE_S = 4.0
_MOST_BYTES = 1 << 20
_PART = 1 << 16
_WH_J = 3600.0
_WATT_MINUTE_J = 60.0
_KWH_J = 3.6e6
_PHASES = 3
_NO_COMPONENT = -105
_PART_NAME = re.compile(r"sub-?system|cpu|processor|memory|gpu|fan", re.IGNORECASE)  # Lenovo's CPU Sub-system Power
_ACTIVE = ("apower", "act_power", "total_act_power")


class _SameHost(urllib.request.HTTPRedirectHandler):
    """Follows a service that adds a slash to its own paths, and nothing else."""

    max_redirections = 2

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        """Return the request to the other path; None where it leads elsewhere."""
        here = urllib.parse.urlsplit(req.full_url)
        there = urllib.parse.urlsplit(newurl)
        if (here.scheme, here.netloc) != (there.scheme, there.netloc):
            raise DeviceError(f"it sends us elsewhere, to {printable(newurl)[:80]}, where we do not go")
        known = 307 if code == 308 else code
        return super().redirect_request(req, fp, known, msg, headers, newurl)

    http_error_308 = urllib.request.HTTPRedirectHandler.http_error_302  # not known to Python 3.10


class _Timely(io.RawIOBase):
    """What comes from a connection up to a moment, however slowly it drips."""

    def __init__(self, connection: socket.socket, inner: io.RawIOBase, end_s: float) -> None:
        self._connection = connection
        self._inner = inner
        self._end_s = end_s

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Return how many bytes came into a buffer.

        Raises:
            TimeoutError: If none came in time.
        """
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._connection.settimeout(min(_TIMEOUT_S, left_s))
        return self._inner.readinto(buffer)

    def close(self) -> None:
        """Let go of the connection."""
        self._inner.close()
        super().close()


class _Answer(http.client.HTTPResponse):
    """An answer whose status, headers and body all come up to a moment: http.client waits anew for each line."""

    def __init__(self, end_s: float, connection: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(connection, *args, **options)
        self.fp = io.BufferedReader(_Timely(connection, self.fp.detach(), end_s))


class _Opener(urllib.request.HTTPSHandler, urllib.request.HTTPHandler):
    """Opens connections whose answers are whole by ``end_s``."""

    def __init__(self, context: ssl.SSLContext | None) -> None:
        super().__init__()
        self._certificates = context
        self.end_s = 0.0

    def http_open(self, req: Any) -> Any:
        """Return the answer to a request."""
        return self.do_open(self._connected, req)

    def https_open(self, req: Any) -> Any:
        """Return the answer to a request over TLS."""
        return self.do_open(partial(self._connected, context=self._certificates), req)

    def _connected(self, host: str, **options: Any) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if "context" in options else http.client.HTTPConnection
        connection = kind(host, **options)
        connection.response_class = partial(_Answer, self.end_s)  # type: ignore[assignment]
        return connection


class MeterHost:
    """A host that answers GET with JSON: briefly, in time, and from where it was asked.

    Name and password are taken from ``~/.netrc``, where ``curl --netrc`` looks too.

    Args:
        address: ``host``, ``host:port`` or ``http://host:port``.
        scheme: What is spoken where the address does not say.
        context: How certificates are looked at.

    Raises:
        InvalidInput: If the address is none.
    """

    def __init__(self, address: str, scheme: str = "http", context: ssl.SSLContext | None = None) -> None:
        text = address if "://" in address else f"{scheme}://{address}"
        try:
            parts = urllib.parse.urlsplit(text)
            host = parts.hostname
            _ = parts.port
        except ValueError as err:
            raise InvalidInput(f"{address!r} is no host: {err}") from err
        plain = not (parts.path.strip("/") or parts.query or parts.username or any(c.isspace() for c in text))
        if not host or parts.scheme not in ("http", "https") or not plain:
            raise InvalidInput(f"{address!r} is no host; write for example 192.168.1.5 or plug.local:8080")
        self.host = host
        self._base = f"{parts.scheme}://{parts.netloc}"
        self._handler = _Opener(context)
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),  # a meter is on the local network
            _SameHost(),
            self._handler,
        )

    def password(self) -> tuple[str, str] | None:
        """Return the name and password kept for this host; None if there are none."""
        try:
            found = netrc.netrc().authenticators(self.host)
        except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
            return None
        if found is None:
            return None
        return (found[0], found[2] or "")

    def get(self, path: str, *, basic: bool = True) -> Mapping[str, Any]:
        """Return the JSON object at a path.

        Args:
            path: With its query.
            basic: Whether name and password are sent in the header.

        Raises:
            PathFailed: If the server says that it failed; PathAbsent if there is nothing at that path.
            DeviceError: If it does not answer, or not with an object.
        """
        request = urllib.request.Request(self._base + path, headers={"Accept": "application/json"})
        if basic and (kept := self.password()) is not None:
            request.add_header("Authorization", "Basic " + b64encode(":".join(kept).encode()).decode())
        self._handler.end_s = end_s = time.monotonic() + _DEADLINE_S
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                body = _read(answer)
        except urllib.error.HTTPError as err:
            with err:
                raise self._refused(err, path) from err
        except (OSError, http.client.HTTPException) as err:
            reason = getattr(err, "reason", None) or err
            told = "it does not answer in time" if isinstance(reason, TimeoutError) else printable(str(reason))
            if time.monotonic() > end_s:
                raise DeviceError(f"{self._base}{path} takes more than {_DEADLINE_S:g} s to answer") from err
            raise DeviceError(f"{self._base}: {told or type(err).__name__}") from err
        return _object(body, self._base + path)

    def _refused(self, err: urllib.error.HTTPError, path: str) -> DeviceError:
        if err.code in (404, 501) or _lacks_component(err):
            return PathAbsent(f"{self._base}{path} is not there")
        if err.code in (401, 403):
            asked = str(err.headers.get("WWW-Authenticate", "")).lower()
            if asked.startswith("digest"):
                return DeviceError(
                    f"{self._base} wants digest authentication, which is not spoken here; switch its password off, or "
                    f"let a program read it: cmd:PROGRAM"
                )
            return DeviceError(
                f"{self._base} wants a password; write 'machine {self.host} login NAME password WORD' into ~/.netrc"
            )
        if 300 <= err.code < 400:
            return DeviceError(f"{self._base}{path} sends us round in circles (HTTP {err.code})")
        kind = PathFailed if err.code >= 500 else DeviceError
        return kind(f"{self._base}{path} answers HTTP {err.code}")


class PathFailed(DeviceError):
    """A path answers with an error of the server itself."""


class PathAbsent(PathFailed):
    """There is nothing at a path: a device of another generation."""


def _lacks_component(err: urllib.error.HTTPError) -> bool:
    """Return whether a Shelly says that it has no component of an id, with a code in the JSON of an HTTP 500."""
    if err.code != 500:
        return False
    try:
        return number_at(_object(_read(err), ""), "code") == _NO_COMPONENT
    except (OSError, http.client.HTTPException, DeviceError):
        return False


def _read(answer: Any) -> bytes:
    """Return a body, if it is small."""
    parts = []
    size = 0
    while part := answer.read1(_PART):
        parts.append(part)
        size += len(part)
        if size > _MOST_BYTES:
            raise DeviceError(f"{answer.geturl()} answers with more than {_MOST_BYTES >> 20} MiB; that is no meter")
    return b"".join(parts)


def _object(body: bytes, where: str) -> Mapping[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        what = "a web page" if body.lstrip()[:1] == b"<" else "no JSON"
        raise DeviceError(f"{where} answers with {what}; see whether it is the meter, and of this kind") from None
    if not isinstance(found, dict):
        raise DeviceError(f"{where} answers with JSON that is no object; see whether it is the meter")
    return found


def number_at(found: Any, *path: str | int) -> float | None:
    """Return the number at a path in a document; None if there is nothing.

    Raises:
        DeviceError: If it is something else.
    """
    for step in path:
        if isinstance(step, str):
            inside = isinstance(found, dict)
        else:
            inside = isinstance(found, list) and len(found) > step
        if not inside:
            return None
        found = found.get(step) if isinstance(found, dict) else found[step]
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, (int, float)):
        raise DeviceError(f"{'.'.join(map(str, path))} is {printable(str(found))[:40]!r}, which is no number")
    if abs(found) < 1e300:
        return float(found)
    return math.inf


class Shelly:
    """A Shelly plug, relay or meter of any generation, found out at its first answer.

    Args:
        web: Where it answers.
        channel: Which of its meters; if None the first, or all phases of a 3EM together.
        energy: Whether its counter is taken; if None, from generation 2 on, whose counter is fine.
    """

    def __init__(self, web: MeterHost, channel: int | None = None, *, energy: bool | None = None) -> None:
        self._web = web
        self._channel = channel or 0
        self._named = channel is not None
        self._energy = energy
        self._path = ""
        self._generation = 0
        self._counted = True
        self._clamps = False
        self.boundary = f"wall, shelly at {web.host}" + ("" if channel is None else f" (channel {channel})")

    @property
    def counts(self) -> bool:
        """Whether its counter is taken."""
        if self._energy is None:
            return self._generation != 1 and self._counted
        return self._energy

    @property
    def sensor(self) -> Sensor:
        """Power anew each second; a counter in thousandths of Wh, in generation 1 in watt-minutes or tenths of Wh."""
        if self.counts:
            quantum_j = _WH_J / 1000
            if self._generation == 1:
                quantum_j = _WH_J / 10 if self._clamps else _WATT_MINUTE_J
            return Sensor(step_s=1.0, quantum_j=quantum_j, source="shelly: about once a second, assumed", counts=True)
        quantum_w = 0.01 if self._generation == 1 else 0.1
        return power_sensor(1.0, 1.0, quantum_w=quantum_w, source="shelly: a mean over each second, assumed")

    def sample(self) -> tuple[Sample, ...]:
        """Return its power and total now.

        Raises:
            DeviceError: If it cannot be had.
        """
        if not self._path:
            self._path = self._found()
        answer = self._web.get(self._path)
        if self._generation == 1:
            power_w, total_j = self._first(answer)
        else:
            power_w = number_at(answer, next((name for name in _ACTIVE if name in answer), ""))
            total_j = _times(number_at(answer, "aenergy", "total"), _WH_J)
        return (_told(power_w, total_j, self.counts, self._web.host),)

    def _first(self, answer: Mapping[str, Any]) -> tuple[float | None, float | None]:
        """Return the watts and joules in an answer of generation 1."""
        self._clamps = "emeters" in answer
        unit_j = _WH_J if self._clamps else _WATT_MINUTE_J
        meters = answer.get("emeters" if self._clamps else "meters")
        channels = [self._channel]
        if self._clamps and not self._named and isinstance(meters, list) and len(meters) == _PHASES:
            channels = list(range(_PHASES))
        powers_w = [number_at(meters, channel, "power") for channel in channels]
        totals = [number_at(meters, channel, "total") for channel in channels]
        if None not in powers_w and any(meters[channel].get("is_valid") is False for channel in channels):  # type: ignore[index]
            raise DeviceError("it says itself that its reading is not valid")
        return _all(powers_w), _times(_all(totals), unit_j)

    def _found(self) -> str:
        """Return the path at which it tells its power."""
        about = self._web.get("/shelly")  # without a password in every generation
        generation = number_at(about, "gen")
        if generation is None and "type" not in about:
            raise DeviceError(f"{self._web.host} is no Shelly: its /shelly says neither gen nor type")
        self._generation = 1 if generation is None else int(generation)
        if self._generation == 1:
            return "/status"
        for component in ("Switch", "PM1", "EM1", "EM", "Cover", "Light"):
            path = f"/rpc/{component}.GetStatus?id={self._channel}"
            try:
                answer = self._web.get(path)
            except PathAbsent:
                continue
            if any(name in answer for name in _ACTIVE):
                self._counted = "aenergy" in answer
                return path
        raise DeviceError(f"{self._web.host} has no meter as its channel {self._channel}")

    def close(self) -> None:
        """Look again which it is, for it may have been another."""
        self._path = ""


class Tasmota:
    """A plug with Tasmota.

    Args:
        web: Where it answers.
        energy: Whether its counter is taken, which moves by 1 Wh unless its EnergyRes is set higher.
    """

    def __init__(self, web: MeterHost, *, energy: bool = False) -> None:
        self._web = web
        self.counts = energy
        self._command = "Status 10"
        self.boundary = f"wall, tasmota at {web.host}"

    @property
    def sensor(self) -> Sensor:
        """Power anew each second in whole watts, and a counter in thousandths of kWh."""
        source = "tasmota: about once a second, assumed"
        if self.counts:
            return Sensor(step_s=1.0, quantum_j=_KWH_J / 1000, source=source, counts=True)
        return power_sensor(1.0, 1.0, quantum_w=1.0, source=source)

    def sample(self) -> tuple[Sample, ...]:
        """Return its power and total now.

        Raises:
            DeviceError: If it cannot be had.
        """
        words = {"cmnd": self._command}
        if (kept := self._web.password()) is not None:
            words = {"user": kept[0], "password": kept[1], **words}
        query = urllib.parse.urlencode(words, quote_via=urllib.parse.quote)
        answer = self._web.get(f"/cm?{query}", basic=False)
        if "WARNING" in answer:
            raise DeviceError(
                f"{self._web.host} wants a password; write 'machine {self._web.host} login admin password WORD' into "
                f"~/.netrc"
            )
        found = answer.get("StatusSNS", {})
        energy = members_of(found).get("ENERGY")
        if not isinstance(energy, dict):
            if self._command != "Status 8":
                self._command = "Status 8"
                return self.sample()
            raise DeviceError(f"{self._web.host} tells no ENERGY: it is no Tasmota device with a meter")
        total_j = _times(_summed(energy, "Total"), _KWH_J)
        return (_told(_summed(energy, "Power"), total_j, self.counts, self._web.host),)

    def close(self) -> None:
        """Ask the newer command first again."""
        self._command = "Status 10"


class Redfish:
    """The power of a whole server, as its management controller tells it.

    Args:
        web: Where it answers.
        chassis: Which chassis; the only one that tells power if "".
        energy: Whether ``EnvironmentMetrics`` is asked for its joules.
    """

    def __init__(self, web: MeterHost, chassis: str = "", *, energy: bool = False) -> None:
        self._web = web
        self._chassis = chassis
        self.counts = energy
        self._path = ""
        part = f" ({chassis})" if chassis else ""
        self._whole = f"the whole server, redfish at {web.host}{part}"
        self.boundary = self._whole

    @property
    def sensor(self) -> Sensor:
        """Power in whole watts, anew each second."""
        source = "redfish: about once a second, assumed; it differs by maker"
        if self.counts:
            return Sensor(step_s=1.0, quantum_j=1.0, source=source, counts=True)
        return power_sensor(1.0, 1.0, quantum_w=1.0, source=source)

    def sample(self) -> tuple[Sample, ...]:
        """Return its power, and total, now.

        Raises:
            DeviceError: If it cannot be had.
        """
        if not self._path:
            self._path = self._found()
        power_w, energy_j = _server(self._web.get(self._path))
        return (_told(power_w, energy_j, self.counts, self._web.host),)

    def _found(self) -> str:
        """Return the path of the one chassis that tells what is wanted."""
        wanted = "joules" if self.counts else "watts"
        paths = {}
        failures = {}
        for chassis in self._members():
            name = chassis.rstrip("/").rpartition("/")[2]
            try:
                path = self._path_in(chassis)
            except PathFailed as err:
                failures[name] = err
                continue
            if path:
                paths[name] = path
        if len(paths) > 1:
            raise DeviceError(f"several chassis tell {wanted}, {', '.join(sorted(paths))}: say ?chassis=NAME")
        if not paths:
            which = f"its chassis {self._chassis} does not tell" if self._chassis else "none of its chassis tells"
            raise DeviceError("; ".join([f"{self._web.host}: {which} {wanted}", *map(str, failures.values())][:2]))
        silent = [name for name, failure in failures.items() if not isinstance(failure, PathAbsent)]
        self.boundary = self._whole + (f", without chassis {', '.join(silent)}, which failed" if silent else "")
        return next(iter(paths.values()))

    def _path_in(self, chassis: str) -> str:
        """Return the path at which a chassis tells what is wanted; "" if it does not, but raise where it may."""
        failure = None
        for path in self._metrics(chassis):
            try:
                power_w, energy_j = _server(self._web.get(path))
            except PathFailed as err:
                failure = err
                continue
            if (energy_j if self.counts else power_w) is not None:
                return path
        if failure is not None:
            raise failure
        return ""

    def _members(self) -> Iterator[str]:
        listed = self._web.get("/redfish/v1/Chassis").get("Members")
        for each in entries_of(listed):
            path = members_of(each).get("@odata.id")
            if not isinstance(path, str) or not path.startswith("/"):
                continue
            if self._chassis in ("", path.rstrip("/").rpartition("/")[2]):
                yield path

    def _metrics(self, chassis: str) -> Iterator[str]:
        """Yield where a chassis tells its power: EnvironmentMetrics, which replaces Power, then Power."""
        about = self._web.get(chassis)
        for name in ("EnvironmentMetrics", "Power"):
            path = members_of(about.get(name)).get("@odata.id")
            if isinstance(path, str) and path.startswith("/"):
                yield path

    def close(self) -> None:
        """Look again which chassis it is."""
        self._path = ""


def _server(answer: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Return the watts and joules in a Power or EnvironmentMetrics resource."""
    power_w = number_at(answer, "PowerWatts", "Reading")
    if power_w is None:
        power_w = _consumed(answer.get("PowerControl"))
    energy_j = number_at(answer, "EnergyJoules", "Reading")
    if energy_j is None:
        energy_j = _times(number_at(answer, "EnergykWh", "Reading"), _KWH_J)
    return power_w, energy_j


def _consumed(controls: Any) -> float | None:
    """Return the watts of the first control that tells any, and is not of a part such as the memory."""
    for place, control in enumerate(entries_of(controls)):
        power_w = number_at(control, "PowerConsumedWatts")
        name = str(members_of(control).get("Name"))
        if power_w is not None and (place == 0 or not _PART_NAME.search(name)):
            return power_w
    return None


def _summed(found: Mapping[str, Any], name: str) -> float | None:
    """Return the number of a name; of a list, as of a plug of two channels, all of them together."""
    listed = found.get(name)
    if not isinstance(listed, list):
        return number_at(found, name)
    numbers = [number_at(listed, place) for place in range(len(listed))]
    return sum(each for each in numbers if each is not None) if numbers else None


def _all(values: list[float | None]) -> float | None:
    """Return a sum; None if one of its parts is not known."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _times(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit


def _told(power_w: float | None, energy_j: float | None, counts: bool, host: str) -> Sample:
    """Return a sample that has what is taken of it.

    Raises:
        DeviceError: If it has not.
    """
    if (energy_j if counts else power_w) is None:
        other = power_w if counts else energy_j
        wanted, instead = ("joules", "power") if counts else ("power", "energy")
        remedy = f"; read its other figure with ?read={instead}" if other is not None else ""
        raise DeviceError(f"{host} tells no {wanted}{remedy}")
    return Sample(power_w, energy_j)


def certificates(verify: bool, ca: str) -> ssl.SSLContext:
    """Return how certificates are looked at.

    Args:
        verify: Whether they are looked at at all.
        ca: A file with those that are trusted, such as that of the controller itself; the system's if "".

    Raises:
        BadFile: If that file is none.
    """
    try:
        context = ssl.create_default_context(cafile=str(Path(ca).expanduser()) if ca else None)
    except (OSError, ssl.SSLError) as err:
        raise BadFile(f"{ca} is no file of certificates: {err}") from err
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
