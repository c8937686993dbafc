"""Where an ONNX model keeps its weights: in itself, or in files beside it and nowhere else.

A tensor may name a file and an offset (``TensorProto.external_data``, onnx.proto). ONNX Runtime has read whatever path
stood there, and takes one name for an address in memory. The file is walked field by field: neither onnx nor protobuf
need be installed, and weights in the file itself are skipped, not read.
"""

import mmap
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from polythrottle.errors import BadFile

_INNER = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
}
"""Messages within messages, by the numbers of their fields in onnx.proto."""
_KEY, _VALUE, _LOCATION = 1, 2, b"location"
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5
_LONGEST_VARINT = 10


def check_weights(path: Path) -> None:
    """Refuse a model whose weights lie outside its own folder.

    Raises:
        BadFile: If it cannot be read, is no ONNX model, or names a file elsewhere or none.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            names = set(_locations(data))
    except (OSError, ValueError) as err:
        reason = err.strerror if isinstance(err, OSError) and err.strerror else err
        raise BadFile(f"{path} is not an ONNX model that can be read: {reason}") from err
    for name in sorted(names):
        _check_location(path, name.decode(errors="replace"))


def _check_location(path: Path, name: str) -> None:
    lexical = PurePosixPath(name)
    shown = name[:80]
    if lexical.is_absolute() or ".." in lexical.parts or "\0" in name or not name:
        raise BadFile(f"{path} is refused: it keeps weights in {shown!r}, outside its own folder")
    folder = path.resolve().parent
    beside = (folder / name).resolve()
    if not beside.is_relative_to(folder):
        raise BadFile(f"{path} is refused: it keeps weights in {shown!r}, which leads out of its own folder")
    if not beside.is_file():
        raise BadFile(f"{path} keeps weights in {shown!r}, which is not there; put it beside the model")


def _locations(data: mmap.mmap) -> Iterator[bytes]:
    """Yield the names of files in a model; ValueError if it is none."""
    waiting = [("model", 0, len(data))]
    while waiting:
        kind, begin, end = waiting.pop()
        if kind == "entry":
            texts = {number: data[start:stop] for number, start, stop in _fields(data, begin, end)}
            if texts.get(_KEY) == _LOCATION:
                yield texts.get(_VALUE, b"")
            continue
        inner = _INNER[kind]
        waiting += [
            (inner[number], start, stop) for number, start, stop in _fields(data, begin, end) if number in inner
        ]


def _fields(data: mmap.mmap, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, begin and end of every field of bytes in a message (protobuf.dev, encoding)."""
    while at < end:
        tag, at = _varint(data, at, end)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _varint(data, at, end)
        elif kind in (_EIGHT, _FOUR):
            at += 8 if kind == _EIGHT else 4
        elif kind == _BYTES:
            size, at = _varint(data, at, end)
            if size > end - at:
                raise ValueError("it is cut off, or no such file")
            yield tag >> 3, at, at + size
            at += size
        else:
            raise ValueError("it is no such file")
    if at > end:
        raise ValueError("it is cut off, or no such file")


def _varint(data: mmap.mmap, at: int, end: int) -> tuple[int, int]:
    value = 0
    for place in range(_LONGEST_VARINT):
        if at >= end:
            raise ValueError("it is cut off, or no such file")
        byte = data[at]
        value, at = value | (byte & 0x7F) << 7 * place, at + 1
        if byte < 0x80:
            return value, at
    raise ValueError("it is no such file")
