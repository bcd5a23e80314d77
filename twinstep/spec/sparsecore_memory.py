"""How much memory embedding tables take on a SparseCore device, by generation, before anything is compiled.

Tables, buffers and activations are counted exactly. What the compiler takes beside them is modelled from its own memory
reports; `tests/unit/embedding/test_sparsecore_tpu.py` holds the model to libtpu 0.0.42.1 for v5p, v6e and v7x: never
too low, too high by at most `DeviceBytes.margin`. For v4 nothing can be compiled (`topology.TPUS`), so its numbers are
held to nothing. What a tile holds is a rule of thumb, and held to nothing yet.

Legend: N SparseCores, S of a device; W stored width; B stacked samples of a SparseCore; U max_unique_ids_per_partition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from twinstep.spec.topology import TPUS

Generation = Literal["v4", "v5p", "v6e", "v7x"]
FLOAT = 4  # bytes; tables, slots and activations are float32
ROW_ALIGN = 8  # float32 of a row, and rows of a shard: 32 bytes; jax-tpu-embedding, round_up_dim_and_vocab_size
COO_BYTES = 12  # of a slot: embedding id, sample id, gain; jax-tpu-embedding's padded CSR
LANES = 128  # float32 of a TensorCore's row: narrower rows are padded to it
INT32 = 1 << 31
KIB = 1 << 10
RESERVED = 64 * KIB  # that a program with SparseCore work takes in any case; measured


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseCoreFacts:
    """One generation; None where nobody has published the number."""

    tiles: int
    tile_bytes: int | None
    """Memory of one tile (TileSpmem)."""
    copies_activations: bool
    """Whether activations and gradients are copied between the SparseCore's layout and the TensorCore's, whose rows are
    whole lanes. Measured for v5p (yes), v6e and v7x (no); taken to be so for v4, which asks for more."""
    source: str


_GUIDE = "SparseCore deep dive for large embedding models (Google)"
_DOCS = "cloud.google.com/tpu/docs"
_INFO = "jax 0.12, jax/_src/tpu_info.py"
FACTS: dict[Generation, SparseCoreFacts] = {
    "v4": SparseCoreFacts(
        tiles=16,
        tile_bytes=None,
        copies_activations=True,
        source=f"{_GUIDE}; {_DOCS}/v4",
    ),
    "v5p": SparseCoreFacts(
        tiles=16,
        tile_bytes=512 * KIB,
        copies_activations=True,
        source=f"{_INFO}; {_DOCS}/v5p",
    ),
    "v6e": SparseCoreFacts(
        tiles=16,
        tile_bytes=256 * KIB,
        copies_activations=False,
        source=f"{_INFO}; {_DOCS}/v6e",
    ),
    "v7x": SparseCoreFacts(
        tiles=16,
        tile_bytes=512 * KIB,
        copies_activations=False,
        source=f"{_INFO}; {_DOCS}/tpu7x",
    ),
}
"""By generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackShape:
    """What of a stack decides its memory."""

    rows: int
    """Logical rows of its tables."""
    width: int
    """Columns."""
    samples_per_core: int
    """B."""
    max_ids: int
    max_unique: int
    """U."""
    devices: int
    slots: int = 0
    """Numbers that the optimizer keeps of each value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBytes:
    """Bytes of one device."""

    tables: int
    """Stored rows with padding, and slots: exact."""
    inputs: int
    """One batch's buffers at the limits: exact."""
    activations: int
    """Of all features, once: exact. Gradients take as much."""
    forward: int
    """The compiler's temporaries of a lookup."""
    backward: int
    """Likewise of an update."""
    margin: int
    """Bytes by which `forward` and `backward` may be too high: the compiler keeps small stacks on the SparseCore, which
    the model does not count on."""
    tile: int
    """The most that one tile holds of one stack."""
    tile_limit: int | None

    @property
    def hbm(self) -> int:
        """Tables, two batches in flight, activations with their gradients, and the larger of the two stacks."""
        return self.tables + 2 * self.inputs + 2 * self.activations + max(self.forward, self.backward)

    @property
    def fits_tile(self) -> bool | None:
        """Whether a tile holds it; None: nobody has published how much a tile has."""
        return None if self.tile_limit is None else self.tile <= self.tile_limit


def device_bytes(generation: Generation, stacks: Sequence[StackShape]) -> DeviceBytes:
    """Return what stacks take on one device of a generation.

    Args:
        generation: of the TPU.
        stacks: all that one device holds a part of; not packed.
    """
    facts, cores = FACTS[generation], TPUS[generation].sparse_cores_per_device
    tables = inputs = activations = forward = backward = margin = tile = 0
    for each in stacks:
        count = cores * each.devices
        width = _up(each.width, ROW_ALIGN)
        rows = _up(each.rows, ROW_ALIGN * count) // count
        tables += cores * rows * width * FLOAT * (1 + each.slots)
        slots = cores * count * _up(each.max_ids, ROW_ALIGN)
        inputs += slots * COO_BYTES + cores * max(count, ROW_ALIGN) * 4
        samples = cores * each.samples_per_core
        mine = samples * width * FLOAT
        activations += mine
        copied = samples * _up(width, LANES) * FLOAT if facts.copies_activations else 0
        # The stack in HBM after Google's guide: (2W+1)·U·R floats forward, 3W·U·R backward. R, the compiler's count of
        # logical replicas, is taken as the number of devices; no stack measured so far needed as much.
        ahead = (2 * width + 1) * each.max_unique * each.devices * FLOAT
        back = 3 * width * each.max_unique * each.devices * FLOAT
        forward += max(copied, mine) + ahead
        backward += copied + mine + back
        margin += max(ahead, back) + mine
        asked = each.max_ids * COO_BYTES + each.max_unique * (4 + width * FLOAT)
        tile = max(tile, -(-(asked + each.samples_per_core * width * FLOAT) // facts.tiles))
    return DeviceBytes(
        tables=tables,
        inputs=inputs,
        activations=activations,
        forward=forward + RESERVED,
        backward=backward + RESERVED,
        margin=margin + RESERVED,
        tile=tile,
        tile_limit=facts.tile_bytes,
    )


def in_lines(rows: int, width: int, named: int) -> bool:
    """Say whether the TensorCore updates rows of a stored table as lines of whole lanes, where they lie.

    A line is kept for each piece of a row, the most that rows and lines are both made of, and each place in a line that
    a piece may be at. Where that is more than the table in whole lanes, rows are updated in a copy of it.

    Args:
        rows: stored rows of a device.
        width: of a stored row.
        named: rows that a device may be told of in a step.
    """
    piece = math.gcd(width, LANES)
    pieces, places = width // piece, LANES // piece
    countable = (rows + named) * pieces < INT32
    return rows * width % LANES == 0 and countable and named * pieces * places <= rows * -(-width // LANES)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
