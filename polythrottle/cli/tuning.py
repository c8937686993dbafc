"""`polythrottle tune`: begin a study, or continue one."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polythrottle.cli.answers import answer, complain, own_stdout, say_which
from polythrottle.cli.options import BudgetOptions, JsonOption, SetupOptions, StudyOptions, spread
from polythrottle.errors import InvalidInput, SloUnmet, StorageError

if TYPE_CHECKING:
    from polythrottle.outcome import Tuning


@spread
def tune(
    setup: SetupOptions,
    study: StudyOptions,
    budget: BudgetOptions,
    resume: Annotated[Path | None, typer.Option("--resume", metavar="FILE", help="Continue a journal alone.")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Where the profile goes.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a profile that is better than the answer.")] = False,
    sure: Annotated[
        bool, typer.Option("--yes", "-y", help="Ask nothing: take a limit that looks as if its unit were wrong.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Find the operating point of least energy, or best by another objective, that holds the SLO.

    An unfinished study of the same problem is continued. Exit code 5 means that no tried point holds the SLO.
    """
    from polythrottle.cli.documents import tune_document
    from polythrottle.cli.texts import print_tuning

    if resume is not None and (setup.given() or study.given()):
        raise InvalidInput(
            "--resume takes everything from the journal; beside it only --trials, --minutes, --joules, --horizon, "
            "--no-early-stop, --out, --force and --json count"
        )
    for name in study.as_prior or ():
        say_which(name)
    tuning = (
        _begun(setup, study, budget, out, force, sure) if resume is None else _continued(resume, budget, out, force)
    )
    answer(tuning, as_json, print_tuning, tune_document)
    for problem in tuning.unwritten:
        again = shlex.join(["polythrottle", "tune", "--resume", str(tuning.journal_path), "--out", "FILE"])
        complain(f"{problem}; nothing is lost: {again} writes it elsewhere")
    if tuning.unmet:
        raise typer.Exit(complain(tuning.unmet, SloUnmet.exit_code))
    if tuning.unwritten:
        raise typer.Exit(StorageError.exit_code)


def _begun(
    setup: SetupOptions, study: StudyOptions, budget: BudgetOptions, out: Path | None, force: bool, sure: bool
) -> "Tuning":
    from polythrottle import api
    from polythrottle.cli.live import LiveStudy

    with LiveStudy(sure) as live, own_stdout():
        return api.tune(
            setup=setup.setup(),
            trials=30 if budget.trials is None else budget.trials,
            minutes=budget.minutes,
            joules=budget.joules,
            horizon=budget.horizon,
            early_stop=budget.early_stop is not False,
            out=out,
            force=force,
            watcher=live,
            **study.words(),
        )


def _continued(journal: Path, budget: BudgetOptions, out: Path | None, force: bool) -> "Tuning":
    from polythrottle import api
    from polythrottle.cli.live import LiveStudy

    with LiveStudy() as live, own_stdout():
        return api.resume(journal, out=out, force=force, watcher=live, **vars(budget))
