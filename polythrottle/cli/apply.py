"""`polythrottle apply` and `polythrottle restore`: leave a profile's settings in place, and give the device back."""

import contextlib
import select
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polythrottle.cli.answers import answer, say_which
from polythrottle.cli.options import JsonOption, OtherModelOption
from polythrottle.cli.through import NoDaemonOption, followed_document, print_followed, print_said, said_document
from polythrottle.clock import SystemClock
from polythrottle.errors import DeviceError, InvalidInput, UnknownName

if TYPE_CHECKING:
    from polythrottle.actuation import Outcome
    from polythrottle.actuation.restoring import Standing
    from polythrottle.applying import Applied
    from polythrottle.deployment import Restored


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
    other_model: OtherModelOption = False,
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
    from polythrottle import deployment
    from polythrottle.catalog.profiles import find_profile

    say_which(profile)
    path = find_profile(profile)
    applied = deployment.apply(
        *(path, device),
        confirm_within_s=confirm_within,
        lasting=lasting,
        keep=keep,
        other_model=other_model,
        daemon=not no_daemon,
        told=_warn,
    )
    if isinstance(applied, deployment.Followed):
        answer(applied, as_json, print_followed, followed_document)
        return
    answer((applied, str(path)), as_json, _print_applied, _document)
    within_s = applied.stay.within_s
    if applied.stands_as is None or within_s is None:
        return
    if as_json or not (sys.stdin.isatty() and sys.stderr.isatty()):
        typer.echo(f"confirm with: polythrottle apply --confirm (within {within_s:g} s)", err=True)
    else:
        _ask(applied.stands_as, within_s)


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
    from polythrottle import deployment

    found = deployment.restore(device, force=force, daemon=not no_daemon, told=_warn)
    through = {} if found.released is None else {"released": said_document(found.released)}
    document = {**through, "restored": [asdict(each) for each in found.outcomes], "clean": found.clean}
    answer(document, as_json, lambda _: _print_restored(found))
    if not found.clean:
        raise typer.Exit(DeviceError.exit_code)


def _warn(text: str) -> None:
    typer.echo(text, err=True)


def _print_restored(found: "Restored") -> None:
    if found.released is not None:
        print_said(found.released)
    if found.released is None or found.outcomes:
        _print_outcomes(found.outcomes)


def _confirm(device: str | None, no_daemon: bool, as_json: bool) -> None:
    from polythrottle import deployment

    done = deployment.confirm(device, daemon=not no_daemon, told=_warn)
    if isinstance(done, deployment.Said):
        answer(done, as_json, print_said, said_document)
    else:
        answer(done, as_json, _print_confirmed, _confirmed_document)


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


def _confirmed_document(found: "tuple[Standing, ...]") -> dict[str, Any]:
    return {"confirmed": [{"device": each.device, "for_s": each.expires_in_s} for each in found]}


def _print_confirmed(found: "tuple[Standing, ...]") -> None:
    from polythrottle.stopping import show_span

    for each in found:
        left_s = each.expires_in_s
        then = "until polythrottle restore or a reboot" if left_s is None else f"for {show_span(left_s)}"
        typer.echo(f"{each.device} stands {then}")


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
        for line in outcome.lapsed:
            typer.echo(f"  lapsed    {line}")


def _ask(name: str, within_s: float) -> None:
    """Ask on the terminal whether to keep what was applied; anything but yes, or no answer in time, reverts."""
    kept = False
    try:
        kept = _answered(within_s)
        if kept:
            from polythrottle.deployment import confirm

            stands = confirm(name, daemon=False)
            assert isinstance(stands, tuple), "without the daemon nobody else can answer"
            _print_confirmed(stands)
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
    from polythrottle import deployment

    outcomes: tuple[Outcome, ...] = ()
    with contextlib.suppress(UnknownName):  # the guard was faster
        outcomes = deployment.restore(name, daemon=False).outcomes
    _print_outcomes(outcomes) if outcomes else typer.echo(f"{name}: reverted")
