"""Delimited text in chunks: what is written is read, whatever the chunk size; every bad row is counted once."""

from __future__ import annotations

import csv
import io
import os
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinstep.spec.errors import DataError
from twinstep.worker.data.badrows import BadRows
from twinstep.worker.data.delimited import Column, Delimited, gather, read_delimited
from twinstep.worker.data.files import DataFile, open_folder

CSV = Delimited(delimiter=",", quoted=True)
INT64 = st.integers(-(2**63), 2**63 - 1)
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0"), max_size=8)


def memory_file(data: bytes, name: str = "x.csv") -> DataFile:
    fs = fsspec.filesystem("memory")
    fs.pipe(f"/delimited/{name}", data)
    return DataFile(name=name, path=f"/delimited/{name}", fs=fs)


def read(data: bytes, bad: BadRows, chunk_bytes: int) -> dict[str, Column]:
    """Read whole number n, number x in -1e9..1e9 and text t."""
    return gather(
        chunk.keep(
            bad, row=chunk.rows, n=chunk.integers("n"), x=chunk.floats("x", low=-1e9, high=1e9), t=chunk.text("t")
        )
        for chunk in read_delimited(memory_file(data), CSV, ("n", "x", "t"), chunk_bytes=chunk_bytes)
    )


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(INT64, st.floats(-1e9, 1e9), WORDS), max_size=12),
    st.integers(1, 200),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
)
def test_what_is_written_is_read(rows: list[tuple[int, float, str]], size: int, end: str, mark: bool) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator=end)
    writer.writerows([("n", "x", "t"), *rows])
    data = (b"\xef\xbb\xbf" if mark else b"") + text.getvalue().encode()
    bad = BadRows()
    found = read(data, bad, size)
    assert found["n"].tolist() == [row[0] for row in rows]
    assert found["x"].tolist() == [row[1] for row in rows]
    assert found["t"].to_pylist() == [row[2] for row in rows]
    assert found["row"].tolist() == list(range(2, len(rows) + 2))
    assert (bad.count, bad.kept) == (0, len(rows))


LINES = st.sampled_from(
    [b"1,2,a", b"-5,0.25,\xc3\xa9", b"1,2", b"1,2,3,4", b"", b"x,1,a", b"9223372036854775808,1,a", b"1,nan,a", b"1,,a",
     b'1,2,"a', b'1,2,"a,b"', b"1,\r2,a", b"1,2,\xff", b" 1,2,a", b"1,1_0,a", b"+1,2,a", b"\x00,2,a", b"0x1,2,a"]
)  # fmt: skip
GOOD = {b"1,2,a", b"-5,0.25,\xc3\xa9", b'1,2,"a,b"'}


@settings(deadline=None, max_examples=120)
@given(st.lists(LINES, max_size=14), st.integers(1, 60), st.booleans())
def test_the_size_of_chunks_changes_nothing_and_every_bad_row_is_counted_once(
    lines: list[bytes], size: int, ended: bool
) -> None:
    data = b"n,x,t\n" + b"\n".join(lines) + (b"\n" if ended else b"")
    whole, parts = BadRows(policy="skip"), BadRows(policy="skip")
    first, second = read(data, whole, 1 << 20), read(data, parts, size)
    assert {name: values.tolist() for name, values in first.items()} == {
        name: values.tolist() for name, values in second.items()
    }
    assert whole == parts
    rows = [row for row, line in enumerate(lines, start=2) if line in GOOD]
    assert first["row"].tolist() == rows
    assert whole.kept == len(rows)
    assert whole.count == sum(line not in GOOD and line != b"" for line in lines)
    strict = [BadRows(), BadRows()]
    said = []
    for bad, chunk in zip(strict, (1 << 20, size), strict=True):
        try:
            read(data, bad, chunk)
            said.append("")
        except DataError as error:
            said.append(error.problem)
    assert said[0] == said[1] == (str(whole.first[0]) if whole.count else "")


def test_utf_16_is_named_and_a_second_column_of_a_name_is_not_read() -> None:
    with pytest.raises(DataError, match="UTF-16"):
        read("n,x,t\n1,2,a\n".encode("utf-16"), BadRows(), 100)
    assert read(b"n,x,t,n\n1,2,a,7\n", BadRows(), 100)["n"].tolist() == [1]


def test_a_line_longer_than_any_chunk_is_left_out_and_reading_goes_on() -> None:
    long = b"1,2," + b"a" * (1 << 20)
    data = b"n,x,t\n1,2,a\n" + long + b"\n3,4,b\n" + long
    for chunk in (1000, 1 << 19, 1 << 23):
        bad = BadRows(policy="skip")
        assert read(data, bad, chunk)["n"].tolist() == [1, 3]
        assert [row.place for row in bad.first] == ["row 3", "row 5"]


@pytest.mark.parametrize("change", ["longer", "touched"])
def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, change: str) -> None:
    path = tmp_path / "x.csv"
    path.write_text("n,x,t\n" + "1,2,a\n" * 1000)
    with pytest.raises(DataError, match=r"x\.csv changed while it was read"):  # noqa: PT012
        chunks = read_delimited(open_folder(str(tmp_path)).file("x.csv"), CSV, ("n",), chunk_bytes=512)
        for _ in chunks:  # it grows as fast as it is read
            if change == "longer":
                with path.open("a") as file:
                    file.write("1,2,a\n")
            else:
                os.utime(path, (1, 1))


CHILD = """
import resource, sys
from twinstep.worker.data.delimited import Delimited, read_delimited
from twinstep.worker.data.files import open_folder
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
form = Delimited(delimiter=",")
def run(name):
    total = rows = 0
    for chunk in read_delimited(open_folder(sys.argv[1]).file(name), form, ("a", "b"), chunk_bytes=1 << 20):
        total, rows = total + int(chunk.integers("a").sum()), rows + len(chunk.rows)
    return total, rows
run("small.csv")  # whatever is loaded or allocated once
before = peak()
total, rows = run("large.csv")
print(peak() - before, total, rows)
"""


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    line = b"123456789,a field that nobody asks for,7,and one more of them\n"
    (tmp_path / "small.csv").write_bytes(b"a,x,b,y\n" + line * 40_000)
    (tmp_path / "large.csv").write_bytes(b"a,x,b,y\n" + line * 850_000)  # 52 MB
    found = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    ).stdout.split()
    assert int(found[2]) == 850_000
    assert int(found[1]) == 850_000 * 123456789
    assert float(found[0]) < 16, "MiB beyond what a file of two chunks takes"


def test_numbers_at_the_edges_of_int64_are_read() -> None:
    data = f"n,x,t\n{-(2**63)},0,a\n{2**63 - 1},0,b\n".encode()
    assert read(data, BadRows(), 100)["n"].tolist() == [np.iinfo(np.int64).min, np.iinfo(np.int64).max]


@pytest.mark.parametrize("text", [b"\n", b"\n\n\n", b"\r\n\r\n", b"\xef\xbb\xbf\n\n", b"\n" * 300])
@pytest.mark.parametrize("chunk_bytes", [1, 64, 1 << 20])
def test_a_file_of_blank_lines_is_an_empty_one(text: bytes, chunk_bytes: int) -> None:
    with pytest.raises(DataError, match=r"x.csv lacks the column 'n': it is empty"):
        read(text, BadRows(policy="skip"), chunk_bytes)
    found = read(text + b"n,x,t\n1,2,a\n", BadRows(), chunk_bytes)
    assert (found["n"].tolist(), found["row"].tolist()) == ([1], [text.count(b"\n") + 2])


@pytest.mark.parametrize("chunk_bytes", [1, 64, 1 << 20])
def test_a_first_line_that_names_no_columns_is_named_with_its_row(chunk_bytes: int) -> None:
    with pytest.raises(DataError, match=r"x.csv row 3 has a quotation mark .*, and names no columns"):
        read(b'\n\n"n,x,t\n1,2,a\n', BadRows(policy="skip"), chunk_bytes)
