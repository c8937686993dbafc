"""TOML tables read key by key; whatever is wrong names the file, the key and what was expected."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from polythrottle.domain.backports import removesuffix
from polythrottle.domain.errors import BadFile, InvalidInput
from polythrottle.domain.units import is_finite, to_si
from polythrottle.storage.untrusted import bounded, parse_toml, read_plain, said, shortened

_MOST_BYTES = 4_000_000
_MOST = 1024
_SMALLEST = 1e-12
_LARGEST = 1e24
"""Between these lies what is measured in any unit; products and quotients of two such numbers are finite."""
Record = TypeVar("Record")

if TYPE_CHECKING:
    from typing import TypeGuard  # novermin


@dataclass(frozen=True)
class TomlTable:
    """One table of a TOML file.

    Args:
        file: The file it is in.
        place: Its dotted key in the file; empty for the file itself.
        values: What it holds.
    """

    file: Path
    place: str
    values: Mapping[str, Any]

    @classmethod
    def of_file(cls, file: Path) -> TomlTable:
        """Return the whole of a file.

        Raises:
            BadFile: If it cannot be read or is not TOML.
        """
        return cls.of_text(file, read_plain(file, _MOST_BYTES))

    @classmethod
    def of_text(cls, file: Path, text: bytes) -> TomlTable:
        """Return the document in a text, which a file holds.

        Raises:
            BadFile: If it is not TOML.
        """
        try:
            return cls(file, "", parse_toml(text))
        except (ValueError, RecursionError) as err:  # a number of thousands of digits is no TOMLDecodeError
            raise BadFile(f"{file} is not a TOML file that can be read: {bounded(said(err))}") from err

    def wrong(self, key: str, problem: str) -> BadFile:
        """Return the error that says what is wrong with one key; an empty key means the table itself."""
        where = ".".join(part for part in (self.place, key) if part)
        return BadFile(f"{self.file}: {bounded(where) or 'the file'} {problem}")

    def within(self, key: str) -> TomlTable:
        """Return the table under a key, empty if absent.

        Raises:
            BadFile: If something else is there.
        """
        return self._table(key, self.values.get(key, {}))

    def each(self, key: str) -> Iterator[tuple[str, TomlTable]]:
        """Yield the name and table of every table under a key.

        Raises:
            BadFile: If something else is there.
        """
        inner = self.within(key)
        return ((name, inner._table(name, value)) for name, value in inner.values.items())

    def listed(self, key: str) -> tuple[TomlTable, ...]:
        """Return every table of the array of tables under a key.

        Raises:
            BadFile: If something else is there.
        """
        tables = self.values.get(key, [])
        if not isinstance(tables, list):
            raise self.wrong(key, f"must be an array of tables: [[{key}]]")
        return tuple(self._table(f"{key}[{i}]", value) for i, value in enumerate(tables))

    def _table(self, key: str, value: object) -> TomlTable:
        if not isinstance(value, dict):
            raise self.wrong(key, f"must be a table, not {shortened(value)}")
        return TomlTable(self.file, ".".join(part for part in (self.place, key) if part), value)

    def check_keys(self, keys: Iterable[str]) -> None:
        """Check that the table has no keys but these.

        Raises:
            BadFile: If it has.
        """
        if unknown := sorted(set(self.values) - set(keys)):
            raise self.wrong(unknown[0], f"is not a key here; expected {', '.join(keys)}")

    def number(self, key: str, default: float | None = None, above: bool = False) -> float:
        """Return a finite number of at least 0, or above 0.

        Raises:
            BadFile: If it is something else, or missing without a default.
        """
        return self._number(key, self.values.get(key, default), above)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of numbers of at least 0.

        Raises:
            BadFile: If it is something else.
        """
        values = self.values.get(key)
        if not isinstance(values, list) or not 1 <= len(values) <= _MOST:
            raise self.wrong(key, f"must be a list of 1 to {_MOST} numbers, not {shortened(values)}")
        return tuple(self._number(key, value) for value in values)

    def whole(self, key: str, default: int) -> int:
        """Return a whole number from 1 to 1024.

        Raises:
            BadFile: If it is something else.
        """
        value = self.values.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= max(_MOST, default):
            raise self.wrong(key, f"must be a whole number from 1 to {_MOST}, not {shortened(value)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text.

        Raises:
            BadFile: If it is something else, empty, or missing without a default.
        """
        value = self.values.get(key, default)
        if value is None:
            raise self.wrong(key, "is missing; it needs a text")
        if not isinstance(value, str) or (not value.strip() and value != default):
            raise self.wrong(key, f"must be a text, not {shortened(value)}")
        return value.strip()

    def _number(self, key: str, value: object, above: bool = False) -> float:
        least = "above 0" if above else "of at least 0"
        if value is None:
            raise self.wrong(key, f"is missing; it needs a number {least}")
        if not _is_figure(value) or (above and value == 0):
            raise self.wrong(key, f"must be a number {least}, not {shortened(value)}")
        if value and not _SMALLEST <= value <= _LARGEST:
            raise self.wrong(key, f"must be 0 or from {_SMALLEST:g} to {_LARGEST:g}, not {shortened(value)}")
        return float(value)

    def fill(self, record: type[Record], **given: object) -> Record:
        """Return a dataclass filled from this table, units converted to SI and every figure's source checked.

        A field may itself be a dataclass, read from the table of its name, or missing if it has a default.

        Args:
            record: The dataclass.
            given: Fields that do not come from this table; their keys are not looked at.

        Raises:
            BadFile: If a key is missing, unknown or of the wrong type, a figure has no source, or the record refuses.
        """
        fields = {field.name: field for field in dataclasses.fields(record)}  # type: ignore[arg-type]
        keys = {to_si(key, 1.0)[0]: key for key in self.values}
        known = set(fields) | {"source"}
        if unknown := sorted(key for name, key in keys.items() if name not in known):
            raise self.wrong(unknown[0], f"is not a key here; expected {', '.join(sorted(known - set(given)))}")
        filled = dict(given)
        for name, field in fields.items():
            if name in keys and name not in given:
                filled[name] = self._value(keys[name], _hint(record, field))
            elif name not in given and field.default is dataclasses.MISSING:
                raise self.wrong(name, f"is missing; expected {_shown(_hint(record, field))}")
        self.check_sources()
        return self._build(record, filled)

    def _build(self, record: type[Record], filled: Mapping[str, object]) -> Record:
        try:
            return record(**filled)
        except InvalidInput as err:
            raise self.wrong("", f"does not hold together: {err}") from err

    def _value(self, key: str, hint: Any) -> object:
        value = self.values[key]
        wanted = _plain(hint)
        if dataclasses.is_dataclass(wanted):
            return self.within(key).fill(typing.cast("type[object]", wanted))
        if typing.get_origin(wanted) is tuple:
            return self._sequence(key, typing.get_args(wanted)[0])
        # In SI before it is judged: 1300.5 MHz are whole hertz.
        in_si = to_si(key, value)[1] if wanted in (int, float) and _is_figure(value) else value
        if not _fits(in_si, wanted):
            raise self.wrong(key, f"must be {_shown(hint)}, not {shortened(value)}")
        if wanted in (int, float):
            return wanted(in_si)
        return in_si

    def _sequence(self, key: str, wanted: type) -> tuple[object, ...]:
        values = self.values[key]
        if not isinstance(values, list) or not all(_fits(value, wanted) for value in values):
            raise self.wrong(key, f"must be a list of {_NAMES[wanted]}, not {shortened(values)}")
        return tuple(wanted(value) for value in values)

    def check_sources(self) -> None:
        """Check that ``source`` covers every figure: one text for all, or a table of texts by key and for ``others``.

        Raises:
            BadFile: If it does not.
        """
        source = self.values.get("source", {})
        if isinstance(source, str) and source.strip():
            return
        if not isinstance(source, dict) or not all(isinstance(text, str) and text.strip() for text in source.values()):
            raise self.wrong("source", "must be a text, or a table with a text for each figure")
        for key, value in self.values.items():
            if _holds_figures(value) and key not in source and "others" not in source:
                raise self.wrong(key, "has no source; name where the figure comes from, or write assumed")


_NAMES: dict[Any, str] = {
    int: "a whole number of at least 0",
    float: "a finite number of at least 0",
    str: "a text",
    bool: "true or false",
}


def _hint(record: type[object], field: dataclasses.Field[Any]) -> Any:
    """Return the type of a field, None left out; Python 3.8 knows neither ``tuple[…]`` nor ``… | None``."""
    if not isinstance(field.type, str):
        return field.type
    annotations = {field.name: removesuffix(field.type, " | None")}
    stand_in = type(record.__name__, (), {"__annotations__": annotations, "__module__": record.__module__})
    return typing.get_type_hints(stand_in, localns={"tuple": typing.Tuple})[field.name]


def _is_figure(value: object) -> TypeGuard[float]:
    # To Python true is a number; and `math.isfinite` raises at a whole number of hundreds of digits, which TOML allows.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and is_finite(value) and value >= 0


def _holds_figures(value: object) -> bool:
    return _is_figure(value[0] if isinstance(value, list) and value else value)


def _fits(value: object, wanted: type) -> bool:
    if wanted in (int, float):
        # `int` would cut 2.5 to 2, a size that nobody has written; 2.0 is 2.
        return _is_figure(value) and (wanted is float or value % 1 == 0)
    # Not `isinstance`, by which true would be a whole number.
    return type(value) is wanted


def _plain(hint: Any) -> Any:
    # `X | None` has an origin of its own from Python 3.10 on; the module is carried to boards with 3.8.
    if typing.get_origin(hint) in (getattr(types, "UnionType", typing.Union), typing.Union):
        return next(part for part in typing.get_args(hint) if part is not type(None))
    return hint


def _shown(hint: Any) -> str:
    wanted = _plain(hint)
    if typing.get_origin(wanted) is tuple:
        return "a list"
    return _NAMES.get(wanted, "a table")
