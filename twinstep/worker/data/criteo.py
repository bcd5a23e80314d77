"""Criteo's click logs for DLRM: a label, 13 whole numbers, 26 hexadecimal categories a row, tab-separated, no header.

Format: the README of the Kaggle display advertising challenge and of the 1TB click logs. Files of tens of GB are read
in chunks and written as arrays that are mapped, not loaded: memory does not grow with what a row holds.
`datasets.py` calls `read_criteo`.

# Shapes: R rows; 13 dense features; 26 features of one id each.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from twinstep.spec.errors import DataError
from twinstep.spec.job import DataSpec
from twinstep.worker.data.badrows import BadRow, BadRows
from twinstep.worker.data.delimited import CHUNK_BYTES, Chunk, Delimited, read_delimited
from twinstep.worker.data.events import Floats, Ints, TableSchema, TaskSchema, check_names
from twinstep.worker.data.files import DataFile, Folder, local_folder
from twinstep.worker.data.hashing import hash_ids
from twinstep.worker.data.multi_hot import MultiHotFeature, MultiHotSchema, Rows

DENSE = tuple(f"I{n}" for n in range(1, 14))
CATEGORIES = tuple(f"C{n}" for n in range(1, 27))
FORM = Delimited(delimiter="\t", columns=("label", *DENSE, *CATEGORIES))
PATTERNS = ("train.txt", "*.tsv", "day_*")
LAYOUT = "train.txt, *.tsv or day_* (also .gz): label, 13 whole numbers and 26 hexadecimal categories, tab-separated"
DEFAULT_ROWS = 100_000  # per table, where data.hash_rows does not say
HEX_DIGITS = 8
ARRAYS = ("label", "dense", "offset", *CATEGORIES)  # files of a folder that is kept, beside what _SAID says of them
_SAID = "rows.json"
_UNFINISHED = ".criteo-"
STALE_S = 86_400  # a folder of arrays that are being written is written to all the time
MISSING = 0  # row of a category that is empty; the others are hashed into rows 1 and up
FORMAT = 1  # of the arrays that are kept: raised when they change
_DIGITS = np.full(256, 255, dtype=np.uint8)
_DIGITS[np.frombuffer(b"0123456789abcdefABCDEF", np.uint8)] = [*range(16), *range(10, 16)]


def read_criteo(
    folder: Folder, spec: DataSpec, bad: BadRows, *, chunk_bytes: int = CHUNK_BYTES
) -> tuple[Rows, MultiHotSchema]:
    """Read all rows, in the order of the files' names, which is taken for the order of time.

    A whole number x becomes log(1 + max(x, 0)), as in the reference implementation of DLRM (Naumov et al., 2019); a
    missing one 0. A category is hashed into its table's rows from 1 up; a missing one is row 0.

    The arrays are kept below `data.cache_dir` and used again while files, tables and policy are the same; without it
    they live in a temporary folder as long as the process.

    Raises:
        DataError: there is no file, a table is none of C1 to C26, a row is bad, or the arrays cannot be written.
    """
    check_names("data.hash_rows", tuple(spec.hash_rows), CATEGORIES)
    tables = tuple(TableSchema(name=name, rows=spec.hash_rows.get(name, DEFAULT_ROWS)) for name in CATEGORIES)
    files = folder.files(*PATTERNS, layout=LAYOUT)
    key = [FORMAT, bad.policy, [table.rows for table in tables], [[each.name, each.version()] for each in files]]
    name = hashlib.blake2b(json.dumps(key, default=str).encode(), digest_size=12).hexdigest()
    try:
        kept = local_folder(spec.cache_dir, called="data.cache_dir") / f"criteo-{name}" if spec.cache_dir else None
        rows = _open(kept, bad) if kept is not None else None
        if rows is None:
            rows = _write(files, tables, kept, bad, chunk_bytes)
    except OSError as error:
        raise DataError(
            f"the arrays of the Criteo rows cannot be kept: {error.strerror or error}",
            remedy="let data.cache_dir name a folder with room: about 170 bytes a row",
        ) from None
    if not len(rows):
        said = f" ({bad.summary()})" if bad.count else ""
        raise DataError(f"{files[0].name}{said} holds no rows", remedy="give files with at least two rows")
    schema = MultiHotSchema(
        tables=tables,
        dense=DENSE,
        features=tuple(MultiHotFeature(name=name, table=name) for name in CATEGORIES),
        tasks=(TaskSchema(name="click"),),
    )
    return rows, schema


def read_rows(
    file: DataFile, tables: tuple[TableSchema, ...], bad: BadRows, *, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[tuple[Floats, Floats, Ints]]:
    """Yield the good rows of a file in chunks: labels [R] float32, dense [R, 13] float32, table rows [R, 26] int64."""
    for chunk in read_delimited(file, FORM, FORM.columns, chunk_bytes=chunk_bytes):
        label = chunk.integers("label", low=0, high=1).astype(np.float32)
        dense = np.stack([_dense(chunk, name) for name in DENSE], axis=1)
        ids = np.stack([_category(chunk, table) for table in tables], axis=1)
        good = chunk.keep(bad, label=label, dense=dense, ids=ids)
        yield good["label"], good["dense"], good["ids"]


def _dense(chunk: Chunk, name: str) -> Floats:
    values = chunk.integers(name, empty=0)
    return np.log1p(np.maximum(values, 0).astype(np.float64)).astype(np.float32)


def _category(chunk: Chunk, table: TableSchema) -> Ints:
    column = chunk.raw(table.name)
    length = np.asarray(pc.binary_length(column), dtype=np.int64)
    present = length == HEX_DIGITS
    rows = np.full(len(column), MISSING, dtype=np.int64)
    digits = _DIGITS[_bytes(column.filter(pa.array(present))).reshape(-1, HEX_DIGITS)]
    wrong = (length != 0) & ~present
    wrong[present] = (digits == 255).any(axis=1)
    chunk.reject(wrong, lambda i: f"has {table.name} {chunk.show(table.name, i)}, not {HEX_DIGITS} hexadecimal digits")
    ids = digits.astype(np.int64) @ (16 ** np.arange(HEX_DIGITS - 1, -1, -1, dtype=np.int64))
    rows[present] = 1 + hash_ids(ids, max(1, table.rows - 1), table=table.name) if table.rows > 1 else MISSING
    return rows


def _bytes(column: pa.Array) -> NDArray[np.uint8]:
    """Return the bytes of all values, end to end."""
    _, offsets, data = column.buffers()
    if not len(column) or data is None:
        return np.zeros(0, np.uint8)
    ends = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1]
    return np.frombuffer(data, np.uint8)[ends[0] : ends[-1]]


def _write(
    files: list[DataFile], tables: tuple[TableSchema, ...], kept: Path | None, bad: BadRows, chunk_bytes: int
) -> Rows:
    """Write and map the arrays of all rows; under `kept` they appear whole or not at all, in place of torn ones."""
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        _sweep(kept.parent)
    holder = tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=kept.parent if kept is not None else None)
    home = Path(holder.name) / "arrays"
    try:
        rows = _map(home, _write_arrays(home, files, tables, bad, chunk_bytes))
        if kept is None:
            atexit.register(holder.cleanup)
            return rows
        for path in (*home.iterdir(), home):  # else a crash may leave the name with half of the arrays
            _sync(path)
        _move(home, kept)
    except BaseException:
        holder.cleanup()
        raise
    holder.cleanup()
    again = _open(kept, bad)
    return rows if again is None else again  # what is mapped stays readable, whatever others do to its names


def _move(home: Path, kept: Path) -> None:
    """Give written arrays their name, unless another process was first with the same ones."""
    if _said(kept) is not None:
        return
    with contextlib.suppress(FileNotFoundError):  # torn ones go into our own folder, and with it
        kept.rename(home.with_name("torn"))
    try:
        home.rename(kept)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    else:
        _sync(kept.parent)


def _sync(path: Path) -> None:
    """Wait until a file, or what a folder lists, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():  # not every file system does so with folders
            raise
    finally:
        os.close(handle)


def _sweep(folder: Path) -> None:
    """Remove what a killed process left unfinished: nothing was written to it for a day."""
    for left in folder.glob(f"{_UNFINISHED}*"):
        with contextlib.suppress(OSError):
            newest = max(each.stat().st_mtime for each in (left, *left.rglob("*")))
            if time.time() - newest > STALE_S:
                shutil.rmtree(left, ignore_errors=True)


def _write_arrays(
    home: Path, files: list[DataFile], tables: tuple[TableSchema, ...], bad: BadRows, chunk_bytes: int
) -> int:
    """Write the arrays into a new folder, and return how many rows they have."""
    home.mkdir()
    count = 0
    with ExitStack() as stack:
        outs: dict[str, BinaryIO] = {name: stack.enter_context((home / name).open("wb")) for name in ARRAYS}
        for file in files:
            for label, dense, ids in read_rows(file, tables, bad, chunk_bytes=chunk_bytes):
                outs["label"].write(label.tobytes())
                outs["dense"].write(np.ascontiguousarray(dense).tobytes())
                for column, name in enumerate(CATEGORIES):
                    outs[name].write(ids[:, column].astype(np.int32).tobytes())
                outs["offset"].write(np.arange(count, count + len(label), dtype=np.int64).tobytes())
                count += len(label)
        outs["offset"].write(np.int64(count).tobytes())
    (home / _SAID).write_text(json.dumps({"rows": count, "bad": asdict(bad)}), encoding="utf-8")
    return count


def _said(home: Path) -> tuple[int, BadRows] | None:
    """Return what the arrays of a folder hold: rows, and what was left out. None where a file lacks or is not whole."""
    try:
        said = json.loads((home / _SAID).read_bytes())
        count, left = said["rows"], said["bad"]
        bad = BadRows(**{**left, "first": [BadRow(**row) for row in left["first"]]})
        whole = all((home / name).stat().st_size == _size(name, count) for name in ARRAYS)
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    return (count, bad) if whole else None


def _size(name: str, count: int) -> int:
    """Return the bytes of an array of `count` rows."""
    return {"dense": 4 * len(DENSE) * count, "offset": 8 * (count + 1)}.get(name, 4 * count)


def _open(home: Path, bad: BadRows) -> Rows | None:
    """Map kept arrays, and say of `bad` what was said when they were written; None where they are not whole."""
    said = _said(home)
    if said is None:
        return None
    count, left = said
    try:
        rows = _map(home, count)
    except (FileNotFoundError, ValueError):  # another process put others in their place
        return None
    bad.count, bad.kept, bad.by_file, bad.first[:] = left.count, left.kept, left.by_file, left.first
    return rows


def _map(home: Path, count: int) -> Rows:
    def mapped(name: str, kind: Any, shape: tuple[int, ...]) -> Any:
        if not count and name != "offset":
            return np.zeros(shape, kind)  # nothing cannot be mapped
        return np.memmap(home / name, dtype=kind, mode="r", shape=shape)

    offsets = mapped("offset", np.int64, (count + 1,))
    return Rows(
        dense=mapped("dense", np.float32, (count, len(DENSE))),
        values=tuple(mapped(name, np.int32, (count,)) for name in CATEGORIES),
        offsets=(offsets,) * len(CATEGORIES),
        labels=mapped("label", np.float32, (1, count)),
    )
