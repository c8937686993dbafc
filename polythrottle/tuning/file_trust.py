"""What a profile or a journal may name by itself: it may come from a stranger, and names devices, programs and files.

This machine's own devices are compared with what the file was made on. Anything else that would be steered is the
user's to name, and what is run is said before it runs. What lies in the state folder this user has written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from polythrottle.backends import check_named
from polythrottle.backends.device_uri import uris_in, with_files_read
from polythrottle.backends.meters import meter_apart, unmetered
from polythrottle.domain.clock import VirtualClock
from polythrottle.domain.errors import BadFile, InvalidInput, StorageError
from polythrottle.domain.ports import Device, Inspectable
from polythrottle.domain.study import Study
from polythrottle.domain.units import show_name
from polythrottle.storage.identity import disagreement, identity_of
from polythrottle.storage.paths import state_dir
from polythrottle.storage.untrusted import printable

if TYPE_CHECKING:
    # A plan comes with the search methods and so with NumPy, which neither restoring nor the daemon at rest loads.
    from polythrottle.tuning.plan import StudyPlan


def is_own(file: Path) -> bool:
    """Return whether a file lies in the state folder, where nobody but this user writes."""
    try:
        # Links resolved: one in the state folder may lead to what somebody else writes.
        return state_dir().resolve() in (file.resolve(), *file.resolve().parents)
    # What cannot be told to be the user's own is treated as a stranger's.
    except (StorageError, OSError):
        return False


def check_device(file: Path, uri: str) -> None:
    """Refuse the device of a file that is not this machine's own, such as a tree of files, where nobody has named it.

    Args:
        file: A profile or a journal.
        uri: Of the device it names.

    Raises:
        InvalidInput: If the user has to name it.
    """
    if not is_own(file):
        for each in uris_in(uri):
            check_named(each, file)


def checked_plan(journal: Path, plan: StudyPlan, device: str | None, out: Path | None) -> StudyPlan:
    """Return the plan of a journal with the device and the profile's place that the user names, if any.

    Args:
        journal: The study's file.
        plan: As the journal has it.
        device: URI that the user names; None for the journal's.
        out: Place of the profile that the user names; None for the journal's, beside it or among this user's own.

    Raises:
        InvalidInput: If the user has to name one of them.
    """
    if device is None:
        check_device(journal, plan.setup.device)
    else:
        plan = replace(plan, setup=replace(plan.setup, device=with_files_read(device)))
    if out is not None:
        return replace(plan, out=out)
    near = plan.out is None or is_own(plan.out) or plan.out.resolve().parent == journal.resolve().parent
    if not near and not is_own(journal):
        raise InvalidInput(f"{journal} would have its profile written to {plan.out}; say where it goes: --out FILE")
    return plan


def begun_on(plan: StudyPlan, device: Device) -> StudyPlan:
    """Return a plan that says which hardware its study is begun on, where that tells of itself."""
    inner = unmetered(device)
    if isinstance(inner, Inspectable):
        return replace(plan, identity=identity_of(inner))
    return plan


def accept_resumed(
    journal: Path, study: Study, plan: StudyPlan, device: str | None, told: Callable[[str], object]
) -> Callable[[Device], None]:
    """Return what looks at each device of a study that is resumed, before its meter and the workload are opened.

    What the journal has run is told once, on however many boards.

    Args:
        journal: The study's file.
        study: As it stands there.
        plan: What is intended with it.
        device: URI that the user has named; None if it is the journal's.
        told: Called with what is run because the journal names it.
    """
    already: set[str] = set()
    turn = threading.Lock()  # several boards are opened at once

    def accept(board: Device) -> None:
        check_begun_on(journal, study, plan, board)
        line = announcement(journal, board, plan.setup.workload, None if device else plan.setup.device)
        with turn:
            if line and line not in already:
                already.add(line)
                told(line)  # before anything of it is run, on whichever board

    return accept


def check_begun_on(journal: Path, study: Study, plan: StudyPlan, device: Device) -> None:
    """Refuse to go on with a study on other hardware or firmware than it was begun on.

    Args:
        journal: The study's file.
        study: As it stands there.
        plan: What is intended with it.
        device: The one that is here.

    Raises:
        BadFile: If it differs; says how.
    """
    if isinstance(device.clock, VirtualClock):
        return  # a simulated board or a recorded table is known by its content
    if plan.identity and (other := disagreement(plan.identity, identity_of(device))) is not None:
        raise BadFile(f"{journal} was begun on {other}; begin a new study here")
    known = {knob.name: set(knob.levels) for knob in study.problem.space.knobs}
    strange = [knob.name for knob in device.space.knobs if known.get(knob.name) != set(knob.levels)]
    if strange:
        names = ", ".join(map(show_name, strange))
        raise BadFile(f"{journal} is the journal of another problem: {device.title} has other levels of {names}")


def announcement(file: Path, device: Device, workload: str | None, uri: str | None) -> str:
    """Return what is run because a file names it, as a line; empty where nothing is.

    Args:
        file: A profile or a journal.
        device: That the work runs on; on a simulated board no workload does.
        workload: Its URI; None if the user has named it.
        uri: Of the device, with its meter if it has one; None if the user has named it.
    """
    named = []
    if workload and not isinstance(device.clock, VirtualClock):
        named.append(workload)
    if meter := meter_apart(uri)[1] if uri else "":
        named.append(f"the meter {meter}")
    if not named:
        return ""
    # Whole, however long: what is cut off is what somebody would hide.
    return f"running what {file} names: {' and '.join(map(printable, named))}"
