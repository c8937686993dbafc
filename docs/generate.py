"""Pages of the site that are generated from the code when it is built: a hook of MkDocs, which ``mkdocs.yml`` names.

The command line comes from Typer's own tree of commands, exit codes from the error classes, metrics from what the
daemon exports, and the Python page lists every public name for mkdocstrings to fill in. Nothing is written to docs/.
"""

import html
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY_FOLDERS = ("examples", "packaging", "devices", "profiles")
"""Folders that pages link to and the site has no pages of: such a link becomes the bare name."""

_BENCHMARKS = re.compile(r"\]\(\.\./((?:\.\./)*)benchmarks/")
_OUTSIDE = re.compile(r"\[([^\]]*)\]\(\.\./(?:\.\./)?(?:" + "|".join(REPOSITORY_FOLDERS) + r")[^)]*\)")


def pages() -> dict[str, str]:
    """Return the generated pages: Markdown by path below docs/."""
    return {
        "reference/cli.md": command_line(),
        "reference/python.md": python(),
        "reference/exit-codes.md": exit_codes(),
        "reference/metrics.md": metrics(),
        **benchmarks(),
    }


# What MkDocs calls.


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Add the generated pages, and the pictures that the benchmarks show."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    for picture in sorted((ROOT / "benchmarks").glob("*.png")):
        files.append(File.generated(config, f"benchmarks/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Point links that leave docs/, which hold in the repository, to where the site has the same."""
    return _OUTSIDE.sub(r"\1", _BENCHMARKS.sub(r"](\1benchmarks/", markdown))


# The command line.


def command_line() -> str:
    """Return the page of all commands, from Typer's tree."""
    import typer

    from polythrottle.cli.commands import app

    root = typer.main.get_command(app)
    parts = [
        "# Command line",
        "Generated from the program itself; `polythrottle COMMAND --help` prints the same. "
        "[Devices and workloads](uris.md) says what `--device` and `--workload` can name, [Exit codes](exit-codes.md) "
        "how a command can end.",
    ]
    for words, command in commands(root):
        parts.append(f"{'##' if len(words) == 2 else '###'} `{' '.join(words)}`")
        group = getattr(command, "commands", None)
        parts += [_help(command)] if group else [_usage(words, command), _help(command), *_tables(command)]
    return "\n\n".join(parts) + "\n"


def commands(root: Any, words: tuple[str, ...] = ("polythrottle",)) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Return every command below one, with the words that call it."""
    for name, command in getattr(root, "commands", {}).items():
        if not command.hidden:
            yield (*words, name), command
            yield from commands(command, (*words, name))


def _help(command: Any) -> str:
    """Return what a command says of itself; lines that begin with its program are shown as code."""
    text = inspect.cleandoc(f"{command.help or ''}\n\n{command.epilog or ''}").replace("\b", "").strip()
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", text):
        lines = textwrap.dedent(paragraph).strip().splitlines()
        first = next((at for at, line in enumerate(lines) if line.strip().startswith("polythrottle ")), None)
        before, code = (lines, []) if first is None else (lines[:first], lines[first:])
        if before:
            paragraphs.append(_plain(" ".join(before)))
        if code:
            shown = [("" if line.lstrip().startswith("polythrottle ") else "    ") + line.strip() for line in code]
            paragraphs.append("```bash\n" + "\n".join(shown) + "\n```")
    return "\n\n".join(paragraphs)


def _parameters(command: Any, kind: str) -> list[Any]:
    return [each for each in command.params if each.param_type_name == kind and not getattr(each, "hidden", False)]


def _usage(words: tuple[str, ...], command: Any) -> str:
    """Return a command's usage line."""
    arguments = _parameters(command, "argument")
    named = [_metavar(each) if each.required else f"[{_metavar(each)}]" for each in arguments]
    return (
        "```text\n" + " ".join([*words, *named, *(["[OPTIONS]"] if _parameters(command, "option") else [])]) + "\n```"
    )


def _tables(command: Any) -> list[str]:
    """Return the tables of a command's arguments and options."""
    arguments, options = _parameters(command, "argument"), _parameters(command, "option")
    parts: list[str] = []
    if arguments:
        rows = [f"| `{_metavar(each)}` | {_plain(getattr(each, 'help', '') or '')} |" for each in arguments]
        parts.append("\n".join(["| argument | |", "|---|---|", *rows]))
    panels: dict[str, list[Any]] = {}
    for each in options:
        panels.setdefault(getattr(each, "rich_help_panel", None) or "option", []).append(each)
    for panel, members in panels.items():
        parts.append("\n".join([f"| {_plain(panel).lower()} | |", "|---|---|", *map(_option, members)]))
    return parts


def _option(option: Any) -> str:
    spelled = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    value = "" if option.is_flag else f" `{_metavar(option)}`"
    notes = ["required"] if option.required else []
    notes += ["may be repeated"] if option.multiple and "repeat" not in (option.help or "") else []
    beside = f" ({', '.join(notes)})" if notes else ""
    return f"| {spelled}{value} | {_plain(option.help or '')}{beside} |"


def _metavar(parameter: Any) -> str:
    word = (parameter.metavar or parameter.type.name or parameter.name).strip("[]")
    return (word if parameter.param_type_name == "option" else word.replace("] [", " ")).replace("|", "/")


def _plain(text: str) -> str:
    """Return text that Markdown shows as it is."""
    escaped = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", escaped)


# Python.

_MODULES = {
    "polythrottle.domain.ports": "What devices, workloads and optimisers have to offer, for those who write their own.",
    "polythrottle.testing": "Contracts and boards to test one's own code with.",
    "polythrottle.domain.errors": "Every error raised on purpose.",
}


def python() -> str:
    """Return the page of all public names of Python, for mkdocstrings to fill in."""
    import polythrottle

    functions = [name for name in public_names() if inspect.isroutine(getattr(polythrottle, name))]
    others = [name for name in public_names() if name not in functions]
    parts = [
        "# Python",
        "Everything that `import polythrottle` offers. Quantities are in SI units, and the unit ends each name: "
        "`latency_s`, `energy_j`, `gpu_max_hz`.",
        "## Functions",
        *(_entry(name) for name in functions),
        "## Values",
        *(_entry(name) for name in others),
    ]
    for module, what in _MODULES.items():
        parts += [f"## {module}", what, *(_entry(name, module) for name in _names_of(module))]
    return "\n\n".join(parts) + "\n"


def public_names() -> list[str]:
    """Return the names of ``polythrottle.__all__`` that are documented as functions, classes or values."""
    import polythrottle

    return [name for name in polythrottle.__all__ if not name.startswith("__")]


def _names_of(module: str) -> list[str]:
    found = importlib.import_module(module)
    listed = getattr(found, "__all__", None) or [
        name
        for name, value in vars(found).items()
        if inspect.isclass(value) and value.__module__ == module and not name.startswith("_")
    ]
    return [name for name in listed if inspect.isclass(getattr(found, name)) or inspect.isroutine(getattr(found, name))]


def _entry(name: str, module: str = "polythrottle") -> str:
    value = getattr(importlib.import_module(module), name)
    if inspect.ismodule(value):
        return f"::: {value.__name__}\n    options: {{heading_level: 3}}"
    home = getattr(value, "__module__", module)
    return f"::: {home}.{getattr(value, '__qualname__', name)}"


# Exit codes and metrics.


def exit_codes() -> str:
    """Return the page of exit codes, from the error classes."""
    rows = ["| 0 | | done |"]
    by_code: dict[int, list[type[Exception]]] = {}
    for error in errors():
        by_code.setdefault(error.exit_code, []).append(error)
    for code, classes in sorted(by_code.items()):
        names = ", ".join(f"`{each.__name__}`" for each in classes)
        rows.append(f"| {code} | {names} | {' '.join(_first_line(each) for each in classes)} |")
    rows.append("| 130 | `KeyboardInterrupt` | Ctrl-C or SIGTERM: the device is restored, the journal kept. |")
    return EXIT_CODES.format(rows="\n".join(rows))


EXIT_CODES = """# Exit codes

An error ends with one line on standard error that says what was wrong, what was expected and what to do. Its class
decides the exit code; from Python the same class is raised
([polythrottle.domain.errors](python.md#polythrottledomainerrors)).

| code | error | when |
|---|---|---|
{rows}

Codes 5 and 8 after a study still print the study's document with `--json`, so that nothing measured is lost. `check`
ends with 9 once it is proven that energy has grown or a limit is broken, and with `--require` also while the contrary
is not proven; `measure A B --require` while the saving is not proven.
"""


def errors() -> list[Any]:
    """Return the error classes, the root first."""
    from polythrottle.domain import errors as module

    found = [value for value in vars(module).values() if inspect.isclass(value) and issubclass(value, Exception)]
    return [each for each in found if each.__module__ == module.__name__]


def _first_line(value: object) -> str:
    return (inspect.getdoc(value) or "").splitlines()[0]


def metrics() -> str:
    """Return the page of metrics, from what the daemon exports."""
    from polythrottle.daemon.web.prometheus import FIGURES, KINDS

    rows = ["| `polythrottle_build_info` | `version`, `device`, `energy_kind` | Always 1: which daemon this is |"]
    for figure in FIGURES:
        labels = ", ".join(f"`{label}`" for label in figure.labels)
        rows.append(f"| `{metric_name(figure)}` | {labels} | {figure.help} |")
    return METRICS.format(kinds=", ".join(KINDS), rows="\n".join(rows))


METRICS = """# Metrics

What the daemon exports for Prometheus, in base units; [how to scrape it](../metrics.md). What is unknown is absent,
never 0. Counters begin again with the daemon; `polythrottle_saved_…` begin again at midnight, so they are gauges.
Labels hold names of knobs, clocks, guards, phases and kinds of events, never words. Kinds of events are {kinds}.

| metric | labels | what it is |
|---|---|---|
{rows}
"""


def metric_name(figure: Any) -> str:
    """Return the full name under which a figure is exported."""
    return f"polythrottle_{figure.name}{'_total' if figure.counter else ''}"


# Benchmarks, which lie beside docs/.


def benchmarks() -> dict[str, str]:
    """Return the pages of recorded benchmarks, and one that lists them."""
    found = {path: path.read_text() for path in sorted((ROOT / "benchmarks").glob("*.md"))}
    listed = [f"- [{text.partition(chr(10))[0].lstrip('# ')}]({path.name})" for path, text in found.items()]
    index = [
        "# Benchmarks",
        "",
        "Recorded runs of the programs in `benchmarks/`. Each page names the command that makes it, and says whether "
        "its figures are measured or simulated.",
        "",
        *listed,
        "",
    ]
    return {
        "benchmarks/index.md": "\n".join(index),
        **{f"benchmarks/{path.name}": text.replace("](../docs/", "](../") for path, text in found.items()},
    }
