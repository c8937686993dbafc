"""What actuator, daemon and far side take while nothing is served: memory, processor time, and what they have loaded.

    PYTHONPATH=tests python benchmarks/at_rest.py [--seconds 60] [--board jetson-orin-nano] [--python pypy3]
        [--installed]

Five settings: an actuator on a planted Jetson tree with a daemon behind it, as on a board; a daemon that holds a
simulated board itself; the far side of a connection over SSH, which samples such a tree's power ten times a second
beside a workload that sleeps; and, where there is a C compiler to build the stand-in driver, an actuator and a daemon
for eight GPUs and three services that share 3.2 kW, and an actuator whose eight GPUs somebody has set as one, with the
guard of each. With ``--installed`` besides these the first as ``daemon install --device ssh://`` installs it for
``--python``; pip must be able to fetch its packages. Resident memory is what the kernel counts (VmRSS); pages of the
interpreter and of libraries that several processes share are counted in each, so that PSS, which shares them out, is
shown beside it.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from boards_over_ssh import children_of, far_sides, stand_in

from polythrottle.backends import open_device
from polythrottle.board.link import SSH
from polythrottle.cli.commands import run
from polythrottle.daemon.client import Client
from polythrottle.domain.errors import DeviceError
from polythrottle.testing import BOARDS, plant
from polythrottle.testing.nvml import FakeNvml, compiler

_HEAVY = ("numpy", "torch", "pandas", "scipy", "matplotlib", "botorch")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Print a table."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--seconds", type=float, default=60.0)
    words.add_argument("--board", choices=BOARDS, default="jetson-orin-nano")
    words.add_argument("--python", default=sys.executable, help="the interpreter of the far side")
    words.add_argument("--installed", action="store_true", help="also what is installed over SSH, for --python")
    given = words.parse_args()
    print("| | RSS | PSS | share of a core | threads | loaded of what is heavy |")
    print("| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        pairs = {"planted": planted(Path(folder) / "a", given.board), "sim": sim(Path(folder) / "b")}
        pairs["over SSH"] = far_side(Path(folder) / "e", given.board, given.python)
        if given.installed:
            pairs["installed"] = installed(Path(folder) / "f", given.board, given.python)
        if compiler() is not None:
            pairs["server"] = server(Path(folder) / "c")
            pairs["eight GPUs set"] = set_server(Path(folder) / "d")
        for name, processes in pairs.items():
            with processes as running:
                report(name, running, given.seconds)


def report(name: str, running: dict[str, int], seconds: float) -> None:
    """Print what each process takes over some time, and all together."""
    time.sleep(5.0)
    before = {pid: used_s(pid) for pid in running.values()}
    begun_s = time.monotonic()
    time.sleep(seconds)
    passed_s = time.monotonic() - begun_s
    totals = [0.0, 0.0, 0.0]
    for role, pid in running.items():
        share = (used_s(pid) - before[pid]) / passed_s
        rss, pss = megabytes(pid, "Rss"), megabytes(pid, "Pss")
        totals = [total + value for total, value in zip(totals, (rss, pss, share), strict=True)]
        print(f"| {name}: {role} | {rss:.1f} MB | {pss:.1f} MB | {share:.2%} | {threads(pid)} | {heavy(pid)} |")
    print(f"| {name}: together | {totals[0]:.1f} MB | {totals[1]:.1f} MB | {totals[2]:.2%} | | |", flush=True)


@contextmanager
def planted(folder: Path, board: str) -> Iterator[dict[str, int]]:
    """Start an actuator on a planted tree, and a daemon behind it."""
    root = plant(board, folder / "board")
    with ExitStack() as ends:
        socket = folder / "actuator.sock"
        actuator = started(
            ends, folder, "polythrottle.actuation.server", "--socket", str(socket), "--device", f"jetson?root={root}"
        )
        daemon = begun(ends, folder, "--actuator", str(socket), "--traffic", "report")
        yield {"actuator": actuator, "daemon": daemon}


@contextmanager
def installed(folder: Path, board: str, python: str) -> Iterator[dict[str, int]]:
    """Start likewise an actuator and a daemon from where they were installed for another Python."""
    root = plant(board, folder / "board")
    os.environ[SSH] = stand_in(folder)
    words = ["--device", f"ssh://nano?python={python}", "--root", str(folder / "root")]
    if run(["daemon", "install", *words]) != 0:
        raise SystemExit("it cannot be installed")
    programs = folder / "root/opt/polythrottle/bin"
    socket = folder / "actuator.sock"
    asked = ("--socket", str(socket), "--device", f"jetson?root={root}")
    with ExitStack() as ends:
        actuator = started(ends, folder, str(programs / "polythrottle-actuator"), *asked)
        program = str(programs / "polythrottle")
        daemon = begun(ends, folder, "--actuator", str(socket), "--traffic", "report", program=program)
        yield {"actuator": actuator, "daemon": daemon}


@contextmanager
def sim(folder: Path) -> Iterator[dict[str, int]]:
    """Start a daemon that holds a simulated board."""
    folder.mkdir()
    with ExitStack() as ends:
        yield {"daemon": begun(ends, folder, "--device", "sim:jetson-agx-orin", "--traffic", "report")}


_SERVED = "import time\n\n\ndef step(batch_size):\n    time.sleep(0.5)\n"


@contextmanager
def far_side(folder: Path, board: str, python: str) -> Iterator[dict[str, int]]:
    """Measure on a planted tree by a far side, ten times a second, what takes nothing itself."""
    root = plant(board, folder / "board")
    os.environ[SSH] = stand_in(folder)
    (folder / "home" / "served.py").write_text(_SERVED)
    device = f"ssh://nano/jetson?root={root}&python={python}"
    with ExitStack() as ends:
        words = ("measure", "--device", device, "--workload", "served:step", "--seconds", "600", "--queries", "1200")
        started(ends, folder, "polythrottle", *words)
        while not ((pids := far_sides(folder)) and (children := children_of(pids[0]))):
            time.sleep(0.1)
        yield {"far side": pids[0], "its workload": children[0]}


_SERVER = """
[node]
power = "3.2kW"
rest = "400W"
"""
_GROUPS = {"chat": "nvml:0-3", "photos": "nvml:4,5", "search": "nvml:6,7"}


@contextmanager
def server(folder: Path) -> Iterator[dict[str, int]]:
    """Start an actuator on eight GPUs of the stand-in driver, and a daemon with three services behind it."""
    folder.mkdir()
    with ExitStack() as ends:
        ends.enter_context(FakeNvml(folder / "nvml", ["h100-sxm"] * 8))
        socket = folder / "actuator.sock"
        devices = [word for uri in _GROUPS.values() for word in ("--device", uri)]
        actuator = started(ends, folder, "polythrottle.actuation.server", "--socket", str(socket), *devices)
        tables = [
            f'[[service]]\nname = "{name}"\ndevice = "{uri}"\nworkload = "model.onnx"\ntraffic = "report"\n'
            for name, uri in _GROUPS.items()
        ]
        config = folder / "daemon.toml"
        config.write_text(f'actuator = "{socket}"\n{_SERVER}{"".join(tables)}')
        yield {"actuator": actuator, "daemon": begun(ends, folder, "--config", str(config))}


@contextmanager
def set_server(folder: Path) -> Iterator[dict[str, int]]:
    """Start an actuator on eight GPUs of the stand-in driver, and set them as one."""
    folder.mkdir()
    with ExitStack() as ends:
        ends.enter_context(FakeNvml(folder / "nvml", ["h100-sxm"] * 8))
        socket = folder / "actuator.sock"
        actuator = started(
            ends, folder, "polythrottle.actuation.server", "--socket", str(socket), "--device", "nvml:all"
        )
        while not socket.exists():
            time.sleep(0.1)
        device = ends.enter_context(open_device(f"actuator:{socket}?device=nvml:all"))
        device.apply(next(point for point in device.space if point != device.space.default))
        children = Path(f"/proc/{actuator}/task").glob("*/children")
        guards = [int(pid) for each in children for pid in each.read_text().split()]
        yield {"actuator": actuator, **{f"guard {number}": pid for number, pid in enumerate(guards)}}


def begun(ends: ExitStack, folder: Path, *words: str, program: str = "polythrottle") -> int:
    """Start a daemon and wait until it answers."""
    pid = started(ends, folder, program, "daemon", "run", "--socket", str(folder / "daemon.sock"), *words)
    with Client(folder / "daemon.sock") as client:
        for _ in range(600):
            try:
                if client.status().turn > 1:
                    return pid
            except DeviceError:
                pass
            time.sleep(0.1)
    raise SystemExit(f"the daemon did not begin: {(folder / 'polythrottle.log').read_text()}")


def started(ends: ExitStack, folder: Path, module: str, *words: str) -> int:
    """Start a module, or a program that is named by its path, as a process of its own that ends with this one."""
    folder.mkdir(exist_ok=True)
    log = ends.enter_context((folder / f"{Path(module).name}.log").open("w"))
    command = [module] if module.startswith("/") else [sys.executable, "-m", module]
    environment = {**os.environ, "POLYTHROTTLE_STATE_DIR": str(folder / "state")}
    child = subprocess.Popen([*command, *words], stderr=log, stdout=log, env=environment)
    ends.callback(child.wait)
    ends.callback(child.terminate)
    return child.pid


def used_s(pid: int) -> float:
    """Return the processor time of a process so far, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def megabytes(pid: int, field: str) -> float:
    """Return a field of a process's memory, in millions of bytes."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024 / 1e6


def threads(pid: int) -> int:
    """Return how many threads a process has."""
    return len(os.listdir(f"/proc/{pid}/task"))


def heavy(pid: int) -> str:
    """Return which heavy packages a process has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return ", ".join(name for name in _HEAVY if f"/{name}/" in maps) or "none"


if __name__ == "__main__":
    main()
