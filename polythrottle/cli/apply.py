"""`polythrottle apply` and `polythrottle restore`: leave a profile's settings in place, and give the device back."""

import contextlib
import re
import select
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polythrottle.cli.answers import answer
from polythrottle.cli.options import JsonOption
from polythrottle.cli.through import (
    NoDaemonOption,
    apply_through,
    confirm_through,
    holder,
    print_applied,
    print_done,
    release_through,
)
from polythrottle.clock import SystemClock
from polythrottle.errors import DeviceError, InvalidInput, PolythrottleError, UnknownName

if TYPE_CHECKING:
    from polythrottle.actuation import Outcome
    from polythrottle.applying import Applied, Stay


def apply(
    profile: Annotated[
        str | None, typer.Argument(metavar="[PROFILE]", help="A profile's file, or <device>/<workload>.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", "-d", metavar="URI", help="Where; the profile's own device by default.")
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
    no_daemon: NoDaemonOption = False,
    as_json: JsonOption = False,
) -> None:
    """Apply a tuned profile's device knobs; they revert by themselves unless they are confirmed.

    Knobs of the workload, such as batch size, are named: they are to be set where the model is served. Where the daemon
    holds the device, it is asked to follow the profile, and does both.
    """
    if confirm:
        if profile is not None or confirm_within is not None or lasting is not None or keep:
            raise InvalidInput("--confirm goes alone or with --device: it lets stand what was applied before")
        _confirm(device, no_daemon, as_json)
        return
    if profile is None:
        raise InvalidInput("say which profile: a file, or <device>/<workload> such as jetson/resnet50")
    stay = _stay(confirm_within, lasting, keep)
    if not no_daemon and (done := _through(profile, stay, device)) is not None:
        answer(done, as_json, print_applied)
        return
    applied, name = _apply(profile, stay, device)
    answer((applied, name), as_json, _print_applied, _document)
    if applied.stands_as is None or stay.within_s is None:
        return
    if as_json or not (sys.stdin.isatty() and sys.stderr.isatty()):
        typer.echo(f"confirm with: polythrottle apply --confirm (within {stay.within_s:g} s)", err=True)
    else:
        _ask(applied.stands_as, stay.within_s)


def restore(
    device: Annotated[
        str | None,
        typer.Option("--device", "-d", metavar="URI", help="Only this one, by its URI or its name on record."),
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
    released = None if no_daemon or force else _released(device)
    outcomes = _restored(_on_record(device), force) if released is None else _others(device)
    through = {} if released is None else {"released": released}
    clean = all(each.clean for each in outcomes)
    document = {**through, "restored": [asdict(each) for each in outcomes], "clean": clean}
    answer(document, as_json, lambda _: _print_restored(released, outcomes))
    if not clean:
        raise typer.Exit(DeviceError.exit_code)


def _restored(named: str | None, force: bool) -> "tuple[Outcome, ...]":
    from polythrottle.actuation.restoring import restore_all, standing

    return restore_all(device=named, force=force) if named is None or standing() else ()


def _others(device: str | None) -> "tuple[Outcome, ...]":
    """Restore what the daemon does not hold, where no device was named."""
    from polythrottle.actuation.restoring import restore_all, standing

    names = [] if device is not None else [each.device for each in standing() if not each.lease.alive]
    return tuple(outcome for name in names for outcome in restore_all(device=name))


def _released(device: str | None) -> dict[str, Any] | None:
    """Have the daemon put back what it holds; where it cannot, that is said, and done without it."""
    try:
        return release_through(device)
    except PolythrottleError as error:
        typer.echo(f"the daemon could not put it back: {error}", err=True)
        return None


def _print_restored(released: dict[str, Any] | None, outcomes: "tuple[Outcome, ...]") -> None:
    if released is not None:
        print_done(released)
    if released is None or outcomes:
        _print_outcomes(outcomes)


def _confirm(device: str | None, no_daemon: bool, as_json: bool) -> None:
    done = None if no_daemon else confirm_through(device)
    if done is None:
        answer(_confirmed(device), as_json, _print_confirmed)
    else:
        answer(done, as_json, print_done)


def _through(profile: str, stay: "Stay", device: str | None) -> dict[str, Any] | None:
    """Apply a profile through the daemon, and return what is printed; None if it does not hold the device."""
    from polythrottle.catalog.profiles import find_profile, read_profile

    path = find_profile(profile)
    found = read_profile(path)
    daemon = holder(found.device if device is None else device)
    return None if daemon is None else apply_through(*daemon, found, path, stay)


def _on_record(device: str | None) -> str | None:
    """Return the name under which a device stands on record: as given, or what its URI stands under."""
    if device is None or not re.fullmatch(r"(jetson|cpu|nvml)\b[^ ]*", device):
        return device
    body, _, query = device.partition("?")
    if re.fullmatch(r"nvml(:\d+)?", body):  # which GPU that is only its driver knows; one on record leaves no choice
        return _only_gpu() or body.replace(":", " ")
    roots = [part[5:] for part in query.split("&") if part.startswith("root=")]
    return f"{body} {Path(roots[0]).resolve()}" if roots else body.replace(":", " ")


def _only_gpu() -> str | None:
    from polythrottle.actuation.restoring import standing

    names = [each.device for each in standing() if each.device.startswith("nvml ")]
    return names[0] if len(names) == 1 else None


def _stay(confirm_within: float | None, lasting: str | None, keep: bool) -> "Stay":
    from polythrottle.applying import CONFIRM_WITHIN_S, Stay
    from polythrottle.stopping import span_s

    if keep and lasting is not None:
        raise InvalidInput("--for and --keep exclude each other; leave one out")
    sure = keep or lasting is not None
    within_s = CONFIRM_WITHIN_S if confirm_within is None and not sure else confirm_within
    return Stay(within_s, None if lasting is None else span_s(lasting))


def _apply(profile: str, stay: "Stay", device: str | None) -> "tuple[Applied, str]":
    from polythrottle.applying import apply_profile
    from polythrottle.catalog.profiles import find_profile, read_profile

    path = find_profile(profile)
    return apply_profile(read_profile(path), stay, device), str(path)


def _document(found: "tuple[Applied, str]") -> dict[str, Any]:
    applied, path = found
    return {
        "profile": path,
        "device": applied.device,
        "point": dict(applied.point),
        "workload_point": dict(applied.served),
        "simulated": applied.simulated,
        "stands_as": applied.stands_as,
        "confirm_within_s": applied.stay.within_s if applied.stands_as else None,
        "for_s": applied.stay.then_s if applied.stands_as else None,
        "remark": applied.remark or None,
    }


def _print_applied(found: "tuple[Applied, str]") -> None:
    from rich.console import Console
    from rich.text import Text

    from polythrottle.cli.texts import named_lines, show_point

    applied, path = found
    console = Console(highlight=False, markup=False)
    console.print(Text(applied.title, "bold"))
    lines = {"device": applied.device, "profile": path, "set": show_point(applied.point)}
    if applied.served:
        lines["to do"] = f"{show_point(applied.served)}: belongs to the workload, set it where the model is served"
    lines["stands"] = _how_long(applied)
    if applied.remark:
        lines["but"] = applied.remark
    console.print(named_lines(lines.items()))


def _how_long(applied: "Applied") -> str:
    from polythrottle.stopping import show_span

    if applied.stands_as is None:
        return "simulated: nothing was kept" if applied.point else "nothing was changed on the device"
    stay = applied.stay
    then = "until polythrottle restore or a reboot" if stay.then_s is None else f"for {show_span(stay.then_s)}"
    return then if stay.within_s is None else f"for {show_span(stay.within_s)}; once confirmed, {then}"


def _confirmed(device: str | None) -> dict[str, Any]:
    from polythrottle.actuation.restoring import confirm

    found = confirm(_on_record(device))
    return {"confirmed": [{"device": each.device, "for_s": each.expires_in_s} for each in found]}


def _print_confirmed(found: dict[str, Any]) -> None:
    from polythrottle.stopping import show_span

    for each in found["confirmed"]:
        left_s = each["for_s"]
        then = "until polythrottle restore or a reboot" if left_s is None else f"for {show_span(left_s)}"
        typer.echo(f"{each['device']} stands {then}")


def _print_outcomes(outcomes: "tuple[Outcome, ...]") -> None:
    if not outcomes:
        typer.echo("nothing stands changed")
    for outcome in outcomes:
        left = [*map(str, outcome.failed), *map(str, outcome.foreign), *outcome.damage]
        typer.echo(f"{outcome.device}: {len(outcome.restored)} put back, {len(left)} left")
        for key in outcome.restored:
            typer.echo(f"  put back  {key}")
        for line in left:
            typer.echo(f"  left      {line}")
        for key in outcome.unverified:
            typer.echo(f"  unproven  {key}: took its original, which the driver lets nobody read back")


def _ask(name: str, within_s: float) -> None:
    """Ask on the terminal whether to keep what was applied; anything but yes, or no answer in time, reverts."""
    kept = False
    try:
        kept = _answered(within_s)
        if kept:
            _print_confirmed(_confirmed(name))
    finally:
        if not kept:
            _revert(name)


def _answered(within_s: float) -> bool:
    clock = SystemClock()
    ends_s = clock.now() + within_s
    while (left_s := ends_s - clock.now()) > 0:
        sys.stderr.write(f"\rkeep? [y/N] {left_s:4.0f} s ")
        sys.stderr.flush()
        if select.select([sys.stdin], [], [], min(1.0, left_s))[0]:
            return sys.stdin.readline().strip().lower() in ("y", "yes")
    sys.stderr.write("\n")
    return False


def _revert(name: str) -> None:
    from polythrottle.actuation.restoring import restore_all

    outcomes: tuple[Outcome, ...] = ()
    with contextlib.suppress(UnknownName):  # the guard was faster
        outcomes = restore_all(device=name)
    _print_outcomes(outcomes) if outcomes else typer.echo(f"{name}: reverted")
