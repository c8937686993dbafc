"""The devices behind the actuator: opened, described, read; and what stands on record of each, by its URI.

On record are the names a device has there, restored and confirmed together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polythrottle.actuation import restore as restoring
from polythrottle.actuation.drivers.controls import trust
from polythrottle.actuation.restore import Standing
from polythrottle.actuation.rollback import Outcome
from polythrottle.backends import DeviceURI, open_device
from polythrottle.domain.clock import SystemClock, VirtualClock
from polythrottle.domain.errors import BadFile, InvalidInput, PolythrottleError, UnknownName
from polythrottle.domain.ports import Averaging, Device, Offer, Offering, Sampled, findings_of
from polythrottle.storage.identity import identity_of

if TYPE_CHECKING:
    from polythrottle.backends.nvml import NamedGpus

_ON_RECORD = re.compile(r"(jetson|cpu|nvml)\b[^ ]*")


def on_record(device: str | None) -> Sequence[str | None]:
    """Return the names under which a device stands on record: as given, or what its URI stands under.

    Those of a group are the names of its GPUs that stand there; one name, which restoring then refuses, where none do.

    Args:
        device: None for everything.
    """
    if device is None or not _ON_RECORD.fullmatch(device):
        if device is None or not device.startswith("nvml "):
            return [device]
        return device.split(", ")
    body, _, query = device.partition("?")
    if body.partition(":")[0] == "nvml":
        return _gpus_on_record(body)
    roots = roots_of(query)
    if roots:
        return [f"{body} {Path(roots[0]).resolve()}"]
    return [body.replace(":", " ")]


def _gpus_on_record(body: str) -> Sequence[str]:
    standing = _standing_gpus()
    name = body.partition(":")[2]
    if name == "all":
        return standing or ["nvml all"]
    if (gpus := named_gpus(name)) is None:
        if re.fullmatch(r"\d*", name) and len(standing) == 1:
            return standing  # which GPU that is only its driver knows; one on record leaves no choice
        named = [f"nvml {each}" for each in (name or "0").split(",")]
    else:
        named = [f"nvml {uuid}" for uuid in gpus.uuids]
        # Which GPU has lost its number nobody can say: what stands of those that do not answer is not lost sight of.
        named += [each for each in standing if gpus.silent and each[5:] not in gpus.answering]
    return [each for each in named if each in standing] or named[:1] or [f"nvml {name}"]


def _standing_gpus() -> list[str]:
    # Where only files tell of a device, it is named as they are, and a UUID has no sign that they leave out.
    names = [re.sub("^nvml_", "nvml ", each) for each in restoring.concerned()]
    return [each for each in names if each.startswith("nvml ")]


def named_gpus(name: str) -> NamedGpus | None:
    """Return which GPUs a name means, as the driver counts now; None where no driver says, or nobody says which.

    Raises:
        InvalidInput: If the name is malformed.
    """
    from polythrottle.backends.nvml import NamedGpus

    try:
        return NamedGpus.of(name)
    except InvalidInput:
        if name:
            raise
    except PolythrottleError:
        pass
    return None


def unchanged_gpus(device: str, named: Sequence[str | None]) -> bool:
    """Return whether a URI means GPUs that are there, of which nothing stands on record by the given names."""
    body = device.partition("?")[0]
    if body.partition(":")[0] != "nvml" or any(each in named for each in _standing_gpus()):
        return False
    gpus = named_gpus(body.partition(":")[2])
    return gpus is not None and not gpus.silent and bool(gpus.uuids) and gpus.answering.issuperset(gpus.uuids)


def uuids_of(name: str) -> Sequence[str]:
    """Return the UUIDs of the GPUs a name means, as the driver counts now; the name itself where it does not say."""
    from polythrottle.backends.nvml import uuids

    try:
        return uuids(name)
    except PolythrottleError:
        return (name or "0").split(",")


def trust_roots(device: str) -> None:
    """Let a planted board be restored that the user has named, by its URI or its name on record."""
    for root in _planted(device):
        trust(Path(root))


def check_roots(device: str, named: Sequence[str | None]) -> None:
    """Refuse a planted board that is not there, unless something stands on record for it, by one of the given names."""
    gone = [root for root in _planted(device) if not Path(root).is_dir()]
    if gone and not any(each in named for each in restoring.concerned()):
        raise InvalidInput(f"there is no folder {gone[0]!r} to look for a board in")


def _planted(device: str) -> Sequence[str]:
    """Return the folders of a planted board that its URI or its name on record says."""
    named = device.partition(" ")[2]
    roots = tuple(roots_of(device.partition("?")[2]))
    if named.startswith("/"):  # the name on record of a planted board: its kind, and the root of its tree
        return (named, *roots)
    return roots


def roots_of(query: str) -> list[str]:
    """Return the folders of planted boards that a URI's options name."""
    return [part[5:] for part in query.split("&") if part.startswith("root=")]


def confirmed(names: Sequence[str | None]) -> tuple[Standing, ...]:
    """Confirm what stands under each name, or of a group nothing: what was confirmed is put back if one cannot be."""
    stands: tuple[Standing, ...] = ()
    try:
        for name in names:
            stands = restoring.confirm(name)
    except PolythrottleError:
        if len(names) > 1:
            all_restored(names, force=False)
        raise
    return stands


def all_restored(names: Sequence[str | None], *, force: bool) -> tuple[Outcome, ...]:
    """Put back what stands under each name, past the errors of others; None is everything.

    Raises:
        PolythrottleError: If one of them could not be put back, after the others; says why, and what they left.
    """
    outcomes: list[Outcome] = []
    errors: list[PolythrottleError] = []
    for name in dict.fromkeys(names):
        try:
            outcomes += restoring.restore_all(device=name, force=force)
        except UnknownName:
            if len(names) == 1:
                raise  # of a group, the guard of this GPU was faster
        except PolythrottleError as err:
            errors.append(err)
    restoring.raise_all(errors, outcomes)
    return tuple(outcomes)


_SCHEMES = ("jetson", "nvml", "cpu", "sim")
_WHERE_KNOWN = ("cause", "cuts", "cut_s", "overrun")
"""What a reading tells only where the device knows it."""


def served_uri(text: str) -> str:
    """Return the URI under which a device is served.

    Of a processor without counters everybody's time counts: the actuator itself serves no model.

    Raises:
        InvalidInput: If a device of that kind cannot be served.
        UnknownName: If there is no such kind.
    """
    uri = DeviceURI.parse(text)
    if uri.scheme not in _SCHEMES:
        raise InvalidInput(f"{text} cannot be served: an actuator serves {', '.join(_SCHEMES)}")
    if uri.meter:
        raise InvalidInput(f"{text} cannot be served with a meter; who measures names it: actuator:?meter={uri.meter}")
    if uri.scheme != "cpu" or "busy" in uri.options or "watts_per_core" in uri.options:
        return text
    return f"{text}{'&' if uri.options else '?'}busy=everyone"


def given_uri(uri: str) -> str:
    """Return the URI that an administrator gave for a device that is served."""
    head, found, rest = uri.partition("busy=everyone")
    if rest or not found:
        return uri
    return head.rstrip("?&")


def check_form(uri: str) -> None:
    """Refuse a URI that can never be a device's; whether the device is there is another question.

    Raises:
        InvalidInput: If it is malformed.
        UnknownName: If there is no such simulated board or option.
        BadFile: If a file it names is not what it should be.
    """
    parts = DeviceURI.parse(uri)
    if parts.scheme == "nvml":  # without asking a driver which may take a second, or see other GPUs than the actuator's
        from polythrottle.backends.nvml import check_name

        check_name(parts.name)
    else:
        why_missing(uri)


def open_served(uri: str) -> Device:
    """Return a device with every knob that works on it to be set; nothing is written.

    Raises:
        PolythrottleError: As `open_device` does.
    """
    device = open_device(uri)
    if DeviceURI.parse(uri).scheme != "cpu":
        return device
    names = [offer.knob.name for offer in offers_of(device)]  # a processor sets only what it was opened with
    if names:
        return open_device(uri, names)
    return device


def why_missing(uri: str) -> str:
    """Return why a device is not there yet, such as for want of its driver; empty if it is there.

    Raises:
        InvalidInput: If there can never be one: the URI is malformed, or names a folder that is none.
        UnknownName: Likewise, of a simulated board, an option, or a GPU beside those that the driver knows.
        BadFile: Likewise, where a file it names is not what it should be.
    """
    try:
        open_served(uri)
    except (InvalidInput, UnknownName, BadFile):
        raise
    except PolythrottleError as error:
        return str(error)
    return ""


def part_uri(name: str, whole: str) -> str:
    """Return the URI of some of a group's GPUs, by which they are known wherever their numbers go.

    Those that answer are served where others of the group do not, and these again once they do.

    Args:
        name: The URI that was asked for.
        whole: That of the group.

    Returns:
        "" if the group is none, or some of the GPUs are not in it.

    Raises:
        InvalidInput: If a GPU is named twice.
        DeviceError: If there is no driver, or one of the GPUs is split by MIG or does not answer.
    """
    try:
        part = DeviceURI.parse(name)
        group = DeviceURI.parse(whole)
    except PolythrottleError:
        return ""
    if part.scheme != "nvml" or part.options or part.meter or not group.several:
        return ""
    from polythrottle.backends.nvml import part as part_of

    found = part_of(part.name, group.name)
    return f"nvml:{','.join(found)}" if found else ""


def usable_part(uri: str) -> str:
    """Return the URI of those GPUs of a group that can be served though the group as a whole cannot; "" if none can."""
    try:
        group = DeviceURI.parse(uri)
        if group.scheme != "nvml" or not group.several:
            return ""
        from polythrottle.backends.nvml import usable

        numbers = usable(group.name)
    except PolythrottleError:
        return ""
    return f"nvml:{numbers}" if numbers else ""


def offers_of(device: Device) -> tuple[Offer, ...]:
    """Return every knob that works on a device."""
    if isinstance(device, Offering):
        return device.offers()
    return ()


def description_of(device: Device) -> dict[str, Any]:
    """Return what a device is and has, ready for JSON; its knobs with every level."""
    findings = findings_of(device)
    return {
        "uri": device.uri,
        "title": device.title,
        "identity": dict(identity_of(device)),
        "energy_kind": str(device.energy_kind),
        "boundary": device.boundary,
        **({"sensor": asdict(device.averaging)} if isinstance(device, Averaging) else {}),
        "presets": {name: dict(point) for name, point in device.presets.items()},
        "findings": [asdict(each) for each in findings],
        "knobs": [_knob_line(offer) for offer in offers_of(device)],
    }


def _knob_line(offer: Offer) -> dict[str, Any]:
    knob = offer.knob
    return {
        "name": knob.name,
        "levels": list(knob.levels),
        "label": knob.label,
        "default": offer.default,
        "searched": offer.searched,
    }


class ContinuousReadings:
    """Readings of one device after another, as of one: their energy never falls, a virtual clock follows the real one.

    What is drawn while no device is open is not known and not in the total.
    """

    def __init__(self) -> None:
        self._clock = SystemClock()
        self._total_j = 0.0
        self._last_j: float | None = None
        self._seen_s: float | None = None
        self._anew = 0

    def begin(self) -> None:
        """Go on with another device."""
        self._last_j = self._seen_s = None

    def advance(self, device: Device) -> None:
        """Let the time of a simulated device pass as it has passed here since the last call."""
        if not isinstance(device.clock, VirtualClock):
            return
        now_s = self._clock.now()
        device.clock.sleep(0.0 if self._seen_s is None else now_s - self._seen_s)
        self._seen_s = now_s

    def read(self, device: Device) -> dict[str, Any]:
        """Return a reading, ready for JSON.

        Raises:
            DeviceError: If the device cannot be read.
            TrialError: If its joules are not known.
        """
        self.advance(device)
        reading = device.read()
        self._add(reading.energy_j)
        virtual = isinstance(device.clock, VirtualClock)
        return {
            "time_s": self._clock.now() if virtual else reading.time_s,
            "energy_j": self._total_j,
            "temperature_c": reading.temperature_c,
            "clocks_hz": dict(reading.clocks_hz),
            "throttled": reading.throttled,
            **{name: told for name in _WHERE_KNOWN if (told := getattr(reading, name)) not in ("", None)},
            "anew": self._anew,
        }

    def _add(self, energy_j: float) -> None:
        if self._last_j is not None:
            # A counter that fell has begun anew: what was drawn around that moment is not known.
            self._total_j += max(0.0, energy_j - self._last_j)
            self._anew += energy_j < self._last_j
        self._last_j = energy_j

    def end(self, device: Device) -> None:
        """Take the last joules of a device that is about to be closed."""
        with suppress(PolythrottleError):
            self.read(device)
        self.begin()


@contextmanager
def background_sampling(device: Device) -> Iterator[None]:
    """Look at a device in the background, without becoming its writer."""
    with ExitStack() as stack:
        if isinstance(device, Sampled):
            stack.enter_context(device.sampling())
        yield
