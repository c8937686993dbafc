"""The metrics: parsed by Prometheus's own parser, named as it asks, and silent about what is unknown."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from scripted_daemon import status

from polythrottle.daemon.status import BudgetShown, FinetuningShown, SavedShown, Status, StudyShown
from polythrottle.daemon.web.prometheus import KINDS, render

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
BASE_UNITS = ("seconds", "joules", "watts", "celsius", "hertz", "bytes", "total", "info")
COUNTS = (
    *("faults", "requests_waiting", "rung", "rungs", "study_trials", "study_trials_most", "finetuning_epochs_done"),
    *("exploring_late_requests", "exploring_late_left_requests"),
)
WHETHER = ("phase", "reachable", "leased", "up", "throttled", "tripped", "drifted", "met", "running")
DAEMON = Path(__file__).resolve().parents[2] / "polythrottle" / "daemon"


def full() -> Status:
    """Return a status in which nothing is unknown."""
    return status(study=StudyShown("s1", "running", 7, 30), finetuning=training(), told={"guard": 2, "unheard of": 3})


def training(state: str = "running", rate_per_s: float | None = 41.5) -> FinetuningShown:
    """Return a job beside the workload."""
    return FinetuningShown(
        state, "/srv/flowers", "flowers.pt2", 1, 3, 64, None, 20, rate_per_s, "2026-03-14T06:00:00+00:00"
    )


def samples(shown: Status, accept: str = "") -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return every sample of a scrape by name and labels, as Prometheus's parser reads it."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families(shown, accept)
        for sample in family.samples
    }


def families(shown: Status, accept: str = "") -> Iterator[Any]:
    """Yield what the parser of the format finds."""
    text, kind = render(shown, accept)
    yield from (parse_openmetrics if "openmetrics" in kind else parse_text)(text.decode())


def one(shown: Status, name: str, **labels: str) -> float | None:
    """Return one sample, or None if it is absent."""
    return samples(shown).get((name, tuple(sorted(labels.items()))))


def test_both_formats_say_the_same() -> None:
    """OpenMetrics is given where it is asked for, the older text format elsewhere, with equal samples."""
    assert render(full())[1].startswith("text/plain; version=0.0.4")
    assert render(full(), OPENMETRICS)[1].startswith("application/openmetrics-text")
    assert render(full(), OPENMETRICS)[0].endswith(b"# EOF\n")
    assert samples(full()) == samples(full(), OPENMETRICS)


def test_figures_are_those_of_the_status() -> None:
    """Power, p99 and its limit, energy, knobs and clocks appear in SI units."""
    shown = full()
    assert one(shown, "polythrottle_power_watts", energy_kind="simulated") == pytest.approx(shown.power_w)
    assert one(shown, "polythrottle_energy_joules_total", energy_kind="simulated") == pytest.approx(shown.energy_j)
    assert one(shown, "polythrottle_request_latency_p99_seconds") == pytest.approx(shown.p99_s)
    told = replace(shown, ttft_p99_s=0.25, tokens_out_per_s=1200.0)
    assert one(told, "polythrottle_time_to_first_token_p99_seconds") == 0.25
    assert one(told, "polythrottle_generated_tokens_per_second") == 1200.0
    assert one(shown, "polythrottle_request_latency_limit_seconds") == 0.025
    assert one(shown, "polythrottle_knob", knob="gpu_max_hz") == shown.point["gpu_max_hz"]
    assert one(shown, "polythrottle_clock_hertz", clock="cpu") == 1_420_800_000
    assert one(shown, "polythrottle_start_time_seconds") == 1773468000
    assert one(shown, "polythrottle_budget_shadow_watts_per_second") == pytest.approx(410)
    assert one(shown, "polythrottle_saved_low_joules", energy_kind="simulated") == pytest.approx(shown.saved.low)


def test_fine_tuning_is_absent_without_a_job() -> None:
    """A trainer that works is 1, one that does not is 0 and has no rate; without a job there is neither."""
    assert (one(full(), "polythrottle_finetuning_running"), one(full(), "polythrottle_finetuning_epochs_done")) == (
        1,
        1,
    )
    paused = status(finetuning=training("paused", None))
    assert one(paused, "polythrottle_finetuning_running") == 0
    assert one(paused, "polythrottle_finetuning_samples_per_second") is None
    assert not [name for name, _ in samples(status()) if "finetuning" in name]


def test_the_phase_is_a_set_of_states() -> None:
    """Exactly the present phase is 1, and all phases are there."""
    states = {labels: value for (name, labels), value in samples(full()).items() if name == "polythrottle_phase"}
    assert sum(states.values()) == 1
    assert states[(("phase", "following"),)] == 1
    assert len(states) == 5


def test_build_info_names_version_device_and_kind_of_energy() -> None:
    """One sample of value 1 says which daemon it is, and that its energy is simulated."""
    labels = {"version": "0.1.0", "device": "sim:jetson-agx-orin", "energy_kind": "simulated"}
    assert one(full(), "polythrottle_build_info", **labels) == 1


def test_what_is_unknown_is_absent() -> None:
    """A status that knows nothing gives neither a zero nor a NaN for what it does not know."""
    found = {name for name, _ in samples(Status())}
    unknown = (
        "power",
        "energy",
        "saved",
        "p99_seconds",
        "temperature",
        "requests_total",
        "throttled",
        "budget",
        "rung",
    )
    assert not {name for name in found for word in unknown if word in name and "lateness" not in name}
    assert b"NaN" not in render(Status())[0]


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_figure_that_is_no_number_is_absent(broken: float) -> None:
    """A sensor that gives NaN, or a latency without an end, is left out."""
    assert one(status(power_w=broken), "polythrottle_power_watts", energy_kind="simulated") is None


def test_levels_that_are_words_are_left_out() -> None:
    """A knob with a name for a level has no number to show."""
    shown = status(point={"precision": "int8", "batch_size": 4})
    assert one(shown, "polythrottle_knob", knob="batch_size") == 4
    assert b"int8" not in render(shown)[0]


def test_labels_are_bounded() -> None:
    """Events of kinds nobody listed are counted together, and every listed kind begins at 0."""
    kinds = {dict(labels)["kind"]: value for (name, labels), value in samples(full()).items() if "events_total" in name}
    assert set(kinds) == set(KINDS)
    assert (kinds["guard"], kinds["other"], kinds["drift"]) == (2, 3, 0)


def test_every_kind_of_event_that_is_told_is_counted_by_name() -> None:
    """Whatever the daemon's modules tell is a kind of its own, not other."""
    sources = "".join(path.read_text() for path in DAEMON.rglob("*.py"))
    told = set(re.findall(r"\b(?:tell|Alert)\(\s*\"([a-z]+)\"", sources))
    assert {"guard", "drift"} <= told <= set(KINDS)


def test_words_cannot_break_the_format() -> None:
    """Quotes, newlines and backslashes of a device's name are escaped in both formats."""
    shown = status(device='a"b\nc\\d')
    for accept in ("", OPENMETRICS):
        assert any(dict(labels).get("device") == 'a"b\nc\\d' for _, labels in samples(shown, accept))


@pytest.mark.parametrize("family", list(families(full())), ids=lambda family: family.name)
def test_names_keep_the_rules_of_prometheus(family: Any) -> None:
    """Every family has help and a type, and a name in base units, counters and only they ending in _total."""
    assert family.documentation.endswith(".")
    assert family.type in ("gauge", "counter")
    assert re.fullmatch(r"polythrottle_[a-z][a-z0-9_]*", family.name)
    assert not re.search(r"_(ms|milliseconds|mw|kwh|mhz|gauge|counter|percent)\b", family.name)
    for sample in family.samples:
        assert sample.name.endswith("_total") == (family.type == "counter")
        named = sample.name.removeprefix("polythrottle_")
        unit = named.endswith(BASE_UNITS) or named.endswith("per_second") or named in COUNTS
        assert unit or named.endswith(WHETHER) or named in ("knob", "guard_value", "guard_limit")


def test_help_and_type_stand_once_before_their_samples() -> None:
    """As promtool asks, each family has one HELP and one TYPE line, and no family is named twice."""
    text = render(full())[0].decode()
    helps, types = (re.findall(rf"^# {word} (\S+)", text, re.M) for word in ("HELP", "TYPE"))
    assert helps == types
    assert len(set(types)) == len(types)


def test_counters_never_fall() -> None:
    """Over an hour of turns no counter is lower than before."""
    before: dict[Any, float] = {}
    for turn in range(0, 3600, 60):
        now = {key: value for key, value in samples(status(turn)).items() if key[0].endswith("_total")}
        assert all(now[key] >= value for key, value in before.items())
        before = now
    assert len(before) > len(KINDS)


def test_nothing_is_left_in_the_process() -> None:
    """Scrapes use a registry of their own, so that two daemons in one process do not meet."""
    render(full())
    assert not [family.name for family in REGISTRY.collect() if "polythrottle" in family.name]


def test_saved_joules_may_lack_an_interval() -> None:
    """An estimate without ends shows the estimate alone."""
    shown = replace(full(), saved=SavedShown(12.0), budget=BudgetShown())
    found = {name for name, _ in samples(shown)}
    assert "polythrottle_saved_joules" in found
    assert not found & {"polythrottle_saved_low_joules", "polythrottle_budget_met"}
