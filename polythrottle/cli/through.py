"""Commands that go through the daemon where it holds the device: apply, confirm, restore."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polythrottle.errors import DeviceError, InvalidInput, PermissionDenied, PolythrottleError

if TYPE_CHECKING:
    from polythrottle.applying import Stay
    from polythrottle.client import Client
    from polythrottle.daemon.status import Status
    from polythrottle.profile import Profile

NoDaemonOption = Annotated[
    bool, typer.Option("--no-daemon", help="Do not go through the daemon, though it holds the device.")
]


def holder(device: str | None) -> "tuple[Client, Status] | None":
    """Return the daemon that holds a device, with its status; None if none does, or does not answer.

    Args:
        device: Its URI; None for whichever the daemon holds.
    """
    from polythrottle.client import Client, default_socket

    if not default_socket().exists():
        return None
    client = Client(timeout_s=30.0)
    try:
        status = client.status()
    except PermissionDenied as error:
        typer.echo(f"a daemon runs, but {error}; going on without it", err=True)
        return None
    except DeviceError:  # its socket is left over, or it hangs: the device is reached without it
        return None
    return (client, status) if device is None or same_device(device, status.device) else None


def same_device(one: str, other: str) -> bool:
    """Return whether two URIs mean one device: name and root agree, whatever a simulation's seed and noise are."""
    return _named(one) == _named(other)


def _named(uri: str) -> tuple[str, str]:
    body, _, query = uri.partition("?")
    roots = [part[5:] for part in query.split("&") if part.startswith("root=")]
    first = "nvml:0" if body == "nvml" else body
    return first, str(Path(roots[0]).resolve()) if roots else ""


def apply_through(client: "Client", status: "Status", profile: "Profile", path: Path, stay: "Stay") -> dict[str, Any]:
    """Have the daemon follow a profile, and return what is printed.

    Raises:
        InvalidInput: If it is to stand for a time, which the daemon does not count.
        PolythrottleError: What the daemon says no with.
    """
    from polythrottle.applying import parted

    if stay.then_s is not None:
        raise InvalidInput("the daemon keeps a profile until another is applied; leave --for out, or give --no-daemon")
    said = client.apply(path, stay.within_s)
    own, served = parted(profile)
    followed = None if profile.ladder is None else len(profile.ladder.rungs)  # one of them by the load, not the point
    return {
        "profile": str(path),
        "device": status.device,
        "through": client.where,
        "words": said["words"],
        "point": dict(own) if followed is None else None,
        "workload_point": dict(served) if followed is None else None,
        "rungs": followed,
        "simulated": status.energy_kind == "simulated",
        "confirm_within_s": stay.within_s,
    }


def print_applied(document: dict[str, Any]) -> None:
    """Print what the daemon did."""
    typer.echo(f"through the daemon at {document['through']}: {document['words']}")
    if document["simulated"]:
        typer.echo("simulated: no hardware was set")
    if document["confirm_within_s"] is not None:
        within_s = document["confirm_within_s"]
        typer.echo(f"confirm with: polythrottle apply --confirm (within {within_s:g} s)", err=True)


def confirm_through(device: str | None) -> dict[str, Any] | None:
    """Confirm what the daemon tries, and return what is printed; None if it tries nothing there."""
    found = holder(device)
    if found is None:
        return None
    client, status = found
    try:
        said = client.confirm()
    except PolythrottleError:
        if status.unconfirmed:
            raise
        return None
    return {"device": status.device, "through": client.where, "words": said["words"]}


def release_through(device: str | None) -> dict[str, Any] | None:
    """Have the daemon put its device back, and return what is printed; None if it holds none of these."""
    found = holder(device)
    if found is None:
        return None
    client, status = found
    said = client.release("polythrottle restore")
    return {"device": status.device, "through": client.where, "words": said["words"]}


def print_done(document: dict[str, Any]) -> None:
    """Print what the daemon said."""
    typer.echo(f"through the daemon at {document['through']}: {document['words']}")
