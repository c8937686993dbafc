"""Two real Slurm nodes on this machine: munged, slurmctld and two slurmd, on loopback and in a folder of their own.

Needs root and Debian's slurm-wlm and munge; every process is started here and ended by its id.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import pytest

_CONF = """
ClusterName=polythrottle
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctl_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SlurmdTimeout=3
MessageTimeout=4
TCPTimeout=1
KillWait=2
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={n1_port} CPUs=1 {gres} State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={n2_port} CPUs=1 {gres} State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10
"""
_SCRIPTS = """
Prolog={scripts}/prolog
Epilog={scripts}/epilog
PrologFlags=Alloc
GresTypes=gpu
"""
_GPUS = "".join(
    f"NodeName={node} Name=gpu File=/dev/{file}\n" for node in ("n1", "n2") for file in ("full", "null", "zero")
)
"""For Slurm any file is a GPU; it tells a job their numbers, in the order of their names."""
_READY_S = 60.0


def free_port() -> int:
    """Return a port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def missing() -> str | None:
    """Return why Slurm cannot be started here, or None."""
    if os.geteuid() != 0:
        return "two Slurm nodes on one machine need root"
    lacking = [name for name in ("munged", "slurmctld", "slurmd") if shutil.which(name) is None]
    return f"{' '.join(lacking)} not installed (Debian: slurm-wlm munge)" if lacking else None


@dataclass
class SlurmNodes:
    """A controller and the nodes n1 and n2; ``n2`` can be killed and started again.

    Attributes:
        folder: Where configuration, state and logs are.
        scripts: Folder of a prolog and an epilog; each node has three GPUs then, which are none.
    """

    folder: Path
    scripts: Path | None = None
    _started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __enter__(self) -> "SlurmNodes":
        reason = missing()
        if reason:
            pytest.skip(reason)
        self.folder.chmod(0o755)
        self._write()
        self._munge()
        self._start("slurmctld", ["slurmctld", "-D", "-f", str(self.conf)])
        for node in ("n1", "n2"):
            self.boot(node)
        self.wait_for({"n1": "idle", "n2": "idle"})
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        with suppress(subprocess.SubprocessError):
            self.call("scancel", "--user", "root")
            time.sleep(1.0)
        for name in ("n1", "n2", "slurmctld", "munged"):
            self._stop(name)

    @property
    def conf(self) -> Path:
        """Return the path of slurm.conf."""
        return self.folder / "slurm.conf"

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment in which Slurm's commands speak to these nodes."""
        return os.environ | {"SLURM_CONF": str(self.conf)}

    def boot(self, node: str) -> None:
        """Start a node's slurmd."""
        self._start(node, ["slurmd", "-D", "-N", node, "-f", str(self.conf)])

    def kill(self, node: str) -> None:
        """Take a node away as a provider does: slurmd, the steps' keepers, the steps; with SIGKILL, in this order.

        A keeper (slurmstepd) that outlived its step would report a failed job; a machine that is gone reports nothing.
        """
        process = self._started.pop(node)
        steps = self.processes(node)
        process.kill()
        process.wait()
        for pid in [*{_parent(pid) for pid in steps if _called(_parent(pid), "slurmstepd")}, *steps]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self, node: str) -> list[int]:
        """Return the ids of the processes of jobs on a node."""
        wanted = {f"SLURMD_NODENAME={node}".encode(), f"SLURM_CONF={self.conf}".encode()}
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    if wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                        found.append(int(entry.name))
        return found

    def call(self, *words: str) -> str:
        """Run one of Slurm's commands and return what it printed.

        Raises:
            subprocess.CalledProcessError: If the command fails.
        """
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout.strip()

    def states(self) -> dict[str, str]:
        """Return each node's state as sinfo names it, without its flags."""
        lines = self.call("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T").splitlines()
        return {node: state.rstrip("*~#!%$@^-+") for node, state in (line.split() for line in lines)}

    def wait_for(self, wanted: Mapping[str, str]) -> None:
        """Wait until nodes are in given states.

        Raises:
            TimeoutError: If they are not after a minute; says what they are and what the logs say.
        """
        end_s = time.monotonic() + _READY_S
        seen: dict[str, str] = {}
        while time.monotonic() < end_s:
            with suppress(subprocess.SubprocessError):
                seen = self.states()
                if all(seen.get(node) == state for node, state in wanted.items()):
                    return
            time.sleep(0.1)
        raise TimeoutError(f"nodes are {seen}, not {dict(wanted)}\n{self.logs()}")

    def logs(self) -> str:
        """Return the ends of all logs."""
        return "\n".join(f"== {path.name}\n{path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.log")))

    def _write(self) -> None:
        for name in ("state", "spool-n1", "spool-n2"):
            (self.folder / name).mkdir()
        ports = {name: free_port() for name in ("ctl_port", "n1_port", "n2_port")}
        host = socket.gethostname().partition(".")[0]
        gres = "" if self.scripts is None else "Gres=gpu:3"
        text = _CONF.format(folder=self.folder, host=host, gres=gres, **ports).lstrip()
        if self.scripts is not None:
            # Above the nodes, whose GPUs are refused before their kind is known.
            text = _SCRIPTS.format(scripts=self.scripts).lstrip() + text
            (self.folder / "gres.conf").write_text(_GPUS)
        self.conf.write_text(text)

    def _munge(self) -> None:
        home = self.folder / "munge"
        home.mkdir(mode=0o755)
        key = home / "key"
        key.touch(mode=0o400)
        key.write_bytes(secrets.token_bytes(1024))
        files = {"key-file": key, "socket": home / "socket", "pid-file": home / "pid", "log-file": home / "log"}
        options = [f"--{name}={path}" for name, path in (files | {"seed-file": home / "seed"}).items()]
        # The folder lies below /tmp, which others may write to: munged wants to be told that this is meant.
        self._start("munged", ["munged", "--foreground", "--force", *options])
        end_s = time.monotonic() + _READY_S
        while not (home / "socket").exists():
            if time.monotonic() > end_s or self._started["munged"].poll() is not None:
                raise TimeoutError(f"munged did not start: {(self.folder / 'munged.out').read_text()}")
            time.sleep(0.1)

    def _start(self, name: str, words: list[str]) -> None:
        with (self.folder / f"{name}.out").open("ab") as output:
            self._started[name] = subprocess.Popen(
                words, env=self.environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL
            )

    def _stop(self, name: str) -> None:
        process = self._started.pop(name, None)
        if process is None:
            return
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _parent(pid: int) -> int:
    """Return the id of a process's parent, 0 if it has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _called(pid: int, name: str) -> bool:
    """Return whether a process runs under a name."""
    with suppress(OSError):
        return pid > 1 and Path(f"/proc/{pid}/cmdline").read_text().startswith(name)
    return False
