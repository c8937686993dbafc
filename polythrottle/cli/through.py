"""What commands say that went through the daemon, because it holds the device."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from polythrottle.deployment import Followed, Said

NoDaemonOption = Annotated[
    bool, typer.Option("--no-daemon", help="Do not go through the daemon, though it holds the device.")
]


def followed_document(followed: "Followed") -> dict[str, Any]:
    """Return the document of a profile that the daemon follows."""
    said, point, served = followed.said, followed.point, followed.served
    return {
        "profile": followed.profile,
        "device": said.device,
        "through": said.through,
        "words": said.words,
        "point": None if point is None else dict(point),
        "workload_point": None if served is None else dict(served),
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


def said_document(said: "Said") -> dict[str, Any]:
    """Return the document of what the daemon said."""
    return {"device": said.device, "through": said.through, "words": said.words}


def print_said(said: "Said") -> None:
    """Print what the daemon said."""
    typer.echo(f"through the daemon at {said.through}: {said.words}")
