"""The devices of a program as a ring: which of its state is split by rows over them, and how those rows lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from twinstep.spec.errors import CompileError
from twinstep.spec.placement import LANES
from twinstep.worker.compile.capture import Captured
from twinstep.worker.compile.strategies import RingEmbedding
from twinstep.worker.embedding.ring.device.rows import Ring

WORD = 4
"""Bytes of an element of which a DMA can take a single row: two rows of bfloat16 share a line's words, so the kernels
would have the whole table copied."""


@dataclass(frozen=True, slots=True)
class RingOn:
    """The devices of a program as a ring, and which of its state is split by rows over them."""

    mesh: Mesh
    ring: Ring
    by_rows: frozenset[int]
    """Slots of the state."""
    lined: frozenset[int] = frozenset()
    """Of them those whose rows lie in whole lines though they are narrower (`placement.in_lines`), a DMA each."""
    one_line: frozenset[int] = frozenset()
    """Of them those of which a row is one line of a TPU's memory: the Pallas kernel looks them up, a DMA a row."""
    interpret: Any = False
    """`pltpu.InterpretParams()` runs the kernel where no TPU is."""

    @classmethod
    def of(
        cls, captured: Captured, mesh: Mesh | None, specs: Sequence[Sequence[Any]], lines: Sequence[bool] = ()
    ) -> RingOn | None:
        """Return it for a captured step that asks for a ring and has a mesh; None: there is none.

        Args:
            captured: the step.
            mesh: its devices.
            specs: of each slot of the state, the axis or axes that each dimension is split over.
            lines: of each slot, whether a TPU holds its rows in whole lines; empty: of none.

        Raises:
            CompileError: a table that was named for the ring is not split by rows.
        """
        wanted = captured.context.strategy(RingEmbedding)
        if wanted is None or mesh is None or mesh.size == 1:
            return None
        by_rows = frozenset(slot for slot, spec in enumerate(specs) if spec and spec[0] is not None)
        slots = captured.context.slots
        tables = [slot for slot in range(captured.num_state) if slots[slot].role == "parameter"]
        for slot in tables:
            shape = captured.example[slot].shape
            if len(shape) == 2 and wanted.names(slots[slot].name) and slot not in by_rows:
                raise _not_split(slots[slot].name, shape[0], mesh.size)
        names = mesh.axis_names
        axis = names[0] if len(names) == 1 else tuple(names)
        if mesh.devices.flat[0].platform != "tpu":
            return cls(mesh, Ring(axis, mesh.size, search="scan"), by_rows)
        lines = lines or [False] * captured.num_state
        whole = [slot for slot in by_rows if captured.example[slot].element_size() == WORD]
        one_line = frozenset(slot for slot in whole if _one_line(captured.example[slot].shape, lines[slot]))
        lined = frozenset(slot for slot in whole if lines[slot])
        joined = {getattr(device, "slice_index", 0) for device in mesh.devices.flat}  # no DMA goes between slices
        ring = Ring(axis, mesh.size, search="sort")
        return cls(mesh, ring, by_rows, lined, one_line if len(joined) == 1 else frozenset())

    def on_each(self, local: Callable[..., Any], arguments: tuple[Any, ...], whole: int | None = None) -> Any:
        """Run `local` on each device's parts of arrays, all split along dimension 0; those at `whole` are not."""
        split, same = P(self.ring.axis), P()  # type: ignore[no-untyped-call]
        specs = tuple(same if place == whole else split for place in range(len(arguments)))
        return jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=split, check_vma=False)(*arguments)


def _one_line(shape: Sequence[int], lined: bool) -> bool:
    """Say whether each row of a tensor is one line of a TPU's memory: it can be named as [R, 1, D] without a copy."""
    return len(shape) == 2 and (shape[1] == LANES or (lined and shape[1] < LANES))


def _not_split(name: str, rows: int, devices: int) -> CompileError:
    return CompileError(
        f"{name} cannot be passed around a ring: {devices} devices do not divide its {rows} rows, and its optimizer "
        "updates all of them or the step reads it whole",
        remedy=f"give it {-(-rows // devices) * devices} rows (data.rows), or an optimizer that leaves unused rows "
        "alone: sgd without momentum, adagrad, rowwise_adagrad",
    )
