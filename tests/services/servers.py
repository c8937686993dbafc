"""Real servers for the tests: installed once into .services, started on free ports of the loopback, ended by number."""

import hashlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / ".services"
PAGE = FOLDER.parent / "docs" / "how-to" / "services.md"
PINNED = Path(__file__).resolve().parent / "constraints.txt"
# Triton's model stub was built for this numpy, which differs from what the other servers run with.
NUMPY = "numpy==1.26.4"
_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Installed:
    """Where the servers are.

    Args:
        folder: The environment of MLServer and of transformers.
        triton: An environment of nothing but what Triton's Python models need.
    """

    folder: Path
    triton: Path

    def program(self, name: str) -> str:
        """Return the path of a program of the environment."""
        return str(self.folder / "bin" / name)

    @property
    def packages(self) -> Path:
        """The folder of the environment's packages."""
        return next((self.folder / "lib").glob("python3.*")) / "site-packages"


@dataclass(frozen=True)
class Running:
    """A server that answers.

    Args:
        http: Its port.
        grpc: Its port for gRPC; 0 if it has none.
        log: What it prints.
    """

    http: int
    grpc: int
    log: Path


def install() -> Installed:
    """Install the servers, unless what is pinned is there already."""
    found = Installed(FOLDER, FOLDER / "triton")
    mark, digest = FOLDER / ".ready", hashlib.sha256(PINNED.read_bytes() + f"{NUMPY}{sys.version}".encode()).hexdigest()
    if not mark.is_file() or mark.read_text() != digest:
        _install(found)
        mark.write_text(digest)
    return found


def _install(found: Installed) -> None:
    shutil.rmtree(found.folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(found.folder)])
    pip = [found.program("python"), "-m", "pip", "install", "--no-compile", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "--constraint", str(PINNED), "mlserver", "transformers[serving]", "torch"])
    # The server and its libraries are in the wheel; the packages it asks for serve another way of using it.
    _run([*pip, "--constraint", str(PINNED), "--no-deps", "nvidia-pytriton"])
    _run([sys.executable, "-m", "venv", "--without-pip", str(found.triton)])
    site = next((found.triton / "lib").glob("python3.*")) / "site-packages"
    _run([*pip, "--target", str(site), NUMPY])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


def polythrottle(folder: Path, *words: str) -> Any:
    """Run the command line and return the document it prints."""
    command = [sys.executable, "-m", "polythrottle", *words, "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def shown(scheme: str, where: str) -> list[list[str]]:
    """Return the commands with which a page shows services of one scheme, at another address and made short."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("polythrottle ")]
    moved = [re.sub(rf"{re.escape(scheme)}://[^?'\s]+", where, line) for line in lines if f"{scheme}://" in line]
    return [[*shlex.split(line)[1:], "--queries", "20", "--seconds", "0.2"] for line in moved]


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@contextmanager
def running(
    command: Sequence[str], ready: str, folder: Path, environment: Mapping[str, str], http: int, grpc: int = 0
) -> Iterator[Running]:
    """Run a server until this is left; it is asked to end, and killed if it does not.

    Args:
        command: Its words.
        ready: The path on its HTTP port that answers once it can be used.
        folder: Where it runs and prints.
        environment: Added to this one's.
        http: Its port.
        grpc: Its port for gRPC.
    """
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_until(f"http://127.0.0.1:{http}{ready}", process, log)
        yield Running(http, grpc, log)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def mlserver(
    installed: Installed, folder: Path, code: str, implementation: str, names: Mapping[str, int]
) -> Iterator[Running]:
    """Run MLServer, in one process, with models of one class; each has an input "x" and an output "y".

    Args:
        installed: Where it is.
        folder: An empty one.
        code: The module with the class.
        implementation: The class's name there.
        names: Of each model, with how many numbers an item is.
    """
    http, grpc = free_ports(2)
    settings = {"debug": False, "host": "127.0.0.1", "parallel_workers": 0, "http_port": http, "grpc_port": grpc}
    (folder / "settings.json").write_text(json.dumps({**settings, "metrics_endpoint": None}))
    for name, width in names.items():
        tensor = {"name": "x", "datatype": "FP32", "shape": [-1, width]}
        model = {"name": name, "implementation": f"model.{implementation}", "inputs": [tensor]}
        (folder / name).mkdir()
        (folder / name / "model.py").write_text(code)
        (folder / name / "model-settings.json").write_text(json.dumps({**model, "outputs": [{**tensor, "name": "y"}]}))
    with running([installed.program("mlserver"), "start", "."], "/v2/health/ready", folder, {}, http, grpc) as found:
        yield found


def _wait_until(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end_s and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            pass
        try:
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError(f"{url} does not answer; the server printed\n{log.read_text(errors='replace')[-3000:]}")
