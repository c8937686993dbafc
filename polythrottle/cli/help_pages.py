"""Help pages: commands in groups, an example under each, and what a bare group of commands prints."""

from typing import Any

import typer
from typer.core import TyperGroup

BEGIN = "Begin here"
TUNE = "Tune and measure"
USE = "Use the answer, and undo it"
RESULTS = "Look at results"
KEEP = "Keep it tuned"
BOARDS = "Boards and models"
RESEARCH = "Research"


class CommandGroup(TyperGroup):
    """Commands under the headings they were registered with; without a command it prints its help.

    A heading is typer's ``rich_help_panel``, which typer itself shows only where it may load rich.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Return the words left for a command; where there are none, print the help and end with exit code 0."""
        if not args and not self.invoke_without_command and not ctx.resilient_parsing:
            typer.echo(ctx.get_help())
            raise typer.Exit
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, a section per heading."""
        shown = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        sections: dict[str, list[tuple[str, Any]]] = {}
        for name, command in shown:
            if command is not None and not command.hidden:
                sections.setdefault(_heading(command), []).append((name, command))
        widest = max((len(name) for name, _ in shown), default=0)
        for heading, commands in sections.items():
            with formatter.section(heading):
                rows = [(name.ljust(widest), _summary(each, formatter.width - 6 - widest)) for name, each in commands]
                formatter.write_dl(rows)


def examples(*commands: str) -> str:
    r"""Return the end of a help page: commands that can be copied; a line that goes on ends in a backslash.

    Args:
        commands: Each at most 76 columns wide.
    """
    lines = "\n".join(f"  {line}" for command in commands for line in command.splitlines())
    return f"\b\nExample{'s' * (len(commands) > 1)}:\n{lines}"


def _heading(command: Any) -> str:
    heading = command.rich_help_panel
    return heading if isinstance(heading, str) else "Commands"


def _summary(command: Any, width: int) -> str:
    """Return what a command says of itself in a list: its first clause, or as much of it as fits one line."""
    text = command.short_help or (command.help or "").partition("\n\n")[0].partition(";")[0]
    line = " ".join(text.split()).rstrip(".")
    return line if len(line) <= width else str(command.get_short_help_str(width))
