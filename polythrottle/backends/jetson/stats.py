"""Power from jetson-stats, for people who already run it: ``jetson?reader=jtop``.

Its readings are seldom (twice a second at best), and its own total is the sum of all rails on boards without an input
rail, parts counted twice, so the board's total is made up here. It is used only when asked for and never by root: its
service is spoken to in Python pickle behind a constant key, which must not reach a privileged process
(jetson_stats, ``jtop/core/config.py``, ``jtop/service.py``).
"""

import os
from collections.abc import Mapping
from typing import Any

from polythrottle.backends.jetson.rails import find_total
from polythrottle.catalog import Board
from polythrottle.errors import DeviceError

_PERIOD_S = 0.5


class JetsonStats:
    """The rails as jetson-stats reads them.

    Args:
        entry: The board's entry in the catalogue, if any, which says which rails make up the total.

    Raises:
        DeviceError: If this is root, jetson-stats is not installed, its service does not answer, or it knows no rail.
    """

    def __init__(self, entry: Board | None) -> None:
        if os.geteuid() == 0:
            raise DeviceError(
                "reader=jtop is refused for root: jetson-stats speaks pickle, which must not reach a privileged "
                "process; leave reader=jtop out, and the sensors are read directly"
            )
        self._session: Any = None
        self._failure: type[Exception] = OSError
        self.renew()
        try:
            self.total = find_total(tuple(self._rails()), entry)
            if self.total.names:
                self.power_w()
        except (OSError, ValueError) as err:
            raise DeviceError(f"jetson-stats answers, but not with the power of rails: {err}") from err

    def _rails(self) -> Mapping[str, Any]:
        """Return what jetson-stats says of each rail that is online.

        Raises:
            ValueError: If it says something else.
        """
        power = self._session.power
        rails = power.get("rail") if isinstance(power, Mapping) else None
        if not isinstance(rails, Mapping):
            raise ValueError("this version has no power by rail")
        return {
            str(name): rail for name, rail in rails.items() if isinstance(rail, Mapping) and rail.get("online", True)
        }

    def power_w(self) -> float:
        """Return the power of the total as it was last read, in watts.

        Raises:
            OSError: If the service is gone.
            ValueError: If a rail is, or has no power.
        """
        if self._session is None:
            self.renew()
        try:
            answers = self._session.ok(spin=True)
        except self._failure as err:
            raise OSError(f"the service of jetson-stats does not answer any more: {err}") from err
        if not answers:
            raise OSError("the service of jetson-stats does not answer any more")
        rails = self._rails()
        total_w = 0.0
        for name in self.total.names:
            milliwatts = rails.get(name, {}).get("power")
            if not isinstance(milliwatts, int | float):
                raise ValueError(f"rail {name} has no power")
            total_w += milliwatts / 1000
        return total_w

    def stale(self) -> bool:
        """Say whether the service is to be asked anew: never, for it says so itself."""
        return False

    def renew(self) -> None:
        """Connect again.

        Raises:
            DeviceError: If jetson-stats is not installed or its service does not answer.
        """
        self.close()
        try:
            from jtop import JtopException, jtop
        except ImportError as err:
            raise DeviceError(f"reader=jtop needs jetson-stats: pip install 'polythrottle[jetson]' ({err})") from err
        session = jtop(interval=_PERIOD_S)
        try:
            session.start()
        except (JtopException, OSError) as err:
            raise DeviceError(f"the service of jetson-stats does not answer: {err}; is jtop.service running?") from err
        self._session, self._failure = session, JtopException

    def close(self) -> None:
        """Disconnect."""
        if self._session is not None:
            self._session.close()
            self._session = None
