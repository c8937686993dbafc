"""Texts from outside as they may be shown: without what steers a terminal, forges a line of a log or reverses words."""

from types import MappingProxyType

_CODES = (*range(0x80, 0xA0), 0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
NEVER_SHOWN = MappingProxyType(dict.fromkeys(_CODES, "\N{REPLACEMENT CHARACTER}"))
"""For `str.translate`: the second set of control characters (ISO 6429), separators of lines, and what changes the
direction of writing (Unicode Standard Annex 9), none of which this program ever has a reason to print."""


def printable(text: str) -> str:
    """Return a text in one line, with a blank for each character that cannot be printed."""
    return text if text.isprintable() else "".join(each if each.isprintable() else " " for each in text)
