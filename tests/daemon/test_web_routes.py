"""What the API answers: routes, bodies, errors, figures, the page."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import measured
from http_over_socket import ask
from prometheus_client.parser import text_string_to_metric_families
from scripted import FIRST, Script, daemon

from polythrottle.catalog.tuned_profiles import write_profile
from polythrottle.daemon.commands import ApplyProfile, Report, SetBudget, StartStudy, StopStudy
from polythrottle.daemon.loop.mailbox import Mailbox
from polythrottle.daemon.status import BudgetShown, StudyShown
from polythrottle.daemon.web import WebOptions, serve
from polythrottle.daemon.web.messages import TUNE_OPTIONS, SchemaViolation, check, plain, schema_of, to_json
from polythrottle.daemon.web.routes import OPERATIONS, document
from polythrottle.domain.errors import (
    BadFile,
    DeviceError,
    KnobRejected,
    PermissionDenied,
    PolythrottleError,
    SloUnmet,
    StorageError,
)
from polythrottle.domain.profile import Profile
from polythrottle.domain.space import OperatingPoint


@pytest.fixture
def where(tmp_path: Path) -> Path:
    """Return where the daemon listens."""
    return tmp_path / "d.sock"


@pytest.fixture
def script(where: Path) -> Iterator[Script]:
    """Return a scripted control loop whose API is served."""
    with daemon(where) as (script, _):
        yield script


def test_the_status_is_what_the_control_loop_published(script: Script, where: Path) -> None:
    """All fields come through, and what is not finite is null."""
    status, shown, headers = ask(where, "GET", "/v1/status")
    assert (status, shown["device"], shown["point"]) == (200, FIRST.device, dict(FIRST.point))
    assert shown["power_w"] is None
    assert headers["cache-control"] == "no-store"
    assert set(shown) == set(FIRST.document)


def test_device_and_workload_are_listed(script: Script, where: Path) -> None:
    """There is one of each, with the fields of the status."""
    assert [each["uri"] for each in ask(where, "GET", "/v1/devices")[1]["devices"]] == [FIRST.device]
    assert [each["name"] for each in ask(where, "GET", "/v1/workloads")[1]["workloads"]] == ["resnet50"]


def test_a_daemon_whose_loop_stands_still_is_not_healthy(where: Path) -> None:
    """Before the first turn healthz says 503, after it 200."""
    desk = Mailbox()
    with serve(desk, WebOptions(where)):
        assert ask(where, "GET", "/healthz")[0] == 503
        desk.publish(replace(FIRST, turn=1))
        assert ask(where, "GET", "/healthz")[0] == 200


def test_a_loop_that_stands_is_told_of_beside_its_last_status(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fault that says for how long, and without a promise; while it turns the status is as published."""
    desk = Mailbox(replace(FIRST, budget=BudgetShown("10 W", 10.0, met=True), power_w=9.0))
    with serve(desk, WebOptions(where)):
        assert ask(where, "GET", "/v1/status")[1]["faults"] == []
        monkeypatch.setattr("polythrottle.daemon.web.event_stream._FRESH_S", 0.0)
        shown = ask(where, "GET", "/v1/status")[1]
        assert shown["faults"] == ["the control loop has not turned for 0 s; what is shown is as old"]
        assert (shown["budget"]["met"], shown["power_w"]) == (None, 9.0)
        assert b"polythrottle_faults 1.0" in ask(where, "GET", "/metrics")[1]


def test_wishes_reach_the_control_loop(script: Script, where: Path) -> None:
    """Each route hands in its wish, with the defaults of what was left out."""
    ask(where, "POST", "/v1/apply", {"profile": "sim/bert"})
    ask(where, "PUT", "/v1/budget", {"battery_wh": 80, "last_s": 3600})
    ask(where, "POST", "/v1/studies", {"trials": 5, "options": {"risk": "0.05"}})
    ask(where, "DELETE", "/v1/studies/s1")
    assert script.wishes == [
        ApplyProfile("sim/bert", 60.0),
        SetBudget(battery_wh=80, last_s=3600),
        StartStudy(5, {"risk": "0.05"}),
        StopStudy("s1"),
    ]


def test_a_report_is_answered_with_the_target(script: Script, where: Path) -> None:
    """A serving program learns how to batch, and whole numbers may be written as floats."""
    status, answer, _ = ask(where, "POST", "/v1/report", {"arrived": 3.0, "p99_s": 0.01})
    assert (status, answer["batch"], answer["gather_s"]) == (200, 4, 0.005)
    wish = script.wishes[0]
    assert isinstance(wish, Report)
    assert type(wish.seen.arrived) is int


@pytest.mark.parametrize(
    ("method", "route", "body"),
    [
        ("PUT", "/v1/budget", {"power_w": 10**400}),
        ("POST", "/v1/report", {"arrived": 10**400}),
        ("POST", "/v1/report", {"arrived": 5, "p99_s": -(10**400)}),
    ],
)
def test_a_number_that_no_float_holds_is_refused(
    script: Script, where: Path, method: str, route: str, body: dict[str, Any]
) -> None:
    """JSON has integers of any length; the field is named, and the control loop does not hear of it."""
    status, answer, _ = ask(where, method, route, body)
    assert (status, answer["error"]["kind"]) == (422, "InvalidInput")
    assert list(body)[-1] in answer["error"]["words"]
    assert script.wishes == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"arrived": 5, "answered": 5, "failed": 500}, "of 5 requests that ended (answered) 500 cannot have failed"),
        ({"arrived": 5, "failed": 1}, "of how many says answered"),
        ({"arrived": 5, "p99_s": 0.02, "mean_s": 5}, "a mean of 5 s cannot go with a p99 of 0.02 s"),
    ],
)
def test_a_report_that_contradicts_itself_is_refused(
    script: Script, where: Path, body: dict[str, Any], words: str
) -> None:
    """In one line, and the control loop does not hear of it; so many requests that no board answers them likewise."""
    status, answer, _ = ask(where, "POST", "/v1/report", body)
    assert (status, answer["error"]["kind"]) == (409, "InvalidInput")
    assert words in answer["error"]["words"]
    assert ask(where, "POST", "/v1/report", {"arrived": 10**9})[0] == 422
    assert script.wishes == []
    sound = {"arrived": 5, "answered": 5, "failed": 5, "p99_s": 0.02, "mean_s": 0.2, "worst_s": 0.01}
    assert ask(where, "POST", "/v1/report", sound)[0] == 200, "a tail beyond the p99 may weigh a lot"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BadFile("torn"), 409),
        (SloUnmet("the nearest is 12 W"), 409),
        (PermissionDenied("no"), 403),
        (DeviceError("gone"), 503),
        (KnobRejected("no"), 409),
        (StorageError("full"), 507),
    ],
)
def test_an_error_of_the_loop_has_the_status_of_its_class(
    script: Script, where: Path, error: PolythrottleError, status: int
) -> None:
    """Its class and its words come through."""
    script.refuses = error
    found, answer, _ = ask(where, "POST", "/v1/take", {})
    assert (found, answer) == (status, {"error": {"kind": type(error).__name__, "words": str(error)}})


def test_what_is_not_there_is_said_so(script: Script, where: Path) -> None:
    """Unknown profile, study and route are 404, another method 405 with what is taken."""
    status, answer, _ = ask(where, "POST", "/v1/apply", {"profile": "sim/resnet51"})
    assert (status, answer["error"]["kind"]) == (404, "UnknownName")
    assert "did you mean sim/resnet50" in answer["error"]["words"]
    assert ask(where, "GET", "/v1/studies/none")[0] == 404
    assert ask(where, "GET", "/v1/nothing")[1]["error"]["kind"] == "UnknownName"
    status, _, headers = ask(where, "DELETE", "/v1/status")
    assert (status, set(headers["allow"].split(", "))) == (405, {"GET", "HEAD"})


@pytest.mark.parametrize(
    ("route", "body", "status", "word"),
    [
        ("/v1/apply", {"profile": "sim/bert", "secnods": 3, "x": 1}, 422, "secnods, x"),
        ("/v1/apply", {}, 422, "lacks profile"),
        ("/v1/apply", {"profile": "sim/bert", "within_s": -1}, 422, "within_s must be above 0"),
        ("/v1/apply", {"profile": "sim/bert", "within_s": True}, 422, "within_s must be number or null"),
        ("/v1/apply", b'{"profile": "\\ud800"}', 422, "surrogate"),
        ("/v1/apply", b'{"profile": "a\\u0000b"}', 422, "must look like"),
        ("/v1/apply", b'{"profile": "sim/bert", "within_s": 1e999}', 422, "finite"),
        ("/v1/apply", b'{"profile": "sim/bert", "within_s": NaN}', 400, "no JSON"),
        ("/v1/apply", b"[" * 60_000, 400, "no JSON"),
        ("/v1/apply", b"1" * 60_000, 400, "no JSON"),
        ("/v1/apply", [], 422, "the body must be object"),
        ("/v1/budget", {"battery_wh": 5}, 422, "battery_wh with last_s"),
        ("/v1/budget", {"battery_wh": 5, "last_s": 5, "wh_per_day": 5}, 422, "or wh_per_day"),
        ("/v1/budget", {"carbon": "x.csv"}, 422, "carbon shares"),
        ("/v1/budget", {"power": 5}, 422, "has no field power"),
        ("/v1/studies", {"options": {"workload": "cmd:sh"}}, 422, "has no field workload"),
        ("/v1/studies", {"options": {"method": "--out=/etc/passwd"}}, 422, "method must look like"),
        ("/v1/studies", {"options": {"method": "bayes\n"}}, 422, "method must look like"),
        ("/v1/apply", b"x" * 70_000, 413, "64 KiB"),
    ],
)
def test_a_body_that_is_no_wish_is_refused_by_name(
    script: Script, where: Path, route: str, body: Any, status: int, word: str
) -> None:
    """The field is named, and nothing reaches the control loop."""
    found, answer, _ = ask(where, "PUT" if route == "/v1/budget" else "POST", route, body)
    assert (found, script.wishes) == (status, [])
    assert word in answer["error"]["words"]


def test_no_word_of_tune_that_names_a_file_or_a_workload_may_be_added() -> None:
    """A workload can be any command, and would run as the daemon's user."""
    assert not {"workload", "device", "journal", "out", "history", "as-prior", "as_prior"} & set(TUNE_OPTIONS)


def test_writes_want_json_in_their_name(script: Script, where: Path) -> None:
    """A form of a foreign page is refused with 415."""
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert ask(where, "POST", "/v1/stop", b"a=b", **form)[0] == 415
    assert script.wishes == []


@pytest.mark.parametrize("query", ["after=x", "after=-1", "limit=0", "after=1&after=2", "color=red", "limit=1_0"])
def test_a_query_that_means_nothing_is_refused(script: Script, where: Path, query: str) -> None:
    """The status is 422, for unknown words too."""
    assert ask(where, "GET", f"/v1/events?{query}")[0] == 422


def test_events_are_paged_forward_from_a_number(script: Script, where: Path) -> None:
    """With a number come the next after it, without one the last."""
    script.tell(*map(str, range(10)))
    numbers = [each["number"] for each in ask(where, "GET", "/v1/events?after=2&limit=3")[1]["events"]]
    last = [each["number"] for each in ask(where, "GET", "/v1/events?limit=2")[1]["events"]]
    assert (numbers, last) == ([3, 4, 5], [9, 10])


def test_history_comes_from_who_keeps_it(where: Path) -> None:
    """The minutes asked for are passed on, and it is called from another thread than the API's."""
    seen: list[tuple[int, str]] = []

    def history(minutes: int) -> list[dict[str, Any]]:
        seen.append((minutes, threading.current_thread().name))
        return [{"joules": float("nan")}]

    with daemon(where, lambda options: replace(options, history=history)):
        assert ask(where, "GET", "/v1/history?minutes=5")[1] == {"minutes": [{"joules": None}]}
    assert seen[0][0] == 5
    assert "aside" in seen[0][1]


def test_seconds_hold_one_entry_per_second(script: Script, where: Path) -> None:
    """However often the loop turns within one."""
    for _ in range(50):
        script.show(rate_per_s=1.0)
    found = ask(where, "GET", "/v1/seconds")[1]["seconds"]
    assert 1 <= len(found) <= 3
    assert (found[-1]["p99_s"], found[-1]["rung"]) == (0.02, 0)


def test_profiles_are_listed_with_what_is_wrong_with_them(where: Path, tmp_path: Path) -> None:
    """A file that is no profile does not hide the others, and the daemon's own go before the working folder's."""
    mine, here = tmp_path / "state" / "profiles" / "tuned" / "sim", tmp_path / "profiles" / "tuned" / "sim"
    mine.mkdir(parents=True)
    (mine / "torn.toml").write_text("device = ")
    for folder, device in ((mine, "sim:a"), (here, "sim:b")):
        profile = Profile(device, "resnet50", OperatingPoint({"batch_size": 4}), measured(), slo=("p99<=25 ms",))
        write_profile(profile, folder / "good.toml")
    with daemon(where, lambda options: replace(options, state=tmp_path / "state")):
        found = {each["name"]: each for each in ask(where, "GET", "/v1/profiles")[1]["profiles"]}
        assert "is not a profile" in found["sim/torn"]["fault"]
        assert (found["sim/good"]["device"], found["sim/good"]["slo"]) == ("sim:a", ["p99<=25 ms"])
        write_profile(replace(profile, device="sim:new"), mine / "good.toml")
        found = {each["name"]: each for each in ask(where, "GET", "/v1/profiles")[1]["profiles"]}
        assert found["sim/good"]["device"] == "sim:new"


def test_a_profile_is_applied_by_the_name_it_is_listed_by(where: Path, tmp_path: Path) -> None:
    """The control loop is given its path; of what cannot be a file it does not even hear."""
    path = tmp_path / "state" / "profiles" / "tuned" / "sim" / "mine.toml"
    path.parent.mkdir(parents=True)
    path.touch()
    with daemon(where, lambda options: replace(options, state=tmp_path / "state")) as (script, _):
        ask(where, "POST", "/v1/apply", {"profile": "sim/mine"})
        assert ask(where, "POST", "/v1/apply", {"profile": "é" * 240})[0] == 404
        assert script.wishes == [ApplyProfile(str(path), 60.0)]


def test_metrics_are_read_by_prometheus_own_parser(script: Script, where: Path) -> None:
    """The content type is Prometheus' too."""
    _, text, headers = ask(where, "GET", "/metrics")
    assert headers["content-type"].startswith("text/plain; version=")
    assert any(each.name.startswith("polythrottle_") for each in text_string_to_metric_families(text.decode()))


def test_the_page_is_served_with_its_policy(script: Script, where: Path) -> None:
    """Only its own script runs."""
    status, text, headers = ask(where, "GET", "/")
    assert status == 200
    assert text.lower().startswith(b"<!doctype html>")
    assert "default-src 'none'" in headers["content-security-policy"]


def test_a_busy_loop_is_told_of_instead_of_waited_for(
    script: Script, where: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wish that is not answered in time ends with 503, and is taken back."""
    monkeypatch.setattr("polythrottle.daemon.web.handlers._PATIENCE_S", 0.05)
    script.deaf = True
    assert ask(where, "POST", "/v1/take", {})[0] == 503
    assert script.desk.wishes() == []


def test_studies_seen_stay_known(script: Script, where: Path) -> None:
    """The newest comes first, and each can be asked for by its name, whatever is in it."""
    script.show(study=StudyShown("a b/é", "running"))
    script.show(study=StudyShown("two", "running", best={"gpu_max_hz": 1}))
    ask(where, "GET", "/v1/status")
    found = ask(where, "GET", "/v1/studies")[1]["studies"]
    assert found[0]["id"] == "two"
    assert ask(where, "GET", "/v1/studies/two")[1]["best"] == {"gpu_max_hz": 1}


def test_values_become_json_whatever_they_hold() -> None:
    """A point is its levels, not the tuple inside; no letter can spoil the bytes."""
    assert plain(OperatingPoint({"a": 1})) == {"a": 1}
    assert json.loads(to_json({"x": "\ud800", "y": (float("inf"),)})) == {"x": "\ud800", "y": [None]}
    assert schema_of(StudyShown)["properties"]["best"]["anyOf"][-1] == {"type": "null"}


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        (1.5, {"type": "integer"}),
        (float("inf"), {"type": "integer"}),
        ("x", {"enum": ["a"]}),
        ([], {"type": "string"}),
        (None, {"anyOf": [{"type": "string"}, {"type": "number"}]}),
        ("abc", {"type": "string", "maxLength": 2}),
    ],
)
def test_a_schema_refuses_what_it_does_not_describe(value: Any, schema: dict[str, Any]) -> None:
    """Each keyword is kept."""
    with pytest.raises(SchemaViolation):
        check(value, schema)


def test_the_document_asks_for_a_body_where_one_is_read() -> None:
    """Nowhere else."""
    for each in OPERATIONS:
        described = document()["paths"][each.path][each.method.lower()]
        assert ("requestBody" in described) == (each.body is not None), each.name
