"""An sshd of our own on loopback, with keys made for it."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
_SSHD_CONFIG = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile {folder}/sshd.pid
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
AcceptEnv POLYTHROTTLE_* TMPDIR
"""
_SSH_CONFIG = """
Host nano
  HostName 127.0.0.1
  Port {port}
  IdentityFile {folder}/user
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known
  StrictHostKeyChecking yes
  SendEnv POLYTHROTTLE_* TMPDIR
Host stranger
  HostName 127.0.0.1
  Port {port}
  IdentityFile {folder}/other
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known
  HostKeyAlias nano
Host unknown
  HostName 127.0.0.1
  Port {port}
  IdentityFile {folder}/user
  BatchMode yes
  UserKnownHostsFile /dev/null
  StrictHostKeyChecking yes
"""


@contextmanager
def listening(folder: Path) -> Iterator[tuple[Path, int, int]]:
    """Run it until this is left; yields the configuration of ssh, in which it is ``nano``, its port and its process.

    Args:
        folder: Where keys and configurations are laid.
    """
    for name in ("host", "user", "other"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd, as root, wants an empty folder there
    (folder / "sshd_config").write_text(_SSHD_CONFIG.format(port=port, folder=folder))
    (folder / "ssh_config").write_text(_SSH_CONFIG.format(port=port, folder=folder))
    public = (folder / "host.pub").read_text().split()[:2]
    (folder / "known").write_text(f"[127.0.0.1]:{port} {' '.join(public)}\nnano {' '.join(public)}\n")
    assert SSHD is not None
    child = subprocess.Popen([SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=subprocess.DEVNULL)
    try:
        ends_s = time.monotonic() + 30.0
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert child.poll() is None, "sshd has ended"
                assert time.monotonic() < ends_s, "sshd does not listen"
                time.sleep(0.05)
        yield folder / "ssh_config", port, child.pid
    finally:
        child.terminate()
        child.wait()
