"""The daemon's page in a real browser: what it shows, what it asks for, and what it never does."""

import re
from dataclasses import replace
from typing import Any

import pytest
from scripted_daemon import BEGAN, EVENTS, Daemon, status

from polythrottle.daemon.status import (
    FinetuningShown,
    Front,
    GuardShown,
    Happened,
    SavedShown,
    Status,
    StudyShown,
    WorkloadShown,
)

pytestmark = pytest.mark.browser

HOSTILE = '"><script>window.hit = 1</script><img src=x onerror="window.hit = 1">\''
WIDTHS = ((1280, 800), (360, 740))


@pytest.fixture(params=["light", "dark"])
def scheme(request: pytest.FixtureRequest) -> str:
    """Return a colour scheme."""
    return str(request.param)


def test_shows_what_the_daemon_shows(opens: Any) -> None:
    """Device, phase, power, p99 with its limit, load, clocks, knobs, guards, budget and events are there."""
    shown = status(4600)
    view = opens(Daemon(status=shown))
    assert view.text("title") == "Jetson AGX Orin 64GB (simulated)"
    assert view.text("phase") == "following"
    assert view.text("power") == f"{shown.power_w:.1f} W"
    assert view.text("p99") == f"{1e3 * (shown.p99_s or 0):.1f} ms"
    assert "limit 25.0 ms" in view.text("p99-note")
    assert view.text("rate") == f"{shown.rate_per_s:.1f}/s"
    assert "gpu_max_mhz\t1032.75" in view.text("knobs")
    assert "1420.8 MHz" in view.text("clocks")
    assert view.page.locator("#guards tr").count() == len(shown.guards)
    assert "400 Wh a day" in view.text("budget")
    assert view.page.locator("#events li").count() == len(EVENTS)
    assert "another program has set gpu_max_hz" in view.page.inner_text("#events li:first-child")


def test_figures_follow_the_daemon(opens: Any) -> None:
    """A new turn and a new event appear without anything being done."""
    view = opens()
    view.script.show(status(4001, power_w=12.34, p99_s=0.0255))
    view.wait("power", "12.3 W")
    assert "over-limit" in view.page.get_attribute("#p99", "class")
    view.script.tell("drift", "energy is 8 % above what the profile predicts")
    view.wait("events", "energy is 8 % above")


def test_fine_tuning_has_a_line_while_there_is_some(opens: Any) -> None:
    """State, epoch, rate and folder of the job are shown as they are told, and nothing without one."""
    view = opens()
    assert not view.page.is_visible("#finetuning")
    job = FinetuningShown("running", HOSTILE, "a.pt2", 1, 3, 1280, None, 60, 41.5, BEGAN.isoformat())
    view.script.show(status(4001, finetuning=job))
    view.wait("finetuning", "epoch 2 of 3, 1,280 samples of it at 41.5/s")
    assert HOSTILE in view.text("finetuning")
    view.script.show(status(4002, finetuning=replace(job, state="finished", epochs_done=3, rate_per_s=None)))
    view.wait("finetuning", "all 3 epochs")


def test_the_present_point_is_marked_on_the_ladder(opens: Any) -> None:
    """The rung the daemon stands on is marked in the figure and in the table, and moves with it."""
    view = opens(Daemon(status=status(4600)))
    for turn in (4600, 4750):
        shown = status(turn)
        view.script.show(shown)
        assert shown.rung is not None
        number = shown.rung.number
        view.wait("ladder-note", f"point {number + 1} of 7")
        view.page.click("#ladder-more summary")
        marks = "nodes => nodes.map(node => node.getAttribute('class').includes('here'))"
        assert view.page.eval_on_selector_all("#ladder .rung", marks).index(True) == number
        assert view.page.locator("#rungs tr").nth(number).get_attribute("aria-current") == "true"
        assert f"point {number + 1}, for up to" in view.page.get_attribute("#ladder svg", "aria-label")


@pytest.mark.parametrize(("kind", "said"), [("simulated", True), ("estimated", True), ("measured", False)])
def test_energy_that_is_not_measured_is_called_so(opens: Any, kind: str, said: bool) -> None:
    """The kind of energy stands beside power and savings unless it is measured."""
    view = opens(Daemon(status=status(energy_kind=kind, title="a board")))
    assert view.page.is_visible("#kind") == said
    assert (kind in view.text("h-power"), kind in view.text("h-saved")) == (said, said)


def test_relative_energy_has_no_unit(opens: Any) -> None:
    """Joules of an unknown scale are not called joules or watts."""
    view = opens(Daemon(status=status(energy_kind="relative")))
    assert view.text("power").endswith(" rel.")
    assert not re.search(r"\d (k?J|W)\b", view.text("saved") + view.text("saved-ends") + view.text("power-note"))


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        (SavedShown(43_240.0, 37_260.0, 49_220.0), "43.2 kJ"),
        (SavedShown(12.0, -3.0, 27.0), "not proven"),
        (SavedShown(12.0), "not proven"),
        (SavedShown(), "unknown"),
        (SavedShown(-5000.0, -6000.0, -4000.0), "−5.00 kJ"),
    ],
)
def test_a_saving_is_claimed_only_when_proven(opens: Any, saved: SavedShown, words: str) -> None:
    """Joules are claimed only where the interval excludes zero, and the interval is given."""
    view = opens(Daemon(status=status(saved=saved)))
    assert view.text("saved") == words
    assert (saved.low is None) or "95 % interval" in view.text("saved-ends")


def test_what_is_unknown_is_a_dash(opens: Any) -> None:
    """A daemon that knows nothing yet shows no zero and no NaN."""
    view = opens(Daemon(status=Status(turn=1, at=BEGAN.isoformat(), device="nvml:0"), events=[]))
    assert [view.text(name) for name in ("power", "p99", "rate")] == ["–", "–", "–"]
    assert view.text("saved") == "unknown"
    assert view.text("title") == "nvml:0"
    assert not re.search(r"NaN|undefined|null|Infinity", view.page.inner_text("body"))
    assert "The device does not answer" in view.text("notices")
    assert not view.seen.complaints


def test_a_tripped_guard_stands_out(opens: Any) -> None:
    """A guard that trips says so in words, and the phase and why are shown."""
    guard = GuardShown("temperature", 88.0, 80.0, tripped=True)
    view = opens(Daemon(status=status(phase="safe", reason="temperature is 88 °C, above 80", guards=(guard,))))
    assert view.text("guards").split() == ["temperature", "88.0", "°C", "80.0", "°C", "tripped"]
    view.script.show(status(4001, guards=(GuardShown("p99", 0.031, 0.025), GuardShown("errors", None, 0.01))))
    view.wait("guards", "above")
    assert "unknown" in view.text("guards")


def test_a_phase_says_why(opens: Any) -> None:
    """The phase stands at the top, and beside it why the present point is held."""
    view = opens(Daemon(status=status(phase="safe", reason="temperature is 88 °C, above 80")))
    assert view.text("why") == "safe: temperature is 88 °C, above 80"


def test_says_when_the_daemon_is_gone_and_comes_back(opens: Any) -> None:
    """A daemon that ends is said to be gone, its figures old, its buttons dead; when it is back all goes on."""
    view = opens()
    view.script.leave()
    view.page.wait_for_selector(".live.lost")
    assert "The daemon does not answer since" in view.text("notices")
    assert "What is below is of" in view.text("notices")
    assert view.page.is_disabled("#study-start")
    view.script.come_back()
    view.page.wait_for_selector(".live.fresh")
    assert view.text("notices") == ""
    assert view.page.is_enabled("#study-start")


def test_says_when_data_are_old(opens: Any) -> None:
    """A daemon that answers while its control loop stands still does not look live."""
    view = opens()
    view.page.clock.install()
    view.page.reload()
    view.page.clock.run_for(200)
    view.page.wait_for_selector(".live.fresh")
    view.page.clock.run_for(8_000)
    view.page.wait_for_selector(".live.stale")
    assert "has not turned for over 5 s" in view.text("notices")
    view.script.show(status(4002))
    view.page.clock.run_for(1_200)
    view.page.wait_for_selector(".live.fresh")


def test_a_study_can_be_started_and_stopped(opens: Any) -> None:
    """The button starts a study of so many trials, its progress is shown, and another stops it."""
    view = opens()
    view.page.fill("#trials", "12")
    view.page.click("#study-start")
    view.wait("study", "Study running: 0 of at most 12")
    study = StudyShown("s1", "running", 7, 12, {"batch_size": 4}, 0.1953)
    view.script.show(status(4003, phase="studying", study=study))
    view.wait("study", "7 of at most 12 trials, best 195 mJ simulated per item")
    assert view.page.eval_on_selector("#progress", "bar => [bar.value, bar.max]") == [7, 12]
    view.page.click("#study-stop")
    view.wait("study", "Study stopped")
    assert view.script.asked == [("POST", "/v1/studies", {"trials": 12}), ("DELETE", "/v1/studies/s1", None)]
    assert "its journal keeps what it knows" in view.text("said")


def test_a_profile_is_tried_and_kept(opens: Any) -> None:
    """Apply follows another profile for a while, and a notice offers to keep it."""
    view = opens()
    view.page.select_option("#profiles", "sim-jetson-agx-orin/resnet50")
    view.page.click("#apply")
    view.wait("notices", "sim-jetson-agx-orin/resnet50 is tried and rolled back in 60 s or less")
    view.page.click("#notices button")
    view.page.wait_for_selector("#notice-keep", state="detached")
    applied = {"profile": "sim-jetson-agx-orin/resnet50", "within_s": 60}
    assert view.script.asked == [("POST", "/v1/apply", applied), ("POST", "/v1/confirm", {})]


def test_a_profile_that_cannot_be_read_cannot_be_chosen(opens: Any) -> None:
    """A spoilt profile is listed with its fault, and is no choice."""
    view = opens(Daemon(profiles=[{"name": "a/b", "slo": [], "saving": None, "fault": "a/b.toml is empty"}]))
    view.page.wait_for_selector("#profiles option[disabled]", state="attached")
    assert "a/b.toml is empty" in view.page.text_content("#profiles")


def test_the_board_can_be_given_back_and_taken(opens: Any) -> None:
    """One button releases the board, and then another takes it again."""
    view = opens()
    view.page.click("#release")
    view.wait("knobs", "nothing is set")
    assert view.text("phase") == "yielded"
    view.page.click("#take")
    view.wait("phase", "following")
    assert [path for _, path, _ in view.script.asked] == ["/v1/release", "/v1/take"]


@pytest.mark.parametrize(
    ("kind", "value", "hours", "sent"),
    [
        ("power_w", "20", None, {"power_w": 20}),
        ("wh_per_day", "400", None, {"wh_per_day": 400}),
        ("battery_wh", "80", "9", {"battery_wh": 80, "last_s": 32400}),
        ("", None, None, {}),
    ],
)
def test_a_budget_can_be_set_and_lifted(
    opens: Any, kind: str, value: str | None, hours: str | None, sent: dict[str, float]
) -> None:
    """Mean power, energy a day, or a battery and how long it must last; nothing lifts the limit."""
    view = opens()
    view.page.click("text=Change it")
    view.page.select_option("#budget-kind", kind)
    for name, text in (("value", value), ("hours", hours)):
        if text is not None:
            view.page.fill(f"#budget-{name}", text)
    view.page.click("#budget-form button")
    view.wait("said", "the budget is taken")
    assert view.script.asked == [("PUT", "/v1/budget", sent)]


def test_a_refusal_is_said_in_the_daemons_words(opens: Any) -> None:
    """What the daemon refuses is shown as it says it."""
    refused = {"POST /v1/studies": (409, {"error": {"kind": "DeviceError", "words": "another holds the board"}})}
    view = opens(Daemon(answers=refused))
    view.page.click("#study-start")
    view.wait("said", "another holds the board")


def test_a_token_is_asked_for(opens: Any) -> None:
    """Where a token is needed the page asks for it, and shows nothing until it is right."""
    view = opens(Daemon(token="open sesame"), live=False)
    view.page.wait_for_selector(".live.locked")
    view.page.fill("#token", "wrong")
    with view.page.expect_response("**/v1/**"):
        view.page.press("#token", "Enter")
    assert view.page.is_visible("#login")
    view.wait("login-words", "a token is needed")
    view.page.fill("#token", "open sesame")
    view.page.press("#token", "Enter")
    view.page.wait_for_selector(".live.fresh")
    assert not view.page.is_visible("#login")


def test_a_refused_reader_is_told_why(opens: Any) -> None:
    """A user the daemon does not let in reads its words, not that it is gone."""
    refusal = (403, {"error": {"kind": "PermissionDenied", "words": "this user is in no group the daemon lets in"}})
    view = opens(Daemon(refusal=refusal), live=False)
    view.page.wait_for_selector(".live.lost")
    assert "The daemon says: this user is in no group the daemon lets in; trying again." in view.text("notices")


def test_a_token_in_the_address_is_taken_out_of_it(opens: Any) -> None:
    """A link with the token behind # opens the page, and the address keeps no token."""
    view = opens(Daemon(token="sesame"), path="/#token=sesame")
    assert view.page.url == f"{view.url}/"
    assert not [request for request in view.seen.requests if "sesame" in request]


def test_a_page_that_is_open_takes_a_token_too(opens: Any) -> None:
    """Who opens the link in a tab that asks for the token is let in, and the address keeps none."""
    view = opens(Daemon(token="sesame"), live=False)
    view.page.wait_for_selector(".live.locked")
    view.page.goto(f"{view.url}/#token=sesame")
    view.page.wait_for_selector(".live.fresh")
    assert view.page.url == f"{view.url}/"


def test_asks_nobody_but_the_daemon(opens: Any) -> None:
    """No request goes to another origin, and the console stays empty."""
    view = opens()
    view.page.click("#ladder-more summary")
    assert {"/", "/v1/profiles", "/v1/seconds"} <= {request.removeprefix(view.url) for request in view.seen.requests}
    assert not [each for each in view.seen.requests if not each.startswith((view.url, "data:"))]
    assert not view.seen.complaints


def test_words_are_never_markup(opens: Any) -> None:
    """Whatever the daemon, a profile or an event is called, it is text: nothing of it runs."""
    hostile = status(
        title=HOSTILE,
        reason=HOSTILE,
        phase=HOSTILE,
        drift=HOSTILE,
        faults=(HOSTILE,),
        unconfirmed=HOSTILE,
        point={HOSTILE: HOSTILE},
        clocks_hz={HOSTILE: 1_000_000},
        guards=(GuardShown(HOSTILE, 1.0, 2.0),),
        ladder=(Front(1.0, 2.0, 0.01, {HOSTILE: HOSTILE}),),
        study=StudyShown(HOSTILE, "running", 1, 2, words=HOSTILE),
        workload=WorkloadShown(HOSTILE, HOSTILE, HOSTILE, (HOSTILE,), profile=HOSTILE),
    )
    events = [Happened(1, HOSTILE, HOSTILE, HOSTILE)]
    profiles = [{"name": HOSTILE, "slo": [HOSTILE], "saving": None}]
    view = opens(Daemon(status=hostile, events=events, profiles=profiles))
    view.page.click("#ladder-more summary")
    view.page.wait_for_selector("#profiles option", state="attached")
    assert view.text("title") == HOSTILE
    assert HOSTILE in view.text("events")
    assert view.page.evaluate("[document.scripts.length, document.images.length, typeof window.hit]") == [
        *(1, 0),
        "undefined",
    ]
    assert not view.seen.complaints


def test_the_policy_lets_no_other_script_run(opens: Any) -> None:
    """A script that got into the page all the same is stopped by the policy, as is markup made of text."""
    view = opens()
    insert = "const bad = document.createElement('script'); bad.text = 'window.hit = 1'; document.body.append(bad)"
    write = "document.body.innerHTML = '<b>x</b>'"
    for code in (insert, write):
        view.page.evaluate(f"() => {{ try {{ {code} }} catch {{}} }}")
    assert view.page.evaluate("typeof window.hit") == "undefined"
    assert view.page.is_visible("#title")


def least(tools: Any) -> dict[str, float]:
    """Return the browser's figures, each at its least over some collections of garbage: one may come too early."""
    found: list[dict[str, float]] = []
    for _ in range(5):
        tools.send("HeapProfiler.collectGarbage")
        metrics = tools.send("Performance.getMetrics")["metrics"]
        found.append({each["name"]: each["value"] for each in metrics})
    return {name: min(each[name] for each in found) for name in found[0]}


def test_a_day_does_not_make_it_grow(opens: Any) -> None:
    """Over 2,000 updates, each drawn, neither nodes nor listeners nor the heap grow."""
    script = Daemon(status=status(1))
    view = opens(script, live=False)
    view.page.add_init_script("window.requestAnimationFrame = (draw) => { queueMicrotask(draw); return 0; }")
    view.page.reload()
    view.page.wait_for_selector(".live.fresh")
    tools = view.page.context.new_cdp_session(view.page)
    tools.send("Performance.enable")

    def run(turns: range) -> dict[str, float]:
        for turn in turns:
            study = StudyShown("s1", "running" if turn % 200 < 100 else "ended", turn % 100, 100, best_j=0.2)
            faults = ("the disk is full",) if turn % 50 < 5 else ()
            script.show(status(turn, study=study, faults=faults))
            if turn % 5 == 0:
                script.tell("phase", f"turn {turn}")
            if turn % 100 == 0:
                view.wait("events", f"turn {turn}")
        return least(tools)

    before, after = run(range(1, 701)), run(range(701, 2701))
    assert after["Nodes"] <= before["Nodes"] * 1.05
    assert after["JSEventListeners"] <= before["JSEventListeners"] + 5
    assert after["JSHeapUsedSize"] <= before["JSHeapUsedSize"] * 1.1
    assert view.page.locator("#events li").count() == 100


@pytest.mark.parametrize(("width", "height"), WIDTHS)
def test_fits_the_screen(opens: Any, width: int, height: int) -> None:
    """Nothing hangs over the edge of a phone or a laptop, even with long names."""
    long = status(title="x" * 200, faults=("y" * 300,), point={f"knob_{number}_hz": 10**9 for number in range(12)})
    view = opens(Daemon(status=long), viewport={"width": width, "height": height})
    view.page.click("#ladder-more summary")
    assert view.page.evaluate("document.documentElement.scrollWidth") == width


def test_buttons_are_large_enough_for_a_thumb(opens: Any) -> None:
    """On a phone every control is at least 44 pixels high."""
    view = opens(viewport={"width": 360, "height": 740}, has_touch=True)
    heights = view.page.eval_on_selector_all(
        "main button, main input, main select",
        "nodes => nodes.filter(node => node.offsetParent).map(node => node.offsetHeight)",
    )
    assert len(heights) >= 5
    assert min(heights) >= 44


def test_is_usable_with_the_keyboard_alone(opens: Any) -> None:
    """Tab reaches every control in the order they stand in, and Enter starts a study."""
    view = opens()
    reached = []
    for _ in range(40):
        view.page.keyboard.press("Tab")
        reached.append(view.page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
        if reached[-1] == "study-start":
            view.page.keyboard.press("Enter")
            break
    assert reached[0] == "Skip to the figures"
    assert reached.index("As a table") < reached.index("Change it") < reached.index("trials")
    view.wait("study", "Study running")


def test_every_control_and_figure_has_a_name(opens: Any) -> None:
    """A screen reader is told what each control, region and drawing is, and is not told each second's figures."""
    view = opens()
    page = view.page
    for role, name in (
        *(("button", "Start a study"), ("button", "Release the board"), ("button", "Apply for 60 s")),
        *(("spinbutton", "Trials"), ("combobox", "Profile"), ("log", "Events, newest first")),
        *(("region", "Points by load"), ("region", "Guards"), ("region", "Events")),
    ):
        assert page.get_by_role(role, name=name).count() == 1, (role, name)
    pictures = page.eval_on_selector_all(
        "svg", "all => all.map(one => one.getAttribute('aria-label') || one.getAttribute('aria-hidden'))"
    )
    assert all(pictures)
    spoken = page.eval_on_selector_all("[aria-live], [role=alert], [role=status], [role=log]", "n => n.map(x => x.id)")
    assert set(spoken) == {"notices", "said", "events"}


CONTRAST = """() => {
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const found = numbers(getComputedStyle(at).backgroundColor);
      if (found.length < 4 || found[3] > 0) return found;
    }
  };
  const low = [];
  for (const node of document.querySelectorAll('body *')) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.getClientRects().length || ['SCRIPT', 'STYLE', 'OPTION'].includes(node.tagName)) continue;
    const style = getComputedStyle(node);
    const ink = light(numbers(node instanceof SVGElement ? style.fill : style.color)), ground = light(behind(node));
    const ratio = (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
    if (ratio < 4.5) low.push(`${node.id || node.className.baseVal || node.className}: ${ratio.toFixed(2)}`);
  }
  return low;
}"""


def test_text_stands_out_from_its_ground(opens: Any, scheme: str) -> None:
    """Every text has the contrast of 4.5 that WCAG 2.2 AA asks for, in light and in dark."""
    shown = status(phase="safe", guards=(GuardShown("p99", 0.03, 0.025, tripped=True),), faults=("the disk is full",))
    view = opens(Daemon(status=replace(shown, unconfirmed="a/b", confirm_left_s=30.0)), color_scheme=scheme)
    assert view.page.evaluate(CONTRAST) == []
