"""What works on a processor and what does not, one line each, with what can be done about it."""

from collections.abc import Iterator

from polythrottle.actuation.controls import text_of
from polythrottle.backends.cpu.energy import probed
from polythrottle.backends.cpu.policies import MAX, Policies
from polythrottle.backends.cpu.preference import Preference
from polythrottle.backends.cpu.sensors import Sensors
from polythrottle.backends.cpu.zones import PERMISSION, Zone, Zones
from polythrottle.errors import PolythrottleError
from polythrottle.findings import Finding

_VIRTUAL = "; this is a virtual machine, and its host keeps them to itself"


def findings(policies: Policies, preference: Preference, zones: Zones, sensors: Sensors) -> tuple[Finding, ...]:
    """Return what works and what does not, with the reason."""
    temperature_c = sensors.temperature_c
    told = "no sensor of the processor" if temperature_c is None else f"{temperature_c:.1f} °C"
    return (
        *_knobs(policies, preference, sensors),
        _energy(zones, sensors),
        *([_platform(zones.platform)] if zones.platform else []),
        Finding("temperature", temperature_c is not None, told),
    )


def _knobs(policies: Policies, preference: Preference, sensors: Sensors) -> Iterator[Finding]:
    virtual = _VIRTUAL if sensors.virtual and not policies.folders else ""
    try:
        for each in (policies.upper, policies.lower, preference.capability):
            finding = each.finding
            known = finding.works or not virtual
            yield finding if known else Finding(each.name, False, f"{finding.explanation}{virtual}", finding.remedy)
    except PolythrottleError as err:
        yield Finding(MAX, False, " ".join(str(err).split()))
    if governor := policies.told("scaling_governor"):
        yield Finding("governor", True, f"{governor}, with driver {policies.told('scaling_driver')}; left alone")


def _energy(zones: Zones, sensors: Sensors) -> Finding:
    counted, reason, remedy = probed(zones)
    if counted is not None:
        return Finding("energy", True, counted.boundary)
    virtual = _VIRTUAL if sensors.virtual and reason == "no RAPL here" else ""
    return Finding("energy", False, f"{reason}{virtual}; estimated from busy time instead", remedy)


def _platform(zone: Zone) -> Finding:
    try:
        total_j = int(text_of(zone.energy)) * 1e-6
    except PermissionError:
        return Finding("psys", False, "the platform's counter is there but not readable", PERMISSION)
    except (OSError, ValueError) as err:
        return Finding("psys", False, f"the platform's counter cannot be read: {' '.join(str(err).split())}")
    return Finding("psys", True, f"{total_j:.1f} J on the platform's counter; holds the packages, so it is not added")
