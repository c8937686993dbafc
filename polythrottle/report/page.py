"""The report: one HTML file that needs nothing else, made from a study alone."""

import os
import secrets
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType

from polythrottle.errors import StorageError
from polythrottle.report.digest import Digest
from polythrottle.report.gallery import gallery
from polythrottle.report.headline import headline
from polythrottle.report.ink import styled
from polythrottle.report.markup import Html, joined, tag
from polythrottle.report.tables import TrialTable, about
from polythrottle.study import Study

# The page may load nothing at all: what it shows is inside it.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def write_report(
    study: Study,
    path: Path,
    *,
    title: str = "",
    facts: Mapping[str, str] = MappingProxyType({}),
    profile: Path | None = None,
) -> None:
    """Write the report of a study as one HTML file; the file is replaced whole or not at all.

    Args:
        study: What to report, finished or not.
        path: Where to; missing folders are made.
        title: Of the page; by default the workload and the device.
        facts: More to say about the study, such as where its journal is.
        profile: File with the answer; the page says how to apply it.

    Raises:
        StorageError: If the file cannot be written, or would replace something that is not a page.
    """
    _check_replaceable(path)
    page = report_html(study, title=title, facts=facts, profile=profile).encode("utf-8", "replace")
    part = path.parent / f".report-{secrets.token_hex(4)}.html"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _store(page, part)
        part.replace(path)
    except (OSError, ValueError) as err:  # ValueError: a path with a null character.
        why = getattr(err, "strerror", None) or err
        raise StorageError(f"cannot write the report to {path}: {why}; name a file that can be written") from err
    finally:
        with suppress(OSError, ValueError):
            part.unlink(missing_ok=True)


def report_html(
    study: Study,
    *,
    title: str = "",
    facts: Mapping[str, str] = MappingProxyType({}),
    profile: Path | None = None,
) -> str:
    """Return the report of a study as one HTML document, the same for the same study.

    Args:
        study: What to report, finished or not.
        title: Of the page; by default the workload and the device.
        facts: More to say about the study.
        profile: File with the answer; the page says how to apply it.
    """
    digest = Digest(study)
    heading = title or f"{study.problem.workload or 'workload'} on {study.problem.device or 'device'}"
    with styled():
        body = tag("main", *_sections(digest, heading, facts, profile))
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{heading} · polythrottle"),
        tag("style", _part("page.css")),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', body, tag('script', _part('page.js'))), lang='en')}\n"


def _sections(digest: Digest, heading: str, facts: Mapping[str, str], profile: Path | None) -> Iterator[Html]:
    kind = tag("span", f"{digest.kind} energy", class_="kind") if digest.kind else ""
    yield tag("header", tag("p", "polythrottle report ", kind, class_="over"), tag("h1", heading))
    yield headline(digest)
    if profile is not None and digest.best is not None:
        yield _apply(profile, served="batch_size" in digest.best.point)
    if digest.seen:
        yield from gallery(digest)
    if digest.study.trials or digest.study.references:
        yield _trials(TrialTable(digest))
    yield tag("section", tag("h2", "About this study"), about(digest, facts), class_="card")


def _apply(profile: Path, served: bool) -> Html:
    """Return the command that applies the answer, with a button that only a script makes visible."""
    command = tag("code", f"polythrottle apply {shlex.quote(str(profile))}", id="apply")
    copy = tag("button", "Copy", type="button", id="copy", hidden="")
    words = "The settings revert after a minute unless you confirm them."
    if served:
        words += " The batch size is set where the model is served."
    return tag(
        "section",
        tag("h2", "Apply it"),
        tag("p", joined((command, copy), " "), class_="command"),
        tag("p", words, class_="note"),
        class_="card",
    )


def _trials(table: TrialTable) -> Html:
    """Return the table of trials; columns that few readers miss are shown on demand."""
    head = [tag("h2", "Trials")]
    if table.more:
        box = tag("input", type="checkbox", id="all")
        head.append(tag("label", box, f" Show {', '.join(table.more)} too", class_="note"))
    note = [tag("p", table.note, class_="note")] if table.note else []
    wide = tag("div", table.html(), class_="wide", tabindex="0")
    return tag("section", tag("div", joined(head), class_="bar"), wide, *note, class_="card trials-card")


def _check_replaceable(path: Path) -> None:
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            if not path.is_file() and path.exists():
                raise StorageError(f"cannot write the report to {path}: it is not a regular file")
            with path.open("rb") as file:
                begun = file.read(15).lower()
            if begun not in (b"", b"<!doctype html>"):
                raise StorageError(f"cannot write the report to {path}: something else is there; name another file")
    except (OSError, ValueError) as err:
        why = getattr(err, "strerror", None) or err
        raise StorageError(f"cannot write the report to {path}: {why}; name a file that can be written") from err


def _store(page: bytes, part: Path) -> None:
    with part.open("xb") as file:
        file.write(page)
        file.flush()
        os.fsync(file.fileno())


def _part(name: str) -> Html:
    return Html(files("polythrottle.report").joinpath(name).read_text("utf-8"))
