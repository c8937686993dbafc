"""A profile the daemon can follow: read, checked against the board at hand, and made a plan."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from polythrottle.catalog.profiles import find_profile, read_profile
from polythrottle.daemon.contents import changed
from polythrottle.daemon.guards import Bounds
from polythrottle.daemon.planning import UNTOUCHED, bounds_of, device_part, plan_of
from polythrottle.daemon.signals import Plan
from polythrottle.errors import BadFile
from polythrottle.identity import disagreement
from polythrottle.profile import Profile
from polythrottle.space import OperatingPoint


@dataclass(frozen=True)
class Tuned:
    """What is followed.

    Args:
        name: The profile's file, as people know it; empty if there is none yet.
        plan: For the controller.
        workload: URI of what is served.
        slo: Constraints, as texts.
        profile: None if the workload was never tuned.
    """

    name: str
    plan: Plan
    workload: str
    slo: tuple[str, ...] = ()
    profile: Profile | None = None

    def device_point(self, point: OperatingPoint) -> OperatingPoint:
        """Return the part of a point that is the board's to set."""
        return point if self.profile is None else device_part(self.profile, point)


@dataclass(frozen=True)
class ProfileFile:
    """A profile as it was read, for whatever board.

    Args:
        path: Its file.
        profile: What is in it.
        changed: What it was tuned with and is something else now, in words; empty if nothing is known to be.
    """

    path: Path
    profile: Profile
    changed: str = ""


def read_profile_file(name: str) -> ProfileFile:
    """Return a profile by its path or name; may take seconds, for what it was tuned with is compared.

    Raises:
        UnknownName: If there is none.
        BadFile: If it is no profile.
    """
    path = find_profile(name)
    profile = read_profile(path)
    return ProfileFile(path, profile, changed(profile))


def read_tuned(name: str, identity: Mapping[str, str], guards: Bounds, slo: tuple[str, ...] = ()) -> Tuned:
    """Return what a profile says is to be followed; may take seconds.

    Args:
        name: Path, or ``<device>/<workload>``.
        identity: Of the board at hand; empty if it does not say.
        guards: Limits that go before the SLO's.
        slo: Constraints that go before the profile's.

    Raises:
        UnknownName: If there is none.
        BadFile: If it is no profile, for other hardware or firmware, or for another model.
    """
    return tuned_of(read_profile_file(name), identity, guards, slo)


def tuned_of(file: ProfileFile, identity: Mapping[str, str], guards: Bounds, slo: tuple[str, ...] = ()) -> Tuned:
    """Return what a profile that has been read says is to be followed.

    Args:
        file: The profile.
        identity: As `read_tuned`.
        guards: As `read_tuned`.
        slo: As `read_tuned`.

    Raises:
        BadFile: If it is for other hardware or firmware, or for another model.
    """
    profile = file.profile
    check_kind(profile, identity)
    if file.changed:
        raise BadFile(file.changed)
    plan = plan_of(profile, bounds_of(slo, guards))
    return Tuned(str(file.path), plan, profile.workload, slo or profile.slo, profile)


def untuned(workload: str, guards: Bounds, slo: tuple[str, ...], name: str = "") -> Tuned:
    """Return what is known of a workload that was never tuned: it stays at the device's default.

    Args:
        workload: URI of what is served.
        guards: Limits that go before the SLO's.
        slo: Constraints, as texts.
        name: Of a profile that is not followed, though it was asked for.
    """
    return Tuned(name, Plan(None, UNTOUCHED, UNTOUCHED, bounds_of(slo, guards)), workload, slo)


def check_kind(profile: Profile, identity: Mapping[str, str]) -> None:
    """Refuse a profile that is for other hardware or firmware.

    Raises:
        BadFile: If it is; names both.
    """
    tuned = profile.identity or {"board": _body(profile.device)}
    if identity and (other := disagreement(tuned, identity)) is not None:
        raise BadFile(f"this profile was tuned on {other}; tune again, with tune --as-prior it begins there")


def _body(uri: str) -> str:
    return uri.partition("?")[0]
