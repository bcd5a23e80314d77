"""Tensors into the files of one named directory of a place, each byte with its checksum; the manifest last."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from twinstep.worker.checkpoint.manifest import MANIFEST, Manifest, Piece, by_file, lay_out, rows_as_bytes
from twinstep.worker.checkpoint.place import Place

WRITERS = 2  # threads: one counts checksums while the other waits for the disk


def write_whole(
    place: Place,
    name: str,
    tensors: Mapping[str, Tensor],
    manifest: Manifest,
    *,
    check: Callable[[], None] = lambda: None,
) -> Manifest:
    """Write tensors under a name and return the manifest they got; it counts once its last file is written.

    Args:
        tensors: by path; contiguous, on the CPU.
        manifest: without files and tensors.
        check: raises where this process may no longer write there; asked first, and before the last file.

    Raises:
        OSError: or whatever the client of a store raises; what was written has no manifest then, and counts for
            nothing.
    """
    entries, files = lay_out(tensors)
    pieces = by_file(entries)
    check()
    place.begin(name)

    def write(file: str) -> dict[tuple[str, int], int]:
        views = [(path, piece, rows_as_bytes(tensors[path], piece.start, piece.stop)) for path, piece in pieces[file]]
        sums = {(path, piece.start): zlib.crc32(view) for path, piece, view in views}
        place.write(name, file, [view for _, _, view in views])
        return sums

    sums: dict[tuple[str, int], int] = {}
    with ThreadPoolExecutor(WRITERS) as pool:
        for found in pool.map(write, files):
            sums |= found

    def summed(path: str, piece: Piece) -> Piece:
        return piece.model_copy(update={"crc32": sums[path, piece.start]})

    whole = manifest.model_copy(
        update={
            "files": files,
            "tensors": {
                path: entry.model_copy(update={"pieces": tuple(summed(path, piece) for piece in entry.pieces)})
                for path, entry in entries.items()
            },
        }
    )
    check()
    place.commit(name, MANIFEST, whole.to_bytes())
    return whole
