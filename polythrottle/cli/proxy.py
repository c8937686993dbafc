"""`polythrottle proxy`: bounds the requests in flight at a server of language models."""

import signal
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polythrottle.cli.options import JsonOption
from polythrottle.cli.output import answer, complain, several
from polythrottle.domain.errors import INTERRUPTED, InvalidInput

if TYPE_CHECKING:
    from polythrottle.proxy.in_flight_limiter import Proxy

_MOST_WAITING = 1_000_000
_LONGEST_S = 86_400.0


def proxy(
    server: Annotated[str, typer.Argument(metavar="SERVER", help="The server: http://host:port.", show_default=False)],
    limit: Annotated[
        int, typer.Option("--in-flight", metavar="N", help="So many requests may be under way at once; 0: any.")
    ] = 16,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where it listens; port 0 is any free one.")
    ] = "127.0.0.1:8001",
    most_waiting: Annotated[
        int, typer.Option("--queue", metavar="N", help="So many more may stand in line; others get status 429.")
    ] = 1024,
    grace_s: Annotated[
        float, typer.Option("--grace", metavar="SECONDS", help="How long answers may go on after Ctrl-C.")
    ] = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Stand in front of an OpenAI-compatible server and bound the requests in flight, until Ctrl-C.

    Answers are streamed byte for byte. The limit can be changed while it runs: by tune with the workload
    openai://HOST:PORT/model?in_flight=4,8,16, or by PUT /polythrottle/in_flight. Its metrics are at
    /polythrottle/metrics.
    """
    from polythrottle.proxy.in_flight_limiter import ProxyOptions, run_proxy

    if not 0 <= most_waiting <= _MOST_WAITING:
        raise InvalidInput(f"--queue {most_waiting} is no number from 0 to {_MOST_WAITING:,}")
    if not 0 <= grace_s <= _LONGEST_S:
        raise InvalidInput(f"--grace {grace_s:g} is no number of seconds from 0 to {_LONGEST_S:,.0f}")
    options = ProxyOptions(server, listen, limit, most_waiting, grace_s)

    def told(opened: "Proxy") -> None:
        complain(f"http://{opened.where} passes on to {server}, with at most {limit} requests in flight")

    ended, number = run_proxy(options, told, _complained)
    answer(ended.figures.totals(), as_json, _print_totals)
    sys.stdout.flush()
    # SIGTERM is how a service manager ends it in order.
    if number == signal.SIGINT:
        raise typer.Exit(INTERRUPTED)


def _print_totals(found: dict[str, Any]) -> None:
    lost = {name: found[name] for name in ("failed", "refused", "unreachable", "cut", "left") if found[name]}
    typer.echo(f"answered  {several(found['answered'], 'request')}")
    for name, count in lost.items():
        typer.echo(f"{name:<8}  {several(count, 'request')}")
    typer.echo(f"tokens    {found['prompt_tokens']:,} in, {found['generation_tokens']:,} out")


def _complained(fault: str) -> None:
    complain(fault)
