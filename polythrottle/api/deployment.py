"""Leave a tuned profile on a device, let it stand, and give the device back: through the daemon where it holds it."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polythrottle.actuation import restore as restoring
from polythrottle.actuation.restore import Standing
from polythrottle.actuation.rollback import Outcome
from polythrottle.backends import DeviceURI
from polythrottle.backends.served_devices import (
    all_restored,
    check_roots,
    confirmed,
    on_record,
    roots_of,
    trust_roots,
    unchanged_gpus,
    uuids_of,
)
from polythrottle.backends.ssh import SshBoard, is_ssh
from polythrottle.board.link import Place, forwarded_socket
from polythrottle.domain.errors import (
    BadFile,
    DeviceError,
    InvalidInput,
    PermissionDenied,
    PolythrottleError,
    UnknownName,
)
from polythrottle.domain.profile import Profile
from polythrottle.domain.space import OperatingPoint
from polythrottle.storage.identity import content_digest
from polythrottle.storage.paths import DAEMON_SOCKET
from polythrottle.tuning.apply import Applied, LeftInPlace, Stay, apply_profile, split_point, stay_of
from polythrottle.tuning.file_trust import check_device

if TYPE_CHECKING:
    from polythrottle.api.tuning_result import Tuning
    from polythrottle.daemon.client import Client
    from polythrottle.daemon.status import Status

Told = Callable[[str], object]
_PATIENCE_S = 30.0


@dataclass(frozen=True)
class DaemonReply:
    """What the daemon did with its device, in its words.

    Args:
        device: URI of the device.
        through: Where the daemon was reached.
        words: What it did.
        clean: Whether what it gave back is as it was found.
    """

    device: str
    through: str
    words: str
    clean: bool = True


@dataclass(frozen=True)
class Followed:
    """A profile that the daemon follows from now on.

    Args:
        said: What it answered.
        profile: The profile's file.
        point: The device's knobs; None where the load decides which of several points is set.
        served: The workload's knobs, to be set where the model is served; likewise.
        rungs: How many points there are for the load to decide among; None if there is one.
        simulated: Whether there is no hardware behind it.
        stay: When it reverts unless it is confirmed.
    """

    said: DaemonReply
    profile: str
    point: OperatingPoint | None
    served: OperatingPoint | None
    rungs: int | None
    simulated: bool
    stay: Stay


@dataclass(frozen=True)
class Restored:
    """What giving devices back came to.

    Args:
        outcomes: Of each device that stood changed.
        released: What the daemon said of the device it holds; None if none holds one of these.
    """

    outcomes: tuple[Outcome, ...] = ()
    released: DaemonReply | None = None

    @property
    def clean(self) -> bool:
        """Whether everything is as it was found."""
        return all(outcome.clean for outcome in self.outcomes) and (self.released is None or self.released.clean)


def apply(
    profile: "str | Path | Profile | Tuning",
    device: str | None = None,
    *,
    confirm_within_s: float | None = None,
    lasting: str | None = None,
    keep: bool = False,
    other_model: bool = False,
    daemon: bool = True,
    told: Told = lambda line: None,
) -> Applied | Followed:
    """Set a tuned profile's device knobs and leave them in place; they revert by themselves unless confirmed.

    Knobs of the workload, such as batch size, are returned as ``served``: they are to be set where the model is served.

    Args:
        profile: Its file, ``<device>/<workload>``, a profile, or what `tune` returned.
        device: Device URI; the one the profile was tuned on if None.
        confirm_within_s: Seconds after which it reverts unless `confirm` is called; if None, 60, or never where
            ``lasting`` or ``keep`` is given.
        lasting: How long it stands then, such as ``2h``; until a restore or a reboot if None.
        keep: Whether it stands without confirmation.
        other_model: Whether to apply it although the model's file is not as it was when it was tuned.
        daemon: Whether to have the daemon follow the profile where it holds the device.
        told: Called with each line a user should read.

    Returns:
        What stands now, or what the daemon follows.

    Raises:
        UnknownName: If there is no such profile.
        BadFile: If it is for other hardware or firmware, for levels the device does not have, or for a model whose file
            has changed since.
        InvalidInput: If ``lasting`` and ``keep`` are both given, or the device is a recorded table, or one elsewhere,
            such as a tree of files, that the profile's file names and ``device`` does not.
        DeviceError: If the device cannot be steered, is held by another, or cannot be left changed; or if it is
            interrupted, and what may stand by then cannot be put back.
    """
    stay = stay_of(confirm_within_s, lasting, keep)
    path, found = _opened(profile)
    if not other_model:
        _check_same_model(found)
    if device is None and path is not None and isinstance(profile, str | Path):  # not what this process has tuned
        check_device(path, found.device)
    held = None
    if daemon:
        target = device
        if target is None:
            target = found.device
        held = _follower(target, told)
    if held is None:
        try:
            return apply_profile(found, stay, device)
        except LeftInPlace as err:
            _take_back(err.uri, told)
            raise
    if path is None:
        raise InvalidInput("the daemon holds the device and reads profiles itself; give the profile's file")
    return _follow(held.client, held.status, found, path, stay)


def _take_back(uri: str, told: Told) -> None:
    """Put back what an interrupted `apply` may have left in place.

    Raises:
        DeviceError: If that fails, or is interrupted once more; says how to put it back.
    """
    left = "interrupted once more"
    try:
        told(f"interrupted; {uri} is put back")
        found: tuple[Outcome, ...] = ()
        with suppress(UnknownName):  # it was not left in place yet, or its guard was faster
            found = restore(uri, daemon=False).outcomes
        left = "; ".join(line for outcome in found for line in outcome.left)
    except PolythrottleError as err:
        left = str(err)
    except KeyboardInterrupt:
        pass
    if left:
        back = f"polythrottle restore --device {shlex.quote(uri)}"
        raise DeviceError(f"interrupted, and the profile may stand: {left}; put it back with {back}")


def confirm(
    device: str | None = None, *, daemon: bool = True, told: Told = lambda line: None
) -> tuple[Standing, ...] | DaemonReply:
    """Let stand what was applied before.

    Args:
        device: Only this one, by its URI or its name on record; everything if None.
        daemon: Whether to ask the daemon where it waits for a confirmation.
        told: Called with each line a user should read.

    Returns:
        What stands now, or what the daemon said.

    Raises:
        DeviceError: If nothing waits to be confirmed, or the guard that would revert it is gone.
    """
    if is_ssh(device):
        with closing(_board(device)) as board:
            return board.confirm_all()
    said = None
    if daemon:
        said = _confirmed_by_daemon(device, told)
    if said is not None:
        return said
    return confirmed(on_record(device))


def restore(
    device: str | None = None, *, force: bool = False, daemon: bool = True, told: Told = lambda line: None
) -> Restored:
    """Put back everything that stands changed; what could not be put back is in the outcomes.

    Where the daemon holds the device, it puts it back and leaves it alone until it is told to take it again.

    Args:
        device: Only this one, by its URI or its name on record; everything if None.
        force: Whether to end a living holder's hold, and to undo what others have changed since.
        daemon: Whether to go through the daemon; never with ``force``.
        told: Called with each line a user should read.

    Raises:
        DeviceError: If a device is being steered by a living process and ``force`` is not given.
        StorageError: If the records cannot be trusted or read.
        UnknownName: If nothing stands for the device named.
        InvalidInput: If the folder of a planted board that is named is not there, and nothing stands for it.
    """
    if is_ssh(device):
        with closing(_board(device)) as board:
            return Restored(board.restore_all(force=force))
    if device is not None:
        trust_roots(device)
    released = None
    whole = False
    if daemon and not force:
        released, whole = _released(device, told)
    if released is None:
        return Restored(all_restored(_concerned(device), force=force))
    names: Sequence[str | None] = _concerned(device)
    if whole:  # what it held is back; a GPU beside it may be meant as well
        names = [each for each in _beside_daemon() if device is None or each in names]
    try:
        return Restored(all_restored(names, force=False), released)
    except PolythrottleError:
        # The error that follows would leave untold what the daemon has put back.
        told(f"{released.device}: {released.words}")
        raise


def _concerned(device: str | None) -> Sequence[str | None]:
    """Return the names on record of what is to be restored."""
    if device is None:
        return on_record(None)
    named = on_record(device) if restoring.concerned() else ()
    if unchanged_gpus(device, named):
        return ()
    check_roots(device, named)
    if not named and not restoring.remembered(device):
        _check_named(device)
    return named


def _beside_daemon() -> list[str]:
    """Return what the daemon does not hold, which is put back or told of here, unless one device was named."""
    names = [each.device for each in restoring.standing() if each.lease.applied or not each.lease.alive]
    return names + [each.device for each in restoring.left_behind()]


def _check_same_model(profile: Profile) -> None:
    """Refuse a profile whose model is here and has other content now; one that is served elsewhere nobody can check."""
    file = profile.model_path
    tuned = profile.model_digest
    if file is None or tuned is None or not file.is_file():
        return
    if (digest := content_digest(file)) != tuned:
        raise BadFile(
            f"{file} has changed since this profile was tuned for it: its content is {digest[:8]}, not {tuned[:8]}; "
            "tune again, or add --other-model (other_model=True) to apply it all the same"
        )


def _opened(profile: "str | Path | Profile | Tuning") -> tuple[Path | None, Profile]:
    """Return a profile and the file it is in, if it is in one."""
    from polythrottle.catalog.tuned_profiles import find_profile, read_profile

    if isinstance(profile, Profile):
        return None, profile
    if not isinstance(profile, str | Path):  # a tuning: its answer, or the profile that is better and stays
        if not hasattr(profile, "profile_path"):
            raise InvalidInput(f"a profile's file or name, a profile or a tuning can be applied, not {profile!r}")
        if profile.profile is None:
            raise InvalidInput(f"this tuning has no profile to apply: {profile.unmet}")
        if profile.profile_path is None:
            return None, profile.profile
        profile = profile.profile_path
    path = find_profile(str(profile))
    return path, read_profile(path)


@dataclass(frozen=True)
class _Holder:
    """Who holds a device: a daemon, or one of its services, with its status; ``name`` is the service's, "" without."""

    client: "Client"
    status: "Status"
    name: str = ""


def _holders(device: str | None, told: Told) -> tuple[_Holder, ...]:
    """Return the daemon that has a device, or those of its services that do; none if it does not answer.

    Args:
        device: Its URI; None for whatever the daemon holds.
        told: Called if one runs but may not be asked.
    """
    from polythrottle.daemon.client import Client, default_socket

    # Asked for first: without a daemon nobody should wait for a connection.
    if not default_socket().exists():
        return ()
    client = Client(timeout_s=_PATIENCE_S)
    try:
        status = client.status()
        if status.device == "node":
            return _services_with(client, device)
    except PermissionDenied as error:
        told(f"a daemon runs, but {error}; going on without it")
        return ()
    except DeviceError:  # its socket is left over, or it hangs: the device is reached without it
        return ()
    if device is None or _in_common(device, status.device):
        return (_Holder(client, status),)
    return ()


def _services_with(client: "Client", device: str | None) -> tuple[_Holder, ...]:
    """Return those services of a daemon that have a device, or a part of it; all of them for None."""
    from polythrottle.daemon.client import Client

    found = []
    for each in client.node().services:
        if device is None or _in_common(device, each.device):
            own = Client(timeout_s=_PATIENCE_S, service=each.name)
            with suppress(UnknownName):  # a pod that has gone meanwhile
                found.append(_Holder(own, own.status(), each.name))
    return tuple(found)


def same_device(one: str, other: str) -> bool:
    """Return whether two URIs mean one device: name and root agree, whatever a simulation's seed and noise are."""
    return _named(one) == _named(other)


def _in_common(one: str, other: str) -> bool:
    """Return whether two URIs, or one and a name on record, mean one device or have a GPU in common."""
    return same_device(one, other) or not _gpus(one).isdisjoint(_gpus(other))


def _gpus(uri: str) -> frozenset[str]:
    body = uri.partition("?")[0]
    if body.startswith(("nvml:", "nvml ")):  # on record it is "nvml GPU-…"
        return frozenset(uuids_of(body[5:]))
    return frozenset()


@contextmanager
def daemon_of_board(uri: str, socket: Path | None = None, service: str | None = None) -> "Iterator[Client]":
    """Yield the daemon that runs on a board over SSH.

    Args:
        uri: The board: ``ssh://[user@]host[:port]``.
        socket: Path of the daemon's socket there; None to look for it.
        service: Of several services the one that is meant.

    Raises:
        InvalidInput: If it is no board over SSH, or more than that.
        DeviceError: If the board cannot be reached, or no daemon listens there.
        PermissionDenied: If it does not let this user in.
    """
    from polythrottle.daemon.client import Client

    if not is_ssh(uri):
        raise InvalidInput(f"{uri!r} is no board over SSH, such as ssh://orin; --socket names a daemon of this machine")
    place = _place(uri)
    there = "" if socket is None else str(socket)
    with (
        forwarded_socket(place, DAEMON_SOCKET, there) as here,
        Client(here, service=service, called=place.where) as client,
    ):
        yield client


def install_on_board(
    uri: str, *, root: Path = Path("/"), sudo: bool = False, settings: Path | None = None, wheels: Path | None = None
) -> Mapping[str, Any]:
    """Install actuator, restorer and daemon on a board over SSH, for its own Python, and start what can be started.

    Args:
        uri: The board: ``ssh://[user@]host[:port][?python=…]``.
        root: Below which folder there.
        sudo: Whether to do it there through ``sudo``, which must not ask for a password.
        settings: A file here that becomes ``/etc/polythrottle/daemon.toml`` there; None to leave what is there.
        wheels: A folder here with the packages a daemon needs; None to fetch them.

    Returns:
        What `polythrottle.board.installation.install` does.

    Raises:
        PolythrottleError: If it cannot be; says why.
    """
    from polythrottle.board.installation import install, wheels_of
    from polythrottle.daemon.settings import check, read_settings

    text = None
    if settings is not None:
        wanted = read_settings(settings)
        check(wanted)
        if wanted.kubernetes is not None:
            raise InvalidInput(f"{settings}: [kubernetes] is for a daemon in a cluster, and not for one of a board")
        text = settings.read_text(encoding="utf-8")
    return install(_whole_board(uri, sudo), root=root, settings=text, wheels=wheels_of(wheels))


def uninstall_from_board(uri: str, *, root: Path = Path("/"), sudo: bool = False) -> Mapping[str, Any]:
    """Put a board over SSH back, and remove what `install_on_board` installed there; its arguments are the same.

    Raises:
        PolythrottleError: If it cannot be; says why.
    """
    from polythrottle.board.installation import uninstall

    return uninstall(_whole_board(uri, sudo), root=root)


def _whole_board(uri: str, sudo: bool) -> Place:
    if not is_ssh(uri):
        raise InvalidInput(f"{uri!r} is no board over SSH, such as ssh://orin")
    place = _place(uri)
    if place.device:
        raise InvalidInput(f"name the board alone, {place.where}: the daemon is for all of it")
    return replace(place, sudo=sudo or place.sudo)


def _board(uri: str) -> SshBoard:
    return SshBoard(_place(uri))


def _place(uri: str) -> Place:
    parsed = DeviceURI.parse(uri)
    return Place.parse(parsed.name, parsed.options)


def _named(uri: str) -> tuple[str, str]:
    body, _, query = uri.partition("?")
    roots = roots_of(query)
    if body.partition(":")[0] == "nvml":
        # A number, a UUID and another order name the same GPUs.
        body = f"nvml:{','.join(sorted(uuids_of(body.partition(':')[2])))}"
    return body, str(Path(roots[0]).resolve()) if roots else ""


def _follow(client: "Client", status: "Status", profile: Profile, path: Path, stay: Stay) -> Followed:
    if stay.then_s is not None:
        raise InvalidInput("the daemon keeps a profile until another is applied; leave --for out, or give --no-daemon")
    answer: Mapping[str, str] = client.apply(path, stay.within_s)
    own, served = split_point(profile)
    # One of its rungs is set, by the load, and not its one point.
    if profile.ladder is None:
        rungs = None
    else:
        rungs = len(profile.ladder.rungs)
    return Followed(
        said=DaemonReply(status.device, client.where, answer["words"]),
        profile=str(path),
        point=own if rungs is None else None,
        served=served if rungs is None else None,
        rungs=rungs,
        simulated=status.energy_kind == "simulated",
        stay=stay,
    )


def _follower(device: str, told: Told) -> _Holder | None:
    """Return who is to follow a profile for a device; None if nobody holds it.

    Raises:
        DeviceError: If services hold it that have other devices besides, or only some of its own.
    """
    holders = _holders(device, told)
    same = [each for each in holders if same_device(device, each.status.device)]
    if same:
        return same[0]
    names = ", ".join(f"{each.name} ({each.status.device})" for each in holders if each.name)
    if names:
        raise DeviceError(
            f"the daemon steers {device} for {names}, and a service follows a profile on all its devices: name those "
            f"of one service with --device, or have them given back first: polythrottle restore --device {device}"
        )
    return None


def _confirmed_by_daemon(device: str | None, told: Told) -> DaemonReply | None:
    """Have those confirm that wait for it; None if none of the daemon's services does."""
    said: dict[str, list[_Holder]] = {}
    holders = [each for each in _holders(device, told) if device is None or same_device(device, each.status.device)]
    for each in holders:
        try:
            said.setdefault(each.client.confirm()["words"], []).append(each)
        except PolythrottleError:
            # Of the others nothing waits, so that their refusal is no failure.
            if each.status.unconfirmed:
                raise
    return _joined(said)


def _released(device: str | None, told: Told) -> tuple[DaemonReply | None, bool]:
    """Have the daemon put back what it holds; where it cannot, that is said, and done without it.

    Returns:
        What it said, None if it did nothing; and whether it has put back all that it holds of this.
    """
    whole = True
    clean = True
    said: dict[str, list[_Holder]] = {}
    try:
        holders = _holders(device, told)
    except PolythrottleError as error:
        told(f"the daemon could not put it back: {error}")
        return None, False
    for each in holders:
        try:
            answer = each.client.release("polythrottle restore")
            said.setdefault(answer["words"], []).append(each)
            clean = clean and answer.get("clean", True)  # a daemon of an earlier version does not say
        except PolythrottleError as error:
            whole = False
            told(f"the daemon could not put {each.name or 'it'} back: {error}")
    reply = _joined(said)
    if reply is None:
        return None, whole
    if holders[0].name:
        again = "to have one set again: polythrottle top --service NAME, then r twice"
        reply = replace(reply, words=f"{reply.words}; {again}")
    return replace(reply, clean=clean), whole


def _joined(said: Mapping[str, Sequence[_Holder]]) -> DaemonReply | None:
    """Return as one what those said who hold devices, each once with the names of all services that said it."""
    everyone = [each for holders in said.values() for each in holders]
    if not everyone:
        return None
    first = everyone[0]
    if not first.name:
        return DaemonReply(first.status.device, first.client.where, next(iter(said)))
    words = "; ".join(f"{', '.join(each.name for each in holders)}: {words}" for words, holders in said.items())
    return DaemonReply(",".join(each.status.device for each in everyone), first.client.where, words)


def _check_named(device: str) -> None:
    """Refuse a name for which nothing stands and which no device has: a slip of the pen, and not what was changed.

    Raises:
        UnknownName: If there is no such scheme, simulated board or option; nothing is opened but a board's file.
        InvalidInput: If it is malformed.
    """
    from polythrottle.backends import DeviceURI
    from polythrottle.backends.device_uri import simulated_boards
    from polythrottle.backends.nvml import check_name
    from polythrottle.catalog import load_board

    scheme, _, name = device.partition(" ")
    if scheme in ("jetson", "cpu", "nvml") and name:  # as on record
        return
    uri = DeviceURI.parse(device)
    if uri.scheme == "sim":
        load_board(simulated_boards(uri)[0])
    elif uri.scheme == "nvml":
        check_name(uri.name)
    elif uri.scheme in ("auto", "cpu", "jetson") and uri.name:
        raise UnknownName("device", device, (uri.scheme,))
