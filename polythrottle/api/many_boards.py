"""Several boards: searched together where they are of one kind, and a profile applied to many of them.

To all at once, or to a tenth of them first and to the rest once it has proven itself.
"""

import contextlib
import shlex
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from polythrottle.actuation.restore import Standing
from polythrottle.api import deployment
from polythrottle.api.deployment import Followed, Restored, Told
from polythrottle.api.experiments import Watcher, study_progress
from polythrottle.api.tuning_result import Tuning, conclude, on_all_boards
from polythrottle.backends import open_device
from polythrottle.backends.device_uri import Answer, at_once, check_distinct, check_uri, own_words, uris_in
from polythrottle.backends.meters import unmetered
from polythrottle.backends.ssh import SshDevice
from polythrottle.catalog.tuned_profiles import find_profile, read_profile
from polythrottle.domain.clock import SystemClock
from polythrottle.domain.errors import DeviceError, InvalidInput, PolythrottleError, TrialError
from polythrottle.domain.ports import Device, Optimizer, Recorded, Workload
from polythrottle.domain.problem import BOARDS
from polythrottle.domain.study import Study
from polythrottle.inspect.examination import Kind
from polythrottle.storage.boards_journal import BoardsJournal
from polythrottle.storage.identity import INDIVIDUAL, identity_of
from polythrottle.tuning.apply import Applied, check_same_kind, split_point, stay_of
from polythrottle.tuning.boards_together import OpenBoard
from polythrottle.tuning.file_trust import accept_resumed, begun_on
from polythrottle.tuning.plan import StudyPlan
from polythrottle.tuning.profile_comparison import CanaryTest, canary_test, first_of
from polythrottle.tuning.remarks import beforehand
from polythrottle.tuning.setup import Setup
from polythrottle.tuning.several_boards import SharedStudy
from polythrottle.tuning.study_store import PriorStudies, check_same_problem, method_of, open_study, recalled

OPENED_WITHIN_S = 300.0
"""How long a board may take to be opened, with its workload."""
SLOWEST = "figures of trials are those that the slowest board would have, with the energy of the mean one"
"""Said once: a trial's line names the board that made it, whose own figures may differ."""
Accept = Callable[[Device], object]


@dataclass(frozen=True)
class TogetherOptions:
    """What a search on several boards was asked for.

    Args:
        uris: The boards.
        plan: As for one board, its setup naming all of them.
        journal: The study's file; None for one in the state folder.
        fresh: Whether to begin anew even if an unfinished study is there.
        force: Whether to replace a profile that is better.
        optimizer: The search method where it was given as an object.
    """

    uris: tuple[str, ...]
    plan: StudyPlan
    journal: Path | None
    fresh: bool
    force: bool
    optimizer: Optimizer | None


def tune_together(
    asked: TogetherOptions,
    study_of: Callable[[Device, Workload], Study],
    progress: bool | None,
    watcher: Watcher | None,
) -> Tuning:
    """Return what a new study on several boards comes to, or one that is continued.

    Args:
        asked: The boards, and what is intended.
        study_of: Returns the study to begin on one board and its workload.
        progress: Whether to show the newest trials and a bar.
        watcher: Somebody else who looks on.

    Raises:
        PolythrottleError: If a board cannot be opened or is of another kind, and as `polythrottle.tune`.
    """
    asked.plan.check_together(len(asked.uris))
    with opened(asked.plan.setup, asked.uris) as boards:
        first = boards[0]
        study = _of_all(study_of(first.device, first.served), asked.uris)
        plan = begun_on(asked.plan, first.device)
        with (
            open_study(study, asked.journal, asked.fresh, plan, BoardsJournal) as (kept, past),
            study_progress(progress, watcher, plan.resumed_by) as shown,
        ):
            assert isinstance(kept, BoardsJournal)
            return _searched(boards, kept, asked.plan, past, shown, asked.force, asked.optimizer)


def resume_together(kept: BoardsJournal, plan: StudyPlan, device: str | None, watcher: Watcher, force: bool) -> Tuning:
    """Continue the study of a journal on all of its boards; trials that ran when it was left are made again first.

    Args:
        kept: The journal.
        plan: What is intended with it.
        device: The URIs that the user has named once more; None for the journal's.
        watcher: Who looks on.
        force: Whether to replace a profile that is better.

    Raises:
        PolythrottleError: As `polythrottle.resume`.
    """
    uris = uris_in(plan.setup.device)
    plan.check_together(len(uris))
    with opened(plan.setup, uris, accept_resumed(kept.path, kept.study, plan, device, watcher.told)) as boards:
        first = boards[0]
        setup = replace(plan.setup, device=uris[0])
        setup.check_placed(first.device, first.served)
        space = first.device.space * first.served.space
        problem = replace(kept.study.problem, space=space, content=setup.content(first.device, first.served))
        asked = _of_all(replace(kept.study, problem=problem, trials=(), references=(), answer=None), uris)
        check_same_problem(kept.path, kept.study, asked)
        return _searched(boards, kept, plan, recalled(plan.lessons), watcher, force, None)


@contextlib.contextmanager
def opened(setup: Setup, uris: Sequence[str], accept: Accept = lambda device: None) -> Iterator[tuple[OpenBoard, ...]]:
    """Open boards of one kind, all at once, and the workload on each.

    Args:
        setup: All other options.
        uris: The boards.
        accept: Is called with each device before its workload is opened; raises if it will not do.

    Raises:
        PolythrottleError: If one cannot be opened.
        InvalidInput: If they are not of one kind, or two of them are one board.
    """
    boards: dict[str, OpenBoard] = {}

    def open_one(uri: str) -> OpenBoard:
        return OpenBoard(uri, *replace(setup, device=uri).open(accept))

    with contextlib.ExitStack() as stack:
        errors: list[PolythrottleError] = []
        # To the last answer, whatever goes wrong with one: a board that is opened later would be left open.
        for answer in at_once(uris, open_one, OPENED_WITHIN_S):
            if answer.found is not None:
                boards[answer.uri] = answer.found
                stack.callback(_close, answer.found)
            elif answer.error is not None:
                errors.append(answer.error)
        if errors:
            raise errors[0]
        found = tuple(boards[uri] for uri in uris)
        _check_one_kind(found)
        yield found


def _close(board: OpenBoard) -> None:
    # A model that does not close is to hide neither what the search came to nor the error that ended it.
    with contextlib.suppress(PolythrottleError):
        board.served.close()
    inner = unmetered(board.device)
    if isinstance(inner, SshDevice):
        inner.board.close()


def _check_one_kind(boards: Sequence[OpenBoard]) -> None:
    first = boards[0]
    space = first.device.space * first.served.space
    for number, board in enumerate(boards):
        if isinstance(board.device, Recorded):
            raise InvalidInput(f"{board.uri} is a recorded table, which is searched by itself")
        if Kind.of(board.device) != Kind.of(first.device):
            raise InvalidInput(
                f"{first.uri} is {first.device.title}, and {board.uri} is {board.device.title} or has other firmware "
                "or knobs; boards that search together are of one kind, by which polythrottle boards lists them"
            )
        if (board.device.space * board.served.space).fingerprint != space.fingerprint:
            raise InvalidInput(f"{board.uri} has other points to try than {first.uri}; boards of a kind have the same")
        for other in boards[:number]:
            if _individual(board.device) and _individual(board.device) == _individual(other.device):
                raise InvalidInput(f"{other.uri} and {board.uri} are one board; name it once")


def _individual(device: Device) -> dict[str, str]:
    """Return what tells a board from others of its kind; empty where that is not told."""
    # A PCI address, a bus or a number tells parts of one machine apart, and is the same on the next one.
    return {name: text for name, text in identity_of(device).items() if name in INDIVIDUAL & {"uuid", "serial"}}


def _of_all(study: Study, uris: Sequence[str]) -> Study:
    """Return a study whose problem says which boards search together, so that no other study is taken for it."""
    # Sorted: the same boards in another order go on with the same study.
    content = {**study.problem.content, BOARDS: " ".join(sorted(uris))}
    return replace(study, problem=replace(study.problem, content=content))


def _searched(
    boards: Sequence[OpenBoard],
    kept: BoardsJournal,
    plan: StudyPlan,
    past: PriorStudies,
    watcher: Watcher,
    force: bool,
    own: Optimizer | None,
) -> Tuning:
    """Return what a search comes to, its profile and report written."""
    watcher.opened(kept.study, kept.path, plan.budget.trials)
    for line in (*past.words(kept.study.problem), *beforehand(kept.study), SLOWEST):
        watcher.told(line)
    first = boards[0]
    optimizer = method_of(kept.study, (first.device, first.served), plan, past, watcher.told, own)
    shared = SharedStudy(boards, optimizer, kept, plan.budget, plan.rule)
    with contextlib.closing(shared.search()) as events:
        for event in events:
            if isinstance(event, Study):
                watcher.changed(event)
            else:
                watcher.told(event)
    # As the answer says where it was measured: the first may have been lost before it measured anything.
    named = on_all_boards(kept.study, kept.path).problem.device
    device = next((board.device for board in boards if board.uri == named), first.device)
    return conclude(kept, device, plan, past, force)


Found = TypeVar("Found")
SET_WITHIN_S = 300.0
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

    @property
    def words(self) -> str:
        """The error's, for where the board is named before them; "" where there is none."""
        return own_words(self.uri, self.error or "")


@dataclass(frozen=True)
class Rollout:
    """What applying a profile to many boards came to.

    Args:
        outcomes: Of each board, in the order in which they were named.
        tests: What was proven on the boards that tried it first; none without a canary.
        refused: Why the others were left alone; empty if they were not.
        confirm_within_s: How long what was set waits to be confirmed yet, where it was set first; None if nothing does.
    """

    outcomes: tuple[BoardOutcome, ...]
    tests: tuple[CanaryTest, ...] = ()
    refused: str = ""
    confirm_within_s: float | None = None

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
        told: Called with each line a user should read, after a Ctrl-C too: what it left on which boards.

    Raises:
        InvalidInput: If a URI is malformed or named twice, or there is nothing for a canary to hold back.
        UnknownName: If there is no such profile or scheme.
        BadFile: If the profile cannot be read.
    """
    check_distinct(devices)
    for uri in devices:
        check_uri(uri)
    path = find_profile(str(profile))
    read_profile(path)
    stay: dict[str, Any] = {"confirm_within_s": confirm_within_s, "lasting": lasting, "keep": keep}
    # Before any board is asked, for its errors too.
    countdown = _Countdown(stay_of(**stay).within_s)

    def apply(uri: str) -> Applied:
        found = deployment.apply(path, uri, other_model=other_model, daemon=False, told=told, **stay)
        assert not isinstance(found, Followed), "without the daemon nobody follows"
        if found.stands_as is not None:
            countdown.begin()
        return found

    def apply_on(uris: Sequence[str]) -> tuple[BoardOutcome, ...]:
        asked = _Asked(apply)
        try:
            return _in_order(uris, at_once(uris, asked, SET_WITHIN_S, over=countdown.why_over))
        except KeyboardInterrupt:
            _tell_what_stands(asked, told)
            raise

    if canary is None:
        return Rollout(apply_on(devices), confirm_within_s=countdown.left_s)
    share = first_of(len(devices), canary)
    trial = _Canary(path, other_model, told)
    try:
        tests = trial.run(devices, share)
    except KeyboardInterrupt:
        trial.give_up()
        raise
    if trial.refused:
        return Rollout(trial.outcomes(devices), tests, trial.refused)
    # Those that tried it are set as well: a trial puts its board back.
    found = apply_on([uri for uri in devices if uri not in trial.errors])
    known = {each.uri: each for each in (*found, *trial.failed)}
    return Rollout(tuple(known[uri] for uri in devices), tests, confirm_within_s=countdown.left_s)


class _Asked(Generic[Found]):
    """Boards that are asked something, each in its thread, as whoever is interrupted meanwhile needs to know them.

    Args:
        ask: Asks one of them.
    """

    def __init__(self, ask: Callable[[str], Found]) -> None:
        self._ask = ask
        self._changed = threading.Condition()
        self.begun: list[str] = []
        self.answers: dict[str, Answer[Found]] = {}
        self.over = False
        """Whether no answer is needed any more."""

    def __call__(self, uri: str) -> Found:
        with self._changed:
            if self.over:
                raise DeviceError("interrupted before it was asked")
            self.begun.append(uri)
        answer = Answer[Found](uri)
        try:
            found = self._ask(uri)
            answer = Answer(uri, found)
        except PolythrottleError as error:
            answer = Answer(uri, error=error)
            raise
        finally:
            with self._changed:
                self.answers[uri] = answer
                self._changed.notify_all()
        return found

    def stop(self) -> None:
        """Ask no other board, and wait until those have answered that were."""
        with self._changed:
            self.over = True
            self._changed.wait_for(lambda: len(self.answers) == len(self.begun))


def _tell_what_stands(asked: "_Asked[Applied]", told: Told) -> None:
    """Name the boards on which a profile stands, or may do so, that was being applied when it was interrupted."""
    stand = []
    for uri in asked.begun:
        answer = asked.answers.get(uri)
        if answer is not None and answer.error is not None:
            told(f"{uri}: {answer.words}")
        elif answer is None or answer.found is None or answer.found.stands_as is not None:
            stand.append(uri)
    if stand:
        told(f"the profile may stand on boards that were set by then; put it back with {_restoring(stand)}")
    else:
        told("the profile stands on no board")


def _restoring(uris: Iterable[str]) -> str:
    return f"polythrottle restore --device {shlex.quote(','.join(uris))}"


class _Countdown:
    """The time in which what was set on boards is to be confirmed: it runs from the first that is set.

    Args:
        within_s: How long it is; None if nothing needs to be confirmed.
    """

    def __init__(self, within_s: float | None) -> None:
        self._within_s = within_s
        self._clock = SystemClock()
        self._began_s: float | None = None

    def begin(self) -> None:
        """Note that a board is set."""
        if self._began_s is None:
            self._began_s = self._clock.now()

    @property
    def left_s(self) -> float | None:
        """How much is left; None if nothing is set, or needs to be confirmed."""
        if self._within_s is None or self._began_s is None:
            return None
        return max(0.0, self._within_s - (self._clock.now() - self._began_s))

    def why_over(self) -> str:
        """Return why no other board is waited for; empty while it is."""
        # Half of it is for whoever is to confirm, and for reaching all those boards again.
        if self._within_s is None or (left_s := self.left_s) is None or left_s > self._within_s / 2:
            return ""
        return (
            f"no answer within {self._within_s / 2:g} s of the first board that was set, which waits to be confirmed; "
            "apply the profile to this board alone"
        )


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
        self._trying: _Asked[CanaryTest] | None = None
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
        self._trying = trying = _Asked(self._tested)
        tests: dict[str, CanaryTest] = {}
        # How long it takes depends on the model: a test makes pairs of windows until it is sure, or has made them all.
        for answer in at_once(chosen, trying, _NO_BOUND_S):
            if answer.found is not None:
                tests[answer.uri] = answer.found
            elif answer.error is not None:
                self.errors[answer.uri] = answer.error
        found = tuple(tests[uri] for uri in chosen if uri in tests)
        self.refused = self._verdict(found, len(chosen))
        return found

    def _tested(self, uri: str) -> CanaryTest:
        trying = self._trying
        assert trying is not None
        return canary_test(
            uri, str(self._path), other_model=self._other_model, told=self._told, unneeded=lambda: trying.over
        )

    def give_up(self) -> None:
        """Wait until boards that try the profile are put back, and name each with what became of it."""
        trying = self._trying
        if trying is None or not trying.begun:
            self._told("the profile was set on no board")
            return
        try:
            if len(trying.answers) < len(trying.begun):
                self._told("boards that try the profile are put back; another Ctrl-C does not wait for that")
            trying.stop()
        finally:
            self._tell_what_was_tried(trying)

    def _tell_what_was_tried(self, trying: "_Asked[CanaryTest]") -> None:
        unsure = []
        for uri in trying.begun:
            answer = trying.answers.get(uri)
            if answer is None:
                words = "not known to be put back"
            elif answer.error is None or isinstance(answer.error, TrialError):
                words = "put back: as it was found"
            else:
                words = answer.words
            if not words.startswith("put back"):
                unsure.append(uri)
            self._told(f"{uri}: {words}")
        if unsure:
            self._told(f"look there again with {_restoring(unsure)}")

    def _answering(self, devices: Sequence[str], share: int) -> list[str]:
        """Return the first boards, so many, that answer and are of the profile's kind; nothing is set on any."""
        waiting = list(devices)
        chosen: list[str] = []
        while waiting and len(chosen) < share:
            asked = waiting[: share - len(chosen)]
            del waiting[: len(asked)]
            for answer in at_once(asked, self._looked_at, SET_WITHIN_S):
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
            return f"it is worse on {worse[0].uri}: {worse[0].why}"
        if unsure := [each for each in tests if each.worse is None]:
            left = " and ".join(unsure[0].open)
            count = len(unsure[0].comparison.pairs)
            return f"{count} pairs of windows on {unsure[0].uri} do not show that it is no worse: {left} is not known"
        if 2 * len(tests) <= asked:  # of those that tried it, most have to have come to an end
            lost = next(iter(self.failed))
            return f"it could not be tried to the end: {lost.uri}: {lost.words}"
        return ""

    @property
    def failed(self) -> tuple[BoardOutcome, ...]:
        """The boards that did not answer, or dropped out of the trial."""
        return tuple(BoardOutcome(uri, error=error) for uri, error in self.errors.items())

    def outcomes(self, devices: Sequence[str]) -> tuple[BoardOutcome, ...]:
        """Return what has become of every board where nothing is applied to any."""
        return tuple(BoardOutcome(uri, error=self.errors.get(uri)) for uri in devices)


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
        check_uri(uri)
    # They come as boards answer, and are told in the order in which the user named them.
    answers = {answer.uri: answer for answer in at_once(devices, ask, SET_WITHIN_S)}
    return tuple(answers[uri] for uri in devices)


def _in_order(devices: Sequence[str], answers: Iterable[Answer[Applied]]) -> tuple[BoardOutcome, ...]:
    found = {each.uri: BoardOutcome(each.uri, each.found, each.error) for each in answers}
    return tuple(found[uri] for uri in devices)
