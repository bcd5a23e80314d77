"""Which row of a table an id has: a vocabulary kept in a file, so that a later run numbers the same ids alike.

One text file per table, one id a line; line n, counted from 1, is row n, and row 0 is for ids that are not listed.
Written whole or not at all, so several hosts may write the same one.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from twinstep.spec.errors import DataError
from twinstep.worker.data.events import Ints

UNLISTED = 0  # row of ids that are not listed


class Vocabulary:
    """The rows of one table's ids."""

    def __init__(self, ids: Ints) -> None:
        """Take the ids in the order of their rows, from row 1 on; each once."""
        self.ids = ids
        """[V] int64."""
        self._order = np.argsort(ids, kind="stable")
        self._sorted = ids[self._order]

    @property
    def rows(self) -> int:
        """Rows a table needs: one per id, and row 0."""
        return len(self.ids) + 1

    def find(self, values: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """Return the row of each value, 0 for one that is not listed, and whether it is."""
        if not len(self.ids):
            return np.zeros(len(values), np.int64), np.zeros(len(values), bool)
        at = np.minimum(np.searchsorted(self._sorted, values), len(self.ids) - 1)
        found = self._sorted[at] == values
        return np.where(found, self._order[at] + 1, UNLISTED), found


def load_vocabulary(folder: Path, table: str, values: Ints) -> Vocabulary:
    """Return the vocabulary kept for a table; where there is none, that of `values`, rising, which is then written.

    Raises:
        DataError: the file cannot be read or written, or a line of it is no id or stands twice.
    """
    path = folder / f"{table}.txt"
    try:
        if not path.exists():
            write_vocabulary(path, np.unique(values))
        return read_vocabulary(path)
    except OSError as error:
        raise DataError(
            f"the vocabulary {path} cannot be kept: {error.strerror or error}",
            remedy="let data.vocabulary name a folder that can be written",
        ) from None


def read_vocabulary(path: Path) -> Vocabulary:
    """Read a vocabulary file.

    Raises:
        DataError: a line is no whole number within int64, or stands twice.
        OSError: the file cannot be read.
    """
    lines = path.read_bytes().split(b"\n")
    if lines and not lines[-1]:
        lines.pop()
    try:
        ids = np.array([int(line) for line in lines], dtype=np.int64)
    except (ValueError, OverflowError):
        wrong = next(number for number, line in enumerate(lines, start=1) if not _is_id(line))
        raise DataError(
            f"{path.name} row {wrong} is no whole number in int64", remedy="mend the line, or remove the file"
        ) from None
    _, first, counts = np.unique(ids, return_index=True, return_counts=True)
    if (counts > 1).any():
        again = ids[first[counts > 1][0]]
        row = int(np.flatnonzero(ids == again)[1]) + 1
        raise DataError(f"{path.name} row {row} has the id {again} a second time", remedy="remove the file")
    return Vocabulary(ids)


def write_vocabulary(path: Path, ids: Ints) -> None:
    """Write a vocabulary whole or not at all. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(b"".join(b"%d\n" % each for each in ids.tolist()))
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _is_id(line: bytes) -> bool:
    try:
        return -(2**63) <= int(line) < 2**63
    except ValueError:
        return False
