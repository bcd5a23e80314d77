"""The layout of one checkpoint: which bytes of which file are which rows of which tensor, and their checksums. Pure.

A checkpoint is a directory of data files and `manifest.json`. A tensor lies in pieces of whole rows (dimension 0), at
most PIECE_BYTES each where a row is not larger, so that a reader of some rows reads little else; pieces are packed into
files of about FILE_BYTES. Every byte of a data file belongs to one piece, and each piece has its CRC-32, which finds
any one flipped bit; the manifest has a SHA-256 over itself. Tensors are raw bytes, little endian, in row-major order,
by logical name and without the padding of any device layout.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from twinstep.worker.checkpoint.errors import DamagedError, ForeignError

MANIFEST = "manifest.json"
FORMAT = 1
PIECE_BYTES = 16 << 20
FILE_BYTES = 64 << 20
REMEDY = "an older checkpoint is taken where there is one; remove this one, or bring its files back"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Piece(_Part):
    """Rows of a tensor and where they lie."""

    start: int
    """First row; a tensor without dimensions counts as one row."""
    stop: int
    file: str
    offset: int
    size: int
    """Bytes."""
    crc32: int = 0


class TensorEntry(_Part):
    """One tensor."""

    shape: tuple[int, ...]
    dtype: str
    """As torch names it: float32, int64, bfloat16."""
    pieces: tuple[Piece, ...]

    @property
    def rows(self) -> int:
        """Rows of dimension 0."""
        return self.shape[0] if self.shape else 1


class Manifest(_Part):
    """Everything a checkpoint says of itself."""

    format: int = FORMAT
    number: int = Field(ge=0)
    """Counts the checkpoints of a place: the highest is the newest, whatever clocks say."""
    step: int = Field(ge=0)
    """Steps that were done."""
    written_at: float
    """Unix seconds on the writer's clock; for people only."""
    scores: dict[str, float] = {}
    """Held-out scores of this very state, where it was evaluated."""
    about: dict[str, Any] = {}
    """What the writer wants back: loader position, counts, spec, versions, compile key."""
    files: dict[str, int]
    """Bytes of each data file."""
    tensors: dict[str, TensorEntry]

    def to_bytes(self) -> bytes:
        """Return the file."""
        body = self.model_dump(mode="json")
        text = json.dumps(body, sort_keys=True, allow_nan=False)
        return json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "manifest": text}).encode()

    @classmethod
    def from_bytes(cls, content: bytes, *, where: str) -> Manifest:
        """Read the file.

        Raises:
            DamagedError: it is not what `to_bytes` wrote.
            ForeignError: it is what another version wrote, in another format.
        """
        try:
            outer = json.loads(content)
            text = outer["manifest"]
            same = hashlib.sha256(text.encode()).hexdigest() == outer["sha256"]
            body = json.loads(text) if same else {}
        except (ValueError, TypeError, KeyError, AttributeError):
            same, body = False, {}
        if not same:
            raise DamagedError(f"{where}/{MANIFEST} is damaged: its checksum does not hold", remedy=REMEDY)
        if body.get("format") != FORMAT:
            raise ForeignError(
                f"{where} is of format {body.get('format')}, and this version of Twinstep reads format {FORMAT}",
                remedy="go on with the version of Twinstep that wrote it",
            )
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            at = ".".join(str(part) for part in error.errors()[0]["loc"])
            raise ForeignError(  # its checksum holds
                f"{where}/{MANIFEST} is not as this version of Twinstep writes it: {at}: {error.errors()[0]['msg']}",
                remedy="go on with the version of Twinstep that wrote it",
            ) from None


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Rows of one tensor, as one process writes them."""

    path: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    """Which row the first of `rows` is."""
    rows: Tensor
    """[n, …], contiguous, on the CPU; the tensor itself where it has no dimensions."""


def whole_parts(tensors: Mapping[str, Tensor]) -> list[Part]:
    """Return all rows of tensors by path."""
    return [Part(path, tuple(tensor.shape), 0, tensor) for path, tensor in tensors.items()]


def lay_out(parts: Iterable[Part], *, prefix: str = "data") -> tuple[list[tuple[Part, Piece]], dict[str, int]]:
    """Return where the rows of each part go, piece by piece (checksums still 0), and each file's bytes.

    Args:
        prefix: beginning of the names of files; processes that write one checkpoint have each its own.
    """
    placed: list[tuple[Part, Piece]] = []
    files: dict[str, int] = {}
    name = ""
    for part in parts:
        for start, stop, size in _row_ranges(part.rows):
            if not name or (files[name] + size > FILE_BYTES and files[name]):
                name = f"{prefix}-{len(files):05d}"
                files[name] = 0
            first, last = part.start + start, part.start + stop
            placed.append((part, Piece(start=first, stop=last, file=name, offset=files[name], size=size)))
            files[name] += size
    return placed, files


def entries_of(parts: Iterable[Part], pieces: Iterable[tuple[str, Piece]]) -> dict[str, TensorEntry]:
    """Return an entry for each tensor that there are parts of, with its pieces in the order of rows."""
    found: dict[str, list[Piece]] = {}
    for path, piece in pieces:
        found.setdefault(path, []).append(piece)
    return {
        part.path: TensorEntry(
            shape=part.shape,
            dtype=str(part.rows.dtype).removeprefix("torch."),
            pieces=tuple(sorted(found.get(part.path, ()), key=lambda piece: piece.start)),
        )
        for part in parts
    }


def merged(all_entries: Sequence[Mapping[str, TensorEntry]]) -> dict[str, TensorEntry]:
    """Return the entries of one checkpoint that several processes wrote.

    Raises:
        ValueError: they are not of the same tensors, or a row was written twice or by nobody.
    """
    found: dict[str, TensorEntry] = {}
    for entries in all_entries:
        for path, entry in entries.items():
            before = found.get(path, entry.model_copy(update={"pieces": ()}))
            if (before.shape, before.dtype) != (entry.shape, entry.dtype):
                raise ValueError(f"processes hold {path} with different shapes or dtypes")
            pieces = sorted((*before.pieces, *entry.pieces), key=lambda piece: piece.start)
            found[path] = entry.model_copy(update={"pieces": tuple(pieces)})
    for path, entry in found.items():
        ends = [0, *(piece.stop for piece in entry.pieces)]
        starts = [*(piece.start for piece in entry.pieces), entry.rows if 0 not in entry.shape else 0]
        if ends != starts:
            raise ValueError(f"rows of {path} were written twice or by nobody")
    return found


def _row_ranges(tensor: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, bytes) of a tensor's pieces; a tensor without elements has none."""
    rows = tensor.shape[0] if tensor.dim() else 1
    total = tensor.numel() * tensor.element_size()
    if not total:
        return
    row = total // rows
    step = max(1, PIECE_BYTES // row)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        yield start, stop, (stop - start) * row


def rows_as_bytes(tensor: Tensor, start: int, stop: int) -> memoryview:
    """Return rows of a contiguous tensor on the CPU as the bytes themselves, not a copy."""
    rows = tensor.shape[0] if tensor.dim() else 1
    flat = tensor.reshape(-1).view(torch.uint8)
    row = flat.numel() // rows
    return flat[start * row : stop * row].numpy().data
