"""Which rows of a run's tensors each of its processes writes. Pure: all come to the same answer without a word.

Rows that one process alone has up to date are written by it. Of what all have, a large tensor is divided evenly by
rows, and any other goes whole to whoever has least to write by then, the largest first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

SPLIT_BYTES = 4 << 20  # what is smaller is not worth a file in every process
FIRSTS = "random:"
"""Beginning of paths that are process 0's own: where its random numbers stand."""

Rows = tuple[int, int]
"""First row, and the one after the last."""
Share = dict[str, list[Rows]]
"""Rows by path; a tensor without dimensions is one row."""
Held = Mapping[str, Sequence[tuple[int, int, int]]]
"""By path, of tensors that no process has whole: first row, the one after the last, and the process that has them."""


def shares(tensors: Mapping[str, Tensor], processes: int, held: Held) -> list[Share]:
    """Return the rows that each process writes.

    Args:
        tensors: by path, as each process has them: shapes and dtypes are what is looked at.
    """
    found: list[Share] = [{} for _ in range(processes)]
    load = [0] * processes

    def give(process: int, path: str, start: int, stop: int) -> None:
        found[process].setdefault(path, []).append((start, stop))
        load[process] += _bytes(tensors[path]) * (stop - start) // max(1, _rows(tensors[path]))

    for path, pieces in held.items():
        for start, stop, process in pieces:
            give(process, path, start, stop)
    rest = [path for path in tensors if path not in held]
    for path in sorted(rest, key=lambda path: -_bytes(tensors[path])):  # of equal ones the first, everywhere
        tensor, rows = tensors[path], _rows(tensors[path])
        if path.startswith(FIRSTS):
            give(0, path, 0, rows)
        elif _bytes(tensor) >= SPLIT_BYTES and rows >= processes:
            cuts = [rows * process // processes for process in range(processes + 1)]
            for process in range(processes):
                give(process, path, cuts[process], cuts[process + 1])
        else:
            give(min(range(processes), key=load.__getitem__), path, 0, rows)
    return found


def _rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
