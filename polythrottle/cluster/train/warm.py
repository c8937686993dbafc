"""Workers that begin at once: forked by a process that has imported torch already (Python's own fork server).

Importing torch takes most of the time from a loss to the next first step. The fork server has imported it, and nothing
else happens in it: no thread runs there, no GPU is touched, so that a fork of it is as good as a fresh interpreter.
"""

import atexit
import json
import multiprocessing
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Mapping
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

METHOD = "forkserver"
_LOADED = ["torch", "torch.distributed", "torch.utils.data", "torch._dynamo", "polythrottle.cluster.train.context"]
"""The first optimiser imports torch._dynamo, which takes as long as torch itself (torch 2.13.0)."""
_KEPT_OFF = {signal.SIGTERM, signal.SIGHUP, signal.SIGINT}


def warm_up() -> None:
    """Start the fork server of this process, which then imports torch beside what goes on here.

    What is sent to a whole group of processes must not end it: its workers stop in order, and need it to be seen. So it
    begins with such signals blocked, and each worker unblocks them.
    """
    multiprocessing.set_forkserver_preload(_LOADED)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost peer is no news, and torch prints its own stack
    resource_tracker.ensure_running()  # the fork server would start it, which unblocks signals (Python 3.11 to 3.14)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _KEPT_OFF)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def own_words(environment: Mapping[str, str]) -> str:
    """Return what a worker has to know of its node's environment as it is now, as one word."""
    return json.dumps({name: value for name, value in environment.items() if name.startswith("POLYTHROTTLE_")})


def have_ended_well(workers: object) -> bool:
    """Return whether all workers have ended with code 0, by ``os._exit`` too: torch then waits for results for ever.

    Args:
        workers: What TorchElastic's agent holds of them.
    """
    started = getattr(getattr(workers, "_pc", None), "processes", ())
    return bool(started) and all(process.exitcode == 0 for process in started)


def train(known: str, script: str, *words: str) -> None:
    """Execute a training script in this process as an interpreter of its own would.

    Args:
        known: What `own_words` returned.
        script: Path of the script.
        words: Its arguments.

    Raises:
        SystemExit: If the script ends with a code other than 0.
    """
    import numpy
    import torch

    for name in _KEPT_OFF:
        signal.signal(name, signal.default_int_handler if name == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _KEPT_OFF)
    os.environ.update(json.loads(known))
    if torch.cuda._is_in_bad_fork():  # something imported has touched a GPU: no fork of that may
        os.execv(sys.executable, [sys.executable, "-u", script, *words])
    multiprocessing.set_start_method(None, force=True)  # it is the script's to choose
    sys.argv, sys.path[0:1] = [script, *words], [str(Path(script).parent)]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    numpy.random.seed()  # the state the script may use would be that of every fork
    _execute(script)


def _execute(script: str) -> None:
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as err:
        if err.code not in (None, 0):
            raise
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()
