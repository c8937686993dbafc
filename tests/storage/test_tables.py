"""Lines of CSV files as other people write them: what is read, and what is said where it cannot be."""

import gzip
from pathlib import Path

import pandas as pd
import pytest

from polythrottle.domain.errors import BadFile, InvalidInput, StorageError
from polythrottle.storage import cells as parquet
from polythrottle.storage import tables
from polythrottle.storage.cells import Cells
from polythrottle.storage.tables import lines

PLAIN = "gpu,steps,step_s\nA,3,0.5\nB,4,0.25\n"
NAMES = ("gpu", "steps", "step_s")


def read(folder: Path, text: str | bytes, columns: tuple[str, ...] = NAMES) -> list[Cells]:
    """Return the lines of a file with a text or bytes."""
    path = folder / "table.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    slow = list(lines(path, columns))
    fast = list(tables.read(path, columns).rows())
    assert [(one.line, dict(one.cells)) for one in fast] == [(one.line, dict(one.cells)) for one in slow]
    return fast


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        "\ufeff" + PLAIN,
        PLAIN.replace("\n", "\r\n"),
        PLAIN.replace("\n", "\r"),
        PLAIN.replace(",", ";"),
        PLAIN.replace(",", "\t"),
        PLAIN.replace(",", "|"),
        "sep=;\n" + PLAIN.replace(",", ";"),
        '# a "note, with a quote\n\n' + PLAIN.replace("B,", "# another\n\nB,"),
        "# " + PLAIN,
        '"gpu","steps","step_s"\n"A","3","0.5"\n"B","4","0.25"\n',
        "gpu,steps,step_s,,\nA,3,0.5,,\nB,4,0.25,,\n",
        " gpu , steps , step_s \n A , 3 , 0.5 \n B , 4 , 0.25 \n",
    ],
    ids=range(13),
)
def test_however_a_table_is_written_it_reads_the_same(tmp_path: Path, text: str) -> None:
    """Separators, line ends, marks, comments, quotes and what spreadsheets add change nothing."""
    found = read(tmp_path, text)
    assert [(one.text("gpu"), one.whole("steps"), one.number("step_s")) for one in found] == [
        ("A", 3, 0.5),
        ("B", 4, 0.25),
    ]
    assert read(tmp_path, gzip.compress(text.encode()))[1].text("gpu") == "B"


def test_a_missing_column_is_told_with_what_is_there(tmp_path: Path) -> None:
    """The line says which columns are needed, which were found, and which only need another name."""
    with pytest.raises(BadFile) as caught:
        read(tmp_path, "GPU,step,colour\nA,3,red\n")
    said = str(caught.value)
    assert "no column gpu, steps, step_s" in said
    assert "has GPU, step, colour" in said
    assert "rename 'GPU' to 'gpu'" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has nothing"),
        ("\n# only a comment\n", "has nothing"),
        (PLAIN.encode("utf-16"), "not a CSV file in UTF-8"),
        (b"PK\x03\x04\xff\xfe", "not a CSV file in UTF-8"),
        (PLAIN + "C,1\n", "line 4: 2 fields, but the header has 3"),
        (PLAIN + "C,1,2,3\n", "line 4: 'C,1,2,3' has 4 fields, the header 3; write 2.5, not 2,5"),
        ("# note\n\n" + PLAIN + "\nC,1\n", "line 7: 2 fields"),
        (PLAIN.replace("step_s", "gpu"), "no column step_s"),
        (PLAIN.replace("step_s", "step_s,steps").replace("0.5", "0.5,1"), "line 1: repeats the column steps"),
    ],
)
def test_what_is_no_table_is_one_line(tmp_path: Path, text: str | bytes, said: str) -> None:
    """The line names the place as an editor counts it."""
    with pytest.raises(BadFile, match=said):
        read(tmp_path, text)
    with pytest.raises(BadFile, match=said):
        tables.read(tmp_path / "table.csv", NAMES)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("A;3;0,5", "write a decimal point"),
        ("A;3.5;0.5", "steps is 3.5; it needs a whole number"),
        ("A;1e9;0.5", "steps is 1e9; it needs a number from 1 to 1e\\+06"),
        ("A;0;0.5", "steps is 0; it needs a number of at least 1"),
        ("A;3;1e300", "needs a number from 1e-12 to 1e\\+24"),
        ("A;3;nan", "step_s is nan"),
        ("\x1b[31mA;3;0.5", "name that can be printed"),
        (" ;3;0.5", "gpu is empty"),
    ],
)
def test_a_bad_cell_is_named(tmp_path: Path, row: str, said: str) -> None:
    """File, line and column, what is there and what is needed."""
    (one,) = read(tmp_path, f"gpu;steps;step_s\n{row}\n")
    with pytest.raises(BadFile, match=f"line 2: .*{said}"):
        _ = one.text("gpu"), one.whole("steps"), one.number("step_s")


def test_times_are_told_in_utc(tmp_path: Path) -> None:
    """With a zone or without, so that they can be compared; a year far off is an error."""
    found = read(tmp_path, "when\n2020-01-01T02:00:00+02:00\n2020-01-01 00:00:00\n0001-01-01\nnoon\n", ("when",))
    assert found[0].time("when") == found[1].time("when")
    for cells, said in ((found[2], "a year from 1971 to 2100"), (found[3], "a time such as")):
        with pytest.raises(BadFile, match=said):
            cells.time("when")


def test_a_name_is_one_line(tmp_path: Path) -> None:
    """A line break within quotes becomes a space; an empty cell or none is unknown, not zero."""
    (found,) = read(tmp_path, 'gpu,watts\n"A\nbig",NaN\n', ("gpu",))
    assert found.text("gpu") == "A big"
    assert found.perhaps("watts") is None
    assert found.perhaps("volts") is None


def test_only_files_on_disk_are_tables(tmp_path: Path) -> None:
    """A folder, a name too long for a file and a file that is not there are one line each."""
    for path, said in (
        (tmp_path, "no file that"),
        (tmp_path / ("x" * 300), "cannot be read"),
        (tmp_path / "a", "no file"),
    ):
        with pytest.raises(BadFile, match=said):
            list(lines(path, ()))


def test_a_long_table_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are counted through all of them, also where a later piece has to be read row by row."""
    monkeypatch.setattr(tables, "_AT_ONCE", 3)
    text = "t\n" + "".join(f"{i}\n" for i in range(10)) + '"10"\nx\n'
    path = tmp_path / "t.csv"
    path.write_text(text)
    pieces = list(tables.parts(path, ("t",)))
    assert [len(one.frame) for one in pieces] == [3, 3, 3, 3]
    assert pieces[1].numbers("t").tolist() == [3.0, 4.0, 5.0]
    with pytest.raises(BadFile, match="line 13: t is 'x'; it needs a number"):
        pieces[-1].numbers("t")


def test_too_much_is_refused_before_it_is_held(tmp_path: Path) -> None:
    """Too many rows, and an archive that is one line of megabytes."""
    path = tmp_path / "t.csv"
    path.write_text("t\n" + "1\n" * 20)
    with pytest.raises(BadFile, match="more than 10 rows; cut it"):
        tables.read(path, most_rows=10)
    for text in ("t\n" + "1" * 1_100_000, "t" * 1_100_000):
        path.write_bytes(gzip.compress(text.encode(), 1))
        for read_it in (tables.read, lambda path: list(lines(path))):
            with pytest.raises(BadFile, match="a line of more than 1,000,000 characters"):
                read_it(path)


def test_a_frame_has_numbers_where_a_column_holds_nothing_else(tmp_path: Path) -> None:
    """Whole ones stay whole, an empty cell is unknown, anything else leaves the texts as they are."""
    (tmp_path / "t.csv").write_text("a,b,c,d\n1,1.5,x,\n2,,3,\n")
    frame = tables.read(tmp_path / "t.csv").typed()
    assert [str(frame[name].dtype) for name in "abd"] == ["int64", "float64", "float64"]
    assert frame["c"].tolist() == ["x", "3"]


def test_a_table_is_written_as_its_ending_says(tmp_path: Path) -> None:
    """What is written is read again, exactly; another ending, a folder and no folder are refused before."""
    frame = pd.DataFrame({"name": ["a", None], "value": [0.1 + 0.2, float("nan")], "count": [1, 2]})
    for name in ("t.csv", "t.parquet"):
        tables.write(frame, tmp_path / "new" / name)
        found = tables.read(tmp_path / "new" / name, ("value",)).typed()
        assert found["name"].tolist() == ["a", ""]
        assert found["value"].iloc[0] == 0.1 + 0.2
        assert found["count"].tolist() == [1, 2]
    assert tables.header(tmp_path / "new/t.parquet") == ("name", "value", "count")
    (tmp_path / "d.csv").mkdir()
    (tmp_path / "file").touch()
    for path, error, said in (
        (tmp_path / "t.xlsx", InvalidInput, "ends in .csv or .parquet"),
        (tmp_path / "d.csv", StorageError, "not a regular file"),
        (tmp_path / "file/t.csv", StorageError, "not a folder"),
    ):
        with pytest.raises(error, match=said):
            tables.check_writable(path)


def test_parquet_that_is_no_table_is_one_line(tmp_path: Path) -> None:
    """Damaged, with lists in a column, without a column that is needed."""
    path = tmp_path / "t.parquet"
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(BadFile, match="is no Parquet file, or is damaged"):
        tables.read(path)
    pd.DataFrame({"a": [[1, 2]]}).to_parquet(path)
    with pytest.raises(BadFile, match="column a holds lists or records"):
        tables.read(path)
    pd.DataFrame({"a": ["1", "x"]}).to_parquet(path)
    with pytest.raises(BadFile, match="no column b; it needs b and has a"):
        tables.read(path, ("b",))
    with pytest.raises(BadFile, match="line 2: a is 'x'"):
        tables.read(path).numbers("a")


@pytest.mark.parametrize("bound", ["_MOST_ROWS", "_MOST_GROUPS", "_MOST_UNPACKED"])
def test_parquet_that_unpacks_to_more_than_a_table_is_refused_by_its_head(
    tmp_path: Path, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many rows, parts or bytes, as the file says itself, are one line before anything is unpacked."""
    path = tmp_path / "t.parquet"
    pd.DataFrame({"a": range(1001)}).to_parquet(path, row_group_size=100)
    assert len(tables.read(path, ("a",)).frame) == 1001
    monkeypatch.setattr(parquet, bound, {"_MOST_ROWS": 1000, "_MOST_GROUPS": 10, "_MOST_UNPACKED": 1000}[bound])
    monkeypatch.setattr("pyarrow.parquet.ParquetFile.iter_batches", None)
    with pytest.raises(BadFile, match="unpacks to more than"):
        tables.read(path, ("a",))
