"""``polythrottle cluster``: training on machines that can be taken away."""

import typer

from polythrottle.cli.cluster_fleet import fleet
from polythrottle.cli.cluster_plan import plan
from polythrottle.cli.cluster_predict import predict
from polythrottle.cli.cluster_simulate import simulate
from polythrottle.cli.cluster_train import status, train

app = typer.Typer(
    name="cluster",
    help="Predict, plan, train and simulate on machines that can be taken away (spot, preemptible).",
    no_args_is_help=True,
    rich_markup_mode=None,
)

app.command()(plan)
app.command()(predict)
app.command()(train)
app.command()(status)
app.command()(simulate)
app.command()(fleet)
