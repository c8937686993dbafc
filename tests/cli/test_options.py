import inspect
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from polythrottle.cli.commands import run
from polythrottle.cli.options import OptionGroup, SetupOptions, counts, knob_names, levels, spread
from polythrottle.domain.errors import InvalidInput


@dataclass(frozen=True)
class Sizes(OptionGroup):
    """A group of two."""

    small: Annotated[int, typer.Option("--small")] = 1
    names: Annotated[list[str] | None, typer.Option("--name")] = None


def test_a_group_is_laid_out_as_the_options_of_its_command() -> None:
    """The command gets the group whole, built of what was given and of defaults."""
    got: list[tuple[Any, ...]] = []
    app = typer.Typer()

    @app.command()
    @spread
    def run(first: Annotated[str, typer.Argument()], sizes: Sizes, flag: bool = False) -> None:
        """Run."""
        got.append((first, sizes, flag))

    for words in (["x"], ["x", "--small", "3", "--flag", "--name", "a", "--name", "b"]):
        assert CliRunner().invoke(app, words).exit_code == 0
    assert got == [("x", Sizes(), False), ("x", Sizes(3, ["a", "b"]), True)] or got[0][1].names == []
    assert got[1] == ("x", Sizes(3, ["a", "b"]), True)
    assert list(inspect.signature(run).parameters) == ["first", "small", "names", "flag"]


def test_a_group_knows_whether_anything_was_given() -> None:
    """Defaults and empty lists are nothing."""
    assert not Sizes().given()
    assert not Sizes(names=[]).given()
    assert Sizes(small=2).given()
    assert SetupOptions(device="cpu").given()


def test_lists_are_read_in_the_units_of_engineers() -> None:
    """Knobs and levels come out in SI, counts sorted and once each."""
    assert knob_names("gpu_max_mhz, batch_size") == ("gpu_max_hz", "batch_size")
    assert counts("--batch", "4,1,4") == (1, 4)
    assert levels("gpu_max_mhz=900,mode=fast") == {"gpu_max_hz": 900_000_000, "mode": "fast"}
    assert (knob_names(None), counts("--batch", None), levels(None)) == (None, None, {})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gpu_max_mhz=nan", "'gpu_max_mhz=nan' is not a finite level"),
        ("gpu_max_mhz=inf", "is not a finite level"),
        ("gpu_max_mhz=1e308", "gpu_max_mhz is no number that a clock"),
        ("batch_size=nan", "is not a finite level"),
        ("gpu_max_mhz=fast", "'gpu_max_mhz=fast': 'fast' is not a number"),
        ("batch_size=four", "'four' is not a number"),
        ("queue_delay_us=soon", "'soon' is not a number"),
        ("gpu_max_mhz", "is not a level; write for example"),
    ],
)
def test_a_level_that_is_none_is_said_with_why(text: str, told: str) -> None:
    """Not that its knob is unknown."""
    with pytest.raises(InvalidInput, match=told):
        levels(text)


@pytest.mark.parametrize("text", ["", ",", "a,,b", " "])
def test_a_list_of_knobs_with_a_gap_is_one_clear_error(text: str) -> None:
    """It says what a list looks like."""
    with pytest.raises(InvalidInput, match="--knobs takes names such as"):
        knob_names(text)


def test_no_knob_of_the_device_may_be_searched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With ``--knobs none`` the workload's alone are, nobody is told that the device has none, and nothing is set."""
    words = ["--knobs", "none", "--slo", "mean<=10x", "--trials", "4", "--fresh", "--json"]
    paths = ["--out", str(tmp_path / "p.toml"), "--journal", str(tmp_path / "s.jsonl")]
    assert run(["tune", "-d", "sim:jetson-agx-orin?noise=0", "-w", "resnet50", "--batch", "1,8", *words, *paths]) == 0
    said = capsys.readouterr()
    assert "is searched" not in said.err
    document = json.loads(said.out)
    assert document["best"]["point"] == {"batch_size": 8}


@pytest.mark.parametrize(
    "text", ["gpu_offset=-100MHz", "gpu offset=-0.1GHz", "gpu_offset_mhz=-100", "gpu_offset_hz=-1e8"]
)
def test_a_level_below_zero_may_have_its_unit(text: str) -> None:
    """What is added to a clock, with or without megahertz behind it."""
    assert levels(text) == {"gpu_offset_hz": -100_000_000}
