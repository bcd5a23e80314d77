"""What a batch may be: ids per sample, ragged, dense, or as coordinates, with weights or without.

Every form becomes `Rows`: ids with either a width or offsets, and no cell without an id. What does not fit together is
refused here, before anything is computed from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from twinstep.spec.errors import DataError, SpecError
from twinstep.worker.embedding.sparsecore.spec import INT32_MAX

BoundCheck = Literal["error", "drop", "wrap"]
BOUND_CHECKS: tuple[BoundCheck, ...] = get_args(BoundCheck)
NO_ID = -1
"""What a cell of a dense feature holds that holds no id."""

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Samples of any number of ids, one after another."""

    ids: Any
    """[total], integers."""
    lengths: Any
    """[samples], integers of 0 or more."""
    weights: Any = None
    """[total] floats, or None."""


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """Samples of as many cells each; a cell of `padding` holds no id."""

    ids: Any
    """[samples, width] or [samples], integers."""
    weights: Any = None
    """As `ids`, floats, or None."""
    padding: int | None = NO_ID
    """None: every cell holds an id."""


@dataclass(frozen=True, slots=True, eq=False)
class Coordinates:
    """Pairs of a sample and an id, in any order; ids of one sample keep theirs."""

    samples: Any
    """[total], the sample of each id."""
    ids: Any
    count: int
    """Samples in all, those without ids included."""
    weights: Any = None


Given = Ragged | Dense | Coordinates


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """One feature's ids as kernels read them."""

    ids: Array
    """[total] int32 or int64, contiguous."""
    offsets: Array | None
    """[samples + 1] int64, where each sample's ids start; None: every sample has `width` ids."""
    width: int
    samples: int
    weights: Array | None
    """[total] float32."""

    def sample_of(self, position: int) -> int:
        """Return the sample that the id at a position belongs to."""
        if self.offsets is None:
            return position // self.width
        return int(np.searchsorted(self.offsets, position, side="right")) - 1

    def bounds(self, core: int, cores: int) -> tuple[int, int]:
        """Return which ids belong to one of `cores` equal runs of samples."""
        run = self.samples // cores
        if self.offsets is None:
            return core * run * self.width, (core + 1) * run * self.width
        return int(self.offsets[core * run]), int(self.offsets[(core + 1) * run])


def keyed(keys: Sequence[str], ids: Any, lengths: Any, weights: Any = None) -> dict[str, Ragged]:
    """Return the features of a KeyedJaggedTensor: ids of all of them, key by key, and [keys · samples] lengths.

    Raises:
        DataError: keys and lengths do not divide, or lengths do not add up to the ids.
    """
    counts = _integers(lengths, "the keyed batch", "lengths").reshape(-1)
    flat = _integers(ids, "the keyed batch", "ids").reshape(-1)
    if not keys or len(counts) % len(keys):
        raise DataError(
            f"{len(counts)} lengths for {len(keys)} keys", remedy="give one length per key and sample, key by key"
        )
    ends = np.concatenate([[0], np.cumsum(counts.reshape(len(keys), -1).sum(axis=1))])
    if ends[-1] != len(flat):
        raise DataError(f"lengths add up to {ends[-1]}, and there are {len(flat)} ids", remedy="give a length per id")
    if weights is not None and len(weights) != len(flat):
        raise DataError(f"{len(weights)} weights for {len(flat)} ids", remedy="give one weight per id")
    per_key = counts.reshape(len(keys), -1)
    found = {}
    for number, key in enumerate(keys):
        part = slice(int(ends[number]), int(ends[number + 1]))
        found[key] = Ragged(flat[part], per_key[number], None if weights is None else np.asarray(weights)[part])
    return found


def sample_lists(samples: Sequence[Any], weights: Sequence[Any] | None = None) -> Ragged:
    """Return samples that are sequences of ids, each of its own type, as one ragged feature.

    Raises:
        DataError: a sample's ids are no integers, or its weights are not as many.
    """
    rows = [_integers(sample, "a sample", "ids") if len(sample) else np.zeros(0, np.int32) for sample in samples]
    lengths = np.array([len(row) for row in rows], np.int64)
    if weights is not None:
        for number, (row, given) in enumerate(zip(rows, weights, strict=False)):
            if len(row) != len(given):
                raise DataError(
                    f"sample {number} has {len(row)} ids and {len(given)} weights", remedy="give one weight per id"
                )
        if len(weights) != len(rows):
            raise DataError(f"weights of {len(weights)} samples for {len(rows)}", remedy="give weights to each sample")
    ids = np.concatenate(rows) if rows else np.zeros(0, np.int32)
    together = None if weights is None else np.concatenate([np.asarray(each, np.float32) for each in weights])
    return Ragged(ids, lengths, together)


def rows_of(name: str, given: Given, samples: int) -> Rows:
    """Check one feature of a batch and return it as kernels read it.

    Args:
        name: the feature's, for messages.
        given: what the batch has for it.
        samples: how many it must have on this host.

    Raises:
        DataError: it does not fit together.
    """
    if isinstance(given, Ragged):
        found = _ragged(name, given)
    elif isinstance(given, Dense):
        found = _dense(name, given)
    elif isinstance(given, Coordinates):
        found = _coordinates(name, given)
    else:
        raise DataError(
            f"feature {name!r} is a {type(given).__name__}", remedy="give it as Ragged, Dense or Coordinates"
        )
    if found.samples != samples:
        raise DataError(
            f"feature {name!r} has {found.samples} samples, and {samples} are expected on this host",
            remedy="give every sample, and empty ones to fill a batch up",
        )
    return found


def _ragged(name: str, given: Ragged) -> Rows:
    where = f"feature {name!r}"
    ids = _indices(given.ids, where)
    lengths = _integers(given.lengths, where, "lengths")
    if ids.ndim != 1 or lengths.ndim != 1:
        raise DataError(f"{where} has ids of shape {ids.shape} and lengths of shape {lengths.shape}", remedy="give 1-D")
    if len(lengths) and int(lengths.min()) < 0:
        raise DataError(f"{where} has a length of {lengths.min()}", remedy="give lengths of 0 or more")
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if offsets[-1] != len(ids):
        raise DataError(
            f"{where} has lengths that add up to {offsets[-1]}, and {len(ids)} ids",
            remedy="give lengths that add up to the ids",
        )
    return Rows(ids, offsets, 1, len(lengths), _weights(given.weights, ids, where))


def _dense(name: str, given: Dense) -> Rows:
    where = f"feature {name!r}"
    ids = _indices(given.ids, where)
    if ids.ndim == 1:
        ids = ids.reshape(-1, 1)
    if ids.ndim != 2:
        raise DataError(f"{where} has ids of shape {ids.shape}", remedy="give [samples, width]")
    given_weights = given.weights if given.weights is None else np.asarray(given.weights)
    if given_weights is not None and given_weights.ndim == 1:
        given_weights = given_weights.reshape(-1, 1)
    weights = _weights(given_weights, ids, where)
    samples, width = ids.shape
    if given.padding is not None:
        there = ids != given.padding
        if not there.all():
            offsets = np.zeros(samples + 1, np.int64)
            np.cumsum(there.sum(axis=1), out=offsets[1:])
            return Rows(ids[there], offsets, 1, samples, None if weights is None else weights.reshape(ids.shape)[there])
    return Rows(ids.reshape(-1), None, width, samples, weights)


def _coordinates(name: str, given: Coordinates) -> Rows:
    where = f"feature {name!r}"
    ids, samples = _indices(given.ids, where), _integers(given.samples, where, "samples")
    if ids.ndim != 1 or samples.shape != ids.shape:
        raise DataError(
            f"{where} has ids of shape {ids.shape} and samples of shape {samples.shape}", remedy="give one per id"
        )
    if len(samples) and not 0 <= int(samples.min()) <= int(samples.max()) < given.count:
        raise DataError(
            f"{where} has samples {samples.min()} to {samples.max()}, of {given.count}",
            remedy=f"give samples from 0 to {given.count - 1}",
        )
    weights = _weights(given.weights, ids, where)
    if (samples[1:] < samples[:-1]).any():
        turn = np.argsort(samples, kind="stable")
        ids, weights = ids[turn], None if weights is None else weights[turn]
    offsets = np.zeros(given.count + 1, np.int64)
    np.cumsum(np.bincount(samples, minlength=given.count), out=offsets[1:])
    return Rows(ids, offsets, 1, given.count, weights)


def _integers(given: Any, where: str, what: str) -> Array:
    """Return an array of a signed integer type.

    Raises:
        DataError: it holds anything else. Floats are never cut, and objects are never read as their bytes.
    """
    found = np.asarray(given)
    if found.size == 0 and found.dtype.kind == "f":
        return found.astype(np.int32)
    if found.dtype.kind not in "iu":
        raise DataError(
            f"{where} has {what} of type {found.dtype}",
            remedy=f"give {what} as int32 or int64; sample_lists takes lists",
        )
    if found.dtype == np.uint64 and found.size and int(found.max()) > np.iinfo(np.int64).max:
        raise DataError(f"{where} has {what} up to {found.max()}", remedy=f"give {what} that int64 can hold")
    return found


def _indices(given: Any, where: str) -> Array:
    found = _integers(given, where, "ids")
    wanted = np.int32 if found.dtype == np.int32 or found.dtype.itemsize < 4 else np.int64
    return np.ascontiguousarray(found, wanted)


def _weights(given: Any, ids: Array, where: str) -> Array | None:
    if given is None:
        return None
    found = np.asarray(given)
    if found.shape != ids.shape:
        raise DataError(
            f"{where} has weights of shape {found.shape}, and ids of shape {ids.shape}", remedy="give one weight per id"
        )
    if found.dtype.kind not in "fiu":
        raise DataError(f"{where} has weights of type {found.dtype}", remedy="give weights as float32")
    found = np.ascontiguousarray(found, np.float32).reshape(-1)
    if not np.isfinite(found).all():
        at = int(np.argmin(np.isfinite(found)))
        raise DataError(f"{where} has weight {found[at]} at {at}", remedy="give finite weights; 0 leaves an id out")
    return found


def outside(rows: Rows, table_rows: int) -> npt.NDArray[np.bool_]:
    """Return which ids are no rows of a table."""
    return np.asarray((rows.ids < 0) | (rows.ids >= table_rows))


def hold_to_bounds(name: str, rows: Rows, table: str, table_rows: int, check: BoundCheck) -> tuple[Rows, int]:
    """Return a feature whose ids are rows of its table, and how many were not.

    Args:
        name: the feature's.
        rows: its ids.
        table, table_rows: what they name rows of.
        check: `error`; `drop`, as if they were not given; or `wrap`, modulo the rows.

    Raises:
        DataError: an id is out of range and `check` is `error`.
    """
    bad = outside(rows, table_rows)
    count = int(bad.sum())
    if not count:
        return rows, 0
    if check == "wrap":
        return replace(rows, ids=np.mod(rows.ids, min(table_rows, INT32_MAX))), count
    if check == "drop":
        kept = np.concatenate([[0], np.cumsum(~bad)])
        starts = np.arange(rows.samples + 1) * rows.width if rows.offsets is None else rows.offsets
        weights = None if rows.weights is None else rows.weights[~bad]
        return Rows(rows.ids[~bad], kept[starts].astype(np.int64), 1, rows.samples, weights), count
    first = int(np.argmax(bad))
    raise DataError(
        f"feature {name!r} has {count} ids that are no rows of table {table!r}: the first is {rows.ids[first]}, "
        f"in sample {rows.sample_of(first)} of this host",
        remedy=f"give ids from 0 to {table_rows - 1}, or set id_bound_check to drop or wrap",
    )


def check_bound_check(check: str) -> None:
    """Refuse what is no policy.

    Raises:
        SpecError: it is none of `error`, `drop` and `wrap`.
    """
    if check not in BOUND_CHECKS:
        raise SpecError(f"id_bound_check is {check!r}", remedy=f"use one of {', '.join(BOUND_CHECKS)}")


def missing(batch: Mapping[str, Given], features: Sequence[str]) -> None:
    """Refuse a batch that lacks a feature, or has one that nobody declared.

    Raises:
        DataError: it does.
    """
    lacks = [name for name in features if name not in batch]
    if lacks:
        raise DataError(f"the batch has no feature {lacks[0]!r}", remedy=f"give all of {', '.join(features)}")
    more = sorted(set(batch) - set(features))
    if more:
        raise DataError(
            f"the batch has a feature {more[0]!r}, which no table is declared for",
            remedy=f"declare it, or leave it out; declared are {', '.join(features)}",
        )
