"""A profile the daemon can follow: read, checked against the board and the files at hand.

Made a plan for the controller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from polythrottle.catalog.documents import locate
from polythrottle.catalog.tuned_profiles import find_profile, read_profile
from polythrottle.daemon.control.events import Bounds, ControlPlan, Target
from polythrottle.domain.backports import paired
from polythrottle.domain.errors import BadFile, InvalidInput, UnknownName
from polythrottle.domain.ladder import FULL, Ladder, PointPerformance, Rung
from polythrottle.domain.load.prompt_boost import TokenLimits
from polythrottle.domain.measurement import Measurement
from polythrottle.domain.metrics import PromptClass, split_metric
from polythrottle.domain.problem import Constraint
from polythrottle.domain.profile import Profile
from polythrottle.domain.space import BATCH_SIZE, OperatingPoint
from polythrottle.storage.identity import disagreement, identity_by_name, without_options
from polythrottle.storage.untrusted import read_blocks
from polythrottle.tuning.apply import split_point

# Whether the files that a profile was tuned with are still those that are here.

_MOST_BYTES = 256 * 2**20
"""Of a file that is compared: who applies a profile waits for it."""
_MODELS = (".onnx", ".pt2", ".pt", ".engine", ".plan")


def changed(profile: Profile) -> str:
    """Return in words what a profile was tuned with and is something else now; empty if nothing is known to be.

    Only what the profile has a digest of is compared, where it names a file that can be read here, of at most 256 MiB:
    a model's file, and for a simulated board its description and that of its workload.
    """
    tuned = dict(part.split("=", 1) for part in str(profile.provenance.get("content", "")).split() if "=" in part)
    for name, path in _files(profile).items():
        now = _digest(path)
        if now is not None and name in tuned and tuned[name] != now:
            return (
                f"this profile was tuned with another {name}: {path} has changed since ({tuned[name]}, now {now}); "
                "tune again, with tune --as-prior it begins there"
            )
    return ""


def _files(profile: Profile) -> Mapping[str, Path]:
    """Return the files whose digests `polythrottle.tuning.setup` notes, by the names it gives them."""
    scheme, _, board = without_options(profile.device).partition(":")
    if scheme == "sim":
        try:
            found = locate("devices", "device", board), locate("profiles/workloads", "workload", profile.workload)
        except UnknownName:
            return {}
        return dict(paired(("board", "model"), found))
    name = profile.workload.partition("?")[0]
    if name.lower().endswith(_MODELS):
        return {"model": Path(name)}
    return {}


def _digest(path: Path) -> str | None:
    """Return the beginning of a file's SHA-256; None if it cannot be read, or is too large."""
    import hashlib

    found = hashlib.sha256()
    try:
        for block in read_blocks(path, _MOST_BYTES):
            found.update(block)
    except BadFile:
        return None
    return found.hexdigest()[:16]


# From a tuned profile to what the controller follows: a ladder, a safe and a cool point, and bounds.

_AMPLE = 10.0
"""Times its tail that a workload without a limit on its p99 may take, for want of another measure of too long."""
_ROOM = 0.7
"""The share of its capacity that a lone point is planned for: it was measured back to back, and requests that come
when they like queue, at full load without end (Kleinrock, Queueing Systems, volume 1, 1975)."""
UNTOUCHED = Target(OperatingPoint({}))
"""Every knob of device and workload as it is when nobody tunes it."""


def plan_of(profile: Profile, asked: Bounds | None = None, slo: Sequence[str] = ()) -> ControlPlan:
    """Return what the controller follows for a profile.

    The safe point is the device's default if that was measured to hold the SLO and to answer what the top rung can,
    else the top rung; the cool point is the coolest rung. A profile without a ladder has no rung to compare with or to
    go to, so that its default need only hold the SLO.

    Args:
        profile: With a ladder or without.
        asked: What the guards hold; what it leaves open is taken from the profile's SLO.
        slo: Constraints that go before the profile's, for what the guards do not hold.
    """
    ladder = profile.ladder or single(profile)
    top = ladder.rungs[ladder.top]
    cool = ladder.rungs[ladder.coolest]
    if profile.ladder is None:
        needed_per_s = 0.0
    else:
        needed_per_s = top.rate_per_s
    if _holds(profile.default, profile.slo, needed_per_s):
        safe = UNTOUCHED
    else:
        safe = target_of(top)
    bounds = bounds_of(profile.slo, asked)
    return ControlPlan(ladder, safe, target_of(cool), bounds, token_limits(slo or profile.slo, bounds))


def target_of(rung: Rung) -> Target:
    """Return what is to hold on a rung."""
    return Target(rung.service.point, rung.gather_s)


def single(profile: Profile) -> Ladder:
    """Return the ladder of a profile's one point, for all loads.

    It is for at most 70 % of what it answered back to back, to leave room for the queue; its p99 is the one measured,
    to which waiting adds. Without its idle power, nothing says that it draws less at partial load, so that nothing less
    is predicted.
    """
    point = profile.point
    seen = profile.measurement
    batch = int(point.get(BATCH_SIZE, 1))
    power_w = seen.energy_j * seen.throughput_per_s
    if seen.idle_power_w is None:
        idle_w = power_w
    else:
        # Measured at another time than the load, noise may put it above: no rung may draw less the more comes.
        idle_w = min(power_w, seen.idle_power_w)
    tail_s = seen.latency.p99_s or seen.latency.mean_s
    service = PointPerformance(
        point, batch, batch / seen.throughput_per_s, seen.latency.mean_s, tail_s, seen.energy_j * batch, idle_w
    )
    rate_per_s = _ROOM * service.most_per_s
    drawn_w = idle_w + _ROOM * (power_w - idle_w)
    return Ladder(p99_limit_s(profile.slo) or _AMPLE * tail_s, (Rung(rate_per_s, service, 0.0, drawn_w, tail_s),))


def bounds_of(slo: Sequence[str], asked: Bounds | None = None) -> Bounds:
    """Return what the guards hold: what was asked, and beside it what an SLO bounds.

    Whether limits for some lengths of prompts hold is told by the proxy alone, and by no server's metrics.

    Args:
        slo: Constraints with absolute limits, as texts.
        asked: Limits that go before those.
    """
    constraints = [each for each in map(Constraint.parse, slo) if not each.relative]
    limits = {each.metric: each.limit for each in constraints}
    asked = asked or Bounds()
    return replace(
        asked,
        p99_s=_first(asked.p99_s, limits.get("p99")),
        power_w=_first(asked.power_w, limits.get("power")),
        temperature_c=_first(asked.temperature_c, limits.get("temperature")),
        ttft_s=_first(asked.ttft_s, limits.get("ttft_p99")),
        tpot_s=_first(asked.tpot_s, limits.get("tpot_p99")),
        ttft_of=asked.ttft_of or tuple(_first_token_limits(constraints)),
    )


def _first(asked: float | None, told: float | None) -> float | None:
    """Return what was asked, or else what the SLO says."""
    if asked is None:
        return told
    return asked


def token_limits(slo: Sequence[str], bounds: Bounds) -> TokenLimits:
    """Return how long users may wait for tokens: what the guards hold, and limits for some lengths of prompts.

    Args:
        slo: Constraints with absolute limits, as texts.
        bounds: What the guards hold.
    """
    first = []
    if bounds.ttft_s is not None:
        first.append((PromptClass(), bounds.ttft_s))
    first += _first_token_limits([each for each in map(Constraint.parse, slo) if not each.relative])
    return TokenLimits(tuple(first), bounds.tpot_s)


def _first_token_limits(slo: Sequence[Constraint]) -> Iterator[tuple[PromptClass, float]]:
    """Yield the limits on first tokens that are for prompts of some lengths."""
    for each in slo:
        if each.prompts is not None and split_metric(each.metric)[0] == "ttft_p99":
            yield each.prompts, each.limit


def check_absolute(slo: Sequence[str]) -> None:
    """Refuse a multiple among limits that go before a profile's: the daemon knows no figure that it is a multiple of.

    Args:
        slo: Constraints, as texts.

    Raises:
        InvalidInput: If there is one; says what would do.
    """
    for text in slo:
        limit = Constraint.parse(text)
        if limit.relative:
            how = "in time, such as 50ms" if limit.timed else f"in {limit.unit}"
            raise InvalidInput(f"{text}: beside a profile a limit is absolute; say it {how}")


def p99_limit_s(slo: Sequence[str]) -> float | None:
    """Return the tightest limit on the p99 in an SLO; None if there is none."""
    limits_s = [each.limit for each in map(Constraint.parse, slo) if each.metric == "p99" and not each.relative]
    return min(limits_s, default=None)


def device_part(profile: Profile, point: OperatingPoint) -> OperatingPoint:
    """Return the device's part of a point that belongs to a profile, such as one of its ladder."""
    return split_point(replace(profile, point=point))[0]


def _holds(default: Measurement | None, slo: Sequence[str], rate_per_s: float) -> bool:
    """Return whether the default was measured to hold an SLO, and to answer as many requests as are to come."""
    if default is None or FULL * default.throughput_per_s < rate_per_s:
        return False
    limits = [Constraint.parse(text) for text in slo]
    # Asked first, for the slack of what was not measured is an error; what is not known is not held.
    known = all(default.metric(limit.metric) is not None for limit in limits)
    return known and all(not limit.relative and limit.slack(default) >= 0 for limit in limits)


# A profile the daemon can follow: read, checked against the board at hand, and made a plan.


@dataclass(frozen=True)
class FollowedProfile:
    """What is followed.

    Args:
        name: The profile's file, as people know it; empty if there is none yet.
        plan: For the controller.
        workload: URI of what is served.
        slo: Constraints, as texts.
        profile: None if the workload was never tuned.
    """

    name: str
    plan: ControlPlan
    workload: str
    slo: tuple[str, ...] = ()
    profile: Profile | None = None

    def device_point(self, point: OperatingPoint) -> OperatingPoint:
        """Return the part of a point that is the board's to set."""
        if self.profile is None:
            return point
        return device_part(self.profile, point)


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


def read_tuned(name: str, identity: Mapping[str, str], guards: Bounds, slo: tuple[str, ...] = ()) -> FollowedProfile:
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


def tuned_of(
    file: ProfileFile, identity: Mapping[str, str], guards: Bounds, slo: tuple[str, ...] = ()
) -> FollowedProfile:
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
    plan = plan_of(profile, bounds_of(slo, guards), slo)
    return FollowedProfile(str(file.path), plan, profile.workload, slo or profile.slo, profile)


@dataclass(frozen=True)
class ProfileRules:
    """What a profile has to fit before it is followed.

    Args:
        identity: Returns what the board at hand is; empty if it does not say. Asked each time, for behind the same
            socket there may be another board after the actuator was started again.
        guards: Limits that go before those of profiles; ``slo`` constraints likewise.
    """

    identity: Callable[[], Mapping[str, str]] = dict
    guards: Bounds = field(default_factory=Bounds)
    slo: tuple[str, ...] = ()

    def read(self, name: str) -> FollowedProfile:
        """Return what a profile says is to be followed, as `read_tuned` does; may take seconds."""
        return read_tuned(name, self.identity(), self.guards, self.slo)

    def fit(self, file: ProfileFile) -> FollowedProfile:
        """Return what a profile that has been read says is to be followed, as `tuned_of` does."""
        return tuned_of(file, self.identity(), self.guards, self.slo)


def untuned(workload: str, guards: Bounds, slo: tuple[str, ...], name: str = "") -> FollowedProfile:
    """Return what is known of a workload that was never tuned: it stays at the device's default.

    Args:
        workload: URI of what is served.
        guards: Limits that go before the SLO's.
        slo: Constraints, as texts.
        name: Of a profile that is not followed, though it was asked for.
    """
    return FollowedProfile(name, ControlPlan(None, UNTOUCHED, UNTOUCHED, bounds_of(slo, guards)), workload, slo)


def check_kind(profile: Profile, identity: Mapping[str, str]) -> None:
    """Refuse a profile that is for other hardware or firmware.

    Raises:
        BadFile: If it is; names both.
    """
    # A profile that notes no hardware, as one of a simulated board, is known by its device's name.
    tuned = profile.identity or identity_by_name(profile.device)
    if identity and (other := disagreement(tuned, identity)) is not None:
        raise BadFile(f"this profile was tuned on {other}; tune again, with tune --as-prior it begins there")
