"""A meter's URI: ``shelly:192.168.1.5``, ``cmd:./watts``, and where it stands in a device's."""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from polythrottle.backends.meters.live_meter import LiveMeter, Source
from polythrottle.domain.errors import DeviceError, InvalidInput, UnknownName

FORMS = (
    "shelly:HOST, tasmota:HOST, redfish:HOST, ipmi:[HOST], snmp:HOST?oid=OID, hwmon:PATH, grace:module, cmd:PROGRAM, "
    "csv:FILE, each with ?step=S&average=S&lag=S"
)
_OWN = re.compile(r"[?&]meter=")
_TIMES = ("step", "average", "lag")
_READ = {"energy": True, "power": False}


def meter_apart(text: str) -> tuple[str, str]:
    """Return a device's URI without its meter, and the meter's, which comes last; "" if there is none.

    Raises:
        InvalidInput: If it is named and empty, or named twice.
    """
    own, *meters = _OWN.split(text.strip())
    if len(meters) > 1:
        raise InvalidInput(f"{text!r} names more than one meter; name one, as the last option")
    if meters and not meters[0].strip():
        raise InvalidInput(f"{text!r} names no meter; it is one of {FORMS}")
    return own, meters[0].strip() if meters else ""


def check_kind(text: str) -> None:
    """Refuse a meter's URI of a kind that there is not.

    Raises:
        UnknownName: If it is one.
    """
    if text.partition(":")[0] not in _KINDS:
        raise UnknownName("meter", text, _KINDS, hint=f"(a meter is one of {FORMS})")


def open_meter(text: str) -> LiveMeter:
    """Return the meter a URI means, once it has answered.

    Args:
        text: One of `FORMS`.

    Raises:
        InvalidInput: If the URI is malformed.
        UnknownName: If there is no such kind of meter, or no such option.
        BadFile: If a file it names is not what it should be.
        DeviceError: If it does not answer, or not with watts or joules.
    """
    check_kind(text)
    kind, _, rest = text.partition(":")
    name, options = _options(kind, rest)
    known = {word: _seconds(word, options.pop(word)) for word in _TIMES if word in options}
    if "step" in known and kind == "cmd":
        options["step"] = str(known["step"])
    make, allowed = _KINDS[kind]
    for key in options:
        if key not in (*allowed, "step"):
            raise UnknownName(f"option of {kind}:", key, (*allowed, *_TIMES))
    try:
        meter = LiveMeter(text, make(name, options), known)
    except DeviceError as err:
        raise type(err)(f"the meter {text} cannot be read: {err}") from err
    meter.probe()
    return meter


def _options(kind: str, rest: str) -> tuple[str, dict[str, str]]:
    """Return name and options; a program's own words may hold a question mark."""
    if kind == "cmd":
        name, mark, query = rest.rpartition("?")
    else:
        name, mark, query = rest.partition("?")
    parts = [part.partition("=") for part in query.split("&") if part]
    if kind == "cmd" and not (mark and parts and all(key in _TIMES and value for key, _, value in parts)):
        return rest, {}
    found: dict[str, str] = {}
    for key, equals, value in parts:
        if not (key and equals and value) or key in found:
            raise InvalidInput(f"{key!r} in {kind}:{rest} is not an option of a meter; write for example ?step=1")
        found[key] = value
    return name, found


def _seconds(word: str, text: str) -> float:
    value = _number(word, text)
    if not 0 <= value <= 600:
        raise InvalidInput(f"{word}={text}: a meter's {word} is 0 to 600 seconds")
    return value


def _number(word: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InvalidInput(f"{word}={text} is not a number")
    return value


def _channel(options: Mapping[str, str]) -> int | None:
    """Return the channel asked for; None if nobody said."""
    text = options.get("channel")
    if text is None:
        return None
    if not (text.isdecimal() and len(text) < 3):
        raise InvalidInput(f"channel={text} is not a channel, which are 0, 1, …")
    return int(text)


def _reads(options: Mapping[str, str]) -> bool | None:
    """Return whether joules are asked for; None if nobody said."""
    text = options.get("read")
    if text is not None and text not in _READ:
        raise InvalidInput(f"read={text}: a meter is read for its power or its energy")
    if text is None:
        return None
    return _READ[text]


def _shelly(name: str, options: Mapping[str, str]) -> Source:
    from polythrottle.backends.meters.http_meters import MeterHost, Shelly

    return Shelly(MeterHost(name), _channel(options), energy=_reads(options))


def _tasmota(name: str, options: Mapping[str, str]) -> Source:
    from polythrottle.backends.meters.http_meters import MeterHost as Web
    from polythrottle.backends.meters.http_meters import Tasmota

    return Tasmota(Web(name), energy=bool(_reads(options)))


def _redfish(name: str, options: Mapping[str, str]) -> Source:
    from polythrottle.backends.meters.http_meters import MeterHost as Web
    from polythrottle.backends.meters.http_meters import Redfish, certificates

    if (verify := options.get("verify", "yes")) not in ("yes", "no"):
        raise InvalidInput(f"verify={verify}: certificates are looked at (yes) or not (no)")
    web = Web(name, "https", certificates(verify == "yes", options.get("ca", "")))
    return Redfish(web, options.get("chassis", ""), energy=bool(_reads(options)))


def _ipmi(name: str, options: Mapping[str, str]) -> Source:
    from polythrottle.backends.meters.program_meters import Ipmi

    return Ipmi(name, options.get("user", ""))


def _snmp(name: str, options: Mapping[str, str]) -> Source:
    from polythrottle.backends.meters.program_meters import Snmp

    scale = _number("scale", options.get("scale", "1"))
    if scale <= 0:
        raise InvalidInput(f"scale={options['scale']}: a unit is more than 0 W")
    return Snmp(name, options.get("oid", ""), scale, options.get("community", ""), energy=bool(_reads(options)))


def _hwmon(name: str, options: Mapping[str, str]) -> Source:
    from polythrottle.backends.meters.file_meters import HwmonMeter

    if not name:
        raise InvalidInput("hwmon: needs a path, such as hwmon:/sys/class/hwmon/hwmon3/power1_input")
    return HwmonMeter(Path(name))


def _grace(name: str, options: Mapping[str, str]) -> Source:
    from polythrottle.backends.meters.file_meters import GraceMeter

    text = options.get("socket")
    if text is not None and not (text.isdecimal() and len(text) < 3):
        raise InvalidInput(f"socket={text} is not a socket, which are 0, 1, …")
    return GraceMeter(name or "module", None if text is None else int(text))


def _cmd(name: str, options: Mapping[str, str]) -> Source:
    from polythrottle.backends.meters.program_meters import ProgramMeter

    return ProgramMeter(name, float(options["step"]) if "step" in options else None)


def _csv(name: str, options: Mapping[str, str]) -> Source:
    from polythrottle.backends.meters.file_meters import CsvMeter

    if not name:
        raise InvalidInput("csv: needs a file, such as csv:meter.csv")
    return CsvMeter(Path(name), options.get("column"), options.get("time"))


_KINDS: Mapping[str, tuple[Callable[[str, Mapping[str, str]], Source], tuple[str, ...]]] = {
    "shelly": (_shelly, ("channel", "read")),
    "tasmota": (_tasmota, ("read",)),
    "redfish": (_redfish, ("chassis", "read", "verify", "ca")),
    "ipmi": (_ipmi, ("user",)),
    "snmp": (_snmp, ("oid", "scale", "community", "read")),
    "hwmon": (_hwmon, ()),
    "grace": (_grace, ("socket",)),
    "cmd": (_cmd, ()),
    "csv": (_csv, ("column", "time")),
}
