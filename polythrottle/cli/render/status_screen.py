"""The screen of `polythrottle top`."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Grid, Horizontal
from textual.screen import ModalScreen
from textual.widgets import Static

from polythrottle.cli.render.status import (
    BAD,
    DIM,
    GOOD,
    HERE,
    WARN,
    clock_time,
    event_line,
    finetuning_words,
    guards_line,
    kind,
    knob_lines,
    load_words,
    p99_words,
    power_words,
    rung_lines,
    saved_words,
    spark,
    study_words,
    troubles,
)
from polythrottle.daemon.client import Client, Gone
from polythrottle.daemon.status import Happened, Status
from polythrottle.domain.errors import DeviceError, PermissionDenied, PolythrottleError
from polythrottle.storage.untrusted import printable

_KEPT_S = 600
_EVENTS = 100
_TRIALS = 30
_STALE_S = 5.0
_SURE_S = 5.0
_KEYS = "q quit   s study   r release or take   c keep a tried profile   ? help"
_HELP = """\
q       quit; the daemon goes on
s s     start a study of 30 trials, or stop the one that runs
r r     release the board as it was found, or take it again
c       keep the profile that is being tried
?       this help

s and r ask for a second press, so that no slip of a finger
changes the board.

The charts show the last seconds, a column each, from 0; red
is above the limit. ▶ marks the point that is set, of those
for each load. The daemon's page and its metrics show the same.

Any key closes this."""


class Help(ModalScreen[None]):
    """Says what the keys do."""

    CSS = "Help { align: center middle; } Help Static { width: 66; padding: 1 2; background: $surface; }"

    def compose(self) -> ComposeResult:
        """Lay it out."""
        yield Static(Text(_HELP))

    def on_key(self) -> None:
        """Go back."""
        self.dismiss()


class Gauge(Static):
    """A figure, what stands beside it, and how it went."""

    def draw(
        self, name: str, words: tuple[str, str], values: "deque[float | None] | None", limit: float | None
    ) -> None:
        """Write it anew.

        Args:
            name: Of the figure.
            words: The figure, and what stands beside it.
            values: How it went, oldest first; None if that is not kept.
            limit: What it should stay within.
        """
        width = self.size.width
        height = max(1, self.size.height - 1)
        now = values[-1] if values else None
        bad = limit is not None and now is not None and now > limit
        text = Text.assemble((f"{name} ", DIM), (words[0], BAD if bad else "bold"), f"  {words[1]}")
        if values is not None:
            self._chart(text, list(values), limit, (width, height))
        elif len(words[1]) + len(name) + len(words[0]) + 3 > width:
            text = Text.assemble((f"{name} ", DIM), (words[0], "bold"), f"\n{words[1]}")
        self.update(text)

    def _chart(self, text: Text, values: list[float | None], limit: float | None, size: tuple[int, int]) -> None:
        top = 1.05 * max((each for each in (*values, limit) if each is not None), default=1.0) or 1.0
        shown = values[-size[0] :]
        for line in spark(values, *size, top):
            text.append("\n")
            for index, each in enumerate(line, len(shown) - size[0]):
                value = shown[index] if index >= 0 else None
                over = limit is not None and value is not None and value > limit
                text.append(each, BAD if over else GOOD)


class TopScreen(App[None]):
    """Shows a daemon, and asks it for what keys say.

    Args:
        client: Reaches the daemon.
        first: What it showed when it was asked first.
    """

    CSS = """
    Screen { layout: vertical; overflow: hidden; }
    Static { text-wrap: nowrap; text-overflow: ellipsis; }
    #head, #why, #trouble, #guards, #said { height: 1; }
    #head { background: $panel; }
    #gauges { grid-size: 2 2; grid-gutter: 0 2; height: 6; }
    #gauges.tall { height: 10; }
    Gauge { height: 100%; }
    #middle { height: 1fr; max-height: 12; }
    #ladder { width: 1fr; } #knobs { width: 1fr; }
    #events { height: 1fr; min-height: 3; }
    #keys { height: 1; background: $panel; color: $text-muted; }
    .old { opacity: 60%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit", "quit"),
        Binding("s", "study", "study"),
        Binding("r", "board", "board"),
        Binding("c", "keep", "keep"),
        Binding("question_mark,h,f1", "help", "help"),
    ]
    ENABLE_COMMAND_PALETTE = False
    TITLE = "polythrottle"

    def __init__(self, client: Client, first: Status) -> None:
        super().__init__()
        self._client = client
        self._status = first
        self._gone = ""
        self._heard_s = time.monotonic()
        self._events: deque[Happened] = deque(maxlen=_EVENTS)
        self._past = {name: deque[float | None](maxlen=_KEPT_S) for name in ("power_w", "p99_s", "rate_per_s")}
        self._sure: tuple[str, float] = ("", 0.0)

    def compose(self) -> ComposeResult:
        """Lay it out."""
        yield Static(id="head")
        yield Static(id="why")
        with Grid(id="gauges"):
            for name in ("power", "p99", "load", "saved"):
                yield Gauge(id=name)
        yield Static(id="guards")
        with Horizontal(id="middle"):
            yield Static(id="ladder")
            yield Static(id="knobs")
        yield Static(id="events")
        yield Static(id="said")
        yield Static(Text(_KEYS), id="keys")

    def on_mount(self) -> None:
        """Begin to listen."""
        self.set_interval(1.0, self._look)
        self.run_worker(self._listen, thread=True, exclusive=True, group="listen")
        # Once it is laid out: before that no part knows how large it is.
        self.call_after_refresh(self._draw)

    def on_resize(self) -> None:
        """Draw for the new size."""
        self.query_one("#gauges").set_class(self.size.height >= 32, "tall")
        self.call_after_refresh(self._draw)

    def on_unmount(self) -> None:
        """Listen no more."""
        self._client.close()

    def action_study(self) -> None:
        """Start a study, or stop the one that runs."""
        study = self._status.study
        if study is not None and study.state == "running":
            self._twice("s", "stop the study", lambda: self._client.stop_study(study.id))
        else:
            self._twice("s", f"start a study of {_TRIALS} trials", lambda: self._client.start_study(_TRIALS))

    def action_board(self) -> None:
        """Give the board back, or take it again."""
        if self._status.leased and self._status.phase != "yielded":
            self._twice("r", "release the board as it was found", self._client.release)
        else:
            self._twice("r", "take the board again", self._client.take)

    def action_keep(self) -> None:
        """Keep the profile that is being tried."""
        if self._status.unconfirmed:
            self._ask(self._client.confirm)
        else:
            self._say("no profile waits to be kept")

    def action_help(self) -> None:
        """Say what the keys do."""
        self.push_screen(Help())

    def _twice(self, key: str, words: str, ask: Callable[[], Any]) -> None:
        """Do something when its key is pressed a second time, soon."""
        pressed, at_s = self._sure
        if pressed == words and time.monotonic() - at_s < _SURE_S:
            self._sure = ("", 0.0)
            self._ask(ask)
        else:
            self._sure = (words, time.monotonic())
            self._say(f"press {key} again to {words}")

    def _ask(self, ask: Callable[[], Any]) -> None:
        def work() -> None:
            try:
                words = str(ask().get("words") or "done")
            except PolythrottleError as error:
                words = str(error)
            # By way of the screen's own loop: no other thread may change what it draws.
            self.call_from_thread(self._say, words)

        self.run_worker(work, thread=True, group="ask")

    def _say(self, words: str) -> None:
        self.query_one("#said", Static).update(Text(printable(words), "bold"))

    def _listen(self) -> None:
        """Take in what the daemon tells, on a thread of its own, until the screen closes."""
        last = 0
        try:
            try:
                for event in self._client.events():
                    self.call_from_thread(self._hear, event)
                    last = event.number
                for second in self._client.seconds():
                    self.call_from_thread(self._keep, {name: second.get(name) for name in self._past})
            # Which trying again would not change; what follows tries again after anything else.
            except PermissionDenied:
                raise
            except DeviceError as error:
                self.call_from_thread(self._hear, Gone(str(error)))  # it is tried again by what follows
            for heard in self._client.follow(after=last):
                self.call_from_thread(self._hear, heard)
        except PolythrottleError as error:
            self.call_from_thread(self._hear, Gone(str(error)))
        # Textual's own, where the screen closes while something is handed to it.
        except RuntimeError:
            if self.is_running:
                raise

    def _keep(self, figures: dict[str, float | None]) -> None:
        for name, values in self._past.items():
            values.append(figures[name])

    def _hear(self, heard: Status | Happened | Gone) -> None:
        match heard:
            case Gone(words):
                self._gone = words
            case Happened():
                self._events.appendleft(heard)
            case Status():
                # What is told again without a turn is no sign that the control loop lives.
                if heard.turn != self._status.turn:
                    self._heard_s = time.monotonic()
                self._gone = ""
                self._status = heard
                self._keep({name: getattr(heard, name) for name in self._past})
        self._draw()

    def _look(self) -> None:
        """Notice that nothing comes any more."""
        if self._gone or time.monotonic() - self._heard_s > _STALE_S:
            self._draw_head()

    def _draw(self) -> None:
        status = self._status
        self._draw_head()
        gauges = (
            ("power", "Power", power_words(status), "power_w", status.budget.limit_w),
            ("p99", "p99", p99_words(status), "p99_s", status.limit_s),
            ("load", "Load", load_words(status), "rate_per_s", None),
            ("saved", "Saved today", saved_words(status), None, None),
        )
        for id, name, words, series, limit in gauges:
            self.query_one(f"#{id}", Gauge).draw(name, words, self._past[series] if series else None, limit)
        self._draw_tables(status)

    def _draw_head(self) -> None:
        status = self._status
        still_s = time.monotonic() - self._heard_s
        old = bool(self._gone) or still_s > _STALE_S
        live = {True: "old", False: "live"}[old]
        if self._gone:
            live = "no answer"
        title = printable(status.title or status.device)
        marks = " · ".join(filter(None, (printable(status.phase), kind(status), live)))
        right = f"{marks} {clock_time(status.at)}"
        width = self.size.width
        head = Text(f" {title}"[: max(0, width - len(right) - 2)].ljust(width - len(right) - 1), "bold")
        style = GOOD
        if status.phase in ("safe", "yielded"):
            style = WARN
        if old:
            style = BAD
        self.query_one("#head", Static).update(head.append(right, style))
        self.query_one("#why", Static).update(self._why(still_s, old))
        self.query_one("#gauges").set_class(old, "old")
        self.query_one("#middle").set_class(old, "old")

    def _why(self, still_s: float, old: bool) -> Text:
        status = self._status
        wrong = list(troubles(status))
        if self._gone:
            # The reason comes last: it may be longer than the line.
            words = f"trying again: {self._gone}"
            style = BAD
        elif old:
            words = f"the daemon's control loop has not turned for {still_s:.0f} s: old figures"
            style = BAD
        elif status.unconfirmed:
            words = f"{status.unconfirmed} is tried; press c to keep it"
            style = HERE
        else:
            words = "; ".join(filter(None, (status.reason, *wrong)))
            style = BAD if wrong else ""
        return Text(f" {printable(words)}", style)

    def _draw_tables(self, status: Status) -> None:
        rows = max(1, self.query_one("#middle").size.height - 1)
        ladder = [Text("  up to       power       p99", DIM), *rung_lines(status, rows)]
        if not status.ladder:
            ladder = [Text("no profile with points for different loads", DIM)]
        self.query_one("#ladder", Static).update(Text("\n").join(ladder))
        knobs = [Text(f"{'set':<21}running", DIM), *knob_lines(status)[:rows]]
        self.query_one("#knobs", Static).update(Text("\n").join(knobs))
        self.query_one("#guards", Static).update(guards_line(status))
        head = [Text(f"study: {study_words(status)}", DIM)]
        if words := finetuning_words(status):
            head.append(Text(f"fine-tuning {words}", DIM))
        most = max(1, self.query_one("#events").size.height - len(head))
        events = [event_line(each) for each in list(self._events)[:most]]
        lines = Text("\n").join([*head, *events])
        self.query_one("#events", Static).update(lines)
