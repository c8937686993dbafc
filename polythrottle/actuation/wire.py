"""The line between the privileged actuator and those who ask it: one JSON object per line over a Unix stream socket.

A request has ``v`` (version, 1), ``id`` (a whole number of the asker's choice), ``verb`` and the verb's fields, in at
most 16 KiB; its answer comes in at most 4 MiB and in the order of the requests::

    {"v": 1, "id": 7, "verb": "take", "device": "jetson", "seconds": 30}
    {"v": 1, "id": 7, "answer": {"token": "…", "seconds": 30.0, "resumed": false, "point": {}}}
    {"v": 1, "id": 8, "error": {"kind": "KnobRejected", "words": "…"}}

Types are strict: true is no number, NaN and Infinity are refused, so are a key given twice, a key that the verb does
not have, and anything nested deeper than 8. A line that is no request is answered with ``id`` null; one that is too
long also ends the connection. ``kind`` is a class of `polythrottle.domain.errors`, or one of this module's:
`LeaseOver` (the token is not or no longer good), `Lent` (a study has the board), `Later` (with ``after_s``: too many
writes, or too much is asked at once). A client (`polythrottle.actuation.client.connection.Line`) raises them again as
what they were.

Who asks is told by the kernel (SO_PEERCRED), what they may by the administrator's permits. ``device`` is a URI the
actuator serves, or "" where it serves only one. Times are seconds. A point is ``{knob: level}``, in SI, of the device's
own knobs; those left out go to their default. The verbs:

``hello`` {}
    → ``versions`` [1], ``polythrottle``, ``pid``, ``you`` {uid, name}, ``read`` and ``control`` (lists of the URIs you
    may read, or set), ``most_s`` 60, ``writes_per_s`` 10, ``burst`` 20.
``devices`` {}
    → ``devices`` [{uri, title, control (whether you may set it), holder (who has it; "" if nobody), lent}].
``describe`` {device}
    → ``uri``, ``title``, ``identity`` {name: text}, ``energy_kind``, ``boundary``, ``sensor`` (fields of
    `Sensor`, where the device's files say how it averages), ``presets`` {name: point},
    ``findings`` [{subject, works, explanation, remedy}], ``knobs`` [{name, levels, label, default, searched}]: every
    knob that works here, with the levels you may set; ``searched`` is whether it is searched unless asked otherwise.
``space`` {device, knobs (list of names, or null: those searched)}
    → ``size``, ``default`` {knob: level}, ``knobs`` [{name, levels, label}], ``rows`` (base64 of zlib of little-endian
    32-bit indices, as a journal keeps them): the points you may set. Takes seconds; see `space_from`.
``take`` {device, seconds, holder (text for people), token (optional: of the lease you had)}
    → ``token``, ``seconds``, ``resumed``, ``point``. Makes you the only one who sets the device, for ``seconds`` (at
    most 60) unless renewed. With the token of a lease that still runs, and the same user, that lease goes on under a
    new token, the old one is void, and ``point`` is what holds; without it a second one is refused with the holder's
    name. ``point`` is empty while the board is as found. After the actuator was started again every token is
    unknown and the board as found: ``take`` with the old token then gives a lease of its own, ``resumed`` false.
``renew`` {token, seconds}
    → ``seconds``, ``lent`` (whether a loan of this lease runs). Also renews a loan, with the loan's token.
``apply`` {token, point}
    → ``point`` (as it holds), ``took_s``. At most 10 a second, 20 in a burst, else `Later`. `Lent` while a loan runs.
``read`` {device}
    → ``time_s`` (monotonic clock of the machine), ``energy_j`` (running total, never falls while the actuator lives),
    ``temperature_c`` (or null), ``clocks_hz`` {domain: Hz}, ``throttled``; where known ``cause`` (why, in
    words), ``cuts``, ``cut_s`` and ``overrun`` (see `Reading`). Needs no lease, only the right to read.
``verify`` {token}
    → ``knobs`` [names]: those that no longer hold what was applied last. Empty while nothing is applied.
``restore`` {token}
    → ``left`` [texts]: what is left as somebody else has set it. Everything as found; the lease goes on. `Lent` while a
    loan runs.
``release`` {token}
    → ``left`` and ``owed``: what could not be put back and is tried again until it can, "" if nothing; in ``left`` too.
    Everything as found and the lease ended. With a loan's token: the loan alone, the lender sets again. With a token
    whose lease or loan has ended by itself since: what it has left.
``lend`` {token, seconds, holder}
    → ``token``, ``seconds``. Another process of the same user sets the device under this second token, which it renews
    itself (at most 60 s at once), while the lender's `apply` is refused. Your own lease must be renewed as before:
    with it the loan ends. A second ``lend`` while one runs is refused.
``take_back`` {token}
    → ``left``. Ends the loan at once, board as found; the lender's token.

A lease or loan that is not renewed in time ends by itself: the board is as found again. Closing the connection alone
ends nothing: whoever comes back in time presents the token. A call under a token that takes half a second or more puts
the end off by as much, once until it is renewed, for its holder cannot renew meanwhile; nobody else's calls do.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

from polythrottle.domain.errors import (
    ERRORS,
    DeviceError,
    KnobAbsent,
    PolythrottleError,
    error_named,
)
from polythrottle.domain.space import SearchSpace
from polythrottle.storage.space_codec import space_from_document

VERSION = 1
MOST_REQUEST = 16 * 1024
MOST_ANSWER = 4 * 1024 * 1024
"""The longest request and the longest answer, in bytes, the newline included."""
MOST_S = 60.0
"""The longest a lease or a loan lasts without being renewed."""


class LeaseOver(DeviceError):
    """The token is not good, or no longer: take a new lease."""


class Lent(DeviceError):
    """A loan of the lease runs, so its lender does not set the device."""


class Later(DeviceError):
    """Too much was asked at once.

    Args:
        words: For people.
        after_s: When to ask again, in seconds.
    """

    def __init__(self, words: str, after_s: float = 1.0) -> None:
        super().__init__(words)
        self.after_s = after_s


_KINDS: Mapping[str, type[PolythrottleError]] = {
    **ERRORS,
    **{kind.__name__: kind for kind in (LeaseOver, Lent, Later)},
}


def error_line(err: PolythrottleError) -> dict[str, Any]:
    """Return an error as it travels."""
    kind = next(each.__name__ for each in type(err).__mro__ if _KINDS.get(each.__name__) is each)
    line: dict[str, Any] = {"kind": kind, "words": str(err)}
    if isinstance(err, KnobAbsent):
        return {**line, "knob": err.knob}
    if isinstance(err, Later):
        return {**line, "after_s": err.after_s}
    return line


def error_from(line: Any) -> PolythrottleError:
    """Return the error that has travelled as a line; a `DeviceError` if it is of no kind known here."""
    fields = line if isinstance(line, dict) else {}
    words = str(fields.get("words", "no reason was given"))
    kind = str(fields.get("kind"))
    if kind == Later.__name__:
        return Later(words, float(fields.get("after_s", 1.0)))
    if kind == KnobAbsent.__name__:
        return KnobAbsent(words, str(fields.get("knob", "")))
    return error_named(kind, words, _KINDS)


def space_from(answer: Mapping[str, Any]) -> SearchSpace:
    """Return the search space that an answer holds.

    Raises:
        DeviceError: If it holds none.
    """
    try:
        return space_from_document(answer)
    except (KeyError, TypeError, ValueError, zlib.error, PolythrottleError) as err:
        raise DeviceError(f"the actuator's answer makes no search space: {err}") from err
