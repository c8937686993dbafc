"""`polythrottle doctor`: what works here, what does not and why, who else steers the clocks."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polythrottle.cli.answers import answer
from polythrottle.cli.options import JsonOption

if TYPE_CHECKING:
    from polythrottle.diagnosis import Examination
    from polythrottle.findings import Finding

_MARKS = {True: ("ok", "green"), False: ("no", "bold red"), None: ("?", "yellow")}


def doctor(
    device: Annotated[
        str | None, typer.Option("--device", "-d", metavar="URI", help="One device; every real one by default.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what works here and what does not, why, and who else steers the clocks; writes and runs nothing."""
    from polythrottle.diagnosis import examine

    answer(examine(device), as_json, _print, _document)


def _document(found: "Examination") -> dict[str, Any]:
    return {**asdict(found), "faults": len(found.faults)}


def _print(found: "Examination") -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    for one in found.devices:
        console.print(Text.assemble((one.uri, "bold"), "  ", one.title), soft_wrap=True)
        _table(console, one.findings)
    parts = {"machine": found.machine, "other programs": found.others, "records": found.records}
    for heading, findings in parts.items():
        if findings:
            console.print(Text(heading, "bold"))
            _table(console, findings)
    count = len(found.faults)
    console.print(f"{count} thing{'s do' if count != 1 else ' does'} not work" if count else "nothing is wrong here")


def _table(console: Any, findings: "Sequence[Finding]") -> None:
    from rich.table import Table
    from rich.text import Text

    from polythrottle.units import show_name

    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, width=2)
    grid.add_column(style="dim", overflow="fold", max_width=20)
    grid.add_column(overflow="fold")
    for each in findings:
        mark, style = _MARKS[each.works]
        grid.add_row(Text(mark, style), show_name(each.subject), each.explanation)
        if each.remedy:
            grid.add_row("", "", Text(f"→ {each.remedy}", "italic"))
    from polythrottle.cli.unpadded import Unpadded

    console.print(Unpadded(grid))
