"""Several services on one server: their control loops turn one after the other, and share its watts every second.

Each service has a loop of its own, with its board, traffic, profile and record; one thread turns them all, so that the
board of one is never set while another's share is decided. What goes wrong with one is its own: the others go on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from polythrottle.actuation.systemd import Supervisor
from polythrottle.daemon.budgets import LEAST_W, MOST_W
from polythrottle.daemon.commands import Answer, Command, SetBudget, SetNodePower, Stop
from polythrottle.daemon.control.events import ApplyRefused, PowerShare
from polythrottle.daemon.control.power_sharing import PowerSplit, cuts_first
from polythrottle.daemon.control.state import Phase
from polythrottle.daemon.history_store import HistoryStore
from polythrottle.daemon.loop.mailbox import EventRecorder, Mailbox, resident_bytes, stamp
from polythrottle.daemon.loop.runner import PERIOD_S, STEP_S, STUMBLES_MOST, STUMBLES_S, Lateness
from polythrottle.daemon.loop.service_power_split import Member, SharedPower
from polythrottle.daemon.observation import JUMP_S, known_sum
from polythrottle.daemon.status import MAY_DIFFER, BudgetShown, NodeShown, PodShown, ServiceShown, Status
from polythrottle.domain.backports import removeprefix
from polythrottle.domain.clock import Clock
from polythrottle.domain.errors import DeviceError, InvalidInput, PolythrottleError
from polythrottle.domain.units import show

_KEPT = "node power"
_OF_ITS_OWN = ("start", "stop")
"""Kinds of events that the server has itself, once for all services."""
_UNMET_S = 5.0
_ROUNDS_MOST = 3
_WITHIN_MOST_S = 3600.0


@dataclass(frozen=True)
class _Deadline:
    limit_w: float
    asked_s: float
    within_s: float


class Guests(Protocol):
    """Services that come and go while the daemon runs, such as pods."""

    @property
    def faults(self) -> tuple[str, ...]:
        """What does not work now, in words."""

    @property
    def shown(self) -> tuple[PodShown, ...]:
        """Every one that asks to be looked after."""

    def turn(self, node: Node) -> None:
        """Admit those that have come, and dismiss those that are gone."""

    def close(self) -> None:
        """Follow them no more."""


class Node:
    """The control loop of a server of services.

    Args:
        members: Its services.
        power: What they share.
        clock: It goes by.
        desk: Where the server as a whole is met.
        record: Remembers the limit and what happened.
        wall: Wall time, seconds since the epoch.
        supervisor: The service manager.
        version: Of polythrottle.
        left_out: Why further services are not looked after, a line each.
        guests: Services that come and go; None if there are none such.

    Attributes:
        shown: What is shown of all services together.
        events: Takes what happened to the server.
    """

    def __init__(
        self,
        members: Sequence[Member],
        power: SharedPower,
        *,
        clock: Clock,
        desk: Mailbox,
        record: HistoryStore,
        wall: Callable[[], float],
        supervisor: Supervisor | None = None,
        version: str = "",
        left_out: Sequence[str] = (),
        guests: Guests | None = None,
    ) -> None:
        self.members = tuple(members)
        self._left_out = tuple(left_out)
        self._stumbles: deque[float] = deque(maxlen=STUMBLES_MOST)
        self._guests = guests
        self.power = power
        self.shown = NodeShown()
        self.events = EventRecorder(record, desk)
        self._clock = clock
        self._desk = desk
        self._record = record
        self._wall = wall
        self._supervisor = supervisor or Supervisor({})
        self._version = version
        self._since = stamp(wall())
        self._number = 0
        self._due_s = clock.now()
        self._lateness = Lateness()
        self._turned_s = clock.now()
        self._deadline: _Deadline | None = None
        self._unmet_s: float | None = None
        self._stopping = False
        self._resume(power.limit_w)

    def run(self) -> None:
        """Turn once a second until `stop` is called; every board is given back whatever happens.

        Raises:
            DeviceError: If a board could not be restored, no service is left, or the loop failed three times in a
                minute.
        """
        with ExitStack() as ends:
            # Run in reverse: the boards go back, then it is told how that went, then nothing more is noted.
            ends.callback(self._record.close)
            ends.callback(self._tell_end)
            ends.callback(self._end_all)
            for member in self.members:
                member.runner.begin()
            self._publish()
            self._supervisor.ready("the control loops turn")
            while not self._stopping:
                try:
                    self.turn()
                    self._wait()
                except Exception as error:
                    self._recover(error)
            self._supervisor.stopping()
        left = [f"{member.name}: {member.failed}" for member in self.members if member.failed]
        if left:
            raise DeviceError("; ".join(left))

    def _tell_end(self) -> None:
        """Say how it ended, after every board was given back."""
        # Each service says of its own board that it may differ, which need not be said again for each of eight.
        said = {member.name: removeprefix(member.failed, f"the board {MAY_DIFFER}") for member in self.members}
        left = [f"{name}: {words}" for name, words in said.items() if words]
        words = "every board is as it was found"
        if left:
            words = f"a board {MAY_DIFFER}{'; '.join(left)}"
        self.events.tell("stop", f"the daemon has ended; {words}")

    def _end_all(self) -> None:
        with ExitStack() as ends:
            if self._guests is not None:
                ends.callback(self._guests.close)
            for member in self.members:
                ends.callback(self._ended, member)

    def stop(self) -> None:
        """End the loop after the turn under way."""
        self._stopping = True

    def admit(self, member: Member) -> None:
        """Look after one more service from now on."""
        self._begin(member)
        self.members = (*self.members, member)
        member.runner.begin()

    def dismiss(self, name: str) -> str:
        """Look after a service no more; its board is given back. Returns why it may not be as it was found, or ""."""
        gone = next(member for member in self.members if member.name == name)
        failed = gone.failed
        self._hear()
        self._ended(gone)
        self.members = tuple(member for member in self.members if member is not gone)
        self.power.sharing.forget(name)
        return "" if gone.failed == failed else gone.failed

    def _begin(self, member: Member) -> None:
        if self.power.limit_w is not None:
            # Until the next split it stays lowest: nothing is known of what the others draw.
            member.runner.executor.do(PowerShare(0.0))
        member.heard = max((event.number for event in member.mailbox.events()), default=0)

    def turn(self) -> None:
        """Do what belongs to one control period of every service, and share the watts."""
        now_s = self._clock.now()
        self._number += 1
        late_s = now_s - self._due_s
        self._lateness.note(late_s)
        if -PERIOD_S <= late_s < JUMP_S:
            self._due_s += PERIOD_S * (1 + int(max(0.0, late_s) / PERIOD_S))
        else:
            self._due_s = now_s + PERIOD_S
        self._answer()
        if self._guests is not None:
            self._guests.turn(self)
        for member in self._living():
            self._attempt(member, member.runner.turn)
            member.seen(now_s)
        self._measure(now_s)
        self._share()
        self._publish()
        self.events.flush()
        self._supervisor.alive()

    def study_waits(self, name: str) -> str:
        """Return why no study of a service may begin now; empty if one may."""
        for member in self._living():
            if member.name != name and member.runner.executor.state.study_runs:
                return f"one of {member.name} runs, and studies on one server take turns"
        limit_w = self.power.limit_w
        if limit_w is None:
            return ""
        others = [member.service() for member in self.members if member.name != name]
        bound_w = next(member.bound_w for member in self.members if member.name == name)
        needed_w = bound_w + self.power.rest_w() + (self.power.sharing.least_w(others) if others else 0.0)
        if needed_w > limit_w:
            return (
                f"its devices may draw {show(bound_w, 'W')} while a study sets them, for which the server's "
                f"{show(limit_w, 'W')} leave no room"
            )
        return ""

    def answer(self, command: Command) -> Answer:
        """Do what is asked of the server as a whole and say so.

        Raises:
            PolythrottleError: If it cannot be done; says why.
        """
        if isinstance(command, Stop):
            self._stopping = True
            return {"words": "the daemon ends, and gives every board back"}
        if isinstance(command, SetNodePower):
            return {"words": self._limited(command.power_w, command.within_s)}
        if isinstance(command, SetBudget):
            if command != SetBudget(power_w=command.power_w):
                raise InvalidInput("a server of services shares watts alone; batteries and days are of one service")
            return {"words": self._limited(command.power_w, None)}
        names = ", ".join(member.name for member in self.members)
        raise InvalidInput(
            f"this daemon looks after several services: say which of {names}; over HTTP below /services/NAME, "
            "on the command line with --service NAME where a command has it"
        )

    def _limited(self, power_w: float | None, within_s: float | None) -> str:
        if within_s is not None and not 1 <= within_s <= _WITHIN_MOST_S:
            raise InvalidInput(f"--within lies between 1 s and 1 h, not at {within_s:g} s")
        if power_w is not None:
            self._check(power_w)
        self.power.changed(power_w)
        self._keep()
        if power_w is None:
            words = "no limit holds for the server any more"
            for member in self._living():
                member.runner.executor.do(PowerShare(None))
        else:
            words = f"the server draws at most {show(power_w, 'W')}"
            self._share()
        self._deadline = None
        if power_w is not None and within_s is not None:
            words = f"{words}, within {within_s:g} s"
            self._deadline = _Deadline(power_w, self._clock.now(), within_s)
        short = self._short()
        if short:
            words = f"{words}; short of watts: {short}"
        self.events.tell("budget", words)
        self._publish()
        return words

    def _check(self, power_w: float) -> None:
        """Refuse a limit that not even the lowest points keep.

        Raises:
            InvalidInput: If it cannot be kept; says from where on it can.
        """
        if not LEAST_W <= power_w <= MOST_W:
            raise InvalidInput(f"--power lies between 1 mW and 1 MW, not at {power_w:g} W")
        held = replace(self.power, limit_w=power_w)
        least_w = held.rest_w() + self.power.sharing.least_w([member.service() for member in self.members])
        if power_w < least_w:
            raise InvalidInput(
                f"at most {show(power_w, 'W')} cannot be kept: at their lowest points the services and the rest of the "
                f"server may draw {show(least_w, 'W')}; give more than that"
            )

    def _short(self) -> str:
        split = self.power.split
        if split is None:
            return ""
        return ", ".join(share.name for share in split.shares if share.broken)

    def _answer(self) -> None:
        for asked in self._desk.wishes():
            try:
                asked.answer.set_result(self.answer(asked.wish))
            except PolythrottleError as error:
                asked.answer.set_exception(error)
            except BaseException:
                asked.answer.set_exception(DeviceError("the daemon failed at this; its events say more"))
                raise
        for member in self.members:
            if member.failed:  # its own loop answers nobody any more
                for asked in member.mailbox.wishes():
                    asked.answer.set_exception(DeviceError(f"it is not looked after any more: {member.failed}"))

    def _living(self) -> list[Member]:
        return [member for member in self.members if not member.failed]

    def _attempt(self, member: Member, work: Callable[[], None]) -> None:
        """Do a part of a service's loop; one that fails again and again is ended, and the others go on."""
        try:
            member.runner.attempt(work)
        except PolythrottleError as error:
            member.failed = str(error)
            self._hear()
            self.events.tell("fault", f"{member.name} is not looked after any more: {error}")
            self._ended(member)
        self._stopping |= member.runner.stopping  # there is one process, so that stopping one service ends all

    def _recover(self, error: Exception) -> None:
        """Say that the server's own loop failed, have every service go to its safe point, and go on from the next turn.

        Raises:
            DeviceError: If it failed three times in a minute, which is no accident.
        """
        words = f"the server's control loop failed: {type(error).__name__}: {error}"[:300]
        now_s = self._clock.now()
        self.events.tell("fault", words)
        self._stumbles.append(now_s)
        if len(self._stumbles) == STUMBLES_MOST and 0 <= now_s - self._stumbles[0] < STUMBLES_S:
            raise DeviceError(f"{STUMBLES_MOST} times in a minute {words}") from error
        for member in self._living():
            self._attempt(member, partial(member.runner.executor.do, ApplyRefused(words)))
        # Not from the turn that failed: it may be what the next one would begin with.
        self._due_s = self._clock.now() + PERIOD_S
        self._clock.sleep(PERIOD_S)

    def _ended(self, member: Member) -> None:
        if member.ended:
            return
        member.ended = True
        try:
            member.runner.end()
        except PolythrottleError as error:
            member.failed = member.failed or str(error)
        except Exception as error:  # the boards of the others are given back all the same
            member.failed = member.failed or f"{type(error).__name__}: {error}"[:300]

    def _measure(self, now_s: float) -> None:
        power = self.power
        boards_w: float | None = 0.0
        for member in self.members:
            boards_w = None if boards_w is None or member.power_w is None else boards_w + member.power_w
        if power.limit_w is not None:
            power.sharing.seen([member.service() for member in self._living()], now_s - self._turned_s)
        self._turned_s = now_s
        power.measured(boards_w)
        self._hold(now_s)

    def _hold(self, now_s: float) -> None:
        """Say when a limit that was to hold within a time holds, or that it does not."""
        deadline = self._deadline
        whole_w = self.power.whole_w
        if deadline is None:
            return
        passed_s = now_s - deadline.asked_s
        if whole_w is not None and whole_w <= deadline.limit_w and passed_s >= PERIOD_S:
            self._deadline = None
            self.events.tell("budget", f"at most {show(deadline.limit_w, 'W')} holds, after {passed_s:.0f} s")
        elif passed_s > deadline.within_s:
            self._deadline = None
            seen = "what the server draws is not known" if whole_w is None else f"it draws {show(whole_w, 'W')}"
            self.events.tell(
                "fault", f"at most {show(deadline.limit_w, 'W')} does not hold after {deadline.within_s:g} s: {seen}"
            )

    def _share(self) -> None:
        """Split the watts: those who must go down do so before anybody may go up."""
        limit_w = self.power.limit_w
        if limit_w is None:
            return
        if not self.members:
            self.power.split = None
            return
        split = self._split(limit_w)
        for _ in range(_ROUNDS_MOST):
            told = self._cut(split)
            again = self._split(limit_w)
            # A board that refused to go down is counted with all it can draw, for which the others make room.
            if not told or [share.share_w is None for share in again.shares] == [
                share.share_w is None for share in split.shares
            ]:
                break
            split = again
        by_name = {member.name: member for member in self.members}
        for share in split.shares:
            member = by_name[share.name]
            if not member.failed:
                self._tell(member, share.limit_w)
            member.applies = (member.applies[1], member.runner.executor.applies)
        self.power.split = split
        self._judge(split)

    def _split(self, limit_w: float) -> PowerSplit:
        services = [member.service() for member in self.members]
        return self.power.sharing.split(limit_w, self.power.rest_w(), services)

    def _cut(self, split: PowerSplit) -> bool:
        """Tell those services that are left less than before; return whether there was one."""
        states = {member.name: member.runner.executor.state for member in self.members}
        by_name = {member.name: member for member in self._living()}
        told = False
        for share in cuts_first(split, states):
            before = states[share.name].share_w
            if share.name in by_name and (before is None or share.limit_w < before):
                self._tell(by_name[share.name], share.limit_w)
                told = True
        return told

    @staticmethod
    def _tell(member: Member, limit_w: float) -> None:
        if member.runner.executor.state.share_w != limit_w:
            member.runner.executor.do(PowerShare(limit_w))

    def _judge(self, split: PowerSplit) -> None:
        now_s = self._clock.now()
        if split.met:
            if self._unmet_s is not None and self._unmet_s == -math.inf:
                self.events.tell("budget", f"what all may draw is within {show(split.budget_w, 'W')} again")
            self._unmet_s = None
        elif self._unmet_s is None:
            self._unmet_s = now_s
        elif now_s - self._unmet_s >= _UNMET_S and self._unmet_s != -math.inf:
            self._unmet_s = -math.inf  # stands for: told already
            counted_w = split.rest_w + sum(share.counted_w for share in split.shares)
            loose = ", ".join(share.name for share in split.shares if share.share_w is None) or "none of them"
            self.events.tell(
                "fault",
                f"{show(split.budget_w, 'W')} cannot be promised: at their lowest the services may draw "
                f"{show(counted_w, 'W')}; not bounded now: {loose}",
            )

    def _wait(self) -> None:
        """Wait for the next turn; meanwhile answer, and let those look sooner where requests pile up."""
        clock = self._clock
        while not self._stopping and 0 < (left_s := self._due_s - clock.now()) < 2 * PERIOD_S:
            if any(member.runner.executor.up for member in self._living()):
                left_s = min(left_s, STEP_S)
            clock.sleep(left_s)
            self._answer()
            for member in self._living():
                self._attempt(member, member.runner.answer)
                self._attempt(member, partial(member.runner.hurry, self._due_s))

    def _resume(self, configured_w: float | None) -> None:
        """Go on with the limit that was set while the daemon ran last, unless it is told another one now."""
        kept = self._record.kept(_KEPT)
        self._configured_w = configured_w
        if isinstance(kept, dict) and kept.get("configured_w") == configured_w:
            limit_w = kept.get("power_w")
            if limit_w is None or (isinstance(limit_w, (int, float)) and LEAST_W <= limit_w <= MOST_W):
                self.power.limit_w = limit_w
        for member in self.members:
            self._begin(member)
        words = f"{len(self.members)} services: {', '.join(member.name for member in self.members)}"
        if self._guests is not None:
            words = "the pods of this node"
        self.events.tell("start", f"the daemon has started, for {words}")
        for reason in self._left_out:
            self.events.tell("fault", reason)

    def _keep(self) -> None:
        self._record.keep(_KEPT, {"configured_w": self._configured_w, "power_w": self.power.limit_w})

    def _hear(self) -> None:
        """Tell what happened to the services, by name, where the server as a whole is listened to."""
        for member in self.members:
            for event in member.mailbox.events(member.heard):
                member.heard = event.number
                if event.kind not in _OF_ITS_OWN:
                    self.events.tell(event.kind, f"{member.name}: {event.words}")

    def _publish(self) -> None:
        self._hear()
        self.shown = self._node_shown()
        self._desk.publish(self._status())

    def _node_shown(self) -> NodeShown:
        power = self.power
        split = power.split
        shares = {} if split is None else {share.name: share for share in split.shares}
        found = []
        for member in self.members:
            status = member.mailbox.status
            share = shares.get(member.name)
            found.append(
                ServiceShown(
                    name=member.name,
                    weight=member.weight,
                    device=status.device,
                    phase=status.phase,
                    reason=member.failed or status.reason,
                    power_w=member.power_w,
                    share_w=None if share is None else share.share_w,
                    counted_w=None if share is None else share.counted_w,
                    short=share is not None and share.broken,
                    p99_s=status.p99_s,
                    limit_s=status.limit_s,
                    rate_per_s=status.rate_per_s,
                    rung=None if status.rung is None else status.rung.number,
                    rungs=None if status.rung is None else status.rung.of,
                    studying=status.phase == Phase.STUDYING,
                    faults=(*status.faults, *((member.failed,) if member.failed else ())),
                )
            )
        known = [member.power_w for member in self.members]
        boards_w = None if any(each is None for each in known) else math.fsum(each or 0.0 for each in known)
        return NodeShown(
            turn=self._number,
            at=stamp(self._wall()),
            power_w=power.whole_w,
            boards_w=boards_w,
            rest_w=None if split is None else split.rest_w,
            limit_w=power.limit_w,
            met=None if split is None else split.met,
            buys="" if split is None else split.buys,
            buys_w=None if split is None else split.buys_w,
            energy_kind=", ".join(sorted({member.mailbox.status.energy_kind for member in self.members})),
            above=power.above,
            above_most=power.above_most,
            services=tuple(found),
            faults=self._faults(),
            pods=() if self._guests is None else self._guests.shown,
        )

    def _faults(self) -> tuple[str, ...]:
        """Return what does not work with the server as a whole."""
        own = [words for words in (self.power.fault, self._record.fault) if words]
        return (*self._left_out, *own, *(() if self._guests is None else self._guests.faults))

    def _status(self) -> Status:
        """Return the server as one status: sums where they make sense, and what does not work, by service."""
        each = [(member.name, member.mailbox.status) for member in self.members]
        energy_j: float | None = None
        requests: int | None = None
        failed: int | None = None
        for _, status in each:
            energy_j = known_sum(energy_j, status.energy_j)
            requests = known_sum(requests, status.requests)
            failed = known_sum(failed, status.failed)
        temperatures = [status.temperature_c for _, status in each if status.temperature_c is not None]
        faults = [f"{name}: {words}" for name, status in each for words in status.faults]
        faults += [f"{member.name}: {member.failed}" for member in self.members if member.failed]
        shown = self.shown
        faults += shown.faults
        first = each[0][1].phase if each else Phase.DOWN
        words = ""
        if shown.limit_w is not None:
            words = f"the server draws at most {show(shown.limit_w, 'W')}"
        return Status(
            turn=self._number,
            at=shown.at,
            since=self._since,
            polythrottle=self._version,
            device="node",
            title=f"a server of {len(each)} services: {', '.join(name for name, _ in each) or 'none yet'}",
            energy_kind=shown.energy_kind,
            boundary="the devices of all services",
            phase=str(Phase.FOLLOWING if any(s.phase == Phase.FOLLOWING for _, s in each) else first),
            reason="; ".join(f"{name} is {status.phase}" for name, status in each),
            leased=all(status.leased for _, status in each),
            reachable=all(status.reachable for _, status in each),
            power_w=shown.boards_w,
            energy_j=energy_j,
            temperature_c=max(temperatures, default=None),
            budget=BudgetShown(words, shown.limit_w, met=shown.met),
            late_s=self._lateness.last_s,
            late_p99_s=self._lateness.p99_s,
            resident_bytes=resident_bytes(),
            faults=tuple(faults),
            requests=requests,
            failed=failed,
            told=dict(self.events.counts),
        )
