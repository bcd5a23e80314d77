"""Blocks of whole lines of a text file, in bounded memory, with the number of each line. Pure but for reading.

`delimited.py` parses the blocks. Lines that no parser should see (too long, a quotation mark that does not close, a
carriage return within) are taken out here and named; blank ones are passed over. So a block has as many rows as lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from twinstep.spec.errors import DataError
from twinstep.worker.data.events import Ints

MAX_LINE = 1 << 20  # bytes; a longer line is a fault: in real files it is a missing line end
_LF, _CR, _QUOTE = b"\n", b"\r", b'"'
_UTF8_BOM, _UTF16_BOMS = b"\xef\xbb\xbf", (b"\xff\xfe", b"\xfe\xff")
_TOO_LONG = f"is longer than {MAX_LINE:,} bytes"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Block:
    """Some whole lines."""

    text: bytes
    """The good lines, each with its line feed at the end; no carriage returns."""
    rows: Ints
    """Number of each good line, counted from 1."""
    bad: tuple[tuple[int, str], ...]
    """Number of each line taken out, and what is wrong with it."""


def blocks(stream: BinaryIO, *, name: str, chunk_bytes: int, quoted: bool) -> Iterator[Block]:
    """Yield the lines of a stream in blocks of about `chunk_bytes`; what they hold does not depend on it.

    Raises:
        DataError: the file is UTF-16.
    """
    row, carry, too_long = 1, b"", False  # too_long: the line that `carry` began was dropped for its length
    first = True
    while piece := stream.read(max(chunk_bytes, len(_UTF8_BOM)) if first else chunk_bytes):
        if first:
            if piece.startswith(_UTF16_BOMS):
                raise DataError(f"{name} cannot be read: it is UTF-16", remedy="write it as UTF-8")
            piece, first = piece.removeprefix(_UTF8_BOM), False
        end = piece.rfind(_LF) + 1
        if not end:
            carry = b"" if too_long else carry + piece
            if len(carry) > MAX_LINE + 2:  # the line end may have two bytes
                carry, too_long = b"", True
            continue
        begun = b"" if too_long else carry
        text, carry = piece[:end], piece[end:]
        lost: tuple[tuple[int, str], ...] = ()
        if too_long:
            lost, text = ((row, _TOO_LONG),), text[text.find(_LF) + 1 :]
            row, too_long = row + 1, False
        block = _block(begun + text, first=row, quoted=quoted)
        row += begun.count(_LF) + text.count(_LF)
        yield Block(text=block.text, rows=block.rows, bad=lost + block.bad)
        if len(carry) > MAX_LINE + 2:
            carry, too_long = b"", True
    if too_long:
        yield Block(text=b"", rows=np.zeros(0, np.int64), bad=((row, _TOO_LONG),))
    elif carry:
        yield _block(carry + _LF, first=row, quoted=quoted)


def _block(text: bytes, *, first: int, quoted: bool) -> Block:
    """Take the lines out of `text` that no parser should see; its first line has the number `first`."""
    text = text.replace(b"\r\n", _LF) if _CR in text else text
    array = np.frombuffer(text, dtype=np.uint8)
    ends = np.flatnonzero(array == _LF[0]) + 1
    starts = np.concatenate((np.zeros(1, np.int64), ends[:-1])) if len(ends) else ends
    why: dict[int, str] = {}
    if _CR in text:
        for line in np.unique(np.searchsorted(ends, np.flatnonzero(array == _CR[0]), side="right")).tolist():
            why[line] = "has a carriage return within it"
    if quoted and _QUOTE in text:
        counts = np.bincount(np.searchsorted(ends, np.flatnonzero(array == _QUOTE[0]), side="right"))
        for line in np.flatnonzero(counts % 2).tolist():
            why.setdefault(line, "has a quotation mark that does not close on its line")
    for line in np.flatnonzero(ends - starts > MAX_LINE + 1).tolist():
        why[line] = _TOO_LONG
    rows = first + np.arange(len(ends), dtype=np.int64)
    blank = np.flatnonzero(ends - starts == 1)
    if why or len(blank):
        out = np.union1d(blank, np.fromiter(why, dtype=np.int64, count=len(why)))
        good = np.setdiff1d(np.arange(len(ends)), out)
        text = b"".join(text[starts[i] : ends[i]] for i in good)
        rows = rows[good]
    return Block(text=text, rows=rows, bad=tuple((first + line, why[line]) for line in sorted(why)))
