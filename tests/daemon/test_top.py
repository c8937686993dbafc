"""`polythrottle top`: what it shows, what its keys do, and that it outlives the daemon."""

import asyncio
import html
import json
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from scripted_daemon import Daemon, serving, status

from polythrottle.cli.commands import run
from polythrottle.cli.render import status as topview
from polythrottle.cli.render.status_screen import TopScreen
from polythrottle.daemon.client import Client
from polythrottle.daemon.status import FinetuningShown, GuardShown, Happened, SavedShown, Status, StudyShown

_COLUMN = 12.2
"""Width of a column in the picture of a screen."""
HOSTILE = "\x1b[31m[bold red]evil[/]\x07\u202e\r\nword"


class Watched:
    """A screen under test: what stands on it, and its keys."""

    def __init__(self, app: TopScreen, pilot: "object") -> None:
        self.app = app
        self._pilot = pilot

    @property
    def text(self) -> str:
        """What stands on the screen, line by line."""
        svg = self.app.export_screenshot()
        words = re.findall(r'<text[^>]* x="([\d.]+)" y="([\d.]+)" textLength="[\d.]+"[^>]*>([^<]*)</text>', svg)
        lines: dict[float, str] = {}
        for x, y, each in words:
            column = round(float(x) / _COLUMN)
            lines[float(y)] = lines.get(float(y), "").ljust(column) + html.unescape(each).replace("\xa0", " ")
        return "\n".join(lines[y].rstrip() for y in sorted(lines) if lines[y].strip())

    async def until(self, words: str) -> None:
        """Wait until words stand on the screen."""
        await self.met(lambda: words in self.text, words)

    async def met(self, condition: Callable[[], bool], words: str = "") -> None:
        """Wait until something holds; a minute, for what never comes on a busy machine either."""
        for _ in range(3000):
            await self._pilot.pause(0.02)  # type: ignore[attr-defined]
            if condition():
                return
        raise AssertionError(f"{words!r} never came; there is\n{self.text}")

    async def press(self, *keys: str) -> None:
        """Press keys."""
        await self._pilot.press(*keys)  # type: ignore[attr-defined]


Play = Callable[[Watched], Awaitable[None]]


def watch(script: Daemon, play: Play, size: tuple[int, int] = (80, 24)) -> None:
    """Run a play on the screen of a scripted daemon."""

    async def go(url: str) -> None:
        client = Client(url=url)
        app = TopScreen(client, client.status())
        async with app.run_test(size=size) as pilot:
            watched = Watched(app, pilot)
            await watched.met(lambda: "live" in watched.text or "old" in watched.text)
            await play(watched)

    with serving(script) as url:
        asyncio.run(go(url))


@pytest.fixture
def script() -> Iterator[Daemon]:
    """Return a daemon that follows its load."""
    return Daemon(status=status(4600))


def test_all_stands_on_80_columns_and_24_lines(script: Daemon) -> None:
    """Figures, the ladder with the present point, knobs, clocks, events and keys fit the smallest usual terminal."""

    async def play(screen: Watched) -> None:
        await screen.until("efficientnet-b4 is up")
        shown = screen.text
        for words in (
            *("Jetson AGX Orin 64GB (simulated)", "following · simulated · live", "a load of 92.4/s"),
            *("Power 27.1 W  peak 29.5 W · budget 28 W", "p99 22.5 ms  limit 25 ms, 90% of it"),
            *("Load 92.4/s  up to 118/s", "Saved today 43.2 kJ", "95 %: 37.3 to 49.2 kJ, simulated"),
            *("▶     118/s    28.4 W   24.2 ms", "gpu_max_mhz    1033", "hottest    56.2 °C", "ok: p99, errors"),
            *("guard    p99 is 27.1 ms", "study: none has run", "q quit", "? help"),
        ):
            assert words in shown, words
        lines = shown.splitlines()
        assert len(lines) <= 24
        assert max(map(len, lines)) <= 80

    watch(script, play)


def test_figures_and_events_follow_the_daemon(script: Daemon) -> None:
    """A new turn and a new event appear by themselves."""

    async def play(screen: Watched) -> None:
        script.show(status(4601, power_w=12.34, p99_s=0.031))
        script.tell("drift", "energy is 8 % above")
        await screen.until("Power 12.3 W")
        await screen.until("p99 31 ms  limit 25 ms, 124% of it")
        await screen.until("drift    energy is 8 % above")

    watch(script, play)


def test_fine_tuning_has_a_line_while_there_is_some(script: Daemon) -> None:
    """State, epoch, rate and folder stand in one line below the study; without a job there is none."""
    job = FinetuningShown(
        "running", f"/srv/{HOSTILE}", "a.pt2", 1, 3, 1280, None, 60, 41.5, "2026-03-14T06:00:00+00:00"
    )

    async def play(screen: Watched) -> None:
        assert "fine-tuning" not in screen.text
        script.show(status(4601, finetuning=job))
        await screen.until("epoch 2 of 3, 1,280 done at 41.5/s; /srv/")
        await screen.until("fine-tuning running since")
        assert len(screen.text.splitlines()) <= 24
        assert max(map(len, screen.text.splitlines())) <= 80

    watch(script, play)
    lines = dict(topview.status_lines(status(4601, finetuning=job, ttft_p99_s=0.25, tokens_out_per_s=1234.5)))
    assert lines["tokens"] == "ttft p99 250 ms; 1,234/s out"
    assert "tokens" not in dict(topview.status_lines(status(4601)))
    assert "1,280 done at 41.5/s" in lines["training"]
    assert lines["training"].isprintable()


def test_a_daemon_that_goes_is_waited_for(script: Daemon) -> None:
    """It says that nobody answers, keeps trying, and goes on when the daemon is back."""

    async def play(screen: Watched) -> None:
        await screen.until("live")
        script.leave()
        await screen.until("no answer")
        await screen.until("trying again")
        script.come_back()
        script.show(status(4700))
        await screen.until("live")

    watch(script, play)


def test_a_daemon_that_goes_before_its_first_events_are_read_is_waited_for_too(script: Daemon) -> None:
    """On a busy machine a screen may be up a while before it listens."""

    async def go(url: str) -> None:
        client = Client(url=url)
        app = TopScreen(client, client.status())
        script.leave()
        async with app.run_test(size=(80, 24)) as pilot:
            screen = Watched(app, pilot)
            await screen.until("trying again")
            script.come_back()
            script.show(status(4700))
            await screen.until("live")

    with serving(script) as url:
        asyncio.run(go(url))


def test_a_control_loop_that_stands_still_is_noticed(script: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures that do not change any more are called old after five seconds."""
    from polythrottle.cli.render import status_screen

    real, gone_s = status_screen.time.monotonic, [0.0]
    monkeypatch.setattr(status_screen.time, "monotonic", lambda: real() + gone_s[0])

    async def play(screen: Watched) -> None:
        await screen.until("live")
        gone_s[0] = 60.0
        await screen.until("has not turned for 6")
        await screen.until("old")

    watch(script, play)


def test_a_study_is_started_and_stopped_by_two_presses(script: Daemon) -> None:
    """The first press asks, the second does it."""

    async def play(screen: Watched) -> None:
        await screen.press("s")
        await screen.until("press s again to start a study of 30 trials")
        assert not script.asked
        await screen.press("s")
        await screen.until("study: running, 0 of at most 30 trials")
        await screen.press("s", "s")
        await screen.until("study: stopped")
        assert [(method, path) for method, path, _ in script.asked] == [
            ("POST", "/v1/studies"),
            ("DELETE", "/v1/studies/s1"),
        ]

    watch(script, play)


def test_another_key_between_two_presses_does_nothing(script: Daemon) -> None:
    """The second press must be of the same key."""

    async def play(screen: Watched) -> None:
        await screen.press("s", "r")
        await screen.until("press r again to release the board")
        await screen.press("s")
        await screen.until("press s again")
        assert not script.asked

    watch(script, play)


def test_the_board_is_given_back_and_taken(script: Daemon) -> None:
    """The same key gives it back and takes it again."""

    async def play(screen: Watched) -> None:
        await screen.press("r", "r")
        await screen.until("yielded")
        await screen.until("as found")
        await screen.press("r", "r")
        await screen.until("following · simulated")
        assert [path for _, path, _ in script.asked] == ["/v1/release", "/v1/take"]

    watch(script, play)


def test_a_tried_profile_is_kept_by_a_key(script: Daemon) -> None:
    """It says that a profile is tried; c keeps it, and says so when there is none."""

    async def play(screen: Watched) -> None:
        await screen.press("c")
        await screen.until("no profile waits to be kept")
        script.show(status(4602, unconfirmed="sim/resnet50", confirm_left_s=50.0))
        await screen.until("sim/resnet50 is tried; press c to keep it")
        await screen.press("c")
        await screen.met(lambda: bool(script.asked))
        assert script.asked == [("POST", "/v1/confirm", {})]

    watch(script, play)


def test_a_refusal_is_said(script: Daemon) -> None:
    """What the daemon refuses stands on the screen in its words."""
    script.answers["POST /v1/studies"] = (409, {"error": {"kind": "DeviceError", "words": "another holds the board"}})

    async def play(screen: Watched) -> None:
        await screen.press("s", "s")
        await screen.until("another holds the board")

    watch(script, play)


def test_help_and_quit(script: Daemon) -> None:
    """? shows what the keys do, any key goes back, q ends."""

    async def play(screen: Watched) -> None:
        await screen.press("question_mark")
        await screen.until("ask for a second press")
        await screen.press("x")
        await screen.met(lambda: "second press" not in screen.text)
        await screen.press("q")
        await screen.met(lambda: not screen.app.is_running)

    watch(script, play)


@pytest.mark.slow
@pytest.mark.parametrize("size", [(40, 12), (60, 18), (200, 60)])
@pytest.mark.parametrize("shown", [Status(turn=1, device="nvml:0"), status(4600)], ids=["unknown", "known"])
def test_any_size_and_any_status_can_be_shown(size: tuple[int, int], shown: Status) -> None:
    """A tiny or a huge terminal, and a daemon that knows nothing yet, are no fault; unknown is a dash."""

    async def play(screen: Watched) -> None:
        await screen.until("Power")
        assert "nan" not in screen.text
        assert "None" not in screen.text
        await screen.until("Power" if shown.power_w is not None else "Power –")

    watch(Daemon(status=shown), play, size)


def test_words_neither_steer_the_terminal_nor_are_markup() -> None:
    """Control characters and markup in whatever a daemon says are harmless text."""
    hostile = status(
        title=HOSTILE,
        reason=HOSTILE,
        phase=HOSTILE,
        faults=(HOSTILE,),
        point={HOSTILE: HOSTILE},
        clocks_hz={HOSTILE: 1},
        guards=(GuardShown(HOSTILE, 1.0, 0.5, tripped=True),),
        study=StudyShown("s1", HOSTILE, 1, 2),
    )

    async def play(screen: Watched) -> None:
        await screen.until("[bold red]evil[/]")
        assert not set("\x1b\x07\u202e\r") & set(screen.text)

    watch(Daemon(status=hostile, events=[Happened(1, HOSTILE, HOSTILE, HOSTILE)]), play)
    lines = "".join("".join(pair) for pair in topview.status_lines(hostile))
    assert not set("\x1b\x07\u202e\r\n") & set(lines)


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        (SavedShown(43_240.0, 37_260.0, 49_220.0), ("43.2 kJ", "95 %: 37.3 to 49.2 kJ, simulated")),
        (SavedShown(0.5, -0.3, 1200.0), ("not proven", "95 %: -300 mJ to 1.2 kJ, simulated")),
        (SavedShown(12.0), ("not proven", "12 J simulated without interval")),
        (SavedShown(words="the profile lacks the default"), ("unknown", "the profile lacks the default")),
    ],
)
def test_a_saving_is_claimed_only_when_proven(saved: SavedShown, words: tuple[str, str]) -> None:
    """Joules are claimed only if their interval excludes zero."""
    assert topview.saved_words(status(saved=saved)) == words


def test_relative_energy_has_no_unit() -> None:
    """Watts and joules of an unknown scale are called relative."""
    shown = status(4600, energy_kind="relative")
    assert topview.power_words(shown) == ("27.1 rel.", "peak 29.5 rel. · budget 28 rel.")
    assert topview.joules(shown, 12.0) == "12 rel."


def test_a_chart_goes_from_zero_to_its_top() -> None:
    """Eighths of a line per value, at least one for what is not zero, nothing for what is unknown."""
    assert topview.spark([0.0, 1.0, 4.0, 8.0, 16.0, None, 0.01], 7, 2, 16.0) == ["    █  ", " ▁▄██ ▁"]
    assert topview.spark([8.0], 3, 1, 8.0) == ["  █"]
    assert topview.spark([float("inf"), 1.0], 2, 1, 0.0) == ["▁▁"]


def test_the_present_rung_is_always_shown() -> None:
    """Of a long ladder those about the present rung are shown."""
    for turn in range(4000, 4600, 20):
        shown = status(turn)
        lines = topview.rung_lines(shown, 3)
        assert len(lines) == 3
        assert sum(line.plain.startswith("▶") for line in lines) == 1


def test_without_a_terminal_the_status_is_printed_once(script: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe gets lines of at most 80 columns, named; --json the status itself."""
    with serving(script) as url:
        assert run(["top", "--url", url]) == 0
        text = capsys.readouterr().out
        assert run(["top", "--url", url, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
    assert "p99       22.5 ms; limit 25 ms, 90% of it" in text
    assert re.search(r"^power .*; simulated$", text, re.M)
    assert max(map(len, text.splitlines())) <= 80
    assert document["power_w"] == script.status.power_w


def test_no_daemon_is_one_line_and_exit_code_6(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no daemon runs it says so and how to start one."""
    monkeypatch.setenv("POLYTHROTTLE_RUN_DIR", str(tmp_path))
    assert run(["top"]) == 6
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"no daemon runs at {tmp_path}/daemon/daemon.sock; start one: polythrottle daemon run" in said


def test_a_token_is_read_from_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A daemon on TCP is shown its token; a file that cannot be read is exit code 4."""
    (tmp_path / "token").write_text("sesame\n")
    with serving(Daemon(token="sesame")) as url:
        assert run(["top", "--url", url, "--token-file", str(tmp_path / "token"), "--json"]) == 0
        assert run(["top", "--url", url, "--token-file", str(tmp_path / "none")]) == 4
    assert "no token can be read from" in capsys.readouterr().err


def test_textual_is_loaded_by_the_screen_alone() -> None:
    """The command line, and top where there is no terminal, do not load textual."""
    code = (
        "import sys, polythrottle.cli.commands, polythrottle.cli.daemon, polythrottle.cli.render.status\n"
        "sys.exit('textual' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_guards_are_told_apart() -> None:
    """Those that trip or are above their limit show figures; others are ok, unknown, or without a limit."""
    guards = (
        *(GuardShown("p99", 0.03, 0.025, tripped=True), GuardShown("power", 41.0, 40.0)),
        *(GuardShown("errors", 0.0, 0.01), GuardShown("temperature", None, 80.0), GuardShown("peak power", 50.0, None)),
    )
    assert topview.guards_line(status(guards=guards)).plain.split("  ")[:-1] == [
        *("p99 30 ms of 25 ms, tripped", "power 41 W of 40 W"),
        *("ok: errors", "unknown: temperature", "no limit: peak power"),
    ]
    assert topview.guards_line(Status()).plain == "no guard is set"
