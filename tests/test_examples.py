import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def output(command: list[str], folder: Path) -> str:
    """Run a command in a folder of its own and return what it printed; it has to succeed."""
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, env={**os.environ, "PATH": paths}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_are_five_examples() -> None:
    """Elastic training, fine-tuning a model, a model of one's own, a recorded table, and a simulated board."""
    names = ["elastic_training", "finetune", "own_torch_model", "replay_table", "simulated_orin"]
    assert [path.stem for path in EXAMPLES] == names
    assert all(len(path.read_text().splitlines()) < 60 for path in EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_from_anywhere(tmp_path: Path, path: Path) -> None:
    """It ends well, says what kind of energy it speaks of, and where its answer is."""
    printed = output([sys.executable, str(path)], tmp_path)
    assert re.search("simulated|estimated|measured", printed)
    assert "Traceback" not in printed
