"""Every error polythrottle raises on purpose, and the exit code each class has on the command line.

    PolythrottleError        1   anything below; never raised itself
    ├── InvalidInput         2   a text or value is malformed: an SLO, a unit, a URI, a level
    ├── UnknownName          3   no such device, workload, knob or preset; names the nearest
    ├── BadFile              4   a file is not what it should be: table, journal, catalogue entry, model
    ├── SloUnmet             5   no point that was tried holds the latency limit
    ├── DeviceError          6   the device cannot be reached or steered
    │   └── PermissionDenied     it could be with more rights; says which
    ├── TrialError           7   one trial is spoilt; the study goes on
    │   ├── KnobRejected         the device refused a level or did not keep it
    │   │   └── KnobAbsent       it does not have the knob at all, whatever the level
    │   └── Unanswered           a query got no answer in all the time it was given
    ├── Exhausted            1   every point has been tried; ends a study, never reaches a user
    ├── StorageError         8   a result cannot be written: disk full, read-only, no permission
    └── ClaimFailed          9   what was to be shown was not: a saving, or that nothing has become worse

Ctrl-C ends with `INTERRUPTED`. A message says what was wrong, what was expected, and what to do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells expect it: 128 and the number of SIGINT."""


class PolythrottleError(Exception):
    """The root of all errors raised on purpose."""

    exit_code = 1


class InvalidInput(PolythrottleError):
    """A text or value somebody gave is malformed."""

    exit_code = 2


class UnknownName(PolythrottleError):
    """A name that should be in a catalogue is not there.

    Args:
        kind: What it names.
        name: As it was given.
        known: The names there are: those that are near are offered, otherwise all.
        hint: What else helps.
        listed: Whether all are told where none is near; else the hint says what there is.
    """

    exit_code = 3

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "", *, listed: bool = True) -> None:
        names = sorted(known)
        near = get_close_matches(name, names, n=3, cutoff=0.6)
        if len(name) > 2:  # a name that was begun, however long its rest
            near += [each for each in names if each.startswith(name) and each not in near][:3]
        if near:
            offer = f"did you mean {' or '.join(near)}?"
        elif listed:
            offer = f"known: {', '.join(names) or 'none'}"
        else:
            offer = hint.strip("()")
            hint = ""
        if name or names:
            text = f"unknown {kind} {name!r}; {offer}"
            separator = " "
        else:
            text = f"there is no {kind} yet"
            separator = "; "
        if hint:
            text += separator + hint
        super().__init__(text)


class BadFile(PolythrottleError):
    """A file does not hold what it should."""

    exit_code = 4


class SloUnmet(PolythrottleError):
    """No point that was tried holds every constraint."""

    exit_code = 5


class DeviceError(PolythrottleError):
    """The device cannot be reached or steered."""

    exit_code = 6


class PermissionDenied(DeviceError):
    """The device could be steered with more rights than this process has."""


class TrialError(PolythrottleError):
    """One trial is spoilt; the study can go on without it."""

    exit_code = 7


class KnobRejected(TrialError):
    """The device refused a level, or did not keep it."""


class KnobAbsent(KnobRejected):
    """The device turned out not to have a knob at all; no other level of it is worth a trial.

    Args:
        words: What the device answered.
        knob: Its name.
    """

    def __init__(self, words: str, knob: str = "") -> None:
        super().__init__(words)
        self.knob = knob


class Unanswered(TrialError):
    """A query got no answer in all the time it was given; whoever asks again waits as long again."""


class StorageError(PolythrottleError):
    """A result cannot be written."""

    exit_code = 8


class ClaimFailed(PolythrottleError):
    """A saving that had to be proven was not, or a check found what it guards against."""

    exit_code = 9


class Exhausted(PolythrottleError):
    """Every point of the space has been tried; the study ends there."""


Kind = TypeVar("Kind", bound=PolythrottleError)
# Below the last class of the tree: one that stands further down would not travel by its name.
ERRORS: Mapping[str, type[PolythrottleError]] = {
    name: value for name, value in globals().items() if isinstance(value, type) and issubclass(value, PolythrottleError)
}
"""Every class of the tree by its name, as it travels between processes."""


def error_named(name: str, words: str, kinds: Mapping[str, type[PolythrottleError]] = ERRORS) -> PolythrottleError:
    """Return the error that another process has raised; a `DeviceError` if its class is not known here."""
    return _with_words(kinds.get(name, DeviceError), words)


def reworded(error: Kind, words: str) -> Kind:
    """Return an error of the same class with other words, such as those of who met it before them."""
    again = _with_words(type(error), words)
    # Such as the knob of a `KnobAbsent`, which decides what is tried next.
    again.__dict__.update(error.__dict__)
    return again


def _with_words(kind: type[Kind], words: str) -> Kind:
    error = kind.__new__(kind)
    Exception.__init__(error, words)  # not its own: some make their words out of parts that are not at hand
    return error


# What is no error, and yet is to be told at the end.

# Bounded: a long process, such as a notebook's, may never ask for them.
_left_here: deque[str] = deque(maxlen=200)


def note_left(device: str, lines: Iterable[object]) -> None:
    """Note what this process has left on a device as somebody else has set it, for whoever tells its user at the end.

    Args:
        device: Which.
        lines: What, a line each.
    """
    _left_here.extend(f"{device}: left {line}" for line in lines)


def left_here() -> tuple[str, ...]:
    """Return what this process has left as somebody else has set it, a line each, once."""
    # Each once, in the order of events: a restore that is tried again notes the same line again.
    lines = tuple(dict.fromkeys(_left_here))
    _left_here.clear()
    return lines
