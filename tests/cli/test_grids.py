"""Figures in tables of 80 columns."""

import pytest
from rich.console import Console

from polythrottle.cli.output import amount, end, grid, several


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (0.5, "0.5"),
        (1234.5, "1,234"),
        (3_908_123, "3,908,123"),
        (390_812_345, "3.908e+08"),
        (1.23456e-5, "1.23e-05"),
        (-45678, "-45,678"),
    ],
)
def test_a_figure_fits_nine_columns(value: float, shown: str) -> None:
    """Four digits, without an exponent where there is room."""
    assert amount(value) == shown
    assert len(shown) <= 9


def test_one_is_singular() -> None:
    """A noun agrees with its count."""
    assert [several(count, "seed") for count in (0, 1, 1200)] == ["0 seeds", "1 seed", "1,200 seeds"]


def test_a_note_never_begins_a_line_with_a_percent_sign(capsys: pytest.CaptureFixture[str]) -> None:
    """A number and its sign stay together, within 79 columns."""
    table = grid("Title", ("name", "value"), 1)
    table.add_row("a", "1")
    end(Console(width=80), table, "x" * 75 + " 12 % of it")
    out = capsys.readouterr().out
    assert "12 % of it" in out
    assert max(map(len, out.splitlines())) <= 80
