"""What can be asked over HTTP: one table, from which both the routes and the OpenAPI document are made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from polythrottle.daemon.status import Happened, Status, StudyShown, WorkloadShown
from polythrottle.daemon.web.answering import (
    Does,
    apply,
    device,
    events,
    healthz,
    history,
    metrics,
    page,
    profiles,
    report,
    shown,
    stop_study,
    study,
    study_events,
    wished,
)
from polythrottle.daemon.web.bodies import APPLY, BUDGET, EVENTS_QUERY, HISTORY_QUERY, NOTHING, RELEASE, REPORT, STUDY
from polythrottle.daemon.web.listing import PROFILE
from polythrottle.daemon.web.plain import Schema, schema_of
from polythrottle.daemon.web.stream import KIND
from polythrottle.daemon.wishes import (
    Confirm,
    Release,
    SetBudget,
    StartStudy,
    Stop,
    Take,
)

_WORDS: Schema = {"type": "string", "description": "What has been done, for people."}


@dataclass(frozen=True)
class Operation:
    """One thing that can be asked.

    Args:
        method: Of HTTP.
        path: With ``{id}`` where a name stands.
        name: By which programs call it.
        words: What it is for.
        does: It.
        answer: Schema of its answer; None where that is no JSON.
        body: Schema of what is sent; None if nothing is.
        query: Schemas of the words after the question mark.
        kinds: What kinds of answer there are besides JSON.
        refuses: With which statuses, besides those that any request may meet.
    """

    method: str
    path: str
    name: str
    words: str
    does: Does
    answer: Schema | None = None
    body: Schema | None = None
    query: Mapping[str, Schema] = field(default_factory=dict)
    kinds: Sequence[str] = ()
    refuses: Sequence[int] = ()


def _listed(name: str, each: Schema) -> Schema:
    return _answered(**{name: {"type": "array", "items": each}})


def _answered(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties)}


def _done(**further: Schema) -> Schema:
    """Return the schema of what the control loop answers: at least its words."""
    return {"type": "object", "properties": {"words": _WORDS, **further}, "required": ["words"]}


_SECOND: Schema = _answered(
    t={"type": "number", "description": "Seconds since 1970."},
    **{
        name: {"type": ["number", "null"]}
        for name in ("power_w", "p99_s", "limit_s", "rate_per_s", "temperature_c", "rung")
    },
)
_DEVICE: Schema = {
    **_answered(
        uri={"type": "string"},
        title={"type": "string"},
        energy_kind={"type": "string"},
        boundary={"type": "string"},
        leased={"type": "boolean"},
        reachable={"type": "boolean"},
        point={"type": "object"},
        clocks_hz={"type": "object"},
    ),
    "description": "The device the daemon steers.",
}
_STARTED = {"id": {"type": ["string", "null"], "description": "The study's name."}}
_TARGET = {
    "batch": {"type": ["integer", "null"], "description": "Requests to put into a batch; null if it may stay."},
    "gather_s": {"type": ["number", "null"], "description": "How long a request may wait for others."},
}

OPERATIONS: tuple[Operation, ...] = (
    Operation("GET", "/", "page", "The page.", page, kinds=("text/html",)),
    Operation("GET", "/metrics", "metrics", "Figures for Prometheus.", metrics, kinds=("text/plain",)),
    Operation(
        *("GET", "/healthz", "healthz", "Whether the control loop turned within the last 5 s.", healthz),
        answer=_done(turn={"type": "integer"}),
        refuses=(503,),
    ),
    Operation(
        *("GET", "/v1/status", "status", "What the last turn of the control loop saw."),
        shown(lambda api: api.shelf.status_json),
        schema_of(Status),
    ),
    Operation(
        *("GET", "/v1/devices", "devices", "The device that is steered."),
        shown(lambda api: {"devices": device(api.shelf.status)}),
        _listed("devices", _DEVICE),
    ),
    Operation(
        *("GET", "/v1/workloads", "workloads", "The workload that is served."),
        shown(lambda api: {"workloads": [each for each in (api.shelf.status.workload,) if each is not None]}),
        _listed("workloads", schema_of(WorkloadShown)),
    ),
    Operation(
        *("GET", "/v1/profiles", "profiles", "The profiles that can be applied.", profiles),
        answer=_listed("profiles", PROFILE),
    ),
    Operation(
        *("POST", "/v1/apply", "apply", "Follow the load with another profile; rolled back unless confirmed in time."),
        apply,
        _done(),
        APPLY,
        refuses=(404, 409, 503, 507),
    ),
    Operation(
        *("POST", "/v1/confirm", "confirm", "Keep the profile applied last."),
        wished(NOTHING, lambda _: Confirm()),
        _done(),
        NOTHING,
        refuses=(409, 503, 507),
    ),
    Operation(
        *("POST", "/v1/release", "release", "Put the board back and leave it alone."),
        wished(RELEASE, lambda sent: Release(**sent)),
        _done(),
        RELEASE,
        refuses=(409, 503),
    ),
    Operation(
        *("POST", "/v1/take", "take", "Set the board again."),
        wished(NOTHING, lambda _: Take()),
        _done(),
        NOTHING,
        refuses=(409, 503),
    ),
    Operation(
        *("PUT", "/v1/budget", "budget", "Draw no more than this; nothing lifts the limit."),
        wished(BUDGET, lambda sent: SetBudget(**sent)),
        _done(),
        BUDGET,
        refuses=(404, 409, 503),
    ),
    Operation(
        *("GET", "/v1/studies", "studies", "The studies since the daemon began, newest first."),
        shown(lambda api: {"studies": api.shelf.studies}),
        _listed("studies", schema_of(StudyShown)),
    ),
    Operation(
        *("POST", "/v1/studies", "startStudy", "Tune again, from the journal of the study before if there is one."),
        wished(STUDY, lambda sent: StartStudy(**sent)),
        _done(**_STARTED),
        STUDY,
        refuses=(404, 409, 503, 507),
    ),
    Operation(
        *("GET", "/v1/studies/{id}", "study", "One study.", study),
        answer=schema_of(StudyShown),
        refuses=(404,),
    ),
    Operation(
        *(
            "DELETE",
            "/v1/studies/{id}",
            "stopStudy",
            "End a study; its journal keeps what it knows.",
            stop_study,
        ),
        answer=_done(),
        refuses=(404, 409, 503),
    ),
    Operation(
        *("GET", "/v1/studies/{id}/events", "followStudy", "A study each time it gets on, until it ends."),
        study_events,
        kinds=(KIND,),
        refuses=(404, 503),
    ),
    Operation(
        *("GET", "/v1/history", "history", "What is kept of the last minutes, oldest first.", history),
        answer=_listed("minutes", {"type": "object"}),
        query=HISTORY_QUERY,
    ),
    Operation(
        *("GET", "/v1/seconds", "seconds", "What was seen in each of the last 600 seconds."),
        shown(lambda api: {"seconds": api.shelf.seconds}),
        _listed("seconds", _SECOND),
    ),
    Operation(
        *(
            "GET",
            "/v1/events",
            "events",
            "Events after a number; followed with Accept: text/event-stream.",
            events,
        ),
        answer=_listed("events", schema_of(Happened)),
        query=EVENTS_QUERY,
        kinds=(KIND,),
        refuses=(503,),
    ),
    Operation(
        *(
            "POST",
            "/v1/report",
            "report",
            "What a serving program saw; the answer says how to batch.",
            report,
        ),
        answer=_done(**_TARGET),
        body=REPORT,
        refuses=(409, 503),
    ),
    Operation(
        *("POST", "/v1/stop", "stop", "End the daemon; the board is given back."),
        wished(NOTHING, lambda _: Stop()),
        _done(),
        NOTHING,
        refuses=(409, 503),
    ),
)
