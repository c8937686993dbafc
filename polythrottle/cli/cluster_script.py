"""What ``cluster train`` can tell before anything starts: whether the script compiles, and whether its nodes fit."""

import warnings
from pathlib import Path

from polythrottle.cli.answers import complain
from polythrottle.errors import BadFile, InvalidInput

NODE_BYTES, WORKER_BYTES = 450 * 10**6, 100 * 10**6
"""Of an agent and its fork server, both of which have imported torch, and of a worker that does nothing yet (measured
with torch 2.13.0 on x86-64, rounded down)."""


def check_script(script: Path | None, elsewhere: bool = False) -> Path:
    """Return the script if there is one that Python can compile; it is not executed.

    Args:
        script: As on the command line.
        elsewhere: Whether another Python executes it, so that what this one says of it is a warning.

    Raises:
        InvalidInput: If there is none.
        BadFile: If it cannot be read or compiled.
    """
    if script is None:
        raise InvalidInput("give a training script, such as examples/elastic_training.py")
    if not script.is_file():
        raise InvalidInput(f"there is no script {script}{': it is a folder' if script.is_dir() else ''}")
    if script.suffix == ".py":
        mistake = _mistake(script)
        if mistake and not elsewhere:
            raise BadFile(mistake)
        if mistake:
            complain(f"{mistake} by this Python; where it is to run there may be another")
    return script


def _mistake(script: Path) -> str:
    """Return why a script cannot be compiled, empty if it can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they come when it runs
            compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    except OSError as err:
        return f"the script {script} cannot be read: {err.strerror or err}"
    except SyntaxError as err:
        where = f"{script}, line {err.lineno}" if err.lineno else str(script)
        return f"the script cannot be compiled: {where}: {err.msg}"
    except (ValueError, RecursionError, MemoryError) as err:
        return f"the script {script} cannot be compiled: {err or type(err).__name__}"
    return ""


def check_room(nodes: int, workers: int) -> None:
    """Refuse more nodes than this machine's memory can hold.

    Args:
        nodes: On this machine.
        workers: Of each.

    Raises:
        InvalidInput: If they cannot fit.
    """
    import psutil

    total, each = psutil.virtual_memory().total, NODE_BYTES + workers * WORKER_BYTES
    if nodes * each > total:
        raise InvalidInput(
            f"{nodes} nodes on this machine need {nodes * each / 1e9:,.1f} GB before they train, and it has "
            f"{total / 1e9:,.1f} GB: at most {total // each} fit; use other machines with --serve and --join"
        )
