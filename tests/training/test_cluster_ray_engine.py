import subprocess
import sys
import time
from pathlib import Path

import psutil

from polythrottle.training.elastic.engines import LaunchPlan
from polythrottle.training.elastic.ray_engine import RayEngine

DRIVER = """
import signal, subprocess, sys

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print(subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]).pid, flush=True)
signal.sigwait({signal.SIGTERM})
with open("ended", "w") as file:
    file.write("by itself")
"""


def test_ray_s_driver_may_end_by_itself_and_what_it_started_is_killed(tmp_path: Path) -> None:
    """It shuts Ray down when it is asked to; its children have nothing to keep. No controller need be there to ask."""
    words = [sys.executable, "-c", DRIVER]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True) as driver:
        assert driver.stdout is not None
        child = psutil.Process(int(driver.stdout.readline()))
        try:
            RayEngine(LaunchPlan(tmp_path, tmp_path / "train.py"), _driver=driver).stop()
            assert driver.returncode == 0
            assert (tmp_path / "ended").read_text() == "by itself"
            hung_s = time.monotonic() + 60.0
            while lives(child):  # the kernel takes its time to end it
                assert time.monotonic() < hung_s
        finally:
            driver.kill()
            if lives(child):
                child.kill()


def lives(process: psutil.Process) -> bool:
    """Return whether a process runs yet; one that nobody has waited for does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
