"""``polythrottle cluster``: training on machines that can be taken away."""

import typer

from polythrottle.cli.cluster_fleet import fleet
from polythrottle.cli.cluster_plan import plan
from polythrottle.cli.cluster_predict import predict
from polythrottle.cli.cluster_simulate import simulate
from polythrottle.cli.cluster_train import status, train
from polythrottle.cli.help_pages import CommandGroup, examples

app = typer.Typer(
    name="cluster",
    help="Predict, plan, train and simulate on machines that can be taken away (spot, preemptible).",
    cls=CommandGroup,
    rich_markup_mode=None,
)

app.command(
    short_help="Choose machines, market, power cap and checkpoints.",
    epilog=examples("polythrottle cluster plan examples/cluster-gcp-2019.toml --deadline 12h"),
)(plan)
app.command(
    short_help="Predict step times of networks never measured.",
    epilog=examples("polythrottle cluster predict --table examples/cpu-training-steps.csv"),
)(predict)
app.command(
    short_help="Train a script on nodes that come and go.",
    epilog=examples("polythrottle cluster train examples/elastic_training.py --nodes 2"),
)(train)
app.command(short_help="Show where a training job stands.", epilog=examples("polythrottle cluster status"))(status)
app.command(
    short_help="Simulate a job on machines that are taken away.",
    epilog=examples("polythrottle cluster simulate --seeds 1 \\\n  --catalogue examples/cluster-gcp-2019.toml"),
)(simulate)
app.command(
    short_help="Show what the nodes of a fleet have learnt.",
    epilog=examples(
        "polythrottle sweep -d sim:a100 -w resnet50 --knobs power_limit_w \\\n  --batch 32 --out caps.csv",
        "polythrottle cluster fleet --store fleet --learn caps.csv \\\n  --node a --gpu A100 --network resnet50",
    ),
)(fleet)
