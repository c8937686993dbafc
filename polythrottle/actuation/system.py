"""Every kind of control this machine can have, each reached in its own way."""

from collections.abc import Callable

from polythrottle.actuation.controls import Controls, SysFiles


class SystemControls:
    """Every kind of control this machine can have, each reached in its own way."""

    def __init__(self) -> None:
        self._ports: dict[str, Controls] = {}

    def read(self, key: str) -> str:
        """Return what a control holds."""
        return self._port(key).read(key)

    def write(self, key: str, text: str) -> None:
        """Write to a control."""
        self._port(key).write(key, text)

    def _port(self, key: str) -> Controls:
        scheme = key.partition(":")[0]
        if scheme not in self._ports:
            self._ports[scheme] = _OPENERS.get(scheme, SysFiles)()
        return self._ports[scheme]


def _nvpmodel() -> Controls:
    from polythrottle.actuation.nvpmodel import Nvpmodel

    return Nvpmodel()


def _nvml() -> Controls:
    from polythrottle.actuation.nvml import NvmlControls

    return NvmlControls()


_OPENERS: dict[str, Callable[[], Controls]] = {"nvpmodel": _nvpmodel, "nvml": _nvml}
