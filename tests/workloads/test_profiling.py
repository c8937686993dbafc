"""Describing models for simulated boards: what is counted, where it comes from, and what is refused."""

import json
import shlex
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from polythrottle.catalog import load_model
from polythrottle.cli.commands import run
from polythrottle.domain.backports import tomllib
from polythrottle.domain.errors import BadFile, InvalidInput, TrialError, UnknownName
from polythrottle.inspect.descriptions import Description, profile_model
from polythrottle.workloads.graph_operators import Access, Graph, Sketch, Tensor, count, fuse

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64

CODE = """
import torch
from torch import nn

class Inplace(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("cache", torch.zeros(4, 8))
    def forward(self, x):
        y = self.layer(x)
        y.relu_().mul_(2)
        store = self.cache.clone()
        store[: len(y)] = y
        return store @ y.T

class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(100_000, 4)
        self.layer = nn.Linear(4, 4)
    def forward(self, ids):
        return self.layer(self.rows(ids))

def plain(): return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
def half(): return nn.Linear(8, 8).half()
def attention(): return nn.MultiheadAttention(8, 2, batch_first=True)
def nothing(): return nn.ReLU()
def sums(batch_size): return batch_size
def inference():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 4)
        @torch.inference_mode()
        def forward(self, x):
            print("to standard output")
            return self.layer(x)
    return Net()
def quantised():
    class Net(nn.Module):
        def forward(self, x):
            return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize()
    return Net()
def sparse():
    class Net(nn.Module):
        def forward(self, x):
            return x.to_sparse() @ x.T
    return Net()
class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.MultiheadAttention(16, 4, batch_first=True)
    def forward(self, x):
        return self.layer(x, x, x, need_weights=False)[0]
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Put a module of small networks into the working folder, under a name of its own."""
    name = f"nets_{abs(hash(tmp_path)):x}"
    (tmp_path / f"{name}.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def written(found: Description, path: str = "my.toml") -> str:
    """Write a description and return its path."""
    Path(path).write_text(found.text())
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "inputs", "operations", "parameters"),
    [
        # Multiply-adds and parameters as torchvision lists them for its own models; BERT: arXiv 1810.04805.
        ("resnet50", "3x224x224", 2 * 4.09e9, 25_557_032),
        ("efficientnet_b0", "3x224x224", 2 * 0.39e9, 5_288_548),
        ("efficientnet_b4", "3x380x380", 2 * 4.39e9, 19_341_616),
        ("bert", "384:int64", 7.07e10, 109e6),
    ],
)
def test_published_networks_are_counted_as_published(
    network: str, inputs: str, operations: float, parameters: float
) -> None:
    """Multiply-adds agree with the literature within 2 % (its own rounding), parameters to its last digit."""
    found = profile_model(f"networks:{network}", inputs=[inputs])
    assert found.figures()["operations"] == pytest.approx(operations, rel=0.02)
    assert found.graph.parameters == pytest.approx(parameters, rel=1e-12 if isinstance(parameters, int) else 2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "inputs", "name", "share"),
    [
        ("resnet50", "3x224x224", "resnet50", 1),
        ("efficientnet_b0", "3x224x224", "efficientnet-b0", 1),
        ("efficientnet_b4", "3x380x380", "efficientnet-b4", 1),
        ("bert", "384:int64", "bert-base-fp32", 1),
        # The shipped file has the input weights read at every step too; torch multiplies all steps by them at once.
        ("lstm", "100x1024", "lstm", 0.5),
    ],
)
def test_counts_agree_with_the_shipped_descriptions(network: str, inputs: str, name: str, share: float) -> None:
    """What the shipped files took from the literature comes out within 5 %, and kernels within a factor of 1.8."""
    shipped = load_model(name)
    found = profile_model(f"networks:{network}", inputs=[inputs], precision=shipped.precision).figures()
    assert found["operations"] == pytest.approx(shipped.operations, rel=0.05)
    assert found["weight_bytes"] == pytest.approx(share * shipped.weight_bytes, rel=0.05)
    assert 1 / 1.8 < found["kernels"] / shipped.kernels < 1.8


def test_traffic_of_a_small_network_is_what_paper_and_pencil_give(module: str) -> None:
    """Two kernels: normalisation and activation ride on the convolution before them."""
    found = profile_model(f"{module}:plain", inputs=["3x8x8"], batch_size=2, precision="fp16")
    counts = found.counts
    assert counts.kernels == counts.tensors == 2
    assert counts.operations == 2 * 2 * 64 * (4 * 27 + 2 * 4)
    given, middle, end = 2 * 3 * 64, 2 * 4 * 64, 2 * 2 * 64
    assert counts.traffic_bytes == 2 * (given + middle + middle + end)
    assert counts.unfused_bytes == 2 * (given + 6 * middle + end)
    assert counts.weight_bytes == 2 * (4 * 27 + 4 + 4 * 4 + 2 * 4 + 2)
    assert counts.peak_bytes == 2 * (given + middle)
    assert found.figures()["traffic_bytes"] == counts.traffic_bytes / 2


def test_bytes_follow_the_precision_and_operations_do_not(module: str) -> None:
    """Half the width moves half the bytes; the default is the precision the weights are in."""
    uri, wide = f"{module}:plain", profile_model(f"{module}:plain", inputs=["3x8x8"])
    assert wide.precision == "fp32"
    assert profile_model(f"{module}:half", inputs=["8:float16"]).precision == "fp16"
    for precision, share in (("fp16", 2), ("int8", 4)):
        narrow = profile_model(uri, inputs=["3x8x8"], precision=precision).counts
        assert narrow.operations == wide.counts.operations
        assert narrow.weight_bytes * share == wide.counts.weight_bytes
        assert narrow.traffic_bytes * share == wide.counts.traffic_bytes


def test_operators_in_place_and_views_are_no_copies(module: str) -> None:
    """Writing into a buffer moves what is written, and a transposed view nothing."""
    counts = profile_model(f"{module}:Inplace", inputs=["8"], batch_size=3).counts
    assert counts.operations == 2 * 3 * 8 * 8 + 2 * 4 * 8 * 3
    # The layer reads x and writes y and the slice of the buffer; the product reads buffer and y.
    assert counts.kernels == 2


def test_rows_of_a_table_count_and_the_table_does_not(module: str) -> None:
    """A lookup moves the rows it picks, more of them in a larger batch."""
    one, four = (profile_model(f"{module}:Table", inputs=["5:int64"], batch_size=n).counts for n in (1, 4))
    assert one.weight_bytes == four.weight_bytes == 4 * (4 * 4 + 4)
    assert one.traffic_bytes == 5 * 8 + 4 * (5 * 4 * 4)
    assert four.traffic_bytes == 4 * one.traffic_bytes


def test_attention_is_counted_as_two_products(module: str) -> None:
    """Projections, and queries times keys and weights times values, whichever kernel torch takes."""
    found = profile_model(f"{module}:Attending", inputs=["6x16"])
    assert found.counts.operations == 2 * 6 * 16 * (3 * 16 + 16) + 2 * 2 * 6 * 6 * 16


def test_a_module_may_enter_inference_mode_and_print(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    """There torch hands over whole layers, which are taken apart; the document has standard output to itself."""
    assert run(["profile-model", f"{module}:inference", "--input", "8", "--json"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["operations"] == 2 * 8 * 4
    assert found["workload"] == f"profiles/workloads/{module}-inference.toml"


def sketch(*steps: tuple[str, tuple[int, ...], int, bool]) -> Graph:
    """Return a graph of an input of 100 values and steps (name, what they read, values made, pointwise)."""
    drawn = Sketch()
    drawn.feed(Tensor(100))
    for name, reads, made, pointwise in steps:
        accesses = [Access(place, drawn.tensors[place].elements) for place in reads]
        drawn.step(name, accesses, [Tensor(made)], pointwise=pointwise)
    return drawn.finished([len(drawn.tensors) - 1], None)


def test_a_residual_sum_rides_on_its_last_part_and_a_broadcast_product_on_nothing() -> None:
    """Fusion joins what is as large as the result; a small factor's kernel cannot make the large product."""
    sums = sketch(("conv", (0,), 100, False), ("conv", (1,), 100, False), ("add", (2, 1), 100, True))
    assert [[step.name for step in group] for group in fuse(sums)] == [["conv"], ["conv", "add"]]
    gate = sketch(("conv", (0,), 100, False), ("mean", (1,), 1, False), ("mul", (1, 2), 100, True))
    assert [[step.name for step in group] for group in fuse(gate)] == [["conv"], ["mean"], ["mul"]]
    assert count(gate, 4).traffic_bytes == 4 * (100 + 100 + 100 + 1 + 100 + 1 + 100)


def test_what_is_known_before_the_first_query_costs_nothing() -> None:
    """A step that reads constants alone makes a constant."""
    drawn = Sketch()
    weight = drawn.add(Tensor(10, constant=True))
    (made,) = drawn.step("transpose", [Access(weight, 10)], [Tensor(10)])
    assert drawn.tensors[made].constant
    assert not drawn.operators


def onnx_file(
    nodes: list[onnx.NodeProto],
    shape: list[object],
    weights: dict[str, tuple[int, ...]] | None = None,
    *,
    outputs: tuple[str, ...] = ("y",),
    opset: int = 17,
    extra: dict[str, np.ndarray[Any, Any]] | None = None,
) -> str:
    """Write an ONNX file with one input x and return its path."""
    arrays = {name: np.ones(size, dtype=np.float32) for name, size in (weights or {}).items()} | (extra or {})
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", FLOAT, shape)],
        [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    onnx.save(model, "m.onnx")
    return "m.onnx"


def node(kind: str, inputs: str, outputs: str = "y", **attributes: object) -> onnx.NodeProto:
    """Return a node; names are separated by blanks."""
    return helper.make_node(kind, inputs.split(), outputs.split(), **attributes)


@pytest.mark.parametrize(
    ("made", "shape", "weights", "operations"),
    [
        (node("Conv", "x w", pads=[1] * 4, group=2), ["n", 4, 8, 8], {"w": (6, 2, 3, 3)}, 2 * 6 * 64 * 2 * 9),
        (node("ConvTranspose", "x w", strides=[2, 2]), ["n", 4, 8, 8], {"w": (4, 3, 2, 2)}, 2 * 4 * 64 * 3 * 4),
        (node("Gemm", "x w", transB=1), ["n", 32], {"w": (10, 32)}, 2 * 10 * 32),
        (node("MatMul", "x w"), ["n", 7, 32], {"w": (32, 5)}, 2 * 7 * 5 * 32),
        (node("Einsum", "x w", equation="b...i,io->b...o"), ["n", 7, 32], {"w": (32, 5)}, 2 * 7 * 5 * 32),
        (node("Attention", "x x x", q_num_heads=2, kv_num_heads=2), ["n", 6, 16], {}, 2 * 2 * 6 * 6 * 16),
    ],
    ids=lambda value: value.op_type if isinstance(value, onnx.NodeProto) else "",
)
def test_an_onnx_operator_is_counted_by_its_definition(
    made: onnx.NodeProto, shape: list[object], weights: dict[str, tuple[int, ...]], operations: int
) -> None:
    """Formulas against figures worked out by hand, for one item and, per item, for three."""
    path = onnx_file([made], shape, weights, opset=23)
    for items in (1, 3):
        found = profile_model(path, batch_size=items)
        assert found.figures()["operations"] == operations
        assert found.counts.weight_bytes == 4 * sum(int(np.prod(size)) for size in weights.values())


def test_a_recurrent_onnx_layer_reads_its_state_weights_at_every_step() -> None:
    """Input weights are read once, those of the state once per step."""
    lstm = helper.make_node("LSTM", ["x", "w", "r"], ["y"], hidden_size=8)
    found = profile_model(onnx_file([lstm], [5, "n", 4], {"w": (1, 32, 4), "r": (1, 32, 8)}), inputs=["1x4"])
    assert found.counts.operations == 2 * 5 * (32 * 4 + 32 * 8)
    assert found.counts.weight_bytes == 4 * (32 * 4 + 5 * 32 * 8)


def test_shapes_that_an_onnx_graph_computes_are_followed() -> None:
    """A reshape to what a chain of operators makes of the input's own shape is no obstacle."""
    nodes = [
        *(node("Shape", "x", "s"), node("Gather", "s zero", "n"), node("Unsqueeze", "n first", "nu")),
        *(node("Concat", "nu rest", "to", axis=0), node("Reshape", "x to", "r"), node("MatMul", "r w")),
    ]
    extra = {name: np.array(value) for name, value in {"zero": 0, "first": [0], "rest": [4, 8]}.items()}
    found = profile_model(onnx_file(nodes, ["n", 32], {"w": (8, 3)}, extra=extra))
    assert found.counts.operations == 2 * 4 * 3 * 8
    assert found.counts.kernels == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "Attending"])
def test_an_exported_network_counts_as_the_module_it_came_from(module: str, name: str) -> None:
    """Operations agree exactly between torch, pt2, TorchScript and ONNX."""
    uri, shape = f"{module}:{name}", {"plain": (3, 8, 8), "Attending": (6, 16)}[name]
    made = getattr(__import__(module), name)().eval()
    example = torch.zeros(2, *shape)
    written_shape = "x".join(map(str, shape))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all three ways to export warn about things of their own
        batch = torch.export.Dim("batch", min=1, max=64)
        torch.export.save(torch.export.export(made, (example,), dynamic_shapes=({0: batch},)), "m.pt2")
        torch.jit.trace(made, example, check_trace=False).save("m.pt")
        axes = {"x": {0: "n"}}
        torch.onnx.export(made, (example,), "m.onnx", dynamo=False, input_names=["x"], dynamic_axes=axes)
    operations = profile_model(uri, inputs=[written_shape]).figures()["operations"]
    for path, inputs in (("m.pt2", []), ("m.pt", [written_shape]), ("m.onnx", [])):
        found = profile_model(path, inputs=inputs, batch_size=2)
        assert found.figures()["operations"] == operations
        assert found.graph.parameters >= sum(each.numel() for each in made.parameters()) * 0.9


def test_a_model_with_a_fixed_batch_is_described_with_that_batch(capsys: pytest.CaptureFixture[str]) -> None:
    """Figures are per item all the same, and a simulated board serves it in no other batch."""
    path = onnx_file([node("MatMul", "x w")], [4, 32], {"w": (32, 5)})
    found = profile_model(path)
    assert (found.batch_size, found.batch_sizes) == (4, (4,))
    assert found.figures()["operations"] == 2 * 32 * 5
    model = load_model(written(found))
    assert (model.batch_sizes, model.batch_default) == ((4,), 4)
    with pytest.raises(InvalidInput, match="exported with a batch of 4"):
        profile_model(path, batch_size=2)


def test_every_figure_of_the_file_says_where_it_comes_from(module: str) -> None:
    """Counted figures name model, framework and version; what cannot be counted is called assumed or left at 0."""
    path = written(profile_model(f"{module}:plain", inputs=["3x8x8"], precision="fp16"))
    assert load_model(path).title == f"{module}:plain, 3 × 8 × 8, FP16"
    document = tomllib.loads(Path(path).read_text())
    source = document["source"]
    for name in ("operations", "weight_bytes", "traffic_bytes", "memory_item_bytes", "kernels"):
        assert source[name].startswith(
            f"counted by polythrottle profile-model in {module}:plain with torch {version('torch')}"
        )
    for name in ("parallelism", "handoff_cycles", "memory_bytes"):
        assert source[name].startswith("assumed")
    assert document["efficiency"]["source"].startswith("assumed")
    assert document["preprocess_cycles"] == 0
    assert source["preprocess_cycles"].startswith("left at 0")
    assert "without any fusion" in source["traffic_bytes"]


@pytest.mark.slow
def test_a_new_model_is_tuned_on_a_simulated_board(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    """From a module to a tuned point in two commands, the second with the file's path as the workload."""
    assert run(["profile-model", f"{module}:plain", "--input", "3x224x224", "--out", "./my.toml"]) == 0
    told = capsys.readouterr().out
    program, *words = shlex.split(told.partition("tune it")[2].replace("\\\n", ""))
    assert program == "polythrottle"
    assert run([*words, "--trials", "3", "--no-presets", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["workload"] == "my.toml"
    assert found["best"]["feasible"]


def test_what_is_told_fits_a_terminal_and_a_pipe(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    """80 columns, and no blanks behind the text."""
    assert run(["profile-model", f"{module}:Attending", "--input", "6x16", "--out", "my.toml"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line != line.rstrip()] == []


@pytest.mark.slow
def test_a_board_serves_int8_only_where_its_rate_is_known(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Orin takes it in less time than half precision; TX2, which has no such units, is refused in one line."""
    times = {}
    for precision in ("fp16", "int8"):
        path = written(
            profile_model("networks:resnet50", inputs=["3x224x224"], precision=precision), f"{precision}.toml"
        )
        assert run(["measure", "--device", "sim:jetson-agx-orin?noise=0", "--workload", path, "--json"]) == 0
        times[precision] = json.loads(capsys.readouterr().out)["latency_s"]["mean"]
    assert times["int8"] < times["fp16"]
    assert run(["measure", "--device", "sim:jetson-tx2", "--workload", "int8.toml"]) == 2
    assert "no rate for int8" in capsys.readouterr().err


def test_a_file_that_is_there_is_kept(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is counted; --force replaces it."""
    words = ["profile-model", f"{module}:plain", "--input", "3x8x8", "--out", "my.toml"]
    Path("my.toml").write_text("mine")
    assert run(words) == 8
    assert "--force" in capsys.readouterr().err
    assert Path("my.toml").read_text() == "mine"
    assert run([*words, "--force"]) == 0
    assert load_model("my.toml").operations > 0


BAD: dict[str, tuple[list[str], int, str]] = {
    "no such module": (["nowhere:model"], 2, "no module"),
    "no such callable": (["{m}:plane"], 3, "did you mean plain"),
    "not a module": (["{m}:sums"], 2, "not a torch module"),
    "a command": (["cmd:sleep 1"], 2, "cannot be looked into"),
    "a service": (["openai://localhost:1/m"], 2, "cannot be looked into"),
    "a description": (["resnet50.toml"], 2, "cannot be looked into"),
    "a name": (["resnet50"], 2, "is not a workload"),
    "no shape": (["{m}:plain"], 2, "--input 3x224x224"),
    "a shape that does not fit": (["{m}:plain", "--input", "5x8x8"], 7, "model raised RuntimeError"),
    "a malformed shape": (["{m}:plain", "--input", "big"], 2, "is not an input's shape"),
    "no batch": (["{m}:plain", "--input", "3x8x8", "--batch", "0"], 2, "at least 1"),
    "an unknown precision": (["{m}:plain", "--input", "3x8x8", "--precision", "fp7"], 2, "fp32, fp16, int8"),
    "nothing to count": (["{m}:nothing", "--input", "3"], 2, "computes nothing that can be counted"),
    "a quantised module": (["{m}:quantised", "--input", "3"], 2, "quantised"),
    "a sparse module": (["{m}:sparse", "--input", "3"], 2, "sparse"),
    "no file": (["none.onnx"], 4, "there is no file"),
    "no graph": (["bad.onnx"], 4, "not an ONNX model"),
    "an empty graph": (["empty.onnx"], 4, "not an ONNX model"),
    "no export": (["none.pt2"], 4, "none.pt2"),
    "not a workload file": (["{m}:plain", "--input", "3x8x8", "--out", "my.txt"], 2, ".toml"),
    "no folder": (["{m}:plain", "--input", "3x8x8", "--out", "bad.onnx/my.toml"], 8, "cannot be written"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line(module: str, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Whatever is wrong, one line says so, nothing is on standard output, and no file is left."""
    Path("bad.onnx").write_bytes(b"\x08\x07not a model at all" * 9)
    Path("empty.onnx").write_bytes(b"")
    words, code, text = BAD[name]
    assert run(["profile-model", *(word.format(m=module) for word in words)]) == code
    printed = capsys.readouterr()
    assert text in printed.err
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert not list(Path().rglob("*.toml"))


TIMES = {"times": np.array(3), "go": np.array(True)}


def loop() -> onnx.NodeProto:
    """Return a node that multiplies x with w several times."""
    names = [("i", INT64, []), ("more", TensorProto.BOOL, []), ("s", FLOAT, None), ("t", FLOAT, None)]
    i, more, s, t = (helper.make_tensor_value_info(*each) for each in names)
    kept = helper.make_tensor_value_info("kept", TensorProto.BOOL, [])
    body = helper.make_graph(
        [node("Identity", "more", "kept"), node("MatMul", "s w", "t")], "b", [i, more, s], [kept, t]
    )
    return node("Loop", "times go x", body=body)


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (lambda: onnx_file([node("MatMul", "x w")], ["n", "k"], {"w": (8, 3)}), InvalidInput, "--input x=128"),
        (lambda: onnx_file([node("MatMul", "x w")], ["n", 9], {"w": (8, 3)}), InvalidInput, "do not fit together"),
        (lambda: onnx_file([node("MatMul", "z w")], ["n", 8], {"w": (8, 3)}), BadFile, "nothing makes 'z'"),
        (
            lambda: onnx_file([node("NonZero", "x", "i"), node("Cast", "i", "y", to=FLOAT)], ["n", 8]),
            InvalidInput,
            "not known before the model runs",
        ),
        (
            lambda: onnx_file(
                [node("QuantizeLinear", "x s", "q"), node("DequantizeLinear", "q s")], ["n", 8], {"s": ()}
            ),
            InvalidInput,
            "quantised operators",
        ),
        (lambda: onnx_file([node("Magic", "x")], ["n", 8]), InvalidInput, "not one onnx knows"),
        (lambda: onnx_file([loop()], ["n", 8], {"w": (8, 8)}, extra=TIMES), InvalidInput, "unroll it"),
    ],
    ids=["symbol", "misfit", "torn", "data", "quantised", "unknown", "loop"],
)
def test_an_onnx_graph_that_cannot_be_counted_is_refused(
    build: Callable[[], str], error: type[Exception], text: str
) -> None:
    """Dimensions that are not fixed, parts that do not fit, sizes that follow from the data, quantised operators."""
    with pytest.raises(error, match=text):
        profile_model(build())


def test_an_input_that_the_model_has_not_is_named(module: str) -> None:
    """With the names there are; a module that raises is quoted."""
    path = onnx_file([node("MatMul", "x w")], ["n", "k"], {"w": (8, 3)})
    with pytest.raises(UnknownName, match="x"):
        profile_model(path, inputs=["y=8"])
    assert profile_model(path, inputs=["x=8"]).counts.operations == 2 * 8 * 3
    with pytest.raises(TrialError, match=f"{module}:plain: model raised"):
        profile_model(f"{module}:plain", inputs=["3"])
