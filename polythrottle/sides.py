"""The sides of a comparison: profiles, presets and the default as points of one device, measured in turns or again."""

import contextlib
import math
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import geometric_mean
from typing import Any

from polythrottle.applying import check_same_kind, parted
from polythrottle.arrivals import CLOSED
from polythrottle.catalog.profiles import find_profile, read_profile
from polythrottle.comparing.pairs import MOST_PAIRS, Comparison, compare
from polythrottle.comparing.sequential import interval
from polythrottle.errors import BadFile, InvalidInput, PolythrottleError, TrialError, UnknownName
from polythrottle.measurement import UNTOLD, Interval, Measurement
from polythrottle.meter import measure
from polythrottle.ports import Device, Recorded, Rewindable, Workload
from polythrottle.problem import Constraint
from polythrottle.profile import Profile
from polythrottle.setup import Setup
from polythrottle.space import OperatingPoint
from polythrottle.workloads.knobs import BATCH_SIZE, THREADS, processors

DEFAULT = "default"
LEAST_WINDOWS = 4
_WORDS = {BATCH_SIZE: "--batch", THREADS: "--threads"}
_PERCENTILE = re.compile(r"(.*_)?p\d+")


@dataclass(frozen=True)
class Checked:
    """What measuring a profile's point again has shown.

    Args:
        energy: Energy per item now ÷ then, a 95 % interval.
        limits: For each of the profile's limits, the quantity now ÷ the limit.
        windows: How many windows were measured.
        most: The share by which energy may have grown.
        measured: The windows.
        device: URI of what they were measured on.
        workload: URI of what was served.
        arrivals: When requests were meant to be sent.
        tuned_at: When they were while the profile was tuned; None if it does not say, as older ones do not.
        short: Limits on percentiles that these windows are too short to show, and the quantity now ÷ the limit as far
            as they do: it has no upper end, for the tail is what few queries miss.
        recorded: Whether they were looked up in a table, which answers the same every time.
        middle: Energy per item now ÷ then, the geometric mean of the windows.
        over: For limits that some windows speak against though not enough to prove them broken, how many do.
        sure: Whether the profile says how well its energy is known; if not, nothing is proven of energy.
    """

    energy: Interval
    limits: dict[str, Interval]
    windows: int
    most: float
    measured: tuple[Measurement, ...] = ()
    device: str = ""
    workload: str = ""
    arrivals: str = str(CLOSED)
    tuned_at: str | None = None
    short: Mapping[str, Interval] = field(default_factory=dict, hash=False)
    recorded: bool = False
    middle: float = math.nan
    over: Mapping[str, int] = field(default_factory=dict, hash=False)
    sure: bool = True

    @property
    def regressed(self) -> bool:
        """Whether it is proven that energy has grown by more than allowed."""
        return self.energy.low > 1.0 + self.most

    @property
    def broken(self) -> tuple[str, ...]:
        """The limits that are proven not to hold any more, and the rate if it is not kept up with."""
        rate = () if self._keeps_up else (f"the rate of {self.arrivals}",)
        return (*(name for name, ratio in self.limits.items() if ratio.low > 1.0), *rate)

    @property
    def sound(self) -> bool:
        """Whether it is proven that energy has not grown by more than allowed, and that every limit holds."""
        return self._keeps_up and self._within and all(ratio.high <= 1.0 for ratio in self.limits.values())

    @property
    def _within(self) -> bool:
        return self.energy.high <= 1.0 + self.most

    @property
    def _keeps_up(self) -> bool:
        """Whether most windows served what came: a single one may be mistaken, as it may in a comparison."""
        behind = sum(not look.keeps_up for look in self.measured)
        return behind == 0 or 2 * behind < len(self.measured)

    @property
    def settled(self) -> bool:
        """Whether more windows would change nothing."""
        seen = {**self.limits, **self.short}
        clear = (self._within or not self.sure) and all(ratio.high <= 1.0 for ratio in seen.values())
        return self.windows >= LEAST_WINDOWS and (clear or self.regressed or bool(self.broken))


def compare_sides(names: Sequence[str], setup: Setup, most_pairs: int = MOST_PAIRS) -> Generator[Comparison]:
    """Measure two sides in turns; yields the comparison after each pair.

    Args:
        names: Two of: a profile's file or name, ``default``, a preset of the device.
        setup: Device and workload; where it names none, those of the first profile.
        most_pairs: After how many pairs to give up.

    Raises:
        InvalidInput: If there are not two sides, or they were tuned for different workloads.
        UnknownName: If a name is none of these.
        BadFile: If a profile is for other hardware, or for levels that are not there.
        PolythrottleError: As `polythrottle.measure`.
    """
    if len(names) != 2:
        raise InvalidInput("a comparison has two sides, such as: polythrottle measure default profile.toml")
    with _opened(names, setup) as (device, workload, points, words):
        yield from compare(
            device, workload, points, words.window(device), arrivals=words.traffic, most_pairs=most_pairs
        )


def check_profile(name: str, setup: Setup, most: float, most_windows: int = MOST_PAIRS) -> Generator[Checked]:
    """Measure a profile's point again until it is known whether it still keeps its word; yields after each window.

    Args:
        name: A profile's file or name.
        setup: Device and workload; where it names none, the profile's.
        most: The share by which energy per item may have grown, such as 0.03.
        most_windows: After how many windows to give up.

    Raises:
        InvalidInput: If the share is not a sensible one, or the profile was not tuned at the arrivals given.
        BadFile: If its limits are none, or its joules are not those measured here.
        PolythrottleError: As `compare_sides`.
    """
    if not 0 <= most < 1:
        raise InvalidInput(
            f"--max-regress is a share of the energy, from zero to below 100 %, such as 3%, not {most:g}"
        )
    profile = read_profile(find_profile(name))
    _check_arrivals(profile, setup)
    seen: list[Measurement] = []
    limits = _limits(name, profile)
    with _opened((name,), setup) as (device, workload, (point,), words):
        recorded = isinstance(device, Recorded)
        # A recorded table answers the same at every look: one is all there is.
        most_windows = 1 if recorded else most_windows
        found = None
        while len(seen) < most_windows and not (found and found.settled):
            if isinstance(device, Rewindable):
                device.rewind(len(seen))
            look = measure(device, workload, point, words.window(device), arrivals=words.traffic, seed=len(seen))
            _check_same_joules(name, profile.measurement, look)
            seen.append(look)
            found = replace(
                _checked(profile, limits, seen, most),
                device=device.uri,
                workload=workload.uri,
                arrivals=str(words.traffic),
                tuned_at=_arrivals(profile),
                recorded=recorded,
            )
            yield found


def _check_arrivals(profile: Profile, setup: Setup) -> None:
    """Check that a profile is held to no other load than the one it was tuned at."""
    tuned = _arrivals(profile)
    if setup.arrivals is None:
        return
    if tuned is None:
        raise InvalidInput("the profile does not say at which load it was tuned; tune again, or leave --arrivals out")
    if str(setup.traffic) != tuned:
        raise InvalidInput(
            f"the profile was tuned at arrivals {tuned}, and promises nothing at {setup.traffic}; leave --arrivals out"
        )


def _arrivals(profile: Profile) -> str | None:
    """Return when requests were sent while a profile was tuned; None if it does not say, as older ones do not."""
    said = profile.provenance.get("arrivals")
    return None if said is None else str(said)


def _limits(name: str, profile: Profile) -> tuple[Constraint, ...]:
    try:
        limits = tuple(Constraint.parse(str(text)) for text in profile.slo)
    except PolythrottleError as error:
        raise BadFile(f"{name} holds a limit that is none: {error}") from error
    if multiple := next((limit for limit in limits if limit.relative), None):
        raise BadFile(f"{name} holds the limit {multiple}, but a profile's limits are absolute, such as p99<=25ms")
    return limits


def _check_same_joules(name: str, then: Measurement, now: Measurement) -> None:
    """Check that the joules of a profile came about as those measured now, and cover the same."""
    if then.energy_kind is not now.energy_kind:
        raise BadFile(
            f"the joules of {name} are {then.energy_kind} and those here {now.energy_kind}, "
            "which do not compare; tune again here"
        )
    if then.boundary != now.boundary:
        was, covers = (each.boundary or "nothing that is stated" for each in (then, now))
        raise BadFile(
            f"the joules of {name} cover {was}, and those here {covers}, which do not compare; tune again here"
        )


def _checked(profile: Profile, limits: Sequence[Constraint], seen: list[Measurement], most: float) -> Checked:
    then = profile.measurement
    ratios = [look.energy_j / then.energy_j for look in seen]
    told = {limit: _ratio([_excess(limit, look) for look in seen]) for limit in limits}
    over = {limit: found for limit, ratio in told.items() if ratio.low <= 1 and (found := _over(limit, seen))}
    bounds = {str(limit): _held(limit, ratio, [] if limit in over else seen) for limit, ratio in told.items()}
    short = {str(limit): ratio for limit, ratio in told.items() if limit in over or not _shown(limit, seen)}
    blur = _blur(then)
    energy = Interval(0.0, math.inf) if blur is None else _ratio(ratios, blur)
    against = {str(limit): found for limit, found in over.items()}
    middle, sure = geometric_mean(ratios), blur is not None
    return Checked(energy, bounds, len(seen), most, tuple(seen), short=short, middle=middle, over=against, sure=sure)


def _blur(then: Measurement) -> float | None:
    """Return how far the logarithm of a profile's energy may be off; None if it does not say."""
    known = then.intervals.get("energy")
    if known is None or not known.known or known.low <= 0:
        return None
    return abs(math.log(min(known.high / then.energy_j, then.energy_j / known.low)))


def _over(limit: Constraint, seen: Sequence[Measurement]) -> int:
    """Return how many windows speak against a limit on a percentile.

    Such are those above it by their lower end, and those above it that have no upper end: slow queries that come close
    together leave some windows calm and hide in the others how many there are, so that the calm ones prove nothing.
    """
    if not _PERCENTILE.fullmatch(limit.metric):
        return 0
    owns = [(look, look.intervals.get(limit.metric)) for look in seen]
    return sum(
        own.low > limit.limit if own is not None and own.known else _excess(limit, look) > 1.0 for look, own in owns
    )


def _held(limit: Constraint, ratio: Interval, seen: Sequence[Measurement]) -> Interval:
    """Return a ratio with the upper end that only windows may give whose own has one.

    A percentile of few queries lies too low, so that what they show above the limit is above it all the same.
    """
    shown = _shown(limit, seen)
    high = _ratio([_excess(limit, look) for look in shown]).high if shown else math.inf
    return Interval(ratio.low, max(ratio.low, high))


def _shown(limit: Constraint, seen: Sequence[Measurement]) -> list[Measurement]:
    """Return the windows that show how high a quantity is; none if most do not, for the rest are then the calm ones."""
    if not _PERCENTILE.fullmatch(limit.metric):
        return list(seen)
    shown = [look for look in seen if (own := look.intervals.get(limit.metric)) is not None and own.known]
    return shown if 2 * len(shown) >= len(seen) else []


def _excess(limit: Constraint, look: Measurement) -> float:
    """Return a quantity as a share of its limit, above 1 where it is broken."""
    value = look.metric(limit.metric)
    if value is None or value <= 0:
        raise TrialError(
            f"{limit.metric} is not measured here{UNTOLD.get(limit.metric, '')}, so {limit} cannot be checked"
        )
    return limit.limit / value if limit.at_least else value / limit.limit


def _ratio(values: Sequence[float], blur: float = 0.0) -> Interval:
    found = interval([math.log(value) for value in values])
    low, high = found.low - blur, found.high + blur
    return Interval(math.exp(low), math.exp(high) if high < 700 else math.inf)


@contextlib.contextmanager
def _opened(names: Sequence[str], setup: Setup) -> Iterator[tuple[Device, Workload, list[OperatingPoint], Setup]]:
    profiles = {name: _profile(name) for name in names}
    tuned = [profile for profile in profiles.values() if profile is not None]
    words = _completed(setup, tuned)
    device, workload = words.open()
    for profile in () if isinstance(device, Recorded) else tuned:
        check_same_kind(profile, device)
        if profile.workload != workload.uri:
            raise InvalidInput(f"the profile is for {profile.workload}, not for {workload.uri}; leave --workload out")
    if not isinstance(device, Recorded) and (wider := _widened(words, workload, tuned)) != words:
        workload.close()
        device, workload = wider.open()
    with contextlib.closing(workload), device:
        points = [_point(device, workload, name, profiles[name]) for name in names]
        yield device, workload, points, words


def _widened(words: Setup, workload: Workload, profiles: Sequence[Profile]) -> Setup:
    """Return a setup with the batch sizes and threads of profiles among the workload's own, where nobody gave any.

    A knob that the workload has only if levels are given gets that of no such knob as well, which is the default's.
    """
    own = {knob.name: knob.levels for knob in workload.space.knobs}
    found: dict[str, Any] = {}
    for name, word, without in ((BATCH_SIZE, "batch_sizes", 1), (THREADS, "threads", processors())):
        asked = (parted(profile)[1].get(name) for profile in profiles)
        levels, wanted = set(own.get(name, (without,))), {level for level in asked if type(level) is int}
        if getattr(words, word) is None and not wanted <= set(own.get(name, ())):
            found[word] = tuple(sorted(levels | wanted))
    return replace(words, **found)


def _profile(name: str) -> Profile | None:
    """Return the profile a name means; None if it is the default or may be a preset."""
    try:
        return None if name == DEFAULT else read_profile(find_profile(name))
    except UnknownName:
        if "/" in name or name.endswith(".toml"):
            raise
        return None


def _completed(setup: Setup, profiles: Sequence[Profile]) -> Setup:
    """Return a setup with device, workload, knobs and load of the profiles where it says nothing itself."""
    if not profiles:
        return setup
    if len({profile.workload for profile in profiles}) > 1:
        raise InvalidInput(f"the profiles are for {' and '.join(profile.workload for profile in profiles)}")
    loads = {load for profile in profiles if (load := _arrivals(profile)) is not None}
    if setup.arrivals is None and len(loads) > 1:
        raise InvalidInput(f"the profiles were tuned at {' and '.join(sorted(loads))}; say which with --arrivals")
    knobs = tuple(dict.fromkeys(knob for profile in profiles for knob in parted(profile)[0]))
    device = profiles[0].device if setup.device == "auto" else setup.device
    replayed = device.startswith("replay:")
    if replayed and setup.arrivals is None and loads - {str(CLOSED)}:
        raise InvalidInput(f"the profile was tuned at {loads.pop()}, a load that a recorded table cannot show")
    return replace(
        setup,
        device=device,
        workload=setup.workload if setup.workload or replayed else profiles[0].workload,
        knobs=setup.knobs if setup.knobs or replayed else knobs or None,
        arrivals=setup.arrivals or next(iter(loads), None),
    )


def _point(device: Device, workload: Workload, name: str, profile: Profile | None) -> OperatingPoint:
    space = device.space * workload.space
    if profile is not None:
        wanted: OperatingPoint = profile.point
    elif name == DEFAULT:
        return space.default
    elif name in device.presets:
        return OperatingPoint({**workload.space.default, **device.presets[name]})
    else:
        raise UnknownName("profile or preset", name, (DEFAULT, *device.presets))
    whole = space.default.moved(wanted)
    if whole not in space:
        other = next((word for knob, word in _WORDS.items() if not _takes(workload, knob, wanted)), None)
        offer = f"name its level with {other}, or tune again" if other and profile is not None else "tune again"
        raise InvalidInput(f"{device.title} with this workload does not take the point of {name}; {offer}")
    return whole


def _takes(workload: Workload, name: str, point: OperatingPoint) -> bool:
    """Return whether a workload that has a knob has the level that a point wants of it."""
    levels = next((knob.levels for knob in workload.space.knobs if knob.name == name), None)
    return levels is None or name not in point or point[name] in levels
