import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polythrottle.domain.errors import InvalidInput
from polythrottle.domain.units import (
    knob_name,
    meant,
    no_level,
    parse_quantity,
    show,
    show_count,
    show_level,
    show_name,
    to_file,
    to_si,
)


@pytest.mark.parametrize(
    ("count", "shown"), [(0.95, "0.95"), (31.163, "31.16"), (1234.0, "1,234"), (11968.84, "11,969"), (12000, "12,000")]
)
def test_a_count_has_no_exponent(count: float, shown: str) -> None:
    """Parts of one are told of few, whole ones of many."""
    assert show_count(count) == shown


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [("25ms", "s", 0.025), ("0.5 s", "s", 0.5), ("300us", "s", 3e-4), ("1e3mW", "w", 1.0), ("80C", "c", 80.0),
     ("30/s", "per_s", 30.0), ("120/min", "per_s", 2.0), (".5h", "s", 1800.0)],
)  # fmt: skip
def test_a_quantity_is_read_in_si(text: str, unit: str, value: float) -> None:
    """Number and unit, with or without a space."""
    assert parse_quantity(text, unit) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "25", "ms", "25 apples", "25W", "1e999s", "--5ms", "nan s", "2 5ms"])
def test_a_bad_quantity_says_what_would_be_right(text: str) -> None:
    """The message lists the units."""
    with pytest.raises(InvalidInput, match=r"ms|finite"):
        parse_quantity(text, "s")


@pytest.mark.parametrize(
    ("name", "level", "levels", "instead", "words"),
    [
        (
            "gpu_max_hz",
            1_000_000,
            (76_800_000, 153_600_000),
            "",
            "gpu_max_mhz has no level 1 MHz; it has 76.8 MHz, 153.6 MHz",
        ),
        ("batch_size", 0, range(1, 17), "", "batch_size has no level 0; its 16 levels go from 1 to 16"),
        ("gpu_max_hz", "fast", (1,), "its levels are numbers", "gpu_max_mhz has no level fast; its levels are numbers"),
        ("power_limit_w", math.nan, (100,), "", "power_limit_w has no level nan; it has 100 W"),
        ("threads", 10**400, (1, 2), "", f"threads has no level 1{'0' * 39}; it has 1, 2"),
    ],
)
def test_a_level_a_knob_does_not_have_is_told_in_one_way(
    name: str, level: float | str, levels: Sequence[float | str], instead: str, words: str
) -> None:
    """Name, level and what there is are written as people write them, whatever was asked for."""
    assert no_level(name, level, levels, instead) == words


def test_file_keys_are_in_megahertz() -> None:
    """Files carry the unit engineers use, levels stay whole hertz."""
    assert to_si("gpu_max_mhz", 1300.5) == ("gpu_max_hz", 1_300_500_000)
    assert to_file("gpu_max_hz", 1_300_500_000) == ("gpu_max_mhz", 1300.5)
    assert to_si("batch_size", 4) == ("batch_size", 4)


@given(st.integers(1, 5_000_000).map(lambda khz: khz * 1000))
def test_a_clock_survives_its_file(hertz: int) -> None:
    """Writing and reading a clock is exact to the kilohertz."""
    assert to_si(*to_file("gpu_max_hz", hertz)) == ("gpu_max_hz", hertz)


def test_a_delay_is_in_microseconds_outside() -> None:
    """And in seconds inside; a level survives its file."""
    assert to_si("queue_delay_us", 500) == ("queue_delay_s", 0.0005)
    assert to_file("queue_delay_s", 0.0005) == ("queue_delay_us", 500)
    assert show_level("queue_delay_s", 0.0005) == "500 µs"
    assert show_name("queue_delay_s") == "queue_delay_us"
    assert all(to_si(*to_file("queue_delay_s", us / 1e6)) == ("queue_delay_s", us / 1e6) for us in range(2000))


@pytest.mark.parametrize("text", ["gpu_max_mhz", "gpu_max_hz", "gpu max", "GPU-Max", "gpu_max_ghz", " gpu_max "])
def test_a_knob_has_one_name_however_it_is_spelled(text: str) -> None:
    """What is no clock, limit or delay of a board keeps its name."""
    assert knob_name(text) == "gpu_max_hz"
    assert {knob_name(each) for each in ("gpu_offset", "gpu offset", "GPU-offset", "gpu_offset_mhz")} == {
        "gpu_offset_hz"
    }
    assert [knob_name(each) for each in ("mem", "power limit", "queue delay", "batch size", "Custom")] == [
        *("mem_hz", "power_limit_w", "queue_delay_s", "batch_size", "Custom")
    ]
    assert show_name("gpu_max_hz") == "gpu_max_mhz"


def test_values_are_shown_with_a_fitting_prefix() -> None:
    """Unknown is a dash, never a zero."""
    assert show(0.0253, "s") == "25.3 ms"
    assert show(None, "W") == "–"
    assert show(1500.0, "J") == "1.5 kJ"
    assert show_level("gpu_max_hz", 1_300_500_000) == "1300.5 MHz"


@given(st.floats(1e-8, 1e8))
def test_a_shown_value_reads_back(value: float) -> None:
    """What people see is the value to four figures."""
    number, unit = show(value, "J").split()
    factor = {"kJ": 1e3, "J": 1.0, "mJ": 1e-3, "µJ": 1e-6, "nJ": 1e-9}[unit]
    assert math.isclose(float(number) * factor, value, rel_tol=1e-3)


@pytest.mark.parametrize("value", [1e305, math.inf, -math.inf, math.nan, 10**400])
def test_a_number_that_no_clock_could_have_is_refused(value: float) -> None:
    """In one line, also where it would become infinite only as hertz."""
    with pytest.raises(InvalidInput, match="gpu_max_mhz is no number that a clock"):
        to_si("gpu_max_mhz", value)


ORIN = ("MAXN", "MODE_15W", "MODE_30W", "MODE_50W")
XAVIER = ("MAXN", "10W", "30W_ALL", "30W_2CORE")


@pytest.mark.parametrize(
    ("text", "names", "name"),
    [
        # AGX Orin's nvpmodel.conf has MODE_50W, of which people and the catalogue say 50W; jtop shows MODE 50W.
        *((text, ORIN, "MODE_50W") for text in ("50W", "50w", "MODE_50W", "mode 50w", "Mode-50W", "50 W")),
        *((text, ("15W", "50W"), "50W") for text in ("MODE_50W", "50w")),
        ("30w all", XAVIER, "30W_ALL"),
        ("maxn super", ("15W", "MAXN_SUPER"), "MAXN_SUPER"),
        ("maxn", ("15W", "MAXN_SUPER"), "MAXN_SUPER"),
        ("maxn", ("MAXN", "MAXN_SUPER"), "MAXN"),
        ("15W", ("15W", "MODE_15W"), "15W"),
        *((text, XAVIER, None) for text in ("30W", "3", "W", "", "mode", "_", "MAX", "51W")),
        ("mode 15w", ("15W", "MODE_15W"), None),
    ],
)
def test_a_mode_may_be_spelled_in_any_way_that_means_one(text: str, names: tuple[str, ...], name: str | None) -> None:
    """Its exact name goes before all; what could mean two is no name."""
    assert meant(text, names, begun=True) == name


def test_the_beginning_of_a_name_is_enough_only_where_that_is_said() -> None:
    """A level of a knob is never taken for another, longer one."""
    assert meant("fp16", ("fp16_sparse", "fp32")) is None
    assert meant("FP16 sparse", ("fp16_sparse", "fp32")) == "fp16_sparse"
