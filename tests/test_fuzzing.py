"""Whatever the bytes, a reader returns a value or refuses in one line: it neither crashes nor hangs nor runs code.

A few documents each; ``POLYTHROTTLE_FUZZ=N`` tries N of each. `benchmarks/fuzz.py` goes through a million.
"""

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parsers import CORPORA, PARSERS, Parser, _loop

EXAMPLES = int(os.environ.get("POLYTHROTTLE_FUZZ", "0")) or 25
SETTINGS = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="POLYTHROTTLE_FUZZ" not in os.environ,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
each = pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)


@pytest.fixture(scope="module", autouse=True)
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Close the loop in which bodies were read."""
    yield _loop()
    _loop().close()
    _loop.cache_clear()


@each
def test_every_reader_takes_some_document_of_its_corpus(parser: Parser, tmp_path: Path) -> None:
    """Else what is damaged would be refused for something else."""
    taken = [parser.feed(tmp_path, parser.sealed(seed)) for seed in parser.seeds]
    assert any(taken)


def test_the_corpora_are_those_of_readers() -> None:
    """And small."""
    assert {path.name for path in CORPORA.iterdir()} <= {parser.name for parser in PARSERS}
    assert sum(path.stat().st_size for path in CORPORA.rglob("*") if path.is_file()) < 500_000


@each
def test_any_bytes_are_read_or_refused(parser: Parser, tmp_path: Path) -> None:
    """Of whatever kind and length."""

    @given(st.binary(max_size=200))
    @SETTINGS
    def check(data: bytes) -> None:
        parser.feed(tmp_path, data)
        parser.feed(tmp_path, parser.sealed(data))

    check()


@each
def test_a_damaged_document_is_read_or_refused(parser: Parser, tmp_path: Path) -> None:
    """Cut, doubled, or with other values in it; its checksums made anew."""

    @given(st.integers(0, 2**64))
    @SETTINGS
    def check(seed: int) -> None:
        parser.feed(tmp_path, parser.damaged(random.Random(seed)))

    check()
