"""What the actuator answers to each verb: the fields a request must have.

The answer within the rights of whoever asks.
"""

from __future__ import annotations

import os
import sys
import time
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polythrottle.actuation.actuator import acting_for
from polythrottle.actuation.audit import Audit
from polythrottle.actuation.restore import restore_all, standing
from polythrottle.actuation.server.device_lease import BURST, WRITES_PER_S, ServedDevice, Term, TokenBucket
from polythrottle.actuation.server.permits import Permits, Rights, allowed
from polythrottle.actuation.server.search_space_child import Job, SpaceJob
from polythrottle.actuation.server.unix_socket import Peer
from polythrottle.actuation.state.lease import boot_s
from polythrottle.actuation.state.site import Site
from polythrottle.actuation.systemd import restore_handed_back
from polythrottle.actuation.wire import MOST_S, VERSION, Later, LeaseOver
from polythrottle.backends.served_devices import on_record, part_uri
from polythrottle.domain.backports import removeprefix, removesuffix
from polythrottle.domain.errors import (
    DeviceError,
    InvalidInput,
    PermissionDenied,
    PolythrottleError,
    StorageError,
    UnknownName,
)

# Requests: which fields each verb has, and that they are what they should be.

_LONGEST = 1000
_MOST_KNOBS = 64
_HIGHEST_ID = 2**53


@dataclass(frozen=True)
class Request:
    """A request whose fields are sound.

    Args:
        verb: What is asked.
        fields: Every field of the verb; None where it was left out.
    """

    verb: str
    fields: Mapping[str, Any]

    @property
    def text(self) -> Mapping[str, str]:
        """The fields that are text, "" where they were left out."""
        return {name: each for name, each in self.fields.items() if isinstance(each, str)}


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str) or len(value) > _LONGEST or not value.isprintable():
        raise InvalidInput(f"{name} must be a text of at most {_LONGEST} printable characters")


def _seconds(name: str, value: Any) -> None:
    if type(value) not in (int, float) or not 0 < value <= MOST_S:
        raise InvalidInput(f"{name} must be a number above 0 and at most {MOST_S:g}")


def _point(name: str, value: Any) -> None:
    if not isinstance(value, dict) or len(value) > _MOST_KNOBS:
        raise InvalidInput(f"{name} must be an object of at most {_MOST_KNOBS} knobs, each with its level")
    for knob, level in value.items():
        if type(level) not in (int, float, str):
            raise InvalidInput(f"the level of {knob[:60]!r} must be a number or a name")


def _names(name: str, value: Any) -> None:
    if not isinstance(value, list) or len(value) > _MOST_KNOBS or not all(isinstance(each, str) for each in value):
        raise InvalidInput(f"{name} must be a list of at most {_MOST_KNOBS} names")


Check = typing.Callable[[str, Any], None]
_DEVICE: Mapping[str, Check] = {"device": _text}
_TOKEN: Mapping[str, Check] = {"token": _text}
_NEEDED: Mapping[str, Mapping[str, Check]] = {
    "hello": {},
    "devices": {},
    "describe": _DEVICE,
    "space": _DEVICE,
    "take": {**_DEVICE, "seconds": _seconds},
    "renew": {**_TOKEN, "seconds": _seconds},
    "apply": {**_TOKEN, "point": _point},
    "read": _DEVICE,
    "verify": _TOKEN,
    "restore": _TOKEN,
    "release": _TOKEN,
    "lend": {**_TOKEN, "seconds": _seconds},
    "take_back": _TOKEN,
}
_OPTIONAL: Mapping[str, Mapping[str, Check]] = {
    "space": {"knobs": _names},
    "take": {"holder": _text, "token": _text},
    "lend": {"holder": _text},
}
VERBS = tuple(_NEEDED)


def number_of(message: Mapping[str, Any]) -> int | None:
    """Return the id of a message, None if it has none that is a whole number."""
    number = message.get("id")
    if type(number) is int and 0 <= number <= _HIGHEST_ID:
        return number
    return None


def request_from(message: Mapping[str, Any], more: Mapping[str, Mapping[str, Check]] | None = None) -> Request:
    """Return the request a message makes.

    Args:
        message: As it came in.
        more: Verbs besides the usual ones, with the fields they have; each may be left out.

    Raises:
        InvalidInput: If the version is not this one, or a field is missing, too many, or not what it should be.
        UnknownName: If there is no such verb.
    """
    version = message.get("v")
    verb = message.get("verb")
    if type(version) is not int or version != VERSION:
        told = version if type(version) is int else "none"
        raise InvalidInput(
            f"this actuator speaks version {VERSION}, the request is of version {told}; update the older one"
        )
    if number_of(message) is None:
        raise InvalidInput("id must be a whole number, not negative")
    own = more or {}
    if not isinstance(verb, str) or (verb not in _NEEDED and verb not in own):
        raise UnknownName("verb", str(verb)[:60], (*VERBS, *own))
    given = {name: value for name, value in message.items() if name not in ("v", "id", "verb")}
    return Request(verb, _fields(verb, given, own))


def _fields(verb: str, given: Mapping[str, Any], own: Mapping[str, Mapping[str, Check]]) -> Mapping[str, Any]:
    needed = {} if verb in own else _NEEDED[verb]
    optional = own[verb] if verb in own else _OPTIONAL.get(verb, {})
    if missing := [name for name in needed if name not in given]:
        raise InvalidInput(f"{verb} needs {', '.join(missing)}")
    if odd := [name[:60] for name in given if name not in needed and name not in optional]:
        raise InvalidInput(f"{verb} has no field {', '.join(map(repr, odd[:3]))}")
    for name, value in given.items():
        if name in needed or value is not None:
            {**needed, **optional}[name](name, value)
    return {**dict.fromkeys((*needed, *optional)), **given}


# What the actuator answers to each verb, within the rights of whoever asks.

_ASKED_PER_S = 100.0
_ASKED_BURST = 400
_NOTED_PER_S = 0.2
_NOTED_BURST = 50
_MOST_USERS = 256
_MOST_JOBS = 2
_MOST_PARTS = 32
_SLOW_S = 0.5


class Service:
    """The devices that are served, and the answers.

    Args:
        uris: Of the devices, as they are served.
        permits: Of the administrator.
        now_s: The clock that leases go by; the boot clock by default.
    """

    put_back_within_s = 0.0
    """How long another actuator may take to put back what it has set, once its client has lost it."""

    def __init__(self, uris: Sequence[str], permits: Permits, now_s: Callable[[], float] = boot_s) -> None:
        self._audit = Audit(Site.of("actuator").audit, "actuator")
        self.holdings = [ServedDevice(uri, self._note, now_s) for uri in dict.fromkeys(uris)]
        self._whole: dict[ServedDevice, ServedDevice] = {}
        self._permits = permits
        self._now_s = now_s
        self._paces: dict[int, TokenBucket] = {}
        self._noted = TokenBucket(_NOTED_PER_S, _NOTED_BURST)
        self._jobs: list[SpaceJob] = []
        self._inherited = False
        self._put_back_by_s: dict[str, float] = {}
        """By when what a lease of another actuator has set should be put back, by the lease's token."""
        self._stalled_s: float | None = None
        self._verbs: Mapping[str, Callable[[Peer, Request], dict[str, Any] | Job]] = {
            "hello": self._hello,
            "devices": self._devices,
            "describe": self._describe,
            "space": self._space,
            "take": self._take,
            "renew": self._renew,
            "apply": self._apply,
            "read": self._read,
            "verify": self._verify,
            "restore": self._restore,
            "release": self._release,
            "lend": self._lend,
            "take_back": self._take_back,
        }

    def _note(self, number: int, event: str) -> None:
        self._audit.note(number, event)

    def request(self, message: Mapping[str, Any]) -> Request:
        """Return the request a message makes.

        Raises:
            PolythrottleError: If it makes none; says why.
        """
        return request_from(message)

    def start(self) -> list[str]:
        """Put back what an actuator that was killed has left, and return what could not be.

        A profile that somebody has applied by hand, and a device that another process steers, are left alone.
        """
        left = restore_handed_back()
        try:
            Site.of("actuator").prepare()
            left += [text for text in _put_back_inherited() if text not in left]
        except (StorageError, DeviceError) as err:
            left.append(str(err))
        self._inherited = bool(left)
        return left

    def refuse(self, peer: Peer) -> str:
        """Return why a peer may not ask anything; empty if it may."""
        if self._permits.knows(peer):
            return ""
        if not self._noted.wait_s(time.monotonic()):
            self._note(0, f"refused {peer} (user {peer.uid})")
        return f"user {peer.name} may not ask here; the group polythrottle may read; permits.toml says who may set"

    def holds(self, peer: Peer) -> bool:
        """Return whether a device is leased or lent to this process."""
        return any(holding.terms.held_by(peer) for holding in self.holdings)

    def answer(self, peer: Peer, request: Request) -> dict[str, Any] | Job:
        """Return the answer to a request, or the job that makes it.

        Raises:
            PolythrottleError: If it is refused; says why.
        """
        self._check_pace(peer)
        self.tick()
        started_s = self._now_s()
        try:
            return self._verbs[request.verb](peer, request)
        finally:
            took_s = self._now_s() - started_s
            self._put_off(peer, request.text.get("token", ""), took_s)
            if took_s >= _SLOW_S and self._stalled_s is None:
                self._stalled_s = started_s

    def _put_off(self, peer: Peer, token: str, took_s: float) -> None:
        """Let no lease run out over a slow call of its own holder, such as one that switches the power mode."""
        if took_s < _SLOW_S or not any(holding.terms.has(token) for holding in self.holdings):
            return
        for holding in self.holdings:
            holding.terms.put_off(took_s, token, peer)

    def _check_pace(self, peer: Peer) -> None:
        if peer.uid == 0:
            return
        if len(self._paces) > _MOST_USERS:
            self._paces.clear()
        after_s = self._paces.setdefault(peer.uid, TokenBucket(_ASKED_PER_S, _ASKED_BURST)).wait_s(time.monotonic())
        if after_s:
            raise Later(f"user {peer.name} asks too much at once; again in {after_s:.2g} s", after_s)

    @property
    def stalled(self) -> bool:
        """Whether a slow call has kept everybody waiting, so that nobody could renew a lease meanwhile."""
        return self._stalled_s is not None

    def catch_up(self, waiting: Sequence[Peer]) -> None:
        """Go on after a slow call: who has asked meanwhile lives, and its lease is put off by what the call took.

        Args:
            waiting: Whose requests have come in during the call and are not answered yet.
        """
        if self._stalled_s is None:
            return
        took_s = self._now_s() - self._stalled_s
        self._stalled_s = None
        for holding in self.holdings:
            for peer in waiting:
                holding.terms.put_off(took_s, "", peer)

    def tick(self) -> None:
        """End what has run out; after a slow call only once those have been heard who hold something."""
        if self.stalled:
            return
        for holding in self.holdings:
            holding.tick()

    @property
    def next_s(self) -> float | None:
        """When `tick` has something to do next, on the clock of the leases; None if never."""
        return min((each.next_s for each in self.holdings if each.next_s is not None), default=None)

    def close(self) -> list[str]:
        """Put everything back, for good, also what could not be before; return what is left."""
        left: list[str] = []
        for holding in self.holdings:
            try:
                left += holding.close()
            except (PolythrottleError, OSError) as err:  # the others are put back all the same
                left.append(f"{holding.uri}: {err}")
        if self._inherited:
            try:
                left += [text for text in _put_back_inherited() if text not in left]
            except (StorageError, DeviceError) as err:
                left.append(str(err))
        return left

    def _rights(self, peer: Peer, holding: ServedDevice) -> Rights:
        return self._permits.rights(peer, self._whole.get(holding, holding).names)

    def _named(self, peer: Peer, name: str, *, control: bool = False) -> tuple[ServedDevice, Rights]:
        """Return the device of a name and what the peer may do with it.

        Raises:
            UnknownName: If none of that name is served, or not to this peer.
            PermissionDenied: If it may be read but not set.
            PolythrottleError: If it is a part of a group that cannot be served now.
        """
        seen = {each: rights for each in self.holdings if (rights := self._rights(peer, each)).read or rights.control}
        alone = len(self.holdings) - len(self._whole) == 1
        found = [each for each in seen if each.answers_to(name) or (not name and alone and each not in self._whole)]
        if not found:
            found = self._parted(name, [each for each in seen if each not in self._whole])
        if not found:
            raise UnknownName("device of this actuator", name, [each.uri for each in seen])
        rights = self._rights(peer, found[0])
        if control and not rights.control:
            raise PermissionDenied(f"the administrator's permits let {peer.name} read {found[0].uri} but not set it")
        if not control and not rights.read:
            raise PermissionDenied(f"the administrator's permits do not let {peer.name} read {found[0].uri}")
        return found[0], rights

    def _parted(self, name: str, wholes: Sequence[ServedDevice]) -> list[ServedDevice]:
        """Return some of the GPUs of a group that is served, as a device of their own; nothing if they are none.

        Whoever may set all of them may set some, as a pod's; each GPU has its own lease, so that none has two holders.

        Raises:
            PolythrottleError: If it is some of them, and they cannot be served now; says why.
        """
        refused: PolythrottleError | None = None
        for whole in wholes:
            try:
                uri = part_uri(name, whole.uri)
            except PolythrottleError as err:
                refused = err
                continue
            if not uri:
                continue
            known = [each for each in self._whole if each.uri == uri]
            if known:
                return known
            idle = [each for each in self._whole if each.idle]
            for each in idle[: max(0, len(self._whole) + 1 - _MOST_PARTS)]:
                each.close()
                self.holdings.remove(each)
                del self._whole[each]
            if len(self._whole) >= _MOST_PARTS:
                raise DeviceError(f"{_MOST_PARTS} groups of GPUs are held at once; no more are served")
            part = ServedDevice(uri, self._note, self._now_s)
            self.holdings.append(part)
            self._whole[part] = whole
            return [part]
        if refused is not None:
            raise refused
        return []

    def _term(self, peer: Peer, request: Request) -> tuple[ServedDevice, Term]:
        """Return the device and the lease or loan that a request's token is of.

        Raises:
            LeaseOver: If it is of none.
            PermissionDenied: If it is another user's, or the permits have changed.
        """
        for holding in self.holdings:
            if (term := holding.terms.term(request.text["token"], peer)) is not None:
                return holding, term
        raise LeaseOver("the lease is over; take the device again")

    def _own(self, peer: Peer, request: Request) -> tuple[ServedDevice, Term]:
        """Return the device and the lease, which is to be the peer's own and no loan.

        Raises:
            LeaseOver: If the token is of no lease.
            PermissionDenied: If it is of a loan.
        """
        holding, term = self._term(peer, request)
        if term is not holding.terms.lease:
            raise PermissionDenied(f"only who has taken the device may {request.verb} it, not who was lent it")
        return holding, term

    def _hello(self, peer: Peer, request: Request) -> dict[str, Any]:
        rights = {each.uri: self._rights(peer, each) for each in self.holdings}
        return {
            "versions": [VERSION],
            "polythrottle": _version(),
            "pid": os.getpid(),
            "you": {"uid": peer.uid, "name": peer.name},
            "read": [uri for uri, each in rights.items() if each.read],
            "control": [uri for uri, each in rights.items() if each.control],
            "most_s": MOST_S,
            "writes_per_s": WRITES_PER_S,
            "burst": BURST,
        }

    def _devices(self, peer: Peer, request: Request) -> dict[str, Any]:
        return {"devices": [line for each in self.holdings if (line := self._device_line(peer, each))]}

    def _device_line(self, peer: Peer, holding: ServedDevice) -> dict[str, Any]:
        rights = self._rights(peer, holding)
        title = ""
        if not rights.read:
            return {}
        with suppress(PolythrottleError):  # one that is not there is listed all the same
            title = holding.description()["title"]
        terms = holding.terms
        return {
            "uri": holding.uri,
            "title": title,
            "control": rights.control,
            "holder": terms.lease.holder if terms.lease is not None else "",
            "lent": terms.loan is not None,
        }

    def _describe(self, peer: Peer, request: Request) -> dict[str, Any]:
        holding, rights = self._named(peer, request.text["device"])
        told = holding.description()
        return {**told, "knobs": [_permitted(knob, rights) for knob in told["knobs"]]}

    def _space(self, peer: Peer, request: Request) -> SpaceJob:
        holding, rights = self._named(peer, request.text["device"])
        self._jobs = [each for each in self._jobs if not each.over]
        if len(self._jobs) >= _MOST_JOBS:
            raise Later("other search spaces are being computed; ask again", 1.0)
        self._jobs.append(SpaceJob(holding.uri, request.fields["knobs"], rights.spans if rights.control else ({},)))
        return self._jobs[-1]

    def _take(self, peer: Peer, request: Request) -> dict[str, Any]:
        holding, _ = self._named(peer, request.text["device"], control=True)
        text = request.text
        holder = text.get("holder", "")
        # Whom the device's own lock names to others: the number of this process says nothing of who has it set.
        with acting_for(self._known_as(peer, holder)):
            return holding.take(peer, holder, float(request.fields["seconds"]), text.get("token"))

    def _known_as(self, peer: Peer, holder: str) -> str:
        """Return who steers a device through this, for others who want it."""
        return f"{holder or 'somebody'}, {peer}, through the actuator"

    def _renew(self, peer: Peer, request: Request) -> dict[str, Any]:
        holding, term = self._term(peer, request)
        return holding.renew(term, float(request.fields["seconds"]))

    def _apply(self, peer: Peer, request: Request) -> dict[str, Any]:
        holding, _ = self._term(peer, request)
        return holding.apply(request.text["token"], peer, request.fields["point"], self._rights(peer, holding))

    def _read(self, peer: Peer, request: Request) -> dict[str, Any]:
        return self._named(peer, request.text["device"])[0].read()

    def _verify(self, peer: Peer, request: Request) -> dict[str, Any]:
        return {"knobs": list(self._term(peer, request)[0].altered())}

    def _restore(self, peer: Peer, request: Request) -> dict[str, Any]:
        holding, _ = self._term(peer, request)
        holding.terms.setter(request.text["token"], peer)
        return {"left": list(holding.restore())}

    def _release(self, peer: Peer, request: Request) -> dict[str, Any]:
        try:
            holding, term = self._term(peer, request)
        except LeaseOver:
            return self._account_of(peer, request.text["token"])
        if term is holding.terms.loan:
            return {"left": list(holding.end_loan(f"given back by {term.holder}")), "owed": ""}
        holding.end(f"given back by {term.holder}")
        return holding.account()

    def _account_of(self, peer: Peer, token: str) -> dict[str, Any]:
        """Return what a lease or a loan has left that ended before its holder gave it back.

        Raises:
            LeaseOver: If none is known, and everything is as it was found.
            Later: If something stands changed that whoever has set it may still be putting back.
            DeviceError: If none is known, as to an actuator that has begun anew, and something stands changed.
        """
        for holding in self.holdings:
            if holding.terms.had(token, peer):
                return holding.account()
        left = _put_back_inherited() if self._inherited else []
        stands = []
        names = {name for holding in self.holdings if holding.terms.lease is None for name in on_record(holding.uri)}
        for each in standing():  # of another actuator, which lives on where a connection alone was lost
            if each.device in names and each.keys and not (each.lease.applied or each.lease.kept):
                stands.append(f"{each.device} stands as {each.lease.holder} has set it: {', '.join(each.keys)}")
        if stands:
            self._await_put_back(token)
        left += stands
        if left:
            raise DeviceError(f"the lease is over, and not everything is as it was found: {'; '.join(left)}")
        raise LeaseOver("the lease is over; take the device again")

    def _await_put_back(self, token: str) -> None:
        """Have somebody ask again for a while: who has set it has lost the connection too, and puts it back just now.

        Raises:
            Later: Until that should be done.
        """
        now_s = self._now_s()
        if len(self._put_back_by_s) > _MOST_USERS:
            self._put_back_by_s.clear()
        if now_s < self._put_back_by_s.setdefault(token, now_s + self.put_back_within_s):
            after_s = self.put_back_within_s / 4  # so that a client that is patient hears the end
            raise Later("the lease is over, and what it has set is being put back; ask again", after_s)

    def _lend(self, peer: Peer, request: Request) -> dict[str, Any]:
        holding, _ = self._own(peer, request)
        return holding.lend(peer, request.text.get("holder", ""), float(request.fields["seconds"]))

    def _take_back(self, peer: Peer, request: Request) -> dict[str, Any]:
        holding, _ = self._own(peer, request)
        return {"left": list(holding.end_loan("taken back") if holding.terms.loan is not None else ())}


def _put_back_inherited() -> list[str]:
    """Put back what stands changed and is nobody's, and return what cannot be.

    Raises:
        StorageError: If the records cannot be trusted or read.
    """
    left = []
    for each in standing():
        if each.lease.applied or each.lease.kept or each.lease.alive:
            continue
        try:
            for outcome in restore_all(device=each.device):
                left += [str(text) for text in (*outcome.foreign, *outcome.failed, *outcome.damage)]
        except UnknownName:
            continue  # its guard was quicker
        except PolythrottleError as err:
            left.append(str(err))
    return left


def _permitted(knob: Mapping[str, Any], rights: Rights) -> dict[str, Any]:
    """Return a knob with the levels that may be set."""
    name = knob["name"]
    usual = knob["default"]
    spans = rights.spans if rights.control else ({},)
    levels = [each for each in knob["levels"] if each == usual or any(allowed(every, name, each) for every in spans)]
    return {**knob, "levels": levels}


def _version() -> str:
    """Return the installed version; without importlib.metadata, which takes megabytes."""
    folders = (Path(folder or ".") for folder in sys.path)
    found = (each.name for folder in folders for each in folder.glob("polythrottle-*.dist-info"))
    return removesuffix(removeprefix(next(found, ""), "polythrottle-"), ".dist-info")
