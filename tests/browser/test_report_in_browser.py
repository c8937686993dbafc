"""The report in a real browser: it fits the screen, and its command can be copied."""

from pathlib import Path
from typing import Any

import pytest

from polythrottle.domain.measurement import EnergyKind, Interval, Latency, Measurement
from polythrottle.domain.problem import Constraint, Problem
from polythrottle.domain.space import Knob, SearchSpace
from polythrottle.domain.study import Reference, Study, Trial
from polythrottle.report import write_report

pytestmark = pytest.mark.browser

CLOCKS = (306_000_000, 1_300_500_000)


def study(knobs: int) -> Study:
    """Return a study whose rows are as wide as rows of a real board are."""
    names = [f"{part}_{end}_hz" for part in ("gpu", "cpu", "emc", "dla") for end in ("min", "max")][:knobs]
    space = SearchSpace.grid([Knob(name, CLOCKS) for name in names], dict.fromkeys(names, CLOCKS[1]))
    latency = Latency(0.01162, 0.01161, None, 0.01202, 0.0129)
    intervals = {"energy": Interval(0.0193, 0.0198), "p99": Interval(0.01217, 0.01437)}
    held = Measurement(latency, 0.19531, 86.0, 18.71, EnergyKind.SIMULATED, "rail", intervals=intervals, requests=274)
    slow = Measurement(
        Latency(0.02162, 0.02161, None, 0.02202, 0.0329), 0.2, 86.0, 18.71, EnergyKind.SIMULATED, "rail", censored=True
    )
    trials = [Trial(0, space.default, held), Trial(1, space[0], slow), Trial(2, space[1], failure="the driver refused")]
    problem = Problem(space, (Constraint.parse("p99<=15ms"),), "sim:board", "efficientnet-b4")
    return Study(problem, "bayes", 0, tuple(trials), (Reference("MAXN", space[2], held),))


def page_of(chromium: Any, path: Path, knobs: int = 4, **context: Any) -> Any:
    """Open a report 1280 pixels wide."""
    write_report(study(knobs), path, profile=path.with_suffix(".toml"))
    page = chromium.new_context(**{"viewport": {"width": 1280, "height": 800}, **context}).new_page()
    page.goto(path.as_uri())
    return page


@pytest.mark.parametrize("knobs", [2, 5, 8])
def test_the_trials_fit_a_laptop(chromium: Any, tmp_path: Path, knobs: int) -> None:
    """At 1280 pixels neither the page nor the table of trials scrolls sideways, however many knobs there are."""
    page = page_of(chromium, tmp_path / "report.html", knobs)
    assert page.evaluate("document.documentElement.scrollWidth") == 1280
    inner, room = page.eval_on_selector(".wide", "node => [node.scrollWidth, node.clientWidth]")
    assert inner <= room
    page.context.close()


def test_hidden_columns_can_be_shown(chromium: Any, tmp_path: Path) -> None:
    """One tick shows the percentiles and the number of requests too; it needs no script."""
    page = page_of(chromium, tmp_path / "report.html", java_script_enabled=False)
    head = page.locator(".trials th.more").first
    assert not head.is_visible()
    page.check("#all")
    assert head.is_visible()
    page.context.close()


def test_the_command_can_be_copied(chromium: Any, tmp_path: Path) -> None:
    """The button takes the command to the clipboard; without a script there is the text alone."""
    path = tmp_path / "report.html"
    page = page_of(chromium, path)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("#copy")
    page.wait_for_function("document.getElementById('copy').textContent === 'Copied'")
    assert page.evaluate("navigator.clipboard.readText()") == f"polythrottle apply {path.with_suffix('.toml')}"
    page.context.close()
    page = page_of(chromium, path, java_script_enabled=False)
    assert page.inner_text("#apply").startswith("polythrottle apply ")
    assert not page.is_visible("#copy")
    page.context.close()
