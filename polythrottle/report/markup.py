"""HTML that escapes by itself: only what `tag` and `Html` made is taken as markup, any other text is text."""

from collections.abc import Iterable
from html import escape

_VOID = frozenset({"meta", "br", "input"})


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str) -> Html:
    """Return one element; children and attributes are escaped unless they are `Html`.

    Args:
        name: Of the element.
        children: Its content.
        attributes: A trailing underscore is dropped (``class_``), others become hyphens (``aria_label``).
    """
    written = "".join(f' {_attribute(key)}="{escape(value)}"' for key, value in attributes.items())
    if name in _VOID:
        return Html(f"<{name}{written}>")
    return Html(f"<{name}{written}>{joined(children)}</{name}>")


def joined(children: Iterable[str], between: str = "") -> Html:
    """Return pieces one after the other, escaped unless they are `Html`."""
    return Html(between.join(child if isinstance(child, Html) else escape(child) for child in children))


def _attribute(key: str) -> str:
    return key.rstrip("_").replace("_", "-")
