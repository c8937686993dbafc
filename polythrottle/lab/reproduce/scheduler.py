"""The streams of arXiv 2310.19991, tables 5 and 6, beside fine-tuning under every policy. Simulated."""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from polythrottle.backends.simulated.engine import Engine
from polythrottle.catalog import Model, load_board, load_model
from polythrottle.domain.arrivals import Arrivals, Burst, Poisson, Uniform
from polythrottle.domain.errors import InvalidInput
from polythrottle.lab.reproduce.polythrottle_paper import Bar
from polythrottle.lab.reproduce.published import B4, B7, ORIN, SOURCE, TX2
from polythrottle.training.beside.operating_options import FinetuningJob, Menu, Option
from polythrottle.training.beside.scheduler import POLICIES, Decision, Moment, Policy, alone, greedy
from polythrottle.training.beside.simulated_host import Host
from polythrottle.training.beside.simulated_run import Account, Stream, beside_s, predicted, simulate

LENGTH_S = 30.0
_ALL_DAY_S = 1e9
_INFERENCE = "inference-only"
_ALL = "greedy-all"
_SPARED = 0.15
_THROUGHPUT = 0.9
_MORE = 0.01

ASSUMED = (
    "The simulator is fitted to ratios, not to absolute times. So all times on a board are stretched by one factor, "
    "0.92 on AGX Orin and 9 on TX2: least squares over the published rates of greedy sharing and inference alone.",
    "Inference alone and greedy sharing answer single requests at default clocks under the stock governor; greedy "
    "sharing gives up requests whose limit has passed. 10 iterations on TX2 too.",
    "Contexts take turns of 2 ms, a switch costs 0.05 ms and cold caches as much; work that moves bytes slows other "
    "such work by up to 15 %; after work of the other kind 1 ms is lost. Nobody publishes these.",
    "The backbone is frozen; its forward pass costs what serving does, in the same precision, at twice the launches.",
    "Twitter-like: Poisson at a rate that switches between two values, 1.4 times the mean for 2 s on average, a fifth "
    "of the time. The published segment is not known.",
    "Time and power of each piece vary by 2 %, with stragglers in clusters.",
)
"""What the paper does not say and is assumed here."""


@dataclass(frozen=True)
class Setting:
    """One board's half of the test.

    Args:
        board: Name in ``devices/``.
        network: What is served, and whose backbone is fine-tuned.
        rate_per_s: Of the requests.
        slo_s: The limit of each from its arrival.
        job: The fine-tuning.
        stretch: How many times as long everything takes as in the simulator.
    """

    board: str
    network: str
    rate_per_s: float
    slo_s: float
    job: FinetuningJob
    stretch: float


SETTINGS = (
    Setting(ORIN, B7, 8.0, 0.7, FinetuningJob(samples=640, batch=64, epochs=1, output=1000, model=B7), 0.92),
    Setting(TX2, B4, 4.0, 1.0, FinetuningJob(samples=80, batch=8, epochs=1, output=100, model=B4), 9.0),
)

ARRIVALS: Mapping[str, Callable[[float], Arrivals]] = {
    "uniform": Uniform,
    "poisson": Poisson,
    "twitter-like": lambda rate_per_s: Burst(rate_per_s, peak=1.4, share=0.2, length_s=2.0),
}

PUBLISHED: Mapping[tuple[str, str], Mapping[str, float]] = {
    (ORIN, "uniform"): {"greedy": 0.3791, "paper": 0.0208, _INFERENCE: 0.004},
    (ORIN, "poisson"): {"greedy": 0.6041, "paper": 0.0542, _INFERENCE: 0.0167},
    (ORIN, "twitter-like"): {"greedy": 0.22, "paper": 0.058, _INFERENCE: 0.038},
    (TX2, "uniform"): {"greedy": 0.16, "paper": 0.055, _INFERENCE: 0.01},
    (TX2, "poisson"): {"greedy": 0.354, "paper": 0.074, _INFERENCE: 0.035},
    (TX2, "twitter-like"): {"greedy": 0.35, "paper": 0.075, _INFERENCE: 0.053},
}
"""Violation rates of tables 5 and 6."""


def patient(moment: Moment) -> Decision:
    """Share greedily and give up no request, so that all of the work is done."""
    return greedy(replace(moment, slo_s=_ALL_DAY_S))


_RUNS: Mapping[str, Policy] = {_INFERENCE: alone, **POLICIES, _ALL: patient}


def stretched(model: Model, factor: float) -> Model:
    """Return a model whose queries take so many times as long, preparation on the CPU apart."""
    names = ("operations", "weight_bytes", "traffic_bytes", "kernels", "handoff_cycles")
    return replace(model, **{name: getattr(model, name) * factor for name in names})


def stream(setting: Setting, arrivals: str, seed: int) -> Stream:
    """Return one replay of a setting's stream."""
    times_s = ARRIVALS[arrivals](setting.rate_per_s).times(seed)
    assert times_s is not None
    within = itertools.takewhile(lambda at_s: at_s < LENGTH_S, times_s)
    return Stream(tuple(within), LENGTH_S, setting.slo_s, setting.rate_per_s)


@dataclass(frozen=True, eq=False)
class Scene:
    """A setting made ready to be simulated."""

    setting: Setting
    host: Host
    menu: Menu

    @classmethod
    def of(cls, setting: Setting) -> "Scene":
        """Return a setting with its board, its points, and the paper's model fitted to co-runs at default clocks."""
        board = load_board(setting.board)
        model = stretched(load_model(setting.network), setting.stretch)
        host = Host(Engine(board), model, setting.job)
        menu = host.menu()
        unknown = [[math.inf] * len(option.services) for option in menu.options[1:]]
        return cls(setting, host, predicted(menu, [beside_s(host, board, menu.options[0]), *unknown]))


@dataclass(frozen=True)
class StreamRecord:
    """What came of one stream under one policy, over all replays; simulated.

    Args:
        board: Name in ``devices/``.
        arrivals: One of `ARRIVALS`.
        policy: One of the policies; ``greedy-all`` gives up no request.
        violation_rate: Share of requests not answered within the limit.
        violation_error: Standard error of that over the replays; None of one replay.
        energy_j: Mean, until both kinds of work are done; of inference alone until the replay ends.
        finetune_seconds: Mean until the fine-tuning is done; None where there is none.
        paper: The published violation rate; None if there is none.
    """

    board: str
    arrivals: str
    policy: str
    violation_rate: float
    violation_error: float | None
    energy_j: float
    finetune_seconds: float | None
    paper: float | None


@dataclass(frozen=True)
class Throughput:
    """How much is fine-tuned while a stream lasts, in samples per replay; simulated.

    Args:
        board: Name in ``devices/``.
        arrivals: One of `ARRIVALS`.
        done: By ``interleave``, with work that does not end.
        room: What all time without inference would have been enough for at the clocks that were chosen, in best slices.
        idle: What the time that inference alone leaves idle at default clocks has room for, in whole steps.
        clairvoyant: What no schedule can exceed at default clocks that knows all arrivals; see `most_samples`.
    """

    board: str
    arrivals: str
    done: float
    room: float
    idle: float
    clairvoyant: float


def document(replays: int = 20, told: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """Return every policy on every stream beside what the paper reports.

    Args:
        replays: Of each stream, of 30 s each.
        told: Called with how many cells are done, and of how many.

    Raises:
        InvalidInput: If there is no replay.
        PolythrottleError: If the catalogue lacks a board or a model.
    """
    if replays < 1:
        raise InvalidInput(f"the streams are replayed at least once, not {replays} times")
    records: list[StreamRecord] = []
    throughputs: list[Throughput] = []
    cells = [(setting, arrivals) for setting in SETTINGS for arrivals in ARRIVALS]
    scenes = {setting.board: Scene.of(setting) for setting in SETTINGS}
    for number, (setting, arrivals) in enumerate(cells, start=1):
        records += cell(scenes[setting.board], arrivals, replays)
        throughputs.append(throughput(scenes[setting.board], arrivals, replays))
        if told is not None:
            told(number, len(cells))
    return {
        "source": f"{SOURCE}, tables 5 and 6",
        "energy_kind": "simulated",
        "replays": replays,
        "records": [asdict(each) for each in records],
        "throughput": [asdict(each) for each in throughputs],
        "assumed": list(ASSUMED),
        "bars": [asdict(bar) for bar in bars(records, throughputs)],
        "stricter": [asdict(bar) for bar in stricter(records, throughputs)],
    }


def cell(scene: Scene, arrivals: str, replays: int) -> list[StreamRecord]:
    """Return one stream under every policy."""
    return [_record(scene, arrivals, name, replays) for name in _RUNS]


def _record(scene: Scene, arrivals: str, name: str, replays: int) -> StreamRecord:
    accounts = [_account(scene, arrivals, name, seed, endless=name == _INFERENCE) for seed in range(replays)]
    rates = [each.violation_rate for each in accounts]
    done = [each.done_s for each in accounts if each.done_s is not None]
    return StreamRecord(
        scene.setting.board,
        arrivals,
        name,
        sum(each.late for each in accounts) / sum(each.requests for each in accounts),
        statistics.stdev(rates) / math.sqrt(replays) if replays > 1 else None,
        statistics.fmean(each.energy_j for each in accounts),
        statistics.fmean(done) if done else None,
        PUBLISHED[scene.setting.board, arrivals].get(name),
    )


def _account(scene: Scene, arrivals: str, name: str, seed: int, endless: bool) -> Account:
    chooses = name in ("interleave", "off-peak")
    requests = stream(scene.setting, arrivals, seed)
    return simulate(scene.host, requests, _RUNS[name], scene.menu, seed, endless=endless, choose=chooses)


def throughput(scene: Scene, arrivals: str, replays: int) -> Throughput:
    """Return how much is fine-tuned beside one stream, and how much there is room for."""
    default = scene.menu.options[0]
    seeds = range(replays)
    mine = [_account(scene, arrivals, "interleave", seed, endless=True) for seed in seeds]
    served = [_account(scene, arrivals, _INFERENCE, seed, endless=True) for seed in seeds]
    return Throughput(
        scene.setting.board,
        arrivals,
        statistics.fmean(each.samples for each in mine),
        statistics.fmean(each.room for each in mine),
        statistics.fmean(max(0.0, LENGTH_S - each.inference_s) / default.sample_s for each in served),
        statistics.fmean(most_samples(stream(scene.setting, arrivals, seed), default) for seed in seeds),
    )


def bars(records: Sequence[StreamRecord], throughputs: Sequence[Throughput]) -> list[Bar]:
    """Return what should hold, and whether it does."""
    found = {(each.board, each.arrivals, each.policy): each for each in records}
    cells = [(each.board, each.arrivals) for each in throughputs]
    rates = {key: record.violation_rate for key, record in found.items()}
    more = max(rates[board, load, "interleave"] - rates[board, load, _INFERENCE] for board, load in cells)
    below = max(rates[board, load, "interleave"] - PUBLISHED[board, load]["paper"] for board, load in cells)
    share = min(each.done / each.idle for each in throughputs)
    spared = _spared(found, cells, _ALL)
    return [
        Bar("violations at most 1 point above inference alone", f"{100 * more:+.2f} points at most", more <= _MORE),
        Bar("violations below the paper's in every cell", f"{100 * below:+.2f} points at most", below < 0),
        Bar("fine-tuning at least 90 % of idle time", f"{100 * share:.0f} % at least", share >= _THROUGHPUT),
        Bar(
            "energy at least 15 % below greedy sharing, for the same work",
            f"{100 * min(spared):.1f} to {100 * max(spared):.1f} %",
            min(spared) >= _SPARED,
        ),
    ]


def stricter(records: Sequence[StreamRecord], throughputs: Sequence[Throughput]) -> list[Bar]:
    """Return the same bars in readings that are harder to meet, and whether they hold.

    Throughput: of all time without inference, in the best slices there are, as if no request ever cut one short; and of
    what no schedule at default clocks exceeds that knows every arrival. Energy: against greedy sharing that gives
    requests up, and so does less work.
    """
    found = {(each.board, each.arrivals, each.policy): each for each in records}
    spared = _spared(found, [(each.board, each.arrivals) for each in throughputs], "greedy")
    shares = {
        "fine-tuning at least 90 % of all time without inference, in best slices": [
            each.done / each.room for each in throughputs
        ],
        "fine-tuning at least 90 % of what knowing all arrivals allows": [
            each.done / each.clairvoyant for each in throughputs
        ],
    }
    told = [
        Bar(what, f"{100 * min(each):.0f} to {100 * max(each):.0f} %", min(each) >= _THROUGHPUT)
        for what, each in shares.items()
    ]
    energy = f"{100 * min(spared):.1f} to {100 * max(spared):.1f} %"
    return [
        *told,
        Bar("energy at least 15 % below greedy sharing that does less work", energy, min(spared) >= _SPARED),
    ]


def _spared(
    found: Mapping[tuple[str, str, str], StreamRecord], cells: Sequence[tuple[str, str]], policy: str
) -> list[float]:
    """Return by how much interleaving is below a policy in energy, as shares, cell by cell."""
    energies_j = {key: record.energy_j for key, record in found.items()}
    return [1 - energies_j[board, load, "interleave"] / energies_j[board, load, policy] for board, load in cells]


def least_busy_s(stream: Stream, option: Option) -> float:
    """Return the least time that inference can take at an option if every request is to be in time.

    All arrivals are known. They are cut into batches in their order; a batch starts when its last request is there and
    ends before its first is late, by the mean of its time. Batches that would overlap are let, so no schedule
    leaves more time than this says.

    Args:
        stream: The requests.
        option: What is used to answer them.
    """
    times_s = stream.times_s
    best = [0.0] + [math.inf] * len(stream.times_s)
    for after in range(1, len(times_s) + 1):
        for service in option.services:
            first = after - service.batch
            if first < 0:
                break
            in_time = times_s[after - 1] + service.latency_s <= times_s[first] + stream.slo_s
            if in_time or service is option.services[0]:
                best[after] = min(best[after], best[first] + service.interval_s)
    return best[-1]


def most_samples(stream: Stream, option: Option) -> float:
    """Return the most samples that could be fine-tuned in the time that inference leaves; see `least_busy_s`."""
    return max(0.0, stream.length_s - least_busy_s(stream, option)) / option.sample_s
