"""Workloads: callables, torch modules, ONNX files and commands, all answering timed queries."""

import os
import shlex
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from actuators import until
from onnx import TensorProto, helper, numpy_helper

from polythrottle.backends.cpu.energy import busy_s
from polythrottle.domain.errors import BadFile, DeviceError, InvalidInput, KnobRejected, TrialError, UnknownName
from polythrottle.domain.ports import Workload
from polythrottle.domain.space import OperatingPoint
from polythrottle.testing import WorkloadContract
from polythrottle.workloads import open_workload
from polythrottle.workloads.inputs import DTYPES, Input, PlainArray, parse_inputs, processors, random_array

FLOAT, INT64, STRING = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING

CODE = """
import time, torch
from torch import nn

calls = []

def alone(): calls.append("alone")
def batched(batch_size): calls.append(batch_size)
def both(batch_size=1, *, threads=2, verbose=False): calls.append((batch_size, threads))
def greedy(tokens): pass
def broken(batch_size): raise ValueError("no\\nluck today")
def leaving(): raise SystemExit(0)
def interrupted(): raise KeyboardInterrupt
def talking(): print("to standard output")
def sleeping(): time.sleep(0.02)
async def later(): pass
def generating(): yield 1
number = 7
class Space:
    class inner:
        pass
    @staticmethod
    def static(batch_size): calls.append("static")

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.layer = nn.Linear(width, 4)
        self.seen = []
    def forward(self, x):
        self.seen.append((tuple(x.shape), self.training, torch.is_inference_mode_enabled(), torch.get_num_threads()))
        return self.layer(x)

class WithExample(Net):
    def example_input(self, batch_size):
        return torch.ones(batch_size, 8)

class Pair(nn.Module):
    def forward(self, ids, scale):
        assert ids.dtype == torch.int64
        return ids * scale

class BadExample(Net):
    def example_input(self, batch_size):
        raise RuntimeError("no data")

class Unbuildable(nn.Module):
    def __init__(self):
        raise OSError("no weights")

instance = WithExample()
bare = Net()
pair = Pair()
def factory(width=8): return WithExample()
def plain_factory(): return WithExample()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with a module of the user's in it, forgotten afterwards."""
    (tmp_path / "served.py").write_text(textwrap.dedent(CODE))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("served", None)


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """Every workload puts torch's thread count back when it is closed."""
    before = torch.get_num_threads()
    yield
    after = torch.get_num_threads()
    torch.set_num_threads(before)
    assert after == before


def graph(path: Path, shape: list[object], *, kind: int = FLOAT, extra: list[object] | None = None) -> Path:
    """Write an ONNX file: a few matrix products on floats, otherwise the identity."""
    inputs = [helper.make_tensor_value_info("x", kind, shape)]
    outputs = [helper.make_tensor_value_info("y", kind, None)]
    nodes, weights = [helper.make_node("Identity", ["x"], ["y"])], []
    if kind == FLOAT and shape[-1] == 64:
        weights = [numpy_helper.from_array(np.eye(64, dtype=np.float32), "w")]
        nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    if extra is not None:
        inputs.append(helper.make_tensor_value_info("mask", INT64, extra))
        outputs.append(helper.make_tensor_value_info("m", INT64, None))
        nodes.append(helper.make_node("Identity", ["mask"], ["m"]))
    model = helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs, weights),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=9,
    )
    onnx.save(model, path)
    return path


def level(workload: Workload, **levels: int) -> Workload:
    """Apply a point and return the workload."""
    workload.apply(OperatingPoint(levels))
    return workload


def command(code: str) -> str:
    """Return the URI of a command that runs Python code."""
    return f"cmd:{shlex.join([sys.executable, '-S', '-E', '-c', code])}"


class TestCallableContract(WorkloadContract):
    """The contract of every workload, for a function."""

    def make(self) -> Workload:
        """Return a function with both knobs."""
        return open_workload("served:both")


class TestTorchContract(WorkloadContract):
    """The contract of every workload, for a torch module."""

    def make(self) -> Workload:
        """Return a torch module."""
        return open_workload("served:instance", batch_sizes=(1, 4))


class TestOnnxContract(WorkloadContract):
    """The contract of every workload, for an ONNX file."""

    def make(self) -> Workload:
        """Return an ONNX file with a dynamic batch."""
        return open_workload(str(graph(Path("model.onnx").absolute(), ["n", 64])))


class TestCommandContract(WorkloadContract):
    """The contract of every workload, for a command."""

    def make(self) -> Workload:
        """Return a command with a batch size."""
        return open_workload("cmd:true {batch_size}", batch_sizes=(1, 2))


# --- forms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uri", ["", "model.bin", "kserv://host/model", "a b:c", "module:", ":f", "mod:f()"])
def test_an_unknown_form_lists_the_known_ones(uri: str) -> None:
    """One line says what a workload may be."""
    with pytest.raises(InvalidInput, match=r"model\.onnx, .*package\.module:callable, .*or cmd:"):
        open_workload(uri)


def test_default_levels_are_powers_of_two() -> None:
    """Batches go from 1 to 16; threads up to the processors there are, which is the default."""
    space = open_workload("served:both").space
    assert space.knob("batch_size").levels == (1, 2, 4, 8, 16)
    assert space.knob("threads").levels[-1] == processors()
    assert dict(space.default) == {"batch_size": 1, "threads": processors()}


@pytest.mark.parametrize("levels", [(0,), (-1, 2), (2, 2), ()])
def test_impossible_batch_sizes_are_refused(levels: tuple[int, ...]) -> None:
    """Levels are whole numbers from one, each once."""
    with pytest.raises(InvalidInput, match="batch_size"):
        open_workload("served:batched", batch_sizes=levels)


def test_opening_loads_only_what_the_form_needs() -> None:
    """A command needs neither torch nor ONNX Runtime, and importing the package needs none."""
    code = (
        "import sys; from polythrottle.workloads import open_workload; open_workload('cmd:true').query();"
        "assert not {'torch', 'onnxruntime', 'onnx'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- callables -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "knobs", "call"),
    [
        ("alone", (), "alone"),
        ("batched", ("batch_size",), 4),
        ("both", ("batch_size", "threads"), (4, 1)),
        ("Space.static", ("batch_size",), "static"),
    ],
)
def test_the_knobs_are_the_parameters_a_function_has(name: str, knobs: tuple[str, ...], call: object) -> None:
    """Batch size and threads are passed by name where there is such a parameter, and nowhere else."""
    workload = open_workload(f"served:{name}")
    assert workload.space.names == knobs
    workload.apply(OperatingPoint({"batch_size": 4, "threads": 1}).only(knobs))
    assert workload.query().items == (4 if knobs else 1)
    assert sys.modules["served"].calls[-1] == call


@pytest.mark.parametrize(
    ("uri", "kind", "says"),
    [
        ("nowhere:f", InvalidInput, "no module 'nowhere'"),
        ("served.deeper:f", InvalidInput, "no module 'served.deeper'"),
        ("served:batchd", UnknownName, "did you mean batched"),
        ("served:greedy", InvalidInput, "needs tokens"),
        ("served:number", InvalidInput, "is a int"),
        ("served:later", InvalidInput, "coroutine"),
        ("served:generating", InvalidInput, "generator"),
        ("failing:f", InvalidInput, "importing failing raised ZeroDivisionError"),
        ("needing:f", InvalidInput, "importing needing raised ModuleNotFoundError"),
        ("script:f", InvalidInput, "importing script raised SystemExit"),
    ],
)
def test_what_cannot_be_called_is_said_on_opening(folder: Path, uri: str, kind: type[Exception], says: str) -> None:
    """A missing module, a missing name and a wrong signature are told apart."""
    (folder / "failing.py").write_text("1 / 0")
    (folder / "needing.py").write_text("import not_installed_at_all")
    (folder / "script.py").write_text("raise SystemExit(0)")
    with pytest.raises(kind, match=says) as caught:
        open_workload(uri)
    assert "\n" not in str(caught.value)


def test_what_a_model_raises_spoils_one_trial() -> None:
    """Exceptions of the user's code become one line; even an attempt to exit does."""
    with pytest.raises(TrialError, match=r"^model raised ValueError: no luck today$"):
        open_workload("served:broken").query()
    with pytest.raises(TrialError, match="SystemExit: 0"):
        open_workload("served:leaving")
    with pytest.raises(TrialError, match="RuntimeError: no data"):
        open_workload("served:BadExample")
    with pytest.raises(TrialError, match="OSError: no weights"):
        open_workload("served:Unbuildable")


def test_an_interrupt_passes_through() -> None:
    """Ctrl-C is never taken for a failure of the model."""
    with pytest.raises(KeyboardInterrupt):
        open_workload("served:interrupted")


def test_what_a_model_prints_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output is kept for the command line's document."""
    open_workload("served:talking").query()
    out, err = capsys.readouterr()
    assert out == ""
    assert "to standard output" in err


def test_latency_is_the_time_of_the_call() -> None:
    """Twenty milliseconds of waiting are measured as such."""
    assert 0.02 <= open_workload("served:sleeping").query().latency_s < 5


def test_a_level_outside_the_space_is_rejected() -> None:
    """An impossible level spoils a trial and names the possible ones."""
    with pytest.raises(KnobRejected, match=r"batch_size in \[1, 2, 4, 8, 16\]"):
        open_workload("served:batched").apply(OperatingPoint({"batch_size": 3}))


# --- torch -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["instance", "WithExample", "factory", "plain_factory"])
def test_a_torch_module_runs_in_inference_mode_with_its_batch_and_threads(name: str) -> None:
    """Instance, class and factory are the same: evaluation mode, no gradients, the threads asked for."""
    workload = open_workload(f"served:{name}")
    query = level(workload, batch_size=2, threads=1).query()
    seen = workload._module.seen[-1]  # type: ignore[attr-defined]
    workload.close()
    assert query.items == 2
    assert seen == ((2, 8), False, True, 1)


def test_a_torch_module_takes_inputs_by_shape() -> None:
    """Shapes without the batch make positional or named inputs of the type asked for."""
    for inputs in (["5:int64", "5"], ["scale=5", "ids=5:int64"]):
        workload = open_workload("served:pair", inputs=inputs)
        assert level(workload, batch_size=4).query().items == 4
        workload.close()


def test_a_torch_module_without_inputs_says_how_to_give_them() -> None:
    """The message names the option and the method."""
    with pytest.raises(InvalidInput, match=r"--input 3x224x224.*example_input"):
        open_workload("served:bare")


def test_a_shape_that_does_not_fit_spoils_the_trial() -> None:
    """The complaint of torch itself is passed on in one line."""
    workload = open_workload("served:bare", inputs=["9"])
    with pytest.raises(TrialError, match="model raised RuntimeError: mat1 and mat2"):
        workload.query()
    workload.close()


def test_inputs_for_a_plain_function_are_refused() -> None:
    """Shapes mean nothing to a function."""
    with pytest.raises(InvalidInput, match="takes no inputs"):
        open_workload("served:batched", inputs=["3"])


# --- made-up inputs --------------------------------------------------------------------------------------------------


def test_inputs_are_parsed() -> None:
    """Name and type are optional; a single number per item has no shape."""
    assert Input.parse("3x224x224") == Input((3, 224, 224))
    assert Input.parse("ids=128:int64") == Input((128,), "ids", "int64")
    assert Input.parse("score=") == Input((), "score")


@pytest.mark.parametrize("texts", [[""], ["3x"], ["-1"], ["3x0"], ["3:float"], ["a=3", "a=4"], ["a=3", "4"], ["x3"]])
def test_malformed_inputs_are_refused(texts: list[str]) -> None:
    """Each is one clear line."""
    with pytest.raises(InvalidInput):
        parse_inputs(texts)


def test_random_arrays_are_always_the_same() -> None:
    """The same arguments give the same values; whole numbers are 0 or 1."""
    assert np.array_equal(random_array((3, 4), "float32"), random_array((3, 4), "float32"))
    assert random_array((2,), "float16").dtype == np.float16
    assert set(np.unique(random_array((100,), "int64")).tolist()) == {0, 1}
    assert random_array((4,), "bool").dtype == np.bool_


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_without_numpy_are_those_that_numpy_would_read(dtype: str) -> None:
    """Bytes and list hold the same, of the same kind as NumPy's own made-up numbers, however many there are."""
    plain = PlainArray.random((3, 30_000), dtype)
    read = np.frombuffer(plain.tobytes(), dtype).reshape(plain.shape)
    assert read.ravel().tolist() == plain.ravel().tolist()
    assert plain == PlainArray.random((3, 30_000), dtype)
    if dtype.startswith("float"):
        assert abs(read.astype("float64").std() - 1.0) < 0.02
    else:
        assert set(np.unique(read).tolist()) == {0, 1}
    assert PlainArray.random((), dtype).tolist() == plain.tolist()[:1]


def test_numbers_without_numpy_that_do_not_fit_are_refused() -> None:
    """Before any of them is made."""
    with pytest.raises(InvalidInput, match="1000000000x1000000 does not fit into memory"):
        PlainArray.random((10**9, 10**6), "float32")


# --- ONNX ------------------------------------------------------------------------------------------------------------


def test_a_dynamic_batch_is_a_knob_and_threads_rebuild_the_session(folder: Path) -> None:
    """The batch reaches the model, and a changed thread count loads it again with that many."""
    workload = open_workload(str(graph(folder / "m.onnx", ["n", 64])))
    session = workload._session  # type: ignore[attr-defined]
    assert level(workload, batch_size=8).query().items == 8
    assert workload._feeds["x"].shape == (8, 64)  # type: ignore[attr-defined]
    assert workload._session is session  # type: ignore[attr-defined]
    level(workload, threads=1).query()
    assert workload._session.get_session_options().intra_op_num_threads == 1  # type: ignore[attr-defined]
    workload.close()


def test_a_model_that_goes_bad_between_trials_spoils_only_those(folder: Path) -> None:
    """A failed reload rejects the point; once the file is back the next point runs."""
    path = graph(folder / "m.onnx", ["n", 64])
    workload, content = open_workload(str(path), threads=(1, 2)), path.read_bytes()
    level(workload, threads=2)
    path.write_bytes(b"gone")
    with pytest.raises(KnobRejected, match="with 1 threads"):
        level(workload, threads=1)
    path.write_bytes(content)
    assert level(workload, threads=1).query().items == 1
    workload.close()


def test_a_fixed_batch_is_one_level(folder: Path) -> None:
    """A graph exported for four items serves four per query and nothing else."""
    path = str(graph(folder / "m.onnx", [4, 64]))
    workload = open_workload(path)
    assert workload.space.knob("batch_size").levels == (4,)
    assert workload.query().items == 4
    with pytest.raises(InvalidInput, match="exported with a batch of 4"):
        open_workload(path, batch_sizes=(1, 2))


def test_a_symbol_means_the_batch_wherever_it_stands(folder: Path) -> None:
    """Two inputs that share the batch symbol are fed alike."""
    workload = open_workload(str(graph(folder / "m.onnx", ["n", 64], extra=["n", "n"])))
    level(workload, batch_size=2).query()
    assert workload._feeds["mask"].shape == (2, 2)  # type: ignore[attr-defined]


def test_other_open_dimensions_must_be_given(folder: Path) -> None:
    """The message names the input and what it lacks, and the option it offers works."""
    path = str(graph(folder / "m.onnx", ["n", "sequence", 64]))
    with pytest.raises(InvalidInput, match=r"input x is batchxsequencex64; .* --input x=128x64"):
        open_workload(path)
    assert level(open_workload(path, inputs=["x=128x64"]), batch_size=2).query().items == 2
    assert open_workload(path, inputs=["16x64:float32"]).query().items == 1


@pytest.mark.parametrize(
    ("inputs", "kind", "says"),
    [
        (["z=3x64"], UnknownName, "known: x|did you mean"),
        (["3x65"], InvalidInput, "does not fit"),
        (["3"], InvalidInput, "does not fit"),
        (["3x64", "4"], InvalidInput, "2 shapes are given"),
        (["3x64:int64"], InvalidInput, "is float32, not int64"),
    ],
)
def test_inputs_that_contradict_the_graph_are_refused(
    folder: Path, inputs: list[str], kind: type[Exception], says: str
) -> None:
    """Shape, name and type are checked against what the graph declares."""
    with pytest.raises(kind, match=says):
        open_workload(str(graph(folder / "m.onnx", ["n", "s", 64])), inputs=inputs)


def test_text_inputs_cannot_be_made_up(folder: Path) -> None:
    """An input of strings is named."""
    with pytest.raises(InvalidInput, match=r"input x is a tensor\(string\)"):
        open_workload(str(graph(folder / "m.onnx", ["n", 2], kind=STRING)))


def test_what_is_not_an_onnx_model_is_a_bad_file_and_nothing_else_is_said(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Garbage, an empty file, half a model, a folder and no file are one line each."""
    whole = graph(folder / "whole.onnx", ["n", 64]).read_bytes()
    for name, content in (("garbage", b"not a model"), ("empty", b""), ("half", whole[: len(whole) // 2])):
        (folder / f"{name}.onnx").write_bytes(content)
    (folder / "dir.onnx").mkdir()
    for name in ("garbage", "empty", "half", "dir", "missing"):
        with pytest.raises(BadFile, match=rf"{name}\.onnx") as caught:
            open_workload(f"{name}.onnx")
        assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_graph_that_fails_while_running_spoils_the_trial_quietly(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """ONNX Runtime's complaint becomes the failure of the trial and does not go to the terminal."""
    shape = numpy_helper.from_array(np.array([3], dtype=np.int64), "shape")
    made = helper.make_graph(
        [helper.make_node("Reshape", ["x", "shape"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", FLOAT, ["n", 64])],
        [helper.make_tensor_value_info("y", FLOAT, None)],
        [shape],
    )
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), folder / "m.onnx")
    workload = open_workload("m.onnx")
    with pytest.raises(TrialError, match="onnxruntime raised"):
        workload.query()
    assert capfd.readouterr() == ("", "")


def test_without_onnx_runtime_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message is the command that installs it."""
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(DeviceError, match=r"pip install 'polythrottle\[onnx\]'"):
        open_workload(str(graph(folder / "m.onnx", ["n", 64])))


# --- commands --------------------------------------------------------------------------------------------------------


def test_placeholders_are_knobs_and_fill_words_and_environment(folder: Path) -> None:
    """Words and environment carry the levels; no shell reads them."""
    code = "import os, sys; open('said', 'w').write(' '.join(sys.argv[1:]) + os.environ['POLYTHROTTLE_THREADS'])"
    workload = open_workload(f"{command(code)} --b={{batch_size}} '$HOME;ls' -t {{threads}}", threads=(1, 3))
    assert workload.space.names == ("batch_size", "threads")
    assert level(workload, batch_size=4, threads=3).query().items == 4
    assert (folder / "said").read_text() == "--b=4 $HOME;ls -t 33"


def test_a_command_without_placeholders_has_knobs_only_where_levels_are_given() -> None:
    """A script that reads the environment is told its levels; any other is just run."""
    assert open_workload("cmd:true").space.names == ()
    assert open_workload("cmd:true", batch_sizes=(1, 2)).space.names == ("batch_size",)


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("cmd:", "names no command"),
        ('cmd:echo "open', "no closing quotation"),
        ("cmd:no-such-program-here", "not a program"),
        ("cmd:./served.py", "not a program"),
    ],
)
def test_a_command_that_cannot_be_run_is_said_on_opening(uri: str, says: str) -> None:
    """Unbalanced quotes, nothing, and programs that are missing or not executable."""
    with pytest.raises(InvalidInput, match=says):
        open_workload(uri)


def test_braces_that_are_meant_are_doubled() -> None:
    """A word in braces that is not known is refused; a shell's variables, JSON and doubled braces are left alone."""
    with pytest.raises(
        InvalidInput, match=r"\{threds\} is not filled in: the words are \{batch_size\} and \{threads\}"
    ):
        open_workload("cmd:true --threads {threds}")
    given = "sh -c 'test \"$0\" = {word}' {{word}}"
    open_workload(f"cmd:{given.replace('= {word}', '= {{word}}')}").query()
    for words in ("sh -c 'echo ${HOME}'", "true '{\"batch\": 1}'", "true '{}'", "true '{0}'"):
        open_workload(f"cmd:{words}").query()


def test_a_failing_command_spoils_the_trial_with_its_code_and_last_words() -> None:
    """Exit code or signal, and the last line of standard error."""
    code = "import sys; sys.stderr.write('first\\nlast \\x1b[31mwords\\n\\n'); sys.exit(3)"
    with pytest.raises(TrialError, match=r"exited with code 3: last \[31mwords$"):
        open_workload(command(code)).query()
    with pytest.raises(TrialError, match="was killed by SIGSEGV"):
        open_workload(command("import os; os.kill(os.getpid(), 11)")).query()
    Path("no-magic").write_text("true\n")
    Path("no-magic").chmod(0o755)
    with pytest.raises(TrialError, match="cannot be started"):
        open_workload("cmd:./no-magic").query()


def running(pid: int) -> bool:
    """Return whether a process is there and not merely waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_a_hanging_command_is_killed_with_its_whole_group(folder: Path) -> None:
    """After the timeout neither the command nor what it started is left."""
    with pytest.raises(TrialError, match=r"did not end within 2 s and was killed"):
        open_workload("cmd:sh -c 'sleep 600 & echo $$ $! > pids; wait'", timeout_s=2.0).query()
    pids = [int(text) for text in (folder / "pids").read_text().split()]
    assert len(pids) == 2
    for pid in pids:
        until(lambda pid=pid: not running(pid))


def test_a_command_is_waited_for_where_the_interpreter_cannot_ask_the_kernel_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """PyPy has no waitid: the child's state says that it has ended, and its code is still there to be read."""
    monkeypatch.delattr(os, "waitid")
    workload = open_workload(command("import time; time.sleep(0.3)"))
    assert workload.query().latency_s > 0.3
    with pytest.raises(TrialError, match="exited with code 3"):
        open_workload(command("import sys; sys.exit(3)")).query()


def test_a_command_that_is_interrupted_leaves_nobody_waiting_for_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the interrupt comes: the program ends without it, and so does the command."""
    started: list[threading.Timer] = []

    def start(timer: threading.Timer) -> None:
        begin(timer)
        started.append(timer)
        raise KeyboardInterrupt

    begin = threading.Timer.start
    monkeypatch.setattr(threading.Timer, "start", start)
    with pytest.raises(KeyboardInterrupt):
        open_workload("cmd:sleep 60", timeout_s=60).query()
    (alarm,) = started
    assert alarm.daemon
    assert not alarm.is_alive()


def test_much_output_neither_blocks_nor_grows() -> None:
    """Fifty megabytes on both streams pass by."""
    code = "import os; [os.write(fd, b'x' * 1000000) for fd in (1, 2) for _ in range(25)]"
    assert open_workload(command(code), timeout_s=30).query().items == 1


def test_a_daemon_that_keeps_the_stream_open_does_not_hold_the_query(folder: Path) -> None:
    """The query ends with the command, even if someone who left its group still writes to standard error."""
    code = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid(); open('daemon', 'w').write(str(os.getpid()))\n"
        "    while True: os.write(2, b'x' * 100)\n"
        "while not (os.path.exists('daemon') and os.path.getsize('daemon')): time.sleep(0.001)\n"
    )
    try:
        assert open_workload(command(code), timeout_s=60).query().items == 1
    finally:
        os.kill(int((folder / "daemon").read_text()), 9)


def test_a_command_runs_without_standard_streams() -> None:
    """Closed standard input, output and error of ours change nothing for it."""
    code = (
        "import os, sys; [os.close(fd) for fd in (0, 1, 2)];"
        "from polythrottle.workloads import open_workload;"
        "os._exit(0 if open_workload('cmd:sh -c \"cat; echo a; echo b >&2\"').query().items == 1 else 1)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_busy_time_of_a_command_is_charged() -> None:
    """The estimate of energy sees the processor time of a command that has ended."""
    before_s = busy_s()
    open_workload(command("sum(range(4_000_000))")).query()
    assert busy_s() - before_s > 0.02


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_timeout_must_be_a_time(timeout_s: float) -> None:
    """Zero, negative and endless timeouts are refused."""
    with pytest.raises(InvalidInput, match="timeout"):
        open_workload("cmd:true", timeout_s=timeout_s)
