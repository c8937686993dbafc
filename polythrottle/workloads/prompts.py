"""What a language model is asked: lines of a file, or made-up words of about a given number of tokens."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from polythrottle.errors import BadFile

_WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state"),
    *("family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company"),
    *("system", "program", "question", "work", "government", "number", "night", "point", "home", "water", "room"),
)


def made_up_prompts(words: int) -> Iterator[str]:
    """Yield prompts without end, each of so many words, the same ones every time.

    A common English word is about one token to most tokenisers; how many there were the server says afterwards. No two
    begin alike, or a server that keeps prefixes would be asked for less than it seems.

    Args:
        words: How many in each.
    """
    for number in itertools.count():
        random = np.random.default_rng(number)
        yield " ".join([f"{number}", *random.choice(_WORDS, words - 1)])


def prompts_of(path: str) -> Iterator[str]:
    """Yield the lines of a file without end, from the first to the last and again; empty ones are left out.

    Raises:
        BadFile: If it cannot be read, is no text, or has no line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as err:
        raise BadFile(f"the prompts in {path} cannot be read: {err.strerror}") from err
    except UnicodeDecodeError as err:
        raise BadFile(f"{path} holds no prompts: it is no UTF-8 text") from err
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise BadFile(f"{path} holds no prompts; write one a line")
    return itertools.cycle(lines)
