"""Tables that are declared: as large as ever, but of which a process makes, and has, only the rows that it wants.

The processes of a run hold tables on devices, each its own rows. What stands for a table in the live model is memory
that the system hands out page by page, at the first write. Beside it stands where rows come from as long as no step
has run: the rule of `initial.py`, zeros, or a checkpoint. Whoever places a table asks for the rows it wants. Afterwards
only devices know. Rows that the process is to save are brought into room of their own, which is all that a checkpoint
takes; rows that an evaluation reads are brought into the live tensor.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from twinstep.spec.table_names import table_name
from twinstep.worker.embedding.collection import EmbeddingTable, tables_of
from twinstep.worker.embedding.initial import Initial, fill_first_rows, first_rows, table_key

NORESERVE = 0x4000  # Linux's MAP_NORESERVE, which this Python has no name for: pages count when they are written


class Source(Protocol):
    """Where rows of a tensor come from."""

    def rows(self, start: int, stop: int, step: int = 1) -> Tensor:
        """Return rows start, start + step, … below stop; the caller's own."""

    def pick(self, ids: npt.NDArray[np.int64]) -> Tensor:
        """Return the rows of ids, which ascend."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstRows:
    """First values by the rule of `initial.py`."""

    how: Initial
    seed: int
    table: str
    dim: int

    def rows(self, start: int, stop: int, step: int = 1) -> Tensor:
        """Make rows."""
        made = torch.empty(len(range(start, stop, step)), self.dim)
        self.fill(made, start, step)
        return made

    def pick(self, ids: npt.NDArray[np.int64]) -> Tensor:
        """Make the rows of ids."""
        return torch.from_numpy(first_rows(self.how, table_key(self.seed, self.table), ids, self.dim, np))

    def fill(self, out: Tensor, start: int = 0, step: int = 1) -> None:
        """Make rows in place."""
        values: npt.NDArray[np.float32] = out.detach().numpy()
        fill_first_rows(values, self.how, table_key(self.seed, self.table), start, step)


@dataclass(frozen=True, slots=True)
class Zeros:
    """What optimizers keep of rows before the first step."""

    width: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    def rows(self, start: int, stop: int, step: int = 1) -> Tensor:
        """Make rows."""
        return torch.zeros(len(range(start, stop, step)), *self.width, dtype=self.dtype)

    def pick(self, ids: npt.NDArray[np.int64]) -> Tensor:
        """Make as many rows as ids."""
        return torch.zeros(len(ids), *self.width, dtype=self.dtype)


class Declared:
    """What is known of one declared tensor.

    Args:
        tensor: of the live model or an optimizer.
        source: where its rows come from, None: it has them.
    """

    def __init__(self, tensor: Tensor, source: Source | None) -> None:
        self._tensor, self.source = tensor.detach(), source
        self._rooms: dict[tuple[int, int], Tensor] = {}
        self._apart = False

    @property
    def source(self) -> Source | None:
        """Where its rows come from, None: it has them, or devices alone do."""
        return self._source

    @source.setter
    def source(self, source: Source | None) -> None:
        self._source = source
        self._filled: npt.NDArray[np.bool_] | None = None

    def room(self, start: int, stop: int) -> Tensor:
        """Return memory of its own for rows that this process saves: the same one each time, filled by whoever asks."""
        self._apart = True
        if (start, stop) not in self._rooms:
            self._rooms[start, stop] = torch.empty(stop - start, *self._tensor.shape[1:], dtype=self._tensor.dtype)
        return self._rooms[start, stop]

    def saved(self, start: int, stop: int) -> Tensor | None:
        """Return the room of rows, if that is where they were brought last."""
        return self._rooms.get((start, stop)) if self._apart else None

    def is_whole(self) -> None:
        """Know that the live tensor has all rows now."""
        self.source, self._apart = None, False

    def rows(self, start: int, stop: int, step: int = 1) -> Tensor:
        """Return rows as they are before the next step."""
        return self._tensor[start:stop:step] if self.source is None else self.source.rows(start, stop, step)

    def fill(self) -> None:
        """Give the tensor all its rows, where no process holds them elsewhere yet."""
        if self.source is not None:
            for start in range(0, len(self._tensor), 1 << 16):
                part = self._tensor[start : start + (1 << 16)]
                part.copy_(self.source.rows(start, start + len(part)))
            self.is_whole()

    def fill_rows(self, ids: npt.NDArray[np.int64]) -> None:
        """Give the tensor these rows, where `fill_rows` did not before; nobody is told that it was written to."""
        if self.source is None:
            return
        if self._filled is None:
            self._filled = untouched(len(self._tensor), dtype=torch.bool).numpy()
        new = np.unique(ids[~self._filled[ids]])
        if len(new):
            self._tensor.numpy()[new] = self.source.pick(new).numpy()
            self._filled[new] = True


_DECLARED = WeakTensorKeyDictionary()


def declare(tensor: Tensor, source: Source | None) -> Declared:
    """Say where the rows of a tensor come from."""
    found = Declared(tensor, source)
    _DECLARED[tensor] = found
    return found


def declared(tensor: Tensor) -> Declared | None:
    """Return what is known of a tensor that was declared; None: it is like any other."""
    found: Declared | None = _DECLARED.get(tensor)  # type: ignore[no-untyped-call]
    return found


def all_declared(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Declared]]:
    """Yield path and tensor of those that are declared."""
    for path, tensor in tensors.items():
        if (found := declared(tensor)) is not None:
            yield path, found


def untouched(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return zeros that take memory where they are written, page by page."""
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.zeros(shape, dtype=dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_NOHUGEPAGE)  # a row that is written takes 4 KiB, not 2 MiB
    return torch.frombuffer(pages, dtype=dtype).reshape(shape)


def start_tables(model: nn.Module, how: Callable[[int], Initial], seed: int) -> None:
    """Give a model's tables their first values, by the number of their rows; those on `meta` are declared, and no more.

    Each value depends on seed, table, row and column alone, whatever engine holds the table, and where.
    """
    for name, table in tables_of(model).embeddings.items():
        assert isinstance(table, EmbeddingTable)  # noqa: S101
        rows, dim = table.weight.shape
        first = FirstRows(how=how(rows), seed=seed, table=table_name(name), dim=dim)
        if table.weight.is_meta:
            table.weight = nn.Parameter(untouched(rows, dim))
            declare(table.weight, first)
        else:
            first.fill(table.weight)
