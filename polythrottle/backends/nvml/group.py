"""Several NVIDIA GPUs that are steered as one, as a server's are that share one model (tensor parallelism).

One level for all: the ranks of a tensor-parallel model wait for each other in every layer, so that the slowest GPU
paces all of them. Under equal power caps GPUs of one model differ in speed, by 8 % on average (arXiv 2208.11035); at
equal clocks they do not.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from polythrottle.actuation import Difference, restore_all
from polythrottle.actuation.drivers.nvml import Library
from polythrottle.backends.nvml.device import NvmlDevice
from polythrottle.backends.nvml.knobs import DialledDevice, Dials
from polythrottle.backends.nvml.members import (
    check_name,
    chosen,
    common,
    differing,
    joined,
    joined_labels,
    means_several,
)
from polythrottle.domain.backports import paired
from polythrottle.domain.clock import Clock
from polythrottle.domain.errors import (
    DeviceError,
    InvalidInput,
    KnobAbsent,
    KnobRejected,
    PermissionDenied,
    PolythrottleError,
    StorageError,
)
from polythrottle.domain.measurement import Reading
from polythrottle.domain.ports import Finding
from polythrottle.domain.space import OperatingPoint

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
_GRAVEST = (StorageError, PermissionDenied, DeviceError)
"""What the errors of several GPUs amount to, the gravest first; else one trial is spoilt."""


def open_nvml(
    name: str = "", options: Mapping[str, str] | None = None, knobs: Sequence[str] | None = None
) -> NvmlDevice | NvmlGroup:
    """Return the GPU or the group of GPUs a URI means; a group of one is that GPU.

    Args:
        name: What follows the colon: an index, a UUID, ``0-7``, ``0,2``, ``all``, or nothing for the only GPU.
        options: What follows the question mark, the same for all.
        knobs: Which knobs to search.

    Raises:
        UnknownName: If there is no such option or GPU.
        InvalidInput: If the name or a value is malformed, or a GPU is named twice.
        DeviceError: If there is no driver, or one of the GPUs does not answer or is split by MIG.
    """
    try:
        if not means_several(name):
            return NvmlDevice.open(name, options, knobs)
        labels = chosen(Library(), name)
        members = [NvmlDevice.open(uuid, options, knobs) for uuid in labels]
    except DeviceError:
        check_name(name)  # where there is no driver that could say so
        raise
    if len(members) == 1:
        return members[0]
    return NvmlGroup(members, list(labels.values()), knobs)


class NvmlGroup(DialledDevice):
    """Several GPUs as one device: every level is set on all of them at once, or on none.

    Its knobs and levels are those that all of them have. A power limit is that of each GPU. Joules are the sum, the
    temperature is the hottest, the clocks are the slowest, and it is throttled when one of them is.

    Each GPU keeps its own record of originals, its own lease and its own guard, so that whatever dies, each is put back
    by itself, and nobody else steers one of them meanwhile.

    Args:
        members: The GPUs, two at least.
        labels: What messages call each.
        knobs: Which knobs to search, with all their levels; the choice of `space` if None.
        state: Folder for the originals, as the members have it; the user's state folder by default.

    Raises:
        InvalidInput: If there are fewer than two, or one is named twice.
    """

    def __init__(
        self,
        members: Sequence[NvmlDevice],
        labels: Sequence[str] = (),
        knobs: Sequence[str] | None = None,
        state: Path | None = None,
    ) -> None:
        if len(members) < 2 or len({each.uuid for each in members}) < len(members):
            raise InvalidInput("a group is of two GPUs at least, each named once")
        self.members = tuple(members)
        self.labels = tuple(labels) or tuple(each.uuid for each in members)
        self._searched = knobs
        self._state = state
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0

    @property
    def clock(self) -> Clock:
        """The clock all waiting and all readings go by."""
        return self.members[0].clock

    @property
    def uri(self) -> str:
        """The URI that opens this group again, by UUIDs: indexes move."""
        options = self.members[0].uri.partition("?")[2]
        return f"nvml:{','.join(each.uuid for each in self.members)}{'?' if options else ''}{options}"

    @cached_property
    def title(self) -> str:
        """How many GPUs of which model."""
        return " + ".join(f"{len(labels)} x {name}" for name, labels in self._models.items())

    @cached_property
    def _models(self) -> Mapping[str, list[str]]:
        found: dict[str, list[str]] = {}
        for label, member in paired(self.labels, self.members):
            found.setdefault(member.title, []).append(label)
        return found

    @cached_property
    def identity(self) -> Mapping[str, str]:
        """What identifies the GPUs and their firmware; the name says how many there are of each model."""
        every = [each.identity for each in self.members]
        found = {name: [each.get(name, "") for each in every] for name in every[0]}
        alike = {name: ", ".join(filter(None, dict.fromkeys(texts))) for name, texts in found.items()}
        return {**alike, "name": self.title, "gpus": str(len(self.members))}

    @property
    def files(self) -> tuple[str, ...]:
        """The files that tell of the GPUs."""
        return tuple(dict.fromkeys(path for each in self.members for path in each.files))

    @cached_property
    def boundary(self) -> str:
        """What the joules cover."""
        texts = dict(paired(self.labels, self._together(lambda each: each.boundary)))
        alike = set(texts.values())
        told = f"each {alike.pop()}" if len(alike) == 1 else joined(texts)
        return f"the sum of {len(self.members)} GPUs: {told}"

    @property
    def differences(self) -> tuple[Difference, ...]:
        """What was left changed on restoring because someone else had set it since."""
        return tuple(found for each in self.members for found in each.differences)

    @cached_property
    def _every(self) -> Mapping[str, Dials]:
        return dict(paired(self.labels, self._together(lambda each: each.dials)))

    @cached_property
    def dials(self) -> Dials:
        """Every knob, with the levels that all the GPUs have or the reason it is off."""
        return common(self._every)

    def altered(self) -> tuple[str, ...]:
        """Return the knobs that no longer hold on one of the GPUs what was applied last.

        Raises:
            DeviceError: If a GPU is gone.
        """
        changed = {name for found in self._together(lambda each: each.altered()) for name in found}
        return tuple(dial.name for dial in self.dials.on if dial.name in changed)

    def findings(self) -> tuple[Finding, ...]:
        """Return what works on these GPUs and what does not, and where they differ; sets nothing.

        Raises:
            DeviceError: If a GPU is gone.
        """
        every = self._together(lambda each: each.findings())
        subjects = list(dict.fromkeys(found.subject for findings in every for found in findings))
        return (self._alike(), *(found for subject in subjects for found in self._of(subject, every)))

    def _alike(self) -> Finding:
        if len(self._models) == 1:
            return Finding("GPUs", True, f"{self.title}: set together, to one level")
        models = "; ".join(f"{joined_labels(labels)}: {name}" for name, labels in self._models.items())
        return Finding("GPUs", None, f"they differ: {models}; only the levels that all of them have are set")

    def _of(self, subject: str, every: Sequence[Sequence[Finding]]) -> Iterator[Finding]:
        """Yield what all GPUs say of a subject, once where they say the same."""
        if subject in self.dials.knobs and (apart := differing(subject, self._every)):
            dial = self.dials.knobs[subject]
            shared = len(dial.texts)
            told = dial.off or f"{shared} level{'s' if shared != 1 else ''} that all have"
            yield Finding(subject, shared > 1, f"{told}, for the GPUs differ: {apart}")
            return
        said: dict[object, tuple[Finding, list[str]]] = {}
        for label, findings in paired(self.labels, every):
            for found in findings:
                if found.subject == subject:
                    said.setdefault(_roughly(found), (found, []))[1].append(label)
        for found, labels in said.values():
            where = "" if len(labels) == len(self.members) else f"{joined_labels(labels)}: "
            yield Finding(found.subject, found.works, f"{where}{found.explanation}", found.remedy)

    def apply(self, point: OperatingPoint) -> None:
        """Set a point on every GPU at once, read it back on each, and wait for the clocks of each.

        If one refuses, every GPU is put back to how it was found: none runs at another level than the others.

        Raises:
            KnobRejected: If a GPU does not have the point, or refuses it or does not keep it; says which.
            KnobAbsent: If the driver answers that a GPU does not have a knob at all.
            PermissionDenied: If this process may not set anything.
            DeviceError: If the group was not entered or a GPU is gone.
            StorageError: If the originals cannot be saved.
        """
        wanted = self._wanted(point)
        try:
            self._together(lambda each: each.apply(wanted))
        except PolythrottleError as err:
            self._take_back(err)
            raise

    def _take_back(self, err: PolythrottleError) -> None:
        try:
            self.restore()
        except PolythrottleError as left:
            raise DeviceError(f"{err}; and not everything is back: {left}") from err

    def read(self) -> Reading:
        """Return the energy of all so far, the hottest sensor, the slowest clocks, and whether any slowed itself down.

        Raises:
            DeviceError: If a GPU is gone, its driver was loaded anew, or it reports neither energy nor power.
        """
        found = self._together(lambda each: each.read())
        domains = [name for name in found[0].clocks_hz if all(name in each.clocks_hz for each in found)]
        return Reading(
            time_s=max(each.time_s for each in found),
            energy_j=sum(each.energy_j for each in found),
            temperature_c=max((each.temperature_c for each in found if each.temperature_c is not None), default=None),
            clocks_hz={name: min(each.clocks_hz[name] for each in found) for name in domains},
            throttled=any(each.throttled for each in found),
            cause=self._said([each.cause for each in found]),
            overrun=self._said([each.overrun for each in found]),
        )

    def _said(self, texts: Sequence[str]) -> str:
        """Return what is said of those GPUs of which something is."""
        return joined({label: text for label, text in paired(self.labels, texts) if text})

    def restore(self) -> None:
        """Restore every GPU to how it was found, those that can be even where one cannot.

        Raises:
            DeviceError: If something cannot be put back; names each.
        """
        self._together(lambda each: each.restore())

    def hand_over(self, holder: str, seconds: float | None, confirmed_s: float | None = None) -> str:
        """Leave the settings in place as each GPU does; if one cannot be handed over, none is left changed.

        Returns:
            The names under which the GPUs stand on record, with commas between.

        Raises:
            DeviceError: If the group was not entered, or a guard cannot be started.
        """
        names: list[str] = []
        try:
            for each in self.members:
                names.append(each.hand_over(holder, seconds, confirmed_s))
        except BaseException:
            for name in names:
                with suppress(PolythrottleError):  # the guard of each is there too
                    restore_all(self._state, device=name)
            raise
        return ", ".join(names)

    # All at once

    def _together(self, work: Callable[[NvmlDevice], T]) -> list[T]:
        """Return what each GPU answers, asked all at the same time.

        Whatever comes meanwhile, such as Ctrl-C, waits until all are done: none is left in the middle of a write.

        Raises:
            PolythrottleError: If one of them fails; says which, and of how many.
        """
        with ExitStack() as stack:
            if self._pool is not None:
                pool = self._pool
            else:
                pool = stack.enter_context(_threads(len(self.members)))
            futures = [pool.submit(work, each) for each in self.members]
            interrupted = _finished(futures)
        if interrupted is not None:
            raise interrupted
        errors = {
            label: error for label, future in paired(self.labels, futures) if (error := future.exception()) is not None
        }
        if errors:
            raise _joined(errors)
        return [future.result() for future in futures]

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Look at every GPU in the background as when entered, without becoming their writer."""
        with ExitStack() as stack:
            if self._pool is None:
                self._pool = stack.enter_context(_threads(len(self.members)))
                stack.callback(self._forget_threads)
            for each in self.members:
                stack.enter_context(each.sampling())
            yield

    def _forget_threads(self) -> None:
        self._pool = None

    def __enter__(self) -> Self:
        self._process = os.getpid()
        with ExitStack() as stack:
            self._pool = stack.enter_context(_threads(len(self.members)))
            stack.callback(self._forget_threads)
            # Probed at the same time on all: below they are entered one after the other.
            self._together(lambda each: each.dials)
            for each in self.members:
                stack.enter_context(each)
            stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process != os.getpid():  # a fork has none of the threads
            for each in self.members:
                each.__exit__(kind, error, trace)
            return
        try:
            self._together(lambda each: each.__exit__(kind, error, trace))
        finally:
            if self._pool is not None:
                self._pool.shutdown()
            self._forget_threads()


def _roughly(found: Finding) -> object:
    """Return what two findings have in common that say the same; a step that is measured is never twice equal."""
    if found.subject != "energy":
        return found
    return found.works, re.sub(r"[\d.]+", lambda number: f"{float(number[0].rstrip('.') or 0):.1g}", found.explanation)


def _threads(count: int) -> ThreadPoolExecutor:
    """Return so many threads, all of them running: once something is changed none may be lacking.

    Raises:
        DeviceError: If they cannot be started.
    """
    pool = ThreadPoolExecutor(count, "polythrottle-gpu")
    met = threading.Barrier(count)
    try:
        wait([pool.submit(met.wait) for _ in range(count)])
    except RuntimeError as err:
        met.abort()
        pool.shutdown()
        raise DeviceError(f"cannot start a thread for each of {count} GPUs: {err}") from err
    return pool


def _finished(futures: Sequence[Future[T]]) -> BaseException | None:
    """Wait for all, and return what interrupted the wait, if anything did."""
    interrupted: BaseException | None = None
    while True:
        try:
            wait(futures)
            return interrupted
        except BaseException as err:  # Ctrl-C, or what a handler of another signal raises
            interrupted = err


def _joined(errors: Mapping[str, BaseException]) -> BaseException:
    """Return what the errors of several GPUs amount to."""
    for error in errors.values():
        # A fault of ours is told as it is.
        if not isinstance(error, PolythrottleError):
            return error
    told = joined({label: str(error) for label, error in errors.items()})
    kinds = [kind for kind in _GRAVEST if any(isinstance(error, kind) for error in errors.values())]
    if kinds:
        return kinds[0](told)
    absent = next((error for error in errors.values() if isinstance(error, KnobAbsent)), None)
    if absent is None:
        return KnobRejected(told)
    return KnobAbsent(told, absent.knob)
