"""The Grafana dashboard: asks only for what the daemon exports, with labels it has, on a grid without overlaps."""

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from polythrottle.daemon.web.prometheus import FIGURES, KINDS

FILE = Path(__file__).resolve().parent.parent / "packaging" / "grafana" / "polythrottle.json"
BOARD = json.loads(FILE.read_text())
LABELS = {f"polythrottle_{each.name}{'_total' if each.counter else ''}": set(each.labels) for each in FIGURES}
LABELS["polythrottle_build_info"] = {"version", "device", "energy_kind"}


def expressions() -> list[tuple[str, str]]:
    """Return every expression with the legend that goes with it."""
    drawn = [(each["expr"], each["legendFormat"]) for panel in BOARD["panels"] for each in panel["targets"]]
    marked = [(each["expr"], each["titleFormat"]) for each in BOARD["annotations"]["list"]]
    asked = [(each["query"]["query"], "") for each in BOARD["templating"]["list"] if each["type"] == "query"]
    return [*drawn, *marked, *asked]


@pytest.mark.parametrize(("expression", "legend"), expressions())
def test_every_expression_names_what_is_exported(expression: str, legend: str) -> None:
    """Metrics and their labels exist; rates are taken of counters alone."""
    named = re.findall(r"\b(polythrottle_\w+)(?:\{([^}]*)\})?", expression)
    assert named
    for name, selectors in named:
        used = set(re.findall(r"(\w+)\s*(?:=~|=|!=|!~)", selectors)) | set(re.findall(r"{{(\w+)}}", legend))
        assert used <= LABELS[name] | {"instance"}
    for name in re.findall(r"\b(?:rate|increase)\((polythrottle_\w+)", expression):
        assert name.endswith("_total")
    for kind in re.findall(r'kind=~"([^"]+)"', expression):
        assert set(kind.split("|")) <= set(KINDS)
    assert expression.count("(") == expression.count(")")


def test_it_shows_what_people_look_for() -> None:
    """Power, budget, p99, limit, savings with interval, clocks, phases, guards, events and fine-tuning are drawn."""
    drawn = " ".join(expression for expression, _ in expressions())
    for name in (
        *("power_watts", "budget_limit_watts", "request_latency_p99_seconds", "request_latency_limit_seconds"),
        *("saved_joules", "saved_low_joules", "saved_high_joules", "clock_hertz", "phase", "guard_tripped"),
        *("events_total", "control_lateness_p99_seconds", "finetuning_running", "finetuning_epochs_done"),
        "finetuning_samples_per_second",
    ):
        assert f"polythrottle_{name}" in drawn


def test_figures_of_energy_show_their_kind() -> None:
    """Wherever watts or saved joules are drawn the legend says how they came about."""
    for panel in BOARD["panels"]:
        for each in panel["targets"]:
            if re.match(r"polythrottle_(power|power_peak)_watts\b|polythrottle_saved_joules\b", each["expr"]):
                assert "{{energy_kind}}" in each["legendFormat"]


def test_panels_do_not_overlap() -> None:
    """Each panel has a number of its own and a place of its own on the 24 columns."""

    def apart(one: dict[str, Any], other: dict[str, Any]) -> bool:
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        return beside or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]

    places = [panel["gridPos"] for panel in BOARD["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert all(apart(one, other) for one, other in combinations(places, 2))
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(places)


def test_it_takes_whichever_prometheus_there_is() -> None:
    """No data source of somebody's own is named."""
    assert {panel["datasource"]["uid"] for panel in BOARD["panels"]} == {"${datasource}"}
