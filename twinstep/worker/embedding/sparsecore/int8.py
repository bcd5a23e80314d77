"""Tables of a trained model as int8, with one range a table: a quarter of the bytes, for serving.

code = round((w - low) / step) - 128, step = (high - low) / 255; w' = (code + 128) · step + low, so an error is at most
half a step inside the range. Training keeps float32 (`device/lookup.py` simulates quantization there).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twinstep.spec.errors import DataError
from twinstep.worker.embedding.sparsecore.logical import WEIGHT, Chunk

STEPS = 255


@dataclass(frozen=True, slots=True)
class Range:
    """The range of one table, and what rounding to it costs."""

    table: str
    low: float
    high: float
    values: int
    """Numbers of the table."""
    clipped: int
    """Those outside the range, held to its ends."""
    rms_error: float
    """Root of the mean squared error over all values."""
    max_error: float

    @property
    def step(self) -> float:
        """Distance of two neighbouring codes."""
        return (self.high - self.low) / STEPS


def range_of(chunks: Iterable[Chunk], *, keep: float = 1.0) -> tuple[float, float]:
    """Return the range that holds the middle `keep` of a table's values.

    Args:
        chunks: of one table's weight; read once. With `keep` below 1 a histogram of 65,536 bins over the whole range
            needs a second look, so give a list then.
        keep: share of the values, over 0.5 up to 1.

    Raises:
        DataError: there are no values, or some are no finite numbers.
    """
    parts = list(chunks) if keep < 1 else chunks
    low, high = np.inf, -np.inf
    for chunk in parts:
        if not np.isfinite(chunk.values).all():
            raise DataError(
                f"table {chunk.table!r} has values that are no finite numbers after row {chunk.start}",
                remedy="quantize a checkpoint from before the run went wrong",
            )
        low, high = min(low, float(chunk.values.min())), max(high, float(chunk.values.max()))
    if low > high:
        raise DataError("a table without values", remedy="give its chunks of rows")
    if keep == 1 or low == high:
        return low, high
    bins = np.zeros(1 << 16, np.int64)
    for chunk in parts:
        bins += np.histogram(chunk.values, bins=len(bins), range=(low, high))[0]
    share = np.cumsum(bins) / bins.sum()
    edges = np.linspace(low, high, len(bins) + 1)
    first, last = np.searchsorted(share, [(1 - keep) / 2, (1 + keep) / 2])
    return float(edges[first]), float(edges[min(int(last) + 1, len(bins))])


Bound = float | npt.NDArray[np.float64]
"""An end of a range: one number of a whole table, or one of each row, [rows, 1]."""


def quantize(values: npt.NDArray[np.float32], low: Bound, high: Bound) -> npt.NDArray[np.int8]:
    """Return codes; values outside the range are held to its ends."""
    step = (np.asarray(high, np.float64) - low) / STEPS
    code = np.rint((np.clip(values.astype(np.float64), low, high) - low) / np.where(step > 0, step, 1.0))
    return (code - 128).astype(np.int8)


def dequantize(codes: npt.NDArray[np.int8], low: Bound, high: Bound) -> npt.NDArray[np.float32]:
    """Return values, float32."""
    return ((codes.astype(np.float64) + 128) * ((np.asarray(high, np.float64) - low) / STEPS) + low).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Codes:
    """Rows `start` and on of one table as int8."""

    table: str
    start: int
    codes: npt.NDArray[np.int8]


def quantize_table(chunks: list[Chunk], *, keep: float = 1.0) -> tuple[Range, Iterator[Codes]]:
    """Return a table's range with its errors, and its codes chunk by chunk.

    Args:
        chunks: of one table's weight; slots of the optimizer are refused, they are not served.
        keep: share of the values that the range holds; see `range_of`.

    Raises:
        DataError: values are missing or not finite, or a chunk is no weight.
    """
    other = next((each for each in chunks if each.part != WEIGHT), None)
    if other is not None:
        raise DataError(f"{other.part!r} of table {other.table!r} is no weight", remedy="quantize weights only")
    low, high = range_of(chunks, keep=keep)
    squares, worst, clipped, count = 0.0, 0.0, 0, 0
    for chunk in chunks:
        error = np.abs(dequantize(quantize(chunk.values, low, high), low, high).astype(np.float64) - chunk.values)
        squares, worst = squares + float((error**2).sum()), max(worst, float(error.max()))
        clipped += int(((chunk.values < low) | (chunk.values > high)).sum())
        count += chunk.values.size
    found = Range(chunks[0].table, low, high, count, clipped, (squares / count) ** 0.5, worst)
    return found, (Codes(each.table, each.start, quantize(each.values, low, high)) for each in chunks)
