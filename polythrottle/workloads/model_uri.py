"""A model's URI: a file or a place in Python code, and options behind a question mark."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from polythrottle.errors import InvalidInput, UnknownName


@dataclass(frozen=True)
class ModelUri:
    """A model's URI taken apart: ``model.onnx?providers=cpu`` is a path and one option.

    Args:
        name: The path, or ``package.module:callable``.
        options: What follows the question mark.
    """

    name: str
    options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> "ModelUri":
        """Return the parts of a URI; a file whose name has a question mark in it is a file.

        Raises:
            InvalidInput: If an option is not of the form ``key=value`` or is given twice.
        """
        name, _, query = text.partition("?")
        if not query or Path(text).exists():
            return cls(text if Path(text).exists() else name)
        options: dict[str, str] = {}
        for part in query.split("&"):
            key, _, value = part.partition("=")
            if not (key and value) or key in options:
                raise InvalidInput(f"{part!r} in {text!r} is not an option; write for example {name}?providers=cpu")
            options[key] = value
        return cls(name, options)

    def only(self, kind: str, *known: str) -> None:
        """Check that no option but the known ones is given.

        Raises:
            UnknownName: If another is.
        """
        for key in self.options:
            if key not in known:
                raise UnknownName(f"option of {kind}", key, known)

    def chosen(self, key: str, known: Sequence[str]) -> tuple[str, ...]:
        """Return the values of an option, separated by commas; none if it is not given.

        Raises:
            UnknownName: If one is not known.
            InvalidInput: If one is given twice.
        """
        values = tuple(each.strip().lower() for each in self.options.get(key, "").split(",") if each.strip())
        for value in values:
            if value not in known:
                raise UnknownName(f"{key} of {self.name}", value, known)
        if len(set(values)) < len(values):
            raise InvalidInput(f"{key}={self.options[key]} names one twice")
        return values
