"""Workers that are forked from a process which has imported torch: as good as interpreters of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from polythrottle.training.elastic.worker.process import have_ended_well, own_words

PARENT = """
import json, multiprocessing, os, signal, sys
from polythrottle.training.elastic.worker.process import METHOD, own_words, train, warm_up

if __name__ == "__main__":
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    warm_up()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == blocked
    os.environ["POLYTHROTTLE_LATER"] = "known"
    workers = multiprocessing.get_context(METHOD)
    for ending in sys.argv[2:]:
        process = workers.Process(target=train, args=(own_words(os.environ), sys.argv[1], ending))
        process.start()
        process.join()
        print(json.dumps({"ending": ending, "code": process.exitcode}))
"""
SCRIPT = """
import atexit, json, multiprocessing, os, signal, sys
import numpy
from helper import answer

class Local:
    pass

multiprocessing.set_start_method("spawn")

atexit.register(lambda: print(json.dumps({"atexit": sys.argv[1]})))
blocked = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
default = [signal.getsignal(each) is signal.SIG_DFL for each in (signal.SIGTERM, signal.SIGHUP)]
print(json.dumps({
    "name": __name__, "file": __file__, "argv": sys.argv, "torch": "torch" in sys.modules, "helper": answer,
    "blocked": blocked, "default": default, "later": os.environ["POLYTHROTTLE_LATER"],
    "drawn": float(numpy.random.rand()), "module": sys.modules[Local.__module__].Local is Local,
}))
ending = sys.argv[1]
if ending == "mistake":
    raise ValueError("a mistake of the script")
if ending == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if ending.isdecimal():
    sys.exit(int(ending))
"""


@pytest.mark.slow
def test_a_forked_worker_is_as_good_as_a_fresh_interpreter(tmp_path: Path) -> None:
    """Name, words, neighbours, signals, chance and the end of a script are those of one that was started by itself."""
    (tmp_path / "helper.py").write_text("answer = 42\n")
    script, parent = tmp_path / "script.py", tmp_path / "parent.py"
    script.write_text(SCRIPT)
    parent.write_text(PARENT)
    command = [sys.executable, str(parent), str(script), "well", "well", "0", "3", "mistake", "killed"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    said = [json.loads(line) for line in done.stdout.splitlines()]
    first, *others = (each for each in said if "name" in each)
    assert first | {"drawn": None} == {
        "name": "__main__",
        "file": str(script),
        "argv": [str(script), "well"],
        "torch": True,
        "helper": 42,
        "blocked": [],
        "default": [True, True],
        "later": "known",
        "drawn": None,
        "module": True,
    }
    assert first["drawn"] not in [each["drawn"] for each in others]
    codes = [(each["ending"], each["code"]) for each in said if "code" in each]
    assert codes == [("well", 0), ("well", 0), ("0", 0), ("3", 3), ("mistake", 1), ("killed", -9)]
    assert [each["atexit"] for each in said if "atexit" in each] == ["well", "well", "0", "3", "mistake"]
    assert "ValueError: a mistake of the script" in done.stderr


def test_a_fork_of_what_has_touched_a_gpu_begins_anew(tmp_path: Path) -> None:
    """CUDA does not work in such a fork; the same process then executes the script in a fresh interpreter."""
    script, parent = tmp_path / "script.py", tmp_path / "parent.py"
    script.write_text("import os, sys\nprint(sys.argv[1:], 'torch' in sys.modules, os.environ['POLYTHROTTLE_X'])\n")
    parent.write_text(
        "import sys, types\nfrom polythrottle.training.elastic.worker.process import train\n"
        "sys.modules['torch'] = types.SimpleNamespace(cuda=types.SimpleNamespace(_is_in_bad_fork=lambda: True))\n"
        f"train('{{\"POLYTHROTTLE_X\": \"known\"}}', {str(script)!r}, 'a b')\n"
    )
    done = subprocess.run([sys.executable, parent], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "['a b'] False known\n"


def test_a_worker_is_told_its_nodes_words_alone() -> None:
    """What else is in the environment was there when the fork server began."""
    assert json.loads(own_words({"POLYTHROTTLE_A": "1", "HOME": "/"})) == {"POLYTHROTTLE_A": "1"}
    assert json.loads(own_words({**os.environ, "RANK": "3"})).get("RANK") is None


@pytest.mark.parametrize(("codes", "well"), [([0, 0], True), ([0, None], False), ([0, 75], False), ([], False)])
def test_workers_that_ended_without_a_word_have_ended(codes: list[int | None], well: bool) -> None:
    """All of them, and each with code 0."""
    processes = [SimpleNamespace(exitcode=code) for code in codes]
    assert have_ended_well(SimpleNamespace(_pc=SimpleNamespace(processes=processes))) is well
    assert have_ended_well(None) is False
