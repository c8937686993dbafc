"""`polythrottle demo` and `polythrottle examples`: what can be tried without a board, from an installed package too."""

import os
from pathlib import Path
from typing import Annotated

import typer

from polythrottle.cli.answers import answer, complain, own_stdout
from polythrottle.cli.options import JsonOption
from polythrottle.errors import SloUnmet, StorageError

_DEVICE, _WORKLOAD, _SLO = "sim:jetson-agx-orin", "efficientnet-b4", "p99<=1.2x"


def demo(
    folder: Annotated[
        Path, typer.Option("--folder", metavar="FOLDER", help="Where profile, journal and report go.")
    ] = Path("demo"),
    as_json: JsonOption = False,
) -> None:
    """Tune EfficientNet-B4 on a simulated Jetson AGX Orin, in seconds."""
    from polythrottle import api
    from polythrottle.cli.documents import tune_document
    from polythrottle.cli.live import LiveStudy
    from polythrottle.cli.texts import print_tuning

    os.environ["POLYTHROTTLE_STATE_DIR"] = str(folder)
    with LiveStudy() as live, own_stdout():
        tuning = api.tune(_DEVICE, _WORKLOAD, _SLO, out=folder / "profile.toml", watcher=live)
    answer(tuning, as_json, print_tuning, tune_document)
    for problem in tuning.unwritten:
        complain(problem)
    if tuning.unmet:
        raise typer.Exit(complain(tuning.unmet, SloUnmet.exit_code))
    if tuning.unwritten:
        raise typer.Exit(StorageError.exit_code)


def lay_examples(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Where they go.", show_default=False)] = Path(
        "examples"
    ),
    as_json: JsonOption = False,
) -> None:
    """Write the examples that come with polythrottle into ./examples, or into FOLDER; a file that is there stays."""
    written: list[str] = []
    kept: list[str] = []
    for source in sorted(path for path in _shipped().iterdir() if path.is_file()):
        target = folder / source.name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as file:
                file.write(source.read_bytes())
            written.append(str(target))
        except FileExistsError:
            if not folder.is_dir():
                raise StorageError(f"{folder} is no folder") from None
            kept.append(str(target))
        except OSError as err:
            raise StorageError(f"{target} cannot be written: {err.strerror}") from err
    answer({"written": written, "kept": kept}, as_json, _print_examples)


def _print_examples(found: dict[str, list[str]]) -> None:
    for path in found["written"]:
        typer.echo(path)
    if found["kept"]:
        typer.echo(f"{len(found['kept'])} that were there are left as they are")


def _shipped() -> Path:
    """Return the folder of the examples: in an installed package, or beside it in a checkout.

    Raises:
        StorageError: If this installation has none.
    """
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "shipped" / "examples", package.parent / "examples"):
        if folder.is_dir():
            return folder
    raise StorageError("this installation lacks the examples; take them from the source of this version")
