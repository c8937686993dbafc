"""Where a socket may lie: in a folder in which nobody else could put one of theirs."""

import grp
import os
import pwd
import stat
from pathlib import Path

from polythrottle.errors import PermissionDenied


def check_folder(path: Path) -> None:
    """Refuse the place of a socket where somebody else could listen first, and be taken for this process.

    Args:
        path: Of the socket. Its folder must be there, belong to this user or root, and be closed to what others write;
            a sticky bit, as on /tmp, closes it only to what they take away. A folder above it may be sticky.

    Raises:
        PermissionDenied: If others may write there; says which folder.
    """
    folder = path.parent.resolve()
    for each in (folder, *folder.parents):
        about = each.stat()
        theirs = each == folder and about.st_uid not in (0, os.geteuid())
        sticky = each != folder and about.st_mode & stat.S_ISVTX
        if theirs or (_open_to_others(about) and not sticky):
            raise PermissionDenied(
                f"{each} is open to others, who could listen at {path} first; name a socket in a folder that only this "
                "user may write to"
            )


def _open_to_others(about: os.stat_result) -> bool:
    """Return whether anybody but the owner may write; a group of nobody else, as many a user has, is no other."""
    if about.st_mode & stat.S_IWOTH:
        return True
    return bool(about.st_mode & stat.S_IWGRP) and not _alone(about.st_uid, about.st_gid)


def _alone(user: int, group: int) -> bool:
    try:
        owner, members = pwd.getpwuid(user), grp.getgrgid(group)
    except KeyError:
        return False
    return owner.pw_gid == group and members.gr_name == owner.pw_name and not set(members.gr_mem) - {owner.pw_name}
