"""``/etc/nvpmodel.conf``: the board's own power modes.

Its blocks, each begun by a line in angle brackets, are ``PARAM`` (names of files), ``POWER_MODEL`` (what a mode writes
to them) and ``PM_CONFIG``; −1 means no limit, as does 0 for the memory. The watts in a mode's name are a name, not a
budget (NVIDIA Jetson Linux developer guide, "Supported Modes and Power Efficiency").
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_HEAD = re.compile(r"<\s*(PARAM|POWER_MODEL|PM_CONFIG|FAN_CONFIG|FAN_MODE|\w+)\b([^>]*)>")
_PAIR = re.compile(r"(\w+)\s*=\s*(\S+)")
_TWIN = "_KNEXT"  # the same limit's file under another kernel


@dataclass(frozen=True)
class PowerMode:
    """One mode.

    Args:
        number: What nvpmodel calls it by.
        name: What people call it.
        values: What it writes, by parameter and argument.
    """

    number: int
    name: str
    values: Mapping[tuple[str, str], str]

    def limit(self, parameter: str, argument: str = "MAX_FREQ") -> int | None:
        """Return a limit in the unit of its file, or None where the mode sets none."""
        text = self.values.get((parameter, argument), "")
        return int(text) if re.fullmatch(r"\d{1,18}", text) and int(text) > 0 else None


@dataclass(frozen=True)
class PowerModes:
    """What the file says.

    Args:
        files: For every parameter the files its arguments stand for.
        modes: In the order of the file.
    """

    files: Mapping[str, Mapping[str, str]]
    modes: tuple[PowerMode, ...]

    @classmethod
    def parse(cls, text: str) -> "PowerModes":
        """Return what a file says; lines that say nothing known are passed over, a repeated mode counts once."""
        files: dict[str, dict[str, str]] = {}
        modes: dict[int, PowerMode] = {}
        for kind, given, lines in _blocks(text):
            if kind == "PARAM" and "NAME" in given:
                files[given["NAME"]] = {words[0]: words[1] for words in lines if len(words) == 2}
            elif kind == "POWER_MODEL" and given.get("ID", "").isdecimal() and len(given["ID"]) < 4:
                values = {(words[0], words[1]): words[2] for words in lines if len(words) == 3}
                number = int(given["ID"])
                modes.setdefault(number, PowerMode(number, given.get("NAME", str(number)), values))
        return cls(files, tuple(modes.values()))

    def parameters(self, *endings: str) -> tuple[str, ...]:
        """Return the parameters one of whose files ends so, its twin under another kernel counted too."""
        return tuple(
            name for name, arguments in self.files.items() if any(path.endswith(endings) for path in arguments.values())
        )

    def fixed(self, mode: PowerMode) -> Mapping[tuple[str, str], str]:
        """Return what a mode sets besides clocks, cores and runtime power: to change it may take a reboot."""
        switched = {name for name, arguments in self.files.items() if _harmless(arguments)}
        return {key: value for key, value in mode.values.items() if key[0] not in switched}


def _harmless(arguments: Mapping[str, str]) -> bool:
    clock = any(name.removesuffix(_TWIN) in ("MAX_FREQ", "MIN_FREQ", "FREQ_TABLE") for name in arguments)
    return clock or all(path.endswith(("/online", "/power/control")) for path in arguments.values())


def _blocks(text: str) -> Iterator[tuple[str, dict[str, str], list[list[str]]]]:
    """Yield kind, attributes and the words of the lines of every block."""
    head: tuple[str, dict[str, str]] | None = None
    lines: list[list[str]] = []
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        match = _HEAD.match(" ".join(words))
        if match is None:
            lines.append(words)
            continue
        if head is not None:
            yield (*head, lines)
        head, lines = (match[1], dict(_PAIR.findall(match[2]))), []
    if head is not None:
        yield (*head, lines)
