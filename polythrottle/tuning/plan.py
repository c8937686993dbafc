"""What is intended with a study beyond its problem; kept in the journal, so that a study resumes from it alone."""

import json
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from polythrottle.domain.error_budget import ErrorAccount, ErrorBudget, LateRequests
from polythrottle.domain.errors import BadFile, DeviceError, InvalidInput
from polythrottle.domain.problem import Problem
from polythrottle.domain.space import Level
from polythrottle.domain.units import span_s
from polythrottle.optimize import Options, make_optimizer
from polythrottle.storage.untrusted import MALFORMED, said
from polythrottle.tuning.setup import Setup
from polythrottle.tuning.stopping import Budget, Rule

LEARNERS = ("bayes",)
"""The search methods that learn from earlier studies and heed a risk."""
_LEAST_BESIDES = 2
"""Trials of boards that search together besides the default of each: one to find something, one to confirm it."""


@dataclass(frozen=True)
class StudyPlan:
    """What is intended with a study.

    Args:
        setup: Device and workload, in the words a user gave.
        budget: What the search may use.
        rule: When going on is not worth it.
        presets: Whether to measure the device's presets too.
        out: The profile's file; None for the usual place.
        risk: Chance that the search breaks a limit once one is known to be held; None leaves it to the method.
        history: Files and folders of earlier studies; None for the local store, none for no history.
        lessons: The earlier studies that were found, as `polythrottle.tuning.study_store.PriorStudy.line` describes
            them.
        priors: Points of profiles for other boards, to be tried first at the nearest points of this space.
        objects: Which of device, workload, meter and method were objects that no name opens again.
        identity: Hardware and firmware it was begun on; empty where the problem says it, or in older journals.
        errors: How many requests it may make late beyond the SLO's own share; None for any number.
    """

    setup: Setup
    budget: Budget = field(default_factory=Budget)
    rule: Rule = field(default_factory=Rule)
    presets: bool = True
    out: Path | None = None
    risk: float | None = None
    history: tuple[str, ...] | None = None
    lessons: tuple[Mapping[str, str | int], ...] = ()
    priors: tuple[Mapping[str, Level], ...] = ()
    objects: tuple[str, ...] = ()
    identity: Mapping[str, str] = field(default_factory=dict)
    errors: ErrorBudget | None = None

    def check(self, method: str) -> None:
        """Check that a method can do what is intended.

        Raises:
            UnknownName: If there is no such method.
            InvalidInput: If it takes no risk or no history, or the risk is no chance.
        """
        if "method" not in self.objects:
            make_optimizer(method, Options(risk=self.risk))
        for option, given in (("--history", bool(self.history)), ("--risk", self.risk is not None)):
            if given and method not in LEARNERS:
                raise InvalidInput(f"--method {method} takes no {option}; {' and '.join(LEARNERS)} does")

    def check_together(self, boards: int) -> None:
        """Check that several boards can do together what is intended.

        Args:
            boards: How many.

        Raises:
            InvalidInput: If they cannot.
        """
        if self.errors is not None:
            raise InvalidInput("an error budget is for one board; leave --error-budget out, or name one device")
        if self.objects:
            raise InvalidInput("boards that search together are opened by their URIs, as is what they serve")
        if self.budget.trials < boards + _LEAST_BESIDES:
            raise InvalidInput(
                f"{boards} boards need {boards + _LEAST_BESIDES} trials at least, not {self.budget.trials}: each "
                "measures the default point first"
            )

    @property
    def variant(self) -> str:
        """A short name for what makes another study of the same problem, method and seed; empty for the usual."""
        if self.risk is None and self.history is None and not self.priors and self.errors is None:
            return ""
        # Only where there are any, so that studies from before keep their files' names.
        if self.priors:
            priors = [[dict(prior) for prior in self.priors]]
        else:
            priors = []
        errors = [str(self.errors)] if self.errors is not None else []
        # Short, for it only keeps names apart: what a journal was begun with is compared when it is opened.
        return f"{zlib.crc32(json.dumps([self.risk, self.history, *priors, *errors]).encode()):08x}"

    def account(self, problem: Problem, spent: LateRequests) -> ErrorAccount | None:
        """Return what a study has spent of its error budget; None if it has none."""
        if self.errors is None:
            return None
        return ErrorAccount.of(self.errors, problem, self.budget.trials, spent)

    @property
    def to_go_on(self) -> str:
        """How a study of objects is continued, which a journal alone cannot be."""
        return (
            f"it is a study of objects ({', '.join(self.objects)}) that a journal cannot open again; to go on, call "
            "polythrottle.tune() again with the same objects and this journal"
        )

    def resumed_by(self, journal: Path) -> str:
        """Return how a study that was interrupted goes on, for people who called `polythrottle.tune`."""
        if self.objects:
            return f"{journal}: {self.to_go_on}"
        return f"resume with: polythrottle.resume({str(journal)!r})"

    def changed(
        self,
        *,
        trials: int | None,
        minutes: float | None,
        joules: float | None,
        horizon: str | None,
        early_stop: bool | None,
    ) -> "StudyPlan":
        """Return this plan with other bounds; those that are None stay as they are.

        Raises:
            InvalidInput: If a bound is not one.
        """
        budget = Budget(
            self.budget.trials if trials is None else trials,
            self.budget.duration_s if minutes is None else 60 * minutes,
            self.budget.energy_j if joules is None else joules,
        )
        if horizon is not None:
            return replace(self, budget=budget, rule=Rule(span_s(horizon), early_stop is not False))
        if early_stop is None:
            return replace(self, budget=budget)
        # A horizon says when to stop early, and a rule refuses it where that is not wanted.
        return replace(self, budget=budget, rule=Rule(self.rule.horizon_s if early_stop else None, early_stop))

    def facts(
        self, ended: str | None, runs_on: str | None = None, account: ErrorAccount | None = None
    ) -> dict[str, str]:
        """Return what a report should say of it.

        Args:
            ended: Why the study has ended; None if it has not.
            runs_on: What the work runs on, where that is known.
            account: What was spent of its error budget; None if it has none.
        """
        learnt = ", ".join(Path(str(lesson["path"])).name for lesson in self.lessons)
        if self.risk is None:
            risk = None
        else:
            risk = f"at most {100 * self.risk:g} % chance that the search breaks a limit"
        errors = None if account is None else account.words
        known = {"ended": ended, "runs on": runs_on, "risk": risk, "error budget": errors, "learnt from": learnt}
        return {name: text for name, text in known.items() if text}

    def line(self) -> dict[str, Any]:
        """Return the plan as a journal keeps it."""
        return {
            **asdict(self.budget),
            **asdict(self.rule),
            "presets": self.presets,
            "out": None if self.out is None else str(self.out),
            "risk": self.risk,
            "history": None if self.history is None else list(self.history),
            "lessons": [dict(lesson) for lesson in self.lessons],
            **({"priors": [dict(prior) for prior in self.priors]} if self.priors else {}),
            **({"objects": list(self.objects), "to_go_on": self.to_go_on} if self.objects else {}),
            **({"identity": dict(self.identity)} if self.identity else {}),
            **({"error_budget": str(self.errors)} if self.errors is not None else {}),
            "setup": self.setup.words,
        }

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> "StudyPlan":
        """Return the plan a journal keeps; what earlier versions did not keep is as they did it.

        Raises:
            BadFile: If it holds something else.
        """
        setup = Setup.planned(line)
        try:
            return cls(
                setup=setup,
                budget=Budget(_whole(line.get("trials", 30)), _figure(line, "duration_s"), _figure(line, "energy_j")),
                rule=Rule(_figure(line, "horizon_s"), line.get("early", False) is not False),
                presets=line.get("presets") is not False,
                out=None if line.get("out") is None else Path(line["out"]),
                risk=_figure(line, "risk"),
                history=_texts(line.get("history")),
                lessons=tuple(_lesson(lesson) for lesson in line.get("lessons", ())),
                priors=tuple(_prior(prior) for prior in line.get("priors", ())),
                objects=_texts(line.get("objects")) or (),
                identity=_identity(line.get("identity", {})),
                errors=None if line.get("error_budget") is None else ErrorBudget.parse(line["error_budget"]),
            )
        except (*MALFORMED, InvalidInput) as error:
            raise BadFile(f"the journal's plan cannot be read: {said(error)}") from error


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _figure(line: Mapping[str, Any], name: str) -> float | None:
    value = line.get(name)
    if value is not None and type(value) not in (int, float):
        raise ValueError(f"{name} is not a number")
    return value


def _texts(values: Sequence[Any] | None) -> tuple[str, ...] | None:
    if values is None:
        return None
    if isinstance(values, str) or not all(isinstance(value, str) for value in values):
        raise ValueError("history or objects is not a list of names")
    return tuple(values)


def _identity(identity: Mapping[str, Any]) -> Mapping[str, str]:
    if not all(type(text) is str for text in identity.values()):
        raise ValueError("its identity holds something else than text")
    return dict(identity)


def _prior(levels: Mapping[str, Any]) -> Mapping[str, Level]:
    if not all(type(level) in (int, float, str) for level in levels.values()):
        raise ValueError("a level of a point to try first is neither a number nor a name")
    return dict(levels)


def _lesson(line: Mapping[str, Any]) -> Mapping[str, str | int]:
    texts = (line["path"], line["sha256"])
    counts = (line["bytes"], line["trials"])
    if not all(type(text) is str for text in texts) or not all(type(count) is int for count in counts):
        raise ValueError("an earlier study is not described")
    return dict(line)


# Packages that are needed later: imported before anything runs, and told of in one line if they cannot be.

_LONGEST = 200


def check_importable(packages: Sequence[str], what: str, remedy: str) -> None:
    """Import packages, so that a study does not end where it first needs one that is missing or broken.

    Args:
        packages: Their names.
        what: What needs them, such as ``method bayes``.
        remedy: What else would do.

    Raises:
        DeviceError: If one cannot be imported; says which, and what to do.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gpytorch uses deprecated parts of torch as it is imported
        for name in packages:
            try:
                import_module(name)
            except Exception as err:  # a broken installation raises whatever it likes: OSError, RuntimeError, …
                why = " ".join(f"{type(err).__name__}: {err}".split())[:_LONGEST]
                raise DeviceError(f"{what} needs {name}, which cannot be imported ({why}); {remedy}") from err
