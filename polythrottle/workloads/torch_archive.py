"""Archives that torch wrote, looked through before torch reads them: a model is data, and runs no code of its sender.

``torch.export.load`` unpickles members of an archive whatever ``weights_only`` says by default, evaluates the
expressions in it with Python, imports what its trees of arguments name, and calls what its graph names. So an archive
is refused as a whole if anything in it is more than weights, operators of torch and sizes. TorchScript is no Python,
but has operators that read and write files. Tensors are only ever unpickled as ``weights_only``, from a zip archive:
up to torch 2.5 the older format was unpickled in full even so (CVE-2025-32434).
"""

from __future__ import annotations

import ast
import io
import json
import logging
import os
import re
import threading
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from polythrottle.domain.errors import BadFile, DeviceError, TrialError
from polythrottle.storage.untrusted import check_plain
from polythrottle.workloads.foreign_calls import guarded, one_line

_FORCE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_FORBID = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_LOADING = threading.RLock()
_LEGACY = "serialized_exported_program.json"
_LEGACY_MEMBERS = re.compile(
    r"version|serialized_(exported_program|state_dict|constants|example_inputs)\.(json|pt)|extra_files/.*"
)
_MEMBERS = re.compile(
    r"archive_format|archive_version|byteorder|\.data/\w+|\.format_version|\.storage_alignment|models/model\.json"
    r"|data/(weights/(weight_\d+|model_weights_config\.json|model\.pt)"
    r"|constants/(tensor_\d+|model_constants_config\.json|model\.pt)|sample_inputs/model\.pt)|extra/.*"
)
_COMPILED = re.compile(r"data/(aotinductor|executorch|mtia)/")
_PAYLOAD = re.compile(r"(weight|tensor)_\d+")
_PLAIN = re.compile(r"[\w.\-/:@#<>+]*")
_NAME = re.compile(r"\w*")
_FREE = {
    "as_string", "as_strings", "stack_trace", "torch_fn", "nn_module_stack", "source_fn_stack", "custom", "from_node",
}  # fmt: skip
"""Texts that torch only ever passes on."""
_NAMES = {"name", "as_name", "forward_arg_names"}
_OPERATOR = re.compile(r"torch\.ops\.(\w+)\.(\w+)(?:\.(\w+))?|(_operator|math)\.(\w+)|torch\.(_?sym_\w+)")
_LIBRARIES = {"aten", "prims", "prim", "quantized", "quantized_decomposed", "torchvision", "torchao"}
_HIGHER = {
    "cond", "while_loop", "map_impl", "scan", "associative_scan", "flex_attention", "wrap_with_set_grad_enabled",
    "wrap_with_autocast", "auto_functionalized", "auto_functionalized_v2",
}  # fmt: skip
_ARITHMETIC = {
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "eq", "ne", "lt", "le", "gt", "ge", "and_",
    "or_", "not_", "xor", "invert", "getitem", "lshift", "rshift", "abs", "index",
}  # fmt: skip
_MATHS = {"ceil", "floor", "sqrt", "trunc", "log", "log2", "exp", "pow"}
_FILES = {"save", "from_file", "load_tensor"}
"""Operators of torch that open files."""
_FUNCTIONS = {
    "Symbol", "Integer", "Float", "Rational", "Add", "Mul", "Pow", "Max", "Min", "Mod", "Eq", "Ne", "Equality",
    "Unequality", "Ge", "Gt", "Le", "Lt", "GreaterThan", "LessThan", "StrictGreaterThan", "StrictLessThan", "And", "Or",
    "Not", "Abs", "ceiling", "floor", "FloorDiv", "ModularIndexing", "Where", "PythonMod", "CleanDiv", "CeilToInt",
    "FloorToInt", "CeilDiv", "LShift", "RShift", "PowByNatural", "FloatPow", "FloatTrueDiv", "IntTrueDiv",
    "IsNonOverlappingAndDenseIndicator", "TruncToFloat", "TruncToInt", "RoundToInt", "RoundDecimal", "ToFloat",
    "Identity",
}  # fmt: skip
_CONSTANTS = {"true", "false", "oo", "int_oo", "zoo", "L", "math"}
_READ = {"size", "stride", "storage_offset", "shape", "ndim", "dtype", "inf", "isnan"}
_TREES = {None, "builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict"}
_CLASSES = re.compile(r"__torch__\.torch\.classes\.(?!quantized\b)\w+")
_LARGEST_POWER = 8
_LARGEST_NUMBER = 2**63
_MOST_DOCUMENT = 256_000_000
_MOST_UNPACKED = 16
_MOST_DEPTH = 400
_SIGNATURE = b"PK\x03\x04"
_MALFORMED = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError)


class _Unsafe(Exception):
    """Something in an archive that is more than data; never leaves this module."""


def load_export(path: str | os.PathLike[str]) -> Any:
    """Return the program in an archive of torch.export.

    Raises:
        DeviceError: If this torch has no torch.export, as those of JetPack 5 that are older than 2.1.
        BadFile: If it does not load here, or holds anything that could run code, or compiled code.
    """
    load = getattr(getattr(torch, "export", None), "load", None)
    if load is None:
        raise DeviceError(
            f"{path} needs torch.export, which came with torch 2.1, and torch is {torch.__version__} here; save "
            "TorchScript (.pt), or give package.module:callable"
        )
    return _loaded(path, _check_export, load)


def load_script(path: str | os.PathLike[str]) -> Any:
    """Return the module in a TorchScript archive.

    Raises:
        BadFile: If it does not load here, or its code opens files or uses what no model needs.
    """
    return _loaded(path, _check_script, torch.jit.load)


def load_tensors(file: bytes | Path, device: str = "cpu") -> Any:
    """Return tensors and plain values that ``torch.save`` wrote.

    Raises:
        BadFile: If it is no zip archive of them; the older formats are not read.
        Exception: Whatever torch raises if it cannot read it, or if it holds more than tensors and plain values.
    """
    if isinstance(file, Path):
        check_plain(file)
    with io.BytesIO(file) if isinstance(file, bytes) else file.open("rb") as stream:
        if stream.read(len(_SIGNATURE)) != _SIGNATURE:
            raise BadFile("it is no archive as torch.save writes them since version 1.6")
        stream.seek(0)
        with _weights_only():
            return torch.load(stream, map_location=device, weights_only=True)


@contextmanager
def _weights_only() -> Iterator[None]:
    """Have everything in this process that calls ``torch.load`` meanwhile unpickle tensors and plain values alone."""
    # The environment is the whole process's: two loads at once would put back each other's.
    with _LOADING:
        # Both aside, for torch raises where both are set.
        before = {name: os.environ.pop(name, None) for name in (_FORCE, _FORBID)}
        os.environ[_FORCE] = "1"
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                os.environ.update({} if value is None else {name: value})


def _loaded(path: str | os.PathLike[str], check: Callable[[Path], None], load: Callable[[str], Any]) -> Any:
    check_plain(path)
    try:
        check(Path(path))
        with quiet("torch raised"), _weights_only():
            return load(os.fspath(path))
    except _Unsafe as err:
        raise BadFile(f"{path} is refused: {err}") from err
    except (zipfile.BadZipFile, zlib.error, EOFError) as err:
        raise BadFile(f"{path} is no archive as torch writes them, or cut off") from err
    except TrialError as err:
        raise BadFile(f"{path} does not load here: {err}") from err
    except _MALFORMED as err:
        if isinstance(err, OSError) and err.strerror:
            why = err.strerror
        else:
            why = one_line(err)
        raise BadFile(f"{path} does not load here: {why}") from err


@contextmanager
def quiet(what: str) -> Iterator[None]:
    """Have torch keep its remarks about its own future to itself; what goes wrong is raised all the same.

    Args:
        what: Begins the message.

    Raises:
        TrialError: If the code raises.
    """
    log = logging.getLogger("torch.export")
    level = log.level
    try:
        log.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with guarded(what):
                yield
    finally:
        log.setLevel(level)


def _check_export(path: Path) -> None:
    """Raise `_Unsafe` if an archive of torch.export holds anything but weights, operators of torch and sizes."""
    with zipfile.ZipFile(path) as archive:
        names = _names(archive, path)
        if _LEGACY in names:  # torch 2.7 and older
            members = {name: archive.read(name) for name in names if not name.startswith("extra_files/")}
            _check_members(names, _LEGACY_MEMBERS)
            # Else torch could load, by its own reader, an archive that was not looked through.
            if _opens(path):
                raise _Unsafe("it is two archives in one")
            _check_contents(members)
            return
    reader = torch._C.PyTorchFileReader(str(path))  # what torch will see, which need not be what zipfile sees
    records = reader.get_all_records()
    _check_members(records, _MEMBERS)
    members = {name: bytes(reader.get_record(name)) for name in records if name.endswith((".json", ".pt"))}
    if "models/model.json" not in members:
        raise _Unsafe("it holds no program called model")
    _check_contents(members)
    for name, pickled in _payloads(members):
        _check_payload(reader, name, pickled)


def _names(archive: zipfile.ZipFile, path: Path) -> list[str]:
    found = archive.infolist()
    names = [info.filename for info in found]
    # Readers differ in which of two they take: one would be checked and the other loaded.
    if len(set(names)) < len(names):
        raise _Unsafe("a member is there twice")
    if sum(info.file_size for info in found) > _MOST_UNPACKED * path.stat().st_size + 1_000_000:
        raise _Unsafe(f"it unpacks to more than {_MOST_UNPACKED} times its size")
    return names


def _opens(path: Path) -> bool:
    try:
        torch._C.PyTorchFileReader(str(path))
    except RuntimeError:
        return False
    return True


def _check_members(names: list[str], known: re.Pattern[str]) -> None:
    for name in names:
        if _COMPILED.match(name):
            raise _Unsafe(f"it holds compiled code, {name[:80]}; export the model without compiling it")
        if known.fullmatch(name) is None:
            raise _Unsafe(f"it holds {name[:80]!r}, which is no part of an exported model")


def _check_contents(members: Mapping[str, bytes]) -> None:
    for name, data in members.items():
        if name in (_LEGACY, "models/model.json"):
            if len(data) > _MOST_DOCUMENT:
                raise _Unsafe("its graph is larger than any model's")
            _check_graph(json.loads(data))
        elif name.endswith(".pt") or name.startswith("serialized_"):
            _check_tensors(name, data)


def _check_tensors(name: str, data: bytes) -> None:
    """Raise `_Unsafe` if bytes are in another format than the one that is unpickled as weights alone."""
    if not data:
        return
    if data[:4] != _SIGNATURE:
        raise _Unsafe(f"{name} holds something else than tensors")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if any(each.endswith("constants.pkl") for each in archive.namelist()):
            raise _Unsafe(f"{name} holds a program where tensors belong")


def _payloads(members: Mapping[str, bytes]) -> Iterator[tuple[str, bool]]:
    for folder in ("weights", "constants"):
        config = members.get(f"data/{folder}/model_{folder}_config.json")
        for meta in () if config is None else json.loads(config)["config"].values():
            if _PAYLOAD.fullmatch(meta["path_name"]) is None:
                raise _Unsafe(f"it holds an object of a class of its own, {meta['path_name'][:80]!r}")
            yield f"data/{folder}/{meta['path_name']}", bool(meta["use_pickle"])
            sizes = (meta.get("tensor_meta") or {}).get("sizes", ())
            if not meta["use_pickle"] and not all(type(size.get("as_int")) is int for size in sizes):
                raise _Unsafe(f"the size of {meta['path_name']} is no number")


def _check_payload(reader: Any, name: str, pickled: bool) -> None:
    if pickled:
        _check_tensors(name, bytes(reader.get_record(name)))


def _check_graph(document: Any) -> None:
    """Raise `_Unsafe` if anything in a graph is more than a name, an operator of torch, a size or a bound."""
    waiting: list[tuple[str, Any, int]] = [("", document, 0)]
    while waiting:
        key, value, depth = waiting.pop()
        if depth > _MOST_DEPTH:
            raise _Unsafe("its graph is nested too deeply")
        if isinstance(value, dict):
            for name, inner in value.items():
                _check_text("expr_str" if key == "range_constraints" else "", name)
                waiting.append((name, inner, depth + 1))
        elif isinstance(value, list):
            waiting.extend((key, inner, depth + 1) for inner in value)
        elif isinstance(value, str):
            _check_text(key, value)
        if key in ("as_custom_obj", "class_fqn", "custom_obj_values") and value not in (None, {}):
            raise _Unsafe("it holds objects of classes of its own")


def _check_text(key: str, text: str) -> None:
    if key in _FREE:
        return
    if key in ("target", "as_operator"):
        _check_operator(text)
    elif key in ("in_spec", "out_spec"):
        _check_tree(json.loads(text), 0)
    elif key in ("expr_str", "guards_code"):
        _check_expression(text)
    elif (_NAME if key in _NAMES else _PLAIN).fullmatch(text) is None:
        raise _Unsafe(f"{text[:80]!r} is no name")


def _check_operator(text: str) -> None:
    found = _OPERATOR.fullmatch(text)
    if found is None:
        raise _Unsafe(f"it calls {text[:80]!r}, which is no operator of torch")
    library, name, _, module, function, _ = found.groups()
    known = (
        (library in _LIBRARIES and name not in _FILES)
        or (library == "higher_order" and name in _HIGHER)
        or (module == "_operator" and function in _ARITHMETIC)
        or (module == "math" and function in _MATHS)
        or (library is None and module is None)
    )
    if not known:
        raise _Unsafe(f"it calls {text[:80]!r}, which no model needs")


def _check_tree(tree: Any, depth: int) -> None:
    """Check how a program's arguments are nested: tuples, lists and dicts with plain keys, which import nothing."""
    nodes = tree[1:] if depth == 0 else [tree]
    for node in nodes:
        if isinstance(node["context"], str):
            context = json.loads(node["context"])
        else:
            context = node["context"]
        keys = context if isinstance(context, list) else [context]
        if node["type"] not in _TREES or not all(key is None or isinstance(key, (str, int)) for key in keys):
            raise _Unsafe(f"it takes arguments of the type {str(node['type'])[:80]!r}")
        if depth > _MOST_DEPTH:
            raise _Unsafe("its arguments are nested too deeply")
        for child in node["children_spec"]:
            _check_tree(child, depth + 1)


_ALLOWED = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.Call, ast.keyword, ast.Name, ast.Constant,
    ast.Subscript, ast.Attribute, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context,
)  # fmt: skip


def _check_expression(text: str) -> None:
    """Check a size or a bound, which torch hands to Python's ``eval``: arithmetic on symbols and nothing else."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, MemoryError) as err:
        raise _Unsafe(f"{text[:80]!r} is no expression of sizes") from err
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED) or not _harmless(node):
            raise _Unsafe(f"{text[:80]!r} is more than an expression of sizes")


def _harmless(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        powers = isinstance(node.func, ast.Name) and node.func.id in ("Pow", "PowByNatural", "FloatPow", "LShift")
        called = _read_of(node.func) or (isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS)
        return called and (not powers or (len(node.args) == 2 and _small(node.args[1])))
    # A size such as 9**9**9 is arithmetic too, and never ends.
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Pow, ast.LShift)):
        return _small(node.right)
    if isinstance(node, ast.Attribute):
        return _read_of(node)
    if isinstance(node, ast.Name):
        return node.id in _FUNCTIONS | _CONSTANTS or re.fullmatch(r"[a-z]+\d+", node.id) is not None
    if isinstance(node, ast.Constant):
        return _plain_constant(node.value)
    return True


def _read_of(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in _READ


def _plain_constant(value: Any) -> bool:
    if isinstance(value, str):
        return _PLAIN.fullmatch(value) is not None
    return value is None or (isinstance(value, (int, float)) and abs(value) < _LARGEST_NUMBER)


def _small(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Integer" and node.args:
        return _small(node.args[0])
    if isinstance(node, ast.UnaryOp):
        return _small(node.operand)
    return isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) <= _LARGEST_POWER


def _check_script(path: Path) -> None:
    """Raise `_Unsafe` if TorchScript names an operator that opens files, or a class that no model needs."""
    with zipfile.ZipFile(path) as archive:
        _names(archive, path)
    reader = torch._C.PyTorchFileReader(str(path))
    for name in reader.get_all_records():
        code = name.startswith("code/") and name.endswith(".py")
        if code or name.endswith(".pkl"):
            text = bytes(reader.get_record(name)).decode(errors="replace")
        else:
            text = ""
        if found := _CLASSES.search(text):
            raise _Unsafe(f"it uses {found[0]}, which no model needs")
        if code:
            _check_code(io.StringIO(text))


def _check_code(text: IO[str]) -> None:
    """Go through the tokens, so that neither a comment nor a line break hides a name."""
    try:
        tokens = list(tokenize.generate_tokens(text.readline))
    except (tokenize.TokenError, SyntaxError) as err:
        raise _Unsafe("its code is not written as torch writes it") from err
    words = [_word(token) for token in tokens]
    for place, token in enumerate(tokens):
        before = words[place - 1]
        after = words[(place + 1) % len(words)]
        if words[place] in _FILES and (token.type == tokenize.STRING or before == "."):
            raise _Unsafe(f"its code names the operator {words[place]}, which opens files")
        if token.type == tokenize.STRING and tokens[place - 1].type == tokenize.STRING:
            raise _Unsafe("its code is not written as torch writes it")
        if token.string == "ops" and before != "." and (after != "." or words[place + 2] not in _LIBRARIES):
            raise _Unsafe(f"its code calls operators of {''.join(words[place + 2 : place + 3])[:80]!r}")


def _word(token: tokenize.TokenInfo) -> str:
    """Return what a token says; of a text in quotes what is meant, however it is written."""
    if token.type != tokenize.STRING:
        return token.string
    if token.string[0] not in "\"'":
        raise _Unsafe("its code is not written as torch writes it")
    return str(ast.literal_eval(token.string))
