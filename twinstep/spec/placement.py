"""Where the state and the batch live on a mesh of devices: one pure function, for every backend that has meshes.

Rules: batch leaves are split along their batch dimension; tables, and what optimizers keep of each row, along their
rows; what optimizers keep of parameters that are no tables along a dimension that the devices divide; all else is on
every device. Activations and gradients follow from these (GSPMD works that out).

Splitting an optimizer's state over the devices that share a batch is stage 1 of ZeRO (Rajbhandari et al. 2020): each
device keeps and updates its part; as much is sent as before, gradients reduced and scattered and parameters gathered,
in place of gradients reduced everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

from twinstep.spec.errors import CompileError

Spec = tuple[str | tuple[str, ...] | None, ...]
"""For each dimension the mesh axis (or axes) it is split over; None: not split. What JAX calls a PartitionSpec."""

DATA = "data"
"""The axis that batches are split over."""
SHARD_BYTES = 64 << 20  # a table below it is cheaper on every device than its lookups over the interconnect
SLICE_SHARD_BYTES = 1 << 30  # the same on a TPU slice, where a lookup moves the tokens of hundreds of devices
STATE_BYTES = 256 << 10  # an optimizer's tensor below it is read sooner than a parameter is gathered by itself


@dataclass(frozen=True, slots=True)
class Mesh:
    """Devices in a grid of named axes, as the user asks for them: `Mesh.of({"data": 8})`."""

    axes: tuple[tuple[str, int], ...]
    """Name and length of each axis. Batches are split over `data` (the first axis where none is called that)."""
    shard_bytes: int = SHARD_BYTES
    """Bytes from which a table is split along its rows."""
    state_bytes: int = STATE_BYTES
    """Bytes from which a tensor is split that an optimizer keeps of a parameter which is not."""

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if not names or len(set(names)) < len(names) or any(length < 1 for _, length in self.axes):
            raise CompileError(
                f"a mesh needs axes of different names, each at least 1 long, not {dict(self.axes)}",
                remedy='give names and lengths, {"data": 8}',
            )

    @classmethod
    def of(
        cls,
        axes: Mesh | Mapping[str, int],
        *,
        shard_bytes: int = SHARD_BYTES,
        state_bytes: int = STATE_BYTES,
    ) -> Mesh:
        """Return a mesh from names and lengths.

        Raises:
            CompileError: `axes` has none, two of a name, or one whose length is no whole number from 1.
        """
        if isinstance(axes, Mesh):
            return axes
        if not isinstance(axes, Mapping):
            raise CompileError(f"a mesh is names and lengths of axes, not {axes!r}", remedy='give {"data": 8}')
        for name, size in axes.items():
            if isinstance(size, bool) or not isinstance(size, Integral):
                raise CompileError(f"the mesh's axis {name!r} is {size!r} long", remedy='give {"data": 8}')
        return cls(tuple((str(name), int(size)) for name, size in axes.items()), shard_bytes, state_bytes)

    @classmethod
    def of_slice(cls, devices: int) -> Mesh:
        """Return the mesh of a TPU slice: all its devices on one axis, that batches are split over."""
        return cls(((DATA, devices),), SLICE_SHARD_BYTES)

    @property
    def size(self) -> int:
        """Devices in all."""
        return math.prod(length for _, length in self.axes)

    @property
    def data(self) -> tuple[str, int]:
        """Name and length of the axis that batches are split over."""
        lengths = dict(self.axes)
        name = DATA if DATA in lengths else self.axes[0][0]
        return name, lengths[name]

    def __str__(self) -> str:
        return " × ".join(f"{name} {length}" for name, length in self.axes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """One input of a program, as the rules see it."""

    name: str
    role: str
    """table, parameter, buffer, optimizer or batch."""
    shape: tuple[int, ...]
    itemsize: int
    """Bytes of an element."""
    of: str = ""
    """Name of the parameter that a tensor of an optimizer belongs to."""
    batch_dim: int | None = None
    """Position of a batch leaf's batch dimension; None: it has none."""
    by_rows: bool = False
    """Whether it may be held with rows added at its end, which nothing sees."""
    ring: bool = False
    """Whether it is a table that is split along its rows whatever its size, or what is kept of such a table's rows."""

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.itemsize


LANES = 128
"""Numbers side by side in a line of a TPU's memory."""


def in_lines(each: Placed) -> bool:
    """Say whether a TPU holds each row of a tensor in a whole line of its own.

    XLA lays a tensor of narrow rows by columns, so that no lane is wasted; a ring's step, which reads and writes rows,
    then turns all of it around, at every hop. Where lines take at most twice as much, a program asks for them from the
    start. Narrower rows are read as they lie, which the compiler prefers itself.
    """
    return each.by_rows and each.ring and len(each.shape) == 2 and is_line(each.shape[1])


def is_line(width: int) -> bool:
    """Say whether a row of this many numbers fills half a line or more, and not all of it."""
    return LANES <= 2 * width < 2 * LANES


@dataclass(frozen=True, slots=True)
class Placement:
    """The answer: one Spec an input, in the order given."""

    specs: tuple[Spec, ...]
    notes: tuple[str, ...]
    """Tables that are padded, or are on every device although they are large, and why."""
    extra: tuple[int, ...] = ()
    """Rows that are added to each, so that the devices divide them."""


def place(inputs: Sequence[Placed], mesh: Mesh) -> Placement:
    """Return where each input lives.

    Args:
        inputs: state and batch leaves, in any order.

    Raises:
        CompileError: the mesh does not divide a batch dimension.
    """
    axes = tuple(name for name, _ in mesh.axes)
    rows_over = axes[0] if len(axes) == 1 else axes
    notes: list[str] = []
    split: dict[str, int] = {}
    tables = {each.name for each in inputs if each.role == "table"}
    owned: dict[str, list[Placed]] = {}
    for each in inputs:
        owned.setdefault(each.of, []).append(each)
    for each in inputs:
        if each.role == "table" and mesh.size > 1 and (each.ring or each.bytes >= mesh.shard_bytes):
            short = -each.shape[0] % mesh.size
            by_its_rows = [other for other in owned.get(each.name, ()) if other.shape[:1] == each.shape[:1]]
            if not short or all(other.by_rows for other in (each, *by_its_rows)):
                split[each.name] = each.shape[0]
                if short:
                    notes.append(f"{each.name} is padded by {short} rows, so that {mesh.size} divide them")
            else:
                notes.append(
                    f"{each.name} is on every device: {each.shape[0]} rows do not divide by {mesh.size}, "
                    f"and the step does more than look up and update some of them; {short} more rows would"
                )

    def spec(each: Placed) -> Spec:
        whole: Spec = (None,) * len(each.shape)
        if each.role == "batch":
            return _of_leaf(each, mesh)
        if by_table(each):
            return (rows_over, *whole[1:])
        at = _state_cut(each, mesh) if each.role == "optimizer" and each.of not in tables else None
        return tuple(rows_over if dim == at else None for dim in range(len(whole)))

    def by_table(each: Placed) -> bool:
        owner = each.name if each.role == "table" else each.of
        return bool(owner in split and each.shape and each.shape[0] == split[owner])

    extra = tuple(-each.shape[0] % mesh.size if by_table(each) else 0 for each in inputs)
    return Placement(tuple(spec(each) for each in inputs), tuple(notes), extra)


def _state_cut(each: Placed, mesh: Mesh) -> int | None:
    """Return the dimension that an optimizer's tensor is split along: the first that the devices divide; None: none.

    Not asked of tables: a step updates the few rows that it looked up, and would have to gather all of them.
    """
    if mesh.size == 1 or each.bytes < mesh.state_bytes:
        return None
    return next((dim for dim, size in enumerate(each.shape) if size and size % mesh.size == 0), None)


def _of_leaf(leaf: Placed, mesh: Mesh) -> Spec:
    axis, length = mesh.data
    if leaf.batch_dim is None:
        return (None,) * len(leaf.shape)
    size = leaf.shape[leaf.batch_dim]
    if size % length:
        raise CompileError(
            f"the mesh does not divide the batch: {leaf.name} has {size} along dimension {leaf.batch_dim}, "
            f"axis {axis!r} has {length} devices",
            remedy=f"make the batch a multiple of {length}, or the axis shorter",
        )
    return tuple(axis if at == leaf.batch_dim else None for at in range(len(leaf.shape)))
