"""Reading a journal without changing or locking it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polythrottle.domain.error_budget import LateRequests
from polythrottle.domain.errors import BadFile
from polythrottle.domain.study import Study
from polythrottle.storage.journal.fold import folded
from polythrottle.storage.journal.lines import check_format
from polythrottle.storage.untrusted import check_plain, said


def read(path: Path) -> Study:
    """Return the study a journal holds, without changing or locking the file.

    Raises:
        BadFile: If there is no such file, or it is not a journal, or of a newer format; names the line.
    """
    return told(path, content(path))[1]


def content(path: Path) -> bytes:
    """Return the bytes of a file that may be a journal.

    Raises:
        BadFile: If there is none, or it cannot be read.
    """
    check_regular(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadFile(f"{path} cannot be read: {error.strerror}") from error


def told(path: Path, data: bytes) -> tuple[int, Study]:
    """Return how many bytes of a journal's content are whole lines, and the study they tell.

    Args:
        path: Where the content is from, for messages.
        data: All of the content, or its beginning.

    Raises:
        BadFile: As `read`.
    """
    whole, fold = folded(path, data)
    if fold.study is None:
        raise BadFile(f"{path} holds no study; a journal is made by polythrottle tune")
    return whole, fold.study


def heading(path: Path) -> Mapping[str, Any]:
    """Return the first line of a journal as it stands there: what it is about, without the study being built.

    Raises:
        BadFile: If it is not the first line of a journal.
    """
    check_regular(path)
    try:
        with open(path, "rb") as file:
            line = json.loads(file.readline())
        check_format(line)
    except OSError as error:
        raise BadFile(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{path} line 1 is not a line of a journal: {said(error)}") from error
    if line.get("event") != "study":
        raise BadFile(f"{path} line 1 is not the first line of a journal")
    return dict(line)


def ending(path: Path) -> str | None:
    """Return why the study of a journal has ended; None if it has not.

    Raises:
        BadFile: As `read`.
    """
    return folded(path, content(path))[1].finished


def late_requests(path: Path) -> LateRequests:
    """Return what the trials of a journal have spent of an error budget.

    Raises:
        BadFile: As `read`.
    """
    return folded(path, content(path))[1].spent


def is_finished(path: Path) -> bool:
    """Return whether a journal ends with its study finished; a file that holds no study yet is not."""
    return ending(path) is not None


def holds_study(path: Path) -> bool:
    """Return whether a file has at least one whole line, so that it is a journal to continue rather than to start."""
    check_regular(path)
    try:
        return b"\n" in path.read_bytes()
    # Still to be made, its folder perhaps as well.
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise BadFile(f"{path} cannot be read: {error.strerror}") from error


def check_regular(path: Path) -> None:
    """Refuse devices, pipes and folders: reading them may never end.

    Raises:
        BadFile: If it is one, or cannot be looked at.
    """
    try:
        strange = path.exists() and not path.is_file()
    except OSError as error:
        raise BadFile(f"{path} cannot be read: {error.strerror}") from error
    if strange:
        raise BadFile(f"{path} is not a regular file; a journal is one")
    check_plain(path)
