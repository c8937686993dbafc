"""A training job on machines that come and go, in virtual time."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import pytest
from planning_builders import CATALOGUE

from polythrottle.cli.commands import run
from polythrottle.cluster.conditions import (
    Change,
    DefaultPolicy,
    DrawnSupply,
    FleetPolicy,
    IndependentPolicy,
    JointPolicy,
    RecordedSupply,
    SimulatedJob,
    TunedPolicy,
)
from polythrottle.cluster.job_simulator import Scenario, simulate
from polythrottle.cluster.plan.costs import SimulatedOutcome, Use, against, spread
from polythrottle.cluster.recorded_tables import Trace, read_trace
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.gpu_variability import Silicon
from polythrottle.domain.fleet.transient_machine import (
    KEPT,
    Cap,
    CheckpointCost,
    ConstantHazard,
    MachineType,
    Market,
    ObservedLifetime,
)

CAPS = (Cap(None, 1.0, 220.0), Cap(200.0, 1.05, 184.0), Cap(150.0, 1.18, 145.0))
MACHINE = MachineType("m", "V100", {Market.SPOT: 3.6}, CAPS, 40.0, 60.0)
JOB = SimulatedJob(work=36_000.0, checkpoint=CheckpointCost(2.0, 5.0), reform_s=10.0, cold_s=50.0)
EQUAL = Silicon(0.0)


@dataclass(frozen=True)
class Scripted:
    """Machines that come and go as written: (time, machine, there)."""

    script: tuple[tuple[float, int, bool], ...]

    def changes(self, seed: int) -> Iterator[Change]:
        """Yield the script."""
        return (Change(*each) for each in self.script)


def of(
    job: SimulatedJob, supply: object, policy: FleetPolicy, silicon: Silicon = EQUAL, machine: MachineType = MACHINE
) -> Scenario:
    """Return a scenario without noise."""
    return Scenario(job, machine, supply, policy, silicon, noise=0.0)  # type: ignore[arg-type]


def ends(scenario: Scenario, horizon_s: float = 1e6, seed: int = 0) -> SimulatedOutcome:
    """Return the outcome, after checking that every machine-second is in the ledger, once."""
    found = simulate(scenario, seed, horizon_s)
    assert found.ledger.total.machine_s == pytest.approx(found.machines * found.time_s)
    return found


def test_a_job_that_nothing_disturbs_takes_its_time() -> None:
    """Start, form, train, and a checkpoint of 2 s each 1,000 s; four equal machines take a quarter of the work."""
    found = ends(of(JOB, DrawnSupply(4, KEPT), DefaultPolicy(every_s=1000.0)))
    assert found.finished
    assert found.time_s == pytest.approx(50 + 10 + 9000 + 8 * 2)
    assert found.work == pytest.approx(JOB.work)
    used = {use: spent.machine_s for use, spent in found.ledger.by_use.items()}
    assert used[Use.STARTUP] == pytest.approx(200)
    assert used[Use.WAITING] == pytest.approx(40)
    assert used[Use.USEFUL] == pytest.approx(36_000)
    assert used[Use.CHECKPOINT] == pytest.approx(64)
    assert found.energy_j == pytest.approx(36_000 * 220 + 240 * 40 + 64 * 60)
    assert found.usd == pytest.approx(found.ledger.total.machine_s * 0.001)


def test_a_loss_undoes_what_was_not_written() -> None:
    """A machine lost 30 s after the second checkpoint: 30 s of all are done again, by one fewer."""
    lost_s = 60 + 2 * 1002 + 30
    script = (*((0.0, number, True) for number in range(4)), (lost_s, 3, False))
    found = ends(of(JOB, Scripted(script), DefaultPolicy(every_s=1000.0)))
    assert found.interruptions == found.losses == 1
    assert found.ledger.by_use[Use.REDONE].machine_s == pytest.approx(4 * 30)
    left = JOB.work - 4 * 2000
    assert found.time_s == pytest.approx(lost_s + 10 + left / 3 + 2 * int(left / 3 / 1000))


def test_a_notice_leaves_only_the_stall() -> None:
    """Told in time, the job writes a checkpoint and does nothing twice."""
    script = (*((0.0, number, True) for number in range(4)), (5000.0, 3, False))
    told = ends(of(replace(JOB, noticed=1.0), Scripted(script), DefaultPolicy(every_s=1000.0)))
    silent = ends(of(JOB, Scripted(script), DefaultPolicy(every_s=1000.0)))
    assert told.ledger.by_use[Use.REDONE].energy_j == 0 < silent.ledger.by_use[Use.REDONE].energy_j
    assert told.time_s < silent.time_s


def test_asynchronous_workers_lose_nothing_and_wait_for_nobody() -> None:
    """A loss changes the speed and nothing else."""
    job = replace(JOB, synchronous=False)
    script = (*((0.0, number, True) for number in range(4)), (5000.0, 3, False))
    found = ends(of(job, Scripted(script), DefaultPolicy(every_s=inf)))
    assert found.ledger.by_use[Use.REDONE].machine_s == 0
    assert found.time_s == pytest.approx(5000 + (JOB.work - 4 * (5000 - 60)) / 3)


def test_everyone_waits_for_the_slowest_only_when_synchronous() -> None:
    """A fleet of unequal GPUs is slower than its mean in step, and its mean alone."""
    wide = Silicon(0.22)
    together = ends(of(JOB, DrawnSupply(16, KEPT), DefaultPolicy(every_s=inf), wide), seed=4)
    apart = ends(of(replace(JOB, synchronous=False), DrawnSupply(16, KEPT), DefaultPolicy(every_s=inf), wide), seed=4)
    assert together.time_s > 1.03 * apart.time_s
    assert together.ledger.by_use[Use.WAITING].machine_s > apart.ledger.by_use[Use.WAITING].machine_s


def test_nobody_left_is_no_progress_until_somebody_comes() -> None:
    """All lost for an hour: the job stands, goes on from its checkpoint, and finishes."""
    script = ((0.0, 0, True), (1100.0, 0, False), (4700.0, 1, True))
    job = replace(JOB, work=3000.0)
    found = ends(of(job, Scripted(script), DefaultPolicy(every_s=1000.0)))
    assert found.finished
    assert found.time_s == pytest.approx(4700 + 60 + (3000 - 1000) + 2)


def test_a_job_that_cannot_end_stops_at_the_horizon() -> None:
    """No machine at all, or one that never lives until its first checkpoint: an outcome, not a loop."""
    nobody = simulate(of(JOB, Scripted(()), DefaultPolicy()), 0, 5000.0)
    assert (nobody.finished, nobody.work, nobody.time_s, nobody.energy_j) == (False, 0.0, 5000.0, 0.0)
    hopeless = simulate(of(JOB, DrawnSupply(1, ConstantHazard(60.0), 1.0), DefaultPolicy(every_s=3600.0)), 0, 20_000.0)
    assert not hopeless.finished
    assert hopeless.work < 200


def test_the_same_seed_repeats_everything() -> None:
    """Record for record; another seed differs."""
    scenario = of(JOB, DrawnSupply(8, ConstantHazard(0.5)), TunedPolicy(), Silicon(0.08))
    assert ends(scenario, seed=1).record() == ends(scenario, seed=1).record()
    assert ends(scenario, seed=1).record() != ends(scenario, seed=2).record()


def test_a_tuned_fleet_saves_within_its_limit_of_time() -> None:
    """Fewer joules per work than caps and interval chosen apart, and than default; no more than 3 % longer."""
    supply, wide = DrawnSupply(16, ConstantHazard(0.1), 60.0), Silicon(0.22)
    job = replace(JOB, work=inf)
    found = {
        policy.name: [simulate(Scenario(job, MACHINE, supply, policy, wide), seed, 86400.0) for seed in range(3)]
        for policy in (DefaultPolicy(), IndependentPolicy(), JointPolicy(), TunedPolicy())
    }

    def saved(name: str) -> float:
        return against(found[name], found["default"], lambda outcome: outcome.energy_j).mean

    assert saved("tuned") > max(saved("apart"), saved("joint")) + 0.03
    assert against(found["tuned"], found["default"], lambda outcome: outcome.time_s).mean > -0.032


def test_a_fleet_of_half_hour_nodes_pays_for_its_tuning() -> None:
    """Machines that are taken away every thirty minutes: what is verified in one is saved in the rest of its life."""
    supply, job = DrawnSupply(16, ConstantHazard(2.0), 60.0), replace(JOB, work=inf)
    default, tuned = (
        [
            simulate(Scenario(job, MACHINE, supply, policy, Silicon(), lifetime=ConstantHazard(2.0)), seed, 43200.0)
            for seed in range(3)
        ]
        for policy in (DefaultPolicy(), TunedPolicy())
    )
    saved = against(tuned, default, lambda outcome: outcome.energy_j)
    assert saved.low is not None
    assert saved.low > 0


def test_a_known_lifetime_sets_the_interval_by_the_ages_of_the_machines() -> None:
    """A type that dies young writes often at first and seldom later: fewer checkpoints than at a newborn's hazard."""
    infant = ObservedLifetime((0.0, 3600.0, 864000.0), (1.0, 0.5, 0.49))
    script = Scripted(((0.0, 0, True),))
    young = replace(of(replace(JOB, work=inf), script, DefaultPolicy()), lifetime=infant)
    hour, day = simulate(young, 0, 3600.0), simulate(young, 0, 86400.0)
    stalls = [each.ledger.by_use[Use.CHECKPOINT].machine_s / each.time_s for each in (hour, day)]
    assert stalls[0] > 3 * stalls[1] > 0


def test_a_price_along_time_is_paid() -> None:
    """Twice the price in the second half of a job makes half as much again."""
    flat = ends(of(JOB, DrawnSupply(1, KEPT), DefaultPolicy(every_s=inf)), horizon_s=1e5)
    half_s = flat.time_s / 2
    rising = replace(
        of(JOB, DrawnSupply(1, KEPT), DefaultPolicy(every_s=inf)),
        usd_per_h=lambda time_s: 3.6 if time_s < half_s else 7.2,
    )
    assert ends(rising, horizon_s=1e5).usd == pytest.approx(1.5 * flat.usd, rel=0.03)


def test_scaling_that_is_known_is_kept() -> None:
    """Two machines of a job that gains nothing from the second take as long as one."""
    job = replace(JOB, work=5000.0, speedups=(1.0, 1.0), reform_s=0.0)
    assert ends(of(job, DrawnSupply(2, KEPT), DefaultPolicy(every_s=inf))).time_s == pytest.approx(5050)


def test_a_recorded_day_is_simulated_with_all_its_losses(transient: Path) -> None:
    """Eighty places of the recorded V100 group: every loss of the record and every machine-second of it."""
    trace = read_trace(transient / "gcp_spot_cluster_v100_us-east1-c.csv")
    found = ends(of(replace(JOB, work=inf), RecordedSupply(trace, 80), DefaultPolicy()), trace.ends_s - 1)
    assert found.losses == trace.losses
    assert found.machines * found.time_s == pytest.approx(trace.machine_s, rel=1e-3)


def test_a_tuned_fleet_saves_on_a_recorded_trace(transient: Path) -> None:
    """On places of the recorded V100 group: three points more than caps and interval apart, no more than 3 % longer."""
    caps = (Cap(None, 1.0, 227.4), Cap(225.0, 1.023, 213.2), Cap(200.0, 1.061, 190.5), Cap(175.0, 1.104, 171.8))
    trace, machine = read_trace(transient / "gcp_spot_cluster_v100_us-east1-c.csv"), replace(MACHINE, caps=caps)
    supply, job = RecordedSupply(trace, 16), replace(JOB, work=inf)
    default, apart, tuned = (
        [simulate(Scenario(job, machine, supply, policy, Silicon(0.22)), seed, trace.ends_s - 1) for seed in range(2)]
        for policy in (DefaultPolicy(), IndependentPolicy(), TunedPolicy())
    )
    saved = [against(found, default, lambda outcome: outcome.energy_j).mean for found in (apart, tuned)]
    assert saved[1] > saved[0] + 0.03
    assert against(tuned, default, lambda outcome: outcome.time_s).mean > -0.03


def test_outcomes_are_compared_seed_by_seed_only() -> None:
    """Different seeds, no seed, one seed: an error, an error, no interval."""
    one = simulate(of(JOB, DrawnSupply(1, KEPT), DefaultPolicy()), 0, 1e5)
    with pytest.raises(InvalidInput, match="different seeds"):
        against([one], [replace(one, seed=1)], lambda outcome: outcome.energy_j)
    with pytest.raises(InvalidInput, match="at least one"):
        spread([])
    assert spread([2.0]).low is None
    assert spread([1.0, 2.0, 3.0]).high == pytest.approx(2 + 4.30 / 3**0.5)


@pytest.mark.parametrize("horizon_s", [0.0, -1.0, inf, float("nan")])
def test_a_horizon_is_a_time(horizon_s: float) -> None:
    """Nothing is simulated for no time or for ever."""
    with pytest.raises(InvalidInput):
        simulate(of(JOB, DrawnSupply(1, KEPT), DefaultPolicy()), 0, horizon_s)


@pytest.fixture
def catalogue(tmp_path: Path) -> str:
    """Return the file of a small catalogue."""
    (tmp_path / "c.toml").write_text(CATALOGUE)
    return str(tmp_path / "c.toml")


def test_the_command_prints_what_it_simulated(catalogue: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Policies, uses, the word simulated, within 80 columns; --json is the same as a document."""
    assert run(["cluster", "simulate", "--catalogue", catalogue, "--nodes", "4"]) == 0
    shown = capfd.readouterr().out
    assert "Simulated" in shown
    assert all(word in shown for word in ("default", "apart", "joint", "tuned", "useful", "redone"))
    assert max(map(len, shown.splitlines())) <= 80
    assert run(["cluster", "simulate", "--catalogue", catalogue, "--nodes", "4", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["kind"] == "simulated"
    assert [each["finished"] for each in document["policies"]["tuned"]["outcomes"]] == [True] * 3


def test_the_command_simulates_each_policy_itself(catalogue: str, capfd: pytest.CaptureFixture[str]) -> None:
    """What stands beside a name is what that policy decides: joules fall from default to joint to tuned."""
    words = ["--nodes", "8", "--spread", "20%", "--json"]
    assert run(["cluster", "simulate", "--catalogue", catalogue, *words]) == 0
    policies = json.loads(capfd.readouterr().out)["policies"]
    assert {name: {one["policy"] for one in each["outcomes"]} for name, each in policies.items()} == {
        name: {name} for name in ("default", "apart", "joint", "tuned")
    }
    joules = {name: sum(one["energy_j"] for one in each["outcomes"]) for name, each in policies.items()}
    assert joules["tuned"] < joules["joint"] < joules["apart"] <= joules["default"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--nodes", "0"], 2, "--nodes is from 1 to"),
        (["--days", "nan"], 2, "--days is from"),
        (["--policies", "best"], 3, "unknown policy"),
        (["--policies", ","], 2, "--policies takes names"),
        (["--machine", "k90"], 3, "unknown machine"),
        (["--spread", "100%"], 2, "--spread"),
        (["--trace", "nothing.csv"], 4, "nothing.csv"),
    ],
)
def test_what_cannot_be_simulated_is_said(
    catalogue: str, words: list[str], code: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line, and the exit code of its class."""
    assert run(["cluster", "simulate", "--catalogue", catalogue, *words]) == code
    told = capfd.readouterr().err
    assert said in told
    assert told.count("\n") == 1


def test_a_notice_that_is_too_short_is_none(catalogue: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The checkpoint takes 4 s: told 30 s before, nothing is redone; told 1 s before, as much as untold."""
    redone = {}
    for notice in ("30", "1", "0"):
        words = ["--nodes", "8", "--policies", "default", "--endless", "--days", "2", "--notice", notice, "--json"]
        assert run(["cluster", "simulate", "--catalogue", catalogue, *words]) == 0
        outcomes = json.loads(capfd.readouterr().out)["policies"]["default"]["outcomes"]
        redone[notice] = sum(each["ledger"]["redone"]["machine_s"] for each in outcomes)
    assert redone["30"] == 0 < redone["1"] == redone["0"]


def test_a_job_without_machines_says_that_nothing_was_done(
    catalogue: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A trace in which machines never live long enough: no division by nothing, and it says which policies failed."""
    (tmp_path / "t.csv").write_text("time_s,n_nodes\n0,1\n20,0\n9000,0\n9001,0\n")
    assert (
        run(["cluster", "simulate", "--catalogue", catalogue, "--trace", "t.csv", "--nodes", "1", "--days", "0.1"]) == 0
    )
    shown = capfd.readouterr().out
    assert "nothing done" in shown
    assert "Not done within 0.1 days" in " ".join(shown.split())


def test_a_trace_is_a_value() -> None:
    """Two readings of the same record are equal."""
    assert Trace("t", (0.0, 5.0), (1, 2), 9.0) == Trace("t", (0.0, 5.0), (1, 2), 9.0)


def test_servers_and_energy_are_paid_beside_the_workers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A server draws and costs as long as the job lasts; energy beside the rent is paid for both."""
    texts = {"bare": CATALOGUE, "served": CATALOGUE + "\n[server]\nusd_per_h = 3.6\npower_w = 100\ncount = 2\n"}
    texts["paid"] = texts["served"].replace("[work]", "[work]\nusd_per_kwh = 0.3")
    found = {}
    for name, text in texts.items():
        path = tmp_path / f"{name}.toml"
        path.write_text(text)
        words = [
            "cluster",
            "simulate",
            "--catalogue",
            str(path),
            "--nodes",
            "2",
            "--seeds",
            "1",
            "--policies",
            "default",
        ]
        assert run([*words, "--json"]) == 0
        (found[name],) = json.loads(capfd.readouterr().out)["policies"]["default"]["outcomes"]
    bare, served, paid = found["bare"], found["served"], found["paid"]
    assert bare["beside"] == {"machine_s": 0, "energy_j": 0, "usd": 0}
    assert served["energy_j"] - bare["energy_j"] == pytest.approx(200 * bare["time_s"])
    assert served["usd"] - bare["usd"] == pytest.approx(2 * 3.6 * bare["time_s"] / 3600)
    assert paid["usd"] - served["usd"] == pytest.approx(0.3 * paid["energy_j"] / 3.6e6)
    assert served["ledger"] == bare["ledger"]
