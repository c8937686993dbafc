"""A profile applied to many boards at once, or to a tenth of them first and to the rest once it has proven itself."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from polythrottle.actuation.restore import Standing
from polythrottle.api import deployment
from polythrottle.api.deployment import Followed, Restored, Told
from polythrottle.backends import DeviceURI, open_device
from polythrottle.backends.at_once import Answer, at_once, check_distinct
from polythrottle.backends.ssh import SshDevice
from polythrottle.catalog.profiles import find_profile, read_profile
from polythrottle.domain.errors import PolythrottleError
from polythrottle.tuning.apply import Applied, check_same_kind, split_point
from polythrottle.tuning.canary import CanaryTest, canary_test, first_of

Found = TypeVar("Found")
WITHIN_S = 300.0
"""How long a board may take to be set: more than its connection is given, whose own words say more."""
_NO_BOUND_S = float("inf")


@dataclass(frozen=True)
class BoardOutcome:
    """What became of one board.

    Args:
        uri: As it was named.
        applied: What stands there now; None if nothing does.
        error: Why nothing does; None where it was not touched, or put back.
    """

    uri: str
    applied: Applied | None = None
    error: PolythrottleError | None = None


@dataclass(frozen=True)
class Rollout:
    """What applying a profile to many boards came to.

    Args:
        outcomes: Of each board, in the order in which they were named.
        tests: What was proven on the boards that tried it first; none without a canary.
        refused: Why the others were left alone; empty if they were not.
    """

    outcomes: tuple[BoardOutcome, ...]
    tests: tuple[CanaryTest, ...] = ()
    refused: str = ""

    @property
    def failed(self) -> tuple[BoardOutcome, ...]:
        """The boards on which it could not be applied or tried."""
        return tuple(each for each in self.outcomes if each.error is not None)


def apply_to_all(
    profile: str | Path,
    devices: Sequence[str],
    *,
    canary: float | None = None,
    confirm_within_s: float | None = None,
    lasting: str | None = None,
    keep: bool = False,
    other_model: bool = False,
    told: Told = lambda line: None,
) -> Rollout:
    """Apply a profile to several boards at once.

    Args:
        profile: Its file, or ``<device>/<workload>``.
        devices: Device URIs, each once.
        canary: The share of the boards that try it first, such as 0.1: they serve its workload with it and without it
            in turns, and the others follow only once none of them is worse by it. All at once if None.
        confirm_within_s: As for `polythrottle.apply`; so are the next three.
        lasting: How long it stands.
        keep: Whether it stands without confirmation.
        other_model: Whether to apply it although the model's file is another.
        told: Called with each line a user should read.

    Raises:
        InvalidInput: If a URI is malformed or named twice, or there is nothing for a canary to hold back.
        UnknownName: If there is no such profile or scheme.
        BadFile: If the profile cannot be read.
    """
    check_distinct(devices)
    for uri in devices:
        DeviceURI.parse(uri)
    path = find_profile(str(profile))
    read_profile(path)
    stay: dict[str, Any] = {"confirm_within_s": confirm_within_s, "lasting": lasting, "keep": keep}
    deployment.stay_of(**stay)

    def apply(uri: str) -> Applied:
        found = deployment.apply(path, uri, other_model=other_model, daemon=False, told=told, **stay)
        assert not isinstance(found, Followed), "without the daemon nobody follows"
        return found

    if canary is None:
        return Rollout(_in_order(devices, at_once(devices, apply, WITHIN_S)))
    share = first_of(len(devices), canary)
    trial = _Canary(path, other_model, told)
    tests = trial.run(devices, share)
    if trial.refused:
        return Rollout(trial.outcomes(devices), tests, trial.refused)
    rest = [uri for uri in devices if uri not in trial.errors]
    found = _in_order(rest, at_once(rest, apply, WITHIN_S))
    known = {each.uri: each for each in (*found, *trial.failed)}
    return Rollout(tuple(known[uri] for uri in devices), tests)


class _Canary:
    """A profile on trial.

    Args:
        path: The profile's file.
        other_model: Whether another model may be served.
        told: Called with each line a user should read.
    """

    def __init__(self, path: Path, other_model: bool, told: Told) -> None:
        self._path = path
        self._other_model = other_model
        self._told = told
        self.errors: dict[str, PolythrottleError] = {}
        self.refused = ""

    def run(self, devices: Sequence[str], share: int) -> tuple[CanaryTest, ...]:
        """Have the first boards that answer try the profile, so many of them and never more.

        Args:
            devices: In the order in which they are asked.
            share: How many try it.
        """
        chosen = self._answering(devices, share)
        if not chosen:
            self.refused = "no board answers that could try the profile"
            return ()
        test = partial(canary_test, profile=str(self._path), other_model=self._other_model, told=self._told)
        tests: dict[str, CanaryTest] = {}
        for answer in at_once(chosen, test, _NO_BOUND_S):
            if answer.found is not None:
                tests[answer.uri] = answer.found
            elif answer.error is not None:
                self.errors[answer.uri] = answer.error
        found = tuple(tests[uri] for uri in chosen if uri in tests)
        self.refused = self._verdict(found, len(chosen))
        return found

    def _answering(self, devices: Sequence[str], share: int) -> list[str]:
        """Return the first boards, so many, that answer and are of the profile's kind; nothing is set on any."""
        waiting = list(devices)
        chosen: list[str] = []
        while waiting and len(chosen) < share:
            asked = waiting[: share - len(chosen)]
            del waiting[: len(asked)]
            for answer in at_once(asked, self._looked_at, WITHIN_S):
                if answer.error is None:
                    chosen.append(answer.uri)
                else:
                    self.errors[answer.uri] = answer.error
        return [uri for uri in devices if uri in chosen]

    def _looked_at(self, uri: str) -> bool:
        profile = read_profile(self._path)
        device = open_device(uri, tuple(split_point(profile)[0]) or None)
        try:
            check_same_kind(profile, device)
        finally:
            if isinstance(device, SshDevice):
                device.board.close()
        return True

    def _verdict(self, tests: Sequence[CanaryTest], asked: int) -> str:
        """Return why the profile goes no further; empty if it does."""
        if worse := [each for each in tests if each.worse]:
            return f"it is worse on {worse[0].uri}: {why_worse(worse[0])}"
        if unsure := [each for each in tests if each.worse is None]:
            left = " and ".join(unsure[0].open)
            count = len(unsure[0].comparison.pairs)
            return f"{count} pairs of windows on {unsure[0].uri} do not show that it is no worse: {left} is not known"
        if 2 * len(tests) <= asked:  # of those that tried it, most have to have come to an end
            lost = next(iter(self.failed))
            return f"it could not be tried to the end: {lost.uri}: {lost.error}"
        return ""

    @property
    def failed(self) -> tuple[BoardOutcome, ...]:
        """The boards that did not answer, or dropped out of the trial."""
        return tuple(BoardOutcome(uri, error=error) for uri, error in self.errors.items())

    def outcomes(self, devices: Sequence[str]) -> tuple[BoardOutcome, ...]:
        """Return what has become of every board where nothing is applied to any."""
        return tuple(BoardOutcome(uri, error=self.errors.get(uri)) for uri in devices)


def why_worse(test: CanaryTest) -> str:
    """Return in what a profile is worse on a board, in words."""
    if test.behind:
        return f"it does not keep up with {test.comparison.arrivals}"
    if test.broken:
        return f"{' and '.join(test.broken)} does not hold"
    low, high = -test.saving.high, -test.saving.low
    return f"{100 * low:.1f} to {100 * high:.1f} % more energy per item"


def confirm_all(devices: Sequence[str]) -> tuple[Answer[tuple[Standing, ...]], ...]:
    """Let stand what was applied to several boards, all at once; those that cannot be asked have an error."""
    return _every(devices, _confirmed)


def restore_all(devices: Sequence[str], *, force: bool = False) -> tuple[Answer[Restored], ...]:
    """Put several boards back, all at once; those that cannot be asked have an error.

    Args:
        devices: Device URIs, each once.
        force: As for `polythrottle.restore`.
    """
    return _every(devices, partial(deployment.restore, force=force, daemon=False))


def _confirmed(uri: str) -> tuple[Standing, ...]:
    found = deployment.confirm(uri, daemon=False)
    assert isinstance(found, tuple), "without the daemon nobody else can answer"
    return found


def _every(devices: Sequence[str], ask: Callable[[str], Found]) -> tuple[Answer[Found], ...]:
    check_distinct(devices)
    for uri in devices:
        DeviceURI.parse(uri)
    answers = {answer.uri: answer for answer in at_once(devices, ask, WITHIN_S)}
    return tuple(answers[uri] for uri in devices)


def _in_order(devices: Sequence[str], answers: Iterable[Answer[Applied]]) -> tuple[BoardOutcome, ...]:
    found = {each.uri: BoardOutcome(each.uri, each.found, each.error) for each in answers}
    return tuple(found[uri] for uri in devices)
