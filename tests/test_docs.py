"""README and docs/: what they show is what the program takes and does, and every public name is in the reference.

In a block marked ``sh`` each command of polythrottle is run, one block after the other, in a folder that has the
examples; in ``bash`` and ``console`` each has to be one that the command line takes. ``python`` is run as it is.
"""

import importlib.util
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pytest
import typer
from builders import quick
from fake_servers import FakeServer, Handler, kserve, listening, openai, piece, usage

from polythrottle.cli.commands import app, run
from polythrottle.testing import FakeKernel, plant
from polythrottle.testing.__main__ import main as plant_or_run
from polythrottle.testing.nvml import FakeNvml, compiler

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHORT = {
    "tune": ["--trials", "2", "--queries", "10", "--seconds", "0.2", "--no-presets", "--no-history"],
    "measure": ["--queries", "10", "--seconds", "0.2"],
    "check": ["--queries", "30"],
}
"""Options that make a command quick; they come last, and the last one counts."""
REAL = {"jetson", "nvml:0", "cpu"}
"""Devices that take real time, so that their limits have to be such that a busy machine holds them."""
_COMMAND = re.compile(r"(?:sudo )?(?:\S*/)?polythrottle (.*)|python -m polythrottle\.testing (.*)")


def generator() -> ModuleType:
    """Return the program that generates the reference."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(path: Path, *kinds: str) -> list[str]:
    """Return the code blocks of a page that are marked as one of these kinds."""
    found = re.findall(r"^ *```(\w+)\n(.*?)^ *```", path.read_text(), re.DOTALL | re.MULTILINE)
    return [text for kind, text in found if kind in kinds]


def commands(path: Path, *kinds: str) -> list[tuple[str, list[str]]]:
    """Return what a page's blocks call, as the program (``polythrottle`` or ``testing``) and its words."""
    lines = "\n".join(blocks(path, *kinds)).replace("\\\n", " ").splitlines()
    found = [match for line in lines if (match := _COMMAND.match(line.strip()))]
    return [
        ("testing" if match[1] is None else "polythrottle", shlex.split(match[1] or match[2], comments=True))
        for match in found
    ]


def name(path: Path) -> str:
    """Return how a page is called in a test's name."""
    return str(path.relative_to(ROOT)).removesuffix(".md")


def test_the_readme_is_short() -> None:
    """It has at most 900 words, and holds commands that tune a real Jetson and a real GPU."""
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 900
    assert "tune --device jetson " in text
    assert "tune --device nvml:0 " in text


# Words: everything that is shown is something the command line takes.


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """Return the command that words call, and those that are left for it."""
    command: Any = typer.main.get_command(app)
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=name)
def test_what_a_page_shows_is_understood(path: Path) -> None:
    """Each command exists and has these options; where nothing is left out, all of its words can be parsed."""
    for program, words in commands(path, "sh", "bash", "console"):
        if program == "testing":
            continue
        command, rest = command_of(words)
        known = {spelled for option in command.params for spelled in (*option.opts, *option.secondary_opts)}
        assert {word for word in rest if re.match(r"--?[a-z]", word)} <= {*known, "--help", "--version"}, words
        if "…" not in words and "--help" not in rest:
            command.make_context("polythrottle", list(rest), resilient_parsing=False)


# Commands: those of blocks marked sh are run.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder a reader stands in: with the examples, and a model of his own."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    shape = [onnx.helper.make_tensor_value_info(each, onnx.TensorProto.FLOAT, ["n", 64]) for each in "xy"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "g", shape[:1], shape[1:])
    opset = [onnx.helper.make_opsetid("", 17)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=9), tmp_path / "model.onnx")
    return tmp_path


def language_model() -> FakeServer:
    """Return a server whose answers have ten tokens, one after the other."""
    parts = [*([piece("a")] * 9), piece("b", "stop") + usage(10) + b"data: [DONE]\n\n"]

    def talk(handler: Handler, body: bytes) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for part in parts:
            handler.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            handler.wfile.flush()
            server.over.wait(0.02)
        handler.wfile.write(b"0\r\n\r\n")

    server = openai()
    server.answers["POST", "/v1/chat/completions"] = talk
    return server


class Reader:
    """Somebody who types what a page shows, with a board, a GPU and servers that are not there."""

    def __init__(self, folder: Path) -> None:
        self.board = quick(plant("jetson-agx-orin-jp6", folder / "jetson"))
        self.gpus = None if compiler() is None else FakeNvml(folder / "nvml", ["a100"])
        self.stack = ExitStack()

    def __enter__(self) -> "Reader":
        inputs = [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
        self.triton = self.stack.enter_context(listening(kserve(inputs)))
        self.vllm = self.stack.enter_context(listening(language_model()))
        self.stack.enter_context(FakeKernel(self.board).installed())
        if self.gpus is not None:
            self.stack.enter_context(self.gpus).set(0, load_permille=800)
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def does(self, program: str, words: list[str]) -> int:
        """Run one command, made short, and return its exit code."""
        if program == "testing":
            return plant_or_run([*words, *SHORT.get(words[2], ())] if words[0] == "run" else words)
        if REAL & set(words):
            words = [re.sub(r"^((?:mean|p99)<=)[\d.]+(?:ms|s|x)$", r"\g<1>50x", word) for word in words]
        return run([*map(self.instead, words), *SHORT.get(words[0], ())])

    def instead(self, word: str) -> str:
        """Return a word with what is not there replaced by what stands in for it."""
        word = re.sub(r"kserve(\+grpc)?://localhost:\d+/\w+", f"kserve://{self.triton.where}/m", word)
        word = re.sub(r"openai://localhost:\d+/[\w-]+", f"openai://{self.vllm.where}/org/m", word)
        return {"jetson": f"jetson?root={self.board}", "nvml:0": "cpu" if self.gpus is None else word}.get(word, word)


def shown(*, slow: bool) -> Iterator[Any]:
    """Return the pages with commands to run: those that start real processes, or the others."""
    for path in PAGES:
        found = [each for each in commands(path, "sh") if is_slow(each[1]) == slow]
        if found:
            yield pytest.param(found, id=name(path))


def is_slow(words: list[str]) -> bool:
    """Return whether a command starts a training of its own."""
    return words[:2] == ["cluster", "train"]


@pytest.mark.slow
@pytest.mark.parametrize("found", list(shown(slow=False)))
def test_what_a_page_shows_runs(found: list[tuple[str, list[str]]], folder: Path, capfd: Any) -> None:
    """Each command works as printed, on a fake Jetson, a stand-in for NVIDIA's library, and made-up servers."""
    with Reader(folder) as reader:
        for program, words in found:
            assert reader.does(program, words) == 0, (words, capfd.readouterr().err)


@pytest.mark.slow
@pytest.mark.parametrize("found", list(shown(slow=True)))
def test_a_training_that_a_page_shows_runs(found: list[tuple[str, list[str]]], folder: Path) -> None:
    """Two real nodes on this machine."""
    for _, words in found:
        assert run(words) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        pytest.param(text, id=f"{name(path)}-{at}")
        for path in PAGES
        if path.parent.name != "extending"  # tests/test_extending.py runs those, and their contracts
        for at, text in enumerate(blocks(path, "python"))
    ],
)
def test_a_program_that_a_page_shows_runs(text: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It ends well, and prints something."""
    exec(compile(text, "page", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out.strip()


@pytest.mark.slow
def test_a_check_that_a_page_shows_can_prove_what_it_claims(folder: Path) -> None:
    """Its windows are long enough for the percentile that the profile bounds."""
    shown = {tuple(words) for page in PAGES for _, words in commands(page, "sh") if words[0] == "check"}
    assert shown
    for words in {tuple(word for word in words if word != "--json") for words in shown}:
        assert run((*words, "--require")) == 0


def test_there_is_something_to_run() -> None:
    """The lists above are not empty by mistake."""
    assert sum(len(commands(path, "sh")) for path in PAGES) >= 30
    assert len(commands(ROOT / "README.md", "sh")) >= 10


# The reference that is generated.


def test_every_public_name_is_in_the_reference() -> None:
    """Each name of ``polythrottle.__all__`` has an entry for mkdocstrings, at the place where it is defined."""
    import polythrottle

    page = generator().python()
    for public in polythrottle.__all__:
        value = getattr(polythrottle, public)
        where = getattr(value, "__module__", ""), getattr(value, "__qualname__", getattr(value, "__name__", ""))
        assert public.startswith("__") or f"::: {'.'.join(filter(None, where))}\n" in page, public


def test_every_command_and_option_is_in_the_reference() -> None:
    """The page of the command line has a heading per command and a row per option."""
    made = generator()
    page = made.command_line()
    for words, command in made.commands(typer.main.get_command(app)):
        assert f"# `{' '.join(words)}`" in page
        options = [each for each in command.params if each.param_type_name == "option" and not each.hidden]
        assert all(f"`{option.opts[0]}`" in page for option in options)


def test_every_metric_is_in_the_reference() -> None:
    """The page of metrics has a row for each figure that the daemon exports."""
    from polythrottle.daemon.web.prometheus import FIGURES

    page = generator().metrics()
    assert all(f"| `polythrottle_{each.name}{'_total' if each.counter else ''}` |" in page for each in FIGURES)


def test_every_exit_code_is_in_the_reference() -> None:
    """The page of exit codes has every error class, with its code."""
    made = generator()
    page = made.exit_codes()
    for error in made.errors():
        assert re.search(rf"^\| {error.exit_code} \|.*`{error.__name__}`", page, re.MULTILINE), error


def test_every_page_is_in_the_site() -> None:
    """The navigation of mkdocs.yml names each page of docs/, and nothing that is not there."""
    listed = set(re.findall(r"^ +- [^:]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    there = {str(path.relative_to(ROOT / "docs")) for path in PAGES[1:]}
    assert listed == there | {each for each in generator().pages() if each in listed}


def test_the_tests_that_pages_name_are_there() -> None:
    """What the page on safety says of each process, file and socket is held by a test."""
    named = [
        match
        for page in PAGES
        for match in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text())
        if match[0]
    ]
    assert len(named) > 10
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text() if test else (ROOT / file).exists(), (file, test)
