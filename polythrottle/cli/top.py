"""`polythrottle top`: a daemon on the terminal, or once as text where there is none."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polythrottle.cli.answers import answer
from polythrottle.cli.options import JsonOption
from polythrottle.errors import BadFile

if TYPE_CHECKING:
    from polythrottle.client import Client
    from polythrottle.daemon.status import Status


def top(
    socket: Annotated[
        Path | None, typer.Option("--socket", metavar="PATH", help="Of the daemon; this machine's by default.")
    ] = None,
    url: Annotated[
        str | None, typer.Option("--url", metavar="URL", help="Of a daemon on TCP, such as http://127.0.0.1:9280.")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", metavar="FILE", help="Holds the token a daemon on TCP asks for.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Watch the daemon: power, p99, load, clocks, savings, events; keys start a study or give the board back.

    Without a terminal, and with --json, its present status is printed once.
    """
    with _client(socket, url, token_file) as client:
        status = client.status()
        if not as_json and sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
            from polythrottle.cli.topscreen import TopScreen

            TopScreen(client, status).run()
        else:
            answer(status, as_json, _print, _document)


def _client(socket: Path | None, url: str | None, token_file: Path | None) -> "Client":
    from polythrottle.client import Client

    return Client(socket, url, None if token_file is None else _token(token_file))


def _token(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadFile(
            f"no token can be read from {path}: {getattr(error, 'strerror', None) or 'it is not text'}"
        ) from error


def _document(status: "Status") -> dict[str, Any]:
    return status.document


def _print(status: "Status") -> None:
    from rich.console import Console
    from rich.text import Text

    from polythrottle.cli.texts import named_lines
    from polythrottle.cli.topview import clock_time, status_lines
    from polythrottle.printable import printable

    console = Console(highlight=False, markup=False)
    title = printable(status.title or status.device or "no device")
    console.print(Text.assemble((title, "bold"), f", at {clock_time(status.at)}" if status.at else ""))
    console.print(named_lines(status_lines(status)))
