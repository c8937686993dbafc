"""Files of strangers that are small and ask for much, or lead elsewhere: one line, a bound on memory, and no code."""

import base64
import gzip
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from polythrottle.catalog.boards import load_board
from polythrottle.catalog.documents import read_archive
from polythrottle.cli.commands import run
from polythrottle.domain.errors import BadFile, InvalidInput, PolythrottleError
from polythrottle.domain.space import Knob, SearchSpace
from polythrottle.storage import tables
from polythrottle.storage.journal.reader import read
from polythrottle.training.beside.trainer.worker import Unreadable, read_sample
from polythrottle.workloads import open_workload

ROOT = Path(__file__).resolve().parent.parent
JOURNAL = ROOT / "tests/data/journal-v2.jsonl"
BOARD = ROOT / "devices/jetson-nano.toml"
ROOM_MB = 256
"""What a reader may take beside what its libraries take already."""

LIMITED = """
import resource, sys
from pathlib import Path
from polythrottle.storage import tables
from polythrottle.catalog.boards import load_board
from polythrottle.domain.errors import PolythrottleError
from polythrottle.storage.journal.reader import read
import numpy, pandas
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + int(sys.argv[2]) * 1_000_000,) * 2)
path = Path(sys.argv[3])
try:
    {"table": tables.read, "journal": read, "board": lambda path: load_board(str(path)).space()}[sys.argv[1]](path)
except PolythrottleError as err:
    print(type(err).__name__, err)
"""


def limited(reader: str, path: Path) -> str:
    """Return what a reader says of a file in a process that has little more memory than its libraries take."""
    words = [sys.executable, "-c", LIMITED, reader, str(ROOM_MB), str(path)]
    one = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    told = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False, env={**os.environ, **one})
    assert told.returncode == 0, told.stderr[-600:]
    return told.stdout


def zeros(path: Path, head: bytes, unit: bytes, times: int) -> Path:
    """Write a gzip file of a head and a unit that is repeated, without it being held."""
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(head)
        block = unit * max(1, 1_000_000 // len(unit))
        for _ in range(times * len(unit) // len(block)):
            file.write(block)
    return path


@pytest.mark.slow
def test_a_table_that_unpacks_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is one field, rows that are empty, long rows, or fields that a spreadsheet would quote."""
    monkeypatch.setattr(tables, "_MOST_UNPACKED", 5_000_000)
    said = {}
    for name, unit in {"field": b"1", "empty": b"\n", "long": b"1," * 400_000 + b"\n", "quoted": b'"\n'}.items():
        path = zeros(tmp_path / f"{name}.csv.gz", b"a,b\n1,2\n", unit, 12_000_000 // len(unit))
        assert path.stat().st_size < 100_000
        with pytest.raises(BadFile) as caught:
            tables.read(path)
        said[name] = str(caught.value)
    assert "line of more than" in said["field"]
    assert "unpacks to more than" in said["empty"]


@pytest.mark.slow
def test_a_wide_first_row_does_not_make_every_row_wide(tmp_path: Path) -> None:
    """Which would be a thousand million empty cells."""
    path = tmp_path / "t.csv"
    path.write_text("a,b\n" + "1," * 20_000 + "\n" + "1,2\n" * 50_000)
    assert "more than 10,000 fields" in limited("table", path)
    path.write_text("a," * 20_000 + "\n1\n")
    with pytest.raises(BadFile, match="columns"):
        tables.read(path, loose=True)


def journal(path: Path, change: Callable[[dict[str, object]], None]) -> Path:
    """Write a journal whose first line is changed."""
    line = json.loads(JOURNAL.read_text().splitlines()[0])
    change(line)
    path.write_text(json.dumps(line) + "\n")
    return path


@pytest.mark.slow
def test_a_journal_cannot_unpack_to_more_than_it_says(tmp_path: Path) -> None:
    """Four megabytes of text could be gigabytes of points."""
    squeezer = zlib.compressobj(1)
    packed = b"".join(squeezer.compress(bytes(10_000_000)) for _ in range(30)) + squeezer.flush()

    def change(line: dict[str, object]) -> None:
        assert isinstance(line["space"], dict)
        line["space"]["rows"] = base64.b64encode(packed).decode()

    assert "holds more than it says" in limited("journal", journal(tmp_path / "j.jsonl", change))


@pytest.mark.slow
def test_a_journal_cannot_say_that_it_is_large(tmp_path: Path) -> None:
    """Its points are counted before they are unpacked."""

    def change(line: dict[str, object]) -> None:
        assert isinstance(line["space"], dict)
        line["space"]["size"] = 10**9

    assert "more than 1,000,000" in limited("journal", journal(tmp_path / "j.jsonl", change))


@pytest.mark.slow
def test_three_knobs_of_four_thousand_levels_are_never_multiplied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The product is refused in one line, with the exit code of what is malformed."""
    text = re.sub(
        r"(?ms)^\[+(presets|ordered|dependent).*?(?=^\[(?!\[?(presets|ordered|dependent))|\Z)", "", BOARD.read_text()
    )
    head, _, rest = text.partition("[knobs.")
    knobs = "".join(
        f'[knobs.{name}]\nrange = [1, 4000, 1]\ndefault = 4000\nsearch = true\nsource = "assumed"\n\n'
        for name in ("gpu_max_mhz", "cpu_max_mhz", "mem_mhz")
    )
    after = rest[rest.index("\n[rails") + 1 :] if "\n[rails" in rest else ""
    path = tmp_path / "wide.toml"
    path.write_text(head + knobs + after)
    assert "combinations of levels are more than" in limited("board", path)
    monkeypatch.chdir(tmp_path)
    assert run(["measure", "-d", f"sim:{path}", "-w", "resnet50"]) == 2
    shown = capsys.readouterr()
    assert (shown.out, len(shown.err.splitlines())) == ("", 1)


def test_a_knob_has_no_more_levels_than_a_driver_could(tmp_path: Path) -> None:
    """A range is counted before it is gone through."""
    path = tmp_path / "wide.toml"
    path.write_text(
        '[knobs.gpu_max_mhz]\nrange = [1, 1e12, 0.001]\ndefault = 4000\nsearch = true\nsource = "assumed"\n'
    )
    with pytest.raises(BadFile, match="more than 10,000 levels"):
        load_board(str(path))


def test_a_product_of_spaces_is_bounded() -> None:
    """Before it is built."""
    space = SearchSpace.grid([Knob("a", tuple(range(2000)))], {"a": 0})
    with pytest.raises(InvalidInput, match="more than 1,000,000"):
        _ = space * SearchSpace.grid([Knob("b", tuple(range(2000)))], {"b": 0})


def onnx_model(path: Path, location: str | None, operator: str = "Add", domain: str = "") -> Path:
    """Write a model whose weights lie where it is said."""
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4])
    if location is None:
        weight.raw_data = bytes(16)
    else:
        weight.data_location = TensorProto.EXTERNAL
        for key, value in {"location": location, "offset": "0", "length": "16"}.items():
            weight.external_data.add(key=key, value=value)
    sides = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in "xy"]
    node = helper.make_node(operator, ["x", "w"], ["y"], domain=domain)
    graph = helper.make_graph([node], "g", sides[:1], sides[1:], [weight])
    sets = [helper.make_opsetid("", 17), *([helper.make_opsetid(domain, 1)] if domain else [])]
    path.write_bytes(helper.make_model(graph, opset_imports=sets, ir_version=8).SerializeToString())
    return path


def test_an_onnx_model_keeps_its_weights_beside_it(tmp_path: Path) -> None:
    """In a file of its own folder, or in itself."""
    (tmp_path / "w.bin").write_bytes(bytes(16))
    for location in (None, "w.bin", "./w.bin"):
        open_workload(str(onnx_model(tmp_path / "m.onnx", location))).close()


@pytest.mark.parametrize(
    "location", ["../../../etc/passwd", "/etc/passwd", "/dev/zero", "a/../../w.bin", "*/_ORT_MEM_ADDR_/*", "link", ""]
)
def test_an_onnx_model_whose_weights_lie_elsewhere_is_refused(location: str, tmp_path: Path) -> None:
    """By a path that leads out, a link that does, a device, or an address in memory."""
    (tmp_path / "link").symlink_to("/etc/passwd")
    path = onnx_model(tmp_path / "m.onnx", location)
    with pytest.raises(BadFile, match=r"refused|not there"):
        open_workload(str(path))
    assert run(["profile-model", str(path)]) == 4


def test_weights_in_a_constant_of_a_subgraph_are_seen(tmp_path: Path) -> None:
    """Wherever a tensor may stand."""
    inner = onnx.load(onnx_model(tmp_path / "m.onnx", "../w.bin"), load_external_data=False)
    node = helper.make_node("If", ["c"], ["z"], then_branch=inner.graph, else_branch=inner.graph)
    sides = [helper.make_tensor_value_info("c", TensorProto.BOOL, [1])]
    graph = helper.make_graph([node], "outer", sides, [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)])
    (tmp_path / "m.onnx").write_bytes(helper.make_model(graph, ir_version=8).SerializeToString())
    with pytest.raises(BadFile, match="outside its own folder"):
        open_workload(str(tmp_path / "m.onnx"))


def test_an_operator_of_another_library_is_not_looked_for(tmp_path: Path) -> None:
    """A model cannot name a library to load; one that needs one does not load."""
    path = onnx_model(tmp_path / "m.onnx", None, "Evil", "evil.example")
    with pytest.raises(BadFile, match="not an ONNX model that runs here"):
        open_workload(str(path))


def _member(kind: bytes, name: str, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.parametrize(
    "info",
    [
        _member(tarfile.REGTYPE, "../x"),
        _member(tarfile.REGTYPE, "/etc/x"),
        _member(tarfile.SYMTYPE, "x", "/etc/passwd"),
        _member(tarfile.SYMTYPE, "x", "../../etc/passwd"),
        _member(tarfile.LNKTYPE, "x", "/etc/passwd"),
        _member(tarfile.CHRTYPE, "x"),
        _member(tarfile.BLKTYPE, "x"),
        _member(tarfile.FIFOTYPE, "x"),
    ],
    ids=lambda info: f"{info.type!r}-{info.name}",
)
def test_an_archive_of_a_board_leads_nowhere(info: tarfile.TarInfo, tmp_path: Path) -> None:
    """Paths, links and devices that lead out are refused, and nothing is laid down."""
    path = tmp_path / "b.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        tar.addfile(info)
    with pytest.raises(BadFile):
        read_archive(path)
    assert run(["snapshot", "--unpack", str(path), "--out", str(tmp_path / "o")]) == 4
    assert not (tmp_path / "o").exists()


def test_an_archive_of_a_board_does_not_unpack_without_end(tmp_path: Path) -> None:
    """A bomb is refused once it is past what a board can hold."""
    info = tarfile.TarInfo("x")
    info.size = 80_000_000
    path = zeros(tmp_path / "b.tar.gz", info.tobuf(), bytes(1_000_000), 80)
    with pytest.raises(BadFile, match="MB"):
        read_archive(path)


def test_a_sample_that_claims_to_be_huge_is_refused(tmp_path: Path) -> None:
    """As one that is pickled is, whatever it would run."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (2**50,)})
    (tmp_path / "x.npy").write_bytes(file.getvalue())
    (tmp_path / "y.npy").write_bytes(
        b"\x93NUMPY\x01\x00v\x00" + b"{'descr': '|O', 'fortran_order': False, 'shape': ()}"
    )
    for name in ("x.npy", "y.npy"):
        with pytest.raises((Unreadable, MemoryError)):
            read_sample(tmp_path / name)


DEEP = {"j.jsonl": b"[" * 200_000, "b.toml": b"x = " + b"[" * 200_000, "n.toml": b"x = " + b"9" * 5_000}


@pytest.mark.parametrize("name", DEEP)
def test_what_is_nested_or_counted_without_end_is_one_line(name: str, tmp_path: Path) -> None:
    """In JSON and in TOML."""
    path = tmp_path / name
    path.write_bytes(DEEP[name])
    with pytest.raises(PolythrottleError):
        read(path) if name.endswith("l") and "j" in name else load_board(str(path))
