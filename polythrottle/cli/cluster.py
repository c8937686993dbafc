"""``polythrottle cluster``: training on machines that can be taken away."""

import typer

app = typer.Typer(
    name="cluster",
    help="Predict, plan, train and simulate on machines that can be taken away (spot, preemptible).",
    no_args_is_help=True,
    rich_markup_mode=None,
)
