"""What Slurm's commands say, read without a Slurm; tests/cluster asks a real one."""

from pathlib import Path

import pytest

from polythrottle.cluster.rented_machines import SlurmNode, SlurmProvider, nodes, parsed
from polythrottle.domain.errors import DeviceError, InvalidInput
from polythrottle.domain.fleet.transient_machine import Order, Rented, Stage

SHOWN = (
    "JobId=7 JobName=a b=c UserId=root(0) JobState={state} Reason={reason} Dependency=(null) Requeue=1 Restarts=2 "
    "NodeList={node} BatchHost=n1 CPUs/Task=1 Command=/tmp/x y"
)


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that is the whole PATH but for the shell's own."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def script(folder: Path, name: str, text: str) -> None:
    """Put a command there."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def provider(folder: Path, shown: str, tmp_path: Path) -> SlurmProvider:
    """Return a provider whose Slurm numbers jobs 7 and shows them as given."""
    script(folder, "sbatch", f'echo "$@" > {tmp_path}/words; cat > {tmp_path}/script; echo "7;cluster"')
    script(folder, "scontrol", shown)
    return SlurmProvider(["run it", "$HOME"], tmp_path / "out", partition="spot", notice_s=30, limit="4:00:00")


@pytest.mark.parametrize(
    ("state", "node", "stage", "where"),
    [
        ("PENDING", "(null)", Stage.WAITING, ""),
        ("RUNNING", "n1", Stage.RUNNING, "n1"),
        ("NODE_FAIL", "n1", Stage.LOST, "n1"),
        ("COMPLETED", "n1", Stage.ENDED, "n1"),
        ("SOMETHING_NEW", "(null)", Stage.WAITING, ""),
    ],
)
def test_a_job_is_shown_by_its_stage(
    commands: Path, tmp_path: Path, state: str, node: str, stage: Stage, where: str
) -> None:
    """Slurm's states become four stages; a state nobody knows is one that waits."""
    slurm = provider(commands, f"echo '{SHOWN.format(state=state, reason='None', node=node)}'", tmp_path)
    assert slurm.request(Order()) == "7"
    assert slurm.seen() == {"7": Rented("7", stage, where, 2, "")}


def test_a_job_is_submitted_so_that_it_comes_back(commands: Path, tmp_path: Path) -> None:
    """Requeue, one node, the notice, the limit and the partition are asked for; the command is quoted."""
    provider(commands, "exit 1", tmp_path).request(Order())
    words = (tmp_path / "words").read_text()
    for word in ("--requeue", "--nodes=1", "--signal=B:TERM@30", "--time=4:00:00", "--partition=spot"):
        assert word in words
    assert (tmp_path / "script").read_text() == "#!/bin/sh\nexec 'run it' '$HOME'\n"


def test_a_job_that_slurm_has_forgotten_has_ended(commands: Path, tmp_path: Path) -> None:
    """Slurm forgets ended jobs after minutes."""
    slurm = provider(commands, "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", tmp_path)
    slurm.request(Order())
    assert slurm.seen()["7"].stage is Stage.ENDED


def test_a_controller_that_is_down_is_one_line(commands: Path, tmp_path: Path) -> None:
    """An error of Slurm's own is repeated, not taken for a job that has ended."""
    slurm = provider(commands, "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1", tmp_path)
    slurm.request(Order())
    with pytest.raises(DeviceError, match="Unable to contact slurm controller"):
        slurm.seen()


def test_without_slurm_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No sbatch, no sinfo: what is missing, in one line."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceError, match="sbatch is not here"):
        SlurmProvider(["true"], tmp_path)
    with pytest.raises(DeviceError, match="sinfo is not here"):
        nodes()


def test_a_job_needs_a_command(commands: Path, tmp_path: Path) -> None:
    """An empty command is refused before Slurm is asked."""
    with pytest.raises(InvalidInput):
        SlurmProvider([], tmp_path)


def test_nodes_are_read_with_their_reasons(commands: Path) -> None:
    """Flags behind a state do not make a node unusable, a reason may hold bars."""
    script(commands, "sinfo", "printf 'n1|idle~|none\\nn2|down*|a|b\\nbroken\\n'")
    seen = nodes()
    assert seen == {"n1": SlurmNode("n1", "idle~"), "n2": SlurmNode("n2", "down*", "a|b")}
    assert [node.usable for node in seen.values()] == [True, False]


def test_fields_may_hold_spaces() -> None:
    """A value ends where the next key begins."""
    fields = parsed(SHOWN.format(state="RUNNING", reason="Node down", node="n1"))
    assert (fields["Reason"], fields["CPUs/Task"], fields["Command"]) == ("Node down", "1", "/tmp/x y")
