"""`polythrottle apply` and `polythrottle restore`: leave a profile's settings in place, and give the device back."""

import contextlib
import math
import select
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polythrottle.cli.boards import confirm_several, end_rollout, print_rollout, restore_several, rollout_document
from polythrottle.cli.options import JsonOption, OtherModelOption, share
from polythrottle.cli.output import answer, complain, optional, own_stdout, say_which
from polythrottle.domain.clock import SystemClock
from polythrottle.domain.errors import DeviceError, InvalidInput, UnknownName
from polythrottle.storage.untrusted import printable

if TYPE_CHECKING:
    from polythrottle.actuation import Outcome
    from polythrottle.actuation.restore import Standing
    from polythrottle.api.deployment import DaemonReply, Followed, Restored
    from polythrottle.tuning.apply import Applied

# What commands say that went through the daemon, because it holds the device.

NoDaemonOption = Annotated[
    bool, typer.Option("--no-daemon", help="Do not go through the daemon, though it holds the device.")
]


def followed_document(followed: "Followed") -> dict[str, Any]:
    """Return the document of a profile that the daemon follows."""
    said = followed.said
    point = followed.point
    served = followed.served
    return {
        "profile": followed.profile,
        "device": said.device,
        "through": said.through,
        "words": said.words,
        "point": optional(dict, point),
        "workload_point": optional(dict, served),
        "rungs": followed.rungs,
        "simulated": followed.simulated,
        "confirm_within_s": followed.stay.within_s,
    }


def print_followed(followed: "Followed") -> None:
    """Print what the daemon did with a profile."""
    print_said(followed.said)
    if followed.simulated:
        typer.echo("simulated: no hardware was set")
    if followed.stay.within_s is not None:
        typer.echo(f"confirm with: polythrottle apply --confirm (within {followed.stay.within_s:g} s)", err=True)


def said_document(said: "DaemonReply") -> dict[str, Any]:
    """Return the document of what the daemon said."""
    return {"device": said.device, "through": said.through, "words": said.words}


def print_said(said: "DaemonReply") -> None:
    """Print what the daemon said."""
    typer.echo(f"through the daemon at {said.through}: {said.words}")


# `polythrottle apply` and `polythrottle restore`: leave a profile's settings in place, and give the device back.


def apply(
    profile: Annotated[
        str | None, typer.Argument(metavar="PROFILE", help="A profile's file, or <device>/<workload>.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", "-d", metavar="URI[,URI]", help="Where, or @FILE of boards; the profile's own by default."
        ),
    ] = None,
    canary: Annotated[
        str | None,
        typer.Option("--canary", metavar="10%", help="So many boards try it first; the rest follow if it is no worse."),
    ] = None,
    confirm_within: Annotated[
        float | None,
        typer.Option("--confirm-within", metavar="S", help="Revert after S seconds unless confirmed; 60."),
    ] = None,
    lasting: Annotated[
        str | None, typer.Option("--for", metavar="2h", help="Revert after that; needs no confirmation.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Stand until restore or reboot; needs no confirmation.")] = False,
    confirm: Annotated[bool, typer.Option("--confirm", help="Let what was applied stand.")] = False,
    other_model: OtherModelOption = False,
    no_daemon: NoDaemonOption = False,
    as_json: JsonOption = False,
) -> None:
    """Apply a tuned profile's device knobs; they revert by themselves unless they are confirmed.

    Knobs of the workload, such as batch size, are named: they are to be set where the model is served. Where the daemon
    holds the device, it is asked to follow the profile, and does both.
    """
    devices = _several(device)
    if len(devices) == 1:
        device = devices[0]
    if confirm:
        if keep or any(word is not None for word in (profile, confirm_within, lasting, canary)):
            raise InvalidInput("--confirm goes alone or with --device: it lets stand what was applied before")
        if len(devices) > 1:
            confirm_several(devices, as_json)
        else:
            _confirm(device, no_daemon, as_json)
        return
    if profile is None:
        raise InvalidInput("say which profile: a file, or <device>/<workload> such as jetson/resnet50")
    from polythrottle.api import deployment
    from polythrottle.catalog.tuned_profiles import find_profile

    say_which(profile)
    path = find_profile(profile)
    stay: dict[str, Any] = {"confirm_within_s": confirm_within, "lasting": lasting, "keep": keep}
    if len(devices) > 1 or canary is not None:
        _apply_to_all(path, devices, share("--canary", canary, "10%"), stay, other_model, as_json)
        return
    applied = deployment.apply(path, device, other_model=other_model, daemon=not no_daemon, told=_warn, **stay)
    if isinstance(applied, deployment.Followed):
        answer(applied, as_json, print_followed, followed_document)
        return
    try:
        answer((applied, str(path)), as_json, _print_applied, _document)
    # It is done, though not told.
    except KeyboardInterrupt:
        if applied.stands_as is not None:
            back = f"polythrottle restore --device {shlex.quote(applied.device)}"
            complain(f"the profile stands {_how_long(applied)}; put it back with {back}")
        raise
    _await_confirmation(applied, as_json)


def _await_confirmation(applied: "Applied", as_json: bool) -> None:
    """Ask on the terminal whether what was applied may stand, or say how to confirm it; nothing if it needs none."""
    within_s = applied.stay.within_s
    if applied.stands_as is None or within_s is None:
        return
    # What was applied over SSH is on record there, and is reached by its URI alone.
    far = None
    if applied.device.startswith("ssh:"):
        far = applied.device
    # A script is never asked: it would wait for an answer until the settings revert.
    if as_json or not (sys.stdin.isatty() and sys.stderr.isatty()):
        where = f" --device {shlex.quote(far)}" if far else ""
        # Beside the answer, which a program may read from standard output.
        typer.echo(f"confirm with: polythrottle apply --confirm{where} (within {within_s:g} s)", err=True)
    else:
        _ask(far or applied.stands_as, within_s)


def _several(device: str | None) -> tuple[str, ...]:
    """Return the devices that an option names; of a name on record, which is no URI, that name."""
    from polythrottle.backends.device_uri import boards_named

    if device is None:
        return ()
    return tuple(board.uri for board in boards_named(device))


def _apply_to_all(
    path: Path,
    devices: Sequence[str],
    canary: float | None,
    stay: Mapping[str, Any],
    other_model: bool,
    as_json: bool,
) -> None:
    from polythrottle.api.many_boards import apply_to_all

    # Boards that try the profile first serve its workload, which may print.
    with own_stdout():
        rollout = apply_to_all(path, devices, canary=canary, other_model=other_model, told=_warn, **stay)
    answer((rollout, str(path)), as_json, print_rollout, rollout_document)
    stands = [each.applied for each in rollout.outcomes if each.applied is not None and each.applied.stands_as]
    if rollout.confirm_within_s is not None:
        where = shlex.quote(",".join(each.device for each in stands))
        left_s = math.floor(rollout.confirm_within_s)
        typer.echo(f"confirm with: polythrottle apply --confirm --device {where} (within {left_s} s)", err=True)
    end_rollout(rollout)


def restore(
    device: Annotated[
        str | None,
        typer.Option("--device", "-d", metavar="URI[,URI]", help="Only these, by URI, name on record or @FILE."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="End a living holder's hold, and undo what others changed since.")
    ] = False,
    no_daemon: NoDaemonOption = False,
    as_json: JsonOption = False,
) -> None:
    """Put back everything that stands changed; says what is left and why, with exit code 6.

    Where the daemon holds the device, it puts it back and leaves it alone until it is told to take it again.
    """
    from polythrottle.api import deployment

    devices = _several(device)
    if len(devices) > 1:
        restore_several(devices, force, as_json)
        return
    if devices:
        device = devices[0]
    found = deployment.restore(device, force=force, daemon=not no_daemon, told=_warn)
    document: dict[str, Any] = {}
    if found.released is not None:
        document["released"] = said_document(found.released)
    document |= {"restored": [asdict(each) for each in found.outcomes], "clean": found.clean}
    try:
        heard = answer(document, as_json, lambda _: _print_restored(found))
    # Whether the board was put back counts for more than whether that could be printed.
    except OSError:  # a full disk behind standard output
        if found.clean:
            raise
        heard = False
    if not found.clean:
        if not heard:
            left = [f"{each.device}: left {line}" for each in found.outcomes for line in each.left]
            if found.released is not None and not found.released.clean:
                left.append(f"{found.released.device}: {found.released.words}")
            complain("; ".join(left))
        raise typer.Exit(DeviceError.exit_code)


def _warn(text: str) -> None:
    typer.echo(text, err=True)


def _print_restored(found: "Restored") -> None:
    if found.released is not None:
        print_said(found.released)
    if found.released is None or found.outcomes:
        _print_outcomes(found.outcomes)


def _confirm(device: str | None, no_daemon: bool, as_json: bool) -> None:
    from polythrottle.api import deployment

    done = deployment.confirm(device, daemon=not no_daemon, told=_warn)
    if isinstance(done, deployment.DaemonReply):
        answer(done, as_json, print_said, said_document)
    else:
        answer(done, as_json, _print_confirmed, _confirmed_document)


def _document(found: "tuple[Applied, str]") -> dict[str, Any]:
    applied, path = found
    stay: dict[str, float | None] = {"confirm_within_s": None, "for_s": None}
    if applied.stands_as:
        stay = {"confirm_within_s": applied.stay.within_s, "for_s": applied.stay.then_s}
    return {
        "profile": path,
        "device": applied.device,
        "point": dict(applied.point),
        "workload_point": dict(applied.served),
        "simulated": applied.simulated,
        "stands_as": applied.stands_as,
        **stay,
        "remark": applied.remark or None,
    }


def _print_applied(found: "tuple[Applied, str]") -> None:
    from rich.text import Text

    from polythrottle.api.tuning_result import show_point
    from polythrottle.cli.render.console import plain_console
    from polythrottle.cli.render.text import named_lines

    applied, path = found
    console = plain_console()
    console.print(Text(applied.title, "bold"))
    lines = {"device": applied.device, "set": show_point(applied.point)}
    if applied.served:
        lines["to do"] = f"{show_point(applied.served)}: belongs to the workload, set it where the model is served"
    lines["stands"] = _how_long(applied)
    if applied.remark:
        lines["but"] = applied.remark
    console.print(named_lines(lines.items()))
    # On a line of its own, unbroken, so that it can be copied.
    console.print(Text.assemble(("profile ", "dim"), path), soft_wrap=True)


def _how_long(applied: "Applied") -> str:
    from polythrottle.domain.units import show_span

    if applied.stands_as is None:
        if applied.point:
            return "simulated: nothing was kept"
        return "nothing was changed on the device"
    stay = applied.stay
    if stay.then_s is None:
        then = "until polythrottle restore or a reboot"
    else:
        then = f"for {show_span(stay.then_s)}"
    if stay.within_s is None:
        return then
    return f"for {show_span(stay.within_s)}; once confirmed, {then}"


def _confirmed_document(found: "tuple[Standing, ...]") -> dict[str, Any]:
    return {"confirmed": [{"device": each.device, "for_s": each.expires_in_s} for each in found]}


def _print_confirmed(found: "tuple[Standing, ...]") -> None:
    from polythrottle.domain.units import show_span

    for each in found:
        left_s = each.expires_in_s
        if left_s is None:
            then = "until polythrottle restore or a reboot"
        else:
            then = f"for {show_span(left_s)}"
        typer.echo(f"{each.device} stands {then}")


def _print_outcomes(outcomes: "tuple[Outcome, ...]") -> None:
    if not outcomes:
        typer.echo("nothing stands changed")
    for outcome in outcomes:
        left = outcome.left
        typer.echo(f"{printable(outcome.device)}: {len(outcome.restored)} put back, {len(left)} left")
        for key in outcome.restored:
            typer.echo(f"  put back  {printable(key)}")
        for line in left:
            typer.echo(f"  left      {line}")
        for key in outcome.unverified:
            typer.echo(f"  unproven  {printable(key)}: took its original, which the driver lets nobody read back")
        for line in outcome.lapsed:
            typer.echo(f"  lapsed    {line}")


def _ask(name: str, within_s: float) -> None:
    """Ask on the terminal whether to keep what was applied; anything but yes, or no answer in time, reverts."""
    kept = False
    try:
        kept = _answered(within_s)
        if kept:
            from polythrottle.api.deployment import confirm

            stands = confirm(name, daemon=False)
            assert isinstance(stands, tuple), "without the daemon nobody else can answer"
            _print_confirmed(stands)
    # Also after Ctrl-C: settings nobody confirmed must not stay.
    finally:
        if not kept:
            _revert(name)


def _answered(within_s: float) -> bool:
    clock = SystemClock()
    ends_s = clock.now() + within_s
    # Looks once a second, to count down; the guard that reverts is a process of its own and does not wait for this.
    while (left_s := ends_s - clock.now()) > 0:
        sys.stderr.write(f"\rkeep? [y/N] {left_s:4.0f} s ")
        sys.stderr.flush()
        if select.select([sys.stdin], [], [], min(1.0, left_s))[0]:
            return sys.stdin.readline().strip().lower() in ("y", "yes")
    sys.stderr.write("\n")
    return False


def _revert(name: str) -> None:
    from polythrottle.api import deployment

    outcomes: tuple[Outcome, ...] = ()
    with contextlib.suppress(UnknownName):  # the guard was faster
        outcomes = deployment.restore(name, daemon=False).outcomes
    if outcomes:
        _print_outcomes(outcomes)
    else:
        typer.echo(f"{name}: reverted")
