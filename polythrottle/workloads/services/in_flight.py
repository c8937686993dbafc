"""The bound on the requests in flight at a server, as `polythrottle proxy` in front of it has it set."""

import json
from collections.abc import Mapping
from typing import Any

from polythrottle.domain.errors import DeviceError, KnobRejected, TrialError
from polythrottle.domain.space import IN_FLIGHT, Knob
from polythrottle.storage.untrusted import members_of
from polythrottle.workloads.foreign_calls import refusal_text
from polythrottle.workloads.uris import Address

_PATH = "/polythrottle/in_flight"
_OK = 200


class InFlightLimit:
    """The limit of the proxy at an address; setting it ends nothing that is under way.

    Args:
        address: Of the service, whose requests go through the proxy.
        levels: To be tried.
    """

    def __init__(self, address: Address, levels: tuple[int, ...]) -> None:
        self._where = address.where
        self._root = f"{'https' if address.scheme == 'openai+https' else 'http'}://{address.where}"
        self._levels = levels
        self.found = 0
        self.held = 0

    @property
    def knob(self) -> Knob:
        """The levels, with the one that was found among them."""
        return Knob(IN_FLIGHT, tuple(sorted({*self._levels, self.found})))

    @property
    def most(self) -> int:
        """The highest level."""
        return max(*self._levels, self.found)

    async def open(self) -> None:
        """Look which limit holds.

        Raises:
            DeviceError: If there is no proxy at the address, or it lets nobody through.
            ConnectionError: If nobody answers.
        """
        status, found, _ = await self._asked("GET")
        limit = found.get("limit")
        if status != _OK or type(limit) is not int:
            raise DeviceError(
                f"no polythrottle proxy is at {self._where}; run one in front of the server "
                f"(polythrottle proxy http://HOST:PORT) and give its address, or leave {IN_FLIGHT} out"
            )
        if not limit:
            raise DeviceError(f"the proxy at {self._where} holds all requests back (its limit is 0)")
        self.found = self.held = limit

    async def set(self, limit: int) -> None:
        """Have a limit hold.

        Raises:
            KnobRejected: If the proxy does not take it, or is gone.
        """
        try:
            status, found, said = await self._asked("PUT", json.dumps({"limit": limit}).encode())
        except (TrialError, ConnectionError) as err:
            raise KnobRejected(f"the proxy does not take {IN_FLIGHT}={limit}: {err}") from err
        if status != _OK or found.get("limit") != limit:
            raise KnobRejected(f"the proxy at {self._where} does not take {IN_FLIGHT}={limit} ({status}): {said}")
        self.held = limit

    async def _asked(self, method: str, body: bytes | None = None) -> tuple[int, Mapping[str, Any], str]:
        from polythrottle.workloads.services.http import Web

        web = Web(self._where, self._root, {"Content-Type": "application/json"})
        try:
            answer = await web.fetch(method, _PATH, body)
        finally:
            await web.close()
        found = answer.document
        return answer.status, members_of(found), refusal_text(answer.body)


def limit_of(address: Address) -> InFlightLimit | None:
    """Return the limit an address asks for; None if it asks for none.

    Raises:
        InvalidInput: If its levels are no numbers above zero.
    """
    levels = address.counts(IN_FLIGHT, least=1)
    if levels is None:
        return None
    return InFlightLimit(address, levels)
