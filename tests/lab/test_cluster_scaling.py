"""What servers take, learned from curves."""

from pathlib import Path

import pytest

from polythrottle.cluster.predict.completion import asynchronous
from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.fleet.transient_machine import Network
from polythrottle.lab.reproduce.cluster_tables import speed_rows
from polythrottle.lab.reproduce.server_scaling import (
    PRIOR,
    ServerCost,
    ServerDemand,
    curve_error,
    curves,
    fit_cost,
    fit_network,
    predicted,
)
from polythrottle.lab.reproduce.transient_clusters import scaling

NETWORKS = {"a": Network("a", 1e9, 50, 7e5), "b": Network("b", 1e10, 200, 2e7)}
TRUE = ServerCost(2e-4, 4e-9)


def measured(cost: ServerCost = TRUE) -> dict[tuple[str, int, str], dict[int, float]]:
    """Return curves that follow a cost."""
    return {
        ("GPU", servers, name): {
            n: asynchronous([0.05] * n, cost.service(network).time_s(servers)) for n in (1, 2, 4, 6, 8)
        }
        for name, network in NETWORKS.items()
        for servers in (1, 2)
    }


def test_another_server_helps_only_what_servers_share() -> None:
    """Handling is shared, moving bytes is not."""
    assert ServerDemand(0.02, 0.0).time_s(2) == pytest.approx(0.01)
    assert ServerDemand(0.0, 0.02).time_s(2) == pytest.approx(0.02)
    with pytest.raises(InvalidInput, match="at least one"):
        ServerDemand(0.02).time_s(0)
    with pytest.raises(InvalidInput):
        ServerDemand(-1.0)


def test_a_cost_is_found_again() -> None:
    """From curves that follow it; curves not fitted to are then predicted."""
    found = fit_cost(measured(), NETWORKS)
    assert found.tensor_s == pytest.approx(TRUE.tensor_s, rel=0.25)
    for curve, speeds in measured().items():
        assert curve_error(found, curve, speeds, NETWORKS) < 0.05


def test_where_curves_say_nothing_the_prior_holds() -> None:
    """A cluster that never fills its server leaves the cost as it was taken for."""
    slow = {("GPU", 1, "a"): {n: n / 10.0 for n in (1, 2, 3)}}
    found = fit_cost(slow, NETWORKS)
    assert found.parameter_s == pytest.approx(PRIOR.parameter_s, rel=0.2)


def test_a_curve_needs_its_single_worker_and_a_known_network() -> None:
    """Else there is nothing to start from."""
    with pytest.raises(InvalidInput, match="single worker"):
        predicted(TRUE, ("GPU", 1, "a"), {2: 20.0}, NETWORKS)
    with pytest.raises(InvalidInput, match="nothing is known of network c"):
        predicted(TRUE, ("GPU", 1, "c"), {1: 20.0}, NETWORKS)


def test_a_network_is_fitted_to_its_own_points() -> None:
    """Half of the points of all its curves predict the other half."""
    mine = {curve: speeds for curve, speeds in measured().items() if curve[2] == "b"}
    fit = fit_network({curve: {n: speeds[n] for n in (1, 4, 8)} for curve, speeds in mine.items()})
    for (gpu, servers, _), speeds in mine.items():
        assert fit.speed([gpu] * 6, servers) == pytest.approx(speeds[6], rel=0.02)
    with pytest.raises(InvalidInput, match="its own curves"):
        fit_network(measured())


@pytest.mark.slow
def test_recorded_curves_are_within_the_bar(transient: Path) -> None:
    """Half of the points of each curve, whichever, give the other half within 6 % on average; so do half the curves."""
    found = scaling(curves(speed_rows(transient / "training_speed_by_cluster_size_cmdare.csv")))
    assert max(found["points"].values()) <= 0.06
    assert found["whole_curves"] <= 0.06
