import json
from dataclasses import replace
from pathlib import Path

import pytest

from polythrottle.domain.errors import BadFile, InvalidInput, UnknownName
from polythrottle.tuning.plan import StudyPlan
from polythrottle.tuning.setup import Setup
from polythrottle.tuning.stopping import Budget, Rule

SETUP = Setup("sim:v100", "resnet50", batch_sizes=(1, 2))
WHOLE = StudyPlan(
    SETUP,
    Budget(7, 60.0, 5.0),
    Rule(3600.0),
    presets=False,
    out=Path("/a/b.toml"),
    risk=0.05,
    history=("/h",),
    lessons=({"path": "/h/a.jsonl", "trials": 3, "bytes": 10, "sha256": "0"},),
)


@pytest.mark.parametrize("plan", [WHOLE, StudyPlan(SETUP), StudyPlan(SETUP, rule=Rule(early=False), history=())])
def test_a_plan_comes_back_from_its_journal(plan: StudyPlan) -> None:
    """Whatever is intended survives as a line of JSON."""
    assert StudyPlan.of(json.loads(json.dumps(plan.line()))) == plan


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"setup": {}}, "lacks 'device'"),
        ({"setup": {**SETUP.words, "x": 1}}, "a value in it is of another kind"),
        ({"setup": {**SETUP.words, "device": 3}}, "a name is not text, or a count is not a whole number"),
        ({"trials": -3}, "at least 1 trial"),
        ({"out": 3}, "a value in it is of another kind"),
        ({"lessons": None}, "a value in it is of another kind"),
    ],
)
def test_a_plan_that_is_none_is_a_bad_file(change: dict[str, object], told: str) -> None:
    """As the journal it is in, and in words that are not Python's."""
    with pytest.raises(BadFile, match=f"the journal's plan cannot be read: .*{told}"):
        StudyPlan.of({**WHOLE.line(), **change})


def test_a_bound_can_be_changed_alone() -> None:
    """What is not given stays; a horizon and going on regardless replace each other."""
    none = {"trials": None, "minutes": None, "joules": None, "horizon": None, "early_stop": None}
    assert WHOLE.changed(**none) == WHOLE
    assert WHOLE.changed(**{**none, "trials": 9}).budget == Budget(9, 60.0, 5.0)
    assert WHOLE.changed(**{**none, "minutes": 2}).budget == Budget(7, 120.0, 5.0)
    assert WHOLE.changed(**{**none, "joules": 6}).budget == Budget(7, 60.0, 6)
    assert WHOLE.changed(**{**none, "early_stop": False}).rule == Rule(early=False)
    assert WHOLE.changed(**{**none, "early_stop": True}).rule == Rule(3600.0)
    assert WHOLE.changed(**{**none, "horizon": "1d"}).rule == Rule(86_400.0)
    with pytest.raises(InvalidInput, match="leave --horizon"):
        WHOLE.changed(**{**none, "horizon": "1d", "early_stop": False})
    with pytest.raises(InvalidInput, match="at least 1 trial"):
        WHOLE.changed(**{**none, "trials": 0})


def test_only_what_changes_the_trials_makes_a_variant() -> None:
    """Risk and history do, budgets do not."""
    assert StudyPlan(SETUP).variant == StudyPlan(SETUP, Budget(3), Rule(1.0)).variant == ""
    others = [
        StudyPlan(SETUP, risk=0.1),
        StudyPlan(SETUP, risk=0.2),
        StudyPlan(SETUP, history=()),
        StudyPlan(SETUP, history=("/h",)),
    ]
    assert len({plan.variant for plan in others}) == 4


def test_a_method_must_be_able_to_do_what_is_intended() -> None:
    """A risk or a history that would be ignored is refused; having none is fine for all."""
    WHOLE.check("bayes")
    StudyPlan(SETUP, history=()).check("grid")
    for plan, told in ((WHOLE, "--history"), (StudyPlan(SETUP, risk=0.1), "--risk")):
        with pytest.raises(InvalidInput, match=f"--method grid takes no {told}; bayes does"):
            plan.check("grid")
    with pytest.raises(UnknownName, match="bayes"):
        WHOLE.check("bays")


@pytest.mark.parametrize(("workload", "most"), [("resnet50", 1000), ("llama-3.1-8b", 4000)])
def test_a_search_looks_longer_where_requests_wait_for_each_other(workload: str, most: int) -> None:
    """A thousand requests tell little of the slowest of those that are in flight together."""
    setup = Setup("sim:h100-sxm", workload).searching
    board, served = setup.open()
    assert setup.window(board, served).most_queries == most
    more = replace(setup, queries=9000)
    assert more.window(board, served).most_queries == 9000
