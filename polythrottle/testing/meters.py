"""Stand-ins for meters: each answers as its maker's documentation says, and as wrongly as it is told to.

    with FakeShelly(watts=lambda: 21.5) as plug:
        polythrottle.measure(f"cpu?meter=shelly:{plug.address}", serve)

Formats are those of public records, named where each is made; how often they answer anew is assumed. ``fault`` is
taken at the next request: one of `FAULTS`, or none with "".
"""

import json
import stat
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from typing_extensions import Self

FAULTS = (
    "silence",
    "refusal",
    "web page",
    "no object",
    "no number",
    "negative",
    "huge",
    "elsewhere",
    "drip",
    "password",
)
_FIGURES = {"power", "apower", "Power", "PowerConsumedWatts", "Reading", "total", "Total"}
_PHASES = (51.08 / 212.85, 155.02 / 212.85, 6.75 / 212.85)
_HUGE = 100 << 20
_PART = b" " * (1 << 16)
_SILENT_S = 30.0
_DRIP_S = 0.2


class FakeMeter:
    """A meter that answers over HTTP on 127.0.0.1, in a thread of its own.

    Args:
        watts: What is drawn now.
        now: The time of its own clock, in seconds.

    Attributes:
        slash: Whether it sends to each path with a slash, as some Redfish services do.
    """

    def __init__(self, watts: Callable[[], float] = lambda: 20.0, now: Callable[[], float] = time.monotonic) -> None:
        self.watts = watts
        self.now = now
        self.fault = ""
        self.slash = False
        self.requests: list[str] = []
        self._joules = 0.0
        self._since_s = now()
        self._last_w = watts()
        self._guard = threading.Lock()
        self._over = threading.Event()

    def answer(self, path: str, query: dict[str, list[str]]) -> Any:
        """Return what stands at a path, ready for JSON, or an HTTP code and it; None if nothing does."""
        raise NotImplementedError

    def reset(self) -> None:
        """Begin its counter anew, as a restart does."""
        with self._guard:
            self._joules = 0.0
            self._since_s = self.now()
            self._last_w = self.watts()

    def power_w(self) -> float:
        """Return the watts it shows, and count them up to now."""
        with self._guard:
            now_s = self.now()
            power_w = self.watts()
            self._joules += (self._last_w + power_w) / 2 * (now_s - self._since_s)
            self._since_s = now_s
            self._last_w = power_w
        return power_w

    def energy_j(self) -> float:
        """Return its total, counted up to now."""
        self.power_w()
        return self._joules

    @property
    def address(self) -> str:
        """Where it answers: host and port."""
        return f"127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        meter = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                meter.serve(self)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        self._over.clear()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=lambda: self._server.serve_forever(0.02), daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def serve(self, request: BaseHTTPRequestHandler) -> None:
        """Answer a request, or fail as was asked."""
        parts = urlsplit(request.path)
        self.requests.append(request.path)
        try:
            if self.slash and not parts.path.endswith("/"):
                self._moved(request, parts.path + "/")
            elif not self._failed(request):
                path = parts.path.rstrip("/") if self.slash else parts.path
                self._send(request, self.answer(path, parse_qs(parts.query)))
        except (BrokenPipeError, ConnectionResetError):
            pass  # whoever asked has heard enough

    def _moved(self, request: BaseHTTPRequestHandler, path: str) -> None:
        request.send_response(308)
        request.send_header("Location", path)
        request.send_header("Content-Length", "0")
        request.end_headers()

    def _failed(self, request: BaseHTTPRequestHandler) -> bool:
        if self.fault == "silence":
            self._over.wait(_SILENT_S)
            return True
        if self.fault in ("refusal", "elsewhere", "password"):
            request.send_response({"refusal": 500, "elsewhere": 302, "password": 401}[self.fault])
            request.send_header("Location", "http://192.0.2.7/status")
            request.send_header("WWW-Authenticate", 'Basic realm="meter"')
            request.send_header("Content-Length", "0")
            request.end_headers()
            return True
        if self.fault == "dripping headers":
            request.wfile.write(b"HTTP/1.0 200 OK\r\n")
            while not self._over.wait(_DRIP_S / 10):
                request.wfile.write(b"X: y\r\n")
            return True
        if self.fault in ("huge", "drip"):
            request.send_response(200)
            request.send_header("Content-Length", str(_HUGE))
            request.end_headers()
            self._pour(request)
            return True
        return False

    def _pour(self, request: BaseHTTPRequestHandler) -> None:
        for _ in range(_HUGE // len(_PART)):
            request.wfile.write(_PART if self.fault == "huge" else b" ")
            if self.fault == "drip" and self._over.wait(_DRIP_S):
                return

    def _send(self, request: BaseHTTPRequestHandler, found: Any) -> None:
        code = 404 if found is None else 200
        if isinstance(found, tuple):
            code, found = found
        if self.fault in ("no number", "negative"):
            found = _distorted(found, float("nan") if self.fault == "no number" else -1.0)
        body = json.dumps([1] if self.fault == "no object" else found).encode()
        if self.fault == "web page":
            body = b"<!DOCTYPE html><title>Router</title>"
        request.send_response(code)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)


def _distorted(found: Any, factor: float) -> Any:
    """Return a document with its power and energy times a factor."""
    if isinstance(found, list):
        return [_distorted(each, factor) for each in found]
    if not isinstance(found, dict):
        return found
    return {
        name: value * factor if name in _FIGURES and isinstance(value, int | float) else _distorted(value, factor)
        for name, value in found.items()
    }


class FakeShelly(FakeMeter):
    """A Shelly: https://shelly-api-docs.shelly.cloud/gen1/ and /gen2/ComponentsAndServices/Switch, PM1, EM.

    ``emeters`` as a 3EM answers (evcc-io/evcc, meter/shelly; its phases are those of a note in Shelly's forum), ``EM``
    as a Pro 3EM.

    Args:
        generation: 1, or 2 and later.
        component: ``Switch``, ``PM1`` or ``EM``, from generation 2 on; ``meters`` or ``emeters`` before.
        switch: The id of a switch that is there beside, without a meter, as 100 on a Pro 3EM with its add-on.
        others: As of `FakeMeter`.
    """

    def __init__(
        self, generation: int = 2, component: str = "Switch", switch: int | None = None, **others: Any
    ) -> None:
        super().__init__(**others)
        self.switch = switch
        self.generation = generation
        self.component = component

    def answer(self, path: str, query: dict[str, list[str]]) -> Any:
        """Return the state of its only meter."""
        if path == "/shelly":  # gen1: "type"; from 2 on: "gen" and "model"
            if self.generation == 1:
                return {"type": "SHPLG-S", "auth": False}
            return {"gen": self.generation, "model": "X"}
        if self.generation == 1:
            if path != "/status":
                return None
            if self.component == "emeters":
                return {"emeters": [self._phase(share) for share in _PHASES], "total_power": self.power_w()}
            total = int(self.energy_j() / 60)
            return {
                "meters": [{"power": self.power_w(), "is_valid": True, "counters": [0.0, 0.0, 0.0], "total": total}]
            }
        if self.switch is None:
            known = [self.component]
        else:
            known = [self.component, "Switch"]
        if path not in [f"/rpc/{name}.GetStatus" for name in known]:
            return None
        if path != f"/rpc/{self.component}.GetStatus" or query.get("id") != ["0"]:
            return 500, {"code": -105, "message": f"Argument 'id', value {query['id'][0]} not found!"}
        if self.component == "EM":
            return {"id": 0, "a_act_power": self.power_w(), "b_act_power": 0.0, "total_act_power": self.power_w()}
        total_wh = self.energy_j() / 3600
        return {"id": 0, "apower": self.power_w(), "voltage": 230.1, "aenergy": {"total": round(total_wh, 3)}}

    def _phase(self, share: float) -> dict[str, Any]:
        total_wh = round(self.energy_j() / 3600 * share, 1)
        power_w = round(self.power_w() * share, 2)
        return {"power": power_w, "pf": 0.98, "is_valid": True, "total": total_wh, "total_returned": 4.1}


class FakeTasmota(FakeMeter):
    """A plug with Tasmota: https://tasmota.github.io/docs/Commands/.

    Args:
        command: Which command tells the sensors: ``Status 10``, or ``Status 8`` in old ones.
        password: Which it wants; none if "".
        shares: Of what is drawn on each of its channels; those of a device of several are told as a list, as by a
            Sonoff Dual (ferrets6/wattson, mqtt).
        others: As of `FakeMeter`.
    """

    def __init__(
        self, command: str = "Status 10", password: str = "", shares: tuple[float, ...] = (1.0,), **others: Any
    ) -> None:
        super().__init__(**others)
        self.shares = shares
        self.command = command
        self.password = password

    def answer(self, path: str, query: dict[str, list[str]]) -> Any:
        """Return what a command says."""
        if path != "/cm":
            return None
        if self.password and query.get("password") != [self.password]:
            return {"WARNING": "Need user=<username>&password=<password>"}
        if query.get("cmnd") != [self.command]:
            return {"Command": "Unknown"}
        powers = [round(self.power_w() * share) for share in self.shares]
        totals = [round(self.energy_j() / 3.6e6 * share, 3) for share in self.shares]
        power: Any = powers if len(powers) > 1 else powers[0]
        total: Any = totals if len(totals) > 1 else totals[0]
        energy = {"Total": total, "Power": power, "ApparentPower": power, "Factor": 1.0, "Voltage": 230}
        return {"StatusSNS": {"Time": "2026-01-02T10:30:00", "ENERGY": energy}}


class FakeRedfish(FakeMeter):
    """The Redfish service of a server: DMTF's Power 1.7 and EnvironmentMetrics 1.3.

    Args:
        newer: Whether it tells EnvironmentMetrics too.
        chassis: Names of its chassis that tell power.
        others: As of `FakeMeter`.

    Attributes:
        instead: What stands at a path in place of its resource.
    """

    def __init__(self, *, newer: bool = False, chassis: tuple[str, ...] = ("1",), **others: Any) -> None:
        super().__init__(**others)
        self.instead: dict[str, Any] = {}
        self.newer = newer
        self.chassis = chassis

    def answer(self, path: str, query: dict[str, list[str]]) -> Any:
        """Return a resource."""
        root = "/redfish/v1/Chassis"
        if path in self.instead:
            return self.instead[path]
        if path == root:
            return {"Members": [{"@odata.id": f"{root}/{name}"} for name in ("Enclosure", *self.chassis)]}
        links = ("EnvironmentMetrics", "Power") if self.newer else ("Power",)
        resources: dict[str, Any] = {f"{root}/Enclosure": {"Id": "Enclosure"}}
        for name in self.chassis:
            own = f"{root}/{name}"
            resources[own] = {"Id": name, **{link: {"@odata.id": f"{own}/{link}"} for link in links}}
            watts = self.power_w()
            kwh = self.energy_j() / 3.6e6
            resources[f"{own}/Power"] = {"PowerControl": [{"Name": "System", "PowerConsumedWatts": watts}]}
            if self.newer:
                newer = {"PowerWatts": {"Reading": watts}, "EnergykWh": {"Reading": kwh}}
                resources[f"{own}/EnvironmentMetrics"] = newer
        return resources.get(path)


IPMITOOL = """#!/bin/sh
# ipmitool's lib/ipmi_dcmi.c prints these lines
[ "$*" = "dcmi power reading" ] || [ "$3" = "-H" ] || { echo "Invalid command" >&2; exit 1; }
cat {state}
"""
SNMPGET = """#!/bin/sh
# snmpcmd(1): -Oqv prints the value alone
cat {state}
"""
READING = """
    Instantaneous power reading:              {watts:>8} Watts
    Minimum during sampling period:                  6 Watts
    Maximum during sampling period:                304 Watts
    Average power reading over sample period:       49 Watts
    IPMI timestamp:                           Thu Feb 15 08:36:01 2024
    Sampling period:                          00000001 Seconds.
    Power reading state is:                   {state}

"""


def plant_program(folder: Path, name: str, text: str) -> Path:
    """Write an executable program.

    Args:
        folder: Where; put it first in PATH.
        name: Of the program.
        text: Of its file; ``{state}`` becomes the path of ``NAME.out`` beside it, which such a program prints.

    Returns:
        The path of that file.
    """
    state = folder / f"{name}.out"
    program = folder / name
    program.write_text(text.replace("{state}", str(state)))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return state


def plant_hwmon(folder: Path, **files: object) -> Path:
    """Write a chip of hwmon, as Documentation/hwmon/sysfs-interface.rst has it: ``power1_input=21_500_000``.

    Args:
        folder: Where it shall stand.
        files: What stands in each file.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in {"name": "ina226", **files}.items():
        (folder / name).write_text(f"{value}\n")
    return folder
