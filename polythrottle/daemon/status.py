"""What the daemon shows: one value per turn of its control loop, the same for API, metrics, page and terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from polythrottle.domain.space import Level

VERSION = 1
"""Of the shape of what is shown; a reader of the version before must still find its fields."""
MAY_DIFFER = "may not be as it was found: "
"""In the last words of a daemon, before what may differ, divided by semicolons; not there where all is as found."""


@dataclass(frozen=True)
class Happened:
    """Something people should know of.

    Args:
        number: Rises by one with each, over restarts too.
        at: Wall time, ISO 8601 with zone, for people.
        kind: One word for machines: start, stop, phase, guard, drift, profile, study, budget, foreign, refused, lease,
            driver, machine, model, finetuning or fault.
        words: For people.
    """

    number: int
    at: str
    kind: str
    words: str


@dataclass(frozen=True)
class GuardShown:
    """A guard: its name, what it sees (None if unknown), its limit (None if not watched), and whether it trips now."""

    name: str
    value: float | None
    limit: float | None
    tripped: bool = False


@dataclass(frozen=True)
class WorkloadShown:
    """The served workload: its URI, where requests are seen, its SLO as texts, and whether it is up."""

    name: str
    uri: str
    traffic: str
    slo: tuple[str, ...] = ()
    up: bool = False
    profile: str | None = None


@dataclass(frozen=True)
class RungShown:
    """Where on the ladder: rung ``number`` (from 0) of ``of``, good up to a rate, predicted watts and p99 there."""

    number: int
    of: int
    rate_per_s: float
    power_w: float
    p99_s: float


@dataclass(frozen=True)
class SavedShown:
    """Joules saved since midnight against the default point at the same requests, with their 95 % interval.

    Args:
        joules: Estimate; None if the profile lacks the default's energy.
        low: Lower end; ``high`` upper; None if unknown.
        requests: How many were counted.
        words: How the figure comes about, with its kind of energy.
    """

    joules: float | None = None
    low: float | None = None
    high: float | None = None
    requests: int = 0
    words: str = ""


@dataclass(frozen=True)
class BudgetShown:
    """What may be drawn: in words, the present limit in watts, what is left of it (J), and what the SLO costs.

    Args:
        words: As asked: ``80 Wh, to last 9 h``.
        limit_w: Mean power allowed now; None if none.
        left_j: What is left; None where nothing runs out.
        shadow_w_per_ms: Watts that one more millisecond of p99 limit would save now; None if unknown.
        met: Whether it can be met; False with the nearest that can in ``words``.
    """

    words: str = ""
    limit_w: float | None = None
    left_j: float | None = None
    shadow_w_per_ms: float | None = None
    met: bool | None = None


@dataclass(frozen=True)
class ExploringShown:
    """What studies have made late of the last day's requests, forgotten exponentially.

    Args:
        requests: All of them, those included that studies sent.
        late: Those late for studies, beyond the SLO's own share.
        late_left: How many more a study of 30 trials may make late.
    """

    requests: float = 0.0
    late: float = 0.0
    late_left: float | None = None


@dataclass(frozen=True)
class StudyShown:
    """A study: running, ended, stopped or failed; trials done of at most, and the best point so far."""

    id: str
    state: str
    trials: int = 0
    of: int = 0
    best: Mapping[str, Level] | None = None
    best_j: float | None = None
    journal: str = ""
    words: str = ""


@dataclass(frozen=True)
class FinetuningShown:
    """A fine-tuning job beside the workload.

    Args:
        state: running, paused, finished or gone, see `polythrottle.daemon.trainer_monitor`.
        folder: Of the job; ``model`` what is trained.
        epochs_done: Whole ones; ``epochs`` of so many.
        samples: Done of the epoch that runs, by the newest checkpoint.
        samples_of: It has; None between epochs, or if they are very many.
        steps: Done in all.
        rate_per_s: Samples a second lately; None unless it runs and enough was seen.
        since: Wall time it has been so since.
    """

    state: str
    folder: str
    model: str
    epochs_done: int
    epochs: int
    samples: int
    samples_of: int | None
    steps: int
    rate_per_s: float | None
    since: str


@dataclass(frozen=True)
class Front:
    """A point of the ladder for the page's figure: watts and p99 at a rate."""

    rate_per_s: float
    power_w: float
    p99_s: float
    point: Mapping[str, Level] = field(default_factory=dict)


@dataclass(frozen=True)
class Status:
    """All the daemon shows; plain values, ready for JSON.

    Args:
        turn: Of the control loop, from 1; 0 before the first.
        at: Wall time of the turn.
        since: Wall time the daemon began at.
        polythrottle: Its version.
        device: URI; ``title`` for people; ``energy_kind`` and ``boundary`` of its joules.
        phase: Of the controller: down, following, safe, studying, yielded.
        reason: Why the present point is held.
        point: Levels set by the daemon, in SI; empty if the board is as found.
        leased: Whether the daemon may set the board.
        reachable: Whether the actuator (or the device) answers.
        rate_per_s: Requests that come; ``demand_per_s`` what is prepared for; ``waiting`` how many wait.
        p99_s: Of requests lately; ``limit_s`` its limit; ``mean_s`` their mean.
        ttft_p99_s: Of a language model's requests lately; ``tpot_p99_s`` likewise; None of any other workload.
        tokens_in_per_s: Tokens of prompts that came; ``tokens_out_per_s`` those that were generated.
        power_w: Mean over the turn; ``peak_w`` highest sample; ``energy_j`` since the daemon began.
        temperature_c: Hottest; ``clocks_hz`` what runs; ``throttled`` whether the device throttles.
        drift: What has drifted, in words; empty if nothing.
        late_s: How late the turn began; ``late_p99_s`` over the last thousand turns.
        resident_bytes: Of the daemon's process.
        faults: What does not work now, in words, such as a full disk.
        requests: How many were answered since the daemon began; ``failed`` how many of them failed; None if unknown.
        told: How many events of each kind there were since the daemon began.
        unconfirmed: The profile that is rolled back unless it is confirmed, and ``confirm_left_s`` when; empty if none.
        finetuning: The job of fine-tuning that runs beside the workload, or did lately; None if there is none.
        exploring: What studies have made late, and what is left of that.
    """

    turn: int = 0
    at: str = ""
    since: str = ""
    version: int = VERSION
    polythrottle: str = ""
    device: str = ""
    title: str = ""
    energy_kind: str = ""
    boundary: str = ""
    phase: str = "down"
    reason: str = ""
    workload: WorkloadShown | None = None
    point: Mapping[str, Level] = field(default_factory=dict)
    gather_s: float = 0.0
    rung: RungShown | None = None
    ladder: tuple[Front, ...] = ()
    leased: bool = False
    reachable: bool = False
    rate_per_s: float | None = None
    demand_per_s: float | None = None
    waiting: int | None = None
    p99_s: float | None = None
    limit_s: float | None = None
    mean_s: float | None = None
    power_w: float | None = None
    peak_w: float | None = None
    energy_j: float | None = None
    temperature_c: float | None = None
    clocks_hz: Mapping[str, int] = field(default_factory=dict)
    throttled: bool | None = None
    guards: tuple[GuardShown, ...] = ()
    drift: str = ""
    budget: BudgetShown = BudgetShown()
    saved: SavedShown = SavedShown()
    study: StudyShown | None = None
    late_s: float = 0.0
    late_p99_s: float = 0.0
    resident_bytes: int = 0
    faults: tuple[str, ...] = ()
    requests: int | None = None
    failed: int | None = None
    told: Mapping[str, int] = field(default_factory=dict)
    unconfirmed: str = ""
    confirm_left_s: float | None = None
    finetuning: FinetuningShown | None = None
    ttft_p99_s: float | None = None
    tpot_p99_s: float | None = None
    tokens_in_per_s: float | None = None
    tokens_out_per_s: float | None = None
    exploring: ExploringShown = ExploringShown()

    @property
    def document(self) -> dict[str, Any]:
        """The same as plain dictionaries and lists."""
        return asdict(self)


# What a daemon that looks after several services shows of them together.


@dataclass(frozen=True)
class ServiceShown:
    """One of several services.

    Args:
        name: Its own.
        weight: What its SLO counts.
        device: URI; ``phase`` of its controller, ``reason`` why its point is held.
        power_w: What its devices drew in the last second; None if unknown.
        share_w: What they may draw at most; None where they cannot be bounded now.
        counted_w: What was counted for them.
        short: Whether its SLO is expected to break for want of watts.
        p99_s: Of requests lately; ``limit_s`` its limit.
        rate_per_s: Requests that come.
        rung: Where on its ladder, from 0; ``rungs`` of so many.
        studying: Whether a study sets its devices.
        faults: What does not work now.
    """

    name: str
    weight: float
    device: str
    phase: str
    reason: str
    power_w: float | None = None
    share_w: float | None = None
    counted_w: float | None = None
    short: bool = False
    p99_s: float | None = None
    limit_s: float | None = None
    rate_per_s: float | None = None
    rung: int | None = None
    rungs: int | None = None
    studying: bool = False
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class PodShown:
    """A pod that asks to be looked after.

    Args:
        namespace: Its own; ``pod`` its name.
        service: The name of its service; "" if it is not looked after.
        gpus: UUIDs of its GPUs, if it is.
        refused: Why it is not looked after; "" if it is.
    """

    namespace: str
    pod: str
    service: str = ""
    gpus: tuple[str, ...] = ()
    refused: str = ""


@dataclass(frozen=True)
class NodeShown:
    """A server of services.

    Args:
        turn: Of the control loop; ``at`` its wall time.
        power_w: What the server drew in the last second, its rest included; None if a part is unknown.
        boards_w: What its services' devices drew of it; ``rest_w`` what is counted for the rest.
        limit_w: What it may draw; None if there is no such limit.
        met: Whether what is counted for all fits; None without a limit, or with nothing to share it.
        buys: What more watts would buy, in words, and ``buys_w`` how many; empty and None if nothing.
        energy_kind: How its watts come about, such as ``simulated``; several by commas.
        above: Seconds above the limit since it was set; ``above_most`` the most of them in a row.
        services: Each of them.
        faults: What does not work with the server as a whole, such as a service that is left out, or a kubelet that
            does not answer.
        pods: Those of Kubernetes that ask to be looked after; empty without it.
    """

    turn: int = 0
    at: str = ""
    power_w: float | None = None
    boards_w: float | None = None
    rest_w: float | None = None
    limit_w: float | None = None
    met: bool | None = None
    buys: str = ""
    buys_w: float | None = None
    energy_kind: str = ""
    above: int = 0
    above_most: int = 0
    services: tuple[ServiceShown, ...] = ()
    faults: tuple[str, ...] = ()
    pods: tuple[PodShown, ...] = ()
