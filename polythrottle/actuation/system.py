"""Every kind of control this machine can have, each reached in its own way."""

from collections.abc import Callable

from polythrottle.actuation.controls import Controls, Start, SysFiles, factory, present_start


class SystemControls:
    """Every kind of control this machine can have, each reached in its own way.

    Args:
        stays: Whether a driver that counts its clients is to count this one for as long as it lives; else it is
            a client at each operation alone, so that a GPU can sleep and be reset.
    """

    def __init__(self, *, stays: bool = True) -> None:
        self._stays = stays
        self._ports: dict[str, Controls] = {}

    def read(self, key: str) -> str:
        """Return what a control holds."""
        return self._port(key).read(key)

    def write(self, key: str, text: str) -> None:
        """Write to a control."""
        self._port(key).write(key, text)

    def start(self, key: str) -> Start:
        """Return what tells the present start of a control's driver from the next."""
        return present_start(self._port(key), key)

    def factory(self, key: str) -> str | None:
        """Return what a control's driver itself begins with; None where nobody says."""
        return factory(self._port(key), key)

    def _port(self, key: str) -> Controls:
        scheme = key.partition(":")[0]
        if scheme not in self._ports:
            self._ports[scheme] = _OPENERS[scheme](self._stays) if scheme in _OPENERS else SysFiles()
        return self._ports[scheme]


def _nvpmodel(stays: bool) -> Controls:
    from polythrottle.actuation.nvpmodel import Nvpmodel

    return Nvpmodel()


def _nvml(stays: bool) -> Controls:
    from polythrottle.actuation.nvml import NvmlControls
    from polythrottle.actuation.nvml_library import Library

    return NvmlControls() if stays else NvmlControls(Library())


_OPENERS: dict[str, Callable[[bool], Controls]] = {"nvpmodel": _nvpmodel, "nvml": _nvml}
