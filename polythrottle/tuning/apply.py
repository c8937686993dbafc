"""Apply a tuned profile by hand: check that it is for this device, set the device's knobs, leave them in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polythrottle.backends import open_device
from polythrottle.backends.meters import meter_apart
from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import BadFile, DeviceError, InvalidInput, KnobRejected, UnknownName
from polythrottle.domain.ports import Device, Inspectable, Lasting, Recorded, findings_of
from polythrottle.domain.profile import Profile
from polythrottle.domain.space import BATCH_SIZE, Level, OperatingPoint
from polythrottle.domain.units import show_level, show_name, show_number, span_s
from polythrottle.storage.identity import disagreement, identity_by_name, identity_of

CONFIRM_WITHIN_S = 60.0
_MEMORY = "persistence mode"  # what backends/nvml calls the finding
_WORKLOAD_KNOBS = (BATCH_SIZE, "threads")  # of profiles that do not say which are the workload's


class LeftInPlace(KeyboardInterrupt):
    """A Ctrl-C after which settings may stand that were being left in place.

    Args:
        uri: Of the device.
    """

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.uri = uri


@dataclass(frozen=True)
class Stay:
    """How long settings stand.

    Args:
        within_s: When they revert unless they are confirmed; None if they need no confirmation.
        then_s: How long they stand then; None is until a restore or a reboot.

    Raises:
        InvalidInput: If a time is not positive.
    """

    within_s: float | None = CONFIRM_WITHIN_S
    then_s: float | None = None

    def __post_init__(self) -> None:
        for seconds in (self.within_s, self.then_s):
            if seconds is not None and not 0 < seconds < float("inf"):
                raise InvalidInput(f"settings stand for a time above zero, not {seconds:g} s")

    @property
    def first_s(self) -> float | None:
        """When they revert if nobody does anything; None is at a restore or a reboot."""
        if self.within_s is None:
            return self.then_s
        return self.within_s


def stay_of(confirm_within_s: float | None, lasting: str | None, keep: bool) -> Stay:
    """Return how long settings stand, from what was said of it.

    Args:
        confirm_within_s: Seconds after which they revert unless confirmed.
        lasting: How long they stand then.
        keep: Whether they stand without confirmation.

    Raises:
        InvalidInput: If that makes no sense.
    """
    if keep and lasting is not None:
        raise InvalidInput("--for (lasting) and --keep exclude each other; leave one out")
    if keep and confirm_within_s is not None:
        raise InvalidInput(
            "--keep needs no confirmation, and --confirm-within (confirm_within_s) asks for one; leave one out"
        )
    sure = keep or lasting is not None
    within_s = confirm_within_s
    if within_s is None and not sure:
        within_s = CONFIRM_WITHIN_S
    if lasting is None:
        return Stay(within_s, None)
    return Stay(within_s, span_s(lasting))


@dataclass(frozen=True)
class Applied:
    """What applying a profile came to.

    Args:
        device: URI of the device.
        title: The name people know it by.
        point: The device's knobs, as set.
        served: The knobs that belong to the workload and are to be set where it is served.
        simulated: Whether there is no hardware behind it, so that nothing was kept.
        stands_as: The name under which the device stands on record; None if nothing was left changed.
        stay: How long it stands.
        remark: What may end it before; empty if nothing known does.
    """

    device: str
    title: str
    point: OperatingPoint
    served: OperatingPoint
    simulated: bool
    stands_as: str | None
    stay: Stay
    remark: str = ""


def apply_profile(profile: Profile, stay: Stay, device: str | None = None) -> Applied:
    """Set a profile's device knobs and leave them in place as long as was asked.

    Args:
        profile: Of this hardware and firmware.
        stay: How long.
        device: URI of the device; the one it was tuned on if None.

    Raises:
        BadFile: If the profile is for other hardware or firmware, or for levels the device does not have.
        InvalidInput: If the device is a recorded table.
        DeviceError: If the device cannot be steered, is held by another, or cannot be left changed.
        LeftInPlace: If it is interrupted once the settings may stand; before that they are restored.
    """
    own, served = split_point(profile)
    if device is None:
        device = profile.device
    # Nothing is measured, so that a meter, which may be a program, need not be opened.
    uri = meter_apart(device)[0]
    try:
        # A profile of the workload's knobs alone still has to be for this device.
        board = open_device(uri, tuple(own) or None)
    except UnknownName:
        # Another board has other knobs: that it is another one says more than which of them it lacks.
        check_same_kind(profile, open_device(uri))
        raise
    check_same_kind(profile, board)
    point = own
    name = None
    remark = ""
    if own:
        point = board.space.default.moved(_checked(board, own))
        name, remark = _left(board, point, stay, f"profile {profile.workload}")
    return Applied(board.uri, board.title, point, served, not isinstance(board, Lasting), name, stay, remark)


def split_point(profile: Profile) -> tuple[OperatingPoint, OperatingPoint]:
    """Return the device's part of a profile's point, and the workload's.

    Args:
        profile: Tells which knobs are the workload's, if it was noted.
    """
    if profile.workload_knobs is None:
        theirs = set(_WORKLOAD_KNOBS)
    else:
        theirs = set(profile.workload_knobs)
    return profile.point.only(set(profile.point) - theirs), profile.point.only(theirs)


def check_same_kind(profile: Profile, board: Device) -> None:
    """Refuse a profile that is for other hardware or firmware.

    Raises:
        BadFile: If it is; names both.
        InvalidInput: If the device is a recorded table.
    """
    if isinstance(board, Recorded):
        raise InvalidInput(f"{board.uri} is a recorded table; there is nothing to apply a profile to")
    tuned = profile.identity
    # A simulated board has no hardware to be known by: its URI is its identity.
    if not tuned and not isinstance(board, Inspectable):
        tuned = identity_by_name(profile.device)
    other = disagreement(tuned, identity_of(board))
    if other is not None:
        offer = "tune again, with tune --as-prior it begins there"
        raise BadFile(f"this profile was tuned on {other}; {offer}")


def _checked(board: Device, levels: Mapping[str, Level]) -> Mapping[str, Level]:
    """Return the levels if the device has them."""
    for name, level in levels.items():
        if name not in board.space.names:
            raise BadFile(f"{show_name(name)} cannot be set on {board.title} now{_why(board, name)}")
        known = board.space.knob(name).levels
        if level not in known:
            near = ", ".join(show_level(name, each) for each in _nearest(known, level))
            raise BadFile(f"{board.title} has no {show_name(name)}={show_number(name, level)} now; the nearest: {near}")
    if board.space.default.moved(levels) not in board.space:
        raise BadFile(f"{board.title} does not take the profile's levels together now; tune again")
    return levels


def _why(board: Device, name: str) -> str:
    findings = findings_of(board)
    return next((f": {each.explanation}" for each in findings if each.subject == name), "")


def _remark(board: Device) -> str:
    """Return why the driver may forget what was set, as one without persistence mode does; empty if it does not."""
    findings = findings_of(board)
    forgetful = [each for each in findings if each.subject == _MEMORY and each.works is False]
    return "; ".join(f"{each.subject} is {each.explanation} ({each.remedy})" for each in forgetful)


def _nearest(known: Sequence[Level], level: Level) -> Sequence[Level]:
    if isinstance(level, str) or isinstance(known[0], str):
        return known[:3]
    return sorted(known, key=lambda each: abs(float(each) - float(level)))[:3]


def _left(board: Device, point: OperatingPoint, stay: Stay, holder: str) -> tuple[str | None, str]:
    """Set a point and leave it in place, or say that this is not possible; on a simulation nothing is kept.

    Returns the name under which it stands, and what may end it before.
    """
    if not isinstance(board, Lasting):
        if not isinstance(board.clock, VirtualClock):
            raise DeviceError(f"{board.title} cannot be left changed: nothing would restore it")
        with board:
            board.apply(point)
        return None, ""
    leaving = False
    try:
        with board:
            try:
                board.apply(point)
            except KnobRejected as err:
                raise DeviceError(f"the profile was not applied, and what was set is restored: {err}") from err
            # From here on, whoever leaves the device need not restore it: over SSH the board may do what is asked
            # though nobody waits for its answer any more.
            leaving = True
            name = board.hand_over(holder, stay.first_s, stay.then_s)
        return name, _remark(board)
    except KeyboardInterrupt as err:
        if leaving:
            raise LeftInPlace(board.uri) from err
        raise
