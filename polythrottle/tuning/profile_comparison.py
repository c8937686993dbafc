"""Profiles, presets and the default as points of one device, compared in turns; and a profile on some boards first."""

import contextlib
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from polythrottle.catalog.tuned_profiles import find_profile, read_profile
from polythrottle.domain.arrivals import CLOSED
from polythrottle.domain.errors import BadFile, InvalidInput, PolythrottleError, TrialError, UnknownName
from polythrottle.domain.measurement import Interval, Measurement
from polythrottle.domain.metrics import why_untold
from polythrottle.domain.ports import Device, Recorded, Rewindable, Workload
from polythrottle.domain.problem import Constraint
from polythrottle.domain.profile import Profile
from polythrottle.domain.space import BATCH_SIZE, OperatingPoint
from polythrottle.domain.units import meant
from polythrottle.metering.comparison import MOST_PAIRS, Comparison, ProfileCheck, check_windows, compare
from polythrottle.metering.early_stopping import Goal
from polythrottle.metering.point_measurement import measure
from polythrottle.metering.sequential import RollbackTest
from polythrottle.tuning.apply import check_same_kind, split_point
from polythrottle.tuning.boards_together import OpenBoard
from polythrottle.tuning.file_trust import announcement, check_device
from polythrottle.tuning.setup import Setup
from polythrottle.workloads.inputs import THREADS, processors

Told = Callable[[str], object]
DEFAULT = "default"
_WORDS = {BATCH_SIZE: "--batch", THREADS: "--threads"}
_AGAIN = 2_000_000
"""Where the windows of a check start on a device that can start a trial again: apart from those of a search."""


def compare_sides(
    names: Sequence[str],
    setup: Setup,
    most_pairs: int = MOST_PAIRS,
    told: Told = lambda line: None,
    *,
    other_model: bool | None = None,
    enough: Callable[[Comparison], bool] = lambda comparison: comparison.settled,
    unneeded: Callable[[], bool] = lambda: False,
) -> Generator[Comparison]:
    """Measure two sides in turns; yields the comparison after each pair.

    Args:
        names: Two of: a profile's file or name, ``default``, a preset of the device.
        setup: Device and workload; where it names none, those of the first profile.
        most_pairs: After how many pairs to give up.
        told: Called with what is run because a profile names it, before it is.
        other_model: Whether to measure another model than the one it was tuned for; None is no, without offering it.
        enough: Says when more pairs would change nothing.
        unneeded: Whether nobody needs to know any more: then a window is cut short, and no other is begun.

    Raises:
        InvalidInput: If there are not two sides, they were tuned for different workloads, or for a device that the
            user has to name.
        UnknownName: If a name is none of these.
        BadFile: If a profile is for other hardware, or for levels that are not there.
        PolythrottleError: As `polythrottle.measure`.
    """
    if len(names) != 2:
        raise InvalidInput("a comparison has two sides, such as: polythrottle measure default profile.toml")
    with _opened(names, setup, told, other_model=other_model) as (device, workload, points, words):
        OpenBoard(device.uri, device, workload).cut_short_when(unneeded)
        yield from compare(
            device,
            workload,
            points,
            words.window(device),
            arrivals=words.traffic,
            most_pairs=most_pairs,
            enough=lambda comparison: unneeded() or enough(comparison),
        )


def check_profile(
    name: str,
    setup: Setup,
    most: float,
    most_windows: int = MOST_PAIRS,
    *,
    other_model: bool = False,
    told: Told = lambda line: None,
) -> Generator[ProfileCheck]:
    """Measure a profile's point again until it is known whether it still keeps its word; yields after each window.

    Args:
        name: A profile's file or name.
        setup: Device and workload; where it names none, the profile's.
        most: The share by which energy per item may have grown, such as 0.03.
        most_windows: After how many windows to give up.
        other_model: Whether to measure another model than the one it was tuned for.
        told: Called with what is run because the profile names it, before it is.

    Raises:
        InvalidInput: If the share is not a sensible one, or the profile was not tuned at the arrivals given.
        BadFile: If its limits are none, its joules are not those measured here, or its model is another.
        PolythrottleError: As `compare_sides`.
    """
    if not 0 <= most < 1:
        raise InvalidInput(
            f"--max-regress is a share of the energy, from zero to below 100 %, such as 3%, not {most:g}"
        )
    profile = read_profile(find_profile(name))
    _check_arrivals(profile, setup)
    looks: list[Measurement] = []
    limits = limits_of(name, profile)
    with _opened((name,), setup, told, other_model=other_model) as (device, workload, (point,), words):
        recorded = isinstance(device, Recorded)
        # A recorded table answers the same at every look: one is all there is.
        most_windows = 1 if recorded else most_windows
        check = None
        while len(looks) < most_windows and not (check and check.settled):
            look = _measured_again(device, workload, point, words, limits, len(looks))
            _check_same_joules(name, profile.measurement, look)
            looks.append(look)
            check = replace(
                check_windows(profile.measurement, limits, looks, most),
                device=device.uri,
                workload=workload.uri,
                arrivals=str(words.traffic),
                tuned_at=_arrivals(profile),
                recorded=recorded,
            )
            yield check


def _measured_again(
    device: Device,
    workload: Workload,
    point: OperatingPoint,
    words: Setup,
    limits: Sequence[Constraint],
    number: int,
) -> Measurement:
    """Return another window of a point, with randomness of its own number."""
    if isinstance(device, Rewindable):
        device.rewind(_AGAIN + number)
    goal = Goal(judged=tuple(limits))
    return measure(device, workload, point, words.window(device), arrivals=words.traffic, seed=number, goal=goal)


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
    if said is None:
        return None
    return str(said)


def limits_of(name: str, profile: Profile) -> tuple[Constraint, ...]:
    """Return the limits that a profile holds.

    Raises:
        BadFile: If one of them cannot be read, or is not absolute.
    """
    try:
        limits = tuple(Constraint.parse(str(text)) for text in profile.slo)
    except PolythrottleError as error:
        raise BadFile(f"{name} holds a limit that cannot be read: {error}") from error
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


@contextlib.contextmanager
def _opened(
    names: Sequence[str], setup: Setup, told: Told, *, other_model: bool | None = None
) -> Iterator[tuple[Device, Workload, list[OperatingPoint], Setup]]:
    files = {name: file for name in names if (file := _file(name)) is not None}
    profiles = {name: read_profile(file) for name, file in files.items()}
    tuned = list(profiles.values())
    words = _completed(setup, tuned)
    _check_served(names, words, tuned)
    file = next(iter(files.values()), None)  # what the user leaves out is taken from the first profile
    if file is not None and words.device != setup.device:
        check_device(file, words.device)

    def accept(board: Device) -> None:
        """Compare the hardware before anything is run on it, then say what will be."""
        for profile in () if isinstance(board, Recorded) else tuned:
            check_same_kind(profile, board)
        theirs = (_unless(words.workload, setup.workload), _unless(words.device, setup.device))
        if file is not None and (line := announcement(file, board, *theirs)):
            told(line)

    device, workload = words.open(accept)
    for profile in () if isinstance(device, Recorded) else tuned:
        if not other_model:
            _check_same_model(
                profile, workload.uri, words.content(device, workload).get("model"), other_model is not None
            )
    if not isinstance(device, Recorded) and (wider := _widened(words, workload, tuned)) != words:
        # Before the other is opened: a model that is there twice takes its memory twice.
        workload.close()
        device, workload = wider.open()
    with contextlib.closing(workload), device:
        points = [_point(device, workload, name, profiles.get(name)) for name in names]
        yield device, workload, points, words


def _check_served(names: Sequence[str], setup: Setup, profiles: Sequence[Profile]) -> None:
    """Check that something says what is measured: without a workload nothing but a profile can be a side."""
    said = profiles or setup.workload or setup.objects.workload is not None or setup.device.startswith("replay:")
    if not said and (strange := next((name for name in names if name != DEFAULT), None)) is not None:
        raise InvalidInput(
            f"{strange!r} is no profile, neither a file nor <device>/<workload>; of a preset or the default say with "
            "--device and --workload what is measured"
        )


def _check_same_model(profile: Profile, served: str, digest: str | None, offered: bool) -> None:
    """Refuse another model than a profile's: by its content where that is known of both, else by its name."""
    tuned = profile.model_digest
    if tuned is not None and tuned == digest:
        return
    offer = ""
    if offered:
        offer = ", or add --other-model to measure it all the same"
    if served not in (profile.workload, str(profile.model_path)):
        raise InvalidInput(f"the profile is for {profile.workload}, not for {served}; leave --workload out{offer}")
    if tuned is not None and digest is not None:
        raise BadFile(
            f"{served} is another model than the profile was tuned for, which lay at {profile.model_path or 'a place '}"
            f"{'' if profile.model_path else 'nobody noted'}: its content is {digest[:8]}, not {tuned[:8]}; "
            f"tune again{offer}"
        )


def _widened(words: Setup, workload: Workload, profiles: Sequence[Profile]) -> Setup:
    """Return a setup with the batch sizes and threads of profiles among the workload's own, where nobody gave any.

    A knob that the workload has only if levels are given gets that of no such knob as well, which is the default's.
    """
    own = {knob.name: knob.levels for knob in workload.space.knobs}
    wider: dict[str, Any] = {}
    for name, word, without in ((BATCH_SIZE, "batch_sizes", 1), (THREADS, "threads", processors())):
        asked = (split_point(profile)[1].get(name) for profile in profiles)
        levels = set(own.get(name, (without,)))
        wanted = {level for level in asked if type(level) is int}
        if getattr(words, word) is None and not wanted <= set(own.get(name, ())):
            wider[word] = tuple(sorted(levels | wanted))
    return replace(words, **wider)


def _unless(text: str | None, given: str | None) -> str | None:
    """Return a word that a profile says; None if it is the one the user has given."""
    if text == given:
        return None
    return text


def _file(name: str) -> Path | None:
    """Return the file of the profile a name means; None if it is the default or may be a preset."""
    try:
        if name == DEFAULT:
            return None
        return find_profile(name)
    except UnknownName:
        # That is no name of a preset, so nothing else can have been meant.
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
    knobs = tuple(dict.fromkeys(knob for profile in profiles for knob in split_point(profile)[0]))
    if setup.device == "auto":
        device = profiles[0].device
    else:
        device = setup.device
    replayed = device.startswith("replay:")
    if replayed and setup.arrivals is None and loads - {str(CLOSED)}:
        raise InvalidInput(f"the profile was tuned at {loads.pop()}, a load that a recorded table cannot show")
    workload = setup.workload
    searched = setup.knobs
    # A recorded table brings its own workload and knobs; other devices take those of the profiles.
    if not replayed:
        workload = workload or _served_by(profiles[0])
        searched = searched or knobs or None
    return replace(
        setup,
        device=device,
        workload=workload,
        knobs=searched,
        arrivals=setup.arrivals or next(iter(loads), None),
    )


def _served_by(profile: Profile) -> str:
    """Return the workload of a profile; of a model's file where it lay, whatever the working folder is now."""
    path = profile.model_path
    if path is None or not path.is_file():
        return profile.workload
    return str(path)


def _point(device: Device, workload: Workload, name: str, profile: Profile | None) -> OperatingPoint:
    space = device.space * workload.space
    if profile is not None:
        wanted: OperatingPoint = profile.point
    elif name == DEFAULT:
        return space.default
    else:
        presets = device.presets
        own = meant(name, presets, begun=True)
        if own is None:
            raise UnknownName("profile or preset", name, (DEFAULT, *presets))
        return OperatingPoint({**workload.space.default, **presets[own]})
    whole = space.default.moved(wanted)
    if whole not in space:
        other = next((word for knob, word in _WORDS.items() if not _takes(workload, knob, wanted)), None)
        if other and profile is not None:
            offer = f"name its level with {other}, or tune again"
        else:
            offer = "tune again"
        raise InvalidInput(f"{device.title} with this workload does not take the point of {name}; {offer}")
    return whole


def _takes(workload: Workload, name: str, point: OperatingPoint) -> bool:
    """Return whether a workload that has a knob has the level that a point wants of it."""
    levels = next((knob.levels for knob in workload.space.knobs if knob.name == name), None)
    return levels is None or name not in point or point[name] in levels


# A profile tried on a tenth of the boards first: whether it is worse than the board without it, proven board by board.
#
# On each of them windows with the profile and with the default settings take turns, so that heat, load and what tells
# one board from another fall on both. Energy per item with ÷ without, and each limited quantity ÷ its limit, are asked
# the question of the sequential test with which the daemon takes a new profile over. Nothing is kept meanwhile: the
# board is entered as for any measurement, and is as it was found when the turns end, however that happens.

HARM = 0.02
WRONGLY = 0.01
"""A profile that is worse by `HARM` passes on a board with this probability at most."""


@dataclass(frozen=True)
class CanaryTest:
    """What the turns on one board prove.

    Args:
        uri: The board.
        comparison: Its pairs, first without the profile, then with it.
        energy: Asks whether the profile takes more energy per item.
        limits: Asks of each limit of the profile whether it is broken.
    """

    uri: str
    comparison: Comparison
    energy: RollbackTest
    limits: Mapping[str, RollbackTest]

    @classmethod
    def of(cls, uri: str, comparison: Comparison, limits: Sequence[Constraint]) -> "CanaryTest":
        """Return what pairs prove.

        Raises:
            TrialError: If a limit is on something that was not measured.
        """
        energy = RollbackTest(HARM, WRONGLY)
        bounds = {str(limit): RollbackTest(HARM, WRONGLY) for limit in limits}
        for without, with_ in comparison.pairs:
            energy = energy.seen(with_.energy_j, without.energy_j)
            for limit in limits:
                value = with_.metric(limit.metric)
                if value is None:
                    raise TrialError(f"{limit.metric} is not measured here{why_untold(limit.metric)}")
                new, old = (limit.limit, value) if limit.at_least else (value, limit.limit)
                bounds[str(limit)] = bounds[str(limit)].seen(new, old)
        return cls(uri, comparison, energy, bounds)

    @property
    def worse(self) -> bool | None:
        """Whether the profile is worse here: in energy, or in that it breaks a limit; None while that is not known."""
        if self.behind:
            return True
        worse = [test.worse for test in (self.energy, *self.limits.values())]
        if any(worse):
            return True
        if None in worse:
            return None
        return False

    @property
    def behind(self) -> bool:
        """Whether the board does not serve what comes under the profile, in most of its windows."""
        late = sum(not with_.keeps_up for _, with_ in self.comparison.pairs)
        return late > 1 and 2 * late >= len(self.comparison.pairs)

    @property
    def broken(self) -> tuple[str, ...]:
        """The limits that are proven broken."""
        return tuple(name for name, test in self.limits.items() if test.worse)

    @property
    def open(self) -> tuple[str, ...]:
        """What is not known either way: ``energy``, or limits."""
        tests = {"energy": self.energy, **self.limits}
        return tuple(name for name, test in tests.items() if test.worse is None)

    @property
    def why(self) -> str:
        """In what the profile is worse here, in words."""
        if self.behind:
            return f"it does not keep up with {self.comparison.arrivals}"
        if self.broken:
            return f"{' and '.join(self.broken)} does not hold"
        low, high = -self.saving.high, -self.saving.low
        return f"{100 * low:.1f} to {100 * high:.1f} % more energy per item"

    @property
    def saving(self) -> Interval:
        """The share of the energy per item that the profile saves here, as a 95 % interval."""
        return self.comparison.saving


def canary_test(
    uri: str,
    profile: str,
    *,
    other_model: bool = False,
    most_pairs: int = MOST_PAIRS,
    told: Told = lambda line: None,
    unneeded: Callable[[], bool] = lambda: False,
) -> CanaryTest:
    """Measure a profile and the default of a board in turns until it is known whether the profile is worse there.

    Args:
        uri: The board.
        profile: The profile's file or name.
        other_model: Whether to measure another model than the one it was tuned for.
        most_pairs: After how many pairs to give up.
        told: Called with what is run because the profile names it, before it is.
        unneeded: As for `compare_sides`.

    Returns:
        The test, whose `CanaryTest.worse` is None where that many pairs do not tell.

    Raises:
        TrialError: If nobody needs it any more.
        PolythrottleError: As `polythrottle.tuning.profile_comparison.compare_sides`.
    """
    limits = limits_of(profile, read_profile(find_profile(profile)))
    enough = partial(_enough, uri, limits)
    turns = compare_sides(
        (DEFAULT, profile),
        Setup(device=uri),
        most_pairs,
        told,
        other_model=other_model or None,
        enough=enough,
        unneeded=unneeded,
    )
    seen = list(turns)
    if not seen or unneeded():
        raise TrialError("nobody needs to know any more whether the profile is worse")
    comparison = seen[-1]
    if comparison.recorded:
        raise InvalidInput(f"{uri} is a recorded table; there is nothing to try a profile on")
    return CanaryTest.of(uri, comparison, limits)


def _enough(uri: str, limits: Sequence[Constraint], comparison: Comparison) -> bool:
    return CanaryTest.of(uri, comparison, limits).worse is not None


def first_of(count: int, share: float) -> int:
    """Return how many of so many boards are a share of them: rounded down, but one at least, and never all.

    Args:
        count: Of boards, 2 or more.
        share: Such as 0.1.

    Raises:
        InvalidInput: If there is nothing to hold back, or the share is not between 0 and 1.
    """
    if not 0 < share < 1:
        raise InvalidInput(f"--canary is a share of the boards, such as 10%, not {100 * share:g} %")
    if count < 2:
        raise InvalidInput("--canary tries a profile on some boards before the others, but only one board is named")
    # In floating point 29 % of a hundred boards are 28.999999999999996.
    return max(1, math.floor(count * share + 1e-9))
