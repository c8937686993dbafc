"""From the daemon's settings to a control loop that is ready to run, the only one on its state folder."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from polythrottle.actuation.client.board import ActuatorBoard, Board, LocalBoard, SeparateLender
from polythrottle.actuation.server.unix_socket import check_path
from polythrottle.actuation.systemd import Supervisor
from polythrottle.backends.meters import meter_apart
from polythrottle.backends.served_devices import check_form, offers_of, served_uri
from polythrottle.catalog.tuned_profiles import find_profile, read_profile
from polythrottle.daemon.budgets import Carbon, check_power
from polythrottle.daemon.control.events import GPU_CLOCK, Bounds
from polythrottle.daemon.control.power_sharing import HostPower
from polythrottle.daemon.energy_accounts import Accounts
from polythrottle.daemon.followed_profile import (
    FollowedProfile,
    changed,
    check_absolute,
    check_kind,
    plan_of,
    read_tuned,
    untuned,
)
from polythrottle.daemon.history_store import HistoryStore
from polythrottle.daemon.hosted_study import HostedStudies, by_host
from polythrottle.daemon.loop.mailbox import Mailbox
from polythrottle.daemon.loop.node import Node
from polythrottle.daemon.loop.runner import LoopComponents, Runner
from polythrottle.daemon.loop.service_power_split import Member, SharedPower, WholeMeter
from polythrottle.daemon.observation import Traffic
from polythrottle.daemon.settings import ServiceSettings, Settings, check, check_devices
from polythrottle.daemon.study_process import Lender, Studies
from polythrottle.daemon.traffic.proxy_prompts import BoardClocks, PromptSource
from polythrottle.daemon.traffic.sources import open_traffic
from polythrottle.daemon.trainer_monitor import TrainerMonitor
from polythrottle.domain.clock import Clock, SystemClock, WakingClock
from polythrottle.domain.errors import (
    DeviceError,
    InvalidInput,
    PermissionDenied,
    PolythrottleError,
    StorageError,
    UnknownName,
    reworded,
)
from polythrottle.domain.ports import Device, Recorded
from polythrottle.domain.problem import Constraint
from polythrottle.domain.space import BATCH_SIZE
from polythrottle.storage.identity import identity_by_name, named_hardware
from polythrottle.storage.paths import ACTUATOR_SOCKET, socket_path, state_dir
from polythrottle.storage.untrusted import own_error
from polythrottle.tuning.file_trust import check_device

if TYPE_CHECKING:
    from polythrottle.daemon.pods.residents import PodService, Residents
    from polythrottle.daemon.traffic.simulated import SimulatedSite

# From what a daemon was told to a control loop that is ready to turn: first what words and files alone can tell.


def check_words(settings: Settings) -> None:
    """Check all that can be told without a board, a state folder or a network: before anything takes time.

    What is wrong with one of several services is left to `build_node`, which leaves it out.

    Raises:
        PolythrottleError: If what was told cannot be: says what, and what would do.
    """
    check(settings)
    if settings.socket is not None:
        check_path(settings.socket)
    for text in settings.slo:
        Constraint.parse(text)
    if settings.budget is not None and settings.budget.carbon is not None:
        Carbon.read(Path(settings.budget.carbon))
    for job in settings.finetune:
        if job.exists() and not job.is_dir():
            raise InvalidInput(f"{job} is a file; --finetune takes the folder of a job, or of several")
    if settings.node.meter is not None and not settings.node.meter.startswith("sim:"):
        from polythrottle.backends.meters.metered_device import check_kind

        check_kind(settings.node.meter)
    if not settings.services:
        device, workload = _asked(settings)
        _check_site(settings, device, workload)
        _check_power(settings)


def _check_power(settings: Settings) -> None:
    if settings.budget is None or settings.budget.power_w is None or settings.profile is None:
        return
    if (ladder := plan_of(read_profile(find_profile(settings.profile))).ladder) is not None:
        check_power(settings.budget.power_w, ladder)


def _check_site(settings: Settings, device: str | None, workload: str) -> None:
    text = settings.traffic or _LATELY
    if text.startswith("sim:"):
        if settings.actuator is not None:
            raise InvalidInput(f"{text} comes with a board of its own, which no actuator sets; leave --actuator out")
        site = _simulated_site(settings, device, workload, SystemClock())
        _tuned(settings, workload, identity_by_name(site.board.uri))
        return
    open_traffic(text).close()
    own = meter_apart(settings.device or "")[0]
    if own:
        check_form(own if settings.local else served_uri(own))


def _simulated_site(settings: Settings, device: str | None, workload: str, clock: Clock) -> SimulatedSite:
    text = str(settings.traffic)
    if not (device or "").startswith("sim:"):
        raise InvalidInput(f"{text} makes up requests for a simulated board; give --device sim:<board>")
    if not workload:
        raise InvalidInput("say what the simulated board serves: --profile, or --workload")
    from polythrottle.daemon.traffic.simulated import open_site

    return open_site(text, str(device), workload, clock, _batches(settings))


_LATELY = "report"
_POWER_LIMIT = "power_limit_w"
_CLOCKS_S = 2.0  # the control loop itself waits for this answer


@dataclass(frozen=True)
class Site:
    """A board, the requests that come to it, who lends it, what it says it is, and which clocks it has."""

    board: Board
    traffic: Traffic
    lender: Lender
    identity: Callable[[], Mapping[str, str]]
    clocks: Callable[[], BoardClocks]


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Be the only daemon that keeps its state in a folder.

    Raises:
        DeviceError: If another does.
        StorageError: If the folder cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(folder / "daemon.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StorageError(f"{folder} cannot be used: {error.strerror}; see POLYTHROTTLE_STATE_DIR") from error
    try:
        try:
            # The kernel drops the lock with the process, however that ends: no stale lock is to be removed by hand.
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DeviceError(
                f"another daemon keeps its state in {folder}; end it with polythrottle daemon stop, "
                "or set POLYTHROTTLE_STATE_DIR to another folder"
            ) from None
        yield
    finally:
        os.close(handle)


def build(
    settings: Settings,
    clock: Clock,
    desk: Mailbox,
    supervisor: Supervisor | None = None,
    version: str = "",
    wall: Callable[[], float] = time.time,
    folder: Path | None = None,
    study_waits: Callable[[], str] = str,
    accept: Callable[[Board], object] = lambda board: None,
) -> tuple[Runner, HistoryStore]:
    """Return a control loop, and its record for the API to read; nothing is set before it turns.

    Args:
        settings: What it was told.
        clock: It goes by.
        desk: Where it is met.
        supervisor: The service manager, if there is one.
        version: Of polythrottle.
        wall: Wall time, seconds since the epoch.
        folder: Where its state is kept; by default the state folder.
        study_waits: Returns why no study may begin now; empty if one may.
        accept: Is called with the board, which is known by then, before it is set; raises if it will not do.

    Raises:
        PolythrottleError: If what it was told cannot be: says what, and what would do.
    """
    check(settings)
    folder = folder or state_dir()
    device, workload = _asked(settings)
    site = _site(settings, device, workload, clock, folder)
    tuned, unfit = _tuned(settings, workload, site.identity())
    accept(site.board)
    record = HistoryStore(folder / "daemon.db", wall)
    accounts = Accounts(record, wall, settings.allowance)
    hosted: HostedStudies | None = None
    studies: Studies
    if by_host(settings.study):
        studies = hosted = HostedStudies(
            folder, site.lender, record, clock, late_left=accounts.late_left, studied=accounts.studied
        )
        study_waits = partial(_waits_for_host, hosted, study_waits)
    else:
        studies = Studies(folder, site.lender, record, clock, late_left=accounts.late_left, studied=accounts.studied)
    parts = LoopComponents(
        clock,
        site.board,
        site.traffic,
        desk,
        record,
        accounts,
        studies,
        settings.guards,
        settings.slo,
        site.identity,
        wall,
        supervisor=supervisor or Supervisor({}),
        version=version,
        finetuning=TrainerMonitor((folder / "finetune", *settings.finetune), wall),
        clocks=site.clocks,
        study_waits=study_waits,
    )
    if isinstance(site.traffic, PromptSource) and isinstance(clock, WakingClock):
        site.traffic.on_news(clock.wake)
    runner = Runner(parts, tuned)
    if hosted is not None:
        _bind(hosted, runner)
    if unfit:
        runner.unfit(unfit)
    if settings.budget is not None and not accounts.goes_on(settings.budget):  # a restart fills up no battery
        runner.commands.answer(settings.budget)
    for job in settings.finetune:
        if not job.is_dir():
            runner.events.tell("finetuning", f"there is no folder {job} yet; it is looked for")
    runner.go_on()
    return runner, record


def _waits_for_host(studies: HostedStudies, waits: Callable[[], str]) -> str:
    return waits() or studies.no_host()


def _bind(studies: HostedStudies, runner: Runner) -> None:
    """Let studies that wait for a host know what the control loop wants, and go on with one from before."""
    studies.wanted = lambda: runner.executor.state.study_wanted
    studies.want = runner.executor.want_study
    studies.tell = runner.events.tell
    studies.go_on()


def build_node(
    settings: Settings,
    clock: Clock,
    desk: Mailbox,
    supervisor: Supervisor | None = None,
    version: str = "",
    wall: Callable[[], float] = time.time,
    ends: ExitStack | None = None,
) -> tuple[Node, HistoryStore]:
    """Return the control loop of a server of services, and its record; nothing is set before it turns.

    Args:
        settings: What it was told; a service alone, if there are no tables of services, shares with nobody.
        clock: It goes by.
        desk: Where the server as a whole is met.
        supervisor: The service manager, if there is one.
        version: Of polythrottle.
        wall: Wall time, seconds since the epoch.
        ends: Takes what ends the meter.

    Raises:
        PolythrottleError: If what it was told cannot be for any service: says of which, and what would do. Where it
            can be for some, the others are left out and told of.
    """
    check(settings)
    folder = state_dir()
    services, left_out = _apart(settings.services)
    host = HostPower(settings.node.rest_w)
    meter, accept = _whole_meter(settings.node.meter, ends)
    node: list[Node] = []  # for members ask the node, which is made after them
    member = partial(_member, settings=settings, clock=clock, version=version, wall=wall, node=node, accept=accept)
    holders: dict[str, str] = {}

    def apart(service: ServiceSettings) -> Member:
        held = dict(holders)
        found = member(service, folder / "services", accept=partial(_take_gpus, held, service.name, accept))
        holders.update(held)  # what is left out keeps no GPU from the services after it
        return found

    if settings.services:
        members = _members(services, left_out, apart)
    else:
        members = [member(_alone(settings), folder / "services")] if settings.kubernetes is None else []
    guests = None
    if settings.kubernetes is not None:
        guests = _residents(settings, member, clock, folder / "pods")
    record = HistoryStore(folder / "daemon.db", wall)
    node.append(
        Node(
            members,
            SharedPower(settings.node.power_w, host, meter),
            clock=clock,
            desk=desk,
            record=record,
            wall=wall,
            supervisor=supervisor,
            version=version,
            left_out=(*settings.left_out, *(f"service {name} is left out: {why}" for name, why in left_out.items())),
            guests=guests,
        )
    )
    return node[0], record


def _member(
    service: ServiceSettings,
    folder: Path,
    *,
    settings: Settings,
    clock: Clock,
    version: str,
    wall: Callable[[], float],
    node: Sequence[Node],
    accept: Callable[[Board], object],
) -> Member:
    """Return a service with a control loop, a mailbox and a folder of its own, below one for all services."""
    mailbox = Mailbox()
    kept = folder / service.name
    runner, record = build(
        settings.of_service(service),
        clock,
        mailbox,
        version=version,
        wall=wall,
        folder=kept,
        study_waits=partial(_waits, node, service.name),
        accept=accept,
    )
    if isinstance(clock, WakingClock):
        mailbox.on_wish(clock.wake)
    return Member(service.name, service.weight, runner, mailbox, record, service.most_w, kept)


def _whole_meter(text: str | None, ends: ExitStack | None) -> tuple[WholeMeter | None, Callable[[Board], object]]:
    """Return the meter of the whole server, and what is to be called with the board of each service."""
    if text is None:
        return None, lambda board: None
    if text.startswith("sim:"):
        from polythrottle.daemon.traffic.simulated import NodeMeter

        simulated = NodeMeter.of(text)
        return simulated, simulated.add
    from polythrottle.backends.meters.metered_device import open_meter

    meter = open_meter(text)
    if ends is not None:
        ends.enter_context(meter.sampling())
    return meter, lambda board: None


def _take_gpus(holders: dict[str, str], name: str, accept: Callable[[Board], object], board: Board) -> None:
    """Note which GPUs a service has, by the UUIDs that its board says: ``nvml:0`` and ``nvml:GPU-…`` may be one.

    Raises:
        InvalidInput: If another service has one of them; ``holders`` has the service of each GPU.
    """
    gpus = {each for each in named_hardware(board.uri) if each.startswith("GPU-")}
    if gpu := min(gpus & set(holders), default=""):
        board.release()
        raise InvalidInput(f"its device has {gpu}, which is of service {holders[gpu]}; a device serves one service")
    accept(board)
    holders.update(dict.fromkeys(gpus, name))


def _members(
    services: Sequence[ServiceSettings],
    left_out: dict[str, PolythrottleError],
    member: Callable[[ServiceSettings], Member],
) -> list[Member]:
    """Return the services that can be looked after, and enter why each other one is left out.

    Raises:
        PolythrottleError: If none can.
    """
    members = []
    for each in services:
        try:
            members.append(member(each))
        except (PolythrottleError, OSError) as error:
            left_out[each.name] = own_error(error)
    if not members:
        name, refused = next(iter(left_out.items()))
        raise reworded(refused, f"service {name}: {refused}") from refused
    return members


def _residents(
    settings: Settings, member: Callable[[ServiceSettings, Path], Member], clock: Clock, folder: Path
) -> Residents:
    """Return who makes services of pods, and begin to follow those.

    Raises:
        PolythrottleError: If gRPC is not installed, or it is not known where the cluster's API is.
    """
    from polythrottle.daemon.pods.kubernetes import ClusterApi, Kubelet
    from polythrottle.daemon.pods.residents import PodTracker, PodWatch, Residents

    told = settings.kubernetes
    assert told is not None
    tracker = PodTracker(Kubelet(told.kubelet), ClusterApi(told.api), SystemClock())
    watch = PodWatch(tracker, SystemClock(), clock.wake if isinstance(clock, WakingClock) else lambda: None)
    return Residents(watch, lambda pod: member(service_of(pod, told.profiles, settings.guards), folder), clock, folder)


def service_of(pod: PodService, profiles: Path, guards: Bounds) -> ServiceSettings:
    """Return a pod as a service.

    Args:
        pod: Which.
        profiles: Folder of the profiles that it may name.
        guards: Limits of every pod.

    Raises:
        UnknownName: If there is no such profile.
    """
    profile = profiles / f"{pod.wish.profile}.toml"
    if not os.path.isfile(profile):
        raise UnknownName("profile", pod.wish.profile, (each.stem for each in profiles.glob("*.toml")))
    power_w = pod.wish.power_w
    if power_w is not None:
        # A pod may tighten the administrator's limit and never lift it.
        guards = replace(guards, power_w=power_w if guards.power_w is None else min(power_w, guards.power_w))
    return ServiceSettings(
        name=pod.name,
        profile=str(profile),
        device=pod.device,
        traffic=pod.traffic,
        slo=pod.wish.slo,
        guards=guards,
        weight=pod.wish.weight,
    )


def _waits(node: Sequence[Node], name: str) -> str:
    """Return why no study of a service may begin now; none may before there is a node to ask."""
    if not node:
        return "the daemon has not started yet"
    return node[0].study_waits(name)


def _alone(settings: Settings) -> ServiceSettings:
    """Return the one service of settings without tables of them."""
    return ServiceSettings(
        name="service",
        profile=settings.profile,
        workload=settings.workload,
        device=settings.device,
        traffic=settings.traffic,
        slo=settings.slo,
        guards=settings.guards,
    )


def _apart(services: Sequence[ServiceSettings]) -> tuple[list[ServiceSettings], dict[str, PolythrottleError]]:
    """Return the services that have no device in common with one before, and why each other one is left out."""
    devices: dict[str, str] = {}
    kept = []
    left_out: dict[str, PolythrottleError] = {}
    for each in services:
        try:
            device = each.device
            if device is None and each.profile is None:
                raise InvalidInput("the key device is missing; write for example device = 'nvml:0' in its [[service]]")
            if device is None and each.profile is not None:
                device = meter_apart(read_profile(find_profile(each.profile)).device)[0]
            if device is not None:
                check_devices({**devices, each.name: device})
                devices[each.name] = device
            kept.append(each)
        except (PolythrottleError, OSError) as error:
            left_out[each.name] = own_error(error)
    return kept, left_out


def _asked(settings: Settings) -> tuple[str | None, str]:
    """Return device and workload: as said, or as the profile has them."""
    if settings.profile is None:
        return settings.device, settings.workload or ""
    check_absolute(settings.slo)
    path = find_profile(settings.profile)
    profile = read_profile(path)
    if settings.device is None:
        check_device(path, profile.device)
    if settings.workload not in (None, profile.workload):
        raise InvalidInput(f"the profile is of {profile.workload}, not of {settings.workload}; leave --workload out")
    return settings.device or meter_apart(profile.device)[0], profile.workload


def _batches(settings: Settings) -> set[int]:
    """Return the batches that the profile will ask for."""
    if settings.profile is None:
        return set()
    profile = read_profile(find_profile(settings.profile))
    points = [profile.point, *(rung.service.point for rung in (profile.ladder.rungs if profile.ladder else ()))]
    return {int(point[BATCH_SIZE]) for point in points if BATCH_SIZE in point}


def _site(settings: Settings, device: str | None, workload: str, clock: Clock, folder: Path) -> Site:
    text = settings.traffic or _LATELY
    if text.startswith("sim:"):
        simulated = _simulated_site(settings, device, workload, clock)
        lender = SeparateLender(simulated.board.uri)
        return Site(
            simulated.board,
            simulated.traffic,
            lender,
            partial(identity_by_name, simulated.board.uri),
            partial(clocks_of, simulated.device),
        )
    traffic = open_traffic(text)
    simulated_alone = (device or "").startswith("sim:") and settings.actuator is None
    if settings.local or simulated_alone:
        if device is None:
            raise InvalidInput("say which device: --device, or --profile")
        settable = _settable(device)
        local = LocalBoard(settable, clock)
        lent: Lender = SeparateLender(local.uri) if local.uri.startswith("sim:") else local
        return Site(local, traffic, lent, local.identity, partial(clocks_of, settable))
    if settings.device is not None and meter_apart(settings.device)[1]:
        raise InvalidInput("the actuator reads the device's own sensors; ?meter= goes with --no-actuator")
    socket = settings.actuator or socket_path(ACTUATOR_SOCKET)
    board = ActuatorBoard(socket, settings.device, folder / "lease.token", clock, settings.lease_s)
    return Site(board, traffic, board, board.identity, partial(_clocks_behind, socket, settings.device))


def clocks_of(device: Device) -> BoardClocks:
    """Return which clocks of its GPU a device may be set to; none if it has no such knob."""
    offers = {offer.knob.name: (offer.knob.levels, offer.default) for offer in offers_of(device)}
    if not offers:
        offers = {knob.name: (knob.levels, device.space.default[knob.name]) for knob in device.space.knobs}
    levels, _ = offers.get(GPU_CLOCK, ((), 0))
    others = {_POWER_LIMIT: offers[_POWER_LIMIT][1]} if _POWER_LIMIT in offers else {}
    return BoardClocks(tuple(int(level) for level in levels), others)


def _clocks_behind(socket: Path, device: str | None) -> BoardClocks:
    """Return likewise of the device behind an actuator.

    Raises:
        PolythrottleError: If it cannot be asked.
    """
    from polythrottle.backends.remote import RemoteDevice

    return clocks_of(RemoteDevice(socket, device or "", patience_s=_CLOCKS_S))


def _settable(uri: str) -> Device:
    """Return a device with every knob that this process may set.

    Raises:
        PermissionDenied: If it may set none.
        PolythrottleError: If there is no such device.
    """
    from polythrottle.backends.served_devices import open_served

    device = open_served(uri)
    if not isinstance(device, Recorded) and not device.space.names:
        raise PermissionDenied(
            f"this process may set nothing on {device.uri}: run it as root, or leave --no-actuator out and let "
            "polythrottle daemon actuator set the board"
        )
    return device


def _tuned(settings: Settings, workload: str, identity: Mapping[str, str]) -> tuple[FollowedProfile | None, str]:
    """Return what is followed, and why that is not the profile that was asked for; empty if it is."""
    if settings.profile is None:
        return (untuned(workload, settings.guards, settings.slo) if workload else None), ""
    path = find_profile(settings.profile)
    profile = read_profile(path)
    if words := changed(profile):
        check_kind(profile, identity)
        return untuned(workload, settings.guards, settings.slo or profile.slo, str(path)), words
    return read_tuned(settings.profile, identity, settings.guards, settings.slo), ""
