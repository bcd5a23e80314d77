"""How many bytes an array takes in a TPU's memory, whose layouts are whole tiles of 8 rows of 128 lanes.

XLA keeps an array of two dimensions or more in tiles of its two minor ones, with the order that wastes least; a vector
in whole rows of lanes. Held by test to the TPU compiler's own count of a step's arguments.
"""

from __future__ import annotations

from math import prod

LANES, SUBLANES = 128, 8
VECTOR = 1024  # elements of a whole tile


def tiled_bytes(shape: tuple[int, ...], itemsize: int = 4) -> int:
    """Return the bytes of an array in tiles; of 64-bit integers half, since they are held in 32."""
    itemsize = min(itemsize, 4)
    if not prod(shape):
        return 0
    if len(shape) < 2:
        count = prod(shape)
        return itemsize * _up(count, min(VECTOR, max(LANES, 1 << (count - 1).bit_length())))
    *lead, rows, columns = shape
    return itemsize * prod(lead) * min(_tiles(rows, columns), _tiles(columns, rows))


def line_bytes(shape: tuple[int, ...], itemsize: int = 4) -> int:
    """Return the bytes of rows that lie in whole lines of their own (`placement.in_lines`)."""
    rows, width = shape
    return itemsize * _up(rows, min(SUBLANES, 1 << (max(rows, 1) - 1).bit_length())) * _up(width, LANES)


def is_copied(width: int) -> bool:
    """Say whether a step copies a table of such width, which lies by columns, into whole lanes to gather rows of it.

    The compiler lays a table so whose rows are no whole lanes, and no lane is wasted. It gathers from it as it lies
    where whole lanes would take more than twice as much, and copies it otherwise; measured for v5p, v6e and v7x.
    """
    return width % LANES != 0 and _up(width, LANES) <= 2 * width


def _tiles(rows: int, columns: int) -> int:
    return _up(rows, min(SUBLANES, 1 << (rows - 1).bit_length())) * _up(columns, LANES)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
