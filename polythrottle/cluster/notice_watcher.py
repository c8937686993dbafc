"""Polls a node's sources of notices beside its training: tells the controller, and leaves in time."""

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from polythrottle.cluster.notice_sources import (
    CLOUDS,
    FileSource,
    Notice,
    NoticeSource,
    SignalSource,
    leave_in_s,
    ray_source,
    slurm_from_environment,
)
from polythrottle.domain.clock import Clock, SystemClock
from polythrottle.domain.errors import InvalidInput, PolythrottleError, UnknownName

MARGIN_S = 15.0
SOURCES = ("file:PATH", "signal:USR1", "slurm", "ray", *CLOUDS)


class NoticeListener(Protocol):
    """Who is told of a notice."""

    def say(self, verb: str, **words: object) -> None:
        """Say something about this node."""


def source_from(text: str) -> NoticeSource:
    """Return the source that a text names.

    Raises:
        UnknownName: If it names none.
        InvalidInput: If the source cannot work here.
    """
    name, _, word = text.partition(":")
    if name == "file" and word:
        return FileSource(Path(word))
    if name == "signal" and word:
        return SignalSource(word)
    if name == "slurm":
        return slurm_from_environment(os.environ)
    if name == "ray":
        return ray_source()
    if name in CLOUDS and not word:
        return CLOUDS[name]()
    raise UnknownName("source of notices", text[:60], SOURCES)


@dataclass
class NoticeWatch:
    """The sources of one node.

    Attributes:
        sources: Who is asked.
        say: Takes lines for people.
        margin_s: Time for a checkpoint and for parting, in seconds.
        clock: Tells when whom to ask.
    """

    sources: Iterable[NoticeSource]
    say: Callable[[str], object]
    margin_s: float = MARGIN_S
    clock: Clock = field(default_factory=SystemClock)
    _next_s: dict[str, float] = field(default_factory=dict)
    _known: set[tuple[str, str]] = field(default_factory=set)
    _silent: set[str] = field(default_factory=set)
    _leave_s: float | None = None
    _why: str = ""

    def start(self, told: NoticeListener, take_away: Callable[[str], None]) -> None:
        """Watch in a thread of its own until the node leaves.

        Args:
            told: Told of each new notice, for the controller.
            take_away: Called when it is time to leave.
        """
        threading.Thread(target=self._watch, args=(told, take_away), daemon=True).start()

    def look(self, told: NoticeListener) -> str:
        """Ask whom it is time to ask, and return why to leave now; empty to stay."""
        now_s = self.clock.now()
        for source in self.sources:
            if now_s >= self._next_s.get(source.name, now_s):
                self._next_s[source.name] = now_s + source.every_s
                notice = self._asked(source)
                if notice is not None and (source.name, notice.kind) not in self._known:
                    self._known.add((source.name, notice.kind))
                    self._take(notice, told, now_s)
        if self._leave_s is not None and now_s >= self._leave_s:
            return self._why
        return ""

    def _asked(self, source: NoticeSource) -> Notice | None:
        try:
            notice = source.poll()
        except PolythrottleError as err:
            # Told once: a metadata endpoint that is away would else be told of at every look.
            if source.name not in self._silent:
                self._silent.add(source.name)
                self.say(f"no notices from {source.name}: {err}; asking again")
            return None
        self._silent.discard(source.name)
        return notice

    def _take(self, notice: Notice, told: NoticeListener, now_s: float) -> None:
        told.say("notice", kind=str(notice.kind), left_s=notice.left_s, source=notice.source)
        left = ""
        if notice.left_s is not None:
            left = f", {notice.left_s:.0f} s left"
        self.say(f"{notice.source} says: {notice.kind}{left}")
        wait_s = leave_in_s(notice, self.margin_s)
        # A later notice may shorten the time left, as a spot notice after a time limit; none lengthens it.
        if wait_s is not None and (self._leave_s is None or now_s + wait_s < self._leave_s):
            self._leave_s = now_s + wait_s
            self._why = f"notice of {notice.source}: {notice.kind}"

    def _watch(self, told: NoticeListener, take_away: Callable[[str], None]) -> None:
        while not (why := self.look(told)):
            self.clock.sleep(0.1)
        take_away(why)


def watch_from(texts: list[str], say: Callable[[str], object]) -> NoticeWatch | None:
    """Return the watch over the sources that texts name, None without any.

    Raises:
        UnknownName: If one names none.
        InvalidInput: If one cannot work here, or is named twice.
    """
    sources = [source_from(text) for text in texts]
    if len({source.name for source in sources}) < len(sources):
        raise InvalidInput("each source of notices is given once")
    if sources:
        return NoticeWatch(sources, say)
    return None
