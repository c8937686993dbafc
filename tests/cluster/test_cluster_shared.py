"""A catalogue of several jobs that share machines."""

from pathlib import Path

import pytest

from polythrottle.cluster.plan.job_shares import Aim, is_shared, read_shared, share
from polythrottle.domain.errors import BadFile
from polythrottle.domain.fleet.transient_machine import Market

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cluster-three-jobs.toml"


def test_the_example_holds_three_jobs_that_all_meet_their_deadlines() -> None:
    """Every aim is feasible, and the fewest joules are a fifth fewer than those of the fewest dollars."""
    assert is_shared(EXAMPLE)
    found = read_shared(EXAMPLE)
    assert [job.name for job in found.jobs] == ["ResNet-18", "ResNet-50", "transformer"]
    powers = {aim: share(found.jobs, found.kinds, aim).power_w for aim in Aim}
    assert powers[Aim.ENERGY] < 0.85 * powers[Aim.COST]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("v100 = 18.0", "h100 = 18.0", "h100 is no machine of this file: k80, p100, v100"),
        ("deadline_h = 12", "deadline_h = 0", "deadline_h must be a number above 0"),
        ("overhead = 0.02", "overhead = 1.5", "overhead in"),
        ("steps = 500_000", "", "steps is missing"),
        ("steps = 500_000", "foo = 1", "foo is not a key here"),
        ("most = 1\n", "", "machines.v100.most is missing: say how many of them the jobs share"),
        ("steps_per_s = { v100 = 3.0, p100 = 1.2 }", "", "positive speed on at least one kind"),
        ('name = "ResNet-18"', "name = 3", "name must be a text"),
    ],
)
def test_each_wrong_key_is_one_clear_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    """The message names the file, the job or machine, and what was expected."""
    text = EXAMPLE.read_text()
    assert old in text
    path = tmp_path / "jobs.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(BadFile) as caught:
        read_shared(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_market_without_a_price_is_said() -> None:
    """The example has spot prices only."""
    with pytest.raises(BadFile, match=r"machines\.k80\.usd_per_h has no price of on-demand"):
        read_shared(EXAMPLE, Market.ON_DEMAND)
