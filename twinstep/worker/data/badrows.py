"""What becomes of a row that breaks its format: the run ends with file and row, or the row is left out and counted.

Every reader of files tells a `BadRows` of what it finds; `train/` reports what was left out. Nothing is read here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from twinstep.spec.errors import DataError
from twinstep.worker.data.events import Ints

Column = Any  # a numpy array, or a pyarrow array of text: [rows]
FIRST = 10  # rows that were left out and are told one by one; of more, only the count
REMEDY = "mend or remove that row, or set data.on_bad_row: skip"


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    """One row that was left out."""

    file: str
    """Name below data.path."""
    place: str
    """`row 3`, counted from 1, header and blank lines included; of Parquet `row group 0, row 3`."""
    problem: str

    def __str__(self) -> str:
        return f"{self.file} {self.place} {self.problem}"


@dataclass(kw_only=True, slots=True)
class BadRows:
    """The policy of one reading, and what it has left out so far."""

    policy: Literal["error", "skip"] = "error"
    """`data.on_bad_row`."""
    count: int = 0
    """Rows left out."""
    kept: int = 0
    """Rows that were read and not left out, over all files."""
    by_file: dict[str, int] = field(default_factory=dict)
    first: list[BadRow] = field(default_factory=list)
    """The first `FIRST` of them."""
    varying: dict[str, int] = field(default_factory=dict)
    """Features of users or items by name, and of how many of them not all rows say the same; such rows are kept."""

    def add(self, file: str, rows: Ints, problem: Callable[[int], str], *, before: str = "") -> None:
        """Take note of rows that break their format.

        Args:
            file: name below data.path.
            rows: [N] int64 numbers of the rows, rising, counted from 1.
            problem: says what is wrong with rows[i], given i; asked for the first ones only.
            before: stands before `row`: `row group 0, `.

        Raises:
            DataError: the policy is `error`, and there is one.
        """
        for i in range(min(len(rows), FIRST - len(self.first))):
            found = BadRow(file=file, place=f"{before}row {int(rows[i])}", problem=problem(i))
            if self.policy == "error":
                raise DataError(str(found), remedy=REMEDY)
            self.first.append(found)
        if len(rows):
            self.count += len(rows)
            self.by_file[file] = self.by_file.get(file, 0) + len(rows)

    def summary(self) -> str:
        """Return one sentence: how many rows were left out of how many, where, and the first of them."""
        files = ", ".join(f"{name}: {count:,}" for name, count in sorted(self.by_file.items()))
        first = f"; the first: {self.first[0]}" if self.first else ""
        return f"{self.count:,} of {self.count + self.kept:,} rows left out ({files}){first}"


def varying_features(varying: dict[str, int]) -> str:
    """Return one sentence about features that are not the same in all rows of a user or an item."""
    names = ", ".join(f"{name}: {count:,}" for name, count in sorted(varying.items()))
    return f"features that vary within their user or item, taken from the last row, later than training's ({names})"


class CheckedRows:
    """Some rows of a file while their columns are converted, and what was found wrong with each. A row is bad once."""

    def __init__(self, file: str, rows: Ints, *, before: str = "", malformed: Sequence[tuple[int, str]] = ()) -> None:
        """Take N rows whose numbers are `rows`; `malformed` are further rows, bad from the start."""
        self.file = file
        self.rows = rows
        """[N] int64: number of each row, counted from 1, rising."""
        self._before = before
        self._malformed = malformed
        self._why = np.zeros(len(rows), dtype=np.int16)  # number of what is wrong with a row, 0: nothing
        self._problems: list[Callable[[int], str]] = []

    @property
    def good(self) -> NDArray[np.bool_]:
        """[N] bool: rows that nothing was found wrong with so far."""
        good: NDArray[np.bool_] = self._why == 0
        return good

    def reject(self, wrong: NDArray[np.bool_], problem: Callable[[int], str]) -> None:
        """Mark rows as bad. `problem` says what is wrong with the row at a position."""
        if wrong.any():
            self._problems.append(problem)
            self._why[wrong & (self._why == 0)] = len(self._problems)

    def keep(self, bad: BadRows, **columns: Column) -> dict[str, Column]:
        """Return the columns without the bad rows, which go to `bad`.

        Raises:
            DataError: there is a bad row, and the policy is `error`.
        """
        wrong = np.flatnonzero(self._why)
        malformed = dict(self._malformed)
        rows = np.sort(np.concatenate((self.rows[wrong], np.array(list(malformed), dtype=np.int64))))

        def problem(i: int) -> str:
            row = int(rows[i])
            at = int(np.searchsorted(self.rows, row))
            return malformed[row] if row in malformed else self._problems[self._why[at] - 1](at)

        bad.add(self.file, rows, problem, before=self._before)
        bad.kept += len(self.rows) - len(wrong)
        if not len(wrong):
            return columns
        good = self.good
        import pyarrow as pa  # late: a dataset that reads no files starts without it

        return {name: values[good] if isinstance(values, np.ndarray) else values.filter(pa.array(good))
                for name, values in columns.items()}  # fmt: skip
