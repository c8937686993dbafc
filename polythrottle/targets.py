"""The GPU that a study tunes, and whether what is served runs there."""

from polythrottle.errors import DeviceError, InvalidInput
from polythrottle.identity import identity_of
from polythrottle.placement import Placement, Target
from polythrottle.ports import Device, Placed, Workload
from polythrottle.units import show_name

RUNS_ON = "runs_on"
"""The name under which a problem's content says what the work runs on."""


def target_of(device: Device) -> Target | None:
    """Return the GPU that is tuned on a device; None where none is: processors, simulated boards, recorded tables."""
    if device.uri.startswith("jetson"):
        return Target(device.title)
    if not device.uri.startswith("nvml:"):
        return None
    identity = identity_of(device)
    uuids = tuple(uuid for uuid in identity.get("uuid", "").replace(",", " ").split() if uuid)
    first = identity.get("pci", "").partition(",")[0]  # of a group: what runs in this process runs on one of it
    return Target(device.title, uuids, lambda: _number(first))


def _number(bus_id: str) -> int:
    """Return the number CUDA has for the GPU at a place NVML names; 0 where there is no CUDA to ask."""
    from polythrottle.workloads.cuda import Driver

    domain, _, rest = bus_id.lower().partition(":")
    try:
        driver = Driver()
    except DeviceError:
        return 0
    # NVML writes the domain in eight digits: 00000000:3B:00.0.
    return driver.number(f"{domain[-4:]}:{rest}") if rest else 0


def placed(served: Workload) -> Placement | None:
    """Return what a workload runs on, if it knows."""
    return served.placement if isinstance(served, Placed) else None


def runs_on(device: Device, served: Workload) -> dict[str, str]:
    """Return what a problem's content says of where the work runs: nothing where no GPU is tuned or nobody knows."""
    found = placed(served)
    return {} if found is None or target_of(device) is None else {RUNS_ON: str(found)}


def check_placed(device: Device, served: Workload, *, reopens: bool = True) -> None:
    """Check that what is tuned is what runs, unless somebody chose otherwise.

    Args:
        device: Whose knobs are searched.
        served: What is served.
        reopens: Whether its URI opens it again, so that an option in the URI helps.

    Raises:
        InvalidInput: If the knobs searched are a GPU's, and the work runs on the processor or on another GPU.
        DeviceError: If CUDA does not show the GPU to this process.
    """
    target, found = target_of(device), placed(served)
    if target is None or found is None or found.asked:
        return
    knobs = [name for name in device.space.names if target.uuids or name.startswith("gpu_")]
    if not knobs and not target.uuids:
        return
    tuned = f"{' and '.join(map(show_name, knobs)) or 'the energy'} of {target.title}"
    if found.gpu is None:
        stay = found.stay if reopens and found.stay else "search other knobs (--knobs)"
        raise InvalidInput(
            f"{served.uri} runs on {found}, and {tuned} would be tuned: {found.why}; {found.remedy}; "
            f"to have it there all the same: {stay}"
        )
    if len(target.uuids) == 1 and found.gpu != target.number:
        raise InvalidInput(
            f"{served.uri} runs on GPU {found.gpu} of CUDA, and {tuned} would be tuned, which is GPU {target.number} "
            "of CUDA; move it there"
        )
