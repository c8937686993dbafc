"""Inference and fine-tuning side by side on a simulated board, told as `running` tells of a real one. Simulated."""

import itertools
import math
from dataclasses import dataclass, replace

from polythrottle.backends.simulated.engine import Engine
from polythrottle.backends.simulated.sharing import FAIR, together
from polythrottle.catalog.boards import Board
from polythrottle.catalog.models import Model
from polythrottle.errors import InvalidInput
from polythrottle.finetune.corun import CoRun
from polythrottle.finetune.host import Host
from polythrottle.finetune.job import Job
from polythrottle.finetune.options import Menu, Option
from polythrottle.finetune.paper_predictor import PaperModel
from polythrottle.finetune.planning import check_held, foretold
from polythrottle.finetune.result import Result, Training
from polythrottle.finetune.scheduler import alone, policy
from polythrottle.finetune.simulated_coruns import SimulatedBench
from polythrottle.finetune.simulating import Account, Stream, predicted, simulate
from polythrottle.finetune.terms import ALONE, GENTLE, Terms

LENGTH_S = 30.0
"""For so long requests come if nobody says otherwise."""
_MOST = 1_000_000
"""So many requests, seconds or slices are simulated within ten minutes."""
_STEPS, _BATCHES = (16, 32, 64), (1, 2, 4, 8)


@dataclass(frozen=True, eq=False)
class Scene:
    """A board with both kinds of work.

    Args:
        board: From the catalogue.
        host: What either kind of work takes there.
        menu: The points to choose from.
    """

    board: Board
    host: Host
    menu: Menu

    @classmethod
    def of(cls, board: Board, model: Model, job: Job, noise: float = 0.02, most: int = 8) -> "Scene":
        """Return a board that serves a model and fine-tunes it.

        Args:
            board: From the catalogue.
            model: What is served, and whose backbone is fine-tuned.
            job: The fine-tuning.
            noise: Standard deviation of the log of a piece's time.
            most: The largest batch that requests are answered in.

        Raises:
            InvalidInput: If the board cannot be simulated or hold the model.
        """
        host = Host(Engine(board), model, job, noise, most=most)
        return cls(board, host, host.menu())

    def foretold(self) -> Menu:
        """Return the menu with latencies beside fine-tuning at the default point, as the paper's model has them."""
        first = beside_s(self.host, self.board, self.menu.options[0])
        unknown = [[math.inf] * len(option.services) for option in self.menu.options[1:]]
        return predicted(self.menu, [first, *unknown])


def beside_s(host: Host, board: Board, option: Option) -> list[float]:
    """Return the latency of each service beside fine-tuning as the paper's model predicts it, fitted to co-runs."""
    bench = SimulatedBench(board, host.model, host.job, noise=0.0)
    whole = host.job.batch
    steps = [size for size in _STEPS if size <= whole]
    if len(steps) < 2:
        steps = sorted({1, max(1, whole // 2), whole})
    batches = _BATCHES if len(steps) > 1 else range(1, 1 + _BATCHES[-1])

    def case(batch: int, samples: int) -> CoRun:
        return bench.case(option.point, batch, samples, FAIR)

    def measured(batch: int, samples: int) -> CoRun:
        found = together(host.engine, (host.model, batch), (host.learner, samples), option.point)
        return replace(case(batch, samples), latency_s=found.latency_s)

    fitted = PaperModel.fit([measured(batch, samples) for batch in batches for samples in steps])
    return [fitted.predict(case(each.batch, host.job.batch)).mean_s for each in option.services]


def run_simulated(scene: Scene, terms: Terms) -> Result:
    """Return what comes of a stream and a job; after the stream the job is done to its end.

    Args:
        scene: The board and both kinds of work.
        terms: What is to be kept to; requests come for `LENGTH_S` if they do not say.

    Raises:
        SloUnmet: If inference alone does not hold the limit at any point.
        InvalidInput: If it leaves no power for anything else, the requests end before the hours begin, or there is more
            to do than can be simulated.
    """
    terms = terms if terms.seconds is not None else replace(terms, seconds=LENGTH_S)
    length_s = terms.seconds or LENGTH_S
    terms.check_hours(terms.day_s)
    check_held(scene.menu, terms.rate_per_s, terms.slo_s)
    _check_sizes(scene, terms, length_s)
    notes = foretold(scene.menu, scene.host.job.work, terms, terms.day_s)
    times = terms.arrivals.times(terms.seed)
    assert times is not None
    within = tuple(itertools.takewhile(lambda at_s: at_s < length_s, times))
    stream = Stream(within, length_s, terms.slo_s, terms.rate_per_s)
    menu = scene.foretold() if terms.policy == "paper" else scene.menu
    chosen = alone if terms.policy == ALONE else policy(terms.policy, terms.hours)
    chooses, endless = terms.policy in GENTLE, terms.policy == ALONE
    day_s = None if terms.hours is None else terms.day_s
    how = {"endless": endless, "choose": chooses}
    account = simulate(scene.host, stream, chosen, menu, terms.seed, 1, **how, ration=terms.ration, day_s=day_s)
    return _result(scene, terms, account, notes)


def _check_sizes(scene: Scene, terms: Terms, length_s: float) -> None:
    """Check that a run can be simulated in a time that somebody waits for.

    Raises:
        InvalidInput: If there are too many requests, seconds or slices.
    """
    job, piece = scene.host.job, scene.menu.options[0].gap(terms.rate_per_s, terms.slo_s)
    slices = (
        0.0 if terms.policy == ALONE else max(job.steps, job.work / (job.batch if piece is None else piece.samples))
    )
    counts = {"seconds": length_s, "requests": terms.rate_per_s * length_s, "slices of fine-tuning": slices}
    for what, count in counts.items():
        if count > _MOST:
            raise InvalidInput(f"{count:.3g} {what} are too many to simulate, and {_MOST:,} the most; ask for fewer")


def _result(scene: Scene, terms: Terms, account: Account, notes: tuple[str, ...]) -> Result:
    job, finished = scene.host.job, account.done_s is not None
    done = job.work if finished else account.samples
    title = f"{scene.host.model.title} on {scene.board.title} (simulated)"
    epoch, rest = divmod(done, job.samples)
    steps = epoch * job.steps_per_epoch + rest // job.batch
    training = Training(done, steps, epoch, job.epochs, finished, account.done_s, waited_s=account.waited_s)
    counts = account.requests, account.late, account.dropped, account.latencies_s, training
    ran = (title, True, terms.policy, str(terms.arrivals), terms.slo_s, account.span_s)
    if terms.policy != ALONE:
        notes = (*notes, f"{account.samples} of {done} samples were trained while requests came")
    told = Result(*ran, *counts, account.energy_j, "simulated", "the whole board", notes)
    told = replace(told, arrived_s=account.arrived_s, slices_s=account.slices_s)
    return replace(told, hours=None if terms.hours is None else str(terms.hours), power_cap_w=terms.power_w)
