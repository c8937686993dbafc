"""What a daemon is told: a file of settings, and options that go before it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from polythrottle.daemon.budgets import ExplorationAllowance, check_wish
from polythrottle.daemon.commands import SetBudget
from polythrottle.daemon.control.events import Bounds
from polythrottle.domain.errors import BadFile, InvalidInput, PolythrottleError, UnknownName
from polythrottle.domain.problem import Constraint
from polythrottle.domain.units import parse_quantity
from polythrottle.storage.identity import same_hardware
from polythrottle.storage.untrusted import bounded, members_of, read_toml, shortened

DEFAULT_FILE = Path("/etc/polythrottle/daemon.toml")
_MOST_BYTES = 1_000_000
_SPANS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_WH = {"Wh": 1.0, "kWh": 1e3, "mWh": 1e-3}
_SERVICE_NAME = re.compile(r"[a-z][a-z0-9-]{0,39}")  # it becomes a folder and a part of URLs
_TEXT_MOST = 4096
"""As long as a path may be on Linux."""
_SERVICES_MOST = 64
"""More than a server has GPUs, and no more than are looked at within a second."""
_AMOUNT = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*([A-Za-z%]*)\s*")


@dataclass(frozen=True)
class ServiceSettings:
    """One of several services that a daemon looks after.

    Args:
        name: Its own, by which people and programs ask for it.
        profile: What to follow; likewise the others, as `Settings` has them.
        workload: Likewise.
        device: Likewise; a group such as ``nvml:0-3`` is one device.
        traffic: Likewise.
        slo: Likewise.
        guards: Likewise.
        weight: What its SLO counts where watts are short.
        most_w: What its devices draw at most while nobody bounds them; None takes what is known of them.
    """

    name: str
    profile: str | None = None
    workload: str | None = None
    device: str | None = None
    traffic: str | None = None
    slo: tuple[str, ...] = ()
    guards: Bounds = field(default_factory=Bounds)
    weight: float = 1.0
    most_w: float | None = None


@dataclass(frozen=True)
class NodeSettings:
    """The power that several services share.

    Args:
        power_w: Most mean power of the whole server over a second; None for no such limit.
        rest_w: What it draws besides its services' devices; None to learn it from a meter.
        meter: URI of a meter of the whole server, such as ``redfish:HOST``.
    """

    power_w: float | None = None
    rest_w: float | None = None
    meter: str | None = None


@dataclass(frozen=True)
class KubernetesSettings:
    """Where a daemon learns of the pods that are its services.

    Args:
        profiles: Folder of the profiles that pods may name, such as a ConfigMap's.
        kubelet: Its socket for the PodResources API.
        api: Address of the cluster's API; "" for the one that Kubernetes tells every pod.
    """

    profiles: Path = Path("/etc/polythrottle/profiles")
    kubelet: Path = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
    api: str = ""


@dataclass(frozen=True)
class Settings:
    """Everything a daemon can be told; None and empty where nothing was said.

    Args:
        profile: What to follow: a file, or ``<device>/<workload>``.
        workload: URI of what is served, where there is no profile yet.
        device: URI of the board; the profile's by default.
        traffic: Where requests are seen.
        actuator: Socket of the privileged process.
        lease_s: For how long the actuator keeps what is set after the daemon has died.
        local: Whether the device is opened in the daemon's own process.
        socket: Where the API is served.
        slo: Constraints that go before the profile's.
        guards: Limits that go before the SLO's.
        budget: What may be drawn; None if nothing was said, which leaves the one kept from before.
        allowance: What exploring may cost.
        tcp: ``HOST:PORT`` to serve the API at besides; ``tls_cert``, ``tls_key`` and ``token_file`` protect it.
        page: Whether to serve the page to this user alone where there is no ``tcp``; None if nothing was said, which
            does it in a terminal.
        readers: Groups that may look; ``writers`` those that may change.
        finetune: Folders of fine-tuning jobs, or of several, besides ``finetune`` in the state folder.
        study: Who makes studies, ``itself`` or a ``host``; None for whoever can.
        services: Several services, each with devices of its own, in place of the one above.
        left_out: Those of a file that cannot be, each with why; the others are looked after all the same.
        node: The power they share.
        kubernetes: Where the pods that are its services are learnt of; None without Kubernetes.
    """

    profile: str | None = None
    workload: str | None = None
    device: str | None = None
    traffic: str | None = None
    actuator: Path | None = None
    lease_s: float = 15.0
    local: bool = False
    socket: Path | None = None
    slo: tuple[str, ...] = ()
    guards: Bounds = field(default_factory=Bounds)
    budget: SetBudget | None = None
    allowance: ExplorationAllowance = field(default_factory=ExplorationAllowance)
    tcp: str | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    token_file: Path | None = None
    page: bool | None = None
    readers: tuple[str, ...] = ()
    writers: tuple[str, ...] = ()
    finetune: tuple[Path, ...] = ()
    study: str | None = None
    services: tuple[ServiceSettings, ...] = ()
    left_out: tuple[str, ...] = ()
    node: NodeSettings = field(default_factory=NodeSettings)
    kubernetes: KubernetesSettings | None = None

    @property
    def shared(self) -> bool:
        """Whether a server of services is looked after, and not one service alone."""
        return bool(self.services) or self.node.power_w is not None or self.kubernetes is not None

    def over(self, **options: Any) -> Settings:
        """Return the settings with those options put first that were given: neither None nor empty."""
        return replace(self, **{name: value for name, value in options.items() if value not in (None, (), False)})

    def of_service(self, service: ServiceSettings) -> Settings:
        """Return the settings of one of several services: its own, and what is said for all."""
        return replace(
            self,
            profile=service.profile,
            workload=service.workload,
            device=service.device,
            traffic=service.traffic,
            slo=service.slo,
            guards=service.guards,
            budget=None,
            services=(),
            node=NodeSettings(),
            kubernetes=None,
        )


def read_settings(file: Path) -> Settings:
    """Return the settings in a file.

    Raises:
        BadFile: If it cannot be read or is no TOML, or a key is unknown or has a value it cannot have: names the key.
            Of several services it is raised only where none is left; else `Settings.left_out` says so.
    """
    try:
        document = read_toml(file, _MOST_BYTES)
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{file} is not TOML: {bounded(str(error))}") from error
    reader = _Reader(file)
    plain = reader.table("", document, _TOP)
    api = reader.table("api", document.get("api", {}), _API)
    guards = reader.table("guards", document.get("guards", {}), _GUARDS)
    budget = reader.table("budget", document.get("budget", {}), _BUDGET)
    exploring = reader.table("exploring", document.get("exploring", {}), _EXPLORING)
    node = reader.table("node", document.get("node", {}), _NODE)
    services, left_out = _services(reader, document)
    pods = reader.table("kubernetes", document.get("kubernetes", {}), _KUBERNETES)
    settings = Settings(
        **plain,
        **api,
        guards=reader.made("guards", lambda: Bounds(**guards)),
        budget=reader.made("budget", lambda: _budget(budget)) if budget else None,
        allowance=reader.made("exploring", lambda: ExplorationAllowance(**exploring)),
        services=services,
        left_out=left_out,
        node=NodeSettings(**node),
        kubernetes=KubernetesSettings(**pods) if "kubernetes" in document else None,
    )
    return replace(settings, local=document.get("actuator") is False)  # 0 is a slip, which `_actuator` refuses


def check(settings: Settings) -> None:
    """Check that what was said goes together.

    Raises:
        InvalidInput: If it does not.
    """
    if settings.local and settings.actuator is not None:
        raise InvalidInput("--actuator and --no-actuator exclude each other; leave one out")
    if settings.tcp is None and (settings.tls_cert or settings.tls_key or settings.token_file):
        raise InvalidInput("--tls-cert, --tls-key and --token-file protect --tcp HOST:PORT, which was not given")
    if settings.shared:
        _check_node(settings)
    elif settings.node != NodeSettings():
        raise InvalidInput(
            "--rest and --node-meter tell how much of a server's power is left to services; give --node-power with them"
        )


def _check_node(settings: Settings) -> None:
    """Check services and the power they share; what is wrong with one of them is left to `startup.build_node`.

    Raises:
        InvalidInput: If two have one name, something is said that belongs to a service, or the power that is left to
            them is not known.
    """
    of_one = ("profile", "workload", "device", "traffic", "slo", "budget")
    said = [name for name in of_one if getattr(settings, name)]
    if settings.kubernetes is not None and (settings.services or said):
        raise InvalidInput(
            f"with [kubernetes] the services are pods; leave {'[[service]]' if settings.services else said[0]} out"
        )
    if settings.services and said:
        raise InvalidInput(
            f"with [[service]] tables, {said[0]} is said of each service in its own table; leave the general one out"
        )
    names = [each.name for each in settings.services]
    if twice := [name for number, name in enumerate(names) if name in names[:number]]:
        raise InvalidInput(f"two services are called {twice[0]!r}; give each a name of its own")
    rest_w = settings.node.rest_w
    power_w = settings.node.power_w
    if rest_w is not None and power_w is not None and rest_w >= power_w:
        raise InvalidInput(
            f"the rest of the server draws {rest_w:g} W, which leaves nothing of a node power of {power_w:g} W"
        )
    if power_w is not None and rest_w is None and settings.node.meter is None:
        raise InvalidInput(
            "say what the server draws besides its services' devices: rest = '400W' in [node], or --rest 400W; or name "
            "a meter of the whole that tells: meter = 'redfish:HOST'"
        )


def check_devices(devices: Mapping[str, str]) -> None:
    """Check that no two services have a device in common, as far as names tell.

    What ``nvml:0`` and ``nvml:GPU-…`` are is known to the driver alone: there the second service cannot take the GPU.

    Args:
        devices: URIs, by the name of the service.

    Raises:
        InvalidInput: If two have; names both.
    """
    for (other, other_uri), (name, uri) in combinations(devices.items(), 2):
        if both := same_hardware(uri, other_uri):
            raise InvalidInput(
                f"{uri} of {name} and {other_uri} of {other} are the same device ({', '.join(sorted(both))}); "
                "a device serves one service"
            )


def _services(reader: _Reader, document: Mapping[str, Any]) -> tuple[tuple[ServiceSettings, ...], tuple[str, ...]]:
    """Return the services of a file, and why others in it cannot be.

    Raises:
        BadFile: If none is left, or they are no tables of their own.
    """
    tables = document.get("service", [])
    if not isinstance(tables, list):
        raise reader.wrong("service", "services are tables of their own, each below a line [[service]]")
    if len(tables) > _SERVICES_MOST:
        words = f"there are {len(tables)} [[service]] tables; a daemon looks after at most {_SERVICES_MOST} services"
        raise reader.wrong("service", words)
    found: dict[str, ServiceSettings] = {}
    left_out: list[str] = []
    refused: BadFile | None = None
    for number, table in enumerate(tables, 1):
        try:
            service = _service(reader, number, table)
            if service.name in found:
                words = f"another service is called {service.name!r} already; give each a name of its own"
                raise reader.wrong(f"service {number}", words)
            found[service.name] = service
        except BadFile as error:
            name = members_of(table).get("name")
            if isinstance(name, str) and _SERVICE_NAME.fullmatch(name):
                shown = name
            else:
                shown = f"number {number}"
            left_out.append(f"service {shown} is left out: {error}")
            refused = refused or error
    if refused is not None and not found:
        raise refused
    return tuple(found.values()), tuple(left_out)


def _service(reader: _Reader, number: int, table: Any) -> ServiceSettings:
    values = reader.table("service", table, _SERVICE)
    if "name" not in values:
        raise reader.wrong(f"service {number}", "it needs a name, such as name = 'chat'")
    guards = reader.table("service.guards", values.pop("guards", {}), _GUARDS)
    return ServiceSettings(**values, guards=reader.made("service.guards", partial(Bounds, **guards)))


class _Reader:
    """Reads tables and names the key where something is wrong.

    Args:
        file: It is read from.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def table(self, name: str, table: Any, known: Mapping[str, tuple[str, Callable[[Any], Any]]]) -> dict[str, Any]:
        """Return a table's values under the names of their fields."""
        if not isinstance(table, dict):
            raise BadFile(f"{self._file}: [{name}] is to be a table")
        found = {}
        for key, value in table.items():
            if name:
                where = f"{name}.{key}"
            else:
                where = key
            if not name and key in _TABLES:
                continue
            if key not in known:
                if name:
                    names = [f"{name}.{each}" for each in known]
                else:
                    names = [*known, *(f"[{each}]" for each in _TABLES)]
                raise BadFile(f"{self._file}: {UnknownName('key', bounded(where), names)}")
            to, read = known[key]
            found[to] = self.made(where, lambda read=read, value=value: read(value))  # type: ignore[misc]
        return {to: value for to, value in found.items() if value is not None}

    def made(self, where: str, make: Callable[[], Any]) -> Any:
        """Return what is made, or say where it failed."""
        try:
            return make()
        except (PolythrottleError, TypeError, ValueError) as error:
            raise self.wrong(where, str(error)) from error

    def wrong(self, where: str, words: str) -> BadFile:
        """Return the error that says what is wrong with a key."""
        return BadFile(f"{self._file}: {where}: {bounded(words)}")


def watts(text: Any) -> float:
    """Return the watts that ``10W`` or a number mean.

    Raises:
        InvalidInput: If it is neither, or not above zero.
    """
    return _above_zero(text, lambda words: parse_quantity(words, "w"), "10W")


def watt_hours(text: Any) -> float:
    """Return the watt-hours that ``80Wh`` or a number mean.

    Raises:
        InvalidInput: If it is neither, or not above zero.
    """
    return _above_zero(text, lambda words: _amount(words, _WH, "80Wh"), "80Wh")


def seconds(text: Any) -> float:
    """Return the seconds that ``9h`` or a number mean.

    Raises:
        InvalidInput: If it is neither, or not above zero.
    """
    return _above_zero(text, lambda words: _amount(words, _SPANS, "9h"), "9h")


def _amount(text: str, factors: Mapping[str, float], example: str) -> float:
    match = _AMOUNT.fullmatch(text)
    if match is None or match[2] not in factors:
        raise InvalidInput(f"{text[:40]!r} is not in {', '.join(factors)}; write for example {example}")
    return float(match[1]) * factors[match[2]]


def _above_zero(value: Any, parse: Callable[[str], float], example: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):  # to Python, TOML's true is an int
        raise InvalidInput(f"{shortened(value)} is not a quantity; write for example {example}")
    try:
        found = _as_float(value)
    except ValueError:
        found = parse(str(value))
    if found == math.inf:
        raise InvalidInput(f"{shortened(value)} is too large; write for example {example}")
    if not found > 0:  # nor is NaN
        raise InvalidInput(f"{shortened(value)} is not above zero; write for example {example}")
    return found


def _as_float(value: float | str) -> float:
    """Return a number as a float; one of so many digits that no float holds it as infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _budget(found: Mapping[str, Any]) -> SetBudget:
    wish = SetBudget(**found)
    check_wish(wish)
    return wish


def _lease(value: Any) -> float:
    if not 3 <= (found := seconds(value)) <= 60:  # renewed after a third of it, and a turn takes a second
        raise InvalidInput(f"a lease lasts between 3 s and 60 s, not {found:g} s")
    return found


def _millis(value: Any) -> float:
    return _above_zero(value, lambda words: parse_quantity(words, "s") * 1e3, "25") / 1e3  # a bare number is in ms


def _celsius(value: Any) -> float:
    return _above_zero(value, lambda words: parse_quantity(words, "c"), "85")


def _share(value: Any) -> float:
    if isinstance(value, str) and (match := _AMOUNT.fullmatch(value)) and match[2] == "%":
        return float(match[1]) / 100
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidInput(f"{shortened(value)} is not a share; write for example 0.01 or '1%'")
    return _as_float(value)


def _part(value: Any) -> float:
    if not 0 <= (found := _share(value)) < 1:
        raise InvalidInput(f"{shortened(value)} is not a share from 0 up to below 1; write for example 0.01 or '1%'")
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InvalidInput(f"{shortened(value)} is not a text")
    if len(value) > _TEXT_MOST:
        raise InvalidInput(f"{shortened(value)} has more than {_TEXT_MOST} letters")
    return value


def _path(value: Any) -> Path:
    return Path(_text(value))


def _actuator(value: Any) -> Path | None:
    if value is False:
        return None
    return _path(value)


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise InvalidInput(f"{shortened(value)} is not a list of texts")
    return tuple(map(_text, value))


def _folders(value: Any) -> tuple[Path, ...]:
    folders = tuple(map(Path, _texts(value)))
    if odd := [str(folder) for folder in folders if not folder.is_absolute()]:
        raise InvalidInput(
            f"{odd[0]!r} is to be a whole path, such as /srv/flowers: a service has no folder of its own"
        )
    return folders


def _slo(value: Any) -> tuple[str, ...]:
    texts = _texts(value)
    for text in texts:
        Constraint.parse(text)
    return texts


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(f"{shortened(value)} is neither true nor false")
    return value


def _name(value: Any) -> str:
    if not isinstance(value, str) or not _SERVICE_NAME.fullmatch(value):
        raise InvalidInput(
            f"{shortened(value)} is no name of a service: up to 40 of a-z, 0-9 and -, beginning with a letter"
        )
    return value


def weight_of(value: Any) -> float:
    """Return what an SLO counts where watts are short.

    Raises:
        InvalidInput: If it is no number from 0.001 to 1000.
    """
    found = _above_zero(value, _no_number, "2")
    if not 1e-3 <= found <= 1e3:
        raise InvalidInput(f"a weight lies between 0.001 and 1000, not at {found:g}")
    return found


def _no_number(text: str) -> float:
    raise InvalidInput(f"{text[:40]!r} is no number; write for example 2")


def _some(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidInput(f"{shortened(value)} is to be a table")
    return value


_TABLES = ("api", "guards", "budget", "exploring", "node", "service", "kubernetes")
_TOP: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "profile": ("profile", _text),
    "workload": ("workload", _text),
    "device": ("device", _text),
    "traffic": ("traffic", _text),
    "actuator": ("actuator", _actuator),
    "lease": ("lease_s", _lease),
    "socket": ("socket", _path),
    "slo": ("slo", _slo),
    "finetune": ("finetune", _folders),
    "study": ("study", _text),
}
_API: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "tcp": ("tcp", _text),
    "tls_cert": ("tls_cert", _path),
    "tls_key": ("tls_key", _path),
    "token_file": ("token_file", _path),
    "readers": ("readers", _texts),
    "writers": ("writers", _texts),
}
_GUARDS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "p99_ms": ("p99_s", _millis),
    "ttft_ms": ("ttft_s", _millis),
    "tpot_ms": ("tpot_s", _millis),
    "power_w": ("power_w", watts),
    "peak_w": ("peak_w", watts),
    "temperature_c": ("temperature_c", _celsius),
    "errors": ("errors", _part),
    "throttling": ("throttling", _switch),
    "hold_s": ("hold_s", seconds),
}
_SERVICE: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "name": ("name", _name),
    "profile": ("profile", _text),
    "workload": ("workload", _text),
    "device": ("device", _text),
    "traffic": ("traffic", _text),
    "slo": ("slo", _slo),
    "weight": ("weight", weight_of),
    "most": ("most_w", watts),
    "guards": ("guards", _some),
}
_NODE: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "power": ("power_w", watts),
    "rest": ("rest_w", watts),
    "meter": ("meter", _text),
}
_KUBERNETES: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "profiles": ("profiles", _path),
    "kubelet": ("kubelet", _path),
    "api": ("api", _text),
}
_BUDGET: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "power": ("power_w", watts),
    "battery": ("battery_wh", watt_hours),
    "last": ("last_s", seconds),
    "wh_per_day": ("wh_per_day", watt_hours),
    "carbon": ("carbon", _text),
}
_EXPLORING: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "joules": ("joules", _share),
    "violations": ("violations", _share),
    "idle": ("idle_s", seconds),
    "canary": ("canary", _share),
}
