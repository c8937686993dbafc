"""Where polythrottle keeps what must outlive it: originals, journals, past studies; and where its processes meet."""

from __future__ import annotations

import os
from pathlib import Path

from polythrottle.domain.errors import StorageError

_SHARED = Path("/run/polythrottle")
DAEMON_SOCKET = "daemon/daemon.sock"
ACTUATOR_SOCKET = "actuator.sock"
"""Below the run folder: the daemon's lies in a folder of its own, for it has less rights than the actuator."""


def state_dir() -> Path:
    """Return the folder for everything that must outlive a process; it need not exist yet.

    It is ``$POLYTHROTTLE_STATE_DIR``, else ``/var/lib/polythrottle`` for root, else ``polythrottle`` in the XDG state
    folder (``$XDG_STATE_HOME``, by default ``~/.local/state``).

    Raises:
        StorageError: If the user has no home folder.
    """
    if chosen := os.environ.get("POLYTHROTTLE_STATE_DIR"):
        return Path(chosen).absolute()
    if os.geteuid() == 0:
        return Path("/var/lib/polythrottle")
    xdg = Path(os.environ.get("XDG_STATE_HOME", ""))
    # The XDG base directory specification: a relative path is invalid and to be ignored.
    return (xdg if xdg.is_absolute() else _home() / ".local" / "state") / "polythrottle"


def run_dir() -> Path:
    """Return the folder of the sockets at which the daemon and the actuator are met; it need not exist yet.

    It is ``$POLYTHROTTLE_RUN_DIR``, else ``/run/polythrottle`` for root and wherever that can be written, else
    ``polythrottle`` in ``$XDG_RUNTIME_DIR``, else ``run`` in `state_dir`.

    Raises:
        StorageError: If the user has no home folder.
    """
    if chosen := os.environ.get("POLYTHROTTLE_RUN_DIR"):
        return Path(chosen).absolute()
    if os.geteuid() == 0 or (_SHARED.is_dir() and os.access(_SHARED, os.W_OK | os.X_OK)):
        return _SHARED
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if runtime.is_absolute():
        return runtime / "polythrottle"
    return state_dir() / "run"


def socket_path(name: str) -> Path:
    """Return a socket of this user's own processes in `run_dir`, or the machine's where only that one is there.

    Args:
        name: Of the socket, below the folder.

    Raises:
        StorageError: If the user has no home folder.
    """
    own = run_dir() / name
    shared = _SHARED / name
    if not os.environ.get("POLYTHROTTLE_RUN_DIR") and not own.exists() and shared.exists():
        return shared
    return own


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError as err:
        raise StorageError(
            "this user has no home folder; set POLYTHROTTLE_STATE_DIR to a folder to keep state in"
        ) from err
