"""The files that wishes name, read before the control loop hears of them: it must never wait for a file."""

from collections.abc import Callable
from pathlib import Path

from polythrottle.daemon.budget import Carbon, check_wish
from polythrottle.daemon.tuned import ProfileFile, read_profile_file
from polythrottle.daemon.wishes import ApplyProfile, SetBudget, Wish

Named = ProfileFile | Carbon | None
"""What is in such a file; None where a wish names none."""
Read = Callable[[], Named]
"""Returns it, or raises what was wrong with it."""


def names_file(wish: Wish) -> bool:
    """Return whether there is a file to be read for a wish."""
    return isinstance(wish, ApplyProfile) or (isinstance(wish, SetBudget) and wish.carbon is not None)


def read_named(wish: Wish) -> Named:
    """Return what is in the file that a wish names; may take seconds.

    Raises:
        UnknownName: If there is no such profile.
        BadFile: If it cannot be used.
        InvalidInput: If the wish makes no sense, whatever is in the file.
    """
    match wish:
        case ApplyProfile(profile):
            return read_profile_file(profile)
        case SetBudget(carbon=str(path)):
            check_wish(wish)
            return Carbon.read(Path(path))
        case _:
            return None
