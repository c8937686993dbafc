"""Torch's archives from strangers: none of them runs code, whatever is put into which member."""

import io
import json
import os
import pickle
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from polythrottle.cli.commands import run
from polythrottle.domain.errors import BadFile, DeviceError
from polythrottle.training.beside.trainer.network import Network
from polythrottle.workloads import open_workload
from polythrottle.workloads.torch_archive import load_export, load_script, load_tensors
from polythrottle.workloads.uris import _names

MARKER = "ran"
CODE = f"__import__('os').mkdir('{MARKER}')"
Change = Callable[[dict[str, Any]], None]


class Payload:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, (MARKER,)


class Net(nn.Module):
    """A layer, a buffer and a constant, for any batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.scale = torch.ones(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, scaled."""
        return torch.nn.functional.gelu(self.layer(x), approximate="tanh") * self.scale


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an honest archive."""
    path = tmp_path_factory.mktemp("honest") / "m.pt2"
    sizes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    torch.export.save(torch.export.export(Net().eval(), (torch.ones(2, 4),), dynamic_shapes=sizes), path)
    return path


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in a folder of its own, in which nothing may have run afterwards."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not (tmp_path / MARKER).exists()


def packed(path: Path, replaced: dict[str, bytes], model: Path) -> Path:
    """Write an archive with some members replaced or added."""
    with zipfile.ZipFile(model) as old, zipfile.ZipFile(path, "w") as new:
        for info in old.infolist():
            name = info.filename.split("/", 1)[1]
            new.writestr(f"m/{name}", replaced.get(name, old.read(info)))
        for name in replaced.keys() - {each.filename.split("/", 1)[1] for each in old.infolist()}:
            new.writestr(f"m/{name}", replaced[name])
    return path


def member(model: Path, name: str) -> dict[str, Any]:
    """Return a document of an archive."""
    with zipfile.ZipFile(model) as archive:
        found: dict[str, Any] = json.loads(archive.read(f"m/{name}"))
    return found


def zipped(value: object) -> bytes:
    """Return what torch.save writes."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def old_format(path: Path, members: dict[str, bytes]) -> Path:
    """Write an archive as torch 2.7 and older did."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("version", "8.1")
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def refused(path: Path) -> str:
    """Return why an archive is refused, as a workload, as a model to train and on the command line."""
    with pytest.raises(BadFile) as caught:
        open_workload(str(path))
    with pytest.raises(BadFile):
        Network(path, trained="head", rank=1, seed=0, device=torch.device("cpu"))
    return str(caught.value)


def test_a_torch_without_exports_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of JetPack 5 that are older than 2.1, in which ``torch.export`` is not there, or loads nothing."""
    monkeypatch.delattr(torch.export, "load")
    with pytest.raises(DeviceError, match=r"m.pt2 needs torch.export, which came with torch 2.1, and torch is .* here"):
        load_export(model)


def test_an_honest_archive_loads(model: Path) -> None:
    """And what torch was told about weights before is as it was."""
    before = os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
    assert load_export(model).module()(torch.ones(3, 4)).shape == (3, 3)
    assert os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD") == before


@pytest.mark.parametrize("name", ["data/sample_inputs/model.pt", "data/weights/model.pt", "data/constants/model.pt"])
@pytest.mark.parametrize("write", [zipped, pickle.dumps], ids=["zip", "bare"])
def test_a_pickled_member_runs_nothing(name: str, write: Callable[[object], bytes], model: Path) -> None:
    """Whichever of those that torch unpickles it is, and in whichever format."""
    assert "evil.pt2" in refused(packed(Path("evil.pt2"), {name: write(Payload())}, model))


@pytest.mark.parametrize("folder", ["weights", "constants"])
def test_a_pickled_tensor_runs_nothing(folder: str, model: Path) -> None:
    """Which torch itself unpickles in full."""
    name = f"data/{folder}/model_{folder}_config.json"
    config = member(model, name)
    first = next(iter(config["config"].values()))
    first["use_pickle"] = True
    members = {name: json.dumps(config).encode(), f"data/{folder}/{first['path_name']}": zipped(Payload())}
    assert "evil.pt2" in refused(packed(Path("evil.pt2"), members, model))


@pytest.mark.parametrize("prefix", ["opaque_obj_0", "custom_obj_0", "../weights/weight_0"])
def test_an_object_of_its_own_class_is_refused(prefix: str, model: Path) -> None:
    """Torch would unpickle it without any limit."""
    name = "data/constants/model_constants_config.json"
    config = member(model, name)
    next(iter(config["config"].values())).update(path_name=prefix, use_pickle=True)
    members = {name: json.dumps(config).encode(), f"data/constants/{prefix}": pickle.dumps(Payload())}
    assert "is refused: it holds" in refused(packed(Path("evil.pt2"), members, model))


@pytest.mark.parametrize("name", ["data/aotinductor/model/model.so", "data/aotinductor/model/model.wrapper.cpp"])
def test_compiled_code_is_refused(name: str, model: Path) -> None:
    """A shared library would be loaded into this process."""
    assert "holds compiled code" in refused(packed(Path("evil.pt2"), {name: b"\x7fELF"}, model))


@pytest.mark.parametrize(
    "name", ["serialized_state_dict.pt", "serialized_constants.pt", "serialized_example_inputs.pt"]
)
@pytest.mark.parametrize("write", [zipped, pickle.dumps], ids=["zip", "bare"])
def test_a_member_of_the_older_format_runs_nothing(name: str, write: Callable[[object], bytes], model: Path) -> None:
    """Torch falls back to unpickling it in full."""
    pickles = {f"serialized_{each}.pt": zipped({}) for each in ("state_dict", "constants", "example_inputs")}
    document = json.dumps(member(model, "models/model.json")).encode()
    members = {"serialized_exported_program.json": document, **pickles, name: write(Payload())}
    assert "evil.pt2" in refused(old_format(Path("evil.pt2"), members))


def _graph(document: dict[str, Any]) -> dict[str, Any]:
    graph: dict[str, Any] = document["graph_module"]["graph"]
    return graph


def _target(text: str) -> Change:
    def change(document: dict[str, Any]) -> None:
        _graph(document)["nodes"][-1]["target"] = text

    return change


def _size(text: str) -> Change:
    def change(document: dict[str, Any]) -> None:
        _graph(document)["tensor_values"]["x"]["sizes"][0] = {"as_expr": {"expr_str": text, "hint": None}}

    return change


def _field(name: str, value: object) -> Change:
    def change(document: dict[str, Any]) -> None:
        document[name] = value

    return change


def _name(document: dict[str, Any]) -> None:
    text = json.dumps(document).replace('{"name": "x"}', json.dumps({"name": f"x={CODE}"}))
    document.update(json.loads(text.replace('"x": {"dtype"', f'"x={CODE}": {{"dtype"')))


def _argument_name(document: dict[str, Any]) -> None:
    document["graph_module"]["module_call_graph"][0]["signature"]["forward_arg_names"] = [f"x={CODE}"]


def _tree(kind: str, context: str) -> Change:
    def change(document: dict[str, Any]) -> None:
        tree = [1, {"type": kind, "context": context, "children_spec": []}]
        document["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = json.dumps(tree)

    return change


ENUM = json.dumps([{"__enum__": True, "fqn": "antigravity:x", "name": "x"}])
FACTORY = json.dumps({"default_factory_module": "os", "default_factory_name": "getcwd", "dict_context": "[]"})
GRAPHS: list[tuple[str, Change]] = [
    ("os", _target("torch.os.system")),
    ("load", _target("torch.load")),
    ("from_file", _target("torch.ops.aten.from_file.default")),
    ("save", _target("torch.ops.aten.save.default")),
    ("methodcaller", _target("_operator.methodcaller")),
    ("library", _target("torch.ops.load_library")),
    ("class", _target("torch.ops.aten.add.__class__.__base__")),
    ("higher", _target("torch.ops.higher_order.print")),
    ("extension", _target("#evil:x")),
    ("size", _size(CODE)),
    ("symbol", _size(f"Symbol({CODE!r}, integer=True)")),
    ("function", _size("sympify('1')")),
    ("attribute", _size("Symbol.__class__")),
    ("comprehension", _size("[x for x in (1, 2)]")),
    ("power", _size("9**9**9**9")),
    ("range", _field("range_constraints", {CODE: {"min_val": 2, "max_val": 64}})),
    ("guard", _field("guards_code", [CODE])),
    ("name", _name),
    ("argument", _argument_name),
    ("enum", _tree("builtins.dict", ENUM)),
    ("factory", _tree("collections.defaultdict", FACTORY)),
    ("tuple", _tree("os.stat_result", "null")),
]


@pytest.mark.parametrize("change", [each for _, each in GRAPHS], ids=[name for name, _ in GRAPHS])
def test_a_graph_that_says_more_than_a_model_is_refused(change: Change, model: Path) -> None:
    """Torch evaluates sizes and bounds, generates code with names, imports types, and calls what is named."""
    document = member(model, "models/model.json")
    change(document)
    path = packed(Path("evil.pt2"), {"models/model.json": json.dumps(document).encode()}, model)
    assert "is refused" in refused(path)


def test_a_graph_nested_without_end_is_refused(model: Path) -> None:
    """In one line, as every other."""
    deep = b'{"graph_module":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    refused(packed(Path("evil.pt2"), {"models/model.json": deep}, model))


def test_an_archive_that_unpacks_without_end_is_refused(model: Path) -> None:
    """Before it is unpacked."""
    with zipfile.ZipFile("evil.pt2", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m/archive_format", "pt2")
        archive.writestr("m/data/weights/weight_0", bytes(50_000_000))
    assert "unpacks to more than" in refused(Path("evil.pt2"))


def test_two_archives_in_one_are_refused(model: Path) -> None:
    """What was looked through must be what torch reads."""
    shutil.copy(model, "evil.pt2")
    with zipfile.ZipFile("evil.pt2", "a") as archive:
        archive.writestr("serialized_exported_program.json", "{}")
    refused(Path("evil.pt2"))


SCRIPTS = {
    "save": 'torch.save(x, "ran")',
    "from_file": 'x = torch.from_file("ran", True, 4)',
    "hidden": 'getattr(torch, "sa\\x76e")(x, "ran")',
    "library": "ops.c10d.barrier(x)",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_torchscript_that_opens_files_is_refused(name: str) -> None:
    """Its operators write and map files although it is no Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(Net()).save("honest.pt")
    assert load_script("honest.pt")(torch.ones(2, 4)).shape == (2, 3)
    with zipfile.ZipFile("honest.pt") as old, zipfile.ZipFile("evil.pt", "w") as new:
        for info in old.infolist():
            data = old.read(info)
            if b"def forward" in data and b"gelu" in data and info.filename.endswith(".py"):
                head, _, rest = data.decode().partition("-> Tensor:\n")
                data = f"{head}-> Tensor:\n    {SCRIPTS[name]}\n{rest}".encode()
            new.writestr(info.filename.replace("honest/", "evil/"), data)
    with pytest.raises(BadFile, match="is refused: its code"):
        open_workload("evil.pt", inputs=["4"])


@pytest.mark.parametrize("data", [zipped(Payload()), pickle.dumps(Payload()), b"", bytes(600)])
def test_tensors_of_a_stranger_run_nothing(data: bytes, here: Path) -> None:
    """The older formats, which torch up to 2.5 unpickled in full, are not read."""
    (here / "t.pt").write_bytes(data)
    for file in (data, here / "t.pt"):
        with pytest.raises(Exception, match=r"archive|pickle|Weights only"):
            load_tensors(file)


def test_a_hostile_model_is_one_line_on_the_command_line(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the exit code of a bad file."""
    packed(Path("evil.pt2"), {"data/sample_inputs/model.pt": zipped(Payload())}, model)
    assert run(["measure", "-d", "cpu", "-w", "evil.pt2"]) == 4
    shown = capsys.readouterr()
    assert (shown.out, len(shown.err.splitlines())) == ("", 1)


@pytest.mark.parametrize("load", [load_export, load_script, load_tensors, _names], ids=lambda load: load.__name__)
def test_a_pipe_is_not_waited_for(load: Callable[..., object], tmp_path: Path) -> None:
    """Nor is the kernel's own file: both are told before anything opens them."""
    os.mkfifo(tmp_path / "m.pt")
    for path in (tmp_path / "m.pt", Path("/proc/kmsg")):
        with pytest.raises(BadFile, match="no plain file"):
            load(path)
