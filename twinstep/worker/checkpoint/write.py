"""Tensors into the files of one named directory of a place, each byte with its checksum; the manifest last."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from torch import Tensor

from twinstep.worker.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    Part,
    Piece,
    TensorEntry,
    entries_of,
    lay_out,
    merged,
    rows_as_bytes,
    whole_parts,
)
from twinstep.worker.checkpoint.place import Place

WRITERS = 4  # threads: some count checksums while others wait for the disk, which takes several writes at once


class Written(NamedTuple):
    """What one process has written of a checkpoint."""

    entries: dict[str, TensorEntry]
    """By path, with the pieces that it wrote."""
    files: dict[str, int]
    """Bytes of each."""


def write_whole(
    place: Place,
    name: str,
    tensors: Mapping[str, Tensor],
    manifest: Manifest,
    *,
    check: Callable[[], None] = lambda: None,
    prefix: str = "data",
) -> Manifest:
    """Write tensors under a name and return the manifest they got; it counts once its last file is written.

    Args:
        tensors: by path; contiguous, on the CPU.
        manifest: without files and tensors.
        check: raises where this process may no longer write there; asked first, and before the last file.
        prefix: beginning of the names of files: where two may write under one name, each has its own.

    Raises:
        OSError: or whatever the client of a store raises; what was written has no manifest then, and counts for
            nothing.
    """
    check()
    place.begin(name)
    written = write_parts(place, name, whole_parts(tensors), prefix=prefix)
    check()
    return commit(place, name, manifest, [written])


def write_parts(
    place: Place,
    name: str,
    parts: Sequence[Part],
    *,
    prefix: str = "data",
    check: Callable[[], None] = lambda: None,
) -> Written:
    """Write parts of a checkpoint that was begun; all of it is durable when this returns.

    Args:
        prefix: beginning of the names of files; processes that write one checkpoint have each its own.
        check: raises where there is no use in writing further; asked before each file.
    """
    placed, files = lay_out(parts, prefix=prefix)
    by_file: dict[str, list[tuple[Part, Piece]]] = {file: [] for file in files}
    for part, piece in placed:
        by_file[piece.file].append((part, piece))

    def write(file: str) -> list[tuple[str, Piece]]:
        check()
        summed: list[tuple[str, Piece]] = []

        def views() -> Iterator[memoryview]:
            for part, piece in by_file[file]:
                view = rows_as_bytes(part.rows, piece.start - part.start, piece.stop - part.start)
                summed.append((part.path, piece.model_copy(update={"crc32": zlib.crc32(view)})))
                yield view

        place.write(name, file, views())
        return summed

    with ThreadPoolExecutor(WRITERS) as pool:
        pieces = [piece for found in pool.map(write, files) for piece in found]
    return Written(entries_of(parts, pieces), files)


def commit(place: Place, name: str, manifest: Manifest, written: Sequence[Written]) -> Manifest:
    """Write the last file of a checkpoint, which makes it count, and return what it says.

    Args:
        written: what each process wrote.

    Raises:
        ValueError: that does not make all rows of all tensors, each once.
    """
    entries = merged([each.entries for each in written])
    files = {file: size for each in written for file, size in each.files.items()}
    whole = manifest.model_copy(update={"files": files, "tensors": entries})
    place.commit(name, MANIFEST, whole.to_bytes())
    return whole
