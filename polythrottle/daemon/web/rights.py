"""What whoever is at the other end of a connection may do."""

import os
import socket
from dataclasses import dataclass
from enum import IntEnum

from polythrottle.daemon.peers import group_id, peer_of
from polythrottle.errors import InvalidInput


class Role(IntEnum):
    """What somebody may do; each may what those before it may."""

    NOTHING = 0
    READ = 1
    CONTROL = 2


@dataclass(frozen=True)
class Visitor:
    """Somebody connected.

    Args:
        role: What they may do.
        trusted: Whether they are root or the daemon's own user, for whom there is always room.
        tcp: Whether they came over TCP, where role and room depend on what each request shows.
    """

    role: Role
    trusted: bool = False
    tcp: bool = False


@dataclass(frozen=True)
class Doorkeeper:
    """Tells what users may do from their groups.

    Args:
        readers: Numbers of the groups that may look.
        writers: Numbers of the groups that may look and change.
    """

    readers: frozenset[int] = frozenset()
    writers: frozenset[int] = frozenset()

    @classmethod
    def of(cls, readers: tuple[str, ...], writers: tuple[str, ...]) -> "Doorkeeper":
        """Return one for groups by name or number.

        Raises:
            InvalidInput: If there is no such group.
        """
        return cls(frozenset(map(_number, readers)), frozenset(map(_number, writers)))

    @property
    def groups(self) -> frozenset[int]:
        """All of them."""
        return self.readers | self.writers

    def admitted(self, connection: socket.socket) -> Visitor:
        """Return who is at the other end of a Unix socket."""
        peer = peer_of(connection)
        return self.judged(peer.uid, peer.gids)

    def judged(self, uid: int, groups: frozenset[int]) -> Visitor:
        """Return what a user with these groups may do."""
        if uid in (0, os.geteuid()):
            return Visitor(Role.CONTROL, trusted=True)
        if groups & self.writers:
            return Visitor(Role.CONTROL)
        return Visitor(Role.READ if groups & self.readers else Role.NOTHING)


def _number(group: str) -> int:
    if group.isascii() and group.isdecimal():
        return int(group)
    if (found := group_id(group)) is None:
        raise InvalidInput(f"there is no group {group!r} to let in; make it with: groupadd --system {group}")
    return found
