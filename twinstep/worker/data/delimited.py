"""Delimited text (CSV, TSV, `::`) in chunks of bounded memory: columns checked whole, faults named by file and row.

pyarrow parses; no Python runs per row but for rows that are wrong. Readers of datasets take chunks from
`read_delimited`, convert the columns they want, and `keep` what is good.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import csv

from twinstep.spec.errors import DataError
from twinstep.worker.data.badrows import BadRows, CheckedRows, Column
from twinstep.worker.data.events import Ints
from twinstep.worker.data.files import DataFile
from twinstep.worker.data.lines import blocks

CHUNK_BYTES = 8 << 20  # text per chunk; a chunk takes about ten times as much while it is converted
SHOWN = 40  # characters of a value that an error shows
INT64 = np.iinfo(np.int64)
_UNIT = "\x1f"  # stands for a delimiter of several characters, which pyarrow has none of
_DELIMITERS = (",", "\t", ";", "|", "::")


@dataclass(frozen=True, kw_only=True, slots=True)
class Delimited:
    """How a file's text is divided."""

    delimiter: str
    columns: tuple[str, ...] = ()
    """Names of the columns, in order; none where the first line names them."""
    quoted: bool = False
    """Whether `"a, b"` is one field."""
    encoding: Literal["utf-8", "latin-1"] = "utf-8"


class Chunk(CheckedRows):
    """Some rows of a file as text."""

    def __init__(
        self, file: str, rows: Ints, columns: dict[str, pa.Array], malformed: Sequence[tuple[int, str]]
    ) -> None:
        super().__init__(file, rows, malformed=malformed)
        self._columns = columns

    def raw(self, name: str) -> pa.Array:
        """Return a column as the bytes that stand in the file."""
        return self._columns[name]

    def text(self, name: str) -> pa.Array:
        """Return a column as text; bytes that are none make the row a bad one."""
        column = self._columns[name]
        try:
            return column.cast(pa.string())
        except pa.ArrowInvalid:
            values = column.to_pylist()
            good = np.array([is_text(value) for value in values], dtype=bool)
            self.reject(~good, lambda i: f"has a {_plain(name)} that is not UTF-8")
            return pa.array([value.decode() if fine else "" for value, fine in zip(values, good, strict=True)])

    def integers(self, name: str, *, low: int = INT64.min, high: int = INT64.max, empty: int | None = None) -> Ints:
        """Return a column of whole numbers in low..high; `empty` stands for nothing, where that is allowed."""
        column = self._columns[name]
        wrong: NDArray[np.bool_] = np.zeros(len(column), dtype=bool)
        text = column.cast(pa.string(), safe=False) if _all_ascii(column) else None
        if text is not None and empty is not None:
            text = pc.if_else(pc.equal(text, ""), str(empty), text)
        if text is not None and pc.all(pc.ascii_is_decimal(text)).as_py() is not False:
            try:
                values = pc.cast(text, pa.int64()).to_numpy(zero_copy_only=False)
            except pa.ArrowInvalid:  # beyond int64
                values = None
        else:
            values = None
        if values is None:
            parsed = [_whole(value, empty) for value in column.to_pylist()]
            wrong = np.array([value is None for value in parsed], dtype=bool)
            values = np.array([value or 0 for value in parsed], dtype=np.int64)
        outside = (values < low) | (values > high)
        if empty is not None:
            outside &= values != empty
        span = "in int64" if (low, high) == (INT64.min, INT64.max) else f"in {low}..{high}"
        self.reject(wrong | outside, lambda i: f"has {_plain(name)} {self.show(name, i)}, not a whole number {span}")
        return np.asarray(values, dtype=np.int64)

    def floats(self, name: str, *, low: float, high: float) -> NDArray[np.float64]:
        """Return a column of numbers in low..high; NaN is none."""
        column = self._columns[name]
        try:
            values = pc.cast(column.cast(pa.string()), pa.float64()).to_numpy(zero_copy_only=False)
        except pa.ArrowInvalid:
            values = np.array([_number(value) for value in column.to_pylist()], dtype=np.float64)
        wrong = ~((values >= low) & (values <= high))
        self.reject(wrong, lambda i: f"has {_plain(name)} {self.show(name, i)}, not a number in {low:g}..{high:g}")
        return np.where(wrong, low, values)

    def numbers(self, name: str, keys: Keys) -> Ints:
        """Return the number of each key of a column; a key that `keys` does not have makes the row a bad one."""
        values = self.integers(name)
        numbers, found = keys.find(values)
        self.reject(~found, lambda i: f"has the {_plain(name)} {self.show(name, i)}, which {keys.home} does not have")
        return numbers

    def show(self, name: str, i: int) -> str:
        """Return the value at a position as an error shows it."""
        return repr(self._columns[name][i].as_py().decode("utf-8", "replace")[:SHOWN])


class Keys:
    """Ids of users or items, numbered from 0 in numeric order."""

    def __init__(self, ids: Ints, home: str) -> None:
        self.ids = np.unique(ids)
        """[P] int64, rising."""
        self.home = home
        """The file that lists them."""

    def __len__(self) -> int:
        return len(self.ids)

    def find(self, values: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """Return the number of each value, 0 where there is none, and whether there is one."""
        if not len(self.ids):
            return np.zeros(len(values), np.int64), np.zeros(len(values), bool)
        at = np.minimum(np.searchsorted(self.ids, values), len(self.ids) - 1)
        found = self.ids[at] == values
        return np.where(found, at, 0), found


def read_delimited(
    file: DataFile, form: Delimited, wanted: Sequence[str], *, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[Chunk]:
    """Yield the rows of a file in chunks; blank lines are passed over. The chunks' size changes nothing but memory.

    Args:
        wanted: columns to read; the others are not converted.

    Raises:
        DataError: a column is missing, or the file cannot be read or changes meanwhile.
    """
    with file.reading() as stream:
        names = form.columns
        none = True
        for block in blocks(stream, name=file.name, chunk_bytes=chunk_bytes, quoted=form.quoted):
            text, rows, bad = block.text, block.rows, list(block.bad)
            if not names:
                if bad and (not len(rows) or bad[0][0] < rows[0]):
                    raise DataError(
                        f"{file.name} row {bad[0][0]} {bad[0][1]}, and names no columns", remedy="mend the header"
                    )
                if not len(rows):
                    continue  # blank lines only, so far
                header, _, text = text.partition(b"\n")
                rows, names = rows[1:], _header(header, form, file.name, wanted)
            none = False
            yield _parse(text, rows, bad, form, names, wanted, file.name)
        if not names:
            raise DataError(
                f"{file.name} lacks the column {wanted[0]!r}: it is empty",
                remedy="give the whole file, with its header",
            )
        if none:
            yield _parse(b"", np.zeros(0, np.int64), [], form, names, wanted, file.name)


def gather(parts: Iterable[dict[str, Column]]) -> dict[str, Column]:
    """Return the columns of several chunks laid end to end; none where there is no chunk."""
    columns: dict[str, list[Column]] = {}
    for part in parts:
        for name, values in part.items():
            columns.setdefault(name, []).append(values)
    return {
        name: pa.concat_arrays(pieces) if isinstance(pieces[0], pa.Array) else np.concatenate(pieces)
        for name, pieces in columns.items()
    }


def first_of_each(file: str, name: str, columns: dict[str, Column], bad: BadRows) -> dict[str, Column]:
    """Return the rows in the order of the key `columns[name]`, each key once; what comes a second time is a bad row.

    Args:
        columns: has `rows`, the number of each row in its file.
    """
    ids = columns[name]
    _, first = np.unique(ids, return_index=True)
    again = np.setdiff1d(np.arange(len(ids)), first)
    bad.add(file, columns["rows"][again], lambda i: f"has the {_plain(name)} {int(ids[again[i]])} a second time")
    bad.kept -= len(again)
    return {each: values.take(pa.array(first)) if isinstance(values, pa.Array) else values[first]
            for each, values in columns.items()}  # fmt: skip


def number_text(values: pa.Array) -> tuple[Ints, int]:
    """Number texts from 0 in alphabetic order; return [N] int64 and how many there are."""
    encoded = values.dictionary_encode()
    words = np.array(encoded.dictionary.to_pylist(), dtype=object)
    rank = np.empty(len(words), dtype=np.int64)
    rank[np.argsort(words)] = np.arange(len(words))
    return rank[encoded.indices.to_numpy(zero_copy_only=False)] if len(words) else np.zeros(0, np.int64), len(words)


def _header(line: bytes, form: Delimited, file: str, wanted: Sequence[str]) -> tuple[str, ...]:
    text = line.decode(form.encoding, "replace")
    names = [each.strip().strip('"') if form.quoted else each for each in text.split(form.delimiter)]
    missing = [column for column in wanted if column not in names]
    if missing:
        other = next(
            (each for each in _DELIMITERS if each != form.delimiter and set(wanted) <= set(text.split(each))), ""
        )
        hint = f"; its fields are divided by {other!r}, not {form.delimiter!r}" if other else ""
        raise DataError(
            f"{file} lacks the column {missing[0]!r}; its header has {', '.join(names)[:200]}{hint}",
            remedy="give the file as it was published; its header must name that column",
        )
    return tuple(names)


def _parse(
    text: bytes,
    rows: Ints,
    bad: list[tuple[int, str]],
    form: Delimited,
    names: tuple[str, ...],
    wanted: Sequence[str],
    file: str,
) -> Chunk:
    if form.encoding == "latin-1":
        text = text.decode("latin-1").encode()
    delimiter = form.delimiter
    if len(delimiter) > 1:
        text, delimiter = text.replace(delimiter.encode(), _UNIT.encode()), _UNIT
    out: list[tuple[int, str]] = []

    def malformed(row: Any) -> str:
        count = row.actual_columns
        out.append((row.number - 1, f"has {count} field{'s' if count > 1 else ''}, not {len(names)}"))
        return "skip"

    if not text:
        return Chunk(file, rows, {name: pa.array([], pa.binary()) for name in wanted}, bad)
    table = csv.read_csv(
        pa.BufferReader(text),
        read_options=csv.ReadOptions(use_threads=False, column_names=_distinct(names), block_size=len(text) + 1),
        parse_options=csv.ParseOptions(
            delimiter=delimiter,
            quote_char='"' if form.quoted else False,
            ignore_empty_lines=False,
            invalid_row_handler=malformed,
        ),
        convert_options=csv.ConvertOptions(
            include_columns=list(wanted), column_types={name: pa.binary() for name in wanted}, null_values=[]
        ),
    )
    there = np.ones(len(rows), dtype=bool)
    there[[at for at, _ in out]] = False
    columns = {name: pa.concat_arrays(table.column(name).chunks) for name in wanted}
    return Chunk(file, rows[there], columns, sorted([*bad, *((int(rows[at]), why) for at, why in out)]))


def _distinct(names: Sequence[str]) -> list[str]:
    """Return the names, a second one of a kind told apart from the first, which is the one that is read."""
    return [f"{name}#{i}" if name in names[:i] else name for i, name in enumerate(names)]


def _plain(name: str) -> str:
    return name.split(":")[0]  # recbole's headers give the type after it


def _all_ascii(column: pa.Array) -> bool:
    buffer = column.buffers()[2]
    return buffer is None or bool((np.frombuffer(buffer, dtype=np.uint8) < 128).all())


def is_text(value: bytes) -> bool:
    """Return whether bytes are UTF-8."""
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _whole(value: bytes, empty: int | None) -> int | None:
    """Return the whole number that a field says, None where it says none within int64."""
    if not value and empty is not None:
        return empty
    digits = value.removeprefix(b"-")
    if not digits.isdigit() or len(digits) > 19:
        return None
    number = int(value)
    return number if INT64.min <= number <= INT64.max else None


def _number(value: bytes) -> float:
    try:
        return math.nan if set(value) & set(b"_ \t") else float(value)
    except ValueError:
        return math.nan
