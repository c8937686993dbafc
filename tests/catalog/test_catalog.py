"""The catalogue: what is shipped parses, says where its figures come from, and bad files are refused in one line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polythrottle.catalog import Board, is_language_model, load_board, load_model, names
from polythrottle.catalog.documents import catalogue_dir
from polythrottle.domain.backports import tomllib
from polythrottle.domain.errors import BadFile, InvalidInput, UnknownName

BOARDS = tuple(names("devices"))
NAMES = tuple(names("profiles/workloads"))
MODELS = tuple(name for name in NAMES if not is_language_model(name))
JETSONS = tuple(name for name in BOARDS if name.startswith("jetson"))


def test_every_promised_board_and_model_is_shipped() -> None:
    """The catalogue holds eight Jetsons, five cards, and the models of the published evaluations."""
    jetsons = {"nano", "tx2", "agx-xavier", "xavier-nx", "orin-nano", "orin-nx", "agx-orin", "thor"}
    assert {f"jetson-{name}" for name in jetsons} | {"v100", "a100", "h100", "l4", "a40"} <= set(BOARDS)
    networks = {"efficientnet-b0", "efficientnet-b4", "efficientnet-b7", "bert-base-fp16", "bert-base-fp32"}
    assert networks | {"resnet50", "inceptionv3", "mobilenetv2", "yolo-small", "lstm", "llm-7b-decode"} <= set(MODELS)


@pytest.mark.parametrize("name", BOARDS)
def test_a_shipped_board_holds_together(name: str) -> None:
    """A board has a title, a search space with its default in it, rails, presets and figures to simulate it with."""
    board = load_board(name)
    space = board.space()
    assert board.title
    assert space.default in space
    assert 100 <= len(space) <= 1200
    assert board.simulation is not None
    assert board.presets
    assert set(board.rails.total) <= set(board.rails.names)


@pytest.mark.parametrize("name", JETSONS)
def test_a_jetson_nobody_touched_runs_at_its_highest_clocks(name: str) -> None:
    """Stock is: lowest GPU minimum, highest of everything else; the CPU clock can be set but is not searched."""
    board = load_board(name)
    for knob in board.knobs:
        assert knob.default == (knob.levels[0] if knob.name == "gpu_min_hz" else knob.levels[-1])
    assert board.space().names == ("gpu_min_hz", "gpu_max_hz", "mem_hz")


@pytest.mark.parametrize(("name", "points"), [("jetson-agx-orin", 1820), ("jetson-tx2", 5005)])
def test_the_published_grids_come_out_exactly(name: str, points: int) -> None:
    """With five batch sizes AGX Orin has 1,820 points and TX2 5,005 (arXiv 2310.19991)."""
    board = load_board(name)
    model = load_model("efficientnet-b4")
    assert len(board.space() * model.space(board.memory_bytes)) == points


@pytest.mark.parametrize(("name", "clocks"), [("v100", 167), ("a100", 81), ("h100", 97)])
def test_a_card_can_be_set_to_every_published_clock(name: str, clocks: int) -> None:
    """A card takes all its clocks though only some are searched."""
    knob = load_board(name).knob("gpu_max_hz")
    assert len(knob.levels) == clocks
    assert set(knob.searched.levels) < set(knob.levels)
    assert knob.default in knob.searched.levels


def test_a_clock_may_depend_on_the_memory_clock() -> None:
    """An A40 in its low memory state refuses high GPU clocks, and its space leaves them out."""
    board = load_board("a40")
    problem = board.refusal({"mem_hz": 405_000_000, "gpu_max_hz": 1_740_000_000})
    assert problem is not None
    assert "420 MHz" in problem
    space = board.space(["gpu_max_hz", "mem_hz"])
    assert all(point["gpu_max_hz"] <= 420_000_000 for point in space if point["mem_hz"] == 405_000_000)


@pytest.mark.parametrize("name", MODELS)
def test_a_shipped_model_holds_together(name: str) -> None:
    """A model has a title, work to do and batch sizes starting at its default of one."""
    model = load_model(name)
    assert model.title
    assert model.batch_default == min(model.batch_sizes) == 1
    assert model.name == name


def _figures(table: dict[str, Any], place: str = "") -> list[tuple[str, object]]:
    """Return every figure of a file with the source that covers it, None if there is none."""
    source = table.get("source")
    found: list[tuple[str, object]] = []
    for key, value in table.items():
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, dict):
            inner = value if isinstance(value, list) else [value]
            found += [figure for part in inner if key != "source" for figure in _figures(part, f"{place}{key}.")]
        elif isinstance(first, int | float) and not isinstance(first, bool):
            text = source.get(key, source.get("others")) if isinstance(source, dict) else source
            found.append((place + key, text))
    return found


@pytest.mark.parametrize(
    "path", [*catalogue_dir("devices").glob("*.toml"), *catalogue_dir("profiles/workloads").glob("*.toml")]
)
def test_every_shipped_figure_has_a_source(path: Path) -> None:
    """Each figure names a public origin or says that it is assumed."""
    figures = _figures(tomllib.loads(path.read_text(encoding="utf-8")))
    assert len(figures) >= (2 if "extends" in path.read_text(encoding="utf-8") else 10)
    assert all(isinstance(source, str) and len(source) > 3 for _, source in figures), figures


@pytest.mark.parametrize("load", [load_board, load_model])
def test_an_unknown_name_offers_the_nearest(load: Callable[[str], object]) -> None:
    """A misspelt name is answered with the one that was probably meant."""
    wrong, right = ("jetson-agx-orrin", "jetson-agx-orin") if load is load_board else ("resnet5", "resnet50")
    with pytest.raises(UnknownName, match=right):
        load(wrong)


def test_a_board_may_extend_another(tmp_path: Path) -> None:
    """What it does not say itself is the other's; only a shipped board that extends none can be extended."""
    small, whole = load_board("jetson-tx2-4gb"), load_board("jetson-tx2")
    assert (small.memory_bytes, small.title) == (4e9, "NVIDIA Jetson TX2 4GB")
    assert small.knobs == whole.knobs
    for wrong in ("'jetson-tx3'", "3", "'jetson-tx2i'", "'../devices/jetson-tx2'"):
        mine = tmp_path / "mine.toml"
        mine.write_text(f"extends = {wrong}\ntitle = 'Mine'\n")
        with pytest.raises(BadFile, match="extends must name a board"):
            load_board(str(mine))


def test_a_board_without_a_sensor_says_so_in_place_of_its_rails() -> None:
    """A Jetson Nano 2GB has none; its boundary is that sentence."""
    assert load_board("jetson-nano-2gb").rails.boundary.startswith("this board has no power sensor")


def test_a_board_can_be_a_file_of_ones_own(tmp_path: Path) -> None:
    """A path ending in .toml is a board, and names itself by that path."""
    mine = tmp_path / "my.toml"
    mine.write_text((catalogue_dir("devices") / "l4.toml").read_text(encoding="utf-8"), encoding="utf-8")
    assert load_board(str(mine)).name == str(mine)
    with pytest.raises(UnknownName):
        load_board(str(tmp_path / "other.toml"))


def _changed(tmp_path: Path, old: str, new: str) -> Path:
    text = (catalogue_dir("devices") / "jetson-tx2.toml").read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "changed.toml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("title =", "title", "not a TOML file"),
        ('kind = "jetson"', 'kind = "toaster"', "jetson or card"),
        ('kind = "jetson"', "kind = 1", "kind must be a text"),
        ("power_max_w = 15.0", "power_mox_w = 15.0", "power_mox_w"),
        ("power_max_w = 15.0", 'power_max_w = "15 W"', "power_max_w must be a finite number"),
        ("power_max_w = 15.0", f"power_max_w = {10**400}", "power_max_w must be a finite number"),
        ("power_max_w = 15.0", f"power_max_w = 0x{'f' * 9000}", "not a number of thousands of digits"),
        ("power_max_w = 15.0", "power_max_w = -15.0", "power_max_w must be a finite number"),
        ("memory_bytes = 8e9", "", "memory_bytes is missing"),
        ("default = 1866", "default = 1867", "knobs.mem_mhz does not hold together"),
        ("search = true", "search = 1", "search must be true or false"),
        ("levels = [40.8", 'levels = ["40.8"', "must be a list of"),
        ('total = ["VDD_IN"]', 'total = ["VDD_OUT"]', "VDD_OUT"),
        ('low = "gpu_min_mhz"', 'low = "gpu_mim_mhz"', "gpu_mim_mhz"),
        ("mem_mhz = 1331.2", "mem_mhz = 1331.3", "no level"),
        ("mem_mhz = 1331.2", "mem_mhz = 1e305", "mem_mhz must be a number"),
        ("mem_mhz = 1331.2", "mem_mhz = nan", "mem_mhz must be a number"),
        ("rise_s =", "rises_s =", "simulation.governor.rises_s is not a key"),
        ("knee =", "knea =", "simulation.gpu.voltage.knea"),
        ("[simulation.gpu.source]\n", '[simulation.gpu.source]\nlanes = ""\n#', "source"),
    ],
)
def test_a_bad_board_file_is_refused_in_one_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    """The error names the file, the key and what was expected."""
    path = _changed(tmp_path, old, new)
    with pytest.raises((BadFile, UnknownName)) as caught:
        load_board(str(path))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_figure_without_source_is_refused(tmp_path: Path) -> None:
    """A figure nobody can trace does not enter the catalogue."""
    path = tmp_path / "model.toml"
    text = (catalogue_dir("profiles/workloads") / "lstm.toml").read_text(encoding="utf-8")
    path.write_text(
        "\n".join(line for line in text.splitlines() if not line.startswith('kernels = "')), encoding="utf-8"
    )
    with pytest.raises(BadFile, match="kernels has no source"):
        load_model(str(path))


def _workload(tmp_path: Path, old: str, new: str) -> str:
    text = (catalogue_dir("profiles/workloads") / "lstm.toml").read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "model.toml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("batch_sizes = [1, 2,", "batch_sizes = [1, 2.5,", "batch_sizes must be a list of a whole number"),
        ("batch_sizes = [1, 2,", "batch_default = 1.5\nbatch_sizes = [1, 2,", "batch_default must be a whole number"),
    ],
)
def test_a_fraction_of_an_item_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    """It is not cut to the whole number below, which nobody has written."""
    with pytest.raises(BadFile, match=f"{said} of at least 0, not .*[12].5") as caught:
        load_model(_workload(tmp_path, old, new))
    assert "\n" not in str(caught.value)


def test_a_whole_number_may_be_written_with_a_point(tmp_path: Path) -> None:
    """2.0 is 2, and clocks in megahertz are whole hertz."""
    sizes = load_model(_workload(tmp_path, "batch_sizes = [1, 2,", "batch_sizes = [1, 2.0,")).batch_sizes
    assert sizes[1] == 2
    assert all(isinstance(size, int) for size in sizes)


def test_a_model_that_does_not_fit_is_refused_in_one_line() -> None:
    """The error says how much memory is needed and how much there is."""
    with pytest.raises(InvalidInput, match=r"needs 15 GB of memory and there are 4 GB"):
        load_model("llm-7b-decode").space(load_board("jetson-nano").memory_bytes)


def test_a_batch_that_does_not_fit_is_not_in_the_space() -> None:
    """Seven billion parameters leave a 16 GB card room for two sequences."""
    assert load_model("llm-7b-decode").space(16e9).knob("batch_size").levels == (1, 2)


def test_an_unknown_knob_offers_the_nearest() -> None:
    """Searching a knob the board has not names one it has."""
    board: Board = load_board("jetson-tx2")
    with pytest.raises(UnknownName, match="'gpu_mx_mhz'; did you mean gpu_max_mhz"):
        board.space(["gpu_mx_hz"])
    assert board.space(["gpu max"]).names == board.space(["gpu_max_mhz"]).names == ("gpu_max_hz",)
