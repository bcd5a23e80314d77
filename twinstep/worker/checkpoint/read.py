"""One checkpoint, read: its manifest, any rows of any tensor, or all of it; every byte is held to its checksum."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twinstep.spec.errors import NotFoundError, UnavailableError
from twinstep.worker.checkpoint.errors import DamagedError, ForeignError
from twinstep.worker.checkpoint.manifest import MANIFEST, REMEDY, Manifest, Piece, TensorEntry, rows_as_bytes
from twinstep.worker.checkpoint.place import Place, in_words

Job = TypeVar("Job")
READERS = 4  # threads: checksums of one piece are counted while the disk gives the next


class Reader:
    """A whole checkpoint.

    Raises:
        DamagedError: from every method, where a file is missing, short, or not as it was written.
        UnavailableError: from every method, where the disk or store does not give a file that is there.
        ForeignError: it is of another version's format.
    """

    def __init__(self, place: Place, name: str) -> None:
        self.name = name
        self._place = place
        self._where = f"{place.url}/{name}"
        try:
            content = place.read(name, MANIFEST)
        except FileNotFoundError:
            raise DamagedError(
                f"{self._where} has no {MANIFEST}: it was never written to its end", remedy=REMEDY
            ) from None
        except Exception as error:
            raise _unread(f"{self._where}/{MANIFEST}", error) from error
        self.manifest = Manifest.from_bytes(content, where=self._where)
        self._kept: dict[tuple[str, int], Tensor] = {}
        self._counting = threading.Lock()
        self.bytes_read = 0
        """Of data files, so far."""

    def rows(self, path: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return rows start…stop of a tensor (all by default), reading only pieces that hold some of them.

        Raises:
            NotFoundError: no such tensor.
        """
        entry = self._entry(path)
        stop = entry.rows if stop is None else min(stop, entry.rows)
        start = max(0, min(start, stop))
        if not entry.shape:
            return self.tensors({path: None})[path]
        out = torch.empty((stop - start, *entry.shape[1:]), dtype=_dtype(entry))
        for piece in entry.pieces:
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first < last:
                out[first - start : last - start] = self._piece(path, piece)[first - piece.start : last - piece.start]
        return out

    def turn(self, path: str, start: int, stop: int, step: int) -> Tensor:
        """Return rows start, start + step, … below stop, for one of `step` readers that take turns in a chunk of rows.

        Pieces that the chunk has rows of stay here, or the last of them where nobody takes turns, for the next call.
        """
        entry = self._entry(path)
        first = start - start % step
        pieces = {(path, each.start): each for each in entry.pieces if first < each.stop and each.start < stop}
        self._kept = {key: part for key, part in self._kept.items() if key in pieces}
        out = torch.empty((len(range(start, stop, step)), *entry.shape[1:]), dtype=_dtype(entry))
        for number, (key, piece) in enumerate(pieces.items(), 1):
            part = self._kept.pop(key) if key in self._kept else self._piece(path, piece)
            begin = max(start, piece.start + (start - piece.start) % step)
            rows = part[begin - piece.start : max(begin, stop) - piece.start : step]
            out[(begin - start) // step :][: len(rows)] = rows
            if step > 1 or number == len(pieces):
                self._kept[key] = part
        return out

    def pick(self, path: str, ids: npt.NDArray[np.int64]) -> Tensor:
        """Return some rows of a tensor, by ids that ascend; each piece that holds some of them is read once."""
        entry = self._entry(path)
        out = torch.empty((len(ids), *entry.shape[1:]), dtype=_dtype(entry))
        cuts = [(piece, *np.searchsorted(ids, (piece.start, piece.stop)).tolist()) for piece in entry.pieces]

        def take(cut: tuple[Piece, int, int]) -> None:
            piece, first, last = cut
            out[first:last] = self._piece(path, piece)[torch.from_numpy(ids[first:last] - piece.start)]

        _at_once(take, [cut for cut in cuts if cut[1] < cut[2]])
        return out

    def tensors(self, buffers: Mapping[str, Tensor | None] | None = None) -> dict[str, Tensor]:
        """Return whole tensors.

        Args:
            buffers: by path, which ones, and memory that may be used for each; None: all, in new memory.
        """
        wanted = dict.fromkeys(self.manifest.tensors) if buffers is None else buffers
        found = {path: _buffer(self._entry(path), buffer) for path, buffer in wanted.items()}
        jobs = [(path, piece) for path in found for piece in self._entry(path).pieces]
        _at_once(lambda job: self._fill(job[0], job[1], found[job[0]], at=job[1].start), jobs)
        return found

    def verify(self) -> None:
        """Read every byte and hold it to its checksum."""
        jobs = [(path, piece) for path in self.manifest.tensors for piece in self._entry(path).pieces]
        _at_once(lambda job: self._fill(*job, torch.empty(job[1].size, dtype=torch.uint8), at=None), jobs)

    def _entry(self, path: str) -> TensorEntry:
        if path not in self.manifest.tensors:
            raise NotFoundError(
                f"{self._where} holds no tensor {path!r}",
                remedy=f"there are {len(self.manifest.tensors)}: {', '.join(list(self.manifest.tensors)[:5])}, …",
            )
        return self.manifest.tensors[path]

    def _piece(self, path: str, piece: Piece) -> Tensor:
        entry = self._entry(path)
        part = torch.empty((piece.stop - piece.start, *entry.shape[1:]), dtype=_dtype(entry))
        self._fill(path, piece, part, at=0)
        return part

    def _fill(self, path: str, piece: Piece, into: Tensor, *, at: int | None) -> None:
        """Read a piece into rows of a tensor from row `at` on; None: the tensor is as many bytes."""
        rows = piece.stop - piece.start
        view = into.numpy().data if at is None else rows_as_bytes(into, at, at + rows)
        where = f"rows {piece.start}…{piece.stop - 1} of {path} in {self._where}/{piece.file}"
        try:
            count = self._place.read_into(self.name, piece.file, piece.offset, view)
        except FileNotFoundError:
            raise DamagedError(f"{where} are lost: there is no such file", remedy=REMEDY) from None
        except Exception as error:
            raise _unread(where, error) from error
        if count != piece.size:
            raise DamagedError(f"{where} are cut short: {count} of {piece.size} bytes", remedy=REMEDY)
        if zlib.crc32(view) != piece.crc32:
            raise DamagedError(f"{where} are damaged: their checksum does not hold", remedy=REMEDY)
        with self._counting:
            self.bytes_read += count


class SavedRows:
    """One tensor's rows, read where they are wanted: a `Source` of a declared tensor."""

    def __init__(self, reader: Reader, path: str) -> None:
        self._reader, self._path = reader, path

    def rows(self, start: int, stop: int, step: int = 1) -> Tensor:
        """Return rows start, start + step, … below stop."""
        return self._reader.turn(self._path, start, stop, step)

    def pick(self, ids: npt.NDArray[np.int64]) -> Tensor:
        """Return the rows of ids, which ascend."""
        return self._reader.pick(self._path, ids)


def _at_once(work: Callable[[Job], None], jobs: Sequence[Job]) -> None:
    """Do all jobs, READERS at a time; raise what the first one that fails raises."""
    with ThreadPoolExecutor(min(READERS, len(os.sched_getaffinity(0)))) as pool:
        for _ in pool.map(work, jobs):
            pass


def _unread(what: str, error: Exception) -> UnavailableError:
    """Return the error of a disk or store (OSError, or what its client raises) that gives nothing now: no damage."""
    return UnavailableError(
        f"{what} cannot be read: {in_words(error)}",
        remedy="see to the disk or the store and start again; every checkpoint stays as it is",
    )


def _dtype(entry: TensorEntry) -> torch.dtype:
    found: Any = getattr(torch, entry.dtype, None)
    if not isinstance(found, torch.dtype):
        raise ForeignError(
            f"this PyTorch knows no dtype {entry.dtype}", remedy="go on with the version of PyTorch that wrote it"
        )
    return found


def _buffer(entry: TensorEntry, buffer: Tensor | None) -> Tensor:
    dtype = _dtype(entry)
    fits = buffer is not None and tuple(buffer.shape) == entry.shape and buffer.dtype == dtype
    return buffer if buffer is not None and fits else torch.empty(entry.shape, dtype=dtype)
