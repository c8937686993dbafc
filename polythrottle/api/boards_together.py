"""Tuning on several boards of one kind that search together."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from polythrottle.api.experiments import Watcher, study_progress
from polythrottle.api.outcome import Tuning, conclude
from polythrottle.backends.at_once import at_once, uris_in
from polythrottle.backends.meters import unmetered
from polythrottle.backends.ssh import SshDevice
from polythrottle.domain.errors import InvalidInput, PolythrottleError
from polythrottle.domain.ports import Device, Optimizer, Recorded, Workload
from polythrottle.domain.space import OperatingPoint
from polythrottle.domain.study import Study
from polythrottle.inspect.many_boards import Kind
from polythrottle.optimize import Options, make_optimizer
from polythrottle.optimize.options import WarmStart
from polythrottle.storage.boards_journal import BOARDS, BoardsJournal
from polythrottle.storage.identity import INDIVIDUAL, identity_of
from polythrottle.tuning.file_trust import accept_resumed, begun_on
from polythrottle.tuning.open_board import OpenBoard
from polythrottle.tuning.plan import StudyPlan
from polythrottle.tuning.remarks import beforehand
from polythrottle.tuning.setup import Setup
from polythrottle.tuning.several_boards import SharedStudy
from polythrottle.tuning.study_store import PriorStudies, check_same_problem, open_study, recalled

WITHIN_S = 300.0
"""How long a board may take to be opened, with its workload."""
_LEAST_BESIDES = 2
"""Trials besides the default of each board: one to find something, and one to confirm it."""
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


def several_in(setup: Setup) -> tuple[str, ...]:
    """Return the boards that a setup names, if there is more than one.

    Raises:
        InvalidInput: If one is named twice.
    """
    if setup.objects.device is not None:
        return ()
    found = uris_in(setup.device)
    if len(found) > 1:
        return found
    return ()


def method_of(
    study: Study,
    where: tuple[Device, Workload],
    plan: StudyPlan,
    past: PriorStudies,
    watcher: Watcher,
    own: Optimizer | None = None,
) -> Optimizer:
    """Return the search method of a study, which tries the points of other profiles first if there are any.

    Args:
        study: Names it.
        where: A device, whose presets it may use, and the workload there.
        plan: Holds the risk, and the points of other profiles.
        past: Earlier studies to learn from.
        watcher: Is told of such points.
        own: A search method that was given as an object.
    """
    board, served = where
    presets = tuple(OperatingPoint({**served.space.default, **point}) for point in board.presets.values())
    optimizer = own or make_optimizer(study.method, Options(past.studies, plan.risk, presets))
    if not plan.priors:
        return optimizer
    primed = WarmStart(optimizer, plan.priors)
    watcher.told(primed.words(study.problem.space))
    return primed


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
    _check(asked.plan, len(asked.uris))
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
    _check(plan, len(uris))
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
        for answer in at_once(uris, open_one, WITHIN_S):
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
    return {name: text for name, text in identity_of(device).items() if name in INDIVIDUAL & {"uuid", "serial"}}


def _check(plan: StudyPlan, boards: int) -> None:
    if plan.errors is not None:
        raise InvalidInput("an error budget is for one board; leave --error-budget out, or name one device")
    if plan.objects:
        raise InvalidInput("boards that search together are opened by their URIs, as is what they serve")
    if plan.budget.trials < boards + _LEAST_BESIDES:
        raise InvalidInput(
            f"{boards} boards need {boards + _LEAST_BESIDES} trials at least, not {plan.budget.trials}: each measures "
            "the default point first"
        )


def _of_all(study: Study, uris: Sequence[str]) -> Study:
    """Return a study whose problem says which boards search together, so that no other study is taken for it."""
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
    for line in (*past.words(kept.study.problem), *beforehand(kept.study)):
        watcher.told(line)
    first = boards[0]
    optimizer = method_of(kept.study, (first.device, first.served), plan, past, watcher, own)
    shared = SharedStudy(boards, optimizer, kept, plan.budget, plan.rule)
    with contextlib.closing(shared.search()) as events:
        for event in events:
            if isinstance(event, Study):
                watcher.changed(event)
            else:
                watcher.told(event)
    return conclude(kept, first.device, plan, past, force)
