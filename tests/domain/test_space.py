import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polythrottle.domain.errors import InvalidInput, UnknownName
from polythrottle.domain.space import Knob, OperatingPoint, SearchSpace

CLOCKS = Knob("gpu_max_hz", (300, 600, 900))
FLOORS = Knob("gpu_min_hz", (300, 600, 900))
BATCH = Knob("batch_size", (1, 2, 4))


def pairs() -> SearchSpace:
    """Return the clock pairs whose floor is not above their ceiling."""
    return SearchSpace.grid(
        (FLOORS, CLOCKS),
        {"gpu_min_hz": 300, "gpu_max_hz": 900},
        lambda p: float(p["gpu_min_hz"]) <= float(p["gpu_max_hz"]),
    )


def batches() -> SearchSpace:
    """Return a space of batch sizes."""
    return SearchSpace.grid((BATCH,), {"batch_size": 1})


def test_a_grid_keeps_only_what_may_be_applied() -> None:
    """Three levels give six pairs with the floor not above the ceiling."""
    assert len(pairs()) == 6
    assert all(p["gpu_min_hz"] <= p["gpu_max_hz"] for p in pairs())


def test_spaces_multiply() -> None:
    """A product holds every combination, and the defaults of both."""
    space = pairs() * batches()
    assert len(space) == 18
    assert space.names == ("gpu_min_hz", "gpu_max_hz", "batch_size")
    assert space.default == OperatingPoint({"gpu_min_hz": 300, "gpu_max_hz": 900, "batch_size": 1})


def test_the_unit_space_is_neutral() -> None:
    """What has nothing to set changes no product."""
    assert (SearchSpace.unit() * batches()).fingerprint == batches().fingerprint
    assert (batches() * SearchSpace.unit()).fingerprint == batches().fingerprint
    assert len(SearchSpace.unit()) == 1


def test_two_owners_of_a_knob_are_refused() -> None:
    """Each knob has one owner."""
    with pytest.raises(InvalidInput, match="two owners"):
        batches() * batches()


@pytest.mark.parametrize("levels", [(), (1, 1), (1, "a"), (1.0, float("nan")), (float("inf"),)])
def test_a_knob_refuses_bad_levels(levels: tuple[int | float | str, ...]) -> None:
    """No level, a repeated one, mixed kinds and numbers that are not finite are refused."""
    with pytest.raises(InvalidInput):
        Knob("x", levels)


def test_a_default_outside_is_refused() -> None:
    """The default is always a point of the space."""
    with pytest.raises(InvalidInput, match="default"):
        SearchSpace.grid((BATCH,), {"batch_size": 3})


def test_a_repeated_point_is_refused() -> None:
    """A space is a set."""
    with pytest.raises(InvalidInput, match="twice"):
        SearchSpace.of_points([{"a": 1}, {"a": 1}], {"a": 1})


def test_points_are_values() -> None:
    """Order of naming does not matter, content does."""
    assert OperatingPoint({"a": 1, "b": 2}) == OperatingPoint({"b": 2, "a": 1})
    assert hash(OperatingPoint({"a": 1, "b": 2})) == hash(OperatingPoint({"b": 2, "a": 1}))
    assert OperatingPoint({"a": 1}) != OperatingPoint({"a": 2})


def test_holding_a_knob_leaves_its_default_level() -> None:
    """Knobs that are not searched stay where the device has them."""
    held = (pairs() * batches()).holding(["gpu_min_hz", "batch_size"])
    assert {p["gpu_max_hz"] for p in held} == {300, 600, 900}
    assert {p["gpu_min_hz"] for p in held} == {300}


def test_an_unknown_knob_names_the_nearest() -> None:
    """A typing error is answered with what was meant, and any spelling is the knob's."""
    with pytest.raises(UnknownName, match="'gpu_mx_mhz'; did you mean gpu_max_mhz"):
        pairs().knob("gpu_mx_hz")
    assert pairs().knob("gpu_max_mhz") == pairs().knob("gpu max") == pairs().knob("gpu_max_hz")


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("abc"), st.floats(0, 9)), min_size=1, unique=True))
def test_every_point_is_found_again(rows: list[tuple[int, str, float]]) -> None:
    """Index and item are inverse, whatever the points."""
    points = [{"x": x, "y": y, "z": z} for x, y, z in rows]
    space = SearchSpace.of_points(points, points[0])
    assert [space.index(space[i]) for i in range(len(space))] == list(range(len(space)))
    assert set(space) == {OperatingPoint(p) for p in points}


def test_fingerprints_tell_spaces_apart() -> None:
    """Another default, level or point is another space."""
    other = SearchSpace.grid((BATCH,), {"batch_size": 2})
    assert batches().fingerprint == batches().fingerprint != other.fingerprint


def test_a_column_holds_each_points_level() -> None:
    """Levels come back as numbers, one per point."""
    assert np.array_equal(batches().column("batch_size"), [1.0, 2.0, 4.0])
